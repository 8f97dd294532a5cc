"""Summary of generating text: tokens, speed, runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from celosia.driver.show.text_table import percent
from celosia.plain import printable

if TYPE_CHECKING:
    from celosia.driver.generate.decoder import Decoder


def summary(report: dict[str, Any], length: int, decoder: Decoder) -> RenderableType:
    """Return a table on a session: tokens, cycles, and how far the memory's bandwidth was used."""
    table = Table(show_header=False, box=None, pad_edge=False)
    steps, prompt = report["steps"], report["prompt"]
    runs = [f"{phase['runs']} of {tokens}" for phase, tokens in ((prompt, f"{decoder.chunk} tokens"), (steps, "one"))]
    rows = [
        ("model", f"{decoder.name}, Config {report['config']}"),
        ("sequence", f"{length} of {decoder.length} tokens, in runs: {' and '.join(runs)}"),
        ("a token", f"{report['launches']} launches, {percent(report['share'])} of its products on the accelerator"),
    ]
    if report["cycles_per_token"]:
        rows += [
            ("cycles", f"{report['cycles_per_token']:,.0f} a token (memory {report['memory_model']}): "
                       f"{report['tokens_per_second']:,.0f} tokens a second at {report['clock_mhz']} MHz, without the "
                       "CPU's part"),
            ("memory", f"{steps['bytes_loaded'] // max(steps['runs'], 1):,} bytes loaded a token, "
                       f"{percent(report['bandwidth'])} of what the bus can carry"),
        ]  # fmt: skip
    seconds = steps["seconds"] + prompt["seconds"]
    rows.append(("seconds", f"{seconds:.2f}, simulation included" if report["cycles_per_token"] else f"{seconds:.2f}"))
    for name, value in rows:
        table.add_row(Text(name, style="bold"), Text(printable(value)))
    return table
