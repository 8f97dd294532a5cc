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

REWORDED = {
    # Instructions
    "acc[d] (=|+=) sum of inp[s] . wgt[w] transposed, over loops k, r, s, for every n, y, x.": (
        "Multiplies matrices. In each iteration of loops n, y and x, it sums the products `inp · wgtᵀ` over loops k, "
        "r and s. The sum overwrites an entry of acc, or is added to it."
    ),
    "Reduces a window, combines with a second operand, requantises, looks up, adds a rescaled residual, clips.": (
        "Computes one result in each iteration of loops n, y and x. Loops r and s reduce a window of operand A to a "
        "value v. The other operations change v, in this order: combine it with operand B, requantise, clip, look up "
        "in a table, add a rescaled residual."
    ),
    "Copies a block of up to three dimensions of pieces from out to DRAM.": (
        "Copies a block of pieces, of up to three dimensions, from scratchpad out to DRAM."
    ),
    # Fields of all instructions
    "Which instruction this is.": "The instruction: see [Values of fields](#values-of-fields).",
    "Units to take one token from before starting: a bit each for LOAD, GEMM, VECTOR, STORE.": (
        "The instruction takes one token from each of these units before it starts. Bit i is unit i."
    ),
    "Units to give one token to when the last write is done.": (
        "The instruction gives one token to each of these units when its last write is done. Bit i is unit i."
    ),
    # Fields of LOAD
    "TAP or EXP.": "TAP or EXP. Configs with `weight_bits` below 8 add BOOK and a fourth bit.",
    "First element written (of the padded block).": "Address of the first element of the block with its padding.",
    "Value of every byte of padding (ACC: of every int32).": "Value of each byte of padding, or of each int32 for ACC.",
    # Fields of VECTOR
    "VIN only where A is ACC.": "VIN only if A is ACC.",
    "ACC (int32), or OUT, INP or VIN (int8).": (
        "Scratchpad of the result: ACC (int32), or OUT, INP or VIN (int8). In INP, an address counts parts of an entry "
        "that are as large as an entry of OUT."
    ),
    "A is the sum of `taps` entries of VIN (the Config's field), each times its part of an entry of TAP.": (
        "A is a sum over as many neighbouring entries of VIN as the Config has `taps`. Each entry is multiplied by its "
        "weights in an entry of TAP."
    ),
    "How loops r and s combine A: ADD, MAX, MIN.": "Operation that reduces A over loops r and s: ADD, MAX or MIN.",
    "v = A op B: NONE,": "Operation that combines v with B: NONE (v stays),",
    "MUL (low 16 bits of each)": "MUL (of the low 16 bits of each, signed)",
    "SHR (by B's low 5 bits)": "SHR (right shift by B's low 5 bits)",
    "BYTE (that of B's low 2 bits, signed)": (
        "BYTE (the byte of v whose number, from 0 to 3, is B's low 2 bits; the byte is a signed value)"
    ),
    "Scale v per channel by the entry of par, round, add zero_point.": (
        "Replace v by (v + bias) * multiplier / 2^shift, round it, and add zero_point. Each channel has its own bias, "
        "multiplier and shift in an entry of par."
    ),
    "by its table entry.": "by its value in the table.",
    "Which table.": "Number of the table for lookup.",
    "Added to every A before the reduction.": "Number added to each value of A before the reduction.",
    "Added to B in the binary operation.": "Number added to B before the binary operation.",
    "B where b_source is IMM.": "Operand B if b_source is IMM.",
    "Added after requantising.": "Number that requantise adds.",
    "Smallest value of the int8 stage.": (
        "Smallest v after the clip. The clip is left out only if VECTOR writes ACC without requantise, lookup and "
        "rescale_add."
    ),
    "Largest value of the int8 stage.": "Largest v after the clip.",
    "Residual: v =": "Add a residual: v =",
    # Rules
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
    # Registers
    "Bit 0 starts a run, bit 1 ends one and has priority; reads as 0.": (
        "Bit 0 starts a run. Bit 1 ends a run, and has priority. The register reads as 0."
    ),
    "Bit 0 busy, bit 1 done, bits 8 to 15 the error code. Bit 2 stuck: done, but responses of memory are still "
    "outstanding; no run starts before they have come.": (
        "Bit 0: a run is busy. Bit 1: the run is done. Bit 2: the run is done, but responses of memory are still "
        "outstanding; no run starts before they arrive. Bits 8 to 15: the [error code](#error-codes)."
    ),
    "For the watchdog, a lease and an abort: the oldest instruction that waits for a token or, if none waits, the last "
    "one that started.": (
        "After WATCHDOG, LEASE and ABORTED it is the oldest instruction that waits for a token or, if none waits, the "
        "last one that started."
    ),
    "First instruction: byte offset from the DMA base, a multiple of an instruction's bytes.": (
        "Byte offset of the first instruction from the DMA base, a multiple of an instruction's size."
    ),
    "Physical address of DRAM offset 0, low half; a multiple of 4096.": (
        "Low half of the DMA base: the physical address of DRAM offset 0, a multiple of 4096."
    ),
    "High half.": "High half of the DMA base.",
    "Bytes from the base that": "Number of bytes from the DMA base that",
    "Cycles without progress of any unit, and without a response of memory, after which the run ends in an error; 0: "
    "never.": (
        "The run ends with an error after this number of cycles in which no unit makes progress and no response of "
        "memory arrives. 0: never."
    ),
    "Cycles from the start, or from the last write of this register, after which the run ends in an error: a host that "
    "waits for a run writes it again and again; 0: never.": (
        "The run ends with an error this number of cycles after its start, or after the last write of this register. "
        "A host that waits for a run renews this lease by writing the register repeatedly. 0: never."
    ),
    "raise the interrupt while done.": "raise the interrupt while bit 1 of `status` is 1.",
    "cycles in which it moved a beat or did a tile operation": (
        "Cycles in which the unit moved a beat or executed a step of its loops"
    ),
    "cycles in which its next instruction waited for a token": (
        "Cycles in which the unit's next instruction waited to take a token, or for room to give one"
    ),
    "cycles in which it was held up by memory": (
        "Cycles in which a started instruction waited for memory or for a port of a scratchpad"
    ),
    "Events of the run; the": "Number of events of the run. The",
    "Bit 0: the instruction is done, else it starts; bits 1 to 2: its unit; the others: its number.": (
        "Bit 0: 1 if an instruction ends, 0 if it starts. Bits 1 and 2: its unit. The other bits: its number."
    ),
}
"""Words of the declarations, and the words that the document has in their place.

The digest of the hardware covers the strings of the declarations. Their words therefore change only together with the
hardware: a driver would refuse a bitstream that differs from its sources in words alone.
"""


def _table(head: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> Iterator[str]:
    """Yield the lines of a Markdown table, and an empty line."""
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(str(cell) for cell in row)} |"
    yield ""


def _reword(text: str) -> str:
    """Return `text`, words of a declaration, as the document words it."""
    for declared, printed in REWORDED.items():
        text = text.replace(declared, printed)
    return text


def _bits(fmt: Format, field: Field) -> str:
    """Return the bit positions of `field` as text: "12:5", or "3" for a single bit."""
    low = fmt.offsets[field.name]
    return str(low) if field.width == 1 else f"{low + field.width - 1}:{low}"


def _instruction_section(cfg: Config, fmt: Format) -> Iterator[str]:
    """Yield the lines of the section on one instruction: its fields, and the rules that make it illegal."""
    yield f"## {fmt.opcode.name}"
    yield ""
    yield f"{_reword(fmt.doc)} The fields take {fmt.width} bits."
    yield ""
    yield from _table(
        ("bits", "field", "", "meaning"),
        (
            (_bits(fmt, field), f"`{field.name}`", "signed" if field.signed else "", _reword(field.doc))
            for field in fmt.fields
        ),
    )
    yield f"A {fmt.opcode.name} that breaks one of these rules is illegal:"
    yield ""
    yield from (f"- {_reword(rule)}" for rule in rules(cfg)[fmt.opcode])
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
    return f"{_reword(low.doc).removesuffix(', low half.')}."


def _offset(register: Register) -> str:
    """Return the byte offset of a register as text: "0x3c"."""
    return f"0x{register.offset:02x}"


_HEAD = """\
# Instructions and registers

`python -m celosia.hw.spec.isa_doc` prints this page from `hw/spec/isa.py` and `hw/spec/regs.py`; do not edit it. The
widths and positions of fields are those of preset `{preset}`. Other Configs have the same order and other widths, and
some have more fields. `sim/functional/reference.py` defines what an instruction computes.

An instruction takes {size} bytes, the least significant byte first. The hardware ignores the bits above the last field.
The [glossary](glossary.md#the-accelerator) explains the terms of this page, such as unit, scratchpad, row and plane.

- Tokens: an instruction takes one [token](glossary.md#the-accelerator) from each unit in `wait` before it starts. It
  gives one to each unit in `post` when its last write is done.
- Loops: GEMM and VECTOR run nested loops. The address of an operand starts at its base. An iteration of a loop moves it
  by the operand's step in that loop; without a step it stays.
- Addresses: GEMM and VECTOR address [entries](glossary.md#the-accelerator) of scratchpads. LOAD and STORE address
  elements. An element of INP, VIN, ACC and OUT is a [piece](glossary.md#the-accelerator) of `batch` x `group` values.
  An element of the other scratchpads is an entry.
- Errors: an illegal instruction ends the run with error ILLEGAL_INSTRUCTION.
"""
"""Text before the instructions."""

_REGISTERS = """\
## Registers

Each register has 32 bits. The host may read every register. It may also write registers with access *write* at any
time, and registers with access *setup* between runs. A write to the latter has no effect during a run, or while
responses of memory to a run are outstanding.
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
    lines += ["The brackets after a value name what it needs: a field of the Config that is true, or a condition.", ""]
    for enum in _ENUMS:
        lines += _enum_line(enum)
    counter_halves = {f"{name}_{half}" for name in COUNTERS for half in ("lo", "hi")}
    lines += ["", _REGISTERS]
    lines += _table(
        ("offset", "register", "access", "meaning"),
        (
            (_offset(register), f"`{register.name}`", register.access.name.lower(), _reword(register.doc))
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
