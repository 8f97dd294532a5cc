"""Results of quantised operators on the CPU, with which the accelerator's layers are compared.

It starts from the operators of the graph and knows nothing of layers, tiles or instructions. Sums of products and
maxima go through `kernels`; functions of one or two bytes are tables of all their values, made by the CPU backend's
kernels of these operators.

Bytes are *codes*, 0 to 255 in the order of what they mean: those of uint8 as they are, of int8 with 128 added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from celosia.compiler import numerics
from celosia.compiler.cpu.function import compile_op
from celosia.compiler.graph.custom import custom
from celosia.compiler.graph.operands import joins_parts, operand, operand_groups, product_names, spec_of
from celosia.compiler.graph.values import attribute, attributes_of, constant, is_op, shape
from celosia.compiler.graph.windows import transposed_windows_of, whole_image, windows_of
from celosia.compiler.ops import VIEWS, op_spec, operators_with
from celosia.compiler.program.host.kernel import CompiledKernel
from celosia.compiler.program.host.window_geometry import Windows, windows
from celosia.compiler.program.op_spec import Moves
from celosia.compiler.selfcheck import shared_kernels

Codes = NDArray[np.uint8]
CHUNK_BYTES = 1 << 20
"""About as much of a convolution's windows is written out at a time: it stays in the cache."""
MOVING = operators_with("moves", Moves.ALL, Moves.SOME, Moves.FILL) - VIEWS - operators_with("windows")
"""Operators whose every output is an input, or a constant."""
GROUPED_COLUMNS = 16
"""Channels of a grouped convolution that are computed together, with zeros where groups do not meet."""


def codes(array: NDArray[Any]) -> Codes:
    """Convert an int8 or uint8 array to codes."""
    return array.view(np.uint8) ^ np.uint8(0x80) if array.dtype == np.int8 else array


def compute(node: ir.Node, operands: list[Codes], part: int | None = None, output: int = 0) -> Codes:
    """Compute an output of `node`, in its shape, from the operands that are not constant, in order.

    part: of a concatenation, whose only operand here is this part and the result is what the output has of it.
    """
    if is_op(node, *VIEWS):
        return operands[0].reshape(_dims(node))
    if is_op(node, "Split"):
        return _split(node, operands[0], output)
    if (own := custom(node)) is not None:
        rest = iter(operands)
        fixed = [constant(value) for value in node.inputs]
        arrays = [(next(rest) ^ np.uint8(0x80)).view(np.int8) if value is None else value for value in fixed]
        return codes(own.compute(arrays, attributes_of(node))[output])
    return OPERATORS[node.op_type](node, *operands, *(() if part is None else (part,)))


class CachedResults:
    """Computes operators, and reuses the last result of each where its operands are equal."""

    def __init__(self) -> None:
        self._last: dict[tuple[ir.Node, int | None, int], tuple[list[Codes], Codes]] = {}

    def compute(self, node: ir.Node, operands: list[Codes], part: int | None = None, output: int = 0) -> Codes:
        """Compute an output like the function `compute`."""
        operands_then, result = self._last.get((node, part, output), (None, None))
        if result is None or operands_then is None or not all(map(np.array_equal, operands_then, operands)):
            result = compute(node, operands, part, output)
            self._last[node, part, output] = operands, result
        return result


def is_concat(node: ir.Node | None) -> bool:
    """Return whether the node is a Concat of integers or floats."""
    if node is None or joins_parts(node):
        return node is not None
    spec = spec_of(node)
    return spec.repeated > 0 and spec.scale is not None


def read_by(node: ir.Node) -> list[ir.Value]:
    """Return the operands of `node` that are not constant."""
    return [value for value in node.inputs if value is not None and constant(value) is None]


# Parameters ------------------------------------------------------------------------------------------------------


def _fixed(value: ir.Value | None) -> NDArray[Any]:
    array = constant(value)
    assert array is not None
    return array


def _array(node: ir.Node, name: str) -> NDArray[Any]:
    return _fixed(operand(node, name))


def _f32(node: ir.Node, name: str) -> np.float32:
    return np.float32(_array(node, name).reshape(-1)[0])


def _zero(node: ir.Node, name: str) -> int:
    """Return a zero point as a code."""
    return int(codes(_array(node, name).reshape(-1)[:1])[0])


def _dims(node: ir.Node) -> tuple[int, ...]:
    dims = shape(node.outputs[0])
    assert dims is not None
    return dims


def _views(x: Codes, window: Windows) -> Codes:
    """View a padded image as windows: [images, rows, columns, kernel rows, kernel columns, channels]."""
    n, h, w, c = x.strides
    steps = [axis * step for step, axis in zip(window.stride, (h, w))]
    taps = [axis * step for step, axis in zip(window.dilation, (h, w))]
    dims = (x.shape[0], *window.out, *window.kernel, x.shape[3])
    return as_strided(x, dims, (n, *steps, *taps, c), writeable=False)


def _image(x: Codes) -> Codes:
    """Move the channels of x [images, channels(, rows), columns] last."""
    return (x if x.ndim == 4 else x[:, :, None]).transpose(0, 2, 3, 1)


# Convolutions and products ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Linear:
    """A requantised matrix product: y = clip(rne(f32(sum of (x - zero_x) * w + bias) * scale) + zero_y).

    matrix: [columns, length] int8.
    """

    matrix: NDArray[np.int8]
    zero_x: int
    bias: NDArray[np.int32]
    scale: NDArray[np.float32]
    zero_y: int

    def columns(self, which: slice, matrix: NDArray[np.int8]) -> Callable[[Codes], Codes]:
        """Return a function that computes these output channels: from rows of shared_kernels.rows_for to [rows,
        channels].
        """
        packed, bias, scale = shared_kernels.pack_columns(matrix), self.bias[which], self.scale[which]
        return lambda rows: shared_kernels.matrix_product(rows, self.zero_x, packed, bias, scale, self.zero_y)

    def rows(self, x: Codes) -> Codes:
        """Compute [rows, channels] from x [rows, length], in parts that stay in the cache."""
        step = max(1, CHUNK_BYTES // x.shape[1])
        columns = self.columns(slice(None), self.matrix)
        y = np.empty((len(x), len(self.matrix)), np.uint8)
        for start in range(0, len(x), step):
            part = x[start : start + step]
            rows = shared_kernels.rows_for(*part.shape)
            rows[: len(part), : x.shape[1]] = part
            y[start : start + step] = columns(rows)[: len(part)]
        return y


def _linear(node: ir.Node, weights: NDArray[Any]) -> _Linear:
    """Read the parameters of `node`, whose weights are [columns, ...]."""
    x, w, bias = product_names(node.op_type)
    middle = _array(node, f"{w}_zero_point").astype(np.int16).reshape(-1)[0]
    if weights.dtype != np.int8 or middle:
        weights = (weights.astype(np.int16) - middle).astype(np.int8)
    matrix = weights.reshape(len(weights), -1)
    given = constant(operand(node, bias)) if bias else None
    added = np.zeros(1, np.int32) if given is None else given.reshape(-1)
    scale = _f32(node, f"{x}_scale") * _array(node, f"{w}_scale").astype(np.float32).reshape(-1) / _f32(node, "y_scale")
    return _Linear(
        matrix, _zero(node, f"{x}_zero_point"), np.broadcast_to(added, len(matrix)).astype(np.int32),
        np.broadcast_to(scale, len(matrix)).astype(np.float32), _zero(node, "y_zero_point"),
    )  # fmt: skip


def _conv(node: ir.Node, x: Codes) -> Codes:
    """Compute a QLinearConv by im2col; several groups are computed together as one dense product."""
    weights, dims, image = _array(node, "w"), _dims(node), _image(x)
    taps = weights.shape[2:]
    window = windows_of(node, taps)
    groups, (channels, inner) = attribute(node, "group", 1), weights.shape[:2]
    linear = _linear(node, np.moveaxis(weights, 1, -1))  # the channels innermost, as in the image
    padded = np.ascontiguousarray(window.pad(image, linear.zero_x, 1))
    y = np.empty((dims[0], *window.out, channels), np.uint8)
    for first, last in _group_ranges(groups, max(channels // groups, inner)):
        outputs = slice(first * channels // groups, last * channels // groups)
        matrix = _dense(linear.matrix[outputs].reshape(-1, prod(taps), inner), last - first)
        view = _views(padded[..., first * inner : last * inner], window)
        _convolve(view, linear.columns(outputs, matrix), y[..., outputs])
    return y.transpose(0, 3, 1, 2).reshape(dims)


def _conv_transpose(node: ir.Node, x: Codes) -> Codes:
    """Compute a QLinearConvTranspose as a convolution of the dilated input by reversed kernels."""
    weights, dims, groups = _array(node, "w"), _dims(node), attribute(node, "group", 1)
    channels, outputs = weights.shape[:2]
    to, image = transposed_windows_of(node, weights.shape[2:]), _image(x)
    taps, (down, across), (by_row, by_column), (top, left) = to.kernel, to.stride, to.dilation, to.before
    above, ahead = (taps[0] - 1) * by_row, (taps[1] - 1) * by_column
    height = max((image.shape[1] - 1) * down + 1 + above, to.out[0] + top) + above
    width = max((image.shape[2] - 1) * across + 1 + ahead, to.out[1] + left) + ahead
    wide = np.full((len(image), height, width, channels), _zero(node, "x_zero_point"), np.uint8)
    wide[:, above::down, ahead::across][:, : image.shape[1], : image.shape[2]] = image
    turned = weights.reshape(groups, channels // groups, outputs, *taps)[..., ::-1, ::-1].transpose(0, 2, 3, 4, 1)
    linear = _linear(node, turned.reshape(groups * outputs, *taps, -1))
    cut = wide[:, top : top + to.out[0] + above, left : left + to.out[1] + ahead]
    window = windows("Conv", {"dilations": to.dilation}, cut.shape[1:3], taps)
    y: Codes = np.zeros((dims[0], *to.out, dims[1]), np.uint8)
    for group in range(groups):
        own = slice(group * outputs, (group + 1) * outputs)
        inner = slice(group * channels // groups, (group + 1) * channels // groups)
        view = _views(np.ascontiguousarray(cut[..., inner]), window)
        _convolve(view, linear.columns(own, linear.matrix[own]), y[..., own])
    return y.transpose(0, 3, 1, 2).reshape(dims)


def _group_ranges(groups: int, width: int) -> Iterator[tuple[int, int]]:
    """Split groups into ranges [first, last) that are computed together."""
    step = max(1, GROUPED_COLUMNS // width)
    return ((first, min(first + step, groups)) for first in range(0, groups, step))


def _dense(matrix: NDArray[np.int8], groups: int) -> NDArray[np.int8]:
    """Expand matrix [outputs, taps, channels of a group] to the channels of all `groups`: [outputs, length]."""
    if groups == 1:
        return matrix.reshape(len(matrix), -1)
    outputs, taps, inner = matrix.shape
    dense = np.zeros((groups, outputs // groups, taps, groups, inner), np.int8)
    for group, part in enumerate(matrix.reshape(groups, -1, taps, inner)):
        dense[group, :, :, group] = part
    return dense.reshape(outputs, -1)


def _convolve(view: Codes, columns: Callable[[Codes], Codes], y: Codes) -> None:
    """Convolve `view` [images, rows, columns, ...] into y [images, rows, columns, channels], in parts."""
    images, height, width = view.shape[:3]
    length = prod(view.shape[3:])
    step = max(1, CHUNK_BYTES // max(width * length, 1))
    for image in range(images):
        for top in range(0, height, step):
            part = view[image, top : top + step]
            count = part.shape[0] * width
            rows = shared_kernels.rows_for(count, length)
            rows[:count, :length].reshape(part.shape)[...] = part  # no copy: axes are divided only
            y[image, top : top + step] = columns(rows)[:count].reshape(-1, width, y.shape[3])


def _matmul(node: ir.Node, x: Codes, w: Codes | None = None) -> Codes:
    """w: where it is no constant, as x may be in its stead."""
    fixed = constant(operand(node, "a"))
    if fixed is not None:
        return _product(node, codes(fixed), x)
    if w is not None:
        return _product(node, x, w)
    matrix = _array(node, "b")
    if not attribute(node, "transB", 0):
        matrix = matrix.T
    return _linear(node, matrix).rows(x.reshape(-1, x.shape[-1])).reshape(_dims(node))


@np.errstate(all="ignore")
def _product(node: ir.Node, x: Codes, w: Codes) -> Codes:
    """Multiply two tensors that both vary; float64 holds the sums exactly."""
    sums = (x.astype(np.float64) - _zero(node, "a_zero_point")) @ (w.astype(np.float64) - _zero(node, "b_zero_point"))
    scale = _f32(node, "a_scale") * _f32(node, "b_scale") / _f32(node, "y_scale")
    scaled: NDArray[np.float32] = np.rint(sums.astype(np.int32).astype(np.float32) * scale)
    return np.clip(scaled + _zero(node, "y_zero_point"), 0, 255).astype(np.uint8)


def _block_sums(node: ir.Node, x: Codes) -> Codes:
    """Compute BlockSums: sums of at most 256 products of bytes, which float32 holds exactly, as their bytes."""
    w = _array(node, "w").astype(np.float32)
    _, blocks, _, size = w.shape
    values = x.reshape(-1, blocks, size).astype(np.float32) - 128
    sums = (w @ values.transpose(1, 2, 0)).transpose(3, 0, 1, 2).astype(np.int32)  # [rows, parts, blocks, lanes]
    little = sums.astype("<i4", order="C").view(np.int8).reshape(*sums.shape, 4)[..., : attribute(node, "sum_bytes")]
    return codes(np.ascontiguousarray(little.transpose(0, 1, 4, 2, 3))).reshape(_dims(node))


# Pooling ---------------------------------------------------------------------------------------------------------


def _max_pool(node: ir.Node, x: Codes) -> Codes:
    """Compute a MaxPool of codes."""
    window, image = windows_of(node), _image(x)
    view = _views(np.ascontiguousarray(window.pad(image, 0, 1)), window).transpose(3, 4, 0, 1, 2, 5)
    count, taps = prod(view.shape[2:]), prod(window.kernel)
    columns = np.zeros((taps, -(-count // shared_kernels.LANES) * shared_kernels.LANES), np.uint8)
    columns[:, :count].reshape(view.shape)[...] = view
    y = shared_kernels.column_maxima(columns)[:count].reshape(view.shape[2:])
    return y.transpose(0, 3, 1, 2).reshape(_dims(node))


def _average(node: ir.Node, x: Codes) -> Codes:
    """Compute an average pool as a sum that is scaled once; onnxruntime's float mean may differ on ties."""
    image = _image(x)
    pool = op_spec(node.op_type).windows
    window = windows_of(node) if pool else whole_image((image.shape[1], image.shape[2]))
    zero = _zero(node, "x_zero_point")
    view = _views(np.ascontiguousarray(window.pad(image, zero, 1)), window).transpose(1, 2, 0, 5, 3, 4)
    factor = numerics.mean_scale if node.op_type == "QLinearMean" else numerics.global_average_scale
    area, counts = prod(window.kernel), np.multiply.outer(window.divisors(0), window.divisors(1))
    y = np.empty(view.shape[:4], np.uint8)
    for count in np.unique(counts).tolist():
        scale = np.array([factor(float(_f32(node, "x_scale")), float(_f32(node, "y_scale")), count)], np.float32)
        linear = _Linear(np.ones((1, area), np.int8), zero, np.zeros(1, np.int32), scale, _zero(node, "y_zero_point"))
        chosen = view[counts == count]
        y[counts == count] = linear.rows(chosen.reshape(-1, area)).reshape(chosen.shape[:3])
    return y.transpose(2, 3, 0, 1).reshape(_dims(node))


# Functions of bytes ----------------------------------------------------------------------------------------------


@cache
def _kernel(op: str, dtype: str, operands: int, factors: tuple[int, ...]) -> CompiledKernel:
    """Compile `op` for 256 or 65536 bytes; scales and zero points are arguments, so that all nodes share the kernel."""
    meaning: list[Any] = [((), "float32"), ((), dtype)]
    data = ((256**operands,), dtype)
    if op == "QLinearConcat":
        return compile_op(op, {"axis": 0}, [*meaning, data, *meaning])
    return compile_op(op, {"factors": factors} if factors else {}, [*[data, *meaning] * operands, *meaning])


def _call(
    op: str, dtype: np.dtype[Any], arguments: list[NDArray[Any]], operands: int, factors: tuple[int, ...] = ()
) -> Codes:
    (result,) = _kernel(op, dtype.name, operands, factors)(*arguments)
    return codes(result)


def _scalars(node: ir.Node, name: str) -> list[NDArray[Any]]:
    """The scale and the zero point of the operand `name`, or of the result."""
    return [_array(node, f"{name}_{kind}").reshape(()) for kind in ("scale", "zero_point")]


def _all_bytes(dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return all bytes of `dtype` in the order of their codes."""
    every = np.arange(256, dtype=np.uint8)
    return (every ^ np.uint8(0x80)).view(np.int8) if dtype == np.int8 else every


@cache
def _all_pairs(dtype: np.dtype[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    every = _all_bytes(dtype)
    return np.repeat(every, 256), np.tile(every, 256)


def _pair(node: ir.Node, *operands: Codes) -> Codes:
    """Compute QLinearAdd or QLinearMul by a table of all pairs of bytes."""
    varying = iter(operands)
    fixed = [constant(operand(node, name)) for name in "ab"]
    a, b = (next(varying) if each is None else codes(each) for each in fixed)
    value = node.inputs[0]
    assert value is not None and value.dtype is not None
    dtype = np.dtype(value.dtype.numpy())
    first, second = _all_pairs(dtype)
    arguments = [first, *_scalars(node, "a"), second, *_scalars(node, "b"), *_scalars(node, "c")]
    table = _call(node.op_type, dtype, arguments, 2, tuple(attribute(node, "factors", ())))
    return table.take((a.astype(np.uint16) << 8) | b)


def _concat(node: ir.Node, part: Codes, number: int) -> Codes:
    dtype = np.dtype(_array(node, "y_zero_point").dtype)
    _, *own = operand_groups(node)[number]
    arguments = [*_scalars(node, "y"), _all_bytes(dtype), *(_fixed(value).reshape(()) for value in own)]
    return _call("QLinearConcat", dtype, arguments, 1)[part]


def _table(node: ir.Node, x: Codes) -> Codes:
    return codes(_array(node, "table").astype(np.int8).reshape(-1))[x]


def _clip(node: ir.Node, x: Codes) -> Codes:
    """Clip codes, whose order is that of the values."""
    for name, limit in (("min", np.maximum), ("max", np.minimum)):
        if operand(node, name) is not None:
            x = limit(x, codes(_array(node, name)).reshape(()))
    return x


def _by_kernel(node: ir.Node, x: Codes) -> Codes:
    """Compute an operator on rows with the CPU backend's kernel."""
    value = node.inputs[0]
    assert value is not None and value.dtype is not None
    dtype = np.dtype(value.dtype.numpy())
    fixed = [_fixed(value) for value in node.inputs[1:]]
    kernel = compile_op(node.op_type, attributes_of(node), [(x.shape, dtype.name), *fixed])
    (result,) = kernel(x if dtype == np.uint8 else (x ^ np.uint8(0x80)).view(np.int8), *fixed)
    return codes(result)


# Movement --------------------------------------------------------------------------------------------------------


def _split(node: ir.Node, x: Codes, output: int) -> Codes:
    axis, sizes = attribute(node, "axis", 0), [(shape(y) or ())[attribute(node, "axis", 0)] for y in node.outputs]
    start = sum(sizes[:output])
    return x.take(range(start, start + sizes[output]), axis)


def _move(node: ir.Node, x: Codes) -> Codes:
    """Move elements with the CPU backend's kernel for uint8, which serves codes of both types."""
    inputs: list[Any] = [(x.shape, "uint8"), *(None if value is None else constant(value) for value in node.inputs[1:])]
    if is_op(node, "Pad"):
        given, number = constant(operand(node, "constant_value")), op_spec(node.op_type).number("constant_value")
        fill = np.zeros(1, node.inputs[0].dtype.numpy()) if given is None else given.reshape(1)  # type: ignore[union-attr]
        inputs[number : number + 1] = [codes(fill)]
    kernel = compile_op(node.op_type, attributes_of(node), inputs)
    (result,) = kernel(x, *(array for array in inputs[1:] if array is not None))
    return result


OPERATORS: dict[str, Callable[..., Codes]] = {
    "QLinearConv": _conv, "QLinearConvTranspose": _conv_transpose, "QGemm": _matmul, "QLinearMatMul": _matmul,
    "MaxPool": _max_pool, "QLinearGlobalAveragePool": _average, "QLinearAveragePool": _average, "QLinearMean": _average,
    "QLinearAdd": _pair, "QLinearMul": _pair, "QLinearConcat": _concat, "Table": _table, "Clip": _clip,
    "QLinearSoftmax": _by_kernel, "QLinearNorm": _by_kernel, "BlockSums": _block_sums,
    "Concat": lambda node, part, number: part, **dict.fromkeys(MOVING, _move),
}  # fmt: skip
