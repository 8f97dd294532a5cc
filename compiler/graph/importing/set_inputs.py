"""Replace inputs of a model by constants (`--set NAME=VALUE`, `set=` in Python).

Then Ifs on them become one of their branches, and shapes that depend on them are numbers.

    set {"sr": 16000}:    input sr: int64[]     ->    sr = 16000, a constant
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from celosia.compiler.graph.errors import ModelError
from celosia.compiler.graph.importing.dimensions import declared_shape, input_values
from celosia.compiler.program.dtypes import ONNX_TYPES, numpy_dtype

InputValues = Mapping[str, Any]
"""Name of an input -> its value: a number, a (nested) list, an array, or a text as in `--set`, such as "1,0.5"."""
TRUTH = {"true": True, "1": True, "false": False, "0": False}
"""Texts of a truth value."""


def set_inputs(proto: onnx.ModelProto, values: InputValues) -> onnx.ModelProto:
    """Return `proto` with the inputs in `values` as constants.

    Raises ModelError for a name of no input, and for a value whose type or shape does not fit.
    """
    inputs = input_values(proto)
    result = onnx.ModelProto()
    result.CopyFrom(proto)
    for name, value in values.items():
        if name not in inputs:
            raise ModelError(
                f"a value is set for {name!r}, which is no input; the inputs are "
                f"{', '.join(map(repr, inputs)) or 'none'}"
            )
        result.graph.initializer.append(onnx.numpy_helper.from_array(_fitting_array(inputs[name], value), name))
    kept = [value for value in result.graph.input if value.name not in values]
    del result.graph.input[:]
    result.graph.input.extend(kept)
    return result


def _fitting_array(declared: onnx.ValueInfoProto, value: Any) -> NDArray[Any]:
    """Return `value` with the type and shape of an input. Raises ModelError where it does not fit."""
    tensor = declared.type.tensor_type
    if not declared.type.HasField("tensor_type") or tensor.elem_type not in ONNX_TYPES:
        raise ModelError(f"a value is set for input {declared.name!r}, which is no tensor of known type; leave it out")
    dtype = numpy_dtype(ONNX_TYPES[tensor.elem_type])
    label = f"{ONNX_TYPES[tensor.elem_type].replace('object', 'text')}{declared_shape(declared)}"
    try:
        array = _array_of_text(value, dtype) if isinstance(value, str) else np.asarray(value)
        fitting = _converted(array, dtype)
    except (ValueError, TypeError, OverflowError):
        raise ModelError(f"input {declared.name!r} is {label}, and the value {_short(value)} does not fit") from None
    sizes = [dim.dim_value if dim.HasField("dim_value") else None for dim in tensor.shape.dim]
    if not tensor.HasField("shape"):
        return fitting
    known = [size for size in sizes if size is not None]
    if (
        len(known) == len(sizes)
        and prod(known) == fitting.size
        and (fitting.ndim <= 1 or fitting.shape == tuple(known))
    ):
        return fitting.reshape(known)
    if len(sizes) != fitting.ndim or any(size not in (None, n) for size, n in zip(sizes, fitting.shape)):
        raise ModelError(
            f"input {declared.name!r} is {label}, and the value {_short(value)} has the shape {list(fitting.shape)}"
        )
    return fitting


def _array_of_text(text: str, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return the number or the comma-separated list in a text. Raises ValueError or KeyError where it holds others."""
    parts = text.split(",")
    if dtype.kind == "O":
        elements: list[Any] = list(parts)
    elif dtype.kind == "b":
        if not all(part.strip().lower() in TRUTH for part in parts):
            raise ValueError("a text that is no truth value")
        elements = [TRUTH[part.strip().lower()] for part in parts]
    else:
        elements = [int(part) if dtype.kind in "iu" else float(part) for part in parts]
    return np.array(elements if len(parts) > 1 else elements[0], object if dtype.kind in "Oiu" else None)


def _converted(array: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Convert to an element type; floats may be rounded. Raises ValueError where another value would result."""
    if dtype.kind == "O":
        if not all(isinstance(text, str) for text in array.reshape(-1).tolist()):
            raise ValueError("no text")
        return array.astype(object)
    is_truth = array.dtype.kind == "b"
    if array.dtype.kind not in "biufO" or is_truth != (dtype.kind == "b"):
        raise ValueError("another type")
    converted = array.astype(dtype)
    if dtype.kind in "biu" and not np.array_equal(converted.astype(object), array.astype(object)):
        raise ValueError("a value that the type does not have")
    return converted


def _short(value: Any) -> str:
    """Return a value in a few characters."""
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
