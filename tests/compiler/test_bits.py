"""Products of few bits by popcount are exact for any shape, levels, padding, zero point and processor."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import emulated
import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper
from thorough import some

import celosia
from celosia.compiler import expr as T
from celosia.compiler.cpu.kernels import compile_op
from celosia.compiler.cpu.llvm import compile_function, link_library
from celosia.compiler.cpu.schedule import schedule
from celosia.compiler.expr.math_functions import ONES
from celosia.compiler.ops import bit_serial
from celosia.compiler.ops.bit_serial import BitLevels
from celosia.compiler.target import AMX_FEATURES, TARGETS, Target, compiling_for, this_processor
from celosia.driver.runtime import Runtime

from .narrow_models import F32, Array, Sketch, by_onnxruntime, limits, weights

LEVELS = [
    BitLevels(0, 1, 1),
    BitLevels(-1, 2, 1),
    BitLevels(0, 1, 2),
    BitLevels(-2, 1, 2),
    BitLevels(-3, 2, 2),
    BitLevels(-4, 8, 1),
]


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute all products by bits that can be computed so."""
    monkeypatch.setattr(bit_serial, "is_faster", lambda *_: True)


# The function ---------------------------------------------------------------------------------------------------------


def bits_set(x: NDArray[Any], width: int) -> NDArray[Any]:
    return np.array([bin(int(value) & (1 << width) - 1).count("1") for value in x])


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32", "uint32", "int64", "uint64"])
def test_popcount(dtype: str) -> None:
    info = np.iinfo(dtype)
    x = np.random.default_rng(0).integers(info.min, info.max, 37, dtype=dtype, endpoint=True)
    x[:3] = info.min, info.max, 0
    given = T.placeholder(x.shape, dtype, "x")
    function = T.lower(schedule([T.compute(x.shape, lambda i: T.call("popcount", given[i]), "y")]), [given])
    for output in (T.interpret(function, x)[0], compile_function(function)(x)[0]):
        np.testing.assert_array_equal(output, bits_set(x, info.bits))


@pytest.mark.parametrize("features", ["", "avx2", "avx512bw avx2", "avx512bitalg avx512vnni avx512vl"])
def test_four_counts_in_a_word(features: str) -> None:
    """`popcount4` counts the bits of each byte of a word, in vectors of any number of lanes."""
    if missing := set(features.split()) - this_processor().features:
        pytest.skip(f"this processor has no {', '.join(sorted(missing))}")
    rng = np.random.default_rng(1)
    for n in (1, 3, 4, 16, 21):
        a, b = rng.integers(0, 1 << 32, (2, 5, n), dtype=np.uint32)
        a[0], b[0] = 0xFFFFFFFF, 0xFFFFFFFF
        left, right = (T.placeholder(a.shape, "uint32", name) for name in "ab")
        k, ones = T.reduce_axis(5, "k"), T.wrap(ONES, "uint32")

        def words(i: Any, left: Any = left, right: Any = right, k: Any = k) -> Any:
            u, v = left[k, i], right[k, i]
            return T.call("popcount4", u & v) + (T.call("popcount4", u ^ (v << 3)) << 1)

        y = T.compute((n,), lambda i, k=k, ones=ones: T.sum(T.call("dot4", words(i), ones), k), "y")
        function = T.lower(schedule([y]), [left, right])
        T.verify(function)
        assert str(T.parse(str(function))) == str(function)
        one, two = (bits_set(each.ravel(), 32).reshape(a.shape).sum(0) for each in (a & b, a ^ (b << np.uint32(3))))
        for output in (
            T.interpret(function, a, b)[0],
            compile_function(function, frozenset(features.split()))(a, b)[0],
        ):
            np.testing.assert_array_equal(output, one + 2 * two)


# Levels ---------------------------------------------------------------------------------------------------------


def test_levels_hold_their_values() -> None:
    for values in itertools.chain.from_iterable(itertools.combinations(range(-9, 9, 1), n) for n in (1, 2, 3, 4)):
        result = BitLevels.of(values)
        if result is None:
            assert max(values) - min(values) > 3
            continue
        assert set(values) <= set(result.values) and result.bits <= 2
    assert BitLevels.of(range(5)) is None and BitLevels.of([-3, -1, 1, 3]) == BitLevels(-3, 2, 2)


# Products against numpy -----------------------------------------------------------------------------------------------


def drawn(rng: Any, levels: BitLevels, shape: tuple[int, ...], dtype: str) -> Array:
    return rng.choice(np.array(levels.values), shape).astype(dtype)


@pytest.mark.parametrize("seed", some(range(60), range(3)))
def test_products(seed: int, always: None) -> None:
    rng = np.random.default_rng(seed)
    m, k, n = (int(rng.integers(1, most)) for most in (20, 150, 40))
    x, w = (LEVELS[rng.integers(len(LEVELS))] for _ in range(2))
    batch = (2,) * int(rng.integers(2))
    a, b = drawn(rng, x, (*batch, m, k), "int8"), drawn(rng, w, (k, n), "int8")
    za, zb = np.int8(rng.integers(-9, 9)), rng.integers(-9, 9, (n,)).astype(np.int8)
    attrs = {bit_serial.LEVELS: {0: x, 1: w}}
    kernel = compile_op("MatMulInteger", attrs, [(a.shape, "int8"), b, ((), "int8"), ((n,), "int8")])
    assert "popcount4" in kernel.loops
    expected = (a.astype(np.int64) - za) @ (b.astype(np.int64) - zb)
    np.testing.assert_array_equal(kernel(a, b, np.array(za), zb)[0], expected)


def on_arm(target: str, channels: int, outputs: int) -> list[tuple[Any, tuple[Array, ...]]]:
    """Return a convolution of 2 x 2 bits by bytes and by bits, each as (kernel, inputs)."""
    rng, kernels = np.random.default_rng(0), []
    x, w = drawn(rng, LEVELS[2], (1, channels, 7, 7), "uint8"), drawn(rng, LEVELS[3], (outputs, channels, 3, 3), "int8")
    zero = np.array(1, np.uint8)
    for attrs in ({}, {bit_serial.LEVELS: {0: LEVELS[2], 1: LEVELS[3]}}):
        with compiling_for(TARGETS[target]):
            types = [(x.shape, "uint8"), w, zero]
            kernels.append((compile_op("ConvInteger", {"pads": [1] * 4, **attrs}, types), (x, w, zero)))
    return kernels


@pytest.mark.parametrize("target", TARGETS)
def test_the_same_sums_on_arm(target: str, always: None, tmp_path: Path) -> None:
    emulated.require(target)
    calls = on_arm(target, 36, 5)
    library = link_library([kernel for kernel, _ in calls], TARGETS[target])
    (by_bytes,), (by_bits,) = emulated.call(target, library, calls, tmp_path)
    np.testing.assert_array_equal(by_bits, by_bytes)


@pytest.mark.thorough
@pytest.mark.parametrize("target, most", [("armv7", 0.55), ("aarch64", 0.72)])
def test_fewer_instructions_on_arm(target: str, most: float, always: None, tmp_path: Path) -> None:
    """Popcount takes fewer instructions than byte products, which NEON multiplies in pairs.

    The counts include the program around the kernel.
    """
    emulated.require(target)
    counts = []
    for kernel, inputs in on_arm(target, 64, 24):
        library = link_library([kernel], TARGETS[target])
        counts.append(emulated.instructions(target, library, kernel, inputs, tmp_path))
    assert counts[1] < most * counts[0]


# Models beside onnxruntime --------------------------------------------------------------------------------------------


def activations(s: Sketch, x: str) -> tuple[str, type]:
    """Append a quantisation of x to few bits; return its name and the byte type.

    It uses an ONNX type of two bits, or bytes and a Clip as some exporters write it. The twin has only the latter.
    """
    kind, real = s.choose("int2", "uint2"), s.choose(True, False)
    low, high = limits(kind)
    if not real:
        high = s.int(low + 1, high - 1) + 1
    zero, step, wide = s.int(low, high - 1), s.constant(F32(s.rng.uniform(0.5, 2))), np.int8 if low else np.uint8
    if real and not s.wide:
        point = s.narrow(np.array(zero), kind)
        return s.node("DequantizeLinear", s.node("QuantizeLinear", x, step, point), step, point), wide
    point = s.constant(np.array(zero, wide))
    ends = [s.constant(np.array(end, wide)) for end in (low, high - 1)]
    clipped = s.node("Clip", s.node("QuantizeLinear", x, step, point), *ends)
    return s.node("DequantizeLinear", clipped, step, point), wide


def model_of_few_bits(s: Sketch) -> onnx.ModelProto:
    """Return a Conv, MatMul or Gemm of few bits between quantised tensors."""
    op, n = s.choose("Conv", "Conv", "MatMul", "Gemm"), s.int(1, 20)
    if op == "Conv":
        group, each = s.choose((1, s.int(1, 70)), (2, s.choose(8, 16, 40)))
        n *= group
        kernel = [s.int(1, 3) for _ in range(2)]
        x = s.input((s.int(1, 2), group * each, s.int(3, 8), s.int(3, 8)), False)
        shape, axis = (n, each, *kernel), 0
        pads = [s.int(0, size - 1) for size in kernel * 2]
        attrs: dict[str, Any] = {"group": group, "strides": [s.int(1, 2) for _ in kernel], "pads": pads}
    else:
        x, axis, attrs = s.input((s.int(16, 20), s.int(1, 140)), False), 1, {}
        shape = (s.feed[x].shape[1], n)
    xf, wide = activations(s, x)
    if s.choose(0, 1):
        w = weights(s, s.choose("int2", "uint2"), shape, s.choose(None, axis))[0]
    else:
        signs = s.constant(s.rng.choice(np.array([-1, 1], np.int8), shape))
        w = s.node("DequantizeLinear", signs, s.constant(F32(0.03)))
    to = s.constant(F32(s.rng.uniform(0.02, 0.3))), s.constant(wide(s.int(0, 100)))
    y = s.node("QuantizeLinear", s.node(op, xf, w, **attrs), *to)
    s.opset = 25
    return s.model(s.node("DequantizeLinear", y, *to))


def compared(seed: int) -> tuple[int, bool]:
    """Run model number `seed`; return how many elements differ from onnxruntime's, and whether it runs by bits."""
    sketch, twin = Sketch(seed), Sketch(seed, wide=True)
    program = celosia.compile(model_of_few_bits(sketch), accelerator=False, check=False)
    (output,) = Runtime(program).run(sketch.feed).outputs.values()
    expected = by_onnxruntime(model_of_few_bits(twin), twin.feed)
    assert output.shape == expected.shape
    reasons = [row["reason"] for row in program.placements if "popcount" in row["reason"]]
    by_bits = any("popcount4" in kernel.loops for kernel in program.kernels)
    assert len(reasons) == by_bits
    return int((output != expected).sum()), by_bits


@pytest.mark.parametrize("seed", some(range(200), range(3)))
def test_random_models(seed: int, always: None) -> None:
    different, by_bits = compared(seed)
    assert not different and by_bits


@pytest.mark.thorough
def test_the_comparison_sees_a_wrong_padding(monkeypatch: pytest.MonkeyPatch, always: None) -> None:
    monkeypatch.setattr(BitLevels, "code_of", lambda self, value: 0)
    assert any(compared(seed)[0] for seed in range(7))


def test_levels_are_found_behind_what_moves_them(always: None) -> None:
    """The compiler finds levels through operators that only move elements; without known levels it multiplies bytes."""
    rng, kind = np.random.default_rng(0), TensorProto.UINT8

    def model(*more: onnx.NodeProto, name: str) -> onnx.ModelProto:
        ends = [helper.make_tensor(end, kind, (), [value]) for end, value in (("low", 1), ("high", 3))]
        w = helper.make_tensor("w", TensorProto.INT8, (5, 64, 3, 3), rng.choice([-1, 1], 5 * 64 * 9).tolist())
        nodes = [*more, helper.make_node("ConvInteger", [name, "w"], ["y"])]
        x = helper.make_tensor_value_info("x", kind, (1, 32, 8, 8))
        graph = helper.make_graph(nodes, "bits", [x], [onnx.ValueInfoProto(name="y")], [*ends, w])
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)

    clip = helper.make_node("Clip", ["x", "low", "high"], ["a"])
    both = helper.make_node("Concat", ["a", "a"], ["b"], axis=1)
    pool = helper.make_node("MaxPool", ["b"], ["c"], kernel_shape=[2, 2])
    turn = helper.make_node("Transpose", ["c"], ["d"], perm=[0, 1, 3, 2])
    unknown = helper.make_node("Concat", ["x", "a"], ["b"], axis=1)
    feed = {"x": rng.integers(0, 256, (1, 32, 8, 8)).astype(np.uint8)}
    for concatenated, by_bits in ((both, True), (unknown, False)):
        source = model(clip, concatenated, pool, turn, name="d")
        program = celosia.compile(source, accelerator=False)
        assert any("popcount4" in kernel.loops for kernel in program.kernels) is by_bits
        np.testing.assert_array_equal(Runtime(program).run(feed).outputs["y"], by_onnxruntime(source, feed))


# What is faster -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "features, x, w, by_bits",
    [
        ("avx512vnni avx512vl avx512bitalg", 1, 1, True),
        ("avx512vnni avx512vl avx512bitalg", 2, 2, False),
        ("avx2", 2, 2, True),
        ("neon", 2, 2, True),
        ("neon fp-armv8 i8mm", 2, 2, False),
        (" ".join(sorted(AMX_FEATURES | {"avx512vnni", "avx512bitalg"})), 1, 1, False),
    ],
)
def test_what_pays_depends_on_the_processor(features: str, x: int, w: int, by_bits: bool) -> None:
    with compiling_for(Target(64, 32, frozenset(features.split()), machine="other")):
        assert bit_serial.is_faster((BitLevels(0, 1, x), BitLevels(0, 1, w)), 256, 9, 256) is by_bits
        assert not bit_serial.is_faster((BitLevels(0, 1, x), BitLevels(0, 1, w)), 3, 9, 64)
