"""Show how `celosia optimise` derived a model: its steps, as a section of a page or as a page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

from celosia.compiler.program.safe_files import reading
from celosia.compiler.superoptimise.derivation import (
    checked,
    derivation_in,
    distance,
    is_measured,
    rule_in,
    tidied,
    total,
)
from celosia.driver.pages.graph_picture import draw_graph
from celosia.driver.pages.names import NAME, ReportError, short
from celosia.driver.pages.page import Page, Section, require_bokeh
from celosia.plain import from_json

SUMMARY = (
    "Each step is a rule that is proved for all such models, taken at one place; what it saves is of the whole, {}. In "
    "the pictures, operators that the other model has not are in colour, between those next to them."
)
"""Introduction of the section; {} is how costs are known."""
COLUMNS = ("rule", "proof", "at", "tidied up by")
"""Heads of the table's text columns."""


def is_derivation(path: Path) -> bool:
    """Whether a JSON file looks like a report of `celosia optimise --report`."""
    try:
        return '"cycles_before"' in path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return False


def page_of_derivation(path: Path) -> Page:
    """Return the page of a report of `celosia optimise --report`. ReportError for anything else, MissingLibrary."""
    require_bokeh()
    with reading(path, ReportError, "is no derivation", "; write it again with `celosia optimise --report`"):
        report = checked(from_json(path.read_text(encoding="utf-8")))
    cost, unit = _cost_name_and_unit(report)
    facts = [
        (f"{report[f'{cost}_before']:,.0f}", f"{unit} before"), (f"{report[cost]:,.0f}", unit),
        (f"{len(report['steps'])}", "steps"),
    ]  # fmt: skip
    return Page("Derivation", total(report), facts, [derivation_section(report)])


def add_derivation(page: Page, model: Path) -> Page:
    """Return `page` with the section on the derivation if the model, or that of the Program, is from `celosia
    optimise`.

    model: an ONNX file or a Program. ModelError.
    """
    report = derivation_in(model)
    return page if report is None else replace(page, sections=[*page.sections, derivation_section(report)])


def derivation_section(report: Mapping[str, Any]) -> Section:
    """Return the section with a table of the steps (rule, proof, gain), totals, and drawings of the changed
    operators."""
    cost, unit = _cost_name_and_unit(report)
    rows = "".join(_step_row(step, cost) for step in report["steps"])
    head = "".join(f'<th class="said">{name}</th>' for name in COLUMNS) + f"<th>{unit} then</th><th>saved</th>"
    table = f'<div class="table"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    summary = "".join(f"<p>{escape(text)}</p>" for text in (total(dict(report)), distance(report)) if text)
    html = f"{table}{summary}{_draw_changes(report.get('changes'))}"
    intro = SUMMARY.format("as measured on this processor" if is_measured(report) else "by the timing model")
    return Section("How the model came to be", intro, html, brief=html)


def _cost_name_and_unit(report: Mapping[str, Any]) -> tuple[str, str]:
    """Return the key in a report, and the unit, of the cost that the steps save: cycles, or ns measured on the host."""
    return ("host", "ns") if is_measured(report) else ("cycles", "cycles")


def _draw_changes(changes: Mapping[str, Any] | None) -> str:
    """Return HTML with the removed operators drawn beside the new ones; "" for reports of older versions, without
    them."""
    if not changes or not any(changes.values()):
        return ""
    sides = "".join(
        f'<div><h3>{title}</h3><div class="drawn">{draw_graph(changes[side], title)}</div></div>'
        for side, title in (("before", "Before"), ("after", "After"))
    )
    return f'<div class="sides">{sides}</div>'


def _step_row(step: Mapping[str, Any], cost: str) -> str:
    """Return a step of the derivation as a row of the HTML table. cost: the key of the cost after the step."""
    location = ", ".join(short(name, NAME) for name in step["where"])
    rule = f"<b>{escape(rule_in(step))}</b><br>{escape(step['says'])}"
    texts = rule, *map(escape, (step["proof"], location, tidied(dict(step))))
    cells = "".join(f'<td class="said">{text}</td>' for text in texts)
    return f"<tr>{cells}<td>{step[cost]:,.0f}</td><td>{step['gain']:,.0f}</td></tr>"
