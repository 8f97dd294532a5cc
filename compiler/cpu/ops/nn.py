"""Reductions, convolutions, matrix products, pooling, normalisation, in floats."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from celosia.compiler import expr as T
from celosia.compiler.cpu.ops.registry import Node, Shape, at, op
from celosia.compiler.cpu.ops.shape import padded
from celosia.compiler.cpu.target import target
from celosia.compiler.expr import INDEX, Axis, Expr, Tensor, call, is_float, select, wrap
from celosia.compiler.expr.nodes import itemsize

Change = Callable[[Expr], Expr] | None
ChangeAt = Callable[[Expr, tuple[Expr, ...]], Expr] | None  # an element and its index


def lowest(dtype: str) -> Expr:
    """The start of a maximum."""
    from celosia.compiler.expr.lower import start_value

    return start_value("max", dtype)


# Reductions


def reduced(
    x: Tensor, axes: Sequence[int], keep: bool, fn: Callable[[Expr, tuple[Axis, ...]], Expr], name: str,
    value: Callable[[tuple[Expr, ...]], Expr] | None = None,
) -> Tensor:  # fmt: skip
    """fn(value at an index, reduce axes) over `axes`; `keep` leaves them in the shape as 1."""
    ks = {d: T.reduce_axis(x.shape[d], f"k{d}") for d in axes}
    shape = tuple(1 if d in ks else n for d, n in enumerate(x.shape) if keep or d not in ks)

    def body(*index: Expr) -> Expr:
        rest = iter(index)
        full: list[Expr] = []
        for d in range(len(x.shape)):
            if d in ks:
                if keep:
                    next(rest)
                full.append(ks[d])
            else:
                full.append(next(rest))
        point = tuple(full)
        return fn(value(point) if value else x[point], tuple(ks.values()))

    return T.compute(shape, body, name)


REDUCTIONS: dict[str, tuple[str, Callable[[Expr], Expr], Callable[[Expr, int], Expr]]] = {
    "ReduceSum": ("sum", lambda x: x, lambda y, n: y),
    "ReduceMean": ("sum", lambda x: x, lambda y, n: y / n),
    "ReduceMax": ("max", lambda x: x, lambda y, n: y),
    "ReduceMin": ("min", lambda x: x, lambda y, n: y),
    "ReduceProd": ("prod", lambda x: x, lambda y, n: y),
    "ReduceL1": ("sum", lambda x: call("abs", x), lambda y, n: y),
    "ReduceL2": ("sum", lambda x: x * x, lambda y, n: call("sqrt", y)),
    "ReduceSumSquare": ("sum", lambda x: x * x, lambda y, n: y),
    "ReduceLogSum": ("sum", lambda x: x, lambda y, n: call("log", y)),
}


@op(*REDUCTIONS, "ReduceLogSumExp")
def reduce(node: Node) -> Tensor:
    x = node.input(0)
    rank = len(x.shape)
    axes = node.ints("axes", 1)
    if not axes:
        if node.attrs.get("noop_with_empty_axes", 0):
            return node.elementwise(lambda v: v, x)
        axes = list(range(rank))
    axes = sorted({a % rank for a in axes})
    keep = node.attrs.get("keepdims", 1) == 1
    count = prod(x.shape[d] for d in axes)
    if node.op == "ReduceLogSumExp":
        m = reduced(x, axes, True, T.max, "max")
        s = reduced(x, axes, keep, T.sum, "sum", lambda i: call("exp", x[i] - at(m, i)))
        shift = reduced(x, axes, keep, T.max, "max")
        return T.compute(s.shape, lambda *i: call("log", s[i]) + shift[i], "logsumexp")
    kind, before, after = REDUCTIONS[node.op]
    if node.op == "ReduceL2" and not is_float(x.dtype):
        raise node.fail(f"on {x.dtype}")
    reducer: Any = getattr(T, kind)
    return reduced(x, axes, keep, lambda v, ks: after(reducer(before(v), ks), count), node.op.lower())


@op("GlobalAveragePool", "GlobalMaxPool")
def global_pool(node: Node) -> Tensor:
    x = node.input(0)
    axes = range(2, len(x.shape))
    if node.op == "GlobalMaxPool":
        return reduced(x, axes, True, T.max, "global_max")
    return reduced(x, axes, True, lambda v, ks: T.sum(v, ks) / prod(x.shape[2:]), "global_average")


@op("ArgMax", "ArgMin")
def arg(node: Node) -> Tensor:
    x = node.input(0)
    axis, keep = node.axis(0, len(x.shape)), node.attrs.get("keepdims", 1) == 1
    best = reduced(x, [axis], True, T.max if node.op == "ArgMax" else T.min, "best")
    last = bool(node.attrs.get("select_last_index", 0))
    n = x.shape[axis]

    def place(i: tuple[Expr, ...]) -> Expr:
        here = select(T.equal(x[i], x[i]), T.equal(x[i], at(best, i)), wrap(True, "bool"))  # NaN is the best
        return select(here, i[axis], -1 if last else n)

    return reduced(x, [axis], keep, T.max if last else T.min, node.op.lower(), place)


MOST_CHOSEN = 16
"""Largest k of a TopK that is computed as so many maxima; a longer one is sorted by the host."""


@op("TopK")
def top_k(node: Node) -> list[Tensor]:
    """k maxima of numbers that are all different: the value in the upper half, how early it comes in the lower."""
    x = node.input(0)
    axis, n = node.axis(-1, len(x.shape)), x.shape[node.axis(-1, len(x.shape))]
    k = int(node.attrs["k"]) if "k" in node.attrs else int(node.constant(1, "k").reshape(-1)[0])
    if not 0 < k <= min(n, MOST_CHOSEN) or x.dtype in ("float64", "int64", "uint64", "bool"):
        raise node.fail(f"the {k} largest of {n} elements of {x.dtype}")
    shape = (*x.shape[:axis], k, *x.shape[axis + 1 :])

    def key(*i: Expr) -> Expr:
        value = _ordered(x[i])
        value = value if node.attrs.get("largest", 1) else wrap(-1, "int64") - value
        return value * 2**32 + (n - 1 - i[axis])

    keys = T.compute(x.shape, key, "keys")
    best: list[Tensor] = []
    for rank in range(k):

        def left(i: tuple[Expr, ...], last: Tensor | None = best[-1] if best else None) -> Expr:
            return keys[i] if last is None else select(keys[i] < at(last, i), keys[i], -(2**63))

        best.append(reduced(keys, [axis], True, T.max, f"best{rank}", left))

    def place(*i: Expr) -> Expr:
        found: Expr = at(best[-1], i)
        for rank in reversed(range(k - 1)):
            found = select(T.equal(i[axis], rank), at(best[rank], i), found)
        return wrap(n - 1, "int64") - (found & (2**32 - 1))

    places = T.compute(shape, place, "places")
    values = T.compute(shape, lambda *i: x[(*i[:axis], T.clip(places[i], 0, n - 1), *i[axis + 1 :])], "values")
    return [values, places]


def _ordered(x: Expr) -> Expr:
    """An int64 of 32 bits that is greater where `x` is; for a NaN it is the greatest."""
    if not is_float(x.dtype):
        return x.astype("int64") - (2**31 if x.dtype == "uint32" else 0)
    bits = call("bitcast", x.astype("float32") + 0, dtype="int32")  # + 0: both zeros are one
    bits = select(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return select(call("isnan", x), wrap(2**31 - 1, "int32"), bits).astype("int64")


@op("Softmax", "LogSoftmax")
def softmax(node: Node) -> Tensor:
    x = node.input(0)
    rank = len(x.shape)
    axis = node.axis(-1 if node.opset >= 13 else 1, rank)
    axes = [axis] if node.opset >= 13 else list(range(axis, rank))
    m = reduced(x, axes, True, T.max, "max")
    if node.op == "LogSoftmax":
        total = reduced(x, axes, True, T.sum, "sum", lambda i: call("exp", x[i] - at(m, i)))
        log = T.compute(total.shape, lambda *i: call("log", total[i]), "log")
        return T.compute(x.shape, lambda *i: x[i] - at(m, i) - at(log, i), "logsoftmax")
    e = T.compute(x.shape, lambda *i: call("exp", x[i] - at(m, i)), "exp")
    scale = reduced(e, axes, True, lambda v, ks: wrap(1, x.dtype) / T.sum(v, ks), "scale")
    return T.compute(x.shape, lambda *i: e[i] * at(scale, i), "softmax")


@op("Hardmax")
def hardmax(node: Node) -> Tensor:
    x = node.input(0)
    rank = len(x.shape)
    axis = node.axis(-1 if node.opset >= 13 else 1, rank)
    if node.opset < 13 and axis != rank - 1:
        raise node.fail("over several dimensions")
    best = reduced(x, [axis], True, T.max, "best")
    n = x.shape[axis]
    first = reduced(x, [axis], True, T.min, "first", lambda i: select(T.equal(x[i], at(best, i)), i[axis], n))
    return T.compute(x.shape, lambda *i: select(T.equal(at(first, i), i[axis]), wrap(1, x.dtype), 0), "hardmax")


# Normalisation


def moments(x: Tensor, axes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """(mean, mean squared distance from it) over `axes`, which stay in the shapes as 1."""
    count = prod(x.shape[d] for d in axes)
    mean = reduced(x, axes, True, lambda v, ks: T.sum(v, ks) / count, "mean")

    def square(i: tuple[Expr, ...]) -> Expr:
        d = x[i] - at(mean, i)
        return d * d

    return mean, reduced(x, axes, True, lambda v, ks: T.sum(v, ks) / count, "variance", square)


def layer_norm(node: Node, x: Tensor, axis: int, scale: Tensor | None, bias: Tensor | None) -> list[Tensor]:
    eps = node.attrs.get("epsilon", 1e-5)
    mean, variance = moments(x, range(axis, len(x.shape)))
    inverse = T.compute(mean.shape, lambda *i: wrap(1, x.dtype) / call("sqrt", variance[i] + eps), "inverse")

    def body(*i: Expr) -> Expr:
        y = (x[i] - at(mean, i)) * at(inverse, i)
        y = y if scale is None else y * at(scale, i)
        return y if bias is None else y + at(bias, i)

    return [T.compute(x.shape, body, "layer_norm"), mean, inverse]


@op("LayerNormalization")
def layer_normalization(node: Node) -> list[Tensor]:
    x = node.input(0)
    bias = node.input(2) if node.has(2) else None
    return layer_norm(node, x, node.axis(-1, len(x.shape)), node.input(1), bias)[: node.outputs]


@op("SkipLayerNormalization")
def skip_layer_normalization(node: Node) -> list[Tensor]:
    """com.microsoft: LayerNormalization of a sum. Inputs: x, skip, gamma, beta, bias; outputs 0 and 3 (the sum)."""
    tensors = [node.input(0), node.input(1), *([node.input(4)] if node.has(4) else [])]
    total = node.elementwise(lambda *v: sum(v[1:], v[0]), *tensors)
    bias = node.input(3) if node.has(3) else None
    y, mean, inverse = layer_norm(node, total, len(total.shape) - 1, node.input(2), bias)
    return [y, mean, inverse, total][: node.outputs]


@op("RMSNormalization")
def rms_normalization(node: Node) -> Tensor:
    x, scale = node.input(0), node.input(1)
    axes = range(node.axis(-1, len(x.shape)), len(x.shape))
    count, eps = prod(x.shape[d] for d in axes), node.attrs.get("epsilon", 1e-5)
    inverse = reduced(
        x, axes, True, lambda v, ks: wrap(1, x.dtype) / call("sqrt", T.sum(v * v, ks) / count + eps), "inverse"
    )
    return T.compute(x.shape, lambda *i: x[i] * at(inverse, i) * at(scale, i), "rms_norm")


@op("InstanceNormalization", "GroupNormalization")
def group_normalization(node: Node) -> Tensor:
    x, scale, bias = node.input(0), node.input(1), node.input(2)
    groups = int(node.attrs.get("num_groups", x.shape[1]))
    size = x.shape[1] // groups
    eps = node.attrs.get("epsilon", 1e-5)
    whole = T.compute((x.shape[0], groups, size, *x.shape[2:]), lambda n, g, c, *s: x[(n, g * size + c, *s)], "grouped")
    mean, variance = moments(whole, range(2, len(whole.shape)))
    inverse = T.compute(mean.shape, lambda *i: wrap(1, x.dtype) / call("sqrt", variance[i] + eps), "inverse")

    def body(n: Expr, c: Expr, *s: Expr) -> Expr:
        where = (n, c // size, *[wrap(0, INDEX)] * (len(s) + 1))
        which = c if scale.size == x.shape[1] else c // size
        return (x[(n, c, *s)] - mean[where]) * inverse[where] * scale[which] + bias[which]

    return T.compute(x.shape, body, node.op.lower())


@op("BatchNormalization")
def batch_normalization(node: Node) -> Tensor:
    if node.attrs.get("training_mode", 0):
        raise node.fail("training mode")
    x, scale, bias, mean, variance = (node.input(i) for i in range(5))
    eps = node.attrs.get("epsilon", 1e-5)
    factor = T.compute(scale.shape, lambda c: scale[c] / call("sqrt", variance[c] + eps), "factor")
    return T.compute(x.shape, lambda *i: (x[i] - mean[i[1]]) * factor[i[1]] + bias[i[1]], "batch_norm")


@op("MeanVarianceNormalization")
def mean_variance_normalization(node: Node) -> Tensor:
    x = node.input(0)
    mean, variance = moments(x, [int(a) for a in node.attrs.get("axes", (0, 2, 3))])
    return T.compute(x.shape, lambda *i: (x[i] - at(mean, i)) / (call("sqrt", at(variance, i)) + 1e-9), "mean_variance")


@op("LpNormalization")
def lp_normalization(node: Node) -> Tensor:
    x, p = node.input(0), int(node.attrs.get("p", 2))
    axis = node.axis(-1, len(x.shape))
    total = reduced(x, [axis], True, lambda v, ks: T.sum(call("abs", v) if p == 1 else v * v, ks), "total")

    def body(*i: Expr) -> Expr:
        norm = at(total, i) if p == 1 else call("sqrt", at(total, i))
        return select(T.equal(norm, 0), wrap(0, x.dtype), x[i] / norm)

    return T.compute(x.shape, body, "lp_normalization")


@op("LRN")
def lrn(node: Node) -> Tensor:
    x, size = node.input(0), int(node.attrs["size"])
    alpha, beta, bias = (node.attrs.get(k, d) for k, d in (("alpha", 1e-4), ("beta", 0.75), ("bias", 1.0)))
    before = (size - 1) // 2
    lead, trail = [0] * len(x.shape), [0] * len(x.shape)
    lead[1], trail[1] = before, size - 1 - before
    p = padded(x, tuple(lead), tuple(trail), wrap(0, x.dtype), lambda v: v * v)
    k = T.reduce_axis(size, "k")
    total = T.compute(x.shape, lambda n, c, *s: T.sum(p[(n, c + k, *s)], k), "squares")
    return T.compute(
        x.shape, lambda *i: x[i] / T.binary("pow", total[i] * (alpha / size) + bias, wrap(beta, x.dtype)), "lrn"
    )


# Windows: convolution and pooling


@dataclass(frozen=True)
class Window:
    """Where a sliding window of `kernel` elements stands: o * stride + k * dilation - before, over inputs `size`."""

    size: Shape
    kernel: Shape
    stride: Shape
    dilation: Shape
    before: Shape
    after: Shape
    out: Shape

    @classmethod
    def of(cls, node: Node, size: Shape, kernel: Shape) -> Window:
        """From the attributes strides, dilations, pads, auto_pad, ceil_mode."""
        n = len(size)
        strides = tuple(int(v) for v in node.attrs.get("strides", (1,) * n))
        dilations = tuple(int(v) for v in node.attrs.get("dilations", (1,) * n))
        pads = [int(v) for v in node.attrs.get("pads", (0,) * 2 * n)]
        auto = node.attrs.get("auto_pad", "NOTSET")
        if not len(kernel) == len(strides) == len(dilations) == n or len(pads) != 2 * n:
            raise node.fail(f"kernel {kernel}, strides {strides}, pads {pads} for {n} spatial dimensions")
        reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilations)]
        before, after, out = pads[:n], pads[n:], []
        for d in range(n):
            if auto in ("SAME_UPPER", "SAME_LOWER"):
                total = max((-(-size[d] // strides[d]) - 1) * strides[d] + reach[d] - size[d], 0)
                before[d] = total // 2 if auto == "SAME_UPPER" else -(-total // 2)
                after[d] = total - before[d]
            elif auto == "VALID":
                before[d] = after[d] = 0
            room = size[d] + before[d] + after[d] - reach[d]
            steps = room // strides[d]
            if node.attrs.get("ceil_mode", 0):
                steps = -(-room // strides[d])
                if steps * strides[d] >= size[d] + before[d]:
                    steps -= 1  # a window must begin inside the input or its leading padding
            out.append(steps + 1)
            if room < 0:
                raise node.fail(f"a window of {reach[d]} on {size[d]} + {before[d]} + {after[d]} elements")
        return cls(size, kernel, strides, dilations, tuple(before), tuple(after), tuple(out))

    def margins(self) -> tuple[Shape, Shape]:
        """What windows reach before and after each dimension of the input, and no more than that."""
        after = tuple(
            max(0, (o - 1) * s + (k - 1) * d + 1 - b - n)
            for o, s, k, d, b, n in zip(self.out, self.stride, self.kernel, self.dilation, self.before, self.size)
        )
        return self.before, after

    def padded(self, x: Tensor, value: Expr, change: Change = None) -> Tensor:
        """x with all that windows reach."""
        before, after = self.margins()
        lead = (0,) * (len(x.shape) - len(self.size))
        return padded(x, (*lead, *before), (*lead, *after), value, change)

    def at(self, out: Sequence[Expr], k: Sequence[Expr]) -> tuple[Expr, ...]:
        """Index into the padded input."""
        return tuple(o * s + i * d for o, s, i, d in zip(out, self.stride, k, self.dilation))

    def count(self, node: Node, out: Sequence[Expr]) -> Expr:
        """How many elements of a window an average divides by, as an index."""
        total: Expr = wrap(1, INDEX)
        include = node.attrs.get("count_include_pad", 0)
        for d, o in enumerate(out):
            s, n, k, dil = self.stride[d], self.size[d], self.kernel[d], self.dilation[d]
            low, high = (0, n + self.before[d] + self.after[d]) if include else (self.before[d], self.before[d] + n)
            reach = (k - 1) * dil + 1
            if low == 0 and (self.out[d] - 1) * s + reach <= high:
                total = total * k
                continue
            start = o * s
            first = (T.maximum(wrap(low, INDEX) - start, 0) + (dil - 1)) // dil
            last = T.minimum((wrap(high - 1, INDEX) - start) // dil, k - 1)
            total = total * (last - first + 1)
        return total


def convolution(
    node: Node, x: Tensor, w: Tensor, pad_value: Expr, change_x: Change = None, change_w: ChangeAt = None,
    finish: Callable[[Expr, Expr], Expr] = lambda acc, m: acc,
) -> Tensor:  # fmt: skip
    """finish(sum over the window of x * w, output channel). x: [N, C, ...], w: [M, C/group, ...].

    The changes are applied to elements before they are multiplied, and once for each element. Products have the type of
    the changed w, to which x is then converted.
    """
    group = int(node.attrs.get("group", 1))
    n, c, m = x.shape[0], x.shape[1], w.shape[0]
    if len(x.shape) < 3 or len(w.shape) != len(x.shape) or c != w.shape[1] * group or m % group:
        raise node.fail(f"x {list(x.shape)}, w {list(w.shape)}, group {group}")
    cg, mg = c // group, m // group
    window = Window.of(node, x.shape[2:], w.shape[2:])
    p = window.padded(x, pad_value, change_x)
    if change_w is not None:
        raw, fn = w, change_w
        w = T.compute(raw.shape, lambda *i: fn(raw[i], i), "weights")
    kc = T.reduce_axis(cg, "c")
    ks = tuple(T.reduce_axis(k, f"k{d}") for d, k in enumerate(window.kernel))
    if set(window.stride) == {1} and len(window.out) > 1 and 1 < window.out[-1] < 48 and prod(window.kernel) > 1:
        return _convolution_by_plane(window, p, w, kc, ks, (n, group, mg), finish)

    def body(ni: Expr, g: Expr, mi: Expr, *o: Expr) -> Expr:
        channel = g * mg + mi
        product = p[(ni, g * cg + kc, *window.at(o, ks))].astype(w.dtype) * w[(channel, kc, *ks)]
        return finish(T.sum(product, (kc, *ks)), channel)

    result = T.compute((n, group, mg, *window.out), body, "conv")
    return replace(result, shape=(n, m, *window.out))


def _convolution_by_plane(
    window: Window, p: Tensor, w: Tensor, kc: Axis, ks: tuple[Axis, ...], lead: tuple[int, int, int],
    finish: Callable[[Expr, Expr], Expr],
) -> Tensor:  # fmt: skip
    """Stride 1 on small images: the padded planes as one row each, so that vectors go over the ends of lines.

    What is computed between the lines is not used. lead: batch, groups, output channels of a group.
    """
    n, group, mg = lead
    size = p.shape[2:]
    steps = [prod(size[d + 1 :]) for d in range(len(size))]
    length = sum((o - 1) * s for o, s in zip(window.out, steps)) + 1
    reach: Expr = wrap(0, INDEX)
    for k, d, s in zip(ks, window.dilation, steps):
        reach = reach + k * (d * s)
    cg = kc.extent

    def plane(ni: Expr, g: Expr, mi: Expr, at_: Expr) -> Expr:
        start = ni * (p.shape[1] * prod(size)) + (g * cg + kc) * prod(size)
        return T.sum(p.flat(start + at_ + reach).astype(w.dtype) * w[(g * mg + mi, kc, *ks)], (kc, *ks))

    sums = T.compute((n, group, mg, length), plane, "planes")

    def body(ni: Expr, g: Expr, mi: Expr, *o: Expr) -> Expr:
        at_: Expr = wrap(0, INDEX)
        for i, s in zip(o, steps):
            at_ = at_ + i * s
        return finish(sums[ni, g, mi, at_], g * mg + mi)

    return replace(T.compute((n, group, mg, *window.out), body, "conv"), shape=(n, group * mg, *window.out))


@op("Conv")
def conv(node: Node) -> Tensor:
    x, w = node.input(0), node.input(1)
    zero = wrap(0, x.dtype)
    if not node.has(2):
        return convolution(node, x, w, zero)
    bias = node.input(2)
    return convolution(node, x, w, zero, finish=lambda acc, m: acc + bias[m])


@op("ConvTranspose")
def conv_transpose(node: Node) -> Tensor:
    """Gathered: y[o] = sum over k of x[(o + before - k*dilation) / stride] where that is whole and inside."""
    x, w = node.input(0), node.input(1)
    sp = len(x.shape) - 2
    group = int(node.attrs.get("group", 1))
    strides = [int(v) for v in node.attrs.get("strides", (1,) * sp)]
    dil = [int(v) for v in node.attrs.get("dilations", (1,) * sp)]
    extra = [int(v) for v in node.attrs.get("output_padding", (0,) * sp)]
    pads = [int(v) for v in node.attrs.get("pads", (0,) * 2 * sp)]
    kernel, auto = w.shape[2:], node.attrs.get("auto_pad", "NOTSET")
    full = [(n - 1) * s + (k - 1) * d + 1 + e for n, s, k, d, e in zip(x.shape[2:], strides, kernel, dil, extra)]
    wanted = node.attrs.get("output_shape")
    if wanted is None and auto.startswith("SAME"):
        wanted = [n * s for n, s in zip(x.shape[2:], strides)]
    if wanted is not None:
        wanted = [int(v) for v in wanted][-sp:]
        for d in range(sp):
            total = max(full[d] - wanted[d], 0)
            small, large = total // 2, total - total // 2
            pads[d], pads[sp + d] = (small, large) if auto == "SAME_UPPER" else (large, small)
    out = wanted or [f - pads[d] - pads[sp + d] for d, f in enumerate(full)]
    n, c, mg = x.shape[0], x.shape[1], w.shape[1]
    cg = c // group
    kc = T.reduce_axis(cg, "c")
    ks = tuple(T.reduce_axis(k, f"k{d}") for d, k in enumerate(kernel))
    bias = node.input(2) if node.has(2) else None

    def body(ni: Expr, g: Expr, mi: Expr, *o: Expr) -> Expr:
        inside: Expr | None = None
        place = []
        for d in range(sp):
            shifted = o[d] + pads[d] - ks[d] * dil[d]
            at_ = shifted // strides[d]
            test = (shifted >= 0) & (at_ < x.shape[2 + d]) & T.equal(shifted % strides[d], 0)
            inside = test if inside is None else inside & test
            place.append(at_)
        assert inside is not None
        channel = g * cg + kc
        product = x[(ni, channel, *place)] * w[(channel, mi, *ks)]
        acc = T.sum(select(inside, product, 0), (kc, *ks))
        return acc if bias is None else acc + bias[g * mg + mi]

    return replace(T.compute((n, group, mg, *out), body, "conv_transpose"), shape=(n, group * mg, *out))


@op("MaxPool")
def max_pool(node: Node) -> Tensor:
    if node.outputs > 1:
        raise node.fail("the second output, indices")
    x = node.input(0)
    window = Window.of(node, x.shape[2:], tuple(int(k) for k in node.attrs["kernel_shape"]))
    p = window.padded(x, lowest(x.dtype))
    ks = tuple(T.reduce_axis(k, f"k{d}") for d, k in enumerate(window.kernel))
    return T.compute((*x.shape[:2], *window.out), lambda n, c, *o: T.max(p[(n, c, *window.at(o, ks))], ks), "max_pool")


@op("AveragePool")
def average_pool(node: Node) -> Tensor:
    x = node.input(0)
    window = Window.of(node, x.shape[2:], tuple(int(k) for k in node.attrs["kernel_shape"]))
    p = window.padded(x, wrap(0, x.dtype))
    ks = tuple(T.reduce_axis(k, f"k{d}") for d, k in enumerate(window.kernel))

    def body(n: Expr, c: Expr, *o: Expr) -> Expr:
        return T.sum(p[(n, c, *window.at(o, ks))], ks) / window.count(node, o).astype(x.dtype)

    return T.compute((*x.shape[:2], *window.out), body, "average_pool")


# Matrix products


def product(
    a: Tensor, b: Tensor, transpose_a: bool = False, transpose_b: bool = False, change_a: Change = None,
    change_b: ChangeAt = None, finish: Callable[[Expr, tuple[Expr, ...]], Expr] = lambda acc, i: acc,
) -> Tensor:  # fmt: skip
    """numpy.matmul(a, b) of tensors with at least two dimensions, elements through their changes first."""
    inner = a.shape[-2 if transpose_a else -1]
    m, n = a.shape[-1 if transpose_a else -2], b.shape[-2 if transpose_b else -1]
    if inner != b.shape[-1 if transpose_b else -2]:
        raise ValueError(f"{list(a.shape)} and {list(b.shape)} do not multiply")

    def prepared(t: Tensor, turn: bool, change: ChangeAt, name: str) -> Tensor:
        if change is None and not turn:
            return t
        shape = (*t.shape[:-2], t.shape[-1], t.shape[-2]) if turn else t.shape

        def element(*i: Expr) -> Expr:
            own = (*i[:-2], i[-1], i[-2]) if turn else i
            return t[own] if change is None else change(t[own], own)

        return T.compute(shape, element, name)

    fn = change_a
    a = prepared(a, transpose_a, None if fn is None else lambda v, i: fn(v), "a")
    dot = transpose_b and m < 4  # then rows of b are read once, and best as they are
    b = prepared(b, transpose_b and not dot, change_b, "b")
    k = T.reduce_axis(inner, "k")
    import numpy as np

    try:
        batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except ValueError:
        raise ValueError(f"{list(a.shape)} and {list(b.shape)} do not multiply") from None

    width = next((w for w in (target().lanes(b.dtype), target().lanes(b.dtype) // 2) if w > 1 and n % w == 0), 0)
    if not dot and width and m >= PACKED_ROWS and inner * n * itemsize(b.dtype) > PACKED_BYTES:
        packed = _panels(b, width)

        def by_panel(*i: Expr) -> Expr:
            *lead, row, panel, lane = i
            index = (*lead, row, panel * width + lane)
            right = packed[(*at_lead(b, lead), panel, k, lane)]
            return finish(T.sum(a[(*at_lead(a, lead), row, k)] * right, k), index)

        return replace(T.compute((*batch, m, n // width, width), by_panel, "matmul"), shape=(*batch, m, n))

    def body(*i: Expr) -> Expr:
        lead_a = at_lead(a, i[:-2])
        lead_b = at_lead(b, i[:-2])
        right = b[(*lead_b, i[-1], k)] if dot else b[(*lead_b, k, i[-1])]
        return finish(T.sum(a[(*lead_a, i[-2], k)] * right, k), i)

    return T.compute((*batch, m, n), body, "matmul")


PACKED_ROWS = 16
"""Rows of a product from which on a copy of the other matrix pays."""
PACKED_BYTES = 1 << 15
"""Larger matrices have their rows so far apart that caches and address translation suffer."""


def _panels(b: Tensor, width: int) -> Tensor:
    """b [..., K, N] as [..., N / width, K, width], so that a tile reads it from end to end."""
    shape = (*b.shape[:-2], b.shape[-1] // width, b.shape[-2], width)
    packed = T.compute(shape, lambda *i: b[(*i[:-3], i[-2], i[-3] * width + i[-1])], "panels")
    return replace(packed, stored=True)


def at_lead(t: Tensor, index: Sequence[Expr]) -> tuple[Expr, ...]:
    own = index[len(index) - (len(t.shape) - 2) :] if len(t.shape) > 2 else ()
    return tuple(wrap(0, INDEX) if n == 1 else i for i, n in zip(own, t.shape))


def matmul_any(
    node: Node, a: Tensor, b: Tensor, multiply: Callable[..., Tensor] | None = None, **how: Any
) -> Tensor:  # fmt: skip
    """multiply(a, b, ...), which is defined on matrices (product where left out), for vectors as well."""
    from celosia.compiler.cpu.ops.registry import reshaped

    if not a.shape or not b.shape:
        raise node.fail("an operand is a scalar")
    left = reshaped(a, (1, *a.shape)) if len(a.shape) == 1 else a
    right = reshaped(b, (*b.shape, 1)) if len(b.shape) == 1 else b
    try:
        y = (multiply or product)(left, right, **how)
    except ValueError as e:
        raise node.fail(str(e)) from e
    shape = y.shape
    if len(b.shape) == 1:
        shape = shape[:-1]
    if len(a.shape) == 1:
        shape = (*shape[:-2], shape[-1]) if len(b.shape) > 1 else shape[:-1]
    return y if shape == y.shape else reshaped(y, shape)


@op("MatMul")
def matmul(node: Node) -> Tensor:
    return matmul_any(node, node.input(0), node.input(1))


@op("Gemm")
def gemm(node: Node) -> Tensor:
    a, b = node.input(0), node.input(1)
    alpha, beta = node.attrs.get("alpha", 1.0), node.attrs.get("beta", 1.0)
    c = node.input(2) if node.has(2) else None

    def finish(acc: Expr, i: tuple[Expr, ...]) -> Expr:
        acc = acc if alpha == 1 else acc * alpha
        if c is None or beta == 0:
            return acc
        bias = at(c, i)
        return acc + (bias if beta == 1 else bias * beta)

    try:
        return product(a, b, bool(node.attrs.get("transA", 0)), bool(node.attrs.get("transB", 0)), finish=finish)
    except ValueError as e:
        raise node.fail(str(e)) from e
