"""Inline functions: a model's own, and those by which ONNX defines operators that this compiler has no code for."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator

import onnx
import onnx.inliner

from celosia.compiler.graph.importing.shape_inference import infer_with_onnx
from celosia.compiler.ops import OPS
from celosia.compiler.program.host.hostops import HOST
from celosia.compiler.program.host.op import DOMAINS

OWN_CODE = {*((domain, op) for domain in DOMAINS for op in OPS), *HOST, *(("ai.onnx", op) for _, op in HOST)}
"""(domain, operator) of the operators that this compiler has code for, and that need no function."""
Types = ChainMap[str, onnx.TypeProto]
"""Names of values -> their types; an inner map (first) hides names of the graphs around it."""
DOMAIN = "celosia.function"
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


def nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Yield all nodes, those of subgraphs too."""
    for node in graph.node:
        yield node
        for subgraph in subgraphs(node):
            yield from nodes(subgraph)


def subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Yield the graphs that the attributes of `node` hold."""
    for attr in node.attribute:
        if attr.HasField("g"):
            yield attr.g
        yield from attr.graphs


def opset_of(proto: onnx.ModelProto, domain: str) -> int:
    """Return the version of `domain` that a model imports; 1 where it imports none."""
    names = ("", "ai.onnx") if domain in ("", "ai.onnx") else (domain,)
    return next((int(opset.version) for opset in proto.opset_import if opset.domain in names), 1)


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
        function.domain, function.name = DOMAIN, f"{node.op_type}_{len(result.functions)}"
        other_opsets = [opset for opset in function.opset_import if opset.domain not in ("", "ai.onnx")]
        del function.opset_import[:]
        function.opset_import.extend([onnx.helper.make_opsetid("", opset_of(result, "")), *other_opsets])
        result.functions.append(function)
        node.domain, node.op_type = DOMAIN, function.name
    if all(opset.domain != DOMAIN for opset in result.opset_import):
        result.opset_import.append(onnx.helper.make_opsetid(DOMAIN, 1))
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


def nodes_with_types(graph: onnx.GraphProto, outside: Types) -> Iterator[tuple[onnx.NodeProto, Types]]:
    """Yield all nodes, those of subgraphs too, each with the types of the values that it can read.

    One name may be two values, in two subgraphs.
    """
    types = outside.new_child(dict(_value_types(graph)))
    for node in graph.node:
        yield node, types
        for subgraph in subgraphs(node):
            yield from nodes_with_types(subgraph, types)


def _value_types(graph: onnx.GraphProto) -> Iterator[tuple[str, onnx.TypeProto]]:
    """Yield the name and the type of each value that `graph` declares or holds as a constant."""
    for value in (*graph.input, *graph.value_info, *graph.output):
        yield value.name, value.type
    for tensor in graph.initializer:
        yield tensor.name, onnx.helper.make_tensor_type_proto(tensor.data_type, tensor.dims)
