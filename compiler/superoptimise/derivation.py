"""Keep the derivation of an optimised model in the model itself: an entry of its metadata, which no runtime reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx

from celosia.compiler.graph.errors import ModelError
from celosia.compiler.graph.importing.importer import read
from celosia.compiler.program import Program
from celosia.compiler.superoptimise import changes

KEY = "celosia.derivation"
NUMBERS = ("cycles_before", "cycles", "host_before", "host")
STEP = {
    "rule": str, "says": str, "where": list, "tidied": list, "proof": str, "cycles": float, "host": float,
    "gain": float,
}  # fmt: skip


def noted(model: onnx.ModelProto, report: Mapping[str, Any]) -> None:
    """Write what `report` says of steps and costs into the model."""
    names = (*NUMBERS, "measured", "steps", "changes", "fast_math")
    kept = {name: report[name] for name in names if name in report}
    for entry in [each for each in model.metadata_props if each.key == KEY]:
        model.metadata_props.remove(entry)
    model.metadata_props.append(onnx.StringStringEntryProto(key=KEY, value=json.dumps(kept)))


def derivation_of(model: onnx.ModelProto, name: str) -> dict[str, Any] | None:
    """Read the derivation in a model's metadata; None where it has none. ModelError, with the model's name, for another
    entry."""
    return parsed(text, name) if (text := text_in(model)) else None


def derivation_in(path: Path) -> dict[str, Any] | None:
    """Read the derivation of an ONNX file, or of the model of a Program. ModelError, ProgramError."""
    if Program.is_program(path):
        text = Program.load(path).derivation
        return parsed(text, str(path)) if text else None
    return derivation_of(read(path), str(path))


def text_in(model: onnx.ModelProto) -> str:
    """The entry that `noted` wrote; "" where there is none."""
    return next((each.value for each in model.metadata_props if each.key == KEY), "")


def parsed(text: str, name: str) -> dict[str, Any]:
    """A derivation as plain data. ModelError, with the name of the file that has it, for what is none."""
    try:
        return checked(json.loads(text))
    except ValueError as error:
        raise ModelError(f"the derivation in {name} cannot be read: {error}; optimise the model again") from None


def checked(report: Any) -> dict[str, Any]:
    """`report`, which has all that is shown. ValueError says what is missing."""
    if not isinstance(report, dict):
        raise ValueError("it is no object")
    for name in NUMBERS:
        if not _is_json_of(report.get(name), float):
            raise ValueError(f"it has no number {name!r}")
    steps = report.get("steps")
    if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
        raise ValueError("it has no list of steps")
    for step in steps:
        for name, kind in STEP.items():
            if not _is_json_of(step.get(name), kind) or (
                kind is list and not all(isinstance(each, str) for each in step[name])
            ):
                raise ValueError(f"a step has no {name!r}")
    if "changes" in report:
        changes.checked(report["changes"])
    if "fast_math" in report:
        _check_distance(report["fast_math"])
    return report


def _check_distance(found: Any) -> None:
    outputs = found.get("outputs") if isinstance(found, dict) else None
    if not isinstance(outputs, dict) or not _is_json_of(found.get("bound"), float):
        raise ValueError("how far outputs differ has no 'outputs' or no 'bound'")
    for name, row in outputs.items():
        if not isinstance(row, dict) or not all(_is_json_of(row.get(each), float) for each in ("absolute", "relative")):
            raise ValueError(f"how far output {name!r} differs is no number")


def _is_json_of(value: Any, kind: type) -> bool:
    """Return whether a value of JSON is of `kind`: an integer is a float, and a bool is no number."""
    return isinstance(value, int | float if kind is float else kind) and not isinstance(value, bool)


def tidied(row: dict[str, Any]) -> str:
    """The rules that tidied up behind a step."""
    return ", ".join(f"{name} ({count})" for name, count in _counted(row["tidied"]))


def rule_in(row: Mapping[str, Any]) -> str:
    """The rule of a step, and whether it holds in real numbers alone."""
    return f"{row['rule']} (fast-math: changes values)" if row.get("changes_values") else str(row["rule"])


def distance(report: Mapping[str, Any]) -> str:
    """Say how far the outputs of a model are from the original's; "" where fast-math was not asked for."""
    found = report.get("fast_math")
    if not found or not report["steps"]:
        return ""
    absolute, relative = (
        max((row[name] for row in found["outputs"].values()), default=0) for name in ("absolute", "relative")
    )
    return (
        f"fast-math: for random inputs outputs differ from the original's by {absolute:.2g} at most, and by "
        f"{relative:.2g} of their largest value, where rounding may come to {found['bound']:.2g}"
    )


def total(report: dict[str, Any]) -> str:
    """Say what all steps save together."""
    before, after = report["cycles_before"], report["cycles"]
    if is_measured(report):
        before, after = report["host_before"], report["host"]
        return f"{after / 1e6:,.3f} ms, {before / 1e6:,.3f} before: {before / after:.3f} times as fast"
    text = f"{after:,.0f} cycles, {before:,.0f} before"
    if after:
        text += f": {before / after:.3f} times as fast"
    return f"{text}; on the CPU {report['host']:,.0f}, {report['host_before']:,.0f} before, by estimate"


def is_measured(report: Mapping[str, Any]) -> bool:
    """Whether its numbers of the CPU are nanoseconds, of a model without an accelerator."""
    return bool(report.get("measured"))


def _counted(names: list[str]) -> list[tuple[str, int]]:
    return [(name, names.count(name)) for name in dict.fromkeys(names)]
