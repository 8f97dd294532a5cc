"""The operators of terms: what shape they give, and what they compute, in numpy.

    convolve(x, xz, w, wz, b)    int32 [n, o, h, w]: sum of (x - xz)(w - wz), padding left out, and b; modulo 2^32
    multiply(x, xz, w, wz, b)    int32 [..., o]: the same of the last axis of x and the first of w
    plus(a, b)                   int32: the sum, modulo 2^32; b may be a number
    requantise(acc, m, z)        bytes: clip(rne(f32(acc) * m) + z), m by positions of `axis`
    map(x, ...)                  bytes: the function `f` of bytes at the same place
    largest(x)                   bytes: of each window; padding is left out
    concat, slice, transpose, reshape, pad(x, value)
    phases(x)                    bytes: every `by`-th row and column as channels of their own, as SpaceToDepth
    interleave(x)                bytes: channels as every `by`-th row and column, as DepthToSpace
    spread(value)                a number as a tensor of some shape

What each element is made of is said once more, for proofs, in meaning.py; tests compare the two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.numerics import requantize_f32
from celosia.compiler.superoptimise.sizes import quotient

Array = NDArray[Any]
Attributes = Mapping[str, Any]
Shape = tuple[Any, ...]
"""Sizes of a tensor: ints, or terms of z3 in proofs."""


class BytesFunction(Protocol):
    """A function of single bytes."""

    def __call__(self, *operands: Array) -> Array: ...


@dataclass(frozen=True)
class TermOperator:
    """shape: of shapes and attributes. evaluate: of arrays and attributes."""

    shape: Callable[[Sequence[Shape], Attributes], Shape]
    evaluate: Callable[[Sequence[Array], Attributes], Array]


def window_shape(x: Shape, kernel: Shape, attributes: Attributes) -> Shape:
    """Rows and columns of what windows of `kernel` give on those of `x` [n, c, h, w]."""
    pads, strides, dilations = attributes["pads"], attributes["strides"], attributes["dilations"]
    return tuple(
        quotient(x[2 + i] + pads[i] + pads[2 + i] - dilations[i] * (kernel[i] - 1) - 1, strides[i]) + 1 for i in (0, 1)
    )


def _convolved(shapes: Sequence[Shape], attributes: Attributes) -> Shape:
    x, w = shapes[0], shapes[2]
    return (x[0], w[0], *window_shape(x, w[2:], attributes))


def _pooled(shapes: Sequence[Shape], attributes: Attributes) -> Shape:
    return (*shapes[0][:2], *window_shape(shapes[0], attributes["kernel"], attributes))


def _first(shapes: Sequence[Shape], attributes: Attributes) -> Shape:
    return shapes[0]


def _joined(shapes: Sequence[Shape], attributes: Attributes) -> Shape:
    axis = attributes["axis"]
    total = shapes[0][axis]
    for shape in shapes[1:]:
        total = total + shape[axis]
    return (*shapes[0][:axis], total, *shapes[0][axis + 1 :])


def _cut(shapes: Sequence[Shape], attributes: Attributes) -> Shape:
    axis = attributes["axis"]
    return (*shapes[0][:axis], attributes["stop"] - attributes["start"], *shapes[0][axis + 1 :])


def _padded(shapes: Sequence[Shape], attributes: Attributes) -> Shape:
    pads, rank = attributes["pads"], len(shapes[0])
    return tuple(pads[i] + size + pads[rank + i] for i, size in enumerate(shapes[0]))


# In numpy ----------------------------------------------------------------------------------------------------------


def wrapped(values: Array) -> Array:
    """Whole numbers modulo 2^32, as int32."""
    return np.asarray(values, np.int64).astype(np.int32)


def _windows(x: Array, kernel: Sequence[int], attributes: Attributes, fill: int) -> Array:
    """[n, c, h, w, kh, kw] of x [n, c, h, w], with `fill` around it."""
    top, left, bottom, right = attributes["pads"]
    padded = np.pad(x, ((0, 0), (0, 0), (top, bottom), (left, right)), constant_values=fill)
    (down, across), (dh, dw) = attributes["strides"], attributes["dilations"]
    rows, columns = window_shape(x.shape, tuple(kernel), attributes)
    found = np.empty((*x.shape[:2], rows, columns, *kernel), padded.dtype)
    for i, j in product(range(kernel[0]), range(kernel[1])):
        part = padded[:, :, i * dh : i * dh + (rows - 1) * down + 1 : down]
        found[..., i, j] = part[..., j * dw : j * dw + (columns - 1) * across + 1 : across]
    return found


def _convolve(args: Sequence[Array], attributes: Attributes) -> Array:
    x, xz, w, wz, b = (arg.astype(np.int64) for arg in args)
    groups = attributes["group"]
    found = _windows(x - xz, w.shape[2:], attributes, 0)
    n, channels, rows, columns = found.shape[:4]
    found = found.reshape(n, groups, channels // groups, rows, columns, *w.shape[2:])
    weights = (w - wz[:, None, None, None]).reshape(groups, len(w) // groups, *w.shape[1:])
    return wrapped(
        np.einsum("ngchwij,gocij->ngohw", found, weights).reshape(n, len(w), rows, columns) + b[:, None, None]
    )


def _multiply(args: Sequence[Array], attributes: Attributes) -> Array:
    x, xz, w, wz, b = (arg.astype(np.int64) for arg in args)
    return wrapped((x - xz) @ (w - wz) + b)


def _requantise(args: Sequence[Array], attributes: Attributes) -> Array:
    acc, m, z = args
    info = np.iinfo(z.dtype)
    along = [1] * acc.ndim
    along[attributes["axis"]] = -1
    found = requantize_f32(acc, np.int32(0), m.reshape(along), int(z), int(info.min), int(info.max))
    return found.astype(z.dtype)


def _map(args: Sequence[Array], attributes: Attributes) -> Array:
    f: BytesFunction = attributes["f"]
    return f(*args)


def _largest(args: Sequence[Array], attributes: Attributes) -> Array:
    lowest = np.iinfo(args[0].dtype).min
    return np.asarray(_windows(args[0], attributes["kernel"], attributes, int(lowest)).max((4, 5)))


def _slice(args: Sequence[Array], attributes: Attributes) -> Array:
    along = (slice(None),) * attributes["axis"]
    return np.asarray(args[0][(*along, slice(attributes["start"], attributes["stop"]))])


def _pad(args: Sequence[Array], attributes: Attributes) -> Array:
    pads, rank = attributes["pads"], args[0].ndim
    around = [(pads[i], pads[rank + i]) for i in range(rank)]
    return np.pad(args[0], around, constant_values=args[1].item())


def _phases(args: Sequence[Array], attributes: Attributes) -> Array:
    by = attributes["by"]
    n, c, h, w = args[0].shape
    return args[0].reshape(n, c, h // by, by, w // by, by).transpose(0, 3, 5, 1, 2, 4).reshape(n, -1, h // by, w // by)


def _phases_shape(shapes: Sequence[Shape], attributes: Attributes) -> Shape:
    (n, c, h, w), by = shapes[0], attributes["by"]
    return n, c * (by * by), quotient(h, by), quotient(w, by)


def _interleave(args: Sequence[Array], attributes: Attributes) -> Array:
    by = attributes["by"]
    n, _, h, w = args[0].shape
    return args[0].reshape(n, by, by, -1, h, w).transpose(0, 3, 4, 1, 5, 2).reshape(n, -1, h * by, w * by)


def _interleaved_shape(shapes: Sequence[Shape], attributes: Attributes) -> Shape:
    (n, c, h, w), by = shapes[0], attributes["by"]
    return n, quotient(c, by * by), h * by, w * by


OPERATORS: dict[str, TermOperator] = {
    "convolve": TermOperator(_convolved, _convolve),
    "multiply": TermOperator(lambda shapes, given: (*shapes[0][:-1], shapes[2][1]), _multiply),
    "plus": TermOperator(_first, lambda args, given: wrapped(args[0].astype(np.int64) + args[1])),
    "requantise": TermOperator(_first, _requantise),
    "map": TermOperator(_first, _map),
    "largest": TermOperator(_pooled, _largest),
    "concat": TermOperator(_joined, lambda args, given: np.concatenate(args, given["axis"])),
    "slice": TermOperator(_cut, _slice),
    "transpose": TermOperator(
        lambda shapes, given: tuple(shapes[0][each] for each in given["perm"]),
        lambda args, given: args[0].transpose(given["perm"]),
    ),
    "reshape": TermOperator(
        lambda shapes, given: tuple(given["shape"]), lambda args, given: args[0].reshape(given["shape"])
    ),
    "pad": TermOperator(_padded, _pad),
    "phases": TermOperator(_phases_shape, _phases),
    "interleave": TermOperator(_interleaved_shape, _interleave),
    "spread": TermOperator(
        lambda shapes, given: tuple(given["shape"]), lambda args, given: np.full(given["shape"], args[0])
    ),
}
