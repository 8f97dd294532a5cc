"""Arrays, host operators and dataclasses from a Program's file, .npy and JSON: numpy alone reads them."""

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
from celosia.compiler.program.host.kernel import empty
from celosia.compiler.program.host.op import Body, HostOp
from celosia.plain import from_json, require_few_values

Array = NDArray[Any]
KIND = "<kind>"
"""The key that no attribute has."""


def array_bytes(array: Array) -> bytes:
    """The array as a .npy file; as JSON where numpy has no such element type, or it holds strings.

    >>> load_array(array_bytes(np.array(["a", "b"], object))).tolist()
    ['a', 'b']
    """
    if array.dtype.isbuiltin != 2 and array.dtype.kind != "O":
        buffer = io.BytesIO()
        np.save(buffer, array, allow_pickle=False)
        return buffer.getvalue()
    values = (
        [str(each) for each in array.reshape(-1)]
        if array.dtype.kind == "O"
        else base64.b64encode(array.tobytes()).decode()
    )
    return json.dumps({"dtype": array.dtype.name, "shape": array.shape, "values": values}).encode()


def load_array(data: bytes) -> Array:
    """The array that `array_bytes` made. ValueError where `data` is not one."""
    if data.startswith(b"\x93NUMPY"):
        found: Array = np.load(io.BytesIO(data), allow_pickle=False)
        array = empty(found.dtype, found.shape)
        array[...] = found
        return array
    saved = from_json(data)
    dtype, values = numpy_dtype(saved["dtype"]), saved["values"]
    flat = np.array(values, object) if dtype.kind == "O" else np.frombuffer(base64.b64decode(values), dtype)
    return flat.reshape(saved["shape"])


def op_bytes(op: HostOp) -> bytes:
    """The operator with its subgraphs."""
    return json.dumps(op, default=_encode).encode()


def load_op(data: bytes) -> HostOp:
    """The operator that `op_bytes` made. ValueError, TypeError or KeyError where `data` is not one."""
    require_few_values(data)
    op = json.loads(data, object_hook=_decode)
    if not isinstance(op, HostOp):
        raise ValueError("not an operator")
    return op


def _encode(value: Any) -> dict[str, Any]:
    if isinstance(value, HostOp | Body):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {KIND: type(value).__name__, **fields}
    if isinstance(value, bytes):
        return {KIND: "bytes", "base64": base64.b64encode(value).decode()}
    if isinstance(value, np.ndarray):
        return {KIND: "array", "base64": base64.b64encode(array_bytes(value)).decode()}
    raise TypeError(f"{type(value).__name__} cannot be saved in a Program")


def _decode(fields: dict[str, Any]) -> Any:
    kind = fields.get(KIND)
    if kind in ("bytes", "array"):
        data = base64.b64decode(fields["base64"])
        return data if kind == "bytes" else load_array(data)
    if kind not in ("HostOp", "Body"):
        return fields
    del fields[KIND]
    plain: dict[str, Any] = {name: tuple(each) if isinstance(each, list) else each for name, each in fields.items()}
    if kind == "HostOp":
        return HostOp(**plain)
    if "types" in fields:
        plain["types"] = make(_hints(Body)["types"], fields["types"], "types")
    return Body(**plain)


def make(kind: Any, value: Any, what: str = "value", **given: Any) -> Any:
    """What JSON holds as the type `kind`: a dataclass, tuple, list, dict, str, int, float or bool, or one of several.

    given: fields of the dataclass that JSON does not hold. ValueError where `value` is something else.

    >>> make(tuple[int, ...], [1, 2])
    (1, 2)
    """
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        hints = _hints(typing.cast(Any, kind))
        _is(value, dict, what)
        fields = {name: make(hints.get(name, types.NoneType), each, name) for name, each in value.items()}
        return typing.cast(Any, kind)(**fields, **given)
    if origin is types.UnionType and types.NoneType not in inner:
        return _is(value, inner, what)
    if origin is types.UnionType:
        return None if value is None else make(inner[0], value, what)
    if origin is dict:
        return {name: make(inner[1], each, what) for name, each in _is(value, dict, what).items()}
    if origin is list:
        return [make(inner[0], each, what) for each in _is(value, list, what)]
    if origin is tuple:
        _is(value, list, what)
        kinds = inner[:1] * len(value) if inner[-1] is Ellipsis else inner
        if len(kinds) != len(value):
            raise ValueError(f"{what} has {len(value)} entries")
        return tuple(make(each, part, what) for each, part in zip(kinds, value))
    return float(_is(value, int | float, what)) if kind is float else _is(value, kind, what)


@cache
def _hints(kind: Any) -> dict[str, Any]:
    """The types of a dataclass' fields: Python reads their text anew whenever it is asked."""
    return typing.get_type_hints(kind)


def _is(value: Any, kind: Any, what: str) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{what} is {str(value)[:50]!r}")
    return value
