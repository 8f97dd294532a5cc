"""Changes of one decision of a schedule: each rule is a small function from a plan to others beside it.

A rule knows nothing of operators. What it proposes may be impossible: the schedule's own checks, `lower` and `verify`
are the filter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from celosia.compiler.expr import Reduce, Schedule, Tensor
from celosia.compiler.expr.nodes import Axis
from celosia.compiler.expr.transform import loads
from celosia.compiler.expr.walk import walk
from celosia.compiler.target import target
from celosia.compiler.tune.kernels.plan import KernelPlan, LoopCut, StageLoops, can_change

TILES = (2, 3, 4, 6, 8)
"""Iterations of a loop that are written out."""
BLOCKS = (4, 8, 16, 32, 64, 128, 256)
MOST_UNROLLED = 16
UNLISTED = 64
"""Factors beyond this one are powers of two only."""


@dataclass(frozen=True)
class View:
    """One tensor of a plan and its schedule. axes: its loops by name."""

    plan: KernelPlan
    made: Schedule
    name: str

    @property
    def loops(self) -> StageLoops:
        """Those of the plan."""
        return self.plan[self.name]

    @property
    def axes(self) -> dict[str, Axis]:
        """Loops of the schedule by name, the outermost first."""
        return {axis.name: axis for axis in self.made[self.name].order}

    @property
    def reduces(self) -> list[Reduce]:
        """The reductions in its body."""
        return [node for node in walk(self.made[self.name].body) if isinstance(node, Reduce)]

    @property
    def ordered(self) -> bool:
        """Whether its sums have an order that counts."""
        return any(reduce.kind == "ordered_sum" for reduce in self.reduces)

    def extent(self, loop: str) -> int:
        """Extent of a loop that is there now or was cut."""
        stage = self.made[self.name]
        every = [*stage.roots, *stage.order]
        every += [axis for r in stage.relations for axis in vars(r).values() if isinstance(axis, Axis)]
        return next(axis.extent for axis in every if axis.name == loop)

    def new(self, loops: StageLoops) -> KernelPlan:
        """The plan with `loops` for this tensor."""
        return self.plan.with_stage(self.name, loops)


Rule = Callable[[View], Iterator[KernelPlan]]


def factors(view: View) -> Iterator[KernelPlan]:
    """Tiles of another size."""
    for number, cut in enumerate(view.loops.cuts):
        for factor in _sizes(view.extent(cut.loop), cut.factor) if cut.factor else ():
            cuts = list(view.loops.cuts)
            cuts[number] = replace(cut, factor=factor)
            yield view.new(replace(view.loops, cuts=tuple(cuts)))


def _sizes(extent: int, now: int) -> list[int]:
    divisors = {size for size in range(1, min(extent, UNLISTED) + 1) if extent % size == 0}
    near = {now - 1, now + 1, now - 2, now + 2, now * 2, now // 2, now * 4, now // 4}
    return sorted(size for size in divisors | near if 1 <= size <= extent and size != now)


def orders(view: View) -> Iterator[KernelPlan]:
    """A loop at another place. The last one stays where it is if it runs in vectors or lanes."""
    order = view.loops.order
    free = len(order) - (bool(view.loops.lanes) or (bool(order) and view.loops.kind(order[-1]) == "vectorized"))
    for source in range(free):
        for place in range(free):
            if place in (source, source - 1):  # the latter is what the former makes from the other side
                continue
            moved = list(order[:free])
            moved.insert(place, moved.pop(source))
            yield view.new(replace(view.loops, order=(*moved, *order[free:])))


def tiles(view: View) -> Iterator[KernelPlan]:
    """A few iterations of a loop written out inside all others, in registers where there is a reduction."""
    for loops, (_, inner) in _cuts(view, TILES):
        order = [loop for loop in loops.order if loop != inner]
        last = len(order) - (loops.kind(order[-1]) == "vectorized" or bool(loops.lanes))
        order.insert(last, inner)
        yield view.new(replace(loops, order=tuple(order)).with_kind(inner, "unrolled"))


def blocks(view: View) -> Iterator[KernelPlan]:
    """A loop in two: tiles outside all other loops, or where it was, their elements where it was."""
    for loops, (outer, _) in _cuts(view, BLOCKS):
        yield view.new(loops)
        yield view.new(replace(loops, order=(outer, *(loop for loop in loops.order if loop != outer))))


def _cuts(view: View, factors: Sequence[int]) -> Iterator[tuple[StageLoops, tuple[str, str]]]:
    """(with a loop in two, in its place; the two) for each loop that is longer than a factor."""
    for axis in _uncut(view):
        for factor in factors:
            if axis.extent > factor:
                loops, inner = _cut(view.loops, axis, factor)
                yield loops, (f"{axis.name}.o", inner)


def _uncut(view: View) -> list[Axis]:
    """Loops that can be cut: those that run in no special way."""
    last = view.loops.order[-1:] if view.loops.lanes else ()
    return [axis for name, axis in view.axes.items() if view.loops.kind(name) == "serial" and name not in last]


def _cut(loops: StageLoops, axis: Axis, factor: int) -> tuple[StageLoops, str]:
    """(with `axis` in two, in its place; the name of the inner one)."""
    tail = "guard" if axis.reduce else "shift"
    cut = LoopCut(axis.name, factor, tail)
    at = loops.order.index(axis.name)
    order = (*loops.order[:at], *cut.makes, *loops.order[at + 1 :])
    return replace(loops, cuts=(*loops.cuts, cut), order=order), cut.makes[1]


def joins(view: View) -> Iterator[KernelPlan]:
    """A loop in one that was in two."""
    loops = view.loops
    for number, cut in enumerate(loops.cuts):
        if not cut.factor or not set(cut.makes) <= set(loops.order):
            continue
        outer, inner = cut.makes
        for gone, stays in ((inner, outer), (outer, inner)):
            order = tuple(cut.loop if loop == stays else loop for loop in loops.order if loop != gone)
            cuts = (*loops.cuts[:number], *loops.cuts[number + 1 :])
            kept = loops.without(cut.makes)
            yield view.new(replace(kept, cuts=cuts, order=order))


def fused(view: View) -> Iterator[KernelPlan]:
    """Two neighbouring loops over elements as one."""
    loops = view.loops
    for outer, inner in zip(loops.order, loops.order[1:]):
        if view.axes[outer].reduce or view.axes[inner].reduce or {loops.kind(outer), loops.kind(inner)} != {"serial"}:
            continue
        cut = LoopCut(outer, 0, inner)
        uncut = loops.uncut()
        if outer in uncut and uncut.index(outer) + 1 < len(uncut) and uncut[uncut.index(outer) + 1] == inner:
            at = loops.order.index(outer)
            order = (*loops.order[:at], *cut.makes, *loops.order[at + 2 :])
            yield view.new(replace(loops, cuts=(*loops.cuts, cut), order=order))


def unrolled(view: View) -> Iterator[KernelPlan]:
    """A short loop written out, or no longer."""
    for name, axis in view.axes.items():
        kind = view.loops.kind(name)
        if kind == "unrolled":
            yield view.new(view.loops.with_kind(name, "serial"))
        elif kind == "serial" and 1 < axis.extent <= MOST_UNROLLED and not view.loops.lanes:
            yield view.new(view.loops.with_kind(name, "unrolled"))


def vectors(view: View) -> Iterator[KernelPlan]:
    """Another loop in vectors, or none."""
    now = next((name for name, kind in view.loops.kinds if kind == "vectorized"), None)
    plain = view.loops if now is None else view.loops.with_kind(now, "serial")
    if now is not None:
        yield view.new(plain)
    if view.loops.lanes:
        return
    lanes = target().lanes(view.made[view.name].tensor.dtype)
    for axis in _uncut(view):
        if axis.reduce or axis.extent < 4:
            continue
        for width in (lanes, 2 * lanes, 4 * lanes):
            loops, inner = _cut(plain, axis, min(width, axis.extent))
            order = (*(loop for loop in loops.order if loop != inner), inner)
            yield view.new(replace(loops, order=order).with_kind(inner, "vectorized"))


def lanes(view: View) -> Iterator[KernelPlan]:
    """A sum along its innermost loop in so many lanes, or in none."""
    if len(view.reduces) != 1 or any(kind == "vectorized" for _, kind in view.loops.kinds):
        return
    width = target().lanes(view.reduces[0].dtype)
    axis = view.axes[view.loops.order[-1]]
    if not axis.reduce:
        return
    for widths in ((), (width,), (2 * width, width), (4 * width, width), (8 * width, width), (4 * width, width, 4)):
        if widths != view.loops.lanes and all(each <= axis.extent for each in widths):
            yield view.new(replace(view.loops, lanes=widths))


def places(view: View) -> Iterator[KernelPlan]:
    """A tensor computed inside a loop of the one that reads it, or before it."""
    if view.loops.at is not None:
        yield view.new(replace(view.loops, at=None))
    tensor = view.made.tensor(view.name)
    readers = _readers(view.made, tensor)
    if tensor in view.made.outputs or len(readers) != 1:
        return
    reader = readers[0].name
    for loop in dict(view.plan.stages)[reader].order if can_change(view.made[reader]) else ():
        if (reader, loop) != view.loops.at and view.plan[reader].kind(loop) == "serial":
            yield view.new(replace(view.loops, at=(reader, loop)))


RULES: tuple[Rule, ...] = (factors, orders, tiles, blocks, joins, fused, unrolled, vectors, lanes, places)
"""Those of a kernel on one thread."""


def neighbours(plan: KernelPlan, made: Schedule, rules: tuple[Rule, ...] = RULES) -> Iterator[KernelPlan]:
    """Plans that differ from `plan`, whose schedule is `made`, in one decision."""
    for name, _ in plan.stages:
        view = View(plan, made, name)
        for rule in rules:
            for other in rule(view):
                if other != plan and not (view.ordered and _sums(view.plan, view) != _sums(other, view)):
                    yield other


def _sums(plan: KernelPlan, view: View) -> object:
    """The order in which a tensor adds up."""
    loops = plan[view.name]
    roots = [axis.name for axis in view.made[view.name].roots if axis.reduce]
    return [loop for loop in loops.order if loop.split(".")[0] in roots], loops.lanes


def _readers(made: Schedule, tensor: Tensor) -> list[Tensor]:
    return [t for t, stage in made.stages.items() if any(read.tensor is tensor for read in loads(stage.body))]
