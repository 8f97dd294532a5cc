"""Test the estimate of the clock: delays of paths, the longest path, and messages if there is none."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from amaranth import Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out
from test_synthesis import needs_yosys
from thorough import some
from typer.testing import CliRunner

from celosia.bitstreams import synthesis, timing
from celosia.bitstreams.project import ProjectError
from celosia.bitstreams.synthesis import SynthesisError, netlist
from celosia.bitstreams.timing import Timing, analyse, timed_device
from celosia.cache import CACHE_KINDS
from celosia.driver import cli
from celosia.hw.boards.boards import BOARDS
from celosia.hw.boards.fpga import FPGAS
from celosia.hw.verilog import convert

CLOCK = 1


class Netlist:
    """A module in Yosys' JSON form, built cell by cell; bit 1 is the clock."""

    def __init__(self) -> None:
        self.cells: dict[str, Any] = {}
        self.names: dict[str, Any] = {}
        self._bits = CLOCK

    def bit(self, name: str | None = None) -> int:
        self._bits += 1
        if name is not None:
            self.names[name] = {"bits": [self._bits]}
        return self._bits

    def cell(self, kind: str, inputs: dict[str, list[Any]], outputs: dict[str, list[Any]], **parameters: Any) -> str:
        name = f"$cell{len(self.cells)}"
        directions = dict.fromkeys(inputs, "input") | dict.fromkeys(outputs, "output")
        self.cells[name] = {
            "type": kind, "parameters": parameters, "port_directions": directions, "connections": inputs | outputs,
        }  # fmt: skip
        return name

    def register(self, d: int | str, name: str, clock: int = CLOCK) -> int:
        q = self.bit(name)
        self.cell("FDRE", {"C": [clock], "CE": ["1"], "D": [d], "R": ["0"]}, {"Q": [q]})
        return q

    def lut(self, *inputs: int) -> int:
        out = self.bit()
        self.cell(f"LUT{len(inputs)}", {f"I{i}": [bit] for i, bit in enumerate(inputs)}, {"O": [out]})
        return out

    def analyse(self, paths: int = 20, ports: dict[str, Any] | None = None) -> Timing:
        return analyse({"cells": self.cells, "netnames": self.names, "ports": ports or {}}, paths)


def wire(fan_out: int) -> float:
    return min(2.5, 0.45 + 0.06 * math.sqrt(fan_out))


def test_a_path_by_hand() -> None:
    design = Netlist()
    first, second = (design.register("x", f"component.load.{name}") for name in ("first", "second"))
    inner = design.lut(first, second)
    design.register(design.lut(inner, second), "component.store.last")
    timing_report = design.analyse()
    # The net of `first` drives one pin, that of `second` two. The last LUT is next to its flip-flop.
    from_second = 0.478 + wire(2) + 0.124 + wire(1) + 0.124 + 0.02 + 0.06
    assert timing_report.ns == pytest.approx(from_second) and timing_report.mhz == pytest.approx(1000 / from_second)
    assert timing_report.ends == {int(from_second): 1}
    (path,) = timing_report.paths
    assert (path.start, path.end, path.levels, path.fan_out, path.ends) == ("load.second", "store.last", 2, 2, 1)
    assert path.nets_ns == pytest.approx(wire(2) + wire(1) + 0.02)
    assert [step.cell for step in path.steps] == ["FDRE", "LUT2", "LUT2"]


def test_carry_chains_memories_and_products() -> None:
    """Delays are right for a carry chain of 8 bits before a block RAM, and for a DSP block without registers."""
    design = Netlist()
    start, middle, top, chain = design.register("x", "count"), design.bit(), design.bit(), design.bit()
    design.cell("CARRY4", {"S": [start, "0", "0", "0"], "CI": ["0"]}, {"CO": ["x", "x", "x", chain], "O": ["x"] * 4})
    design.cell("CARRY4", {"CI": [chain], "S": ["0"] * 4}, {"O": ["x", "x", "x", top], "CO": ["x"] * 4})
    design.cell("RAMB36E1", {"ADDRARDADDR": [top], "CLKARDCLK": [CLOCK]}, {"DOADO": [middle]}, DOA_REG="0")
    assert design.analyse().ns == pytest.approx(0.478 + wire(1) + 0.54 + 0.01 + 0.313 + wire(1) + 0.566)
    product = design.bit()
    registers = dict.fromkeys(("AREG", "BREG", "CREG", "MREG", "PREG"), "0")
    design.cell("DSP48E1", {"A": [middle], "CLK": [CLOCK]}, {"P": [product]}, **registers)
    design.register(product, "product")
    assert design.analyse().ns == pytest.approx(2.454 + wire(1) + 3.841 + wire(1) + 0.06)
    design.cells["$cell4"]["parameters"]["PREG"] = "1"
    assert design.analyse().ns == pytest.approx(2.454 + wire(1) + 3.722)


@pytest.mark.parametrize("buffered", [False, True])
def test_paths_of_the_faster_clock_have_half_a_cycle(buffered: bool) -> None:
    """Paths within, to and from the fast clock have half a cycle, even if a longer path ends at the same register."""
    design = Netlist()
    port = fast = design.bit()
    if buffered:
        fast = design.bit()
        design.cell("BUFG", {"I": [port]}, {"O": [fast]})
    ports = {"fast_clk": {"bits": [port]}}
    start = design.register("x", "start")
    deep = design.lut(design.lut(design.lut(start)))
    design.register(deep, "slow")
    single = 0.478 + 3 * wire(1) + 3 * 0.124 + 0.02 + 0.06
    assert design.analyse(ports=ports) == design.analyse() and design.analyse().ns == pytest.approx(single)
    turn = design.register("x", "turn", fast)
    design.register(design.lut(turn, deep), "crossed")
    timing_report = design.analyse(ports=ports)
    paths = {(path.start, path.end): path for path in timing_report.paths}
    from_fast = 0.478 + wire(1) + 0.124 + 0.02 + 0.06
    assert timing_report.pumped and paths["turn", "crossed"].half and not paths["start", "slow"].half
    assert paths["turn", "crossed"].ns == pytest.approx(from_fast)
    within = max(path.ns for path in timing_report.paths if not path.half)
    assert timing_report.ns == pytest.approx(max(2 * from_fast, within))
    into = Netlist()
    start, other = into.register("x", "start"), into.bit()
    into.register(start, "end", other)
    timing_report = into.analyse(ports={"fast_clk": {"bits": [other]}})
    assert timing_report.paths[0].half and timing_report.ns == pytest.approx(2 * (0.478 + wire(1) + 0.06))


@pytest.mark.parametrize("seed", range(20))
def test_the_longest_of_all_paths(seed: int) -> None:
    """In a random graph of LUTs, the longest path is that of an enumeration of all paths."""
    rng, design = random.Random(seed), Netlist()
    bits = [design.register("x", f"start{number}") for number in range(3)]
    reads: dict[int, list[int]] = {}
    for _ in range(rng.randint(1, 12)):
        inputs = rng.sample(bits, k=min(len(bits), rng.randint(1, 3)))
        bits.append(design.lut(*inputs))
        reads[bits[-1]] = inputs
    ends = rng.sample(bits, k=rng.randint(1, 4))
    for number, bit in enumerate(ends):
        design.register(bit, f"end{number}")
    pins = [bit for inputs in reads.values() for bit in inputs] + ends

    def all_paths(bit: int) -> list[float]:
        if bit not in reads:
            return [0.478]
        return [ns + wire(pins.count(source)) + 0.124 for source in reads[bit] for ns in all_paths(source)]

    def ending(bit: int) -> float:
        is_adjacent = bit in reads and pins.count(bit) == 1
        return max(all_paths(bit)) + (0.02 if is_adjacent else wire(pins.count(bit))) + 0.06

    assert design.analyse().ns == pytest.approx(max(map(ending, ends)))


def test_paths_of_the_same_registers_are_one_row() -> None:
    design = Netlist()
    start = design.register("x", "component.vector.go")
    for lane in range(12):
        design.register(design.lut(start), f"component.vector.combine{lane}.v")
    other = design.register("x", "component.vector.other")
    design.register(other, "component.store.place")
    rows = design.analyse().paths
    assert [(row.start, row.ends) for row in rows] == [("vector.go", 12), ("vector.other", 1)]
    assert len(design.analyse(paths=1).paths) == 1


def test_what_cannot_be_timed() -> None:
    design = Netlist()
    design.register("x", "alone")
    with pytest.raises(SynthesisError, match="no path from a register"):
        design.analyse()
    design.cell("URAM288", {}, {})
    with pytest.raises(SynthesisError, match="1 of cell URAM288, whose delay"):
        design.analyse()
    design = Netlist()
    loop = design.bit("component.loop")
    design.cell("LUT1", {"I0": [loop]}, {"O": [loop]})
    with pytest.raises(SynthesisError, match=r"loops without a register.*loop"):
        design.analyse()


def test_every_cell_of_the_device_has_delays() -> None:
    """Every cell that `report` counts for a 7-series device has delays."""
    from celosia.bitstreams.cells import Cell, arcs
    from celosia.bitstreams.synthesis import _CELLS

    other = ("TRELLIS", "DP16KD", "PDPW16KD", "MULT", "CCU2C", "RAMB18E2", "RAMB36E2", "DSP48E2", "RAM32M16", "RAM64M8")
    for kind in (name for name in _CELLS if not name.startswith(other)):
        arcs(Cell(kind, {}, {}, {}))


class Sum(wiring.Component):
    """A sum of `terms` numbers, in one cycle or with a register after each addition."""

    def __init__(self, terms: int, cut: bool) -> None:
        self._terms, self._cut = terms, cut
        super().__init__({"x": In(8), "total": Out(16)})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        numbers = [Signal(8, name=f"number{i}") for i in range(self._terms)]
        m.d.sync += [number.eq(before) for before, number in zip([self.x, *numbers], numbers, strict=False)]
        total: Any = numbers[0]
        for i, number in enumerate(numbers[1:]):
            part = Signal(16, name=f"part{i}")
            (m.d.sync if self._cut else m.d.comb).__iadd__(part.eq((total ^ (total << 3)) + number))
            total = part
        m.d.sync += self.total.eq(total)
        return m


@needs_yosys
@pytest.mark.parametrize("cuts", some([[True], [False, True]], [[True]]))
def test_a_cut_shortens_the_path(cuts: list[bool], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A netlist of Yosys is timed, and comes from the cache afterwards. An uncut path is more than twice as long."""
    monkeypatch.setenv("CELOSIA_CACHE", str(tmp_path))
    device, reports = FPGAS["xc7z020"], {}
    for cut in cuts:
        module = netlist(lambda cut=cut: convert(Sum(6, cut), "sums"), "sums", device)  # type: ignore[misc]
        reports[cut] = analyse(module)
    assert reports[True].paths[0].levels > 0
    if False in cuts:
        assert reports[False].ns > 2 * reports[True].ns
        assert reports[False].paths[0].start.startswith("number")
        assert reports[False].paths[0].end == "total"
    # Now the netlist comes from the cache on disk, which `celosia cache` lists.
    assert "netlists" in CACHE_KINDS and len(list((tmp_path / "netlists").iterdir())) == len(cuts)
    monkeypatch.setattr(synthesis, "run_yosys", lambda *arguments: pytest.fail("synthesised again"))
    assert analyse(netlist(lambda: convert(Sum(6, True), "sums"), "sums", device)) == reports[True]


def test_a_yosys_on_path_goes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    native = tmp_path / "yosys"
    native.write_text(
        '#!/bin/sh\nif [ "$1" = -V ]; then echo >> "$0.asked"; echo "Yosys 9.99 (git sha1 0)"; exit; fi\n'
        'echo "$@" > ran.txt\n'
        'echo \'{"modules": {"top": {"cells": {}, "netnames": {}}}}\' > top.json\n'
    )
    native.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("CELOSIA_CACHE", str(tmp_path / "cache"))
    assert [synthesis._yosys_version() for _ in range(3)] == ["Yosys 9.99"] * 3
    assert len((tmp_path / "yosys.asked").read_text().splitlines()) == 1
    assert netlist(lambda: "module top; endmodule", "top", FPGAS["xc7z020"]) == {"cells": {}, "netnames": {}}


def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    design = Netlist()
    design.register(design.lut(design.register("x", "component.load.first")), "component.store.last")
    monkeypatch.setattr(timing, "estimate", lambda cfg, paths, say: design.analyse(paths))
    result = CliRunner().invoke(cli.app, ["bitstream", "timing", "--board", "pynq-z2"])
    assert result.exit_code == 0 and "load.first" in result.stdout and "store.last" in result.stdout
    assert f"{design.analyse().mhz:.1f} MHz" in result.stdout and "Vivado decides" in result.stdout
    result = CliRunner().invoke(cli.app, ["bitstream", "timing", "--board", "pynq-z1", "--config", "tiny", "--json"])
    printed = json.loads(result.stdout)
    assert printed["mhz"] == round(design.analyse().mhz, 1) and printed["config"] == "tiny"
    assert [step["cell"] for step in printed["paths"][0]["steps"]] == ["FDRE", "LUT1"]


def test_a_board_of_unknown_delays() -> None:
    assert timed_device(BOARDS["pynq-z1"]) == "xc7z020-1"
    with pytest.raises(ProjectError, match=r"xczu3eg.*ultra96"):
        timed_device(BOARDS["ultra96"])
    result = CliRunner().invoke(cli.app, ["bitstream", "timing", "--board", "zcu104"])
    assert result.exit_code == 1 and "--board pynq-z1 or pynq-z2 with --config zcu104" in result.stderr
