"""An input whose element type its operator does not support is refused, as in onnxruntime."""

from __future__ import annotations

from itertools import islice, product
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from oracle import opened
from thorough import some

import celosia
from celosia.compiler.graph.errors import ModelError

TYPES = {"z": np.int8(3), "u": np.uint8(3), "s": np.float32(0.05), "i": np.int32(7)}
WEIGHTS = {"w": np.ones((8, 8, 1, 1), np.int8), "m": np.ones((8, 8), np.int8), "b": np.zeros(8, np.int32)}
FORMS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "QLinearConv": ("", "x s z w s z s z b", {}),
    "QLinearMatMul": ("", "r s z m s z s z", {}),
    "QLinearAdd": ("com.microsoft", "x s z x s z s z", {}),
    "QLinearMul": ("com.microsoft", "x s z x s z s z", {}),
    "QLinearSigmoid": ("com.microsoft", "x s z s z", {}),
    "QLinearLeakyRelu": ("com.microsoft", "x s z s z", {}),
    "QLinearGlobalAveragePool": ("com.microsoft", "x s z s z", {}),
    "QLinearAveragePool": ("com.microsoft", "x s z s z", {"kernel_shape": [2, 2]}),
    "QLinearSoftmax": ("com.microsoft", "x s z s z", {"opset": 13}),
    "QLinearConcat": ("com.microsoft", "s z x s z x s z", {"axis": 1}),
    "QGemm": ("com.microsoft", "r s z m s z b s z", {}),
    "MaxPool": ("", "x", {"kernel_shape": [2, 2]}),
    "Concat": ("", "x x", {"axis": 1}),
    "DequantizeLinear": ("", "x s z", {}),
}


def one(op: str, inputs: list[str]) -> onnx.ModelProto:
    domain, _, attributes = FORMS[op]
    input_infos = [helper.make_tensor_value_info("x", 3, [1, 8, 4, 4]), helper.make_tensor_value_info("r", 3, [1, 8])]
    result = helper.make_tensor_value_info("y", 0, None)
    result.ClearField("type")
    constants = [numpy_helper.from_array(np.asarray(v), k) for k, v in (TYPES | WEIGHTS).items()]
    node = helper.make_node(op, inputs, ["y"], domain=domain, **attributes)
    graph = helper.make_graph([node], "g", input_infos, [result], constants)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


def taken(model: onnx.ModelProto) -> bool:
    try:
        opened(model)
    except Exception as error:
        return "type" not in str(error).lower()  # MaxPool of scalars is refused for other reasons
    return True


def refusal(model: onnx.ModelProto) -> str:
    try:
        celosia.compile(model, "tiny")
    except ModelError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("step", some([1, 3], [3]))
@pytest.mark.parametrize("op", FORMS)
def test_an_element_type_in_each_place(op: str, step: int) -> None:
    inputs = FORMS[op][1].split()
    assert not refusal(one(op, inputs))
    for place, other in islice(product(range(len(inputs)), TYPES), 0, None, step):
        changed = one(op, [*inputs[:place], other, *inputs[place + 1 :]])
        message = refusal(changed)
        about_types = f"{op} (y) is of" in message and "\n" not in message
        assert about_types or taken(changed), (place, other)
        # Parts of QLinearConcat of the other sign onnxruntime reads as if they were of its own.
        assert not about_types or not taken(changed) or op == "QLinearConcat", (place, other, message)


def test_each_state_of_a_scan_has_a_type_of_its_own() -> None:
    body = helper.make_graph(
        [helper.make_node("Identity", ["a"], ["c"]), helper.make_node("Identity", ["b"], ["d"])], "body",
        [helper.make_tensor_value_info("a", 1, [2]), helper.make_tensor_value_info("b", 3, [2])],
        [helper.make_tensor_value_info("c", 1, [2]), helper.make_tensor_value_info("d", 3, [2])],
    )  # fmt: skip
    node = helper.make_node("Scan", ["x", "q"], ["y", "z"], body=body, num_scan_inputs=1)
    values = {name: helper.make_tensor_value_info(name, kind, shape) for name, kind, shape in
              (("x", 1, [2]), ("q", 3, [3, 2]), ("y", 1, [2]), ("z", 3, [3, 2]))}  # fmt: skip
    graph = helper.make_graph([node], "g", [values["x"], values["q"]], [values["y"], values["z"]])
    assert not refusal(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9))
