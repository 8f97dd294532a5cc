"""The page of an exploration: the front among all Configs, its growth, the Configs side by side, effects of fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from celosia.compiler.program.safe_files import reading
from celosia.driver.pages.names import MARKS, NAME, NAMES, UNITS, ReportError, legend_of, resource_cell, short
from celosia.driver.pages.page import Page, Section, require_bokeh
from celosia.plain import from_json

KEYS = ("models", "board", "memory", "objectives", "take", "front", "points", "searched", "path", "state")
"""Keys that a front.json must have."""
COUNT_WORDS = ((10**12, "trillion"), (10**9, "billion"), (10**6, "million"))
"""Words for large counts, the largest first."""
ENERGY_ESTIMATE_FORMAT, ENERGY, OLD_ENERGY_LABEL = 2, "energy", "uJ (the proxy of 45 nm of an earlier version)"
"""First format of front.json whose energy is an estimate in mJ; name and label of the energy before it."""
RIDGE_PENALTY = 1.0
"""Penalty on the coefficients of the ridge regression in `sensitivity`."""


def is_front(path: Path) -> bool:
    """Whether a JSON file looks like a front, not the report of a run."""
    try:
        return '"searched"' in path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return False


def page_of_front(source: Path | Mapping[str, Any]) -> Page:
    """Return the page of a front.json of `celosia explore`. ReportError for anything else, MissingLibrary."""
    require_bokeh()
    if not isinstance(source, Path):
        return _build_page(source)
    with reading(source, ReportError, "is no front", "; write it again with `celosia explore`"):
        report = from_json(source.read_text(encoding="utf-8"))
        for key in KEYS:
            if key not in report:
                raise ValueError(f"it has no {key}")
        return _build_page(report)


def _convert_old_report(report: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the report with the objectives' names of today: "fps" becomes "period", a proxy of energy gets a label.

    A report of today is returned as it is.
    """
    names = {"fps": "period"} | ({ENERGY: OLD_ENERGY_LABEL} if report.get("format", 1) < ENERGY_ESTIMATE_FORMAT else {})
    if not names.keys() & report["objectives"].keys():
        return report

    def rename_objectives(values: Mapping[str, Any]) -> dict[str, Any]:
        return {names.get(name, name): value for name, value in values.items()}

    def convert_row(row: Mapping[str, Any]) -> dict[str, Any]:
        return {**row, "objectives": rename_objectives(row["objectives"])}

    preset = {} if report.get("preset") is None else {"preset": convert_row(report["preset"])}
    rows = {name: [convert_row(row) for row in report[name]] for name in ("front", "points")}
    return {**report, "objectives": rename_objectives(report["objectives"]), **rows, **preset}


def _build_page(front_json: Mapping[str, Any]) -> Page:
    """Build the page from the contents of front.json: the table always, figures if Configs were measured."""
    from celosia.driver.pages import exploration_figures as figures

    report = _convert_old_report(front_json)
    names, points, preset = list(report["objectives"]), report["points"], report.get("preset")
    models = ", ".join(short(name, NAME) for name in report["models"])
    state = report["state"]
    facts = [
        (f"{len(report['front'])}", "Configs on the front"), (f"{len(points):,}", "measured"),
        (count_text(state["space"]), "in the space"), (f"{state['seconds']:,.0f} s", "of exploring"),
    ]  # fmt: skip
    table = _front_table(report) + _table_notes(report)
    sections = [Section("Which to take", report["take"], table, brief=table)]
    if points:
        first, second = names[0], names[1 if len(names) > 1 else 0]
        sections += [
            Section(
                "The front", "Each measured Config, further left and lower is better. The wheel zooms, the pointer "
                "says what a Config is.", html=_legend(preset, figures),
                figure=figures.plot_front(points, first, second, preset, joined=len(names) <= 2),
            ),
            Section(
                "How the front grew", "The share of a box from a 64th of the preset's objectives to 64 times them that "
                "the front dominates, after so many Configs.", figure=figures.plot_hypervolume(report["path"]),
            ),
        ]  # fmt: skip
    if points and report["searched"]:
        effects = {name: sensitivity(points, report["searched"], name) for name in dict.fromkeys((first, second))}
        sections += [
            Section(
                "Configs side by side", "Each measured Config a line through the values of its fields, the smallest "
                "below, the largest above; those on the front in colour.",
                figure=figures.plot_parallel_coordinates(points, report["searched"]),
            ),
            Section(
                "Effect of each field", "How an objective changes where a field takes its next larger value and the "
                "others stay: by a regression over all measured Configs, in which what was never tried says nothing.",
                html=legend_of([(colour, name) for colour, name in zip(figures.EFFECT_COLOURS, effects)]),
                figure=figures.plot_effects(effects),
            ),
        ]  # fmt: skip
    subtitle = f"{models} on {report['board']}, memory {report['memory']}"
    return Page("Which accelerator to build", subtitle, facts, sections)


def _legend(preset: Mapping[str, Any] | None, figures: Any) -> str:
    """Return the legend of the dots in the plot of the front. figures: the module `exploration_figures`."""
    pairs = [(figures.FRONT, "on the front"), (figures.SHADES[0], "other, measured late"),
             (figures.SHADES[-1], "measured early")]  # fmt: skip
    return legend_of([*pairs, (figures.PRESET, f"the preset {short(preset['name'], NAME)}")] if preset else pairs)


# Configs as a table -------------------------------------------------------------------------------------------


def _front_table(report: Mapping[str, Any]) -> str:
    """Return the HTML table of the front, and the preset below it.

    Columns: objectives, cycles of each model, resources with bars of their shares, watts, and the rung.
    """
    names, models = list(report["objectives"]), models_with_cycle_column(report)
    head = ["Config", *(UNITS.get(name, name) for name in names), *(f"cycles of {name}" for name in models),
            *NAMES.values(), WATTS, "known by"]  # fmt: skip
    lines = []
    for row in rows_of(report):
        cells = [
            row["label"], *(format_number(row["objectives"][name]) for name in names),
            *(f"{row['models'][name]['cycles']:,}" for name in models),
        ]  # fmt: skip
        text = "".join(f"<td>{escape(str(cell))}</td>" for cell in cells)
        text += "".join(
            resource_cell(row["area"], name, row.get("shares", {}).get(name))
            for name in NAMES  # older ones have none
        )
        text += f"<td>{watts_of(row)}</td><td>{escape(row['rung'])}</td>"
        lines.append(f"<tr{' class=preset' * row['preset']}>{text}</tr>")
    heads = "".join(f"<th>{escape(name)}</th>" for name in head)
    return f'<div class="table"><table><tr>{heads}</tr>{"".join(lines)}</table></div>'


WATTS = "W (an estimate)"
"""Head of the column of watts."""


def watts_of(row: Mapping[str, Any]) -> str:
    """Return the watts of logic and device, without the processors, while a row's Config runs the models.

    "-" for fronts of older versions.

    >>> watts_of({"power": {"dynamic": 0.4, "static": 0.144, "processors": 1.5}}), watts_of({})
    ('0.54', '-')
    """
    power = row.get("power")
    return "-" if power is None else f"{power['dynamic'] + power['static']:.2f}"


def rows_of(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of the front, and of the preset if it is not among them, with keys `label` and `preset` (a
    bool)."""
    preset = report.get("preset")
    digest = None if preset is None else preset["digest"]
    rows = [{**row, "preset": row["digest"] == digest, "label": row["file"]} for row in report["front"]]
    for row in rows:
        if preset is not None and row["preset"]:
            row["label"] += f" ({preset['name']})"
    if preset is not None and not any(row["preset"] for row in rows):
        rows.append({**preset, "preset": True, "label": f"{preset['name']}, the preset"})
    return rows


def models_with_cycle_column(report: Mapping[str, Any]) -> list[str]:
    """Return the models that get a column of cycles: all; none if the only model's cycles are an objective."""
    models = list(report["models"])
    return [] if "cycles" in report["objectives"] and len(models) == 1 else models


def _table_notes(report: Mapping[str, Any]) -> str:
    """Return the HTML paragraph below the table: what marks, area and watts mean, the preset, rewritten models."""
    notes = [f"Bars and percents are of the device, a {report['device']}."] if "device" in report else []
    notes.append(MARKS)
    if "area" in report["objectives"]:
        notes.append("Area, mean %, is the mean of the four percents.")
    if "power" in report:
        notes.append(f"Watts are those of logic and device, without the processors. {report['power']}")
    if report.get("preset"):
        notes.append(preset_caption(report))
    notes.append(rewritten_caption(report))
    return f"<p>{escape(' '.join(filter(None, notes)))}</p>"


def rewritten_caption(report: Mapping[str, Any]) -> str:
    """Return a caption on the rewritten models with which Configs' cycles were measured; "" where there are none.

    >>> row = {"file": "1.toml", "digest": "", "models": {"a": {"file": "optimised/12/a.onnx"}, "b": {"file": ""}}}
    >>> rewritten_caption({"front": [row]})
    'Rewritten models, in the folder of points: optimised/12/a.onnx, on 1.toml.'
    """
    labels_of: dict[str, list[str]] = {}
    for row in rows_of(report):
        for model in row["models"].values():
            if model.get("file"):  # older ones have none
                labels_of.setdefault(model["file"], []).append(row["label"])
    caption = "; ".join(f"{file}, on {', '.join(labels)}" for file, labels in labels_of.items())
    return f"Rewritten models, in the folder of points: {caption}." if caption else ""


def preset_caption(report: Mapping[str, Any]) -> str:
    """Return a caption on the preset's row, and on why its cycles differ from those of a compiled Program.

    >>> preset_caption({"memory": "m", "preset": {"name": "p", "fits": True, "records": {"a": 7, "b": 9}, "models": {
    ...     "a": {"cycles": 7}, "b": {"cycles": 10}}}}).partition("; ")[2].partition(" (")[0]
    'with the schedules that come with Celosia for p, b takes 9, not 10'
    """
    row = report["preset"]
    text = f"{row['name']} is the board's preset, to compare with"
    if not row["fits"]:
        text += f"; it leaves less than {report['state']['left']:.0%} of the device free, so it is not on the front"
    text += ". Cycles of all Configs are by the timing model under the compiler's own decisions"
    for name, cycles in row["records"].items():
        preset_cycles = row["models"][name]["cycles"]
        if cycles != preset_cycles and not row["models"][name].get("file"):
            text += f"; with the schedules that come with Celosia for {row['name']}, {name} takes {cycles:,}, "
            text += f"not {preset_cycles:,}"
    return f"{text} (memory {report['memory']}); `celosia tune` looks for schedules that take fewer, for any of them."


def format_number(value: float) -> str:
    """Format a figure without an exponent.

    >>> format_number(51909.6), format_number(59.361), format_number(0.51909), format_number(0)
    ('51,910', '59.4', '0.519', '0')
    """
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def count_text(count: int) -> str:
    """Format a count, large ones in words.

    >>> count_text(2080), count_text(128_024_064_000)
    ('2,080', '128 billion')
    """
    large = next(((size, name) for size, name in COUNT_WORDS if count >= size), None)
    return f"{count:,}" if large is None else f"{count / large[0]:,.3g} {large[1]}"


def sensitivity(points: Sequence[Mapping[str, Any]], fields: Sequence[str], name: str) -> dict[str, float]:
    """Return by field the factor of an objective when the field takes its next larger value, by ridge regression.

    `exploration_figures.plot_effects` draws these factors.

    >>> points = [{"set": {"a": a, "b": b}, "objectives": {"cycles": 64 / a}} for a in (1, 2, 4, 8) for b in (0, 1)]
    >>> {name: round(times, 1) for name, times in sensitivity(points * 9, ["a", "b"], "cycles").items()}
    {'a': 0.5, 'b': 1.0}
    """
    value_numbers = []
    for field in fields:
        values = [point["set"][field] for point in points]
        order = sorted(set(values))
        value_numbers.append([float(order.index(value)) for value in values])
    x, y = np.array(value_numbers).T, np.log([point["objectives"][name] for point in points])
    x, y = x - x.mean(0), y - y.mean()
    weights = np.linalg.solve(x.T @ x + RIDGE_PENALTY * np.eye(len(fields)), x.T @ y)
    return {field: float(np.exp(weight)) for field, weight in zip(fields, weights)}
