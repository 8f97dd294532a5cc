"""Draw operators with windows, and operators on positions of images."""

from __future__ import annotations

from typing import Any

import numpy as np

from fuzz.models.net import Net
from fuzz.models.networks import window, window_of_mean
from fuzz.models.operators.operands import (
    any_image,
    either,
    operand,
    random_subset,
)


def conv(net: Net) -> list[str]:
    """Add Conv of one to three axes, with groups."""
    draw, (front, size) = net.draw, any_image(net.draw)
    kernel = [draw.randint(1, 3) for _ in size]
    group = draw.choice([g for g in range(1, front[1] + 1) if front[1] % g == 0])
    out = group * draw.randint(1, 4)
    weights = [either(net, draw.floats((out, front[1] // group, *kernel)), constant=0.8)]
    if draw.chance():
        weights.append(either(net, draw.floats((out,)), constant=0.8))
    return [net.add("Conv", operand(net, (*front, *size)), *weights, group=group, **window(draw, size, kernel, True))]


def conv_transpose(net: Net) -> list[str]:
    """Add ConvTranspose of one to three axes, with padding in each of its notations."""
    draw, (front, size) = net.draw, any_image(net.draw, 5)
    kernel, strides = [draw.randint(1, 3) for _ in size], [draw.randint(1, 3) for _ in size]
    group = draw.choice([g for g in range(1, front[1] + 1) if front[1] % g == 0])
    attrs: dict[str, Any] = dict(kernel_shape=kernel, strides=strides, group=group)
    kind = draw.choice(("none", "pads", "SAME_UPPER", "SAME_LOWER", "VALID", "output_shape"))
    if kind == "pads":
        attrs["pads"] = [draw.randint(0, k - 1) for k in kernel * 2]
    elif kind == "output_shape":
        attrs["output_shape"] = [max(1, n * s + draw.randint(-1, 1)) for n, s in zip(size, strides)]
    elif kind != "none":
        attrs["auto_pad"] = kind
    attrs |= random_subset(draw, output_padding=[draw.randint(0, s - 1) for s in strides])
    if draw.chance(0.3):
        attrs["dilations"] = [draw.randint(1, 2) for _ in size]
    out = draw.randint(1, 4)
    weights = [either(net, draw.floats((front[1], out, *kernel)), constant=0.8)]
    if draw.chance():
        weights.append(either(net, draw.floats((out * group,)), constant=0.8))
    return [net.add("ConvTranspose", operand(net, (*front, *size)), *weights, **attrs)]


def pool(net: Net) -> list[str]:
    """Add MaxPool, AveragePool or LpPool."""
    draw, (front, size) = net.draw, any_image(net.draw)
    op = draw.choice(("MaxPool", "MaxPool", "AveragePool", "AveragePool", "LpPool"))
    kernel = [draw.randint(1, min(4, n)) for n in size]
    dilated = op == "MaxPool" or (net.opset >= 19 and op == "AveragePool") or (net.opset >= 18 and op == "LpPool")
    attrs = (window_of_mean if op == "AveragePool" else window)(draw, size, kernel, dilated)
    if draw.chance(0.3) and (op != "LpPool" or net.opset >= 18):
        attrs["ceil_mode"] = 1
    if op == "AveragePool":
        attrs |= random_subset(draw, count_include_pad=draw.randint(0, 1))
    if op == "LpPool":
        attrs |= random_subset(draw, p=draw.randint(1, 3))
    if op == "MaxPool" and draw.chance(0.25):
        attrs |= random_subset(draw, storage_order=draw.randint(0, 1))
        return net.add_all(op, operand(net, (*front, *size)), outputs=2, **attrs)
    dtype = draw.choice(("float32", "float32", "int8", "uint8")) if op == "MaxPool" else "float32"
    return [net.add(op, operand(net, (*front, *size), dtype), **attrs)]


def global_pool(net: Net) -> list[str]:
    """Add a pooling of whole images."""
    draw, (front, size) = net.draw, any_image(net.draw)
    op = draw.choice(("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool"))
    attrs = random_subset(draw, p=draw.randint(1, 3)) if op == "GlobalLpPool" else {}
    return [net.add(op, operand(net, (*front, *size)), **attrs)]


def resize(net: Net) -> list[str]:
    """Add Resize in one of its modes."""
    draw, (front, size) = net.draw, any_image(net.draw, 7)
    mode = draw.choice(("nearest", "linear", "cubic"))
    modes = ["asymmetric", "half_pixel", "align_corners", "pytorch_half_pixel"]
    modes += ["half_pixel_symmetric"] * (net.opset >= 19) + ["tf_crop_and_resize"]
    attrs: dict[str, Any] = {"mode": mode} | random_subset(draw, coordinate_transformation_mode=draw.choice(modes))
    if mode == "nearest":
        attrs |= random_subset(
            draw, nearest_mode=draw.choice(("floor", "ceil", "round_prefer_floor", "round_prefer_ceil"))
        )
    if mode == "cubic":
        attrs |= random_subset(draw, cubic_coeff_a=draw.choice((-0.5, -0.75)), exclude_outside=draw.randint(0, 1))
    if net.opset >= 18 and mode != "nearest":
        attrs |= random_subset(draw, antialias=draw.randint(0, 1))
    roi = ""
    if attrs.get("coordinate_transformation_mode") == "tf_crop_and_resize":
        begin = [draw.choice((0.0, 0.1, 0.3)) for _ in size]
        end = [draw.choice((0.7, 1.0, 1.1)) for _ in size]
        roi = net.constant([0, 0, *begin, 1, 1, *end], np.float32)
        attrs |= random_subset(draw, extrapolation_value=1.5)
    x = operand(net, (*front, *size), draw.choice(("float32", "float32", "int8", "uint8")))
    if draw.chance():
        scales = [1, 1, *(draw.choice((0.5, 0.7, 1, 1.5, 2, 2.3, 1 / 3)) for _ in size)]
        return [net.add("Resize", x, roi, either(net, scales, np.float32, 0.9), **attrs)]
    sizes = [*front, *(draw.randint(1, 12) for _ in size)]
    return [net.add("Resize", x, roi, "", either(net, sizes, np.int64, 0.9), **attrs)]


def grid_sample(net: Net) -> list[str]:
    """Add GridSample of images, with positions outside of them."""
    draw = net.draw
    n, c, h, w = draw.shape(4, 5)
    modes = ("linear", "nearest", "cubic") if net.opset >= 20 else ("bilinear", "nearest", "bicubic")
    attrs = random_subset(draw, mode=draw.choice(modes), padding_mode=draw.choice(("zeros", "border", "reflection")),
                  align_corners=draw.randint(0, 1))  # fmt: skip
    grid = draw.arrays.uniform(-1.3, 1.3, (n, *draw.shape(2, 5), 2)).astype(np.float32)
    return [net.add("GridSample", operand(net, (n, c, h, w)), net.input(grid), **attrs)]
