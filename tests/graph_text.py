"""Graphs from ONNX's text form, and passes on them as text to text."""

from __future__ import annotations

from collections.abc import Callable
from textwrap import dedent

import onnx
import onnx.parser
import onnx_ir as ir

from celosia.compiler.graph.importer import load
from celosia.compiler.graph.passes import check
from celosia.compiler.graph.printer import text


def proto(source: str, opset: int = 21) -> onnx.ModelProto:
    """The model of a graph in ONNX's text form, which begins with `g (float[2] x) => ...`; outputs may lack types."""
    header = f'<ir_version: 10, opset_import: ["": {opset}, "com.microsoft": 1]>'
    model: onnx.ModelProto = onnx.parser.parse_model(f"{header} {source}")
    if any(not value.HasField("type") for value in model.graph.output):
        model = onnx.shape_inference.infer_shapes(model)
    return model


def model(source: str, opset: int = 21) -> ir.Model:
    return load(proto(source, opset))


def after(run: Callable[[ir.Model], object], source: str, opset: int = 21) -> str:
    """The graph after `run`, without the name of the graph and without indentation."""
    changed = model(source, opset)
    run(changed)
    check(changed.graph, "the pass")
    return text(changed.graph).removeprefix(changed.graph.name or "").strip()


def lines(expected: str) -> str:
    return dedent(expected).strip()
