"""Whether a model computes each sample of a batch alone: proved operator by operator, or not at all.

A tensor holds samples where its first axis counts them, and its part number i depends on the samples number i of the
inputs alone. A tensor is common where it depends on no sample. An operator keeps this by its rule in RULES, whatever
the number of samples; what has no rule, or breaks it, ends the proof with a reason.

x: samples [N, 8]    y = MatMul(x, w)                y: samples, each row of a product is made of one row of x
                     z = Softmax(y, axis=0)          no: "Softmax (z): axis 0 counts samples"
"""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from celosia.compiler.cpu.parse import parse
from celosia.compiler.graph.importing.sample_rules import (
    COUNT,
    RULES,
    TAKES_COUNT,
    BatchDependence,
    RuledNode,
    Sizes,
    rank_or,
)
from celosia.compiler.graph.operands import joins_parts
from celosia.compiler.graph.values import captured, constant
from celosia.compiler.program.host.op import DOMAINS, bodies
from celosia.compiler.program.host.shape_rules import slice_positions
from celosia.compiler.program.op_spec import find_operand


def mixes(model: ir.Model, inputs: Collection[str]) -> str:
    """Why samples of `inputs`, counted by their first axes, are not known to be independent; "" where they are."""
    graph = model.graph
    samples = {value for value in graph.inputs if value.name in inputs}
    sizes: dict[ir.Value, Sizes] = {}
    for value in graph.initializers.values():
        _note(value, sizes)
    opset = graph.opset_imports.get("", 21)
    for node in graph:
        name = f"{node.op_type} ({node.name or node.outputs[0].name})"
        read = [value for value in node.inputs if value is not None]
        if node.op_type == "CastLike":  # of the other it takes the type
            read = read[:1]
        for value in read:
            _note(value, sizes)
        known = _list(node, samples, sizes)
        if known is not None:
            sizes[node.outputs[0]] = known
            continue
        counted = any(COUNT in sizes.get(value, ()) for value in read)
        if not counted and not samples.intersection([*read, *captured(node)]):
            continue
        op = parse(ir.serde.serialize_node(node), dict(graph.opset_imports))
        if any(bodies(op)):
            return f"{name} has subgraphs"
        if node.op_type not in RULES or node.domain not in DOMAINS:
            return f"{name} may mix samples"
        if counted and node.op_type not in TAKES_COUNT:
            return f"{name} computes with the number of samples"
        try:
            RULES[node.op_type](RuledNode(node, op.attrs, opset, samples, sizes))
        except BatchDependence as reason:
            return f"{name} may mix samples: {reason}"
        samples.update(node.outputs)
    for value in graph.outputs:
        if value not in samples:
            return f"output {value.name!r} does not count samples"
    return ""


def _note(value: ir.Value, sizes: dict[ir.Value, Sizes]) -> None:
    """Take down a constant list of integers."""
    if value in sizes or value.const_value is None or value.const_value.size > 64:
        return
    array = constant(value)
    if array is not None and array.dtype.kind in "iu" and array.ndim <= 1:
        sizes[value] = [int(each) for each in array.reshape(-1)]


def _list(node: ir.Node, samples: set[ir.Value], sizes: dict[ir.Value, Sizes]) -> Sizes | None:
    """Return what is known of the list of sizes that `node` computes, if it computes one."""
    first = node.inputs[0] if node.inputs else None
    if node.op_type == "Shape" and first is not None:
        if first.shape is None:
            return None
        start, end = (node.attributes.get(name) for name in ("start", "end"))
        whole: Sizes = [size if isinstance(size, int) else None for size in first.shape]
        whole[:1] = [COUNT] if first in samples else whole[:1]
        return whole[start.as_int() if start else 0 : end.as_int() if end else None]
    lists = [sizes.get(value) if value is not None else None for value in node.inputs]
    if not lists or any(each is None for each in lists) or rank_or(node.outputs[0], 2) > 1:
        return None
    given: list[Sizes] = [each or [] for each in lists]
    if not any(COUNT in each or None in each for each in given):
        return None
    if node.op_type in ("Identity", "Cast", "Squeeze", "Unsqueeze", "Reshape"):  # of one axis, or none
        return given[0]
    if joins_parts(node):
        return [size for each in given for size in each]
    data, *others = given
    if node.op_type == "Gather" and all(isinstance(i, int) and -len(data) <= i < len(data) for i in others[0]):
        return [data[i] for i in others[0]]
    if node.op_type == "Slice" and all(isinstance(i, int) for each in others for i in each):
        starts, ends, steps = (find_operand("Slice", given, name) for name in ("starts", "ends", "steps"))
        places = slice_positions(len(data), starts[0], ends[0], steps[0] if steps else 1) if starts and ends else ()
        return [data[place] for place in places] if starts and ends else None
    return None
