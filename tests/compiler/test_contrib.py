"""onnxruntime's own operators (com.microsoft), each compiled as a whole model, give onnxruntime's results."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from oracle import opened

import celosia
from celosia.compiler.graph.errors import ModelError
from celosia.driver.runtime import Runtime

Array = NDArray[Any]
RNG = np.random.default_rng(11)


class Case(NamedTuple):
    """One node. fixed: numbers of the inputs that are constants. exact: results must be equal."""

    op: str
    inputs: list[Array | None]
    attrs: dict[str, Any] = {}
    fixed: tuple[int, ...] = ()
    outputs: int = 1
    exact: bool = False
    domain: str = "com.microsoft"


def f(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


def i8(*shape: int, dtype: Any = np.int8) -> Array:
    info = np.iinfo(dtype)
    return RNG.integers(info.min, info.max + 1, shape).astype(dtype)


def s(value: float) -> Array:
    return np.array(value, np.float32)


def z(value: int, dtype: Any = np.int8) -> Array:
    return np.array(value, dtype)


def ids(high: int, *shape: int) -> Array:
    return RNG.integers(0, high, shape).astype(np.int32)


MASK = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], np.int32)
TABLES = [f(11, 8), f(7, 8), f(2, 8), f(8), f(8)]
BYTES = [i8(11, 8, dtype=np.uint8), i8(7, 8, dtype=np.uint8), i8(2, 8, dtype=np.uint8)]
POOL = dict(kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
CASES = [
    Case("Gelu", [f(3, 5)]),
    Case("FastGelu", [f(3, 5), f(5)]),
    Case("BiasGelu", [f(3, 5), f(5)]),
    Case("QuickGelu", [f(3, 5)], dict(alpha=1.3)),
    Case("SkipLayerNormalization", [f(2, 3, 8), f(2, 3, 8), f(8), f(8), f(8)]),
    Case("SimplifiedLayerNormalization", [f(2, 3, 8), f(8)], dict(axis=-1), domain=""),
    Case("SkipSimplifiedLayerNormalization", [f(2, 3, 8), f(2, 3, 8), f(8), f(8)]),
    Case("EmbedLayerNormalization", [ids(11, 2, 5), ids(2, 2, 5), *TABLES, MASK], outputs=2),
    Case("EmbedLayerNormalization", [ids(11, 2, 5), None, TABLES[0], TABLES[1], None, *TABLES[3:]], outputs=2),
    Case(
        "QEmbedLayerNormalization",
        [ids(11, 2, 5), ids(2, 2, 5), *BYTES, i8(8, dtype=np.uint8), i8(8, dtype=np.uint8), MASK,
         *(s(v) for v in (0.01, 0.02, 0.03, 0.01, 0.02)), *(z(v, np.uint8) for v in (120, 130, 128, 90, 140))],
        outputs=2,
    ),
    Case("FusedMatMul", [f(2, 4, 3), f(2, 4, 5)], dict(transA=1, alpha=0.3)),
    Case("FusedMatMul", [f(3, 2, 4), f(2, 5, 4)], dict(transB=1, transBatchA=1)),
    Case("TransposeMatMul", [f(2, 3, 4), f(2, 5, 4)], dict(transB=1)),
    Case("FusedGemm", [f(3, 4), f(5, 4), f(5)],
         dict(transB=1, alpha=0.7, activation="LeakyRelu", activation_alpha=0.2)),
    Case("FusedGemm", [f(3, 4), f(4, 5)], dict(activation="Tanh")),
    Case("FusedConv", [f(1, 3, 7, 6), f(4, 3, 3, 3), f(4)], dict(activation="Relu", pads=[1, 1, 1, 1])),
    Case("FusedConv", [f(1, 3, 7, 6), f(4, 3, 1, 1), f(4), f(1, 4, 7, 6)],
         dict(activation="Clip", activation_params=[-0.5, 0.9])),
    Case("MatMulNBits", [f(2, 3, 40), i8(6, 3, 8, dtype=np.uint8), f(18)],
         dict(K=40, N=6, bits=4, block_size=16), (1, 2)),
    Case("MatMulNBits", [f(3, 64), i8(6, 2, 16, dtype=np.uint8), f(12), i8(6, dtype=np.uint8)],
         dict(K=64, N=6, bits=4, block_size=32), (1, 2, 3)),
    Case("MatMulBnb4", [f(2, 3, 40), i8(120, dtype=np.uint8), f(15)],
         dict(K=40, N=6, block_size=16, quant_type=0), (1, 2)),
    Case("MatMulBnb4", [f(3, 50), i8(175, dtype=np.uint8), f(6)], dict(K=50, N=7, block_size=64, quant_type=1), (1, 2)),
    Case("MatMulBnb4", [f(50), i8(175, dtype=np.uint8), f(2)], dict(K=50, N=7, block_size=256, quant_type=1)),
    Case("MatMulIntegerToFloat", [i8(3, 8, dtype=np.uint8), i8(8, 5) // 2, s(0.1), f(5), z(9, np.uint8), None, f(5)]),
    Case("DynamicQuantizeMatMul", [f(3, 8), RNG.integers(-64, 64, (8, 5)).astype(np.int8), s(0.1), None, f(5)]),
    Case("MatMulInteger16", [i8(3, 4, dtype=np.int16), i8(4, 5, dtype=np.int16)], exact=True),
    Case("QGemm", [i8(3, 8), s(0.1), z(2), i8(8, 5), s(0.02), z(0), ids(999, 5), s(0.3), z(-4)], exact=True),
    Case("MultiHeadAttention", [f(2, 4, 12), f(2, 5, 12), f(2, 5, 12)], dict(num_heads=3)),
    Case("MultiHeadAttention", [f(2, 5, 12), f(2, 5, 12), f(2, 5, 12), f(36), MASK, f(1, 3, 5, 5)], dict(num_heads=3)),
    Case("MultiHeadAttention", [f(2, 1, 12), f(2, 1, 12), f(2, 1, 12), None, None, None, f(2, 3, 4, 4), f(2, 3, 4, 4)],
         dict(num_heads=3, scale=0.4), outputs=3),
    Case("QAttention", [i8(2, 5, 12, dtype=np.uint8), RNG.integers(-64, 64, (12, 36)).astype(np.int8), f(36), s(0.01),
                        s(0.02), MASK, z(128, np.uint8), z(0)], dict(num_heads=3)),
    Case("QAttention", [i8(2, 5, 12, dtype=np.uint8), RNG.integers(-64, 64, (12, 36)).astype(np.int8), f(36), s(0.01),
                        s(0.02), None, z(128, np.uint8), z(0)], dict(num_heads=3, unidirectional=1)),
    Case("Attention", [f(2, 5, 6), f(6, 36), f(36)], dict(num_heads=3)),
    Case("Attention", [f(2, 5, 6), f(6, 36), f(36), MASK], dict(num_heads=3, scale=0.7, mask_filter_value=-20.0)),
    Case("Attention", [f(2, 5, 6), f(6, 36), f(36), np.array([5, 3], np.int32)], dict(num_heads=3)),
    Case("Attention", [f(2, 5, 6), f(6, 36), f(36), np.array([5, 4, 0, 2], np.int32)], dict(num_heads=3)),
    Case("Attention", [f(2, 3, 6), f(6, 36), f(36), ids(2, 2, 3, 5), f(2, 2, 3, 2, 4)], dict(num_heads=3), outputs=2),
    Case("Attention", [f(2, 3, 6), f(6, 36), f(36), None, f(2, 2, 3, 2, 4)],
         dict(num_heads=3, unidirectional=1), outputs=2),
    Case("Attention", [f(2, 5, 6), f(6, 30), f(30), None, None, f(1, 3, 5, 5)],
         dict(num_heads=3, qkv_hidden_sizes=[12, 12, 6])),
    Case("RotaryEmbedding", [f(2, 5, 24), ids(9, 2, 5).astype(np.int64), f(9, 4), f(9, 4)]),
    Case("RotaryEmbedding", [f(2, 5, 24), np.array([3]), f(9, 4), f(9, 4)], dict(interleaved=1)),
    Case("RotaryEmbedding", [f(2, 3, 5, 8), ids(9, 2, 5).astype(np.int64), f(9, 4), f(9, 4)]),
    Case("RotaryEmbedding", [f(2, 3, 5, 8), ids(9, 2, 5).astype(np.int64), f(9, 3), f(9, 3)],
         dict(num_heads=3, rotary_embedding_dim=6)),
    Case("RotaryEmbedding", [f(2, 5, 24), np.array([0]), f(9, 2), f(9, 2)],
         dict(num_heads=3, rotary_embedding_dim=4, interleaved=1)),
    Case("QLinearAdd", [i8(3, 4), s(0.1), z(2), i8(3, 4), s(0.2), z(-3), s(0.25), z(1)], exact=True),
    Case("QLinearMul", [i8(3, 4), s(0.1), z(2), i8(3, 4), s(0.2), z(-3), s(2.5), z(1)], exact=True),
    Case("QLinearConcat", [s(0.1), z(1), i8(2, 3), s(0.2), z(2), i8(2, 4), s(0.1), z(1)], dict(axis=1), exact=True),
    Case("QLinearSigmoid", [i8(3, 4), s(0.1), z(2), s(0.004), z(-128)], exact=True),
    Case("QLinearLeakyRelu", [i8(3, 4), s(0.1), z(2), s(0.08), z(-8)], dict(alpha=0.1), exact=True),
    Case("QLinearSoftmax", [i8(3, 9), s(0.1), z(2), s(1 / 256), z(-128)], dict(axis=1, opset=13), exact=True),
    Case("QLinearAveragePool", [i8(1, 3, 7, 6), s(0.1), z(2), s(0.07), z(-8)], POOL, exact=True),
    Case("QLinearGlobalAveragePool", [i8(1, 3, 7, 6), s(0.1), z(2), s(0.03), z(-8)], exact=True),
    Case("QLinearWhere", [RNG.random((3, 4)) < 0.5, i8(3, 4), s(0.1), z(2), i8(3, 4), s(0.2), z(-3), s(0.15), z(1)],
         exact=True),
    Case("QuantizeLinear", [f(3, 4), s(0.02), z(3)], exact=True),
    Case("DequantizeLinear", [i8(3, 4), s(0.02), z(3)], exact=True),
    Case("NhwcMaxPool", [i8(1, 7, 6, 3)], POOL, exact=True),
    Case("ConvTransposeWithDynamicPads", [f(1, 3, 4, 5), f(3, 2, 3, 3), np.array([1, 0, 1, 1]), f(2)],
         dict(strides=[2, 2]), (2,)),
    Case("ExpandDims", [f(3, 4), np.array(-1, np.int32)], fixed=(1,), exact=True),
    Case("CDist", [f(4, 3), f(5, 3)], dict(metric="euclidean")),
    Case("CDist", [f(4, 3), f(5, 3)], dict(metric="sqeuclidean")),
    Case("UnfoldTensor", [f(2, 9, 3)], dict(dim=1, size=4, step=2), exact=True),
    Case("SampleOp", [f(2, 3)], exact=True),
    Case("Trilu", [f(4, 5), np.array(1)], dict(upper=1), (1,), exact=True),
    Case("Range", [np.array(1, np.int32), np.array(9, np.int32), np.array(3, np.int32)], fixed=(0, 1, 2), exact=True),
    Case("GatherND", [f(3, 4), np.array([[0, 1], [2, 3]])], exact=True),
    Case("Pad", [f(3, 4), np.array([0, 1, 2, 0]), s(0.5)], dict(mode="constant"), (1,), exact=True),
    Case("Inverse", [f(2, 4, 4) + 4 * np.eye(4, dtype=np.float32)]),
    Case("QGemm", [i8(3, 8), s(0.1), z(2), i8(8, 5), s(0.02), z(0)], fixed=(1, 2, 3, 4, 5)),
]  # fmt: skip


def model_of(case: Case) -> tuple[onnx.ModelProto, dict[str, Array]]:
    """Return a model of the node and its inputs."""
    names = [f"i{k}" if array is not None else "" for k, array in enumerate(case.inputs)]
    feed = {n: a for k, (n, a) in enumerate(zip(names, case.inputs)) if a is not None and k not in case.fixed}
    outs = [f"o{k}" for k in range(case.outputs)]
    node = helper.make_node(case.op, names, outs, domain=case.domain, **case.attrs)
    constants = [numpy_helper.from_array(np.asarray(case.inputs[k]), names[k]) for k in case.fixed]
    inputs = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in feed.items()
    ]
    values = [helper.make_tensor_value_info(out, TensorProto.UNDEFINED, None) for out in outs]
    for value in values:
        value.ClearField("type")
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph([node], "g", inputs, values, constants)
    return helper.make_model(graph, opset_imports=opsets, ir_version=9), feed


@pytest.mark.parametrize("case", CASES, ids=[f"{case.op}-{number}" for number, case in enumerate(CASES)])
def test_against_onnxruntime(case: Case) -> None:
    model, feed = model_of(case)
    session = opened(model, optimised=False)
    wanted = session.run(None, feed)
    for value, array in zip(model.graph.output, wanted):
        value.CopyFrom(
            helper.make_tensor_value_info(value.name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        )
    outputs = Runtime(celosia.compile(model, "tiny")).run(feed).outputs
    for array, expected in zip(outputs.values(), wanted, strict=True):
        assert (array.dtype, array.shape) == (expected.dtype, expected.shape)
        if case.exact:
            np.testing.assert_array_equal(array, expected)
        else:
            np.testing.assert_allclose(array, expected, rtol=2e-5, atol=2e-5 * max(1, np.abs(expected).max()))


def test_at_least_forty() -> None:
    assert len({case.op for case in CASES}) >= 40


def test_weights_of_other_widths_are_refused() -> None:
    case = Case("MatMulNBits", [f(3, 64), i8(6, 2, 12, dtype=np.uint8), f(12)], dict(K=64, N=6, bits=3, block_size=32),
                (1, 2))  # fmt: skip
    model, _ = model_of(case)
    with pytest.raises(ModelError, match="weights of 3 bits"):
        model.graph.output[0].CopyFrom(helper.make_tensor_value_info("o0", TensorProto.FLOAT, [3, 6]))
        celosia.compile(model)


@pytest.mark.parametrize(
    "case, why",
    [
        (Case("Attention", [f(1, 2, 6), f(6, 18), f(18)], dict(num_heads=3, do_rotary=1)), "attribute do_rotary"),
        (Case("Attention", [f(1, 2, 6), f(6, 18), f(18)], dict(num_heads=3, qkv_hidden_sizes=[6, 6, 9])), "6, 6, 9"),
        (Case("Attention", [f(1, 2, 6), f(6, 18), f(18), ids(2, 1, 1, 2, 2)], dict(num_heads=3)), "mask of shape"),
        (
            Case(
                "MatMulBnb4", [f(1, 2, 32), i8(96, dtype=np.uint8), f(12)], dict(K=32, N=6, block_size=16, quant_type=2)
            ),
            "quant_type 2",
        ),
        (
            Case(
                "MatMulBnb4", [f(1, 2, 32), i8(95, dtype=np.uint8), f(12)], dict(K=32, N=6, block_size=16, quant_type=1)
            ),
            "95 uint8 .*; give 96 uint8 and 12 scales",
        ),
        (Case("RotaryEmbedding", [f(1, 2, 8), np.array([0]), f(4, 4), f(4, 4)], dict(is_packed_batching=1)), "packed"),
        (Case("RotaryEmbedding", [f(1, 2, 9), np.array([0]), f(4, 4), f(4, 4)]), "heads of 8 elements"),
    ],
)
def test_what_is_refused(case: Case, why: str) -> None:
    model, _ = model_of(case)
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("o0", TensorProto.FLOAT, [1, 2, 6]))
    with pytest.raises(ModelError, match=why):
        celosia.compile(model)


@pytest.mark.parametrize("kind, size", [(0, 16), (1, 64)])
def test_what_onnxruntime_makes_of_products_in_floats_of_4_bits(kind: int, size: int) -> None:
    """MatMulBnb4 gives onnxruntime's results in float32, and in float16, which onnxruntime computes in float32."""
    quantizer = pytest.importorskip("onnxruntime.quantization.matmul_bnb4_quantizer").MatMulBnb4Quantizer
    for dtype in (np.float32, np.float16):
        weights = [numpy_helper.from_array(f(*shape).astype(dtype), n) for n, shape in (("a", (48, 9)), ("b", (9, 5)))]
        name = {np.float32: "float", np.float16: "float16"}[dtype]
        graph = onnx.parser.parse_graph(
            f"g ({name}[3, 48] x) => ({name}[3, 5] y) {{ h = MatMul (x, a) y = MatMul (h, b) }}"
        )
        graph.initializer.extend(weights)
        quantised = quantizer(
            helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), kind, size
        )
        quantised.process()
        model = quantised.model.model
        assert [node.op_type for node in model.graph.node] == ["MatMulBnb4", "MatMulBnb4"]
        feed = {"x": f(3, 48).astype(dtype)}
        (expected,) = opened(model).run(None, feed)
        output = Runtime(celosia.compile(model, "tiny")).run(feed).outputs["y"]
        share = 2e-3 if dtype == np.float16 else 1e-5
        np.testing.assert_allclose(output, expected, atol=share * np.abs(expected).max())


def test_onnx_and_onnxruntime_mean_different_operators_by_one_name() -> None:
    """One graph, also a subgraph, may use two different operators of the same name."""
    text = """
    <ir_version: 10, opset_import: ["" : 23, "com.microsoft" : 1]>
    g (float[1, 2, 3, 8] x, bool c) => (float[1, 2, 3, 8] y) {
        a = RotaryEmbedding (x, cos, sin, here)
        b = com.microsoft.RotaryEmbedding <interleaved = 1> (x, here, cos, sin)
        d = If (c) <
            then_branch = t () => (float[1, 2, 3, 8] e) { e = com.microsoft.RotaryEmbedding (b, here, cos, sin) },
            else_branch = u () => (float[1, 2, 3, 8] e) { e = RotaryEmbedding <interleaved = 1> (a, cos, sin, here) }
        >
        y = Add (a, d)
    }"""
    model = onnx.parser.parse_model(text)
    arrays = {"here": np.array([[1, 4, 2]]), "cos": f(6, 4), "sin": f(6, 4)}
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    session = opened(model)
    runtime = Runtime(celosia.compile(model, "tiny"))
    for taken in (False, True):
        feed = {"x": f(1, 2, 3, 8), "c": np.array(taken)}
        (expected,) = session.run(None, feed)
        np.testing.assert_allclose(runtime.run(feed).outputs["y"], expected, rtol=2e-5, atol=2e-5)
