"""Infer the types of values in bodies of operators, and inline the branch of an If whose condition is a constant.

    y = If(True, then_branch=[t = Exp(x)], else_branch=...)     ->     y = Exp(x)

onnxruntime inlines such a branch before all other rewritings. onnx infers types of a body's results alone.
"""

from __future__ import annotations

import onnx
import onnx_ir as ir

from celosia.compiler.graph.importing.range_lengths import LONGEST
from celosia.compiler.graph.importing.shape_inference import inferred
from celosia.compiler.graph.values import captured, constant, is_op, subgraphs

INLINED = "constant of a branch that is inlined"
"""In `meta` of a value."""


def infer_bodies(model: ir.Model) -> None:
    """Change `model`: values in bodies of its operators have the types and shapes that follow from what they read."""
    waiting = [node for node in model.graph if subgraphs(node)]
    while waiting:
        node = waiting.pop()
        for body in subgraphs(node):
            _infer(body, captured(node), model)
            waiting += [inner for inner in body if subgraphs(inner)]


def _infer(body: ir.Graph, around: list[ir.Value], model: ir.Model) -> None:
    """Types of the values of one `body`, which may read those `around` it."""
    unknown = {
        value.name: value for node in body for value in node.outputs if value.type is None or value.shape is None
    }
    if not unknown:
        return
    known = [value for value in around if value.type is not None]
    small = [value for value in known if (array := constant(value)) is not None and array.size <= LONGEST]
    graph = ir.serde.serialize_graph(body)
    graph.input.extend(ir.serde.serialize_value(value) for value in known if value not in small)
    graph.initializer.extend(ir.serde.serialize_tensor(value.const_value) for value in small if value.const_value)
    opsets = [onnx.helper.make_opsetid(domain, version) for domain, version in model.graph.opset_imports.items()]
    proto = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=model.ir_version)
    try:
        shaped = inferred(proto).graph
    except onnx.shape_inference.InferenceError:  # of onnx itself: types stay unknown, as they were
        return
    for info in (*shaped.value_info, *shaped.output):
        if (value := unknown.get(info.name)) is not None:
            found = ir.serde.deserialize_value_info_proto(info, None)
            value.type, value.shape = value.type or found.type, value.shape or found.shape


def inline_branches(model: ir.Model) -> None:
    """Change `model`, bodies of its operators too: no If has a constant condition."""
    waiting = [model.graph]
    while waiting:
        graph = waiting.pop()
        while found := [node for node in graph if is_op(node, "If") and constant(node.inputs[0]) is not None]:
            for node in found:
                _inline(graph, node)
        waiting += [body for node in graph for body in subgraphs(node)]


def _inline(graph: ir.Graph, node: ir.Node) -> None:
    condition = constant(node.inputs[0])
    assert condition is not None
    branch = node.attributes["then_branch" if condition.all() else "else_branch"].as_graph()
    results = list(branch.outputs)
    branch.outputs.clear()
    for value in list(branch.initializers.values()):
        branch.initializers.pop(str(value.name))
        while value.name in graph.initializers:
            value.name = f"{value.name}_inlined"
        graph.register_initializer(value)
        value.meta[INLINED] = True
    for inner in list(branch):
        branch.remove(inner)
        graph.insert_before(node, inner)
    for out, result in zip(node.outputs, results, strict=True):
        producer = result.producer()
        if out.is_graph_output() and (producer is None or producer.graph is not graph or result.is_graph_output()):
            copy = ir.Node("", "Identity", [result])
            graph.insert_before(node, copy)
            copy.outputs[0].type, copy.outputs[0].shape = result.type, result.shape
            result = copy.outputs[0]
        if out.is_graph_output():
            name, out.name = out.name, None
            result.name = name
        result.type, result.shape = result.type or out.type, result.shape or out.shape
        ir.convenience.replace_all_uses_with(out, result, replace_graph_outputs=True)
    graph.remove(node, safe=True)
