"""The derivation of an optimised model: an entry of the model's own metadata, which no runtime reads, and texts about
it; and the operators before and after, as plain data for pictures.

`celosia inspect --derivation` and the pages of `celosia report` show it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import onnx

from celosia.compiler.graph.errors import ModelError
from celosia.compiler.graph.importer import read
from celosia.compiler.program import Program
from celosia.compiler.superoptimise.graph import ONNX, BytesGraph, GraphOp
from celosia.compiler.superoptimise.operators import OPERATORS

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
        check_changes(report["changes"])
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
    return ", ".join(f"{name} ({row['tidied'].count(name)})" for name in dict.fromkeys(row["tidied"]))


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


# Operators before and after ------------------------------------------------------------------------------------------

MAX_OPERATORS = 200
"""Limit of the operators in a picture; later ones are left out."""
NODE_FIELDS = {"name": str, "what": str, "reads": list, "changed": bool}
"""Fields of a node in a picture, with their types. what: label. reads: names of nodes. changed: whether the other graph
lacks it.
"""


def changes(before: BytesGraph, after: BytesGraph) -> dict[str, list[dict[str, Any]]]:
    """List the operators of each graph that the other one lacks, and those next to them (with `changed` false).

    The pictures of a report show them. A product and its requantisation are one node.
    """
    return {
        "before": _changed_and_adjacent(before, after.operations),
        "after": _changed_and_adjacent(after, before.operations),
    }


def check_changes(value: Any) -> None:
    """Raise ValueError unless `value`, read from a file, has the form that `changes` returns."""
    sides = [value.get(side) for side in ("before", "after")] if isinstance(value, dict) else [None]
    for rows in sides:
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ValueError("its changes are no lists of operators")
        for row in rows:
            for name, kind in NODE_FIELDS.items():
                if not isinstance(row.get(name), kind):
                    raise ValueError(f"an operator of its changes has no {name!r}")
            if not all(isinstance(name, str) for name in row["reads"]):
                raise ValueError("an operator of its changes reads what has no name")


def _changed_and_adjacent(graph: BytesGraph, others: Iterable[GraphOp]) -> list[dict[str, Any]]:
    """List the nodes of `graph` that are not in `others`, and those next to them, each with NODE_FIELDS."""
    unchanged = frozenset(others)
    changed = {_node_name(graph, operation) for operation in graph.operations if operation not in unchanged}
    shown = set(changed)
    for operation in graph.operations:
        name, nodes_read = _node_name(graph, operation), _nodes_read(graph, operation)
        if name in changed:
            shown |= {*nodes_read}
        elif changed & {*nodes_read}:
            shown.add(name)
    rows: dict[str, dict[str, Any]] = {
        name: {"name": name, "what": "input", "reads": [], "changed": False} for name in graph.inputs if name in shown
    }
    for operation in graph.operations:
        name = _node_name(graph, operation)
        if name in shown and operation.op != "requantise":
            reads = [node for node in _nodes_read(graph, operation) if node in shown]
            rows[name] = {"name": name, "what": _label(graph, operation), "reads": reads, "changed": name in changed}
    return [*rows.values()][:MAX_OPERATORS]


def _node_name(graph: BytesGraph, operation: GraphOp) -> str:
    """Return the name of an operation's node: its first result; for a product the requantised result."""
    readers = graph.readers.get(operation.outputs[0], [])
    return next((reader.outputs[0] for reader in readers if reader.op == "requantise"), operation.outputs[0])


def _nodes_read(graph: BytesGraph, operation: GraphOp) -> list[str]:
    """List the nodes and inputs that an operation reads, each once; constants are left out."""
    nodes = [
        _node_name(graph, graph.makers[name]) if name in graph.makers else name for name in operation.inputs
        if name in graph.makers or name in graph.inputs
    ]  # fmt: skip
    return [name for name in dict.fromkeys(nodes) if name != _node_name(graph, operation)]


def _label(graph: BytesGraph, operation: GraphOp) -> str:
    """Return the label of a node: operator, shape of the weights, shape of the result."""
    constant_shapes = [graph.constants[name].shape for name in operation.inputs if name in graph.constants]
    weights = max((shape for shape in constant_shapes if len(shape) > 1), key=len, default=())
    result = graph.kinds.get(_node_name(graph, operation))
    parts = [_operator_name(operation)]
    parts += ["×".join(map(str, weights))] if weights else []
    parts += ["→ " + "×".join(map(str, result.shape))] if result is not None and result.shape else []
    return " ".join(parts)


def _operator_name(operation: GraphOp) -> str:
    """Return the ONNX name of an operator, or ours where ONNX has none."""
    if operation.op == ONNX:
        return str(onnx.NodeProto.FromString(operation["proto"]).op_type)
    if operation.op == "map":
        return str(operation["f"].operator)
    return OPERATORS[operation.op].onnx or operation.op.replace("_", " ").capitalize()
