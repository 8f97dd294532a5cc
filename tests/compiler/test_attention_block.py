"""Attention as a block keeps scores and probabilities on chip."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from benchmarks.encoders import Encoder, quantised, sample
from hypothesis import assume, given
from hypothesis import strategies as st

import celosia
from celosia.compiler.launch import blocks
from celosia.compiler.layer import Activation, ActivationGemm, Epilogue, Layer, Requantise, Softmax, TilingError
from celosia.compiler.numerics import scale_to_multiplier, softmax_powers
from celosia.compiler.tensorize.plan import FixedSchedule, Planner
from celosia.compiler.tensorize.space import candidates, why_not
from celosia.compiler.tune.layer_trial import reference_output as reference
from celosia.compiler.tune.layer_trial import run_twice
from celosia.compiler.vthread.verify import VerifyError
from celosia.hw.spec.config import PRESETS, Config
from celosia.hw.spec.isa import Buffer, Destination, Opcode

from ..configs import CONFIGS as SMALL_CONFIGS
from ..oracle import opened
from .layers import CONFIGS, Builder, Network, builders, meaning, table
from .test_provenance import Program

PYNQ = replace(PRESETS["pynq"], softmax=4)


def scales(rng: np.random.Generator, channels: int, reach: float) -> Requantise:
    """Return the same scale for all channels."""
    multiplier, shift = scale_to_multiplier(np.float32([100 / reach]))
    parameters = np.full(channels, rng.integers(-50, 50), np.int32), multiplier.repeat(channels), shift.repeat(channels)
    return Requantise(*parameters, int(rng.integers(-30, 30)))


def attention(b: Builder, heads: int, queries: int, keys: int, inner: int, columns: int, around: int = 0) -> Layer:
    """Append attention as a block. keys, inner, columns: in channel groups. around: other groups around the inputs."""
    group, rng = b.cfg.group, b.rng
    x = b.host_input(1, heads * inner * group, 1, queries, around, around)
    w = b.host_input(1, heads * inner * group, 1, keys * group, around)
    v = b.host_input(1, heads * keys * group, 1, columns * group, 0, around)
    scores, shares = (Activation.alone(b.cfg, name, 1, heads * keys * group, 1, queries) for name in ("s", "p"))
    y = Activation.alone(b.cfg, "y", 1, heads * columns * group, 1, queries)
    first = Layer(
        "scores", x, scores, product=ActivationGemm(w, 0, 0),
        requantise=scales(rng, keys * group, 99 * 99 * (inner * group) ** 0.5),
        epilogue=Epilogue((-120, 110), table(rng) if rng.random() < 0.5 else None), heads=heads,
    )  # fmt: skip
    powers = softmax_powers(keys * group, 0.03, 1 / 255)
    softmax = Layer("rows", scores, shares, softmax=Softmax(powers, int(rng.integers(-128, 1))), heads=heads)
    scale = scales(rng, columns * group, 99 * 99.0)
    last = Layer("mixed", shares, y, product=ActivationGemm(v, 0, 0), requantise=scale, heads=heads)
    b.net.launches[-1].append(block := Layer.block((first, softmax, last)))
    return block


sizes = st.tuples(st.integers(1, 3), st.integers(1, 13), st.integers(1, 4), st.integers(1, 2), st.integers(1, 2))


@given(builders(["softmax", "softmax-8x4"], forward=True), sizes, st.integers(0, 1), st.integers(0, 1 << 16))
def test_it_is_what_its_layers_mean(b: Builder, of: tuple[int, ...], around: int, number: int) -> None:
    """The block computes the meaning of its layers with any tiles of heads and queries."""
    heads, queries, keys, inner, columns = of
    pieces = b.cfg.inp_pieces
    block = attention(b, heads, queries, keys * pieces, inner * pieces, columns, around)
    planner = Planner(b.cfg)
    (computation,) = planner.computations(block)
    points = list(candidates(b.cfg, computation.workload))
    assume(points)
    planner.policy = replace(planner.policy, given=FixedSchedule([points[number % len(points)]]))
    b.net.check(checking=True, planner=planner)
    np.testing.assert_array_equal(reference(block, b.net.host_inputs), meaning(block, b.net.host_inputs))


# Wrong programs ---------------------------------------------------------------------------------------------------


def wrong(p: Program, which: str) -> None:
    softmaxes = p.find(Opcode.VECTOR, softmax=1)
    (passed, *_), f = p.find(Opcode.VECTOR, destination=Destination.VIN), softmaxes[-1].fields
    gemm = next(i for i in p.launches[0] if i.opcode == Opcode.GEMM and i.fields["inp_k"] == 1)
    match which:
        case "the scores of the head before":
            f["a_base"] -= f["a_x"]
        case "probabilities in another row":
            f["dst_base"] += f["dst_x"]
        case "probabilities to out":
            f["destination"] = Destination.OUT
        case "a softmax less":
            p.drop(softmaxes[0])
        case "another scale of the scores":
            (par, *_) = p.loads(Buffer.PAR)
            p.constants[par.fields["dram_addr"] - p.image.constants_address + 4] ^= 1
        case "scores of another block of keys":
            passed.fields["a_base"] += 1
        case "the values of another head":
            gemm.fields["wgt_base"] += 1
        case "a row of probabilities twice":
            gemm.fields["inp_x"] = 0
        case "the keys of another head":
            next(iter(p.loads(Buffer.WGT))).fields["dram_addr"] += 16 * p.net.cfg.piece_bytes


@pytest.mark.parametrize(
    "which",
    [
        "the scores of the head before", "probabilities in another row", "probabilities to out", "a softmax less",
        "another scale of the scores", "scores of another block of keys", "the values of another head",
        "a row of probabilities twice", "the keys of another head",
    ],
)  # fmt: skip
def test_wrong_programs_are_found(which: str) -> None:
    b = Builder(Network(replace(CONFIGS["softmax"], forward=True)), None, np.random.default_rng(1))  # type: ignore[arg-type]
    attention(b, 2, 6, 2, 1, 1)
    p = Program(b.net, b.net.build())
    p.verify()
    wrong(p, which)
    with pytest.raises(VerifyError):
        p.verify()


# What is none -------------------------------------------------------------------------------------------------------


def _refused(cfg: Config, change: Callable[[Layer], Layer]) -> str:
    b = Builder(Network(cfg), None, np.random.default_rng(1))  # type: ignore[arg-type]
    first, softmax, last = attention(b, 2, 6, 2, 1, 1).layers
    with pytest.raises(TilingError) as refused:
        Planner(cfg).computations(Layer.block((change(first), softmax, last)))
    return str(refused.value)


def test_why_it_is_none() -> None:
    cfg = replace(CONFIGS["softmax"], forward=True)
    assert "needs softmax, forward" in _refused(CONFIGS["softmax"], lambda layer: layer)

    def another_zero_point(layer: Layer) -> Layer:
        assert layer.product is not None
        return replace(layer, product=replace(layer.product, x_offset=1))

    assert "zero points of 0" in _refused(cfg, another_zero_point)

    def another_bias(layer: Layer) -> Layer:
        r = layer.requantise
        assert r is not None
        return replace(layer, requantise=replace(r, bias=np.arange(len(r.bias), dtype=np.int32)))

    assert "all channels alike" in _refused(cfg, another_bias)


def test_the_tuner_measures_it_with_other_constants() -> None:
    b = Builder(Network(replace(CONFIGS["softmax"], forward=True)), None, np.random.default_rng(1))  # type: ignore[arg-type]
    again = run_twice(block := attention(b, 2, 6, 2, 1, 1))[1]
    (one,), (other,) = (Planner(b.cfg).computations(layer) for layer in (block, again))
    assert one.signature == other.signature and again.is_block
    for own, turned in zip(block.layers[::2], again.layers[::2]):
        assert own.requantise is not None and turned.requantise is not None
        assert (own.requantise.bias != turned.requantise.bias).all()


def test_tiles_that_do_not_fit() -> None:
    b = Builder(Network(replace(CONFIGS["softmax"], forward=True)), None, np.random.default_rng(1))  # type: ignore[arg-type]
    (computation,) = Planner(b.cfg).computations(attention(b, 2, 12, 4, 1, 1))
    (first, *_) = candidates(b.cfg, computation.workload)
    assert why_not(b.cfg, computation.workload, first) is None
    reason = why_not(b.cfg, computation.workload, replace(first, y=2, x=12))
    assert reason == "a tile takes 96 entries of vin, where 64 are to be had"
    b = Builder(Network(replace(b.cfg, inp_depth=512, acc_depth=128, out_depth=128)), None, np.random.default_rng(1))  # type: ignore[arg-type]
    (computation,) = Planner(b.cfg).computations(attention(b, 2, 20, 1, 1, 1))
    points = {(d.y, d.x) for d in candidates(b.cfg, computation.workload)}
    assert (1, 20) in points and (2, 16) in points and (2, 20) not in points
    reason = why_not(b.cfg, computation.workload, replace(first, n=1, y=2, x=20))
    assert reason == "a tile of several heads takes at most 16 queries, or a multiple of that"


def test_heads_that_are_scaled_differently(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Heads with different scales stay separate layers."""
    encoder = Encoder(16, 2, 16, 0, alone=True)
    path = quantised(encoder.model(), encoder.shape, tmp_path, signed=True)
    original, numbers = blocks._scaling, iter(range(99))
    monkeypatch.setattr(blocks, "_scaling", lambda layer: (*original(layer), next(numbers)))
    program = celosia.compile(path, config=PYNQ, check=False)
    assert not any(layer.op == "Block" for layer in program.launches[0].layers)


# Networks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("signed", "keep"), [(True, False), (False, False), (True, True)])
def test_networks_are_onnxruntimes(signed: bool, keep: bool, tmp_path: Path) -> None:
    """Networks give onnxruntime's bytes, and move scores to DRAM only for zero points or if the user keeps them."""
    encoder = Encoder(32, 3, 32, 0, alone=True)
    path = quantised(encoder.model(), encoder.shape, tmp_path, signed)
    program = celosia.compile(path, config=PYNQ, keep="all" if keep else ())
    layers = [layer for launch in program.launches for layer in launch.layers]
    x = sample(encoder.shape, 7)
    (expected,) = opened(path, int8=True).run(None, {"x": x})
    result = celosia.Runtime(program, "functional").run({"x": x})
    np.testing.assert_array_equal(result.outputs["y"], expected)
    blocks = [layer for layer in layers if layer.op == "Block"]
    assert len(blocks) == (signed and not keep)
    if blocks:
        (block,) = blocks
        tensor = encoder.tokens * encoder.channels
        assert (block.bytes_stored, block.bytes_kept) == (tensor, 2 * encoder.heads * encoder.tokens**2)
        assert block.cycles_together < block.cycles_apart
        assert block.what.split(" > ")[1:] == ["3 × softmax of 32", "3 × product of two activations 32→32"]


@pytest.mark.rtl
def test_attention_on_the_rtl(tmp_path: Path) -> None:
    encoder = Encoder(16, 2, 8, 0, alone=True)
    path = quantised(encoder.model(), encoder.shape, tmp_path, signed=True)
    program = celosia.compile(path, config=SMALL_CONFIGS["4x4-softmax2"])
    assert [layer.op for layer in program.launches[0].layers] == ["Block"]
    x = sample(encoder.shape, 3)
    (expected,) = opened(path, int8=True).run(None, {"x": x})
    result = celosia.Runtime(program, "rtl").run({"x": x})
    np.testing.assert_array_equal(result.outputs["y"], expected)
    timed = celosia.Runtime(program, "timed").run({"x": x}).report["cycles"]
    assert timed == pytest.approx(result.report["cycles"], rel=0.01)
