"""Concatenations: the layers that make the parts write them where they belong in the result.

A part along channels must begin on a channel group. If the part before it ends inside a group, the rest of that group
is padding; convolutions that read the result multiply it by weights of zero, and a Gather leaves it out. Other readers
cannot take padding (graph/channel_moves puts a Gather before them).

Three concatenations of matrices are placed otherwise: of columns, such as the halves of heads that rotary position
embeddings exchange (`_join_columns`), and of the rows of a key-value cache and new rows, transposed
(`_join_transposed_rows`) or not (`_append_to_cache`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from celosia.compiler import numerics
from celosia.compiler.graph.operands import convolves_bytes, joins_parts, operand, operand_groups
from celosia.compiler.graph.select.matrices import (
    can_multiply_activations,
    holds_matrices,
    matrices_form,
    pixel_rows_form,
    right_operands_of,
    shared_operand,
    swaps_last_axes,
)
from celosia.compiler.graph.select.parameters import image_axes, scalar_of
from celosia.compiler.graph.select.placement import (
    NO_WAY,
    ActivationLayout,
    LayerAssignment,
    NotOffloadable,
    Placement,
    Reads,
    cache_of,
    can_fuse_reader,
    natural_form,
    shape_of,
)
from celosia.compiler.graph.values import attribute, constant, is_op
from celosia.compiler.layer import Activation, Epilogue, Layer, Storage, StridedView, whole_groups
from celosia.compiler.program.model import matrix_counts


@dataclass(frozen=True)
class _Part:
    """An operand of a concatenation.

    number: its position. form: its form. table: changes its scale to that of the result; None if both are the same.
    place: the region of the result that it becomes.
    """

    number: int
    value: ir.Value
    form: ActivationLayout
    table: NDArray[np.int8] | None
    place: Activation


def place_concat(p: Placement, node: ir.Node) -> None:
    """Place a concatenation along channels, rows or columns. Raises NotOffloadable."""
    y = node.outputs[0]
    operands = _parts_with_tables(node)
    values, rescales = [value for value, _ in operands], any(table is not None for _, table in operands)
    if not rescales and any(join(p, node, values) for join in (_join_transposed_rows, _append_to_cache, _join_columns)):
        return
    if _join_rows(p, node, operands):
        return
    y_form = natural_form(y)
    axes = image_axes(len(y.shape or ()))
    axis = axes[attribute(node, "axis", 1) % len(axes)]
    if axis == 0:
        raise NotOffloadable("a concatenation of images; the accelerator joins channels, rows and columns")
    if any(constant(value) is not None for value, _ in operands):
        raise NotOffloadable("a part is a constant; add it where its readers do, or leave it out")
    forms = [natural_form(value) for value, _ in operands]
    if axis == 1 and any(form.dims[1] % p.cfg.group for form in forms[:-1]):
        y_form = _pad_between_parts(p, node, y_form, [form.dims[1] for form in forms])
    whole, offset, parts = p.new_activation(y, y_form), 0, []
    for number, ((value, table), form) in enumerate(zip(operands, forms)):
        place = _region_at(p, whole, form, axis, offset)
        parts.append(_Part(number, value, form, table, place))
        offset += whole_groups(p.cfg, form.dims[1]) if axis == 1 else form.dims[axis]
    in_place: set[int] = set()  # parts that lie side by side already, as all of one tensor
    for first, storage in _complete_tensors(p, parts) if axis == 1 else ():
        p.enclosing[storage] = parts[first].place
        in_place.update(
            n for n, part in enumerate(parts) if p.selection.written.get(part.value, whole).storage is storage
        )
    covered = [_place_part(p, node, part) for part in parts if part.number not in in_place]
    if not any(covered):
        p.selection.views[node] = "free: its parts are written where they belong"
    p.selection.forms[y], p.selection.written[y] = y_form, whole


def _parts_with_tables(node: ir.Node) -> list[tuple[ir.Value, NDArray[np.int8] | None]]:
    """Return the operands, each with the table that changes its scale to that of the result; None if it is the same."""
    if joins_parts(node):
        return [(value, None) for value in node.inputs if value is not None]
    sy, zy = scalar_of(operand(node, "y_scale")), scalar_of(operand(node, "y_zero_point"))
    kind = node.outputs[0].dtype.numpy()  # type: ignore[union-attr]
    result: list[tuple[ir.Value, NDArray[np.int8] | None]] = []
    for value, scale, zero in operand_groups(node):
        sx, zx = scalar_of(scale), scalar_of(zero)
        same = (sx, zx) == (sy, zy)
        table = None if same else numerics.identity_table(sx, zx, sy, zy, kind)
        result.append((value, table))  # type: ignore[arg-type]
    return result


def _pad_between_parts(p: Placement, node: ir.Node, form: ActivationLayout, sizes: list[int]) -> ActivationLayout:
    """Return the form of a concatenation with padding between its parts, of `sizes` channels, so that each begins a
    group.

    Records in `channel_positions` where its channels lie. Raises NotOffloadable if a reader cannot take padding.
    """
    y = node.outputs[0]
    starts = np.cumsum([0, *(whole_groups(p.cfg, size) for size in sizes)])
    positions = np.concatenate([start + np.arange(size) for start, size in zip(starts, sizes)])
    readers = [use.node for use in y.uses()]
    if node in p.unpadded or y.is_graph_output() or not all(_accepts_gaps(reader, y) for reader in readers):
        raise NotOffloadable(
            f"a part does not end on a group of {p.cfg.group} channels; make its channels a multiple of that"
        )
    p.channel_positions[y] = positions
    return replace(form, dims=(form.dims[0], int(starts[-1]), *form.dims[2:]))


def _accepts_gaps(reader: ir.Node, y: ir.Value) -> bool:
    """Whether `reader` can take padding in `y`, its input.

    These are convolutions of one group with constant weights, and Gathers of channels.
    """
    if is_op(reader, "Gather") and reader.inputs[0] is y:
        return constant(reader.inputs[1]) is not None and attribute(reader, "axis", 0) % len(y.shape or ()) == 1
    is_input = convolves_bytes(reader) and [value for value in reader.inputs if value is y] == [reader.inputs[0]]
    return is_input and attribute(reader, "group", 1) == 1 and constant(operand(reader, "w")) is not None


def _region_at(p: Placement, whole: Activation, form: ActivationLayout, axis: int, offset: int) -> Activation:
    """Return the part of `whole` that begins at `offset` of its axis."""
    if axis == 1:
        return whole.region(form.dims, offset // p.cfg.group, whole.pixels)
    top, left = (offset, 0) if axis == 2 else (0, offset)
    return whole.region(form.dims, 0, StridedView(whole.height, whole.width, top, left))


def _complete_tensors(p: Placement, parts: list[_Part]) -> Iterator[tuple[int, Storage]]:
    """Find operands that are, in order, all parts of one tensor, as a Split makes them: its storage can move as a
    whole.

    Yields the number of the first of these operands and the storage of the tensor.
    """
    wholes = {act.storage: act for value, act in p.selection.written.items() if p.has_own_storage(value)}
    for first, part in enumerate(parts):
        act = p.selection.written.get(part.value)
        source = wholes.get(act.storage) if act is not None else None
        if act is None or source is None or act.group_offset or act.channels == source.channels:
            continue
        channels = 0
        for other in parts[first:]:
            held = p.selection.written.get(other.value)
            expected = source.region(other.form.dims, channels // p.cfg.group, source.pixels)
            if other.table is not None or held != expected or channels % p.cfg.group:
                break
            channels += other.form.dims[1]
            if channels == source.channels:
                yield first, source.storage
                break


def _place_part(p: Placement, node: ir.Node, part: _Part) -> bool:
    """Let a layer write `part` where it belongs: the one that makes it if possible, with its table; else a copy.

    Returns whether a layer now covers `node`.
    """
    value, choice = part.value, p.producers.get(part.value)
    movable = p.has_own_storage(value) and p.held_form(value) == part.form
    is_written_by_choice = choice is not None and choice.value is value and movable
    if part.table is None and movable:
        p.enclosing[p.selection.written[value].storage] = part.place
        if is_written_by_choice and choice is not None:
            choice.nodes.append(node)
        return is_written_by_choice
    if (
        is_written_by_choice
        and choice is not None
        and can_fuse_reader(choice, value)
        and choice.layer.epilogue.table is None
    ):
        p.forget_output(choice)
        y = p.new_activation(node.outputs[0], ActivationLayout(choice.layer.y.dims))
        choice.layer = replace(choice.layer, epilogue=replace(choice.layer.epilogue, table=part.table), y=y)
        choice.value = node.outputs[0]
        choice.nodes.append(node)
        p.enclosing[choice.layer.y.storage] = part.place
        return True
    return _copy_part(p, node, part.number, value, part.form, part.table, part.place)


def _copy_part(
    p: Placement, node: ir.Node, number: int, value: ir.Value, form: ActivationLayout, table: NDArray[np.int8] | None,
    place: Activation,
) -> bool:  # fmt: skip
    """Let a layer copy `value`, which may be a constant, to the region `place` of the result. Returns True."""
    reads: Reads = {}
    x = p.read(value, form, reads, constants=True)
    y = p.new_activation(node.outputs[0], form)
    copy = Layer(f"{node.name}.{number}", x, y, epilogue=Epilogue(table=table))
    p.selection.choices.append(LayerAssignment(copy, [node], reads, node.outputs[0]))
    p.enclosing[copy.y.storage] = place
    return True


def resolve_regions(p: Placement) -> None:
    """Rewrite all activations whose storages became parts of others (`Placement.enclosing`), nested ones too."""

    def resolve(act: Activation) -> Activation:
        """Return `act` in the outermost storage that its storage has become a part of."""
        while act.storage in p.enclosing:
            act = act.rebased(p.enclosing[act.storage])
        return act

    for choice in p.selection.choices:
        choice.layer = choice.layer.map_activations(resolve)
    for value, act in p.selection.written.items():
        p.selection.written[value] = resolve(act)


# Rows of matrices -----------------------------------------------------------------------------------------------------


def _join_rows(
    p: Placement, node: ir.Node, operands: list[tuple[ir.Value, NDArray[np.int8] | None]]
) -> bool:  # fmt: skip
    """Place a concatenation of rows, such as a class token before those of an image, of which the accelerator holds
    some.

    A part that a layer writes into a storage of its own is written where it belongs. Others are copied, also constants
    and those of the host. Returns False if `node` is another kind of concatenation.
    """
    y = node.outputs[0]
    dims = shape_of(y)
    along = len(dims) > 1 and attribute(node, "axis", 1) % len(dims) == len(dims) - 2
    if not along or not any(holds_matrices(p, value) for value, _ in operands):
        return False
    form = pixel_rows_form(dims)
    count, columns, _ = matrix_counts("rows", dims)
    if count > 1 or any(prod(shape_of(value)[:-2]) != count for value, _ in operands):
        return False
    whole, first, covered = p.new_activation(y, form), 0, False
    for number, (value, table) in enumerate(operands):
        rows = matrix_counts("rows", shape_of(value))[2]
        place = whole.region((1, columns, 1, rows), 0, StridedView(1, whole.width, 0, first))
        part_form = ActivationLayout(place.dims, "rows")
        if constant(value) is not None:
            covered |= _copy_part(p, node, number, value, part_form, table, place)
        else:
            covered |= _place_part(p, node, _Part(number, value, part_form, table, place))
        first += rows
    if not covered:
        p.selection.views[node] = "free: its parts are written where they belong"
    p.selection.forms[y], p.selection.written[y] = form, whole
    return True


# Columns of matrices --------------------------------------------------------------------------------------------------


def _join_columns(p: Placement, node: ir.Node, parts: list[ir.Value]) -> bool:
    """Place a concatenation along the columns of matrices: the layers that make the parts write into the result.

    Returns False if `node` is another kind of concatenation.
    """
    y = node.outputs[0]
    dims = shape_of(y)
    along = attribute(node, "axis", 1) % len(dims) == len(dims) - 1
    whole_groups = all(shape_of(part)[-1] % p.cfg.group == 0 for part in parts)
    if not along or not whole_groups or not all(_can_write_elsewhere(p, part) for part in parts):
        return False
    form = matrices_form(p.cfg, shape_of(y), "rows")
    whole, offset, joined = p.new_activation(y, form), 0, list[LayerAssignment]()
    for part in parts:
        joined += _redirect_layers(p, part, whole, offset, [node])
        offset += shape_of(part)[-1]
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


# Caches ---------------------------------------------------------------------------------------------------------------


def _join_transposed_rows(p: Placement, node: ir.Node, parts: list[ir.Value]) -> bool:
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
    form = matrices_form(p.cfg, shape_of(y), "columns", block=p.cfg.block_out)
    whole = p.new_activation(y, form)
    joined = _redirect_layers(p, new_rows, whole, rows, [transposing, node])  # type: ignore[list-item]
    for choice in joined:
        choice.reads[whole.storage] = first, form
    _record_joined(p, y, joined, whole, form)
    return True


def _append_to_cache(p: Placement, node: ir.Node, operands: list[ir.Value]) -> bool:
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
    form = matrices_form(p.cfg, shape_of(y), "rows", block=p.cfg.block_out)
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
    ends = right_operands_of(value) or []
    transposed = [end.producer() is not None and swaps_last_axes(end.producer()) for end in ends]  # type: ignore[arg-type]
    sources = all(end is value or shared_operand(end)[0] is value or _before_transpose(end) is value for end in ends)
    return bool(ends) and sources and not any(transposed), bool(ends) and sources and all(transposed)


def _before_transpose(end: ir.Value) -> ir.Value | None:
    """Return the tensor of which `end` is the transpose; None if no Transpose of the last axes makes it."""
    producer = end.producer()
    return producer.inputs[0] if producer is not None and swaps_last_axes(producer) else None
