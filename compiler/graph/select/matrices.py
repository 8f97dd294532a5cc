"""Products of two activations as layers, and the views that bring their operands there."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from math import prod

import numpy as np
import onnx_ir as ir

from celosia.compiler import numerics
from celosia.compiler.graph.operands import is_operand, operand
from celosia.compiler.graph.select.forms import NO_WAY, ActivationLayout, NotOffloadable, natural_form, shape_of
from celosia.compiler.graph.select.parameters import array_of, folded, scalar_of, stored_zero, uniform
from celosia.compiler.graph.select.placement import LayerAssignment, Placement, Reads
from celosia.compiler.graph.values import attribute, constant, is_op, shape
from celosia.compiler.layer import ActivationGemm, Gemm, Layer, Window, summands
from celosia.compiler.ops import VIEWS
from celosia.compiler.program.model import MATRICES, matrix_counts, matrix_sizes
from celosia.compiler.strided_view import StridedView
from celosia.compiler.tensorize import pack
from celosia.hw.spec.config import Config

MOVES = "moves"
"""Key in the meta of a node that only moves elements, by the identity or in whole blocks."""
MOST_PRODUCTS = 256
"""Layers of one operator, a matrix each."""


def multiplies(cfg: Config) -> bool:
    """Whether neighbouring pixels of a channel group are an entry of wgt: what makes products of two activations."""
    return cfg.batch == 1 and cfg.block_in == cfg.block_out


def rows_form(p: Placement, value: ir.Value, result: ir.Value) -> ActivationLayout:
    """Layout of an operand of a product by a constant matrix, which gives `result`: rows are pixels of one image where
    a product of two activations could read them, else images of one pixel."""
    dims = shape_of(value)
    matrix = len(dims) == 2 and (_has_rows(p, value) or (p.held(value) is None and _becomes_heads(result)))
    rows = (len(dims) > 2 and prod(dims[:-2]) == 1) or matrix
    if multiplies(p.cfg) and rows:
        return ActivationLayout((1, dims[-1], 1, dims[-2]), "rows")
    return natural_form(value, rows=True)


def _has_rows(p: Placement, value: ir.Value) -> bool:
    """Whether a matrix is held with its rows as pixels, or is the rows of a tensor of more axes."""
    held, producer = p.held(value), value.producer()
    if held is not None or producer is None or not is_op(producer, *VIEWS) or producer.inputs[0] is None:
        return held is not None and held.fold == "rows"
    before = shape(producer.inputs[0])
    return before is not None and len(before) > 2 and before[-1] == shape_of(value)[-1] > 1


def _becomes_heads(value: ir.Value) -> bool:
    """Whether a matrix is read as a tensor of more axes only, the last of which is a part of its rows."""
    readers = [use.node for use in value.uses()]
    shapes = [shape(node.outputs[0]) or () for node in readers]
    columns = shape_of(value)[-1]
    parts = all(len(dims) > 2 and dims[-1] < columns and columns % dims[-1] == 0 for dims in shapes)
    return bool(readers) and all(is_op(node, *VIEWS) for node in readers) and parts


def matrices_form(cfg: Config, value: ir.Value, fold: str, pad: int = 0, block: int = 1) -> ActivationLayout:
    """Layout of an operand or the result of a product of two activations: each matrix begins on a channel group. pad:
    what the host puts in channels beyond the last. block: rows come in whole blocks."""
    return form_of_matrices(cfg, shape_of(value), fold, pad, block)


def form_of_matrices(cfg: Config, dims: tuple[int, ...], fold: str, pad: int = 0, block: int = 1) -> ActivationLayout:
    """`matrices_form` of a tensor with these dimensions."""
    count, columns, rows = matrix_counts(fold, dims)
    channels = pack.blocks(columns, cfg.group) * cfg.group
    dims = 1, count * channels, 1, pack.blocks(rows, block) * block
    return ActivationLayout(dims, fold, pad=pad if channels > columns else 0)


def product(p: Placement, node: ir.Node) -> None:
    """Places a QLinearMatMul of two activations: a layer for each matrix. NotOffloadable."""
    cfg, (a, b, y) = p.cfg, (operand(node, "a"), operand(node, "b"), node.outputs[0])
    assert a is not None and b is not None
    if constant(b) is not None:
        raise NotOffloadable(
            f"its matrix has {len(shape_of(b))} dimensions; the accelerator multiplies by constants of two"
        )
    if not multiplies(cfg):
        raise NotOffloadable(
            "both operands vary, which takes batch = 1 and block_in = block_out; compile it for such a Config"
        )
    if len(shape_of(a)) < 2 or shape_of(a)[:-2] != shape_of(b)[:-2]:
        raise NotOffloadable(f"it broadcasts {shape(a)} with {shape(b)}; give both as many matrices")
    count, inner, rows = matrix_counts("rows", shape_of(a))
    columns, (shared, times, fold) = shape_of(b)[-1], shared_operand(b)
    if count > MOST_PRODUCTS:
        raise NotOffloadable(
            f"it multiplies {count} matrices, more than {MOST_PRODUCTS}; give the model fewer samples or heads at once"
        )
    zeros = stored_zero(operand(node, "a_zero_point")), stored_zero(operand(node, "b_zero_point"))
    x_form = matrices_form(cfg, a, "rows", zeros[0])
    w_form = matrices_form(cfg, shared, fold, zeros[1], cfg.block_out)
    if p.source(a) in p.filled and (held := p.held(shared)) is not None:
        w_form = replace(w_form, pad=held.pad)  # what is there meets minus the offset of a
    y_form = matrices_form(cfg, y, "rows")
    offsets = -zeros[0], -zeros[1]
    if p.held(a) != x_form and p.held(shared) != w_form and len(summands(1 - offsets[0])) < len(summands(offsets[0])):
        # The host arranges both. With all bits turned round each is -1 minus itself: an offset of 128 becomes -127.
        x_form, w_form = replace(x_form, inverted=True), replace(w_form, inverted=True)
        offsets = 1 - offsets[0], 1 - offsets[1]
    reads: Reads = {}
    x, w, whole = p.read(a, x_form, reads, constants=True), p.read(shared, w_form, reads), p.activation(y, y_form)
    if inner % cfg.group and not (reads or p.source(a) in p.filled):
        raise NotOffloadable(f"{inner} columns are not whole groups of {cfg.group}; make them a multiple of that")
    scales = [operand(node, name) for name in ("a_scale", "b_scale", "y_scale")]
    for value in scales:
        scalar_of(value)
    scale = numerics.conv_scale(*map(array_of, scales)).reshape(-1)
    multiplier, shift = folded(scale)
    requantise = uniform(columns, 0, int(multiplier[0]), int(shift[0]), stored_zero(operand(node, "y_zero_point")))
    layers = [
        Layer(
            node.name or "" if count == 1 else f"{node.name}.{number}",
            x.region((1, inner, 1, rows), number * pack.blocks(inner, cfg.group), x.pixels),
            whole.region((1, columns, 1, rows), number * pack.blocks(columns, cfg.group), whole.pixels),
            product=ActivationGemm(
                w.region((1, inner, 1, w.width), number // times * pack.blocks(inner, cfg.group), w.pixels),
                *offsets, transposes=bool(node.meta.get(MOVES)),
            ),
            requantise=requantise,
        )
        for number in range(count)
    ]  # fmt: skip
    if count == 1:
        p.add(node, replace(layers[0], y=whole), reads, y_form)
    else:
        p.assemble(node, layers, reads, whole, y_form)


# Operands of several heads ------------------------------------------------------------------------------------------


def shared_operand(value: ir.Value) -> tuple[ir.Value, int, str]:
    """Where the second operand of a product lies, how many of its matrices in a row are the same one there, and how it
    is held: rows or columns of each matrix are pixels."""
    producer = value.producer()
    if producer is not None and _swaps(producer):
        source, times = _repeated(producer.inputs[0])
        if times > 1:
            return source, times, "rows"
    return *_repeated(value), "columns"


def _repeated(value: ir.Value | None) -> tuple[ir.Value, int]:
    """Return the tensor of which [n, groups * times, rows, columns] repeats each matrix, and how often.

    Grouped-query attention does so: Reshape(Expand(Unsqueeze(x))).
    """
    assert value is not None
    chain, source = [], value
    for op in ("Reshape", "Expand", "Unsqueeze"):
        producer = source.producer()
        if producer is None or not is_op(producer, op) or producer.inputs[0] is None:
            return value, 1
        chain.append(shape(source))
        source = producer.inputs[0]
    before, (after, many, one) = shape(source), chain
    if before is None or after is None or many is None or len(before) < 3 or len(many) != len(before) + 1:
        return value, 1
    heads, matrix, times = before[:-2], before[-2:], many[-3]
    same = one == (*heads, 1, *matrix) and many == (*heads, times, *matrix)
    return (source, times) if same and after == (*heads[:-1], heads[-1] * times, *matrix) else (value, 1)


def _swaps(node: ir.Node) -> bool:
    """Whether it is a Transpose of rows and columns."""
    perm = attribute(node, "perm") if is_op(node, "Transpose") else None
    rank = len(perm or ())
    return perm is not None and list(perm) == [*range(rank - 2), rank - 1, rank - 2]


def is_repeated(p: Placement, node: ir.Node) -> bool:
    """Whether `node` stands between matrices and the products that share them: these read what it reads."""
    if not multiplies(p.cfg) or not is_op(node, "Unsqueeze", "Expand", "Reshape", "Transpose"):
        return False
    ends = _multiplying(node.outputs[0])
    found = bool(ends) and all(shared_operand(end)[1] > 1 and node.outputs[0] in _between(end) for end in ends or ())
    if found:
        p.selection.views[node] = "part of the products that read it"
    return found


def _between(end: ir.Value) -> list[ir.Value]:
    """Tensors from the one that several products share, which is left out, to the operand `end`."""
    source, between = shared_operand(end)[0], []
    while end is not source:
        between.append(end)
        end = end.producer().inputs[0]  # type: ignore[union-attr,assignment]
    return between


def _multiplying(value: ir.Value) -> list[ir.Value] | None:
    """The tensors, made of `value` by changes of shape, by which products multiply; None where others read it, too."""
    found = []
    for use in value.uses():
        if is_op(use.node, "QLinearMatMul") and is_operand(use.node, use.idx, "b"):
            found.append(value)
            continue
        passed = is_op(use.node, "Unsqueeze", "Expand", "Reshape") or _swaps(use.node)
        after = _multiplying(use.node.outputs[0]) if passed and use.idx == 0 else None
        if after is None:
            return None
        found += after
    return None if value.is_graph_output() else found


# Caches -----------------------------------------------------------------------------------------------------------


def append_to_cache(p: Placement, node: ir.Node, operands: list[ir.Value]) -> bool:
    """Places a concatenation of rows that only products of two activations read, as of keys in a cache and new ones;
    False where others read it. NotOffloadable.

    The host fills the storage of the whole with the first rows, and a layer copies the others behind them.
    """
    y = node.outputs[0]
    directly, turned = _multiplied(y)
    if not multiplies(p.cfg) or not (directly or turned):
        return False
    first, *others = operands
    rank, held = len(shape_of(y)), p.held(operands[-1])
    if directly or len(others) != 1 or attribute(node, "axis", 1) % rank != rank - 2:
        raise NotOffloadable(f"the host arranges it for the products that read it; {NO_WAY}")
    if p.held(first) is not None or held is None or held.fold != "rows" or shape_of(y)[-1] % p.cfg.group:
        raise NotOffloadable(
            "the accelerator appends rows that it holds itself to those of the host, in whole groups of channels; "
            "quantise what makes them"
        )
    form = matrices_form(p.cfg, y, "rows", block=p.cfg.block_out)
    whole = p.activation(y, form)
    rows = matrix_counts("rows", shape_of(first))[2], matrix_counts("rows", shape_of(others[0]))[2]
    new = p.selection.written[p.source(others[0])]
    place = whole.region((*form.dims[:3], rows[1]), 0, StridedView(1, whole.width, 0, rows[0]))
    copy = Layer(f"{node.name}.1", new, place)
    p.selection.choices.append(LayerAssignment(copy, [node], {whole.storage: (first, form)}, y))
    p.selection.forms[y], p.selection.written[y] = form, whole
    return True


def _multiplied(value: ir.Value) -> tuple[bool, bool]:
    """Whether all who read `value` multiply by it as it is, and whether all do so by its transpose."""
    ends = _multiplying(value) or []
    turned = [end.producer() is not None and _swaps(end.producer()) for end in ends]  # type: ignore[arg-type]
    sources = all(end is value or shared_operand(end)[0] is value or _source(end) is value for end in ends)
    return bool(ends) and sources and not any(turned), bool(ends) and sources and all(turned)


def _source(end: ir.Value) -> ir.Value | None:
    producer = end.producer()
    return producer.inputs[0] if producer is not None and _swaps(producer) else None


def in_whole_blocks(p: Placement, node: ir.Node, held: ActivationLayout) -> bool:
    """Places a copy of matrices whose rows are no whole blocks, with more rows below them, so that products can load
    them as weights: what makes them makes those, too, of padding, or they are zeros. False where they are whole blocks.
    """
    x, y, rows = node.inputs[0], node.outputs[0], held.dims[3]
    assert x is not None
    width = pack.blocks(rows, p.cfg.block_out) * p.cfg.block_out
    if width == rows:
        return False
    form, source = replace(held, dims=(*held.dims[:3], width)), p.selection.written[p.source(x)]
    window = Window((1, 1), pads=(0, 0, 0, width - rows))
    if not (told := _told(p, x)):
        p.add(node, Layer(node.name or "", source, p.activation(y, form), window, reduce="max"), {}, form)
        return True
    for value in told:
        p.selection.forms[value] = replace(p.selection.forms[value], dims=form.dims)
    choice = p.made[told[-1]]
    assert choice.layer.gemm is not None
    gemm = replace(choice.layer.gemm, spare=width - rows)
    choice.layer = replace(choice.layer, y=p.activation(choice.value, form), window=window, gemm=gemm)
    p.selection.written[choice.value] = choice.layer.y
    _is_view(p, node, form)
    return True


def _told(p: Placement, value: ir.Value) -> list[ir.Value]:
    """`value` and what it is a view of, up to what a product by a constant matrix makes which could make more rows of
    it: each has one reader. Nothing where there is no such product."""
    choice, told = p.made.get(p.source(value)), [value]
    if choice is None or choice.layer.gemm is None or choice.layer.window != Window((1, 1)):
        return []
    while told[-1] is not choice.value:
        producer = told[-1].producer()
        assert producer is not None and producer.inputs[0] is not None
        told.append(producer.inputs[0])
    residual = choice.layer.epilogue.residual
    rows = residual is not None and residual.operand.height * residual.operand.width > 1
    alone = all(len(list(each.uses())) == 1 and not each.is_graph_output() for each in told)
    return told if alone and not rows and p.owned(choice.value) else []


# Views ------------------------------------------------------------------------------------------------------------


def is_reshaped(p: Placement, node: ir.Node, held: ActivationLayout) -> bool:
    """Whether the output of `node`, another shape of its input, is the same matrices, or heads of their columns."""
    x, y = node.inputs[0], node.outputs[0]
    assert x is not None
    before, after, channels = matrix_sizes(shape_of(x)), matrix_sizes(shape_of(y)), held.dims[1]
    fold = held.fold if before == after else ""
    if held.fold == "rows" and before == (1, after[0], channels) and after[2] % p.cfg.group == 0:
        fold = fold or "heads"  # its columns are several matrices
    if held.fold == "heads" and after == (1, before[0], channels) and channels == before[1] * before[2]:
        fold = "rows"
    if fold:
        _is_view(p, node, replace(held, fold=fold))
    return bool(fold)


def is_turned(p: Placement, node: ir.Node, held: ActivationLayout) -> bool:
    """Whether a Transpose leaves the bytes of matrices where they are: they are told in another order."""
    x, y = node.inputs[0], node.outputs[0]
    assert x is not None
    dims, order = shape_of(x), MATRICES[held.fold]
    perm = attribute(node, "perm") or list(range(len(dims)))[::-1]
    axes = [*[order[0]] * (len(dims) - 2), *order[-min(2, len(dims)) :]]
    turned = [axes[axis] for axis in perm if dims[axis] > 1]
    kept = [axis for axis in perm if dims[axis] > 1 and axes[axis] == order[0]]
    told = [axis for axis, _ in groupby(turned)]
    for fold, wanted in MATRICES.items():
        same = matrix_counts(fold, shape_of(y)) == matrix_counts(held.fold, dims)
        if same and kept == sorted(kept) and told == [axis for axis in wanted if axis in turned]:
            _is_view(p, node, replace(held, fold=fold))
            return True
    return False


def _is_view(p: Placement, node: ir.Node, form: ActivationLayout) -> None:
    y = node.outputs[0]
    p.alias[y] = p.source(node.inputs[0])  # type: ignore[arg-type]
    p.selection.forms[y] = form
    p.selection.views[node] = "free: the same bytes"


NOTE = "integer sums by block; scaled in floats on the CPU, within 2e-6 of the root mean square of onnxruntime's result"


def block_sums(p: Placement, node: ir.Node) -> None:
    """Places BlockSums: a layer for each part of the columns. NotOffloadable."""
    if not p.cfg.sums:
        raise NotOffloadable("int32 sums leave the accelerator byte by byte; give it a Config with sums = true")
    value, y, count = node.inputs[0], node.outputs[0], attribute(node, "sum_bytes")
    assert value is not None
    w = array_of(operand(node, "w"))
    parts, blocks, lanes, size = w.shape
    reads: Reads = {}
    rows, channels = prod(shape_of(value)[:-2]), count * blocks * lanes
    y_form = ActivationLayout((rows, parts * channels, 1, 1))
    x, whole = p.read(value, ActivationLayout((rows, blocks * size, 1, 1)), reads), p.activation(y, y_form)
    inner, columns = (attribute(node, name) for name in "KN")
    layers: list[Layer] = []
    for number in range(parts):
        made = whole.region((whole.images, channels, 1, 1), number * channels // p.cfg.group, whole.pixels)
        weights = np.ascontiguousarray(w[number]).reshape(blocks * lanes, size, 1, 1)
        name = node.name or "" if parts == 1 else f"{node.name}.{number}"
        filling = weights.size - inner * max(0, min(lanes, columns - number * lanes))
        layers.append(Layer(name, x, made, gemm=Gemm(weights, blocks, filling=filling, sum_bytes=count)))
    p.assemble(node, layers, reads, whole, y_form, NOTE)
