"""The page of an exploration: the front among all Configs, the way there, the Configs side by side, what fields do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from celosia.bitstreams.synthesis import RESOURCES
from celosia.compiler.files import reading
from celosia.driver.pages.names import NAME, ReportError, resource, short
from celosia.driver.pages.page import Page, Section, require
from celosia.hw.plain import from_json

KEYS = ("models", "board", "memory", "objectives", "take", "front", "points", "searched", "path", "state")
SHRINK = 1.0
"""Of the regression that says what fields do."""


def is_front(path: Path) -> bool:
    """Whether a JSON file seems to be a front, not the report of a run."""
    try:
        return '"searched"' in path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return False


def of_front(source: Path | Mapping[str, Any]) -> Page:
    """The page of what `celosia explore` wrote as front.json. ReportError for what is none, MissingLibrary."""
    require()
    if not isinstance(source, Path):
        return _page(source)
    with reading(source, ReportError, "is no front", "; write it again with `celosia explore`"):
        report = from_json(source.read_text(encoding="utf-8"))
        for key in KEYS:
            if key not in report:
                raise ValueError(f"it has no {key}")
        return _page(report)


def _page(report: Mapping[str, Any]) -> Page:
    from celosia.driver.pages import front_figures as figures

    names, points = list(report["objectives"]), report["points"]
    models = ", ".join(short(name, NAME) for name in report["models"])
    state = report["state"]
    facts = [
        (f"{len(report['front'])}", "Configs on the front"), (f"{len(points):,}", "measured"),
        (f"{state['space']:,.3g}", "in the space"), (f"{state['seconds']:,.0f} s", "of exploring"),
    ]  # fmt: skip
    sections = [Section("Which to take", report["take"], _table(report))]
    if points:
        first, second = names[0], names[1 if len(names) > 1 else 0]
        sections += [
            Section(
                "The front", f"Each measured Config by {first} and {second}: less is better in both. The darker, the "
                "later it was measured; larger on the front.",
                figure=figures.front(points, first, second, joined=len(names) <= 2),
            ),
            Section(
                "The way there", "The share of a box from a 64th of the preset's objectives to 64 times them that the "
                "front dominates, after so many Configs.", figure=figures.path(report["path"]),
            ),
        ]  # fmt: skip
    if points and report["searched"]:
        effects = {name: sensitivity(points, report["searched"], name) for name in dict.fromkeys((first, second))}
        sections += [
            Section(
                "Configs side by side", "Each measured Config a line through the values of its fields, the smallest "
                "below, the largest above; those on the front in colour.",
                figure=figures.parallel(points, report["searched"]),
            ),
            Section(
                "What each field does", "How an objective changes where a field takes its next larger value and the "
                "others stay: by a regression over all measured Configs, in which what was never tried says nothing.",
                html=_key(list(effects)), figure=figures.effects(effects),
            ),
        ]  # fmt: skip
    subtitle = f"{models} on {report['board']}, memory {report['memory']}"
    return Page("Which accelerator to build", subtitle, facts, sections)


def _key(names: Sequence[str]) -> str:
    """Which colour is which objective's."""
    from celosia.driver.pages.front_figures import EFFECTS

    pairs = zip(EFFECTS, names)
    return (
        f'<div class="key">{"".join(f"<span><i style=background:{c}></i>{escape(n)}</span>" for c, n in pairs)}</div>'
    )


def _table(report: Mapping[str, Any]) -> str:
    names, models = list(report["objectives"]), list(report["models"])
    head = ["Config", *names, *(f"cycles of {name}" for name in models), "LUT", "flip-flops", "DSP", "block RAM", "by"]
    rows = []
    for row in report["front"]:
        area = row["area"]
        cells = [
            row["file"], *(f"{row['objectives'][name]:,.4g}" for name in names),
            *(f"{row['models'][name]['cycles']:,}" for name in models), *(resource(area, name) for name in RESOURCES),
            row["rung"],
        ]  # fmt: skip
        rows.append("".join(f"<td>{escape(str(cell))}</td>" for cell in cells))
    lines = "".join(f"<tr>{row}</tr>" for row in rows)
    heads = "".join(f"<th>{escape(name)}</th>" for name in head)
    return f'<div class="table"><table><tr>{heads}</tr>{lines}</table></div>'


def sensitivity(points: Sequence[Mapping[str, Any]], fields: Sequence[str], name: str) -> dict[str, float]:
    """By what an objective is multiplied where a field takes its next larger value, field by field.

    >>> points = [{"set": {"a": a, "b": b}, "objectives": {"cycles": 64 / a}} for a in (1, 2, 4, 8) for b in (0, 1)]
    >>> {name: round(times, 1) for name, times in sensitivity(points * 9, ["a", "b"], "cycles").items()}
    {'a': 0.5, 'b': 1.0}
    """
    steps = []
    for field in fields:
        values = [point["set"][field] for point in points]
        order = sorted(set(values))
        steps.append([float(order.index(value)) for value in values])
    x, y = np.array(steps).T, np.log([point["objectives"][name] for point in points])
    x, y = x - x.mean(0), y - y.mean()
    weights = np.linalg.solve(x.T @ x + SHRINK * np.eye(len(fields)), x.T @ y)
    return {field: float(np.exp(weight)) for field, weight in zip(fields, weights)}
