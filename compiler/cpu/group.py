"""Which operators share a kernel."""

from __future__ import annotations

from collections.abc import Sequence

from celosia.compiler.cpu.function import CpuNode
from celosia.compiler.cpu.ops.elementwise import BINARY, DIRECT, UNARY

INJECTIVE = frozenset((
    *UNARY, *DIRECT, *BINARY, "Min", "Max", "Sum", "Mean", "Where", "Clip", "Cast", "CastLike", "IsInf",
    "QuantizeLinear", "DequantizeLinear", "BatchNormalization", "Reshape", "Flatten", "Squeeze", "Unsqueeze",
    "Transpose", "Slice", "Pad", "Gather", "Expand", "Tile", "QLinearAdd", "QLinearMul", "QLinearSigmoid",
    "QLinearLeakyRelu",
))  # fmt: skip
"""Operators that compute each element from single elements, and so can be inlined into what reads them."""


def group(nodes: Sequence[CpuNode], outputs: Sequence[str]) -> list[list[CpuNode]]:
    """Split `nodes`, given in an order in which they can run, into groups that can run in the returned order.

    A group is a chain of injective operators with at most one other operator in it, whose inner values nobody else
    reads. `outputs` are names that are needed afterwards.
    """
    readers: dict[str, int] = {name: 1 for name in outputs}
    for node in nodes:
        for name in {n for n in node.inputs if n}:
            readers[name] = readers.get(name, 0) + 1
    groups: dict[str, list[CpuNode]] = {}  # by each output of the last node
    result: list[list[CpuNode]] = []
    for node in nodes:
        here = [node]
        heavy = node.op not in INJECTIVE
        for name in dict.fromkeys(node.inputs):
            before = groups.get(name)
            if before is None or len(before[-1].outputs) > 1 or readers[name] > 1:
                continue
            if heavy and any(n.op not in INJECTIVE for n in before):
                continue
            here = before + here
            heavy = heavy or any(n.op not in INJECTIVE for n in before)
            result = [g for g in result if g is not before]
        for name in node.outputs:
            groups[name] = here
        result.append(here)
    return result
