"""Float convolutions and matrix products, and the sliding windows of all convolutions and pooling.

Its parts, in order: SlidingWindow, which indexes tensors and decides where padding is copied; Conv and ConvTranspose,
computed by rows of outputs or by flattened planes; MatMul and Gemm, whose second matrix may be packed into panels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any

from celosia.compiler import expr as T
from celosia.compiler.expr import INDEX, Axis, Expr, Tensor, select, wrap
from celosia.compiler.ops.registry import Change, ChangeAt, Node, Shape, at, op, reshaped
from celosia.compiler.ops.shape import padded
from celosia.compiler.program.dtypes import itemsize
from celosia.compiler.program.host.shape_rules import Windows, broadcast, transposed_windows, windows
from celosia.compiler.program.op_spec import Kind
from celosia.compiler.target import MAX_STREAMS, target


@dataclass(frozen=True)
class SlidingWindow(Windows):
    """Window geometry (see Windows) with methods that index tensors by expressions, for builders."""

    @classmethod
    def of(cls, node: Node, size: Shape, kernel: Shape | None = None) -> SlidingWindow:
        """Derive the windows of `node` over inputs of spatial `size`. Raises WindowError.

        kernel: spatial shape of the weights; None for pooling, which has it as an attribute.
        """
        geometry = windows(node.op, node.attrs, size, kernel)
        return cls(*(getattr(geometry, field.name) for field in fields(geometry)))

    def padded(self, x: Tensor, value: Expr, change: Change = None) -> Tensor:
        """Pad x [N, C, ...] with `value` as far as windows reach; elements of x go through `change` first."""
        before, after = self.margins()
        lead = (0,) * (len(x.shape) - len(self.size))
        return padded(x, (*lead, *before), (*lead, *after), value, change)

    def phases(self, x: Tensor, value: Expr, change: Change = None) -> Tensor:
        """Pad x [N, C, ...] and split it by remainders of the strides, so that windows move by one element.

        Elements of x go through `change` first. Shape of the result: [N, C, remainders..., lines...], without the
        remainders where all strides are 1.
        """
        before, after = self.margins()
        lead = (0,) * (len(x.shape) - len(self.size))
        reached = [b + n + a for b, n, a in zip(before, self.size, after)]
        lines = tuple(-(-n // s) for n, s in zip(reached, self.stride))
        after = tuple(a + m * s - n for a, m, s, n in zip(after, lines, self.stride, reached))
        image = padded(x, (*lead, *before), (*lead, *after), value, change)
        if set(self.stride) == {1}:
            return image
        shape = (*x.shape[: len(lead)], *self.stride, *lines)

        def body(*i: Expr) -> Expr:
            batch_and_channel, spatial = i[: len(lead)], i[len(lead) :]
            remainders, lines = spatial[: len(self.stride)], spatial[len(self.stride) :]
            pixel = (line * s + remainder for remainder, line, s in zip(remainders, lines, self.stride))
            return image[(*batch_and_channel, *pixel)]

        return T.compute(shape, body, "phases")

    def at(self, out: Sequence[Expr], k: Sequence[Expr]) -> tuple[Expr, ...]:
        """Return the spatial index, in the padded input, of element `k` of window `out`."""
        return tuple(o * s + i * d for o, s, i, d in zip(out, self.stride, k, self.dilation))

    def count(self, out: Sequence[Expr]) -> Expr:
        """Return the number by which an average over window `out` divides, as an index expression; at least 1."""
        total: Expr = wrap(1, INDEX)
        for d, o in enumerate(out):
            counts = self.divisors(d)
            if len(set(counts)) <= 1:  # none where there is no window
                total = total * max((1, *counts[:1]))
                continue
            bounds = self.counted[d]
            assert bounds is not None
            start, dilation = o * self.stride[d] - self.before[d], self.dilation[d]
            first = (T.maximum(wrap(bounds[0], INDEX) - start, 0) + (dilation - 1)) // dilation
            last = T.minimum((wrap(bounds[1] - 1, INDEX) - start) // dilation, self.kernel[d] - 1)
            taps_inside = last - first + 1
            total = total * (taps_inside if min(counts) else T.maximum(taps_inside, 1))
        return total


MIN_LINE_ELEMENTS = 48
"""Length of a line of outputs that fills vectors well enough; shorter ones are computed by flattened planes."""


def convolution(
    node: Node, x: Tensor, w: Tensor, pad_value: Expr, change_x: Change = None, change_w: ChangeAt = None,
    finish: Callable[[Expr, Expr], Expr] = lambda acc, m: acc,
) -> Tensor:  # fmt: skip
    """Return finish(sum over the window of x * w, output channel). x: [N, C, ...], w: [M, C/group, ...].

    pad_value: of elements around the image. change_x and change_w are applied once to each element before it is
    multiplied. Products have the type of the changed w, to which x is converted. Short lines of outputs are computed by
    `_convolution_by_plane`. Raises Unsupported for shapes that do not fit.
    """
    group = int(node.attrs.get("group", 1))
    n, c, m = x.shape[0], x.shape[1], w.shape[0]
    if len(x.shape) < 3 or len(w.shape) != len(x.shape) or c != w.shape[1] * group or m % group:
        raise node.fail(f"x {list(x.shape)}, w {list(w.shape)}, group {group}")
    cg, mg = c // group, m // group
    window = SlidingWindow.of(node, x.shape[2:], w.shape[2:])
    # With a stride, splitting the image into phases takes longer than it saves where a line fills half a vector. With
    # one input channel, lines share what they read.
    lanes = target().lanes(x.dtype)
    short_line = lanes // 2 if set(window.stride) != {1} else lanes if cg == 1 else MIN_LINE_ELEMENTS
    by_plane = len(window.out) > 1 and 1 < window.out[-1] < short_line and prod(window.kernel) > 1
    p = window.phases(x, pad_value, change_x) if by_plane else window.padded(x, pad_value, change_x)
    if change_w is not None:
        unchanged, fn = w, change_w
        w = T.compute(unchanged.shape, lambda *i: fn(unchanged[i], i), "weights")
    kc = T.reduce_axis(cg, "c")
    ks = tuple(T.reduce_axis(k, f"k{d}") for d, k in enumerate(window.kernel))
    if by_plane:
        return _convolution_by_plane(window, p, w, kc, ks, (n, group, mg), finish)

    def body(ni: Expr, g: Expr, mi: Expr, *o: Expr) -> Expr:
        channel = g * mg + mi
        product = p[(ni, g * cg + kc, *window.at(o, ks))].astype(w.dtype) * w[(channel, kc, *ks)]
        return finish(T.sum(product, (kc, *ks)), channel)

    result = T.compute((n, group, mg, *window.out), body, "conv")
    return replace(result, shape=(n, m, *window.out))


def _convolution_by_plane(
    window: SlidingWindow, p: Tensor, w: Tensor, kc: Axis, ks: tuple[Axis, ...], lead: tuple[int, int, int],
    finish: Callable[[Expr, Expr], Expr],
) -> Tensor:  # fmt: skip
    """Convolve small images with each phase of a padded plane as one row, so that vectors cross line ends.

    Results between the lines are discarded. p: the image as SlidingWindow.phases returns it. kc, ks: reduction axes
    over channels and taps. lead: batch, groups, output channels of a group.
    """
    n, group, mg = lead
    lines = p.shape[-len(ks) :]
    line_strides = [prod(lines[d + 1 :]) for d in range(len(lines))]
    length = sum((o - 1) * stride for o, stride in zip(window.out, line_strides)) + 1
    plane_size = prod(p.shape[2:])
    tap_offset: Expr = wrap(0, INDEX)
    for d, (k, stride, dilation) in enumerate(zip(ks, window.stride, window.dilation)):
        phase = (k * dilation) % stride * prod((*window.stride[d + 1 :], *lines))
        if stride > 1:
            tap_offset = tap_offset + phase + (k * dilation) // stride * line_strides[d]
        else:
            tap_offset = tap_offset + k * (dilation * line_strides[d])
    cg = kc.extent

    def plane(ni: Expr, g: Expr, mi: Expr, position: Expr) -> Expr:
        """Return the sum of window times weights at the flat `position` of the padded plane."""
        start = ni * (p.shape[1] * plane_size) + (g * cg + kc) * plane_size
        return T.sum(p.flat(start + position + tap_offset).astype(w.dtype) * w[(g * mg + mi, kc, *ks)], (kc, *ks))

    sums = T.compute((n, group, mg, length), plane, "planes")

    def body(ni: Expr, g: Expr, mi: Expr, *o: Expr) -> Expr:
        position: Expr = wrap(0, INDEX)
        for i, stride in zip(o, line_strides):
            position = position + i * stride
        return finish(sums[ni, g, mi, position], g * mg + mi)

    return replace(T.compute((n, group, mg, *window.out), body, "conv"), shape=(n, group * mg, *window.out))


@op("Conv", kind=Kind.COMPLEX, rounded_once=True, needs_kernel=True, windows=True, operands="x w:weights b:bias?")
def conv(node: Node) -> Tensor:
    """Build Conv, with any groups, strides, dilations and number of axes."""
    x, w = node.input("x"), node.input("w")
    zero = wrap(0, x.dtype)
    if not node.has("b"):
        return convolution(node, x, w, zero)
    bias = node.input("b")
    return convolution(node, x, w, zero, finish=lambda acc, m: acc + bias[m])


@op(
    "ConvTranspose",
    kind=Kind.COMPLEX,
    rounded_once=True,
    needs_kernel=True,
    windows=True,
    operands="x w:weights b:bias?",
)
def conv_transpose(node: Node) -> Tensor:
    """Build ConvTranspose, with any groups, strides, dilations and number of axes."""
    x, w, bias = node.input("x"), node.input("w"), node.optional("b")
    return transposed_convolution(node, x, w, lambda x, w: x * w, lambda acc, m: acc if bias is None else acc + bias[m])


def transposed_convolution(
    node: Node, x: Tensor, w: Tensor, multiply: Callable[[Expr, Expr], Expr], finish: Callable[[Expr, Expr], Expr]
) -> Tensor:
    """Return a transposed convolution, for each output element the sum of the inputs that reach it.

    y[o] = finish(sum over k of multiply(x[(o + before - k*dilation) / stride], w[k]), channel), over the k whose
    quotient is an integer inside x. x: [N, C, ...], w: [C, M/group, ...].
    """
    geometry = transposed_windows(node.attrs, x.shape[2:], w.shape[2:])
    group, sp = int(node.attrs.get("group", 1)), len(x.shape) - 2
    n, c, mg = x.shape[0], x.shape[1], w.shape[1]
    cg = c // group
    kc = T.reduce_axis(cg, "c")
    ks = tuple(T.reduce_axis(k, f"k{d}") for d, k in enumerate(geometry.kernel))

    def body(ni: Expr, g: Expr, mi: Expr, *o: Expr) -> Expr:
        """Return the sum over the taps whose input element exists."""
        is_inside: Expr | None = None
        pixel = []
        for d in range(sp):
            shifted = o[d] + geometry.before[d] - ks[d] * geometry.dilation[d]
            position = shifted // geometry.stride[d]
            test = (shifted >= 0) & (position < x.shape[2 + d]) & T.equal(shifted % geometry.stride[d], 0)
            is_inside = test if is_inside is None else is_inside & test
            pixel.append(position)
        assert is_inside is not None
        channel = g * cg + kc
        product = multiply(x[(ni, channel, *pixel)], w[(channel, mi, *ks)])
        return finish(T.sum(select(is_inside, product, 0), (kc, *ks)), g * mg + mi)

    return replace(
        T.compute((n, group, mg, *geometry.out), body, "conv_transpose"), shape=(n, group * mg, *geometry.out)
    )


def product(
    a: Tensor, b: Tensor, transpose_a: bool = False, transpose_b: bool = False, change_a: Change = None,
    change_b: ChangeAt = None, finish: Callable[[Expr, tuple[Expr, ...]], Expr] = lambda acc, i: acc,
    fixed_b: bool = False,
) -> Tensor:  # fmt: skip
    """Return finish(numpy.matmul(a, b), its index), for tensors of at least two dimensions.

    transpose_a, transpose_b: the last two axes are swapped first. change_a, change_b: functions of each element before
    it is multiplied. fixed_b: `b` is constant, or the same for many products, so that a packed copy of it costs
    nothing. It decides between rows of b, columns of b, and b packed into panels. Raises ValueError for shapes that do
    not fit.
    """
    inner = a.shape[-2 if transpose_a else -1]
    m, n = a.shape[-1 if transpose_a else -2], b.shape[-2 if transpose_b else -1]
    batch = batch_shape(a, b, inner, b.shape[-1 if transpose_b else -2])

    def prepared(t: Tensor, turn: bool, change: ChangeAt, name: str) -> Tensor:
        """Return matrices, transposed where `turn` is set, with `change` applied to each element."""
        if change is None and not turn:
            return t
        shape = (*t.shape[:-2], t.shape[-1], t.shape[-2]) if turn else t.shape

        def element(*i: Expr) -> Expr:
            source = (*i[:-2], i[-1], i[-2]) if turn else i
            return t[source] if change is None else change(t[source], source)

        return T.compute(shape, element, name)

    fn = change_a
    a = prepared(a, transpose_a, None if fn is None else lambda v, i: fn(v), "a")
    dot = transpose_b and m < 4  # then rows of b are read once, and best as they are
    b = prepared(b, transpose_b and not dot, change_b, "b")
    k = T.reduce_axis(inner, "k")
    lanes = target().lanes(b.dtype)
    streamed = fixed_b and m < PACKED_ROWS  # each element is read for few rows, as fast as memory gives them
    max_vectors = min(MAX_STREAMS, (target().registers - 1) // (m + 1)) if streamed else 1  # all rows in one tile
    widths = [*(count * lanes for count in range(max_vectors, 0, -1)), lanes // 2]
    width = next((w for w in widths if w > 1 and n % w == 0), 0)
    large = inner * n * itemsize(b.dtype) > PACKED_BYTES
    if not dot and width and large and (m >= PACKED_ROWS or streamed):
        # A register tile reads panels [..., N / width, K, width] contiguously.
        panels = (*b.shape[:-2], n // width, inner, width)
        packed = T.compute(panels, lambda *i: b[(*i[:-3], i[-2], i[-3] * width + i[-1])], "panels")
        packed = replace(packed, stored=True)

        def by_panel(*i: Expr) -> Expr:
            *lead, row, panel, lane = i
            index = (*lead, row, panel * width + lane)
            right = packed[(*batch_index(b, lead), panel, k, lane)]
            return finish(T.sum(a[(*batch_index(a, lead), row, k)] * right, k), index)

        return replace(T.compute((*batch, m, n // width, width), by_panel, "matmul"), shape=(*batch, m, n))

    def body(*i: Expr) -> Expr:
        lead_a = batch_index(a, i[:-2])
        lead_b = batch_index(b, i[:-2])
        right = b[(*lead_b, i[-1], k)] if dot else b[(*lead_b, k, i[-1])]
        return finish(T.sum(a[(*lead_a, i[-2], k)] * right, k), i)

    return T.compute((*batch, m, n), body, "matmul")


def batch_shape(a: Tensor, b: Tensor, inner_a: int, inner_b: int) -> Shape:
    """Return the broadcast batch dimensions of a matrix product of a and b.

    inner_a, inner_b: extents of the axis of each over which the product sums. Raises ValueError where these differ, or
    the batches do not broadcast.
    """
    with suppress(ValueError):
        if inner_a == inner_b:
            return broadcast(a.shape[:-2], b.shape[:-2])
    raise ValueError(f"{list(a.shape)} and {list(b.shape)} do not multiply")


PACKED_ROWS = 16
"""Rows of a product from which a packed copy of the second matrix saves more time than it takes."""
PACKED_BYTES = 1 << 15
"""Bytes of a matrix above which its rows lie so far apart that caches and address translation suffer."""


def batch_index(t: Tensor, index: Sequence[Expr]) -> tuple[Expr, ...]:
    """Return the index of the batch axes of `t` (all but the last two), 0 where an axis is broadcast.

    index: of the batch axes of the product.
    """
    batch_rank = len(t.shape) - 2
    last_indices = index[len(index) - batch_rank :] if batch_rank > 0 else ()
    return tuple(wrap(0, INDEX) if n == 1 else i for i, n in zip(last_indices, t.shape))


def multiply_any_rank(
    node: Node, a: Tensor, b: Tensor, multiply: Callable[..., Tensor] | None = None, **how: Any
) -> Tensor:  # fmt: skip
    """Multiply matrices or vectors as numpy.matmul does: a vector is a row on the left, a column on the right.

    multiply: the product of matrices, by default `product`; how: its further arguments. Raises Unsupported for scalars
    and for shapes that do not fit.
    """
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


@op("MatMul", kind=Kind.COMPLEX, rounded_once=True, operands="a b")
def matmul(node: Node) -> Tensor:
    """Build MatMul: batches are broadcast, vectors are rows or columns."""
    return multiply_any_rank(node, node.input(0), node.input(1), fixed_b=node.is_fixed(1))


@op("Gemm", kind=Kind.COMPLEX, rounded_once=True, needs_kernel=True, operands="a b c:bias?")
def gemm(node: Node) -> Tensor:
    """Build Gemm: alpha A B + beta C, C broadcast. Raises Unsupported for shapes that do not fit."""
    a, b = node.input(0), node.input(1)
    alpha, beta = node.attrs.get("alpha", 1.0), node.attrs.get("beta", 1.0)
    c = node.optional("c")

    def finish(acc: Expr, i: tuple[Expr, ...]) -> Expr:
        """Return alpha * acc + beta * c of one element, without factors of 1."""
        acc = acc if alpha == 1 else acc * alpha
        if c is None or beta == 0:
            return acc
        bias = at(c, i)
        return acc + (bias if beta == 1 else bias * beta)

    try:
        transpose_a, transpose_b = (bool(node.attrs.get(name, 0)) for name in ("transA", "transB"))
        return product(a, b, transpose_a, transpose_b, finish=finish, fixed_b=node.is_fixed(1))
    except ValueError as e:
        raise node.fail(str(e)) from e
