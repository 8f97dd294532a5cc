"""Scratchpads of the accelerator: the values of an entry, the number of entries, the units that write and read.

    inp, wgt   activations and weights for GEMM            par    bias, multiplier and shift of channels
    acc        int32 sums of GEMM                          lut    lookup tables of 256 bytes
    vin        operands of VECTOR                          tap    weights of depthwise convolutions
    out        results for STORE                           exp    powers of softmax
                                                           book   codebooks of packed weights

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
from celosia.hw.spec.packing import CODEBOOK_ENTRIES, CODEBOOKS, nibble_weights

TABLE_SIZE = 256
"""Values in a table of lut: one for each int8."""

MIN_SPREAD_BEATS = 8
"""Smallest size of half a piece of wgt, in beats, for which LOAD may spread weights over both read ports.

A spread LOAD requests each half as a burst of its own. Shorter bursts would not cover the latency of memory with the
bursts that may be outstanding.
"""

EXP_ENTRIES = 512
"""Entries of exp: for each distance of an int8 from the largest one of its row, -255 to 0, the power e^(scale *
distance), then for each distance the power divided by the scale of the result."""

_BITS = {"int8": 8, "int32": 32, "float32": 32, "uint64": 64}
"""Bits of a value, by type."""


class BitField(NamedTuple):
    """Position of a number in a word of several numbers.

    offset : its lowest bit.
    width : bits.
    signed : the bits are a two's complement number.
    """

    offset: int
    width: int
    signed: bool = False

    def of(self, word: Any) -> Any:
        """Extract the bits from `word`, an integer, an array or a tensor expression, as an unsigned number.

        >>> [part.of((30 << 56) + (9 << 32) + 5) for part in PAR_FIELDS.values()]
        [5, 9, 30]
        """
        return (word >> self.offset if self.offset else word) & ((1 << self.width) - 1)


PAR_FIELDS = {"bias": BitField(0, 32, signed=True), "multiplier": BitField(32, 24), "shift": BitField(56, 6)}
"""Numbers that par holds for one channel, in a word of 64 bits; the highest two bits are unused."""

FLOAT_FIELDS = {"fraction": BitField(0, 23), "exponent": BitField(23, 8)}
"""Parts of a float32 that the softmax hardware uses. It has no negative numbers, and no infinities or NaNs: exponent
255 is an ordinary one."""


@dataclass(frozen=True)
class Scratchpad:
    """Declaration of one scratchpad memory of a Config.

    name : name of its `Buffer` in lower case, and of its ports in the RTL.
    depth : entries, a power of two.
    shape, element : shape and type of the values of an entry; the first value is in the lowest bits.
    grain : smallest number of bits that a write changes: LOAD's write, or VECTOR's if LOAD does not write here.
    writers, readers : names of the units with a port, by falling priority if two come in the same cycle.
    in_pieces : LOAD and STORE address pieces, the parts of an entry along the first axis of `shape`; else entries.
    banks : memories over which the entries are spread: interleaved, but those of acc by the top bit of the address.
    kept_values : values of an entry that the memory holds, from the first one on; 0: all.
    on_second_port : with two read ports to memory, LOAD fills it through the second.
    spread : one LOAD may fill it through both ports, half of each piece through each.
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
    kept_values: int = 0
    on_second_port: bool = False
    spread: bool = False

    @property
    def value_bits(self) -> int:
        """Bits of one value of an entry."""
        return _BITS[self.element]

    @property
    def width(self) -> int:
        """Bits of an entry in the memory, rounded up to whole grains."""
        return -(-(self.kept_values or prod(self.shape)) * self.value_bits // self.grain) * self.grain

    @property
    def pieces(self) -> int:
        """Parts of an entry that LOAD and STORE can address: its pieces, or 1."""
        return self.shape[0] if self.in_pieces else 1

    @property
    def piece_shape(self) -> tuple[int, ...]:
        """Shape of the values that one address of LOAD or STORE stands for."""
        return self.shape[1:] if self.in_pieces else self.shape

    @property
    def piece_bytes(self) -> int:
        """Bytes in DRAM that one address of LOAD or STORE stands for."""
        return prod(self.piece_shape) * self.value_bits // 8

    @property
    def entry_bytes(self) -> int:
        """Bytes of an entry in DRAM."""
        return self.pieces * self.piece_bytes

    def beats(self, bus_bytes: int) -> int:
        """Beats in which LOAD brings one entry over a bus of `bus_bytes` bytes; it writes one beat a cycle."""
        return self.pieces * max(1, self.piece_bytes // bus_bytes)

    @property
    def address_bits(self) -> int:
        """Bits of the address of an entry."""
        return max(1, (self.depth - 1).bit_length())

    def part_address_bits(self, width: int) -> int:
        """Bits of the address of a part of an entry, `width` bits wide; of an entry if entries are no wider."""
        return self.address_bits + max(1, self.width // width).bit_length() - 1

    @property
    def piece_bits(self) -> int:
        """Bits of the address of a piece."""
        return self.address_bits + self.pieces.bit_length() - 1

    @property
    def bank_depth(self) -> int:
        """Entries in each bank."""
        return self.depth // self.banks

    @property
    def bytes(self) -> int:
        """Size of the memory in bytes."""
        return self.depth * self.width // 8


@cache
def scratchpads(cfg: Config) -> Mapping[str, Scratchpad]:
    """Return the scratchpads of `cfg` by name; tap, exp and book exist only in Configs that use them.

    >>> pad = scratchpads(Config())["acc"]
    >>> pad.depth, pad.shape, pad.width, pad.banks
    (2048, (1, 1, 16), 512, 2)
    """
    inp, out = (cfg.inp_pieces, cfg.batch, cfg.group), (cfg.out_pieces, cfg.batch, cfg.group)
    forward = "vector load" if cfg.forward else "load"
    wgt = (cfg.inp_pieces, cfg.block_out, cfg.group)  # a piece has the size of `block_out` pixels of a channel group
    spread = cfg.ports == 2 and cfg.block_out * cfg.group >= 2 * MIN_SPREAD_BEATS * cfg.bus_bytes
    slots = 1 << (cfg.taps - 1).bit_length() if cfg.taps else 1  # vin has as many banks as VECTOR reads entries at once
    pads = [
        _scratchpad(cfg, "inp", cfg.inp_depth, inp, forward, "gemm", in_pieces=True),
        _scratchpad(cfg, "wgt", cfg.wgt_depth, wgt, "load", "gemm", in_pieces=True, on_second_port=True, spread=spread),
        _scratchpad(cfg, "acc", cfg.acc_depth, out, "gemm vector load" if cfg.int32 else "gemm load",
                    "gemm vector", element="int32", grain=32, in_pieces=True, banks=2),
        _scratchpad(cfg, "vin", cfg.vin_depth, out, forward, "vector", in_pieces=True, banks=slots),
        _scratchpad(cfg, "out", cfg.out_depth, out, "vector", "store", grain=8 * prod(out), in_pieces=True),
        _scratchpad(cfg, "par", cfg.par_depth, (cfg.block_out,), "load", "vector",
                    element="uint64", on_second_port=True),
        _scratchpad(cfg, "lut", cfg.lut_count, (TABLE_SIZE,), "load", "vector", on_second_port=True),
    ]  # fmt: skip
    if cfg.taps:
        shape = (slots, cfg.block_out)  # slots is a power of two; VECTOR reads `taps` of them
        used = cfg.taps * cfg.block_out
        pads.append(
            _scratchpad(cfg, "tap", cfg.tap_depth, shape, "load", "vector", kept_values=used, on_second_port=True)
        )
    if cfg.softmax:
        pads.append(
            _scratchpad(cfg, "exp", EXP_ENTRIES, (1,), "load", "vector", element="float32", on_second_port=True)
        )
    if cfg.weight_bits < 8:
        weights = (nibble_weights(cfg),)
        pads.append(
            _scratchpad(cfg, "book", CODEBOOKS * CODEBOOK_ENTRIES, weights, "load", "load", on_second_port=True)
        )
    return MappingProxyType({pad.name: pad for pad in pads})


def _scratchpad(
    cfg: Config, name: str, depth: int, shape: tuple[int, ...], writers: str, readers: str, element: str = "int8",
    grain: int = 0, in_pieces: bool = False, **more: Any,
) -> Scratchpad:  # fmt: skip
    """Declare a scratchpad; arguments as the fields of `Scratchpad`, with names of units separated by spaces.

    grain: 0 for that of LOAD, which writes a beat of the bus at a time, or a piece (else an entry) if that is smaller.
    """
    address_bits = prod(shape[in_pieces:]) * _BITS[element]
    grain = grain or min(8 * cfg.bus_bytes, address_bits)
    writer_and_reader_names = tuple(writers.split()), tuple(readers.split())
    return Scratchpad(name, depth, shape, element, grain, *writer_and_reader_names, in_pieces, **more)


def total_bytes(cfg: Config) -> int:
    """Return the size of all scratchpads of `cfg` together, in bytes."""
    return sum(pad.bytes for pad in scratchpads(cfg).values())


@cache
def depths(cfg: Config) -> Mapping[str, int]:
    """Return the number of entries of each scratchpad of `cfg`, by name."""
    return MappingProxyType({name: pad.depth for name, pad in scratchpads(cfg).items()})
