"""Operator fusion for the CPU: group nodes that share a kernel, by the operator classes of
compiler/program/op_spec.py.

h = Conv(x, w)
k = Relu(h)                        one kernel: h and k stay in registers,
y = Add(k, b)            ->        y alone is written
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from celosia.compiler.ops import op_spec
from celosia.compiler.ops.registry import CpuNode
from celosia.compiler.program.op_spec import Kind

JOINS = (
    ((Kind.INJECTIVE,), (Kind.INJECTIVE,)),
    ((Kind.REDUCTION, Kind.COMPLEX), (Kind.INJECTIVE,)),
    ((Kind.INJECTIVE,), (Kind.REDUCTION, Kind.COMPLEX)),
)
"""Fusion rules in the order in which they are tried: (kinds of the producer, kinds of its only reader).

By this order an injective operator joins its producer rather than its consumer. The merged group has the kind that is
not injective."""


def fuse_nodes(nodes: Sequence[CpuNode], outputs: Sequence[str]) -> list[list[CpuNode]]:
    """Split `nodes` (in topological order) into groups, each a kernel; the groups are in topological order, too.

    A group has at most one operator that is not injective, and only its last node has outputs that other groups read.
    outputs: names needed afterwards.
    """
    group_of = list(range(len(nodes)))  # node -> its group, named by the last node of that group
    kinds = [op_spec(node.op).kind for node in nodes]  # by group
    readers: dict[str, list[int]] = {}
    for position, node in enumerate(nodes):
        for name in node.inputs:
            readers.setdefault(name, []).append(position)

    def only_reader(last: int) -> int | None:
        """Return the only group that reads the outputs of the group `last`, or None."""
        users = {group_of[user] for name in nodes[last].outputs if name for user in readers.get(name, ())}
        return users.pop() if len(users) == 1 and not set(nodes[last].outputs) & set(outputs) else None

    for producer_kinds, reader_kinds in JOINS:
        for last in reversed(range(len(nodes))):
            if group_of[last] != last or kinds[last] not in producer_kinds:
                continue
            if (user := only_reader(last)) is not None and kinds[user] in reader_kinds:
                kinds[user] = kinds[last] if kinds[user] is Kind.INJECTIVE else kinds[user]
                group_of[:] = [user if group == last else group for group in group_of]
    groups = [last for last in range(len(nodes)) if group_of[last] == last]
    return [[node for node, group in zip(nodes, group_of) if group == last] for last in groups]


def saved_traffic(members: Sequence[CpuNode], sizes: Mapping[str, int], views: Collection[str]) -> int:
    """Return the bytes that a fused group neither writes nor reads again, compared with one kernel per operator.

    members: nodes of the group, in order. sizes: bytes of every output of a member. views: outputs that cost nothing
    without fusion, as only the shape changes.
    """
    inside = [name for member in members[:-1] for name in member.outputs if name]
    readers = [name for member in members if not set(member.outputs) & set(views) for name in member.inputs]
    return sum(sizes[name] * ((name not in views) + readers.count(name)) for name in inside)
