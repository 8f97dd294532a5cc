"""Reductions over axes, and operators made of reductions: ArgMax, TopK; also CumSum, a scan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from celosia.compiler import expr as T
from celosia.compiler.expr import Axis, Expr, Tensor, call, is_float, select, wrap
from celosia.compiler.ops.registry import Node, at, limits, op
from celosia.compiler.program.op_spec import Kind


def reduce_axes(
    x: Tensor, axes: Sequence[int], keepdims: bool, fn: Callable[[Expr, tuple[Axis, ...]], Expr], name: str,
    value: Callable[[tuple[Expr, ...]], Expr] | None = None,
) -> Tensor:  # fmt: skip
    """Reduce x over `axes` with `fn`, a function of (an element, the reduction axes), such as T.sum.

    keepdims: the axes stay in the shape as 1. name: of the resulting tensor. value: function of the index into x that
    replaces the element; None: the element itself.
    """
    ks = {d: T.reduce_axis(x.shape[d], f"k{d}") for d in axes}
    shape = tuple(1 if d in ks else n for d, n in enumerate(x.shape) if keepdims or d not in ks)

    def body(*index: Expr) -> Expr:
        """Return one result: x indexed by reduction axes where `axes` are, by the index elsewhere."""
        indices = iter(index)
        full: list[Expr] = []
        for d in range(len(x.shape)):
            if d in ks:
                if keepdims:
                    next(indices)
                full.append(ks[d])
            else:
                full.append(next(indices))
        point = tuple(full)
        return fn(value(point) if value else x[point], tuple(ks.values()))

    return T.compute(shape, body, name)


def _log(x: Expr) -> Expr:
    """Return the natural logarithm with the last bits of the C library: for float32 rounded from a double."""
    return call("log", x.astype("float64")).astype(x.dtype) if x.dtype == "float32" else call("log", x)


REDUCTIONS: dict[str, tuple[str, Callable[[Expr], Expr], Callable[[Expr, int], Expr]]] = {
    "ReduceSum": ("sum", lambda x: x, lambda y, n: y),
    "ReduceMean": ("sum", lambda x: x, lambda y, n: y / n if n else y),
    "ReduceMax": ("max", lambda x: x, lambda y, n: y),
    "ReduceMin": ("min", lambda x: x, lambda y, n: y),
    "ReduceProd": ("prod", lambda x: x, lambda y, n: y),
    "ReduceL1": ("sum", lambda x: call("abs", x), lambda y, n: y),
    "ReduceL2": ("sum", lambda x: x * x, lambda y, n: call("sqrt", y)),
    "ReduceSumSquare": ("sum", lambda x: x * x, lambda y, n: y),
    "ReduceLogSum": ("sum", lambda x: x, lambda y, n: _log(y)),
}
"""Operator -> name of the reduction, function of each element, function of (the result, the number of elements)."""
EXTREMES = ("ReduceMax", "ReduceMin")
"""Reductions that are computed in the type of integers; the others convert integers to float64."""


@op(*EXTREMES, kind=Kind.REDUCTION, operands="data axes:shape?")
@op(
    *(name for name in REDUCTIONS if name not in EXTREMES),
    kind=Kind.REDUCTION,
    rounded_once=True,
    operands="data axes:shape?",
)
@op("ReduceLogSumExp", kind=Kind.REDUCTION, rounded_once=True, operands="data axes:shape?")
def reduce(node: Node) -> Tensor:
    """Build any Reduce operator over some axes or all; integers are summed in doubles, as in onnxruntime."""
    x = node.input(0)
    if node.op in EXTREMES or is_float(x.dtype):
        return _build_reduction(node, x)
    y = _build_reduction(node, node.elementwise(lambda v: v.astype("float64"), x), truncate=lambda v: call("floor", v))
    least = wrap(limits(x.dtype)[0], x.dtype)  # instead of NaN, the logarithm of a negative sum
    return node.elementwise(lambda v: select(call("isnan", v), least, v.astype(x.dtype)), y)


def _build_reduction(node: Node, x: Tensor, truncate: Callable[[Expr], Expr] = lambda v: v) -> Tensor:
    """Reduce x as `node` says, in the type of x.

    truncate: applied to intermediate values of ReduceLogSumExp, which onnxruntime truncates where its input has
    integers.
    """
    rank = len(x.shape)
    axes = node.ints("axes")
    noop = not axes and node.attrs.get("noop_with_empty_axes", 0)  # each element alone is reduced
    axes = [] if noop else sorted({a % rank for a in axes or range(rank)})
    keep = node.attrs.get("keepdims", 1) == 1
    count = prod(x.shape[d] for d in axes)
    if node.op == "ReduceLogSumExp":
        return x if not axes else _log_sum_exp(x, axes, keep, truncate)
    kind, before, after = REDUCTIONS[node.op]
    if not axes:
        return node.elementwise(lambda v: after(before(v), count), x)
    reducer: Any = getattr(T, kind)
    return reduce_axes(x, axes, keep, lambda v, ks: after(reducer(before(v), ks), count), node.op.lower())


def _log_sum_exp(x: Tensor, axes: Sequence[int], keep: bool, truncate: Callable[[Expr], Expr]) -> Tensor:
    """Return log(sum(exp(x))), computed relative to the maximum; truncate: see `_build_reduction`."""
    m = reduce_axes(x, axes, True, T.max, "max")
    s = reduce_axes(x, axes, keep, T.sum, "sum", lambda i: truncate(call("exp", x[i] - at(m, i))))
    shift = reduce_axes(x, axes, keep, T.max, "max")
    return T.compute(s.shape, lambda *i: truncate(_log(s[i])) + shift[i], "logsumexp")


@op("ArgMax", "ArgMin", kind=Kind.REDUCTION, operands="data")
def arg_extreme(node: Node) -> Tensor:
    """Build ArgMax or ArgMin: int64, the first or last of equal elements; NaN wins."""
    x = node.input(0)
    axis, keep = node.axis(0, len(x.shape)), node.attrs.get("keepdims", 1) == 1
    best = reduce_axes(x, [axis], True, T.max if node.op == "ArgMax" else T.min, "best")
    last = bool(node.attrs.get("select_last_index", 0))
    n = x.shape[axis]

    def position_of_best(i: tuple[Expr, ...]) -> Expr:
        is_best = select(T.equal(x[i], x[i]), T.equal(x[i], at(best, i)), wrap(True, "bool"))  # NaN is the best
        return select(is_best, i[axis], -1 if last else n)

    return reduce_axes(x, [axis], keep, T.max if last else T.min, node.op.lower(), position_of_best)


MAX_TOP_K = 16
"""Largest k of a TopK that is computed as k maxima; for a larger one the host sorts."""


@op("TopK", kind=Kind.OPAQUE, operands="x k")
def top_k(node: Node) -> list[Tensor]:
    """Build TopK as k maxima of distinct int64 keys: the value in the upper half, the position in the lower.

    Raises Unsupported for k above MAX_TOP_K, and for types whose values do not fit into 32 bits.
    """
    x = node.input(0)
    axis, n = node.axis(-1, len(x.shape)), x.shape[node.axis(-1, len(x.shape))]
    k = int(node.attrs["k"]) if "k" in node.attrs else int(node.constant("k").reshape(-1)[0])
    if not 0 < k <= min(n, MAX_TOP_K) or x.dtype in ("float64", "int64", "uint64", "bool"):
        raise node.fail(f"the {k} largest of {n} elements of {x.dtype}")
    shape = (*x.shape[:axis], k, *x.shape[axis + 1 :])

    def key(*i: Expr) -> Expr:
        value = _sort_key(x[i])
        value = value if node.attrs.get("largest", 1) else wrap(-1, "int64") - value
        return value * 2**32 + (n - 1 - i[axis])

    keys = replace(T.compute(x.shape, key, "keys"), stored=k > 1)
    best: list[Tensor] = []
    for rank in range(k):

        def smaller_key(i: tuple[Expr, ...], last: Tensor | None = best[-1] if best else None) -> Expr:
            """Return the key, or the least number where it is not below the last maximum."""
            return keys[i] if last is None else select(keys[i] < at(last, i), keys[i], -(2**63))

        best.append(reduce_axes(keys, [axis], True, T.max, f"best{rank}", smaller_key))

    def position(*i: Expr) -> Expr:
        """Return the position along the axis that the key of this rank holds."""
        best_key: Expr = at(best[-1], i)
        for rank in reversed(range(k - 1)):
            best_key = select(T.equal(i[axis], rank), at(best[rank], i), best_key)
        return wrap(n - 1, "int64") - (best_key & (2**32 - 1))

    positions = T.compute(shape, position, "places")
    values = T.compute(shape, lambda *i: x[(*i[:axis], T.clip(positions[i], 0, n - 1), *i[axis + 1 :])], "values")
    return [values, positions]


def _sort_key(x: Expr) -> Expr:
    """Return an int64 within the range of int32 that orders as `x` does; NaN is the greatest."""
    if not is_float(x.dtype):
        return x.astype("int64") - (2**31 if x.dtype == "uint32" else 0)
    bits = call("bitcast", x.astype("float32") + 0, dtype="int32")  # + 0: -0.0 becomes 0.0
    bits = select(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return select(call("isnan", x), wrap(2**31 - 1, "int32"), bits).astype("int64")


@op("CumSum", kind=Kind.OPAQUE, operands="x axis:shape")
def cumulative(node: Node) -> Tensor:
    """Build CumSum as a scan along the axis, vectorised over the others."""
    x, axis = node.input(0), int(node.constant("axis").reshape(-1)[0])
    axis += len(x.shape) if axis < 0 else 0
    if not 0 <= axis < len(x.shape) or x.size == 0 or x.dtype not in ("float32", "float64", "int32", "int64"):
        raise node.fail(f"along axis {axis} of {x.dtype}{list(x.shape)}")
    count, other_axes = x.shape[axis], (*x.shape[:axis], *x.shape[axis + 1 :])
    reverse, exclusive = (bool(node.attrs.get(name, 0)) for name in ("reverse", "exclusive"))
    zero = wrap(-0.0 if is_float(x.dtype) and not exclusive else 0, x.dtype)  # -0.0 + -0.0 stays -0.0

    def term(t: Expr, *i: Expr) -> Expr:
        """Return the element that step t of the scan adds."""
        return x[(*i[:axis], count - 1 - t if reverse else t, *i[axis:])]

    def step(t: Axis, state: tuple[Tensor, ...]) -> list[Tensor]:
        return [T.compute(other_axes, lambda *i: state[0][i] + terms[(t, *i)], "next")]

    terms = replace(T.compute((count, *other_axes), term, "terms"), stored=True)
    sums = T.scan(count, [T.compute(other_axes, lambda *i: zero, "start")], step, "sums")

    def total(*i: Expr) -> Expr:
        at_ = count - 1 - i[axis] if reverse else i[axis]
        return sums[(0, at_ + (not exclusive), *i[:axis], *i[axis + 1 :])]

    return T.compute(x.shape, total, "cumsum")
