"""Weights that are factors times four bits lie packed in DRAM, and nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from celosia.compiler.layer import Window
from celosia.compiler.tensorize import pack
from celosia.compiler.vthread.verify import VerifyError
from celosia.hw.config import PRESETS, Config, ConfigError
from celosia.hw.isa import Buffer, Opcode, encode
from celosia.hw.legality import why_illegal
from celosia.hw.packing import QUOTIENTS, packing
from celosia.sim.packing import expand

from .layers import CONFIGS, Builder, Network, builders
from .test_provenance import Program

PACKED = [name for name, cfg in CONFIGS.items() if cfg.weight_bits < 8]
SHAPES = [CONFIGS[name] for name in PACKED]
SHAPES += [
    replace(PRESETS[name], weight_bits=bits) for name in PRESETS for bits in (4, 2, 1) if name != "tiny" or bits == 4
]


def entries(cfg: Config, packs: int, seed: int) -> NDArray[np.int8]:
    """[packs, entries, runs, run] of wgt, whose groups have factors."""
    rng, p = np.random.default_rng(seed), packing(cfg)
    factors = rng.integers(1, 17, (packs, 1, p.groups, 1))
    return (rng.choice(QUOTIENTS[p.bits], (packs, p.entries, p.groups, p.run)) * factors).astype(np.int8)


@pytest.mark.parametrize(
    "cfg", SHAPES, ids=lambda cfg: f"{cfg.block_in}x{cfg.block_out}-{cfg.bus_bytes}-{cfg.weight_bits}"
)
def test_what_is_packed_expands_to_the_same(cfg: Config) -> None:
    p, weights = packing(cfg), entries(cfg, 7, cfg.block_in)
    found = pack.packed_weights(cfg, weights.view(np.uint8).reshape(-1))
    assert found is not None and len(found) == 7 * p.pack_bytes
    np.testing.assert_array_equal(expand(cfg, found).reshape(weights.shape), weights)
    assert p.entry_bytes == (1 + (1 << p.stretch)) << p.shift and p.pack_bytes % cfg.bus_bytes == 0


@pytest.mark.parametrize("values", [(100, -99), (-128, 127), (105, 1), (113, 0), (-127, 0), (120, -128 + 8)])
def test_groups_without_a_factor(values: tuple[int, int]) -> None:
    """Of 32 weights two are such that no factor to 16 leaves whole numbers of four bits."""
    cfg = CONFIGS["packed-4x8"]
    weights = entries(cfg, 3, 0)
    weights[1, 2, 5, 0], weights[1, 7, 5, 3] = values
    assert pack.packed_weights(cfg, weights.view(np.uint8).reshape(-1)) is None


@pytest.mark.parametrize("weight", range(-128, 128))
def test_which_single_weights_are(weight: int) -> None:
    cfg = CONFIGS["packed-4x8"]
    weights = np.zeros(packing(cfg).weights, np.int8)
    weights[9] = weight
    can = any(weight % k == 0 and -8 <= weight // k <= 7 for k in range(1, 17))
    found = pack.packed_weights(cfg, weights.view(np.uint8))
    assert (found is not None) == can
    if found is not None:
        np.testing.assert_array_equal(expand(cfg, found).reshape(-1), weights)


@given(builders(PACKED), st.integers(1, 80), st.integers(1, 24), st.booleans())
def test_layers_are_what_they_mean(b: Builder, inputs: int, outputs: int, matrix: bool) -> None:
    """Convolutions and products, some packed and some not: for their weights, or for packs that they would cut."""
    x = b.given(b.draw(st.integers(1, 3)), inputs, *((1, 1) if matrix else (5, 4)))
    y = b.conv(x, Window((1, 1)) if matrix else b.draw(st.sampled_from([Window((1, 1)), Window((3, 3))])), outputs)
    b.conv(y, Window((1, 1)), 8)
    image = b.net.check()
    for layer, parts in zip(b.net.layers, image.launches[0].parts, strict=True):
        _, packed = pack.stored_weights(b.cfg, layer)  # type: ignore[arg-type]
        assert {part.definition.problem.packed for part in parts} == {packed}  # type: ignore[union-attr]


def product(config: str) -> Network:
    b = Builder(Network(CONFIGS[config]), None, np.random.default_rng(4))  # type: ignore[arg-type]
    b._number, b._flag, b._name = lambda low, high: high, lambda: False, lambda: "product"  # type: ignore[method-assign]
    b.conv(b.given(1, 64, 2, 2), Window((1, 1)), 16)
    return b.net


Planted = Callable[[Program], None]


def _bytes(p: Program) -> tuple[NDArray[np.uint8], int]:
    """Constants, and where in them the first pack that a LOAD brings begins."""
    load = p.loads(Buffer.WGT)[0]
    return p.constants, load.fields["dram_addr"] - p.image.constants_address


def _factor(p: Program) -> None:
    constants, at = _bytes(p)
    constants[at] ^= 1


def _nibbles(p: Program) -> None:
    constants, first = _bytes(p)
    at = first + packing(p.net.cfg).factor_bytes
    at += int(np.flatnonzero(constants[at : at + 16] % 17)[0])  # halves that differ
    constants[at] = constants[at] >> 4 | constants[at] << 4 & 255


def _shorter(p: Program) -> None:
    p.loads(Buffer.WGT)[0].fields["x_size"] -= packing(p.net.cfg).entries


def _next_pack(p: Program) -> None:
    p.loads(Buffer.WGT)[0].fields["dram_addr"] += packing(p.net.cfg).pack_bytes


def _no_factors(p: Program) -> None:
    p.loads(Buffer.WGT)[0].fields["dram_addr"] += packing(p.net.cfg).factor_bytes


def _as_they_are(p: Program) -> None:
    p.loads(Buffer.WGT)[0].fields["expand"] = 0


@pytest.mark.parametrize("fault", [_factor, _nibbles, _shorter, _next_pack, _no_factors, _as_they_are])
@pytest.mark.parametrize("config", PACKED)
def test_wrong_programs_are_found(config: str, fault: Planted) -> None:
    net = product(config)
    p = Program(net, net.build())
    p.verify()
    assert all(load.fields["expand"] for load in p.loads(Buffer.WGT))
    fault(p)
    with pytest.raises(VerifyError):
        p.verify()


def test_what_is_illegal() -> None:
    cfg = CONFIGS["packed-4x8"]
    row = {"buffer": Buffer.WGT, "x_size": 8, "y_size": 1, "z_size": 1, "expand": 1}
    assert why_illegal(cfg, encode(cfg, Opcode.LOAD, **row)) is None
    for other, why in (({"buffer": Buffer.INP}, "only WGT is expanded"), ({"x_size": 12}, "packs of 8 elements")):
        assert why in str(why_illegal(cfg, encode(cfg, Opcode.LOAD, **(row | other))))
    wide = replace(PRESETS["wide"], weight_bits=4)
    assert "not expanded" in str(why_illegal(wide, encode(wide, Opcode.LOAD, **row, spread=1)))


def test_configs_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="weight_bits = 4 needs entries of wgt of 2 beats"):
        Config(block_in=4, block_out=4, bus_bytes=16, weight_bits=4)
    with pytest.raises(ConfigError, match="weight_bits must be a power of two, not 5"):
        Config(weight_bits=5)
