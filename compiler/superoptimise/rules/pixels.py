"""Partly equivalent rules: neighbouring pixels are computed as channels of one pixel, where a convolution has few
outputs.

A kernel that is larger by `by` - 1 covers the windows of `by` x `by` pixels, and strides of `by` go on to the next
ones: taps that windows share are read once, and the channels fill the array. Where rows are no multiple of `by`, more
padding makes them one, and DepthToSpace's result is cut.
"""

from __future__ import annotations

from itertools import product
from typing import Any

from celosia.compiler.superoptimise.rule import RewriteRule
from celosia.compiler.superoptimise.rules.convolutions import WZ, pad_of, spread
from celosia.compiler.superoptimise.rules.merging import IMAGE, PADS, C, H, W, concat_of, convolution, slice_of
from celosia.compiler.superoptimise.sizes import Dim, OpenSize
from celosia.compiler.superoptimise.terms import Leaf, Term, apply

O, KH, KW = OpenSize("o"), OpenSize("kh", 2), OpenSize("kw", 2)
MAX_CHANNELS = 64
"""Number of channels that fills any array."""


Outputs = tuple[Dim, Term, Term, Term]
"""Number of channels, their weights, bias and multipliers."""


def _compute_pixels_as_channels(outputs: Outputs, by: int) -> Term:
    """Write the convolution BEFORE for these outputs, with `by` x `by` pixels as channels of one."""
    number, w, b, m = outputs
    top, left, bottom, right = PADS
    rows, columns = H + top + bottom - KH + 1, W + left + right - KW + 1
    extra = [by * ((size + (by - 1)) // by) - size for size in (rows, columns)]
    offsets = list(product(range(by), repeat=2))
    wider = concat_of(0, *(pad_of(w, WZ, (0, 0, i, j, 0, 0, by - 1 - i, by - 1 - j)) for i, j in offsets))
    convolved = convolution(
        IMAGE, wider, spread(WZ, by * by * number), *(concat_of(0, *[vector] * len(offsets)) for vector in (b, m)),
        strides=(by, by), dilations=(1, 1), pads=(top, left, bottom + extra[0], right + extra[1]),
    )  # fmt: skip
    return slice_of(slice_of(apply("interleave", convolved, by=by), 2, 0, rows), 3, 0, columns)


WEIGHTS, BIAS, MULTIPLIERS = Leaf("w", (O, C, KH, KW), True), Leaf("b", (O,), True), Leaf("m", (O,), True)
PLAIN: dict[str, Any] = {"strides": (1, 1), "dilations": (1, 1)}
BEFORE = (convolution(IMAGE, WEIGHTS, spread(WZ, O), BIAS, MULTIPLIERS, **PLAIN),)
"""The side before of all rules in this file."""
SAYS = "pixels side by side are channels of one, by a kernel with all of their windows"
"""The law of all rules in this file."""


def _all_outputs(by: int) -> RewriteRule:
    """The rule that computes all outputs so, if they are few."""
    return RewriteRule(
        f"pixels as channels, {by} x {by}", SAYS, BEFORE,
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
        f"pixels as channels, 2 x 2, of what is beyond {width}s", f"{SAYS}, for the last channels alone",
        BEFORE, (after,), (full < O, 4 * rest <= width, rest < O), shifts=(1,),
    )  # fmt: skip


PIXELS = (_all_outputs(2), _all_outputs(4), *map(_remaining_outputs, (16, 32, 64)))
