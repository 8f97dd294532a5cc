"""Many cases in several processes: kinds of cases, progress, results."""

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
    """Cases that `run` runs. folders: of the sources that decide how they end. size: how many a process takes at a
    time. seconds: of processor time for these. own_cache: see Workers."""

    run: Callable[[Machine, int], str]
    folders: tuple[str, ...]
    size: int = 50
    seconds: float = 300.0
    own_cache: bool = False


def model(machine: Machine, seed: int) -> str:
    """A random model with onnxruntime's outputs: see fuzz.models."""
    from fuzz.models.campaign import model  # with onnxruntime's quantiser, which takes a second

    return model(seed)


SIMULATORS, ALL = ("sim",), ("compiler", "driver", "sim")
KINDS = {
    "legal": Kind(legal, SIMULATORS), "garbage": Kind(garbage, SIMULATORS), "damaged": Kind(damaged, ALL),
    "forged": Kind(forged, ALL), "model": Kind(model, ALL, size=1, seconds=60.0, own_cache=True),
}  # fmt: skip
HARDWARE = ("legal", "garbage")
"""Kinds that run on the RTL."""
MOST_CHUNKS = 1000
"""Processes take more cases at a time where there would be more chunks."""


class Chunk(NamedTuple):
    """Cases of one kind on one Config."""

    kind: str
    cfg: Config
    seeds: range

    def __str__(self) -> str:
        """The cases and their sources; chunks with the same text have the same results."""
        return f"{self.kind} {self.cfg.name} {self.seeds.start} {len(self.seeds)} {sources(self.kind, self.cfg)}"


@cache
def sources(kind: str, cfg: Config) -> str:
    """32 hexadecimal digits that differ where Config, hardware, the kind's sources or its cases do."""
    digest = hashlib.sha256(hardware_digest(cfg).encode())
    here = Path(__file__).parent
    packages = [Path(celosia.__file__).parent / folder for folder in KINDS[kind].folders]
    files = [path for folder in (*packages, here) for path in folder.rglob("*") if path.suffix in (".py", ".cpp")]
    for path in sorted([*files, here.parent / "programs.py"]):
        digest.update(f"\n{path.name}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:32]


@dataclass
class Results:
    """endings: how many cases ended how. failures: what was wrong, with the arguments that repeat it. causes: seeds of
    failures that have one cause. seconds: of the run. cpu: processor seconds, also of earlier runs."""

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
        """Note that the cases of `chunk` failed. cause: the same text for failures that have one cause."""
        seeds = chunk.seeds
        numbers = f"case {seeds.start}" if len(seeds) == 1 else f"cases {seeds.start} to {seeds.stop - 1}"
        self.failures.append(f"{chunk.kind} {numbers} on {chunk.cfg.name}: {why}")
        self.causes.setdefault(cause or why, []).append(seeds.start)

    def plain(self) -> dict[str, Any]:
        """As what JSON can hold; see `restored`. Chunks with failures are tried again, so that these are not in it."""
        fields = [[*key, count] for key, count in self.coverage.fields.items()]
        states = self.coverage.states
        return {
            "cases": self.cases, "cpu": round(self.cpu, 2), "endings": self.endings,
            "fields": fields, "states": [[int(at), int(states.flat[at])] for at in np.flatnonzero(states)],
        }  # fmt: skip


def restored(plain: dict[str, Any]) -> Results:
    """The Results of which `plain` was made."""
    coverage = Coverage(Counter({(op, name, value): count for op, name, value, count in plain["fields"]}))
    for at, count in plain["states"]:
        coverage.states.flat[at] = count
    return Results(Counter(plain["endings"]), coverage=coverage, cases=plain["cases"], cpu=plain["cpu"])


def chunk(kind: str, cfg: Config, seeds: range) -> Results:
    """Cases `seeds` of one kind on one Config, in this process."""
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
    """All cases of a run: their seeds follow `seed` million, and Configs take turns by chunks."""
    first, most = seed * 1_000_000, KINDS[kind].size
    large = max(most, count // MOST_CHUNKS) if most > 1 else 1
    size = max(1, min(large, -(-count // len(configs))))
    for number, start in enumerate(range(first, first + count, size)):
        yield Chunk(kind, configs[number % len(configs)], range(start, min(start + size, first + count)))


def configs(count: int, seed: int) -> list[Config]:
    return [random_config(1000 * seed + number) for number in range(count)]


def run(
    work: Iterable[Chunk], jobs: int, note: Callable[[Results], None] = lambda results: None,
    journal: Journal | None = None,
) -> Results:  # fmt: skip
    """All chunks of `work`, which have one kind, in `jobs` processes. A process that dies is a failure; Ctrl-C ends the
    run early.

    journal: chunks that it has are not run again, the others are added to it.
    """
    started, total, left = time.perf_counter(), Results(), list[Chunk]()
    for each in work:
        if journal is not None and str(each) in journal.done:
            total.merge(restored(journal.done[str(each)]))
        else:
            left.append(each)
    note(total)
    if left:
        kind, most = KINDS[left[0].kind], max(len(each.seeds) for each in left)
        with Workers(jobs, kind.own_cache) as workers:
            try:
                calls = ((each, partial(chunk, *each)) for each in left)
                for each, results in workers.run(calls, kind.seconds * -(-most // kind.size)):
                    if isinstance(results, str):
                        total.cases += len(each.seeds)
                        total.fail(each, results)
                    else:
                        total.merge(results)
                        if journal is not None and not results.failures:
                            journal.note(str(each), results.plain())
                    note(total)
            except KeyboardInterrupt:
                pass
    total.seconds = time.perf_counter() - started
    return total
