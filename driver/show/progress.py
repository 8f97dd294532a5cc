"""Progress of a command, on standard error: a moving line on a terminal, one line for each stage elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from types import TracebackType

import rich.live
from rich.console import RenderableType
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from celosia.long_running import every_minute, progress_line
from celosia.terminal import Console

LINE_SECONDS = 60.0
"""Seconds between two lines about the same work, where there is no terminal."""


class Stages:
    """Progress of a command in stages: call it with the name of each new stage, within a context.

    quiet: print nothing.
    """

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self._console = Console(stderr=True, quiet=quiet, soft_wrap=True)
        self._moving = self._console.is_terminal and not quiet  # whether a line is redrawn in place
        columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
        self._line = Progress(*columns, console=self._console, transient=True, disable=not self._moving)
        self._task = self._line.add_task("", total=None, visible=False)
        self._stage = ""
        self._paused = False
        self._heartbeat = ExitStack()  # the thread that prints at intervals off a terminal
        self._reset()

    def _reset(self) -> None:
        """Begin the times and the cycles of a new stage."""
        self._started = self._shown = time.perf_counter()
        self._ended_cycles = self._launch_cycles = 0  # of launches that have ended, and of the current one

    def __enter__(self) -> Stages:
        self._line.start()
        if not self._moving and not self.quiet:
            self._heartbeat.enter_context(every_minute(self._print_heartbeat, LINE_SECONDS))
        return self

    def _print_heartbeat(self) -> None:
        """Print that the stage goes on, if it has printed nothing for a while; used where there is no terminal."""
        if self._stage and not self._paused and time.perf_counter() - self._shown >= LINE_SECONDS / 2:
            self._console.print(progress_line(self._stage, self._started))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._heartbeat.close()
        self._line.stop()

    def __call__(self, stage: str, line: bool = True) -> None:
        """Begin a new stage; without `line` it is shown on a terminal only."""
        self._stage = stage
        self._reset()
        if self._moving:
            self._line.reset(self._task, description=stage, visible=True)
        elif line:
            self._console.print(f"{stage} ...")

    def cycles(self, passed: int) -> None:
        """Show that a simulation has reached cycle `passed` of its launch. The launches of a stage are added up."""
        if passed < self._launch_cycles:  # a new launch
            self._ended_cycles += self._launch_cycles
        self._launch_cycles = passed
        now = time.perf_counter()
        total = self._ended_cycles + passed
        rate = total / max(now - self._started, 1e-3)
        text = f"{self._stage}: {total:,} cycles, {rate:,.0f} a second"
        self._draw_progress(text, now)

    def count(self, done: int, total: int) -> None:
        """Show that `done` of `total` samples are done: their rate, and the time left."""
        now = time.perf_counter()
        rate = done / max(now - self._started, 1e-3)
        time_left = timedelta(seconds=round((total - done) / rate)) if done else "?"
        text = f"{self._stage}: {done:,} of {total:,}, {rate:,.1f} a second, {time_left} left"
        self._draw_progress(text, now)

    def describe(self, text: str) -> None:
        """Show `text` as the progress of the stage, for work that counts neither cycles nor samples."""
        self._draw_progress(text, time.perf_counter())

    def _draw_progress(self, text: str, now: float) -> None:
        """Show the stage's progress: redrawn on a terminal, elsewhere a line at intervals."""
        if self._moving:
            self._line.update(self._task, description=text)
        elif now - self._shown >= LINE_SECONDS:
            self._shown = now
            self._console.print(text, markup=False)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop showing progress in this context, while something else shows its own."""
        self._line.stop()
        self._paused = True
        try:
            yield
        finally:
            self._paused = False
            self._line.start()


class Live:
    """A live table of work in progress: redrawn in place on a terminal, elsewhere one line each minute.

    Call it with the current line, and a function that builds the current table.
    """

    def __init__(self, quiet: bool = False) -> None:
        self._console = Console(stderr=True, quiet=quiet, soft_wrap=True)
        moving = self._console.is_terminal and not quiet
        self._live = rich.live.Live(console=self._console, transient=True, refresh_per_second=4) if moving else None
        self._shown = time.perf_counter()

    def __enter__(self) -> Live:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, line: str, table: Callable[[], RenderableType]) -> None:
        now = time.perf_counter()
        if self._live is not None and now - self._shown >= 0.25:
            self._shown = now
            self._live.update(table())
        elif self._live is None and now - self._shown >= LINE_SECONDS:
            self._shown = now
            self._console.print(line)
