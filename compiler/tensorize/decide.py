"""Choose the schedule of each layer. Priority: user, tuning records, block search, cost model.

A SchedulePolicy is immutable; a search that knows more makes another one of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from celosia.compiler.layer import TilingError
from celosia.compiler.tensorize import block_space
from celosia.compiler.tensorize.block_space import BlockProblem, Group
from celosia.compiler.tensorize.definition import LayerComputation
from celosia.compiler.tensorize.roofline import choose
from celosia.compiler.tensorize.space import CompletionOrder, Decisions, Problem
from celosia.hw.spec.config import Config


class ScheduleSource(Protocol):
    """Schedules that a user has decided; see tensorize/decisions.py."""

    def of(self, layer: str, problems: Sequence[Problem | Group]) -> list[Decisions] | None:
        """Decisions for each problem of the layer of this name, None where the user says nothing. DecisionsError."""


@dataclass(frozen=True)
class FixedSchedule:
    """Fixed decisions for every layer that is asked about."""

    decisions: list[Decisions]

    def of(self, layer: str, problems: Sequence[Problem | Group]) -> list[Decisions]:
        if len(problems) != len(self.decisions):
            raise TilingError(f"the layer has {len(problems)} problems, decisions are for {len(self.decisions)}")
        return self.decisions


@dataclass(frozen=True)
class SchedulePolicy:
    """given: by the user, by the names of layers. recorded: by records, for each problem of a layer, by its `workload`.
    searched: by the search of blocks. overlapped: names of layers whose tiles are emitted between those of
    the convolution that they stand behind (launch/order.py)."""

    cfg: Config
    given: ScheduleSource | None = None
    recorded: Mapping[str, Sequence[Decisions]] = field(default_factory=dict)
    searched: Mapping[BlockProblem, Decisions] = field(default_factory=dict)
    overlapped: frozenset[str] = frozenset()

    def of(
        self,
        layer: str,
        definitions: Sequence[LayerComputation],
        first: CompletionOrder = CompletionOrder.ANY,
        cold: bool = False,
    ) -> list[Decisions]:
        """Those for each definition of the layer of that name. TilingError where nothing fits.

        first: what of the output is rather completed before the rest, if it costs next to nothing. cold: gemm is not
        busy with another layer while this one's first loads come.
        """
        asked = [problems(definition) for definition in definitions]
        known: Sequence[Decisions] | None = None
        if self.given is not None:
            known = self.given.of(layer, [problem for each in asked for problem in each])
        if known is None and self.recorded:
            known = self.recorded.get(workload(definitions))
        if known is None:
            return [self._usual(definition.problem, first, cold) for definition in definitions]
        rest = iter(known)
        return [Decisions.of_groups(list(islice(rest, len(each)))) for each in asked]

    def _usual(self, problem: Problem | BlockProblem, first: CompletionOrder, cold: bool) -> Decisions:
        if isinstance(problem, BlockProblem):
            return self.searched.get(problem) or block_space.choose(self.cfg, problem)
        return choose(self.cfg, problem, first, cold)


def problems(d: LayerComputation) -> Sequence[Problem | Group]:
    """What is decided for a definition: one problem, or one for each group of a block."""
    return d.problem.groups if isinstance(d.problem, BlockProblem) else [d.problem]


def workload(definitions: Sequence[LayerComputation]) -> str:
    """A layer in a line: its problems, and a digest of all on which its loops depend, weights and scalars not."""
    text = " + ".join(problem.text for definition in definitions for problem in problems(definition))
    signatures = repr(tuple(definition.signature for definition in definitions))
    return f"{text} #{hashlib.sha256(signatures.encode()).hexdigest()[:12]}"
