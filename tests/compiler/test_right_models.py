"""The check of compiled models accepts correct ones; onnxruntime is the oracle.

Models have random windows between bytes, or functions of floats whose results are all small or all large.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper
from oracle import opened
from thorough import paired, some

import celosia
from celosia.compiler.cpu.kernels import compile_op
from celosia.compiler.graph.passes import GraphPass, Pipeline
from celosia.compiler.graph.pipeline import PASSES
from celosia.compiler.program.host.float32_math import logistic
from celosia.compiler.program.host.shape_rules import windows
from celosia.compiler.selfcheck import check_rewriting
from celosia.compiler.selfcheck.check_launches import CheckFailed
from celosia.compiler.selfcheck.check_rewriting import RewriteError
from celosia.compiler.selfcheck.imported_model import Original
from celosia.driver.runtime import Runtime

Array = np.ndarray[Any, Any]
Feed = dict[str, Array]
node = helper.make_node


def model(
    nodes: list[onnx.NodeProto], size: tuple[int, ...], constants: dict[str, Any], opset: int = 21
) -> onnx.ModelProto:
    """Return a model from float `x` of this size to float `y`."""
    element = TensorProto.FLOAT
    graph = helper.make_graph(
        nodes, "graph", [helper.make_tensor_value_info("x", element, size)],
        [helper.make_tensor_value_info("y", element, None)],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items()],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def by_onnxruntime(proto: onnx.ModelProto, feed: Feed) -> Array:
    (y,) = opened(proto, int8=True).run(None, feed)
    return np.asarray(y)


def run(proto: onnx.ModelProto, feed: Feed, config: str = "tiny") -> Array:
    return Runtime(celosia.compile(proto, config)).run(feed).outputs["y"]


# Windows between QuantizeLinear and DequantizeLinear ------------------------------------------------------------------

AUTO = ("SAME_UPPER", "SAME_LOWER", "VALID")


def window_model(rng: np.random.Generator, op: str, auto: str) -> tuple[onnx.ModelProto, Feed]:
    """Return a model of `op` on bytes, and inputs: kernels of 1 to 4, strides of 1 to 6."""
    size, kernel = (tuple(int(n) for n in rng.integers(low, high, 2)) for low, high in ((4, 11), (1, 5)))
    channels, kind = int(rng.choice([1, 3, 8])), rng.choice([np.int8, np.uint8])
    attrs: dict[str, Any] = {"strides": [int(n) for n in rng.integers(1, 7, 2)], "auto_pad": auto}
    if op in ("MaxPool", "LpPool") and rng.random() < 0.3:
        attrs["dilations"] = [int(n) for n in rng.integers(1, 3, 2)]
    constants = {"sx": np.float32(0.05), "zx": kind(3), "sy": np.float32(0.05), "zy": kind(3)}
    middle = []
    if op.endswith("Pool"):
        middle = [node(op, ["d"], ["c"], kernel_shape=kernel, **attrs)]
    else:
        shape = (8, channels, *kernel) if op == "Conv" else (channels, 8, *kernel)
        w = rng.integers(-127, 128, shape).astype(np.int8)
        constants |= {"w": w, "sw": np.float32(0.02), "zw": np.int8(0)}
        middle = [node("DequantizeLinear", ["w", "sw", "zw"], ["dw"]), node(op, ["d", "dw"], ["c"], **attrs)]
    nodes = [
        node("QuantizeLinear", ["x", "sx", "zx"], ["q"]), node("DequantizeLinear", ["q", "sx", "zx"], ["d"]), *middle,
        node("QuantizeLinear", ["c", "sy", "zy"], ["r"]), node("DequantizeLinear", ["r", "sy", "zy"], ["y"]),
    ]  # fmt: skip
    shape = (1, channels, *size)
    return model(nodes, shape, constants), {"x": rng.normal(0, 3, shape).astype(np.float32)}


STEPS = {"ConvTranspose": 1, "LpPool": 1}
"""By how many bytes a result may differ next to a tie: onnxruntime computes these in floats (docs/numerics.md)."""


@pytest.mark.parametrize("seed", some(range(12), [0]))
@pytest.mark.parametrize("op", ["MaxPool", "AveragePool", "LpPool", "Conv", "ConvTranspose"])
def test_random_windows_pass_the_check_and_are_onnxruntimes(op: str, seed: int) -> None:
    rng, compared = np.random.default_rng((seed, len(op))), 0
    for number in range(4):
        proto, feed = window_model(rng, op, AUTO[number % 3])
        try:
            expected = by_onnxruntime(proto, feed)
        except Exception:  # onnxruntime refuses windows larger than the image, and has several classes for it
            continue
        result = run(proto, feed, "pynq" if number % 2 else "tiny")
        assert result.shape == expected.shape
        steps = np.rint(np.abs(result - expected) / np.float32(0.05))
        assert np.max(steps, initial=0) <= STEPS.get(op, 0), (number, proto.graph.node)
        compared += 1
    assert compared > 1


def test_windows_that_begin_inside_the_image_are_framed_as_they_are_read() -> None:
    """The first window may begin inside the image: at element 1 for kernel 2, stride 4, SAME_UPPER and 8 elements."""
    window = windows("MaxPool", {"kernel_shape": [2], "strides": [4], "auto_pad": "SAME_UPPER"}, [8])
    assert window.before == (-1,)
    assert window.pad(np.arange(8), -1, 0).tolist() == [1, 2, 3, 4, 5, 6, 7]
    wide = windows("MaxPool", {"kernel_shape": [3], "pads": [1, 1]}, [3])
    assert wide.pad(np.arange(3), -1, 0).tolist() == [-1, 0, 1, 2, -1]


# Functions whose results are all small or all large -------------------------------------------------------------------

FUNCTIONS = (
    "Abs", "Acosh", "Asinh", "Atan", "Ceil", "Celu", "Cos", "Elu", "Erf", "Exp", "Floor", "Gelu", "HardSigmoid",
    "HardSwish", "LeakyRelu", "Log", "Mish", "Neg", "Reciprocal", "Relu", "Round", "Selu", "Sigmoid", "Sign", "Sin",
    "Sinh", "Softmax", "Softplus", "Softsign", "Sqrt", "Tan", "Tanh", "ThresholdedRelu",
)  # fmt: skip
SHIFTS = (-100.0, -88.0, -17.2, -16.0, -10.0, -6.28, -1.0, 0.0, 3.14159265, 20.0, 88.0)
LATER: dict[str, list[onnx.NodeProto]] = {
    "alone": [node("Transpose", ["u"], ["y"])],
    "Log": [node("Log", ["u"], ["y"])],
    "Mul": [node("Mul", ["u", "c"], ["y"])],
    "Sub": [node("Sub", ["one", "u"], ["y"])],
}


def function_model(op: str, shift: float, scale: float, later: str, seed: int) -> tuple[onnx.ModelProto, Feed]:
    """Return `op` of a convolution whose results lie around `shift`, and the operators after it."""
    rng = np.random.default_rng(seed)
    w = (rng.normal(size=(8, 4, 3, 3)) * scale / 6).astype(np.float32)
    constants = {"w": w, "b": np.full(8, shift, np.float32), "one": np.float32(1)}
    nodes = [node("Conv", ["x", "w", "b"], ["c"], pads=[1] * 4), node(op, ["c"], ["u"]), *LATER[later]]
    return model(nodes, (1, 4, 9, 9), constants, 20), {"x": rng.normal(size=(1, 4, 9, 9)).astype(np.float32)}


def function_cases() -> Iterator[tuple[str, float, float, str]]:
    for number, op in enumerate(FUNCTIONS):
        for place, shift in enumerate(SHIFTS):
            yield op, shift, (1e-4, 0.1, 1.0, 3.0)[(number + place) % 4], [*LATER][(number + place // 2) % 4]


ALWAYS = [case for number, case in enumerate(function_cases()) if number % 37 == 0]
REFUSED = [("Sigmoid", -10.0, 0.1, "alone"), ("Sigmoid", -10.0, 0.1, "Log"), ("Sigmoid", -16.0, 1.0, "Mul")]
"""What the check once refused."""


@pytest.mark.parametrize(("op", "shift", "scale", "later"), some([*function_cases(), *REFUSED], [*ALWAYS, *REFUSED]))
def test_results_that_are_all_small_or_large_pass_the_check(op: str, shift: float, scale: float, later: str) -> None:
    proto, feed = function_model(op, shift, scale, later, seed=1)
    expected, result = by_onnxruntime(proto, feed), run(proto, feed)
    assert result.shape == expected.shape and result.dtype == expected.dtype


@pytest.mark.parametrize("op", ["Sigmoid", "Swish", "QuickGelu"])
def test_rounding_decides_whether_a_logarithm_is_infinite_or_none(op: str) -> None:
    """The check accepts a Log that rounding makes infinite: a sigmoid of about -17 is 0 or 2^-25."""
    rng = np.random.default_rng(250)
    constants = {"w": rng.normal(0, 0.5, (8, 4, 3, 3)).astype(np.float32), "b": np.full(8, -16, np.float32)}
    domain = "com.microsoft" if op == "QuickGelu" else ""
    nodes = [
        node("Conv", ["x", "w", "b"], ["c"], pads=[1] * 4), node(op, ["c"], ["u"], domain=domain),
        node("Log", ["u"], ["y"]),
    ]  # fmt: skip
    celosia.compile(model(nodes, (1, 4, 12, 12), constants, 24), "tiny")


def test_sigmoid_is_onnxruntimes_in_kernels_and_on_the_host() -> None:
    rng = np.random.default_rng(0)
    parts = [rng.normal(0, width, 5000) for width in (0.01, 1, 5, 12, 30)]
    x = np.concatenate([*parts, [np.nan, np.inf, -np.inf, 0.0, -0.0, 18, -18, -17.99]]).astype(np.float32)
    proto = model([node("Sigmoid", ["x"], ["y"])], x.shape, {})
    expected = by_onnxruntime(proto, {"x": x})
    (kernel,) = compile_op("Sigmoid", {}, [(x.shape, "float32")])(x)
    np.testing.assert_array_equal(kernel.view(np.int32), expected.view(np.int32))
    np.testing.assert_array_equal(logistic(x).view(np.int32), expected.view(np.int32))


# Planted faults -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("op", "shift"), paired(["Sigmoid", "Swish", "Gelu", "Elu"], [-10.0, 0.0]))
def test_a_function_of_something_else_is_found(op: str, shift: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check finds a pass that halves the operand of a function, for small and for large results."""

    def halves(graph: ir.Model) -> None:
        for factor in graph.graph:
            if factor.op_type == "Mul" and factor.name == "scaled":
                value = ir.Value(name="half", shape=ir.Shape(()), type=ir.TensorType(ir.DataType.FLOAT))
                value.const_value = ir.tensor(np.float32(0.5), name="half")
                graph.graph.register_initializer(value)
                factor.replace_input_with(1, value)

    nodes = [
        node("Add", ["x", "b"], ["a"]), node("Mul", ["a", "s"], ["m"], name="scaled"), node(op, ["m"], ["u"]),
        node("Transpose", ["u"], ["y"]),
    ]  # fmt: skip
    proto = model(nodes, (16, 16), {"b": np.float32(shift), "s": np.float32(0.8)}, 24)
    celosia.compile(proto, "tiny")
    wrong = Pipeline(*PASSES, GraphPass("halve", "is wrong", halves, inside=False))
    monkeypatch.setattr("celosia.compiler.graph.pipeline.PASSES", wrong)
    with pytest.raises(RewriteError, match="model's own operators"):
        celosia.compile(proto, "tiny")


def test_a_fault_is_found_although_the_check_of_another_tensor_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    compute = Original.compute

    def broken(self: Original, tensor: int, *given: Any, **named: Any) -> Any:
        if self.number.get("bad") == tensor:
            raise IndexError("no such place")
        return compute(self, tensor, *given, **named)

    nodes = [
        node("Add", ["x", "one"], ["a"]), node("Exp", ["a"], ["e"]), node("Neg", ["e"], ["bad"]),
        node("Mul", ["x", "two"], ["m"]), node("Exp", ["m"], ["f"]), node("Neg", ["f"], ["y"]),
    ]  # fmt: skip
    proto = model(nodes, (4, 4), {"one": np.float32(1), "two": np.float32(2)})
    proto.graph.output.insert(0, helper.make_tensor_value_info("bad", TensorProto.FLOAT, [4, 4]))
    monkeypatch.setattr(Original, "compute", broken)
    with pytest.raises(CheckFailed, match="IndexError: no such place"):
        celosia.compile(proto, "tiny")
    difference = check_rewriting.Comparison.difference
    monkeypatch.setattr(
        check_rewriting.Comparison, "difference",
        lambda self, name: "all of it" if name == "y" else difference(self, name),
    )  # fmt: skip
    with pytest.raises(RewriteError, match="all of it"):
        celosia.compile(proto, "tiny")


# Types of zero points -------------------------------------------------------------------------------------------------


FEW_BITS = ("float8_e4m3fn", "float8_e5m2", "int4", "uint4", "int16")


@pytest.mark.parametrize(("name", "by"), paired(FEW_BITS, ["zero point", "output_dtype"]))
def test_inputs_that_become_few_bits_pass_the_check(name: str, by: str) -> None:
    kind = np.dtype(getattr(ml_dtypes, name, name))
    number = helper.np_dtype_to_tensor_dtype(kind)
    zero = {"z": numpy_helper.from_array(np.zeros((), kind), "z")} if by == "zero point" else {}
    attrs = {} if zero else {"output_dtype": number}
    nodes = [
        node("QuantizeLinear", ["x", "s", *zero], ["q"], **attrs), node("DequantizeLinear", ["q", "s", *zero], ["d"]),
        node("Relu", ["d"], ["r"]), node("Exp", ["r"], ["y"]),
    ]  # fmt: skip
    proto = model(nodes, (3, 8), {"s": np.float32(0.1)})
    proto.graph.initializer.extend(zero.values())
    feed = {"x": np.random.default_rng(0).normal(0, 3, (3, 8)).astype(np.float32)}
    np.testing.assert_allclose(run(proto, feed), by_onnxruntime(proto, feed), rtol=1e-5)


def quantised_model(opset: int, to: str, attrs: dict[str, int], scale: str = "FLOAT") -> tuple[onnx.ModelProto, Feed]:
    """Return a QuantizeLinear to a type that only an attribute defines, and back."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [3, 8])
    q = helper.make_tensor_value_info("q", TensorProto.DataType.Value(to), [3, 8])
    y = helper.make_tensor_value_info("y", attrs.get("output_dtype", TensorProto.DataType.Value(scale)), [3, 8])
    s = helper.make_tensor("s", TensorProto.DataType.Value(scale), [], [0.0625])
    nodes = [
        node("Cast", ["x"], ["f"], to=TensorProto.DataType.Value(scale)),
        node("QuantizeLinear", ["f", "s"], ["q"], output_dtype=TensorProto.DataType.Value(to)),
        node("DequantizeLinear", ["q", "s"], ["y"], **attrs),
    ]
    graph = helper.make_graph(nodes, "graph", [x], [y], [s], value_info=[q])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=11)
    return proto, {"x": np.random.default_rng(1).normal(0, 2, (3, 8)).astype(np.float32)}


NARROW = ("INT8", "UINT8", "INT16", "UINT16", "INT4", "UINT4", "FLOAT8E4M3FN", "FLOAT8E5M2", "FLOAT8E4M3FNUZ")


@pytest.mark.parametrize(("to", "scale"), paired(NARROW, ["FLOAT", "FLOAT16"]))
def test_the_attribute_output_dtype_says_the_type(to: str, scale: str) -> None:
    compared = 0
    for opset, attrs in (
        (21, {}),
        (23, {"output_dtype": TensorProto.FLOAT16}),
        (25, {"output_dtype": TensorProto.FLOAT}),
    ):
        proto, feed = quantised_model(opset, to, attrs, scale)
        try:
            expected = by_onnxruntime(proto, feed)
        except Exception:  # onnxruntime has no kernel for this type
            continue
        result = run(proto, feed)
        assert result.dtype == expected.dtype and result.tobytes() == expected.tobytes(), (opset, attrs)
        compared += 1
    assert compared


PARTS = "Add(a, b)", "Sigmoid(a)", "ConvTranspose(a, w, bias)", "AveragePool<kernel_shape = [1, 1]>(a)"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("part", PARTS)
def test_what_is_quantised_behind_a_concat_stays_floats(part: str, seed: int) -> None:
    """A Concat of a quantised and a float part stays in floats: onnxruntime has no integer operator for the latter."""
    rng = np.random.default_rng(seed)
    proto = onnx.parser.parse_model(f"""<ir_version: 9, opset_import: ["": 17]>
        g (float[1, 4, 8, 8] x) => (float[1, 8, 8, 8] y)
        <float s = {{{rng.uniform(0.01, 0.03)}}}, float t = {{{rng.uniform(0.01, 0.03)}}}, int8 z = {{0}}> {{
            p = QuantizeLinear(x, s, z) a = DequantizeLinear(p, s, z) u = Neg(x)
            q = QuantizeLinear(u, t, z) b = DequantizeLinear(q, t, z) w = DequantizeLinear(weights, t, z)
            c = {part} d = Concat<axis = 1>(c, b) e = QuantizeLinear(d, t, z) y = DequantizeLinear(e, t, z) }}""")
    proto.graph.initializer.extend([
        numpy_helper.from_array(rng.integers(-128, 128, (4, 4, 1, 1), np.int8), "weights"),
        numpy_helper.from_array(rng.normal(size=4).astype(np.float32), "bias"),
    ])  # fmt: skip
    feed = {"x": rng.normal(size=(1, 4, 8, 8)).astype(np.float32)}
    (expected,) = opened(proto.SerializeToString()).run(None, feed)
    np.testing.assert_array_equal(celosia.Runtime(celosia.compile(proto, "tiny")).run(feed).outputs["y"], expected)


MOVES = (
    "Pad(c, pads)",
    "Pad(r, pads)",
    "Gather<axis = 1>(c, rows)",
    'Resize<mode = "nearest">(c, , factors)',
    "DepthToSpace<blocksize = 2>(c)",
    "Tile(r, factors_int)",
)


@pytest.mark.parametrize("seed", some(range(3), [0]))
@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("maker", ["Conv<pads = [1, 1, 1, 1]>(a, w, bias)", *PARTS])
def test_what_is_quantised_behind_an_operator_that_moves_elements_stays_floats(
    maker: str, move: str, seed: int
) -> None:
    """onnxruntime moves QuantizeLinear before only some operators that move elements; the others stay in floats.

    Integers and floats round some results near a tie differently.
    """
    rng = np.random.default_rng(seed)
    proto = onnx.parser.parse_model(f"""<ir_version: 9, opset_import: ["": 17]>
        g (float[1, 4, 8, 8] x) => (y)
        <float s = {{{rng.uniform(0.01, 0.03)}}}, float t = {{{rng.uniform(0.01, 0.03)}}}, int8 z = {{0}},
         int64[8] pads = {{0, 0, 1, 1, 0, 0, 1, 1}}, int64[3] rows = {{2, 0, 3}}, float[4] factors = {{1, 1, 2, 2}},
         int64[4] factors_int = {{1, 1, 2, 2}}> {{
            p = QuantizeLinear(x, s, z) a = DequantizeLinear(p, s, z) u = Neg(x)
            q = QuantizeLinear(u, t, z) b = DequantizeLinear(q, t, z) w = DequantizeLinear(weights, t, z)
            c = {maker} r = Transpose<perm = [0, 1, 3, 2]>(c) d = {move}
            e = QuantizeLinear(d, t, z) y = DequantizeLinear(e, t, z) }}""")
    size = 3 if maker.startswith("Conv<") else 1
    proto.graph.initializer.extend([
        numpy_helper.from_array(rng.integers(-128, 128, (4, 4, size, size), np.int8), "weights"),
        numpy_helper.from_array(rng.normal(size=4).astype(np.float32), "bias"),
    ])  # fmt: skip
    feed = {"x": rng.normal(size=(1, 4, 8, 8)).astype(np.float32)}
    (expected,) = opened(proto.SerializeToString()).run(None, feed)
    np.testing.assert_array_equal(celosia.Runtime(celosia.compile(proto, "tiny")).run(feed).outputs["y"], expected)
