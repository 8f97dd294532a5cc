"""Resize and Upsample: each output element is one input element, or a few weighted by tables.

Coordinates and weights are float32, computed in the order of onnxruntime's operations. Their last bit matters: it
decides which element a coordinate halfway between two selects, and to which byte a sum is truncated.

`align_corners`, `pytorch_half_pixel` and `tf_crop_and_resize` use the size of the output, not scale times size of the
input. Before opset 11, `nearest` rounds up if the image shrinks, and down if it grows. With `antialias`, and in mode
`cubic` with channels last, axes are resized one after the other, the innermost first. For bytes, each of these results
is clipped to 0 to 255, even if the type is int8.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.compiler import expr as T
from celosia.compiler.expr import Expr, Tensor, is_float, select, wrap
from celosia.compiler.ops.registry import Node, op
from celosia.compiler.program.host.op import memory_bytes
from celosia.compiler.program.op_spec import Kind, Moves

F32 = np.float32
"""Short name, as formulas round to float32 after each operation."""
Float32 = NDArray[np.float32]
Indices = NDArray[np.int64]
HALF_WAY = 1e-6
"""Tolerance, in elements, within which a coordinate counts as the middle of two elements."""


@dataclass(frozen=True)
class ResizedAxis:
    """An axis of x, and what becomes of it.

    number: of the axis. size: elements of the input. out: elements of the output. scale: output elements for each input
    element, as the model says. roi: start and end of the part that tf_crop_and_resize takes, as fractions.
    """

    number: int
    size: int
    out: int
    scale: np.float32
    roi: tuple[np.float32, np.float32] = (F32(0), F32(1))


@dataclass(frozen=True)
class ResizeTaps:
    """Interpolation table: output element o is the sum over t of weight[o, t] * input[index[o, t]]."""

    index: Indices
    weight: NDArray[Any]


# Coordinates --------------------------------------------------------------------------------------------------------


def coordinates(node: Node, a: ResizedAxis) -> Float32:
    """Return the coordinate in the input of each output element [out], by the coordinate transformation mode.

    Raises Unsupported for an unknown mode.
    """
    o, last = np.arange(a.out, dtype=F32), F32(a.size - 1)
    half = F32(0.5)
    if a.scale == 1:
        return o
    match node.attrs.get("coordinate_transformation_mode", "half_pixel"):
        case "half_pixel":
            return (o + half) / a.scale - half
        case "pytorch_half_pixel":
            return (o + half) / a.scale - half if a.out > 1 else np.zeros(a.out, F32)
        case "tf_half_pixel_for_nn":
            return (o + half) / a.scale
        case "half_pixel_symmetric":
            offset = F32(a.size) / 2 * (1 - F32(a.out) / (a.scale * F32(a.size)))
            return (float(offset) + (o.astype(np.float64) + 0.5) / float(a.scale) - 0.5).astype(F32)
        case "asymmetric":
            return o / a.scale
        case "align_corners":
            return o * last / F32(a.out - 1) if a.out != 1 else np.zeros(a.out, F32)
        case "tf_crop_and_resize":
            start, end = a.roi
            if a.out > 1:
                return start * last + o * (end - start) * last / F32(a.out - 1)
            return np.full(a.out, 0.5 * float(start + end) * float(last), F32)
        case other:
            raise node.fail(f"coordinate_transformation_mode {other}")


def nearest_element(node: Node, a: ResizedAxis) -> Indices:
    """Return the index in the input of each output element [out], in mode nearest.

    Raises Unsupported for an unknown way of rounding.
    """
    x = coordinates(node, a).astype(np.float64)
    below = np.floor(x)
    match node.attrs.get("nearest_mode", "round_prefer_floor"):
        case "round_prefer_floor":
            index = below + (x - below > 0.5 + HALF_WAY)
        case "round_prefer_ceil":
            index = below + (x - below >= 0.5 - HALF_WAY)
        case "floor":
            index = below
        case "ceil":
            index = np.ceil(x)
        case "before version 11":
            index = np.ceil(x) if a.scale < 1 else np.trunc(x)
        case other:
            raise node.fail(f"nearest_mode {other}")
    elements: Indices = np.clip(index, 0, a.size - 1).astype(np.int64)
    return elements


def is_outside(node: Node, a: ResizedAxis) -> NDArray[np.bool_]:
    """Return for each output element [out] whether its coordinate is outside of the input."""
    x = coordinates(node, a)
    return (x < 0) | (x > F32(a.size - 1))


# Weights ------------------------------------------------------------------------------------------------------------


def linear_taps(node: Node, a: ResizedAxis) -> ResizeTaps:
    """Return the table of linear interpolation; the last element, which has no neighbour, counts as half twice."""
    x = np.clip(coordinates(node, a), F32(0), F32(a.size - 1))
    lower = np.minimum(x.astype(np.int64), a.size - 1)
    index = np.stack([lower, np.minimum(lower + 1, a.size - 1)], 1)
    weight = np.abs(x[:, None] - index[:, ::-1].astype(F32))
    weight[index[:, 0] == index[:, 1]] = 0.5
    return ResizeTaps(index, weight)


def integer_linear_taps(node: Node, a: ResizedAxis) -> ResizeTaps:
    """Return the table of linear interpolation with integer weights in units of 2^-10, as onnxruntime has for bytes."""
    x = np.clip(coordinates(node, a), F32(0), F32(a.size - 1))
    index = linear_taps(node, a).index
    weight = np.abs((x * F32(1024)).astype(np.int32)[:, None] - index[:, ::-1].astype(np.int32) * 1024)
    weight[index[:, 0] == index[:, 1]] = 512
    return ResizeTaps(index, weight)


def cubic_taps(node: Node, a: ResizedAxis) -> ResizeTaps:
    """Return the table of cubic interpolation between four neighbours."""
    x, k = coordinates(node, a), F32(node.attrs.get("cubic_coeff_a", -0.75))
    lower = np.floor(x)
    s = x - lower

    def inner(d: Float32) -> Float32:
        return ((k + 2) * d - (k + 3)) * d * d + 1

    def outer(d: Float32) -> Float32:
        return ((k * d - 5 * k) * d + 8 * k) * d - 4 * k

    weight = np.stack([outer(s + 1), inner(s), inner(1 - s), outer(2 - s)], 1)
    index = lower.astype(np.int64)[:, None] + np.arange(-1, 3)
    if node.attrs.get("exclude_outside", 0):
        weight[(index < 0) | (index >= a.size)] = 0
        weight = weight / sum_in_order(weight)[:, None]
    return ResizeTaps(np.clip(index, 0, a.size - 1), weight)


def filter_taps(node: Node, a: ResizedAxis) -> ResizeTaps:
    """Return the table of antialiasing: a filter stretched over the input elements of one output element.

    The weight of taps outside of the input is added to the edge element, or dropped with `exclude_outside`.
    """
    is_cubic = node.attrs.get("mode") == "cubic"
    stretch = F32(1) / a.scale
    support = F32(2 if is_cubic else 1) * max(stretch, F32(1))
    center = F32(0.5) + coordinates(node, a)
    first, end = (np.floor(center + reach + F32(0.5)).astype(np.int64) for reach in (-support, support))
    taps = first[:, None] + np.arange(2 * int(np.ceil(support)) + 1)
    distance = (taps.astype(F32) - center[:, None] + F32(0.5)) * (1 / stretch if stretch >= 1 else F32(1))
    weight = np.where(taps < end[:, None], _filter_weights(node, np.abs(distance), is_cubic), F32(0))
    left, right = taps < 0, (taps >= a.size) & (taps < end[:, None])
    inside_weight = np.where(left | right, F32(0), weight)
    rows = np.arange(a.out)
    if node.attrs.get("exclude_outside", 0):
        weight = inside_weight
    else:
        lowest, highest = (np.clip(edge - first, 0, taps.shape[1] - 1) for edge in (0, a.size - 1))
        for t in range(taps.shape[1]):
            inside_weight[rows, lowest] += np.where(left[:, t], weight[:, t], F32(0))
        for t in range(taps.shape[1]):
            inside_weight[rows, highest] += np.where(right[:, t], weight[:, t], F32(0))
    total = sum_in_order(weight)
    normalised = inside_weight * (1 / np.where(total == 0, F32(1), total))[:, None]
    is_used = np.any(normalised != 0, 0)
    return ResizeTaps(np.clip(taps, 0, a.size - 1)[:, is_used], normalised[:, is_used])


def _filter_weights(node: Node, d: Float32, is_cubic: bool) -> Float32:
    """Return the weights of the triangular or cubic filter at distances `d`, which are not negative."""
    if not is_cubic:
        return np.maximum(1 - d, F32(0))
    k = F32(node.attrs.get("cubic_coeff_a", -0.75))
    inner, outer = ((k + 2) * d - (k + 3)) * d * d + 1, (((d - 5) * d + 8) * d - 4) * k
    return np.where(d < 1, inner, np.where(d < 2, outer, F32(0)))


def sum_in_order(weight: Float32) -> Float32:
    """Return the float32 sum of each row, added from left to right as onnxruntime does."""
    total = np.zeros(len(weight), F32)
    for column in weight.T:
        total = total + column
    return total


# The result ---------------------------------------------------------------------------------------------------------


def select_elements(x: Tensor, axis: int, index: Indices) -> Tensor:
    """Select the elements of x at `index` along `axis`.

    Where each element is repeated equally often, a division computes the index, without a table.
    """
    positions, times = T.constant(index, "index"), len(index) // x.shape[axis]
    is_repetition = times > 0 and np.array_equal(index, np.arange(x.shape[axis]).repeat(times))

    def body(*i: Expr) -> Expr:
        return x[(*i[:axis], i[axis] // times if is_repetition else positions[i[axis]], *i[axis + 1 :])]

    return T.compute((*x.shape[:axis], len(index), *x.shape[axis + 1 :]), body, "resize")


def interpolate_axis(x: Tensor, axis: int, t: ResizeTaps) -> Tensor:
    """Interpolate along one axis by the table `t`, adding from left to right.

    The result has the type of the weights, or float64 if x has it.
    """
    dtype = x.dtype if x.dtype == "float64" else t.weight.dtype.name
    index, weight = T.constant(t.index, "index"), T.constant(t.weight.astype(dtype), "weight")
    k = T.reduce_axis(t.index.shape[1], "k")

    def body(*i: Expr) -> Expr:
        value = x[(*i[:axis], index[i[axis], k], *i[axis + 1 :])]
        return T.ordered_sum(value.astype(dtype) * weight[i[axis], k], k)

    return T.compute((*x.shape[:axis], len(t.index), *x.shape[axis + 1 :]), body, "resize")


def interpolate_corners(x: Tensor, axes: Sequence[int], taps: Sequence[ResizeTaps]) -> Tensor:
    """Interpolate along several axes at once: add the corners around each element, weighted by products of weights.

    taps: for each of `axes`, a table with two taps. The innermost axis comes first, as in onnxruntime. The result has
    the type of the weights, or float64 if x has it.
    """
    dtype = x.dtype if x.dtype == "float64" else taps[0].weight.dtype.name
    index = [T.constant(t.index, "index") for t in taps]
    weight = [T.constant(t.weight.astype(dtype), "weight") for t in taps]

    def body(*i: Expr) -> Expr:
        """Return the weighted sum of the corners around one element."""
        total: Expr | None = None
        for corner in product(*(range(2) for _ in axes)):
            point, factor = list(i), None
            for d, k in reversed(list(enumerate(corner))):
                point[axes[d]] = index[d][i[axes[d]], k]
                axis_weight = weight[d][i[axes[d]], k]
                factor = axis_weight if factor is None else factor * axis_weight
            assert factor is not None
            part = factor * x[tuple(point)].astype(dtype)
            total = part if total is None else total + part
        assert total is not None
        return total

    sizes = dict(zip(axes, (len(t.index) for t in taps)))
    return T.compute(tuple(sizes.get(d, n) for d, n in enumerate(x.shape)), body, "resize")


def convert_tensor(y: Tensor, dtype: str, change: Callable[[Expr], Expr] = lambda v: v) -> Tensor:
    """Apply `change` to elements and convert them to `dtype`, towards zero as in C; y itself where it has that type."""
    return y if y.dtype == dtype else T.compute(y.shape, lambda *i: change(y[i]).astype(dtype), "converted")


def resize_linearly(node: Node, x: Tensor, axes: Sequence[ResizedAxis]) -> Tensor:
    """Interpolate linearly along `axes`, truncating integers; bytes with channels last have integer weights.

    Raises Unsupported for more than three axes.
    """
    numbers = [a.number for a in axes]
    if len(numbers) > 3:
        raise node.fail(f"values between those along {len(numbers)} axes")
    if x.dtype in ("int8", "uint8") and len(x.shape) == 4 and numbers == [1, 2]:
        y = interpolate_corners(x, numbers, [integer_linear_taps(node, a) for a in axes])
        return convert_tensor(y, x.dtype, lambda v: v / (1 << 20))  # two weights in units of 2^-10
    return convert_tensor(interpolate_corners(x, numbers, [linear_taps(node, a) for a in axes]), x.dtype)


def resize_antialiased(node: Node, x: Tensor, axes: Sequence[ResizedAxis]) -> Tensor:
    """Interpolate with antialiasing, the innermost axis first.

    Bytes have weights in units of 2^-22; they are rounded after each axis and clipped to the range of uint8.
    """
    y = x
    for a in reversed(axes):
        if a.out == a.size:
            continue
        t = filter_taps(node, a)
        if x.dtype in ("int8", "uint8"):
            exact = (t.weight * F32(1 << 22)).astype(np.float64)
            t = ResizeTaps(t.index, (np.sign(exact) * np.floor(np.abs(exact) + 0.5)).astype(np.int32))
            y = convert_tensor(
                interpolate_axis(y, a.number, t), x.dtype, lambda v: T.clip((v + (1 << 21)) // (1 << 22), 0, 255)
            )
        else:
            y = convert_tensor(
                interpolate_axis(y, a.number, t), x.dtype, _away_from_zero if not is_float(x.dtype) else lambda v: v
            )
    return y


def _away_from_zero(x: Expr) -> Expr:
    """Round to the nearest integer, ties away from zero."""
    integer_part = T.call("trunc", x)
    step = select(x < 0, wrap(-1, x.dtype), wrap(1, x.dtype))
    return select(T.call("abs", x - integer_part) < 0.5, integer_part, integer_part + step)


def resize_cubically(node: Node, x: Tensor, axes: Sequence[ResizedAxis]) -> Tensor:
    """Interpolate cubically along `axes`, the last one first."""
    y = x
    for a in reversed(axes):
        y = y if a.scale == 1 else interpolate_axis(y, a.number, cubic_taps(node, a))
    return convert_tensor(y, x.dtype)


# The operator -------------------------------------------------------------------------------------------------------


@op(
    "Resize", kind=Kind.COMPLEX, moves=Moves.FILL, rounded_once=True, needs_kernel=True,
    operands="x roi:shape? scales:shape? sizes:shape?",
)  # fmt: skip
@op("Upsample", kind=Kind.COMPLEX, moves=Moves.FILL, operands="x scales:shape")
def resize(node: Node) -> Tensor:
    """Build Resize or Upsample, in all modes and coordinate transformations; unchanged axes are skipped."""
    node, all_axes = resized_axes(node)
    x = node.input(0)
    if all(a.out == a.size for a in all_axes):
        return T.compute(x.shape, lambda *i: x[i], "resize")
    mode, axes = node.attrs.get("mode", "nearest"), [a for a in all_axes if a.scale != 1]
    if mode == "nearest":
        y = x
        for a in axes:
            y = select_elements(y, a.number, nearest_element(node, a))
    else:
        axes = _interpolated_axes(all_axes)
        last_are_channels = len(x.shape) == 4 and [a.number for a in axes] == [1, 2]
        if node.attrs.get("antialias", 0) or (mode == "cubic" and last_are_channels):
            y = resize_antialiased(node, x, axes)
        elif mode in ("linear", "cubic"):
            y = (resize_linearly if mode == "linear" else resize_cubically)(node, x, axes)
        else:
            raise node.fail(f"mode {mode}")
    if node.attrs.get("coordinate_transformation_mode") != "tf_crop_and_resize":
        return y
    outside_masks = [(a.number, T.constant(mask, "outside")) for a in axes if (mask := is_outside(node, a)).any()]
    value = _as_element(float(node.attrs.get("extrapolation_value", 0.0)), x.dtype)

    def body(*i: Expr) -> Expr:
        element: Expr = y[i]
        for number, mask in outside_masks:
            element = select(mask[i[number]], value, element)
        return element

    return T.compute(y.shape, body, "crop")


def _as_element(value: float, dtype: str) -> Expr:
    """Convert a number to a constant of an element type: to an integer towards zero, modulo the size of the type."""
    if is_float(dtype):
        return wrap(value, dtype)
    return wrap(int(np.int64(value).astype(dtype)), dtype)


def _interpolated_axes(axes: Sequence[ResizedAxis]) -> list[ResizedAxis]:
    """Return the axes along which elements are interpolated: where only spatial axes change, all spatial axes.

    onnxruntime interpolates unchanged spatial axes, too, which can round: the last element counts as half, twice.
    """
    scaled = [a.number for a in axes if a.scale != 1]
    for rank, numbers in ((2, (0, 1)), (3, (0, 1, 2)), (4, (2, 3)), (4, (1, 2)), (5, (2, 3, 4))):
        if len(axes) == rank and set(scaled) <= set(numbers):
            return [axes[number] for number in numbers]
    return [axes[number] for number in scaled]


def nearest_indices(node: Node) -> dict[int, Indices]:
    """Return, for each axis that changes, the input index of each output element.

    The accelerator's data movement uses it. Raises Unsupported for interpolation, and for elements outside the input.
    """
    node, axes = resized_axes(node)
    if all(a.out == a.size for a in axes):
        return {}
    if node.attrs.get("mode", "nearest") != "nearest":
        raise node.fail("it makes an element of several")
    crops = node.attrs.get("coordinate_transformation_mode") == "tf_crop_and_resize"
    if crops and any(is_outside(node, a).any() for a in axes):
        raise node.fail("it has elements beside its input")
    indices = {a.number: nearest_element(node, a) for a in axes if a.scale != 1}
    size = node.input(0).shape
    return {axis: index for axis, index in indices.items() if not np.array_equal(index, np.arange(size[axis]))}


def resized_axes(node: Node) -> tuple[Node, list[ResizedAxis]]:
    """Return the node with the default attributes of its version, and all axes of x in order, changed or not.

    Raises Unsupported for sizes and scales that do not fit, or an output larger than memory.
    """
    x = node.input(0)
    rank = len(x.shape)
    axes = [int(a) % rank for a in node.attrs.get("axes", range(rank))]
    sizes = None
    if node.op == "Upsample" or len(node.inputs) == 2:  # before version 11
        factors = node.attrs["scales"] if "scales" in node.attrs else node.constant(1)
        old_defaults = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "before version 11"}
        node = Node(node.op, {**old_defaults, **node.attrs}, (x, None, None), (None,) * 3, 1, node.opset, node.name)
    elif node.has("sizes"):
        sizes = [int(v) for v in node.constant("sizes").reshape(-1)]
        factors = [F32(size) / F32(x.shape[a]) if x.shape[a] else F32(1) for size, a in zip(sizes, axes)]
    else:
        factors = node.constant("scales")
    scales = [F32(scale) for scale in np.asarray(factors).reshape(-1)]
    if sizes is not None and (policy := node.attrs.get("keep_aspect_ratio_policy", "stretch")) != "stretch":
        scales = [min(scales) if policy == "not_larger" else max(scales)] * len(axes)
        sizes = [int(np.floor(np.float64(scale * F32(x.shape[a])) + 0.5)) for scale, a in zip(scales, axes)]
    if sizes is None:
        sizes = [int(F32(x.shape[a]) * scale) for a, scale in zip(axes, scales)]
    if not len(sizes) == len(scales) == len(axes) or not all(scale > 0 for scale in scales):
        raise node.fail(f"sizes {sizes}, scales {[float(s) for s in scales]} for axes {axes} of {list(x.shape)}")
    if any(x.shape[a] == 0 for a in axes):
        raise node.fail(f"sizes {sizes} for axes {axes} of {list(x.shape)}")
    resized = [ResizedAxis(number, n, n, F32(1)) for number, n in enumerate(x.shape)]
    roi = _roi_bounds(node, len(axes))
    for k, (a, size, scale) in enumerate(zip(axes, sizes, scales)):
        resized[a] = ResizedAxis(a, x.shape[a], size, scale, (roi[k], roi[len(axes) + k]))
    if prod(a.out for a in resized) * np.dtype(F32).itemsize > memory_bytes():
        raise node.fail(f"its output {[a.out for a in resized]} takes more than this machine's memory")
    return node, resized


def _roi_bounds(node: Node, axes: int) -> list[np.float32]:
    """Return the start of the part of each axis that is resized, then the end of each, as fractions.

    axes: their number. Only tf_crop_and_resize has another part than all of the axis.
    """
    bounds = [0.0] * axes + [1.0] * axes
    if node.attrs.get("coordinate_transformation_mode") == "tf_crop_and_resize" and node.has("roi"):
        bounds = node.constant("roi").reshape(-1).tolist()
    if len(bounds) != 2 * axes:
        raise node.fail(f"a roi of {len(bounds)} numbers for {axes} axes")
    return [F32(v) for v in bounds]
