"""The scratchpads, each once: what an entry holds, how many there are, who writes them and who reads them.

RTL, timing model, simulators, compiler, verifier and docs/configs.md derive depths, widths and bytes from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple

from celosia.hw.spec.config import Config
from celosia.hw.spec.packing import BOOKS, NIBBLES, nibble_weights

TABLE_SIZE = 256
"""Entries of a table of lut: one for each int8."""

SPREAD_BEATS = 8
"""Beats of half an entry from which it pays to ask for it on its own: so many of each burst that may be under way at
once cover what memory takes to answer."""

POWERS = 512
"""Entries of exp: the power that each distance from a row's largest element has, -255 to 0, and the same times the
steps of the result."""

_BITS = {"int8": 8, "int32": 32, "float32": 32, "uint64": 64}


class Part(NamedTuple):
    """A part: some bits of a word."""

    offset: int
    width: int
    signed: bool = False

    def of(self, word: Any) -> Any:
        """Extract these bits from an integer, an array of uint64 or an expression, as unsigned.

        >>> [part.of((30 << 56) + (9 << 32) + 5) for part in PAR.values()]
        [5, 9, 30]
        """
        return (word >> self.offset if self.offset else word) & ((1 << self.width) - 1)


PAR = {"bias": Part(0, 32, signed=True), "multiplier": Part(32, 24), "shift": Part(56, 6)}
"""Parts of a word of par: one channel, in 64 bits of which the highest two are unused."""

FLOAT = {"fraction": Part(0, 23), "exponent": Part(23, 8)}
"""Parts of a float32 that the hardware uses: there are no negative ones, and an exponent of 255 is one as any
other."""


@dataclass(frozen=True)
class Scratchpad:
    """Properties of one of the scratchpads of a Config.

    name: that of its Buffer, and of its ports. depth: entries, a power of two.
    shape, element: the values of an entry, the first one in the lowest bits, and their type.
    grain: bits that LOAD writes on their own, or VECTOR where LOAD writes none.
    writers, readers: units, the one that goes first where two come at once in front.
    in_pieces: LOAD and STORE address the parts along the first axis of `shape`; else whole entries.
    banks: memories over which the entries are spread.
    kept: values of an entry that the hardware keeps, from the first one on; 0: all.
    far: filled through the second read port to memory where there are two.
    spread: an instruction may fill it through both, half of each entry through each.
    """

    name: str
    depth: int
    shape: tuple[int, ...]
    element: str
    grain: int
    writers: tuple[str, ...]
    readers: tuple[str, ...]
    in_pieces: bool = False
    banks: int = 1
    kept: int = 0
    far: bool = False
    spread: bool = False

    @property
    def value_bits(self) -> int:
        """Bits of one value."""
        return _BITS[self.element]

    @property
    def width(self) -> int:
        """Bits of an entry, as whole grains."""
        return -(-(self.kept or prod(self.shape)) * self.value_bits // self.grain) * self.grain

    @property
    def pieces(self) -> int:
        """Parts of an entry that LOAD and STORE address."""
        return self.shape[0] if self.in_pieces else 1

    @property
    def piece_shape(self) -> tuple[int, ...]:
        """Values of one of them."""
        return self.shape[1:] if self.in_pieces else self.shape

    @property
    def piece_bytes(self) -> int:
        """Bytes of one of them in DRAM."""
        return prod(self.piece_shape) * self.value_bits // 8

    @property
    def entry_bytes(self) -> int:
        """Bytes of an entry in DRAM."""
        return self.pieces * self.piece_bytes

    def beats(self, bus_bytes: int) -> int:
        """Cycles in which LOAD writes an entry that comes over a bus of so many bytes."""
        return self.pieces * max(1, self.piece_bytes // bus_bytes)

    @property
    def address_bits(self) -> int:
        """Bits of an entry's number."""
        return max(1, (self.depth - 1).bit_length())

    def bits_of_parts(self, width: int) -> int:
        """Bits of the number of a part of `width` bits of an entry, or of an entry that is no larger than that."""
        return self.address_bits + max(1, self.width // width).bit_length() - 1

    @property
    def piece_bits(self) -> int:
        """Bits of a piece's number."""
        return self.address_bits + self.pieces.bit_length() - 1

    @property
    def bank_depth(self) -> int:
        """Entries of a bank."""
        return self.depth // self.banks

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return self.depth * self.width // 8


@cache
def scratchpads(cfg: Config) -> Mapping[str, Scratchpad]:
    """Scratchpads of `cfg`, by name: without taps there is no tap.

    >>> pad = scratchpads(Config())["acc"]
    >>> pad.depth, pad.shape, pad.width, pad.banks
    (2048, (1, 1, 16), 512, 2)
    """
    inp, out = (cfg.inp_pieces, cfg.batch, cfg.group), (cfg.out_pieces, cfg.batch, cfg.group)
    forward = "vector load" if cfg.forward else "load"
    spread = cfg.ports == 2 and cfg.block_out * cfg.block_in >= 2 * SPREAD_BEATS * cfg.bus_bytes
    slots = 1 << (cfg.taps - 1).bit_length() if cfg.taps else 1  # entries of vin that VECTOR reads at once, in banks
    pads = [
        _scratchpad(cfg, "inp", cfg.inp_depth, inp, forward, "gemm", in_pieces=True),
        _scratchpad(cfg, "wgt", cfg.wgt_depth, (cfg.block_out, cfg.block_in), "load", "gemm", far=True, spread=spread),
        _scratchpad(cfg, "acc", cfg.acc_depth, out, "gemm vector load" if cfg.int32 else "gemm load",
                    "gemm vector", element="int32", grain=32, in_pieces=True, banks=2),
        _scratchpad(cfg, "vin", cfg.vin_depth, out, forward, "vector", in_pieces=True, banks=slots),
        _scratchpad(cfg, "out", cfg.out_depth, out, "vector", "store", grain=8 * prod(out), in_pieces=True),
        _scratchpad(cfg, "par", cfg.par_depth, (cfg.block_out,), "load", "vector", element="uint64", far=True),
        _scratchpad(cfg, "lut", cfg.lut_count, (TABLE_SIZE,), "load", "vector", far=True),
    ]  # fmt: skip
    if cfg.taps:
        shape, kept_bytes = (slots, cfg.block_out), cfg.taps * cfg.block_out  # places beyond `taps` are not looked at
        pads.append(_scratchpad(cfg, "tap", cfg.tap_depth, shape, "load", "vector", kept=kept_bytes, far=True))
    if cfg.softmax:
        pads.append(_scratchpad(cfg, "exp", POWERS, (1,), "load", "vector", element="float32", far=True))
    if cfg.weight_bits < 8:
        weights = (nibble_weights(cfg),)
        pads.append(_scratchpad(cfg, "book", BOOKS * NIBBLES, weights, "load", "load", far=True))
    return MappingProxyType({pad.name: pad for pad in pads})


def _scratchpad(
    cfg: Config, name: str, depth: int, shape: tuple[int, ...], writers: str, readers: str, element: str = "int8",
    grain: int = 0, in_pieces: bool = False, **options: Any,
) -> Scratchpad:  # fmt: skip
    """Scratchpad with defaults: LOAD writes what a beat of the bus holds, or a piece."""
    step = prod(shape[in_pieces:]) * _BITS[element]
    grain = grain or min(8 * cfg.bus_bytes, step)
    units = tuple(writers.split()), tuple(readers.split())
    return Scratchpad(name, depth, shape, element, grain, *units, in_pieces, **options)


def total_bytes(cfg: Config) -> int:
    """Bytes of all scratchpads together."""
    return sum(pad.bytes for pad in scratchpads(cfg).values())


@cache
def depths(cfg: Config) -> Mapping[str, int]:
    """Entries of each of them."""
    return MappingProxyType({name: pad.depth for name, pad in scratchpads(cfg).items()})
