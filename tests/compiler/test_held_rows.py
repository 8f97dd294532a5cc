"""Products by a constant matrix treat rows as images; operators that read their result know its layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from oracle import opened

import celosia
from celosia.compiler.graph.errors import ModelError
from celosia.hw.spec.config import PRESETS, Config

ROWS = Config(block_in=16, block_out=8)
"""No products of two activations, so that rows of matrices are images of one pixel."""


def model(text: str, **constants: Any) -> onnx.ModelProto:
    graph = onnx.parser.parse_graph(text)
    graph.initializer.extend(numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items())
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=9)


@pytest.mark.parametrize("config", [ROWS, PRESETS["tiny"]])
def test_a_factor_for_each_channel_of_what_a_product_gives(config: Config) -> None:
    """A factor per channel applies to the tensor's channels, not to those of the rows."""
    rng = np.random.default_rng(0)
    x, gate = (rng.integers(-128, 128, dims).astype(np.int8) for dims in ((1, 20, 2, 8), (1, 20, 1, 1)))
    gated = model(
        """g (int8[1, 20, 2, 8] x, int8[1, 20, 1, 1] gate) => (int8[1, 20, 2, 8] z) {
             y = QLinearMatMul(x, s, zero, w, s, zero, t, zero)
             z = com.microsoft.QLinearMul(y, s, zero, gate, s, zero, s, zero) }""",
        w=rng.integers(-128, 128, (8, 8)).astype(np.int8), s=np.float32(0.0625), t=np.float32(4), zero=np.int8(0),
    )  # fmt: skip
    program = celosia.compile(gated, config)
    assert program.launches
    output = celosia.Runtime(program).run({"x": x, "gate": gate}).outputs["z"]
    np.testing.assert_array_equal(output, opened(gated).run(None, {"x": x, "gate": gate})[0])


@pytest.mark.parametrize("config", [ROWS, PRESETS["tiny"]])
def test_a_matrix_that_does_not_fit_behind_a_window_that_is_left_out(config: Config) -> None:
    """The matrix must fit the size that onnxruntime's pooling gives; onnx infers one column more."""
    wrong = model(
        """g (int8[1, 8, 4, 4] x) => (int8[1, 8, 2, 5] z) {
             y = MaxPool<kernel_shape = [3, 1], strides = [2, 2], pads = [1, 0, 1, 0], ceil_mode = 1>(x)
             z = QLinearMatMul(y, s, zero, w, s, zero, s, zero) }""",
        w=np.ones((3, 5), np.int8), s=np.float32(1), zero=np.int8(0),
    )  # fmt: skip
    with pytest.raises(ModelError, match=r"do not multiply"):
        celosia.compile(wrong, config)


@pytest.mark.parametrize("axis", [1, 2, 3])
@pytest.mark.parametrize("dims", [(1, 8, 3, 5), (1, 8, 4, 1), (1, 8, 1, 3)])
def test_columns_of_what_lies_in_concatenations(axis: int, dims: tuple[int, ...]) -> None:
    """A Transpose copies columns as pixels of one row, also from a part of a concatenation inside another."""
    turned = model(
        f"""g (int8{list(dims)} x) => (int8[N, C, W, H] t, int8[N, C, H, W] z) {{
             r = com.microsoft.QLinearSigmoid(x, s, zero, s, zero)
             t = Transpose<perm = [0, 1, 3, 2]>(r)
             u = com.microsoft.QLinearConcat<axis = {axis}>(s, zero, x, s, zero, r, s, zero)
             z = com.microsoft.QLinearConcat<axis = {axis}>(s, zero, x, s, zero, u, s, zero) }}""",
        s=np.float32(0.0625), zero=np.int8(3),
    )  # fmt: skip
    x = np.random.default_rng(1).integers(-128, 128, dims).astype(np.int8)
    program = celosia.compile(turned, "tiny")
    outputs = celosia.Runtime(program).run({"x": x}).outputs
    for name, expected in zip(("t", "z"), opened(turned).run(None, {"x": x})):
        np.testing.assert_array_equal(outputs[name], expected)
    assert program.macs_total == 0 and program.launches
