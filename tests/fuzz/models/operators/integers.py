"""Draw the integer operators of quantised models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fuzz.models.net import MS, Array, Net
from fuzz.models.networks import window
from fuzz.models.operators.operands import (
    any_axis,
    any_image,
    any_pair,
    any_scale,
    any_shape,
    byte_type,
    either,
    operand,
    random_subset,
    scale_and_zero,
)


def quantize(net: Net) -> list[str]:
    """Add QuantizeLinear by tensor, by channel, or by block."""
    draw = net.draw
    shape = any_shape(draw, 1, 4)
    dtype = draw.choice(("int8", "uint8", "int8", "uint8", *(("int16", "uint16") if net.opset >= 21 else ())))
    scale, zero, attrs = _channels(net, shape, dtype)
    inputs = [either(net, scale), *([either(net, zero)] if zero is not None else [])]
    value = draw.floats(shape, 40) * scale.reshape(-1)[0]
    if draw.chance(0.4):
        value = np.round(value / scale.reshape(-1)[0] * 2) / 2 * scale.reshape(-1)[0]  # ties
    return [net.add("QuantizeLinear", net.input(value.astype(np.float32)), *inputs, **attrs)]


def _channels(net: Net, shape: Sequence[int], dtype: str) -> tuple[Array, Array | None, dict[str, Any]]:
    draw = net.draw
    dims: list[int] = []
    attrs: dict[str, Any] = {}
    if draw.chance():
        axis = any_axis(draw, len(shape))
        attrs, dims = {"axis": axis}, [shape[axis]]
        if net.opset >= 21 and draw.chance(0.3):
            attrs["block_size"] = block = draw.choice([b for b in range(1, shape[axis] + 1) if shape[axis] % b == 0])
            dims = list(shape)
            dims[axis] //= block
    scale = np.full(dims, any_scale(draw)) * (1 + draw.arrays.random(dims) * bool(dims)).astype(np.float32)
    return scale.astype(np.float32), draw.array(dtype, dims) if draw.chance(0.8) else None, attrs


def dequantize(net: Net) -> list[str]:
    """Add DequantizeLinear by tensor, by channel or by block."""
    draw = net.draw
    shape = any_shape(draw, 1, 4)
    dtype = draw.choice(("int8", "uint8", "int32", *(("int16", "uint16") if net.opset >= 21 else ())))
    scale, zero, attrs = _channels(net, shape, dtype)
    if dtype == "int32":
        zero = None
    return [net.add("DequantizeLinear", operand(net, shape, dtype), either(net, scale),
                    *([either(net, zero)] if zero is not None else []), **attrs)]  # fmt: skip


def dynamic_quantize(net: Net) -> list[str]:
    """Add DynamicQuantizeLinear."""
    x = operand(net, any_shape(net.draw, 1, 4), spread=net.draw.choice((0.1, 5.0)))
    return net.add_all("DynamicQuantizeLinear", x, outputs=3)


def qlinear_binary(net: Net) -> list[str]:
    """Add QLinearAdd or QLinearMul."""
    draw, dtype = net.draw, byte_type(net.draw)
    operands = []
    for shape in any_pair(draw):
        operands += [either(net, draw.array(dtype, shape), dtype, 0.2), *scale_and_zero(net, dtype)]
    return [net.add(draw.choice(("QLinearAdd", "QLinearMul")), *operands, *scale_and_zero(net, dtype), domain=MS)]


def qlinear_unary(net: Net) -> list[str]:
    """Add QLinearSigmoid or QLinearLeakyRelu."""
    draw, dtype = net.draw, byte_type(net.draw)
    op = draw.choice(("QLinearSigmoid", "QLinearLeakyRelu"))
    attrs = random_subset(draw, alpha=draw.choice((0.1, 0.3))) if op == "QLinearLeakyRelu" else {}
    operands = [operand(net, any_shape(draw, 1, 4), dtype), *scale_and_zero(net, dtype), *scale_and_zero(net, dtype)]
    return [net.add(op, *operands, domain=MS, **attrs)]


def qlinear_softmax(net: Net) -> list[str]:
    """Add QLinearSoftmax."""
    draw, dtype = net.draw, byte_type(net.draw)
    shape = any_shape(draw, 1, 4, 9)
    operands = [operand(net, shape, dtype), *scale_and_zero(net, dtype), *scale_and_zero(net, dtype)]
    return [net.add("QLinearSoftmax", *operands, domain=MS, axis=any_axis(draw, len(shape)), opset=net.opset)]


def qlinear_concat(net: Net) -> list[str]:
    """Add QLinearConcat of one to three tensors."""
    draw, dtype = net.draw, byte_type(net.draw)
    shape = list(any_shape(draw, 1, 4))
    axis = any_axis(draw, len(shape))
    operands = scale_and_zero(net, dtype)
    for _ in range(draw.randint(1, 3)):
        shape[axis] = draw.randint(1, 5)
        operands += [either(net, draw.array(dtype, shape), dtype, 0.2), *scale_and_zero(net, dtype)]
    return [net.add("QLinearConcat", *operands, domain=MS, axis=axis)]


def qlinear_where(net: Net) -> list[str]:
    """Add QLinearWhere."""
    draw, dtype = net.draw, byte_type(net.draw)
    shape = any_shape(draw, 1, 4)
    operands = [either(net, draw.array(bool, shape))]  # a condition that is broadcast may crash onnxruntime
    for _ in range(2):
        operands += [either(net, draw.array(dtype, shape), dtype, 0.2), *scale_and_zero(net, dtype)]
    return [net.add("QLinearWhere", *operands, *scale_and_zero(net, dtype), domain=MS)]


def qlinear_pool(net: Net) -> list[str]:
    """Add QLinearAveragePool or QLinearGlobalAveragePool."""
    draw, dtype, (front, size) = net.draw, byte_type(net.draw), any_image(net.draw)
    operands = [operand(net, (*front, *size), dtype), *scale_and_zero(net, dtype), *scale_and_zero(net, dtype)]
    if draw.chance(0.3):
        return [net.add("QLinearGlobalAveragePool", *operands, domain=MS)]
    kernel = [draw.randint(1, min(3, n)) for n in size]
    attrs = window(draw, size, kernel) | random_subset(
        draw, count_include_pad=draw.randint(0, 1), ceil_mode=draw.randint(0, 1)
    )
    return [net.add("QLinearAveragePool", *operands, domain=MS, **attrs)]


def qlinear_conv(net: Net) -> list[str]:
    """Add QLinearConv, with groups and weights of 7 bits."""
    draw, dtype, (front, size) = net.draw, byte_type(net.draw), any_image(net.draw)
    group = draw.choice([g for g in range(1, front[1] + 1) if front[1] % g == 0])
    out, kernel = group * draw.randint(1, 4), [draw.randint(1, 3) for _ in size]
    wide = (front[1] // group, *kernel)
    kind = draw.choice(("int8", dtype))
    weights = draw.array(kind, (out, *wide)) // np.array(2, kind)  # 7 bits: see quantised.py
    scales = draw.arrays.uniform(0.01, 0.05, out if draw.chance() else ()).astype(np.float32)
    zero = np.zeros(scales.shape, kind) if kind == "int8" or scales.ndim else draw.array(kind, ())
    x, (sx, zx) = operand(net, (*front, *size), dtype), scale_and_zero(net, dtype)
    spread = float(net.values[sx]) * 0.03 * 40 * math.sqrt(math.prod(wide))
    y = [net.constant(np.float32(spread * draw.uniform(0.5, 2))), net.constant(draw.array(dtype, ()))]
    bias = [net.constant(draw.arrays.integers(-3000, 3000, out), np.int32)] if draw.chance() else []
    constants = [net.constant(value) for value in (weights, scales, zero)]
    return [net.add("QLinearConv", x, sx, zx, *constants, *y, *bias, group=group, **window(draw, size, kernel, True))]


def integer_product(net: Net) -> list[str]:
    """Add QLinearMatMul, MatMulInteger, QGemm, MatMulIntegerToFloat or DynamicQuantizeMatMul."""
    draw, dtype = net.draw, byte_type(net.draw)
    m, k, n = draw.shape(3, 12)
    kind = draw.choice(("int8", dtype))
    rows = (*draw.shape(draw.randint(0, 2), 3), m)
    a = operand(net, (*rows, k), dtype)
    b = either(net, draw.array(kind, (k, n)) // np.array(2, kind), constant=0.8)
    wide = draw.chance()
    scales = net.constant(draw.arrays.uniform(0.01, 0.05, n if wide else ()).astype(np.float32))
    zero = net.constant(np.zeros(n if wide else (), kind) if wide or kind == "int8" else draw.array(kind, ()))
    sa, za = scale_and_zero(net, dtype)
    spread = float(net.values[sa]) * 0.03 * 40 * math.sqrt(k)
    y = [net.constant(np.float32(spread)), net.constant(draw.array(dtype, ()))]
    match draw.choice(("QLinearMatMul", "MatMulInteger", "QGemm", "MatMulIntegerToFloat", "DynamicQuantizeMatMul")):
        case "QLinearMatMul":
            return [net.add("QLinearMatMul", a, sa, za, b, scales, zero, *y)]
        case "MatMulInteger":
            return [net.add("MatMulInteger", a, b, *[za, zero][: draw.randint(0, 2)])]
        case "QGemm":
            a = operand(net, (m, k), dtype)
            row = net.constant(draw.arrays.integers(-3000, 3000, n), np.int32) if draw.chance() else ""
            return [net.add("QGemm", a, sa, za, b, scales, zero, row, *(y if draw.chance(0.7) else []), domain=MS)]
        case "MatMulIntegerToFloat":
            bias = [net.floats((n,))] if draw.chance() else []
            return [net.add("MatMulIntegerToFloat", a, b, sa, scales, za, zero, *bias, domain=MS)]
    x = operand(net, (*rows, k))
    bias = [net.floats((n,))] if draw.chance() else []
    return [net.add("DynamicQuantizeMatMul", x, b, scales, zero, *bias, domain=MS)]
