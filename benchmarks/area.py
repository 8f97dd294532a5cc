"""python -m benchmarks.area [--synthesise N --seed S]: the model of LUTs and flip-flops in bitstreams/area.json.

Fits the features of `celosia.bitstreams.area` to the Configs in the file, which Yosys counted, and prints how far each
is off where the model does not know it. `--synthesise` first counts N more, drawn at random: a minute or more each on a
free core. It prints what the model said of each before it knew it, and writes the file after each.

Rows that are `before` were counted on hardware whose paths were longer: they tell what fields cost, and the rows since
then what registers have come in, in all and for each lane.
"""

from __future__ import annotations

import argparse
import json
import random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.bitstreams import area
from celosia.bitstreams.devices import DEVICES
from celosia.bitstreams.synthesis import usage
from celosia.compiler.files import write_text
from celosia.hw.config import Config, ConfigError

SPACE: dict[str, tuple[Any, ...]] = {
    "batch": (1, 1, 2, 4), "block_in": (2, 4, 8, 16), "block_out": (2, 4, 8, 16), "bus_bytes": (4, 8, 16, 32),
    "inp_depth": (64, 256, 1024, 4096), "wgt_depth": (32, 128, 512, 2048), "acc_depth": (64, 256, 1024, 4096),
    "vin_depth": (64, 256, 1024, 4096), "out_depth": (32, 128, 512, 2048), "par_depth": (8, 32, 64, 128, 256),
    "lut_count": (1, 2, 4, 8), "queue_depth": (4, 8, 16, 32, 64), "packed": (True, True, False),
    "taps": (0, 1, 2, 3, 4, 5), "tap_depth": (16, 64, 256, 1024), "forward": (False, True),
    "residual_cycles": (1, 2, 4), "ports": (1, 1, 2),
}  # fmt: skip
"""What Configs are drawn from."""
MOST_LANES, MOST_PRODUCTS = 8, 64
"""Of those drawn, for Yosys takes minutes for larger ones."""
RESOURCES = ("lut", "ff")
SINCE = {"one": "one since", "lanes": "lanes since"}
"""What has come in for every Config, and for each lane, by the feature to which it is added."""
Row = dict[str, Any]


def drawn(generator: random.Random) -> dict[str, Any]:
    """Fields of a Config."""
    while True:
        fields = {name: generator.choice(values) for name, values in SPACE.items()}
        try:
            cfg = Config(**fields)
        except ConfigError:
            continue
        if cfg.lanes <= MOST_LANES and cfg.macs_per_cycle <= MOST_PRODUCTS:
            return fields


def config(row: Row) -> Config:
    return Config.from_dict(dict(row["set"]))


def _features(row: Row) -> dict[str, float]:
    found = area.features(config(row))
    return found | {since: found[name] * ("before" not in row) for name, since in SINCE.items()}


def fit(rows: list[Row], resource: str) -> dict[str, float]:
    """The model with the smallest sum of squared relative errors, beside what is `area.counted`: of each feature, what
    one of it takes, at least 0."""
    found = [_features(row) for row in rows]
    counts = np.array([row[resource] for row in rows], float)
    matrix = np.array([list(each.values()) for each in found]) / counts[:, None]
    left = 1 - np.array([area.counted(config(row))[resource] for row in rows]) / counts
    return dict(zip(found[0], (round(float(value), 2) for value in _not_negative(matrix, left))))


def _not_negative(matrix: NDArray[np.float64], wanted: NDArray[np.float64]) -> NDArray[np.float64]:
    """Least squares of matrix @ x = wanted without negative x: the most negative one becomes 0 until there is none."""
    kept = list(range(matrix.shape[1]))
    while True:
        solved, *_ = np.linalg.lstsq(matrix[:, kept], wanted, rcond=None)
        if solved.min() >= 0:
            x = np.zeros(matrix.shape[1])
            x[kept] = solved
            return x
        kept.pop(int(solved.argmin()))


def said(model: dict[str, float], row: Row, resource: str) -> float:
    """What `model` says of a row."""
    return area.counted(config(row))[resource] + sum(model[name] * value for name, value in _features(row).items())


def errors(rows: list[Row], resource: str) -> list[float | None]:
    """For each row, how far the model that is fitted to the others is off, as a share of what was counted; None where
    it is beyond the others, so that the model would extrapolate, or what has come in since would be unknown."""
    found: list[float | None] = []
    for number, row in enumerate(rows):
        others = rows[:number] + rows[number + 1 :]
        told = sum("before" not in each for each in others) >= len(SINCE)
        inside = told and area.covers([config(each) for each in others], config(row))
        found.append(said(fit(others, resource), row, resource) / row[resource] - 1 if inside else None)
    return found


def fitted(rows: list[Row]) -> dict[str, Any]:
    """What area.json holds."""
    models = {}
    for name in RESOURCES:
        model = fit(rows, name)
        since = {feature: model.pop(added) for feature, added in SINCE.items()}
        models[name] = {feature: round(value + since.get(feature, 0), 2) for feature, value in model.items()}
    worst = {name: round(max(abs(off) for off in errors(rows, name) if off is not None), 3) for name in RESOURCES}
    return {"measured": rows, **models, "error": worst}


def synthesised(fields: dict[str, Any]) -> Row:
    used = usage(Config.from_dict(fields), DEVICES["xc7z020"], print)
    return {"set": fields, "lut": used.lut, "ff": used.ff, "dsp": used.dsp, "ram": used.ram}


def compared(row: Row) -> str:
    """A synthesised Config and what the model in the file says of it."""
    found = area.estimate(config(row))
    shares = ", ".join(f"{name} {row[name]:,} ({getattr(found, name) / row[name] - 1:+.1%})" for name in RESOURCES)
    blocks = ", ".join(f"{name} {row[name]} ({getattr(found, name) - row[name]:+g})" for name in ("dsp", "ram"))
    return f"{shares}, {blocks}{', extrapolated' if found.extrapolated else ''}: {row['set']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--synthesise", type=int, default=0, metavar="N", help="count N Configs more")
    parser.add_argument("--seed", type=int, default=0, help="of those that are drawn")
    options = parser.parse_args()
    rows: list[Row] = json.loads(area.MEASURED.read_text(encoding="utf-8"))["measured"]
    generator, known = random.Random(options.seed), rows.copy()
    for _ in range(options.synthesise):
        row = synthesised(drawn(generator))
        print(compared(row))
        if config(row) not in [config(each) for each in rows if "before" not in each]:
            known.append(row)
            write_text(area.MEASURED, json.dumps(fitted(known), indent=1) + "\n")
    model = fitted(known)
    write_text(area.MEASURED, json.dumps(model, indent=1) + "\n")
    for name in RESOURCES:
        print(f"{name}: {model[name]}")
        for row, off in zip(known, errors(known, name)):
            told = "outside" if off is None else f"{off:+7.1%}"
            print(
                f"  {row[name]:7,} {told:>7} where it is left out: {row['set']}{' before' if 'before' in row else ''}"
            )


if __name__ == "__main__":
    main()
