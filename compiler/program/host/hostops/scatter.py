"""Operators that pick, order and scatter elements."""

from __future__ import annotations

import numpy as np

from celosia.compiler.program.host.hostops.registry import Array, host
from celosia.compiler.program.host.op import HostOp

REDUCE = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}


@host("NonZero")
def nonzero(op: HostOp, x: Array) -> Array:
    """[axes, count] int64, places of elements that are not 0."""
    return np.array(np.nonzero(np.atleast_1d(x)), np.int64)[: max(x.ndim, 0) or 0 if x.ndim == 0 else None]


@host("Compress")
def compress(op: HostOp, x: Array, keep: Array) -> Array:
    """What `keep` keeps, along an axis or of all."""
    return np.compress(keep, x, op.attr("axis"))


@host("ScatterElements", "Scatter")
def scatter_elements(op: HostOp, x: Array, indices: Array, updates: Array) -> Array:
    """`x` with updates along an axis, added, multiplied or put. HostError for an index out of range."""
    axis = op.attr("axis", 0)
    out = x.copy()
    chosen = _wrap(op, indices, x.shape[axis])
    places: list[Array] = list(np.indices(indices.shape, sparse=True))
    places[axis] = chosen
    _put(op, out, tuple(places), updates)
    return out


@host("ScatterND")
def scatter_nd(op: HostOp, x: Array, indices: Array, updates: Array) -> Array:
    """`x` with slices put, added or multiplied. HostError for an index out of range."""
    out = x.copy()
    columns = np.moveaxis(indices, -1, 0)
    _put(op, out, tuple(_wrap(op, column, n) for column, n in zip(columns, x.shape)), updates)
    return out


def _put(op: HostOp, out: Array, places: tuple[Array, ...], updates: Array) -> None:
    how = op.attr("reduction", "none")
    if how == "none":
        out[places] = updates
    elif how in REDUCE:
        REDUCE[how].at(out, places, updates)
    else:
        raise op.fail(f"there is no reduction {how!r}")


def _wrap(op: HostOp, indices: Array, n: int) -> Array:
    if indices.size and (indices.min() < -n or indices.max() >= n):
        raise op.fail(f"an index is outside of an axis of {n}")
    return np.where(indices < 0, indices + n, indices).astype(np.int64)


@host("TensorScatter")
def tensor_scatter(op: HostOp, past: Array, update: Array, starts: Array | None = None) -> Array:
    """A cache with new rows from `starts` on. HostError where they reach past its end."""
    axis = op.attr("axis", -2) % past.ndim
    out = np.moveaxis(past, axis, 1).copy()
    new = np.moveaxis(update, axis, 1)
    size = out.shape[1]
    for b in range(out.shape[0]):
        places = (0 if starts is None else int(starts[b])) + np.arange(new.shape[1])
        if op.attr("mode", "linear") == "circular":
            places %= size
        elif places.size and places.max() >= size:
            raise op.fail(f"it writes past the end of {size} positions")
        out[b, places] = new[b]
    return np.moveaxis(out, 1, axis)


@host("TopK")
def top_k(op: HostOp, x: Array, count: Array | None = None) -> tuple[Array, Array]:
    """Values and int64 indices, of equal ones the first first. HostError where there are not so many."""
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
    """Values, and int64: where each is first, which one each element is, how often each comes."""
    axis = op.attr("axis")
    values, first, back, count = np.unique(x, True, True, True, axis=axis)
    back = back.reshape(-1)
    if not op.attr("sorted", 1):
        order = np.argsort(first)
        rank = np.argsort(order)
        values, first, back, count = np.take(values, order, axis or 0), first[order], rank[back], count[order]
    return values, *(each.astype(np.int64) for each in (first, back, count))


@host("CumSum", "CumProd")
def cumulative(op: HostOp, x: Array, axis: Array) -> Array:
    """Running sums or products along an axis."""
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
    """In float32 where the type is a smaller float."""
    kind = inputs[0].dtype
    if kind.name not in ("float32", "float64") and kind.kind not in "iu":
        inputs = tuple(each.astype(np.float32) for each in inputs)
    result: Array = np.einsum(op.attrs["equation"].replace(" ", ""), *inputs, optimize=True)
    return np.asarray(result).astype(kind)


@host("Det")
def det(op: HostOp, x: Array) -> Array:
    """For each matrix [..., n, n]."""
    return np.asarray(np.linalg.det(x)).astype(x.dtype)


@host("Inverse", domain="com.microsoft")
def inverse(op: HostOp, x: Array) -> Array:
    """For each matrix [..., n, n]."""
    return np.asarray(np.linalg.inv(x)).astype(x.dtype)


@host("ArrayFeatureExtractor", domain="ai.onnx.ml")
def array_feature_extractor(op: HostOp, x: Array, indices: Array) -> Array:
    """Some of the last axis."""
    out = np.take(x, indices.reshape(-1), axis=-1)
    return out.reshape(1, -1) if x.ndim == 1 else out


@host("Binarizer", domain="ai.onnx.ml")
def binarizer(op: HostOp, x: Array) -> Array:
    """1 above the threshold, else 0."""
    return np.asarray(x > op.attr("threshold", 0.0)).astype(x.dtype)
