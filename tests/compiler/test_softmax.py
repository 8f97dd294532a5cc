"""Softmax of rows on the accelerator gives onnxruntime's bytes; tests plant wrong programs."""

from __future__ import annotations

from collections import Counter
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
from celosia.compiler.layer import Activation, Layer, Softmax, TilingError, Window
from celosia.compiler.numerics import qlinear_softmax, softmax_powers
from celosia.compiler.selfcheck import operator_results as selfcheck_operators
from celosia.compiler.selfcheck.check_launches import SelfCheckError
from celosia.compiler.tensorize.intrinsics import declared
from celosia.compiler.tensorize.plan import Planner
from celosia.compiler.tune.layer_trial import reference_output
from celosia.compiler.vthread.verify import VerifyError
from celosia.hw.spec.config import PRESETS, Config, ConfigError
from celosia.hw.spec.isa import Buffer, Opcode

from ..configs import CONFIGS as SMALL_CONFIGS
from ..oracle import opened
from .layers import CONFIGS, Builder, builders
from .test_provenance import ROW_FAULTS, Program

PYNQ, TINY = replace(PRESETS["pynq"], softmax=4), replace(PRESETS["tiny"], softmax=2)
ENCODERS = {
    "of a whole block": (Encoder(16, 2, 16, 48), PYNQ, True, 2),
    "unsigned, two layers": (Encoder(32, 2, 16, 32, layers=2), PYNQ, False, 4),
    "ragged, nameless": (Encoder(21, 3, 16, 40, named=False), PYNQ, False, 2),
    "one token": (Encoder(1, 2, 16, 32, turned=True), PYNQ, True, 2),
    "one head": (Encoder(17, 1, 32, 16, turned=True), PYNQ, False, 2),
    "a mask before it": (Encoder(18, 2, 16, 32, masked=True, bias=False), PYNQ, True, 2),
    "two sequences": (Encoder(12, 2, 16, 32, batch=2), PYNQ, False, 2),
    "small blocks": (Encoder(6, 3, 4, 10, turned=True), TINY, False, 2),
    "heads that are no whole groups": (Encoder(9, 2, 6, 20), TINY, False, 2),
}
QUICK = "one token", "one head", "a mask before it", "two sequences", "heads that are no whole groups"
"""Encoders of `make test`; test_attention.py takes others, with softmax on the CPU."""


@pytest.mark.parametrize("name", some(ENCODERS, QUICK))
def test_encoders_are_onnxruntimes(name: str, tmp_path: Path) -> None:
    """Encoders give onnxruntime's bytes, with attention in one launch."""
    encoder, config, signed, launches = ENCODERS[name]
    path = quantised(encoder.model(), encoder.shape, tmp_path, signed, qdq=name != "one head")
    program = celosia.compile(path, config=config)
    x = sample(encoder.shape, 7)
    (expected,) = opened(path, int8=True).run(None, {"x": x})
    np.testing.assert_array_equal(celosia.Runtime(program, "functional").run({"x": x}).outputs["y"], expected)
    assert program.macs_accelerator == program.macs_total  # rows below K and V count nothing
    places = Counter((row["op"], row["place"]) for row in program.placements)
    assert places["QLinearSoftmax", "accelerator"] == encoder.layers
    assert len(program.launches) == launches


@pytest.mark.rtl
@pytest.mark.parametrize("signed", some([True, False], [True]))
def test_attention_on_the_rtl(signed: bool, tmp_path: Path) -> None:
    encoder = Encoder(8, 2, 4, 12, masked=signed)
    path = quantised(encoder.model(), encoder.shape, tmp_path, signed)
    program = celosia.compile(path, config=SMALL_CONFIGS["4x4-softmax2"])
    x = sample(encoder.shape, 3)
    (expected,) = opened(path, int8=True).run(None, {"x": x})
    found = celosia.Runtime(program, "rtl").run({"x": x})
    np.testing.assert_array_equal(found.outputs["y"], expected)
    timed = celosia.Runtime(program, "timed").run({"x": x}).report["cycles"]
    assert timed == pytest.approx(found.report["cycles"], rel=0.02)


def softmax_layer(cfg: Config, channels: int, rows: int, sx: float = 0.1, zero_point: int = -128) -> Layer:
    x, y = (Activation.alone(cfg, name, 1, channels, 1, rows) for name in "xy")
    return Layer("rows", x, y, softmax=Softmax(softmax_powers(channels, sx, 1 / 255), zero_point))


@pytest.mark.parametrize("channels", [2, 4, 7, 8, 30])
@pytest.mark.parametrize("cfg", [TINY, CONFIGS["softmax-4x8"]], ids=["4x4", "4x8"])
def test_what_the_intrinsics_declare(cfg: Config, channels: int) -> None:
    """The loops of a layer, with the declared meaning of each intrinsic, compute the layer's meaning."""
    layer = softmax_layer(cfg, channels, 3)
    (part,) = Planner(cfg).layer(layer)
    function = part.loops.function
    x = np.random.default_rng(channels).integers(-128, 128, (1, channels, 1, 3)).astype(np.int8)
    groups = -(-channels // cfg.group)
    given_x = np.zeros((1, groups * cfg.group, 1, 3), np.int8)
    given_x[:, :channels] = x
    arrays = {"x": given_x.reshape(1, groups, cfg.group, 1, 3).transpose(0, 1, 3, 4, 2)[..., None, :]}
    whole = np.zeros(function.inputs[0].shape, np.int8)
    whole[:, :groups] = arrays["x"]
    scalars = {"zero_point": -128.0, "lo": -128.0, "hi": 127.0}
    assert layer.softmax is not None
    (y,) = interpret(function, whole, layer.softmax.powers[None], scalars=scalars)
    found = y[..., 0, :].transpose(0, 1, 4, 2, 3).reshape(1, -1, 1, 3)
    expected = reference_output(layer, {layer.x: x})
    np.testing.assert_array_equal(found[:, :channels], expected)
    assert (found[:, channels:] == -128).all()
    rows = qlinear_softmax(x[0, :, 0].T, 0.1, 1 / 255, -128)
    np.testing.assert_array_equal(expected[0, :, 0].T, rows)


def test_names_of_intrinsics() -> None:
    assert declared(TINY)["softmax_5"].name == "softmax_5"
    for name in ("softmax_0", "softmax_x", "softmax_", "exp_5", "softmax_-1"):
        assert name not in declared(TINY)
    assert "softmax_5" not in declared(PRESETS["tiny"])


@given(builders(["softmax", "softmax-4x8"]), st.integers(2, 24), st.integers(1, 12), st.integers(1, 2))
def test_layers_are_what_they_mean(b: Builder, channels: int, rows: int, images: int) -> None:
    """Layers alone and after a convolution, of images and of matrices, compute their meaning."""
    x = b.host_input(images, channels, b.draw(st.sampled_from([1, 2])), rows, b.draw(st.integers(0, 2)))
    b.softmax(b.conv(x, Window((1, 1)), channels) if b.draw(st.booleans()) else x)
    b.net.check()


# Wrong programs ---------------------------------------------------------------------------------------------------


def wrong(p: Program, which: str) -> None:
    (vector,) = (i for i in p.launches[0] if i.opcode == Opcode.VECTOR and i.fields["softmax"])
    f = vector.fields
    match which:
        case _ if which in ROW_FAULTS:
            f |= ROW_FAULTS[which](f)
        case "no softmax":
            f |= {"softmax": 0, "imm": 0}
        case "a power":
            (load,) = p.find(Opcode.LOAD, buffer=Buffer.EXP)
            p.constants[load.fields["dram_addr"] - p.image.constants_address] ^= 1
        case "powers from beside them":
            (load,) = p.find(Opcode.LOAD, buffer=Buffer.EXP)
            load.fields["dram_addr"] += 4
        case "half of the powers":
            (load,) = p.find(Opcode.LOAD, buffer=Buffer.EXP)
            load.fields["x_size"] //= 2


@pytest.mark.parametrize(
    "which", [*ROW_FAULTS, "no softmax", "a power", "powers from beside them", "half of the powers"]
)
def test_wrong_programs_are_found(which: str) -> None:
    b = Builder(*_network())
    x = b.host_input(1, 10, 1, 6)
    b.net.launches[-1].append(replace(softmax_layer(b.cfg, 10, 6), x=x))
    p = Program(b.net, b.net.build())
    p.verify()
    wrong(p, which)
    with pytest.raises(VerifyError):
        p.verify()


def _network():  # type: ignore[no-untyped-def]
    from .layers import Network

    return Network(CONFIGS["softmax"]), None, np.random.default_rng(1)


def test_a_wrong_softmax_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The self-check finds a wrong layer: it compares with the CPU's operator."""
    encoder = Encoder(16, 1, 16, 16)
    path = quantised(encoder.model(), encoder.shape, tmp_path, signed=False)
    real = numerics.softmax_powers
    monkeypatch.setattr(numerics, "softmax_powers", lambda count, sx, sy: real(count, sx * 1.1, sy))
    with pytest.raises(SelfCheckError, match="Softmax"):
        celosia.compile(path, config=PYNQ)
    assert "QLinearSoftmax" in selfcheck_operators.OPERATORS


# What does not fit --------------------------------------------------------------------------------------------------


def test_rows_that_do_not_fit() -> None:
    layer = softmax_layer(TINY, 4 * TINY.out_depth, 2)
    with pytest.raises(TilingError, match="do not fit"):
        Planner(TINY).layer(layer)
    with pytest.raises(TilingError, match="Config with softmax"):
        Planner(PRESETS["tiny"]).layer(replace(softmax_layer(PRESETS["tiny"], 8, 2)))


@pytest.mark.parametrize("fields", [{"batch": 2}, {"softmax": 3}, {"softmax": 8, "block_out": 4, "block_in": 4}])
def test_configs_that_cannot_be(fields: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"softmax.*batch = 1"):
        Config(**({"softmax": 4} | fields))  # type: ignore[arg-type]


def test_what_turns_values_is_no_product_of_the_model(tmp_path: Path) -> None:
    encoder = Encoder(16, 2, 16, 32)
    path = quantised(encoder.model(), encoder.shape, tmp_path, signed=True)
    program = celosia.compile(path, config=PYNQ, check=False)
    assert program.macs_accelerator == program.macs_total
    layers = [layer for launch in program.launches for layer in launch.layers]
    assert [layer.what for layer in layers if layer.what.startswith("matrix turned")] == ["matrix turned 16x16"] * 2


def test_the_last_softmax_is_for_products_of_values(tmp_path: Path) -> None:
    """The last softmax overlaps with products P · V, which hide all of it; V's products would hide only a part."""
    encoder = Encoder(197, 3, 64, 16)
    path = quantised(encoder.model(), encoder.shape, tmp_path, signed=True)
    program = celosia.compile(path, config=PYNQ, check=False)
    kinds = [layer.what.split(" ")[0] for layer in program.launches[0].layers]
    order = ["softmax", "softmax", "conv", *["matrix"] * 3, "product", "softmax", "product", "product", "conv"]
    assert kinds[kinds.index("softmax") :] == order
