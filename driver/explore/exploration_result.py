"""Files of an exploration: front.json, a TOML file for each Config on the front, and a sentence on which to take."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from celosia.bitstreams.power import caveat
from celosia.compiler.program.safe_files import write_text
from celosia.driver.choices import OBJECTIVES
from celosia.driver.explore.ladder import Ladder
from celosia.driver.explore.pareto import knee
from celosia.driver.explore.records import PRESET, Point
from celosia.driver.pages.exploration_page import page_of_front
from celosia.driver.workstation.oracle import MissingLibrary

FIGURES = {
    "cycles": "{:,.0f} cycles", "latency": "{:,.3g} ms", "period": "{:,.3g} ms an image",
    "area": "{:.1f}% of the device on average", "energy": "{:,.3g} mJ (an estimate)",
}  # fmt: skip
"""Format of an objective's value in text, by objective."""
BEST = {
    "cycles": "the fewest cycles", "latency": "the shortest run", "period": "the most images a second",
    "area": "the smallest", "energy": "the least energy, by the estimate",
}  # fmt: skip
"""The best Config in an objective, in words, by objective."""
POINT_FILE = re.compile(r"\d{2,}-\d+x\d+x\d+-[0-9a-f]{6}\.toml")
"""Names of files that `write_front` wrote, which it removes when their point leaves the front."""


def point_name(number: int, point: Point) -> str:
    """Return the name of a point of the front: its rank, array shape and digest, as 01-1x16x16-a1b2c3."""
    cfg = point.cfg
    return f"{number:02d}-{cfg.batch}x{cfg.block_in}x{cfg.block_out}-{cfg.digest[:6]}"


def point_row(name: str, point: Point, ladder: Ladder) -> dict[str, Any]:
    """Return a point as an entry of `front` in front.json (docs/explore.md)."""
    return {
        "name": name, "file": f"{name}.toml", "digest": point.cfg.digest, "set": point.to_json()["set"],
        "rung": point.rung, "objectives": ladder.objectives_of(point),
        "models": {model: {"cycles": cost.cycles, "images": cost.images, "limit": cost.limit,
                           "rtl": (point.rtl or {}).get(model), "file": ladder.file_on(point, model)}
                   for model, cost in ladder.costs(point).items()},
        "area": point.area, "shares": ladder.shares(point), "power": ladder.power(point),
        "clock_mhz": ladder.clock_of(point),
        "clock": "declared" if point.clock_mhz is None else "estimated from Yosys' netlist", "how": point.how,
    }  # fmt: skip


ENDED = {
    "budget": "The time of --budget is used up; with a larger one the same command goes on where it was.",
    "points": "As many Configs as --points allows are measured; with a larger one the same command goes on.",
    "interrupted": "Interrupted; the same command goes on where it was.",
}
"""Reasons why an exploration ended early, and how to go on."""


def recommend(rows: Sequence[dict[str, Any]], names: Sequence[str], other_count: int, ended: str) -> str:
    """Recommend Configs of the front in a sentence: the knee of the front, and the best in each objective.

    rows: of front.json. names: of objectives. other_count: measured Configs without the preset. ended: a key of ENDED,
    or "".
    """
    if ended and not other_count:
        return f"Nothing beside the board's preset was measured: there is nothing to choose from yet. {ENDED[ended]}"
    if not rows:
        return "No Config of the space can be taken: see the failures."

    def objectives_text(row: dict[str, Any]) -> str:
        return ", ".join(FIGURES[name].format(row["objectives"][name]) for name in names)

    balanced = rows[knee([[row["objectives"][name] for name in names] for row in rows])]
    text = f"Take {balanced['file']} if all count alike ({objectives_text(balanced)})"
    for name in names:
        best = min(rows, key=lambda row: row["objectives"][name])
        if best is not balanced:
            text += f"; {best['file']} if you want {BEST[name]} ({objectives_text(best)})"
    return text + "."


def front_report(
    rows: list[dict[str, Any]], names: Sequence[str], context: dict[str, Any], state: dict[str, Any],
    measured: Sequence[Point], searched: Sequence[str], ladder: Ladder,
) -> dict[str, Any]:  # fmt: skip
    """Return the content of front.json.

    rows: the front. names: of objectives. context: models, board and memory. state: progress and how the exploration
    ended. measured: every measured Config, in order of time. searched: fields of several values.
    """
    on_front = {row["digest"] for row in rows}
    points = []
    for point in measured:
        figures = ladder.objectives_of(point)
        points.append({
            "digest": point.cfg.digest, "set": {name: getattr(point.cfg, name) for name in searched},
            "objectives": {name: figures[name] for name in names}, "shares": ladder.shares(point),
            "front": point.cfg.digest in on_front, "how": point.how, "at": point.at,
        })  # fmt: skip
    other_count = sum(point.how != PRESET for point in measured)
    return {
        **context, "objectives": {name: OBJECTIVES[name] for name in names},
        "take": recommend(rows, names, other_count, state["ended"]), "front": rows, "state": state,
        "device": ladder.board.device.name, "power": caveat(ladder.board), "searched": list(searched), "points": points,
    }  # fmt: skip


def write_front(folder: Path, report: dict[str, Any], points: Sequence[Point]) -> None:
    """Write front.json, a TOML file for each point, and a page, in place of those of an earlier front. OutputError.

    points: of the rows of the front, in order.
    """
    for row, point in zip(report["front"], points, strict=True):
        write_text(folder / row["file"], f"# {describe_point(row, report)}\n{point.cfg.to_toml()}")
    files = {row["file"] for row in report["front"]}
    for path in folder.glob("*.toml"):
        if POINT_FILE.fullmatch(path.name) and path.name not in files:
            path.unlink()
    write_text(folder / "front.json", json.dumps(report, indent=1) + "\n")
    with suppress(MissingLibrary):  # front.json has all of it: `celosia report` draws it where Bokeh is
        page_of_front(report).save(folder / "report.html")


def describe_point(row: dict[str, Any], report: dict[str, Any]) -> str:
    """Describe a point in the line that heads its TOML file: objectives, models and board."""
    figures = ", ".join(FIGURES[name].format(row["objectives"][name]) for name in report["objectives"])
    models = [f"{name} as {model['file']}" if model["file"] else name for name, model in row["models"].items()]
    return f"{figures}; {', '.join(models)} on {report['board']}"
