"""Instructions to the bytes that fetch reads."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.vthread.pipeline import StreamInstruction
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import Format, formats, instruction_bytes
from celosia.sim.functional.access import tabulate


def encode(cfg: Config, instructions: list[StreamInstruction]) -> NDArray[np.uint8]:
    """Encode instructions, a row of `instruction_bytes` each, [count, bytes] uint8. ValueError where a value does not
    fit its field."""
    words = np.zeros((len(instructions), instruction_bytes(cfg) // 8), np.uint64)
    opcodes = np.array([i.opcode for i in instructions], np.int64)
    for opcode, form in formats(cfg).items():
        rows = np.flatnonzero(opcodes == opcode)
        if len(rows):
            words[rows] = _words(form, [instructions[row].fields for row in rows], words.shape[1])
    return words.view(np.uint8)


def _words(form: Format, fields: list[dict[str, int]], size: int) -> NDArray[np.uint64]:
    """Encode instructions of one format as words, [count, size]."""
    used = set[str]().union(*fields)
    if unknown := used - set(form.offsets):
        raise ValueError(f"{form.opcode.name} has no field {', '.join(sorted(unknown))}")
    words = np.zeros((len(fields), size), np.uint64)
    columns = tabulate(fields, dict.fromkeys(form.offsets, 0) | {"opcode": int(form.opcode)})
    for field in form.fields:
        if field.name not in used and field.name != "opcode":
            continue  # 0
        values = columns[field.name]
        for extreme in (values.min(), values.max()):
            field.check(int(extreme), form.opcode.name)
        bits = values.view(np.uint64) & np.uint64((1 << field.width) - 1)
        word, shift = divmod(form.offsets[field.name], 64)
        words[:, word] |= bits << np.uint64(shift)
        if shift + field.width > 64:
            words[:, word + 1] |= bits >> np.uint64(64 - shift)
    return words
