"""Layers of products of two activations, with the views around them, key-value caches, and sums of blocks.

The first operand is x of a layer, the second is loaded as weights from where a layer has stored it. Forms with the fold
"rows", "columns" or "heads" (program.model.MATRICES) say how matrices lie in the channels and pixels of an activation.
Reshapes and Transposes between products change the form only.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from math import prod

import numpy as np
import onnx_ir as ir

from celosia.compiler import numerics
from celosia.compiler.graph.operands import is_operand, operand
from celosia.compiler.graph.select.forms import NO_WAY, ActivationLayout, NotOffloadable, natural_form, shape_of
from celosia.compiler.graph.select.parameters import array_of, fold_scales, requantise_alike, scalar_of, stored_zero
from celosia.compiler.graph.select.placement import LayerAssignment, Placement, Reads
from celosia.compiler.graph.values import attribute, constant, is_op, shape
from celosia.compiler.layer import ActivationGemm, Gemm, Layer, StridedView, Window, summands
from celosia.compiler.ops import VIEWS
from celosia.compiler.program.model import MATRICES, matrix_counts, matrix_sizes
from celosia.compiler.tensorize import pack
from celosia.hw.spec.config import Config

MOVES = "moves"
"""Key in the `meta` of a node that moves elements only: a product by the identity, or a Transpose that pads to whole
blocks."""
MAX_MATRICES = 256
"""Limit of the layers of one operator, one for each of its matrices."""


def can_multiply_activations(cfg: Config) -> bool:
    """Whether the accelerator can multiply two activations.

    Neighbouring pixels of a channel group must be a whole entry of wgt, to be loaded as weights.
    """
    return cfg.batch == 1 and cfg.block_in == cfg.block_out


def rows_form(p: Placement, value: ir.Value, result: ir.Value) -> ActivationLayout:
    """Return the form of `value`, the operand of a product by a constant matrix that gives `result`.

    Its rows are pixels of one image if products of two activations may read the result; else they are images of one
    pixel, which the array computes in batches.
    """
    dims = shape_of(value)
    is_matrix_of_pixels = len(dims) == 2 and (
        _has_pixel_rows(p, value) or (p.held_form(value) is None and _is_split_into_heads(result))
    )
    is_one_matrix = len(dims) > 2 and prod(dims[:-2]) == 1
    if can_multiply_activations(p.cfg) and (is_one_matrix or is_matrix_of_pixels):
        return ActivationLayout((1, dims[-1], 1, dims[-2]), "rows")
    return natural_form(value, rows=True)


def _has_pixel_rows(p: Placement, value: ir.Value) -> bool:
    """Whether the matrix `value` is held with rows as pixels, or is a reshaped tensor of more axes with the same
    rows."""
    held, producer = p.held_form(value), value.producer()
    if held is not None or producer is None or not is_op(producer, *VIEWS) or producer.inputs[0] is None:
        return held is not None and held.fold == "rows"
    before = shape(producer.inputs[0])
    return before is not None and len(before) > 2 and before[-1] == shape_of(value)[-1] > 1


def _is_split_into_heads(value: ir.Value) -> bool:
    """Whether all readers of the matrix `value` reshape its rows into several shorter ones, as attention heads need."""
    readers = [use.node for use in value.uses()]
    shapes = [shape(node.outputs[0]) or () for node in readers]
    columns = shape_of(value)[-1]
    splits_rows = all(len(dims) > 2 and dims[-1] < columns and columns % dims[-1] == 0 for dims in shapes)
    return bool(readers) and all(is_op(node, *VIEWS) for node in readers) and splits_rows


def matrices_form(cfg: Config, value: ir.Value, fold: str, pad: int = 0, block: int = 1) -> ActivationLayout:
    """Return the form of an operand or result of a product of two activations; each matrix begins on a channel group.

    fold: a key of MATRICES. pad: the byte that the host puts in channels beyond the last. block: the number of rows is
    rounded up to a multiple of it.
    """
    return form_of_matrices(cfg, shape_of(value), fold, pad, block)


def form_of_matrices(cfg: Config, dims: tuple[int, ...], fold: str, pad: int = 0, block: int = 1) -> ActivationLayout:
    """Return what `matrices_form` does, for a tensor of this shape."""
    count, columns, rows = matrix_counts(fold, dims)
    channels = pack.blocks(columns, cfg.group) * cfg.group
    dims = 1, count * channels, 1, pack.blocks(rows, block) * block
    return ActivationLayout(dims, fold, pad=pad if channels > columns else 0)


def place_activation_product(p: Placement, node: ir.Node) -> None:
    """Place a QLinearMatMul of two activations: one layer for each matrix. Raises NotOffloadable."""
    cfg, (a, b, y) = p.cfg, (operand(node, "a"), operand(node, "b"), node.outputs[0])
    assert a is not None and b is not None
    if constant(b) is not None:
        raise NotOffloadable(
            f"its matrix has {len(shape_of(b))} dimensions; the accelerator multiplies by constants of two"
        )
    if not can_multiply_activations(cfg):
        raise NotOffloadable(
            "both operands vary, which takes batch = 1 and block_in = block_out; compile it for such a Config"
        )
    if len(shape_of(a)) < 2 or shape_of(a)[:-2] != shape_of(b)[:-2]:
        raise NotOffloadable(f"it broadcasts {shape(a)} with {shape(b)}; give both as many matrices")
    count, depth, rows = matrix_counts("rows", shape_of(a))
    columns, (shared, times, fold) = shape_of(b)[-1], shared_operand(b)
    if count > MAX_MATRICES:
        raise NotOffloadable(
            f"it multiplies {count} matrices, more than {MAX_MATRICES}; give the model fewer samples or heads at once"
        )
    zero_a, zero_b = stored_zero(operand(node, "a_zero_point")), stored_zero(operand(node, "b_zero_point"))
    x_form = matrices_form(cfg, a, "rows", zero_a)
    w_form = matrices_form(cfg, shared, fold, zero_b, cfg.block_out)
    if p.viewed_tensor(a) in p.padded_outputs and (held := p.held_form(shared)) is not None:
        w_form = replace(w_form, pad=held.pad)  # a holds its zero point there, so any byte adds nothing
    y_form = matrices_form(cfg, y, "rows")
    offset_a, offset_b = -zero_a, -zero_b
    if (
        p.held_form(a) != x_form
        and p.held_form(shared) != w_form
        and len(summands(1 - offset_a)) < len(summands(offset_a))
    ):
        # The host arranges both. It complements all bits, which makes v to -1 - v: an offset of 128 becomes -127.
        x_form, w_form = replace(x_form, inverted=True), replace(w_form, inverted=True)
        offset_a, offset_b = 1 - offset_a, 1 - offset_b
    reads: Reads = {}
    x, w, whole = p.read(a, x_form, reads, constants=True), p.read(shared, w_form, reads), p.new_activation(y, y_form)
    if depth % cfg.group and not (reads or p.viewed_tensor(a) in p.padded_outputs):
        raise NotOffloadable(f"{depth} columns are not whole groups of {cfg.group}; make them a multiple of that")
    scales = [operand(node, name) for name in ("a_scale", "b_scale", "y_scale")]
    for value in scales:
        scalar_of(value)  # raises NotOffloadable
    scale = numerics.conv_scale(*map(array_of, scales)).reshape(-1)
    multiplier, shift = fold_scales(scale)
    requantise = requantise_alike(
        columns, 0, int(multiplier[0]), int(shift[0]), stored_zero(operand(node, "y_zero_point"))
    )
    layers = [
        Layer(
            node.name or "" if count == 1 else f"{node.name}.{number}",
            x.region((1, depth, 1, rows), number * pack.blocks(depth, cfg.group), x.pixels),
            whole.region((1, columns, 1, rows), number * pack.blocks(columns, cfg.group), whole.pixels),
            product=ActivationGemm(
                w.region((1, depth, 1, w.width), number // times * pack.blocks(depth, cfg.group), w.pixels),
                offset_a, offset_b, transposes=bool(node.meta.get(MOVES)),
            ),
            requantise=requantise,
        )
        for number in range(count)
    ]  # fmt: skip
    if count == 1:
        p.add_layer(node, replace(layers[0], y=whole), reads, y_form)
    else:
        p.add_parts(node, layers, reads, whole, y_form)


# Operands of several heads ------------------------------------------------------------------------------------------


def shared_operand(value: ir.Value) -> tuple[ir.Value, int, str]:
    """Return the tensor from which products read their second operand `value`, skipping repetition and transposition.

    Returns (tensor, how many matrices of `value` in a row are the same matrix of it, "rows" or "columns": the fold in
    which it must be held). Grouped-query attention repeats the keys and values of a group for each of its heads.
    """
    producer = value.producer()
    if producer is not None and _swaps_last_axes(producer):
        source, times = _undo_repeat(producer.inputs[0])
        if times > 1:
            return source, times, "rows"
    return *_undo_repeat(value), "columns"


def _undo_repeat(value: ir.Value | None) -> tuple[ir.Value, int]:
    """Return the tensor [n, groups, rows, columns] of which `value` repeats each matrix `times` times, and `times`.

    The pattern is that of grouped-query attention: Reshape(Expand(Unsqueeze(x))). Returns (`value`, 1) for others.
    """
    assert value is not None
    shapes, source = [], value
    for op in ("Reshape", "Expand", "Unsqueeze"):
        producer = source.producer()
        if producer is None or not is_op(producer, op) or producer.inputs[0] is None:
            return value, 1
        shapes.append(shape(source))
        source = producer.inputs[0]
    before, (after, expanded, unsqueezed) = shape(source), shapes
    if before is None or after is None or expanded is None or len(before) < 3 or len(expanded) != len(before) + 1:
        return value, 1
    groups, matrix, times = before[:-2], before[-2:], expanded[-3]
    repeats = unsqueezed == (*groups, 1, *matrix) and expanded == (*groups, times, *matrix)
    return (source, times) if repeats and after == (*groups[:-1], groups[-1] * times, *matrix) else (value, 1)


def _swaps_last_axes(node: ir.Node) -> bool:
    """Whether `node` is a Transpose that exchanges the last two axes only."""
    perm = attribute(node, "perm") if is_op(node, "Transpose") else None
    rank = len(perm or ())
    return perm is not None and list(perm) == [*range(rank - 2), rank - 1, rank - 2]


def skip_repeat(p: Placement, node: ir.Node) -> bool:
    """Leave out `node` if it only repeats or transposes matrices for products, which then read its input directly.

    Returns whether it does.
    """
    if not can_multiply_activations(p.cfg) or not is_op(node, "Unsqueeze", "Expand", "Reshape", "Transpose"):
        return False
    y = node.outputs[0]
    operands = _right_operands_of(y)
    is_skipped = bool(operands) and all(
        shared_operand(value)[1] > 1 and y in _tensors_up_to(value) for value in operands or ()
    )
    if is_skipped:
        p.selection.views[node] = "part of the products that read it"
    return is_skipped


def _tensors_up_to(end: ir.Value) -> list[ir.Value]:
    """Return the tensors on the way from `shared_operand(end)`, which is not among them, to `end`."""
    source, between = shared_operand(end)[0], []
    while end is not source:
        between.append(end)
        end = end.producer().inputs[0]  # type: ignore[union-attr,assignment]
    return between


def _right_operands_of(value: ir.Value) -> list[ir.Value] | None:
    """Return the second operands of products that are `value` or made of it by reshaping and transposing.

    None if another node reads it, or it is an output of the graph.
    """
    right_operands = []
    for use in value.uses():
        if is_op(use.node, "QLinearMatMul") and is_operand(use.node, use.idx, "b"):
            right_operands.append(value)
            continue
        only_arranges = is_op(use.node, "Unsqueeze", "Expand", "Reshape") or _swaps_last_axes(use.node)
        behind = _right_operands_of(use.node.outputs[0]) if only_arranges and use.idx == 0 else None
        if behind is None:
            return None
        right_operands += behind
    return None if value.is_graph_output() else right_operands


# Caches -----------------------------------------------------------------------------------------------------------


def append_to_cache(p: Placement, node: ir.Node, operands: list[ir.Value]) -> bool:
    """Place a concatenation of the rows of a key cache and new rows, which only products of two activations read.

    The host fills the storage with the rows of the cache, and a layer copies the new rows behind them. Returns False if
    `node` is another concatenation. Raises NotOffloadable.
    """
    y = node.outputs[0]
    directly, transposed = _read_by_products(y)
    if not can_multiply_activations(p.cfg) or not (directly or transposed):
        return False
    first, *others = operands
    rank, held = len(shape_of(y)), p.held_form(operands[-1])
    if directly or len(others) != 1 or attribute(node, "axis", 1) % rank != rank - 2:
        raise NotOffloadable(f"the host arranges it for the products that read it; {NO_WAY}")
    if p.held_form(first) is not None or held is None or held.fold != "rows" or shape_of(y)[-1] % p.cfg.group:
        raise NotOffloadable(
            "the accelerator appends rows that it holds itself to those of the host, in whole groups of channels; "
            "quantise what makes them"
        )
    form = matrices_form(p.cfg, y, "rows", block=p.cfg.block_out)
    whole = p.new_activation(y, form)
    cached_rows, new_rows = (matrix_counts("rows", shape_of(value))[2] for value in (first, others[0]))
    source = p.selection.written[p.viewed_tensor(others[0])]
    place = whole.region((*form.dims[:3], new_rows), 0, StridedView(1, whole.width, 0, cached_rows))
    copy = Layer(f"{node.name}.1", source, place)
    p.selection.choices.append(LayerAssignment(copy, [node], {whole.storage: (first, form)}, y))
    p.selection.forms[y], p.selection.written[y] = form, whole
    return True


def _read_by_products(value: ir.Value) -> tuple[bool, bool]:
    """Return whether all readers are products with `value` as second operand, and whether all with its transpose."""
    ends = _right_operands_of(value) or []
    transposed = [end.producer() is not None and _swaps_last_axes(end.producer()) for end in ends]  # type: ignore[arg-type]
    sources = all(end is value or shared_operand(end)[0] is value or _before_transpose(end) is value for end in ends)
    return bool(ends) and sources and not any(transposed), bool(ends) and sources and all(transposed)


def _before_transpose(end: ir.Value) -> ir.Value | None:
    """Return the tensor of which `end` is the transpose; None if no Transpose of the last axes makes it."""
    producer = end.producer()
    return producer.inputs[0] if producer is not None and _swaps_last_axes(producer) else None


def pad_to_whole_blocks(p: Placement, node: ir.Node, held: ActivationLayout) -> bool:
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


# Views ------------------------------------------------------------------------------------------------------------


def reshape_in_place(p: Placement, node: ir.Node, held: ActivationLayout) -> bool:
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


def transpose_in_place(p: Placement, node: ir.Node, held: ActivationLayout) -> bool:
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


def _record_view(p: Placement, node: ir.Node, form: ActivationLayout) -> None:
    """Record that the output of `node` is the bytes of its input, in `form`."""
    y = node.outputs[0]
    p.viewed[y] = p.viewed_tensor(node.inputs[0])  # type: ignore[arg-type]
    p.selection.forms[y] = form
    p.selection.views[node] = "free: the same bytes"


SUMS_NOTE = (
    "integer sums by block; scaled in floats on the CPU, within 2e-6 of the root mean square of onnxruntime's result"
)


def place_block_sums(p: Placement, node: ir.Node) -> None:
    """Place BlockSums (graph/block_sums.py), whose int32 sums leave the accelerator as bytes. Raises NotOffloadable.

    The weights are [parts, blocks, columns of a part, block size]; each part of the columns is a layer.
    """
    if not p.cfg.sums:
        raise NotOffloadable("int32 sums leave the accelerator byte by byte; give it a Config with sums = true")
    value, y, sum_bytes = node.inputs[0], node.outputs[0], attribute(node, "sum_bytes")
    assert value is not None
    w = array_of(operand(node, "w"))
    parts, blocks, lanes, size = w.shape
    reads: Reads = {}
    rows, channels = prod(shape_of(value)[:-2]), sum_bytes * blocks * lanes
    y_form = ActivationLayout((rows, parts * channels, 1, 1))
    x, whole = p.read(value, ActivationLayout((rows, blocks * size, 1, 1)), reads), p.new_activation(y, y_form)
    depth, columns = (attribute(node, name) for name in "KN")
    layers: list[Layer] = []
    for number in range(parts):
        part = whole.region((whole.images, channels, 1, 1), number * channels // p.cfg.group, whole.pixels)
        weights = np.ascontiguousarray(w[number]).reshape(blocks * lanes, size, 1, 1)
        name = node.name or "" if parts == 1 else f"{node.name}.{number}"
        filling = weights.size - depth * max(0, min(lanes, columns - number * lanes))
        layers.append(Layer(name, x, part, gemm=Gemm(weights, blocks, filling=filling, sum_bytes=sum_bytes)))
    p.add_parts(node, layers, reads, whole, y_form, SUMS_NOTE)
