"""Summary of a run or of a predicted run: cycles, the table of layers, advice, blocks, outputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from celosia.compiler.program import Program
from celosia.driver.run import explain
from celosia.driver.run.explain import UNITS
from celosia.driver.show.text_table import TOP_LAYERS, add_row, megabytes, new_table, percent
from celosia.hw.boards.memory import ZYNQ_HP
from celosia.plain import printable

if TYPE_CHECKING:
    from celosia.hw.boards.memory import MemoryModel


def summary(report: dict[str, Any]) -> RenderableType:
    """Return a table on a run: cycles, utilisation, seconds."""
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
    """Yield tables of the predicted cycles of a Program."""
    report = explain.estimate(program, memory)
    if not report["layers"]:
        yield Text("Nothing of this model runs on the accelerator; --operators says why.")
        return
    yield _estimate_table(report)
    for table in (layers(report, every=True), advice_on_layers(report), blocks(report)):
        if table is not None:
            yield Text("")
            yield table


def _estimate_table(report: dict[str, Any]) -> RenderableType:
    """Return a table of the predicted figures of a Program."""
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
    """Return a table of the layers of a run, in order, with the shares of cycles in which the units worked.

    every: all layers, else the TOP_LAYERS that took longest.
    """
    rows = report["layers"]
    weight = "cycles" if report["cycles"] is not None else "macs"
    shown = rows
    if not every and len(rows) > TOP_LAYERS:
        longest = sorted(range(len(rows)), key=lambda i: -(rows[i][weight] or 0))[:TOP_LAYERS]
        shown = [rows[i] for i in sorted(longest)]
    count_text = f", {len(shown)} of {len(rows)} (all: --layers)" if len(shown) < len(rows) else ""
    if report["cycles"] is None:
        table = new_table(f"Layers{count_text}", "layer", "what", ">MACs", ">loaded", ">stored")
        for row in shown:
            traffic = megabytes(row["bytes_loaded"]), megabytes(row["bytes_stored"])
            add_row(table, row["name"], row["what"], row["macs"], *traffic)
        return table
    units = [f">{unit}" for unit in UNITS]
    table = new_table(
        f"Layers{count_text}, memory {report['memory_model']}; units: busy + stalled, of the layer's cycles",
        "layer", "what", ">MACs", ">cycles", ">array", "bound by", *units, ">loaded", ">stored",
    )  # fmt: skip
    for row in shown:
        shares = [_unit_share(row, unit) for unit in UNITS]
        cycles = "-" if row["cycles"] is None else row["cycles"]
        add_row(
            table, row["name"], row["what"], row["macs"], cycles, percent(row["utilization"]), row["bound"] or "-",
            *shares, megabytes(row["bytes_loaded"]), megabytes(row["bytes_stored"]),
        )  # fmt: skip
    return table


def _unit_share(row: dict[str, Any], unit: str) -> str:
    """Return the shares of a layer's cycles in which a unit was busy and in which it was stalled: "50+10%"."""
    if not row["cycles"] or row["units"] is None:
        return "-"
    busy, held = (100 * row["units"][unit][counter] / row["cycles"] for counter in ("busy", "held"))
    return f"{busy:.0f}+{held:.0f}%"


def advice_on_layers(report: dict[str, Any]) -> RenderableType | None:
    """Return a table of advice that would make layers faster, with their shares of the cycles; None without any."""
    advice_list = explain.advise_by_cycles(report)
    if not advice_list:
        return None
    table = new_table("What bounds them", "bound by", "layers", ">of the cycles", "what would help")
    for advice in advice_list[:TOP_LAYERS]:
        names = advice.longest if advice.layers == 1 else f"{advice.longest} and {advice.layers - 1} more"
        add_row(table, advice.bound, names, percent(advice.share), advice.advice)
    return table


def blocks(report: dict[str, Any]) -> RenderableType | None:
    """Return a table of the blocks of layers whose intermediates stay on chip; None where there are none."""
    rows = [row for row in report["layers"] if row["bytes_kept"]]
    if not rows:
        return None
    table = new_table(
        "Blocks, cycles behind the layer before, by the timing model",
        "block", ">kept on chip", ">cycles apart", ">as a block", ">in this run",
    )  # fmt: skip
    for row in rows:
        cycles = "-" if row["cycles"] is None else row["cycles"]
        apart = row["cycles_apart"] or "-"
        add_row(table, row["name"], megabytes(row["bytes_kept"]), apart, row["cycles_together"], cycles)
    return table


def output(name: str, array: NDArray[Any]) -> str:
    """Return one line on an output: its type, shape, and first values or best class."""
    line = f"{name}: {array.dtype}{list(array.shape)}"
    if array.size == 0:
        return line
    if array.ndim >= 1 and array.shape[-1] == array.size > 1:
        best = int(np.argmax(array))
        return f"{line}, largest at {best}: {array.reshape(-1)[best]}"
    values = " ".join(str(value) for value in array.reshape(-1)[:6])
    return f"{line}, {values}{' ...' if array.size > 6 else ''}"
