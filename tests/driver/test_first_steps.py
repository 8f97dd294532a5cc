"""Names that the package lists work; near misses give helpful messages."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from typer.testing import CliRunner

import celosia
import celosia.language as cl
from celosia.bitstreams import synthesis
from celosia.driver.cli import app
from celosia.driver.explore import sweep as sweeping
from celosia.driver.explore.sweep import sweep
from celosia.hw.spec.config import PRESETS, Config, field_specs

ROOT = Path(__file__).parents[2]
DEMO = celosia.models.demo_model_path()


def call(*words: object, code: int = 0) -> str:
    done = CliRunner().invoke(app, [*map(str, words)])
    assert done.exit_code == code, done.output
    return done.output


def test_the_package_offers_what_the_command_does() -> None:
    assert {"optimise", "export", "sweep", "deploy", "cut", "verilog"} <= {*dir(celosia)}
    assert "module celosia_top" in celosia.verilog("tiny")


def test_the_language_lists_no_modules() -> None:
    assert {"jit", "load", "dot", "Config"} <= {*dir(cl)}
    assert [name for name in dir(cl) if isinstance(getattr(cl, name), types.ModuleType)] == []


@pytest.mark.parametrize(
    ("function", "wrong", "meant"), [
        ("compile", "shape", "shapes"), ("tune", "trial", "trials"), ("optimise", "rule", "rules"),
        ("sweep", "memry", "memory"), ("explore", "budgt", "budget"),
        ("quantize", "calibrate_with", None),
    ],
)  # fmt: skip
def test_an_argument_that_there_is_not(function: str, wrong: str, meant: str | None) -> None:
    with pytest.raises(TypeError, match=rf"{function}\(\).*'{wrong}'") as found:
        getattr(celosia, function)(DEMO, **{wrong: 1})
    assert meant is None or f"did you mean {meant!r}?" in str(found.value)


def test_an_argument_that_is_passed_on() -> None:
    """An unknown argument that evaluate() passes on to the device gives an error with a suggestion."""
    images, labels, _ = celosia.models.demo_images()
    with pytest.raises(TypeError, match=r"evaluate\(\).*'sample'.*'samples'"):
        celosia.evaluate(DEMO, {"image": images}, labels, sample=1, config="tiny", device="timed")


def test_a_kernel_without_a_grid() -> None:
    @cl.jit(target="cpu")
    def dense(a, n: cl.constexpr):  # type: ignore[no-untyped-def]
        at = cl.arange(0, n)
        cl.store(a + at, cl.load(a + at) * 2)

    a = np.arange(4, dtype=np.int32)
    with pytest.raises(cl.LanguageError, match=r"dense.*grid.*dense\[grid\]"):
        dense(a, 4)
    dense[(1,)](a, 4)
    assert a.tolist() == [0, 2, 4, 6]


def test_a_config_says_what_its_fields_are(tmp_path: Path) -> None:
    text = call("configs", "pynq")
    assert all(f"# {what}: " in text for what in (spec.meaning for spec in field_specs().values()))
    assert [line for line in text.splitlines() if "  # " not in line] == []
    (tmp_path / "mine.toml").write_text(text)
    assert Config.load(tmp_path / "mine.toml") == PRESETS["pynq"]


def test_operators_of_ones_own_are_imported(tmp_path: Path) -> None:
    (tmp_path / "ops.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write('x')\n")
    call("run", DEMO, "--random", "--config", "tiny", "--import", tmp_path / "ops.py", "-q")
    call("compile", DEMO, "-o", tmp_path / "p", "--config", "tiny", "--import", tmp_path / "ops.py", "-q", "--no-check")
    assert (tmp_path / "ran").read_text() == "xx"
    said = call("run", DEMO, "--random", "--import", tmp_path / "nothing.py", code=1)
    assert "there is no file" in said and "--import takes a Python file" in said
    (tmp_path / "wrong.py").write_text("1 / 0")
    said = call("run", DEMO, "--random", "--import", tmp_path / "wrong.py", code=1)
    assert "wrong.py cannot be imported: ZeroDivisionError" in " ".join(said.split())


def test_an_operator_that_a_file_brings_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator from a file runs in another process, which knows it only from the Program."""
    node = helper.make_node("Twice", ["x"], ["y"], domain="own.domain")
    values = [helper.make_tensor_value_info(name, TensorProto.INT8, [16, 16]) for name in "xy"]
    graph = helper.make_graph([node], "g", values[:1], values[1:])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own.domain", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), tmp_path / "m.onnx")
    (tmp_path / "my_ops.py").write_text("""
import celosia.language as cl

@cl.jit(target="cpu")
def doubled(x, y, n: cl.constexpr):
    at = cl.arange(0, n)
    cl.store(y + at, cl.load(x + at) + cl.load(x + at))

@cl.op("own.domain", "Twice", shape=lambda x: (x.shape, "int8"))
def twice(x, y):
    doubled[(1,)](x.reshape(-1), y.reshape(-1), x.size)
""")
    np.save(tmp_path / "x.npy", np.arange(256, dtype=np.int8).reshape(16, 16) // 4)
    line = ["run", "m.onnx", "-i", "x.npy", "-o", "y.npz", "--no-check", "-q"]
    monkeypatch.chdir(tmp_path)
    call(*line, code=1)
    inspected = [sys.executable, "-m", "celosia.driver.cli", "inspect", "m.onnx", "--import", "my_ops.py", "--no-check"]
    shown = subprocess.run(inspected, cwd=tmp_path, capture_output=True, text=True)
    assert shown.returncode == 0 and "Twice" in shown.stdout, shown.stderr
    program = [sys.executable, "-m", "celosia.driver.cli", *line]
    done = subprocess.run([*program, "--import", "my_ops.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with np.load(tmp_path / "y.npz") as found:
        assert (found["y"] == 2 * np.load(tmp_path / "x.npy")).all()


@pytest.mark.parametrize("line", [["configs"], ["configs", "pynq"], ["boards"]], ids=" ".join)
def test_output_that_nobody_reads_ends_quietly(line: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "celosia.driver.cli", *line], stdout=write, stderr=subprocess.PIPE, text=True
        )
    finally:
        os.close(write)
    assert done.stderr == "" and done.returncode in (0, 1)


def test_a_tuning_ends_with_its_budget(models: Path, tmp_path: Path) -> None:
    """No trial starts after the budget, except those with which every search starts."""
    model = models / "quantised.onnx"
    least = celosia.tune(model, "tiny", trials=40, budget=1e-3, check=False).report["trials"]
    assert least < celosia.tune(model, "tiny", trials=40, check=False).report["trials"] == 40
    said = call("tune", DEMO, "--records", tmp_path / "r", "--budget", "soon", code=1)
    assert "'soon' is no time; write it as 90s, 30m or 2h" in said


# Sweeps and counts --------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_never_the_best(models: Path) -> None:
    """A Config with too many DSP blocks, or with a bus that the board lacks, is never the best."""
    rows = sweep(models / "quantised.onnx", {"block_in": [16, 64], "bus_bytes": [8, 16]})
    fits = {tuple(row["set"].values()): row["misfit"] is None for row in rows}
    assert fits == {(16, 8): True, (16, 16): False, (64, 8): False, (64, 16): False}
    assert min(row["cycles"] for row in rows) < rows[0]["cycles"], "a Config that does not fit has fewer cycles"
    best = sweeping.row_of_fewest_cycles(rows)
    assert best is rows[0]
    said = [sweeping.remark(row, best) for row in rows]
    assert said[0] == "fewest cycles" and all(text.startswith("does not fit: ") for text in said[1:])
    assert (
        "its bus of 16 bytes is wider than the 8 of a memory port of xc7z020" in said[1] and "dsp of xc7z020" in said[2]
    )
    page = str(sweeping.page("t", rows, sweeping.resource_note(rows)).html())
    assert page.count("does not fit: ") == 3 and page.count("fewest cycles") == 1


def test_the_device_is_that_of_the_board(models: Path) -> None:
    model = models / "quantised.onnx"
    rows = sweep(model, {"ports": [1]}, "zcu104")
    assert rows[0]["device"] == "xczu7ev" and rows[0]["misfit"] is None
    assert sweeping.row_of_fewest_cycles(sweep(model, {"block_out": [64], "block_in": [64]}, "pynq")) is None


def test_the_estimate_comes_before_the_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CELOSIA_CACHE", str(tmp_path))
    order: list[str] = []

    def counted(*args: object) -> synthesis.Usage:
        order.append("count")
        return synthesis.Usage(1, 2, 3, 4.0, 0.1, "Yosys")

    monkeypatch.setattr(synthesis, "measure_usage", counted)
    said = " ".join(call("bitstream", "report", "--board", "pynq-z2", "--config", "tiny").split())
    assert order and said.index("tiny on pynq-z2, by the model") < said.index("tiny on pynq-z2 (xc7z020), Yosys")
    assert "by the model" not in call("bitstream", "report", "--board", "pynq-z2", "--config", "tiny", "--json")


# Spelling -----------------------------------------------------------------------------------------------------------

OTHERS = re.compile(r"(?i)\b(?:re|de)?quantiz\w*|\b\w*utilizat\w*|\boptimiz\w*")
CODE = re.compile(r"```.*?```|`[^`]*`|\[[\w./]+\](?:\([^)]*\))?|\]\([^)]*\)|https?://\S+", re.DOTALL)
NAMES = re.compile(
    r"\b[\w.]*(?:[A-Z][a-z0-9]+[A-Z]|_)\w*|\b\w+(?:[./]\w+)+|celosia quantize|\$ ?quantize|celosia\[quantize\]"
)


def otherwise_spelt(text: str) -> list[str]:
    """Return the words of prose in American spelling. Names, code and addresses are ignored."""
    return OTHERS.findall(NAMES.sub("", CODE.sub("", text)))


def test_one_spelling_in_pages_and_help() -> None:
    planted = (
        "It optimizes `optimize` (onnxruntime.quantization, QuantizeLinear, y_quantized): a quantizer's utilization."
    )
    assert otherwise_spelt(planted) == ["optimizes", "quantizer", "utilization"]
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        assert otherwise_spelt(page.read_text(encoding="utf-8")) == [], page.name
    import typer

    group = typer.main.get_command(app)
    for name, each in group.commands.items():  # type: ignore[attr-defined]
        texts = [each.help or "", *(getattr(option, "help", None) or "" for option in each.params)]
        assert otherwise_spelt("\n".join(texts)) == [], name


def test_one_spelling_in_messages() -> None:
    """Texts of at least four words in the sources, except docstrings, have British spelling."""
    for folder in ("bitstreams", "compiler", "driver", "hw", "sim"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            if not OTHERS.search(text):
                continue
            tree = ast.parse(text)
            docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
            for node in ast.walk(tree):
                is_text = isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
                if is_text and len(node.value.split()) > 3:
                    assert otherwise_spelt(node.value) == [], (path.name, node.lineno)
