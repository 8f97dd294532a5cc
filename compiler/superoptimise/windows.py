"""Operators of terms over windows, beside `largest`: averages, and a second MaxPool.

    average(x, xz)                 bytes: AveragePool; padding is left out, or counted as zeros where `counted`
    average_by_products(x, xz)     the same for windows that count the whole kernel, written to ONNX as a depthwise
                                   convolution whose weights are ones
    largest_again(x)               `largest` of a tensor that is the result of `largest`

A runtime computes an average as a float sum, in an order that depends on the place of each pixel in its window. Where
no sum comes near a tie of rounding (`numerics.average_is_exact`), the order does not matter: there, and only there, an
average may be computed by products.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from celosia.compiler.numerics import average_is_exact, global_average_scale, requantize_f32
from celosia.compiler.superoptimise.graph import Quantisation
from celosia.compiler.superoptimise.operators import OPERATORS, Array, Attributes, Shape, TermOperator, window_shape
from celosia.compiler.superoptimise.scales import weights_of
from celosia.compiler.superoptimise.shape_demands import DEMANDS


@dataclass(frozen=True)
class Averaging:
    """The function of sums and counts by which an AveragePool of bytes makes its result.

    x, y: scale and zero point of operand and result. dtype: of both. qdq: whether the model has QDQ around the
    operator.
    """

    x: Quantisation
    y: Quantisation
    dtype: str
    qdq: bool

    def __call__(self, sums: Array, counts: Array) -> Array:
        """Return the bytes for `sums` of (x's byte - zero point) over windows that count `counts` pixels."""
        result, info = np.zeros(sums.shape, np.int32), np.iinfo(self.dtype)
        for count in np.unique(counts):
            bytes_ = requantize_f32(sums, np.int32(0), self.multiplier(int(count)), self.y.zero, info.min, info.max)
            result = np.where(counts == count, bytes_, result)
        return result.astype(self.dtype)

    def multiplier(self, count: int) -> np.float32:
        """Return the factor from sums of `count` pixels to steps of y."""
        return np.float32(global_average_scale(self.x.scale, self.y.scale, count))

    def weight_scale(self, count: int) -> np.float32 | None:
        """Return the scale of weights of 1 with which a convolution gives the same bytes as averages of `count` pixels.

        None where no scale does.

        >>> average = Averaging(Quantisation(0.5, 0), Quantisation(0.5, 0), "int8", True)
        >>> float(average.weight_scale(9)), average.weight_scale(4)
        (0.1111111119389534, None)
        """
        if self.dtype != "int8" or not average_is_exact(self.x.scale, self.x.zero, self.y.scale, count):
            return None
        scales = weights_of(np.array([self.multiplier(count)], np.float32), self.x.scale, self.y.scale)
        return None if scales is None else np.float32(scales[0])

    def __str__(self) -> str:
        return "AveragePool"


def _average_shape(shapes: Sequence[Shape], attributes: Attributes) -> Shape:
    """Shape of a pooling: batch and channels of x, and the rows and columns of its windows."""
    return (*shapes[0][:2], *window_shape(shapes[0], attributes["kernel"], attributes))


def _average(args: Sequence[Array], attributes: Attributes) -> Array:
    """Compute averages with the function `f` of sums and counts. Trials of rules use random functions instead of an
    Averaging; these take bytes.
    """
    x, xz = (arg.astype(np.int64) for arg in args)
    sums = _sum_windows(x - xz, attributes)
    counts = np.full(sums.shape, int(np.prod(attributes["kernel"])))
    if not attributes.get("counted", True):
        counts = _sum_windows(np.ones_like(x), attributes)
    f = attributes["f"]
    if not hasattr(f, "weight_scale"):  # a random function of two bytes
        sums, counts = sums.astype(np.int8), counts.astype(np.int8)
    return np.asarray(f(sums, counts))


def _sum_windows(x: Array, attributes: Attributes) -> Array:
    """Sum each window of x [n, c, h, w], padded with zeros, for each channel by itself."""
    channels = x.shape[1]
    ones, none = np.ones((channels, 1, *attributes["kernel"])), np.zeros(channels)
    windows = {name: attributes[name] for name in ("pads", "strides", "dilations")}
    return OPERATORS["convolve"].evaluate([x, np.zeros(()), ones, none, none], {**windows, "group": channels})


def _average_demands(shapes: Sequence[Shape], attributes: Attributes) -> Iterator[Any]:
    """Yield that each window has a pixel, and that products can give the same bytes where the Averaging is known."""
    yield len(shapes[0]) == 4 and len(shapes[1]) == 0
    yield from DEMANDS["largest"](shapes[:1], attributes)
    weight_scale_of = getattr(attributes["f"], "weight_scale", None)
    if "counted" not in attributes and weight_scale_of is not None:
        yield weight_scale_of(int(np.prod(attributes["kernel"]))) is not None


OPERATORS |= {
    "average": TermOperator(_average_shape, _average),
    "average_by_products": TermOperator(_average_shape, _average),
    "largest_again": OPERATORS["largest"],
}
DEMANDS |= {"average": _average_demands, "average_by_products": _average_demands, "largest_again": DEMANDS["largest"]}
