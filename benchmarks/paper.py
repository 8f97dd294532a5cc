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
from benchmarks.figures import processor
from benchmarks.paper_chart import FULL, SHORT, Chart, PaperSize, Say
from benchmarks.pictures import CHROMIUM, draw
from benchmarks.rows import ROOT, Request, Row, judged
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


def rows(asked: Request, page: Path = PAGE, pictures: Path | None = ROOT / "docs") -> Iterator[Row]:
    """Those of all charts, and of the time they took, or of the charts that were chosen. pictures: the folder of PNGs,
    where there are to be some."""
    for name in asked.charts:
        if name not in CHARTS:
            raise SystemExit(f"python -m benchmarks: there is no chart {name!r}; take {', '.join(CHARTS)}")
    short, size, charts = asked.short, SHORT if asked.short else FULL, dict[str, Chart]()
    started = time.perf_counter()
    for name in asked.charts or CHARTS:
        charts[name] = chart = CHARTS[name](size, asked.folder, asked.say)
        yield from chart.rows
        page.parent.mkdir(parents=True, exist_ok=True)
        made(list(charts.values()), short).save(page)
    if pictures is not None and not short and CHROMIUM is not None:
        asked.say("pictures")
        whole = made(list(charts.values()), short)
        for name, chart in charts.items():
            if chart.figures:
                draw(whole, chart.figures[0][0], pictures / f"paper-{name}.png")
    if len(charts) == len(CHARTS):
        minutes = (time.perf_counter() - started) / 60
        what = f"the page of {len(charts)} charts, {page.name}"
        yield judged("paper/time", what, size.command, {"minutes": minutes}, "minutes <= 60")


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
