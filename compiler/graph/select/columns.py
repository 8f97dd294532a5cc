"""Layers on columns of several matrices, such as the heads of attention.

They take columns (Slice), join columns (Concat), or apply one matrix to each of several. Rotary position embeddings
need all three: they exchange the halves of each head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import onnx_ir as ir

from celosia.compiler.graph.operands import joins_parts
from celosia.compiler.graph.select.forms import ActivationLayout, NotOffloadable, cut_axes, shape_of
from celosia.compiler.graph.select.joining import can_fuse_reader
from celosia.compiler.graph.select.matrices import MAX_MATRICES, matrices_form
from celosia.compiler.graph.select.placement import LayerAssignment, Placement, Reads, cache_of
from celosia.compiler.graph.values import attribute, is_op
from celosia.compiler.layer import Activation, Layer
from celosia.compiler.program.model import matrix_counts, matrix_sizes
from celosia.compiler.tensorize import pack


def holds_matrices(p: Placement, value: ir.Value) -> bool:
    """Whether the accelerator holds `value` as at most MAX_MATRICES matrices whose rows are pixels."""
    held = p.held_form(value)
    rows = held is not None and held.fold == "rows" and not held.inverted
    return rows and matrix_counts("rows", shape_of(value))[0] <= MAX_MATRICES


def nth_matrix(p: Placement, act: Activation, value: ir.Value, number: int) -> Activation:
    """Return matrix `number` of `value` as a region of `act`, in which all matrices of `value` lie."""
    _, columns, rows = matrix_counts("rows", shape_of(value))
    return act.region((1, columns, 1, rows), number * pack.blocks(columns, p.cfg.group), act.pixels)


def read_shared_by_matrices(p: Placement, value: ir.Value, b: ir.Value, reads: Reads) -> Activation | None:
    """Return the activation of `b` if it is one matrix, or one row, that broadcasts over the several matrices of
    `value`.

    None if `b` has another shape, or `value` is a single matrix.
    """
    count, columns, rows = matrix_counts("rows", shape_of(value))
    sizes = matrix_sizes(shape_of(b))
    if count == 1 or not holds_matrices(p, value) or sizes not in ((1, 1, columns), (1, rows, columns)):
        return None
    return p.read(b, ActivationLayout((1, columns, 1, sizes[1]), "rows"), reads, constants=True)


def place_layer_per_matrix(
    p: Placement,
    node: ir.Node,
    x: ir.Value,
    reads: Reads,
    make_layer: Callable[[str, Activation, Activation], Layer],
) -> None:
    """Place one layer for each matrix of `x`, which the accelerator holds. make_layer: called with name, x and y."""
    form, y = p.held_form(x), node.outputs[0]
    assert form is not None
    source, whole = p.read(x, form, reads), p.new_activation(y, form)
    count = matrix_counts("rows", shape_of(x))[0]
    layers = [
        make_layer(f"{node.name}.{number}", nth_matrix(p, source, x, number), nth_matrix(p, whole, y, number))
        for number in range(count)
    ]
    p.add_parts(node, layers, reads, whole, form)


def place_column_slice(p: Placement, node: ir.Node) -> None:
    """Place a Slice of columns of matrices: one copy for each matrix.

    Raises NotOffloadable if the columns are not whole channel groups, or if no concatenation reads the result.
    """
    (x, y), group = (node.inputs[0], node.outputs[0]), p.cfg.group
    assert x is not None
    sizes = [range(size) for size in shape_of(x)]
    for axis, places in cut_axes(node, sizes):
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
    source, form = p.selection.written[p.viewed_tensor(x)], matrices_form(p.cfg, y, "rows")
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


def join_columns(p: Placement, node: ir.Node, parts: list[ir.Value]) -> bool:
    """Place a concatenation along the columns of matrices: the layers that make the parts write into the result.

    Returns False if `node` is another kind of concatenation.
    """
    y = node.outputs[0]
    dims = shape_of(y)
    along = attribute(node, "axis", 1) % len(dims) == len(dims) - 1
    whole_groups = all(shape_of(part)[-1] % p.cfg.group == 0 for part in parts)
    if not along or not whole_groups or not all(_can_write_elsewhere(p, part) for part in parts):
        return False
    form = matrices_form(p.cfg, y, "rows")
    whole, offset, joined = p.new_activation(y, form), 0, list[LayerAssignment]()
    for part in parts:
        joined += _redirect_layers(p, part, whole, offset, [node])
        offset += shape_of(part)[-1]
    _record_joined(p, y, joined, whole, form)
    return True


def join_transposed_rows(p: Placement, node: ir.Node, parts: list[ir.Value]) -> bool:
    """Place a concatenation of a cache's rows and new rows that the accelerator has transposed ("columns" form).

    The products that read it contract over these rows. The host fills the storage with the rows of the cache, in whole
    groups; the layers that make the new rows write behind them. Returns False if `node` is another concatenation.
    """
    (first, *others), y = parts, node.outputs[0]
    if len(others) != 1 or cache_of(y) is None or p.held_form(first) is not None:
        return False
    transposing = others[0].producer()
    new_rows = None if transposing is None or not is_op(transposing, "Transpose") else transposing.inputs[0]
    held, rows = p.held_form(others[0]), shape_of(first)[-2]
    if (
        new_rows is None
        or held is None
        or held.fold != "columns"
        or rows % p.cfg.group
        or not _can_write_elsewhere(p, new_rows)
    ):
        return False
    form = matrices_form(p.cfg, y, "columns", block=p.cfg.block_out)
    whole = p.new_activation(y, form)
    joined = _redirect_layers(p, new_rows, whole, rows, [transposing, node])  # type: ignore[list-item]
    for choice in joined:
        choice.reads[whole.storage] = first, form
    _record_joined(p, y, joined, whole, form)
    return True


def _can_write_elsewhere(p: Placement, part: ir.Value) -> bool:
    """Whether layers make one matrix of `part` each and could write it into another tensor: only one node reads
    `part`."""
    choices = p.part_producers.get(part, [])
    return bool(choices) and can_fuse_reader(choices[0], part) and p.has_own_storage(part) and holds_matrices(p, part)


def _redirect_layers(
    p: Placement, part: ir.Value, whole: Activation, offset: int, nodes: list[ir.Node]
) -> list[LayerAssignment]:
    """Let the layers of `part` write into `whole`, from channel `offset` of each of its matrices on, and return them.

    nodes: the nodes that they cover from now on, too; the last one's output is what they write.
    """
    choices = p.part_producers.pop(part)
    groups = whole.channels // len(choices) // p.cfg.group
    for number, choice in enumerate(choices):
        place = whole.region(choice.layer.y.dims, number * groups + offset // p.cfg.group, whole.pixels)
        choice.layer, choice.value = replace(choice.layer, y=place), nodes[-1].outputs[0]
        choice.nodes += nodes
    del p.selection.forms[part], p.selection.written[part]
    return choices


def _record_joined(
    p: Placement, y: ir.Value, choices: list[LayerAssignment], whole: Activation, form: ActivationLayout
) -> None:
    """Record that the layers of `choices` write the parts of `y`, which lies in `whole`."""
    p.part_producers[y] = choices
    p.selection.forms[y], p.selection.written[y] = form, whole
