"""Operators on shapes and views: a kernel would take longer to make than they take to run."""

from __future__ import annotations

import numpy as np

from celosia.compiler.program.host.hostops.registry import Array, Value, host, int_list
from celosia.compiler.program.host.op import HostOp, check_size


@host("Shape", first=True)
def shape(op: HostOp, x: Array) -> Array:
    """int64 [axes], or some of them."""
    return np.array(x.shape[op.attr("start", 0) : op.attr("end")], np.int64)


@host("Size", first=True)
def size(op: HostOp, x: Array) -> Array:
    """int64 [], how many elements."""
    return np.array(x.size, np.int64)


@host("Identity", first=True)
def identity(op: HostOp, x: Value) -> Value:
    """What it is given."""
    return x


@host("Reshape", first=True)
def reshape(op: HostOp, x: Array, wanted: Array | None = None) -> Array:
    """Reshape with one size -1, and with 0 the input's, where `allowzero` does not say otherwise."""
    dims = int_list(op.attrs["shape"] if wanted is None else wanted)
    if not op.attr("allowzero", 0):
        dims = [x.shape[d] if n == 0 else n for d, n in enumerate(dims)]
    return x.reshape(dims)


@host("Flatten", first=True)
def flatten(op: HostOp, x: Array) -> Array:
    """A matrix: axes before `axis` are its rows."""
    axis = op.attr("axis", 1)
    axis = axis + x.ndim if axis < 0 else axis
    return x.reshape(int(np.prod(x.shape[:axis])), int(np.prod(x.shape[axis:])))


@host("Squeeze", first=True)
def squeeze(op: HostOp, x: Array, axes: Array | None = None) -> Array:
    """Without `axes`, or where none are given without all of size 1."""
    chosen = op.attr("axes", ()) if axes is None else axes
    return x.squeeze(tuple(int_list(chosen)) or None)


@host("Unsqueeze", first=True)
def unsqueeze(op: HostOp, x: Array, axes: Array | None = None) -> Array:
    """With new axes of size 1."""
    return np.expand_dims(x, tuple(int_list(op.attrs["axes"] if axes is None else axes)))


@host("ConstantOfShape", first=True)
def constant_of_shape(op: HostOp, dims: Array) -> Array:
    """One value everywhere. HostError where there is no memory for so many."""
    value = np.asarray(op.attr("value", np.zeros(1, np.float32))).reshape(-1)[0]
    wanted = int_list(dims)
    total = 1
    for n in wanted:
        total *= n
    check_size(total * value.itemsize, f"{op.label}: its output {wanted}")
    return np.full(wanted, value)


@host("Range", first=True)
def range_(op: HostOp, start: Array, limit: Array, delta: Array) -> Array:
    """From `start`, without `limit`. HostError where there is no end or no memory for it."""
    first, last, step = (v.reshape(-1)[0] for v in (start, limit, delta))
    if not step:
        raise op.fail("delta is 0")
    steps = np.ceil((last - first) / step)
    if not np.isfinite(steps):
        raise op.fail(f"there is no range from {first} to {last} in steps of {step}")
    count = max(0, int(steps))
    check_size(count * start.itemsize, f"{op.label}: its output [{count}]")
    return np.asarray(first + np.arange(count, dtype=start.dtype) * step).astype(start.dtype)


@host("Concat", first=True)
def concat(op: HostOp, *values: Array) -> Array:
    """Along an axis."""
    return np.concatenate(values, axis=op.attrs["axis"])
