"""Build the models of the driver's tests."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from small_models import Builder

from celosia.hw.spec.config import PRESETS

UNBLOCKED = replace(PRESETS["tiny"], forward=False)
"""The preset `tiny` without blocks, whose search takes the compiler longer than all else."""


def quantised(dtype: type = np.int8, opset: int = 17, form: str = "qdq") -> onnx.ModelProto:
    """Return two convolutions and a matrix product: float `input_1` [1, 3, 8, 8] to float [1, 10]."""
    b = Builder(form, dtype, seed=3, opset=opset)
    x = b.input([1, 3, 8, 8])
    x = b.conv(x, 8, (3, 3), pads=(1, 1, 1, 1))
    x = b.conv(x, 12, (3, 3), strides=(2, 2), pads=(1, 1, 1, 1))
    b.output(x, real=True)
    return b.model()


def convolution(size: int = 4) -> onnx.ModelProto:
    """Return a single convolution: float `input_1` [1, 8, size, size] to float [1, 16, size, size].

    It takes the compiler less time than several layers, of which it tries to form blocks.
    """
    b = Builder("qdq", np.int8, seed=3)
    b.output(b.conv(b.input([1, 8, size, size]), 16, (3, 3), pads=(1, 1, 1, 1)), real=True)
    return b.model()


def shifted() -> onnx.ModelProto:
    """Return a product of two inputs [2, 8, 8] plus a constant, which the accelerator treats as a tensor."""
    b = Builder("qdq", np.int8, seed=1)
    x, y = b.input([2, 8, 8]), b.input([2, 8, 8])
    product = b.quantise(b.node("MatMul", [b.real(x), b.real(y)]), (2, 8, 8), 0.1)
    shift = b.constant("shift", np.linspace(-3, 3, 64, dtype=np.float32).reshape(1, 8, 8))
    b.output(b.binary("Add", product, b.quantise(shift, (1, 8, 8), 0.03)))
    return b.model()


def floats(dims: tuple[int | str, ...] = (2, 3)) -> onnx.ModelProto:
    """Return a model without integers: `a` and `b` to `a/sum`."""
    nodes = [
        helper.make_node("Add", ["a", "b"], ["s"], name="add"),
        helper.make_node("Mul", ["s", "three"], ["a/sum"], name="mul"),
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name in ("a", "b", "a/sum")]
    three = numpy_helper.from_array(np.array(3, np.float32), "three")
    graph = helper.make_graph(nodes, "floats", values[:2], values[2:], [three])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(model)
    return model


def dynamic() -> onnx.ModelProto:
    """Return a convolution of `image` [1, 3, height, width] times `scale` [1, 2, height, width]; height and width are
    open."""
    nodes = [
        helper.make_node("Conv", ["image", "w"], ["c"], name="conv", pads=[1] * 4),
        helper.make_node("Mul", ["c", "scale"], ["y"], name="mul"),
    ]
    sizes = {"image": 3, "scale": 2, "y": 2}
    values = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, channels, "height", "width"])
        for name, channels in sizes.items()
    ]
    weights = np.random.default_rng(0).standard_normal((2, 3, 3, 3)).astype(np.float32)
    graph = helper.make_graph(nodes, "dynamic", values[:2], values[2:], [numpy_helper.from_array(weights, "w")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(model)
    return model
