"""Overlap: layers that a convolution does not need run in turns with its tiles, and every byte is onnxruntime's.

These layers are poolings, maps, depthwise convolutions, and layers that wait for memory.
"""

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
"""A small accelerator, so that layers have many tiles."""


def inception(channels: int = 16, size: int = 10) -> Builder:
    """Return a model in which a pooling, two convolutions and a table read the same convolution, and are concatenated.

    A further convolution reads the pooling, which comes first in the model.
    """
    b = Builder("qdq", seed=3)
    x = b.conv(b.input((1, channels, size, size)), channels, (1, 1), activation="Relu")
    largest = b.max_pool(x, (3, 3), (1, 1), (1, 1, 1, 1))
    wide = b.conv(x, channels, (3, 3), pads=(1, 1, 1, 1), activation="Relu")
    parts = [largest, wide, b.unary(x, "Sigmoid"), b.conv(largest, channels, (1, 1))]
    b.output(b.conv(b.concat(parts, False), channels, (1, 1)))
    return b


def random_branches(seed: int) -> Builder:
    """Return a model of convolutions and layers of the vector unit; each reads one or two of the last three tensors."""
    b = Builder("qdq", seed=seed, symmetric=bool(seed % 2))
    rng = np.random.default_rng(seed)
    size = int(rng.integers(5, 11))
    tensors = [b.input((1, int(rng.choice([8, 16, 24])), size, size + int(rng.integers(0, 4))))]
    tensors.append(b.conv(tensors[0], 16, (3, 3), pads=(1, 1, 1, 1)))
    read = {tensors[0].name}

    def add_layer(x: Tensor) -> Tensor:
        """Add a layer that reads x, or x and another tensor of its shape."""
        alike = [tensor for tensor in tensors if tensor.shape == x.shape]
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
        x = tensors[-int(rng.integers(1, min(3, len(tensors)) + 1))]
        read.add(x.name)
        tensors.append(add_layer(x))
    for tensor in tensors:
        if tensor.name not in read:
            b.output(tensor)
    return b


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Overlap all layers that may be, even if that takes longer, and convolutions, too."""

    def is_guest(cfg: Config, planner: Planner, layer: Layer) -> bool:
        return is_for_vector(cfg, layer) or keeps_gemm_busy(cfg, layer)

    monkeypatch.setattr(order, "_leaves_gemm_idle", is_guest)
    monkeypatch.setattr(order, "_fastest_guests", lambda cfg, planner, layers, host, own: list(own))


def turns(program: Program) -> int:
    """Return how often a VECTOR of a pooling stands directly between two GEMMs of one convolution."""
    [launch] = program.launches
    codes = [opcode_of(word) for word in program.instructions(launch)]
    pools = {number for number, layer in enumerate(launch.layers) if layer.op == "Pool"}
    rows = [(code, int(layer)) for code, layer in zip(codes, launch.layer_of) if code in (Opcode.GEMM, Opcode.VECTOR)]
    count, last, pooled = 0, -1, False
    for code, layer in rows:
        if code == Opcode.GEMM:
            count += pooled and layer == last
            last, pooled = layer, False
        pooled |= code == Opcode.VECTOR and layer in pools
    return count


def cycles(program: Program) -> int:
    return sum(counters.cycles or 0 for counters in predict_counters(program))


@pytest.mark.parametrize("name", some([*CONFIGS, "zcu104"], ["batch2-8x4"]))
def test_a_pooling_beside_a_convolution(name: str) -> None:
    cfg = CONFIGS.get(name) or PRESETS[name]
    check(inception(), FunctionalDevice(cfg))


def test_gemm_is_busy_meanwhile() -> None:
    model = inception(32, 36).model()
    beside, behind = (celosia.compile(model, "pynq", check=False, without=out) for out in ((), "beside"))
    assert turns(beside) > turns(behind) + 3
    assert cycles(beside) < 0.95 * cycles(behind)


def fire() -> Builder:
    """Return a model in which two large convolutions read a small one, and a small one reads their concatenation.

    Only the convolution of 3x3 keeps gemm busy.
    """
    b = Builder("qdq", seed=5)
    x = b.conv(b.input((1, 16, 56, 56)), 16, (1, 1), activation="Relu")
    wide = [b.conv(x, 64, (1, 1), activation="Relu"), b.conv(x, 64, (3, 3), pads=(1, 1, 1, 1), activation="Relu")]
    b.output(b.conv(b.concat(wide, True), 16, (1, 1)))
    return b


def enlarged() -> Builder:
    """Return a model with a convolution whose sums stay in acc between input pieces, a Resize, and a convolution."""
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
    """Return the cycles in which the vector unit is busy."""
    rows = estimate(program)["layers"]
    return sum(row["units"]["vector"]["busy"] for row in rows if row["units"])


def averages() -> Builder:
    """Return a model that adds the averages of 3x3 pixels to their input."""
    b = Builder("qdq", seed=7)
    b.rounding = "correct"
    x = b.conv(b.input((1, 32, 20, 20)), 32, (1, 1), activation="Relu")
    b.output(b.binary("Add", b.average_pool(x, (3, 3), (1, 1), (1, 1, 1, 1), 1), x))
    return b


def test_averages_take_a_step_for_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The vector unit computes an average with one step per row of three pixels, even if an addition follows."""
    program = check(averages(), FunctionalDevice(PRESETS["pynq"]))
    busy = vector_cycles(program)
    monkeypatch.setattr(reductions, "_on_faster_unit", lambda cfg, pool: pool)
    one_by_one = celosia.compile(averages().model(), "pynq", check=False, rounding="correct")
    assert vector_cycles(one_by_one) - busy == (9 - 3) * 20 * 20 * 2


@pytest.mark.parametrize("seed", some(range(40), [0, 1]))
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

    def without_hosts(*arguments: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(image, "OverlapGroups", one_by_one)
            return real(*arguments)

    def one_by_one(cfg: Config, layers: list[Layer], overlapped: Any) -> SimpleNamespace:
        return SimpleNamespace(groups=[OverlapGroup((number,)) for number in range(len(layers))])

    monkeypatch.setattr(image, "lifetimes", without_hosts)
    with pytest.raises(VerifyError):
        celosia.compile(random_branches(4).model(), "tiny", check=False)
