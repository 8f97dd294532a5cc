"""What notebooks show: progress while work goes on, and results as short HTML in place of thousands of numbers."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Iterable
from functools import wraps
from html import escape
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from celosia.compiler.program.html import table

P, R = ParamSpec("P"), TypeVar("R")
MOST_ROWS = 20
"""Rows of a table in a notebook; what has more says how many."""
UPDATE_SECONDS = 0.1
"""Seconds between two updates of a cell."""


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and getattr(ipython.get_ipython(), "kernel", None) is not None


def html_of(renderables: Iterable[Any]) -> str:
    """HTML of what the command line prints with Rich: tables, of at most MOST_ROWS rows, and paragraphs of text."""
    from rich.table import Table

    parts = []
    for each in renderables:
        if not isinstance(each, Table):
            parts.append(f"<p>{escape(str(each))}</p>")
            continue
        title = f"<p><b>{escape(str(each.title))}</b></p>" if each.title else ""
        rows = list(zip(*([str(cell) for cell in column.cells] for column in each.columns), strict=True))
        more = f"<p>{len(rows) - MOST_ROWS:,} more rows</p>" if len(rows) > MOST_ROWS else ""
        parts.append(title + table([str(column.header) for column in each.columns], rows[:MOST_ROWS]) + more)
    return "".join(parts)


class Report(dict[str, Any]):
    """Plain data with a short display: `show` gives what the command line prints of it."""

    def __init__(self, data: dict[str, Any], title: str, show: Callable[[dict[str, Any]], Iterable[Any]]) -> None:
        super().__init__(data)
        self._title, self._show = title, show

    def __repr__(self) -> str:
        return f"<{self._title}; keys: {', '.join(self)}>"

    def _repr_html_(self) -> str:
        return html_of(self._show(self))


class CellProgress:
    """A bar and a line in the output of a notebook's cell, which go when the work ends.

    Call it with the name of each stage; `count` with the samples done and all of them.
    """

    def __init__(self) -> None:
        from IPython.display import HTML, display

        self._html = HTML
        self._cell = display(HTML(""), display_id=True)
        self._stage, self._shown = "", 0.0

    def __enter__(self) -> CellProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cell.update(self._html(""))

    def __call__(self, stage: str) -> None:
        self._stage = stage
        self._draw(stage, None, None)

    def count(self, done: int, total: int) -> None:
        """`done` of `total` samples are done."""
        self.state(f"{self._stage}: {done:,} of {total:,}", done, total)

    def state(self, text: str, done: float | None = None, total: float | None = None) -> None:
        """How far the stage is; left out where the cell was drawn just now."""
        if time.perf_counter() - self._shown >= UPDATE_SECONDS:
            self._draw(text, done, total)

    def _draw(self, text: str, done: float | None, total: float | None) -> None:
        self._shown = time.perf_counter()
        place = "" if done is None or not total else f' value="{done}" max="{total}"'
        self._cell.update(self._html(f"<progress{place}></progress> {escape(text)}"))


def shows_progress(line: Callable[[Any], str] | None = None) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator of functions that take `progress`, and perhaps `count` or `told`.

    In a notebook they show a CellProgress where the caller gives no `progress`. line: the text for a state that `told`
    gets, whose `spent` and `trials`, if it has them, move the bar.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        takes = inspect.signature(function).parameters

        @wraps(function)
        def run(*args: P.args, **named: P.kwargs) -> R:
            if "progress" in named or not in_notebook():
                return function(*args, **named)
            with CellProgress() as cell:

                def told(state: Any) -> None:
                    if line is not None:
                        cell.state(line(state), getattr(state, "spent", None), getattr(state, "trials", None))

                offered: dict[str, Any] = {"progress": cell, "count": cell.count, "told": told}
                named.update({name: each for name, each in offered.items() if name in takes and name not in named})
                return function(*args, **named)

        return run

    return decorate
