"""Print docs/isa.md from the declarations of instructions and registers.

Usage: `python -m celosia.hw.spec.isa_doc > docs/isa.md`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import IntEnum

from celosia.hw.spec.config import PRESETS, Config
from celosia.hw.spec.isa import (
    REQUIRED_SWITCH,
    ASource,
    BinaryOp,
    BSource,
    Buffer,
    Destination,
    Field,
    Format,
    Opcode,
    ReduceOp,
    Unit,
    formats,
    instruction_bytes,
)
from celosia.hw.spec.legality import rules
from celosia.hw.spec.regs import ERROR_TEXT, REGISTERS, Error

_ENUMS = (Opcode, Unit, Buffer, ASource, BSource, ReduceOp, BinaryOp, Destination)
"""Enumerations of field values that the document lists."""


def _table(head: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> Iterator[str]:
    """Yield the lines of a Markdown table, and an empty line."""
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(str(cell) for cell in row)} |"
    yield ""


def _bits(fmt: Format, field: Field) -> str:
    """Return the bit positions of `field` as text: "12:5", or "3" for a single bit."""
    low = fmt.offsets[field.name]
    return str(low) if field.width == 1 else f"{low + field.width - 1}:{low}"


def _instruction_section(cfg: Config, fmt: Format) -> Iterator[str]:
    """Yield the lines of the section on one instruction: its fields, and the rules that make it illegal."""
    yield f"## {fmt.opcode.name}"
    yield ""
    yield f"{fmt.doc} {fmt.width} bits."
    yield ""
    yield from _table(
        ("bits", "field", "", "meaning"),
        ((_bits(fmt, field), f"`{field.name}`", "signed" if field.signed else "", field.doc) for field in fmt.fields),
    )
    yield "Illegal where"
    yield ""
    yield from (f"- {rule}" for rule in rules(cfg)[fmt.opcode])
    yield ""


def _enum_line(enum: type[IntEnum]) -> Iterator[str]:
    """Yield a list item: the members of `enum` with their numbers, and the Config field that each needs."""
    required_fields = REQUIRED_SWITCH.get(enum, {})
    values = ", ".join(
        f"{member.name} {member.value}" + (f" (`{required_fields[member]}`)" if member in required_fields else "")
        for member in enum
    )
    yield f"- {enum.__name__}: {values}"


def isa_markdown(cfg: Config = PRESETS["pynq"]) -> str:
    """Return the text of docs/isa.md; bit positions are those of `cfg`."""
    lines = [
        "# Instructions and registers",
        "",
        "Printed from `hw/spec/isa.py` and `hw/spec/regs.py` by `python -m celosia.hw.spec.isa_doc`; do not edit.",
        f"Widths and positions are those of preset `{cfg.name}`; other Configs have other widths, in the same order.",
        "What an instruction computes is defined in `sim/functional/reference.py`.",
        "",
        f"An instruction takes {instruction_bytes(cfg)} bytes, least significant byte first. Bits above its last field",
        "do not count. Addresses of scratchpads count entries. Those of LOAD count elements: an element is a piece",
        "(batch x group values) of INP, VIN or ACC, an entry of the others. An instruction takes one token from each",
        "unit in `wait` before it starts, and gives one to each unit in `post` when its last write is done.",
        "",
    ]
    for fmt in formats(cfg).values():
        lines += _instruction_section(cfg, fmt)
    lines += ["## Values of fields", "", "In brackets: the field of the Config that must be true for the value.", ""]
    for enum in _ENUMS:
        lines += _enum_line(enum)
    lines += ["", "## Registers", "", "All have 32 bits; counters are 64 bits in two registers.", ""]
    lines += _table(
        ("offset", "register", "access", "meaning"),
        (
            (f"0x{register.offset:02x}", f"`{register.name}`", register.access.name.lower(), register.doc)
            for register in REGISTERS.values()
        ),
    )
    lines += ["## Error codes", ""]
    lines += _table(
        ("code", "name", "meaning"), ((error.value, error.name, ERROR_TEXT.get(error, "no error")) for error in Error)
    )
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    print(isa_markdown(), end="")
