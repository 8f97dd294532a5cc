"""Quantised operators: QuantizeLinear, QLinear* and integer operators, bit-identical to onnxruntime.

sx, sw, sy and zx, zw, zy are scales and zero points of the input, the weights and the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

from celosia.compiler import expr as T
from celosia.compiler.expr import INDEX, Expr, Tensor, call, select, wrap
from celosia.compiler.numerics.tables import exponent_room
from celosia.compiler.ops import bit_serial, integer
from celosia.compiler.ops.integer import left_zero, matrix_product, right_zero
from celosia.compiler.ops.products import multiply_any_rank, transposed_convolution
from celosia.compiler.ops.reductions import reduce_axes
from celosia.compiler.ops.registry import F32, ONNX_TYPES, Node, at, clamp, limits, op, round_even, saturate
from celosia.compiler.ops.shape import concatenate
from celosia.compiler.program import dtypes
from celosia.compiler.program.host.hostops.value_types import parameter_shape_error
from celosia.compiler.program.op_spec import Kind


def quantize(x: Expr, scale: Expr, zero: Expr, dtype: str) -> Expr:
    """Return float32 x in integers of `dtype`: clip(rne(x / scale) + zero); NaN gives the smallest value."""
    return saturate(round_even(x / scale) + zero.astype(F32), dtype)


def requantize(acc: Expr, scale: Expr, zero: Expr, dtype: str) -> Expr:
    """Return the int32 `acc` in integers of `dtype`: clip(rne(f32(acc) * scale) + zero)."""
    return saturate(round_even(acc.astype(F32) * scale) + zero.astype(F32), dtype)


def parameter_at(node: Node, operand: str, x: Tensor, index: tuple[Expr, ...], default: str | None = None) -> Expr:
    """Return the scale or zero point of the element of x at `index`: per tensor, per index of `axis`, or per block.

    operand: its name. default: element type of the 0 that is returned where the operand is left out. Raises
    Unsupported for a shape that does not fit x.
    """
    if not node.has(operand):
        assert default is not None
        return wrap(0, default)
    p = node.input(operand)
    block = int(node.attrs.get("block_size", 0))
    if why := parameter_shape_error(p.shape, x.shape, int(node.attrs.get("axis", 1)), block):
        raise node.fail(why)
    if not block and p.size == 1:
        return p.flat(0)
    axis = node.axis(1, len(x.shape))
    if not block:
        return p[index[axis]]
    return p[tuple(k // block if d == axis else k for d, k in enumerate(index))]


@op("QuantizeLinear", kind=Kind.INJECTIVE, shaped_as="QuantizeLinear", operands="x<.> y_scale<.> y_zero_point<Q>?")
def quantize_linear(node: Node) -> Tensor:
    """Build QuantizeLinear to 8 or 16 bits, by tensor, channel or block. Raises Unsupported for other types."""
    x = node.input(0)
    dtype = node.input("y_zero_point").dtype if node.has("y_zero_point") else _output_dtype(node, "uint8")
    if dtype not in ("int8", "uint8", "int16", "uint16"):
        raise node.fail(f"to {dtype}")

    def body(*i: Expr) -> Expr:
        zero = parameter_at(node, "y_zero_point", x, i, dtype)
        return quantize(x[i].astype(F32), parameter_at(node, "y_scale", x, i).astype(F32), zero, dtype)

    return T.compute(x.shape, body, "quantize")


@op("DequantizeLinear", kind=Kind.INJECTIVE, shaped_as="DequantizeLinear", operands="x<Q> x_scale<.> x_zero_point?")
def dequantize_linear(node: Node) -> Tensor:
    """Build DequantizeLinear by tensor, channel or block, in float32.

    The result is rounded once, to the type of the scale or of `output_dtype`.
    """
    x, dtype = node.input(0), _output_dtype(node, node.input("x_scale").dtype)

    def body(*i: Expr) -> Expr:
        value = x[i].astype("int32")
        if node.has("x_zero_point"):
            value = value - parameter_at(node, "x_zero_point", x, i, x.dtype).astype("int32")
        return (value.astype(F32) * parameter_at(node, "x_scale", x, i).astype(F32)).astype(dtype)

    return T.compute(x.shape, body, "dequantize")


def dynamic_quantisation(x: Tensor, axes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the scale and zero point with which uint8 covers the values of x over `axes`, and 0.

    They are those of DynamicQuantizeLinear.
    """
    low, high = reduce_axes(x, axes, False, T.min, "low"), reduce_axes(x, axes, False, T.max, "high")
    reach = T.compute(low.shape, lambda *i: T.maximum(high[i], 0) - T.minimum(low[i], 0), "reach")
    scale = T.compute(low.shape, lambda *i: select(T.equal(reach[i], 0), 1, reach[i] / wrap(255.0, F32)), "scale")
    zero = T.compute(low.shape, lambda *i: saturate(round_even(-T.minimum(low[i], 0) / scale[i]), "uint8"), "zero")
    return scale, zero


def _output_dtype(node: Node, default: str, name: str = "output_dtype") -> str:
    """Return the element type of the attribute `name`. Raises Unsupported where kernels do not have it."""
    number = int(node.attrs.get(name, 0))
    if number and number not in ONNX_TYPES:
        raise node.fail(f"to element type {dtypes.ONNX_TYPES.get(number, number)}")
    return ONNX_TYPES.get(number, default)


@op("DynamicQuantizeLinear", kind=Kind.OPAQUE, operands="x")
def dynamic_quantize_linear(node: Node) -> list[Tensor]:
    """Build DynamicQuantizeLinear: uint8 with the scale and zero point that the range of the values gives."""
    x = node.input(0)
    scale, zero = dynamic_quantisation(x, range(len(x.shape)))
    y = T.compute(x.shape, lambda *i: quantize(x[i], scale[()], zero[()], "uint8"), "quantize")
    return [y, scale, zero][: node.outputs]


# Convolution and matrix products


def accept_channels_last(build: Callable[[Node], Tensor]) -> Callable[[Node], Tensor]:
    """Decorate a builder to take images whose channels are the last axis, where the attribute channels_last says so."""

    def built(node: Node) -> Tensor:
        """Build the operator on a transposed view, and transpose its result back."""
        if not node.attrs.get("channels_last", 0):
            return build(node)
        x = node.input(0)
        channels_first = T.compute(
            (x.shape[0], x.shape[-1], *x.shape[1:-1]), lambda n, c, *i: x[(n, *i, c)], "channels_first"
        )
        attrs = {name: value for name, value in node.attrs.items() if name != "channels_last"}
        y = build(replace(node, attrs=attrs, inputs=(channels_first, *node.inputs[1:])))
        return T.compute((y.shape[0], *y.shape[2:], y.shape[1]), lambda n, *i: y[(n, i[-1], *i[:-1])], "channels_last")

    return built


def _require_bytes(*tensors: Tensor) -> str:
    """Return the element type of the last of `tensors`. Raises TypeError unless all are int8 or uint8."""
    for tensor in tensors:
        if tensor.dtype not in ("int8", "uint8"):
            raise TypeError(f"element type {tensor.dtype}")
    return tensors[-1].dtype


@op(
    "QLinearConv", kind=Kind.COMPLEX, needs_kernel=True, multiplies_bytes=True, windows=True, variant_of="Conv",
    operands="x x_scale x_zero_point w:weights w_scale w_zero_point y_scale y_zero_point b:bias?",
)  # fmt: skip
@accept_channels_last
def qlinear_conv(node: Node) -> Tensor:
    """Build QLinearConv in onnxruntime's form: y = clip(rne(f32(acc + bias) * ((sx * sw) / sy)) + zy)."""
    x, w, bias = node.input("x"), node.input("w"), node.optional("b")
    sx, sw, sy = node.scalar("x_scale", F32), node.input("w_scale"), node.scalar("y_scale", F32)
    kind = _require_bytes(x, w, node.input("y_zero_point"))
    zy = node.scalar("y_zero_point", kind)
    scale = T.compute((sw.size,), lambda m: (sx * sw.flat(m)) / sy, "scale")

    def finish(acc: Expr, m: Expr) -> Expr:
        return requantize(acc, scale[m if sw.size > 1 else 0], zy, kind)

    return _convolution(node, x, w, bias, finish)


def _convolution(node: Node, x: Tensor, w: Tensor, bias: Tensor | None, finish: Callable[[Expr, Expr], Expr]) -> Tensor:
    """Return an integer convolution, bit-serial or by bytes, whichever is faster.

    finish: function of the int32 sum with its bias, and the output channel.
    """
    if (bit_serial_form := bit_serial.convolution_levels(node, "x_zero_point")) is not None:
        levels, pad = bit_serial_form
        zx, zw = node.scalar("x_zero_point", "int32"), right_zero(node, "w_zero_point", "int8")
        return bit_serial.convolution(node, x, w, levels, zx, pad, zw, bias, finish)
    zx, zw = left_zero(node, "x_zero_point", x.dtype), right_zero(node, "w_zero_point", w.dtype)
    return integer.convolution(node, x, w, zx, zw, bias, finish)


def _product(
    node: Node, a: Tensor, b: Tensor, finish: Callable[[Expr, tuple[Expr, ...]], Expr],
    transpose_a: bool = False, transpose_b: bool = False,
) -> Tensor:  # fmt: skip
    """Return an integer matrix product, bit-serial or by bytes, whichever is faster.

    finish: function of the int32 sum and its index. transpose_a, transpose_b: matrices are transposed.
    """
    how: dict[str, Any] = {"transpose_a": transpose_a, "transpose_b": transpose_b, "finish": finish}
    if (levels := bit_serial.product_levels(node, transpose_a, transpose_b)) is not None:
        zeros = {"za": node.scalar("a_zero_point", "int32"), "zb": right_zero(node, "b_zero_point", "int8")}
        return multiply_any_rank(node, a, b, bit_serial.matrix_product, **how, **zeros, levels=levels)
    zeros = {"za": left_zero(node, "a_zero_point", a.dtype), "zb": right_zero(node, "b_zero_point", b.dtype)}
    return multiply_any_rank(node, a, b, matrix_product, **how, **zeros)


@op(
    "QLinearConvTranspose", kind=Kind.COMPLEX, domain="celosia", variant_of="ConvTranspose",
    operands="x x_scale x_zero_point w:weights w_scale w_zero_point y_scale y_zero_point b:bias?",
)  # fmt: skip
def qlinear_conv_transpose(node: Node) -> Tensor:
    """Build our QLinearConvTranspose: a ConvTranspose of bytes with the operands of QLinearConv.

    Raises Unsupported for weights with a zero point.
    """
    x, w, bias = node.input("x"), node.input("w"), node.optional("b")
    sx, sw, sy = node.scalar("x_scale", F32), node.input("w_scale"), node.scalar("y_scale", F32)
    zx, kind = node.scalar("x_zero_point", "int32"), _require_bytes(x, w, node.input("y_zero_point"))
    zy = node.scalar("y_zero_point", kind)
    if not right_zero(node, "w_zero_point", w.dtype).is_zero:
        raise node.fail("weights with a zero point")
    scale = T.compute((sw.size,), lambda m: (sx * sw.flat(m)) / sy, "scale")
    w_shift = 128 if w.dtype == "uint8" else 0

    def finish(acc: Expr, m: Expr) -> Expr:
        acc = acc if bias is None else acc + bias[m]
        return requantize(acc, scale[m if sw.size > 1 else 0], zy, kind)

    return transposed_convolution(
        node, x, w, lambda a, b: (a.astype("int32") - zx) * (b.astype("int32") - w_shift), finish
    )


@op(
    "ConvInteger", kind=Kind.COMPLEX, needs_kernel=True, multiplies_bytes=True, windows=True, variant_of="Conv",
    operands="x w:weights x_zero_point? w_zero_point?",
)  # fmt: skip
def conv_integer(node: Node) -> Tensor:
    """Build ConvInteger: a convolution of bytes with int32 results."""
    return _convolution(node, node.input("x"), node.input("w"), None, lambda acc, m: acc)


@op(
    "QLinearMatMul", kind=Kind.COMPLEX, multiplies_bytes=True, variant_of="MatMul",
    operands="a a_scale a_zero_point b b_scale b_zero_point y_scale y_zero_point",
)  # fmt: skip
def qlinear_matmul(node: Node) -> Tensor:
    """Build QLinearMatMul; the second matrix may have a scale for each column."""
    a, b = node.input("a"), node.input("b")
    sa, sb, sy = node.scalar("a_scale", F32), node.input("b_scale"), node.scalar("y_scale", F32)
    kind = _require_bytes(a, b, node.input("y_zero_point"))
    zy = node.scalar("y_zero_point", kind)
    scale = T.compute((sb.size,), lambda j: (sa * sb.flat(j).astype(F32)) / sy, "scale")

    def finish(acc: Expr, i: tuple[Expr, ...]) -> Expr:
        return requantize(acc, scale[i[-1] if sb.size > 1 else 0], zy, kind)

    return _product(node, a, b, finish)


@op(
    "MatMulInteger", kind=Kind.COMPLEX, multiplies_bytes=True, variant_of="MatMul",
    operands="a b a_zero_point? b_zero_point?",
)  # fmt: skip
def matmul_integer(node: Node) -> Tensor:
    """Build MatMulInteger: a product of byte matrices with int32 results."""
    return _product(node, node.input("a"), node.input("b"), lambda acc, i: acc)


@op(
    "MatMulIntegerToFloat", kind=Kind.COMPLEX, domain="com.microsoft", multiplies_bytes=True, variant_of="MatMul",
    operands="a b a_scale b_scale a_zero_point? b_zero_point? bias:bias?",
)  # fmt: skip
def matmul_integer_to_float(node: Node) -> Tensor:
    """Build MatMulIntegerToFloat (com.microsoft): int32 products of bytes, scaled to float32, plus an optional bias."""
    sa, sb, bias = node.scalar("a_scale", F32), node.input("b_scale"), node.optional("bias")

    def finish(acc: Expr, i: tuple[Expr, ...]) -> Expr:
        y = acc.astype(F32) * (sa * sb.flat(0 if sb.size == 1 else i[-1]))
        return y if bias is None else y + at(bias, i)

    return _product(node, node.input("a"), node.input("b"), finish)


@op(
    "QGemm", kind=Kind.COMPLEX, needs_kernel=True, domain="com.microsoft", multiplies_bytes=True, variant_of="Gemm",
    operands="a<T> a_scale a_zero_point b<U> b_scale b_zero_point c<i>:bias? y_scale? y_zero_point<V>?",
)  # fmt: skip
def qgemm(node: Node) -> Tensor:
    """Build QGemm (com.microsoft): alpha A B + C of bytes; without an output scale the result is float32."""
    a, b, c = node.input("a"), node.input("b"), node.optional("c")
    sa, sb = node.scalar("a_scale", F32), node.input("b_scale")
    alpha, zero = float(node.attrs.get("alpha", 1.0)), node.optional("y_zero_point")
    kind = a.dtype if zero is None else _require_bytes(zero)
    zy = node.scalar("y_zero_point", kind) if node.has("y_scale") else None

    def factor(j: Expr) -> Expr:
        scale = (sa if alpha == 1 else sa * alpha) * sb.flat(j)
        return scale if zy is None else scale / node.scalar("y_scale", F32)

    scale = T.compute((sb.size,), factor, "scale")

    def finish(acc: Expr, i: tuple[Expr, ...]) -> Expr:
        acc = acc if c is None else acc + at(c, i)
        column_scale = scale[i[-1] if sb.size > 1 else 0]
        return acc.astype(F32) * column_scale if zy is None else requantize(acc, column_scale, zy, kind)

    transpose_a, transpose_b = (bool(node.attrs.get(name, 0)) for name in ("transA", "transB"))
    return _product(node, a, b, finish, transpose_a, transpose_b)


# Operators of two operands (com.microsoft)

BINARY_FACTS: dict[str, Any] = {
    "kind": Kind.INJECTIVE, "domain": "com.microsoft", "needs_kernel": True,
    "operands": "a<T> a_scale a_zero_point? b<T> b_scale b_zero_point? c_scale c_zero_point<T>?",
}  # fmt: skip
"""Arguments of the decorator `op` that QLinearAdd and QLinearMul share."""


def convert_saturating(x: Expr, dtype: str) -> Expr:
    """Convert a float as x86's cvtps2dq and packing instructions do: NaN and x >= 2^31 give the smallest value."""
    return select(x < 2.0**31, saturate(round_even(x), dtype), limits(dtype)[0])


@op("QLinearAdd", variant_of="Add", **BINARY_FACTS)
def qlinear_add(node: Node) -> Tensor:
    """Build QLinearAdd: fma(a, ra, fma(b, rb, constant)), with operands swapped where onnxruntime swaps them.

    With our attribute `factors` it computes the accelerator's rescale-add.
    """
    a, b = node.input("a"), node.input("b")
    if "factors" in node.attrs:
        return node.elementwise(partial(integer.rescaled_sum, factors=node.attrs["factors"]), a, b)
    sa, sb, sc = (node.scalar(f"{name}_scale", F32) for name in "abc")
    za, zb, zc = (node.scalar(f"{name}_zero_point", F32) for name in "abc")
    inner_a = a.shape[-1] if a.shape else 1
    inner_b = b.shape[-1] if b.shape else 1
    if a.size == 1 or (inner_a == 1 and inner_b > 1):
        a, sa, za, b, sb, zb = b, sb, zb, a, sa, za
    ratios = T.compute((2,), lambda i: select(T.equal(i, 0), sa, sb) / sc, "ratios")
    ra, rb = ratios[0], ratios[1]
    fixed = T.compute((1,), lambda i: zc - call("fma", ra, za, rb * zb), "fixed")

    def body(x: Expr, y: Expr) -> Expr:
        part = call("fma", y.astype(F32), rb, fixed[0])
        return convert_saturating(call("fma", x.astype(F32), ra, part), a.dtype)

    return node.elementwise(body, a, b)


@op("QLinearMul", variant_of="Mul", **BINARY_FACTS)
def qlinear_mul(node: Node) -> Tensor:
    """Build QLinearMul: the product of bytes, broadcast; the zero point is added before rounding."""
    a, b = node.input("a"), node.input("b")
    sa, sb, sc = (node.scalar(f"{name}_scale", F32) for name in "abc")
    za, zb = node.scalar("a_zero_point", "int32"), node.scalar("b_zero_point", "int32")
    zc = node.scalar("c_zero_point", F32)
    ratio = sa * sb / sc

    def body(x: Expr, y: Expr) -> Expr:
        exact = (x.astype("int32") - za) * (y.astype("int32") - zb)
        return convert_saturating(exact.astype(F32) * ratio + zc, a.dtype)

    return node.elementwise(body, a, b)


# Operators of one operand (com.microsoft)

UNARY_FACTS: dict[str, Any] = {
    "kind": Kind.INJECTIVE, "domain": "com.microsoft", "shaped_as": "Identity",
    "operands": "x<T> x_scale x_zero_point? y_scale y_zero_point<T>?",
}  # fmt: skip
"""Arguments of the decorator `op` that QLinearSigmoid and QLinearLeakyRelu share."""


def dequantize(node: Node, x: Expr, scale: str | int = "x_scale", zero: str | int = "x_zero_point") -> Expr:
    """Return the float32 value of a byte x. scale, zero: operands, by name or number, that are its parameters."""
    return node.scalar(scale, F32) * (x.astype("int32") - node.scalar(zero, "int32")).astype(F32)


@op("QLinearSigmoid", variant_of="Sigmoid", **UNARY_FACTS)
@op("QLinearLeakyRelu", variant_of="LeakyRelu", **UNARY_FACTS)
def qlinear_unary(node: Node) -> Tensor:
    """Build QLinearSigmoid or QLinearLeakyRelu."""
    alpha = node.attrs.get("alpha", 0.01)

    def body(x: Expr) -> Expr:
        value = dequantize(node, x)
        value = call("sigmoid", value) if node.op == "QLinearSigmoid" else select(value >= 0, value, value * alpha)
        return quantize(value, node.scalar("y_scale", F32), node.scalar("y_zero_point", x.dtype), x.dtype)

    return node.elementwise(body, node.input(0))


@op(
    "QLinearConcat", kind=Kind.COMPLEX, domain="com.microsoft", variant_of="Concat",
    operands="y_scale y_zero_point<T> (x<T> x_scale x_zero_point)*",
)  # fmt: skip
def qlinear_concat(node: Node) -> Tensor:
    """Build QLinearConcat: each part, with its own scale, is requantised."""
    groups = node.groups()
    tensors = [node.input(x) for x, _, _ in groups]
    sy, zy = node.scalar("y_scale", F32), node.scalar("y_zero_point", tensors[0].dtype)

    def rescale(scale: int, zero: int) -> Any:
        """Return a function that requantises bytes with these inputs as scale and zero point."""
        return lambda v: quantize(dequantize(node, v, scale, zero), sy, zy, v.dtype)

    axis = node.axis(1, len(tensors[0].shape))
    return concatenate(node, tensors, axis, [rescale(scale, zero) for _, scale, zero in groups])


@op("Table", kind=Kind.COMPLEX, domain="celosia", operands="x table")
def table(node: Node) -> Tensor:
    """Build our Table: a function of one byte as a lookup in 256 entries (numerics.unary_table).

    Entry i is for the byte that the accelerator stores as i - 128. The attribute `to` is the result's element type,
    where it is not that of x.
    """
    entries, x_kind = node.input("table"), node.input("x").dtype
    kind = _output_dtype(node, x_kind, "to")

    def body(x: Expr) -> Expr:
        stored = entries[(x.astype("int32") + (128 if x_kind == "int8" else 0)).astype(INDEX)]
        return stored if kind == "int8" else (stored.astype("int32") + 128).astype("uint8")

    return node.elementwise(body, node.input(0))


@op(
    "QLinearSoftmax", kind=Kind.REDUCTION, domain="com.microsoft", variant_of="Softmax", shaped_as="Identity",
    operands="x<T> x_scale x_zero_point? y_scale y_zero_point<T>",
)  # fmt: skip
def qlinear_softmax(node: Node) -> Tensor:
    """Build QLinearSoftmax: exponentials from a table of 256, relative to the largest input."""
    x = node.input(0)
    axis = node.axis(-1 if int(node.attrs.get("opset", 13)) >= 13 else 1, len(x.shape))
    axes = [axis] if int(node.attrs.get("opset", 13)) >= 13 else list(range(axis, len(x.shape)))
    count = prod(x.shape[d] for d in axes)
    sx = node.scalar("x_scale", F32).astype("float64")
    shift = wrap(exponent_room(count), "float64") / sx
    table = T.compute((256,), lambda i: call("exp", (i.astype("float64") - 255.0 + shift) * sx).astype(F32), "powers")
    largest = reduce_axes(x, axes, True, T.max, "largest")

    def power(i: tuple[Expr, ...]) -> Expr:
        return table[(x[i].astype("int32") - at(largest, i).astype("int32") + 255).astype(INDEX)]

    total = reduce_axes(x, axes, True, T.ordered_sum, "total", power)
    steps = call("floor", wrap(1.0, F32) / node.scalar("y_scale", F32))
    zero = node.scalar("y_zero_point", "int32")

    def body(*i: Expr) -> Expr:
        """Return a power as a share of the sum of its row, in output units."""
        units = round_even(power(i) * steps / at(total, i))
        if x.dtype == "int8":
            y = select(units < 2.0**31, units.astype("int32"), -(2**31)) + zero
        else:  # modulo 2^32; infinity becomes NaN by the difference, and NaN becomes 0 by the clamp
            y = clamp(units - call("floor", units * 2.0**-32) * 2.0**32, 0, 255).astype("int32") + zero
        return T.clip(y, *limits(x.dtype)).astype(x.dtype)

    return T.compute(x.shape, body, "softmax")
