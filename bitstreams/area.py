"""Estimate of the Zynq-7000 resources of an accelerator, in milliseconds instead of the minutes of Yosys.

Block RAM, DSP blocks, distributed RAM and adders follow from declarations in hw/spec. The other LUTs and flip-flops
come from a linear model, fitted to samples: Configs whose resources Yosys has counted, those in area.json and a user's
own.
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

SAMPLES_FILE = Path(__file__).with_name("area.json")
"""Configs with the resources that Yosys counted for them."""
FAMILY = "xc7"
"""Family of the devices for which the samples were counted, as in Yosys' `-family`."""
FITTED_RESOURCES = ("lut", "ff")
"""Resources that the fitted model estimates; the others follow from declarations."""
PLANE_PRODUCTS = 2
"""DSP blocks that multiply the sizes of planes: one in LOAD, one in STORE."""
PAIR_BITS = 17
"""Bits of the sum of two int8 products, the operands of the array's adder trees."""
RANGED_FIELDS = (
    "batch", "block_in", "block_out", "bus_bytes", "inp_depth", "wgt_depth", "acc_depth", "vin_depth", "out_depth",
    "par_depth", "lut_count", "queue_depth", "taps", "tap_depth", "residual_cycles", "ports", "packed", "forward",
    "trace_depth", "alu", "int32", "pump", "softmax", "weight_bits", "sums", "norm",
)  # fmt: skip
"""Fields of a Config that must lie within the range of the samples; beyond it an estimate is an extrapolation."""


@dataclass(frozen=True)
class Area:
    """Resources of an accelerator.

    lut, ff : LUTs and flip-flops.
    dsp : DSP blocks.
    ram : block RAMs of 36 kbit; halves count.
    extrapolated : a field of the Config is beyond the samples, or beyond all but one, so that the error of lut and
        ff is unknown.
    """

    lut: int
    ff: int
    dsp: int
    ram: float
    extrapolated: bool


@dataclass(frozen=True)
class AreaSample:
    """A Config and the resources that Yosys counted for it on an xc7z020; fields as in `Area`."""

    cfg: Config
    lut: int
    ff: int
    dsp: int
    ram: float

    @staticmethod
    def from_json(row: dict[str, Any]) -> AreaSample:
        """Build a sample from the dictionary that `to_json` has returned."""
        return AreaSample(Config.from_dict(dict(row["set"])), row["lut"], row["ff"], row["dsp"], row["ram"])

    def to_json(self) -> dict[str, Any]:
        """Return the sample as a dictionary for JSON, without the Config's name."""
        fields = {name: value for name, value in self.cfg.to_dict().items() if name != "name"}
        return {"set": fields, "lut": self.lut, "ff": self.ff, "dsp": self.dsp, "ram": self.ram}


class AreaModel:
    """Linear model of LUTs and flip-flops, fitted to samples (`rows`)."""

    def __init__(self, rows: Iterable[AreaSample]) -> None:
        self.rows = tuple(rows)

    def estimate(self, cfg: Config) -> Area:
        """Estimate what Yosys would count for `cfg` on an xc7z020.

        dsp and ram follow from declarations; lut and ff are within `error` of Yosys' count unless `extrapolated`.
        """
        lut, ff = (round(self.predict(cfg, resource)) for resource in FITTED_RESOURCES)
        outside = not is_within_range([row.cfg for row in self.rows], cfg, spare=1)
        return Area(lut, ff, multipliers(cfg) + PLANE_PRODUCTS, block_rams(cfg), outside)

    def predict(self, cfg: Config, resource: str) -> float:
        """Predict the LUTs ("lut") or flip-flops ("ff") of a Config."""
        costs = self.costs[resource]
        return declared_area(cfg)[resource] + sum(costs[name] * value for name, value in features(cfg).items())

    @cached_property
    def costs(self) -> dict[str, dict[str, float]]:
        """Fitted coefficients: for each resource, the amount for each feature of value 1."""
        return {resource: self._fit(resource) for resource in FITTED_RESOURCES}

    def _fit(self, resource: str) -> dict[str, float]:
        """Fit the coefficients of a resource: least squares of the relative errors, none negative."""
        samples = [features(row.cfg) for row in self.rows]
        counts = np.array([getattr(row, resource) for row in self.rows], float)
        matrix = np.array([list(sample.values()) for sample in samples]) / counts[:, None]
        target = 1 - np.array([declared_area(row.cfg)[resource] for row in self.rows]) / counts
        return dict(zip(samples[0], map(float, _nonnegative_least_squares(matrix, target))))

    @cached_property
    def errors(self) -> list[dict[str, float] | None]:
        """Leave-one-out errors: for each sample, the relative error of a model fitted to all others, by resource.

        None for a sample beyond the range of the others, for which that model would extrapolate.
        """
        return [self._leave_one_out_error(number) for number in range(len(self.rows))]

    def _leave_one_out_error(self, number: int) -> dict[str, float] | None:
        """Return the element of `errors` for sample `number`."""
        row, others = self.rows[number], self.rows[:number] + self.rows[number + 1 :]
        if not is_within_range([other.cfg for other in others], row.cfg):
            return None
        model = AreaModel(others)
        return {
            resource: model.predict(row.cfg, resource) / getattr(row, resource) - 1 for resource in FITTED_RESOURCES
        }

    @property
    def error(self) -> dict[str, float]:
        """The largest absolute value of `errors`, by resource."""
        return {resource: max(abs(error[resource]) for error in self.errors if error) for resource in FITTED_RESOURCES}


def _nonnegative_least_squares(matrix: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """Solve matrix [m, n] @ x [n] = target [m] by least squares, x >= 0.

    While an element of the solution is negative, the most negative one is set to 0 and its column left out.
    """
    columns = list(range(matrix.shape[1]))
    while True:
        solution, *_ = np.linalg.lstsq(matrix[:, columns], target, rcond=None)
        if solution.min() >= 0:
            x = np.zeros(matrix.shape[1])
            x[columns] = solution
            return x
        columns.pop(int(solution.argmin()))


@cache
def shipped_model() -> AreaModel:
    """Return the model that is fitted to the samples in area.json.

    >>> from celosia.hw.spec.config import PRESETS
    >>> shipped_model().estimate(PRESETS["tiny"]).ram, shipped_model().estimate(PRESETS["tiny"]).extrapolated
    (10.5, False)
    """
    return AreaModel(
        AreaSample.from_json(row) for row in json.loads(SAMPLES_FILE.read_text(encoding="utf-8"))["measured"]
    )


def features(cfg: Config) -> dict[str, float]:
    """Return the features of `cfg`, by name, on which LUTs and flip-flops beyond `declared_area` depend linearly."""
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


def declared_area(cfg: Config) -> dict[str, float]:
    """Return the LUTs and flip-flops that follow from declarations, by resource.

    These are distributed RAM, the array's adders, multiplexers that an address selects, and clock pumping.
    """
    distributed = [memory for memory in memories(cfg) if not memory.blocks]
    adder_bits = cfg.lanes * (32 + _adder_tree_bits(cfg.block_in))
    pads = scratchpads(cfg)
    selected_inputs = pads["lut"].grain // 8 - 1 + cfg.taps * (pads["vin"].banks - 1)
    multiplexer_luts = 8 * cfg.lanes * selected_inputs / 3  # a LUT selects one bit out of four
    widening_luts = cfg.int32 * 32 * min(cfg.bus_bytes, cfg.piece_bytes)
    word_bytes = instruction_bytes(cfg)
    pump = _pump_area(cfg) if cfg.pump == 2 else {"lut": 0, "ff": 0}
    return {
        "lut": sum(memory.luts for memory in distributed) + adder_bits + multiplexer_luts + widening_luts + pump["lut"],
        "ff": sum(memory.bits for memory in distributed if memory.clocked) + adder_bits + pump["ff"]
        + 8 * (pads["inp"].entry_bytes + pads["wgt"].entry_bytes + word_bytes * (word_bytes >= cfg.bus_bytes)),
    }  # fmt: skip


def _pump_area(cfg: Config) -> dict[str, float]:
    """Return the LUTs and flip-flops between the array's two clocks with pump = 2, by resource.

    They hold weights, factors and their corrections, select a factor for each half of a cycle, and hold sums of two
    products.

    >>> from dataclasses import replace
    >>> from celosia.hw.spec.config import PRESETS
    >>> _pump_area(replace(PRESETS["tiny"], pump=2))  # Yosys counts 6 flip-flops more, which all pairs share
    {'lut': 16, 'ff': 300}
    """
    inp, wgt = (8 * scratchpads(cfg)[name].entry_bytes for name in ("inp", "wgt"))
    factors = 5 * inp // 8 if cfg.packed else inp
    return {"lut": inp // 2, "ff": wgt + inp // 2 + factors + PAIR_BITS * cfg.macs_per_cycle // 2}


def _adder_tree_bits(terms: int) -> int:
    """Return the bits of all adders of a tree that adds `terms` products, without those that add pairs of products.

    >>> _adder_tree_bits(2), _adder_tree_bits(4), _adder_tree_bits(8)
    (0, 18, 55)
    """
    levels = range(1, terms.bit_length() - 1)
    return sum((terms >> (level + 1)) * (PAIR_BITS + level) for level in levels)


def is_within_range(measured: Sequence[Config], cfg: Config, spare: int = 0) -> bool:
    """Return whether each of RANGED_FIELDS of `cfg` lies within its range in `measured`.

    spare: number of smallest and of largest values that do not count for the range.
    """
    ranges = _measured_range(tuple(measured), spare)
    return all(low <= getattr(cfg, name) <= high for name, (low, high) in ranges.items())


@cache
def _measured_range(measured: tuple[Config, ...], spare: int) -> dict[str, tuple[int, int]]:
    """Return the smallest and the largest value of each field in `measured`; arguments as of `is_within_range`."""
    values_of = {name: sorted(getattr(cfg, name) for cfg in measured) for name in RANGED_FIELDS}
    return {name: (values[spare], values[-1 - spare]) for name, values in values_of.items()}
