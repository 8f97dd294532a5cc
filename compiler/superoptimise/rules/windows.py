"""Windows of pooling: the largest of rows, then of columns; averages as depthwise convolutions.

Who has taps computes a row of a kernel in one step, and a pooling one pixel in each: that is what an average by
products saves. Where padding does not count, pixels of the border have another divisor: they stay averages, apart.
"""

from __future__ import annotations

from typing import Any

import celosia.compiler.superoptimise.windows  # noqa: F401  the operators
from celosia.compiler.superoptimise.rule import RewriteRule
from celosia.compiler.superoptimise.rules.merging import IMAGE, XZ, H, W, joined, part
from celosia.compiler.superoptimise.sizes import Dim, OneOf, OpenSize
from celosia.compiler.superoptimise.terms import ByteFunction, Term, apply

KH, KW = OpenSize("kh", 2), OpenSize("kw", 2)
PADS = tuple(OpenSize(f"pad{i}", 0) for i in range(4))
AROUND = tuple(OpenSize(f"around{i}") for i in range(4))
"""Padding on each side."""
F = ByteFunction("f")
PLAIN: dict[str, Any] = {"strides": (1, 1), "dilations": (1, 1)}


def _by_rows(stride: int) -> RewriteRule:
    """stride: of rows and columns."""
    given: dict[str, Any] = {"dilations": (1, 1)}
    top, left, bottom, right = PADS
    rows = apply("largest", IMAGE, kernel=(1, KW), pads=(0, left, 0, right), strides=(1, stride), **given)
    whole = apply("largest", IMAGE, kernel=(KH, KW), pads=PADS, strides=(stride, stride), **given)
    both = apply("largest_again", rows, kernel=(KH, 1), pads=(top, 0, bottom, 0), strides=(stride, 1), **given)
    says = "the largest of a window is the largest of the largest of its rows"
    return RewriteRule(f"largest by rows, strides of {stride}", says, (whole,), (both,))


def _average(x: Term, pads: tuple[Dim, ...]) -> Term:
    return apply("average", x, XZ, kernel=(KH, KW), pads=pads, counted=False, f=F, **PLAIN)


def _products(pads: tuple[Dim, ...], **windows: Any) -> Term:
    return apply("average_by_products", IMAGE, XZ, kernel=(KH, KW), pads=pads, f=F, **windows)


def _apart() -> RewriteRule:
    top, left, bottom, right = AROUND
    first = _average(part(IMAGE, 2, 0, KH - 1), (top, left, 0, right))
    last = _average(part(IMAGE, 2, H - KH + 1, H), (0, left, bottom, right))
    before = _average(part(IMAGE, 3, 0, KW - 1), (0, left, 0, 0))
    behind = _average(part(IMAGE, 3, W - KW + 1, W), (0, 0, 0, right))
    middle = joined(3, joined(3, before, _products((0, 0, 0, 0), **PLAIN)), behind)
    return RewriteRule(
        "averages inside by products",
        "where windows lie in the image, their average is a convolution's; those that reach beyond are apart",
        (_average(IMAGE, AROUND),), (joined(2, joined(2, first, middle), last),), (KH <= H, KW <= W),
    )  # fmt: skip


def _whole(name: str, pads: tuple[Dim, ...], counted: bool) -> RewriteRule:
    windows: dict[str, Any] = {"strides": OneOf("strides", ((1, 1), (2, 2))), "dilations": (1, 1)}
    before = apply("average", IMAGE, XZ, kernel=(KH, KW), pads=pads, counted=counted, f=F, **windows)
    return RewriteRule(
        name, "an average of whole windows is a convolution of each channel with ones as weights",
        (before,), (_products(pads, **windows),),
    )  # fmt: skip


WINDOWS = (
    _by_rows(1), _by_rows(2), _apart(),
    _whole("averages by products", (0, 0, 0, 0), False), _whole("averages with padding by products", PADS, True),
)  # fmt: skip
