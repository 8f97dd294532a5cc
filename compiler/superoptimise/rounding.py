"""Measure how far apart two models are whose sums are of the same real numbers, and how far rounding alone may bring
them.

A sum of n float32 numbers, in whatever order, is off by n * u of the sum of their absolute values at most, u = 2^-24
(Higham, Accuracy and Stability of Numerical Algorithms, 4.2), and by a small multiple of the root of n with near
certainty, as roundings are not of one sign (Higham and Mary, 2019). Absolute values of n terms add up to the root of n
times the root of the sum of their squares at most (Cauchy and Schwarz), which is what a sum of terms of either sign is
of the size of. Both roots together are n * u of the size of the result, for each sum on the way to an output. So what
one model may be off by is u times the terms of all sums on its longest way, and two models by both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from celosia.compiler.options import Oracle
from celosia.compiler.superoptimise.equal import SAMPLES, differing, inputs_of
from celosia.compiler.superoptimise.graph import BytesGraph, GraphOp

Array = NDArray[Any]
UNIT = 2.0**-24
"""Largest relative change by rounding to float32."""
SMALLEST = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True)
class Apart:
    """Distance between the outputs of two models for random inputs.

    outputs: of each output of floats, "absolute": the largest difference, "relative": the largest over the largest
    value of the original for the same input. bound: what `relative` may be. why: what is wrong, in a sentence."""

    outputs: dict[str, dict[str, float]] = field(default_factory=dict)
    bound: float = 0.0
    why: str = ""

    @property
    def plain(self) -> dict[str, Any]:
        """For reports."""
        return {"outputs": self.outputs, "bound": self.bound, "samples": SAMPLES}


def bound_of(before: BytesGraph, after: BytesGraph) -> float:
    """By how much of the largest value of an output rounding may bring these apart."""
    return UNIT * (_longest(before) + _longest(after))


def _longest(graph: BytesGraph) -> int:
    """Terms of all sums on the way on which there are most."""
    behind: dict[str, int] = {}
    for each in graph.operations:
        before = max((behind.get(name, 0) for name in each.inputs), default=0)
        behind |= dict.fromkeys(each.outputs, before + _terms(graph, each))
    return max(behind.values(), default=0)


def _terms(graph: BytesGraph, each: GraphOp) -> int:
    """Number of terms of a sum in the result; for an operator that the algebra does not know as many as it reads for
    each."""
    shapes: list[tuple[int, ...]]
    shapes = [graph.constants[name].shape if name in graph.constants else graph.kinds[name].shape or ()
              for name in each.inputs if name in graph.constants or name in graph.kinds]  # fmt: skip
    match each.op:
        case "float_convolve":
            return math.prod(shapes[1][1:]) + len(shapes) - 2
        case "float_multiply":
            return int(shapes[1][0])
        case "real_average":
            return int(math.prod(each["kernel"])) + 1
        case "real_normalised":
            return 4
        case "concat" | "slice" | "transpose" | "reshape" | "real_pad":
            return 0
    made = sum(math.prod(graph.kinds[name].shape or ()) for name in each.outputs if name in graph.kinds)
    return -(-sum(map(math.prod, shapes)) // max(1, made))


def apart(original: onnx.ModelProto, other: onnx.ModelProto, bound: float, oracle: Oracle) -> Apart:
    """Measure how far `other` is from `original` for SAMPLES random inputs. ValueError where the oracle does not run
    the original."""
    run = oracle(original)
    expected = [run(inputs_of(original, seed)) for seed in range(SAMPLES)]
    found: dict[str, dict[str, float]] = {}
    try:
        run = oracle(other)
        for seed, values in enumerate(expected):
            if why := _worse(found, values, run(inputs_of(original, seed))):
                return Apart(found, bound, why)
    except ValueError as error:
        return Apart(found, bound, str(error))
    for name, row in found.items():
        if not row["relative"] <= bound:
            why = f"output {name!r} differs by {row['relative']:.2g} of its largest value, and rounding is {bound:.2g}"
            return Apart(found, bound, why)
    return Apart(found, bound)


def _worse(found: dict[str, dict[str, float]], first: Mapping[str, Array], second: Mapping[str, Array]) -> str:
    """Note what is further apart than before; how outputs differ that rounding does not bring apart, in a sentence."""
    for name, value in first.items():
        other = second.get(name)
        if other is None or value.dtype.kind != "f" or value.shape != other.shape or value.dtype != other.dtype:
            if why := differing({name: value}, second):
                return why
            continue
        finite = np.isfinite(value)
        if not np.array_equal(value[~finite], other[~finite], equal_nan=True) or not np.isfinite(other[finite]).all():
            return f"output {name!r} has other numbers that are not finite"
        absolute = float(np.abs(value[finite].astype(np.float64) - other[finite]).max(initial=0))
        largest = float(np.abs(value[finite]).max(initial=0))
        row = found.setdefault(name, {"absolute": 0.0, "relative": 0.0})
        row["absolute"] = max(row["absolute"], absolute)
        row["relative"] = max(row["relative"], absolute / max(largest, SMALLEST))
    return ""
