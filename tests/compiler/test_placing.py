"""Operators run where the caller asks, else where CPU or accelerator would be cheaper."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from typer.testing import CliRunner

import celosia
from celosia.compiler.graph.errors import ModelError
from celosia.compiler.program import Program
from celosia.driver.cli import app

NAMES = "small", "large"


def model(side: int = 24) -> onnx.ModelProto:
    """Return a model of two convolutions: `x` int8 [1, 2, 4, 4] by 2 channels, `y` [1, 16, side, side] by 16."""
    rng = np.random.default_rng(1)
    nodes, constants, ends, outputs = [], [], [], []
    for name, channels, size in zip(NAMES, (2, 16), (4, side)):
        shape = [1, channels, size, size]
        weights = rng.integers(-100, 101, (channels, channels, 3, 3), np.int8)
        for role, value in (("step", np.float32(0.02)), ("zero", np.int8(0)), ("weights", weights)):
            constants.append(numpy_helper.from_array(np.asarray(value), f"{name}_{role}"))
        scale_and_zero = [f"{name}_step", f"{name}_zero"]
        operands = [f"{name}_in", *scale_and_zero, f"{name}_weights", *scale_and_zero, *scale_and_zero]
        nodes.append(helper.make_node("QLinearConv", operands, [f"{name}_out"], name=name, pads=[1] * 4))
        ends.append(helper.make_tensor_value_info(f"{name}_in", TensorProto.INT8, shape))
        outputs.append(helper.make_tensor_value_info(f"{name}_out", TensorProto.INT8, shape))
    graph = helper.make_graph(nodes, "two", ends, outputs, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def on_cpu(program: Program) -> dict[str, str]:
    """Return the names of operators on the CPU, with the reasons."""
    return {node.name: node.reason for step in program.steps for node in getattr(step, "nodes", ()) if node.name}


def run(program: Program) -> list[bytes]:
    rng = np.random.default_rng(2)
    inputs = {tensor.name: rng.integers(-128, 128, tensor.shape, np.int8) for tensor in program.inputs}
    return [output.tobytes() for output in celosia.Runtime(program).run(inputs).outputs.values()]


def test_an_operator_is_placed_by_its_name() -> None:
    usual = celosia.compile(model(), "tiny")
    assert not on_cpu(usual) and usual.macs_accelerator == usual.macs_total
    for place, expected in (
        ({"small": "cpu"}, {"small"}),
        ({"*": "cpu", "small": "accelerator"}, {"large"}),
        ({"*": "accelerator"}, set()),
        ({"*": "cpu"}, {"small", "large"}),
    ):
        program = celosia.compile(model(), "tiny", place=place)
        assert on_cpu(program).keys() == expected and run(program) == run(usual)
        assert all(reason == "placed on the CPU" for reason in on_cpu(program).values())


def test_what_cannot_be_placed_is_said() -> None:
    for place, words in (
        ({"smal": "cpu"}, r"no operator 'smal' to place \(did you mean 'small'\?\)"),
        ({"small": "gpu"}, "'small' cannot be placed on 'gpu'; take cpu or accelerator"),
        ({"small": "cost"}, "'small' cannot be placed on 'cost'; take cpu or accelerator"),
        ({"*": "gpu"}, "take cpu or accelerator or cost"),
    ):
        with pytest.raises(ModelError, match=words):
            celosia.compile(model(), "tiny", check=False, place=place)
    float_model = model()
    float_model.graph.node.append(helper.make_node("Cast", ["small_out"], ["f"], name="cast", to=TensorProto.FLOAT))
    float_model.graph.node.append(helper.make_node("Erf", ["f"], ["g"], name="erf"))
    float_model.graph.output.append(helper.make_tensor_value_info("g", TensorProto.FLOAT, [1, 2, 4, 4]))
    with pytest.raises(ModelError, match=r"'erf' \(Erf\).*float"):
        celosia.compile(float_model, "tiny", check=False, place={"erf": "accelerator"})
    with pytest.raises(ModelError, match=r"\(Flatten\).*bytes"):
        celosia.compile(celosia.models.demo_model_path(), "tiny", check=False, place={"features_QuantizeLinear": "cpu"})


def chain(side: int) -> onnx.ModelProto:
    """Return a model with only the convolution `large`, of images of `side`."""
    both = model(side)
    for part in (both.graph.node, both.graph.input, both.graph.output):
        del part[0]
    return both


def test_a_launch_is_left_to_the_cpu_where_that_costs_less() -> None:
    small, large = (celosia.compile(chain(side), "pynq", place={"*": "cost"}) for side in (2, 40))
    (reason,) = on_cpu(small).values()
    numbers = [int(word.replace(",", "")) for word in reason.split() if word[0].isdigit()]
    assert reason.startswith("weighed: ") and numbers[0] < numbers[1] and not small.launches
    assert not on_cpu(large) and large.launches and "large: " in large.schedules and " on the CPU" in large.schedules
    kept = celosia.compile(chain(2), "pynq", place={"*": "cost", "large": "accelerator"})
    assert kept.launches and run(kept) == run(small)


def test_the_command_takes_it(tmp_path: Path) -> None:
    onnx.save(model(), tmp_path / "m.onnx")
    arguments = ["inspect", str(tmp_path / "m.onnx"), "--config", "tiny", "--operators", "--no-check", "-q"]
    done = CliRunner().invoke(app, [*arguments, "--place", "small=cpu"])
    assert done.exit_code == 0 and "placed on the CPU" in done.output
    done = CliRunner().invoke(app, [*arguments, "--place", "small"])
    assert done.exit_code == 2 and "--place takes NODE=cpu" in done.output.replace("\n", " ")
