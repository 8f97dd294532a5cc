"""Makes the records that come with Celosia: tunes networks for presets, and keeps what decides something.

    python -m benchmarks.shipped [--networks NAME,...] [--configs NAME,...] [--trials N]

Trials are kept in bench/tune, so that an interrupted run goes on where it was, and one with other networks tries again
only what is new. What is written was measured now: whole networks on the timing model, and each winner's bytes. With
`--trials 0` it measures again what was written before, as after a change of the timing model's version or of a preset.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from math import isfinite
from pathlib import Path

from benchmarks.rows import PRESETS
from benchmarks.tune import KEPT
from benchmarks.workloads import FOLDER_VARIABLE, WORKLOADS, Missing, models_folder
from celosia.compiler.compile import network_of
from celosia.compiler.tune.layer_trial import TIMED, LayerJob, Status, TrialResult, measure, pickled
from celosia.compiler.tune.network import (
    Network,
    Tuned,
    measure_network,
    network_key,
    network_measurer,
    network_schedule,
)
from celosia.compiler.tune.records import SHIPPED_FOLDER, Key, Records, schedule_of
from celosia.driver.tune.tune import tune

CONFIGS = PRESETS[1:]
NETWORKS = ("demo", "ds_cnn", "mobilenet_v2", "mobilenet_v2_160", "resnet18")
Lines = dict[Key, TrialResult]


def winners(network: Network, records: Records) -> Lines:
    """Cycles of the chains of layers that the search of blocks has timed, and the records that decide something in
    `network`: one for it, one for each workload, and one for the network without them."""
    found = records.best(network.cfg, network.name, network_measurer(TIMED))
    lines: Lines = {
        Key.of(network.cfg, name, [], TIMED.version): TrialResult(Status.OK, int(cycles))
        if isfinite(cycles)
        else TrialResult(Status.REFUSED)
        for name, cycles in network.planner.timed.items()
    }
    schedule = _of_layers(network, records) if found is None else network_schedule(found[0])
    if not schedule:
        return lines
    tuned = _needed(network, schedule)
    for each in network.occurrences():
        if each.workload in tuned:
            point = tuned[each.workload]
            result = measure(LayerJob(network.cfg, pickled(each.layer), point))
            if result.status != Status.OK:
                raise RuntimeError(f"{each.layer.name} on {network.cfg.name} is {result.status}: {result.detail}")
            lines[Key.of(network.cfg, each.workload, point, TIMED.version)] = result
    if tuned:
        for decided in (tuned, {}):  # and what it takes without them, so that nobody need find out again
            lines[network_key(network, decided, TIMED)] = measure_network(network, decided, TIMED)
    return lines


def _of_layers(network: Network, records: Records) -> Tuned:
    """The decisions of records of its layers, for a network that has no record since its layers have changed."""
    bests = {each.workload: records.best(network.cfg, each.workload, TIMED.version) for each in network.occurrences()}
    return {workload: schedule_of(best[0].schedule) for workload, best in bests.items() if best is not None}


def _needed(network: Network, tuned: Tuned) -> Tuned:
    """Those of `tuned` without which the whole takes more cycles; none where it takes fewer without them all."""
    best = measure_network(network, tuned, TIMED)
    if best.status != Status.OK or best.cycles >= network.cycles(network.image, TIMED):
        return {}
    for name in list(tuned):
        others = {other: point for other, point in tuned.items() if other != name}
        if (
            others
            and (result := measure_network(network, others, TIMED)).status == Status.OK
            and result.cycles <= best.cycles
        ):
            tuned, best = others, result
    return tuned


def _of_today(records: Records, digest: str) -> Records:
    """Take the decisions of records, whichever version of the timing model measured them, and of the preset, which has
    this digest today: `winners` does it again."""
    again = Records()
    for key, result in records.trials.items():
        whole_one = key.measurer.startswith("whole ")
        measurer = network_measurer(TIMED) if whole_one else TIMED.version
        again.add(replace(key, config=digest, measurer=measurer), result)
    return again


def lines_of(path: Path, config: str, records: Path, trials: int) -> Lines:
    """The winners of the network at `path`, after a search of so many trials where there are any."""
    if trials:
        tune(path, config, trials=trials, records=records, jobs=os.cpu_count() or 1)
    searched, known = network_of(path, config, records="none"), Records.load(records)
    return winners(searched, known if trials else _of_today(known, searched.cfg.digest))


def made(config: str, networks: list[str], folder: Path | None, trials: int) -> Iterator[tuple[str, Lines]]:
    """Yield the name of each network and its lines."""
    for name in networks:
        records = KEPT / f"{name}-{config}.jsonl" if trials else SHIPPED_FOLDER / f"{config}.jsonl"
        records.parent.mkdir(parents=True, exist_ok=True)
        yield name, lines_of(WORKLOADS[name].path(folder), config, records, trials)


def write(config: str, lines: Lines) -> Path:
    """The file of a preset, whole or not at all."""
    path = SHIPPED_FOLDER / f"{config}.jsonl"
    fresh = path.with_suffix(".new")
    fresh.unlink(missing_ok=True)
    records = Records(fresh)
    for key in sorted(lines, key=lambda key: (key.workload, key.schedule)):
        records.add(key, TrialResult(lines[key].status, lines[key].cycles))
    if lines:
        os.replace(fresh, path)
    else:
        path.unlink(missing_ok=True)
    return path


def main(arguments: list[str]) -> int:
    """Tunes, and writes the records that come with Celosia. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shipped", description=(__doc__ or "").split("\n\n")[0])
    known = ", ".join(WORKLOADS)
    parser.add_argument("--networks", default=",".join(NETWORKS), help=f"of {known}; default: %(default)s")
    parser.add_argument("--configs", default=",".join(CONFIGS), help="default: %(default)s")
    parser.add_argument("--trials", type=int, default=400, help="for each network and preset (default: %(default)s)")
    parser.add_argument("--models-dir", type=Path, help=f"folder with the models (default: ${FOLDER_VARIABLE})")
    options = parser.parse_args(arguments)
    networks, folder = options.networks.split(","), models_folder(options.models_dir)
    SHIPPED_FOLDER.mkdir(exist_ok=True)
    for config in options.configs.split(","):
        lines: Lines = {}
        try:
            for name, found in made(config, networks, folder, options.trials):
                print(f"{config}: {name}: {len(found)} lines", flush=True)
                lines |= found
        except Missing as reason:
            print(reason, file=sys.stderr)
            return 2
        print(f"{write(config, lines)}: {len(lines)} lines")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
