"""Inputs that become constants fold Ifs and make shapes static; values that do not fit are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from graph_text import proto
from oracle import opened
from typer.testing import CliRunner

import celosia
from celosia.compiler.graph.errors import ModelError
from celosia.compiler.graph.importing.set_inputs import set_inputs
from celosia.compiler.program import HostStep, Program
from celosia.driver.accuracy.compare import compare
from celosia.driver.cli import app
from celosia.driver.quantize.quantize import quantize
from celosia.driver.runtime import Runtime

SOURCE = """
g (float[1, 2, 4, 4] x, int64 rate, float[2] gain, int64[4] dims) => (float[a, b, c, d] y)
<float[2, 2, 1, 1] w = {1, 2, 3, -4}, float[2, 2, 3, 3] v, int64 slow = {8}> {
  s = Equal(rate, slow)
  r = Reshape(x, dims)
  z = If (s) <
    then_branch = t () => (float[?, ?, ?, ?] p) { p = Conv(r, w) },
    else_branch = e () => (float[?, ?, ?, ?] q) { q1 = Conv(r, w) q = Conv(q1, w) }
  >
  g4 = Unsqueeze(gain, axes)
  y = Mul(z, g4)
}
""".replace(", float[2, 2, 3, 3] v", ", int64[2] axes = {1, 2}")
VALUES: dict[str, Any] = {"rate": 8, "gain": [0.5, 2], "dims": np.array([1, 2, 2, 8])}
X = np.random.default_rng(0).standard_normal((1, 2, 4, 4)).astype(np.float32)


def model() -> onnx.ModelProto:
    return proto(SOURCE, 17)


def expected(values: dict[str, Any]) -> Any:
    types = {"rate": np.int64, "gain": np.float32, "dims": np.int64}
    return opened(model()).run(None, {"x": X, **{name: np.array(v, types[name]) for name, v in values.items()}})[0]


@pytest.mark.parametrize("rate", [8, 16])
def test_branches_fold_and_shapes_are_static(rate: int) -> None:
    values = VALUES | {"rate": rate}
    program = celosia.compile(model(), "tiny", set=values)
    assert not any(isinstance(step, HostStep) for step in program.steps)
    assert [tensor.name for tensor in program.inputs] == ["x"] and program.outputs[0].shape == (1, 2, 2, 8)
    assert program.macs_total == (64 if rate == 8 else 128)
    np.testing.assert_allclose(Runtime(program).run({"x": X}).outputs["y"], expected(values), rtol=1e-6)


def test_texts_as_on_the_command_line() -> None:
    values = {"rate": "8", "gain": "0.5,2", "dims": "1,2,2,8"}
    runtime = Runtime(model(), config="tiny", compiling={"set": values})
    assert runtime.names == ["x"]
    np.testing.assert_allclose(runtime.run({"x": X}).outputs["y"], expected(VALUES), rtol=1e-6)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"speed": 8}, "'speed', which is no input; the inputs are 'x', 'rate', 'gain', 'dims'"),
        ({"rate": 8.5}, r"'rate' is int64\[\], and the value 8.5 does not fit"),
        ({"rate": "fast"}, r"'rate' is int64\[\], and the value 'fast' does not fit"),
        ({"rate": True}, r"'rate' is int64\[\], and the value True does not fit"),
        ({"rate": 1 << 70}, r"'rate' is int64\[\], and the value 1180591620717411303424 does not fit"),
        ({"rate": [8, 16]}, r"'rate' is int64\[\], and the value \[8, 16\] has the shape \[2\]"),
        ({"gain": [1.0, 2.0, 3.0]}, r"'gain' is float32\[2\], and the value \[1.0, 2.0, 3.0\] has the shape \[3\]"),
        ({"gain": 1.0}, r"'gain' is float32\[2\], and the value 1.0 has the shape \[\]"),
        ({"gain": "a,b"}, r"'gain' is float32\[2\], and the value 'a,b' does not fit"),
    ],
)
def test_what_does_not_fit(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        celosia.compile(model(), "tiny", set=values)


def test_values_of_each_kind() -> None:
    source = "g (bool b, string[n] s, float16[2, 2] h, uint8[1] u, float[m, 2] f) => (bool y) {y = Not(b)}"
    values = {"b": "true", "s": "a,b", "h": "1,2,3,4", "u": "7", "f": [[1, 2], [3, 4], [5, 6]]}
    found = {t.name: onnx.numpy_helper.to_array(t) for t in set_inputs(proto(source), values).graph.initializer}
    assert found["b"].shape == () and bool(found["b"]) and found["u"].tolist() == [7]
    assert found["h"].dtype == np.float16 and found["h"].tolist() == [[1, 2], [3, 4]]
    assert found["f"].dtype == np.float32 and found["f"].shape == (3, 2) and len(found["s"]) == 2


def test_compare_and_quantize(tmp_path: Path) -> None:
    onnx.save(model(), tmp_path / "float.onnx")
    report = compare(tmp_path / "float.onnx", {"x": X}, config="tiny", set=VALUES)
    assert report["tensors"] and not report["different"]
    samples = {"x": np.random.default_rng(1).standard_normal((4, 2, 4, 4)).astype(np.float32)}
    quantised = quantize(tmp_path / "float.onnx", samples, tmp_path / "int8.onnx", config="tiny", set=VALUES)
    assert quantised["accelerator"]["macs_accelerator"] == quantised["accelerator"]["macs_total"] > 0
    assert [value.name for value in onnx.load(tmp_path / "int8.onnx").graph.input] == ["x"]


def test_on_the_command_line(tmp_path: Path) -> None:
    path, output = tmp_path / "model.onnx", tmp_path / "model.celosia"
    onnx.save(model(), path)
    options = ["--set", "rate=8", "--set", "gain=0.5,2", "--set", "dims=1,2,2,8", "--config", "tiny", "-q"]

    def call(*arguments: object) -> tuple[int, str]:
        result = CliRunner().invoke(app, [*map(str, arguments), *options])
        return result.exit_code, result.output

    assert call("compile", path, "-o", output)[0] == 0 and Program.load(output).macs_total == 64
    assert call("run", path, "--random")[0] == 0
    code, text = call("run", output, "--random")
    assert code != 0 and "leave --set out" in text
