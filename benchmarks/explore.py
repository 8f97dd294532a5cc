"""The search for Configs: what it finds of a front that is known, and what it finds where none is.

    python -m benchmarks explore [--full] [--only front|best|vta|judged|budget]

The true front is that of a sub-space whose Configs were all measured, which takes half an hour; what was measured is
kept in bench/explore, so that an interrupted run goes on where it was.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.rows import ROOT, Request, Row, Say, judged, skipped
from benchmarks.workloads import WORKLOADS, Missing
from celosia.bitstreams.synthesis import measure_usage
from celosia.compiler.layer import TilingError
from celosia.compiler.tune.device_pool import Fleet, Job
from celosia.compiler.tune.layer_trial import VERSION, Status, TrialResult
from celosia.compiler.tune.records import append_line, decode_line, encode_line
from celosia.driver.explore.configs import ConfigSpace
from celosia.driver.explore.confirm import measure_rtl_cycles
from celosia.driver.explore.explore import Exploration, explore, first_configs
from celosia.driver.explore.explorer import Explorer
from celosia.driver.explore.ladder import Ladder
from celosia.driver.explore.model_cost import CostJob, ExploredModel, count_cpu_operators, measure_cycles, parse_cost
from celosia.driver.explore.objectives import objectives
from celosia.driver.explore.pareto import Floats, hypervolume, on_front, reference_point
from celosia.driver.explore.records import Points, exploration_context
from celosia.driver.explore.resource_use import Resources
from celosia.driver.explore.search import SEARCHES, ConfigOutcome, ConfigSearch, Proposal
from celosia.hw.boards.board import Board
from celosia.hw.boards.boards import find_board
from celosia.hw.spec.config import Config

KEPT = ROOT / "bench" / "explore"
BOARD = "pynq-z2"
NAMES = ("cycles", "area")
LARGE = {
    "block_in": (4, 8, 16, 32), "block_out": (4, 8, 16, 32), "bus_bytes": (4, 8), "ports": (1, 2), "taps": (0, 3),
    "inp_depth": (256, 1024, 2048, 4096), "wgt_depth": (64, 256, 1024), "acc_depth": (512, 2048), "forward": (False,),
    "residual_cycles": (2,), "batch": (1,), "packed": (True,), "pump": (1,), "out_depth": (1024,), "vin_depth": (2048,),
    "par_depth": (64,), "lut_count": (2,), "queue_depth": (16,), "tap_depth": (512,),
}  # fmt: skip
"""3,072 Configs, of which 2,112 fit; without blocks of layers, whose tiles take most of the compiler's time."""
SMALL = LARGE | {
    "block_in": (4, 8, 16), "block_out": (8, 16), "ports": (1,), "taps": (0, 3), "inp_depth": (256, 1024),
    "wgt_depth": (64, 1024), "acc_depth": (2048,),
}  # fmt: skip
"""For a run of minutes."""


@dataclass
class FrontTable:
    """A Measurer that knows what was measured: costs of models on Configs, closed and timed."""

    path: Path
    name: str = "what was measured"
    known: dict[tuple[str, str, str], TrialResult] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.path.exists():
            for line in filter(None, self.path.read_bytes().split(b"\n")):
                try:
                    row = decode_line(line)
                except (ValueError, KeyError, TypeError):
                    continue
                result = TrialResult(Status(row["status"]), row["cycles"], row["detail"])
                self.known[row["model"], row["config"], row["rung"]] = result

    def fill(self, asks: Sequence[CostJob], say: Say, jobs: int) -> None:
        """Measure what is not known."""
        missing = [ask for ask in asks if _key(ask) not in self.known]
        self.path.parent.mkdir(parents=True, exist_ok=True)

        def keep(number: int, result: TrialResult) -> None:
            self.known[_key(missing[number])] = result
            model, config, rung = _key(missing[number])
            found = {"status": result.status.value, "cycles": result.cycles, "detail": result.detail}
            append_line(self.path, encode_line({"model": model, "config": config, "rung": rung, **found}))
            say(f"front: {len(self.known):,} of {len(asks):,} known")

        if missing:
            with Fleet.local(jobs) as fleet:
                fleet.run(missing, keep)

    def measure(self, job: Job, deadline: float) -> TrialResult:
        assert isinstance(job, CostJob)
        return self.known[_key(job)]

    def close(self) -> None:
        pass


def _key(ask: CostJob) -> tuple[str, str, str]:
    return ask.subject.digest, ask.cfg.digest, ask.rung


@dataclass(frozen=True)
class Known:
    """A space of which all is measured. front: objectives of the true front; worst: of all, what volumes are up to."""

    space: ConfigSpace
    subjects: list[ExploredModel]
    table: FrontTable
    front: Floats
    worst: Floats
    count: int


def known_space(
    values: dict[str, tuple[int | bool, ...]], paths: Sequence[Path], folder: Path, say: Say,
    jobs: int = 1,
) -> Known:  # fmt: skip
    """All of a space measured, and its true front, of what fits the device."""
    board = find_board(BOARD)
    space = ConfigSpace.of(board, values)
    subjects = [ExploredModel.of(path) for path in paths]
    table = FrontTable(folder / f"table-v{VERSION}.jsonl")
    fitting, device = [], board.device
    for cfg in space:
        if Resources.of(cfg, device).explain_misfit(device, 0.0) is None:
            fitting.append(cfg)
    asked = [*fitting, replace(board.config, name="custom")]
    # All of a Config one after the other, so that what a process knows of it is used
    asks = [
        CostJob(subject, cfg, rung, board.memory.name)
        for cfg in asked for subject in subjects for rung in ("closed", "timed")
    ]  # fmt: skip
    table.fill(asks, say, jobs)
    on_cpu = {each.name: count_cpu_operators(each, board.config) for each in subjects}
    rows = []
    for cfg in fitting:
        results = [table.known[subject.digest, cfg.digest, "timed"] for subject in subjects]
        if all(result.status == Status.OK for result in results):
            costs = [parse_cost(result) for result in results]
            if all(cost.on_cpu <= on_cpu[each.name] for cost, each in zip(costs, subjects)):
                figures = objectives(cfg, costs, Resources.of(cfg, device), board, board.clock_mhz)
                rows.append([figures[name] for name in NAMES])
    values_ = np.array(rows)
    return Known(space, subjects, table, values_[on_front(values_)], reference_point(values_), len(rows))


def found_share(known: Known, search: str, seed: int, share: float) -> float:
    """Hypervolume that a search has found of the true front's, after `share` of all were measured."""
    board = find_board(BOARD)
    points = Points(None, exploration_context(known.subjects, BOARD, board.memory.name))
    on_cpu = {each.name: count_cpu_operators(each, board.config) for each in known.subjects}
    rng = np.random.default_rng(seed)
    most = int(share * known.count)
    with Fleet([known.table]) as fleet:
        ladder = Ladder(known.subjects, board, board.memory.name, 0.0, fleet, points, time.perf_counter, on_cpu)
        start = first_configs(ladder, known.space, rng)
        kind = SEARCHED[search.removesuffix(" alone")]
        explorer = Explorer(ladder, known.space, kind(known.space, rng, start), NAMES)
        explorer.filtering = not search.endswith(" alone")
        explorer.run(lambda state: 0 if state.points + 4 > most else 4, 4)
        values = explorer.values(explorer.measured.values())
    assert len(values) <= most
    return hypervolume(values, known.worst) / hypervolume(known.front, known.worst)


class Tpe(ConfigSearch):
    """Optuna's multi-objective TPE as it comes, one value at random for each field to begin with."""

    def __init__(self, space: ConfigSpace, rng: np.random.Generator, start: Sequence[Config] = ()) -> None:
        import optuna

        super().__init__(space, rng, start)
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        sampler = optuna.samplers.TPESampler(seed=int(rng.integers(1 << 31)))
        self.study = optuna.create_study(directions=["minimize"] * len(NAMES), sampler=sampler)
        self.fields = {
            name: optuna.distributions.CategoricalDistribution(space.values[name]) for name in space.searched
        }  # fmt: skip
        self.failed = optuna.trial.TrialState.FAIL
        self.trials: dict[str, Any] = {}

    def proposals(self, count: int) -> Iterator[Proposal]:
        """Propose Configs; one that was asked for before is answered at once, and an illegal one fails."""
        for _ in range(100 * count):
            trial = self.study.ask(self.fields)
            cfg = self.space.config({name: values[0] for name, values in self.space.values.items()} | trial.params)
            if cfg is None:
                self.study.tell(trial, state=self.failed)
            elif cfg.digest in self.known:
                self._answer(trial, self.known[cfg.digest])
            else:
                self.trials[cfg.digest] = trial
                yield cfg, "TPE"

    def tell(self, outcomes: Sequence[ConfigOutcome]) -> None:
        super().tell(outcomes)
        for each in outcomes:
            if (trial := self.trials.pop(each.cfg.digest, None)) is not None:
                self._answer(trial, each)

    def _answer(self, trial: Any, outcome: ConfigOutcome) -> None:
        if outcome.objectives is None:
            self.study.tell(trial, state=self.failed)
        else:
            self.study.tell(trial, outcome.objectives)


SEARCHED = SEARCHES | {"tpe": Tpe}
KINDS = ("bottleneck", "nsga2", "random", "nsga2 alone", "random alone", "tpe alone")
"""Searches; alone: without the closed form, what they ask for is measured."""


def front_rows(full: bool, say: Say, command: str) -> Iterator[Row]:
    """Measure how much of a known front each search finds: shares of its hypervolume, by seeds."""
    values, seeds, share = (LARGE, 10, 0.05) if full else (SMALL, 3, 0.25)
    known = known_space(values, [WORKLOADS[name].path(None) for name in ("demo", "ds_cnn")], KEPT, say)
    for kind in KINDS:
        what = f"hypervolume found of {known.count:,} Configs x 2 networks, {share:.0%} measured: {kind}"
        key = f"explore/front/{'full' if full else 'small'}/{kind}"
        if kind.startswith("tpe") and find_spec("optuna") is None:
            yield skipped(key, what, command, "optuna is not installed")
            continue
        shares = []
        for seed in range(seeds):
            say(f"front: {kind}, seed {seed}")
            shares.append(found_share(known, kind, seed, share))
        details = {"median": float(np.median(shares)), "least": min(shares), "most": max(shares), "found": shares}
        asked = "median >= 0.99" if kind == "bottleneck" and full else ""
        yield judged(key, what, command, details | {"front": len(known.front)}, asked)


# A board ------------------------------------------------------------------------------------------------------------

MODELS = ("resnet18", "mobilenet_v2")
PRESET_BOARDS = (BOARD, "ultra96", "zcu104")
LEFT = 0.05


def _explored(
    names: Sequence[str], folder: Path | None, seconds: float, say: Say, board: str = BOARD,
    objective: Sequence[str] = NAMES,
) -> tuple[Exploration, list[ExploredModel]]:  # fmt: skip
    """The front of these networks on a board, kept under their names, and more of it each time. Missing."""
    paths = [WORKLOADS[name].path(folder) for name in names]
    say(f"exploring for {' and '.join(names)} on {board}, {' and '.join(objective)}, {seconds:,.0f} s in all")
    place = KEPT / "-".join((*names, board))
    place.parent.mkdir(parents=True, exist_ok=True)
    jobs = os.cpu_count() or 1
    found = explore(paths, board, objective=objective, budget=seconds, folder=place, left=LEFT, jobs=jobs)
    return found, [ExploredModel.of(path) for path in paths]


def best_rows(full: bool, folder: Path | None, say: Say, command: str) -> Iterator[Row]:
    """For each preset's board the Config with the fewest cycles on the worse of both networks, over the preset's."""
    for board in map(find_board, PRESET_BOARDS):
        key, is_asked = f"explore/best/{board.config.name}", board.name == BOARD
        what = f"cycles of the best Config found over {board.config.name}, {' and '.join(MODELS)}, timed, not tuned"
        seconds = (1200 if is_asked else 600) if full else 240
        try:
            _explored(MODELS, folder, seconds / 2, say, board.name, ("cycles",))
            found, subjects = _explored(MODELS, folder, seconds, say, board.name)
        except Missing as reason:
            yield skipped(key, what, command, reason)
            continue
        details = _best(found.report, subjects, board)
        if full and is_asked:
            details |= _confirmed(Config.from_dict(details["set"]), subjects, board, say)
        asked = f"worse <= 0.9999, share <= {1 - LEFT}" if is_asked else ""
        yield judged(key, what, command, details, asked)


def _best(report: dict[str, Any], subjects: Sequence[ExploredModel], board: Board) -> dict[str, Any]:
    """Details of the best Config of a front. worse: its cycles over the preset's on the worse network; share: of the
    device's scarcest resource."""
    costs = {each.name: measure_cycles(each, board.config, board.memory.name) for each in subjects}
    usual = {name: cost.cycles / cost.images for name, cost in costs.items()}

    def ratios(row: dict[str, Any]) -> dict[str, float]:
        return {name: row["models"][name]["cycles"] / row["models"][name]["images"] / usual[name] for name in usual}

    row = min(report["front"], key=lambda row: max(ratios(row).values()))
    shares = Resources.of(Config.from_dict(row["set"]), board.device).shares(board.device)
    other = [f"{n} = {value}" for n, value in row["set"].items() if n != "name" and getattr(board.config, n) != value]
    return {
        **ratios(row), "worse": max(ratios(row).values()), "changed": ", ".join(other) or "the preset",
        "share": max(shares.values()), "shares": shares, "extrapolated": int(row["area"]["extrapolated"]),
        "set": row["set"],
    }  # fmt: skip


def _confirmed(cfg: Config, subjects: Sequence[ExploredModel], board: Board, say: Say) -> dict[str, Any]:
    """Cycles over the preset's on the RTL; and the percentages that are left by Yosys' count. Half an hour."""
    exact = [measure_rtl_cycles(each, cfg, board.memory.name) for each in subjects]
    preset = [measure_rtl_cycles(each, board.config, board.memory.name) for each in subjects]
    ratios = {f"rtl_{each.name}": a / b for each, a, b in zip(subjects, exact, preset)}
    left = {
        f"left_{name}": percent
        for name, percent in measure_usage(cfg, board.device, say).free_percent(board.device).items()
    }
    return {**ratios, "worse": max(ratios.values()), **left}


VTA_TIMES, VTA_AREA = 11.5, 12.0
"""ResNet-18: so many times fewer cycles for so many times the area of the smallest (VTA++, its published front)."""


def vta_rows(folder: Path | None, say: Say, command: str) -> Iterator[Row]:
    """How many times fewer cycles there are for at most 12 times the LUTs of the smallest Config that was measured."""
    key, what = (
        "explore/vta",
        "ResNet-18: times fewer cycles than the smallest Config measured, for at most 12 x its LUTs",
    )
    try:
        found, _ = _explored(("resnet18",), folder, 600, say)
    except Missing as reason:
        yield skipped(key, what, command, reason)
        return
    (lut, cycles, smallest), (most, least, largest) = ends(measured(found))
    details = {
        "times": cycles / least, "area": most / lut, "from": array(smallest), "to": array(largest),
        "cycles_times_area": most / lut * least / cycles, "vta_cycles_times_area": VTA_AREA / VTA_TIMES,
    }  # fmt: skip
    yield judged(key, what, command, details, f"times >= {VTA_TIMES}")


Measured = tuple[int, int, Config]
"""LUTs, cycles, and whose they are."""


def measured(found: Exploration) -> list[Measured]:
    """All Configs that were measured."""
    return [
        (int(point.area["lut"]), sum(cost.cycles for cost in point.costs.values()), point.cfg)
        for point in found.points if point.measured
    ]  # fmt: skip


def ends(points: Sequence[Measured]) -> tuple[Measured, Measured]:
    """The smallest Config, and the fastest for at most VTA_AREA times its LUTs."""
    smallest = min(points, key=lambda point: point[:2])
    return smallest, min((point for point in points if point[0] <= VTA_AREA * smallest[0]), key=lambda point: point[1])


def array(cfg: Config) -> str:
    """Its multipliers in words."""
    return f"{cfg.batch} x {cfg.block_in} x {cfg.block_out}"


# The RTL ------------------------------------------------------------------------------------------------------------


def judged_rows(full: bool, say: Say, command: str) -> Iterator[Row]:
    """The timing model on Configs at random, small ones, which nobody has looked at before: percent off the RTL."""
    board, rng, count = find_board(BOARD), np.random.default_rng(11), 10 if full else 3
    small = {"block_in": [2, 4, 8], "block_out": [2, 4, 8], "batch": [1, 2], "inp_depth": [256, 1024, 4096]}
    space = ConfigSpace.of(board, small)
    one = ExploredModel.of(WORKLOADS["ds_cnn"].path(None))
    off: list[float] = []
    while len(off) < count:
        cfg = space.sample(rng)
        assert cfg is not None
        try:
            cycles = measure_cycles(one, cfg, board.memory.name).cycles
        except TilingError:
            continue
        say(f"judged: RTL of {cfg.digest[:6]}, {len(off) + 1} of {count}")
        off.append(100 * abs(cycles / measure_rtl_cycles(one, cfg, board.memory.name) - 1))
    details = {"worst": max(off), "mean": float(np.mean(off)), "configs": count}
    yield judged(
        "explore/judged", "timed over RTL on unseen Configs, ds_cnn: percent off", command, details, "worst <= 2"
    )


def budget_rows(folder: Path | None, say: Say, command: str) -> Iterator[Row]:
    """A front of ResNet-18 within ten minutes, and the same again, which measures nothing."""
    key, what = "explore/budget", "ResNet-18, --budget 10m: points of the front; the same again: points measured"
    try:
        first, again = (_explored(("resnet18",), folder, 600, say)[0] for _ in range(2))
    except Missing as reason:
        yield skipped(key, what, command, reason)
        return
    details = {
        "front": len(first.front), "configs": len(first.report["points"]), "seconds": first.report["state"]["seconds"],
        "again": again.report["state"]["points"], "other_front": int(first.front != again.front),
    }  # fmt: skip
    yield judged(key, what, command, details, "front >= 10, again <= 0, other_front <= 0, seconds <= 660")


PARTS = ("front", "best", "vta", "judged", "budget")


def rows(asked: Request) -> Iterator[Row]:
    """All of PARTS, or one of them. With --full: hours the first time."""
    full, folder, say = asked.full, asked.folder, asked.say
    command = "python -m benchmarks explore" + (" --full" if full else "")
    parts: dict[str, Callable[[str], Iterator[Row]]] = {
        "front": lambda line: front_rows(full, say, line), "best": lambda line: best_rows(full, folder, say, line),
        "vta": lambda line: vta_rows(folder, say, line), "judged": lambda line: judged_rows(full, say, line),
        "budget": lambda line: budget_rows(folder, say, line),
    }  # fmt: skip
    for name in PARTS if asked.only is None else (asked.only,):
        yield from parts[name](f"{command} --only {name}")
