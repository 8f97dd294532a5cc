"""Infer the types of values in bodies of operators, and inline the branch of an If whose condition is a constant.

    y = If(True, then_branch=[t = Exp(x)], else_branch=...)     ->     y = Exp(x)

onnxruntime inlines such a branch before all other rewritings. onnx infers only the types of a body's results.
"""

from __future__ import annotations

import onnx
import onnx_ir as ir

from celosia.compiler.graph.importing.range_lengths import MAX_LIST_ELEMENTS
from celosia.compiler.graph.importing.shape_inference import infer_with_onnx
from celosia.compiler.graph.values import captured, constant, is_op, subgraphs

INLINED = "constant of a branch that is inlined"
"""Key in `meta` of a value: it was a constant of a branch that has been inlined."""


def infer_bodies(model: ir.Model) -> None:
    """Infer types and shapes of all values in the bodies of operators from the values that the bodies read."""
    waiting = [node for node in model.graph if subgraphs(node)]
    while waiting:
        node = waiting.pop()
        for body in subgraphs(node):
            _infer_body(body, captured(node), model)
            waiting += [inner_node for inner_node in body if subgraphs(inner_node)]


def _infer_body(body: ir.Graph, outer: list[ir.Value], model: ir.Model) -> None:
    """Set the missing types and shapes of values in one `body`, which may read the values `outer`.

    onnx infers them on a model made of the body, whose inputs are the outer values. Small outer constants go in as
    constants, since shapes may depend on them.
    """
    unknown = {
        value.name: value for node in body for value in node.outputs if value.type is None or value.shape is None
    }
    if not unknown:
        return
    known = [value for value in outer if value.type is not None]
    small = [value for value in known if (array := constant(value)) is not None and array.size <= MAX_LIST_ELEMENTS]
    graph = ir.serde.serialize_graph(body)
    graph.input.extend(ir.serde.serialize_value(value) for value in known if value not in small)
    graph.initializer.extend(ir.serde.serialize_tensor(value.const_value) for value in small if value.const_value)
    opsets = [onnx.helper.make_opsetid(domain, version) for domain, version in model.graph.opset_imports.items()]
    proto = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=model.ir_version)
    try:
        shaped = infer_with_onnx(proto).graph
    except onnx.shape_inference.InferenceError:  # onnx cannot infer this body; its types stay unknown
        return
    for info in (*shaped.value_info, *shaped.output):
        if (value := unknown.get(info.name)) is not None:
            inferred = ir.serde.deserialize_value_info_proto(info, None)
            value.type, value.shape = value.type or inferred.type, value.shape or inferred.shape


def inline_branches(model: ir.Model) -> None:
    """Inline the chosen branch of each If with a constant condition, also inside bodies of other operators."""
    waiting = [model.graph]
    while waiting:
        graph = waiting.pop()
        while decided := [node for node in graph if is_op(node, "If") and constant(node.inputs[0]) is not None]:
            for node in decided:
                _inline_branch(graph, node)
        waiting += [body for node in graph for body in subgraphs(node)]


def _inline_branch(graph: ir.Graph, node: ir.Node) -> None:
    """Replace an If with a constant condition by the operators of the chosen branch.

    A result of the branch that cannot take over the name of a graph output is copied by an Identity.
    """
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
    for branch_node in list(branch):
        branch.remove(branch_node)
        graph.insert_before(node, branch_node)
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
