"""Tune the schedules of a model's layers, and compile it with the result."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from celosia.compiler.compile import compile as compile_model
from celosia.compiler.compile import network_of
from celosia.compiler.graph.errors import ModelError
from celosia.compiler.graph.importing.dimensions import Shapes
from celosia.compiler.program import Program
from celosia.compiler.superoptimise.search import parse_seconds
from celosia.compiler.tune.device_pool import Fleet
from celosia.compiler.tune.layer_trial import CostSource
from celosia.compiler.tune.network_tuner import NetworkState, Tuner
from celosia.compiler.tune.records import Records
from celosia.compiler.tune.tuner_options import DEADLINE
from celosia.driver.choices import TRIALS
from celosia.driver.tune.fleet import open_fleet
from celosia.hw.boards.boards import memory_model, memory_model_text
from celosia.hw.boards.memory import MemoryModel
from celosia.hw.spec.config import Config


@dataclass(frozen=True)
class Tuning:
    """Result of `tune` or `tune_cpu`. program: compiled with the best schedules. report: plain data, see there."""

    program: Program
    report: dict[str, Any]

    def __repr__(self) -> str:
        report = self.report
        if "untuned" in report:
            return f"<Tuning: {report['cycles']:,} cycles, {report['untuned']:,} untuned>"
        return f"<Tuning: {report['seconds_tuned']:.6f} s, {report['seconds_own']:.6f} s untuned>"


def tune(
    source: str | Path | onnx.ModelProto, config: str | Path | Config = "pynq", *, trials: int = TRIALS,
    records: str | Path | Records | None = None, device: str = "timed",
    memory: str | MemoryModel = "zynq-hp", jobs: int = 0, search: str = "descent",
    learner: str = "ridge", seed: int = 0, deadline: float = DEADLINE,
    fleet: Fleet | None = None, pool: str | None = None, sudo: bool = False, base: int | None = None,
    check: bool = True, shapes: Shapes | None = None, budget: str | float | None = None,
    progress: Callable[[str], None] | None = None, told: Callable[[NetworkState], None] = lambda state: None,
) -> Tuning:  # fmt: skip
    """Tune the layers of a model that run on the accelerator, and compile it.

    The timing model judges the whole network.

    Args:
        source: The model: its path, or its contents as an onnx.ModelProto.
        config: Accelerator, as `celosia.compile` takes it.
        trials: Largest number of points of layers that are tried.
        records: File that keeps the trials, or Records. Trials that it has are not run again. None: trials are not
            kept.
        device: Device that measures the cycles of layers: "timed", "rtl", or a board as "ssh://USER@BOARD".
        memory: Memory model: a MemoryModel, its name, or a board's .toml file.
        jobs: Number of processes that measure; 0: this process.
        search: Search algorithm, one of `tune.search.SEARCHES`: "descent", "climb", "evolution", "annealing" or
            "random".
        learner: Cost model that learns from trials: "ridge", or "trees" (needs the extra `tune`).
        seed: Seed of the random numbers of the search.
        deadline: Limit of one trial, in seconds.
        fleet: Devices of the caller, which stay open. None: `jobs` and `pool` say which devices measure.
        pool: "dask://HOST:PORT", whose workers measure (needs the extra `fleet`). None: no pool.
        sudo: Run as root on a board through sudo, as `celosia run` does.
        base: Address of the accelerator's registers on a board, as `celosia run` takes it. None: that of the bitstream
            projects.
        check: Compare the Program with the model, as `celosia.compile` does.
        shapes: Shapes of inputs by name, if the model leaves sizes open. None: no shape is fixed.
        budget: Time after which no more trials begin, in seconds, or as "90s", "30m" or "2h". None: no limit.
        progress: Function that is called with the name of each stage. None: no function is called.
        told: Function that is called with the NetworkState after each trial.

    Returns:
        A Tuning. Its `program` is compiled with the best schedules. Its `report` is a dictionary with these keys:

            - `cycles`, `untuned`: clock cycles of the whole network, with tuned schedules and without
            - `regret`: cycles of all layers together, divided by their proved lower bound, less 1; None: no bound is
              known. 0: no schedule is faster. 0.5: the layers take at most 50% more cycles than the best schedules
            - `trials`: number of trials
            - `measured`, `known`, `failed`: number of trials that were measured, were in `records`, or failed
            - `seconds`: time of the tuning, in seconds
            - `left_out`: devices by name, with the reason
            - `damaged`: number of lines of the records that cannot be read
            - `conflicts`: number of lines of the records that contradict another one
            - `layers`: a row for each layer, with the keys below

            A row of `layers`:

            - `layer`: name
            - `workload`: description of its sizes
            - `count`: number of layers of this workload
            - `points`: number of schedules in its space
            - `usual`, `best`: clock cycles of the layer, run twice in a row, under the compiler's own schedule and the
              best one
            - `regret`: as above, for this layer
            - `trials`: number of its trials
            - `decided`: decisions of its schedule

    Raises:
        ModelError: Nothing of the model runs on the accelerator, or `celosia.compile` does not support it. The other
            errors of `celosia.compile` are raised, too.
        ConfigError: The Config is invalid, or there is none of that name.
        RecordsError: The file of records cannot be read.
        BudgetError: `budget` is no time.
        ValueError: There is no such search, learner, device or memory model.
        PoolError: The pool is none, or has no worker for this device.
        SshError: There is no board of that name.
        FleetError: No device is left.

    Examples:
        >>> import celosia
        >>> tuning = celosia.tune(celosia.models.demo_model_path(), "tiny", trials=12)
        >>> tuning.report["cycles"] <= tuning.report["untuned"]
        True
    """
    judge, until = CostSource(device, memory_model_text(memory_model(memory))), deadline_of_budget(budget)
    known_records = open_records(records)
    started = time.perf_counter()
    with nullcontext(fleet) if fleet else open_fleet(judge, jobs, pool, deadline, sudo, base) as trial_fleet:
        tuner = Tuner(known_records, trial_fleet, trials, judge, search, learner, seed, told, until)
        network = network_of(source, config, progress, shapes=shapes)
        if not network.launches:
            raise ModelError(_nothing_to_tune_text(source, network.cfg))
        if progress is not None:
            progress("tuning")
        tuned = tuner.tune(network)
    program = compile_model(source, config, progress, check=check, shapes=shapes, tuned=tuned)
    state, kernels = tuner.state, program.schedules
    program.schedules = f"tuned: {state.tuned:,} cycles, {state.untuned:,} untuned{'; ' * bool(kernels)}{kernels}"
    return Tuning(program, _tuning_report(tuner, known_records, time.perf_counter() - started))


def _nothing_to_tune_text(source: str | Path | onnx.ModelProto, cfg: Config) -> str:
    """Return the error message for a model of which nothing runs on the accelerator, with what to do instead."""
    name = source.graph.name or "this model" if isinstance(source, onnx.ModelProto) else Path(source).stem
    return (
        f"nothing of {name} runs on the accelerator of {cfg.name}, so that there is nothing to tune: make an int8 "
        "model of it first with `celosia quantize`, or tune its kernels for this processor with `--device cpu` "
        "(`celosia.tune_cpu`)"
    )


def deadline_of_budget(budget: str | float | None) -> float:
    """Return the end of a budget that begins now, as a value of time.monotonic; infinite without a budget.

    budget: see `tune`. BudgetError.
    """
    return math.inf if budget is None else time.monotonic() + parse_seconds(budget)


def open_records(records: str | Path | Records | None) -> Records:
    """Return the argument `records` of `tune` as Records: empty ones for None or a file that does not exist.

    RecordsError.
    """
    if isinstance(records, Records):
        return records
    return Records() if records is None else Records.load(records, must_exist=False)


def _tuning_report(tuner: Tuner, records: Records, seconds: float) -> dict[str, Any]:
    """Return the report of `tune` as plain data."""
    state = tuner.state
    layers = [
        {
            "layer": subject.name, "workload": subject.occurrence.workload, "count": subject.occurrence.count,
            "points": len(subject.space), "usual": _json_number(subject.usual), "best": _json_number(subject.best),
            "regret": _json_number(subject.search.regret), "trials": subject.trials,
            "decided": [d.to_json() for d in tuner.chosen.get(subject.occurrence.workload, ())],
        }
        for subject in state.subjects
    ]  # fmt: skip
    return {
        "cycles": state.tuned, "untuned": state.untuned, "regret": _json_number(state.regret), "trials": state.spent,
        "measured": state.measured + state.evaluations, "known": state.known + state.known_evaluations,
        "failed": state.failed, "seconds": seconds, "left_out": dict(state.excluded_devices),
        "damaged": records.damaged,
        "conflicts": records.conflicts, "layers": layers,
    }  # fmt: skip


def _json_number(value: float) -> float | None:
    """Return a number for JSON, which has no infinity: None for that."""
    return value if math.isfinite(value) else None
