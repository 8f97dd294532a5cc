"""Charts of searches: of schedules, by one worker and by two, and of Configs beside VTA++'s."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import celosia
from benchmarks import explore as configs
from benchmarks import tune
from benchmarks.paper_chart import Chart, PaperSize, Say, quantised
from benchmarks.rows import Row
from celosia.compiler.tune.search import SEARCHES
from celosia.hw.spec.config import Config

Array = NDArray[Any]


# Schedules ---------------------------------------------------------------------------------------------------------


LEAST_SEEN = 0.01
"""Percent above the best that the figure tells from none."""


def best_so_far(table: tune.Table, name: str, trials: int) -> Array:
    """Cycles of the best point after each trial of a search."""
    search = SEARCHES[name](table.space, np.random.default_rng(0))
    found: list[float] = []
    while len(found) < trials and (asked := search.ask(min(8, trials - len(found)))):
        costs = [table.cost(number) for number in asked]
        search.tell([(n, cost if np.isfinite(cost) else None) for n, cost in zip(asked, costs)])
        found += costs
    found += [min(found)] * (trials - len(found))
    return np.minimum.accumulate(np.array(found))


def search(size: PaperSize, folder: Path | None, say: Say) -> Chart:
    """The best after each trial, for each search that there is, on convolutions of ResNet-18."""
    from benchmarks.paper_figures import curves

    config = size.configs[0]
    cfg, names = Config.load(config), list(SEARCHES)
    found = {name: np.empty((size.shapes, size.trials)) for name in names}
    with tempfile.TemporaryDirectory() as place:
        for number, shape in enumerate(tune.SMALL[: size.shapes]):
            table = tune.Table(cfg, shape.layer(cfg), Path(place))
            for name in names:
                say(f"{shape.name} on {config}: {name}")
                found[name][number] = best_so_far(table, name, size.trials)
    best = np.min([curve[:, -1] for curve in found.values()], axis=0)
    lines = {name: np.exp(np.log(curve / best[:, None]).mean(axis=0)) for name, curve in found.items()}
    chart = Chart(
        "Searches for schedules",
        f"{size.shapes} convolutions of ResNet-18 on {config}, cycles of the timing model: the best so far over the "
        "best that any of these searches has found, geometric mean. Each begins anew, with one seed.",
    )  # fmt: skip
    above = {name: [max(100 * float(each - 1), LEAST_SEEN) for each in line] for name, line in lines.items()}
    chart.figures.append(("Searches for schedules", "", curves(above, "trials", "% of cycles above the best found")))
    for name, line in lines.items():
        details = {"config": config, "first": float(line[0]), "last": float(line[-1]), "curve": line.tolist()}
        text = ", ".join(f"{line[n - 1]:.3f} after {n}" for n in (1, 8, size.trials))
        what = f"{name}: cycles over the best that any search has found"
        chart.rows.append(Row(f"paper/search/{name}", what, "", text, None, size.command, details))
    return chart


# Workers -----------------------------------------------------------------------------------------------------------


WORKERS = 1, 2


def workers(size: PaperSize, folder: Path | None, say: Say) -> Chart:
    """Trials a second of one process and of two."""
    from benchmarks.paper_figures import bars

    rates = tune.fleet_rates(size.jobs, WORKERS, say)
    chart = Chart(
        "Workers",
        f"The same {size.jobs} trials of a convolution of ResNet-18 on pynq, by the timing model, measured by one "
        "worker and by two, as `celosia tune` has them on this machine or on others.",
    )  # fmt: skip
    names = [f"{count} worker{'s' * (count > 1)}" for count in WORKERS]
    chart.figures.append(("Workers", "", bars(names, {"trials a second": rates}, "trials a second")))
    ratio = rates[-1] / rates[0]
    text = f"{ratio:.2f} ({', '.join(f'{rate:.1f}' for rate in rates)} a second)"
    what = "trials a second of two workers over one"
    details = {"ratio": ratio, "rates": rates}
    chart.rows.append(Row("paper/workers", what, "≥ 1.8 on two idle cores", text, ratio >= 1.8, size.command, details))
    return chart


# Configs -----------------------------------------------------------------------------------------------------------


def designs(size: PaperSize, folder: Path | None, say: Say) -> Chart:
    """Cycles over LUTs of all Configs that an exploration has measured, and where VTA++'s front ends."""
    from benchmarks.paper_figures import front

    path, what = quantised(size.network, folder)
    say(f"Configs for {size.network} on {configs.BOARD}, {size.explored:,.0f} s")
    began = time.perf_counter()
    found = celosia.explore(path, configs.BOARD, objective=configs.NAMES, budget=size.explored, left=configs.LEFT)
    points = configs.measured(found)
    (lut, cycles, _), (most, least, _) = configs.ends(points)
    times, area = cycles / least, most / lut
    shown = [(point[0] / lut, cycles / point[1], configs.array(point[2])) for point in points]
    chart = Chart(
        "Configs",
        f"Every Config that a search of {size.explored:,.0f} seconds measured for {what}: its LUTs over those of the "
        "smallest, and how many times fewer cycles it takes. The cross is where VTA++'s published front ends, seen "
        "from its own smallest.",
    )  # fmt: skip
    chart.figures.append(("Configs", "", front(shown, (configs.VTA_AREA, configs.VTA_TIMES))))
    theirs = f"VTA++ {configs.VTA_TIMES} x for {configs.VTA_AREA} x"
    seconds = time.perf_counter() - began
    text = f"{times:.1f} x fewer for {area:.1f} x the LUTs, of {len(points)} Configs in {seconds:.0f} s; {theirs}"
    details = {"times": times, "area": area, "configs": len(points)}
    row = f"{size.network}: times fewer cycles than the smallest Config, for at most {configs.VTA_AREA:g} x its LUTs"
    met = times >= configs.VTA_TIMES
    chart.rows.append(Row("paper/designs", row, f"≥ {configs.VTA_TIMES}", text, met, size.command, details))
    return chart
