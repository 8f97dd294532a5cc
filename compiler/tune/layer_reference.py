"""Reference of layers in numpy, without tiles, scratchpads and instructions.

The output of every measured schedule is compared with it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.layer import (
    Activation,
    ActivationProduct,
    Block,
    Conv,
    Epilogue,
    Int8,
    Layer,
    Multiply,
    Norm,
    Pool,
    Requantise,
    Softmax,
    Window,
)
from celosia.compiler.numerics import RescaleAdd, requantize, rescale_add
from celosia.sim.functional.norm import normalise_rows

Sums = NDArray[np.float64]
"""Integers below 2^53, which float64 adds exactly and BLAS fast."""


def meaning(layer: Layer, values: Mapping[Activation, Int8]) -> Int8:
    """Compute the output of `layer`, [images, channels, height, width] int8, from the activations that it reads."""
    if isinstance(layer, Block):
        known = dict(values)
        for part in layer.layers:
            known[part.y] = meaning(part, known)
        return known[layer.y]
    x, epilogue = values[layer.x], layer.epilogue
    if isinstance(layer, Conv) and layer.sum_bytes:
        sums = _convolution(x, layer).astype(np.int64)
        return np.concatenate([(sums >> 8 * byte).astype(np.int8) for byte in range(layer.sum_bytes)], axis=1)
    if isinstance(layer, Conv):
        result = _requantise(_convolution(x, layer), layer.requantise, epilogue)
    elif isinstance(layer, Pool):
        windows = _window_view(x, layer.window, layer.pad_value)
        if layer.requantise is None:
            result = np.clip(windows.max(axis=(4, 5)), *epilogue.clip)
        else:
            result = _requantise(windows.sum(axis=(4, 5), dtype=np.float64), layer.requantise, epilogue)
    elif isinstance(layer, ActivationProduct):
        rows, columns = (values[act].reshape(layer.heads, -1, act.width) for act in (layer.x, layer.w))
        weights = (columns + float(layer.w_offset)).transpose(0, 2, 1)[:, : layer.y.channels // layer.heads]
        sums = weights @ (rows + float(layer.x_offset))
        heads = [_requantise(head[None, :, None], layer.requantise, epilogue) for head in sums]
        result = np.concatenate(heads, axis=1)
    elif isinstance(layer, Multiply):
        product = (x.astype(np.int64) + layer.x_offset) * (values[layer.b].astype(np.int64) + layer.b_offset)
        result = _requantise(product, layer.requantise, epilogue)
    elif isinstance(layer, Norm):
        rows = np.moveaxis(x, 1, -1)
        v = normalise_rows(rows.reshape(-1, layer.count), layer.count, layer.offset, layer.centre, layer.epsilon)
        result = _requantise(np.moveaxis(v.reshape(rows.shape), -1, 1), layer.requantise, epilogue)
    elif isinstance(layer, Softmax):
        result = np.concatenate([_softmax(head, layer) for head in np.split(x, layer.heads, axis=1)], axis=1)
    else:
        result = np.clip(x, *epilogue.clip)
    return _apply_epilogue(result.astype(np.int8), epilogue, values)


def _softmax(x: Int8, layer: Softmax) -> Int8:
    """Compute QLinearSoftmax along the channels."""
    powers, scaled_powers = np.split(layer.powers, 2)
    indices = 255 + x.astype(np.int64) - x.max(axis=1, keepdims=True)
    total = np.zeros_like(powers[indices[:, 0]])
    for channel in range(x.shape[1]):
        total = total + powers[indices[:, channel]]
    units = np.rint(scaled_powers[indices] / total[:, None]) + layer.zero_point
    result: Int8 = np.clip(units, *layer.epilogue.clip).astype(np.int8)
    return result


def _apply_epilogue(result: Int8, epilogue: Epilogue, values: Mapping[Activation, Int8]) -> Int8:
    """Apply table and residual after the clip."""
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


def _convolution(x: Int8, layer: Conv) -> Sums:
    """Sum products with one matrix product for each kernel position and group of channels."""
    windows = _window_view(x, layer.window, layer.pad_value)
    images, _, height, width = windows.shape[:4]
    outputs, depth, *kernel = layer.weights.shape
    total = np.zeros((layer.groups, outputs // layer.groups, images * height * width))
    for position in np.ndindex(*kernel):
        values = windows[..., *position].astype(np.float64).reshape(images, layer.groups, depth, height * width)
        inputs = values.transpose(1, 2, 0, 3).reshape(layer.groups, depth, -1)
        weights = layer.weights[..., *position].astype(np.float64).reshape(layer.groups, -1, depth)
        total += weights @ inputs
    return total.reshape(outputs, images, height, width).swapaxes(0, 1)


def _requantise(total: NDArray[np.generic], r: Requantise, epilogue: Epilogue) -> Int8:
    bias, multiplier, shift = (parameter[None, :, None, None] for parameter in (r.bias, r.multiplier, r.shift))
    return requantize(total.astype(np.int64), bias, multiplier, shift, r.zero_point, *epilogue.clip)
