"""Searches for schedules, in one file as all share its tables: regret, a model's ranking, networks, a second worker.

    python -m benchmarks tune [--full] [--only regret|judged|model|network|fleet] [--config NAME]

The optimum of a layer is that of all its points on the timing model, known to 0.3%; points that cannot be better, by
their lower bounds, need not run for it, and regret is counted from what is proved. Cycles of points are kept in
bench/tune, so that an interrupted run goes on where it was.
"""

from __future__ import annotations

import importlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.rows import ROOT, Request, Row
from benchmarks.workloads import WORKLOADS, Missing
from celosia.compiler import numerics
from celosia.compiler.compile import network_of
from celosia.compiler.launch.image import LayerErrors
from celosia.compiler.layer import Activation, Epilogue, Gemm, Layer, Requantise, Residual, TilingError, Window
from celosia.compiler.tensorize.plan import Planner
from celosia.compiler.tune.device_pool import Fleet
from celosia.compiler.tune.layer_space import Point, layer_space
from celosia.compiler.tune.layer_trial import TIMED, VERSION, CostSource, LayerCase, LayerJob, Status, measure, pickled
from celosia.compiler.tune.network import Occurrence
from celosia.compiler.tune.search import SEARCHES, Floats, MissingLearner, Space, ridge, trees
from celosia.driver.tune.tune import tune
from celosia.hw.spec.config import Config

KNOWN = 0.003
"""How well the optimum of a layer is known at least."""
KEPT = ROOT / "bench" / "tune"
"""Cycles that were computed before."""
PLOT = ROOT / "bench" / "regret.png"


MARGIN = 1.01
"""What bounds, which are proved of the timing model, may be above the RTL's cycles."""


@dataclass(frozen=True)
class Shape:
    """A convolution: channels, rows and columns of its input, channels of its output, kernel, stride; how many images,
    which are the rows of a matrix where each is one pixel."""

    channels: int
    size: int
    outputs: int
    kernel: int
    stride: int = 1
    residual: bool = False
    images: int = 1

    @property
    def name(self) -> str:
        """As rows name it."""
        text = (
            f"{self.images}x" * (self.images > 1)
            + f"{self.channels}x{self.size}x{self.size} to {self.outputs}, {self.kernel}x{self.kernel}"
        )
        return text + (f" / {self.stride}" if self.stride > 1 else "") + (" +" if self.residual else "")

    def layer(self, cfg: Config) -> Layer:
        """With random weights: a schedule's cycles do not depend on them."""
        rng, pad = np.random.default_rng(0), self.kernel // 2
        size = (self.size + 2 * pad - self.kernel) // self.stride + 1
        x = Activation.alone(cfg, "x", self.images, self.channels, self.size, self.size)
        y = Activation.alone(cfg, "y", self.images, self.outputs, size, size)
        weights = rng.integers(-128, 128, (self.outputs, self.channels, self.kernel, self.kernel)).astype(np.int8)
        reach = 74 * 74 * (self.channels * self.kernel**2) ** 0.5
        scale = numerics.scale_to_multiplier(np.full(self.outputs, 60 / reach, np.float32))
        bias = rng.integers(-1000, 1000, self.outputs).astype(np.int32)
        add = Residual(Activation.alone(cfg, "b", *y.dims), 1 << 13, 1 << 13, 0, 14) if self.residual else None
        window = Window((self.kernel,) * 2, (self.stride,) * 2, pads=(pad,) * 4)
        epilogue = Epilogue(residual=add)
        requantise = Requantise(bias, *scale, 3)
        return Layer(self.name, x, y, window, gemm=Gemm(weights), requantise=requantise, epilogue=epilogue)


RESNET18 = (
    Shape(147, 112, 64, 1),  # the first layer, as windows of 7x7
    *(Shape(c, s, c, 3) for c, s in ((64, 56), (128, 28), (256, 14), (512, 7))),
    *(Shape(c, s, 2 * c, 3, 2) for c, s in ((64, 56), (128, 28), (256, 14))),
    *(Shape(c, s, 2 * c, 1, 2) for c, s in ((64, 56), (128, 28), (256, 14))),
    *(Shape(c, s, c, 3, residual=True) for c, s in ((64, 56), (128, 28), (256, 14), (512, 7))),
)
"""Its convolutions that differ."""
SMALL = RESNET18[1:4]
"""For a run of minutes: bounds leave few points that must run."""


JUDGED_SHAPES = (
    Shape(12, 7, 16, 3), Shape(16, 8, 16, 3, 2), Shape(16, 7, 32, 1), Shape(16, 4, 16, 3), Shape(8, 8, 16, 1, 2),
    Shape(8, 8, 8, 3, residual=True), Shape(24, 5, 12, 1),
)  # fmt: skip
"""Convolutions like ResNet's, small enough for many runs of the RTL."""


def space_of(cfg: Config, layer: Layer) -> Space[Point]:
    """The decisions of `layer`, those that the compiler takes among them."""
    planner = Planner(cfg)
    usual = tuple(d for part in planner.layer(layer) for d in part.tiling.groups)
    return layer_space(cfg, layer, usual)


class Table:
    """Cycles of points of a layer on the timing model, inf where one does not compile; kept in a file. judge: who else
    says how many there are; its bytes are compared, too."""

    def __init__(
        self,
        cfg: Config,
        layer: Layer,
        folder: Path = KEPT,
        judge: CostSource = TIMED,
        space: Space[Point] | None = None,
    ) -> None:
        self.cfg, self.layer, self.judge = cfg, layer, judge
        self.space = space_of(cfg, layer) if space is None else space
        digest = self.space.name.rsplit("#")[-1]
        who = "" if judge == TIMED else f"{judge.device}-"
        self.path = folder / f"{who}{cfg.name}-{cfg.digest[:8]}-{digest}-v{VERSION}.json"
        self.costs: dict[int, float] = {}
        self.longer: set[int] = set()
        """Points that were given up, at what was the best then; -1 in the file."""
        if self.path.exists():
            known = json.loads(self.path.read_text(encoding="utf-8"))
            found = {n: float(known[str(p)]) for n, p in enumerate(self.space.points) if str(p) in known}
            self.costs = {n: cost for n, cost in found.items() if cost >= 0}
            self.longer = {n for n, cost in found.items() if cost < 0}
        self.case, self.fresh = LayerCase(cfg, layer), 0

    def cost(self, number: int) -> float:
        """Cycles of point `number`; runs it where that is not known."""
        if number not in self.costs:
            self.longer.discard(number)
            self.costs[number] = self._timed(number) if self.judge == TIMED else self._judged(number, 0)
            self._count()
        return self.costs[number]

    def _timed(self, number: int) -> float:
        try:
            return self.case.cycles(self.space.points[number])
        except (LayerErrors, TilingError):
            return float("inf")

    def _judged(self, number: int, limit: int) -> float:
        """inf where it is given up at `limit` cycles, or refused. Wrong bytes are an error."""
        result = measure(LayerJob(self.cfg, pickled(self.layer), self.space.points[number], self.judge, limit))
        if result.status not in (Status.OK, Status.CENSORED, Status.REFUSED):
            raise RuntimeError(f"{self.layer.name} on {self.cfg.name}: {result.status}: {result.detail}")
        return float("inf") if result.cost is None else result.cost

    def _count(self) -> None:
        self.fresh += 1
        if self.fresh % 100 == 0:
            self.keep()

    def optimum(self, say: Callable[[str], None]) -> float:
        """The fewest cycles of all points, or up to KNOWN below, proved. Points whose lower bound is not below it need
        not run."""
        best = self.cost(int(np.argmin(self.space.predicted)))
        order = np.argsort(self.space.bounds, kind="stable").tolist()
        for count, number in enumerate(order):
            if self.space.bounds[number] >= best * (1 - KNOWN):
                best = min(best, float(self.space.bounds[number]))
                break
            say(f"{self.cfg.name}, {self.layer.name}: point {count:,} of {len(order):,} at most")
            best = min(best, self.cost(number))
        self.keep()
        return best

    def judged_optimum(self, say: Callable[[str], None]) -> tuple[float, int]:
        """The fewest cycles of all points as `judge` counts them, and how many points it has run: those that the bounds
        leave, the most promising first, each given up where it takes longer than the best so far."""
        order = np.argsort(self.space.base, kind="stable").tolist()
        best, ran = self.cost(order[0]), 1
        for count, number in enumerate(order[1:], 1):
            if self.space.bounds[number] >= best * MARGIN:
                continue
            say(f"{self.judge.device}, {self.cfg.name}, {self.layer.name}: point {count:,} of {len(order):,}")
            ran += 1
            if number in self.costs:
                best = min(best, self.costs[number])
            elif number not in self.longer:
                found = self._judged(number, int(best))
                if np.isfinite(found):
                    best = self.costs[number] = found
                else:
                    self.longer.add(number)
                self._count()
        self.keep()
        return best, ran

    def keep(self) -> None:
        """Writes what is known to the file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        known = {str(self.space.points[n]): cost for n, cost in self.costs.items()}
        known |= {str(self.space.points[n]): -1.0 for n in self.longer}
        fresh = self.path.with_suffix(".new")
        fresh.write_text(json.dumps(known), encoding="utf-8")
        os.replace(fresh, self.path)


# Regret -----------------------------------------------------------------------------------------------------------

LOOKS = (1, 8, 16, 32, 64)
"""Trials after which a search's regret is printed."""
CLOSE = 0.01
"""The regret at which a search has arrived."""


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    shapes: Sequence[Shape]
    seeds: int
    trials: int
    sampled: int
    networks: Sequence[str]
    configs: Sequence[str]
    jobs: int
    judged: Sequence[Shape]
    modelled: Sequence[str]
    """Networks whose layers a model is asked about, beside the shapes."""


CI = Size(SMALL, 2, 16, 24, ("demo",), ("pynq",), 24, JUDGED_SHAPES[:1], ("demo",))
FULL = Size(
    RESNET18, 20, 64, 150, ("resnet18", "mobilenet_v2", "mobilenet_v2_160", "ds_cnn", "demo"),
    ("pynq", "ultra96", "zcu104"), 100, JUDGED_SHAPES, ("mobilenet_v2", "ds_cnn", "demo"),
)  # fmt: skip
LEAST = 8
"""Points of a layer of which a ranking says something."""
JUDGED = ("pynq", "zcu104")
"""Configs of the regret."""
WITHOUT_SEED = ("descent",)
"""Searches in which nothing is random."""


def regrets(table: Table, name: str, seed: int, trials: int, best: float) -> Floats:
    """After each trial: the share by which the best so far takes more cycles than the best of all, which is known to
    within KNOWN.

    Nothing is run that cannot change it: trials after the best point that is known, and those of the random search,
    which learns nothing, whose lower bound is above the best so far.
    """
    search = SEARCHES[name](table.space, np.random.default_rng(seed))
    least, found = min(table.costs.values()), [float("inf")]
    while len(found) <= trials and min(found) > least:
        if not (asked := search.ask(min(8, trials + 1 - len(found)))):
            break
        idle = [name == "random" and table.space.bounds[number] >= min(found) for number in asked]
        costs = [float("inf") if skip else table.cost(number) for number, skip in zip(asked, idle)]
        search.tell([(n, c if np.isfinite(c) else None) for n, c in zip(asked, costs)])
        found += costs
    found = found[1:]
    curve = np.minimum.accumulate(np.array(found)) / best - 1
    return np.concatenate([curve, np.full(trials - len(curve), curve[-1])])


def regret_rows(size: Size, configs: Sequence[str], say: Callable[[str], None], command: str) -> Iterator[Row]:
    """How much more than the best cycles each search ends with."""
    curves: dict[str, dict[str, Floats]] = {}
    for config in configs:
        cfg = Config.load(config)
        tables = [Table(cfg, shape.layer(cfg)) for shape in size.shapes]
        best = [table.optimum(say) for table in tables]
        for name in SEARCHES:
            seeds = 1 if name in WITHOUT_SEED else size.seeds
            say(f"{config}: {name}")
            found = np.array([
                [regrets(table, name, seed, size.trials, low) for seed in range(seeds)]
                for table, low in zip(tables, best)
            ])  # fmt: skip
            curves.setdefault(config, {})[name] = found.reshape(-1, size.trials)
            for table in tables:
                table.keep()
            yield _regret_row(config, name, found, [shape.name for shape in size.shapes], command)
    draw(curves, PLOT.with_stem("-".join(("regret", *curves))))


def _regret_row(config: str, name: str, found: Floats, layers: list[str], command: str) -> Row:
    """found: [layers, seeds, trials]."""
    trials = found.shape[2]
    close = found <= CLOSE
    arrived = np.where(close.any(axis=2), close.argmax(axis=2) + 1, trials + 1)
    low, middle, high = np.percentile(arrived, [25, 50, 75], method="lower")
    worst = int(np.median(arrived, axis=1).max())
    looks = ", ".join(f"{np.median(found[:, :, n - 1]):.2%} after {n}" for n in LOOKS if n <= trials)
    text = f"within 1% after {middle} trials ({low} to {high}); {int((arrived <= 8).sum())} of {arrived.size} runs in 8"
    text += f"; median regret {looks}"
    default = name == next(iter(SEARCHES))
    details = {"config": config, "arrived": dict(zip(layers, arrived.tolist()))}
    what = f"{name} on {config}: {found.shape[0]} layers, {found.shape[1]} seeds, best of all points known"
    target = "within 1% in 8 trials on every layer" if default else ""
    return Row(f"tune/regret/{config}/{name}", what, target, text, worst <= 8 if default else None, command, details)


def draw(curves: dict[str, dict[str, Floats]], path: Path) -> None:
    """Regret over trials, median and quartiles, where matplotlib is installed."""
    try:
        pyplot: Any = importlib.import_module("matplotlib.pyplot")
    except ImportError:
        return
    figure, axes = pyplot.subplots(1, len(curves), figsize=(6 * len(curves), 4), sharey=True, squeeze=False)
    for axis, (config, searches) in zip(axes[0], curves.items()):
        for name, found in searches.items():
            low, middle, high = np.percentile(100 * found, [25, 50, 75], axis=0)
            trials = np.arange(1, len(middle) + 1)
            axis.plot(trials, middle, label=name)
            axis.fill_between(trials, low, high, alpha=0.12)
        axis.set(title=config, xlabel="trials", ylabel="regret, %", yscale="symlog")
    axes[0][-1].legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, bbox_inches="tight")


# The RTL as the judge -----------------------------------------------------------------------------------------------


def judged_rows(size: Size, say: Callable[[str], None], command: str) -> Iterator[Row]:
    """On `tiny`: what the default search finds on the RTL, and the best that there is on it."""
    cfg, rtl = Config.load("tiny"), CostSource("rtl")
    for shape in size.judged:
        table = Table(cfg, shape.layer(cfg), judge=rtl)
        best, ran = table.judged_optimum(say)
        curve = regrets(table, next(iter(SEARCHES)), 0, size.trials, best)
        table.keep()
        tried = int(np.argmin(curve)) + 1
        text = f"{curve[-1]:.2%} in {size.trials} trials, the last better one number {tried}; best {best:,.0f} cycles"
        text += f", of {len(table.space):,} points {ran:,} ran"
        what = f"{shape.name} on tiny, judged by the RTL: regret of the default search"
        met = bool(curve[-1] <= CLOSE)
        yield Row(f"tune/judged/{shape.name}", what, "<= 1%", text, met, command, {"config": "tiny"})


# Models -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """Points of a layer of a network with their cycles."""

    config: str
    network: str
    layer: str
    features: Floats
    predicted: Floats
    bounds: Floats
    costs: Floats

    @property
    def base(self) -> Floats:
        """The estimate that a model corrects."""
        return np.maximum(self.predicted, self.bounds)


def _tables(size: Size, config: str, folder: Path | None) -> Iterator[tuple[str, str, Table]]:
    """Network, layer, and its points: the shapes of ResNet-18, and the layers of the networks that are there."""
    cfg = Config.load(config)
    for shape in size.shapes:
        yield "resnet18", shape.name, Table(cfg, shape.layer(cfg))
    for name in size.modelled:
        with suppress(Missing):
            for each in occurrences(WORKLOADS[name].path(folder), cfg):
                space = layer_space(cfg, each.layer, each.usual)
                if len(space) >= LEAST:
                    yield name, each.layer.name, Table(cfg, each.layer, space=space)


def occurrences(path: Path, cfg: Config) -> list[Occurrence]:
    """The layers of the network at `path` that differ, under the compiler's own decisions."""
    return network_of(path, cfg).occurrences()


def _samples(size: Size, configs: Sequence[str], folder: Path | None, say: Callable[[str], None]) -> Iterator[Sample]:
    for config in configs:
        for network, layer, table in _tables(size, config, folder):
            say(f"{config}, {network}, {layer}: points for the models")
            # Half at random, half of those that a search would look at.
            near = np.argsort(table.space.base)[: size.sampled // 2].tolist()
            drawn = table.space.sample(size.sampled // 2, np.random.default_rng(0))
            numbers = [n for n in dict.fromkeys((*near, *drawn)) if np.isfinite(table.cost(n))]
            table.keep()
            space, costs = table.space, np.array([table.cost(n) for n in numbers])
            features = space.features[numbers]
            yield Sample(config, network, layer, features, space.predicted[numbers], space.bounds[numbers], costs)


def ranks(values: Floats) -> Floats:
    """0 for the lowest; equal ones share."""
    _, where, counts = np.unique(values, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(counts) - (counts + 1) / 2)[where], np.float64)


def _scores(expected: Floats, costs: Floats) -> tuple[float, float, float]:
    """Rank correlation, regret of the first, and the share of the best 8 that are among the first 8."""
    order = np.argsort(expected, kind="stable")
    rho = float(np.corrcoef(ranks(expected), ranks(costs))[0, 1]) if np.ptp(costs) and np.ptp(expected) else 1.0
    eighth = np.sort(costs)[min(8, len(costs)) - 1]
    return rho, float(costs[order[0]] / costs.min() - 1), float((costs[order[:8]] <= eighth).mean())


def model_rows(
    size: Size, configs: Sequence[str], folder: Path | None, say: Callable[[str], None], command: str
) -> Iterator[Row]:
    """How well each learner orders points of what it has not seen."""
    samples = list(_samples(size, configs, folder, say))
    learners: dict[str, Any] = {"estimate": None, "estimate and bound": None, "ridge": ridge, "trees": trees,
                                "trees, by rank": partial(trees, rank=True)}  # fmt: skip
    for left_out in ("layer", "network", "config"):
        if len({getattr(sample, left_out) for sample in samples}) == 1:
            continue  # nothing to learn from
        for name, learner in learners.items():
            say(f"model: {name}, {left_out} left out")
            what = f"model: {name}, on {left_out}s that it has not seen"
            try:
                scores = [_scored(name, learner, samples, left_out, sample) for sample in samples]
            except MissingLearner as reason:
                yield Row(f"tune/model/{left_out}/{name}", what, "", f"skipped: {reason}", None, command)
                continue
            rho, regret, recall = np.mean(scores, axis=0)
            text = f"rank correlation {rho:.3f}, regret of its first {regret:.2%}, recall@8 {recall:.0%}"
            yield Row(f"tune/model/{left_out}/{name}", what, "", text, None, command)


def _scored(name: str, learner: Any, samples: list[Sample], left_out: str, one: Sample) -> tuple[float, float, float]:
    if learner is None:
        return _scores(one.predicted if name == "estimate" else one.base, one.costs)
    seen = [s for s in samples if getattr(s, left_out) != getattr(one, left_out)]
    targets = np.concatenate([np.log(s.costs / s.base) for s in seen])
    predict = learner(np.concatenate([s.features for s in seen]), targets)
    return _scores(np.maximum(one.base * np.exp(predict(one.features)), one.bounds), one.costs)


# Whole networks, and the fleet --------------------------------------------------------------------------------------


def network_rows(size: Size, folder: Path | None, say: Callable[[str], None], command: str) -> Iterator[Row]:
    """Each network tuned, and again from its records."""
    for name in size.networks:
        for config in size.configs:
            key, what = f"tune/network/{name}/{config}", f"{name} on {config}: cycles untuned over tuned"
            target = "never worse; again from records: 0 measured, the same"
            say(what)
            try:
                path = WORKLOADS[name].path(folder)
            except Missing as reason:
                yield Row(key, what, target, f"skipped: {reason}", None, command)
                continue
            records = KEPT / f"{name}-{config}.jsonl"
            records.parent.mkdir(parents=True, exist_ok=True)
            trials = 400 if size is FULL else 60
            first, second = (
                tune(path, config, trials=trials, records=records, jobs=os.cpu_count() or 1).report for _ in range(2)
            )
            ratio = first["untuned"] / first["cycles"]
            text = f"{ratio:.4f} ({first['untuned']:,} to {first['cycles']:,}); {first['trials']} trials"
            text += f", {first['failed']} without a result; layers at most {first['regret']:.1%} from the best"
            text += f"; again: {second['measured']} measured, {second['cycles']:,}"
            met = ratio >= 1 and second["measured"] == 0 and second["cycles"] == first["cycles"]
            yield Row(key, what, target, text, met, command, {"config": config, "ratio": ratio})


def fleet_rows(size: Size, say: Callable[[str], None], command: str) -> Iterator[Row]:
    """Trials a second of one process, and of two."""
    rates = fleet_rates(size.jobs, (1, 2), say)
    text = f"{rates[1] / rates[0]:.2f} ({rates[0]:.1f} and {rates[1]:.1f} a second)"
    what = "fleet of 2 processes over 1: trials a second, timed"
    yield Row("tune/fleet", what, ">= 1.8 on two idle cores", text, rates[1] >= 1.8 * rates[0], command)


def fleet_rates(trials: int, fleets: Sequence[int], say: Callable[[str], None]) -> list[float]:
    """Trials a second, for each fleet of so many processes: of a convolution of ResNet-18, by the timing model."""
    cfg = Config.load("pynq")
    layer = SMALL[0].layer(cfg)
    space = space_of(cfg, layer)
    jobs = [LayerJob(cfg, pickled(layer), space.points[n]) for n in space.sample(trials, np.random.default_rng(0))]
    rates = []
    for workers in fleets:
        say(f"fleet of {workers}")
        with Fleet.local(workers) as fleet:
            fleet.run(jobs[: 2 * workers], lambda number, result: None)  # until all have started
            started = time.perf_counter()
            fleet.run(jobs, lambda number, result: None)
            rates.append(len(jobs) / (time.perf_counter() - started))
    return rates


PARTS = ("regret", "judged", "model", "network", "fleet")


def rows(asked: Request) -> Iterator[Row]:
    """All of PARTS, or one of them, on one Config where there are several. With --full: hours the first time, for
    cycles of points are kept."""
    folder, say, only, config = asked.folder, asked.say, asked.only, asked.config
    size, command = (FULL, "python -m benchmarks tune --full") if asked.full else (CI, "python -m benchmarks tune")
    configs = JUDGED if config is None else (config,)
    if config is not None:
        size = replace(size, configs=(config,))
    if only in (None, "regret"):
        yield from regret_rows(size, configs, say, f"{command} --only regret")
    if only in (None, "judged"):
        yield from judged_rows(size, say, f"{command} --only judged")
    if only in (None, "model"):
        yield from model_rows(size, configs, folder, say, f"{command} --only model")
    if only in (None, "network"):
        yield from network_rows(size, folder, say, f"{command} --only network")
    if only in (None, "fleet"):
        yield from fleet_rows(size, say, f"{command} --only fleet")
