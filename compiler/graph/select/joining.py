"""Tables and residual additions become the end of the layer that makes their operand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import onnx_ir as ir

from celosia.compiler.graph.select.forms import ActivationLayout
from celosia.compiler.graph.select.placement import LayerAssignment, Placement, Reads
from celosia.compiler.layer import Epilogue, Layer
from celosia.compiler.tensorize import pack
from celosia.hw.spec.config import Config


def join_residual(
    p: Placement, node: ir.Node, layer: Layer, operands: tuple[ir.Value, ir.Value], form: ActivationLayout, reads: Reads
) -> bool:
    """Make the addition of `operands`, x of `layer` and the other one, the epilogue of the convolution that produces
    the later of them, if that is possible. form: that of x."""
    residual = layer.epilogue.residual
    assert residual is not None
    order = {choice.value: place for place, choice in enumerate(p.selection.choices)}
    a, b = operands
    sides = [(a, b, residual.operand, False), (b, a, layer.x, True)]
    sides.sort(key=lambda side: -order.get(side[0], -1))
    for value, added, other, swapped in sides:
        choice = p.made.get(value)
        if choice is None or not joins(choice, value) or choice.layer.gemm is None:
            continue
        if p.held(value) != form:
            continue  # it is added as an activation of another form
        if choice.layer.is_depthwise(p.cfg) and _takes_longer_joined(p.cfg, choice.layer):
            continue
        if order.get(p.source(added), -1) >= order[choice.value] or added is value:
            continue
        scales = (residual.scale_b, residual.scale_v) if swapped else (residual.scale_v, residual.scale_b)
        joined = replace(residual, operand=other, scale_v=scales[0], scale_b=scales[1])
        extend(p, choice, node, replace(choice.layer.epilogue, residual=joined), reads)
        return True
    return False


def _takes_longer_joined(cfg: Config, layer: Layer) -> bool:
    """Whether the array takes more cycles for a depthwise convolution, which it computes with the addition, than the
    vector unit, and the bus for both operands of the addition."""
    height, width = layer.window.kernel
    steps, beats = height * pack.tap_steps(cfg, layer.window)[0], max(1, cfg.lanes // cfg.bus_bytes)
    return steps + 2 * beats < height * width


def joins(choice: LayerAssignment, value: ir.Value | None) -> bool:
    """Whether an operator on `value` alone can become part of the layer that makes it, which is none of rows."""
    return (
        value is not None and choice.value is value and len(list(value.uses())) == 1
        and not value.is_graph_output() and choice.layer.epilogue.residual is None
        and not choice.layer.works_on_rows
    )  # fmt: skip


def extend(p: Placement, choice: LayerAssignment, node: ir.Node, epilogue: Epilogue, reads: Reads) -> None:
    """Let `choice` end in `epilogue` and write the output of `node`."""
    form = p.selection.forms[choice.value]
    p.no_longer_writes(choice)
    y = p.activation(node.outputs[0], form)
    choice.layer = replace(choice.layer, epilogue=epilogue, y=y)
    choice.nodes.append(node)
    choice.reads.update(reads)
    p.writes(choice, node.outputs[0], form)


def extend_products(
    p: Placement, value: ir.Value, node: ir.Node, changed: Callable[[Epilogue], Epilogue], reads: Reads
) -> bool:
    """Let the layers that make a part of `value` each, as products of several matrices do, end as their epilogues are
    `changed`, and write the output of `node`; whether they can: they have neither a residual nor what would take the
    place of their table. Poolings and phases of convolutions take no residual."""
    choices, y = p.assembled.get(value, []), node.outputs[0]
    if not choices or not joins(choices[0], value):
        return False
    for choice in choices:
        own = choice.layer.epilogue
        new = changed(own)
        free = own.residual is None and (own.table is None or new.table is own.table)
        takes = choice.layer.product is not None or choice.layer.is_map or new.residual is None
        if choice.layer.works_on_rows or not (free and takes):
            return False
    form = p.selection.forms.pop(value)
    p.selection.written.pop(value)
    whole = p.activation(y, form)
    for choice in choices:
        place = replace(choice.layer.y, name=whole.name, storage=whole.storage)
        choice.layer = replace(choice.layer, epilogue=changed(choice.layer.epilogue), y=place)
        choice.nodes.append(node)
        choice.reads.update(reads)
        choice.value = y
    p.assembled[y] = p.assembled.pop(value)
    p.selection.forms[y], p.selection.written[y] = form, whole
    return True
