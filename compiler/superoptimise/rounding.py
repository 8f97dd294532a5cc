"""Measure how far apart two models are that compute the same in real numbers, and bound how far rounding may bring
them.

A sum of n float32 numbers, in whatever order, is off by at most n * u of the sum of their absolute values, u = 2^-24
(Higham, Accuracy and Stability of Numerical Algorithms, 4.2), and almost certainly by a small multiple of sqrt(n) * u
of it, as roundings have either sign (Higham and Mary, 2019). The absolute values of n terms add up to at most sqrt(n)
times the root of the sum of their squares (Cauchy and Schwarz), and that root is the size of a sum of terms of either
sign. Both roots together give n * u of the size of the result, for each sum on the way to an output. So the bound of
one model is u times the terms of all sums on its longest way, and the bound of two models is the sum of both.
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
from celosia.compiler.superoptimise.compare_outputs import SAMPLES, differing, inputs_of
from celosia.compiler.superoptimise.graph import BytesGraph, GraphOp

Array = NDArray[Any]
UNIT_ROUNDOFF = 2.0**-24
"""Largest relative change when a number is rounded to float32."""
SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)
"""Least divisor of a relative difference."""


@dataclass(frozen=True)
class OutputDistance:
    """Distance between the outputs of two models on random inputs.

    outputs: for each output of floats, "absolute": the largest difference, and "relative": the largest difference over
    the largest value of the original's output for the same input. bound: limit of "relative". why: a sentence on what
    is wrong, or "".
    """

    outputs: dict[str, dict[str, float]] = field(default_factory=dict)
    bound: float = 0.0
    why: str = ""

    @property
    def plain(self) -> dict[str, Any]:
        """The distance as plain data, for reports."""
        return {"outputs": self.outputs, "bound": self.bound, "samples": SAMPLES}


def bound_of(before: BytesGraph, after: BytesGraph) -> float:
    """Return by how much of an output's largest value rounding may bring the results of two graphs apart."""
    return UNIT_ROUNDOFF * (_longest_sum_of_terms(before) + _longest_sum_of_terms(after))


def _longest_sum_of_terms(graph: BytesGraph) -> int:
    """Return the number of terms of all sums on the way through the graph that has most."""
    terms: dict[str, int] = {}
    for operation in graph.operations:
        before = max((terms.get(name, 0) for name in operation.inputs), default=0)
        terms |= dict.fromkeys(operation.outputs, before + _term_count(graph, operation))
    return max(terms.values(), default=0)


def _term_count(graph: BytesGraph, operation: GraphOp) -> int:
    """Return the number of terms of a sum in the result of an operation. An operator that the algebra does not know
    counts the elements that it reads for each element of its result.
    """
    shapes: list[tuple[int, ...]]
    shapes = [graph.constants[name].shape if name in graph.constants else graph.kinds[name].shape or ()
              for name in operation.inputs if name in graph.constants or name in graph.kinds]  # fmt: skip
    match operation.op:
        case "float_convolve":
            return math.prod(shapes[1][1:]) + len(shapes) - 2
        case "float_multiply":
            return int(shapes[1][0])
        case "real_average":
            return int(math.prod(operation["kernel"])) + 1
        case "real_normalised":
            return 4
        case "concat" | "slice" | "transpose" | "reshape" | "real_pad":
            return 0
    result_elements = sum(math.prod(graph.kinds[name].shape or ()) for name in operation.outputs if name in graph.kinds)
    return -(-sum(map(math.prod, shapes)) // max(1, result_elements))


def apart(original: onnx.ModelProto, other: onnx.ModelProto, bound: float, oracle: Oracle) -> OutputDistance:
    """Measure how far `other` is from `original` on SAMPLES random inputs. ValueError where the oracle cannot run the
    original.
    """
    run = oracle(original)
    expected = [run(inputs_of(original, seed)) for seed in range(SAMPLES)]
    distances: dict[str, dict[str, float]] = {}
    try:
        run = oracle(other)
        for seed, values in enumerate(expected):
            if why := _update_distances(distances, values, run(inputs_of(original, seed))):
                return OutputDistance(distances, bound, why)
    except ValueError as error:
        return OutputDistance(distances, bound, str(error))
    for name, row in distances.items():
        if not row["relative"] <= bound:
            why = f"output {name!r} differs by {row['relative']:.2g} of its largest value, and rounding is {bound:.2g}"
            return OutputDistance(distances, bound, why)
    return OutputDistance(distances, bound)


def _update_distances(
    distances: dict[str, dict[str, float]], first: Mapping[str, Array], second: Mapping[str, Array]
) -> str:
    """Raise the distances where the outputs of one sample are further apart. Returns a sentence where they differ in a
    way that rounding does not explain, else "".
    """
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
        row = distances.setdefault(name, {"absolute": 0.0, "relative": 0.0})
        row["absolute"] = max(row["absolute"], absolute)
        row["relative"] = max(row["relative"], absolute / max(largest, SMALLEST_NORMAL))
    return ""
