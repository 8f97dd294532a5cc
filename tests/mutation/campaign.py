"""Run the checks that can kill each mutant, the cheapest first: unit tests, proofs, random programs.

A mutant is written into a copy of the sources (`Tree`). Each check runs there in its own process, with a time limit.
Tests, proofs and simulators are skipped if the mutant does not change their text, that is Verilog or a design.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from threading import Event, Lock

from celosia.hw.sources import DIGEST_FILE, normal_form, sources_digest
from mutation.draw import Mutant, draw
from mutation.probe import REACHED

ROOT = Path(__file__).parents[2]
COPIED = ("benchmarks", "bitstreams", "compiler", "driver", "hw", "models", "sim", "src", "tests", "docs")
UNIT_SECONDS, PROOF_SECONDS, FUZZ_SECONDS = 900, 400, 900
"""Time limits for one mutant, by kind of check."""
LEFT_OUT = ("test_bench.py", "test_example.py", "test_board.py", "test_compiled.py", "test_verilog.py")
"""Files of tests/hw that test the bench itself, run whole models, or look at the Verilog's form."""

PYTEST = ("-m", "pytest", "-q", "-p", "mutation.plugin", "-p", "no:cacheprovider", "-m", "not thorough")
KEPT_BUILDS = ("verilator", "tools", "proofs")
"""Builds that no mutant changes: Verilator's own code, other tools, and results of proofs, cached by their text."""
NO_TESTS = 5
"""Exit code of pytest if all tests are deselected."""

KILLED, SURVIVED, EQUIVALENT, UNBUILT = "killed", "survived", "equivalent", "unbuilt"
Say = Callable[[str], None]


@dataclass(frozen=True)
class Verdict:
    """The outcome of all checks for one mutant.

    outcome: KILLED, SURVIVED, EQUIVALENT (tests elaborate the mutant, and no text differs) or UNBUILT (no hardware).
    by: the kind of check that killed it. check: the name of that check. note: its message, or which check timed out.
    """

    outcome: str
    by: str = ""
    check: str = ""
    note: str = ""
    seconds: float = 0.0


Stage = tuple[Verdict | None, bool, str]
"""Result of one kind of check: its verdict or None; True if a text of it changed; why there is no verdict, or ""."""
UNDECIDED: Stage = None, False, ""


class Tree:
    """A copy of the sources in `folder`, with or without a mutant in its hardware. Its caches lie next to it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.cache, self.reached = folder / "tree", folder / "cache", folder / "reached"
        shutil.rmtree(self.folder, ignore_errors=True)
        for name in COPIED:
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, self.folder / name, symlinks=True, ignore=ignored)
        shutil.copy(ROOT / "pyproject.toml", self.folder)
        # Keep the digest that a register holds. Otherwise each mutant would change every text with that register.
        (self.folder / "hw" / DIGEST_FILE).write_text(sources_digest(), encoding="ascii")

    def plant(self, mutant: Mutant) -> None:
        """Write the mutant into its file, and delete builds of other mutants."""
        path = self.folder / "hw" / mutant.file
        path.write_text(probed(mutant, path.read_text(encoding="utf-8")), encoding="utf-8")
        for folder in (*self.cache.glob("*"), *(self.folder / "build" / "hw").glob("*")):
            if folder.name not in KEPT_BUILDS and not folder.name.startswith("verilated"):
                shutil.rmtree(folder, ignore_errors=True)

    def restore(self, mutant: Mutant, base: Tree) -> None:
        """Remove the mutant: copy its file from `base`."""
        shutil.copy(base.folder / "hw" / mutant.file, self.folder / "hw" / mutant.file)

    def run(self, arguments: list[str], seconds: float, **environment: str) -> tuple[int | None, str]:
        """Run a Python process in this tree. Return its exit code (None after `seconds`) and its output."""
        if STOPPED.is_set():
            raise Stopped
        paths = (self.folder / "src", *(self.folder / "tests" / name for name in ("", "formal", "cosim", "hw")))
        variables = {
            "PYTHONPATH": os.pathsep.join(map(str, paths)), "CELOSIA_CACHE": str(self.cache),
            REACHED: str(self.reached), "CELOSIA_PGO": "0",
            "CELOSIA_TEST_SECONDS": "600",
        }  # fmt: skip
        with subprocess.Popen(
            [sys.executable, "-W", "ignore", *arguments], cwd=self.folder, env=os.environ | variables | environment,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
        ) as process:  # fmt: skip
            RUNNING.add(process)
            try:
                output, _ = process.communicate(timeout=seconds)
                if STOPPED.is_set():
                    raise Stopped
                return process.returncode, output
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                return None, process.communicate()[0]
            finally:
                RUNNING.discard(process)


class Stopped(Exception):
    """The campaign ends; results of checks under way do not count."""


STOPPED = Event()
RUNNING: set[subprocess.Popen[str]] = set()
"""Checks under way, each the leader of a group of processes."""


def end_running() -> None:
    """Kill all checks that are under way."""
    STOPPED.set()
    for process in list(RUNNING):
        os.killpg(process.pid, signal.SIGKILL)


class Base:
    """The hardware without mutants, and the digests of its Verilog by test, which are computed on demand."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.tree, self.lock = folder, Tree(folder / "base"), Lock()

    def verilog(self, file: str, name: str) -> list[str]:
        """Return the digests of the Verilog in test `name` of `file`."""
        path = self.folder / "verilog" / f"{Path(file).stem}-{_digest_of('hw', 'tests/hw/bench.py', file)}.json"
        with self.lock:
            known: dict[str, list[str]] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            if name not in known:
                record = path.with_suffix(".part")
                path.parent.mkdir(exist_ok=True)
                self.tree.run(
                    [*PYTEST, file], UNIT_SECONDS, MUTANTS_RECORD=str(record), MUTANTS_ONLY_VERILOG="1",
                    MUTANTS_TESTS=json.dumps([name]),
                )  # fmt: skip
                if not record.exists():
                    return []
                known[name] = json.loads(record.read_text(encoding="utf-8"))[name]["verilog"]
                record.unlink()
                path.write_text(json.dumps(known), encoding="utf-8")
            return known[name]


class Worker:
    """A tree in which one mutant at a time is tried. All workers share `base`."""

    def __init__(self, folder: Path, base: Base) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.base, self.tree = folder, base, Tree(folder)
        self.passed: dict[tuple[str, str], list[str]] = {}
        """Digests of the Verilog of each test that has elaborated the mutant's statement, by file and name."""

    def try_mutant(self, mutant: Mutant) -> Verdict:
        """Run the checks until one fails, and return the verdict."""
        began = time.monotonic()
        self.passed.clear()
        self.tree.reached.unlink(missing_ok=True)
        self.tree.plant(mutant)
        notes, changed = [], False
        try:
            for stage in (self._unit, self._proofs, self._whole, self._fuzz):
                killed, differs, late = stage(mutant)
                changed = changed or differs
                if killed is not None:
                    return replace(killed, seconds=round(time.monotonic() - began, 1))
                notes += [late] * bool(late)
        finally:
            self.tree.restore(mutant, self.base.tree)
        if not self.tree.reached.exists():
            notes.append("no check elaborates it")
        changed = changed or any(self.base.verilog(*test) != texts for test, texts in self.passed.items())
        outcome = SURVIVED if changed or notes else EQUIVALENT
        return Verdict(outcome, note="; ".join(notes), seconds=round(time.monotonic() - began, 1))

    def _unit(self, mutant: Mutant) -> Stage:
        """Run the tests of the components that contain the mutant."""
        return self._files(nearest_tests(mutant.file))

    def _whole(self, mutant: Mutant) -> Stage:
        """Run the tests of the whole accelerator."""
        return self._files(nearest_tests(mutant.file, whole=True))

    def _files(self, files: list[str]) -> Stage:
        ends = time.monotonic() + UNIT_SECONDS
        for file in files:
            stage = self._unit_file(file, ends - time.monotonic())
            if stage != UNDECIDED:
                return stage
        return UNDECIDED

    def _unit_file(self, file: str, seconds: float) -> Stage:
        record = self.folder / "unit.json"
        record.unlink(missing_ok=True)
        code, output = self.tree.run([*PYTEST, "-x", file], max(1, seconds), MUTANTS_RECORD=str(record))
        entries = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}
        for name, entry in entries.items():
            if "unbuilt" in entry:
                return Verdict(UNBUILT, "unit", name, entry["unbuilt"]), True, ""
            if entry.get("outcome") == "failed":
                return Verdict(KILLED, "unit", name, entry["message"][-300:]), True, ""
        if not entries and code not in (None, 0, NO_TESTS):
            return Verdict(UNBUILT, "unit", file, output[-300:]), True, ""
        self.passed |= {(file, name): entry["verilog"] for name, entry in entries.items() if entry["verilog"]}
        return None, False, _ended(f"unit tests of {file}", code, (0, NO_TESTS), output)

    def _proofs(self, mutant: Mutant) -> Stage:
        return self._stage("proof", "mutation.prove", mutant, PROOF_SECONDS)

    def _fuzz(self, mutant: Mutant) -> Stage:
        return self._stage("fuzz", "mutation.fuzz", mutant, FUZZ_SECONDS)

    def _stage(self, by: str, module: str, mutant: Mutant, seconds: float) -> Stage:
        """Run a module that prints JSON lines: {"differs": ...}, {"killed": name, "note": text}."""
        texts = (
            self.base.folder / f"{by}-{_digest_of('hw', 'tests/formal', 'tests/configs.py', 'tests/programs.py')}.json"
        )
        code, output = self.tree.run(
            ["-m", module, mutant.file], seconds, MUTANTS_BASE=str(self.base.tree.folder), MUTANTS_TEXTS=str(texts)
        )
        events = [json.loads(line) for line in output.splitlines() if line.startswith('{"')]
        differs = any("differs" in event for event in events)
        for event in events:
            if "killed" in event:
                return Verdict(KILLED, by, event["killed"], event["note"][:300]), True, ""
            if "unbuilt" in event:
                return Verdict(UNBUILT, by, event["unbuilt"], event["note"][:300]), True, ""
        return None, differs, _ended(by, code, (0,), output)


class Campaign:
    """The mutants of one seed and their verdicts, which `journal` stores as JSON lines.

    A kill stays valid while the code of the mutant's file is the same. A survivor is tried again if checks change.
    """

    def __init__(self, folder: Path, journal: Path, say: Say) -> None:
        self.folder, self.journal, self.say = folder, journal, say
        self.checks = _digest_of("tests/hw", "tests/formal", "tests/fuzz", "tests/configs.py", "tests/programs.py")
        self.known: dict[str, Verdict] = {}
        if journal.exists():
            for line in journal.read_text(encoding="utf-8").splitlines():
                entry = json.loads(line)
                self.known[entry["key"]] = Verdict(**entry["verdict"])

    def keys(self, mutant: Mutant) -> tuple[str, str]:
        """Return two keys of a mutant's verdict: one that stays, and one that depends on the text of the checks."""
        source = (ROOT / "hw" / mutant.file).read_text(encoding="utf-8")
        text = f"{mutant.file} {mutant.kind} {normal_form(source)} {normal_form(mutant.apply(source))}"
        key = hashlib.sha256(text.encode()).hexdigest()[:24]
        return key, f"{key} {self.checks}"

    def verdict(self, mutant: Mutant) -> Verdict | None:
        """Return the verdict of a mutant in the journal, or None."""
        return next((self.known[key] for key in self.keys(mutant) if key in self.known), None)

    def known_verdicts(self, seed: int) -> Iterator[tuple[Mutant, Verdict]]:
        """Yield the mutants of `seed` that have a verdict in the journal."""
        decided = ((mutant, self.verdict(mutant)) for mutant in draw(ROOT / "hw", seed))
        return ((mutant, verdict) for mutant, verdict in decided if verdict is not None)

    def verdicts(self, count: int, seed: int, jobs: int = 1) -> Iterator[tuple[Mutant, Verdict]]:
        """Yield the first `count` mutants of `seed` that give other hardware, in order, each with its verdict.

        Mutants before them that are equivalent or unbuilt are yielded, too. jobs: mutants that are tried at a time.
        """
        STOPPED.clear()
        drawn, workers, decided = draw(ROOT / "hw", seed), Workers(self.folder, jobs), 0
        waiting: deque[tuple[Mutant, Future[Verdict]]] = deque()
        with ThreadPoolExecutor(jobs) as pool:
            try:
                while decided < count:
                    while sum(not future.done() for _, future in waiting) < jobs:
                        mutant = next(drawn, None)
                        if mutant is None:
                            break
                        waiting.append((mutant, pool.submit(self._decide, mutant, workers)))
                    if not waiting:
                        return
                    wait([future for _, future in waiting if not future.done()], return_when=FIRST_COMPLETED)
                    while waiting and waiting[0][1].done() and decided < count:
                        mutant, future = waiting.popleft()
                        decided += future.result().outcome in (KILLED, SURVIVED)
                        yield mutant, future.result()
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
                end_running()

    def _decide(self, mutant: Mutant, workers: Workers) -> Verdict:
        verdict = self.verdict(mutant)
        if verdict is None:
            with workers.borrowed() as worker:
                self.say(f"trying {mutant}")
                verdict = worker.try_mutant(mutant)
            key = self.keys(mutant)[verdict.outcome == SURVIVED]
            self.known[key] = verdict
            self._note(key, mutant, verdict)
        return verdict

    def _note(self, key: str, mutant: Mutant, verdict: Verdict) -> None:
        self.journal.parent.mkdir(parents=True, exist_ok=True)
        stored = (
            replace(verdict, note="") if verdict.outcome == KILLED else verdict
        )  # messages contain paths of this machine
        entry = {"key": key, "mutant": asdict(mutant), "verdict": asdict(stored)}
        with self.journal.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


class Workers:
    """A pool of workers for several threads; each is created on first use."""

    def __init__(self, folder: Path, jobs: int) -> None:
        self._folder, self._free, self._lock = folder, list(range(jobs)), Lock()
        self._workers: dict[int, Worker] = {}
        self._base: Base | None = None

    @contextmanager
    def borrowed(self) -> Iterator[Worker]:
        """Lend a worker to the caller alone."""
        with self._lock:
            self._base = self._base or Base(self._folder)
            number = self._free.pop(0)
            if number not in self._workers:
                self._workers[number] = Worker(self._folder / f"worker{number}", self._base)
        try:
            yield self._workers[number]
        finally:
            with self._lock:
                self._free.append(number)


def _ended(check: str, code: int | None, allowed_codes: tuple[int, ...], output: str) -> str:
    """Return a sentence if a check neither succeeded nor gave a verdict, else ""."""
    if code is None:
        return f"{check}: out of time"
    return "" if code in allowed_codes else f"{check}: ended with code {code}: {output[-300:]}"


PROBE = "__import__('mutation.probe').probe.reached()"


def probed(mutant: Mutant, source: str) -> str:
    """Return the source with the mutant, and in front of the mutant's statement a call of `probe.reached`."""
    lines = source.splitlines(keepends=True)
    statements = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.stmt)
        and node.lineno <= mutant.line <= (node.end_lineno or node.lineno)
        and not isinstance(node, ast.FunctionDef | ast.ClassDef)
        and not lines[node.lineno - 1].lstrip().startswith("elif")  # no statement fits in front of it
    ]
    inner = max(statements, key=lambda node: node.lineno)
    changed = mutant.apply(source).splitlines(keepends=True)
    changed.insert(inner.lineno - 1, f"{' ' * inner.col_offset}{PROBE}\n")
    return "".join(changed)


def imports(text: str) -> set[str]:
    """Return the files below hw/ that a module imports anywhere in its text."""
    modules = {module for node in ast.walk(ast.parse(text)) for module in _modules(node)}
    return {module.removeprefix("celosia.hw.").replace(".", "/") + ".py" for module in modules}


def _modules(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("celosia.hw."):
        return [node.module or ""]
    return []


def nearest_tests(file: str, whole: bool = False) -> list[str]:
    """Return the files of tests/hw that import a file of hw/, those through the fewest imports first.

    whole: return tests of the whole accelerator instead of tests of components.
    """
    hardware = {path.relative_to(ROOT / "hw").as_posix(): path for path in (ROOT / "hw").rglob("*.py")}
    graph = {name: imports(path.read_text(encoding="utf-8")) & hardware.keys() for name, path in hardware.items()}
    ranked: list[tuple[int, int, str]] = []
    for path in sorted((ROOT / "tests" / "hw").glob("test_*.py")):
        if path.name in LEFT_OUT:
            continue
        reached, steps = imports(path.read_text(encoding="utf-8")) & hardware.keys(), 0
        if whole != ("top.py" in reached):
            continue
        distance = None
        while True:
            if file in reached and distance is None:
                distance = steps
            next_reached = reached.union(*(graph[name] for name in reached))
            if next_reached == reached:
                break
            reached, steps = next_reached, steps + 1
        if distance is not None:
            ranked.append((distance, len(reached), f"tests/hw/{path.name}"))
    return [name for _, _, name in sorted(ranked)]


@cache
def _digest_of(*names: str) -> str:
    """Return a digest of files and folders, as they are at the first call."""
    digest = hashlib.sha256()
    for name in names:
        path = ROOT / name
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(f"\n{file.relative_to(ROOT)}\n".encode() + file.read_bytes())
    return digest.hexdigest()[:16]
