"""A row at a time: QLinearSoftmax."""

from __future__ import annotations

import numpy as np

from celosia.compiler.numerics.float32 import Array, byte_type, f32, limits


def exponent_room(count: int) -> float:
    """The exponent of the largest power in a row of `count`, whose sum stays below the largest float32. It is the
    float32 logarithm, and no wider one, that decides the last bit of the powers, and by it ties of a few equal values.
    """
    most = np.float64(np.finfo(f32).max / f32(count))
    return max(0.0, float(f32(np.log(most))) - 5)


def largest_power(count: int) -> float:
    """Largest power in a row of `count` elements; beside it lies that of its table, which float32 scales may move by a
    little."""
    return float(np.exp(exponent_room(count))) * (1 + 1e-4)


def softmax_powers(count: int, sx: float, sy: float) -> Array:
    """What QLinearSoftmax makes of an element of a row of `count` by its distance from the largest one, -255 to 0:
    [512] float32, its power, and behind all of them the same times the steps of the result."""
    sx = float(f32(sx))
    powers = np.exp((np.arange(256) - 255 + exponent_room(count) / sx) * sx).astype(f32)
    with np.errstate(over="ignore"):
        return np.concatenate([powers, powers * np.floor(f32(1) / f32(sy))])


def qlinear_softmax(x: Array, sx: float, sy: float, zy: int) -> Array:
    """com.microsoft.QLinearSoftmax over the last axis. x: int8 or uint8; its zero point does not matter. Returns that.

    Exponentials come from a table, scaled so that the sum stays below the largest float32; the row's maximum meets its
    last entry. Sums run left to right in float32, and the output scale counts as a whole fraction 1 / floor(1 / sy).
    A power times that may be infinite, as in a row of one element with sy = 1/256: what a conversion of x86 makes of
    it, the smallest int32 or 0 as uint32, counts as the number of steps.
    """
    lo, hi = limits(byte_type(x.dtype))
    powers, shares = np.split(softmax_powers(x.shape[-1], sx, sy), 2)
    steps = x.astype(np.int64)
    places = 255 + steps - steps.max(axis=-1, keepdims=True)
    total = np.zeros(x.shape[:-1], f32)
    for i in range(x.shape[-1]):
        total = total + powers[places[..., i]]
    y = np.rint(shares[places] / total[..., None])
    if lo < 0:
        whole = np.where(y < 2**31, y, f32(-(2**31))).astype(np.int32) + np.int32(zy)  # wraps
    else:
        whole = np.where(y < 2**63, y, f32(0)).astype(np.int64) % 2**32 + zy
    return np.asarray(np.clip(whole, lo, hi).astype(x.dtype))
