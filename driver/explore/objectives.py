"""Compute the objectives of an exploration; less is better in all."""

from __future__ import annotations

import math
from collections.abc import Sequence

from celosia.bitstreams.power import Cells, Power, estimate
from celosia.driver.explore.model_cost import Cost
from celosia.driver.explore.resource_use import Resources
from celosia.hw.boards.board import Board
from celosia.hw.spec.config import Config


def power_drawn(cfg: Config, cost: Cost, resources: Resources, board: Board, clock_mhz: float) -> Power:
    """Estimate the power in watts that the accelerator draws while it runs a model of this cost.

    LOAD and STORE also count as busy while they wait for memory.
    """
    cells = Cells.from_counts(cfg, resources.lut, resources.ff, resources.dsp, resources.ram)
    busy = {unit: cycles / cost.cycles for unit, cycles in cost.busy.items()}
    return estimate(cfg, cells, board, clock_mhz, busy)


def energy_mj(cfg: Config, cost: Cost, resources: Resources, board: Board, clock_mhz: float) -> float:
    """Estimate the energy of an image in millijoules: of the programmable logic and the device at rest, while it runs.

    Processors and DRAM are not included: a Config does not choose them.
    """
    milliseconds = cost.cycles / cost.images / clock_mhz / 1000
    return power_drawn(cfg, cost, resources, board, clock_mhz).fabric * milliseconds


def objectives(
    cfg: Config, costs: Sequence[Cost], resources: Resources, board: Board, clock_mhz: float
) -> dict[str, float]:  # fmt: skip
    """Return all of OBJECTIVES by name, for a Config with these costs of models and these resources on a board."""
    cycles = _geometric_mean([cost.cycles / cost.images for cost in costs])
    run_cycles = _geometric_mean([cost.cycles for cost in costs])
    shares = resources.shares(board.device)
    return {
        "cycles": cycles, "latency": run_cycles / clock_mhz / 1000, "period": cycles / clock_mhz / 1000,
        "area": 100 * sum(shares.values()) / len(shares),
        "energy": _geometric_mean([energy_mj(cfg, cost, resources, board, clock_mhz) for cost in costs]),
    }  # fmt: skip


def _geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))
