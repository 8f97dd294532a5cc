"""Kernels for the boards' processors, linked by ziglang and run under qemu, give the same bytes as here.

FLOATS lists the allowed differences: the order of sums, which depends on the width of vectors; on armv7 also the
rounding of fused products, and numbers below 2^-126, which its vectors flush to 0.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import emulated
import numpy as np
import pytest
from thorough import paired

from celosia.compiler.cpu.kernels import compile_op
from celosia.compiler.cpu.llvm import LinkError, link_library
from celosia.compiler.target import TARGETS, TargetError, compiling_for, find_target
from celosia.driver.board import board_device as board
from celosia.hw.boards.boards import BOARDS

RNG = np.random.default_rng(5)


class Case(NamedTuple):
    op: str
    inputs: tuple[Any, ...]
    attrs: dict[str, Any] = {}
    exact: str = "armv7 aarch64"
    """Targets whose bytes are the same as here."""


def f32(*shape: int) -> np.ndarray:
    return (RNG.normal(size=shape) * 3).astype(np.float32)


def i8(*shape: int) -> np.ndarray:
    return RNG.integers(-128, 128, shape).astype(np.int8)


def u8(*shape: int) -> np.ndarray:
    return RNG.integers(0, 256, shape).astype(np.uint8)


def whole(dtype: str, *shape: int) -> np.ndarray:
    return RNG.integers(-(2**30), 2**30, shape).astype(dtype)


def scale(value: float) -> np.ndarray:
    return np.array(value, np.float32)


S, Z = scale(0.037), np.array(3, np.int8)
HALVES = np.concatenate([np.arange(-9, 9) / 2, [-0.0, 0.3, -0.3, 1e9, -1e9, 8388607.5, 1e-30]]).astype(np.float32)
INTEGERS = [
    Case("QLinearConv", (i8(1, 8, 7, 7), S, Z, i8(8, 8, 3, 3), scale(0.02), np.array(0, np.int8), scale(0.9), Z)),
    Case("QLinearConv", (u8(1, 16, 6, 6), S, np.array(9, np.uint8), i8(16, 1, 3, 3), scale(0.02), np.array(0, np.int8),
                         scale(0.9), np.array(100, np.uint8)), {"group": 16}),
    Case("QLinearMatMul", (i8(5, 33), S, Z, i8(33, 18), scale(0.02), np.array(0, np.int8), scale(1.1), Z)),
    Case("MatMulInteger", (u8(4, 20), i8(20, 35))),
    Case("ConvInteger", (u8(1, 3, 8, 8), i8(5, 3, 3, 3))),
    Case("QuantizeLinear", (f32(4, 37), S, Z)),
    Case("QuantizeLinear", (HALVES, scale(1), np.array(0, np.int8))),
    Case("QuantizeLinear", (np.append(HALVES, np.float32([np.nan, np.inf, -np.inf])), scale(0.3), np.array(77, "u1"))),
    Case("DequantizeLinear", (i8(4, 37), S, Z)),
    Case("QLinearAdd", (i8(3, 40), S, Z, i8(3, 40), scale(0.05), Z, scale(0.06), Z)),
    Case("QLinearMul", (i8(3, 40), S, Z, i8(3, 40), scale(0.05), Z, scale(0.06), Z)),
    Case("QLinearLeakyRelu", (i8(3, 40), S, Z, scale(0.06), Z), {"alpha": 0.1}),
    Case("MaxPool", (i8(1, 4, 9, 9),), {"kernel_shape": [3, 3], "strides": [2, 2]}),
    Case("Add", (whole("int32", 50), whole("int32", 50))),
    Case("Mul", (whole("int64", 50), whole("int64", 50))),
    Case("Div", (whole("int32", 50), RNG.integers(1, 99, 50).astype(np.int32))),
    Case("Div", (whole("int64", 50), RNG.integers(1, 99, 50).astype(np.int64))),
    Case("Mod", (whole("int64", 50), RNG.integers(1, 99, 50).astype(np.int64))),
    Case("BitShift", (whole("uint32", 50), RNG.integers(0, 40, 50).astype(np.uint32)), {"direction": "LEFT"}),
    Case("ReduceSum", (whole("int64", 5, 30), np.array([1], np.int64))),
    Case("ArgMax", (i8(5, 30),), {"axis": 1}),
    Case("Transpose", (i8(5, 6, 7),), {"perm": [2, 0, 1]}),
    Case("Gather", (i8(9, 5), np.array([3, 0, 8], np.int64))),
    Case("Cast", (np.concatenate([f32(60) * 50, np.float32([np.inf, -np.inf, np.nan])]),), {"to": 3}),
    Case("Cast", (whole("int32", 60),), {"to": 1}),
    Case("Cast", (whole("int64", 60),), {"to": 11}),
]  # fmt: skip
FLOATS = [
    Case("Relu", (f32(100),)), Case("Add", (f32(100), f32(100))), Case("Mul", (f32(7, 9), f32(7, 9))),
    Case("Div", (f32(7, 9), f32(7, 9))), Case("Sqrt", (np.abs(f32(50)),)), Case("Max", (f32(50), f32(50))),
    Case("Floor", (HALVES,)), Case("Ceil", (HALVES,)), Case("Round", (HALVES,)), Case("Clip", (f32(60),)),
    Case("Cast", (f32(60),), {"to": 10}), Case("Add", (f32(33).astype(np.float16), f32(33).astype(np.float16))),
    Case("Add", (f32(33).astype(np.float64), f32(33).astype(np.float64))),
    Case("GlobalMaxPool", (f32(1, 4, 5, 5),)),
    Case("Exp", (f32(200),), exact="aarch64"), Case("Log", (np.abs(f32(200)),), exact="aarch64"),
    Case("Tanh", (f32(200),), exact="aarch64"), Case("Erf", (f32(200),), exact="aarch64"),
    Case("Sigmoid", (f32(200),), exact="aarch64"), Case("Gelu", (f32(200),), exact="aarch64"),
    Case("Softmax", (f32(6, 40),), exact=""), Case("MatMul", (f32(6, 40), f32(40, 21)), exact=""),
    Case("Gemm", (f32(6, 40), f32(40, 21), f32(21)), exact=""),
    Case("Conv", (f32(1, 3, 9, 9), f32(8, 3, 3, 3)), exact=""), Case("ReduceMean", (f32(5, 40),), exact=""),
    Case("LayerNormalization", (f32(5, 40), f32(40), f32(40)), exact=""),
    Case("Pow", (np.abs(f32(30)), f32(30)), exact=""), Case("Sin", (f32(30),), exact=""),
    Case("Exp", (f32(30).astype(np.float64),), exact=""),
    Case("AveragePool", (f32(1, 4, 8, 8),), {"kernel_shape": [2, 2]}, exact=""),
]  # fmt: skip


@pytest.mark.parametrize("target", TARGETS)
def test_the_same_bytes_as_here(target: str, tmp_path: Path) -> None:
    emulated.require(target)
    cases = INTEGERS + FLOATS

    def built(case: Case) -> Any:
        types = [(x.shape, x.dtype.name) if x.size > 1 else x for x in case.inputs]
        return compile_op(case.op, case.attrs, types, opset=20)

    here = [built(case)(*case.inputs) for case in cases]
    with compiling_for(TARGETS[target]):
        kernels = [built(case) for case in cases]
    assert {kernel.host for kernel in kernels} == {TARGETS[target].machine}
    library = link_library({kernel.name: kernel for kernel in kernels}.values(), TARGETS[target])
    calls = [(kernel, case.inputs) for kernel, case in zip(kernels, cases, strict=True)]
    for case, (got,), (want,) in zip(cases, emulated.call(target, library, calls, tmp_path), here, strict=True):
        name = f"{case.op} {case.inputs[0].dtype}"
        if target in case.exact.split():
            assert got.tobytes() == want.tobytes(), f"{name}: {np.count_nonzero(got != want)} of {got.size} differ"
        else:
            np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6 * np.abs(want).max(), err_msg=name)


BYTES = np.array([0, 1, 127, 128, 255], np.uint8), np.array([-128, -127, -1, 0, 127], np.int8)


@pytest.mark.parametrize("target, more", [("armv7", ""), ("aarch64", ""), ("aarch64", "dotprod"), ("aarch64", "i8mm")])
def test_every_lowering_of_dot4_is_exact(target: str, more: str, tmp_path: Path) -> None:
    """dot4 is exact for bytes at their limits, in rows of any width; test_integer.py tests other processors."""
    emulated.require(target)
    processor = replace(TARGETS[target], features=TARGETS[target].features | set(more.split()))
    pairs = [(RNG.choice(BYTES[0], (5, 21)), RNG.choice(BYTES[1], (21, n))) for n in (1, 3, 4, 16, 37)]
    with compiling_for(processor):
        kernels = [compile_op("MatMulInteger", {}, [(x.shape, x.dtype.name) for x in pair]) for pair in pairs]
    library = link_library(kernels, processor)
    found = emulated.call(target, library, list(zip(kernels, pairs)), tmp_path, *(("-cpu", "max") if more else ()))
    for (a, b), (got,) in zip(pairs, found):
        np.testing.assert_array_equal(got, a.astype(np.int32) @ b.astype(np.int32))


def convolved(x: np.ndarray, w: np.ndarray, zx: int, zw: int, groups: int, stride: int, pad: int) -> np.ndarray:
    padded = np.pad(x.astype(np.int32) - zx, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, w.shape[2:], (2, 3))[:, :, ::stride, ::stride]
    windows = windows.reshape(len(x), groups, -1, *windows.shape[2:])
    weights = (w.astype(np.int32) - zw).reshape(groups, -1, *w.shape[1:])
    found = np.einsum("ngchwrs,gmcrs->ngmhw", windows, weights)
    return found.reshape(len(x), -1, *found.shape[3:])


CONVOLUTIONS = [
    # channels, size, outputs, groups, kernel, stride, padding
    (16, 7, 6, 1, 1, 1, 0), (5, 9, 7, 1, 3, 2, 1), (3, 12, 8, 1, 7, 2, 3), (10, 9, 4, 2, 3, 1, 1),
    (6, 9, 6, 6, 3, 1, 1), (6, 23, 6, 6, 3, 2, 1),
]  # fmt: skip


@pytest.mark.parametrize("target, types", paired(TARGETS, ["int8 int8", "uint8 uint8"]))
def test_convolutions_of_bytes_at_their_limits(target: str, types: str, tmp_path: Path) -> None:
    """Convolutions are exact for weights known not to be -128, known to be -128, and unknown."""
    emulated.require(target)
    (x_type, w_type), bytes_ = types.split(), {"uint8": BYTES[0], "int8": BYTES[1]}
    kernels, calls, wanted = [], [], []
    for channels, size, outputs, groups, kernel, stride, pad in CONVOLUTIONS:
        x = RNG.choice(bytes_[x_type], (2, channels, size, size))
        attrs = {"group": groups, "strides": [stride] * 2, "pads": [pad] * 4}
        zx, zw = np.array(9, x_type), np.array(128 if w_type == "uint8" else 0, w_type)
        every = np.sort(bytes_[w_type])
        for some, known in ((every, True), (every, False), (every[1:], True)):
            w = RNG.choice(some, (outputs, channels // groups, kernel, kernel))
            given = [(x.shape, x_type), w if known else (w.shape, w_type), zx, zw]
            with compiling_for(TARGETS[target]):
                kernels.append(compile_op("ConvInteger", attrs, given))
            calls.append((kernels[-1], (x, w, zx, zw)))
            wanted.append(convolved(x, w, int(zx), int(zw), groups, stride, pad))
    library = link_library({kernel.name: kernel for kernel in kernels}.values(), TARGETS[target])
    for want, (got,) in zip(wanted, emulated.call(target, library, calls, tmp_path), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("target, most", [("armv7", 0.75), ("aarch64", 0.45)])
def test_instructions_of_integer_products(target: str, most: float, tmp_path: Path) -> None:
    """A product of two bytes takes fewer instructions than byte by byte, where it takes 1.22 and 0.57.

    The number is the difference of two sizes, divided by the additional products.
    """
    emulated.require(target)
    rows, inner, columns = 16, 64, 64
    a, b = u8(2 * rows, inner), i8(inner, columns)
    inputs = a[:rows], a
    with compiling_for(TARGETS[target]):
        kernels = [compile_op("MatMulInteger", {}, [(x.shape, "uint8"), (b.shape, "int8")]) for x in inputs]
    library = link_library(kernels, TARGETS[target])
    counts = [
        emulated.instructions(target, library, kernel, (x, b), tmp_path)
        for x, kernel in zip(inputs, kernels, strict=True)
    ]
    assert 0.05 < (counts[1] - counts[0]) / (rows * inner * columns) < most


@pytest.mark.parametrize("target, most", [("armv7", 0.9), ("aarch64", 0.48)])
def test_instructions_of_integer_convolutions(target: str, most: float, tmp_path: Path) -> None:
    """A product in a convolution takes fewer instructions than with four bytes at a time, where it takes 1.06 and 0.56.

    The number is the difference of two sizes, divided by the additional products.
    """
    emulated.require(target)
    x, weights = i8(1, 32, 5, 12), [RNG.integers(-127, 128, (m, 32, 3, 3)).astype(np.int8) for m in (12, 24)]
    with compiling_for(TARGETS[target]):
        kernels = [compile_op("ConvInteger", {}, [(x.shape, "int8"), w]) for w in weights]
    library = link_library(kernels, TARGETS[target])
    counts = [
        emulated.instructions(target, library, kernel, (x, w), tmp_path)
        for w, kernel in zip(weights, kernels, strict=True)
    ]
    assert 0.05 < (counts[1] - counts[0]) / (12 * 32 * 9 * 3 * 10) < most


def test_integer_kernels_need_no_c_library() -> None:
    emulated.require("armv7")
    with compiling_for(TARGETS["armv7"]):
        exact = compile_op("QLinearMatMul", {}, [(x.shape, x.dtype.name) for x in INTEGERS[2].inputs])
        trigonometric = compile_op("Sin", {}, [((30,), "float32")])
    assert b"libm.so" not in link_library([exact], TARGETS["armv7"])
    assert b"libm.so" in link_library([trigonometric], TARGETS["armv7"])


def test_targets_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {find_target(name).machine for name in BOARDS} == {"armv7l", "aarch64"}
    for each in BOARDS.values():
        armv7 = each.name.startswith("pynq")
        assert find_target(each.name) is TARGETS["armv7" if armv7 else "aarch64"]
        assert board.BASES[find_target(each.name).machine] == each.address
        assert each.clock_mhz * 1e6 >= board.CLOCK_HZ
    with pytest.raises(TargetError, match=r"'pynq'.*'pynq-z2'.*pynq-z1, "):
        find_target("pynq")
    monkeypatch.setattr("celosia.compiler.cpu.llvm.compile_loops.find_spec", lambda name: None)
    with pytest.raises(LinkError, match=r"ziglang.*celosia\[deploy\]"):
        link_library([], TARGETS["armv7"])


def test_what_cannot_be_linked() -> None:
    emulated.require("armv7")
    kernel = compile_op("Relu", {}, [((3,), "float32")])  # of this machine
    with pytest.raises(LinkError, match=r"kernels for armv7l.*incompatible"):
        link_library([kernel], TARGETS["armv7"])
