"""The check of rewrites accepts correct models; it finds a wrong rewrite in any pass and names the pass.

Planted faults change the meaning of a graph; types, shapes and order stay valid, so that no other check finds them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper
from small_models import Builder
from thorough import paired

import celosia
from celosia.compiler.graph.passes import Pipeline
from celosia.compiler.graph.pipeline import PASSES
from celosia.compiler.graph.values import attributes, constant, is_op, shape
from celosia.compiler.program.dtypes import ONNX_TYPES, numpy_dtype
from celosia.compiler.selfcheck.check_rewriting import ComparedTensors, Comparison, RewriteError, check_rewriting
from celosia.compiler.selfcheck.imported_model import Original, difference_from_bounds
from celosia.driver.cli.errors import FAULT, exit_code_and_message

Fault = Callable[[ir.Graph], bool]
"""Changes what a graph computes; False where it finds nothing to change."""


def quantised() -> onnx.ModelProto:
    """Return a model for the accelerator: convolutions, a residual, a table, pooling, a Concat and a product."""
    b = Builder("qdq", seed=3)
    x = b.conv(b.input([1, 8, 9, 8]), 16, (3, 3), pads=(1, 1, 1, 1))
    y = b.unary(b.binary("Add", b.conv(x, 16, (1, 1)), x), "Sigmoid")
    y = b.concat([b.conv(y, 16, (1, 1)), b.max_pool(y, (3, 3), (1, 1), (1, 1, 1, 1))], False)
    y = b.conv(y, 8, (3, 3), strides=(2, 2))
    b.output(b.matmul(b.reshape(y, (1, int(np.prod(y.shape)))), 12))
    return b.model()


def floats() -> onnx.ModelProto:
    """Return a model for the CPU that each pass changes."""
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {
        "w": rng.standard_normal((16, 3, 3, 3)), "b": rng.standard_normal(16), "scale": rng.uniform(0.5, 2, 16),
        "shift": rng.standard_normal(16), "mean": rng.standard_normal(16), "var": rng.uniform(0.5, 2, 16),
        "w2": rng.standard_normal((16, 8, 2, 2)), "m": rng.standard_normal((8, 8)), "one": np.ones(1),
        "two": np.full(1, 2.0), "c": rng.standard_normal((1, 8, 1, 1)),
    }  # fmt: skip
    constants = [numpy_helper.from_array((array * 0.3).astype(np.float32), name) for name, array in arrays.items()]
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["conv"], pads=[1, 1, 1, 1]),
        helper.make_node("BatchNormalization", ["conv", "scale", "shift", "mean", "var"], ["norm"]),
        helper.make_node("Relu", ["norm"], ["relu"]),
        helper.make_node("ConvTranspose", ["relu", "w2"], ["up"], strides=[2, 2]),
        helper.make_node("Add", ["one", "two"], ["three"]),
        helper.make_node("Mul", ["up", "three"], ["scaled"]),
        helper.make_node("Transpose", ["scaled"], ["turned"], perm=[0, 1, 3, 2]),
        helper.make_node("Transpose", ["turned"], ["back"], perm=[0, 1, 3, 2]),
        helper.make_node("Sub", ["back", "c"], ["less"]),
        helper.make_node("Sigmoid", ["less"], ["gate"]),
        helper.make_node("Sigmoid", ["less"], ["again"]),
        helper.make_node("Div", ["less", "gate"], ["ratio"]),
        helper.make_node("MatMul", ["ratio", "m"], ["product"]),
        helper.make_node("Sub", ["again", "product"], ["y"]),
        helper.make_node("Exp", ["y"], ["unused"]),
    ]
    image = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 4, 4])
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 8, 8, 8])
    graph = helper.make_graph(nodes, "floats", [image], [result], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


MODELS = {"quantised": quantised, "floats": floats}


# Faults ----------------------------------------------------------------------------------------------------------


def leaves_out(graph: ir.Graph) -> bool:
    """Remove an operator whose output has the shape of its input but other values."""
    for node in graph:
        if (
            is_op(node, "Relu", "Sigmoid", "Table", "QLinearSigmoid", "MaxPool", "Sub")
            and not node.outputs[0].is_graph_output()
        ):
            x, y = node.inputs[0], node.outputs[0]
            if x is not None and shape(x) == shape(y) and x.dtype == y.dtype and y.uses():
                ir.convenience.replace_all_uses_with(y, x)
                return True
    return False


def changes_places(graph: ir.Graph) -> bool:
    """Exchange the operands of a difference, a quotient or a Concat."""
    for node in graph:
        first = 2 if is_op(node, "QLinearConcat") else 0
        if is_op(node, "Sub", "Div", "Concat", "QLinearConcat") and len(node.inputs) > first + 1:
            step = 3 if first else 1
            a, b = node.inputs[first], node.inputs[first + step]
            if a is not None and b is not None and shape(a) == shape(b) and a is not b:
                node.replace_input_with(first, b)
                node.replace_input_with(first + step, a)
                return True
    return False


def spoils_weights(graph: ir.Graph) -> bool:
    """Change one output channel of weights."""
    for node in graph:
        number = {"Conv": 1, "BlockedConv": 1, "QLinearConv": 3, "MatMul": 1, "QGemm": 3, "QLinearMatMul": 3}.get(
            node.op_type
        )
        value = None if number is None else node.inputs[number]
        array = constant(value)
        if value is not None and array is not None and array.ndim > 1:
            changed = array.copy()
            changed[0] = changed[0][..., ::-1] // 2 + 3 if array.dtype.kind in "iu" else changed[0] * 1.01
            name = f"{value.name}_spoilt"
            new = ir.Value(name=name, shape=value.shape, type=value.type, const_value=ir.tensor(changed, name=name))
            graph.register_initializer(new)
            node.replace_input_with(number, new)  # type: ignore[arg-type]
            return True
    return False


def moves_windows(graph: ir.Graph) -> bool:
    """Move windows by one row: move a row of padding from below to above."""
    for node in graph:
        pads = node.attributes.get("pads")
        if pads is not None and list(pads.as_ints()) == [1, 1, 1, 1]:
            node.attributes.add(attributes(pads=[2, 1, 0, 1])[0])
            return True
    return False


def takes_another(graph: ir.Graph) -> bool:
    """Replace an input by another tensor of the same type and shape."""
    values = [out for node in graph for out in node.outputs if constant(out) is None]
    for node in reversed(list(graph)):
        for number, value in enumerate(node.inputs):
            if value is None or constant(value) is not None:
                continue
            for other in values[: values.index(value)] if value in values else ():
                if (shape(other), other.dtype) == (shape(value), value.dtype):
                    node.replace_input_with(number, other)
                    return True
    return False


FAULTS: dict[str, list[Fault]] = {
    "quantised": [leaves_out, spoils_weights, moves_windows],
    "floats": [leaves_out, spoils_weights, changes_places, takes_another],
}  # fmt: skip


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Fault], list[bool]]:
    """Return a function that plants a fault in a pass; its list tells whether the fault was planted."""

    def plant(name: str, fault: Fault) -> list[bool]:
        done: list[bool] = []

        def wrong(run: Callable[[ir.Model], None], model: ir.Model) -> None:
            run(model)
            done.append(fault(model.graph))  # again where the pass is looked for

        changed = [
            replace(graph_pass, run=lambda model, run=graph_pass.run: wrong(run, model), inside=False)
            if graph_pass.name == name
            else graph_pass
            for graph_pass in PASSES
        ]
        monkeypatch.setattr("celosia.compiler.graph.pipeline.PASSES", Pipeline(*changed))
        return done

    return plant


# Tests -----------------------------------------------------------------------------------------------------------


NAMES = [graph_pass.name for graph_pass in PASSES]


@pytest.mark.parametrize(("name", "model"), paired(NAMES, MODELS))
def test_a_wrong_rewriting_is_found_and_its_pass_is_named(
    name: str, model: str, planted: Callable[[str, Fault], list[bool]]
) -> None:
    """One fault in each pass is found; successive passes begin with successive faults."""
    faults = FAULTS[model]
    begin = NAMES.index(name) // len(MODELS) % len(faults)
    assert any(is_found(name, model, fault, planted) for fault in faults[begin:] + faults[:begin])


@pytest.mark.thorough
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", NAMES)
def test_all_wrong_rewritings_are_found_and_their_pass_is_named(
    name: str, model: str, planted: Callable[[str, Fault], list[bool]]
) -> None:
    assert sum([is_found(name, model, fault, planted) for fault in FAULTS[model]]) >= 2


def is_found(name: str, model: str, fault: Fault, planted: Callable[[str, Fault], list[bool]]) -> bool:
    """Return whether the check names the pass in which a fault is planted; False if there is nothing to change."""
    done = planted(name, fault)
    try:
        celosia.compile(MODELS[model](), "tiny")
    except RewriteError as error:
        assert error.after == name, (fault, error)
        return True
    assert not any(done), fault
    return False


@pytest.mark.parametrize("accelerator", [True, False])
@pytest.mark.parametrize("model", MODELS)
def test_every_tensor_that_the_model_names_is_compared(
    model: str, accelerator: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    results: list[ComparedTensors] = []
    monkeypatch.setattr(
        "celosia.compiler.compile.check_rewriting", lambda *args: results.append(check_rewriting(*args))
    )
    celosia.compile(MODELS[model](), "tiny", accelerator=accelerator)
    (compared,) = results
    assert compared.tensors and not compared.left_out


def test_a_kernel_that_computes_something_else_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from celosia.compiler.ops import OPS

    monkeypatch.setitem(OPS, "Sigmoid", lambda node: OPS["Tanh"](replace(node, op="Tanh")))
    with pytest.raises(RewriteError, match="after all passes") as caught:
        celosia.compile(floats(), "tiny")
    assert caught.value.tensor == "y"
    assert exit_code_and_message(caught.value)[0] == FAULT


def test_the_error_says_where_and_what(planted: Callable[[str, Fault], list[bool]]) -> None:
    planted("common", changes_places)
    with pytest.raises(RewriteError) as caught:
        celosia.compile(floats(), "tiny")
    message = r"tensor 'ratio' differs from the model's own operators after the pass 'common': \d+ of 512 values, "
    assert re.fullmatch(message + r"the first at \[0, 0, 0, 0\]: expected \S+, found \S+", str(caught.value))


def test_check_false_leaves_it_out(planted: Callable[[str, Fault], list[bool]]) -> None:
    planted("common", changes_places)
    celosia.compile(floats(), "tiny", check=False)


def test_a_function_of_a_tensor_and_of_what_is_made_of_it_is_one_of_the_tensor() -> None:
    """Tensors that depend on each other are not replaced by independent random tensors, even if both are kept."""
    b = Builder("qdq", np.uint8, seed=1)
    x = b.input([1, 4, 5, 5])
    b.output(b.unary(b.binary("Mul", x, b.unary(x, "Relu")), "Relu"), real=True)
    for accelerator in (True, False):
        celosia.compile(b.model(), "tiny", accelerator=accelerator, keep="all")


def test_what_is_no_number_becomes_any_byte() -> None:
    """A quantised NaN may be any byte, here from the square root of a random input."""
    text = """<ir_version: 9, opset_import: ["": 17]> g (float[20] x, float w) => (int8[20] y, int8 v)
        <float s = {0.05}, int8 z = {3}> {
            a = Sqrt(x) b = Neg(a) y = QuantizeLinear(b, s, z) c = Sigmoid(w) v = QuantizeLinear(c, s, z) }"""
    celosia.compile(onnx.parser.parse_model(text), "tiny")


def test_what_is_made_twice_may_be_made_once() -> None:
    text = """<ir_version: 9, opset_import: ["": 17, "com.microsoft": 1]> g (float[1, 1, 3] x) => (int8[1, 1, 9] y)
        <float s = {0.003}, int8 z = {-128}> {
            a = Relu(x) b = Elu(a) c = Relu(a) d = QuantizeLinear(a, s, z) e = QuantizeLinear(b, s, z)
            f = QuantizeLinear(c, s, z) y = com.microsoft.QLinearConcat<axis = -1>(s, z, e, s, z, f, s, z, d, s, z) }"""
    celosia.compile(onnx.parser.parse_model(text), "tiny")


def test_a_softmax_of_bytes_may_wrap() -> None:
    """A softmax of one element is 1, which is 256 steps and wraps to 0, as in onnxruntime."""
    text = """<ir_version: 9, opset_import: ["": 17]> g (float[3, 1] x) => (float[3, 1] y)
        <float s = {0.05}, uint8 z = {3}, float t = {0.00390625}, uint8 u = {0}> {
            a = QuantizeLinear(x, s, z) b = DequantizeLinear(a, s, z) c = Softmax(b) d = QuantizeLinear(c, t, u)
            y = DequantizeLinear(d, t, u) }"""
    celosia.compile(onnx.parser.parse_model(text), "tiny")


@pytest.mark.parametrize("name", ONNX_TYPES.values())
def test_elements_of_every_type_are_compared(name: str) -> None:
    """Elements of each type are compared with bounds: 1 lies between 0 and 1, but not between 0 and 0."""
    kind = numpy_dtype(name)
    nothing = 0.25 if name == "float8_e8m0fnu" else 0  # which has none
    one, other, zero = (np.array([value, 1, 1], dtype=kind) for value in (1, 1, nothing))
    assert not difference_from_bounds(one, other, other) and (
        name == "object" or not difference_from_bounds(one, zero, other)
    )
    assert "1 of 3 values, the first at [0]" in difference_from_bounds(one, zero, zero)


def test_what_no_int32_holds_is_what_the_processor_makes_of_it() -> None:
    """Values that exceed int32 convert as the processor converts them, as in onnxruntime.

    Here they are 255 divided by a scale of 4e-8, and a power of float32's largest number times 298.
    """
    text = """<ir_version: 9, opset_import: ["": 17]> g (uint8[2, 11, 1] x, int8[1, 2] v)
        => (uint8[2, 11, 1] y, int8[1, 2] w) <float s = {1}, uint8 z = {0}, uint8 c = {255}, float t = {0.00000004},
         float a = {0.0098}, int8 b = {-38}, float u = {0.00334734}, int8 m = {-128}> {
            d = DequantizeLinear(x, s, z) e = DequantizeLinear(c, t, z) f = Add(d, e) y = QuantizeLinear(f, t, z)
            g = DequantizeLinear(v, a, b) h = Softmax(g) w = QuantizeLinear(h, u, m) }"""
    celosia.compile(onnx.parser.parse_model(text), "tiny")


@pytest.mark.parametrize("kind", ["int16", "uint16"])
def test_a_step_of_16_bits_may_round_either_way(kind: str) -> None:
    text = f"""<ir_version: 10, opset_import: ["": 21]> g ({kind}[2, 1, 300, 7] x) => ({kind}[2, 1, 100, 7] y)
        <float s = {{0.00046243}}, {kind} z = {{434}}> {{
            d = DequantizeLinear(x, s, z) e = AveragePool<kernel_shape = [2, 1], strides = [3, 1]>(d)
            y = QuantizeLinear(e, s, z) }}"""
    celosia.compile(onnx.parser.parse_model(text), "tiny")


def test_a_quantised_mean_that_counts_what_lies_beyond_its_padding() -> None:
    """A quantised average counts windows beyond its padding as onnxruntime does, unlike AveragePool."""
    text = """<ir_version: 9, opset_import: ["": 14]> g (uint8[1, 14, 14, 2] x) => (uint8[1, 14, 5, 2] y)
        <float s = {0.00784314}, uint8 z = {128}> {
            d = DequantizeLinear(x, s, z)
            e = AveragePool<ceil_mode = 1, count_include_pad = 1, kernel_shape = [3, 1], strides = [3, 1]>(d)
            y = QuantizeLinear(e, s, z) }"""
    celosia.compile(onnx.parser.parse_model(text), "tiny", accelerator=False)


def test_what_follows_from_no_number_is_not_compared() -> None:
    """Values computed from a quantised NaN are not compared, even if both of their bounds are equal."""
    text = """<ir_version: 9, opset_import: ["": 14, "com.microsoft": 1]> g (float[3, 20] x, uint8[3, 1] v)
        => (float[3, 20] y) <float s = {0.0125}, uint8 z = {128}, float t = {0.022}, float r = {0.0144},
        uint8[20] w = {0, 27, 41, 100, 161, 134, 108, 203, 153, 72, 204, 106, 222, 161, 142, 137, 166, 98, 58, 199}> {
            a = DequantizeLinear(v, s, z) b = Sqrt(a) c = Div(x, b) d = QuantizeLinear(c, t, z)
            f = com.microsoft.QLinearMul(d, t, z, w, r, z, t, z)
            e = DequantizeLinear(f, t, z) m = ReduceMean(e) y = Sub(e, m) }"""
    celosia.compile(onnx.parser.parse_model(text), "tiny", accelerator=False)


def test_rounding_decides_whether_there_is_a_root() -> None:
    text = """<ir_version: 9, opset_import: ["": 14]> g (float[40, 17] x) => (float[40, 1] y) {
        a = ReduceMean<axes = [-1]>(x) b = Sub(x, a) c = ReduceMean<axes = [-1]>(b) y = Sqrt(c) }"""
    celosia.compile(onnx.parser.parse_model(text), "tiny")


def test_many_steps_of_16_bits_may_be_anything() -> None:
    """After seven 16-bit quantisations the check knows no bounds of a hard swish, and accepts the model."""
    scales = [0.0000214, 0.0000214, 0.0000998, 0.000224, 0.000224, 0.000224, 0.000224]
    steps = "".join(
        f"q{i} = QuantizeLinear({f'd{i - 1}' if i else 'c'}, s{i}, z) d{i} = DequantizeLinear(q{i}, s{i}, z) "
        for i in range(len(scales))
    )
    constants = "".join(f", float s{i} = {{{scale:.7f}}}" for i, scale in enumerate(scales))
    text = f"""<ir_version: 10, opset_import: ["": 21]> g (float[1, 1, 5, 9] x, float[12, 1, 1, 1] w) => (float[] y)
        <int16 z = {{0}}, float s = {{0.0003}}, float t = {{0.0000305}} {constants}> {{
            a = QuantizeLinear(x, s, z) b = DequantizeLinear(a, s, z) c = Conv<strides = [3, 1]>(b, w) {steps}
            e = HardSigmoid<alpha = 0.1667>(d6) f = QuantizeLinear(e, t, z) g = DequantizeLinear(f, t, z)
            y = Mul(d6, g) }}"""
    celosia.compile(onnx.parser.parse_model(text), "tiny")


# Memory ----------------------------------------------------------------------------------------------------------


def deep(layers: int) -> onnx.ModelProto:
    """Return an element-wise float model in which the last operator reads the first result again."""
    ops = ["Sigmoid", "Neg", "Tanh", "Abs"]
    nodes = [helper.make_node(ops[n % 4], [f"t{n}"], [f"t{n + 1}"]) for n in range(layers)]
    nodes.append(helper.make_node("Add", [f"t{layers}", "t1"], ["y"]))
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 3]) for name in ("t0", "y")]
    graph = helper.make_graph(nodes, "deep", values[:1], values[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def test_the_reference_holds_few_tensors_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference computes each tensor once and holds few at a time, also if one is read again at the end."""
    held: list[int] = []
    compute = Original._compute_operator

    def counted(self: Original, tensor: int, known: dict[int, Any], slack: float) -> None:
        compute(self, tensor, known, slack)
        held.append(len(known))

    monkeypatch.setattr(Original, "_compute_operator", counted)
    original = Original(ir.serde.deserialize_model(deep(20)))
    x = np.linspace(-2, 2, 6, dtype=np.float32).reshape(2, 3)
    low, high = original.compute(original.number["y"], {original.number["t0"]: (x, x)})
    assert len(held) == 21 and max(held) <= 4
    values = [x]
    functions = [lambda v: 1 / (1 + np.exp(-v)), np.negative, np.tanh, np.abs]
    for n in range(20):
        values.append(functions[n % 4](values[-1]))
    np.testing.assert_allclose(low, values[20] + values[1], rtol=1e-5)
    np.testing.assert_array_equal(low, high)


def recomputed(monkeypatch: pytest.MonkeyPatch) -> int:
    """Return how many values the comparison of `floats` computes twice or more, after it has dropped all of them."""
    counts: Counter[int] = Counter()
    comparisons: list[Comparison] = []
    compute, difference = Original.compute, Comparison.difference

    def counted(self: Original, tensor: int, *given: Any, **how: Any) -> Any:
        counts[tensor] += 1
        return compute(self, tensor, *given, **how)

    def compared(self: Comparison, name: str) -> str:
        counts[self.original.number[name]] -= 1  # the tensor that is compared is computed for that alone
        comparisons.append(self)
        return difference(self, name)

    monkeypatch.setattr(Original, "compute", counted)
    monkeypatch.setattr(Comparison, "difference", compared)
    monkeypatch.setattr(Comparison, "_is_untouched", lambda self, name: False)  # compare every tensor
    celosia.compile(floats(), "tiny", without="fusion")
    assert len(comparisons) > 2 and not any(comparison.values for comparison in comparisons)
    return sum(count > 1 for count in counts.values())


def test_values_are_dropped_after_the_last_comparison_that_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert recomputed(monkeypatch) == 0


def test_values_that_are_dropped_too_early_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Comparison, "last_uses", lambda self, targets: {})
    assert recomputed(monkeypatch)
