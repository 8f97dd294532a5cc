"""Operators that cost nothing: they change the shape only (Reshape, ...), or take a part of their input (Split,
Slice)."""

from __future__ import annotations

import math
from dataclasses import replace

import onnx_ir as ir

from celosia.compiler.graph.operands import multiplies_matrices
from celosia.compiler.graph.select.columns import holds_matrices, place_column_slice
from celosia.compiler.graph.select.forms import HOST_INPUT, ActivationLayout, NotOffloadable, cut_axes, natural_form
from celosia.compiler.graph.select.matrices import reshape_in_place
from celosia.compiler.graph.select.parameters import flattens_image, has_fixed_matrix, image_axes
from celosia.compiler.graph.select.placement import Placement
from celosia.compiler.graph.values import attribute, is_op, shape
from celosia.compiler.layer import Activation, Layer, StridedView
from celosia.compiler.ops import VIEWS

SAME_BYTES = tuple(sorted(VIEWS - {"Dropout"}))
"""Operators that only change the shape; they are free if the bytes lie in the same order on the accelerator."""


def take_as_view(p: Placement, node: ir.Node) -> bool:
    """Make the output of `node` a view of its input if the bytes stay the same. Returns whether they do."""
    x, y = node.inputs[0], node.outputs[0]
    if x is None or y.is_graph_output():
        return False
    held = p.held_form(x)
    if held is None:
        return False
    if held.fold:
        return reshape_in_place(p, node, held)
    try:
        form = natural_form(y)
    except NotOffloadable:
        form = natural_form(y, rows=True)
    if held != form and folds_into_gemm(p, node):
        p.selection.views[node] = "part of the matrix multiplications that read it"
        return True
    if held != form:
        return _join_rows_in_place(p, node, held, form)
    p.viewed[y] = p.viewed_tensor(x)
    p.selection.forms[y] = form
    p.selection.views[node] = "free: the same bytes"
    return True


def _join_rows_in_place(p: Placement, node: ir.Node, held: ActivationLayout, form: ActivationLayout) -> bool:
    """Make `y` a view of `x` with other heights and widths, such as all rows of an image as one row, if that is
    possible.

    The storage is then `reshaped`: it must not become a part of another, whose rows would lie apart.
    """
    x, y = node.inputs[0], node.outputs[0]
    assert x is not None
    source = p.selection.written.get(p.viewed_tensor(x))
    if source is None or source.dims != held.dims or source.strided_view is not None or source.storage in p.enclosing:
        return False
    if held.dims[:2] != form.dims[:2] or math.prod(held.dims) != math.prod(form.dims):
        return False
    act = replace(source, name=y.name or "", height=form.dims[2], width=form.dims[3])
    p.reshaped.add(source.storage)
    p.selection.forms[y], p.selection.written[y] = form, act
    p.selection.views[node] = "free: the same bytes"
    return True


def folds_into_gemm(p: Placement, node: ir.Node) -> bool:
    """Whether `node` flattens images that only products by constant matrices read: these become convolutions."""
    users = [use.node for use in node.outputs[0].uses()]
    return flattens_image(node) and bool(users) and all(
        multiplies_matrices(user) and user.inputs[0] is node.outputs[0] and has_fixed_matrix(user)
        for user in users
    )  # fmt: skip


def place_split_or_slice(p: Placement, node: ir.Node) -> None:
    """Record the outputs of a Split or Slice as parts of its input; they cost nothing, but for every n-th column.

    Raises NotOffloadable if the accelerator cannot address such parts.
    """
    x = node.inputs[0]
    assert x is not None
    if is_op(node, "Slice") and holds_matrices(p, x):
        return place_column_slice(p, node)
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
        raise NotOffloadable(f"its channels do not begin on a group of {p.cfg.group}; begin at a multiple of that")
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
        for axis, selected in cut_axes(node, [positions[axis] for axis in axes]):
            positions[axes[axis]] = selected
        outputs = [positions]
    if any(not len(selected) for ranges in outputs for selected in ranges):
        raise NotOffloadable("an output is empty; leave it out of the model")
    return [(images, channels, rows, columns) for images, channels, rows, columns in outputs]
