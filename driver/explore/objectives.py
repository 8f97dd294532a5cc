"""What is wanted of a Config, as figures of which less is better."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from celosia.driver.explore.subject import Cost
from celosia.hw.config import Config
from celosia.hw.scratchpads import scratchpads

MAC_PJ = 0.2 + 0.1
"""An 8-bit product and a 32-bit sum, 45 nm, 0.9 V: M. Horowitz, Computing's energy problem, ISSCC 2014,
figure 1.1.9."""
SRAM_PJ = ((8 << 10, 10 / 8), (32 << 10, 20 / 8), (1 << 20, 100 / 8))
"""A byte of a memory of so many bytes, of 64 bits at once: the same figure."""
DRAM_PJ = 1300 / 8
"""A byte of DRAM: its lower end, 1.3 to 2.6 nJ for 64 bits."""


def sram_pj(size: int) -> float:
    """pJ for a byte of a memory of `size` bytes; between the published sizes it grows as a power of the size, none is
    below the first.

    >>> [round(sram_pj(size), 2) for size in (4096, 32 << 10, 16 << 10)]
    [1.25, 2.5, 1.77]
    """
    sizes, energies = zip(*SRAM_PJ)
    return float(np.exp(np.interp(np.log(size), np.log(sizes), np.log(energies))))


def energy_uj(cfg: Config, cost: Cost) -> float:
    """A proxy of the energy of an image in microjoules, to compare Configs with: no clock tree, no leakage, no FPGA."""
    pads = scratchpads(cfg)
    sizes = {name: pad.bytes for name, pad in pads.items()}
    gemm, vector = cost.busy["gemm"], cost.busy["vector"]
    read = gemm * sum(pads[name].entry_bytes * sram_pj(sizes[name]) for name in ("inp", "wgt"))
    passed = vector * cfg.lanes * (8 * sram_pj(sizes["acc"]) + sram_pj(sizes["out"]))  # a sum written and read: 8 bytes
    total = cost.macs * MAC_PJ + read + passed + cost.moved * DRAM_PJ
    return total / cost.images / 1e6


def objectives(
    cfg: Config, costs: Sequence[Cost], shares: Mapping[str, float], clock_mhz: float
) -> dict[str, float]:  # fmt: skip
    """All of OBJECTIVES for a Config on which the models cost so much, and which takes such shares of its device."""
    cycles = _mean([each.cycles / each.images for each in costs])
    run = _mean([each.cycles for each in costs])
    return {
        "cycles": cycles, "latency": run / clock_mhz / 1000, "period": cycles / clock_mhz / 1000,
        "area": 100 * sum(shares.values()) / len(shares), "energy": _mean([energy_uj(cfg, each) for each in costs]),
    }  # fmt: skip


def _mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))
