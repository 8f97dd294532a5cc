"""ONNX files and protos to a checked graph with static shapes."""

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
from celosia.compiler.graph.importing.external_data import Origin, attach, read_all, read_small
from celosia.compiler.graph.importing.normalise import for_checker, normalise_model
from celosia.compiler.graph.importing.range_lengths import LONGEST, lengths
from celosia.compiler.graph.importing.shape_inference import corrected_window_shapes, inferred
from celosia.compiler.graph.importing.validation import mistyped, validation_error
from celosia.compiler.graph.operands import quantisation
from celosia.compiler.graph.passes import Pipeline
from celosia.compiler.graph.pipeline import FILE_PASSES, IMPORT_PASSES
from celosia.compiler.graph.values import attribute, is_op, shape
from celosia.compiler.ops import op_spec
from celosia.compiler.program.host.hostops.value_types import parameter_shape_error


def load(source: str | Path | onnx.ModelProto) -> ir.Model:
    """A checked model with the shapes of all values inferred. Raises ModelError, also where a size is open."""
    model = imported(*sound(source))
    require_static(model)
    return model


def sound(source: str | Path | onnx.ModelProto) -> tuple[onnx.ModelProto, Origin]:
    """Open, validate and normalise a model. Returns (the model, where it is from). Raises ModelError.

    No pass runs: `imported` takes it from here, and whoever only looks at inputs and shapes needs no more.

    Large constants in other files stay there (graph/importing/external_data.py).
    """
    if isinstance(source, onnx.ModelProto):
        proto, origin = source, Origin("the model")
    else:
        proto, origin = opened(source), Origin(str(source), _folder(source))
    if not proto.graph.node and not proto.graph.output:
        raise ModelError(f"{origin} holds no graph; give an ONNX model")
    if why := validation_error(proto, origin.folder):
        raise ModelError(f"{origin} is not a valid ONNX model: {why}")
    return normalise_model(proto), origin


def imported(proto: onnx.ModelProto, origin: Origin, passes: Pipeline = IMPORT_PASSES) -> ir.Model:
    """Return the graph of a sound model after `passes`. Raises ModelError."""
    model = read_graph(proto, origin)
    passes.run_import(model)
    return model


def read_graph(proto: onnx.ModelProto, origin: Origin) -> ir.Model:
    """Return the graph of a sound model after FILE_PASSES, with all shapes inferred. Raises ModelError."""
    try:
        with _bounded_memory(INFERENCE_BYTES + 16 * proto.ByteSize()):
            onnx.checker.check_model(for_checker(proto))
            for each in FILE_PASSES:
                proto = each.run(proto)
            shaped = with_inferred_shapes(proto)
        if why := mistyped(shaped):
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
    """ModelError where scales or zero points do not fit what they quantise, as far as shapes are known.

    For what the graph passes have left: in a pattern that is fused onnxruntime does not look at them, either.
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
    """Give results of a body the types of the node's outputs, which inference knows, without the axis of the steps.

    A run without steps returns nothing of that type.
    """
    body = node.attributes["body"].as_graph()
    axes = node.attributes["scan_output_axes"].as_ints() if "scan_output_axes" in node.attributes else ()
    states = len(node.inputs) - (2 if node.op_type == "Loop" else node.attributes["num_scan_inputs"].as_int())
    scanned = body.outputs[states + (node.op_type == "Loop") :]
    for value, returned, axis in zip(node.outputs[states:], scanned, [*axes, *([0] * len(scanned))]):
        if isinstance(value.type, ir.TensorType):
            returned.type = ir.TensorType(value.type.dtype)
        if value.shape is not None and -len(value.shape) <= axis < len(value.shape):
            sizes = list(value.shape)
            del sizes[axis]
            returned.shape = ir.Shape(sizes)


INFERENCE_BYTES = 1 << 29
"""What onnx may take to check a model and infer its shapes, beside a multiple of the model itself."""


@contextlib.contextmanager
def _bounded_memory(more: int) -> Iterator[None]:
    """MemoryError where the process takes `more` bytes: onnx writes down each element of the shapes that it infers,
    and a model of a few bytes may give them 2**40. Where there is no /proc, nothing is bounded."""
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


MOST_BYTES = (1 << 31) - 1
"""Most bytes of a file, as protobuf counts them."""


def opened(path: str | Path) -> onnx.ModelProto:
    """The model in a file, without the large constants that it has in others. ModelError."""
    model = read(Path(path), data=False)
    with _readable(Path(path)):
        read_small(model, _folder(path))
    return model


def _folder(path: str | Path) -> str:
    return os.path.abspath(Path(path).parent)


def read(path: Path, data: bool = True) -> onnx.ModelProto:
    """The model in a file, with its external data, or without. ModelError."""
    with _readable(path):
        if path.is_char_device() or path.is_block_device():
            raise ModelError(f"{path} is a device; give an ONNX file")
        if (size := path.stat().st_size) > MOST_BYTES:
            raise ModelError(
                f"{path} has {size:,} bytes, and ONNX reads {MOST_BYTES:,} at most; save constants in a file beside it"
            )
        model: onnx.ModelProto = onnx.load(path, load_external_data=False)
        if data:
            read_all(model, _folder(path))
    return model


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    """ModelError where the file at `path`, or one that it names, cannot be read."""
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
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    context = [line.removeprefix("==> Context: Bad node spec for ") for line in lines if line.startswith("==> Context")]
    if lines[0].endswith(":"):
        return " ".join(lines[:3])
    return ", ".join([lines[0], *context[:1]])


def with_inferred_shapes(proto: onnx.ModelProto) -> onnx.ModelProto:
    """`proto` with the shapes and types of the values inside it, as far as they can be inferred.

    What the model itself declares of them counts only where nothing can be inferred: it may be wrong.
    """
    drawn = onnx.ModelProto()
    drawn.CopyFrom(proto)
    _forget_matrices(drawn.graph)
    empty = {tensor.name for tensor in drawn.graph.initializer if list(tensor.dims) == [0]}
    for node in drawn.graph.node:
        if node.op_type == "Squeeze" and empty.intersection(node.input[1:]):
            del node.input[1:]  # no axes are all of size 1, to onnxruntime
        if node.domain == "com.microsoft" and op_spec(node.op_type).shape_like and not _has_no_like(node):
            _stand_in(node)
    overruled: dict[str, onnx.ValueInfoProto] = {}
    inferred = _inferred(drawn, proto)
    while wrong := corrected_window_shapes(drawn.graph, inferred):  # what follows from them is inferred again
        overruled |= wrong
        kept = [node for node in drawn.graph.node if node.output[0] not in wrong]
        del drawn.graph.node[:]
        drawn.graph.node.extend(kept)
        drawn.graph.input.extend(wrong.values())
        inferred = _inferred(drawn, proto)
    drawn.CopyFrom(proto)
    del drawn.graph.value_info[:], drawn.graph.output[:]
    outputs = {value.name for value in inferred.output}
    drawn.graph.value_info.extend(inferred.value_info)
    drawn.graph.value_info.extend(value for name, value in overruled.items() if name not in outputs)
    drawn.graph.output.extend(overruled.get(value.name, value) for value in inferred.output)
    return drawn


def _forget_matrices(graph: onnx.GraphProto) -> None:
    """Leave out values on which no shape depends: onnx writes down and reads all of a model to infer its shapes."""
    for tensor in graph.initializer:
        if len(tensor.dims) > 1 and prod(tensor.dims) > LONGEST:
            for name in ("raw_data", "float_data", "double_data", "int32_data", "int64_data", "uint64_data"):
                tensor.ClearField(name)


OF_DATA = frozenset(("Compress", "If", "NonMaxSuppression", "NonZero", "Unique"))
"""Operators whose sizes depend on data: what a model declares of them is what they were for one input."""


def _varying(graph: onnx.GraphProto, known: Container[str]) -> set[str]:
    """Tensors whose sizes depend on data, but for those whose shape is `known`."""
    varying: set[str] = set()
    for node in graph.node:
        if node.op_type in OF_DATA or varying.intersection(node.input):
            varying.update(name for name in node.output if name not in known)
    return varying


def _inferred(drawn: onnx.ModelProto, proto: onnx.ModelProto) -> onnx.GraphProto:
    """The values of `drawn`, which is `proto` with stand-ins, in the types that onnx infers."""
    declared = {value.name: value for value in (*proto.graph.value_info, *proto.graph.output)}
    outputs = [value.name for value in proto.graph.output]
    given = {value.name: value for value in drawn.graph.input}
    found: dict[str, onnx.ValueInfoProto] = {}
    for known in ({}, declared):
        del drawn.graph.value_info[:], drawn.graph.output[:]
        varying = _varying(proto.graph, found)
        chosen = {name: value for name, value in known.items() if name not in varying} | found | given
        drawn.graph.value_info.extend(value for name, value in chosen.items() if name not in {*outputs, *given})
        drawn.graph.output.extend(chosen.get(name, onnx.ValueInfoProto(name=name)) for name in outputs)
        shaped = inferred(drawn).graph
        found = {value.name: value for value in (*shaped.value_info, *shaped.output) if _is_whole(value.type)}
        found = lengths(shaped) | found
    return shaped


def _is_whole(kind: onnx.TypeProto) -> bool:
    """Whether `kind` is a tensor whose element type and every size are known."""
    tensor = kind.tensor_type
    known = tensor.elem_type != onnx.TensorProto.UNDEFINED and tensor.HasField("shape")
    return known and all(dim.HasField("dim_value") for dim in tensor.shape.dim)


def _has_no_like(node: onnx.NodeProto) -> bool:
    """Whether it makes floats of bytes, or has the channels last: its shape and type come from its expression."""
    scale = op_spec(node.op_type).scale
    floats = scale is not None and not any(node.input[scale : scale + 1])
    return floats or any(attr.name == "channels_last" and attr.i for attr in node.attribute)


def _stand_in(node: onnx.NodeProto) -> None:
    """Make ONNX's operator of the same shape and type out of one of onnxruntime's."""
    spec, names = op_spec(node.op_type), list(node.input)
    op = spec.shape_like
    kept = names if op == node.op_type else [names[number] for number in spec.data_among(len(names))]
    attrs = [attr for attr in node.attribute if attr.name not in ("channels_last", "opset") and op != "Identity"]
    node.op_type, node.domain = op, ""
    del node.input[:], node.attribute[:]
    node.input.extend(kept)
    node.attribute.extend(attrs)


SEQUENCES = frozenset(("SequenceConstruct", "SequenceEmpty", "SplitToSequence"))
"""Operators of models whose sizes are known only at run time anyway."""


def of_sequences(model: ir.Model) -> bool:
    """Whether sizes are known only at run time, whatever those of the inputs are."""
    given = any(isinstance(value.type, (ir.SequenceType, ir.OptionalType)) for value in model.graph.inputs)
    return given or any(node.op_type in SEQUENCES for node in model.graph)


def require_static(model: ir.Model, but_open: bool = False) -> None:
    """ModelError where an input's shape is unknown or not a constant, except in models of sequences.

    but_open: sizes may be open.
    """
    if of_sequences(model):
        return
    for value in model.graph.inputs:
        if value.shape is None:
            raise ModelError(
                f"input {value.name!r} has no shape; give it one with --shape (shapes= in Python), or export the model "
                "with one"
            )
        for axis, size in enumerate(value.shape):
            if not isinstance(size, int):
                if not but_open:
                    sizes = ",".join(str(each if isinstance(each, int) else 1) for each in value.shape)
                    raise ModelError(
                        f"input {value.name!r} has a dynamic dimension {axis}; give its size, as --shape "
                        f"{value.name}={sizes} (shapes= in Python)"
                    )
            elif size < 0:
                raise ModelError(f"input {value.name!r} has a negative dimension {axis}: {size}")
