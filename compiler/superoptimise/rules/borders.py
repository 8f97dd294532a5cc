"""Partly equivalent: a kernel without its outer taps is right where they see padding alone; the rest is apart.

    rows of the result      0 ........ near ........ rows - far ........ rows
    taps that see an image  1 ... last | 0 ... last | 0 ... last - 1

A row of the result sees none of the image by the first tap where it lies less than `near`, the padding before, from the
first row: so far the smaller kernel is right. What is left is a convolution of its own. Padding that is computed with
is what a dilated kernel on a small image loses most by.
"""

from __future__ import annotations

from celosia.compiler.superoptimise.rule import RewriteRule
from celosia.compiler.superoptimise.rules.merging import PADS, C, H, N, W, constants, convolution, joined, part
from celosia.compiler.superoptimise.sizes import Dim, OneOf, OpenSize, SizeOf
from celosia.compiler.superoptimise.terms import Composed, Leaf, Term

STEP = OneOf("step", (1, 2, 3, 4, 6, 8, 12, 18, 24, 36))
"""The dilation, of rows and columns."""
THIN, WIDE = 2, 24
"""Rows and columns that a border has at least, and of how many times as many it is a border: others hardly save what
one more convolution costs."""
O = OpenSize("o")
IMAGE = Leaf("x", (N, C, H, W))
Span = tuple[Dim, Dim]


class _Windows:
    """A convolution of strides one, seen along `axis` (2: rows, 3: columns). least: of taps."""

    def __init__(self, axis: int, least: int) -> None:
        sizes = [OpenSize("kh"), OpenSize("kw")]
        sizes[axis - 2] = self.taps = OpenSize(sizes[axis - 2].name, least)
        self.axis, self.length = axis, (H, W)[axis - 2]
        self.near, self.far = PADS[axis - 2], PADS[axis]
        self.reach = STEP * (self.taps - 1)
        self.rows = self.length + self.near + self.far - self.reach
        self.w, *self.others = constants(1, O, (O, C, *sizes))

    def whole(self) -> Composed:
        """The convolution."""
        return self.of(IMAGE, (0, self.taps), (self.near, self.far))

    def of(self, x: Term, taps: Span, pads: Span) -> Composed:
        """One of some taps, with this padding along the axis."""
        around = list(PADS)
        around[self.axis - 2], around[self.axis] = pads  # type: ignore[call-overload]
        w = self.w if taps == (0, self.taps) else part(self.w, self.axis, *taps)
        return convolution(x, w, *self.others, strides=(1, 1), dilations=(STEP, STEP), pads=tuple(around))

    def image(self, start: Dim, stop: Dim) -> Composed:
        """Rows of the image."""
        return part(IMAGE, self.axis, start, stop)

    def worth(self, border: Dim) -> tuple[SizeOf, SizeOf, SizeOf]:
        """Conditions on a border: it lacks a tap, is wide enough, and is no more than that."""
        return border >= STEP, SizeOf("<=", THIN, border), self.rows <= WIDE * border

    def first(self) -> Composed:
        """The `near` first rows of the result, without the first tap."""
        return self.of(self.image(0, self.reach), (1, self.taps), (self.near - STEP, 0))

    def last(self) -> Composed:
        """The `far` last ones, without the last tap."""
        rows = self.image(self.length - self.reach, self.length)
        return self.of(rows, (0, self.taps - 1), (0, self.far - STEP))


def _rules(axis: int) -> list[RewriteRule]:
    of = ("rows", "columns")[axis - 2]
    one, two = _Windows(axis, 2), _Windows(axis, 3)
    before, whole = (one.whole(),), (0, one.taps)
    near, far = one.worth(one.near), one.worth(one.far)
    apart = joined(axis, joined(axis, one.first(), one.of(IMAGE, whole, (0, 0))), one.last())
    inner = two.reach - STEP
    meeting = joined(axis, joined(
        axis, two.of(IMAGE, (1, two.taps), (two.near - STEP, 0)),
        two.of(two.image(two.length - inner, inner), (1, two.taps - 1), (0, 0))),
        two.of(IMAGE, (0, two.taps - 1), (0, two.far - STEP)),
    )  # fmt: skip
    first = joined(axis, one.first(), one.of(IMAGE, whole, (0, one.far)))
    last = joined(axis, one.of(IMAGE, whole, (one.near, 0)), one.last())
    says = f"{of} whose outer tap sees padding alone are computed without it"
    gone = "a tap that sees padding alone, everywhere, goes"
    return [
        RewriteRule(
            f"border {of} apart", says, before, (apart,),
            (*near, *far, one.near + one.far < one.rows), shifts=(-1,),
        ),
        RewriteRule(
            f"border {of} that meet apart", says, (two.whole(),), (meeting,),
            (*two.worth(two.near), *two.worth(two.far), two.near < two.rows, two.far < two.rows,
             two.rows < two.near + two.far, inner <= two.length),
            shifts=(-1,),
        ),
        RewriteRule(
            f"first {of} apart", says, before, (first,),
            (*near, one.near < one.rows, one.reach <= one.length), shifts=(-1,),
        ),
        RewriteRule(
            f"last {of} apart", says, before, (last,),
            (*far, one.far < one.rows, one.reach <= one.length), shifts=(-1,),
        ),
        RewriteRule(
            f"no first tap of {of}", gone, before, (one.of(IMAGE, (1, one.taps), (one.near - STEP, one.far)),),
            (near[0], one.rows <= one.near), shifts=(-1,), tidy=True,
        ),
        RewriteRule(
            f"no last tap of {of}", gone, before, (one.of(IMAGE, (0, one.taps - 1), (one.near, one.far - STEP)),),
            (far[0], one.rows <= one.far), shifts=(-1,), tidy=True,
        ),
    ]  # fmt: skip


BORDERS = tuple(rule for axis in (2, 3) for rule in _rules(axis))
