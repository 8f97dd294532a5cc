"""Partly equivalent: pixels next to each other as channels of one, where a convolution has few of its own.

A kernel that is larger by `by` - 1 has the windows of `by` x `by` pixels, and strides of `by` go on to the next ones:
taps that windows share are read once, and channels fill the array. Where the rows are no multiple of `by`, more padding
makes them one, and what lies beyond is cut off.
"""

from __future__ import annotations

from itertools import product
from typing import Any

from celosia.compiler.superoptimise.rule import RewriteRule
from celosia.compiler.superoptimise.rules.convolutions import WZ, padded, spread
from celosia.compiler.superoptimise.rules.merging import IMAGE, PADS, C, H, W, convolution, joined, part
from celosia.compiler.superoptimise.sizes import Dim, OpenSize
from celosia.compiler.superoptimise.terms import Leaf, Term, apply

O, KH, KW = OpenSize("o"), OpenSize("kh", 2), OpenSize("kw", 2)
WIDEST = 64
"""Channels that any array is full with."""


Outputs = tuple[Dim, Term, Term, Term]
"""Number of channels, their weights, bias and multipliers."""


def _as_channels(outputs: Outputs, by: int) -> Term:
    """`before` of these channels, `by` x `by` pixels as channels of one."""
    number, w, b, m = outputs
    top, left, bottom, right = PADS
    rows, columns = H + top + bottom - KH + 1, W + left + right - KW + 1
    beyond = [by * ((size + (by - 1)) // by) - size for size in (rows, columns)]
    places = list(product(range(by), repeat=2))
    wider = joined(0, *(padded(w, WZ, (0, 0, i, j, 0, 0, by - 1 - i, by - 1 - j)) for i, j in places))
    made = convolution(
        IMAGE, wider, spread(WZ, by * by * number), *(joined(0, *[each] * len(places)) for each in (b, m)),
        strides=(by, by), dilations=(1, 1), pads=(top, left, bottom + beyond[0], right + beyond[1]),
    )  # fmt: skip
    return part(part(apply("interleave", made, by=by), 2, 0, rows), 3, 0, columns)


WEIGHTS, BIAS, M = Leaf("w", (O, C, KH, KW), True), Leaf("b", (O,), True), Leaf("m", (O,), True)
PLAIN: dict[str, Any] = {"strides": (1, 1), "dilations": (1, 1)}
BEFORE = (convolution(IMAGE, WEIGHTS, spread(WZ, O), BIAS, M, **PLAIN),)
SAYS = "pixels side by side are channels of one, by a kernel with all of their windows"


def _all(by: int) -> RewriteRule:
    return RewriteRule(
        f"pixels as channels, {by} x {by}", SAYS, BEFORE, (_as_channels((O, WEIGHTS, BIAS, M), by),),
        (by * by * O <= WIDEST,), shifts=tuple(range(1, by)),
    )  # fmt: skip


def _rest(width: int) -> RewriteRule:
    """Rewrite the channels that an array of `width` columns leaves for a last step, which they do not fill."""
    full = width * (O // width)
    rest = O - full
    w, b, m = (part(each, 0, 0, full) for each in (WEIGHTS, BIAS, M))
    last = _as_channels((rest, part(WEIGHTS, 0, full, O), part(BIAS, 0, full, O), part(M, 0, full, O)), 2)
    after = joined(1, convolution(IMAGE, w, spread(WZ, full), b, m, **PLAIN), last)
    return RewriteRule(
        f"pixels as channels, 2 x 2, of what is beyond {width}s", f"{SAYS}, for the last channels alone",
        BEFORE, (after,), (full < O, 4 * rest <= width, rest < O), shifts=(1,),
    )  # fmt: skip


PIXELS = (_all(2), _all(4), *map(_rest, (16, 32, 64)))
