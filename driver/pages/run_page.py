"""The page of a run: what limits each layer, cycles, roofline, timeline, traffic, and where each operator runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from celosia.compiler.program import LayerInfo, PartInfo, Program
from celosia.compiler.program.safe_files import reading
from celosia.driver.pages.activity import Activity, activity
from celosia.driver.pages.graph import DrawnNode, draw, nodes, nodes_of_report
from celosia.driver.pages.names import NAME, ReportError, legend_of, short
from celosia.driver.pages.page import Page, Section, require_bokeh
from celosia.driver.run import explain
from celosia.hw.boards.boards import clock_of_report, parse_memory_model
from celosia.hw.boards.memory import ZYNQ_HP, MemoryModel
from celosia.hw.spec.config import Config, ConfigError
from celosia.plain import from_json
from celosia.sim.device import Counters

MAX_LOOP_CHARACTERS = 2_000_000
"""Characters of loop nests that a page holds at most, over all layers."""
MAX_TIPS = 5
"""Pieces of advice that the page shows at most."""
BOUNDS = (*explain.UNITS, "latency")
"""What may limit a layer: a unit, or latency."""
MAX_BRIEF_LAYERS = 40
"""Layers that a notebook shows at most."""


def page_of_prediction(program: Program, memory: MemoryModel | str = ZYNQ_HP) -> Page:
    """Return the page of a predicted run, with the cycles of the timing model."""
    counters = explain.predict_counters(program, memory)
    report = explain.estimate(program, memory, counters)
    return page_of_run(program, report, counters, "by the timing model")


def page_of_run(
    program: Program, report: Mapping[str, Any], counters: Sequence[Counters], device_text: str = ""
) -> Page:
    """Return the page of a run of `program`, from its report and the counters of its launches.

    device_text: what the cycles are from, if the report does not say so.
    """
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
"""Types of the keys of a report that the page needs."""
_ROW_KEYS: dict[str, tuple[type, ...]] = {
    "name": (str,), "what": (str,), "macs": (int,), "peak": (int, type(None)), "cycles": (int, type(None)),
    "bytes_loaded": (int,), "bytes_stored": (int,), "bytes_kept": (int,),
    "utilization": (float, int, type(None)), "bound": (str, type(None)),
    "advice": (str, type(None)),
}  # fmt: skip
"""Types of the keys of a report's layer that the page needs."""


def _check_report(report: Any) -> None:
    """Raise ValueError where the report lacks keys that the page needs: it is a file that a user may have changed."""
    _require_keys(report, _KEYS, "it")
    for row in report["layers"]:
        _require_keys(row, _ROW_KEYS, "a layer")
    for node in report["cpu_nodes"]:
        _require_keys(node, {"name": (str,), "op": (str,), "reason": (str,)}, "an operator")
    try:
        Config.from_dict(report["config"])
    except (ConfigError, TypeError) as error:
        raise ValueError(f"its config is none: {error}") from None


def _require_keys(value: Any, keys: Mapping[str, tuple[type, ...]], description: str) -> None:
    """Raise ValueError unless `value` is a dict with these keys, of these types. description: its name in the error."""
    if not isinstance(value, dict):
        raise ValueError(f"{description} is no object")
    for key, types in keys.items():
        if key not in value:
            raise ValueError(f"{description} has no {key!r}")
        if not isinstance(value[key], types) or isinstance(value[key], bool):
            raise ValueError(f"{description} has a wrong {key!r}: {str(value[key])[:40]!r}")
        if isinstance(value[key], int | float) and not 0 <= value[key] < 2**63:
            raise ValueError(f"{description} has an impossible {key!r}: {value[key]}")


# Sections ---------------------------------------------------------------------------------------------------


def _build_page(
    report: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], graph: list[DrawnNode], program: Program | None,
    activity: Activity | None, device_text: str,
) -> Page:  # fmt: skip
    """Build the page: decide which sections it has, from what is known of the run.

    rows: layers of the report. program, activity: None for a page of a report, which has no timeline.
    """
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
    """Return the subtitle: Config, device and memory of a run.

    timed: there are cycles. traced: there is a timeline.
    """
    parts = [f"Config {cfg.name}: {cfg.macs_per_cycle:,} multipliers"]
    if report["cycles"]:
        device_phrase = device_text or f"on the device {report['device']}" if "device" in report else device_text
        mhz = clock_of_report(report["memory_model"])
        parts.append(f"cycles {device_phrase}, memory {report['memory_model']} at {mhz:g} MHz")
    elif report["layers"]:
        parts.append("without cycles, which the devices timed and rtl tell")
    else:
        parts.append("nothing of this model runs on the accelerator; below is why")
    if report.get("rounding") in ("correct", "bytes"):
        parts.append("normalisations are rounded correctly")
    if report.get("rounding") == "bytes":
        parts.append("float tensors between quantised ones are rounded to bytes")
    if timed and not traced:
        parts.append(
            "a report holds no time of instructions: the page of the Program, or of a run, has a timeline, too"
        )
    return "; ".join(parts)


def _key_figures(
    report: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], graph: Sequence[DrawnNode]
) -> list[tuple[str, str]]:
    """Return the key figures at the head of the page, as (number, caption)."""
    facts = []
    if report["cycles"]:
        mhz = clock_of_report(report["memory_model"])
        facts += [
            (f"{report['cycles']:,}", "cycles on the accelerator"),
            (f"{report['cycles'] / mhz / 1e3:,.2f} ms", f"of them at {mhz:g} MHz"),
            (f"{report['utilization']:.1%}" if report["utilization"] else "-", "of the multipliers busy"),
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
    """Return the section on what limits the run: the share of cycles by limiting unit, and advice."""
    cycles: Counter[str] = Counter()
    for row in report["layers"]:
        cycles[row["bound"] or "latency"] += row["cycles"] or 0
    total = cycles.total()
    bar = "".join(
        f'<i style="width:{100 * bound_cycles / total:.2f}%;background:{_colour(bound)}"></i>'
        for bound, bound_cycles in cycles.most_common()
    )
    key = legend_of([(_colour(bound), f"{bound} {cycles[bound] / total:.0%}") for bound in BOUNDS])
    tips = "".join(
        f'<li style="border-color:{_colour(advice.bound)}"><b>{advice.share:.0%}</b> '
        f"{escape(_advised_layers(advice))}: {escape(advice.advice)}</li>"
        for advice in explain.advise_by_cycles(dict(report))[:MAX_TIPS]
    )
    html = f'<div class="share">{bar}</div>{key}<ul class="advice">{tips}</ul>'
    return Section(
        "What limits it",
        "Share of the cycles in layers that each unit bounds, by working for most of their time; latency where none "
        "does. Below, what would make them faster.",
        html, brief=html,
    )  # fmt: skip


def _advised_layers(advice: explain.Advice) -> str:
    """Return the layers that a piece of advice is for, as text."""
    others = "" if advice.layers == 1 else f" and {advice.layers - 1} more"
    return short(advice.longest, NAME) + others


def _colour(bound: str) -> str:
    """Return the colour of a bound."""
    from celosia.driver.pages.run_figures import COLOURS

    return COLOURS.get(bound, COLOURS["latency"])


def _cycle_section(rows: Sequence[Mapping[str, Any]], roofs: Mapping[str, float]) -> Section:
    """Return the section with the cycles of each layer, and their lower bound."""
    from celosia.driver.pages import run_figures as figures

    return Section(
        "Cycles by layer",
        "In the colour of what limits them. The mark is what the layer takes at least, with all multipliers busy "
        "and all of memory's bytes; a bar ends before it where much was loaded while the layer before ran.",
        legend_of([(_colour(bound), f"limited by {bound}") for bound in BOUNDS]),
        figure=figures.cycles(rows, [_cycle_bound(row, roofs) for row in rows]),
        brief=_brief_layer_table(rows),
    )


def _brief_layer_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return an HTML table of the MAX_BRIEF_LAYERS longest layers, in their order, with cycles as bars, for
    notebooks."""
    max_cycles = max(row["cycles"] for row in rows)
    fewest_cycles = sorted((row["cycles"] for row in rows), reverse=True)[:MAX_BRIEF_LAYERS][-1]
    lines = []
    for row in [row for row in rows if row["cycles"] >= fewest_cycles][:MAX_BRIEF_LAYERS]:
        array = "-" if row["utilization"] is None else f"{row['utilization']:.0%}"
        bar = f'<s><i style="width:{100 * row["cycles"] / max_cycles:.1f}%;background:{_colour(row["bound"])}"></i></s>'
        lines.append(
            f"<tr><td>{escape(short(row['name'], NAME))}</td><td>{escape(short(row['what'], NAME))}</td>"
            f'<td class="bar">{row["cycles"]:,}{bar}</td><td>{array}</td><td>{escape(row["bound"] or "-")}</td></tr>'
        )
    note = (
        f"<p>The {MAX_BRIEF_LAYERS} of {len(rows)} layers that take the most cycles.</p>"
        if len(rows) > MAX_BRIEF_LAYERS
        else ""
    )
    head = "".join(f"<th>{name}</th>" for name in ("layer", "what", "cycles", "of the multipliers", "limited by"))
    return f'<div class="table"><table><tr>{head}</tr>{"".join(lines)}</table></div>{note}'


def _roofline_section(cfg: Config, rows: Sequence[Mapping[str, Any]], roofs: Mapping[str, float]) -> list[Section]:
    """Return a list of the section with the roofline; an empty list where no layer has both MACs and traffic."""
    from celosia.driver.pages import run_figures as figures

    shown = [row for row in rows if row["macs"] and row["bytes_loaded"] + row["bytes_stored"]]
    note = f" Not here: {len(rows) - len(shown)} without MACs or traffic." if len(shown) < len(rows) else ""
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
            f"of loads and stores together (solid), of loads alone (dashed). The wheel zooms.{note}",
            legend_of([(_colour(bound), f"limited by {bound}") for bound in BOUNDS]),
            figure=figures.roofline(shown, flat, sloping),
        )
    ]


def _timeline_section(activity: Activity, rows: Sequence[Mapping[str, Any]], mhz: float) -> Section:
    """Return the section with the timeline of units and scratchpads."""
    from celosia.driver.pages import run_figures as figures

    names = [row["name"] for row in rows]
    caption = (
        f"{activity.instructions:,} instructions, a colour for each layer; below each, in the colour of a unit, the "
        "time that it stood still for a token of that unit. Then how much of each scratchpad holds what is still to be "
        "read, with its most. The wheel zooms, dragging moves."
    )
    if len(activity.bars.unit) < activity.instructions:
        pauses_text = (
            f"pauses and waits of up to {activity.gap:,} cycles are left out"
            if activity.gap
            else "none has a pause in it"
        )
        caption += f" They are drawn as {len(activity.bars.unit):,} runs of instructions of one layer: {pauses_text}."
    if len(activity.launches) > 2:
        caption += f" {len(activity.launches) - 1} launches, without the time of the CPU between them (dotted)."
    options = "".join(
        f'<option value="{number}">{escape(short(name, NAME))}</option>' for number, name in enumerate(names)
    )
    chooser = f'<label>Show <select id="layer"><option value="">all layers</option>{options}</select></label>'
    waits = legend_of([(_colour(unit), f"waits for {unit}") for unit in explain.UNITS])
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
    """Return the section with the bytes that each layer moves."""
    from celosia.driver.pages import run_figures as figures

    total = {key: sum(row[f"bytes_{key}"] for row in rows) for key in ("loaded", "stored", "kept")}
    words = {"loaded": "load", "stored": "store", "kept": "kept"}
    key = legend_of([
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
    """Return the section with the graph of layers and CPU kernels."""
    free = sum(placement["place"] == "free" for placement in program.placements) if program is not None else 0
    text = "Layers of the accelerator, and kernels of the CPU with the reason why they are there"
    text += ", in the order in which they run; lines go to what reads their result." if program is not None else "."
    if free:
        text += f" Not here, since they cost nothing: {free}."
    key = legend_of([(_colour("gemm"), "accelerator"), (_colour("cpu"), "CPU")])
    return Section("What runs where", text, f"{key}{draw(graph)}")


# Numbers ----------------------------------------------------------------------------------------------------


def roofs_of(cfg: Config, memory: str | None) -> dict[str, float]:
    """Return upper bounds in bytes per cycle of "load", "store" and "both" together, by the buses and the memory.

    memory: a memory model as text; None, or unknown, for the buses only.
    """
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
    """Return a lower bound of a layer's cycles if it runs alone: by its MACs, loads, stores, and all its traffic."""
    loaded, stored = row["bytes_loaded"], row["bytes_stored"]
    least: float = max(
        row["macs"] / max(row["peak"], 1), loaded / roofs["load"], stored / roofs["store"],
        (loaded + stored) / roofs["both"],
    )  # fmt: skip
    return least


def _decisions_text(part: PartInfo) -> str:
    """Return the tuning decisions for a part of a layer as text."""
    return ", ".join(f"{name} {value}" for name, value in part.decisions.items())


def _script_data(
    rows: Sequence[Mapping[str, Any]], program: Program | None, activity: Activity | None
) -> dict[str, Any]:
    """Return the data for the page's script: cycles and text of each layer that a reader may choose; {} without
    timeline."""
    if program is None or activity is None:
        return {}
    layers, characters_left = [], MAX_LOOP_CHARACTERS
    infos = (layer for launch in program.launches for layer in launch.layers)
    for row, layer, span in zip(rows, infos, activity.spans):
        text = _layer_loops(program, row, layer)
        text = text if len(text) <= characters_left else "Its loops: celosia inspect PROGRAM --loops LAYER"
        characters_left -= len(text)
        layers.append({"span": span, "text": text})
    return {"cycles": activity.launches[-1], "layers": layers}


def _layer_loops(program: Program, row: Mapping[str, Any], layer: LayerInfo) -> str:
    """Return a text on a layer: its work, its tuning decisions and its loops. row: of the report."""
    cycles = "" if row["cycles"] is None else f", {row['cycles']:,} cycles, bound by {row['bound']}"
    lines = [f"{layer.name}: {layer.what}, {layer.macs:,} MACs{cycles}"]
    for part in layer.parts:
        lines += ["", f"# {part.workload}", f"# {_decisions_text(part)}", str(program.loops[part.loops])]
    return "\n".join(lines)
