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
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.differential.draw import draw_case
from benchmarks.differential.judge import CRASHED, FINDINGS, UNCOUNTED, VERDICTS, Verdict, judge
from benchmarks.differential.minimise import Minimised, cause, minimise
from benchmarks.rows import Row
from celosia.driver.host.oracle import OracleError

SECONDS = 60.0
"""Of processor time for one case; what takes longer hangs."""
MEMORY = 8 << 30
MINIMISING = 300.0
"""Of processor time for the smallest case of a finding; what was smallest until then stays."""
EACH = 2
"""Cases of one cause that are minimised."""
Key = TypeVar("Key")
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Judged:
    """Case `number`, what drew it, and its verdict."""

    number: int
    kind: str
    verdict: Verdict

    def plain(self) -> dict[str, Any]:
        """As a dictionary for JSON."""
        return {"number": self.number, "kind": self.kind, **self.verdict.__dict__}

    @staticmethod
    def restored(plain: dict[str, Any]) -> Judged:
        """From what `plain` gave."""
        verdict = Verdict(plain["what"], plain["why"], tuple(plain["operators"]), tuple(plain["exclusions"]))
        return Judged(plain["number"], plain["kind"], verdict)


def judged(seed: int, number: int) -> Judged:
    """One case, in this process."""
    try:
        case = draw_case(seed, number)
    except OracleError as error:
        return Judged(number, "none", Verdict(UNCOUNTED, str(error)))
    return Judged(number, case.kind, judge(case))


def minimised(seed: int, number: int, folder: Path) -> Minimised:
    """The smallest case of what case `number` found, also written as `number` in `folder`, smaller and smaller."""
    case = draw_case(seed, number)
    case.save(folder / f"{number}")
    result = minimise(case, judge(case))
    result.case.save(folder / f"{number}")
    return result


# Processes -------------------------------------------------------------------------------------------------------


def _work(connection: Connection, cache: str) -> None:
    """Answer calls. One that takes too long ends the process, as a crash does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the campaign ends its processes
    os.environ["CELOSIA_CACHE"] = cache  # of kernels that nobody needs again
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    while True:
        seconds, call = connection.recv()
        used = resource.getrusage(resource.RUSAGE_SELF)
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime + seconds) + 1, hard))
        connection.send(call())


class Workers:
    """`jobs` processes that answer calls; one that dies is replaced."""

    def __init__(self, jobs: int) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._cache = tempfile.TemporaryDirectory()
        self._busy: dict[Connection, tuple[Any, Any]] = {}
        self._idle = [self._start() for _ in range(jobs)]

    def _start(self) -> tuple[Connection, Any]:
        here, there = self._context.Pipe()
        process = self._context.Process(target=_work, args=(there, self._cache.name), daemon=True)
        process.start()
        there.close()
        return here, process

    def run(
        self, calls: Iterable[tuple[Key, Callable[[], Answer]]], seconds: float
    ) -> Iterator[tuple[Key, Answer | str]]:
        """Answers, or how the process died, in the order in which they come. seconds: of processor time for each."""
        waiting = iter(calls)
        while True:
            while self._idle and (call := next(waiting, None)) is not None:
                connection, process = self._idle.pop()
                connection.send((seconds, call[1]))
                self._busy[connection] = process, call[0]
            if not self._busy:
                return
            for ready in wait([*self._busy]):
                assert isinstance(ready, Connection)
                process, key = self._busy.pop(ready)
                try:
                    answer = ready.recv()
                    self._idle.append((ready, process))
                except (EOFError, ConnectionResetError):
                    process.join()
                    late = process.exitcode == -signal.SIGXCPU
                    answer = f"no answer in {seconds:g} s" if late else f"its process ended with {process.exitcode}"
                    self._idle.append(self._start())
                yield key, answer

    def close(self) -> None:
        """Ends all processes."""
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
    interrupted: bool = False

    def add(self, one: Judged) -> None:
        """Counts one case."""
        self.counts[one.kind, one.verdict.what] += 1
        self.exclusions.update(one.verdict.exclusions)
        if one.verdict.what in FINDINGS:
            self.findings.append(one)

    def of(self, verdict: str) -> int:
        """How many cases ended so."""
        return sum(count for (_, what), count in self.counts.items() if what == verdict)

    @property
    def counted(self) -> int:
        """How many cases have a verdict that says something."""
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
        """Writes one case to the file."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"seed": self.seed, **one.plain()}) + "\n")


def campaign(
    seed: int, count: int, jobs: int, note: Callable[[Tally], None] = lambda tally: None, journal: Journal | None = None
) -> Tally:
    """Judge cases until `count` of them are counted: until onnxruntime has run so many. Ctrl-C ends it early."""
    started, tally = time.perf_counter(), Tally()
    known = journal.done if journal is not None else {}

    def calls() -> Iterator[tuple[int, Callable[[], Judged]]]:
        number = 0
        while tally.counted < count:
            if number in known:
                tally.add(known[number])
            else:
                yield number, partial(judged, seed, number)
            number += 1

    workers = Workers(jobs)
    try:
        for number, answer in workers.run(calls(), SECONDS):
            one = Judged(number, "died", Verdict(CRASHED, answer)) if isinstance(answer, str) else answer
            tally.add(one)
            if journal is not None:
                journal.note(one)
            tally.seconds = time.perf_counter() - started
            note(tally)
    except KeyboardInterrupt:
        tally.interrupted = True
    finally:
        workers.close()
    return tally


@dataclass(frozen=True)
class Finding:
    """What is wrong, once for all cases that found it: `numbers`. stem: of the files with the smallest case."""

    signature: str
    why: str
    numbers: tuple[int, ...]
    stem: Path

    def __str__(self) -> str:
        cases = ", ".join(map(str, self.numbers[:5])) + (", ..." if len(self.numbers) > 5 else "")
        return f"{self.stem.name}: {self.signature}: {self.why} (cases {cases})"


def findings(
    seed: int, tally: Tally, folder: Path, jobs: int, say: Callable[[str], None] = lambda text: None
) -> list[Finding]:
    """Minimise what `tally` has found, one or two of each cause, and write each signature once into `folder`.

    Also writes findings.txt, a line for each.
    """
    folder.mkdir(parents=True, exist_ok=True)
    causes: dict[str, list[Judged]] = {}
    for one in tally.findings:
        causes.setdefault(cause(one.verdict), []).append(one)
    chosen = {one.number: one for group in causes.values() for one in sorted(group, key=lambda one: one.number)[:EACH]}
    found: dict[str, Finding] = {}
    workers = Workers(jobs)
    try:
        calls = ((number, partial(minimised, seed, number, folder)) for number in chosen)
        for number, answer in workers.run(calls, MINIMISING):
            one = chosen[number]
            numbers = tuple(each.number for each in causes[cause(one.verdict)])
            signature, why = cause(one.verdict), one.verdict.why
            if not isinstance(answer, str):
                signature, why = answer.signature, answer.verdict.why
            known = found.get(signature)
            if known is not None:
                numbers = tuple(sorted({*known.numbers, *numbers}))
                for path in folder.glob(f"{number}.*"):
                    path.unlink()
            stem = folder / str(number) if known is None else known.stem
            found[signature] = Finding(signature, " ".join(why.split())[:300], numbers, stem)
            say(f"minimising: {len(found)} findings")
            _list(folder, found.values())
    except KeyboardInterrupt:
        tally.interrupted = True
    finally:
        workers.close()
    return list(found.values())


def _list(folder: Path, found: Iterable[Finding]) -> None:
    lines = sorted(str(each) for each in found)
    (folder / "findings.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def rows(
    seed: int, count: int, jobs: int, folder: Path, resume: Path | None, say: Callable[[str], None]
) -> Iterator[Row]:
    """One row: verdicts of `count` models, with what was found in `folder`."""
    journal = None if resume is None else Journal(resume, seed)

    def note(tally: Tally) -> None:
        text = ", ".join(f"{tally.of(verdict)} {verdict}" for verdict in VERDICTS if tally.of(verdict))
        say(f"{tally.counted} of {count} models: {text}")

    tally = campaign(seed, count, jobs, note, journal)
    found = findings(seed, tally, folder, jobs, say) if tally.findings else []
    measured = "; ".join([
        f"{tally.counted} models, seed {seed}" + (", interrupted" if tally.interrupted else ""),
        *(f"{tally.of(verdict)} {verdict}" for verdict in VERDICTS if tally.of(verdict)),
        *(f"documented: {many} {name}" for name, many in sorted(tally.exclusions.items())),
        f"{tally.seconds:.0f} s",
        *([f"{len(found)} findings in {folder}"] if found else []),
    ])  # fmt: skip
    wrong = sum(tally.of(verdict) for verdict in FINDINGS)
    details = {
        "counted": tally.counted, "wrong": wrong,
        "verdicts": [[*key, many] for key, many in sorted(tally.counts.items())],
        "exclusions": dict(tally.exclusions), "findings": [str(each) for each in found],
    }  # fmt: skip
    yield Row(
        "differential", "random models and operators, quantised in all formats, beside onnxruntime",
        "none wrong, refused or crashed", measured, None if tally.interrupted and not wrong else not wrong,
        f"python -m benchmarks differential --seed {seed} --count {count}", details,
    )  # fmt: skip
