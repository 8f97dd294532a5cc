"""A mask, however a model writes it, leaves the quantisation steps of a byte to the visible scores."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

pytest.importorskip("onnxruntime")

import celosia
from celosia.driver.accuracy.compare import compare
from celosia.hw.spec.config import PRESETS

FORMS = {
    "added": "masked = Add(scaled, lowest)",
    "replaced": "masked = Where(hidden, low, scaled)",
    "kept": "shown = Not(hidden) masked = Where(shown, scaled, low)",
    "by heads": "each = Reshape(scaled, apart) hid = Where(hidden, low, each) masked = Reshape(hid, joined)",
}


def masked(form: str, low: float) -> onnx.ModelProto:
    """Return causal attention of one head on x [1, 12, 32]."""
    rng = np.random.default_rng(0)
    hidden = np.triu(np.ones((1, 12, 12), bool), 1)
    constants = {
        "w": rng.normal(0, 0.4, (32, 48)).astype(np.float32), "u": rng.normal(0, 0.3, (16, 8)).astype(np.float32),
        "hidden": hidden, "low": np.float32(low), "lowest": np.where(hidden, low, 0).astype(np.float32),
        "root": np.float32(4), "apart": np.array([1, 1, 12, 12]), "joined": np.array([1, 12, 12]),
    }  # fmt: skip
    graph = onnx.parser.parse_graph(f"""masked (float[1, 12, 32] x) => (float[1, 12, 8] y) {{
        all = MatMul(x, w)
        q, k, v = Split<axis = 2, num_outputs = 3>(all)
        turned = Transpose<perm = [0, 2, 1]>(k)
        scores = MatMul(q, turned)
        scaled = Div(scores, root)
        {FORMS[form]}
        shares = Softmax(masked)
        mixed = MatMul(shares, v)
        y = MatMul(mixed, u)
    }}""")
    used = {name for node in graph.node for name in node.input}
    graph.initializer.extend(numpy_helper.from_array(a, name) for name, a in constants.items() if name in used)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


@pytest.mark.parametrize(
    "form, low, operators",
    [("added", -1e9, "all"), ("added", -np.inf, "attention"), ("replaced", -np.inf, "all"), ("kept", -1e9, "attention"),
     ("by heads", -np.inf, "attention")],
)  # fmt: skip
def test_hidden_scores_take_no_steps(form: str, low: float, operators: str, tmp_path: Path) -> None:
    onnx.save(masked(form, low), tmp_path / "float.onnx")
    samples, made = np.random.default_rng(1).normal(size=(6, 12, 32)).astype(np.float32), tmp_path / "int8.onnx"
    report = celosia.quantize(tmp_path / "float.onnx", {"x": samples}, made, operators=operators, config="tiny")
    assert report["outputs"][0]["sqnr_db"] > 20
    assert {"Softmax", "Add"} <= {row["op"] for row in report["operators"] if row["quantised"]}
    cfg = replace(PRESETS["pynq"], softmax=4)
    assert compare(made, {"x": samples[:1]}, config=cfg, check=False)["different"] == 0
