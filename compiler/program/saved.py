"""Serialisation of arrays, host operators and dataclasses as .npy and JSON, which can be read with numpy alone."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import types
import typing
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.program.dtypes import numpy_dtype
from celosia.compiler.program.host.kernel import aligned_empty
from celosia.compiler.program.host.op import Body, HostOp
from celosia.plain import from_json, require_few_values

Array = NDArray[Any]
KIND_KEY = "<kind>"
"""Key in JSON objects that names their Python type; no attribute has it."""


def array_bytes(array: Array) -> bytes:
    """Serialise an array as .npy, or as JSON where numpy lacks its element type or it holds strings.

    >>> load_array(array_bytes(np.array(["a", "b"], object))).tolist()
    ['a', 'b']
    """
    if array.dtype.isbuiltin != 2 and array.dtype.kind != "O":
        buffer = io.BytesIO()
        np.save(buffer, array, allow_pickle=False)
        return buffer.getvalue()
    values = (
        [str(element) for element in array.reshape(-1)]
        if array.dtype.kind == "O"
        else base64.b64encode(array.tobytes()).decode()
    )
    return json.dumps({"dtype": array.dtype.name, "shape": array.shape, "values": values}).encode()


def load_array(data: bytes) -> Array:
    """Read an array that `array_bytes` wrote. Raises ValueError for other data."""
    if data.startswith(b"\x93NUMPY"):
        loaded: Array = np.load(io.BytesIO(data), allow_pickle=False)
        array = aligned_empty(loaded.dtype, loaded.shape)
        array[...] = loaded
        return array
    saved = from_json(data)
    dtype, values = numpy_dtype(saved["dtype"]), saved["values"]
    flat = np.array(values, object) if dtype.kind == "O" else np.frombuffer(base64.b64decode(values), dtype)
    return flat.reshape(saved["shape"])


def op_bytes(op: HostOp) -> bytes:
    """Serialise an operator with its subgraphs."""
    return json.dumps(op, default=_encode).encode()


def load_op(data: bytes) -> HostOp:
    """Read an operator that `op_bytes` wrote. Raises ValueError, TypeError or KeyError for other data."""
    require_few_values(data)
    op = json.loads(data, object_hook=_decode)
    if not isinstance(op, HostOp):
        raise ValueError("not an operator")
    return op


def _encode(value: Any) -> dict[str, Any]:
    """Convert operators, subgraphs, bytes and arrays to JSON objects that name their type under KIND_KEY."""
    if isinstance(value, HostOp | Body):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {KIND_KEY: type(value).__name__, **fields}
    if isinstance(value, bytes):
        return {KIND_KEY: "bytes", "base64": base64.b64encode(value).decode()}
    if isinstance(value, np.ndarray):
        return {KIND_KEY: "array", "base64": base64.b64encode(array_bytes(value)).decode()}
    raise TypeError(f"{type(value).__name__} cannot be saved in a Program")


def _decode(fields: dict[str, Any]) -> Any:
    """Convert JSON objects that name a type under KIND_KEY back; other objects stay as they are."""
    kind = fields.get(KIND_KEY)
    if kind in ("bytes", "array"):
        data = base64.b64decode(fields["base64"])
        return data if kind == "bytes" else load_array(data)
    if kind not in ("HostOp", "Body"):
        return fields
    del fields[KIND_KEY]
    plain: dict[str, Any] = {name: tuple(field) if isinstance(field, list) else field for name, field in fields.items()}
    if kind == "HostOp":
        return HostOp(**plain)
    if "types" in fields:
        plain["types"] = from_plain(_field_types(Body)["types"], fields["types"], "types")
    return Body(**plain)


def from_plain(kind: Any, value: Any, name_of_value: str = "value", **more: Any) -> Any:
    """Convert plain data of JSON to the type `kind`, checking that it fits.

    kind: a dataclass, tuple, list, dict, str, number, bool, or a union of these. name_of_value: for errors. more:
    fields of the dataclass that the JSON does not hold. Raises ValueError where `value` does not fit.

    >>> from_plain(tuple[int, ...], [1, 2])
    (1, 2)
    """
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        hints = _field_types(typing.cast(Any, kind))
        _require_type(value, dict, name_of_value)
        fields = {name: from_plain(hints.get(name, types.NoneType), element, name) for name, element in value.items()}
        return typing.cast(Any, kind)(**fields, **more)
    if origin is types.UnionType and types.NoneType not in inner:
        return _require_type(value, inner, name_of_value)
    if origin is types.UnionType:
        return None if value is None else from_plain(inner[0], value, name_of_value)
    if origin is dict:
        return {
            name: from_plain(inner[1], element, name_of_value)
            for name, element in _require_type(value, dict, name_of_value).items()
        }
    if origin is list:
        return [from_plain(inner[0], element, name_of_value) for element in _require_type(value, list, name_of_value)]
    if origin is tuple:
        _require_type(value, list, name_of_value)
        kinds = inner[:1] * len(value) if inner[-1] is Ellipsis else inner
        if len(kinds) != len(value):
            raise ValueError(f"{name_of_value} has {len(value)} entries")
        return tuple(from_plain(element, part, name_of_value) for element, part in zip(kinds, value))
    return (
        float(_require_type(value, int | float, name_of_value))
        if kind is float
        else _require_type(value, kind, name_of_value)
    )


@cache
def _field_types(kind: Any) -> dict[str, Any]:
    """Return the type of each field of a dataclass; cached, because Python evaluates the annotations at each call."""
    return typing.get_type_hints(kind)


def _require_type(value: Any, kind: Any, name_of_value: str) -> Any:
    """Return `value`; raise ValueError where it is not of the type `kind`. A bool does not count as an int."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{name_of_value} is {str(value)[:50]!r}")
    return value
