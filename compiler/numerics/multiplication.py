"""Quantised multiplication: QLinearMul, and arguments with which the hardware's requantiser equals it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from celosia.compiler.numerics.quantize import (
    Array,
    Float32,
    Int8,
    byte_type,
    convert_saturating,
    dequantize_linear,
    f32,
    limits,
    quantize_linear,
)
from celosia.compiler.numerics.requantiser import MULTIPLIER_BITS, conv_scale, fold_scale, requantize


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
    multiplier, shift = (int(x) for x in fold_scale(scale))
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
