"""Concatenations: their parts are written where they belong.

Channels of a part begin on a group. Where another part ends within one, weights of zeros stand for the channels that
are left, if convolutions are all that reads the result.
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
from celosia.compiler.graph.select.columns import join_columns, join_turned
from celosia.compiler.graph.select.forms import ActivationLayout, NotOffloadable, natural_form
from celosia.compiler.graph.select.joining import joins
from celosia.compiler.graph.select.matrices import append_to_cache
from celosia.compiler.graph.select.parameters import array_of, image_axes, scalar_of
from celosia.compiler.graph.select.placement import LayerAssignment, Placement, Reads
from celosia.compiler.graph.values import attribute, constant
from celosia.compiler.layer import Activation, Epilogue, Layer, Storage, whole_groups
from celosia.compiler.strided_view import StridedView
from celosia.compiler.tensorize import pack


@dataclass(frozen=True)
class _Part:
    """An operand: its form, the table that changes its scale, and which part of the result it is."""

    number: int
    value: ir.Value
    form: ActivationLayout
    table: NDArray[np.int8] | None
    place: Activation


def concat(p: Placement, node: ir.Node) -> None:
    """Places a concatenation of channels, rows or columns. NotOffloadable."""
    y = node.outputs[0]
    operands = _operands(node)
    values, changed = [value for value, _ in operands], any(table is not None for _, table in operands)
    if not changed and any(place(p, node, values) for place in (join_turned, append_to_cache, join_columns)):
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
        y_form = _with_gaps(p, node, y_form, [form.dims[1] for form in forms])
    whole, offset, parts = p.activation(y, y_form), 0, []
    for number, ((value, table), form) in enumerate(zip(operands, forms)):
        place = _part_of(p, whole, form, axis, offset)
        parts.append(_Part(number, value, form, table, place))
        offset += whole_groups(p.cfg, form.dims[1]) if axis == 1 else form.dims[axis]
    joined: set[int] = set()
    for first, storage in _runs(p, parts) if axis == 1 else ():
        p.inside[storage] = parts[first].place
        joined.update(
            n for n, part in enumerate(parts) if p.selection.written.get(part.value, whole).storage is storage
        )
    laid = [_lay(p, node, part) for part in parts if part.number not in joined]
    if not any(laid):
        p.selection.views[node] = "free: its parts are written where they belong"
    p.selection.forms[y], p.selection.written[y] = y_form, whole


def _with_gaps(p: Placement, node: ir.Node, form: ActivationLayout, sizes: list[int]) -> ActivationLayout:
    """The form of a concatenation whose parts, of `sizes` channels, begin on groups. NotOffloadable where it has
    readers that do not know of channels between them, or where they multiply more zeros than the host would move
    bytes."""
    y = node.outputs[0]
    begins = np.cumsum([0, *(whole_groups(p.cfg, size) for size in sizes)])
    lanes = np.concatenate([begin + np.arange(size) for begin, size in zip(begins, sizes)])
    readers = [use.node for use in y.uses()]
    if node in p.unpadded or y.is_graph_output() or not all(_knows_gaps(reader, y) for reader in readers):
        raise NotOffloadable(
            f"a part does not end on a group of {p.cfg.group} channels; make its channels a multiple of that"
        )
    more = pack.blocks(int(begins[-1]), p.cfg.block_in) - pack.blocks(len(lanes), p.cfg.block_in)
    kernels = [array_of(operand(reader, "w")).shape for reader in readers]
    zeros = sum(more * pack.blocks(out, p.cfg.block_out) * prod(taps) for out, _, *taps in kernels)
    if zeros > len(lanes):
        raise NotOffloadable(
            f"a part does not end on a group of {p.cfg.group} channels, and {zeros} cycles a pixel fill them up; "
            "make its channels a multiple of that"
        )
    p.gaps[y] = lanes
    return replace(form, dims=(form.dims[0], int(begins[-1]), *form.dims[2:]))


def _knows_gaps(reader: ir.Node, y: ir.Value) -> bool:
    """Whether a node is a convolution that reads `y` as its input alone, with constant weights of all channels."""
    takes = convolves_bytes(reader) and [value for value in reader.inputs if value is y] == [reader.inputs[0]]
    return takes and attribute(reader, "group", 1) == 1 and constant(operand(reader, "w")) is not None


def _operands(node: ir.Node) -> list[tuple[ir.Value, NDArray[np.int8] | None]]:
    """The parts, and the table of each that changes its scale."""
    if joins_parts(node):
        return [(value, None) for value in node.inputs if value is not None]
    sy, zy = scalar_of(operand(node, "y_scale")), scalar_of(operand(node, "y_zero_point"))
    kind = node.outputs[0].dtype.numpy()  # type: ignore[union-attr]
    result: list[tuple[ir.Value, NDArray[np.int8] | None]] = []
    for value, scale, zero in operand_groups(node):
        sx, zx = scalar_of(scale), scalar_of(zero)
        same = (sx, zx) == (sy, zy)
        table = None if same else numerics.unary_table("Identity", {}, sx, zx, sy, zy, kind)
        result.append((value, table))  # type: ignore[arg-type]
    return result


def _part_of(p: Placement, whole: Activation, form: ActivationLayout, axis: int, offset: int) -> Activation:
    """Return the part of `whole` that begins at `offset` of its axis."""
    if axis == 1:
        return whole.region(form.dims, offset // p.cfg.group, whole.pixels)
    top, left = (offset, 0) if axis == 2 else (0, offset)
    return whole.region(form.dims, 0, StridedView(whole.height, whole.width, top, left))


def _runs(p: Placement, parts: list[_Part]) -> Iterator[tuple[int, Storage]]:
    """Parts that follow each other as they do in a tensor of which they are all: the first part, and its storage."""
    wholes = {act.storage: act for value, act in p.selection.written.items() if p.owned(value)}
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


def _lay(p: Placement, node: ir.Node, part: _Part) -> bool:
    """Have a part written where it belongs; whether a layer now counts as one of `node`."""
    value, choice = part.value, p.made.get(part.value)
    movable = p.owned(value) and p.held(value) == part.form
    mine = choice is not None and choice.value is value and movable
    if part.table is None and movable:
        p.inside[p.selection.written[value].storage] = part.place
        if mine and choice is not None:
            choice.nodes.append(node)
        return mine
    if mine and choice is not None and joins(choice, value) and choice.layer.epilogue.table is None:
        extend_part(p, choice, node, replace(choice.layer.epilogue, table=part.table))
        p.inside[choice.layer.y.storage] = part.place
        return True
    reads: Reads = {}
    x = p.read(value, part.form, reads)
    y = p.activation(node.outputs[0], part.form)
    copy = Layer(f"{node.name}.{part.number}", x, y, epilogue=Epilogue(table=part.table))
    p.selection.choices.append(LayerAssignment(copy, [node], reads, node.outputs[0]))
    p.inside[copy.y.storage] = part.place
    return True


def extend_part(p: Placement, choice: LayerAssignment, node: ir.Node, epilogue: Epilogue) -> None:
    """Let `choice` end in `epilogue` and write a part of the concatenation `node`."""
    p.no_longer_writes(choice)
    y = p.activation(node.outputs[0], ActivationLayout(choice.layer.y.dims))
    choice.layer = replace(choice.layer, epilogue=epilogue, y=y)
    choice.value = node.outputs[0]
    choice.nodes.append(node)


def place_parts(p: Placement) -> None:
    """Give every activation inside a concatenation its place, nested ones too."""

    def placed(act: Activation) -> Activation:
        while act.storage in p.inside:
            act = act.rebased(p.inside[act.storage])
        return act

    for choice in p.selection.choices:
        choice.layer = choice.layer.map_activations(placed)
    for value, act in p.selection.written.items():
        p.selection.written[value] = placed(act)
