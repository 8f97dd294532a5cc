"""Constraints on the placement of operators, which failed attempts to lower a graph leave for the next one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import onnx_ir as ir


@dataclass(frozen=True)
class Constraints:
    """Requirements of the next attempt to lower a graph.

    on_cpu: operators that stay on the CPU, with the reason. unblocked: operators whose layers join no block. unmoved:
    tensors that keep storages of their own, because the host reads them and cannot read part of a concatenation.
    unpadded: concatenations without padding between their parts, because a CPU operator reads them. compared: sentences
    for the user on launches whose cycles were compared with the CPU's.
    """

    on_cpu: Mapping[ir.Node, str] = field(default_factory=dict)
    unblocked: frozenset[ir.Node] = frozenset()
    unmoved: frozenset[ir.Value] = frozenset()
    unpadded: frozenset[ir.Node] = frozenset()
    compared: tuple[str, ...] = ()

    def refuse(
        self, on_cpu: Mapping[ir.Node, str], unblocked: Collection[ir.Node] = (), compared: Collection[str] = ()
    ) -> Constraints:
        """Add operators to `on_cpu` and `unblocked`.

        `unmoved` and `unpadded` start empty, since they depend on the placement, which is new.
        """
        return Constraints(
            {**self.on_cpu, **on_cpu}, self.unblocked | frozenset(unblocked),
            compared=tuple(dict.fromkeys((*self.compared, *compared))),
        )  # fmt: skip

    def separate(self, unmoved: Collection[ir.Value], unpadded: Collection[ir.Node]) -> Constraints:
        """Add tensors to `unmoved` and concatenations to `unpadded`."""
        return replace(self, unmoved=self.unmoved | frozenset(unmoved), unpadded=self.unpadded | frozenset(unpadded))


UNCONSTRAINED = Constraints()
"""Constraints of the first attempt."""
