"""Whole models give the bytes of onnxruntime (agreement.py), on the functional device and on the RTL."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import pytest
from configs import CONFIGS as SMALL_CONFIGS
from hypothesis import HealthCheck, given, settings
from simulators import rtl_device
from small_models import Builder, Tensor, models
from thorough import FACTOR, paired, some, tries

import celosia
from celosia.driver.runtime import Runtime
from celosia.hw.spec.config import PRESETS
from celosia.models import demo_images, demo_model_path
from celosia.sim.device import Device
from celosia.sim.functional.fsim import FunctionalDevice
from celosia.sim.rtl.rtlsim import RtlDevice

pytest.importorskip("onnxruntime")

from agreement import CONFIGS, check, expected, feed_of

RTL_CONFIGS = {name: (PRESETS | SMALL_CONFIGS)[name] for name in ("tiny", "8x4-batch2-taps5", "batch2", "4x8", "8x4")}


@cache
def rtl(name: str) -> RtlDevice:
    return rtl_device(RTL_CONFIGS[name])


# Random models -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
@settings(max_examples=tries(5), deadline=None, suppress_health_check=list(HealthCheck))
@given(b=models())
def test_random_models(name: str, b: Builder) -> None:
    check(b, FunctionalDevice(CONFIGS[name]))


@pytest.mark.rtl
@pytest.mark.parametrize("name", some(RTL_CONFIGS, ["tiny", "8x4-batch2-taps5"]))
@settings(max_examples=tries(4), deadline=None, suppress_health_check=list(HealthCheck))
@given(b=models())
def test_random_models_rtl(name: str, b: Builder) -> None:
    check(b, rtl(name))


# Every operator, placed ------------------------------------------------------------------------------------------


def case(build: Callable[[Builder, Tensor], Tensor]) -> Callable[[Builder], None]:
    """Return a function that builds a model with `build` on a [2, 12, 9, 7] result of a convolution."""

    def make(b: Builder) -> None:
        x = b.conv(b.input([2, 5, 9, 7]), 12, (1, 1))
        b.output(build(b, x))

    return make


def residual_fused(b: Builder, x: Tensor) -> Tensor:
    return b.binary("Add", b.conv(x, 12, (3, 3), pads=(1, 1, 1, 1)), x)


def residual_unfused(b: Builder, x: Tensor) -> Tensor:
    y = b.conv(x, 12, (3, 3), pads=(1, 1, 1, 1))
    return b.binary("Mul", b.binary("Add", x, y), y)


def gaps(b: Builder, x: Tensor) -> list[Tensor]:
    """Add two convolutions that read a concatenation of parts that end inside a group of channels."""
    parts = [b.conv(x, 5, (1, 1)), x, b.conv(x, 7, (1, 1), activation="Relu")]
    y = b.concat(parts, equal=False)
    return [b.conv(y, 4, (3, 3), pads=(1, 1, 1, 1)), b.conv(y, 9, (1, 1))]


CASES: dict[str, Callable[[Builder, Tensor], Tensor]] = {
    "conv 3x3": lambda b, x: b.conv(x, 20, (3, 3), pads=(1, 1, 1, 1)),
    "conv per tensor": lambda b, x: b.conv(x, 20, (3, 3), pads=(1, 1, 1, 1), per_channel=False, bias=False),
    "conv strided, asymmetric pads": lambda b, x: b.conv(x, 7, (4, 2), (3, 2), (0, 1, 2, 0)),
    "conv dilated": lambda b, x: b.conv(x, 7, (3, 3), (1, 1), (2, 0, 1, 2), (2, 3)),
    "conv 1xN": lambda b, x: b.conv(x, 5, (1, 5), (1, 1), (0, 2, 0, 2)),
    "conv 7x7": lambda b, x: b.conv(x, 5, (7, 7), (1, 1), (3, 3, 3, 3)),
    "conv SAME_UPPER": lambda b, x: b.conv(x, 5, (4, 4), (2, 1), auto_pad="SAME_UPPER"),
    "conv SAME_LOWER": lambda b, x: b.conv(x, 5, (2, 4), (1, 1), auto_pad="SAME_LOWER"),
    "conv of one dimension": lambda b, x: b.conv(b.reshape(x, (2, 12, 63)), 5, (3,), (2,), (1, 0), (2,)),
    "conv 3 groups": lambda b, x: b.conv(x, 9, (3, 3), group=3),
    "conv 2 groups of 6": lambda b, x: b.conv(x, 16, (1, 1), group=2),
    "depthwise": lambda b, x: b.conv(x, 12, (3, 3), pads=(1, 1, 1, 1), group=12),
    "depthwise strided, dilated": lambda b, x: b.conv(x, 12, (3, 2), (2, 2), (2, 1, 2, 1), (2, 2), group=12),
    "depthwise, 2 of each": lambda b, x: b.conv(x, 24, (3, 3), group=12),
    "conv and Relu": lambda b, x: b.conv(x, 8, (1, 1), activation="Relu"),
    "conv and Clip": lambda b, x: b.conv(x, 8, (1, 1), activation="Clip"),
    "Relu kept between pairs": lambda b, x: b.conv(x, 8, (1, 1), activation="kept"),
    "Gemm": lambda b, x: b.matmul(b.flatten(x), 10),
    "Gemm of [K, N] per channel": lambda b, x: b.matmul(b.flatten(x), 10, trans_b=0),
    "MatMul": lambda b, x: b.matmul(b.flatten(x), 10, "MatMul"),
    "MatMul of rows": lambda b, x: b.matmul(b.reshape(x, (2, 12, 63)), 10, "MatMul"),
    "residual, fused": residual_fused,
    "residual, unfused": residual_unfused,
    "Add to itself": lambda b, x: b.binary("Add", x, x),
    "MaxPool": lambda b, x: b.max_pool(x, (2, 2), (2, 2), (0, 0, 0, 0)),
    "MaxPool padded, ceil_mode": lambda b, x: b.max_pool(x, (3, 3), (2, 2), (1, 0, 0, 1), ceil_mode=1),
    "AveragePool": lambda b, x: b.average_pool(x, (3, 2), (2, 1), (0, 0, 0, 0)),
    "GlobalAveragePool": lambda b, x: b.global_average(x),
    "Concat aligned": lambda b, x: b.concat([x, b.conv(x, 16, (1, 1))], equal=False),
    "Concat of equal scales": lambda b, x: b.concat([x, b.max_pool(x, (1, 1), (1, 1), (0, 0, 0, 0))], equal=True),
    "Concat with gaps": lambda b, x: gaps(b, x)[0],
    "Sigmoid": lambda b, x: b.unary(x, "Sigmoid"),
    "HardSwish": lambda b, x: b.hard_swish(x),
    "LeakyRelu": lambda b, x: b.unary(x, "LeakyRelu", alpha=0.1),
    "Tanh": lambda b, x: b.unary(x, "Tanh"),
    "Mul": lambda b, x: b.binary("Mul", x, b.conv(x, 12, (1, 1))),
    "squeeze and excite": lambda b, x: b.squeeze_excite(x, 5),
}
HOST = {"QuantizeLinear", "DequantizeLinear", "Reshape", "Flatten"}
"""Operators that these cases may leave to the host."""


FORMS = [("qdq", "int8"), ("qoperator", "uint8"), ("qoperator", "int8"), ("qdq", "uint8")]


@pytest.mark.parametrize(("name", "form"), paired(CASES, FORMS))
def test_operator(name: str, form: tuple[str, str]) -> None:
    configs = ("tiny", "batch2-8x4")
    for config in configs if FACTOR >= 1 else [configs[[*CASES].index(name) // len(FORMS) % 2]]:
        b = Builder(*form, seed=5)
        b.rounding = "correct" if name == "AveragePool" else "onnxruntime"
        case(CASES[name])(b)
        program = check(b, FunctionalDevice(CONFIGS[config]))
        on_cpu = [row for row in program.placements if row["place"] == "cpu" and row["op"] not in HOST]
        assert not on_cpu


@pytest.mark.rtl
def test_operators_rtl() -> None:
    for name in CASES if FACTOR >= 1 else [*CASES][::6]:  # tests of random programs compare the RTL more often
        b = Builder("qdq", np.int8, seed=6)
        case(CASES[name])(b)
        check(b, rtl("tiny"))


def test_unaligned_concat_is_right_wherever_it_runs() -> None:
    for parts in ([5, 3], [12, 1, 4], [1, 1, 1]):
        b = Builder("qdq", np.uint8, seed=7)
        x = b.input([1, 6, 5, 5])
        b.output(b.concat([b.conv(x, part, (1, 1)) for part in parts], equal=False))
        check(b, FunctionalDevice(CONFIGS["tiny"]))


@pytest.mark.parametrize("op", ["AveragePool", "ConvTranspose"])
def test_table_joins_layers_that_make_a_part_each(op: str) -> None:
    b = Builder("qdq", np.int8, seed=11)
    x = b.conv(b.input([1, 6, 5, 5]), 6, (1, 1))
    if op == "AveragePool":
        b.rounding = "correct"
        y = b.average_pool(x, (3, 3), (1, 1), (1, 1, 1, 1))
    else:
        y = b.conv_transpose(x, 6, (4, 4), (2, 2), (1, 1, 1, 1))
    b.output(b.unary(y, "Tanh"))
    program = check(b, FunctionalDevice(CONFIGS["tiny"]))
    kinds = [layer.op for launch in program.launches for layer in launch.layers]
    assert len(kinds) > 3 and "Map" not in kinds


def test_concat_has_no_gaps_where_the_cpu_reads_it() -> None:
    for reads in ("by a convolution", "as an output"):
        b = Builder("qoperator", np.int8, seed=7)
        y = b.concat([b.conv(b.input([1, 6, 5, 5]), part, (1, 1)) for part in (5, 3)], equal=False)
        b.output(b.conv(y, 9, (1, 1)))
        if reads == "as an output":
            b.output(y)
        model = b.model()
        last = [node.name for node in model.graph.node if node.op_type == "QLinearConv"][-1]
        place = {last: "cpu"} if reads == "by a convolution" else {}
        program = celosia.compile(model, CONFIGS["tiny"], place=place)
        assert [row["place"] for row in program.placements if row["op"] == "QLinearConcat"] == ["cpu"]
        feed = feed_of(model, 0)
        for output, reference in zip(Runtime(program).run(feed).outputs.values(), expected(model, feed), strict=True):
            assert np.array_equal(output, reference)


def test_gelu_and_softplus_within_a_step() -> None:
    """Gelu and Softplus are within one step of onnxruntime, which approximates them in float."""
    for op, opset in (("Softplus", 17), ("Gelu", 20)):
        b = Builder("qdq", np.int8, seed=8, opset=opset)
        y = b.unary(b.conv(b.input([1, 3, 8, 8]), 8, (1, 1)), op)
        b.output(y)
        b.inexact.update(b.steps)
        check(b, FunctionalDevice(CONFIGS["tiny"]))


def test_sums_beyond_24_bits() -> None:
    """Sums that do not fit the significand of onnxruntime's float32 are right."""
    b = Builder("qdq", np.int8, seed=10)
    b.one_sided = True
    b.output(b.matmul(b.input([8, 6000], scale=0.01), 24, "MatMul"))
    model = b.model()
    feed = {"input_1": np.random.default_rng(0).uniform(0, 2, (8, 6000)).astype(np.float32)}
    for config in ("tiny", "pynq"):
        (output,) = Runtime(celosia.compile(model, config)).run(feed).outputs.values()
        (reference,) = expected(model, feed)
        assert np.array_equal(output, reference)
        assert len(np.unique(reference)) > 10


def test_two_inputs_and_outputs() -> None:
    b = Builder("qdq", np.int8, seed=9)
    x, y = b.input([1, 8, 4, 4]), b.input([1, 8, 4, 4])
    z = b.binary("Add", x, b.conv(y, 8, (1, 1)))
    b.output(z)
    b.output(b.global_average(z), real=True)
    check(b, FunctionalDevice(CONFIGS["tiny"]))


# Tests of the tests themselves --------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["qdq", "qoperator"])
def test_onnxruntime_ran_in_integers(form: str, tmp_path: Path) -> None:
    """If outputs must be exact, onnxruntime computes no convolution, product or sum in float."""
    b = Builder(form, np.int8, seed=1)
    x = b.input([1, 5, 9, 7])
    for name in ("residual, fused", "conv and Relu", "MaxPool", "Concat aligned", "squeeze and excite", "Gemm"):
        b.output(CASES[name](b, b.conv(x, 12, (1, 1))))
    expected(b.model(), feed_of(b.model()), tmp_path / "optimised.onnx")
    operators = {node.op_type for node in onnx.load(tmp_path / "optimised.onnx").graph.node}
    assert operators.isdisjoint({"Conv", "Gemm", "MatMul", "Add", "Mul", "Concat", "GlobalAveragePool"}), operators


def test_outputs_are_lively() -> None:
    """Outputs have many values, mostly inside the limits, so that a wrong result would differ."""
    for name in CASES:
        b = Builder("qdq", np.int8, seed=5)
        case(CASES[name])(b)
        model = b.model()
        (output,) = expected(model, feed_of(model))
        assert len(np.unique(output)) >= min(15, output.size // 2), name
        assert np.mean((output == 127) | (output == -128)) < 0.9, name


def test_a_wrong_weight_is_noticed() -> None:
    b = Builder("qdq", np.int8, seed=1)
    b.output(b.conv(b.input([1, 4, 6, 6]), 4, (3, 3)))
    model = b.model()
    feed, program = feed_of(model), celosia.compile(b.model(), "tiny")
    (reference,) = expected(model, feed)
    good = Runtime(program).run(feed).outputs
    assert all(np.array_equal(output, reference) for output in good.values())
    weights = next(array for name, array in b.constants.items() if name.startswith("weights"))
    place = program.image.tobytes().find(weights[0, :, 0, 0].tobytes())
    assert place >= 0
    program.image = program.image.copy()
    program.image[place] ^= 0x40
    bad = Runtime(program).run(feed).outputs
    assert not any(np.array_equal(output, reference) for output in bad.values())


# The demo model ------------------------------------------------------------------------------------------------


def demo(device: Device, count: int) -> None:
    program = celosia.compile(demo_model_path(), device.config)
    cpu_operators = {row["op"] for row in program.placements if row["place"] == "cpu"}
    assert cpu_operators <= {"QuantizeLinear", "DequantizeLinear"} and len(program.launches) == 1
    runtime, model = Runtime(program, device), onnx.load(demo_model_path())
    for image in demo_images()[0][:count]:
        feed = {"image": image[None]}
        (reference,) = expected(model, feed)
        assert np.array_equal(runtime.run(feed, trace=False).outputs["logits"], reference)


@pytest.mark.parametrize("name", some(["tiny", "pynq", "8x8", "4x16"], ["4x16"]))
def test_demo(name: str) -> None:
    demo(FunctionalDevice(CONFIGS[name]), 3)


@pytest.mark.rtl
@pytest.mark.thorough  # tests/sim/test_timing.py runs it on this RTL, too
def test_demo_rtl() -> None:
    demo(rtl("tiny"), 2)


def attention(seed: int, bias: str) -> tuple[Builder, onnx.ModelProto]:
    """Return QDQ products as exporters write them: of rank 3, with an added bias, transposed before quantisation.

    bias: "float" for a bias that is not quantised. The last products stay float.
    """
    b = Builder("qdq", np.int8, seed=seed)
    x = b.input([1, 12, 32])

    def dense(x: Tensor, out: int) -> tuple[str, float]:
        w, scale, meaning = b.weights((x.shape[-1], out), out, True, 1)
        y = b.node("MatMul", [b.real(x), b.node("DequantizeLinear", [w, *meaning], axis=1)])
        steps = b.rng.integers(-5000, 5000, out)
        step = np.float32(x.scale) * scale
        if bias == "float":
            name = b.constant("bias", (steps + b.rng.uniform(-0.4, 0.4, out)) * step, np.float32)
        else:
            zero = b.constant("zero", np.zeros(out, np.int32))
            name = b.node("DequantizeLinear", [b.constant("b", steps, np.int32), b.constant("s", step), zero], axis=0)
        return b.node("Add", [y, name]), b._spread(x, scale, x.shape[-1])

    def heads(y: str, perm: list[int]) -> str:
        shape = b.constant("shape", [1, 12, 2, 16], np.int64)
        return b.node("Transpose", [b.node("Reshape", [y, shape])], perm=perm)

    (q, sq), (k, sk) = dense(x, 32), dense(x, 32)
    left = b.quantise(heads(q, [0, 2, 1, 3]), (1, 2, 12, 16), sq)
    right = b.quantise(heads(k, [0, 2, 3, 1]), (1, 2, 16, 12), sk)
    scores = b.node("MatMul", [b.real(left), b.real(right)])
    b.outputs.append(onnx.helper.make_tensor_value_info(scores, onnx.TensorProto.FLOAT, [1, 2, 12, 12]))
    top, _ = dense(left, 8)
    b.outputs.append(onnx.helper.make_tensor_value_info(top, onnx.TensorProto.FLOAT, [1, 2, 12, 8]))
    return b, b.model()


@pytest.mark.parametrize("accelerator", [False, True])
@pytest.mark.parametrize("bias", ["int32", "float"])
def test_products_that_are_not_quantised_are_integer_operators(bias: str, accelerator: bool) -> None:
    _, model = attention(3, bias)
    program = celosia.compile(model, accelerator=accelerator)
    floats = [row["op"] for row in program.placements if row["op"] in ("MatMul", "Gemm")]
    assert not floats
    assert bool(program.launches) == accelerator
    for seed in range(3):
        feed = feed_of(model, seed)
        scores, top = Runtime(program).run(feed).outputs.values()
        want_scores, want_top = expected(model, feed)
        np.testing.assert_array_equal(scores, want_scores)
        if bias == "int32":
            np.testing.assert_array_equal(top, want_top)
        else:  # onnxruntime multiplies floats here
            np.testing.assert_allclose(top, want_top, rtol=1e-5, atol=1e-5 * np.abs(want_top).max())
