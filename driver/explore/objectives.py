"""Objectives of an exploration, as figures of which less is better."""

from __future__ import annotations

import math
from collections.abc import Sequence

from celosia.bitstreams.power import Cells, Power, estimate
from celosia.driver.explore.resource_use import Resources
from celosia.driver.explore.subject import Cost
from celosia.hw.boards.board import Board
from celosia.hw.spec.config import Config


def power_drawn(cfg: Config, cost: Cost, resources: Resources, board: Board, clock_mhz: float) -> Power:
    """Power in watts that the accelerator draws while it runs a model of a known cost. LOAD and STORE count as busy
    while they wait for memory, too."""
    cells = Cells.from_counts(cfg, resources.lut, resources.ff, resources.dsp, resources.ram)
    busy = {unit: cycles / cost.cycles for unit, cycles in cost.busy.items()}
    return estimate(cfg, cells, board, clock_mhz, busy)


def energy_mj(cfg: Config, cost: Cost, resources: Resources, board: Board, clock_mhz: float) -> float:
    """Energy of an image in millijoules: of the programmable logic, and of the device at rest, for the time that it
    takes. Processors and DRAM, which a Config does not choose, are not included."""
    milliseconds = cost.cycles / cost.images / clock_mhz / 1000
    return power_drawn(cfg, cost, resources, board, clock_mhz).fabric * milliseconds


def objectives(
    cfg: Config, costs: Sequence[Cost], resources: Resources, board: Board, clock_mhz: float
) -> dict[str, float]:  # fmt: skip
    """All of OBJECTIVES for a Config with these costs of models and this use of a board's device."""
    cycles = _mean([cost.cycles / cost.images for cost in costs])
    run = _mean([cost.cycles for cost in costs])
    shares = resources.shares(board.device)
    return {
        "cycles": cycles, "latency": run / clock_mhz / 1000, "period": cycles / clock_mhz / 1000,
        "area": 100 * sum(shares.values()) / len(shares),
        "energy": _mean([energy_mj(cfg, cost, resources, board, clock_mhz) for cost in costs]),
    }  # fmt: skip


def _mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))
