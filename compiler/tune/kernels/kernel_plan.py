"""Plans: schedules of kernels in normal form, so that one decision can be changed.

A plan has for each tensor how its loops are split, their order, how they run, and where it is computed. Equal plans
make equal loops.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from celosia.compiler.expr import Schedule, Stage
from celosia.compiler.expr.nodes import Scan
from celosia.compiler.expr.schedule import Split
from celosia.compiler.expr.trace import Trace, TraceStep


@dataclass(frozen=True)
class LoopCut:
    """A split of `loop` into loop.o (tiles) and loop.i (within a tile); with `factor` 0, a fusion of it with the loop
    `tail`.
    """

    loop: str
    factor: int
    tail: str

    @property
    def step(self) -> tuple[str, tuple[str | int, ...]]:
        """The primitive and its arguments, as in a Trace."""
        return ("split", (self.loop, self.factor, self.tail)) if self.factor else ("fuse", (self.loop, self.tail))

    @property
    def makes(self) -> tuple[str, ...]:
        """Names of the loops that result."""
        return (f"{self.loop}.o", f"{self.loop}.i") if self.factor else (f"{self.loop}.{self.tail}",)

    @property
    def takes(self) -> tuple[str, ...]:
        """Names of the loops that disappear."""
        return (self.loop,) if self.factor else (self.loop, self.tail)


@dataclass(frozen=True)
class StageLoops:
    """Loops of one tensor.

    roots: the loops before any split. kinds: of loops that are not serial. lanes: widths of accumulate_lanes of the
    innermost one. at: the tensor and the loop inside which it is computed.
    """

    roots: tuple[str, ...]
    cuts: tuple[LoopCut, ...] = ()
    order: tuple[str, ...] = ()
    kinds: frozenset[tuple[str, str]] = frozenset()
    lanes: tuple[int, ...] = ()
    at: tuple[str, str] | None = None

    def kind(self, loop: str) -> str:
        """Return the kind of a loop: "serial", "parallel", "vectorized" or "unrolled"."""
        return dict(self.kinds).get(loop, "serial")

    def with_kind(self, loop: str, kind: str) -> StageLoops:
        """Return the loops with another kind for one of them."""
        others = {entry for entry in self.kinds if entry[0] != loop}
        return replace(self, kinds=frozenset(others | ({(loop, kind)} if kind != "serial" else set())))

    def without(self, loops: tuple[str, ...]) -> StageLoops:
        """Return the loops without the kinds of `loops`, which no longer exist."""
        return replace(self, kinds=frozenset(entry for entry in self.kinds if entry[0] not in loops))

    def split_order(self) -> tuple[str, ...]:
        """Return the order in which the splits and fusions alone leave the loops."""
        order = list(self.roots)
        for cut in self.cuts:
            position = order.index(cut.loop)
            order[position : position + len(cut.takes)] = cut.makes
        return tuple(order)


@dataclass(frozen=True)
class KernelPlan:
    """Loops of all tensors of a kernel. stages: (tensor, loops)."""

    stages: tuple[tuple[str, StageLoops], ...]

    def __getitem__(self, stage: str) -> StageLoops:
        return dict(self.stages)[stage]

    def with_stage(self, stage: str, loops: StageLoops) -> KernelPlan:
        """Return the plan with other loops for one tensor."""
        return KernelPlan(tuple((name, loops if name == stage else old) for name, old in self.stages))

    @property
    def trace(self) -> Trace:
        """The primitives that turn the base schedule into this plan."""
        return Trace([*self._loop_steps(), *self._attachment_steps()])

    def _loop_steps(self) -> Iterator[TraceStep]:
        """Yield the steps that split, reorder and annotate the loops of each tensor."""
        for stage, loops in self.stages:
            for cut in loops.cuts:
                yield TraceStep(stage, *cut.step)
            if loops.order != loops.split_order():
                yield TraceStep(stage, "reorder", loops.order)
            for loop, kind in sorted(loops.kinds):
                yield TraceStep(stage, PRIMITIVE[kind], (loop,))
            if loops.lanes:
                yield TraceStep(stage, "accumulate_lanes", (loops.order[-1], list(loops.lanes)))

    def _attachment_steps(self) -> Iterator[TraceStep]:
        for stage, loops in self.stages:
            if loops.at is not None:
                yield TraceStep(stage, "compute_at", ({"stage": loops.at[0]}, loops.at[1]))

    @staticmethod
    def of(schedule: Schedule) -> KernelPlan:
        """Return the plan of a schedule that was made by splits, fusions, orders, kinds, lanes and compute_at."""
        stages = [(t.name, _loops_of(stage)) for t, stage in schedule.stages.items() if can_change(stage)]
        return KernelPlan(tuple(stages))


PRIMITIVE = {"unrolled": "unroll", "vectorized": "vectorize"}


def can_change(stage: Stage) -> bool:
    """Return whether rules may change a stage; a scan keeps its order."""
    return not isinstance(stage.body, Scan)


def _loops_of(stage: Stage) -> StageLoops:
    """Return the loops of a stage in normal form."""
    cuts = tuple(
        LoopCut(r.parent.name, r.inner.extent, r.tail)
        if isinstance(r, Split)
        else LoopCut(r.outer.name, 0, r.inner.name)
        for r in stage.relations
    )
    return StageLoops(
        tuple(axis.name for axis in stage.roots), cuts, tuple(axis.name for axis in stage.order),
        frozenset((axis.name, kind) for axis, kind in stage.kinds.items() if axis in stage.order),
        next(iter(stage.lanes.values()), ()),
        None if stage.attached is None else (stage.attached[0].tensor.name, stage.attached[1].name),
    )  # fmt: skip
