"""Reference of layers in numpy, without tiles, scratchpads and instructions.

The output of every measured schedule is compared with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.layer import Activation, Epilogue, Gemm, Int8, Layer, Requantise, Softmax, Window
from celosia.compiler.numerics import RescaleAdd, requantize, rescale_add
from celosia.sim.functional.norm import normalise_rows

Sums = NDArray[np.float64]
"""Integers below 2^53, which float64 adds exactly, and fast by BLAS."""


def reference_output(layer: Layer, values: Mapping[Activation, Int8]) -> Int8:
    """Compute the output of `layer`, [images, channels, height, width] int8.

    values: the activations that it reads, in the same layout.
    """
    if layer.is_block:
        activations = dict(values)
        for block_layer in layer.layers:
            activations[block_layer.y] = reference_output(block_layer, activations)
        return activations[layer.y]
    x, epilogue = values[layer.x], layer.epilogue
    if layer.softmax is not None:
        heads = [_softmax(head, layer.softmax, epilogue) for head in np.split(x, layer.heads, axis=1)]
        return _apply_epilogue(np.concatenate(heads, axis=1), epilogue, values)
    sums = _sums(layer, values)
    if layer.gemm is not None and layer.gemm.sum_bytes:
        integers = sums.astype(np.int64)
        return np.concatenate([(integers >> 8 * byte).astype(np.int8) for byte in range(layer.gemm.sum_bytes)], axis=1)
    if layer.requantise is None:
        return _apply_epilogue(np.clip(sums, *epilogue.clip).astype(np.int8), epilogue, values)
    heads = [_requantise(head, layer.requantise, epilogue) for head in np.split(sums, layer.heads, axis=1)]
    return _apply_epilogue(np.concatenate(heads, axis=1), epilogue, values)


def _sums(layer: Layer, values: Mapping[Activation, Int8]) -> NDArray[Any]:
    """Compute the integers that the vector unit then requantises or clips, of the shape of the output."""
    x = values[layer.x]
    if layer.gemm is not None:
        return _convolution(x, layer, layer.gemm)
    if layer.reduce:
        windows = _window_view(x, layer.window, layer.pad_value)
        return np.asarray(windows.max(axis=(4, 5)) if layer.reduce == "max" else windows.sum(axis=(4, 5), dtype=float))
    if (product := layer.product) is not None:
        rows, columns = (values[act].reshape(layer.heads, -1, act.width) for act in (layer.x, product.w))
        weights = (columns + float(product.w_offset)).transpose(0, 2, 1)[:, : layer.y.channels // layer.heads]
        sums = weights @ (rows + float(product.x_offset))
        return sums.reshape(1, -1, 1, sums.shape[-1])
    if (multiply := layer.multiply) is not None:
        return (x.astype(np.int64) + multiply.x_offset) * (values[multiply.b].astype(np.int64) + multiply.b_offset)
    if (norm := layer.norm) is not None:
        rows, count = np.moveaxis(x, 1, -1), layer.row_length
        v = normalise_rows(rows.reshape(-1, count), count, norm.offset, norm.centre, norm.epsilon)
        return np.moveaxis(v.reshape(rows.shape), -1, 1)
    return x


def _softmax(x: Int8, softmax: Softmax, epilogue: Epilogue) -> Int8:
    """Compute the softmax of x along the channels, as numerics.qlinear_softmax does."""
    powers, scaled_powers = np.split(softmax.powers, 2)
    indices = 255 + x.astype(np.int64) - x.max(axis=1, keepdims=True)
    total = np.zeros_like(powers[indices[:, 0]])
    for channel in range(x.shape[1]):
        total = total + powers[indices[:, channel]]
    steps = np.rint(scaled_powers[indices] / total[:, None]) + softmax.zero_point
    result: Int8 = np.clip(steps, *epilogue.clip).astype(np.int8)
    return result


def _apply_epilogue(result: Int8, epilogue: Epilogue, values: Mapping[Activation, Int8]) -> Int8:
    """Apply the lookup table and the residual add to clipped results. values: contain the residual operand."""
    if epilogue.table is not None:
        result = epilogue.table[result.astype(np.int64) + 128]
    if (r := epilogue.residual) is not None:
        parameters = RescaleAdd(r.scale_v, r.scale_b, r.scale_c, r.shift)
        result = rescale_add(result.astype(np.int64), values[r.operand], parameters, r.lo, r.hi).astype(np.int8)
    return result


def _window_view(x: Int8, w: Window, pad_value: int) -> Int8:
    """View x as windows: [images, channels, rows, columns, kernel rows, kernel columns]."""
    top, left, bottom, right = w.pads
    x = np.pad(x, ((0, 0), (0, 0), (top, bottom), (left, right)), constant_values=pad_value)
    view = np.lib.stride_tricks.sliding_window_view(x, (w.reach(0), w.reach(1)), axis=(2, 3))
    return view[:, :, :: w.strides[0], :: w.strides[1], :: w.dilations[0], :: w.dilations[1]]


def _convolution(x: Int8, layer: Layer, gemm: Gemm) -> Sums:
    """Return the sums of a convolution: for each kernel position, one matrix product for each group of channels."""
    windows = _window_view(x, layer.window, layer.pad_value)
    images, _, height, width = windows.shape[:4]
    outputs, depth, *kernel = gemm.weights.shape
    total = np.zeros((gemm.groups, outputs // gemm.groups, images * height * width))
    for position in np.ndindex(*kernel):
        values = windows[..., *position].astype(np.float64).reshape(images, gemm.groups, depth, height * width)
        inputs = values.transpose(1, 2, 0, 3).reshape(gemm.groups, depth, -1)
        weights = gemm.weights[..., *position].astype(np.float64).reshape(gemm.groups, -1, depth)
        total += weights @ inputs
    return total.reshape(outputs, images, height, width).swapaxes(0, 1)


def _requantise(total: NDArray[np.generic], r: Requantise, epilogue: Epilogue) -> Int8:
    """Requantise sums [images, channels, height, width] with a multiplier for each channel."""
    bias, multiplier, shift = (parameter[None, :, None, None] for parameter in (r.bias, r.multiplier, r.shift))
    return requantize(total.astype(np.int64), bias, multiplier, shift, r.zero_point, *epilogue.clip)
