"""Rows of `paper`: the charts by which TVM, VTA, Triton and TASO are judged, of this project, on one page.

    python -m benchmarks paper [--short] [--charts operators,offload]

Every chart compares two sides that were measured in this run, on this machine: nothing is read from a file of results.
The page is bench/paper.html, written anew after each chart; docs/ gets the pictures, where Chromium is installed.
`--short`: the demo model in the place of larger networks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path

from benchmarks import paper_arm, paper_cpu, paper_machine, paper_search
from benchmarks.browser import CHROMIUM, browser
from benchmarks.figures import processor
from benchmarks.paper_chart import FULL, SHORT, Chart, PaperSize, Say
from benchmarks.pictures import HEIGHT, WIDTH, write
from benchmarks.rows import ROOT, Row
from celosia.driver.pages.page import Page, Section

PAGE = ROOT / "bench" / "paper.html"
CHARTS: dict[str, Callable[[PaperSize, Path | None, Say], Chart]] = {
    "hiding": paper_machine.hiding,
    "ablation": paper_machine.ablation,
    "offload": paper_machine.offload,
    "operators": paper_cpu.operators,
    "arm": paper_arm.operators,
    "search": paper_search.search,
    "workers": paper_search.workers,
    "designs": paper_search.designs,
    "language": paper_cpu.language,
}
"""In the order of the page, by the names of their pictures."""


def rows(
    folder: Path | None, short: bool, say: Say, page: Path = PAGE, pictures: Path | None = ROOT / "docs",
    names: Sequence[str] = tuple(CHARTS),
) -> Iterator[Row]:  # fmt: skip
    """Those of all charts, and of the time they took, or of `names`. pictures: the folder of PNGs, where there are
    to be some."""
    size, charts = SHORT if short else FULL, dict[str, Chart]()
    started = time.perf_counter()
    for name in names:
        charts[name] = chart = CHARTS[name](size, folder, say)
        yield from chart.rows
        page.parent.mkdir(parents=True, exist_ok=True)
        made(list(charts.values()), short).save(page)
    if pictures is not None and not short and CHROMIUM is not None:
        say("pictures")
        draw(page, charts, pictures)
    seconds = time.perf_counter() - started
    if len(charts) < len(CHARTS):
        return
    yield Row(
        "paper/time", f"the page of {len(charts)} charts, {page.name}", "at most 60 minutes",
        f"{seconds / 60:.1f} minutes", seconds <= 3600, size.command, {"minutes": seconds / 60},
    )  # fmt: skip


def made(charts: Sequence[Chart], short: bool) -> Page:
    """The page of these charts."""
    facts = [chart.fact for chart in charts if chart.fact]
    how = "the short form: " * short + f"measured on {processor()}"
    return Page("Celosia beside the papers", how, facts, [section for chart in charts for section in sections(chart)])


def sections(chart: Chart) -> list[Section]:
    """A chart's figures, and below the last of them its rows."""
    lines = "".join(
        f"<tr><td>{escape(row.what)}</td><td>{escape(row.target)}</td><td>{escape(row.measured)}</td>"
        f"<td>{'' if row.met is None else 'met' if row.met else 'missed'}</td></tr>" for row in chart.rows
    )  # fmt: skip
    head = "".join(f"<th>{name}</th>" for name in ("what", "asked", "measured", ""))
    table = f'<div class="table"><table><tr>{head}</tr>{lines}</table></div>'
    found = [Section(title, text, figure=figure) for title, text, figure in chart.figures]
    if not found:
        return [Section(chart.title, chart.text, table)]
    found[0].text = f"{chart.text} {found[0].text}".strip()
    found[-1].after = table
    return found


def draw(page: Path, charts: dict[str, Chart], folder: Path) -> None:
    """The first figure of each chart as `paper-NAME.png` in `folder`."""
    with browser() as tab:
        tab.open(page, WIDTH, HEIGHT)
        for name, chart in charts.items():
            if chart.figures:
                write(tab, chart.figures[0][0], folder / f"paper-{name}.png")
