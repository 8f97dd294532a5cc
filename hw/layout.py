"""Instruction formats as Amaranth shapes, and the signatures through which the parts of the accelerator meet."""

from __future__ import annotations

from amaranth import signed, unsigned
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from celosia.hw.config import Config
from celosia.hw.isa import TABLE_SIZE, Format, Opcode, formats, instruction_bytes

INDEX_BITS = 32
"""Width of an instruction's number within a run: that of register `instr_count`."""

ERROR_BITS = 4


def layout(fmt: Format) -> data.StructLayout:
    """The fields of `fmt` at the bit positions of its encoding."""
    return data.StructLayout(
        {field.name: signed(field.width) if field.signed else unsigned(field.width) for field in fmt.fields}
    )


def instruction_layout(cfg: Config, opcode: Opcode) -> data.StructLayout:
    """What a unit receives: the number of the instruction within the run, and its fields."""
    return data.StructLayout({"index": INDEX_BITS, "fields": layout(formats(cfg)[opcode])})


def raw_layout(cfg: Config) -> data.StructLayout:
    """What fetch reads: the number of the instruction and its word."""
    return data.StructLayout({"index": INDEX_BITS, "word": 8 * instruction_bytes(cfg)})


done_layout = data.StructLayout({"post": 4, "index": INDEX_BITS})
"""Payload of `done`: the post mask and the number of the instruction whose last write is committed."""

error_layout = data.StructLayout({"code": ERROR_BITS, "index": INDEX_BITS})


class Pulse(wiring.Signature):
    """A payload that is there for one cycle and cannot be held back."""

    def __init__(self, shape: data.Layout) -> None:
        super().__init__({"valid": Out(1), "payload": Out(shape)})


def unit_members(cfg: Config, opcode: Opcode) -> dict[str, wiring.Member]:
    """Ports that every unit has.

    instr: instructions whose tokens have been taken, in program order; accepted when the unit starts one.
    done: one pulse an instruction, in program order, when its last write is committed.
    error: one pulse when an instruction fails. After it, `halt` comes.
    start: pulses in the cycle in which the unit accepts an instruction (for the trace): `instr.valid & instr.ready`.
    active: 1 in each cycle in which the unit moves a beat or does a tile operation (counter `busy`).
    held: 1 in each cycle in which a started instruction is held up by memory or a scratchpad port (`wait_memory`).
    quiet: 1 while nothing is in flight, on AXI neither.
    halt: 1 from an error to the next run: start nothing new, drop what is left, end AXI bursts as AXI demands.
    """
    return {
        "instr": In(stream.Signature(instruction_layout(cfg, opcode))),
        "done": Out(Pulse(done_layout)),
        "error": Out(Pulse(error_layout)),
        "active": Out(1),
        "held": Out(1),
        "quiet": Out(1),
        "halt": In(1),
    }


class ReadPort(wiring.Signature):
    """The reader's side of a scratchpad: `data` comes in the cycle after `en & ready`, and stays until the next one."""

    def __init__(self, addr_bits: int, shape: int) -> None:
        super().__init__({"en": Out(1), "addr": Out(addr_bits), "ready": In(1), "data": In(shape)})


class WritePort(wiring.Signature):
    """The writer's side of a scratchpad: written where `en & ready`; bit i of `mask` enables grain i of `data`."""

    def __init__(self, addr_bits: int, width: int, grain: int) -> None:
        super().__init__({
            "en": Out(1), "addr": Out(addr_bits), "mask": Out(width // grain), "data": Out(width), "ready": In(1),
        })  # fmt: skip


def widths(cfg: Config) -> dict[str, int]:
    """Bits of an entry of each scratchpad."""
    return {
        "inp": 8 * cfg.inp_bytes,
        "wgt": 8 * cfg.wgt_bytes,
        "acc": 32 * cfg.lanes,
        "vin": 8 * cfg.lanes,
        "out": 8 * cfg.lanes,
        "par": 64 * cfg.block_out,
        "tap": _whole(8 * cfg.taps * cfg.block_out, grains(cfg)["tap"]),
    }


def _whole(bits: int, grain: int) -> int:
    """`bits`, and what else is of their last grain: places of tap beyond `taps` are not stored."""
    return -(-bits // grain) * grain


def address_bits(cfg: Config) -> dict[str, int]:
    """Bits of an entry's number in each scratchpad."""
    return {
        "inp": cfg.inp_bits,
        "wgt": cfg.wgt_bits,
        "acc": cfg.acc_bits,
        "vin": cfg.vin_bits,
        "out": cfg.out_bits,
        "par": cfg.par_bits,
        "tap": cfg.tap_bits,
    }


def grains(cfg: Config) -> dict[str, int]:
    """Bits that LOAD can write on their own: what one step of it delivers. acc counts in int32 lanes."""
    bus = 8 * cfg.bus_bytes
    piece = 8 * cfg.piece_bytes
    return {
        "inp": min(bus, piece),
        "wgt": min(bus, 8 * cfg.wgt_bytes),
        "acc": 32,
        "vin": min(bus, piece),
        "par": min(bus, 64 * cfg.block_out),
        "lut": min(bus, 8 * TABLE_SIZE),
        "tap": min(bus, 8 * cfg.tap_bytes),
    }


def load_port(cfg: Config, name: str) -> WritePort:
    """The port through which LOAD writes scratchpad `name` (the tables of `lut` count as entries of 256 bytes)."""
    bits = cfg.lut_bits if name == "lut" else address_bits(cfg)[name]
    width = 8 * TABLE_SIZE if name == "lut" else widths(cfg)[name]
    return WritePort(bits, width, grains(cfg)[name])
