"""Recurrent layers with random sizes and attributes give onnxruntime's results, as kernels and in the host runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from oracle import opened
from thorough import some

import celosia
from celosia.compiler import expr as T
from celosia.compiler.cpu.kernels import compile_op
from celosia.compiler.ops import Unsupported
from celosia.compiler.program.host.hostops import HOST
from celosia.compiler.program.host.hostops.recurrent_ops import are_projected, projected_weights
from celosia.compiler.program.host.op import HostOp
from celosia.compiler.program.model import CpuStep, HostStep
from celosia.driver.runtime import Runtime

Array = NDArray[Any]
GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
FUNCTIONS = {"RNN": 1, "GRU": 2, "LSTM": 3}
NAMES = (
    "Relu", "Tanh", "Sigmoid", "Affine", "LeakyRelu", "ThresholdedRelu", "ScaledTanh", "HardSigmoid", "Elu", "Softsign",
    "Softplus",
)  # fmt: skip
GATE_NAMES = ("Sigmoid", "HardSigmoid", "Tanh", "Softsign")
"""Of gates: with others a state may grow beyond all bounds."""
PARAMETERS = {
    "Affine": 2, "ScaledTanh": 2, "HardSigmoid": 2, "LeakyRelu": 1, "ThresholdedRelu": 1, "Elu": 1
}  # fmt: skip


class Layer:
    """A recurrent node with random inputs and attributes. Omitted inputs are None."""

    def __init__(self, op: str, seed: int) -> None:
        self.op, self.rng = op, np.random.default_rng([seed, len(op), ord(op[0])])
        rng = self.rng
        self.steps, self.batch, self.size, self.hidden = (int(rng.integers(1, high)) for high in (9, 6, 20, 40))
        way = str(rng.choice(["forward", "reverse", "bidirectional"]))
        d = self.directions = 1 + (way == "bidirectional")
        self.attrs: dict[str, Any] = {"hidden_size": self.hidden, "direction": way}
        rows = GATES[op] * self.hidden
        self.inputs: list[Array | None] = [
            self.floats(self.steps, self.batch, self.size), self.floats(d, rows, self.size),
            self.floats(d, rows, self.hidden), self.maybe(d, 2 * rows),
            rng.integers(0, self.steps + 1, self.batch, np.int32) if self.coin() else None,
            self.maybe(d, self.batch, self.hidden),
        ]  # fmt: skip
        if op == "LSTM":
            self.inputs += [self.maybe(d, self.batch, self.hidden), self.maybe(d, 3 * self.hidden)]
            self.attrs["input_forget"] = int(self.coin())
        if op == "GRU":
            self.attrs["linear_before_reset"] = int(self.coin())
        if self.coin():
            self.attrs["clip"] = float(np.float32(rng.uniform(0.5, 3)))
        if self.coin():
            self.functions()

    def coin(self) -> bool:
        return bool(self.rng.integers(2))

    def floats(self, *shape: int) -> Array:
        return (self.rng.standard_normal(shape) * 0.4).astype(np.float32)

    def maybe(self, *shape: int) -> Array | None:
        return self.floats(*shape) if self.coin() else None

    def functions(self) -> None:
        """Draw activation functions and their parameters for each direction."""
        count = FUNCTIONS[self.op]
        names = [
            str(self.rng.choice(GATE_NAMES if n % count == 0 and count > 1 else NAMES))
            for n in range(count * self.directions)
        ]
        self.attrs["activations"] = names
        alphas = [float(np.float32(self.rng.uniform(0.1, 0.9))) for name in names if name in PARAMETERS]
        betas = [float(np.float32(self.rng.uniform(0.1, 0.9))) for name in names if PARAMETERS.get(name) == 2]
        self.attrs |= {"activation_alpha": alphas} if alphas else {}
        self.attrs |= {"activation_beta": betas} if betas else {}

    @property
    def outputs(self) -> int:
        return 3 if self.op == "LSTM" else 2

    def model(self, fed: int = 1) -> onnx.ModelProto:
        """Return a model whose first `fed` inputs are inputs of each run; the others are constants."""
        names = [f"i{n}" if array is not None else "" for n, array in enumerate(self.inputs)]
        given = [(name, array) for name, array in zip(names, self.inputs) if array is not None]
        made = [f"o{n}" for n in range(self.outputs)]
        graph = helper.make_graph(
            [helper.make_node(self.op, names, made, **self.attrs)], "g",
            [
                helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape)
                for n, a in given[:fed]
            ],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in made],
            [numpy_helper.from_array(a, n) for n, a in given[fed:]],
        )  # fmt: skip
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)

    def expected(self) -> list[Array]:
        session = opened(self.model())
        result: list[Array] = session.run(None, {"i0": self.inputs[0]})
        return result

    def by_batch(self) -> Layer:
        """Return the same layer with sequences along the first axis (`layout`)."""
        turned = type(self).__new__(type(self))
        turned.__dict__ |= self.__dict__ | {"attrs": {**self.attrs, "layout": 1}}
        turned.inputs = [
            a if a is None or n not in (0, 5, 6) else np.ascontiguousarray(a.swapaxes(0, 1))
            for n, a in enumerate(self.inputs)
        ]
        return turned


def close(found: list[Array], expected: list[Array]) -> None:
    assert len(found) == len(expected)
    for actual, reference in zip(found, expected):
        assert actual.shape == reference.shape and actual.dtype == reference.dtype
        np.testing.assert_allclose(actual, reference, rtol=1e-5, atol=2e-5)


def in_numpy(layer: Layer) -> list[Array]:
    op = HostOp(layer.op, "", "", ("",), ("",) * layer.outputs, layer.attrs, 17, b"")
    return list(HOST["", layer.op](op, *layer.inputs))


@pytest.mark.parametrize("op", GATES)
@pytest.mark.parametrize("seed", some(range(20), range(4)))
def test_against_onnxruntime(op: str, seed: int) -> None:
    layer = Layer(op, seed)
    expected = layer.expected()
    program = celosia.compile(layer.model(), accelerator=False)
    assert not any(isinstance(step, HostStep) for step in program.steps)
    close(list(Runtime(program).run({"i0": layer.inputs[0]}).outputs.values()), expected)
    close(in_numpy(layer), expected)


@pytest.mark.parametrize("op", GATES)
@pytest.mark.parametrize("seed", some(range(100, 105), range(100, 102)))
def test_sequences_along_the_first_axis(op: str, seed: int) -> None:
    """Layers with `layout` equal onnxruntime's layers without it, transposed; onnxruntime does not support `layout`."""
    layer = Layer(op, seed)
    every, *last = layer.expected()
    expected = [every.transpose(2, 0, 1, 3), *(state.swapaxes(0, 1) for state in last)]
    batch_first = layer.by_batch()
    program = celosia.compile(batch_first.model(), accelerator=False)
    assert any(isinstance(step, CpuStep) and step.kernel is not None for step in program.steps)
    close(list(Runtime(program).run({"i0": batch_first.inputs[0]}).outputs.values()), expected)
    close(in_numpy(batch_first), expected)


@pytest.mark.parametrize("op", GATES)
@pytest.mark.parametrize("seed", some(range(200, 203), [200]))
def test_weights_that_are_fed(op: str, seed: int) -> None:
    layer = Layer(op, seed)
    present = {f"i{n}": array for n, array in enumerate(layer.inputs) if array is not None}
    runtime = Runtime(celosia.compile(layer.model(fed=len(present)), accelerator=False))
    close(list(runtime.run(present).outputs.values()), layer.expected())


@pytest.mark.parametrize("op", GATES)
def test_half_precision_is_computed_in_single(op: str) -> None:
    layer = Layer(op, 7)
    layer.inputs = [a.astype(np.float16) if a is not None and a.dtype == np.float32 else a for a in layer.inputs]
    given = [array for array in layer.inputs if array is not None]
    kernel = compile_op(op, layer.attrs, layer.inputs, outputs=layer.outputs)
    wide = Layer(op, 7)
    wide.inputs = [a.astype(np.float32) if a is not None and a.dtype == np.float16 else a for a in layer.inputs]
    for actual, reference in zip(kernel(*given), wide.expected()):
        assert actual.dtype == np.float16
        np.testing.assert_array_equal(actual, reference.astype(np.float16))


def test_threads_change_nothing() -> None:
    rng = np.random.default_rng(4)
    x, w, r = (rng.standard_normal(s).astype(np.float32) / 16 for s in ((24, 16, 128), (2, 512, 128), (2, 512, 128)))
    kernel = compile_op("LSTM", {"direction": "bidirectional"}, [x, w, r], outputs=3)
    assert any(kernel.phases)
    for one, two in zip(kernel(x, w, r), kernel(x, w, r, threads=2)):
        np.testing.assert_array_equal(one, two)


def test_what_follows_joins_the_kernel() -> None:
    """Transposes and Reshapes after a layer, for one direction and for two, become part of its kernel."""
    rng = np.random.default_rng(3)
    x, w, r = (rng.standard_normal(s).astype(np.float32) for s in ((5, 2, 6), (2, 32, 6), (2, 32, 8)))
    text = """g (float[5, 2, 6] x) => (float[5, 2, 16] y) {
        t, h, c = LSTM <hidden_size = 8, direction = "bidirectional"> (x, w, r)
        s = Transpose <perm = [0, 2, 1, 3]> (t)
        u = Reshape (s, shape)
        y = Relu (u)
    }"""
    graph = onnx.parser.parse_graph(text)
    arrays = {"w": w, "r": r, "shape": np.array([5, 2, 16])}
    graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    program = celosia.compile(model, accelerator=False)
    assert len(program.steps) == 1
    session = opened(model)
    close([Runtime(program).run({"x": x}).outputs["y"]], session.run(None, {"x": x}))


@pytest.mark.parametrize(
    "op, change, why",
    [
        ("LSTM", {"activations": ["Sigmoid", "Wave", "Tanh"]}, "activation 'wave'"),
        ("GRU", {"direction": "bidirectional"}, "1 directions where the direction is bidirectional"),
        ("RNN", {"direction": "sideways"}, "sideways"),
    ],
)
def test_impossible_attributes(op: str, change: dict[str, Any], why: str) -> None:
    rows = GATES[op] * 4
    shapes = [((3, 2, 5), "float32"), ((1, rows, 5), "float32"), ((1, rows, 4), "float32")]
    with pytest.raises(Unsupported, match=why):
        compile_op(op, change, shapes)
    with pytest.raises(Unsupported, match=r"\[1, \d+, 5\]"):
        compile_op(op, {}, [shapes[0], ((1, rows, 6), "float32"), shapes[2]])


# Weights of bytes


class DynamicLayer(Layer):
    """A DynamicQuantizeLSTM as onnxruntime's quantiser writes it: transposed byte weights, scaled by direction or
    column.

    int8 weights have 7 bits: with 8 bits onnxruntime's sums saturate on processors without VNNI.
    """

    def __init__(self, seed: int) -> None:
        super().__init__("LSTM", seed)
        self.op = "DynamicQuantizeLSTM"
        self.inputs += [None] * (8 - len(self.inputs))
        signed = self.coin()
        for number in (1, 2):
            weights, by_column = self.inputs[number], self.coin()
            assert weights is not None
            transposed = weights.swapaxes(1, 2)
            axes = 1 if by_column else (1, 2)
            scales = (np.abs(transposed).max(axes, keepdims=True) / (63 if signed else 127)).astype(np.float32)
            zero = 0 if signed else int(self.rng.integers(100, 156))
            kind = np.int8 if signed else np.uint8
            limits = np.iinfo(kind)
            self.inputs[number] = np.clip(np.round(transposed / scales) + zero, limits.min, limits.max).astype(kind)
            scales = scales.reshape(scales.shape[0], -1) if by_column else scales.reshape(-1)
            self.inputs += [scales, np.full(scales.shape, zero, kind)]

    def model(self, fed: int = 1) -> onnx.ModelProto:
        model = super().model(fed)
        model.graph.node[0].domain = "com.microsoft"
        model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
        return model


@pytest.mark.parametrize("seed", some(range(60), (0, 2, 4, 11)))
def test_dynamically_quantised_weights_against_onnxruntime(seed: int) -> None:
    """DynamicQuantizeLSTM gives onnxruntime's results.

    Directions, lengths, states, peepholes and activation functions are random; weights are int8 or uint8, with scales
    by direction or by column.
    """
    layer = DynamicLayer(seed)
    program = celosia.compile(layer.model(), accelerator=False)
    assert not any(isinstance(step, HostStep) for step in program.steps)
    close(list(Runtime(program).run({"i0": layer.inputs[0]}).outputs.values()), layer.expected())


def test_dynamically_quantised_weights_that_are_fed() -> None:
    layer = DynamicLayer(3)
    present = {f"i{n}": array for n, array in enumerate(layer.inputs) if array is not None}
    runtime = Runtime(celosia.compile(layer.model(fed=len(present)), accelerator=False))
    close(list(runtime.run(present).outputs.values()), layer.expected())


def test_dynamically_quantised_sequences_along_the_first_axis() -> None:
    layer = DynamicLayer(5)
    every, *last = layer.expected()
    turned = layer.by_batch()
    program = celosia.compile(turned.model(), accelerator=False)
    expected = [every.transpose(2, 0, 1, 3), *(state.swapaxes(0, 1) for state in last)]
    close(list(Runtime(program).run({"i0": turned.inputs[0]}).outputs.values()), expected)


@pytest.mark.parametrize(
    "weights, per_channel",
    some([("QInt8", False), ("QInt8", True), ("QUInt8", False), ("QUInt8", True)], [("QInt8", True)]),
)
def test_what_onnxruntime_makes_of_a_recurrent_network(weights: str, per_channel: bool, tmp_path: Path) -> None:
    """A bidirectional LSTM and a product, quantised by quantize_dynamic, give onnxruntime's results."""
    quantization = pytest.importorskip("onnxruntime.quantization")
    rng = np.random.default_rng(8)
    arrays = {
        "w": rng.standard_normal((2, 48, 10)), "r": rng.standard_normal((2, 48, 12)), "b": rng.standard_normal((2, 96)),
        "p": rng.standard_normal((12, 5)), "shape": np.array([6, 3, 24]), "v": rng.standard_normal((24, 5)),
    }  # fmt: skip
    text = """g (float[6, 3, 10] x) => (float[6, 3, 5] y, float[2, 3, 12] h) {
        t, h, c = LSTM <hidden_size = 12, direction = "bidirectional"> (x, w, r, b)
        u = Transpose <perm = [0, 2, 1, 3]> (t)
        s = Reshape (u, shape)
        y = MatMul (s, v)
    }"""
    graph = onnx.parser.parse_graph(text)
    for name, array in arrays.items():
        kind = np.int64 if name == "shape" else np.float32
        graph.initializer.append(numpy_helper.from_array(array.astype(kind), name))
    before, after = tmp_path / "float.onnx", tmp_path / "bytes.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), before)
    kind = getattr(quantization.QuantType, weights)
    quantization.quantize_dynamic(
        before, after, weight_type=kind, per_channel=per_channel, reduce_range=weights == "QInt8"
    )
    assert "DynamicQuantizeLSTM" in {node.op_type for node in onnx.load(after).graph.node}
    x = rng.standard_normal((6, 3, 10)).astype(np.float32)
    outputs = Runtime(celosia.compile(after, "tiny")).run({"x": x}).outputs
    close(list(outputs.values()), opened(after).run(None, {"x": x}))


# Scans


def test_a_scan_of_two_states() -> None:
    """A Scan computes Fibonacci's numbers, and their sums with an input that is transposed once, outside of the
    steps."""
    x = T.placeholder((6, 3), "int64", "x")
    turned = T.compute((3, 6), lambda i, j: x[j, i] * 10, "turned")
    start = [T.compute((3,), lambda i, n=n: n, f"start{n}", "int64") for n in (0, 1)]

    def step(t: T.Axis, states: tuple[T.Tensor, ...]) -> list[T.Tensor]:
        a, b = states
        return [b, T.compute((3,), lambda i: a[i] + b[i] + turned[i, t], "next")]

    states = T.scan(6, start, step, "states")
    function = T.verify(T.lower(states))
    values = np.arange(18).reshape(6, 3) % 5
    (output,) = T.interpret(function, values)
    a, b = np.zeros(3, np.int64), np.ones(3, np.int64)
    for t in range(6):
        assert np.array_equal(output[0, t], a) and np.array_equal(output[1, t], b)
        a, b = b, a + b + 10 * values[t]
    assert np.array_equal(output[:, 6], [a, b])
    before, steps = str(function).split("ordered t in 6:")
    assert "turned[" in before and "* 10" in before and "* 10" not in steps
    assert str(T.parse(str(function))) == str(function)


def test_a_scan_of_no_steps_is_what_it_begins_with() -> None:
    start = T.placeholder((4,), "int64", "start")
    states = T.scan(0, [start], lambda t, s: [T.compute((4,), lambda i: s[0][i] + t, "next")], "states")
    assert T.interpret(T.lower(states), np.arange(4))[0].tolist() == [[[0, 1, 2, 3]]]


def test_impossible_scans_say_why() -> None:
    start = T.placeholder((4,), "int64", "start")
    with pytest.raises(ValueError, match="-1 steps of 1 states"):
        T.scan(-1, [start], lambda t, s: s, "bad")
    with pytest.raises(ValueError, match=r"states .*\(4,\).* become .*\(3,\)"):
        T.scan(2, [start], lambda t, s: [T.compute((3,), lambda i: s[0][i], "next")], "bad")

    def nested(t: T.Axis, states: tuple[T.Tensor, ...]) -> list[T.Tensor]:
        inner = T.scan(2, [states[0]], lambda u, s: s, "inner")
        return [T.compute((4,), lambda i: inner[0, 2, i], "next")]

    with pytest.raises(ValueError, match=r"inner.*scan.*another"):
        T.scan(2, [start], nested, "bad")


def test_a_scan_is_computed_whole() -> None:
    start = T.placeholder((4,), "int64", "start")
    states = T.scan(2, [start], lambda t, s: [T.compute((4,), lambda i: s[0][i] + t, "next")], "states")
    y = T.compute((4,), lambda i: states[0, 2, i], "y")
    schedule = T.create_schedule(y)
    schedule[states].compute_at(schedule[y], y.axes[0])
    with pytest.raises(ValueError, match=r"states.*scan.*in parts"):
        T.lower(schedule)


# Inputs that are gates already ------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", GATES)
@pytest.mark.parametrize("seed", range(300, 306))
def test_inputs_that_are_gates_are_not_multiplied(op: str, seed: int) -> None:
    layer = Layer(op, seed)
    x, w = layer.inputs[0], layer.inputs[1]
    assert x is not None and w is not None
    directions, size, _ = w.shape
    layer.inputs[0] = np.random.default_rng(seed).standard_normal((*x.shape[:2], directions * size)).astype(np.float32)
    layer.inputs[1] = projected_weights(directions, size)
    program = celosia.compile(layer.model(), accelerator=False)
    close(list(Runtime(program).run({"i0": layer.inputs[0]}).outputs.values()), layer.expected())
    assert program.macs_total == x.shape[0] * x.shape[1] * layer.inputs[2].size  # type: ignore[union-attr]


def test_other_weights_are_no_projection() -> None:
    w = projected_weights(2, 6)
    assert are_projected(w) and are_projected(w.astype(np.float16))
    assert not any(map(are_projected, (None, 2 * w, w[:, ::-1], w[:1], w[..., :-1], w[0], np.zeros_like(w))))
