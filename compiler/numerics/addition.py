"""Two operands: QLinearAdd."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from celosia.compiler.numerics.float32 import (
    Array,
    Float64,
    Int8,
    Int64,
    byte_type,
    convert_saturating,
    f32,
    limits,
)
from celosia.compiler.numerics.linear import dequantize_linear, quantize_linear
from celosia.compiler.numerics.requantiser import divide_even
from celosia.compiler.program.host.float32 import fma


def qlinear_add(a: Array, b: Array, sa: float, za: int, sb: float, zb: int, sc: float, zc: int) -> Array:
    """com.microsoft.QLinearAdd, bit-exact on x86 with AVX2. a, b: both int8 or both uint8, broadcast. Returns that.

    onnxruntime exchanges its operands where the first one is the scalar of a broadcast along the innermost axis (also
    where both have one element): there call this function with the operands exchanged.
    """
    dtype = byte_type(a.dtype)
    ra, rb, fixed = _add_terms(sa, za, sb, zb, sc, zc)
    partial = fma(b.astype(f32), rb, fixed)
    return convert_saturating(fma(a.astype(f32), ra, partial), dtype)


@np.errstate(all="ignore")
def float_add(a: Array, b: Array, sa: float, za: int, sb: float, zb: int, sc: float, zc: int) -> Array:
    """QuantizeLinear of the float32 sum of what both are dequantised, as of an Add that onnxruntime leaves in float. a,
    b: both int8 or both uint8, broadcast. Returns that type.
    """
    return quantize_linear(dequantize_linear(a, sa, za) + dequantize_linear(b, sb, zb), sc, zc, a.dtype)


@np.errstate(all="ignore")
def _add_terms(sa: float, za: int, sb: float, zb: int, sc: float, zc: int) -> tuple[np.float32, np.float32, np.float32]:
    """Both ratios and the constant part of the sum, as the kernel folds them."""
    ra, rb = f32(sa) / f32(sc), f32(sb) / f32(sc)
    return ra, rb, f32(zc) - f32(fma(ra, f32(za), rb * f32(zb)))


@dataclass(frozen=True)
class RescaleAdd:
    """clip(rne((q * ma + r * mb + c) / 2^shift)) of stored bytes. ma, mb: signed 32 bit; c: signed 48; shift: 0..63."""

    ma: int
    mb: int
    c: int
    shift: int


def rescale_add(q: ArrayLike, r: ArrayLike, p: RescaleAdd, lo: int = -128, hi: int = 127) -> Int8:
    """The hardware's residual add: exact integers, ties to even. q, r: int8, broadcast."""
    total = np.asarray(q, np.int64) * p.ma + np.asarray(r, np.int64) * p.mb + p.c
    return np.clip(divide_even(total, min(p.shift, 62)), lo, hi).astype(np.int8)  # beyond 62 all are 0 as well


def fit_rescale_add(
    sa: float, za: int, sb: float, zb: int, sc: float, zc: int, dtype: DTypeLike, a: Array | None = None,
    b: Array | None = None,
) -> RescaleAdd | None:  # fmt: skip
    """Integers with which `rescale_add` equals `qlinear_add` on all 65,536 pairs, or None where none were found.

    dtype: int8 or uint8, that of the three tensors. a, b: arrays of it, of any shape, where an operand is constant:
    pairs with other values do not matter.

    The rounded ratios serve for most scales. Float32 rounds the partial sum, so a few pairs next to a tie may fall on
    the other side; then ma, mb, c are moved until every pair is on its side (a linear program in three unknowns).

    >>> fit_rescale_add(0.5, 3, 0.25, 0, 0.5, 0, np.int8)
    RescaleAdd(ma=536870912, mb=268435456, c=-1610612736, shift=29)
    """
    return _fit(qlinear_add, (sa, za, sb, zb, sc, zc), dtype, a, b)


def fit_float_add(
    sa: float, za: int, sb: float, zb: int, sc: float, zc: int, dtype: DTypeLike, a: Array | None = None,
    b: Array | None = None,
) -> RescaleAdd | None:  # fmt: skip
    """Fit the parameters of `float_add`."""
    return _fit(float_add, (sa, za, sb, zb, sc, zc), dtype, a, b)


def _fit(
    added: Callable[..., Array], meanings: tuple[float, int, float, int, float, int], dtype: DTypeLike,
    a: Array | None, b: Array | None,
) -> RescaleAdd | None:  # fmt: skip
    kind = byte_type(dtype)
    lo, hi = limits(kind)
    values = np.arange(lo, hi + 1).astype(kind)
    stored = added(values[:, None], values, *meanings).astype(np.int64) - (lo + 128)
    matter = np.outer(*(np.isin(values, values if constant is None else constant) for constant in (a, b)))
    ra, rb, fixed = (float(x) for x in _add_terms(*meanings))
    offset = fixed + (ra + rb - 1) * (lo + 128)  # of stored bytes
    if not np.isfinite(offset):
        return None
    shift = int(min(30 - np.frexp(max(ra, rb))[1], 46 - np.frexp(abs(offset) + 1)[1], 48))  # leaves room to move
    if shift < 1:
        return None
    ma, mb = round(ra * 2.0**shift), round(rb * 2.0**shift)
    for _ in range(4):
        least, most = _offset_interval(stored, matter, ma, mb, shift)
        c = (int(least.max()) + int(most.min())) // 2
        if least.max() <= most.min() and abs(c) < 1 << 47:
            found = RescaleAdd(ma, mb, c, shift)
            equal = rescale_add(_STORED[:, None], _STORED, found) == stored
            assert equal[matter].all(), "proof by enumeration"
            return found
        ma, mb = _better_slopes(least, most, ma, mb, round(offset * 2.0**shift))
    return None


def nearest_rescale_add(
    sa: float, za: int, sb: float, zb: int, sc: float, zc: int, dtype: DTypeLike
) -> RescaleAdd | None:
    """Integers with which `rescale_add` is the sum of the real numbers, rounded, but for sums within 2^-14 of a tie;
    None for scales too far apart. dtype: int8 or uint8, that of the three tensors.

    >>> nearest_rescale_add(0.5, 3, 0.25, 0, 0.5, 0, np.int8)
    RescaleAdd(ma=536870912, mb=268435456, c=-1610612736, shift=29)
    """
    low = limits(byte_type(dtype))[0] + 128
    if not f32(sc):
        return None
    ra, rb = (float(f32(scale)) / float(f32(sc)) for scale in (sa, sb))
    offset = zc - ra * za - rb * zb + (ra + rb - 1) * low
    if not np.isfinite(offset):
        return None
    shift = int(min(30 - np.frexp(max(ra, rb))[1], 46 - np.frexp(abs(offset) + 1)[1], 48))
    if shift < 22:  # each of the three is off by half a unit, times a byte
        return None
    return RescaleAdd(round(ra * 2.0**shift), round(rb * 2.0**shift), round(offset * 2.0**shift), shift)


_STORED = np.arange(-128, 128)
_NO_BOUND = np.int64(1) << 60
_NEAREST = 1000  # pairs nearest to their bound on each side


def _offset_interval(wanted: Int64, matter: NDArray[np.bool_], ma: int, mb: int, shift: int) -> tuple[Int64, Int64]:
    """For each pair the least and the most `c` with which it rounds to `wanted` [256, 256]; none on a clipped side, nor
    for a pair that does not matter."""
    product = _STORED[:, None] * ma + _STORED * mb
    odd = wanted & 1  # a tie goes to the even neighbour
    least = np.where(matter & (wanted > -128), ((2 * wanted - 1) << (shift - 1)) + odd - product, -_NO_BOUND)
    most = np.where(matter & (wanted < 127), ((2 * wanted + 1) << (shift - 1)) - odd - product, _NO_BOUND)
    return least, most


def _better_slopes(least: Int64, most: Int64, ma: int, mb: int, c: int) -> tuple[int, int]:
    """Slopes near (ma, mb) that leave every pair as far as possible on the inner side of its bounds.

    Moving by (da, db, dc) must keep least <= c + q*da + r*db + dc <= most; the linear program maximises the smallest
    distance. Only pairs near a bound are looked at; what that misses, the next round of enumeration sees.
    """
    pairs, signs, slacks = [], [], []
    for sign, room in ((-1, c - least), (1, most - c)):
        near = room < min(np.partition(room, _NEAREST, axis=None)[_NEAREST], _NO_BOUND // 2)
        pairs.append(np.argwhere(near) - 128)
        signs.append(np.full(len(pairs[-1]), sign))
        slacks.append(room[near])
    point, side, slack = np.concatenate(pairs), np.concatenate(signs)[:, None], np.concatenate(slacks)
    unit = float(np.abs(slack).max(initial=1))
    rows = np.concatenate([side * point, side, np.ones_like(side)], axis=1).astype(np.float64)
    best, tight = _maximise_last(rows, slack / unit)
    da, db = best[0] * unit, best[1] * unit
    if abs(best[3]) * unit < 8 and len(tight) > 1:  # no room: the tight pairs, on one line, must be exact ties
        i, j = tight[:2]
        (u, v), k = point[i] - point[j], side[i, 0] * slack[i] - side[j, 0] * slack[j]
        on_line = _integers_on_line(int(u), int(v), int(k), da, db)
        if on_line is not None:
            da, db = on_line
    return ma + round(da), mb + round(db)


def _integers_on_line(u: int, v: int, k: int, x: float, y: float) -> tuple[int, int] | None:
    """The integers near (x, y) with u*x + v*y == k, or None where there are none."""
    g = math.gcd(u, v)
    if g == 0 or k % g:
        return None
    u, v, k = u // g, v // g, k // g
    if v == 0:
        return k // u, round(y)
    first = k * pow(u, -1, abs(v)) % abs(v)
    whole = first + round((x - first) / v) * v
    return whole, (k - u * whole) // v


def _maximise_last(rows: Float64, bounds: Float64) -> tuple[Array, list[int]]:
    """The x with the greatest last entry such that rows @ x <= bounds and |x| <= 1, and the rows that stop it.

    Dual simplex method: it starts at a corner of the cube and exchanges one of its rows for the one most violated.
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
