"""Columns of several matrices, such as heads, as layers: a part of each, parts beside each other, and what is done to
each by one matrix. Rotary positions are made of these: halves of heads change places."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import onnx_ir as ir

from celosia.compiler.graph.operands import joins_parts
from celosia.compiler.graph.select.forms import ActivationLayout, NotOffloadable, cut_axes, shape_of
from celosia.compiler.graph.select.joining import joins
from celosia.compiler.graph.select.matrices import MOST_PRODUCTS, matrices_form
from celosia.compiler.graph.select.placement import LayerAssignment, Placement, Reads, cache_of
from celosia.compiler.graph.values import attribute, is_op
from celosia.compiler.layer import Activation, Layer
from celosia.compiler.program.model import matrix_counts, matrix_sizes
from celosia.compiler.tensorize import pack


def holds_matrices(p: Placement, value: ir.Value) -> bool:
    """Whether the accelerator holds `value` as matrices whose rows are pixels, and which are not too many."""
    held = p.held(value)
    rows = held is not None and held.fold == "rows" and not held.inverted
    return rows and matrix_counts("rows", shape_of(value))[0] <= MOST_PRODUCTS


def matrix_of(p: Placement, act: Activation, value: ir.Value, number: int) -> Activation:
    """One of the matrices of `value`, which lies in `act`."""
    _, columns, rows = matrix_counts("rows", shape_of(value))
    return act.region((1, columns, 1, rows), number * pack.blocks(columns, p.cfg.group), act.pixels)


def one_for_each(p: Placement, value: ir.Value, b: ir.Value, reads: Reads) -> Activation | None:
    """The activation of `b`, a matrix for each of those of `value`, or a row for each of theirs; None where it is
    something else, or `value` is one matrix."""
    count, columns, rows = matrix_counts("rows", shape_of(value))
    sizes = matrix_sizes(shape_of(b))
    if count == 1 or not holds_matrices(p, value) or sizes not in ((1, 1, columns), (1, rows, columns)):
        return None
    return p.read(b, ActivationLayout((1, columns, 1, sizes[1]), "rows"), reads, constants=True)


def each_matrix(
    p: Placement, node: ir.Node, x: ir.Value, reads: Reads, made: Callable[[str, Activation, Activation], Layer]
) -> None:
    """Place a layer for each matrix of `x`, which the accelerator holds, `made` of its name, x and y."""
    form, y = p.held(x), node.outputs[0]
    assert form is not None
    source, whole = p.read(x, form, reads), p.activation(y, form)
    count = matrix_counts("rows", shape_of(x))[0]
    layers = [
        made(f"{node.name}.{number}", matrix_of(p, source, x, number), matrix_of(p, whole, y, number))
        for number in range(count)
    ]
    p.assemble(node, layers, reads, whole, form)


def take_columns(p: Placement, node: ir.Node) -> None:
    """Place a Slice of the columns of matrices: a copy of each one's. NotOffloadable where they are no whole groups."""
    (x, y), group = (node.inputs[0], node.outputs[0]), p.cfg.group
    assert x is not None
    sizes = [range(size) for size in shape_of(x)]
    for axis, places in cut_axes(node, sizes):
        sizes[axis] = places
    if not _becomes_columns(y):
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
    source, form = p.selection.written[p.source(x)], matrices_form(p.cfg, y, "rows")
    whole, layers = p.activation(y, form), list[Layer]()
    for number in range(matrix_counts("rows", shape_of(x))[0]):
        matrix, part = matrix_of(p, source, x, number), matrix_of(p, whole, y, number)
        taken = matrix.region(part.dims, columns.start // group, matrix.pixels)
        layers.append(Layer(f"{node.name}.{number}", taken, part))
    p.assemble(node, layers, {}, whole, form)


def _becomes_columns(value: ir.Value) -> bool:
    """Whether nobody reads `value` but concatenations, of its table perhaps."""
    readers = [use.node for use in value.uses()]
    return bool(readers) and all(
        joins_parts(node) or (is_op(node, "Table") and _becomes_columns(node.outputs[0])) for node in readers
    )


def join_columns(p: Placement, node: ir.Node, parts: list[ir.Value]) -> bool:
    """Place a concatenation of columns of matrices, each made by layers of its own: these write where they belong;
    False where that is not what it is."""
    y = node.outputs[0]
    dims = shape_of(y)
    along = attribute(node, "axis", 1) % len(dims) == len(dims) - 1
    whole_groups = all(shape_of(part)[-1] % p.cfg.group == 0 for part in parts)
    if not along or not whole_groups or not all(_is_moved(p, part) for part in parts):
        return False
    form = matrices_form(p.cfg, y, "rows")
    whole, offset, joined = p.activation(y, form), 0, list[LayerAssignment]()
    for part in parts:
        joined += _moved(p, part, whole, offset, [node])
        offset += shape_of(part)[-1]
    _assembled(p, y, joined, whole, form)
    return True


def join_turned(p: Placement, node: ir.Node, parts: list[ir.Value]) -> bool:
    """Place a concatenation of a cache's rows, in whole groups, and new ones that layers have turned, for products that
    contract over them: the host fills the first, and the layers write where the others belong; False where that is not
    what it is."""
    (first, *others), y = parts, node.outputs[0]
    if len(others) != 1 or cache_of(y) is None or p.held(first) is not None:
        return False
    after = others[0].producer()
    made = None if after is None or not is_op(after, "Transpose") else after.inputs[0]
    held, rows = p.held(others[0]), shape_of(first)[-2]
    if made is None or held is None or held.fold != "columns" or rows % p.cfg.group or not _is_moved(p, made):
        return False
    form = matrices_form(p.cfg, y, "columns", block=p.cfg.block_out)
    whole = p.activation(y, form)
    joined = _moved(p, made, whole, rows, [after, node])  # type: ignore[list-item]
    for choice in joined:
        choice.reads[whole.storage] = first, form
    _assembled(p, y, joined, whole, form)
    return True


def _is_moved(p: Placement, part: ir.Value) -> bool:
    """Whether layers make `part`, a matrix each, that could as well write elsewhere."""
    choices = p.assembled.get(part, [])
    return bool(choices) and joins(choices[0], part) and p.owned(part) and holds_matrices(p, part)


def _moved(p: Placement, part: ir.Value, whole: Activation, offset: int, nodes: list[ir.Node]) -> list[LayerAssignment]:
    """The layers of `part`, which now write from channel `offset` on of each matrix in `whole`, what `nodes` make."""
    choices = p.assembled.pop(part)
    groups = whole.channels // len(choices) // p.cfg.group
    for number, choice in enumerate(choices):
        place = whole.region(choice.layer.y.dims, number * groups + offset // p.cfg.group, whole.pixels)
        choice.layer, choice.value = replace(choice.layer, y=place), nodes[-1].outputs[0]
        choice.nodes += nodes
    del p.selection.forms[part], p.selection.written[part]
    return choices


def _assembled(
    p: Placement, y: ir.Value, choices: list[LayerAssignment], whole: Activation, form: ActivationLayout
) -> None:
    p.assembled[y] = choices
    p.selection.forms[y], p.selection.written[y] = form, whole
