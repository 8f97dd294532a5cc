"""Searches for schedules: regret against trials, a model's ranking, whole networks, and what a second worker brings.

    python -m benchmarks tune [--full]

The optimum of a layer is that of all its points on the timing model. Cycles of points are kept in bench/tune, so that
an interrupted run goes on where it was.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from celosia.compiler import numerics
from celosia.compiler.image import LayerErrors
from celosia.compiler.layer import Activation, Conv, Epilogue, Requantise, Residual, Untileable, Window
from celosia.compiler.tensorize.plan import Planner
from celosia.compiler.tune.measure import VERSION, Case
from celosia.compiler.tune.space import Point, Space, layer_space
from celosia.hw.config import Config

ROOT = Path(__file__).parent.parent
KEPT = ROOT / "bench" / "tune"
"""Cycles that were computed before."""


@dataclass(frozen=True)
class Shape:
    """A convolution: channels, rows and columns of its input, channels of its output, kernel, stride."""

    channels: int
    size: int
    outputs: int
    kernel: int
    stride: int = 1
    residual: bool = False

    @property
    def name(self) -> str:
        text = f"{self.channels}x{self.size}x{self.size} to {self.outputs}, {self.kernel}x{self.kernel}"
        return text + (f" / {self.stride}" if self.stride > 1 else "") + (" +" if self.residual else "")

    def layer(self, cfg: Config) -> Conv:
        """With random weights: a schedule's cycles do not depend on them."""
        rng, pad = np.random.default_rng(0), self.kernel // 2
        size = (self.size + 2 * pad - self.kernel) // self.stride + 1
        x = Activation.alone(cfg, "x", 1, self.channels, self.size, self.size)
        y = Activation.alone(cfg, "y", 1, self.outputs, size, size)
        weights = rng.integers(-128, 128, (self.outputs, self.channels, self.kernel, self.kernel)).astype(np.int8)
        reach = 74 * 74 * (self.channels * self.kernel**2) ** 0.5
        scale = numerics.fold_scale(np.full(self.outputs, 60 / reach, np.float32))
        bias = rng.integers(-1000, 1000, self.outputs).astype(np.int32)
        add = Residual(Activation.alone(cfg, "b", *y.dims), 1 << 13, 1 << 13, 0, 14) if self.residual else None
        window = Window((self.kernel,) * 2, (self.stride,) * 2, pads=(pad,) * 4)
        epilogue = Epilogue(residual=add)
        return Conv(self.name, x, y, weights, Requantise(bias, *scale, 3), window, epilogue=epilogue)


RESNET18 = (
    Shape(147, 112, 64, 1),  # the first layer, as windows of 7x7
    *(Shape(c, s, c, 3) for c, s in ((64, 56), (128, 28), (256, 14), (512, 7))),
    *(Shape(c, s, 2 * c, 3, 2) for c, s in ((64, 56), (128, 28), (256, 14))),
    *(Shape(c, s, 2 * c, 1, 2) for c, s in ((64, 56), (128, 28), (256, 14))),
    *(Shape(c, s, c, 3, residual=True) for c, s in ((64, 56), (128, 28), (256, 14), (512, 7))),
)
"""Its convolutions that differ."""
SMALL = (Shape(64, 14, 64, 3), Shape(128, 14, 256, 1, 2), Shape(96, 7, 160, 3), Shape(64, 28, 32, 1))
"""For a run of a minute."""


def space_of(cfg: Config, layer: Conv) -> Space[Point]:
    planner = Planner(cfg)
    usual = tuple(d for part in planner.layer(layer) for d in part.decisions.groups)
    return layer_space(cfg, layer, usual)


class Table:
    """Cycles of points of a layer on the timing model, inf where one does not compile; kept in a file."""

    def __init__(self, cfg: Config, layer: Conv, folder: Path = KEPT) -> None:
        self.cfg, self.layer, self.space = cfg, layer, space_of(cfg, layer)
        digest = self.space.name.rsplit("#")[-1]
        self.path = folder / f"{cfg.name}-{cfg.digest[:8]}-{digest}-v{VERSION}.json"
        self.costs: dict[int, float] = {}
        if self.path.exists():
            known = json.loads(self.path.read_text(encoding="utf-8"))
            self.costs = {n: float(known[str(p)]) for n, p in enumerate(self.space.points) if str(p) in known}
        self.case, self.fresh = Case(cfg, layer), 0

    def cost(self, number: int) -> float:
        if number not in self.costs:
            try:
                self.costs[number] = self.case.cycles(self.space.points[number])
            except (LayerErrors, Untileable):
                self.costs[number] = float("inf")
            self.fresh += 1
            if self.fresh % 100 == 0:
                self.keep()
        return self.costs[number]

    def optimum(self, say: Callable[[str], None]) -> float:
        """The fewest cycles of all points. Those whose lower bound is not below it need not run."""
        best = self.cost(int(np.argmin(self.space.predicted)))
        order = np.argsort(self.space.bounds, kind="stable").tolist()
        for count, number in enumerate(order):
            if self.space.bounds[number] >= best:
                break
            say(f"{self.cfg.name}, {self.layer.name}: point {count:,} of {len(order):,} at most")
            best = min(best, self.cost(number))
        self.keep()
        return best

    def keep(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        known = {str(self.space.points[n]): cost for n, cost in self.costs.items()}
        fresh = self.path.with_suffix(".new")
        fresh.write_text(json.dumps(known), encoding="utf-8")
        os.replace(fresh, self.path)
