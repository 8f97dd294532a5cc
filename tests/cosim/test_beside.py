"""Poolings, maps, depthwise convolutions and what waits for memory beside convolutions that they do not need: tiles
take turns, and every byte is onnxruntime's."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from simulators import rtl_device
from small_models import Builder, Tensor
from thorough import some

import celosia
from celosia.compiler.graph.select import reductions
from celosia.compiler.launch import image, order
from celosia.compiler.launch.overlap import GuestTiles, OverlapGroup, is_for_vector, keeps_gemm_busy
from celosia.compiler.layer import Layer
from celosia.compiler.program import Program
from celosia.compiler.tensorize.plan import Planner
from celosia.compiler.vthread.verify import VerifyError
from celosia.hw.spec.config import PRESETS, Config
from celosia.hw.spec.isa import Opcode, opcode_of
from celosia.sim.functional.fsim import FunctionalDevice

pytest.importorskip("onnxruntime")

from agreement import CONFIGS, check

from celosia.driver.run.explain import estimate, predict_counters

SMALL = dict(inp_depth=512, wgt_depth=256, acc_depth=128, vin_depth=128, out_depth=128, par_depth=32)
TAPS = Config(block_in=8, block_out=8, bus_bytes=16, **SMALL, taps=3, tap_depth=64, forward=True, residual_cycles=2)
"""Small, so that there are many tiles."""


def inception(channels: int = 16, size: int = 10) -> Builder:
    """A convolution, of which a pooling with one behind it, two convolutions, and a table read; all of it put
    together. The pooling stands first."""
    b = Builder("qdq", seed=3)
    x = b.conv(b.input((1, channels, size, size)), channels, (1, 1), activation="Relu")
    largest = b.max_pool(x, (3, 3), (1, 1), (1, 1, 1, 1))
    wide = b.conv(x, channels, (3, 3), pads=(1, 1, 1, 1), activation="Relu")
    parts = [largest, wide, b.unary(x, "Sigmoid"), b.conv(largest, channels, (1, 1))]
    b.output(b.conv(b.concat(parts, False), channels, (1, 1)))
    return b


def random_branches(seed: int) -> Builder:
    """Layers of the vector unit alone and convolutions, each of one of the last three tensors or of two of a shape."""
    b = Builder("qdq", seed=seed, symmetric=bool(seed % 2))
    rng = np.random.default_rng(seed)
    size = int(rng.integers(5, 11))
    kept = [b.input((1, int(rng.choice([8, 16, 24])), size, size + int(rng.integers(0, 4))))]
    kept.append(b.conv(kept[0], 16, (3, 3), pads=(1, 1, 1, 1)))
    read = {kept[0].name}

    def one(x: Tensor) -> Tensor:
        """Of x, or of x and another one."""
        alike = [each for each in kept if each.shape == x.shape]
        other = alike[rng.integers(len(alike))]
        kind = rng.integers(7)
        if kind < 2:
            kernel = int(rng.choice([1, 3]))
            return b.conv(x, int(rng.choice([8, 16])), (kernel, kernel), pads=(kernel // 2,) * 4, activation="Relu")
        if kind == 2:
            return b.conv(x, x.shape[1], (3, 3), pads=(1, 1, 1, 1), group=x.shape[1])
        if kind == 3:
            return b.max_pool(x, (3, 3), (1, 1), (1, 1, 1, 1))
        if kind == 4:
            return b.unary(x, "Sigmoid")
        read.add(other.name)
        return b.binary("Add", x, other) if kind == 5 or x.shape[1] > 32 else b.concat([x, other], True)

    for _ in range(int(rng.integers(6, 11))):
        x = kept[-int(rng.integers(1, min(3, len(kept)) + 1))]
        read.add(x.name)
        kept.append(one(x))
    for each in kept:
        if each.name not in read:
            b.output(each)
    return b


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside whatever they can be, though that may take longer: convolutions, too, whatever they wait for."""

    def any_of_images(cfg: Config, planner: Planner, layer: Layer) -> bool:
        return is_for_vector(cfg, layer) or keeps_gemm_busy(cfg, layer)

    monkeypatch.setattr(order, "_leaves_gemm_idle", any_of_images)
    monkeypatch.setattr(order, "_fastest_guests", lambda cfg, planner, layers, host, own: list(own))


def turns(program: Program) -> int:
    """How often a VECTOR of a pooling stands directly between two GEMMs of one convolution."""
    [launch] = program.launches
    codes = [opcode_of(word) for word in program.instructions(launch)]
    pools = {number for number, layer in enumerate(launch.layers) if layer.op == "Pool"}
    rows = [(code, int(layer)) for code, layer in zip(codes, launch.layer_of) if code in (Opcode.GEMM, Opcode.VECTOR)]
    found, last, pooled = 0, -1, False
    for code, layer in rows:
        if code == Opcode.GEMM:
            found += pooled and layer == last
            last, pooled = layer, False
        pooled |= code == Opcode.VECTOR and layer in pools
    return found


def cycles(program: Program) -> int:
    return sum(each.cycles or 0 for each in predict_counters(program))


@pytest.mark.parametrize("name", some([*CONFIGS, "zcu104"], ["pynq", "batch2-8x4"]))
def test_a_pooling_beside_a_convolution(name: str) -> None:
    cfg = CONFIGS.get(name) or PRESETS[name]
    check(inception(), FunctionalDevice(cfg))


def test_gemm_is_busy_meanwhile() -> None:
    model = inception(32, 36).model()
    beside, behind = (celosia.compile(model, "pynq", check=False, without=out) for out in ((), "beside"))
    assert turns(beside) > turns(behind) + 3
    assert cycles(beside) < 0.95 * cycles(behind)


def fire() -> Builder:
    """A small convolution whose results two larger ones put side by side, and a small one that reads them all: only
    the convolution of 3x3 keeps gemm busy."""
    b = Builder("qdq", seed=5)
    x = b.conv(b.input((1, 16, 56, 56)), 16, (1, 1), activation="Relu")
    wide = [b.conv(x, 64, (1, 1), activation="Relu"), b.conv(x, 64, (3, 3), pads=(1, 1, 1, 1), activation="Relu")]
    b.output(b.conv(b.concat(wide, True), 16, (1, 1)))
    return b


def enlarged() -> Builder:
    """A convolution whose sums stay in acc from piece to piece, and its result in twice the size, for another one."""
    b = Builder("qdq", seed=6)
    x = b.conv(b.input((1, 96, 16, 16)), 32, (3, 3), pads=(1, 1, 1, 1), activation="Relu")
    x = b.nearest(x, (2, 2), coordinate_transformation_mode="asymmetric", nearest_mode="floor")
    b.output(b.conv(x, 16, (1, 1)))
    return b


@pytest.mark.parametrize("model", [fire, enlarged])
def test_memory_is_busy_meanwhile(model: Callable[[], Builder]) -> None:
    beside = check(model(), FunctionalDevice(PRESETS["pynq"]))
    behind = celosia.compile(model().model(), "pynq", check=False, without="beside")
    assert cycles(beside) < 0.9 * cycles(behind)


def vector_cycles(program: Program) -> int:
    """In which the vector unit is at work."""
    rows = estimate(program)["layers"]
    return sum(row["units"]["vector"]["busy"] for row in rows if row["units"])


def averages() -> Builder:
    """The average of nine pixels, and what it is added to."""
    b = Builder("qdq", seed=7)
    b.rounding = "correct"
    x = b.conv(b.input((1, 32, 20, 20)), 32, (1, 1), activation="Relu")
    b.output(b.binary("Add", b.average_pool(x, (3, 3), (1, 1), (1, 1, 1, 1), 1), x))
    return b


def test_averages_take_a_step_for_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three pixels, in the vector unit: an addition to them does not bring them to the array."""
    found = check(averages(), FunctionalDevice(PRESETS["pynq"]))
    busy = vector_cycles(found)
    monkeypatch.setattr(reductions, "_as_depthwise", lambda cfg, pool: pool)
    one_by_one = celosia.compile(averages().model(), "pynq", check=False, rounding="correct")
    assert vector_cycles(one_by_one) - busy == (9 - 3) * 20 * 20 * 2


@pytest.mark.parametrize("seed", some(range(40), range(4)))
def test_random_branches(seed: int, always: None) -> None:
    check(random_branches(seed), FunctionalDevice(TAPS if seed % 2 else PRESETS["tiny"]))


@pytest.mark.rtl
def test_branches_on_rtl() -> None:
    with closing(rtl_device(PRESETS["tiny"])) as device:
        assert turns(check(inception(), device))


def test_a_tile_that_does_not_wait_is_found(always: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GuestTiles, "is_ready", lambda self, stream, done: bool(self.remaining))
    with pytest.raises(VerifyError):
        celosia.compile(random_branches(10).model(), "tiny", check=False)


def test_memory_that_is_given_away_too_early_is_found(always: None, monkeypatch: pytest.MonkeyPatch) -> None:
    real = image.lifetimes

    def without_hosts(*given: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(image, "OverlapGroups", one_by_one)
            return real(*given)

    def one_by_one(cfg: Config, layers: list[Layer], overlapped: Any) -> SimpleNamespace:
        return SimpleNamespace(groups=[OverlapGroup((number,)) for number in range(len(layers))])

    monkeypatch.setattr(image, "lifetimes", without_hosts)
    with pytest.raises(VerifyError):
        celosia.compile(random_branches(4).model(), "tiny", check=False)
