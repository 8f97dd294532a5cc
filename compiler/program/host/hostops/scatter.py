"""Operators that select, sort and scatter elements, and a few of linear algebra."""

from __future__ import annotations

from math import prod

import numpy as np

from celosia.compiler.program.host.op import Array, HostOp, host

REDUCTIONS = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}
"""Attribute `reduction` of scattering operators -> function that combines an element with an update."""


@host("NonZero")
def nonzero(op: HostOp, x: Array) -> Array:
    """Return the indices of elements that are not 0: [axes, count] int64."""
    return np.array(np.nonzero(np.atleast_1d(x)), np.int64)[: x.ndim]


@host("Compress")
def compress(op: HostOp, x: Array, keep: Array) -> Array:
    """Select the elements where `keep` is true, along an axis or of the flattened array."""
    return np.compress(keep, x, op.attr("axis"))


@host("ScatterElements", "Scatter")
def scatter_elements(op: HostOp, x: Array, indices: Array, updates: Array) -> Array:
    """Write updates at indices along an axis of `x`, or combine them. Raises HostError for an index out of range."""
    axis = op.attr("axis", 0)
    out = x.copy()
    wrapped = _wrap_negative(op, indices, x.shape[axis])
    index: list[Array] = list(np.indices(indices.shape, sparse=True))
    index[axis] = wrapped
    _scatter(op, out, tuple(index), updates)
    return out


@host("ScatterND")
def scatter_nd(op: HostOp, x: Array, indices: Array, updates: Array) -> Array:
    """Write slices at rows of indices of `x`, or combine them. Raises HostError for an index out of range."""
    out = x.copy()
    columns = np.moveaxis(indices, -1, 0)
    _scatter(op, out, tuple(_wrap_negative(op, column, n) for column, n in zip(columns, x.shape)), updates)
    return out


def _scatter(op: HostOp, out: Array, index: tuple[Array, ...], updates: Array) -> None:
    """Write `updates` to `out` at an index, or combine them by the attribute `reduction`."""
    reduction = op.attr("reduction", "none")
    if reduction == "none":
        out[index] = updates
    elif reduction in REDUCTIONS:  # on flat arrays, for which numpy is faster
        rows = np.ravel_multi_index(np.broadcast_arrays(*index), out.shape[: len(index)])
        width = prod(out.shape[len(index) :])
        elements = rows.reshape(-1, 1) * width + np.arange(width)
        REDUCTIONS[reduction].at(out.reshape(-1), elements.reshape(-1), updates.reshape(-1))
    else:
        raise op.fail(f"there is no reduction {reduction!r}")


def _wrap_negative(op: HostOp, indices: Array, n: int) -> Array:
    """Convert negative indices to positive ones. Raises HostError for an index out of range."""
    if indices.size and (indices.min() < -n or indices.max() >= n):
        raise op.fail(f"an index is outside of an axis of {n}")
    return np.where(indices < 0, indices + n, indices).astype(np.int64)


@host("TensorScatter")
def tensor_scatter(op: HostOp, past: Array, update: Array, starts: Array | None = None) -> Array:
    """Write new rows to a key-value cache from `starts` on. Raises HostError where they reach past its end."""
    axis = op.attr("axis", -2) % past.ndim
    out = np.moveaxis(past, axis, 1).copy()
    new = np.moveaxis(update, axis, 1)
    size = out.shape[1]
    for b in range(out.shape[0]):
        positions = (0 if starts is None else int(starts[b])) + np.arange(new.shape[1])
        if op.attr("mode", "linear") == "circular":
            positions %= size
        elif positions.size and positions.max() >= size:
            raise op.fail(f"it writes past the end of {size} positions")
        out[b, positions] = new[b]
    return np.moveaxis(out, 1, axis)


@host("TopK")
def top_k(op: HostOp, x: Array, count: Array | None = None) -> tuple[Array, Array]:
    """Return the largest or smallest values and their int64 indices; equal ones in order.

    Raises HostError where k is too large.
    """
    axis = op.attr("axis", -1)
    k = int(op.attrs["k"] if count is None else count.reshape(-1)[0])
    if not 0 <= k <= x.shape[axis]:
        raise op.fail(f"k = {k} of an axis of {x.shape[axis]}")
    if op.attr("largest", 1):  # equal elements in order of their index
        order = x.shape[axis] - 1 - np.flip(np.argsort(np.flip(x, axis), axis, kind="stable"), axis)
    else:
        order = np.argsort(x, axis, kind="stable")
    chosen = np.take(order, np.arange(k), axis)
    return np.take_along_axis(x, chosen, axis), chosen.astype(np.int64)


@host("Unique")
def unique(op: HostOp, x: Array) -> tuple[Array, ...]:
    """Return distinct values, then as int64 their first positions, the inverse index, and counts."""
    axis = op.attr("axis")
    values, first, back, count = np.unique(x, True, True, True, axis=axis)
    back = back.reshape(-1)
    if not op.attr("sorted", 1):
        order = np.argsort(first)
        rank = np.argsort(order)
        values, first, back, count = np.take(values, order, axis or 0), first[order], rank[back], count[order]
    return values, *(positions.astype(np.int64) for positions in (first, back, count))


@host("CumSum", "CumProd")
def cumulative(op: HostOp, x: Array, axis: Array) -> Array:
    """Compute running sums or products along an axis."""
    along = int(axis.reshape(-1)[0])
    run = np.cumsum if op.op == "CumSum" else np.cumprod
    if op.attr("reverse", 0):
        x = np.flip(x, along)
    out = run(x, along, dtype=x.dtype)
    if op.attr("exclusive", 0) and out.size:
        start = np.full_like(np.take(x, [0], along), op.op == "CumProd")
        out = np.concatenate([start, np.take(out, np.arange(x.shape[along] - 1), along)], along)
    return np.flip(out, along) if op.attr("reverse", 0) else out


@host("Einsum")
def einsum(op: HostOp, *inputs: Array) -> Array:
    """Evaluate an Einstein sum, in float32 where the type is a smaller float."""
    kind = inputs[0].dtype
    if kind.name not in ("float32", "float64") and kind.kind not in "iu":
        inputs = tuple(operand.astype(np.float32) for operand in inputs)
    result: Array = np.einsum(op.attrs["equation"].replace(" ", ""), *inputs, optimize=True)
    return np.asarray(result).astype(kind)


@host("Det")
def det(op: HostOp, x: Array) -> Array:
    """Compute the determinant of each matrix [..., n, n]."""
    return np.asarray(np.linalg.det(x)).astype(x.dtype)


@host("Inverse", domain="com.microsoft")
def inverse(op: HostOp, x: Array) -> Array:
    """Invert each matrix [..., n, n]."""
    return np.asarray(np.linalg.inv(x)).astype(x.dtype)


@host("ArrayFeatureExtractor", domain="ai.onnx.ml")
def array_feature_extractor(op: HostOp, x: Array, indices: Array) -> Array:
    """Select elements of the last axis."""
    out = np.take(x, indices.reshape(-1), axis=-1)
    return out.reshape(1, -1) if x.ndim == 1 else out


@host("Binarizer", domain="ai.onnx.ml")
def binarizer(op: HostOp, x: Array) -> Array:
    """Return 1 for values above the threshold, else 0."""
    return np.asarray(x > op.attr("threshold", 0.0)).astype(x.dtype)
