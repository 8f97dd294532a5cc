"""Constants of LayerNormalization and RMSNormalization of bytes to bytes, and QLinearSoftmax.

sim/functional/norm.py has the arithmetic of the normalisations. The results of a row are gamma / sy (z + beta / gamma),
rounded, where z is the normalised row; the scale of the input, sx, occurs in epsilon only.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import isqrt

import numpy as np

from celosia.compiler.numerics.quantize import Array, Float32, Float64, Int32, byte_type, f32, limits
from celosia.compiler.numerics.requantiser import fold_scale
from celosia.hw.spec.pipeline import EPSILON_SHIFT, MAX_NORM_ELEMENTS, NORM_FRACTION

MAX_ERROR = 2.0**-14
"""Limit of the error of results before rounding, in output units."""
MAX_RESULT = 128
"""Largest magnitude of a result, in output units, to which MAX_ERROR applies."""
MAX_EPSILON = 1 << 17
"""Limit of epsilon, in squared units of the input."""


class NormError(ValueError):
    """A normalisation that the integers cannot represent; the message says why, and what would help."""


@dataclass(frozen=True)
class NormConstants:
    """Constants of one normalisation.

    epsilon: added to N^2 times the variance of rows of N elements, in squared input units of 2^-EPSILON_SHIFT. bias:
    beta / gamma of each channel with NORM_FRACTION fractional bits. scale: gamma / sy * 2^-NORM_FRACTION of each
    channel, for `fold_scale`. error_bound: of results before rounding, in output units.
    """

    epsilon: int
    bias: Int32
    scale: Float32
    error_bound: float


def norm_constants(gamma: Float32, beta: Float32, sx: float, sy: float, epsilon: float) -> NormConstants:
    """Derive the constants of a normalisation of rows with as many elements as `gamma` and `beta` have.

    gamma, beta: scale and offset of each element. sx, sy: scales of input and result. Raises NormError where integers
    cannot represent them.

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
    scaled_epsilon = Fraction(float(f32(epsilon))) / Fraction(float(f32(sx))) ** 2
    if scaled_epsilon > MAX_EPSILON:
        raise NormError(f"epsilon is {epsilon:g} for steps of {sx:g}: {float(scaled_epsilon):g} of their squares")
    g, b = (array.astype(np.float64) / float(f32(sy)) for array in (gamma, beta))
    with np.errstate(over="ignore"):
        bias, scale = np.rint(b / g * 2.0**NORM_FRACTION), (g * 2.0**-NORM_FRACTION).astype(f32)
    is_unrepresentable = np.abs(bias) + ((isqrt(count) + 2) << NORM_FRACTION) >= 2.0**31
    error_bound = _error_bound(g, b)
    is_unrepresentable |= (error_bound > MAX_ERROR) | (fold_scale(np.where(np.isfinite(scale), scale, 0))[0] == 0)
    if is_unrepresentable.any():
        channel = int(np.argmax(is_unrepresentable))
        raise NormError(
            f"channel {channel} has a scale of {gamma[channel]:g} and an offset of {beta[channel]:g} for steps of "
            f"{sy:g}, which integers do not hold"
        )
    integer_epsilon = round(count**2 * scaled_epsilon * 2**EPSILON_SHIFT)
    return NormConstants(integer_epsilon, bias.astype(np.int32), scale, float(error_bound.max(initial=0.0)))


def _error_bound(gamma: Float64, beta: Float64) -> Float64:
    """Return the error bound of each channel that sim/functional/norm.py proves, in output units."""
    return 2.0**-24 * (1.52 * (MAX_RESULT + np.abs(beta)) + 1.76 * gamma + 3.01 * MAX_RESULT)


def exponent_room(count: int) -> float:
    """Return the exponent to which QLinearSoftmax shifts the largest element of a row of `count`.

    With it the sum of all powers stays a finite float32. The logarithm is rounded to float32 as in onnxruntime: it
    decides the last bit of the powers, and so ties of a few equal values.
    """
    largest_sum_term = np.float64(np.finfo(f32).max / f32(count))
    return max(0.0, float(f32(np.log(largest_sum_term))) - 5)


def largest_power(count: int) -> float:
    """Return an upper bound of the powers of a row of `count` elements, with a margin for float32 scales."""
    return float(np.exp(exponent_room(count))) * (1 + 1e-4)


def softmax_powers(count: int, sx: float, sy: float) -> Array:
    """Return the tables of QLinearSoftmax for rows of `count` elements: [512] float32.

    An index of either half is 255 plus the distance from the row's largest element, -255 to 0. The first half holds
    powers, the second half the powers times the output units in 1.
    """
    sx = float(f32(sx))
    powers = np.exp((np.arange(256) - 255 + exponent_room(count) / sx) * sx).astype(f32)
    with np.errstate(over="ignore"):
        return np.concatenate([powers, powers * np.floor(f32(1) / f32(sy))])


def qlinear_softmax(x: Array, sx: float, sy: float, zy: int) -> Array:
    """Compute com.microsoft.QLinearSoftmax over the last axis.

    x: int8 or uint8; its zero point does not matter. Returns that type.

    Exponentials come from a table, scaled so that the sum stays below the largest float32; the row's maximum selects
    its last entry. Sums run left to right in float32, and the output scale counts as 1 / floor(1 / sy). A power times
    floor(1 / sy) may be infinite, as in a row of one element with sy = 1/256. Then the result is what x86 converts
    infinity to: the smallest int32, or 0 as uint32.
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
