"""Compare the outputs of two models on random inputs, with an oracle (a runtime) that the caller hands in.

They are compared byte for byte, or, for models that compute the same in real numbers, as far as rounding may bring them
apart.

A sum of n float32 numbers, in whatever order, is off by at most n * u of the sum of their absolute values, u = 2^-24
(Higham, Accuracy and Stability of Numerical Algorithms, 4.2), and almost certainly by a small multiple of sqrt(n) * u
of it, as roundings have either sign (Higham and Mary, 2019). The absolute values of n terms add up to at most sqrt(n)
times the root of the sum of their squares (Cauchy and Schwarz), and that root is the size of a sum of terms of either
sign. Both roots together give n * u of the size of the result, for each sum on the way to an output. So the bound of
one model is u times the terms of all sums on its longest way, and the bound of two models is the sum of both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from celosia.compiler.options import Oracle
from celosia.compiler.superoptimise.graph import ONNX, BytesGraph, GraphOp
from celosia.compiler.superoptimise.operators import OPERATORS

Array = NDArray[Any]
SAMPLES = 3
"""Number of random inputs on which two models are compared."""


def compare_on_random_inputs(original: onnx.ModelProto, other: onnx.ModelProto, oracle: Oracle) -> str:
    """Say how the outputs of two models differ on SAMPLES random inputs; "" where no byte does. ValueError where the
    oracle cannot run the original; where it cannot run `other`, its message is returned.
    """
    return _first_objection(original, other, oracle, first_differing_output)


def _first_objection(
    original: onnx.ModelProto, other: onnx.ModelProto, oracle: Oracle,
    compare: Callable[[Mapping[str, Array], Mapping[str, Array]], str],
) -> str:  # fmt: skip
    """Return the first sentence other than "" of `compare` on the outputs of both models.

    Otherwise it is as `compare_on_random_inputs`.
    """
    run = oracle(original)
    expected = [run(inputs_of(original, seed)) for seed in range(SAMPLES)]
    try:
        run = oracle(other)
        outputs = (run(inputs_of(original, seed)) for seed in range(SAMPLES))
        return next(filter(None, map(compare, expected, outputs)), "")
    except ValueError as error:
        return str(error)


def inputs_of(model: onnx.ModelProto, seed: int) -> dict[str, Array]:
    """Draw random values for each input of a model that is no constant. Open sizes become 1."""
    rng = np.random.default_rng(seed)
    constants = {initializer.name for initializer in model.graph.initializer}
    arrays = {}
    for value in model.graph.input:
        if value.name in constants:
            continue
        kind = value.type.tensor_type
        shape = [dim.dim_value or 1 for dim in kind.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
        arrays[value.name] = _random_array(rng, shape, dtype)
    return arrays


def _random_array(rng: np.random.Generator, shape: list[int], dtype: Any) -> Array:
    """Draw floats of normal distribution and random scale, bytes of the complete range, and 0 and 1 for other integers
    and for text.
    """
    if np.issubdtype(dtype, np.floating):
        return np.asarray(rng.normal(size=shape) * 10 ** rng.uniform(-1, 1.5), dtype)
    if dtype in (np.int8, np.uint8):
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, shape, dtype, endpoint=True)
    bits = rng.integers(0, 2, shape)
    return bits.astype(str).astype(object) if np.issubdtype(dtype, np.object_) else bits.astype(dtype)


def _comparable(value: Array) -> bytes | list[str]:
    """Return the bytes of a tensor, or the strings of a tensor of text."""
    return value.ravel().tolist() if value.dtype == object else np.asarray(value).tobytes()


def first_differing_output(first: Mapping[str, Array], second: Mapping[str, Array]) -> str:
    """Say which output is the first that is not the same byte for byte, and how it differs; "" where all are the
    same.
    """
    for name, value in first.items():
        other = second.get(name)
        if other is None or value.shape != other.shape or value.dtype != other.dtype:
            return f"output {name!r} is another tensor"
        if _comparable(value) != _comparable(other):
            return f"output {name!r} differs in {int(np.count_nonzero(value != other))} of {value.size} elements"
    return ""


# Models that are rounded differently ---------------------------------------------------------------------------------

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
    def as_data(self) -> dict[str, Any]:
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
    if operation.op != ONNX:
        terms = OPERATORS[operation.op].summed_terms(shapes, operation.attributes_by_name)
        if terms is not None:
            return terms
    result_elements = sum(math.prod(graph.kinds[name].shape or ()) for name in operation.outputs if name in graph.kinds)
    return -(-sum(map(math.prod, shapes)) // max(1, result_elements))


def measure_distance(original: onnx.ModelProto, other: onnx.ModelProto, bound: float, oracle: Oracle) -> OutputDistance:
    """Measure how far `other` is from `original` on SAMPLES random inputs. ValueError where the oracle cannot run the
    original.
    """
    distances: dict[str, dict[str, float]] = {}
    if why := _first_objection(original, other, oracle, partial(_update_distances, distances)):
        return OutputDistance(distances, bound, why)
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
            if why := first_differing_output({name: value}, second):
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
