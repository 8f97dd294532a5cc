"""@cl.autotune: choose the constexprs of a kernel by the timing model and by measuring."""

from __future__ import annotations

import hashlib
import inspect
import json
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np

from celosia.compiler.language.jit import Kernel, Launched, QuantisedArray, is_interpreting
from celosia.compiler.language.tile import LanguageError
from celosia.compiler.program.model import html_table
from celosia.compiler.tune.kernel_trial import processor, time_alternating
from celosia.compiler.tune.layer_trial import TIMED, Status, TrialResult
from celosia.compiler.tune.records import Key, Records

VERSION = 1
"""Version of these measurements: a change raises it, and records of other versions do not count."""
REPEATS, FINAL_ROUNDS = 3, 12
"""Runs of a candidate on the CPU, and alternating runs of each finalist; the fastest counts."""
ABORT_FACTOR = 3.0
"""Multiple of the best time at which a candidate on the CPU is given up."""
FINALISTS = 4
"""Number of the best candidates that are measured once more: on a device with its own cycles, or again on the CPU."""


class Config:
    """A choice of constexprs of a kernel, by name. num_warps and num_stages of Triton have no effect."""

    def __init__(self, values: dict[str, Any] | None = None, *, num_warps: int = 0, num_stages: int = 0, **named: Any):
        self.values = {**(values or {}), **named}

    def __repr__(self) -> str:
        return f"Config({', '.join(f'{name}={value!r}' for name, value in self.values.items())})"


class Tuned:
    """A kernel that uses the best of `configs` for each value of the arguments `key`, and for types and shapes.

    Every config is tried: on the CPU by running on copies, the finalists again in alternation; on the accelerator by
    the timing model, and the finalists on the device, if it has its own cycles. records: a file of measurements, which
    are not repeated; without one they are kept in memory. best: the chosen Config by arguments and shapes.
    """

    def __init__(
        self, kernel: Kernel, configs: Sequence[Config], key: Sequence[str], records: str | Path | None = None
    ) -> None:
        """Check that all configs and keys are parameters of the kernel. Raises LanguageError."""
        if not configs:
            raise LanguageError(f"{kernel.at}: cl.autotune of {kernel.name} has no Config to choose from")
        for name in (*key, *(name for config in configs for name in config.values)):
            if name not in kernel.names:
                raise LanguageError(f"{kernel.at}: {kernel.name} has no parameter {name!r}, which cl.autotune names")
        self.kernel, self.configs, self.key = kernel, list(configs), tuple(key)
        self.best: dict[Any, Config] = {}
        self.path, self.records = records, None if records else Records()

    def __repr__(self) -> str:
        return f"<Tuned {self.kernel!r}: {len(self.configs)} Configs, tuned for {len(self.best)} sets of arguments>"

    def _repr_html_(self) -> str:
        """Return the best Config of each set of arguments, for notebooks."""
        rows = [(", ".join(map(str, key[: len(self.key)])), str(config.values)) for key, config in self.best.items()]
        return self.kernel._repr_html_() + html_table([", ".join(self.key) or "arguments", "best"], rows)

    def __getitem__(self, grid: Any) -> Callable[..., Launched]:
        return partial(self.launch, grid)

    def launch(self, grid: Any, /, *args: Any, **named: Any) -> Launched:
        """Run the kernel with the best config, whose values are in the report, too."""
        device = named.pop("device", "functional")
        config = self.config(grid, args, named, device)
        launched = self.kernel.launch(grid, *args, **{**named, **config.values}, device=device)
        return Launched({**launched.report, "config": config.values})

    def config(self, grid: Any, args: tuple[Any, ...], named: dict[str, Any], device: Any = "functional") -> Config:
        """Return the best config for these arguments. Raises LanguageError where none can run, RecordsError."""
        if is_interpreting():
            return self.configs[0]
        arguments = {**dict(zip(self.kernel.names, args)), **named}
        arrays = [array for array in map(_as_array, arguments.values()) if array is not None]
        shapes = tuple((array.shape, array.dtype) for array in arrays)
        key = (*(arguments.get(name) for name in self.key), shapes, device if isinstance(device, str) else type(device))
        best = self.best.get(key)
        if best is None:
            best = self.best[key] = self.configs[_Search(self, grid, args, named).best(device)]
        return best


class _Search:
    """The search for the best config for one set of arguments.

    call: grid, arguments and named arguments of the kernel. names: the workload, and the processor or Config, which are
    the key of records. reason: why the last candidate that could not run was refused.
    """

    def __init__(self, tuned: Tuned, grid: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.tuned, self.kernel, self.call = tuned, tuned.kernel, (grid, args, named)
        if tuned.records is None:
            assert tuned.path is not None
            tuned.records = Records.load(tuned.path, must_exist=False)
        self.records = tuned.records
        on_cpu = self.kernel.target == "cpu"
        self.names = self._workload(), processor() if on_cpu else self.kernel.machine.digest
        self.reason = ""

    def _workload(self) -> str:
        """Name the workload: types and shapes of arrays, the key arguments, and a digest of the kernel's text."""
        _, args, named = self.call
        arguments = {**dict(zip(self.kernel.names, args)), **named}
        arrays = [f"{a.dtype}{list(a.shape)}" for a in map(_as_array, arguments.values()) if a is not None]
        key_values = [f"{name}={arguments.get(name)!r}" for name in self.tuned.key]
        digest = hashlib.sha256("".join(_source_texts(self.kernel.function, set())).encode()).hexdigest()[:16]
        return f"{self.kernel.name} of {', '.join(arrays + key_values)} #{digest}"

    def best(self, device: Any) -> int:
        """Return the index of the best candidate. Raises LanguageError where none can run."""
        candidates = range(len(self.tuned.configs))
        if self.kernel.target == "cpu":
            measurer = f"cpu {VERSION}, threads={self.kernel.threads or 'all'}"
            costs = self._costs(candidates, measurer, self._measure_picoseconds)
            if len(costs) > 1:
                costs = self._costs(first := _finalists(costs), f"{measurer}, by turns", self._alternating_cost(first))
        else:
            costs = self._costs(candidates, f"kernel {VERSION}, {TIMED.version}", self._predict_cycles)
            if device not in ("functional", "timed") and costs:
                machine = self.kernel.device(device)
                measurer = f"kernel {VERSION}, {type(machine).__name__}, {machine.memory_model}"
                if machine.memory_model is not None:
                    costs = self._costs(_finalists(costs), measurer, partial(self._measure_cycles, machine))
        if not costs:
            raise LanguageError(self.reason)
        return min(costs, key=lambda candidate: (costs[candidate], candidate))

    def _costs(
        self, candidates: Iterable[int], measurer: str, cost: Callable[[dict[str, Any], float], int]
    ) -> dict[int, float]:
        """Return the costs of the candidates that can run, from the records or measured now.

        measurer: how costs are measured, a part of the records' key. cost: function of the constexprs and the lowest
        cost until now that measures a candidate; it raises LanguageError where the candidate cannot run.
        """
        costs: dict[int, float] = {}
        for candidate in candidates:
            values = self.tuned.configs[candidate].values
            key = Key(*self.names, json.dumps(values, sort_keys=True, separators=(",", ":"), default=repr), measurer)
            result = self.records.get(key)
            if result is None:
                try:
                    result = TrialResult(Status.OK, max(1, cost(values, min(costs.values(), default=float("inf")))))
                except LanguageError as error:
                    result = TrialResult(Status.REFUSED, detail=str(error))
                self.records.add(key, result)
            if result.cost is None:
                self.reason = result.detail
            else:
                costs[candidate] = result.cost
        return costs

    def _variant(self, values: dict[str, Any]) -> tuple[Any, list[Any], list[int]]:
        """Return (compiled kernel with these constexprs, copies of the arguments, their addresses)."""
        grid, args, named = self.call
        copies = {name: _copy_argument(value) for name, value in named.items()}
        return self.kernel.variant(grid, tuple(map(_copy_argument, args)), {**copies, **values})

    def _predict_cycles(self, values: dict[str, Any], limit: float) -> int:
        """Return the cycles of a candidate by the timing model."""
        variant, arrays, _ = self._variant(values)
        return int(variant.cycles(arrays))

    def _measure_cycles(self, machine: Any, values: dict[str, Any], limit: float) -> int:
        """Return the cycles of a candidate on the Device `machine`."""
        variant, arrays, _ = self._variant(values)
        return int(variant(arrays, machine)["cycles"])

    def _measure_picoseconds(self, values: dict[str, Any], limit: float) -> int:
        """Return the picoseconds of a candidate on the CPU, the fastest of some runs.

        Runs end early where it is slower than ABORT_FACTOR * limit, the time of the best candidate until now.
        """
        variant, arrays, addresses = self._variant(values)
        clock, best = self._clock(), float("inf")
        for run in range(REPEATS):
            start = clock()
            variant(arrays, "", addresses)
            best = min(best, (clock() - start) * 1e12)
            if run and best > ABORT_FACTOR * limit:  # the first run links the code
                break
        return int(best)

    def _clock(self) -> Callable[[], float]:
        """Return the clock of measurements: time of this thread for one thread, else wall time."""
        return time.thread_time if self.kernel.threads == 1 else time.perf_counter

    def _alternating_cost(self, candidates: Sequence[int]) -> Callable[[dict[str, Any], float], int]:
        """Return a cost function that measures these candidates in alternation, when it is first called."""
        configs = [self.tuned.configs[candidate].values for candidate in candidates]

        @cache
        def times() -> list[float]:
            """Return the seconds of each candidate."""
            runs = [
                partial(variant, arrays, "", addresses) for variant, arrays, addresses in map(self._variant, configs)
            ]
            return time_alternating(runs, 0, FINAL_ROUNDS, self._clock())

        return lambda values, limit: int(times()[configs.index(values)] * 1e12)


def _finalists(costs: dict[int, float]) -> list[int]:
    """Return the candidates with the lowest costs."""
    return sorted(costs, key=lambda candidate: costs[candidate])[:FINALISTS]


def _source_texts(function: FunctionType, seen: set[FunctionType]) -> Iterable[str]:
    """Yield the text of a kernel, and of the functions and numbers that it refers to.

    Records of a kernel hold only as long as these stay.
    """
    seen.add(function)
    try:
        yield inspect.getsource(function)
    except (OSError, TypeError):
        yield function.__code__.co_code.hex() + repr([c for c in function.__code__.co_consts if not inspect.iscode(c)])
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        value = value.function if isinstance(value, Kernel) else value
        if isinstance(value, FunctionType) and value not in seen:
            yield from _source_texts(value, seen)
        elif isinstance(value, (bool, int, float, str)):
            yield f"{name}={value!r}"


def _as_array(value: Any) -> Any:
    """Return the array of an argument, which may be quantised; None for other arguments."""
    value = value.array if isinstance(value, QuantisedArray) else value
    return value if isinstance(value, np.ndarray) else None


def _copy_argument(value: Any) -> Any:
    """Copy an argument if it is an array, so that trial runs leave the caller's arrays unchanged."""
    if isinstance(value, QuantisedArray):
        return QuantisedArray(value.array.copy(), value.zero_point)
    return value.copy() if isinstance(value, np.ndarray) else value


def autotune(
    configs: Sequence[Config], key: Sequence[str] = (), records: str | Path | None = None
) -> Callable[[Kernel], Tuned]:
    """Decorate a kernel, above @cl.jit, so that it uses the best of `configs`.

    The choice is made anew whenever the arguments named by `key`, or shapes, are new.

    records: a file of JSON lines, such as that of `celosia tune`, to which measurements are added; known ones are not
    repeated. Calls of the kernel raise RecordsError where it cannot be read.
    """
    return lambda kernel: Tuned(kernel, configs, key, records)
