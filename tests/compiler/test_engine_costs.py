"""An engine of the accelerator is used only where it takes less time than the CPU, which splits the launch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import celosia
from celosia.hw.spec.config import PRESETS

CFG = replace(PRESETS["pynq"], softmax=8, norm=8)


def model(rows: int, columns: int) -> onnx.ModelProto:
    """Return a product, a LayerNormalization of its rows, and another product."""
    random = np.random.default_rng(0)
    arrays = {
        "sx": np.float32(0.02), "sp": np.float32(0.03), "sw": np.float32(0.01), "zero": np.int8(0),
        "w8": random.integers(-90, 90, (columns, columns)).astype(np.int8),
        "gamma": np.ones(columns, np.float32), "beta": np.zeros(columns, np.float32),
    }  # fmt: skip
    graph = onnx.parser.parse_graph(f"""g (int8[1, {rows}, {columns}] q) => (int8 o) {{
        x = DequantizeLinear(q, sx, zero) w = DequantizeLinear(w8, sw, zero) p = MatMul(x, w)
        p_q = QuantizeLinear(p, sp, zero) p_d = DequantizeLinear(p_q, sp, zero)
        n = LayerNormalization(p_d, gamma, beta) n_q = QuantizeLinear(n, sp, zero) n_d = DequantizeLinear(n_q, sp, zero)
        y = MatMul(n_d, w) o = QuantizeLinear(y, sp, zero)
    }}""")
    graph.initializer.extend(numpy_helper.from_array(np.asarray(array), name) for name, array in arrays.items())
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize(("rows", "columns", "place"), [(64, 64, "accelerator"), (2048, 4, "cpu")])
def test_an_engine_must_pay(rows: int, columns: int, place: str) -> None:
    """Each row of a norm takes 32 cycles or more, so that the CPU is faster for many rows of four elements."""
    source, q = model(rows, columns), np.random.default_rng(1).integers(-128, 128, (1, rows, columns)).astype(np.int8)
    outputs = []
    for request, expected in (({}, place), ({"*": "accelerator"}, "accelerator")):
        program = celosia.compile(source, config=CFG, rounding="correct", place=request, check=False)
        (row,) = (row for row in program.placements if row["op"] == "QLinearNorm")
        assert row["place"] == expected and len(program.launches) == (1 if expected == "accelerator" else 2)
        assert expected == "accelerator" or row["reason"].startswith("weighed:")
        outputs.append(celosia.Runtime(program, device="functional").run({"q": q}).outputs["o"])
    np.testing.assert_array_equal(*outputs)
