"""Layers that work element by element: additions and products of two tensors, and tables of one.

Additions and tables are fused into the epilogue of the layer before them where that can take them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir

from celosia.compiler import numerics
from celosia.compiler.graph.operands import data_operands, operand
from celosia.compiler.graph.quantized.rounded import rescaled_sum
from celosia.compiler.graph.quantized.tables import table_of
from celosia.compiler.graph.rows import tensors_of_rows
from celosia.compiler.graph.select.matrices import place_layer_per_matrix, read_shared_by_matrices, rows_form
from celosia.compiler.graph.select.parameters import requantise_alike, scalar_of, stored_zero
from celosia.compiler.graph.select.placement import (
    ActivationLayout,
    LayerAssignment,
    NotOffloadable,
    Placement,
    Reads,
    can_fuse_reader,
    natural_form,
    shape_of,
)
from celosia.compiler.graph.values import constant, shape
from celosia.compiler.layer import Activation, Epilogue, Layer, Multiplication, Residual
from celosia.compiler.tensorize import pack
from celosia.hw.spec.config import Config


def place_addition(p: Placement, node: ir.Node) -> None:
    """Place a QLinearAdd: of equal shapes, of one row for all rows of a matrix, or of one matrix and several.

    It is fused into the layer that makes an operand where possible. Raises NotOffloadable.
    """
    a, b, y = operand(node, "a"), operand(node, "b"), node.outputs[0]
    assert a is not None and b is not None
    _scales_and_zero_points(node)  # raises NotOffloadable
    fit = rescaled_sum(node)
    if fit is None:
        raise NotOffloadable(
            "no integers give onnxruntime's sum on all pairs of bytes; other scales may, from another calibration"
        )
    scale_a, scale_b = fit.ma, fit.mb
    if shape(a) != shape(y) or constant(a) is not None:
        a, b, scale_a, scale_b = b, a, scale_b, scale_a
    broadcasts, is_constant = shape(b) != shape(y), constant(b) is not None
    residual_of = partial(
        Residual, scale_v=scale_a, scale_b=scale_b, scale_c=fit.c, shift=fit.shift, lo=fit.lo, hi=fit.hi
    )
    if broadcasts and shape(a) == shape(y) and _add_to_each_matrix(p, node, a, b, residual_of):
        return
    if shape(a) != shape(y) or (broadcasts and not is_constant and not _is_row(b, p.held_form(a))):
        raise NotOffloadable(_broadcast_reason(node))
    if broadcasts or is_constant:
        forms = [p.common_form(a) if broadcasts and not is_constant else _choose_form(p, y, a)]
    else:
        forms = [_choose_form(p, y, b, a), _choose_form(p, y, a, b)]
    for form in forms:
        b_form = _constant_form(b, node, form) if is_constant else form
        if broadcasts and not is_constant:
            b_form = ActivationLayout((1, form.dims[1], 1, 1), "rows")
        reads: Reads = {}
        x = p.read(a, form, reads)
        other = p.read(b, b_form, reads, constants=broadcasts or is_constant)
        residual = residual_of(other)
        layer = Layer(node.name or "", x, p.new_activation(y, form), epilogue=Epilogue(residual=residual))
        if _join_residual(p, node, layer, (a, b), form, reads):
            return
    if (
        not broadcasts and p.selection.choices and p.selection.choices[-1].value is b
    ):  # so that both layers can become a block
        epilogue = Epilogue(residual=replace(residual, operand=x, scale_v=scale_b, scale_b=scale_a))
        layer = replace(layer, x=other, epilogue=epilogue)
    p.add_layer(node, layer, reads, form)


def _scales_and_zero_points(node: ir.Node) -> list[Any]:
    """Return scale and zero point of a, b and the result, in this order.

    Raises NotOffloadable if one is missing, not constant, or not a single number.
    """
    return [scalar_of(operand(node, f"{name}_{kind}")) for name in "abc" for kind in ("scale", "zero_point")]


def _add_to_each_matrix(
    p: Placement, node: ir.Node, a: ir.Value, b: ir.Value, residual_of: Callable[[Activation], Residual]
) -> bool:
    """Place the addition of `b`, one row or matrix, to each of several matrices `a`, as a mask is added to scores.

    residual_of: makes the residual of an activation. Returns False if the shapes are others.
    """
    reads: Reads = {}
    if (others := read_shared_by_matrices(p, a, b, reads)) is None:
        return False
    residuals = [residual_of(other) for other in others]
    has_layer_each = len(p.part_producers.get(a, ())) == len(residuals)
    if not has_layer_each or not _extend_layers_of(
        p, a, node, lambda before, number: replace(before, residual=residuals[number]), reads
    ):
        place_layer_per_matrix(
            p, node, a, reads,
            lambda number, name, x, y: Layer(name, x, y, epilogue=Epilogue(residual=residuals[number])),
        )  # fmt: skip
    return True


def place_multiplication(p: Placement, node: ir.Node) -> None:
    """Place a QLinearMul: of equal shapes, by one pixel for each channel, or of one matrix and several.

    Raises NotOffloadable.
    """
    a, b, y = operand(node, "a"), operand(node, "b"), node.outputs[0]
    assert a is not None and b is not None
    sa, za, sb, zb, sy, zy = _scales_and_zero_points(node)
    fit = numerics.fit_rescale_mul(sa, za, sb, zb, sy, zy, y.dtype.numpy())  # type: ignore[union-attr]
    if fit is None:
        raise NotOffloadable(
            "no integers give onnxruntime's product on all pairs of bytes; other scales may, from another calibration"
        )
    zeros = [stored_zero(operand(node, f"{name}_zero_point")) for name in "ab"]
    if shape(a) != shape(y) or constant(a) is not None:
        a, b, zeros = b, a, zeros[::-1]
    reads: Reads = {}
    if shape(a) == shape(y) != shape(b) and (others := read_shared_by_matrices(p, a, b, reads)) is not None:
        requantise = requantise_alike(shape_of(a)[-1], fit.bias, fit.multiplier, fit.shift, fit.zero_point)
        factors = [Multiplication(other, -zeros[0], -zeros[1]) for other in others]
        place_layer_per_matrix(
            p, node, a, reads,
            lambda number, name, x, y: Layer(name, x, y, multiply=factors[number], requantise=requantise),
        )  # fmt: skip
        return
    is_constant = constant(b) is not None
    if shape(a) != shape(y) or not (shape(b) == shape(y) or is_constant or _is_one_pixel(b, y)):
        raise NotOffloadable(_broadcast_reason(node))
    form = _choose_form(p, y, a) if is_constant or shape(b) == shape(y) else p.common_form(a)
    if is_constant:
        b_form = _constant_form(b, node, form)
    elif shape(b) != shape(y) and form != natural_form(a):  # its rows are images, or pixels
        raise NotOffloadable(_broadcast_reason(node))
    else:
        b_form = form if shape(b) == shape(y) else natural_form(b)
    x, other = p.read(a, form, reads), p.read(b, b_form, reads, constants=is_constant)
    requantise = requantise_alike(form.dims[1], fit.bias, fit.multiplier, fit.shift, fit.zero_point)
    multiply = Multiplication(other, -zeros[0], -zeros[1])
    layer = Layer(node.name or "", x, p.new_activation(y, form), multiply=multiply, requantise=requantise)
    p.add_layer(node, layer, reads, form)


def place_table(p: Placement, node: ir.Node) -> None:
    """Place a function of one byte as a table of 256 entries, fused into the layer before it if that has no table yet.

    Raises NotOffloadable.
    """
    value = node.inputs[0]
    assert value is not None
    entries = table_of(node)
    if entries is None:
        raise NotOffloadable("its bounds are known at run time only; make them constants")
    table = entries.astype(np.int8)
    form = _choose_form(p, node.outputs[0], value)
    choice = p.producers.get(value)
    if choice is not None and can_fuse_reader(choice, value) and choice.layer.epilogue.table is None:
        _extend_layer(p, choice, node, replace(choice.layer.epilogue, table=table), {})
        return
    reads: Reads = {}
    if _extend_layers_of(p, value, node, lambda before, _: replace(before, table=table), reads):
        return
    x = p.read(value, form, reads)
    y = p.new_activation(node.outputs[0], form)
    p.add_layer(node, Layer(node.name or "", x, y, epilogue=Epilogue(table=table)), reads, form)


def _choose_form(p: Placement, result: ir.Value, *values: ir.Value) -> ActivationLayout:
    """Choose the form of operands and result: the one in which the accelerator holds one of `values`.

    If only the host has them (embeddings, for example): rows as pixels if the readers of the result want that, else the
    natural form of the first.
    """
    if any(p.held_form(value) for value in values):
        return p.common_form(*values)
    if p.read_as_rows is None:
        p.read_as_rows = tensors_of_rows(result.producer().graph)  # type: ignore[union-attr,arg-type]
    return rows_form(p, values[0], result) if result in p.read_as_rows else p.common_form(*values)


def _is_one_pixel(b: ir.Value, y: ir.Value) -> bool:
    """Whether `b` has one pixel for each channel of `y`, which is of images (4 axes) or sequences (3 axes)."""
    b_shape, y_shape = shape(b), shape(y)
    if b_shape is None or y_shape is None or len(b_shape) != len(y_shape) or len(y_shape) not in (3, 4):
        return False
    return b_shape[:2] == y_shape[:2] and set(b_shape[2:]) == {1}


def _is_row(b: ir.Value, form: ActivationLayout | None) -> bool:
    """Whether `b` is one row, to be combined with every row of the matrix that the accelerator holds in `form`."""
    dims = shape(b)
    return form is not None and form.fold == "rows" and bool(dims) and prod(dims) == dims[-1] == form.dims[1]  # type: ignore[index,arg-type]


def _constant_form(b: ir.Value, node: ir.Node, form: ActivationLayout) -> ActivationLayout:
    """Return the form in which a layer that writes the result of `node` in `form` reads its constant operand `b`.

    `b` has the shape of the result, apart from leading axes of size 1, or one number for each channel. Raises
    NotOffloadable for other shapes.
    """
    result = shape_of(node.outputs[0])
    sizes = (1,) * (len(result) - len(shape_of(b))) + shape_of(b)
    if sizes == result:
        return form
    axis = 1 if not form.fold and form == natural_form(node.outputs[0]) else len(result) - 1
    by_channel = tuple(size if number == axis else 1 for number, size in enumerate(result))
    if sizes != by_channel or sizes[axis] != form.dims[1] or form.dims[0] != 1:
        raise NotOffloadable(_broadcast_reason(node))
    return ActivationLayout((1, form.dims[1], 1, 1), form.fold)


def _broadcast_reason(node: ir.Node) -> str:
    """Return the reason of an operator whose operands have shapes that the accelerator does not combine."""
    a, b = (shape(value) for value in data_operands(node))  # type: ignore[arg-type]
    return f"it broadcasts {a} with {b}; give both the same shape"


# Fusion into the layer before -----------------------------------------------------------------------------------------


def _join_residual(
    p: Placement, node: ir.Node, layer: Layer, operands: tuple[ir.Value, ir.Value], form: ActivationLayout, reads: Reads
) -> bool:
    """Fuse the addition `node` into the convolution that makes one of its operands. Returns whether that is possible.

    layer: the addition as a layer of its own. operands: the tensors that this layer reads, x first. The operand that is
    made later is tried first, since its layer must run when the other operand is there. form: the form of x.
    """
    residual = layer.epilogue.residual
    assert residual is not None
    order = {choice.value: place for place, choice in enumerate(p.selection.choices)}
    a, b = operands
    candidates = [(a, b, residual.operand, False), (b, a, layer.x, True)]
    candidates.sort(key=lambda candidate: -order.get(candidate[0], -1))
    for value, added, added_activation, swapped in candidates:
        choice = p.producers.get(value)
        if choice is None or not can_fuse_reader(choice, value) or choice.layer.gemm is None:
            continue
        if p.held_form(value) != form:
            continue  # the addition reads it in another form
        if choice.layer.is_depthwise(p.cfg) and _is_slower_joined(p.cfg, choice.layer):
            continue
        if order.get(p.viewed_tensor(added), -1) >= order[choice.value] or added is value:
            continue
        scales = (residual.scale_b, residual.scale_v) if swapped else (residual.scale_v, residual.scale_b)
        joined = replace(residual, operand=added_activation, scale_v=scales[0], scale_b=scales[1])
        _extend_layer(p, choice, node, replace(choice.layer.epilogue, residual=joined), reads)
        return True
    return False


def _is_slower_joined(cfg: Config, layer: Layer) -> bool:
    """Whether fusing an addition into a depthwise convolution would cost cycles.

    With a residual, the array must compute the convolution. That is slower if it takes more cycles per entry than the
    vector unit's steps over the taps and the bus beats that load both operands of a separate addition.
    """
    height, width = layer.window.kernel
    steps, beats = height * pack.tap_steps(cfg, layer.window)[0], max(1, cfg.lanes // cfg.bus_bytes)
    return steps + 2 * beats < height * width


def _extend_layer(p: Placement, choice: LayerAssignment, node: ir.Node, epilogue: Epilogue, reads: Reads) -> None:
    """Fuse `node` into the layer of `choice`: give it `epilogue`, let it write the output of `node` and add `reads`."""
    form = p.selection.forms[choice.value]
    p.forget_output(choice)
    y = p.new_activation(node.outputs[0], form)
    choice.layer = replace(choice.layer, epilogue=epilogue, y=y)
    choice.nodes.append(node)
    choice.reads.update(reads)
    p.record_output(choice, node.outputs[0], form)


def _extend_layers_of(
    p: Placement, value: ir.Value, node: ir.Node, change: Callable[[Epilogue, int], Epilogue], reads: Reads
) -> bool:
    """Fuse `node` into all layers that make a part of `value` each, such as products of several matrices.

    change: gives the new epilogue from that of each layer, and its number. Returns False, with nothing changed, if one
    of the layers cannot take it: it has a residual, or a table where the new one would be; or it is a pooling or a
    phase of a transposed convolution and should take a residual.
    """
    choices, y = p.part_producers.get(value, []), node.outputs[0]
    if not choices or not can_fuse_reader(choices[0], value):
        return False
    for number, choice in enumerate(choices):
        old = choice.layer.epilogue
        new = change(old, number)
        is_free = old.residual is None and (old.table is None or new.table is old.table)
        takes_residual = choice.layer.product is not None or choice.layer.is_map
        if choice.layer.works_on_rows or not is_free or not (takes_residual or new.residual is None):
            return False
    form = p.selection.forms.pop(value)
    p.selection.written.pop(value)
    whole = p.new_activation(y, form)
    for number, choice in enumerate(choices):
        place = replace(choice.layer.y, name=whole.name, storage=whole.storage)
        choice.layer = replace(choice.layer, epilogue=change(choice.layer.epilogue, number), y=place)
        choice.nodes.append(node)
        choice.reads.update(reads)
        choice.value = y
    p.part_producers[y] = p.part_producers.pop(value)
    p.selection.forms[y], p.selection.written[y] = form, whole
    return True
