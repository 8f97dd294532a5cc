"""A graph as text, one operator a line.

    main (x float32[1,4]) -> (y float32[1,4])
      h float32[1,4] = Add(x, 1.5)
      y float32[1,4] = Clip(h, 0, 6)

Constants of at most SHORT elements are written out, larger ones as %name with their type.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx_ir as ir

from celosia.compiler.graph.values import constant

SHORT = 6
"""Elements of the largest constant that is written out."""


def text(graph: ir.Graph, indent: str = "") -> str:
    """Return `graph` as text."""
    return "\n".join(_lines(graph, indent)) + "\n"


def _lines(graph: ir.Graph, indent: str) -> Iterator[str]:
    """Yield the lines of a graph: its signature, then its nodes."""
    inputs = ", ".join(_name_and_type(value) for value in graph.inputs)
    outputs = ", ".join(_name_and_type(value) for value in graph.outputs)
    yield f"{indent}{graph.name or 'main'} ({inputs}) -> ({outputs})"
    for node in graph:
        yield from _node(node, f"{indent}  ")


def _node(node: ir.Node, indent: str) -> Iterator[str]:
    """Yield the line of a node, then those of its subgraphs."""
    results = ", ".join(_name_and_type(value) for value in node.outputs)
    operands = ", ".join(_operand(value) for value in node.inputs)
    attrs, graphs = [], []
    for name, attr in node.attributes.items():
        if attr.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS):
            graphs += [attr.as_graph()] if attr.type == ir.AttributeType.GRAPH else list(attr.as_graphs())
        else:
            attrs.append(f"{name}={_value(attr.value)}")
    domain = f"{node.domain}." if node.domain not in ("", "ai.onnx") else ""
    tail = f" {' '.join(attrs)}" if attrs else ""
    yield f"{indent}{results} = {domain}{node.op_type}({operands}){tail}"
    for subgraph in graphs:
        yield from _lines(subgraph, f"{indent}  ")


def _name_and_type(value: ir.Value) -> str:
    """Return the name and the type of a value; "_" for a value without a name."""
    return f"{value.name or '_'} {_type(value)}".rstrip()


def _type(value: ir.Value) -> str:
    """Return element type and sizes of a value, "?" for an open size, "[...]" for no shape; "" without a type."""
    kind = value.type
    if kind is None:
        return ""
    if not isinstance(kind, ir.TensorType):
        return str(kind)
    name = _DTYPES.get(kind.dtype, kind.dtype.name.lower())
    if value.shape is None:
        return f"{name}[...]"
    return f"{name}[{','.join(str(size) if isinstance(size, int) else '?' for size in value.shape)}]"


_DTYPES = {ir.DataType.FLOAT: "float32", ir.DataType.DOUBLE: "float64"}
"""Names of element types that differ from ONNX's in lower case."""


def _operand(value: ir.Value | None) -> str:
    """Return an operand: "-" if it is left out, the elements of a small constant, else its name."""
    if value is None:
        return "-"
    array = constant(value)
    if array is None:
        return value.name or "_"
    if array.size > SHORT:
        return f"%{value.name} {_type(value)}"
    return _value(array.item()) if array.ndim == 0 else _value(array.tolist())


def _value(value: Any) -> str:
    """Return an attribute or a constant as text; long lists by their length alone."""
    match value:
        case float() | np.floating():
            return f"{value:g}"
        case bytes():
            return value.decode(errors="replace")
        case list() | tuple():
            items = [_value(item) for item in value]
            return f"[{', '.join(items)}]" if len(items) <= 4 * SHORT else f"[{len(items)} values]"
        case ir.TensorProtocol():
            return f"{value.dtype.name.lower()}{list(value.shape)}"
    return str(value)
