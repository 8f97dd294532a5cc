"""A model is cut for several accelerators, and its parts give the bytes of the whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper
from small_models import Builder
from typer.testing import CliRunner

import celosia
from celosia.compiler.graph.errors import ModelError
from celosia.compiler.program import InputError, Program
from celosia.driver.cli import app
from celosia.driver.cut import Relay, _balance_parts, cut
from celosia.driver.run.explain import predict_counters
from celosia.sim.device import DeviceError
from celosia.sim.functional.fsim import FunctionalDevice


def chained(node_names: str = "own", form: str = "qdq") -> onnx.ModelProto:
    """Return four convolutions, a residual around the second one, and a CPU operator after the third."""
    b = Builder(form, np.int8, seed=3)
    b.node_names = node_names
    first = b.conv(b.input([1, 4, 8, 8]), 8, (3, 3), pads=(1, 1, 1, 1))
    second = b.binary("Add", b.conv(first, 8, (3, 3), pads=(1, 1, 1, 1)), first)
    third = b.conv(second, 8, (3, 3), pads=(1, 1, 1, 1))
    on_cpu = b.quantise(b.node("Softmax", [b.real(third)], axis=1), third.shape, 1 / 256)
    b.output(b.conv(on_cpu, 8, (3, 3), pads=(1, 1, 1, 1)), real=True)
    return b.model()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("cut") / "m.onnx"
    onnx.save(chained(), path)
    return str(path)


def cycles(program: Program) -> int:
    return sum(counter.cycles or 0 for counter in predict_counters(program))


def bytes_of(results: object) -> list[bytes]:
    return [output.tobytes() for result in results for output in result.outputs.values()]  # type: ignore[attr-defined]


@pytest.mark.parametrize("parts", [2, 3])
def test_parts_give_the_bytes_of_the_whole(whole: str, parts: int) -> None:
    programs = [celosia.compile(each, "tiny", check=False) for each in cut(whole, parts, "tiny")]
    alone = celosia.compile(whole, "tiny", check=False)
    assert len(programs) == parts
    assert max(map(cycles, programs)) < cycles(alone) * (1, 1, 0.75, 0.5)[parts]
    x = np.random.default_rng(0).normal(size=(5, 1, 4, 8, 8)).astype(np.float32)
    with Relay(programs, "functional") as relay, celosia.Runtime(alone) as runtime:
        assert bytes_of(relay.run_each(x)) == bytes_of(runtime.run_each(x, in_flight=1))


@pytest.mark.parametrize("node_names", ["none", "same"])
def test_nodes_need_no_names(whole: str, tmp_path: Path, node_names: str) -> None:
    onnx.save(chained(node_names), tmp_path / "m.onnx")
    ends = [[each.graph.output[0].name for each in cut(path, 2, "tiny")] for path in (whole, tmp_path / "m.onnx")]
    assert ends[0] == ends[1]


def test_operators_that_onnx_does_not_know(tmp_path: Path) -> None:
    """The output of a QLinearAdd has a known shape."""
    onnx.save(chained(form="qoperator"), tmp_path / "m.onnx")
    programs = [celosia.compile(each, "tiny", check=False) for each in cut(tmp_path / "m.onnx", 4, "tiny")]
    x = np.random.default_rng(0).normal(size=(1, 1, 4, 8, 8)).astype(np.float32)
    with Relay(programs) as relay, celosia.Runtime(celosia.compile(tmp_path / "m.onnx", "tiny", check=False)) as alone:
        assert bytes_of(relay.run_each(x)) == bytes_of(alone.run_each(x))


def test_a_branch_reads_what_is_around_it(tmp_path: Path) -> None:
    """No cut separates a tensor from an If whose branch reads it: a part takes one tensor."""
    b = Builder("qdq", np.int8, seed=3)
    b.opset = 16
    first = b.conv(b.input([1, 4, 8, 8]), 4, (1, 1))
    second = b.conv(first, 4, (1, 1))
    branches = {
        f"{name}_branch": helper.make_graph(
            [helper.make_node("Identity", [read], [name])], name, [], [helper.make_tensor_value_info(name, 3, None)]
        )
        for name, read in (("then", first.name), ("else", second.name))
    }
    chosen = b.node("If", [b.node("Cast", [b.node("ReduceMax", [second.name], keepdims=0)], to=9)], **branches)
    b.output(b.conv(replace(first, name=chosen), 4, (1, 1)), real=True)
    onnx.save(b.model(), tmp_path / "m.onnx")
    parts = cut(tmp_path / "m.onnx", 5, "tiny")  # at quantised borders, and on both sides of what If reads
    assert [part.graph.output[0].name for part in parts][1:3] == [first.name, chosen]
    with pytest.raises(ModelError, match="in 5 parts at most"):
        cut(tmp_path / "m.onnx", 6, "tiny")


def test_a_sample_that_fails_in_a_part_is_told_once(whole: str) -> None:
    class Third(FunctionalDevice):
        runs = 0

        def run(self, *arguments: object, **named: object) -> object:  # type: ignore[override]
            Third.runs += 1
            if Third.runs == 3:
                raise DeviceError("no answer")
            return super().run(*arguments, **named)  # type: ignore[arg-type]

    programs = [celosia.compile(each, "tiny", check=False) for each in cut(whole, 2, "tiny")]
    assert len(programs[0].launches) == 1
    x = np.zeros((6, 1, 4, 8, 8), np.float32)
    device = Third(programs[0].config)
    results = Relay(programs, [device, FunctionalDevice(device.config)]).run_each([*x[:4], x[4, 0], x[5]], in_flight=1)
    messages = []
    for _ in range(6):
        try:
            next(results)
            messages.append("")
        except (DeviceError, InputError) as error:
            messages.append(str(error)[:19])
    assert messages == ["", "", "sample 2: no answer", "", "sample 4: input 'in", ""] and list(results) == []
    with pytest.raises(ValueError, match=r"2 Programs.*1 device"):
        Relay(programs, [device])


def test_where_it_cannot_be_cut(whole: str) -> None:
    with pytest.raises(ModelError, match=r"m\.onnx.*\d parts"):
        cut(whole, 9, "tiny")


def test_the_longest_part_is_shortest() -> None:
    assert _balance_parts([10, 20, 30, 90], 100, 2) == [2]
    assert _balance_parts([10, 40, 50, 90], 100, 3) == [0, 2] or _balance_parts([10, 40, 50, 90], 100, 3) == [1, 3]
    assert _balance_parts([], 100, 1) == []


def command(*args: object, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["cut", *map(str, args), "--config", "tiny"])
    assert done.exit_code == code, f"{done.exit_code}: {done.output}"
    return " ".join(done.output.split())


def test_the_command(whole: str, tmp_path: Path) -> None:
    message = command(whole, "-o", tmp_path / "parts")
    first, second = sorted((tmp_path / "parts").iterdir())
    assert (
        (first.name, second.name) == ("m.1.onnx", "m.2.onnx") and f"{second}: " in message and " cycles, to " in message
    )
    assert [onnx.load(each) for each in (first, second)] == cut(whole, 2, "tiny")
    assert "parts at most" in command(whole, "-o", tmp_path / "many", "--parts", 50, code=1)
    assert "there is no folder" in command(whole, "-o", tmp_path / "no" / "where", code=1)
    assert "it is no folder" in command(whole, "-o", whole, code=1)
    assert not (tmp_path / "many").exists()


def test_open_sizes_are_given(tmp_path: Path) -> None:
    model = chained()
    name, dims = model.graph.input[0].name, model.graph.input[0].type.tensor_type.shape.dim
    dims[2].dim_param, dims[3].dim_param = "h", "w"
    onnx.save(model, tmp_path / "m.onnx")
    assert f"--shape {name}=1,4,h,w" in command(tmp_path / "m.onnx", "-o", tmp_path / "parts", code=1)
    command(tmp_path / "m.onnx", "-o", tmp_path / "parts", "--shape", f"{name}=1,4,6,8")
    first, second = (onnx.load(tmp_path / "parts" / f"m.{number}.onnx").graph for number in (1, 2))
    for graph, channels in ((first, 4), (second, 8)):
        assert [dim.dim_value for dim in graph.input[0].type.tensor_type.shape.dim] == [1, channels, 6, 8]
