"""Operators on shapes and views, which run in numpy since compiling a kernel would take longer than they take."""

from __future__ import annotations

import numpy as np

from celosia.compiler.program.host.hostops.host_registry import Array, Value, host, int_list
from celosia.compiler.program.host.op import HostOp, check_size


@host("Shape", first=True)
def shape(op: HostOp, x: Array) -> Array:
    """Return the shape, or a slice of it, as int64 [axes]."""
    return np.array(x.shape[op.attr("start", 0) : op.attr("end")], np.int64)


@host("Size", first=True)
def size(op: HostOp, x: Array) -> Array:
    """Return the number of elements, as int64 []."""
    return np.array(x.size, np.int64)


@host("Identity", first=True)
def identity(op: HostOp, x: Value) -> Value:
    """Return the input."""
    return x


@host("Reshape", first=True)
def reshape(op: HostOp, x: Array, new_shape: Array | None = None) -> Array:
    """Reshape; one size may be -1, and 0 copies the input's size unless `allowzero` is set."""
    dims = int_list(op.attrs["shape"] if new_shape is None else new_shape)
    if not op.attr("allowzero", 0):
        dims = [x.shape[d] if n == 0 else n for d, n in enumerate(dims)]
    return x.reshape(dims)


@host("Flatten", first=True)
def flatten(op: HostOp, x: Array) -> Array:
    """Flatten to a matrix: the axes before `axis` become its rows."""
    axis = op.attr("axis", 1)
    axis = axis + x.ndim if axis < 0 else axis
    return x.reshape(int(np.prod(x.shape[:axis])), int(np.prod(x.shape[axis:])))


@host("Squeeze", first=True)
def squeeze(op: HostOp, x: Array, axes: Array | None = None) -> Array:
    """Remove `axes`, by default all of size 1."""
    chosen = op.attr("axes", ()) if axes is None else axes
    return x.squeeze(tuple(int_list(chosen)) or None)


@host("Unsqueeze", first=True)
def unsqueeze(op: HostOp, x: Array, axes: Array | None = None) -> Array:
    """Insert axes of size 1."""
    return np.expand_dims(x, tuple(int_list(op.attrs["axes"] if axes is None else axes)))


@host("ConstantOfShape", first=True)
def constant_of_shape(op: HostOp, dims: Array) -> Array:
    """Fill an array with one value. Raises HostError where memory does not suffice."""
    value = np.asarray(op.attr("value", np.zeros(1, np.float32))).reshape(-1)[0]
    dims_list = int_list(dims)
    total = 1
    for n in dims_list:
        total *= n
    check_size(total * value.itemsize, f"{op.label}: its output {dims_list}")
    return np.full(dims_list, value)


@host("Range", first=True)
def range_(op: HostOp, start: Array, limit: Array, delta: Array) -> Array:
    """Count from `start` to `limit`, exclusive. Raises HostError where there is no end, or memory does not suffice."""
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
    """Concatenate along an axis."""
    return np.concatenate(values, axis=op.attrs["axis"])
