"""Layers of convolutions, transposed convolutions, and products by constant matrices, also as sums of blocks."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import groupby, product
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from celosia.compiler.graph.operands import MODEL_WEIGHTS, operand
from celosia.compiler.graph.quantized.exact_products import ROUNDED
from celosia.compiler.graph.select.matrices import (
    add_matrices,
    matrices_form,
    nth_matrix,
    place_activation_product,
    rows_form,
)
from celosia.compiler.graph.select.parameters import (
    array_of,
    bias_of,
    flattens_image,
    has_fixed_matrix,
    requantisation,
    require_symmetric,
    stored_zero,
    window_of,
)
from celosia.compiler.graph.select.placement import (
    ActivationLayout,
    NotOffloadable,
    Placement,
    Reads,
    natural_form,
    part_name,
    shape_of,
)
from celosia.compiler.graph.shapes import transposed_windows_of, windows_of
from celosia.compiler.graph.values import attribute, constant
from celosia.compiler.layer import Gemm, Layer, Requantise, StridedView, TilingError, Window
from celosia.compiler.program.host.shape_rules import TransposedWindows
from celosia.compiler.program.model import matrix_counts
from celosia.compiler.tensorize import pack
from celosia.compiler.tensorize.roofline import choose, estimate
from celosia.compiler.tensorize.space import Workload

MAX_PHASES = 64
"""Limit of the layers, one for each phase of the stride, that a transposed convolution is split into."""


def place_conv(p: Placement, node: ir.Node) -> None:
    """Place a QLinearConv of one or two spatial dimensions. Raises NotOffloadable."""
    value, weight_value = operand(node, "x"), operand(node, "w")
    assert value is not None
    form = natural_form(value)
    weights = constant(weight_value)
    if weights is None:
        raise NotOffloadable("its weights are not constant; export them as initializers")
    taps = weights.shape[2:]
    weights = _as_image_weights(weights, value, "a convolution")
    weights = require_symmetric(weights, constant(operand(node, "w_zero_point")))
    groups = attribute(node, "group", 1)
    if groups < 1 or groups * weights.shape[1] != form.dims[1] or weights.shape[0] % groups:
        raise NotOffloadable(f"{groups} groups do not divide its channels; export it with a number of groups that does")
    window = window_of(windows_of(node, taps))
    bias = bias_of(node, "b")
    requantise, zero_x = requantisation(node, weights, bias), stored_zero(operand(node, "x_zero_point"))
    y_form = natural_form(node.outputs[0])
    reads: Reads = {}
    model_weights = node.meta.get(MODEL_WEIGHTS, weights.size)
    if (lanes := p.channel_positions.get(value)) is not None:
        form, narrow = p.selection.forms[value], weights
        weights = np.zeros((len(narrow), form.dims[1], *narrow.shape[2:]), np.int8)  # 0 for channels that are padding
        weights[:, lanes] = narrow
    filling = weights.size - model_weights
    if p.held_form(value) is None and groups == 1:
        form, weights, window = _choose_fold(p, form, weights, window, zero_x, y_form)
    x, y = p.read(value, form, reads), p.new_activation(node.outputs[0], y_form)
    gemm = Gemm(weights, groups, filling=filling)
    layer = Layer(node.name or "", x, y, window, zero_x, gemm, requantise=requantise)
    p.add_layer(node, layer, reads, y_form, node.meta.get(ROUNDED, ""))


def _as_image_weights(weights: NDArray[Any], value: ir.Value, name: str) -> NDArray[Any]:
    """Return the weights of a convolution of the input `value` with two spatial axes, where they have one or two.

    Raises NotOffloadable for other weights. name: that of the operator, for the message.
    """
    if weights.ndim == 3 and len(value.shape or ()) == 3:
        return weights[:, :, None, :]
    if weights.ndim != 4:
        raise NotOffloadable(f"{name} of {weights.ndim - 2} dimensions; the accelerator has those of one and two")
    return weights


def _choose_fold(
    p: Placement, form: ActivationLayout, weights: NDArray[np.int8], window: Window, pad: int, y: ActivationLayout
) -> tuple[ActivationLayout, NDArray[np.int8], Window]:
    """Choose how the host arranges the input of a first layer: as it is, or with im2col of rows ("x") or windows
    ("xy").

    Few input channels leave most of a block of the array empty; folding fills it. Returns the form, weights and window
    of the choice with the fewest estimated cycles. pad: the byte of the padding. y: the form of the result.
    """
    out, channels, height, width = weights.shape
    options = [(form, weights, window)]
    if width > 1:
        folded_rows = ActivationLayout((form.dims[0], channels * width, form.dims[2], y.dims[3]), "x", window, pad)
        options.append((
            folded_rows, np.ascontiguousarray(weights.transpose(0, 1, 3, 2)).reshape(out, channels * width, height, 1),
            Window(
                (height, 1), (window.strides[0], 1), (window.dilations[0], 1),
                (window.pads[0], 0, window.pads[2], 0),
            ),
        ))  # fmt: skip
    if height * width > 1:
        folded_windows = ActivationLayout((form.dims[0], channels * height * width, *y.dims[2:]), "xy", window, pad)
        options.append((folded_windows, weights.reshape(out, -1, 1, 1), Window((1, 1))))

    def cycles(option: tuple[ActivationLayout, NDArray[np.int8], Window]) -> float:
        """Estimate the cycles of the convolution with this form; infinite if no tiling fits."""
        _, folded_weights, folded_window = option
        blocks = (pack.blocks(out, p.cfg.block_out), pack.blocks(folded_weights.shape[1], p.cfg.block_in))
        images = -(-form.dims[0] // p.cfg.batch)
        workload = Workload(folded_window, images, *y.dims[2:], *blocks, False)
        try:
            return estimate(p.cfg, workload, choose(p.cfg, workload))
        except TilingError:
            return math.inf

    return min(options, key=cycles)


def place_transposed_conv(p: Placement, node: ir.Node) -> None:
    """Place a QLinearConvTranspose as one convolution for each phase of the stride. Raises NotOffloadable.

    A phase writes every stride-th row and column of y from some first one on; its kernel has the taps that meet them.
    """
    value, y = operand(node, "x"), node.outputs[0]
    assert value is not None
    form, y_form, weights = natural_form(value), natural_form(y), array_of(operand(node, "w"))
    taps = weights.shape[2:]
    weights = _as_image_weights(weights, value, "a transposed convolution")
    spread, groups = transposed_windows_of(node, taps), attribute(node, "group", 1)
    if groups < 1 or form.dims[1] % groups or weights.shape[0] != form.dims[1]:
        raise NotOffloadable(f"{groups} groups do not divide its channels; export it with a number of groups that does")
    phases = [_phases_along(spread, axis) for axis in (0, 1)]
    if len(phases[0]) * len(phases[1]) > MAX_PHASES:
        raise NotOffloadable(
            f"it makes {len(phases[0]) * len(phases[1])} convolutions, more than {MAX_PHASES}; give it a smaller stride"
        )
    kernels = (  # from [in, out / groups, ...] to [out, in / groups, ...], as Conv has them
        weights.reshape(groups, -1, *weights.shape[1:])
        .swapaxes(1, 2)
        .reshape(-1, len(weights) // groups, *spread.kernel)
    )
    bias = bias_of(node, "b")
    zero_x = stored_zero(operand(node, "x_zero_point"))
    reads: Reads = {}
    x, whole = p.read(value, form, reads), p.new_activation(y, y_form)
    layers: list[Layer] = []
    for rows, columns in product(*phases):
        phase_weights = np.ascontiguousarray(kernels[:, :, rows.taps][..., columns.taps])
        if not rows.exists or not columns.exists:
            phase_weights = np.zeros_like(phase_weights)
        requantise = requantisation(node, phase_weights, bias)
        input_pixels = StridedView(*form.dims[2:], rows.skipped, columns.skipped)
        phase_input = x.region(
            (*form.dims[:2], form.dims[2] - rows.skipped, form.dims[3] - columns.skipped), 0, input_pixels
        )
        output_pixels = StridedView(*y_form.dims[2:], rows.first, columns.first, *spread.stride)
        phase_output = whole.region((*y_form.dims[:2], rows.rows, columns.rows), 0, output_pixels)
        window = Window(
            (len(rows.taps), len(columns.taps)), dilations=(rows.step, columns.step),
            pads=(rows.before, columns.before, rows.after, columns.after),
        )  # fmt: skip
        name = f"{node.name}.{rows.first}.{columns.first}"
        layers.append(
            Layer(name, phase_input, phase_output, window, zero_x, Gemm(phase_weights, groups), requantise=requantise)
        )
    p.add_parts(node, layers, reads, whole, y_form, "onnxruntime convolves in float; a tie can differ by one step")


@dataclass(frozen=True)
class _Phase:
    """One phase of a transposed convolution along one axis: `rows` rows (or columns) of y, a stride apart, from
    `first`.

    taps: numbers of the kernel's rows that contribute, in the order of the rows of x that they meet. step: distance of
    these rows of x. before, after: rows of padding. skipped: rows of x before the first that is read. exists: whether
    any tap meets a row of x; if not, y is the bias alone.
    """

    first: int
    rows: int
    taps: list[int]
    step: int = 1
    before: int = 0
    after: int = 0
    skipped: int = 0
    exists: bool = True


def _phases_along(spread: TransposedWindows, axis: int) -> list[_Phase]:
    """Return the phases along `axis`, from y[o] = sum over k of x[(o + pad - k * dilation) / stride] * w[k].

    A tap k counts where its index of x is an integer.
    """
    stride, dilation, pad = spread.stride[axis], spread.dilation[axis], spread.before[axis]
    size, out = spread.size[axis], spread.out[axis]
    step, phases = dilation // math.gcd(stride, dilation), []
    for first in range(min(stride, out)):
        taps = [k for k in range(spread.kernel[axis]) if (first + pad - k * dilation) % stride == 0][::-1]
        offsets = [(first + pad - k * dilation) // stride for k in taps]  # row of x that each meets for row `first`
        rows = range(-(-(out - first) // stride))
        for exists, run in groupby(rows, lambda row: any(0 <= row + offset < size for offset in offsets)):  # noqa: B023
            run_rows = list(run)
            if not exists:  # the bias alone; zero weights read any rows of x
                phases += [
                    _Phase(first + stride * run_rows[k], len(run_rows[k : k + size]), [0], exists=False)
                    for k in range(0, len(run_rows), size)
                ]
                continue
            start, end = (
                run_rows[0] + offsets[0],
                run_rows[-1] + offsets[-1] + 1,
            )  # rows of x; padding may lie among them
            before, after, skipped = max(0, -start), max(0, end - size), max(0, start)
            phases.append(_Phase(first + stride * run_rows[0], len(run_rows), taps, step, before, after, skipped))
    return phases


def place_matmul(p: Placement, node: ir.Node) -> None:
    """Place a QGemm, or a QLinearMatMul by a constant matrix or of two activations. Raises NotOffloadable.

    A product whose input is a flattened image becomes a convolution with a kernel of the image's size.
    """
    is_matmul = node.op_type == "QLinearMatMul"
    value = operand(node, "a")
    assert value is not None
    if not has_fixed_matrix(node):
        if not is_matmul:
            raise NotOffloadable("both operands vary; the accelerator multiplies by constant matrices")
        place_activation_product(p, node)
        return
    matrix, zero_w = array_of(operand(node, "b")), constant(operand(node, "b_zero_point"))
    if not is_matmul and attribute(node, "transB", 0):
        matrix = matrix.T
    if not is_matmul and (attribute(node, "transA", 0) or attribute(node, "alpha", 1.0) != 1.0):
        raise NotOffloadable("transA or alpha; fold them into its matrix")
    if shape_of(value)[-1] != len(matrix):
        raise NotOffloadable(
            f"{list(shape_of(value))} and {list(matrix.shape)} do not multiply; export matrices that do"
        )
    bias = None if is_matmul else bias_of(node, "c")
    if operand(node, "y_scale") is None:
        raise NotOffloadable("its output is float; put QuantizeLinear and DequantizeLinear after it")
    weights = np.ascontiguousarray(require_symmetric(matrix, zero_w).T)[:, :, None, None]
    requantise = requantisation(node, weights, bias)
    model_weights = node.meta.get(MODEL_WEIGHTS, weights.size)
    x_form = rows_form(p, value, node.outputs[0])
    if x_form.fold == "rows" and matrix_counts("rows", shape_of(value))[0] > 1:
        return _multiply_samples(
            p, node, value, x_form, Gemm(weights, filling=weights.size - model_weights), requantise
        )
    y_form = replace(x_form, dims=(x_form.dims[0], len(weights), *x_form.dims[2:]))
    reads: Reads = {}
    producer, window = value.producer(), Window((1, 1))
    image = producer.inputs[0] if producer in p.selection.views and flattens_image(producer) else None
    if image is not None and p.held_form(value) is None and p.held_form(image) is not None:
        form, y_form = natural_form(image), natural_form(node.outputs[0], rows=True)
        window = Window((form.dims[2], form.dims[3]))
        x = p.read(image, form, reads)
        weights = np.ascontiguousarray(weights.reshape(-1, *form.dims[1:]))
    else:
        x = p.read(value, x_form, reads)
    gemm, y = Gemm(weights, filling=weights.size - model_weights), p.new_activation(node.outputs[0], y_form)
    layer = Layer(node.name or "", x, y, window, gemm=gemm, requantise=requantise)
    p.add_layer(node, layer, reads, y_form, node.meta.get(ROUNDED, ""))


def _multiply_samples(
    p: Placement, node: ir.Node, x: ir.Value, form: ActivationLayout, gemm: Gemm, requantise: Requantise
) -> None:
    """Place a product of several matrices, held in `form`, by a constant one: a layer for each of them."""
    y, reads = node.outputs[0], Reads()
    y_form = matrices_form(p.cfg, shape_of(y), "rows")
    source, whole = p.read(x, form, reads), p.new_activation(y, y_form)
    count = matrix_counts("rows", shape_of(x))[0]
    layers = [
        Layer(
            part_name(node, number, count), nth_matrix(p, source, x, number), nth_matrix(p, whole, y, number),
            gemm=gemm, requantise=requantise,
        )
        for number in range(count)
    ]  # fmt: skip
    add_matrices(p, node, layers, reads, whole, y_form)


SUMS_NOTE = (
    "integer sums by block; scaled in floats on the CPU, within 2e-6 of the root mean square of onnxruntime's result"
)


def place_block_sums(p: Placement, node: ir.Node) -> None:
    """Place BlockSums (graph/block_sums.py), whose int32 sums leave the accelerator as bytes. Raises NotOffloadable.

    The weights are [parts, blocks, columns of a part, block size]; each part of the columns is a layer.
    """
    if not p.cfg.sums:
        raise NotOffloadable("int32 sums leave the accelerator byte by byte; give it a Config with sums = true")
    value, y, sum_bytes = node.inputs[0], node.outputs[0], attribute(node, "sum_bytes")
    assert value is not None
    w = array_of(operand(node, "w"))
    parts, blocks, lanes, size = w.shape
    reads: Reads = {}
    rows, channels = prod(shape_of(value)[:-2]), sum_bytes * blocks * lanes
    y_form = ActivationLayout((rows, parts * channels, 1, 1))
    x, whole = p.read(value, ActivationLayout((rows, blocks * size, 1, 1)), reads), p.new_activation(y, y_form)
    depth, columns = (attribute(node, name) for name in "KN")
    layers: list[Layer] = []
    for number in range(parts):
        part = whole.region((whole.images, channels, 1, 1), number * channels // p.cfg.group, whole.pixels)
        weights = np.ascontiguousarray(w[number]).reshape(blocks * lanes, size, 1, 1)
        filling = weights.size - depth * max(0, min(lanes, columns - number * lanes))
        layers.append(
            Layer(
                part_name(node, number, parts),
                x,
                part,
                gemm=Gemm(weights, blocks, filling=filling, sum_bytes=sum_bytes),
            )
        )
    p.add_parts(node, layers, reads, whole, y_form, SUMS_NOTE)
