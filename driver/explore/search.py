"""Search strategies: `ask` proposes Configs, `tell` records their outcomes.

    search = SEARCHES["bottleneck"](space, np.random.default_rng(0))
    while proposals := search.ask(8):
        search.tell([ConfigOutcome(cfg, objectives(cfg), {"gemm": 1.0}) for cfg, how in proposals])

`ask` returns Configs of the space that are new to the search, each with the reason in a few words, and none once there
are no more. Searches know neither models nor how Configs are judged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, zip_longest

import numpy as np

from celosia.driver.choices import SEARCH_NAMES
from celosia.driver.explore.configs import MAX_DRAWS, ConfigSpace
from celosia.driver.explore.pareto import Floats, on_front, ranks
from celosia.hw.spec.config import Config
from celosia.hw.spec.scratchpads import scratchpads

LARGER = {
    "gemm": {"block_in": 1, "block_out": 1, "batch": 1, "taps": 1},
    "vector": {"block_out": 1, "taps": 1, "residual_cycles": -1, "batch": 1},
    "load": {"bus_bytes": 1, "ports": 1, "inp_depth": 1, "wgt_depth": 1, "vin_depth": 1, "forward": 1, "acc_depth": 1},
    "store": {"bus_bytes": 1, "forward": 1, "out_depth": 1},
    "latency": {"queue_depth": 1, "inp_depth": 1, "wgt_depth": 1, "acc_depth": 1, "out_depth": 1, "par_depth": 1,
                "lut_count": 1, "forward": 1, "bus_bytes": 1},
}  # fmt: skip
"""By the unit that limits a Config: the fields that make it faster, with 1 for larger values, -1 for smaller ones."""
Proposal = tuple[Config, str]
"""A Config, and why it is proposed."""


@dataclass(frozen=True)
class ConfigOutcome:
    """Outcome of a proposed Config.

    objectives: measured or, until then, estimated ones; None where the Config failed or does not fit. limits: by unit,
    the share of the models that it limits.
    """

    cfg: Config
    objectives: tuple[float, ...] | None
    limits: Mapping[str, float]


class ConfigSearch:
    """Base of all searches: keeps the Configs that were proposed, and their outcomes.

    A search overrides `proposals`. asked: digests of Configs that are not proposed again. known: outcomes by digest.
    """

    def __init__(self, space: ConfigSpace, rng: np.random.Generator, start: Sequence[Config] = ()) -> None:
        """Set up a search. start: Configs that are proposed first, if they are in the space."""
        self.space, self.rng = space, rng
        self.start = [cfg for cfg in start if cfg in space]
        self.asked: set[str] = set()
        self.known: dict[str, ConfigOutcome] = {}

    def ask(self, count: int) -> list[Proposal]:
        """Propose up to `count` new Configs: those of `start`, then `proposals`, then random ones, then any."""
        proposals: list[Proposal] = []
        first = ((cfg, "to begin with") for cfg in self.start)
        for cfg, origin in chain(first, self.proposals(count), self._random_configs(), self._all_configs()):
            if len(proposals) == count:
                break
            if cfg.digest not in self.asked:
                self.asked.add(cfg.digest)
                proposals.append((cfg, origin))
        return proposals

    def tell(self, outcomes: Sequence[ConfigOutcome]) -> None:
        """Record the outcomes of Configs, proposed here or not."""
        for outcome in outcomes:
            self.asked.add(outcome.cfg.digest)
            self.known[outcome.cfg.digest] = outcome

    def proposals(self, count: int) -> Iterator[Proposal]:
        """Yield Configs to try, the most promising first; `ask` leaves out those that it has proposed before."""
        return iter(())

    @property
    def finished(self) -> list[ConfigOutcome]:
        """Outcomes of Configs that did not fail."""
        return [outcome for outcome in self.known.values() if outcome.objectives is not None]

    def _random_configs(self) -> Iterator[Proposal]:
        """Yield up to 200 random Configs, for a search that has no proposals of its own."""
        for _ in range(200):
            if (cfg := self.space.sample(self.rng)) is not None:
                yield cfg, "at random"

    def _all_configs(self) -> Iterator[Proposal]:
        """Yield all Configs of a space that is small enough to enumerate, for when random draws give no new ones."""
        if len(self.space) <= 100_000:
            yield from ((cfg, "the rest") for cfg in self.space)


class RandomConfigs(ConfigSearch):
    """Random search: without proposals of its own."""


class Bottleneck(ConfigSearch):
    """Local search from the Configs on the front: larger fields that limit a Config, smaller fields that do not, or
    both.

    A tenth of the proposals are random, so that every part of the space can be reached.
    """

    def proposals(self, count: int) -> Iterator[Proposal]:
        """Yield the moves of each Config on the front in turn: first the best of each, then the second best."""
        good = self.finished
        if not good:
            return
        front = np.flatnonzero(on_front(_objective_matrix(good)))
        moves = [self._promising_moves(good[n]) for n in self.rng.permutation(front)]
        number = 0
        for move in chain.from_iterable(zip_longest(*moves)):
            if move is None:
                continue
            number += 1
            if number % 10 == 0 and (cfg := self.space.sample(self.rng)) is not None:
                yield cfg, "at random"
            yield move

    def _promising_moves(self, outcome: ConfigOutcome) -> Iterator[Proposal]:
        """Yield Configs a step or two from one Config, the most promising first.

        `up` has the fields that make the limiting units faster, `down` the others. Order: one field up, one up with
        shallower scratchpads, one down; then one up field back; both at once; two steps up.
        """
        cfg = outcome.cfg
        searched = set(self.space.searched)
        limits = sorted(outcome.limits, key=lambda name: -outcome.limits[name])
        faster = {
            name: (step, limit) for limit in reversed(limits) for name, step in LARGER[limit].items()
            if name in searched
        }  # fmt: skip
        up = [(name, *faster[name]) for name in self.rng.permutation(sorted(faster))]
        down = [name for name in self.rng.permutation(sorted(searched)) if name not in faster]
        one_up = ((self.space.move(cfg, {name: step}), f"{limit}: {name}") for name, step, limit in up)
        one_up_same_bytes = (
            (self._keep_scratchpad_bytes(cfg, name, step), f"{limit}: {name}, the same bytes")
            for name, step, limit in up
        )
        one_down = ((self.space.move(cfg, {name: step}), f"slack: {name}") for name in down for step in (-1, 1))
        up_and_down = (
            (self.space.move(cfg, {name: step, other: -1}), f"{limit}: {name}, slack: {other}")
            for name, step, limit in up for other in down
        )  # fmt: skip
        one_back = ((self.space.move(cfg, {name: -step}), f"less {name}") for name, step, _ in up)
        two_up = ((self.space.move(cfg, {name: 2 * step}), f"{limit}: {name} twice") for name, step, limit in up)
        nearest = chain.from_iterable(zip_longest(one_up, one_up_same_bytes, one_down, fillvalue=(None, "")))
        for moved, origin in chain(nearest, one_back, up_and_down, two_up):
            if moved is not None:
                yield moved, origin

    def _keep_scratchpad_bytes(self, cfg: Config, name: str, step: int) -> Config | None:
        """Move a field a step, and the depths of scratchpads whose entries become wider a step down: they take no more
        bytes, and so about as much block RAM, which often is what limits the device.

        None where no entry becomes wider, or there is no such Config.
        """
        wider = self.space.move(cfg, {name: step})
        if wider is None:
            return None
        before, after = scratchpads(cfg), scratchpads(wider)
        depths = {f"{pad}_depth" for pad in before if after[pad].width > before[pad].width} & set(self.space.searched)
        return self.space.move(cfg, {name: step} | dict.fromkeys(sorted(depths), -1)) if depths else None


class Nsga2(ConfigSearch):
    """NSGA-II (Deb and others, 2002): parents by tournaments of rank and crowding, fields crossed and mutated."""

    population = 32
    """Configs that may be parents."""

    def proposals(self, count: int) -> Iterator[Proposal]:
        """Yield children of parents that are chosen by rank, then by crowding distance."""
        good = self.finished
        if len(good) < 4:
            return
        values = _objective_matrix(good)
        rank = ranks(values)
        crowded = crowding_distance(values, rank)
        order = sorted(range(len(good)), key=lambda n: (rank[n], -crowded[n]))[: self.population]
        for _ in range(min(50 * count, 2000)):
            parents = [good[order[min(self.rng.choice(len(order), 2))]] for _ in range(2)]
            if (child := self._cross(*(parent.cfg for parent in parents))) is not None:
                yield child, "crossed"

    def _cross(self, one: Config, other: Config) -> Config | None:
        """Cross two Configs: each field is that of a random parent, or, as a mutation, a neighbouring value."""
        fields: dict[str, int | bool] = {}
        for name, values in self.space.values.items():
            value = getattr((one, other)[self.rng.integers(2)], name)
            if self.rng.random() < 1.5 / max(1, len(self.space.searched)):
                ordered = sorted(values)
                index = ordered.index(value) + int(self.rng.choice((-1, 1)))
                value = ordered[min(max(index, 0), len(ordered) - 1)]
            fields[name] = value
        return self.space.config(fields)


def crowding_distance(values: Floats, rank: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> Floats:
    """Return the crowding distance of each point within its rank (NSGA-II); infinite for the ends of an objective.

    values: [points, objectives].

    >>> crowding_distance(np.array([[1.0, 4], [2, 2], [4, 1]]), np.zeros(3, np.int64))
    array([inf,  2., inf])
    """
    distance = np.zeros(len(values))
    for front_rank in np.unique(rank):
        members = np.flatnonzero(rank == front_rank)
        for column in values[members].T:
            order = members[np.argsort(column, kind="stable")]
            ordered = np.sort(column)
            distance[order[[0, -1]]] = np.inf
            if (span := ordered[-1] - ordered[0]) > 0:
                distance[order[1:-1]] += (ordered[2:] - ordered[:-2]) / span
    return distance


def _objective_matrix(outcomes: Sequence[ConfigOutcome]) -> Floats:
    """Return the objectives of outcomes that have some, [outcomes, objectives]."""
    return np.array([outcome.objectives for outcome in outcomes], np.float64)


SEARCHES: dict[str, type[ConfigSearch]] = dict(zip(SEARCH_NAMES, (Bottleneck, Nsga2, RandomConfigs), strict=True))
"""Searches by name."""


def draw_spread_configs(
    space: ConfigSpace, rng: np.random.Generator, count: int, fits: Callable[[Config], bool] = lambda cfg: True
) -> list[Config]:  # fmt: skip
    """Draw `count` random Configs that fit, with which a search begins, far from each other.

    Each is the one of the remaining draws farthest from those before it.
    """
    drawn = (cfg for _ in range(MAX_DRAWS) if (cfg := space.sample(rng)) is not None and fits(cfg))
    remaining = list(dict.fromkeys(islice(drawn, 8 * count)))
    chosen, remaining = remaining[:1], remaining[1:]
    while remaining and len(chosen) < count:
        chosen.append(max(remaining, key=lambda cfg: min(_distance(space, cfg, other) for other in chosen)))
        remaining.remove(chosen[-1])
    return chosen


def _distance(space: ConfigSpace, one: Config, other: Config) -> float:
    """Return the distance of two Configs, by which `draw_spread_configs` spreads them.

    It is the sum over fields of the steps between their values, as a share of all steps.
    """
    total = 0.0
    for name in space.searched:
        values = sorted(space.values[name])
        total += abs(values.index(getattr(one, name)) - values.index(getattr(other, name))) / (len(values) - 1)
    return total
