"""Sequences (Python lists) and optionals (None where empty)."""

from __future__ import annotations

import numpy as np

from celosia.compiler.program.host.hostops.host_registry import Array, Value, host, int_list
from celosia.compiler.program.host.op import HostOp


@host("SequenceEmpty")
def empty(op: HostOp) -> list[Value]:
    """Create an empty sequence."""
    return []


@host("SequenceConstruct")
def construct(op: HostOp, *values: Value) -> list[Value]:
    """Create a sequence of the inputs."""
    return list(values)


def _position(op: HostOp, values: list[Value], index: Array | None, end: int) -> int:
    """Convert an index, negative from the end, to a position. Raises HostError where it is out of range."""
    position = end if index is None else int(index.reshape(-1)[0])
    if not -len(values) <= position <= end:
        raise op.fail(f"position {position} of a sequence of {len(values)}")
    return position + len(values) if position < 0 else position


@host("SequenceInsert")
def insert(op: HostOp, values: list[Value], value: Value, index: Array | None = None) -> list[Value]:
    """Insert `value` at `index`, by default at the end. Raises HostError where it is out of range."""
    position = _position(op, values, index, len(values))
    return [*values[:position], value, *values[position:]]


@host("SequenceErase")
def erase(op: HostOp, values: list[Value], index: Array | None = None) -> list[Value]:
    """Remove the element at `index`, by default the last. Raises HostError where it is out of range."""
    position = _position(op, values, index, len(values) - 1)
    return values[:position] + values[position + 1 :]


@host("SequenceAt")
def at(op: HostOp, values: list[Value], index: Array) -> Value:
    """Return the element at `index`. Raises HostError where it is out of range."""
    return values[_position(op, values, index, len(values) - 1)]


@host("SequenceLength")
def length(op: HostOp, values: list[Value]) -> Array:
    """Return the number of elements, as int64 []."""
    return np.array(len(values), np.int64)


@host("SplitToSequence")
def split(op: HostOp, x: Array, sizes: Array | None = None) -> list[Value]:
    """Split `x` along an axis into parts of these sizes, of one size, or of 1.

    Raises HostError where sizes do not add up.
    """
    axis = op.attr("axis", 0)
    total = x.shape[axis]
    if sizes is None:
        parts = np.split(x, total, axis) if total else []
        return parts if op.attr("keepdims", 1) else [part.squeeze(axis) for part in parts]
    if sizes.ndim == 0:
        step = int(sizes)
        return np.split(x, range(step, total, step), axis)
    if sum(int_list(sizes)) != total:
        raise op.fail(f"sizes {int_list(sizes)} of an axis of {total}")
    return np.split(x, np.cumsum(sizes)[:-1], axis)


@host("ConcatFromSequence")
def concat(op: HostOp, values: list[Value]) -> Array:
    """Concatenate all elements along an axis, or stack them along a new one."""
    join = np.stack if op.attr("new_axis", 0) else np.concatenate
    return np.asarray(join(values, axis=op.attrs["axis"]))


@host("Optional")
def optional(op: HostOp, value: Value = None) -> Value:
    """Create an optional of the value, or an empty one."""
    return value


@host("OptionalHasElement")
def has_element(op: HostOp, value: Value = None) -> Array:
    """Return whether the optional is not empty, as bool []."""
    return np.array(value is not None)


@host("OptionalGetElement")
def get_element(op: HostOp, value: Value) -> Value:
    """Return the value of an optional. Raises HostError where it is empty."""
    if value is None:
        raise op.fail("the optional is empty")
    return value
