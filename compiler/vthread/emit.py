"""Instructions to the bytes that fetch reads."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.vthread.pipeline import Instruction
from celosia.hw.config import Config
from celosia.hw.isa import formats, instruction_bytes


def encode(cfg: Config, instructions: list[Instruction]) -> NDArray[np.uint8]:
    """One row of `instruction_bytes` each, [count, bytes] uint8. ValueError where a value does not fit its field."""
    size, table = instruction_bytes(cfg), formats(cfg)
    data = b"".join(table[i.opcode].encode(**i.fields).to_bytes(size, "little") for i in instructions)
    return np.frombuffer(data, np.uint8).reshape(-1, size)
