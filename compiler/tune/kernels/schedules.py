"""Schedules of a kernel as a space to search: those of a template, or all that changes of single decisions lead to.

Both are seen by a search as numbers with expectations, neighbours and features. What is in a space can be lowered,
breaks no rule of the loop IR and is short enough to compile; what it costs, only a trial shows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from celosia.compiler.cpu.schedule.kernel_schedules import KernelWorkload
from celosia.compiler.cpu.schedule.register_tiles import RegisterTile
from celosia.compiler.cpu.schedule.vectorize import Knobs, schedule
from celosia.compiler.expr import Schedule, verify
from celosia.compiler.expr.verify import IRError
from celosia.compiler.tune.kernels.actions import RULES, Rule, neighbours
from celosia.compiler.tune.kernels.estimate import MOST_CODE, Counts, count
from celosia.compiler.tune.kernels.plan import KernelPlan
from celosia.compiler.tune.points import Floats, Space

AROUND = 24
"""Neighbours of a point that are looked at each time that a search asks for them."""
VECTORS = (1, 2, 4, 8)


def examined(workload: KernelWorkload, plan: KernelPlan, most_code: float = MOST_CODE) -> Counts | None:
    """What `plan` should cost; None where it cannot be followed, breaks a rule or takes too long to compile."""
    try:
        counts = count(verify(workload.loops(workload.apply(plan.trace))))
    except (ValueError, IRError):
        return None
    return counts if counts.code <= most_code else None


class Plans:
    """A space that grows: from the points that it begins with, by the rules. Nothing is known of what is the least.

    begin: the first of them is the compiler's own, and stays though it be too long; the others come with `fill`. seed:
    of which neighbours are looked at.
    """

    def __init__(
        self, workload: KernelWorkload, begin: Iterable[KernelPlan], rules: Sequence[Rule] = RULES, seed: int = 0
    ) -> None:
        self.workload, self.rules, self.name = workload, tuple(rules), workload.name
        self.points: list[KernelPlan] = []
        self._counts: list[Counts] = []
        self._numbers: dict[KernelPlan, int | None] = {}
        """None for what is not in the space."""
        self._around: dict[int, dict[int, None]] = {}
        self._rng = np.random.default_rng(seed)
        self._most_code = float("inf")
        self._rest = iter(begin)
        self.number(next(self._rest))
        self._most_code = max(MOST_CODE, 2 * self._counts[0].code)

    def fill(self) -> None:
        """Add what the space begins with, which takes a while."""
        for plan in self._rest:
            self.number(plan)

    def __len__(self) -> int:
        return len(self.points)

    def number(self, plan: KernelPlan) -> int | None:
        """Number of `plan`, which is added if it can be tried; else None."""
        if plan not in self._numbers:
            counts = examined(self.workload, plan, self._most_code)
            self._numbers[plan] = None if counts is None else len(self.points)
            if counts is not None:
                self.points.append(plan)
                self._counts.append(counts)
        return self._numbers[plan]

    @property
    def base(self) -> Floats:
        """What each point is expected to cost, in cycles."""
        return np.array([counts.cost for counts in self._counts])

    @property
    def bounds(self) -> Floats:
        """[points], 0: nothing is known."""
        return np.zeros(len(self))

    @property
    def features(self) -> Floats:
        """[points, features], see `Counts`."""
        return np.array([counts.features for counts in self._counts])

    def neighbours(self, number: int) -> list[int]:
        """Those that are known, and some more each time."""
        found = self._around.setdefault(number, {})
        plan = self.points[number]
        others = list(neighbours(plan, self.workload.apply(plan.trace), self.rules))
        for place in self._rng.permutation(len(others))[:AROUND]:
            if (other := self.number(others[place])) is not None:
                found[other] = None
        return list(found)

    def legal(self, number: int) -> bool:
        """All of them are."""
        return True

    def sample(self, count: int, rng: np.random.Generator) -> list[int]:
        """Up to `count` different points, most of them a few steps from another one."""
        for _ in range(count):
            plan = self.points[rng.integers(len(self))]
            others = list(neighbours(plan, self.workload.apply(plan.trace), self.rules))
            if others:
                self.number(others[rng.integers(len(others))])
        return [int(number) for number in rng.permutation(len(self))[:count]]


# The template -------------------------------------------------------------------------------------------------------


def template(workload: KernelWorkload) -> Space[KernelPlan]:
    """Tiles of registers and numbers of vectors for the tensor that costs the most, as the compiler arranges them."""
    found: dict[KernelPlan, tuple[Mapping[str, int | str], Counts]] = {}
    for knobs, made in _instances(workload):
        plan = KernelPlan.of(made)
        most = MOST_CODE if found else float("inf")
        if plan not in found and (counts := examined(workload, plan, most)) is not None:
            found[plan] = knobs, counts
    counted = [counts for _, counts in found.values()]
    return Space(
        workload.name, list(found), lambda plan: found[plan][0], np.array([counts.cost for counts in counted]),
        np.zeros(len(found)), np.array([counts.features for counts in counted]).reshape(len(found), -1),
    )  # fmt: skip


def _instances(
    workload: KernelWorkload, most: int | None = None
) -> Iterator[tuple[Mapping[str, int | str], Schedule]]:  # fmt: skip
    """The compiler's own is the first. most: tiles for each tensor, those with the least work; None: all."""
    own = schedule(workload.outputs)
    none: dict[str, int | str] = {
        "stage": "", "rows": "", "columns": "", "height": 0, "width": 0, "outside": "", "vectors": 1
    }  # fmt: skip
    yield none, own
    for name in (tensor.name for tensor in own.stages):
        tiles: list[RegisterTile] = []

        def first(offered: list[RegisterTile], into: list[RegisterTile] = tiles) -> RegisterTile:
            into.extend(offered)
            return offered[0]

        schedule(workload.outputs, {name: Knobs(first)})
        for tile in tiles[:most]:
            knobs = {
                "stage": name, "rows": tile.rows, "columns": tile.columns, "height": tile.height, "width": tile.width,
                "outside": "rows" if tile.rows_outside else "columns",
            }  # fmt: skip
            yield none | knobs, schedule(workload.outputs, {name: Knobs(lambda offered, tile=tile: tile)})  # type: ignore[misc]
        for vectors in () if tiles else VECTORS[1:]:
            yield none | {"stage": name, "vectors": vectors}, schedule(workload.outputs, {name: Knobs(None, vectors)})


def beginning(workload: KernelWorkload, most: int = 16) -> Iterator[KernelPlan]:
    """The compiler's own schedule, then those of the template with the least work."""
    for _, made in _instances(workload, most):
        yield KernelPlan.of(made)
