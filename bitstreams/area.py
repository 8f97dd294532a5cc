"""What an accelerator takes of a Zynq-7000, without running Yosys.

Block RAM and DSP blocks follow from what is declared, LUTs and flip-flops from a model that `python -m benchmarks.area`
fits to Configs that were synthesised (area.json).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from celosia.bitstreams.synthesis import multipliers
from celosia.hw.config import Config

MEASURED = Path(__file__).with_name("area.json")
PLANE_PRODUCTS = 2
"""DSP blocks for the sizes of planes in load and store."""
LUT_RAM_DEPTH = 64
"""Entries up to which Yosys makes a memory of LUTs."""
TABLE_BITS = 8 * 256
READ_QUEUE, BEAT_EXTRA = 127, 5
"""Beats in the queue of a read port, and bits of each beside its data."""


@dataclass(frozen=True)
class Area:
    """What an accelerator takes. lut, ff: None where no Config like it was synthesised. dsp; ram: blocks of 36 kbit."""

    lut: int | None
    ff: int | None
    dsp: int
    ram: float


def estimate(cfg: Config) -> Area:
    """What Yosys would count for a xc7z020: dsp and ram as for all measured Configs, lut and ff within `error`."""
    model, inside = _known(), _inside(cfg)
    lut, ff = (
        round(sum(model[name][key] * value for key, value in features(cfg).items())) if inside else None
        for name in ("lut", "ff")
    )
    return Area(lut, ff, multipliers(cfg) + PLANE_PRODUCTS, block_rams(cfg))


def error() -> tuple[float, float, int]:
    """The largest error of lut and of ff, of Configs that the model did not know, and of how many."""
    known = _known()
    return known["error"]["lut"], known["error"]["ff"], len(known["measured"])


@cache
def _known() -> dict[str, Any]:
    return dict(json.loads(MEASURED.read_text(encoding="utf-8")))


def features(cfg: Config) -> dict[str, float]:
    """What LUTs and flip-flops are proportional to."""
    return {
        "one": 1, "bus": cfg.bus_bytes, "second port": cfg.ports - 1, "products": cfg.macs_per_cycle,
        "lanes": cfg.lanes, "residual lanes": cfg.lanes / cfg.residual_cycles, "taps": cfg.lanes * cfg.taps,
    }  # fmt: skip


def covers(measured: Sequence[Config], cfg: Config) -> bool:
    """Whether each feature of `cfg` is among those of `measured`, and what is no feature is as it is in one of them."""
    ranges = [(name, [features(each)[name] for each in measured]) for name in features(cfg)]
    fixed = all(
        getattr(cfg, name) in {getattr(each, name) for each in measured} for name in ("packed", "batch", "trace_depth")
    )
    return fixed and all(min(values) <= features(cfg)[name] <= max(values) for name, values in ranges)


def _inside(cfg: Config) -> bool:
    """Whether the measured Configs cover `cfg`, also without any one of them: as far as `error` was measured."""
    rows = [Config.from_dict(dict(row["set"])) for row in _known()["measured"]]
    return all(covers([*rows[:number], *rows[number + 1 :]], cfg) for number in range(len(rows)))


# Block RAM --------------------------------------------------------------------------------------------------------


def block_rams(cfg: Config) -> float:
    """Blocks of 36 kbit, of which half ones count."""
    return sum(_blocks(*each) for each in memories(cfg))


def memories(cfg: Config) -> Iterator[tuple[int, int, int]]:
    """Entries, bits, and bits that are written on their own, of each memory that may be of block RAM: scratchpads bank
    by bank, tables lane by lane, and the queues of the read ports."""
    bus, piece, lanes = 8 * cfg.bus_bytes, 8 * cfg.piece_bytes, 8 * cfg.lanes
    banks = 1 << (cfg.taps - 1).bit_length() if cfg.taps else 1
    yield cfg.inp_depth, 8 * cfg.inp_bytes, min(bus, piece)
    yield cfg.wgt_depth, 8 * cfg.wgt_bytes, min(bus, 8 * cfg.wgt_bytes)
    yield from [(cfg.acc_depth // 2, 4 * lanes, 32)] * 2
    yield from [(cfg.vin_depth // banks, lanes, min(bus, piece))] * banks
    yield cfg.out_depth, lanes, lanes
    yield cfg.par_depth, 64 * cfg.block_out, min(bus, 64 * cfg.block_out)
    if cfg.taps:
        grain = min(bus, 8 * cfg.tap_bytes)
        yield cfg.tap_depth, -(-8 * cfg.taps * cfg.block_out // grain) * grain, grain
    if cfg.trace_depth:
        yield from [(cfg.trace_depth, 32, 32)] * 2
    row = min(bus, TABLE_BITS)
    yield from [(cfg.lut_count * TABLE_BITS // row, row, row)] * cfg.lanes
    yield from [(READ_QUEUE, bus + BEAT_EXTRA, bus + BEAT_EXTRA)] * cfg.ports


def _blocks(depth: int, width: int, grain: int) -> float:
    """Blocks of 512 x 8 bytes to 4,096 x 1, or half of that across; a byte has nine bits and its own write enable.
    Deeper ones are 4,096 x 8 bits and less, without the ninth.

    >>> _blocks(1024, 32, 32), _blocks(512, 32, 32), _blocks(64, 256, 64), _blocks(127, 69, 69), _blocks(256, 2048, 128)
    (1.0, 0.5, 0, 1.0, 30.0)
    """
    if depth <= LUT_RAM_DEPTH:
        return 0
    if depth > 4096:
        return -(-width * depth // (4096 * 8))
    nines, across = width // grain * -(-grain // 9), 4096 // max(512, depth)
    return -(-2 * nines // across) / 2
