"""Display in notebooks: a progress line while work goes on, and results as tables of limited length."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Iterable
from functools import wraps
from html import escape
from types import TracebackType
from typing import Any

from celosia.compiler.program.model import html_table

MAX_ROWS = 20
"""Largest number of rows of a table in a notebook; a longer table says how many rows are left out."""
UPDATE_SECONDS = 0.1
"""Seconds between two updates of a cell."""


def html_of(renderables: Iterable[Any]) -> str:
    """Convert what the command line prints with Rich to HTML: tables of at most MAX_ROWS rows, and paragraphs."""
    from rich.table import Table

    parts = []
    for renderable in renderables:
        if not isinstance(renderable, Table):
            parts.append(f"<p>{escape(str(renderable))}</p>")
            continue
        title = f"<p><b>{escape(str(renderable.title))}</b></p>" if renderable.title else ""
        rows = list(zip(*([str(cell) for cell in column.cells] for column in renderable.columns), strict=True))
        omitted = f"<p>{len(rows) - MAX_ROWS:,} more rows</p>" if len(rows) > MAX_ROWS else ""
        parts.append(
            title + html_table([str(column.header) for column in renderable.columns], rows[:MAX_ROWS]) + omitted
        )
    return "".join(parts)


# Results ----------------------------------------------------------------------------------------------------------


def _exploration_tables(exploration: Any) -> Iterable[Any]:
    """Return what `celosia explore` prints of its result."""
    from celosia.driver.show import explore_summary as explore

    return explore.front(exploration.report)


def _tuning_tables(tuned: Any) -> Iterable[Any]:
    """Return what `celosia tune` prints of its result, for layers or for kernels of the CPU."""
    from celosia.driver.show import tune_cpu_summary as tune_cpu
    from celosia.driver.show import tune_summary as tune

    if "untuned" in tuned.report:
        return tune.tuning_result(tuned.report)
    return tune_cpu.tuning_result(tuned.report)


def _optimisation_tables(optimised: Any) -> Iterable[Any]:
    """Return what `celosia optimise` prints of its result."""
    from celosia.driver.show import optimise_summary as optimise

    return optimise.derivation(optimised.report)


def _comparison_tables(comparison: Any) -> Iterable[Any]:
    """Return what `celosia compare` prints of its result."""
    from celosia.driver.show import compare_summary as compare

    return compare.comparison(comparison)


def _evaluation_tables(evaluation: Any) -> Iterable[Any]:
    """Return what `celosia eval` prints of its result."""
    from celosia.driver.show import compare_summary as compare

    return compare.evaluation(evaluation)


SHOWN: dict[tuple[str, str], Callable[[Any], Iterable[Any]]] = {
    ("celosia.driver.explore.explore", "Exploration"): _exploration_tables,
    ("celosia.driver.tune.tune", "Tuning"): _tuning_tables,
    ("celosia.compiler.superoptimise.optimise", "Optimised"): _optimisation_tables,
    ("celosia.driver.accuracy.compare", "TensorComparison"): _comparison_tables,
    ("celosia.driver.accuracy.evaluate", "Evaluation"): _evaluation_tables,
}
"""Functions that return the tables of a result, by the module and the name of its class."""


def register() -> None:
    """Register formatters with this notebook, so that it shows the results in SHOWN as HTML."""
    html = sys.modules["IPython"].get_ipython().display_formatter.formatters["text/html"]
    for (module, name), show in SHOWN.items():
        html.for_type_by_name(module, name, lambda result, show=show: html_of(show(result)))


# Progress ---------------------------------------------------------------------------------------------------------


class CellProgress:
    """A bar and a line in the output of a notebook's cell, removed when the work ends.

    Call it with the name of each stage; `count` with the samples done and all of them.
    """

    def __init__(self) -> None:
        from IPython import display

        self._html: Any = display.HTML
        self._cell: Any = display.display(display.HTML(""), display_id=True)
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
        """Show that `done` of `total` samples are done."""
        self.state(f"{self._stage}: {done:,} of {total:,}", done, total)

    def state(self, text: str, done: float | None = None, total: float | None = None) -> None:
        """Show the progress of a stage, unless the cell was drawn within UPDATE_SECONDS.

        done, total: amounts for the bar; None where they are unknown.
        """
        if time.perf_counter() - self._shown >= UPDATE_SECONDS:
            self._draw(text, done, total)

    def _draw(self, text: str, done: float | None, total: float | None) -> None:
        """Draw the bar at `done` of `total`, and the text behind it."""
        self._shown = time.perf_counter()
        attributes = "" if done is None or not total else f' value="{done}" max="{total}"'
        self._cell.update(self._html(f"<progress{attributes}></progress> {escape(text)}"))


def _progress_line(state: Any) -> str:
    """Return one line on the progress of a search, as the command line prints it."""
    from celosia.driver.show import explore_summary as explore
    from celosia.driver.show import optimise_summary as optimise
    from celosia.driver.show import tune_cpu_summary as tune_cpu
    from celosia.driver.show import tune_summary as tune

    lines: dict[str, Callable[[Any], str]] = {
        "ExploreState": explore.line, "SearchState": optimise.line, "NetworkState": tune.tuning_line,
        "KernelState": tune_cpu.tuning_line,
    }  # fmt: skip
    return lines[type(state).__name__](state)


def show_progress_in_cell(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that takes `progress`, so that it shows a CellProgress where the caller passes no `progress`.

    The CellProgress is also passed as `count` and `told` if the function takes them. Functions without `progress` are
    returned as they are.
    """
    parameters = inspect.signature(function).parameters
    if "progress" not in parameters:
        return function

    @wraps(function)
    def run(*args: Any, **named: Any) -> Any:
        """Call `function`, with a progress line in the cell unless the caller passes its own."""
        if "progress" in named:
            return function(*args, **named)
        with CellProgress() as cell:

            def told(state: Any) -> None:
                """Show the state of a search."""
                cell.state(_progress_line(state), getattr(state, "spent", None), getattr(state, "trials", None))

            offered: dict[str, Any] = {"progress": cell, "count": cell.count, "told": told}
            named.update({name: value for name, value in offered.items() if name in parameters and name not in named})
            return function(*args, **named)

    return run
