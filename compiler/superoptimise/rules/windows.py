"""Rules of pooling: MaxPool by rows and then by columns, and averages as depthwise convolutions.

With several `taps`, the vector unit computes a row of a kernel in one step, but only one pixel of a pooling. An average
by products saves that. Where padding does not count, windows at the border have another divisor: these stay averages,
apart.
"""

from __future__ import annotations

from typing import Any

from celosia.compiler.superoptimise.rule import Dim, OneOf, OpenSize, RewriteRule, Term, apply
from celosia.compiler.superoptimise.rules.movement import F
from celosia.compiler.superoptimise.rules.products import IMAGE, PADS, PLAIN, XZ, H, W, concat_of, slice_of

KH, KW = OpenSize("kh", 2), OpenSize("kw", 2)
AROUND = tuple(OpenSize(f"around{i}") for i in range(4))
"""Padding of at least one pixel on each side."""


def _max_pool_by_rows(stride: int) -> RewriteRule:
    """The rule that splits a MaxPool into one of rows and one of columns, for this stride."""
    attributes: dict[str, Any] = {"dilations": (1, 1)}
    top, left, bottom, right = PADS
    rows = apply("largest", IMAGE, kernel=(1, KW), pads=(0, left, 0, right), strides=(1, stride), **attributes)
    at_once = apply("largest", IMAGE, kernel=(KH, KW), pads=PADS, strides=(stride, stride), **attributes)
    twice = apply("largest_again", rows, kernel=(KH, 1), pads=(top, 0, bottom, 0), strides=(stride, 1), **attributes)
    says = "the largest of a window is the largest of the largest of its rows"
    return RewriteRule(f"largest by rows, strides of {stride}", says, (at_once,), (twice,))


def _average_term(x: Term, pads: tuple[Dim, ...]) -> Term:
    """Write an AveragePool with stride 1 whose padding does not count."""
    return apply("average", x, XZ, kernel=(KH, KW), pads=pads, counted=False, f=F, **PLAIN)


def _average_by_products(pads: tuple[Dim, ...], **windows: Any) -> Term:
    """Write an average of IMAGE as a depthwise convolution."""
    return apply("average_by_products", IMAGE, XZ, kernel=(KH, KW), pads=pads, f=F, **windows)


def _averages_with_borders_apart() -> RewriteRule:
    """The rule that computes the windows inside of the image by products, and those at each border as averages."""
    top, left, bottom, right = AROUND
    first = _average_term(slice_of(IMAGE, 2, 0, KH - 1), (top, left, 0, right))
    last = _average_term(slice_of(IMAGE, 2, H - KH + 1, H), (0, left, bottom, right))
    before = _average_term(slice_of(IMAGE, 3, 0, KW - 1), (0, left, 0, 0))
    behind = _average_term(slice_of(IMAGE, 3, W - KW + 1, W), (0, 0, 0, right))
    middle = concat_of(3, concat_of(3, before, _average_by_products((0, 0, 0, 0), **PLAIN)), behind)
    return RewriteRule(
        "averages inside by products",
        "where windows lie in the image, their average is a convolution's; those that reach beyond are apart",
        (_average_term(IMAGE, AROUND),), (concat_of(2, concat_of(2, first, middle), last),), (KH <= H, KW <= W),
    )  # fmt: skip


def _average_of_full_windows(name: str, pads: tuple[Dim, ...], counted: bool) -> RewriteRule:
    """The rule that computes an average by products where all windows have the same divisor."""
    windows: dict[str, Any] = {"strides": OneOf("strides", ((1, 1), (2, 2))), "dilations": (1, 1)}
    before = apply("average", IMAGE, XZ, kernel=(KH, KW), pads=pads, counted=counted, f=F, **windows)
    return RewriteRule(
        name, "an average of whole windows is a convolution of each channel with ones as weights",
        (before,), (_average_by_products(pads, **windows),),
    )  # fmt: skip


WINDOWS = (
    _max_pool_by_rows(1), _max_pool_by_rows(2), _averages_with_borders_apart(),
    _average_of_full_windows("averages by products", (0, 0, 0, 0), False),
    _average_of_full_windows("averages with padding by products", PADS, True),
)  # fmt: skip
