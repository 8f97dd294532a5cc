"""Means of rows, and numbers for rows, run on the accelerator with onnxruntime's bytes, as products by ones."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper, numpy_helper

import celosia
from celosia.compiler import numerics
from celosia.compiler.graph.row_products import _scale_of_ones
from celosia.hw.spec.config import PRESETS, Config

from ..configs import CONFIGS
from ..oracle import opened

BETWEEN = "{0}_q = QuantizeLinear({0}, s{0}, z{0}) {0}_d = DequantizeLinear({0}_q, s{0}, z{0}) "
RMS = (
    "p = MatMul(x, w)" + BETWEEN.format("p") + "a = Mul(p_d, p_d) " + BETWEEN.format("a")
    + "m = GlobalAveragePool(a_d) " + BETWEEN.format("m") + "e = Add(m_d, tiny) r = Sqrt(e) f = Reciprocal(r) "
    + BETWEEN.format("f")
)  # fmt: skip
ENDS = {
    "factor": "y = Mul(p_d, f_d)",
    "factor first": "y = Mul(f_d, p_d)",
    "sum": "y = Add(p_d, f_d)",
}
SCALES = {"x": 0.02, "p": 0.05, "a": 0.15, "m": 0.06, "f": 0.02, "y": 0.0417}


def model(end: str, dtype: str, size: tuple[int, int, int], columns: int) -> onnx.ModelProto:
    """Return a product and a normalisation of its rows, whose tensors are all rounded to bytes."""
    random, zero = np.random.default_rng(columns), {"int8": 0, "uint8": 128}[dtype]
    one_sided = {"int8": -128, "uint8": 0}[dtype]
    arrays = {f"s{name}": np.float32(scale) for name, scale in SCALES.items()}
    arrays |= {f"z{name}": np.array(one_sided if name in "amf" else zero + 3, dtype) for name in SCALES}
    arrays |= {
        "w8": random.integers(-90, 90, (size[2], columns)).astype(np.int8), "sw": np.float32(0.01),
        "zw": np.int8(0), "tiny": np.float32(0.1),
    }  # fmt: skip
    graph = onnx.parser.parse_graph(f"""g ({dtype}[{size[0]}, {size[1]}, {size[2]}] q) => ({dtype} o) {{
        x = DequantizeLinear(q, sx, zx) w = DequantizeLinear(w8, sw, zw) {RMS} {ENDS[end]} o = QuantizeLinear(y, sy, zy)
    }}""")
    graph.initializer.extend(numpy_helper.from_array(np.asarray(array), name) for name, array in arrays.items())
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


CASES = [
    ("factor", "int8", (1, 9, 24), 32, PRESETS["pynq"]),
    ("factor first", "uint8", (1, 5, 12), 21, CONFIGS["4x8"]),
    ("sum", "int8", (1, 6, 8), 10, CONFIGS["8x4"]),
    ("factor", "uint8", (1, 7, 8), 13, CONFIGS["batch2"]),
    ("factor", "int8", (1, 8, 8), 16, CONFIGS["8x8-bus16"]),
]


@pytest.mark.parametrize(("end", "dtype", "size", "columns", "cfg"), CASES)
def test_a_quantised_normalisation_of_rows_is_one_launch(
    end: str, dtype: str, size: tuple[int, int, int], columns: int, cfg: Config
) -> None:
    onnx_model, random = model(end, dtype, size, columns), np.random.default_rng(1)
    info = np.iinfo(dtype)
    q = random.integers(info.min, info.max + 1, size).astype(dtype)
    q[0, 0] = 3 + info.min + 128  # a row of zeros
    program = celosia.compile(onnx_model, config=cfg, place={"*": "accelerator"})
    assert len(program.launches) == 1 and {row["place"] for row in program.placements} == {"accelerator"}
    assert program.macs_accelerator == program.macs_total == size[1] * size[2] * columns
    y = celosia.Runtime(program, device="functional").run({"q": q}).outputs["o"]
    (expected,) = opened(onnx_model, int8=True).run(None, {"q": q})
    np.testing.assert_array_equal(y, expected)
    assert len(np.unique(expected)) > 20


def test_images_are_not_rows() -> None:
    """A mean of each channel of a sequence [N, C, L] stays a pooling, and its factors stay those of channels."""
    body = "c = Conv(x, w)" + BETWEEN.format("p").replace("(p,", "(c,") + "m = GlobalAveragePool(p_d) "
    body += BETWEEN.format("m") + "y = Mul(p_d, m_d) o = QuantizeLinear(y, sy, zy)"
    graph = onnx.parser.parse_graph(f"""g (int8[1, 8, 12] q) => (int8 o) {{
        x = DequantizeLinear(q, sx, zx) w = DequantizeLinear(w8, sw, zw) {body}
    }}""")
    arrays = {f"s{name}": np.float32(SCALES[name]) for name in "xpmy"} | {f"z{name}": np.int8(3) for name in "xpmy"}
    arrays |= {"w8": np.ones((8, 8, 1), np.int8), "sw": np.float32(0.1), "zw": np.int8(0)}
    graph.initializer.extend(numpy_helper.from_array(np.asarray(array), name) for name, array in arrays.items())
    onnx_model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    program = celosia.compile(onnx_model, config="tiny", place={"*": "accelerator"})
    assert "QLinearGlobalAveragePool" in {row["op"] for row in program.placements}
    assert "QGemm" not in {row["op"] for row in program.placements} and len(program.launches) == 1


@given(st.floats(1e-4, 1), st.floats(1e-4, 1), st.integers(1, 700), st.integers(-128, 127))
def test_ones_round_as_the_average(sx: float, sy: float, count: int, zero: int) -> None:
    scale = _scale_of_ones(sx, sy, count)
    if scale is not None:
        sums = np.arange(-255 * count, 255 * count + 1)
        of_ones, of_average = numerics.conv_scale(sx, scale, sy), numerics.global_average_scale(sx, sy, count)
        expected = np.clip(np.rint(sums.astype(np.float32) * of_average) + zero, -128, 127)
        result = numerics.requantize(sums.astype(np.int32), 0, *numerics.scale_to_multiplier(of_ones), zero)
        np.testing.assert_array_equal(result, expected)


def test_most_averages_have_such_a_scale() -> None:
    random = np.random.default_rng(0)
    scales = [_scale_of_ones(*random.uniform(0.001, 0.2, 2), int(random.integers(2, 513))) for _ in range(100)]
    assert sum(scale is not None for scale in scales) > 90
