"""The requantiser of the vector unit as an expression, which passes and normalisations share."""

from __future__ import annotations

from celosia.compiler.expr.nodes import Expr, Value, call, clip
from celosia.hw.spec.scratchpads import PAR_FIELDS


def requantised(acc: Expr, par: Expr, zero_point: Value = 0.0, lo: Value = -128.0, hi: Value = 127.0) -> Expr:
    """Return the int8 clip(round((acc + bias) * multiplier * 2^-shift) + zero_point, lo, hi), the product in float32.

    acc: int32. par: bias, multiplier and shift as one uint64 (see tensorize.pack.pack_parameters).
    """
    bias = par.astype("int32")
    multiplier = PAR_FIELDS["multiplier"].of(par).astype("int32").astype("float32")
    exponent = 127 - PAR_FIELDS["shift"].of(par).astype("int32")
    scale = multiplier * call("bitcast", exponent << 23, dtype="float32")
    value = call("round_even", (acc + bias).astype("float32") * scale) + zero_point
    return clip(value, lo, hi).astype("int8")
