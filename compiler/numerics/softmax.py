"""A row at a time: QLinearSoftmax."""

from __future__ import annotations

import numpy as np

from celosia.compiler.numerics.float32 import Array, byte_type, f32, limits


def qlinear_softmax(x: Array, sx: float, sy: float, zy: int) -> Array:
    """com.microsoft.QLinearSoftmax over the last axis. x: int8 or uint8; its zero point does not matter. Returns that.

    Exponentials come from a table, scaled so that the sum stays below the largest float32; the row's maximum meets its
    last entry. Sums run left to right in float32, and the output scale counts as a whole fraction 1 / floor(1 / sy).
    """
    lo, hi = limits(byte_type(x.dtype))
    room = max(0.0, float(np.log(np.finfo(f32).max / f32(x.shape[-1]))) - 5)
    table = np.exp((np.arange(256) - 255 + room / float(f32(sx))) * float(f32(sx))).astype(f32)
    steps = x.astype(np.int64)
    powers = table[255 + steps - steps.max(axis=-1, keepdims=True)]
    total = np.zeros(x.shape[:-1], f32)
    for i in range(x.shape[-1]):
        total = total + powers[..., i]
    y = np.rint(powers * np.floor(f32(1) / f32(sy)) / total[..., None])
    return np.asarray(np.clip(y.astype(np.int64) + zy, lo, hi).astype(x.dtype))
