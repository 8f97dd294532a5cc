"""Instruction formats as Amaranth layouts, and the signatures of the ports between the parts of the accelerator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from amaranth import signed, unsigned
from amaranth.hdl import ShapeLike
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import UNIT_OF, Format, Opcode, Unit, formats
from celosia.hw.spec.scratchpads import Scratchpad

UNITS = tuple(unit.name.lower() for unit in Unit)
"""Names of the units in lower case, as in the names of ports."""
INDEX_BITS = 32
"""Width of an instruction's number within a run: that of register `instr_count`."""

ERROR_BITS = 4
"""Width of an error code, a value of `regs.Error`."""


def array_layout(element: ShapeLike, shape: Sequence[int]) -> data.ArrayLayout:
    """Return the layout of a multi-dimensional array, outermost dimension first: a port is indexed as `port[i][j]`."""
    first, *rest = shape
    return data.ArrayLayout(array_layout(element, rest) if rest else element, first)


def layout(fmt: Format) -> data.StructLayout:
    """Return the layout of the fields of `fmt`, at the bit positions of its encoding."""
    return data.StructLayout(
        {field.name: signed(field.width) if field.signed else unsigned(field.width) for field in fmt.fields}
    )


def instruction_layout(cfg: Config, opcode: Opcode) -> data.StructLayout:
    """Return the layout of an instruction that a unit receives: its number within the run, and its fields."""
    return data.StructLayout({"index": INDEX_BITS, "fields": layout(formats(cfg)[opcode])})


done_layout = data.StructLayout({"post": 4, "index": INDEX_BITS})
"""Payload of `done`: the post mask and the number of the instruction whose last write is committed."""

error_layout = data.StructLayout({"code": ERROR_BITS, "index": INDEX_BITS})
"""Payload of `error`: a code of `regs.Error`, and the number of the instruction that failed."""


class Pulse(wiring.Signature):
    """A payload that is valid for one cycle, without back-pressure: a stream without `ready`."""

    def __init__(self, shape: data.Layout) -> None:
        super().__init__({"valid": Out(1), "payload": Out(shape)})


class TraceRegisters(wiring.Signature):
    """The registers of the event trace, as `EventTrace` sees them: the host writes `at` and reads the others."""

    def __init__(self) -> None:
        super().__init__({"at": In(32), "event": Out(32), "cycle": Out(32), "count": Out(32)})


class PerUnit(wiring.Signature):
    """A port for each unit, named after the unit. Property `each` of the interface object is the tuple of all.

    of: function that returns the signature of the port for an opcode.
    """

    def __init__(self, of: Callable[[Opcode], wiring.Signature]) -> None:
        super().__init__({UNITS[unit]: Out(of(opcode)) for opcode, unit in UNIT_OF.items()})

    def create(self, *, path: tuple[str | int, ...] | None = None, src_loc_at: int = 0) -> PortsOfUnits:
        """Create the interface object, as every signature does."""
        return PortsOfUnits(self, path=path, src_loc_at=1 + src_loc_at)


class PortsOfUnits(wiring.PureInterface):
    """Interface object of a `PerUnit`."""

    @property
    def each(self) -> tuple[Any, ...]:
        """The ports in the order of `Unit`: LOAD, GEMM, VECTOR, STORE."""
        return self.load, self.gemm, self.vector, self.store


def instructions(cfg: Config) -> PerUnit:
    """Return the signature of the instruction streams to the units: `instruction_layout` for each."""
    return PerUnit(lambda opcode: stream.Signature(instruction_layout(cfg, opcode)))


def unit_members(cfg: Config, opcode: Opcode) -> dict[str, wiring.Member]:
    """Return the ports that every unit has.

    instr: instructions whose tokens have been acquired, in program order; accepted when the unit starts one.
    done: one pulse an instruction, in program order, when its last write is committed.
    error: one pulse when an instruction fails. After it, `halt` comes.
    active: 1 in each cycle in which the unit moves a beat or does a tile operation (counter `busy`).
    stalled: 1 in each cycle in which a started instruction waits for memory or a scratchpad port (`wait_memory`).
    idle: 1 while nothing is in flight in the unit or on AXI.
    halt: 1 from an error to the next run: start nothing new, drop what is left, end AXI bursts as AXI demands.
    """
    return {
        "instr": In(stream.Signature(instruction_layout(cfg, opcode))),
        "done": Out(Pulse(done_layout)),
        "error": Out(Pulse(error_layout)),
        "active": Out(1),
        "stalled": Out(1),
        "idle": Out(1),
        "halt": In(1),
    }


claim_layout = data.StructLayout({"read": 2, "write": 2})
"""Banks of acc whose ports GEMM is going to use, a bit for each bank: the read port `pipeline.claim_lead` cycles later,
the write port in the next cycle."""


class ReadPort(wiring.Signature):
    """The reader's side of a scratchpad port. `data` is valid in the cycle after `en & ready`, and stays until the next
    read; from acc it is valid for that one cycle only."""

    def __init__(self, addr_bits: int, shape: int) -> None:
        super().__init__({"en": Out(1), "addr": Out(addr_bits), "ready": In(1), "data": In(shape)})


class WritePort(wiring.Signature):
    """The writer's side of a scratchpad port: it writes if `en & ready`; bit i of `mask` enables grain i of `data`."""

    def __init__(self, addr_bits: int, width: int, grain: int) -> None:
        super().__init__({
            "en": Out(1), "addr": Out(addr_bits), "mask": Out(width // grain), "data": Out(width), "ready": In(1),
        })  # fmt: skip


def read_port(pad: Scratchpad, entries: int = 1) -> ReadPort:
    """Return a port that reads `entries` consecutive entries of `pad` at once, beginning at the address."""
    return ReadPort(pad.address_bits, entries * pad.width)


def write_port(pad: Scratchpad) -> WritePort:
    """Return a port that writes an entry of `pad`, or those of its grains that the mask enables."""
    return WritePort(pad.address_bits, pad.width, pad.grain)


def load_port(cfg: Config, pad: Scratchpad) -> WritePort:
    """Return the port through which LOAD writes `pad`.

    In Configs without `int32`, LOAD only brings int8 to acc: its port has a byte for each int32 of an entry, and the
    scratchpad extends the signs.
    """
    grain = 8 if pad.name == "acc" and not cfg.int32 else pad.grain
    return WritePort(pad.address_bits, pad.width // pad.grain * grain, grain)


def part_port(pad: Scratchpad, width: int) -> WritePort:
    """Return a port that writes one part of an entry at a time, `width` bits, or an entry that is no wider.

    Its address counts parts. VECTOR writes inp through it, whose entries may be larger than its own.
    """
    return WritePort(pad.part_address_bits(width), width, width)
