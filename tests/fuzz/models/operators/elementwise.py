"""Draw element-wise operators."""

from __future__ import annotations

from typing import Any

import numpy as np

from fuzz.models.net import Net
from fuzz.models.operators.operands import (
    FLOATS,
    INTEGERS,
    NUMBERS,
    any_pair,
    any_shape,
    broadcast_shape,
    either,
    operand,
    random_subset,
)


def unary(net: Net) -> list[str]:
    """Add an operator of one float tensor, with values for which it is defined."""
    draw = net.draw
    op = draw.choice((
        "Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Ceil", "Cos", "Cosh", "Erf", "Exp", "Floor", "Log",
        "Neg", "Reciprocal", "Relu", "Round", "Sigmoid", "Sign", "Sin", "Sinh", "Softplus", "Softsign", "Sqrt", "Tan",
        "Tanh", "HardSwish", "Mish", "Gelu", "IsNaN", "Identity",
    ))  # fmt: skip
    value = draw.array(draw.choice(FLOATS), any_shape(draw), draw.choice((0.5, 3.0)))
    if op in ("Acos", "Asin", "Atanh"):
        value = np.tanh(value)
    elif op in ("Log", "Sqrt", "Reciprocal"):
        value = np.abs(value) + np.asarray(0.01, value.dtype)
    elif op == "Acosh":
        value = np.abs(value) + np.asarray(1, value.dtype)
    elif op == "IsNaN":
        value = np.sqrt(value)
    attrs: dict[str, Any] = {"approximate": draw.choice(("none", "tanh"))} if op == "Gelu" else {}
    return [net.add(op, net.input(np.asarray(value)), **attrs)]


def unary_with_attributes(net: Net) -> list[str]:
    """Add an activation function with parameters."""
    draw = net.draw
    number = draw.choice((0.0, 0.1, 0.5, 1.0, 1.7))
    op, attrs = draw.choice((
        ("Elu", random_subset(draw, alpha=number)), ("Celu", random_subset(draw, alpha=number + 0.2)),
        ("LeakyRelu", random_subset(draw, alpha=number)), ("ThresholdedRelu", random_subset(draw, alpha=number)),
        ("HardSigmoid", random_subset(draw, alpha=number, beta=draw.choice((0.0, 0.5)))),
        ("Selu", random_subset(draw, alpha=number, gamma=number + 0.3)),
        ("Shrink", random_subset(draw, bias=number, lambd=draw.choice((0.3, 1.0)))),
        ("IsInf", random_subset(draw, detect_negative=draw.randint(0, 1), detect_positive=draw.randint(0, 1))),
    ))  # fmt: skip
    return [net.add(op, operand(net, any_shape(draw)), **attrs)]


def of_integers(net: Net) -> list[str]:
    """Add an operator of one integer tensor."""
    draw = net.draw
    op = draw.choice(("Abs", "Neg", "Sign", "Relu", "BitwiseNot", "Identity", "Clip"))
    dtype = draw.choice(INTEGERS)
    x = operand(net, any_shape(draw), dtype)
    if op != "Clip":
        return [net.add(op, x)]
    limits = sorted(draw.randint(0, 100) for _ in range(2))
    return [net.add(op, x, *(either(net, limit, dtype) for limit in limits[: draw.randint(0, 2)]))]


def clip(net: Net) -> list[str]:
    """Add Clip of floats, with none, one or both limits."""
    draw, dtype = net.draw, net.draw.choice(FLOATS)
    low, high = sorted(draw.uniform(-2, 2) for _ in range(2))
    limits = draw.choice(((), (low,), (low, high), (None, high)))
    names = ["" if limit is None else either(net, limit, dtype) for limit in limits]
    return [net.add("Clip", operand(net, any_shape(draw), dtype), *names)]


def binary(net: Net) -> list[str]:
    """Add arithmetic of two tensors that are broadcast."""
    draw = net.draw
    op = draw.choice(("Add", "Sub", "Mul", "Div", "Pow", "Mod", "Max", "Min", "PRelu"))
    dtype = draw.choice(("float32", "float32", "float32", "float64", "int32", "int64", "float16", "int8", "uint8"))
    left, right = any_pair(draw)
    if op == "PRelu":  # only the slope may be broadcast
        right = broadcast_shape(draw, left)
    a, b = draw.array(dtype, left, 2.0), draw.array(dtype, right, 2.0)
    attrs: dict[str, Any] = {}
    if op in ("Div", "Mod"):
        b = np.where(b == 0, np.asarray(3, dtype), b)
    if op == "Mod" and (np.dtype(dtype).kind == "f" or draw.chance()):
        attrs["fmod"] = 1
    if op == "Pow":
        a = np.abs(a) if np.dtype(dtype).kind == "f" else a % np.asarray(5, dtype)
        b = b if np.dtype(dtype).kind == "f" else np.abs(b % np.asarray(4, dtype))
    return [net.add(op, *(either(net, value, dtype, 0.3) for value in (a, b)), **attrs)]


def comparison(net: Net) -> list[str]:
    """Add a comparison or logic of two tensors that are broadcast."""
    draw = net.draw
    op = draw.choice(("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "And", "Or", "Xor"))
    dtype = "bool" if op in ("And", "Or", "Xor") else draw.choice(NUMBERS)
    left, right = any_pair(draw)
    a, b = draw.array(dtype, left, 2.0), draw.array(dtype, right, 2.0)
    if dtype != "bool":  # small integers, so that some are equal
        a, b = np.round(np.asarray(a / 8)).astype(dtype), np.round(np.asarray(b / 8)).astype(dtype)
    return [net.add(op, *(either(net, value, dtype, 0.3) for value in (a, b)))]


def bits(net: Net) -> list[str]:
    """Add a shift or logic of bits."""
    draw = net.draw
    op = draw.choice(("BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor"))
    dtype = draw.choice(("uint8", "uint32", "uint64") if op == "BitShift" else ("uint8", "int32", "int64", "int8"))
    left, right = any_pair(draw)
    a, b = draw.array(dtype, left), draw.array(dtype, right)
    if op == "BitShift":
        return [net.add(op, net.input(a), either(net, b % 8, dtype), direction=draw.choice(("LEFT", "RIGHT")))]
    return [net.add(op, net.input(a), either(net, b))]


def variadic(net: Net) -> list[str]:
    """Add Sum, Mean, Max or Min of one to four tensors."""
    draw = net.draw
    op, shape = draw.choice(("Sum", "Mean", "Max", "Min")), any_shape(draw)
    names = [either(net, draw.floats(broadcast_shape(draw, shape)), constant=0.3) for _ in range(draw.randint(1, 4))]
    return [net.add(op, *names)]


def where(net: Net) -> list[str]:
    """Add Where with three operands that are broadcast."""
    draw, dtype = net.draw, net.draw.choice(("float32", "int64", "uint8", "float64"))
    shape = any_shape(draw)
    names = [
        either(net, draw.array(kind, broadcast_shape(draw, shape)), constant=0.3) for kind in ("bool", dtype, dtype)
    ]
    return [net.add("Where", *names)]


def cast(net: Net) -> list[str]:
    """Add Cast of values that the target type can hold."""
    draw = net.draw
    kinds = ("float32", "float64", "float16", "int8", "uint8", "int16", "int32", "int64", "bool")
    source, target = draw.choice(kinds), draw.choice(kinds)
    value = draw.array(source, any_shape(draw), 30.0)
    if np.dtype(source).kind in "fi" and np.dtype(target).kind == "u":
        value = np.abs(value)  # casts of values out of range are undefined
    from onnx import helper

    return [net.add("Cast", net.input(np.asarray(value)), to=helper.np_dtype_to_tensor_dtype(np.dtype(target)))]
