"""Operators that move channels between int8 layers stay on the accelerator, in one launch, with onnxruntime's bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from configs import CONFIGS
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

import celosia
from celosia.hw.spec.config import PRESETS

Array = NDArray[Any]
TARGETS = {
    "tiny": PRESETS["tiny"], "pynq": PRESETS["pynq"], "4x8": CONFIGS["4x8"], "8x4": CONFIGS["8x4"],
    "batch2": CONFIGS["batch2"],
}  # fmt: skip


class Network:
    """A network of int8 operators with one input `x`, built operator by operator."""

    def __init__(self, *shape: int, seed: int = 0) -> None:
        self.shape, self.rng, self.last = shape, np.random.default_rng(seed), "x"
        self.nodes: list[onnx.NodeProto] = []
        self.constants = [
            numpy_helper.from_array(np.asarray(value), name)
            for name, value in (("scale", np.float32(0.02)), ("zero", np.int8(3)), ("w_zero", np.int8(0)))
        ]

    def constant(self, value: Array) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(value, name))
        return name

    def add(self, op: str, *inputs: str, outputs: int = 1, **attributes: Any) -> str:
        """Append an operator of the last tensor, or of `inputs`; return the name of its first output."""
        number = len(self.nodes)
        names = [f"t{number}_{output}" for output in range(outputs)]
        domain = "com.microsoft" if op in ("QLinearAdd", "QLinearConcat") else ""
        operands = list(inputs) or [self.last]
        node = helper.make_node(op, operands, names, name=f"{op}{number}", domain=domain, **attributes)
        self.nodes.append(node)
        self.last = names[0]
        return self.last

    def conv(self, inputs: int, outputs: int, *kernel: int, of: str = "", groups: int = 1) -> str:
        weights = self.rng.integers(-127, 128, (outputs, inputs // groups, *kernel), np.int8)
        operands = [of or self.last, "scale", "zero", self.constant(weights), "scale", "w_zero"]
        out_scale = self.constant(np.float32(0.02 * np.sqrt(inputs * np.prod(kernel))))
        pads = [size // 2 for size in kernel] * 2
        return self.add("QLinearConv", *operands, out_scale, "zero", pads=pads, group=groups)

    def matmul(self, inputs: int, outputs: int) -> str:
        weights = self.rng.integers(-127, 128, (inputs, outputs), np.int8)
        operands = [self.last, "scale", "zero", self.constant(weights), "scale", "w_zero"]
        return self.add("QLinearMatMul", *operands, self.constant(np.float32(0.02 * np.sqrt(inputs))), "zero")

    def transpose(self, *perm: int) -> str:
        return self.add("Transpose", perm=list(perm))

    def reshape(self, *shape: int) -> str:
        return self.add("Reshape", self.last, self.constant(np.array(shape, np.int64)))

    def model(self) -> onnx.ModelProto:
        graph = helper.make_graph(
            self.nodes, "moves", [helper.make_tensor_value_info("x", TensorProto.INT8, self.shape)],
            [helper.make_tensor_value_info(self.last, TensorProto.INT8, None)], self.constants,
        )  # fmt: skip
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
        return onnx.shape_inference.infer_shapes(helper.make_model(graph, opset_imports=opsets, ir_version=8))


def assert_one_launch(network: Network, config: Any, on_cpu: Sequence[str] = ()) -> celosia.Program:
    """Compile, compare bytes with onnxruntime, and expect one launch with all operators except `on_cpu`."""
    model = network.model()
    program = celosia.compile(model, config)
    feed = {"x": np.random.default_rng(1).integers(-128, 128, network.shape, np.int8)}
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, feed)
    (result,) = celosia.Runtime(program).run(feed).outputs.values()
    assert np.array_equal(result, expected)
    reasons = {node.op: node.reason for step in program.steps for node in getattr(step, "nodes", ())}
    assert reasons.keys() <= set(on_cpu), reasons
    assert len(program.launches) == 1 and program.macs_accelerator == program.macs_total
    return program


# Sequences and matrices -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [name for name in TARGETS if name != "batch2"])
@pytest.mark.parametrize("channels", [16, 12])
def test_a_sequence_becomes_a_matrix_and_back(target: str, channels: int) -> None:
    """Transposes between a convolution, a product of rows and a convolution are views."""
    network = Network(1, 8, 20)
    network.conv(8, channels, 3)
    network.transpose(0, 2, 1)
    network.matmul(channels, 8)
    network.transpose(0, 2, 1)
    network.conv(8, 8, 3)
    assert_one_launch(network, TARGETS[target])


@pytest.mark.parametrize("target", [name for name in TARGETS if name != "batch2"])
def test_a_matrix_becomes_a_sequence(target: str) -> None:
    network = Network(1, 20, 8)
    network.matmul(8, 12)
    network.transpose(0, 2, 1)
    network.conv(12, 16, 5)
    network.transpose(0, 2, 1)
    network.matmul(16, 4)
    assert_one_launch(network, TARGETS[target])


@pytest.mark.parametrize("target", [name for name in TARGETS if name != "batch2"])
@pytest.mark.parametrize("along", [2, 3])
def test_rows_become_an_image_of_one_row_or_column(target: str, along: int) -> None:
    """A convolution over the steps of a sequence may be written with two spatial axes."""
    network = Network(1, 20, 8)
    network.matmul(8, 12)
    network.reshape(1, 1, 20, 12)
    network.transpose(0, 3, *((2, 1) if along == 2 else (1, 2)))
    network.conv(12, 12, *((5, 1) if along == 2 else (1, 5)), groups=12)
    network.transpose(0, *((3, 2) if along == 2 else (2, 3)), 1)
    network.reshape(1, 20, 12)
    network.matmul(12, 4)
    assert_one_launch(network, TARGETS[target])


# Channels that are not whole groups -----------------------------------------------------------------------------------


@pytest.mark.parametrize("target", TARGETS)
def test_parts_of_any_number_of_channels_are_joined(target: str) -> None:
    """Parts of any number of channels are joined without padding between them; a depthwise convolution reads them."""
    network = Network(1, 8, 6, 5)
    first = network.conv(8, 7, 1, 1)
    second = network.conv(8, 5, 3, 3, of="x")
    network.add("Concat", first, second, axis=1)
    network.conv(12, 12, 3, 3, groups=12)
    network.conv(12, 8, 1, 1)
    assert_one_launch(network, TARGETS[target])


@pytest.mark.parametrize("target", TARGETS)
def test_the_result_of_a_concatenation_is_an_output(target: str) -> None:
    network = Network(1, 8, 6, 5)
    first = network.conv(8, 3, 1, 1)
    second = network.conv(8, 6, 1, 1, of="x")
    network.add("Concat", first, second, first, axis=1)
    assert_one_launch(network, TARGETS[target], on_cpu=["Concat"])  # the host joins what it reads anyway


@pytest.mark.parametrize("target", TARGETS)
def test_parts_of_any_number_of_channels_are_split(target: str) -> None:
    """Parts of any number of channels become operands of other operators, or are joined in another order."""
    network = Network(1, 8, 5, 4)
    network.conv(8, 29, 1, 1)
    first = network.add("Split", network.last, network.constant(np.array([11, 5, 13], np.int64)), outputs=3, axis=1)
    second, third = first.replace("_0", "_1"), first.replace("_0", "_2")
    network.conv(5, 6, 3, 3, of=second)
    network.add("Concat", third, network.last, first, axis=1)
    network.conv(30, 7, 1, 1)
    assert_one_launch(network, TARGETS[target])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("start, end, step, count", [(3, 14, 1, 11), (1, 20, 3, 7), (-1, -21, -2, 10)])
def test_any_channels_are_sliced(target: str, start: int, end: int, step: int, count: int) -> None:
    network = Network(1, 4, 5, 4)
    tensor = network.conv(4, 20, 1, 1)
    bounds = [network.constant(np.array([number], np.int64)) for number in (start, end, 1, step)]
    network.add("Slice", tensor, *bounds)
    network.add("MaxPool", kernel_shape=[2, 2])
    pooled = network.last
    other = network.conv(20, 8, 1, 1, of=tensor)
    network.add("MaxPool", other, kernel_shape=[2, 2])
    network.add("Concat", pooled, network.last, axis=1)
    network.conv(count + 8, 8, 1, 1)
    assert_one_launch(network, TARGETS[target])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("groups", [2, 3])
def test_channels_are_shuffled(target: str, groups: int) -> None:
    """ShuffleNet's Reshape, Transpose, Reshape between grouped convolutions stays on the accelerator."""
    network = Network(1, 12, 4, 4)
    network.conv(12, 24, 1, 1, groups=groups)
    network.reshape(1, groups, 24 // groups, 4, 4)
    network.transpose(0, 2, 1, 3, 4)
    network.reshape(1, 24, 4, 4)
    network.conv(24, 24, 3, 3, groups=24)
    network.conv(24, 12, 1, 1, groups=groups)
    program = assert_one_launch(network, TARGETS[target])
    assert not any("Gather" in layer.name for layer in program.launches[0].layers)  # weights order the channels


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("rank", [2, 3])
def test_an_image_is_flattened_in_another_order(target: str, rank: int) -> None:
    """A product reads rows, columns and channels flattened in TensorFlow's order."""
    network = Network(1, 4, 5, 3)
    network.conv(4, 6, 3, 3)
    network.transpose(*((0, 2, 3, 1) if rank == 2 else (0, 3, 2, 1)))
    network.reshape(1, 90)
    network.matmul(90, 10)
    assert_one_launch(network, TARGETS[target])


@pytest.mark.parametrize("target", ["pynq", "4x8"])
def test_units_of_a_shuffle_network(target: str) -> None:
    """Two units of ShuffleNet V2 run in one launch: split, convolve one half, join, shuffle; 10 channels in each
    half."""
    network = Network(1, 8, 6, 6)
    network.conv(8, 20, 1, 1)
    for _ in range(2):
        halves = network.constant(np.array([10, 10], np.int64))
        first = network.add("Split", network.last, halves, outputs=2, axis=1)
        network.conv(10, 10, 1, 1, of=first.replace("_0", "_1"))
        network.conv(10, 10, 3, 3, groups=10)
        second = network.conv(10, 10, 1, 1)
        network.add("Concat", first, second, axis=1)
        network.reshape(1, 2, 10, 6, 6)
        network.transpose(0, 2, 1, 3, 4)
        network.reshape(1, 20, 6, 6)
    network.conv(20, 8, 1, 1)
    assert_one_launch(network, TARGETS[target])


def test_indices_of_a_pooling_stay_those_of_its_operand() -> None:
    """A shuffle before a MaxPool with indices does not move behind it, since indices count channels."""
    network = Network(1, 8, 6, 6)
    network.conv(8, 8, 1, 1)
    network.reshape(1, 2, 4, 6, 6)
    network.transpose(0, 2, 1, 3, 4)
    network.reshape(1, 8, 6, 6)
    network.add("MaxPool", outputs=2, kernel_shape=[2, 2])
    model = network.model()
    (pool,) = (node for node in model.graph.node if node.op_type == "MaxPool")
    model.graph.output.append(helper.make_tensor_value_info(pool.output[1], TensorProto.INT64, None))
    feed = {"x": np.random.default_rng(1).integers(-128, 128, network.shape, np.int8)}
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    results = celosia.Runtime(celosia.compile(model, "tiny")).run(feed).outputs
    for output, expected in zip(session.get_outputs(), session.run(None, feed), strict=True):
        assert np.array_equal(results[output.name], expected), output.name
