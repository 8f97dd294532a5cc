"""Interpreter of the loop IR in plain Python: slow, and the definition of every node.

Renderers are tested against it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.expr.loops import Alloc, Block, For, Function, If, Let, Stmt, Store, Update, expand
from celosia.compiler.expr.math_functions import INTRINSICS
from celosia.compiler.expr.nodes import (
    Binary,
    Call,
    Cast,
    Const,
    Expr,
    Load,
    Reduce,
    Select,
    Tensor,
    Var,
    is_float,
)
from celosia.compiler.program.dtypes import numpy_dtype

Array = NDArray[Any]


def trunc_div(a: Any, b: Any) -> Any:
    """Divide integers, rounding towards zero; 0 for a divisor of 0."""
    quotient = abs(int(a)) // abs(int(b)) if b else 0
    return quotient if (a < 0) == (b < 0) else -quotient


BINARY: dict[str, Any] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "floordiv": np.floor_divide, "mod": np.mod,
    "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "shl": np.left_shift, "shr": np.right_shift, "pow": np.power,
    "lt": np.less, "le": np.less_equal, "eq": np.equal, "ne": np.not_equal,
}  # fmt: skip
"""Operation of Binary -> function of numpy."""
_UPDATE = {"sum": np.add, "ordered_sum": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}
"""Kind of reduction -> function of numpy that does one step."""


def interpret(function: Function, *inputs: Array, scalars: Mapping[str, float] | None = None) -> list[Array]:
    """Run `function` on `inputs` (shapes and types as declared, else ValueError) and return its outputs.

    scalars: their values by name. Intrinsics run as the loops that they declare.
    """
    memory: dict[Tensor, Array] = {}
    for tensor, array in zip(function.inputs, inputs, strict=True):
        if array.shape != tensor.shape or array.dtype != numpy_dtype(tensor.dtype):
            raise ValueError(f"{tensor.name}: {array.dtype}{array.shape} given, {tensor.dtype}{tensor.shape} expected")
        memory[tensor] = np.ascontiguousarray(array).reshape(-1)
    for tensor in function.outputs:
        memory[tensor] = np.zeros(tensor.size, numpy_dtype(tensor.dtype))
    with np.errstate(all="ignore"):
        env = {var: numpy_dtype(var.dtype).type((scalars or {})[var.name]) for var in function.scalars}
        _run(expand(function.body), memory, env)
    return [memory[t].reshape(t.shape) for t in function.outputs]


def _element_number(tensor: Tensor, index: tuple[Expr, ...], memory: dict[Tensor, Array], env: dict[Var, Any]) -> int:
    """Evaluate an index to a row-major element number; IndexError where it leaves the tensor."""
    point = [int(_evaluate(i, memory, env)) for i in index]
    if len(point) == len(tensor.shape) and not all(0 <= p < n for p, n in zip(point, tensor.shape)):
        raise IndexError(f"{tensor.name}{list(tensor.shape)} accessed at {point}")
    position = point[0] if len(point) == 1 else int(np.ravel_multi_index(point, tensor.shape)) if point else 0
    if not 0 <= position < tensor.size:
        raise IndexError(f"{tensor.name}{list(tensor.shape)} accessed at element {position}")
    return position


def _run(s: Stmt, memory: dict[Tensor, Array], env: dict[Var, Any]) -> None:
    """Execute a statement. memory: the flat array of each tensor. env: values of loop variables and scalars."""
    match s:
        case For(var, extent, body):
            for i in range(extent):
                _run(body, memory, env | {var: np.int64(i)})
        case Store(tensor, index, value):
            memory[tensor][_element_number(tensor, index, memory, env)] = _evaluate(value, memory, env)
        case Update(kind, tensor, index, value):
            i = _element_number(tensor, index, memory, env)
            memory[tensor][i] = _UPDATE[kind](memory[tensor][i], _evaluate(value, memory, env))
        case Let(var, value, body):
            _run(body, memory, env | {var: _evaluate(value, memory, env)})
        case If(cond, body, orelse):
            if _evaluate(cond, memory, env):
                _run(body, memory, env)
            elif orelse is not None:
                _run(orelse, memory, env)
        case Alloc(tensor, body):
            memory[tensor] = np.zeros(tensor.size, numpy_dtype(tensor.dtype))
            _run(body, memory, env)
        case Block(body):
            for stmt in body:
                _run(stmt, memory, env)
        case _:
            raise TypeError(f"cannot interpret {type(s).__name__}")


def evaluate(e: Expr, env: Mapping[Var, Any]) -> Any:
    """Evaluate an expression that reads no tensor but constants, for these values of variables.

    >>> i = Var("i")
    >>> int(evaluate(i * 4 + 2, {i: 3}))
    14
    """
    return _evaluate(e, {}, {var: numpy_dtype(var.dtype).type(value) for var, value in env.items()})


def _evaluate(e: Expr, memory: dict[Tensor, Array], env: dict[Var, Any]) -> Any:
    """Evaluate an expression to a numpy scalar of its element type."""
    match e:
        case Const(value, dtype):
            return numpy_dtype(dtype).type(value)
        case Var():
            return env[e]
        case Load(tensor, index):
            element = _element_number(tensor, index, memory, env)
            return (memory[tensor] if tensor.value is None else tensor.value.reshape(-1))[element]
        case Binary(op, a, b):
            x, y = _evaluate(a, memory, env), _evaluate(b, memory, env)
            if op in ("div", "floordiv", "mod") and not is_float(a.dtype):
                if y == 0:
                    return numpy_dtype(a.dtype).type(0)
                if op == "div":
                    return np.array(trunc_div(x, y)).astype(a.dtype)[()]
            return BINARY[op](x, y)
        case Call(name, args, dtype):
            return _evaluate_call(name, dtype, [_evaluate(a, memory, env) for a in args])
        case Cast(value, dtype):
            return cast(_evaluate(value, memory, env), value.dtype, dtype)
        case Select(cond, a, b):
            return _evaluate(a if _evaluate(cond, memory, env) else b, memory, env)
        case Reduce():
            raise TypeError("a reduction inside a loop nest: lower it first")
    raise TypeError(f"cannot interpret {type(e).__name__}")


def _evaluate_call(name: str, dtype: str, args: list[Any]) -> Any:
    """Evaluate an intrinsic function on numpy scalars and convert the result to `dtype`."""
    target = numpy_dtype(dtype).type
    if name == "erf":
        return target(math.erf(float(args[0])))
    if name == "fma":  # exact in float64 for float32 operands up to one rounding
        return target(np.longdouble(args[0]) * np.longdouble(args[1]) + np.longdouble(args[2]))
    if name == "clamp":
        value, low, high = args
        return target(low if not value > low else min(value, high))
    if name == "bitcast":
        return np.array(args[0]).view(numpy_dtype(dtype))[()]
    return target(INTRINSICS[name](*args))


def cast(value: Any, source: str, dtype: str) -> Any:
    """Convert `value` (a scalar or an array of type `source`) to `dtype` as Cast defines it.

    Floats become integers towards zero and saturate; NaN becomes 0.
    """
    array = np.asarray(value)
    if not is_float(source) or not dtype.startswith(("int", "uint")):
        return array.astype(numpy_dtype(dtype))[()]
    limits, kind = np.iinfo(dtype), np.dtype(dtype).type
    # The limits of 64-bit integers become the nearest floats; no other float lies between.
    low, high = float(limits.min), float(limits.max)
    truncated = np.trunc(np.nan_to_num(array.astype(np.float64), posinf=np.inf, neginf=-np.inf))
    inside = np.where((low < truncated) & (truncated < high), truncated, 0).astype(dtype)
    return np.where(truncated >= high, kind(limits.max), np.where(truncated <= low, kind(limits.min), inside))[()]
