"""Code that runs on a board imports and runs with Python and numpy only."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import celosia
from celosia.driver.remote.runner import FOLDERS, PACKAGE, board_modules, pack_runner

ON_A_BOARD = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        top = name.split(".")[0]
        if top not in sys.stdlib_module_names and top not in ("numpy", "celosia", "sitecustomize"):
            raise ModuleNotFoundError(f"{name} is absent")
sys.meta_path.insert(0, Absent())
"""
RUN = """
sys.path.insert(0, sys.argv[1] + "/runner.pyz")
import celosia
assert "runner.pyz" in celosia.__file__
import numpy as np
from celosia.compiler.program import Program
from celosia.driver.run.program_runtime import ProgramRuntime
folder = sys.argv[1]
program = Program.load(folder + "/program")
outputs = ProgramRuntime(program).run(dict(np.load(folder + "/inputs.npz"))).outputs
np.savez(folder + "/outputs.npz", **outputs)
"""


def on_a_board(code: str, *args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", ON_A_BOARD + code, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True)


ALONE = (
    "driver.runtime", "driver.data.arrays", "driver.board.board_device", "compiler.program",
    "compiler.program.host.hostops", "sim.functional.fsim",
)  # fmt: skip


@pytest.mark.parametrize("name", ALONE)
def test_imports_with_numpy_alone(name: str) -> None:
    done = on_a_board(f"import celosia.{name}")
    assert done.returncode == 0, done.stderr


WHOLE = ("compiler/program", "driver/board", "driver/remote", "driver/run")
"""Folders of which nothing may need more; hw/ and sim/ have Amaranth, too."""


def test_the_runner_is_folders_and_all_of_it_imports_on_a_board(tmp_path: Path) -> None:
    result = board_modules()
    assert set(WHOLE) < set(FOLDERS)
    assert {path for folder in WHOLE for path in (PACKAGE / folder).rglob("*.py")} < set(result.values())
    assert {"celosia.hw.spec.isa", "celosia.sim.timing"} < set(result) and "celosia.hw.verilog" not in result
    (tmp_path / "runner.pyz").write_bytes(pack_runner().data)
    code = "import importlib; sys.path.insert(0, sys.argv[1]); [importlib.import_module(each) for each in sys.argv[2:]]"
    done = on_a_board(f"{code}; print(importlib.import_module('celosia').__file__)", tmp_path / "runner.pyz", *result)
    assert done.returncode == 0 and "runner.pyz" in done.stdout, done.stderr


def test_what_needs_more_stays_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules that need other packages, directly or through other modules, are not sent to the board."""
    texts = {
        "__init__": "", "plain": "", "tools": "", "compiler/__init__": "", "driver/__init__": "", "hw/__init__": "",
        "sim/__init__": "",
        "hw/top": "from amaranth import Module", "sim/build": "from celosia.hw import top",
        "sim/rtl": "import os\nimport celosia.sim.build", "sim/fsim": "def f():\n    from celosia.sim import rtl",
        "sim/timed": "import numpy.typing\nfrom celosia.sim.fsim import f",
    }  # fmt: skip
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setattr("celosia.driver.remote.runner.PACKAGE", tmp_path)
    assert [name for name in board_modules.__wrapped__() if name.count(".") == 2] == [
        "celosia.sim.fsim",
        "celosia.sim.timed",
    ]


def test_an_import_of_something_else_is_noticed() -> None:
    done = on_a_board("import celosia.compiler.compile")
    assert done.returncode != 0 and "is absent" in done.stderr


def through_the_board(model: onnx.ModelProto, inputs: dict[str, np.ndarray], folder: Path) -> dict[str, np.ndarray]:
    """Run `model` with only numpy and the runner; return its outputs, after a comparison with this process."""
    program = celosia.compile(model, "tiny")
    program.save(folder / "program")
    (folder / "runner.pyz").write_bytes(pack_runner().data)
    np.savez(folder / "inputs.npz", **inputs)
    done = on_a_board(RUN, folder)
    assert done.returncode == 0, done.stderr
    outputs = dict(np.load(folder / "outputs.npz"))
    for name, array in celosia.Runtime(program).run(inputs).outputs.items():
        assert outputs[name].dtype == array.dtype and outputs[name].tobytes() == array.tobytes(), name
    return outputs


def test_control_flow_and_shapes_run_with_numpy_alone(tmp_path: Path) -> None:
    """An If with constants in its subgraphs, and shapes known at run time, run with numpy only."""

    def branch(which: str, extra: float) -> onnx.GraphProto:
        constant = onnx.numpy_helper.from_array(np.float32([extra]), f"k_{which}")
        node = helper.make_node("Concat", ["x", f"k_{which}"], [f"{which}_y"], axis=0)
        out = helper.make_tensor_value_info(f"{which}_y", TensorProto.FLOAT, None)
        return helper.make_graph([node], which, [], [out], [constant])

    nodes = [
        helper.make_node("If", ["c"], ["y"], then_branch=branch("then", 1), else_branch=branch("else", 2)),
        helper.make_node("NonZero", ["x"], ["n"]),
        helper.make_node("Shape", ["n"], ["s"]),
    ]
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["any"]),  # no kernel is compiled for an open size
        helper.make_tensor_value_info("c", TensorProto.BOOL, []),
    ]
    outputs = [
        helper.make_tensor_value_info("y", TensorProto.FLOAT, ["more"]),
        helper.make_tensor_value_info("s", TensorProto.INT64, [2]),
        helper.make_tensor_value_info("n", TensorProto.INT64, [1, "some"]),
    ]
    graph = helper.make_graph(nodes, "graph", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    result = through_the_board(model, {"x": np.float32([3, 0, 4]), "c": np.array(False)}, tmp_path)
    assert result["y"].tolist() == [3, 0, 4, 2] and result["s"].tolist() == [1, 2] and result["n"].tolist() == [[0, 2]]
