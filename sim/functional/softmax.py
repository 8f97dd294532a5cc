"""Compute QLinearSoftmax of rows in integers alone, as the hardware does (`hw/vector_unit/softmax/`).

A positive float32 is a pair (m, e) of the value m * 2^(e - 150). m is the mantissa of 24 bits with its leading one, e
the field of the exponent, at least 1. Denormals have e = 1 and need no special case. An exponent beyond 255 wraps: no
table of powers has sums so large.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from celosia.hw.spec.scratchpads import FLOAT_FIELDS

Int64 = NDArray[np.int64]
Pairs = tuple[Int64, Int64]
"""The mantissas m and the exponents e of floats, an array each."""

QUOTIENT_BITS = 10
"""Bits of twice a quotient, which is below 2^9 unless its exponents make it LARGE."""
LARGE = (1 << QUOTIENT_BITS - 1) - 1
"""Stands for all quotients whose exponents differ by 9 or more. They exceed 2^8, so that the result is the upper limit.
"""
_REST_BITS = 25
"""Bits of a signed remainder."""


def pairs_of(words: NDArray[np.uint32]) -> Pairs:
    """Return mantissa m and exponent e of the float32 numbers with the bits `words`.

    Signs are ignored, and an exponent of 255 (infinity, NaN) is treated as any other.

    >>> pairs_of(np.array([0x3F800000, 0, 1], np.uint32))
    (array([8388608,       0,       1]), array([127,   1,   1]))
    """
    wide = words.astype(np.int64)
    fraction, field = (part.of(wide) for part in FLOAT_FIELDS.values())
    return fraction | np.where(field > 0, 1 << 23, 0), np.maximum(field, 1)


def add_pairs(a: Pairs, b: Pairs) -> Pairs:
    """Return a + b, rounded to nearest, ties to even.

    The mantissa of the smaller exponent is aligned to the other one, with one more bit below it. `lost` says whether
    any of the bits shifted out was 1. A carry increments the exponent.
    """
    (a_m, a_e), (b_m, b_e) = a, b
    is_a_larger = a_e >= b_e
    large, small = np.where(is_a_larger, a_m, b_m), np.where(is_a_larger, b_m, a_m)
    shift = np.minimum(np.abs(a_e - b_e), 31)
    shifted = (small << 1) >> shift
    lost = (shifted << shift) != small << 1
    total = (large << 1) + shifted
    carry = total >> 25
    halved, half = total >> 1 + carry, total >> carry & 1
    below = lost | (carry & total & 1 != 0)
    rounded = halved + (half & ((halved & 1) | below))
    over = rounded >> 24
    mantissa = (rounded & 0x7FFFFF) | ((rounded >> 23 & 1) | over) << 23
    e = np.maximum(a_e, b_e) + (carry | over) & 0xFF
    return mantissa, e


def divide_pairs(a: Pairs, b: Pairs) -> Int64:
    """Return the float32 quotients a / b rounded to integers, ties to even; LARGE for those far beyond a byte.

    A non-restoring division: each of QUOTIENT_BITS steps adds the divisor if the remainder is negative, and subtracts
    it otherwise. They give 2 a / b without its fraction. The float32 quotient is itself rounded: an exact quotient
    within half a unit in the last place of an integer and a half becomes that tie. `tie` marks such quotients by
    comparing the last remainder with the divisor shifted down.
    """
    (a_m, a_e), (b_m, b_e) = a, b
    shift = a_e - b_e + 1
    dividend = a_m << np.clip(shift, 0, QUOTIENT_BITS - 1)
    rest, twice = dividend >> QUOTIENT_BITS, np.zeros_like(dividend)
    for bit in reversed(range(QUOTIENT_BITS)):
        rest = 2 * rest + (dividend >> bit & 1) + np.where(rest < 0, b_m, -b_m)
        rest = (rest + (1 << _REST_BITS - 1) & (1 << _REST_BITS) - 1) - (1 << _REST_BITS - 1)
        twice = 2 * twice + (rest >= 0)
    quotient, half = twice >> 1, twice & 1
    bits = sum((quotient >> bit != 0).astype(np.int64) for bit in range(QUOTIENT_BITS - 1))
    tie = np.abs(rest) <= b_m >> 24 - bits
    nearest = quotient + np.where(tie, quotient & 1, half)
    return np.asarray(np.where(shift < 0, 0, np.where(shift >= QUOTIENT_BITS, LARGE, nearest)))


def softmax_rows(
    x: NDArray[np.int8], powers: NDArray[np.uint32], shares: NDArray[np.uint32], zero_point: int, low: int, high: int
) -> NDArray[np.int8]:
    """Return the softmax of each row of x [rows, count], as bytes.

    powers, shares: float32 bits [256], see FLOAT_FIELDS. Entry 255 - d is for an element that is d below the largest of
    its row. The powers of a row are added up in float32, from the left. Each share over the sum, in float32, is rounded
    to an integer, ties to even; zero_point is added. low, high: limits of the result; `high` wins where they cross.
    """
    steps = x.astype(np.int64)
    index = 255 + steps - steps.max(axis=1, keepdims=True)
    (m, e), (share_m, share_e) = pairs_of(powers), pairs_of(shares)
    total = m[index[:, 0]], e[index[:, 0]]
    for k in range(1, x.shape[1]):
        total = add_pairs(total, (m[index[:, k]], e[index[:, k]]))
    y = divide_pairs((share_m[index], share_e[index]), (total[0][:, None], total[1][:, None])) + zero_point
    return np.asarray(np.minimum(np.maximum(y, low), high).astype(np.int8))
