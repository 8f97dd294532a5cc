"""Operators that only change the shape, or whose outputs are parts of their input: neither costs anything."""

from __future__ import annotations

import math
from dataclasses import replace

import onnx_ir as ir

from celosia.compiler.graph.operands import multiplies_matrices
from celosia.compiler.graph.select.columns import holds_matrices, take_columns
from celosia.compiler.graph.select.forms import HOST_INPUT, ActivationLayout, NotOffloadable, cut_axes, natural_form
from celosia.compiler.graph.select.matrices import is_reshaped
from celosia.compiler.graph.select.parameters import flattens, has_fixed_matrix, image_axes
from celosia.compiler.graph.select.placement import Placement
from celosia.compiler.graph.values import attribute, is_op, shape
from celosia.compiler.layer import Activation, Layer
from celosia.compiler.ops import VIEWS
from celosia.compiler.strided_view import StridedView

SAME_BYTES = tuple(sorted(VIEWS - {"Dropout"}))
"""Those that are free where the accelerator's layout stays the same."""


def is_view(p: Placement, node: ir.Node) -> bool:
    """Whether the output of `node` is the same activation as its input."""
    x, y = node.inputs[0], node.outputs[0]
    if x is None or y.is_graph_output():
        return False
    held = p.held(x)
    if held is None:
        return False
    if held.fold:
        return is_reshaped(p, node, held)
    try:
        form = natural_form(y)
    except NotOffloadable:
        form = natural_form(y, rows=True)
    if held != form and folds_into_gemm(p, node):
        p.selection.views[node] = "part of the matrix multiplications that read it"
        return True
    if held != form:
        return _joins_pixels(p, node, held, form)
    p.alias[y] = p.source(x)
    p.selection.forms[y] = form
    p.selection.views[node] = "free: the same bytes"
    return True


def _joins_pixels(p: Placement, node: ir.Node, held: ActivationLayout, form: ActivationLayout) -> bool:
    """Whether the output has the rows of the input, one after the other: the same bytes, which must then stay so."""
    x, y = node.inputs[0], node.outputs[0]
    assert x is not None
    source = p.selection.written.get(p.source(x))
    if source is None or source.dims != held.dims or source.strided_view is not None or source.storage in p.inside:
        return False
    if held.dims[:2] != form.dims[:2] or math.prod(held.dims) != math.prod(form.dims):
        return False
    act = replace(source, name=y.name or "", height=form.dims[2], width=form.dims[3])
    p.fixed.add(source.storage)
    p.selection.forms[y], p.selection.written[y] = form, act
    p.selection.views[node] = "free: the same bytes"
    return True


def folds_into_gemm(p: Placement, node: ir.Node) -> bool:
    """Flatten of an image whose every user is a matrix multiplication: it becomes a convolution of all pixels."""
    users = [use.node for use in node.outputs[0].uses()]
    return flattens(node) and bool(users) and all(
        multiplies_matrices(user) and user.inputs[0] is node.outputs[0] and has_fixed_matrix(user)
        for user in users
    )  # fmt: skip


def take_parts(p: Placement, node: ir.Node) -> None:
    """Note the outputs of a Split or Slice as parts of its input. NotOffloadable where the accelerator has no such
    parts."""
    x = node.inputs[0]
    assert x is not None
    if is_op(node, "Slice") and holds_matrices(p, x):
        return take_columns(p, node)
    form = natural_form(x)
    if p.held(x) != form:
        raise NotOffloadable(HOST_INPUT)
    source = p.selection.written[p.source(x)]
    parts = [_part(p, source, ranges) for ranges in ranges_of(node)]
    if parts[0].pixels.across > 1:  # a LOAD that skips columns cannot pad rows
        y, (part,) = natural_form(node.outputs[0]), parts
        p.add(node, Layer(node.name or "", part, p.activation(node.outputs[0], y)), {}, y)
        return
    for value, part in zip(node.outputs, parts):
        act = replace(part, name=value.name or "")
        p.selection.forms[value], p.selection.written[value] = natural_form(value), act
        p.parts.add(value)
    p.selection.views[node] = "free: part of the same bytes"


def _part(p: Placement, source: Activation, ranges: tuple[range, range, range, range]) -> Activation:
    """Images, channels, rows and columns of `source`."""
    images, channels, rows, columns = ranges
    if len(images) != source.images or images.step != 1:
        raise NotOffloadable("it takes some of the images; take channels, rows or columns")
    if channels.step != 1 or channels.start % p.cfg.group:
        raise NotOffloadable(f"its channels do not begin on a group of {p.cfg.group}; begin at a multiple of that")
    if rows.step < 1 or columns.step < 1:
        raise NotOffloadable("it turns rows or columns round; take them with a positive step")
    strided_view = StridedView(source.height, source.width, rows.start, columns.start, rows.step, columns.step)
    dims = source.images, len(channels), len(rows), len(columns)
    return source.region(dims, channels.start // p.cfg.group, strided_view)


def ranges_of(node: ir.Node) -> list[tuple[range, range, range, range]]:
    """For each output of a Split or Slice: which images, channels, rows and columns of its input it has."""
    form, axes = natural_form(node.inputs[0]), image_axes(len(node.inputs[0].shape or ()))  # type: ignore[union-attr,arg-type]
    whole = [range(size) for size in form.dims]
    if node.op_type == "Split":
        axis, start, found = attribute(node, "axis", 0) % len(axes), 0, []
        for y in node.outputs:
            size = (shape(y) or ())[axis]
            found.append([*whole[: axes[axis]], range(start, start + size), *whole[axes[axis] + 1 :]])
            start += size
    else:
        found = [whole]
        for axis, places in cut_axes(node, [whole[axis] for axis in axes]):
            whole[axes[axis]] = places
    result = [(each[0], each[1], each[2], each[3]) for each in found]
    if any(not len(side) for each in result for side in each):
        raise NotOffloadable("an output is empty; leave it out of the model")
    return result
