"""Estimate of the resources of an accelerator on a Zynq-7000, without running Yosys.

Block RAM, DSP blocks, distributed RAM and adders follow from what is declared; what is left of LUTs and flip-flops from
a model that is fitted to Configs which Yosys has counted: those of area.json, and more where somebody has them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.bitstreams.memories import block_rams, memories
from celosia.bitstreams.synthesis import multipliers
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import formats, instruction_bytes
from celosia.hw.spec.scratchpads import scratchpads

MEASURED = Path(__file__).with_name("area.json")
FAMILY = "xc7"
"""Devices whose counts the model is made of."""
FITTED = ("lut", "ff")
PLANE_PRODUCTS = 2
"""DSP blocks for the sizes of planes in load and store."""
PAIR_BITS = 17
"""Bits of the sum of two products, from which the array's adders go on."""
RANGED = (
    "batch", "block_in", "block_out", "bus_bytes", "inp_depth", "wgt_depth", "acc_depth", "vin_depth", "out_depth",
    "par_depth", "lut_count", "queue_depth", "taps", "tap_depth", "residual_cycles", "ports", "packed", "forward",
    "trace_depth", "alu", "int32", "pump", "softmax", "weight_bits", "sums", "norm",
)  # fmt: skip
"""Fields within whose range the model was measured, or not."""


@dataclass(frozen=True)
class Area:
    """Resources of an accelerator. ram: blocks of 36 kbit. extrapolated: lut and ff are of a Config beyond those that
    were synthesised, or all but one of them, so that nobody knows how far they are off."""

    lut: int
    ff: int
    dsp: int
    ram: float
    extrapolated: bool


@dataclass(frozen=True)
class Counted:
    """A Config with Yosys' counts for a xc7z020."""

    cfg: Config
    lut: int
    ff: int
    dsp: int
    ram: float

    @staticmethod
    def from_json(row: dict[str, Any]) -> Counted:
        """Read rows that `to_json` wrote."""
        return Counted(Config.from_dict(dict(row["set"])), row["lut"], row["ff"], row["dsp"], row["ram"])

    def to_json(self) -> dict[str, Any]:
        """Return the row as a dictionary, without the Config's name."""
        fields = {name: value for name, value in self.cfg.to_dict().items() if name != "name"}
        return {"set": fields, "lut": self.lut, "ff": self.ff, "dsp": self.dsp, "ram": self.ram}


class Model:
    """Model of LUTs and flip-flops, fitted to counted Configs."""

    def __init__(self, rows: Iterable[Counted]) -> None:
        self.rows = tuple(rows)

    def estimate(self, cfg: Config) -> Area:
        """Estimate Yosys' counts for a xc7z020: dsp and ram as declared, lut and ff within `error` of it unless
        `extrapolated`."""
        lut, ff = (round(self.predicted(cfg, resource)) for resource in FITTED)
        outside = not covers([row.cfg for row in self.rows], cfg, spare=1)
        return Area(lut, ff, multipliers(cfg) + PLANE_PRODUCTS, block_rams(cfg), outside)

    def predicted(self, cfg: Config, resource: str) -> float:
        """LUTs or flip-flops of a Config."""
        costs = self.costs[resource]
        return counted(cfg)[resource] + sum(costs[name] * value for name, value in features(cfg).items())

    @cached_property
    def costs(self) -> dict[str, dict[str, float]]:
        """Cost of one of each feature, by resource."""
        return {resource: self._fit(resource) for resource in FITTED}

    def _fit(self, resource: str) -> dict[str, float]:
        """Fit costs, none below 0, with the smallest sum of squared relative errors beside what is `counted`."""
        feature_rows = [features(row.cfg) for row in self.rows]
        counts = np.array([getattr(row, resource) for row in self.rows], float)
        matrix = np.array([list(feature_row.values()) for feature_row in feature_rows]) / counts[:, None]
        left = 1 - np.array([counted(row.cfg)[resource] for row in self.rows]) / counts
        return dict(zip(feature_rows[0], map(float, _not_negative(matrix, left))))

    @cached_property
    def errors(self) -> list[dict[str, float] | None]:
        """Relative error of each resource of each row in a model fitted to the other rows; None where it is beyond the
        others, so that the model would extrapolate."""
        return [self._error(number) for number in range(len(self.rows))]

    def _error(self, number: int) -> dict[str, float] | None:
        row, other_rows = self.rows[number], self.rows[:number] + self.rows[number + 1 :]
        if not covers([other.cfg for other in other_rows], row.cfg):
            return None
        model = Model(other_rows)
        return {resource: model.predicted(row.cfg, resource) / getattr(row, resource) - 1 for resource in FITTED}

    @property
    def error(self) -> dict[str, float]:
        """Largest of `errors`, by resource."""
        return {resource: max(abs(off[resource]) for off in self.errors if off) for resource in FITTED}


def _not_negative(matrix: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least squares of matrix @ x = wanted without negative x: the most negative one becomes 0 until there is none."""
    columns = list(range(matrix.shape[1]))
    while True:
        solved, *_ = np.linalg.lstsq(matrix[:, columns], target, rcond=None)
        if solved.min() >= 0:
            x = np.zeros(matrix.shape[1])
            x[columns] = solved
            return x
        columns.pop(int(solved.argmin()))


@cache
def model() -> Model:
    """Model fitted to the Configs that are shipped.

    >>> from celosia.hw.spec.config import PRESETS
    >>> model().estimate(PRESETS["tiny"]).ram, model().estimate(PRESETS["tiny"]).extrapolated
    (10.5, False)
    """
    return Model(Counted.from_json(row) for row in json.loads(MEASURED.read_text(encoding="utf-8"))["measured"])


def features(cfg: Config) -> dict[str, float]:
    """Features that the LUTs and flip-flops that are not `counted` are proportional to."""
    return {
        "one": 1,
        "channels": cfg.bus_bytes * (cfg.ports + 1),
        "second port": cfg.ports - 1,
        "fields": sum(fmt.width for fmt in formats(cfg).values()),
        "lanes": cfg.lanes,
        "residual lanes": cfg.lanes / cfg.residual_cycles,
        "taps": cfg.lanes * cfg.taps,
        "forward": cfg.forward * (scratchpads(cfg)["inp"].entry_bytes + cfg.lanes),
        "alu": cfg.lanes * cfg.alu,
        "int32": cfg.lanes * cfg.int32,
    }


def counted(cfg: Config) -> dict[str, float]:
    """LUTs and flip-flops of declared parts: distributed RAM, the array's adders, and selections by address."""
    distributed = [memory for memory in memories(cfg) if not memory.blocks]
    sums = cfg.lanes * (32 + _tree(cfg.block_in))
    pads = scratchpads(cfg)
    ways = pads["lut"].grain // 8 - 1 + cfg.taps * (pads["vin"].banks - 1)
    selected = 8 * cfg.lanes * ways / 3  # a LUT selects one bit out of four
    widened = cfg.int32 * 32 * min(cfg.bus_bytes, cfg.piece_bytes)
    word = instruction_bytes(cfg)
    pump = _pumped(cfg) if cfg.pump == 2 else {"lut": 0, "ff": 0}
    return {
        "lut": sum(memory.luts for memory in distributed) + sums + selected + widened + pump["lut"],
        "ff": sum(memory.bits for memory in distributed if memory.clocked) + sums
        + 8 * (pads["inp"].entry_bytes + pads["wgt"].entry_bytes + word * (word >= cfg.bus_bytes)) + pump["ff"],
    }  # fmt: skip


def _pumped(cfg: Config) -> dict[str, float]:
    """Registers between the two clocks: weights, factors and their corrections, one of two factors for each half of a
    cycle, and sums of two products.

    >>> from dataclasses import replace
    >>> from celosia.hw.spec.config import PRESETS
    >>> _pumped(replace(PRESETS["tiny"], pump=2))    # as Yosys has them, but for 6 flip-flops that all pairs share
    {'lut': 16, 'ff': 300}
    """
    inp, wgt = (8 * scratchpads(cfg)[name].entry_bytes for name in ("inp", "wgt"))
    factors = 5 * inp // 8 if cfg.packed else inp
    return {"lut": inp // 2, "ff": wgt + inp // 2 + factors + PAIR_BITS * cfg.macs_per_cycle // 2}


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
    values = {name: sorted(getattr(cfg, name) for cfg in measured) for name in RANGED}
    return {name: (column[spare], column[-1 - spare]) for name, column in values.items()}
