"""QLinearSoftmax, one row at a time."""

from __future__ import annotations

import numpy as np

from celosia.compiler.numerics.array_types import Array, byte_type, f32, limits


def exponent_room(count: int) -> float:
    """Return the exponent of the largest power in a row of `count`, so that the sum stays a finite float32.

    The logarithm must be float32's: it decides the last bit of the powers, and so ties of a few equal values.
    """
    largest_sum_term = np.float64(np.finfo(f32).max / f32(count))
    return max(0.0, float(f32(np.log(largest_sum_term))) - 5)


def largest_power(count: int) -> float:
    """Bound the largest power in a row of `count` elements, with a margin for scales in float32."""
    return float(np.exp(exponent_room(count))) * (1 + 1e-4)


def softmax_powers(count: int, sx: float, sy: float) -> Array:
    """Return the table of QLinearSoftmax by the distance from the row's largest element, -255 to 0: [512] float32.

    The first half holds powers, the second half the powers times output units.
    """
    sx = float(f32(sx))
    powers = np.exp((np.arange(256) - 255 + exponent_room(count) / sx) * sx).astype(f32)
    with np.errstate(over="ignore"):
        return np.concatenate([powers, powers * np.floor(f32(1) / f32(sy))])


def qlinear_softmax(x: Array, sx: float, sy: float, zy: int) -> Array:
    """Compute com.microsoft.QLinearSoftmax over the last axis.

    x: int8 or uint8, whatever its zero point; so is the result.

    Exponentials come from a table, scaled so that the sum stays below the largest float32; the row's maximum meets its
    last entry. Sums run left to right in float32, and the output scale counts as a whole fraction 1 / floor(1 / sy).
    A power times that may be infinite, as in a row of one element with sy = 1/256: what a conversion of x86 makes of
    it, the smallest int32 or 0 as uint32, counts as the number of steps.
    """
    lo, hi = limits(byte_type(x.dtype))
    powers, scaled_powers = np.split(softmax_powers(x.shape[-1], sx, sy), 2)
    steps = x.astype(np.int64)
    indices = 255 + steps - steps.max(axis=-1, keepdims=True)
    total = np.zeros(x.shape[:-1], f32)
    for i in range(x.shape[-1]):
        total = total + powers[indices[..., i]]
    y = np.rint(scaled_powers[indices] / total[..., None])
    if lo < 0:
        units = np.where(y < 2**31, y, f32(-(2**31))).astype(np.int32) + np.int32(zy)  # wraps
    else:
        units = np.where(y < 2**63, y, f32(0)).astype(np.int64) % 2**32 + zy
    return np.asarray(np.clip(units, lo, hi).astype(x.dtype))
