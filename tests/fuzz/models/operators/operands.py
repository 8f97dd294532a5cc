"""Draw operands, scales and attributes of operators."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fuzz.models.net import Draw, Net

Make = Callable[[Net], list[str]]
FLOATS = ("float32",) * 6 + ("float64", "float16")
INTEGERS = ("int8", "uint8", "int32", "int64")
NUMBERS = ("float32", "float32", "float32", "float64", "int32", "int64")


def either(net: Net, value: Any, dtype: Any = None, constant: float = 0.5) -> str:
    """Add a constant, or an input of the model. constant: probability of a constant."""
    array = np.asarray(value, dtype)
    return net.constant(array) if net.draw.chance(constant) else net.input(array)


def operand(net: Net, shape: Sequence[int], dtype: Any = "float32", spread: float = 2.0) -> str:
    """Add an input of the model with random values. Return its name."""
    return net.input(net.draw.array(dtype, shape, spread))


def any_shape(draw: Draw, low: int = 0, high: int = 5, most: int = 6) -> tuple[int, ...]:
    """Draw `low` to `high` sizes from 1 to `most`."""
    return draw.shape(draw.randint(low, high), most)


def broadcast_shape(draw: Draw, shape: Sequence[int]) -> tuple[int, ...]:
    """Draw a shape that broadcasts to `shape`, perhaps with fewer axes."""
    dims = [n if draw.chance(0.6) else 1 for n in shape]
    return tuple(dims[draw.randint(0, len(dims)) if draw.chance(0.3) else 0 :])


def any_pair(draw: Draw) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Draw two shapes that broadcast to one."""
    shape = any_shape(draw)
    return tuple(
        draw.sample([broadcast_shape(draw, shape), shape if draw.chance() else broadcast_shape(draw, shape)], 2)
    )  # type: ignore[return-value]


def any_axis(draw: Draw, rank: int) -> int:
    """Draw an axis, counted from the front or, if negative, from the end."""
    return draw.randint(-rank, rank - 1)


def random_subset(draw: Draw, **attrs: Any) -> dict[str, Any]:
    """Return a random subset of these attributes."""
    return {name: value for name, value in attrs.items() if draw.chance(0.6)}


def without_none(**attrs: Any) -> dict[str, Any]:
    """Return the attributes that are not None or empty."""
    return {name: value for name, value in attrs.items() if value not in (None, [])}


def any_scale(draw: Draw) -> np.float32:
    """Draw a scale, often a small fraction, so that ties are common."""
    if draw.chance(0.4):
        return np.float32(draw.choice((1, 2, 3, 5)) / draw.choice((1, 2, 4, 8, 10, 16, 64, 128, 255)))
    return np.float32(math.exp(draw.uniform(-6, 1)))


def scale_and_zero(net: Net, dtype: Any) -> list[str]:
    """Add a constant scale and zero point for a byte type. Return their names."""
    info = np.iinfo(dtype)
    zero = net.draw.choice((0, (int(info.min) + int(info.max) + 1) // 2, net.draw.randint(info.min, info.max)))
    return [net.constant(any_scale(net.draw)), net.constant(zero, dtype)]


def byte_type(draw: Draw) -> str:
    """Draw int8 or uint8."""
    return draw.choice(("int8", "uint8"))


def any_image(draw: Draw, most: int = 9) -> tuple[list[int], list[int]]:
    """Draw the numbers of images and channels, and the sizes of one to three further axes."""
    return [draw.randint(1, 2), draw.randint(1, 9)], [
        draw.randint(1, most) for _ in range(draw.choice((1, 2, 2, 2, 3)))
    ]
