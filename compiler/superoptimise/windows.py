"""Operators of terms over windows, beside `largest`.

    average(x, xz)                 bytes: of each window; padding is left out, or is counted as zeros
    average_by_products(x, xz)     the same of windows whose count is the whole kernel, written as a depthwise
                                   convolution with ones as weights
    largest_again(x)               `largest`, of what is itself the largest of windows

An average adds up floats, in an order that hangs on where pixels are in their window. Where no sum comes near a tie
(`numerics.average_is_exact`) its order is none: there, and only there, it may be by products.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from celosia.compiler.numerics import average_is_exact, global_average_scale, requantize_f32
from celosia.compiler.superoptimise.graph import Meant
from celosia.compiler.superoptimise.legal import DEMANDS
from celosia.compiler.superoptimise.operators import OPERATORS, Array, Attributes, Shape, TermOperator, window_shape
from celosia.compiler.superoptimise.scales import weights_of


@dataclass(frozen=True)
class Averaging:
    """The function of sums and counts that averages compute. x, y: scale and zero point. qdq: how they were written."""

    x: Meant
    y: Meant
    dtype: str
    qdq: bool

    def __call__(self, sums: Array, counts: Array) -> Array:
        """Bytes; sums are of what is x's byte less its zero point."""
        found, info = np.zeros(sums.shape, np.int32), np.iinfo(self.dtype)
        for count in np.unique(counts):
            bytes_ = requantize_f32(sums, np.int32(0), self.multiplier(int(count)), self.y.zero, info.min, info.max)
            found = np.where(counts == count, bytes_, found)
        return found.astype(self.dtype)

    def multiplier(self, count: int) -> np.float32:
        """From sums of `count` pixels to steps of y."""
        return np.float32(global_average_scale(self.x.scale, self.y.scale, count))

    def weight(self, count: int) -> np.float32 | None:
        """The scale of weights of 1 with which a convolution gives the same bytes as averages that count so many
        pixels; None where there is none.

        >>> average = Averaging(Meant(0.5, 0), Meant(0.5, 0), "int8", True)
        >>> float(average.weight(9)), average.weight(4)
        (0.1111111119389534, None)
        """
        if self.dtype != "int8" or not average_is_exact(self.x.scale, self.x.zero, self.y.scale, count):
            return None
        found = weights_of(np.array([self.multiplier(count)], np.float32), self.x.scale, self.y.scale)
        return None if found is None else np.float32(found[0])

    def __str__(self) -> str:
        return "AveragePool"


def _shape(shapes: Sequence[Shape], given: Attributes) -> Shape:
    return (*shapes[0][:2], *window_shape(shapes[0], given["kernel"], given))


def _average(args: Sequence[Array], given: Attributes) -> Array:
    x, xz = (arg.astype(np.int64) for arg in args)
    sums = _sums(x - xz, given)
    counts = np.full(sums.shape, int(np.prod(given["kernel"])))
    if not given.get("counted", True):
        counts = _sums(np.ones_like(x), given)
    f = given["f"]
    if not hasattr(f, "weight"):  # of trials: any function of two bytes
        sums, counts = sums.astype(np.int8), counts.astype(np.int8)
    return np.asarray(f(sums, counts))


def _sums(x: Array, given: Attributes) -> Array:
    """Sum each window of x [n, c, h, w], with zeros around it; each channel by itself."""
    channels = x.shape[1]
    ones, none = np.ones((channels, 1, *given["kernel"])), np.zeros(channels)
    windows = {name: given[name] for name in ("pads", "strides", "dilations")}
    return OPERATORS["convolve"].evaluate([x, np.zeros(()), ones, none, none], {**windows, "group": channels})


def _demands(shapes: Sequence[Shape], given: Attributes) -> Iterator[Any]:
    """Every window has a pixel; and products have the multiplier, where it is known."""
    yield len(shapes[0]) == 4 and len(shapes[1]) == 0
    yield from DEMANDS["largest"](shapes[:1], given)
    weight = getattr(given["f"], "weight", None)
    if "counted" not in given and weight is not None:
        yield weight(int(np.prod(given["kernel"]))) is not None


OPERATORS |= {
    "average": TermOperator(_shape, _average),
    "average_by_products": TermOperator(_shape, _average),
    "largest_again": OPERATORS["largest"],
}
DEMANDS |= {"average": _demands, "average_by_products": _demands, "largest_again": DEMANDS["largest"]}
