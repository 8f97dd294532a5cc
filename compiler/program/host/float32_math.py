"""Float32 arithmetic of onnxruntime's kernels that numpy lacks: fused multiply-add and the logistic function."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Float32 = NDArray[np.float32]

LOGISTIC_LIMIT = 18.0
"""Operands of the logistic function are clamped to this magnitude."""
LOGISTIC_NUMERATOR = (
    4.37031012579801e-11, 1.15627324459942e-07, 6.08574864600143e-05, 8.51377133304701e-03, 2.48287947061529e-01,
)  # fmt: skip
LOGISTIC_DENOMINATOR = (
    6.10247389755681e-13, 5.76102136993427e-09, 6.29106785017040e-06, 1.70198817374094e-03, 1.16817656904453e-01,
    9.93151921023180e-01,
)  # fmt: skip
"""P and Q of 1/2 + x P(x^2) / Q(x^2), highest power first. Source: onnxruntime, mlas/lib/logistic.cpp."""


@np.errstate(all="ignore")
def fma(a: ArrayLike, b: ArrayLike, c: ArrayLike) -> Float32:
    """Compute a * b + c in float32 with one rounding."""
    product = np.multiply(a, b, dtype=np.float64)  # exact: 48 bits
    c64 = np.asarray(c, np.float64)
    total = np.asarray(product + c64)
    ties = (total.view(np.int64) & HALF_BITS == TIE) | (np.abs(total) < np.finfo(np.float32).tiny)
    if np.any(ties):  # elsewhere the rounding to float64 does not change the rounding to float32
        total[ties] = _add_rounding_to_odd(*(np.broadcast_to(operand, total.shape)[ties] for operand in (product, c64)))
    return np.asarray(total, np.float32)


HALF_BITS, TIE = (1 << 29) - 1, 1 << 28
"""The bits of a float64 that a float32 lacks, and their value halfway between two float32 numbers."""


def _add_rounding_to_odd(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """Add float64 numbers and round to odd: set the last bit where the sum is inexact.

    Then rounding the result to float32 sees no false tie.
    """
    total = a + b
    head = total - a
    error = (a - (total - head)) + (b - head)  # total + error is the sum (Knuth)
    inexact = error != 0
    away = inexact & (np.signbit(error) != np.signbit(total))
    total = np.where(away, np.nextafter(total, 0.0), total)
    odd: NDArray[np.float64] = (total.view(np.int64) | inexact).view(np.float64)
    return odd


def logistic(x: NDArray[Any]) -> NDArray[Any]:
    """Compute 1 / (1 + exp(-x)); for float32 exactly as onnxruntime, whose results near 0 are multiples of 2^-25."""
    if x.dtype != np.float32:
        with np.errstate(over="ignore"):
            return np.asarray(1 / (1 + np.exp(-x)))
    limit = np.float32(LOGISTIC_LIMIT)
    x = np.clip(x, -limit, limit)
    square = x * x
    numerator, denominator = (
        np.full_like(x, coefficients[0]) for coefficients in (LOGISTIC_NUMERATOR, LOGISTIC_DENOMINATOR)
    )
    for coefficient in LOGISTIC_NUMERATOR[1:]:
        numerator = fma(numerator, square, np.float32(coefficient))
    for coefficient in LOGISTIC_DENOMINATOR[1:]:
        denominator = fma(denominator, square, np.float32(coefficient))
    return np.asarray(np.maximum(numerator * x / denominator + np.float32(0.5), np.float32(0)))
