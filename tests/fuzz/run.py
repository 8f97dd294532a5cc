"""Many cases in several processes: kinds of cases, progress, results."""

from __future__ import annotations

import faulthandler
import gc
import hashlib
import json
import multiprocessing
import os
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from programs import random_config

from celosia.hw.spec.config import Config
from celosia.hw.verilog import hardware_digest
from fuzz.cases import Coverage, Machine, garbage, legal
from fuzz.files import damaged, forged

Case = Callable[[Machine, int], str]
KINDS: dict[str, Case] = {"legal": legal, "garbage": garbage, "damaged": damaged, "forged": forged}
CHUNK = 50
"""Cases that a process takes at a time; more where there would be over MOST_CHUNKS of them."""
MOST_CHUNKS = 1000
HANG_SECONDS = 300
"""CHUNK cases that take longer have hung; their process ends with a trace."""


class Chunk(NamedTuple):
    """Cases of one kind on one Config."""

    kind: str
    cfg: Config
    seeds: range

    def __str__(self) -> str:
        """What it runs on which sources; chunks with the same text have the same results."""
        return f"{self.kind} {self.cfg.name} {self.seeds.start} {len(self.seeds)} {sources(self.cfg)}"


@cache
def sources(cfg: Config) -> str:
    """32 hexadecimal digits that differ where Config, hardware, simulators or cases do."""
    digest = hashlib.sha256(hardware_digest(cfg).encode())
    here = Path(__file__).parent
    simulators = [path for path in resources.files("celosia.sim").iterdir() if path.name.endswith((".py", ".cpp"))]
    cases = (here.parent / "programs.py", here / "cases.py", here / "files.py")
    for path in (*sorted(simulators, key=lambda path: path.name), *cases):
        digest.update(f"\n{path.name}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:32]


@dataclass
class Results:
    """endings: how many cases ended how. failures: what was wrong, with the arguments that repeat it. seconds: that a
    run took. cpu: seconds of processors, also of earlier runs that it goes on with."""

    endings: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    coverage: Coverage = field(default_factory=Coverage)
    cases: int = 0
    seconds: float = 0.0
    cpu: float = 0.0

    def merge(self, other: Results) -> None:
        self.endings.update(other.endings)
        self.failures += other.failures
        self.coverage.merge(other.coverage)
        self.cases += other.cases
        self.cpu += other.cpu

    def plain(self) -> dict[str, Any]:
        """As what JSON can hold; see `restored`."""
        fields = [[*key, count] for key, count in self.coverage.fields.items()]
        states = self.coverage.states
        return {
            "cases": self.cases, "cpu": round(self.cpu, 2), "endings": self.endings, "failures": self.failures,
            "fields": fields, "states": [[int(at), int(states.flat[at])] for at in np.flatnonzero(states)],
        }  # fmt: skip


def restored(plain: dict[str, Any]) -> Results:
    """The Results of which `plain` was made."""
    coverage = Coverage(Counter({(op, name, value): count for op, name, value, count in plain["fields"]}))
    for at, count in plain["states"]:
        coverage.states.flat[at] = count
    return Results(Counter(plain["endings"]), plain["failures"], coverage, plain["cases"], cpu=plain["cpu"])


class Journal:
    """A file of JSON lines with the results of chunks, by which a run goes on where another one has ended."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done: dict[str, Results] = {}
        """By the text of the chunk. Chunks with failures are not kept: they are tried again."""
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        for line in text.splitlines():
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:
                continue  # its process ended while it wrote
            if not entry["failures"]:
                self.done[entry["chunk"]] = restored(entry)
        if text and not text.endswith("\n"):
            self._append("\n")

    def note(self, chunk_: Chunk, results: Results) -> None:
        self._append(json.dumps({"chunk": str(chunk_), **results.plain()}, separators=(",", ":")) + "\n")

    def _append(self, text: str) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(text)


def chunk(kind: str, cfg: Config, seeds: range) -> Results:
    """Cases `seeds` of one kind on one Config, in this process."""
    started = time.process_time()
    machine, results = Machine(cfg), Results()
    for number, seed in enumerate(seeds):
        if number % CHUNK == 0:
            faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
        results.cases += 1
        try:
            results.endings[KINDS[kind](machine, seed)] += 1
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            what = f"{type(error).__name__}: {error} ({where.filename.rsplit('/', 1)[-1]}:{where.lineno})"
            results.failures.append(f"{kind} case {seed} on {cfg.name}: {what}")
    results.coverage = machine.finish()
    faulthandler.cancel_dump_traceback_later()
    results.cpu = time.process_time() - started
    return results


def chunks(kind: str, count: int, seed: int, configs: list[Config]) -> Iterator[Chunk]:
    """All cases of a run: their seeds follow `seed` million, and Configs take turns by chunks."""
    first = seed * 1_000_000
    size = max(1, min(max(CHUNK, count // MOST_CHUNKS), -(-count // len(configs))))
    for number, start in enumerate(range(first, first + count, size)):
        yield Chunk(kind, configs[number % len(configs)], range(start, min(start + size, first + count)))


def configs(count: int, seed: int) -> list[Config]:
    return [random_config(1000 * seed + number) for number in range(count)]


def run(
    work: Iterable[Chunk], jobs: int, note: Callable[[Results], None] = lambda results: None,
    journal: Journal | None = None,
) -> Results:  # fmt: skip
    """All chunks of `work`, in `jobs` processes. A process that dies is a failure, and ends the run.

    journal: chunks that it has are not run again, the others are added to it.
    """
    started, total = time.perf_counter(), Results()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # of the processes; the products are small
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), initializer=gc.freeze) as pool:
        waiting = {}
        for chunk_ in work:
            if journal is not None and str(chunk_) in journal.done:
                total.merge(journal.done[str(chunk_)])
            else:
                waiting[pool.submit(chunk, *chunk_)] = chunk_
        note(total)
        for future in as_completed(waiting):
            kind, cfg, seeds = waiting[future]
            try:
                results = future.result()
            except BrokenProcessPool:
                total.failures.append(f"{kind} cases {seeds.start} to {seeds.stop - 1} on {cfg.name}: a process died")
                break
            total.merge(results)
            if journal is not None:
                journal.note(waiting[future], results)
            note(total)
    total.seconds = time.perf_counter() - started
    return total
