"""Draw operators that only move elements, or that generate tensors."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from fuzz.models.net import Net
from fuzz.models.operators.operands import (
    any_axis,
    any_shape,
    either,
    operand,
    random_subset,
    without_none,
)


def movement(net: Net) -> list[str]:
    """Add one of MOVEMENTS, of a tensor of any type."""
    draw = net.draw
    dtype = draw.choice(("float32", "float32", "int8", "uint8", "int64", "float64", "bool"))
    shape = any_shape(draw, 1)
    x = operand(net, shape, dtype)
    return draw.choice(MOVEMENTS)(net, x, shape)


def _transpose(net: Net, x: str, shape: tuple[int, ...]) -> list[str]:
    return [net.add("Transpose", x, **random_subset(net.draw, perm=net.draw.sample(range(len(shape)), len(shape))))]


def _reshape(net: Net, x: str, shape: tuple[int, ...]) -> list[str]:
    draw, size = net.draw, math.prod(shape)
    dims: list[int] = []
    while size > 1 and len(dims) < 4:
        dims.append(draw.choice([n for n in range(1, size + 1) if size % n == 0]))
        size //= dims[-1]
    dims.append(size)
    if draw.chance(0.4):
        dims[draw.randrange(len(dims))] = -1
    if dims[0] == shape[0] and draw.chance():
        dims[0] = 0
    return [net.add("Reshape", x, either(net, dims, np.int64, 0.8))]


def _flatten(net: Net, x: str, shape: tuple[int, ...]) -> list[str]:
    return [net.add("Flatten", x, **random_subset(net.draw, axis=net.draw.randint(-len(shape), len(shape))))]


def _unsqueeze(net: Net, x: str, shape: tuple[int, ...]) -> list[str]:
    draw = net.draw
    rank = len(shape) + draw.randint(1, 2)
    axes = draw.sample(range(rank), rank - len(shape))
    axes = [axis - rank if draw.chance(0.3) else axis for axis in axes]
    return [net.add("Unsqueeze", x, either(net, axes, np.int64, 0.9))]


def _squeeze(net: Net, x: str, shape: tuple[int, ...]) -> list[str]:
    axes = [axis - len(shape) * net.draw.randint(0, 1) for axis, n in enumerate(shape) if n == 1]
    return [net.add("Squeeze", x, *([either(net, axes, np.int64, 0.9)] if axes and net.draw.chance() else []))]


def _concat(net: Net, x: str, shape: tuple[int, ...]) -> list[str]:
    draw, axis = net.draw, any_axis(net.draw, len(shape))
    others = []
    for _ in range(draw.randint(0, 3)):
        dims = list(shape)
        dims[axis] = draw.randint(1, 5)
        others.append(either(net, draw.array(net.values[x].dtype, dims), constant=0.3))
    return [net.add("Concat", *draw.sample([x, *others], 1 + len(others)), axis=axis)]


def _split(net: Net, x: str, shape: tuple[int, ...]) -> list[str]:
    draw, axis = net.draw, any_axis(net.draw, len(shape))
    parts, size = draw.randint(1, 4), shape[axis]
    if draw.chance(0.4):
        attrs = without_none(num_outputs=parts if net.opset >= 18 else None)
        return net.add_all("Split", x, outputs=parts, axis=axis, **attrs)
    cuts = sorted(draw.randint(0, size) for _ in range(parts - 1))
    sizes = [b - a for a, b in zip([0, *cuts], [*cuts, size])]
    return net.add_all("Split", x, either(net, sizes, np.int64, 0.8), outputs=parts, axis=axis)


def _slice(net: Net, x: str, shape: tuple[int, ...]) -> list[str]:
    draw = net.draw
    axes = draw.sample(range(len(shape)), draw.randint(1, len(shape)))
    steps = [draw.choice((1, 1, 2, 3, -1, -2)) for _ in axes]
    ends = [draw.choice((n, 2**31, -(2**40), draw.randint(-n - 2, n + 2), -1)) for n in (shape[a] for a in axes)]
    starts = [draw.randint(-shape[a] - 1, shape[a] + 1) for a in axes]
    named = [axis - len(shape) * draw.randint(0, 1) for axis in axes]
    inputs = [either(net, numbers, np.int64, 0.8) for numbers in (starts, ends, named)]
    return [net.add("Slice", x, *inputs, *([either(net, steps, np.int64, 0.8)] if draw.chance(0.7) else []))]


def _gather(net: Net, x: str, shape: tuple[int, ...]) -> list[str]:
    draw, axis = net.draw, any_axis(net.draw, len(shape))
    n = shape[axis]
    ids = draw.arrays.integers(-n, n, any_shape(draw, 0, 2, 4)).astype(draw.choice((np.int64, np.int32)))
    return [net.add("Gather", x, either(net, ids), **without_none(axis=axis if axis or draw.chance() else None))]


def _gather_elements(net: Net, x: str, shape: tuple[int, ...]) -> list[str]:
    draw, axis = net.draw, any_axis(net.draw, len(shape))
    dims = [draw.randint(1, n) for n in shape]
    dims[axis] = draw.randint(1, 6)
    ids = draw.arrays.integers(-shape[axis], shape[axis], dims)
    return [net.add("GatherElements", x, either(net, ids), axis=axis)]


def _gather_nd(net: Net, x: str, shape: tuple[int, ...]) -> list[str]:
    draw = net.draw
    batch = draw.randint(0, len(shape) - 1)
    depth = draw.randint(1, len(shape) - batch)
    front = (*shape[:batch], *draw.shape(draw.randint(0 if batch else 1, 2), 4))
    ids = np.stack([draw.arrays.integers(-n, n, front) for n in shape[batch : batch + depth]], -1)
    return [net.add("GatherND", x, either(net, ids), **without_none(batch_dims=batch or None))]


def _scatter_elements(net: Net, x: str, shape: tuple[int, ...]) -> list[str]:
    draw, axis = net.draw, any_axis(net.draw, len(shape))
    dims = [draw.randint(1, n) for n in shape]
    ids = np.argsort(draw.arrays.random(shape), axis)[tuple(slice(n) for n in dims)]  # no element twice
    updates = draw.array(net.values[x].dtype, dims)
    kinds = ("none", "add", "mul", *(("max", "min") if net.opset >= 18 else ()))
    attrs = random_subset(draw, reduction=draw.choice(kinds)) if net.opset >= 16 else {}
    return [net.add("ScatterElements", x, either(net, ids, np.int64), either(net, updates), axis=axis, **attrs)]


def _scatter_nd(net: Net, x: str, shape: tuple[int, ...]) -> list[str]:
    draw = net.draw
    depth = draw.randint(1, len(shape))
    positions = np.array(list(np.ndindex(*shape[:depth])), np.int64)
    ids = positions[draw.arrays.permutation(len(positions))[: draw.randint(1, len(positions))]]
    updates = draw.array(net.values[x].dtype, (len(ids), *shape[depth:]))
    kinds = ("none", "add", "mul", *(("max", "min") if net.opset >= 18 else ()))
    attrs = random_subset(draw, reduction=draw.choice(kinds)) if net.opset >= 16 else {}
    return [net.add("ScatterND", x, either(net, ids), either(net, updates), **attrs)]


def _pad(net: Net, x: str, shape: tuple[int, ...]) -> list[str]:
    draw, dtype = net.draw, net.values[x].dtype
    mode = draw.choice(("constant", "edge", "reflect", *(("wrap",) if net.opset >= 19 else ())))
    axes = draw.sample(range(len(shape)), draw.randint(1, len(shape))) if net.opset >= 18 and draw.chance() else None
    sizes = [shape[axis] for axis in (range(len(shape)) if axes is None else axes)]
    low = -1 if draw.chance(0.2) else 0
    pads = [draw.randint(low if n > 2 else 0, min(3, n - 1) if mode in ("reflect", "wrap") else 3) for n in sizes * 2]
    inputs = [either(net, pads, np.int64, 0.8)]
    if axes is not None or (mode == "constant" and draw.chance()):
        inputs.append(either(net, 1, dtype))
    if axes is not None:
        inputs.append(either(net, axes, np.int64, 0.8))
    return [net.add("Pad", x, *inputs, **random_subset(draw, mode=mode))]


def _tile(net: Net, x: str, shape: tuple[int, ...]) -> list[str]:
    return [
        net.add(
            "Tile", x, either(net, [net.draw.randint(0 if net.draw.chance(0.1) else 1, 3) for _ in shape], np.int64)
        )
    ]


def _expand(net: Net, x: str, shape: tuple[int, ...]) -> list[str]:
    draw = net.draw
    dims = [*draw.shape(draw.randint(0, 2), 3), *(draw.randint(1, 4) if n == 1 else draw.choice((n, 1)) for n in shape)]
    return [net.add("Expand", x, either(net, dims, np.int64))]


def _trilu(net: Net, x: str, shape: tuple[int, ...]) -> list[str]:
    draw = net.draw
    k = [either(net, draw.randint(-4, 4), np.int64)] if draw.chance(0.6) else []
    return [net.add("Trilu", x, *k, **random_subset(draw, upper=draw.randint(0, 1)))]


def _one_element(net: Net, x: str, shape: tuple[int, ...]) -> list[str]:
    """Add Shape or Size."""
    draw = net.draw
    if draw.chance(0.3):
        return [net.add("Size", x)]
    attrs = random_subset(draw, start=draw.randint(-4, 4), end=draw.randint(-4, 4)) if net.opset >= 15 else {}
    return [net.add("Shape", x, **attrs)]


def _compress(net: Net, x: str, shape: tuple[int, ...]) -> list[str]:
    draw = net.draw
    axis = draw.choice((None, any_axis(draw, len(shape))))
    size = math.prod(shape) if axis is None else shape[axis]
    chosen = draw.array(bool, (draw.randint(1, size),))
    return [net.add("Compress", x, either(net, chosen), **without_none(axis=axis))]


def _reverse_sequence(net: Net, x: str, shape: tuple[int, ...]) -> list[str]:
    draw, batch = net.draw, net.draw.randint(0, 1)
    lengths = draw.arrays.integers(
        1, shape[1 - batch] + 1 if len(shape) > 1 else 2, shape[batch] if len(shape) > 1 else 1
    )
    return [net.add("ReverseSequence", x, either(net, lengths, np.int64), batch_axis=batch, time_axis=1 - batch)]


def _blocks(net: Net, x: str, shape: tuple[int, ...]) -> list[str]:
    """Add DepthToSpace or SpaceToDepth of a new tensor of 4 axes."""
    draw, b = net.draw, net.draw.randint(1, 3)
    n, c, h, w = draw.shape(4, 3)
    value = net.values.pop(x)
    del net.inputs[x]
    if draw.chance():
        y = net.input(draw.array(value.dtype, (n, c, h * b, w * b)))
        return [net.add("SpaceToDepth", y, blocksize=b)]
    y = net.input(draw.array(value.dtype, (n, c * b * b, h, w)))
    return [net.add("DepthToSpace", y, blocksize=b, **random_subset(draw, mode=draw.choice(("DCR", "CRD"))))]


MOVEMENTS: tuple[Callable[[Net, str, tuple[int, ...]], list[str]], ...] = (
    _transpose, _reshape, _flatten, _unsqueeze, _squeeze, _concat, _split, _slice, _gather, _gather_elements,
    _gather_nd, _scatter_elements, _scatter_nd, _pad, _tile, _expand, _trilu, _one_element, _compress,
    _reverse_sequence, _blocks,
)  # fmt: skip


def generator(net: Net) -> list[str]:
    """Add an operator that makes a tensor from numbers or indices."""
    draw = net.draw
    match draw.choice(("OneHot", "Range", "ConstantOfShape", "EyeLike", "NonZero", "Unique")):
        case "OneHot":
            ids = draw.arrays.integers(-5, 6, any_shape(draw, 0, 3)).astype(draw.choice((np.int64, np.int32)))
            depth, values = net.constant(draw.randint(1, 5), np.int64), either(net, [0.5, 2.0], np.float32)
            return [
                net.add("OneHot", net.input(ids), depth, values, **random_subset(draw, axis=draw.randint(-1, ids.ndim)))
            ]
        case "Range":
            dtype = draw.choice((np.int64, np.int32, np.float32))
            step = draw.choice((1, 2, -1, 3))
            numbers = (draw.randint(-3, 3), draw.randint(4, 9), step) if step > 0 else (7, draw.randint(-2, 3), step)
            return [net.add("Range", *(either(net, number, dtype) for number in numbers))]
        case "ConstantOfShape":
            return [net.add("ConstantOfShape", either(net, any_shape(draw, 1, 3), np.int64))]
        case "EyeLike":
            return [net.add("EyeLike", operand(net, draw.shape(2)), **random_subset(draw, k=draw.randint(-3, 3)))]
        case "NonZero":
            return [net.add("NonZero", operand(net, any_shape(draw, 1, 3), draw.choice(("bool", "float32"))))]
    value = np.round(draw.floats(any_shape(draw, 1, 2), 2))
    attrs = random_subset(draw, sorted=draw.randint(0, 1), axis=any_axis(draw, value.ndim))
    return net.add_all("Unique", net.input(value), outputs=4, **attrs)
