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
from celosia.compiler.tensorize.block_space import BlockWorkload, Group
from celosia.compiler.tensorize.computation import LayerComputation
from celosia.compiler.tensorize.roofline import choose
from celosia.compiler.tensorize.space import CompletionOrder, Tiling, Workload
from celosia.hw.spec.config import Config


class ScheduleSource(Protocol):
    """Schedules that a user has decided; see tensorize/tilings_file.py."""

    def tilings_of(self, layer: str, workloads: Sequence[Workload | Group]) -> list[Tiling] | None:
        """Tilings for each workload of the layer of this name, None where the user says nothing. DecisionsError."""


@dataclass(frozen=True)
class FixedSchedule:
    """Schedule source that gives every layer the same tilings."""

    tilings: list[Tiling]

    def tilings_of(self, layer: str, workloads: Sequence[Workload | Group]) -> list[Tiling]:
        """Return the fixed tilings for any layer. Raises TilingError if it has another count of workloads."""
        if len(workloads) != len(self.tilings):
            raise TilingError(f"the layer has {len(workloads)} workloads, decisions are for {len(self.tilings)}")
        return self.tilings


@dataclass(frozen=True)
class SchedulePolicy:
    """Priority of the sources that decide the tilings of layers.

    given: the user, by the names of layers. recorded: tuning records, for each workload of a layer, by
    `workload_text`. searched: the search of blocks. overlapped: names of layers whose tiles are emitted between those
    of the convolution that they stand behind (launch/order.py).
    """

    cfg: Config
    given: ScheduleSource | None = None
    recorded: Mapping[str, Sequence[Tiling]] = field(default_factory=dict)
    searched: Mapping[BlockWorkload, Tiling] = field(default_factory=dict)
    overlapped: frozenset[str] = frozenset()

    def choose(
        self,
        layer: str,
        computations: Sequence[LayerComputation],
        first: CompletionOrder = CompletionOrder.ANY,
        cold: bool = False,
    ) -> list[Tiling]:
        """Choose a tiling for each computation of the layer of that name. TilingError where none fits.

        first: part of the output to complete before the rest, if it costs next to nothing. cold: whether GEMM idles
        while this layer's first loads come, as no layer before keeps it busy.
        """
        own_workloads = [workloads(computation) for computation in computations]
        decided: Sequence[Tiling] | None = None
        if self.given is not None:
            decided = self.given.tilings_of(layer, [workload for own in own_workloads for workload in own])
        if decided is None and self.recorded:
            decided = self.recorded.get(workload_text(computations))
        if decided is None:
            return [self._usual(computation.workload, first, cold) for computation in computations]
        tilings = iter(decided)
        return [Tiling.of_groups(list(islice(tilings, len(own)))) for own in own_workloads]

    def _usual(self, workload: Workload | BlockWorkload, first: CompletionOrder, cold: bool) -> Tiling:
        """The tiling of the block search, or else the best by the estimate."""
        if isinstance(workload, BlockWorkload):
            return self.searched.get(workload) or block_space.choose(self.cfg, workload)
        return choose(self.cfg, workload, first, cold)


def workloads(d: LayerComputation) -> Sequence[Workload | Group]:
    """The workloads of a computation, each of which gets a tiling: one, or one for each group of a block."""
    return d.workload.groups if isinstance(d.workload, BlockWorkload) else [d.workload]


def workload_text(computations: Sequence[LayerComputation]) -> str:
    """One line that names a layer in tuning records: its workloads, and a digest of all on which its loops depend.
    Weights and scalars do not count."""
    text = " + ".join(workload.text for computation in computations for workload in workloads(computation))
    signatures = repr(tuple(computation.signature for computation in computations))
    return f"{text} #{hashlib.sha256(signatures.encode()).hexdigest()[:12]}"
