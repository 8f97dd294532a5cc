"""Constant folding: compute operators on constants, and shapes that depend on them, when the model is compiled.

    y = Concat(Shape(x)[:1], [-1]); z = Reshape(x, y)   ->   z = Reshape(x, [1, -1])

The results come from the same kernels and numpy functions that run the operators of a Program.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from math import prod

import numpy as np
import onnx_ir as ir

from celosia.compiler.cpu.parse import parse
from celosia.compiler.graph.errors import ModelError
from celosia.compiler.graph.external_data import is_mapped
from celosia.compiler.graph.qdq import MADE_OF, dequantisation_of
from celosia.compiler.graph.shapes import UNKNOWN, infer, require_agreement
from celosia.compiler.graph.values import constant, new_constant, shape, subgraphs
from celosia.compiler.ops import OPS
from celosia.compiler.program.host.execute import execute
from celosia.compiler.program.host.hostops import HOST, RANDOM
from celosia.compiler.program.host.op import DOMAINS, HostError

DEQUANTISED = frozenset(("DequantizeLinear",))
"""Operators that stay at first, since QDQ patterns begin with them."""
MAX_BYTES = 1 << 26
"""Bytes of the largest result that is folded; larger ones are computed when the Program runs."""
UNREAD = {"Shape": 0, "Size": 0, "CastLike": 1}
"""Operator -> number of the input of which it reads only the shape or the type, and no element."""


def fold(
    model: ir.Model, keep: frozenset[str] = DEQUANTISED, nodes: Collection[ir.Node] | None = None
) -> None:  # fmt: skip
    """Infer open shapes, and replace operators on constants by their results, except operators in `keep`.

    nodes: the nodes to look at; None stands for all.
    """
    graph = model.graph
    opsets = {domain: version for domain, version in graph.opset_imports.items()}
    for node in [node for node in graph if nodes is None or node in nodes]:
        infer(node, opsets.get("", 21))
        if node.op_type not in keep and _is_foldable(node):
            _replace_by_result(graph, node, opsets)


def fold_producers(model: ir.Model, values: Iterable[ir.Value | None]) -> None:
    """Fold the operators that compute `values`, directly or through others, except DequantizeLinear."""
    waiting, producers = list(values), set[ir.Node]()
    while waiting:
        value = waiting.pop()
        node = value.producer() if value is not None else None
        if node is not None and node not in producers and node.op_type not in DEQUANTISED:
            producers.add(node)
            waiting += node.inputs
    fold(model, nodes=producers)


def fold_imported(model: ir.Model) -> None:
    """Fold, then check that declared shapes agree with those that operators compute now. Raises ModelError."""
    fold(model)
    require_agreement(model)


def _is_foldable(node: ir.Node) -> bool:
    """Return whether `node` can be folded.

    It must read constants alone, be deterministic, have code, and give small results of known type.
    """
    unread = UNREAD.get(node.op_type, -1)
    if any(v is not None and constant(v) is None for number, v in enumerate(node.inputs) if number != unread):
        return False
    if any(is_mapped(v) for number, v in enumerate(node.inputs) if number != unread):
        return False
    if unread >= 0 and not _is_known(node.inputs[unread], of_type=node.op_type == "CastLike"):
        return False
    if node.op_type in RANDOM or subgraphs(node):
        return False
    if node.domain not in DOMAINS or (node.op_type not in OPS and ("", node.op_type) not in HOST):
        return False
    if any(value.is_graph_output() for value in node.outputs):
        return False
    for value in node.outputs:
        dims = shape(value)
        if not isinstance(value.type, ir.TensorType) or dims is None or value.dtype in (*UNKNOWN, ir.DataType.STRING):
            return False
        if prod(dims) * np.dtype(value.dtype.numpy()).itemsize > MAX_BYTES:
            return False
    return True


def _is_known(value: ir.Value | None, of_type: bool) -> bool:
    """Return whether the shape of `value` is known; with `of_type`, whether its element type is."""
    if value is None or not of_type:
        return value is not None and shape(value) is not None
    return value.dtype not in (None, *UNKNOWN, ir.DataType.STRING)


def _replace_by_result(graph: ir.Graph, node: ir.Node, opsets: dict[str, int]) -> None:
    """Compute `node` and replace its outputs by constants. Raises ModelError where it cannot be computed."""
    values = {}
    for value in node.inputs:
        if value is not None and value.name:
            array = constant(value)
            if array is None:  # an input in UNREAD: any elements of its shape and type will do
                dtype = np.int8 if value.dtype in (None, *UNKNOWN, ir.DataType.STRING) else value.dtype.numpy()
                array = np.broadcast_to(np.zeros((), dtype), shape(value) or ())
            values[value.name] = array
    op = parse(ir.serde.serialize_node(node), opsets)
    try:
        results = execute(op, values, once=True)
    except HostError as error:
        raise ModelError(str(error)) from None
    for output, result in zip(node.outputs, results):
        label, output.name = output.name, None
        if output.uses():
            new_value = new_constant(graph, label or "constant", np.asarray(result), computed=label is not None)
            if node.op_type in DEQUANTISED:
                new_value.meta[MADE_OF] = dequantisation_of(node)
            ir.convenience.replace_all_uses_with(output, new_value)
    graph.remove(node, safe=True)
