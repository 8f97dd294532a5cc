"""Search spaces of kernels: all plans that single changes lead to (Plans), or the schedules of a template.

A search sees indices with estimates, neighbours and features. Every point can be lowered, breaks no rule of the loop IR
and is short enough to compile. Only a trial shows its cost.

`Counts` are the features of a loop nest for the cost model; the estimate is a linear function of them. Everything is
counted in vectors. A load in unrolled loops counts once for each different address, so that register tiles have fewer
loads. Cache lines are loaded again where more data than a cache holds is touched between two uses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

from celosia.compiler.cpu.schedule.kernel_schedules import KernelWorkload, Knobs, schedule
from celosia.compiler.cpu.schedule.register_tiles import RegisterTile
from celosia.compiler.expr import INDEX, Alloc, Function, Load, Reduce, Schedule, Stmt, Tensor, Var, verify
from celosia.compiler.expr.affine import stride_along
from celosia.compiler.expr.loops import For, Let, Store, Update, children, exprs
from celosia.compiler.expr.nodes import Binary, Call, Cast, Expr, Select, walk
from celosia.compiler.expr.transform import COSTLY
from celosia.compiler.expr.verify import IRError
from celosia.compiler.program.dtypes import itemsize
from celosia.compiler.target import target
from celosia.compiler.tune.kernel_plan import RULES, KernelPlan, Rule, neighbours
from celosia.compiler.tune.search import Floats, Space

MAX_CODE = 1500
"""Limit of unrolled vector operations, because LLVM takes more than linear time for long blocks."""
NEIGHBOURS_PER_ASK = 24
"""Neighbours of a point that are checked each time a search asks for them."""
VECTOR_COUNTS = (1, 2, 4, 8)
"""Vectors that one iteration of a template's loop computes."""


def estimate_plan(workload: KernelWorkload, plan: KernelPlan, most_code: float = MAX_CODE) -> Counts | None:
    """Return the features of `plan`; None where it is illegal, or its code exceeds `most_code` operations."""
    try:
        counts = count_features(verify(workload.loops(workload.apply(plan.trace))))
    except (ValueError, IRError):
        return None
    return counts if counts.code <= most_code else None


class Plans:
    """A search space that grows from initial plans by rules. No lower bounds are known.

    begin: initial plans. The first is the compiler's own, which is point 0 even if its code is too long;
    `add_remaining_plans` adds the others. rules: yield the neighbours of a plan. seed: selects the neighbours that are
    checked.
    """

    def __init__(
        self, workload: KernelWorkload, begin: Iterable[KernelPlan], rules: Sequence[Rule] = RULES, seed: int = 0
    ) -> None:
        self.workload, self.rules, self.name = workload, tuple(rules), workload.name
        self.points: list[KernelPlan] = []
        self._counts: list[Counts] = []
        self._indices: dict[KernelPlan, int | None] = {}
        """Plan -> index; None where it is not in the space."""
        self._known_neighbours: dict[int, dict[int, None]] = {}
        self._rng = np.random.default_rng(seed)
        self._most_code = float("inf")
        self._remaining_plans = iter(begin)
        self.index(next(self._remaining_plans))
        self._most_code = max(MAX_CODE, 2 * self._counts[0].code)

    def add_remaining_plans(self) -> None:
        """Add the remaining initial plans, which takes a while. Later calls do nothing.

        A tuning calls it once a kernel gets trials, so that kernels without trials cost nothing.
        """
        for plan in self._remaining_plans:
            self.index(plan)

    def __len__(self) -> int:
        return len(self.points)

    def index(self, plan: KernelPlan) -> int | None:
        """Return the index of `plan`, which is added to the space if it is not in it; None where it cannot be tried."""
        if plan not in self._indices:
            counts = estimate_plan(self.workload, plan, self._most_code)
            self._indices[plan] = None if counts is None else len(self.points)
            if counts is not None:
                self.points.append(plan)
                self._counts.append(counts)
        return self._indices[plan]

    @property
    def base(self) -> Floats:
        """Estimated cycles of each point."""
        return np.array([counts.cost for counts in self._counts])

    @property
    def bounds(self) -> Floats:
        """[points] zeros: no lower bounds are known."""
        return np.zeros(len(self))

    @property
    def features(self) -> Floats:
        """[points, features], see `Counts`."""
        return np.array([counts.features for counts in self._counts])

    def neighbours(self, index: int) -> list[int]:
        """Return the neighbours of a point that are known, after checking some more."""
        known = self._known_neighbours.setdefault(index, {})
        plan = self.points[index]
        others = list(neighbours(plan, self.workload.apply(plan.trace), self.rules))
        for position in self._rng.permutation(len(others))[:NEIGHBOURS_PER_ASK]:
            if (other := self.index(others[position])) is not None:
                known[other] = None
        return list(known)

    def is_legal(self, index: int) -> bool:
        """Return True: all points of the space are legal."""
        return True

    def sample(self, count: int, rng: np.random.Generator) -> list[int]:
        """Return up to `count` different points, most of them one change away from another."""
        for _ in range(count):
            plan = self.points[rng.integers(len(self))]
            others = list(neighbours(plan, self.workload.apply(plan.trace), self.rules))
            if others:
                self.index(others[rng.integers(len(others))])
        return [int(index) for index in rng.permutation(len(self))[:count]]


# The template --------------------------------------------------------------------------------------------------


# The template -------------------------------------------------------------------------------------------------------


def template_space(workload: KernelWorkload) -> Space[KernelPlan]:
    """Build the space of the compiler's own schedule with another register tile or vector count for one tensor."""
    plans: dict[KernelPlan, tuple[Mapping[str, int | str], Counts]] = {}
    for knobs, schedule_ in _template_schedules(workload):
        plan = KernelPlan.of(schedule_)
        limit = MAX_CODE if plans else float("inf")
        if plan not in plans and (counts := estimate_plan(workload, plan, limit)) is not None:
            plans[plan] = knobs, counts
    counted = [counts for _, counts in plans.values()]
    return Space(
        workload.name, list(plans), lambda plan: plans[plan][0], np.array([counts.cost for counts in counted]),
        np.zeros(len(plans)), np.array([counts.features for counts in counted]).reshape(len(plans), -1),
    )  # fmt: skip


def initial_plans(workload: KernelWorkload, max_tiles: int = 16) -> Iterator[KernelPlan]:
    """Yield the compiler's own plan, then plans of the template, of each tensor those with the least work."""
    for _, schedule_ in _template_schedules(workload, max_tiles):
        yield KernelPlan.of(schedule_)


def _template_schedules(
    workload: KernelWorkload, max_tiles: int | None = None
) -> Iterator[tuple[Mapping[str, int | str], Schedule]]:  # fmt: skip
    """Yield the schedules of the template with their knobs; the compiler's own is the first.

    max_tiles: limit of the register tiles of each tensor, of which those with the least work are taken; None: all.
    """
    default = schedule(workload.outputs)
    no_choice: dict[str, int | str] = {
        "stage": "", "rows": "", "columns": "", "height": 0, "width": 0, "outside": "", "vectors": 1
    }  # fmt: skip
    yield no_choice, default
    for name in (tensor.name for tensor in default.stages):
        tiles: list[RegisterTile] = []

        def note_tiles(offered: list[RegisterTile], into: list[RegisterTile] = tiles) -> RegisterTile:
            """Keep the tiles between which the scheduler chooses, and choose the first."""
            into.extend(offered)
            return offered[0]

        schedule(workload.outputs, {name: Knobs(note_tiles)})
        for tile in tiles[:max_tiles]:
            knobs = {
                "stage": name, "rows": tile.rows, "columns": tile.columns, "height": tile.height, "width": tile.width,
                "outside": "rows" if tile.rows_outside else "columns",
            }  # fmt: skip
            yield no_choice | knobs, schedule(workload.outputs, {name: Knobs(lambda offered, tile=tile: tile)})  # type: ignore[misc]
        for vectors in () if tiles else VECTOR_COUNTS[1:]:
            yield (
                no_choice | {"stage": name, "vectors": vectors},
                schedule(workload.outputs, {name: Knobs(None, vectors)}),
            )


# Features and estimate -----------------------------------------------------------------------------------------


L1_BYTES = 32 << 10
"""Bytes of the first-level data cache."""
LINE_BYTES = 64
"""Bytes of a cache line."""
COSTLY_OPERATIONS = 16
"""Number of operations as which a function such as exp counts."""
FEATURE_CYCLES = (0.5, 0.5, 1.0, 1.0, 4.0, 12.0, 4.0)
"""Cycles of one unit of each of the first fields of Counts."""


@dataclass
class Counts:
    """Features of a loop nest.

    operations, loads, stores: executed, in vectors. iterations: of loops that are neither unrolled nor vectorised.
    lines, far_lines: cache lines that miss the first-level, and the second-level cache. spilled: vectors that do not
    fit the registers. registers: vectors of the largest local tensor. code: unrolled vector operations in the code.
    inner: iterations of the shortest innermost loop. statements: number of stores and updates.
    """

    operations: float = 0
    loads: float = 0
    stores: float = 0
    iterations: float = 0
    lines: float = 0
    far_lines: float = 0
    spilled: float = 0
    registers: float = 0
    code: float = 0
    inner: float = 1e9
    statements: float = 0

    @property
    def values(self) -> list[float]:
        """Values of all fields, in order."""
        return [float(value) for value in self.__dict__.values()]

    @property
    def cost(self) -> float:
        """Estimated cycles, a weighted sum of the first features."""
        return sum(weight * value for weight, value in zip(FEATURE_CYCLES, self.values)) + 1

    @property
    def features(self) -> Floats:
        """[fields], log(1 + count) of each field, for the cost model."""
        return np.log1p(np.array(self.values, np.float64))


def count_features(function: Function) -> Counts:
    """Return the features of a kernel's loop nest."""
    counts = Counts()
    _count(function.body, _Context(), counts)
    return counts


@dataclass(frozen=True)
class _Context:
    """The context of a statement.

    loops: around it, the outermost first. lets: for each variable of a Let the loop variables that it depends on.
    registers: local tensors, which live in registers.
    """

    loops: tuple[For, ...] = ()
    lets: dict[Var, frozenset[Var]] = field(default_factory=dict)
    registers: frozenset[Tensor] = frozenset()


def _count(stmt: Stmt, context: _Context, counts: Counts) -> None:
    """Add the features of a statement, and of those inside it, to `counts`."""
    if isinstance(stmt, For):
        inside = _Context((*context.loops, stmt), context.lets, context.registers)
        if _is_real_loop(stmt):
            counts.iterations += prod(loop.extent for loop in inside.loops if _is_real_loop(loop))
        _count(stmt.body, inside, counts)
        return
    if isinstance(stmt, Let):
        lets = {**context.lets, stmt.var: _variables(stmt.value, context.lets)}
        _count(stmt.body, _Context(context.loops, lets, context.registers), counts)
        return
    if isinstance(stmt, Alloc) and stmt.scope == "local":
        registers = stmt.tensor.nbytes / target().vector_bytes
        counts.registers = max(counts.registers, registers)
        context = _Context(context.loops, context.lets, context.registers | {stmt.tensor})
    if isinstance(stmt, Store | Update):
        _count_access(stmt, context, counts)
    for child in children(stmt):
        _count(child, context, counts)


def _is_real_loop(loop: For) -> bool:
    """Return whether a loop remains one in machine code, neither unrolled nor vectorised."""
    return loop.kind not in ("unrolled", "vectorized")


def _variables(e: Expr, lets: dict[Var, frozenset[Var]]) -> frozenset[Var]:
    """Return the loop variables on which an expression depends, also through those of a Let."""
    return frozenset().union(*(lets.get(n, frozenset((n,))) for n in walk(e) if isinstance(n, Var)))


def _count_access(stmt: Store | Update, context: _Context, counts: Counts) -> None:
    """Add the features of a store or update, and of the loads in it, to `counts`."""
    nodes = [node for e in exprs(stmt) for node in walk(e)]
    work = [n for n in nodes if isinstance(n, Binary | Call | Cast | Select | Reduce) and n.dtype != INDEX]
    operations = sum(COSTLY_OPERATIONS if isinstance(n, Call) and n.name in COSTLY else 1 for n in work)
    operations += isinstance(stmt, Update)
    loops = [loop for loop in context.loops if _is_real_loop(loop)]
    trips = prod(loop.extent for loop in loops)
    unrolled = [loop for loop in context.loops if loop.kind == "unrolled"]
    lanes = prod(loop.extent for loop in context.loops if loop.kind == "vectorized")
    widest = max(itemsize(dtype) for dtype in {stmt.tensor.dtype, *(n.dtype for n in work)})
    vectors = -(-lanes * widest // target().vector_bytes)
    copies = prod(loop.extent for loop in unrolled)
    counts.statements += 1
    counts.operations += trips * copies * vectors * operations
    counts.code += copies * vectors * max(operations, 1)
    counts.inner = min(counts.inner, loops[-1].extent if loops else 1)
    reads = list({n: None for n in nodes if isinstance(n, Load) and n.tensor not in context.registers})
    used = {read: frozenset().union(*(_variables(i, context.lets) for i in read.index)) for read in reads}
    live = vectors * copies if stmt.tensor in context.registers else 0.0
    for read in reads:
        distinct_loads = prod(loop.extent for loop in unrolled if loop.var in used[read])
        along = [loop for loop in context.loops if loop.kind == "vectorized" and loop.var in used[read]]
        if along and stride_along(read.tensor, read.index, along[-1].var) not in (0, 1):
            distinct_loads *= lanes
        elif along:
            distinct_loads *= vectors
        counts.loads += trips * distinct_loads
    if stmt.tensor not in context.registers:
        counts.stores += trips * copies * vectors * (2 if isinstance(stmt, Update) else 1)
    excess = max(0.0, live + 1 - target().registers)
    counts.spilled += trips * excess
    _count_cache_lines(reads, used, context, counts)


def _count_cache_lines(reads: list[Load], used: dict[Load, frozenset[Var]], context: _Context, counts: Counts) -> None:
    """Add the cache lines of `reads` that miss the first-level and the second-level cache to `counts`.

    used: the loop variables on which the index of each depends.
    """
    for size, name in ((L1_BYTES, "lines"), (target().cache_bytes // 2, "far_lines")):
        level = len(context.loops)
        while level and sum(_bytes_touched(read, used[read], context.loops[level - 1 :]) for read in reads) <= size:
            level -= 1
        reloads = prod(loop.extent for loop in context.loops[:level])
        lines = 0.0
        for read in reads:
            loads = prod(loop.extent for loop in context.loops[:level] if loop.var in used[read]) if level else 1
            inner = context.loops[level - 1] if level else None
            if inner is not None and inner.var not in used[read]:
                loads = reloads  # evicted before the next iteration needs it
            lines += loads * _bytes_touched(read, used[read], context.loops[level:]) / LINE_BYTES
        setattr(counts, name, getattr(counts, name) + lines)


def _bytes_touched(read: Load, used: frozenset[Var], loops: tuple[For, ...]) -> float:
    """Return the bytes of a tensor that a load touches during all iterations of `loops`.

    used: loop variables on which its index depends.
    """
    elements = prod(loop.extent for loop in loops if loop.var in used)
    return float(min(read.tensor.nbytes, elements * itemsize(read.tensor.dtype)))
