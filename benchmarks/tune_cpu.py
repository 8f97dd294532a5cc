"""Kernels of the CPU tuned, beside onnxruntime's and the compiler's own.

    python -m benchmarks tune_cpu [--kernels NAMES] [--models NAMES] [--full]

Trials are kept in bench/tune, one file for each kind of processor, so that an interrupted run goes on where it was.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

from benchmarks import networks
from benchmarks.cpu import MODELS, NETWORKS, TOLERANCE, KernelComparison, Say, compare, model_feed
from benchmarks.kernels import FLOAT, TYPICAL, TimedKernel, cases
from benchmarks.rows import ROOT, Row
from benchmarks.workloads import MADE
from celosia.compiler.compile import compile as compile_model
from celosia.compiler.cpu.schedule import schedule
from celosia.compiler.cpu.schedule.chosen import Choices, KernelWorkload, choosing
from celosia.compiler.tune.kernels.plan import KernelPlan
from celosia.compiler.tune.kernels.schedules import examined, template
from celosia.compiler.tune.kernels.trial import processor
from celosia.compiler.tune.kernels.tuner import KernelTuner
from celosia.compiler.tune.pool import Fleet
from celosia.compiler.tune.records import Records
from celosia.driver.tune.cpu import tune_cpu

COMMAND = "python -m benchmarks tune_cpu"
LEAST, GEOMEAN, LEAST_MODEL, WITHIN = 0.85, 1.25, 1.1, 0.05
S8S8 = ("quantised_conv_1x1", "quantised_conv_3x3", "quantised_conv_depthwise", "quantised_matmul")
"""Signed bytes times signed bytes, for which onnxruntime has no fast path: counted apart."""
BOTH = ("gemm_64", "conv_3x3_small_image", "conv_depthwise", "softmax_narrow")
"""Kernels that are tuned with and without the template."""


@dataclass(frozen=True)
class TuningSize:
    """trials: for each kernel; of_model: for each model. convolutions: those of NETWORKS too."""

    trials: int
    of_model: int
    convolutions: bool


CI = TuningSize(24, 60, False)
FULL = TuningSize(48, 400, True)


def records_path() -> Path:
    """Of this kind of processor."""
    path = ROOT / "bench" / "tune" / f"kernels-{processor().replace(' ', '-')}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def rows(kernels: tuple[str, ...], models: tuple[str, ...], full: bool, folder: Path | None, say: Say) -> Iterator[Row]:
    """Kernels where not only models are asked for, models where not only kernels are."""
    size = FULL if full else CI
    command = COMMAND + (" --full" if full else "")
    with Fleet.local(os.cpu_count() or 1, 120.0) as fleet:
        if kernels or not models:
            command += f" --kernels {','.join(kernels)}" if kernels else ""
            chosen = list(cases(kernels or tuple(TYPICAL)))
            if size.convolutions and not kernels:
                chosen += [case for name in NETWORKS for case in convolutions(name)]
            yield from kernel_rows(chosen, size, fleet, say, command)
            yield from template_rows(kernels or BOTH, size, fleet, say, command)
        if models or not kernels:
            yield from model_rows(models, size, folder, fleet, say, command)


def convolutions(network: str) -> Iterator[TimedKernel]:
    """Every distinct convolution of a network of floats, alone."""
    model = onnx.shape_inference.infer_shapes(onnx.load(networks.cached(network, MADE, floats=True)))
    graph = model.graph
    shapes = {
        value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.value_info, *graph.output)
    }
    constants = {each.name: each for each in graph.initializer}
    seen: set[str] = set()
    for node in graph.node:
        if node.op_type not in ("Conv", "ConvTranspose"):
            continue
        weights = [constants[name] for name in node.input[1:]]
        kernel = list(weights[0].dims)
        attributes = "".join(sorted(attribute.SerializeToString().hex() for attribute in node.attribute))
        alone = f"{node.op_type} {shapes[node.input[0]]} {kernel} {attributes}"
        if alone in seen:
            continue
        seen.add(alone)
        x = np.random.default_rng(0).standard_normal(shapes[node.input[0]], np.float32)
        random = [numpy_helper.from_array(_like(each), each.name) for each in weights]
        given = onnx.helper.make_tensor_value_info(node.input[0], onnx.TensorProto.FLOAT, x.shape)
        made = onnx.helper.make_tensor_value_info(node.output[0], onnx.TensorProto.FLOAT, None)
        only = onnx.helper.make_graph([node], "convolution", [given], [made], random)
        opsets = [onnx.helper.make_opsetid("", 17)]
        of = "x".join(map(str, kernel))
        name = f"{network}/{node.op_type.lower()}_{x.shape[1]}x{x.shape[2]}x{x.shape[3]}_{of}_{len(seen)}"
        yield TimedKernel(
            name, onnx.helper.make_model(only, opset_imports=opsets, ir_version=8), {node.input[0]: x}, FLOAT
        )


def _like(tensor: onnx.TensorProto) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.random.default_rng(1).standard_normal(tuple(tensor.dims), np.float32)


def kernel_rows(chosen: list[TimedKernel], size: TuningSize, fleet: Fleet, say: Say, command: str) -> Iterator[Row]:
    """A row for each kernel, two for all."""
    ratios: dict[str, float] = {}
    for number, case in enumerate(chosen):
        say(f"{case.name}, {number + 1} of {len(chosen)}")
        row = Row(
            f"tune/cpu/{case.name}", f"{case.name}, tuned, over onnxruntime", f"at least {LEAST}", "", False, command
        )
        try:
            tune_cpu(case.model, records=records_path(), trials=size.trials, fleet=fleet, accelerator=False)
            own, tuned = (compare(case.model, case.feed, 0.5, records=path) for path in (None, records_path()))
        except Exception as reason:
            row.measured, ratios[case.name] = f"failed: {type(reason).__name__}: {reason}", 1e-3
            yield row
            continue
        ratios[case.name] = tuned.ratio
        row.measured = f"{tuned.ratio:.2f}, untuned {own.ratio:.2f}" + _wrong(tuned, case.tolerance)
        row.met = tuned.ratio >= LEAST and tuned.error <= case.tolerance
        row.details = {"ratio": tuned.ratio, "untuned": own.ratio, "error": tuned.error}
        yield row
    for what, names in (
        ("kernels", [n for n in ratios if n not in S8S8]),
        ("S8S8 kernels", [n for n in ratios if n in S8S8]),
    ):
        if names:
            found = [ratios[name] for name in names]
            mean, slow = float(np.exp(np.mean(np.log(found)))), sum(ratio < LEAST for ratio in found)
            text = f"geometric mean {mean:.2f}, least {min(found):.2f}, {slow} of {len(found)} below {LEAST}"
            met = mean >= GEOMEAN and not slow if what == "kernels" else None
            target = f"geometric mean at least {GEOMEAN}, none below {LEAST}" if met is not None else ""
            details = {"geomean": mean, "least": min(found), "slow": slow}
            head = f"tune/cpu/{what}", f"{what}, tuned, over onnxruntime, one thread", target
            yield Row(*head, text, met, command, details)


def _wrong(result: KernelComparison, tolerance: float) -> str:
    return "" if result.error <= tolerance else f"; WRONG by {result.error:.2g}"


def template_rows(kernels: tuple[str, ...], size: TuningSize, fleet: Fleet, say: Say, command: str) -> Iterator[Row]:
    """The best of all that rules lead to from the compiler's own schedule, over the best of the template, whole."""
    for case in cases(tuple(name for name in kernels if name in BOTH)):
        say(f"{case.name} with and without the template")
        workload = max(_workloads(case.model), key=_cost)
        times = []
        for begin, search in ((_own, "climb"), (_template, "random")):
            tuner = KernelTuner(Records.load(records_path(), must_exist=False), fleet, 4 * size.trials, search)
            tuner.tune([(workload, 1)], begin)
            (subject,) = tuner.state.subjects
            times.append(subject.usual / subject.final)
        text = f"{times[0]:.3f} times as fast as the compiler's own, the template's best {times[1]:.3f}"
        what = f"{case.name}: found without the template over the best of it"
        met = times[0] >= (1 - WITHIN) * times[1]
        yield Row(f"tune/cpu/template/{case.name}", what, f"at least {1 - WITHIN:.2f}", text, met, command)


def _cost(workload: KernelWorkload) -> float:
    counts = examined(workload, _own(workload)[0], float("inf"))
    return 0.0 if counts is None else counts.cost


def _own(workload: KernelWorkload) -> list[KernelPlan]:
    return [KernelPlan.of(schedule(workload.outputs))]


def _template(workload: KernelWorkload) -> list[KernelPlan]:
    return list(template(workload).points)


def _workloads(model: onnx.ModelProto) -> list[KernelWorkload]:
    with choosing(Choices()) as choices:
        compile_model(model, accelerator=False, records=None)
    assert choices is not None
    return [workload for workload, _ in choices.met.values()]


def model_rows(
    models: tuple[str, ...], size: TuningSize, folder: Path | None, fleet: Fleet, say: Say, command: str
) -> Iterator[Row]:  # fmt: skip
    """Whole models, which are floats."""
    for name in (*NETWORKS, *MODELS):
        path = networks_or(name, folder)
        if (models and name not in models) or path is None:
            continue
        say(f"{name}, whole")
        model = onnx.load(path)
        report = tune_cpu(model, records=records_path(), trials=size.of_model, fleet=fleet, accelerator=False).report
        again = tune_cpu(model, records=records_path(), trials=size.of_model, fleet=fleet, accelerator=False).report
        feed = model_feed(name, model)
        own, tuned = (compare(model, feed, 2.0, records=kept) for kept in (None, records_path()))
        text = f"{tuned.ratio:.2f}, untuned {own.ratio:.2f}; {report['measured']} measured, again {again['measured']}"
        met = tuned.ratio >= LEAST_MODEL and again["measured"] == 0
        what = f"{name} in float, tuned, over onnxruntime, one thread"
        details = {"ratio": tuned.ratio, "untuned": own.ratio, "error": tuned.error}
        text += _wrong(tuned, TOLERANCE) if name in NETWORKS else ""
        yield Row(
            f"tune/cpu/model/{name}", what, f"at least {LEAST_MODEL}; again 0 measured", text, met, command, details
        )


def networks_or(name: str, folder: Path | None) -> Path | None:
    """The file of a network that is made here, or of a model in `folder`."""
    if name in NETWORKS:
        return networks.cached(name, MADE, floats=True)
    path = None if folder is None else folder / MODELS[name]
    return path if path is not None and path.exists() else None
