"""Compare the outputs of two models on random inputs, byte for byte, with an oracle (a runtime) that the caller hands
in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from celosia.compiler.options import Oracle

Array = NDArray[Any]
SAMPLES = 3
"""Number of random inputs on which two models are compared."""


def difference(original: onnx.ModelProto, other: onnx.ModelProto, oracle: Oracle) -> str:
    """Say how the outputs of two models differ on SAMPLES random inputs; "" where no byte does. ValueError where the
    oracle cannot run the original; where it cannot run `other`, its message is returned.
    """
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


def differing(first: Mapping[str, Array], second: Mapping[str, Array]) -> str:
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
