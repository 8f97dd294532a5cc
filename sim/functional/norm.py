"""Normalise rows of bytes in integers alone, as the hardware does (`hw/vector_unit/norm/`).

LayerNorm subtracts a row's mean and divides by its deviation; RMSNorm takes the mean for 0.

Of the `count` values u of a row, S1 is their sum (RMSNorm: 0), S2 that of their squares. The result is z = (count u -
S1) / sqrt(V), V = count S2 - S1^2 + E / 2^EPSILON_SHIFT

where E stands for count^2 epsilon. Each v is z with NORM_FRACTION bits behind its point. m0 is the whole number nearest
to the mean and S1' = S1 - count m0 the rest of the sum, so that z = (u - m0) Q - S1' Q / count, Q = count / sqrt(V).

    root      26 bits of 1 / sqrt(V), cut off: V with as many zeros behind it, an even number, as make it 32 bits
    factor    Q in 24 bits, rounded to nearest; its exponent shifts u - m0, of 9 bits, to 16
    less      S1' root, at the product's position, cut off
    v         (u - m0) 2^shift factor - less, rounded to nearest: what a multiplier of 25 x 18 bits makes of it

**Accuracy.** |z| < sqrt(count) < 46, and |S1' Q / count| <= 1, as f / sqrt(f (1 - f)) is where whole numbers have a
mean at a distance f from one. root is too small by less than 2^-25 of it, what is cut off of V makes it too large by at
most 2^-31, factor is off by 2^-24 of itself, which counts for (u - m0) Q, at most |z| + 1; v is rounded by 2^-26, less
by 2^-32. So v / 2^25 is off by less than

    2^-24 (1.52 |z| + 1.26)

and y = (v + bias) multiplier / 2^shift, with bias and multiplier rounded to nearest and the products rounded as float32
(`reference.requantise`), is off from the real gamma z + beta, all in steps of the result, by less than

    2^-24 (1.52 |gamma z| + 1.76 |gamma| + 3.01 |y|)

before it is rounded to a whole number: below 2^-14 where |y| and |gamma z| are at most 128 and |gamma| at most 250. It
holds while Q >= 2^-9, as it is where epsilon, in squared steps of x, is at most 2^17: E <= count^2 2^37.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from celosia.hw.spec.pipeline import EPSILON_SHIFT, FACTOR_BITS, MAX_NORM_ELEMENTS, NORM_FRACTION, ROOT_BITS

Int64 = NDArray[np.int64]

VARIANCE_BITS = 60
"""Bits of V, EPSILON_SHIFT of them behind its point."""
_ROOT_INPUT_BITS = 32
"""Leading bits of V of which the root is taken."""
_SPARE = 32 - NORM_FRACTION
"""Bits that a product has below the last bit of v; they are rounded off."""
_LANES_BITS = MAX_NORM_ELEMENTS.bit_length()
"""Bits of the number of elements of a row."""


def normalise_rows(x: NDArray[np.int8], count: int, offset: int, centre: bool, epsilon: int) -> NDArray[np.int32]:
    """Return v, the normalised value with NORM_FRACTION fraction bits, of each lane of x [rows, lanes].

    The first `count` lanes, 1 to MAX_NORM_ELEMENTS, are the row. centre: LayerNorm, not RMSNorm. offset: added to x,
    -128 to 128. epsilon: E, 0 to 2^47 - 1. Lanes behind the row are normalised with the factors of the row, modulo 2^16
    at the multiplier and 2^32 behind it.

    >>> normalise_rows(np.array([[1, 2, 3, 4], [5, 5, 5, 5]], np.int8), 4, 0, True, 0) / 2**25
    array([[-1.34164077, -0.44721359,  0.44721359,  1.34164077],
           [ 0.        ,  0.        ,  0.        ,  0.        ]])
    """
    u = x.astype(np.int64) + offset
    row = u[:, :count]
    total = row.sum(axis=1) * int(centre)
    nearest = (2 * total + count) // (2 * count)
    variance = (count * (row * row).sum(axis=1) - total * total << EPSILON_SHIFT) + epsilon
    factor, shift, less = factors(count, variance, total - count * nearest)
    product = _wrap(u - nearest[:, None] << shift[:, None], 16) * factor[:, None]
    return np.asarray(product + (1 << _SPARE - 1) - less[:, None] >> _SPARE).astype(np.int32)


def factors(count: int, variance: Int64, rest: Int64) -> tuple[Int64, Int64, Int64]:
    """Compute factor, shift and less of each row (see the top of this file).

    variance: V of each row, in VARIANCE_BITS. rest: S1' of each row. The shift is modulo 16, which is enough for Q >=
    2^-9. The results have no meaning for V = 0, where all elements of a row are 0 or equal its mean.
    """
    # Even, as its root is taken. A V of 0 has no leading bit: the hardware then shifts by 8 bits in 10 cycles.
    up = np.where(variance > 0, VARIANCE_BITS - _bit_length(variance) & ~1, 80)
    root = inverse_root(variance << np.minimum(up, VARIANCE_BITS) >> VARIANCE_BITS - _ROOT_INPUT_BITS)
    spare = _LANES_BITS - count.bit_length()
    wide = (count << spare) * root
    over = wide >> _LANES_BITS + ROOT_BITS - 1
    down = _LANES_BITS + ROOT_BITS - 1 - FACTOR_BITS + over
    factor = np.minimum((wide >> down - 1) + 1 >> 1, (1 << FACTOR_BITS) - 1)
    less = (rest * root << 16) >> np.maximum(29 - up // 2, 0)
    return factor, up // 2 - spare + over & 15, less


def inverse_root(value: Int64) -> Int64:
    """Return the largest r below 2^ROOT_BITS with r^2 value <= 2^82, that is, r <= 2^41 / sqrt(value).

    Values are below 2^32. With ROOT_BITS = 26, the results for values from 2^30 on lie between 2^25 and 2^26, so they
    have 26 significant bits: that is why the scale is 2^41.

    >>> inverse_root(np.array([0, 1 << 30, (1 << 30) + 1, (1 << 32) - 1]))
    array([67108863, 67108863, 67108863, 33554432])
    """
    max_root = (1 << ROOT_BITS) - 1
    # float64 may be wrong by one where the root is nearly whole: step down if it is too large, then up if possible.
    guess = np.minimum(2.0**41 / np.sqrt(np.maximum(value, 1)), max_root).astype(np.int64)
    guess = guess - ~_is_at_most_root(guess, value)
    return np.minimum(guess + _is_at_most_root(guess + 1, value), max_root)


def _is_at_most_root(root: Int64, value: Int64) -> NDArray[np.bool_]:
    """Return whether root^2 value <= 2^82, for a root of 26 bits: whether `root` is at most `inverse_root(value)`.

    The product may have 84 bits, more than an int64. It is therefore computed as high * 2^26 + (low modulo 2^26) and
    compared with 2^56 * 2^26.
    """
    mask = (1 << 26) - 1
    square = root * root
    low = (square & mask) * value
    high = (square >> 26) * value + (low >> 26)
    return np.asarray((high < 1 << 56) | ((high == 1 << 56) & (low & mask == 0)))


def _bit_length(value: Int64) -> Int64:
    """Return the number of bits of values from 0 to 2^60.

    The bits above bit 30 are counted apart, since float64 would round long numbers up.
    """
    high = value >> 30
    return np.where(high > 0, 30 + np.frexp(high.astype(np.float64))[1], np.frexp(value.astype(np.float64))[1])


def _wrap(value: Int64, bits: int) -> Int64:
    """Return the low `bits` bits of each value as a signed number."""
    return (value + (1 << bits - 1) & (1 << bits) - 1) - (1 << bits - 1)
