"""All tensors inside a model can be read from a run, and they are onnxruntime's."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_models import Builder, detector, models
from thorough import FACTOR, some, tries

pytest.importorskip("onnxruntime")

from agreement import CONFIGS, ONE_STEP, expected, feed_of

import celosia
from celosia.compiler.graph.errors import ModelError
from celosia.compiler.program import Program
from celosia.driver.accuracy import compare as comparing
from celosia.driver.accuracy.compare import compare
from celosia.driver.runtime import Runtime
from celosia.sim.functional.fsim import FunctionalDevice


def block(b: Builder) -> None:
    """Add layers that become one block: 1x1, depthwise, a table, 1x1, and a residual."""
    x = b.conv(b.input([1, 16, 14, 14]), 16, (1, 1))
    y = b.conv(x, 32, (1, 1))
    y = b.unary(b.conv(y, 32, (3, 3), pads=(1, 1, 1, 1), group=32), "Sigmoid")
    b.output(b.binary("Add", b.conv(y, 16, (1, 1)), x), real=True)


def saved(b: Builder, folder: Path) -> Path:
    onnx.save(b.model(), folder / "model.onnx")
    return folder / "model.onnx"


# Kept tensors are onnxruntime's and change no output, even if names are missing, equal or hostile.
# Hypothesis derives the seed of a derandomized test from its text, so its docstring stays as it is.
@pytest.mark.parametrize("config", some(CONFIGS, ["tiny", "4x16"]))
@settings(
    max_examples=tries(5), deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(b=models())
def test_every_tensor_of_random_models(tmp_path: Path, config: str, b: Builder) -> None:
    """Models without names, with equal and hostile ones among them. Keeping tensors changes no output."""
    model = b.model()
    feed = feed_of(model)
    program = celosia.compile(model, CONFIGS[config], keep="all")
    result = Runtime(program, FunctionalDevice(CONFIGS[config])).run(feed, trace=False)
    for (name, step), wanted in zip(b.steps.items(), expected(model, feed), strict=True):
        assert result.outputs[name] is result.tensors[name]
        gap = np.abs(result.outputs[name].astype(np.float64) - wanted.astype(np.float64)).max()
        assert gap <= (ONE_STEP * (step if wanted.dtype == np.float32 else 1) if name in b.inexact else 0)
    report = compare(saved(b, tmp_path), feed, config=CONFIGS[config], check=False)
    kept = {tensor.name for tensor in program.kept}
    assert kept <= {*result.tensors} and len(report["tensors"]) >= len(b.steps)
    if not b.inexact:
        assert report["different"] == 0 and report["first"] is None


@pytest.mark.parametrize(
    ("names", "form"), some(product(["none", "same", "hostile"], ["qdq", "qoperator"]), [("hostile", "qdq")])
)
def test_every_tensor_of_a_detector(tmp_path: Path, names: str, form: str) -> None:
    b = Builder(form, np.int8, seed=6)
    b.node_names, b.hostile_tensors = names, names == "hostile"
    detector(b)
    path = saved(b, tmp_path)
    report = compare(path, feed_of(b.model()), config=CONFIGS["8x8"], check=False)
    assert (report["different"], report["first"]) == (0, None)
    assert len(report["tensors"]) > 70


@pytest.mark.parametrize("config", some(["tiny", "pynq", "batch2-8x4"], ["batch2-8x4"]))
def test_what_a_block_keeps_on_chip_comes_out_of_it(config: str) -> None:
    b = Builder("qdq", np.int8, seed=2)
    block(b)
    model, feed = b.model(), feed_of(b.model())
    plain = celosia.compile(model, CONFIGS[config])
    everything = Runtime(celosia.compile(model, CONFIGS[config], keep="all")).run(feed).tensors
    names = [n.output[0] for n in model.graph.node if n.op_type == "QuantizeLinear"]
    for name in names if FACTOR >= 1 else names[1::3]:
        program = celosia.compile(model, CONFIGS[config], keep=[name])
        result = Runtime(program).run(feed)
        assert set(result.tensors) == {name, *result.outputs} and list(result.outputs) == [
            t.name for t in plain.outputs
        ]
        for output, array in Runtime(plain).run(feed).outputs.items():
            np.testing.assert_array_equal(array, result.outputs[output])
        np.testing.assert_array_equal(result.tensors[name], everything[name])
    if config == "pynq":
        assert any(layer.op == "Block" for launch in plain.launches for layer in launch.layers)


def test_a_program_in_a_file_keeps_its_tensors(tmp_path: Path) -> None:
    b = Builder("qdq", np.int8, seed=2)
    block(b)
    program = celosia.compile(b.model(), "tiny", keep="all")
    program.save(tmp_path / "program")
    read = Program.load(tmp_path / "program")
    assert read.kept == program.kept != ()
    feed = feed_of(b.model())
    loaded_tensors, original_tensors = Runtime(read).run(feed).tensors, Runtime(program).run(feed).tensors
    assert all(np.array_equal(loaded_tensors[name], original_tensors[name]) for name in original_tensors)


def test_what_cannot_be_kept_says_what_can() -> None:
    b = Builder("qdq", np.int8, seed=2)
    block(b)
    model = b.model()
    conv = next(node for node in model.graph.node if node.op_type == "Conv")
    with pytest.raises(ModelError, match=r"is computed nowhere, for an integer operator makes .*; keep '") as error:
        celosia.compile(model, "tiny", keep=[conv.output[0]])
    celosia.compile(model, "tiny", keep=[str(error.value).split("'")[-2]])
    with pytest.raises(ModelError, match=r"is computed nowhere, for integers stand for it; keep '"):
        celosia.compile(model, "tiny", keep=[conv.input[0]])
    with pytest.raises(ModelError, match=r"no operator of the model makes a tensor 'nonsense' to keep"):
        celosia.compile(model, "tiny", keep=["nonsense"])
    with pytest.raises(KeyError, match=r"tensor 'x' is not kept: .*keep=\['x'\]"):
        Runtime(celosia.compile(model, "tiny")).run(feed_of(model)).tensors["x"]


# After a flipped bit in a layer's weights, the first tensor that differs is that layer's result.
# Hypothesis derives the seed of a derandomized test from its text, so its docstring stays as it is.
@settings(max_examples=tries(10), deadline=None, derandomize=True)
@given(place=st.integers(0, 10**6))
def test_a_planted_fault_is_named(tmp_path_factory: pytest.TempPathFactory, place: int) -> None:
    """A bit of a layer's weights: the first tensor that differs is that layer's, and those before it do not."""
    b = Builder("qdq", np.int8, seed=2, symmetric=True)
    block(b)
    path = saved(b, tmp_path_factory.mktemp("planted"))
    original = comparing.compile_model
    convs = [node.name or node.output[0] for node in b.model().graph.node if node.op_type == "Conv"]
    chosen = place % len(convs)

    def broken(model: object, *args: object, **options: object) -> Program:
        """As the model with another weight of one convolution would be compiled."""
        changed = onnx.load(path)
        conv = [node for node in changed.graph.node if node.op_type == "Conv"][chosen]
        source = next(node for node in changed.graph.node if conv.input[1] in node.output).input[0]
        weights = next(c for c in changed.graph.initializer if c.name == source)
        array = onnx.numpy_helper.to_array(weights).copy()
        array.reshape(-1)[place % array.size] ^= 0x40
        weights.CopyFrom(onnx.numpy_helper.from_array(array, source))
        return original(changed, *args, **options)  # type: ignore[arg-type]

    comparing.compile_model = broken  # type: ignore[assignment]
    try:
        report = compare(path, feed_of(b.model()), config="tiny", check=False)
    finally:
        comparing.compile_model = original
    rows = {row["name"]: row for row in report["tensors"]}
    assert report["different"] >= 1 and rows[report["first"]]["differs"]
    index, found, wanted = rows[report["first"]]["first"]
    assert found != wanted and len(index) == 4
    order = [row["name"] for row in report["tensors"]]
    assert not any(rows[name]["differs"] for name in order[: order.index(report["first"])])
    made_by = next(node for node in onnx.load(path).graph.node if report["first"] in node.output)
    node = made_by
    producers = {out: each for each in onnx.load(path).graph.node for out in each.output}
    while node.op_type != "Conv":
        node = producers[node.input[0]]
    assert node.output[0] == [n for n in onnx.load(path).graph.node if n.op_type == "Conv"][chosen].output[0]


@pytest.mark.parametrize(
    ("found", "wanted", "largest", "counts"),
    [
        ([-np.inf, np.nan, 1 + 1e-6, 2], [-np.inf, np.nan, 1, 2], 5e-7, False),
        ([-np.inf, 1.1, 2], [-np.inf, 1, 2], 0.05, True),
        ([-np.inf, 1, 2], [np.inf, 1, 2], None, True),
        ([np.nan, 1, 2], [0, 1, 2], None, True),
        ([0.0, 0.0], [-0.0, 0.0], 0, False),
        ([1e-30, 0.0], [0.0, 0.0], None, True),
    ],
)
def test_infinities_that_are_equal_are_no_difference(
    found: list[float], wanted: list[float], largest: float | None, counts: bool
) -> None:
    result = comparing.largest_difference(np.array(found), np.array(wanted))
    assert result == ((None if largest is None else pytest.approx(largest)), counts)


def test_another_shape_is_a_difference() -> None:
    graph = comparing.ModelTensors(
        onnx.helper.make_model(onnx.parser.parse_graph("g (float[2] x) => (float[2] y) { y = Neg(x) }"))
    )
    row = comparing._compare_tensor(graph, "y", np.zeros(2, np.float32), np.zeros((1, 2), np.float32))
    assert row["differs"] and row["first"] == [None, None, "float32[1, 2]"]
    nan = np.array([np.nan, 1], np.float32)
    assert not comparing._compare_tensor(graph, "y", nan, nan.copy())["differs"]
    assert comparing._compare_tensor(graph, "y", nan, np.array([0, 1], np.float32))["differs"]
    near = comparing._compare_tensor(graph, "y", np.array([1, 2], np.float32), np.array([1, 2.0001], np.float32))
    assert near["different"] == 1 and not near["differs"]
    assert comparing._compare_tensor(graph, "y", np.array([1, 2], np.float32), np.array([1, 2.01], np.float32))[
        "differs"
    ]


def test_signal_to_noise_by_layer(
    tmp_path: Path,
) -> None:
    """If the second convolution has coarse weights, the signal-to-noise ratio falls there."""
    b = Builder("qdq", np.int8, seed=5)
    x = b.conv(b.input([1, 4, 12, 12]), 8, (3, 3), pads=(1, 1, 1, 1))
    x = b.conv(x, 8, (3, 3), pads=(1, 1, 1, 1))
    b.output(b.conv(x, 8, (1, 1)), real=True)
    model = b.model()
    onnx.save(model, tmp_path / "int8.onnx")
    # In the float model, each Q and DQ of an activation is the identity.
    floats = onnx.ModelProto()
    floats.CopyFrom(model)
    constants = {c.name for c in floats.graph.initializer}
    for node in floats.graph.node:
        if node.op_type == "QuantizeLinear" or (node.op_type == "DequantizeLinear" and node.input[0] not in constants):
            node.op_type = "Identity"
            del node.input[1:], node.attribute[:]
    del floats.graph.value_info[:]
    onnx.save(floats, tmp_path / "float.onnx")
    report = compare(tmp_path / "int8.onnx", feed_of(model), config="tiny", float_model=tmp_path / "float.onnx")
    measured = [row for row in report["tensors"] if row["sqnr_db"] is not None]
    assert len(measured) >= 4 and report["different"] == 0
    result = Runtime(celosia.compile(model, "tiny", keep="all")).run(feed_of(model))
    for row in measured[1:]:
        assert 3 < row["sqnr_db"] < 70 and row["lost_db"] is not None
    last = measured[-1]
    truth = expected(floats, feed_of(model))[0].astype(np.float64)
    noise = truth - result.outputs[last["name"]].astype(np.float64)
    assert last["sqnr_db"] == pytest.approx(10 * np.log10((truth**2).sum() / (noise**2).sum()))
