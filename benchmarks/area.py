"""python -m benchmarks.area [--synthesise N --seed S] [--config NAME|FILE ...]

Prints how far the model of LUTs and flip-flops is off for the Configs of bitstreams/area.json, which Yosys counted,
where it does not know them. `--synthesise` first counts N more, drawn at random, `--config` this one: a minute or more
each on a free core. It prints what the model said of each before it knew it, and adds them to the file.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from celosia.bitstreams import area
from celosia.bitstreams.area import FITTED_RESOURCES, AreaModel, AreaSample
from celosia.bitstreams.synthesis import measure_usage
from celosia.compiler.program.safe_files import write_text
from celosia.hw.boards.fpga import FPGAS
from celosia.hw.spec.config import Config, ConfigError

SPACE: dict[str, tuple[Any, ...]] = {
    "batch": (1, 1, 2, 4), "block_in": (2, 4, 8, 16), "block_out": (2, 4, 8, 16), "bus_bytes": (4, 8, 16, 32),
    "inp_depth": (64, 256, 1024, 4096), "wgt_depth": (32, 128, 512, 2048), "acc_depth": (64, 256, 1024, 4096),
    "vin_depth": (64, 256, 1024, 4096), "out_depth": (32, 128, 512, 2048), "par_depth": (8, 32, 64, 128, 256),
    "lut_count": (1, 2, 4, 8), "queue_depth": (4, 8, 16, 32, 64), "packed": (True, True, False),
    "taps": (0, 1, 2, 3, 4, 5), "tap_depth": (16, 64, 256, 1024), "forward": (False, True),
    "residual_cycles": (1, 2, 4), "ports": (1, 1, 2), "alu": (False, True), "int32": (False, True),
    "pump": (1, 1, 2),
}  # fmt: skip
"""What Configs are drawn from."""
MAX_LANES, MOST_PRODUCTS = 8, 64
"""Of those drawn, for Yosys takes minutes for larger ones."""
BLOCKS = ("dsp", "ram")


def drawn(generator: random.Random) -> Config:
    """A Config at random of SPACE, small enough to be synthesised."""
    while True:
        try:
            cfg = Config(**{name: generator.choice(values) for name, values in SPACE.items()})
        except ConfigError:
            continue
        if cfg.lanes <= MAX_LANES and cfg.macs_per_cycle <= MOST_PRODUCTS:
            return cfg


def synthesised(cfg: Config) -> AreaSample:
    """Count by Yosys what `cfg` takes on a xc7z020, in minutes. SynthesisError."""
    used = measure_usage(cfg, FPGAS["xc7z020"], print)
    return AreaSample(replace(cfg, name="custom"), used.lut, used.ff, used.dsp, used.ram)


def compared(row: AreaSample, model: AreaModel) -> str:
    """A Config that was counted, and what a model says of it."""
    found = model.estimate(row.cfg)
    shares = ", ".join(
        f"{name} {getattr(row, name):,} ({getattr(found, name) / getattr(row, name) - 1:+.1%})"
        for name in FITTED_RESOURCES
    )
    blocks = ", ".join(
        f"{name} {getattr(row, name)} ({getattr(found, name) - getattr(row, name):+g})" for name in BLOCKS
    )
    return f"{shares}, {blocks}{', extrapolated' if found.extrapolated else ''}: {row.to_json()['set']}"


def write(rows: Sequence[AreaSample]) -> None:
    """Write what was counted over the file that comes with Celosia."""
    lines = ",\n".join("  " + json.dumps(row.to_json()) for row in rows)
    write_text(area.SAMPLES_FILE, f'{{"measured": [\n{lines}\n]}}\n')


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--synthesise", type=int, default=0, metavar="N", help="count N Configs more")
    parser.add_argument("--seed", type=int, default=0, help="of those that are drawn")
    parser.add_argument("--config", action="append", default=[], metavar="NAME|FILE", help="count this one")
    options = parser.parse_args()
    model, generator = area.shipped_model(), random.Random(options.seed)
    rows = list(model.rows)
    more = [Config.load(each) for each in options.config]
    more += [drawn(generator) for _ in range(options.synthesise)]
    for cfg in more:
        row = synthesised(cfg)
        print(compared(row, model), flush=True)
        if row not in rows:
            rows.append(row)
            write(rows)
    model = AreaModel(rows)
    for name in FITTED_RESOURCES:
        print(f"{name}: { {part: round(cost, 2) for part, cost in model.costs[name].items()} }")
        for row, off in zip(rows, model.errors):
            told = "outside" if off is None else f"{off[name]:+7.1%}"
            print(f"  {getattr(row, name):7,} {told:>7} where it is left out: {row.to_json()['set']}")


if __name__ == "__main__":
    main()
