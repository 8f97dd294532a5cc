"""Build the model of the damaged files: integer layers for the accelerator, a kernel and a host step for the CPU."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from small_models import Builder


def mixed() -> onnx.ModelProto:
    """Return a model from float [1, 3, 6, 6] to the two largest of its 6 channels: a convolution and a TopK."""
    b = Builder("qdq", np.int8, seed=5, opset=17)
    x = b.input([1, 3, 6, 6])
    x = b.conv(x, 6, (3, 3), pads=(1, 1, 1, 1))
    b.output(x, real=True)
    model = b.model()
    graph = model.graph
    result = graph.output[0].name
    graph.initializer.append(numpy_helper.from_array(np.array([2], np.int64), "two"))
    graph.node.append(helper.make_node("TopK", [result, "two"], ["best", "places"], name="best"))
    del graph.output[:]
    graph.output.append(helper.make_tensor_value_info("best", TensorProto.FLOAT, [1, "n", "h", "w"]))
    graph.output.append(helper.make_tensor_value_info("places", TensorProto.INT64, [1, "n", "h", "w"]))
    return model
