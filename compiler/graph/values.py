"""Small questions that every pass asks of a value or a node."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

ARRAY = "celosia.array"
"""In a small constant's notes: what `constant` has read of its bytes, as passes ask for scales again and again."""
KEPT = 64
"""Elements of such a one."""


def constant(value: ir.Value | None) -> NDArray[Any] | None:
    """The array of a constant value, or None."""
    if value is None or value.const_value is None:
        return None
    kept: NDArray[Any] | None = value.const_value.meta.get(ARRAY)
    if kept is not None:
        return kept
    array = np.asarray(value.const_value.numpy())
    if array.dtype.kind in "OS":  # strings, which ONNX holds as bytes
        texts = [text.decode() if isinstance(text, bytes) else text for text in array.reshape(-1)]
        array = np.array(texts, object).reshape(array.shape)
    elif array.size <= KEPT and isinstance(value.const_value, ir.TensorProtoTensor):
        array.flags.writeable = False
        value.const_value.meta[ARRAY] = array
    return array


def shape(value: ir.Value) -> tuple[int, ...] | None:
    """The static shape of `value`, or None; a negative size that a model declares says nothing."""
    if value.shape is None or not all(isinstance(size, int) and size >= 0 for size in value.shape):
        return None
    return tuple(int(size) for size in value.shape)  # type: ignore[arg-type]


def attribute(node: ir.Node, name: str, default: Any = None) -> Any:
    """Python value of an attribute, or `default`."""
    attr = node.attributes.get(name)
    if attr is None:
        return default
    return list(attr.value) if isinstance(attr.value, tuple) else attr.value


def attributes_of(node: ir.Node) -> dict[str, Any]:
    """Python values of all attributes that are given, graphs left out."""
    graphs = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
    return {name: attribute(node, name) for name, attr in node.attributes.items() if attr.type not in graphs}


def only_use(value: ir.Value) -> ir.Node | None:
    """The node that alone uses `value`, once; None otherwise, where it is a graph's output or used in a subgraph."""
    uses, producer = list(value.uses()), value.producer()
    if len(uses) != 1 or value.is_graph_output():
        return None
    return uses[0].node if producer is None or producer.graph is uses[0].node.graph else None


def replace_by(node: ir.Node, value: ir.Value) -> bool:
    """Put `value` in the place of the first output of `node`, and remove `node`; False where that cannot be.

    A returned output must keep its name, which an input, a constant or what is returned already cannot take.
    """
    out = node.outputs[0]
    if any(other.uses() or other.is_graph_output() for other in node.outputs[1:]) or node.graph is None:
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


def become(node: ir.Node, value: ir.Value) -> bool:
    """`replace_by` where what makes `value` computes what `node` did, after a change: it takes its name, too."""
    name = node.outputs[0].name
    if not replace_by(node, value):
        return False
    value.name = name
    return True


def captured(node: ir.Node) -> list[ir.Value]:
    """Values outside of the subgraphs of `node` that they read."""
    graphs = subgraphs(node)
    if not graphs:
        return []
    found: dict[ir.Value, None] = {}
    for graph in graphs:
        inner = list(graph.all_nodes())
        made = {value for each in inner for value in each.outputs}
        made |= {value for sub in graph.subgraphs() for value in (*sub.inputs, *sub.initializers.values())}
        made |= {*graph.inputs, *graph.initializers.values()}
        read = [value for each in inner for value in each.inputs]
        found |= dict.fromkeys(v for v in (*read, *graph.outputs) if v is not None and v not in made)
    return list(found)


def is_folded(value: ir.Value) -> bool:
    """Whether `value` is a constant, or made of constants by operators that onnxruntime computes before it looks for
    products of bytes: all but DequantizeLinear and those with bodies."""
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
    return all(each is None or is_folded(each) for each in node.inputs)


def operands(node: ir.Node) -> list[ir.Value]:
    """Inputs of `node`, and what its subgraphs read from around them."""
    return [value for value in (*node.inputs, *captured(node)) if value is not None]


def subgraphs(node: ir.Node) -> list[ir.Graph]:
    """Those that attributes of `node` hold."""
    one = [attr.as_graph() for attr in node.attributes.values() if attr.type == ir.AttributeType.GRAPH]
    many = [attr.as_graphs() for attr in node.attributes.values() if attr.type == ir.AttributeType.GRAPHS]
    return [*one, *(graph for graphs in many for graph in graphs)]


def is_op(node: ir.Node | None, *op_types: str) -> bool:
    """Whether `node` is one of the operators, of ONNX's own domain or onnxruntime's."""
    return node is not None and node.op_type in op_types and node.domain in ("", "ai.onnx", "com.microsoft", "celosia")


RESERVED = "celosia.names"
"""Key in the meta of a graph: names that the imported model gives its values, also those that passes have removed."""


def derived_name(graph: ir.Graph, wanted: str) -> str:
    """Return `wanted`, or a name made of it, for a new value: one that no value of the imported model has or had.

    The self-check knows tensors by name: a new value of such a name would be taken for the model's own.
    """
    reserved, name, number = graph.meta.get(RESERVED, ()), wanted, 0
    while name in reserved:
        number += 1
        name = f"{wanted}_{number}"
    return name


def new_constant(graph: ir.Graph, name: str, array: NDArray[Any], computed: bool = False) -> ir.Value:
    """Add a constant to `graph` with a name derived from `name`; one of that name and content is reused.

    computed: it is what the model's own tensor of this name is, which has been computed.
    """
    array = np.asarray(array, order="C")  # which, unlike ascontiguousarray, leaves scalars scalars
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
    """Python values as attributes of a node."""
    return list(ir.convenience.convert_attributes(values))


def dtype_name(value: ir.Value) -> str:
    """numpy's name of the element type; "object" for strings."""
    return "float32" if value.dtype in (None, ir.DataType.UNDEFINED) else value.dtype.numpy().name
