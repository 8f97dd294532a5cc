"""Accuracy and speed on data sets: counts, formats of data sets, and work shared by batches and devices."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from driver_models import quantised
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from small_models import Builder

import celosia
from celosia.compiler.graph.errors import ModelError
from celosia.compiler.program import InputError
from celosia.compiler.program.host.op import HostError
from celosia.driver.accuracy.evaluate import evaluate
from celosia.driver.data.calibration import CalibrationError, Input
from celosia.driver.data.dataset import open_dataset
from celosia.driver.run.program_runtime import ProgramRuntime
from celosia.driver.runtime import Runtime
from celosia.hw.spec.config import Config
from celosia.sim.rtl.rtlsim import RtlDevice

Array = NDArray[Any]
X = [Input("x", np.dtype(np.float32), (1, 3))]
COUNT = 37


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model from images [1, 3, 8, 8] to 10 classes."""
    b = Builder("qdq", np.int8, seed=8)
    x = b.conv(b.input([1, 3, 8, 8]), 8, (3, 3), strides=(2, 2), pads=(1, 1, 1, 1))
    b.output(b.matmul(b.flatten(b.global_average(x)), 10), real=True)
    path = tmp_path_factory.mktemp("classifier") / "classifier.onnx"
    onnx.save(b.model(), path)
    return path


@pytest.fixture(scope="module")
def samples() -> dict[str, Array]:
    rng = np.random.default_rng(0)
    return {"input_1": (rng.standard_normal((COUNT, 3, 8, 8)) * 4).astype(np.float32)}


def by_hand(path: Path, samples: dict[str, Array], config: str | Config = "tiny") -> Array:
    """Return the scores of a plain loop over samples."""
    runtime = Runtime(celosia.compile(path, config))
    rows = [runtime.run({"input_1": image[None]}).outputs for image in samples["input_1"]]
    return np.concatenate([next(iter(row.values())) for row in rows])


@pytest.mark.parametrize("config", ["tiny", "pynq", Config(batch=2, block_in=8, block_out=4, inp_depth=256)])
@pytest.mark.parametrize("device", ["functional", "timed"])
def test_what_it_counts_is_what_a_loop_counts(
    classifier: Path, samples: dict[str, Array], config: str | Config, device: str
) -> None:
    scores = by_hand(classifier, samples, config)
    order = np.argsort(-scores, axis=1, kind="stable")
    labels = order[np.arange(COUNT), np.arange(COUNT) % 7]  # each sample's best class, second best, and so on
    ties = [len(np.unique(row)) < 10 for row in scores]
    messages: list[tuple[int, int]] = []
    report = evaluate(
        classifier, samples, labels, config=config, device=device, count=lambda *done: messages.append(done), workers=1
    )
    assert report["samples"] == COUNT and report["batch"] == (16 if device == "functional" else 1)
    assert report["top1"] == np.mean([order[k, 0] == label for k, label in enumerate(labels)])
    assert report["top5"] == np.mean([label in order[k, :5] for k, label in enumerate(labels)])
    assert 0 < report["top1"] < report["top5"] < 1 or any(ties)
    assert messages[-1] == (COUNT, COUNT) and [done for done, _ in messages] == sorted(done for done, _ in messages)
    assert (report["cycles"] is None) == (device == "functional")
    json.dumps(report)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_samples_stay_in_order_on_several_devices(
    classifier: Path, samples: dict[str, Array], workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ProgramRuntime.run

    def delayed(self: Runtime, *args: Any, **options: Any) -> Any:
        time.sleep(0.01 * (threading.get_ident() % 3))
        return run(self, *args, **options)

    labels = by_hand(classifier, samples).argmax(1)
    monkeypatch.setattr(ProgramRuntime, "run", delayed)
    report = evaluate(classifier, samples, labels, config="tiny", device="timed", workers=workers)
    assert report["top1"] == 1.0 and report["workers"] == workers


@pytest.mark.rtl
def test_rtl_simulators_run_beside_each_other(
    classifier: Path, samples: dict[str, Array], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two RTL simulators run at the same time: each of the first two runs waits for the other."""
    together, run, seen = threading.Barrier(2, timeout=60), RtlDevice.run, itertools.count()

    def waiting(self: RtlDevice, *args: Any, **options: Any) -> Any:
        if next(seen) < 2:
            together.wait()
        return run(self, *args, **options)

    monkeypatch.setattr(RtlDevice, "run", waiting)
    few = {name: array[:5] for name, array in samples.items()}
    labels = by_hand(classifier, few).argmax(1)
    report = evaluate(classifier, few, labels, config="tiny", device="rtl", workers=2)
    timed = evaluate(classifier, few, labels, config="tiny", device="timed")
    assert report["top1"] == 1.0 and report["workers"] == 2
    assert report["cycles"] == pytest.approx(timed["cycles"], rel=0.05)


@pytest.mark.rtl
def test_as_many_simulators_as_processors_find_what_one_finds(
    classifier: Path, samples: dict[str, Array], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One, two and three simulators give the same bytes (onnxruntime's), classes and cycles."""
    pytest.importorskip("onnxruntime")
    few = {name: array[:11] for name, array in samples.items()}
    labels = by_hand(classifier, few).argmax(1)
    labels[::3] = (labels[::3] + 1) % 10  # a sample in another's place has another label
    opened: set[Runtime] = set()
    original = ProgramRuntime.open
    monkeypatch.setattr(ProgramRuntime, "open", lambda self: (opened.add(self), original(self))[1])
    reports = []
    for count in (1, 2, 3):
        monkeypatch.setattr("celosia.driver.accuracy.evaluate.processors", lambda count=count: count)
        opened.clear()
        report = evaluate(classifier, few, labels, config="tiny", device="rtl", against=True, quiet=True)
        assert (report["workers"], len(opened)) == (count, count)
        assert report["against"]["bytes"] == 11 * 40
        for message in (report, report["against"]):
            for name in [name for name in message if "second" in name or name == "workers"]:
                del message[name]
        reports.append(report)
    assert reports[0] == reports[1] == reports[2]
    assert reports[0]["against"]["bytes_different"] == 0 and reports[0]["cycles"] > 0
    assert reports[0]["top1"] == 7 / 11


def test_a_program_is_run_as_it_is(classifier: Path, samples: dict[str, Array], tmp_path: Path) -> None:
    celosia.compile(classifier, "tiny").save(tmp_path / "program")
    labels = by_hand(classifier, samples).argmax(1)
    report = evaluate(tmp_path / "program", samples, labels)
    assert (report["top1"], report["batch"], report["config"]["block_in"]) == (1.0, 1, 4)
    with pytest.raises(ModelError, match="give the ONNX model to compare"):
        evaluate(tmp_path / "program", samples, against=True)


def test_agreement_with_onnxruntime(
    classifier: Path, samples: dict[str, Array], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime")
    labels = by_hand(classifier, samples).argmax(1)
    outcome = evaluate(classifier, samples, labels, config="tiny", against=True)["against"]
    assert (outcome["differ"], outcome["bytes_different"], outcome["top1"], outcome["top1_agreement"]) == (
        0,
        0,
        1.0,
        1.0,
    )
    assert outcome["bytes"] == COUNT * 40 and outcome["images_per_second"] > 0
    run = ProgramRuntime.run

    def broken(self: Runtime, *args: Any, **options: Any) -> Any:
        result = run(self, *args, **options)
        for array in result.outputs.values():
            array[0] = array[0][::-1]
        return result

    monkeypatch.setattr(ProgramRuntime, "run", broken)
    wrong = evaluate(classifier, samples, labels, config="tiny", against=True)["against"]
    assert wrong["differ"] > COUNT // 20 and wrong["bytes_different"] > 0 and wrong["top1_agreement"] < 1
    assert wrong["top1"] == 1.0  # onnxruntime's own


def _mixing(folder: Path) -> Path:
    """Return a model that subtracts the mean over the batch, so that images of a batch affect each other."""
    model = quantised()
    graph, arguments = model.graph, model.graph.input[0].name
    mean = helper.make_node("ReduceMean", [arguments], ["mean"], axes=[0], keepdims=1)
    graph.node.insert(0, helper.make_node("Sub", [arguments, "mean_scaled"], ["centred"]))
    graph.node.insert(0, helper.make_node("Mul", ["mean", "half"], ["mean_scaled"]))
    graph.node.insert(0, mean)
    graph.initializer.append(numpy_helper.from_array(np.float32(0.5), "half"))
    for node in graph.node[3:]:
        node.input[:] = ["centred" if name == arguments else name for name in node.input]
    onnx.save(model, folder / "mixing.onnx")
    return folder / "mixing.onnx"


def test_images_that_would_see_each_other_run_alone(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    images = {"input_1": (rng.standard_normal((20, 3, 8, 8)) * 4).astype(np.float32)}
    path = _mixing(tmp_path)
    assert evaluate(path, images, config="tiny")["batch"] == 1
    onnx.save(quantised(), tmp_path / "usual.onnx")
    assert evaluate(tmp_path / "usual.onnx", images, config="tiny")["batch"] == 16


def test_a_dynamic_batch_becomes_the_samples(classifier: Path, samples: dict[str, Array], tmp_path: Path) -> None:
    model = onnx.load(classifier)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    del model.graph.value_info[:]
    onnx.save(model, tmp_path / "dynamic.onnx")
    labels = by_hand(classifier, samples).argmax(1)
    assert evaluate(tmp_path / "dynamic.onnx", samples, labels, config="tiny")["top1"] == 1.0


def test_an_output_without_classes_has_no_accuracy(samples: dict[str, Array], tmp_path: Path) -> None:
    b = Builder("qdq", np.int8, seed=8)
    b.output(b.conv(b.input([1, 3, 8, 8]), 8, (3, 3)), real=True)
    onnx.save(b.model(), tmp_path / "m.onnx")
    report = evaluate(tmp_path / "m.onnx", samples, np.zeros(COUNT, np.int64), config="tiny")
    assert (report["top1"], report["top5"]) == (None, None) and report["images_per_second"] > 0


def test_a_label_that_is_no_class(classifier: Path, samples: dict[str, Array]) -> None:
    labels = np.zeros(COUNT, np.int64)
    labels[5] = 10
    with pytest.raises(InputError, match=r"sample 5.*label 10.*10 classes"):
        evaluate(classifier, samples, labels, config="tiny")


@pytest.mark.parametrize(("device", "batches"), [("functional", 2), ("timed", 0)])
def test_samples_that_fail_are_left_out(device: str, batches: int, tmp_path: Path) -> None:
    """A sample that fails or cannot be read is left out and reported; the others of its batch count."""
    x, y = (helper.make_tensor_value_info(*info) for info in (("x", TensorProto.INT64, [1, 1]), ("y", 1, [1, 20])))
    none, one = (numpy_helper.from_array(np.full((1, size), size == 1, np.float32), f"{size}") for size in (20, 1))
    nodes = [
        helper.make_node("Cast", ["x"], ["float"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["float", "20"], ["none"]),
        helper.make_node("Pow", ["1", "float"], ["one"]),
        helper.make_node("ScatterElements", ["none", "x", "one"], ["y"], axis=1),
    ]
    graph = helper.make_graph(nodes, "g", [x], [y], [none, one])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), tmp_path / "one_hot.onnx")
    (folder := tmp_path / "samples").mkdir()
    for number in range(20):
        np.save(folder / f"{number:02}.npy", np.array([[77 if number == 17 else number]]))
    (folder / "18.npy").write_text("no array")
    labels, progress = np.array([1, *range(1, 20)]), list[tuple[int, int]]()  # the first label is wrong
    report = evaluate(
        tmp_path / "one_hot.onnx", folder, labels, device=device, config="tiny", count=lambda *n: progress.append(n)
    )
    assert (report["samples"], report["batch"], report["top1"], len(progress)) == (18, 1, 17 / 18, 20 + batches)
    assert progress[-1] == (20, 20)
    first, second = report["failed"]
    assert first.startswith("sample 17: ") and "outside of an axis of 20" in first
    assert second.startswith("sample 18: ") and "18.npy" in second
    for number in range(20):
        np.save(folder / f"{number:02}.npy", np.array([[77]]))
    with pytest.raises(HostError, match="sample 0: "):
        evaluate(tmp_path / "one_hot.onnx", folder, config="tiny", device=device)


# Data sets ------------------------------------------------------------------------------------------------------


def files(folder: Path, names: list[str]) -> Iterator[Path]:
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        np.save(folder / name, np.full((1, 3), number, np.float32))
        yield folder / name


def test_classes_are_folders(tmp_path: Path) -> None:
    assert len(list(files(tmp_path, ["cat/b.npy", "cat/a.npy", "dog/c.npy"]))) == 3
    result = open_dataset(tmp_path, X)
    assert [int(sample["x"][0, 0]) for sample in result.samples] == [1, 0, 2]
    assert result.labels is not None and result.labels.tolist() == [0, 0, 1]


def test_folders_may_be_numbers(tmp_path: Path) -> None:
    assert len(list(files(tmp_path, ["10/b.npy", "9/a.npy"]))) == 2
    result = open_dataset(tmp_path, X)
    assert result.labels is not None and result.labels.tolist() == [9, 10]
    assert [int(sample["x"][0, 0]) for sample in result.samples] == [1, 0]


def test_labels_in_a_text(tmp_path: Path) -> None:
    assert len(list(files(tmp_path / "data", ["b.npy", "a.npy"]))) == 2
    (tmp_path / "in order.txt").write_text("7\n\n3\n")
    (tmp_path / "named.csv").write_text("b.npy,7\na.npy, 3\n")
    for name, labels in (("in order.txt", [7, 3]), ("named.csv", [3, 7])):
        result = open_dataset(tmp_path / "data", X, tmp_path / name)
        assert result.labels is not None and result.labels.tolist() == labels


def test_labels_in_an_archive_and_fewer_samples(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=np.arange(30, dtype=np.float32).reshape(10, 3), labels=np.arange(10))
    result = open_dataset(tmp_path / "d.npz", X, limit=4)
    assert result.labels is not None and result.labels.tolist() == [0, 3, 6, 9]
    assert [int(sample["x"][0, 0]) for sample in result.samples] == [0, 9, 18, 27]
    assert open_dataset({"x": np.zeros((2, 3), np.float32)}, X).labels is None


def _nothing(folder: Path) -> None:
    pass


def _few(folder: Path) -> None:
    np.savez(folder / "d.npz", x=np.zeros((2, 3), np.float32), labels=np.zeros(3, np.int64))


def _fractions(folder: Path) -> None:
    np.savez(folder / "d.npz", x=np.zeros((2, 3), np.float32), labels=np.zeros(2, np.float32))


def _words(folder: Path) -> None:
    np.savez(folder / "d.npz", x=np.zeros((2, 3), np.float32))
    (folder / "l.txt").write_text("cat\ndog\n")


def _empty(folder: Path) -> None:
    (folder / "d.npz").mkdir()


WRONG: dict[str, tuple[Callable[[Path], None], bool, str]] = {
    "no data": (_nothing, False, "there is no folder or file .* with samples"),
    "too many labels": (_few, False, r"labels are int64\[3\]; 2 samples need as many whole numbers"),
    "labels that are no numbers of classes": (_fractions, False, r"labels are float32\[2\]"),
    "labels in words": (_words, True, "l.txt, line 1: 'cat' is not LABEL or FILE LABEL"),
    "no file of labels": (lambda folder: _few(folder), True, "there is no file .*l.txt with labels"),
    "an empty folder": (_empty, False, "holds no samples"),
}


@pytest.mark.parametrize("what", WRONG)
def test_data_that_is_wrong(tmp_path: Path, what: str) -> None:
    prepare, labels, words = WRONG[what]
    prepare(tmp_path)
    with pytest.raises((InputError, CalibrationError), match=words):
        open_dataset(tmp_path / "d.npz", X, tmp_path / "l.txt" if labels else None)


def test_a_file_without_a_label(tmp_path: Path) -> None:
    assert len(list(files(tmp_path / "data", ["b.npy", "a.npy"]))) == 2
    (tmp_path / "l.txt").write_text("b.npy 7\n")
    with pytest.raises(InputError, match=r"l\.txt.*label.*a\.npy"):
        open_dataset(tmp_path / "data", X, tmp_path / "l.txt")


def test_sequences_are_no_samples(tmp_path: Path) -> None:
    kind = helper.make_sequence_type_proto(helper.make_tensor_type_proto(TensorProto.FLOAT, [2]))
    graph = helper.make_graph(
        [helper.make_node("SequenceLength", ["s"], ["n"])], "g", [helper.make_value_info("s", kind)],
        [helper.make_tensor_value_info("n", TensorProto.INT64, [])],
    )  # fmt: skip
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), tmp_path / "s.onnx")
    with pytest.raises(InputError, match=r"'s'.*sequence"):
        evaluate(tmp_path / "s.onnx", {"s": np.zeros((1, 2), np.float32)})
