"""Sections of whole models, in one file as they share the Programs: bytes, cycles, and times of each step."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

import celosia
from benchmarks.bound import bound
from benchmarks.oracle import FLOAT_INSIDE, Operator, Oracle, SideBySide, side_by_side
from benchmarks.rows import PRESETS, ROOT, Array, Request, Row, different, judged, skipped
from benchmarks.workloads import OF_THE_EXACTNESS_ROW, OF_THE_ONCHIP_ROW, WORKLOADS, Missing, Workload
from celosia import models
from celosia.compiler.program import Program
from celosia.driver.accuracy.evaluate import evaluate
from celosia.driver.run.open_device import open_device
from celosia.driver.run.run_result import Result
from celosia.driver.runtime import Runtime
from celosia.hw.boards.boards import BOARDS
from celosia.hw.boards.memory import ZYNQ_HP, MemoryModel
from celosia.hw.spec.isa import instruction_bytes
from celosia.sim.device import Device
from celosia.sim.timing import predict

SESSIONS = {"all-integer": True, "default": False}
"""onnxruntime's configurations: session.qdqisint8allowed=1, and as it comes. The second makes activations uint8, whose
products with int8 weights saturate on processors without VNNI: differences there are onnxruntime's."""
IMAGES = {"demo": 100, "mnist_conv": 20, "resnet18": 1, "mobilenet_v2": 1}
DEFAULT_IMAGES = 4
CYCLES = {
    "pynq": {"resnet18": 7_600_000, "resnet50": 17_500_000, "mobilenet_v2": 1_600_000},
    "wide": {"resnet18": 4_100_000, "resnet50": 9_400_000, "mobilenet_v2": 1_300_000},
}
"""At most, by Config."""
TIMED_MODELS = ("demo", "ds_cnn", "resnet18", "mobilenet_v2", "lite", "resnet50")
EVAL_ROUNDS = 5
LARGE_LAYER = 5_000
"""Cycles above which the timing model answers for a layer's own time."""
ISLANDS = "steps <= 1, same_top1 >= 1"
"""Asked of networks of which onnxruntime computes a part in float: steps of the last quantisation; the same classes."""
ONCHIP = {
    **dict.fromkeys(("mobilenet_v2_160", "ds_cnn", "lite"), "over_bound <= 1.45"),
    "mobilenet_v2": "cycles <= 1600000", "resnet18": "cycles <= 7250000", "resnet50": "cycles <= 16600000",
    "depthwise": "macs_a_cycle >= 46", "yolo_256": "launches <= 3, share >= 0.99",
}  # fmt: skip
"""Asked of networks of `onchip`."""
FREE = {"QuantizeLinear", "DequantizeLinear", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity"}
"""Operators that a network "on the accelerator" may leave to the host: types and shapes at its ends."""


@dataclass
class RowRun:
    """A run of a Program. processor_seconds: of this process, what `seconds` would be on an idle core. memory: the
    device's whole DRAM afterwards; empty where it was not to be kept."""

    result: Result
    seconds: float
    processor_seconds: float
    memory: Array


class Bench:
    """The sections of whole models, which share Programs and devices."""

    def __init__(self, asked: Request) -> None:
        self.asked = asked
        self.folder, self.config, self.chosen, self.images = asked.folder, asked.preset, asked.models, asked.images
        self.device = asked.device or "rtl"
        """Device of the rows that compare bytes; rows of `onchip` use the timing model unless one is named."""
        self.counting = "rtl" if asked.device == "rtl" else "timed"
        self.say, self.memory = asked.say, asked.memory
        self.program = cache(self._program)
        self.opened: dict[tuple[str, str], Device] = {}

    @property
    def _suffix(self) -> str:
        """The end of the keys of rows on another memory."""
        return "" if self.memory == ZYNQ_HP else f"/{self.memory.name}"

    def _command(self, section: str, *names: str, config: bool = False) -> str:
        """config: name the Config in any case."""
        parts = ["python -m benchmarks", section]
        parts += [f"--models {','.join(names)}"] if names else []
        parts += [f"--config {self.config}"] if config or self.config != "pynq" else []
        parts += [f"--device {self.device}"] if self.device != "rtl" and section in ("exactness", "models") else []
        parts += [f"--device {self.counting}"] if self.counting != "timed" and section == "onchip" else []
        parts += [f"--memory {self.memory.name}"] if self.memory != ZYNQ_HP else []
        parts += [f"--images {self.images}"] if self.images and section == "models" else []
        return " ".join(parts)

    def _workloads(self, names: tuple[str, ...]) -> list[Workload]:
        return [WORKLOADS[name] for name in names if not self.chosen or name in self.chosen]

    def _rows(self, key: str, what: str, command: str, measure: Callable[..., Iterator[Row]]) -> Iterator[Row]:
        """Yield the rows that `measure` makes of these three, or one row that says why there are none."""
        try:
            yield from measure(key, what, command)
        except Missing as reason:
            yield skipped(key, what, command, reason)
        except Exception as error:
            yield Row(key, what, "", f"failed: {type(error).__name__}: {error}", False, command)

    def _program(self, name: str) -> Program:
        self.say(f"{name}: compiling")
        return celosia.compile(WORKLOADS[name].path(self.folder), self.config)

    def run(
        self, program: Program, feed: dict[str, Array], device: str, keep: bool = False, trace: bool = False,
        memory: MemoryModel | None = None,
    ) -> RowRun:  # fmt: skip
        """One run on the device called `device`, which is opened once and lives on. memory: other than the usual."""
        memory = memory or self.memory
        key = device, str(memory)
        if key not in self.opened:
            options = {} if device == "functional" else {"memory": memory}
            self.opened[key] = open_device(device, program.config, **options)
        opened = self.opened[key]
        runtime = Runtime(program, opened)
        started, worked = time.perf_counter(), time.process_time()
        result = runtime.run(feed, keep=lambda name: keep, trace=trace)
        seconds, processor = time.perf_counter() - started, time.process_time() - worked
        dram = opened.read(0, program.dram_size).copy() if keep else np.zeros(0, np.uint8)
        return RowRun(result, seconds, processor, dram)

    # Operators one by one --------------------------------------------------------------------------------------

    def exactness(self) -> Iterator[Row]:
        """Every operator that onnxruntime runs in integers, fed with onnxruntime's own input tensors."""
        for workload in self._workloads(OF_THE_EXACTNESS_ROW):
            for label in SESSIONS:
                what = f"{workload.name}: each integer operator of onnxruntime's {label} session, {self.device}"
                command = self._command("exactness", workload.name)
                measure = partial(self._exactness, workload, label)
                yield from self._rows(f"exactness/{workload.name}/{label}", what, command, measure)

    def _exactness(self, workload: Workload, label: str, key: str, what: str, command: str) -> Iterator[Row]:
        path = workload.path(self.folder)
        self.say(f"{workload.name}: onnxruntime's {label} session")
        oracle, inputs = Oracle(path, SESSIONS[label]), workload.inputs(path, 1)
        rows = self.compare_operators(side_by_side(oracle, oracle.tensors(inputs.feeds[0])))
        exact = [row for row in rows if row["op"] not in FLOAT_INSIDE]
        kinds: dict[str, dict[str, int]] = {}
        for row in rows:
            kind = kinds.setdefault(row["op"], dict.fromkeys(("operators", "accelerator", "bytes", "different"), 0))
            kind["operators"] += 1
            kind["accelerator"] += row["place"] == "accelerator"
            kind["bytes"] += row["bytes"]
            kind["different"] += row["different"]
        details = {
            "different": sum(row["different"] for row in exact), "bytes": sum(row["bytes"] for row in exact),
            "count": len(exact), "on_accelerator": sum(row["place"] == "accelerator" for row in exact),
            "steps_in_float": max((row["steps"] for row in rows if row["op"] in FLOAT_INSIDE), default=0),
            "input": str(inputs), "operators": kinds, "failed": [row for row in exact if row["different"]],
        }  # fmt: skip
        yield judged(key, what, command, details, "different <= 0")

    def compare_operators(self, pieces: SideBySide) -> list[dict[str, Any]]:
        """One row for each operator: name, op, place, bytes, different, steps, error."""
        self.say(f"{len(pieces.operators)} operators: compiling and running on {self.device}")
        try:
            return self._compare(pieces)
        except Exception as error:
            if len(pieces.operators) == 1:
                (only,) = pieces.operators
                size = only.expected.nbytes
                row = {"name": only.name, "op": only.op, "place": "", "bytes": size, "different": size}
                return [row | {"steps": 255, "error": f"{type(error).__name__}: {error}"}]
        return [row for operator in pieces.operators for row in self.compare_operators(pieces.only(operator))]

    def _compare(self, pieces: SideBySide) -> list[dict[str, Any]]:
        program = celosia.compile(pieces.model, self.config)
        outputs = self.run(program, pieces.feed, self.device).result.outputs
        places = {row["name"]: row["place"] for row in program.placements}
        return [_operator_row(operator, outputs[operator.output], places) for operator in pieces.operators]

    # Whole models ----------------------------------------------------------------------------------------------

    def models(self) -> Iterator[Row]:
        """Whole models against onnxruntime, and the functional device against the RTL."""
        for workload in self._workloads(OF_THE_EXACTNESS_ROW):
            what, command = f"{workload.name}, end to end, {self.device}", self._command("models", workload.name)
            yield from self._rows(f"models/{workload.name}", what, command, partial(self._models, workload))

    def _models(self, workload: Workload, key: str, what: str, command: str) -> Iterator[Row]:
        path = workload.path(self.folder)
        inputs = workload.inputs(path, self.images or IMAGES.get(workload.name, DEFAULT_IMAGES))
        oracle, program = Oracle(path), self.program(workload.name)
        outcomes, devices = list[Outcome](), {"different": 0, "bytes": 0}
        cycles = 0
        for number, feed in enumerate(inputs.feeds):
            self.say(f"{workload.name}: input {number + 1} of {len(inputs.feeds)} on {self.device}")
            run = self.run(program, feed, self.device, keep=self.device == "rtl")
            cycles = run.result.report["cycles"] or 0
            outcomes.append(against(oracle, feed, run.result.outputs))
            if self.device == "rtl":
                other = self.run(program, feed, "functional", keep=True)
                pairs = [(run.memory, other.memory)]
                pairs += [(array, other.result.outputs[name]) for name, array in run.result.outputs.items()]
                devices["bytes"] += sum(a.nbytes for a, _ in pairs)
                devices["different"] += sum(different(a, b) for a, b in pairs)
        details = {
            "different": sum(each.different for each in outcomes), "bytes": sum(each.bytes for each in outcomes),
            "steps": round(max(each.steps for each in outcomes), 3), "inputs": len(outcomes), "real": inputs.real,
            "same_top1": sum(each.same_top1 for each in outcomes) / len(outcomes), "cycles": cycles,
        }  # fmt: skip
        yield judged(key, what, command, details, ISLANDS if workload.float_islands else "different <= 0")
        if self.device == "rtl":
            what = f"{workload.name}: functional device against RTL, {inputs}, outputs and whole DRAM"
            yield judged(f"{key}/devices", what, command, devices, "different <= 0")

    # Depthwise networks and the memory of a board ----------------------------------------------------------------

    def onchip(self) -> Iterator[Row]:
        """Cycles over what any machine with these multipliers and this bus needs (`bound`), outputs compared with
        onnxruntime's; on the memory that cycles are quoted with, and on a PYNQ-Z2's."""
        for workload in self._workloads(OF_THE_ONCHIP_ROW):
            what = f"{workload.name}: cycles of the {self.counting} device over the bound"
            key = f"onchip/{workload.name}{'/rtl' if self.counting == 'rtl' else ''}"
            command = self._command("onchip", workload.name)
            yield from self._rows(key, what, command, partial(self._onchip, workload))

    def _onchip(self, workload: Workload, key: str, what: str, command: str) -> Iterator[Row]:
        path = workload.path(self.folder)
        program, oracle, (feed,) = self.program(workload.name), Oracle(path), workload.inputs(path, 1).feeds
        least = bound(path, program.config)
        asked = ISLANDS if workload.float_islands else "different <= 0"
        asked += f", {ONCHIP[workload.name]}" if workload.name in ONCHIP else ""
        for memory in (ZYNQ_HP, BOARDS["pynq-z2"].memory) if self.memory == ZYNQ_HP else (self.memory,):
            self.say(f"{workload.name}: running on the {self.counting} device, memory {memory}")
            run = self.run(program, feed, self.counting, trace=True, memory=memory)
            outcome, report = against(oracle, feed, run.result.outputs), run.result.report
            details = {
                "cycles": report["cycles"], "over_bound": report["cycles"] / least.cycles,
                "macs_a_cycle": program.macs_total / report["cycles"], "launches": len(program.launches),
                "share": program.macs_accelerator / program.macs_total, "memory_model": report["memory_model"],
                "different": outcome.different, "bytes": outcome.bytes, "steps": round(outcome.steps, 3),
                "same_top1": outcome.same_top1, "bound": dataclasses.asdict(least) | {"cycles": least.cycles},
                "layers": report["layers"], "units": report["units"], "device": self.counting,
            }  # fmt: skip
            yield judged(f"{key}/{memory.name}", f"{what} of {least}", command, details, asked)

    # Speed -----------------------------------------------------------------------------------------------------

    def cycles(self) -> Iterator[Row]:
        """Cycles of ImageNet networks on the RTL, with the wall time of the run."""
        on = "" if self.config == "pynq" else f"/{self.config}"
        for workload in self._workloads(tuple(CYCLES["pynq"])):
            key, what = f"cycles/{workload.name}{on}{self._suffix}", f"{workload.name} 224x224: cycles of the RTL"
            yield from self._rows(key, what, self._command("cycles", workload.name), partial(self._cycles, workload))

    def _cycles(self, workload: Workload, key: str, what: str, command: str) -> Iterator[Row]:
        """different: bytes of the outputs that are not the functional simulator's. left: operators that the CPU has."""
        path = workload.path(self.folder)
        program, (feed,) = self.program(workload.name), workload.inputs(path, 1).feeds
        functional = self.run(program, feed, "functional").result.outputs  # links the kernels, too
        self.say(f"{workload.name}: running on the RTL simulator")
        run = self.run(program, feed, "rtl", trace=True)
        report = run.result.report
        left = [row for row in program.placements if row["place"] == "cpu" and row["op"] not in FREE]
        details = {
            "cycles": report["cycles"], "utilization": report["utilization"], "memory_model": report["memory_model"],
            "left": len(left), "convolutions_left": sum("Conv" in row["op"] for row in left),
            "different": sum(different(each, functional[name]) for name, each in run.result.outputs.items()),
            "seconds": run.seconds, "processor_seconds": run.processor_seconds, "macs_total": report["macs_total"],
            "macs_accelerator": report["macs_accelerator"], "launches": report["launches"], "units": report["units"],
            "cpu": left, "layers": report["layers"],
        }  # fmt: skip
        asked = f"different <= 0, {'left' if workload.name == 'resnet18' else 'convolutions_left'} <= 0"
        if limit := CYCLES.get(self.config, {}).get(workload.name):
            asked += f", cycles <= {limit}"
        yield judged(key, what, command, details, asked)
        if (workload.name, self.config) == ("resnet18", "pynq"):
            times = {"seconds": run.seconds, "processor_seconds": run.processor_seconds}
            what = "resnet18: wall time of that run, simulator built"
            yield judged("walltime/rtl", what, command, times, "seconds <= 30")

    def timed(self) -> Iterator[Row]:
        """Cycles of the timing model against the RTL, and the time it takes; of each of PRESETS where none is named."""
        for config in (self.asked.config,) if self.asked.config else PRESETS:
            bench = Bench(dataclasses.replace(self.asked, config=config))
            for workload in bench._workloads(TIMED_MODELS):
                key = f"timed/{workload.name}/{config}{self._suffix}"
                what = f"{workload.name} on {config}: timing model against RTL, memory {self.memory}; percent off"
                command = bench._command("timed", workload.name, config=True)
                yield from self._rows(key, what, command, partial(bench._against_rtl, workload))
            for device in bench.opened.values():
                device.close()

    def _against_rtl(self, workload: Workload, key: str, what: str, command: str) -> Iterator[Row]:
        path = workload.path(self.folder)
        program, (feed,) = self.program(workload.name), workload.inputs(path, 1).feeds
        self.say(f"{workload.name} on {self.config}: running on the RTL simulator")
        rtl = self.run(program, feed, "rtl", trace=True).result.report
        runs = [_model_seconds(program, self.memory) for _ in range(3)]
        seconds, processor = (min(times) for times in zip(*runs, strict=True))
        timed = self.run(program, feed, "timed", trace=True).result.report
        layers = layer_errors(rtl, timed)
        none: dict[str, Any] = {"error": 0.0, "name": "none"}
        worst = max(layers, key=lambda layer: abs(layer["error"]), default=none)
        details = {
            "rtl": rtl["cycles"], "timed": timed["cycles"], "off": 100 * abs(timed["cycles"] / rtl["cycles"] - 1),
            "off_of_layers": 100 * abs(worst["error"]), "worst": worst["name"], "seconds": seconds,
            "config": self.config, "layers": layers, "units": {"rtl": rtl["units"], "timed": timed["units"]},
            "memory_model": timed["memory_model"],
        }  # fmt: skip
        yield judged(key, what, command, details, "off <= 1, off_of_layers <= 3")
        if (workload.name, self.config) == ("resnet18", "pynq"):
            times = {"seconds": seconds, "processor_seconds": processor}
            yield judged("timed/seconds", "resnet18: time of the timing model", command, times, "seconds <= 0.3")

    def walltime(self) -> Iterator[Row]:
        """The functional device; the RTL's wall time comes with `cycles`."""
        what = "resnet18: wall time on the functional device"
        yield from self._rows("walltime/functional", what, self._command("walltime"), self._walltime)

    def _walltime(self, key: str, what: str, command: str) -> Iterator[Row]:
        path = WORKLOADS["resnet18"].path(self.folder)
        program, (feed,) = self.program("resnet18"), WORKLOADS["resnet18"].inputs(path, 1).feeds
        seconds = [self.run(program, feed, "functional").seconds for _ in range(3)]
        yield judged(key, what, command, {"first": seconds[0], "then": min(seconds[1:])}, "first <= 2")

    def eval(self) -> Iterator[Row]:
        """The demo's images: `celosia eval`, and a loop of Runtime.run, interleaved in one process."""
        what = "demo model, 100 images, functional: images a second of `celosia eval` over those of a Python loop"
        yield from self._rows("eval/demo", what, self._command("eval"), self._eval)

    def _eval(self, key: str, what: str, command: str) -> Iterator[Row]:
        images, labels, _ = models.demo_images()
        program, runtime = self.program("demo"), Runtime(self.program("demo"))
        name, output = program.inputs[0].name, program.outputs[0].name
        loop: list[float] = []
        batched: list[float] = []
        for number in range(EVAL_ROUNDS):
            self.say(f"evaluating the demo model, round {number + 1} of {EVAL_ROUNDS}")
            started = time.perf_counter()
            logits = [runtime.run({name: image[None]}).outputs[output] for image in images]
            loop.append(len(images) / (time.perf_counter() - started))
            report = evaluate(models.demo_model_path(), {name: images}, labels, config=self.config, check=False)
            batched.append(report["images_per_second"])
            right = float(np.mean(np.concatenate(logits).argmax(1) == labels))
            if report["top1"] != right:
                raise RuntimeError(f"eval says {report['top1']:.1%} are right, the loop {right:.1%}")
        ours, theirs = float(np.median(batched)), float(np.median(loop))
        yield judged(key, what, command, {"ratio": ours / theirs, "eval": ours, "loop": theirs}, "ratio >= 3")

    def compile(self) -> Iterator[Row]:
        """A fresh process and an empty cache of kernels."""
        what = "resnet18: compile time with Python's start, cold"
        yield from self._rows("compile/resnet18", what, self._command("compile"), self._compile)

    def _compile(self, key: str, what: str, command: str) -> Iterator[Row]:
        path = WORKLOADS["resnet18"].path(self.folder)
        code = f"import celosia; print(celosia.compile({str(path)!r}, {self.config!r}).compile_seconds)"
        with tempfile.TemporaryDirectory() as folder:
            cold = self._process("compiling in a fresh process", code, folder)
            warm = self._process("compiling once more", code, folder)
        details = {"seconds": cold["seconds"], "warm_seconds": warm["seconds"], "cold": cold, "warm": warm}
        yield judged(key, what, command, details, "seconds <= 10")

    def build(self) -> Iterator[Row]:
        """The simulator, into an empty cache, and from it."""
        code = "import sys, time; from celosia.hw.spec.config import Config; "
        code += "from celosia.sim.rtl.rtlsim import RtlDevice; "
        code += "started = time.perf_counter(); "
        code += f"RtlDevice(Config.load({self.config!r}), quiet=True).close(); print(time.perf_counter() - started)"
        with tempfile.TemporaryDirectory() as folder:
            for name, limit in (("cold", 180), ("cached", 0.5)):
                times = self._process(f"building the simulator of {self.config}, {name}", code, folder)
                what = f"RTL simulator of {self.config}, {name}: seconds"
                yield judged(f"build/{name}", what, self._command("build"), times, f"printed <= {limit}")

    def _process(self, what: str, code: str, cache_folder: str) -> dict[str, float]:
        """Times of a fresh Python process that keeps its caches in `cache_folder`, and the number that it prints."""
        self.say(what)
        environment = os.environ | {"XDG_CACHE_HOME": cache_folder, "CELOSIA_CACHE": f"{cache_folder}/celosia"}
        started, worked = time.perf_counter(), _of_children()
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise RuntimeError(f"{what} failed: {done.stderr.strip().splitlines()[-1:]}")
        times = {"seconds": time.perf_counter() - started, "processor_seconds": _of_children() - worked}
        return times | {"printed": float(done.stdout.split()[-1])}

    def demo(self) -> Iterator[Row]:
        """`make demo` in a fresh clone with an empty cache, then again."""
        with tempfile.TemporaryDirectory() as folder:
            clone = Path(folder) / "clone"
            subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
            kept = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "PYTHONPATH")}
            kept |= {"XDG_CACHE_HOME": f"{folder}/cache", "CELOSIA_CACHE": f"{folder}/cache/celosia"}
            for name, label, limit in (("fresh", "on a fresh clone", 360), ("second", "the second time", 15)):
                self.say(f"make demo {label}")
                started = time.perf_counter()
                done = subprocess.run(
                    ["make", "demo"], cwd=clone, env=kept, capture_output=True, text=True, check=False
                )
                lines = (done.stdout + done.stderr).strip().splitlines()
                details = {"seconds": time.perf_counter() - started, "code": done.returncode, "output": lines[-40:]}
                asked, command = f"seconds <= {limit}, code <= 0", self._command("demo")
                yield judged(f"demo/{name}", f"make demo {label}", command, details, asked)


@dataclass(frozen=True)
class Outcome:
    """Outputs beside onnxruntime's. steps: the largest difference, in steps of the last quantisation."""

    bytes: int
    different: int
    steps: float
    same_top1: bool


def against(oracle: Oracle, feed: dict[str, Array], outputs: dict[str, Array]) -> Outcome:
    """`outputs` beside those of onnxruntime for `feed`."""
    size = wrong = 0
    steps, same = 0.0, True
    for name, expected in oracle.run(feed).items():
        found = outputs[name]
        size += expected.nbytes
        wrong += different(found, expected)
        gap = np.abs(found.astype(np.float64) - expected.astype(np.float64)).max() / oracle.output_step(name)
        steps = max(steps, float(gap))
        same &= int(found.argmax()) == int(expected.argmax())
    return Outcome(size, wrong, steps, same)


def _operator_row(operator: Operator, found: Array, places: dict[str, str]) -> dict[str, Any]:
    row: dict[str, Any] = {"name": operator.name, "op": operator.op, "place": places.get(operator.name, "free")}
    row |= {"bytes": operator.expected.nbytes, "different": different(found, operator.expected), "steps": 0}
    if row["different"] and found.shape == operator.expected.shape and found.itemsize == 1:
        row["steps"] = int(np.abs(found.astype(np.int16) - operator.expected.astype(np.int16)).max())
    return row


def layer_errors(rtl: dict[str, Any], found: dict[str, Any]) -> list[dict[str, Any]]:
    """The error of the layers that take more than LARGE_LAYER cycles, from two reports."""
    return [
        {"name": one["name"], "cycles": one["cycles"], "error": other["cycles"] / one["cycles"] - 1}
        for one, other in zip(rtl["layers"], found["layers"], strict=True)
        if one["cycles"] > LARGE_LAYER
    ]


def _model_seconds(program: Program, memory: MemoryModel) -> tuple[float, float]:
    """How long the timing model takes for all launches of `program`: wall time and processor time."""
    cfg, seconds, processor = program.config, 0.0, 0.0
    for launch in program.launches:
        start = launch.address - program.image_address
        code = program.image[start : start + launch.count * instruction_bytes(cfg)].tobytes()
        started, worked = time.perf_counter(), time.process_time()
        predict(cfg, code, memory, launch.address)
        seconds += time.perf_counter() - started
        processor += time.process_time() - worked
    return seconds, processor


def _of_children() -> float:
    """Processor seconds of all processes that this one has waited for."""
    times = os.times()
    return times.children_user + times.children_system
