"""Element-wise operators: unary, binary and variadic arithmetic, activations, Clip, Cast."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from celosia.compiler import expr as T
from celosia.compiler.expr import Expr, Tensor, call, is_float, select, wrap
from celosia.compiler.ops.registry import ONNX_TYPES, OPS, Node, Unsupported, at, op
from celosia.compiler.program.host.shape_rules import broadcast
from celosia.compiler.program.op_spec import Kind, Moves


def one(x: Expr) -> Expr:
    """Return the constant 1 in the element type of `x`."""
    return wrap(1, x.dtype)


def sigmoid(x: Expr) -> Expr:
    """Return 1 / (1 + exp(-x)), without overflow where the result is small."""
    if x.dtype == "float32":
        return call("sigmoid", x)
    small = call("exp", -call("abs", x))
    return select(x < 0, small, one(x)) / (small + 1)


def sign(x: Expr) -> Expr:
    """Return -1, 0 or 1; NaN for NaN."""
    zero = wrap(0, x.dtype)
    if x.dtype.startswith("uint"):
        return select(T.equal(x, zero), zero, one(x))
    result = select(x > zero, one(x), select(x < zero, wrap(-1, x.dtype), zero))
    return select(call("isnan", x), x, result) if is_float(x.dtype) else result


def softplus(x: Expr) -> Expr:
    """Return log(1 + exp(x)) without overflow: max(x, 0) + e * log(u) / (u - 1); e = exp(-|x|), u = 1 + e (Kahan)."""
    e = unfused_exp(-call("abs", x))
    u = e + 1
    return T.maximum(x, 0) + select(T.equal(u, 1), e, e * (call("log", u) / (u - 1)))


def unfused_exp(x: Expr) -> Expr:
    """Return exp(x) with the rounding of onnxruntime's activations, whose kernel has no fused multiply-add."""
    return call("unfused_exp" if x.dtype == "float32" else "exp", x)


def selu(x: Expr, alpha: float, gamma: float) -> Expr:
    """Return selu(x). Below 0 both factors are multiplied first, and their product is rounded, as in onnxruntime."""
    factor = float(np.float32(alpha) * np.float32(gamma))
    return select(x > 0, x * gamma, (unfused_exp(x) - 1) * factor)


def gelu(x: Expr, approximate: str) -> Expr:
    """Return gelu(x) by erf, or by tanh where `approximate` is "tanh"."""
    if approximate == "tanh":
        factor = math.sqrt(2 / math.pi)
        return x * 0.5 * (call("tanh", x * (0.044715 * factor * x * x + factor)) + 1)
    return x * 0.5 * (call("erf", x * math.sqrt(0.5)) + 1)


def shrink(x: Expr, limit: float, bias: float) -> Expr:
    """Return 0 between -limit and limit, else x moved towards 0 by `bias`; in float32, as onnxruntime computes it."""
    value = x.astype("float32")
    return select(value < -limit, value + bias, select(value > limit, value - bias, 0)).astype(x.dtype)


Attrs = dict[str, Any]
UNARY: dict[str, Callable[[Expr, Attrs], Expr]] = {}
"""Operator of one operand -> function of an element and the node's attributes."""


def register_unary(name: str, body: Callable[[Expr, Attrs], Expr], operands: str = "x", **facts: Any) -> None:
    """Register an operator of one operand. body: function of an element and the attributes; facts: see registry.op."""
    UNARY[name] = body
    op(name, kind=Kind.INJECTIVE, operands=operands, **facts)(_build_unary)


def _build_unary(node: Node) -> Tensor:
    """Build any operator of UNARY, element by element. Raises Unsupported for Dropout in training mode."""
    if node.op == "Dropout" and node.has("training_mode") and bool(node.constant("training_mode")):
        raise node.fail("training mode")
    return node.elementwise(lambda x: UNARY[node.op](x, node.attrs), node.input(0))


register_unary("Identity", lambda x, a: x, "input", moves=Moves.ALL, view=True)
register_unary("Dropout", lambda x, a: x, "data ratio? training_mode:shape?", view=True)
register_unary("Abs", lambda x, a: call("abs", x))
register_unary("Neg", lambda x, a: -x)
register_unary("Reciprocal", lambda x, a: one(x) / x)
register_unary("Round", lambda x, a: call("round_even", x))
register_unary("Sign", lambda x, a: sign(x), "input")
register_unary("Not", lambda x, a: x ^ True)
register_unary("BitwiseNot", lambda x, a: x ^ -1)
register_unary("IsNaN", lambda x, a: call("isnan", x))
register_unary("Relu", lambda x, a: T.maximum(x, 0))
register_unary("Sigmoid", lambda x, a: sigmoid(x), rounded_once=True)
register_unary("Softplus", lambda x, a: softplus(x), rounded_once=True)
register_unary("Softsign", lambda x, a: x * (one(x) / (call("abs", x) + 1)), "input", rounded_once=True)
register_unary("LeakyRelu", lambda x, a: select(x < 0, x * a.get("alpha", 0.01), x))
register_unary("ThresholdedRelu", lambda x, a: select(x > a.get("alpha", 1.0), x, 0))
register_unary("Elu", lambda x, a: select(x < 0, (unfused_exp(x) - 1) * a.get("alpha", 1.0), x), rounded_once=True)
register_unary(
    "Celu",
    lambda x, a: T.maximum(x, 0) + T.minimum((unfused_exp(x / a.get("alpha", 1.0)) - 1) * a.get("alpha", 1.0), 0),
    rounded_once=True,
)
register_unary(
    "Selu",
    lambda x, a: selu(x, a.get("alpha", 1.67326319217681884765625), a.get("gamma", 1.05070102214813232421875)),
    rounded_once=True,
)
register_unary("HardSigmoid", lambda x, a: T.clip(x * a.get("alpha", 0.2) + a.get("beta", 0.5), 0, 1))
register_unary("HardSwish", lambda x, a: x * T.clip(x * (1 / 6) + 0.5, 0, 1), rounded_once=True)
register_unary("Gelu", lambda x, a: gelu(x, a.get("approximate", "none")), rounded_once=True)
register_unary("Shrink", lambda x, a: shrink(x, a.get("lambd", 0.5), a.get("bias", 0.0)), "input")
register_unary("Mish", lambda x, a: x * call("tanh", softplus(x)), rounded_once=True)
register_unary("Swish", lambda x, a: x * sigmoid(x * a.get("alpha", 1.0)), rounded_once=True)
register_unary("QuickGelu", lambda x, a: x * sigmoid(x * a.get("alpha", 1.702)), domain="com.microsoft")


@op("Tanh", "Erf", kind=Kind.INJECTIVE, rounded_once=True, operands="input")
@op("Sqrt", "Floor", "Ceil", kind=Kind.INJECTIVE, operands="x")
@op("Exp", "Log", "Sin", "Cos", "Tan", "Sinh", "Cosh", kind=Kind.INJECTIVE, operands="input")
@op("Asin", "Acos", "Atan", "Asinh", "Acosh", "Atanh", kind=Kind.INJECTIVE, operands="input")
def intrinsic(node: Node) -> Tensor:
    """Build an operator that the expression language has as an intrinsic function of the same name in lower case."""
    return node.elementwise(lambda x: call(node.op.lower(), x), node.input(0))


INTRINSICS = tuple(name for name, builder in OPS.items() if builder is intrinsic)
"""Operators that are intrinsic functions of the expression language."""


@op("IsInf", kind=Kind.INJECTIVE, operands="x")
def is_inf(node: Node) -> Tensor:
    """Build IsInf, which detects infinities of one sign or of both."""
    positive, negative = node.attrs.get("detect_positive", 1), node.attrs.get("detect_negative", 1)

    def body(x: Expr) -> Expr:
        infinite = call("isinf", x)
        if not positive:
            infinite = infinite & (x < 0)
        if not negative:
            infinite = infinite & (x > 0)
        return infinite

    return node.elementwise(body, node.input(0))


def power(x: Expr, y: Expr) -> Expr:
    """Return x ** y in the type of x. Raises TypeError for bool."""
    if "bool" in (x.dtype, y.dtype):
        raise TypeError("bool has no powers")
    if is_float(x.dtype) or is_float(y.dtype):
        wide = x.dtype if is_float(x.dtype) else "float64"
        return T.binary("pow", x.astype(wide), y.astype(wide)).astype(x.dtype)
    return T.binary("pow", x, y.astype(x.dtype))


def modulo(x: Expr, y: Expr, fmod: bool) -> Expr:
    """Return the remainder of x / y with the sign of the divisor y; with fmod, with that of the dividend x."""
    if fmod and is_float(x.dtype):
        magnitude = T.binary("mod", call("abs", x), call("abs", y))
        return select(x < 0, -magnitude, magnitude)
    remainder = T.binary("mod", x, y)
    if not fmod or x.dtype.startswith("uint"):
        return remainder
    signs_differ = (remainder < 0) ^ (x < 0)
    return select(signs_differ & T.binary("ne", remainder, 0), remainder - y, remainder)


BINARY: dict[str, Callable[[Expr, Expr, Attrs], Expr]] = {
    "Add": lambda x, y, a: x + y,
    "Sub": lambda x, y, a: x - y,
    "Mul": lambda x, y, a: x * y,
    "Div": lambda x, y, a: x / y,
    "Pow": lambda x, y, a: power(x, y),
    "Mod": lambda x, y, a: modulo(x, y, bool(a.get("fmod", 0))),
    "PRelu": lambda x, y, a: select(x < 0, x * y, x),
    "BitShift": lambda x, y, a: T.binary("shl" if a["direction"] == "LEFT" else "shr", x, y),
    "Equal": lambda x, y, a: T.equal(x, y),
    "And": lambda x, y, a: x & y,
    "Or": lambda x, y, a: x | y,
    "Xor": lambda x, y, a: x ^ y,
    "BitwiseAnd": lambda x, y, a: x & y,
    "BitwiseOr": lambda x, y, a: x | y,
    "BitwiseXor": lambda x, y, a: x ^ y,
    "Less": lambda x, y, a: x < y,
    "LessOrEqual": lambda x, y, a: x <= y,
    "Greater": lambda x, y, a: y < x,
    "GreaterOrEqual": lambda x, y, a: y <= x,
}
"""Operator of two operands -> function of two elements and the node's attributes."""


def _build_binary(node: Node) -> Tensor:
    """Build any operator of BINARY; Pow by a constant 2 or 0.5 as a product or a square root."""
    exponent = node.value("y") if node.op == "Pow" else None
    if exponent is not None and exponent.size == 1 and is_float(node.input(0).dtype):
        x, shape = node.input(0), broadcast(node.input(0).shape, exponent.shape)
        if float(exponent.reshape(())) == 2:
            return T.compute(shape, lambda *i: at(x, i) * at(x, i), "square")
        if float(exponent.reshape(())) == 0.5:
            return T.compute(shape, lambda *i: call("sqrt", at(x, i)), "sqrt")
    return node.elementwise(lambda x, y: BINARY[node.op](x, y, node.attrs), node.input(0), node.input(1))


for _name in BINARY:
    _operands = {"Pow": "x y", "BitShift": "x y", "PRelu": "x slope"}.get(_name, "a b")
    op(_name, kind=Kind.INJECTIVE, rounded_once=_name == "Pow", operands=_operands)(_build_binary)


VARIADIC: dict[str, Callable[[Expr, Expr], Expr]] = {
    "Min": T.minimum, "Max": T.maximum, "Sum": lambda x, y: x + y, "Mean": lambda x, y: x + y,
}  # fmt: skip
"""Operator of any number of operands -> function that combines two elements; Mean also divides."""


@op(*VARIADIC, kind=Kind.INJECTIVE, operands="(data_0)*")
def variadic(node: Node) -> Tensor:
    """Build Min, Max, Sum or Mean of any number of tensors, broadcast."""
    tensors = [node.input(i) for i in range(len(node.inputs))]

    def body(*values: Expr) -> Expr:
        total = values[0]
        for value in values[1:]:
            total = VARIADIC[node.op](total, value)
        return total / len(values) if node.op == "Mean" else total

    return node.elementwise(body, *tensors)


@op("Where", kind=Kind.INJECTIVE, moves=Moves.JOIN, operands="condition x y")
def where(node: Node) -> Tensor:
    """Build Where of three tensors, broadcast."""
    return node.elementwise(select, node.input("condition"), node.input("x"), node.input("y"))


@op("Clip", kind=Kind.INJECTIVE, operands="input min? max?")
def clip(node: Node) -> Tensor:
    """Build Clip to bounds given by attributes or inputs.

    A NaN bounds nothing; a bound that is left out is the largest finite number.
    """
    x = node.input(0)
    bounds: list[Expr | None] = [
        wrap(node.attrs[name], x.dtype) if name in node.attrs
        else node.scalar(name, x.dtype) if node.has(name)
        else wrap(sign * float(np.finfo(x.dtype).max), x.dtype) if is_float(x.dtype)
        else None
        for name, sign in (("min", -1), ("max", 1))
    ]  # fmt: skip

    def body(value: Expr) -> Expr:
        low, high = bounds
        if low is not None:
            value = select(value < low, low, value)
        return value if high is None else select(high < value, high, value)

    return node.elementwise(body, x)


@op("Cast", kind=Kind.INJECTIVE, operands="input")
def cast(node: Node) -> Tensor:
    """Build Cast to the element type of the attribute. Raises Unsupported for a type that kernels lack."""
    target = ONNX_TYPES.get(int(node.attrs["to"]))
    if target is None:
        raise Unsupported(f"Cast to ONNX type {node.attrs['to']}")
    return node.elementwise(lambda x: x.astype(target), node.input(0))


@op("CastLike", kind=Kind.INJECTIVE, operands="input target_type")
def cast_like(node: Node) -> Tensor:
    """Build CastLike: conversion to the type of the second input."""
    return node.elementwise(lambda x: x.astype(node.input(1).dtype), node.input(0))


@op("BiasGelu", kind=Kind.COMPLEX, domain="com.microsoft", operands="a b:bias")
@op("FastGelu", kind=Kind.COMPLEX, domain="com.microsoft", operands="x bias:bias?")
def bias_gelu(node: Node) -> Tensor:
    """Build BiasGelu or FastGelu: gelu(x + bias), by erf or by tanh; the bias of FastGelu is optional."""
    kind = "tanh" if node.op == "FastGelu" else "none"
    if not node.has(1):
        return node.elementwise(lambda x: gelu(x, kind), node.input(0))
    return node.elementwise(lambda x, b: gelu(x + b, kind), node.input(0), node.input(1))
