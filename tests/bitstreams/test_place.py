"""Places of cells: each one has one, no place holds too much, swaps cost what they say, and nets have a length."""

from __future__ import annotations

import random

import numpy as np
import pytest
from test_timing import Netlist

from celosia.bitstreams.cells import FIGURES, Cell
from celosia.bitstreams.place import LUTS, Grid, Wires, _Ends, luts_of, pack
from celosia.bitstreams.timing import _Design

ROW = 0.75


def random_netlist(seed: int) -> tuple[dict[str, Cell], list[tuple[str, list[str]]]]:
    rng = random.Random(seed)
    kinds = ["LUT6"] * 6 + ["FDRE"] * 6 + ["CARRY4", "RAM32M", "MUXF7", "DSP48E1", "RAMB36E1", "SRL16E"]
    cells = {f"c{number}": Cell(rng.choice(kinds), {}, {}, {}) for number in range(rng.randint(1, 120))}
    nets = [(name, sorted({rng.choice(list(cells)) for _ in range(rng.choice([1, 1, 2, 3, 40]))})) for name in cells]
    return cells, nets


@pytest.mark.parametrize("seed", range(20))
def test_each_cell_has_a_place_that_holds_it(seed: int) -> None:
    cells, nets = random_netlist(seed)
    places = pack(cells, nets)
    assert sorted(name for place in places for name in place) == sorted(cells)
    assert all(places)
    assert max(sum(luts_of(cells[name].kind) for name in place) for place in places) <= LUTS


def test_what_wires_within_a_slice_join_is_together() -> None:
    kinds = {"lut": "LUT4", "carry": "CARRY4", "flop": "FDRE", "other": "LUT2", "far": "FDRE"}
    cells = {name: Cell(kind, {}, {}, {}) for name, kind in kinds.items()} | {
        f"more{number}": Cell("LUT6", {}, {}, {}) for number in range(30)
    }
    nets = [("lut", ["carry"]), ("carry", ["flop"]), ("other", ["far", "flop"])]
    place_of = {name: number for number, names in enumerate(pack(cells, nets)) for name in names}
    assert place_of["lut"] == place_of["carry"] == place_of["flop"]


def random_wires(seed: int, places: int) -> Wires:
    rng = np.random.default_rng(seed)
    source = rng.integers(0, places, 4 * places)
    target = (source + rng.integers(1, places, 4 * places)) % places
    return Wires(source, target, rng.random(4 * places))


@pytest.mark.parametrize("seed", range(10))
def test_a_swap_costs_what_it_says(seed: int) -> None:
    """Each of a few swaps alone, against the whole length before and after."""
    rng = np.random.default_rng(seed)
    places = int(rng.integers(2, 30))
    wires = random_wires(seed, places)
    grid = Grid(places, wires, ROW, seed)
    for _ in range(10):
        a = int(rng.integers(places))
        x, y = int(rng.integers(grid.width)), int(rng.integers(grid.height))
        dx, dy = x - int(grid.x[a]), y - int(grid.y[a])
        b, before = int(grid.at[x, y]), grid.cost(wires)
        if a == b:
            continue
        ends = _Ends(wires, places)
        one, other = np.array([a]), np.array([b])
        said = grid._moved(ends, one, dx, dy, other) + grid._moved(ends, other, -dx, -dy, one)
        grid.at[grid.x[a], grid.y[a]], grid.at[x, y] = b, a
        grid.x[a], grid.y[a] = x, y
        if b >= 0:
            grid.x[b], grid.y[b] = x - dx, y - dy
        assert grid.cost(wires) - before == pytest.approx(float(said[0]))


@pytest.mark.parametrize("seed", range(3))
def test_no_two_in_one_tile_and_shorter_than_before(seed: int) -> None:
    """A grid of wires whose places are numbered at random comes out nearly as a grid."""
    side = 12
    number = np.random.default_rng(seed).permutation(side * side).reshape(side, side)
    source = np.concatenate([number[:, :-1].ravel(), number[:-1].ravel()])
    target = np.concatenate([number[:, 1:].ravel(), number[1:].ravel()])
    wires = Wires(source, target, np.ones(len(source)))
    grid = Grid(side * side, wires, ROW, seed)
    grid.anneal(wires, 200, 0.5)
    assert len({*zip(grid.x.tolist(), grid.y.tolist())}) == side * side
    assert (grid.at[grid.x, grid.y] == np.arange(side * side)).all()
    at_random = side * (1 + ROW) / 3  # columns of a wire between two places drawn at random, on the average
    assert grid.cost(wires) / len(source) < at_random / 2


@pytest.mark.parametrize("places", [1, 2, 3])
def test_few_places(places: int) -> None:
    empty = np.zeros(0, np.int64)
    wires = Wires(empty, empty, np.zeros(0))
    grid = Grid(places, wires, ROW)
    grid.anneal(wires, 5, 0.5)
    assert grid.cost(wires) == 0


def test_a_net_takes_what_its_length_says() -> None:
    design = Netlist()
    middle = design.lut(design.register("x", "component.load.first"))
    design.register(middle, "component.store.last")
    design.register(middle, "component.store.other")
    placed = _Design({"cells": design.cells, "netnames": design.names})
    first, lut, last, other = placed.cells
    figures = FIGURES["placed"]
    placed.at = {first: (0, 0), lut: (3, 4), last: (3, 4), other: (10, 0)}
    placed.arrivals = placed._arrive()
    way = figures["base"] + 3 * figures["column"] + 4 * figures["row"]
    before = 0.478 + figures["pins"] + figures["factor"] * way + 0.124
    near = before + figures["pins"] + figures["factor"] * figures["within"] + 0.06
    far = figures["base"] + 7 * figures["column"] + 4 * figures["row"]
    ends = sorted(end.ns for end in placed.ends())
    assert ends == pytest.approx([near, before + figures["pins"] + figures["factor"] * far + 0.06])
    slack, longest = placed._slack()
    assert longest == ends[-1] and slack[middle, last] == pytest.approx(ends[1] - ends[0])
    assert slack[middle, other] == pytest.approx(0) and min(slack.values()) == pytest.approx(0)


@pytest.mark.parametrize("seed", range(2))
def test_rounds_leave_the_best(seed: int) -> None:
    rng, design = random.Random(seed), Netlist()
    bits = [design.register("x", f"start{number}") for number in range(40)]
    for _ in range(150):
        bits.append(design.lut(*rng.sample(bits[-40:], k=4)))
    for number, bit in enumerate(bits[-40:]):
        design.register(bit, f"end{number}")
    found = design.analyse(rounds=3)
    assert len(found.rounds) == 3 and found.ns == pytest.approx(min(found.rounds))
    assert "placed roughly" in found.caveat and "nothing placed" in design.analyse().caveat
