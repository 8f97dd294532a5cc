"""Estimate of the clock of an accelerator: static timing analysis of Yosys' netlist, before placement.

The analysis uses published delays of cells; the delay of a net depends on the number of pins that it drives. It is no
sign-off. Without placement it knows no distances, no congestion, no columns of DSP blocks and block RAM, no skew, and
no duplication of registers with a large fan-out, as Vivado does it. It was not calibrated against Vivado.
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
"""Sentence that accompanies every estimate."""
TOP = "celosia_scanned"
"""Name of the top module: the accelerator between shift registers, see `scan.Scanned`."""
FAST_CLOCK_PORT = "fast_clk"
"""Port of the clock of twice the rate, in designs with pump = 2."""


@dataclass(frozen=True)
class PathStep:
    """A cell on a path.

    cell : its kind.
    signal : the signal that it drives.
    net_ns, cell_ns : delay of the net to the cell, and of the cell.
    fan_out : pins that its output drives.
    """

    cell: str
    signal: str
    net_ns: float
    cell_ns: float
    fan_out: int


@dataclass(frozen=True)
class TimingPath:
    """Longest path of a bundle: of all paths between registers whose names differ only in numbers.

    start, end : names of the first and the last register.
    ns : delay of the path.
    nets_ns : the part of `ns` on nets.
    levels : logic levels, the cells that compute.
    fan_out : largest number of pins on a net of the path.
    ends : number of paths in the bundle.
    steps : the cells of the path.
    half : the path has half a cycle, as one or both of its registers have the clock of twice the rate.
    """

    start: str
    end: str
    ns: float
    nets_ns: float
    levels: int
    fan_out: int
    ends: int
    steps: tuple[PathStep, ...]
    half: bool = False


@dataclass(frozen=True)
class Timing:
    """Timing of a design.

    ns : delay of the longest path; a path with half a cycle counts twice.
    ends : number of paths by their delay in whole ns.
    paths : the longest paths, longest first.
    pumped : the design has a clock of twice the rate.
    """

    ns: float
    ends: dict[int, int]
    paths: tuple[TimingPath, ...]
    pumped: bool = False

    @property
    def mhz(self) -> float:
        """Clock in MHz whose period is the longest path."""
        return 1000 / self.ns


def timed_device(board: Board) -> str:
    """Return the device of `board` with the speed grade of the delays. ProjectError if its delays are not known."""
    if board.device.name != PART:
        others = " or ".join(name for name, other in BOARDS.items() if other.device.name == PART)
        config = board.config.name if board.config.name in PRESETS else "FILE"
        raise ProjectError(
            f"delays of {board.device.name}, the device of {board.name}, are not known, only those of {PART}; "
            f"to compare Configs, take --board {others} with --config {config}"
        )
    return f"{PART}{FIGURES['speed_grade']}"


def estimate(cfg: Config, paths: int = 20, say: Callable[[str], None] = lambda text: None) -> Timing:
    """Estimate the timing of the accelerator of `cfg` on an xc7z020 of speed grade -1.

    paths: number of paths to list. say: called with the progress. Synthesis takes minutes the first time; the cache
    keeps the netlist. Raises SynthesisError.
    """
    from celosia.bitstreams.scan import Scanned
    from celosia.hw.top import Accelerator
    from celosia.hw.verilog import convert

    device = FPGAS[PART]
    module = netlist(lambda: convert(Scanned(Accelerator(cfg)), TOP, platform=device.blocks), TOP, device, say)
    say("timing")
    return analyse(module, paths)


def analyse(module: Mapping[str, Any], paths: int = 20) -> Timing:
    """Analyse the timing of a module of Yosys' JSON.

    paths: number of paths to list. SynthesisError for a cell of unknown delay, or a loop without a register.
    """
    design = _TimingGraph(module)
    ends = sorted(design.ends(), key=lambda end: -end.cycle)
    if not ends:
        raise SynthesisError("the netlist has no path from a register to a register; report this")
    counts = Counter(int(end.cycle) for end in ends)
    return Timing(ends[0].cycle, dict(sorted(counts.items())), design.longest(ends, paths), bool(design.fast))


class _Arrival(NamedTuple):
    """Latest arrival of a value at a net, and the path on which it comes.

    ns : time since the clock's edge.
    levels : logic levels on the path.
    start : first net of the path, a register's output.
    before : net before this one on the path; None at the start.
    net_ns, cell_ns : delays of the last net and the last cell of the path.
    """

    ns: float
    levels: int
    start: int
    before: int | None
    net_ns: float
    cell_ns: float


class _End(NamedTuple):
    """End of the longest path to one input of a register.

    ns : delay of the path, with setup time.
    bit : the net at the input.
    cell, port : the register's cell and port.
    net_ns : delay of the last net.
    from_fast : the path starts at a register with the clock of twice the rate.
    half : it starts or ends at such a register.
    """

    ns: float
    bit: int
    cell: str
    port: str
    net_ns: float
    from_fast: bool
    half: bool

    @property
    def cycle(self) -> float:
        """Period in ns of the slower clock that the path needs."""
        return 2 * self.ns if self.half else self.ns


_IGNORED = {"BUFG", "GND", "VCC", "$scopeinfo"}
"""Cells without a place on a path."""
_COMPUTES = re.compile(r"LUT|INV|RAM|SRL|DSP|CARRY")
"""Kinds of cells that count as logic levels."""


class _TimingGraph:
    """Graph of the nets of a netlist with delays, and the latest arrival at each net.

    names : names of nets.
    cells : cells by name.
    driver : name of the cell and port that drive each net.
    fan_out : number of pins that each net drives.
    fast : names of cells with the clock of twice the rate.
    arrivals : latest arrivals by net, of paths from registers without (False) and with (True) the fast clock.
    """

    def __init__(self, module: Mapping[str, Any]) -> None:
        self.names = _net_names(module)
        self.cells: dict[str, Cell] = {}
        self.driver: dict[int, tuple[str, str]] = {}
        self.fan_out: Counter[int] = Counter()
        self._arcs: dict[str, Arcs] = {}
        unknown: Counter[str] = Counter()
        for name, row in module["cells"].items():
            if row["type"] in _IGNORED:
                continue
            self.cells[name] = cell = _to_cell(row)
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
        for name, cell_arcs in self._arcs.items():
            for port, bit, out, ns in cell_arcs.through:
                self._following[bit].append((name, port, out, ns))
        self._order = self._topological_order()
        self.fast = self._clocked_by(module.get("ports", {}).get(FAST_CLOCK_PORT, {"bits": []})["bits"], module)
        self.arrivals = {fast: self._latest_arrivals(fast) for fast in ((False, True) if self.fast else (False,))}

    def _clocked_by(self, clock: list[int], module: Mapping[str, Any]) -> set[str]:
        """Return the names of cells that have one of the nets `clock` at a port, directly or behind a clock buffer."""
        buffers = [row["connections"] for row in module["cells"].values() if row["type"] == "BUFG"]
        nets = {*clock, *(buffer["O"][0] for buffer in buffers if buffer["I"][0] in clock)}
        return {name for name, cell in self.cells.items() if any(nets & set(bits) for bits in cell.inputs.values())}

    def net_delay(self, bit: int, to: str, port: str) -> float:
        """Return the delay in ns of net `bit` from its driver to port `port` of cell `to`."""
        figures, (source, source_port) = FIGURES["net"], self.driver[bit]
        source_kind, target_kind = self.cells[source].kind, self.cells[to].kind
        if source_port == "CO" and port == "CI":
            return float(figures["carry"])
        if source_port in ("PCOUT", "ACOUT", "BCOUT"):
            return float(figures["cascade"])
        if (target_kind == "CARRY4" and port == "S" and source_kind.startswith("LUT")) or (
            target_kind in ("MUXF7", "MUXF8") and port != "S"
        ):
            return 0.0  # wires within a slice
        drives_only_flip_flop = target_kind.startswith("FD") and port == "D" and self.fan_out[bit] == 1
        if drives_only_flip_flop and re.match("LUT|CARRY|MUXF", source_kind):
            return float(figures["to_own_flip_flop"])
        return float(min(figures["most"], figures["base"] + figures["root"] * math.sqrt(self.fan_out[bit])))

    def _topological_order(self) -> list[int]:
        """Return the nets so that each comes after all nets that it depends on. SynthesisError for a loop."""
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

    def _latest_arrivals(self, fast: bool) -> dict[int, _Arrival]:
        """Return the latest arrival at each net of paths from registers with the fast clock, or from all others."""
        arrivals: dict[int, _Arrival] = {}
        for name, cell_arcs in self._arcs.items():
            for bit, ns in cell_arcs.launch if (name in self.fast) == fast else ():
                if bit not in arrivals or ns > arrivals[bit].ns:
                    arrivals[bit] = _Arrival(ns, 0, bit, None, 0.0, ns)
        for bit in self._order:
            if (here := arrivals.get(bit)) is None:
                continue
            for to, port, out, ns in self._following.get(bit, ()):
                net = self.net_delay(bit, to, port)
                if out not in arrivals or here.ns + net + ns > arrivals[out].ns:
                    counts = bool(_COMPUTES.match(self.cells[to].kind)) and port != "CI"
                    arrivals[out] = _Arrival(here.ns + net + ns, here.levels + counts, here.start, bit, net, ns)
        return arrivals

    def ends(self) -> Iterator[_End]:
        """Yield the end of the longest path to each input of each register, by the clock of the path's start."""
        for name, cell_arcs in self._arcs.items():
            for port, bit, setup in cell_arcs.setup:
                for fast, arrivals in self.arrivals.items():
                    if (arrival := arrivals.get(bit)) is not None:
                        net = self.net_delay(bit, name, port)
                        half = fast or name in self.fast
                        yield _End(arrival.ns + net + setup, bit, name, port, net, fast, half)

    def longest(self, ends: list[_End], number: int) -> tuple[TimingPath, ...]:
        """Return the longest path of each of the first `number` bundles. ends: all ends, longest first."""
        first: dict[tuple[str, str], tuple[_End, str, str]] = {}
        count: Counter[tuple[str, str]] = Counter()
        for end in ends:
            source, _ = self.driver[self.arrivals[end.from_fast][end.bit].start]
            names = self._register_name(source), self._register_name(end.cell, end.port)
            key = re.sub(r"\d+", "#", names[0]), re.sub(r"\d+", "#", names[1])
            count[key] += 1
            if key not in first and len(first) < number:
                first[key] = end, *names
        return tuple(self._trace_path(end, start, target, count[key]) for key, (end, start, target) in first.items())

    def _trace_path(self, end: _End, start: str, target: str, ends: int) -> TimingPath:
        """Trace the path to `end` back to its start. start, target: its registers' names. ends: paths in its bundle."""
        steps, bit, arrivals = [], end.bit, self.arrivals[end.from_fast]
        while True:
            arrival = arrivals[bit]
            kind = self.cells[self.driver[bit][0]].kind
            steps.append(PathStep(kind, self.names.get(bit, ""), arrival.net_ns, arrival.cell_ns, self.fan_out[bit]))
            if arrival.before is None:
                break
            bit = arrival.before
        nets = sum(step.net_ns for step in steps) + end.net_ns
        fan_out = max(step.fan_out for step in steps)
        levels = arrivals[end.bit].levels
        return TimingPath(start, target, end.ns, nets, levels, fan_out, ends, tuple(reversed(steps)), end.half)

    def _register_name(self, name: str, port: str = "D") -> str:
        """Return the name in the design of a register, memory or DSP block, given its cell.

        port: it is appended to the name unless it is the data input of a register.
        """
        cell = self.cells[name]
        signal = next((self.names[bit] for bits in cell.outputs.values() for bit in bits if bit in self.names), None)
        if not name.startswith("$"):
            signal = re.sub(r"(\.\d+)+$", "", name.removeprefix("component."))
        signal = re.sub(r"\[\d+\]$", "", signal or cell.kind)
        return signal if cell.kind.startswith("FD") and port == "D" else f"{signal}.{port}" if port != "D" else signal


def _to_cell(row: Mapping[str, Any]) -> Cell:
    """Return the `Cell` of a cell in Yosys' JSON."""
    inputs, outputs = (
        {port: bits for port, bits in row["connections"].items() if row["port_directions"][port] == direction}
        for direction in ("input", "output")
    )
    return Cell(row["type"], row["parameters"], inputs, outputs)


def _net_names(module: Mapping[str, Any]) -> dict[int, str]:
    """Return the name that the design gives each net, the shortest of several; other nets are left out."""
    names: dict[int, str] = {}
    for name, row in module["netnames"].items():
        if "$" in name and not re.fullmatch(r"[\w.]+\$signal[\w.$]*", name):
            continue
        short = name.removeprefix("component.")
        for index, bit in enumerate(row["bits"]):
            if isinstance(bit, int) and (bit not in names or len(short) < len(re.sub(r"\[\d+\]$", "", names[bit]))):
                names[bit] = f"{short}[{index}]" if len(row["bits"]) > 1 else short
    return names
