"""Count the memories of an accelerator as Yosys maps them on a Zynq-7000: to block RAM, LUTs or registers."""

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
    """Declaration of a memory.

    depth : entries.
    bits : bits of an entry.
    grain : smallest number of bits that a write changes.
    clocked : a read ends in a register, that of a block RAM or a flip-flop.
    dual_read : the memory is forced to block RAM and has two read ports, as the codebooks.
    """

    depth: int
    bits: int
    grain: int
    clocked: bool = True
    dual_read: bool = False

    @property
    def blocks(self) -> float:
        """Block RAMs of 36 kbit, in halves; 0 if Yosys maps the memory to LUTs.

        Yosys compares costs of its libraries: 8 for four LUTs of a RAM64M or RAM32M, 129 for half a block.

        >>> Memory(1024, 32, 32).blocks, Memory(512, 32, 32).blocks, Memory(127, 69, 69).blocks
        (1.0, 0.5, 1.0)
        >>> Memory(64, 256, 64).blocks, Memory(256, 8, 8).blocks, Memory(256, 2048, 128).blocks
        (0, 0, 30.0)
        """
        blocks = _count_block_rams(self.depth, self.bits, self.grain)
        if self.dual_read:
            return -(-self.bits // 18) / 2
        return 0 if self.depth <= 64 or 2 * self.luts < 257 * blocks else blocks

    @property
    def luts(self) -> int:
        """LUTs of the memory as distributed RAM: four hold 6 bits of 32 entries, or 3 bits of 64. One entry takes none.

        >>> Memory(15, 263, 263).luts, Memory(64, 64, 64).luts, Memory(128, 16, 8).luts, Memory(1, 69, 69).luts
        (176, 88, 48, 0)
        """
        bits_per_ram, entries_per_ram = (6, 32) if self.depth <= 32 else (3, 64)
        rams = self.bits // self.grain * -(-self.grain // bits_per_ram) * -(-self.depth // entries_per_ram)
        return 4 * rams if self.depth > 1 else 0


def block_rams(cfg: Config) -> float:
    """Return the block RAMs of 36 kbit of the accelerator of `cfg`, in halves."""
    return sum(memory.blocks for memory in memories(cfg))


def memories_of_pad(cfg: Config, pad: Scratchpad) -> list[Memory]:
    """Return the memories that make up scratchpad `pad`: its banks, or the copies that units have of it."""
    if pad.name == "exp":  # each lane of a softmax has a copy of powers and one of shares
        return [Memory(pad.depth // 2, pad.width, pad.width)] * 2 * cfg.softmax
    if pad.name == "lut":  # each lane has a copy, a grain wide
        return [Memory(pad.depth * pad.width // pad.grain, pad.grain, pad.grain)] * cfg.lanes
    if pad.name == "book":  # a block RAM looks up both nibbles of a byte of the bus
        return [Memory(pad.depth, pad.width, pad.width, dual_read=True)] * cfg.bus_bytes
    return [Memory(pad.bank_depth, pad.width, pad.grain)] * pad.banks


def memories(cfg: Config) -> Iterator[Memory]:
    """Yield every memory whose size depends on the Config.

    These are the scratchpads, the event trace, the delay and writeback queues of VECTOR, the read buffers, the buffer
    of fetch, and the instruction queues.
    """
    lane_bits = 8 * cfg.lanes
    for pad in scratchpads(cfg).values():
        yield from memories_of_pad(cfg, pad)
    if cfg.trace_depth:
        yield from [Memory(cfg.trace_depth, 32, 32)] * 2
    stage_number = vector_stages(cfg)
    yield Memory(ring_places(stage_number["add"] - stage_number["reduce"]), lane_bits, lane_bits, clocked=False)
    if cfg.int32:
        yield Memory(WRITEBACK_DEPTH, 4 * lane_bits, 4 * lane_bits, clocked=False)
    beat_bits = 8 * cfg.bus_bytes
    buffered_bits = beat_bits + ERROR_BITS + 1
    yield from [Memory(READ_BUFFER_BEATS - 1, buffered_bits, buffered_bits)] * cfg.ports  # one more is in a register
    yield Memory(FETCH_BURSTS * fetch_burst(cfg), beat_bits + 1, beat_bits + 1, clocked=False)
    for fmt in formats(cfg).values():
        yield Memory(cfg.queue_depth - 1, INDEX_BITS + fmt.width, INDEX_BITS + fmt.width)


def _count_block_rams(depth: int, width: int, grain: int) -> float:
    """Return the block RAMs of 36 kbit, in halves, for a memory of `depth` entries of `width` bits.

    A block holds 512 entries of 8 bytes, 1,024 of 4, and so on to 4,096 of 1; half a block holds half as many bytes in
    an entry. A byte has nine bits and its own write enable. Deeper memories take blocks of 4,096 x 8 bits.
    """
    if depth > 4096:
        return -(-width * depth // (4096 * 8))
    byte_columns, columns_per_block = width // grain * -(-grain // 9), 4096 // max(512, depth)
    return -(-2 * byte_columns // columns_per_block) / 2
