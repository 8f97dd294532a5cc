"""@cl.autotune: which of several constexprs a kernel takes, by the timing model or by measuring."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from celosia.compiler.language.jit import Kernel, Launched, Quantised, interpreting
from celosia.compiler.language.tile import LanguageError

REPEATS = 5
"""Times that a candidate runs on the CPU; the fastest counts."""


class Config:
    """Constexprs of a kernel, by name."""

    def __init__(self, values: dict[str, Any] | None = None, *, num_warps: int = 0, num_stages: int = 0, **named: Any):
        self.values = {**(values or {}), **named}

    def __repr__(self) -> str:
        return f"Config({', '.join(f'{name}={value!r}' for name, value in self.values.items())})"


class Tuned:
    """A kernel that takes the best of `configs` for each value of the arguments `key`, and for types and shapes.

    Every one is tried: on the accelerator by the cycles of the timing model, on the CPU by running on copies.
    """

    def __init__(self, kernel: Kernel, configs: Sequence[Config], key: Sequence[str]) -> None:
        if not configs:
            raise LanguageError(f"{kernel.at}: cl.autotune of {kernel.name} has no Config to choose from")
        for name in (*key, *(name for config in configs for name in config.values)):
            if name not in kernel.names:
                raise LanguageError(f"{kernel.at}: {kernel.name} has no parameter {name!r}, which cl.autotune names")
        self.kernel, self.configs, self.key, self.best = kernel, list(configs), tuple(key), {}  # type: ignore[var-annotated]

    def __getitem__(self, grid: Any) -> Callable[..., Launched]:
        return partial(self.launch, grid)

    def launch(self, grid: Any, /, *args: Any, **named: Any) -> Launched:
        config = self.config(grid, args, {name: value for name, value in named.items() if name != "device"})
        launched = self.kernel.launch(grid, *args, **{**named, **config.values})
        return Launched({**launched.report, "config": config.values})

    def config(self, grid: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Config:
        """The best for these arguments. LanguageError where none can run, with the reason of the last."""
        if interpreting():
            return self.configs[0]
        given = {**dict(zip(self.kernel.names, args)), **named}
        shapes = tuple((_array(v).shape, _array(v).dtype) for v in given.values() if _array(v) is not None)
        key = (*(given.get(name) for name in self.key), shapes)
        if key not in self.best:
            costs, error = [], None
            for number, config in enumerate(self.configs):
                try:
                    costs.append((self._cost(grid, args, {**named, **config.values}), number))
                except LanguageError as reason:
                    error = reason
            if error is not None and not costs:
                raise error
            self.best[key] = self.configs[min(costs)[1]]
        found: Config = self.best[key]
        return found

    def _cost(self, grid: Any, args: tuple[Any, ...], named: dict[str, Any]) -> float:
        copies = tuple(_copied(value) for value in args)
        variant, arrays = self.kernel.variant(grid, copies, {name: _copied(value) for name, value in named.items()})
        if self.kernel.target == "accelerator":
            return float(variant.cycles(arrays))
        clock = time.thread_time if variant.threads == 1 else time.perf_counter
        times = []
        for _ in range(REPEATS):
            start = clock()
            variant(arrays, "")
            times.append(clock() - start)
        return min(times)


def _array(value: Any) -> Any:
    value = value.array if isinstance(value, Quantised) else value
    return value if isinstance(value, np.ndarray) else None


def _copied(value: Any) -> Any:
    if isinstance(value, Quantised):
        return Quantised(value.array.copy(), value.zero_point)
    return value.copy() if isinstance(value, np.ndarray) else value


def autotune(configs: Sequence[Config], key: Sequence[str] = ()) -> Callable[[Kernel], Tuned]:
    """Above @cl.jit: choose among `configs` whenever the arguments named by `key`, or shapes, are new."""
    return lambda kernel: Tuned(kernel, configs, key)
