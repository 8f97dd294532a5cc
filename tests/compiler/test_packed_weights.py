"""Weights whose values fit codebooks lie packed in DRAM; nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st
from numpy.typing import NDArray
from thorough import paired

from celosia.compiler.launch.image import LayerErrors
from celosia.compiler.layer import Window
from celosia.compiler.tensorize import pack
from celosia.compiler.tensorize.pack import codebooks_of_multiples
from celosia.compiler.vthread.pipeline import StreamInstruction, load_codebooks
from celosia.compiler.vthread.verify import VerifyError
from celosia.hw.spec.config import PRESETS, Config, ConfigError
from celosia.hw.spec.isa import Buffer, Opcode, encode
from celosia.hw.spec.legality import why_illegal
from celosia.hw.spec.packing import CODEBOOK_BLOCK, CODEBOOK_ENTRIES, CODEBOOKS, nibble_weights, packing
from celosia.sim.functional.unpacking import expand_packs

from .layers import CONFIGS, Builder, Network, builders
from .test_provenance import Program

Bytes = NDArray[np.uint8]
PACKED = [name for name, cfg in CONFIGS.items() if cfg.weight_bits < 8]
SHAPES = [CONFIGS[name] for name in PACKED]
SHAPES += [
    replace(PRESETS[name], weight_bits=bits) for name in PRESETS for bits in (4, 2, 1) if name != "tiny" or bits == 4
]


def grouped(cfg: Config, groups: NDArray[np.int8]) -> Bytes:
    """Return entries of wgt with these groups [packs, groups, weights]."""
    p = packing(cfg)
    return np.ascontiguousarray(groups.reshape(-1, p.blocks, p.pieces, p.run).swapaxes(1, 2)).view(np.uint8).ravel()


def expanded(cfg: Config, stored: pack.StoredWeights) -> Bytes:
    """Return the weights that LOAD expands from packed ones."""
    book = stored.data[: stored.book_bytes].view(np.int8).reshape(-1, nibble_weights(cfg))
    return expand_packs(cfg, stored.data[stored.first :], book).view(np.uint8).ravel()


def drawn(cfg: Config, books: NDArray[np.int8], packs: int, rng: np.random.Generator) -> Bytes:
    """Draw entries of wgt; all values of a group come from one of these codebooks."""
    p = packing(cfg)
    own = books[rng.integers(0, len(books), (packs, p.blocks))]
    picked = rng.integers(0, books.shape[1], (packs, p.blocks, p.pieces * p.run))
    return grouped(cfg, np.take_along_axis(own, picked, axis=2))


@pytest.mark.parametrize("cfg", SHAPES, ids=lambda c: f"{c.block_in}x{c.block_out}-{c.bus_bytes}-{c.weight_bits}")
def test_what_is_packed_expands_to_the_same(cfg: Config) -> None:
    """Packed weights expand to the same bytes, for one or several codebooks.

    Values are factors times numbers of few bits, or arbitrary ones.
    """
    p, rng = packing(cfg), np.random.default_rng(cfg.block_in)
    apart = rng.permutation(256)[: 240 >> 4 - p.bits << 4 - p.bits].astype(np.uint8).view(np.int8)
    apart = apart.reshape(-1, 1 << p.bits)[:CODEBOOKS]
    for books in (codebooks_of_multiples(p.bits).view(np.int8), apart[:1], apart):
        entries = drawn(cfg, books, 7, rng)
        result = pack.pack_weights(cfg, entries)
        assert result is not None and len(result.data) == result.first + 7 * p.pack_bytes
        assert 0 < result.book_bytes <= len(books) * CODEBOOK_ENTRIES * nibble_weights(cfg) and result.packed
        np.testing.assert_array_equal(expanded(cfg, result), entries)
    assert p.piece_bytes == (1 + (1 << p.stretch)) << p.shift and p.pack_bytes % cfg.bus_bytes == 0


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_too_many_values(bits: int) -> None:
    """Weights are not packed if a group has too many values or a layer too many codebooks."""
    cfg = replace(PRESETS["pynq"], weight_bits=bits)
    p, rng = packing(cfg), np.random.default_rng(bits)
    entries = grouped(
        cfg, rng.permutation(256).astype(np.uint8).view(np.int8)[np.zeros((1, p.blocks, CODEBOOK_BLOCK), int)]
    )
    assert pack.pack_weights(cfg, entries) is not None
    entries[: (1 << bits) + 1] = range((1 << bits) + 1)
    assert pack.pack_weights(cfg, entries) is None
    pairs = rng.permutation(256).astype(np.uint8).view(np.int8).reshape(-1, 1 << bits)
    groups = np.repeat(pairs[:, None], CODEBOOK_BLOCK >> bits, axis=1).reshape(len(pairs), CODEBOOK_BLOCK)
    enough = np.resize(groups[:CODEBOOKS], (1, p.blocks, CODEBOOK_BLOCK))
    result = pack.pack_weights(cfg, grouped(cfg, enough))
    assert result is not None
    np.testing.assert_array_equal(expanded(cfg, result), grouped(cfg, enough))
    if len(pairs) > CODEBOOKS:
        assert (
            pack.pack_weights(cfg, grouped(cfg, np.resize(groups[: CODEBOOKS + 1], (2, p.blocks, CODEBOOK_BLOCK))))
            is None
        )


def test_codebooks_are_loaded_where_others_are_needed() -> None:
    """Codebooks are loaded once before their weights; a codebook that two layers share stays."""
    cfg = CONFIGS["packed-4x8"]
    rng = np.random.default_rng(0)
    one = rng.integers(0, 256, 3 * CODEBOOK_ENTRIES).astype(np.uint8)
    more, other = (
        np.append(one, one[:CODEBOOK_ENTRIES]),
        np.concatenate([one[:CODEBOOK_ENTRIES], one[CODEBOOK_ENTRIES:] + 1]),
    )
    books = {0: one, 640: one[:CODEBOOK_ENTRIES], 1280: more, 1920: other}
    weights = [
        StreamInstruction(Opcode.LOAD, {"buffer": Buffer.WGT, "dram_addr": at + 64, "expand": 1}) for at in (*books, 0)
    ]
    others = [
        StreamInstruction(Opcode.GEMM, {}),
        StreamInstruction(Opcode.LOAD, {"buffer": Buffer.WGT, "dram_addr": 0}),
    ]
    stream = load_codebooks(cfg, [*others, *weights], books)
    loads = [i for i in stream if i.fields.get("buffer") == Buffer.BOOK]
    assert [i for i in stream if i not in loads] == [*others, *weights]
    assert [(i.fields["dram_addr"], i.fields["sram_base"], i.fields["x_size"]) for i in loads] == [
        (0, 0, 48), (1280 + 48, 48, 16), (1920 + 16, 16, 32), (16, 16, 32),
    ]  # fmt: skip
    assert all(stream[stream.index(load) + 1] in weights for load in loads)


@given(builders(PACKED), st.integers(1, 80), st.integers(1, 24), st.booleans())
def test_layers_are_what_they_mean(b: Builder, inputs: int, outputs: int, matrix: bool) -> None:
    """Convolutions and products with packed and unpacked weights compute their meaning.

    Weights stay unpacked if they have too many values or if tiles would cut packs.
    """
    x = b.host_input(b.draw(st.integers(1, 3)), inputs, *((1, 1) if matrix else (5, 4)))
    y = b.conv(x, Window((1, 1)) if matrix else b.draw(st.sampled_from([Window((1, 1)), Window((3, 3))])), outputs)
    b.conv(y, Window((1, 1)), 8)
    try:
        image = b.net.check()
    except LayerErrors:  # a layer is too large for the scratchpads of its Config
        reject()
    for layer, parts in zip(b.net.layers, image.launches[0].parts, strict=True):
        assert layer.gemm is not None
        packed = pack.stored_weights(b.cfg, layer.gemm).packed
        assert {part.computation.workload.packed for part in parts} == {packed}  # type: ignore[union-attr]


def product(config: str) -> Network:
    b = Builder(Network(CONFIGS[config]), None, np.random.default_rng(4))  # type: ignore[arg-type]
    b._number, b._flag, b._name = lambda low, high: high, lambda: False, lambda: "product"  # type: ignore[method-assign]
    b.conv(b.host_input(1, 64, 2, 2), Window((1, 1)), 16)
    return b.net


Planted = Callable[[Program], None]


def _bytes(p: Program) -> tuple[NDArray[np.uint8], int]:
    """Return the constants, and the offset of the first pack that a LOAD reads."""
    load = p.loads(Buffer.WGT)[0]
    return p.constants, load.fields["dram_addr"] - p.image.constants_address


def _head(p: Program) -> None:
    constants, at = _bytes(p)
    constants[at] ^= 1


def _book(p: Program) -> None:
    f = p.loads(Buffer.BOOK)[0].fields
    first = f["dram_addr"] - p.image.constants_address
    p.constants[first : first + f["x_size"] * nibble_weights(p.net.cfg)] ^= 1


def _no_book(p: Program) -> None:
    p.drop(p.loads(Buffer.BOOK)[0])


def _late_book(p: Program) -> None:
    (load,) = p.loads(Buffer.BOOK)
    p.drop(load)
    p.insert_after(p.loads(Buffer.WGT)[0], load)


def _other_book(p: Program) -> None:
    p.loads(Buffer.BOOK)[0].fields["sram_base"] += CODEBOOK_ENTRIES


def _short_book(p: Program) -> None:
    p.loads(Buffer.BOOK)[0].fields["x_size"] -= CODEBOOK_ENTRIES


def _nibbles(p: Program) -> None:
    constants, first = _bytes(p)
    at = first + packing(p.net.cfg).head_bytes
    at += int(np.flatnonzero(constants[at : at + 16] % 17)[0])  # halves that differ
    constants[at] = constants[at] >> 4 | constants[at] << 4 & 255


def _shorter(p: Program) -> None:
    p.loads(Buffer.WGT)[0].fields["x_size"] -= packing(p.net.cfg).pieces


def _next_pack(p: Program) -> None:
    p.loads(Buffer.WGT)[0].fields["dram_addr"] += packing(p.net.cfg).pack_bytes


def _no_head(p: Program) -> None:
    p.loads(Buffer.WGT)[0].fields["dram_addr"] += packing(p.net.cfg).head_bytes


def _as_they_are(p: Program) -> None:
    p.loads(Buffer.WGT)[0].fields["expand"] = 0


FAULTS = [
    _head, _nibbles, _shorter, _next_pack, _no_head, _as_they_are,
    _book, _no_book, _late_book, _other_book, _short_book,
]  # fmt: skip


@pytest.mark.parametrize(("fault", "config"), paired(FAULTS, PACKED))
def test_wrong_programs_are_found(fault: Planted, config: str) -> None:
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
    for other, why in (({"buffer": Buffer.INP}, "only a LOAD of WGT"), ({"x_size": 12}, "packs of 8 elements")):
        assert why in str(why_illegal(cfg, encode(cfg, Opcode.LOAD, **(row | other))))
    wide = replace(PRESETS["wide"], weight_bits=4)
    assert "cannot expand" in str(why_illegal(wide, encode(wide, Opcode.LOAD, **row, spread=1)))


def test_configs_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match=r"weight_bits = 4.*wgt of 2 beats"):
        Config(block_in=4, block_out=4, bus_bytes=16, weight_bits=4)
    with pytest.raises(ConfigError, match=r"weight_bits = 1.* 4 at least.*2"):
        Config(block_in=2, block_out=16, bus_bytes=4, weight_bits=1)
    with pytest.raises(ConfigError, match=r"weight_bits.*power of two.*5"):
        Config(weight_bits=5)
