"""Training run for profile-guided optimisation: a short run of all units, after which the simulator is compiled again.

The compiler then knows which branches are usually taken, and lays out the code accordingly. Instructions are random,
but legal; their results are ignored. They run in a process of their own, since the profile is written at its end.
"""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

import numpy as np

from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import UNIT_OF, Opcode, Unit, formats, instruction_bytes
from celosia.hw.spec.legality import why_illegal
from celosia.sim.device import Counters, Device
from celosia.sim.rtl.rtlsim import RtlDevice

ROUNDS = 100
"""Number of rounds. A round is one instruction for each unit, each of which waits for the one before it."""
LOOPS = {Opcode.GEMM: 6, Opcode.VECTOR: 4}
"""Largest extents of loops: as in models, GEMM is busy most of the time, and the others wait."""
CYCLES = 2_000_000
"""Limit of cycles, well above what the rounds take."""
DATA = 1 << 20
"""Bytes of memory that the instructions access."""
ROW, PLANE = 4096, 16384
"""Bytes from one row of a block to the next, and from one plane to the next."""


def _choose_value(field: str, opcode: Opcode, data: int, draw: Random) -> int | None:
    """Choose the value of a field; None if random bits will do.

    data: first byte of the memory that instructions access.
    """
    unit = UNIT_OF[opcode]
    match field:
        case "opcode":
            return int(opcode)
        case "wait":
            return 1 << unit >> 1
        case "post":
            return 0 if unit == max(Unit) else 2 << unit
        case "dram_addr":
            return data + ROW * draw.randrange(DATA // 2 // ROW)
        case "dram_y":
            return ROW
        case "dram_z":
            return PLANE
        case "pad_top" | "pad_bottom" | "pad_left" | "pad_right":
            return draw.randrange(2)
    return draw.randint(1, LOOPS.get(opcode, 4)) if field.startswith("extent_") or field.endswith("_size") else None


def _draw_instruction(cfg: Config, opcode: Opcode, data: int, draw: Random) -> int:
    """Return a random legal instruction word of an opcode. data: first byte of the memory that it may access."""
    form = formats(cfg)[opcode]
    while True:
        word = 0
        for field in form.fields:
            value = _choose_value(field.name, opcode, data, draw)
            bits = draw.getrandbits(field.width) if value is None else value
            word |= bits << form.offsets[field.name]
        if why_illegal(cfg, word) is None:
            return word


def train(device: Device, rounds: int = ROUNDS) -> Counters:
    """Run `rounds` random instructions of each unit on `device`. DeviceError where the hardware refuses one."""
    cfg, draw = device.config, Random(0)
    size, count = instruction_bytes(cfg), rounds * len(Opcode)
    data = -(-count * size // ROW) * ROW
    words = [_draw_instruction(cfg, opcode, data, draw) for _ in range(rounds) for opcode in Opcode]
    device.allocate(data + DATA)
    device.write(0, np.frombuffer(b"".join(word.to_bytes(size, "little") for word in words), np.uint8))
    device.write(data, np.frombuffer(draw.randbytes(DATA), np.uint8))
    return device.run(0, count, CYCLES)


if __name__ == "__main__":
    train(RtlDevice(Config.load(sys.argv[2]), simulator=Path(sys.argv[1])))
