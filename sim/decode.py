"""Instruction words to fields, all words of a program at once."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from celosia.hw.config import Config
from celosia.hw.isa import UNIT_OF, Field, Opcode, Unit, formats, rules
from celosia.sim.reference import Fields


class Instruction(NamedTuple):
    unit: Unit
    opcode: Opcode
    names: tuple[str, ...]
    values: tuple[int, ...]
    waits: tuple[Unit, ...]
    posts: tuple[Unit, ...]
    steps: float
    """Rows of memory, tile operations or entries, up to 2^53 exactly: the machine takes at least as many cycles."""

    @property
    def fields(self) -> Fields:
        """Made anew each time: thousands of dictionaries that stay would keep the garbage collector busy."""
        return dict(zip(self.names, self.values))


def decode(cfg: Config, code: NDArray[np.uint8]) -> list[Instruction | None]:
    """The instructions of code [count, instruction_bytes]; None for each illegal word."""
    program: list[Instruction | None] = [None] * len(code)
    opcodes = code[:, 0] & 0b111
    for opcode, fmt in formats(cfg).items():
        numbers = np.flatnonzero(opcodes == opcode)
        if len(numbers):
            words = _words(code[numbers])
            values = {field.name: _field(words, fmt.offsets[field.name], field) for field in fmt.fields}
            illegal = np.any([broken(values) for broken in rules(cfg)[opcode].values()], axis=0)
            for number, bad, instruction in zip(numbers.tolist(), illegal.tolist(), _instructions(opcode, values)):
                program[number] = None if bad else instruction
    return program


def _words(code: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """[count, words of 64 bits], with one of zeros after the last."""
    count, size = code.shape
    padded = np.zeros((count, -(-size // 8) * 8 + 8), np.uint8)
    padded[:, :size] = code
    return padded.view("<u8")


def _field(words: NDArray[np.uint64], offset: int, field: Field) -> NDArray[np.int64]:
    word, bit = divmod(offset, 64)
    bits = words[:, word] >> np.uint64(bit)
    if bit + field.width > 64:
        bits = bits | words[:, word + 1] << np.uint64(64 - bit)
    value = (bits & np.uint64((1 << field.width) - 1)).astype(np.int64)
    return value - ((value >> (field.width - 1)) << field.width) if field.signed else value


def _instructions(opcode: Opcode, values: dict[str, NDArray[np.int64]]) -> list[Instruction]:
    steps: Any = np.float64(1)
    for name, value in values.items():
        if name.startswith("extent_") or name in ("y_size", "z_size"):
            steps = steps * value
    names, unit = tuple(values), UNIT_OF[opcode]
    waits = [_units(mask) for mask in values["wait"].tolist()]
    posts = [_units(mask) for mask in values["post"].tolist()]
    rows = zip(*(value.tolist() for value in values.values()))
    return [Instruction(unit, opcode, names, *others) for others in zip(rows, waits, posts, steps.tolist())]


@cache
def _units(mask: int) -> tuple[Unit, ...]:
    return tuple(unit for unit in Unit if mask >> unit & 1)
