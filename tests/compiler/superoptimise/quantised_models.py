"""Build int8 models operator by operator."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper


class Quantised:
    """An int8 model in the making, with QDQ pairs or onnxruntime's operators.

    Its input x is int8 [shape], with scale 0.05 and zero point 3.

    parameters: scale and zero point of each tensor.
    """

    def __init__(self, shape: tuple[int, ...], qdq: bool = True, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.qdq, self.nodes = qdq, list[onnx.NodeProto]()
        self.constants: list[onnx.TensorProto] = []
        self.shape = shape
        self.parameters: dict[str, tuple[float, int]] = {"x": (0.05, 3)}

    def constant(self, values: Any, dtype: Any) -> str:
        """Add a constant and return its name."""
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(values, dtype), name))
        return name

    def pair(self, name: str) -> list[str]:
        """Add scale and zero point of a tensor as constants; return their names."""
        scale, zero = self.parameters[name]
        return [self.constant(scale, np.float32), self.constant(zero, np.int8)]

    def node(self, op: str, inputs: list[str], domain: str = "", **attributes: Any) -> str:
        """Append a node and return the name of its output."""
        name = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [name], name=f"n{len(self.nodes)}", domain=domain, **attributes))
        return name

    def floats(self, name: str) -> str:
        """Append a DequantizeLinear of a tensor and return its name."""
        return self.node("DequantizeLinear", [name, *self.pair(name)])

    def quantised(self, floats: str, scale: float, zero: int) -> str:
        """Append a QuantizeLinear of floats and return its name."""
        name = self.node("QuantizeLinear", [floats, self.constant(scale, np.float32), self.constant(zero, np.int8)])
        self.parameters[name] = scale, zero
        return name

    def conv(
        self, x: str, inputs: int, outputs: int, scale: float, zero: int = -128, kernel: int = 1, **attributes: Any
    ) -> str:
        """Append a convolution and return the name of its int8 output."""
        sx = self.parameters[x][0]
        group = attributes.get("group", 1)
        w = self.constant(self.rng.integers(-127, 128, (outputs, inputs // group, kernel, kernel)), np.int8)
        sw = self.rng.uniform(0.002, 0.01, outputs).astype(np.float32)
        b = self.constant(self.rng.integers(-500, 500, outputs), np.int32)
        attributes = {"pads": [kernel // 2] * 4, **attributes}
        scales, zeros = self.constant(sw, np.float32), self.constant(np.zeros(outputs), np.int8)
        if not self.qdq:
            self.parameters["y"] = scale, zero
            y = self.node("QLinearConv", [x, *self.pair(x), w, scales, zeros, *self.pair("y"), b], **attributes)
            self.parameters[y] = scale, zero
            return y
        weights = self.node("DequantizeLinear", [w, scales, zeros], axis=0)
        steps = self.constant(np.float32(sx) * sw, np.float32)
        bias = self.node("DequantizeLinear", [b, steps, self.constant(np.zeros(outputs), np.int32)], axis=0)
        return self.quantised(self.node("Conv", [self.floats(x), weights, bias], **attributes), scale, zero)

    def average_pool(self, x: str, scale: float, zero: int, pads: list[int], counted: int = 0) -> str:
        """Append an average of windows of 3 x 3. counted: whether padding counts."""
        attributes = {"kernel_shape": [3, 3], "strides": [1, 1], "pads": pads, "count_include_pad": counted}
        if self.qdq:
            return self.quantised(self.node("AveragePool", [self.floats(x)], **attributes), scale, zero)
        self.parameters["y"] = scale, zero
        y = self.node("QLinearAveragePool", [x, *self.pair(x), *self.pair("y")], "com.microsoft", **attributes)
        self.parameters[y] = scale, zero
        return y

    def byte_operator(self, op: str, x: list[str], **attributes: Any) -> str:
        """Append an operator on int8 tensors; models with QDQ pairs have a pair around it."""
        if not self.qdq:
            y = self.node(op, x, **attributes)
            self.parameters[y] = self.parameters[x[0]]
            return y
        return self.quantised(self.node(op, [self.floats(name) for name in x], **attributes), *self.parameters[x[0]])

    def model(self, *outputs: str) -> onnx.ModelProto:
        """Return the model with these outputs, with inferred shapes."""
        input_info = helper.make_tensor_value_info("x", TensorProto.INT8, self.shape)
        output_infos = [helper.make_tensor_value_info(name, TensorProto.INT8, None) for name in outputs]
        graph = helper.make_graph(self.nodes, "test", [input_info], output_infos, self.constants)
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
        return onnx.shape_inference.infer_shapes(model)
