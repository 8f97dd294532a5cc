"""Parse graphs from ONNX's text form, and apply passes to them as text to text."""

from __future__ import annotations

from collections.abc import Callable
from textwrap import dedent

import onnx
import onnx.parser
import onnx_ir as ir

from celosia.compiler.graph.importer import import_static
from celosia.compiler.graph.passes import check
from celosia.compiler.graph.printer import text


def proto(source: str, opset: int = 21) -> onnx.ModelProto:
    """Parse a graph in ONNX's text form, which begins with `g (float[2] x) => ...`; outputs may lack types."""
    header = f'<ir_version: 10, opset_import: ["": {opset}, "com.microsoft": 1]>'
    model: onnx.ModelProto = onnx.parser.parse_model(f"{header} {source}")
    if any(not value.HasField("type") for value in model.graph.output):
        model = onnx.shape_inference.infer_shapes(model)
    return model


def model(source: str, opset: int = 21) -> ir.Model:
    return import_static(proto(source, opset))


def after(run: Callable[[ir.Model], object], source: str, opset: int = 21) -> str:
    """Return the text of the graph after `run`, without the graph's name and without indentation."""
    changed = model(source, opset)
    run(changed)
    check(changed.graph, "the pass")
    return text(changed.graph).removeprefix(changed.graph.name or "").strip()


def lines(expected: str) -> str:
    return dedent(expected).strip()
