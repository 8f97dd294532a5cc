"""Import an ONNX file or proto as a checked graph with static shapes, for given sizes of its inputs.

1. `open_model` reads the file (`read_without_large_constants`), validates and normalises the model.
2. `import_model` makes the graph: `read_graph` (passes over the file, shape inference), then the passes that repeat
   onnxruntime's rewrites.
3. `specialise` does both for given sizes. It decides which open sizes become numbers, and which a Program leaves open.

Three kinds of open sizes:

- Samples: the first axis of inputs, where every output's part number i depends only on sample number i
  (graph/importing/sample_independence.py proves it). The Program computes some at once, and Runtime loops over any
  number of them.
- Counts: sizes that no operator with weights meets, such as the length of a cache of keys and values. They stay open,
  and the operators that depend on them run in the host runtime, for any number.
- All others are numbers in a Program: another number is another Program.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from zipfile import is_zipfile

import onnx
import onnx_ir as ir

from celosia.compiler.graph.errors import ModelError
from celosia.compiler.graph.external_data import Origin, attach, read_all, read_small
from celosia.compiler.graph.importing.dimensions import Shapes, missing_size_message, open_axes, sizes_of, with_shapes
from celosia.compiler.graph.importing.normalise import for_checker, normalise_model, without_declared_shapes
from celosia.compiler.graph.importing.sample_independence import why_samples_mix
from celosia.compiler.graph.importing.set_inputs import InputValues, set_inputs
from celosia.compiler.graph.importing.shape_inference import with_inferred_shapes
from celosia.compiler.graph.importing.validation import element_type_error, validation_error
from celosia.compiler.graph.operands import quantisation
from celosia.compiler.graph.passes import Pipeline, Watch
from celosia.compiler.graph.pipeline import FILE_PASSES, IMPORT_PASSES, import_passes_of
from celosia.compiler.graph.shapes import Disagreement, infer_shapes
from celosia.compiler.graph.simplify.fold import DEQUANTISED, fold
from celosia.compiler.graph.values import attribute, is_op, shape
from celosia.compiler.ops import op_spec
from celosia.compiler.program import PassInfo
from celosia.compiler.program.host.hostops.value_types import parameter_shape_error
from celosia.compiler.program.model import ROUNDINGS

Source = TypeVar("Source", bound="str | Path | onnx.ModelProto")


def import_static(source: str | Path | onnx.ModelProto) -> ir.Model:
    """Import a model whose input sizes are all numbers, with the shapes of all values inferred.

    Raises ModelError, also where an input size is open.
    """
    model = import_model(*open_model(source))
    _require_static(model)
    return model


def open_model(source: str | Path | onnx.ModelProto) -> tuple[onnx.ModelProto, Origin]:
    """Open, validate and normalise a model; return it and where it is from. Raises ModelError.

    No pass runs here: `import_model` goes on from the result, and callers that only look at inputs and shapes need no
    more. Large constants in other files stay there (graph/external_data.py).
    """
    if isinstance(source, onnx.ModelProto):
        proto, origin = source, Origin("the model")
    else:
        proto, origin = read_without_large_constants(source), Origin(str(source), _folder(source))
    if not proto.graph.node and not proto.graph.output:
        raise ModelError(f"{origin} holds no graph; give an ONNX model")
    if why := validation_error(proto, origin.folder):
        raise ModelError(f"{origin} is not a valid ONNX model: {why}")
    return normalise_model(proto), origin


MAX_BYTES = (1 << 31) - 1
"""Size of the largest file that protobuf reads, in bytes."""


def read_without_large_constants(path: str | Path) -> onnx.ModelProto:
    """Read the model in a file, but leave its large constants in their other files. Raises ModelError."""
    model = read(Path(path), data=False)
    with _reporting_read_errors(Path(path)):
        read_small(model, _folder(path))
    return model


def read(path: Path, data: bool = True) -> onnx.ModelProto:
    """Read the model in a file; with `data`, also its constants in other files. Raises ModelError."""
    with _reporting_read_errors(path):
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


def with_inputs_set(source: Source, values: InputValues | None) -> Source | onnx.ModelProto:
    """Return the model, its file if there are no `values`, with these inputs as constants. Raises ModelError."""
    if not values:
        return source
    return set_inputs(source if isinstance(source, onnx.ModelProto) else read(Path(source)), values)


def _folder(path: str | Path) -> str:
    """Return the absolute path of the folder in which a model's file lies."""
    return os.path.abspath(Path(path).parent)


@contextlib.contextmanager
def _reporting_read_errors(path: Path) -> Iterator[None]:
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
    for value in model.graph.outputs:
        if value.type is None:  # a pass finds out, from the operator that makes it
            value.type = ir.TensorType(ir.DataType.UNDEFINED)
    return model


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


def _require_static(model: ir.Model, allow_open: bool = False) -> None:
    """Raise ModelError where an input's shape is unknown or not constant, except in models of sequences.

    allow_open: accept open sizes of inputs whose number of axes is known.
    """
    if _has_sequences(model):
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


SEQUENCES = frozenset(("SequenceConstruct", "SequenceEmpty", "SplitToSequence"))
"""Operators that make sequences; sizes in such models are known at run time only."""


def _has_sequences(model: ir.Model) -> bool:
    """Return whether a model uses sequences or optionals, so that sizes are known at run time only."""
    sequence_input = any(isinstance(value.type, (ir.SequenceType, ir.OptionalType)) for value in model.graph.inputs)
    return sequence_input or any(node.op_type in SEQUENCES for node in model.graph)


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


PRODUCTS = frozenset(("MatMul", "MatMulInteger", "QLinearMatMul"))
"""Products that count as operators with weights if one side is constant."""
SIZES = frozenset(("Shape", "Size"))
"""Operators that read sizes; they are not folded while samples are proved independent."""


@dataclass(frozen=True)
class SpecialisedModel:
    """An imported graph for given sizes.

    batched: inputs whose first axis counts samples, of which a Program takes any number. passes: the report of each
    pass of the import.
    """

    graph: ir.Model
    batched: tuple[str, ...] = ()
    passes: tuple[PassInfo, ...] = ()


def specialise(
    source: str | Path | onnx.ModelProto, shapes: Shapes | None = None, samples_at_once: int = 1,
    trust_declared_shapes: bool = True, left_out: Collection[str] = (), watch: Watch | None = None,
    rounding: str = ROUNDINGS[0],
) -> SpecialisedModel:  # fmt: skip
    """Import a model for inputs of these shapes.

    samples_at_once: number of samples that are computed at once if neither the model nor `shapes` says it.
    trust_declared_shapes: whether shapes that the model declares for other tensors count where they cannot be inferred.
    left_out: names of passes of the import to leave out. watch: called after each pass. rounding: one of ROUNDINGS.

    Raises ModelError where the shapes contradict the model, and where a size is open that must be a number.
    """
    proto, origin = open_model(source)
    proto = proto if trust_declared_shapes else without_declared_shapes(proto)
    shapes = shapes or {}
    sizes, samples, why = sizes_of(proto, shapes), _sample_size(proto), ""
    batched: tuple[str, ...] = ()
    if samples is not None:
        with_samples = {samples: samples_at_once} | sizes
        batched, why = _prove_independence(
            import_model(with_shapes(proto, shapes, with_samples), origin), proto, samples
        )
        sizes = with_samples if batched else sizes
    model = read_graph(with_shapes(proto, shapes, sizes), origin)
    passes = import_passes_of(left_out, rounding).run_import(model, watch)
    open_labels = [label for label in open_axes(proto).values() if label not in sizes]
    _require_static(model, allow_open=bool(open_labels))
    if open_labels and not _has_sequences(model) and _reaches_weights(model):
        missing = next((label for label in open_labels if not _is_count(proto, origin, label)), open_labels[0])
        mixing = f"; samples are not computed one by one: {why}" if why and missing == samples else ""
        raise ModelError(missing_size_message(proto, missing) + mixing)
    return SpecialisedModel(model, batched, tuple(passes))


def _sample_size(proto: onnx.ModelProto) -> str | None:
    """Return the label of the open size that may count samples: the first axis of inputs, and no other axis of any."""
    axes = open_axes(proto)
    first = {name for (_, axis), name in axes.items() if axis == 0}
    first -= {name for (_, axis), name in axes.items() if axis > 0}
    return first.pop() if len(first) == 1 else None


def _prove_independence(model: ir.Model, proto: onnx.ModelProto, samples: str) -> tuple[tuple[str, ...], str]:
    """Prove that samples are independent.

    Returns (the inputs whose first axis counts them, ""), or ((), the reason why they may not be).

    samples: label of the open size that may count samples. Changes `model`: constants are folded, but sizes are not,
    since that would hide how values depend on the number of samples.
    """
    fold(model, keep=DEQUANTISED | SIZES)
    inputs = tuple(name for (name, axis), label in open_axes(proto).items() if label == samples)
    why = why_samples_mix(model, inputs)
    return ((), why) if why else (inputs, "")


def _reaches_weights(model: ir.Model) -> bool:
    """Return whether a size that is not known reaches an operator with weights, or another that needs a fixed size."""
    copy = model.clone()
    infer_shapes(copy)
    fold(copy)
    constants = set(copy.graph.initializers.values())  # and results of constants alone, such as dequantised weights
    for node in copy.graph:
        inputs = [value for value in node.inputs if value is not None]
        if inputs and constants.issuperset(inputs):
            constants.update(node.outputs)
            continue
        if not op_spec(node.op_type).needs_kernel and not (node.op_type in PRODUCTS and constants.intersection(inputs)):
            continue
        tensors = [value for value in (*inputs, *node.outputs) if value not in constants]
        if any(shape(value) is None for value in tensors):
            return True
    return False


def _is_count(proto: onnx.ModelProto, origin: Origin, size: str) -> bool:
    """Return whether an open size may stay open if all others are numbers."""
    others = {label: 1 for label in open_axes(proto).values() if label != size}
    try:
        return not _reaches_weights(import_model(with_shapes(proto, {}, others), origin))
    except ModelError:  # the model may not accept the size 1 that the others get here
        return False


@dataclass(frozen=True)
class _OpenSizes:
    """The open sizes of a model.

    axes: their labels by input and axis. free: labels of sizes that a Program can leave open. samples: label of the
    size that may count samples. why: the reason why it does not.
    """

    axes: dict[tuple[str, int], str]
    free: set[str]
    samples: str | None
    why: str


def _find_open_sizes(source: str | Path | onnx.ModelProto, shapes: Shapes) -> _OpenSizes:
    """Classify the open sizes of a model for inputs of `shapes`.

    Shapes that the model declares for inner tensors are dropped if they contradict the inferred ones.
    """
    proto, origin = open_model(source)
    try:
        return _classify_open_sizes(proto, origin, shapes)
    except Disagreement:
        return _classify_open_sizes(without_declared_shapes(proto), origin, shapes)


def _classify_open_sizes(proto: onnx.ModelProto, origin: Origin, shapes: Shapes) -> _OpenSizes:
    """Prove which open sizes a Program can leave open: samples that are independent, and counts."""
    axes = open_axes(proto)
    positive_shapes = {
        name: [max(size or 0, 1) for size in shape] for name, shape in shapes.items()
    }  # a given size may be 0
    sizes, samples, why = sizes_of(proto, positive_shapes), _sample_size(proto), ""
    free: set[str] = set()

    def import_with_open(names: Collection[str]) -> ir.Model:
        """Import the model with these sizes open and all others as numbers."""
        left = {label: size for label, size in sizes.items() if label not in names}
        return import_model(with_shapes(proto, {}, left), origin)

    if samples is not None:
        batched, why = _prove_independence(import_with_open(()), proto, samples)
        if batched:
            free.add(samples)
    counts = {label for label in sizes if label != samples and not _reaches_weights(import_with_open((label,)))}
    if counts and not _reaches_weights(import_with_open(counts)):
        free |= counts
    return _OpenSizes(axes, free, samples, why)


def with_free_sizes_open(source: str | Path | onnx.ModelProto, shapes: Shapes) -> dict[str, tuple[int | None, ...]]:
    """Return `shapes` of all inputs with None for sizes that a Program can leave open: samples and counts."""
    open_sizes = _find_open_sizes(source, shapes)
    return {
        name: tuple(
            None if open_sizes.axes.get((name, axis)) in open_sizes.free else size for axis, size in enumerate(shape)
        )
        for name, shape in shapes.items()
    }


def why_fixed(source: str | Path | onnx.ModelProto, shapes: Shapes) -> dict[tuple[str, int], str]:
    """Return {(input, axis): reason} for open sizes that must be numbers in a Program; free ones are left out."""
    open_sizes = _find_open_sizes(source, shapes)
    mixing = f"samples are not computed one by one: {open_sizes.why}"
    return {
        place: mixing if label == open_sizes.samples else "operators with weights meet it"
        for place, label in open_sizes.axes.items() if label not in open_sizes.free
    }  # fmt: skip
