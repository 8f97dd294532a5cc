"""Exact arithmetic of the integer operators: onnxruntime's results, and the integers with which the hardware equals
them.

There are three kinds of functions:

- *references* (`requantize_f32`, `qlinear_add`, `unary_table`, ...) repeat the float32 operations of onnxruntime's CPU
kernels in their order, bit for bit; tests compare them with onnxruntime, which this module never imports;

- *specifications* (`requantize`, `rescale_add`) are the integer arithmetic of the hardware;

- *derivations* (`fold_scale`, `fit_rescale_add`, `fit_rescale_mul`, ...) find the integers for one operator. Where an
operator has few inputs they try them all, so the result is proved; None means that no exact integers were found.

The hardware stores int8. A uint8 tensor is stored with its top bit flipped (x - 128), and so are its zero points.
"Stored bytes" below are these int8; derivations take the ONNX values and return parameters for stored bytes. Arguments
sx, sw, sa, sb are scales of inputs, sy or sc of the result; zx, za, zb, zy, zc are their zero points. See
docs/numerics.md.

  quantize            how floats become bytes and back; which array types these functions take
  requantiser         which multiplier and shift replace the scale of a convolution or matrix product
  addition            which integers make the residual add equal to QLinearAdd
  multiplication      which integers make the requantiser equal to QLinearMul
  unary               which element-wise functions (`UNARY`) become tables of 256 bytes, and what a table holds
  average             which scale replaces the division of a mean, and when that is exact
  softmax_and_norm    which powers QLinearSoftmax adds up; which constants a LayerNorm or RMSNorm of bytes needs, or why
                      there are none
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from numpy.typing import NDArray

from celosia.compiler.numerics.addition import (
    RescaleAdd,
    fit_float_add,
    fit_rescale_add,
    float_add,
    nearest_rescale_add,
    qlinear_add,
    rescale_add,
)
from celosia.compiler.numerics.average import average_is_exact, global_average_scale, mean_scale, qlinear_average
from celosia.compiler.numerics.multiplication import RescaleMul, fit_rescale_mul, float_mul, qlinear_mul
from celosia.compiler.numerics.quantize import dequantize_linear, quantize_linear
from celosia.compiler.numerics.requantiser import (
    MULTIPLIER_BITS,
    SHIFT_BITS,
    conv_scale,
    fold_scale,
    requantize,
    requantize_f32,
)
from celosia.compiler.numerics.softmax_and_norm import (
    NormConstants,
    NormError,
    norm_constants,
    qlinear_softmax,
    softmax_powers,
)
from celosia.compiler.numerics.unary import UNARY, unary_table


class BinaryFunction(NamedTuple):
    """The forms of an operator of two byte tensors, each with the arguments (a, b, sa, za, sb, zb, sc, zc).

    of_bytes: onnxruntime's operator on bytes. of_floats: the float operator between DequantizeLinear and
    QuantizeLinear. fit_floats: finds the hardware's integers that are equal to of_floats; None where there are none.
    """

    of_bytes: Callable[..., NDArray[Any]]
    of_floats: Callable[..., NDArray[Any]]
    fit_floats: Callable[..., RescaleAdd | None] | None


BINARY = {
    "Add": BinaryFunction(qlinear_add, float_add, fit_float_add),
    "Mul": BinaryFunction(qlinear_mul, float_mul, None),
}
"""Float operator -> its forms on bytes."""
INT8 = "session.qdqisint8allowed"
"""Session option with which onnxruntime computes QDQ pairs of int8 in integers. By default it converts them to uint8,
whose products with int8 weights saturate on processors without VNNI."""

__all__ = [
    "BINARY",
    "INT8",
    "MULTIPLIER_BITS",
    "SHIFT_BITS",
    "UNARY",
    "BinaryFunction",
    "NormConstants",
    "NormError",
    "RescaleAdd",
    "RescaleMul",
    "average_is_exact",
    "conv_scale",
    "dequantize_linear",
    "fit_float_add",
    "fit_rescale_add",
    "fit_rescale_mul",
    "float_add",
    "float_mul",
    "fold_scale",
    "global_average_scale",
    "mean_scale",
    "nearest_rescale_add",
    "norm_constants",
    "qlinear_add",
    "qlinear_average",
    "qlinear_mul",
    "qlinear_softmax",
    "quantize_linear",
    "requantize",
    "requantize_f32",
    "rescale_add",
    "softmax_powers",
    "unary_table",
]  # fmt: skip
