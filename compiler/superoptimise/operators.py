"""The operators of terms: the shape of each one's result, and what it computes, in numpy.

    convolve(x, xz, w, wz, b)    int32 [n, o, h, w]: sum of (x - xz)(w - wz), padding left out, and b; modulo 2^32
    multiply(x, xz, w, wz, b)    int32 [..., o]: the matrix product of x - xz and w - wz [k, o], and b; modulo 2^32
    plus(a, b)                   int32: the sum, modulo 2^32; b may be a number
    requantise(acc, m, z)        bytes: clip(rne(f32(acc) * m) + z), with a multiplier m for each position of `axis`
    map(x, ...)                  bytes: the function `f` of the bytes at the same index of all operands
    largest(x)                   bytes: MaxPool, the maximum of each window; padding is left out
    concat, slice, transpose, reshape, pad(x, value)     as in ONNX, along one `axis`
    phases(x)                    bytes: SpaceToDepth; every `by`-th row and column become channels of their own
    interleave(x)                bytes: DepthToSpace, the inverse of phases
    spread(value)                a tensor of the shape `shape` that is `value` everywhere

meaning.py defines the same operators once more, element by element, for proofs; tests compare the two. windows.py,
floats.py and reals.py add operators to OPERATORS. shape_demands.py says which shapes each operator accepts.
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
"""Attributes of an operator by name: sizes have values here, and functions of bytes are callables."""
Shape = tuple[Any, ...]
"""The size of each axis of a tensor: ints, or integer terms of z3 in proofs."""


class BytesFunction(Protocol):
    """A function of single bytes: it takes arrays of one shape and returns an array of that shape."""

    def __call__(self, *operands: Array) -> Array: ...


@dataclass(frozen=True)
class TermOperator:
    """Definition of an operator. shape: result shape from operand shapes. evaluate: result from operands, in numpy."""

    shape: Callable[[Sequence[Shape], Attributes], Shape]
    evaluate: Callable[[Sequence[Array], Attributes], Array]


def window_shape(x: Shape, kernel: Shape, attributes: Attributes) -> Shape:
    """Return the rows and columns of the result of windows of size `kernel` on an image of shape `x` [n, c, h, w].

    attributes: pads (top, left, bottom, right), strides and dilations."""
    pads, strides, dilations = attributes["pads"], attributes["strides"], attributes["dilations"]
    return tuple(
        quotient(x[2 + i] + pads[i] + pads[2 + i] - dilations[i] * (kernel[i] - 1) - 1, strides[i]) + 1 for i in (0, 1)
    )


# Shapes of results ---------------------------------------------------------------------------------------------------


def _convolve_shape(shapes: Sequence[Shape], attributes: Attributes) -> Shape:
    """Shape of a convolution: batch of x, outputs of w, and the rows and columns of its windows."""
    x, w = shapes[0], shapes[2]
    return (x[0], w[0], *window_shape(x, w[2:], attributes))


def _pool_shape(shapes: Sequence[Shape], attributes: Attributes) -> Shape:
    """Shape of a pooling: batch and channels of its operand, and the rows and columns of its windows."""
    return (*shapes[0][:2], *window_shape(shapes[0], attributes["kernel"], attributes))


def _first_shape(shapes: Sequence[Shape], attributes: Attributes) -> Shape:
    """Shape of an element-wise operator: that of its first operand."""
    return shapes[0]


def _concat_shape(shapes: Sequence[Shape], attributes: Attributes) -> Shape:
    """Shape of a Concat: the sizes along `axis` added up, all others those of the first operand."""
    axis = attributes["axis"]
    total = shapes[0][axis]
    for shape in shapes[1:]:
        total = total + shape[axis]
    return (*shapes[0][:axis], total, *shapes[0][axis + 1 :])


def _slice_shape(shapes: Sequence[Shape], attributes: Attributes) -> Shape:
    """Shape of a Slice from `start` to `stop` along `axis`."""
    axis = attributes["axis"]
    return (*shapes[0][:axis], attributes["stop"] - attributes["start"], *shapes[0][axis + 1 :])


def _pad_shape(shapes: Sequence[Shape], attributes: Attributes) -> Shape:
    """Shape after padding; `pads` lists what is added before each axis, then behind each axis, as in ONNX."""
    pads, rank = attributes["pads"], len(shapes[0])
    return tuple(pads[i] + size + pads[rank + i] for i, size in enumerate(shapes[0]))


# Evaluation in numpy -------------------------------------------------------------------------------------------------


def wrap_int32(values: Array) -> Array:
    """Reduce whole numbers modulo 2^32 to int32, as accumulators do."""
    return np.asarray(values, np.int64).astype(np.int32)


def _windows(x: Array, kernel: Sequence[int], attributes: Attributes, fill: int) -> Array:
    """Copy the windows of x [n, c, h, w], padded with `fill`: [n, c, rows, columns, kernel rows, kernel columns]."""
    top, left, bottom, right = attributes["pads"]
    padded = np.pad(x, ((0, 0), (0, 0), (top, bottom), (left, right)), constant_values=fill)
    (down, across), (dh, dw) = attributes["strides"], attributes["dilations"]
    rows, columns = window_shape(x.shape, tuple(kernel), attributes)
    windows = np.empty((*x.shape[:2], rows, columns, *kernel), padded.dtype)
    for i, j in product(range(kernel[0]), range(kernel[1])):
        tap_rows = padded[:, :, i * dh : i * dh + (rows - 1) * down + 1 : down]
        windows[..., i, j] = tap_rows[..., j * dw : j * dw + (columns - 1) * across + 1 : across]
    return windows


def _convolve(args: Sequence[Array], attributes: Attributes) -> Array:
    """Compute a convolution with int32 sums, in any number of groups."""
    x, xz, w, wz, b = (arg.astype(np.int64) for arg in args)
    groups = attributes["group"]
    windows = _windows(x - xz, w.shape[2:], attributes, 0)
    n, channels, rows, columns = windows.shape[:4]
    windows = windows.reshape(n, groups, channels // groups, rows, columns, *w.shape[2:])
    weights = (w - wz[:, None, None, None]).reshape(groups, len(w) // groups, *w.shape[1:])
    return wrap_int32(
        np.einsum("ngchwij,gocij->ngohw", windows, weights).reshape(n, len(w), rows, columns) + b[:, None, None]
    )


def _multiply(args: Sequence[Array], attributes: Attributes) -> Array:
    """Compute a matrix product with int32 sums."""
    x, xz, w, wz, b = (arg.astype(np.int64) for arg in args)
    return wrap_int32((x - xz) @ (w - wz) + b)


def _requantise(args: Sequence[Array], attributes: Attributes) -> Array:
    """Requantise accumulators to the type of the zero point, as onnxruntime does in float32."""
    acc, m, z = args
    info = np.iinfo(z.dtype)
    multiplier_shape = [1] * acc.ndim
    multiplier_shape[attributes["axis"]] = -1
    result = requantize_f32(acc, np.int32(0), m.reshape(multiplier_shape), int(z), int(info.min), int(info.max))
    return result.astype(z.dtype)


def _apply_function(args: Sequence[Array], attributes: Attributes) -> Array:
    """Apply the function of bytes in attribute `f`."""
    f: BytesFunction = attributes["f"]
    return f(*args)


def _max_pool(args: Sequence[Array], attributes: Attributes) -> Array:
    """Compute MaxPool; padding is filled with the least byte, so that it never wins."""
    lowest = np.iinfo(args[0].dtype).min
    return np.asarray(_windows(args[0], attributes["kernel"], attributes, int(lowest)).max((4, 5)))


def _slice(args: Sequence[Array], attributes: Attributes) -> Array:
    """Cut positions `start` to `stop` out of `axis`."""
    axes_before = (slice(None),) * attributes["axis"]
    return np.asarray(args[0][(*axes_before, slice(attributes["start"], attributes["stop"]))])


def _pad(args: Sequence[Array], attributes: Attributes) -> Array:
    """Pad with the value of the second operand."""
    pads, rank = attributes["pads"], args[0].ndim
    return np.pad(args[0], [(pads[i], pads[rank + i]) for i in range(rank)], constant_values=args[1].item())


def _phases(args: Sequence[Array], attributes: Attributes) -> Array:
    """Compute SpaceToDepth: the channels of the result are ordered by row phase, column phase, old channel."""
    by = attributes["by"]
    n, c, h, w = args[0].shape
    return args[0].reshape(n, c, h // by, by, w // by, by).transpose(0, 3, 5, 1, 2, 4).reshape(n, -1, h // by, w // by)


def _phases_shape(shapes: Sequence[Shape], attributes: Attributes) -> Shape:
    """Shape of SpaceToDepth: `by` * `by` times the channels, a `by`-th of the rows and of the columns."""
    (n, c, h, w), by = shapes[0], attributes["by"]
    return n, c * (by * by), quotient(h, by), quotient(w, by)


def _interleave(args: Sequence[Array], attributes: Attributes) -> Array:
    """Compute DepthToSpace in ONNX's mode DCR, the inverse of `_phases`."""
    by = attributes["by"]
    n, _, h, w = args[0].shape
    return args[0].reshape(n, by, by, -1, h, w).transpose(0, 3, 4, 1, 5, 2).reshape(n, -1, h * by, w * by)


def _interleave_shape(shapes: Sequence[Shape], attributes: Attributes) -> Shape:
    """Shape of DepthToSpace: `by` times the rows and the columns."""
    (n, c, h, w), by = shapes[0], attributes["by"]
    return n, quotient(c, by * by), h * by, w * by


OPERATORS: dict[str, TermOperator] = {
    "convolve": TermOperator(_convolve_shape, _convolve),
    "multiply": TermOperator(lambda shapes, attributes: (*shapes[0][:-1], shapes[2][1]), _multiply),
    "plus": TermOperator(_first_shape, lambda args, attributes: wrap_int32(args[0].astype(np.int64) + args[1])),
    "requantise": TermOperator(_first_shape, _requantise),
    "map": TermOperator(_first_shape, _apply_function),
    "largest": TermOperator(_pool_shape, _max_pool),
    "concat": TermOperator(_concat_shape, lambda args, attributes: np.concatenate(args, attributes["axis"])),
    "slice": TermOperator(_slice_shape, _slice),
    "transpose": TermOperator(
        lambda shapes, attributes: tuple(shapes[0][axis] for axis in attributes["perm"]),
        lambda args, attributes: args[0].transpose(attributes["perm"]),
    ),
    "reshape": TermOperator(
        lambda shapes, attributes: tuple(attributes["shape"]),
        lambda args, attributes: args[0].reshape(attributes["shape"]),
    ),
    "pad": TermOperator(_pad_shape, _pad),
    "phases": TermOperator(_phases_shape, _phases),
    "interleave": TermOperator(_interleave_shape, _interleave),
    "spread": TermOperator(
        lambda shapes, attributes: tuple(attributes["shape"]),
        lambda args, attributes: np.full(attributes["shape"], args[0]),
    ),
}
"""Definition of each operator by its name."""
