"""One operator in onnxruntime, for tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

MICROSOFT = frozenset(
    ("QGemm", "QLinearAdd", "QLinearMul", "QLinearConcat", "QLinearGlobalAveragePool", "QLinearAveragePool",
     "QLinearSigmoid", "QLinearLeakyRelu", "QLinearSoftmax", "MatMulIntegerToFloat", "SkipLayerNormalization", "BiasGelu",
     "FastGelu", "QuickGelu")
)  # fmt: skip


def onnxruntime_op(
    op: str, attrs: dict[str, Any], inputs: list[np.ndarray | None], outputs: int = 1, opset: int = 21,
    constants: tuple[int, ...] = (),
) -> list[np.ndarray]:  # fmt: skip
    """The outputs of one node. `constants` are inputs given as initialisers."""
    inputs = [None if v is None else np.asarray(v) for v in inputs]
    names = [f"i{k}" if v is not None else "" for k, v in enumerate(inputs)]
    domain = "com.microsoft" if op in MICROSOFT else ""
    node = helper.make_node(op, names, [f"o{k}" for k in range(outputs)], domain=domain, **attrs)
    fed = {n: v for k, (n, v) in enumerate(zip(names, inputs)) if v is not None and k not in constants}
    graph = helper.make_graph(
        [node], "g",
        [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape) for n, v in fed.items()],
        [helper.make_tensor_value_info(f"o{k}", TensorProto.UNDEFINED, None) for k in range(outputs)],
        [numpy_helper.from_array(inputs[k], f"i{k}") for k in constants],
    )  # fmt: skip
    for value in graph.output:
        value.ClearField("type")
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)], ir_version=10
    )
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, fed)


__all__ = ["onnx", "onnxruntime_op"]
