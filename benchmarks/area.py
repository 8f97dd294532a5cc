"""python -m benchmarks.area [--synthesise]: the model of LUTs and flip-flops in bitstreams/area.json, and its errors.

Fits the features of `celosia.bitstreams.area` to the Configs in the file, which Yosys counted. `--synthesise` first
counts those of MORE that are not there: minutes each.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.bitstreams import area
from celosia.bitstreams.devices import DEVICES
from celosia.bitstreams.synthesis import usage
from celosia.compiler.files import write_text
from celosia.hw.config import Config

TINY: dict[str, Any] = {
    "block_in": 4, "block_out": 4, "inp_depth": 1024, "wgt_depth": 256, "acc_depth": 512, "vin_depth": 512,
    "out_depth": 256, "par_depth": 32, "taps": 3, "tap_depth": 64, "forward": True, "residual_cycles": 2,
}  # fmt: skip
MORE: tuple[dict[str, Any], ...] = tuple(
    TINY | change for change in (
        {}, {"taps": 0}, {"residual_cycles": 1}, {"forward": False}, {"ports": 2}, {"bus_bytes": 16}, {"block_in": 8},
        {"block_in": 8, "block_out": 8}, {"block_in": 16},
        {"block_in": 16, "block_out": 16, "taps": 0, "bus_bytes": 16},
    )
)  # fmt: skip
"""Fields that differ from the default ones."""
RESOURCES = ("lut", "ff")
Row = dict[str, Any]


def fit(rows: list[Row], resource: str) -> dict[str, float]:
    """The model with the smallest sum of squared relative errors: of each feature, what one of it takes, at least 0."""
    found = [area.features(Config.from_dict(row["set"])) for row in rows]
    counted = np.array([row[resource] for row in rows], float)
    matrix = np.array([list(each.values()) for each in found]) / counted[:, None]
    return dict(zip(found[0], (round(float(value), 2) for value in _not_negative(matrix))))


def _not_negative(matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least squares of matrix @ x = 1 without negative x: the most negative one becomes 0 until there is none."""
    kept = list(range(matrix.shape[1]))
    while True:
        solved, *_ = np.linalg.lstsq(matrix[:, kept], np.ones(len(matrix)), rcond=None)
        if solved.min() >= 0:
            x = np.zeros(matrix.shape[1])
            x[kept] = solved
            return x
        kept.pop(int(solved.argmin()))


def errors(rows: list[Row], resource: str) -> list[float | None]:
    """For each row, how far the model that is fitted to the others is off, as a share of what was counted; None where
    they do not cover it, so that the model would say nothing."""
    found: list[float | None] = []
    for number, row in enumerate(rows):
        others, cfg = rows[:number] + rows[number + 1 :], Config.from_dict(row["set"])
        if not area.covers([Config.from_dict(each["set"]) for each in others], cfg):
            found.append(None)
            continue
        model = fit(others, resource)
        made = sum(model[name] * value for name, value in area.features(cfg).items())
        found.append(made / row[resource] - 1)
    return found


def fitted(rows: list[Row]) -> dict[str, Any]:
    """What area.json holds."""
    worst = {name: round(max(abs(off) for off in errors(rows, name) if off is not None), 3) for name in RESOURCES}
    return {"measured": rows, **{name: fit(rows, name) for name in RESOURCES}, "error": worst}


def synthesised(fields: dict[str, Any]) -> Row:
    used = usage(Config.from_dict(fields), DEVICES["xc7z020"], print)
    return {"set": fields, "lut": used.lut, "ff": used.ff, "dsp": used.dsp, "ram": used.ram}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--synthesise", action="store_true", help="count what was not counted yet")
    options = parser.parse_args()
    rows: list[Row] = json.loads(area.MEASURED.read_text(encoding="utf-8"))["measured"]
    if options.synthesise:
        known = [Config.from_dict(row["set"]) for row in rows]
        rows += [synthesised(fields) for fields in MORE if Config.from_dict(fields) not in known]
    write_text(area.MEASURED, json.dumps(fitted(rows), indent=1) + "\n")
    for name in RESOURCES:
        print(f"{name}: {fit(rows, name)}")
        for row, off in zip(rows, errors(rows, name)):
            told = "outside" if off is None else f"{off:+7.1%}"
            print(f"  {row[name]:7,} {told:>7} where it is left out: {row['set']}")


if __name__ == "__main__":
    main()
