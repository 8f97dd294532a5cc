"""Ways to look for the cheapest point of a space: they are asked what to try, and told what it cost.

    search = SEARCHES["descent"](space, np.random.default_rng(0))
    while numbers := search.ask(8):
        search.tell([(number, cost(space.points[number])) for number in numbers])

`ask` gives different points that were not tried before, and none once a search has ended. A cost of None is a trial
without one: it failed, or was given up. None of them knows what a point means.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from celosia.compiler.tune.choices import SEARCH_NAMES
from celosia.compiler.tune.cost_model import LEARNERS, CostModel
from celosia.compiler.tune.points import Floats, Searched

Costs = Sequence[tuple[int, float | None]]


class Search:
    """Base of all searches: what is known, and the best of it."""

    def __init__(self, space: Searched, rng: np.random.Generator) -> None:
        self.space, self.rng = space, rng
        self.known: dict[int, float] = {}
        self.asked: set[int] = set()

    @property
    def best(self) -> int | None:
        """The number of the cheapest point that was tried."""
        found = min(self.known, key=self.known.__getitem__, default=None)
        return None if found is None or math.isinf(self.known[found]) else found

    @property
    def lowest(self) -> float:
        """What it cost; inf where nothing is known."""
        return math.inf if self.best is None else self.known[self.best]

    def ask(self, count: int) -> list[int]:
        """Up to `count` points to try now."""
        chosen: list[int] = []
        for number in self.proposals(count):
            if len(chosen) == count:
                break
            if number not in self.asked:
                self.asked.add(number)
                if self.space.legal(number):
                    chosen.append(number)
                else:
                    self.known[number] = math.inf
        return chosen

    def tell(self, costs: Costs) -> None:
        """What points cost that were asked for, or others."""
        for number, cost in costs:
            self.asked.add(number)
            self.known[number] = math.inf if cost is None else cost

    def proposals(self, count: int) -> Iterable[int]:
        """Points in the order in which they should be tried; those that were asked for are left out."""
        raise NotImplementedError

    # How far from the best ---------------------------------------------------------------------------------------

    @property
    def bound(self) -> float:
        """No point that has not been tried costs less."""
        rest = np.ones(len(self.space), bool)
        rest[list(self.known)] = False
        return float(self.space.bounds[rest].min(initial=math.inf))

    @property
    def regret(self) -> float:
        """The most by which the best of the space can be better, as a share of it; 0 is a certificate that the best
        was found, inf where nothing is known."""
        if self.best is None:
            return math.inf
        return max(0.0, self.known[self.best] / self.bound - 1)


class Random(Search):
    """Any order."""

    def proposals(self, count: int) -> Iterable[int]:
        return self.space.sample(len(self.space), self.rng)


class Annealing(Search):
    """Chains that walk to a neighbour, always where it is cheaper and the less often the colder it is where not."""

    chains, hot, cooling = 4, 0.05, 0.9

    def __init__(self, space: Searched, rng: np.random.Generator) -> None:
        super().__init__(space, rng)
        self.at = space.sample(self.chains, rng)
        self.chain_of = {place: chain for chain, place in enumerate(self.at)}
        """The chain that wants to know what a point costs."""
        self.temperature = self.hot

    def proposals(self, count: int) -> Iterable[int]:
        if not self.asked:
            yield from self.at
        for _ in range(4 * count):
            for chain, place in enumerate(self.at):
                step = int(self.rng.choice(self.space.neighbours(place) or [place]))
                if step in self.known:
                    self._walk(chain, step)
                else:
                    self.chain_of[step] = chain
                    yield step
        yield from self.space.sample(len(self.space), self.rng)

    def tell(self, costs: Costs) -> None:
        super().tell(costs)
        self.temperature *= self.cooling
        for number, _ in costs:
            if number in self.chain_of:
                self._walk(self.chain_of.pop(number), number)

    def _walk(self, chain: int, to: int) -> None:
        here, there = self.known.get(self.at[chain], math.inf), self.known[to]
        worse = math.log(there / here) if math.isfinite(there) and math.isfinite(here) else there - here
        if not worse > 0 or self.rng.random() < math.exp(-worse / self.temperature):
            self.at[chain] = to


class Evolution(Search):
    """Neighbours of the fitter of two of the best points; some of neighbours."""

    population, mutation = 16, 0.85

    def proposals(self, count: int) -> Iterable[int]:
        if len(self.known) < self.population:
            yield from self.space.sample(self.population, self.rng)
        fit = sorted(self.known, key=self.known.__getitem__)[: self.population]
        for _ in range(8 * count if fit else 0):
            child = fit[min(self.rng.integers(0, len(fit), 2))]
            child = int(self.rng.choice(self.space.neighbours(child) or [child]))
            while self.rng.random() > self.mutation:
                child = int(self.rng.choice(self.space.neighbours(child) or [child]))
            yield child
        yield from self.space.sample(len(self.space), self.rng)


class Learning(Search):
    """A search by a model that learns from costs: its learner is ridge regression or boosted trees.

    Counts how many tries in a row have found nothing better; searches end after `patience` of them.
    """

    patience, worth = 32, 0.001

    def __init__(self, space: Searched, rng: np.random.Generator, model: CostModel | None = None) -> None:
        super().__init__(space, rng)
        self.model = model or CostModel()
        self.since = 0
        """Tries since the last that was better by `worth`."""

    def tell(self, costs: Costs) -> None:
        before = self.lowest
        super().tell(costs)
        for number, cost in costs:
            if cost is not None:
                self.model.learn(self.space, number, cost)
        better = self.lowest < before * (1 - self.worth)
        self.since = 0 if better else self.since + len(costs)

    def _expected(self) -> Floats:
        return np.maximum(self.model.expected(self.space), self.space.bounds)


class Descent(Learning):
    """The default: the best by the model, and what lies around the best that was found. Ends with a certificate, or
    where `patience` tries in a row have found nothing better."""

    close = 0.0
    """A regret that is good enough."""

    def proposals(self, count: int) -> Iterable[int]:
        if self.since >= self.patience or self.regret <= self.close:
            return
        expected = self._expected()
        promising = np.ones(len(self.space), bool)
        if self.best is not None:  # what a bound shows to be no better is not tried
            promising = self.space.bounds < self.known[self.best]
        order = [number for number in np.argsort(expected, kind="stable").tolist() if promising[number]]
        around = [] if self.best is None else self.space.neighbours(self.best)
        around = sorted((number for number in around if promising[number]), key=expected.__getitem__)
        half = [number for number in order if number not in self.asked][: -(-count // 2)]
        yield from (*half, *around, *order) if self.known else order


class Climb(Learning):
    """For spaces that grow: what lies around the best few points, by turns what the model expects to be cheapest and
    any. Ends where `patience` tries in a row have found nothing better."""

    width, worth = 3, 0.005

    def proposals(self, count: int) -> Iterable[int]:
        if not self.known:
            yield 0
        if self.since >= self.patience:
            return
        kept = sorted(self.known, key=self.known.__getitem__)[: self.width]
        around = list({number: None for each in kept for number in self.space.neighbours(each)})
        expected = self._expected()
        promising = sorted({*around, *np.argsort(expected, kind="stable")[:count].tolist()}, key=expected.__getitem__)
        promising = [number for number in promising if number not in self.asked]
        for likely, any_ in zip(promising, self.rng.permutation(around).tolist()):
            yield from (likely, any_)
        yield from np.argsort(expected, kind="stable").tolist()


_KINDS = (Descent, Climb, Evolution, Annealing, Random)
SEARCHES: dict[str, Callable[[Searched, np.random.Generator], Search]] = dict(zip(SEARCH_NAMES, _KINDS, strict=True))
"""By name; the first is the default."""


def check_names(search: str, learner: str) -> None:
    """ValueError for a search or a learner that there is not."""
    for name, known in ((search, SEARCHES), (learner, LEARNERS)):
        if name not in known:
            raise ValueError(f"there is no {name!r}; take {', '.join(known)}")


def begun(name: str, space: Searched, seed: int, model: CostModel) -> Search:
    """The search of this name over `space`; one that learns does so with `model`."""
    search = SEARCHES[name](space, np.random.default_rng(seed))
    if isinstance(search, Learning):
        search.model = model
    return search
