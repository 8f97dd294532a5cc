"""Import a model for given sizes: decide which open sizes become numbers, and which a Program leaves open.

Three kinds of open sizes:

- Samples: the first axis of inputs, where every output's part number i depends only on sample number i
  (graph/importing/sample_independence.py proves it). The Program computes some at once, and Runtime loops over any
  number of them.
- Counts: sizes that no operator with weights meets, such as the length of a cache of keys and values. They stay open,
  and the operators that depend on them run in the host runtime, for any number.
- All others are numbers in a Program: another number is another Program.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnx_ir as ir

from celosia.compiler.graph.errors import ModelError
from celosia.compiler.graph.external_data import Origin
from celosia.compiler.graph.importer import (
    has_sequences,
    import_model,
    open_model,
    read_graph,
    require_static,
)
from celosia.compiler.graph.importing.dimensions import Shapes, missing_size_message, open_axes, sizes_of, with_shapes
from celosia.compiler.graph.importing.normalise import without_declared_shapes
from celosia.compiler.graph.importing.sample_independence import why_samples_mix
from celosia.compiler.graph.passes import Watch
from celosia.compiler.graph.pipeline import IMPORT_PASSES
from celosia.compiler.graph.shapes import Disagreement, infer_shapes
from celosia.compiler.graph.simplify.fold import DEQUANTISED, fold
from celosia.compiler.graph.values import shape
from celosia.compiler.ops import op_spec
from celosia.compiler.program import PassInfo

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
    source: str | Path | onnx.ModelProto, shapes: Shapes | None = None, images: int = 1, declared: bool = True,
    left_out: Collection[str] = (), watch: Watch | None = None,
) -> SpecialisedModel:  # fmt: skip
    """Import a model for inputs of these shapes.

    images: samples that are computed at once if neither the model nor `shapes` says how many. declared: whether the
    shapes that the model declares for other tensors count where they cannot be inferred. left_out: names of passes of
    the import to leave out. watch: called after each pass.

    Raises ModelError where the shapes contradict the model, and where a size is open that must be a number.
    """
    proto, origin = open_model(source)
    proto = proto if declared else without_declared_shapes(proto)
    shapes = shapes or {}
    sizes, samples, why = sizes_of(proto, shapes), sample_size(proto), ""
    batched: tuple[str, ...] = ()
    if samples is not None:
        with_samples = {samples: images} | sizes
        batched, why = prove_independence(
            import_model(with_shapes(proto, shapes, with_samples), origin), proto, samples
        )
        sizes = with_samples if batched else sizes
    model = read_graph(with_shapes(proto, shapes, sizes), origin)
    passes = IMPORT_PASSES.without(left_out).run_import(model, watch)
    open_labels = [label for label in open_axes(proto).values() if label not in sizes]
    require_static(model, allow_open=bool(open_labels))
    if open_labels and not has_sequences(model) and meets_weights(model):
        missing = next((label for label in open_labels if not _is_count(proto, origin, label)), open_labels[0])
        mixing = f"; samples are not computed one by one: {why}" if why and missing == samples else ""
        raise ModelError(missing_size_message(proto, missing) + mixing)
    return SpecialisedModel(model, batched, tuple(passes))


def sample_size(proto: onnx.ModelProto) -> str | None:
    """Return the label of the open size that may count samples: the first axis of inputs, and no other axis of any."""
    axes = open_axes(proto)
    first = {name for (_, axis), name in axes.items() if axis == 0}
    first -= {name for (_, axis), name in axes.items() if axis > 0}
    return first.pop() if len(first) == 1 else None


def prove_independence(model: ir.Model, proto: onnx.ModelProto, samples: str) -> tuple[tuple[str, ...], str]:
    """Prove that samples are independent.

    Returns (the inputs whose first axis counts them, ""), or ((), the reason why they may not be).

    samples: label of the open size that may count samples. Changes `model`: constants are folded, but sizes are not,
    since that would hide how values depend on the number of samples.
    """
    fold(model, keep=DEQUANTISED | SIZES)
    inputs = tuple(name for (name, axis), label in open_axes(proto).items() if label == samples)
    why = why_samples_mix(model, inputs)
    return ((), why) if why else (inputs, "")


def meets_weights(model: ir.Model) -> bool:
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
        if not op_spec(node.op_type).heavy and not (node.op_type in PRODUCTS and constants.intersection(inputs)):
            continue
        tensors = [value for value in (*inputs, *node.outputs) if value not in constants]
        if any(shape(value) is None for value in tensors):
            return True
    return False


def _is_count(proto: onnx.ModelProto, origin: Origin, size: str) -> bool:
    """Return whether an open size may stay open if all others are numbers."""
    others = {label: 1 for label in open_axes(proto).values() if label != size}
    try:
        return not meets_weights(import_model(with_shapes(proto, {}, others), origin))
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
    sizes, samples, why = sizes_of(proto, positive_shapes), sample_size(proto), ""
    free: set[str] = set()

    def import_with_open(names: Collection[str]) -> ir.Model:
        """Import the model with these sizes open and all others as numbers."""
        left = {label: size for label, size in sizes.items() if label not in names}
        return import_model(with_shapes(proto, {}, left), origin)

    if samples is not None:
        batched, why = prove_independence(import_with_open(()), proto, samples)
        if batched:
            free.add(samples)
    counts = {label for label in sizes if label != samples and not meets_weights(import_with_open((label,)))}
    if counts and not meets_weights(import_with_open(counts)):
        free |= counts
    return _OpenSizes(axes, free, samples, why)


def open_free_sizes(source: str | Path | onnx.ModelProto, shapes: Shapes) -> dict[str, tuple[int | None, ...]]:
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
