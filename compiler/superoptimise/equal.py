"""Whether two models give the same bytes under onnxruntime, with int8 as integers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from celosia.compiler.graph.importer import ModelError
from celosia.compiler.numerics import INT8

Array = NDArray[Any]
SAMPLES = 3
"""Random inputs on which two models are compared."""


class MissingRuntime(RuntimeError):
    """onnxruntime is not installed; one sentence that says how to install it."""


def require() -> None:
    """MissingRuntime where onnxruntime is not installed."""
    try:
        import onnxruntime  # noqa: F401
    except ImportError:
        raise MissingRuntime(
            "to compare the optimised model with the original, onnxruntime is needed: pip install onnxruntime"
        ) from None


def difference(original: onnx.ModelProto, other: onnx.ModelProto) -> str:
    """How the outputs of two models differ under onnxruntime for SAMPLES random inputs, in a sentence; "" where no byte
    does. MissingRuntime; ModelError where onnxruntime does not run the original."""
    require()
    try:
        first = _session(original)
        expected = [first.run(None, inputs_of(original, seed)) for seed in range(SAMPLES)]
    except Exception as error:  # onnxruntime raises many classes
        raise ModelError(
            f"onnxruntime does not run the model, so that nothing can be compared: {_line(error)}"
        ) from None
    names = [value.name for value in first.get_outputs()]
    try:
        second = _session(other)
        for seed, values in enumerate(expected):
            found = second.run(names, inputs_of(original, seed))
            if why := differing(dict(zip(names, values)), dict(zip(names, found))):
                return why
    except Exception as error:
        return f"onnxruntime does not run it: {_line(error)}"
    return ""


def _session(model: onnx.ModelProto) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.add_session_config_entry(INT8, "1")
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def inputs_of(model: onnx.ModelProto, seed: int) -> dict[str, Array]:
    """Random values for each input: of floats normal, of bytes all, of other whole numbers 0 and 1."""
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
    return rng.integers(0, 2, shape).astype(dtype)


def differing(first: Mapping[str, Array], second: Mapping[str, Array]) -> str:
    """The first output that is not the same byte for byte, in a sentence; "" where all are."""
    for name, value in first.items():
        other = second.get(name)
        if other is None or value.shape != other.shape or value.dtype != other.dtype:
            return f"output {name!r} is another tensor"
        bad = np.asarray(value).view(np.uint8) != np.asarray(other).view(np.uint8) if value.size else np.zeros(0)
        if np.any(bad):
            return f"output {name!r} differs in {int(np.count_nonzero(value != other))} of {value.size} elements"
    return ""
