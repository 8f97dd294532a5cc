"""Rules of convolutions and matrix products of bytes; and functions that write terms, which all files of rules use.

Merging: products of one input become one, also where kernels have two sizes; padding, channels and groups go into
weights; strides of 2 become channels by SpaceToDepth. Borders and pixels: part of a convolution is computed by a
cheaper one, the rest apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

from celosia.compiler.superoptimise.rule import (
    Composed,
    Dim,
    Leaf,
    OneOf,
    OpenSize,
    RewriteRule,
    SizeOf,
    SumCut,
    Term,
    apply,
)

N, C, H, W = OpenSize("n"), OpenSize("c"), OpenSize("h"), OpenSize("w")
O1, O2 = OpenSize("o1"), OpenSize("o2")
KERNEL = OpenSize("kh"), OpenSize("kw")
"""Rows and columns of a kernel."""
PADS = tuple(OpenSize(f"pad{i}", 0) for i in range(4))
"""Padding of a convolution: top, left, bottom, right."""
STRIDES = OneOf("strides", ((1, 1), (2, 2), (1, 2), (2, 1)))
DILATIONS = OneOf("dilations", ((1, 1), (2, 2)))
IMAGE = Leaf("x", (N, C, H, W))
"""The operand of most rules of convolutions."""
XZ = Leaf("xz", (), True)
"""Zero point of the operand."""
Z = Leaf("z", (), True)
"""Zero point of the result."""


def concat_of(axis: int, *parts: Term) -> Composed:
    """Write the Concat of `parts` along an axis."""
    return apply("concat", *parts, axis=axis)


def slice_of(x: Term, axis: int, start: object, stop: object) -> Composed:
    """Write the Slice of positions `start` to `stop` of an axis."""
    return apply("slice", x, axis=axis, start=start, stop=stop)


def spread(value: Term, *shape: Dim) -> Composed:
    """Write a constant of this shape that is `value` everywhere."""
    return apply("spread", value, shape=shape)


def pad_of(x: Term, value: Term, pads: tuple[Dim, ...]) -> Composed:
    """Write `x` padded with `value`; pads as in ONNX."""
    return apply("pad", x, value, pads=pads)


def vector(name: str, size: Dim) -> Leaf:
    """Write a constant with one value for each of `size` positions."""
    return Leaf(name, (size,), True)


def constants(number: int, outputs: Dim, weights: tuple[Dim, ...]) -> list[Leaf]:
    """Write the constants of product `number`: weights, and for each output a zero point of weights, bias and
    multiplier.
    """
    return [Leaf(f"w{number}", weights, True), *(vector(f"{name}{number}", outputs) for name in ("wz", "b", "m"))]


def convolution(x: Term, w: Term, wz: Term, b: Term, m: Term, z: Term = Z, xz: Term = XZ, **other: object) -> Composed:
    """Write a requantised convolution. other: attributes that replace the open ones."""
    attributes = {"strides": STRIDES, "dilations": DILATIONS, "pads": PADS, "group": 1, **other}
    return apply("requantise", apply("convolve", x, xz, w, wz, b, **attributes), m, z, axis=1)


def product_of(axis: int, x: Term, w: Term, wz: Term, b: Term, m: Term) -> Composed:
    """Write a requantised matrix product. axis: the last one of x."""
    return apply("requantise", apply("multiply", x, XZ, w, wz, b), m, Z, axis=axis)


# Merging, and what goes into weights ---------------------------------------------------------------------------------


def join_constants(first: Sequence[Term], second: Sequence[Term], axis: int = 0) -> list[Term]:
    """Write the constants of one product that has the outputs of two. axis: of the outputs in the weights."""
    return [concat_of(0 if place else axis, a, b) for place, (a, b) in enumerate(zip(first, second))]


def merge_two(
    name: str, says: str, write: Callable[[Sequence[Term]], Term], constants_of: Sequence[Sequence[Term]],
    outputs: tuple[Dim, Dim], axis: int = 1, weights_axis: int = 0, where: tuple[SizeOf, ...] = (),
) -> RewriteRule:  # fmt: skip
    """The rule that merges two products of one input: their constants are joined, and the result is cut.

    write: writes a product with its constants. outputs: of each. axis, weights_axis: of the outputs in results and
    weights.
    """
    (first, second), (a, b) = constants_of, outputs
    merged = write(join_constants(first, second, weights_axis))
    parts = slice_of(merged, axis, 0, a), slice_of(merged, axis, a, a + b)
    return RewriteRule(name, says, (write(first), write(second)), parts, where)


def _merge_convolutions() -> RewriteRule:
    """The rule that merges two convolutions of one input."""
    return merge_two(
        "merge convolutions", "convolutions of one input with the same windows are one whose channels are theirs",
        lambda weights: convolution(IMAGE, *weights), [constants(i, o, (o, C, *KERNEL)) for i, o in ((1, O1), (2, O2))],
        (O1, O2),
    )  # fmt: skip


def rows_of(rank: int) -> Leaf:
    """Write the open operand of a matrix product."""
    return Leaf("x", (*(OpenSize(f"d{i}") for i in range(rank - 1)), OpenSize("k")))


def _merge_products(rank: int) -> RewriteRule:
    """The rule that merges two products of one input of this rank."""
    return merge_two(
        f"merge products of rank {rank}", "products of one input with constants are one whose columns are theirs",
        lambda weights: product_of(rank - 1, rows_of(rank), *weights),
        [constants(i, o, (OpenSize("k"), o)) for i, o in ((1, O1), (2, O2))], (O1, O2), rank - 1, 1,
    )  # fmt: skip


MERGING = (_merge_convolutions(), *map(_merge_products, (2, 3, 4)))


KH, KW = KERNEL
ALIKE = OneOf("dilation", (1, 2))
"""Dilation of both rows and columns."""
WZ = Leaf("wz", (), True)
"""Zero point of all weights, where they have a single one."""
O, P, Q = OpenSize("o"), OpenSize("p", 0), OpenSize("q")
"""Number of outputs, and the positions of a Slice."""


def _merge_kernels(first_is_larger: bool) -> RewriteRule:
    """The rule that merges two convolutions of one input whose kernels differ by one tap on each side. first_is_larger:
    their order in the graph.
    """
    small, large = (O1, C, KH, KW), (O2, C, KH + 2, KW + 2)
    w1, w2 = Leaf("w1", small, True), Leaf("w2", large, True)
    (b1, m1), (b2, m2) = ((vector(f"b{i}", o), vector(f"m{i}", o)) for i, o in ((1, O1), (2, O2)))
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
    w, b, m = Leaf("w", (O, Q - P, *KERNEL), True), vector("b", O), vector("m", O)
    wide = pad_of(w, WZ, (0, P, 0, 0, 0, C - Q, 0, 0))
    return RewriteRule(
        "channels of a slice into weights",
        "a convolution of some channels is one of all of them, with zeros as weights",
        (convolution(slice_of(IMAGE, 1, P, Q), w, spread(WZ, O), b, m),),
        (convolution(IMAGE, wide, spread(WZ, O), b, m),), shifts=(P,),
    )  # fmt: skip


HALVES = OneOf("half", (1, 2, 4, 8))
"""Number of groups in each half of a grouped convolution."""
GROUPED_WINDOWS: dict[str, Any] = {"strides": OneOf("grouped_strides", ((1, 1), (2, 2))), "dilations": (1, 1)}
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
                    group=HALVES, **GROUPED_WINDOWS)
        for start, stop in bounds
    ]  # fmt: skip
    return RewriteRule(
        "split groups", "a grouped convolution is two, one of each half of the groups",
        (convolution(x, *rows, group=2 * HALVES, **GROUPED_WINDOWS),), (concat_of(1, *halves),),
    )  # fmt: skip


def _join_groups() -> RewriteRule:
    """The rule that joins two grouped convolutions whose results are put together."""
    half, c = OpenSize("half_outputs"), OpenSize("c")
    outputs, inputs = HALVES * half, HALVES * c
    images = [Leaf(f"x{i}", (N, inputs, H, W)) for i in (1, 2)]
    rows = [constants(i, outputs, (outputs, c, *KERNEL)) for i in (1, 2)]
    before = concat_of(
        1, *(convolution(x, *weights, group=HALVES, **GROUPED_WINDOWS) for x, weights in zip(images, rows))
    )
    after = convolution(
        concat_of(1, *images), *(concat_of(0, a, b) for a, b in zip(*rows)), group=2 * HALVES, **GROUPED_WINDOWS
    )
    return RewriteRule(
        "join groups", "convolutions alike whose results are put together are one of twice as many groups",
        (before,), (after,),
    )  # fmt: skip


def _two_groups_as_one() -> RewriteRule:
    """The rule that gives up two groups: weights [o, c] and [o, c] become [2 o, 2 c] with zeros."""
    half, c = OpenSize("half_outputs"), OpenSize("c")
    x = Leaf("x", (N, 2 * c, H, W))
    w, b, m = (Leaf("w", (2 * half, c, *KERNEL), True), vector("b", 2 * half), vector("m", 2 * half))
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
    w, b, m = Leaf("w", (O, C, *size), True), vector("b", O), vector("m", O)
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


# Borders -------------------------------------------------------------------------------------------------------------

# A convolution without its outer taps is right where these see padding only:
#
#     rows of the result      0 ........ near ........ rows - far ........ rows
#     taps that see an image  1 ... last | 0 ... last | 0 ... last - 1
#
# In the first `near` rows of the result, as many as the padding before, the first tap sees no row of the image, and in
# the last `far` rows the last tap sees none. These border rows are computed by smaller kernels, and Concat puts the
# results together. A dilated kernel on a small image spends most of its steps on padding; the rules save these.

DILATION = OneOf("step", (1, 2, 3, 4, 6, 8, 12, 18, 24, 36))
"""Dilation of both rows and columns."""
MIN_BORDER, MAX_RATIO = 2, 24
"""Least number of border rows, and largest ratio of rows to border rows. Smaller borders hardly save what one more
convolution costs.
"""
Span = tuple[Dim, Dim]
"""First tap and the one behind the last; or padding before and behind."""


class _ConvolutionAlongAxis:
    """A convolution of stride 1, seen along `axis` (2: rows, 3: columns).

    taps, length, rows: sizes of kernel, operand and result along the axis. padding_before, padding_behind: along the
    axis. reach: pixels between the first and the last tap. least: of taps.
    """

    def __init__(self, axis: int, least: int) -> None:
        sizes = [OpenSize("kh"), OpenSize("kw")]
        sizes[axis - 2] = self.taps = OpenSize(sizes[axis - 2].name, least)
        self.axis, self.length = axis, (H, W)[axis - 2]
        self.padding_before, self.padding_behind = PADS[axis - 2], PADS[axis]
        self.reach = DILATION * (self.taps - 1)
        self.rows = self.length + self.padding_before + self.padding_behind - self.reach
        self.w, *self.others = constants(1, O, (O, C, *sizes))

    def full(self) -> Composed:
        """Write the complete convolution."""
        return self.with_taps(IMAGE, (0, self.taps), (self.padding_before, self.padding_behind))

    def with_taps(self, x: Term, taps: Span, pads: Span) -> Composed:
        """Write the convolution of `x` with some taps only, and with this padding along the axis."""
        around = list(PADS)
        around[self.axis - 2], around[self.axis] = pads  # type: ignore[call-overload]
        w = self.w if taps == (0, self.taps) else slice_of(self.w, self.axis, *taps)
        return convolution(x, w, *self.others, strides=(1, 1), dilations=(DILATION, DILATION), pads=tuple(around))

    def slice_image(self, start: Dim, stop: Dim) -> Composed:
        """Write a Slice of the image along the axis."""
        return slice_of(IMAGE, self.axis, start, stop)

    def is_worthwhile(self, border: Dim) -> tuple[SizeOf, SizeOf, SizeOf]:
        """Return the conditions that rows of a border lack a tap, are at least MIN_BORDER, and that all rows are at
        most MAX_RATIO times as many.
        """
        return border >= DILATION, SizeOf("<=", MIN_BORDER, border), self.rows <= MAX_RATIO * border

    def first_rows(self) -> Composed:
        """Write the first rows of the result, which do not need the first tap."""
        return self.with_taps(self.slice_image(0, self.reach), (1, self.taps), (self.padding_before - DILATION, 0))

    def last_rows(self) -> Composed:
        """Write the last rows of the result, which do not need the last tap."""
        rows = self.slice_image(self.length - self.reach, self.length)
        return self.with_taps(rows, (0, self.taps - 1), (0, self.padding_behind - DILATION))


def _border_rules(axis: int) -> list[RewriteRule]:
    """The rules for rows (axis 2) or columns (axis 3): both borders apart, borders that overlap, one border, and taps
    that no row needs.
    """
    of = ("rows", "columns")[axis - 2]
    conv, overlapping = _ConvolutionAlongAxis(axis, 2), _ConvolutionAlongAxis(axis, 3)
    before, whole = (conv.full(),), (0, conv.taps)
    near, far = conv.is_worthwhile(conv.padding_before), conv.is_worthwhile(conv.padding_behind)
    apart = concat_of(axis, concat_of(axis, conv.first_rows(), conv.with_taps(IMAGE, whole, (0, 0))), conv.last_rows())
    inner = overlapping.reach - DILATION
    middle = overlapping.slice_image(overlapping.length - inner, inner)
    meeting = concat_of(axis, concat_of(
        axis, overlapping.with_taps(IMAGE, (1, overlapping.taps), (overlapping.padding_before - DILATION, 0)),
        overlapping.with_taps(middle, (1, overlapping.taps - 1), (0, 0))),
        overlapping.with_taps(IMAGE, (0, overlapping.taps - 1), (0, overlapping.padding_behind - DILATION)),
    )  # fmt: skip
    first = concat_of(axis, conv.first_rows(), conv.with_taps(IMAGE, whole, (0, conv.padding_behind)))
    last = concat_of(axis, conv.with_taps(IMAGE, whole, (conv.padding_before, 0)), conv.last_rows())
    says = f"{of} whose outer tap sees padding alone are computed without it"
    gone = "a tap that sees padding alone, everywhere, goes"
    return [
        RewriteRule(
            f"border {of} apart", says, before, (apart,),
            (*near, *far, conv.padding_before + conv.padding_behind < conv.rows), shifts=(-1,),
        ),
        RewriteRule(
            f"border {of} that meet apart", says, (overlapping.full(),), (meeting,),
            (*overlapping.is_worthwhile(overlapping.padding_before),
             *overlapping.is_worthwhile(overlapping.padding_behind),
             overlapping.padding_before < overlapping.rows, overlapping.padding_behind < overlapping.rows,
             overlapping.rows < overlapping.padding_before + overlapping.padding_behind, inner <= overlapping.length),
            shifts=(-1,),
        ),
        RewriteRule(
            f"first {of} apart", says, before, (first,),
            (*near, conv.padding_before < conv.rows, conv.reach <= conv.length), shifts=(-1,),
        ),
        RewriteRule(
            f"last {of} apart", says, before, (last,),
            (*far, conv.padding_behind < conv.rows, conv.reach <= conv.length), shifts=(-1,),
        ),
        RewriteRule(
            f"no first tap of {of}", gone, before,
            (conv.with_taps(IMAGE, (1, conv.taps), (conv.padding_before - DILATION, conv.padding_behind)),),
            (near[0], conv.rows <= conv.padding_before), shifts=(-1,), tidy=True,
        ),
        RewriteRule(
            f"no last tap of {of}", gone, before,
            (conv.with_taps(IMAGE, (0, conv.taps - 1), (conv.padding_before, conv.padding_behind - DILATION)),),
            (far[0], conv.rows <= conv.padding_behind), shifts=(-1,), tidy=True,
        ),
    ]  # fmt: skip


BORDERS = tuple(rule for axis in (2, 3) for rule in _border_rules(axis))


# Pixels as channels --------------------------------------------------------------------------------------------------

# Neighbouring pixels are computed as channels of one pixel, where a convolution has few outputs. A kernel that is
# larger by `by` - 1 covers the windows of `by` x `by` pixels, and strides of `by` go on to the next ones: taps that
# windows share are read once, and the channels fill the array. Where rows are no multiple of `by`, more padding makes
# them one, and DepthToSpace's result is cut.

LARGE_KH, LARGE_KW = OpenSize("kh", 2), OpenSize("kw", 2)
"""Rows and columns of a kernel with at least two of each."""
MAX_CHANNELS = 64
"""Number of channels that fills any array."""
Outputs = tuple[Dim, Term, Term, Term]
"""Number of channels, their weights, bias and multipliers."""


def _compute_pixels_as_channels(outputs: Outputs, by: int) -> Term:
    """Write the convolution of PIXELS_BEFORE for these outputs, with `by` x `by` pixels as channels of one."""
    number, w, b, m = outputs
    top, left, bottom, right = PADS
    rows, columns = H + top + bottom - LARGE_KH + 1, W + left + right - LARGE_KW + 1
    extra = [by * ((size + (by - 1)) // by) - size for size in (rows, columns)]
    offsets = list(product(range(by), repeat=2))
    wider = concat_of(0, *(pad_of(w, WZ, (0, 0, i, j, 0, 0, by - 1 - i, by - 1 - j)) for i, j in offsets))
    convolved = convolution(
        IMAGE, wider, spread(WZ, by * by * number), *(concat_of(0, *[vector] * len(offsets)) for vector in (b, m)),
        strides=(by, by), dilations=(1, 1), pads=(top, left, bottom + extra[0], right + extra[1]),
    )  # fmt: skip
    return slice_of(slice_of(apply("interleave", convolved, by=by), 2, 0, rows), 3, 0, columns)


WEIGHTS, BIAS, MULTIPLIERS = Leaf("w", (O, C, LARGE_KH, LARGE_KW), True), vector("b", O), vector("m", O)
PLAIN: dict[str, Any] = {"strides": (1, 1), "dilations": (1, 1)}
"""Windows without strides and dilations."""
PIXELS_BEFORE = (convolution(IMAGE, WEIGHTS, spread(WZ, O), BIAS, MULTIPLIERS, **PLAIN),)
"""The side before of all rules of pixels."""
PIXELS_LAW = "pixels side by side are channels of one, by a kernel with all of their windows"
"""The law of all rules of pixels."""


def _all_outputs(by: int) -> RewriteRule:
    """The rule that computes all outputs so, if they are few."""
    return RewriteRule(
        f"pixels as channels, {by} x {by}", PIXELS_LAW, PIXELS_BEFORE,
        (_compute_pixels_as_channels((O, WEIGHTS, BIAS, MULTIPLIERS), by),),
        (by * by * O <= MAX_CHANNELS,), shifts=tuple(range(1, by)),
    )  # fmt: skip


def _remaining_outputs(width: int) -> RewriteRule:
    """The rule that computes those outputs so which an array of `width` columns would compute in a last, incomplete
    step.
    """
    full = width * (O // width)
    rest = O - full
    w, b, m = (slice_of(constant, 0, 0, full) for constant in (WEIGHTS, BIAS, MULTIPLIERS))
    last = _compute_pixels_as_channels(
        (rest, slice_of(WEIGHTS, 0, full, O), slice_of(BIAS, 0, full, O), slice_of(MULTIPLIERS, 0, full, O)), 2
    )
    after = concat_of(1, convolution(IMAGE, w, spread(WZ, full), b, m, **PLAIN), last)
    return RewriteRule(
        f"pixels as channels, 2 x 2, of what is beyond {width}s", f"{PIXELS_LAW}, for the last channels alone",
        PIXELS_BEFORE, (after,), (full < O, 4 * rest <= width, rest < O), shifts=(1,),
    )  # fmt: skip


PIXELS = (_all_outputs(2), _all_outputs(4), *map(_remaining_outputs, (16, 32, 64)))
