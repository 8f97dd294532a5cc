"""Run many cases in several processes, with progress and results."""

from __future__ import annotations

import hashlib
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from programs import random_config

import celosia
from celosia.hw.spec.config import Config
from celosia.hw.verilog import hardware_digest
from fuzz.cases import Coverage, Failure, Machine, garbage, legal
from fuzz.files import damaged, forged
from fuzz.harness import Journal, Workers


@dataclass(frozen=True)
class Kind:
    """A kind of cases.

    run: function that runs one case. folders: folders of sources that affect the results.
    size: cases that a process takes at a time. seconds: limit of processor time for these cases. own_cache: see
    Workers.
    """

    run: Callable[[Machine, int], str]
    folders: tuple[str, ...]
    size: int = 50
    seconds: float = 300.0
    own_cache: bool = False


def model(machine: Machine, seed: int) -> str:
    """Compile and run a random model; its outputs must be those of onnxruntime (see fuzz.models)."""
    from fuzz.models.campaign import model  # imports onnxruntime's quantiser, which takes a second

    return model(seed)


SIMULATORS, ALL = ("sim",), ("compiler", "driver", "sim")
KINDS = {
    "legal": Kind(legal, SIMULATORS), "garbage": Kind(garbage, SIMULATORS), "damaged": Kind(damaged, ALL),
    "forged": Kind(forged, ALL), "model": Kind(model, ALL, size=1, seconds=60.0, own_cache=True),
}  # fmt: skip
HARDWARE = ("legal", "garbage")
"""Kinds that run on the RTL."""
MOST_CHUNKS = 1000
"""Maximum number of chunks of a run; chunks have more cases if there would be more."""


class Chunk(NamedTuple):
    """Cases of one kind on one Config."""

    kind: str
    cfg: Config
    seeds: range

    def __str__(self) -> str:
        """Return a key with the cases and a digest of their sources; chunks with equal keys have equal results."""
        return f"{self.kind} {self.cfg.name} {self.seeds.start} {len(self.seeds)} {sources(self.kind, self.cfg)}"


@cache
def sources(kind: str, cfg: Config) -> str:
    """Return a digest of 32 hexadecimal digits of the Config, the hardware, the kind's sources and the cases."""
    digest = hashlib.sha256(hardware_digest(cfg).encode())
    here = Path(__file__).parent
    packages = [Path(celosia.__file__).parent / folder for folder in KINDS[kind].folders]
    files = [path for folder in (*packages, here) for path in folder.rglob("*") if path.suffix in (".py", ".cpp")]
    for path in sorted([*files, here.parent / "programs.py"]):
        digest.update(f"\n{path.name}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:32]


@dataclass
class Results:
    """The results of a run.

    endings: number of cases for each ending. failures: messages, with the arguments that repeat the case.
    causes: seeds of failures, by cause. seconds: of the run. cpu: processor seconds, including those of earlier runs.
    """

    endings: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    causes: dict[str, list[int]] = field(default_factory=dict)
    coverage: Coverage = field(default_factory=Coverage)
    cases: int = 0
    seconds: float = 0.0
    cpu: float = 0.0

    def merge(self, other: Results) -> None:
        self.endings.update(other.endings)
        self.failures += other.failures
        for cause, seeds in other.causes.items():
            self.causes.setdefault(cause, []).extend(seeds)
        self.coverage.merge(other.coverage)
        self.cases += other.cases
        self.cpu += other.cpu

    def fail(self, chunk: Chunk, why: str, cause: str = "") -> None:
        """Record that the cases of `chunk` failed. cause: a text that is equal for failures with the same cause."""
        seeds = chunk.seeds
        numbers = f"case {seeds.start}" if len(seeds) == 1 else f"cases {seeds.start} to {seeds.stop - 1}"
        self.failures.append(f"{chunk.kind} {numbers} on {chunk.cfg.name}: {why}")
        self.causes.setdefault(cause or why, []).append(seeds.start)

    def plain(self) -> dict[str, Any]:
        """Return the results as data for JSON (see `restored`), without failures: chunks with failures run again."""
        fields = [[*key, count] for key, count in self.coverage.fields.items()]
        states = self.coverage.states
        return {
            "cases": self.cases, "cpu": round(self.cpu, 2), "endings": self.endings,
            "fields": fields, "states": [[int(at), int(states.flat[at])] for at in np.flatnonzero(states)],
        }  # fmt: skip


def restored(plain: dict[str, Any]) -> Results:
    """Return the Results from the output of `plain`."""
    coverage = Coverage(Counter({(op, name, value): count for op, name, value, count in plain["fields"]}))
    for at, count in plain["states"]:
        coverage.states.flat[at] = count
    return Results(Counter(plain["endings"]), coverage=coverage, cases=plain["cases"], cpu=plain["cpu"])


def chunk(kind: str, cfg: Config, seeds: range) -> Results:
    """Run the cases `seeds` of one kind on one Config, in this process."""
    started = time.process_time()
    machine, results = Machine(cfg), Results()
    for seed in seeds:
        results.cases += 1
        try:
            results.endings[KINDS[kind].run(machine, seed)] += 1
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            why = f"{type(error).__name__}: {error} ({where.filename.rsplit('/', 1)[-1]}:{where.lineno})"
            cause = error.cause if isinstance(error, Failure) else ""
            results.fail(Chunk(kind, cfg, range(seed, seed + 1)), why, cause)
    results.coverage = machine.finish()
    results.cpu = time.process_time() - started
    return results


def chunks(kind: str, count: int, seed: int, configs: list[Config]) -> Iterator[Chunk]:
    """Yield all cases of a run in chunks; seeds start at `seed` million, and Configs take turns."""
    first, kind_size = seed * 1_000_000, KINDS[kind].size
    large = max(kind_size, count // MOST_CHUNKS) if kind_size > 1 else 1
    size = max(1, min(large, -(-count // len(configs))))
    for number, start in enumerate(range(first, first + count, size)):
        yield Chunk(kind, configs[number % len(configs)], range(start, min(start + size, first + count)))


def configs(count: int, seed: int) -> list[Config]:
    return [random_config(1000 * seed + number) for number in range(count)]


def run(
    work: Iterable[Chunk], jobs: int, note: Callable[[Results], None] = lambda results: None,
    journal: Journal | None = None,
) -> Results:  # fmt: skip
    """Run all chunks of `work`, which have the same kind, in `jobs` processes.

    A process that dies counts as a failure. Ctrl-C ends the run early.
    journal: its chunks do not run again; results of the others are added.
    """
    started, total, left = time.perf_counter(), Results(), list[Chunk]()
    for item in work:
        if journal is not None and str(item) in journal.done:
            total.merge(restored(journal.done[str(item)]))
        else:
            left.append(item)
    note(total)
    if left:
        kind, largest = KINDS[left[0].kind], max(len(item.seeds) for item in left)
        with Workers(jobs, kind.own_cache) as workers:
            try:
                calls = ((item, partial(chunk, *item)) for item in left)
                for item, results in workers.run(calls, kind.seconds * -(-largest // kind.size)):
                    if isinstance(results, str):
                        total.cases += len(item.seeds)
                        total.fail(item, results)
                    else:
                        total.merge(results)
                        if journal is not None and not results.failures:
                            journal.note(str(item), results.plain())
                    note(total)
            except KeyboardInterrupt:
                pass
    total.seconds = time.perf_counter() - started
    return total
