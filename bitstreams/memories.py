"""Memories of an accelerator as Yosys maps them to a Zynq-7000: to block RAM, to LUTs, to registers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from celosia.hw.lib.layout import ERROR_BITS, INDEX_BITS
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import formats
from celosia.hw.spec.pipeline import (
    FETCH_BURSTS,
    READ_BUFFER_BEATS,
    WRITEBACK_DEPTH,
    fetch_burst,
    ring_places,
    vector_stages,
)
from celosia.hw.spec.scratchpads import Scratchpad, scratchpads


class Memory(NamedTuple):
    """A memory as it is declared. grain: bits that are written on their own. clocked: its reads are registers, those of
    block RAM or flip-flops. book: which is to be block RAM, and is read at two places at once."""

    depth: int
    bits: int
    grain: int
    clocked: bool = True
    book: bool = False

    @property
    def blocks(self) -> float:
        """Blocks of 36 kbit, of which half ones count; 0 where Yosys takes LUTs, by the costs of its libraries (LUTs of
        RAM64M and RAM32M 8 for four, half a block 129).

        >>> Memory(1024, 32, 32).blocks, Memory(512, 32, 32).blocks, Memory(127, 69, 69).blocks
        (1.0, 0.5, 1.0)
        >>> Memory(64, 256, 64).blocks, Memory(256, 8, 8).blocks, Memory(256, 2048, 128).blocks
        (0, 0, 30.0)
        """
        blocks = _blocks(self.depth, self.bits, self.grain)
        if self.book:
            return -(-self.bits // 18) / 2
        return 0 if self.depth <= 64 or 2 * self.luts < 257 * blocks else blocks

    @property
    def luts(self) -> int:
        """LUTs of distributed RAM: four hold 6 bits of 32 entries, or 3 bits of 64; one entry is a register.

        >>> Memory(15, 263, 263).luts, Memory(64, 64, 64).luts, Memory(128, 16, 8).luts, Memory(1, 69, 69).luts
        (176, 88, 48, 0)
        """
        wide, deep = (6, 32) if self.depth <= 32 else (3, 64)
        return 4 * (self.bits // self.grain) * -(-self.grain // wide) * -(-self.depth // deep) if self.depth > 1 else 0


def block_rams(cfg: Config) -> float:
    """Blocks of 36 kbit, where half blocks count."""
    return sum(memory.blocks for memory in memories(cfg))


def of_pad(cfg: Config, pad: Scratchpad) -> list[Memory]:
    """Memories of a scratchpad, bank by bank, tables lane by lane."""
    if pad.name == "exp":  # each lane of a softmax has a copy of powers and one of shares
        return [Memory(pad.depth // 2, pad.width, pad.width)] * 2 * cfg.softmax
    if pad.name == "lut":  # each lane has a copy, a grain wide
        return [Memory(pad.depth * pad.width // pad.grain, pad.grain, pad.grain)] * cfg.lanes
    if pad.name == "book":  # a block RAM looks up two halves of the bytes of the bus
        return [Memory(pad.depth, pad.width, pad.width, book=True)] * cfg.bus_bytes
    return [Memory(pad.bank_depth, pad.width, pad.grain)] * pad.banks


def memories(cfg: Config) -> Iterator[Memory]:
    """Memories whose size depends on the Config: of scratchpads, the vector unit's ring and its queue to acc, and the
    queues of instructions and of the read ports."""
    lanes = 8 * cfg.lanes
    for pad in scratchpads(cfg).values():
        yield from of_pad(cfg, pad)
    if cfg.trace_depth:
        yield from [Memory(cfg.trace_depth, 32, 32)] * 2
    stage = vector_stages(cfg)
    yield Memory(ring_places(stage["add"] - stage["reduce"]), lanes, lanes, clocked=False)
    if cfg.int32:
        yield Memory(WRITEBACK_DEPTH, 4 * lanes, 4 * lanes, clocked=False)
    beat = 8 * cfg.bus_bytes
    held = beat + ERROR_BITS + 1
    yield from [Memory(READ_BUFFER_BEATS - 1, held, held)] * cfg.ports  # one more stands in a register
    yield Memory(FETCH_BURSTS * fetch_burst(cfg), beat + 1, beat + 1, clocked=False)
    for fmt in formats(cfg).values():
        yield Memory(cfg.queue_depth - 1, INDEX_BITS + fmt.width, INDEX_BITS + fmt.width)


def _blocks(depth: int, width: int, grain: int) -> float:
    """Blocks of 512 x 8 bytes to 4,096 x 1, or half of that across; a byte has nine bits and its own write enable.
    Deeper ones are 4,096 x 8 bits and less, without the ninth."""
    if depth > 4096:
        return -(-width * depth // (4096 * 8))
    nines, across = width // grain * -(-grain // 9), 4096 // max(512, depth)
    return -(-2 * nines // across) / 2
