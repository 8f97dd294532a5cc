"""Two operands: QLinearMul."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from celosia.compiler.numerics.float32 import Array, Float32, Int8, byte_type, convert_saturating, f32, limits
from celosia.compiler.numerics.linear import dequantize_linear, quantize_linear
from celosia.compiler.numerics.requantiser import MULTIPLIER_BITS, conv_scale, fold_scale, requantize


def qlinear_mul(a: Array, b: Array, sa: float, za: int, sb: float, zb: int, sc: float, zc: int) -> Array:
    """com.microsoft.QLinearMul, bit-exact on x86. a, b: both int8 or both uint8, broadcast. Returns that type.

    Unlike the requantiser it adds the zero point before it rounds.
    """
    product = (a.astype(np.int32) - za) * (b.astype(np.int32) - zb)
    return _scaled_product(product, conv_scale(sa, sb, sc), zc, byte_type(a.dtype))


@np.errstate(all="ignore")
def float_mul(a: Array, b: Array, sa: float, za: int, sb: float, zb: int, sc: float, zc: int) -> Array:
    """QuantizeLinear of the float32 product of what both are dequantised, as of a Mul that onnxruntime leaves in float.
    a, b: both int8 or both uint8, broadcast. Returns that type.
    """
    return quantize_linear(dequantize_linear(a, sa, za) * dequantize_linear(b, sb, zb), sc, zc, a.dtype)


@np.errstate(all="ignore")
def _scaled_product(product: Array, scale: Float32, zc: int, dtype: np.dtype[Any]) -> Array:
    return convert_saturating(product.astype(f32) * scale + f32(zc), dtype)


@dataclass(frozen=True)
class RescaleMul:
    """Arguments of `requantize` after the accumulator, for stored bytes."""

    bias: int
    multiplier: int
    shift: int
    zero_point: int


def mul_scale(sa: float, za: int, sb: float, zb: int, sc: float, zc: int, dtype: DTypeLike) -> RescaleMul | None:
    """How to requantise (q - za) * (r - zb) to be `qlinear_mul` on all 65,536 pairs, or None where nothing was found.

    QLinearMul rounds to even after adding the zero point, the hardware before: ties go the other way where zc is odd.
    Then the multiplier moves by a few units, or whole steps that are nearly a whole number of products move from the
    zero point to the bias. Each candidate is tried on the products next to ties, and what passes on all of them.
    """
    kind = byte_type(dtype)
    lo, hi = limits(kind)
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
            found = RescaleMul(int(biases[k]), multiplier + step, shift, zero_point - int(moved[k]))
            if 0 <= found.multiplier < 1 << MULTIPLIER_BITS and all(
                np.array_equal(_requantise(products[chosen], found), wanted[chosen])
                for chosen in (delicate, slice(None))
            ):
                return found
    return None


def _requantise(acc: Array, p: RescaleMul) -> Int8:
    return requantize(acc, p.bias, p.multiplier, p.shift, p.zero_point)
