"""Operators that move bytes as layers that copy, each a strided view of pixels: LOAD and STORE stride over them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from celosia.compiler.expr import placeholder
from celosia.compiler.graph.operands import operand
from celosia.compiler.graph.select.forms import HOST_INPUT, NO_WAY, ActivationLayout, NotOffloadable, natural_form
from celosia.compiler.graph.select.matrices import MOVES, in_whole_blocks, is_turned
from celosia.compiler.graph.select.parameters import image_axes
from celosia.compiler.graph.select.placement import Placement, Reads
from celosia.compiler.graph.values import attribute, attributes_of, constant, shape
from celosia.compiler.layer import Activation, Layer, Window
from celosia.compiler.ops.registry import Node, Unsupported
from celosia.compiler.ops.resize import nearest_indices
from celosia.compiler.strided_view import StridedView

MOST_LAYERS = 16
"""Copies of one operator; each reads and writes anew."""
Copy = tuple[tuple[int, StridedView], tuple[int, StridedView]]
"""First channel group and strided view of what is read, and of where it is written."""


def resize(p: Placement, node: ir.Node) -> None:
    """Nearest neighbours: of each phase in which they repeat, rows and columns are as far from each other as in x."""
    value = node.inputs[0]
    assert value is not None
    form, y_form = natural_form(value), natural_form(node.outputs[0])
    indices = _nearest(node)
    rows, columns = (_phases(indices.get(axis, np.arange(form.dims[axis]))) for axis in (2, 3))
    if form.dims[:2] != y_form.dims[:2]:
        raise NotOffloadable("it repeats images or channels; repeat rows and columns alone")
    copies = [
        (
            (0, StridedView(*form.dims[2:], y.start, x.start, y.step, x.step)),
            (0, StridedView(*y_form.dims[2:], i, j, m, n)),
        )
        for (i, m, y), (j, n, x) in product(rows, columns)
    ]
    dims = [(len(y), len(x)) for (_, _, y), (_, _, x) in product(rows, columns)]
    _copy(p, node, form, y_form, copies, lambda number: (*form.dims[:2], *dims[number]))


def _nearest(node: ir.Node) -> dict[int, NDArray[np.int64]]:
    """The element of x for each of y, along each of rows and columns that changes."""
    tensors = [None if v is None else placeholder(shape(v) or (), "int8", "x") for v in node.inputs]
    values = tuple(constant(v) for v in node.inputs)
    opset = 11 if node.op_type == "Resize" else 9
    built = Node(node.op_type, attributes_of(node), tuple(tensors), values, 1, opset, node.name or "")
    try:
        found = nearest_indices(built)
    except Unsupported as error:
        raise NotOffloadable(f"{error}; resize to nearest neighbours by a whole number") from None
    axes = image_axes(len(node.inputs[0].shape or ()))  # type: ignore[union-attr]
    return {axes[axis]: index for axis, index in found.items()}


def _phases(index: NDArray[np.int64]) -> list[tuple[int, int, range]]:
    """`index` as the fewest arithmetic progressions of equal steps: (first place, places between, what they hold)."""
    for count in range(1, MOST_LAYERS + 1):
        parts = [index[first::count] for first in range(min(count, len(index)))]
        steps = {int(step) for part in parts for step in np.diff(part)}
        if len(steps) <= 1 and min(steps, default=1) > 0:
            step = min(steps, default=1)
            return [(n, count, range(int(k[0]), int(k[-1]) + 1, step)) for n, k in enumerate(parts)]
    raise NotOffloadable(f"its neighbours are no {MOST_LAYERS} even steps; resize by a whole number")


def gather(p: Placement, node: ir.Node) -> None:
    """Rows, columns or whole channel groups by constant numbers: a copy for each run of them in even steps."""
    value = node.inputs[0]
    assert value is not None
    form, y_form, index = natural_form(value), natural_form(node.outputs[0]), constant(node.inputs[1])
    if index is None or index.ndim != 1:
        raise NotOffloadable("its indices are no constant list; export them as an initializer of one dimension")
    axis = image_axes(len(value.shape or ()))[attribute(node, "axis", 0)]
    if axis == 0:
        raise NotOffloadable("it takes some of the images; take channels, rows or columns")
    index = np.where(index < 0, index + form.dims[axis], index)
    whole, y_whole = StridedView(*form.dims[2:]), StridedView(*y_form.dims[2:])
    if axis == 1:
        runs = _runs(_group_numbers(index, p.cfg.group), steps=(1,))
        copies: list[Copy] = [((run.start, whole), (place, y_whole)) for place, run in runs]
        sizes = [min(len(run) * p.cfg.group, y_form.dims[1] - place * p.cfg.group) for place, run in runs]
    else:
        runs = _runs(index)
        rows = axis == 2
        copies = [
            (
                (0, replace(whole, **{"top" if rows else "left": run.start, "down" if rows else "across": run.step})),
                (0, replace(y_whole, **{"top" if rows else "left": place})),
            )
            for place, run in runs
        ]
        sizes = [len(run) for _, run in runs]
    dims = [tuple(size if each == axis else n for each, n in enumerate(y_form.dims)) for size in sizes]
    _copy(p, node, form, y_form, copies, lambda number: dims[number])  # type: ignore[arg-type,return-value]


def _runs(index: NDArray[np.int64], steps: tuple[int, ...] = ()) -> list[tuple[int, range]]:
    """`index` as (first place, even steps forward, by `steps` if given), each as long as it can be.

    >>> _runs(np.array([4, 6, 8, 2, 3, 0]))
    [(0, range(4, 9, 2)), (3, range(2, 4)), (5, range(0, 1))]
    """
    runs, place = [], 0
    while place < len(index):
        end = place + 1
        step = int(index[end] - index[place]) if end < len(index) else 0
        if step > 0 and step in (steps or (step,)):
            while end < len(index) and index[end] - index[end - 1] == step:
                end += 1
        step = step if end > place + 1 else 1
        runs.append((place, range(int(index[place]), int(index[end - 1]) + 1, step)))
        place = end
    return runs


def _group_numbers(index: NDArray[np.int64], group: int) -> NDArray[np.int64]:
    """The channel groups that the channels `index` are, in order; the last may be the first channels of one."""
    first = index[::group]
    if np.any(first % group) or not np.array_equal(
        index, (first[:, None] + np.arange(group)).reshape(-1)[: len(index)]
    ):
        raise NotOffloadable(
            f"the channels that it takes are not whole groups of {group}; "
            "take runs of so many that begin at a multiple of it"
        )
    return first // group


def transpose(p: Placement, node: ir.Node) -> None:
    """Rows for columns: a copy for each column of x, which is a row of y."""
    value = node.inputs[0]
    assert value is not None
    held = p.held(value)
    if held is not None and held.fold and node.meta.get(MOVES) and in_whole_blocks(p, node, held):
        return
    if held is not None and held.fold and is_turned(p, node, held):
        return
    form, y_form, perm = natural_form(value), natural_form(node.outputs[0]), attribute(node, "perm")
    if perm is None or list(perm) != [0, 1, 3, 2]:
        raise NotOffloadable(f"it changes places of channels, which lie in groups; {NO_WAY}")
    _, _, height, width = form.dims
    if width > MOST_LAYERS:
        raise NotOffloadable(f"it takes {width} layers, more than {MOST_LAYERS}; transpose images with fewer columns")
    if p.held(value) != form:
        raise NotOffloadable(HOST_INPUT)
    reads: Reads = {}
    x, y = p.read(value, form, reads), p.activation(node.outputs[0], y_form)
    if x.strided_view is not None:
        raise NotOffloadable(
            "its input is some of the pixels of another tensor; transpose the whole tensor, and slice behind that"
        )
    row = replace(x, height=1, width=height * width)  # all pixels, one after the other
    dims = (*form.dims[:2], 1, height)
    layers = [
        Layer(
            f"{node.name}.{column}", row.region(dims, 0, StridedView(1, height * width, 0, column, 1, width)),
            y.region(dims, 0, StridedView(width, height, column, 0)),
        )
        for column in range(width)
    ]  # fmt: skip
    p.assemble(node, layers, reads, y, y_form)


def depth_to_space(p: Placement, node: ir.Node) -> None:
    """Places DepthToSpace. NotOffloadable."""
    form, y_form, b, groups = _depth(p, node, node.inputs[0], node.outputs[0])
    whole = StridedView(*form.dims[2:])
    copies = [
        (((i * b + j) * groups, whole), (0, StridedView(*y_form.dims[2:], i, j, b, b)))
        for i, j in product(range(b), repeat=2)
    ]  # fmt: skip
    _copy(p, node, form, y_form, copies, lambda _: (*y_form.dims[:2], *form.dims[2:]))


def space_to_depth(p: Placement, node: ir.Node) -> None:
    """Places SpaceToDepth. NotOffloadable."""
    y_form, form, b, groups = _depth(p, node, node.outputs[0], node.inputs[0])
    whole = StridedView(*y_form.dims[2:])
    copies = [
        ((0, StridedView(*form.dims[2:], i, j, b, b)), ((i * b + j) * groups, whole))
        for i, j in product(range(b), repeat=2)
    ]  # fmt: skip
    _copy(p, node, form, y_form, copies, lambda _: (*form.dims[:2], *y_form.dims[2:]))


def _depth(
    p: Placement, node: ir.Node, deep: ir.Value | None, wide: ir.Value | None
) -> tuple[ActivationLayout, ActivationLayout, int, int]:
    """Forms of the side with more channels and of that with more pixels, block size, channel groups of the latter."""
    assert deep is not None and wide is not None
    forms, b = (natural_form(deep), natural_form(wide)), attribute(node, "blocksize")
    if attribute(node, "mode", "DCR") != "DCR":
        raise NotOffloadable(
            "its blocks are the inner axis of its channels (mode CRD); "
            "export it with mode DCR, and the channels of the layer before it in that order"
        )
    channels = forms[1].dims[1]
    if channels % p.cfg.group:
        raise NotOffloadable(f"{channels} channels are not whole groups of {p.cfg.group}; make them a multiple of that")
    if b * b > MOST_LAYERS:
        raise NotOffloadable(f"blocks of {b} x {b} take more than {MOST_LAYERS} layers; use smaller blocks")
    return (*forms, b, channels // p.cfg.group)


def _copy(
    p: Placement, node: ir.Node, form: ActivationLayout, y_form: ActivationLayout, copies: list[Copy],
    dims: Callable[[int], tuple[int, int, int, int]],
) -> None:  # fmt: skip
    """One layer for each of `copies`; dims: those of the layer with that number."""
    value = node.inputs[0]
    assert value is not None
    if len(copies) > MOST_LAYERS:
        raise NotOffloadable(
            f"it takes {len(copies)} layers, more than {MOST_LAYERS}; move longer runs of rows or columns"
        )
    if p.held(value) != form:
        raise NotOffloadable(HOST_INPUT)
    reads: Reads = {}
    x, y = p.read(value, form, reads), p.activation(node.outputs[0], y_form)
    layers = [
        Layer(f"{node.name}.{number}", x.region(dims(number), *source), y.region(dims(number), *target))
        for number, (source, target) in enumerate(copies)
    ]  # fmt: skip
    p.assemble(node, layers, reads, y, y_form)


def pad(p: Placement, node: ir.Node) -> None:
    """A constant around rows and columns: the largest of one pixel, which may lie beyond the border."""
    value, y = node.inputs[0], node.outputs[0]
    assert value is not None
    form, y_form = natural_form(value), natural_form(y)
    if attribute(node, "mode", "constant") != "constant":
        raise NotOffloadable("it pads with other elements than a constant; export it with mode constant")
    if p.held(value) != form:
        raise NotOffloadable(HOST_INPUT)
    top, left, bottom, right = _pads(node)
    reads: Reads = {}
    x: Activation = p.read(value, form, reads)
    window = Window((1, 1), pads=(top, left, bottom, right))
    layer = Layer(node.name or "", x, p.activation(y, y_form), window, _fill(node), reduce="max")
    p.add(node, layer, reads, y_form)


def _pads(node: ir.Node) -> tuple[int, int, int, int]:
    axes = image_axes(len(node.inputs[0].shape or ()))  # type: ignore[union-attr]
    pads, which = constant(operand(node, "pads")), operand(node, "axes")
    chosen = np.arange(len(axes)) if which is None else constant(which)
    if pads is None or chosen is None:
        raise NotOffloadable("its pads are not constant; export them as an initializer")
    around = np.zeros((2, 4), np.int64)
    for number, axis in enumerate(chosen.tolist()):
        around[:, axes[axis % len(axes)]] = pads.reshape(2, -1)[:, number]
    if np.any(around[:, :2]):
        raise NotOffloadable("it pads images or channels; pad rows and columns alone")
    if np.any(around < 0):
        raise NotOffloadable("it cuts what it pads; cut with Slice")
    (top, left), (bottom, right) = around[:, 2:].tolist()
    return top, left, bottom, right


def _fill(node: ir.Node) -> int:
    """Return the value that `node` pads with, as the accelerator stores it."""
    given = operand(node, "constant_value")
    array = np.zeros(1, node.inputs[0].dtype.numpy()) if given is None else constant(given)  # type: ignore[union-attr]
    if array is None or array.size != 1:
        raise NotOffloadable("what it pads with is not constant; export it as an initializer")
    return int(array.item()) - (128 if array.dtype == np.uint8 else 0)
