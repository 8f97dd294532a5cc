"""Convert models to double precision for ONNX's reference evaluator."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper
from onnx.reference.op_run import OpRun

Array = NDArray[Any]


class DequantizeLinear(OpRun):  # type: ignore[misc]
    """onnxruntime's DequantizeLinear, which accepts 16 bits before opset 21."""

    op_domain = "com.microsoft"

    def _run(
        self, x: Array, scale: Array, zero: Array | None = None, axis: int | None = None,
        block_size: int | None = None, **_of_onnx: Any,
    ) -> tuple[Array]:  # fmt: skip
        along = 1 if axis is None else axis

        def spread(values: Array) -> Array:
            """Broadcast scales or zero points to the elements of x."""
            if block_size:
                return np.take(np.repeat(values, block_size, along), np.arange(x.shape[along]), along)
            return values.reshape([-1 if d == along % x.ndim and values.size > 1 else 1 for d in range(x.ndim)])

        return ((x.astype(np.int64) - (0 if zero is None else spread(zero).astype(np.int64))) * spread(scale),)


OF_ONNX: type[OpRun] = type("DequantizeLinear", (DequantizeLinear,), {"op_domain": ""})
"""DequantizeLinear in ONNX's domain; ONNX's reference has this operator only from opset 19 on."""


class SkipLayerNormalization(OpRun):  # type: ignore[misc]
    """onnxruntime's SkipLayerNormalization, which ONNX's reference lacks."""

    op_domain = "com.microsoft"

    def _run(
        self, x: Array, skip: Array, gamma: Array, beta: Array | None = None, bias: Array | None = None,
        epsilon: float | None = None,
    ) -> tuple[Array]:  # fmt: skip
        total = x + skip + (0 if bias is None else bias)
        centred = total - total.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + (1e-12 if epsilon is None else epsilon))
        return (scaled * gamma + (0 if beta is None else beta),)


OPERATORS: list[type[OpRun]] = [DequantizeLinear, OF_ONNX, SkipLayerNormalization]


def wide_of(array: Array) -> Array:
    """Convert float32 arrays to float64; return any other value as it is."""
    return array.astype(np.float64) if isinstance(array, np.ndarray) and array.dtype == np.float32 else array


def in_doubles(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy of `model` in which every float32 tensor is float64."""
    wide = onnx.ModelProto()
    wide.CopyFrom(model)
    graph = wide.graph
    for tensor in graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(wide_of(numpy_helper.to_array(tensor)), tensor.name))
    for value in (*graph.input, *graph.output):
        if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT:
            value.type.tensor_type.elem_type = onnx.TensorProto.DOUBLE
    for attr in (attr for node in graph.node for attr in node.attribute):
        if attr.name == "value" and attr.t.data_type == onnx.TensorProto.FLOAT:
            attr.t.CopyFrom(numpy_helper.from_array(wide_of(numpy_helper.to_array(attr.t))))
        if attr.name == "to" and attr.i == onnx.TensorProto.FLOAT:
            attr.i = onnx.TensorProto.DOUBLE
    return wide
