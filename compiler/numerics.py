"""The arithmetic of the integer operators: what onnxruntime computes, and the integers with which the hardware agrees.

Three kinds of functions:

- *references* (`requantize_f32`, `qlinear_add`, `unary_table`, ...) repeat the float32 operations of onnxruntime's CPU
  kernels in their order, bit for bit; tests compare them with onnxruntime, which this module never imports;
- *specifications* (`requantize`, `rescale_add`) are the integer arithmetic of the hardware;
- *derivations* (`fold_scale`, `fit_rescale_add`, `mul_scale`, ...) find the integers for one operator. Where an
  operator has few inputs they try them all, so what they return is proved, and None means that nothing exact was found.

The hardware holds int8. A uint8 tensor is stored with its top bit flipped (x - 128), so are its zero points; functions
that derive parameters take the ONNX values and return parameters for the stored ones. See docs/numerics.md.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

Array = NDArray[Any]
Int8 = NDArray[np.int8]
Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]

MULTIPLIER_BITS = 24  # significand of a float32
SHIFT_BITS = 6

_f32 = np.float32


# Requantise: int32 accumulator -> int8, as QLinearConv, QGemm, QLinearMatMul and QLinearGlobalAveragePool do it.


def conv_scale(sx: ArrayLike, sw: ArrayLike, sy: ArrayLike) -> Float32:
    """Factor from accumulator to output steps: f32(f32(sx * sw) / sy), in onnxruntime's order. Arguments broadcast.

    >>> conv_scale(0.5, [0.25, 0.5], 0.125).tolist()
    [1.0, 2.0]
    """
    product = np.asarray(sx, _f32) * np.asarray(sw, _f32)
    return np.asarray(product / np.asarray(sy, _f32), _f32)


def fold_scale(scale: ArrayLike) -> tuple[NDArray[np.uint32], NDArray[np.uint8]]:
    """Multiplier (2^23 <= m < 2^24, or 0) and shift (0..63) with which `requantize` equals `requantize_f32`.

    scale: any shape, float32, finite and not negative (else ValueError). m * 2^-shift is `scale` exactly for
    2^-40 <= scale < 2^24. Below, every int32 times `scale` rounds to 0 and so does m = 0; above, every int32 but 0
    leaves the range of a byte and so it does with m = 2^23, shift = 0.

    >>> [int(v) for v in fold_scale(0.75)]
    [12582912, 24]
    """
    s = np.asarray(scale, _f32)
    if not np.all(np.isfinite(s)) or np.any(s < 0):
        raise ValueError(f"a scale must be finite and not negative, not {s[~np.isfinite(s) | (s < 0)].flat[0]}")
    significand, exponent = np.frexp(s)  # s = significand * 2^exponent, 1/2 <= significand < 1
    multiplier = np.ldexp(significand, MULTIPLIER_BITS).astype(np.int64)
    shift = MULTIPLIER_BITS - exponent.astype(np.int64)
    tiny, huge = shift >= 1 << SHIFT_BITS, shift < 0
    multiplier = np.where(tiny, 0, np.where(huge, 1 << (MULTIPLIER_BITS - 1), multiplier))
    shift = np.where(tiny | huge | (s == 0), 0, shift)
    return np.asarray(multiplier, np.uint32), np.asarray(shift, np.uint8)


def requantize_f32(acc: ArrayLike, bias: ArrayLike, scale: ArrayLike, zero_point: int, lo: int, hi: int) -> Int32:
    """clip(rne(f32(f32(acc + bias) * scale)) + zero_point, lo, hi): what onnxruntime computes. Arguments broadcast.

    acc, bias: int32, their sum wraps. Returns int32, so that lo, hi may be those of int8 or of uint8.
    """
    total = _wrapping_sum(acc, bias).astype(_f32)
    with np.errstate(over="ignore"):
        steps = np.rint(total * np.asarray(scale, _f32))
    return (np.clip(steps, lo - zero_point, hi - zero_point) + zero_point).astype(np.int32)


def requantize(
    acc: ArrayLike,
    bias: ArrayLike,
    multiplier: ArrayLike,
    shift: ArrayLike,
    zero_point: int,
    lo: int = -128,
    hi: int = 127,
) -> Int8:
    """The hardware's requantiser, in integers only; arguments broadcast, acc and bias are int32. Returns int8.

    1. v = acc + bias, wrapping; beyond 2^24 rounded to 24 significant bits, nearest even (as int32 -> float32 does).
    2. p = v * multiplier, exact (at most 55 bits and a sign).
    3. y = p / 2^shift rounded to nearest; to even where |fraction - 1/2| <= half a unit of p's 24th significant bit.
       Those are the p whose float32 rounding is the tie itself.
    4. clip(y + zero_point, lo, hi).
    """
    v = _round_to_24_bits(_wrapping_sum(acc, bias).astype(np.int64))
    p = v * np.asarray(multiplier, np.int64)
    return np.clip(_divide_f32(p, np.asarray(shift, np.int64)) + zero_point, lo, hi).astype(np.int8)


def _wrapping_sum(acc: ArrayLike, bias: ArrayLike) -> Int32:
    total = np.asarray(acc, np.int64) + np.asarray(bias, np.int64)
    return np.asarray(total & 0xFFFFFFFF, np.uint32).view(np.int32)


def _bit_length(magnitude: Int64) -> Int64:
    """Bits of each integer, which must not be negative and have at most 53 significant bits."""
    return np.frexp(magnitude.astype(np.float64))[1].astype(np.int64)


def _round_to_24_bits(v: Int64) -> Int64:
    """Keep 24 significant bits, to nearest even."""
    drop = np.maximum(_bit_length(np.abs(v)) - MULTIPLIER_BITS, 0)
    return np.left_shift(_divide_even(v, drop), drop)


def _divide_even(x: Int64, shift: ArrayLike) -> Int64:
    """x / 2^shift to nearest, ties to even. shift 0..62."""
    down = np.right_shift(x, shift)
    twice = (x - np.left_shift(down, shift)) << 1
    one = np.left_shift(np.int64(1), shift)
    return np.asarray(down + ((twice > one) | ((twice == one) & (down & 1 == 1))), np.int64)


def _divide_f32(p: Int64, shift: Int64) -> Int64:
    """p / 2^shift to nearest, ties to even, where what float32 cannot tell from a tie counts as one. |p| < 2^56."""
    p, shift = np.broadcast_arrays(p, shift)
    far = shift > 58  # |p| / 2^59 < 1/4: rounds to 0
    shift = np.where(far, 0, shift)
    down = np.right_shift(p, shift)
    fraction = p - np.left_shift(down, shift)
    half = np.left_shift(np.int64(1), shift) >> 1
    excess = _bit_length(np.abs(p)) - MULTIPLIER_BITS  # bits that the product loses in float32
    reach = np.where(excess > 0, np.left_shift(np.int64(1), np.maximum(excess, 1) - 1), 0)
    tie = (np.abs(fraction - half) <= reach) & (shift > 0)
    up = np.where(tie, down & 1 == 1, fraction > half)
    return np.asarray(np.where(far, 0, down + (up & (shift > 0))), np.int64)


def _byte_type(dtype: DTypeLike) -> np.dtype[Any]:
    kind = np.dtype(dtype)
    if kind not in (np.dtype(np.int8), np.dtype(np.uint8)):
        raise TypeError(f"expected int8 or uint8, not {kind}")
    return kind


def _limits(kind: np.dtype[Any]) -> tuple[int, int]:
    return int(np.iinfo(kind).min), int(np.iinfo(kind).max)


# Two operands: QLinearAdd.


def qlinear_add(a: Array, b: Array, sa: float, za: int, sb: float, zb: int, sc: float, zc: int) -> Array:
    """com.microsoft.QLinearAdd, bit-exact on x86 with AVX2. a, b: both int8 or both uint8, broadcast. Returns that.

    onnxruntime exchanges its operands where the first one is the scalar of a broadcast along the innermost axis (also
    where both have one element): there call this function with the operands exchanged.
    """
    dtype = _byte_type(a.dtype)
    ra, rb, fixed = _add_terms(sa, za, sb, zb, sc, zc)
    partial = _fma(b.astype(_f32), rb, fixed)
    return _convert_saturating(_fma(a.astype(_f32), ra, partial), dtype)


def _add_terms(sa: float, za: int, sb: float, zb: int, sc: float, zc: int) -> tuple[np.float32, np.float32, np.float32]:
    """Both ratios and the constant part of the sum, as the kernel folds them."""
    ra, rb = _f32(sa) / _f32(sc), _f32(sb) / _f32(sc)
    return ra, rb, _f32(zc) - _f32(_fma(ra, _f32(za), rb * _f32(zb)))


def _fma(a: ArrayLike, b: ArrayLike, c: ArrayLike) -> Float32:
    """float32 a * b + c with one rounding."""
    product = np.multiply(a, b, dtype=np.float64)  # exact: 48 bits
    c64 = np.asarray(c, np.float64)
    total = np.asarray(product + c64)
    head = total - product
    error = np.asarray((product - (total - head)) + (c64 - head))  # total + error is the sum (Knuth)
    inexact = error != 0
    if np.any(inexact):  # round to odd, so that the next rounding sees what is lost
        away = inexact & (np.signbit(error) != np.signbit(total))
        total = np.where(away, np.nextafter(total, 0.0), total)
        total = (total.reshape(-1).view(np.int64) | inexact.reshape(-1)).view(np.float64).reshape(total.shape)
    return np.asarray(total, _f32)


def _convert_saturating(x: Float32, dtype: np.dtype[Any]) -> Array:
    """Round to even and saturate as cvtps2dq and the packs after it do: NaN and x >= 2^31 give the smallest value."""
    lo, hi = _limits(dtype)
    return np.where(x < 2.0**31, np.clip(np.rint(x), lo, hi), lo).astype(dtype)


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
    return np.clip(_divide_even(total, min(p.shift, 62)), lo, hi).astype(np.int8)  # beyond 62 all are 0 as well


def fit_rescale_add(sa: float, za: int, sb: float, zb: int, sc: float, zc: int, dtype: DTypeLike) -> RescaleAdd | None:
    """Integers with which `rescale_add` equals `qlinear_add` on all 65,536 pairs, or None where none were found.

    dtype: int8 or uint8, that of the three tensors.

    The rounded ratios serve for most scales. Float32 rounds the partial sum, so a few pairs next to a tie may fall on
    the other side; then ma, mb, c are moved until every pair is on its side (a linear program in three unknowns).

    >>> fit_rescale_add(0.5, 3, 0.25, 0, 0.5, 0, np.int8)
    RescaleAdd(ma=536870912, mb=268435456, c=-1610612736, shift=29)
    """
    kind = _byte_type(dtype)
    lo, hi = _limits(kind)
    values = np.arange(lo, hi + 1).astype(kind)
    stored = qlinear_add(values[:, None], values, sa, za, sb, zb, sc, zc).astype(np.int64) - (lo + 128)
    ra, rb, fixed = (float(x) for x in _add_terms(sa, za, sb, zb, sc, zc))
    offset = fixed + (ra + rb - 1) * (lo + 128)  # of stored bytes
    if not np.isfinite(offset):
        return None
    shift = int(min(30 - np.frexp(max(ra, rb))[1], 46 - np.frexp(abs(offset) + 1)[1], 48))  # leaves room to move
    if shift < 1:
        return None
    ma, mb = round(ra * 2.0**shift), round(rb * 2.0**shift)
    for _ in range(4):
        least, most = _offset_interval(stored, ma, mb, shift)
        c = (int(least.max()) + int(most.min())) // 2
        if least.max() <= most.min() and abs(c) < 1 << 47:
            found = RescaleAdd(ma, mb, c, shift)
            assert np.array_equal(rescale_add(_STORED[:, None], _STORED, found), stored), "proof by enumeration"
            return found
        ma, mb = _better_slopes(least, most, ma, mb, round(offset * 2.0**shift))
    return None


_STORED = np.arange(-128, 128)
_NO_BOUND = np.int64(1) << 60
_NEAREST = 1000  # pairs nearest to their bound on each side


def _offset_interval(wanted: Int64, ma: int, mb: int, shift: int) -> tuple[Int64, Int64]:
    """For each pair the least and the most `c` with which it rounds to `wanted` [256, 256]; none on a clipped side."""
    product = _STORED[:, None] * ma + _STORED * mb
    odd = wanted & 1  # a tie goes to the even neighbour
    least = np.where(wanted > -128, ((2 * wanted - 1) << (shift - 1)) + odd - product, -_NO_BOUND)
    most = np.where(wanted < 127, ((2 * wanted + 1) << (shift - 1)) - odd - product, _NO_BOUND)
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


# Two operands: QLinearMul.


def qlinear_mul(a: Array, b: Array, sa: float, za: int, sb: float, zb: int, sc: float, zc: int) -> Array:
    """com.microsoft.QLinearMul, bit-exact on x86. a, b: both int8 or both uint8, broadcast. Returns that type.

    Unlike the requantiser it adds the zero point before it rounds.
    """
    product = (a.astype(np.int32) - za) * (b.astype(np.int32) - zb)
    return _scaled_product(product, conv_scale(sa, sb, sc), zc, _byte_type(a.dtype))


def _scaled_product(product: Array, scale: Float32, zc: int, dtype: np.dtype[Any]) -> Array:
    return _convert_saturating(product.astype(_f32) * scale + _f32(zc), dtype)


@dataclass(frozen=True)
class Requantise:
    """Arguments of `requantize` after the accumulator, for stored bytes."""

    bias: int
    multiplier: int
    shift: int
    zero_point: int


def mul_scale(sa: float, za: int, sb: float, zb: int, sc: float, zc: int, dtype: DTypeLike) -> Requantise | None:
    """How to requantise (q - za) * (r - zb) to be `qlinear_mul` on all 65,536 pairs, or None where nothing was found.

    QLinearMul rounds to even after adding the zero point, the hardware before: ties go the other way where zc is odd.
    Then the multiplier moves by a few units, or whole steps that are nearly a whole number of products move from the
    zero point to the bias. Each candidate is tried on the products next to ties, and what passes on all of them.
    """
    kind = _byte_type(dtype)
    lo, hi = _limits(kind)
    values = np.arange(lo, hi + 1)
    products = np.unique((values[:, None] - za) * (values - zb)).astype(np.int32)
    scale = conv_scale(sa, sb, sc)
    if not np.isfinite(scale) or scale < 0:
        return None
    wanted = _scaled_product(products, scale, zc, kind).astype(np.int64) - (lo + 128)
    multiplier, shift = (int(x) for x in fold_scale(scale))
    zero_point = zc - (lo + 128)

    delicate = np.abs(products * float(scale) % 1 - 0.5) < 2.0**-8
    moved = zero_point - np.arange(-128, 128)  # steps that the bias takes over
    biases = np.rint(moved / max(float(scale), 2.0**-20))
    for k in np.lexsort((np.abs(moved), np.abs(biases * float(scale) - moved)))[:16]:
        for step in sorted(range(-8, 9), key=abs):
            found = Requantise(int(biases[k]), multiplier + step, shift, zero_point - int(moved[k]))
            if 0 <= found.multiplier < 1 << MULTIPLIER_BITS and all(
                np.array_equal(_requantise(products[chosen], found), wanted[chosen])
                for chosen in (delicate, slice(None))
            ):
                return found
    return None


def _requantise(acc: Array, p: Requantise) -> Int8:
    return requantize(acc, p.bias, p.multiplier, p.shift, p.zero_point)


# Pooling. The scales are for `fold_scale`; the bias is -zero_point * count, for stored bytes and their zero points.


def global_average_scale(sx: float, sy: float, count: int) -> np.float32:
    """Factor from the sum of `count` values to output steps in QLinearGlobalAveragePool: exact with `requantize`."""
    return _f32(_f32(sx) / (_f32(sy) * _f32(count)))


def mean_scale(sx: float, sy: float, count: int) -> np.float32:
    """The same factor for a mean that the model computes in float32, between DequantizeLinear and QuantizeLinear.

    Float32 sums have no defined order, so this is the nearest factor. For count <= 2^13 and sx <= 2 * sy the result
    differs by at most one step, and only where the mean lies within (count + 5) * 2^-15 of a half step: float32 errs by
    at most 2^-24 of the largest value, which is 510 steps, for each addition and each of the few other operations.
    """
    return _f32(float(_f32(sx)) / (float(_f32(sy)) * count))


def qlinear_average(windows: Array, sx: float, zx: int, sy: float, zy: int) -> Array:
    """com.microsoft.QLinearAveragePool of windows [..., n], their values row by row; returns [...].

    It dequantises, sums in float32 in that order, divides by n and adds the zero point before it rounds. The sum of the
    integers cannot always tell where that ends: `requantize` with `global_average_scale` differs on ties, by one step.
    """
    x = dequantize_linear(windows, sx, zx)
    total = np.zeros(x.shape[:-1], _f32)
    for i in range(x.shape[-1]):
        total = total + x[..., i]
    lo, hi = _limits(_byte_type(windows.dtype))
    steps = np.rint(total / _f32(x.shape[-1]) / _f32(sy) + _f32(zy))
    return np.asarray(np.clip(steps, lo, hi).astype(windows.dtype))


# One operand: 256 inputs.


def quantize_linear(x: ArrayLike, scale: ArrayLike, zero_point: ArrayLike, dtype: DTypeLike) -> Array:
    """QuantizeLinear: rne(x / scale) + zero_point, saturated; NaN gives the smallest value. dtype: int8 or uint8."""
    lo, hi = _limits(_byte_type(dtype))
    zero = np.asarray(zero_point, np.int32)
    with np.errstate(over="ignore", invalid="ignore"):
        steps = np.rint(np.asarray(x, _f32) / np.asarray(scale, _f32))
    steps = np.where(np.isnan(steps), lo - zero, np.clip(steps, lo - zero, hi - zero))
    return np.asarray((steps + zero).astype(dtype))


def dequantize_linear(q: Array, scale: ArrayLike, zero_point: ArrayLike) -> Float32:
    """DequantizeLinear: (q - zero_point) * scale."""
    return np.asarray((q.astype(np.int32) - np.asarray(zero_point, np.int32)).astype(_f32) * np.asarray(scale, _f32))


def unary_table(
    op: str | Callable[[Float32], Array],
    attributes: Mapping[str, float],
    sx: float,
    zx: int,
    sy: float,
    zy: int,
    dtype: DTypeLike,
) -> Int8:
    """What dequantise -> op -> quantise makes of every byte: [256] int8, entry i for the stored byte i - 128.

    op: a key of UNARY, or a function of a float32 array (which then gets no attributes). KeyError for another name.
    "Identity" is a change of scale, and the table of QLinearConcat.

    >>> unary_table("Relu", {}, 0.5, 0, 0.5, 0, np.int8)[[0, 127, 128, 255]].tolist()
    [0, 0, 0, 127]
    """
    kind = _byte_type(dtype)
    lo, hi = _limits(kind)
    x = dequantize_linear(np.arange(lo, hi + 1).astype(kind), sx, zx)
    with np.errstate(all="ignore"):
        y = UNARY[op](x, **attributes) if isinstance(op, str) else op(x)
    return (quantize_linear(y, sy, zy, kind).astype(np.int64) - (lo + 128)).astype(np.int8)


def _polynomial(x: Float32, *coefficients: float) -> Float32:
    """Horner's rule with fused multiply-adds, highest power first."""
    result = np.full_like(x, coefficients[0])
    for c in coefficients[1:]:
        result = _fma(result, x, _f32(c))
    return result


def _sigmoid(x: Float32) -> Float32:
    """The rational approximation of Eigen, which onnxruntime uses: 1/2 + x P(x^2) / Q(x^2) on -18..18."""
    x = np.clip(x, _f32(-18), _f32(18))
    p = _polynomial(
        x * x,
        4.37031012579801e-11,
        1.15627324459942e-07,
        6.08574864600143e-05,
        8.51377133304701e-03,
        2.48287947061529e-01,
    )
    q = _polynomial(
        x * x,
        6.10247389755681e-13,
        5.76102136993427e-09,
        6.29106785017040e-06,
        1.70198817374094e-03,
        1.16817656904453e-01,
        9.93151921023180e-01,
    )
    return np.asarray(np.maximum(p * x / q + _f32(0.5), _f32(0)))


def _leaky_relu(x: Float32, alpha: float = 0.01) -> Float32:
    return np.where(x >= 0, x, _f32(alpha) * x)


def _hard_sigmoid(x: Float32, alpha: float = 0.2, beta: float = 0.5) -> Float32:
    return np.asarray(np.clip(_f32(alpha) * x + _f32(beta), _f32(0), _f32(1)))


def _hard_swish(x: Float32) -> Float32:
    return x * _hard_sigmoid(x, 1 / 6)


def _clip(x: Float32, min: float = -np.inf, max: float = np.inf) -> Float32:
    return np.clip(x, _f32(min), _f32(max))


def _gelu(x: Array) -> Array:
    return np.asarray(0.5 * x * (1 + _erf(x * math.sqrt(0.5))))


def _in_float64(function: Callable[..., Array]) -> Callable[..., Array]:
    return lambda x, **attributes: function(x.astype(np.float64), **attributes)


_erf: Callable[[Array], Array] = np.vectorize(math.erf, otypes=[np.float64])

# The first group repeats onnxruntime bit by bit. The second rounds once where onnxruntime errs by a few units of the
# last place of float32: a table entry can differ where its value is that near to a tie (docs/numerics.md: how often).
UNARY: dict[str, Callable[..., Array]] = {
    "Identity": lambda x: x,
    "Relu": lambda x: np.maximum(x, _f32(0)),
    "LeakyRelu": _leaky_relu,
    "Clip": _clip,
    "Sigmoid": _sigmoid,
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": _hard_swish,
    "ThresholdedRelu": lambda x, alpha=1.0: np.where(x > _f32(alpha), x, _f32(0)),
    "Abs": np.abs,
    "Neg": np.negative,
    "Sqrt": np.sqrt,
    "Reciprocal": lambda x: _f32(1) / x,
    "Ceil": np.ceil,
    "Floor": np.floor,
    "Round": np.rint,
    "Elu": _in_float64(lambda x, alpha=1.0: np.where(x >= 0, x, alpha * np.expm1(x))),
    "Erf": _in_float64(_erf),
    "Exp": _in_float64(np.exp),
    "Gelu": _in_float64(_gelu),
    "Log": _in_float64(np.log),
    "Mish": _in_float64(lambda x: x * np.tanh(np.log1p(np.exp(x)))),
    "Softplus": _in_float64(lambda x: np.logaddexp(x, 0)),
    "Softsign": _in_float64(lambda x: x / (1 + np.abs(x))),
    "Tanh": _in_float64(np.tanh),
}


# A row at a time: QLinearSoftmax.


def qlinear_softmax(x: Array, sx: float, sy: float, zy: int) -> Array:
    """com.microsoft.QLinearSoftmax over the last axis. x: int8 or uint8; its zero point does not matter. Returns that.

    Exponentials come from a table, scaled so that the sum stays below the largest float32; the row's maximum meets its
    last entry. Sums run left to right in float32, and the output scale counts as a whole fraction 1 / floor(1 / sy).
    """
    lo, hi = _limits(_byte_type(x.dtype))
    room = max(0.0, float(np.log(np.finfo(_f32).max / _f32(x.shape[-1]))) - 5)
    table = np.exp((np.arange(256) - 255 + room / float(_f32(sx))) * float(_f32(sx))).astype(_f32)
    steps = x.astype(np.int64)
    powers = table[255 + steps - steps.max(axis=-1, keepdims=True)]
    total = np.zeros(x.shape[:-1], _f32)
    for i in range(x.shape[-1]):
        total = total + powers[..., i]
    y = np.rint(powers * np.floor(_f32(1) / _f32(sy)) / total[..., None])
    return np.asarray(np.clip(y.astype(np.int64) + zy, lo, hi).astype(x.dtype))
