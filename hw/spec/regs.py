"""The control registers, declared once: offset, access and meaning. All are 32 bits wide, on AXI4-Lite."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from celosia.hw.spec.isa import Unit

MAGIC = 0x43454C4F
"""Value of register `magic`: "CELO"."""


class Access(IntEnum):
    """Access of the host to a register."""

    READ = 0
    WRITE = 1
    """Written by the host; reads give the value back."""
    SETUP = 2
    """Written as WRITE, but writes change nothing during a run, or while memory owes answers of one."""


class Error(IntEnum):
    """Error codes of register `status`."""

    NONE = 0
    ILLEGAL_INSTRUCTION = 1
    ADDRESS = 2
    READ = 3
    WRITE = 4
    WATCHDOG = 5
    ABORTED = 6
    LEASE = 7


ERROR_TEXT = {
    Error.ILLEGAL_INSTRUCTION: "an illegal instruction",
    Error.ADDRESS: "a DRAM address outside the DMA limits",
    Error.READ: "an error response to an AXI read",
    Error.WRITE: "an error response to an AXI write",
    Error.WATCHDOG: "no progress within the watchdog's time",
    Error.ABORTED: "the host has ended the run",
    Error.LEASE: "the host has not renewed its lease in time",
}


@dataclass(frozen=True)
class Register:
    """A register of 32 bits at byte `offset`; doc: a sentence for docs/isa.md."""

    name: str
    offset: int
    access: Access
    doc: str


CONTROL_START = 1 << 0
"""Starts the instructions; also clears the units, the semaphores and the counters."""
CONTROL_ABORT = 1 << 1
"""Ends a run: units begin nothing more, and it is done when memory has answered what it was asked."""
STATUS_BUSY = 1 << 0
STATUS_DONE = 1 << 1
STATUS_STUCK = 1 << 2
"""Memory has not answered all that the last run asked of it within the watchdog's time; no run starts before it has."""
STATUS_ERROR_SHIFT = 8
TRACE_DONE = 1 << 0
"""Flag of a trace event: the instruction is done; else it starts."""
TRACE_UNIT_SHIFT, TRACE_INDEX_SHIFT = 1, 3
"""First bits of the unit and of the instruction's number in a trace event."""
TRACE_PREFIX = "trace_"
"""Prefix of registers that exist only where the Config has a `trace_depth`; others read as 0."""


_Rows = tuple[tuple[str, Access, str], ...]

_RUN: _Rows = (
    ("magic", Access.READ, 'Always 0x43454C4F ("CELO").'),
    ("identity", Access.READ, "First 32 bits of the Config's digest."),
    ("sources", Access.READ, "First 32 bits of the digest of the hardware's sources."),
    ("control", Access.WRITE, "Bit 0 starts a run, bit 1 ends one, which counts where both are set; reads as 0."),
    (
        "status",
        Access.READ,
        "Bit 0 busy, bit 1 done, bits 8 to 15 the error code. Bit 2 stuck: done, but memory has not answered all "
        "that it was asked; no run starts before it has.",
    ),
    (
        "error_index",
        Access.READ,
        "Number of the instruction that the error belongs to, from 0; for the watchdog, a lease and an abort "
        "the oldest that waits for a token or, where none does, the last one that started.",
    ),
    ("runs", Access.READ, "Runs that were started since the reset: the number of the last one, modulo 2^32."),
    ("instr_addr", Access.SETUP, "First instruction: byte offset from the DMA base, a multiple of its own bytes."),
    ("instr_count", Access.SETUP, "How many instructions."),
    ("dma_base_lo", Access.SETUP, "Physical address of DRAM offset 0, low half; a multiple of 4096."),
    ("dma_base_hi", Access.SETUP, "High half."),
    ("dma_size", Access.SETUP, "Bytes that may be read and written from the base."),
    (
        "watchdog",
        Access.WRITE,
        "Cycles without progress of any unit, and without an answer of memory, before the run ends in an error; 0 "
        "for never.",
    ),
    (
        "lease",
        Access.WRITE,
        "Cycles from the start, or from the last write of this register, before the run ends in an error: a host "
        "that waits for a run writes it again and again; 0 for never.",
    ),
    ("irq_enable", Access.WRITE, "Bit 0: raise the interrupt while done."),
)
"""Registers of the hardware, and of a run."""

_TRACE: _Rows = (
    (
        "trace_count",
        Access.READ,
        "Events of the run that the ring has taken; it holds the last `trace_depth` of them.",
    ),
    ("trace_at", Access.WRITE, "An entry of the ring: the number of an event, from 0, modulo `trace_depth`."),
    (
        "trace_event",
        Access.READ,
        "What that event is. Bit 0: the instruction is done, else it starts; bits 1 to 2 its unit, the others its "
        "number.",
    ),
    ("trace_cycle", Access.READ, "When it was: cycles from the start, modulo 2^32."),
)
"""Registers of the event trace."""


def _counters() -> Iterator[tuple[str, str]]:
    """Name and meaning of each counter."""
    yield "cycles", "Cycles from start to done"
    yield "read_beats", "Beats received on the AXI read channels"
    yield "write_beats", "Beats sent on the AXI write channel"
    for unit in Unit:
        for label, doc, lanes in (
            ("busy", "cycles in which it moved a beat or did a tile operation", ", those of each lane"),
            ("wait_token", "cycles in which its next instruction waited for a token", ""),
            ("wait_memory", "cycles in which it was held up by memory", ", those of each lane"),
        ):
            yield f"{unit.name.lower()}_{label}", f"{unit.name}: {doc}{lanes if unit == Unit.LOAD else ''}"


def _registers() -> dict[str, Register]:
    """All registers, in the order of their offsets."""
    halves = (("lo", "low half"), ("hi", "high half"))
    counters = (
        (f"{name}_{half}", Access.READ, f"{doc}, {half_text}.")
        for name, doc in _counters()
        for half, half_text in halves
    )
    rows = (*_RUN, *counters, *_TRACE)
    return {name: Register(name, 4 * i, access, doc) for i, (name, access, doc) in enumerate(rows)}


REGISTERS = _registers()
COUNTERS = tuple(name.removesuffix("_lo") for name in REGISTERS if name.endswith("_lo") and name != "dma_base_lo")
"""Names of the 64-bit counters; each is two registers, `_lo` and `_hi`."""
