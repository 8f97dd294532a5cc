"""Search algorithms for the cheapest point of a space: `ask` returns points to try, `tell` takes what they cost.

    search = SEARCHES["descent"](space, np.random.default_rng(0))
    while numbers := search.ask(8):
        search.tell([(number, cost(space.points[number])) for number in numbers])

`ask` returns different points that were not tried before, and none once the search has ended. A cost of None means
that the trial failed or was given up. Searches know nothing of what a point means.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from celosia.compiler.tune.cost_model import LEARNERS, CostModel
from celosia.compiler.tune.search_space import Floats, SearchSpace
from celosia.compiler.tune.tuner_options import SEARCH_NAMES

Costs = Sequence[tuple[int, float | None]]
"""(index of a point, its cost; None where it has none)."""


class Search:
    """Base class of searches.

    known: cost of each point that was told, inf where it has none. asked: points that are not to be proposed again.
    """

    def __init__(self, space: SearchSpace, rng: np.random.Generator) -> None:
        self.space, self.rng = space, rng
        self.known: dict[int, float] = {}
        self.asked: set[int] = set()

    @property
    def best(self) -> int | None:
        """Index of the cheapest point that was tried; None where none has a cost."""
        best = min(self.known, key=self.known.__getitem__, default=None)
        return None if best is None or math.isinf(self.known[best]) else best

    @property
    def lowest(self) -> float:
        """Cost of the best point; inf where none has a cost."""
        return math.inf if self.best is None else self.known[self.best]

    def ask(self, count: int) -> list[int]:
        """Return up to `count` points to try now, none of them asked for before; [] ends the search."""
        selected: list[int] = []
        for index in self.proposals(count):
            if len(selected) == count:
                break
            if index not in self.asked:
                self.asked.add(index)
                if self.space.is_legal(index):
                    selected.append(index)
                else:
                    self.known[index] = math.inf
        return selected

    def tell(self, costs: Costs) -> None:
        """Learn the costs of points, whether they were asked for or not."""
        for index, cost in costs:
            self.asked.add(index)
            self.known[index] = math.inf if cost is None else cost

    def proposals(self, count: int) -> Iterable[int]:
        """Yield points in the order in which they should be tried; `ask` leaves out those it has returned before.

        count: number of points that `ask` needs, for searches that propose more on demand.
        """
        raise NotImplementedError

    # Distance from the optimum -----------------------------------------------------------------------------------

    @property
    def bound(self) -> float:
        """Lower bound of the cost of every point that has not been tried."""
        untried = np.ones(len(self.space), bool)
        untried[list(self.known)] = False
        return float(self.space.bounds[untried].min(initial=math.inf))

    @property
    def regret(self) -> float:
        """Share by which the best known cost may exceed the optimum; 0 proves it optimal, inf where nothing is
        known.
        """
        if self.best is None:
            return math.inf
        return max(0.0, self.known[self.best] / self.bound - 1)


class Random(Search):
    """Random search."""

    def proposals(self, count: int) -> Iterable[int]:
        """Yield all points in random order."""
        return self.space.sample(len(self.space), self.rng)


class Annealing(Search):
    """Simulated annealing with several chains, each of which walks to neighbours."""

    chains, hot, cooling = 4, 0.05, 0.9
    """Number of chains; first temperature, a share of the cost; factor of the temperature at each answer."""

    def __init__(self, space: SearchSpace, rng: np.random.Generator) -> None:
        super().__init__(space, rng)
        self.positions = space.sample(self.chains, rng)
        self.waiting_chain = {position: chain for chain, position in enumerate(self.positions)}
        """Point -> the chain that waits for its cost."""
        self.temperature = self.hot

    def proposals(self, count: int) -> Iterable[int]:
        """Yield a neighbour of each chain's position, then random points."""
        if not self.asked:
            yield from self.positions
        for _ in range(4 * count):
            for chain, position in enumerate(self.positions):
                neighbour = int(self.rng.choice(self.space.neighbours(position) or [position]))
                if neighbour in self.known:
                    self._walk(chain, neighbour)
                else:
                    self.waiting_chain[neighbour] = chain
                    yield neighbour
        yield from self.space.sample(len(self.space), self.rng)

    def tell(self, costs: Costs) -> None:
        """Learn costs, cool down, and move the chains that waited for them."""
        super().tell(costs)
        self.temperature *= self.cooling
        for index, _ in costs:
            if index in self.waiting_chain:
                self._walk(self.waiting_chain.pop(index), index)

    def _walk(self, chain: int, to: int) -> None:
        """Move a chain to point `to` if that is cheaper, else with a probability that falls with the temperature."""
        current, proposed = self.known.get(self.positions[chain], math.inf), self.known[to]
        worse = (
            math.log(proposed / current) if math.isfinite(proposed) and math.isfinite(current) else proposed - current
        )
        if not worse > 0 or self.rng.random() < math.exp(-worse / self.temperature):
            self.positions[chain] = to


class Evolution(Search):
    """Evolutionary search: mutations of the fitter of two of the best points."""

    population, mutation = 16, 0.85
    """Number of best points that have children; probability that a child is mutated only once."""

    def proposals(self, count: int) -> Iterable[int]:
        """Yield mutated points, then random ones."""
        if len(self.known) < self.population:
            yield from self.space.sample(self.population, self.rng)
        fittest = sorted(self.known, key=self.known.__getitem__)[: self.population]
        for _ in range(8 * count if fittest else 0):
            child = fittest[min(self.rng.integers(0, len(fittest), 2))]
            child = int(self.rng.choice(self.space.neighbours(child) or [child]))
            while self.rng.random() > self.mutation:
                child = int(self.rng.choice(self.space.neighbours(child) or [child]))
            yield child
        yield from self.space.sample(len(self.space), self.rng)


class Learning(Search):
    """Base class of searches by a cost model, which learns from each trial.

    It counts trials since the last improvement; searches end after `patience` of them.
    """

    patience, min_gain = 32, 0.001
    """Trials without improvement that end a search; share by which a cost must fall to be an improvement."""

    def __init__(self, space: SearchSpace, rng: np.random.Generator, model: CostModel | None = None) -> None:
        super().__init__(space, rng)
        self.model = model or CostModel()
        self.trials_since_gain = 0
        """Trials since the best cost last improved by the share `min_gain`."""

    def tell(self, costs: Costs) -> None:
        """Learn costs, and train the model with them."""
        before = self.lowest
        super().tell(costs)
        for index, cost in costs:
            if cost is not None:
                self.model.learn(self.space, index, cost)
        has_improved = self.lowest < before * (1 - self.min_gain)
        self.trials_since_gain = 0 if has_improved else self.trials_since_gain + len(costs)

    def _expected(self) -> Floats:
        """Return the cost of each point by the model, at least its lower bound."""
        return np.maximum(self.model.expected(self.space), self.space.bounds)


class Descent(Learning):
    """The default search: the best points by the model, and the neighbours of the best known point.

    It ends with a certificate of optimality, or after `patience` trials without improvement.
    """

    close_enough = 0.0
    """Regret at which the search ends."""

    def proposals(self, count: int) -> Iterable[int]:
        """Yield promising points by expected cost, with those around the best known point early."""
        if self.trials_since_gain >= self.patience or self.regret <= self.close_enough:
            return
        expected = self._expected()
        promising = np.ones(len(self.space), bool)
        if self.best is not None:  # points whose lower bound is no better than the best cost are not tried
            promising = self.space.bounds < self.known[self.best]
        order = [index for index in np.argsort(expected, kind="stable").tolist() if promising[index]]
        neighbours = [] if self.best is None else self.space.neighbours(self.best)
        neighbours = sorted((index for index in neighbours if promising[index]), key=expected.__getitem__)
        most_promising = [index for index in order if index not in self.asked][: -(-count // 2)]
        yield from (*most_promising, *neighbours, *order) if self.known else order


class Climb(Learning):
    """Search of spaces that grow: neighbours of the best few points, alternately by expected cost and at random.

    It ends after `patience` trials without improvement.
    """

    width, min_gain = 3, 0.005
    """Number of best points whose neighbours are tried; see Learning."""

    def proposals(self, count: int) -> Iterable[int]:
        """Yield point 0 first, then neighbours of the best few points."""
        if not self.known:
            yield 0
        if self.trials_since_gain >= self.patience:
            return
        best_points = sorted(self.known, key=self.known.__getitem__)[: self.width]
        neighbours = list({index: None for point in best_points for index in self.space.neighbours(point)})
        expected = self._expected()
        promising = sorted(
            {*neighbours, *np.argsort(expected, kind="stable")[:count].tolist()}, key=expected.__getitem__
        )
        promising = [index for index in promising if index not in self.asked]
        for likely, random_one in zip(promising, self.rng.permutation(neighbours).tolist()):
            yield from (likely, random_one)
        yield from np.argsort(expected, kind="stable").tolist()


_CLASSES = (Descent, Climb, Evolution, Annealing, Random)
"""In the order of SEARCH_NAMES."""
SEARCHES: dict[str, Callable[[SearchSpace, np.random.Generator], Search]] = dict(
    zip(SEARCH_NAMES, _CLASSES, strict=True)
)
"""Name -> search; the first is the default."""


def check_names(search: str, learner: str) -> None:
    """Raise ValueError unless SEARCHES has the name `search`, and LEARNERS the name `learner`."""
    for name, known in ((search, SEARCHES), (learner, LEARNERS)):
        if name not in known:
            raise ValueError(f"there is no {name!r}; take {', '.join(known)}")


def create_search(name: str, space: SearchSpace, seed: int, model: CostModel) -> Search:
    """Create the search of this name over `space`; a learning one uses `model`."""
    search = SEARCHES[name](space, np.random.default_rng(seed))
    if isinstance(search, Learning):
        search.model = model
    return search
