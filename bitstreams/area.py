"""What an accelerator takes of a Zynq-7000, without running Yosys.

Block RAM, DSP blocks, distributed RAM and adders follow from what is declared; what is left of LUTs and flip-flops from
a model that `python -m benchmarks.area` fits to Configs that were synthesised (area.json).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from celosia.bitstreams.synthesis import multipliers
from celosia.hw.axi import MAX_BURST
from celosia.hw.config import Config
from celosia.hw.isa import TABLE_SIZE, formats, instruction_bytes
from celosia.hw.layout import INDEX_BITS, grains, widths

MEASURED = Path(__file__).with_name("area.json")
PLANE_PRODUCTS = 2
"""DSP blocks for the sizes of planes in load and store."""
READ_QUEUE, BEAT_EXTRA = 127, 5
"""Beats in the queue of a read port, and bits of each beside its data."""
RING = 16
"""Places of the rings for what skips stages of the vector unit."""
PAIR_BITS = 17
"""Bits of the sum of two products, from which the array's adders go on."""
RANGED = (
    "batch", "block_in", "block_out", "bus_bytes", "inp_depth", "wgt_depth", "acc_depth", "vin_depth", "out_depth",
    "par_depth", "lut_count", "queue_depth", "taps", "tap_depth", "residual_cycles", "ports", "packed", "forward",
    "trace_depth",
)  # fmt: skip
"""Fields within whose range the model was measured, or not."""


@dataclass(frozen=True)
class Area:
    """What an accelerator takes. ram: blocks of 36 kbit. extrapolated: lut and ff are of a Config beyond those that
    were synthesised, or all but one of them, so that nobody knows how far they are off."""

    lut: int
    ff: int
    dsp: int
    ram: float
    extrapolated: bool


def estimate(cfg: Config) -> Area:
    """What Yosys would count for a xc7z020: dsp and ram as declared, lut and ff by the model, within `error` of it
    unless `extrapolated`.

    >>> from celosia.hw.config import PRESETS
    >>> estimate(PRESETS["tiny"]).ram, estimate(PRESETS["tiny"]).extrapolated
    (10.5, False)
    """
    known, parts = _known(), features(cfg)
    lut, ff = (
        round(declared + sum(known[name][part] * amount for part, amount in parts.items()))
        for name, declared in counted(cfg).items()
    )
    return Area(lut, ff, multipliers(cfg) + PLANE_PRODUCTS, block_rams(cfg), not covers(_rows(), cfg, spare=1))


def error() -> tuple[float, float, int]:
    """The largest error of lut and of ff, of Configs that the model did not know, and of how many."""
    known = _known()
    return known["error"]["lut"], known["error"]["ff"], len(known["measured"])


@cache
def _known() -> dict[str, Any]:
    return dict(json.loads(MEASURED.read_text(encoding="utf-8")))


@cache
def _rows() -> tuple[Config, ...]:
    return tuple(Config.from_dict(dict(row["set"])) for row in _known()["measured"])


def features(cfg: Config) -> dict[str, float]:
    """What the LUTs and flip-flops that are not `counted` are proportional to."""
    return {
        "one": 1,
        "channels": cfg.bus_bytes * (cfg.ports + 1),
        "second port": cfg.ports - 1,
        "fields": sum(fmt.width for fmt in formats(cfg).values()),
        "lanes": cfg.lanes,
        "residual lanes": cfg.lanes / cfg.residual_cycles,
        "taps": cfg.lanes * cfg.taps,
        "forward": cfg.forward * (cfg.inp_bytes + cfg.lanes),
    }


def counted(cfg: Config) -> dict[str, float]:
    """LUTs and flip-flops of what is declared: distributed RAM, the array's adders, and selections by address."""
    distributed = [memory for memory in memories(cfg) if not memory.blocks]
    sums = cfg.lanes * (32 + _tree(cfg.block_in))
    banks = 1 << (cfg.taps - 1).bit_length() if cfg.taps else 1
    ways = min(cfg.bus_bytes, TABLE_SIZE) - 1 + cfg.taps * (banks - 1)  # of a LUT as a selection of one bit out of four
    selected = 8 * cfg.lanes * ways / 3
    widened = 32 * min(cfg.bus_bytes, cfg.piece_bytes)
    word = instruction_bytes(cfg)
    return {
        "lut": sum(memory.luts for memory in distributed) + sums + selected + widened,
        "ff": sum(memory.bits for memory in distributed if memory.clocked) + sums
        + 8 * (cfg.inp_bytes + cfg.wgt_bytes + word * (word >= cfg.bus_bytes)),
    }  # fmt: skip


def _tree(terms: int) -> int:
    """Bits of the adders behind the pairs of `terms` products.

    >>> _tree(2), _tree(4), _tree(8)
    (0, 18, 55)
    """
    levels = range(1, terms.bit_length() - 1)
    return sum((terms >> (level + 1)) * (PAIR_BITS + level) for level in levels)


def covers(measured: Sequence[Config], cfg: Config, spare: int = 0) -> bool:
    """Whether each field of `cfg` is within those of `measured`, also without any `spare` of them."""
    ranges = _ranges(tuple(measured), spare)
    return all(low <= getattr(cfg, name) <= high for name, (low, high) in ranges.items())


@cache
def _ranges(measured: tuple[Config, ...], spare: int) -> dict[str, tuple[int, int]]:
    values = {name: sorted(getattr(each, name) for each in measured) for name in RANGED}
    return {name: (found[spare], found[-1 - spare]) for name, found in values.items()}


# Memories ---------------------------------------------------------------------------------------------------------


class Memory(NamedTuple):
    """A memory as it is declared. grain: bits that are written on their own. clocked: its reads are registers, those of
    block RAM or flip-flops."""

    depth: int
    bits: int
    grain: int
    clocked: bool = True

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
    """Blocks of 36 kbit, of which half ones count."""
    return sum(memory.blocks for memory in memories(cfg))


def memories(cfg: Config) -> Iterator[Memory]:
    """Those whose size depends on the Config: scratchpads bank by bank, tables lane by lane, the vector unit's rings,
    and the queues of instructions and of the read ports."""
    width, grain, lanes = widths(cfg), grains(cfg), 8 * cfg.lanes
    banks = 1 << (cfg.taps - 1).bit_length() if cfg.taps else 1
    yield Memory(cfg.inp_depth, width["inp"], grain["inp"])
    yield Memory(cfg.wgt_depth, width["wgt"], grain["wgt"])
    yield from [Memory(cfg.acc_depth // 2, width["acc"], grain["acc"])] * 2
    yield from [Memory(cfg.vin_depth // banks, width["vin"], grain["vin"])] * banks
    yield Memory(cfg.out_depth, width["out"], width["out"])
    yield Memory(cfg.par_depth, width["par"], grain["par"])
    if cfg.taps:
        yield Memory(cfg.tap_depth, width["tap"], grain["tap"])
    if cfg.trace_depth:
        yield from [Memory(cfg.trace_depth, 32, 32)] * 2
    row = grain["lut"]
    yield from [Memory(cfg.lut_count * 8 * TABLE_SIZE // row, row, row)] * cfg.lanes
    yield from (Memory(RING, bits, bits, clocked=False) for bits in (lanes, 4 * lanes))
    beat = 8 * cfg.bus_bytes
    yield from [Memory(READ_QUEUE, beat + BEAT_EXTRA, beat + BEAT_EXTRA)] * cfg.ports
    fetched = 4 * min(MAX_BURST, 2 * max(1, instruction_bytes(cfg) // cfg.bus_bytes))
    yield Memory(fetched, beat + 1, beat + 1, clocked=False)
    for fmt in formats(cfg).values():
        yield Memory(cfg.queue_depth - 1, INDEX_BITS + fmt.width, INDEX_BITS + fmt.width)


def _blocks(depth: int, width: int, grain: int) -> float:
    """Blocks of 512 x 8 bytes to 4,096 x 1, or half of that across; a byte has nine bits and its own write enable.
    Deeper ones are 4,096 x 8 bits and less, without the ninth."""
    if depth > 4096:
        return -(-width * depth // (4096 * 8))
    nines, across = width // grain * -(-grain // 9), 4096 // max(512, depth)
    return -(-2 * nines // across) / 2
