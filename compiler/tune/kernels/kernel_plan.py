"""Plans: schedules of kernels in a normal form, in which one decision can change while the others stay.

A plan says for each tensor how its loops are split, in which order and how they run, and where it is computed. Equal
plans give equal loop nests.
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
    """A split or a fusion of loops.

    With a factor: `loop` is split into loop.o (over tiles) and loop.i (factor iterations within a tile), and `tail`
    says what happens to the remaining iterations. With factor 0: `loop` is fused with the loop inside it, named `tail`.
    """

    loop: str
    factor: int
    tail: str

    @property
    def step(self) -> tuple[str, tuple[str | int, ...]]:
        """Primitive of a Trace and its arguments that make this split or fusion."""
        return ("split", (self.loop, self.factor, self.tail)) if self.factor else ("fuse", (self.loop, self.tail))

    @property
    def new_loops(self) -> tuple[str, ...]:
        """Names of the loops that appear, the outermost first."""
        return (f"{self.loop}.o", f"{self.loop}.i") if self.factor else (f"{self.loop}.{self.tail}",)

    @property
    def old_loops(self) -> tuple[str, ...]:
        """Names of the loops that disappear."""
        return (self.loop,) if self.factor else (self.loop, self.tail)


@dataclass(frozen=True)
class StageLoops:
    """Loops of one tensor, all by name.

    roots: the loops before any split. cuts: splits and fusions, in the order in which they are applied. order: the
    resulting loops, the outermost first. kinds: (loop, kind) of those that are not serial. lanes: widths in which the
    innermost loop accumulates its sums (accumulate_lanes); () for none. at: the tensor and the loop of it inside which
    this tensor is computed; None: it has loops of its own.
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
        """Return a copy with another kind for one loop."""
        others = {entry for entry in self.kinds if entry[0] != loop}
        return replace(self, kinds=frozenset(others | ({(loop, kind)} if kind != "serial" else set())))

    def without_kinds(self, loops: tuple[str, ...]) -> StageLoops:
        """Return a copy without the kinds of `loops`, which no longer exist."""
        return replace(self, kinds=frozenset(entry for entry in self.kinds if entry[0] not in loops))

    def split_order(self) -> tuple[str, ...]:
        """Return the order of the loops after `cuts`, before any reordering."""
        order = list(self.roots)
        for cut in self.cuts:
            position = order.index(cut.loop)
            order[position : position + len(cut.old_loops)] = cut.new_loops
        return tuple(order)


@dataclass(frozen=True)
class KernelPlan:
    """A schedule of a kernel in normal form. stages: (name of a tensor, its loops) for all tensors that can change."""

    stages: tuple[tuple[str, StageLoops], ...]

    def __getitem__(self, stage: str) -> StageLoops:
        return dict(self.stages)[stage]

    def with_stage(self, stage: str, loops: StageLoops) -> KernelPlan:
        """Return the plan with other loops for one tensor."""
        return KernelPlan(tuple((name, loops if name == stage else old) for name, old in self.stages))

    @property
    def trace(self) -> Trace:
        """Primitives that turn the base schedule into this plan."""
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
        """Yield the steps that move tensors into a loop of their reader."""
        for stage, loops in self.stages:
            if loops.at is not None:
                yield TraceStep(stage, "compute_at", ({"stage": loops.at[0]}, loops.at[1]))

    @staticmethod
    def of(schedule: Schedule) -> KernelPlan:
        """Return the plan of a schedule that was made by splits, fusions, orders, kinds, lanes and compute_at."""
        stages = [(t.name, _loops_of(stage)) for t, stage in schedule.stages.items() if can_change(stage)]
        return KernelPlan(tuple(stages))


PRIMITIVE = {"unrolled": "unroll", "vectorized": "vectorize"}
"""Kind of a loop -> primitive of a Trace that sets it."""


def can_change(stage: Stage) -> bool:
    """Return whether rules may change the loops of a stage: not those of a scan, whose order is fixed."""
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
