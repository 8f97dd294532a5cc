"""Rules of convolutions: merge kernels of two sizes; move padding, channels and groups into weights.

Strides of 2 become channels by SpaceToDepth.
"""

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
    concat_of,
    constants,
    convolution,
    slice_of,
)
from celosia.compiler.superoptimise.sizes import Dim, OneOf, OpenSize
from celosia.compiler.superoptimise.terms import Composed, Leaf, Term, apply

KH, KW = KERNEL
ALIKE = OneOf("dilation", (1, 2))
"""Dilation of both rows and columns."""
WZ = Leaf("wz", (), True)
"""Zero point of all weights, where they have a single one."""
O, P, Q = OpenSize("o"), OpenSize("p", 0), OpenSize("q")


def spread(value: Term, *shape: Dim) -> Composed:
    """Write a constant of this shape that is `value` everywhere."""
    return apply("spread", value, shape=shape)


def pad_of(x: Term, value: Term, pads: tuple[Dim, ...]) -> Composed:
    """Write `x` padded with `value`; pads as in ONNX."""
    return apply("pad", x, value, pads=pads)


def _value_per_output(name: str, outputs: Dim) -> Leaf:
    """Write a constant with one value for each output."""
    return Leaf(name, (outputs,), True)


def _merge_kernels(first_is_larger: bool) -> RewriteRule:
    """The rule that merges two convolutions of one input whose kernels differ by one tap on each side. first_is_larger:
    their order in the graph.
    """
    small, large = (O1, C, KH, KW), (O2, C, KH + 2, KW + 2)
    w1, w2 = Leaf("w1", small, True), Leaf("w2", large, True)
    (b1, m1), (b2, m2) = ((_value_per_output(f"b{i}", o), _value_per_output(f"m{i}", o)) for i, o in ((1, O1), (2, O2)))
    dilations = (ALIKE, ALIKE)
    wider = pad_of(w1, WZ, (0, 0, 1, 1, 0, 0, 1, 1))
    pads = tuple(pad + ALIKE for pad in PADS)
    small_conv = convolution(IMAGE, w1, spread(WZ, O1), b1, m1, dilations=dilations)
    large_conv = convolution(IMAGE, w2, spread(WZ, O2), b2, m2, dilations=dilations, pads=pads)
    sides: list[tuple[Term, Term, Term, OpenSize]] = [(wider, b1, m1, O1), (w2, b2, m2, O2)]
    before: tuple[Term, ...] = (small_conv, large_conv)
    if first_is_larger:
        sides.reverse()
        before = (large_conv, small_conv)
    (wa, ba, ma, oa), (wb, bb, mb, ob) = sides
    merged = convolution(
        IMAGE,
        concat_of(0, wa, wb),
        spread(WZ, O1 + O2),
        concat_of(0, ba, bb),
        concat_of(0, ma, mb),
        dilations=dilations,
        pads=pads,
    )
    return RewriteRule(
        f"merge {'a larger kernel and a smaller' if first_is_larger else 'a smaller kernel and a larger'}",
        "convolutions of one input are one where the smaller kernel with zeros around it has the larger's windows",
        before, (slice_of(merged, 1, 0, oa), slice_of(merged, 1, oa, oa + ob)), shifts=(1,),
    )  # fmt: skip


def _absorb_padding() -> RewriteRule:
    """The rule that replaces a Pad with the zero point by the convolution's own padding."""
    w, wz, b, m = constants(1, O1, (O1, C, *KERNEL))
    top, left, bottom, right = around = tuple(OpenSize(f"around{i}", 0) for i in range(4))
    image = pad_of(IMAGE, XZ, (0, 0, top, left, 0, 0, bottom, right))
    pads = tuple(pad + more for pad, more in zip(PADS, around))
    return RewriteRule(
        "padding into a convolution", "padding with the zero point is the convolution's own",
        (convolution(image, w, wz, b, m),), (convolution(IMAGE, w, wz, b, m, pads=pads),), tidy=True,
    )  # fmt: skip


def _absorb_slice_of_channels() -> RewriteRule:
    """The rule that replaces a Slice of channels by weights that are zero for all other channels."""
    w, b, m = Leaf("w", (O, Q - P, *KERNEL), True), _value_per_output("b", O), _value_per_output("m", O)
    wide = pad_of(w, WZ, (0, P, 0, 0, 0, C - Q, 0, 0))
    return RewriteRule(
        "channels of a slice into weights",
        "a convolution of some channels is one of all of them, with zeros as weights",
        (convolution(slice_of(IMAGE, 1, P, Q), w, spread(WZ, O), b, m),),
        (convolution(IMAGE, wide, spread(WZ, O), b, m),), shifts=(P,),
    )  # fmt: skip


HALVES = OneOf("half", (1, 2, 4, 8))
"""Number of groups in each half of a grouped convolution."""
PLAIN: dict[str, Any] = {"strides": OneOf("grouped_strides", ((1, 1), (2, 2))), "dilations": (1, 1)}
"""Windows of grouped convolutions."""


def _split_groups() -> RewriteRule:
    """The rule that splits a grouped convolution into two with half of the groups each."""
    half, c = OpenSize("half_outputs"), OpenSize("c")
    inputs = HALVES * c
    x = Leaf("x", (N, 2 * inputs, H, W))
    rows = constants(1, 2 * (HALVES * half), (2 * (HALVES * half), c, *KERNEL))
    outputs = HALVES * half
    bounds = (0, 1), (1, 2)
    halves = [
        convolution(slice_of(x, 1, start * inputs, stop * inputs),
                    *(slice_of(constant, 0, start * outputs, stop * outputs) for constant in rows),
                    group=HALVES, **PLAIN)
        for start, stop in bounds
    ]  # fmt: skip
    return RewriteRule(
        "split groups", "a grouped convolution is two, one of each half of the groups",
        (convolution(x, *rows, group=2 * HALVES, **PLAIN),), (concat_of(1, *halves),),
    )  # fmt: skip


def _join_groups() -> RewriteRule:
    """The rule that joins two grouped convolutions whose results are put together."""
    half, c = OpenSize("half_outputs"), OpenSize("c")
    outputs, inputs = HALVES * half, HALVES * c
    images = [Leaf(f"x{i}", (N, inputs, H, W)) for i in (1, 2)]
    rows = [constants(i, outputs, (outputs, c, *KERNEL)) for i in (1, 2)]
    before = concat_of(1, *(convolution(x, *weights, group=HALVES, **PLAIN) for x, weights in zip(images, rows)))
    after = convolution(concat_of(1, *images), *(concat_of(0, a, b) for a, b in zip(*rows)), group=2 * HALVES, **PLAIN)
    return RewriteRule(
        "join groups", "convolutions alike whose results are put together are one of twice as many groups",
        (before,), (after,),
    )  # fmt: skip


def _two_groups_as_one() -> RewriteRule:
    """The rule that gives up two groups: weights [o, c] and [o, c] become [2 o, 2 c] with zeros."""
    half, c = OpenSize("half_outputs"), OpenSize("c")
    x = Leaf("x", (N, 2 * c, H, W))
    w, b, m = (
        Leaf("w", (2 * half, c, *KERNEL), True),
        _value_per_output("b", 2 * half),
        _value_per_output("m", 2 * half),
    )
    first = pad_of(slice_of(w, 0, 0, half), WZ, (0, 0, 0, 0, 0, c, 0, 0))
    last = pad_of(slice_of(w, 0, half, 2 * half), WZ, (0, c, 0, 0, 0, 0, 0, 0))
    zeros = spread(WZ, 2 * half)
    return RewriteRule(
        "two groups as one", "two groups are one with zeros as weights",
        (convolution(x, w, zeros, b, m, group=2),), (convolution(x, concat_of(0, first, last), zeros, b, m),),
        shifts=(c,),
    )  # fmt: skip


def _strides_into_channels(odd: tuple[int, int], ends: tuple[int, int]) -> RewriteRule:
    """The rule that turns a convolution of strides 2 into one of strides 1 over SpaceToDepth of its operand. odd: for
    rows and columns, 1 where the padding before is odd, so that the kernel is padded by one tap before. ends: taps by
    which it is padded behind. Padding behind that no window reaches is dropped.
    """
    hh, hw, kh, kw = OpenSize("half_h"), OpenSize("half_w"), OpenSize("half_kh"), OpenSize("half_kw")
    x = Leaf("x", (N, C, 2 * hh, 2 * hw))
    top, left = OpenSize("half_top", odd[0]), OpenSize("half_left", odd[1])
    bottom, right = OpenSize("bottom", 0), OpenSize("right", 0)
    size = 2 * kh - odd[0] - ends[0], 2 * kw - odd[1] - ends[1]
    w, b, m = Leaf("w", (O, C, *size), True), _value_per_output("b", O), _value_per_output("m", O)
    pads = (2 * top - odd[0], 2 * left - odd[1], bottom, right)
    rows = (2 * hh + pads[0] + bottom - size[0]) // 2 + 1
    columns = (2 * hw + pads[1] + right - size[1]) // 2 + 1
    after = rows - 1 + kh - hh - top, columns - 1 + kw - hw - left
    wider = pad_of(w, WZ, (0, 0, *odd, 0, 0, *ends))
    ones: dict[str, Any] = {"strides": (1, 1), "dilations": (1, 1), "pads": (top, left, *after)}
    before = convolution(x, w, spread(WZ, O), b, m, strides=(2, 2), dilations=(1, 1), pads=pads)
    image, weights = (apply("phases", term, by=2) for term in (x, wider))
    return RewriteRule(
        f"strides into channels {odd[0]}{odd[1]}{ends[0]}{ends[1]}",
        "a convolution of strides two is one of strides one, of the four phases of rows and columns as channels",
        (before,), (convolution(image, weights, spread(WZ, O), b, m, **ones),),
        cuts=(SumCut(0, 1, 2, odd[0]), SumCut(0, 2, 2, odd[1]), SumCut(1, 0, runs=(C, 4))),
    )  # fmt: skip


ROWS_AND_COLUMNS = (0, 0), (0, 1), (1, 0), (1, 1)
"""Whether something holds for rows, and for columns."""
CONVOLUTIONS = (
    _merge_kernels(False), _merge_kernels(True), _absorb_padding(), _absorb_slice_of_channels(),
    _split_groups(), _join_groups(), _two_groups_as_one(),
    *(_strides_into_channels(odd, ends) for odd in ROWS_AND_COLUMNS for ends in ROWS_AND_COLUMNS),
)  # fmt: skip
