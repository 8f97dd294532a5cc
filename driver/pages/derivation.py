"""How an optimised model came to be, as a section of a page or a page of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

from celosia.compiler.program.files import reading
from celosia.compiler.superoptimise.derivation import checked, derivation_in, tidied, total
from celosia.driver.pages.names import NAME, ReportError, short
from celosia.driver.pages.page import Page, Section, require
from celosia.hw.plain import from_json

SAYS = (
    "Each step is a rule that is proved for the integers of all such models, taken at one place; what it saves is of "
    "the whole, by the timing model."
)
COLUMNS = ("rule", "says", "proof", "at", "tidied up by", "cycles then", "saved")


def is_derivation(path: Path) -> bool:
    """Whether a JSON file seems to be what `celosia optimise --report` wrote."""
    try:
        return '"cycles_before"' in path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return False


def of_derivation(path: Path) -> Page:
    """The page of what `celosia optimise --report` wrote. ReportError for what is none, MissingLibrary."""
    require()
    with reading(path, ReportError, "is no derivation", "; write it again with `celosia optimise --report`"):
        report = checked(from_json(path.read_text(encoding="utf-8")))
    facts = [
        (f"{report['cycles_before']:,.0f}", "cycles before"), (f"{report['cycles']:,.0f}", "cycles"),
        (f"{len(report['steps'])}", "steps"),
    ]  # fmt: skip
    return Page("Derivation", total(report), facts, [section(report)])


def with_derivation(page: Page, model: Path) -> Page:
    """`page`, with a section more where `celosia optimise` has made the model, or that of the Program. ModelError."""
    report = derivation_in(model)
    return page if report is None else replace(page, sections=[*page.sections, section(report)])


def section(report: Mapping[str, Any]) -> Section:
    """Each step with its rule, its proof and its gain."""
    rows = "".join(map(_row, report["steps"]))
    head = "".join(f"<th>{name}</th>" for name in COLUMNS)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table><p>{escape(total(dict(report)))}</p>"
    return Section("How the model came to be", SAYS, table, brief=table)


def _row(step: Mapping[str, Any]) -> str:
    where = ", ".join(short(name, NAME) for name in step["where"])
    texts = step["rule"], step["says"], step["proof"], where, tidied(dict(step))
    cells = "".join(f"<td>{escape(text)}</td>" for text in texts)
    return f"<tr>{cells}<td>{step['cycles']:,.0f}</td><td>{step['gain']:,.0f}</td></tr>"
