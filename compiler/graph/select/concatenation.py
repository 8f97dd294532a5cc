"""Concatenations: their parts are written where they belong."""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir

from celosia.compiler import numerics
from celosia.compiler.graph.select.forms import Form, OnCpu, natural_form
from celosia.compiler.graph.select.joining import joins
from celosia.compiler.graph.select.parameters import scalar_of
from celosia.compiler.graph.select.placement import Choice, Placement, Reads
from celosia.compiler.graph.values import attribute, constant
from celosia.compiler.layer import Activation, Epilogue, Map, ending, moved


def concat(p: Placement, node: ir.Node) -> None:
    y = node.outputs[0]
    rank = len(y.shape or ())
    axis = attribute(node, "axis", 1) % max(rank, 1)
    if axis != 1 or rank not in (2, 4):
        raise OnCpu(f"a concatenation along axis {axis}; the accelerator joins channels, axis 1")
    y_form = natural_form(y)
    sy, zy = scalar_of(node.inputs[0]), scalar_of(node.inputs[1])
    operands = [node.inputs[i : i + 3] for i in range(2, len(node.inputs), 3)]
    forms = [natural_form(operand[0]) for operand in operands]  # type: ignore[arg-type]
    if any(constant(operand[0]) is not None for operand in operands):
        raise OnCpu("a part is a constant; add it where its readers do, or leave it out")
    if any(form.dims[1] % p.cfg.group for form in forms[:-1]):
        raise OnCpu(f"a part does not end on a group of {p.cfg.group} channels; make its channels a multiple of that")
    tables = []
    for operand in operands:
        sx, zx = scalar_of(operand[1]), scalar_of(operand[2])
        kind = y.dtype.numpy()  # type: ignore[union-attr]
        same = (sx, zx) == (sy, zy)
        tables.append(None if same else numerics.unary_table("Identity", {}, sx, zx, sy, zy, kind))
    whole, offset = p.activation(y, y_form), 0
    for number, (operand, form, table) in enumerate(zip(operands, forms, tables)):
        value = operand[0]
        assert value is not None
        choice = p.made.get(value)
        mine = choice is not None and choice.value is value and choice.layer.y.storage not in p.inside
        if mine and choice is not None and table is None:
            choice.nodes.append(node)
        elif mine and choice is not None and joins(choice, value) and choice.layer.epilogue.table is None:
            extend_part(p, choice, node, replace(choice.layer.epilogue, table=table))
        else:
            reads: Reads = {}
            x = p.read(value, form, reads)
            copy = Map(f"{node.name}.{number}", x, p.activation(y, form), Epilogue(table=table))
            choice = Choice(copy, [node], reads, y)
            p.selection.choices.append(choice)
        p.inside[choice.layer.y.storage] = (whole.storage, offset)
        offset += form.dims[1] // p.cfg.group
    p.selection.forms[y], p.selection.written[y] = y_form, whole


def extend_part(p: Placement, choice: Choice, node: ir.Node, epilogue: Epilogue) -> None:
    """Let `choice` end in `epilogue` and write a part of the concatenation `node`."""
    p.no_longer_writes(choice)
    y = p.activation(node.outputs[0], Form(choice.layer.y.dims))
    choice.layer = ending(choice.layer, epilogue, y)
    choice.value = node.outputs[0]
    choice.nodes.append(node)


def place_parts(p: Placement) -> None:
    """Give every activation inside a concatenation its place, nested ones too."""

    def placed(act: Activation) -> Activation:
        while act.storage in p.inside:
            outer, start = p.inside[act.storage]
            act = replace(act, storage=outer, group_offset=act.group_offset + start)
        return act

    for choice in p.selection.choices:
        choice.layer = moved(choice.layer, placed)
    for value, act in p.selection.written.items():
        p.selection.written[value] = placed(act)
