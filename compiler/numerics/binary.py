"""Quantised addition and multiplication: onnxruntime's operators, and integers with which the hardware equals them.

In order: QLinearAdd and the hardware's rescale-add; QLinearMul, which the requantiser computes; both by name (BINARY).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from celosia.compiler.numerics.requantiser import (
    MULTIPLIER_BITS,
    Array,
    Float32,
    Float64,
    Int8,
    Int64,
    byte_type,
    conv_scale,
    convert_saturating,
    dequantize_linear,
    divide_even,
    f32,
    limits,
    quantize_linear,
    requantize,
    scale_to_multiplier,
)
from celosia.compiler.program.host.float32_math import fma


def qlinear_add(a: Array, b: Array, sa: float, za: int, sb: float, zb: int, sc: float, zc: int) -> Array:
    """Compute com.microsoft.QLinearAdd, bit-exact on x86 with AVX2.

    a, b: both int8 or both uint8, broadcast. Returns that type.

    onnxruntime swaps its operands where the first one is the scalar of a broadcast along the innermost axis, also where
    both have one element; callers must then swap them, too.
    """
    dtype = byte_type(a.dtype)
    ra, rb, fixed = _add_terms(sa, za, sb, zb, sc, zc)
    partial = fma(b.astype(f32), rb, fixed)
    return convert_saturating(fma(a.astype(f32), ra, partial), dtype)


@np.errstate(all="ignore")
def float_add(a: Array, b: Array, sa: float, za: int, sb: float, zb: int, sc: float, zc: int) -> Array:
    """Dequantise, add in float32 and quantise, as onnxruntime computes an Add that it leaves in float.

    a, b: both int8 or both uint8, broadcast. Returns that type.
    """
    return quantize_linear(dequantize_linear(a, sa, za) + dequantize_linear(b, sb, zb), sc, zc, a.dtype)


@np.errstate(all="ignore")
def _add_terms(sa: float, za: int, sb: float, zb: int, sc: float, zc: int) -> tuple[np.float32, np.float32, np.float32]:
    """Return sa / sc, sb / sc and the constant term of the sum, in the order of onnxruntime's kernel."""
    ra, rb = f32(sa) / f32(sc), f32(sb) / f32(sc)
    return ra, rb, f32(zc) - f32(fma(ra, f32(za), rb * f32(zb)))


@dataclass(frozen=True)
class RescaleAdd:
    """Parameters of the hardware's residual add: clip(rne((q * ma + r * mb + c) / 2^shift), lo, hi) of stored bytes.

    ma, mb: signed, 32 bits; c: signed, 48 bits; shift: 0..63; lo, hi: stored bytes.
    """

    ma: int
    mb: int
    c: int
    shift: int
    lo: int = -128
    hi: int = 127


def rescale_add(q: ArrayLike, r: ArrayLike, p: RescaleAdd) -> Int8:
    """Compute the hardware's residual add of stored bytes q, r (int8, broadcast), exactly, with ties to even."""
    total = np.asarray(q, np.int64) * p.ma + np.asarray(r, np.int64) * p.mb + p.c
    return np.clip(divide_even(total, min(p.shift, 62)), p.lo, p.hi).astype(np.int8)  # shifts of 62 and 63 both give 0


def fit_rescale_add(
    sa: float, za: int, sb: float, zb: int, sc: float, zc: int, dtype: DTypeLike, a: Array | None = None,
    b: Array | None = None,
) -> RescaleAdd | None:  # fmt: skip
    """Find integers with which `rescale_add` equals `qlinear_add` on all 65,536 pairs of bytes, or None.

    dtype: int8 or uint8, of the three tensors. a, b: values of an operand that is constant (None: not constant); pairs
    with other values do not matter. None means that the search found no such integers.

    The rounded ratios suffice for most scales. Float32 rounds the partial sum, so a few pairs next to a tie may round
    the other way; then a linear program in three unknowns adjusts ma, mb and c until every pair rounds correctly.

    >>> fit_rescale_add(0.5, 3, 0.25, 0, 0.5, 0, np.int8)
    RescaleAdd(ma=536870912, mb=268435456, c=-1610612736, shift=29, lo=-128, hi=127)
    """
    return _fit_to_reference(qlinear_add, (sa, za, sb, zb, sc, zc), dtype, a, b)


def fit_float_add(
    sa: float, za: int, sb: float, zb: int, sc: float, zc: int, dtype: DTypeLike, a: Array | None = None,
    b: Array | None = None,
) -> RescaleAdd | None:  # fmt: skip
    """Find integers with which `rescale_add` equals `float_add` on all pairs of bytes that can occur, or None.

    For the arguments see `fit_rescale_add`.
    """
    return _fit_to_reference(float_add, (sa, za, sb, zb, sc, zc), dtype, a, b)


def _fit_to_reference(
    reference: Callable[..., Array], quantisation: tuple[float, int, float, int, float, int], dtype: DTypeLike,
    a: Array | None, b: Array | None,
) -> RescaleAdd | None:  # fmt: skip
    """Find integers with which `rescale_add` equals `reference` on all relevant pairs, or None.

    Each candidate is checked on all pairs. reference: `qlinear_add` or `float_add`. quantisation: scale and zero point
    of both operands and the result. dtype, a, b: see `fit_rescale_add`.
    """
    byte_dtype = byte_type(dtype)
    lo, hi = limits(byte_dtype)
    values = np.arange(lo, hi + 1).astype(byte_dtype)
    stored = reference(values[:, None], values, *quantisation).astype(np.int64) - (lo + 128)
    is_relevant = np.outer(*(np.isin(values, values if constant is None else constant) for constant in (a, b)))
    ra, rb, fixed = (float(x) for x in _add_terms(*quantisation))
    offset = fixed + (ra + rb - 1) * (lo + 128)  # constant term for stored bytes
    if not np.isfinite(offset):
        return None
    shift = _add_shift(ra, rb, offset)
    if shift < 1:
        return None
    ma, mb = round(ra * 2.0**shift), round(rb * 2.0**shift)
    for _ in range(4):
        least, most = _offset_interval(stored, is_relevant, ma, mb, shift)
        c = (int(least.max()) + int(most.min())) // 2
        if least.max() <= most.min() and abs(c) < 1 << 47:
            fitted = RescaleAdd(ma, mb, c, shift)
            equal = rescale_add(_STORED[:, None], _STORED, fitted) == stored
            assert equal[is_relevant].all(), "proof by enumeration"
            return fitted
        ma, mb = _better_slopes(least, most, ma, mb, round(offset * 2.0**shift))
    return None


def _add_shift(ra: float, rb: float, offset: float) -> int:
    """Return the shift of a RescaleAdd with these slopes and constant term, with room to adjust its integers."""
    return int(min(30 - np.frexp(max(ra, rb))[1], 46 - np.frexp(abs(offset) + 1)[1], 48))


def nearest_rescale_add(
    sa: float, za: int, sb: float, zb: int, sc: float, zc: int, dtype: DTypeLike
) -> RescaleAdd | None:
    """Return integers with which `rescale_add` rounds the real sum correctly, except within 2^-14 of a tie.

    It is what an Add gets where no exact integers exist. Returns None where the scales are too far apart. dtype: int8
    or uint8, of the three tensors.

    >>> nearest_rescale_add(0.5, 3, 0.25, 0, 0.5, 0, np.int8)
    RescaleAdd(ma=536870912, mb=268435456, c=-1610612736, shift=29, lo=-128, hi=127)
    """
    storage_shift = limits(byte_type(dtype))[0] + 128  # 128 for uint8, 0 for int8
    if not f32(sc):
        return None
    ra, rb = (float(f32(scale)) / float(f32(sc)) for scale in (sa, sb))
    offset = zc - ra * za - rb * zb + (ra + rb - 1) * storage_shift
    if not np.isfinite(offset):
        return None
    shift = _add_shift(ra, rb, offset)
    if shift < 22:  # ma, mb and c are each rounded by half a unit, and multiplied by a byte
        return None
    return RescaleAdd(round(ra * 2.0**shift), round(rb * 2.0**shift), round(offset * 2.0**shift), shift)


_STORED = np.arange(-128, 128)
"""All stored bytes."""
_NO_BOUND = np.int64(1) << 60
"""Larger than every `c`."""
_NEAREST_PAIRS = 1000
"""Pairs nearest to their bound, on each side, that enter the linear program."""


def _offset_interval(
    expected: Int64, is_relevant: NDArray[np.bool_], ma: int, mb: int, shift: int
) -> tuple[Int64, Int64]:
    """Return, for each pair of bytes, the least and the greatest `c` with which it rounds to `expected` [256, 256].

    A result that is clipped has no bound on that side; a pair that is not relevant has none (_NO_BOUND).
    """
    product = _STORED[:, None] * ma + _STORED * mb
    is_odd = expected & 1  # a tie goes to the even neighbour
    least = np.where(
        is_relevant & (expected > -128), ((2 * expected - 1) << (shift - 1)) + is_odd - product, -_NO_BOUND
    )
    most = np.where(is_relevant & (expected < 127), ((2 * expected + 1) << (shift - 1)) - is_odd - product, _NO_BOUND)
    return least, most


def _better_slopes(least: Int64, most: Int64, ma: int, mb: int, c: int) -> tuple[int, int]:
    """Find multipliers near (ma, mb) that keep every pair as far as possible from its bounds, and return them.

    least, most: bounds of `c` for each pair, see `_offset_interval`. A change by (da, db, dc) must keep
    least <= c + q*da + r*db + dc <= most; a linear program maximises the smallest distance from these bounds. Only
    pairs near a bound enter it; the next enumeration finds the others.
    """
    pairs, signs, slacks = [], [], []
    for sign, room in ((-1, c - least), (1, most - c)):
        is_near_bound = room < min(np.partition(room, _NEAREST_PAIRS, axis=None)[_NEAREST_PAIRS], _NO_BOUND // 2)
        pairs.append(np.argwhere(is_near_bound) - 128)
        signs.append(np.full(len(pairs[-1]), sign))
        slacks.append(room[is_near_bound])
    point, side, slack = np.concatenate(pairs), np.concatenate(signs)[:, None], np.concatenate(slacks)
    unit = float(np.abs(slack).max(initial=1))
    rows = np.concatenate([side * point, side, np.ones_like(side)], axis=1).astype(np.float64)
    best, tight = _maximise_last(rows, slack / unit)
    da, db = best[0] * unit, best[1] * unit
    if abs(best[3]) * unit < 8 and len(tight) > 1:  # no room: the tight pairs, on one line, must be exact ties
        i, j = tight[:2]
        (u, v), k = point[i] - point[j], side[i, 0] * slack[i] - side[j, 0] * slack[j]
        nearby = _integers_on_line(int(u), int(v), int(k), da, db)
        if nearby is not None:
            da, db = nearby
    return ma + round(da), mb + round(db)


def _integers_on_line(u: int, v: int, k: int, x: float, y: float) -> tuple[int, int] | None:
    """Return the integers near (x, y) with u*x + v*y == k, or None where there are none."""
    g = math.gcd(u, v)
    if g == 0 or k % g:
        return None
    u, v, k = u // g, v // g, k // g
    if v == 0:
        return k // u, round(y)
    first = k * pow(u, -1, abs(v)) % abs(v)
    solution = first + round((x - first) / v) * v
    return solution, (k - u * solution) // v


def _maximise_last(rows: Float64, bounds: Float64) -> tuple[Array, list[int]]:
    """Solve a linear program: maximise the last entry of x under rows @ x <= bounds and |x| <= 1.

    Returns x and the indices of the rows that are tight. Dual simplex method: it starts at a corner of the cube
    |x| <= 1 and exchanges one of its constraints for the one most violated.
    """
    count = rows.shape[1]
    cube = np.concatenate([np.eye(count), -np.eye(count)])
    rows, bounds = np.concatenate([cube, rows]), np.concatenate([np.ones(len(cube)), bounds])
    corner = np.arange(count)
    goal = np.eye(count)[-1]
    for _ in range(100):
        x = np.linalg.solve(rows[corner], bounds[corner])
        excess = rows @ x - bounds
        enter = int(np.argmax(excess))
        force, change = np.linalg.solve(rows[corner].T, np.stack([goal, rows[enter]], axis=1)).T
        if excess[enter] <= 1e-12:
            break
        ratio = np.where(change > 1e-12, force / np.maximum(change, 1e-12), np.inf)
        corner[np.argmin(ratio)] = enter
    return x, [int(i) - len(cube) for i, f in zip(corner, force) if f > 1e-9 and i >= len(cube)]


def qlinear_mul(a: Array, b: Array, sa: float, za: int, sb: float, zb: int, sc: float, zc: int) -> Array:
    """Compute com.microsoft.QLinearMul, bit-exact on x86.

    a, b: both int8 or both uint8, broadcast. Returns that type.

    Unlike the requantiser it adds the zero point before it rounds.
    """
    product = (a.astype(np.int32) - za) * (b.astype(np.int32) - zb)
    return _scaled_product(product, conv_scale(sa, sb, sc), zc, byte_type(a.dtype))


@np.errstate(all="ignore")
def float_mul(a: Array, b: Array, sa: float, za: int, sb: float, zb: int, sc: float, zc: int) -> Array:
    """Dequantise, multiply in float32 and quantise, as onnxruntime computes a Mul that it leaves in float.

    a, b: both int8 or both uint8, broadcast. Returns that type.
    """
    return quantize_linear(dequantize_linear(a, sa, za) * dequantize_linear(b, sb, zb), sc, zc, a.dtype)


@np.errstate(all="ignore")
def _scaled_product(product: Array, scale: Float32, zc: int, dtype: np.dtype[Any]) -> Array:
    """Return products of integers as bytes of `dtype`: scaled, with the zero point added before they are rounded."""
    return convert_saturating(product.astype(f32) * scale + f32(zc), dtype)


@dataclass(frozen=True)
class RescaleMul:
    """Arguments of `requantize` that turn a product of stored bytes into the quantised result."""

    bias: int
    multiplier: int
    shift: int
    zero_point: int


def fit_rescale_mul(sa: float, za: int, sb: float, zb: int, sc: float, zc: int, dtype: DTypeLike) -> RescaleMul | None:
    """Find arguments with which `requantize` of (q - za) * (r - zb) equals `qlinear_mul` on all pairs, or None.

    dtype: int8 or uint8, of the three tensors. QLinearMul rounds to even after it adds the zero point, the hardware
    before: ties differ where zc is odd. Then the multiplier changes by a few units, or the bias takes over a part of
    the zero point that is nearly an integer number of products. Each candidate is tested on the products next to ties,
    then on all.
    """
    kind = byte_type(dtype)
    lo, hi = limits(kind)
    values = np.arange(lo, hi + 1)
    products = np.unique((values[:, None] - za) * (values - zb)).astype(np.int32)
    scale = conv_scale(sa, sb, sc)
    if not np.isfinite(scale) or scale < 0:
        return None
    expected = _scaled_product(products, scale, zc, kind).astype(np.int64) - (lo + 128)
    multiplier, shift = (int(x) for x in scale_to_multiplier(scale))
    zero_point = zc - (lo + 128)

    is_near_tie = np.abs(products * float(scale) % 1 - 0.5) < 2.0**-8
    moved_units = zero_point - np.arange(-128, 128)  # output units that the bias takes over from the zero point
    biases = np.rint(moved_units / max(float(scale), 2.0**-20))
    for k in np.lexsort((np.abs(moved_units), np.abs(biases * float(scale) - moved_units)))[:16]:
        for step in sorted(range(-8, 9), key=abs):
            candidate = RescaleMul(int(biases[k]), multiplier + step, shift, zero_point - int(moved_units[k]))
            if 0 <= candidate.multiplier < 1 << MULTIPLIER_BITS and all(
                np.array_equal(_requantise(products[selection], candidate), expected[selection])
                for selection in (is_near_tie, slice(None))
            ):
                return candidate
    return None


def _requantise(acc: Array, p: RescaleMul) -> Int8:
    """Compute `requantize` with the arguments p."""
    return requantize(acc, p.bias, p.multiplier, p.shift, p.zero_point)


class BinaryFunction(NamedTuple):
    """The forms of an operator of two byte tensors, each with the arguments (a, b, sa, za, sb, zb, sc, zc).

    of_bytes: onnxruntime's operator on bytes. of_floats: the float operator between DequantizeLinear and
    QuantizeLinear. fit_floats: finds the hardware's integers that are equal to of_floats; None where there are none.
    """

    of_bytes: Callable[..., Array]
    of_floats: Callable[..., Array]
    fit_floats: Callable[..., RescaleAdd | None] | None


BINARY = {
    "Add": BinaryFunction(qlinear_add, float_add, fit_float_add),
    "Mul": BinaryFunction(qlinear_mul, float_mul, None),
}
"""Float operator -> its forms on bytes."""
