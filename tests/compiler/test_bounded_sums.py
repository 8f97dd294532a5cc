"""onnxruntime computes sums and products of bytes in floats if a Clip or Relu after them changes bytes."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from oracle import opened
from thorough import paired

import celosia

Meanings = tuple[float, int, float, int, float, int]
ANY = (0.011277494952082634, 128, 0.05978838354349136, 128, 0.014644221402704716, 128)
POWERS = (2**-5, 71, 2**-5, 208, 2**-4, 171)
"""Half of the sums are ties, and the zero point is odd."""


def bounded(op: str, bound: str, meanings: Meanings, constant: bool) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """Return a model of `op` on two uint8 images with a bound of the result, and images with all pairs of bytes."""
    sa, za, sb, zb, sy, zy = meanings
    every = np.arange(256, dtype=np.uint8)
    images = dict(zip("ab", (np.ascontiguousarray(values[None, None]) for values in np.meshgrid(every, every))))
    graph = onnx.parser.parse_graph(f"""g (uint8[1, 1, 256, 256] a, uint8[1, 1, 256, 256] b) => (uint8 y) {{
        x = DequantizeLinear(a, sa, za)
        z = DequantizeLinear(b, sb, zb)
        both = {op}(x, z)
        bounded = {bound}
        y = QuantizeLinear(bounded, sy, zy)
    }}""")
    arrays = {name: np.float32(scale) for name, scale in (("sa", sa), ("sb", sb), ("sy", sy))}
    arrays |= {name: np.uint8(zero) for name, zero in (("za", za), ("zb", zb), ("zy", zy))}
    if bound.startswith("Clip"):
        arrays |= {"low": np.float32(-0.3), "high": np.float32(0.6)}
    if constant:
        arrays["b"] = images.pop("b") % 7
        del graph.input[1]
    graph.initializer.extend(numpy_helper.from_array(np.asarray(array), name) for name, array in arrays.items())
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), images


PAIRS = [
    ("Add", "Relu(both)", ANY, True),
    ("Add", "Clip(both, low, high)", ANY, True),
    ("Add", "Relu(both)", POWERS, False),
    ("Mul", "Relu(both)", ANY, True),
    ("Mul", "Relu(both)", (2**-5, 71, 2**-5, 208, 2**-6, 131), False),
]


@pytest.mark.parametrize(("pair", "constant"), paired(PAIRS, [False, True]))
def test_all_pairs(pair: tuple[str, str, Meanings, bool], constant: bool) -> None:
    op, bound, meanings, on_accelerator = pair
    model, images = bounded(op, bound, meanings, constant)
    (expected,) = opened(model, int8=True).run(None, images)
    for accelerator in (True, False):
        program = celosia.compile(model, "tiny", accelerator=accelerator)
        np.testing.assert_array_equal(celosia.Runtime(program).run(images).outputs["y"], expected)
        assert constant or bool(program.launches) == (accelerator and on_accelerator)
