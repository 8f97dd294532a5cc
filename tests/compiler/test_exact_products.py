"""Products that onnxruntime computes exactly in floats run as integers, with its bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from configs import CONFIGS, ROOM
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from oracle import opened

import celosia
from celosia.compiler import numerics
from celosia.hw.spec.config import Config

Arrays = dict[str, NDArray[Any]]
TYPES = {"int8": np.int8, "uint8": np.uint8}


def model(body: str, x: tuple[str, list[int]], y: str, arrays: Arrays) -> onnx.ModelProto:
    """Return a model in which `body` computes `y` from `x` = (type, shape) and constants."""
    size = ", ".join(map(str, x[1]))
    graph = onnx.parser.parse_graph(f"g ({x[0]}[{size}] x) => ({y} y) {{ {body} }}")
    graph.initializer.extend(numpy_helper.from_array(np.asarray(array), name) for name, array in arrays.items())
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


PRODUCTS = {
    "Conv": ([1, 8, 6, 5], (8, 8, 3, 3), "p = Conv<pads=[1, 1, 1, 1]>(a, wf, bf)"),
    "strided": ([2, 8, 7, 7], (12, 4, 2, 3), "p = Conv<strides=[2, 1], dilations=[1, 2], group=2>(a, wf, bf)"),
    "depthwise": ([1, 8, 6, 6], (8, 1, 3, 3), "p = Conv<pads=[1, 1, 1, 1], group=8>(a, wf, bf)"),
    "row": ([1, 6, 11], (8, 6, 3), "p = Conv<pads=[2, 0]>(a, wf, bf)"),
    "ConvTranspose": ([1, 8, 4, 4], (8, 8, 2, 2), "p = ConvTranspose<strides=[2, 2]>(a, wf, bf)"),
    "Gemm": ([3, 24], (24, 10), "p = Gemm(a, wf, bf)"),
    "transB": ([3, 24], (10, 24), "p = Gemm<transB=1>(a, wf, bf)"),
    "MatMul": ([3, 24], (24, 10), "m = MatMul(a, wf) p = Add(m, bf)"),
    "rows": ([2, 3, 24], (24, 10), "m = MatMul(a, wf) p = Add(bf, m)"),
}
"""Name -> (shape of x, shape of the weights, product of `a`, `wf` and `bf`)."""


def product_model(
    name: str, rng: np.random.Generator, types: tuple[str, str] = ("int8", "int8"), shift: int = 3, bias: str = "int8",
    largest: int = 20, down: int = 6, relu: bool = False, per_channel: bool = False,
) -> onnx.ModelProto:  # fmt: skip
    """Return a product of random integers with power-of-two scales. types: of x and y.

    shift: log2 of the bias's step over the products' step. largest: bound of the weights. down: log2 of the result's
    step over the products' step.
    """
    shape, weights, text = PRODUCTS[name]
    first = name in ("Conv", "strided", "depthwise", "row", "transB")
    outputs, axis = (weights[0], 0) if first else (weights[1], 1)
    steps = rng.integers(-9, -3, 2) if not per_channel else np.array([-5, -6])
    sx = np.float32(2.0 ** steps[0])
    sw = np.float32(2.0 ** (steps[1] + (rng.integers(-1, 2, outputs) if per_channel else 0)))
    kinds = [TYPES[kind] for kind in types]
    zeros = [rng.integers(np.iinfo(kind).min, np.iinfo(kind).max + 1) for kind in kinds]
    step = float(sx) * 2.0 ** steps[1]
    arrays: Arrays = {
        "sx": sx, "zx": np.array(zeros[0], kinds[0]), "w": rng.integers(-largest, largest + 1, weights).astype(np.int8),
        "sw": np.asarray(sw), "sy": np.float32(step * 2.0**down), "zy": np.array(zeros[1], kinds[1]),
    }  # fmt: skip
    zw = ""
    if per_channel:
        arrays["zw"], zw = np.zeros(outputs, np.int8), ", zw"
    read_bias = "bf = DequantizeLinear(b, sb)"
    if bias == "float":
        arrays["bf"], read_bias = (rng.integers(-99, 99, outputs) * step * 2.0**shift).astype(np.float32), ""
    else:
        arrays["b"] = rng.integers(-128, 128, outputs).astype(bias)
        arrays["sb"] = np.float32(step * 2.0**shift)
    body = f"""a = DequantizeLinear(x, sx, zx) wf = DequantizeLinear<axis={axis}>(w, sw{zw}) {read_bias} {text}
        {"r = Relu(p)" if relu else ""} y = QuantizeLinear({"r" if relu else "p"}, sy, zy)"""
    return model(body, (types[0], shape), types[1], arrays)


def inputs(proto: onnx.ModelProto, rng: np.random.Generator, count: int = 3) -> list[NDArray[Any]]:
    """Return random inputs, and one of only the least and greatest values, for the model's only input."""
    tensor = proto.graph.input[0].type.tensor_type
    kind = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
    low, high = np.iinfo(kind).min, np.iinfo(kind).max
    shape = [dim.dim_value for dim in tensor.shape.dim]
    drawn = [rng.integers(low, high + 1, shape) for _ in range(count)] + [rng.choice([low, high], shape)]
    return [x.astype(kind) for x in drawn]


def check(proto: onnx.ModelProto, config: Config | str, rng: np.random.Generator) -> celosia.Program:
    """Compare all bytes with onnxruntime's, and return the Program."""
    program, session = celosia.compile(proto, config), opened(proto, int8=True)
    with celosia.Runtime(program) as runtime:
        for x in inputs(proto, rng):
            (expected,) = session.run(None, {"x": x})
            np.testing.assert_array_equal(runtime.run({"x": x}).outputs["y"], expected)
    return program


def reasons(program: celosia.Program) -> str:
    """Return the reasons of all operators that stay on the CPU, in one text."""
    return "\n".join(row["reason"] for row in program.placements if row["place"] == "cpu")


ROOMY = ["tiny", Config(block_in=4, block_out=8, bus_bytes=8, **ROOM), CONFIGS["8x8-forward"]]


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("number", range(len(ROOMY)))
def test_biases_of_a_scale_of_their_own(name: str, number: int) -> None:
    """All multiplications run on the accelerator for biases with larger or smaller steps than the products."""
    rng = np.random.default_rng(number)
    for shift in (-3, -1, 0, 2, 5):
        for types in (("int8", "int8"), ("uint8", "uint8")):
            proto = product_model(name, rng, types, shift, relu=shift % 2 == 1)
            program = check(proto, ROOMY[number], rng)
            assert program.macs_accelerator == program.macs_total > 0, reasons(program)


@pytest.mark.parametrize("name", ["Conv", "Gemm", "MatMul", "rows"])
def test_int32_biases_of_a_scale_of_their_own(name: str) -> None:
    """onnxruntime ignores the scale of an int32 bias in a product of bytes.

    A Gemm is such a product only if its weights have a zero point.
    """
    rng = np.random.default_rng(11)
    for shift in (-2, 0, 3, 6):
        program = check(product_model(name, rng, shift=shift, bias="int32", down=9), "tiny", rng)
        assert program.macs_accelerator == program.macs_total > 0, reasons(program)


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("types", [("uint8", "int8"), ("int8", "uint8")])
def test_results_of_another_type(name: str, types: tuple[str, str]) -> None:
    rng = np.random.default_rng(7)
    for bias in ("int8", "int32", "float"):
        program = check(product_model(name, rng, types, bias=bias), "tiny", rng)
        assert program.macs_accelerator == program.macs_total > 0, reasons(program)


@pytest.mark.parametrize("name", ["Conv", "depthwise", "transB", "Gemm"])
def test_a_scale_for_each_channel(name: str) -> None:
    rng = np.random.default_rng(3)
    for shift in (-2, 1, 4):
        program = check(product_model(name, rng, shift=shift, per_channel=True), "tiny", rng)
        assert program.macs_accelerator == program.macs_total > 0, reasons(program)


@pytest.mark.parametrize("down", [-1, 0, 1, 11, 14])
def test_steps_of_results(down: int) -> None:
    """Results may have any step.

    If it is below the products' step, a bias between two sums may keep them on the CPU.
    """
    rng = np.random.default_rng(down + 9)
    for shift in (-2, 0, 3):
        program = check(product_model("Conv", rng, shift=shift, down=down), "tiny", rng)
        if shift >= 0 or down > 0:
            assert program.macs_accelerator == program.macs_total > 0, reasons(program)


@pytest.mark.parametrize("name", ["Conv", "Gemm"])
def test_sums_that_may_round_stay_in_floats(name: str) -> None:
    """Sums that floats may round stay on the CPU; the next smaller power of two is exact.

    The reason states the largest sum of the weights.
    """
    rng = np.random.default_rng(1)
    proto = product_model(name, rng, largest=1, shift=0)
    taps = 72 if name == "Conv" else 24
    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    w = np.where(arrays["w"] < 0, -64, 64).astype(np.int8)
    largest = taps * 64 * max(127 - int(arrays["zx"]), int(arrays["zx"]) + 128)
    room = 23 - int(np.ceil(np.log2(largest)))
    for shift, is_exact in ((-room, True), (-room - 3, False)):
        sb = np.float32(float(arrays["sx"]) * float(arrays["sw"]) * 2.0**shift)
        odd = arrays["b"] | 1
        for tensor in proto.graph.initializer:
            new = {"w": w, "sb": sb, "b": odd, "sy": np.float32(2.0**12 * arrays["sx"] * arrays["sw"])}
            if tensor.name in new:
                tensor.CopyFrom(numpy_helper.from_array(np.asarray(new[tensor.name]), tensor.name))
        program = check(proto, "tiny", rng)
        assert program.macs_accelerator == (program.macs_total if is_exact else 0)
        assert ("float32 holds 24" in reasons(program)) == (not is_exact)


def test_scales_of_many_bits_stay_in_floats() -> None:
    rng = np.random.default_rng(2)
    proto = product_model("Conv", rng, ("uint8", "int8"), bias="float")
    for tensor in proto.graph.initializer:
        if tensor.name in ("sx", "sw"):
            tensor.CopyFrom(numpy_helper.from_array(np.float32(0.0123), tensor.name))
    program = celosia.compile(proto, "tiny")
    assert program.macs_accelerator == 0
    assert "float32 holds 24" in reasons(program)


def random_fit(rng: np.random.Generator) -> tuple[Any, ...]:
    """Draw arguments of `fit_float_product` whose sums have few enough values to try them all."""
    kinds = rng.choice(list(TYPES.values()), 2)
    zx, zy = (int(rng.integers(np.iinfo(kind).min, np.iinfo(kind).max + 1)) for kind in kinds)
    channels, odd = int(rng.integers(1, 4)), rng.choice([1, 1, 3, 5], 3)
    w = rng.integers(-9, 10, (channels, int(rng.integers(1, 9))))
    sx, sw = odd[:2] * 2.0 ** rng.integers(-12, 4, 2)
    sy = sx * sw * 2.0 ** rng.integers(-2, 9) * (odd[2] if rng.random() < 0.5 else rng.uniform(0.5, 1))
    bias = rng.integers(-300, 300, channels) * sx * sw * 2.0 ** rng.integers(-4, 5)
    return w, sw, bias.astype(np.float32), sx, zx, kinds[0], float(np.float32(sy)), zy, kinds[1]


def test_fitted_operands_have_the_bytes_of_all_sums() -> None:
    """Both formulas give the same byte for each integer between the least and the greatest sum."""
    rng, fitted_count = np.random.default_rng(5), 0
    for _ in range(400):
        w, sw, bias, sx, zx, x_kind, sy, zy, y_kind = random_fit(rng)
        try:
            fitted = numerics.fit_float_product(w, sw, bias, sx, zx, x_kind, sy, zy, y_kind)
        except numerics.RoundingError:
            continue
        fitted_count += 1
        low, high = np.iinfo(x_kind).min - zx, np.iinfo(x_kind).max - zx
        info = np.iinfo(y_kind)
        for channel, row in enumerate(w):
            ends = np.stack([np.minimum(row * low, row * high), np.maximum(row * low, row * high)]).sum(axis=1)
            acc = np.arange(ends[0], ends[1] + 1)
            real = acc * np.float64(sx) * np.float64(sw) + np.float64(bias[channel])
            assert np.array_equal(real.astype(np.float32), real)
            expected = numerics.quantize_linear(real, sy, zy, y_kind)
            scale = numerics.conv_scale(sx, fitted.w_scale[channel], sy)
            result = numerics.requantize_f32(acc, fitted.bias[channel], scale, fitted.zero_point, info.min, info.max)
            np.testing.assert_array_equal(result, expected)
    assert fitted_count > 250


def test_averages_times_a_constant() -> None:
    """An average times a constant is exact, as AMD's DPU quantisers write a division by a power of two."""
    rng = np.random.default_rng(6)
    factors = {3: 63 / 64, 5: 250 / 256, 6: 252 / 256, 7: 49 * 21 / 1024, 14: 196 * 21 / 4096, 4: 1.3}
    body = """a = DequantizeLinear(x, s, z) m = GlobalAveragePool(a) p = Mul(m, c) y = QuantizeLinear(p, t, u)"""
    for side, factor in factors.items():
        for kind, dtype in TYPES.items():
            zeros = rng.integers(np.iinfo(dtype).min, np.iinfo(dtype).max + 1, 2).astype(dtype)
            arrays = {"s": np.float32(2**-5), "z": zeros[0], "c": np.float32(factor), "t": np.float32(2**-6)}
            proto = model(body, (kind, [2, 12, side, side]), kind, arrays | {"u": zeros[1]})
            program = check(proto, "tiny", rng)
            assert [row["op"] for row in program.placements] == ["QLinearGlobalAveragePool"]
            assert not reasons(program)


def test_quantisations_that_are_equal_count_as_one_reader() -> None:
    """Equal quantisations count as one reader and neutral constants as none, as in onnxruntime."""
    rng = np.random.default_rng(8)
    arrays = {
        "s": np.float32(0.05),
        "z": np.int8(3),
        "t": np.float32(0.07),
        "one": np.float32(1),
        "zero": np.float32(0),
    }
    arrays |= {"w": rng.integers(-99, 99, (8, 8, 1, 1)).astype(np.int8), "sw": np.float32(0.01)}
    proto = model(
        """a = DequantizeLinear(x, s, z) wf = DequantizeLinear(w, sw) c = Conv(a, wf) d = Mul(c, one) e = Add(d, zero)
        q = QuantizeLinear(e, t, z) f = DequantizeLinear(q, t, z) g = Sigmoid(f)
        r = QuantizeLinear(e, t, z) h = DequantizeLinear(r, t, z)
        k = Mul(h, g) y = QuantizeLinear(k, t, z)""",
        ("int8", [1, 8, 5, 5]), "int8", arrays,
    )  # fmt: skip
    program = check(proto, "tiny", rng)
    assert not reasons(program)


@pytest.mark.parametrize("name", ["Conv", "depthwise", "transB", "rows"])
@pytest.mark.parametrize("types", [("uint8", "int8"), ("int8", "uint8"), ("int8", "int8")])
def test_correct_rounding_of_sums_that_floats_round(name: str, types: tuple[str, str]) -> None:
    """Each byte is that of the real sum under rounding="correct".

    It differs from onnxruntime's by at most one, and only next to ties.
    """
    rng, many, apart = np.random.default_rng(4), 0, 0
    bias = "float" if types[0] != types[1] else "int8"
    proto = product_model(name, rng, types, bias=bias, down=8)
    for tensor in proto.graph.initializer:
        if tensor.name in ("sx", "sw", "sy"):
            scale = numpy_helper.to_array(tensor) * np.float32(1.2345)
            tensor.CopyFrom(numpy_helper.from_array(np.asarray(scale, np.float32), tensor.name))
    assert celosia.compile(proto, "tiny").macs_accelerator == 0
    program, session = celosia.compile(proto, "tiny", rounding="correct"), opened(proto, int8=True)
    assert program.macs_accelerator == program.macs_total
    assert any("next to a tie" in info.note for step in program.launches for info in step.layers)
    exact = ReferenceEvaluator(in_doubles(proto))
    zero = int(next(numpy_helper.to_array(t) for t in proto.graph.initializer if t.name == "zy"))
    with celosia.Runtime(program) as runtime:
        for x in inputs(proto, rng):
            output = runtime.run({"x": x}).outputs["y"].astype(np.int64)
            expected = session.run(None, {"x": x})[0].astype(np.int64)
            assert np.abs(output - expected).max() <= 1
            info = np.iinfo(types[1])
            steps = np.clip(exact.run(None, {"x": x})[0], info.min - zero - 1, info.max - zero + 1)
            rounded = np.clip(np.rint(steps) + zero, info.min, info.max)
            near_tie = np.abs(np.abs(steps - np.rint(steps)) - 0.5) < 0.01  # a bias is rounded to steps of the products
            np.testing.assert_array_equal(output[~near_tie], rounded[~near_tie])
            many, apart = many + output.size, apart + int((output != expected).sum())
    assert apart <= many / 50


def in_doubles(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model that computes the product divided by the result's step in float64, without rounding."""
    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    graph = onnx.GraphProto()
    graph.CopyFrom(proto.graph)
    del graph.initializer[:], graph.node[:], graph.output[:]
    doubles = {"zx": np.float64(arrays["zx"]), "scale": np.float64(arrays["sx"]) / np.float64(arrays["sy"])}
    doubles["wf"] = arrays["w"].astype(np.float64) * np.float64(arrays["sw"])
    bias = arrays["bf"] if "bf" in arrays else arrays["b"].astype(np.float64) * np.float64(arrays["sb"])
    doubles["bf"] = bias.astype(np.float64) / np.float64(arrays["sy"])
    graph.initializer.extend(numpy_helper.from_array(np.asarray(array), name) for name, array in doubles.items())
    products = [node for node in proto.graph.node if node.op_type not in ("DequantizeLinear", "QuantizeLinear", "Relu")]
    graph.node.extend([
        helper.make_node("Cast", ["x"], ["xd"], to=onnx.TensorProto.DOUBLE),
        helper.make_node("Sub", ["xd", "zx"], ["u"]),
        helper.make_node("Mul", ["u", "scale"], ["a"]), *products,
    ])  # fmt: skip
    graph.output.append(helper.make_tensor_value_info("p", onnx.TensorProto.DOUBLE, None))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("types", [("int8", "uint8"), ("uint8", "int8")])
@pytest.mark.parametrize("relu", [False, True])
def test_operators_between_types(types: tuple[str, str], relu: bool) -> None:
    """Sums, functions and changes of scale may have operands and results of different byte types."""
    rng = np.random.default_rng(9)
    numbers = {"sx": 0.05, "st": 0.031, "su": 0.044, "sy": 0.07}
    for _ in range(6):
        zeros = {
            f"z{kind}": np.array(rng.integers(low, low + 256), kind) for kind, low in (("int8", -128), ("uint8", 0))
        }
        arrays: Arrays = {k: np.float32(v * rng.uniform(0.8, 1.2)) for k, v in numbers.items()} | zeros
        x, t = types
        proto = model(
            f"""a = DequantizeLinear(x, sx, z{x})
            r = QuantizeLinear(a, st, z{t}) b = DequantizeLinear(r, st, z{t})
            f = Sigmoid(a) q = QuantizeLinear(f, su, z{t}) c = DequantizeLinear(q, su, z{t})
            m = Add(a, b) n = {"Relu(m)" if relu else "Identity(m)"}
            k = QuantizeLinear(n, sy, z{x}) d = DequantizeLinear(k, sy, z{x})
            e = Add(c, d) y = QuantizeLinear(e, sy, z{t})""",
            (x, [1, 8, 6, 5]), t, arrays,
        )  # fmt: skip
        program = check(proto, "tiny", rng)
        assert program.launches


@pytest.mark.parametrize("rounding", ["onnxruntime", "correct"])
def test_products_of_bytes_in_onnxruntime_keep_their_operands(rounding: str) -> None:
    """Products that are integers in onnxruntime, too, have no remark, and the same result in each rounding."""
    rng = np.random.default_rng(12)
    for name in ("Conv", "Gemm", "MatMul"):
        proto = product_model(name, rng, bias="int32", shift=0)
        next(node for node in proto.graph.node if node.input[0] == "w").input.append("zw")
        proto.graph.initializer.append(numpy_helper.from_array(np.array(0, np.int8), "zw"))
        for tensor in proto.graph.initializer:
            if tensor.name in ("sx", "sb"):
                scale = numpy_helper.to_array(tensor) * np.float32(1.2345)
                tensor.CopyFrom(numpy_helper.from_array(np.asarray(scale, np.float32), tensor.name))
        program, session = celosia.compile(proto, "tiny", rounding=rounding), opened(proto, int8=True)
        assert not any(info.note for step in program.launches for info in step.layers)
        for x in inputs(proto, rng):
            np.testing.assert_array_equal(
                celosia.Runtime(program).run({"x": x}).outputs["y"], session.run(None, {"x": x})[0]
            )
