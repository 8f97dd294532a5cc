"""Tables of `celosia configs`, `boards`, `sweep`, `doctor` and `cache`.

They show presets, boards, Configs that a sweep has measured, installed programs, and cached files.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType

from celosia.cache import CACHE_KINDS, CachedFile, cache_folder
from celosia.driver.show.text_table import add_row, megabytes, new_table, percent
from celosia.hw.spec.config import Config
from celosia.hw.spec.scratchpads import total_bytes
from celosia.tools import Choice

if TYPE_CHECKING:
    from celosia.hw.boards.board import Board


def configs(presets: Iterable[Config]) -> RenderableType:
    """Return the table of `celosia configs`: for each preset its main fields, and its DSP blocks."""
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


def boards(all_boards: Iterable[Board]) -> RenderableType:
    """Return the table of `celosia boards`: for each board its FPGA, its resources, its clock, and its DRAM."""
    table = new_table(
        "Boards (celosia boards NAME prints one; docs/boards.md tells of your own)",
        "name", "part", "Config", ">MHz wanted", ">LUT", ">flip-flops", ">DSP blocks", ">block RAM", ">DRAM, B a cycle",
    )  # fmt: skip
    for board in all_boards:
        device = board.device
        add_row(
            table, board.name, board.part, board.config.name, board.clock_mhz, device.lut, device.ff, device.dsp,
            device.ram, board.memory.bytes_per_cycle,
        )  # fmt: skip
    return table


def swept(title: str, rows: list[dict[str, Any]]) -> RenderableType:
    """Return the table of `celosia sweep`: for each Config the fields swept, cycles, resources, and a remark.

    rows: the result of `sweep.sweep`.
    """
    from celosia.bitstreams.synthesis import RESOURCES
    from celosia.driver.explore.sweep import remark, row_of_fewest_cycles
    from celosia.driver.pages.names import resource

    fields = list(rows[0]["set"])
    table = new_table(title, *(f">{name}" for name in fields), ">cycles", ">utilisation", ">LUT", ">flip-flops", ">DSP",
                   ">block RAM", ">scratchpads", "")  # fmt: skip
    best = row_of_fewest_cycles(rows)
    for row in rows:
        size = "-" if row["bytes"] is None else f"{row['bytes'] / 1024:,.0f} kB"
        cycles = "-" if row["cycles"] is None else row["cycles"]
        values = (str(value).lower() for value in row["set"].values())
        add_row(
            table,
            *values,
            cycles,
            percent(row["utilization"]),
            *(resource(row, name) for name in RESOURCES),
            size,
            remark(row, best),
        )
    return table


def cache_contents(entries: Sequence[CachedFile]) -> RenderableType:
    """Return a table of the cache's files."""
    table = new_table(f"{cache_folder()}", "what", ">kept", ">size", "last used, the oldest")
    for kind, kind_text in CACHE_KINDS.items():
        of_kind = [entry for entry in entries if entry.kind == kind]
        oldest = datetime.fromtimestamp(of_kind[0].used).strftime("%Y-%m-%d %H:%M") if of_kind else "-"
        add_row(table, kind_text, len(of_kind), megabytes(sum(entry.size for entry in of_kind)), oldest)
    add_row(table, "all", len(entries), megabytes(sum(entry.size for entry in entries)), "")
    return table


def tools(choices: Iterable[Choice]) -> RenderableType:
    """Return a table of the programs that Celosia runs, and of those that it found."""
    table = new_table("Programs that Celosia runs", "name", "version", "where", "what for", "note")
    for choice in choices:
        add_row(table, choice.tool.name, choice.version or "missing", choice.source, choice.tool.purpose, choice.note)
    return table
