"""What onnxruntime's DequantizeLinear and QuantizeLinear reach before it looks for products of bytes.

DequantizeLinear of one scale changes places with what moves elements behind it, QuantizeLinear with what moves elements
before it, unless that is returned, or read by others. Which results an operator reads or makes in bytes follows from
there. What hands elements on, such as Identity, goes first, but where it is returned.
"""

from __future__ import annotations

import onnx_ir as ir

from celosia.compiler.graph.identities import is_wire
from celosia.compiler.graph.values import is_op

MOVING = ("MaxPool", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze")


def hands_on(node: ir.Node) -> bool:
    """Whether `node` is a wire, which onnxruntime takes away: it leaves those whose result is returned."""
    return is_wire(node) and not node.outputs[0].is_graph_output()


def maker(value: ir.Value | None) -> ir.Node | None:
    """The operator that makes `value`, without what hands it on."""
    node = value.producer() if value is not None else None
    while node is not None and hands_on(node):
        node = node.inputs[0].producer() if node.inputs[0] is not None else None
    return node


def origin(value: ir.Value | None) -> ir.Node | None:
    """The operator that makes the elements of `value`, behind which some may move them: the DequantizeLinear that
    comes to stand before what reads `value`, if it is one."""
    node = maker(value)
    while node is not None and is_op(node, *MOVING):
        node = maker(node.inputs[0])
    return node


def only_reader(node: ir.Node) -> ir.Node | None:
    """The operator that alone reads the result of `node`, without what hands it on. That it is returned does not
    count."""
    while len(uses := list(node.outputs[0].uses())) == 1 and uses[0].node.graph is node.graph:
        node = uses[0].node
        if not hands_on(node):
            return node
    return None


def is_passed_on(node: ir.Node) -> bool:
    """Whether one operator reads the result of `node`, which is not returned."""
    return not node.outputs[0].is_graph_output() and only_reader(node) is not None


def is_quantised(node: ir.Node) -> bool:
    """Whether QuantizeLinear comes to stand behind `node`, as its only reader. It changes places with a Transpose also
    where what is transposed is returned, but with nothing that is returned itself."""
    user = only_reader(node)
    while user is not None and is_op(user, *MOVING):
        if not (is_passed_on(node) or is_op(user, "Transpose")) or not is_passed_on(user):
            return False
        node, user = user, only_reader(user)
    return is_op(user, "QuantizeLinear")
