"""Functions in place of the operators that they define: a model's own, and ONNX's for operators we have no code for."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator

import onnx
import onnx.inliner

from celosia.compiler.graph.importing.shape_inference import inferred
from celosia.compiler.ops import OPS
from celosia.compiler.program.host.hostops import HOST
from celosia.compiler.program.host.op import DOMAINS

OWN_CODE = {*((domain, op) for domain in DOMAINS for op in OPS), *HOST, *(("ai.onnx", op) for _, op in HOST)}
"""(domain, operator) of what needs no function."""
Types = ChainMap[str, onnx.TypeProto]
DOMAIN = "celosia.function"
MAX_DEPTH = 16
"""Functions inside functions."""


def inline_functions(proto: onnx.ModelProto) -> onnx.ModelProto:
    """`proto` without calls of functions. Raises onnx's errors for functions that are no ONNX."""
    if proto.functions:
        proto = onnx.inliner.inline_local_functions(_of_one_version(proto))
    proto = _by_domain(proto)
    for _ in range(MAX_DEPTH):
        if not any(_schema(proto, node) for node in nodes(proto.graph)):
            break
        proto = onnx.inliner.inline_local_functions(_with_calls(proto))
    return proto


def _by_domain(proto: onnx.ModelProto) -> onnx.ModelProto:
    """`proto` with onnxruntime's operators that share a name with one of ONNX named as OPS has them."""
    result = onnx.ModelProto()
    result.CopyFrom(proto)
    for node in nodes(result.graph):
        if (name := f"{node.domain}.{node.op_type}") in OPS:
            node.op_type = name
    return result


def _of_one_version(proto: onnx.ModelProto) -> onnx.ModelProto:
    """`proto` with functions in its own versions of the domains, whose operators are the same (onnx checks it)."""
    result = onnx.ModelProto()
    result.CopyFrom(proto)
    versions = {each.domain: each.version for each in proto.opset_import}
    for function in result.functions:
        for each in function.opset_import:
            each.version = versions.get(each.domain, each.version)
    return result


def nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """All nodes, those of subgraphs too."""
    for node in graph.node:
        yield node
        for inner in subgraphs(node):
            yield from nodes(inner)


def subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The graphs of its attributes."""
    for attr in node.attribute:
        if attr.HasField("g"):
            yield attr.g
        yield from attr.graphs


def opset_of(proto: onnx.ModelProto, domain: str) -> int:
    """The version of `domain` that a model imports."""
    names = ("", "ai.onnx") if domain in ("", "ai.onnx") else (domain,)
    return next((int(each.version) for each in proto.opset_import if each.domain in names), 1)


def _schema(proto: onnx.ModelProto, node: onnx.NodeProto) -> onnx.defs.OpSchema | None:
    """The operator, where it is a function and we have no code for it."""
    if (node.domain, node.op_type) in OWN_CODE:
        return None
    try:
        schema = onnx.defs.get_schema(node.op_type, opset_of(proto, node.domain), node.domain)
    except onnx.defs.SchemaError:
        return None
    return schema if schema.has_function or schema.has_context_dependent_function else None


def _with_calls(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Operators that ONNX defines by functions as calls of functions of the model."""
    result = onnx.ModelProto()
    result.CopyFrom(inferred(proto))
    for node, types in list(typed(result.graph, ChainMap())):
        schema = _schema(result, node)
        if schema is None:
            continue
        given = {attr.name for attr in node.attribute}
        defaults = {name: attr.default_value for name, attr in schema.attributes.items()}
        node.attribute.extend(value for name, value in defaults.items() if value.name and name not in given)
        function = onnx.FunctionProto.FromString(_body(schema, opset_of(result, node.domain), node, types))
        function.domain, function.name = DOMAIN, f"{node.op_type}_{len(result.functions)}"
        kept = [each for each in function.opset_import if each.domain not in ("", "ai.onnx")]
        del function.opset_import[:]
        function.opset_import.extend([onnx.helper.make_opsetid("", opset_of(result, "")), *kept])
        result.functions.append(function)
        node.domain, node.op_type = DOMAIN, function.name
    if all(each.domain != DOMAIN for each in result.opset_import):
        result.opset_import.append(onnx.helper.make_opsetid(DOMAIN, 1))
    return result


def _body(schema: onnx.defs.OpSchema, version: int, node: onnx.NodeProto, types: Types) -> bytes:
    """The newest function that defines the operator in `version` of ONNX."""
    if schema.has_context_dependent_function:
        version = max(v for v in schema.context_dependent_function_opset_versions if v <= version)
        inputs = [types.get(name, onnx.TypeProto()).SerializeToString() for name in node.input]
        made: bytes = schema.get_context_dependent_function_with_opset_version(
            version, node.SerializeToString(), inputs
        )
        return made
    version = max(v for v in schema.function_opset_versions if v <= version)
    body: bytes = schema.get_function_with_opset_version(version)
    return body


def typed(graph: onnx.GraphProto, outside: Types) -> Iterator[tuple[onnx.NodeProto, Types]]:
    """All nodes, those of subgraphs too, and the types of what each can read. One name may be two values."""
    types = outside.new_child(dict(_types(graph)))
    for node in graph.node:
        yield node, types
        for inner in subgraphs(node):
            yield from typed(inner, types)


def _types(graph: onnx.GraphProto) -> Iterator[tuple[str, onnx.TypeProto]]:
    for value in (*graph.input, *graph.value_info, *graph.output):
        yield value.name, value.type
    for tensor in graph.initializer:
        yield tensor.name, onnx.helper.make_tensor_type_proto(tensor.data_type, tensor.dims)
