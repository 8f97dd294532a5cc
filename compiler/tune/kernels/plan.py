"""A schedule in normal form, so that one decision of it can be changed: for each tensor how its loops are cut, their
order, how they run, and where it is computed. Two schedules that make the same loops are equal.
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
    """`loop` becomes loop.o of tiles and loop.i within them; with `factor` 0, it and `tail` become one loop."""

    loop: str
    factor: int
    tail: str

    @property
    def step(self) -> tuple[str, tuple[str | int, ...]]:
        """As a Trace has it: the primitive and its arguments."""
        return ("split", (self.loop, self.factor, self.tail)) if self.factor else ("fuse", (self.loop, self.tail))

    @property
    def makes(self) -> tuple[str, ...]:
        """Names of the loops that there are afterwards."""
        return (f"{self.loop}.o", f"{self.loop}.i") if self.factor else (f"{self.loop}.{self.tail}",)

    @property
    def takes(self) -> tuple[str, ...]:
        """Names of the loops that are gone."""
        return (self.loop,) if self.factor else (self.loop, self.tail)


@dataclass(frozen=True)
class StageLoops:
    """Loops of one tensor. roots: the loops before any cut. kinds: of those that are not serial. lanes: widths of
    accumulate_lanes of the innermost one. at: the tensor and the loop inside which it is computed."""

    roots: tuple[str, ...]
    cuts: tuple[LoopCut, ...] = ()
    order: tuple[str, ...] = ()
    kinds: frozenset[tuple[str, str]] = frozenset()
    lanes: tuple[int, ...] = ()
    at: tuple[str, str] | None = None

    def kind(self, loop: str) -> str:
        """Kind of the loop of this name: "serial", "parallel", "vectorized" or "unrolled"."""
        return dict(self.kinds).get(loop, "serial")

    def with_kind(self, loop: str, kind: str) -> StageLoops:
        """The loops with another kind for one loop."""
        others = {each for each in self.kinds if each[0] != loop}
        return replace(self, kinds=frozenset(others | ({(loop, kind)} if kind != "serial" else set())))

    def without(self, loops: tuple[str, ...]) -> StageLoops:
        """With nothing said of `loops`, which are no more."""
        return replace(self, kinds=frozenset(each for each in self.kinds if each[0] not in loops))

    def uncut(self) -> tuple[str, ...]:
        """The order in which the cuts leave the loops."""
        order = list(self.roots)
        for cut in self.cuts:
            at = order.index(cut.loop)
            order[at : at + len(cut.takes)] = cut.makes
        return tuple(order)


@dataclass(frozen=True)
class KernelPlan:
    """stages: by tensor."""

    stages: tuple[tuple[str, StageLoops], ...]

    def __getitem__(self, stage: str) -> StageLoops:
        return dict(self.stages)[stage]

    def with_stage(self, stage: str, loops: StageLoops) -> KernelPlan:
        """The plan with other loops for one tensor."""
        return KernelPlan(tuple((name, loops if name == stage else old) for name, old in self.stages))

    @property
    def trace(self) -> Trace:
        """The steps of a schedule that lead to it."""
        return Trace([*self._loops(), *self._places()])

    def _loops(self) -> Iterator[TraceStep]:
        for stage, loops in self.stages:
            for cut in loops.cuts:
                yield TraceStep(stage, *cut.step)
            if loops.order != loops.uncut():
                yield TraceStep(stage, "reorder", loops.order)
            for loop, kind in sorted(loops.kinds):
                yield TraceStep(stage, PRIMITIVE[kind], (loop,))
            if loops.lanes:
                yield TraceStep(stage, "accumulate_lanes", (loops.order[-1], list(loops.lanes)))

    def _places(self) -> Iterator[TraceStep]:
        for stage, loops in self.stages:
            if loops.at is not None:
                yield TraceStep(stage, "compute_at", ({"stage": loops.at[0]}, loops.at[1]))

    @staticmethod
    def of(schedule: Schedule) -> KernelPlan:
        """The plan of a schedule that was made by splits and fuses, orders, kinds, lanes, and places."""
        stages = [(t.name, _loops_of(stage)) for t, stage in schedule.stages.items() if can_change(stage)]
        return KernelPlan(tuple(stages))


PRIMITIVE = {"unrolled": "unroll", "vectorized": "vectorize"}


def can_change(stage: Stage) -> bool:
    """Whether rules may change it: a scan keeps its order."""
    return not isinstance(stage.body, Scan)


def _loops_of(stage: Stage) -> StageLoops:
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
