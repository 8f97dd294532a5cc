"""Estimate the clock at which an accelerator can run, from the longest paths of Yosys' netlist.

It is a static timing analysis with published delays of cells, and of nets by how many pins they drive. It is no
sign-off. Nothing is placed: it knows of no distance, no congestion, no columns of DSP blocks and block RAM, no skew,
and no copy of a register that drives too much, as Vivado makes them. It was not calibrated against Vivado.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from celosia.bitstreams.cells import FIGURES, PART, Arcs, Cell, arcs
from celosia.bitstreams.project import ProjectError
from celosia.bitstreams.synthesis import SynthesisError, netlist
from celosia.hw.boards.board import Board
from celosia.hw.boards.boards import BOARDS
from celosia.hw.boards.fpga import FPGAS
from celosia.hw.spec.config import PRESETS, Config

CAVEAT = "An estimate from Yosys' netlist and published delays, unplaced: compare designs with it. Vivado decides."
TOP = "celosia_scanned"
FAST = "fast_clk"
"""The port of the clock of twice the rate, where a design has one."""


@dataclass(frozen=True)
class Step:
    """A cell on a path: its kind, the signal that it drives, ns on the net to it and in it, and pins on its output."""

    cell: str
    signal: str
    net_ns: float
    cell_ns: float
    fan_out: int


@dataclass(frozen=True)
class Path:
    """The longest of the paths between registers of the same names but for numbers, `ends` of which there are.

    nets_ns: what of `ns` is on nets. levels: cells in which something is computed. fan_out: the most pins on one net.
    half: it has half a cycle, for one of its ends, or both, are in the clock of twice the rate. No path between the two
    is taken to have more.
    """

    start: str
    end: str
    ns: float
    nets_ns: float
    levels: int
    fan_out: int
    ends: int
    steps: tuple[Step, ...]
    half: bool = False


@dataclass(frozen=True)
class Timing:
    """Timing of a design. ns: the longest path, those that have half a cycle counting twice. ends: how many end at each
    number of whole ns. paths: the longest ones first. pumped: there is a clock of twice the rate."""

    ns: float
    ends: dict[int, int]
    paths: tuple[Path, ...]
    pumped: bool = False

    @property
    def mhz(self) -> float:
        """Clock whose period is the longest path."""
        return 1000 / self.ns


def known(board: Board) -> str:
    """Device of `board`, with its speed grade. ProjectError where its delays are not known."""
    if board.device.name != PART:
        alternatives = " or ".join(name for name, other in BOARDS.items() if other.device.name == PART)
        config = board.config.name if board.config.name in PRESETS else "FILE"
        raise ProjectError(
            f"delays of {board.device.name}, the device of {board.name}, are not known, only those of {PART}; "
            f"to compare Configs, take --board {alternatives} with --config {config}"
        )
    return f"{PART}{FIGURES['speed_grade']}"


def estimate(cfg: Config, paths: int = 20, say: Callable[[str], None] = lambda text: None) -> Timing:
    """Estimate the timing of the accelerator of `cfg` on an xc7z020 of speed grade -1: minutes, the netlist is kept on
    disk.

    Raises SynthesisError.
    """
    from celosia.bitstreams.scan import Scanned
    from celosia.hw.top import Accelerator
    from celosia.hw.verilog import convert

    device = FPGAS[PART]
    design = netlist(lambda: convert(Scanned(Accelerator(cfg)), TOP, platform=device.blocks), TOP, device, say)
    say("timing")
    return analyse(design, paths)


def analyse(module: Mapping[str, Any], paths: int = 20) -> Timing:
    """Analyse the timing of a module of Yosys' JSON. SynthesisError for a cell of no known delay or a loop without a
    register."""
    design = _Design(module)
    ends = sorted(design.ends(), key=lambda end: -end.cycle)
    if not ends:
        raise SynthesisError("the netlist has no path from a register to a register; report this")
    counts = Counter(int(end.cycle) for end in ends)
    return Timing(ends[0].cycle, dict(sorted(counts.items())), design.longest(ends, paths), bool(design.fast))


class _Arrival(NamedTuple):
    """Latest arrival at a net, on the path from net `start`, whose last step comes from net `before`."""

    ns: float
    levels: int
    start: int
    before: int | None
    net_ns: float
    cell_ns: float


class _End(NamedTuple):
    """The end of a path. from_fast: the register where the path begins is in the clock of twice the rate. half: it, or
    this end, is."""

    ns: float
    bit: int
    cell: str
    port: str
    net_ns: float
    from_fast: bool
    half: bool

    @property
    def cycle(self) -> float:
        """Cycle of the slower clock in ns that the path needs."""
        return 2 * self.ns if self.half else self.ns


_IGNORED = {"BUFG", "GND", "VCC", "$scopeinfo"}
_COMPUTES = re.compile(r"LUT|INV|RAM|SRL|DSP|CARRY")


class _Design:
    """A netlist, with the arrival time of each of its nets."""

    def __init__(self, module: Mapping[str, Any]) -> None:
        self.names = _names(module)
        self.cells: dict[str, Cell] = {}
        self.driver: dict[int, tuple[str, str]] = {}
        self.fan_out: Counter[int] = Counter()
        self._arcs: dict[str, Arcs] = {}
        unknown: Counter[str] = Counter()
        for name, row in module["cells"].items():
            if row["type"] in _IGNORED:
                continue
            self.cells[name] = cell = _cell(row)
            for port, bits in cell.outputs.items():
                self.driver |= {bit: (name, port) for bit in bits if isinstance(bit, int)}
            self.fan_out.update(bit for bits in cell.inputs.values() for bit in bits if isinstance(bit, int))
            try:
                self._arcs[name] = arcs(cell)
            except KeyError:
                unknown[cell.kind] += 1
        if unknown:
            kind, number = unknown.most_common(1)[0]
            raise SynthesisError(f"Yosys used {number} of cell {kind}, whose delay celosia does not know; report this")
        self._following: dict[int, list[tuple[str, str, int, float]]] = defaultdict(list)
        for name, arc in self._arcs.items():
            for port, bit, out, ns in arc.through:
                self._following[bit].append((name, port, out, ns))
        self._order = self._sorted()
        self.fast = self._clocked_by(module.get("ports", {}).get(FAST, {"bits": []})["bits"], module)
        self.arrivals = {fast: self._arrive(fast) for fast in ((False, True) if self.fast else (False,))}
        """Arrivals by the clock of the registers from which they come."""

    def _clocked_by(self, clock: list[int], module: Mapping[str, Any]) -> set[str]:
        """Cells whose clock is this port, also behind a buffer."""
        buffers = [row["connections"] for row in module["cells"].values() if row["type"] == "BUFG"]
        nets = {*clock, *(buffer["O"][0] for buffer in buffers if buffer["I"][0] in clock)}
        return {name for name, cell in self.cells.items() if any(nets & set(bits) for bits in cell.inputs.values())}

    def net(self, bit: int, to: str, port: str) -> float:
        """Delay in ns from the driver of a net to a port of cell `to`."""
        figures, (source, out) = FIGURES["net"], self.driver[bit]
        kind, target = self.cells[source].kind, self.cells[to].kind
        if out == "CO" and port == "CI":
            return float(figures["carry"])
        if out in ("PCOUT", "ACOUT", "BCOUT"):
            return float(figures["cascade"])
        if (target == "CARRY4" and port == "S" and kind.startswith("LUT")) or (
            target in ("MUXF7", "MUXF8") and port != "S"
        ):
            return 0.0  # wires within a slice
        is_only_load = target.startswith("FD") and port == "D" and self.fan_out[bit] == 1
        if is_only_load and re.match("LUT|CARRY|MUXF", kind):
            return float(figures["to_own_flip_flop"])
        return float(min(figures["most"], figures["base"] + figures["root"] * math.sqrt(self.fan_out[bit])))

    def _sorted(self) -> list[int]:
        """Nets in topological order: each after all that reach it."""
        missing = Counter(out for rows in self._following.values() for _, _, out, _ in rows)
        ready = [bit for bit in {*self.driver, *self._following} if not missing[bit]]
        order = []
        while ready:
            order.append(bit := ready.pop())
            for _, _, out, _ in self._following.get(bit, ()):
                missing[out] -= 1
                if not missing[out]:
                    ready.append(out)
        if looped := [bit for bit, number in missing.items() if number]:
            name = self.names.get(looped[0], str(looped[0]))
            raise SynthesisError(f"{len(looped)} nets are in loops without a register, {name} among them; report this")
        return order

    def _arrive(self, fast: bool) -> dict[int, _Arrival]:
        """Compute the latest arrival at each net from registers of one clock. fast: of that of twice the rate."""
        arrivals: dict[int, _Arrival] = {}
        for name, arc in self._arcs.items():
            for bit, ns in arc.launch if (name in self.fast) == fast else ():
                if bit not in arrivals or ns > arrivals[bit].ns:
                    arrivals[bit] = _Arrival(ns, 0, bit, None, 0.0, ns)
        for bit in self._order:
            if (here := arrivals.get(bit)) is None:
                continue
            for to, port, out, ns in self._following.get(bit, ()):
                net = self.net(bit, to, port)
                if out not in arrivals or here.ns + net + ns > arrivals[out].ns:
                    counts = bool(_COMPUTES.match(self.cells[to].kind)) and port != "CI"
                    arrivals[out] = _Arrival(here.ns + net + ns, here.levels + counts, here.start, bit, net, ns)
        return arrivals

    def ends(self) -> Iterator[_End]:
        """Yield the ends of all paths."""
        for name, arc in self._arcs.items():
            for port, bit, setup in arc.setup:
                for fast, arrivals in self.arrivals.items():
                    if (arrival := arrivals.get(bit)) is not None:
                        net = self.net(bit, name, port)
                        half = fast or name in self.fast
                        yield _End(arrival.ns + net + setup, bit, name, port, net, fast, half)

    def longest(self, ends: list[_End], number: int) -> tuple[Path, ...]:
        """Longest paths: of paths between registers of equal names but for numbers one."""
        first: dict[tuple[str, str], tuple[_End, str, str]] = {}
        count: Counter[tuple[str, str]] = Counter()
        for end in ends:
            source, _ = self.driver[self.arrivals[end.from_fast][end.bit].start]
            names = self._register(source), self._register(end.cell, end.port)
            key = re.sub(r"\d+", "#", names[0]), re.sub(r"\d+", "#", names[1])
            count[key] += 1
            if key not in first and len(first) < number:
                first[key] = end, *names
        return tuple(self._path(*end, count[key]) for key, end in first.items())

    def _path(self, end: _End, start: str, target: str, ends: int) -> Path:
        """Walk back from the end of a path to its start, and list its steps."""
        steps, bit, arrivals = [], end.bit, self.arrivals[end.from_fast]
        while True:
            at = arrivals[bit]
            kind = self.cells[self.driver[bit][0]].kind
            steps.append(Step(kind, self.names.get(bit, ""), at.net_ns, at.cell_ns, self.fan_out[bit]))
            if at.before is None:
                break
            bit = at.before
        nets = sum(step.net_ns for step in steps) + end.net_ns
        max_fan_out = max(step.fan_out for step in steps)
        levels = arrivals[end.bit].levels
        return Path(start, target, end.ns, nets, levels, max_fan_out, ends, tuple(reversed(steps)), end.half)

    def _register(self, name: str, port: str = "D") -> str:
        """Unit and signal of the register, memory or DSP block that a cell is; the port, where it is not the data of a
        register."""
        cell = self.cells[name]
        signal = next((self.names[bit] for bits in cell.outputs.values() for bit in bits if bit in self.names), None)
        if not name.startswith("$"):
            signal = re.sub(r"(\.\d+)+$", "", name.removeprefix("component."))
        signal = re.sub(r"\[\d+\]$", "", signal or cell.kind)
        return signal if cell.kind.startswith("FD") and port == "D" else f"{signal}.{port}" if port != "D" else signal


def _cell(row: Mapping[str, Any]) -> Cell:
    inputs, outputs = (
        {port: bits for port, bits in row["connections"].items() if row["port_directions"][port] == direction}
        for direction in ("input", "output")
    )
    return Cell(row["type"], row["parameters"], inputs, outputs)


def _names(module: Mapping[str, Any]) -> dict[int, str]:
    """Name of each net that has one of the design's; of several the shortest."""
    names: dict[int, str] = {}
    for name, row in module["netnames"].items():
        if "$" in name and not re.fullmatch(r"[\w.]+\$signal[\w.$]*", name):
            continue
        short = name.removeprefix("component.")
        for index, bit in enumerate(row["bits"]):
            if isinstance(bit, int) and (bit not in names or len(short) < len(re.sub(r"\[\d+\]$", "", names[bit]))):
                names[bit] = f"{short}[{index}]" if len(row["bits"]) > 1 else short
    return names
