"""Instruction formats as Amaranth shapes, and the signatures through which the parts of the accelerator meet."""

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
"""Names of the units, as ports have them."""
INDEX_BITS = 32
"""Width of an instruction's number within a run: that of register `instr_count`."""

ERROR_BITS = 4


def array_layout(element: ShapeLike, shape: Sequence[int]) -> data.ArrayLayout:
    """Nested arrays of `element`, the outermost dimension first: a port is indexed as `port[i][j]`."""
    first, *rest = shape
    return data.ArrayLayout(array_layout(element, rest) if rest else element, first)


def layout(fmt: Format) -> data.StructLayout:
    """Layout of the fields of `fmt`, at the bit positions of its encoding."""
    return data.StructLayout(
        {field.name: signed(field.width) if field.signed else unsigned(field.width) for field in fmt.fields}
    )


def instruction_layout(cfg: Config, opcode: Opcode) -> data.StructLayout:
    """Payload that a unit receives: the number of the instruction within the run, and its fields."""
    return data.StructLayout({"index": INDEX_BITS, "fields": layout(formats(cfg)[opcode])})


done_layout = data.StructLayout({"post": 4, "index": INDEX_BITS})
"""Payload of `done`: the post mask and the number of the instruction whose last write is committed."""

error_layout = data.StructLayout({"code": ERROR_BITS, "index": INDEX_BITS})


class Pulse(wiring.Signature):
    """A payload that is there for one cycle and cannot be held back."""

    def __init__(self, shape: data.Layout) -> None:
        super().__init__({"valid": Out(1), "payload": Out(shape)})


class TraceRegisters(wiring.Signature):
    """The registers of the event trace, from the ring's side: `at` is the host's, the others are the ring's."""

    def __init__(self) -> None:
        super().__init__({"at": In(32), "event": Out(32), "cycle": Out(32), "count": Out(32)})


class PerUnit(wiring.Signature):
    """A port for each unit, with the name of the unit; `each` of the object has them in the order of `Unit`."""

    def __init__(self, of: Callable[[Opcode], wiring.Signature]) -> None:
        super().__init__({UNITS[unit]: Out(of(opcode)) for opcode, unit in UNIT_OF.items()})

    def create(self, *, path: tuple[str | int, ...] | None = None, src_loc_at: int = 0) -> PortsOfUnits:
        """Create the interface object, as every signature does."""
        return PortsOfUnits(self, path=path, src_loc_at=1 + src_loc_at)


class PortsOfUnits(wiring.PureInterface):
    """Interface object of a `PerUnit`."""

    @property
    def each(self) -> tuple[Any, ...]:
        """The ports as seen from this side, those of LOAD, GEMM, VECTOR and STORE."""
        return self.load, self.gemm, self.vector, self.store


def instructions(cfg: Config) -> PerUnit:
    """Instructions on their way to the units, a stream of `instruction_layout` for each."""
    return PerUnit(lambda opcode: stream.Signature(instruction_layout(cfg, opcode)))


def unit_members(cfg: Config, opcode: Opcode) -> dict[str, wiring.Member]:
    """Ports that every unit has.

    instr: instructions whose tokens have been taken, in program order; accepted when the unit starts one.
    done: one pulse an instruction, in program order, when its last write is committed.
    error: one pulse when an instruction fails. After it, `halt` comes.
    active: 1 in each cycle in which the unit moves a beat or does a tile operation (counter `busy`).
    stalled: 1 in each cycle in which a started instruction waits for memory or a scratchpad port (`wait_memory`).
    idle: 1 while nothing is in flight, on AXI neither.
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
"""The banks of acc whose ports GEMM takes, a bit for each: to read `pipeline.claim_lead` cycles later, to write in the
next cycle."""


class ReadPort(wiring.Signature):
    """The reader's side of a scratchpad: `data` comes in the cycle after `en & ready`, and stays until the next
    one, but for that of acc."""

    def __init__(self, addr_bits: int, shape: int) -> None:
        super().__init__({"en": Out(1), "addr": Out(addr_bits), "ready": In(1), "data": In(shape)})


class WritePort(wiring.Signature):
    """The writer's side of a scratchpad: written where `en & ready`; bit i of `mask` enables grain i of `data`."""

    def __init__(self, addr_bits: int, width: int, grain: int) -> None:
        super().__init__({
            "en": Out(1), "addr": Out(addr_bits), "mask": Out(width // grain), "data": Out(width), "ready": In(1),
        })  # fmt: skip


def read_port(pad: Scratchpad, entries: int = 1) -> ReadPort:
    """A port that reads as many entries of `pad` at once, from the one at the address on."""
    return ReadPort(pad.address_bits, entries * pad.width)


def write_port(pad: Scratchpad) -> WritePort:
    """A port that writes whole entries of `pad`, grain by grain."""
    return WritePort(pad.address_bits, pad.width, pad.grain)


def load_port(cfg: Config, pad: Scratchpad) -> WritePort:
    """The port through which LOAD writes `pad`, grain by grain; a grain of acc is a byte for each int32 without
    `int32`."""
    grain = 8 if pad.name == "acc" and not cfg.int32 else pad.grain
    return WritePort(pad.address_bits, pad.width // pad.grain * grain, grain)


def part_port(pad: Scratchpad, width: int) -> WritePort:
    """A port that writes parts of `width` bits of an entry, by their numbers; or whole entries that are no larger."""
    return WritePort(pad.part_address_bits(width), width, width)
