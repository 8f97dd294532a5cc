"""@cl.autotune: which of several constexprs a kernel takes, by the timing model and by measuring."""

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

from celosia.compiler.language.errors import LanguageError
from celosia.compiler.language.jit import Kernel, Launched, QuantisedArray, interpreting
from celosia.compiler.program.html import table
from celosia.compiler.tune.kernels.kernel_trial import processor, time_alternating
from celosia.compiler.tune.layer_trial import TIMED, Status, TrialResult
from celosia.compiler.tune.records import Key, Records

VERSION = 1
"""Version of what is measured here: a change raises it, and records of other versions do not count."""
REPEATS, TURNS = 3, 12
"""Times that a candidate runs on the CPU, and that each of the best few runs, by turns; the fastest counts."""
ABORT = 3.0
"""Times the best so far at which a candidate of the CPU is given up."""
FEW = 4
"""Candidates, the best by the timing model, that run on a device which has cycles of its own; the best of the CPU."""


class Config:
    """Constexprs of a kernel, by name."""

    def __init__(self, values: dict[str, Any] | None = None, *, num_warps: int = 0, num_stages: int = 0, **named: Any):
        self.values = {**(values or {}), **named}

    def __repr__(self) -> str:
        return f"Config({', '.join(f'{name}={value!r}' for name, value in self.values.items())})"


class Tuned:
    """A kernel that takes the best of `configs` for each value of the arguments `key`, and for types and shapes.

    Every one is tried: on the CPU by running on copies, the best few again, by turns; on the accelerator by the cycles
    of the timing model, and the best few of these on the device, where that has cycles of its own. records: a file of
    what was measured, in which what is found there is not measured again.
    """

    def __init__(
        self, kernel: Kernel, configs: Sequence[Config], key: Sequence[str], records: str | Path | None = None
    ) -> None:
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
        """The best Config of each set of arguments, for notebooks."""
        rows = [(", ".join(map(str, key[: len(self.key)])), str(config.values)) for key, config in self.best.items()]
        return self.kernel._repr_html_() + table([", ".join(self.key) or "arguments", "best"], rows)

    def __getitem__(self, grid: Any) -> Callable[..., Launched]:
        return partial(self.launch, grid)

    def launch(self, grid: Any, /, *args: Any, **named: Any) -> Launched:
        """As `Kernel.launch`, with the best config; its values are in the report, too."""
        device = named.pop("device", "functional")
        config = self.config(grid, args, named, device)
        launched = self.kernel.launch(grid, *args, **{**named, **config.values}, device=device)
        return Launched({**launched.report, "config": config.values})

    def config(self, grid: Any, args: tuple[Any, ...], named: dict[str, Any], device: Any = "functional") -> Config:
        """The best for these arguments. LanguageError where none can run, with the reason of the last; RecordsError."""
        if interpreting():
            return self.configs[0]
        given = {**dict(zip(self.kernel.names, args)), **named}
        shapes = tuple((_array(v).shape, _array(v).dtype) for v in given.values() if _array(v) is not None)
        key = (*(given.get(name) for name in self.key), shapes, device if isinstance(device, str) else type(device))
        found = self.best.get(key)
        if found is None:
            found = self.best[key] = self.configs[_Search(self, grid, args, named).best(device)]
        return found


class _Search:
    """One choice. names: of what is computed, and of what computes it, in records."""

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
        """Name, types and shapes of arrays, the arguments that count, and a digest of the kernel's text."""
        _, args, named = self.call
        given = {**dict(zip(self.kernel.names, args)), **named}
        arrays = [f"{a.dtype}{list(a.shape)}" for a in map(_array, given.values()) if a is not None]
        numbers = [f"{name}={given.get(name)!r}" for name in self.tuned.key]
        digest = hashlib.sha256("".join(_texts(self.kernel.function, set())).encode()).hexdigest()[:16]
        return f"{self.kernel.name} of {', '.join(arrays + numbers)} #{digest}"

    def best(self, device: Any) -> int:
        """The number of the best candidate."""
        everyone = range(len(self.tuned.configs))
        if self.kernel.target == "cpu":
            measurer = f"cpu {VERSION}, threads={self.kernel.threads or 'all'}"
            costs = self._costs(everyone, measurer, self._seconds)
            if len(costs) > 1:
                costs = self._costs(first := _few(costs), f"{measurer}, by turns", self._by_turns(first))
        else:
            costs = self._costs(everyone, f"kernel {VERSION}, {TIMED.version}", self._predicted)
            if device not in ("functional", "timed") and costs:
                machine = self.kernel.device(device)
                measurer = f"kernel {VERSION}, {type(machine).__name__}, {machine.memory_model}"
                if machine.memory_model is not None:
                    costs = self._costs(_few(costs), measurer, partial(self._measured, machine))
        if not costs:
            raise LanguageError(self.reason)
        return min(costs, key=lambda number: (costs[number], number))

    def _costs(
        self, numbers: Iterable[int], measurer: str, cost: Callable[[dict[str, Any], float], int]
    ) -> dict[int, float]:
        """What candidates cost, of those that can run: from the records, or by asking."""
        found: dict[int, float] = {}
        for number in numbers:
            values = self.tuned.configs[number].values
            key = Key(*self.names, json.dumps(values, sort_keys=True, separators=(",", ":"), default=repr), measurer)
            result = self.records.get(key)
            if result is None:
                try:
                    result = TrialResult(Status.OK, max(1, cost(values, min(found.values(), default=float("inf")))))
                except LanguageError as error:
                    result = TrialResult(Status.REFUSED, detail=str(error))
                self.records.add(key, result)
            if result.cost is None:
                self.reason = result.detail
            else:
                found[number] = result.cost
        return found

    def _variant(self, values: dict[str, Any]) -> tuple[Any, list[Any], list[int]]:
        """The kernel with these constexprs, on copies of the arguments."""
        grid, args, named = self.call
        copies = {name: _copied(value) for name, value in named.items()}
        return self.kernel.variant(grid, tuple(map(_copied, args)), {**copies, **values})

    def _predicted(self, values: dict[str, Any], limit: float) -> int:
        variant, arrays, _ = self._variant(values)
        return int(variant.cycles(arrays))

    def _measured(self, machine: Any, values: dict[str, Any], limit: float) -> int:
        variant, arrays, _ = self._variant(values)
        return int(variant(arrays, machine)["cycles"])

    def _seconds(self, values: dict[str, Any], limit: float) -> int:
        """Picoseconds."""
        variant, arrays, places = self._variant(values)
        clock, best = self._clock(), float("inf")
        for number in range(REPEATS):
            start = clock()
            variant(arrays, "", places)
            best = min(best, (clock() - start) * 1e12)
            if number and best > ABORT * limit:  # the first run links the code
                break
        return int(best)

    def _clock(self) -> Callable[[], float]:
        return time.thread_time if self.kernel.threads == 1 else time.perf_counter

    def _by_turns(self, numbers: Sequence[int]) -> Callable[[dict[str, Any], float], int]:
        """Picoseconds of these candidates, which share the clock and the neighbours of each other; once asked for."""
        configs = [self.tuned.configs[number].values for number in numbers]

        @cache
        def measured() -> list[float]:
            runs = [partial(variant, arrays, "", places) for variant, arrays, places in map(self._variant, configs)]
            return time_alternating(runs, 0, TURNS, self._clock())

        return lambda values, limit: int(measured()[configs.index(values)] * 1e12)


def _few(costs: dict[int, float]) -> list[int]:
    return sorted(costs, key=lambda number: costs[number])[:FEW]


def _texts(function: FunctionType, seen: set[FunctionType]) -> Iterable[str]:
    """The text of a kernel, and of the functions and the numbers that it has by name."""
    seen.add(function)
    try:
        yield inspect.getsource(function)
    except (OSError, TypeError):
        yield function.__code__.co_code.hex() + repr([c for c in function.__code__.co_consts if not inspect.iscode(c)])
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        value = value.function if isinstance(value, Kernel) else value
        if isinstance(value, FunctionType) and value not in seen:
            yield from _texts(value, seen)
        elif isinstance(value, (bool, int, float, str)):
            yield f"{name}={value!r}"


def _array(value: Any) -> Any:
    value = value.array if isinstance(value, QuantisedArray) else value
    return value if isinstance(value, np.ndarray) else None


def _copied(value: Any) -> Any:
    if isinstance(value, QuantisedArray):
        return QuantisedArray(value.array.copy(), value.zero_point)
    return value.copy() if isinstance(value, np.ndarray) else value


def autotune(
    configs: Sequence[Config], key: Sequence[str] = (), records: str | Path | None = None
) -> Callable[[Kernel], Tuned]:
    """Above @cl.jit: choose among `configs` whenever the arguments named by `key`, or shapes, are new.

    records: a file of JSON lines, that of `celosia tune` for one, which is read and written: what it holds is not
    measured again. RecordsError where it cannot be read, when the kernel is called.
    """
    return lambda kernel: Tuned(kernel, configs, key, records)
