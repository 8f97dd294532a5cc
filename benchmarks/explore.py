"""The search for Configs: what it finds of a front that is known, and what it finds where none is.

    python -m benchmarks explore [--full] [--only front|best|vta|judged|budget]

The true front is that of a sub-space whose Configs were all measured, which takes half an hour; what was measured is
kept in bench/explore, so that an interrupted run goes on where it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from benchmarks.rows import Row
from benchmarks.workloads import WORKLOADS
from celosia.bitstreams.devices import DEVICES
from celosia.compiler.tune.measure import VERSION, Result, Status
from celosia.compiler.tune.pool import Fleet, Job
from celosia.compiler.tune.records import append, sealed, unsealed
from celosia.driver.explore.explore import FIRST
from celosia.driver.explore.explorer import Explorer
from celosia.driver.explore.front import Floats, hypervolume, on_front, reference
from celosia.driver.explore.hardware import Resources
from celosia.driver.explore.ladder import Ladder
from celosia.driver.explore.objectives import objectives
from celosia.driver.explore.records import Points, context_of
from celosia.driver.explore.search import SEARCHES, spread
from celosia.driver.explore.space import Space, board_of
from celosia.driver.explore.subject import Ask, Subject, cost_of, placed
from celosia.hw.config import PRESETS

ROOT = Path(__file__).parent.parent
KEPT = ROOT / "bench" / "explore"
BOARD = "pynq-z2"
NAMES = ("cycles", "area")
LARGE = {
    "block_in": (4, 8, 16, 32), "block_out": (4, 8, 16, 32), "bus_bytes": (4, 8), "ports": (1, 2), "taps": (0, 3),
    "inp_depth": (256, 1024, 4096), "wgt_depth": (64, 256, 1024), "acc_depth": (512, 2048), "forward": (False,),
    "residual_cycles": (2,), "batch": (1,), "packed": (True,), "out_depth": (1024,), "vin_depth": (2048,),
    "par_depth": (64,), "lut_count": (2,), "queue_depth": (16,), "tap_depth": (512,),
}  # fmt: skip
"""2,304 Configs; without blocks of layers, whose tiles take most of the compiler's time."""
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
        start = spread(known.space, rng, FIRST, ladder.holds)
        kind = SEARCHES[search.removesuffix(" alone")]
        explorer = Explorer(ladder, known.space, kind(known.space, rng, start), NAMES)
        explorer.filtering = not search.endswith(" alone")
        explorer.run(lambda state: state.points + 4 > most, 4)
        values = explorer.values(explorer.measured.values())
    assert len(values) <= most
    return hypervolume(values, known.worst) / hypervolume(known.front, known.worst)


KINDS = ("bottleneck", "nsga2", "random", "nsga2 alone", "random alone")
"""Searches; alone: without the closed form, what they ask for is measured."""


def front_rows(full: bool, say: Callable[[str], None], command: str) -> Iterator[Row]:
    values, seeds, share = (LARGE, 10, 0.05) if full else (SMALL, 3, 0.25)
    paths = [WORKLOADS[name].path(None) for name in ("demo", "ds_cnn")]
    known = known_space(values, paths, KEPT, say)
    for kind in KINDS:
        found = []
        for seed in range(seeds):
            say(f"front: {kind}, seed {seed}")
            found.append(found_share(known, kind, seed, share))
        middle, worst = float(np.median(found)), min(found)
        text = f"{middle:.2%} (median of {seeds} seeds; {worst:.2%} to {max(found):.2%})"
        what = f"hypervolume found of {known.count:,} Configs x 2 networks, {share:.0%} measured: {kind}"
        first = kind == "bottleneck"
        target = ">= 99%" if first and full else ""
        yield Row(f"explore/front/{'full' if full else 'small'}/{kind}", what, target, text,
                  middle >= 0.99 if target else None, command, {"found": found, "front": len(known.front)})  # fmt: skip
