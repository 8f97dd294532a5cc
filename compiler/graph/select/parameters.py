"""Reading parameters off nodes: scales, zero points, weights, windows."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from celosia.compiler import numerics
from celosia.compiler.graph.operands import operand
from celosia.compiler.graph.select.forms import NotOffloadable
from celosia.compiler.graph.values import constant, shape
from celosia.compiler.layer import Requantise, Window
from celosia.compiler.program.host.window_geometry import Windows


def array_of(value: ir.Value | None) -> NDArray[Any]:
    """A constant's array. NotOffloadable where it is none."""
    array = constant(value)
    if array is None:
        raise NotOffloadable("a scale, zero point or weight is not constant; export it as an initializer")
    return array


def bias_of(node: ir.Node, name: str) -> NDArray[Any] | None:
    """The bias that is the operand `name`, one for all channels or one for each, or None without any. NotOffloadable
    where it is no constant, or a matrix."""
    value = operand(node, name)
    if value is None:
        return None
    array = constant(value)
    if array is None:
        raise NotOffloadable("its bias is not constant; export it as an initializer")
    if array.size != math.prod(array.shape[-1:]):
        raise NotOffloadable(f"a bias of shape {list(array.shape)}; give one number for each column")
    return array


def scalar_of(value: ir.Value | None) -> Any:
    """A constant's only element. NotOffloadable where it has several, or is none."""
    array = array_of(value)
    if array.size != 1:
        raise NotOffloadable("a scale per channel where one is expected; only weights may have one for each channel")
    return array.item()


def stored_zero(value: ir.Value | None) -> int:
    """Zero point as the accelerator stores bytes: uint8 has its top bit flipped."""
    if value is None:
        raise NotOffloadable("a zero point is missing; write it as an input")
    array = array_of(value)
    return int(scalar_of(value)) - (128 if array.dtype == np.uint8 else 0)


def symmetric(weights: NDArray[Any], zero: NDArray[Any] | None) -> NDArray[np.int8]:
    """Weights with a zero point of 0."""
    shift = 128 if weights.dtype == np.uint8 else 0
    if zero is not None and np.any(zero.astype(np.int32) != shift):
        raise NotOffloadable("weights with a zero point; quantise weights symmetrically")
    if zero is None and shift:
        raise NotOffloadable("weights with a zero point; quantise weights symmetrically")
    return (weights.astype(np.int16) - shift).astype(np.int8)


def folded(scale: NDArray[np.float32]) -> tuple[NDArray[np.uint32], NDArray[np.uint8]]:
    """numerics.fold_scale. NotOffloadable where a scale is none."""
    if not np.all(np.isfinite(scale)) or np.any(scale < 0):
        raise NotOffloadable("a scale that is negative or not finite; calibrate again")
    return numerics.fold_scale(scale)


def requantisation(
    scales: list[NDArray[Any]], zero_x: int, zero_y: int, weights: NDArray[np.int8], bias: NDArray[Any] | None
) -> Requantise:
    """Per-channel requantisation of a convolution; the input's zero point goes into the bias."""
    out = weights.shape[0]
    if not weights.size:
        raise NotOffloadable("it has no weights; leave it out of the model")
    if any(array.size not in (1, out) for array in (*scales, *([] if bias is None else [bias]))):
        raise NotOffloadable(f"scales or a bias that do not fit its {out} channels; give one for all, or one for each")
    scale = np.broadcast_to(numerics.conv_scale(*scales).reshape(-1), (out,))
    multiplier, shift = folded(scale)
    total = -zero_x * weights.reshape(out, -1).astype(np.int64).sum(axis=1)
    if bias is not None:
        total = total + np.broadcast_to(bias.reshape(-1), (out,)).astype(np.int64)
    return Requantise(total.astype(np.int32), multiplier, shift, zero_y)


def uniform(channels: int, bias: int, multiplier: int, shift: int, zero_point: int) -> Requantise:
    """Requantise all channels alike."""
    return Requantise(
        np.full(channels, bias, np.int32), np.full(channels, multiplier, np.uint32), np.full(channels, shift, np.uint8),
        zero_point,
    )  # fmt: skip


def window_of(found: Windows) -> Window:
    """Windows as layers have them."""
    (top, left), margins = found.before, found.margins()[1]
    if min(top, left) < 0:
        raise NotOffloadable("windows that begin inside of its input; cut it with Slice")
    bottom, right = (max(given, margin) for given, margin in zip(found.after, margins))
    (k, l), (s, t), (d, e) = found.kernel, found.stride, found.dilation
    return Window((k, l), (s, t), (d, e), (top, left, bottom, right))


def image_axes(rank: int) -> tuple[int, ...]:
    """Find which of images, channels, rows and columns the axes of a tensor are in its natural form."""
    if rank not in (2, 3, 4):
        raise NotOffloadable(f"a tensor of {rank} dimensions; reshape it to one with two to four")
    return {2: (0, 1), 3: (0, 1, 3), 4: (0, 1, 2, 3)}[rank]


def flattens(node: ir.Node) -> bool:
    """Whether `node` turns [images, ...] into [images, rest] of an image tensor."""
    x, y = node.inputs[0], node.outputs[0]
    if x is None:
        return False
    before, after = shape(x), shape(y)
    return before is not None and after is not None and len(before) == 4 and len(after) == 2 and before[0] == after[0]


def has_fixed_matrix(node: ir.Node) -> bool:
    """Whether the second operand of a product is a constant matrix."""
    matrix = constant(operand(node, "b"))
    return matrix is not None and matrix.ndim == 2


def is_one_pixel(b: ir.Value, y: ir.Value) -> bool:
    """Whether `b` holds one value for each image and channel of `y`."""
    inner, outer = shape(b), shape(y)
    return (
        inner is not None and outer is not None and len(inner) == len(outer) == 4
        and inner[:2] == outer[:2] and inner[2:] == (1, 1)
    )  # fmt: skip
