"""Inline what stands for other operators.

1. `inline_functions`: functions of the model's own, and those by which ONNX defines operators that this compiler has no
   code for.
2. `expand_gradients`: the operator Gradient, by reverse-mode differentiation of the nodes before it:

       c = Add(a, b); da, db = Gradient<xs=[a, b], y=c>(a, b)   ->   c = Add(a, b); one = ...; da = Identity(one); ...

3. `inline_branches`: an If whose condition is a constant, as onnxruntime does before all other rewritings:

       y = If(True, then_branch=[t = Exp(x)], else_branch=...)     ->     y = Exp(x)

The walks over nodes and the graphs inside them, at the end, serve the other files of the import, too.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterator

import onnx
import onnx.inliner
import onnx_ir as ir
from onnx import NodeProto, helper

from celosia.compiler.graph.importing.body_types import declared_shape
from celosia.compiler.graph.importing.shape_inference import infer_with_onnx
from celosia.compiler.graph.values import constant, is_op, subgraphs
from celosia.compiler.ops import OPS
from celosia.compiler.program.host.hostops import HOST
from celosia.compiler.program.host.op import DOMAINS

OWN_CODE = {*((domain, op) for domain in DOMAINS for op in OPS), *HOST, *(("ai.onnx", op) for _, op in HOST)}
"""(domain, operator) of the operators that this compiler has code for, and that need no function."""
FUNCTION_DOMAIN = "celosia.function"
"""Domain of the functions that stand for ONNX's operators until they are inlined."""
MAX_EXPANSIONS = 16
"""Levels of ONNX's operators that are defined by others; deeper ones stay as they are (validation.py limits graphs)."""


def inline_functions(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return `proto` without calls of functions. Raises onnx's errors for functions that are no valid ONNX."""
    if proto.functions:
        proto = onnx.inliner.inline_local_functions(_with_own_opsets(proto))
    proto = _with_qualified_names(proto)
    for _ in range(MAX_EXPANSIONS):
        if not any(_function_schema(proto, node) for node in nodes(proto.graph)):
            break
        proto = onnx.inliner.inline_local_functions(_define_by_functions(proto))
    return proto


def _with_qualified_names(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Rename onnxruntime's operators that share a name with one of ONNX to "domain.name", their key in OPS."""
    result = onnx.ModelProto()
    result.CopyFrom(proto)
    for node in nodes(result.graph):
        if (name := f"{node.domain}.{node.op_type}") in OPS:
            node.op_type = name
    return result


def _with_own_opsets(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return `proto` with the opsets of its functions set to those of the model.

    onnx inlines only functions whose opsets are the model's, and then checks their operators in these.
    """
    result = onnx.ModelProto()
    result.CopyFrom(proto)
    versions = {opset.domain: opset.version for opset in proto.opset_import}
    for function in result.functions:
        for opset in function.opset_import:
            opset.version = versions.get(opset.domain, opset.version)
    return result


def _function_schema(proto: onnx.ModelProto, node: onnx.NodeProto) -> onnx.defs.OpSchema | None:
    """Return the schema of an operator that ONNX defines by a function and OWN_CODE lacks; None for others."""
    if (node.domain, node.op_type) in OWN_CODE:
        return None
    try:
        schema = onnx.defs.get_schema(node.op_type, opset_of(proto, node.domain), node.domain)
    except onnx.defs.SchemaError:
        return None
    return schema if schema.has_function or schema.has_context_dependent_function else None


def _define_by_functions(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return `proto` with each operator that has a `_function_schema` as a call of a function with ONNX's
    definition."""
    result = onnx.ModelProto()
    result.CopyFrom(infer_with_onnx(proto))
    for node, types in list(nodes_with_types(result.graph, ChainMap())):
        schema = _function_schema(result, node)
        if schema is None:
            continue
        present = {attr.name for attr in node.attribute}
        defaults = {name: attr.default_value for name, attr in schema.attributes.items()}
        node.attribute.extend(value for name, value in defaults.items() if value.name and name not in present)
        function = onnx.FunctionProto.FromString(
            _function_definition(schema, opset_of(result, node.domain), node, types)
        )
        function.domain, function.name = FUNCTION_DOMAIN, f"{node.op_type}_{len(result.functions)}"
        other_opsets = [opset for opset in function.opset_import if opset.domain not in ("", "ai.onnx")]
        del function.opset_import[:]
        function.opset_import.extend([onnx.helper.make_opsetid("", opset_of(result, "")), *other_opsets])
        result.functions.append(function)
        node.domain, node.op_type = FUNCTION_DOMAIN, function.name
    if all(opset.domain != FUNCTION_DOMAIN for opset in result.opset_import):
        result.opset_import.append(onnx.helper.make_opsetid(FUNCTION_DOMAIN, 1))
    return result


def _function_definition(schema: onnx.defs.OpSchema, version: int, node: onnx.NodeProto, types: Types) -> bytes:
    """Return the serialised newest function that defines the operator in `version` of ONNX or earlier.

    A definition may depend on the node's attributes and the `types` of its inputs ("context dependent").
    """
    if schema.has_context_dependent_function:
        version = max(v for v in schema.context_dependent_function_opset_versions if v <= version)
        inputs = [types.get(name, onnx.TypeProto()).SerializeToString() for name in node.input]
        dependent: bytes = schema.get_context_dependent_function_with_opset_version(
            version, node.SerializeToString(), inputs
        )
        return dependent
    version = max(v for v in schema.function_opset_versions if v <= version)
    definition: bytes = schema.get_function_with_opset_version(version)
    return definition


GRADIENT_DOMAIN = "ai.onnx.preview.training"
"""Domain of the operator Gradient."""
Rule = Callable[["_Tape", NodeProto, str], list[str | None]]
"""(tape, node, gradient of its output) -> gradients of its inputs."""


class NoGradient(ValueError):
    """A Gradient that cannot be written as nodes; the message names the operator without a derivative."""


class _Tape:
    """The nodes that compute gradients, in order; the names of their outputs begin with `prefix`."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.nodes: list[NodeProto] = []

    def add(self, op: str, *inputs: str) -> str:
        """Append a node and return the name of its output."""
        name = f"{self.prefix}.{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [name], name=name))
        return name


RULES: dict[str, Rule] = {
    "Identity": lambda t, n, g: [g],
    "Add": lambda t, n, g: [g, g],
    "Sub": lambda t, n, g: [g, t.add("Neg", g)],
    "Mul": lambda t, n, g: [t.add("Mul", g, n.input[1]), t.add("Mul", g, n.input[0])],
    "Div": lambda t, n, g: [
        t.add("Div", g, n.input[1]), t.add("Neg", t.add("Div", t.add("Mul", g, n.output[0]), n.input[1]))
    ],
    "Neg": lambda t, n, g: [t.add("Neg", g)],
    "Exp": lambda t, n, g: [t.add("Mul", g, n.output[0])],
    "Log": lambda t, n, g: [t.add("Div", g, n.input[0])],
    "Sqrt": lambda t, n, g: [t.add("Div", g, t.add("Add", n.output[0], n.output[0]))],
    "Relu": lambda t, n, g: [t.add("Mul", g, t.add("Sign", n.output[0]))],
    "Sin": lambda t, n, g: [t.add("Mul", g, t.add("Cos", n.input[0]))],
    "Cos": lambda t, n, g: [t.add("Neg", t.add("Mul", g, t.add("Sin", n.input[0])))],
    "Tanh": lambda t, n, g: [t.add("Sub", g, t.add("Mul", g, t.add("Mul", n.output[0], n.output[0])))],
    "Sigmoid": lambda t, n, g: [
        t.add("Mul", g, t.add("Sub", n.output[0], t.add("Mul", n.output[0], n.output[0])))
    ],
}  # fmt: skip
"""Operator -> the rule of its derivative."""


def expand_gradients(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return `proto` without Gradient. Raises NoGradient.

    Operands of differentiated operators must have the same shape: the rules do not sum over broadcast axes.
    """
    if not any(node.op_type == "Gradient" and node.domain == GRADIENT_DOMAIN for node in proto.graph.node):
        return proto
    result = onnx.ModelProto()
    result.CopyFrom(proto)
    expanded: list[NodeProto] = []
    names = {name for node in proto.graph.node for name in (*node.input, *node.output)}
    for number, node in enumerate(proto.graph.node):
        is_gradient = node.op_type == "Gradient" and node.domain == GRADIENT_DOMAIN
        expanded += (
            _differentiate(expanded, node, _unused_prefix(f"{node.name or 'gradient'}.{number}", names))
            if is_gradient
            else [node]
        )
    del result.graph.node[:]
    result.graph.node.extend(expanded)
    return result


def _unused_prefix(prefix: str, names: set[str]) -> str:
    """Return `prefix`, lengthened by "_" until no name in `names` begins with it."""
    while any(name.startswith(prefix) for name in names):
        prefix += "_"
    return prefix


def _differentiate(before: list[NodeProto], node: NodeProto, prefix: str) -> list[NodeProto]:
    """Return the nodes that compute a Gradient `node` from the nodes `before` it.

    Gradients flow from y backwards through each node that depends on one of xs; several paths to one value are added
    up.
    """
    attributes = {attr.name: helper.get_attribute_value(attr) for attr in node.attribute}
    xs, y = [name.decode() for name in attributes["xs"]], attributes["y"].decode()
    tape = _Tape(prefix)
    dependent = set(xs)
    for earlier in before:
        if dependent & set(earlier.input):
            dependent |= set(earlier.output)
    zero = tape.add("Sub", y, y)
    gradients: dict[str, str] = {y: tape.add("Exp", zero)}
    values = dict(zip(xs, node.input))
    for earlier in reversed(before):
        g = next((gradients[name] for name in earlier.output if name in gradients), None)
        if g is None or not dependent & set(earlier.input):
            continue
        if earlier.op_type not in RULES or earlier.domain not in ("", "ai.onnx"):
            raise NoGradient(f"Gradient ({node.name}): there is no derivative of {earlier.op_type} ({earlier.name})")
        for name, contribution in zip(earlier.input, RULES[earlier.op_type](tape, earlier, g)):
            if name in dependent and contribution is not None:
                gradients[name] = tape.add("Add", gradients[name], contribution) if name in gradients else contribution
    for x, out in zip(xs, node.output):
        if out:
            source = gradients.get(x) or tape.add("Sub", values.get(x, x), values.get(x, x))
            tape.nodes.append(helper.make_node("Identity", [source], [out], name=f"{prefix}.{out}"))
    return tape.nodes


INLINED = "constant of a branch that is inlined"
"""Key in `meta` of a value: it was a constant of a branch that has been inlined."""


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
        for value in branch_node.outputs:
            value.shape = declared_shape(value)
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


Types = ChainMap[str, onnx.TypeProto]
"""Names of values -> their types; an inner map (first) hides names of the graphs around it."""


def nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Yield all nodes, those of subgraphs too."""
    for node in graph.node:
        yield node
        for subgraph in inner_graphs(node):
            yield from nodes(subgraph)


def inner_graphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Yield the graphs that the attributes of `node` hold."""
    for attr in node.attribute:
        if attr.HasField("g"):
            yield attr.g
        yield from attr.graphs


def opset_of(proto: onnx.ModelProto, domain: str) -> int:
    """Return the version of `domain` that a model imports; 1 where it imports none."""
    names = ("", "ai.onnx") if domain in ("", "ai.onnx") else (domain,)
    return next((int(opset.version) for opset in proto.opset_import if opset.domain in names), 1)


def nodes_with_types(graph: onnx.GraphProto, outside: Types) -> Iterator[tuple[onnx.NodeProto, Types]]:
    """Yield all nodes, those of subgraphs too, each with the types of the values that it can read.

    One name may be two values, in two subgraphs.
    """
    types = outside.new_child(dict(_value_types(graph)))
    for node in graph.node:
        yield node, types
        for subgraph in inner_graphs(node):
            yield from nodes_with_types(subgraph, types)


def _value_types(graph: onnx.GraphProto) -> Iterator[tuple[str, onnx.TypeProto]]:
    """Yield the name and the type of each value that `graph` declares or holds as a constant."""
    for value in (*graph.input, *graph.value_info, *graph.output):
        yield value.name, value.type
    for tensor in graph.initializer:
        yield tensor.name, onnx.helper.make_tensor_type_proto(tensor.data_type, tensor.dims)
