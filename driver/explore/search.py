"""Search strategies: `ask` proposes Configs, `tell` records their outcomes.

    search = SEARCHES["bottleneck"](space, np.random.default_rng(0))
    while found := search.ask(8):
        search.tell([ConfigOutcome(cfg, objectives(cfg), {"gemm": 1.0}) for cfg, how in found])

`ask` gives Configs of the space that were never asked for or told of before, with a few words on why, and none once
there are no more. Nothing here knows what a model is, or how Configs are judged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice, zip_longest

import numpy as np

from celosia.driver.choices import SEARCH_NAMES
from celosia.driver.explore.configs import TRIES, ConfigSpace
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
"""By the limit of a Config, the fields that make it faster, and in which direction."""
Proposal = tuple[Config, str]


@dataclass(frozen=True)
class ConfigOutcome:
    """Outcome of a proposed Config. objectives: None where the Config is none that can be taken; expected ones, until
    it is measured. limits: which unit bounds it, for which share of the models."""

    cfg: Config
    objectives: tuple[float, ...] | None
    limits: Mapping[str, float]


class ConfigSearch:
    """Base of all searches: Configs that were asked for, and their outcomes."""

    def __init__(self, space: ConfigSpace, rng: np.random.Generator, start: Sequence[Config] = ()) -> None:
        """start: Configs that are asked for first."""
        self.space, self.rng = space, rng
        self.start = [cfg for cfg in start if cfg in space]
        self.asked: set[str] = set()
        self.known: dict[str, ConfigOutcome] = {}

    def ask(self, count: int) -> list[Proposal]:
        """Propose up to `count` new Configs."""
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
        """Yield Configs worth a look, the best first, known ones among them."""
        return iter(())

    @property
    def finished(self) -> list[ConfigOutcome]:
        """Outcomes with objectives."""
        return [outcome for outcome in self.known.values() if outcome.objectives is not None]

    def _random_configs(self) -> Iterator[Proposal]:
        """Yield random Configs, until most are known."""
        for _ in range(200):
            if (cfg := self.space.sample(self.rng)) is not None:
                yield cfg, "at random"

    def _all_configs(self) -> Iterator[Proposal]:
        """Yield all Configs of a space that is small enough to enumerate."""
        if len(self.space) <= 100_000:
            yield from ((cfg, "the rest") for cfg in self.space)


class RandomConfigs(ConfigSearch):
    """Random search."""


class Bottleneck(ConfigSearch):
    """Search from each Config on the front: more of what limits it, also for as many bytes, less of what does not, and
    both.

    A tenth are random ones, so that no part of the space is cut off.
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
        """Yield moves from one Config, the most promising first."""
        cfg = outcome.cfg
        searched = set(self.space.searched)
        limits = sorted(outcome.limits, key=lambda name: -outcome.limits[name])
        faster = {
            name: (step, limit) for limit in reversed(limits) for name, step in LARGER[limit].items()
            if name in searched
        }  # fmt: skip
        up = [(name, *faster[name]) for name in self.rng.permutation(sorted(faster))]
        down = [name for name in self.rng.permutation(sorted(searched)) if name not in faster]
        single = ((self.space.move(cfg, {name: step}), f"{limit}: {name}") for name, step, limit in up)
        same = (
            (self._keep_scratchpad_bytes(cfg, name, step), f"{limit}: {name}, the same bytes")
            for name, step, limit in up
        )
        less = ((self.space.move(cfg, {name: step}), f"slack: {name}") for name in down for step in (-1, 1))
        both = (
            (self.space.move(cfg, {name: step, other: -1}), f"{limit}: {name}, slack: {other}")
            for name, step, limit in up for other in down
        )  # fmt: skip
        back = ((self.space.move(cfg, {name: -step}), f"less {name}") for name, step, _ in up)
        far = ((self.space.move(cfg, {name: 2 * step}), f"{limit}: {name} twice") for name, step, limit in up)
        first = chain.from_iterable(zip_longest(single, same, less, fillvalue=(None, "")))
        for moved, origin in chain(first, back, both, far):
            if moved is not None:
                yield moved, origin

    def _keep_scratchpad_bytes(self, cfg: Config, name: str, step: int) -> Config | None:
        """Step a field, and shrink the depth of scratchpads whose entries become wider, so that they need no more room.

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
        """Cross two Configs: each field of either parent, and now and then a value beside it."""
        fields: dict[str, int | bool] = {}
        for name, values in self.space.values.items():
            value = getattr((one, other)[self.rng.integers(2)], name)
            if self.rng.random() < 1.5 / max(1, len(self.space.searched)):
                ordered = sorted(values)
                at = ordered.index(value) + int(self.rng.choice((-1, 1)))
                value = ordered[min(max(at, 0), len(ordered) - 1)]
            fields[name] = value
        return self.space.config(fields)


def crowding_distance(values: Floats, rank: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> Floats:
    """Crowding distance of each point within its rank (NSGA-II): in every objective; inf for those at the ends.

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
    return np.array([outcome.objectives for outcome in outcomes], np.float64)


SEARCHES: dict[str, type[ConfigSearch]] = dict(zip(SEARCH_NAMES, (Bottleneck, Nsga2, RandomConfigs), strict=True))


def draw_spread_configs(
    space: ConfigSpace, rng: np.random.Generator, count: int, fits: Callable[[Config], bool] = lambda cfg: True
) -> list[Config]:  # fmt: skip
    """Draw `count` random Configs that fit, each far from those before it."""
    drawn = (cfg for _ in range(TRIES) if (cfg := space.sample(rng)) is not None and fits(cfg))
    rest = list(dict.fromkeys(islice(drawn, 8 * count)))
    chosen, rest = rest[:1], rest[1:]
    while rest and len(chosen) < count:
        chosen.append(max(rest, key=lambda cfg: min(_changed_fields(space, cfg, other) for other in chosen)))
        rest.remove(chosen[-1])
    return chosen


def _changed_fields(space: ConfigSpace, one: Config, other: Config) -> float:
    """Number of fields in which two Configs differ, by steps."""
    total = 0.0
    for name in space.searched:
        values = sorted(space.values[name])
        total += abs(values.index(getattr(one, name)) - values.index(getattr(other, name))) / (len(values) - 1)
    return total
