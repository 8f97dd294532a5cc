"""Results of quantised operators on the CPU, with which the accelerator's layers are compared.

They follow from the operators of the graph, without any knowledge of layers, tiles or instructions. Sums of products
and maxima are computed by shared_kernels.py; functions of one or two bytes are tables of all their values, made by the
CPU backend's kernels of these operators.

Bytes are *codes*, 0 to 255 in the order of their values: those of uint8 as they are, those of int8 with 128 added.
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
from celosia.compiler.cpu.kernels import compile_op
from celosia.compiler.graph.operands import custom, joins_parts, operand, operand_groups, product_names, spec_of
from celosia.compiler.graph.shapes import transposed_windows_of, whole_image, windows_of
from celosia.compiler.graph.values import attribute, attributes_of, constant, is_op, shape
from celosia.compiler.ops import VIEWS, op_spec, operators_with
from celosia.compiler.program.host.kernel import CompiledKernel
from celosia.compiler.program.host.shape_rules import Windows, windows
from celosia.compiler.program.op_spec import Moves
from celosia.compiler.selfcheck import shared_kernels

Codes = NDArray[np.uint8]
CHUNK_BYTES = 1 << 20
"""About as many bytes of a convolution's windows are written out at a time, so that they stay in the cache."""
MOVING_OPERATORS = operators_with("moves", Moves.ALL, Moves.SOME, Moves.FILL) - VIEWS - operators_with("windows")
"""Operators whose output elements are elements of an input, or a constant."""
GROUPED_COLUMNS = 16
"""Channels of a grouped convolution that are computed together, with zeros where groups do not meet."""


def codes(array: NDArray[Any]) -> Codes:
    """Convert an int8 or uint8 array to codes."""
    return array.view(np.uint8) ^ np.uint8(0x80) if array.dtype == np.int8 else array


def compute(node: ir.Node, operands: list[Codes], part: int | None = None, output: int = 0) -> Codes:
    """Compute an output of `node`, in its shape, from the codes of the operands that are not constant, in order.

    part: number of an operand of a concatenation; `operands` is only this one then, and the result is its part of the
    output. output: number of the output.
    """
    if is_op(node, *VIEWS):
        return operands[0].reshape(_result_shape(node))
    if is_op(node, "Split"):
        return _compute_split(node, operands[0], output)
    if (custom_operator := custom(node)) is not None:
        varying = iter(operands)
        constants = [constant(value) for value in node.inputs]
        arrays = [(next(varying) ^ np.uint8(0x80)).view(np.int8) if value is None else value for value in constants]
        return codes(custom_operator.compute(arrays, attributes_of(node))[output])
    return OPERATORS[node.op_type](node, *operands, *(() if part is None else (part,)))


class CachedResults:
    """Computes operators, and reuses the last result of each where its operands are equal."""

    def __init__(self) -> None:
        self._last: dict[tuple[ir.Node, int | None, int], tuple[list[Codes], Codes]] = {}

    def compute(self, node: ir.Node, operands: list[Codes], part: int | None = None, output: int = 0) -> Codes:
        """Compute an output like the function `compute`, or return the last result where the operands are equal."""
        last_operands, result = self._last.get((node, part, output), (None, None))
        if result is None or last_operands is None or not all(map(np.array_equal, last_operands, operands)):
            result = compute(node, operands, part, output)
            self._last[node, part, output] = operands, result
        return result


def is_concat(node: ir.Node | None) -> bool:
    """Return whether the node is a Concat, of bytes or quantised."""
    if node is None or joins_parts(node):
        return node is not None
    spec = spec_of(node)
    return spec.repeated > 0 and spec.scale_input is not None


def read_by(node: ir.Node) -> list[ir.Value]:
    """Return the operands of `node` that are not constant, and all parts of a concatenation."""
    if is_concat(node):
        parts = node.inputs if joins_parts(node) else [group[0] for group in operand_groups(node)]
        return [value for value in parts if value is not None]
    return [value for value in node.inputs if value is not None and constant(value) is None]


# Parameters ------------------------------------------------------------------------------------------------------


def _constant_array(value: ir.Value | None) -> NDArray[Any]:
    """Return the content of a constant."""
    array = constant(value)
    assert array is not None
    return array


def _parameter(node: ir.Node, name: str) -> NDArray[Any]:
    """Return the constant operand `name` of a node, such as a scale."""
    return _constant_array(operand(node, name))


def _float_parameter(node: ir.Node, name: str) -> np.float32:
    """Return the first element of the constant operand `name` as float32."""
    return np.float32(_parameter(node, name).reshape(-1)[0])


def _zero_point_code(node: ir.Node, name: str) -> int:
    """Return the first element of the zero point `name` as a code."""
    return int(codes(_parameter(node, name).reshape(-1)[:1])[0])


def _result_shape(node: ir.Node) -> tuple[int, ...]:
    """Return the shape of a node's first result."""
    dims = shape(node.outputs[0])
    assert dims is not None
    return dims


def _view_windows(x: Codes, window: Windows) -> Codes:
    """View a padded image as windows: [images, rows, columns, kernel rows, kernel columns, channels]."""
    n, h, w, c = x.strides
    steps = [axis * step for step, axis in zip(window.stride, (h, w))]
    taps = [axis * step for step, axis in zip(window.dilation, (h, w))]
    dims = (x.shape[0], *window.out, *window.kernel, x.shape[3])
    return as_strided(x, dims, (n, *steps, *taps, c), writeable=False)


def _channels_last(x: Codes) -> Codes:
    """Move the channels of x [images, channels(, rows), columns] last; an image without rows gets one."""
    return (x if x.ndim == 4 else x[:, :, None]).transpose(0, 2, 3, 1)


# Convolutions and products ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _RequantisedProduct:
    """A requantised matrix product: y = clip(rne(f32(sum of (x - zero_x) * w + bias) * scale) + zero_y).

    matrix: weights [outputs, length]. bias, scale: [outputs].
    """

    matrix: NDArray[np.int8]
    zero_x: int
    bias: NDArray[np.int32]
    scale: NDArray[np.float32]
    zero_y: int

    def compile_columns(self, outputs: slice, matrix: NDArray[np.int8]) -> Callable[[Codes], Codes]:
        """Return a function from rows (as shared_kernels.rows_for has them) to [rows, outputs], for the outputs
        `outputs` with weights `matrix`.
        """
        packed, bias, scale = shared_kernels.pack_columns(matrix), self.bias[outputs], self.scale[outputs]
        return lambda rows: shared_kernels.matrix_product(rows, self.zero_x, packed, bias, scale, self.zero_y)

    def multiply(self, x: Codes) -> Codes:
        """Compute [rows, outputs] from x [rows, length], in chunks that stay in the cache."""
        step = max(1, CHUNK_BYTES // x.shape[1])
        compute_rows = self.compile_columns(slice(None), self.matrix)
        y = np.empty((len(x), len(self.matrix)), np.uint8)
        for start in range(0, len(x), step):
            part = x[start : start + step]
            rows = shared_kernels.rows_for(*part.shape)
            rows[: len(part), : x.shape[1]] = part
            y[start : start + step] = compute_rows(rows)[: len(part)]
        return y


def _read_product(node: ir.Node, weights: NDArray[Any]) -> _RequantisedProduct:
    """Read the parameters of `node`, whose weights are [outputs, ...]."""
    x, w, bias_name = product_names(node.op_type)
    zero_w = _parameter(node, f"{w}_zero_point").astype(np.int16).reshape(-1)[0]
    if weights.dtype != np.int8 or zero_w:
        weights = (weights.astype(np.int16) - zero_w).astype(np.int8)
    matrix = weights.reshape(len(weights), -1)
    bias_array = constant(operand(node, bias_name)) if bias_name else None
    bias = np.zeros(1, np.int32) if bias_array is None else bias_array.reshape(-1)
    scale = (
        _float_parameter(node, f"{x}_scale")
        * _parameter(node, f"{w}_scale").astype(np.float32).reshape(-1)
        / _float_parameter(node, "y_scale")
    )
    return _RequantisedProduct(
        matrix, _zero_point_code(node, f"{x}_zero_point"), np.broadcast_to(bias, len(matrix)).astype(np.int32),
        np.broadcast_to(scale, len(matrix)).astype(np.float32), _zero_point_code(node, "y_zero_point"),
    )  # fmt: skip


def _compute_conv(node: ir.Node, x: Codes) -> Codes:
    """Compute a QLinearConv by im2col; several groups are computed together as one dense product."""
    weights, dims, image = _parameter(node, "w"), _result_shape(node), _channels_last(x)
    taps = weights.shape[2:]
    window = windows_of(node, taps)
    groups, (channels, inner) = attribute(node, "group", 1), weights.shape[:2]
    product = _read_product(node, np.moveaxis(weights, 1, -1))  # channels innermost, as in the image
    padded = np.ascontiguousarray(window.pad(image, product.zero_x, 1))
    y = np.empty((dims[0], *window.out, channels), np.uint8)
    for first, last in _group_ranges(groups, max(channels // groups, inner)):
        outputs = slice(first * channels // groups, last * channels // groups)
        matrix = _expand_groups(product.matrix[outputs].reshape(-1, prod(taps), inner), last - first)
        view = _view_windows(padded[..., first * inner : last * inner], window)
        _convolve_windows(view, product.compile_columns(outputs, matrix), y[..., outputs])
    return y.transpose(0, 3, 1, 2).reshape(dims)


def _compute_conv_transpose(node: ir.Node, x: Codes) -> Codes:
    """Compute a QLinearConvTranspose as a convolution of the dilated input by reversed kernels."""
    weights, dims, groups = _parameter(node, "w"), _result_shape(node), attribute(node, "group", 1)
    channels, outputs = weights.shape[:2]
    spread, image = transposed_windows_of(node, weights.shape[2:]), _channels_last(x)
    taps, (down, across), (by_row, by_column) = spread.kernel, spread.stride, spread.dilation
    top, left = spread.before
    above, ahead = (taps[0] - 1) * by_row, (taps[1] - 1) * by_column
    height = max((image.shape[1] - 1) * down + 1 + above, spread.out[0] + top) + above
    width = max((image.shape[2] - 1) * across + 1 + ahead, spread.out[1] + left) + ahead
    dilated = np.full((len(image), height, width, channels), _zero_point_code(node, "x_zero_point"), np.uint8)
    dilated[:, above::down, ahead::across][:, : image.shape[1], : image.shape[2]] = image
    reversed_taps = weights.reshape(groups, channels // groups, outputs, *taps)[..., ::-1, ::-1]
    kernels = reversed_taps.transpose(0, 2, 3, 4, 1).reshape(groups * outputs, *taps, -1)
    product = _read_product(node, kernels)
    visible = dilated[:, top : top + spread.out[0] + above, left : left + spread.out[1] + ahead]
    window = windows("Conv", {"dilations": spread.dilation}, visible.shape[1:3], taps)
    y: Codes = np.zeros((dims[0], *spread.out, dims[1]), np.uint8)
    for group in range(groups):
        group_outputs = slice(group * outputs, (group + 1) * outputs)
        group_inputs = slice(group * channels // groups, (group + 1) * channels // groups)
        view = _view_windows(np.ascontiguousarray(visible[..., group_inputs]), window)
        compute_rows = product.compile_columns(group_outputs, product.matrix[group_outputs])
        _convolve_windows(view, compute_rows, y[..., group_outputs])
    return y.transpose(0, 3, 1, 2).reshape(dims)


def _group_ranges(groups: int, width: int) -> Iterator[tuple[int, int]]:
    """Split the groups of a convolution into ranges [first, last), each of which is computed as one dense product.

    One product of many columns is faster than several narrow ones, although its weights are zero between channels of
    different groups (`_expand_groups`). width: channels of a group.
    """
    step = max(1, GROUPED_COLUMNS // width)
    return ((first, min(first + step, groups)) for first in range(0, groups, step))


def _expand_groups(matrix: NDArray[np.int8], groups: int) -> NDArray[np.int8]:
    """Expand weights [outputs, taps, channels of a group] to the channels of all `groups`, with zeros: [outputs,
    length].
    """
    if groups == 1:
        return matrix.reshape(len(matrix), -1)
    outputs, taps, inner = matrix.shape
    dense = np.zeros((groups, outputs // groups, taps, groups, inner), np.int8)
    for group, part in enumerate(matrix.reshape(groups, -1, taps, inner)):
        dense[group, :, :, group] = part
    return dense.reshape(outputs, -1)


def _convolve_windows(view: Codes, compute_rows: Callable[[Codes], Codes], y: Codes) -> None:
    """Convolve the windows `view` [images, rows, columns, ...] into y [images, rows, columns, outputs], in chunks."""
    images, height, width = view.shape[:3]
    length = prod(view.shape[3:])
    step = max(1, CHUNK_BYTES // max(width * length, 1))
    for image in range(images):
        for top in range(0, height, step):
            part = view[image, top : top + step]
            count = part.shape[0] * width
            rows = shared_kernels.rows_for(count, length)
            rows[:count, :length].reshape(part.shape)[...] = part  # the reshape only splits axes, so that it is a view
            y[image, top : top + step] = compute_rows(rows)[:count].reshape(-1, width, y.shape[3])


def _compute_matmul(node: ir.Node, x: Codes, w: Codes | None = None) -> Codes:
    """Compute a QGemm or QLinearMatMul. w: the second operand, where it is not constant; if `a` is constant, x is the
    second operand.
    """
    constant_a = constant(operand(node, "a"))
    if constant_a is not None:
        return _multiply_varying(node, codes(constant_a), x)
    if w is not None:
        return _multiply_varying(node, x, w)
    matrix = _parameter(node, "b")
    if not attribute(node, "transB", 0):
        matrix = matrix.T
    return _read_product(node, matrix).multiply(x.reshape(-1, x.shape[-1])).reshape(_result_shape(node))


@np.errstate(all="ignore")
def _multiply_varying(node: ir.Node, x: Codes, w: Codes) -> Codes:
    """Multiply two tensors, of which none need be constant; float64 holds the sums exactly."""
    sums = (x.astype(np.float64) - _zero_point_code(node, "a_zero_point")) @ (
        w.astype(np.float64) - _zero_point_code(node, "b_zero_point")
    )
    scale = _float_parameter(node, "a_scale") * _float_parameter(node, "b_scale") / _float_parameter(node, "y_scale")
    scaled: NDArray[np.float32] = np.rint(sums.astype(np.int32).astype(np.float32) * scale)
    return np.clip(scaled + _zero_point_code(node, "y_zero_point"), 0, 255).astype(np.uint8)


def _compute_block_sums(node: ir.Node, x: Codes) -> Codes:
    """Compute BlockSums: sums of at most 256 products of bytes, which float32 holds exactly, as their bytes."""
    w = _parameter(node, "w").astype(np.float32)
    _, blocks, _, size = w.shape
    values = x.reshape(-1, blocks, size).astype(np.float32) - 128
    sums = (w @ values.transpose(1, 2, 0)).transpose(3, 0, 1, 2).astype(np.int32)  # [rows, parts, blocks, lanes]
    little = sums.astype("<i4", order="C").view(np.int8).reshape(*sums.shape, 4)[..., : attribute(node, "sum_bytes")]
    return codes(np.ascontiguousarray(little.transpose(0, 1, 4, 2, 3))).reshape(_result_shape(node))


# Pooling ---------------------------------------------------------------------------------------------------------


def _compute_max_pool(node: ir.Node, x: Codes) -> Codes:
    """Compute a MaxPool of codes."""
    window, image = windows_of(node), _channels_last(x)
    view = _view_windows(np.ascontiguousarray(window.pad(image, 0, 1)), window).transpose(3, 4, 0, 1, 2, 5)
    count, taps = prod(view.shape[2:]), prod(window.kernel)
    columns = np.zeros((taps, -(-count // shared_kernels.LANES) * shared_kernels.LANES), np.uint8)
    columns[:, :count].reshape(view.shape)[...] = view
    y = shared_kernels.column_maxima(columns)[:count].reshape(view.shape[2:])
    return y.transpose(0, 3, 1, 2).reshape(_result_shape(node))


def _compute_average_pool(node: ir.Node, x: Codes) -> Codes:
    """Compute an average pool as a sum that is scaled once; onnxruntime's float mean may differ on ties."""
    image = _channels_last(x)
    pool = op_spec(node.op_type).windows
    window = windows_of(node) if pool else whole_image((image.shape[1], image.shape[2]))
    zero = _zero_point_code(node, "x_zero_point")
    view = _view_windows(np.ascontiguousarray(window.pad(image, zero, 1)), window).transpose(1, 2, 0, 5, 3, 4)
    factor = numerics.mean_scale if node.op_type == "QLinearMean" else numerics.global_average_scale
    area, counts = prod(window.kernel), np.multiply.outer(window.divisors(0), window.divisors(1))
    y = np.empty(view.shape[:4], np.uint8)
    for count in np.unique(counts).tolist():
        scale = np.array(
            [factor(float(_float_parameter(node, "x_scale")), float(_float_parameter(node, "y_scale")), count)],
            np.float32,
        )
        product = _RequantisedProduct(
            np.ones((1, area), np.int8), zero, np.zeros(1, np.int32), scale, _zero_point_code(node, "y_zero_point")
        )
        chosen = view[counts == count]
        y[counts == count] = product.multiply(chosen.reshape(-1, area)).reshape(chosen.shape[:3])
    return y.transpose(2, 3, 0, 1).reshape(_result_shape(node))


# Functions of bytes ----------------------------------------------------------------------------------------------


@cache
def _byte_function_kernel(op: str, dtype: str, operands: int, factors: tuple[int, ...]) -> CompiledKernel:
    """Compile `op` for 256 or 65536 bytes. Scales and zero points are arguments, so that all nodes share the kernel."""
    scale_and_zero: list[Any] = [((), "float32"), ((), dtype)]
    data = ((256**operands,), dtype)
    if op == "QLinearConcat":
        return compile_op(op, {"axis": 0}, [*scale_and_zero, data, *scale_and_zero])
    return compile_op(
        op, {"factors": factors} if factors else {}, [*[data, *scale_and_zero] * operands, *scale_and_zero]
    )


def _call_byte_function(
    op: str, dtype: np.dtype[Any], arguments: list[NDArray[Any]], operands: int, factors: tuple[int, ...] = ()
) -> Codes:
    """Compute a table of `op`: its codes for all bytes, or for all pairs of bytes."""
    (result,) = _byte_function_kernel(op, dtype.name, operands, factors)(*arguments)
    return codes(result)


def _scale_and_zero(node: ir.Node, name: str) -> list[NDArray[Any]]:
    """Return scale and zero point of the operand or result `name`, as scalars."""
    return [_parameter(node, f"{name}_{kind}").reshape(()) for kind in ("scale", "zero_point")]


def _all_bytes(dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return all bytes of `dtype` in the order of their codes."""
    all_codes = np.arange(256, dtype=np.uint8)
    return (all_codes ^ np.uint8(0x80)).view(np.int8) if dtype == np.int8 else all_codes


@cache
def _all_pairs(dtype: np.dtype[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the first and the second byte of all pairs, in the order of their codes."""
    all_bytes = _all_bytes(dtype)
    return np.repeat(all_bytes, 256), np.tile(all_bytes, 256)


def _compute_add_or_mul(node: ir.Node, *operands: Codes) -> Codes:
    """Compute QLinearAdd or QLinearMul by a table of all pairs of bytes."""
    varying = iter(operands)
    constants = [constant(operand(node, name)) for name in "ab"]
    a, b = (next(varying) if array is None else codes(array) for array in constants)
    value = node.inputs[0]
    assert value is not None and value.dtype is not None
    dtype = np.dtype(value.dtype.numpy())
    first, second = _all_pairs(dtype)
    arguments = [first, *_scale_and_zero(node, "a"), second, *_scale_and_zero(node, "b"), *_scale_and_zero(node, "c")]
    table = _call_byte_function(node.op_type, dtype, arguments, 2, tuple(attribute(node, "factors", ())))
    return table.take((a.astype(np.uint16) << 8) | b)


def _compute_concat_part(node: ir.Node, part: Codes, number: int) -> Codes:
    """Compute what a QLinearConcat makes of its operand `number`: a change of scale."""
    dtype = np.dtype(_parameter(node, "y_zero_point").dtype)
    _, *quantisation = operand_groups(node)[number]
    part_scale_and_zero = [_constant_array(value).reshape(()) for value in quantisation]
    arguments = [*_scale_and_zero(node, "y"), _all_bytes(dtype), *part_scale_and_zero]
    return _call_byte_function("QLinearConcat", dtype, arguments, 1)[part]


def _look_up_table(node: ir.Node, x: Codes) -> Codes:
    """Compute the operator Table, a function of single bytes."""
    return codes(_parameter(node, "table").astype(np.int8).reshape(-1))[x]


def _compute_clip(node: ir.Node, x: Codes) -> Codes:
    """Clip codes, whose order is that of the values."""
    for name, limit in (("min", np.maximum), ("max", np.minimum)):
        if operand(node, name) is not None:
            x = limit(x, codes(_parameter(node, name)).reshape(()))
    return x


def _compute_by_kernel(node: ir.Node, x: Codes) -> Codes:
    """Compute an operator on rows, such as softmax, with the CPU backend's kernel."""
    value = node.inputs[0]
    assert value is not None and value.dtype is not None
    dtype = np.dtype(value.dtype.numpy())
    parameters = [_constant_array(value) for value in node.inputs[1:]]
    kernel = compile_op(node.op_type, attributes_of(node), [(x.shape, dtype.name), *parameters])
    (result,) = kernel(x if dtype == np.uint8 else (x ^ np.uint8(0x80)).view(np.int8), *parameters)
    return codes(result)


# Movement --------------------------------------------------------------------------------------------------------


def _compute_split(node: ir.Node, x: Codes, output: int) -> Codes:
    """Compute one result of a Split."""
    axis = attribute(node, "axis", 0)
    sizes = [(shape(y) or ())[axis] for y in node.outputs]
    start = sum(sizes[:output])
    return x.take(range(start, start + sizes[output]), axis)


def _compute_movement(node: ir.Node, x: Codes) -> Codes:
    """Move elements with the CPU backend's kernel for uint8, which serves codes of both types."""
    inputs: list[Any] = [(x.shape, "uint8"), *(None if value is None else constant(value) for value in node.inputs[1:])]
    if is_op(node, "Pad"):
        value, number = constant(operand(node, "constant_value")), op_spec(node.op_type).number("constant_value")
        fill = np.zeros(1, node.inputs[0].dtype.numpy()) if value is None else value.reshape(1)  # type: ignore[union-attr]
        inputs[number : number + 1] = [codes(fill)]
    kernel = compile_op(node.op_type, attributes_of(node), inputs)
    (result,) = kernel(x, *(array for array in inputs[1:] if array is not None))
    return result


OPERATORS: dict[str, Callable[..., Codes]] = {
    "QLinearConv": _compute_conv, "QLinearConvTranspose": _compute_conv_transpose, "QGemm": _compute_matmul,
    "QLinearMatMul": _compute_matmul,
    "MaxPool": _compute_max_pool, "QLinearGlobalAveragePool": _compute_average_pool,
    "QLinearAveragePool": _compute_average_pool, "QLinearMean": _compute_average_pool,
    "QLinearAdd": _compute_add_or_mul, "QLinearMul": _compute_add_or_mul, "QLinearConcat": _compute_concat_part,
    "Table": _look_up_table, "Clip": _compute_clip,
    "QLinearSoftmax": _compute_by_kernel, "QLinearNorm": _compute_by_kernel, "BlockSums": _compute_block_sums,
    "Concat": lambda node, part, number: part, **dict.fromkeys(MOVING_OPERATORS, _compute_movement),
}  # fmt: skip
"""Computes each operator: (node, varying operands[, part]) -> codes of the result."""
