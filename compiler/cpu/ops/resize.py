"""Resize: along each axis in turn, a few input elements weighted by a table."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from celosia.compiler import expr as T
from celosia.compiler.cpu.ops.registry import Node, op, round_even, saturate
from celosia.compiler.cpu.runtime.op import memory_bytes
from celosia.compiler.expr import Expr, Tensor, is_float

Float64 = NDArray[np.float64]


@dataclass(frozen=True)
class Taps:
    """Output element o is offset[o] + sum over t of weight[o, t] * input[index[o, t]]."""

    index: NDArray[np.int64]
    weight: Float64
    offset: Float64


def cubic(x: Float64, a: float) -> Float64:
    x = np.abs(x)
    inner, outer = ((a + 2) * x - (a + 3)) * x * x + 1, ((x - 5) * x + 8) * x * a - 4 * a
    return np.where(x <= 1, inner, np.where(x < 2, outer, 0.0))


def coordinates(node: Node, n: int, out: int, scale: float, roi: tuple[float, float]) -> Float64:
    """Where in the input each output element lies."""
    o, length = np.arange(out, dtype=np.float64), scale * n
    match node.attrs.get("coordinate_transformation_mode", "half_pixel"):
        case "half_pixel":
            return (o + 0.5) / scale - 0.5
        case "pytorch_half_pixel":
            return (o + 0.5) / scale - 0.5 if length > 1 else np.full(out, -0.5)
        case "half_pixel_symmetric":
            return n / 2 * (1 - out / length) + (o + 0.5) / scale - 0.5
        case "asymmetric":
            return o / scale
        case "align_corners":
            return o * (n - 1) / (length - 1) if length != 1 else np.zeros(out)
        case "tf_crop_and_resize":
            if length == 1:
                return np.full(out, (roi[0] + roi[1]) * (n - 1) / 2)
            return roi[0] * (n - 1) + o * (roi[1] - roi[0]) * (n - 1) / (length - 1)
        case other:
            raise node.fail(f"coordinate_transformation_mode {other}")


def taps(node: Node, n: int, out: int, scale: float, roi: tuple[float, float]) -> Taps:
    mode = node.attrs.get("mode", "nearest")
    x = coordinates(node, n, out, scale, roi)
    left = np.ceil(x) - 1  # so that an element exactly on the grid is the right one of the two around x
    ratio = x - left
    if mode == "nearest":
        right = {
            "round_prefer_floor": ratio > 0.5, "round_prefer_ceil": ratio >= 0.5, "floor": ratio == 1,
            "ceil": ratio > 0,
        }[node.attrs.get("nearest_mode", "round_prefer_floor")]  # fmt: skip
        index, weight = (left + right)[:, None], np.ones((out, 1))
    else:
        shrink = min(scale, 1.0) if node.attrs.get("antialias", 0) else 1.0
        reach = {"linear": 1, "cubic": 2}[mode]
        steps = np.arange(int(np.floor(-reach / shrink)) + 1, 1 - int(np.floor(-reach / shrink)))
        distance = (steps - ratio[:, None]) * shrink
        if mode == "linear":
            weight = np.clip(1 - np.abs(distance), 0, 1)
        else:
            weight = cubic(distance, float(node.attrs.get("cubic_coeff_a", -0.75)))
        index = left[:, None] + steps
        if node.attrs.get("exclude_outside", 0):
            weight = np.where((index < 0) | (index >= n), 0, weight)
        weight = weight / weight.sum(1, keepdims=True)
    offset = np.zeros(out)
    if node.attrs.get("coordinate_transformation_mode") == "tf_crop_and_resize":
        outside = (x < 0) | (x > n - 1)
        offset = np.where(outside, float(node.attrs.get("extrapolation_value", 0.0)), 0)
        weight = np.where(outside[:, None], 0, weight)
    return Taps(np.clip(index, 0, n - 1).astype(np.int64), weight, offset)


def along(x: Tensor, axis: int, t: Taps) -> Tensor:
    dtype = x.dtype if is_float(x.dtype) else "float32"
    index = T.constant(t.index, "index")
    weight = T.constant(t.weight.astype(dtype), "weight")
    offset = T.constant(t.offset.astype(dtype), "offset")
    plain = t.index.shape[1] == 1 and bool((t.weight == 1).all()) and not t.offset.any()

    times = t.index.shape[0] // x.shape[axis]
    repeated = plain and times > 0 and np.array_equal(t.index[:, 0], np.arange(x.shape[axis]).repeat(times))

    def body(*i: Expr) -> Expr:
        o = i[axis]
        if repeated:
            return x[(*i[:axis], o // times, *i[axis + 1 :])]
        values = [x[(*i[:axis], index[o, k], *i[axis + 1 :])] for k in range(t.index.shape[1])]
        if plain:
            return values[0]
        total: Expr = offset[o]
        for k, value in enumerate(values):
            total = total + value.astype(dtype) * weight[o, k]
        return total

    shape = (*x.shape[:axis], t.index.shape[0], *x.shape[axis + 1 :])
    return T.compute(shape, body, "resize")


def nearest(node: Node) -> dict[int, NDArray[np.int64]]:
    """The element of x that each of y is, along each axis that changes. Unsupported where one is made of several."""
    x, found = node.input(0), dict[int, NDArray[np.int64]]()
    for axis, t in all_taps(node):
        if t.index.shape[1] > 1 or np.any(t.weight != 1) or t.offset.any():
            raise node.fail("it makes an element of several")
        found[axis] = t.index[:, 0]
    return {axis: index for axis, index in found.items() if len(index) != x.shape[axis] or np.any(np.diff(index) != 1)}


@op("Resize", "Upsample")
def resize(node: Node) -> Tensor:
    x = node.input(0)
    y = x
    for axis, t in all_taps(node):
        y = along(y, axis, t)
    if y is x:
        return T.compute(x.shape, lambda *i: x[i], "resize")
    if y.dtype != x.dtype:
        wide = y
        return T.compute(y.shape, lambda *i: saturate(round_even(wide[i]), x.dtype), "rounded")
    return y


def all_taps(node: Node) -> list[tuple[int, Taps]]:
    """Of each axis along which there is something to do."""
    x = node.input(0)
    rank = len(x.shape)
    axes = [int(a) % rank for a in node.attrs.get("axes", range(rank))]
    if node.op == "Upsample" or len(node.inputs) == 2:  # before version 11
        given = node.attrs["scales"] if "scales" in node.attrs else node.constant(1, "scales")
        old = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
        node = Node(node.op, {**old, **node.attrs}, (x, None, None), (None,) * 3, 1, node.opset, node.name)
        scales, sizes = [float(v) for v in np.asarray(given)], None
    elif node.has(3):
        sizes, scales = [int(v) for v in node.constant(3, "sizes")], None
    else:
        scales, sizes = [float(v) for v in node.constant(2, "scales")], None
    if sizes is not None:
        policy = node.attrs.get("keep_aspect_ratio_policy", "stretch")
        ratios = [s / x.shape[a] for s, a in zip(sizes, axes)]
        if policy != "stretch":
            common = min(ratios) if policy == "not_larger" else max(ratios)
            ratios, sizes = [common] * len(axes), [int(np.floor(common * x.shape[a] + 0.5)) for a in axes]
    else:
        assert scales is not None
        # In float32, as onnxruntime: 100 * 2.3 is 230 there, and less in double.
        ratios, sizes = scales, [int(np.float32(x.shape[a]) * np.float32(s)) for a, s in zip(axes, scales)]
    if len(sizes) != len(axes) or any(x.shape[a] == 0 for a in axes):
        raise node.fail(f"sizes {sizes} for axes {axes} of {list(x.shape)}")
    made = [*(n for a, n in enumerate(x.shape) if a not in axes), *sizes]
    if prod(made) * np.dtype(np.float32).itemsize > memory_bytes():
        raise node.fail(f"its output {made} takes more than this machine's memory")
    roi = [0.0] * len(axes) + [1.0] * len(axes)
    if node.attrs.get("coordinate_transformation_mode") == "tf_crop_and_resize":
        roi = [float(v) for v in node.constant(1, "roi")]
    crops = node.attrs.get("coordinate_transformation_mode") == "tf_crop_and_resize"
    return [
        (axis, taps(node, x.shape[axis], size, ratio, (roi[k], roi[len(axes) + k])))
        for k, (axis, size, ratio) in enumerate(zip(axes, sizes, ratios))
        if size != x.shape[axis] or ratio != 1 or crops
    ]
