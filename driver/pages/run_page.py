"""Page of a run: the bound of each layer, activity of units, traffic, and the place of each operator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from celosia.compiler.program import LayerInfo, PartInfo, Program
from celosia.compiler.program.files import reading
from celosia.driver.pages.activity import Activity, activity
from celosia.driver.pages.graph import DrawnNode, drawing, nodes, nodes_of_report
from celosia.driver.pages.names import NAME, ReportError, key_of, short
from celosia.driver.pages.page import Page, Section, require_bokeh
from celosia.driver.run import explain
from celosia.hw.boards.boards import clock_of_report, parse_memory_model
from celosia.hw.boards.memory import ZYNQ_HP, MemoryModel
from celosia.hw.spec.config import Config, ConfigError
from celosia.plain import from_json
from celosia.sim.device import Counters

LOOPS = 2_000_000
"""Characters of all loops that a page holds."""
TIPS = 5
BOUNDS = (*explain.UNITS, "latency")
"""Names of the bounds of layers."""
BRIEF = 40
"""Layers that a notebook shows."""


def page_of_prediction(program: Program, memory: MemoryModel | str = ZYNQ_HP) -> Page:
    """Return the page of a predicted run, with the cycles of the timing model."""
    counters = explain.predict_counters(program, memory)
    report = explain.estimate(program, memory, counters)
    return page_of_run(program, report, counters, "by the timing model")


def page_of_run(
    program: Program, report: Mapping[str, Any], counters: Sequence[Counters], device_text: str = ""
) -> Page:
    """Return the page of a run of `program`, from its report and the counters of its launches."""
    require_bokeh()
    rows = [
        {**row, "loops": "; ".join(map(_decisions_text, layer.parts))}
        for row, layer in zip(report["layers"], (layer for launch in program.launches for layer in launch.layers))
    ]
    with explain.report_invalid_instructions(program):
        graph, run_activity = nodes(program, report), activity(program, counters)
    return _build_page(report, rows, graph, program, run_activity, device_text)


def page_of_report(path: Path) -> Page:
    """Return the page of a report of `celosia run --report`, which has no timeline. ReportError for anything else."""
    require_bokeh()
    with reading(path, ReportError, "is no report of a run", "; write it again with `celosia run --report`"):
        report = from_json(path.read_text(encoding="utf-8"))
        _check_report(report)
    return _build_page(report, report["layers"], nodes_of_report(report), None, None, "")


_KEYS: dict[str, tuple[type, ...]] = {
    "model": (str,), "config": (dict,), "layers": (list,), "cpu_nodes": (list,), "cycles": (int, type(None)),
    "memory_model": (str, type(None)), "macs_total": (int,), "macs_accelerator": (int,), "launches": (int,),
    "utilization": (float, int, type(None)),
}  # fmt: skip
_ROW_KEYS: dict[str, tuple[type, ...]] = {
    "name": (str,), "what": (str,), "macs": (int,), "peak": (int, type(None)), "cycles": (int, type(None)),
    "bytes_loaded": (int,), "bytes_stored": (int,), "bytes_kept": (int,),
    "utilization": (float, int, type(None)), "bound": (str, type(None)),
    "advice": (str, type(None)),
}  # fmt: skip


def _check_report(report: Any) -> None:
    """Raise ValueError where the report lacks something that the page needs."""
    _require_keys(report, _KEYS, "it")
    for row in report["layers"]:
        _require_keys(row, _ROW_KEYS, "a layer")
    for node in report["cpu_nodes"]:
        _require_keys(node, {"name": (str,), "op": (str,), "reason": (str,)}, "an operator")
    try:
        Config.from_dict(report["config"])
    except (ConfigError, TypeError) as error:
        raise ValueError(f"its config is none: {error}") from None


def _require_keys(thing: Any, keys: Mapping[str, tuple[type, ...]], description: str) -> None:
    """Raise ValueError where a key is missing or has another type."""
    if not isinstance(thing, dict):
        raise ValueError(f"{description} is no object")
    for key, types in keys.items():
        if key not in thing:
            raise ValueError(f"{description} has no {key!r}")
        if not isinstance(thing[key], types) or isinstance(thing[key], bool):
            raise ValueError(f"{description} has a wrong {key!r}: {str(thing[key])[:40]!r}")
        if isinstance(thing[key], int | float) and not 0 <= thing[key] < 2**63:
            raise ValueError(f"{description} has an impossible {key!r}: {thing[key]}")


# Sections ---------------------------------------------------------------------------------------------------


def _build_page(
    report: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], graph: list[DrawnNode], program: Program | None,
    activity: Activity | None, device_text: str,
) -> Page:  # fmt: skip
    """Assemble the page's sections."""
    cfg = Config.from_dict(report["config"])
    roofs = roofs_of(cfg, report["memory_model"])
    timed = [row for row in rows if row["cycles"]]
    sections = []
    if timed:
        sections += [_limit_section(report), _cycle_section(timed, roofs), *_roofline_section(cfg, timed, roofs)]
    if activity is not None:
        sections.append(_timeline_section(activity, rows, clock_of_report(report["memory_model"])))
    if rows:
        sections.append(_traffic_section(rows))
    sections.append(_graph_section(graph, program))
    subtitle = _subtitle(report, cfg, device_text, bool(timed), activity is not None)
    facts = _key_figures(report, rows, graph)
    return Page(short(report["model"], 3 * NAME), subtitle, facts, sections, _script_data(rows, program, activity))


def _subtitle(report: Mapping[str, Any], cfg: Config, device_text: str, timed: bool, traced: bool) -> str:
    """Config, device and memory of a run, in a sentence."""
    parts = [f"Config {cfg.name}: {cfg.macs_per_cycle:,} multipliers"]
    if report["cycles"]:
        device_phrase = device_text or f"on the device {report['device']}" if "device" in report else device_text
        mhz = clock_of_report(report["memory_model"])
        parts.append(f"cycles {device_phrase}, memory {report['memory_model']} at {mhz:g} MHz")
    elif report["layers"]:
        parts.append("without cycles, which the devices timed and rtl tell")
    else:
        parts.append("nothing of this model runs on the accelerator; below is why")
    if report.get("rounding") == "correct":
        parts.append("normalisations are rounded correctly")
    if timed and not traced:
        parts.append(
            "a report holds no time of instructions: the page of the Program, or of a run, has a timeline, too"
        )
    return "; ".join(parts)


def _key_figures(
    report: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], graph: Sequence[DrawnNode]
) -> list[tuple[str, str]]:
    """Key figures at the head of the page: (number, caption)."""
    facts = []
    if report["cycles"]:
        mhz = clock_of_report(report["memory_model"])
        facts += [
            (f"{report['cycles']:,}", "cycles on the accelerator"),
            (f"{report['cycles'] / mhz / 1e3:,.2f} ms", f"of them at {mhz:g} MHz"),
            (f"{report['utilization']:.1%}" if report["utilization"] else "-", "of the multipliers at work"),
        ]
    if report["macs_total"]:
        facts.append((f"{report['macs_accelerator'] / report['macs_total']:.1%}", "of the MACs on the accelerator"))
    if rows:
        moved = sum(row["bytes_loaded"] + row["bytes_stored"] for row in rows)
        facts.append((f"{moved / 1e6:,.2f} MB", "moved between DRAM and chip"))
    cpu = sum(node.place == "cpu" for node in graph)
    facts.append((f"{len(rows)} + {cpu}", "layers here, and steps of the CPU"))
    return facts


def _limit_section(report: Mapping[str, Any]) -> Section:
    """Section on the bounds of layers, with advice."""
    cycles: Counter[str] = Counter()
    for row in report["layers"]:
        cycles[row["bound"] or "latency"] += row["cycles"] or 0
    total = cycles.total()
    bar = "".join(
        f'<i style="width:{100 * bound_cycles / total:.2f}%;background:{_colour(bound)}"></i>'
        for bound, bound_cycles in cycles.most_common()
    )
    key = key_of([(_colour(bound), f"{bound} {cycles[bound] / total:.0%}") for bound in BOUNDS])
    tips = "".join(
        f'<li style="border-color:{_colour(advice.bound)}"><b>{advice.share:.0%}</b> '
        f"{escape(_advised_layers(advice))}: {escape(advice.advice)}</li>"
        for advice in explain.advise_by_cycles(dict(report))[:TIPS]
    )
    html = f'<div class="share">{bar}</div>{key}<ul class="advice">{tips}</ul>'
    return Section(
        "What limits it",
        "Share of the cycles in layers that each unit bounds, by working for most of their time; latency where none "
        "does. Below, what would make them faster.",
        html, brief=html,
    )  # fmt: skip


def _advised_layers(advice: explain.Advice) -> str:
    rest = "" if advice.layers == 1 else f" and {advice.layers - 1} more"
    return short(advice.longest, NAME) + rest


def _colour(bound: str) -> str:
    from celosia.driver.pages.run_figures import COLOURS

    return COLOURS.get(bound, COLOURS["latency"])


def _cycle_section(rows: Sequence[Mapping[str, Any]], roofs: Mapping[str, float]) -> Section:
    """Section with the cycles of each layer, and their lower bound."""
    from celosia.driver.pages import run_figures as figures

    return Section(
        "Cycles by layer",
        "In the colour of what limits them. The mark is what the layer takes at least, with all multipliers at work "
        "and all of memory's bytes; a bar ends before it where much was loaded while the layer before ran.",
        key_of([(_colour(bound), f"limited by {bound}") for bound in BOUNDS]),
        figure=figures.cycles(rows, [_cycle_bound(row, roofs) for row in rows]),
        brief=_brief_layer_table(rows),
    )


def _brief_layer_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Build the HTML table of layers for notebooks, with cycles as bars: the BRIEF longest layers, in their order."""
    max_cycles = max(row["cycles"] for row in rows)
    least = sorted((row["cycles"] for row in rows), reverse=True)[:BRIEF][-1]
    lines = []
    for row in [row for row in rows if row["cycles"] >= least][:BRIEF]:
        array = "-" if row["utilization"] is None else f"{row['utilization']:.0%}"
        bar = f'<s><i style="width:{100 * row["cycles"] / max_cycles:.1f}%;background:{_colour(row["bound"])}"></i></s>'
        lines.append(
            f"<tr><td>{escape(short(row['name'], NAME))}</td><td>{escape(short(row['what'], NAME))}</td>"
            f'<td class="bar">{row["cycles"]:,}{bar}</td><td>{array}</td><td>{escape(row["bound"] or "-")}</td></tr>'
        )
    left = f"<p>The {BRIEF} of {len(rows)} layers that take the most cycles.</p>" if len(rows) > BRIEF else ""
    head = "".join(f"<th>{name}</th>" for name in ("layer", "what", "cycles", "of the multipliers", "limited by"))
    return f'<div class="table"><table><tr>{head}</tr>{"".join(lines)}</table></div>{left}'


def _roofline_section(cfg: Config, rows: Sequence[Mapping[str, Any]], roofs: Mapping[str, float]) -> list[Section]:
    """Build the section with the roofline; a list without it where no layer has both MACs and traffic."""
    from celosia.driver.pages import run_figures as figures

    shown = [row for row in rows if row["macs"] and row["bytes_loaded"] + row["bytes_stored"]]
    left = f" Not here: {len(rows) - len(shown)} without MACs or traffic." if len(shown) < len(rows) else ""
    if not shown:
        return []
    sloping = dict(zip(figures.ROOFS, (roofs["both"], roofs["load"])))
    flat = {f"{cfg.macs_per_cycle:,} multipliers": cfg.macs_per_cycle}
    max_peak = max(row["peak"] for row in shown)
    if max_peak > cfg.macs_per_cycle:
        flat[f"{max_peak:,} with taps"] = max_peak
    return [
        Section(
            "Roofline",
            "Each layer a point, as large as its cycles, in the colour of what limits it: the closer to the roof, the "
            "better it uses the machine. Roofs: multipliers, of the array and with the vector unit's taps; bytes "
            f"of loads and stores together (solid), of loads alone (dashed). The wheel zooms.{left}",
            key_of([(_colour(bound), f"limited by {bound}") for bound in BOUNDS]),
            figure=figures.roofline(shown, flat, sloping),
        )
    ]


def _timeline_section(activity: Activity, rows: Sequence[Mapping[str, Any]], mhz: float) -> Section:
    """Section with the timeline of units and scratchpads."""
    from celosia.driver.pages import run_figures as figures

    names = [row["name"] for row in rows]
    caption = (
        f"{activity.instructions:,} instructions, a colour for each layer; below each, in the colour of a unit, the "
        "time that it stood still for a token of that unit. Then how much of each scratchpad holds what is still to be "
        "read, with its most. The wheel zooms, dragging moves."
    )
    if len(activity.bars.unit) < activity.instructions:
        left = (
            f"pauses and waits of up to {activity.gap:,} cycles are left out"
            if activity.gap
            else "none has a pause in it"
        )
        caption += f" They are drawn as {len(activity.bars.unit):,} runs of instructions of one layer: {left}."
    if len(activity.launches) > 2:
        caption += f" {len(activity.launches) - 1} launches, without the time of the CPU between them (dotted)."
    options = "".join(
        f'<option value="{number}">{escape(short(name, NAME))}</option>' for number, name in enumerate(names)
    )
    chooser = f'<label>Show <select id="layer"><option value="">all layers</option>{options}</select></label>'
    waits = key_of([(_colour(unit), f"waits for {unit}") for unit in explain.UNITS])
    layers = "".join(
        f'<button type="button" data-layer="{number}"><i style="background:{figures.layer_colour(number)}"></i>'
        f"{escape(short(name, NAME))}</button>" for number, name in enumerate(names)
    )  # fmt: skip
    html = f'{chooser}<div class="key layers">{layers}</div>{waits}'
    return Section(
        "Timeline", caption, html, figures.timeline(activity, names, mhz),
        '<pre id="loops"></pre>',
    )  # fmt: skip


def _traffic_section(rows: Sequence[Mapping[str, Any]]) -> Section:
    """Section with the bytes that each layer moves."""
    from celosia.driver.pages import run_figures as figures

    total = {key: sum(row[f"bytes_{key}"] for row in rows) for key in ("loaded", "stored", "kept")}
    words = {"loaded": "load", "stored": "store", "kept": "kept"}
    key = key_of([
        (_colour(words[kind]), f"{kind}{' on chip' * (kind == 'kept')} {size / 1e6:,.2f} MB")
        for kind, size in total.items()
    ])  # fmt: skip
    return Section(
        "Where the bytes go",
        "Between DRAM and scratchpads, weights and activations; what a block of layers keeps on chip is neither stored "
        "nor loaded.",
        key, figures.traffic(rows),
    )  # fmt: skip


def _graph_section(graph: list[DrawnNode], program: Program | None) -> Section:
    """Section with the graph of layers and CPU kernels."""
    free = sum(placement["place"] == "free" for placement in program.placements) if program is not None else 0
    text = "Layers of the accelerator, and kernels of the CPU with the reason why they are there"
    text += ", in the order in which they run; lines go to what reads their result." if program is not None else "."
    if free:
        text += f" Not here, since they cost nothing: {free}."
    key = key_of([(_colour("gemm"), "accelerator"), (_colour("cpu"), "CPU")])
    return Section("What runs where", text, f"{key}{drawing(graph)}")


# Numbers ----------------------------------------------------------------------------------------------------


def roofs_of(cfg: Config, memory: str | None) -> dict[str, float]:
    """Upper bounds in bytes a cycle of loads, of stores, and of both together."""
    load, store = cfg.bus_bytes * cfg.ports, cfg.bus_bytes
    both: float = load + store
    try:
        dram = parse_memory_model(memory or "").bytes_per_cycle
    except ValueError:
        dram = 0
    if dram:
        load, store, both = min(load, dram), min(store, dram), min(both, dram)
    return {"load": load, "store": store, "both": both}


def _cycle_bound(row: Mapping[str, Any], roofs: Mapping[str, float]) -> float:
    """Lower bound of a layer's cycles, alone on the machine."""
    loaded, stored = row["bytes_loaded"], row["bytes_stored"]
    least: float = max(
        row["macs"] / max(row["peak"], 1), loaded / roofs["load"], stored / roofs["store"],
        (loaded + stored) / roofs["both"],
    )  # fmt: skip
    return least


def _decisions_text(part: PartInfo) -> str:
    """One line on the tuning decisions for the loops of a part of a layer."""
    return ", ".join(f"{name} {value}" for name, value in part.decisions.items())


def _script_data(
    rows: Sequence[Mapping[str, Any]], program: Program | None, activity: Activity | None
) -> dict[str, Any]:
    """Data that the page's script shows of a chosen layer."""
    if program is None or activity is None:
        return {}
    layers, left = [], LOOPS
    infos = (layer for launch in program.launches for layer in launch.layers)
    for row, layer, span in zip(rows, infos, activity.spans):
        text = _layer_loops(program, row, layer)
        text = text if len(text) <= left else "Its loops: celosia inspect PROGRAM --loops LAYER"
        left -= len(text)
        layers.append({"span": span, "text": text})
    return {"cycles": activity.launches[-1], "layers": layers}


def _layer_loops(program: Program, row: Mapping[str, Any], layer: LayerInfo) -> str:
    """Describe a layer for the page: its work, its tuning decisions and its loops."""
    cycles = "" if row["cycles"] is None else f", {row['cycles']:,} cycles, bound by {row['bound']}"
    lines = [f"{layer.name}: {layer.what}, {layer.macs:,} MACs{cycles}"]
    for part in layer.parts:
        lines += ["", f"# {part.workload}", f"# {_decisions_text(part)}", str(program.loops[part.loops])]
    return "\n".join(lines)
