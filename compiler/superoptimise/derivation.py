"""The derivation of an optimised model: an entry of the model's own metadata, which no runtime reads, and texts about
it.

`celosia inspect --derivation` and the pages of `celosia report` show it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx

from celosia.compiler.graph.errors import ModelError
from celosia.compiler.graph.importer import read
from celosia.compiler.program import Program
from celosia.compiler.superoptimise import graph_difference

KEY = "celosia.derivation"
"""Key of the entry in the model's metadata."""
NUMBERS = ("cycles_before", "cycles", "host_before", "host")
"""Fields of a derivation that are numbers: cycles or nanoseconds before and after."""
STEP_FIELDS = {
    "rule": str, "says": str, "where": list, "tidied": list, "proof": str, "cycles": float, "host": float,
    "gain": float,
}  # fmt: skip
"""Fields of a step, with their types."""


def store_derivation(model: onnx.ModelProto, report: Mapping[str, Any]) -> None:
    """Write the steps and prices of `report` (Optimised.report) into the model's metadata."""
    names = (*NUMBERS, "measured", "steps", "changes", "fast_math")
    derivation = {name: report[name] for name in names if name in report}
    for entry in [entry for entry in model.metadata_props if entry.key == KEY]:
        model.metadata_props.remove(entry)
    model.metadata_props.append(onnx.StringStringEntryProto(key=KEY, value=json.dumps(derivation)))


def derivation_of(model: onnx.ModelProto, name: str) -> dict[str, Any] | None:
    """Read the derivation in a model's metadata; None where it has none. ModelError, with the model's name, for an
    entry that is no derivation.
    """
    return parse_derivation(text, name) if (text := text_in(model)) else None


def derivation_in(path: Path) -> dict[str, Any] | None:
    """Read the derivation of an ONNX file, or of the model that a Program was compiled from; None where it has none.
    Raises ModelError, ProgramError.
    """
    if Program.is_program(path):
        text = Program.load(path).derivation
        return parse_derivation(text, str(path)) if text else None
    return derivation_of(read(path), str(path))


def text_in(model: onnx.ModelProto) -> str:
    """Return the text that `store_derivation` wrote into a model; "" where there is none."""
    return next((entry.value for entry in model.metadata_props if entry.key == KEY), "")


def parse_derivation(text: str, name: str) -> dict[str, Any]:
    """Parse the text of a derivation. ModelError, with the name of its file, where it is none."""
    try:
        return checked(json.loads(text))
    except ValueError as error:
        raise ModelError(f"the derivation in {name} cannot be read: {error}; optimise the model again") from None


def checked(report: Any) -> dict[str, Any]:
    """Return `report`, read from a file, if it has everything that texts and pages show; else raise ValueError that
    says what is missing.
    """
    if not isinstance(report, dict):
        raise ValueError("it is no object")
    for name in NUMBERS:
        if not _is_json_of(report.get(name), float):
            raise ValueError(f"it has no number {name!r}")
    steps = report.get("steps")
    if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
        raise ValueError("it has no list of steps")
    for step in steps:
        for name, kind in STEP_FIELDS.items():
            if not _is_json_of(step.get(name), kind) or (
                kind is list and not all(isinstance(text, str) for text in step[name])
            ):
                raise ValueError(f"a step has no {name!r}")
    if "changes" in report:
        graph_difference.check_changes(report["changes"])
    if "fast_math" in report:
        _check_distance(report["fast_math"])
    return report


def _check_distance(value: Any) -> None:
    """Raise ValueError unless `value`, a part of an untrusted model's metadata, says how far fast-math's outputs
    differ.
    """
    outputs = value.get("outputs") if isinstance(value, dict) else None
    if not isinstance(outputs, dict) or not _is_json_of(value.get("bound"), float):
        raise ValueError("how far outputs differ has no 'outputs' or no 'bound'")
    for name, row in outputs.items():
        if not isinstance(row, dict) or not all(_is_json_of(row.get(key), float) for key in ("absolute", "relative")):
            raise ValueError(f"how far output {name!r} differs is no number")


def _is_json_of(value: Any, kind: type) -> bool:
    """Return whether a value of JSON is of `kind`: an integer is a float, and a bool is no number."""
    return isinstance(value, int | float if kind is float else kind) and not isinstance(value, bool)


def tidied(row: dict[str, Any]) -> str:
    """Say which rules tidied up after the step `row`, and how often each."""
    return ", ".join(f"{name} ({count})" for name, count in _count_names(row["tidied"]))


def rule_in(row: Mapping[str, Any]) -> str:
    """Return the name of a step's rule, with a note where it changes values."""
    return f"{row['rule']} (fast-math: changes values)" if row.get("changes_values") else str(row["rule"])


def distance(report: Mapping[str, Any]) -> str:
    """Say how far the outputs of a fast-math model are from the original's; "" for a model without fast-math."""
    fast_math = report.get("fast_math")
    if not fast_math or not report["steps"]:
        return ""
    absolute, relative = (
        max((row[name] for row in fast_math["outputs"].values()), default=0) for name in ("absolute", "relative")
    )
    return (
        f"fast-math: for random inputs outputs differ from the original's by {absolute:.2g} at most, and by "
        f"{relative:.2g} of their largest value, where rounding may come to {fast_math['bound']:.2g}"
    )


def total(report: dict[str, Any]) -> str:
    """Say how much all steps save together."""
    before, after = report["cycles_before"], report["cycles"]
    if is_measured(report):
        before, after = report["host_before"], report["host"]
        return f"{after / 1e6:,.3f} ms, {before / 1e6:,.3f} before: {before / after:.3f} times as fast"
    text = f"{after:,.0f} cycles, {before:,.0f} before"
    if after:
        text += f": {before / after:.3f} times as fast"
    return f"{text}; on the CPU {report['host']:,.0f}, {report['host_before']:,.0f} before, by estimate"


def is_measured(report: Mapping[str, Any]) -> bool:
    """Return whether the report is about measured nanoseconds on the CPU, without an accelerator."""
    return bool(report.get("measured"))


def _count_names(names: list[str]) -> list[tuple[str, int]]:
    """Count each name, in order of first occurrence."""
    return [(name, names.count(name)) for name in dict.fromkeys(names)]
