"""The accelerator normalises rows if the Config has norm; tests compare the results and plant errors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from benchmarks.encoders import Encoder, quantised, sample
from hypothesis import given
from hypothesis import strategies as st
from thorough import some

import celosia
from celosia.compiler import numerics
from celosia.compiler.expr.interpret import interpret
from celosia.compiler.layer import Activation, Epilogue, Layer, Norm, Requantise, TilingError, Window
from celosia.compiler.selfcheck.check_launches import SelfCheckError
from celosia.compiler.tensorize import pack
from celosia.compiler.tensorize.intrinsics import declared
from celosia.compiler.tensorize.lowering import lower_layer
from celosia.compiler.tensorize.plan import Planner
from celosia.compiler.tune.layer_trial import reference_output
from celosia.compiler.vthread.verify import VerifyError
from celosia.driver.accuracy.compare import compare
from celosia.hw.spec.config import PRESETS, Config
from celosia.hw.spec.isa import Buffer, Opcode

from .layers import CONFIGS, Builder, Network, builders
from .test_provenance import ROW_FAULTS, Program
from .test_rounding import drawn, norm_model, real

PYNQ, TINY = replace(PRESETS["pynq"], softmax=4, norm=8), replace(PRESETS["tiny"], norm=1)
MODELS = {
    "rows": ("LayerNormalization", (1, 9, 40), "uint8", 117, PYNQ),
    "of the mean square": ("RMSNormalization", (7, 33), "int8", -7, PYNQ),
    "two sequences": ("LayerNormalization", (2, 8, 20), "int8", 0, PYNQ),
    "small blocks": ("SimplifiedLayerNormalization", (1, 12, 10), "uint8", 128, TINY),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_accelerator_computes_what_the_cpu_does(name: str) -> None:
    op, shape, dtype, zero, cfg = MODELS[name]
    model, x = norm_model(op, shape, dtype, zero), {"x": drawn(shape, dtype)}
    program = celosia.compile(model, config=cfg, rounding="correct")
    assert [(row["op"], row["place"]) for row in program.placements] == [("QLinearNorm", "accelerator")]
    other = celosia.compile(model, config=replace(cfg, norm=0), rounding="correct", check=False)
    assert "takes a Config with norm" in other.placements[0]["reason"] and not other.launches
    made = [celosia.Runtime(each).run(x).outputs["y"] for each in (program, other)]
    np.testing.assert_array_equal(*made)


@pytest.mark.parametrize("signed", some([True, False], [True]))
def test_an_encoder_is_one_launch(signed: bool, tmp_path: Path) -> None:
    encoder = Encoder(13, 2, 16, 32, layers=2)
    path = quantised(encoder.model(), encoder.shape, tmp_path, signed)
    program = celosia.compile(path, config=PYNQ, rounding="correct")
    assert len(program.launches) == 1 and program.macs_accelerator == program.macs_total
    x = {"x": sample(encoder.shape, 7)}
    assert compare(path, x, config=PYNQ, rounding="correct", check=False)["different"] == 0


def test_softmaxes_of_each_layer_have_products_beside_them(tmp_path: Path) -> None:
    """The product that makes V follows a softmax in both attentions of a launch, to overlap with it."""
    encoder = Encoder(16, 4, 16, 16, layers=2)
    path = quantised(encoder.model(), encoder.shape, tmp_path, True)
    program = celosia.compile(path, config=PYNQ, rounding="correct", check=False, without="blocks")
    (launch,) = program.launches
    kinds = [layer.what.split(" ")[0] for layer in launch.layers if layer.what.startswith(("softmax", "conv"))]
    assert kinds[:10] == kinds[10:]
    assert kinds[:3] == ["conv", "conv", "softmax"]  # the two convolutions are the projections to Q and K


@pytest.mark.rtl
@pytest.mark.thorough
def test_an_encoder_on_the_rtl(tmp_path: Path) -> None:
    encoder, cfg = Encoder(8, 2, 4, 12), replace(TINY, softmax=1)
    path = quantised(encoder.model(), encoder.shape, tmp_path, signed=True)
    program = celosia.compile(path, config=cfg, rounding="correct")
    x = {"x": sample(encoder.shape, 3)}
    result, expected, timed = (celosia.Runtime(program, device).run(x) for device in ("rtl", "functional", "timed"))
    np.testing.assert_array_equal(result.outputs["y"], expected.outputs["y"])
    assert len(program.launches) == 1
    assert timed.report["cycles"] == pytest.approx(result.report["cycles"], rel=0.02)


def norm_layer(cfg: Config, channels: int, rows: int, centre: bool = True) -> Layer:
    x, y = (Activation.alone(cfg, name, 1, channels, 1, rows) for name in "xy")
    random = np.random.default_rng(channels)
    result = numerics.norm_constants(
        np.exp(random.normal(size=channels) / 3).astype(np.float32), random.normal(size=channels).astype(np.float32),
        0.1, 0.03, 1e-5,
    )  # fmt: skip
    requantise = Requantise(result.bias, *numerics.scale_to_multiplier(result.scale), -3)
    norm = Norm(0 if centre else 5, centre, result.epsilon)
    return Layer("rows", x, y, norm=norm, requantise=requantise, epilogue=Epilogue((-100, 127)))


@pytest.mark.parametrize("channels", [2, 4, 7, 30])
@pytest.mark.parametrize("cfg", [TINY, CONFIGS["norm-4x8"]], ids=["4x4", "4x8"])
def test_what_the_intrinsics_declare(cfg: Config, channels: int) -> None:
    """The loops of a layer, with the declared meaning of each intrinsic, compute the layer's meaning."""
    layer = norm_layer(cfg, channels, 3, centre=channels != 7)
    (part,) = Planner(cfg).layer(layer)
    (computation,), function = lower_layer(cfg, layer), part.loops.function
    x = np.random.default_rng(channels).integers(-128, 128, (1, channels, 1, 3)).astype(np.int8)
    groups = -(-channels // cfg.group)
    padded = np.zeros((1, function.inputs[0].shape[1] * cfg.group, 1, 3), np.int8)
    padded[:, :channels] = x
    tiles = padded.reshape(1, -1, cfg.group, 1, 3).transpose(0, 1, 3, 4, 2)[..., None, :]
    assert layer.requantise is not None
    par = pack.arrange_parameters(cfg, layer.requantise).view(np.uint64)
    (y,) = interpret(function, tiles, par, scalars=dict(computation.scalars))
    result = y[..., 0, :].transpose(0, 1, 4, 2, 3).reshape(1, groups * cfg.group, 1, 3)
    np.testing.assert_array_equal(result[:, :channels], reference_output(layer, {layer.x: x}))


def test_names_of_intrinsics() -> None:
    assert declared(TINY)["layer_norm_5"].name == "layer_norm_5"
    for name in ("layer_norm_0", "rms_norm_x", "softmax_5", "norm_5"):
        assert name not in declared(TINY)
    assert "rms_norm_5" not in declared(PRESETS["tiny"])


@given(builders(["norm", "norm-4x8"]), st.integers(2, 24), st.integers(1, 12), st.integers(1, 2))
def test_layers_are_what_they_mean(b: Builder, channels: int, rows: int, images: int) -> None:
    """Layers alone and after a convolution, of images and of matrices, compute their meaning."""
    x = b.host_input(images, channels, b.draw(st.sampled_from([1, 2])), rows, b.draw(st.integers(0, 2)))
    b.norm(b.conv(x, Window((1, 1)), channels) if b.draw(st.booleans()) else x)
    b.net.check()


# Wrong programs ---------------------------------------------------------------------------------------------------


def wrong(p: Program, which: str) -> None:
    (vector,) = (i for i in p.launches[0] if i.opcode == Opcode.VECTOR and i.fields["norm"])
    f = vector.fields
    match which:
        case _ if which in ROW_FAULTS:
            f |= ROW_FAULTS[which](f)
        case "the mean":
            f["centre"] = 0
        case "another epsilon":
            f["scale_c"] += 1
        case "another offset":
            f["a_offset"] += 1
        case "parameters of one entry":
            f["par_n"] = 0
        case "no norm":
            f |= {"norm": 0, "centre": 0, "imm": 0, "scale_c": 0}
        case "a parameter":
            (load,) = p.find(Opcode.LOAD, buffer=Buffer.PAR)
            p.constants[load.fields["dram_addr"] - p.image.constants_address] ^= 1


@pytest.mark.parametrize(
    "which",
    [*ROW_FAULTS, "the mean", "another epsilon", "another offset", "parameters of one entry", "no norm", "a parameter"],
)
def test_wrong_programs_are_found(which: str) -> None:
    b = Builder(Network(CONFIGS["norm"]), None, np.random.default_rng(1))  # type: ignore[arg-type]
    x = b.host_input(1, 10, 1, 6)
    b.net.launches[-1].append(replace(norm_layer(b.cfg, 10, 6), x=x))
    p = Program(b.net, b.net.build())
    p.verify()
    wrong(p, which)
    with pytest.raises(VerifyError):
        p.verify()


def test_a_wrong_norm_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The self-check finds a wrong layer: it compares with the CPU's operator."""
    original = numerics.scale_to_multiplier
    monkeypatch.setattr(numerics, "scale_to_multiplier", lambda scale: original(scale * np.float32(1.05)))
    with pytest.raises(SelfCheckError, match=r"'norm'.*other than its operators"):
        celosia.compile(norm_model("LayerNormalization", (1, 9, 40)), config=PYNQ, rounding="correct")


def test_an_epsilon_that_no_instruction_holds() -> None:
    """A norm whose epsilon does not fit its field runs on the CPU."""
    model, x = norm_model("LayerNormalization", (9, 40), epsilon=300.0), drawn((9, 40), "int8")
    program = celosia.compile(model, config=PYNQ, rounding="correct")
    (row,) = program.placements
    assert (row["op"], row["place"]) == ("QLinearNorm", "cpu") and "more than 47 bits" in row["reason"]
    steps = real(model, x, 300)
    assert (np.abs(celosia.Runtime(program).run({"x": x}).outputs["y"] - steps) <= 0.5 + 2.0**-14).all()


def test_rows_that_do_not_fit() -> None:
    with pytest.raises(TilingError, match="do not fit"):
        Planner(TINY).layer(norm_layer(TINY, 4 * TINY.out_depth, 2))
    with pytest.raises(TilingError, match="a row of one element"):
        Planner(TINY).layer(norm_layer(TINY, 1, 2))
    with pytest.raises(TilingError, match=r"rows of 8.*47 bits"):
        Planner(TINY).layer(replace(norm_layer(TINY, 8, 2), norm=Norm(0, True, 1 << 47)))
    with pytest.raises(TilingError, match="Config with norm"):
        Planner(PRESETS["tiny"]).layer(norm_layer(PRESETS["tiny"], 8, 2))
