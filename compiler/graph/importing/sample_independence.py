"""Prove, operator by operator, that a model computes each sample of a batch alone.

A tensor holds samples where its first axis counts them, and its part number i depends only on sample number i of the
inputs. A tensor is common where it depends on no sample. The rule of an operator in RULES (sample_rules.py) says when
its result holds samples, whatever their number. An operator without a rule, or that breaks its rule, ends the proof
with a reason.

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


def why_samples_mix(model: ir.Model, inputs: Collection[str]) -> str:
    """Return why samples of `inputs`, counted by first axes, may depend on each other; "" if they are proved not to."""
    graph = model.graph
    samples = {value for value in graph.inputs if value.name in inputs}
    sizes: dict[ir.Value, Sizes] = {}
    for value in graph.initializers.values():
        _add_constant(value, sizes)
    opset = graph.opset_imports.get("", 21)
    for node in graph:
        name = f"{node.op_type} ({node.name or node.outputs[0].name})"
        read = [value for value in node.inputs if value is not None]
        if node.op_type == "CastLike":  # only the type of its second input counts
            read = read[:1]
        for value in read:
            _add_constant(value, sizes)
        computed_sizes = _sizes_computed_by(node, samples, sizes)
        if computed_sizes is not None:
            sizes[node.outputs[0]] = computed_sizes
            continue
        reads_count = any(COUNT in sizes.get(value, ()) for value in read)
        if not reads_count and not samples.intersection([*read, *captured(node)]):
            continue
        op = parse(ir.serde.serialize_node(node), dict(graph.opset_imports))
        if any(bodies(op)):
            return f"{name} has subgraphs"
        if node.op_type not in RULES or node.domain not in DOMAINS:
            return f"{name} may mix samples"
        if reads_count and node.op_type not in TAKES_COUNT:
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


def _add_constant(value: ir.Value, sizes: dict[ir.Value, Sizes]) -> None:
    """Add a constant list of integers to `sizes`, since it may be a list of sizes or axes."""
    if value in sizes or value.const_value is None or value.const_value.size > 64:
        return
    array = constant(value)
    if array is not None and array.dtype.kind in "iu" and array.ndim <= 1:
        sizes[value] = [int(number) for number in array.reshape(-1)]


def _sizes_computed_by(node: ir.Node, samples: set[ir.Value], sizes: dict[ir.Value, Sizes]) -> Sizes | None:
    """Return the list of sizes that `node` computes, as far as it is known; None if it computes none.

    Lists without COUNT and without unknown elements give None, too, since folding makes them constants. The sizes say
    whether a Reshape, Expand or Slice keeps the samples apart.
    """
    first = node.inputs[0] if node.inputs else None
    if node.op_type == "Shape" and first is not None:
        if first.shape is None:
            return None
        start, end = (node.attributes.get(name) for name in ("start", "end"))
        dims: Sizes = [size if isinstance(size, int) else None for size in first.shape]
        dims[:1] = [COUNT] if first in samples else dims[:1]
        return dims[start.as_int() if start else 0 : end.as_int() if end else None]
    lists = [sizes.get(value) if value is not None else None for value in node.inputs]
    if not lists or any(sizes_of_operand is None for sizes_of_operand in lists) or rank_or(node.outputs[0], 2) > 1:
        return None
    operand_sizes: list[Sizes] = [sizes_of_operand or [] for sizes_of_operand in lists]
    if not any(COUNT in sizes_of_operand or None in sizes_of_operand for sizes_of_operand in operand_sizes):
        return None
    if node.op_type in ("Identity", "Cast", "Squeeze", "Unsqueeze", "Reshape"):  # of one axis, or none
        return operand_sizes[0]
    if joins_parts(node):
        return [size for sizes_of_operand in operand_sizes for size in sizes_of_operand]
    data, *others = operand_sizes
    if node.op_type == "Gather" and all(isinstance(i, int) and -len(data) <= i < len(data) for i in others[0]):
        return [data[i] for i in others[0]]
    if node.op_type == "Slice" and all(isinstance(i, int) for sizes_of_operand in others for i in sizes_of_operand):
        starts, ends, steps = (find_operand("Slice", operand_sizes, name) for name in ("starts", "ends", "steps"))
        positions = slice_positions(len(data), starts[0], ends[0], steps[0] if steps else 1) if starts and ends else ()
        return [data[position] for position in positions] if starts and ends else None
    return None
