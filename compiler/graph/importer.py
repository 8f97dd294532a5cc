"""Import an ONNX file or proto as a checked graph with static shapes.

Stages: `read` or `read_mapped` (the file), `open_model` (validate, normalise), `read_graph` (file passes, shape
inference), `import_model` (passes that repeat onnxruntime's rewrites).
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Container, Iterator
from math import prod
from pathlib import Path
from zipfile import is_zipfile

import onnx
import onnx_ir as ir

from celosia.compiler.graph.errors import ModelError
from celosia.compiler.graph.external_data import Origin, attach, read_all, read_small
from celosia.compiler.graph.importing.normalise import for_checker, normalise_model
from celosia.compiler.graph.importing.range_lengths import MAX_LIST_ELEMENTS, fixed_ranges
from celosia.compiler.graph.importing.shape_inference import corrected_window_shapes, infer_with_onnx
from celosia.compiler.graph.importing.validation import element_type_error, validation_error
from celosia.compiler.graph.operands import quantisation
from celosia.compiler.graph.passes import Pipeline
from celosia.compiler.graph.pipeline import FILE_PASSES, IMPORT_PASSES
from celosia.compiler.graph.values import attribute, is_op, shape
from celosia.compiler.ops import op_spec
from celosia.compiler.program.host.hostops.value_types import parameter_shape_error


def load(source: str | Path | onnx.ModelProto) -> ir.Model:
    """Import a model whose input sizes are all numbers, with the shapes of all values inferred.

    Raises ModelError, also where an input size is open.
    """
    model = import_model(*open_model(source))
    require_static(model)
    return model


def open_model(source: str | Path | onnx.ModelProto) -> tuple[onnx.ModelProto, Origin]:
    """Open, validate and normalise a model; return it and where it is from. Raises ModelError.

    No pass runs here: `import_model` goes on from the result, and callers that only look at inputs and shapes need no
    more. Large constants in other files stay there (graph/external_data.py).
    """
    if isinstance(source, onnx.ModelProto):
        proto, origin = source, Origin("the model")
    else:
        proto, origin = read_mapped(source), Origin(str(source), _folder(source))
    if not proto.graph.node and not proto.graph.output:
        raise ModelError(f"{origin} holds no graph; give an ONNX model")
    if why := validation_error(proto, origin.folder):
        raise ModelError(f"{origin} is not a valid ONNX model: {why}")
    return normalise_model(proto), origin


def import_model(proto: onnx.ModelProto, origin: Origin, passes: Pipeline = IMPORT_PASSES) -> ir.Model:
    """Return the graph of an opened model after `passes`. Raises ModelError."""
    model = read_graph(proto, origin)
    passes.run_import(model)
    return model


def read_graph(proto: onnx.ModelProto, origin: Origin) -> ir.Model:
    """Return the graph of an opened model after FILE_PASSES, with all shapes inferred. Raises ModelError."""
    try:
        with _bounded_memory(INFERENCE_BYTES + 16 * proto.ByteSize()):
            onnx.checker.check_model(for_checker(proto))
            for file_pass in FILE_PASSES:
                proto = file_pass.run(proto)
            shaped = with_inferred_shapes(proto)
        if why := element_type_error(shaped):
            raise ModelError(why)
        model: ir.Model = ir.from_proto(shaped)
        attach(model, origin.folder)
    except MemoryError:
        raise ModelError(f"{origin} holds shapes that take too much memory to infer") from None
    except Exception as error:  # onnx raises several unrelated classes for a broken model
        raise ModelError(f"{origin} is not a valid ONNX model: {_first_line(error)}") from None
    for node in model.graph:
        if node.op_type == "Loop" or (node.op_type == "Scan" and model.graph.opset_imports.get("", 9) >= 9):
            _type_scanned(node)
    for value in model.graph.outputs:
        if value.type is None:  # a pass finds out, from the operator that makes it
            value.type = ir.TensorType(ir.DataType.UNDEFINED)
    return model


def check_parameters(model: ir.Model) -> None:
    """Raise ModelError where scales or zero points do not fit what they quantise, as far as shapes are known.

    Call it after the graph passes: onnxruntime does not look at the parameters of patterns that it fuses, either.
    """
    for node in model.graph.all_nodes():
        if not is_op(node, "QuantizeLinear", "DequantizeLinear") or not node.inputs:
            continue
        x, axis, block = node.inputs[0], attribute(node, "axis", 1), attribute(node, "block_size", 0)
        for value in quantisation(node):
            parameters = shape(value) if value is not None else None
            if x is None or x.shape is None or parameters is None:
                continue
            sizes = [size if isinstance(size, int) and size >= 0 else None for size in x.shape]
            if why := parameter_shape_error(parameters, sizes, axis, block):
                raise ModelError(f"{node.op_type} ({node.name or node.outputs[0].name}) has {why}")


def _type_scanned(node: ir.Node) -> None:
    """Give the results of the body of a Loop or Scan the types of the node's outputs, less the axis of the iterations.

    onnx infers the outputs' types but not the body's. A run without iterations returns an empty tensor of this type.
    """
    body = node.attributes["body"].as_graph()
    axes = node.attributes["scan_output_axes"].as_ints() if "scan_output_axes" in node.attributes else ()
    states = len(node.inputs) - (2 if node.op_type == "Loop" else node.attributes["num_scan_inputs"].as_int())
    scanned = body.outputs[states + (node.op_type == "Loop") :]  # the first result of a Loop's body is its condition
    for value, returned, axis in zip(node.outputs[states:], scanned, [*axes, *([0] * len(scanned))]):
        if isinstance(value.type, ir.TensorType):
            returned.type = ir.TensorType(value.type.dtype)
        if value.shape is not None and -len(value.shape) <= axis < len(value.shape):
            sizes = list(value.shape)
            del sizes[axis]
            returned.shape = ir.Shape(sizes)


INFERENCE_BYTES = 1 << 29
"""Bytes that onnx may allocate to check a model and infer its shapes, beside 16 times the model's own bytes."""


@contextlib.contextmanager
def _bounded_memory(more: int) -> Iterator[None]:
    """Raise MemoryError in this context where the process allocates `more` bytes.

    onnx writes down each element of the lists of sizes that it infers, and a model of a few bytes may have lists of
    2**40 elements. Systems without /proc have no bound.
    """
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except OSError:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    bound = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (bound if soft == resource.RLIM_INFINITY else min(bound, soft), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


MAX_BYTES = (1 << 31) - 1
"""Size of the largest file that protobuf reads, in bytes."""


def read_mapped(path: str | Path) -> onnx.ModelProto:
    """Read the model in a file, but leave its large constants in their other files. Raises ModelError."""
    model = read(Path(path), data=False)
    with _readable(Path(path)):
        read_small(model, _folder(path))
    return model


def _folder(path: str | Path) -> str:
    """Return the absolute path of the folder in which a model's file lies."""
    return os.path.abspath(Path(path).parent)


def read(path: Path, data: bool = True) -> onnx.ModelProto:
    """Read the model in a file; with `data`, also its constants in other files. Raises ModelError."""
    with _readable(path):
        if path.is_char_device() or path.is_block_device():
            raise ModelError(f"{path} is a device; give an ONNX file")
        if (size := path.stat().st_size) > MAX_BYTES:
            raise ModelError(
                f"{path} has {size:,} bytes, and ONNX reads {MAX_BYTES:,} at most; save constants in a file beside it"
            )
        model: onnx.ModelProto = onnx.load(path, load_external_data=False)
        if data:
            read_all(model, _folder(path))
    return model


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Raise ModelError in this context where the file at `path`, or one that it names, cannot be read."""
    try:
        yield
    except FileNotFoundError:
        raise ModelError(f"there is no model at {path}") from None
    except IsADirectoryError:
        raise ModelError(f"{path} is a folder; give an ONNX file") from None
    except ModelError:
        raise
    except Exception as error:
        if path.is_file() and is_zipfile(path):
            raise ModelError(f"{path} is an archive, as Programs are; give the ONNX model") from None
        raise ModelError(f"{path} cannot be read as ONNX: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    """Return the first line of an error of onnx that says what is wrong, with the node that it is about."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    context = [line.removeprefix("==> Context: Bad node spec for ") for line in lines if line.startswith("==> Context")]
    if lines[0].endswith(":"):
        return " ".join(lines[:3])
    return ", ".join([lines[0], *context[:1]])


def with_inferred_shapes(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return `proto` with the shapes and types of its inner values, as far as they can be inferred.

    The model's own declarations of inner values count only where nothing can be inferred: they may be wrong.

    Where onnx infers other windows than onnxruntime computes, the corrected values become inputs and inference starts
    again, so that all shapes that depend on them are corrected, too.
    """
    inferable = onnx.ModelProto()
    inferable.CopyFrom(proto)
    _clear_matrices(inferable.graph)
    empty_lists = {tensor.name for tensor in inferable.graph.initializer if list(tensor.dims) == [0]}
    for node in inferable.graph.node:
        if node.op_type == "Squeeze" and empty_lists.intersection(node.input[1:]):
            del node.input[1:]  # onnxruntime takes an empty list of axes as all axes of size 1
        if node.domain == "com.microsoft" and op_spec(node.op_type).shape_like and not _has_own_shape_rule(node):
            _replace_by_onnx_operator(node)
    overruled: dict[str, onnx.ValueInfoProto] = {}
    inferred = _infer_values(inferable, proto)
    while corrected := corrected_window_shapes(inferable.graph, inferred):  # what follows from them is inferred again
        overruled |= corrected
        remaining = [node for node in inferable.graph.node if node.output[0] not in corrected]
        del inferable.graph.node[:]
        inferable.graph.node.extend(remaining)
        inferable.graph.input.extend(corrected.values())
        inferred = _infer_values(inferable, proto)
    inferable.CopyFrom(proto)
    del inferable.graph.value_info[:], inferable.graph.output[:]
    outputs = {value.name for value in inferred.output}
    inferable.graph.value_info.extend(inferred.value_info)
    inferable.graph.value_info.extend(value for name, value in overruled.items() if name not in outputs)
    inferable.graph.output.extend(overruled.get(value.name, value) for value in inferred.output)
    return inferable


def _clear_matrices(graph: onnx.GraphProto) -> None:
    """Clear the values of constants on which no shape depends, so that onnx does not copy them to infer shapes."""
    for tensor in graph.initializer:
        if len(tensor.dims) > 1 and prod(tensor.dims) > MAX_LIST_ELEMENTS:
            for name in ("raw_data", "float_data", "double_data", "int32_data", "int64_data", "uint64_data"):
                tensor.ClearField(name)


DATA_DEPENDENT_OPS = frozenset(("Compress", "If", "NonMaxSuppression", "NonZero", "Unique"))
"""Operators whose result sizes depend on data: sizes that a model declares for them were those of one input."""


def _data_dependent_tensors(graph: onnx.GraphProto, known: Container[str]) -> set[str]:
    """Return the tensors whose sizes depend on data, except those whose shape is `known`."""
    varying: set[str] = set()
    for node in graph.node:
        if node.op_type in DATA_DEPENDENT_OPS or varying.intersection(node.input):
            varying.update(name for name in node.output if name not in known)
    return varying


def _infer_values(inferable: onnx.ModelProto, proto: onnx.ModelProto) -> onnx.GraphProto:
    """Return the graph of `inferable`, which is `proto` with stand-in operators, with the types that onnx infers.

    Inference runs twice: without the model's declarations, then with those of tensors that the first run left open.
    """
    declared = {value.name: value for value in (*proto.graph.value_info, *proto.graph.output)}
    outputs = [value.name for value in proto.graph.output]
    inputs = {value.name: value for value in inferable.graph.input}
    complete: dict[str, onnx.ValueInfoProto] = {}
    for declarations in ({}, declared):
        del inferable.graph.value_info[:], inferable.graph.output[:]
        varying = _data_dependent_tensors(proto.graph, complete)
        chosen = {name: value for name, value in declarations.items() if name not in varying} | complete | inputs
        inferable.graph.value_info.extend(value for name, value in chosen.items() if name not in {*outputs, *inputs})
        inferable.graph.output.extend(chosen.get(name, onnx.ValueInfoProto(name=name)) for name in outputs)
        shaped = infer_with_onnx(inferable).graph
        complete = {value.name: value for value in (*shaped.value_info, *shaped.output) if _is_complete(value.type)}
        complete = fixed_ranges(shaped) | complete
    return shaped


def _is_complete(kind: onnx.TypeProto) -> bool:
    """Return whether `kind` is a tensor type whose element type and sizes are all known."""
    tensor = kind.tensor_type
    known = tensor.elem_type != onnx.TensorProto.UNDEFINED and tensor.HasField("shape")
    return known and all(dim.HasField("dim_value") for dim in tensor.shape.dim)


def _has_own_shape_rule(node: onnx.NodeProto) -> bool:
    """Return whether an operator of onnxruntime needs its tensor expression for its shape and type.

    So it is where its result is float (no output scale) or its channels come last: ONNX's operator would give others.
    """
    scale = op_spec(node.op_type).scale
    floats = scale is not None and not any(node.input[scale : scale + 1])
    return floats or any(attr.name == "channels_last" and attr.i for attr in node.attribute)


def _replace_by_onnx_operator(node: onnx.NodeProto) -> None:
    """Turn an operator of onnxruntime, in place, into ONNX's operator whose result has the same shape and type.

    Only for shape inference: onnx does not know onnxruntime's operators.
    """
    spec, names = op_spec(node.op_type), list(node.input)
    op = spec.shape_like
    inputs = names if op == node.op_type else [names[number] for number in spec.data_among(len(names))]
    attrs = [attr for attr in node.attribute if attr.name not in ("channels_last", "opset") and op != "Identity"]
    node.op_type, node.domain = op, ""
    del node.input[:], node.attribute[:]
    node.input.extend(inputs)
    node.attribute.extend(attrs)


SEQUENCES = frozenset(("SequenceConstruct", "SequenceEmpty", "SplitToSequence"))
"""Operators that make sequences; sizes in such models are known at run time only."""


def has_sequences(model: ir.Model) -> bool:
    """Return whether a model uses sequences or optionals, so that sizes are known at run time only."""
    sequence_input = any(isinstance(value.type, (ir.SequenceType, ir.OptionalType)) for value in model.graph.inputs)
    return sequence_input or any(node.op_type in SEQUENCES for node in model.graph)


def require_static(model: ir.Model, allow_open: bool = False) -> None:
    """Raise ModelError where an input's shape is unknown or not constant, except in models of sequences.

    allow_open: accept open sizes of inputs whose number of axes is known.
    """
    if has_sequences(model):
        return
    for value in model.graph.inputs:
        if value.shape is None:
            raise ModelError(
                f"input {value.name!r} has no shape; give it one with --shape (shapes= in Python), or export the model "
                "with one"
            )
        for axis, size in enumerate(value.shape):
            if not isinstance(size, int):
                if not allow_open:
                    sizes = ",".join(str(other if isinstance(other, int) else 1) for other in value.shape)
                    raise ModelError(
                        f"input {value.name!r} has a dynamic dimension {axis}; give its size, as --shape "
                        f"{value.name}={sizes} (shapes= in Python)"
                    )
            elif size < 0:
                raise ModelError(f"input {value.name!r} has a negative dimension {axis}: {size}")
