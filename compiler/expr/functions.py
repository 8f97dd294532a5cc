"""Functions that expressions call, with what they mean in numpy: how many arguments they take, and what they return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from celosia.sim.functional.norm import inverse_root

ONES = 0x01010101
"""Four bytes that are 1, as dot4 takes them."""


def dot4(x: Any, w: Any) -> Any:
    """The products of four uint8 and four int8, added as int32; both are uint32 with the first byte lowest."""
    bytes_ = [(x >> 8 * k & 255, (w >> 8 * k & 255).astype(np.int8)) for k in range(4)]
    a, b, c, d = (u.astype(np.int32) * s.astype(np.int32) for u, s in bytes_)
    return a + b + c + d


def pairs(x0: Any, x1: Any, w0: Any, w1: Any) -> Any:
    """The products of the two int8 in x0 and w0, and of those in x1 and w1, added as int32; all are uint16."""
    total = np.int32(0)
    for x, w in ((x0, w0), (x1, w1)):
        for k in range(2):
            a, b = ((each >> 8 * k & 255).astype(np.int8).astype(np.int32) for each in (x, w))
            total = total + a * b
    return total


def popcount(x: Any) -> Any:
    """How many bits of `x` are set; of a negative number, in two's complement."""
    return np.bitwise_count(x.view(f"u{x.itemsize}"))


def popcount4(x: Any) -> Any:
    """The set bits of each of the four bytes of a uint32, in its place."""
    return sum(popcount(x >> 8 * k & 255).astype(np.uint32) << 8 * k for k in range(4))


def leading_zeros(x: Any) -> Any:
    """Bits of an int64 in front of the first one that is set; 64 of 0."""
    high, low = x >> 31 & 0xFFFFFFFF, x & 0x7FFFFFFF
    length = np.where(high > 0, 31 + np.frexp(np.float64(high))[1], np.frexp(np.float64(low))[1])
    return np.where(x < 0, 0, 64 - length)


# Intrinsic functions: name -> the same function in numpy (used by the interpreter; renderers have their own).
INTRINSICS: dict[str, Callable[..., Any]] = {
    "exp": np.exp, "log": np.log, "sqrt": np.sqrt, "tanh": np.tanh, "sin": np.sin, "cos": np.cos, "tan": np.tan,
    "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan, "sinh": np.sinh, "cosh": np.cosh,
    "asinh": np.arcsinh, "acosh": np.arccosh, "atanh": np.arctanh,
    "floor": np.floor, "ceil": np.ceil, "trunc": np.trunc, "round_even": np.rint, "abs": np.abs,
    "isnan": np.isnan, "isinf": np.isinf, "popcount": popcount, "popcount4": popcount4, "dot4": dot4,
    "pairs": pairs, "narrow_pairs": pairs,
    "leading_zeros": leading_zeros, "inverse_root": inverse_root,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)), "unfused_exp": np.exp,
}  # fmt: skip

OF_INT64 = ("leading_zeros", "inverse_root")
"""Those of an int64."""
OF_BYTES = ("dot4", "popcount4")
"""Those that take uint32 of four bytes."""
OF_PAIRS = ("pairs", "narrow_pairs")
"""Those that take uint16 of two bytes. narrow: no byte of w0 and w1 is -128."""
ARITY = {
    **dict.fromkeys((*INTRINSICS, "erf", "bitcast"), 1),
    "dot4": 2,
    "fma": 3,
    "clamp": 3,
    **dict.fromkeys(OF_PAIRS, 4),
}
"""Functions, with the number of their arguments."""

RESULTS = {"isnan": "bool", "isinf": "bool", "dot4": "int32", **dict.fromkeys(OF_PAIRS, "int32")}
"""Element types of what intrinsics return, where it is not that of their arguments."""
