"""Read the parameters of a node as the accelerator takes them: scales, zero points, weights, windows, shapes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from celosia.compiler import numerics
from celosia.compiler.graph.operands import operand, product_names
from celosia.compiler.graph.select.placement import NotOffloadable
from celosia.compiler.graph.values import constant, shape
from celosia.compiler.layer import Requantise, Window
from celosia.compiler.program.host.shape_rules import Windows


def array_of(value: ir.Value | None) -> NDArray[Any]:
    """Return the elements of the constant `value`. Raises NotOffloadable if it is none."""
    array = constant(value)
    if array is None:
        raise NotOffloadable("a scale, zero point or weight is not constant; export it as an initializer")
    return array


def bias_of(node: ir.Node, name: str) -> NDArray[Any] | None:
    """Return the bias, operand `name` of `node`: one number, or one for each channel; None if the node has no bias.

    Raises NotOffloadable if it is not constant, or is a matrix.
    """
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
    """Return the only element of the constant `value`. Raises NotOffloadable if it has several, or is none."""
    array = array_of(value)
    if array.size != 1:
        raise NotOffloadable("a scale per channel where one is expected; only weights may have one for each channel")
    return array.item()


def stored_zero(value: ir.Value | None) -> int:
    """Return the zero point `value` as int8. The accelerator stores uint8 with the top bit flipped: minus 128."""
    if value is None:
        raise NotOffloadable("a zero point is missing; write it as an input")
    array = array_of(value)
    return int(scalar_of(value)) - (128 if array.dtype == np.uint8 else 0)


def require_symmetric(weights: NDArray[Any], zero: NDArray[Any] | None) -> NDArray[np.int8]:
    """Return the weights as int8 with zero point 0; uint8 weights have zero point 128 and are shifted by that.

    Raises NotOffloadable if their zero point is another.
    """
    shift = 128 if weights.dtype == np.uint8 else 0
    if zero is not None and np.any(zero.astype(np.int32) != shift):
        raise NotOffloadable("weights with a zero point; quantise weights symmetrically")
    if zero is None and shift:
        raise NotOffloadable("weights with a zero point; quantise weights symmetrically")
    return (weights.astype(np.int16) - shift).astype(np.int8)


def fold_scales(scale: NDArray[np.float32]) -> tuple[NDArray[np.uint32], NDArray[np.uint8]]:
    """Return the integer multiplier and shift of each scale (`numerics.scale_to_multiplier`).

    Raises NotOffloadable for a negative or infinite scale.
    """
    if not np.all(np.isfinite(scale)) or np.any(scale < 0):
        raise NotOffloadable("a scale that is negative or not finite; calibrate again")
    return numerics.scale_to_multiplier(scale)


def requantisation(node: ir.Node, weights: NDArray[np.int8], bias: NDArray[Any] | None) -> Requantise:
    """Return the per-channel requantisation of a convolution or of a product by a constant matrix.

    The input's zero point goes into the bias: it is multiplied by the sum of the channel's weights and subtracted.
    Each scale of `node` has one number, or one for each output channel. Raises NotOffloadable.
    """
    x, w, _ = product_names(node.op_type)
    scales = [array_of(operand(node, f"{name}_scale")) for name in (x, w, "y")]
    zero_x, zero_y = (stored_zero(operand(node, f"{name}_zero_point")) for name in (x, "y"))
    out = weights.shape[0]
    if not weights.size:
        raise NotOffloadable("it has no weights; leave it out of the model")
    if any(array.size not in (1, out) for array in (*scales, *([] if bias is None else [bias]))):
        raise NotOffloadable(f"scales or a bias that do not fit its {out} channels; give one for all, or one for each")
    scale = np.broadcast_to(numerics.conv_scale(*scales).reshape(-1), (out,))
    multiplier, shift = fold_scales(scale)
    total = -zero_x * weights.reshape(out, -1).astype(np.int64).sum(axis=1)
    if bias is not None:
        total = total + np.broadcast_to(bias.reshape(-1), (out,)).astype(np.int64)
    return Requantise(total.astype(np.int32), multiplier, shift, zero_y)


def requantise_alike(channels: int, bias: int, multiplier: int, shift: int, zero_point: int) -> Requantise:
    """Return a requantisation with the same bias, multiplier and shift for all channels."""
    return Requantise(
        np.full(channels, bias, np.int32), np.full(channels, multiplier, np.uint32), np.full(channels, shift, np.uint8),
        zero_point,
    )  # fmt: skip


def window_of(windows: Windows) -> Window:
    """Convert the windows of a node to the window of a layer.

    Pads at the bottom and right grow where windows reach beyond them, as ceil_mode makes them do. Raises NotOffloadable
    for windows that begin inside the input.
    """
    (top, left), margins = windows.before, windows.margins()[1]
    if min(top, left) < 0:
        raise NotOffloadable("windows that begin inside of its input; cut it with Slice")
    bottom, right = (max(padding, margin) for padding, margin in zip(windows.after, margins))
    (height, width), (down, across), (d, e) = windows.kernel, windows.stride, windows.dilation
    return Window((height, width), (down, across), (d, e), (top, left, bottom, right))


def image_axes(rank: int) -> tuple[int, ...]:
    """Return the axis of [images, channels, height, width] that each axis of a tensor is in its natural form.

    Raises NotOffloadable for tensors of other than two to four axes.
    """
    if rank not in (2, 3, 4):
        raise NotOffloadable(f"a tensor of {rank} dimensions; reshape it to one with two to four")
    return {2: (0, 1), 3: (0, 1, 3), 4: (0, 1, 2, 3)}[rank]


def flattens_image(node: ir.Node) -> bool:
    """Whether `node` reshapes [images, channels, height, width] to [images, all other elements], as Flatten does."""
    x, y = node.inputs[0], node.outputs[0]
    if x is None:
        return False
    before, after = shape(x), shape(y)
    return before is not None and after is not None and len(before) == 4 and len(after) == 2 and before[0] == after[0]


def has_fixed_matrix(node: ir.Node) -> bool:
    """Whether the second operand of a product is a constant matrix."""
    matrix = constant(operand(node, "b"))
    return matrix is not None and matrix.ndim == 2
