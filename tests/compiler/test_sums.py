"""The accelerator returns sums as bytes: tests of layers, their verification, and MatMulNBits made of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
from thorough import paired

import celosia
from celosia.compiler.graph import block_sums
from celosia.compiler.layer import Activation, Gemm, Layer
from celosia.compiler.selfcheck.check_launches import SelfCheckError
from celosia.compiler.vthread.verify.decode import VerifyError
from celosia.driver.runtime import Runtime
from celosia.hw.spec.config import PRESETS
from celosia.hw.spec.isa import Buffer, Opcode
from celosia.sim.rtl.rtlsim import RtlDevice

from ..configs import CONFIGS as SMALL_CONFIGS
from .layers import CONFIGS, Network
from .narrow_models import CHECKED, CLOSE, Sketch, apart, by_onnxruntime, outcome, packed
from .test_provenance import Program

SUMS = ["tiny", "4x4-tight", "batch2", "4x8", "batch2-8x4", "packed-32x8"]
TINY = replace(PRESETS["tiny"], sums=True)


def sums(config: str, images: int, groups: int, size: int, blocks: int, count: int, pixels: int = 1) -> Network:
    """Return a product by blocks: `groups` of `size` channels, `blocks` output blocks each, `count` bytes of each
    sum."""
    rng, cfg = np.random.default_rng(images), replace(CONFIGS[config], sums=True)
    x = Activation.alone(cfg, "x", images, groups * size, 1, pixels)
    channels = groups * blocks * cfg.block_out
    y = Activation.alone(cfg, "y", images, count * channels, 1, pixels)
    weights = rng.integers(-8, 8, (channels, size, 1, 1)).astype(np.int8)
    layer = Layer("sums", x, y, gemm=Gemm(weights, groups, sum_bytes=count))
    return Network(cfg, [[layer]], {x: rng.integers(-128, 128, (images, groups * size, 1, pixels)).astype(np.int8)})


@pytest.mark.parametrize(("config", "case"), paired(SUMS, [(1, 3, 16, 2, 2), (5, 4, 32, 1, 3), (2, 1, 64, 5, 4, 3)], 2))
def test_sums_leave_byte_by_byte(config: str, case: tuple[int, ...]) -> None:
    sums(config, *case).check(checking=True)


def _byte(p: Program) -> None:
    p.find(Opcode.VECTOR)[0].fields["imm"] = 2


def _place(p: Program) -> None:
    low, high = p.find(Opcode.STORE)[:2]
    low.fields["sram_base"], high.fields["sram_base"] = high.fields["sram_base"], low.fields["sram_base"]


def _clip(p: Program) -> None:
    p.find(Opcode.VECTOR)[1].fields["clip_hi"] = 126


def _lost(p: Program) -> None:
    p.drop(p.find(Opcode.STORE)[1])


def _weights(p: Program) -> None:
    p.loads(Buffer.WGT)[0].fields["dram_addr"] += 16


FAULTS: dict[Callable[[Program], None], str] = {
    _byte: "has binary", _place: "what is", _clip: "has clip", _lost: "nothing has stored", _weights: "sums",
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_bytes_are_found(fault: Callable[[Program], None]) -> None:
    net = sums("tiny", 1, 2, 16, 2, 2)
    p = Program(net, net.build())
    p.verify()
    fault(p)
    with pytest.raises(VerifyError, match=FAULTS[fault]):
        p.verify()


# MatMulNBits ----------------------------------------------------------------------------------------------------------


def product(rows: int = 1, inner: int = 64, columns: int = 32, **attrs: Any) -> tuple[onnx.ModelProto, dict[str, Any]]:
    """Return a MatMulNBits of 4 bits in blocks of 32, and its input."""
    s, count = Sketch(7), -(-inner // 32)
    x = s.input((rows, inner), False)
    inputs = [x, s.constant(packed(s.rng.integers(0, 16, (columns, count, 32)), 4)),
              s.constant(s.rng.uniform(0.01, 0.1, (columns, count)).astype(np.float32))]  # fmt: skip
    attributes = {"K": inner, "N": columns, "bits": 4, "block_size": 32, "accuracy_level": 4} | attrs
    return s.model(s.node("MatMulNBits", *inputs, domain="com.microsoft", **attributes)), s.feed


def test_the_report_says_how_near_they_are() -> None:
    """The report states the accuracy and the place of each part; without the hardware nothing changes."""
    model, feed = product(3, 70, 21)
    program = celosia.compile(model, TINY)
    rows = {row["op"]: row for row in program.placements}
    assert rows["BlockSums"]["place"] == "accelerator" and "2e-6 of the root mean square" in str(rows["BlockSums"])
    assert rows["QuantizeBlocks"]["place"] == rows["ScaleSums"]["place"] == "cpu"
    assert "scale of its own" in rows["ScaleSums"]["reason"]
    assert program.macs_accelerator == program.macs_total == 3 * 70 * 21
    (found,) = Runtime(program).run(feed).outputs.values()
    assert apart(found, by_onnxruntime(model, feed)) <= CLOSE
    for config, level in ((PRESETS["tiny"], 4), (TINY, 0)):
        (row,) = celosia.compile(product(accuracy_level=level)[0], config).placements
        assert (row["op"], row["place"]) == ("MatMulNBits", "cpu")


def test_an_accelerator_may_be_left_out() -> None:
    """The CPU computes the same sums if the caller asks for no accelerator."""
    model, feed = product(2, 96, 40)
    (on_cpu,) = Runtime(celosia.compile(model, TINY, place={"*": "cpu"})).run(feed).outputs.values()
    (found,) = Runtime(celosia.compile(model, TINY)).run(feed).outputs.values()
    np.testing.assert_array_equal(on_cpu, found)


def test_the_check_finds_wrong_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The self-check finds weights whose high bits were unpacked first."""
    unpacked = block_sums._unpack_bits
    monkeypatch.setattr(block_sums, "_unpack_bits", lambda *of: unpacked(*of)[..., ::-1])
    with pytest.raises(SelfCheckError, match="model's own operators"):
        celosia.compile(product()[0], TINY)


@pytest.mark.rtl
def test_sums_on_the_rtl() -> None:
    model, feed = product(5, 100, 9)
    cfg = SMALL_CONFIGS["4x4"]
    program = celosia.compile(model, cfg)
    (wanted,) = Runtime(program).run(feed).outputs.values()
    with closing(RtlDevice(cfg, quiet=True)) as device:
        (found,) = Runtime(program, device).run(feed).outputs.values()
    np.testing.assert_array_equal(found, wanted)
    assert apart(found, by_onnxruntime(model, feed)) <= CLOSE


@pytest.mark.thorough
def test_many_random_models() -> None:
    for seed in range(2000, 2250):
        found = outcome("sums", seed, check=seed % CHECKED == 0)
        assert found.accelerated and found.apart <= CLOSE
