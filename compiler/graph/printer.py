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


def text(graph: ir.Graph, indent: str = "") -> str:
    """The lines of `graph`."""
    return "\n".join(_lines(graph, indent)) + "\n"


def _lines(graph: ir.Graph, indent: str) -> Iterator[str]:
    given = ", ".join(_typed(value) for value in graph.inputs)
    results = ", ".join(_typed(value) for value in graph.outputs)
    yield f"{indent}{graph.name or 'main'} ({given}) -> ({results})"
    for node in graph:
        yield from _node(node, f"{indent}  ")


def _node(node: ir.Node, indent: str) -> Iterator[str]:
    made = ", ".join(_typed(value) for value in node.outputs)
    read = ", ".join(_operand(value) for value in node.inputs)
    attrs, graphs = [], []
    for name, attr in node.attributes.items():
        if attr.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS):
            graphs += [attr.as_graph()] if attr.type == ir.AttributeType.GRAPH else list(attr.as_graphs())
        else:
            attrs.append(f"{name}={_value(attr.value)}")
    domain = f"{node.domain}." if node.domain not in ("", "ai.onnx") else ""
    tail = f" {' '.join(attrs)}" if attrs else ""
    yield f"{indent}{made} = {domain}{node.op_type}({read}){tail}"
    for inner in graphs:
        yield from _lines(inner, f"{indent}  ")


def _typed(value: ir.Value) -> str:
    return f"{value.name or '_'} {_type(value)}".rstrip()


def _type(value: ir.Value) -> str:
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


def _operand(value: ir.Value | None) -> str:
    if value is None:
        return "-"
    array = constant(value)
    if array is None:
        return value.name or "_"
    if array.size > SHORT:
        return f"%{value.name} {_type(value)}"
    return _value(array.item()) if array.ndim == 0 else _value(array.tolist())


def _value(value: Any) -> str:
    match value:
        case float() | np.floating():
            return f"{value:g}"
        case bytes():
            return value.decode(errors="replace")
        case list() | tuple():
            items = [_value(each) for each in value]
            return f"[{', '.join(items)}]" if len(items) <= 4 * SHORT else f"[{len(items)} values]"
        case ir.TensorProtocol():
            return f"{value.dtype.name.lower()}{list(value.shape)}"
    return str(value)
