"""Measure second moments of layers' inputs over samples: they tell how much an error of each weight changes outputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import onnx
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from celosia.driver.workstation.oracle import open_session, run_session

Array = NDArray[Any]
MAX_INPUTS = 4096
"""No moments are measured for layers with more products an output: inverting them takes minutes."""
MAX_ROWS = 4096
"""Pixels of an image, or rows of a matrix, that count in one sample: evenly spread where there are more."""


def measure_second_moments(floats: onnx.ModelProto, samples: Iterable[Mapping[str, Array]]) -> dict[str, Array]:
    """Return the second moments of the inputs of each Conv, MatMul and Gemm, by the name of its constant weights.

    They are float64 [n, n]: the sum of x xᵀ over all outputs, where x are the n inputs that an output's products read,
    in the order of a row of weights. Left out are grouped convolutions, those with `auto_pad`, and sums of more than
    MAX_INPUTS products. OracleError.
    """
    constants = {tensor.name: tensor.dims for tensor in floats.graph.initializer}
    layers = [
        node
        for node in floats.graph.node
        if node.input[1:2] and _can_be_measured(node, constants.get(node.input[1], ()))
    ]
    if not layers:
        return {}
    probe = onnx.ModelProto()
    probe.CopyFrom(floats)
    input_names = {value.name for value in floats.graph.input}
    output_names = {value.name for value in floats.graph.output}
    input_tensors = dict.fromkeys(node.input[0] for node in layers)
    probe.graph.output.extend(
        onnx.ValueInfoProto(name=name) for name in input_tensors if name not in input_names | output_names
    )
    session, sums = open_session(probe), dict[str, Array]()
    for sample in samples:
        values = {**sample, **run_session(session, sample)}
        for node in layers:
            rows = _input_rows(node, values[node.input[0]], constants[node.input[1]])
            rows = rows[:: -(-len(rows) // MAX_ROWS)].astype(np.float64)
            total = sums.setdefault(node.input[1], np.zeros((rows.shape[1],) * 2))
            total += rows.T @ rows
    return sums


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    """Return the attributes of a node as Python values, by name."""
    return {attr.name: onnx.helper.get_attribute_value(attr) for attr in node.attribute}


def _can_be_measured(node: onnx.NodeProto, dims: Iterable[int]) -> bool:
    """Whether moments of the inputs of `node` are supported, and small enough to invert. dims: shape of its weights."""
    sizes, attrs = list(dims), _attributes(node)
    if node.op_type == "Conv":
        is_ungrouped = attrs.get("group", 1) == 1 and attrs.get("auto_pad", b"NOTSET") == b"NOTSET"
        return len(sizes) > 2 and is_ungrouped and int(np.prod(sizes[1:])) <= MAX_INPUTS
    is_untransposed = node.op_type == "MatMul" or (node.op_type == "Gemm" and not attrs.get("transA", 0))
    return is_untransposed and len(sizes) == 2 and sizes[1 if attrs.get("transB", 0) else 0] <= MAX_INPUTS


def _input_rows(node: onnx.NodeProto, x: Array, dims: Iterable[int]) -> Array:
    """Return the n inputs of each output of a layer as rows [outputs, n]; windows for a Conv. dims: shape of its
    weights."""
    if node.op_type != "Conv":
        return x.reshape(-1, x.shape[-1])
    attrs, kernel = _attributes(node), list(dims)[2:]
    axes = len(kernel)
    pads = attrs.get("pads", [0] * 2 * axes)
    strides, dilations = attrs.get("strides", [1] * axes), attrs.get("dilations", [1] * axes)
    padded = np.pad(x, [(0, 0), (0, 0), *zip(pads[:axes], pads[axes:])])
    window_sizes = [(size - 1) * step + 1 for size, step in zip(kernel, dilations)]
    windows = sliding_window_view(padded, window_sizes, tuple(range(2, 2 + axes)))
    strided = [slice(None), slice(None), *(slice(None, None, step) for step in (*strides, *dilations))]
    windows = windows[tuple(strided)]
    return np.moveaxis(windows, 1, 1 + axes).reshape(-1, x.shape[1] * int(np.prod(kernel)))
