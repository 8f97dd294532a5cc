"""Products of bytes of any shape, type and zero point equal numpy's int64, on every kind of processor."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from thorough import paired, tries
from thorough import some as cases

import celosia
from celosia.compiler import expr as T
from celosia.compiler.cpu.kernels import CpuFunction, compile_op
from celosia.compiler.cpu.llvm import compile_function
from celosia.compiler.ops.integer import pack_quad
from celosia.compiler.ops.registry import CpuNode, InputType
from celosia.compiler.target import AMX_FEATURES, compiling_for, this_processor

from ..oracle import opened

BYTES = st.sampled_from(("int8", "uint8"))


def some(seed: int, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
    info = np.iinfo(dtype)
    return np.random.default_rng(seed).integers(info.min, info.max + 1, shape).astype(dtype)


def less_zero(x: NDArray[Any], zero: NDArray[Any]) -> NDArray[np.int64]:
    return x.astype(np.int64) - zero.astype(np.int64)


@settings(deadline=None, max_examples=tries(12))
@given(
    st.integers(1, 40), st.integers(1, 40), st.integers(1, 70), BYTES, BYTES, st.booleans(), st.integers(0, 2),
    st.integers(0, 99),
)  # fmt: skip
def test_matrix_products(
    m: int, k: int, n: int, a_type: str, b_type: str, by_column: bool, batch: int, seed: int
) -> None:
    a, b = some(seed, (2,) * batch + (m, k), a_type), some(seed + 1, (2,) * (batch // 2) + (k, n), b_type)
    za, zb = some(seed + 2, (), a_type), some(seed + 3, (n,) if by_column else (), b_type)
    kernel = compile_op("MatMulInteger", {}, [(x.shape, x.dtype.name) for x in (a, b, za, zb)])
    np.testing.assert_array_equal(kernel(a, b, za, zb)[0], less_zero(a, za) @ less_zero(b, zb))


@pytest.mark.parametrize("n", cases(range(1, 24), (1, 5, 9, 11, 13, 17, 21)))  # those of one lane
def test_quantised_products_of_any_number_of_columns(n: int) -> None:
    """Products of 1 to 23 columns compile. LLVM crashed when one lane of a vector was left for an instruction."""
    x, w = some(n, (10, 11), "uint8"), some(n + 1, (11, n), "int8")
    zx, zw, zy = np.uint8(3), np.int8(0), np.uint8(7)
    sx, sw, sy = (np.float32(scale) for scale in (0.02, 0.01, 0.05))
    constants = {"sx": sx, "zx": zx, "w": w, "sw": sw, "zw": zw, "sy": sy, "zy": zy}
    graph = helper.make_graph(
        [helper.make_node("QLinearMatMul", ["x", *constants], ["y"])], "product",
        [helper.make_tensor_value_info("x", TensorProto.UINT8, x.shape)],
        [helper.make_tensor_value_info("y", TensorProto.UINT8, (10, n))],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    program = celosia.compile(model, "tiny", accelerator=False, check=False)
    with celosia.Runtime(program) as runtime:
        output = runtime.run({"x": x}).outputs["y"]
    sums = (less_zero(x, np.asarray(zx)) @ less_zero(w, np.asarray(zw))).astype(np.float32)
    np.testing.assert_array_equal(output, np.clip(np.rint(sums * (sx * sw / sy)) + 7, 0, 255).astype(np.uint8))


def program_of_a_row(width: int) -> celosia.Program:
    """Compile a depthwise convolution of a row by three, padded on both sides, with two outputs for each channel."""
    constants = {
        "sx": np.float32(0.02), "zx": np.int8(0), "w": some(1, (8, 1, 1, 3), "int8"), "sw": np.float32(0.01),
        "zw": np.int8(0), "sy": np.float32(0.05), "zy": np.int8(0),
    }  # fmt: skip
    graph = helper.make_graph(
        [helper.make_node("QLinearConv", ["x", *constants], ["y"], group=4, pads=[0, 2, 0, 1])], "row",
        [helper.make_tensor_value_info("x", TensorProto.INT8, (1, 4, 1, width))],
        [helper.make_tensor_value_info("y", TensorProto.INT8, (1, 8, 1, width + 1))],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return celosia.compile(model, "tiny", accelerator=False, check=False)


@pytest.mark.parametrize("widths", cases([[11, 16], [*range(1, 20)]], [[11, 16]]), ids=len)
def test_rows_of_any_width_end_in_machine_code(widths: list[int], tmp_path: Path) -> None:
    """Rows of 1 to 19 elements compile. LLVM never ended for a vector of 11 lanes."""
    code = f"from {__name__} import program_of_a_row\nfor width in {widths}: program_of_a_row(width)"
    environment = os.environ | {"CELOSIA_CACHE": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], env=environment, timeout=120, check=True)


def convolved(
    x: NDArray[Any], w: NDArray[Any], strides: list[int], dilations: list[int], pads: list[int], group: int
) -> NDArray[Any]:
    """Return a two-dimensional convolution, computed by its definition."""
    x = np.pad(x, ((0, 0), (0, 0), (pads[0], pads[2]), (pads[1], pads[3])))
    m, cg, *kernel = w.shape
    out = [(n - (k - 1) * d - 1) // s + 1 for n, k, d, s in zip(x.shape[2:], kernel, dilations, strides)]
    y = np.zeros((x.shape[0], m, *out), np.int64)
    for ky, kx in np.ndindex(*kernel):
        rows, cols = (slice(k * d, k * d + (o - 1) * s + 1, s) for k, d, o, s in zip((ky, kx), dilations, out, strides))
        for g in range(group):
            part = slice(g * m // group, (g + 1) * m // group)
            image = x[:, g * cg : (g + 1) * cg, rows, cols]
            y[:, part] += np.einsum("nchw,mc->nmhw", image, w[part, :, ky, kx])
    return y


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[NDArray[Any], NDArray[Any], dict[str, Any]]:
    def pair(low: int, high: int) -> list[int]:
        return [draw(st.integers(low, high)), draw(st.integers(low, high))]

    group, cg, mg = draw(st.sampled_from([(1, 3, 5), (1, 8, 9), (2, 4, 4), (3, 5, 1), (6, 1, 1), (4, 2, 3), (1, 1, 8)]))
    kernel, dilations, strides, pads = pair(1, 5), pair(1, 2), pair(1, 3), pair(0, 2) + pair(0, 2)
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilations)]
    least = [max(1, r - before - after) for r, before, after in zip(reach, pads, pads[2:])]
    size = [draw(st.integers(n, n + 30)) for n in least]
    x = some(draw(st.integers(0, 99)), (draw(st.integers(1, 2)), group * cg, *size), draw(BYTES))
    w = some(draw(st.integers(0, 99)), (group * mg, cg, *kernel), draw(BYTES))
    return x, w, {"group": group, "strides": strides, "dilations": dilations, "pads": pads}


@settings(deadline=None, max_examples=tries(12))
@given(convolutions(), st.booleans(), st.integers(0, 99))
def test_convolutions(case: tuple[NDArray[Any], NDArray[Any], dict[str, Any]], by_channel: bool, seed: int) -> None:
    x, w, attrs = case
    zx, zw = some(seed, (), x.dtype.name), some(seed + 1, w.shape[:1] if by_channel else (), w.dtype.name)
    kernel = compile_op("ConvInteger", attrs, [(v.shape, v.dtype.name) for v in (x, w, zx, zw)])
    wide = zw.reshape(-1, 1, 1, 1) if by_channel else zw
    np.testing.assert_array_equal(kernel(x, w, zx, zw)[0], convolved(less_zero(x, zx), less_zero(w, wide), **attrs))


@pytest.mark.parametrize("dilations, pads", [([2, 2], [1, 1, 1, 1]), ([1, 2], [0, 2, 0, 0]), ([1, 1], [2, 1, 0, 0])])
def test_a_kernel_as_large_as_the_image_need_not_lie_on_it(dilations: list[int], pads: list[int]) -> None:
    x, w, zx = some(0, (1, 3, 3, 3), "uint8"), some(1, (4, 3, 3, 3), "int8"), some(2, (), "uint8")
    attrs: dict[str, Any] = {"dilations": dilations, "pads": pads, "strides": [3, 3]}
    kernel = compile_op("ConvInteger", attrs, [(v.shape, v.dtype.name) for v in (x, w, zx)])
    (y,) = kernel(x, w, zx)
    np.testing.assert_array_equal(y, convolved(less_zero(x, zx), w.astype(np.int64), group=1, **attrs))
    assert y.shape == (1, 4, 1, 1)


@pytest.mark.parametrize(
    "x, w", [((0, 4, 3, 3), (4, 4, 3, 3)), ((1, 0, 5, 5), (4, 0, 3, 3)), ((2, 4, 5, 5), (0, 4, 1, 1))]
)
def test_convolutions_of_nothing(x: tuple[int, ...], w: tuple[int, ...]) -> None:
    shape = (x[0], w[0], x[2] - w[2] + 1, x[3] - w[3] + 1)
    (y,) = compile_op("ConvInteger", {}, [(x, "uint8"), (w, "int8")])(np.zeros(x, np.uint8), np.zeros(w, np.int8))
    np.testing.assert_array_equal(y, np.zeros(shape, np.int32))


@pytest.mark.parametrize("m, k, n", [(0, 4, 3), (2, 0, 3), (2, 4, 0)])
def test_matrix_products_of_nothing(m: int, k: int, n: int) -> None:
    a, b = np.zeros((m, k), np.int8), np.zeros((k, n), np.int8)
    (y,) = compile_op("MatMulInteger", {}, [(a.shape, "int8"), (b.shape, "int8")])(a, b)
    np.testing.assert_array_equal(y, np.zeros((m, n), np.int32))


@pytest.mark.parametrize("n", [1, 3, 4, 7, 8, 16, 20, 32, 50])
@pytest.mark.parametrize("features", ["avx512vnni avx512vl", "avx512vnni", "avx512bw avx2", "avx2", ""])
def test_every_lowering_of_dot4_is_exact(features: str, n: int) -> None:
    """dot4 is exact for bytes at their limits, where vpmaddubsw would saturate."""
    if missing := set(features.split()) - this_processor().features:
        pytest.skip(f"this processor has no {', '.join(sorted(missing))}")
    x, w = T.placeholder((9, 4), "uint8", "x"), T.placeholder((9, 4, n), "int8", "w")
    k = T.reduce_axis(9, "k")
    left = T.compute((9,), lambda i: pack_quad(lambda j: x[i, j]), "left")
    right = T.compute((9, n), lambda i, c: pack_quad(lambda j: w[i, j, c]), "right")
    y = T.compute((n,), lambda c: T.sum(T.call("dot4", left[k], right[k, c]), k), "y")
    from celosia.compiler.cpu.schedule import schedule

    function = T.lower(schedule([y]), [x, w], "kernel")
    a = np.random.default_rng(n).choice(np.array([0, 1, 127, 128, 255], np.uint8), (9, 4))
    b = np.random.default_rng(n + 1).choice(np.array([-128, -127, -1, 0, 127], np.int8), (9, 4, n))
    expected = np.einsum("kj,kjc->c", a.astype(np.int32), b.astype(np.int32))
    np.testing.assert_array_equal(T.interpret(function, a, b)[0], expected)
    np.testing.assert_array_equal(compile_function(function, frozenset(features.split()))(a, b)[0], expected)


@pytest.mark.parametrize("name, least", [("pairs", -128), ("narrow_pairs", -127)])
def test_pairs_are_exact_where_there_is_no_instruction(name: str, least: int) -> None:
    """Products of pairs are exact without an instruction for them; test_targets.py tests those of NEON."""
    rng, k = np.random.default_rng(3), T.reduce_axis(7, "k")
    tensors = [T.placeholder((7, 5), "uint16", operand) for operand in ("x0", "x1", "w0", "w1")]
    y = T.compute((5,), lambda c: T.sum(T.call(name, *(tensor[k, c] for tensor in tensors)), k), "y")
    from celosia.compiler.cpu.schedule import schedule

    function = T.lower(schedule([y]), tensors, "kernel")
    x = rng.choice(np.array([-128, -127, -1, 0, 127], np.int8), (2, 7, 5, 2))
    w = rng.choice(np.array([least, -1, 0, 127], np.int8), (2, 7, 5, 2))
    halves = [array[half].view(np.uint16)[..., 0] for array in (x, w) for half in range(2)]
    expected = np.einsum("hkcj,hkcj->c", x.astype(np.int32), w.astype(np.int32))
    np.testing.assert_array_equal(T.interpret(function, *halves)[0], expected)
    np.testing.assert_array_equal(compile_function(function)(*halves)[0], expected)


AROUND_TILES = [(64, 16), (64, 80), (70, 48), (130, 16), (200, 96), (63, 32), (256, 33)]


@pytest.mark.parametrize(("m", "size"), paired([7, 8, 13, 16, 17, 40], AROUND_TILES))
def test_products_of_all_sizes_of_tiles(m: int, size: tuple[int, int]) -> None:
    """Products around the sizes of AMX's tiles are exact: with partly filled tiles and with rests of rows and
    columns."""
    k, n = size
    x, w = some(m, (m, k), "uint8"), some(k, (k, n), "int8")
    x[0], w[:, 0] = 255, -128
    zero = np.array(7, np.uint8)
    kernel = compile_op("MatMulInteger", {}, [(x.shape, "uint8"), (w.shape, "int8"), zero])
    expected = less_zero(x, zero) @ w.astype(np.int32)
    for threads in (1, 3):
        np.testing.assert_array_equal(kernel(x, w, zero, threads=threads)[0], expected)


def test_large_products_are_computed_in_tiles_where_there_are_some() -> None:
    """A processor with AMX computes large products in tiles, another one in vectors, with the same result."""
    x, w = some(1, (40, 256), "uint8"), some(2, (256, 64), "int8")
    types = [(v.shape, v.dtype.name) for v in (x, w)]
    processor = this_processor()
    kernels = {}
    for target in (processor, replace(processor, features=processor.features - AMX_FEATURES)):
        with compiling_for(target):
            kernels[target.has_amx] = compile_op("MatMulInteger", {}, types)
    for kernel in kernels.values():
        np.testing.assert_array_equal(kernel(x, w)[0], x.astype(np.int32) @ w.astype(np.int32))
    if processor.has_amx:
        assert kernels[True].code != kernels[False].code
    else:
        assert list(kernels) == [False]


def test_what_depends_on_constants_alone_is_computed_at_compile_time() -> None:
    x, w = some(1, (5, 40), "uint8"), some(2, (40, 48), "int8")
    nodes = (CpuNode("MatMulInteger", ("x", "w"), ("y",)),)
    kernel, names, made = CpuFunction(nodes, {"x": InputType(x.shape, "uint8"), "w": InputType.of(w)}, ("y",)).compile()
    assert "w" not in names and set(made) == set(names) - {"x"}
    assert sum(array.nbytes for array in made.values()) < 1.2 * w.nbytes
    (y,) = kernel(*(made.get(name, x) for name in names))
    np.testing.assert_array_equal(y, x.astype(np.int32) @ w.astype(np.int32))


def test_constants_that_would_grow_are_not_computed_at_compile_time() -> None:
    w = some(3, (64, 128), "int8")
    nodes = (
        CpuNode("DequantizeLinear", ("w", "s"), ("v",)),
        CpuNode("Add", ("v", "x"), ("y",)),
    )
    types = {"w": InputType.of(w), "s": InputType.of(np.array(0.5, np.float32)), "x": InputType(w.shape, "float32")}
    kernel, names, made = CpuFunction(nodes, types, ("y",)).compile()
    assert names == ("w", "s", "x") and not made
    (y,) = kernel(w, types["s"].value, np.zeros(w.shape, np.float32))
    np.testing.assert_array_equal(y, w * np.float32(0.5))


@pytest.mark.parametrize("size", [5, 16, 40, 100])
def test_padding_is_vectorised_with_masks(size: int) -> None:
    """Vectors at the padding are masked: lanes outside of the input are not read."""
    x = some(4, (3, size), "int8")
    pads = np.array([1, 2, 0, 3], np.int64)
    (y,) = compile_op("Pad", {}, [(x.shape, "int8"), pads, ((), "int8")])(x, pads, np.array(7, np.int8))
    np.testing.assert_array_equal(y, np.pad(x, ((1, 0), (2, 3)), constant_values=7))


def test_equal_loops_share_a_kernel_and_other_tables_do_not() -> None:
    def gather(table: NDArray[Any]) -> T.Function:
        x, entries = T.placeholder((5,), "int64", "x"), T.constant(table, "entries")
        return T.lower(T.compute((5,), lambda i: entries[x[i]], "y"), [x])

    short = [compile_function(gather(np.arange(8) * factor)) for factor in (1, 1, 2)]
    assert short[0] is short[1] and short[0] is not short[2]
    long = [compile_function(gather(np.arange(1000) * factor)) for factor in (1, 2)]
    assert long[1](np.arange(5))[0].tolist() == [0, 2, 4, 6, 8]


def test_a_gemm_of_another_type_than_its_result() -> None:
    """A Gemm from int8 to uint8 stays in floats, as in onnxruntime: QGemm has one type for both."""
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {
        "sx": np.float32(2**-4), "zx": np.int8(3), "w": rng.integers(-127, 128, (16, 8)).astype(np.int8),
        "sw": np.float32(2**-6), "zw": np.int8(0), "sy": np.float32(2**-3), "zy": np.uint8(120),
    }  # fmt: skip
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "sx", "zx"], ["qx"]),
        helper.make_node("DequantizeLinear", ["qx", "sx", "zx"], ["dx"]),
        helper.make_node("DequantizeLinear", ["w", "sw", "zw"], ["dw"]),
        helper.make_node("Gemm", ["dx", "dw"], ["g"]),
        helper.make_node("QuantizeLinear", ["g", "sy", "zy"], ["y"]),
    ]
    x, y = (helper.make_tensor_value_info(*info) for info in (("x", 1, [500, 16]), ("y", 2, [500, 8])))
    constants = [numpy_helper.from_array(np.asarray(array), name) for name, array in arrays.items()]
    graph = helper.make_graph(nodes, "g", [x], [y], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    feed = {"x": (rng.normal(size=(500, 16)) * 3).astype(np.float32)}
    (expected,) = opened(model, int8=True).run(None, feed)
    np.testing.assert_array_equal(celosia.Runtime(celosia.compile(model, "tiny")).run(feed).outputs["y"], expected)
