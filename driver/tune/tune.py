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
from celosia.compiler.superoptimise.budget import seconds as seconds_of
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

    >>> import celosia
    >>> tuning = celosia.tune(celosia.models.demo_model_path(), "tiny", trials=12)
    >>> tuning.report["cycles"] <= tuning.report["untuned"]
    True

    trials: the most points of layers that are tried. records: a file that keeps the trials; those that it has are not
    run again; None: they are not kept. device: that measures the cycles of layers, "timed", "rtl", or a board as
    "ssh://USER@BOARD" (sudo, base: as `celosia run` takes them); the whole network is judged by the timing model.
    memory: a memory model, its name, or a board's .toml file. jobs: processes that measure; 0: this one. search: one of
    `tune.search.SEARCHES`. learner: "ridge", or "trees" (needs the extra `tune`). deadline: seconds for one trial.
    pool: "dask://HOST:PORT", whose workers measure (needs the extra `fleet`). fleet: devices of the caller, which stay
    open. budget: seconds, or "90s", "30m", "2h", after which no more trials begin. progress: called with the name of
    each stage; told: with the NetworkState after each trial.

    The report has cycles and untuned (of the whole network), `regret` (all layers together take at most that share
    fewer cycles, proved), trials, measured, known, failed, seconds, left_out (devices by name), damaged (lines of the
    records), and layers: name, workload, count, usual and best (cycles twice in a row), regret, trials, decided.

    Raises what `compile` does, ModelError where nothing runs on the accelerator, RecordsError, ValueError for a name
    that there is not, PoolError for a pool that is none or has no worker for this, SshError for a board's name that is
    none, FleetError where no device is left.
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
    return math.inf if budget is None else time.monotonic() + seconds_of(budget)


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
        "failed": state.failed, "seconds": seconds, "left_out": dict(state.left_out), "damaged": records.damaged,
        "conflicts": records.conflicts, "layers": layers,
    }  # fmt: skip


def _json_number(value: float) -> float | None:
    """Return a number for JSON, which has no infinity: None for that."""
    return value if math.isfinite(value) else None
