"""onnxruntime rounds once in a DequantizeLinear followed by a QuantizeLinear with other parameters."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from oracle import opened

import celosia

FIRST = "q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z)"
BODIES = {
    "between operators": f"{FIRST} p = QuantizeLinear(d, t, y) r = DequantizeLinear(p, t, y) o = Conv(r, w)",
    "wires": f"{FIRST} i = Dropout(d) j = Identity(i) p = QuantizeLinear(j, t, y) o = DequantizeLinear(p, t, y)",
    "three": f"""{FIRST} p = QuantizeLinear(d, t, y) r = DequantizeLinear(p, t, y)
        k = QuantizeLinear(r, u, z) o = DequantizeLinear(k, u, z)""",
    "read twice behind": f"""{FIRST} p = QuantizeLinear(d, t, y) r = DequantizeLinear(p, t, y)
        e = DequantizeLinear(p, t, y) a = Sqrt(e) o = Add(a, r)""",
    "read between": f"{FIRST} p = QuantizeLinear(d, t, y) r = DequantizeLinear(p, t, y) o = Add(d, r)",
    "returned between": f"{FIRST} p = QuantizeLinear(d, t, y) o = DequantizeLinear(p, t, y)",
    "the same": f"{FIRST} p = QuantizeLinear(d, s, z) o = DequantizeLinear(p, s, z)",
}


def compared(body: str, s: float, t: float, z: Any, y: Any) -> None:
    """Assert that a model of this body gives onnxruntime's bytes. s, t: scales. z, y: zero points."""
    rng = np.random.default_rng(0)
    constants = {"s": s, "t": t, "u": (s + t) / 3, "w": rng.normal(size=(5, 4, 2, 2))}
    graph = onnx.parser.parse_graph(f"g (float[1, 4, 9, 9] x) => (float o) {{ {BODIES[body]} }}")
    outputs = ["o", "q"] if body == "returned between" else ["o"]
    del graph.output[:]
    graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs)
    graph.initializer.extend(numpy_helper.from_array(np.asarray(a, np.float32), n) for n, a in constants.items())
    graph.initializer.extend([numpy_helper.from_array(z, "z"), numpy_helper.from_array(y, "y")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    feed = {"x": rng.normal(0, 100 * max(s, t), (1, 4, 9, 9)).astype(np.float32)}
    expected = opened(model, int8=True).run(None, feed)
    results = celosia.Runtime(celosia.compile(model, "tiny")).run(feed).outputs
    for name, array in zip(outputs, expected):
        np.testing.assert_allclose(results[name], array, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("body", BODIES)
def test_pairs_behind_pairs(body: str) -> None:
    compared(body, 0.04, 0.11, np.int8(-7), np.int8(11))
    compared(body, 0.013, 0.009, np.uint8(30), np.uint8(200))


def test_nothing_that_both_hold() -> None:
    compared("between operators", 0.04, 0.11, np.int8(-128), np.int8(127))
