"""The reason of an operator on the CPU says what to change, and multiplications count wherever they run."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from small_models import Builder
from thorough import tries

import celosia
from celosia.compiler.graph import select
from celosia.compiler.graph.cost import total_macs
from celosia.compiler.graph.importer import import_static
from celosia.compiler.language import accelerator, custom_operators

PAIR = "q = QuantizeLinear(x, s, z)  d = DequantizeLinear(q, s, z)"
WEIGHTS = "wd = DequantizeLinear(w8, s, z)"
CASES: dict[str, tuple[str, str, str]] = {
    "all in floats": ("Conv", "y = Conv(x, w)", "it is float; `celosia quantize` makes an int8 model"),
    "no quantiser can help": ("Softmax", "y = Softmax(x)", "the accelerator has no Softmax; the CPU computes it"),
    "not a number of 8 bits": ("Cast", "n = Cast<to = 7>(x) y = Cast<to = 1>(n)", "it computes int64"),
    "weights left in float": ("MatMul", f"{PAIR} c = MatMul(d, m) e = QuantizeLinear(c, s, z) "
                              "y = DequantizeLinear(e, s, z)", "its weights are float; quantise them to int8, too"),
    "an input left in float": ("Conv", f"{PAIR} {WEIGHTS} r = Exp(d) c = Conv(r, wd) e = QuantizeLinear(c, s, z) "
                               "y = DequantizeLinear(e, s, z)", "it is float among quantised operators|'r' is float"),
    "one of two operands": ("Add", f"{PAIR} r = Exp(x) c = Add(d, r) e = QuantizeLinear(c, s, z) "
                            "y = DequantizeLinear(e, s, z)", "its input 'r' is float; quantise what makes that"),
    "an output left in float": ("Add", f"{PAIR} y = Add(d, d)", "its output is float; put QuantizeLinear and"),
    "an output with other readers": ("Add", f"{PAIR} c = Add(d, d) e = QuantizeLinear(c, s, z) "
                                     "f = DequantizeLinear(e, s, z) g = Exp(c) y = Mul(f, g)",
                                     "its float output has other readers beside QuantizeLinear"),
    "a scale that varies": ("DequantizeLinear", "q = QuantizeLinear(x, s, z) t = ReduceMax<keepdims = 0>(x) "
                            "y = DequantizeLinear(q, t, z)", "its scale is not constant; quantise statically"),
    "the border": ("QuantizeLinear", f"{PAIR} y = Add(d, d)", "the model's border"),
}  # fmt: skip
CONSTANTS: dict[str, Any] = {
    "m": np.ones((4, 4), np.float32),
    "w": np.ones((4, 4, 1, 1), np.float32), "w8": np.ones((4, 4, 1, 1), np.int8), "s": np.float32(0.1), "z": np.int8(0),
}  # fmt: skip


def model(body: str, opset: int = 17) -> onnx.ModelProto:
    graph = onnx.parser.parse_graph(f"g (float[1, 4, 4, 4] x) => (float[1, 4, 4, 4] y) {{ {body} }}")
    graph.initializer.extend(numpy_helper.from_array(np.asarray(v), k) for k, v in CONSTANTS.items())
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


@pytest.mark.parametrize("case", CASES)
def test_a_reason_says_what_to_do(case: str) -> None:
    op, body, words = CASES[case]
    rows = celosia.compile(model(body), "tiny").placements
    reasons = [row["reason"] for row in rows if row["op"] == op and row["place"] == "cpu"]
    assert any(re.search(words, reason) for reason in reasons), rows


def test_a_scale_for_each_channel_needs_opset_13() -> None:
    """Before opset 13 scales have no axis, so that `Conv` cannot know that they belong to its output channels."""
    body = f"{PAIR} wd = DequantizeLinear(w8, many, zeros) c = Conv(d, wd) e = QuantizeLinear(c, s, z) " \
        "y = DequantizeLinear(e, s, z)"  # fmt: skip
    proto = model(body, opset=12)
    proto.graph.initializer.append(numpy_helper.from_array(np.full(4, 0.1, np.float32), "many"))
    proto.graph.initializer.append(numpy_helper.from_array(np.zeros(4, np.int8), "zeros"))
    (row,) = [row for row in celosia.compile(proto, "tiny").placements if row["op"] == "Conv"]
    assert "which opsets before 13 do not know; export the model with opset 13 or later" in row["reason"]


def test_no_reason_is_empty_or_the_old_one() -> None:
    b = Builder("qdq", np.int8, seed=1)
    x = b.conv(b.input([1, 6, 8, 8]), 8, (3, 3))
    b.output(b.below_maximum(b.squeeze_excite(x, 4)), real=True)
    for row in celosia.compile(b.model(), "tiny").placements:
        assert row["reason"] and "float, or not an operator" not in row["reason"]


# All reasons ----------------------------------------------------------------------------------------------------

SAYS_ITSELF = ("with_change(", "why_on_cpu(", "_broadcast_reason(", "str(error)")
"""What makes reasons that other tests, or the next one, look at."""


def texts(node: ast.expr, constants: dict[str, Any]) -> list[str]:
    """Return the texts that an expression can produce, with `...` in place of inserted values."""
    match node:
        case ast.IfExp():
            return [*texts(node.body, constants), *texts(node.orelse, constants)]
        case ast.JoinedStr():
            return ["".join(texts(part, constants)[0] for part in node.values)]
        case ast.FormattedValue():
            return texts(node.value, constants) if isinstance(node.value, ast.Name) else ["..."]
        case ast.Constant():
            return [str(node.value)]
        case ast.Name():
            return [str(constants.get(node.id, "..."))]
    return [ast.unparse(node)]


def without_a_change(module: ModuleType) -> list[str]:
    """Return the reasons in a module that have no advice after a semicolon."""
    reasons = []
    for node in ast.walk(ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "NotOffloadable":
            messages = texts(node.args[0], vars(module))
            reasons += [text for text in messages if "; " not in text and not text.startswith(SAYS_ITSELF)]
    return [text for text in reasons if text not in ("view", "...")]


def test_every_reason_says_what_changes_it() -> None:
    """Each reason says which change moves the operator to the accelerator, or that none does (NO_WAY)."""
    names = [f"{select.__name__}.{module.name}" for module in pkgutil.iter_modules(select.__path__)]
    modules = [select, accelerator, custom_operators, *map(importlib.import_module, names)]
    assert len(modules) > 10
    for module in modules:
        assert not without_a_change(module), module.__name__


def test_a_reason_without_a_change_is_found(tmp_path: Path) -> None:
    module = ModuleType("faulty")
    module.__file__ = str(tmp_path / "faulty.py")
    (tmp_path / "faulty.py").write_text('raise NotOffloadable(f"it has {count} parts" if count else "none; add one")\n')
    assert without_a_change(module) == ["it has ... parts"]


ALIKE = "float[1, 4, 4, 4]"


def of_row(body: str, op: str, shape: str = "float[1, 4, 1, 1]") -> list[str]:
    """Return places and reasons of the operators `op` of a model."""
    proto = model(body)
    proto.graph.output[0].CopyFrom(onnx.parser.parse_graph(f"g (float[1] x) => ({shape} y) {{ y = Abs(x) }}").output[0])
    rows = celosia.compile(proto, "tiny").placements
    return [f"{row['place']}: {row['reason']}" for row in rows if row["op"] == op]


@pytest.mark.parametrize("largest", ["GlobalMaxPool", "ReduceMax<axes = [2, 3]>"])
def test_the_largest_of_an_image_is_a_max_pooling(largest: str) -> None:
    body = f"{PAIR} c = {largest}(d) e = QuantizeLinear(c, s, z) y = DequantizeLinear(e, s, z)"
    (reason,) = of_row(body, "MaxPool")
    assert reason.startswith("accelerator: ")


def test_the_largest_over_channels_stays() -> None:
    body = f"{PAIR} c = ReduceMax<axes = [1]>(d) e = QuantizeLinear(c, s, z) y = DequantizeLinear(e, s, z)"
    (reason,) = of_row(body, "ReduceMax", "float[1, 1, 4, 4]")
    assert reason.startswith("cpu: the accelerator reduces all rows and columns")


def test_nobody_is_told_to_quantise_what_cannot_be() -> None:
    body = f"{PAIR} r = LpNormalization(d) e = QuantizeLinear(r, s, z) y = DequantizeLinear(e, s, z)"
    reasons = [reason for op in ("QuantizeLinear", "DequantizeLinear") for reason in of_row(body, op, ALIKE)]
    assert len(reasons) == 4 and not any("quantise that operator" in reason for reason in reasons)
    assert sum("between bytes and LpNormalization, which is in floats; no setting" in reason for reason in reasons) == 2


@pytest.mark.parametrize(
    "operators",
    [
        "c = Sub(d, other)", "c = Max(other, d)", "c = Pow(d, other)", "c = PRelu(d, other)", "c = Sub(d, columns)",
        "c = PRelu(d, columns)", "b = Less(d, other) c = Where(b, d, other)",
    ],
)  # fmt: skip
def test_nobody_is_told_to_quantise_a_function_of_two_tensors(operators: str) -> None:
    body = (
        f"{PAIR} turned = Transpose<perm = [0, 1, 3, 2]>(q) other = DequantizeLinear(turned, s, z) {operators} "
        "e = QuantizeLinear(c, s, z) y = DequantizeLinear(e, s, z)"
    )
    proto = model(body)
    columns = numpy_helper.from_array(np.array([0.5, 0.2, -0.1, 0.3], np.float32), "columns")
    proto.graph.initializer.append(columns)
    proto.graph.output[0].CopyFrom(onnx.parser.parse_graph(f"g (float[1] x) => ({ALIKE} y) {{ y = Abs(x) }}").output[0])
    name = operators.rpartition("c = ")[2].partition("(")[0]
    around = (name, "QuantizeLinear", "DequantizeLinear")
    rows = [row for row in celosia.compile(proto, "tiny").placements if row["place"] == "cpu" and row["op"] in around]
    assert not any("quantise" in row["reason"] for row in rows), rows
    (reason,) = [row["reason"] for row in rows if row["op"] == name]
    assert reason.startswith(f"the accelerator computes {name} only of one tensor and constants of one element")


# Multiplications ------------------------------------------------------------------------------------------------


@settings(max_examples=tries(12), deadline=None)
@given(
    channels=st.integers(1, 4), out=st.integers(1, 3), kernel=st.integers(1, 4), stride=st.integers(1, 3),
    size=st.integers(1, 5), groups=st.integers(1, 3),
)  # fmt: skip
def test_transposed_convolutions_count(
    channels: int, out: int, kernel: int, stride: int, size: int, groups: int
) -> None:
    """A transposed convolution counts each product of an input element and a kernel element, without padding."""
    c, side = channels * groups, (size - 1) * stride + kernel
    graph = helper.make_graph(
        [helper.make_node("ConvTranspose", ["x", "w"], ["y"], strides=[stride, stride], group=groups)], "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, c, size, size])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, out * groups, side, side])],
        [numpy_helper.from_array(np.ones((c, out, kernel, kernel), np.float32), "w")],
    )  # fmt: skip
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    count = sum(
        1 for _ in range(2) for _ in range(c) for _ in range(size * size) for _ in range(out) for _ in range(kernel**2)
    )
    assert total_macs(import_static(proto).graph) == count
    program = celosia.compile(proto, "tiny")
    assert program.macs_total == count and program.macs_accelerator == 0


@pytest.mark.parametrize("op, gates", [("LSTM", 4), ("GRU", 3), ("RNN", 1)])
@pytest.mark.parametrize("direction, count", [("forward", 1), ("bidirectional", 2)])
def test_recurrences_count(op: str, gates: int, direction: str, count: int) -> None:
    length, batch, size, hidden = 5, 2, 3, 4
    shapes = {"w": (count, gates * hidden, size), "r": (count, gates * hidden, hidden)}
    graph = helper.make_graph(
        [helper.make_node(op, ["x", "w", "r"], ["", "h"], hidden_size=hidden, direction=direction)], "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [length, batch, size])],
        [helper.make_tensor_value_info("h", TensorProto.FLOAT, [count, batch, hidden])],
        [numpy_helper.from_array(np.ones(shape, np.float32), name) for name, shape in shapes.items()],
    )  # fmt: skip
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    assert total_macs(import_static(proto).graph) == count * length * batch * gates * hidden * (size + hidden)


def test_a_transposed_left_operand_counts_its_depth() -> None:
    graph = onnx.parser.parse_graph(
        "g (float[5, 3] a, float[5, 7] b) => (float[3, 7] y) { y = Gemm<transA = 1>(a, b) }"
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    assert total_macs(import_static(proto).graph) == 3 * 5 * 7


HEADS, WIDTH, STEPS, BEFORE = 2, 16, 5, 3
"""Of attentions: two samples of so many steps, after so many others."""
PRODUCTS: dict[str, tuple[onnx.NodeProto, dict[str, tuple[int, ...]], int]] = {
    "packed weights": (
        helper.make_node("MatMulNBits", ["x", "w", "s"], ["y"], domain="com.microsoft", K=32, N=6, block_size=16),
        {"x": (3, 32), "w": (6, 2, 8), "s": (12,)}, 3 * 32 * 6,
    ),
    "attention with weights": (
        helper.make_node("Attention", ["x", "w"], ["y"], domain="com.microsoft", num_heads=HEADS),
        {"x": (2, STEPS, 8), "w": (8, 3 * WIDTH)}, 2 * STEPS * (8 * 3 * WIDTH + 2 * STEPS * WIDTH),
    ),
    "attention with weights after others": (
        helper.make_node("Attention", ["x", "w", "", "", "p"], ["y", "q"], domain="com.microsoft", num_heads=HEADS),
        {"x": (2, STEPS, 8), "w": (8, 3 * WIDTH), "p": (2, 2, HEADS, BEFORE, WIDTH // HEADS)},
        2 * STEPS * (8 * 3 * WIDTH + 2 * (STEPS + BEFORE) * WIDTH),
    ),
    "attention": (
        helper.make_node("MultiHeadAttention", ["x", "k", "v"], ["y"], domain="com.microsoft", num_heads=HEADS),
        {"x": (2, STEPS, WIDTH), "k": (2, 7, WIDTH), "v": (2, 7, WIDTH)}, 2 * STEPS * 7 * 2 * WIDTH,
    ),
    "attention of groups": (
        helper.make_node("GroupQueryAttention", ["x", "k", "v", "", "", "i32", "n32"], ["y", "a", "b"],
                         domain="com.microsoft", num_heads=2 * HEADS, kv_num_heads=HEADS),
        {"x": (2, STEPS, 2 * WIDTH), "k": (2, STEPS, WIDTH), "v": (2, STEPS, WIDTH), "i32": (2,), "n32": ()},
        2 * STEPS * STEPS * 2 * 2 * WIDTH,
    ),
    "a sum of products": (
        helper.make_node("Einsum", ["x", "w"], ["y"], equation="...ij, jk -> ...ik"),
        {"x": (2, 3, 4, 5), "w": (5, 6)}, 2 * 3 * 4 * 5 * 6,
    ),
    "a sum of one operand": (helper.make_node("Einsum", ["x"], ["y"], equation="ij->ji"), {"x": (4, 5)}, 0),
    "batches behind": (
        helper.make_node("FusedMatMul", ["x", "w"], ["y"], domain="com.microsoft", transA=1, transBatchA=1),
        {"x": (4, 2, 3), "w": (2, 4, 5)}, 2 * 3 * 4 * 5,
    ),
}  # fmt: skip
"""A node, the shapes of its inputs, and how many products it makes."""


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_other_operators_count(name: str) -> None:
    """Products in other operators count, also after an operator of onnxruntime, whose shape ONNX does not know."""
    node, shapes, count = PRODUCTS[name]
    known = {
        "i32": np.int32([STEPS - 1] * 2),
        "n32": np.array(STEPS, np.int32),
        "w": np.ones(shapes.get("w", ()), np.float32),
    }
    if node.op_type == "MatMulNBits":
        known["w"] = np.ones(shapes["w"], np.uint8)
    graph = helper.make_graph(
        [helper.make_node("QuickGelu", ["given"], ["x"], domain="com.microsoft"), node], "g",
        [helper.make_tensor_value_info(label, TensorProto.FLOAT, shape)
         for label, shape in ({"given": shapes["x"]} | shapes).items() if label not in (*known, "x")],
        [onnx.ValueInfoProto(name="y")],
        [numpy_helper.from_array(known[label], label) for label in shapes if label in known],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    program = celosia.compile(helper.make_model(graph, opset_imports=opsets, ir_version=8), "tiny")
    assert program.macs_total == count
