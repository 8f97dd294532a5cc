"""Plans: schedules of kernels in a normal form, in which one decision can change while the others stay.

A plan says for each tensor how its loops are split, in which order and how they run, and where it is computed. Equal
plans give equal loop nests.

`neighbours` yields the plans that differ from a plan in one decision; each rule changes one kind of decision. A rule
knows nothing of operators. The plans that it yields may be impossible; kernel_space.estimate_plan drops those that the
schedule's own checks, `lower` or `verify` refuse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from celosia.compiler.expr import Reduce, Schedule, Stage, Tensor
from celosia.compiler.expr.nodes import Axis, Scan, loads, walk
from celosia.compiler.expr.schedule import Split, Trace, TraceStep
from celosia.compiler.target import target


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
        return Trace([*self._steps()])

    def _steps(self) -> Iterator[TraceStep]:
        """Yield the steps that split, reorder and annotate loops, then those that move tensors into their readers."""
        for stage, loops in self.stages:
            for cut in loops.cuts:
                yield TraceStep(stage, *cut.step)
            if loops.order != loops.split_order():
                yield TraceStep(stage, "reorder", loops.order)
            for loop, kind in sorted(loops.kinds):
                yield TraceStep(stage, PRIMITIVE[kind], (loop,))
            if loops.lanes:
                yield TraceStep(stage, "accumulate_lanes", (loops.order[-1], list(loops.lanes)))
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


# Rules ---------------------------------------------------------------------------------------------------------

TILE_FACTORS = (2, 3, 4, 6, 8)
"""Iterations of a loop that a register tile unrolls."""
BLOCK_FACTORS = (4, 8, 16, 32, 64, 128, 256)
"""Iterations of the inner loop where a loop is split for caches."""
MAX_UNROLLED = 16
"""Iterations of the longest loop that is unrolled completely."""
MAX_LISTED_FACTOR = 64
"""Limit up to which all divisors are tried as factors; beyond it only factors near the present one."""


@dataclass(frozen=True)
class PlannedStage:
    """The arguments of a rule: a plan, the schedule that it gives, and the name of one tensor, whose loops change."""

    plan: KernelPlan
    schedule: Schedule
    name: str

    @property
    def loops(self) -> StageLoops:
        """Loops of the tensor in the plan."""
        return self.plan[self.name]

    @property
    def axes(self) -> dict[str, Axis]:
        """Loops of the tensor in the schedule by name, the outermost first."""
        return {axis.name: axis for axis in self.schedule[self.name].order}

    @property
    def reduces(self) -> list[Reduce]:
        """Reductions in the body of the tensor."""
        return [node for node in walk(self.schedule[self.name].body) if isinstance(node, Reduce)]

    @property
    def is_ordered(self) -> bool:
        """Whether the sums of the tensor must keep their order."""
        return any(reduce.kind == "ordered_sum" for reduce in self.reduces)

    def extent(self, loop: str) -> int:
        """Return the extent of a loop of the tensor that exists, or that was split or fused."""
        stage = self.schedule[self.name]
        axes = [*stage.roots, *stage.order]
        axes += [axis for r in stage.relations for axis in vars(r).values() if isinstance(axis, Axis)]
        return next(axis.extent for axis in axes if axis.name == loop)

    def with_loops(self, loops: StageLoops) -> KernelPlan:
        """Return the plan with other loops for the tensor."""
        return self.plan.with_stage(self.name, loops)


Rule = Callable[[PlannedStage], Iterator[KernelPlan]]
"""Function that yields plans which differ in one decision for one tensor."""


def change_factors(view: PlannedStage) -> Iterator[KernelPlan]:
    """Yield plans with another factor of a split."""
    for position, cut in enumerate(view.loops.cuts):
        for factor in _other_factors(view.extent(cut.loop), cut.factor) if cut.factor else ():
            cuts = list(view.loops.cuts)
            cuts[position] = replace(cut, factor=factor)
            yield view.with_loops(replace(view.loops, cuts=tuple(cuts)))


def _other_factors(extent: int, current: int) -> list[int]:
    """Return factors for a loop other than the current one: small divisors of its extent, and nearby numbers."""
    divisors = {size for size in range(1, min(extent, MAX_LISTED_FACTOR) + 1) if extent % size == 0}
    similar = {current - 1, current + 1, current - 2, current + 2, current * 2, current // 2, current * 4, current // 4}
    return sorted(size for size in divisors | similar if 1 <= size <= extent and size != current)


def move_loops(view: PlannedStage) -> Iterator[KernelPlan]:
    """Yield plans with a loop moved to another position. A last loop in vectors or lanes stays last."""
    order = view.loops.order
    is_last_fixed = bool(view.loops.lanes) or (bool(order) and view.loops.kind(order[-1]) == "vectorized")
    movable = len(order) - is_last_fixed
    for source in range(movable):
        for destination in range(movable):
            if destination in (source, source - 1):  # an exchange of neighbours is yielded once, by the first of them
                continue
            reordered = list(order[:movable])
            reordered.insert(destination, reordered.pop(source))
            yield view.with_loops(replace(view.loops, order=(*reordered, *order[movable:])))


def add_register_tiles(view: PlannedStage) -> Iterator[KernelPlan]:
    """Yield plans with a few iterations of a loop unrolled innermost, in registers where there is a reduction."""
    for loops, (_, inner) in _split_variants(view, TILE_FACTORS):
        order = [loop for loop in loops.order if loop != inner]
        last = len(order) - (loops.kind(order[-1]) == "vectorized" or bool(loops.lanes))
        order.insert(last, inner)
        yield view.with_loops(replace(loops, order=tuple(order)).with_kind(inner, "unrolled"))


def split_loops(view: PlannedStage) -> Iterator[KernelPlan]:
    """Yield plans with a loop split, the outer part in place or outermost."""
    for loops, (outer, _) in _split_variants(view, BLOCK_FACTORS):
        yield view.with_loops(loops)
        yield view.with_loops(replace(loops, order=(outer, *(loop for loop in loops.order if loop != outer))))


def _split_variants(view: PlannedStage, factors: Sequence[int]) -> Iterator[tuple[StageLoops, tuple[str, str]]]:
    """Yield (loops with one split in place, names of the outer and inner part) for each loop longer than a factor."""
    for axis in _splittable_loops(view):
        for factor in factors:
            if axis.extent > factor:
                loops, inner = _split_loop(view.loops, axis, factor)
                yield loops, (f"{axis.name}.o", inner)


def _splittable_loops(view: PlannedStage) -> list[Axis]:
    """Return the loops that can be split: those that run serially, without a last loop whose sums use lanes."""
    last = view.loops.order[-1:] if view.loops.lanes else ()
    return [axis for name, axis in view.axes.items() if view.loops.kind(name) == "serial" and name not in last]


def _split_loop(loops: StageLoops, axis: Axis, factor: int) -> tuple[StageLoops, str]:
    """Split loop `axis` by a factor in place. Returns (the new loops, the name of the inner loop)."""
    tail = "guard" if axis.reduce else "shift"
    cut = LoopCut(axis.name, factor, tail)
    position = loops.order.index(axis.name)
    order = (*loops.order[:position], *cut.new_loops, *loops.order[position + 1 :])
    return replace(loops, cuts=(*loops.cuts, cut), order=order), cut.new_loops[1]


def undo_splits(view: PlannedStage) -> Iterator[KernelPlan]:
    """Yield plans with a split undone, the loop in the place of its outer or of its inner part."""
    loops = view.loops
    for position, cut in enumerate(loops.cuts):
        if not cut.factor or not set(cut.new_loops) <= set(loops.order):
            continue
        outer, inner = cut.new_loops
        for removed, remaining in ((inner, outer), (outer, inner)):
            order = tuple(cut.loop if loop == remaining else loop for loop in loops.order if loop != removed)
            cuts = (*loops.cuts[:position], *loops.cuts[position + 1 :])
            others = loops.without_kinds(cut.new_loops)
            yield view.with_loops(replace(others, cuts=cuts, order=order))


def fuse_loops(view: PlannedStage) -> Iterator[KernelPlan]:
    """Yield plans with two neighbouring loops fused, neither of them a reduction."""
    loops = view.loops
    for outer, inner in zip(loops.order, loops.order[1:]):
        if view.axes[outer].reduce or view.axes[inner].reduce or {loops.kind(outer), loops.kind(inner)} != {"serial"}:
            continue
        cut = LoopCut(outer, 0, inner)
        split = loops.split_order()
        if outer in split and split.index(outer) + 1 < len(split) and split[split.index(outer) + 1] == inner:
            position = loops.order.index(outer)
            order = (*loops.order[:position], *cut.new_loops, *loops.order[position + 2 :])
            yield view.with_loops(replace(loops, cuts=(*loops.cuts, cut), order=order))


def toggle_unrolling(view: PlannedStage) -> Iterator[KernelPlan]:
    """Yield plans with a short loop unrolled, or no longer unrolled."""
    for name, axis in view.axes.items():
        kind = view.loops.kind(name)
        if kind == "unrolled":
            yield view.with_loops(view.loops.with_kind(name, "serial"))
        elif kind == "serial" and 1 < axis.extent <= MAX_UNROLLED and not view.loops.lanes:
            yield view.with_loops(view.loops.with_kind(name, "unrolled"))


def change_vectorised_loop(view: PlannedStage) -> Iterator[KernelPlan]:
    """Yield plans with another loop vectorised, or with none."""
    current = next((name for name, kind in view.loops.kinds if kind == "vectorized"), None)
    plain = view.loops if current is None else view.loops.with_kind(current, "serial")
    if current is not None:
        yield view.with_loops(plain)
    if view.loops.lanes:
        return
    lanes = target().lanes(view.schedule[view.name].tensor.dtype)
    for axis in _splittable_loops(view):
        if axis.reduce or axis.extent < 4:
            continue
        for width in (lanes, 2 * lanes, 4 * lanes):
            loops, inner = _split_loop(plain, axis, min(width, axis.extent))
            order = (*(loop for loop in loops.order if loop != inner), inner)
            yield view.with_loops(replace(loops, order=order).with_kind(inner, "vectorized"))


def change_lanes(view: PlannedStage) -> Iterator[KernelPlan]:
    """Yield plans with the innermost reduction accumulated in another number of lanes, or without lanes."""
    if len(view.reduces) != 1 or any(kind == "vectorized" for _, kind in view.loops.kinds):
        return
    width = target().lanes(view.reduces[0].dtype)
    axis = view.axes[view.loops.order[-1]]
    if not axis.reduce:
        return
    for widths in ((), (width,), (2 * width, width), (4 * width, width), (8 * width, width), (4 * width, width, 4)):
        if widths != view.loops.lanes and all(lane_width <= axis.extent for lane_width in widths):
            yield view.with_loops(replace(view.loops, lanes=widths))


def change_attachment(view: PlannedStage) -> Iterator[KernelPlan]:
    """Yield plans with the tensor computed inside a loop of its only reader, or before it."""
    if view.loops.at is not None:
        yield view.with_loops(replace(view.loops, at=None))
    tensor = view.schedule.tensor(view.name)
    readers = _readers_of(view.schedule, tensor)
    if tensor in view.schedule.outputs or len(readers) != 1:
        return
    reader = readers[0].name
    for loop in dict(view.plan.stages)[reader].order if can_change(view.schedule[reader]) else ():
        if (reader, loop) != view.loops.at and view.plan[reader].kind(loop) == "serial":
            yield view.with_loops(replace(view.loops, at=(reader, loop)))


RULES: tuple[Rule, ...] = (
    change_factors,
    move_loops,
    add_register_tiles,
    split_loops,
    undo_splits,
    fuse_loops,
    toggle_unrolling,
    change_vectorised_loop,
    change_lanes,
    change_attachment,
)
"""Rules for a kernel on one thread."""


def neighbours(plan: KernelPlan, schedule: Schedule, rules: tuple[Rule, ...] = RULES) -> Iterator[KernelPlan]:
    """Yield plans that differ from `plan` in one decision. Sums that must keep their order keep it.

    schedule: that which `plan` gives.
    """
    for name, _ in plan.stages:
        view = PlannedStage(plan, schedule, name)
        for rule in rules:
            for other in rule(view):
                if other != plan and not (
                    view.is_ordered and _summation_order(view.plan, view) != _summation_order(other, view)
                ):
                    yield other


def _summation_order(plan: KernelPlan, view: PlannedStage) -> object:
    """Return a key that is equal for plans under which the tensor adds its terms in the same order."""
    loops = plan[view.name]
    roots = [axis.name for axis in view.schedule[view.name].roots if axis.reduce]
    return [loop for loop in loops.order if loop.split(".")[0] in roots], loops.lanes


def _readers_of(schedule: Schedule, tensor: Tensor) -> list[Tensor]:
    """Return the tensors whose bodies read `tensor`."""
    return [t for t, stage in schedule.stages.items() if any(read.tensor is tensor for read in loads(stage.body))]
