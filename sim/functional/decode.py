"""Decode instruction words to fields, all words of a program at once."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import UNIT_OF, Opcode, Unit, formats
from celosia.hw.spec.legality import rules
from celosia.sim.functional.reference import Fields


class Instruction(NamedTuple):
    """A legal instruction.

    names, values: its fields, signed where the instruction set says so. waits, posts: the units it takes tokens from,
    and posts tokens to.
    """

    unit: Unit
    opcode: Opcode
    names: tuple[str, ...]
    values: tuple[int, ...]
    waits: tuple[Unit, ...]
    posts: tuple[Unit, ...]
    least_cycles: float
    """Rows of memory, tile operations or entries: a lower bound of its cycles, for the time limit of a run."""

    @property
    def fields(self) -> Fields:
        """Values by field name, in a new dictionary each time: keeping thousands would slow the garbage collector."""
        return dict(zip(self.names, self.values))


class OpcodeColumns(NamedTuple):
    """All instructions of one opcode in a program.

    numbers: their numbers in the program. names: the fields. values: of each field, signed where the instruction set
    says so.
    """

    numbers: NDArray[np.int64]
    names: tuple[str, ...]
    values: NDArray[np.int64]
    """[fields, instructions]"""

    @property
    def fields(self) -> dict[str, NDArray[np.int64]]:
        """The values of each field [instructions], by name."""
        return dict(zip(self.names, self.values))


def decode_columns(cfg: Config, code: NDArray[np.uint8]) -> tuple[dict[Opcode, OpcodeColumns], NDArray[np.bool_]]:
    """Decode code [count, instruction_bytes] uint8 to columns.

    Returns the instructions by opcode, and a mask [count] of those that break a rule of `legality`.
    """
    opcodes = code[:, 0] & 0b111
    illegal: NDArray[np.bool_] = np.isin(opcodes, list(Opcode), invert=True)
    by_opcode = {}
    for opcode, form in formats(cfg).items():
        numbers = np.flatnonzero(opcodes == opcode)
        by_opcode[opcode] = decoded = OpcodeColumns(
            numbers, tuple(form.offsets), _extract_values(cfg, opcode, code[numbers])
        )
        if len(numbers):
            fields = decoded.fields
            illegal[numbers] = np.any([breaks_rule(fields) for breaks_rule in rules(cfg)[opcode].values()], axis=0)
    return by_opcode, illegal


class _BitPositions(NamedTuple):
    """Where the fields of an opcode lie in an instruction; each array is [fields, 1].

    words, bits: the 64-bit word and the bit in it at which a field begins. masks: as many ones as the field has bits.
    signs: value of its sign bit, 0 where it is unsigned.
    """

    words: NDArray[np.intp]
    bits: NDArray[np.uint64]
    masks: NDArray[np.uint64]
    signs: NDArray[np.int64]


@cache
def _bit_positions(cfg: Config, opcode: Opcode) -> _BitPositions:
    """Return the bit positions of the fields of an opcode."""
    form = formats(cfg)[opcode]
    offsets, widths = np.array([list(form.offsets.values())]).T, [field.width for field in form.fields]
    return _BitPositions(
        offsets[:, 0] // 64, (offsets % 64).astype(np.uint64),
        np.array([[(1 << width) - 1 for width in widths]], np.uint64).T,
        np.array([[1 << field.width - 1 if field.signed else 0 for field in form.fields]]).T,
    )  # fmt: skip


def _extract_values(cfg: Config, opcode: Opcode, code: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Extract the values of all fields, [fields, count], from code [count, bytes of an instruction]."""
    positions, (count, size) = _bit_positions(cfg, opcode), code.shape
    padded = np.zeros((count, -(-size // 8) * 8 + 8), np.uint8)  # one word more, for the last field
    padded[:, :size] = code
    words = np.ascontiguousarray(padded.view("<u8").T)
    low = words[positions.words] >> positions.bits
    # Two shifts, as one by 64 is undefined.
    high = words[positions.words + 1] << np.uint64(1) << (np.uint64(63) - positions.bits)
    values = ((low | high) & positions.masks).view(np.int64)
    return (values ^ positions.signs) - positions.signs  # sign extension


def decode(cfg: Config, code: NDArray[np.uint8]) -> list[Instruction | None]:
    """Decode code [count, instruction_bytes] to instructions; None for each illegal word."""
    program: list[Instruction | None] = [None] * len(code)
    by_opcode, illegal = decode_columns(cfg, code)
    for opcode, decoded in by_opcode.items():
        bad = illegal[decoded.numbers].tolist()
        for number, is_illegal, instruction in zip(decoded.numbers.tolist(), bad, _build_instructions(opcode, decoded)):
            program[number] = None if is_illegal else instruction
    return program


def _build_instructions(opcode: Opcode, decoded: OpcodeColumns) -> list[Instruction]:
    """Convert the decoded columns of an opcode to instructions, in program order."""
    unit, names, values = UNIT_OF[opcode], decoded.names, decoded.values
    step_fields = [i for i, name in enumerate(names) if name.startswith("extent_") or name in ("y_size", "z_size")]
    waits, posts = (map(_units_of_mask, values[names.index(mask)].tolist()) for mask in ("wait", "post"))
    least_cycles = values[step_fields].prod(axis=0, dtype=np.float64).tolist()
    rows = map(tuple, values.T.tolist())
    return [Instruction(unit, opcode, names, *values) for values in zip(rows, waits, posts, least_cycles)]


@cache
def _units_of_mask(mask: int) -> tuple[Unit, ...]:
    """Return the units in a mask of tokens. The cache lets all instructions share one tuple for each mask."""
    return tuple(unit for unit in Unit if mask >> unit & 1)
