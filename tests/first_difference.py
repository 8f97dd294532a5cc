"""Run one program on two devices and report the first difference."""

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
    """The first instruction whose result differs on two devices, and the first DRAM byte that shows it.

    instruction: its number. addr: address of that byte; count: number of bytes that differ.
    expected, found: values of the byte. piece: the piece of out that the byte comes from, -1 if unknown.
    producer: the last VECTOR that wrote this piece, -1 if unknown. error: message of a device that failed.
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
        location = f"instruction {self.instruction} ({self.opcode})"
        if self.error:
            return f"{location}: {self.error}"
        text = f"{location}: DRAM byte {self.addr} is {self.found}, expected {self.expected}; {self.count} bytes differ"
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
    """Run the program on both devices from the same memory. Return None if they leave the same bytes.

    image: all of memory, with the instructions. After a difference, a bisection runs shorter prefixes of the program,
    about 12 for thousands of instructions. A prefix of a program in sequential order is a program, too.
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
    equal, different = 0, count
    while different - equal > 1:
        middle = (equal + different) // 2
        equal, different = (equal, middle) if differs(middle) else (middle, different)
    (first, failure), (second, other_failure) = outcome(expected, different), outcome(found, different)
    size = instruction_bytes(cfg)
    program = decode(cfg, image[instr_addr : instr_addr + different * size].reshape(different, size))
    last_instruction = program[-1]
    opcode = last_instruction.opcode.name if last_instruction else "?"
    if failure or other_failure:
        return Difference(different - 1, opcode, error=failure or other_failure)
    differing = np.flatnonzero(first != second)
    addr = int(differing[0])
    piece = _source(cfg, last_instruction, addr) if last_instruction else -1
    return Difference(
        different - 1,
        opcode,
        addr,
        len(differing),
        int(first[addr]),
        int(second[addr]),
        piece,
        _producer(cfg, program, piece),
    )


def _source(cfg: Config, instruction: Instruction, addr: int) -> int:
    """Return the piece of out that a STORE writes to `addr`, or -1. If its rows overlap, the last one counts."""
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
    """Return the number of the last VECTOR in `program` that writes `piece` of out, or -1."""
    size = scratchpads(cfg)["out"].depth * cfg.out_pieces
    for number, instruction in reversed(list(enumerate(program))):
        if piece >= 0 and instruction is not None and instruction.opcode == Opcode.VECTOR:
            for touch in touches(cfg, instruction.opcode, instruction.fields):
                if touch.write and touch.memory == "out" and piece in touch.piece_numbers(size):
                    return number
    return -1
