"""Single operators with random attributes: each function adds one node to a Net and returns its outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.differential.net import MS, Array, Draw, Net, OracleError
from benchmarks.differential.networks import window, window_of_mean

Make = Callable[[Net], list[str]]
TRIES = 20
FLOATS = ("float32",) * 6 + ("float64", "float16")
INTEGERS = ("int8", "uint8", "int32", "int64")
NUMBERS = ("float32", "float32", "float32", "float64", "int32", "int64")


def operator(draw: Draw, opset: int) -> Net:
    """A model of one operator that onnxruntime runs."""
    make = draw.choice(OPERATORS)
    for _ in range(TRIES):
        net = Net(draw, opset)
        try:
            net.outputs = [name for name in make(net) if name]
        except OracleError:
            continue
        if all(name in net.values for name in net.outputs):
            return net
    raise OracleError(f"onnxruntime refuses all that was drawn of {make.__name__}")


# Operands --------------------------------------------------------------------------------------------------------


def _either(net: Net, value: Any, dtype: Any = None, constant: float = 0.5) -> str:
    """A constant, or an input of the model."""
    array = np.asarray(value, dtype)
    return net.constant(array) if net.draw.chance(constant) else net.input(array)


def _data(net: Net, shape: Sequence[int], dtype: Any = "float32", spread: float = 2.0) -> str:
    return net.input(net.draw.array(dtype, shape, spread))


def _any_shape(draw: Draw, low: int = 0, high: int = 5, most: int = 6) -> tuple[int, ...]:
    return draw.shape(draw.randint(low, high), most)


def _broadcast(draw: Draw, shape: Sequence[int]) -> tuple[int, ...]:
    """A shape that goes to `shape`, perhaps of fewer axes."""
    dims = [n if draw.chance(0.6) else 1 for n in shape]
    return tuple(dims[draw.randint(0, len(dims)) if draw.chance(0.3) else 0 :])


def _pair(draw: Draw) -> tuple[tuple[int, ...], tuple[int, ...]]:
    shape = _any_shape(draw)
    return tuple(draw.sample([_broadcast(draw, shape), shape if draw.chance() else _broadcast(draw, shape)], 2))  # type: ignore[return-value]


def _axis(draw: Draw, rank: int) -> int:
    return draw.randint(-rank, rank - 1)


def _some(draw: Draw, **attrs: Any) -> dict[str, Any]:
    """Some of these attributes."""
    return {name: value for name, value in attrs.items() if draw.chance(0.6)}


def _given(**attrs: Any) -> dict[str, Any]:
    """Those that are not None or empty."""
    return {name: value for name, value in attrs.items() if value not in (None, [])}


def _scale(draw: Draw) -> np.float32:
    """Often a small fraction, so that ties are common."""
    if draw.chance(0.4):
        return np.float32(draw.choice((1, 2, 3, 5)) / draw.choice((1, 2, 4, 8, 10, 16, 64, 128, 255)))
    return np.float32(math.exp(draw.uniform(-6, 1)))


def _meaning(net: Net, dtype: Any) -> list[str]:
    """Constant scale and zero point of a byte."""
    info = np.iinfo(dtype)
    zero = net.draw.choice((0, (int(info.min) + int(info.max) + 1) // 2, net.draw.randint(info.min, info.max)))
    return [net.constant(_scale(net.draw)), net.constant(zero, dtype)]


def _byte(draw: Draw) -> str:
    return draw.choice(("int8", "uint8"))


# Element by element ----------------------------------------------------------------------------------------------


def unary(net: Net) -> list[str]:
    draw = net.draw
    op = draw.choice((
        "Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Ceil", "Cos", "Cosh", "Erf", "Exp", "Floor", "Log",
        "Neg", "Reciprocal", "Relu", "Round", "Sigmoid", "Sign", "Sin", "Sinh", "Softplus", "Softsign", "Sqrt", "Tan",
        "Tanh", "HardSwish", "Mish", "Gelu", "IsNaN", "Identity",
    ))  # fmt: skip
    value = draw.array(draw.choice(FLOATS), _any_shape(draw), draw.choice((0.5, 3.0)))
    if op in ("Acos", "Asin", "Atanh"):
        value = np.tanh(value)
    elif op in ("Log", "Sqrt", "Reciprocal"):
        value = np.abs(value) + np.asarray(0.01, value.dtype)
    elif op == "Acosh":
        value = np.abs(value) + np.asarray(1, value.dtype)
    elif op == "IsNaN":
        value = np.sqrt(value)
    attrs: dict[str, Any] = {"approximate": draw.choice(("none", "tanh"))} if op == "Gelu" else {}
    return [net.add(op, net.input(np.asarray(value)), **attrs)]


def unary_with_attributes(net: Net) -> list[str]:
    draw = net.draw
    number = draw.choice((0.0, 0.1, 0.5, 1.0, 1.7))
    op, attrs = draw.choice((
        ("Elu", _some(draw, alpha=number)), ("Celu", _some(draw, alpha=number + 0.2)),
        ("LeakyRelu", _some(draw, alpha=number)), ("ThresholdedRelu", _some(draw, alpha=number)),
        ("HardSigmoid", _some(draw, alpha=number, beta=draw.choice((0.0, 0.5)))),
        ("Selu", _some(draw, alpha=number, gamma=number + 0.3)),
        ("Shrink", _some(draw, bias=number, lambd=draw.choice((0.3, 1.0)))),
        ("IsInf", _some(draw, detect_negative=draw.randint(0, 1), detect_positive=draw.randint(0, 1))),
    ))  # fmt: skip
    return [net.add(op, _data(net, _any_shape(draw)), **attrs)]


def of_integers(net: Net) -> list[str]:
    draw = net.draw
    op = draw.choice(("Abs", "Neg", "Sign", "Relu", "BitwiseNot", "Identity", "Clip"))
    dtype = draw.choice(INTEGERS)
    x = _data(net, _any_shape(draw), dtype)
    if op != "Clip":
        return [net.add(op, x)]
    limits = sorted(draw.randint(0, 100) for _ in range(2))
    return [net.add(op, x, *(_either(net, limit, dtype) for limit in limits[: draw.randint(0, 2)]))]


def clip(net: Net) -> list[str]:
    draw, dtype = net.draw, net.draw.choice(FLOATS)
    low, high = sorted(draw.uniform(-2, 2) for _ in range(2))
    limits = draw.choice(((), (low,), (low, high), (None, high)))
    names = ["" if limit is None else _either(net, limit, dtype) for limit in limits]
    return [net.add("Clip", _data(net, _any_shape(draw), dtype), *names)]


def binary(net: Net) -> list[str]:
    draw = net.draw
    op = draw.choice(("Add", "Sub", "Mul", "Div", "Pow", "Mod", "Max", "Min", "PRelu"))
    dtype = draw.choice(("float32", "float32", "float32", "float64", "int32", "int64", "float16", "int8", "uint8"))
    left, right = _pair(draw)
    if op == "PRelu":  # whose slope is broadcast to the other, and not the other way
        right = _broadcast(draw, left)
    a, b = draw.array(dtype, left, 2.0), draw.array(dtype, right, 2.0)
    attrs: dict[str, Any] = {}
    if op in ("Div", "Mod"):
        b = np.where(b == 0, np.asarray(3, dtype), b)
    if op == "Mod" and (np.dtype(dtype).kind == "f" or draw.chance()):
        attrs["fmod"] = 1
    if op == "Pow":
        a = np.abs(a) if np.dtype(dtype).kind == "f" else a % np.asarray(5, dtype)
        b = b if np.dtype(dtype).kind == "f" else np.abs(b % np.asarray(4, dtype))
    return [net.add(op, *(_either(net, value, dtype, 0.3) for value in (a, b)), **attrs)]


def comparison(net: Net) -> list[str]:
    draw = net.draw
    op = draw.choice(("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "And", "Or", "Xor"))
    dtype = "bool" if op in ("And", "Or", "Xor") else draw.choice(NUMBERS)
    left, right = _pair(draw)
    a, b = draw.array(dtype, left, 2.0), draw.array(dtype, right, 2.0)
    if dtype != "bool":  # so that some are equal
        a, b = np.round(np.asarray(a / 8)).astype(dtype), np.round(np.asarray(b / 8)).astype(dtype)
    return [net.add(op, *(_either(net, value, dtype, 0.3) for value in (a, b)))]


def bits(net: Net) -> list[str]:
    draw = net.draw
    op = draw.choice(("BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor"))
    dtype = draw.choice(("uint8", "uint32", "uint64") if op == "BitShift" else ("uint8", "int32", "int64", "int8"))
    left, right = _pair(draw)
    a, b = draw.array(dtype, left), draw.array(dtype, right)
    if op == "BitShift":
        return [net.add(op, net.input(a), _either(net, b % 8, dtype), direction=draw.choice(("LEFT", "RIGHT")))]
    return [net.add(op, net.input(a), _either(net, b))]


def variadic(net: Net) -> list[str]:
    draw = net.draw
    op, shape = draw.choice(("Sum", "Mean", "Max", "Min")), _any_shape(draw)
    names = [_either(net, draw.floats(_broadcast(draw, shape)), constant=0.3) for _ in range(draw.randint(1, 4))]
    return [net.add(op, *names)]


def where(net: Net) -> list[str]:
    draw, dtype = net.draw, net.draw.choice(("float32", "int64", "uint8", "float64"))
    shape = _any_shape(draw)
    names = [_either(net, draw.array(kind, _broadcast(draw, shape)), constant=0.3) for kind in ("bool", dtype, dtype)]
    return [net.add("Where", *names)]


def cast(net: Net) -> list[str]:
    draw = net.draw
    kinds = ("float32", "float64", "float16", "int8", "uint8", "int16", "int32", "int64", "bool")
    source, target = draw.choice(kinds), draw.choice(kinds)
    value = draw.array(source, _any_shape(draw), 30.0)
    if np.dtype(source).kind in "fi" and np.dtype(target).kind == "u":
        value = np.abs(value)  # what is out of range has no meaning
    from onnx import helper

    return [net.add("Cast", net.input(np.asarray(value)), to=helper.np_dtype_to_tensor_dtype(np.dtype(target)))]


# Reductions ------------------------------------------------------------------------------------------------------


def reduction(net: Net) -> list[str]:
    draw = net.draw
    op = "Reduce" + draw.choice(("Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "LogSum", "LogSumExp", "SumSquare"))
    shape, dtype = _any_shape(draw, 0 if draw.chance(0.1) else 1), draw.choice(NUMBERS)
    value = draw.array(dtype, shape)
    if op == "ReduceLogSum":
        value = np.abs(value) + np.asarray(1, dtype)
    elif op == "ReduceProd":  # within the range of integers
        value = np.sign(value)
    attrs = _some(draw, keepdims=draw.randint(0, 1))
    axes = [_axis(draw, len(shape)) % len(shape) - len(shape) * draw.randint(0, 1) for _ in range(2)] if shape else []
    axes = list({axis % len(shape): axis for axis in axes[: draw.randint(0, 2)]}.values())
    if net.opset < (13 if op == "ReduceSum" else 18):
        return [net.add(op, net.input(value), **attrs, **_given(axes=axes))]
    attrs |= _some(draw, noop_with_empty_axes=draw.randint(0, 1))
    given = [_either(net, axes, np.int64, 0.9)] if axes or draw.chance(0.3) else []
    return [net.add(op, net.input(value), *given, **attrs)]


def arg(net: Net) -> list[str]:
    draw = net.draw
    shape = _any_shape(draw, 1)
    attrs = _some(draw, axis=_axis(draw, len(shape)), keepdims=draw.randint(0, 1), select_last_index=draw.randint(0, 1))
    value = np.round(draw.floats(shape)) if draw.chance() else draw.array(draw.choice(("float32", "int32")), shape)
    return [net.add(draw.choice(("ArgMax", "ArgMin")), net.input(value), **attrs)]


def softmax(net: Net) -> list[str]:
    draw = net.draw
    shape = _any_shape(draw, 1, 5, 9)
    op = draw.choice(("Softmax", "Softmax", "LogSoftmax", "Hardmax"))
    x = _data(net, shape, draw.choice(("float32", "float32", "float64")), draw.choice((1.0, 20.0)))
    return [net.add(op, x, **_some(draw, axis=_axis(draw, len(shape))))]


def cumsum(net: Net) -> list[str]:
    draw = net.draw
    shape = _any_shape(draw, 1)
    axis = _either(net, _axis(draw, len(shape)), np.int64, 0.8)
    attrs = _some(draw, exclusive=draw.randint(0, 1), reverse=draw.randint(0, 1))
    return [net.add("CumSum", _data(net, shape, draw.choice(NUMBERS)), axis, **attrs)]


def top_k(net: Net) -> list[str]:
    draw = net.draw
    shape = _any_shape(draw, 1, 4, 8)
    axis = _axis(draw, len(shape))
    count = _either(net, [draw.randint(0, shape[axis])], np.int64, 0.8)
    attrs = _some(draw, largest=draw.randint(0, 1)) | {"axis": axis}
    value = np.round(draw.floats(shape, 2)) if draw.chance(0.4) else draw.floats(shape)
    return net.add_all("TopK", net.input(value), count, outputs=2, **attrs)


# Products --------------------------------------------------------------------------------------------------------


def matmul(net: Net) -> list[str]:
    """Of all ranks from 1, with batches that are broadcast."""
    draw, dtype = net.draw, net.draw.choice(("float32", "float32", "float32", "float64", "int32"))
    m, k, n = draw.shape(3, 9)
    batch = _any_shape(draw, 0, 3, 3)
    left = draw.choice(((k,), (m, k), (*_broadcast(draw, batch), m, k)))
    right = draw.choice(((k,), (k, n), (*_broadcast(draw, batch), k, n)))
    return [net.add("MatMul", *(_either(net, draw.array(dtype, shape), dtype, 0.4) for shape in (left, right)))]


def fused_matmul(net: Net) -> list[str]:
    draw = net.draw
    m, k, n = draw.shape(3, 7)
    a, b = draw.randint(0, 1), draw.randint(0, 1)
    batch = draw.shape(draw.randint(0, 2), 3)
    left, right = (*batch, *((k, m) if a else (m, k))), (*batch, *((n, k) if b else (k, n)))
    attrs = dict(transA=a, transB=b) | _some(draw, alpha=draw.choice((0.5, 1.7)))
    return [net.add("FusedMatMul", *(_either(net, draw.floats(s)) for s in (left, right)), domain=MS, **attrs)]


def gemm(net: Net) -> list[str]:
    draw, dtype = net.draw, net.draw.choice(("float32", "float32", "float64"))
    m, k, n = draw.shape(3, 12)
    a, b = draw.randint(0, 1), draw.randint(0, 1)
    shapes: list[tuple[int, ...]] = [(k, m) if a else (m, k), (n, k) if b else (k, n)]
    if draw.chance(0.7):
        shapes.append(draw.choice(((n,), (1, n), (m, 1), (m, n), (1,), (), (1, 1))))
    attrs = _some(draw, alpha=draw.choice((0.5, 2.0)), beta=draw.choice((0.0, 0.5, 1.3))) | dict(transA=a, transB=b)
    return [net.add("Gemm", *(_either(net, draw.array(dtype, shape), dtype) for shape in shapes), **attrs)]


def einsum(net: Net) -> list[str]:
    draw = net.draw
    equation = draw.choice((
        "ij,jk->ik", "bij,bjk->bik", "ij->ji", "ij->", "ij,ij->i", "bhid,bhjd->bhij", "ii->i", "...ij,...jk->...ik",
        "i,j->ij", "ijk->kj", "ab,cb->ac",
    ))  # fmt: skip
    sizes = {letter: draw.randint(1, 5) for letter in "abcdefghijk"}
    shapes = [
        tuple(sizes[letter] for letter in term.replace("...", "bh")) for term in equation.split("->")[0].split(",")
    ]
    return [net.add("Einsum", *(_either(net, draw.floats(shape), constant=0.2) for shape in shapes), equation=equation)]


# Windows ---------------------------------------------------------------------------------------------------------


def _image(draw: Draw, most: int = 9) -> tuple[list[int], list[int]]:
    """Images and channels, and the size of one to three axes."""
    return [draw.randint(1, 2), draw.randint(1, 9)], [
        draw.randint(1, most) for _ in range(draw.choice((1, 2, 2, 2, 3)))
    ]


def conv(net: Net) -> list[str]:
    draw, (front, size) = net.draw, _image(net.draw)
    kernel = [draw.randint(1, 3) for _ in size]
    group = draw.choice([g for g in range(1, front[1] + 1) if front[1] % g == 0])
    out = group * draw.randint(1, 4)
    weights = [_either(net, draw.floats((out, front[1] // group, *kernel)), constant=0.8)]
    if draw.chance():
        weights.append(_either(net, draw.floats((out,)), constant=0.8))
    return [net.add("Conv", _data(net, (*front, *size)), *weights, group=group, **window(draw, size, kernel, True))]


def conv_transpose(net: Net) -> list[str]:
    draw, (front, size) = net.draw, _image(net.draw, 5)
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
    attrs |= _some(draw, output_padding=[draw.randint(0, s - 1) for s in strides])
    if draw.chance(0.3):
        attrs["dilations"] = [draw.randint(1, 2) for _ in size]
    out = draw.randint(1, 4)
    weights = [_either(net, draw.floats((front[1], out, *kernel)), constant=0.8)]
    if draw.chance():
        weights.append(_either(net, draw.floats((out * group,)), constant=0.8))
    return [net.add("ConvTranspose", _data(net, (*front, *size)), *weights, **attrs)]


def pool(net: Net) -> list[str]:
    draw, (front, size) = net.draw, _image(net.draw)
    op = draw.choice(("MaxPool", "MaxPool", "AveragePool", "AveragePool", "LpPool"))
    kernel = [draw.randint(1, min(4, n)) for n in size]
    dilated = op == "MaxPool" or (net.opset >= 19 and op == "AveragePool") or (net.opset >= 18 and op == "LpPool")
    attrs = (window_of_mean if op == "AveragePool" else window)(draw, size, kernel, dilated)
    if draw.chance(0.3) and (op != "LpPool" or net.opset >= 18):
        attrs["ceil_mode"] = 1
    if op == "AveragePool":
        attrs |= _some(draw, count_include_pad=draw.randint(0, 1))
    if op == "LpPool":
        attrs |= _some(draw, p=draw.randint(1, 3))
    if op == "MaxPool" and draw.chance(0.25):
        attrs |= _some(draw, storage_order=draw.randint(0, 1))
        return net.add_all(op, _data(net, (*front, *size)), outputs=2, **attrs)
    dtype = draw.choice(("float32", "float32", "int8", "uint8")) if op == "MaxPool" else "float32"
    return [net.add(op, _data(net, (*front, *size), dtype), **attrs)]


def global_pool(net: Net) -> list[str]:
    draw, (front, size) = net.draw, _image(net.draw)
    op = draw.choice(("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool"))
    attrs = _some(draw, p=draw.randint(1, 3)) if op == "GlobalLpPool" else {}
    return [net.add(op, _data(net, (*front, *size)), **attrs)]


def resize(net: Net) -> list[str]:
    draw, (front, size) = net.draw, _image(net.draw, 7)
    mode = draw.choice(("nearest", "linear", "cubic"))
    modes = ["asymmetric", "half_pixel", "align_corners", "pytorch_half_pixel"]
    modes += ["half_pixel_symmetric"] * (net.opset >= 19) + ["tf_crop_and_resize"]
    attrs: dict[str, Any] = {"mode": mode} | _some(draw, coordinate_transformation_mode=draw.choice(modes))
    if mode == "nearest":
        attrs |= _some(draw, nearest_mode=draw.choice(("floor", "ceil", "round_prefer_floor", "round_prefer_ceil")))
    if mode == "cubic":
        attrs |= _some(draw, cubic_coeff_a=draw.choice((-0.5, -0.75)), exclude_outside=draw.randint(0, 1))
    if net.opset >= 18 and mode != "nearest":
        attrs |= _some(draw, antialias=draw.randint(0, 1))
    roi = ""
    if attrs.get("coordinate_transformation_mode") == "tf_crop_and_resize":
        begin = [draw.choice((0.0, 0.1, 0.3)) for _ in size]
        end = [draw.choice((0.7, 1.0, 1.1)) for _ in size]
        roi = net.constant([0, 0, *begin, 1, 1, *end], np.float32)
        attrs |= _some(draw, extrapolation_value=1.5)
    x = _data(net, (*front, *size), draw.choice(("float32", "float32", "int8", "uint8")))
    if draw.chance():
        scales = [1, 1, *(draw.choice((0.5, 0.7, 1, 1.5, 2, 2.3, 1 / 3)) for _ in size)]
        return [net.add("Resize", x, roi, _either(net, scales, np.float32, 0.9), **attrs)]
    sizes = [*front, *(draw.randint(1, 12) for _ in size)]
    return [net.add("Resize", x, roi, "", _either(net, sizes, np.int64, 0.9), **attrs)]


def grid_sample(net: Net) -> list[str]:
    draw = net.draw
    n, c, h, w = draw.shape(4, 5)
    modes = ("linear", "nearest", "cubic") if net.opset >= 20 else ("bilinear", "nearest", "bicubic")
    attrs = _some(draw, mode=draw.choice(modes), padding_mode=draw.choice(("zeros", "border", "reflection")),
                  align_corners=draw.randint(0, 1))  # fmt: skip
    grid = draw.arrays.uniform(-1.3, 1.3, (n, *draw.shape(2, 5), 2)).astype(np.float32)
    return [net.add("GridSample", _data(net, (n, c, h, w)), net.input(grid), **attrs)]


# Movement --------------------------------------------------------------------------------------------------------


def movement(net: Net) -> list[str]:
    draw = net.draw
    dtype = draw.choice(("float32", "float32", "int8", "uint8", "int64", "float64", "bool"))
    shape = _any_shape(draw, 1)
    x = _data(net, shape, dtype)
    return draw.choice(MOVEMENTS)(net, x, shape)


def _transpose(net: Net, x: str, shape: tuple[int, ...]) -> list[str]:
    return [net.add("Transpose", x, **_some(net.draw, perm=net.draw.sample(range(len(shape)), len(shape))))]


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
    return [net.add("Reshape", x, _either(net, dims, np.int64, 0.8))]


def _flatten(net: Net, x: str, shape: tuple[int, ...]) -> list[str]:
    return [net.add("Flatten", x, **_some(net.draw, axis=net.draw.randint(-len(shape), len(shape))))]


def _unsqueeze(net: Net, x: str, shape: tuple[int, ...]) -> list[str]:
    draw = net.draw
    rank = len(shape) + draw.randint(1, 2)
    axes = draw.sample(range(rank), rank - len(shape))
    axes = [axis - rank if draw.chance(0.3) else axis for axis in axes]
    return [net.add("Unsqueeze", x, _either(net, axes, np.int64, 0.9))]


def _squeeze(net: Net, x: str, shape: tuple[int, ...]) -> list[str]:
    axes = [axis - len(shape) * net.draw.randint(0, 1) for axis, n in enumerate(shape) if n == 1]
    return [net.add("Squeeze", x, *([_either(net, axes, np.int64, 0.9)] if axes and net.draw.chance() else []))]


def _concat(net: Net, x: str, shape: tuple[int, ...]) -> list[str]:
    draw, axis = net.draw, _axis(net.draw, len(shape))
    others = []
    for _ in range(draw.randint(0, 3)):
        dims = list(shape)
        dims[axis] = draw.randint(1, 5)
        others.append(_either(net, draw.array(net.values[x].dtype, dims), constant=0.3))
    return [net.add("Concat", *draw.sample([x, *others], 1 + len(others)), axis=axis)]


def _split(net: Net, x: str, shape: tuple[int, ...]) -> list[str]:
    draw, axis = net.draw, _axis(net.draw, len(shape))
    parts, size = draw.randint(1, 4), shape[axis]
    if draw.chance(0.4):
        attrs = _given(num_outputs=parts if net.opset >= 18 else None)
        return net.add_all("Split", x, outputs=parts, axis=axis, **attrs)
    cuts = sorted(draw.randint(0, size) for _ in range(parts - 1))
    sizes = [b - a for a, b in zip([0, *cuts], [*cuts, size])]
    return net.add_all("Split", x, _either(net, sizes, np.int64, 0.8), outputs=parts, axis=axis)


def _slice(net: Net, x: str, shape: tuple[int, ...]) -> list[str]:
    draw = net.draw
    axes = draw.sample(range(len(shape)), draw.randint(1, len(shape)))
    steps = [draw.choice((1, 1, 2, 3, -1, -2)) for _ in axes]
    ends = [draw.choice((n, 2**31, -(2**40), draw.randint(-n - 2, n + 2), -1)) for n in (shape[a] for a in axes)]
    starts = [draw.randint(-shape[a] - 1, shape[a] + 1) for a in axes]
    named = [axis - len(shape) * draw.randint(0, 1) for axis in axes]
    inputs = [_either(net, numbers, np.int64, 0.8) for numbers in (starts, ends, named)]
    return [net.add("Slice", x, *inputs, *([_either(net, steps, np.int64, 0.8)] if draw.chance(0.7) else []))]


def _gather(net: Net, x: str, shape: tuple[int, ...]) -> list[str]:
    draw, axis = net.draw, _axis(net.draw, len(shape))
    n = shape[axis]
    ids = draw.arrays.integers(-n, n, _any_shape(draw, 0, 2, 4)).astype(draw.choice((np.int64, np.int32)))
    return [net.add("Gather", x, _either(net, ids), **_given(axis=axis if axis or draw.chance() else None))]


def _gather_elements(net: Net, x: str, shape: tuple[int, ...]) -> list[str]:
    draw, axis = net.draw, _axis(net.draw, len(shape))
    dims = [draw.randint(1, n) for n in shape]
    dims[axis] = draw.randint(1, 6)
    ids = draw.arrays.integers(-shape[axis], shape[axis], dims)
    return [net.add("GatherElements", x, _either(net, ids), axis=axis)]


def _gather_nd(net: Net, x: str, shape: tuple[int, ...]) -> list[str]:
    draw = net.draw
    batch = draw.randint(0, len(shape) - 1)
    depth = draw.randint(1, len(shape) - batch)
    front = (*shape[:batch], *draw.shape(draw.randint(0 if batch else 1, 2), 4))
    ids = np.stack([draw.arrays.integers(-n, n, front) for n in shape[batch : batch + depth]], -1)
    return [net.add("GatherND", x, _either(net, ids), **_given(batch_dims=batch or None))]


def _scatter_elements(net: Net, x: str, shape: tuple[int, ...]) -> list[str]:
    draw, axis = net.draw, _axis(net.draw, len(shape))
    dims = [draw.randint(1, n) for n in shape]
    ids = np.argsort(draw.arrays.random(shape), axis)[tuple(slice(n) for n in dims)]  # no element twice
    updates = draw.array(net.values[x].dtype, dims)
    kinds = ("none", "add", "mul", *(("max", "min") if net.opset >= 18 else ()))
    attrs = _some(draw, reduction=draw.choice(kinds)) if net.opset >= 16 else {}
    return [net.add("ScatterElements", x, _either(net, ids, np.int64), _either(net, updates), axis=axis, **attrs)]


def _scatter_nd(net: Net, x: str, shape: tuple[int, ...]) -> list[str]:
    draw = net.draw
    depth = draw.randint(1, len(shape))
    every = np.array(list(np.ndindex(*shape[:depth])), np.int64)
    ids = every[draw.arrays.permutation(len(every))[: draw.randint(1, len(every))]]
    updates = draw.array(net.values[x].dtype, (len(ids), *shape[depth:]))
    kinds = ("none", "add", "mul", *(("max", "min") if net.opset >= 18 else ()))
    attrs = _some(draw, reduction=draw.choice(kinds)) if net.opset >= 16 else {}
    return [net.add("ScatterND", x, _either(net, ids), _either(net, updates), **attrs)]


def _pad(net: Net, x: str, shape: tuple[int, ...]) -> list[str]:
    draw, dtype = net.draw, net.values[x].dtype
    mode = draw.choice(("constant", "edge", "reflect", *(("wrap",) if net.opset >= 19 else ())))
    axes = draw.sample(range(len(shape)), draw.randint(1, len(shape))) if net.opset >= 18 and draw.chance() else None
    sizes = [shape[axis] for axis in (range(len(shape)) if axes is None else axes)]
    low = -1 if draw.chance(0.2) else 0
    pads = [draw.randint(low if n > 2 else 0, min(3, n - 1) if mode in ("reflect", "wrap") else 3) for n in sizes * 2]
    inputs = [_either(net, pads, np.int64, 0.8)]
    if axes is not None or (mode == "constant" and draw.chance()):
        inputs.append(_either(net, 1, dtype))
    if axes is not None:
        inputs.append(_either(net, axes, np.int64, 0.8))
    return [net.add("Pad", x, *inputs, **_some(draw, mode=mode))]


def _tile(net: Net, x: str, shape: tuple[int, ...]) -> list[str]:
    return [
        net.add(
            "Tile", x, _either(net, [net.draw.randint(0 if net.draw.chance(0.1) else 1, 3) for _ in shape], np.int64)
        )
    ]


def _expand(net: Net, x: str, shape: tuple[int, ...]) -> list[str]:
    draw = net.draw
    dims = [*draw.shape(draw.randint(0, 2), 3), *(draw.randint(1, 4) if n == 1 else draw.choice((n, 1)) for n in shape)]
    return [net.add("Expand", x, _either(net, dims, np.int64))]


def _trilu(net: Net, x: str, shape: tuple[int, ...]) -> list[str]:
    draw = net.draw
    k = [_either(net, draw.randint(-4, 4), np.int64)] if draw.chance(0.6) else []
    return [net.add("Trilu", x, *k, **_some(draw, upper=draw.randint(0, 1)))]


def _one_element(net: Net, x: str, shape: tuple[int, ...]) -> list[str]:
    """Shape and Size."""
    draw = net.draw
    if draw.chance(0.3):
        return [net.add("Size", x)]
    attrs = _some(draw, start=draw.randint(-4, 4), end=draw.randint(-4, 4)) if net.opset >= 15 else {}
    return [net.add("Shape", x, **attrs)]


def _compress(net: Net, x: str, shape: tuple[int, ...]) -> list[str]:
    draw = net.draw
    axis = draw.choice((None, _axis(draw, len(shape))))
    size = math.prod(shape) if axis is None else shape[axis]
    chosen = draw.array(bool, (draw.randint(1, size),))
    return [net.add("Compress", x, _either(net, chosen), **_given(axis=axis))]


def _reverse_sequence(net: Net, x: str, shape: tuple[int, ...]) -> list[str]:
    draw, batch = net.draw, net.draw.randint(0, 1)
    lengths = draw.arrays.integers(
        1, shape[1 - batch] + 1 if len(shape) > 1 else 2, shape[batch] if len(shape) > 1 else 1
    )
    return [net.add("ReverseSequence", x, _either(net, lengths, np.int64), batch_axis=batch, time_axis=1 - batch)]


def _blocks(net: Net, x: str, shape: tuple[int, ...]) -> list[str]:
    """DepthToSpace and SpaceToDepth, of another tensor."""
    draw, b = net.draw, net.draw.randint(1, 3)
    n, c, h, w = draw.shape(4, 3)
    value = net.values.pop(x)
    del net.inputs[x]
    if draw.chance():
        y = net.input(draw.array(value.dtype, (n, c, h * b, w * b)))
        return [net.add("SpaceToDepth", y, blocksize=b)]
    y = net.input(draw.array(value.dtype, (n, c * b * b, h, w)))
    return [net.add("DepthToSpace", y, blocksize=b, **_some(draw, mode=draw.choice(("DCR", "CRD"))))]


MOVEMENTS: tuple[Callable[[Net, str, tuple[int, ...]], list[str]], ...] = (
    _transpose, _reshape, _flatten, _unsqueeze, _squeeze, _concat, _split, _slice, _gather, _gather_elements,
    _gather_nd, _scatter_elements, _scatter_nd, _pad, _tile, _expand, _trilu, _one_element, _compress,
    _reverse_sequence, _blocks,
)  # fmt: skip


def made(net: Net) -> list[str]:
    """Tensors that come from numbers or indices."""
    draw = net.draw
    match draw.choice(("OneHot", "Range", "ConstantOfShape", "EyeLike", "NonZero", "Unique")):
        case "OneHot":
            ids = draw.arrays.integers(-5, 6, _any_shape(draw, 0, 3)).astype(draw.choice((np.int64, np.int32)))
            depth, values = net.constant(draw.randint(1, 5), np.int64), _either(net, [0.5, 2.0], np.float32)
            return [net.add("OneHot", net.input(ids), depth, values, **_some(draw, axis=draw.randint(-1, ids.ndim)))]
        case "Range":
            dtype = draw.choice((np.int64, np.int32, np.float32))
            step = draw.choice((1, 2, -1, 3))
            numbers = (draw.randint(-3, 3), draw.randint(4, 9), step) if step > 0 else (7, draw.randint(-2, 3), step)
            return [net.add("Range", *(_either(net, number, dtype) for number in numbers))]
        case "ConstantOfShape":
            return [net.add("ConstantOfShape", _either(net, _any_shape(draw, 1, 3), np.int64))]
        case "EyeLike":
            return [net.add("EyeLike", _data(net, draw.shape(2)), **_some(draw, k=draw.randint(-3, 3)))]
        case "NonZero":
            return [net.add("NonZero", _data(net, _any_shape(draw, 1, 3), draw.choice(("bool", "float32"))))]
    value = np.round(draw.floats(_any_shape(draw, 1, 2), 2))
    attrs = _some(draw, sorted=draw.randint(0, 1), axis=_axis(draw, value.ndim))
    return net.add_all("Unique", net.input(value), outputs=4, **attrs)


# Normalisation ---------------------------------------------------------------------------------------------------


def normalisation(net: Net) -> list[str]:
    draw, (front, size) = net.draw, _image(net.draw)
    channels = front[1]
    x = _data(net, (*front, *size))
    numbers = [_either(net, draw.floats((channels,)), constant=0.8) for _ in range(3)]
    epsilon = _some(draw, epsilon=draw.choice((1e-5, 1e-2)))
    match draw.choice(("batch", "instance", "group", "lp", "lrn", "mvn")):
        case "batch":
            variance = _either(net, np.abs(draw.floats((channels,))) + np.float32(0.1), constant=0.8)
            return [net.add("BatchNormalization", x, *numbers, variance, **epsilon)]
        case "instance":
            return [net.add("InstanceNormalization", x, *numbers[:2], **epsilon)]
        case "group":
            groups = draw.choice([g for g in range(1, channels + 1) if channels % g == 0])
            if net.opset < 21:
                numbers = [net.floats((groups,)) for _ in range(2)]
            return [net.add("GroupNormalization", x, *numbers[:2], num_groups=groups, **epsilon)]
        case "lp":
            return [net.add("LpNormalization", x, **_some(draw, axis=_axis(draw, 2 + len(size)), p=draw.randint(1, 2)))]
        case "lrn":
            attrs = _some(
                draw, alpha=draw.choice((1e-4, 0.3)), beta=draw.choice((0.75, 0.5)), bias=draw.choice((1.0, 2.0))
            )
            return [net.add("LRN", x, size=draw.choice((1, 3, 5)), **attrs)]
    axes = sorted(draw.sample(range(2 + len(size)), draw.randint(1, 2 + len(size))))
    if all((*front, *size)[axis] == 1 for axis in axes):
        raise OracleError(
            "of one element, whose variance onnxruntime takes for the difference of two squares, perhaps NaN"
        )
    return [net.add("MeanVarianceNormalization", x, **_some(draw, axes=axes))]


def layer_norm(net: Net) -> list[str]:
    draw = net.draw
    shape = _any_shape(draw, 2, 4, 9)
    axis = _axis(draw, len(shape))
    dims = shape[axis % len(shape) :]
    epsilon = _some(draw, epsilon=draw.choice((1e-5, 1e-2)))
    x, scale, bias = _data(net, shape), _either(net, draw.floats(dims)), _either(net, draw.floats(dims))
    match draw.choice(("plain", "plain", "simplified", "skip", "skip simplified")):
        case "plain":
            inputs = [scale, bias] if draw.chance(0.7) else [scale]
            return net.add_all("LayerNormalization", x, *inputs, outputs=draw.choice((1, 1, 3)), axis=axis, **epsilon)
        case "simplified":
            return [net.add("SimplifiedLayerNormalization", x, scale, axis=axis, **epsilon)]
        case kind:
            three = draw.shape(3, 7)
            x, skip = _data(net, three), _data(net, three)
            scale, *more = (_either(net, draw.floats(three[-1:])) for _ in range(3))
            if kind == "skip":
                names = more[: draw.randint(0, 2)]
                return [net.add("SkipLayerNormalization", x, skip, scale, *names, domain=MS, **epsilon)]
            return [net.add("SkipSimplifiedLayerNormalization", x, skip, scale, *more[:1], domain=MS, **epsilon)]


# Recurrent -------------------------------------------------------------------------------------------------------


def recurrent(net: Net) -> list[str]:
    draw, op = net.draw, net.draw.choice(("LSTM", "GRU", "RNN"))
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[op]
    steps, batch, inner, hidden = draw.shape(4, 5)
    direction = draw.choice(("forward", "reverse", "bidirectional"))
    ways = 2 if direction == "bidirectional" else 1
    attrs: dict[str, Any] = {"hidden_size": hidden, "direction": direction}
    if draw.chance(0.2):
        attrs["clip"] = 0.7
    if op == "GRU":
        attrs |= _some(draw, linear_before_reset=draw.randint(0, 1))
    if op == "LSTM" and draw.chance(0.2):
        attrs["input_forget"] = 1
    if draw.chance(0.2):
        own = {"LSTM": ["HardSigmoid", "Softsign", "Tanh"], "GRU": ["Sigmoid", "Relu"], "RNN": ["Relu"]}[op]
        attrs["activations"] = own * ways

    def f(*shape: int) -> str:
        return _either(net, draw.floats(shape, 0.5), constant=0.8)

    inputs = [_data(net, (steps, batch, inner)), f(ways, gates * hidden, inner), f(ways, gates * hidden, hidden)]
    rest = [f(ways, 2 * gates * hidden), _either(net, draw.arrays.integers(1, steps + 1, batch), np.int32),
            f(ways, batch, hidden)]  # fmt: skip
    if op == "LSTM":
        rest += [f(ways, batch, hidden), f(ways, 3 * hidden)]
    rest = [name if draw.chance(0.6) else "" for name in rest]
    return net.add_all(op, *inputs, *rest, outputs=3 if op == "LSTM" else 2, **attrs)


# Integers of quantised models ------------------------------------------------------------------------------------


def quantize(net: Net) -> list[str]:
    """Of a tensor, of channels, or of blocks."""
    draw = net.draw
    shape = _any_shape(draw, 1, 4)
    dtype = draw.choice(("int8", "uint8", "int8", "uint8", *(("int16", "uint16") if net.opset >= 21 else ())))
    scale, zero, attrs = _channels(net, shape, dtype)
    inputs = [_either(net, scale), *([_either(net, zero)] if zero is not None else [])]
    value = draw.floats(shape, 40) * scale.reshape(-1)[0]
    if draw.chance(0.4):
        value = np.round(value / scale.reshape(-1)[0] * 2) / 2 * scale.reshape(-1)[0]  # ties
    return [net.add("QuantizeLinear", net.input(value.astype(np.float32)), *inputs, **attrs)]


def _channels(net: Net, shape: Sequence[int], dtype: str) -> tuple[Array, Array | None, dict[str, Any]]:
    draw = net.draw
    dims: list[int] = []
    attrs: dict[str, Any] = {}
    if draw.chance():
        axis = _axis(draw, len(shape))
        attrs, dims = {"axis": axis}, [shape[axis]]
        if net.opset >= 21 and draw.chance(0.3):
            attrs["block_size"] = block = draw.choice([b for b in range(1, shape[axis] + 1) if shape[axis] % b == 0])
            dims = list(shape)
            dims[axis] //= block
    scale = np.full(dims, _scale(draw)) * (1 + draw.arrays.random(dims) * bool(dims)).astype(np.float32)
    return scale.astype(np.float32), draw.array(dtype, dims) if draw.chance(0.8) else None, attrs


def dequantize(net: Net) -> list[str]:
    draw = net.draw
    shape = _any_shape(draw, 1, 4)
    dtype = draw.choice(("int8", "uint8", "int32", *(("int16", "uint16") if net.opset >= 21 else ())))
    scale, zero, attrs = _channels(net, shape, dtype)
    if dtype == "int32":
        zero = None
    return [net.add("DequantizeLinear", _data(net, shape, dtype), _either(net, scale),
                    *([_either(net, zero)] if zero is not None else []), **attrs)]  # fmt: skip


def dynamic_quantize(net: Net) -> list[str]:
    x = _data(net, _any_shape(net.draw, 1, 4), spread=net.draw.choice((0.1, 5.0)))
    return net.add_all("DynamicQuantizeLinear", x, outputs=3)


def qlinear_binary(net: Net) -> list[str]:
    draw, dtype = net.draw, _byte(net.draw)
    operands = []
    for shape in _pair(draw):
        operands += [_either(net, draw.array(dtype, shape), dtype, 0.2), *_meaning(net, dtype)]
    return [net.add(draw.choice(("QLinearAdd", "QLinearMul")), *operands, *_meaning(net, dtype), domain=MS)]


def qlinear_unary(net: Net) -> list[str]:
    draw, dtype = net.draw, _byte(net.draw)
    op = draw.choice(("QLinearSigmoid", "QLinearLeakyRelu"))
    attrs = _some(draw, alpha=draw.choice((0.1, 0.3))) if op == "QLinearLeakyRelu" else {}
    operands = [_data(net, _any_shape(draw, 1, 4), dtype), *_meaning(net, dtype), *_meaning(net, dtype)]
    return [net.add(op, *operands, domain=MS, **attrs)]


def qlinear_softmax(net: Net) -> list[str]:
    draw, dtype = net.draw, _byte(net.draw)
    shape = _any_shape(draw, 1, 4, 9)
    operands = [_data(net, shape, dtype), *_meaning(net, dtype), *_meaning(net, dtype)]
    return [net.add("QLinearSoftmax", *operands, domain=MS, axis=_axis(draw, len(shape)), opset=net.opset)]


def qlinear_concat(net: Net) -> list[str]:
    draw, dtype = net.draw, _byte(net.draw)
    shape = list(_any_shape(draw, 1, 4))
    axis = _axis(draw, len(shape))
    operands = _meaning(net, dtype)
    for _ in range(draw.randint(1, 3)):
        shape[axis] = draw.randint(1, 5)
        operands += [_either(net, draw.array(dtype, shape), dtype, 0.2), *_meaning(net, dtype)]
    return [net.add("QLinearConcat", *operands, domain=MS, axis=axis)]


def qlinear_where(net: Net) -> list[str]:
    draw, dtype = net.draw, _byte(net.draw)
    shape = _any_shape(draw, 1, 4)
    operands = [_either(net, draw.array(bool, shape))]  # a condition that is broadcast may crash onnxruntime
    for _ in range(2):
        operands += [_either(net, draw.array(dtype, shape), dtype, 0.2), *_meaning(net, dtype)]
    return [net.add("QLinearWhere", *operands, *_meaning(net, dtype), domain=MS)]


def qlinear_pool(net: Net) -> list[str]:
    draw, dtype, (front, size) = net.draw, _byte(net.draw), _image(net.draw)
    operands = [_data(net, (*front, *size), dtype), *_meaning(net, dtype), *_meaning(net, dtype)]
    if draw.chance(0.3):
        return [net.add("QLinearGlobalAveragePool", *operands, domain=MS)]
    kernel = [draw.randint(1, min(3, n)) for n in size]
    attrs = window(draw, size, kernel) | _some(draw, count_include_pad=draw.randint(0, 1), ceil_mode=draw.randint(0, 1))
    return [net.add("QLinearAveragePool", *operands, domain=MS, **attrs)]


def qlinear_conv(net: Net) -> list[str]:
    draw, dtype, (front, size) = net.draw, _byte(net.draw), _image(net.draw)
    group = draw.choice([g for g in range(1, front[1] + 1) if front[1] % g == 0])
    out, kernel = group * draw.randint(1, 4), [draw.randint(1, 3) for _ in size]
    wide = (front[1] // group, *kernel)
    kind = draw.choice(("int8", dtype))
    weights = draw.array(kind, (out, *wide)) // np.array(2, kind)  # 7 bits: see quantised.py
    scales = draw.arrays.uniform(0.01, 0.05, out if draw.chance() else ()).astype(np.float32)
    zero = np.zeros(scales.shape, kind) if kind == "int8" or scales.ndim else draw.array(kind, ())
    x, (sx, zx) = _data(net, (*front, *size), dtype), _meaning(net, dtype)
    spread = float(net.values[sx]) * 0.03 * 40 * math.sqrt(math.prod(wide))
    y = [net.constant(np.float32(spread * draw.uniform(0.5, 2))), net.constant(draw.array(dtype, ()))]
    bias = [net.constant(draw.arrays.integers(-3000, 3000, out), np.int32)] if draw.chance() else []
    constants = [net.constant(value) for value in (weights, scales, zero)]
    return [net.add("QLinearConv", x, sx, zx, *constants, *y, *bias, group=group, **window(draw, size, kernel, True))]


def integer_product(net: Net) -> list[str]:
    """QLinearMatMul, MatMulInteger, QGemm, MatMulIntegerToFloat and DynamicQuantizeMatMul."""
    draw, dtype = net.draw, _byte(net.draw)
    m, k, n = draw.shape(3, 12)
    kind = draw.choice(("int8", dtype))
    rows = (*draw.shape(draw.randint(0, 2), 3), m)
    a = _data(net, (*rows, k), dtype)
    b = _either(net, draw.array(kind, (k, n)) // np.array(2, kind), constant=0.8)
    wide = draw.chance()
    scales = net.constant(draw.arrays.uniform(0.01, 0.05, n if wide else ()).astype(np.float32))
    zero = net.constant(np.zeros(n if wide else (), kind) if wide or kind == "int8" else draw.array(kind, ()))
    sa, za = _meaning(net, dtype)
    spread = float(net.values[sa]) * 0.03 * 40 * math.sqrt(k)
    y = [net.constant(np.float32(spread)), net.constant(draw.array(dtype, ()))]
    match draw.choice(("QLinearMatMul", "MatMulInteger", "QGemm", "MatMulIntegerToFloat", "DynamicQuantizeMatMul")):
        case "QLinearMatMul":
            return [net.add("QLinearMatMul", a, sa, za, b, scales, zero, *y)]
        case "MatMulInteger":
            return [net.add("MatMulInteger", a, b, *[za, zero][: draw.randint(0, 2)])]
        case "QGemm":
            a = _data(net, (m, k), dtype)
            row = net.constant(draw.arrays.integers(-3000, 3000, n), np.int32) if draw.chance() else ""
            return [net.add("QGemm", a, sa, za, b, scales, zero, row, *(y if draw.chance(0.7) else []), domain=MS)]
        case "MatMulIntegerToFloat":
            bias = [net.floats((n,))] if draw.chance() else []
            return [net.add("MatMulIntegerToFloat", a, b, sa, scales, za, zero, *bias, domain=MS)]
    x = _data(net, (*rows, k))
    bias = [net.floats((n,))] if draw.chance() else []
    return [net.add("DynamicQuantizeMatMul", x, b, scales, zero, *bias, domain=MS)]


OPERATORS: tuple[Make, ...] = (
    unary, unary, unary_with_attributes, of_integers, clip, binary, binary, comparison, bits, variadic, where, cast,
    reduction, reduction, reduction, arg, softmax, cumsum, top_k, matmul, matmul, fused_matmul, gemm, gemm, einsum,
    conv, conv, conv_transpose, pool, pool, global_pool, resize, resize, grid_sample, *[movement] * 8, made,
    normalisation, normalisation, layer_norm, recurrent, recurrent, quantize, dequantize, dynamic_quantize,
    qlinear_binary, qlinear_binary, qlinear_unary, qlinear_softmax, qlinear_concat, qlinear_where, qlinear_pool,
    qlinear_conv, qlinear_conv, integer_product, integer_product,
)  # fmt: skip
