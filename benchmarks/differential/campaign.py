"""Many cases, each judged in a process that may die; what they find; and the report."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from benchmarks.differential.draw import draw_case
from benchmarks.differential.judge import CRASHED, FINDINGS, UNCOUNTED, VERDICTS, Verdict, judge
from celosia.driver.oracle import OracleError

SECONDS = 60.0
"""Of processor time for one case; what takes longer hangs."""
MEMORY = 8 << 30
DREW, OURS, DONE = "drew", "ours", "done"


@dataclass(frozen=True)
class Judged:
    """Case `number`, what drew it, and its verdict."""

    number: int
    kind: str
    verdict: Verdict

    def plain(self) -> dict[str, Any]:
        return {"number": self.number, "kind": self.kind, **self.verdict.__dict__}

    @staticmethod
    def restored(plain: dict[str, Any]) -> Judged:
        verdict = Verdict(plain["what"], plain["why"], tuple(plain["operators"]), tuple(plain["exclusions"]))
        return Judged(plain["number"], plain["kind"], verdict)


def judged(seed: int, number: int) -> Judged:
    """One case, in this process."""
    try:
        case = draw_case(seed, number)
    except OracleError as error:
        return Judged(number, "none", Verdict(UNCOUNTED, str(error)))
    return Judged(number, case.kind, judge(case))


# Processes -------------------------------------------------------------------------------------------------------


def _work(connection: Connection, seed: int, cache: str) -> None:
    """Judge the cases whose numbers arrive. A case that takes too long ends the process, as a crash does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the campaign ends its processes
    os.environ["CELOSIA_CACHE"] = cache  # of kernels that nobody needs again
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    while True:
        number = connection.recv()
        used = resource.getrusage(resource.RUSAGE_SELF)
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime + SECONDS) + 1, hard))
        connection.send(judged(seed, number))


class Workers:
    """`jobs` processes that judge cases; one that dies is replaced, and its case has crashed."""

    def __init__(self, seed: int, jobs: int) -> None:
        self.seed = seed
        self._context = multiprocessing.get_context("spawn")
        self._cache = tempfile.TemporaryDirectory()
        self._busy: dict[Connection, tuple[Any, int]] = {}
        self._idle = [self._start() for _ in range(jobs)]

    def _start(self) -> tuple[Connection, Any]:
        here, there = self._context.Pipe()
        process = self._context.Process(target=_work, args=(there, self.seed, self._cache.name), daemon=True)
        process.start()
        there.close()
        return here, process

    def run(self, numbers: Iterable[int]) -> Iterator[Judged]:
        """In the order in which they end."""
        waiting = iter(numbers)
        while True:
            while self._idle and (number := next(waiting, None)) is not None:
                connection, process = self._idle.pop()
                connection.send(number)
                self._busy[connection] = process, number
            if not self._busy:
                return
            for ready in wait([*self._busy]):
                assert isinstance(ready, Connection)
                process, number = self._busy.pop(ready)
                try:
                    result = ready.recv()
                    self._idle.append((ready, process))
                except (EOFError, ConnectionResetError):
                    process.join()
                    why = f"its process ended with {process.exitcode}"
                    why = f"no answer after {SECONDS:g} s" if process.exitcode == -signal.SIGXCPU else why
                    result = Judged(number, "none", Verdict(CRASHED, why))
                    self._idle.append(self._start())
                yield result

    def close(self) -> None:
        for process in [process for _, process in self._idle] + [process for process, _ in self._busy.values()]:
            process.kill()
            process.join()
        self._cache.cleanup()


# Results ---------------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """How many cases ended how, by what drew them; documented steps by their name."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    exclusions: Counter[str] = field(default_factory=Counter)
    findings: list[Judged] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, one: Judged) -> None:
        self.counts[one.kind, one.verdict.what] += 1
        self.exclusions.update(one.verdict.exclusions)
        if one.verdict.what in FINDINGS:
            self.findings.append(one)

    def of(self, verdict: str) -> int:
        return sum(count for (_, what), count in self.counts.items() if what == verdict)

    @property
    def counted(self) -> int:
        return sum(self.of(verdict) for verdict in VERDICTS if verdict != UNCOUNTED)


class Journal:
    """JSON lines of cases that are judged, by which a campaign goes on where another has ended."""

    def __init__(self, path: Path, seed: int) -> None:
        self.path, self.seed = path, seed
        self.done: dict[int, Judged] = {}
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:
                continue  # its process ended while it wrote
            if entry.pop("seed") == seed:
                self.done[entry["number"]] = Judged.restored(entry)

    def note(self, one: Judged) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"seed": self.seed, **one.plain()}) + "\n")


def campaign(
    seed: int, count: int, jobs: int, note: Callable[[Tally], None] = lambda tally: None, journal: Journal | None = None
) -> Tally:
    """Judge cases until `count` of them are counted: until onnxruntime has run so many. Ctrl-C ends it early."""
    started, tally = time.perf_counter(), Tally()
    known = journal.done if journal is not None else {}

    def numbers() -> Iterator[int]:
        number = 0
        while tally.counted < count:
            if number in known:
                tally.add(known[number])
            else:
                yield number
            number += 1

    workers = Workers(seed, jobs)
    try:
        for one in workers.run(numbers()):
            tally.add(one)
            if journal is not None:
                journal.note(one)
            tally.seconds = time.perf_counter() - started
            note(tally)
    except KeyboardInterrupt:
        pass
    finally:
        workers.close()
    return tally
