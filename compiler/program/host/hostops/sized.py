"""Operators in numpy for tensors whose sizes are known only when they come: boxes that were found, a growing cache.

A kernel is made for one shape, which takes longer than all of these run. What they cannot compute they leave to a
kernel, by returning NotImplemented.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from celosia.compiler.program.host.float32 import logistic
from celosia.compiler.program.host.hostops.registry import HOST, Array, Function, Value, int_list, numpy_type
from celosia.compiler.program.host.op import HostOp, check_size
from celosia.compiler.program.host.sizes import broadcast, taken

PLAIN = frozenset(
    ["float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool"]
)
"""Element types with which numpy computes as ONNX says."""
_SIZED: dict[str, tuple[int, Function]] = {}
"""The first opset in which an operator means this, and what computes it."""


def sized_function(op: HostOp) -> Function | None:
    """What computes `op` for any sizes; None where nothing does. Takes what functions of HOST take."""
    since, function = _SIZED.get(op.op, (0, None)) if op.domain in ("", "ai.onnx") else (0, None)
    return function if op.opset >= since else None


def sized_names() -> Sequence[str]:
    """Their operators."""
    return sorted(_SIZED)


def sized(*names: str, since: int = 7) -> Callable[[Function], Function]:
    """Adds a function to the table."""

    def add(function: Function) -> Function:
        def plain(op: HostOp, *inputs: Value) -> Any:
            if any(not isinstance(x, np.ndarray) or x.dtype.name not in PLAIN for x in inputs if x is not None):
                return NotImplemented
            with np.errstate(all="ignore"):
                return function(op, *inputs)

        _SIZED.update(dict.fromkeys(names, (since, plain)))
        return function

    return add


_BINARY: dict[str, Callable[..., Any]] = {
    "Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Equal": np.equal, "Less": np.less, "And": np.logical_and,
    "LessOrEqual": np.less_equal, "Greater": np.greater, "GreaterOrEqual": np.greater_equal, "Or": np.logical_or,
    "Xor": np.logical_xor,
}  # fmt: skip
_UNARY: dict[str, Callable[..., Any]] = {
    "Abs": np.abs, "Ceil": np.ceil, "Cos": np.cos, "Exp": np.exp, "Floor": np.floor, "Log": np.log, "Neg": np.negative,
    "Not": np.logical_not, "Round": np.rint, "Sign": np.sign, "Sin": np.sin, "Sqrt": np.sqrt, "Tanh": np.tanh,
}  # fmt: skip


@sized(*_BINARY)
def binary(op: HostOp, a: Array, b: Array) -> Any:
    """Arithmetic, comparisons and logic."""
    return _BINARY[op.op](a, b)


@sized(*_UNARY)
def unary(op: HostOp, x: Array) -> Any:
    """Functions of one element; of integers, rounding changes nothing."""
    if x.dtype.kind in "iu" and op.op in ("Ceil", "Floor", "Round"):
        return x
    return _UNARY[op.op](x)


@sized("Div")
def div(op: HostOp, a: Array, b: Array) -> Any:
    """Divide integers, rounded towards zero."""
    if a.dtype.kind == "f":
        return a / b
    if not np.all(b):
        return NotImplemented
    quotient = a // b
    return quotient + ((quotient < 0) & (quotient * b != a)).astype(a.dtype)


@sized("Reciprocal")
def reciprocal(op: HostOp, x: Array) -> Any:
    """1 / x."""
    return x.dtype.type(1) / x


@sized("Relu")
def relu(op: HostOp, x: Array) -> Any:
    """max(x, 0)."""
    return np.maximum(x, x.dtype.type(0))


@sized("Sigmoid")
def sigmoid(op: HostOp, x: Array) -> Any:
    """1 / (1 + exp(-x))."""
    return logistic(x)


@sized("Max", "Min", since=8)
def extreme(op: HostOp, *inputs: Array) -> Any:
    """The largest or smallest of all inputs, element by element."""
    pick, result = (np.maximum if op.op == "Max" else np.minimum), inputs[0]
    for x in inputs[1:]:
        result = pick(result, x)
    return result


@sized("Clip", since=11)
def clip(op: HostOp, x: Array, low: Array | None = None, high: Array | None = None) -> Any:
    """A bound that is NaN bounds nothing, and one that is left out is the largest finite number."""
    if x.dtype.kind == "f":
        least, most = (np.array(limit, x.dtype) for limit in (np.finfo(x.dtype).min, np.finfo(x.dtype).max))
        low, high = (least if low is None else low), (most if high is None else high)
    x = x if low is None else np.where(x < low.reshape(()), low.reshape(()), x)
    return x if high is None else np.where(x > high.reshape(()), high.reshape(()), x)


@sized("Where")
def where(op: HostOp, condition: Array, a: Array, b: Array) -> Any:
    """`a` where the condition holds, else `b`."""
    return np.where(condition, a, b)


@sized("MatMul")
def matmul(op: HostOp, a: Array, b: Array) -> Any:
    """Multiply matrices of the last two axes."""
    return np.matmul(a, b)


@sized("Softmax", "LogSoftmax", since=13)
def softmax(op: HostOp, x: Array) -> Any:
    """Softmax or its logarithm along an axis; NotImplemented where onnxruntime's logarithm is one of no number."""
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
_WIDE = {(op, kind): {"dtype": np.float64} for op in ("ReduceSum", "ReduceProd") for kind in "iu"}
"""What integers are combined in, see reductions.py."""


@sized(*_REDUCE, since=11)
def reduce(op: HostOp, x: Array, axes: Array | None = None) -> Any:
    """NotImplemented where the sum of integers would be rounded, and of nothing."""
    chosen = op.attr("axes") if axes is None else int_list(axes)
    if not chosen and op.attr("noop_with_empty_axes", 0):
        return x
    if not x.size or (op.op == "ReduceMean" and x.dtype.kind != "f"):
        return NotImplemented
    along = tuple(chosen) if chosen else None
    y = _REDUCE[op.op](x, axis=along, keepdims=bool(op.attr("keepdims", 1)), **_WIDE.get((op.op, x.dtype.kind), {}))
    if y.dtype != x.dtype and np.any(np.abs(y) >= min(np.iinfo(x.dtype).max, 2**53)):
        return NotImplemented  # it is rounded
    return y.astype(x.dtype)


@sized("ArgMax", "ArgMin", since=11)
def arg(op: HostOp, x: Array) -> Any:
    """int64, of equal ones the first. NotImplemented for the last."""
    if op.attr("select_last_index", 0) or not x.size:
        return NotImplemented
    pick = np.argmax if op.op == "ArgMax" else np.argmin
    return pick(x, axis=op.attr("axis", 0), keepdims=bool(op.attr("keepdims", 1))).astype(np.int64)


# Elements in other places ----------------------------------------------------------------------------------------


@sized("Transpose", since=1)
def transpose(op: HostOp, x: Array) -> Any:
    """Axes in the order `perm`, by default the other way round."""
    return x.transpose(op.attr("perm"))


@sized("Expand", since=8)
def expand(op: HostOp, x: Array, shape: Array) -> Any:
    """Broadcast to `shape`. HostError where there is no memory for it."""
    wanted = broadcast(x.shape, tuple(int_list(shape)))
    check_size(int(np.prod(wanted, dtype=np.float64)) * x.itemsize, f"{op.label}: its output {list(wanted)}")
    return np.broadcast_to(x, wanted)


@sized("Tile", since=6)
def tile(op: HostOp, x: Array, repeats: Array) -> Any:
    """Repeated along each axis. HostError where there is no memory for it."""
    total = int(np.prod([n * r for n, r in zip(x.shape, int_list(repeats))], dtype=np.float64))
    check_size(total * x.itemsize, f"{op.label}: its output")
    return np.tile(x, int_list(repeats))


@sized("Gather", since=1)
def gather(op: HostOp, x: Array, indices: Array) -> Any:
    """Slices along an axis."""
    return np.take(x, indices, axis=op.attr("axis", 0))


@sized("GatherElements", since=11)
def gather_elements(op: HostOp, x: Array, indices: Array) -> Any:
    """Elements along an axis. HostError where indices have more places than `x`."""
    axis = op.attr("axis", 0)
    if any(n > m for d, (n, m) in enumerate(zip(indices.shape, x.shape)) if d != axis % x.ndim):
        raise op.fail(f"indices {list(indices.shape)} reach beyond {list(x.shape)}")
    places: list[Array] = list(np.indices(indices.shape, sparse=True))
    places[axis] = indices
    return x[tuple(places)]


@sized("GatherND", since=11)
def gather_nd(op: HostOp, x: Array, indices: Array) -> Any:
    """Slices at rows of indices. NotImplemented with batches."""
    if op.attr("batch_dims", 0):
        return NotImplemented
    return x[tuple(np.moveaxis(indices, -1, 0))]


@sized("Slice", since=10)
def slice_(
    op: HostOp, x: Array, starts: Array, ends: Array, axes: Array | None = None, steps: Array | None = None
) -> Any:
    """A part of some axes. HostError where there is no such axis."""
    first, last = int_list(starts), int_list(ends)
    along = list(range(len(first))) if axes is None else int_list(axes)
    by = [1] * len(first) if steps is None else int_list(steps)
    parts = [slice(None)] * x.ndim
    for axis, start, end, step in zip(along, first, last, by):
        if not -x.ndim <= axis < x.ndim:
            raise op.fail(f"axis {axis} of {x.ndim} dimensions")
        places = taken(x.shape[axis], start, end, step)
        parts[axis] = slice(places.start, places.stop if places.stop >= 0 else None, step) if places else slice(0)
    return x[tuple(parts)]


@sized("Split", since=13)
def split(op: HostOp, x: Array, sizes: Array | None = None) -> Any:
    """Split into these sizes, else into as many equal parts as there are outputs. HostError where sizes do not add
    up."""
    axis = op.attr("axis", 0)
    if sizes is None:
        each = -(-x.shape[axis] // op.wanted)
        places = [each * k for k in range(1, op.wanted)]
    else:
        places = [int(end) for end in np.cumsum(sizes)[:-1]]
        if int(sizes.sum()) != x.shape[axis]:
            raise op.fail(f"sizes {int_list(sizes)} of an axis of {x.shape[axis]}")
    return tuple(np.split(x, places, axis))


@sized("Trilu", since=14)
def trilu(op: HostOp, x: Array, k: Array | None = None) -> Any:
    """What is above or below diagonal `k` of the last two axes, 0 elsewhere."""
    furthest = max(x.shape[-2:])
    diagonal = 0 if k is None else min(max(int(k.reshape(-1)[0]), -furthest), furthest)
    return (np.triu if op.attr("upper", 1) else np.tril)(x, diagonal)


@sized("Cast", since=6)
def cast(op: HostOp, x: Array) -> Any:
    """NotImplemented from floats to integers."""
    kind = numpy_type(op.attrs["to"])
    if kind.name not in PLAIN or (x.dtype.kind == "f" and kind.kind in "iu"):
        return NotImplemented
    return x.astype(kind)


@sized("TopK", since=11)
def top_k(op: HostOp, x: Array, count: Array) -> Any:
    """As scatter.py's."""
    return HOST["", "TopK"](op, x, count)


@sized("QuantizeLinear", "DequantizeLinear", since=10)
def scaled(op: HostOp, x: Array, scale: Array, zero: Array | None = None) -> Any:
    """As those of types.py."""
    return HOST["", op.op](op, x, scale, zero)
