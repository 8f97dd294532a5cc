"""The benchmarks measure what they claim, and notice planted faults."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
from demo_block import save_demo_block
from small_models import Builder

pytest.importorskip("onnxruntime")

from benchmarks import cpu, names, networks, workloads
from benchmarks.__main__ import main, save
from benchmarks.bound import bound
from benchmarks.kernels import KERNELS, cases
from benchmarks.models import Bench
from benchmarks.oracle import Operator, Oracle, SideBySide, side_by_side
from benchmarks.rows import Request, Row, different, judged
from benchmarks.workloads import FOLDER_VARIABLE, WORKLOADS, Missing

from celosia.hw.spec.config import Config


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model with most integer operators of onnxruntime that keep channels last."""
    b = Builder("qdq", np.int8, seed=4)
    x = b.conv(b.input([1, 3, 12, 12]), 8, (3, 3), (2, 2), (1, 1, 1, 1))
    x = b.max_pool(x, (3, 3), (1, 1), (1, 1, 1, 1))
    x = b.binary("Add", x, b.conv(x, 8, (3, 3), pads=(1, 1, 1, 1)))
    x = b.squeeze_excite(b.concat([x, b.conv(x, 4, (1, 1))], equal=False), 4)
    b.output(b.matmul(b.flatten(b.global_average(x)), 5), real=True)
    path = tmp_path_factory.mktemp("network") / "network.onnx"
    onnx.save(b.model(), path)
    return path


def pieces(path: Path, int8: bool = True) -> SideBySide:
    oracle = Oracle(path, int8)
    rng = np.random.default_rng(0)
    return side_by_side(oracle, oracle.tensors({"input_1": rng.standard_normal((1, 3, 12, 12)).astype(np.float32)}))


def bench(device: str = "functional") -> Bench:
    return Bench(Request(config="tiny", device=device))


@pytest.mark.parametrize("int8", [True, False])
def test_every_operator_is_exact(network: Path, int8: bool) -> None:
    """Every operator is exact, and integer operators run on the accelerator."""
    rows = bench().compare_operators(pieces(network, int8))
    assert not [row for row in rows if row["different"]]
    if not int8:
        return
    places = {(row["op"], row["place"]) for row in rows}
    for op in ("QLinearConv", "MaxPool", "QLinearAdd", "QLinearConcat", "QLinearMul", "QGemm"):
        assert (op, "accelerator") in places


def test_a_wrong_byte_is_counted(network: Path) -> None:
    right = pieces(network)
    wrong = next(operator for operator in right.operators if operator.op == "QLinearConv")
    changed = wrong.expected.copy()
    changed.flat[3] ^= 0x40
    operators = [dataclasses.replace(op, expected=changed) if op is wrong else op for op in right.operators]
    rows = bench().compare_operators(SideBySide(right.model, right.feed, operators))
    (row,) = [row for row in rows if row["different"]]
    assert (row["name"], row["different"], row["steps"]) == (wrong.name, 1, 64)


def test_an_operator_that_cannot_be_compiled_counts_whole_and_alone(network: Path) -> None:
    right = pieces(network)
    absent = Operator("absent", "QLinearConv", "no such output", np.zeros(7, np.int8))
    graph = onnx.ModelProto()
    graph.CopyFrom(right.model)
    graph.graph.node.append(onnx.helper.make_node("NoSuchOperator", ["a"], ["no such output"], name="absent"))
    graph.graph.output.append(onnx.helper.make_tensor_value_info("no such output", onnx.TensorProto.INT8, [7]))
    rows = bench().compare_operators(SideBySide(graph, right.feed, [*right.operators, absent]))
    (row,) = [row for row in rows if row["different"]]
    assert (row["name"], row["different"]) == ("absent", 7)
    assert "not a valid ONNX model" in row["error"]


def test_bytes_of_other_shapes_and_types_differ() -> None:
    a = np.zeros((2, 3), np.int8)
    assert different(a, a) == 0
    assert different(a, np.array([[0, 0, 0], [0, 1, 0]], np.int8)) == 1
    assert different(a, np.zeros((3, 2), np.int8)) == 6
    assert different(a, np.zeros((2, 3), np.float32)) == 24
    assert different(np.float32([0.0]), np.float32([-0.0])) == 1


def test_a_row_is_judged_by_its_numbers() -> None:
    details = {"ratio": 1.25, "different": 0, "layers": [1], "config": "tiny"}
    for asked, met in (("", None), ("ratio <= 1.3, different <= 0", True), ("ratio >= 1.3, different <= 0", False)):
        row = judged("key", "what", "command", details, asked)
        assert row.met is met and row.measured == "ratio 1.25, different 0, config tiny"
    with pytest.raises(KeyError):
        judged("key", "what", "command", details, "launches <= 1")


def test_demo_rows_need_no_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    monkeypatch.setattr(workloads, "demo_model_path", partial(save_demo_block, tmp_path))
    out = tmp_path / "results.json"
    arguments = "exactness models --models demo,resnet18 --images 2 --device functional --config tiny --quiet --output"
    assert main([*arguments.split(), str(out)]) == 0
    rows = {row["key"]: row for row in json.loads(out.read_text())["rows"]}
    assert rows["models/demo"]["met"] and rows["exactness/demo/all-integer"]["met"]
    assert rows["models/demo"]["details"]["inputs"] == 2
    assert "skipped: no folder with models" in rows["models/resnet18"]["measured"]
    assert "python -m benchmarks models --models demo --config tiny" in rows["models/demo"]["command"]
    assert "different 0" in capsys.readouterr().out


def test_missing_models_say_where(tmp_path: Path) -> None:
    with pytest.raises(Missing, match=r"resnet18_qdq_s8\.onnx is not in"):
        WORKLOADS["resnet18"].path(tmp_path)


def test_counts_of_names_are_added() -> None:
    count = dict(models=2, programs=12, launches=14, bytes=5000, different=0, float_outputs=1, steps=0.5, failures=[])
    row = names._row("random", "models", [count, count | {"steps": 1}], 4)
    assert row.met and row.measured.startswith("0 of 10,000 bytes differ; 4 models, 24 programs")
    assert "at most 1 steps" in row.measured
    assert row.command.endswith("--count 4")
    bad = names._row("random", "models", [count, count | {"different": 3, "failures": ["model 1"]}], 2000)
    assert not bad.met and "3 of 10,000" in bad.measured and "1 failed" in bad.measured


def test_results_are_merged(tmp_path: Path) -> None:
    path = tmp_path / "bench" / "results.json"
    save(path, [Row("a", "", "", "1", True, ""), Row("b", "", "", "2", True, "")], {})
    save(path, [Row("b", "", "", "3", False, "")], {})
    rows = json.loads(path.read_text())["rows"]
    assert [(row["key"], row["measured"]) for row in rows] == [("a", "1"), ("b", "3")]
    assert list(path.parent.iterdir()) == [path]


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["speed"])
    assert "there is no 'speed'" in capsys.readouterr().err
    for section in ("models", "gain"):
        with pytest.raises(SystemExit, match=f"{section} measures none of vgg"):
            main([section, "--models", "vgg", "--quiet"])


# Networks that are made here ----------------------------------------------------------------------------------------


def test_a_network_over_its_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(workloads, "MADE", tmp_path / "networks")
    monkeypatch.setitem(networks.NETWORKS, "ds_cnn", short_ds_cnn)
    out = tmp_path / "results.json"
    line = f"onchip --models ds_cnn --config tiny --quiet --output {out}"
    assert main(line.split()) == 0
    rows = {row["key"]: row for row in json.loads(out.read_text())["rows"]}
    assert list(rows) == ["onchip/ds_cnn/zynq-hp", "onchip/ds_cnn/pynq-z2"]
    first, second = (row["details"] for row in rows.values())
    assert first["memory_model"] == "zynq-hp" and second["memory_model"].startswith("pynq-z2 (")
    assert first["bound"]["cycles"] < first["cycles"] <= second["cycles"]
    assert first["bytes"] == 48 and first["different"] == 0
    path = networks.cached("ds_cnn", tmp_path / "networks")
    before = path.stat().st_mtime_ns
    assert networks.cached("ds_cnn", tmp_path / "networks") == path and path.stat().st_mtime_ns == before
    (tmp_path / "again").mkdir()
    assert networks.main([str(tmp_path / "again"), "ds_cnn"]) == 0
    assert (tmp_path / "again" / "ds_cnn.onnx").read_bytes() == path.read_bytes()
    monkeypatch.setattr(
        Bench, "run", lambda self, program, feed, *a, real=Bench.run, **k: real(self, program, other(feed), *a, **k)
    )
    assert main(line.split()) == 1


def short_ds_cnn() -> onnx.ModelProto:
    """Return `networks.ds_cnn` with one separable convolution of four."""
    net = networks.NetBuilder("ds_cnn", (1, 1, 49, 10))
    x = net.conv("input", 64, (10, 4), 2, (4, 1, 5, 1))
    return net.classify(net.conv(net.conv(x, 64, (3, 3), depthwise=True), 64), 12)


def other(feed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:  # type: ignore[type-arg]
    return {name: array + np.float32(1) for name, array in feed.items()}


def test_the_bound(tmp_path: Path) -> None:
    """The bound counts the MACs and bytes of MobileNetV2 1.0.

    It has 300.8 million MACs, 20.7 million of them in depthwise convolutions (PyTorch's model), and 3.47 million
    weights.
    """
    onnx.save(networks.mobilenet_v2(224), tmp_path / "m.onnx")
    bounds = bound(tmp_path / "m.onnx", Config())
    assert bounds.macs == pytest.approx(300.8e6 - 20.7e6, rel=1e-3)
    assert bounds.bytes_read == pytest.approx(3.469e6 + 3 * 224 * 224, rel=1e-3) and bounds.bytes_written == 1000
    assert bounds.cycles == bounds.macs // 256
    assert dataclasses.replace(bounds, macs=0).cycles == -(-bounds.bytes_read // 8)


@pytest.mark.parametrize("name", networks.NETWORKS)
def test_networks_are_valid(name: str) -> None:
    onnx.checker.check_model(networks.NETWORKS[name](), full_check=True)


def test_activations_of_a_network_are_spread(tmp_path: Path) -> None:
    networks.write("ds_cnn", tmp_path / "n.onnx")
    oracle = Oracle(tmp_path / "n.onnx")
    feed = {"input": np.random.default_rng(9).standard_normal((1, 1, 49, 10)).astype(np.float32)}
    convolutions = [node for node in oracle.graph.graph.node if node.op_type == "QLinearConv"]
    assert len(convolutions) == 9
    for node in convolutions:
        array = oracle.tensors(feed)[node.output[0]]
        assert len(np.unique(array)) > 100 and array.std() > 20  # of 256 values
        assert 0.3 < (array == -128).mean() < 0.7 and (array == 127).mean() < 0.05


# The CPU beside onnxruntime -----------------------------------------------------------------------------------------


def test_kernels_agree_with_onnxruntime(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "results.json"
    kernels = "gemm_64,softmax_narrow,cast_float_int,topk,quantised_conv_3x3"
    main([*f"cpu --kernels {kernels} --seconds 0.01 --quiet --output".split(), str(out)])
    rows = {row["key"]: row for row in json.loads(out.read_text())["rows"]}
    assert list(rows) == [*(f"cpu/kernel/{name}" for name in kernels.split(",")), "cpu/kernels"]
    for row in rows.values():
        assert row["details"].get("error", 0) < 1e-4 and "failed" not in row["measured"]
    assert 0 < rows["cpu/kernels"]["details"]["geomean"] < 100
    assert "ratio to onnxruntime" in capsys.readouterr().out


def test_a_wrong_kernel_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    (case,) = cases(("quantize",))
    wrong = onnx.ModelProto()
    wrong.CopyFrom(case.model)
    wrong.graph.initializer[0].CopyFrom(
        onnx.numpy_helper.from_array(np.float32(0.0201), wrong.graph.initializer[0].name)
    )
    monkeypatch.setattr(cpu, "open_session", lambda model, real=cpu.open_session, **options: real(wrong, **options))
    (row, _) = cpu.kernel_rows(("quantize",), 0.01, lambda text: None)
    assert row.met is False and row.details["error"] > case.tolerance


@pytest.mark.thorough
def test_float_networks_on_one_thread_and_on_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = list(cpu.network_rows(tmp_path, ("detector",), 0.01, lambda text: None))
    assert [row.key for row in rows] == ["cpu/network/detector/1", "cpu/network/detector/2"]
    assert all(row.details["error"] < 1e-4 and row.details["ratio"] > 0 for row in rows)
    monkeypatch.setattr(cpu, "TOLERANCE", 0.0)
    assert not any(row.met for row in cpu.network_rows(tmp_path, ("detector",), 0.01, lambda text: None))


def test_every_kernel_is_a_valid_model_with_a_name_of_its_own() -> None:
    all_cases = list(cases())
    assert len(all_cases) == len(KERNELS) >= 143
    for case in all_cases:
        onnx.checker.check_model(case.model, full_check=True)
        assert {value.name for value in case.model.graph.input} == set(case.feed)


def test_models_on_the_cpu_need_their_folder(tmp_path: Path) -> None:
    (row,) = cpu.model_rows(tmp_path, ("mnist_conv",), 0.01, lambda text: None)
    assert row.met is None and "mnist_conv_fp32.onnx is not there" in row.measured


def test_a_model_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(cpu.TVM_VARIABLE, raising=False)
    (case,) = cases(("layer_norm",))
    onnx.save(case.model, tmp_path / cpu.MODELS["minilm_encoder"])
    (row,) = cpu.model_rows(tmp_path, ("minilm_encoder",), 0.01, lambda text: None)
    assert row.details["error"] < 1e-5 and row.details["same_top1"]
    assert row.details["cached"] > 0 and row.details["cold"] > 0
    assert cpu.TVM_VARIABLE in row.details["tvm"]


def test_errors_are_relative_to_the_largest_value() -> None:
    a = np.float32([1, -4, np.nan])
    assert cpu.error(a, a) == 0
    assert cpu.error(np.float32([1.5, -4, np.nan]), a) == 0.125
    assert cpu.error(np.float32([1, -4, 0]), a) == cpu.error(a[:2], a) == cpu.error(a.astype(np.float64), a) == np.inf
