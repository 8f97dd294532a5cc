"""Search for the cheapest point of a space: `ask` returns points to try, `tell` takes what they cost.

    search = SEARCHES["descent"](space, np.random.default_rng(0))
    while numbers := search.ask(8):
        search.tell([(number, cost(space.points[number])) for number in numbers])

`ask` returns different points that were not tried before, and none once the search has ended. A cost of None means
that the trial failed or was given up.

A point is a schedule; a knob is one of its decisions, such as a tile size. A search knows nothing of what a point
means: it sees indices of points, their neighbours, estimates and lower bounds (layer_space.py, kernel_space.py).

The cost model predicts the cost of a point as the estimate, corrected by what measurements have shown. The logarithm of
measured over estimated cost (or over the bound, where that is higher) is learned from features of points: by ridge
regression in numpy, or by gradient-boosted trees where xgboost is installed (`pip install "celosia[tune]"`).
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.tune.tuner_options import LEARNER_NAMES, SEARCH_NAMES

P = TypeVar("P")
"""Type of a point."""
Floats = NDArray[np.float64]


# Spaces --------------------------------------------------------------------------------------------------------


class SearchSpace(Protocol):
    """Interface of a space to a search: points by index, and arrays over these indices."""

    @property
    def base(self) -> Floats:
        """[points] estimated cost before anything is learned."""

    @property
    def bounds(self) -> Floats:
        """[points] lower bound of the cost; 0 where nothing is known."""

    @property
    def features(self) -> Floats:
        """[points, features] inputs of the cost model."""

    def __len__(self) -> int: ...
    def is_legal(self, index: int) -> bool:
        """Return whether the point should compile."""

    def sample(self, count: int, rng: np.random.Generator) -> list[int]:
        """Return `count` different indices at random."""

    def neighbours(self, index: int) -> list[int]:
        """Return the indices of points that differ in one decision."""


@dataclass(frozen=True, eq=False)
class Space(Generic[P]):
    """A search space with a list of points.

    name: for records and people. knobs: returns the decisions of a point by name; a string is a choice without order.
    predicted: estimated cost of each point. bounds: proved lower bound of its cost. features: of each point, for the
    cost model. allowed: an expensive constraint that is checked only for points that a search proposes; those that it
    refuses are never tried.
    """

    name: str
    points: Sequence[P]
    knobs: Callable[[P], Mapping[str, int | str]]
    predicted: Floats
    bounds: Floats
    features: Floats
    allowed: Callable[[P], bool] | None = None
    _allowed: dict[int, bool] = field(default_factory=dict, init=False, repr=False)
    """Cache of `is_legal`."""
    _neighbours: dict[int, list[int]] = field(default_factory=dict, init=False, repr=False)
    """Cache of `neighbours`."""

    def __len__(self) -> int:
        return len(self.points)

    def is_legal(self, index: int) -> bool:
        """Return whether the point may be tried."""
        if self.allowed is None:
            return True
        if index not in self._allowed:
            self._allowed[index] = self.allowed(self.points[index])
        return self._allowed[index]

    @cached_property
    def base(self) -> Floats:
        """Estimated cost of each point, raised to its lower bound where it is below."""
        return np.maximum(self.predicted, self.bounds)

    def index(self, point: P) -> int:
        """Return the index of `point`. Raises KeyError where it is not in the space."""
        return self._indices[point]

    def sample(self, count: int, rng: np.random.Generator) -> list[int]:
        """Return the indices of `count` different points, or of all."""
        return [int(i) for i in rng.permutation(len(self))[:count]]

    def neighbours(self, index: int) -> list[int]:
        """Return the nearest points on each side of each knob, with the other knobs equal if possible."""
        if index not in self._neighbours:
            self._neighbours[index] = self._nearest(index)
        return self._neighbours[index]

    def _nearest(self, index: int) -> list[int]:
        """Find the nearest point in each direction of each knob; for a choice, with each other value."""
        nearest: dict[int, None] = {}
        distances = self._positions - self._positions[index]
        total_distance = np.abs(distances).sum(axis=1)
        for knob, is_choice in enumerate(self._is_choice):
            sides = [distances[:, knob] < 0, distances[:, knob] > 0]
            if is_choice:
                sides = [self._positions[:, knob] == value for value in set(self._positions[:, knob])]
                sides = [side for side in sides if not side[index]]
            for side in sides:
                if side.any():
                    candidates = np.flatnonzero(side)
                    nearest[int(candidates[np.argmin(total_distance[candidates])])] = None
        return list(nearest)

    @cached_property
    def _indices(self) -> dict[P, int]:
        """Point -> its index."""
        return {point: index for index, point in enumerate(self.points)}

    @cached_property
    def _values(self) -> list[list[int | str]]:
        """The values of each knob that occur in points, sorted."""
        rows = [self.knobs(point) for point in self.points]
        return [sorted({row[name] for row in rows}) for name in (rows[0] if rows else {})]

    @cached_property
    def _is_choice(self) -> list[bool]:
        """Whether each knob has strings as values, which have no order."""
        return [isinstance(values[0], str) for values in self._values]

    @cached_property
    def _positions(self) -> NDArray[np.int64]:
        """[points, knobs]: the position of each point's value among the knob's values."""
        position_of = [{value: position for position, value in enumerate(values)} for values in self._values]
        rows = [
            [positions[value] for positions, value in zip(position_of, self.knobs(point).values())]
            for point in self.points
        ]
        return np.array(rows, np.int64)


# Cost model ----------------------------------------------------------------------------------------------------

Learner = Callable[[Floats, Floats], Callable[[Floats], Floats]]
"""Function that fits features [samples, features] to targets [samples]; it returns a function that predicts targets."""
RIDGE_PENALTY = 3.0
"""Shrinkage of ridge regression, for features of unit variance."""


class MissingLearner(ImportError):
    """xgboost is not installed; the message tells how to install it."""


def ridge(features: Floats, targets: Floats) -> Callable[[Floats], Floats]:
    """Fit a linear function of the features and their squares by ridge regression; a Learner."""
    wide = _with_squares(features)
    middle, scale = wide.mean(0), wide.std(0) + 1e-6
    x, mean = (wide - middle) / scale, targets.mean()
    weights = np.linalg.solve(x.T @ x + RIDGE_PENALTY * np.eye(x.shape[1]), x.T @ (targets - mean))
    low, high = targets.min() - np.ptp(targets), targets.max() + np.ptp(targets)  # limits of extrapolation
    return lambda others: np.clip((_with_squares(others) - middle) / scale @ weights + mean, low, high)


def _with_squares(features: Floats) -> Floats:
    """Return [samples, 2 * features]: the features, then their squares."""
    return np.concatenate([features, features**2], axis=1)


def trees(features: Floats, targets: Floats, rank: bool = False) -> Callable[[Floats], Floats]:
    """Fit gradient-boosted trees; a Learner. Raises MissingLearner.

    rank: learn only the order of targets, which `benchmarks/tune.py` compares with learning their values.
    """
    try:
        xgboost: Any = importlib.import_module("xgboost")
    except ImportError:
        raise MissingLearner('boosted trees need xgboost: pip install "celosia[tune]"') from None
    options: dict[str, Any] = {"max_depth": 4, "eta": 0.2, "nthread": 1, "seed": 0, "min_child_weight": 1}
    if rank:  # its default pairs are poor
        options |= {"objective": "rank:pairwise", "lambdarank_pair_method": "mean"}
        options |= {"lambdarank_num_pair_per_sample": 16, "lambdarank_normalization": False}
        data = xgboost.DMatrix(features, -targets, qid=np.zeros(len(targets), np.int64))
    else:
        data = xgboost.DMatrix(features, targets)
    booster = xgboost.train(options, data, num_boost_round=120)
    sign = -1.0 if rank else 1.0
    return lambda others: sign * booster.predict(xgboost.DMatrix(others)).astype(np.float64)


LEARNERS: dict[str, Learner] = dict(zip(LEARNER_NAMES, (ridge, trees), strict=True))
"""Name -> learner; the first is the default."""


class CostModel:
    """Predicts costs of points, learning from the trials of all spaces of one tuning.

    features, targets: of each trial. A target is the logarithm of measured over estimated cost.
    """

    def __init__(self, learner: Learner = ridge) -> None:
        self.learner = learner
        self.features: list[Floats] = []
        self.targets: list[float] = []
        self._predict: Callable[[Floats], Floats] | None = None

    def learn(self, space: SearchSpace, index: int, cost: float) -> None:
        """Add a trial: the measured cost of point `index` of `space`."""
        self.features.append(space.features[index])
        self.targets.append(float(np.log(cost / space.base[index])))
        self._predict = None

    def expected(self, space: SearchSpace) -> Floats:
        """Return the expected cost of each point of `space`; the estimate itself before two trials are known."""
        if len(self.targets) < 2:
            return space.base
        if self._predict is None:
            self._predict = self.learner(np.array(self.features), np.array(self.targets))
        return np.asarray(space.base * np.exp(self._predict(space.features)))


# Searches ------------------------------------------------------------------------------------------------------

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
    """Search of spaces that grow (kernel_space.py: proposed plans become points), from the best few points.

    It tries promising points and random neighbours of the best few in alternation. It ends after `patience` trials
    without improvement.
    """

    width, min_gain = 3, 0.005
    """Number of best points whose neighbours are tried; see Learning."""

    def proposals(self, count: int) -> Iterable[int]:
        """Yield point 0, the compiler's own, first. Then alternate between promising points and random neighbours.

        The random ones are neighbours of the best few points. All others follow by expected cost.
        """
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


SEARCHES: dict[str, Callable[[SearchSpace, np.random.Generator], Search]] = dict(
    zip(SEARCH_NAMES, (Descent, Climb, Evolution, Annealing, Random), strict=True)
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
