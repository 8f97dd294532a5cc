"""Tune kernels that run on this CPU: those of a model, or of a single expression."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import onnx

from celosia.compiler.compile import compile as compile_model
from celosia.compiler.cpu.llvm import compile_function
from celosia.compiler.cpu.schedule.kernel_schedules import KernelSchedules, KernelWorkload, using_schedules
from celosia.compiler.expr import Tensor
from celosia.compiler.expr.trace import Trace
from celosia.compiler.graph.importing.dimensions import Shapes
from celosia.compiler.program import Program
from celosia.compiler.program.host.kernel import CompiledKernel
from celosia.compiler.tune.device_pool import Fleet
from celosia.compiler.tune.kernels.kernel_tuner import KernelState, KernelTuner
from celosia.compiler.tune.records import Records
from celosia.compiler.tune.tuner_options import DEADLINE
from celosia.driver.choices import KERNEL_TRIALS
from celosia.driver.tune.tune import Tuning, deadline_of_budget, open_records
from celosia.hw.spec.config import Config

Told = Callable[[KernelState], None]
"""Callback with the state after each trial."""


def tune_cpu(
    source: str | Path | onnx.ModelProto, config: str | Path | Config = "pynq", *, trials: int = KERNEL_TRIALS,
    records: str | Path | Records | None = None, jobs: int = 1, search: str = "climb", learner: str = "ridge",
    seed: int = 0, deadline: float = DEADLINE, fleet: Fleet | None = None, accelerator: bool = True,
    check: bool = True, shapes: Shapes | None = None, budget: str | float | None = None,
    progress: Callable[[str], None] | None = None, told: Told = lambda state: None,
) -> Tuning:  # fmt: skip
    """Tune the kernels of a model that run on this CPU, on one thread, and compile it.

    >>> import celosia
    >>> tuning = celosia.tune_cpu(celosia.models.demo_model_path(), "tiny", trials=4)
    >>> tuning.report["seconds_tuned"] <= tuning.report["seconds_own"]
    True

    trials: the most schedules that are tried. records: a file that keeps the trials; those that it has are not run
    again. jobs: processes that measure. search: one of `tune.search.SEARCHES`. learner: "ridge", or "trees"
    (needs the extra `tune`). deadline: seconds for one trial. accelerator: False tunes a model that is compiled for the
    CPU only. budget: seconds, or "90s", "30m", "2h", after which no more trials begin. progress: called with
    the name of each stage; told: with the KernelState after each trial.

    The report has seconds_own and seconds_tuned (of all kernels, by short trials), measured, known, failed, seconds,
    left_out (devices by name), damaged (lines of the records), and kernels: kernel, count, trials, own and tuned
    (picoseconds), trace (as Python; "" where the compiler's own stays).

    Raises what `compile` does, RecordsError, ValueError for a name that there is not, FleetError where no process is
    left to measure.
    """
    kernel_records, started, until = open_records(records), time.perf_counter(), deadline_of_budget(budget)

    def compile_with(choices: KernelSchedules) -> Program:
        """Compile the model with these schedules of kernels; `choices` records the workloads that it meets."""
        with using_schedules(choices):
            return compile_model(
                source, config, progress, check=check, shapes=shapes, accelerator=accelerator, records=None
            )

    default_schedules = KernelSchedules()
    compile_with(default_schedules)
    if progress is not None:
        progress("tuning")
    state, traces = _tune_kernels(
        kernel_records,
        default_schedules.workloads.values(),
        trials,
        jobs,
        search,
        learner,
        seed,
        deadline,
        fleet,
        told,
        until,
    )
    return Tuning(
        compile_with(KernelSchedules(traces)), _tuning_report(state, kernel_records, time.perf_counter() - started)
    )


def tune_kernel(
    outputs: Tensor | Sequence[Tensor], inputs: Sequence[Tensor], *, trials: int = KERNEL_TRIALS,
    records: str | Path | Records | None = None, jobs: int = 1, search: str = "climb", learner: str = "ridge",
    seed: int = 0, deadline: float = DEADLINE, fleet: Fleet | None = None, told: Told = lambda state: None,
) -> tuple[CompiledKernel, Trace]:  # fmt: skip
    """Return (a kernel that computes `outputs` from `inputs`, its tuned schedule): see `tune_cpu`.

    >>> import numpy as np
    >>> import celosia
    >>> from celosia.compiler import expr as T
    >>> x = T.placeholder((4, 64), "float32", "x")
    >>> twice = T.compute((4, 64), lambda i, j: x[i, j] + x[i, j], "twice")
    >>> kernel, trace = celosia.tune_kernel(twice, [x], trials=2)
    >>> float(kernel(np.ones((4, 64), np.float32))[0].sum())
    512.0
    """
    computed = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
    workload = KernelWorkload.of(computed, inputs)
    _, traces = _tune_kernels(
        open_records(records), [(workload, 1)], trials, jobs, search, learner, seed, deadline, fleet, told
    )
    trace = traces.get(workload.name, workload.default_trace())
    return compile_function(workload.loops(workload.apply(trace))), trace


def _tune_kernels(
    records: Records, workloads: Iterable[tuple[KernelWorkload, int]], trials: int, jobs: int, search: str,
    learner: str, seed: int, deadline: float, fleet: Fleet | None, told: Told,
    until: float = math.inf,
) -> tuple[KernelState, dict[str, Trace]]:  # fmt: skip
    """Tune kernels, each with the number of its occurrences. Return the last state, and the best trace of each by name.

    until: time.monotonic after which no trial begins.
    """
    with nullcontext(fleet) if fleet else Fleet.local(jobs, deadline) as trial_fleet:
        tuner = KernelTuner(records, trial_fleet, trials, search, learner, seed, told, until)
        traces = tuner.tune(workloads)
    return tuner.state, traces


def _tuning_report(state: KernelState, records: Records, seconds: float) -> dict[str, Any]:
    """Return the report of `tune_cpu` as plain data."""
    kernels = [
        {
            "kernel": s.workload.name, "count": s.count, "trials": s.trials, "own": s.usual, "tuned": s.final,
            "trace": "" if s.chosen is None else str(s.chosen.trace),
        }
        for s in state.subjects
    ]  # fmt: skip
    return {
        "seconds_own": state.untuned, "seconds_tuned": state.tuned, "measured": state.measured, "known": state.known,
        "failed": state.failed, "seconds": seconds, "left_out": dict(state.left_out), "damaged": records.damaged,
        "kernels": kernels,
    }  # fmt: skip
