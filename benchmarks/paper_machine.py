"""Charts of the accelerator: latency hiding, what each pass is good for, and the CPU alone beside CPU and accelerator.

Cycles are the timing model's, which `python -m benchmarks timed` compares with the RTL.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import celosia
from benchmarks import arm, superoptimise
from benchmarks.cpu import Feed, model_feed
from benchmarks.gain import cycles as cycles_of
from benchmarks.paper_chart import Chart, PaperSize, Say, floats, quantised
from benchmarks.rows import Row
from benchmarks.workloads import Missing
from celosia.compiler.graph.pipeline import NEEDED, PASSES
from celosia.compiler.program import LaunchStep, Program
from celosia.compiler.switches import PARTS
from celosia.compiler.target import TARGETS
from celosia.compiler.tensorize.plan import collect_tilings
from celosia.compiler.tune.kernel_trial import time_alternating
from celosia.driver.pages.run_figures import ROOFS
from celosia.driver.pages.run_page import roofs_of
from celosia.driver.run.explain import layer_rows, predict_counters
from celosia.driver.runtime import Runtime
from celosia.hw.boards.memory import ZYNQ_HP

LEAST_HIDING = 1.2
"""Times as many cycles that convolutions take without latency hiding, at least."""

# Latency hiding ----------------------------------------------------------------------------------------------------


def without_hiding(program: Program) -> dict[str, Any]:
    """The tiling under which a tile loads once all before it has computed; tiles and orders are those of `program`."""
    decisions = collect_tilings(program)
    for layer in decisions["layers"]:
        for part in layer["parts"]:
            part["ahead"] = 0
    return decisions


def hiding(size: PaperSize, folder: Path | None, say: Say) -> Chart:
    """The layers of a network on rooflines, with look-ahead and without."""
    from benchmarks.paper_figures import two_rooflines

    path, what = quantised(size.network, folder)
    chart = Chart(
        "Latency hiding",
        f"Layers of {what} on a roofline, as in VTA's paper: a point with its latency hidden, a ring without. Without, "
        "a tile loads when all before it has computed, which is what one set of buffers allows; with, loads go ahead. "
        "Tiles and loop orders are the same.",
    )  # fmt: skip
    for config in size.configs:
        say(f"{size.network} on {config}, with latency hiding and without")
        program = celosia.compile(path, config)
        other = celosia.compile(path, config, decisions=without_hiding(program))
        on, off = (layer_rows(each, predict_counters(each)) for each in (program, other))
        chart.rows.append(_hiding_row(program, on, off, size, config))
        # A layer that overlaps another has no cycles of its own, and so no place on a roofline.
        shown = [
            n
            for n, (with_hiding, without) in enumerate(zip(on, off))
            if with_hiding["macs"]
            and with_hiding["bytes_loaded"] + with_hiding["bytes_stored"]
            and with_hiding["cycles"]
            and without["cycles"]
        ]
        roofs = roofs_of(program.config, str(ZYNQ_HP))
        figure = two_rooflines(
            [on[n] for n in shown], [off[n] for n in shown], program.config.macs_per_cycle,
            dict(zip(ROOFS, (roofs["both"], roofs["load"]))),
        )  # fmt: skip
        chart.figures.append((f"Latency hiding on {config}", "", figure))
    chart.fact = f"{chart.rows[0].details['convolutions']:.2f} x", "cycles of convolutions, without latency hiding"
    return chart


def _hiding_row(
    program: Program, on: list[dict[str, Any]], off: list[dict[str, Any]], size: PaperSize, config: str
) -> Row:  # fmt: skip
    """The row of a whole network, with every layer in the details."""
    convolutions = [n for n, row in enumerate(on) if row["macs"] and "conv" in row["what"]]
    total = [sum(row["cycles"] for row in rows) for rows in (off, on)]
    own = [sum(rows[n]["cycles"] for n in convolutions) for rows in (off, on)]
    peak = [program.macs_accelerator / cycles / program.config.macs_per_cycle for cycles in total]
    ratios = {on[n]["name"]: off[n]["cycles"] / on[n]["cycles"] for n in convolutions if on[n]["cycles"]}
    above = sum(ratio >= LEAST_HIDING for ratio in ratios.values())
    ratio = own[0] / own[1]
    details = {
        "config": config, "convolutions": ratio, "whole": total[0] / total[1], "off": total[0], "on": total[1],
        "off_utilization": peak[0], "on_utilization": peak[1], "least": min(ratios.values()), "layers": ratios,
    }  # fmt: skip
    text = (
        f"{ratio:.2f}; {above} of {len(ratios)} convolutions at least {LEAST_HIDING}, least {min(ratios.values()):.2f};"
        f" all of it {total[0]:,} to {total[1]:,} cycles, multipliers {peak[0]:.0%} to {peak[1]:.0%}"
    )
    what = f"{size.network} on {config}: cycles of convolutions, without latency hiding over with"
    met = ratio >= LEAST_HIDING
    return Row(f"paper/hiding/{config}", what, f"≥ {LEAST_HIDING}", text, met, size.command, details)


# What each pass is good for ----------------------------------------------------------------------------------------

RECORDS = "records"
SEEN = 0.02
"""What changes nothing by more is not drawn."""


def variants() -> dict[str, dict[str, Any]]:
    """Arguments of `compile` by what is left out."""
    names = [each.name for each in PASSES if each.name not in NEEDED] + list(PARTS)
    return {"": {}, **{name: {"without": name} for name in names}, RECORDS: {"records": "none"}}


def ablation(size: PaperSize, folder: Path | None, say: Say) -> Chart:
    """Cycles, bytes of DRAM and seconds of the CPU without each pass, over those with all of them."""
    from benchmarks.paper_figures import bars

    config = size.configs[0]
    chart = Chart(
        "Without each pass",
        f"What a network takes without a pass, over what it takes with all: above 1, the pass is good for something. "
        f"Int8 networks on {config} in cycles and bytes of DRAM for activations; the float networks on one thread of "
        "this CPU in seconds, all variants in turn. Not shown: what changes nothing by more than 2% in any network.",
    )  # fmt: skip
    found: dict[str, dict[str, float]] = {}
    for name in (size.network, size.small):
        path, _ = quantised(name, folder)
        measured = _without_on_accelerator(path, name, config, say)
        found[f"{name}, cycles"] = {key: each[0] / measured[""][0] for key, each in measured.items()}
        found[f"{name}, bytes"] = {key: each[1] / measured[""][1] for key, each in measured.items()}
        seconds = _without_on_cpu(floats(name), name, size, say)
        found[f"{name}, CPU"] = {key: each / seconds[""] for key, each in seconds.items()}
    rows = list(superoptimise.timed_rows(folder, ("four_branches",), config, size.budget, say))
    found["four_branches, cycles"] = {"superoptimiser": rows[0].details["ratio"]}
    for key in (*variants(), "superoptimiser"):
        ratios = {what: each[key] for what, each in found.items() if key in each}
        if key:
            chart.rows.append(_ablation_row(key, ratios, size, config))
    shown = [
        row.details["pass"] for row in chart.rows if any(abs(r - 1) > SEEN for r in row.details["ratios"].values())
    ]
    series = {what: [each.get(key) for key in shown] for what, each in found.items()}
    chart.figures.append(("Without each pass", "", bars(shown, series, "without over with", one=True)))
    fusion = found[f"{size.network}, CPU"]["fusion"]
    chart.fact = f"{fusion:.2f} x", "CPU time without fusion"
    return chart


def _ablation_row(key: str, ratios: Mapping[str, float], size: PaperSize, config: str) -> Row:
    changed = [f"{what} {ratio:.3f}" for what, ratio in ratios.items() if abs(ratio - 1) >= 0.0005]
    text = "; ".join(changed) or "the same in these networks"
    details = {"config": config, "pass": key, "ratios": dict(ratios)}
    return Row(f"paper/without/{key}", f"without {key}, over with", "", text, None, size.command, details)


def _without_on_accelerator(path: Path, name: str, config: str, say: Say) -> dict[str, tuple[int, int]]:
    """(cycles, bytes of DRAM that launches write) of each variant."""
    found = {}
    for key, options in variants().items():
        say(f"{name} on {config} without {key}" if key else f"{name} on {config}")
        program = celosia.compile(path, config, check=False, **options)
        found[key] = cycles_of(program, ZYNQ_HP), program.image_address + program.arena.size
    return found


def _without_on_cpu(path: Path, name: str, size: PaperSize, say: Say) -> dict[str, float]:
    """Processor seconds of each variant, all in turn; those with the same kernels are one."""
    model = onnx.load(path)
    feed = model_feed("", model)
    runs: dict[str, Runtime] = {}
    made: dict[str, list[str]] = {}
    alike: dict[str, str] = {}
    for key, options in variants().items():
        say(f"{name} on the CPU without {key}" if key else f"{name} on the CPU")
        program = celosia.compile(model, accelerator=False, check=False, **options)
        kernels = [kernel.loops for kernel in program.kernels]
        if (same := next((other for other, known in made.items() if known == kernels), None)) is None:
            made[key], runs[key] = kernels, Runtime(program, threads=1)
        alike[key] = key if same is None else same
    expected = runs[""].run(feed).outputs
    for key, runtime in runs.items():
        for output, value in runtime.run(feed).outputs.items():
            if not np.allclose(value, expected[output], rtol=1e-3, atol=1e-3 * float(np.abs(expected[output]).max())):
                raise RuntimeError(f"{name} without {key} gives another {output}")
    seconds = time_alternating([lambda r=r: r.run(feed) for r in runs.values()], size.seconds * len(runs))  # type: ignore[misc]
    found = dict(zip(runs, seconds))
    return {key: found[same] for key, same in alike.items()}


# Offload -----------------------------------------------------------------------------------------------------------

ARM, ARM_CORES, ARM_MHZ = "armv7", 2, 667
"""The processor of a Zynq-7020 beside the accelerator, of which one core is estimated (arm.py) and both are said to
share all work evenly. That leaves out caches and memory, which only make it slower."""


def offload(size: PaperSize, folder: Path | None, say: Say) -> Chart:
    """Milliseconds of each layer on a CPU alone, and on the accelerator: this CPU's, and the board's, estimated."""
    from benchmarks.paper_figures import bars

    path, what = quantised(size.network, folder)
    config = size.configs[0]
    say(f"{size.network}: the CPU alone, and the CPU with {config}")
    program = celosia.compile(path, config)
    layers, clock = layer_rows(program, predict_counters(program)), ZYNQ_HP.clock_mhz
    accelerator = [row["cycles"] / clock / 1e6 for row in layers]
    here = _offloaded(path, program, size, None)
    sides = {"this CPU": here}
    board = f"{ARM_CORES} {arm.PROCESSORS[ARM]} of {ARM_MHZ} MHz"
    lack = ""
    try:
        sides[f"{board}, estimated"] = _offloaded(path, program, size, say)
    except Missing as reason:
        lack = f" {board} are left out: {reason}."
    chart = Chart(
        "Offload",
        f"{what}: each layer on one thread of this CPU, on {config} at {clock} MHz by the timing model, and on the "
        f"board's own processor, {board}, an estimate: cycles by llvm-mca of instructions that an emulator counts, "
        f"without caches, shared evenly. What stays on the CPU is this CPU's or the board's.{lack}",
    )  # fmt: skip
    names = [f"{number + 1} {row['what'].split(',')[0]}" for number, row in enumerate(layers)]
    series = {name: [1e3 * each or None for each in side.layers] for name, side in sides.items()}
    series[f"{config} at {clock} MHz"] = [1e3 * each for each in accelerator]
    chart.figures.append(("Offload", "", bars(names, series, "milliseconds", log=True)))
    kinds = {kind: [n for n, row in enumerate(layers) if _kind(row) == kind] for kind in map(_kind, layers)}
    for kind, members in {**kinds, "all": []}.items():
        details: dict[str, Any] = {"config": config}
        texts = []
        for (name, side), key in zip(sides.items(), ("ratio", "over_arm")):
            alone = sum(side.layers[n] for n in members) if members else side.whole
            far = sum(accelerator[n] for n in members) if members else sum(accelerator) + side.left
            details |= {key: alone / far, f"{key}_alone": alone, f"{key}_offloaded": far}
            texts.append(f"{alone / far:.2f} of {name} ({_milliseconds(alone)} to {_milliseconds(far)} ms)")
        head = f"paper/offload/{kind}", f"{size.network}, {kind}: times as fast on {config}"
        chart.rows.append(Row(*head, "", "; ".join(texts) + f".{lack}" * bool(lack), None, size.command, details))
    if not lack:
        ratio = chart.rows[-1].details["over_arm"]
        chart.fact = f"{ratio:.1f} x", "the board's CPU alone, over CPU and accelerator (estimate)"
    return chart


@dataclass(frozen=True)
class Offloaded:
    """Seconds of a CPU: of each layer, of all of a network alone, and of what it has left beside the accelerator."""

    layers: list[float]
    whole: float
    left: float


def _offloaded(path: Path, program: Program, size: PaperSize, say: Say | None) -> Offloaded:
    """Measure this CPU; with `say` estimate the board's. Missing where a tool for that is."""
    config, infos = program.config, [layer for launch in program.launches for layer in launch.layers]
    if say is None:
        alone = celosia.compile(path, config, accelerator=False, check=False)
        feed = model_feed(size.network, onnx.load(path))
        spent, beside = (_step_seconds(each, feed, size.seconds) for each in (alone, program))
    else:
        processor = TARGETS[ARM]
        alone = celosia.compile(path, config, accelerator=False, check=False, target=processor)
        program = celosia.compile(path, config, check=False, target=processor)
        spent, beside = (
            [each / ARM_CORES for each in arm.step_seconds(ARM, each, ARM_MHZ, say)] for each in (alone, program)
        )
    home = {node: number for number, layer in enumerate(infos) for node in layer.nodes}
    seconds = [0.0] * len(infos)
    for step, each in zip(alone.steps, spent):
        numbers = {home[node.name] for node in step.nodes if node.name in home}  # type: ignore[union-attr]
        for number in numbers:
            seconds[number] += each / len(numbers)
    left = sum(each for step, each in zip(program.steps, beside) if not isinstance(step, LaunchStep))
    return Offloaded(seconds, sum(spent), left)


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.3g}"


def _kind(row: Mapping[str, Any]) -> str:
    what = row["what"]
    return next((kind for kind in ("conv", "product", "pool") if kind in what), "others")


def _step_seconds(program: Program, feed: Feed, seconds: float) -> list[float]:
    """Seconds of each step, the fastest of several runs on one thread."""
    runtime = Runtime(program, threads=1)
    count = max(2, round(10 * seconds))
    return [min(times) for times in zip(*(runtime.run(feed).step_seconds for _ in range(count)), strict=True)]
