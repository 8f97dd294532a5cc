"""Sequences (Python lists) and optionals (None where empty)."""

from __future__ import annotations

import numpy as np

from celosia.compiler.program.host.hostops.registry import Array, Value, host, int_list
from celosia.compiler.program.host.op import HostOp


@host("SequenceEmpty")
def empty(op: HostOp) -> list[Value]:
    """[]."""
    return []


@host("SequenceConstruct")
def construct(op: HostOp, *values: Value) -> list[Value]:
    """A list of the inputs."""
    return list(values)


def _position(op: HostOp, values: list[Value], place: Array | None, end: int) -> int:
    at = end if place is None else int(place.reshape(-1)[0])
    if not -len(values) <= at <= end:
        raise op.fail(f"position {at} of a sequence of {len(values)}")
    return at + len(values) if at < 0 else at


@host("SequenceInsert")
def insert(op: HostOp, values: list[Value], value: Value, place: Array | None = None) -> list[Value]:
    """With `value` at `place`, by default the end. HostError for one out of range."""
    at = _position(op, values, place, len(values))
    return [*values[:at], value, *values[at:]]


@host("SequenceErase")
def erase(op: HostOp, values: list[Value], place: Array | None = None) -> list[Value]:
    """Without the one at `place`, by default the last. HostError for one out of range."""
    at = _position(op, values, place, len(values) - 1)
    return values[:at] + values[at + 1 :]


@host("SequenceAt")
def at(op: HostOp, values: list[Value], place: Array) -> Value:
    """The one at `place`, from the end where that is negative. HostError for one out of range."""
    return values[_position(op, values, place, len(values) - 1)]


@host("SequenceLength")
def length(op: HostOp, values: list[Value]) -> Array:
    """int64 []."""
    return np.array(len(values), np.int64)


@host("SplitToSequence")
def split(op: HostOp, x: Array, sizes: Array | None = None) -> list[Value]:
    """Parts of `x` along an axis: of these sizes, of one size, or of 1. HostError where sizes do not add up."""
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
    """All of them, along an axis of theirs or a new one."""
    join = np.stack if op.attr("new_axis", 0) else np.concatenate
    return np.asarray(join(values, axis=op.attrs["axis"]))


@host("Optional")
def optional(op: HostOp, value: Value = None) -> Value:
    """The value, or None."""
    return value


@host("OptionalHasElement")
def has_element(op: HostOp, value: Value = None) -> Array:
    """bool []."""
    return np.array(value is not None)


@host("OptionalGetElement")
def get_element(op: HostOp, value: Value) -> Value:
    """The value. HostError where there is none."""
    if value is None:
        raise op.fail("the optional is empty")
    return value
