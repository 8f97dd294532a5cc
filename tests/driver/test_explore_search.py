"""The space of Configs, its searches and fronts are compared with results of exhaustive counting."""

from __future__ import annotations

import itertools
import math
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("moocore")

from celosia.driver.explore.configs import DEFAULT, ConfigSpace, SpaceError
from celosia.driver.explore.explorer import is_dominated
from celosia.driver.explore.pareto import hypervolume, knee, most_promising, on_front, ranks, reference_point
from celosia.driver.explore.search import LARGER, SEARCHES, ConfigOutcome, ConfigSearch, draw_spread_configs
from celosia.hw.boards.board import BoardError
from celosia.hw.boards.boards import find_board
from celosia.hw.spec.config import Config, ConfigError
from celosia.hw.spec.scratchpads import scratchpads

BOARD = find_board("pynq-z2")
VALUES = {
    "block_in": (4, 8, 16), "block_out": (4, 8, 16), "bus_bytes": (4, 8), "taps": (0, 3), "tap_depth": (64, 128),
    "forward": (False, True),
}  # fmt: skip


def possible(values: dict[str, tuple[int | bool, ...]]) -> set[Config]:
    """Return all valid Configs of these values; tap_depth does not vary without taps."""
    configs = set()
    for combination in itertools.product(*values.values()):
        fields = dict(zip(values, combination))
        if not fields["taps"]:
            fields["tap_depth"] = 64
        try:
            configs.add(replace(BOARD.config, **fields, name="custom"))
        except ConfigError:
            continue
    return configs


# The space --------------------------------------------------------------------------------------------------------


def test_a_space_holds_each_config_that_can_be_once() -> None:
    space = ConfigSpace(VALUES, BOARD.config)
    found = list(space)
    assert len(space) == math.prod(len(each) for each in VALUES.values()) == 144
    assert len(found) == len({cfg.digest for cfg in found}) and set(found) == possible(VALUES)
    assert all(cfg in space for cfg in found) and replace(found[0], bus_bytes=16) not in space
    without = replace(found[0], taps=0, tap_depth=128)  # the same hardware as with 64
    assert without not in space


def test_the_default_space_is_as_large_as_promised_and_knows_every_field() -> None:
    space = ConfigSpace.of(BOARD)
    assert len(space) > 10**10 and set(DEFAULT) <= {each.name for each in fields(Config)}
    assert max(space.values["bus_bytes"]) == 8 and max(ConfigSpace.of(find_board("ultra96")).values["bus_bytes"]) == 16
    assert {name for each in LARGER.values() for name in each} <= set(DEFAULT)
    assert space.nearest(BOARD.config) == BOARD.config


def test_neighbours_are_one_value_away_both_ways() -> None:
    space, rng = ConfigSpace.of(BOARD), np.random.default_rng(0)
    for _ in range(20):
        cfg = space.sample(rng)
        assert cfg is not None and cfg in space
        for name, step, other in space.neighbours(cfg):
            values = sorted(space.values[name])
            assert other in space and values.index(getattr(other, name)) == values.index(getattr(cfg, name)) + step
            rest = {each.name for each in fields(Config)} - {name, "tap_depth", "name"}
            assert all(getattr(cfg, each) == getattr(other, each) for each in rest)
            if name != "taps":
                assert space.move(other, {name: -step}) == cfg


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("depth = [1]", "unknown Config field 'depth' (did you mean 'wgt_depth'?); known are acc_depth"),
        ("name = 1", "unknown Config field 'name'"),
        ("block_in = []", "block_in has no values; give at least one, or leave it out"),
        (
            "block_in = [8, 12]",
            "the space has a value that no Config can have: block_in must be a power of two, not 12",
        ),
        ("taps = 17", "taps must be between 0 and 16, not 17"),
        ("forward = 1", "forward must be true or false, not 1"),
        ("bus_bytes = [8, 16]", "bus_bytes 16 is wider than a port of pynq-z2; take at most 8"),
        ("block_in = [", "is not valid TOML"),
        ("[block_in]\na = 1", "block_in cannot be {'a': 1}: it takes whole numbers"),
    ],
)
def test_wrong_spaces(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "space.toml").write_text(text)
    with pytest.raises(SpaceError) as error:
        ConfigSpace.of(BOARD, tmp_path / "space.toml")
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_space_that_is_not_there_and_a_board_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(SpaceError, match=r"space.*gone\.toml.*No such file"):
        ConfigSpace.of(BOARD, tmp_path / "gone.toml")
    with pytest.raises(BoardError, match=r"'nexys'.*pynq-z1, pynq-z2, ultra96"):
        find_board("nexys")


# Searches ---------------------------------------------------------------------------------------------------------


def judged(cfg: Config) -> ConfigOutcome:
    """Return two conflicting objectives; one Config of seven is invalid."""
    cycles = 1e6 / (cfg.block_in * cfg.block_out) ** 0.9 + 1e4 / cfg.bus_bytes - 50 * cfg.taps - 20 * cfg.forward
    area = cfg.block_in * cfg.block_out + 30 * cfg.taps + cfg.tap_depth / 64 + 10 * cfg.forward + cfg.bus_bytes
    good = int(cfg.digest[:2], 16) % 7 != 0
    return ConfigOutcome(cfg, (cycles, area) if good else None, {"gemm": 0.5, "load": 0.5} if good else {})


@pytest.mark.parametrize("kind", SEARCHES)
def test_a_search_asks_for_each_config_once_and_ends(kind: str) -> None:
    space = ConfigSpace(VALUES, BOARD.config)
    search = SEARCHES[kind](space, np.random.default_rng(1), draw_spread_configs(space, np.random.default_rng(2), 5))
    asked: list[Config] = []
    while found := search.ask(5):
        assert len(found) <= 5 and all(how for _, how in found)
        asked += [cfg for cfg, _ in found]
        search.tell([judged(cfg) for cfg, _ in found])
    assert len(asked) == len({cfg.digest for cfg in asked}) and set(asked) == possible(VALUES)


@pytest.mark.parametrize("kind", SEARCHES)
def test_a_search_does_not_ask_for_what_it_was_told(kind: str) -> None:
    space = ConfigSpace(VALUES, BOARD.config)
    known = list(space)[::2]
    search = SEARCHES[kind](space, np.random.default_rng(1))
    search.tell([judged(cfg) for cfg in known])
    found = [cfg for cfg, _ in search.ask(1000)]
    assert not set(found) & set(known) and len(found) == len(list(space)) - len(known)


WIDE = {
    "block_in": (4, 8, 16, 32, 64), "block_out": (4, 8, 16, 32, 64), "bus_bytes": (4, 8), "taps": (0,),
    "inp_depth": tuple(1 << n for n in range(8, 15)), "wgt_depth": tuple(1 << n for n in range(6, 14)),
    "tap_depth": (64,), "forward": (False,),
}  # fmt: skip


def limited(cfg: Config) -> ConfigOutcome:
    """Return objectives of a Config that products or loads limit; deeper scratchpads save loads."""
    gemm = 4e6 / (cfg.block_in * cfg.block_out)
    load = 1e5 / cfg.bus_bytes * (1 + (4096 / cfg.inp_depth) ** 0.7 + (2048 / cfg.wgt_depth) ** 0.7)
    area = cfg.macs_per_cycle + 10 * cfg.bus_bytes + cfg.inp_depth * cfg.block_in / 500 + cfg.wgt_depth / 5
    return ConfigOutcome(cfg, (max(gemm, load) + 0.1 * min(gemm, load), area), {"gemm" if gemm > load else "load": 1.0})


def test_searches_are_better_than_chance() -> None:
    """Searches reach more of the hypervolume than random draws, after 96 of 2,800 Configs, over ten seeds."""
    space = ConfigSpace(WIDE, BOARD.config)
    every = np.array([outcome.objectives for outcome in map(limited, space)])
    worst, mean_shares = reference_point(every), {}
    for kind in SEARCHES:
        shares = []
        for seed in range(10):
            rng = np.random.default_rng(seed)
            search: ConfigSearch = SEARCHES[kind](space, rng, draw_spread_configs(space, rng, 12))
            for _ in range(24):
                search.tell([limited(cfg) for cfg, _ in search.ask(4)])
            values = np.array([outcome.objectives for outcome in search.finished])
            shares.append(hypervolume(values, worst) / hypervolume(every, worst))
        mean_shares[kind] = float(np.mean(shares))
    assert mean_shares["bottleneck"] > mean_shares["nsga2"] > mean_shares["random"] + 0.02, mean_shares


def test_configs_to_begin_with_are_far_apart_and_fit() -> None:
    space, rng = ConfigSpace.of(BOARD), np.random.default_rng(0)
    found = draw_spread_configs(space, rng, 12, lambda cfg: cfg.block_in <= 16)
    assert len(set(found)) == 12 and all(cfg.block_in <= 16 for cfg in found)
    assert draw_spread_configs(space, rng, 12, lambda cfg: False) == []


# Fronts -----------------------------------------------------------------------------------------------------------


def better(a: np.ndarray, b: np.ndarray) -> bool:
    return bool((a <= b).all() and (a < b).any())


@pytest.mark.parametrize("columns", [1, 2, 3, 5])
def test_fronts_are_those_of_all_pairs(columns: int) -> None:
    rng = np.random.default_rng(columns)
    points = rng.integers(1, 9, (60, columns)).astype(float)
    found = points[on_front(points)]
    expected = {tuple(p) for p in points if not any(better(q, p) for q in points)}
    assert {tuple(p) for p in found} == expected and len(found) == len(expected)
    rank = ranks(points)
    assert all(rank[a] < rank[b] for a in range(60) for b in range(60) if better(points[a], points[b]))
    for point in points:
        assert is_dominated(found, list(point)) == any(better(q, point) for q in found)
    assert not is_dominated(np.zeros((0, columns)), [1.0] * columns)


def test_hypervolume_is_the_area_that_is_dominated() -> None:
    points = np.array([[2.0, 8], [4, 4], [8, 2], [8, 8]])
    worst = np.log([16.0, 16])
    corners = sorted((np.log2(x), np.log2(y)) for x, y in points[:3])
    area = sum((4 - x) * (high - y) for (x, y), high in zip(corners, [4, *(y for _, y in corners)]))
    assert hypervolume(points, worst) == pytest.approx(area * math.log(2) ** 2)
    assert hypervolume(np.zeros((0, 2)), worst) == 0


def test_promising_points_add_most() -> None:
    known = np.array([[10.0, 1], [1, 10]])
    expected = np.array([[11.0, 2], [2, 2], [5, 5], [9, 0.9]])
    assert most_promising(known, expected, np.log([20.0, 20]), 2) == [1, 3]
    assert most_promising(known, expected, np.log([20.0, 20]), 9)[0] == 1
    assert most_promising(np.zeros((0, 2)), expected, np.log([20.0, 20]), 1) == [1]
    assert knee([[1, 100], [2, 3], [100, 1]]) == 1


@pytest.mark.parametrize(("name", "limit"), [("block_in", "gemm"), ("block_out", "vector")])
def test_a_larger_array_may_have_scratchpads_of_as_many_bytes(name: str, limit: str) -> None:
    space, cfg = ConfigSpace.of(BOARD), replace(BOARD.config, block_in=32, forward=False)
    search = SEARCHES["bottleneck"](space, np.random.default_rng(0))
    search.tell([ConfigOutcome(cfg, (1.0, 1.0), {limit: 1.0})])
    found = [each for each, how in search.ask(60) if how == f"{limit}: {name}, the same bytes"]
    assert [getattr(each, name) for each in found] == [2 * getattr(cfg, name)]
    now, before = scratchpads(found[0]), scratchpads(cfg)
    assert all(now[name].bytes == pytest.approx(pad.bytes, rel=0.05) for name, pad in before.items()), (now, before)
