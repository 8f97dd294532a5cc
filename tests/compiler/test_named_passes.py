"""Each rewrite of a graph is a named pass: nothing changes the graph before, between or after the passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from graph_text import text
from onnx import TensorProto, helper, numpy_helper

from celosia.compiler import frontend, lowering
from celosia.compiler.compile import compile
from celosia.compiler.graph.errors import ModelError
from celosia.compiler.graph.pipeline import IMPORT_PASSES, NEEDED, PASSES, for_hardware
from celosia.hw.spec.config import PRESETS
from celosia.models import demo_model_path

TINY = PRESETS["tiny"]
LAST = list(for_hardware(TINY))[-1].name
"""Name of the last pass."""


def rewritten_outside(source: Any, **options: Any) -> list[str]:
    """Compile, and return the pairs of stages between which the graph changed outside of a pass."""
    stages: list[tuple[str, ir.Model, str]] = []

    def watch(name: str, model: ir.Model) -> None:
        stages.append((name, model, text(model.graph)))

    compile(source, "tiny", watch=watch, records=None, **options)
    names = [name for name, _, _ in stages]
    changes = []
    last_of_import, imported = names.index("import") - 1, names.index("import")
    if stages[last_of_import][2] != stages[imported][2]:
        changes.append(f"{names[last_of_import]} to import")
    name, model, before = stages[-1]
    if text(model.graph) != before:
        changes.append(f"behind {name}")
    return changes


def small_model() -> onnx.ModelProto:
    """Return a model with a float product and an operator whose shape depends on data."""
    weights = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["p"], "product"),
        helper.make_node("Relu", ["p"], ["r"], "relu"),
        helper.make_node("NonZero", ["r"], ["y"], "places"),
    ]
    graph = helper.make_graph(
        nodes, "small", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [3, 8])],
        [helper.make_tensor_value_info("y", TensorProto.INT64, [2, None])], [numpy_helper.from_array(weights, "w")],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.parametrize("source", [demo_model_path, small_model])
def test_only_passes_rewrite(source: Callable[[], Any]) -> None:
    assert rewritten_outside(source()) == []


def _rename(model: ir.Model) -> None:
    node = next(iter(model.graph))
    node.attributes["planted"] = ir.AttrInt64("planted", 1)


def test_a_rewrite_before_the_passes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontend, "_mark_caches", lambda model, names: _rename(model))
    assert rewritten_outside(small_model(), check=False) == ["float-weights to import"]


def test_a_rewrite_behind_the_passes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    select = lowering.select

    def selecting(model: ir.Model, *rest: Any) -> Any:
        _rename(model)
        return select(model, *rest)

    monkeypatch.setattr(lowering, "select", selecting)
    assert rewritten_outside(small_model(), check=False) == [f"behind {LAST}"]


@pytest.mark.parametrize("name", [graph_pass.name for graph_pass in IMPORT_PASSES if graph_pass.name not in NEEDED])
def test_passes_of_the_import_can_be_left_out(name: str) -> None:
    seen: list[str] = []
    compile(small_model(), "tiny", without=name, watch=lambda name, _: seen.append(name))
    everything = (*IMPORT_PASSES, *PASSES, *for_hardware(TINY))
    assert name not in seen and {*seen} == {each.name for each in everything} - {name} | {"import"}


def test_needed_passes_stay() -> None:
    for name in NEEDED:
        with pytest.raises(ModelError, match=name):
            compile(small_model(), "tiny", without=name)
