"""Float convolutions and transposed convolutions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod

from celosia.compiler import expr as T
from celosia.compiler.expr import INDEX, Axis, Expr, Tensor, select, wrap
from celosia.compiler.ops.registry import Change, ChangeAt, Node, op
from celosia.compiler.ops.window import SlidingWindow
from celosia.compiler.program.host.window_geometry import transposed_windows
from celosia.compiler.program.op_spec import Kind
from celosia.compiler.target import target

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


@op("Conv", kind=Kind.COMPLEX, wide=True, heavy=True, windows=True, operands="x w:weights b:bias?")
def conv(node: Node) -> Tensor:
    """Build Conv, with any groups, strides, dilations and number of axes."""
    x, w = node.input("x"), node.input("w")
    zero = wrap(0, x.dtype)
    if not node.has("b"):
        return convolution(node, x, w, zero)
    bias = node.input("b")
    return convolution(node, x, w, zero, finish=lambda acc, m: acc + bias[m])


@op("ConvTranspose", kind=Kind.COMPLEX, wide=True, heavy=True, windows=True, operands="x w:weights b:bias?")
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
        inside: Expr | None = None
        pixel = []
        for d in range(sp):
            shifted = o[d] + geometry.before[d] - ks[d] * geometry.dilation[d]
            position = shifted // geometry.stride[d]
            test = (shifted >= 0) & (position < x.shape[2 + d]) & T.equal(shifted % geometry.stride[d], 0)
            inside = test if inside is None else inside & test
            pixel.append(position)
        assert inside is not None
        channel = g * cg + kc
        product = multiply(x[(ni, channel, *pixel)], w[(channel, mi, *ks)])
        return finish(T.sum(select(inside, product, 0), (kc, *ks)), g * mg + mi)

    return replace(
        T.compute((n, group, mg, *geometry.out), body, "conv_transpose"), shape=(n, group * mg, *geometry.out)
    )
