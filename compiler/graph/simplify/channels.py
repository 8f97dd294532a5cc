"""Select and order output channels in the weights of a convolution, instead of moving its result.

    y = QLinearConv(x, w)                      y = QLinearConv(x, w[order])
    z = DepthToSpace(y) mode=CRD       ->      z = DepthToSpace(y) mode=DCR

    y = QLinearConv(x, w)
    z = Gather(y, order) axis=1        ->      z = QLinearConv(x, w[order])

Also for a Slice of channels. A convolution without groups computes each output channel alone, so its bytes stay. Tables
may stand between. Nothing changes where another operator reads a tensor between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from celosia.compiler.graph.operands import convolves_bytes, operand, set_operand
from celosia.compiler.graph.values import attribute, constant, is_op, new_constant, replace_keeping_name, shape
from celosia.compiler.program.host.shape_rules import slice_positions

Order = NDArray[np.int64]
"""Old numbers of the channels, in their new order."""
BY_CHANNEL = ("w_scale", "w_zero_point", "b")
"""Operands of QLinearConv that may hold a number for each channel."""


def order_channels(model: ir.Model) -> None:
    """Select and order channels in the weights of the convolutions before DepthToSpace, Gather and Slice."""
    for node in list(model.graph):
        order = _ORDERS[node.op_type](node) if is_op(node, *_ORDERS) else None
        value = node.inputs[0] if node.inputs else None
        if order is None or value is None or not (chain := list(_tables_and_convolution(value, model.graph))):
            continue
        conv = chain[-1]
        for name in ("w", *BY_CHANNEL):
            _reorder(model.graph, conv, name, order)
        for chain_node in chain:
            dims = shape(chain_node.outputs[0])
            assert dims is not None
            chain_node.outputs[0].shape = ir.Shape((dims[0], len(order), *dims[2:]))
            chain_node.outputs[0].name = None  # it is not the model's tensor any more
        if is_op(node, "DepthToSpace"):
            node.attributes["mode"] = ir.AttrString("mode", "DCR")
        else:
            replace_keeping_name(node, value)


def _tables_and_convolution(value: ir.Value, graph: ir.Graph) -> Iterator[ir.Node]:
    """Yield the tables before `value`, and the convolution before these, last first; nothing where there is none.

    Each must have one reader only, and the convolution constant parameters and no groups.
    """
    nodes: list[ir.Node] = []
    while True:
        node = value.producer()
        if node is None or node.graph is not graph or value.is_graph_output() or shape(value) is None:
            return
        if len(list(value.uses())) != 1:
            return
        nodes.append(node)
        if is_op(node, "Table") and node.inputs[0] is not None:
            value = node.inputs[0]
        elif convolves_bytes(node) and attribute(node, "group", 1) == 1 and not attribute(node, "channels_last", 0):
            others = [operand(node, name) for name in ("w", *BY_CHANNEL, "y_scale", "y_zero_point")]
            if all(value is None or constant(value) is not None for value in others):
                yield from nodes
            return
        else:
            return


def _reorder(graph: ir.Graph, conv: ir.Node, name: str, order: Order) -> None:
    """Select the operand `name` of a convolution by output channel, if it is an array with one part for each."""
    value = operand(conv, name)
    array = constant(value)
    if value is not None and array is not None and (array.size > 1 or name == "w"):
        set_operand(conv, name, new_constant(graph, f"{value.name}_ordered", array[order]))


# Orders of channels by operator -----------------------------------------------------------------------------------


def _depth_to_space(node: ir.Node) -> Order | None:
    """Return the order of channels with which mode DCR equals CRD; None for other modes.

    In CRD the block is the inner axis of channels. In DCR it is the outer, so that each position in the block is one
    copy of channels that lie together.
    """
    dims, block = _dims(node), attribute(node, "blocksize", 1)
    if dims is None or attribute(node, "mode", "DCR") != "CRD":
        return None
    return np.arange(dims[1]).reshape(-1, block * block).T.reshape(-1)


def _gather(node: ir.Node) -> Order | None:
    """Return the order of channels in which a Gather of images reads them; None if it is no such Gather."""
    dims, index = _dims(node), constant(operand(node, "indices"))
    if dims is None or index is None or index.ndim != 1 or not index.size or attribute(node, "axis", 0) % 4 != 1:
        return None
    order: Order = np.where(index < 0, index + dims[1], index).astype(np.int64)
    return order


def _slice(node: ir.Node) -> Order | None:
    """Return the channels that a Slice of images reads; None if it slices other axes."""
    dims = _dims(node)
    operands = [constant(value) for value in node.inputs[1:]]
    if (
        dims is None
        or len(operands) < 3
        or any(operand_value is None or operand_value.size != 1 for operand_value in operands)
    ):
        return None
    start, end, axis, *step = (
        int(operand_value.reshape(-1)[0]) for operand_value in operands if operand_value is not None
    )
    if axis % 4 != 1 or 0 in step:
        return None
    order: Order = np.array(slice_positions(dims[1], start, end, *(step or [1])), np.int64)
    return order if order.size else None


def _dims(node: ir.Node) -> tuple[int, ...] | None:
    """Return the shape of the image that a node reads; None if it has other than four axes."""
    dims = None if node.inputs[0] is None else shape(node.inputs[0])
    return dims if dims is not None and len(dims) == 4 else None


_ORDERS: dict[str, Callable[[ir.Node], Order | None]] = {
    "DepthToSpace": _depth_to_space, "Gather": _gather, "Slice": _slice,
}  # fmt: skip
"""Operator -> the function that returns its order of channels, or None where it has none."""
