"""QLinearSoftmax of rows in integers alone, as the hardware computes it (`hw/vector_unit/softmax/`).

A positive float32 is a pair: its mantissa m of 24 bits, the leading one written out, and its exponent's field e, at
least 1; it is m * 2^(e - 150). Denormals, of which e is 1, then need nothing of their own. An exponent beyond 255
wraps: no table that means something has sums so large.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from celosia.hw.spec.scratchpads import FLOAT_FIELDS

Int64 = NDArray[np.int64]
Pairs = tuple[Int64, Int64]
"""m and e of floats, an array each."""

QUOTIENT_BITS = 10
"""Bits of twice a quotient, which is below 2^9 where it does not count as LARGE."""
LARGE = (1 << QUOTIENT_BITS - 1) - 1
"""A quotient that is at least 2^8, or whose exponents say so: any zero point and any limits make the upper limit of it.
"""
_REST_BITS = 25
"""Bits of a remainder, which has a sign."""


def pairs_of(words: NDArray[np.uint32]) -> Pairs:
    """Return mantissa m and exponent e of the float32 with these bits, [...]; signs are ignored, and an exponent of 255
    is a normal one.

    >>> pairs_of(np.array([0x3F800000, 0, 1], np.uint32))
    (array([8388608,       0,       1]), array([127,   1,   1]))
    """
    wide = words.astype(np.int64)
    fraction, field = (part.of(wide) for part in FLOAT_FIELDS.values())
    return fraction | np.where(field > 0, 1 << 23, 0), np.maximum(field, 1)


def add_pairs(a: Pairs, b: Pairs) -> Pairs:
    """Return a + b, rounded to nearest, ties to even.

    The smaller exponent's mantissa is shifted down to one bit behind those of the other, what falls out of it told by
    whether it was 0; a carry makes the exponent one more.
    """
    (a_m, a_e), (b_m, b_e) = a, b
    ahead = a_e >= b_e
    large, small = np.where(ahead, a_m, b_m), np.where(ahead, b_m, a_m)
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
    """Return the float32 a / b rounded to an integer, ties to even, [...]; LARGE where it is much too large for a byte.

    By a division that adds the divisor where the remainder has become negative, and subtracts it else: QUOTIENT_BITS
    steps of 25 bits give 2 a / b without its fraction. An integer and a half lies half way between two float32 or is
    one, so that a quotient is rounded to it from as far as half a unit in its last place: the divisor shifted down, as
    the last remainder is counted.
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
    """Softmax of each row of x [rows, count]. powers, shares: [256], see FLOAT_FIELDS, of an element by its
    distance from the largest one of its row, which has the last entry. The powers are added up in float32, from the
    left; each share over the sum, in float32, is rounded to an integer, ties to even, and gets the zero point. Where
    the limits cross, the upper one holds.
    """
    steps = x.astype(np.int64)
    index = 255 + steps - steps.max(axis=1, keepdims=True)
    (m, e), (share_m, share_e) = pairs_of(powers), pairs_of(shares)
    total = m[index[:, 0]], e[index[:, 0]]
    for k in range(1, x.shape[1]):
        total = add_pairs(total, (m[index[:, k]], e[index[:, k]]))
    y = divide_pairs((share_m[index], share_e[index]), (total[0][:, None], total[1][:, None])) + zero_point
    return np.asarray(np.minimum(np.maximum(y, low), high).astype(np.int8))
