"""Tables for people: what a program is, where a run's time went."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from celosia.compiler.program import CpuStep, LayerInfo, Program, ProgramError
from celosia.compiler.vthread.disassemble import listing
from celosia.compiler.vthread.verify import verify
from celosia.driver import explain
from celosia.driver.explain import UNITS
from celosia.hw.cache import KINDS, Entry, cache_folder
from celosia.hw.config import Config
from celosia.hw.isa import Opcode, instruction_bytes, opcode_of
from celosia.hw.plain import printable
from celosia.hw.scratchpads import depths, total_bytes
from celosia.sim.memory import ZYNQ_HP
from celosia.sim.terminal import Console

if TYPE_CHECKING:
    from celosia.bitstreams.devices import Device
    from celosia.bitstreams.synthesis import Usage
    from celosia.bitstreams.timing import Timing
    from celosia.compiler.tune.progress import Progress
    from celosia.compiler.tune.tuner import State
    from celosia.sim.memory import MemoryModel

TOP_LAYERS = 8


def console() -> Console:
    """Standard output; wide enough for a table where it is not a terminal."""
    out = Console()
    return out if out.is_terminal else Console(width=160)


def new_table(title: str, *columns: str) -> Table:
    """A column whose name begins with ">" is aligned to the right."""
    table = Table(
        title=printable(title), title_justify="left", box=None, pad_edge=False, header_style="bold", title_style="bold"
    )
    for column in columns:
        table.add_column(
            printable(column.lstrip(">")), justify="right" if column.startswith(">") else "left", overflow="fold"
        )
    return table


def add_row(table: Table, *cells: object) -> None:
    table.add_row(*(Text(f"{cell:,}" if isinstance(cell, int) else printable(str(cell))) for cell in cells))


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}%"


def megabytes(size: int) -> str:
    return f"{size / 1e6:.2f} MB" if size >= 100_000 else f"{size / 1e3:.1f} kB"


# Tuning -------------------------------------------------------------------------------------------------------


def trials_line(state: Progress, what: str) -> str:
    """How far a tuning is with its trials."""
    left = timedelta(seconds=round((state.trials - state.spent) / state.rate)) if state.rate else "?"
    text = f"{what}: {state.spent:,} of {state.trials:,} trials, {state.known:,} of them known"
    return text + f", {state.rate:,.1f} a second, at most {left} left"


def tuning_line(state: State) -> str:
    """How far a tuning is, in a line."""
    text = trials_line(state, state.stage)
    if math.isfinite(state.regret):
        text += f"; layers at most {state.regret:.1%} from the best"
    if state.untuned:
        text += f"; whole network {state.tuned:,} cycles, {state.untuned:,} untuned"
    return text + left_out_text(state.left_out)


def left_out_text(left_out: Mapping[str, str]) -> str:
    """Devices that get no more trials."""
    return "".join(f"; {name} left out: {why}" for name, why in left_out.items())


def tuning(state: State, most: int = 16) -> RenderableType:
    """The same, and the layers that take the most cycles."""
    table = new_table("", "layer", ">times", ">points", ">trials", ">compiler's", ">best", ">saved", ">regret at most")
    heavy = sorted(state.subjects, key=lambda s: -s.occurrence.count * min(s.best, 1e18))[:most]
    for s in heavy:
        saved = percent(1 - s.best / s.usual) if math.isfinite(s.best) and math.isfinite(s.usual) else "-"
        cycles = [f"{value:,.0f}" if math.isfinite(value) else "-" for value in (s.usual, s.best)]
        regret = percent(s.search.regret) if math.isfinite(s.search.regret) else "-"
        add_row(table, s.name, s.occurrence.count, len(s.space), s.trials, *cycles, saved, regret)
    return Group(Text(tuning_line(state)), table)


def tuned(report: dict[str, Any]) -> Iterator[RenderableType]:
    """What a tuning has found."""
    table = new_table(
        "Layers, cycles twice in a row", "layer", ">times", ">points", ">trials", ">compiler's", ">best", ">saved",
        ">regret at most", "taken",
    )  # fmt: skip
    for row in report["layers"]:
        saved = percent(1 - row["best"] / row["usual"]) if row["best"] and row["usual"] else "-"
        cycles = ["-" if row[name] is None else f"{row[name]:,.0f}" for name in ("usual", "best")]
        taken = "yes" if row["decided"] else ""
        add_row(table, row["layer"], row["count"], row["points"], row["trials"], *cycles, saved, percent(row["regret"]),
             taken)  # fmt: skip
    yield table
    text = (
        f"{report['cycles']:,} cycles, {report['untuned']:,} untuned: {report['untuned'] / report['cycles']:.3f} times"
    )
    yield Text(f"{text} as fast{trials_text(report)}")


def trials_text(report: dict[str, Any]) -> str:
    """What a tuning's trials came to."""
    text = f"; {report['measured']:,} measured, {report['known']:,} known, in {report['seconds']:,.0f} s"
    if report["failed"]:
        text += f"; {report['failed']:,} trials failed"
    if report["damaged"]:
        text += f"; {report['damaged']:,} damaged lines of the records left out"
    return text + left_out_text(report["left_out"])


# A quantised model --------------------------------------------------------------------------------------------


def quantised(report: dict[str, Any]) -> Iterator[RenderableType]:
    """Tables of what `quantize` reports: errors, operators, the accelerator's share."""
    how = "held out of the calibration" if report["held_out"] else "the calibration's own"
    title = f"Against the float model, {report['samples_measured']} samples ({how})"
    errors = new_table(title, "output", ">largest", ">max error", ">mean error", ">SQNR dB", ">top-1 agreement")
    for row in report["outputs"]:
        numbers = [f"{row[key]:.4g}" for key in ("largest", "max_abs", "mean_abs")]
        sqnr = "-" if row["sqnr_db"] is None else f"{row['sqnr_db']:.1f}"
        add_row(errors, row["name"], *numbers, sqnr, percent(row["top1_agreement"]))
    yield errors
    if report["advice"]:
        yield from _poor(report)
    operators = report["operators"]
    done = sum(row["quantised"] for row in operators)
    table = new_table(f"{done} of {len(operators)} operators quantised", "operator", ">quantised", ">not", "why not")
    for op in sorted({row["op"] for row in operators}):
        rows = [row for row in operators if row["op"] == op]
        left = [row for row in rows if not row["quantised"]]
        why = "; ".join(sorted({row["reason"] for row in left}))
        add_row(table, op, len(rows) - len(left), len(left), why)
    yield table
    yield from _placed(report["accelerator"])


def _poor(report: dict[str, Any]) -> Iterator[RenderableType]:
    """Which layers a poor result comes from, and what to try."""
    if report["losing"]:
        table = new_table("Layers that lose most, of one sample", "operator", "name", ">SQNR dB", ">lost dB")
        for row in report["losing"]:
            add_row(table, row["op"], row["name"], f"{row['sqnr_db']:.1f}", f"{row['lost_db']:.1f}")
        yield table
    tries = "".join(f"\n  {number}. {each}" for number, each in enumerate(report["advice"], 1))
    yield Text(f"The int8 model is far from the float one. What to try, one after the other:{tries}")


def _placed(accelerator: dict[str, Any]) -> Iterator[RenderableType]:
    if "error" in accelerator:
        yield Text(f"It does not compile for {accelerator['config']}: {accelerator['error']}")
        return
    total, own = accelerator["macs_total"], accelerator["macs_accelerator"]
    share = percent(own / total) if total else "-"
    yield Text(f"Config {accelerator['config']} takes {share} of {total:,} multiply-accumulates.")
    if accelerator["cpu"]:
        table = new_table("Left on the CPU", "operator", ">count", "reason")
        for row in accelerator["cpu"]:
            add_row(table, row["op"], row["count"], row["reason"])
        yield table


# A run --------------------------------------------------------------------------------------------------------


def summary(report: dict[str, Any]) -> RenderableType:
    """A few lines on a run: cycles, utilisation, seconds."""
    table = Table(show_header=False, box=None, pad_edge=False)
    seconds = report["seconds"]
    rows: list[tuple[str, str]] = [
        ("model", f"{report['model']} on {report['device']}, Config {report['config']['name']}")
    ]
    if report["cycles"] is not None:
        speed = report["cycles"] / seconds["run"] if seconds["run"] else 0
        rows.append(("cycles", f"{report['cycles']:,} (memory {report['memory_model']}; {speed:,.0f} a second)"))
        rows.append(("utilisation", f"{percent(report['utilization'])} of the multipliers"))
    share = report["macs_accelerator"] / report["macs_total"] if report["macs_total"] else None
    rows.append(("MACs", f"{report['macs_total']:,}, {percent(share)} on the accelerator"))
    rows.append(
        (
            "operators",
            f"{len(report['layers'])} layers in {report['launches']} launches, {len(report['cpu_nodes'])} on the CPU",
        )
    )
    rows.append(("seconds", ", ".join(f"{name} {value:.2f}" for name, value in seconds.items())))
    for name, value in rows:
        table.add_row(Text(name, style="bold"), Text(printable(value)))
    return table


def estimate(program: Program, memory: MemoryModel = ZYNQ_HP) -> Iterator[RenderableType]:
    """Tables of the cycles that a Program would take."""
    report = explain.estimate(program, memory)
    if not report["layers"]:
        yield Text("Nothing of this model runs on the accelerator; --operators says why.")
        return
    yield _estimated(report)
    for table in (layers(report, every=True), advice_on_layers(report), blocks(report)):
        if table is not None:
            yield Text("")
            yield table


def _estimated(report: dict[str, Any]) -> RenderableType:
    table = Table(show_header=False, box=None, pad_edge=False)
    milliseconds = report["cycles"] / report["clock_mhz"] / 1e3
    rows = [
        ("model", f"{report['model']}, Config {report['config']['name']}"),
        ("cycles", f"{report['cycles']:,} by the timing model (memory {report['memory_model']}): "
                   f"{milliseconds:,.2f} ms at {report['clock_mhz']} MHz, without the CPU's part"),
        ("utilisation", f"{percent(report['utilization'])} of the multipliers"),
    ]  # fmt: skip
    for name, value in rows:
        table.add_row(Text(name, style="bold"), Text(printable(value)))
    return table


def layers(report: dict[str, Any], every: bool = False) -> RenderableType:
    """The layers of a run in their order, and what units did meanwhile; without `every`, those that took longest."""
    rows = report["layers"]
    weight = "cycles" if report["cycles"] is not None else "macs"
    shown = rows
    if not every and len(rows) > TOP_LAYERS:
        longest = sorted(range(len(rows)), key=lambda i: -(rows[i][weight] or 0))[:TOP_LAYERS]
        shown = [rows[i] for i in sorted(longest)]
    left = f", {len(shown)} of {len(rows)} (all: --layers)" if len(shown) < len(rows) else ""
    if report["cycles"] is None:
        table = new_table(f"Layers{left}", "layer", "what", ">MACs", ">loaded", ">stored")
        for row in shown:
            traffic = megabytes(row["bytes_loaded"]), megabytes(row["bytes_stored"])
            add_row(table, row["name"], row["what"], row["macs"], *traffic)
        return table
    units = [f">{unit}" for unit in UNITS]
    table = new_table(
        f"Layers{left}, memory {report['memory_model']}; units: at work + held up, of the layer's cycles",
        "layer", "what", ">MACs", ">cycles", ">array", "bound by", *units, ">loaded", ">stored",
    )  # fmt: skip
    for row in shown:
        shares = [_share(row, unit) for unit in UNITS]
        cycles = "-" if row["cycles"] is None else row["cycles"]
        add_row(
            table, row["name"], row["what"], row["macs"], cycles, percent(row["utilization"]), row["bound"] or "-",
            *shares, megabytes(row["bytes_loaded"]), megabytes(row["bytes_stored"]),
        )  # fmt: skip
    return table


def _share(row: dict[str, Any], unit: str) -> str:
    if not row["cycles"] or row["units"] is None:
        return "-"
    busy, held = (100 * row["units"][unit][what] / row["cycles"] for what in ("busy", "held"))
    return f"{busy:.0f}+{held:.0f}%"


def advice_on_layers(report: dict[str, Any]) -> RenderableType | None:
    """What would make layers faster, and for how many of the cycles; None where nothing is known."""
    found = explain.advised(report)
    if not found:
        return None
    table = new_table("What bounds them", "bound by", "layers", ">of the cycles", "what would help")
    for each in found[:TOP_LAYERS]:
        names = each.longest if each.layers == 1 else f"{each.longest} and {each.layers - 1} more"
        add_row(table, each.bound, names, percent(each.share), each.advice)
    return table


def blocks(report: dict[str, Any]) -> RenderableType | None:
    """The blocks of layers whose intermediates stay on chip; None where there are none."""
    rows = [row for row in report["layers"] if row["bytes_kept"]]
    if not rows:
        return None
    table = new_table(
        "Blocks, cycles alone by the timing model (of layers apart estimated, where that is far above)",
        "block", ">kept on chip", ">cycles apart", ">as a block", ">in this run",
    )  # fmt: skip
    for row in rows:
        cycles = "-" if row["cycles"] is None else row["cycles"]
        add_row(table, row["name"], megabytes(row["bytes_kept"]), row["cycles_apart"], row["cycles_together"], cycles)
    return table


# Against onnxruntime --------------------------------------------------------------------------------------------


def comparison(report: dict[str, Any], every: bool = False) -> Iterator[RenderableType]:
    """What `compare` found: a sentence, and the tensors that differ or lose most, or all of them where `every`."""
    rows = report["tensors"]
    yield Text(
        f"{len(rows)} tensors compared with onnxruntime {report['oracle']} (session.qdqisint8allowed=1), "
        f"{report['different']} differ; {len(report['inside'])} exist inside fused operators only."
    )
    if report["first"] is not None:
        yield Text(f"The first that differs though its operands do not: {_difference(report)}")
    if report["unmatched"] is not None:
        yield from _matching(report)
    shown = rows if every else [row for row in rows if row["differs"]][:TOP_LAYERS]
    if not shown and report["float_model"] is not None:
        losing = sorted((row for row in rows if row["lost_db"] is not None), key=lambda row: -row["lost_db"])
        shown = losing[:TOP_LAYERS]
    if not shown:
        return
    what = "Tensors" if every else "Tensors that differ" if report["different"] else "Tensors that lose most"
    left = f", {len(shown)} of {len(rows)} (all: --all)" if len(shown) < len(rows) else ""
    table = new_table(what + left, "tensor", "made by", "type", ">different", ">largest", ">SQNR dB", ">lost dB")
    for row in shown:
        decibels = ("-" if row[key] is None else f"{row[key]:.1f}" for key in ("sqnr_db", "lost_db"))
        largest = "-" if row["largest"] is None else f"{row['largest']:.3g}"
        add_row(table, row["name"], row["op"], f"{row['dtype']}{row['shape']}", row["different"], largest, *decibels)
    yield table


def _matching(report: dict[str, Any]) -> Iterator[RenderableType]:
    """How tensors of the float model were found, where not all of them were found by name."""
    how = Counter(row["matched"] for row in report["tensors"] if row["matched"])
    if how and set(how) != {"name"}:
        told = ", ".join(f"{how[each]} by {each}" for each in ("name", "structure", "order") if how[each])
        yield Text(f"Tensors of the float model: {told} (--report names each).")
    for model, which in (("model", "the model"), ("float", "the float model")):
        if names := report["unmatched"][model]:
            more = f", and {len(names) - TOP_LAYERS} more" if len(names) > TOP_LAYERS else ""
            yield Text(f"Tensors of {which} that match none: {', '.join(names[:TOP_LAYERS])}{more}")


def _difference(report: dict[str, Any]) -> str:
    row = next(row for row in report["tensors"] if row["name"] == report["first"])
    index, found, expected = row["first"]
    who = f"{row['name']} ({row['op']} {row['node']})"
    if index is None:
        return f"{who} is {row['dtype']}{row['shape']}, onnxruntime's is {expected}"
    return f"{who}{index} is {found}, onnxruntime's is {expected}"


def evaluation(report: dict[str, Any]) -> Iterator[RenderableType]:
    """What `evaluate` found: accuracy, speed, agreement with onnxruntime."""
    others = report["against"]
    table = new_table(f"{report['samples']:,} samples", "", ">top-1", ">top-5", ">images a second", ">cycles an image")
    cycles = "-" if report["cycles"] is None else f"{report['cycles']:,.0f}"
    who = f"{report['config']['name'] or 'accelerator'}, {report['device']}"
    rows = [(who, report, cycles)]
    if others is not None:
        rows.append((f"onnxruntime {others['onnxruntime']}", others, "-"))
    for name, row, spent in rows:
        add_row(table, name, percent(row["top1"]), percent(row["top5"]), f"{row['images_per_second']:,.1f}", spent)
    yield table
    how = f"{report['batch']} images at a time" if report["batch"] > 1 else "one image at a time"
    devices = f"{report['workers']} devices" if report["workers"] > 1 else "one device"
    yield Text(f"{how} on {devices}, {report['seconds']:.2f} s; compiled in {report['compile_seconds']:.2f} s")
    if others is not None:
        same = "" if others["top1_agreement"] is None else f"; top-1 agrees in {percent(others['top1_agreement'])}"
        yield Text(
            f"Samples whose output differs from onnxruntime's (session.qdqisint8allowed=1): {others['differ']} of "
            f"{report['samples']}; bytes: {others['bytes_different']:,} of {others['bytes']:,}{same}"
        )


# Configs ------------------------------------------------------------------------------------------------------


def configs(presets: Iterable[Config]) -> RenderableType:
    """What has a name."""
    from celosia.bitstreams.synthesis import multipliers  # with Amaranth

    table = new_table(
        "Configs (celosia configs NAME prints one; docs/configs.md says what each field costs)",
        "name", ">batch", ">block_in", ">block_out", ">MACs a cycle", ">bus_bytes", ">scratchpads", ">taps", "forward",
        ">residual_cycles", ">ports", ">DSP blocks",
    )  # fmt: skip
    for cfg in presets:
        add_row(
            table, cfg.name, cfg.batch, cfg.block_in, cfg.block_out, cfg.macs_per_cycle, cfg.bus_bytes,
            f"{total_bytes(cfg) / 1024:,.0f} kB", cfg.taps, str(cfg.forward).lower(), cfg.residual_cycles,
            cfg.ports, multipliers(cfg),
        )  # fmt: skip
    return table


def swept(title: str, rows: list[dict[str, Any]]) -> RenderableType:
    """What `sweep` found."""
    from celosia.bitstreams.synthesis import RESOURCES
    from celosia.driver.pages.names import resource

    fields = list(rows[0]["set"])
    table = new_table(title, *(f">{name}" for name in fields), ">cycles", ">utilisation", ">LUT", ">flip-flops", ">DSP",
                   ">block RAM", ">scratchpads", "")  # fmt: skip
    best = min((row["cycles"] for row in rows if row["cycles"]), default=None)
    for row in rows:
        size = "-" if row["bytes"] is None else f"{row['bytes'] / 1024:,.0f} kB"
        remark = row["error"] or ("fewest cycles" if row["cycles"] == best is not None else "")
        cycles = "-" if row["cycles"] is None else row["cycles"]
        values = (str(value).lower() for value in row["set"].values())
        add_row(
            table,
            *values,
            cycles,
            percent(row["utilization"]),
            *(resource(row, each) for each in RESOURCES),
            size,
            remark,
        )
    return table


# The cache ----------------------------------------------------------------------------------------------------


def kept(entries: Sequence[Entry]) -> RenderableType:
    """What the cache holds."""
    table = new_table(f"{cache_folder()}", "what", ">kept", ">size", "last used, the oldest")
    for kind, what in KINDS.items():
        own = [entry for entry in entries if entry.kind == kind]
        oldest = datetime.fromtimestamp(own[0].used).strftime("%Y-%m-%d %H:%M") if own else "-"
        add_row(table, what, len(own), megabytes(sum(entry.size for entry in own)), oldest)
    add_row(table, "all", len(entries), megabytes(sum(entry.size for entry in entries)), "")
    return table


# A program ----------------------------------------------------------------------------------------------------


def overview(program: Program) -> RenderableType:
    places = Counter(row["place"] for row in program.placements)
    table = Table(show_header=False, box=None, pad_edge=False)
    share = program.macs_accelerator / program.macs_total if program.macs_total else None
    cfg = program.config
    count = sum(launch.count for launch in program.launches)
    rows = [
        ("model", program.name),
        ("Config", f"{cfg.name}: batch {cfg.batch}, {cfg.block_in} x {cfg.block_out} MACs, {cfg.bus_bytes}-byte bus"),
        *(("input", f"{t.name}: {program.shape_text(t)}") for t in program.inputs),
        *(("output", f"{t.name}: {program.shape_text(t)}") for t in program.outputs),
        *([("n", f"any number of samples, {program.batch} at once")] if program.batched else []),
        ("operators", ", ".join(f"{places[place]} {how}" for place, how in _PLACES.items())),
        ("MACs", f"{program.macs_total:,}, {percent(share)} on the accelerator"),
        ("launches", f"{len(program.launches)}, {count:,} instructions of {instruction_bytes(cfg)} bytes"),
        *([("schedules", program.schedules)] if program.schedules else []),
        (
            "CPU",
            f"{len(program.kernels)} kernels, arena of {megabytes(program.arena.size)}, fusion saves "
            f"{megabytes(sum(step.saved_bytes for step in _kernel_steps(program)))} of reads and writes",
        ),
    ]
    for name, value in rows:
        table.add_row(Text(name, style="bold"), Text(printable(value)))
    return table


def advice(program: Program) -> str | None:
    """What to do with a model of which nothing runs on the accelerator because it is float; None for others."""
    rows = program.placements
    if any(row["place"] == "accelerator" for row in rows) or not any(
        "`celosia quantize`" in row["reason"] for row in rows
    ):
        return None
    return (
        "nothing of this model runs on the accelerator, for it is float; make an int8 model of it first: celosia "
        "quantize MODEL.onnx --calibration SAMPLES -o MODEL_int8.onnx"
    )


_PLACES = {"accelerator": "on the accelerator", "free": "free", "cpu": "on the CPU"}


def operators(program: Program) -> RenderableType:
    """Where each operator of the graph runs, and why."""
    table = new_table("Operators", "operator", "name", "place", "reason")
    for row in program.placements:
        add_row(table, row["op"], row["name"], row["place"], row["reason"])
    return table


def program_layers(program: Program) -> RenderableType:
    """Each layer with its instructions; a GEMM or VECTOR instruction is one tile's work."""
    table = new_table(
        "Layers",
        "layer",
        "what",
        "operators",
        ">MACs",
        *(f">{op.name}" for op in Opcode),
        ">loaded",
        ">stored",
        ">kept on chip",
        "note",
    )
    for launch in program.launches:
        opcodes = [opcode_of(word) for word in program.instructions(launch)]
        for number, layer in enumerate(launch.layers):
            count = Counter(opcode for opcode, owner in zip(opcodes, launch.layer_of) if owner == number)
            add_row(
                table, layer.name, layer.what, ", ".join(layer.nodes), layer.macs, *(count[op] for op in Opcode),
                megabytes(layer.bytes_loaded), megabytes(layer.bytes_stored), megabytes(layer.bytes_kept), layer.note,
            )  # fmt: skip
    return table


def buffers(program: Program) -> RenderableType:
    """DRAM, the CPU's arena and the scratchpads: what each holds and how much of it is used."""
    cfg = program.config
    code = sum(launch.count for launch in program.launches) * instruction_bytes(cfg)
    table = new_table("Buffers", "buffer", ">size", ">used", "what")
    constants = len(program.image) - code
    arena = program.image_address
    add_row(table, "DRAM", megabytes(program.dram_size), "", "the whole")
    add_row(
        table,
        "  activations",
        megabytes(arena),
        megabytes(program.arena_lower_bound),
        "used: the least that any plan needs",
    )
    add_row(table, "  constants", megabytes(constants), megabytes(constants), "weights, parameters, tables")
    add_row(table, "  instructions", megabytes(code), megabytes(code), "")
    least = program.arena.lower_bound
    over = f", {program.arena.size / least:.3f} of that here" if least else ""
    add_row(
        table, "CPU arena", megabytes(program.arena.size), megabytes(least),
        f"{len(program.arena.offsets)} tensors between steps; used: the most that live at once{over}",
    )  # fmt: skip
    used: Counter[str] = Counter()
    for launch in program.launches:
        size = instruction_bytes(cfg)
        start = launch.address - program.image_address
        words = program.image[start : start + launch.count * size].reshape(launch.count, size)
        with explain.decoding(program):
            entries = verify(cfg, words, program.dram_size, (0, program.image_address)).entries
        used |= Counter(entries)
    for name in used:
        add_row(table, name, f"{depths(cfg)[name]:,} entries", f"{used[name]:,}", _SCRATCHPADS.get(name, ""))
    for number, launch in enumerate(program.launches):
        for pack in launch.pack:
            dims = "x".join(map(str, pack.form.dims))
            add_row(table, f"launch {number} in", hex(pack.address), "", f"{pack.value} as {dims}")
        for unpack in launch.unpack:
            dims = "x".join(map(str, unpack.dims))
            add_row(table, f"launch {number} out", hex(unpack.address), "", f"{unpack.value} as {dims}")
    return table


_SCRATCHPADS = {
    "inp": "activations for the multipliers",
    "wgt": "weights",
    "tap": "weights of depthwise convolutions",
    "acc": "int32 sums",
    "vin": "operands of the vector unit",
    "out": "results to be stored",
    "par": "scale, bias and shift of channels",
    "lut": "tables of 256 bytes",
}


def resources(used: Usage, device: Device, title: str) -> RenderableType:
    """What an accelerator takes of a device."""
    from celosia.bitstreams.synthesis import LABELS

    table = new_table(title, "resource", ">used", ">available", ">left")
    left = used.left(device)
    for name, label in LABELS.items():
        add_row(table, label, f"{getattr(used, name):,g}", f"{getattr(device, name):,}", f"{left[name]:.1f}%")
    return table


def timing(found: Timing, title: str) -> RenderableType:
    """The longest paths of an accelerator, and how many paths end at each number of ns."""
    table = new_table(title, ">ns", ">on nets", ">levels", ">fan-out", ">ends", "from", "to")
    for path in found.paths:
        nets = percent(path.nets_ns / path.ns)
        add_row(table, f"{path.ns:.2f}", nets, path.levels, path.fan_out, path.ends, path.start, path.end)
    late = ", ".join(f"{ns}-{ns + 1} ns: {number:,}" for ns, number in reversed(list(found.ends.items())[-5:]))
    placed = " Rounds of placing: " + ", ".join(f"{ns:.2f}" for ns in found.rounds) + " ns." if found.rounds else ""
    return Group(
        table, Text(f"{found.mhz:.1f} MHz ({found.ns:.2f} ns). Ends of paths, {late}.{placed}\n{found.caveat}")
    )


def passes(program: Program) -> RenderableType:
    """The passes over the graph in order, and how many operators each left."""
    table = new_table("Passes", "pass", ">operators before", ">after", "what it does")
    for each in program.passes:
        add_row(table, each.name, each.before, each.after, each.doc)
    return table


def kernels(program: Program) -> RenderableType:
    """The operators that share each kernel of the CPU, and the reads and writes that they save by it."""
    table = new_table("Kernels", ">kernel", "operators", ">saved traffic")
    for step in _kernel_steps(program):
        add_row(table, str(step.kernel), " ".join(node.op for node in step.nodes), megabytes(step.saved_bytes))
    add_row(table, "all", "", megabytes(sum(step.saved_bytes for step in _kernel_steps(program))))
    return table


def _kernel_steps(program: Program) -> list[CpuStep]:
    return [step for step in program.steps if isinstance(step, CpuStep) and step.kernel is not None]


def graphs(program: Program, texts: dict[str, str], only: str | None = None) -> Iterator[str]:
    """The graph after each pass, from `texts`, where the pass changed it. ProgramError where `only` is no pass."""
    names = ["import", *(each.name for each in program.passes)]
    if only is not None and only not in names:
        raise ProgramError(f"there is no pass {only!r}; the passes are {', '.join(names)}")
    if not texts:
        if only is not None:
            raise ProgramError("a Program holds no graphs; give the ONNX model to see the graph after a pass")
        yield "A Program holds no graphs; give the ONNX model to see them."
    before = None
    for name, text in texts.items():
        if only in (None, name):
            yield ""
            yield f"After {name}:" if text != before or only else f"After {name}: unchanged"
            if text != before or only:
                yield text.rstrip()
        before = text


def disassembly(program: Program, layer: str | None = None) -> Iterator[str]:
    """Lines of every instruction, in the order of the program. ProgramError where no layer is called `layer`."""
    wanted = None if layer is None else _layer(program, layer).name
    for number, launch in enumerate(program.launches):
        yield f"launch {number}: {launch.count} instructions at {launch.address:#x}"
        last = -1
        lines = listing(program.config, program.instructions(launch))
        for line, owner in zip(lines, launch.layer_of):
            info = launch.layers[owner]
            if wanted is not None and info.name != wanted:
                continue
            if owner != last:
                yield f"; {info.name} ({info.op}: {', '.join(info.nodes)})"
                last = owner
            yield line


def loops(program: Program, layer: str) -> Iterator[str]:
    """The loops of a layer, and the schedule that made them. ProgramError where no layer is called `layer`."""
    info = _layer(program, layer)
    for number, part in enumerate(info.parts):
        which = f", part {number + 1} of {len(info.parts)}" if len(info.parts) > 1 else ""
        decided = ", ".join(f"{name} {value}" for name, value in part.decisions.items())
        yield f"# {info.name} ({info.op}{which}): {part.workload}"
        yield f"# {decided}"
        yield str(program.loops[part.loops])


def _layer(program: Program, name: str) -> LayerInfo:
    """The layer, or the block with the operator, of that name. ProgramError where there is none."""
    infos = [info for launch in program.launches for info in launch.layers]
    found = [info for info in infos if info.name == name] or [info for info in infos if name in info.nodes]
    if not found:
        raise ProgramError(f"there is no layer {name!r}; the layers are {', '.join(i.name for i in infos) or 'none'}")
    return found[0]


def output(name: str, array: NDArray[Any]) -> str:
    """One line on an output: its type, shape, and first values or best class."""
    line = f"{name}: {array.dtype}{list(array.shape)}"
    if array.size == 0:
        return line
    if array.ndim >= 1 and array.shape[-1] == array.size > 1:
        best = int(np.argmax(array))
        return f"{line}, largest at {best}: {array.reshape(-1)[best]}"
    values = " ".join(str(value) for value in array.reshape(-1)[:6])
    return f"{line}, {values}{' ...' if array.size > 6 else ''}"
