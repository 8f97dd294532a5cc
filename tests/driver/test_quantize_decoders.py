"""`celosia quantize` on decoders: open sizes stay open, only products are quantised, perplexity is reported."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from benchmarks.decoders import DecoderNetwork
from dynamic_models import DynamicNet
from numpy.typing import NDArray
from onnx import TensorProto
from typer.testing import CliRunner

import celosia
from celosia.driver.accuracy.compare import compare
from celosia.driver.cli import app
from celosia.driver.data.calibration import CalibrationError, Input
from celosia.driver.quantize.accuracy_report import WHY_NOT
from celosia.driver.quantize.attention_scales import operators_between_products
from celosia.driver.quantize.decoders import complete_decoder_samples, is_decoder, perplexity, quantised_products
from celosia.driver.quantize.quantize import QuantizeError
from celosia.hw.spec.config import PRESETS

Array = NDArray[Any]
PLAIN = replace(PRESETS["pynq"], forward=False)
"""Without blocks, whose search takes the compiler longer than all else."""
LAYERS, HEADS, SIZE, WIDTH, VOCABULARY, CONTEXT = 2, 2, 16, 32, 20, 24
CACHES = [f"past_key_values.{layer}.{what}" for layer in range(LAYERS) for what in ("key", "value")]
OPEN = {"input_ids": [1, "steps"], "attention_mask": [1, "total"], "position_ids": [1, "steps"]}
OPEN |= {name: [1, HEADS, "past", SIZE] for name in CACHES}
OPEN |= {"logits": [1, "steps", VOCABULARY]}
OPEN |= {name.replace("past_key_values", "present"): [1, HEADS, "total", SIZE] for name in CACHES}


class TinyDecoder(DynamicNet):
    """A decoder as optimum exports it, with random weights: products with separate biases, GELU, a mask."""

    def __init__(self) -> None:
        super().__init__("decoder", seed=5, quantised=False)
        tokens, mask, positions = (self.input(name, OPEN[name], TensorProto.INT64) for name in list(OPEN)[:3])
        caches = [self.input(name, OPEN[name]) for name in CACHES]
        x = self.node("Gather", self.normal(VOCABULARY, WIDTH), tokens)
        x = self.node("Add", x, self.node("Gather", self.normal(CONTEXT, WIDTH), positions))
        x, causal_mask = self.norm(x, WIDTH), self.mask(tokens, mask)
        for layer, (key, value) in enumerate(zip(caches[::2], caches[1::2])):
            rows = self.norm(x, WIDTH) if layer else x  # an operand of products, and a residual
            x = self.node("Add", x, self.attention(rows, layer, key, value, causal_mask))
            wide = self.gelu(self.biased(self.norm(x, WIDTH), WIDTH, 2 * WIDTH))
            x = self.node("Add", x, self.biased(wide, 2 * WIDTH, WIDTH))
        logits = self.node("MatMul", self.norm(x, WIDTH), self.normal(WIDTH, VOCABULARY, deviation=0.2))
        self.output(logits, "logits", OPEN["logits"])
        self.outputs.insert(0, self.outputs.pop())  # the first, as exporters have it

    def biased(self, x: str, inputs: int, outputs: int) -> str:
        product = self.node("MatMul", x, self.normal(inputs, outputs, deviation=inputs**-0.5))
        return str(self.node("Add", self.normal(outputs, deviation=0.1), product))

    def mask(self, tokens: str, mask: str) -> str:
        """Append the mask that is added to scores [1, heads, steps, total]."""
        zero, one = (self.constant(axis, np.int64) for axis in range(2))
        total, steps = (self.node("Gather", self.node("Shape", x), one) for x in (mask, tokens))
        columns = self.node("Range", zero, total, one)
        rows = self.node("Range", self.node("Sub", total, steps), total, one)
        causal = self.node("LessOrEqual", columns, self.node("Unsqueeze", rows, self.ints(1)))
        valid = self.node("Equal", self.node("Unsqueeze", mask, self.ints(1, 2)), one)
        return str(self.node("Where", self.node("And", causal, valid), self.constant(0.0), self.constant(-1e9)))

    def attention(self, x: str, layer: int, key: str, value: str, mask: str) -> str:
        q, k, v = (self.heads(self.biased(x, WIDTH, WIDTH), HEADS, SIZE) for _ in range(3))
        k, v = self.node("Concat", key, k, axis=2), self.node("Concat", value, v, axis=2)
        for name, cache in ((f"present.{layer}.key", k), (f"present.{layer}.value", v)):
            self.output(cache, name, OPEN[name])
        scores = self.node("MatMul", q, self.node("Transpose", k, perm=[0, 1, 3, 2]))
        scores = self.node("Add", self.node("Mul", scores, self.constant(SIZE**-0.5)), mask)
        mixed = self.node("MatMul", self.node("Softmax", scores, axis=-1), v)
        joined = self.node("Reshape", self.node("Transpose", mixed, perm=[0, 2, 1, 3]), self.ints(0, 0, -1))
        return self.biased(joined, WIDTH, WIDTH)


def tokens(count: int = 25, steps: int = 12) -> Array:
    return np.random.default_rng(2).integers(0, VOCABULARY, (count, steps))


def feed(ids: Array, padding: int = 0, caches: dict[str, Array] | None = None) -> dict[str, Array]:
    """Return inputs for `ids` [steps] after the tokens of `caches`, with random padding before them."""
    caches = caches or {name: np.zeros((1, HEADS, 0, SIZE), np.float32) for name in CACHES}
    past = caches[CACHES[0]].shape[2]
    rng = np.random.default_rng(3)
    padded = {name: np.concatenate([rng.normal(size=(1, HEADS, padding, SIZE)).astype(np.float32), cache], 2)
              for name, cache in caches.items()}  # fmt: skip
    valid = np.repeat([0, 1], [padding, past + len(ids)])
    return {"input_ids": ids[None], "attention_mask": valid[None],
            "position_ids": np.arange(past, past + len(ids))[None], **padded}  # fmt: skip


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, Any]]:
    """Return the paths of the float model, the int8 model and the report."""
    folder = tmp_path_factory.mktemp("decoder")
    onnx.save(TinyDecoder().model(), folder / "float.onnx")
    report = celosia.quantize(folder / "float.onnx", {"input_ids": tokens()}, folder / "int8.onnx", config="tiny")
    return folder / "float.onnx", folder / "int8.onnx", report


def named(path: Path) -> dict[str, list[int | str]]:
    graph = onnx.load(path).graph
    return {value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
            for value in (*graph.input, *graph.output)}  # fmt: skip


def test_open_sizes_stay_open(files: tuple[Path, Path, dict[str, Any]]) -> None:
    from oracle import opened

    assert named(files[1]) == OPEN
    session = opened(files[1], int8=True)
    for steps, past in ((1, 0), (5, 0), (1, 9), (3, 4)):
        caches = {name: np.zeros((1, HEADS, past, SIZE), np.float32) for name in CACHES}
        logits, key, *_ = session.run(None, feed(tokens()[0, :steps], caches=caches))
        assert logits.shape == (1, steps, VOCABULARY) and key.shape == (1, HEADS, steps + past, SIZE)


def test_products_are_quantised_and_nothing_else(files: tuple[Path, Path, dict[str, Any]]) -> None:
    graph = onnx.load(files[1]).graph
    makers = {name: node for node in graph.node for name in node.output}
    readers = {name: [node.op_type for node in graph.node if name in node.input] for name in makers}

    def comes_from(name: str) -> str:
        return makers[name].op_type if name in makers else "input or constant"

    products = [node for node in graph.node if node.op_type in ("MatMul", "Gemm")]
    assert len(products) == LAYERS * 8 + 1
    for node in products:
        assert {comes_from(name) for name in node.input} == {"DequantizeLinear"}
        assert readers[node.output[0]] == ["QuantizeLinear"]
    for node in graph.node:
        if node.op_type in ("Softmax", "LayerNormalization", "Where", "Concat"):
            assert all(comes_from(name) != "DequantizeLinear" or node.op_type == "Concat" for name in node.input)
    residuals = [node for node in graph.node if node.op_type == "Add" and len(set(map(comes_from, node.input))) == 2]
    assert sum("DequantizeLinear" in map(comes_from, node.input) for node in residuals) == 2 * LAYERS
    quantised = {comes_from(node.input[0]) for node in graph.node if node.op_type == "QuantizeLinear"}
    assert {"Softmax", "LayerNormalization", "Mul"} <= quantised  # operands of products; Mul is GELU's last
    zeros = [onnx.numpy_helper.to_array(t) for t in graph.initializer if t.name.endswith("zero_point")]
    assert zeros and not any(zero.any() for zero in zeros)
    reasons = {row["reason"] for row in files[2]["operators"] if row["op"] == "Softmax"}
    assert reasons == {"it is no product"}


def test_all_products_run_on_the_accelerator_with_onnxruntimes_bytes(files: tuple[Path, Path, dict[str, Any]]) -> None:
    from oracle import opened

    share = files[2]["accelerator"]
    assert share["macs_accelerator"] == share["macs_total"] > 0
    session = opened(files[1], int8=True)
    _, *caches = session.run(None, feed(tokens()[0, :6]))
    given = feed(tokens()[0, 6:7], caches=dict(zip(CACHES, caches)))
    program = celosia.compile(files[1], "tiny", shapes={name: array.shape for name, array in given.items()})
    assert program.macs_accelerator == program.macs_total > 0
    got = celosia.Runtime(program).run(given).outputs
    for value, expected in zip(session.get_outputs(), session.run(None, given)):
        np.testing.assert_array_equal(got[value.name], expected)


def test_a_padded_cache_gives_the_same(files: tuple[Path, Path, dict[str, Any]]) -> None:
    from oracle import opened

    session = opened(files[1], int8=True)
    _, *caches = session.run(None, feed(tokens()[0, :6]))
    past = dict(zip(CACHES, caches))
    expected = session.run(None, feed(tokens()[0, 6:9], caches=past))
    given = feed(tokens()[0, 6:9], padding=5, caches=past)
    program = celosia.compile(files[1], "tiny", shapes={name: array.shape for name, array in given.items()})
    outputs = celosia.Runtime(program).run(given).outputs
    for found in (session.run(None, given), [outputs[value.name] for value in session.get_outputs()]):
        np.testing.assert_array_equal(found[0], expected[0])
        for a, b in zip(found[1:], expected[1:]):
            np.testing.assert_array_equal(a[:, :, 5:], b)


def test_caches_are_returned_as_they_came(files: tuple[Path, Path, dict[str, Any]]) -> None:
    """Caches are returned without rounding; products read a rounded copy."""
    from oracle import opened

    given = feed(tokens()[0, :2], padding=4)
    session = opened(files[1], optimised=False)
    for name, array in zip([value.name for value in session.get_outputs()][1:], session.run(None, given)[1:]):
        np.testing.assert_array_equal(array[:, :, :4], given[name.replace("present", "past_key_values")])


def test_steps_one_by_one_say_what_all_at_once_say(files: tuple[Path, Path, dict[str, Any]]) -> None:
    from oracle import opened

    session = opened(files[1], int8=True)
    expected, *_ = session.run(None, feed(tokens()[0]))
    caches: dict[str, Array] | None = None
    for step, token in enumerate(tokens()[0]):
        logits, *made = session.run(None, feed(token[None], caches=caches))
        caches = dict(zip(CACHES, made))
        np.testing.assert_array_equal(logits[0, 0], expected[0, step])


# Perplexity -----------------------------------------------------------------------------------------------------


def test_perplexity_is_reported_and_shown(tmp_path: Path, files: tuple[Path, Path, dict[str, Any]]) -> None:
    from oracle import opened

    np.savez(tmp_path / "samples.npz", input_ids=tokens())
    line = ["quantize", str(files[0]), "--calibration", str(tmp_path / "samples.npz"), "--config", "tiny"]
    done = CliRunner().invoke(app, [*line, "-o", str(tmp_path / "o.onnx"), "--report", str(tmp_path / "r.json")])
    assert done.exit_code == 0 and "perplexity float" in done.stdout
    rows = {row["name"]: row["perplexity"] for row in json.loads((tmp_path / "r.json").read_text())["outputs"]}
    assert {name for name, found in rows.items() if found} == {"logits"}
    for kind, path in zip(("float", "int8"), files):
        session, chances = opened(path, int8=True), []
        for row in tokens()[4::5]:  # what is held out
            logits = session.run(None, feed(row))[0][0].astype(np.float64)
            shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
            chances += [shares[k, row[k + 1]] for k in range(len(row) - 1)]
        assert rows["logits"][kind] == pytest.approx(np.prod(np.array(chances) ** (-1 / len(chances))))
    assert rows["logits"]["int8"] == pytest.approx(rows["logits"]["float"], rel=0.05)


def test_perplexity_of_known_chances() -> None:
    ids = np.array([[0, 1, 2, 0]])
    logits = np.log(np.array([[[0.5, 0.25, 0.25], [0.25, 0.25, 0.5], [0.125, 0.375, 0.5], [1, 1, 1]]]))
    assert perplexity([logits], [{"input_ids": ids}]) == pytest.approx((4 * 2 * 8) ** (1 / 3))
    masked = {"input_ids": ids, "attention_mask": np.array([[1, 1, 0, 1, 1, 1]])}  # two of the past, the first left out
    assert perplexity([logits], [masked]) == pytest.approx((2 * 8) ** (1 / 2))
    assert perplexity([logits[:, :1]], [{"input_ids": ids[:, :1]}]) is None


# Samples, and what is no decoder --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"input_ids": tokens(), "attention_mask": np.ones((25, 9), np.int64)},
         "attention_mask is for 9 tokens, but 0 are of caches and 12 are new"),
        ({"input_ids": tokens().astype(np.int32)}, r"input_ids\[0\] is int32, the model takes int64"),
        ({"position_ids": tokens()}, "no array 'input_ids'"),
        ({"input_ids": tokens(), "labels": tokens()}, "no such input"),
        ({"input_ids": tokens(), CACHES[0]: np.zeros((25, HEADS, 3, SIZE + 1), np.float32)}, r"past_key_values.0.key"),
    ],
)  # fmt: skip
def test_wrong_samples(
    tmp_path: Path, files: tuple[Path, Path, dict[str, Any]], arrays: dict[str, Array], words: str
) -> None:
    with pytest.raises(CalibrationError, match=words) as info:
        celosia.quantize(files[0], arrays, tmp_path / "out.onnx", config="tiny")
    assert "\n" not in str(info.value) and not (tmp_path / "out.onnx").exists()


def test_tokens_beyond_the_vocabulary(tmp_path: Path, files: tuple[Path, Path, dict[str, Any]]) -> None:
    with pytest.raises(QuantizeError, match="out of data bounds") as info:
        celosia.quantize(files[0], {"input_ids": tokens() + VOCABULARY}, tmp_path / "out.onnx", config="tiny")
    assert "\n" not in str(info.value)


def test_what_samples_leave_out_is_made() -> None:
    kind = np.dtype(np.int64)
    inputs = [Input(name, kind, (1, None)) for name in ("input_ids", "attention_mask", "position_ids")]
    inputs += [Input(name, np.dtype(np.float32), (None, 4, None, 8)) for name in ("past_0", "past_1")]
    made = complete_decoder_samples("here", {"input_ids": np.zeros((7, 5), np.int64)}, inputs)
    assert {name: array.shape for name, array in made.items()} == {
        "input_ids": (7, 5), "attention_mask": (7, 5), "position_ids": (7, 5),
        "past_0": (7, 1, 4, 0, 8), "past_1": (7, 1, 4, 0, 8),
    }  # fmt: skip
    caches = {name: np.zeros((7, 4, 3, 8), np.float32) for name in ("past_0", "past_1")}
    made = complete_decoder_samples("here", {"input_ids": np.zeros((7, 5), np.int64), **caches}, inputs)
    assert made["attention_mask"].shape == (7, 8) and made["position_ids"][6].tolist() == [3, 4, 5, 6, 7]
    inputs[-1] = Input("past_1", np.dtype(np.float32), (1, None, None, 8))  # which axis counts tokens is not known
    assert list(complete_decoder_samples("here", {"input_ids": np.zeros((7, 5), np.int64)}, inputs)) == ["input_ids"]


def test_what_is_a_decoder() -> None:
    floats = np.dtype(np.float32)
    assert is_decoder([Input("past_key_self_0", floats, (1, 4, None, 8))])
    assert not is_decoder([Input("image", floats, (1, 4, None, 8)), Input("past", floats, (1, None))])


def test_operators_are_a_choice(tmp_path: Path) -> None:
    """The option --operators chooses what is quantised in a model that is no decoder; unknown names are refused."""
    net = DynamicNet("plain", seed=1, quantised=False)
    x = net.node("Relu", net.node("Conv", net.input("image", [1, 2, 4, 4]), net.normal(2, 2, 1, 1)))
    x = net.node("MatMul", net.node("Flatten", x), net.normal(32, 8))
    net.output(x, "y", [1, 8])
    net.nodes[-2].name = matmul = "dense"
    onnx.save(net.model(), tmp_path / "plain.onnx")
    images = {"image": np.random.default_rng(0).normal(size=(4, 2, 4, 4)).astype(np.float32)}
    options: dict[str, Any] = {"operators": "products", "config": "tiny"}
    report = celosia.quantize(tmp_path / "plain.onnx", images, tmp_path / "products.onnx", **options)
    assert [row["op"] for row in report["operators"] if row["quantised"]] == ["MatMul"]
    assert {row["perplexity"] for row in report["outputs"]} == {None}
    with pytest.raises(QuantizeError, match="no MatMul and no Gemm"):
        celosia.quantize(tmp_path / "plain.onnx", images, tmp_path / "o.onnx", exclude=[matmul], **options)
    with pytest.raises(ValueError, match=r"operators.*attention.*'some'"):
        celosia.quantize(tmp_path / "plain.onnx", images, tmp_path / "o.onnx", operators="some")


ROTARY = DecoderNetwork(heads=2, groups=1, inner=32, wide=48, layers=1, vocabulary=20, most=32, rotary=True)


@pytest.mark.parametrize("network", [ROTARY, replace(ROTARY, rotary=False)])
def test_what_is_between_products(network: DecoderNetwork) -> None:
    """The choices quantise attention, rotary positions, or all: also the residual stream and norms, but not GELU."""
    model = network.model()
    constants = {tensor.name for tensor in model.graph.initializer}
    of_two = {node.name for node in model.graph.node if not constants.intersection(node.input)}
    softmaxes, norms = (
        {node.name for node in model.graph.node if node.op_type == op} for op in ("Softmax", network.norm)
    )
    attention = operators_between_products(model, "attention")
    assert set(attention.operators) == (network.attending & of_two) | network.turning | softmaxes
    rotary = operators_between_products(model, "rotary")
    assert set(rotary.operators) == network.turning and not rotary.masked
    everything = operators_between_products(model, "all")
    gates = network.gated & of_two if network.rotary else set()
    assert set(everything.operators) - gates == set(attention.operators) | norms | network.stream
    assert everything.masked == attention.masked and len(everything.masked) == network.layers


@pytest.mark.parametrize("operators", [pytest.param("attention", marks=pytest.mark.thorough), "all"])
def test_attention_and_all_in_bytes(operators: str, tmp_path: Path) -> None:
    """Attention, or all of a decoder, is quantised with onnxruntime's bytes; a mask of -10,000 leaves steps to the
    scores.

    With the hardware for it and norms that are rounded correctly, a step is one launch.
    """
    onnx.save(ROTARY.model(), tmp_path / "float.onnx")
    made, random = tmp_path / "int8.onnx", np.random.default_rng(0).integers(0, 20, (25, 16))
    report = celosia.quantize(tmp_path / "float.onnx", {"input_ids": random}, made, operators=operators, config="tiny")
    (logits,), (plain,) = (
        [row for row in report[key] if row["name"] == "logits"] for key in ("outputs", "outputs_with_products")
    )
    assert plain["sqnr_db"] > logits["sqnr_db"] > plain["sqnr_db"] - 5
    assert logits["perplexity"]["float"] == plain["perplexity"]["float"] != plain["perplexity"]["int8"]
    left = {row["op"]: row["reason"] for row in report["operators"] if not row["quantised"]}
    assert "Softmax" not in left and (ROTARY.norm in left) == (operators == "attention")
    assert left["Cos"] == WHY_NOT[operators if operators == "attention" else "decoder"]
    cfg = replace(PLAIN, softmax=4, norm=8)
    assert compare(made, ROTARY.feed(3, 13, seed=1, valid=9), config=cfg, check=False)["different"] == 0
    with celosia.Decoder(made, config=cfg, length=16, rounding="correct", check=False) as decoder:
        assert len(decoder.program().launches) == (1 if operators == "all" else 3)


def test_gates_of_products_are_quantised(tmp_path: Path) -> None:
    """SwiGLU is quantised, also after normalisations of unknown type: four launches a layer, one for rotary
    positions."""
    network = DecoderNetwork(heads=2, groups=1, inner=16, wide=48, layers=1, vocabulary=20, most=32, rotary=True)
    model = network.model()
    onnx.save(model, tmp_path / "float.onnx")
    gates = [node.name for node in model.graph.node if node.name in network.gated]
    chosen = quantised_products(model)
    assert [name in chosen for name in gates] == [False, True]  # x * sigmoid(x) is a table, that by `up` a gate
    tokens = np.random.default_rng(0).integers(0, 20, (4, 16))
    report = celosia.quantize(tmp_path / "float.onnx", {"input_ids": tokens}, tmp_path / "int8.onnx", config=PLAIN)
    assert report["accelerator"]["macs_accelerator"] == report["accelerator"]["macs_total"]
    with celosia.Decoder(tmp_path / "int8.onnx", config=PLAIN, length=16) as decoder:
        assert len(decoder.program().launches) == 4 + 1
        assert {each.dtype for each in decoder.program().inputs if "past" in each.name} == {"int8"}


def test_rotary_positions_in_bytes_take_no_launch_of_their_own(tmp_path: Path) -> None:
    """Each layer takes three launches on a Config without softmax, and rotary positions none of their own.

    Each head has its own keys; onnxruntime would otherwise repeat heads after rotary positions.
    """
    network = replace(ROTARY, groups=2)
    onnx.save(network.model(), tmp_path / "float.onnx")
    tokens, made = np.random.default_rng(0).integers(0, 20, (4, 16)), tmp_path / "int8.onnx"
    report = celosia.quantize(tmp_path / "float.onnx", {"input_ids": tokens}, made, operators="rotary", config="tiny")
    left = {row["op"]: row["reason"] for row in report["operators"] if not row["quantised"]}
    assert left["Softmax"] == WHY_NOT["rotary"]
    assert compare(made, network.feed(3, 13, seed=1, valid=9), config=PLAIN, check=False)["different"] == 0
    with celosia.Decoder(made, config=PLAIN, length=16, check=False) as decoder:
        assert len(decoder.program().launches) == 3 + 1
