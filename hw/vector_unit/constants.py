"""The constants of a VECTOR: values that its stages need and that are the same for all of its items."""

from __future__ import annotations

from amaranth import Const, Mux, Value, signed, unsigned
from amaranth.lib import data

from celosia.hw.lib.layout import INDEX_BITS
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import ASource, BinaryOp, BSource, Destination, Opcode, formats, is_supported
from celosia.hw.vector_unit.residual import BIAS

_COPIED = (
    "post", "reduce_op", "binary_op", "requantise", "lookup", "table", "rescale_add", "a_offset", "b_offset",
    "clip_hi", "scale_v", "scale_b", "scale_shift", "add_hi",
)  # fmt: skip
"""Fields of the instruction that are constants without a change."""


def constants_layout(cfg: Config) -> data.StructLayout:
    """Return the layout of the constants of a VECTOR: fields of the instruction, and values computed from several.

    index: number of the instruction within the run. a_vin, b_vin: A or B comes from vin. weigh: A is a sum of taps. to:
    destination of results, one-hot. raw: results are int32. norm: the instruction is a norm. b_constant: imm +
    b_offset. scale_c: that of the instruction minus BIAS. zero_point: 0 unless results are requantised or of a softmax.
    clip_lo, add_lo: at most clip_hi and add_hi.
    """
    shapes = {field.name: field for field in formats(cfg)[Opcode.VECTOR].fields}
    destinations = 1 + max(destination for destination in Destination if is_supported(cfg, destination))
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
    """Return the assignments to `constants` from instruction `instr`.

    Values that stages would else compute from several fields in every cycle are computed here, once an instruction.
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
