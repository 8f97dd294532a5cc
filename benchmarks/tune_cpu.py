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
from benchmarks.cpu import MODELS, NETWORKS, compare, model_feed, of_all
from benchmarks.kernels import FLOAT, TYPICAL, TimedKernel, cases
from benchmarks.rows import ROOT, Request, Row, Say, judged
from benchmarks.workloads import MADE
from celosia.compiler.compile import compile as compile_model
from celosia.compiler.cpu.schedule import schedule
from celosia.compiler.cpu.schedule.kernel_schedules import KernelSchedules, KernelWorkload, using_schedules
from celosia.compiler.tune.device_pool import Fleet
from celosia.compiler.tune.kernel_plan import KernelPlan
from celosia.compiler.tune.kernel_space import estimate_plan, template_space
from celosia.compiler.tune.kernel_trial import processor
from celosia.compiler.tune.kernel_tuner import KernelTuner
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
    """The records of this kind of processor."""
    path = ROOT / "bench" / "tune" / f"kernels-{processor().replace(' ', '-')}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def rows(asked: Request) -> Iterator[Row]:
    """Kernels where not only models are asked for, models where not only kernels are."""
    kernels, models, say = asked.kernels, asked.models, asked.say
    size = FULL if asked.full else CI
    command = COMMAND + (" --full" if asked.full else "")
    with Fleet.local(os.cpu_count() or 1, 120.0) as fleet:
        if kernels or not models:
            command += f" --kernels {','.join(kernels)}" if kernels else ""
            chosen = list(cases(kernels or tuple(TYPICAL)))
            if size.convolutions and not kernels:
                chosen += [case for name in NETWORKS for case in convolutions(name)]
            yield from kernel_rows(chosen, size, fleet, say, command)
            yield from template_rows(kernels or BOTH, size, fleet, say, command)
        if models or not kernels:
            yield from model_rows(models, size, asked.folder, fleet, say, command)


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
        key, what = f"tune/cpu/{case.name}", f"{case.name}, tuned, over onnxruntime"
        try:
            tune_cpu(case.model, records=records_path(), trials=size.trials, fleet=fleet, accelerator=False)
            own, tuned = (compare(case.model, case.feed, 0.5, records=path) for path in (None, records_path()))
        except Exception as reason:
            ratios[case.name] = 1e-3
            yield Row(key, what, "", f"failed: {type(reason).__name__}: {reason}", False, command)
            continue
        ratios[case.name] = tuned.ratio
        details = {"ratio": tuned.ratio, "untuned": own.ratio, "error": tuned.error}
        yield judged(key, what, command, details, f"ratio >= {LEAST}, error <= {case.tolerance}")
    for what, names, geomean in (
        ("kernels", [n for n in ratios if n not in S8S8], GEOMEAN),
        ("S8S8 kernels", [n for n in ratios if n in S8S8], None),
    ):
        if names:
            label = f"{what}, tuned, over onnxruntime, one thread"
            yield of_all(f"tune/cpu/{what}", label, [ratios[name] for name in names], command, geomean)


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
        what = f"{case.name}: found without the template over the best of it"
        details = {"ratio": times[0] / times[1], "without": times[0], "template": times[1]}
        yield judged(f"tune/cpu/template/{case.name}", what, command, details, f"ratio >= {1 - WITHIN:.2f}")


def _cost(workload: KernelWorkload) -> float:
    counts = estimate_plan(workload, _own(workload)[0], float("inf"))
    return 0.0 if counts is None else counts.cost


def _own(workload: KernelWorkload) -> list[KernelPlan]:
    return [KernelPlan.of(schedule(workload.outputs))]


def _template(workload: KernelWorkload) -> list[KernelPlan]:
    return list(template_space(workload).points)


def _workloads(model: onnx.ModelProto) -> list[KernelWorkload]:
    with using_schedules(KernelSchedules()) as choices:
        compile_model(model, accelerator=False, records=None)
    assert choices is not None
    return [workload for workload, _ in choices.workloads.values()]


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
        details = {
            "ratio": tuned.ratio, "untuned": own.ratio, "error": tuned.error, "measured": report["measured"],
            "again": again["measured"],
        }  # fmt: skip
        what = f"{name} in float, tuned, over onnxruntime, one thread; what a second search measures"
        yield judged(f"tune/cpu/model/{name}", what, command, details, f"ratio >= {LEAST_MODEL}, again <= 0")


def networks_or(name: str, folder: Path | None) -> Path | None:
    """The file of a network that is made here, or of a model in `folder`."""
    if name in NETWORKS:
        return networks.cached(name, MADE, floats=True)
    path = None if folder is None else folder / MODELS[name]
    return path if path is not None and path.exists() else None
