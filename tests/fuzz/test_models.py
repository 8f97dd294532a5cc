"""Random models must have onnxruntime's outputs; planted faults are found, minimised, and written once."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from thorough import some

pytest.importorskip("onnxruntime")

from celosia.compiler.graph.onnxruntime_rules import weights_and_biases
from celosia.compiler.ops import OPS
from celosia.hw.spec.config import PRESETS, Config
from fuzz.cases import Failure
from fuzz.models import campaign, exclusions
from fuzz.models import judge as judging
from fuzz.models.case import Case
from fuzz.models.draw import draw_case
from fuzz.models.exclusions import excuse
from fuzz.models.judge import (
    CRASHED,
    DOCUMENTED,
    EQUAL,
    REFUSED,
    UNCOUNTED,
    WRONG,
    Neighbourhood,
    judge,
)
from fuzz.models.minimise import minimise
from fuzz.models.net import Draw, Net, OracleError
from fuzz.run import chunk

STARTS, EACH = range(1_000_000, 1_000_300, 10), 10
"""300 models in 30 groups; `make test` runs the first group. `python -m fuzz --kind model` runs other seeds."""


@pytest.mark.parametrize("start", some(STARTS, STARTS[:1]))
def test_random_models_are_onnxruntimes(start: int) -> None:
    results = chunk("model", PRESETS["tiny"], range(start, start + EACH))
    assert not results.failures
    assert results.endings[UNCOUNTED] < EACH // 2


def test_a_case_is_its_seed() -> None:
    a, b, other = draw_case(4_000_001), draw_case(4_000_001), draw_case(4_000_002)
    assert a.model == b.model and a.config == b.config and a.model != other.model


def test_a_case_is_saved_whole(tmp_path: Path) -> None:
    case = draw_case(1_000_004)
    case.save(tmp_path / "one.of")
    again = Case.load(tmp_path / "one.of")
    assert (again.model, again.config, again.kind) == (case.model, case.config, case.kind)
    for a, b in zip(again.feeds, case.feeds, strict=True):
        assert a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


# Corpus of faults ----------------------------------------------------------------------------------------------------

CORPUS: dict[str, str] = tomllib.loads(Path(__file__).with_name("corpus.toml").read_text(encoding="utf-8"))


def case_of_text(text: str, opset: int = 18, seed: int = 0) -> Case:
    """Return the case of a graph in the text form of corpus.toml.

    Names w_3_4 and w8_3_4 stand for random float and int8 weights of shape [3, 4]. seed: of weights and inputs.
    """
    draw = Draw(f"{seed}")
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": {opset}, "com.microsoft": 1]> g {text}')
    for name in sorted({name for node in model.graph.node for name in node.input if name.startswith(("w_", "w8_"))}):
        kind = "int8" if name.startswith("w8_") else "float32"
        values = draw.array(kind, [int(size) for size in name.split("_")[1:]])
        model.graph.initializer.append(onnx.numpy_helper.from_array(values, name))
    feed = {}
    for value in model.graph.input:
        kind = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        feed[value.name] = np.asarray(draw.array(kind, [dim.dim_value for dim in value.type.tensor_type.shape.dim]))
    return Case("text", model, (feed,), PRESETS["tiny"])


@pytest.mark.parametrize("seed", some(range(3), [0]))
@pytest.mark.parametrize("name", CORPUS)
def test_the_corpus_has_onnxruntimes_outputs(name: str, seed: int) -> None:
    verdict = judge(case_of_text(CORPUS[name], seed=seed))
    assert verdict.what in (EQUAL, DOCUMENTED), verdict


def test_a_shape_behind_16_bits_that_the_model_has_wrong() -> None:
    """The compiler ignores a wrong shape in the model: onnx counts a pooling window that begins outside the image."""
    case = case_of_text("""
        (float[1, 2, 2, 3] x) => (uint16[1, 2, 1, 3] y)
        <float s = {0.0001}, uint16 z = {30000}, float[1, 2, 2, 3] m> {
            a = com.microsoft.QuantizeLinear(x, s, z) d = com.microsoft.DequantizeLinear(a, s, z)
            m = MaxPool<kernel_shape = [1, 1], strides = [2, 1], ceil_mode = 1>(d)
            y = com.microsoft.QuantizeLinear(m, s, z) }""")
    assert [value.name for value in case.model.graph.value_info] == ["m"]
    assert judge(case).what == EQUAL


def test_layer_normalisation_of_old_opsets() -> None:
    text = "(float[2, 3, 4] x) => (float[2, 3, 4] y) { y = LayerNormalization(x, w_4, w_4) }"
    assert judge(case_of_text(text, opset=13)).what == EQUAL


def test_a_mean_of_bytes_that_cancel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mean of bytes that cancel has a measured effect of rounding; a slightly larger difference is wrong."""
    case = case_of_text("""
        (float[2, 40] x) => (float[] y) <float s = {0.010719789}, uint8 z = {128}> {
            q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) m = ReduceMean<axes = [0]>(d) y = Relu(m) }""",
        opset=14)  # fmt: skip
    (feed,) = case.feeds
    feed["x"][1] = -feed["x"][0]
    assert judge(case).what == EQUAL
    ours = judging._ours

    def a_little_more(case: Case, keep: Any) -> list[dict[str, Any]]:
        return [values | {"y": values["y"] + np.float32(1e-5)} for values in ours(case, keep)]

    monkeypatch.setattr(judging, "_ours", a_little_more)
    assert judge(case).what == WRONG


def test_a_part_whose_padding_is_as_long_as_the_whole() -> None:
    """A part of 6 of 11 channels is copied, although both have 16 channels with padding."""
    case = case_of_text("""
        (float[1, 11, 3, 10] x) => (float[] y) <float s = {0.0066}, int8 z = {-68}, int64[2] sizes = {6, 5}> {
            a = MaxPool<kernel_shape = [3, 1], pads = [0, 0, 1, 0]>(x) b = QuantizeLinear(a, s, z)
            c, d = Split<axis = 1>(b, sizes) e = com.microsoft.QLinearConcat<axis = 1>(s, z, c, s, z, d, s, z)
            f = DequantizeLinear(e, s, z) y = SpaceToDepth<blocksize = 2>(f) }""")
    assert judge(replace(case, config=Config(batch=4, block_in=2, block_out=16))).what == EQUAL


def test_what_fits_no_tile_where_records_are() -> None:
    """A mean of more pixels than acc holds compiles under a preset with records."""
    case = case_of_text("""
        (uint8[1, 1, 144, 10] x) => (uint8[] y) <float s = {0.09}, uint8 z = {128}, float t = {0.0014}> {
            a = DequantizeLinear(x, s, z) b = GlobalAveragePool(a) y = QuantizeLinear(b, t, z) }""")
    assert judge(replace(case, config=PRESETS["zcu104"])).what == EQUAL


@pytest.mark.parametrize("moved", ["Flatten", "Reshape"])
def test_a_softmax_behind_which_bytes_are_moved(moved: str) -> None:
    """A softmax before Reshape or Flatten gives onnxruntime's bytes.

    onnxruntime exchanges QuantizeLinear with Reshape, but not with Flatten, so that softmax computes floats there.
    """
    shape = ", int64[2] shape = {2, 15}" if moved == "Reshape" else ""
    for seed in range(4):
        case = case_of_text(f"""
            (int8[2, 1, 1, 3, 5] x) => (int8[] y)
            <float s = {{0.02838}}, int8 z = {{-128}}, float t = {{0.0038077}} {shape}> {{
                a = DequantizeLinear(x, s, z) b = Softmax(a) c = {moved}(b{', shape' if shape else ''})
                y = QuantizeLinear(c, t, z) }}""",
            seed=seed, opset=15)  # fmt: skip
        assert judge(case).what == EQUAL


@pytest.mark.parametrize("value", [0.3, -0.3, 0.2, float("inf")])
@pytest.mark.parametrize("kind", ["int16", "int8"])
def test_a_bias_that_no_int32_holds(kind: str, value: float) -> None:
    case = case_of_text(f"""
        ({kind}[1, 3] x) => ({kind}[1, 2] y)
        <float s = {{2.5e-8}}, {kind} z = {{0}}, float t = {{0.0044}}, float q = {{0.01}}> {{
            a = DequantizeLinear(x, s, z) w = DequantizeLinear(w8_3_2, t, v)
            c = Gemm(a, w, bias) y = QuantizeLinear(c, q, z) }}""",
        opset=21)  # fmt: skip
    for name, array in (("v", np.zeros((), np.int8)), ("bias", np.array([value, 0.1], np.float32))):
        case.model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    assert judge(case).what == EQUAL


def test_roots_of_what_cancels() -> None:
    """A root of a sum that cancels may be NaN, depending on rounding."""
    case = case_of_text("""
        (float[8, 17] x) => (float[] y) {
            a = ReduceMean<axes = [-1]>(x) b = Sub(x, a) c = ReduceMean<axes = [-1]>(b) y = Sqrt(c) }""",
        opset=14)  # fmt: skip
    assert judge(case).what == EQUAL


OFF_BY_ZERO = """
    (float[6, 5] x, float[6, 1] d) => (uint8[6, 5] y) <float s = {0.0055}, float t = {0.01}, uint8 z = {0}> {
        q = QuantizeLinear(x, s, z) v = DequantizeLinear(q, s, z) a = ReduceMean<axes = [-1]>(v) b = Sub(v, a)
        c = Div(b, d) y = QuantizeLinear(c, t, z) }"""
"""Divides by d = 0 the difference of values from their mean: rounding of the mean decides between NaN and infinity."""


def off_by_zero() -> Case:
    case = case_of_text(OFF_BY_ZERO, opset=14)
    steps = [[92, 91, 91, 91, 90]] * 3 + [[101, 93, 95, 89, 90], [91, 92, 91, 89, 90], [88, 87, 88, 88, 89]]
    case.feeds[0].update(x=(np.array(steps) * 0.0055).astype(np.float32), d=np.zeros((6, 1), np.float32))
    return case


def test_quotients_of_what_cancels_by_zero() -> None:
    assert judge(off_by_zero()).what in (EQUAL, DOCUMENTED)


def test_a_wrong_byte_of_an_infinity_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = judging._ours

    def wrong_one(case: Case, keep: Any) -> list[dict[str, Any]]:
        (values,) = ours(case, keep)
        assert values["y"][3, 0] == 255
        values["y"][3, 0] = 254  # 9 steps above the mean
        return [values]

    monkeypatch.setattr(judging, "_ours", wrong_one)
    assert judge(off_by_zero()).what == WRONG
    neighbourhood = Neighbourhood.__new__(Neighbourhood)
    here, there = np.array([np.inf, np.inf], np.float32), np.array([np.inf, -np.inf], np.float32)
    drawn = [{"y": here}, {"y": there}]
    neighbourhood.__dict__.update(near=drawn, _drawn=lambda count: drawn, _exact=lambda name: None)
    for output, gaps in (([np.inf, np.nan], 0), ([np.nan, np.inf], 1), ([-np.inf, np.inf], 1), ([np.inf, -np.inf], 0),
                         ([np.inf, 1], 1)):  # fmt: skip
        assert len(neighbourhood.gap("y", np.array(output, np.float32), here, "", ())) == gaps
    assert list(neighbourhood._is_anything("y", np.array([True, True]))) == [False, True]


def test_the_exponent_of_a_negative_base_is_what_it_is() -> None:
    case = case_of_text("""
        (float[2, 17] x, float e) => (float[] y) {
            a = ReduceMean<axes = [-1]>(x) b = Sub(x, a) c = Pow(b, e) d = ReduceMean<axes = [-1]>(c)
            f = Sqrt(d) g = Div(b, f) y = Tanh(g) }""",
        opset=14)  # fmt: skip
    (feed,) = case.feeds
    feed["e"] = np.array(2, np.float32)
    neighbourhood = Neighbourhood(case.model, feed, case.model)
    assert not any(np.isnan(draw["y"]).any() for draw in neighbourhood.near) and judge(case).what == EQUAL


def test_a_float_bias_is_rounded_as_onnxruntime_does() -> None:
    """A convolution's float bias is rounded to int32 in steps of the scales, as onnxruntime does.

    The convolution from int8 to uint8 computes floats. With the unrounded bias, values next to a tie would not be
    excused.
    """
    rng = np.random.default_rng(0)
    model = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["": 17]>
        g (float[1, 3, 20, 20] x) => (float[1, 16, 14, 14] y) <int8 zx = {1}, uint8 zy = {0}> {
            a = QuantizeLinear(x, sx, zx) b = DequantizeLinear(a, sx, zx) v = DequantizeLinear(w, sw)
            c = Conv(b, v, bias) d = Relu(c)
            e = QuantizeLinear(d, sy, zy) y = DequantizeLinear(e, sy, zy) }""")
    constants = {
        "sx": np.float32(0.1), "sw": np.float32(0.3), "sy": np.float32(0.06), "bias": rng.normal(size=16),
        "w": rng.integers(-3, 4, (16, 3, 7, 7)).astype(np.int8),
    }  # fmt: skip
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(np.asarray(value, np.int8 if name == "w" else np.float32), name)
        for name, value in constants.items()
    )
    for node in model.graph.node:
        node.name = node.output[0]
    feed = {"x": rng.normal(size=(1, 3, 20, 20)).astype(np.float32)}
    with_ties = judge(Case("bias", model, (feed,), Config.load("tiny")))
    assert with_ties.what in (EQUAL, DOCUMENTED), with_ties.why


def test_what_is_no_number_is_found() -> None:
    neighbourhood = Neighbourhood.__new__(Neighbourhood)
    numbers, with_nan = np.ones(2, np.float32), np.array([1, np.nan], np.float32)
    for moved, gap_count in ((numbers, 1), (with_nan, 0)):
        drawn = [{"y": numbers}, {"y": moved}]
        neighbourhood.__dict__.update(near=drawn, _drawn=lambda count, drawn=drawn: drawn, _exact=lambda name: None)
        assert (
            len(neighbourhood.gap("y", with_nan, numbers, "", ()))
            == len(neighbourhood.gap("y", numbers, with_nan, "", ()))
            == gap_count
        )


# Planted faults are found --------------------------------------------------------------------------------------------


def network() -> Case:
    """Return a network with a LeakyRelu, for the planted fault."""
    net = Net(Draw("planted"), 17)
    x = net.input(net.draw.floats((1, 4, 6, 6)))
    x = net.add("Relu", net.add("Conv", x, net.floats((8, 4, 3, 3), 0.2), net.floats((8,))))
    x = net.add("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2])
    x = net.add("LeakyRelu", net.add("Sub", x, net.floats((8, 2, 2), 2.0)), alpha=0.3)
    x = net.add("Flatten", net.add("Add", x, net.add("Sigmoid", x)))
    net.outputs.append(net.add("MatMul", x, net.floats((32, 5))))
    return Case("float", net.model(), (net.inputs,), PRESETS["pynq"])


@pytest.fixture
def wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant a wrong slope into LeakyRelu everywhere in the compiler, so that the self-check cannot notice it."""
    right = OPS["LeakyRelu"]
    monkeypatch.setitem(OPS, "LeakyRelu", lambda node: right(replace(node, attrs={"alpha": 0.31})))


def test_a_wrong_kernel_is_found_and_made_small(wrong_kernel: None) -> None:
    case = network()
    verdict = judge(case)
    assert verdict.what == WRONG
    minimised = minimise(case, verdict)
    (node,) = minimised.case.model.graph.node
    assert node.op_type == "LeakyRelu" and minimised.signature == "wrong: LeakyRelu()"
    assert all(array.size == 1 for array in minimised.case.feeds[0].values())
    assert judge(minimised.case).what == WRONG


def test_random_models_find_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPS, "Relu", lambda node: OPS["Abs"](replace(node, op="Abs")))
    seeds = range(1_000_000, 1_000_025)
    failures = (text for seed in seeds for text in chunk("model", PRESETS["tiny"], range(seed, seed + 1)).failures)
    assert any(word in text for text in failures for word in (WRONG, CRASHED))


def test_a_wrong_rewriting_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong range of weights in the import is found, although the compiler's self-check starts behind the import."""
    right = weights_and_biases._quantise_to_int8
    monkeypatch.setattr(weights_and_biases, "_quantise_to_int8", lambda w: right(w * np.float32(1.2)))
    verdict = judge(case_of_text(CORPUS["float weights and bias of a Conv between quantised tensors"]))
    assert verdict.what == WRONG and verdict.operators == ("Conv", "DequantizeLinear", "QuantizeLinear")


def test_crashes_and_refusals_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(node: Any) -> Any:
        raise RuntimeError("planted")

    monkeypatch.setitem(OPS, "LeakyRelu", broken)
    verdict = judge(network())
    assert verdict.what == CRASHED and "RuntimeError" in verdict.why and "planted" in verdict.why
    monkeypatch.delitem(OPS, "LeakyRelu")
    assert judge(network()).what == REFUSED


def test_what_onnxruntime_refuses_does_not_count() -> None:
    case = case_of_text("(float[2] x) => (float[2] y) { y = Unknown(x) }")
    assert judge(case).what == UNCOUNTED


# Exclusions ----------------------------------------------------------------------------------------------------------


def test_exclusions_are_narrow() -> None:
    assert excuse("QLinearConv", 1, True) is None
    assert excuse("QuantizeLinear", 1, False) is None and excuse("QuantizeLinear", 2, True) is None
    assert excuse("QuantizeLinear", 1, True) is not None


def test_a_step_is_excused_only_next_to_a_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function that is off by 0.2% moves bytes across ties from afar, which is not excused."""
    case = case_of_text(
        "(uint8[1, 200] x) => (uint8[1, 200] y) <float s = {0.02}, uint8 z = {130}, float t = {0.004}, uint8 u = {0}> "
        "{ d = DequantizeLinear(x, s, z) e = Softplus(d) y = QuantizeLinear(e, t, u) }"
    )
    assert judge(case).what in (EQUAL, DOCUMENTED)
    from celosia.compiler.graph.quantized import tables

    right = tables.execute
    monkeypatch.setattr(tables, "execute", lambda *op, **how: [right(*op, **how)[0] * np.float32(1.002)])
    assert judge(case).what in (WRONG, CRASHED)


def test_the_page_lists_every_exclusion() -> None:
    page = Path(__file__).parents[2] / "docs" / "numerics.md"
    assert exclusions.table() in page.read_text(encoding="utf-8")


# Findings ------------------------------------------------------------------------------------------------------------


def test_findings_are_written_once(wrong_kernel: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Here:
        """Workers that run calls in this process, where the kernel is wrong."""

        def __init__(self, jobs: int, own_cache: bool) -> None: ...
        def __enter__(self) -> Here:
            return self

        def __exit__(self, *error: object) -> None: ...
        def run(self, calls: Any, seconds: float) -> Any:
            return ((key, call()) for key, call in calls)

    monkeypatch.setattr(campaign, "Workers", Here)
    monkeypatch.setattr(campaign, "draw_case", lambda seed: network())
    with pytest.raises(Failure, match="wrong") as failure:
        campaign.model(3)
    (one,) = campaign.findings({failure.value.cause: [3, 8]}, tmp_path, 1)
    assert one.signature == "wrong: LeakyRelu()" and one.seeds == (3, 8)
    assert {path.name for path in tmp_path.iterdir()} == {"3.onnx", "3.npz", "3.json", "findings.txt"}
    assert "LeakyRelu" in (tmp_path / "findings.txt").read_text()
    assert judge(Case.load(tmp_path / "3")).what == WRONG


def test_what_onnxruntime_refuses_of_a_draw_is_drawn_again() -> None:
    with pytest.raises(OracleError):
        Net(Draw("1"), 17).add("Unknown")
