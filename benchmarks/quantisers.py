"""Compare what quantisers make of six small networks under celosia and onnxruntime: `python -m benchmarks quantisers`.

Each quantiser runs in an environment of its own in the cache folder, since they pin versions that exclude each other.
An environment sees the packages of this one behind its own, so that there is one PyTorch. A quantiser that cannot be
installed, and a network that it cannot quantise, are counted and are no fault of celosia.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto

import celosia
from benchmarks.quantise_worker import QUANTISERS
from benchmarks.rows import ROOT, Request, Row, different
from celosia.cache import cache_folder
from celosia.driver.cli.errors import FAULT, exit_code_and_message
from celosia.driver.runtime import Runtime
from celosia.driver.workstation.oracle import open_session
from celosia.hw.spec.config import Config

WORKER = Path(__file__).with_name("quantise_worker.py")
NETWORKS = ("resnet", "mobilenet", "detector", "transformer", "unet", "recurrent")
PACKAGES: dict[str, tuple[str, ...]] = {
    "onnxruntime": (),
    "torchao": (),
    "onnxconverter-common": ("onnxconverter-common==1.16.0",),
    "quark": ("amd-quark==0.13",),
    "modelopt": ("nvidia-modelopt[onnx]==0.47.0",),
    "nncf": ("nncf==3.4.0",),
    "neural-compressor": ("onnx-neural-compressor==1.0", "prettytable==3.16.0", "transformers>=4.50,<6"),
    "olive": ("olive-ai==0.13.0", "requests"),
    "brevitas": ("brevitas==0.13.4", "onnxoptimizer"),
    "aimet": ("hvplot", "osqp", "pandas", "scikit-learn", "jsonschema", "pybind11"),
}
"""Packages that pip installs for each quantiser; none where this environment has them."""
ALONE = {"aimet": ("aimet-onnx==2.42.0", "onnx2torch==1.5.15")}
"""Installed without what they need: the rest would bring another PyTorch."""
SAMPLES = 2
"""Inputs that each model runs on."""
RELATIVE, RELATIVE_HALF = 1e-5, 2e-3
"""The largest difference of floats, of the largest value: of a model without and with float16."""
WRONG, REFUSED, FAULTY, RIGHT, DOCUMENTED = "wrong", "refused", "fault", "right", "documented"


@dataclass(frozen=True)
class QuantiserVerdict:
    """The verdict on a model. kind: WRONG, REFUSED, FAULTY, RIGHT, or DOCUMENTED, which differs from onnxruntime's as
    docs/numerics.md says, next to ties. why: a sentence where it is not right."""

    kind: str
    why: str = ""


def environment(quantiser: str, folder: Path) -> Path:
    """The Python of a quantiser, made in `folder` where it is not there. RuntimeError with pip's last line where it
    cannot be installed."""
    if not PACKAGES[quantiser]:
        return Path(sys.executable)
    place = folder / quantiser
    python = place / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    ready = place / "installed"
    wanted = "\n".join((*PACKAGES[quantiser], *ALONE.get(quantiser, ())))
    if ready.exists() and ready.read_text(encoding="utf-8") == wanted:
        return python
    venv.create(place, with_pip=True, clear=True, symlinks=True)
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    (Path(site) / "behind.pth").write_text(sysconfig.get_paths()["purelib"], encoding="utf-8")
    pip = [str(python), "-m", "pip", "install", "--quiet", "--no-input", "--disable-pip-version-check"]
    for how, packages in (([], PACKAGES[quantiser]), (["--no-deps"], ALONE.get(quantiser, ()))):
        if packages:
            done = subprocess.run([*pip, *how, *packages], capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"pip: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    ready.write_text(wanted, encoding="utf-8")
    return python


def prepare(folder: Path, networks: Sequence[str]) -> None:
    """Write the float models of `networks` and their samples to `folder`. ImportError without PyTorch."""
    from benchmarks.quantiser_networks import export, network

    folder.mkdir(parents=True, exist_ok=True)
    for name in networks:
        model, samples = network(name)
        np.savez(folder / f"{name}.npz", x=samples.numpy())
        export(model, samples[0], folder / f"{name}.onnx")


def judged(path: Path, samples: NDArray[np.float32], config: str) -> QuantiserVerdict:
    """Compare a model under celosia, on the functional simulator, with onnxruntime on one thread."""
    proto = onnx.load(path)
    kind = proto.graph.input[0].type.tensor_type.elem_type
    feeds = [{proto.graph.input[0].name: x.astype(onnx.helper.tensor_dtype_to_np_dtype(kind))} for x in samples]
    try:
        oracle = open_session(path, threads=1)
        expected = [oracle.run(None, feed) for feed in feeds]
    except Exception as error:  # onnxruntime raises many classes
        return QuantiserVerdict(REFUSED, f"onnxruntime: {str(error).splitlines()[0]}")
    try:
        with Runtime(celosia.compile(path, config), "functional") as runtime:
            found = [list(runtime.run(feed).outputs.values()) for feed in feeds]
    except Exception as error:
        code, why = exit_code_and_message(error)
        return QuantiserVerdict(FAULTY if code == FAULT else REFUSED, why)
    share = RELATIVE_HALF if has_half(proto) else RELATIVE
    pairs = [pair for mine, theirs in zip(found, expected) for pair in zip(mine, theirs, strict=True)]
    found_wrong = next((verdict for pair in pairs if (verdict := _compared(*pair, share)).kind != RIGHT), None)
    return QuantiserVerdict(RIGHT) if found_wrong is None else _excused(found_wrong, proto, feeds, config)


def _excused(
    verdict: QuantiserVerdict, proto: onnx.ModelProto, feeds: list[dict[str, Any]], config: str
) -> QuantiserVerdict:
    """`verdict`, or DOCUMENTED where each stretch between two quantised tensors is right on its own."""
    sys.path.append(str(ROOT / "tests"))
    from fuzz.models import judge  # with ONNX's reference, which takes a second
    from fuzz.models.case import Case

    alone = judge.judge(Case("quantiser", proto, tuple(feeds), Config.load(config)))
    if alone.what in (judge.EQUAL, judge.DOCUMENTED):
        return QuantiserVerdict(DOCUMENTED, f"{verdict.why}; {', '.join(alone.exclusions) or 'rounding of floats'}")
    return QuantiserVerdict(verdict.kind, f"{verdict.why}; {alone.why}")


def has_half(proto: onnx.ModelProto) -> bool:
    """Whether a model computes in float16 or bfloat16 anywhere."""
    half = {TensorProto.FLOAT16, TensorProto.BFLOAT16}
    attributes = [each for node in proto.graph.node for each in node.attribute]
    types = [each.data_type for each in proto.graph.initializer]
    types += [each.type.tensor_type.elem_type for each in (*proto.graph.input, *proto.graph.output)]
    types += [each.t.data_type for each in attributes] + [each.i for each in attributes if each.name == "to"]
    return not half.isdisjoint(types)


def _compared(mine: NDArray[np.generic], theirs: NDArray[np.generic], share: float) -> QuantiserVerdict:
    if not np.issubdtype(theirs.dtype, np.floating):
        count = different(mine, theirs)
        return QuantiserVerdict(WRONG, f"{count} of {theirs.nbytes} bytes differ") if count else QuantiserVerdict(RIGHT)
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return QuantiserVerdict(
            WRONG, f"{mine.dtype}{list(mine.shape)} where {theirs.dtype}{list(theirs.shape)} is right"
        )
    off = np.abs(mine.astype(np.float64) - theirs.astype(np.float64)).max(initial=0)
    largest = np.abs(theirs.astype(np.float64)).max(initial=0)
    if off <= share * largest or np.array_equal(mine, theirs, equal_nan=True):
        return QuantiserVerdict(RIGHT)
    return QuantiserVerdict(WRONG, f"off by {off / largest if largest else off:.2e} of the largest")


def rows(asked: Request, folder: Path | None = None) -> Iterator[Row]:
    """One row for each quantiser. folder: where models and environments are kept (default: in the cache folder)."""
    quantisers = [name for name in asked.models if name in PACKAGES] or QUANTISERS
    networks = [name for name in asked.models if name in NETWORKS] or NETWORKS
    folder, config, say = folder or cache_folder() / "quantisers", asked.preset, asked.say
    models = folder / "models"
    say("writing the float networks")
    try:
        prepare(models, networks)
    except ImportError as error:
        why = f"skipped: {error}: `make torch` installs PyTorch"
        yield Row("quantisers", "quantisers", _TARGET, why, None, _COMMAND)
        return
    for quantiser in quantisers:
        say(f"{quantiser}: installing and quantising")
        command = f"{_COMMAND} --models {quantiser}"
        what = f"{quantiser}, {len(QUANTISERS[quantiser])} options, {len(networks)} networks"
        try:
            python = environment(quantiser, folder / "environments")
        except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
            yield Row(f"quantisers/{quantiser}", what, _TARGET, f"skipped: not installed: {error}", None, command)
            continue
        command_line = [str(each) for each in (python, WORKER, quantiser, models, ",".join(networks))]
        with tempfile.TemporaryDirectory() as place:  # quantisers write reports to where they run
            done = subprocess.run(command_line, cwd=place, capture_output=True, text=True, check=False)
        yield _row(quantiser, what, models, networks, config, command, done.stderr, say)


_COMMAND, _TARGET = "python -m benchmarks quantisers", "0 wrong, 0 faults"


def _row(
    quantiser: str, what: str, models: Path, networks: Sequence[str], config: str, command: str, stderr: str,
    say: Callable[[str], None],
) -> Row:  # fmt: skip
    counts: Counter[str] = Counter()
    findings: dict[str, str] = {}
    for option in QUANTISERS[quantiser]:
        for name in networks:
            path = models / quantiser / option / f"{name}.onnx"
            if not path.exists():
                counts["not quantised"] += 1
                reason = path.with_suffix(".txt")
                findings[f"{option}/{name}"] = reason.read_text(encoding="utf-8") if reason.exists() else stderr[-300:]
                continue
            say(f"{quantiser}: {option} of {name}")
            verdict = judged(path, np.load(models / f"{name}.npz")["x"][:SAMPLES], config)
            counts[verdict.kind] += 1
            if verdict.why:
                findings[f"{option}/{name}"] = f"{verdict.kind}: {verdict.why}"
    order = (RIGHT, DOCUMENTED, WRONG, FAULTY, REFUSED, "not quantised")
    measured = ", ".join(f"{counts[kind]} {kind}" for kind in order)
    met = None if not counts.total() - counts[REFUSED] - counts["not quantised"] else not counts[WRONG] + counts[FAULTY]
    details = {kind.replace(" ", "_"): counts[kind] for kind in order} | {"findings": findings, "config": config}
    return Row(f"quantisers/{quantiser}", what, _TARGET, measured, met, command, details)
