"""Fuse operators into the epilogue of the layer before them: tables and residual additions."""

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
        extend_layer(p, choice, node, replace(choice.layer.epilogue, residual=joined), reads)
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


def can_fuse_reader(choice: LayerAssignment, value: ir.Value | None) -> bool:
    """Whether the only reader of `value` can be fused into the layer of `choice`, which makes it.

    A layer with a residual, a softmax or a normalisation takes nothing more.
    """
    return (
        value is not None and choice.value is value and len(list(value.uses())) == 1
        and not value.is_graph_output() and choice.layer.epilogue.residual is None
        and not choice.layer.works_on_rows
    )  # fmt: skip


def extend_layer(p: Placement, choice: LayerAssignment, node: ir.Node, epilogue: Epilogue, reads: Reads) -> None:
    """Fuse `node` into the layer of `choice`: give it `epilogue`, let it write the output of `node` and add `reads`."""
    form = p.selection.forms[choice.value]
    p.forget_output(choice)
    y = p.new_activation(node.outputs[0], form)
    choice.layer = replace(choice.layer, epilogue=epilogue, y=y)
    choice.nodes.append(node)
    choice.reads.update(reads)
    p.record_output(choice, node.outputs[0], form)


def extend_layers_of(
    p: Placement, value: ir.Value, node: ir.Node, change: Callable[[Epilogue], Epilogue], reads: Reads
) -> bool:
    """Fuse `node` into all layers that make a part of `value` each, such as products of several matrices.

    change: gives the new epilogue from that of each layer. Returns False, with nothing changed, if one of the layers
    cannot take it: it has a residual, or a table where the new one would be; or it is a pooling or a phase of a
    transposed convolution and should take a residual.
    """
    choices, y = p.part_producers.get(value, []), node.outputs[0]
    if not choices or not can_fuse_reader(choices[0], value):
        return False
    for choice in choices:
        old = choice.layer.epilogue
        new = change(old)
        is_free = old.residual is None and (old.table is None or new.table is old.table)
        takes_residual = choice.layer.product is not None or choice.layer.is_map
        if choice.layer.works_on_rows or not is_free or not (takes_residual or new.residual is None):
            return False
    form = p.selection.forms.pop(value)
    p.selection.written.pop(value)
    whole = p.new_activation(y, form)
    for choice in choices:
        place = replace(choice.layer.y, name=whole.name, storage=whole.storage)
        choice.layer = replace(choice.layer, epilogue=change(choice.layer.epilogue), y=place)
        choice.nodes.append(node)
        choice.reads.update(reads)
        choice.value = y
    p.part_producers[y] = p.part_producers.pop(value)
    p.selection.forms[y], p.selection.written[y] = form, whole
    return True
