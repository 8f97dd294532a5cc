"""Sums, tables and products of bytes as layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir

from celosia.compiler import numerics
from celosia.compiler.graph.operands import data_operands, multiplies_matrices, operand
from celosia.compiler.graph.quantized.rounded import rescaled_sum
from celosia.compiler.graph.quantized.tables import table_of
from celosia.compiler.graph.select.columns import each_matrix, one_for_each
from celosia.compiler.graph.select.forms import ActivationLayout, NotOffloadable, natural_form, shape_of
from celosia.compiler.graph.select.joining import extend, extend_products, join_residual, joins
from celosia.compiler.graph.select.matrices import rows_form
from celosia.compiler.graph.select.parameters import is_one_pixel, scalar_of, stored_zero, uniform
from celosia.compiler.graph.select.placement import Placement, Reads
from celosia.compiler.graph.values import is_op, shape
from celosia.compiler.layer import Activation, Epilogue, Layer, Multiplication, Residual
from celosia.compiler.ops import op_spec
from celosia.compiler.program.op_spec import Kind


def addition(p: Placement, node: ir.Node) -> None:
    """Places QLinearAdd of two tensors of one shape, of a value for each channel, or of a matrix and several.
    NotOffloadable."""
    a, b, y = operand(node, "a"), operand(node, "b"), node.outputs[0]
    assert a is not None and b is not None
    _numbers(node)
    fit = rescaled_sum(node)
    if fit is None:
        raise NotOffloadable(
            "no integers give onnxruntime's sum on all pairs of bytes; other scales may, from another calibration"
        )
    ma, mb = fit.ma, fit.mb
    if shape(a) != shape(y):
        a, b, ma, mb = b, a, mb, ma
    row = shape(b) != shape(y)
    added = partial(Residual, scale_v=ma, scale_b=mb, scale_c=fit.c, shift=fit.shift)
    if row and shape(a) == shape(y) and _add_to_each(p, node, a, b, added):
        return
    if shape(a) != shape(y) or (row and not is_row(b, p.held(a))):
        raise NotOffloadable(_unequal(node))
    for form in [p.common_form(a)] if row else [_form(p, y, b, a), _form(p, y, a, b)]:
        reads: Reads = {}
        x = p.read(a, form, reads)
        other = p.read(b, ActivationLayout((1, form.dims[1], 1, 1), "rows") if row else form, reads, constants=row)
        residual = added(other)
        layer = Layer(node.name or "", x, p.activation(y, form), epilogue=Epilogue(residual=residual))
        if join_residual(p, node, layer, (a, b), form, reads):
            return
    if not row and p.selection.choices and p.selection.choices[-1].value is b:  # it may follow what makes its x
        epilogue = Epilogue(residual=replace(residual, operand=x, scale_v=mb, scale_b=ma))
        layer = replace(layer, x=other, epilogue=epilogue)
    p.add(node, layer, reads, form)


def _numbers(node: ir.Node) -> list[Any]:
    """Scale and zero point of both operands and the result. NotOffloadable where there are several, or none."""
    return [scalar_of(operand(node, f"{name}_{kind}")) for name in "abc" for kind in ("scale", "zero_point")]


def _add_to_each(
    p: Placement, node: ir.Node, a: ir.Value, b: ir.Value, added: Callable[[Activation], Residual]
) -> bool:
    """Place the addition of `b`, a row or a matrix, to each of several matrices that the accelerator holds, as a mask
    is added to scores; False where that is not what it is."""
    reads: Reads = {}
    if (other := one_for_each(p, a, b, reads)) is None:
        return False
    residual = added(other)
    if not extend_products(p, a, node, lambda before: replace(before, residual=residual), reads):
        each_matrix(p, node, a, reads, lambda name, x, y: Layer(name, x, y, epilogue=Epilogue(residual=residual)))
    return True


def _form(p: Placement, result: ir.Value, *values: ir.Value) -> ActivationLayout:
    """That in which the accelerator holds one of `values`. Of what the host gives, as embeddings are: rows, where these
    are what readers of the result take; else the first one's natural form."""
    if any(p.held(value) for value in values):
        return p.common_form(*values)
    if p.rows is None:
        p.rows = _read_as_rows(result.producer().graph)  # type: ignore[union-attr,arg-type]
    return rows_form(p, values[0], result) if result in p.rows else p.common_form(*values)


def _read_as_rows(graph: ir.Graph) -> set[ir.Value]:
    """Tensors that a norm reads, or a product by its left operand, or of which operators make these element by
    element."""
    rows = set[ir.Value | None]()
    for node in reversed(graph):
        if is_op(node, "QLinearNorm") or multiplies_matrices(node):
            rows.add(data_operands(node)[0])
        elif node.outputs[0] in rows and _is_elementwise(node):
            rows |= {value for value in node.inputs if value and shape(value) == shape(node.outputs[0])}
    return {value for value in rows if value is not None}


def _is_elementwise(node: ir.Node) -> bool:
    return op_spec(node.op_type).kind is Kind.INJECTIVE and op_spec(node.op_type).moves is None


def _unequal(node: ir.Node) -> str:
    a, b = (shape(value) for value in data_operands(node))  # type: ignore[arg-type]
    return f"it broadcasts {a} with {b}; give both the same shape"


def is_row(b: ir.Value, form: ActivationLayout | None) -> bool:
    """Whether `b` is one row for all those of the one matrix that the accelerator holds as `form`."""
    inner = shape(b)
    return form is not None and form.fold == "rows" and bool(inner) and prod(inner) == inner[-1] == form.dims[1]  # type: ignore[index,arg-type]


def table_lookup(p: Placement, node: ir.Node) -> None:
    """Places a function of bytes, in the layer before it where that has room for a table. NotOffloadable."""
    value = node.inputs[0]
    assert value is not None
    found = table_of(node)
    if found is None:
        raise NotOffloadable("its bounds are known at run time only; make them constants")
    table = found.astype(np.int8)
    form = _form(p, node.outputs[0], value)
    choice = p.made.get(value)
    if choice is not None and joins(choice, value) and choice.layer.epilogue.table is None:
        extend(p, choice, node, replace(choice.layer.epilogue, table=table), {})
        return
    reads: Reads = {}
    if extend_products(p, value, node, lambda before: replace(before, table=table), reads):
        return
    x = p.read(value, form, reads)
    y = p.activation(node.outputs[0], form)
    p.add(node, Layer(node.name or "", x, y, epilogue=Epilogue(table=table)), reads, form)


def product(p: Placement, node: ir.Node) -> None:
    """Places QLinearMul of two tensors of one shape, by a pixel for each channel, or of a matrix and several.
    NotOffloadable."""
    a, b, y = operand(node, "a"), operand(node, "b"), node.outputs[0]
    assert a is not None and b is not None
    sa, za, sb, zb, sy, zy = _numbers(node)
    fit = numerics.fit_rescale_mul(sa, za, sb, zb, sy, zy, y.dtype.numpy())  # type: ignore[union-attr]
    if fit is None:
        raise NotOffloadable(
            "no integers give onnxruntime's product on all pairs of bytes; other scales may, from another calibration"
        )
    zeros = [stored_zero(operand(node, f"{name}_zero_point")) for name in "ab"]
    if shape(a) != shape(y):
        a, b, zeros = b, a, zeros[::-1]
    reads: Reads = {}
    if shape(a) == shape(y) != shape(b) and (other := one_for_each(p, a, b, reads)) is not None:
        requantise = uniform(shape_of(a)[-1], fit.bias, fit.multiplier, fit.shift, fit.zero_point)
        multiply = Multiplication(other, -zeros[0], -zeros[1])
        made = lambda name, x, y: Layer(name, x, y, multiply=multiply, requantise=requantise)  # noqa: E731
        each_matrix(p, node, a, reads, made)
        return
    if shape(a) != shape(y) or not (shape(b) == shape(y) or is_one_pixel(b, y)):
        raise NotOffloadable(_unequal(node))
    form = _form(p, y, a) if shape(b) == shape(y) else p.common_form(a)
    if shape(b) != shape(y) and form != natural_form(a):  # its rows are images, or pixels
        raise NotOffloadable(_unequal(node))
    b_form = form if shape(b) == shape(y) else natural_form(b)
    x, other = p.read(a, form, reads), p.read(b, b_form, reads)
    requantise = uniform(form.dims[1], fit.bias, fit.multiplier, fit.shift, fit.zero_point)
    multiply = Multiplication(other, -zeros[0], -zeros[1])
    layer = Layer(node.name or "", x, p.activation(y, form), multiply=multiply, requantise=requantise)
    p.add(node, layer, reads, form)
