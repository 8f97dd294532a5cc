"""The section `quantisers`: its judge finds planted faults, its tables agree, and environments are created once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from benchmarks import quantise_worker, quantisers
from benchmarks.quantisers import FAULTY, REFUSED, RIGHT, WRONG
from benchmarks.rows import Request
from onnx import numpy_helper

from celosia.driver.workstation import oracle
from celosia.driver.workstation.oracle import OracleError

ort = pytest.importorskip("onnxruntime")


def saved(folder: Path, text: str, **arrays: Any) -> Path:
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> g {text}')
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(array), n) for n, array in arrays.items())
    onnx.save(model, folder / "model.onnx")
    return folder / "model.onnx"


SAMPLES = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 1, 4)


def test_a_right_model(tmp_path: Path) -> None:
    path = saved(tmp_path, "(float[1, 4] x) => (float[1, 4] y) { y = Tanh (x) }")
    assert quantisers.judged(path, SAMPLES, "tiny").kind == RIGHT


def test_planted_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The judge tells apart wrong outputs, an error without a sentence, and one with a sentence."""
    path = saved(tmp_path, "(float[1, 4] x) => (float[1, 4] y) { y = Tanh (x) }")
    other = tmp_path / "other"
    other.mkdir()
    wrong = saved(other, "(float[1, 4] x) => (float[1, 4] y) { z = Tanh (x) y = Mul (z, f) }", f=np.float32(1.0001))
    compiled = quantisers.celosia.compile
    monkeypatch.setattr(quantisers.celosia, "compile", lambda path, config: compiled(wrong, config))
    verdict = quantisers.judged(path, SAMPLES, "tiny")
    assert verdict.kind == WRONG and "1.00e-04 of the largest" in verdict.why
    for error, kind in ((KeyError("x"), FAULTY), (OracleError("a sentence"), REFUSED)):

        def failing(path: Path, config: str, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(quantisers.celosia, "compile", failing)
        assert quantisers.judged(path, SAMPLES, "tiny").kind == kind


def test_integers_are_compared_by_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "(float[1, 4] x) => (int8[1, 4] y) {{ y = QuantizeLinear (x, s, z) {} }}"
    path = saved(tmp_path, text.format(""), s=np.float32(0.01), z=np.int8(0))
    assert quantisers.judged(path, SAMPLES, "tiny").kind == RIGHT
    other = tmp_path / "other"
    other.mkdir()
    wrong = saved(other, text.format(""), s=np.float32(0.0101), z=np.int8(0))
    compiled = quantisers.celosia.compile
    monkeypatch.setattr(quantisers.celosia, "compile", lambda path, config: compiled(wrong, config))
    assert quantisers.judged(path, SAMPLES, "tiny").kind == WRONG


def test_what_onnxruntime_refuses_is_no_fault(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17, "com.vai.quantize" : 1]> g (float[1, 4] x) => (float[1, 4] y) '
        "{ y = com.vai.quantize.FixNeuron (x) }"
    )
    onnx.save(model, tmp_path / "model.onnx")
    verdict = quantisers.judged(tmp_path / "model.onnx", SAMPLES, "tiny")
    assert verdict.kind == REFUSED and verdict.why.startswith("onnxruntime: ")


def test_float16_anywhere(tmp_path: Path) -> None:
    for body, half in (("y = Tanh (x)", False), ("z = Cast <to = 10> (x) y = Cast <to = 1> (z)", True)):
        path = saved(tmp_path, f"(float[1, 4] x) => (float[1, 4] y) {{ {body} }}")
        assert quantisers.has_half(onnx.load(path)) == half


def test_the_tables_agree() -> None:
    assert set(quantisers.PACKAGES) == set(quantise_worker.QUANTISERS) >= set(quantisers.ALONE)
    assert len(quantise_worker.QUANTISERS) >= 8
    networks = pytest.importorskip("benchmarks.quantiser_networks", reason="PyTorch is not installed")
    assert set(quantisers.NETWORKS) == set(networks.NETWORKS)


def test_the_worker_notes_what_a_quantiser_cannot_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(task: quantise_worker.Task) -> None:
        task.save(task.loaded())

    def fails(task: quantise_worker.Task) -> None:
        raise RuntimeError("\n  no such layer\nmore")

    monkeypatch.setitem(quantise_worker.QUANTISERS, "mine", {"copy": half, "fails": fails})
    saved(tmp_path, "(float[1, 4] x) => (float[1, 4] y) { y = Tanh (x) }").rename(tmp_path / "net.onnx")
    np.savez(tmp_path / "net.npz", x=SAMPLES)
    monkeypatch.setattr(sys, "path", [*sys.path])
    quantise_worker.main("mine", tmp_path, ["net"])
    assert (tmp_path / "mine" / "copy" / "net.onnx").exists()
    assert (tmp_path / "mine" / "fails" / "net.txt").read_text() == "RuntimeError:   no such layer"
    row = quantisers._row("mine", "mine", tmp_path, ["net"], "tiny", "", "", lambda text: None)
    assert row.met and row.measured == "1 right, 0 documented, 0 wrong, 0 fault, 0 refused, 1 not quantised"
    assert list(row.details["findings"]) == ["fails/net"]


def test_what_cannot_be_installed_is_a_skipped_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(quantiser: str, folder: Path) -> Path:
        raise RuntimeError("pip: no matching distribution")

    monkeypatch.setattr(quantisers, "environment", failing)
    monkeypatch.setattr(quantisers, "prepare", lambda folder, networks: None)
    (row,) = quantisers.rows(Request(models=("nncf", "unet"), config="tiny"), tmp_path)
    assert row.met is None and row.measured == "skipped: not installed: pip: no matching distribution"


def test_this_environment_needs_no_other(tmp_path: Path) -> None:
    assert quantisers.environment("onnxruntime", tmp_path) == Path(sys.executable)
    assert not list(tmp_path.iterdir())


def test_the_worker_needs_no_celosia() -> None:
    code = "import sys; import quantise_worker; assert not [m for m in sys.modules if m.startswith('celosia')]"
    folder = Path(quantise_worker.__file__).parent
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True)


def test_tensors_of_four_bits_are_not_asked_for() -> None:
    """All tensors but those of four bits are compared, which onnxruntime computes but cannot return."""
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]>
        g (float[4, 4] x) => (float[4, 4] y) <float s = {0.5}, int4 z = {0}> {
            q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) y = Neg(d) }""")
    x = np.arange(16, dtype=np.float32).reshape(4, 4) / 4
    tensors = oracle.run_session(oracle.open_session(oracle.expose_tensors(model), "DISABLE_ALL"), {"x": x})
    assert set(tensors) == {"d", "y"} and np.array_equal(tensors["y"], -tensors["d"])
