"""Group operators that share a kernel: fusion by the classes of compiler/program/op_spec.py.

h = Conv(x, w)
k = Relu(h)                        one kernel: h and k stay in registers,
y = Add(k, b)            ->        y alone is written
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from celosia.compiler.ops import op_spec
from celosia.compiler.ops.node import CpuNode
from celosia.compiler.program.op_spec import Kind

JOINS = (
    ((Kind.INJECTIVE,), (Kind.INJECTIVE,)),
    ((Kind.REDUCTION, Kind.COMPLEX), (Kind.INJECTIVE,)),
    ((Kind.INJECTIVE,), (Kind.REDUCTION, Kind.COMPLEX)),
)
"""Groups that join the one that alone reads it: (kinds of the first, kinds of the reader), in the order in which they
are tried, so that injective operators go with what they follow rather than with what they precede. The group is then of
the kind that is not injective."""


def group(nodes: Sequence[CpuNode], outputs: Sequence[str]) -> list[list[CpuNode]]:
    """Split `nodes`, given in an order in which they can run, into groups that can run in the returned order.

    A group has at most one operator that is not injective, and only its last node makes what others read. `outputs` are
    names needed afterwards.
    """
    home = list(range(len(nodes)))  # node -> its group, named by the last node of that group
    kinds = [op_spec(node.op).kind for node in nodes]  # by group
    readers: dict[str, list[int]] = {}
    for number, node in enumerate(nodes):
        for name in node.inputs:
            readers.setdefault(name, []).append(number)

    def reader(last: int) -> int | None:
        """The group that alone reads what a group makes."""
        users = {home[user] for name in nodes[last].outputs if name for user in readers.get(name, ())}
        return users.pop() if len(users) == 1 and not set(nodes[last].outputs) & set(outputs) else None

    for firsts, readers_of in JOINS:
        for last in reversed(range(len(nodes))):
            if home[last] != last or kinds[last] not in firsts:
                continue
            if (user := reader(last)) is not None and kinds[user] in readers_of:
                kinds[user] = kinds[last] if kinds[user] is Kind.INJECTIVE else kinds[user]
                home[:] = [user if h == last else h for h in home]
    return [[n for n, h in zip(nodes, home) if h == last] for last in range(len(nodes)) if home[last] == last]


def saved_traffic(members: Sequence[CpuNode], sizes: Mapping[str, int], views: Collection[str]) -> int:
    """Bytes that a group does not write and read again, as kernels of one operator each would.

    sizes: of every tensor that a member makes. views: outputs of members that would be free, as they change the shape
    alone.
    """
    inside = [name for member in members[:-1] for name in member.outputs if name]
    readers = [name for member in members if not set(member.outputs) & set(views) for name in member.inputs]
    return sum(sizes[name] * ((name not in views) + readers.count(name)) for name in inside)
