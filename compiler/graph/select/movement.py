"""Layers that copy: operators that only move bytes become copies between strided views, over which LOAD and STORE
step."""

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
from celosia.compiler.graph.select.matrices import MOVES, pad_to_whole_blocks, transpose_in_place
from celosia.compiler.graph.select.parameters import image_axes
from celosia.compiler.graph.select.placement import Placement, Reads
from celosia.compiler.graph.values import attribute, attributes_of, constant, shape
from celosia.compiler.layer import Activation, Layer, StridedView, Window
from celosia.compiler.ops.registry import Node, Unsupported
from celosia.compiler.ops.resize import nearest_indices

MAX_COPIES = 16
"""Limit of the copies, a layer each, of one operator."""
Copy = tuple[tuple[int, StridedView], tuple[int, StridedView]]
"""(first channel group, strided view) that a copy reads, and those that it writes."""


def place_resize(p: Placement, node: ir.Node) -> None:
    """Place a Resize or Upsample to nearest neighbours. Raises NotOffloadable.

    Every n-th row and column of y has evenly spaced neighbours in x: one copy for each of these phases.
    """
    value = node.inputs[0]
    assert value is not None
    form, y_form = natural_form(value), natural_form(node.outputs[0])
    indices = _nearest_indices(node)
    rows, columns = (_split_into_progressions(indices.get(axis, np.arange(form.dims[axis]))) for axis in (2, 3))
    if form.dims[:2] != y_form.dims[:2]:
        raise NotOffloadable("it repeats images or channels; repeat rows and columns alone")
    copies = [
        (
            (0, StridedView(*form.dims[2:], x_rows.start, x_columns.start, x_rows.step, x_columns.step)),
            (0, StridedView(*y_form.dims[2:], top, left, down, across)),
        )
        for (top, down, x_rows), (left, across, x_columns) in product(rows, columns)
    ]
    dims = [(len(x_rows), len(x_columns)) for (_, _, x_rows), (_, _, x_columns) in product(rows, columns)]
    _place_copies(p, node, form, y_form, copies, lambda number: (*form.dims[:2], *dims[number]))


def _nearest_indices(node: ir.Node) -> dict[int, NDArray[np.int64]]:
    """Return for each axis that is resized (2: rows, 3: columns) the index in x of every position of y."""
    tensors = [None if v is None else placeholder(shape(v) or (), "int8", "x") for v in node.inputs]
    values = tuple(constant(v) for v in node.inputs)
    opset = 11 if node.op_type == "Resize" else 9
    expression_node = Node(node.op_type, attributes_of(node), tuple(tensors), values, 1, opset, node.name or "")
    try:
        indices = nearest_indices(expression_node)
    except Unsupported as error:
        raise NotOffloadable(f"{error}; resize to nearest neighbours by a whole number") from None
    axes = image_axes(len(node.inputs[0].shape or ()))  # type: ignore[union-attr]
    return {axes[axis]: index for axis, index in indices.items()}


def _split_into_progressions(index: NDArray[np.int64]) -> list[tuple[int, int, range]]:
    """Split `index` into the fewest interleaved arithmetic progressions with one common step.

    Returns (first position, distance of positions, indices there) of each. Raises NotOffloadable if MAX_COPIES
    progressions are not enough.
    """
    for count in range(1, MAX_COPIES + 1):
        parts = [index[first::count] for first in range(min(count, len(index)))]
        steps = {int(step) for part in parts for step in np.diff(part)}
        if len(steps) <= 1 and min(steps, default=1) > 0:
            step = min(steps, default=1)
            return [(first, count, range(int(part[0]), int(part[-1]) + 1, step)) for first, part in enumerate(parts)]
    raise NotOffloadable(f"its neighbours are no {MAX_COPIES} even steps; resize by a whole number")


def place_gather(p: Placement, node: ir.Node) -> None:
    """Place a Gather of rows, columns or whole channel groups by constant indices. Raises NotOffloadable.

    One copy for each run of evenly spaced indices.
    """
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
        runs = _split_into_runs(_group_numbers(index, p.cfg.group), steps=(1,))
        copies: list[Copy] = [((run.start, whole), (place, y_whole)) for place, run in runs]
        sizes = [min(len(run) * p.cfg.group, y_form.dims[1] - place * p.cfg.group) for place, run in runs]
    else:
        runs = _split_into_runs(index)
        rows = axis == 2
        copies = [
            (
                (0, replace(whole, **{"top" if rows else "left": run.start, "down" if rows else "across": run.step})),
                (0, replace(y_whole, **{"top" if rows else "left": place})),
            )
            for place, run in runs
        ]
        sizes = [len(run) for _, run in runs]
    dims = [(*y_form.dims[:axis], size, *y_form.dims[axis + 1 :]) for size in sizes]
    _place_copies(p, node, form, y_form, copies, lambda number: dims[number])  # type: ignore[arg-type,return-value]


def _split_into_runs(index: NDArray[np.int64], steps: tuple[int, ...] = ()) -> list[tuple[int, range]]:
    """Split `index` into runs of increasing, evenly spaced numbers, each as long as possible: (first position,
    numbers).

    steps: the distances allowed inside a run; () for any.

    >>> _split_into_runs(np.array([4, 6, 8, 2, 3, 0]))
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
    """Return the channel groups that the channels `index` make up, in order; the last group may be cut short.

    Raises NotOffloadable if they are not whole groups.
    """
    first = index[::group]
    if np.any(first % group) or not np.array_equal(
        index, (first[:, None] + np.arange(group)).reshape(-1)[: len(index)]
    ):
        raise NotOffloadable(
            f"the channels that it takes are not whole groups of {group}; "
            "take runs of so many that begin at a multiple of it"
        )
    return first // group


def place_transpose(p: Placement, node: ir.Node) -> None:
    """Place a Transpose: free for matrices that only change their form, else of rows and columns by copies.

    A copy takes one column of x, which becomes a row of y. Raises NotOffloadable.
    """
    value = node.inputs[0]
    assert value is not None
    held = p.held_form(value)
    if held is not None and held.fold and node.meta.get(MOVES) and pad_to_whole_blocks(p, node, held):
        return
    if held is not None and held.fold and transpose_in_place(p, node, held):
        return
    form, y_form, perm = natural_form(value), natural_form(node.outputs[0]), attribute(node, "perm")
    if perm is None or list(perm) != [0, 1, 3, 2]:
        raise NotOffloadable(f"it changes places of channels, which lie in groups; {NO_WAY}")
    _, _, height, width = form.dims
    if width > MAX_COPIES:
        raise NotOffloadable(f"it takes {width} layers, more than {MAX_COPIES}; transpose images with fewer columns")
    if p.held_form(value) != form:
        raise NotOffloadable(HOST_INPUT)
    reads: Reads = {}
    x, y = p.read(value, form, reads), p.new_activation(node.outputs[0], y_form)
    if x.strided_view is not None:
        raise NotOffloadable(
            "its input is some of the pixels of another tensor; transpose the whole tensor, and slice behind that"
        )
    row = replace(x, height=1, width=height * width)  # all pixels as one row
    dims = (*form.dims[:2], 1, height)
    layers = [
        Layer(
            f"{node.name}.{column}", row.region(dims, 0, StridedView(1, height * width, 0, column, 1, width)),
            y.region(dims, 0, StridedView(width, height, column, 0)),
        )
        for column in range(width)
    ]  # fmt: skip
    p.add_parts(node, layers, reads, y, y_form)


def place_depth_to_space(p: Placement, node: ir.Node) -> None:
    """Place a DepthToSpace: one copy for each pixel of a block. Raises NotOffloadable."""
    form, y_form, size, groups = _block_geometry(p, node, node.inputs[0], node.outputs[0])
    whole = StridedView(*form.dims[2:])
    copies = [
        (((row * size + column) * groups, whole), (0, StridedView(*y_form.dims[2:], row, column, size, size)))
        for row, column in product(range(size), repeat=2)
    ]  # fmt: skip
    _place_copies(p, node, form, y_form, copies, lambda _: (*y_form.dims[:2], *form.dims[2:]))


def place_space_to_depth(p: Placement, node: ir.Node) -> None:
    """Place a SpaceToDepth: one copy for each pixel of a block. Raises NotOffloadable."""
    y_form, form, size, groups = _block_geometry(p, node, node.outputs[0], node.inputs[0])
    whole = StridedView(*y_form.dims[2:])
    copies = [
        ((0, StridedView(*form.dims[2:], row, column, size, size)), ((row * size + column) * groups, whole))
        for row, column in product(range(size), repeat=2)
    ]  # fmt: skip
    _place_copies(p, node, form, y_form, copies, lambda _: (*form.dims[:2], *y_form.dims[2:]))


def _block_geometry(
    p: Placement, node: ir.Node, deep: ir.Value | None, wide: ir.Value | None
) -> tuple[ActivationLayout, ActivationLayout, int, int]:
    """Return the forms of `deep` (more channels) and `wide` (more pixels), the block size, and the channel groups of
    `wide`.

    Raises NotOffloadable for other orders of channels, channels that are not whole groups, and large blocks.
    """
    assert deep is not None and wide is not None
    forms, size = (natural_form(deep), natural_form(wide)), attribute(node, "blocksize")
    if attribute(node, "mode", "DCR") != "DCR":
        raise NotOffloadable(
            "its blocks are the inner axis of its channels (mode CRD); "
            "export it with mode DCR, and the channels of the layer before it in that order"
        )
    channels = forms[1].dims[1]
    if channels % p.cfg.group:
        raise NotOffloadable(f"{channels} channels are not whole groups of {p.cfg.group}; make them a multiple of that")
    if size * size > MAX_COPIES:
        raise NotOffloadable(f"blocks of {size} x {size} take more than {MAX_COPIES} layers; use smaller blocks")
    return (*forms, size, channels // p.cfg.group)


def _place_copies(
    p: Placement, node: ir.Node, form: ActivationLayout, y_form: ActivationLayout, copies: list[Copy],
    dims: Callable[[int], tuple[int, int, int, int]],
) -> None:  # fmt: skip
    """Place one layer for each of `copies`. Raises NotOffloadable.

    form, y_form: those of input and output. dims: gives the [images, channels, height, width] of copy number n.
    """
    value = node.inputs[0]
    assert value is not None
    if len(copies) > MAX_COPIES:
        raise NotOffloadable(
            f"it takes {len(copies)} layers, more than {MAX_COPIES}; move longer runs of rows or columns"
        )
    if p.held_form(value) != form:
        raise NotOffloadable(HOST_INPUT)
    reads: Reads = {}
    x, y = p.read(value, form, reads), p.new_activation(node.outputs[0], y_form)
    layers = [
        Layer(f"{node.name}.{number}", x.region(dims(number), *source), y.region(dims(number), *target))
        for number, (source, target) in enumerate(copies)
    ]  # fmt: skip
    p.add_parts(node, layers, reads, y, y_form)


def place_pad(p: Placement, node: ir.Node) -> None:
    """Place a Pad of rows and columns by a constant, as a max pooling with windows of one pixel and that padding.

    Raises NotOffloadable.
    """
    value, y = node.inputs[0], node.outputs[0]
    assert value is not None
    form, y_form = natural_form(value), natural_form(y)
    if attribute(node, "mode", "constant") != "constant":
        raise NotOffloadable("it pads with other elements than a constant; export it with mode constant")
    if p.held_form(value) != form:
        raise NotOffloadable(HOST_INPUT)
    top, left, bottom, right = _constant_pads(node)
    reads: Reads = {}
    x: Activation = p.read(value, form, reads)
    window = Window((1, 1), pads=(top, left, bottom, right))
    layer = Layer(node.name or "", x, p.new_activation(y, y_form), window, _pad_value(node), reduce="max")
    p.add_layer(node, layer, reads, y_form)


def _constant_pads(node: ir.Node) -> tuple[int, int, int, int]:
    """Return the padding (top, left, bottom, right) of a Pad. Raises NotOffloadable if it pads anything else."""
    axes = image_axes(len(node.inputs[0].shape or ()))  # type: ignore[union-attr]
    pads, axes_value = constant(operand(node, "pads")), operand(node, "axes")
    padded_axes = np.arange(len(axes)) if axes_value is None else constant(axes_value)
    if pads is None or padded_axes is None:
        raise NotOffloadable("its pads are not constant; export them as an initializer")
    padding = np.zeros((2, 4), np.int64)
    for number, axis in enumerate(padded_axes.tolist()):
        padding[:, axes[axis % len(axes)]] = pads.reshape(2, -1)[:, number]
    if np.any(padding[:, :2]):
        raise NotOffloadable("it pads images or channels; pad rows and columns alone")
    if np.any(padding < 0):
        raise NotOffloadable("it cuts what it pads; cut with Slice")
    (top, left), (bottom, right) = padding[:, 2:].tolist()
    return top, left, bottom, right


def _pad_value(node: ir.Node) -> int:
    """Return the value that a Pad adds, as the accelerator stores it. Raises NotOffloadable if it is not constant."""
    constant_value = operand(node, "constant_value")
    array = np.zeros(1, node.inputs[0].dtype.numpy()) if constant_value is None else constant(constant_value)  # type: ignore[union-attr]
    if array is None or array.size != 1:
        raise NotOffloadable("what it pads with is not constant; export it as an initializer")
    return int(array.item()) - (128 if array.dtype == np.uint8 else 0)
