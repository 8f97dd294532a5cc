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

from benchmarks.rows import Row
from benchmarks.workloads import WORKLOADS, Missing
from celosia.bitstreams.devices import DEVICES
from celosia.compiler.layer import Untileable
from celosia.compiler.tune.measure import VERSION, Result, Status
from celosia.compiler.tune.pool import Fleet, Job
from celosia.compiler.tune.records import append, sealed, unsealed
from celosia.driver.explore.confirm import rtl_cycles
from celosia.driver.explore.explore import beginning, explore
from celosia.driver.explore.explorer import Explorer
from celosia.driver.explore.front import Floats, hypervolume, on_front, reference
from celosia.driver.explore.hardware import Resources
from celosia.driver.explore.ladder import Ladder
from celosia.driver.explore.objectives import objectives
from celosia.driver.explore.records import Points, context_of
from celosia.driver.explore.search import SEARCHES, Outcome, Proposal, Search
from celosia.driver.explore.space import Space, board_of
from celosia.driver.explore.subject import Ask, Subject, cost_of, placed, timed
from celosia.hw.config import PRESETS, Config

ROOT = Path(__file__).parent.parent
KEPT = ROOT / "bench" / "explore"
BOARD = "pynq-z2"
NAMES = ("cycles", "area")
LARGE = {
    "block_in": (4, 8, 16, 32), "block_out": (4, 8, 16, 32), "bus_bytes": (4, 8), "ports": (1, 2), "taps": (0, 3),
    "inp_depth": (256, 1024, 2048, 4096), "wgt_depth": (64, 256, 1024), "acc_depth": (512, 2048), "forward": (False,),
    "residual_cycles": (2,), "batch": (1,), "packed": (True,), "out_depth": (1024,), "vin_depth": (2048,),
    "par_depth": (64,), "lut_count": (2,), "queue_depth": (16,), "tap_depth": (512,),
}  # fmt: skip
"""3,072 Configs, of which 2,112 fit; without blocks of layers, whose tiles take most of the compiler's time."""
SMALL = LARGE | {
    "block_in": (4, 8, 16), "block_out": (8, 16), "ports": (1,), "taps": (0, 3), "inp_depth": (256, 1024),
    "wgt_depth": (64, 1024), "acc_depth": (2048,),
}  # fmt: skip
"""For a run of minutes."""


@dataclass
class Table:
    """What models cost on Configs, closed and timed, as it was measured; a Measurer that knows no more than that."""

    path: Path
    name: str = "what was measured"
    known: dict[tuple[str, str, str], Result] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.path.exists():
            for line in filter(None, self.path.read_bytes().split(b"\n")):
                try:
                    row = unsealed(line)
                except (ValueError, KeyError, TypeError):
                    continue
                result = Result(Status(row["status"]), row["cycles"], row["detail"])
                self.known[row["model"], row["config"], row["rung"]] = result

    def fill(self, asks: Sequence[Ask], say: Callable[[str], None], jobs: int) -> None:
        """Measure what is not known."""
        missing = [ask for ask in asks if _key(ask) not in self.known]
        self.path.parent.mkdir(parents=True, exist_ok=True)

        def keep(number: int, result: Result) -> None:
            self.known[_key(missing[number])] = result
            model, config, rung = _key(missing[number])
            found = {"status": result.status.value, "cycles": result.cycles, "detail": result.detail}
            append(self.path, sealed({"model": model, "config": config, "rung": rung, **found}))
            say(f"front: {len(self.known):,} of {len(asks):,} known")

        if missing:
            with Fleet.local(jobs) as fleet:
                fleet.run(missing, keep)

    def measure(self, job: Job, deadline: float) -> Result:
        assert isinstance(job, Ask)
        return self.known[_key(job)]

    def close(self) -> None:
        pass


def _key(ask: Ask) -> tuple[str, str, str]:
    return ask.subject.digest, ask.cfg.digest, ask.rung


@dataclass(frozen=True)
class Known:
    """A space of which all is measured. front: objectives of the true front; worst: of all, what volumes are up to."""

    space: Space
    subjects: list[Subject]
    table: Table
    front: Floats
    worst: Floats
    count: int


def known_space(
    values: dict[str, tuple[int | bool, ...]], paths: Sequence[Path], folder: Path, say: Callable[[str], None],
    jobs: int = 1,
) -> Known:  # fmt: skip
    """All of a space measured, and its true front, of what fits the device."""
    board = board_of(BOARD)
    space = Space.of(board, values)
    subjects = [Subject.of(path) for path in paths]
    table = Table(folder / f"table-v{VERSION}.jsonl")
    fitting, device = [], DEVICES[board.platform.device]
    for cfg in space:
        if Resources.of(cfg, device).why_not(device, 0.0) is None:
            fitting.append(cfg)
    asked = [*fitting, replace(PRESETS[board.preset], name="custom")]
    # All of a Config one after the other, so that what a process knows of it is used
    asks = [
        Ask(subject, cfg, rung, board.memory.name)
        for cfg in asked for subject in subjects for rung in ("closed", "timed")
    ]  # fmt: skip
    table.fill(asks, say, jobs)
    on_cpu = {each.name: placed(each, board.config) for each in subjects}
    rows = []
    for cfg in fitting:
        results = [table.known[subject.digest, cfg.digest, "timed"] for subject in subjects]
        if all(result.status == Status.OK for result in results):
            costs = [cost_of(result) for result in results]
            shares = Resources.of(cfg, device).shares(device)
            if all(cost.on_cpu <= on_cpu[each.name] for cost, each in zip(costs, subjects)):
                figures = objectives(cfg, costs, shares, board.clock_mhz)
                rows.append([figures[name] for name in NAMES])
    values_ = np.array(rows)
    return Known(space, subjects, table, values_[on_front(values_)], reference(values_), len(rows))


def found_share(known: Known, search: str, seed: int, share: float) -> float:
    """Hypervolume that a search has found of the true front's, after `share` of all were measured."""
    board = board_of(BOARD)
    points = Points(None, context_of(known.subjects, BOARD, board.memory.name))
    on_cpu = {each.name: placed(each, board.config) for each in known.subjects}
    rng = np.random.default_rng(seed)
    most = int(share * known.count)
    with Fleet([known.table]) as fleet:
        ladder = Ladder(known.subjects, board, board.memory.name, 0.0, fleet, points, time.perf_counter, on_cpu)
        start = beginning(ladder, known.space, rng)
        kind = SEARCHED[search.removesuffix(" alone")]
        explorer = Explorer(ladder, known.space, kind(known.space, rng, start), NAMES)
        explorer.filtering = not search.endswith(" alone")
        explorer.run(lambda state: state.points + 4 > most, 4)
        values = explorer.values(explorer.measured.values())
    assert len(values) <= most
    return hypervolume(values, known.worst) / hypervolume(known.front, known.worst)


class Tpe(Search):
    """Optuna's multi-objective TPE as it comes, one value at random for each field to begin with."""

    def __init__(self, space: Space, rng: np.random.Generator, start: Sequence[Config] = ()) -> None:
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
        """What was asked for before is answered at once, and Configs that cannot be fail."""
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

    def tell(self, outcomes: Sequence[Outcome]) -> None:
        super().tell(outcomes)
        for each in outcomes:
            if (trial := self.trials.pop(each.cfg.digest, None)) is not None:
                self._answer(trial, each)

    def _answer(self, trial: Any, outcome: Outcome) -> None:
        if outcome.objectives is None:
            self.study.tell(trial, state=self.failed)
        else:
            self.study.tell(trial, outcome.objectives)


SEARCHED = SEARCHES | {"tpe": Tpe}
KINDS = ("bottleneck", "nsga2", "random", "nsga2 alone", "random alone", "tpe alone")
"""Searches; alone: without the closed form, what they ask for is measured."""


def front_rows(full: bool, say: Callable[[str], None], command: str) -> Iterator[Row]:
    values, seeds, share = (LARGE, 10, 0.05) if full else (SMALL, 3, 0.25)
    paths = [WORKLOADS[name].path(None) for name in ("demo", "ds_cnn")]
    known = known_space(values, paths, KEPT, say)
    for kind in KINDS:
        what = f"hypervolume found of {known.count:,} Configs x 2 networks, {share:.0%} measured: {kind}"
        key = f"explore/front/{'full' if full else 'small'}/{kind}"
        if kind.startswith("tpe") and find_spec("optuna") is None:
            yield Row(key, what, "", "skipped: optuna is not installed", None, command)
            continue
        found = []
        for seed in range(seeds):
            say(f"front: {kind}, seed {seed}")
            found.append(found_share(known, kind, seed, share))
        middle, worst = float(np.median(found)), min(found)
        text = f"{middle:.2%} (median of {seeds} seeds; {worst:.2%} to {max(found):.2%})"
        first = kind == "bottleneck"
        target = ">= 99%" if first and full else ""
        met = middle >= 0.99 if target else None
        yield Row(key, what, target, text, met, command, {"found": found, "front": len(known.front)})


# A board ------------------------------------------------------------------------------------------------------------

MODELS = ("resnet18", "mobilenet_v2")
LEFT = 0.05


def _explored(
    names: Sequence[str], folder: Path | None, seconds: float, say: Callable[[str], None]
) -> tuple[dict[str, Any], list[Subject]]:  # fmt: skip
    """The front of these networks on BOARD, kept under their names, and more of it each time. Missing."""
    paths = [WORKLOADS[name].path(folder) for name in names]
    say(f"exploring for {' and '.join(names)}")
    place = KEPT / "-".join((*names, BOARD))
    place.parent.mkdir(parents=True, exist_ok=True)
    found = explore(paths, BOARD, budget=seconds, folder=place, left=LEFT, jobs=os.cpu_count() or 1)
    return found.report, [Subject.of(path) for path in paths]


def best_rows(full: bool, folder: Path | None, say: Callable[[str], None], command: str) -> Iterator[Row]:
    """The Config of the front with the fewest cycles on the worse of both networks, over the preset's."""
    key, target = "explore/best", "< 1 on both, with >= 5% left"
    what = f"cycles of the best Config found over {board_of(BOARD).preset}, {' and '.join(MODELS)}, timed"
    try:
        report, subjects = _explored(MODELS, folder, 7200 if full else 600, say)
    except Missing as reason:
        yield Row(key, what, target, f"skipped: {reason}", None, command)
        return
    board = board_of(BOARD)
    usual = {each.name: timed(each, board.config, board.memory.name).cycles for each in subjects}

    def ratios(row: dict[str, Any]) -> list[float]:
        return [row["models"][name]["cycles"] / cycles for name, cycles in usual.items()]

    row = min(report["front"], key=lambda row: max(ratios(row)))
    cfg = Config.from_dict(row["set"])
    found = ratios(row)
    shares = Resources.of(cfg, DEVICES[board.platform.device]).shares(DEVICES[board.platform.device])
    told = ", ".join(f"{share:.0%} {name}" for name, share in shares.items())
    doubt = ", LUT and flip-flops extrapolated" if row["area"]["extrapolated"] else ""
    text = f"{' and '.join(f'{ratio:.3f}' for ratio in found)} ({row['name']}: {told}{doubt}), not tuned"
    if full:
        exact = [rtl_cycles(each, cfg, board.memory.name) for each in subjects]
        preset = [rtl_cycles(each, board.config, board.memory.name) for each in subjects]
        found = [a / b for a, b in zip(exact, preset)]
        text += f"; RTL {' and '.join(f'{ratio:.3f}' for ratio in found)}"
    yield Row(
        key, what, target, text, max(found) < 1 and max(shares.values()) <= 1 - LEFT, command, {"set": row["set"]}
    )


VTA_TIMES, VTA_AREA = 11.5, 12.0
"""ResNet-18: so many times fewer cycles for so many times the area of the smallest (VTA++, its published front)."""


def vta_rows(folder: Path | None, say: Callable[[str], None], command: str) -> Iterator[Row]:
    """How many times fewer cycles the front has at no more than 12 times the area of its smallest point."""
    key = "explore/vta"
    what = "ResNet-18: times fewer cycles than the smallest point of the front, for at most 12 x its LUTs"
    try:
        report, _ = _explored(("resnet18",), folder, 600, say)
    except Missing as reason:
        yield Row(key, what, f">= {VTA_TIMES}", f"skipped: {reason}", None, command)
        return
    points = [(row["objectives"]["cycles"], row["area"]["lut"], row["name"]) for row in report["front"]]
    cycles, lut, name = min(points, key=lambda point: point[1])
    best = min(point for point in points if point[1] <= VTA_AREA * lut)
    times, area = cycles / best[0], best[1] / lut
    text = f"{times:.1f} x fewer for {area:.1f} x the LUTs ({name} to {best[2]})"
    yield Row(key, what, f">= {VTA_TIMES}", text, times >= VTA_TIMES, command)


# The RTL ------------------------------------------------------------------------------------------------------------


def judged_rows(full: bool, say: Callable[[str], None], command: str) -> Iterator[Row]:
    """The timing model on Configs at random, small ones, which nobody has looked at before."""
    board, rng, count = board_of(BOARD), np.random.default_rng(11), 10 if full else 3
    small = {"block_in": [2, 4, 8], "block_out": [2, 4, 8], "batch": [1, 2], "inp_depth": [256, 1024, 4096]}
    space = Space.of(board, small)
    one = Subject.of(WORKLOADS["ds_cnn"].path(None))
    errors: list[float] = []
    while len(errors) < count:
        cfg = space.sample(rng)
        assert cfg is not None
        try:
            found = timed(one, cfg, board.memory.name).cycles
        except Untileable:
            continue
        say(f"judged: RTL of {cfg.digest[:6]}, {len(errors) + 1} of {count}")
        errors.append(found / rtl_cycles(one, cfg, board.memory.name) - 1)
    worst = max(errors, key=abs)
    text = f"worst {worst:+.2%}, mean {np.mean(np.abs(errors)):.2%} of {count}"
    yield Row("explore/judged", "timed over RTL on unseen Configs, ds_cnn", "<= 2%", text, abs(worst) <= 0.02, command)


def budget_rows(folder: Path | None, say: Callable[[str], None], command: str) -> Iterator[Row]:
    """A front of ResNet-18 within ten minutes, and the same again, which measures nothing."""
    key, what = "explore/budget", "ResNet-18, --budget 10m: points of the front; the same again: points measured"
    target = ">= 10; 0, the same front"
    try:
        first, _ = _explored(("resnet18",), folder, 600, say)
        again, _ = _explored(("resnet18",), folder, 600, say)
    except Missing as reason:
        yield Row(key, what, target, f"skipped: {reason}", None, command)
        return
    same = [row["digest"] for row in first["front"]] == [row["digest"] for row in again["front"]]
    count, measured = len(first["front"]), again["state"]["points"]
    text = f"{count} after {first['state']['seconds']:,.0f} s and {len(first['points'])} Configs; again {measured}"
    text += ", the same front" if same else ", another front"
    met = count >= 10 and measured == 0 and same and first["state"]["seconds"] <= 660
    yield Row(key, what, target, text, met, command)


PARTS = ("front", "best", "vta", "judged", "budget")


def rows(folder: Path | None, full: bool, say: Callable[[str], None], only: str | None = None) -> Iterator[Row]:
    """All of it, or the part `only`. full: hours the first time."""
    command = "python -m benchmarks explore" + (" --full" if full else "")
    parts: dict[str, Callable[[str], Iterator[Row]]] = {
        "front": lambda told: front_rows(full, say, told), "best": lambda told: best_rows(full, folder, say, told),
        "vta": lambda told: vta_rows(folder, say, told), "judged": lambda told: judged_rows(full, say, told),
        "budget": lambda told: budget_rows(folder, say, told),
    }  # fmt: skip
    for name in PARTS if only is None else (only,):
        yield from parts[name](f"{command} --only {name}")
