"""Split a traced module into consecutive parts: those that torch.onnx can write, and those that it cannot."""

from __future__ import annotations

import operator as python
from collections.abc import Callable, Iterator, Sequence

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.fx.passes.split_module import split_module
from torch.fx.traceback import NodeSource


def split(program: ExportedProgram, unknown: str) -> GraphModule | None:
    """Split `program` into parts in a row, whose names end with "eager" where they hold only the operator `unknown`
    ("aten.linalg_qr.default"). None where that is nowhere in it.

        sin, linalg_qr, add   ->   submod_0_program: sin;  submod_1_eager: linalg_qr;  submod_2_program: add
    """
    names = {node.name for node in program.graph.nodes if _calls_operator(node, unknown)}
    if not names:  # torch.onnx names what it comes to
        nodes = [node for node in program.run_decompositions().graph.nodes if _calls_operator(node, unknown)]
        names = {name for node in nodes for name in _original_operators(node.meta.get("from_node", ()))}
    module = program.module(check_guards=False)
    if not any(node.name in names for node in module.graph.nodes):
        return None
    split: GraphModule = split_module(module, module, _number_parts(module, names))
    return split


def is_eager(part: str) -> bool:
    """Whether PyTorch runs the part of this name."""
    return part.endswith("eager")


def _number_parts(module: GraphModule, eager: set[str]) -> Callable[[Node], str]:
    """Number the parts: each reads results of those before it; odd ones are eager."""
    numbers: dict[Node, int] = {}
    for node in module.graph.nodes:
        before = max((numbers[operand] for operand in node.all_input_nodes), default=0)
        if node.target is python.getitem:  # with what made the tuple
            numbers[node] = before
        else:
            numbers[node] = before + (before % 2 != (node.name in eager))
    return lambda node: f"{numbers[node]}_{'eager' if numbers[node] % 2 else 'program'}"


def _calls_operator(node: Node, unknown: str) -> bool:
    """Whether a node calls an unknown operator, by its name alone: torch.onnx may know it as one of another
    namespace."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target._schema.name.split("::")[1] == unknown.split(".")[1]


def _original_operators(sources: Sequence[NodeSource]) -> Iterator[str]:
    """Names of the operators that one was decomposed from."""
    for source in sources:
        yield source.name
        yield from _original_operators(source.from_node)
