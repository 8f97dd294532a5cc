"""Questions that every pass asks about a value or a node, and replacement of nodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

CACHED_ARRAY = "celosia.array"
"""Key in the meta of a small constant: the array that `constant` has read, as passes ask for scales repeatedly."""
MAX_CACHED_ELEMENTS = 64
"""Elements of the largest constant whose array is cached."""


def constant(value: ir.Value | None) -> NDArray[Any] | None:
    """Return the array of a constant value; None for a value that is no constant. Strings are objects."""
    if value is None or value.const_value is None:
        return None
    cached: NDArray[Any] | None = value.const_value.meta.get(CACHED_ARRAY)
    if cached is not None:
        return cached
    array = np.asarray(value.const_value.numpy())
    if array.dtype.kind in "OS":  # strings, which ONNX holds as bytes
        texts = [text.decode() if isinstance(text, bytes) else text for text in array.reshape(-1)]
        array = np.array(texts, object).reshape(array.shape)
    elif array.size <= MAX_CACHED_ELEMENTS and isinstance(value.const_value, ir.TensorProtoTensor):
        array.flags.writeable = False
        value.const_value.meta[CACHED_ARRAY] = array
    return array


def shape(value: ir.Value) -> tuple[int, ...] | None:
    """Return the static shape of `value`; None if a size is open. A negative declared size counts as open."""
    if value.shape is None or not all(isinstance(size, int) and size >= 0 for size in value.shape):
        return None
    return tuple(int(size) for size in value.shape)  # type: ignore[arg-type]


def attribute(node: ir.Node, name: str, default: Any = None) -> Any:
    """Return the Python value of an attribute, or `default` if the node has none."""
    attr = node.attributes.get(name)
    if attr is None:
        return default
    return list(attr.value) if isinstance(attr.value, tuple) else attr.value


def attributes_of(node: ir.Node) -> dict[str, Any]:
    """Return the Python values of all attributes of a node, for functions that know no onnx-ir (windows, kernels).

    Graphs are left out, as they have no plain value.
    """
    graphs = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
    return {name: attribute(node, name) for name, attr in node.attributes.items() if attr.type not in graphs}


def only_use(value: ir.Value) -> ir.Node | None:
    """Return the only node that uses `value`, once; None if it is a graph's output or used in a subgraph."""
    uses, producer = list(value.uses()), value.producer()
    if len(uses) != 1 or value.is_graph_output():
        return None
    return uses[0].node if producer is None or producer.graph is uses[0].node.graph else None


def replace_by(node: ir.Node, value: ir.Value) -> bool:
    """Replace the first output of `node` by `value` and remove `node`; return False where that is impossible.

    A graph output must keep its name. An input, a constant or another graph output cannot take that name.
    """
    out = node.outputs[0]
    if any(output.uses() or output.is_graph_output() for output in node.outputs[1:]) or node.graph is None:
        return False
    if out.is_graph_output():
        producer = value.producer()
        if producer is None or producer.graph is not node.graph or value.is_graph_output():
            return False
        name, out.name = out.name or value.name, None
        ir.convenience.replace_all_uses_with(out, value, replace_graph_outputs=True)
        value.name = name
    else:
        ir.convenience.replace_all_uses_with(out, value)
    if value.shape is None:
        value.shape = out.shape
    node.graph.remove(node, safe=True)
    return True


def replace_keeping_name(node: ir.Node, value: ir.Value) -> bool:
    """Replace `node` by its rewritten form, whose result is `value`; the result keeps the name of the node's output.

    Returns False where `replace_by` cannot.
    """
    name = node.outputs[0].name
    if not replace_by(node, value):
        return False
    value.name = name
    return True


def captured(node: ir.Node) -> list[ir.Value]:
    """Return the values that the subgraphs of `node` read from the graphs around them."""
    graphs = subgraphs(node)
    if not graphs:
        return []
    outer_values: dict[ir.Value, None] = {}
    for graph in graphs:
        inner_nodes = list(graph.all_nodes())
        inner_values = {value for inner_node in inner_nodes for value in inner_node.outputs}
        inner_values |= {
            value
            for inner_graph in graph.subgraphs()
            for value in (*inner_graph.inputs, *inner_graph.initializers.values())
        }
        inner_values |= {*graph.inputs, *graph.initializers.values()}
        inputs = [value for inner_node in inner_nodes for value in inner_node.inputs]
        outer_values |= dict.fromkeys(v for v in (*inputs, *graph.outputs) if v is not None and v not in inner_values)
    return list(outer_values)


def is_folded(value: ir.Value) -> bool:
    """Return whether onnxruntime computes `value` from constants before it looks for products of bytes.

    It folds all operators on constants except DequantizeLinear and operators with bodies.
    """
    if value.const_value is not None:
        return True
    node = value.producer()
    if (
        node is None
        or is_op(node, "DequantizeLinear")
        or subgraphs(node)
        or not (node.inputs or node.op_type == "Constant")
    ):
        return False
    return all(operand is None or is_folded(operand) for operand in node.inputs)


def operands(node: ir.Node) -> list[ir.Value]:
    """Return the inputs of `node`, and the outer values that its subgraphs read."""
    return [value for value in (*node.inputs, *captured(node)) if value is not None]


def subgraphs(node: ir.Node) -> list[ir.Graph]:
    """Return the graphs that attributes of `node` hold."""
    single = [attr.as_graph() for attr in node.attributes.values() if attr.type == ir.AttributeType.GRAPH]
    lists = [attr.as_graphs() for attr in node.attributes.values() if attr.type == ir.AttributeType.GRAPHS]
    return [*single, *(graph for graphs in lists for graph in graphs)]


def is_op(node: ir.Node | None, *op_types: str) -> bool:
    """Return whether `node` is one of these operators, in ONNX's domain, onnxruntime's or ours."""
    return node is not None and node.op_type in op_types and node.domain in ("", "ai.onnx", "com.microsoft", "celosia")


RESERVED = "celosia.names"
"""Key in the meta of a graph: names of the imported model's values, also of those that passes have removed."""


def derived_name(graph: ir.Graph, wanted: str) -> str:
    """Return `wanted`, or a name derived from it that no value of the imported model has or had.

    The self-check compares tensors by name: it would take a new value of such a name for the model's own.
    """
    reserved, name, number = graph.meta.get(RESERVED, ()), wanted, 0
    while name in reserved:
        number += 1
        name = f"{wanted}_{number}"
    return name


def new_constant(graph: ir.Graph, name: str, array: NDArray[Any], computed: bool = False) -> ir.Value:
    """Add a constant to `graph` under `name` or one derived from it; reuse one of that name and content.

    computed: `array` is the value of the model's own tensor `name`, which may keep its name.
    """
    array = np.asarray(array, order="C")  # ascontiguousarray would turn scalars into vectors
    reserved = () if computed else graph.meta.get(RESERVED, ())
    unique, number = name, 0
    while unique in graph.initializers or unique in reserved:
        known = constant(graph.initializers.get(unique))
        if known is not None and known.dtype == array.dtype and np.array_equal(known, array):
            return graph.initializers[unique]
        number += 1
        unique = f"{name}_{number}"
    value = ir.Value(
        name=unique, shape=ir.Shape(array.shape), type=ir.TensorType(ir.DataType.from_numpy(array.dtype)),
        const_value=ir.tensor(array, name=unique),
    )  # fmt: skip
    graph.register_initializer(value)
    return value


def attributes(**values: Any) -> list[ir.Attr]:
    """Return Python values as attributes of a node."""
    return list(ir.convenience.convert_attributes(values))


def dtype_name(value: ir.Value) -> str:
    """Return numpy's name of the element type; "object" for strings, "float32" if it is unknown."""
    return "float32" if value.dtype in (None, ir.DataType.UNDEFINED) else value.dtype.numpy().name
