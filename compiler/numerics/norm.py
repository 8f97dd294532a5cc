"""LayerNormalization and RMSNormalization of bytes to bytes: the integers around those of sim/functional/norm.py.

A row's results are gamma / sy (z + beta / gamma), rounded, where z is the row over its deviation: the scale of the
input sx is in epsilon alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import isqrt

import numpy as np

from celosia.compiler.numerics.float32 import Float32, Float64, Int32, f32
from celosia.compiler.numerics.requantiser import fold_scale
from celosia.hw.spec.pipeline import EPSILON_SHIFT, MAX_NORM_ELEMENTS, NORM_FRACTION

MOST_OFF = 2.0**-14
"""Part of a step by which results may be off before they are rounded, where they are at most LARGEST steps."""
LARGEST = 128
MOST_EPSILON = 1 << 17
"""In squared steps of the input."""


class NormError(ValueError):
    """A normalisation that these integers cannot be; the message says why, and what would change that."""


@dataclass(frozen=True)
class NormConstants:
    """epsilon: of variances, times N^2 for rows of N elements, in squared steps of the input of 2^-EPSILON_SHIFT. Of
    each channel: bias, beta / gamma with NORM_FRACTION bits behind its point, and scale, gamma / sy over 2 to as many,
    which `fold_scale` takes. off: by how much of a step results are off at most, before they are rounded."""

    epsilon: int
    bias: Int32
    scale: Float32
    off: float


def norm_constants(gamma: Float32, beta: Float32, sx: float, sy: float, epsilon: float) -> NormConstants:
    """The integers for rows of as many elements as `gamma` and `beta` have. NormError.

    >>> norm_constants(np.ones(4, f32), np.full(4, 0.5, f32), 0.5, 0.25, 0.0).bias.tolist()
    [16777216, 16777216, 16777216, 16777216]
    """
    count = len(gamma)
    if count > MAX_NORM_ELEMENTS:
        raise NormError(f"rows of {count} elements; sums are for {MAX_NORM_ELEMENTS} at most")
    if not (np.isfinite(gamma).all() and np.isfinite(beta).all()):
        raise NormError("a scale or an offset is not finite; train or quantise again")
    if (gamma <= 0).any():
        channel = int(np.argmax(gamma <= 0))
        raise NormError(f"the scale of channel {channel} is {gamma[channel]:g}, and multipliers are positive")
    for name, step in (("input", sx), ("result", sy)):
        if not 0 < f32(step) < np.inf:
            raise NormError(f"a step of the {name} is {step:g}, and must be positive and finite")
    if not 0 <= f32(epsilon) < np.inf:
        raise NormError(f"epsilon is {epsilon:g}, and must be finite and not negative")
    squared = Fraction(float(f32(epsilon))) / Fraction(float(f32(sx))) ** 2
    if squared > MOST_EPSILON:
        raise NormError(f"epsilon is {epsilon:g} for steps of {sx:g}: {float(squared):g} of their squares")
    g, b = (array.astype(np.float64) / float(f32(sy)) for array in (gamma, beta))
    with np.errstate(over="ignore"):
        bias, scale = np.rint(b / g * 2.0**NORM_FRACTION), (g * 2.0**-NORM_FRACTION).astype(f32)
    wrong = np.abs(bias) + ((isqrt(count) + 2) << NORM_FRACTION) >= 2.0**31
    off = _off(g, b)
    wrong |= (off > MOST_OFF) | (fold_scale(np.where(np.isfinite(scale), scale, 0))[0] == 0)
    if wrong.any():
        channel = int(np.argmax(wrong))
        raise NormError(
            f"channel {channel} has a scale of {gamma[channel]:g} and an offset of {beta[channel]:g} for steps of "
            f"{sy:g}, which integers do not hold"
        )
    added = round(count**2 * squared * 2**EPSILON_SHIFT)
    return NormConstants(added, bias.astype(np.int32), scale, float(off.max(initial=0.0)))


def _off(gamma: Float64, beta: Float64) -> Float64:
    """The bound that sim/functional/norm.py proves, of each channel, all in steps of the result."""
    return 2.0**-24 * (1.52 * (LARGEST + np.abs(beta)) + 1.76 * gamma + 3.01 * LARGEST)
