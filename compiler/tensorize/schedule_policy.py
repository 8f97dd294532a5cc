"""Choose the tiling of each layer. Priority: user, tuning records, block search, estimate (roofline, block_space).

A SchedulePolicy is immutable; a search that has found better tilings makes another policy.
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
    """Where tilings come from that go before all others: a user's file (tilings_file.py), or a trial of a search."""

    def tilings_of(self, layer: str, workloads: Sequence[Workload | Group]) -> list[Tiling] | None:
        """Return a tiling for each workload of the layer of this name; None if it has none. Raises DecisionsError."""


@dataclass(frozen=True)
class FixedSchedule:
    """Schedule source that gives every layer the same tilings."""

    tilings: list[Tiling]

    def tilings_of(self, layer: str, workloads: Sequence[Workload | Group]) -> list[Tiling]:
        """Return the fixed tilings for any layer. Raises TilingError if it has another number of workloads."""
        if len(workloads) != len(self.tilings):
            raise TilingError(f"the layer has {len(workloads)} workloads, decisions are for {len(self.tilings)}")
        return self.tilings


@dataclass(frozen=True)
class SchedulePolicy:
    """The sources of tilings, in the order of their priority, and the layers that overlap.

    given: the user's tilings, by name of layer. recorded: tilings in tuning records, by `workload_text` of a layer.
    searched: tilings that the search of blocks found (launch/blocks.py). overlapped: names of guests, whose tiles are
    emitted between those of the convolution before them (launch/order.py).
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
        """Choose a tiling for each computation of the layer of that name. Raises TilingError if none fits.

        first: the part of the output to complete before the rest, if that costs at most 2% more cycles. cold: whether
        no layer before keeps GEMM busy while this layer's first loads come.
        """
        by_computation = [workloads(computation) for computation in computations]
        tilings: Sequence[Tiling] | None = None
        if self.given is not None:
            tilings = self.given.tilings_of(layer, [workload for group in by_computation for workload in group])
        if tilings is None and self.recorded:
            tilings = self.recorded.get(workload_text(computations))
        if tilings is None:
            return [self._search_or_estimate(computation.workload, first, cold) for computation in computations]
        remaining = iter(tilings)
        return [Tiling.of_groups(list(islice(remaining, len(group)))) for group in by_computation]

    def _search_or_estimate(self, workload: Workload | BlockWorkload, first: CompletionOrder, cold: bool) -> Tiling:
        """Return the tiling that the block search found, or else the best by the estimate."""
        if isinstance(workload, BlockWorkload):
            return self.searched.get(workload) or block_space.choose(self.cfg, workload)
        return choose(self.cfg, workload, first, cold)


def workloads(d: LayerComputation) -> Sequence[Workload | Group]:
    """Return the workloads of a computation, each of which gets a tiling: one, or one for each group of a block."""
    return d.workload.groups if isinstance(d.workload, BlockWorkload) else [d.workload]


def workload_text(computations: Sequence[LayerComputation]) -> str:
    """Return the line that names a layer in tuning records: its workloads, and a digest of all that its loops depend
    on.

    Loops do not depend on weights and scalars.
    """
    text = " + ".join(workload.text for computation in computations for workload in workloads(computation))
    signatures = repr(tuple(computation.signature for computation in computations))
    return f"{text} #{hashlib.sha256(signatures.encode()).hexdigest()[:12]}"
