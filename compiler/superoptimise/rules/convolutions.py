"""Convolutions: larger kernels, groups, padding and channels that move into weights, rows and columns into channels."""

from __future__ import annotations

from typing import Any

from celosia.compiler.superoptimise.rule import RewriteRule, SumCut
from celosia.compiler.superoptimise.rules.merging import (
    IMAGE,
    KERNEL,
    O1,
    O2,
    PADS,
    XZ,
    C,
    H,
    N,
    W,
    constants,
    convolution,
    joined,
    part,
)
from celosia.compiler.superoptimise.sizes import Dim, OneOf, OpenSize
from celosia.compiler.superoptimise.terms import Composed, Leaf, Term, apply

KH, KW = KERNEL
ALIKE = OneOf("dilation", (1, 2))
"""Dilation of rows and columns."""
WZ = Leaf("wz", (), True)
"""Zero point of all weights, where it is one."""
O, P, Q = OpenSize("o"), OpenSize("p", 0), OpenSize("q")


def spread(value: Term, *shape: Dim) -> Composed:
    """A constant that is `value` everywhere."""
    return apply("spread", value, shape=shape)


def padded(x: Term, value: Term, pads: tuple[Dim, ...]) -> Composed:
    """`x` with `value` around it."""
    return apply("pad", x, value, pads=pads)


def _rows(name: str, outputs: Dim) -> Leaf:
    return Leaf(name, (outputs,), True)


def _two_kernels(first_is_larger: bool) -> RewriteRule:
    small, large = (O1, C, KH, KW), (O2, C, KH + 2, KW + 2)
    w1, w2 = Leaf("w1", small, True), Leaf("w2", large, True)
    (b1, m1), (b2, m2) = ((_rows(f"b{i}", o), _rows(f"m{i}", o)) for i, o in ((1, O1), (2, O2)))
    around = (ALIKE, ALIKE)
    wider = padded(w1, WZ, (0, 0, 1, 1, 0, 0, 1, 1))
    pads = tuple(pad + ALIKE for pad in PADS)
    one = convolution(IMAGE, w1, spread(WZ, O1), b1, m1, dilations=around)
    other = convolution(IMAGE, w2, spread(WZ, O2), b2, m2, dilations=around, pads=pads)
    sides: list[tuple[Term, Term, Term, OpenSize]] = [(wider, b1, m1, O1), (w2, b2, m2, O2)]
    before: tuple[Term, ...] = (one, other)
    if first_is_larger:
        sides.reverse()
        before = (other, one)
    (wa, ba, ma, oa), (wb, bb, mb, ob) = sides
    both = convolution(
        IMAGE, joined(0, wa, wb), spread(WZ, O1 + O2), joined(0, ba, bb), joined(0, ma, mb), dilations=around, pads=pads
    )
    return RewriteRule(
        f"merge {'a larger kernel and a smaller' if first_is_larger else 'a smaller kernel and a larger'}",
        "convolutions of one input are one where the smaller kernel with zeros around it has the larger's windows",
        before, (part(both, 1, 0, oa), part(both, 1, oa, oa + ob)), shifts=(1,),
    )  # fmt: skip


def _padding() -> RewriteRule:
    w, wz, b, m = constants(1, O1, (O1, C, *KERNEL))
    a = tuple(OpenSize(f"around{i}", 0) for i in range(4))
    top, left, bottom, right = a
    image = padded(IMAGE, XZ, (0, 0, top, left, 0, 0, bottom, right))
    pads = tuple(pad + more for pad, more in zip(PADS, a))
    return RewriteRule(
        "padding into a convolution", "padding with the zero point is the convolution's own",
        (convolution(image, w, wz, b, m),), (convolution(IMAGE, w, wz, b, m, pads=pads),), tidy=True,
    )  # fmt: skip


def _channels() -> RewriteRule:
    w, b, m = Leaf("w", (O, Q - P, *KERNEL), True), _rows("b", O), _rows("m", O)
    wide = padded(w, WZ, (0, P, 0, 0, 0, C - Q, 0, 0))
    return RewriteRule(
        "channels of a slice into weights",
        "a convolution of some channels is one of all of them, with zeros as weights",
        (convolution(part(IMAGE, 1, P, Q), w, spread(WZ, O), b, m),),
        (convolution(IMAGE, wide, spread(WZ, O), b, m),), shifts=(P,),
    )  # fmt: skip


HALVES = OneOf("half", (1, 2, 4, 8))
"""Groups in each half of a grouped convolution."""
PLAIN: dict[str, Any] = {"strides": OneOf("grouped_strides", ((1, 1), (2, 2))), "dilations": (1, 1)}


def _split_groups() -> RewriteRule:
    half, c = OpenSize("half_outputs"), OpenSize("c")
    inputs = HALVES * c
    x = Leaf("x", (N, 2 * inputs, H, W))
    rows = constants(1, 2 * (HALVES * half), (2 * (HALVES * half), c, *KERNEL))
    outputs = HALVES * half
    ends = (0, 1), (1, 2)
    parts = [
        convolution(part(x, 1, a * inputs, b * inputs),
                    *(part(each, 0, a * outputs, b * outputs) for each in rows), group=HALVES, **PLAIN)
        for a, b in ends
    ]  # fmt: skip
    return RewriteRule(
        "split groups", "a grouped convolution is two, one of each half of the groups",
        (convolution(x, *rows, group=2 * HALVES, **PLAIN),), (joined(1, *parts),),
    )  # fmt: skip


def _join_groups() -> RewriteRule:
    half, c = OpenSize("half_outputs"), OpenSize("c")
    outputs, inputs = HALVES * half, HALVES * c
    images = [Leaf(f"x{i}", (N, inputs, H, W)) for i in (1, 2)]
    rows = [constants(i, outputs, (outputs, c, *KERNEL)) for i in (1, 2)]
    before = joined(1, *(convolution(x, *each, group=HALVES, **PLAIN) for x, each in zip(images, rows)))
    after = convolution(joined(1, *images), *(joined(0, a, b) for a, b in zip(*rows)), group=2 * HALVES, **PLAIN)
    return RewriteRule(
        "join groups", "convolutions alike whose results are put together are one of twice as many groups",
        (before,), (after,),
    )  # fmt: skip


def _dense_groups() -> RewriteRule:
    """Replace a pair of groups: weights [o, c] and [o, c] become [2o, 2c] with zeros."""
    half, c = OpenSize("half_outputs"), OpenSize("c")
    x = Leaf("x", (N, 2 * c, H, W))
    w, b, m = Leaf("w", (2 * half, c, *KERNEL), True), _rows("b", 2 * half), _rows("m", 2 * half)
    first = padded(part(w, 0, 0, half), WZ, (0, 0, 0, 0, 0, c, 0, 0))
    last = padded(part(w, 0, half, 2 * half), WZ, (0, c, 0, 0, 0, 0, 0, 0))
    zeros = spread(WZ, 2 * half)
    return RewriteRule(
        "two groups as one", "two groups are one with zeros as weights",
        (convolution(x, w, zeros, b, m, group=2),), (convolution(x, joined(0, first, last), zeros, b, m),), shifts=(c,),
    )  # fmt: skip


def _strided(odd: tuple[int, int], ends: tuple[int, int]) -> RewriteRule:
    """odd: whether padding before is odd, so that the kernel begins a row or column later. ends: what it lacks behind.

    Padding behind that no window reaches goes.
    """
    hh, hw, kh, kw = OpenSize("half_h"), OpenSize("half_w"), OpenSize("half_kh"), OpenSize("half_kw")
    x = Leaf("x", (N, C, 2 * hh, 2 * hw))
    top, left = OpenSize("half_top", odd[0]), OpenSize("half_left", odd[1])
    bottom, right = OpenSize("bottom", 0), OpenSize("right", 0)
    size = 2 * kh - odd[0] - ends[0], 2 * kw - odd[1] - ends[1]
    w, b, m = Leaf("w", (O, C, *size), True), _rows("b", O), _rows("m", O)
    pads = (2 * top - odd[0], 2 * left - odd[1], bottom, right)
    rows = (2 * hh + pads[0] + bottom - size[0]) // 2 + 1
    columns = (2 * hw + pads[1] + right - size[1]) // 2 + 1
    after = rows - 1 + kh - hh - top, columns - 1 + kw - hw - left
    wider = padded(w, WZ, (0, 0, *odd, 0, 0, *ends))
    ones: dict[str, Any] = {"strides": (1, 1), "dilations": (1, 1), "pads": (top, left, *after)}
    before = convolution(x, w, spread(WZ, O), b, m, strides=(2, 2), dilations=(1, 1), pads=pads)
    image, weights = (apply("phases", each, by=2) for each in (x, wider))
    return RewriteRule(
        f"strides into channels {odd[0]}{odd[1]}{ends[0]}{ends[1]}",
        "a convolution of strides two is one of strides one, of the four phases of rows and columns as channels",
        (before,), (convolution(image, weights, spread(WZ, O), b, m, **ones),),
        cuts=(SumCut(0, 1, 2, odd[0]), SumCut(0, 2, 2, odd[1]), SumCut(1, 0, runs=(C, 4))),
    )  # fmt: skip


EVEN_OR_ODD = (0, 0), (0, 1), (1, 0), (1, 1)
CONVOLUTIONS = (
    _two_kernels(False), _two_kernels(True), _padding(), _channels(),
    _split_groups(), _join_groups(), _dense_groups(),
    *(_strided(odd, ends) for odd in EVEN_OR_ODD for ends in EVEN_OR_ODD),
)  # fmt: skip
