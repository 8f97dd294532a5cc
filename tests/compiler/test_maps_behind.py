"""Element-wise layers run in the tiles of the convolution before them: intermediate values stay on chip."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from benchmarks.encoders import Encoder, quantised, sample
from hypothesis import given
from hypothesis import strategies as st
from thorough import some

import celosia
from celosia.compiler.launch.blocks import rewrite_to_follow
from celosia.compiler.layer import Activation, Epilogue, Gemm, Layer, Residual, TilingError, Window
from celosia.compiler.tensorize.plan import FixedSchedule, Planner
from celosia.compiler.tensorize.space import candidates
from celosia.compiler.vthread.verify import VerifyError
from celosia.hw.spec.config import PRESETS
from celosia.hw.spec.isa import Buffer, Destination, Opcode

from ..oracle import opened
from .layers import Builder, Network, builders, meaning, requantise, residual, table
from .test_provenance import Program

FORWARD = ["tiny", "pynq", "small-buffers", "4x4-tight", "4x4-tokens2", "batch2", "16x4", "batch2-8x4"]


def block(b: Builder, kinds: list[str]) -> Layer:
    """Draw a block of a convolution and element-wise layers.

    The convolution adds nothing, an image or a row. Each layer after it applies a table to the result before it, adds
    to it, or adds it to a table's result of another operand. There are no more tables than the Config has.
    """
    window = b.draw(st.sampled_from([Window((1, 1)), Window((3, 2), pads=(1, 0, 1, 1))]))
    height, width = b.draw(st.sampled_from([1, 3, 6])), b.draw(st.integers(1, 9))
    x = b.host_input(b.draw(st.integers(1, 3)), b.draw(st.integers(1, 12)), height, width)
    b.conv(x, window, b.draw(st.integers(1, 20)))
    conv = b.net.launches[-1].pop()
    assert conv.gemm is not None
    if conv.epilogue.residual is not None and b.draw(st.booleans()):
        del b.net.host_inputs[conv.epilogue.residual.operand]
        row = b.host_input(conv.y.images, conv.y.channels, 1, 1)
        conv = replace(conv, epilogue=replace(conv.epilogue, residual=residual(b.rng, row)))
    layers: list[Layer] = [conv]
    for number, kind in enumerate(kinds):
        before, tables = layers[-1].y, sum(layer.epilogue.table is not None for layer in layers)
        kind = kind if tables < b.cfg.lut_count else "sum"
        x, epilogue = before, Epilogue((-100, 90), table(b.rng))
        if kind != "table":
            x = b.host_input(*before.dims)
            epilogue = Epilogue(table=table(b.rng) if kind == "both" else None, residual=residual(b.rng, before))
        layers.append(Layer(f"m{number}", x, Activation.alone(b.cfg, f"y{number}", *before.dims), epilogue=epilogue))
    b.net.launches[-1].append(fused := Layer.block(tuple(layers)))
    return fused


kinds = st.lists(st.sampled_from(["table", "sum", "both"]), min_size=1, max_size=3)


@given(builders(FORWARD, forward=True), kinds)
def test_they_are_what_their_layers_mean(b: Builder, of: list[str]) -> None:
    block(b, of)
    b.net.check()


@given(builders(["4x4-tight", "16x4", "batch2"], forward=True), kinds, st.integers(0, 1 << 16))
def test_in_any_tiles_and_order(b: Builder, of: list[str], number: int) -> None:
    planner = Planner(b.cfg)
    (computation,) = planner.computations(block(b, of))
    points = list(candidates(b.cfg, computation.workload))
    planner.policy = replace(planner.policy, given=FixedSchedule([points[number % len(points)]]))
    b.net.check(checking=True, planner=planner)


@given(builders(["tiny"]), st.booleans())
def test_a_sum_is_turned_so_that_what_is_handed_on_is_b(b: Builder, as_x: bool) -> None:
    ours, other = b.host_input(2, 5, 3, 4), b.host_input(2, 5, 3, 4)
    x, operand = (ours, other) if as_x else (other, ours)
    epilogue = Epilogue(residual=residual(b.rng, operand))
    layer = Layer("sum", x, Activation.alone(b.cfg, "y", *x.dims), epilogue=epilogue)
    result = rewrite_to_follow(layer, ours)
    assert result is not None and result.epilogue.residual is not None and result.epilogue.residual.operand == ours
    np.testing.assert_array_equal(meaning(result, b.net.host_inputs), meaning(layer, b.net.host_inputs))


@pytest.mark.parametrize("epilogue", [{"table": np.zeros(256, np.int8)}, {"clip": (-128, 5)}])
def test_what_cannot_be_turned(epilogue: dict[str, object]) -> None:
    cfg = PRESETS["tiny"]
    x, other, y = (Activation.alone(cfg, name, 1, 4, 2, 2) for name in ("x", "other", "y"))
    add = Residual(other, 1, 2, 3, 4)
    assert rewrite_to_follow(Layer("sum", x, y, epilogue=Epilogue(residual=add, **epilogue)), x) is None  # type: ignore[arg-type]
    row = Activation.alone(cfg, "row", 1, 4, 1, 1)
    assert (
        rewrite_to_follow(Layer("sum", x, y, epilogue=Epilogue(residual=replace(add, operand=row))), row) is None
    )  # what makes a row
    assert rewrite_to_follow(Layer("sum", x, y, epilogue=Epilogue(residual=replace(add, operand=row))), x) is None


def test_more_tables_than_there_is_room_for() -> None:
    cfg, rng = replace(PRESETS["tiny"], lut_count=1), np.random.default_rng(1)
    x, *ys = (Activation.alone(cfg, name, 1, 8, 1, 9) for name in ("x", "made", "y", "z"))
    weights = rng.integers(-128, 128, (8, 8, 1, 1)).astype(np.int8)
    conv = Layer("conv", x, ys[0], gemm=Gemm(weights), requantise=requantise(rng, 8, 9999))
    maps = [
        Layer("map", before, after, epilogue=Epilogue(table=table(rng))) for before, after in itertools.pairwise(ys)
    ]
    with pytest.raises(TilingError, match=r"tables.*1 of lut_count"):
        Planner(cfg).computations(Layer.block((conv, *maps)))


# Planted faults ---------------------------------------------------------------------------------------------------


def _program() -> Program:
    b = Builder(Network(PRESETS["tiny"]), None, np.random.default_rng(1))  # type: ignore[arg-type]
    x, row, other = b.host_input(1, 8, 1, 9), b.host_input(1, 8, 1, 1), b.host_input(1, 8, 1, 9)
    made, summed, y = (Activation.alone(b.cfg, name, 1, 8, 1, 9) for name in ("made", "summed", "y"))
    weights = b.rng.integers(-128, 128, (8, 8, 1, 1)).astype(np.int8)
    scales = requantise(b.rng, 8, 74 * 74 * 3)
    epilogue = Epilogue(residual=residual(b.rng, row))
    conv = Layer("conv", x, made, gemm=Gemm(weights), requantise=scales, epilogue=epilogue)
    first = Layer("sum", other, summed, epilogue=Epilogue(residual=residual(b.rng, made)))
    b.net.launches[-1].append(
        Layer.block((conv, first, Layer("map", summed, y, epilogue=Epilogue(table=table(b.rng)))))
    )
    p = Program(b.net, b.net.build())
    p.verify()
    return p


def _break(p: Program, which: str) -> None:
    handed = p.find(Opcode.VECTOR, destination=Destination.VIN)
    (last, *_), (first, second, *_) = p.find(Opcode.VECTOR, lookup=1), handed
    match which:
        case "a pass less":
            p.drop(first)
        case "another scale":
            second.fields["scale_b"] += 1
        case "scales in each other's place":
            f = second.fields
            f["scale_v"], f["scale_b"] = f["scale_b"], f["scale_v"]
        case "b is what the row was":
            second.fields["b_base"] = first.fields["b_base"]
        case "what the first pass has made is looked up":
            last.fields["a_base"] = first.fields["dst_base"]
        case "no table":
            last.fields["lookup"] = 0
        case "the operand of another pixel":
            next(iter(p.loads(Buffer.ACC))).fields["dram_addr"] += p.net.cfg.piece_bytes


@pytest.mark.parametrize(
    "which",
    [
        "a pass less", "another scale", "scales in each other's place", "b is what the row was", "no table",
        "what the first pass has made is looked up", "the operand of another pixel",
    ],
)  # fmt: skip
def test_wrong_programs_are_found(which: str) -> None:
    p = _program()
    _break(p, which)
    with pytest.raises(VerifyError):
        p.verify()


# Networks ---------------------------------------------------------------------------------------------------------


@pytest.mark.rtl
@pytest.mark.parametrize("name", some(["tiny", "pynq"], ["tiny"]))
def test_an_encoder_on_the_rtl(name: str, tmp_path: Path) -> None:
    """On the RTL, the products of an encoder keep biases, residuals and activation functions on chip."""
    encoder = Encoder(16, 2, 16, 48)
    path = quantised(encoder.model(), encoder.shape, tmp_path, signed=True)
    program = celosia.compile(path, config=name)
    names = [info.name for launch in program.launches for info in launch.layers]
    assert sum(" .. " in name for name in names) == 3, names
    assert not any(name.startswith(("Add", "Relu")) for name in names)
    x = sample(encoder.shape, 3)
    (expected,) = opened(path, int8=True).run(None, {"x": x})
    result = celosia.Runtime(program, "rtl").run({"x": x})
    np.testing.assert_array_equal(result.outputs["y"], expected)
    timed = celosia.Runtime(program, "timed").run({"x": x}).report["cycles"]
    assert timed == pytest.approx(result.report["cycles"], rel=0.01)
