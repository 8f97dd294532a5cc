"""Encode instructions as the bytes that the fetch unit reads, and disassemble them to text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.vthread.pipeline import StreamInstruction
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import (
    ASource,
    BinaryOp,
    BSource,
    Buffer,
    Destination,
    Format,
    ReduceOp,
    Unit,
    formats,
    instruction_bytes,
    opcode_of,
)
from celosia.sim.functional.access import tabulate


def encode(cfg: Config, instructions: list[StreamInstruction]) -> NDArray[np.uint8]:
    """Encode instructions as [count, instruction_bytes] uint8. Raises ValueError if a value does not fit its field."""
    words = np.zeros((len(instructions), instruction_bytes(cfg) // 8), np.uint64)
    opcodes = np.array([i.opcode for i in instructions], np.int64)
    for opcode, form in formats(cfg).items():
        rows = np.flatnonzero(opcodes == opcode)
        if len(rows):
            words[rows] = _encode_format(form, [instructions[row].fields for row in rows], words.shape[1])
    return words.view(np.uint8)


def _encode_format(form: Format, fields: list[dict[str, int]], size: int) -> NDArray[np.uint64]:
    """Encode instructions of one format as [count, size] 64-bit words. fields: of each instruction."""
    used = set[str]().union(*fields)
    if unknown := used - set(form.offsets):
        raise ValueError(f"{form.opcode.name} has no field {', '.join(sorted(unknown))}")
    words = np.zeros((len(fields), size), np.uint64)
    columns = tabulate(fields, dict.fromkeys(form.offsets, 0) | {"opcode": int(form.opcode)})
    for field in form.fields:
        if field.name not in used and field.name != "opcode":
            continue  # it is 0 in all of them
        values = columns[field.name]
        for extreme in (values.min(), values.max()):
            field.check(int(extreme), form.opcode.name)
        bits = values.view(np.uint64) & np.uint64((1 << field.width) - 1)
        word, shift = divmod(form.offsets[field.name], 64)
        words[:, word] |= bits << np.uint64(shift)
        if shift + field.width > 64:
            words[:, word + 1] |= bits >> np.uint64(64 - shift)
    return words


_NAMES: dict[str, type[IntEnum]] = {
    "buffer": Buffer, "reduce_op": ReduceOp, "binary_op": BinaryOp, "a_source": ASource, "b_source": BSource,
    "destination": Destination,
}  # fmt: skip
"""Field -> the names of its values."""


def unit_names(mask: int) -> str:
    """Return the names of the units in a wait or post mask.

    >>> unit_names(0b1010)
    'GEMM+STORE'
    """
    return "+".join(unit.name for unit in Unit if mask >> unit & 1) or "-"


def instruction_text(cfg: Config, word: int) -> str:
    """Return one instruction as text: opcode, tokens that it takes and gives, and fields that are not 0.

    >>> from celosia.hw.spec.isa import Opcode, encode
    >>> cfg = Config.load("tiny")
    >>> instruction_text(cfg, encode(cfg, Opcode.LOAD, wait=2, buffer=1, dram_addr=64, x_size=9, y_size=1, z_size=1))
    'LOAD    wait GEMM  post -  buffer=WGT dram_addr=0x40 x_size=9 y_size=1 z_size=1'
    """
    opcode = opcode_of(word)
    if opcode is None:
        return f"?       {word:#x}"
    fields = formats(cfg)[opcode].decode(word)
    shown = [
        f"{name}={_value_text(name, value)}"
        for name, value in fields.items()
        if name not in ("opcode", "wait", "post") and (value or name in _NAMES or name == "dram_addr")
    ]
    return f"{opcode.name:<7} wait {unit_names(fields['wait'])}  post {unit_names(fields['post'])}  {' '.join(shown)}"


def _value_text(name: str, value: int) -> str:
    """Return the value of a field as text: its name, a hexadecimal address, or a number."""
    if name == "dram_addr":
        return hex(value)
    if name in _NAMES and value in list(_NAMES[name]):
        return _NAMES[name](value).name
    return str(value)


def disassemble(cfg: Config, words: Iterable[int]) -> Iterator[str]:
    """Yield an instruction stream as numbered lines, for `celosia inspect --disassemble` and the kernels of users.

    words: encoded instructions.
    """
    for number, word in enumerate(words):
        yield f"{number:>6}  {instruction_text(cfg, word)}"
