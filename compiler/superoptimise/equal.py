"""Whether two models give the same bytes under an oracle that is handed in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from celosia.compiler.options import Oracle

Array = NDArray[Any]
SAMPLES = 3
"""Random inputs on which two models are compared."""


def difference(original: onnx.ModelProto, other: onnx.ModelProto, oracle: Oracle) -> str:
    """Say how the outputs of two models differ for SAMPLES random inputs; "" where no byte does. ValueError
    where the oracle does not run the original."""
    run = oracle(original)
    expected = [run(inputs_of(original, seed)) for seed in range(SAMPLES)]
    try:
        run = oracle(other)
        for seed, values in enumerate(expected):
            if why := differing(values, run(inputs_of(original, seed))):
                return why
    except ValueError as error:
        return str(error)
    return ""


def inputs_of(model: onnx.ModelProto, seed: int) -> dict[str, Array]:
    """Random values for each input: of floats normal, of bytes all, of other whole numbers, and as text, 0 and 1."""
    rng = np.random.default_rng(seed)
    constants = {each.name for each in model.graph.initializer}
    found = {}
    for value in model.graph.input:
        if value.name in constants:
            continue
        kind = value.type.tensor_type
        shape = [dim.dim_value or 1 for dim in kind.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
        found[value.name] = _random(rng, shape, dtype)
    return found


def _random(rng: np.random.Generator, shape: list[int], dtype: Any) -> Array:
    if np.issubdtype(dtype, np.floating):
        return np.asarray(rng.normal(size=shape) * 10 ** rng.uniform(-1, 1.5), dtype)
    if dtype in (np.int8, np.uint8):
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, shape, dtype, endpoint=True)
    found = rng.integers(0, 2, shape)
    return found.astype(str).astype(object) if np.issubdtype(dtype, np.object_) else found.astype(dtype)


def _bytes(value: Array) -> bytes | list[str]:
    """The bytes of a tensor; of a tensor of text its strings."""
    return value.ravel().tolist() if value.dtype == object else np.asarray(value).tobytes()


def differing(first: Mapping[str, Array], second: Mapping[str, Array]) -> str:
    """The first output that is not the same byte for byte, in a sentence; "" where all are."""
    for name, value in first.items():
        other = second.get(name)
        if other is None or value.shape != other.shape or value.dtype != other.dtype:
            return f"output {name!r} is another tensor"
        if _bytes(value) != _bytes(other):
            return f"output {name!r} differs in {int(np.count_nonzero(value != other))} of {value.size} elements"
    return ""
