"""Draw random float networks: chains of common pieces with branches, and a head."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from fuzz.models.net import Draw, Net, OracleError

Piece = Callable[[Net, str], str]
"""Function that adds operators that read tensor `x`, and returns the name of their result."""
LARGEST = 4096
"""Half of the largest number of elements that a piece may return."""
TRIES = 3


def network(draw: Draw, opset: int) -> Net:
    """Draw a network: an image, sequence or vector through up to six pieces, then perhaps a head."""
    net = Net(draw, opset)
    rank = draw.choice((4, 4, 4, 4, 3, 3, 2, 5))
    x = net.input(draw.floats(_size(draw, rank), draw.choice((0.3, 1.0, 4.0))))
    for _ in range(draw.randint(1, 6)):
        x = _tried(net, x, draw.choice(PIECES[net.values[x].ndim]))
        if draw.chance(0.1) and x not in net.inputs:
            net.outputs.append(x)
    if draw.chance(0.4):
        x = _tried(net, x, _head)
    if x in net.inputs:
        x = net.add("Relu", x)
    if x not in net.outputs:
        net.outputs.append(x)
    return net


def _size(draw: Draw, rank: int) -> tuple[int, ...]:
    if rank == 2:
        return draw.randint(1, 4), draw.randint(1, 40)
    if rank == 3:
        return draw.randint(1, 2), draw.randint(1, 12), draw.randint(1, 20)
    return draw.randint(1, 2), draw.choice((1, 3, *range(2, 20))), *(draw.randint(1, 11) for _ in range(rank - 2))


def _tried(net: Net, x: str, piece: Piece) -> str:
    """Add `piece` and return its result; return `x` if onnxruntime refuses all tries, or if results are too large."""
    for _ in range(TRIES):
        try:
            y = piece(net, x)
        except OracleError:
            continue
        value = net.values[y]
        if value.size and 0 < value.ndim < 6 and value.size <= 2 * LARGEST and np.all(np.isfinite(value)):
            return y
    return x


# Pieces ----------------------------------------------------------------------------------------------------------


def conv(net: Net, x: str) -> str:
    """Add a dense, grouped or depthwise convolution with random strides, dilations and padding."""
    draw, (_, channels, *size) = net.draw, net.shape(x)
    kind = draw.choice(("dense", "dense", "pointwise", "depthwise", "grouped"))
    group = {"depthwise": channels, "grouped": draw.choice(_divisors(channels))}.get(kind, 1)
    out = group * draw.choice((1, 1, 2, 3)) if group > 1 else draw.randint(1, 20)
    kernel = [1 if kind == "pointwise" else draw.choice((1, 2, 3, 3, 5)) for _ in size]
    attrs = window(draw, size, kernel, dilated=True)
    weights = [net.floats((out, channels // group, *kernel), 1 / math.sqrt(channels // group * math.prod(kernel)))]
    if draw.chance(0.7):
        weights.append(net.floats((out,), 0.3))
    return activated(net, net.add("Conv", x, *weights, group=group, **attrs))


def window(draw: Draw, size: list[int], kernel: list[int], dilated: bool = False) -> dict[str, Any]:
    """Draw kernel_shape, strides, pads or auto_pad, and dilations."""
    attrs: dict[str, Any] = {"kernel_shape": kernel}
    if draw.chance(0.4):
        attrs["strides"] = [draw.randint(1, 3) for _ in size]
    if dilated and draw.chance(0.25):
        attrs["dilations"] = [draw.randint(1, 2) for _ in size]
    kind = draw.choice(("none", "same", "pads", "pads", "SAME_UPPER", "SAME_LOWER", "VALID"))
    if kind == "same":
        attrs["pads"] = [k // 2 for k in kernel] * 2
    elif kind == "pads":
        attrs["pads"] = [draw.randint(0, k - 1) for k in kernel * 2]
    elif kind != "none" and "dilations" not in attrs:
        attrs["auto_pad"] = kind
    return attrs


def window_of_mean(draw: Draw, size: list[int], kernel: list[int], dilated: bool = False) -> dict[str, Any]:
    """Draw attributes like `window`, without strides if auto_pad is SAME: with it, long strides are undefined."""
    attrs = window(draw, size, kernel, dilated)
    if str(attrs.get("auto_pad")).startswith("SAME"):
        attrs.pop("strides", None)
    return attrs


def activated(net: Net, x: str) -> str:
    """Add an activation function behind `x`, or nothing."""
    return net.draw.choice((_same, _same, relu, relu, clip, activation))(net, x)


def _same(net: Net, x: str) -> str:
    return x


def relu(net: Net, x: str) -> str:
    """Add Relu."""
    return net.add("Relu", x)


def clip(net: Net, x: str) -> str:
    """Add Clip with limits that networks have."""
    low, high = net.draw.choice(((0.0, 6.0), (0.0, 1.0), (-1.0, 1.0), (-0.5, 0.7), (0.3, 2.0)))
    return net.add("Clip", x, net.constant(low, np.float32), net.constant(high, np.float32))


def activation(net: Net, x: str) -> str:
    """Add an activation function of one operator or several."""
    draw = net.draw
    ops = ["Sigmoid", "Tanh", "LeakyRelu", "HardSigmoid", "Elu", "Softplus", "Erf", "PRelu", "Softsign", "Selu"]
    ops += ["HardSwish"] * (net.opset >= 14) + ["Gelu"] * (net.opset >= 20) + ["Mish"] * (net.opset >= 18)
    op = draw.choice([*ops, "swish", "hardswish", "gelu", "relu6"])
    if op == "swish":
        return net.add("Mul", x, net.add("Sigmoid", x))
    if op == "hardswish":
        return net.add("Mul", x, net.add("HardSigmoid", x, alpha=1 / 6, beta=0.5))
    if op == "gelu":
        inner = net.add("Erf", net.add("Div", x, net.constant(math.sqrt(2), np.float32)))
        one_more = net.add("Add", inner, net.constant(1, np.float32))
        return net.add("Mul", net.add("Mul", x, one_more), net.constant(0.5, np.float32))
    if op == "relu6":
        return net.add("Clip", x, net.constant(0, np.float32), net.constant(6, np.float32))
    if op == "PRelu":
        channels = net.shape(x)[1] if net.values[x].ndim > 1 else 1
        return net.add("PRelu", x, net.floats((channels, *[1] * (net.values[x].ndim - 2)), 0.3))
    if op == "LeakyRelu":
        return net.add(op, x, alpha=draw.choice((0.01, 0.1, 0.3)))
    if op == "Elu":
        return net.add(op, x, alpha=draw.choice((1.0, 0.5)))
    return net.add(op, x)


def pool(net: Net, x: str) -> str:
    """Add MaxPool or AveragePool of `x` [n, c, ...]."""
    draw, size = net.draw, list(net.shape(x)[2:])
    kernel = [draw.randint(1, min(3, n)) for n in size]
    op = draw.choice(("MaxPool", "AveragePool"))
    attrs = (window if op == "MaxPool" else window_of_mean)(draw, size, kernel)
    if draw.chance(0.3):
        attrs["ceil_mode"] = 1
    if op == "MaxPool":
        return net.add(op, x, **attrs)
    if draw.chance(0.3):
        attrs["count_include_pad"] = 1
    return net.add(op, x, **attrs)


def global_pool(net: Net, x: str) -> str:
    """Reduce `x` [n, c, ...] over all axes but the first two."""
    op = net.draw.choice(("GlobalAveragePool", "GlobalAveragePool", "GlobalMaxPool", "ReduceMean"))
    if op != "ReduceMean":
        return net.add(op, x)
    return reduced(net, x, op, list(range(2, net.values[x].ndim)))


def reduced(net: Net, x: str, op: str, axes: list[int]) -> str:
    """Add reduction `op` over `axes`, which are an attribute or an input, depending on the opset."""
    keepdims = int(net.draw.chance(0.7))
    if net.opset >= (13 if op == "ReduceSum" else 18):
        return net.add(op, x, net.constant(axes, np.int64), keepdims=keepdims)
    return net.add(op, x, axes=axes, keepdims=keepdims)


def reduction(net: Net, x: str) -> str:
    """Reduce `x` over one or two axes."""
    axes = net.draw.sample(range(net.values[x].ndim), net.draw.randint(1, 2)) if net.values[x].ndim > 1 else [0]
    return reduced(net, x, net.draw.choice(("ReduceMean", "ReduceMax", "ReduceMin", "ReduceSum")), axes)


def residual(net: Net, x: str) -> str:
    """Add x + f(x), where f(x) has the shape of x."""
    draw, (_, channels, *size) = net.draw, net.shape(x)
    kernel = [draw.choice((1, 3)) for _ in size]
    y = net.add("Conv", x, net.floats((channels, channels, *kernel), 0.1), kernel_shape=kernel,
                pads=[k // 2 for k in kernel] * 2)  # fmt: skip
    return activated(net, net.add("Add", *draw.sample([x, activated(net, y)], 2)))


def combined(net: Net, x: str) -> str:
    """Add, multiply or compare `x` with a tensor of its shape, or with one that is broadcast."""
    draw, shape = net.draw, net.shape(x)
    op = draw.choice(("Add", "Mul", "Sub", "Add", "Mul", "Max", "Min"))
    if draw.chance(0.3):
        other = activation(net, x)
    else:
        dims = [n if draw.chance(0.4) else 1 for n in shape]
        other = net.floats(dims[draw.randint(0, len(dims) - 1) if draw.chance(0.4) else 0 :])
    return net.add(op, *draw.sample([x, other], 2))


def two_inputs(net: Net, x: str) -> str:
    """Add, multiply or subtract `x` and another input of the model."""
    shape = net.shape(x)
    other = net.input(net.draw.floats([n if net.draw.chance(0.8) else 1 for n in shape]))
    return net.add(net.draw.choice(("Add", "Mul", "Sub")), *net.draw.sample([x, other], 2))


def concatenated(net: Net, x: str) -> str:
    """Concatenate results of operators on `x`."""
    draw, rank = net.draw, net.values[x].ndim
    others = [x, activation(net, x), relu(net, x)]
    if rank == 4:
        others.append(net.add("Conv", x, net.floats((draw.randint(1, 8), net.shape(x)[1], 1, 1), 0.3)))
        return net.add("Concat", *draw.sample(others, draw.randint(2, 3)), axis=1)
    return net.add("Concat", *draw.sample(others, draw.randint(1, 3)), axis=draw.randint(-rank, rank - 1))


def split(net: Net, x: str) -> str:
    """Split `x` into up to two parts, change some of them, and concatenate them in another order."""
    draw = net.draw
    axis = draw.choice([a for a, n in enumerate(net.shape(x)) if n > 1] or [0])
    size = net.shape(x)[axis]
    cut = draw.randint(1, max(1, size - 1))
    sizes = [cut, size - cut] if size > cut else [size]
    parts = net.add_all("Split", x, net.constant(sizes, np.int64), outputs=len(sizes), axis=axis)
    parts = [activation(net, part) if draw.chance(0.4) else part for part in parts]
    return net.add("Concat", *draw.sample(parts, len(parts)), axis=axis)


def resize(net: Net, x: str) -> str:
    """Resize `x` [n, c, ...] by factors from 0.5 to 2."""
    draw = net.draw
    mode = draw.choice(("nearest", "nearest", "linear"))
    attrs: dict[str, Any] = {"mode": mode}
    attrs["coordinate_transformation_mode"] = draw.choice(("asymmetric", "half_pixel", "align_corners"))
    if mode == "nearest":
        attrs["nearest_mode"] = draw.choice(("floor", "round_prefer_floor", "ceil"))
    scales = net.constant([1, 1, *(draw.choice((1, 2, 2, 1.5, 0.5)) for _ in net.shape(x)[2:])], np.float32)
    return net.add("Resize", x, "", scales, **attrs)


def pad(net: Net, x: str) -> str:
    """Pad `x` by up to 2 on each side."""
    draw, rank = net.draw, net.values[x].ndim
    mode = draw.choice(("constant", "constant", "edge", "reflect"))
    pads = [0, 0] * 2 if rank == 2 else [0, 0, *(draw.randint(0, 2) for _ in range(rank - 2))] * 2
    inputs = [net.constant(pads, np.int64)]
    if mode == "constant" and draw.chance():
        inputs.append(net.constant(draw.choice((0, 0, 0.25, -1)), np.float32))
    return net.add("Pad", x, *inputs, mode=mode)


def sliced(net: Net, x: str) -> str:
    """Slice `x` along one axis."""
    draw = net.draw
    axis = draw.randrange(net.values[x].ndim)
    size = net.shape(x)[axis]
    start = draw.randint(0, size - 1)
    numbers = (start, draw.randint(start + 1, size), axis, draw.choice((1, 1, 2)))
    return net.add("Slice", x, *(net.constant([number], np.int64) for number in numbers))


def gathered(net: Net, x: str) -> str:
    """Gather some elements of `x` along one axis, in random order."""
    draw = net.draw
    axis = draw.randrange(net.values[x].ndim)
    size = net.shape(x)[axis]
    return net.add("Gather", x, net.constant(draw.sample(range(size), draw.randint(1, size)), np.int64), axis=axis)


def depth(net: Net, x: str) -> str:
    """Add SpaceToDepth or DepthToSpace of `x` [n, c, h, w]."""
    draw, (_, channels, rows, columns) = net.draw, net.shape(x)
    if rows % 2 == columns % 2 == 0 and draw.chance():
        return net.add("SpaceToDepth", x, blocksize=2)
    y = net.add("Conv", x, net.floats((4 * draw.randint(1, 4), channels, 1, 1), 0.3))
    return net.add("DepthToSpace", y, blocksize=2, mode=draw.choice(("DCR", "CRD")))


def shuffled(net: Net, x: str) -> str:
    """Shuffle the channels between groups, as ShuffleNet does."""
    n, channels, *size = net.shape(x)
    group = net.draw.choice(_divisors(channels))
    y = net.add("Reshape", x, net.constant([n, group, channels // group, *size], np.int64))
    y = net.add("Transpose", y, perm=[0, 2, 1, *range(3, 3 + len(size))])
    return net.add("Reshape", y, net.constant([n, channels, *size], np.int64))


def transposed(net: Net, x: str) -> str:
    """Permute the axes of `x`."""
    rank = net.values[x].ndim
    return net.add("Transpose", x, perm=net.draw.sample(range(rank), rank))


def reshaped(net: Net, x: str) -> str:
    """Reshape `x`, perhaps to another rank, perhaps with -1 or 0."""
    draw, shape = net.draw, net.shape(x)
    kind = draw.choice(("flatten", "rows", "merge", "image", "squeeze"))
    if kind == "flatten":
        return net.add("Flatten", x, axis=draw.randint(0, len(shape)))
    if kind == "squeeze":
        axis = draw.randint(0, len(shape))
        return net.add("Unsqueeze", x, net.constant([axis], np.int64))
    dims = {"rows": [shape[0], -1], "merge": [0, -1, shape[-1]], "image": [shape[0], -1, 1, shape[-1]]}[kind]
    return net.add("Reshape", x, net.constant(dims, np.int64))


def squeeze_excite(net: Net, x: str) -> str:
    """Multiply `x` [n, c, h, w] by a factor for each channel, which is computed from the channel's mean."""
    draw, channels = net.draw, net.shape(x)[1]
    inner = draw.randint(1, 6)
    y = net.add("GlobalAveragePool", x)
    y = relu(net, net.add("Conv", y, net.floats((inner, channels, 1, 1), 0.5), net.floats((inner,))))
    y = net.add("Conv", y, net.floats((channels, inner, 1, 1), 0.5), net.floats((channels,)))
    y = net.add("HardSigmoid", y, alpha=0.2, beta=0.5) if draw.chance() else net.add("Sigmoid", y)
    return net.add("Mul", *draw.sample([x, y], 2))


def conv_transpose(net: Net, x: str) -> str:
    """Add ConvTranspose of `x` [n, c, ...], perhaps with an activation function."""
    draw, (_, channels, *size) = net.draw, net.shape(x)
    kernel, strides = [draw.randint(1, 3) for _ in size], [draw.randint(1, 2) for _ in size]
    pads = [draw.randint(0, (k - 1) // 2) for k in kernel] * 2
    weights = [net.floats((channels, draw.randint(1, 8), *kernel), 0.3)]
    return activated(net, net.add("ConvTranspose", x, *weights, kernel_shape=kernel, strides=strides, pads=pads))


def batch_norm(net: Net, x: str) -> str:
    """Add BatchNormalization of `x` [n, c, ...], perhaps with an activation function."""
    channels, draw = net.shape(x)[1], net.draw
    variance = net.constant(np.abs(draw.floats((channels,))) + 0.2)
    numbers = [net.constant(1 + draw.floats((channels,), 0.2)), *(net.floats((channels,)) for _ in range(2))]
    return activated(net, net.add("BatchNormalization", x, *numbers, variance))


def dense(net: Net, x: str) -> str:
    """Add MatMul with constant weights, or Gemm; a bias is part of Gemm, added, or missing."""
    draw, (*rows, inner) = net.draw, net.shape(x)
    out = draw.randint(1, 20)
    if len(rows) == 1 and draw.chance():
        trans = draw.randint(0, 1)
        weights = [net.floats((out, inner) if trans else (inner, out), 1 / math.sqrt(inner))]
        if draw.chance(0.7):
            weights.append(net.floats(draw.choice(((out,), (1, out), (out,))), 0.3))
        attrs: dict[str, Any] = {"alpha": 0.5} if draw.chance(0.1) else {}
        return activated(net, net.add("Gemm", x, *weights, transB=trans, **attrs))
    y = net.add("MatMul", x, net.floats((inner, out), 1 / math.sqrt(inner)))
    if draw.chance():
        y = net.add("Add", *draw.sample([y, net.floats((out,), 0.3)], 2))
    return activated(net, y)


def attention(net: Net, x: str) -> str:
    """Add attention of a sequence to itself with one head."""
    inner = net.shape(x)[-1]
    q, k, v = (net.add("MatMul", x, net.floats((inner, 8), 1 / math.sqrt(inner))) for _ in range(3))
    scores = net.add("MatMul", q, net.add("Transpose", k, perm=[0, 2, 1]))
    scores = net.add("Mul", scores, net.constant(1 / math.sqrt(8), np.float32))
    return net.add("MatMul", net.add("Softmax", scores, axis=-1), v)


def heads(net: Net, x: str) -> str:
    """Add attention of several heads, as exporters write it: reshapes split and join the channels."""
    draw, (batch, tokens, inner) = net.draw, net.shape(x)
    count, size = draw.randint(1, 3), draw.choice((3, 4, 8, 16))
    split = net.constant(np.array([0 if draw.chance(0.3) else batch, tokens, count, size]), np.int64)

    def projected(perm: tuple[int, ...]) -> str:
        y = net.add("MatMul", x, net.floats((inner, count * size), 1 / math.sqrt(inner)))
        y = net.add("Add", y, net.floats((count * size,), 0.3)) if draw.chance() else y
        return net.add("Transpose", net.add("Reshape", y, split), perm=list(perm))

    q, v = projected((0, 2, 1, 3)), projected((0, 2, 1, 3))
    transposed_keys = net.add("Transpose", projected((0, 2, 1, 3)), perm=[0, 1, 3, 2]) if draw.chance() else ""
    k = transposed_keys or projected((0, 2, 3, 1))
    scores = net.add("Div", net.add("MatMul", q, k), net.constant(math.sqrt(size), np.float32))
    if draw.chance(0.3):
        scores = net.add("Add", scores, net.floats((1, 1, 1, tokens), 0.5))
    y = net.add("MatMul", net.add("Softmax", scores, axis=-1), v)
    y = net.add("Reshape", net.add("Transpose", y, perm=[0, 2, 1, 3]), net.constant([batch, tokens, -1], np.int64))
    return net.add("MatMul", y, net.floats((count * size, inner), 1 / math.sqrt(count * size)))


def layer_norm(net: Net, x: str) -> str:
    """Normalise `x` along its last axis, by one operator or as exporters write it."""
    size = net.shape(x)[-1]
    if net.opset >= 17:
        return net.add("LayerNormalization", x, net.floats((size,)), net.floats((size,)), axis=-1)
    mean = reduced_last(net, x)
    centred = net.add("Sub", x, mean)
    variance = reduced_last(net, net.add("Pow", centred, net.constant(2, np.float32)))
    deviation = net.add("Sqrt", net.add("Add", variance, net.constant(1e-5, np.float32)))
    return net.add("Mul", net.add("Div", centred, deviation), net.floats((size,)))


def reduced_last(net: Net, x: str) -> str:
    """Add the mean of `x` along its last axis, which keeps size 1."""
    if net.opset >= 18:
        return net.add("ReduceMean", x, net.constant([-1], np.int64), keepdims=1)
    return net.add("ReduceMean", x, axes=[-1], keepdims=1)


def softmax(net: Net, x: str) -> str:
    """Add Softmax of `x` along any axis."""
    return net.add("Softmax", x, axis=net.draw.randint(-net.values[x].ndim, net.values[x].ndim - 1))


def instance_norm(net: Net, x: str) -> str:
    """Add InstanceNormalization of `x` [n, c, ...]."""
    channels = net.shape(x)[1]
    return net.add("InstanceNormalization", x, net.floats((channels,)), net.floats((channels,)))


def where(net: Net, x: str) -> str:
    """Choose elements of two tensors by a constant mask."""
    draw, shape = net.draw, net.shape(x)
    chosen = net.constant(draw.array(bool, [n if draw.chance() else 1 for n in shape]))
    return net.add("Where", chosen, *draw.sample([x, activation(net, x)], 2))


def _head(net: Net, x: str) -> str:
    """Add a classifier."""
    if net.values[x].ndim > 2 and net.draw.chance(0.6):
        x = net.add("GlobalAveragePool", x)
    y = dense(net, net.add("Flatten", x))
    return net.add("Softmax", y, axis=-1) if net.draw.chance(0.3) else y


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


ANY: tuple[Piece, ...] = (
    relu, clip, activation, combined, two_inputs, concatenated, split, sliced, gathered, pad, transposed, reshaped,
    softmax, reduction, where,
)  # fmt: skip
"""Pieces for tensors of any rank."""
SPATIAL: tuple[Piece, ...] = (conv, conv, conv, conv, residual, pool, pool, global_pool, conv_transpose, batch_norm)
"""Pieces for [N, C, ...]."""
PIECES: dict[int, tuple[Piece, ...]] = {
    1: (relu, clip, activation, combined, sliced, gathered),
    2: (*ANY, dense, dense, dense, dense, layer_norm),
    3: (*ANY, conv, pool, dense, dense, dense, attention, heads, heads, layer_norm, batch_norm, residual),
    4: (*ANY, *SPATIAL, *SPATIAL, resize, depth, shuffled, squeeze_excite, instance_norm),
    5: (*ANY, *SPATIAL, dense),
}
