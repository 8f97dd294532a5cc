"""Charts of the CPU: operators beside onnxruntime, numpy and TVM, the tile language.

All sides run in turn in one process, on one thread; TVM runs right after, in a process of its own (`TVM_VARIABLE`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

import celosia
from benchmarks import language as tile_language
from benchmarks.cpu import TOLERANCE, error, tvm_seconds
from benchmarks.kernels import _Writer
from benchmarks.paper_chart import Chart, PaperSize, Say, floats
from benchmarks.rows import Row
from benchmarks.workloads import Missing
from celosia.compiler.tune.kernel_trial import time_alternating
from celosia.driver.runtime import Runtime
from celosia.driver.workstation.oracle import open_session

Array = NDArray[Any]


def geomean(values: Sequence[float]) -> float:
    """The geometric mean of ratios."""
    return float(np.exp(np.mean(np.log(values))))


# Operators ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TimedConv:
    """A convolution of a network: shapes of its input and its weights, stride and padding."""

    image: tuple[int, ...]
    weights: tuple[int, ...]
    stride: int
    pad: int
    groups: int

    @property
    def name(self) -> str:
        """As the chart calls it."""
        kind = " depthwise" if self.groups > 1 else f" to {self.weights[0]}"
        by = f" / {self.stride}" if self.stride > 1 else ""
        return f"{self.image[1]}x{self.image[2]}x{self.image[3]}{kind}, {self.weights[2]}x{self.weights[3]}{by}"

    def model(self) -> tuple[onnx.ModelProto, dict[str, Array]]:
        """(the convolution alone, its input)."""
        w = _Writer()
        w.node(
            "Conv", w.input(w.floats(*self.image)), w.constant(w.floats(*self.weights)), group=self.groups,
            strides=[self.stride] * 2, pads=[self.pad] * 4,
        )  # fmt: skip
        return w.model(), w.feed

    def by_numpy(self, x: Array, weights: Array) -> Array:
        """Compute the convolution as a product of windows, or a depthwise one as a sum of products."""
        (pad, step), (rows, columns) = (self.pad, self.stride), self.weights[2:]
        padded = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
        windows = sliding_window_view(padded, (rows, columns), axis=(2, 3))[:, :, ::step, ::step]
        if self.groups > 1:
            return np.asarray(np.einsum("nchwrs,crs->nchw", windows, weights[:, 0], optimize=True))
        n, _, height, width = windows.shape[:4]
        flat = windows.transpose(0, 2, 3, 1, 4, 5).reshape(n * height * width, -1)
        product = flat @ weights.reshape(len(weights), -1).T
        return np.asarray(product.reshape(n, height, width, -1).transpose(0, 3, 1, 2))


def convolutions(path: Path) -> list[TimedConv]:
    """Those of a network that differ, in order."""
    model = onnx.shape_inference.infer_shapes(onnx.load(path))
    shapes = {value.name: tuple(d.dim_value for d in value.type.tensor_type.shape.dim)
              for value in (*model.graph.value_info, *model.graph.input)}  # fmt: skip
    shapes |= {each.name: tuple(each.dims) for each in model.graph.initializer}
    found: dict[TimedConv, None] = {}
    for node in model.graph.node:
        if node.op_type != "Conv":
            continue
        given = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
        pads, strides = given.get("pads", [0] * 4), given.get("strides", [1, 1])
        if len({*pads}) == 1 and len({*strides}) == 1:
            image, weights = (shapes[name] for name in node.input[:2])
            found[TimedConv(image, weights, strides[0], pads[0], given.get("group", 1))] = None
    return list(found)


def operators(size: PaperSize, folder: Path | None, say: Say) -> Chart:
    """Convolutions of two networks in float beside onnxruntime's, numpy's and, where it is, TVM's."""
    from benchmarks.paper_figures import bars

    chart = Chart(
        "Operators on the CPU",
        "The convolutions that differ in ResNet-18 and MobileNet, float32, each alone on one thread: how many times as "
        "fast as onnxruntime, as numpy (windows, and one product of matrices), and as TVM as it is installed, which "
        "has tuned nothing.",
    )  # fmt: skip
    for name in (size.network, size.small):
        found: list[ComparedConv] = []
        for each in convolutions(floats(name))[: size.operators]:
            say(f"{name}: {each.name}")
            found.append(_compared(each, size.seconds))
        series = {side: [each.times(side) for each in found] for side in SIDES if all(side in e.seconds for e in found)}
        names = [each.conv.name for each in found]
        chart.figures.append((f"Operators of {name}", "", bars(names, series, "times as fast as", one=True, log=True)))
        means = {side: geomean(values) for side, values in series.items()}
        least, wrong = min(series[SIDES[0]]), max(each.error for each in found)
        per = {each.conv.name: {side: each.times(side) for side in series} for each in found}
        details = {"geomean": means[SIDES[0]], "least": least, "error": wrong, "operators": per, **means}
        others = "; ".join(f"{mean:.1f} of {side}" for side, mean in means.items() if side != SIDES[0])
        lack = "" if "TVM" in means else f" ({found[0].lack})"
        text = f"{means[SIDES[0]]:.2f} of onnxruntime, least {least:.2f}; {others}{lack}; error {wrong:.0e}"
        met = means[SIDES[0]] >= 1 and wrong <= TOLERANCE
        what = f"{len(found)} convolutions of {name}, float32: geometric mean"
        chart.rows.append(Row(f"paper/operators/{name}", what, "≥ 1 of onnxruntime", text, met, size.command, details))
    mean = chart.rows[0].details["geomean"]
    chart.fact = f"{mean:.2f} x", f"as fast as onnxruntime, convolutions of {size.network}"
    return chart


SIDES = "onnxruntime", "numpy", "TVM"
"""What convolutions are compared with; the last one where it is."""


@dataclass(frozen=True)
class ComparedConv:
    """ours: processor seconds of a run; seconds: of the others. error: the largest of any side. lack: why there is no
    TVM."""

    conv: TimedConv
    ours: float
    seconds: Mapping[str, float]
    error: float
    lack: str = ""

    def times(self, side: str) -> float:
        """How many times as fast ours is."""
        return self.seconds[side] / self.ours


def _compared(each: TimedConv, seconds: float) -> ComparedConv:
    model, feed = each.model()
    (x,), weights = feed.values(), onnx.numpy_helper.to_array(model.graph.initializer[0])
    program = celosia.compile(model, accelerator=False, check=False)
    runtime, theirs = Runtime(program, threads=1), open_session(model, threads=1, exact=False)
    (name,) = (value.name for value in theirs.get_outputs())
    (expected,) = theirs.run([name], feed)
    made = [runtime.run(feed).outputs[name], each.by_numpy(x, weights)]
    runs: list[Callable[[], object]] = [
        lambda: runtime.run(feed), lambda: theirs.run([name], feed), lambda: each.by_numpy(x, weights),
    ]  # fmt: skip
    with threadpool_limits(1):
        ours, *others = time_alternating(runs, seconds)
    found, lack = dict(zip(SIDES, others)), ""
    try:
        with tempfile.TemporaryDirectory() as place:
            onnx.save(model, Path(place) / "conv.onnx")
            found["TVM"], outputs = tvm_seconds(Path(place) / "conv.onnx", feed, seconds)
        made += outputs
    except Missing as reason:
        lack = str(reason)
    return ComparedConv(each, ours, found, max(error(y, expected) for y in made), lack)


# The tile language -------------------------------------------------------------------------------------------------


def language(size: PaperSize, folder: Path | None, say: Say) -> Chart:
    """Kernels of the tile language beside onnxruntime and numpy."""
    from benchmarks.paper_figures import bars

    chart = Chart(
        "The tile language",
        "Kernels as Triton's tutorials have them, written in tiles, on one thread: how many times as fast as "
        "onnxruntime and as numpy. Below, int8 kernels on the accelerator: cycles of the timing model over those of "
        "the layer that the compiler makes by itself; softmax and attention with softmax = 8.",
    )  # fmt: skip
    measured = {row.key.split("/")[-1]: row for row in _kernels(size, say)}
    for name, row in measured.items():
        row.key, row.command = f"paper/language/{name}", size.command
        chart.rows.append(row)
    series = {side: [row.details[side] for row in measured.values()] for side in ("onnxruntime", "numpy")}
    chart.figures.append(
        ("The tile language", "", bars(list(measured), series, "times as fast as", one=True, log=True))
    )
    mean, other = (geomean(values) for values in series.values())
    details = {"geomean": mean, "numpy": other}
    text = f"{mean:.2f} of onnxruntime, {other:.1f} of numpy"
    what = f"{len(measured)} kernels of the tile language: geometric mean"
    chart.rows.append(Row("paper/language", what, "≥ 1 of onnxruntime", text, mean >= 1, size.command, details))
    ratios = {}
    for row in tile_language.layer_rows("timed", size.configs[0], say, size.operators):
        row.key, row.command = f"paper/{row.key}", size.command
        chart.rows.append(row)
        ratios[row.key.split("/")[-1].replace("_", " ")] = row.details["cycles"] / row.details["own"]
    series = {"cycles over the compiler's own": [*ratios.values()]}
    chart.figures.append(
        ("On the accelerator", "", bars(list(ratios), series, "cycles over the compiler's own", one=True))
    )
    what = (
        f"{len(ratios)} int8 kernels of the tile language on {size.configs[0]}: cycles over the compiler's own layers"
    )
    most, mean = max(ratios.values()), geomean([*ratios.values()])
    text, details = f"geometric mean {mean:.3f}, most {most:.3f}", {"geomean": mean, "most": most}
    chart.rows.append(Row("paper/language/accelerator", what, "≤ 1.1", text, most <= 1.1, size.command, details))
    return chart


def _kernels(size: PaperSize, say: Say) -> Iterator[Row]:
    names = list(tile_language.CPU)[: size.operators]
    yield from tile_language.cpu_rows(size.seconds, say, names)
