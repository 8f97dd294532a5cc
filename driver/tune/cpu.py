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
from celosia.compiler.expr.schedule import Trace
from celosia.compiler.graph.importing.dimensions import Shapes
from celosia.compiler.program import Program
from celosia.compiler.program.host.kernel import CompiledKernel
from celosia.compiler.tune.device_pool import Fleet
from celosia.compiler.tune.kernel_tuner import KernelState, KernelTuner
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

    Args:
        source: The model: its path, or its contents as an onnx.ModelProto.
        config: Accelerator, as `celosia.compile` takes it.
        trials: Largest number of schedules that are tried.
        records: File that keeps the trials, or Records. Trials that it has are not run again. None: trials are not
            kept.
        jobs: Number of processes that measure.
        search: Search algorithm, one of `tune.search.SEARCHES`: "descent", "climb", "evolution", "annealing" or
            "random".
        learner: Cost model that learns from trials: "ridge", or "trees" (needs the extra `tune`).
        seed: Seed of the random numbers of the search.
        deadline: Limit of one trial, in seconds.
        fleet: Devices of the caller, which stay open. None: `jobs` processes of this machine.
        accelerator: False tunes a model that is compiled for the CPU only.
        check: Compare the Program with the model, as `celosia.compile` does.
        shapes: Shapes of inputs by name, if the model leaves sizes open. None: no shape is fixed.
        budget: Time after which no more trials begin, in seconds, or as "90s", "30m" or "2h". None: no limit.
        progress: Function that is called with the name of each stage. None: no function is called.
        told: Function that is called with the KernelState after each trial.

    Returns:
        A Tuning. Its `program` is compiled with the best schedules. Its `report` is a dictionary with these keys:

            - `seconds_own`, `seconds_tuned`: seconds of all kernels, by short trials, under the compiler's own
              schedules and under the tuned ones
            - `measured`, `known`, `failed`: number of trials that were measured, were in `records`, or failed
            - `seconds`: time of the tuning, in seconds
            - `left_out`: devices by name, with the reason
            - `damaged`: number of lines of the records that cannot be read
            - `kernels`: a row for each kernel, with the keys below

            A row of `kernels`:

            - `kernel`: name
            - `count`: number of its occurrences in the model
            - `trials`: number of its trials
            - `own`, `tuned`: picoseconds under the compiler's own schedule and under the tuned one
            - `trace`: the tuned schedule as Python; "" where the compiler's own stays

    Raises:
        ModelError: `celosia.compile` does not support the model. The other errors of `celosia.compile` are raised, too.
        ConfigError: The Config is invalid, or there is none of that name.
        RecordsError: The file of records cannot be read.
        BudgetError: `budget` is no time.
        ValueError: There is no such search or learner.
        FleetError: No process is left to measure.

    Examples:
        >>> import celosia
        >>> tuning = celosia.tune_cpu(celosia.models.demo_model_path(), "tiny", trials=4)
        >>> tuning.report["seconds_tuned"] <= tuning.report["seconds_own"]
        True
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
    """Tune the kernel of an expression on this CPU, on one thread, and compile it.

    Args:
        outputs: Tensor or tensors that the kernel computes.
        inputs: Tensors from which it computes them, in the order of its arguments.
        trials: Largest number of schedules that are tried.
        records: File that keeps the trials, or Records. Trials that it has are not run again. None: trials are not
            kept.
        jobs: Number of processes that measure.
        search: Search algorithm, one of `tune.search.SEARCHES`: "descent", "climb", "evolution", "annealing" or
            "random".
        learner: Cost model that learns from trials: "ridge", or "trees" (needs the extra `tune`).
        seed: Seed of the random numbers of the search.
        deadline: Limit of one trial, in seconds.
        fleet: Devices of the caller, which stay open. None: `jobs` processes of this machine.
        told: Function that is called with the KernelState after each trial.

    Returns:
        The kernel, which takes the arrays of `inputs` and returns those of `outputs`.
        Its schedule: the tuned one, or the default where none is faster.

    Raises:
        RecordsError: The file of records cannot be read.
        ValueError: There is no such search or learner.
        FleetError: No process is left to measure.

    Examples:
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
        "failed": state.failed, "seconds": seconds, "left_out": dict(state.excluded_devices),
        "damaged": records.damaged,
        "kernels": kernels,
    }  # fmt: skip
