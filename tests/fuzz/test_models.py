"""Random models have onnxruntime's outputs; what is wrong is found, made small, and written once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from thorough import some

pytest.importorskip("onnxruntime")

from celosia.compiler.cpu.ops import OPS
from celosia.compiler.graph import float_weights
from celosia.hw.spec.config import PRESETS, Config
from fuzz.cases import Failure
from fuzz.models import campaign, exclusions
from fuzz.models import judge as judging
from fuzz.models.case import Case
from fuzz.models.draw import draw_case
from fuzz.models.exclusions import excuse
from fuzz.models.judge import (
    CRASHED,
    DOCUMENTED,
    EQUAL,
    REFUSED,
    UNCOUNTED,
    WRONG,
    Neighbourhood,
    judge,
)
from fuzz.models.minimise import minimise
from fuzz.models.net import Draw, Net, OracleError
from fuzz.run import chunk

STARTS, EACH = range(1_000_000, 1_000_300, 10), 10
"""300 models, of which ten are of `make test`: other seeds are for `python -m fuzz --kind model`."""


@pytest.mark.parametrize("start", some(STARTS, STARTS[:1]))
def test_random_models_are_onnxruntimes(start: int) -> None:
    results = chunk("model", PRESETS["tiny"], range(start, start + EACH))
    assert not results.failures
    assert results.endings[UNCOUNTED] < EACH // 2


def test_a_case_is_its_seed() -> None:
    a, b, other = draw_case(4_000_001), draw_case(4_000_001), draw_case(4_000_002)
    assert a.model == b.model and a.config == b.config and a.model != other.model


def test_a_case_is_saved_whole(tmp_path: Path) -> None:
    case = draw_case(1_000_004)
    case.save(tmp_path / "one.of")
    again = Case.load(tmp_path / "one.of")
    assert (again.model, again.config, again.kind) == (case.model, case.config, case.kind)
    for a, b in zip(again.feeds, case.feeds, strict=True):
        assert a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


# What it has found ---------------------------------------------------------------------------------------------------

FOUND = {
    "float weights and bias of a Conv between quantised tensors": """
        (int8[1, 3, 4, 4] x) => (int8[1, 5, 3, 3] y) <float s = {0.05}, int8 z = {3}, float t = {0.02}, int8 u = {-3}> {
            d = DequantizeLinear(x, s, z) c = Conv(d, w_5_3_2_2, w_5) y = QuantizeLinear(c, t, u) }""",
    "a transposed convolution with fewer columns than its input": """
        (float[1, 4, 3, 4] x) => (float[1, 4, 5, 3] y) {
            y = ConvTranspose <group = 4, kernel_shape = [1, 1], output_shape = [5, 3], strides = [2, 1]> (x, w_4_1_1_1)
        }""",
    "float weights behind what only moves": """
        (int8[1, 4, 4, 3] x) => (int8[1, 5, 3, 3] y) <float s = {0.05}, int8 z = {3}, float t = {0.02}, int8 u = {-3}> {
            d = DequantizeLinear(x, s, z) m = Transpose<perm = [0, 3, 1, 2]>(d) c = Conv(m, w_5_3_2_2, w_5)
            y = QuantizeLinear(c, t, u) }""",
    "float weights of a Gemm, its result returned as well": """
        (int8[3, 5] x) => (int8[3, 4] y, float[3, 4] c)
        <float s = {0.05}, int8 z = {3}, float t = {0.02}, int8 u = {-3}> {
            d = DequantizeLinear(x, s, z) c = Gemm(d, w_5_4, w_4) y = QuantizeLinear(c, t, u) }""",
    "float weights of a MatMul to which a bias is added": """
        (uint8[2, 3, 5] x) => (uint8[2, 3, 4] y)
        <float s = {0.05}, uint8 z = {130}, float t = {0.02}, uint8 u = {120}> {
            d = DequantizeLinear(x, s, z) c = MatMul(d, w_5_4) i = Identity(c) e = Add(w_4, i) r = Relu(e)
            y = QuantizeLinear(r, t, u) }""",
    "float weights of a flat MatMul, and Relu": """
        (uint8[3, 5] x) => (uint8[3, 4] y)
        <float s = {0.05}, uint8 z = {130}, float t = {0.02}, uint8 u = {120}> {
            d = DequantizeLinear(x, s, z) c = MatMul(d, w_5_4) i = Identity(c) e = Add(w_4, i) r = Relu(e)
            y = QuantizeLinear(r, t, u) }""",
    "float weights of a MatMul of rows": """
        (uint8[2, 3, 5] x) => (uint8[2, 3, 4] y)
        <float s = {0.05}, uint8 z = {130}, float t = {0.02}, uint8 u = {120}> {
            d = DequantizeLinear(x, s, z) c = MatMul(d, w_5_4) e = Add(w_4, c) y = QuantizeLinear(e, t, u) }""",
    "float weights of a ConvTranspose": """
        (int8[1, 3, 4, 4] x) => (int8[1, 5, 5, 5] y) <float s = {0.05}, int8 z = {3}, float t = {0.02}, int8 u = {-3}> {
            d = DequantizeLinear(x, s, z) c = ConvTranspose(d, w_3_5_2_2, w_5) y = QuantizeLinear(c, t, u) }""",
    "float weights behind a Slice": """
        (int8[1, 3, 6, 4] x) => (int8[1, 5, 3, 3] y)
        <float s = {0.05}, int8 z = {3}, float t = {0.02}, int8 u = {-3}, int64[1] a = {0}, int64[1] b = {4},
         int64[1] c = {2}> {
            d = DequantizeLinear(x, s, z) e = Slice(d, a, b, c) f = Conv(e, w_5_3_2_2, w_5)
            y = QuantizeLinear(f, t, u) }""",
    "float weights before Relu and Transpose": """
        (int8[1, 3, 4, 4] x) => (int8[1, 3, 3, 5] y) <float s = {0.05}, int8 z = {3}, float t = {0.02}, int8 u = {-3}> {
            d = DequantizeLinear(x, s, z) c = Conv(d, w_5_3_2_2, w_5) r = Relu(c)
            e = Transpose<perm = [0, 2, 3, 1]>(r) y = QuantizeLinear(e, t, u) }""",
    "float weights before MaxPool": """
        (int8[1, 3, 4, 4] x) => (int8[1, 5, 2, 2] y) <float s = {0.05}, int8 z = {3}, float t = {0.02}, int8 u = {-3}> {
            d = DequantizeLinear(x, s, z) c = Conv(d, w_5_3_2_2, w_5)
            e = MaxPool<kernel_shape = [2, 2]>(c) y = QuantizeLinear(e, t, u) }""",
    "float weights before a result that is returned, then moved": """
        (int8[1, 3, 4, 4] x) => (int8[5, 9] y, float[1, 5, 3, 3] r)
        <float s = {0.05}, int8 z = {3}, float t = {0.02}, int8 u = {-3}, int64[2] to = {5, 9}> {
            d = DequantizeLinear(x, s, z) c = Conv(d, w_5_3_2_2, w_5) r = Relu(c) e = Reshape(r, to)
            y = QuantizeLinear(e, t, u) }""",
    "float weights before what moves their result, which is returned": """
        (int8[1, 3, 4, 4] x) => (int8[1, 3, 3, 5] y, float[1, 3, 3, 5] e)
        <float s = {0.05}, int8 z = {3}, float t = {0.02}, int8 u = {-3}> {
            d = DequantizeLinear(x, s, z) c = Conv(d, w_5_3_2_2, w_5) e = Transpose<perm = [0, 2, 3, 1]>(c)
            y = QuantizeLinear(e, t, u) }""",
    "float weights behind what another operator reads": """
        (int8[1, 3, 4, 4] x) => (int8[1, 5, 3, 3] y, float[1, 3, 4, 4] n)
        <float s = {0.05}, int8 z = {3}, float t = {0.02}, int8 u = {-3}> {
            d = DequantizeLinear(x, s, z) e = Transpose<perm = [0, 1, 3, 2]>(d) n = Neg(e)
            c = Conv(e, w_5_3_2_2, w_5) y = QuantizeLinear(c, t, u) }""",
    "float weights behind an Identity that is returned": """
        (int8[3, 5] x) => (int8[3, 4] y, float[3, 5] i)
        <float s = {0.05}, int8 z = {3}, float t = {0.02}, int8 u = {-3}> {
            d = DequantizeLinear(x, s, z) i = Identity(d) c = Gemm(i, w_5_4, w_4) y = QuantizeLinear(c, t, u) }""",
    "float weights of a MatMul that is returned before a bias is added": """
        (uint8[3, 5] x) => (uint8[3, 4] y, float[3, 4] c)
        <float s = {0.05}, uint8 z = {130}, float t = {0.02}, uint8 u = {120}> {
            d = DequantizeLinear(x, s, z) c = MatMul(d, w_5_4) e = Add(w_4, c) y = QuantizeLinear(e, t, u) }""",
    "float weights and a bias that operators make of constants": """
        (int8[3, 5] x) => (int8[3, 4] y)
        <float s = {0.05}, int8 z = {3}, float t = {0.02}, int8 u = {-3}, int64[1] to = {-1}> {
            r = Mul(s, s) d = DequantizeLinear(x, r, z) w = Transpose(w_4_5) b = Reshape(w_1_4, to)
            c = Gemm(d, w, b) y = QuantizeLinear(c, t, u) }""",
    "float weights before Relu and an operator whose result nobody reads": """
        (int8[1, 3, 4, 4] x) => (int8[1, 5, 3, 3] y) <float s = {0.05}, int8 z = {3}, float t = {0.02}, int8 u = {-3}> {
            d = DequantizeLinear(x, s, z) c = Conv(d, w_5_3_2_2, w_5) r = Relu(c) n = Neg(r)
            y = QuantizeLinear(r, t, u) }""",
    "float weights before an Identity whose result nobody reads": """
        (int8[1, 3, 4, 4] x) => (int8[1, 5, 3, 3] y) <float s = {0.05}, int8 z = {3}, float t = {0.02}, int8 u = {-3}> {
            d = DequantizeLinear(x, s, z) c = Conv(d, w_5_3_2_2, w_5) i = Identity(c) y = QuantizeLinear(c, t, u) }""",
    "float weights before an Identity and what leads nowhere": """
        (int8[1, 3, 4, 4] x) => (int8[1, 5, 3, 3] y) <float s = {0.05}, int8 z = {3}, float t = {0.02}, int8 u = {-3}> {
            d = DequantizeLinear(x, s, z) c = Conv(d, w_5_3_2_2, w_5) i = Identity(c) n = Neg(i) m = Abs(n)
            y = QuantizeLinear(c, t, u) }""",
    "float weights behind what an idle operator reads, too": """
        (int8[1, 3, 4, 4] x) => (int8[1, 5, 3, 3] y) <float s = {0.05}, int8 z = {3}, float t = {0.02}, int8 u = {-3}> {
            d = DequantizeLinear(x, s, z) n = Neg(d) c = Conv(d, w_5_3_2_2, w_5) y = QuantizeLinear(c, t, u) }""",
    "float weights before an idle QuantizeLinear": """
        (int8[1, 3, 4, 4] x) => (int8[1, 5, 3, 3] y) <float s = {0.05}, int8 z = {3}, float t = {0.02}, int8 u = {-3}> {
            d = DequantizeLinear(x, s, z) c = Conv(d, w_5_3_2_2, w_5) n = QuantizeLinear(c, s, z)
            y = QuantizeLinear(c, t, u) }""",
    "float weights before an idle equal of what reads them": """
        (int8[1, 3, 4, 4] x) => (int8[1, 5, 3, 3] y) <float s = {0.05}, int8 z = {3}, float t = {0.02}, int8 u = {-3}> {
            d = DequantizeLinear(x, s, z) c = Conv(d, w_5_3_2_2, w_5) n = Relu(c) r = Relu(c)
            y = QuantizeLinear(r, t, u) }""",
    "float weights of a Conv behind Pad, before BatchNormalization": """
        (int8[1, 3, 4, 4] x) => (int8[1, 5, 5, 4] y)
        <float s = {0.05}, int8 z = {3}, float t = {0.02}, int8 u = {-3}, int64[8] p = {0, 0, 1, 0, 0, 0, 1, 1},
         float[5] v = {0.5, 0.7, 0.9, 1.1, 1.3}> {
            d = DequantizeLinear(x, s, z) e = Pad(d, p) c = Conv(e, w_5_3_2_2)
            n = BatchNormalization(c, w_5, w_5, w_5, v) r = Relu(n) y = QuantizeLinear(r, t, u) }""",
    "float weights of a Conv before Add and Mul": """
        (int8[1, 3, 4, 4] x) => (int8[1, 5, 3, 3] y)
        <float s = {0.05}, int8 z = {3}, float t = {0.02}, int8 u = {-3}, float two = {1.9}> {
            d = DequantizeLinear(x, s, z) c = Conv(d, w_5_3_2_2) a = Add(c, w_5_1_1) b = Mul(a, w_5_1_1)
            m = Mul(b, two) y = QuantizeLinear(m, t, u) }""",
    "float weights of a ConvTranspose in groups before BatchNormalization": """
        (int8[1, 4, 4, 4] x) => (int8[1, 4, 5, 5] y)
        <float s = {0.05}, int8 z = {3}, float t = {0.02}, int8 u = {-3}, float[4] v = {0.5, 0.7, 0.9, 1.1}> {
            d = DequantizeLinear(x, s, z) c = ConvTranspose<group = 2>(d, w_4_2_2_2, w_4)
            n = BatchNormalization(c, w_4, w_4, w_4, v) y = QuantizeLinear(n, t, u) }""",
    "float weights of a ConvTranspose before Mul": """
        (int8[1, 4, 4, 4] x) => (int8[1, 4, 5, 5] y) <float s = {0.05}, int8 z = {3}, float t = {0.02}, int8 u = {-3}> {
            d = DequantizeLinear(x, s, z) c = ConvTranspose(d, w_4_4_2_2, w_4) n = Mul(c, w_4_1_1)
            y = QuantizeLinear(n, t, u) }""",
    "float weights of a Conv of lines before Mul": """
        (int8[1, 4, 4] x) => (int8[1, 4, 3] y) <float s = {0.05}, int8 z = {3}, float t = {0.02}, int8 u = {-3}> {
            d = DequantizeLinear(x, s, z) c = Conv(d, w_4_4_2) n = Mul(c, w_4_1) y = QuantizeLinear(n, t, u) }""",
    "float weights of a Conv that is returned before Mul": """
        (int8[1, 3, 4, 4] x) => (int8[1, 5, 3, 3] y, float[1, 5, 3, 3] c)
        <float s = {0.05}, int8 z = {3}, float t = {0.02}, int8 u = {-3}> {
            d = DequantizeLinear(x, s, z) c = Conv(d, w_5_3_2_2, w_5) b = Mul(c, w_5_1_1)
            y = QuantizeLinear(b, t, u) }""",
    "float weights of a Conv before Mul, which is returned": """
        (int8[1, 3, 4, 4] x) => (int8[1, 5, 3, 3] y, float[1, 5, 3, 3] b)
        <float s = {0.05}, int8 z = {3}, float t = {0.02}, int8 u = {-3}> {
            d = DequantizeLinear(x, s, z) c = Conv(d, w_5_3_2_2, w_5) b = Mul(c, w_5_1_1)
            y = QuantizeLinear(b, t, u) }""",
    "float weights of a Conv before Sub": """
        (int8[1, 3, 4, 4] x) => (int8[1, 5, 3, 3] y)
        <float s = {0.05}, int8 z = {3}, float t = {0.02}, int8 u = {-3}> {
            d = DequantizeLinear(x, s, z) c = Conv(d, w_5_3_2_2, w_5) b = Sub(c, w_5_1_1)
            y = QuantizeLinear(b, t, u) }""",
    "float weights of a Conv before what is scaled from the left": """
        (int8[1, 3, 4, 4] x) => (int8[1, 5, 3, 3] y)
        <float s = {0.05}, int8 z = {3}, float t = {0.02}, int8 u = {-3}> {
            d = DequantizeLinear(x, s, z) c = Conv(d, w_5_3_2_2, w_5) b = Mul(w_5_1_1, c)
            y = QuantizeLinear(b, t, u) }""",
    "float weights of a MatMul to which one number is added": """
        (int8[3, 5] x) => (int8[3, 4] y) <float s = {0.05}, int8 z = {3}, float t = {0.02}, int8 u = {-3}> {
            d = DequantizeLinear(x, s, z) c = MatMul(d, w_5_4) e = Add(c, w_1) y = QuantizeLinear(e, t, u) }""",
    "weights of a MatMul to which one number is added": """
        (int8[2, 3, 5] x) => (int8[2, 3, 4] y) <float s = {0.05}, int8 z = {3}, float t = {0.02}, int8 u = {-3}> {
            d = DequantizeLinear(x, s, z) w = DequantizeLinear(w8_5_4, s) c = MatMul(d, w) e = Add(c, w_1)
            y = QuantizeLinear(e, t, u) }""",
    "float weights beside 16-bit tensors": """
        (int16[1, 3, 4, 4] x) => (int16[1, 5, 3, 3] y)
        <float s = {0.0005}, int16 z = {3}, float t = {0.0002}, int16 u = {-3}> {
            d = com.microsoft.DequantizeLinear(x, s, z) c = Conv(d, w_5_3_2_2, w_5)
            y = com.microsoft.QuantizeLinear(c, t, u) }""",
    "a bias of one row": """
        (uint8[2, 3] x) => (uint8[2, 2] y)
        <float s = {0.05}, uint8 z = {130}, int8[3, 2] w8 = {9, -50, 30, 127, -128, 2}, float[2] sw = {0.01, 0.02},
         int8[2] zw = {0, 0}, int32[1, 2] b32 = {500, -700}, float[2] sb = {0.0005, 0.001}, float t = {0.02}> {
            d = DequantizeLinear(x, s, z) w = DequantizeLinear<axis = 1>(w8, sw, zw) b = DequantizeLinear(b32, sb)
            c = Gemm(d, w, b) y = QuantizeLinear(c, t, z) }""",
    "weights by channel that the model quantises, and a bias of one row whose axis is wrong": """
        (uint8[2, 3] x) => (uint8[2, 2] y)
        <float s = {0.05}, uint8 z = {130}, float[2] sw = {0.01, 0.02}, uint8[2] zw = {128, 128},
         int32[1, 2] b32 = {500, -700}, float[2] sb = {0.0005, 0.001}, float t = {0.02}> {
            d = DequantizeLinear(x, s, z) q = QuantizeLinear<axis = 1>(w_3_2, sw, zw)
            w = DequantizeLinear<axis = 1>(q, sw, zw) b = DequantizeLinear<axis = 0>(b32, sb)
            c = Gemm(d, w, b) y = QuantizeLinear(c, t, z) }""",
    "Cast, Dropout and Identity between quantised tensors": """
        (uint8[2, 9] x) => (uint8[2, 9] y) <float s = {0.05}, uint8 z = {130}, float t = {0.0078}, uint8 u = {0}> {
            d = DequantizeLinear(x, s, z) a = Cast<to = 1>(d) b = Softmax(a) c = Dropout(b) e = Identity(c)
            y = QuantizeLinear(e, t, u) }""",
    "a concatenation of one that waits for its part": """
        (float[1, 1, 1] a, int8[1, 1, 1] b) => (float[1, 1, 2] y) <float s = {0.006}, int8 z = {-128}> {
            c = DequantizeLinear(b, s, z) d = Concat<axis = 2>(c, a) e = QuantizeLinear(d, s, z)
            f = DequantizeLinear(e, s, z) g = Concat<axis = 1>(f) h = QuantizeLinear(g, s, z)
            y = DequantizeLinear(h, s, z) }""",
    "a quantised scalar": """
        (float x) => (int8 y) <float s = {0.05}, int8 z = {3}> { a = Sigmoid(x) b = Erf(a) y = QuantizeLinear(b, s, z) }
        """,
    "a Cast between 16-bit activations and a product with weights of bytes": """
        (int16[3, 32] x) => (int16[3, 8] y) <float s = {0.0001}, int16 z = {0}, float t = {0.01}> {
            d = com.microsoft.DequantizeLinear(x, s, z) a = Cast<to = 1>(d)
            e = DequantizeLinear(w8_32_8, t) c = MatMul(a, e) b = Cast<to = 1>(c)
            y = com.microsoft.QuantizeLinear(b, s, z) }""",
    "a product of floats that come from bytes by way of a Slice": """
        (uint8[4, 32] x) => (float[4, 4] y)
        <float s = {0.05}, uint8 z = {130}, float t = {0.01}, int64[1] a = {0}, int64[1] b = {99}, int64[1] c = {1}> {
            d = DequantizeLinear(x, s, z) e = Slice(d, a, b, c) w = DequantizeLinear(w8_32_4, t)
            y = MatMul(e, w) }""",
    "a product of floats that come from bytes by way of a Flatten": """
        (uint8[4, 32] x) => (uint8[4, 4] y)
        <float s = {0.05}, uint8 z = {130}, float t = {0.01}, float q = {0.04}, int64[1] a = {0}> {
            d = DequantizeLinear(x, s, z) e = Flatten(d) w = DequantizeLinear(w8_32_4, t)
            g = Gemm(e, w, w_4) h = Unsqueeze(g, a) i = Squeeze(h, a) j = Flatten(i) y = QuantizeLinear(j, q, z) }""",
    "the rounding of floats whose bytes are transposed": """
        (uint8[1, 3, 20, 20] x) => (uint8[1, 3, 20, 20] y)
        <float s = {0.05}, uint8 z = {130}, float t = {0.05}, uint8 u = {120}> {
            d = DequantizeLinear(x, s, z) w = DequantizeLinear(w8_3_3_1_1, s) c = ConvTranspose(d, w)
            e = Transpose<perm = [0, 1, 3, 2]>(c) y = QuantizeLinear(e, t, u) }""",
    "a Conv of bytes before MaxPool": """
        (uint8[1, 3, 20, 20] x) => (uint8[1, 5, 20, 10] y)
        <float s = {0.05}, uint8 z = {130}, float t = {0.05}, uint8 u = {120}> {
            d = DequantizeLinear(x, s, z) w = DequantizeLinear(w8_5_3_1_1, s) c = Conv(d, w)
            e = MaxPool<kernel_shape = [1, 2], strides = [1, 2]>(c) y = QuantizeLinear(e, t, u) }""",
    "the epsilon of SkipLayerNormalization": """
        (float[2, 3, 5] x, float[2, 3, 5] y) => (float[2, 3, 5] z) <float s = {0.01}> {
            a = Mul(x, s) b = Mul(y, s) z = com.microsoft.SkipLayerNormalization(a, b, w_5, w_5) }""",
    "the epsilon of SkipSimplifiedLayerNormalization": """
        (float[2, 3, 5] x, float[2, 3, 5] y) => (float[2, 3, 5] z) <float s = {0.01}> {
            a = Mul(x, s) b = Mul(y, s) z = com.microsoft.SkipSimplifiedLayerNormalization(a, b, w_5) }""",
    "the exponential of 16-bit values next to 0": """
        (uint16[1, 40] x) => (float[1, 40] y) <float s = {0.00001}, uint16 z = {255}> {
            d = com.microsoft.DequantizeLinear(x, s, z) y = Elu(d) }""",
    "Selu of bytes next to 0": """
        (uint8[1, 40] x) => (float[1, 40] y) <float s = {0.00002}, uint8 z = {117}> {
            d = DequantizeLinear(x, s, z) y = Selu(d) }""",
    "a norm of equal elements": """
        (float[2, 6] x) => (float[2, 6] y) <float s = {0.3}> {
            a = Clip(x, s, s) y = LayerNormalization<axis = -1>(a, w_6, w_6) }""",
    "the mean square of what is nearly its BatchNormalization": """
        (float[1, 18, 7] x, float[1, 18, 1] z) => (float[1, 18] y)
        <float[1] two = {2.0}, float small = {0.0001}, int64[1] last = {-1}> {
            c = Mul(x, small) d = Add(c, z) v = Mul(w_18, w_18) n = BatchNormalization(d, w_18, w_18, w_18, v)
            m = BatchNormalization(z, w_18, w_18, w_18, v) e = Sub(n, m) f = Pow(e, two)
            y = ReduceMean<keepdims = 0>(f, last) }""",
    "windows that have no place": """
        (uint8[2, 1, 2, 1] x) => (uint8[2, 1, 0, 1] y) {
            y = MaxPool<kernel_shape = [2, 1], dilations = [2, 1]>(x) }""",
    "SAME and strides beyond the kernel of a quantised mean": """
        (uint8[1, 5, 6, 3] x) => (uint8[1, 5, 6, 1] y)
        <float s = {1.14}, uint8 z = {128}, float t = {1.5}, uint8 u = {131}> {
            y = com.microsoft.QLinearAveragePool<auto_pad = "SAME_LOWER", kernel_shape = [1, 1], strides = [1, 3]>
                (x, s, z, t, u) }""",
    "a quantised mean of what Cast hands on": """
        (uint8[2, 4, 9, 7] x) => (uint8[2, 4, 3, 7] y)
        <float s = {0.015625}, uint8 z = {0}, float t = {0.125}, uint8 u = {55}> {
            c = Cast<to = 2>(x)
            y = com.microsoft.QLinearAveragePool<kernel_shape = [1, 3], strides = [3, 1], pads = [0, 1, 0, 1]>
                (c, s, z, t, u) }""",
    "the mean and variance of one element": """
        (float[1, 1, 1] x) => (float[1, 1, 1] y) { y = MeanVarianceNormalization(x) }""",
    "GroupNormalization of opset 18": """
        (float[1, 4, 5] x) => (float[1, 4, 5] y) {
            y = GroupNormalization<num_groups = 2>(x, w_2, w_2) }""",
}  # fmt: skip


def of_text(text: str, opset: int = 18, seed: int = 0) -> Case:
    """The case of a graph. Its constants `w_5_3` are random floats of shape [5, 3], `w8_5_3` bytes; so are inputs."""
    draw = Draw(f"{seed}")
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": {opset}, "com.microsoft": 1]> g {text}')
    for name in sorted({name for node in model.graph.node for name in node.input if name.startswith(("w_", "w8_"))}):
        kind = "int8" if name.startswith("w8_") else "float32"
        values = draw.array(kind, [int(size) for size in name.split("_")[1:]])
        model.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    feed = {}
    for value in model.graph.input:
        kind = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        feed[value.name] = np.asarray(draw.array(kind, [dim.dim_value for dim in value.type.tensor_type.shape.dim]))
    return Case("text", model, (feed,), PRESETS["tiny"])


@pytest.mark.parametrize("name", FOUND)
def test_what_it_has_found(name: str) -> None:
    for seed in range(3):
        case = of_text(FOUND[name], seed=seed)
        assert judge(case).what in (EQUAL, DOCUMENTED), judge(case)


def test_a_shape_behind_16_bits_that_the_model_has_wrong() -> None:
    """As onnx infers it, a window that begins outside has a place."""
    case = of_text("""
        (float[1, 2, 2, 3] x) => (uint16[1, 2, 1, 3] y)
        <float s = {0.0001}, uint16 z = {30000}, float[1, 2, 2, 3] m> {
            a = com.microsoft.QuantizeLinear(x, s, z) d = com.microsoft.DequantizeLinear(a, s, z)
            m = MaxPool<kernel_shape = [1, 1], strides = [2, 1], ceil_mode = 1>(d)
            y = com.microsoft.QuantizeLinear(m, s, z) }""")
    assert [each.name for each in case.model.graph.value_info] == ["m"]
    assert judge(case).what == EQUAL


def test_layer_normalisation_of_old_opsets() -> None:
    text = "(float[2, 3, 4] x) => (float[2, 3, 4] y) { y = LayerNormalization(x, w_4, w_4) }"
    assert judge(of_text(text, opset=13)).what == EQUAL


def test_a_mean_of_bytes_that_cancel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Moved with their scale alone, they would cancel however they are rounded."""
    case = of_text("""
        (float[2, 40] x) => (float[] y) <float s = {0.010719789}, uint8 z = {128}> {
            q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) m = ReduceMean<axes = [0]>(d) y = Relu(m) }""",
        opset=14)  # fmt: skip
    (feed,) = case.feeds
    feed["x"][1] = -feed["x"][0]
    assert judge(case).what == EQUAL
    ours = judging._ours

    def a_little_more(case: Case, keep: Any) -> list[dict[str, Any]]:
        return [values | {"y": values["y"] + np.float32(1e-5)} for values in ours(case, keep)]

    monkeypatch.setattr(judging, "_ours", a_little_more)
    assert judge(case).what == WRONG


def test_a_part_whose_padding_is_as_long_as_the_whole() -> None:
    """Six channels of eleven, which with their padding are sixteen, too, are no storage that can be moved."""
    case = of_text("""
        (float[1, 11, 3, 10] x) => (float[] y) <float s = {0.0066}, int8 z = {-68}, int64[2] sizes = {6, 5}> {
            a = MaxPool<kernel_shape = [3, 1], pads = [0, 0, 1, 0]>(x) b = QuantizeLinear(a, s, z)
            c, d = Split<axis = 1>(b, sizes) e = com.microsoft.QLinearConcat<axis = 1>(s, z, c, s, z, d, s, z)
            f = DequantizeLinear(e, s, z) y = SpaceToDepth<blocksize = 2>(f) }""")
    assert judge(replace(case, config=Config(batch=4, block_in=2, block_out=16))).what == EQUAL


def test_what_fits_no_tile_where_records_are() -> None:
    """A mean of more pixels than acc holds, under a preset that has records."""
    case = of_text("""
        (uint8[1, 1, 144, 10] x) => (uint8[] y) <float s = {0.09}, uint8 z = {128}, float t = {0.0014}> {
            a = DequantizeLinear(x, s, z) b = GlobalAveragePool(a) y = QuantizeLinear(b, t, z) }""")
    assert judge(replace(case, config=PRESETS["zcu104"])).what == EQUAL


@pytest.mark.parametrize("moved", ["Flatten", "Reshape"])
def test_a_softmax_behind_which_bytes_are_moved(moved: str) -> None:
    """onnxruntime's QuantizeLinear changes places with Reshape and not with Flatten: its softmax is of floats there."""
    shape = ", int64[2] shape = {2, 15}" if moved == "Reshape" else ""
    for seed in range(4):
        case = of_text(f"""
            (int8[2, 1, 1, 3, 5] x) => (int8[] y)
            <float s = {{0.02838}}, int8 z = {{-128}}, float t = {{0.0038077}} {shape}> {{
                a = DequantizeLinear(x, s, z) b = Softmax(a) c = {moved}(b{', shape' if shape else ''})
                y = QuantizeLinear(c, t, z) }}""",
            seed=seed, opset=15)  # fmt: skip
        assert judge(case).what == EQUAL


@pytest.mark.parametrize("value", [0.3, -0.3, 0.2, float("inf")])
@pytest.mark.parametrize("kind", ["int16", "int8"])
def test_a_bias_that_no_int32_holds(kind: str, value: float) -> None:
    case = of_text(f"""
        ({kind}[1, 3] x) => ({kind}[1, 2] y)
        <float s = {{2.5e-8}}, {kind} z = {{0}}, float t = {{0.0044}}, float q = {{0.01}}> {{
            a = DequantizeLinear(x, s, z) w = DequantizeLinear(w8_3_2, t, v)
            c = Gemm(a, w, bias) y = QuantizeLinear(c, q, z) }}""",
        opset=21)  # fmt: skip
    for name, array in (("v", np.zeros((), np.int8)), ("bias", np.array([value, 0.1], np.float32))):
        case.model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    assert judge(case).what == EQUAL


def test_roots_of_what_cancels() -> None:
    """Rounding decides whether there is a number under the root."""
    case = of_text("""
        (float[8, 17] x) => (float[] y) {
            a = ReduceMean<axes = [-1]>(x) b = Sub(x, a) c = ReduceMean<axes = [-1]>(b) y = Sqrt(c) }""",
        opset=14)  # fmt: skip
    assert judge(case).what == EQUAL


OFF_BY_ZERO = """
    (float[6, 5] x, float[6, 1] d) => (uint8[6, 5] y) <float s = {0.0055}, float t = {0.01}, uint8 z = {0}> {
        q = QuantizeLinear(x, s, z) v = DequantizeLinear(q, s, z) a = ReduceMean<axes = [-1]>(v) b = Sub(v, a)
        c = Div(b, d) y = QuantizeLinear(c, t, z) }"""
"""Where d is 0, rounding of a mean decides whether what is equal to it gives a number."""


def off_by_zero() -> Case:
    case = of_text(OFF_BY_ZERO, opset=14)
    steps = [[92, 91, 91, 91, 90]] * 3 + [[101, 93, 95, 89, 90], [91, 92, 91, 89, 90], [88, 87, 88, 88, 89]]
    case.feeds[0].update(x=(np.array(steps) * 0.0055).astype(np.float32), d=np.zeros((6, 1), np.float32))
    return case


def test_quotients_of_what_cancels_by_zero() -> None:
    assert judge(off_by_zero()).what in (EQUAL, DOCUMENTED)


def test_a_wrong_byte_of_an_infinity_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = judging._ours

    def wrong_one(case: Case, keep: Any) -> list[dict[str, Any]]:
        (values,) = ours(case, keep)
        assert values["y"][3, 0] == 255
        values["y"][3, 0] = 254  # 9 steps above the mean
        return [values]

    monkeypatch.setattr(judging, "_ours", wrong_one)
    assert judge(off_by_zero()).what == WRONG
    near = Neighbourhood.__new__(Neighbourhood)
    here, there = np.array([np.inf, np.inf], np.float32), np.array([np.inf, -np.inf], np.float32)
    drawn = [{"y": here}, {"y": there}]
    near.__dict__.update(near=drawn, _drawn=lambda count: drawn, _exact=lambda name: None)
    for found, wrong in (([np.inf, np.nan], 0), ([np.nan, np.inf], 1), ([-np.inf, np.inf], 1), ([np.inf, -np.inf], 0),
                         ([np.inf, 1], 1)):  # fmt: skip
        assert len(near.gap("y", np.array(found, np.float32), here, "", ())) == wrong
    assert list(near._is_anything("y", np.array([True, True]))) == [False, True]


def test_the_exponent_of_a_negative_base_is_what_it_is() -> None:
    case = of_text("""
        (float[2, 17] x, float e) => (float[] y) {
            a = ReduceMean<axes = [-1]>(x) b = Sub(x, a) c = Pow(b, e) d = ReduceMean<axes = [-1]>(c)
            f = Sqrt(d) g = Div(b, f) y = Tanh(g) }""",
        opset=14)  # fmt: skip
    (feed,) = case.feeds
    feed["e"] = np.array(2, np.float32)
    near = Neighbourhood(case.model, feed, case.model)
    assert not any(np.isnan(each["y"]).any() for each in near.near) and judge(case).what == EQUAL


def test_a_float_bias_is_rounded_as_onnxruntime_does() -> None:
    """A convolution of int8 to uint8 stays one of floats, and its bias becomes int32 in steps of the scales: with the
    float bias, what lies next to a tie would not."""
    rng = np.random.default_rng(0)
    model = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["": 17]>
        g (float[1, 3, 20, 20] x) => (float[1, 16, 14, 14] y) <int8 zx = {1}, uint8 zy = {0}> {
            a = QuantizeLinear(x, sx, zx) b = DequantizeLinear(a, sx, zx) v = DequantizeLinear(w, sw)
            c = Conv(b, v, bias) d = Relu(c)
            e = QuantizeLinear(d, sy, zy) y = DequantizeLinear(e, sy, zy) }""")
    constants = {
        "sx": np.float32(0.1), "sw": np.float32(0.3), "sy": np.float32(0.06), "bias": rng.normal(size=16),
        "w": rng.integers(-3, 4, (16, 3, 7, 7)).astype(np.int8),
    }  # fmt: skip
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(np.asarray(value, np.int8 if name == "w" else np.float32), name)
        for name, value in constants.items()
    )
    for node in model.graph.node:
        node.name = node.output[0]
    feed = {"x": rng.normal(size=(1, 3, 20, 20)).astype(np.float32)}
    with_ties = judge(Case("bias", model, (feed,), Config.load("tiny")))
    assert with_ties.what in (EQUAL, DOCUMENTED), with_ties.why


def test_what_is_no_number_is_found() -> None:
    near = Neighbourhood.__new__(Neighbourhood)
    one, none = np.ones(2, np.float32), np.array([1, np.nan], np.float32)
    for moved, wrong in ((one, 1), (none, 0)):
        drawn = [{"y": one}, {"y": moved}]
        near.__dict__.update(near=drawn, _drawn=lambda count, drawn=drawn: drawn, _exact=lambda name: None)
        assert len(near.gap("y", none, one, "", ())) == len(near.gap("y", one, none, "", ())) == wrong


# It finds what is wrong ----------------------------------------------------------------------------------------------


def network() -> Case:
    """A quantised network with a LeakyRelu that is not."""
    net = Net(Draw("planted"), 17)
    x = net.input(net.draw.floats((1, 4, 6, 6)))
    x = net.add("Relu", net.add("Conv", x, net.floats((8, 4, 3, 3), 0.2), net.floats((8,))))
    x = net.add("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2])
    x = net.add("LeakyRelu", net.add("Sub", x, net.floats((8, 2, 2), 2.0)), alpha=0.3)
    x = net.add("Flatten", net.add("Add", x, net.add("Sigmoid", x)))
    net.outputs.append(net.add("MatMul", x, net.floats((32, 5))))
    return Case("float", net.model(), (net.inputs,), PRESETS["pynq"])


@pytest.fixture
def wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """LeakyRelu is wrong everywhere, so that no check of ours can know."""
    right = OPS["LeakyRelu"]
    monkeypatch.setitem(OPS, "LeakyRelu", lambda node: right(replace(node, attrs={"alpha": 0.31})))


def test_a_wrong_kernel_is_found_and_made_small(wrong_kernel: None) -> None:
    case = network()
    found = judge(case)
    assert found.what == WRONG
    small = minimise(case, found)
    (node,) = small.case.model.graph.node
    assert node.op_type == "LeakyRelu" and small.signature == "wrong: LeakyRelu()"
    assert all(array.size == 1 for array in small.case.feeds[0].values())
    assert judge(small.case).what == WRONG


def test_random_models_find_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPS, "Relu", lambda node: OPS["Abs"](replace(node, op="Abs")))
    seeds = range(1_000_000, 1_000_025)
    failures = (text for seed in seeds for text in chunk("model", PRESETS["tiny"], range(seed, seed + 1)).failures)
    assert any(word in text for text in failures for word in (WRONG, CRASHED))


def test_a_wrong_rewriting_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another range of weights: the compiler's own check starts behind it."""
    right = float_weights._in_bytes
    monkeypatch.setattr(float_weights, "_in_bytes", lambda w: right(w * np.float32(1.2)))
    found = judge(of_text(FOUND["float weights and bias of a Conv between quantised tensors"]))
    assert found.what == WRONG and found.operators == ("Conv", "DequantizeLinear", "QuantizeLinear")


def test_crashes_and_refusals_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(node: Any) -> Any:
        raise RuntimeError("planted")

    monkeypatch.setitem(OPS, "LeakyRelu", broken)
    found = judge(network())
    assert found.what == CRASHED and "RuntimeError" in found.why and "planted" in found.why
    monkeypatch.delitem(OPS, "LeakyRelu")
    assert judge(network()).what == REFUSED


def test_what_onnxruntime_refuses_does_not_count() -> None:
    case = of_text("(float[2] x) => (float[2] y) { y = Unknown(x) }")
    assert judge(case).what == UNCOUNTED


# Exclusions ----------------------------------------------------------------------------------------------------------


def test_exclusions_are_narrow() -> None:
    assert excuse("QLinearConv", 1, True) is None
    assert excuse("QuantizeLinear", 1, False) is None and excuse("QuantizeLinear", 2, True) is None
    assert excuse("QuantizeLinear", 1, True) is not None


def test_a_step_is_excused_only_next_to_a_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that is off by 2% takes bytes across ties from afar."""
    case = of_text(
        "(uint8[1, 200] x) => (uint8[1, 200] y) <float s = {0.02}, uint8 z = {130}, float t = {0.004}, uint8 u = {0}> "
        "{ d = DequantizeLinear(x, s, z) e = Softplus(d) y = QuantizeLinear(e, t, u) }"
    )
    assert judge(case).what in (EQUAL, DOCUMENTED)
    from celosia.compiler import numerics

    right = numerics.UNARY["Softplus"]
    monkeypatch.setitem(numerics.UNARY, "Softplus", lambda x, **given: right(x, **given) * np.float32(1.002))
    assert judge(case).what in (WRONG, CRASHED)


def test_the_page_lists_every_exclusion() -> None:
    page = Path(__file__).parents[2] / "docs" / "numerics.md"
    assert exclusions.table() in page.read_text(encoding="utf-8")


# Findings ------------------------------------------------------------------------------------------------------------


def test_findings_are_written_once(wrong_kernel: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Here:
        """Workers of this process, in which the kernel is wrong."""

        def __init__(self, jobs: int, own_cache: bool) -> None: ...
        def __enter__(self) -> Here:
            return self

        def __exit__(self, *error: object) -> None: ...
        def run(self, calls: Any, seconds: float) -> Any:
            return ((key, call()) for key, call in calls)

    monkeypatch.setattr(campaign, "Workers", Here)
    monkeypatch.setattr(campaign, "draw_case", lambda seed: network())
    with pytest.raises(Failure, match="wrong") as failure:
        campaign.model(3)
    (one,) = campaign.findings({failure.value.cause: [3, 8]}, tmp_path, 1)
    assert one.signature == "wrong: LeakyRelu()" and one.seeds == (3, 8)
    assert {path.name for path in tmp_path.iterdir()} == {"3.onnx", "3.npz", "3.json", "findings.txt"}
    assert "LeakyRelu" in (tmp_path / "findings.txt").read_text()
    assert judge(Case.load(tmp_path / "3")).what == WRONG


def test_what_onnxruntime_refuses_of_a_draw_is_drawn_again() -> None:
    with pytest.raises(OracleError):
        Net(Draw("1"), 17).add("Unknown")
