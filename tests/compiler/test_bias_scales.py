"""A bias whose scale is not exactly the product of the other scales is treated as in onnxruntime."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from oracle import opened
from thorough import paired

import celosia

PRODUCTS = {
    "Conv": "product = Conv(real, weights, bias)",
    "Gemm": "product = Gemm(real, weights, bias)",
    "MatMul": "sums = MatMul(real, weights) product = Add(sums, bias)",
}


def model(op: str, factor: float, steps: tuple[float, float], to_bytes: bool) -> onnx.ModelProto:
    """Return a product of x by int8 weights, whose bias has `factor` times the scale of the products.

    steps: the scales of x and of the weights.
    """
    rng, (sx, sw) = np.random.default_rng(0), np.float32(steps)
    shape, weights = ([1, 8, 5, 5], (16, 8, 3, 3)) if op == "Conv" else ([4, 24], (24, 16))
    constants = {
        "sx": sx, "sw": sw, "sy": sx * sw * np.float32(3000), "sb": np.float32(float(sx) * float(sw) * factor),
        "zero": np.int8(0), "w": rng.integers(-128, 128, weights).astype(np.int8),
        "b": rng.integers(-60000, 60000, 16).astype(np.int32),
    }  # fmt: skip
    graph = onnx.parser.parse_graph(f"""g (float[{", ".join(map(str, shape))}] x) => (float y) {{
        bytes = QuantizeLinear(x, sx, zero)
        real = DequantizeLinear(bytes, sx, zero)
        weights = DequantizeLinear(w, sw, zero)
        bias = DequantizeLinear(b, sb)
        {PRODUCTS[op]}
        {"rounded = QuantizeLinear(product, sy, zero) y = DequantizeLinear(rounded, sy, zero)" if to_bytes else ""}
    }}""")
    graph.output[0].CopyFrom(onnx.ValueInfoProto(name="y" if to_bytes else "product"))
    used = {name for node in graph.node for name in node.input}
    graph.initializer.extend(numpy_helper.from_array(np.asarray(a), n) for n, a in constants.items() if n in used)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("op", PRODUCTS)
@pytest.mark.parametrize("factor, steps", [(1.0005, (0.05, 0.01)), (0.991, (0.05, 0.01)), (2.5, (1e-3, 5e-4))])
def test_a_bias_nearly_in_steps_of_the_products(op: str, factor: float, steps: tuple[float, float]) -> None:
    for to_bytes in (True, False) if op != "Conv" else (True,):
        proto = model(op, factor, steps, to_bytes)
        x = np.random.default_rng(1).normal(
            0, 60 * steps[0], [d.dim_value for d in proto.graph.input[0].type.tensor_type.shape.dim]
        )
        feed = {"x": x.astype(np.float32)}
        (expected,) = opened(proto, int8=True).run(None, feed)
        program = celosia.compile(proto, "tiny")
        (output,) = celosia.Runtime(program).run(feed).outputs.values()
        np.testing.assert_array_equal(output, expected)
        assert program.macs_accelerator == (program.macs_total if to_bytes else 0)


@pytest.mark.parametrize("op", PRODUCTS)
def test_float_weights_of_what_has_its_scale_at_run_time(op: str) -> None:
    """Float weights become bytes even if the scale of x is a run-time input; the float bias stays."""
    made, rng = model(op, 1.0, (0.05, 0.01), True), np.random.default_rng(0)
    graph = made.graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    floats = rng.normal(size=tuple(constants["w"].dims)), rng.normal(size=16)
    for node in [node for node in graph.node if node.output[0] in ("weights", "bias")]:
        graph.node.remove(node)
    for name in ("w", "b", "sw", "sb", "sx"):
        graph.initializer.remove(constants[name])
    for name, array in zip(("weights", "bias"), floats):
        graph.initializer.append(numpy_helper.from_array(array.astype(np.float32), name))
    constants["sy"].CopyFrom(numpy_helper.from_array(np.float32(0.1), "sy"))
    graph.input.append(helper.make_tensor_value_info("sx", TensorProto.FLOAT, []))
    sizes = [dim.dim_value for dim in graph.input[0].type.tensor_type.shape.dim]
    feed = {"x": rng.normal(0, 2, sizes).astype(np.float32), "sx": np.array(0.05, np.float32)}
    (expected,) = opened(made, int8=True).run(None, feed)
    (output,) = celosia.Runtime(celosia.compile(made, "tiny")).run(feed).outputs.values()
    np.testing.assert_array_equal(output, expected)


@pytest.mark.parametrize("op", PRODUCTS)
def test_a_float_bias_of_more_steps_than_int32_holds(op: str) -> None:
    """A float bias that exceeds int32 becomes -2^31 and sums wrap, as in onnxruntime; the self-check knows.

    Such a bias occurs in channels whose weights are almost zero.
    """
    proto = model(op, 1.0, (0.05, 1e-9), to_bytes=True)
    graph = proto.graph
    for tensor in [constant for constant in graph.initializer if constant.name in ("b", "sy")]:
        graph.initializer.remove(tensor)
    values = np.float32([-1, 1, 3e3, -3e3, 0.09, -0.09, 0.12, np.nan] * 2)
    graph.initializer.append(numpy_helper.from_array(values, "bias"))
    graph.initializer.append(numpy_helper.from_array(np.array(0.001, np.float32), "sy"))
    graph.node.remove(next(node for node in graph.node if "bias" in node.output))
    graph.initializer.remove(next(constant for constant in graph.initializer if constant.name == "sb"))
    dims = [dim.dim_value for dim in graph.input[0].type.tensor_type.shape.dim]
    x = np.random.default_rng(2).normal(0, 3, dims).astype(np.float32)
    output = celosia.Runtime(celosia.compile(proto, "tiny")).run({"x": x}).outputs["y"]
    np.testing.assert_array_equal(output, opened(proto, int8=True).run(None, {"x": x})[0])


BEHIND = {
    "bytes": "rounded = QuantizeLinear(product, sy, zero) y = DequantizeLinear(rounded, sy, zero)",
    "float": "y = Neg(product)",
    "a bound that changes nothing": "bound = Clip(product, low, high) rounded = QuantizeLinear(bound, sy, zero) "
    "y = DequantizeLinear(rounded, sy, zero)",
    "a bound": "bound = Relu(product) rounded = QuantizeLinear(bound, sy, zero) "
    "y = DequantizeLinear(rounded, sy, zero)",
    "a wire and a bound": "wire = Identity(product) bound = Relu(wire) y = Neg(bound)",
    "two readers": "rounded = QuantizeLinear(product, sy, zero) real_y = DequantizeLinear(rounded, sy, zero) "
    "left = Neg(product) y = Sub(real_y, left)",
    "other bytes": "rounded = QuantizeLinear(product, sy, other) y = DequantizeLinear(rounded, sy, other)",
}


def with_bias(op: str, behind: str, bias: tuple[int, ...], zero: int = 0, rank: int = 2) -> onnx.ModelProto:
    """Return a product of x by int8 weights and the operators after it.

    The scale of its bias is three times that of the products.
    """
    rng = np.random.default_rng(3)
    shape = (1, 8, 5, 5) if op == "Conv" else (4, 24) if rank == 2 else (2, 4, 24)
    constants = {
        "sx": np.float32(0.02), "sw": np.float32(0.005), "sb": np.float32(0.0003), "sy": np.float32(0.09),
        "zero": np.int8(0), "other": np.uint8(90), "w": rng.integers(-128, 128, (24, 16)).astype(np.int8),
        "b": rng.integers(-9000, 9000, bias).astype(np.int32), "zero_b": np.int32(zero),
        "low": np.float32(-100), "high": np.float32(100),
    }  # fmt: skip
    if op == "Conv":
        constants["w"] = rng.integers(-128, 128, (16, 8, 3, 3)).astype(np.int8)
    graph = onnx.parser.parse_graph(f"""g (int8[{", ".join(map(str, shape))}] x) => (float y) {{
        real = DequantizeLinear(x, sx, zero)
        weights = DequantizeLinear(w, sw, zero)
        bias = DequantizeLinear(b, sb, zero_b)
        {PRODUCTS[op]}
        {BEHIND[behind]}
    }}""")
    graph.output[0].CopyFrom(onnx.ValueInfoProto(name="y"))
    used = {name for node in graph.node for name in node.input}
    graph.initializer.extend(numpy_helper.from_array(np.asarray(a), n) for n, a in constants.items() if n in used)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def agrees(proto: onnx.ModelProto, **other: np.ndarray) -> celosia.Program:
    """Compare the compiled model with onnxruntime and return the Program.

    Bytes must be equal; floats may differ in their last bits.
    """
    (x, *_), rng = proto.graph.input, np.random.default_rng(1)
    feed = {"x": rng.integers(-128, 128, [d.dim_value for d in x.type.tensor_type.shape.dim]).astype(np.int8), **other}
    (expected,) = opened(proto, int8=True).run(None, feed)
    program = celosia.compile(proto, "tiny")
    (output,) = celosia.Runtime(program).run(feed).outputs.values()
    exact = proto.graph.node[-1].op_type == "DequantizeLinear"
    np.testing.assert_allclose(output, expected, rtol=0, atol=0 if exact else 1e-5)
    return program


@pytest.mark.parametrize(
    "behind, product", paired(BEHIND, [("Gemm", 2), ("MatMul", 2), ("MatMul", 3), ("Conv", 2)])
)  # fmt: skip
def test_a_bias_in_quite_other_steps(behind: str, product: tuple[str, int]) -> None:
    """onnxruntime adds a bias of another scale to products of bytes unscaled, and to floats as its real value."""
    op, rank = product
    agrees(with_bias(op, behind, (16,), rank=rank))


@pytest.mark.parametrize("bias", [(1, 16), (4, 16), (4, 1), (1,), ()])
def test_a_bias_that_is_no_row(bias: tuple[int, ...]) -> None:
    for op in ("Gemm", "MatMul"):
        agrees(with_bias(op, "bytes", bias))
        agrees(with_bias(op, "bytes", bias, zero=77))


@pytest.mark.parametrize("op", PRODUCTS)
def test_a_bias_that_comes_at_run_time(op: str) -> None:
    """A bias that is a run-time input is added. It was once left out."""
    proto = with_bias(op, "bytes", (16,))
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    proto.graph.initializer.remove(next(tensor for tensor in proto.graph.initializer if tensor.name == "b"))
    if op == "Conv":  # in steps of its products
        tensor = next(tensor for tensor in proto.graph.initializer if tensor.name == "sb")
        tensor.CopyFrom(numpy_helper.from_array(np.asarray(constants["sx"] * constants["sw"]), "sb"))
    proto.graph.input.append(helper.make_tensor_value_info("b", TensorProto.INT32, [16]))
    assert agrees(proto, b=constants["b"]).macs_accelerator == 0
