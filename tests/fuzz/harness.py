"""Worker processes that may die, and a journal: the common parts of campaigns of all kinds of cases."""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import resource
import signal
import tempfile
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

MEMORY = 8 << 30
"""Limit of the address space of a process, in bytes."""
Key = TypeVar("Key")
Answer = TypeVar("Answer")


def _work(connection: Connection, environment: dict[str, str]) -> None:
    """Answer calls. A call that takes too long ends the process with a trace, as a crash does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the campaign ends its processes
    faulthandler.register(signal.SIGXCPU, chain=True)
    os.environ.update(environment)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    while True:
        seconds, call = connection.recv()
        used = resource.getrusage(resource.RUSAGE_SELF)
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime + seconds) + 1, hard))
        connection.send(call())


class Workers:
    """Context manager of `jobs` processes that answer calls; a process that dies is replaced.

    own_cache: use a temporary cache folder, because kernels of thousands of random models are never needed again.
    """

    def __init__(self, jobs: int, own_cache: bool = False) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._cache = tempfile.TemporaryDirectory()
        self._environment = {"OPENBLAS_NUM_THREADS": "1"}  # matrix products are small
        if own_cache:
            self._environment["CELOSIA_CACHE"] = self._cache.name
        self._busy: dict[Connection, tuple[Any, Any]] = {}
        self._idle = [self._start() for _ in range(jobs)]

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for process in [process for _, process in self._idle] + [process for process, _ in self._busy.values()]:
            process.kill()
            process.join()
        self._cache.cleanup()

    def _start(self) -> tuple[Connection, Any]:
        own_end, other_end = self._context.Pipe()
        process = self._context.Process(target=_work, args=(other_end, self._environment), daemon=True)
        process.start()
        other_end.close()
        return own_end, process

    def run(
        self, calls: Iterable[tuple[Key, Callable[[], Answer]]], seconds: float
    ) -> Iterator[tuple[Key, Answer | str]]:
        """Yield (key, answer) in the order of the answers. If a process dies, the answer is a text that says how.

        seconds: limit of processor time for each call.
        """
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


class Journal:
    """A file of JSON lines with results by their keys, so that a campaign can continue an earlier one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done: dict[str, dict[str, Any]] = {}
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        for line in text.splitlines():
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:
                continue  # its process ended while it wrote
            self.done[entry.pop("key")] = entry
        if text and not text.endswith("\n"):
            self._append("\n")

    def note(self, key: str, result: dict[str, Any]) -> None:
        """Append a result to the file."""
        self._append(json.dumps({"key": key, **result}, separators=(",", ":")) + "\n")

    def _append(self, text: str) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(text)
