"""Split a traced module into consecutive parts around operators that torch.onnx does not know. For `backend.py`."""

from __future__ import annotations

import operator as python
from collections.abc import Callable, Iterator, Sequence

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.fx.passes.split_module import split_module
from torch.fx.traceback import NodeSource


def split(program: ExportedProgram, unknown: str) -> GraphModule | None:
    """Split `program` into consecutive parts; names of parts with only the operator `unknown` end with "eager".

    unknown: as "aten.linalg_qr.default". None where the program does not have it.

        sin, linalg_qr, add   ->   submod_0_program: sin;  submod_1_eager: linalg_qr;  submod_2_program: add
    """
    names = {node.name for node in program.graph.nodes if _calls_operator(node, unknown)}
    if not names:  # torch.onnx names an operator that another was decomposed to
        nodes = [node for node in program.run_decompositions().graph.nodes if _calls_operator(node, unknown)]
        names = {name for node in nodes for name in _original_operators(node.meta.get("from_node", ()))}
    module = program.module(check_guards=False)
    if not any(node.name in names for node in module.graph.nodes):
        return None
    parts: GraphModule = split_module(module, module, _number_parts(module, names))
    return parts


def is_eager(part: str) -> bool:
    """Whether the part of this name stays with PyTorch."""
    return part.endswith("eager")


def _number_parts(module: GraphModule, eager: set[str]) -> Callable[[Node], str]:
    """Return a function from a node to the name of its part: number, and "eager" for odd numbers.

    A part only reads results of parts before it. eager: names of nodes that stay with PyTorch.
    """
    numbers: dict[Node, int] = {}
    for node in module.graph.nodes:
        before = max((numbers[operand] for operand in node.all_input_nodes), default=0)
        if node.target is python.getitem:  # in the part of the tuple's operator
            numbers[node] = before
        else:
            numbers[node] = before + (before % 2 != (node.name in eager))
    return lambda node: f"{numbers[node]}_{'eager' if numbers[node] % 2 else 'program'}"


def _calls_operator(node: Node, unknown: str) -> bool:
    """Whether a node calls the operator `unknown`, compared without namespace, which torch.onnx may report wrongly."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target._schema.name.split("::")[1] == unknown.split(".")[1]


def _original_operators(sources: Sequence[NodeSource]) -> Iterator[str]:
    """Yield the names of the operators that an operator was decomposed from, through all decompositions."""
    for source in sources:
        yield source.name
        yield from _original_operators(source.from_node)
