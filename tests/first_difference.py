"""Runs one program on two devices and reports the first difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import Opcode, instruction_bytes
from celosia.hw.spec.scratchpads import depths, scratchpads
from celosia.sim.device import Device, DeviceError
from celosia.sim.functional.access import touches
from celosia.sim.functional.decode import Instruction, decode


@dataclass(frozen=True)
class Difference:
    """What the first instruction whose result differs left in memory.

    instruction: its number. addr: the first DRAM byte that differs, with what the two devices hold there. piece: the
    entry of out that it came from, -1 where unknown. producer: the last VECTOR that wrote this entry, -1 where unknown.
    error: instead of all that, how a device failed.
    """

    instruction: int
    opcode: str
    addr: int = -1
    count: int = 0
    expected: int = 0
    found: int = 0
    piece: int = -1
    producer: int = -1
    error: str = ""

    def __str__(self) -> str:
        what = f"instruction {self.instruction} ({self.opcode})"
        if self.error:
            return f"{what}: {self.error}"
        text = f"{what}: DRAM byte {self.addr} is {self.found}, expected {self.expected}; {self.count} bytes differ"
        if self.piece >= 0:
            text += f"; it comes from piece {self.piece} of out"
        if self.producer >= 0:
            text += f", which instruction {self.producer} (VECTOR) wrote"
        return text


def first_difference(
    expected: Device,
    found: Device,
    image: NDArray[np.uint8],
    instr_addr: int,
    count: int,
    timeout_cycles: int = 10_000_000,
) -> Difference | None:
    """Run the program on both devices from the same memory; None where they leave the same bytes.

    image: all of memory, with the instructions. Where a difference is left, the program is run again with fewer and
    fewer instructions, a dozen times for thousands: the prefixes of a program in sequential order are programs, too.
    """
    cfg = expected.config

    def outcome(device: Device, instructions: int) -> tuple[NDArray[np.uint8], str]:
        device.allocate(len(image))
        device.write(0, image)
        try:
            device.run(instr_addr, instructions, timeout_cycles)
        except DeviceError as error:
            return device.read(0, len(image)), str(error)
        return device.read(0, len(image)), ""

    def differs(instructions: int) -> bool:
        (first, failure), (second, other_failure) = outcome(expected, instructions), outcome(found, instructions)
        return bool(failure) or bool(other_failure) or not np.array_equal(first, second)

    if not differs(count):
        return None
    good, bad = 0, count
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (good, middle) if differs(middle) else (middle, bad)
    (first, failure), (second, other_failure) = outcome(expected, bad), outcome(found, bad)
    size = instruction_bytes(cfg)
    program = decode(cfg, image[instr_addr : instr_addr + bad * size].reshape(bad, size))
    culprit = program[-1]
    name = culprit.opcode.name if culprit else "?"
    if failure or other_failure:
        return Difference(bad - 1, name, error=failure or other_failure)
    where = np.flatnonzero(first != second)
    addr = int(where[0])
    piece = _source(cfg, culprit, addr) if culprit else -1
    return Difference(
        bad - 1, name, addr, len(where), int(first[addr]), int(second[addr]), piece, _producer(cfg, program, piece)
    )


def _source(cfg: Config, instruction: Instruction, addr: int) -> int:
    """The piece of out that a STORE writes to `addr` (the last one, where its rows overlap), or -1."""
    piece, f = -1, instruction.fields
    if instruction.opcode != Opcode.STORE:
        return piece
    width = f["x_size"] * cfg.piece_bytes
    for z in range(f["z_size"]):
        for y in range(f["y_size"]):
            start = (f["dram_addr"] + z * f["dram_z"] + y * f["dram_y"]) % (1 << 32)
            if start <= addr < start + width:
                x = (addr - start) // cfg.piece_bytes
                index = f["sram_base"] + z * f["sram_z"] + y * f["sram_y"] + x * f["sram_x"]
                piece = index % (depths(cfg)["out"] * cfg.out_pieces)
    return piece


def _producer(cfg: Config, program: Sequence[Instruction | None], piece: int) -> int:
    """The last VECTOR of `program` that writes `piece` of out, or -1."""
    size = scratchpads(cfg)["out"].depth * cfg.out_pieces
    for number, each in reversed(list(enumerate(program))):
        if piece >= 0 and each is not None and each.opcode == Opcode.VECTOR:
            for touch in touches(cfg, each.opcode, each.fields):
                if touch.write and touch.memory == "out" and piece in touch.piece_numbers(size):
                    return number
    return -1
