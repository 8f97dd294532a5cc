"""Operators that only move elements: a view where the accelerator's bytes stay in their order, else layers that copy.

Views      Reshape and the like, which change the shape only; a Transpose of matrices that changes their form only
Parts      Split and Slice: regions of the input, which cost nothing, but for columns of matrices and every n-th column
Transpose  of rows and columns: one copy for each column; of matrices: padded to whole blocks where products load it
Copies     Resize, Gather, DepthToSpace, SpaceToDepth: copies between strided views, over which LOAD and STORE step
Channels   Gather of channels that are not whole groups: a product by a matrix of zeros and ones
Pad        a max pooling with windows of one pixel
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import groupby, product

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from celosia.compiler.expr import placeholder
from celosia.compiler.graph.channel_moves import is_read_as_bytes
from celosia.compiler.graph.operands import joins_parts, multiplies_matrices, operand
from celosia.compiler.graph.select.matrices import MOVES, holds_matrices, matrices_form, nth_matrix, right_operands_of
from celosia.compiler.graph.select.parameters import (
    flattens_image,
    fold_scales,
    has_fixed_matrix,
    image_axes,
    requantise_alike,
)
from celosia.compiler.graph.select.placement import (
    HOST_INPUT,
    NO_WAY,
    ActivationLayout,
    NotOffloadable,
    Placement,
    Reads,
    natural_form,
    shape_of,
)
from celosia.compiler.graph.select.views import take_as_moved_view
from celosia.compiler.graph.values import attribute, attributes_of, constant, is_op, shape
from celosia.compiler.layer import Activation, Gemm, Layer, StridedView, Window
from celosia.compiler.ops import VIEWS
from celosia.compiler.ops.registry import Node, Unsupported
from celosia.compiler.ops.resize import nearest_indices
from celosia.compiler.program.host.shape_rules import slice_positions
from celosia.compiler.program.model import MATRICES, matrix_counts, matrix_sizes
from celosia.compiler.tensorize import pack

SAME_BYTES = tuple(sorted(VIEWS - {"Dropout"}))
"""Operators that only change the shape; they are free if the bytes lie in the same order on the accelerator."""
MAX_COPIES = 16
"""Limit of the copies, a layer each, of one operator."""
Copy = tuple[tuple[int, int, int, int], tuple[int, StridedView], tuple[int, StridedView]]
"""[images, channels, height, width] of a copy, (first channel group, strided view) that it reads, and those that it
writes."""


# Views ----------------------------------------------------------------------------------------------------------------


def take_as_view(p: Placement, node: ir.Node) -> bool:
    """Make the output of `node` a view of its input if the bytes stay the same. Returns whether they do."""
    x, y = node.inputs[0], node.outputs[0]
    if x is None or y.is_graph_output():
        return False
    held = p.held_form(x)
    if held is None:
        return False
    if held.fold:
        return _reshape_in_place(p, node, held)
    form = p.common_form(y)
    if held != form and _folds_into_gemm(p, node):
        p.selection.views[node] = "part of the matrix multiplications that read it"
        return True
    if held != form:
        return _join_rows_in_place(p, node, held, form)
    _record_view(p, node, form)
    return True


def _folds_into_gemm(p: Placement, node: ir.Node) -> bool:
    """Whether `node` flattens images that only products by constant matrices read: these become convolutions."""
    users = [use.node for use in node.outputs[0].uses()]
    return flattens_image(node) and bool(users) and all(
        multiplies_matrices(user) and user.inputs[0] is node.outputs[0] and has_fixed_matrix(user)
        for user in users
    )  # fmt: skip


def _join_rows_in_place(p: Placement, node: ir.Node, held: ActivationLayout, form: ActivationLayout) -> bool:
    """Make `y` a view of `x` with other heights and widths, such as all rows of an image as one row, if that is
    possible."""
    x = node.inputs[0]
    source = p.selection.written.get(p.viewed_tensor(x)) if x is not None else None
    if source is None or held.dims[:2] != form.dims[:2] or math.prod(held.dims) != math.prod(form.dims):
        return False
    return _reshape_pixels(p, node, source, form)


def _reshape_in_place(p: Placement, node: ir.Node, held: ActivationLayout) -> bool:
    """Make the output of a reshape a view of its input if it is the same matrices, or splits or merges heads.

    Heads are several matrices side by side in the columns of one. Returns whether that is so. held: the input's form.
    """
    x, y = node.inputs[0], node.outputs[0]
    assert x is not None
    before, after, channels = matrix_sizes(shape_of(x)), matrix_sizes(shape_of(y)), held.dims[1]
    fold = held.fold if before == after else ""
    if held.fold == "rows" and before == (1, after[0], channels) and after[2] % p.cfg.group == 0:
        fold = fold or "heads"
    if held.fold == "heads" and after == (1, before[0], channels) and channels == before[1] * before[2]:
        fold = "rows"
    if fold:
        _record_view(p, node, replace(held, fold=fold))
    return bool(fold)


def _transpose_in_place(p: Placement, node: ir.Node, held: ActivationLayout) -> bool:
    """Make the output of a Transpose a view of its input if a form with another fold describes the same bytes.

    Returns whether there is such a form. held: the form of the input.
    """
    x, y = node.inputs[0], node.outputs[0]
    assert x is not None
    dims, order = shape_of(x), MATRICES[held.fold]
    perm = attribute(node, "perm") or list(range(len(dims)))[::-1]
    axes = [*[order[0]] * (len(dims) - 2), *order[-min(2, len(dims)) :]]
    permuted = [axes[axis] for axis in perm if dims[axis] > 1]  # of matrix (0), channel (1) and pixel (2)
    matrix_axes = [axis for axis in perm if dims[axis] > 1 and axes[axis] == order[0]]
    merged = [axis for axis, _ in groupby(permuted)]
    for fold, wanted in MATRICES.items():
        is_same_size = matrix_counts(fold, shape_of(y)) == matrix_counts(held.fold, dims)
        in_order = matrix_axes == sorted(matrix_axes) and merged == [axis for axis in wanted if axis in permuted]
        if is_same_size and in_order:
            _record_view(p, node, replace(held, fold=fold))
            return True
    return False


def _swap_sequence_in_place(p: Placement, node: ir.Node, held: ActivationLayout) -> bool:
    """Make the output of a Transpose a view of its input if one is a sequence, and the other a matrix of its elements.

    The pixels of a sequence [1, channels, length], or of an image of one row or column, are the rows of the matrix
    [length, channels]; further axes are 1. Returns whether the Transpose is one of the two; not where products of two
    activations read the transposed matrix. held: the form of the input.
    """
    x, y = node.inputs[0], node.outputs[0]
    assert x is not None
    dims, result = shape_of(x), shape_of(y)
    images, channels, height, width = held.dims
    length, perm = height * width, attribute(node, "perm")
    if perm is None or held.inverted or images != 1 or 1 not in (height, width) or right_operands_of(y):
        return False
    long_axes = [axis for axis in perm if dims[axis] > 1]
    if held.fold == "rows" and matrix_counts("rows", dims) == (1, channels, length) and len(result) in (3, 4):
        form = natural_form(y)
    elif not held.fold and held == natural_form(x) and matrix_counts("rows", result) == (1, channels, length):
        form = ActivationLayout((1, channels, 1, length), "rows")
    else:
        return False
    if form.dims[:2] != held.dims[:2] or (len(long_axes) > 1 and long_axes == sorted(long_axes)):
        return False
    source = p.selection.written[p.viewed_tensor(x)]
    if source.dims == form.dims:
        _record_view(p, node, form)
        return True
    return _reshape_pixels(p, node, source, form)


def _reshape_pixels(p: Placement, node: ir.Node, source: Activation, form: ActivationLayout) -> bool:
    """Make the output of `node` a view of `source` with the rows and columns of `form`; return whether that is
    possible.

    The storage is then `reshaped`: it must not become a part of another, whose rows would lie apart.
    """
    x, y = node.inputs[0], node.outputs[0]
    held = p.held_form(x) if x is not None else None
    if held is None or source.dims != held.dims or source.strided_view is not None or source.storage in p.enclosing:
        return False
    act = replace(source, name=y.name or "", height=form.dims[2], width=form.dims[3])
    p.reshaped.add(source.storage)
    p.selection.forms[y], p.selection.written[y] = form, act
    p.selection.views[node] = "free: the same bytes"
    return True


def _record_view(p: Placement, node: ir.Node, form: ActivationLayout) -> None:
    """Record that the output of `node` is the bytes of its input, in `form`."""
    y = node.outputs[0]
    p.viewed[y] = p.viewed_tensor(node.inputs[0])  # type: ignore[arg-type]
    p.selection.forms[y] = form
    p.selection.views[node] = "free: the same bytes"


# Parts: Split and Slice -----------------------------------------------------------------------------------------------


def place_split_or_slice(p: Placement, node: ir.Node) -> None:
    """Record the outputs of a Split or Slice as parts of its input; they cost nothing, but for every n-th column.

    Raises NotOffloadable if the accelerator cannot address such parts.
    """
    x = node.inputs[0]
    assert x is not None
    if is_op(node, "Slice") and holds_matrices(p, x):
        if not _is_only_joined(node.outputs[0]) and _place_matrix_parts(p, node):
            return
        return _place_column_slice(p, node)
    form = natural_form(x)
    if p.held_form(x) != form:
        raise NotOffloadable(HOST_INPUT)
    source = p.selection.written[p.viewed_tensor(x)]
    parts = [_region(p, source, ranges) for ranges in _output_ranges(node)]
    if parts[0].pixels.across > 1:  # a LOAD that skips columns cannot pad rows
        y, (part,) = natural_form(node.outputs[0]), parts
        p.add_layer(node, Layer(node.name or "", part, p.new_activation(node.outputs[0], y)), {}, y)
        return
    for value, part in zip(node.outputs, parts):
        act = replace(part, name=value.name or "")
        p.selection.forms[value], p.selection.written[value] = natural_form(value), act
        p.parts.add(value)
    p.selection.views[node] = "free: part of the same bytes"


def _region(p: Placement, source: Activation, ranges: tuple[range, range, range, range]) -> Activation:
    """Return the part of `source` that has these images, channels, rows and columns. Raises NotOffloadable."""
    images, channels, rows, columns = ranges
    if len(images) != source.images or images.step != 1:
        raise NotOffloadable("it takes some of the images; take channels, rows or columns")
    if channels.step != 1 or channels.start % p.cfg.group:
        raise NotOffloadable(
            f"its channels do not begin on a group of {p.cfg.group}, and it cuts other axes, too; "
            "cut channels alone, or begin at a multiple of that"
        )
    if rows.step < 1 or columns.step < 1:
        raise NotOffloadable("it turns rows or columns round; take them with a positive step")
    strided_view = StridedView(source.height, source.width, rows.start, columns.start, rows.step, columns.step)
    dims = source.images, len(channels), len(rows), len(columns)
    return source.region(dims, channels.start // p.cfg.group, strided_view)


def _output_ranges(node: ir.Node) -> list[tuple[range, range, range, range]]:
    """Return for each output of a Split or Slice the images, channels, rows and columns of its input that it takes."""
    form, axes = natural_form(node.inputs[0]), image_axes(len(node.inputs[0].shape or ()))  # type: ignore[union-attr,arg-type]
    positions = [range(size) for size in form.dims]
    if node.op_type == "Split":
        axis, start, outputs = attribute(node, "axis", 0) % len(axes), 0, []
        for y in node.outputs:
            size = (shape(y) or ())[axis]
            outputs.append([*positions[: axes[axis]], range(start, start + size), *positions[axes[axis] + 1 :]])
            start += size
    else:
        for axis, selected in _cut_axes(node, [positions[axis] for axis in axes]):
            positions[axes[axis]] = selected
        outputs = [positions]
    if any(not len(selected) for ranges in outputs for selected in ranges):
        raise NotOffloadable("an output is empty; leave it out of the model")
    return [(images, channels, rows, columns) for images, channels, rows, columns in outputs]


def _cut_axes(node: ir.Node, positions: list[range]) -> list[tuple[int, range]]:
    """Return each axis that a Slice cuts, with the positions that it takes of `positions`, all those of its input.

    Raises NotOffloadable if starts, ends, axes or steps are not constant or impossible.
    """
    lists: list[list[int] | None] = []
    for name in ("starts", "ends", "axes", "steps"):
        numbers = attribute(node, name)
        if numbers is None and (value := operand(node, name)) is not None:
            array = constant(value)
            if array is None:
                raise NotOffloadable(f"its {name} are not constant; export them as initializers")
            numbers = array.reshape(-1).tolist()
        lists.append(numbers)
    starts, ends, axes, steps = lists
    assert starts is not None and ends is not None
    axes, steps = axes or list(range(len(starts))), steps or [1] * len(starts)
    if 0 in steps or not all(-len(positions) <= axis < len(positions) for axis in axes):
        raise NotOffloadable("its axes or steps are impossible; export axes that its input has, and steps other than 0")
    return [
        (axis % len(positions), slice_positions(len(positions[axis]), start, end, step))
        for start, end, axis, step in zip(starts, ends, axes, steps, strict=True)
    ]


def _place_matrix_parts(p: Placement, node: ir.Node) -> bool:
    """Record the output of a Slice or Gather of rows or columns of one matrix as a part of it; it costs nothing.

    Returns False if `node` takes other elements. Raises NotOffloadable if columns are no whole channel groups.
    """
    (x, y), group = (node.inputs[0], node.outputs[0]), p.cfg.group
    assert x is not None
    dims = shape_of(x)
    sizes = [range(size) for size in dims]
    for axis, places in [_gathered_positions(node, dims)] if is_op(node, "Gather") else _cut_axes(node, sizes):
        sizes[axis] = places
    *others, rows, columns = sizes if len(sizes) > 1 else (range(1), *sizes)
    if math.prod(dims[:-2]) != 1 or rows.step < 1 or columns.step != 1 or any(len(size) != 1 for size in others):
        return False
    if columns.start % group or (columns.stop != dims[-1] and len(columns) % group) or not rows or not columns:
        raise NotOffloadable(
            f"it takes columns of matrices that are no whole groups of {group}; "
            "begin at a multiple of that, and take a multiple of it"
        )
    source = p.selection.written[p.viewed_tensor(x)]
    part_dims = (1, len(columns), 1, len(rows))
    pixels = StridedView(1, source.width, 0, rows.start, 1, rows.step)
    part, form = source.region(part_dims, columns.start // group, pixels), ActivationLayout(part_dims, "rows")
    if rows.step > 1:  # a LOAD that skips columns cannot pad rows
        p.add_layer(node, Layer(node.name or "", part, p.new_activation(y, form)), {}, form)
        return True
    p.selection.forms[y], p.selection.written[y] = form, replace(part, name=y.name or "")
    p.parts.add(y)
    p.selection.views[node] = "free: part of the same bytes"
    return True


def _gathered_positions(node: ir.Node, dims: tuple[int, ...]) -> tuple[int, range]:
    """Return the axis of a Gather and the positions that it takes, evenly spaced. Raises NotOffloadable for others."""
    index, axis = constant(operand(node, "indices")), attribute(node, "axis", 0) % len(dims)
    runs = (
        []
        if index is None or index.ndim > 1
        else _split_into_runs(np.where(index < 0, index + dims[axis], index).reshape(-1))
    )
    if len(runs) != 1:
        raise NotOffloadable("its indices are no constant list of even steps; export them as an initializer")
    return axis, runs[0][1]


def _place_column_slice(p: Placement, node: ir.Node) -> None:
    """Place a Slice of columns of matrices: one copy for each matrix.

    Raises NotOffloadable if the columns are not whole channel groups, or if no concatenation reads the result.
    """
    (x, y), group = (node.inputs[0], node.outputs[0]), p.cfg.group
    assert x is not None
    sizes = [range(size) for size in shape_of(x)]
    for axis, places in _cut_axes(node, sizes):
        sizes[axis] = places
    if not _is_only_joined(y):
        raise NotOffloadable(
            "nothing puts the columns that it takes beside others; join them with Concat along the last axis"
        )
    *others, columns = sizes
    if any(len(places) != size for places, size in zip(others, shape_of(x))):
        raise NotOffloadable(
            "it takes some of the rows, or of the matrices, that the accelerator holds; take columns of all of them"
        )
    if columns.step != 1 or columns.start % group or not columns or len(columns) % group:
        raise NotOffloadable(
            f"it takes columns of matrices that are no whole groups of {group}; "
            "begin at a multiple of that, and take a multiple of it"
        )
    source, form = p.selection.written[p.viewed_tensor(x)], matrices_form(p.cfg, shape_of(y), "rows")
    whole, layers = p.new_activation(y, form), list[Layer]()
    for number in range(matrix_counts("rows", shape_of(x))[0]):
        matrix, part = nth_matrix(p, source, x, number), nth_matrix(p, whole, y, number)
        selected_columns = matrix.region(part.dims, columns.start // group, matrix.pixels)
        layers.append(Layer(f"{node.name}.{number}", selected_columns, part))
    p.add_parts(node, layers, {}, whole, form)


def _is_only_joined(value: ir.Value) -> bool:
    """Whether only concatenations read `value`, directly or after a table."""
    readers = [use.node for use in value.uses()]
    return bool(readers) and all(
        joins_parts(node) or (is_op(node, "Table") and _is_only_joined(node.outputs[0])) for node in readers
    )


# Transpose ------------------------------------------------------------------------------------------------------------


def place_transpose(p: Placement, node: ir.Node) -> None:
    """Place a Transpose: free for matrices that only change their form, and between a sequence [1, channels, width] and
    the matrix [1, width, channels]; else of rows and columns by copies.

    A copy takes one column of x, which becomes a row of y. Raises NotOffloadable.
    """
    value = node.inputs[0]
    assert value is not None
    held = p.held_form(value)
    if held is not None and held.fold and node.meta.get(MOVES) and _pad_to_whole_blocks(p, node, held):
        return
    if held is not None and _swap_sequence_in_place(p, node, held):
        return
    if held is not None and held.fold and _transpose_in_place(p, node, held):
        return
    if take_as_moved_view(p, node):
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


def _pad_to_whole_blocks(p: Placement, node: ir.Node, held: ActivationLayout) -> bool:
    """Place a Transpose of matrices whose rows are no whole blocks: add rows, so that products can load them as
    weights.

    If a product by a constant matrix makes them, it also makes the added rows, of padding. Else a layer copies the
    matrices and adds rows of zeros. Returns False if the rows are whole blocks already. held: the form of the input.
    """
    x, y, rows = node.inputs[0], node.outputs[0], held.dims[3]
    assert x is not None
    width = pack.blocks(rows, p.cfg.block_out) * p.cfg.block_out
    if width == rows:
        return False
    form, source = replace(held, dims=(*held.dims[:3], width)), p.selection.written[p.viewed_tensor(x)]
    window = Window((1, 1), pads=(0, 0, 0, width - rows))
    if not (views := _views_up_to_product(p, x)):
        p.add_layer(node, Layer(node.name or "", source, p.new_activation(y, form), window, reduce="max"), {}, form)
        return True
    for value in views:
        p.selection.forms[value] = replace(p.selection.forms[value], dims=form.dims)
    choice = p.producers[views[-1]]
    assert choice.layer.gemm is not None
    gemm = replace(choice.layer.gemm, spare=width - rows)
    choice.layer = replace(choice.layer, y=p.new_activation(choice.value, form), window=window, gemm=gemm)
    p.selection.written[choice.value] = choice.layer.y
    _record_view(p, node, form)
    return True


def _views_up_to_product(p: Placement, value: ir.Value) -> list[ir.Value]:
    """Return `value` and the tensors that it is a view of, up to the output of a product by a constant matrix.

    Returns [] unless that product can make more rows: it has no residual of several pixels, and each of the tensors has
    one reader only.
    """
    choice, views = p.producers.get(p.viewed_tensor(value)), [value]
    if choice is None or choice.layer.gemm is None or choice.layer.window != Window((1, 1)):
        return []
    while views[-1] is not choice.value:
        producer = views[-1].producer()
        assert producer is not None and producer.inputs[0] is not None
        views.append(producer.inputs[0])
    residual = choice.layer.epilogue.residual
    has_residual_rows = residual is not None and residual.operand.height * residual.operand.width > 1
    has_one_reader = all(len(list(view.uses())) == 1 and not view.is_graph_output() for view in views)
    return views if has_one_reader and not has_residual_rows and p.has_own_storage(choice.value) else []


# Copies ---------------------------------------------------------------------------------------------------------------


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
    copies: list[Copy] = [
        (
            (*form.dims[:2], len(x_rows), len(x_columns)),
            (0, StridedView(*form.dims[2:], x_rows.start, x_columns.start, x_rows.step, x_columns.step)),
            (0, StridedView(*y_form.dims[2:], top, left, down, across)),
        )
        for (top, down, x_rows), (left, across, x_columns) in product(rows, columns)
    ]
    _place_copies(p, node, form, y_form, copies)


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
    if holds_matrices(p, value) and _place_matrix_parts(p, node):
        return
    form, y_form, index = natural_form(value), natural_form(node.outputs[0]), constant(node.inputs[1])
    if index is None or index.ndim != 1:
        raise NotOffloadable("its indices are no constant list; export them as an initializer of one dimension")
    axis = image_axes(len(value.shape or ()))[attribute(node, "axis", 0)]
    if axis == 0:
        raise NotOffloadable("it takes some of the images; take channels, rows or columns")
    index = np.where(index < 0, index + form.dims[axis], index)
    whole, y_whole = StridedView(*form.dims[2:]), StridedView(*y_form.dims[2:])
    copies: list[Copy] = []
    if axis == 1:
        groups = _group_numbers(index, p.cfg.group)
        if value in p.channel_positions or groups is None or len(_split_into_runs(groups, steps=(1,))) > MAX_COPIES:
            return _place_channel_product(p, node, index)
        for place, run in _split_into_runs(groups, steps=(1,)):
            channels = min(len(run) * p.cfg.group, y_form.dims[1] - place * p.cfg.group)
            dims = (y_form.dims[0], channels, *y_form.dims[2:])
            copies.append((dims, (run.start, whole), (place, y_whole)))
    else:
        for place, run in _split_into_runs(index):
            if axis == 2:
                dims = (*y_form.dims[:2], len(run), y_form.dims[3])
                source, target = replace(whole, top=run.start, down=run.step), replace(y_whole, top=place)
            else:
                dims = (*y_form.dims[:3], len(run))
                source, target = replace(whole, left=run.start, across=run.step), replace(y_whole, left=place)
            copies.append((dims, (0, source), (0, target)))
    _place_copies(p, node, form, y_form, copies)


def _place_channel_product(p: Placement, node: ir.Node, index: NDArray[np.int64]) -> None:
    """Place a Gather of channels that are not whole groups, by a product with a matrix of zeros and ones.

    Its requantisation is by 1, so the bytes stay. Groups before the first channel and behind the last are not read.
    Raises NotOffloadable.
    """
    (x, y), group = (node.inputs[0], node.outputs[0]), p.cfg.group
    assert x is not None
    if not is_read_as_bytes(y):
        raise NotOffloadable("only the host reads the channels that it selects; nothing needs to change")
    form = p.held_form(x)
    positions = p.channel_positions.get(x)
    if form is None or (positions is None and form != natural_form(x)):
        raise NotOffloadable(HOST_INPUT)
    source = p.selection.written[p.viewed_tensor(x)]
    index = index if positions is None else positions[index]
    first = int(index.min()) // group
    dims = source.images, int(index.max()) + 1 - first * group, source.height, source.width
    part = source.region(dims, first, StridedView(source.height, source.width))
    weights = np.zeros((len(index), part.channels, 1, 1), np.int8)
    weights[np.arange(len(index)), index - first * group] = 1
    multiplier, shift = fold_scales(np.ones(1, np.float32))
    requantise = requantise_alike(len(index), 0, int(multiplier[0]), int(shift[0]), 0)
    y_form, gemm = natural_form(y), Gemm(weights, filling=weights.size)
    layer = Layer(node.name or "", part, p.new_activation(y, y_form), gemm=gemm, requantise=requantise)
    p.add_layer(node, layer, {}, y_form)


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


def _group_numbers(index: NDArray[np.int64], group: int) -> NDArray[np.int64] | None:
    """Return the channel groups that the channels `index` make up, in order; the last group may be cut short.

    None if they are not whole groups.
    """
    first = index[::group]
    whole = (first[:, None] + np.arange(group)).reshape(-1)[: len(index)]
    return None if np.any(first % group) or not np.array_equal(index, whole) else first // group


def place_depth_to_space(p: Placement, node: ir.Node) -> None:
    """Place a DepthToSpace or SpaceToDepth: one copy for each pixel of a block.

    Raises NotOffloadable, also for other orders of channels, channels that are not whole groups, and large blocks.
    """
    value, size, to_space = node.inputs[0], attribute(node, "blocksize"), node.op_type == "DepthToSpace"
    assert value is not None
    form, y_form = natural_form(value), natural_form(node.outputs[0])
    deep, wide = (form, y_form) if to_space else (y_form, form)  # more channels, more pixels
    if attribute(node, "mode", "DCR") != "DCR":
        raise NotOffloadable(
            "its blocks are the inner axis of its channels (mode CRD); "
            "export it with mode DCR, and the channels of the layer before it in that order"
        )
    channels = wide.dims[1]
    if channels % p.cfg.group:
        raise NotOffloadable(f"{channels} channels are not whole groups of {p.cfg.group}; make them a multiple of that")
    if size * size > MAX_COPIES:
        raise NotOffloadable(f"blocks of {size} x {size} take more than {MAX_COPIES} layers; use smaller blocks")
    dims, copies = (*wide.dims[:2], *deep.dims[2:]), list[Copy]()
    for row, column in product(range(size), repeat=2):
        in_deep = (row * size + column) * (channels // p.cfg.group), StridedView(*deep.dims[2:])
        in_wide = 0, StridedView(*wide.dims[2:], row, column, size, size)
        copies.append((dims, in_deep, in_wide) if to_space else (dims, in_wide, in_deep))
    _place_copies(p, node, form, y_form, copies)


def _place_copies(
    p: Placement, node: ir.Node, form: ActivationLayout, y_form: ActivationLayout, copies: list[Copy]
) -> None:
    """Place one layer for each of `copies`. form, y_form: those of input and output. Raises NotOffloadable."""
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
        Layer(f"{node.name}.{number}", x.region(dims, *source), y.region(dims, *target))
        for number, (dims, source, target) in enumerate(copies)
    ]
    p.add_parts(node, layers, reads, y, y_form)


# Pad ------------------------------------------------------------------------------------------------------------------


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
