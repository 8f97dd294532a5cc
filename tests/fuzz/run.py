"""Many cases in several processes: kinds of cases, progress, results."""

from __future__ import annotations

import faulthandler
import multiprocessing
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field

from celosia.hw.config import Config
from fuzz.cases import Coverage, Machine, garbage, legal, random_config
from fuzz.files import damaged, forged

Case = Callable[[Machine, int], str]
KINDS: dict[str, Case] = {"legal": legal, "garbage": garbage, "damaged": damaged, "forged": forged}
CHUNK = 50
"""Cases that a process takes at a time."""
HANG_SECONDS = 300
"""A chunk that takes longer has hung; its process ends with a trace."""


@dataclass
class Results:
    """endings: how many cases ended how. failures: what was wrong, with the arguments that repeat it."""

    endings: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    coverage: Coverage = field(default_factory=Coverage)
    cases: int = 0
    seconds: float = 0.0

    def merge(self, other: Results) -> None:
        self.endings.update(other.endings)
        self.failures += other.failures
        self.coverage.merge(other.coverage)
        self.cases += other.cases


def chunk(kind: str, cfg: Config, seeds: range) -> Results:
    """Cases `seeds` of one kind on one Config, in this process."""
    faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
    machine, results = Machine(cfg), Results()
    for seed in seeds:
        results.cases += 1
        try:
            results.endings[KINDS[kind](machine, seed)] += 1
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            what = f"{type(error).__name__}: {error} ({where.filename.rsplit('/', 1)[-1]}:{where.lineno})"
            results.failures.append(f"{kind} case {seed} on {cfg.name}: {what}")
    results.coverage = machine.finish()
    faulthandler.cancel_dump_traceback_later()
    return results


def chunks(kind: str, count: int, seed: int, configs: list[Config]) -> Iterator[tuple[str, Config, range]]:
    """All cases of a run: their seeds follow `seed` million, and Configs take turns by chunks."""
    first = seed * 1_000_000
    size = max(1, min(CHUNK, -(-count // len(configs))))
    for number, start in enumerate(range(first, first + count, size)):
        yield kind, configs[number % len(configs)], range(start, min(start + size, first + count))


def configs(count: int, seed: int) -> list[Config]:
    return [random_config(1000 * seed + number) for number in range(count)]


def run(
    work: Iterable[tuple[str, Config, range]], jobs: int, note: Callable[[Results], None] = lambda results: None
) -> Results:
    """All chunks of `work`, in `jobs` processes. A process that dies is a failure, and ends the run."""
    started, total = time.perf_counter(), Results()
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        waiting = [(chunk_, pool.submit(chunk, *chunk_)) for chunk_ in work]
        for (kind, cfg, seeds), future in waiting:
            try:
                total.merge(future.result())
            except BrokenProcessPool:
                total.failures.append(f"{kind} cases {seeds.start} to {seeds.stop - 1} on {cfg.name}: a process died")
                break
            note(total)
    total.seconds = time.perf_counter() - started
    return total
