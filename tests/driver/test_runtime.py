"""The Runtime gives onnxruntime's outputs and the documented report, and refuses wrong inputs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from driver_models import floats, quantised

import celosia
from celosia.compiler.program import InputError, Program, ProgramError
from celosia.hw.spec.config import Config
from celosia.sim.device import DeviceError
from celosia.sim.functional.fsim import FunctionalDevice

REPORT = {
    "model", "device", "rounding", "cycles", "memory_model", "config", "macs_total", "macs_accelerator", "utilization",
    "launches", "cpu_nodes", "arena", "saved_traffic", "layers", "units", "seconds",
}  # fmt: skip
LAYER = {
    "name", "op", "what", "macs", "cycles", "utilization", "bound", "units", "advice", "bytes_loaded", "bytes_stored",
    "note", "peak", "bytes_kept", "cycles_apart", "cycles_together",
}  # fmt: skip


def values(shape: tuple[int, ...] = (1, 3, 8, 8)) -> np.ndarray:
    return np.random.default_rng(1).normal(size=shape).astype(np.float32)


def expected(model: onnx.ModelProto, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    from oracle import opened

    session = opened(model, int8=True)
    return dict(zip([output.name for output in session.get_outputs()], session.run(None, inputs)))


def check_report(report: dict[str, object], clock: bool) -> None:
    """Check the keys and types of REPORT.json."""
    report = json.loads(json.dumps(report))
    assert report.keys() == REPORT
    assert report["seconds"].keys() == {"compile", "build", "run", "cpu"}
    assert report["units"].keys() == {"load", "gemm", "vector", "store"}
    number = int if clock else type(None)
    for unit in report["units"].values():
        assert unit.keys() == {"busy", "wait_token", "wait_memory"}
        assert all(isinstance(value, number) for value in unit.values())
    assert isinstance(report["cycles"], number)
    assert isinstance(report["memory_model"], str if clock else type(None))
    for layer in report["layers"]:
        assert layer.keys() == LAYER
        assert isinstance(layer["cycles"], number)
    for node in report["cpu_nodes"]:
        assert node.keys() == {"name", "op", "reason"}
        assert node["reason"]
    assert sum(layer["macs"] for layer in report["layers"]) == report["macs_accelerator"] <= report["macs_total"]


@pytest.mark.parametrize("form", ["qdq", "qoperator"])
@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
def test_both_types_and_forms_equal_onnxruntime(form: str, dtype: type) -> None:
    model = quantised(dtype, form=form)
    program = celosia.compile(model, "tiny")
    assert program.launches
    result = celosia.Runtime(program).run({"input_1": values()})
    for name, array in expected(model, {"input_1": values()}).items():
        np.testing.assert_array_equal(result.outputs[name], array)
    check_report(result.report, clock=False)


@pytest.mark.parametrize("opset", [13, 15, 17, 19, 21])
def test_opsets(opset: int) -> None:
    model = quantised(opset=opset)
    result = celosia.Runtime(celosia.compile(model, "tiny")).run({"input_1": values()})
    for name, array in expected(model, {"input_1": values()}).items():
        np.testing.assert_array_equal(result.outputs[name], array)
    assert result.report["layers"]


@pytest.mark.rtl
def test_rtl_equals_functional_and_has_times() -> None:
    program = celosia.compile(quantised(), "tiny")
    with celosia.Runtime(program, "rtl", quiet=True) as runtime:
        first = runtime.run({"input_1": values()})
        again = runtime.run({"input_1": values()})
    second = celosia.Runtime(program).run({"input_1": values()})
    for name, array in second.outputs.items():
        np.testing.assert_array_equal(first.outputs[name], array)
        np.testing.assert_array_equal(again.outputs[name], array)
    check_report(first.report, clock=True)
    assert first.report["cycles"] == again.report["cycles"] > 0
    assert 0 < first.report["utilization"] <= 1
    assert abs(sum(layer["cycles"] for layer in first.report["layers"]) - first.report["cycles"]) < 100
    assert first.report["units"]["gemm"]["busy"] > 0


@pytest.mark.parametrize("device", ["functional", "timed", "rtl"])
def test_floats_alone_open_no_device(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def no(*_: object, **__: object) -> None:
        raise AssertionError("a device was opened")

    monkeypatch.setattr("celosia.driver.run.program_runtime.open_device", no)
    inputs = {"a": values((2, 3)), "b": values((2, 3))}
    result = celosia.Runtime(celosia.compile(floats(), "tiny"), device).run(inputs)
    np.testing.assert_allclose(result.outputs["a/sum"], (inputs["a"] + inputs["b"]) * 3, rtol=1e-6)
    check_report(result.report, clock=False)
    assert result.report["layers"] == [] and result.report["launches"] == 0


def test_an_input_without_dimensions() -> None:
    result = celosia.Runtime(celosia.compile(floats(()), "tiny")).run(
        {"a": np.float32(2), "b": np.array(3, np.float32)}
    )
    assert result.outputs["a/sum"] == 15 and result.outputs["a/sum"].shape == ()


def test_values_inside_the_graph_can_be_kept() -> None:
    program = celosia.compile(quantised(), "tiny")
    given = {"input_1": values((1, 3, 8, 8))}
    packed = program.launches[0].pack[0].value  # what the host makes for the accelerator
    result = celosia.Runtime(program).run(given, keep=lambda name: name == packed)
    assert set(result.outputs) == {*(tensor.name for tensor in program.outputs), packed}


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({}, r"input 'input_1' is missing; it is float32\[1, 3, 8, 8\]"),
        ({"input_1": values(), "y": values()}, "there is no input 'y'; the inputs are 'input_1'"),
        ({"input_1": values((1, 3, 8, 9))}, r"must be float32\[1, 3, 8, 8\], not float32\[1, 3, 8, 9\]"),
        ({"input_1": values().astype(np.float64)}, "not float64"),
        ({"input_1": values()[0]}, r"not float32\[3, 8, 8\]"),
        ({"input_1": None}, "not object"),
    ],
)
def test_wrong_inputs(inputs: dict[str, np.ndarray], words: str) -> None:
    with pytest.raises(InputError, match=words):
        celosia.Runtime(celosia.compile(quantised(), "tiny")).run(inputs)


def test_views_and_byte_orders_of_inputs_do_not_matter() -> None:
    runtime = celosia.Runtime(celosia.compile(quantised(), "tiny"))
    x = values()
    first = runtime.run({"input_1": x}).outputs
    for same in (np.asfortranarray(x), x[:, :, ::-1][:, :, ::-1], np.repeat(x, 2, axis=3)[..., ::2], x.astype(">f4")):
        other = runtime.run({"input_1": same}).outputs
        assert all(np.array_equal(first[name], other[name]) for name in first)


def test_another_device_or_config() -> None:
    program = celosia.compile(quantised(), "tiny")
    with pytest.raises(ValueError, match=r"'fpga'.*functional, timed, rtl or board"):
        celosia.Runtime(program, "fpga")
    with pytest.raises(DeviceError, match=r"Config tiny.*pynq"):
        celosia.Runtime(program, FunctionalDevice(Config.load("pynq")))
    assert celosia.Runtime(program, FunctionalDevice(Config.load("tiny"))).run({"input_1": values()}).report["device"]


def test_a_program_for_another_processor(tmp_path: Path) -> None:
    """Kernels for another processor are compiled again; their machine code never runs."""
    program = celosia.compile(quantised(), "tiny")
    expected = celosia.Runtime(program).run({"input_1": values()}).outputs
    program.kernels = [dataclasses.replace(each, host="sparc sun4 +v9", code=b"none") for each in program.kernels]
    program.save(tmp_path / "p")
    for again in (program, Program.load(tmp_path / "p")):
        found = celosia.Runtime(again).run({"input_1": values()}).outputs
        assert all(np.array_equal(expected[name], found[name]) for name in expected)
    program.machine = "sparc"
    with pytest.raises(ProgramError, match=r"sparc.*--rebuild-kernels"):
        celosia.Runtime(program)
