"""Intrinsic functions that expressions may call: their meaning in numpy, number of arguments and result types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from celosia.sim.functional.norm import inverse_root

ONES = 0x01010101
"""Four bytes that are 1, packed in a uint32: dot4(x, ONES) is the sum of the bytes of x."""


def dot4(x: Any, w: Any) -> Any:
    """Add the products of four uint8 in `x` and four int8 in `w` as int32; both are uint32 with the first byte lowest.

    It is VNNI's vpdpbusd and the dot product of Arm.
    """
    bytes_ = [(x >> 8 * k & 255, (w >> 8 * k & 255).astype(np.int8)) for k in range(4)]
    a, b, c, d = (u.astype(np.int32) * s.astype(np.int32) for u, s in bytes_)
    return a + b + c + d


def pairs(x0: Any, x1: Any, w0: Any, w1: Any) -> Any:
    """Add the products of the two int8 in x0 and in w0, and of those in x1 and in w1, as int32.

    Each argument is a uint16 that packs two int8. NEON's smull and smlal compute it.
    """
    total = np.int32(0)
    for x, w in ((x0, w0), (x1, w1)):
        for k in range(2):
            a, b = ((packed >> 8 * k & 255).astype(np.int8).astype(np.int32) for packed in (x, w))
            total = total + a * b
    return total


def popcount(x: Any) -> Any:
    """Count the set bits of `x`; a negative number is in two's complement."""
    return np.bitwise_count(x.view(f"u{x.itemsize}"))


def popcount4(x: Any) -> Any:
    """Count the set bits of each of the four bytes of a uint32, each count in its byte."""
    return sum(popcount(x >> 8 * k & 255).astype(np.uint32) << 8 * k for k in range(4))


def leading_zeros(x: Any) -> Any:
    """Count the zero bits of an int64 above its highest set bit; 64 for 0."""
    high, low = x >> 31 & 0xFFFFFFFF, x & 0x7FFFFFFF
    length = np.where(high > 0, 31 + np.frexp(np.float64(high))[1], np.frexp(np.float64(low))[1])
    return np.where(x < 0, 0, 64 - length)


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
"""Intrinsic function -> the same function in numpy, which the interpreter calls; renderers have code of their own."""

OF_INT64 = ("leading_zeros", "inverse_root")
"""Intrinsics whose argument is an int64."""
OF_BYTES = ("dot4", "popcount4")
"""Intrinsics whose arguments are uint32 that pack four bytes."""
OF_PAIRS = ("pairs", "narrow_pairs")
"""Intrinsics whose arguments are uint16 that pack two bytes. narrow: no byte of w0 and w1 is -128, so that the sum of
two products fits int16."""
ARITY = {
    **dict.fromkeys((*INTRINSICS, "erf", "bitcast"), 1),
    "dot4": 2,
    "fma": 3,
    "clamp": 3,
    **dict.fromkeys(OF_PAIRS, 4),
}
"""Intrinsic -> number of its arguments."""

RESULTS = {"isnan": "bool", "isinf": "bool", "dot4": "int32", **dict.fromkeys(OF_PAIRS, "int32")}
"""Intrinsic -> element type of its result, where that differs from the type of its arguments."""
