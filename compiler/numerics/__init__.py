"""Exact arithmetic of the integer operators: onnxruntime's results, and the integers with which the hardware equals
them.

There are three kinds of functions:

- *references* (`requantize_f32`, `qlinear_add`, `unary_table`, ...) repeat the float32 operations of onnxruntime's CPU
kernels in their order, bit for bit; tests compare them with onnxruntime, which this module never imports;

- *specifications* (`requantize`, `rescale_add`) are the integer arithmetic of the hardware;

- *derivations* (`scale_to_multiplier`, `fit_rescale_add`, `fit_rescale_mul`, ...) find the integers for one operator.
Where an operator has few inputs they try them all, so the result is proved; None means that no exact integers were
found.

The hardware stores int8. A uint8 tensor is stored with its top bit flipped (x - 128), and so are its zero points.
"Stored bytes" below are these int8; derivations take the ONNX values and return parameters for stored bytes. Arguments
sx, sw, sa, sb are scales of inputs, sy or sc of the result; zx, za, zb, zy, zc are their zero points. See
docs/numerics.md.

  requantiser   how floats become bytes and back; which array types these functions take; which multiplier and shift
                replace the scale of a convolution or matrix product; which scale replaces the division of a mean, and
                when that is exact
  float_products
                which products of bytes in float32 are exact in every order, and which integers have their bytes
  binary        which integers make the residual add equal to QLinearAdd, and the requantiser equal to QLinearMul
  tables        what the table of an element-wise function of bytes holds (which functions become tables:
                graph/quantized/tables); which powers QLinearSoftmax adds up
  norm          which constants a LayerNorm or RMSNorm of bytes needs, or why there are none; how rows are normalised
                in integers, as expressions
"""

from celosia.compiler.numerics.binary import (
    BINARY,
    BinaryFunction,
    RescaleAdd,
    RescaleMul,
    fit_float_add,
    fit_rescale_add,
    fit_rescale_mul,
    float_add,
    float_mul,
    nearest_rescale_add,
    qlinear_add,
    qlinear_mul,
    rescale_add,
)
from celosia.compiler.numerics.float_products import (
    FloatProduct,
    RoundingError,
    fit_float_product,
    fit_scaled_mean,
    nearest_float_product,
)
from celosia.compiler.numerics.norm import NormConstants, NormError, norm_constants
from celosia.compiler.numerics.requantiser import (
    MULTIPLIER_BITS,
    SHIFT_BITS,
    average_is_exact,
    conv_scale,
    dequantize_linear,
    fit_slopes,
    global_average_scale,
    mean_scale,
    qlinear_average,
    quantize_linear,
    requantize,
    requantize_f32,
    scale_to_multiplier,
)
from celosia.compiler.numerics.tables import identity_table, qlinear_softmax, softmax_powers, unary_table

INT8 = "session.qdqisint8allowed"
"""Session option with which onnxruntime computes QDQ pairs of int8 in integers. By default it converts them to uint8,
whose products with int8 weights saturate on processors without VNNI."""

__all__ = [
    "BINARY",
    "INT8",
    "MULTIPLIER_BITS",
    "SHIFT_BITS",
    "BinaryFunction",
    "FloatProduct",
    "NormConstants",
    "NormError",
    "RescaleAdd",
    "RescaleMul",
    "RoundingError",
    "average_is_exact",
    "conv_scale",
    "dequantize_linear",
    "fit_float_add",
    "fit_float_product",
    "fit_rescale_add",
    "fit_rescale_mul",
    "fit_scaled_mean",
    "fit_slopes",
    "float_add",
    "float_mul",
    "global_average_scale",
    "identity_table",
    "mean_scale",
    "nearest_float_product",
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
    "scale_to_multiplier",
    "softmax_powers",
    "unary_table",
]  # fmt: skip
