"""Operators that kernels compute, too, but that numpy computes sooner than a kernel is compiled.

1. Operators on tensors whose sizes are known only at run time (`sized`): detected boxes, a growing cache. A kernel is
   compiled for one shape, which takes longer than these functions run. A function returns NotImplemented for inputs on
   which numpy differs from ONNX or onnxruntime; then a kernel is compiled.
2. Operators on shapes and views, which always run in numpy (`host` with prefers_numpy=True).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from celosia.compiler.program.host.float32_math import logistic
from celosia.compiler.program.host.op import (
    HOST,
    Array,
    Function,
    HostOp,
    Value,
    check_size,
    host,
    int_list,
    numpy_type,
)
from celosia.compiler.program.host.shape_rules import broadcast, slice_positions

NUMPY_TYPES = frozenset(
    ["float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool"]
)
"""Element types for which numpy computes as ONNX defines."""
_SIZED: dict[str, tuple[int, Function]] = {}
"""Operator -> the first opset with this meaning, and the function."""


def sized_function(op: HostOp) -> Function | None:
    """Return the function that computes `op` for any sizes, called like those of HOST; None where there is none."""
    since, function = _SIZED.get(op.op, (0, None)) if op.domain in ("", "ai.onnx") else (0, None)
    return function if op.opset >= since else None


def sized_names() -> Sequence[str]:
    """Return the names of the operators that have a function for any sizes."""
    return sorted(_SIZED)


def sized(*names: str, since: int = 7) -> Callable[[Function], Function]:
    """Return a decorator that registers a function for the operators `names`. since: the first opset with this meaning.

    The registered function returns NotImplemented for element types that are not in NUMPY_TYPES.
    """

    def register(function: Function) -> Function:
        def guarded(op: HostOp, *inputs: Value) -> Any:
            if any(not isinstance(x, np.ndarray) or x.dtype.name not in NUMPY_TYPES for x in inputs if x is not None):
                return NotImplemented
            with np.errstate(all="ignore"):
                return function(op, *inputs)

        _SIZED.update(dict.fromkeys(names, (since, guarded)))
        return function

    return register


_BINARY: dict[str, Callable[..., Any]] = {
    "Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Equal": np.equal, "Less": np.less, "And": np.logical_and,
    "LessOrEqual": np.less_equal, "Greater": np.greater, "GreaterOrEqual": np.greater_equal, "Or": np.logical_or,
    "Xor": np.logical_xor,
}  # fmt: skip
"""Operator of two tensors -> numpy function."""
_UNARY: dict[str, Callable[..., Any]] = {
    "Abs": np.abs, "Ceil": np.ceil, "Cos": np.cos, "Exp": np.exp, "Floor": np.floor, "Log": np.log, "Neg": np.negative,
    "Not": np.logical_not, "Round": np.rint, "Sign": np.sign, "Sin": np.sin, "Sqrt": np.sqrt, "Tanh": np.tanh,
}  # fmt: skip
"""Operator of one tensor -> numpy function."""


@sized(*_BINARY)
def binary(op: HostOp, a: Array, b: Array) -> Any:
    """Compute arithmetic, comparisons and logic of two tensors, broadcast."""
    return _BINARY[op.op](a, b)


@sized(*_UNARY)
def unary(op: HostOp, x: Array) -> Any:
    """Compute a function of each element; rounding leaves integers unchanged."""
    if x.dtype.kind in "iu" and op.op in ("Ceil", "Floor", "Round"):
        return x
    return _UNARY[op.op](x)


@sized("Div")
def div(op: HostOp, a: Array, b: Array) -> Any:
    """Divide; integers round towards zero."""
    if a.dtype.kind == "f":
        return a / b
    if not np.all(b):
        return NotImplemented
    quotient = a // b
    return quotient + ((quotient < 0) & (quotient * b != a)).astype(a.dtype)


@sized("Reciprocal")
def reciprocal(op: HostOp, x: Array) -> Any:
    """Compute 1 / x."""
    return x.dtype.type(1) / x


@sized("Relu")
def relu(op: HostOp, x: Array) -> Any:
    """Compute max(x, 0)."""
    return np.maximum(x, x.dtype.type(0))


@sized("Sigmoid")
def sigmoid(op: HostOp, x: Array) -> Any:
    """Compute 1 / (1 + exp(-x))."""
    return logistic(x)


@sized("Max", "Min", since=8)
def extreme(op: HostOp, *inputs: Array) -> Any:
    """Take the largest or smallest of all inputs, element by element."""
    pick, result = (np.maximum if op.op == "Max" else np.minimum), inputs[0]
    for x in inputs[1:]:
        result = pick(result, x)
    return result


@sized("Clip", since=11)
def clip(op: HostOp, x: Array, low: Array | None = None, high: Array | None = None) -> Any:
    """Clamp `x`. A bound that is NaN has no effect, and a missing one is the largest finite number."""
    if x.dtype.kind == "f":
        least, most = (np.array(limit, x.dtype) for limit in (np.finfo(x.dtype).min, np.finfo(x.dtype).max))
        low, high = (least if low is None else low), (most if high is None else high)
    x = x if low is None else np.where(x < low.reshape(()), low.reshape(()), x)
    return x if high is None else np.where(x > high.reshape(()), high.reshape(()), x)


@sized("Where")
def where(op: HostOp, condition: Array, a: Array, b: Array) -> Any:
    """Select `a` where the condition holds, else `b`."""
    return np.where(condition, a, b)


@sized("MatMul")
def matmul(op: HostOp, a: Array, b: Array) -> Any:
    """Multiply matrices of the last two axes."""
    return np.matmul(a, b)


@sized("Softmax", "LogSoftmax", since=13)
def softmax(op: HostOp, x: Array) -> Any:
    """Compute Softmax or its logarithm along an axis.

    Returns NotImplemented where onnxruntime takes the logarithm of NaN.
    """
    axis = op.attr("axis", -1)
    if not x.size:
        return x
    if op.op == "LogSoftmax" and x.dtype == np.float64 and not np.isfinite(x).all():
        return NotImplemented
    shifted = x - x.max(axis, keepdims=True)
    total = np.exp(shifted).sum(axis, keepdims=True)
    return np.exp(shifted) / total if op.op == "Softmax" else shifted - np.log(total)


_REDUCE: dict[str, Callable[..., Any]] = {
    "ReduceSum": np.sum, "ReduceMean": np.mean, "ReduceMax": np.max, "ReduceMin": np.min, "ReduceProd": np.prod,
}  # fmt: skip
"""Operator -> numpy reduction."""
_WIDE = {(op, kind): {"dtype": np.float64} for op in ("ReduceSum", "ReduceProd") for kind in "iu"}
"""(operator, numpy kind of integers) -> arguments of the numpy function, which combines them in float64.

That is what ops/reductions.py does.
"""


@sized(*_REDUCE, since=11)
def reduce(op: HostOp, x: Array, axes: Array | None = None) -> Any:
    """Reduce axes. Returns NotImplemented where a sum of integers would be rounded, and for empty tensors."""
    chosen = op.attr("axes") if axes is None else int_list(axes)
    if not chosen and op.attr("noop_with_empty_axes", 0):
        return x
    if not x.size or (op.op == "ReduceMean" and x.dtype.kind != "f"):
        return NotImplemented
    along = tuple(chosen) if chosen else None
    y = _REDUCE[op.op](x, axis=along, keepdims=bool(op.attr("keepdims", 1)), **_WIDE.get((op.op, x.dtype.kind), {}))
    if y.dtype != x.dtype and np.any(np.abs(y) >= min(np.iinfo(x.dtype).max, 2**53)):
        return NotImplemented  # the float64 sum may be rounded
    return y.astype(x.dtype)


@sized("ArgMax", "ArgMin", since=11)
def arg(op: HostOp, x: Array) -> Any:
    """Return int64 indices of extremes, on ties the first. Returns NotImplemented where the last is asked for."""
    if op.attr("select_last_index", 0) or not x.size:
        return NotImplemented
    pick = np.argmax if op.op == "ArgMax" else np.argmin
    return pick(x, axis=op.attr("axis", 0), keepdims=bool(op.attr("keepdims", 1))).astype(np.int64)


# Operators that move elements ------------------------------------------------------------------------------------


@sized("Transpose", since=1)
def transpose(op: HostOp, x: Array) -> Any:
    """Permute the axes by `perm`, by default in reverse order."""
    return x.transpose(op.attr("perm"))


@sized("Expand", since=8)
def expand(op: HostOp, x: Array, shape: Array) -> Any:
    """Broadcast to `shape`. Raises HostError where memory does not suffice."""
    new_shape = broadcast(x.shape, tuple(int_list(shape)))
    check_size(int(np.prod(new_shape, dtype=np.float64)) * x.itemsize, f"{op.label}: its output {list(new_shape)}")
    return np.broadcast_to(x, new_shape)


@sized("Tile", since=6)
def tile(op: HostOp, x: Array, repeats: Array) -> Any:
    """Repeat along each axis. Raises HostError where memory does not suffice."""
    total = int(np.prod([n * r for n, r in zip(x.shape, int_list(repeats))], dtype=np.float64))
    check_size(total * x.itemsize, f"{op.label}: its output")
    return np.tile(x, int_list(repeats))


@sized("Gather", since=1)
def gather(op: HostOp, x: Array, indices: Array) -> Any:
    """Select slices along an axis."""
    return np.take(x, indices, axis=op.attr("axis", 0))


@sized("GatherElements", since=11)
def gather_elements(op: HostOp, x: Array, indices: Array) -> Any:
    """Select elements along an axis. Raises HostError where `indices` is larger than `x`."""
    axis = op.attr("axis", 0)
    if any(n > m for d, (n, m) in enumerate(zip(indices.shape, x.shape)) if d != axis % x.ndim):
        raise op.fail(f"indices {list(indices.shape)} reach beyond {list(x.shape)}")
    index: list[Array] = list(np.indices(indices.shape, sparse=True))
    index[axis] = indices
    return x[tuple(index)]


@sized("GatherND", since=11)
def gather_nd(op: HostOp, x: Array, indices: Array) -> Any:
    """Select slices at rows of indices. Returns NotImplemented with batches."""
    if op.attr("batch_dims", 0):
        return NotImplemented
    return x[tuple(np.moveaxis(indices, -1, 0))]


@sized("Slice", since=10)
def slice_(
    op: HostOp, x: Array, starts: Array, ends: Array, axes: Array | None = None, steps: Array | None = None
) -> Any:
    """Select a part of some axes. Raises HostError where there is no such axis."""
    first, last = int_list(starts), int_list(ends)
    along = list(range(len(first))) if axes is None else int_list(axes)
    strides = [1] * len(first) if steps is None else int_list(steps)
    parts = [slice(None)] * x.ndim
    for axis, start, end, step in zip(along, first, last, strides):
        if not -x.ndim <= axis < x.ndim:
            raise op.fail(f"axis {axis} of {x.ndim} dimensions")
        positions = slice_positions(x.shape[axis], start, end, step)
        parts[axis] = (
            slice(positions.start, positions.stop if positions.stop >= 0 else None, step) if positions else slice(0)
        )
    return x[tuple(parts)]


@sized("Split", since=13)
def split(op: HostOp, x: Array, sizes: Array | None = None) -> Any:
    """Split into these sizes, or into as many equal parts as there are outputs.

    Raises HostError where sizes do not add up.
    """
    axis = op.attr("axis", 0)
    if sizes is None:
        part_size = -(-x.shape[axis] // op.wanted)
        ends = [part_size * k for k in range(1, op.wanted)]
    else:
        ends = [int(end) for end in np.cumsum(sizes)[:-1]]
        if int(sizes.sum()) != x.shape[axis]:
            raise op.fail(f"sizes {int_list(sizes)} of an axis of {x.shape[axis]}")
    return tuple(np.split(x, ends, axis))


@sized("Trilu", since=14)
def trilu(op: HostOp, x: Array, k: Array | None = None) -> Any:
    """Keep the part above or below diagonal `k` of the last two axes, with 0 elsewhere."""
    furthest = max(x.shape[-2:])
    diagonal = 0 if k is None else min(max(int(k.reshape(-1)[0]), -furthest), furthest)
    return (np.triu if op.attr("upper", 1) else np.tril)(x, diagonal)


@sized("Cast", since=6)
def cast(op: HostOp, x: Array) -> Any:
    """Convert to another type. Returns NotImplemented from floats to integers."""
    kind = numpy_type(op.attrs["to"])
    if kind.name not in NUMPY_TYPES or (x.dtype.kind == "f" and kind.kind in "iu"):
        return NotImplemented
    return x.astype(kind)


@sized("TopK", since=11)
def top_k(op: HostOp, x: Array, count: Array) -> Any:
    """Compute TopK with the function of scatter.py."""
    return HOST["", "TopK"](op, x, count)


@sized("QuantizeLinear", "DequantizeLinear", since=10)
def scaled(op: HostOp, x: Array, scale: Array, zero: Array | None = None) -> Any:
    """Quantise or dequantise with the functions of value_types.py."""
    return HOST["", op.op](op, x, scale, zero)


# Operators on shapes and views -----------------------------------------------------------------------------------


@host("Shape", prefers_numpy=True)
def shape(op: HostOp, x: Array) -> Array:
    """Return the shape, or a slice of it, as int64 [axes]."""
    return np.array(x.shape[op.attr("start", 0) : op.attr("end")], np.int64)


@host("Size", prefers_numpy=True)
def size(op: HostOp, x: Array) -> Array:
    """Return the number of elements, as int64 []."""
    return np.array(x.size, np.int64)


@host("Identity", prefers_numpy=True)
def identity(op: HostOp, x: Value) -> Value:
    """Return the input."""
    return x


@host("Reshape", prefers_numpy=True)
def reshape(op: HostOp, x: Array, new_shape: Array | None = None) -> Array:
    """Reshape; one size may be -1, and 0 copies the input's size unless `allowzero` is set."""
    dims = int_list(op.attrs["shape"] if new_shape is None else new_shape)
    if not op.attr("allowzero", 0):
        dims = [x.shape[d] if n == 0 else n for d, n in enumerate(dims)]
    return x.reshape(dims)


@host("Flatten", prefers_numpy=True)
def flatten(op: HostOp, x: Array) -> Array:
    """Flatten to a matrix: the axes before `axis` become its rows."""
    axis = op.attr("axis", 1)
    axis = axis + x.ndim if axis < 0 else axis
    return x.reshape(int(np.prod(x.shape[:axis])), int(np.prod(x.shape[axis:])))


@host("Squeeze", prefers_numpy=True)
def squeeze(op: HostOp, x: Array, axes: Array | None = None) -> Array:
    """Remove `axes`, by default all of size 1."""
    chosen = op.attr("axes", ()) if axes is None else axes
    return x.squeeze(tuple(int_list(chosen)) or None)


@host("Unsqueeze", prefers_numpy=True)
def unsqueeze(op: HostOp, x: Array, axes: Array | None = None) -> Array:
    """Insert axes of size 1."""
    return np.expand_dims(x, tuple(int_list(op.attrs["axes"] if axes is None else axes)))


@host("ConstantOfShape", prefers_numpy=True)
def constant_of_shape(op: HostOp, dims: Array) -> Array:
    """Fill an array with one value. Raises HostError where memory does not suffice."""
    value = np.asarray(op.attr("value", np.zeros(1, np.float32))).reshape(-1)[0]
    dims_list = int_list(dims)
    total = 1
    for n in dims_list:
        total *= n
    check_size(total * value.itemsize, f"{op.label}: its output {dims_list}")
    return np.full(dims_list, value)


@host("Range", prefers_numpy=True)
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


@host("Concat", prefers_numpy=True)
def concat(op: HostOp, *values: Array) -> Array:
    """Concatenate along an axis."""
    return np.concatenate(values, axis=op.attrs["axis"])
