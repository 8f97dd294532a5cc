r"""Find products of two activations in a traced module, as in attention, and the operators around them.

q -> view -> mul 0.25 -> matmul -> view -> div 4 -> add mask -> softmax -> matmul
\___ operands ______/            \_ scaled _/      masks      \ operand
"""

from __future__ import annotations

import operator as python
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

MOVES = {
    "max_pool2d", "flatten", "unflatten", "view", "reshape", "permute", "transpose", "squeeze", "unsqueeze",
    "contiguous", "clone", "dropout", "upsample_nearest2d", "slice", "select", "alias", "detach",
}  # fmt: skip
"""ATen's operators that only move elements, or take the maximum of a window: they keep the scale."""
SPLITS = {"unbind", "split", "split_with_sizes", "chunk"}
"""Operators that split a tensor into several."""
MASKS = {"add", "sub", "mul", "div", "masked_fill", "where"}
"""ATen's operators that apply masks between a product and softmax."""
aten = torch.ops.aten


def name_of(node: Node) -> str:
    """Return ATen's name of an operator, without overload and in-place suffix; "" for other nodes."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return ""
    return str(target._schema.name).removeprefix("aten::").removesuffix("_")


class ActivationProducts:
    """Products of two activations in `graph`, with their operands and masks. exclude: whether an operator stays float.

    nodes: products of two float32 tensors [..., m, k] and [..., k, n], neither constant, with equal leading sizes.
    operands: nodes that share a scale with an operand of a product. Their zero point is 0, which makes the products
    cheap. scaled: nodes behind products that only move or scale the result. masks: nodes between a product and a
    softmax that apply masks. They stay float: a mask of -1e9 would use up the range of int8.
    """

    def __init__(self, graph: Graph, exclude: Callable[[Node], bool]) -> None:
        input_dependent = _input_dependent_nodes(graph)
        self.nodes = {
            node for node in graph.nodes if _is_activation_product(node, input_dependent) and not exclude(node)
        }
        self.operands = _scale_sharing_nodes(operand for node in self.nodes for operand in node.args[:2])
        self.scaled = _nodes_behind_products(self.nodes)
        softmaxes = [node for node in graph.nodes if name_of(node) == "softmax"]
        self.masks = {mask for node in softmaxes for mask in self._masks(node)} - self.scaled

    def is_scaling(self, node: Node) -> bool:
        """Whether a node multiplies a result or operand of a product by a number: that changes the scale, not the
        bytes."""
        return _is_scaling(node) and (node in self.scaled or node in self.operands)

    def _masks(self, softmax: Node) -> set[Node]:
        """Return the nodes that apply masks in front of a softmax, back to a product.

        None where no product leads there: such a softmax reads ordinary activations.
        """
        seen: set[Node] = set()
        pending, sources = [softmax.args[0]], set[Node]()
        while pending:
            node = pending.pop()
            if name_of(node) not in MASKS | MOVES:
                sources.add(node)
            elif node not in seen:
                seen.add(node)
                pending += node.all_input_nodes
        return seen if sources & self.nodes else set()


def replace_splits_by_slices(model: GraphModule, products: ActivationProducts) -> None:
    """Replace splits by slices, in place, where parts become operands of products: PT2E can then share the scale.

    unbind, getitem 0, getitem 1   ->   select 0, select 1
    """
    for node in [node for node in model.graph.nodes if node in products.operands and _is_part(node)]:
        source: Any = node.args[0]
        with model.graph.inserting_before(node):
            part = _slice_part(model.graph, source, node.args[1])
        if part is not None:
            part.meta = {**source.meta, "val": node.meta["val"]}
            node.replace_all_uses_with(part)
    model.graph.eliminate_dead_code()
    model.recompile()


def _slice_part(graph: Graph, split: Node, number: int) -> Node | None:
    """Insert the operator that slices part `number` out of the tensor that `split` splits; None for open sizes."""
    if name_of(split) == "unbind":
        return graph.call_function(aten.select.int, (split.args[0], _axis_argument(split, 1), number))
    axis = _axis_argument(split, 2)
    sizes = [value.shape[axis] for value in split.meta["val"][: number + 1]]
    if not all(isinstance(size, int) for size in sizes):
        return None
    return graph.call_function(aten.slice.Tensor, (split.args[0], axis, sum(sizes[:-1]), sum(sizes)))


def _axis_argument(split: Node, argument_number: int) -> int:
    """Return the argument `dim` of a split, at position `argument_number` or by name; 0 where there is none."""
    return int(split.args[argument_number] if len(split.args) > argument_number else split.kwargs.get("dim", 0))


def _input_dependent_nodes(graph: Graph) -> set[Node]:
    """Return the nodes that depend on an input of the module: all others are constants."""
    input_dependent: set[Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder" or any(operand in input_dependent for operand in node.all_input_nodes):
            input_dependent.add(node)
    return input_dependent


def _is_activation_product(node: Node, input_dependent: set[Node]) -> bool:
    """Whether a node multiplies two float32 activations with equal leading sizes."""
    if name_of(node) not in ("matmul", "bmm") or not input_dependent.issuperset(node.args[:2]):
        return False
    a, b = (operand.meta["val"] for operand in node.args[:2])
    if a.dtype != torch.float32 or min(a.dim(), b.dim()) < 2 or a.dim() != b.dim():
        return False
    return all(statically_known_true(x == y) for x, y in zip(a.shape[:-2], b.shape[:-2]))


def _is_scaling(node: Node) -> bool:
    """Whether a node multiplies or divides by a number."""
    return name_of(node) in ("mul", "div") and len(node.args) == 2 and isinstance(node.args[1], (int, float))


def _is_part(node: Node) -> bool:
    """Whether a node is one of the parts of a split tensor."""
    return node.target is python.getitem and name_of(node.args[0]) in SPLITS


def _scale_sharing_sources(node: Node) -> list[Node]:
    """Return the operands of `node` that share its scale, or a multiple of it."""
    if name_of(node) == "cat":
        return list(node.args[0])
    if _is_part(node):
        return [node.args[0].args[0]]
    return [node.args[0]] if name_of(node) in MOVES or _is_scaling(node) else []


def _scale_sharing_readers(node: Node) -> Iterator[Node]:
    """Yield the readers of `node` that share its scale, also those behind splits."""
    for user in node.users:
        if name_of(user) in SPLITS:
            yield from user.users
        elif node in _scale_sharing_sources(user):
            yield user


def _scale_sharing_nodes(operands: Iterable[Any]) -> set[Node]:
    """Return all nodes that share the scale of one of `operands`, through operands and readers, also indirectly."""
    reached, pending = set[Node](), list(operands)
    while pending:
        node = pending.pop()
        if node not in reached:
            reached.add(node)
            pending += [*_scale_sharing_sources(node), *_scale_sharing_readers(node)]
    return reached


def _nodes_behind_products(products: Iterable[Node]) -> set[Node]:
    """Return the nodes that only move or scale results of `products`, also indirectly."""
    reached, pending = set[Node](), list(products)
    while pending:
        for user in pending.pop().users:
            if user not in reached and (name_of(user) in MOVES or _is_scaling(user)):
                reached.add(user)
                pending.append(user)
    return reached
