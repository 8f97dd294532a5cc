"""Finds what a program must not rely on: never-written entries, addresses outside a buffer, races between units.

A race is an access to what another unit writes (or a write to what another unit reads) that no chain of tokens puts in
order. Each unit has a vector clock: for every other unit, the last of its instructions that is known to have ended.
Whatever order the simulator happens to execute in, each pair of accesses without an order between them is found.
"""

from __future__ import annotations

from collections import deque
from math import prod

import numpy as np
from numpy.typing import NDArray

from celosia.hw.config import Config
from celosia.hw.isa import (
    GEMM_LOOPS,
    OUTER_LOOPS,
    TAP_LOOPS,
    VECTOR_LOOPS,
    ASource,
    BSource,
    Buffer,
    Destination,
    Opcode,
    Unit,
    element_bytes,
)
from celosia.hw.scratchpads import depths, scratchpads
from celosia.sim.device import DeviceError
from celosia.sim.patterns import Steps, offsets, spans, steps
from celosia.sim.reference import Fields

Index = NDArray[np.int64]
UNITS = len(Unit)


class CheckError(DeviceError):
    """A program that relies on what the machine does not promise; the message names instruction, buffer and entry."""


class Accesses:
    """Who last read and wrote each element of one buffer. Times are instruction numbers plus one, 0 for never."""

    def __init__(self, name: str, size: int, unit: str, must_be_written: bool) -> None:
        self.name, self.unit, self.must_be_written = name, unit, must_be_written
        self.reads = np.zeros((UNITS, size), np.int32)
        self.writes = np.zeros((UNITS, size), np.int32)

    def read(self, index: Index, unit: Unit, number: int, clock: list[int]) -> None:
        self._ordered(index, unit, number, clock, self.writes, "reads", "writes")
        if self.must_be_written:
            unwritten = np.asarray(~self.writes[:, index].any(axis=0))
            if unwritten.any():
                raise CheckError(
                    f"instruction {number} ({unit.name}) reads {self._at(index, unwritten)}, which was never written"
                )
        self.reads[unit, index] = number + 1

    def write(self, index: Index, unit: Unit, number: int, clock: list[int]) -> None:
        self._ordered(index, unit, number, clock, self.writes, "writes", "writes")
        self._ordered(index, unit, number, clock, self.reads, "writes", "reads")
        self.writes[unit, index] = number + 1

    def _ordered(
        self, index: Index, unit: Unit, number: int, clock: list[int], log: NDArray[np.int32], verb: str, other: str
    ) -> None:
        for rival in Unit:
            if rival == unit:
                continue
            late = log[rival, index] > clock[rival]
            if late.any():
                culprit = int(log[rival, index][late][0]) - 1
                raise CheckError(
                    f"instruction {number} ({unit.name}) {verb} {self._at(index, late)}, which instruction {culprit} "
                    f"({rival.name}) {other}; no token orders the two"
                )

    def _at(self, index: Index, where: NDArray[np.bool_]) -> str:
        return f"{self.name} {self.unit} {int(index[where][0])}"


class Checker:
    """Follows the instructions of one run, in the order in which they are executed."""

    def __init__(self, cfg: Config, dram_bytes: int) -> None:
        self.cfg = cfg
        self.buffers = {
            name: Accesses(name, pad.depth * pad.pieces, "piece" if pad.in_pieces else "entry", True)
            for name, pad in scratchpads(cfg).items()
        }
        self.dram = Accesses("DRAM", dram_bytes, "byte", False)
        self.clocks = [[0] * UNITS for _ in Unit]
        self.tokens: dict[tuple[Unit, Unit], deque[list[int]]] = {(a, b): deque() for a in Unit for b in Unit}

    def execute(self, number: int, unit: Unit, opcode: Opcode, f: Fields) -> None:
        """Instruction `number` runs on `unit` now. Raises CheckError."""
        clock = self.clocks[unit]
        for other in Unit:
            if f["wait"] >> other & 1:
                posted = self.tokens[other, unit].popleft()
                clock[:] = map(max, clock, posted)
        self._accesses(number, unit, opcode, f, clock)
        clock[unit] = number + 1
        for other in Unit:
            if f["post"] >> other & 1:
                self.tokens[unit, other].append(list(clock))

    def _accesses(self, number: int, unit: Unit, opcode: Opcode, f: Fields, clock: list[int]) -> None:
        def entries(name: str, operand: str, pattern: Steps, pieces: int = 1, after: int = 0) -> Index:
            """Element numbers that `operand` visits, each once; of the entries `after` those."""
            size = len(self.buffers[name].reads[0]) // pieces
            base = f[f"{operand}_base"] + after
            if not any(base + low >= 0 and base + high < size for _, low, high in spans(pattern, size)):
                raise CheckError(
                    f"instruction {number} ({unit.name}): {operand} leaves {name}, which ends at {size - 1}"
                )
            index = np.unique((offsets(pattern, size) + base) % size)
            return index if pieces == 1 else (index[:, None] * pieces + np.arange(pieces)).ravel()

        def read(name: str, operand: str, pattern: Steps, pieces: int = 1, after: int = 0) -> None:
            self.buffers[name].read(entries(name, operand, pattern, pieces, after), unit, number, clock)

        def write(name: str, operand: str, pattern: Steps, pieces: int = 1) -> None:
            self.buffers[name].write(entries(name, operand, pattern, pieces), unit, number, clock)

        cfg = self.cfg
        if opcode == Opcode.LOAD:
            buffer = Buffer(f["buffer"])
            self.dram.read(self._dram_bytes(f, element_bytes(cfg, buffer, bool(f["widen"]))), unit, number, clock)
            height = f["pad_top"] + f["y_size"] + f["pad_bottom"]
            width = f["pad_left"] + f["x_size"] + f["pad_right"]
            block = ((f["z_size"], f["sram_z"]), (height, f["sram_y"]), (width, f["sram_x"]))
            write(buffer.name.lower(), "sram", _once(block))
        elif opcode == Opcode.STORE:
            block = ((f["z_size"], f["sram_z"]), (f["y_size"], f["sram_y"]), (f["x_size"], f["sram_x"]))
            read("out", "sram", _once(block))
            self.dram.write(self._dram_bytes(f, cfg.piece_bytes), unit, number, clock)
        elif opcode == Opcode.GEMM:
            read("inp", "inp", steps(f, "inp", GEMM_LOOPS), cfg.inp_pieces)
            read("wgt", "wgt", steps(f, "wgt", GEMM_LOOPS))
            acc = steps(f, "acc", OUTER_LOOPS)
            if f["accumulate"]:
                read("acc", "acc", acc, cfg.out_pieces)
            write("acc", "acc", acc, cfg.out_pieces)
        else:
            a = "acc" if f["a_source"] == ASource.ACC else "vin"
            if f["taps"]:
                for tap in range(cfg.taps):
                    read(a, "a", steps(f, "a", VECTOR_LOOPS), cfg.out_pieces, tap)
                read("tap", "tap", steps(f, "tap", TAP_LOOPS))
            else:
                read(a, "a", steps(f, "a", VECTOR_LOOPS), cfg.out_pieces)
            if f["b_source"] == BSource.VIN:
                read("vin", "b", steps(f, "b", OUTER_LOOPS), cfg.out_pieces)
            if f["requantise"]:
                read("par", "par", steps(f, "par", OUTER_LOOPS))
            if f["lookup"]:
                self.buffers["lut"].read(np.array([f["table"] % depths(cfg)["lut"]]), unit, number, clock)
            write(Destination(f["destination"]).name.lower(), "dst", steps(f, "dst", OUTER_LOOPS), cfg.out_pieces)

    def _dram_bytes(self, f: Fields, size: int) -> Index:
        """Bytes of DRAM that an instruction touches; those outside are left to the execution, which reports them."""
        rows = prod((f["z_size"], f["y_size"]))
        starts = (
            f["dram_addr"]
            + np.arange(f["z_size"])[:, None] * f["dram_z"]
            + np.arange(f["y_size"])[None, :] * f["dram_y"]
        ) % (1 << 32)
        index = (starts.reshape(rows, 1) + np.arange(f["x_size"] * size)).ravel()
        return index[index < self.dram.reads.shape[1]]


def _once(block: Steps) -> Steps:
    return tuple((extent, stride if extent > 1 else 0) for extent, stride in block)
