"""Kernels write only their outputs, also when LLVM vectorises loops."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import celosia
from celosia.compiler.cpu.llvm.machine import stores_one_lane

GUARD = 64
MODEL = """
<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>
g (uint8[2, 3, 9, {n}] a, uint8[1, 1, 1, {n}] b) => (uint8[2, 3, 9, {n}] y)
<float s = {{0.1}}, uint8 z = {{3}}, float t = {{0.2}}, float u = {{0.00390625}}, uint8 o = {{0}}>
{{ q = com.microsoft.QLinearAdd(a, s, z, b, t, z, t, z)
   y = com.microsoft.QLinearSoftmax<axis = -1, opset = 13>(q, t, z, u, o) }}
"""


@pytest.mark.parametrize("n", [5, 9, 13, 17])
def test_a_softmax_of_sums_writes_its_own_bytes(n: int) -> None:
    """A kernel on rows of nine writes nine bytes. LLVM once stored the last byte as four."""
    program = celosia.compile(onnx.parser.parse_model(MODEL.format(n=n)), check=False)
    (kernel,) = program.kernels
    random = np.random.default_rng(n)
    inputs = [
        random.integers(0, 256, shape).astype(dtype) if dtype == "uint8" else random.random(shape).astype(dtype)
        for dtype, shape in kernel.inputs
    ]
    ((dtype, shape),) = kernel.outputs
    size = int(np.prod(shape))
    memory = np.full(size + 2 * GUARD, 0xA5, np.uint8)
    kernel.run(inputs, [memory[GUARD:-GUARD].view(dtype).reshape(shape)])
    assert (memory[:GUARD] == 0xA5).all() and (memory[-GUARD:] == 0xA5).all()


@pytest.mark.parametrize(
    ("mask", "one"),
    [("i1 true, i1 false", True), ("i1 false, i1 false", False), ("i1 true, i1 true", False), ("i1 true", True)],
)
def test_stores_of_one_lane_are_seen(mask: str, one: bool) -> None:
    call = f"  tail call void @llvm.masked.store.v2i8.p0(<2 x i8> %1, ptr align 1 %2, <2 x i1> <{mask}>)"
    assert stores_one_lane(f"define void @f() {{\n{call}\n}}\n") == one
    assert not stores_one_lane("declare void @llvm.masked.store.v2i8.p0(<2 x i8>, ptr captures(none), <2 x i1>)")
