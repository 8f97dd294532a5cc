"""Which operators share a kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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

    A group has at most one operator that is not injective, and only its last node makes what others read. Injective
    operators go with what they follow rather than with what they precede. `outputs` are names needed afterwards.
    """
    home = list(range(len(nodes)))  # node -> its group, named by the last node of that group
    heavy = [node.op not in INJECTIVE for node in nodes]  # by group
    readers: dict[str, list[int]] = {}
    for number, node in enumerate(nodes):
        for name in node.inputs:
            readers.setdefault(name, []).append(number)

    def reader(last: int) -> int | None:
        """The group that alone reads what a group makes."""
        users = {home[user] for name in nodes[last].outputs if name for user in readers.get(name, ())}
        return users.pop() if len(users) == 1 and not set(nodes[last].outputs) & set(outputs) else None

    def join(into: Callable[[int, int], bool]) -> None:
        for last in reversed(range(len(nodes))):
            if home[last] == last and (user := reader(last)) is not None and into(last, user):
                heavy[user] = heavy[user] or heavy[last]
                home[:] = [user if h == last else h for h in home]

    join(lambda first, then: not heavy[first] and not heavy[then])
    join(lambda first, then: heavy[first] and not heavy[then])
    join(lambda first, then: not heavy[first])
    return [[n for n, h in zip(nodes, home) if h == last] for last in range(len(nodes)) if home[last] == last]
