"""Search spaces of kernels: all plans that single changes lead to (Plans), or the schedules of a template.

A search sees indices with estimates, neighbours and features. Every point can be lowered, breaks no rule of the loop IR
and is short enough to compile. Only a trial shows its cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from celosia.compiler.cpu.schedule.kernel_schedules import KernelWorkload
from celosia.compiler.cpu.schedule.register_tiles import RegisterTile
from celosia.compiler.cpu.schedule.vectorize import Knobs, schedule
from celosia.compiler.expr import Schedule, verify
from celosia.compiler.expr.verify import IRError
from celosia.compiler.tune.kernels.kernel_cost import MAX_CODE, Counts, count_features
from celosia.compiler.tune.kernels.kernel_plan import KernelPlan
from celosia.compiler.tune.kernels.plan_changes import RULES, Rule, neighbours
from celosia.compiler.tune.search_space import Floats, Space

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


def initial_plans(workload: KernelWorkload, max_tiles: int = 16) -> Iterator[KernelPlan]:
    """Yield the compiler's own plan, then plans of the template, of each tensor those with the least work."""
    for _, schedule_ in _template_schedules(workload, max_tiles):
        yield KernelPlan.of(schedule_)
