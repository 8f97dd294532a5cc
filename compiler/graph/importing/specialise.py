"""A model for given sizes: which of its open sizes become numbers, and which a Program leaves open.

Three kinds of open sizes:

- Samples: the first axis of inputs, where every output's part number i depends on their samples number i alone
  (graph/importing/sample_independence.py proves it). The Program takes some at once, and Runtime loops over any number
  of them.
- Counts: sizes that no operator with weights meets, such as the length of a cache of keys and values. They stay open,
  and what depends on them runs in the host runtime, for any number.
- All others are numbers in a Program: another number is another Program.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnx_ir as ir

from celosia.compiler.graph.errors import ModelError
from celosia.compiler.graph.importing.dimensions import Shapes, missing, open_axes, sizes_of, with_shapes
from celosia.compiler.graph.importing.external_data import Origin
from celosia.compiler.graph.importing.importer import imported, of_sequences, read_graph, require_static, sound
from celosia.compiler.graph.importing.normalise import undeclared
from celosia.compiler.graph.importing.sample_independence import mixes
from celosia.compiler.graph.passes import Watch
from celosia.compiler.graph.pipeline import IMPORT_PASSES
from celosia.compiler.graph.shapes import Disagreement, infer_shapes
from celosia.compiler.graph.simplify.fold import DEQUANTISED, fold
from celosia.compiler.graph.values import shape
from celosia.compiler.ops import op_spec
from celosia.compiler.program import PassInfo

PRODUCTS = frozenset(("MatMul", "MatMulInteger", "QLinearMatMul"))
"""Those of which it depends on whether one side is constant."""
SIZES = frozenset(("Shape", "Size"))


@dataclass(frozen=True)
class SpecialisedModel:
    """An imported graph for given sizes.

    batched: inputs whose first axis counts samples, of which a Program takes any number. passes: what the passes of the
    import did.
    """

    graph: ir.Model
    batched: tuple[str, ...] = ()
    passes: tuple[PassInfo, ...] = ()


def specialise(
    source: str | Path | onnx.ModelProto, shapes: Shapes | None = None, images: int = 1, declared: bool = True,
    left_out: Collection[str] = (), watch: Watch | None = None,
) -> SpecialisedModel:  # fmt: skip
    """Import a model for inputs of these shapes.

    images: how many samples are computed at once if neither the model nor `shapes` says. declared: whether the shapes
    that the model declares of other tensors count where they cannot be inferred. left_out: names of passes of the
    import that are left out. watch: called after each of them.

    Raises ModelError where the shapes contradict the model, and where a size is open that must be a number.
    """
    proto, origin = sound(source)
    proto = proto if declared else undeclared(proto)
    shapes = shapes or {}
    sizes, samples, why = sizes_of(proto, shapes), sample_size(proto), ""
    batched: tuple[str, ...] = ()
    if samples is not None:
        given = {samples: images} | sizes
        batched, why = independent(imported(with_shapes(proto, shapes, given), origin), proto, samples)
        sizes = given if batched else sizes
    model = read_graph(with_shapes(proto, shapes, sizes), origin)
    passes = IMPORT_PASSES.without(left_out).run_import(model, watch)
    left = [each for each in open_axes(proto).values() if each not in sizes]
    require_static(model, but_open=bool(left))
    if left and not of_sequences(model) and meets_weights(model):
        wanted = next((each for each in left if not _is_count(proto, origin, each)), left[0])
        because = f"; samples are not computed one by one: {why}" if why and wanted == samples else ""
        raise ModelError(missing(proto, wanted) + because)
    return SpecialisedModel(model, batched, tuple(passes))


def sample_size(proto: onnx.ModelProto) -> str | None:
    """The open size that may count samples: the first axis of inputs, and no other axis of any."""
    axes = open_axes(proto)
    first = {name for (_, axis), name in axes.items() if axis == 0}
    first -= {name for (_, axis), name in axes.items() if axis > 0}
    return first.pop() if len(first) == 1 else None


def independent(model: ir.Model, proto: onnx.ModelProto, samples: str) -> tuple[tuple[str, ...], str]:
    """(Inputs whose first axis has the size called `samples`; nothing where they are not computed one by one, why).

    Constants are folded in `model`; sizes are not, which would hide what is made of the number of samples.
    """
    fold(model, keep=DEQUANTISED | SIZES)
    found = tuple(name for (name, axis), label in open_axes(proto).items() if label == samples)
    why = mixes(model, found)
    return ((), why) if why else (found, "")


def meets_weights(model: ir.Model) -> bool:
    """Whether an operator with weights, or another that wants a kernel of its own, meets a size that is not known."""
    copy = model.clone()
    infer_shapes(copy)
    fold(copy)
    fixed = set(copy.graph.initializers.values())  # and what depends on them alone, such as dequantised weights
    for node in copy.graph:
        inputs = [value for value in node.inputs if value is not None]
        if inputs and fixed.issuperset(inputs):
            fixed.update(node.outputs)
            continue
        if not op_spec(node.op_type).heavy and not (node.op_type in PRODUCTS and fixed.intersection(inputs)):
            continue
        tensors = [value for value in (*inputs, *node.outputs) if value not in fixed]
        if any(shape(value) is None for value in tensors):
            return True
    return False


def _is_count(proto: onnx.ModelProto, origin: Origin, size: str) -> bool:
    """Whether an open size can stay open where others are given, whatever they are."""
    others = {label: 1 for label in open_axes(proto).values() if label != size}
    try:
        return not meets_weights(imported(with_shapes(proto, {}, others), origin))
    except ModelError:  # 1 is too few
        return False


@dataclass(frozen=True)
class _OpenSizes:
    """The open sizes of a model: their labels by input and axis, those that a Program can leave open, the one that may
    count samples, and why it does not.
    """

    axes: dict[tuple[str, int], str]
    free: set[str]
    samples: str | None
    why: str


def _find_open_sizes(source: str | Path | onnx.ModelProto, shapes: Shapes) -> _OpenSizes:
    """Find the open sizes of a model; without the shapes that it declares, if these contradict the inferred ones."""
    proto, origin = sound(source)
    try:
        return _open_sizes_of(proto, origin, shapes)
    except Disagreement:
        return _open_sizes_of(undeclared(proto), origin, shapes)


def _open_sizes_of(proto: onnx.ModelProto, origin: Origin, shapes: Shapes) -> _OpenSizes:
    axes = open_axes(proto)
    some = {each: [max(size or 0, 1) for size in shape] for each, shape in shapes.items()}  # there may be 0 of them
    sizes, samples, why = sizes_of(proto, some), sample_size(proto), ""
    free: set[str] = set()

    def model(names: Collection[str]) -> ir.Model:
        left = {label: size for label, size in sizes.items() if label not in names}
        return imported(with_shapes(proto, {}, left), origin)

    if samples is not None:
        batched, why = independent(model(()), proto, samples)
        if batched:
            free.add(samples)
    counts = {label for label in sizes if label != samples and not meets_weights(model((label,)))}
    if counts and not meets_weights(model(counts)):
        free |= counts
    return _OpenSizes(axes, free, samples, why)


def without_free(source: str | Path | onnx.ModelProto, shapes: Shapes) -> dict[str, tuple[int | None, ...]]:
    """`shapes` of all inputs with open sizes, without those that a Program can leave open: samples and counts."""
    found = _find_open_sizes(source, shapes)
    return {
        each: tuple(None if found.axes.get((each, axis)) in found.free else size for axis, size in enumerate(shape))
        for each, shape in shapes.items()
    }


def why_fixed(source: str | Path | onnx.ModelProto, shapes: Shapes) -> dict[tuple[str, int], str]:
    """Why a Program must know open sizes, by input and axis; those that it can leave open are left out."""
    found = _find_open_sizes(source, shapes)
    mixed = f"samples are not computed one by one: {found.why}"
    return {
        place: mixed if label == found.samples else "operators with weights meet it"
        for place, label in found.axes.items() if label not in found.free
    }  # fmt: skip
