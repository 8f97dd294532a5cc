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
from celosia.hw.spec.regs import COUNTERS, ERROR_TEXT, REGISTERS, Error, Register

_ENUMS = (Opcode, Unit, Buffer, ASource, BSource, ReduceOp, BinaryOp, Destination)
"""Enumerations of field values that the document lists."""

_BUFFER_CONDITIONS: dict[IntEnum, str] = {
    Buffer.TAP: "taps > 0",
    Buffer.EXP: "softmax > 0",
    Buffer.BOOK: "weight_bits < 8",
}
"""Scratchpads that only some Configs have, and the condition of each."""

REQUIREMENTS = {
    "waits for or posts to itself": "`wait` and `post` do not name the instruction's own unit",
    "a size is 0": "no size is 0",
    "only ACC can widen": "only a LOAD to ACC can widen",
    "the buffer does not exist": "the Config has the scratchpad that `buffer` names",
    "int32 for ACC needs": "a LOAD to ACC that does not widen needs",
    "an extent is 0": "no extent is 0",
    "the reduction does not exist": "`reduce_op` has one of its values",
    "the binary operation does not exist": "`binary_op` has one of its values",
    "taps read A from VIN": "`taps` needs A from VIN",
    "A and B are both VIN": "A and B do not both come from VIN",
    "the Config has no taps": "`taps` needs a Config with taps",
}
"""The requirement, as this document words it, by the condition that makes an instruction illegal, as errors word it."""


def _table(head: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> Iterator[str]:
    """Yield the lines of a Markdown table, and an empty line."""
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(str(cell) for cell in row)} |"
    yield ""


def _requirement(rule: str) -> str:
    """Return the requirement that an instruction breaks if condition `rule` holds."""
    for condition, requirement in REQUIREMENTS.items():
        rule = rule.replace(condition, requirement)
    return rule


def _bits(fmt: Format, field: Field) -> str:
    """Return the bit positions of `field` as text: "12:5", or "3" for a single bit."""
    low = fmt.offsets[field.name]
    return str(low) if field.width == 1 else f"{low + field.width - 1}:{low}"


def _instruction_section(cfg: Config, fmt: Format) -> Iterator[str]:
    """Yield the lines of the section on one instruction: its fields, and the rules that make it illegal."""
    yield f"## {fmt.opcode.name}"
    yield ""
    yield f"{fmt.doc} The fields take {fmt.width} bits."
    yield ""
    yield from _table(
        ("bits", "field", "", "meaning"),
        ((_bits(fmt, field), f"`{field.name}`", "signed" if field.signed else "", field.doc) for field in fmt.fields),
    )
    yield f"A {fmt.opcode.name} that breaks one of these rules is illegal:"
    yield ""
    yield from (f"- {_requirement(rule)}" for rule in rules(cfg)[fmt.opcode])
    yield ""


def _enum_line(enum: type[IntEnum]) -> Iterator[str]:
    """Yield a list item: the members of `enum` with their numbers, and what each requires of the Config."""
    required_fields = _BUFFER_CONDITIONS if enum is Buffer else REQUIRED_SWITCH.get(enum, {})
    values = ", ".join(
        f"{member.name} {member.value}" + (f" (`{required_fields[member]}`)" if member in required_fields else "")
        for member in enum
    )
    yield f"- {enum.__name__}: {values}"


def _counter_tables() -> Iterator[str]:
    """Yield two tables of the 64-bit counters: those of a run, and those that each unit has."""
    of_units = {f"{unit.name.lower()}_{suffix}" for unit in Unit for suffix in _unit_counters()}
    run_counters = [REGISTERS[f"{name}_lo"] for name in COUNTERS if name not in of_units]
    yield from _table(
        ("offset", "counter", "meaning"),
        ((_offset(low), f"`{low.name.removesuffix('_lo')}`", _counter_text(low)) for low in run_counters),
    )
    rows: list[tuple[object, ...]] = []
    for suffix in _unit_counters():
        lows = [REGISTERS[f"{unit.name.lower()}_{suffix}_lo"] for unit in Unit]
        text = _counter_text(lows[-1]).removeprefix(f"{list(Unit)[-1].name}: ")
        rows.append((f"`<unit>_{suffix}`", *map(_offset, lows), text))
    yield from _table(("counter", *(unit.name for unit in Unit), "meaning"), rows)


def _unit_counters() -> list[str]:
    """Return the names of the counters that each unit has, without the name of the unit."""
    prefix = f"{Unit.GEMM.name.lower()}_"
    return [name.removeprefix(prefix) for name in COUNTERS if name.startswith(prefix)]


def _counter_text(low: Register) -> str:
    """Return the meaning of the counter whose low half is register `low`."""
    return f"{low.doc.removesuffix(', low half.')}."


def _offset(register: Register) -> str:
    """Return the byte offset of a register as text: "0x3c"."""
    return f"0x{register.offset:02x}"


_HEAD = """\
# Instructions and registers

`python -m celosia.hw.spec.isa_doc` prints this page from `hw/spec/isa.py` and `hw/spec/regs.py`; do not edit it. The
widths and positions of fields are those of preset `{preset}`. On other Configs, fields have the same order but other
widths, and some Configs have additional fields. `sim/functional/reference.py` defines what an instruction computes.

An instruction takes {size} bytes, the least significant byte first. The hardware ignores the bits above the last field.
The [glossary](glossary.md#the-accelerator) explains the terms of this page, such as unit, scratchpad, row and plane.

- Tokens: an instruction takes one [token](glossary.md#the-accelerator) from each unit in `wait` before it starts. It
  gives one to each unit in `post` when its last write is done.
- Loops: GEMM and VECTOR run nested loops. The address of an operand starts at its base. Each iteration of a loop adds
  the operand's step in that loop to the address. A loop in which the operand has no step does not change the address.
- Addresses: GEMM and VECTOR address [entries](glossary.md#the-accelerator) of scratchpads. LOAD and STORE address
  elements. An element of INP, VIN, ACC and OUT is a [piece](glossary.md#the-accelerator) of `batch` x `group` values,
  and an element of WGT a piece of `block_out` x `group` values. An element of the other scratchpads is an entry.
- Errors: an illegal instruction ends the run with error ILLEGAL_INSTRUCTION.
"""
"""Text before the instructions."""

_REGISTERS = """\
## Registers

Each register has 32 bits. The host may read every register. It may also write registers with access *write* at any
time, and registers with access *setup* between runs. A write to a *setup* register has no effect during a run, or
while responses of memory to a run are outstanding.
"""
"""Text before the table of registers."""

_COUNTERS = """\
## Counters

A counter has 64 bits in two registers, which the host may read. The offsets are those of the low half, register
`<counter>_lo`; the high half, `<counter>_hi`, lies 4 bytes after it. `load_busy` and `load_wait_memory` are sums over
the [channels of LOAD](glossary.md#the-accelerator).
"""
"""Text before the tables of counters."""


def isa_markdown(cfg: Config = PRESETS["pynq"]) -> str:
    """Return the text of docs/isa.md; bit positions are those of `cfg`."""
    lines = [_HEAD.format(preset=cfg.name, size=instruction_bytes(cfg))]
    for fmt in formats(cfg).values():
        lines += _instruction_section(cfg, fmt)
    lines += ["## Values of fields", ""]
    lines += [
        "A value with brackets exists only in Configs that meet the condition in the brackets. The name of a field "
        "alone means that this field is true.",
        "",
    ]
    for enum in _ENUMS:
        lines += _enum_line(enum)
    counter_halves = {f"{name}_{half}" for name in COUNTERS for half in ("lo", "hi")}
    lines += ["", _REGISTERS]
    lines += _table(
        ("offset", "register", "access", "meaning"),
        (
            (_offset(register), f"`{register.name}`", register.access.name.lower(), register.doc)
            for register in REGISTERS.values()
            if register.name not in counter_halves
        ),
    )
    lines += [_COUNTERS, *_counter_tables()]
    lines += ["## Error codes", ""]
    lines += _table(
        ("code", "name", "meaning"), ((error.value, error.name, ERROR_TEXT.get(error, "no error")) for error in Error)
    )
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    print(isa_markdown(), end="")
