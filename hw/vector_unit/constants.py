"""The constants of a VECTOR: what the stages need of it, the same for all of its items."""

from __future__ import annotations

from amaranth import Const, Mux, Value, signed, unsigned
from amaranth.lib import data

from celosia.hw.lib.layout import INDEX_BITS
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import ASource, BinaryOp, BSource, Destination, Opcode, formats, is_supported
from celosia.hw.vector_unit.residual import BIAS

# Fields that hold during an instruction and are used as they are.
_COPIED = (
    "post", "reduce_op", "binary_op", "requantise", "lookup", "table", "rescale_add", "a_offset", "b_offset",
    "clip_hi", "scale_v", "scale_b", "scale_shift", "add_hi",
)  # fmt: skip


def constants_layout(cfg: Config) -> data.StructLayout:
    """Layout of the constants of a VECTOR: what is the same for all of its items.

    index: number of the instruction within the run. a_vin, b_vin: A or B comes from vin. weigh: taps count. to: where
    results go, a bit for each destination. raw: results have 32 bits. norm: it is a norm.
    """
    shapes = {field.name: field for field in formats(cfg)[Opcode.VECTOR].fields}
    destinations = 1 + max(to for to in Destination if is_supported(cfg, to))
    return data.StructLayout(
        {name: (signed if shapes[name].signed else unsigned)(shapes[name].width) for name in _COPIED}
        | {"index": INDEX_BITS, "a_vin": 1, "b_vin": 1, "weigh": 1, "to": destinations}
        | ({"raw": 1} if cfg.int32 else {})
        | ({"norm": 1} if cfg.norm else {})
        | {
            "b_constant": signed(32),
            "scale_c": signed(49),
            "zero_point": signed(8),
            "clip_lo": signed(8),
            "add_lo": signed(8),
        }
    )


def assign_constants(
    cfg: Config, instr: data.View[data.StructLayout], constants: data.View[data.StructLayout]
) -> list[object]:
    """Return the assignments of the constants of an instruction from its fields.

    What many stages would compute from several fields in every cycle is computed here, once an instruction.
    """
    fields = instr.fields
    softmax: Value = fields.softmax if cfg.softmax else Const(0)
    assignments = [
        *(constants[name].eq(fields[name]) for name in _COPIED),
        constants.index.eq(instr.index),
        constants.a_vin.eq(fields.a_source == ASource.VIN),
        constants.b_vin.eq(fields.b_source == BSource.VIN),
        constants.weigh.eq(fields.taps),
        constants.to.eq(1 << fields.destination),
        constants.b_constant.eq(fields.imm + fields.b_offset),
        constants.scale_c.eq(fields.scale_c - BIAS),
        constants.zero_point.eq(Mux(fields.requantise | softmax, fields.zero_point, 0)),
        # Where the limits cross, the upper one holds.
        constants.clip_lo.eq(Mux(fields.clip_lo > fields.clip_hi, fields.clip_hi, fields.clip_lo)),
        constants.add_lo.eq(Mux(fields.add_lo > fields.add_hi, fields.add_hi, fields.add_lo)),
    ]
    if cfg.norm:
        # Overrides the copy above, as the last assignment holds.
        binary_op = Mux(fields.norm, BinaryOp.MUL, fields.binary_op)
        assignments += [constants.norm.eq(fields.norm), constants.binary_op.eq(binary_op)]
    if cfg.int32:
        narrow = fields.requantise | fields.lookup | fields.rescale_add | (fields.destination != Destination.ACC)
        assignments.append(constants.raw.eq(~narrow))
    return assignments
