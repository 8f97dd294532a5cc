"""Tensors of several matrices, such as the heads of attention, and products of two activations.

Forms with the fold "rows", "columns" or "heads" (program.model.MATRICES) say how matrices lie in the channels and
pixels of an activation; an operator on them takes one layer for each matrix. The first operand of a product is x of a
layer, the second is loaded as weights from where a layer has stored it. Operators that only repeat or transpose
matrices for products are left out (`skip_repeat`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod

import onnx_ir as ir

from celosia.compiler import numerics
from celosia.compiler.graph.operands import MODEL_COLUMNS, is_operand, operand
from celosia.compiler.graph.rows import samples_of_attention
from celosia.compiler.graph.select.parameters import array_of, fold_scales, requantise_alike, scalar_of, stored_zero
from celosia.compiler.graph.select.placement import (
    ActivationLayout,
    NotOffloadable,
    Placement,
    Reads,
    natural_form,
    part_name,
    shape_of,
)
from celosia.compiler.graph.values import attribute, constant, is_op, shape
from celosia.compiler.layer import Activation, ActivationGemm, Layer, summands
from celosia.compiler.ops import VIEWS
from celosia.compiler.program.model import matrix_counts, matrix_sizes
from celosia.compiler.tensorize import pack
from celosia.hw.spec.config import Config

MOVES = "moves"
"""Key in the `meta` of a node that moves elements only: a product by the identity, or a Transpose that pads to whole
blocks."""
MAX_SAMPLES = 8
"""Limit of the samples whose rows are matrices of their own, each with layers of its own."""
MAX_MATRICES = 256
"""Limit of the layers of one operator, one for each of its matrices."""


def can_multiply_activations(cfg: Config) -> bool:
    """Whether the accelerator can multiply two activations.

    Neighbouring pixels of a channel group must be a piece of an entry of wgt, to be loaded as weights.
    """
    return cfg.batch == 1


def columns_multiple(cfg: Config, depth: int, zero_of_w: int) -> int:
    """Return the multiple to which the `depth` columns of x are rounded up in a product of two activations.

    Where the columns fill no whole entries of inp, LOAD completes the entries of wgt with zeros. If w has a zero point
    other than 0, LOAD has another padding to write, and the columns are rounded up to block_in: the added ones hold the
    zero point of x, and so add nothing.
    """
    is_partial = pack.blocks(depth, cfg.group) % cfg.inp_pieces > 0
    return cfg.block_in if is_partial and zero_of_w else 1


def rows_form(p: Placement, value: ir.Value, result: ir.Value) -> ActivationLayout:
    """Return the form of `value`, the operand of a product by a constant matrix that gives `result`.

    Its rows are pixels of one image if products of two activations, or convolutions, may read the result. They are
    images of one pixel where the array computes several images at once.
    """
    dims = shape_of(value)
    is_matrix_of_pixels = len(dims) == 2 and (
        _has_pixel_rows(p, value) or (p.held_form(value) is None and _is_split_into_heads(result))
    )
    is_one_matrix = len(dims) > 2 and prod(dims[:-2]) == 1
    held = p.held_form(value)
    if len(dims) > 2 and held is not None and held.fold == "rows" and holds_matrices(p, value):
        return held
    if held is None and are_samples(p.cfg, value):
        return matrices_form(p.cfg, dims, "rows")
    if p.cfg.batch == 1 and (is_one_matrix or is_matrix_of_pixels):
        return pixel_rows_form(dims)
    return natural_form(value, rows=True)


def are_samples(cfg: Config, value: ir.Value) -> bool:
    """Return whether `value` is several matrices of rows, of a model that multiplies activations of as many samples.

    Each sample is then a matrix of its own, with its heads side by side.
    """
    dims = shape_of(value)
    if len(dims) != 3 or not 1 < dims[0] <= MAX_SAMPLES or dims[1] == 1 or not can_multiply_activations(cfg):
        return False
    graph = next((use.node.graph for use in value.uses()), None)
    return graph is not None and dims[0] in samples_of_attention(graph)


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


def pixel_rows_form(dims: tuple[int, ...]) -> ActivationLayout:
    """Return the form of a tensor of shape `dims` that is one matrix, whose rows are pixels of an image of one row."""
    return ActivationLayout((1, dims[-1], 1, prod(dims[:-1])), "rows")


def matrices_form(
    cfg: Config, dims: tuple[int, ...], fold: str, pad: int = 0, block: int = 1, multiple: int = 1
) -> ActivationLayout:
    """Return the form of a tensor of shape `dims` as matrices, each of which begins on a channel group.

    fold: a key of MATRICES. pad: the byte that the host puts in channels beyond the last. block: the number of rows is
    rounded up to a multiple of it. multiple: the columns are rounded up to a multiple of it and of a group.
    """
    count, columns, rows = matrix_counts(fold, dims)
    multiple = max(multiple, cfg.group)
    channels = pack.blocks(columns, multiple) * multiple
    dims = 1, count * channels, 1, pack.blocks(rows, block) * block
    return ActivationLayout(dims, fold, pad=pad if channels > columns else 0)


def holds_matrices(p: Placement, value: ir.Value) -> bool:
    """Whether the accelerator holds `value` as at most MAX_MATRICES matrices whose rows are pixels."""
    held = p.held_form(value)
    rows = held is not None and held.fold == "rows" and not held.inverted
    return rows and matrix_counts("rows", shape_of(value))[0] <= MAX_MATRICES


def nth_matrix(p: Placement, act: Activation, value: ir.Value, number: int) -> Activation:
    """Return matrix `number` of `value` as a region of `act`, in which all matrices of `value` lie."""
    _, columns, rows = matrix_counts("rows", shape_of(value))
    return act.region((1, columns, 1, rows), number * pack.blocks(columns, p.cfg.group), act.pixels)


def read_shared_by_matrices(p: Placement, value: ir.Value, b: ir.Value, reads: Reads) -> list[Activation] | None:
    """Return the activation of `b` for each of the several matrices of `value`.

    `b` is one matrix or one row for all of them, or one for each head of every sample. None if it has another shape, or
    `value` is a single matrix.
    """
    dims, b_dims = shape_of(value), shape_of(b)
    count, columns, rows = matrix_counts("rows", dims)
    shared, height, width = matrix_sizes(b_dims)
    if count == 1 or not holds_matrices(p, value) or width != columns or height not in (1, rows):
        return None
    if shared == 1:
        return [p.read(b, ActivationLayout((1, columns, 1, height), "rows"), reads, constants=True)] * count
    leading = dims[:-2]
    while leading and prod(leading) > shared:
        leading = leading[1:]
    if (
        b_dims == dims
        or (1,) * (len(leading) - len(b_dims) + 2) + b_dims[:-2] != (1,) * (len(b_dims) - 2 - len(leading)) + leading
    ):
        return None
    whole = p.read(b, matrices_form(p.cfg, b_dims, "rows"), reads, constants=True)
    groups = pack.blocks(columns, p.cfg.group)
    return [whole.region((1, columns, 1, height), number % shared * groups, whole.pixels) for number in range(count)]


def place_layer_per_matrix(
    p: Placement,
    node: ir.Node,
    x: ir.Value,
    reads: Reads,
    make_layer: Callable[[int, str, Activation, Activation], Layer],
    y_form: ActivationLayout | None = None,
) -> None:
    """Place one layer for each matrix of `x`, which the accelerator holds.

    make_layer: called with the number of the matrix, name, x and y. y_form: the form of the output of `node`; None for
    that of `x`.
    """
    form, y, count = p.held_form(x), node.outputs[0], matrix_counts("rows", shape_of(x))[0]
    assert form is not None
    y_form = y_form or form
    source, whole = p.read(x, form, reads), p.new_activation(y, y_form)
    layers = [
        make_layer(
            number, part_name(node, number, count), nth_matrix(p, source, x, number), nth_matrix(p, whole, y, number)
        )
        for number in range(count)
    ]
    add_matrices(p, node, layers, reads, whole, y_form)


def add_matrices(
    p: Placement, node: ir.Node, layers: list[Layer], reads: Reads, whole: Activation, form: ActivationLayout
) -> None:
    """Place `layers`, one for each matrix of `whole`, the output of `node`; a single layer writes all of it."""
    if len(layers) == 1:
        p.add_layer(node, replace(layers[0], y=whole), reads, form)
    else:
        p.add_parts(node, layers, reads, whole, form)


def place_activation_product(p: Placement, node: ir.Node) -> None:
    """Place a QLinearMatMul of two activations: one layer for each matrix. Raises NotOffloadable."""
    cfg, (a, b, y) = p.cfg, (operand(node, "a"), operand(node, "b"), node.outputs[0])
    assert a is not None and b is not None
    if constant(b) is not None:
        raise NotOffloadable(
            f"its matrix has {len(shape_of(b))} dimensions; the accelerator multiplies by constants of two"
        )
    if not can_multiply_activations(cfg):
        raise NotOffloadable("both operands vary, which takes batch = 1; compile it for such a Config")
    if len(shape_of(a)) < 2 or shape_of(a)[:-2] != shape_of(b)[:-2]:
        raise NotOffloadable(f"it broadcasts {shape(a)} with {shape(b)}; give both as many matrices")
    count, depth, rows = matrix_counts("rows", shape_of(a))
    columns, (shared, times, fold) = shape_of(b)[-1], shared_operand(b)
    if count > MAX_MATRICES:
        raise NotOffloadable(
            f"it multiplies {count} matrices, more than {MAX_MATRICES}; give the model fewer samples or heads at once"
        )
    zero_a, zero_b = stored_zero(operand(node, "a_zero_point")), stored_zero(operand(node, "b_zero_point"))
    multiple = columns_multiple(cfg, depth, zero_b)
    x_form = matrices_form(cfg, shape_of(a), "rows", zero_a, multiple=multiple)
    w_form = matrices_form(cfg, shape_of(shared), fold, zero_b, cfg.block_out)
    if p.viewed_tensor(a) in p.padded_outputs and (held := p.held_form(shared)) is not None:
        w_form = replace(w_form, pad=held.pad)  # a holds its zero point there, so any byte adds nothing
    y_form = matrices_form(cfg, shape_of(y), "rows")
    offset_a, offset_b = -zero_a, -zero_b
    if (
        p.held_form(a) != x_form
        and p.held_form(shared) != w_form
        and len(summands(1 - offset_a)) < len(summands(offset_a))
        and columns_multiple(cfg, depth, 1 - offset_b) == multiple
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
    model_depth, model_columns = node.meta.get(MODEL_COLUMNS, (depth, columns))
    x_columns = pack.blocks(depth, multiple) * multiple
    filling = rows * (x_columns * columns - model_depth * model_columns)
    layers = [
        Layer(
            part_name(node, number, count),
            x.region((1, x_columns, 1, rows), number * pack.blocks(x_columns, cfg.group), x.pixels),
            whole.region((1, columns, 1, rows), number * pack.blocks(columns, cfg.group), whole.pixels),
            product=ActivationGemm(
                w.region((1, depth, 1, w.width), number // times * pack.blocks(depth, cfg.group), w.pixels),
                offset_a, offset_b, transposes=bool(node.meta.get(MOVES)), filling=filling,
            ),
            requantise=requantise,
        )
        for number in range(count)
    ]  # fmt: skip
    add_matrices(p, node, layers, reads, whole, y_form)


# Operands of several heads -----------------------------------------------------------------------------------------


def shared_operand(value: ir.Value) -> tuple[ir.Value, int, str]:
    """Return the tensor from which products read their second operand `value`, skipping repetition and transposition.

    Returns (tensor, how many matrices of `value` in a row are the same matrix of it, "rows" or "columns": the fold in
    which it must be held). Grouped-query attention repeats the keys and values of a group for each of its heads.
    """
    producer = value.producer()
    if producer is not None and swaps_last_axes(producer):
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


def swaps_last_axes(node: ir.Node) -> bool:
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
    operands = right_operands_of(y)
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


def right_operands_of(value: ir.Value) -> list[ir.Value] | None:
    """Return the second operands of products that are `value` or made of it by reshaping and transposing.

    None if another node reads it, or it is an output of the graph.
    """
    right_operands = []
    for use in value.uses():
        if is_op(use.node, "QLinearMatMul") and is_operand(use.node, use.idx, "b"):
            right_operands.append(value)
            continue
        only_arranges = is_op(use.node, "Unsqueeze", "Expand", "Reshape") or swaps_last_axes(use.node)
        behind = right_operands_of(use.node.outputs[0]) if only_arranges and use.idx == 0 else None
        if behind is None:
            return None
        right_operands += behind
    return None if value.is_graph_output() else right_operands
