r"""Products of two activations in a traced module, as in attention, and the operators around them.

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
"""Operators of ATen that only move elements, or take the largest of a window."""
SPLITS = {"unbind", "split", "split_with_sizes", "chunk"}
"""Operators that split a tensor into several."""
MASKS = {"add", "sub", "mul", "div", "masked_fill", "where"}
"""Operators that compute and add masks between a product and softmax."""
aten = torch.ops.aten


def name_of(node: Node) -> str:
    """ATen's name of an operator, without overload and in-place suffix; "" for anything else."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return ""
    return str(target._schema.name).removeprefix("aten::").removesuffix("_")


class ActivationProducts:
    """Products of `graph` for a quantiser, with their operands and masks. exclude: tells which operators stay float.

    nodes: products of two float32 tensors, neither of which is constant, with as many matrices each, [..., m, k] and
    [..., k, n]. operands: whatever shares a scale with an operand of one, from what made it on; one zero point, 0, for
    all of them makes the products cheap. scaled: views of results, and results times a number. masks: what softmax
    reads between a product and itself, and the masks that come in there, whose -1e9 would take the range of int8.
    """

    def __init__(self, graph: Graph, exclude: Callable[[Node], bool]) -> None:
        varying = _input_dependent_nodes(graph)
        self.nodes = {node for node in graph.nodes if _is_activation_product(node, varying) and not exclude(node)}
        self.operands = _scale_sharing_nodes(operand for node in self.nodes for operand in node.args[:2])
        self.scaled = _nodes_behind_products(self.nodes)
        softmaxes = [node for node in graph.nodes if name_of(node) == "softmax"]
        self.masks = {mask for node in softmaxes for mask in self._masks(node)} - self.scaled

    def is_scaling(self, node: Node) -> bool:
        """Whether a number times the result or an operand of a product: of bytes, the same bytes in another scale."""
        return _is_scaling(node) and (node in self.scaled or node in self.operands)

    def _masks(self, softmax: Node) -> set[Node]:
        """Masks added in front of a softmax; none where no product leads there, since such a softmax reads plain
        activations."""
        seen: set[Node] = set()
        left, ends = [softmax.args[0]], set[Node]()
        while left:
            node = left.pop()
            if name_of(node) not in MASKS | MOVES:
                ends.add(node)
            elif node not in seen:
                seen.add(node)
                left += node.all_input_nodes
        return seen if ends & self.nodes else set()


def with_slices(model: GraphModule, products: ActivationProducts) -> None:
    """Take the parts of a tensor that become operands of products one by one, so that they can share its scale.

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
    """Part `number` of the tensor that `split` splits; None where its sizes are open."""
    if name_of(split) == "unbind":
        return graph.call_function(aten.select.int, (split.args[0], _axis_argument(split, 1), number))
    axis = _axis_argument(split, 2)
    sizes = [value.shape[axis] for value in split.meta["val"][: number + 1]]
    if not all(isinstance(size, int) for size in sizes):
        return None
    return graph.call_function(aten.slice.Tensor, (split.args[0], axis, sum(sizes[:-1]), sum(sizes)))


def _axis_argument(split: Node, place: int) -> int:
    """Argument `dim`; the first axis where there is none."""
    return int(split.args[place] if len(split.args) > place else split.kwargs.get("dim", 0))


def _input_dependent_nodes(graph: Graph) -> set[Node]:
    """Nodes that depend on an input of the module."""
    varying: set[Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder" or any(operand in varying for operand in node.all_input_nodes):
            varying.add(node)
    return varying


def _is_activation_product(node: Node, varying: set[Node]) -> bool:
    """Whether a node multiplies two float activations of equal batch sizes."""
    if name_of(node) not in ("matmul", "bmm") or not varying.issuperset(node.args[:2]):
        return False
    a, b = (operand.meta["val"] for operand in node.args[:2])
    if a.dtype != torch.float32 or min(a.dim(), b.dim()) < 2 or a.dim() != b.dim():
        return False
    return all(statically_known_true(x == y) for x, y in zip(a.shape[:-2], b.shape[:-2]))


def _is_scaling(node: Node) -> bool:
    return name_of(node) in ("mul", "div") and len(node.args) == 2 and isinstance(node.args[1], (int, float))


def _is_part(node: Node) -> bool:
    return node.target is python.getitem and name_of(node.args[0]) in SPLITS


def _scale_sharing_sources(node: Node) -> list[Node]:
    """Nodes that share their scale, or a multiple of it, with `node`, which was computed from them."""
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
    """Nodes that must share the scale of one of `operands`, through sources and readers."""
    reached, left = set[Node](), list(operands)
    while left:
        node = left.pop()
        if node not in reached:
            reached.add(node)
            left += [*_scale_sharing_sources(node), *_scale_sharing_readers(node)]
    return reached


def _nodes_behind_products(products: Iterable[Node]) -> set[Node]:
    """Nodes behind `products`, through moves and scalings only."""
    reached, left = set[Node](), list(products)
    while left:
        for user in left.pop().users:
            if user not in reached and (name_of(user) in MOVES or _is_scaling(user)):
                reached.add(user)
                left.append(user)
    return reached
