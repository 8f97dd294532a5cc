"""Four-bit weights have a factor for each group and minimal error; their models are exact int8 models."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from benchmarks.encoders import Encoder, sample
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from test_quantize import assert_exact, images, network
from thorough import some, tries
from typer.testing import CliRunner

import celosia
from celosia.driver.cli import app
from celosia.driver.quantize import four_bits
from celosia.driver.quantize.four_bits import CODEBOOK_BLOCK, quantise_weights
from celosia.driver.quantize.quantize import quantize
from celosia.driver.quantize.second_moments import measure_second_moments
from celosia.driver.workstation import oracle
from celosia.hw.spec.config import PRESETS

USAGE = 2
"""The exit code of an option that is none."""


def factor_of(group: Iterable[int]) -> int | None:
    """Return the first factor by which all numbers are multiples within four bits, or None."""
    numbers = [int(number) for number in group]
    fit = (k for k in range(1, 17) if all(n % k == 0 and -8 <= n // k <= 7 for n in numbers))
    return next(fit, None)


def groups(w8: NDArray[np.int8], axis: int) -> list[NDArray[np.int8]]:
    rows = np.moveaxis(w8, axis, 0)
    starts = product(range(rows.shape[0]), range(0, rows.shape[1], CODEBOOK_BLOCK))
    return [rows[out, first : first + CODEBOOK_BLOCK].reshape(-1) for out, first in starts]


@settings(max_examples=tries(40), deadline=None)
@given(
    outputs=st.integers(1, 6), inputs=st.integers(1, 70), kernel=st.sampled_from([(), (3,), (3, 2)]),
    axis=st.integers(0, 1), seed=st.integers(0, 99), spread=st.sampled_from([0.0, 1e-30, 1.0, 1e30]),
    bits=st.sampled_from([4, 2, 1]),
)  # fmt: skip
def test_every_group_is_few_bits_times_a_factor(
    outputs: int, inputs: int, kernel: tuple[int, ...], axis: int, seed: int, spread: float, bits: int
) -> None:
    rng = np.random.default_rng(seed)
    w = (rng.standard_t(3, (outputs, inputs, *kernel)) * spread).astype(np.float32)
    w = np.moveaxis(w, 0, axis) if not kernel else w
    found = quantise_weights(w, axis if not kernel else 0, bits=bits)
    assert found.w8.shape == w.shape and found.w8.dtype == np.int8 and np.all(found.scale > 0)
    parts = groups(found.w8, axis if not kernel else 0)
    if bits == 4:
        assert all(factor_of(group) is not None for group in parts)
    levels = {2: (-3, -1, 1, 3), 1: (-1, 1)}.get(bits, range(-8, 8))
    sets = [set(group.tolist()) for group in parts]
    assert all(any(each <= {q * k for q in levels} for k in range(1, 17)) or each == {0} for each in sets)
    assert len(sets) == sets.count({0}) if spread == 0 else bits == 4 or {0} not in sets


def test_the_check_sees_a_group_that_has_no_factor() -> None:
    assert factor_of([16, 3]) is None and factor_of([-128, 112]) == 16 and factor_of([9]) == 3 and factor_of([0]) == 1


def test_weights_that_are_such_stay_what_they_are() -> None:
    rng = np.random.default_rng(5)
    w8 = (rng.integers(-8, 8, (4, 3, CODEBOOK_BLOCK)) * rng.integers(1, 17, (4, 3, 1))).reshape(4, -1)
    w8[:, :2] = -128, 112  # which fixes the step
    w8[:, 2:CODEBOOK_BLOCK] = w8[:, 2:CODEBOOK_BLOCK] // 16 * 16
    found = quantise_weights((w8 * 0.25).astype(np.float32), 0)
    np.testing.assert_allclose(found.w8 * found.scale[:, None], w8 * 0.25, rtol=1e-6)


def test_groups_are_nearer_than_a_scale_for_each_channel() -> None:
    """Factors for groups give a smaller error than scales for channels, and than the 18.4 dB of clipping."""
    w = np.random.default_rng(0).normal(size=(64, 256)).astype(np.float32) * np.repeat(
        [0.5, 1, 2, 1] * 2, CODEBOOK_BLOCK
    )
    quantised = quantise_weights(w, 0)
    step = np.abs(w).max(1, keepdims=True) / 7

    def sqnr(approximation: NDArray[Any]) -> float:
        return float(10 * np.log10((w**2).sum() / ((approximation - w) ** 2).sum()))

    assert sqnr(quantised.w8 * quantised.scale[:, None]) > max(18.4, sqnr(np.rint(w / step) * step) + 2)


# Compensation ---------------------------------------------------------------------------------------------------------


def mixed(rng: np.random.Generator, count: int, inputs: int) -> NDArray[np.float64]:
    """Draw samples of correlated inputs, most of them positive, as after a Relu."""
    samples: NDArray[np.float64] = np.abs(rng.normal(size=(count, 6)) @ rng.normal(size=(6, inputs)))
    return samples + 0.3 * rng.normal(size=(count, inputs))


@pytest.mark.parametrize("axis", [0, 1])
def test_errors_of_weights_make_up_for_each_other(axis: int) -> None:
    """Errors of weights cancel also on other samples, and every group still has a factor."""
    rng = np.random.default_rng(7)
    w = rng.normal(size=(24, 70)).astype(np.float32)
    x = mixed(rng, 900, 70)
    seen, held = x[:600], x[600:]
    given = w if axis == 0 else np.ascontiguousarray(w.T)
    errors = []
    for known in (None, seen.T @ seen):
        found = quantise_weights(given, axis, known)
        assert all(factor_of(group) is not None for group in groups(found.w8, axis))
        near = found.w8 * (found.scale[:, None] if axis == 0 else found.scale)
        errors.append(float((((near if axis == 0 else near.T) - w) @ held.T).std()))
    assert errors[1] < 0.6 * errors[0]


def test_inputs_that_are_always_nothing_do_no_harm() -> None:
    rng = np.random.default_rng(3)
    x, w = mixed(rng, 200, 40), rng.normal(size=(5, 40)).astype(np.float32)
    x[:, ::3] = 0
    for known in (x.T @ x, np.zeros((40, 40))):
        found = quantise_weights(w, 0, known)
        assert np.abs(found.w8 * found.scale[:, None] - w).max() < np.abs(w).max()


@settings(max_examples=tries(25), deadline=None)
@given(
    kernel=st.lists(st.integers(1, 3), min_size=1, max_size=2), stride=st.integers(1, 2), dilation=st.integers(1, 2),
    before=st.integers(0, 2), after=st.integers(0, 2), seed=st.integers(0, 99),
)  # fmt: skip
def test_moments_are_those_of_what_a_convolution_sums(
    kernel: list[int], stride: int, dilation: int, before: int, after: int, seed: int
) -> None:
    """Mean squares of outputs computed from moments equal onnxruntime's."""
    rng, axes = np.random.default_rng(seed), len(kernel)
    w, size = rng.normal(size=(4, 3, *kernel)).astype(np.float32), [6] * axes
    attrs = {"pads": [before] * axes + [after] * axes, "strides": [stride] * axes, "dilations": [dilation] * axes}
    model = single("Conv", w, [2, 3, *size], **attrs)
    x = rng.normal(size=(2, 3, *size)).astype(np.float32)
    (y,) = oracle.run_session(oracle.open_session(model), {"x": x}).values()
    rows = w.reshape(4, -1).astype(np.float64)
    found = measure_second_moments(model, [{"x": x}])["w"]
    squares = (y.astype(np.float64) ** 2).sum((0, *range(2, y.ndim)))
    np.testing.assert_allclose(np.einsum("oi,ij,oj->o", rows, found, rows), squares, rtol=1e-4)


def test_moments_are_those_of_what_a_product_sums() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(9, 5)).astype(np.float32)
    for model in (single("MatMul", np.ones((5, 2), np.float32), ["n", 5]),
                  single("Gemm", np.ones((2, 5), np.float32), ["n", 5], transB=1)):  # fmt: skip
        np.testing.assert_allclose(measure_second_moments(model, [{"x": x[:4]}, {"x": x[4:]}])["w"], x.T @ x, rtol=1e-5)
    grouped = single("Conv", np.ones((4, 1, 2, 2), np.float32), [1, 4, 3, 3], group=4)
    assert measure_second_moments(grouped, [{"x": np.ones((1, 4, 3, 3), np.float32)}]) == {}


def single(op: str, w: NDArray[np.float32], dims: list[int | str], **attrs: Any) -> onnx.ModelProto:
    """Return a model of one operator of x and w."""
    graph = helper.make_graph(
        [helper.make_node(op, ["x", "w"], ["y"], **attrs)], "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, dims)], [onnx.ValueInfoProto(name="y")],
        [numpy_helper.from_array(w, "w")],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


# Models ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activations", ["int8", "uint8"])
def test_a_model_of_four_bits_is_an_exact_model_of_int8(tmp_path: Path, activations: str) -> None:
    onnx.save(network(), tmp_path / "float.onnx")
    report = quantize(
        tmp_path / "float.onnx", {"image": images(24)}, tmp_path / "w4.onnx", weights=4, activations=activations,
        config="tiny",
    )  # fmt: skip
    made = onnx.load(tmp_path / "w4.onnx")
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in made.graph.initializer}
    weights = {name: array for name, array in constants.items() if array.dtype == np.int8 and array.ndim > 1}
    assert len(weights) == report["four_bits"]["matrices"] == 3
    assert all(factor_of(group) is not None for array in weights.values() for group in groups(array, 0))
    errors = report["outputs"][0]["sqnr_db"], report["outputs_with_int8_weights"][0]["sqnr_db"]
    assert 10 < errors[0] < errors[1]
    assert_exact(tmp_path / "w4.onnx", images(3))


def test_biases_follow_their_weights(tmp_path: Path) -> None:
    """Biases are in steps of the products and keep their real values."""
    onnx.save(network(), tmp_path / "float.onnx")
    quantize(tmp_path / "float.onnx", {"image": images(8)}, tmp_path / "w4.onnx", weights=4, config="tiny")
    graph = onnx.load(tmp_path / "w4.onnx").graph
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    real = {tensor.name: numpy_helper.to_array(tensor) for tensor in network().graph.initializer}
    makers = {node.output[0]: node for node in graph.node}
    count = 0
    for node in graph.node:
        if node.op_type not in ("Conv", "Gemm") or len(node.input) < 3:
            continue
        x, w, bias = (makers[name] for name in node.input)
        integers, (step, scale) = constants[bias.input[0]], (constants[maker.input[1]] for maker in (bias, w))
        np.testing.assert_array_equal(step, constants[x.input[1]] * scale)
        assert np.all(np.abs(integers * step - real[bias.input[0].removesuffix("_quantized")]) <= step)
        count += 1
    assert count == 2


def test_products_without_names_and_with_weights_of_either_order(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "a"], ["h"]), helper.make_node("Relu", ["h"], ["r"]),
         helper.make_node("Gemm", ["r", "b", "c"], ["y"], transB=1)], "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 40])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 5])],
        [numpy_helper.from_array(rng.normal(size=shape).astype(np.float32), name)
         for name, shape in {"a": (40, 33), "b": (5, 33), "c": (5,)}.items()],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), tmp_path / "f.onnx")
    samples = rng.normal(size=(24, 40)).astype(np.float32)
    report = quantize(tmp_path / "f.onnx", {"x": samples}, tmp_path / "w4.onnx", weights=4, config="tiny")
    assert report["four_bits"]["matrices"] == 2 and report["outputs"][0]["sqnr_db"] > 12


def test_depthwise_weights_keep_their_bits(tmp_path: Path) -> None:
    text = """<ir_version: 9, opset_import: ["" : 17]> g (float[1, 8, 6, 6] x) => (float[1, 8, 4, 4] y)
        { y = Conv<group = 8>(x, w) }"""
    model = onnx.parser.parse_model(text)
    w = np.random.default_rng(0).normal(size=(8, 1, 3, 3)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(w, "w"))
    onnx.save(model, tmp_path / "f.onnx")
    samples = np.random.default_rng(1).normal(size=(8, 8, 6, 6)).astype(np.float32)
    report = quantize(tmp_path / "f.onnx", {"x": samples}, tmp_path / "w4.onnx", weights=4, config="tiny")
    assert report["four_bits"] == {"matrices": 0, "sqnr_db": None}
    assert report["outputs"] == report["outputs_with_int8_weights"]


def test_the_command_says_what_it_costs(tmp_path: Path) -> None:
    onnx.save(network(), tmp_path / "float.onnx")
    np.savez(tmp_path / "samples.npz", image=images(24))
    command = ["quantize", str(tmp_path / "float.onnx"), "--calibration", str(tmp_path / "samples.npz"),
               "-o", str(tmp_path / "w4.onnx"), "--config", "tiny"]  # fmt: skip
    result = CliRunner().invoke(app, [*command, "--weights", "4", "--report", str(tmp_path / "report.json")])
    assert result.exit_code == 0, result.output
    assert "3 matrices of weights have 4 bits; together" in result.output
    assert "The same with weights of 8 bits" in result.output
    assert json.loads((tmp_path / "report.json").read_text())["weights"] == 4
    for more, words in (
        (["--weights", "3"], "'3' is not one of"),
        (["--weights", "4", "--per-tensor"], "--per-tensor"),
        (["--symmetric", "--activations", "uint8"], "--symmetric"),
    ):
        refused = CliRunner().invoke(app, [*command, *more])
        assert refused.exit_code == USAGE and words in refused.output


def test_other_numbers_of_bits_are_refused(tmp_path: Path) -> None:
    for bits, per_channel, words in ((3, True, "8 or 4 or 2 or 1 bits, not 3"), (4, False, "leave --per-tensor out")):
        with pytest.raises(ValueError, match=words):
            celosia.quantize(
                tmp_path / "f.onnx", {"x": images()}, tmp_path / "w.onnx", weights=bits, per_channel=per_channel
            )


def test_the_comparison_sees_a_bias_in_old_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(four_bits._QdqModel, "rescale_bias", lambda *_: None)
    with pytest.raises(AssertionError):
        test_biases_follow_their_weights(tmp_path)


@pytest.mark.parametrize("bits", some([4, 2, 1], [4, 1]))
def test_the_hardware_packs_what_quantize_makes(tmp_path: Path, bits: int) -> None:
    """A Config that expands weights packs the weights of each product that `quantize` has written."""
    encoder = Encoder(16, 2, 16, 64)
    path, made = tmp_path / "encoder.onnx", tmp_path / "few.onnx"
    onnx.save(encoder.model(), path)
    quantize(path, {"x": np.concatenate([sample(encoder.shape, seed) for seed in range(4)])}, made, weights=bits)
    program = celosia.compile(made, config=replace(PRESETS["pynq"], weight_bits=bits))
    products = [info for launch in program.launches for info in launch.layers if info.what.startswith("conv")]
    assert sum(info.what.count("conv") for info in products) == 6  # two of them are one layer
    assert all("packed weights" in info.what for info in products)
    x = sample(encoder.shape, 9)
    (expected,) = oracle.open_session(made).run(None, {"x": x})
    np.testing.assert_array_equal(celosia.Runtime(program, "functional").run({"x": x}).outputs["y"], expected)
