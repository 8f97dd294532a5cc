"""Control registers of the accelerator: offset, access and meaning. Each has 32 bits; the host uses AXI4-Lite.

The RTL's register file, the driver and docs/isa.md derive from the declarations here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from celosia.hw.spec.isa import Unit

MAGIC = 0x43454C4F
"""Constant value of register `magic`, "CELO", by which a host recognises the accelerator."""


class Access(IntEnum):
    """Access rights of the host to a register."""

    READ = 0
    WRITE = 1
    """The host may write; a read returns the value written."""
    SETUP = 2
    """Like WRITE, but writes have no effect during a run, or while responses of memory to a run are outstanding."""


class Error(IntEnum):
    """Error codes that register `status` reports after a run."""

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
"""Meaning of each error code, a noun phrase or clause for messages."""


@dataclass(frozen=True)
class Register:
    """Declaration of a register of 32 bits.

    name : its name in the driver and in docs/isa.md.
    offset : byte address, from the accelerator's base address.
    access : what the host may do with it.
    doc : its meaning, a sentence for docs/isa.md.
    """

    name: str
    offset: int
    access: Access
    doc: str


CONTROL_START = 1 << 0
"""Bit of register `control` that starts a run; it also clears the units, the semaphores and the counters."""
CONTROL_ABORT = 1 << 1
"""Bit of register `control` that ends a run: units start nothing more, and the run is done when all outstanding
responses of memory have come."""
STATUS_BUSY = 1 << 0
STATUS_DONE = 1 << 1
STATUS_STUCK = 1 << 2
"""Bits of register `status`. Stuck: the run is done, but responses of memory were outstanding longer than the time of
the watchdog; no run starts before they have come."""
STATUS_ERROR_SHIFT = 8
"""Lowest bit of the error code in register `status`."""
TRACE_DONE = 1 << 0
"""Bit of register `trace_event`: the instruction is done; else it starts."""
TRACE_UNIT_SHIFT, TRACE_INDEX_SHIFT = 1, 3
"""Lowest bit of the unit, and of the instruction's number, in register `trace_event`."""
TRACE_PREFIX = "trace_"
"""Prefix of the names of registers that only exist in Configs with a `trace_depth`; in others they read as 0."""


_Rows = tuple[tuple[str, Access, str], ...]
"""Declarations of registers: name, access and meaning of each."""

_RUN: _Rows = (
    ("magic", Access.READ, 'Always 0x43454C4F ("CELO").'),
    ("identity", Access.READ, "First 32 bits of the Config's digest."),
    ("sources", Access.READ, "First 32 bits of the digest of the hardware's sources."),
    ("control", Access.WRITE, "Bit 0 starts a run. Bit 1 ends a run, and has priority. The register reads as 0."),
    (
        "status",
        Access.READ,
        "Bit 0: a run is busy. Bit 1: the run is done. Bit 2: the run is done, but responses of memory are still "
        "outstanding; no run starts before they arrive. Bits 8 to 15: the [error code](#error-codes).",
    ),
    (
        "error_index",
        Access.READ,
        "Number of the instruction that caused the error, from 0. After WATCHDOG, LEASE and ABORTED it is the "
        "oldest instruction that waits for a token or, if none waits, the last one that started.",
    ),
    ("runs", Access.READ, "Number of runs started since the reset, modulo 2^32."),
    (
        "instr_addr",
        Access.SETUP,
        "Byte offset of the first instruction from the DMA base, a multiple of an instruction's size.",
    ),
    ("instr_count", Access.SETUP, "Number of instructions."),
    (
        "dma_base_lo",
        Access.SETUP,
        "Low half of the DMA base: the physical address of DRAM offset 0, a multiple of 4096.",
    ),
    ("dma_base_hi", Access.SETUP, "High half of the DMA base."),
    ("dma_size", Access.SETUP, "Number of bytes from the DMA base that the accelerator may read and write."),
    (
        "watchdog",
        Access.WRITE,
        "The run ends with an error after this number of cycles in which no unit makes progress and no response "
        "of memory arrives. 0: never.",
    ),
    (
        "lease",
        Access.WRITE,
        "The run ends with an error this number of cycles after its start, or after the last write of this "
        "register. A host that waits for a run renews this lease by writing the register repeatedly. 0: never.",
    ),
    ("irq_enable", Access.WRITE, "Bit 0: raise the interrupt while bit 1 of `status` is 1."),
)
"""Registers that identify the hardware and control a run: name, access, meaning."""

_TRACE: _Rows = (
    (
        "trace_count",
        Access.READ,
        "Number of events of the run. The trace buffer holds the last `trace_depth` of them.",
    ),
    ("trace_at", Access.WRITE, "Selects an event of the trace buffer: its number, from 0, modulo `trace_depth`."),
    (
        "trace_event",
        Access.READ,
        "The selected event. Bit 0: 1 if an instruction ends, 0 if it starts. Bits 1 and 2: its unit. The other "
        "bits: its number.",
    ),
    ("trace_cycle", Access.READ, "Time of the selected event: cycles from the start, modulo 2^32."),
)
"""Registers that read the event trace: name, access, meaning."""


def _counters() -> Iterator[tuple[str, str]]:
    """Yield the name and the meaning of each 64-bit counter.

    A new counter also needs its input in hw/control.py, which hw/top.py connects, and its prediction in
    sim/timing/machine.py, `_make_timing`.
    """
    yield "cycles", "Cycles from start to done"
    yield "read_beats", "Beats received on the AXI read channels"
    yield "write_beats", "Beats sent on the AXI write channel"
    for unit in Unit:
        for suffix, doc, channels in (
            (
                "busy",
                "Cycles in which the unit moved a beat or executed a step of its loops",
                ", summed over its channels",
            ),
            (
                "wait_token",
                "Cycles in which the unit's next instruction waited to take a token, or for room to give one",
                "",
            ),
            (
                "wait_memory",
                "Cycles in which a started instruction waited for memory or for a port of a scratchpad",
                ", summed over its channels",
            ),
        ):
            yield f"{unit.name.lower()}_{suffix}", f"{unit.name}: {doc}{channels if unit == Unit.LOAD else ''}"


def _registers() -> dict[str, Register]:
    """Declare every register, by name, in the order of the offsets: run, counters, trace."""
    halves = (("lo", "low half"), ("hi", "high half"))
    counters = (
        (f"{name}_{half}", Access.READ, f"{doc}, {which}.") for name, doc in _counters() for half, which in halves
    )
    rows = (*_RUN, *counters, *_TRACE)
    return {name: Register(name, 4 * i, access, doc) for i, (name, access, doc) in enumerate(rows)}


REGISTERS = _registers()
COUNTERS = tuple(name.removesuffix("_lo") for name in REGISTERS if name.endswith("_lo") and name != "dma_base_lo")
"""Names of the 64-bit counters; each is two registers, `_lo` and `_hi`."""
