"""Layers that reduce: max and average pooling, softmax, layer and RMS normalisation.

A pooling reduces windows of pixels. Softmax and normalisation need all channels of a pixel for each result, so that the
rows of a matrix lie as pixels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from math import prod

import numpy as np
import onnx_ir as ir

from celosia.compiler import numerics
from celosia.compiler.graph.operands import operand
from celosia.compiler.graph.quantized.rounded import adds_integers
from celosia.compiler.graph.select.matrices import (
    MAX_MATRICES,
    add_matrices,
    matrices_form,
    pixel_rows_form,
    place_layer_per_matrix,
)
from celosia.compiler.graph.select.parameters import (
    array_of,
    fold_scales,
    requantise_alike,
    scalar_of,
    stored_zero,
    window_of,
)
from celosia.compiler.graph.select.placement import (
    HOST_INPUT,
    OTHER_ROWS,
    ActivationLayout,
    NotOffloadable,
    Placement,
    Reads,
    natural_form,
    part_name,
    shape_of,
)
from celosia.compiler.graph.shapes import whole_image, windows_of
from celosia.compiler.graph.values import attribute
from celosia.compiler.layer import Activation, Gemm, Layer, Norm, Requantise, Softmax, StridedView, Window
from celosia.compiler.ops import op_spec
from celosia.compiler.program.model import matrix_counts
from celosia.compiler.tensorize import pack
from celosia.compiler.tensorize.layer_lowering import pixels_of_part
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import Buffer, element_bytes
from celosia.hw.spec.scratchpads import depths

# Pooling --------------------------------------------------------------------------------------------------------------


MAX_PARTS = 49
"""Limit of the layers of one average pooling: one for each size of window, as those at the border are cut off."""
IN_FLOATS = "onnxruntime averages in floats, which break ties as they happen to be rounded"


def place_max_pool(p: Placement, node: ir.Node) -> None:
    """Place a MaxPool. Raises NotOffloadable. Padding is the smallest byte, -128."""
    value, y = node.inputs[0], node.outputs[0]
    assert value is not None
    form, y_form = natural_form(value), natural_form(y)
    window = window_of(windows_of(node))
    reads: Reads = {}
    x = p.read(value, form, reads)
    p.add_layer(node, Layer(node.name or "", x, p.new_activation(y, y_form), window, -128, reduce="max"), reads, y_form)


def place_average(p: Placement, node: ir.Node) -> None:
    """Place an average pooling or the mean of whole images. Raises NotOffloadable.

    Windows with different numbers of pixels need layers of their own, since each divides by its number.
    """
    value, y = node.inputs[0], node.outputs[0]
    assert value is not None
    form, y_form = natural_form(value), natural_form(y)
    size = form.dims[2], form.dims[3]
    pool = op_spec(node.op_type).windows
    if pool and not adds_integers(node):
        raise NotOffloadable(f'{IN_FLOATS}; rounding="correct" makes them integers')
    windows = windows_of(node) if pool else whole_image(size)
    window = window_of(windows)
    rows, columns = (_runs_of_equal_count(windows.divisors(axis)) for axis in (0, 1))
    if len(rows) * len(columns) > MAX_PARTS:
        raise NotOffloadable(
            f"its windows have {len(rows) * len(columns)} sizes, more than {MAX_PARTS}; "
            "pad its input before it, so that fewer windows are cut off"
        )
    note = "" if pool or _is_exact(node, prod(size)) else f"{IN_FLOATS}; one can differ by one step"
    reads: Reads = {}
    x, whole = p.read(value, form, reads), p.new_activation(y, y_form)
    parts = [_sum_of_part(node, x, whole, window, row, column) for row, column in product(rows, columns)]
    layers = [_on_faster_unit(p.cfg, part) for part in parts]
    if len(layers) == 1:
        p.add_layer(node, replace(layers[0], name=node.name or ""), reads, y_form, note)
    else:
        p.add_parts(node, list(layers), reads, whole, y_form, note)


def _is_exact(node: ir.Node, count: int) -> bool:
    """Whether the mean of whole images of `count` pixels has exactly onnxruntime's bytes.

    onnxruntime adds integers, or, in QLinearMean, floats; these are exact for some scales.
    """
    if node.op_type != "QLinearMean":
        return True
    sx, sy = (scalar_of(operand(node, name)) for name in ("x_scale", "y_scale"))
    zero = stored_zero(operand(node, "x_zero_point"))
    return numerics.average_is_exact(sx, zero, sy, count)


@dataclass(frozen=True)
class _Run:
    """Rows (or columns) `first` to `last` of y whose windows all average over `count` rows (or columns) of x."""

    first: int
    last: int
    count: int


def _runs_of_equal_count(counts: list[int]) -> list[_Run]:
    """Group neighbouring rows (or columns) of y by the number of rows of x in their windows. Raises NotOffloadable for
    0."""
    if 0 in counts:
        raise NotOffloadable("a window lies in the padding alone; give it less padding")
    runs: list[_Run] = []
    for row, count in enumerate(counts):
        if runs and runs[-1].count == count:
            runs[-1] = replace(runs[-1], last=row)
        else:
            runs.append(_Run(row, row, count))
    return runs


def _sum_of_part(node: ir.Node, x: Activation, y: Activation, window: Window, rows: _Run, columns: _Run) -> Layer:
    """Return the layer that averages into these rows and columns of `y`: a sum over windows, scaled by
    requantisation."""
    top, pad_top, pad_bottom = _rows_read(window, 0, rows, x.height)
    left, pad_left, pad_right = _rows_read(window, 1, columns, x.width)
    part_x = x.region((*x.dims[:2], x.height - top, x.width - left), 0, StridedView(x.height, x.width, top, left))
    dims = (*y.dims[:2], rows.last - rows.first + 1, columns.last - columns.first + 1)
    part_y = y.region(dims, 0, StridedView(y.height, y.width, rows.first, columns.first))
    factor = numerics.mean_scale if node.op_type == "QLinearMean" else numerics.global_average_scale
    sx, sy = (scalar_of(operand(node, name)) for name in ("x_scale", "y_scale"))
    multiplier, shift = fold_scales(np.asarray(factor(sx, sy, rows.count * columns.count)))
    zero_x, zero_y = (stored_zero(operand(node, name)) for name in ("x_zero_point", "y_zero_point"))
    bias = -zero_x * window.kernel[0] * window.kernel[1]  # padding is zero_x
    requantise = requantise_alike(x.channels, bias, int(multiplier), int(shift), zero_y)
    name = f"{node.name}.{rows.first}.{columns.first}"
    window = replace(window, pads=(pad_top, pad_left, pad_bottom, pad_right))
    return Layer(name, part_x, part_y, window, zero_x, reduce="sum", requantise=requantise)


def _rows_read(window: Window, axis: int, run: _Run, size: int) -> tuple[int, int, int]:
    """Return the rows of x before the first that `run` reads, and the rows of padding before and after those it
    reads."""
    start = run.first * window.strides[axis] - window.pads[axis]
    end = run.last * window.strides[axis] - window.pads[axis] + window.reach(axis)
    return max(0, start), max(0, -start), max(0, end - size)


def _on_faster_unit(cfg: Config, pool: Layer) -> Layer:
    """Return a sum pooling in the form in which it takes the fewest cycles.

    GEMM adds up whole images that are too large for vin. Else a pooling takes one step for each tap of its window; a
    depthwise convolution with weights of 1 takes one for `cfg.taps` columns of a row.
    """
    (height, width), channels = pool.window.kernel, pool.x.channels
    if pool.window == Window(pool.x.dims[2:]) and height * width > depths(cfg)["vin"] // 2:
        return replace(pool, sums_on_gemm=pixels_of_part(cfg, pool.x, pool.y) is not None)
    if not cfg.taps or channels == 1 or pool.requantise is None:
        return pool
    steps = height * pack.tap_steps(cfg, pool.window)[0]
    saved = (height * width - steps) * pool.y.height * pool.y.width * pool.y.images
    loaded = steps * element_bytes(cfg, Buffer.TAP) // cfg.bus_bytes
    if saved <= loaded or steps > depths(cfg)["tap"]:
        return pool
    ones = np.ones((channels, 1, height, width), np.int8)
    return replace(pool, reduce="", gemm=Gemm(ones, channels, filling=ones.size))


# Softmax and normalisation --------------------------------------------------------------------------------------------


def place_softmax(p: Placement, node: ir.Node) -> None:
    """Place a QLinearSoftmax along the last axis: one layer for each matrix. Raises NotOffloadable.

    The result counts among `padded_outputs`: channels beyond the last hold the zero point, which product layers rely
    on.
    """
    x, y = node.inputs[0], node.outputs[0]
    assert x is not None
    if not p.cfg.softmax:
        raise NotOffloadable("a softmax on the accelerator takes a Config with softmax; give it one, as softmax = 1")
    dims, held = shape_of(x), p.held_form(x)
    by_last = attribute(node, "axis", -1) % len(dims) == len(dims) - 1
    if not by_last and (attribute(node, "opset", 13) >= 13 or np.prod(dims[attribute(node, "axis", 1) :]) != dims[-1]):
        raise NotOffloadable(
            "the accelerator has a softmax of the last axis alone; "
            "transpose its input, so that its axis is the last one"
        )
    if held is None or held.fold != "rows" or held.inverted:
        raise NotOffloadable(HOST_INPUT if held is None else OTHER_ROWS)
    count, columns, _ = matrix_counts("rows", dims)
    powers = numerics.softmax_powers(columns, *(scalar_of(operand(node, name)) for name in ("x_scale", "y_scale")))
    if not np.isfinite(powers).all():
        raise NotOffloadable(
            f"rows of {columns} have powers beyond the largest float32; quantise its input with a smaller scale"
        )
    if count > MAX_MATRICES:
        raise NotOffloadable(
            f"it has {count} matrices, more than {MAX_MATRICES}; give the model fewer samples or heads at once"
        )
    zero = stored_zero(operand(node, "y_zero_point"))
    form = matrices_form(p.cfg, shape_of(y), "rows", zero)
    place_layer_per_matrix(p, node, x, {}, lambda _, name, x, y: Layer(name, x, y, softmax=Softmax(powers, zero)), form)
    p.padded_outputs.add(y)


def place_norm(p: Placement, node: ir.Node) -> None:
    """Place a QLinearNorm: one layer for each matrix, whose rows are pixels. Raises NotOffloadable."""
    cfg, x, y = p.cfg, node.inputs[0], node.outputs[0]
    assert x is not None
    if not cfg.norm:
        raise NotOffloadable("a normalisation on the accelerator takes a Config with norm; give it one, as norm = 1")
    form, count = _rows_as_pixels(p, x)
    epsilon = int(scalar_of(operand(node, "epsilon")))
    bias, factor = array_of(operand(node, "bias")), array_of(operand(node, "factor"))
    requantise = Requantise(bias, *numerics.scale_to_multiplier(factor), stored_zero(operand(node, "y_zero_point")))
    centre = bool(attribute(node, "centre"))
    offset = 0 if centre else -stored_zero(operand(node, "x_zero_point"))
    reads: Reads = {}
    source, whole = p.read(x, form, reads), p.new_activation(y, form)
    columns = len(bias)
    groups, dims = pack.blocks(columns, cfg.group), (form.dims[0], columns, *form.dims[2:])
    layers = [
        Layer(
            part_name(node, number, count),
            source.region(dims, number * groups, source.pixels), whole.region(dims, number * groups, whole.pixels),
            norm=Norm(offset, centre, epsilon), requantise=requantise,
        )
        for number in range(count)
    ]  # fmt: skip
    if count == 1 and source.channels == columns:
        layers = [replace(layers[0], x=source)]
    add_matrices(p, node, layers, reads, whole, form)


def _rows_as_pixels(p: Placement, x: ir.Value) -> tuple[ActivationLayout, int]:
    """Return the form in which the rows of `x` are pixels, and the number of matrices in it.

    Raises NotOffloadable if the accelerator holds `x` in another form.
    """
    held, dims = p.held_form(x), shape_of(x)
    if held is None:
        is_one_matrix = len(dims) > 2 and prod(dims[:-2]) == 1
        form = pixel_rows_form(dims) if is_one_matrix else matrices_form(p.cfg, dims, "rows")
        held = natural_form(x, rows=True) if len(dims) < 3 else form
    if held.fold == "rows" and not held.inverted:
        count = matrix_counts("rows", dims)[0]
        if count <= MAX_MATRICES:
            return held, count
        raise NotOffloadable(f"it has {count} matrices, more than {MAX_MATRICES}; give the model fewer samples at once")
    if held.fold or held != natural_form(x, rows=True):
        raise NotOffloadable(OTHER_ROWS)
    return held, 1
