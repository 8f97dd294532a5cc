"""Partly equivalent rules: a convolution without its outer taps is right where these see padding only.

    rows of the result      0 ........ near ........ rows - far ........ rows
    taps that see an image  1 ... last | 0 ... last | 0 ... last - 1

In the first `near` rows of the result, as many as the padding before, the first tap sees no row of the image, and in
the last `far` rows the last tap sees none. These border rows are computed by smaller kernels, and Concat puts the
results together. A dilated kernel on a small image spends most of its steps on padding; the rules save these.
"""

from __future__ import annotations

from celosia.compiler.superoptimise.rule import RewriteRule
from celosia.compiler.superoptimise.rules.merging import PADS, C, H, N, W, concat_of, constants, convolution, slice_of
from celosia.compiler.superoptimise.sizes import Dim, OneOf, OpenSize, SizeOf
from celosia.compiler.superoptimise.terms import Composed, Leaf, Term

DILATION = OneOf("step", (1, 2, 3, 4, 6, 8, 12, 18, 24, 36))
"""Dilation of both rows and columns."""
MIN_BORDER, MAX_RATIO = 2, 24
"""Least number of border rows, and largest ratio of rows to border rows. Smaller borders hardly save what one more
convolution costs.
"""
O = OpenSize("o")
"""Number of outputs."""
IMAGE = Leaf("x", (N, C, H, W))
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


def _rules_of_axis(axis: int) -> list[RewriteRule]:
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


BORDERS = tuple(rule for axis in (2, 3) for rule in _rules_of_axis(axis))
