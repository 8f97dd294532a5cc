"""Values and nodes of a graph: what every pass asks about them, how it replaces them, and how they are named.

1. Constants, static shapes and attributes of a value or a node.
2. Uses, subgraphs, and replacement of a node by a value.
3. New constants and attributes.
4. Names, for messages, reports and the Program's file. ONNX lets nodes be nameless or share a name, and a model's
   values may be called what a pass would call its own. The compiler itself identifies nodes and values by object.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from celosia.compiler.expr.nodes import unused_name
from celosia.compiler.program.host.op import DOMAINS

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


def dtype_name(value: ir.Value) -> str:
    """Return numpy's name of the element type; "object" for strings, "float32" if it is unknown."""
    return "float32" if value.dtype in (None, ir.DataType.UNDEFINED) else value.dtype.numpy().name


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


def is_op(node: ir.Node | None, *op_types: str) -> bool:
    """Return whether `node` is one of these operators, in ONNX's domain, onnxruntime's or ours."""
    return node is not None and node.op_type in op_types and node.domain in DOMAINS


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


def values_of(graph: ir.Graph) -> Iterator[ir.Value]:
    """Yield inputs, constants and results of nodes; results without a name that nothing uses are left out.

    Values of the graph come first, then those of its subgraphs.
    """
    for any_graph in (graph, *graph.subgraphs()):
        yield from (*any_graph.inputs, *any_graph.initializers.values())
        for node in any_graph:
            yield from (out for out in node.outputs if out.name or out.uses() or out.is_graph_output())


def operands(node: ir.Node) -> list[ir.Value]:
    """Return the inputs of `node`, and the outer values that its subgraphs read."""
    return [value for value in (*node.inputs, *captured(node)) if value is not None]


def subgraphs(node: ir.Node) -> list[ir.Graph]:
    """Return the graphs that attributes of `node` hold."""
    single = [attr.as_graph() for attr in node.attributes.values() if attr.type == ir.AttributeType.GRAPH]
    lists = [attr.as_graphs() for attr in node.attributes.values() if attr.type == ir.AttributeType.GRAPHS]
    return [*single, *(graph for graphs in lists for graph in graphs)]


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


def name_nodes(graph: ir.Graph) -> None:
    """Give every node, those of subgraphs included, a unique name.

    A name that no other node has stays; others become operator and first output, as in `Conv:features.3`.
    """
    nodes = list(graph.all_nodes())
    count: dict[str | None, int] = {}
    for node in nodes:
        count[node.name] = count.get(node.name, 0) + 1
    used_names = {name for name, times in count.items() if name and times == 1}
    for node in nodes:
        if node.name not in used_names:
            output = next((out.name for out in node.outputs if out.name), "")
            node.name = unused_name(f"{node.op_type}:{output}", used_names)


def name_values(graph: ir.Graph) -> None:
    """Give values without a name, or with that of another value, a unique one; inputs and outputs keep theirs.

    Values of subgraphs count, too: their names may hide an outer value that a pass makes the subgraph read.
    """
    border = {*graph.inputs, *graph.outputs}
    inner_values = [value for value in values_of(graph) if value not in border]
    seen_names = {value.name for value in border}
    used_names = {
        name for name in (*seen_names, *(value.name for value in inner_values), *graph.meta.get(RESERVED, ())) if name
    }
    for value in inner_values:
        if not value.name or value.name in seen_names:
            value.name = unused_name(value.name or "value", used_names)
        seen_names.add(value.name)


def value_names(graph: ir.Graph) -> set[str]:
    """Return the names of all values, those of subgraphs included."""
    return {value.name for value in values_of(graph) if value.name}


RESERVED = "celosia.names"
"""Key in the meta of a graph: names of the imported model's values, also of those that passes have removed."""


def reserve_names(graph: ir.Graph) -> None:
    """Reserve the names of all values: `derived_name` gives them to no new value, even after their removal."""
    reserved = frozenset(value_names(graph))
    for any_graph in (graph, *graph.subgraphs()):
        any_graph.meta[RESERVED] = reserved


def derived_name(graph: ir.Graph, wanted: str) -> str:
    """Return `wanted`, or a name derived from it that no value of the imported model has or had.

    The self-check compares tensors by name: it would take a new value of such a name for the model's own.
    """
    reserved, name, number = graph.meta.get(RESERVED, ()), wanted, 0
    while name in reserved:
        number += 1
        name = f"{wanted}_{number}"
    return name
