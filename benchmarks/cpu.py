"""The speed of the CPU backend beside onnxruntime's, each on one thread.

Both sides run the same model on the same inputs, in turn, in one process; what counts is the processor time of the
fastest of many runs, so that a busy machine hardly matters. A ratio is their time over ours: above 1 we are faster.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

import celosia
from benchmarks import networks
from benchmarks.kernels import cases
from benchmarks.rows import Request, Row, Say, judged, skipped
from benchmarks.workloads import FOLDER_VARIABLE, MADE, WORKLOADS, Missing
from celosia.compiler.tune.kernel_trial import time_alternating
from celosia.driver.runtime import Runtime
from celosia.driver.workstation.oracle import open_session

Array = NDArray[Any]
Feed = dict[str, Array]
MODELS = {
    "squeezenet1_1": "squeezenet1_1_fp32.onnx",
    "pplcnet_orientation": "pplcnet_orientation_fp32.onnx",
    "fer_minixception": "fer_minixception_fp32.onnx",
    "mnist_conv": "mnist_conv_fp32.onnx",
    "minilm_encoder": "minilm_encoder_qdq_s8_matmul.onnx",
}
NETWORKS = ("mobilenet_v2_224", "resnet18_224", "lite", "detector")
"""In float, made by networks.py; each on one thread and on two."""
TVM_VARIABLE = "CELOSIA_TVM_PYTHON"
SETTLING_SECONDS = 5e-3
"""How long no thread may have worked, or waited actively, before a run on several threads is timed."""


@dataclass(frozen=True)
class KernelComparison:
    """ours, theirs: seconds of one run, the processor's where there is one thread. error: see `error`."""

    ours: float
    theirs: float
    error: float
    same_top1: bool
    outputs: list[Array]
    """Ours."""
    expected: list[Array]
    """onnxruntime's."""

    @property
    def ratio(self) -> float:
        """How many times as fast as onnxruntime."""
        return self.theirs / self.ours

    def details(self) -> dict[str, Any]:
        """The numbers of a row."""
        return {"ratio": self.ratio, "ours": self.ours, "theirs": self.theirs, "error": self.error}


def error(found: Array, expected: Array) -> float:
    """The largest difference over the largest expected value; infinite where type, shape or NaNs differ."""
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return float("inf")
    a, b = found.astype(np.float64), expected.astype(np.float64)
    if not np.array_equal(np.isnan(a), np.isnan(b)):
        return float("inf")
    gap = np.abs(np.nan_to_num(a) - np.nan_to_num(b)).max(initial=0)
    return float(gap / max(np.abs(np.nan_to_num(b)).max(initial=0), 1e-30)) if gap else 0.0


def compare(
    model: onnx.ModelProto, feed: Feed, seconds: float, threads: int = 1, records: Path | None = None
) -> KernelComparison:  # fmt: skip
    """Run `model` here and in onnxruntime by turns for about `seconds`, wholly on the CPU. records: schedules of its
    kernels."""
    program = celosia.compile(model, accelerator=False, records=records)
    assert not program.launches
    runtime, theirs = Runtime(program, threads=threads), open_session(model, threads=threads, exact=False)
    names = [value.name for value in theirs.get_outputs()]
    expected = dict(zip(names, theirs.run(names, feed)))
    found = runtime.run(feed).outputs
    gap = max(error(found[name], expected[name]) for name in names)
    top = all(_top1(found[name], expected[name]) for name in names)
    runs = [lambda: runtime.run(feed), lambda: theirs.run(names, feed)]
    if threads == 1:
        best = time_alternating(runs, seconds)
    else:  # the other side's threads wait actively for a while
        best = time_alternating(runs, seconds, clock=time.perf_counter, before=_settled)
    return KernelComparison(best[0], best[1], gap, top, [found[name] for name in names], list(expected.values()))


def _top1(found: Array, expected: Array) -> bool:
    return found.shape == expected.shape and bool(np.array_equal(found.argmax(-1), expected.argmax(-1)))


def _settled(run: Callable[[], object]) -> None:
    """Wait until all threads of this process sleep, then wake those of `run`."""
    worked = 1.0
    while worked > 0.1 * SETTLING_SECONDS:
        before = time.process_time()
        time.sleep(SETTLING_SECONDS)
        worked = time.process_time() - before
    run()


def model_feed(name: str, model: onnx.ModelProto) -> Feed:
    """An image where the model takes one and there is one, else noise."""
    workload = WORKLOADS.get(name)
    rng = np.random.default_rng(0)
    feed: Feed = {}
    for value in model.graph.input:
        image = workload.image(0) if workload else None
        shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        feed[value.name] = rng.standard_normal(shape, np.float32) if image is None else image
    return feed


def tvm_seconds(model: Path, feed: Feed, seconds: float = 3.0) -> tuple[float, list[Array]]:
    """(processor seconds, outputs) of TVM in the Python that the environment variable names. Raises Missing."""
    python = os.environ.get(TVM_VARIABLE)
    if not python:
        raise Missing(f"set {TVM_VARIABLE} to a Python that can import tvm")
    with tempfile.TemporaryDirectory() as folder:
        given, made = Path(folder) / "inputs.npz", Path(folder) / "outputs.npz"
        np.savez(given, **feed)  # type: ignore[arg-type]
        worker = Path(__file__).with_name("tvm_worker.py")
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            [python, str(worker), str(model), str(given), str(made), str(seconds)],
            capture_output=True, text=True, check=False, env=environment,
        )  # fmt: skip
        if done.returncode != 0:
            raise Missing(f"TVM: {(done.stderr.strip().splitlines() or ['failed'])[-1]}")
        with np.load(made) as arrays:
            return float(done.stdout.split()[-1]), [arrays[name] for name in arrays.files]


def cold_and_cached(path: Path) -> Iterator[float]:
    """Processor seconds of compiling for the CPU in a fresh process: with an empty cache, then from it."""
    code = "import sys, time, celosia, celosia.compiler.compile; started = time.process_time(); "
    code += "celosia.compile(sys.argv[1], accelerator=False); print(time.process_time() - started)"
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"CELOSIA_CACHE": folder}
        for _ in range(2):
            done = subprocess.run(
                [sys.executable, "-c", code, str(path)], env=environment, capture_output=True, text=True, check=True
            )
            yield float(done.stdout)


# Rows ------------------------------------------------------------------------------------------------------------

COMMAND = "python -m benchmarks cpu"
SECONDS = 1.0
"""For each kernel or model, unless told otherwise."""
LEAST, GEOMEAN, LEAST_MODEL, LEAST_TVM, TOLERANCE = 0.85, 1.35, 1.0, 1.5, 1e-4
LEAST_NETWORK = {1: 1.0, 2: 0.9}
"""By threads."""


def rows(asked: Request) -> Iterator[Row]:
    """Kernels where not only models are asked for, and models where not only kernels are."""
    seconds = asked.seconds or SECONDS
    if asked.kernels or not asked.models:
        yield from kernel_rows(asked.kernels, seconds, asked.say)
    if asked.models or not asked.kernels:
        yield from model_rows(asked.folder, asked.models, seconds, asked.say)
        yield from network_rows(MADE, asked.models, seconds, asked.say)


def command(seconds: float) -> str:
    """The command that repeats a row, without its name."""
    return COMMAND + ("" if seconds == SECONDS else f" --seconds {seconds:g}")


def kernel_rows(chosen: tuple[str, ...], seconds: float, say: Say) -> Iterator[Row]:
    """A row for each kernel, and one for all."""
    ratios, line = [], command(seconds)
    for case in cases(chosen):
        say(f"kernel {case.name}")
        key, what, own = (
            f"cpu/kernel/{case.name}",
            f"{case.name}: ratio to onnxruntime",
            f"{line} --kernels {case.name}",
        )
        try:
            details = compare(case.model, case.feed, seconds).details()
        except Exception as reason:
            ratios.append(1e-3)
            yield Row(key, what, "", f"failed: {type(reason).__name__}: {reason}", False, own)
            continue
        ratios.append(details["ratio"])
        yield judged(key, what, own, details, f"ratio >= {LEAST}, error <= {case.tolerance}")
    line += f" --kernels {','.join(chosen)}" if chosen else ""
    yield of_all("cpu/kernels", "kernels on the CPU: ratios to onnxruntime, one thread", ratios, line, GEOMEAN)


def of_all(key: str, what: str, ratios: list[float], line: str, geomean: float | None) -> Row:
    """The row of all kernels that have these ratios. geomean: what is asked of it; without it nothing is."""
    slow = sum(ratio < LEAST for ratio in ratios)
    details = {"geomean": float(np.exp(np.mean(np.log(ratios)))), "least": min(ratios), "slow": slow}
    return judged(key, what, line, details, f"geomean >= {geomean}, least >= {LEAST}" if geomean else "")


def model_rows(folder: Path | None, chosen: tuple[str, ...], seconds: float, say: Say) -> Iterator[Row]:
    """A row for each model."""
    for name, file in MODELS.items():
        if chosen and name not in chosen:
            continue
        say(f"{name} on the CPU")
        key, what, line = f"cpu/model/{name}", f"{name} on the CPU, one thread", f"{command(seconds)} --models {name}"
        try:
            if folder is None or not (folder / file).exists():
                raise Missing(f"{file} is not there; give --models-dir or set {FOLDER_VARIABLE}")
            yield _model_row(key, what, line, name, folder / file, seconds)
        except Missing as reason:
            yield skipped(key, what, line, reason)
        except Exception as reason:
            yield Row(key, what, "", f"failed: {type(reason).__name__}: {reason}", False, line)


def network_rows(folder: Path, chosen: tuple[str, ...], seconds: float, say: Say) -> Iterator[Row]:
    """Two rows for each of NETWORKS: on one thread, and on two."""
    for name in NETWORKS:
        if chosen and name not in chosen:
            continue
        model = onnx.load(networks.cached(name, folder, floats=True))
        feed = model_feed(name, model)
        for threads, least in LEAST_NETWORK.items():
            say(f"{name} on the CPU, {threads} thread(s)")
            details = compare(model, feed, seconds, threads).details()
            key, what = f"cpu/network/{name}/{threads}", f"{name} in float on the CPU, {threads} thread(s)"
            line = f"{command(seconds)} --models {name}"
            yield judged(key, what, line, details, f"ratio >= {least}, error <= {TOLERANCE}")


def _model_row(key: str, what: str, line: str, name: str, path: Path, seconds: float) -> Row:
    model = onnx.load(path)
    feed = model_feed(name, model)
    result = compare(model, feed, seconds)
    cold, cached = cold_and_cached(path)
    details = result.details() | {"same_top1": result.same_top1, "cold": cold, "cached": cached}
    asked = f"ratio >= {LEAST_MODEL}"
    try:
        peer, outputs = tvm_seconds(path, feed)
        details |= {"over_tvm": peer / result.ours, "error_of_tvm": max(map(error, outputs, result.expected))}
        asked += f", over_tvm >= {LEAST_TVM}"
    except Missing as reason:
        details["tvm"] = str(reason)
    if any(node.op_type == "QuantizeLinear" for node in model.graph.node):
        details["error"], bound = _between_quantisations(model, feed, result)
        asked += f", error <= {bound}"
    else:
        asked += f", error <= {TOLERANCE}, same_top1 >= 1"
    return judged(key, what, line, details, asked)


def _between_quantisations(model: onnx.ModelProto, feed: Feed, result: KernelComparison) -> tuple[float, float]:
    """(error, bound) of a model whose floats are quantised again: a last bit there moves a result by a whole step.

    onnxruntime's own results differ with its optimisations. The bound is by how much; the error is that to the nearer.
    """
    plain = open_session(model, "DISABLE_ALL", threads=1).run(None, feed)
    own = max(map(error, plain, result.expected))
    return min(result.error, max(map(error, result.outputs, plain))), max(own, TOLERANCE)
