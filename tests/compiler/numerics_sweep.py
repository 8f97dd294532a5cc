"""Compare celosia.compiler.numerics with onnxruntime and count the differences.

The tests run each comparison a few times; the figures of docs/numerics.md come from

python -m tests.compiler.numerics_sweep --count 2000
"""

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.compiler import numerics
from celosia.compiler.cpu.kernels import compile_op
from celosia.compiler.graph.quantized.tables import UNARY_OPS, function_of_operator
from celosia.compiler.ops import op_spec
from celosia.sim.functional.softmax import softmax_rows

from .ort_nodes import f32, run_node

Array = NDArray[Any]
Tally = tuple[int, int]  # values compared, values that differ

KINDS = (np.int8, np.uint8)


def add_up(parts: Iterator[Tally]) -> Tally:
    """Return the sums of the tallies."""
    compared, different = zip(*parts)
    return sum(compared), sum(different)


def random_scale(rng: np.random.Generator) -> np.float32:
    """Draw a scale: three of four arbitrary, the fourth a small fraction, which makes exact ties common."""
    if rng.integers(4):
        return np.float32(np.exp(rng.uniform(-6, 0)))
    return np.float32(rng.integers(1, 40) / 64)


def operands(rng: np.random.Generator, kind: type) -> tuple[float, int, float, int, float, int]:
    """Draw scale and zero point of two inputs and an output."""
    info = np.iinfo(kind)
    sa, sb, sc = (random_scale(rng) for _ in range(3))
    za, zb, zc = (int(z) for z in rng.integers(info.min, info.max + 1, 3))
    return sa, za, sb, zb, sc, zc


def all_pairs(kind: type) -> tuple[Array, Array]:
    """Return all pairs of values of an 8-bit type, as two matrices."""
    values = np.arange(np.iinfo(kind).min, np.iinfo(kind).max + 1).astype(kind)
    a, b = np.meshgrid(values, values, indexing="ij")
    return a, b


def ort_binary(op: str, a: Array, b: Array, sa: float, za: int, sb: float, zb: int, sc: float, zc: int) -> Array:
    """Return onnxruntime's output of a quantised operator with two operands."""
    kind = a.dtype.type
    return run_node(
        op, a, f32(sa), np.array(za, kind), b, f32(sb), np.array(zb, kind), f32(sc), np.array(zc, kind), out=kind
    )


# Requantise


def near_ties(rng: np.random.Generator, scale: np.float32, count: int) -> Array:
    """Draw int32 sums; the product of most with `scale` lies next to a half of an int8 step."""
    steps = rng.integers(-140, 140, count) + 0.5
    near = np.rint(steps / np.float64(scale)) + rng.integers(-1, 2, count)
    wild = rng.integers(-(2**31), 2**31, count)
    return np.clip(np.where(rng.random(count) < 0.8, near, wild), -(2**31), 2**31 - 1).astype(np.int32)


def tie_scale(rng: np.random.Generator) -> np.float32:
    """Draw a scale s such that v * s is within a few units of the last place of k + 1/2 for some v."""
    v = int(rng.integers(1, 2 ** int(rng.integers(2, 31))))
    s = np.float32((int(rng.integers(0, 128)) + 0.5) / v)
    return np.float32(s + int(rng.integers(-2, 3)) * np.spacing(s))


def requantise(count: int, seed: int = 0) -> Tally:
    """Compare the integer requantiser with the float32 formula, on `count` scales and 20,000 sums for each."""
    rng = np.random.default_rng(seed)

    def once() -> Tally:
        s = tie_scale(rng) if rng.integers(2) else np.float32(np.exp(rng.uniform(-24, 8)))
        acc, bias = near_ties(rng, s, 20_000), int(rng.integers(-(2**31), 2**31))
        wrapped = (acc.astype(np.int64) - bias).astype(np.int32)
        zero_point = int(rng.integers(-128, 128))
        lo, hi = sorted(rng.integers(-128, 128, 2).tolist()) if rng.integers(2) else (-128, 127)
        got = numerics.requantize(wrapped, bias, *numerics.scale_to_multiplier(s), zero_point, lo, hi)
        expected = numerics.requantize_f32(wrapped, bias, s, zero_point, lo, hi)
        return got.size, int(np.sum(got != expected))

    return add_up(once() for _ in range(count))


def ort_requantise(count: int, seed: int = 0) -> Tally:
    """Compare the integer requantiser with QLinearConv, QGemm and QLinearMatMul, with per-channel scales.

    The weights are chosen so that the sums are large and, with `tie_scale`, lie next to ties.
    """
    rng = np.random.default_rng(seed)

    def once(op: str, kind: type) -> Tally:
        k, n, rows = 64, 32, 64
        info = np.iinfo(kind)
        x = rng.integers(info.min, info.max + 1, (rows, k)).astype(kind)
        w = rng.integers(-128 if op != "QLinearConv" else -127, 128, (k, n)).astype(np.int8)
        zx, zy = (int(z) for z in rng.integers(info.min, info.max + 1, 2))
        sx, sy = random_scale(rng), random_scale(rng)
        acc = (x.astype(np.int32) - zx) @ w.astype(np.int32)
        bias = rng.integers(-30_000, 30_000, n).astype(np.int32) if op != "QLinearMatMul" else np.zeros(n, np.int32)
        peak = np.maximum(np.abs(acc[0] + bias), 100)
        sw = f32((rng.integers(1, 200, n) + 0.5) / peak / (sx / sy))  # row 0 next to ties
        quant = f32(sx), np.array(zx, kind)
        weight, result = (f32(sw), np.zeros(n, np.int8)), (f32(sy), np.array(zy, kind))
        if kind is np.uint8:  # the same weights as uint8, whose products do not saturate on processors without VNNI
            w, weight = (w.astype(np.int16) + 128).astype(np.uint8), (f32(sw), np.full(n, 128, np.uint8))
        if op == "QLinearConv":
            y = run_node(
                op,
                x.reshape(1, 8, 8, k).transpose(0, 3, 1, 2),
                *quant,
                w.T.reshape(n, k, 1, 1),
                *weight,
                *result,
                bias,
                out=kind,
                domain="",
            )
            y = y.reshape(n, rows).T
        elif op == "QGemm":
            y = run_node(op, x, *quant, w, *weight, bias, *result, out=kind)
        else:
            y = run_node(op, x, *quant, w, *weight, *result, out=kind, domain="")
        flip = info.min + 128  # the hardware holds uint8 with the top bit flipped
        multiplier, shift = numerics.scale_to_multiplier(numerics.conv_scale(sx, sw, sy))
        got = numerics.requantize(acc, bias, multiplier, shift, zy - flip)
        return y.size, int(np.sum(got.astype(np.int32) + flip != y))

    return add_up(
        once(op, kind) for _ in range(count) for op in ("QLinearConv", "QGemm", "QLinearMatMul") for kind in KINDS
    )


# Two operands


def qlinear_add(count: int, seed: int = 0) -> Tally:
    """Compare `qlinear_add` with QLinearAdd on all pairs, for `count` sets of scales of each type."""
    rng = np.random.default_rng(seed)

    def once(kind: type) -> Tally:
        a, b = all_pairs(kind)
        p = operands(rng, kind)
        return a.size, int(np.sum(numerics.qlinear_add(a, b, *p) != ort_binary("QLinearAdd", a, b, *p)))

    return add_up(once(kind) for _ in range(count) for kind in KINDS)


SHAPES = {  # name: shape of a, shape of b, whether onnxruntime exchanges the operands
    "vectors and a tail": ((33, 67), (33, 67), False),
    "shorter than a vector": ((7,), (7,), False),
    "b a scalar": ((1000,), (1,), False),
    "a a scalar": ((1,), (1000,), True),
    "a one value per row": ((16, 1), (16, 50), True),
    "b one value per row": ((16, 50), (16, 1), False),
    "a one row": ((1, 50), (16, 50), False),
    "b one row": ((16, 50), (1, 50), False),
    "one value each": ((1,), (1,), True),
    "b one value per channel": ((2, 8, 5, 5), (1, 8, 1, 1), False),
}


def broadcast(op: str, reference: Callable[..., Array], shape: str, count: int, seed: int = 0) -> Tally:
    """Compare `reference` with `op` for operands of SHAPES[shape]."""
    rng = np.random.default_rng(seed)
    shape_a, shape_b, exchanged = SHAPES[shape]

    def once(kind: type) -> Tally:
        info = np.iinfo(kind)
        a, b = (rng.integers(info.min, info.max + 1, s).astype(kind) for s in (shape_a, shape_b))
        sa, za, sb, zb, sc, zc = operands(rng, kind)
        y = ort_binary(op, a, b, sa, za, sb, zb, sc, zc)
        got = reference(b, a, sb, zb, sa, za, sc, zc) if exchanged else reference(a, b, sa, za, sb, zb, sc, zc)
        return y.size, int(np.sum(got != y))

    return add_up(once(kind) for _ in range(count) for kind in KINDS)


def realistic(rng: np.random.Generator, kind: type) -> tuple[float, int, float, int, float, int]:
    """Draw scales of a residual add as calibration finds them: the output is about as wide as its inputs."""
    info = np.iinfo(kind)
    sc = np.float32(np.exp(rng.uniform(-5, 0)))
    sa, sb = (np.float32(sc * np.exp(rng.uniform(-2.5, 0.5))) for _ in range(2))
    za, zb, zc = (int(z) for z in rng.integers(info.min, info.max + 1, 3))
    return sa, za, sb, zb, sc, zc


def fit_rescale_add(count: int, seed: int = 0) -> dict[str, float]:
    """Count the residual adds with exact integers and their differences from QLinearAdd; time the search for the
    integers."""
    rng = np.random.default_rng(seed)
    fits, different, times = 0, 0, []
    for i in range(count):
        kind = KINDS[i % 2]
        p = realistic(rng, kind)
        start = time.perf_counter()
        fit = numerics.fit_rescale_add(*p, kind)
        times.append(1e3 * (time.perf_counter() - start))
        if fit is None:
            continue
        fits += 1
        a, b = all_pairs(kind)
        flip = np.iinfo(kind).min + 128
        got = numerics.rescale_add(a.astype(np.int32) - flip, b.astype(np.int32) - flip, fit).astype(np.int32) + flip
        different += int(np.sum(got != ort_binary("QLinearAdd", a, b, *p)))
    return {
        "sets": count,
        "found": fits,
        "different": different,
        "mean ms": float(np.mean(times)),
        "max ms": max(times),
    }


def qlinear_mul(count: int, seed: int = 0) -> Tally:
    """Compare `qlinear_mul` with QLinearMul on all pairs, for `count` sets of scales of each type."""
    rng = np.random.default_rng(seed)

    def once(kind: type) -> Tally:
        a, b = all_pairs(kind)
        p = operands(rng, kind)
        return a.size, int(np.sum(numerics.qlinear_mul(a, b, *p) != ort_binary("QLinearMul", a, b, *p)))

    return add_up(once(kind) for _ in range(count) for kind in KINDS)


def mul_scale(count: int, seed: int = 0) -> dict[str, float]:
    """Count the products with exact integers and their differences from QLinearMul; time the search for integers."""
    rng = np.random.default_rng(seed)
    fits, different, times = 0, 0, []
    for i in range(count):
        kind = KINDS[i % 2]
        flip = np.iinfo(kind).min + 128
        sa, za, sb, zb, _, zc = operands(rng, kind)
        widest = max(abs(flip + q - z) for q in (-128, 127) for z in (za, zb)) ** 2
        sc = np.float32(sa * sb * widest * rng.uniform(0.3, 1) / 200)  # the output is about as wide as the products
        start = time.perf_counter()
        fit = numerics.fit_rescale_mul(sa, za, sb, zb, sc, zc, kind)
        times.append(1e3 * (time.perf_counter() - start))
        if fit is None:
            continue
        fits += 1
        a, b = all_pairs(kind)
        acc = (a.astype(np.int32) - za) * (b.astype(np.int32) - zb)
        got = numerics.requantize(acc, fit.bias, fit.multiplier, fit.shift, fit.zero_point).astype(np.int32) + flip
        different += int(np.sum(got != ort_binary("QLinearMul", a, b, sa, za, sb, zb, sc, zc)))
    return {
        "sets": count,
        "found": fits,
        "different": different,
        "mean ms": float(np.mean(times)),
        "max ms": max(times),
    }


# Pooling


def global_average(count: int, channels_last: int, seed: int = 0) -> Tally:
    """Compare a sum, requantised with `global_average_scale`, with QLinearGlobalAveragePool.

    One channel is near a tie.
    """
    rng = np.random.default_rng(seed)

    def once(kind: type) -> Tally:
        info = np.iinfo(kind)
        channels, height, width = (int(n) for n in rng.integers(1, 30, 3))
        x = rng.integers(info.min, info.max + 1, (2, height, width, channels)).astype(kind)
        zx, zy = (int(z) for z in rng.integers(info.min, info.max + 1, 2))
        area, sx = height * width, random_scale(rng)
        stored = x.astype(np.int32) - (info.min + 128)
        acc, bias = stored.sum((1, 2)), -(zx - info.min - 128) * area
        sy = np.float32(sx * (abs(int(acc[0, 0]) + bias) + 1) / area / (rng.integers(0, 100) + 0.5))
        image = x if channels_last else np.ascontiguousarray(x.transpose(0, 3, 1, 2))
        y = run_node(
            "QLinearGlobalAveragePool",
            image,
            f32(sx),
            np.array(zx, kind),
            f32(sy),
            np.array(zy, kind),
            out=kind,
            channels_last=channels_last,
        ).reshape(2, channels)
        multiplier, shift = numerics.scale_to_multiplier(numerics.global_average_scale(sx, sy, area))
        got = numerics.requantize(acc, bias, multiplier, shift, zy - info.min - 128)
        return y.size, int(np.sum(got.astype(np.int32) + info.min + 128 != y))

    return add_up(once(kind) for _ in range(count) for kind in KINDS)


def float_mean(count: int, seed: int = 0) -> tuple[int, int, int]:
    """Compare a sum, requantised with `mean_scale`, with DequantizeLinear, ReduceMean, QuantizeLinear.

    Returns values compared, values that differ, greatest difference.
    """
    rng = np.random.default_rng(seed)
    compared, different, worst = 0, 0, 0
    for _ in range(count):
        side = int(rng.integers(2, 15))
        x = rng.integers(-128, 128, (1, 64, side, side)).astype(np.int8)
        sx = random_scale(rng)
        sy = np.float32(sx * (0.5 if rng.integers(2) else rng.uniform(0.5, 1)))
        zx, zy = (int(z) for z in rng.integers(-128, 128, 2))
        mean = run_node(
            "ReduceMean", ort_dequantise(x, sx, zx), np.array([2, 3]), out=np.float32, domain="", keepdims=0
        )
        y = ort_quantise(mean, sy, zy, np.int8)
        multiplier, shift = numerics.scale_to_multiplier(numerics.mean_scale(sx, sy, side * side))
        got = numerics.requantize(x.astype(np.int32).sum((2, 3)), -zx * side * side, multiplier, shift, zy)
        distance = np.abs(got.astype(int) - y)
        compared, different, worst = (
            compared + y.size,
            different + int((distance > 0).sum()),
            max(worst, int(distance.max())),
        )
    return compared, different, worst


def average(count: int, same_scale: bool, seed: int = 0) -> tuple[int, int, int]:
    """Compare QLinearAveragePool, 1 to 4 squared, with `qlinear_average` and with the sum of the integers.

    Returns values compared, values in which the float reference differs, values in which the integers differ.
    """
    rng = np.random.default_rng(seed)
    compared, different, different_integers = 0, 0, 0
    for i in range(count):
        kind = KINDS[i % 2]
        info = np.iinfo(kind)
        k, last = int(rng.integers(1, 5)), int(rng.integers(2))
        x = rng.integers(info.min, info.max + 1, (1, 8, 12, 12)).astype(kind)
        sx = random_scale(rng)
        sy = sx if same_scale else np.float32(sx * rng.uniform(0.3, 1))
        zx, zy = (int(z) for z in rng.integers(info.min, info.max + 1, 2))
        y = run_node(
            "QLinearAveragePool",
            np.ascontiguousarray(x.transpose(0, 2, 3, 1)) if last else x,
            f32(sx),
            np.array(zx, kind),
            f32(sy),
            np.array(zy, kind),
            out=kind,
            kernel_shape=(k, k),
            strides=(2, 2),
            channels_last=last,
        )
        y = y.transpose(0, 3, 1, 2) if last else y
        windows = np.lib.stride_tricks.sliding_window_view(x, (k, k), (2, 3))[:, :, ::2, ::2]
        windows = windows.reshape(*y.shape, k * k)
        multiplier, shift = numerics.scale_to_multiplier(numerics.global_average_scale(sx, sy, k * k))
        integers = (
            numerics.requantize(
                windows.astype(np.int32).sum(-1), -zx * k * k, multiplier, shift, zy - info.min - 128
            ).astype(np.int32)
            + info.min
            + 128
        )
        compared += y.size
        different += int(np.sum(numerics.qlinear_average(windows, sx, zx, sy, zy) != y))
        different_integers += int(np.sum(integers != y))
    return compared, different, different_integers


# One operand


def ort_quantise(x: Array, scale: float, zero_point: int, kind: type) -> Array:
    return run_node("QuantizeLinear", x, f32(scale), np.array(zero_point, kind), out=kind, domain="")


def ort_dequantise(q: Array, scale: float, zero_point: int) -> Array:
    return run_node("DequantizeLinear", q, f32(scale), np.array(zero_point, q.dtype), out=np.float32, domain="")


def quantise(count: int, seed: int = 0) -> Tally:
    """Compare `quantize_linear` and `dequantize_linear` with onnxruntime's operators; half the values are ties."""
    rng = np.random.default_rng(seed)

    def once(kind: type) -> Tally:
        info = np.iinfo(kind)
        scale, zero_point = random_scale(rng), int(rng.integers(info.min, info.max + 1))
        ties = (rng.integers(-300, 300, 1500) + 0.5) * np.float64(scale)
        odd = [np.inf, -np.inf, np.nan, 1e38, -1e38, 0.0, -0.0]
        x = rng.permutation(np.concatenate([ties, rng.normal(0, 100, 1500), odd])).astype(np.float32)
        q = ort_quantise(x, scale, zero_point, kind)
        different = np.sum(numerics.quantize_linear(x, scale, zero_point, kind) != q)
        values = np.arange(info.min, info.max + 1).astype(kind)
        d = ort_dequantise(values, scale, zero_point)
        return x.size + d.size, int(different + np.sum(numerics.dequantize_linear(values, scale, zero_point) != d))

    return add_up(once(kind) for _ in range(count) for kind in KINDS)


OF_OTHER_TYPES = frozenset(("Not", "BitwiseNot", "Cast", "IsInf", "IsNaN"))
"""Operators of one tensor whose operand or result is not float."""
FLOAT_FUNCTIONS = sorted(UNARY_OPS - OF_OTHER_TYPES)
ATTRIBUTES: dict[str, dict[str, float]] = {
    "LeakyRelu": {"alpha": 0.1},
    "HardSigmoid": {"alpha": 1 / 6, "beta": 0.5},
    "ThresholdedRelu": {"alpha": 0.7},
    "Elu": {"alpha": 1.5},
}


def unary(op: str, count: int, seed: int = 0) -> Tally:
    """Compare `unary_table` of an ONNX operator with DequantizeLinear, op, QuantizeLinear for all 256 inputs."""
    rng = np.random.default_rng(seed)

    def once(kind: type) -> Tally:
        info = np.iinfo(kind)
        x = np.arange(info.min, info.max + 1).astype(kind)
        sx, zx, sy, zy, _, _ = operands(rng, kind)
        attributes = ATTRIBUTES.get(op, {})
        middle = run_node(op, ort_dequantise(x, sx, zx), out=np.float32, domain=op_spec(op).domain, **attributes)
        table = numerics.unary_table(function_of_operator(op, attributes), sx, zx, sy, zy, kind)
        return 256, int(np.sum(table.astype(np.int32) + info.min + 128 != ort_quantise(middle, sy, zy, kind)))

    return add_up(once(kind) for _ in range(count) for kind in KINDS)


def qlinear_unary(op: str, count: int, seed: int = 0) -> Tally:
    """Compare `unary_table` with QLinearSigmoid, QLinearLeakyRelu or QLinearConcat for all 256 inputs."""
    rng = np.random.default_rng(seed)

    def once(kind: type) -> Tally:
        info = np.iinfo(kind)
        x = np.arange(info.min, info.max + 1).astype(kind)
        sx, zx, sy, zy, _, _ = operands(rng, kind)
        if op == "QLinearSigmoid" and rng.integers(2):
            sy = np.float32(1 / 256)
        of_input, of_output = (f32(sx), np.array(zx, kind)), (f32(sy), np.array(zy, kind))
        if op == "QLinearConcat":
            y = run_node(op, *of_output, x, *of_input, out=kind, axis=0)
        elif op == "QLinearLeakyRelu":
            y = run_node(op, x, *of_input, *of_output, out=kind, alpha=0.1)
        else:
            y = run_node(op, x, *of_input, *of_output, out=kind)
        name = {"QLinearConcat": "Identity", "QLinearLeakyRelu": "LeakyRelu", "QLinearSigmoid": "Sigmoid"}[op]
        function = function_of_operator(name, ATTRIBUTES.get(name, {}))
        table = numerics.unary_table(function, sx, zx, sy, zy, kind)
        return 256, int(np.sum(table.astype(np.int32) + info.min + 128 != y))

    return add_up(once(kind) for _ in range(count) for kind in KINDS)


def softmax(count: int, seed: int = 0, rows: int = 64) -> Tally:
    """Compare `qlinear_softmax` and the compiled operator with QLinearSoftmax.

    Rows have 1 to 5,000 elements. Half of the rows have only two values, whose few maxima make ties. The axes lie in
    the middle; before opset 13 they are all axes from one on.
    """
    rng = np.random.default_rng(seed)

    def once(kind: type) -> Tally:
        length = int(rng.choice([1, 2, 3, rng.integers(1, 20), rng.integers(1, 130), rng.integers(1, 5001)]))
        opset, parts = int(rng.choice([11, 13])), int(rng.choice([n for n in (1, 2, 3, 5) if length % n == 0]))
        shape = (rows, parts, length // parts) if opset < 13 else (rows // 8, length, 8)
        types = [(shape, np.dtype(kind).name), *[((), np.dtype(t).name) for t in (np.float32, kind, np.float32, kind)]]
        kernel = compile_op("QLinearSoftmax", {"axis": 1, "opset": opset}, types)
        return add_up(values(kind, shape, length, opset, kernel) for _ in range(4))

    def values(kind: type, shape: tuple[int, ...], length: int, opset: int, kernel: Any) -> Tally:
        info = np.iinfo(kind)
        x = rng.integers(info.min, info.max + 1, (rows, length)).astype(kind)
        if rng.integers(2):
            low, high = rng.integers(info.min, info.max + 1, (2, rows, 1)).astype(kind)
            x = np.where(rng.random(x.shape) < rng.uniform(0, 20, (rows, 1)) / length, high, low)
        sx = rng.choice([rng.uniform(0.01, 200), np.exp(rng.uniform(-14, 11)), np.exp(rng.uniform(-80, 80))])
        sy = rng.choice([1 / 256, 1 / 255, 1 / (rng.integers(1, 300) + 0.001), np.exp(rng.uniform(-80, 20))])
        zero, zy = np.array(3, kind), np.array(rng.choice([info.min, rng.integers(info.min, info.max + 1)]), kind)
        tensor = _along(x, shape)
        y = run_node("QLinearSoftmax", tensor, f32(sx), zero, f32(sy), zy, out=kind, axis=1, opset=opset)
        got = kernel(tensor, f32(sx), zero, f32(sy), zy)[0]
        reference = _along(numerics.qlinear_softmax(x, float(f32(sx)), float(f32(sy)), int(zy)), shape)
        return 2 * y.size, int(np.sum(reference != y) + np.sum(got != y))

    return add_up(once(kind) for _ in range(count) for kind in KINDS)


def softmax_in_integers(count: int, seed: int = 0, rows: int = 256) -> Tally:
    """Compare the hardware's `softmax_rows` with QLinearSoftmax, for at least two elements and finite powers."""
    rng = np.random.default_rng(seed)

    def once(kind: type) -> Tally:
        info, half = np.iinfo(kind), 0 if kind is np.int8 else 128
        length = int(rng.choice([2, 3, rng.integers(2, 20), rng.integers(2, 300), rng.integers(2, 1500)]))
        x = rng.integers(info.min, info.max + 1, (rows, length))
        if rng.integers(2):
            low, high = rng.integers(info.min, info.max + 1, (2, rows, 1))
            x = np.where(rng.random(x.shape) < rng.uniform(0, 20, (rows, 1)) / length, high, low)
        elif rng.integers(2):
            x = rng.normal((info.min + info.max) / 2, 10 ** rng.uniform(0, 2), x.shape).clip(info.min, info.max)
        x = x.astype(kind)
        sx = float(f32(rng.choice([rng.uniform(0.01, 2), np.exp(rng.uniform(-10, 8))])))
        sy = float(f32(rng.choice([1 / 256, 1 / 255, 1 / (rng.integers(1, 300) + 0.001), np.exp(rng.uniform(-8, 2))])))
        zero, zy = np.array(3, kind), np.array(rng.choice([info.min, rng.integers(info.min, info.max + 1)]), kind)
        powers = numerics.softmax_powers(length, sx, sy)
        if not np.isfinite(powers).all():
            return once(kind)
        y = run_node("QLinearSoftmax", x, f32(sx), zero, f32(sy), zy, out=kind, axis=1, opset=13)
        stored, tables = (x.astype(np.int16) - half).astype(np.int8), np.split(powers.view(np.uint32), 2)
        output = softmax_rows(stored, *tables, int(zy) - half, -128, 127)
        return y.size, int(np.sum(output.astype(np.int16) + half != y))

    return add_up(once(kind) for _ in range(count) for kind in KINDS)


def _along(rows: Array, shape: tuple[int, ...]) -> Array:
    """Return rows of softmax as a tensor of `shape`: along its axes from 1 on, or along axis 1 if that is as long."""
    if shape[1] != rows.shape[1]:
        return rows.reshape(shape)
    return np.ascontiguousarray(rows.reshape(shape[0], -1, rows.shape[1]).transpose(0, 2, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    report: Callable[[str, object], None] = lambda name, result: print(f"{name:50} {result}", flush=True)  # noqa: E731
    report("requantise, integer against float32", requantise(args.count, args.seed))
    report("QLinearConv, QGemm, QLinearMatMul", ort_requantise(args.count, args.seed))
    report("QLinearAdd, all pairs", qlinear_add(args.count, args.seed))
    for shape in SHAPES:
        report(f"QLinearAdd, {shape}", broadcast("QLinearAdd", numerics.qlinear_add, shape, args.count, args.seed))
    report("fit_rescale_add", fit_rescale_add(args.count, args.seed))
    report("QLinearMul, all pairs", qlinear_mul(args.count, args.seed))
    for shape in ("vectors and a tail", "a a scalar", "b a scalar", "b one value per channel"):
        report(f"QLinearMul, {shape}", broadcast("QLinearMul", numerics.qlinear_mul, shape, args.count, args.seed))
    report("mul_scale", mul_scale(args.count, args.seed))
    for channels_last in (0, 1):
        report(
            f"QLinearGlobalAveragePool, channels_last={channels_last}",
            global_average(args.count, channels_last, args.seed),
        )
    report("ReduceMean between DQ and Q", float_mean(args.count, args.seed))
    report("QLinearAveragePool, other scale", average(args.count, False, args.seed))
    report("QLinearAveragePool, same scale", average(args.count, True, args.seed))
    report("QuantizeLinear, DequantizeLinear", quantise(args.count, args.seed))
    for op in ("QLinearSigmoid", "QLinearLeakyRelu", "QLinearConcat"):
        report(op, qlinear_unary(op, args.count, args.seed))
    for op in FLOAT_FUNCTIONS:
        report(f"table of {op}", unary(op, args.count, args.seed))
    report("QLinearSoftmax", softmax(max(args.count // 20, 1), args.seed))
    report("QLinearSoftmax in integers", softmax_in_integers(args.count, args.seed))


if __name__ == "__main__":
    main()
