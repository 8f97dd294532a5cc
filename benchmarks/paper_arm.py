"""The chart of operators on ARM: int8 convolutions beside XNNPACK's as LiteRT has them, in instructions that an
emulator counts, and in cycles that llvm-mca makes of them: estimates, see arm.py.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

import celosia
from benchmarks import arm, litert_worker
from benchmarks.paper_chart import Chart, PaperSize, Say, floats
from benchmarks.paper_cpu import TimedConv, convolutions, geomean
from benchmarks.rows import Row
from benchmarks.workloads import Missing
from celosia.compiler.target import TARGETS

Array = NDArray[Any]
TARGET = "aarch64"
LITERT_VARIABLE = "CELOSIA_LITERT_PYTHON"
MARK = re.compile(r"\bclose\((\d+)\)")
MOST_STEPS = 1
"""That results may differ by: LiteRT multiplies by scales of 31 bits, onnxruntime by floats."""


@dataclass(frozen=True)
class Int8Conv:
    """A convolution of random bytes."""

    conv: TimedConv

    @cached_property
    def arrays(self) -> dict[str, Array]:
        """x, w, bias, and scales and zero points as the worker and QLinearConv call them."""
        rng, c = np.random.default_rng(0), self.conv
        outputs, depth = c.weights[0], int(np.prod(c.weights[1:]))
        return {
            "x": rng.integers(-128, 128, c.image, np.int8), "w": rng.integers(-127, 128, c.weights, np.int8),
            "bias": rng.integers(-5000, 5000, outputs, np.int32),
            "sx": np.array(0.02, np.float32), "sw": rng.uniform(0.005, 0.01, outputs).astype(np.float32),
            "zx": np.array(3, np.int8), "zy": np.array(5, np.int8),
            "sy": np.array(0.02 * 0.0075 * 74**2 * depth**0.5 / 40, np.float32),
        }  # fmt: skip

    def model(self) -> onnx.ModelProto:
        """QLinearConv."""
        a, c = self.arrays, self.conv
        names = ("x", "sx", "zx", "w", "sw", "zw", "sy", "zy", "bias")
        values = a | {"zw": np.zeros(len(a["sw"]), np.int8)}
        node = helper.make_node(
            "QLinearConv", names, ["y"], strides=[c.stride] * 2, pads=[c.pad] * 4, group=c.groups,
        )  # fmt: skip
        given = helper.make_tensor_value_info("x", TensorProto.INT8, c.image)
        made = helper.make_tensor_value_info("y", TensorProto.INT8, [1, c.weights[0], *self.size])
        constants = [numpy_helper.from_array(np.asarray(values[name]), name) for name in names[1:]]
        graph = helper.make_graph([node], "conv", [given], [made], constants)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)

    @property
    def size(self) -> list[int]:
        """Height and width of the result."""
        c = self.conv
        return [(n + 2 * c.pad - k) // c.stride + 1 for n, k in zip(c.image[2:], c.weights[2:])]

    def case(self) -> dict[str, Array]:
        """The arrays that the worker takes: channels last, padded as LiteRT does where windows do not step by one."""
        a, c = self.arrays, self.conv
        same = c.pad > 0 and c.stride == 1 and 2 * c.pad + 1 == c.weights[2] == c.weights[3]
        pad = 0 if same else c.pad
        x = np.pad(a["x"], ((0, 0), (0, 0), (pad, pad), (pad, pad)), constant_values=a["zx"]).transpose(0, 2, 3, 1)
        w = a["w"].transpose((1, 2, 3, 0) if c.groups > 1 else (0, 2, 3, 1))
        how = {"stride": c.stride, "same": same, "by_channel": c.groups > 1, "size": self.size}
        return (
            a | {"x": np.ascontiguousarray(x), "w": np.ascontiguousarray(w)} | {k: np.array(v) for k, v in how.items()}
        )


def ours(conv: Int8Conv) -> arm.Estimate:
    """Estimate the compiler's kernel. Missing where a tool is."""
    program = celosia.compile(conv.model(), accelerator=False, check=False, target=TARGETS[TARGET])
    (step,), (kernel,) = program.steps, program.kernels
    known = {**program.constants, **conv.arrays}
    return arm.estimate(TARGET, kernel, [known[name] for name in step.inputs if name])  # type: ignore[union-attr]


def litert(convs: Sequence[Int8Conv]) -> list[arm.Estimate]:
    """Estimate LiteRT's kernels, all in one process. Missing where there is none, or it fails."""
    command = shlex.split(os.environ.get(LITERT_VARIABLE, ""))
    if not command:
        raise Missing(f"set {LITERT_VARIABLE} to a command that is a Python for {TARGET} with ai-edge-litert")
    with tempfile.TemporaryDirectory(prefix="celosia") as place:
        folder = Path(place)
        arrays = {f"{n}.{key}": value for n, conv in enumerate(convs) for key, value in conv.case().items()}
        np.savez(folder / "cases.npz", **arrays)  # type: ignore[arg-type]
        where = _run(command, folder, "", {})
        log = {"QEMU_LOG": "in_asm,exec,nochain,strace", "QEMU_LOG_FILENAME": str(folder / "log")}
        again = _run(command, folder, "made.npz", log | {"QEMU_DFILTER": "0x{}..0x{}".format(*where.split())})
        if again != where:
            raise Missing(f"the emulator puts LiteRT at {where}, then at {again}; its log has other instructions")
        with (folder / "log").open(encoding="utf-8", errors="replace") as lines:
            counted = list(counts(lines))
        with np.load(folder / "made.npz") as made:
            outputs = [made[str(number)] for number in range(len(convs))]
    if len(counted) < len(convs) or not all(counted):
        raise Missing(f"no instruction ran at {where}, where LiteRT's library seemed to be")
    return [arm.made_of(TARGET, times, [y]) for times, y in zip(counted, outputs, strict=True)]


def _run(command: Sequence[str], folder: Path, made: str, more: Mapping[str, str]) -> str:
    """Run the worker. Returns the first line that it prints."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("QEMU_LOG")} | dict(more)
    environment["QEMU_CPU"] = TARGETS[TARGET].cpu
    done = subprocess.run(
        [*command, litert_worker.__file__, "cases.npz", made],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        raise Missing(f"LiteRT: {(done.stderr.strip().splitlines() or ['failed'])[-1]}")
    return done.stdout.splitlines()[0]


def counts(lines: Iterable[str]) -> Iterator[dict[arm.Code, int]]:
    """How often each block of instructions ran between the two marks of each convolution."""
    blocks, ran = arm.LoggedBlocks(), Counter[int]()
    for line in lines:
        if (address := blocks.take(line)) is not None:
            ran[address] += 1
        elif found := MARK.search(line):
            number = int(found[1]) - litert_worker.FIRST_MARK
            if number >= 0 and number % 2:
                yield blocks.times(ran)
            if number >= 0:
                ran = Counter()


def operators(size: PaperSize, folder: Path | None, say: Say) -> Chart:
    """Int8 convolutions of two networks on a Cortex-A53."""
    from benchmarks.paper_figures import bars

    processor = arm.PROCESSORS[TARGET]
    chart = Chart(
        "Operators on ARM, estimated",
        f"The convolutions that differ, int8, on one core of a {processor} without dot products: cycles that llvm-mca "
        "makes of the instructions that an emulator counts, without caches; LiteRT's with XNNPACK over the compiler's.",
    )  # fmt: skip
    for path, name in {floats(name): name for name in (size.network, size.small)}.items():
        convs = [Int8Conv(each) for each in convolutions(path)[: size.operators]]
        key, what = f"paper/arm/{name}", f"{len(convs)} convolutions of {name}, int8, {processor}: LiteRT's cycles over"
        try:
            say(f"{name} by LiteRT, emulated")
            theirs = litert(convs)
            own = []
            for each in convs:
                say(f"{name} on {processor}: {each.conv.name}")
                own.append(ours(each))
        except Missing as reason:
            chart.rows.append(Row(key, what, "", f"skipped: {reason}", None, size.command))
            continue
        ratios = {
            "cycles": [a.cycles / b.cycles for a, b in zip(theirs, own)],
            "instructions": [a.instructions / b.instructions for a, b in zip(theirs, own)],
        }
        names = [each.conv.name for each in convs]
        chart.figures.append(
            (f"{name} on {processor}", "", bars(names, ratios, "LiteRT's over ours", one=True, log=True))
        )
        steps = max(_steps(a, b) for a, b in zip(theirs, own))
        means = {kind: geomean(values) for kind, values in ratios.items()}
        details = {
            **means,
            "least": min(ratios["cycles"]),
            "steps": steps,
            "operators": dict(zip(names, ratios["cycles"])),
        }
        text = (
            f"{means['cycles']:.2f}, least {details['least']:.2f}; instructions {means['instructions']:.2f}; results "
            f"differ by at most {steps} steps"
        )
        met = None if steps <= MOST_STEPS else False
        chart.rows.append(Row(key, f"{what}: geometric mean", "", text, met, size.command, details))
    return chart


def _steps(theirs: arm.Estimate, own: arm.Estimate) -> int:
    """The largest difference of results."""
    (y,), (expected,) = theirs.outputs, own.outputs
    return int(np.abs(y.transpose(0, 3, 1, 2).astype(int) - expected).max())
