"""Charts of the CPU, and of searches: operators beside onnxruntime and numpy, the best after each trial, the tile
language. Both sides run in turn in one process, on one thread."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
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
from benchmarks import tune
from benchmarks.cpu import TOLERANCE, error
from benchmarks.kernels import _Writer
from benchmarks.paper_chart import Chart, PaperSize, Say, floats
from benchmarks.rows import Row
from celosia.compiler.tune.kernels.trial import by_turns
from celosia.compiler.tune.search import SEARCHES
from celosia.driver.oracle import session
from celosia.driver.runtime import Runtime
from celosia.hw.config import Config

Array = NDArray[Any]


def geomean(values: Sequence[float]) -> float:
    """Of ratios."""
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
        """The same as a product of windows, or where each channel is its own, as a sum of products."""
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
    """Convolutions of two networks in float beside onnxruntime's and numpy's."""
    from benchmarks.paper_figures import bars

    chart = Chart(
        "Operators on the CPU",
        "The convolutions that differ in ResNet-18 and MobileNet, float32, each alone on one thread: how many times as "
        "fast as onnxruntime, and as numpy (windows, and one product of matrices).",
    )  # fmt: skip
    means = []
    for name in (size.network, size.small):
        ratios: dict[str, tuple[float, float]] = {}
        wrong = 0.0
        for each in convolutions(floats(name))[: size.operators]:
            say(f"{name}: {each.name}")
            over, over_numpy, gap = _compared(each, size.seconds)
            ratios[each.name], wrong = (over, over_numpy), max(wrong, gap)
        series = {"onnxruntime": [a for a, _ in ratios.values()], "numpy": [b for _, b in ratios.values()]}
        figure = bars(list(ratios), series, "times as fast as", one=True, log=True)
        chart.figures.append((f"Operators of {name}", "", figure))
        mean, other = (geomean(values) for values in series.values())
        least = min(series["onnxruntime"])
        means.append(mean)
        details = {"geomean": mean, "least": least, "numpy": other, "error": wrong, "operators": ratios}
        text = f"{mean:.2f} of onnxruntime, least {least:.2f}; {other:.1f} of numpy; error {wrong:.0e}"
        met = mean >= 1 and wrong <= TOLERANCE
        what = f"{len(ratios)} convolutions of {name}, float32: geometric mean"
        chart.rows.append(Row(f"paper/operators/{name}", what, "≥ 1 of onnxruntime", text, met, size.command, details))
    chart.fact = f"{means[0]:.2f} x", f"as fast as onnxruntime, convolutions of {size.network}"
    return chart


def _compared(each: TimedConv, seconds: float) -> tuple[float, float, float]:
    """(times as fast as onnxruntime, as numpy, the largest error)."""
    model, feed = each.model()
    (x,), weights = feed.values(), onnx.numpy_helper.to_array(model.graph.initializer[0])
    program = celosia.compile(model, accelerator=False, check=False)
    runtime, theirs = Runtime(program, threads=1), session(model, threads=1)
    (name,) = (value.name for value in theirs.get_outputs())
    (expected,) = theirs.run([name], feed)
    gap = max(error(runtime.run(feed).outputs[name], expected), error(each.by_numpy(x, weights), expected))
    runs: list[Callable[[], object]] = [
        lambda: runtime.run(feed), lambda: theirs.run([name], feed), lambda: each.by_numpy(x, weights),
    ]  # fmt: skip
    with threadpool_limits(1):
        ours, other, numpys = by_turns(runs, seconds)
    return other / ours, numpys / ours, gap


# Searches ----------------------------------------------------------------------------------------------------------


LEAST_SEEN = 0.01
"""Percent above the best that the figure tells from none."""


def best_so_far(table: tune.Table, name: str, trials: int) -> Array:
    """Cycles of the best point after each trial of a search."""
    search = SEARCHES[name](table.space, np.random.default_rng(0))
    found: list[float] = []
    while len(found) < trials and (asked := search.ask(min(8, trials - len(found)))):
        costs = [table.cost(number) for number in asked]
        search.tell([(n, cost if np.isfinite(cost) else None) for n, cost in zip(asked, costs)])
        found += costs
    found += [min(found)] * (trials - len(found))
    return np.minimum.accumulate(np.array(found))


def search(size: PaperSize, folder: Path | None, say: Say) -> Chart:
    """The best after each trial, for each search that there is, on convolutions of ResNet-18."""
    from benchmarks.paper_figures import curves

    config = size.configs[0]
    cfg, names = Config.load(config), [name for name in SEARCHES if name != "exhaustive"]
    found = {name: np.empty((size.shapes, size.trials)) for name in names}
    with tempfile.TemporaryDirectory() as place:
        for number, shape in enumerate(tune.SMALL[: size.shapes]):
            table = tune.Table(cfg, shape.layer(cfg), Path(place))
            for name in names:
                say(f"{shape.name} on {config}: {name}")
                found[name][number] = best_so_far(table, name, size.trials)
    best = np.min([curve[:, -1] for curve in found.values()], axis=0)
    lines = {name: np.exp(np.log(curve / best[:, None]).mean(axis=0)) for name, curve in found.items()}
    chart = Chart(
        "Searches for schedules",
        f"{size.shapes} convolutions of ResNet-18 on {config}, cycles of the timing model: the best so far over the "
        "best that any of these searches has found, geometric mean. Each begins anew, with one seed.",
    )  # fmt: skip
    above = {name: [max(100 * float(each - 1), LEAST_SEEN) for each in line] for name, line in lines.items()}
    chart.figures.append(("Searches for schedules", "", curves(above, "trials", "% of cycles above the best found")))
    for name, line in lines.items():
        details = {"config": config, "first": float(line[0]), "last": float(line[-1]), "curve": line.tolist()}
        text = ", ".join(f"{line[n - 1]:.3f} after {n}" for n in (1, 8, size.trials))
        what = f"{name}: cycles over the best that any search has found"
        chart.rows.append(Row(f"paper/search/{name}", what, "", text, None, size.command, details))
    return chart


# The tile language -------------------------------------------------------------------------------------------------


def language(size: PaperSize, folder: Path | None, say: Say) -> Chart:
    """Kernels of the tile language beside onnxruntime and numpy."""
    from benchmarks.paper_figures import bars

    chart = Chart(
        "The tile language",
        "Kernels as Triton's tutorials have them, written in tiles, on one thread: how many times as fast as "
        "onnxruntime and as numpy.",
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
    return chart


def _kernels(size: PaperSize, say: Say) -> Iterator[Row]:
    names = list(tile_language.CPU)[: size.operators]
    yield from tile_language.cpu_rows(size.seconds, say, names)
