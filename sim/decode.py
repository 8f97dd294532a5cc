"""Instruction words to fields, all words of a program at once."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from celosia.hw.config import Config
from celosia.hw.isa import UNIT_OF, Opcode, Unit, formats, rules
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
    for opcode in formats(cfg):
        numbers = np.flatnonzero(opcodes == opcode)
        if len(numbers):
            fields = _fields(cfg, opcode)
            values = _values(_words(code[numbers]), fields)
            columns = dict(zip(fields.names, values.T))
            illegal = np.any([broken(columns) for broken in rules(cfg)[opcode].values()], axis=0)
            for number, bad, instruction in zip(numbers.tolist(), illegal.tolist(), _instructions(fields, values)):
                program[number] = None if bad else instruction
    return program


def _words(code: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """[count, words of 64 bits], with one of zeros after the last."""
    count, size = code.shape
    padded = np.zeros((count, -(-size // 8) * 8 + 8), np.uint8)
    padded[:, :size] = code
    return padded.view("<u8")


class _Fields(NamedTuple):
    """Of all fields of an opcode, in their order: where they lie (word of 64 bits and bit), masks of their width, and
    the value of their sign bit (0 where unsigned)."""

    opcode: Opcode
    names: tuple[str, ...]
    words: NDArray[np.intp]
    bits: NDArray[np.uint64]
    masks: NDArray[np.uint64]
    signs: NDArray[np.int64]
    wait: int
    post: int
    steps: list[int]
    """Which fields are numbers of iterations."""


@cache
def _fields(cfg: Config, opcode: Opcode) -> _Fields:
    form = formats(cfg)[opcode]
    names = tuple(form.offsets)
    offsets, widths = np.array(list(form.offsets.values())), [field.width for field in form.fields]
    return _Fields(
        opcode, names, offsets // 64, (offsets % 64).astype(np.uint64),
        np.array([(1 << width) - 1 for width in widths], np.uint64),
        np.array([1 << field.width - 1 if field.signed else 0 for field in form.fields]),
        names.index("wait"), names.index("post"),
        [i for i, name in enumerate(names) if name.startswith("extent_") or name in ("y_size", "z_size")],
    )  # fmt: skip


def _values(words: NDArray[np.uint64], fields: _Fields) -> NDArray[np.int64]:
    """[count, fields]"""
    low = words[:, fields.words] >> fields.bits
    # Two shifts, as one by 64 is undefined.
    high = words[:, fields.words + 1] << np.uint64(1) << (np.uint64(63) - fields.bits)
    values = ((low | high) & fields.masks).view(np.int64)
    return (values ^ fields.signs) - fields.signs


def _instructions(fields: _Fields, values: NDArray[np.int64]) -> list[Instruction]:
    opcode, names = fields.opcode, fields.names
    unit = UNIT_OF[opcode]
    waits = map(_units, values[:, fields.wait].tolist())
    posts = map(_units, values[:, fields.post].tolist())
    steps = values[:, fields.steps].prod(axis=1, dtype=np.float64).tolist()
    rows = map(tuple, values.tolist())
    return [Instruction(unit, opcode, names, *others) for others in zip(rows, waits, posts, steps)]


@cache
def _units(mask: int) -> tuple[Unit, ...]:
    return tuple(unit for unit in Unit if mask >> unit & 1)
