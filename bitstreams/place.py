"""Places the cells of a netlist on a grid, so that nets have a length: to estimate the clock, not for a bitstream.

Cells are packed into places, then places are swapped at random, for the worse ever more seldom (simulated annealing:
Kirkpatrick, Gelatt, Vecchi, 1983), many pairs in one step of numpy. It begins with the two slowest vibrations of the
netlist as masses and springs (Hall, 1970), spread over the grid.

A place is what one switch box serves: two slices, so eight LUTs and sixteen flip-flops. A DSP block or a block RAM has
a place of its own anywhere, though a device has columns of them.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from celosia.bitstreams.cells import Cell

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Nets = Sequence[tuple[str, Sequence[str]]]
"""Of each net the cell that drives it, and those that read it."""

LUTS = 8
"""Of a place; for each there are two flip-flops."""
FILLED = 0.97
"""Share of the places of the grid that are taken."""
NEAR = 16
"""Nets of more readers say little of what belongs together."""
SPRING_STEPS = 300
AT_ONCE = 0.1
"""Share of the pairs at one distance that are swapped in one step, or not."""
COOLING = 0.005
"""Of the first temperature, the last one."""


def luts_of(kind: str) -> float:
    """What a cell takes of the LUTs of a place. That of a CARRY4 is taken by the LUTs before it."""
    if kind.startswith("FD"):
        return 0.5
    if re.match("DSP|RAMB", kind):
        return LUTS
    if re.match("RAM(32|64)M", kind):
        return 4
    if re.match("RAM|SRL", kind):
        return 2
    return 1 if re.match("LUT|INV", kind) else 0


def pack(cells: Mapping[str, Cell], nets: Nets) -> list[list[str]]:
    """The cells of each place: what wires within a slice join, then what shares the most nets with it."""
    groups = _joined(cells, nets)
    sizes = [min(LUTS, sum(luts_of(cells[name].kind) for name in group)) for group in groups]
    pull = _pull(groups, nets)
    places: list[list[int]] = []
    taken = [False] * len(groups)
    for first in range(len(groups)):
        if taken[first]:
            continue
        place, free, near = [first], LUTS - sizes[first], Counter(pull[first])
        taken[first] = True
        while near and free > 0:
            best = max(near, key=near.__getitem__)
            del near[best]
            if not taken[best] and sizes[best] <= free:
                taken[best], free = True, free - sizes[best]
                place.append(best)
                near.update(pull[best])
        places.append(place)
    return [[name for number in place for name in groups[number]] for place in _filled(places, sizes)]


def _joined(cells: Mapping[str, Cell], nets: Nets) -> list[list[str]]:
    """LUTs with the CARRY4 or MUXF that they lead to, and a flip-flop with what drives nothing else."""
    group = {name: [name] for name in cells}
    size = {name: luts_of(cell.kind) for name, cell in cells.items()}
    root = {name: name for name in cells}
    for driver, readers in nets:
        for reader in readers:
            kind, to = cells[driver].kind, cells[reader].kind
            within = to in ("CARRY4", "MUXF7", "MUXF8") and re.match("LUT|INV|MUXF7", kind)
            beside = to.startswith("FD") and re.match("LUT|CARRY|MUXF", kind)
            a, b = root[driver], root[reader]
            if a != b and len(readers) == 1 and (within or beside) and size[a] + size[b] <= LUTS:
                size[a] += size.pop(b)
                for name in group[b]:
                    root[name] = a
                group[a] += group.pop(b)
    return list(group.values())


def _pull(groups: Sequence[Sequence[str]], nets: Nets) -> list[Counter[int]]:
    member = {name: number for number, group in enumerate(groups) for name in group}
    pull: list[Counter[int]] = [Counter() for _ in groups]
    for driver, readers in nets:
        for reader in readers if len(readers) <= NEAR else ():
            a, b = member[driver], member[reader]
            if a != b:
                pull[a][b] += 1 / len(readers)  # type: ignore[assignment]
                pull[b][a] += 1 / len(readers)  # type: ignore[assignment]
    return pull


def _filled(places: Sequence[list[int]], sizes: Sequence[float]) -> list[list[int]]:
    """Places that follow each other in one, where they fit."""
    found: list[list[int]] = []
    free = 0.0
    for place in places:
        size = sum(sizes[number] for number in place)
        if size <= free:
            found[-1] += place
            free -= size
        else:
            found.append(list(place))
            free = LUTS - size
    return found


@dataclass(frozen=True)
class Wires:
    """Wires between places, by number: from the driver's to a reader's. weight: what a column of length costs."""

    source: Ints
    target: Ints
    weight: Floats


class Grid:
    """Places by number on a grid of tiles. x, y: of each place."""

    def __init__(self, places: int, wires: Wires, row_cost: float, seed: int = 0) -> None:
        """row_cost: of a row of length, over that of a column."""
        self.rng = np.random.default_rng(seed)
        self.width = self.height = max(2, math.ceil(math.sqrt(places / FILLED)))
        self.places, self.row_cost = places, row_cost
        self.x, self.y = self._spread(*self._springs(wires))
        self.at = np.full((self.width, self.height), -1)
        self.at[self.x, self.y] = np.arange(places)

    def _springs(self, wires: Wires) -> tuple[Floats, Floats]:
        """The second and third slowest vibrations, by repeated averaging over neighbours."""
        degree = np.bincount(wires.source, wires.weight, self.places) + np.bincount(
            wires.target, wires.weight, self.places
        )
        degree = np.maximum(degree, 1e-9)
        modes = [np.ones(self.places)]
        for _ in range(2):
            at = self.rng.standard_normal(self.places)
            for _ in range(SPRING_STEPS):
                for mode in modes:
                    at -= mode * (degree * mode @ at) / ((degree * mode @ mode) or 1.0)
                pulled = np.bincount(wires.source, wires.weight * at[wires.target], self.places)
                pulled += np.bincount(wires.target, wires.weight * at[wires.source], self.places)
                at = (at + pulled / degree) / 2
                at /= np.abs(at).max() or 1.0
            modes.append(at)
        return modes[1], modes[2]

    def _spread(self, u: Floats, v: Floats) -> tuple[Ints, Ints]:
        """As many in each column, in the order of `u`, within it in that of `v`."""
        x, y = np.empty(self.places, np.int64), np.empty(self.places, np.int64)
        for column, numbers in enumerate(np.array_split(np.argsort(u, kind="stable"), self.width)):
            rows = np.linspace(0, self.height - 1, len(numbers)).round().astype(np.int64)
            x[numbers], y[numbers[np.argsort(v[numbers], kind="stable")]] = column, rows
        return x, y

    def cost(self, wires: Wires) -> float:
        """Weighted length of all wires, in columns."""
        a, b = wires.source, wires.target
        length = np.abs(self.x[a] - self.x[b]) + self.row_cost * np.abs(self.y[a] - self.y[b])
        return float(wires.weight @ length)

    def anneal(self, wires: Wires, sweeps: int, heat: float) -> None:
        """Swap places. heat: of what a swap costs on the average, the first temperature."""
        ends = _Ends(wires, self.places)
        usual = heat * 2 * float(wires.weight.sum()) / max(1, self.places)
        for sweep in range(sweeps):
            part = sweep / sweeps
            reach = max(1, round((1 - part) ** 2 * min(self.width, self.height) / 3))
            for _ in range(round(1 / AT_ONCE)):
                self._step(ends, usual * COOLING**part, reach)

    def _step(self, ends: _Ends, temperature: float, reach: int) -> None:
        """Swap pairs at one distance: tiles in every other stripe with those in the stripe beside it."""
        dx, dy = (0, 0)
        while (dx, dy) == (0, 0):
            dx, dy = (int(d) for d in self.rng.integers(-reach, reach + 1, 2))
        columns, rows = np.meshgrid(np.arange(self.width), np.arange(self.height), indexing="ij")
        stripe = columns // abs(dx) if dx else rows // abs(dy)
        chosen = (stripe + self.rng.integers(2)) % 2 == 0
        chosen &= (columns + dx >= 0) & (columns + dx < self.width) & (rows + dy >= 0) & (rows + dy < self.height)
        chosen &= self.rng.random(chosen.shape) < AT_ONCE
        x, y = columns[chosen], rows[chosen]
        a, b = self.at[x, y], self.at[x + dx, y + dy]
        worse = self._moved(ends, a, dx, dy, b) + self._moved(ends, b, -dx, -dy, a)
        taken = worse < -temperature * np.log(self.rng.random(len(worse)))
        x, y, a, b = x[taken], y[taken], a[taken], b[taken]
        self.at[x, y], self.at[x + dx, y + dy] = b, a
        for moved, at_x, at_y in ((a, x + dx, y + dy), (b, x, y)):
            there = moved >= 0
            self.x[moved[there]], self.y[moved[there]] = at_x[there], at_y[there]

    def _moved(self, ends: _Ends, moved: Ints, dx: int, dy: int, swapped: Ints) -> Floats:
        """What it costs more if each of `moved` (-1: nothing) goes so far, and all others stay, but for the one that it
        is swapped with, to which its wires keep their length."""
        which, other, weight = ends.of(moved)
        x, y = self.x[moved[which]] - self.x[other], self.y[moved[which]] - self.y[other]
        longer = np.abs(x + dx) - np.abs(x) + self.row_cost * (np.abs(y + dy) - np.abs(y))
        longer[other == swapped[which]] = 0
        return np.asarray(np.bincount(which, weight * longer, len(moved)), np.float64)


class _Ends:
    """The wires of each place, from whichever end."""

    def __init__(self, wires: Wires, places: int) -> None:
        here = np.concatenate([wires.source, wires.target])
        order = np.argsort(here, kind="stable")
        self._other = np.concatenate([wires.target, wires.source])[order]
        self._weight = np.concatenate([wires.weight, wires.weight])[order]
        self._counts = np.bincount(here, minlength=places)
        self._starts = np.cumsum(self._counts) - self._counts

    def of(self, places: Ints) -> tuple[Ints, Ints, Floats]:
        """(which of `places`, the place at the other end, weight) of each wire; none of -1."""
        counts = np.where(places >= 0, self._counts[places], 0)
        which = np.repeat(np.arange(len(places)), counts)
        first = np.repeat(self._starts[places] - (np.cumsum(counts) - counts), counts)
        at = first + np.arange(len(which))
        return which, self._other[at], self._weight[at]
