"""One method for each kind of row, in one file as they share the Programs; each yields rows as they are measured."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import celosia
from benchmarks.bound import bound
from benchmarks.oracle import FLOAT_INSIDE, Operator, Oracle, SideBySide, side_by_side
from benchmarks.workloads import OF_THE_EXACTNESS_ROW, OF_THE_ONCHIP_ROW, WORKLOADS, Inputs, Missing, Workload
from celosia import models
from celosia.compiler.program import Program
from celosia.driver.accuracy.evaluate import evaluate
from celosia.driver.run.devices import open_device
from celosia.driver.run.result import Result
from celosia.driver.runtime import Runtime
from celosia.hw.boards.boards import BOARDS
from celosia.hw.boards.memory import ZYNQ_HP, MemoryModel
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import instruction_bytes
from celosia.sim.device import Device
from celosia.sim.timing import predict

Array = NDArray[Any]
ROOT = Path(__file__).parent.parent
PRESETS = ("tiny", "pynq", "wide", "ultra96", "zcu104")
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
EVAL_TARGET = 3
"""Times the images a second of a loop, for `eval`."""
EVAL_ROUNDS = 5
LARGE_LAYER = 5_000
"""Cycles above which the timing model answers for a layer's own time."""
ONCHIP_TARGETS: dict[str, tuple[str, Callable[[int, float, float], bool]]] = {
    **dict.fromkeys(
        ("mobilenet_v2_160", "ds_cnn", "lite"),
        ("at most 1.45 of the bound", lambda cycles, ratio, speed: ratio <= 1.45),
    ),
    "mobilenet_v2": ("at most 1.60 M cycles", lambda cycles, ratio, speed: cycles <= 1_600_000),
    "resnet18": ("at most 7.25 M cycles", lambda cycles, ratio, speed: cycles <= 7_250_000),
    "resnet50": ("at most 16.6 M cycles", lambda cycles, ratio, speed: cycles <= 16_600_000),
    "depthwise": ("at least 46 MACs a cycle", lambda cycles, ratio, speed: speed >= 46),
}
"""For networks of `onchip`: what is asked of cycles, their ratio to the bound, and multiplications a cycle."""
STAYING = {"yolo_256": (3, 0.99)}
"""For networks of `onchip`: the most launches, and the least share of the multiplications on the accelerator."""
FREE = {"QuantizeLinear", "DequantizeLinear", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity"}
"""What a network "on the accelerator" may leave to the host: types and shapes at its ends."""

VERDICT = {True: "[green]met[/]", False: "[red]missed[/]", None: ""}
Head = tuple[str, str, str, str]
"""The key, what, target and command of a Row."""


@dataclass
class Row:
    """A promise and what was measured. met: None where the row was skipped, or has no target."""

    key: str
    what: str
    target: str
    measured: str
    met: bool | None
    command: str
    details: dict[str, Any] = field(default_factory=dict)


def different(a: Array, b: Array) -> int:
    """Bytes that differ; all of the larger one where shapes or types do."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return max(a.nbytes, b.nbytes)
    raw = [np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in (a, b)]
    return int(np.count_nonzero(raw[0] != raw[1]))


@dataclass
class RowRun:
    result: Result
    seconds: float
    processor_seconds: float
    """Of this process: what `seconds` would be on an idle core."""
    memory: NDArray[np.uint8]
    """The device's whole DRAM afterwards; empty for a program without launches."""


class Bench:
    """Measures on `config`. folder: of the models that are not in this repository. say: told what is going on.
    memory: of the devices that count cycles.
    """

    def __init__(
        self, folder: Path | None, config: str = "pynq", device: str | None = None, chosen: tuple[str, ...] = (),
        images: int | None = None, say: Callable[[str], None] = lambda text: None, memory: MemoryModel = ZYNQ_HP,
    ) -> None:  # fmt: skip
        self.folder, self.config, self.chosen, self.images = folder, config, chosen, images
        self.device = device or "rtl"
        """Of rows that compare bytes; those of `onchip` take the timing model where none is named."""
        self.counting = "rtl" if device == "rtl" else "timed"
        self.say, self.memory = say, memory
        self.program = cache(self._program)
        self.opened: dict[tuple[str, str], Device] = {}

    @property
    def _suffix(self) -> str:
        """Of the keys of rows on another memory."""
        return "" if self.memory == ZYNQ_HP else f"/{self.memory.name}"

    def _command(self, section: str, *models: str, config: bool = False) -> str:
        """config: name the Config in any case."""
        parts = ["python -m benchmarks", section]
        parts += [f"--models {','.join(models)}"] if models else []
        parts += [f"--config {self.config}"] if config or self.config != "pynq" else []
        parts += [f"--device {self.device}"] if self.device != "rtl" and section in ("exactness", "models") else []
        parts += [f"--device {self.counting}"] if self.counting != "timed" and section == "onchip" else []
        parts += [f"--memory {self.memory.name}"] if self.memory != ZYNQ_HP else []
        parts += [f"--images {self.images}"] if self.images and section == "models" else []
        return " ".join(parts)

    def _workloads(self, names: tuple[str, ...]) -> list[Workload]:
        return [WORKLOADS[name] for name in names if not self.chosen or name in self.chosen]

    def _rows(self, head: Head, measure: Callable[[], Iterator[Row]]) -> Iterator[Row]:
        """What `measure` yields; one row that says why where it cannot be measured, or fails."""
        try:
            yield from measure()
        except Missing as reason:
            yield Row(*head[:3], f"skipped: {reason}", None, head[3])
        except Exception as error:
            yield Row(*head[:3], f"failed: {type(error).__name__}: {error}", False, head[3])

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
                head = f"exactness/{workload.name}/{label}", what, "0 bytes differ", command
                yield from self._rows(head, partial(self._exactness, head, workload, label))

    def _exactness(self, head: Head, workload: Workload, label: str) -> Iterator[Row]:
        path = workload.path(self.folder)
        self.say(f"{workload.name}: onnxruntime's {label} session")
        oracle, inputs = Oracle(path, SESSIONS[label]), workload.inputs(path, 1)
        yield self._operators(head, side_by_side(oracle, oracle.tensors(inputs.feeds[0])), inputs)

    def _operators(self, head: Head, pieces: SideBySide, inputs: Inputs) -> Row:
        rows = self.compare_operators(pieces)
        exact = [row for row in rows if row["op"] not in FLOAT_INSIDE]
        failed = [row for row in exact if row["different"]]
        placed = sum(row["place"] == "accelerator" for row in exact)
        measured = f"{sum(row['different'] for row in exact):,} of {sum(row['bytes'] for row in exact):,} bytes differ"
        measured += f"; {len(exact)} operators, {placed} on the accelerator"
        inside = [row for row in rows if row["op"] in FLOAT_INSIDE]
        if inside:
            steps = max(row["steps"] for row in inside)
            measured += f"; {len(inside)} that onnxruntime computes in float: at most {steps} steps"
        kinds: dict[str, dict[str, int]] = {}
        for row in rows:
            kind = kinds.setdefault(row["op"], dict.fromkeys(("operators", "accelerator", "bytes", "different"), 0))
            kind["operators"] += 1
            kind["accelerator"] += row["place"] == "accelerator"
            kind["bytes"] += row["bytes"]
            kind["different"] += row["different"]
        different = sum(row["different"] for row in failed)
        details = {"input": str(inputs), "operators": kinds, "failed": failed, "different": different}
        return Row(*head[:3], measured, not failed, head[3], details)

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
            target = "at most 1 step, same top-1" if workload.float_islands else "0 bytes differ"
            command = self._command("models", workload.name)
            head = f"models/{workload.name}", f"{workload.name}, end to end, {self.device}", target, command
            yield from self._rows(head, partial(self._models, head, workload))

    def _models(self, head: Head, workload: Workload) -> Iterator[Row]:
        path = workload.path(self.folder)
        inputs = workload.inputs(path, self.images or IMAGES.get(workload.name, DEFAULT_IMAGES))
        what = f"{workload.name}, end to end on {inputs}, {self.device}"
        row, devices = self._whole(Row(head[0], what, head[2], "", None, head[3]), workload, inputs)
        yield row
        if self.device == "rtl":
            text = f"{devices['different']:,} of {devices['bytes']:,} bytes differ, outputs and whole DRAM"
            yield Row(
                f"{head[0]}/devices", f"{workload.name}: functional device against RTL, {inputs}", "0 bytes differ",
                text, devices["different"] == 0, head[3], devices,
            )  # fmt: skip

    def _whole(self, row: Row, workload: Workload, inputs: Inputs) -> tuple[Row, dict[str, int]]:
        oracle, program = Oracle(inputs.path), self.program(workload.name)
        devices = {"bytes": 0, "different": 0}
        totals = {"bytes": 0, "different": 0}
        steps, same, cycles = 0.0, 0, 0
        for number, feed in enumerate(inputs.feeds):
            self.say(f"{workload.name}: input {number + 1} of {len(inputs.feeds)} on {self.device}")
            run = self.run(program, feed, self.device, keep=self.device == "rtl")
            cycles = run.result.report["cycles"] or 0
            outcome = against(oracle, feed, run.result.outputs)
            totals["bytes"] += outcome.bytes
            totals["different"] += outcome.different
            steps = max(steps, outcome.steps)
            same += outcome.same_top1
            if self.device == "rtl":
                other = self.run(program, feed, "functional", keep=True)
                pairs = [(run.memory, other.memory)]
                pairs += [(array, other.result.outputs[name]) for name, array in run.result.outputs.items()]
                devices["bytes"] += sum(a.nbytes for a, _ in pairs)
                devices["different"] += sum(different(a, b) for a, b in pairs)
        count = len(inputs.feeds)
        row.measured = f"{totals['different']:,} of {totals['bytes']:,} bytes differ"
        if workload.float_islands:
            row.measured += f"; at most {steps:.3g} steps; same top-1 on {same} of {count}"
        row.met = (round(steps, 3) <= 1 and same == count) if workload.float_islands else totals["different"] == 0
        row.details = totals | {
            "steps": steps,
            "same_top1": same,
            "inputs": count,
            "real": inputs.real,
            "cycles": cycles,
        }
        return row, devices

    # Depthwise networks and the memory of a board ----------------------------------------------------------------

    def onchip(self) -> Iterator[Row]:
        """Cycles over what any machine with these multipliers and this bus needs (`bound`), outputs compared with
        onnxruntime's; on the memory that cycles are quoted with, and on a PYNQ-Z2's."""
        for workload in self._workloads(OF_THE_ONCHIP_ROW):
            target = ONCHIP_TARGETS.get(workload.name, ("reported", lambda cycles, ratio, speed: True))[0]
            target += ", at most 1 step, same top-1" if workload.float_islands else ", 0 bytes differ"
            if workload.name in STAYING:
                target += f", at most {STAYING[workload.name][0]} launches, {STAYING[workload.name][1]:.0%} of the MACs"
            what = f"{workload.name}: cycles of the {self.counting} device over the bound"
            key = f"onchip/{workload.name}{'/rtl' if self.counting == 'rtl' else ''}"
            head = key, what, target, self._command("onchip", workload.name)
            yield from self._rows(head, partial(self._onchip, head, workload))

    def _onchip(self, head: Head, workload: Workload) -> Iterator[Row]:
        path = workload.path(self.folder)
        program, oracle, (feed,) = self.program(workload.name), Oracle(path), workload.inputs(path, 1).feeds
        least = bound(path, program.config)
        for memory in (ZYNQ_HP, BOARDS["pynq-z2"].memory) if self.memory == ZYNQ_HP else (self.memory,):
            self.say(f"{workload.name}: running on the {self.counting} device, memory {memory}")
            run = self.run(program, feed, self.counting, trace=True, memory=memory)
            outcome = against(oracle, feed, run.result.outputs)
            report = run.result.report
            measured = f"{report['cycles']:,} (memory {report['memory_model']}), "
            ratio, speed = report["cycles"] / least.cycles, program.macs_total / report["cycles"]
            measured += f"{ratio:.2f} of the bound of {least}, {speed:.1f} MACs a cycle; "
            measured += f"{outcome.different:,} of {outcome.bytes:,} bytes differ"
            met = outcome.different == 0
            if workload.float_islands:
                measured += f", at most {outcome.steps:.3g} steps"
                met = round(outcome.steps, 3) <= 1 and outcome.same_top1
            launches, share = len(program.launches), program.macs_accelerator / program.macs_total
            measured += f"; {launches} launches, {share:.1%} of the MACs on the accelerator"
            if workload.name in STAYING:
                met = met and launches <= STAYING[workload.name][0] and share >= STAYING[workload.name][1]
            if workload.name in ONCHIP_TARGETS:
                met = met and ONCHIP_TARGETS[workload.name][1](report["cycles"], ratio, speed)
            details = {
                "cycles": report["cycles"], "memory_model": report["memory_model"], "device": self.counting,
                "bound": dataclasses.asdict(least) | {"cycles": least.cycles}, "layers": report["layers"],
                "units": report["units"], "different": outcome.different, "bytes": outcome.bytes,
                "steps": outcome.steps, "same_top1": outcome.same_top1, "launches": launches, "share": share,
            }  # fmt: skip
            yield Row(f"{head[0]}/{memory.name}", *head[1:3], measured, met, head[3], details)

    # Speed -----------------------------------------------------------------------------------------------------

    def cycles(self) -> Iterator[Row]:
        """Cycles of ImageNet networks on the RTL, with the wall time of the run."""
        on = "" if self.config == "pynq" else f"/{self.config}"
        for workload in self._workloads(tuple(CYCLES["pynq"])):
            limit = CYCLES.get(self.config, {}).get(workload.name)
            head = (
                f"cycles/{workload.name}{on}{self._suffix}", f"{workload.name} 224x224: cycles of the RTL",
                f"at most {limit / 1e6:.1f} M" if limit else "", self._command("cycles", workload.name),
            )  # fmt: skip
            yield from self._rows(head, partial(self._timed, head, workload))

    def _timed(self, head: Head, workload: Workload) -> Iterator[Row]:
        path = workload.path(self.folder)
        program, (feed,) = self.program(workload.name), workload.inputs(path, 1).feeds
        functional = self.run(program, feed, "functional").result.outputs  # links the kernels, too
        self.say(f"{workload.name}: running on the RTL simulator")
        run = self.run(program, feed, "rtl", trace=True)
        off = sum(different(output, functional[name]) for name, output in run.result.outputs.items())
        yield self._cycles(head, program, run, CYCLES.get(self.config, {}).get(workload.name), off)
        if (workload.name, self.config) == ("resnet18", "pynq"):
            measured = f"{run.seconds:.1f} s ({run.processor_seconds:.1f} s of processor time)"
            yield Row(
                "walltime/rtl", "resnet18: wall time of that run, simulator built", "at most 30 s", measured,
                run.seconds <= 30, head[3], {"seconds": run.seconds, "processor_seconds": run.processor_seconds},
            )  # fmt: skip

    def _cycles(self, head: Head, program: Program, run: RowRun, limit: int | None, off: int) -> Row:
        """off: bytes of the outputs that differ from the functional simulator's."""
        report = run.result.report
        left = [row for row in program.placements if row["place"] == "cpu" and row["op"] not in FREE]
        convolutions = sum("Conv" in row["op"] for row in program.placements)
        lost = [row for row in left if "Conv" in row["op"]]
        measured = f"{report['cycles'] / 1e6:.3f} M (memory {report['memory_model']}), "
        measured += f"{report['utilization']:.1%} of the MACs a cycle can do; "
        measured += f"{convolutions - len(lost)} of {convolutions} convolutions on the accelerator"
        measured += f"; on the CPU: {', '.join(sorted({row['op'] for row in left}))}" if left else ", all else too"
        measured += f"; {off:,} bytes of the outputs differ from the functional simulator's"
        details = {
            "cycles": report["cycles"], "utilization": report["utilization"], "memory_model": report["memory_model"],
            "macs_total": report["macs_total"], "macs_accelerator": report["macs_accelerator"],
            "launches": report["launches"], "units": report["units"], "cpu": left, "layers": report["layers"],
            "seconds": run.seconds, "processor_seconds": run.processor_seconds, "different": off,
        }  # fmt: skip
        kept = not off and not (left if head[0].startswith("cycles/resnet18") else lost)
        met = kept and report["cycles"] <= limit if limit else kept
        return Row(*head[:3], measured, met, head[3], details)

    def timed(self, configs: tuple[str, ...] = PRESETS) -> Iterator[Row]:
        """Cycles of the timing model against the RTL, and the time it takes."""
        for config in configs:
            bench = Bench(self.folder, config, self.device, self.chosen, self.images, self.say, self.memory)
            for workload in bench._workloads(TIMED_MODELS):
                head = (
                    f"timed/{workload.name}/{config}{self._suffix}",
                    f"{workload.name} on {config}: timing model against RTL, memory {self.memory}",
                    f"within 1%, layers above {LARGE_LAYER:,} cycles within 3%",
                    bench._command("timed", workload.name, config=True),
                )  # fmt: skip
                yield from self._rows(head, partial(bench._against_rtl, head, workload))
            for device in bench.opened.values():
                device.close()

    def _against_rtl(self, head: Head, workload: Workload) -> Iterator[Row]:
        path = workload.path(self.folder)
        program, (feed,) = self.program(workload.name), workload.inputs(path, 1).feeds
        self.say(f"{workload.name} on {self.config}: running on the RTL simulator")
        rtl = self.run(program, feed, "rtl", trace=True).result.report
        runs = [_model_seconds(program, self.memory) for _ in range(3)]
        seconds, processor = (min(times) for times in zip(*runs, strict=True))
        found = self.run(program, feed, "timed", trace=True).result.report
        error = found["cycles"] / rtl["cycles"] - 1
        layers = layer_errors(rtl, found)
        none: dict[str, Any] = {"error": 0.0, "name": "none", "cycles": 0}
        worst = max(layers, key=lambda layer: abs(layer["error"]), default=none)
        measured = f"RTL {rtl['cycles']:,}, model {found['cycles']:,} ({error:+.2%}); worst of {len(layers)} layers "
        measured += f"{worst['error']:+.2%} ({worst['name']}, {worst['cycles']:,} cycles); {seconds:.2f} s"
        details = {
            "config": self.config, "rtl": rtl["cycles"], "timed": found["cycles"], "error": error, "layers": layers,
            "units": {"rtl": rtl["units"], "timed": found["units"]}, "memory_model": found["memory_model"],
            "seconds": seconds, "off": 100 * abs(error), "off_of_layers": 100 * abs(worst["error"]),
        }  # fmt: skip
        met = abs(error) <= 0.01 and abs(worst["error"]) <= 0.03
        yield Row(*head[:3], measured, met, head[3], details)
        if (workload.name, self.config) == ("resnet18", "pynq"):
            yield Row(
                "timed/seconds", "resnet18: time of the timing model", "at most 0.3 s",
                f"{seconds:.2f} s ({processor:.2f} s of processor time)",
                seconds <= 0.3, head[3], {"seconds": seconds, "processor_seconds": processor},
            )  # fmt: skip

    def walltime(self) -> Iterator[Row]:
        """The functional device; the RTL's wall time comes with `cycles`."""
        what = "resnet18: wall time on the functional device"
        head = "walltime/functional", what, "at most 2 s", self._command("walltime")
        yield from self._rows(head, partial(self._walltime, head))

    def _walltime(self, head: Head) -> Iterator[Row]:
        path = WORKLOADS["resnet18"].path(self.folder)
        program, (feed,) = self.program("resnet18"), WORKLOADS["resnet18"].inputs(path, 1).feeds
        runs = [self.run(program, feed, "functional") for _ in range(3)]
        seconds = [run.seconds for run in runs]
        measured = f"{seconds[0]:.2f} s at first, then {min(seconds[1:]):.2f} s "
        measured += f"({runs[0].processor_seconds:.2f} s of processor time)"
        yield Row(*head[:3], measured, seconds[0] <= 2, head[3], {"first": seconds[0], "seconds": seconds})

    def eval(self) -> Iterator[Row]:
        """The demo's images: `celosia eval`, and a loop of Runtime.run, interleaved in one process."""
        what = "demo model, 100 images, functional: images a second of `celosia eval` over those of a Python loop"
        head = "eval/demo", what, f"at least {EVAL_TARGET}", self._command("eval")
        yield from self._rows(head, partial(self._eval, head))

    def _eval(self, head: Head) -> Iterator[Row]:
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
        measured = f"{ours / theirs:.1f} ({ours:.0f} / {theirs:.0f}; medians of {EVAL_ROUNDS})"
        details = {"eval": batched, "loop": loop, "top1": right}
        yield Row(*head[:3], measured, ours / theirs >= EVAL_TARGET, head[3], details)

    def compile(self) -> Iterator[Row]:
        """A fresh process and an empty cache of kernels."""
        head = "compile/resnet18", "resnet18: compile time, cold", "at most 10 s", self._command("compile")
        yield from self._rows(head, partial(self._compile, head))

    def _compile(self, head: Head) -> Iterator[Row]:
        path = WORKLOADS["resnet18"].path(self.folder)
        code = f"import celosia; print(celosia.compile({str(path)!r}, {self.config!r}).compile_seconds)"
        with tempfile.TemporaryDirectory() as folder:
            cold = self._process("compiling in a fresh process", code, folder)
            warm = self._process("compiling once more", code, folder)
        measured = (
            f"{cold['seconds']:.1f} s with Python's start ({cold['processor_seconds']:.1f} s of processor time), "
        )
        measured += f"{cold['printed']:.1f} s without; kernels cached: {warm['seconds']:.1f} s"
        yield Row(*head[:3], measured, cold["seconds"] <= 10, head[3], {"cold": cold, "warm": warm})

    def build(self) -> Iterator[Row]:
        """The simulator, into an empty cache, and from it."""
        command = self._command("build")
        code = "import sys, time; from celosia.hw.spec.config import Config; "
        code += "from celosia.sim.rtl.rtlsim import RtlDevice; "
        code += "started = time.perf_counter(); "
        code += f"RtlDevice(Config.load({self.config!r}), quiet=True).close(); print(time.perf_counter() - started)"
        with tempfile.TemporaryDirectory() as folder:
            cold = self._process(f"building the simulator of {self.config}", code, folder)
            cached = self._process("opening the built simulator", code, folder)
        for name, times, limit in (("cold", cold, 180.0), ("cached", cached, 0.5)):
            seconds, measured = times["printed"], f"{times['printed']:.3g} s"
            if name == "cold":
                measured += f" ({times['processor_seconds']:.0f} s of processor time)"
            yield Row(
                f"build/{name}", f"RTL simulator of {self.config}, {name}", f"at most {limit:g} s", measured,
                seconds <= limit, command, times,
            )  # fmt: skip

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
                seconds = time.perf_counter() - started
                lines = (done.stdout + done.stderr).strip().splitlines()
                measured = f"{seconds:.0f} s" if done.returncode == 0 else f"failed: {lines[-1:]}"
                yield Row(
                    f"demo/{name}", f"make demo {label}", f"at most {limit} s", measured,
                    done.returncode == 0 and seconds <= limit, self._command("demo"),
                    {"seconds": seconds, "output": lines[-40:]},
                )  # fmt: skip


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


def describe(config: str) -> dict[str, Any]:
    """Where the figures come from."""
    cfg = Config.load(config)
    return {"config": cfg.to_dict(), "digest": cfg.digest, "cores": os.cpu_count()}
