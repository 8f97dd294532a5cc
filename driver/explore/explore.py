"""Explore Configs for some models on a board: a search, and the Pareto front that it finds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from celosia.compiler.graph.errors import ModelError
from celosia.compiler.superoptimise.search import BudgetError, SearchState
from celosia.compiler.superoptimise.search import parse_seconds as seconds_of
from celosia.compiler.tune.device_pool import Fleet
from celosia.compiler.tune.layer_trial import CostSource
from celosia.compiler.tune.tuner_options import DEADLINE
from celosia.driver.choices import ALSO, DEFAULT_OBJECTIVES, OBJECTIVES, WAYS
from celosia.driver.explore import confirm
from celosia.driver.explore import exploration_result as result
from celosia.driver.explore.configs import ConfigSpace, Values
from celosia.driver.explore.explorer import Explorer, ExploreState
from celosia.driver.explore.ladder import Ladder
from celosia.driver.explore.model_cost import (
    ExploredModel,
    count_accelerated_macs,
    count_cpu_operators,
    cycles_with_records,
    explain_nothing_on_accelerator,
)
from celosia.driver.explore.records import PRESET, ExploreError, Point, Points, exploration_context
from celosia.driver.explore.rewritten import require_rewritable, rewrite_front
from celosia.driver.explore.search import SEARCHES, draw_spread_configs
from celosia.driver.tune.fleet import open_fleet
from celosia.hw.boards.board import Board, BoardError
from celosia.hw.boards.boards import BOARDS, find_board, memory_model, memory_model_text
from celosia.hw.spec.config import Config

START_COUNT = 12
"""Random Configs, far from each other, with which a search begins, besides the preset."""
CONFIGS_PER_DEVICE = 4
"""Configs that each device measures before the search sees their results."""


class Interrupted(KeyboardInterrupt):
    """An exploration that Ctrl-C has ended. found: its result so far, which is also written if it had a folder."""

    def __init__(self, exploration: Exploration) -> None:
        super().__init__()
        self.found = exploration


@dataclass(frozen=True)
class Exploration:
    """Result of `explore`.

    report: content of front.json, plain data. front: Configs on the Pareto front. points: all that are known, failures
    among them.
    """

    report: dict[str, Any]
    front: tuple[Config, ...]
    points: tuple[Point, ...]

    def __repr__(self) -> str:
        return f"<Exploration of {len(self.points):,} Configs: {len(self.front):,} on the front>"


def explore(
    models: str | Path | Sequence[str | Path], board: str | Path | Board = "pynq-z2", *,
    objective: Sequence[str] = DEFAULT_OBJECTIVES,
    budget: float | None = None, points: int | None = None, space: str | Path | Values | ConfigSpace | None = None,
    folder: str | Path | None = None, memory: str | None = None, left: float = 0.05, search: str = "bottleneck",
    jobs: int = 0, pool: str | None = None, deadline: float = DEADLINE, confirmed: Sequence[str] = (), seed: int = 0,
    optimise: float = 0.0, fleet: Fleet | None = None, progress: Callable[[str], None] = lambda stage: None,
    told: Callable[[ExploreState | SearchState], None] = lambda state: None,
) -> Exploration:  # fmt: skip
    """Search for the Pareto-optimal Configs for one or several models on a board.

    Cycles are of the timing model, with the compiler's own decisions for each Config. Area is by the resource model, or
    as Yosys has counted it. The clock is the board's, as declared, except where Yosys has estimated it.

    Args:
        models: Path of an ONNX file, or several.
        board: Name of a board, its .toml file, or a Board.
        objective: Objectives to minimise: of "cycles", "latency", "period", "area" and "energy" (`choices.OBJECTIVES`).
        budget: Limit of the exploration in seconds, earlier runs in `folder` included. None: no limit of time.
        points: Largest number of Configs that are measured, earlier runs included. None: no limit; without `budget`,
            the search then runs until nothing is left.
        space: Fields of the Config with their values, or a TOML file, or a ConfigSpace. The other fields have the
            values of the board's default space. None: the default space.
        folder: Folder that keeps points and the front. A later run in it continues. None: nothing is written.
        memory: Memory model. None: the board's.
        left: Share of each resource that stays free, 0 to 1.
        search: Search algorithm: "bottleneck", "nsga2" or "random".
        jobs: Number of processes that measure; 0: this process.
        pool: "dask://HOST:PORT", whose workers have the models under the same paths. None: no pool.
        deadline: Limit for a model on a Config, in seconds.
        confirmed: How the front is confirmed in the end, minutes a point: "yosys", "rtl" or both. By default it is not.
        seed: Seed of the random numbers of the search.
        optimise: Seconds, besides `budget`, of a search for models that take fewer cycles on the Configs of the front
            (docs/superoptimiser.md). These models are written to `folder`. 0: no such search.
        fleet: Devices of the caller, which stay open. None: `jobs` and `pool` say which devices measure.
        progress: Function that is called with the name of each stage.
        told: Function that is called with the ExploreState, or the SearchState.

    Returns:
        An Exploration. Its `front` has the Configs on the Pareto front, and its `points` all known points, failures
            included. Its `report` is the content of front.json, a dictionary with these keys:

            - `models`: digest of each model by name
            - `board`, `device`: names of the board and of its FPGA
            - `memory`: memory model
            - `format`, `timing`: versions of the file format and of the timing model
            - `objectives`: meaning and unit of each objective
            - `take`: a sentence that recommends Configs
            - `front`: a row for each Config on the front: file, fields, objectives, area, shares of resources 0 to 1,
              power and clock_mhz
            - `preset`: the same of the board's own Config, or None
            - `points`: a row for each measured Config, in order of time
            - `searched`: names of fields of several values
            - `power`: a sentence on the estimate of energy
            - `path`: hypervolume over time
            - `state`: seconds, numbers of points, and `ended`, the reason for the end: "budget", "points",
              "interrupted", or "" where nothing was left to measure

    Raises:
        ModelError: A model is invalid, or nothing of it runs on the accelerator.
        BoardError: There is no such board, or its file is invalid.
        ExploreError: An argument is invalid, or `folder` holds another exploration.
        SpaceError: The space is invalid.
        OutputError: A file in `folder` cannot be written.
        PoolError: The pool is none, or has no worker.
        FleetError: No device is left.
        SynthesisError: The front is to be confirmed, and a synthesis tool is missing or failed.
        MissingLibrary: moocore is not installed.
        Interrupted: Ctrl-C ended the search. The exception holds the result so far.

    Examples:
        >>> import celosia
        >>> small = {"block_in": [8, 16], "block_out": 8, "bus_bytes": 8, "taps": 0, "forward": False, "batch": 1}
        >>> found = celosia.explore(celosia.models.demo_model_path(), space=small, points=2)
        >>> len(found.front) == len(found.report["front"]) >= 1
        True
    """
    objective = _check_arguments(objective, confirmed, search, budget)
    resolved_board, memory_model = _resolve_board_and_memory(board, memory)
    config_space = space if isinstance(space, ConfigSpace) else ConfigSpace.of(resolved_board, space)
    subjects = read_models(models)
    require_rewritable(subjects, optimise, folder)
    context = exploration_context(subjects, _board_identity(resolved_board), memory_model)
    known_points = Points(None if folder is None else Path(folder), context)
    progress("placing operators")
    on_cpu = {subject.name: count_cpu_operators(subject, resolved_board.config) for subject in subjects}
    clock = _start_clock(known_points.seconds)
    judge = CostSource("timed", memory_model)
    with nullcontext(fleet) if fleet else open_fleet(judge, jobs, pool, deadline) as trial_fleet:
        ladder = Ladder(subjects, resolved_board, memory_model, left, trial_fleet, known_points, clock, on_cpu)
        progress(f"measuring {resolved_board.config.name}, to compare with")
        explorer = _set_up_explorer(ladder, config_space, search, objective, budget, seed, told)
        progress("exploring")
        rewriting_fleet = trial_fleet if jobs or pool or fleet else None
        rewrite = partial(rewrite_front, explorer, optimise, rewriting_fleet, progress, told)
        stopped = _run_search(explorer, budget, points, rewrite, confirmed, progress)
    exploration = _build_exploration(explorer, known_points, objective, context, folder, clock(), stopped is None)
    if isinstance(stopped, KeyboardInterrupt):
        raise Interrupted(exploration) from None
    if stopped is not None:
        raise stopped
    return exploration


def _resolve_board_and_memory(board: str | Path | Board, memory: str | None) -> tuple[Board, str]:
    """Return the board, and the memory model as text, which every measuring process understands.

    board, memory: as `explore` takes them. ExploreError, BoardError.
    """
    resolved_board = find_board(board)
    try:
        return resolved_board, memory_model_text(memory_model(memory or resolved_board.memory))
    except BoardError:
        raise
    except ValueError as error:
        raise ExploreError(str(error)) from None


def _board_identity(board: Board) -> str:
    """Return the board's name, and for a board of the user's own also its digest: points depend on its data."""
    return board.name if BOARDS.get(board.name) == board else f"{board.name} ({board.digest})"


def _start_clock(before: float) -> Callable[[], float]:
    """Return a function that returns seconds of exploration, earlier runs included."""
    started = time.perf_counter()
    return lambda: before + time.perf_counter() - started


def _set_up_explorer(
    ladder: Ladder, space: ConfigSpace, search: str, objective: Sequence[str], budget: float | None, seed: int,
    told: Callable[[ExploreState], None],
) -> Explorer:  # fmt: skip
    """Set up the Explorer: measure the board's preset, choose the first Configs, and add the points of earlier runs."""
    known_points = ladder.points
    spent, known_before = known_points.seconds, len(known_points.known)
    preset = _measure_preset(ladder, ladder.board.config)
    rng = np.random.default_rng(seed)
    start = first_configs(ladder, space, rng)
    explorer = Explorer(ladder, space, SEARCHES[search](space, rng, start), objective, preset, told)
    explorer.state.budget, explorer.state.spent = budget, spent
    explorer.resume(list(known_points.known.values()))
    if preset is not None and len(known_points.known) > known_before and preset.cfg.digest in explorer.measured:
        explorer.state.points, explorer.state.known = 1, explorer.state.known - 1
    return explorer


def _run_search(
    explorer: Explorer, budget: float | None, points: int | None, rewrite: Callable[[], None],
    confirmed: Sequence[str], progress: Callable[[str], None],
) -> BaseException | None:  # fmt: skip
    """Run the search to its end, then rewrite models for the front and confirm it.

    rewrite: `rewrite_front` with its arguments bound. Return the KeyboardInterrupt or SystemExit that ended it, or
    None: what was measured is reported all the same.
    """
    clock, fleet = explorer.ladder.clock, explorer.ladder.fleet
    try:
        explorer.run(
            lambda state: _count_remaining(state, clock(), budget, points),
            CONFIGS_PER_DEVICE * max(1, len(fleet.devices)),
        )
        rewrite()
        if confirmed:
            confirm.confirm_front(explorer, confirmed, progress, lambda: budget is not None and clock() >= budget)
    except (KeyboardInterrupt, SystemExit) as error:  # Ctrl-C, SIGTERM: what was measured is not lost
        explorer.state.ended = "interrupted"
        explorer.record_unfinished_round()
        return error
    return None


def first_configs(ladder: Ladder, space: ConfigSpace, rng: np.random.Generator) -> list[Config]:
    """Return the first Configs of a search: the one nearest to the board's, and START_COUNT spread over the space.

    The largest arrays come first: they need the fewest instructions, so that first results come soon.
    """
    first = space.nearest(ladder.board.config)
    candidates = sorted(
        draw_spread_configs(space, rng, START_COUNT, ladder.fits_config), key=lambda cfg: -cfg.macs_per_cycle
    )
    return candidates if first is None else [first, *candidates]


def _check_arguments(
    objectives: Sequence[str], confirmed: Sequence[str], search: str, budget: float | None
) -> list[str]:
    """Check the arguments; return the objectives by their own names. ExploreError; MissingLibrary without moocore."""
    from celosia.driver.explore.pareto import on_front

    if budget is not None and budget <= 0:
        raise ExploreError(f"in {budget:g} s nothing can be explored; give more, as 10m")
    on_front(np.ones((1, 1)))  # says at once that moocore is missing
    objective = [ALSO.get(name, name) for name in objectives]
    for label, names, choices in (
        ("objective", objective, OBJECTIVES), ("way to confirm", confirmed, WAYS), ("search", [search], SEARCHES),
    ):  # fmt: skip
        for name in names:
            if name not in choices:
                raise ExploreError(f"there is no {label} {name!r}; take {', '.join(choices)}")
    if not objective or len(set(objective)) != len(objective):
        raise ExploreError(f"give each objective once, at least one of {', '.join(OBJECTIVES)}")
    return objective


def read_models(models: str | Path | Sequence[str | Path]) -> list[ExploredModel]:
    """Return the models to explore; check that each has products for the accelerator.

    ExploreError where there are none, or two of one name; ModelError.
    """
    subjects = [ExploredModel.of(model) for model in ([models] if isinstance(models, (str, Path)) else models)]
    if not subjects:
        raise ExploreError("give at least one model")
    names = [subject.name for subject in subjects]
    for name in names:
        if names.count(name) > 1:
            raise ExploreError(f"two models are called {name!r}; give one of them another name")
    for subject in subjects:
        if not count_accelerated_macs(subject, Config()):
            raise ModelError(explain_nothing_on_accelerator(subject))
    return subjects


def parse_seconds(text: str) -> float:
    """Parse a time: "90", "90s", "30m" or "1.5h". ExploreError.

    >>> parse_seconds("30m"), parse_seconds("90"), parse_seconds("1.5h")
    (1800.0, 90.0, 5400.0)
    """
    try:
        return seconds_of(text)
    except BudgetError as error:
        raise ExploreError(str(error)) from None


def _count_remaining(state: ExploreState, now: float, budget: float | None, points: int | None) -> int:
    """Return how many Configs may still be measured, by time and by number; set `state.ended` where it is 0.

    now, budget: seconds of exploration; points: Configs, earlier runs included. None: no limit.
    """
    if budget is not None and now >= budget:
        state.ended = "budget"
        return 0
    if points is not None and state.points + state.known >= points:
        state.ended = "points"
        return 0
    return sys.maxsize if points is None else points - state.points - state.known


def _measure_preset(ladder: Ladder, cfg: Config) -> Point | None:
    """Measure the board's own Config, to compare with, even if it does not fit; None where a model does not run on
    it."""
    cfg = replace(cfg, name="custom")
    point = ladder.points.get(cfg)
    if point is None or not point.costs:
        (point,) = ladder.estimate([(cfg, PRESET)])
    if point.failure is None and not point.measured:
        (point,) = ladder.measure([point])
    return point if point.measured else None


def _preset_row(point: Point, ladder: Ladder, has_time: bool) -> dict[str, Any]:
    """Return the preset as a row of front.json, with `records` and `fits`.

    `records`: cycles of each model with the schedules that come with Celosia; {} where there are none, or no time to
    measure them. No other Config has such schedules, so these cycles are not compared with others.
    """
    row = result.point_row(ladder.board.config.name, point, ladder)
    records = {
        subject.name: cycles_with_records(subject, point.cfg, ladder.memory) for subject in ladder.subjects if has_time
    }
    row["records"] = {name: cycles for name, cycles in records.items() if cycles is not None}
    row["fits"] = ladder.fits(point)
    return row


def _build_exploration(
    explorer: Explorer, points: Points, names: Sequence[str], context: dict[str, Any], folder: str | Path | None,
    spent: float, has_time: bool,
) -> Exploration:  # fmt: skip
    """Build the Exploration, and write it to `folder` if it has one.

    names: of objectives. spent: seconds. has_time: the preset is also measured with the records that come with Celosia.
    """
    front, ladder = explorer.front, explorer.ladder
    preset = None if explorer.preset is None else points.get(explorer.preset.cfg)
    rows = [result.point_row(result.point_name(number, point), point, ladder) for number, point in enumerate(front, 1)]
    state = explorer.state
    state_data = {
        "seconds": round(spent, 1), "points": state.points, "known": state.known, "looked": state.looked,
        "failed": state.failed, "damaged": points.damaged, "hypervolume": state.volume, "space": len(explorer.space),
        "left": ladder.left, "left_out": ladder.fleet.excluded_devices, "ended": state.ended,
        "preset": None if preset is None else ladder.objectives_of(preset),
    }  # fmt: skip
    measured = sorted(explorer.measured.values(), key=lambda point: point.at)
    report = result.front_report(rows, names, context, state_data, measured, explorer.space.searched, ladder)
    report["preset"] = None if preset is None else _preset_row(preset, ladder, has_time)
    report["path"] = explorer.hypervolume_path(measured)
    if folder is not None:
        result.write_front(Path(folder), report, front)
    return Exploration(report, tuple(point.cfg for point in front), tuple(points.known.values()))
