"""Run one model on many Configs by the timing model (`celosia sweep`); list and draw cycles and hardware estimates."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from celosia.compiler.graph.errors import ModelError
from celosia.driver.explore.model_cost import ExploredModel, explain_nothing_on_accelerator, measure_cycles
from celosia.driver.explore.resource_use import Resources
from celosia.driver.pages.names import NAMES, legend_of, resource_cell
from celosia.driver.pages.page import Page, Section
from celosia.hw.boards.board import Board
from celosia.hw.boards.boards import BOARDS, memory_model
from celosia.hw.boards.fpga import FPGAS
from celosia.hw.boards.memory import ZYNQ_HP, MemoryModel
from celosia.hw.spec.config import Config, ConfigError, did_you_mean
from celosia.hw.spec.scratchpads import total_bytes

DEFAULT_DEVICE = "xc7z020"
"""Device of a row that names none, as rows of older files do."""
MAX_CONFIGS = 200
"""Configs that one sweep may try."""
Values = Mapping[str, Sequence[int | bool]]
"""Values to try, by name of a Config field."""


def parse_settings(texts: Sequence[str]) -> dict[str, list[int | bool]]:
    """Parse texts such as `inp_depth=1024,4096` to values by field. ConfigError.

    >>> parse_settings(["bus_bytes=8,16", "forward=true"])
    {'bus_bytes': [8, 16], 'forward': [True]}
    """
    fields = {field.name for field in dataclasses.fields(Config)} - {"name"}
    values_of: dict[str, list[int | bool]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if not equals or not values:
            raise ConfigError(f"{text!r} sets no field; write it as inp_depth=1024,4096")
        if name not in fields:
            suggestion = did_you_mean(name, fields)
            raise ConfigError(f"unknown Config field {name!r}{suggestion}; known are {', '.join(sorted(fields))}")
        if name in values_of:
            raise ConfigError(f"{name} is set twice; give all of its values at once, as {name}=...,...")
        values_of[name] = list(dict.fromkeys(_parse_value(name, value) for value in values.split(",")))
    return values_of


def _parse_value(name: str, text: str) -> int | bool:
    """Parse the value of a Config field. ConfigError for anything but whole numbers and booleans."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name} cannot be {text!r}: it takes whole numbers, or true and false") from None


def sweep(
    model: str | Path, values: Values, base: str | Path | Config = "pynq", memory: MemoryModel | str = ZYNQ_HP,
    progress: Callable[[str], None] = lambda stage: None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Measure a model on each combination of values of Config fields.

    The timing model counts cycles, with the compiler's own decisions, whatever records there are. Resources are those
    that `celosia bitstream report` has counted. For other Configs, dsp and ram come from the Config, and lut and ff
    from the model of `bitstreams/area.py`.

    Args:
        model: Path of an ONNX model.
        values: Values to try, by name of a Config field; at most MAX_CONFIGS (200) combinations.
        base: Config that has all other fields, as `celosia.compile` takes it.
        memory: Memory model: a MemoryModel, its name, or a board's .toml file.
        progress: Function that is called with the fields of each Config.

    Returns:
        A row for each combination, in order, as a dictionary with these keys:

            - `set`: values of the fields
            - `cycles`: clock cycles; None if there is an `error`
            - `utilization`: share of the multipliers that do useful work, 0 to 1; None if there is an `error`
            - `bytes`: size of the scratchpads, in bytes
            - `dsp`: number of DSP blocks
            - `ram`: number of block RAMs of 36 kbit
            - `lut`, `ff`: number of LUTs and of flip-flops
            - `counted`: whether the resources are counted
            - `extrapolated`: whether the resource model knows no such Config
            - `device`: FPGA of the board that `base` is for, by default a xc7z020
            - `misfit`: why the Config does not fit the device, or its bus not the board; None where it fits
            - `error`: why the Config cannot be built, or does not fit the model; else None

    Raises:
        ConfigError: There are more than MAX_CONFIGS combinations, or `base` is invalid.
        ModelError: The model is invalid, or nothing of it runs on the accelerator.
        ValueError: There is no such memory model.

    Examples:
        >>> import celosia
        >>> rows = celosia.sweep(celosia.models.demo_model_path(), {"bus_bytes": [4, 8]}, "tiny")
        >>> [row["set"]["bus_bytes"] for row in rows], rows[0]["cycles"] > rows[1]["cycles"]
        ([4, 8], True)
    """
    first, dram = Config.load(base), memory_model(memory)
    combinations = [dict(zip(values, choice)) for choice in itertools.product(*values.values())]
    if len(combinations) > MAX_CONFIGS:
        raise ConfigError(
            f"these are {len(combinations)} Configs, and a sweep takes at most {MAX_CONFIGS}; give fewer values"
        )
    rows, subject, board = [], ExploredModel.of(model), board_for(first)
    for number, fields in enumerate(combinations):
        named = ", ".join(f"{name} {value}" for name, value in fields.items())
        progress(f"Config {number + 1} of {len(combinations)}: {named}")
        rows.append(_measure_row(subject, first, fields, dram, board))
    return rows


def board_for(base: Config) -> Board:
    """Return the board whose preset is `base`, into whose device rows must fit; the PYNQ-Z2 where no board has it."""
    return next((board for board in BOARDS.values() if board.config == base), BOARDS["pynq-z2"])


def row_of_fewest_cycles(rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the row with the fewest cycles among those that fit their device; None where none does."""
    fitting = [row for row in rows if row["cycles"] and not row.get("misfit")]
    return min(fitting, key=lambda row: row["cycles"]) if fitting else None


def remark(row: dict[str, Any], best: dict[str, Any] | None) -> str:
    """Return the remark at the end of a row of a table: its error, why it does not fit, or that it is the best."""
    if row["error"]:
        return str(row["error"])
    if row.get("misfit"):
        return f"does not fit: {row['misfit']}"
    return "fewest cycles" if best is not None and row["cycles"] == best["cycles"] else ""


def _measure_row(
    model: ExploredModel, base: Config, fields: dict[str, int | bool], memory: MemoryModel, board: Board
) -> dict[str, Any]:
    """Return the row of `base` with these fields: cycles, estimates of the hardware, or the error. See `sweep`."""
    row: dict[str, Any] = {
        "set": fields, "cycles": None, "utilization": None, "dsp": None, "bytes": None, "lut": None, "ff": None,
        "ram": None, "counted": False, "extrapolated": False, "error": None,
        "device": board.device.name, "misfit": None,
    }  # fmt: skip
    try:
        cfg = dataclasses.replace(base, **fields, name="custom")  # type: ignore[arg-type]
    except ConfigError as error:
        return row | {"error": str(error)}
    row |= _estimate_hardware(cfg, board)
    try:
        cost = measure_cycles(model, cfg, memory)
    except ModelError:
        raise
    except ValueError as error:  # a model that this Config cannot run
        return row | {"error": str(error)}
    if not cost.cycles:
        raise ModelError(explain_nothing_on_accelerator(model))
    peak = cost.cycles * cfg.macs_per_cycle
    return row | {"cycles": cost.cycles, "utilization": cost.macs / peak if peak else None}


def _estimate_hardware(cfg: Config, board: Board) -> dict[str, Any]:
    """Return the columns of a row on the hardware: resources of a Config, and why it does not fit the board
    (`misfit`)."""
    used, misfit = Resources.of(cfg, board.device), None
    if 8 * cfg.bus_bytes > board.bus_bits:
        port = f"the {board.bus_bits // 8} of a memory port of {board.device.name}"
        misfit = f"its bus of {cfg.bus_bytes} bytes is wider than {port}"
    return {
        "misfit": misfit or used.explain_misfit(board.device, 0),
        "lut": used.lut, "ff": used.ff, "dsp": used.dsp, "ram": used.ram, "counted": used.counted,
        "extrapolated": used.extrapolated, "bytes": total_bytes(cfg),
    }  # fmt: skip


def resource_note(rows: Sequence[dict[str, Any]]) -> str:
    """Return the note below the table: which resources are counted, and how good the estimates are."""
    from celosia.bitstreams.area import shipped_model

    error = shipped_model().error
    return (
        "DSP blocks and block RAM (36 kbit) follow from the Config. LUTs and flip-flops with ~ are estimates of a "
        f"model of {len(shipped_model().rows)} Configs, at most {error['lut']:.1%} and {error['ff']:.1%} off for "
        "Configs left out of its fit; ? marks a Config larger than all of them. Without ~ Yosys counted them. For a "
        f"{rows[0]['device']}."
    )


# A page ---------------------------------------------------------------------------------------------------------

WIDTH, HEIGHT, LEFT, BELOW, TOP = 760, 400, 110, 64, 20
"""Size of the plot, and its margins left, below and on top, in pixels."""
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c8c8c", "#b07aa1")
"""Colours of the lines."""


def page(title: str, rows: Sequence[dict[str, Any]], note: str = "") -> Page:
    """Return an HTML page of the rows: a plot of cycles by the first field, and a table.

    The plot has a line for each combination of the other fields. note: text below the table.
    """
    sections = [Section("Configs", html=_table(rows), after=f"<p>{escape(note)}</p>")]
    if measured_rows := [row for row in rows if row["cycles"]]:
        facts = [(f"{len(measured_rows)} of {len(rows)}", "Configs run the model")]
        if (best := row_of_fewest_cycles(rows)) is not None:
            facts += [
                (f"{best['cycles']:,}", f"cycles at least on a {best.get('device', DEFAULT_DEVICE)}"),
                (_fields_text(best["set"]), "has the fewest"),
            ]
        else:
            facts.append(("none", f"of them fits a {rows[0].get('device', DEFAULT_DEVICE)}"))
        field, *other_fields = measured_rows[0]["set"]
        caption = f"By {field}" + (f", a line for each choice of {', '.join(other_fields)}." if other_fields else ".")
        sections.insert(0, Section("Cycles", f"{caption} The pointer on a dot says its cycles.", _plot(rows)))
    else:
        facts = [("none", f"of {len(rows)} Configs runs the model")]
    return Page(title, "", facts, sections)


def _fields_text(fields: Mapping[str, int | bool]) -> str:
    """Return fields and their values as text: "inp_depth 1024, forward true"."""
    return ", ".join(f"{name} {str(value).lower()}" for name, value in fields.items())


def _table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as an HTML table; the best one is marked."""
    head = [*rows[0]["set"], "cycles", "utilisation", *NAMES.values(), "scratchpads", ""] if rows else []
    best = row_of_fewest_cycles(rows)
    lines = []
    for row in rows:
        cells = [str(value).lower() for value in row["set"].values()]
        cells.append("-" if row["cycles"] is None else f"{row['cycles']:,}")
        cells.append("-" if row["utilization"] is None else f"{row['utilization']:.1%}")
        text = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        for name in NAMES:
            share = None if row[name] is None else row[name] / getattr(FPGAS[row.get("device", DEFAULT_DEVICE)], name)
            text += resource_cell(row, name, share)
        size = "-" if row["bytes"] is None else f"{row['bytes'] / 1024:,.0f} kB"
        text += f"<td>{size}</td><td class=said>{escape(remark(row, best))}</td>"
        lines.append(f"<tr{' class=preset' * (row is best)}>{text}</tr>")
    heads = "".join(f"<th>{escape(name)}</th>" for name in head)
    return f'<div class="table"><table><tr>{heads}</tr>{"".join(lines)}</table></div>'


def _tick_step(value: float) -> int:
    """Return the distance of the plot's grid lines: 1, 2 or 5 times a power of ten, at least `value`.

    >>> _tick_step(0.3), _tick_step(16_076), _tick_step(5000)
    (1, 20000, 5000)
    """
    power = int(10 ** max(0, math.ceil(math.log10(max(1, value))) - 1))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= value)


def _plot(rows: Sequence[dict[str, Any]]) -> str:
    """Draw the rows that have cycles as inline SVG: cycles by the first field, a line for each choice of the others."""
    measured_rows = [row for row in rows if row["cycles"]]
    field, *other_fields = measured_rows[0]["set"]
    field_values = list(dict.fromkeys(row["set"][field] for row in rows))
    max_cycles = max(row["cycles"] for row in measured_rows)
    step, plot_height = (WIDTH - LEFT - 60) / max(1, len(field_values) - 1), HEIGHT - BELOW - TOP

    def position(row: dict[str, Any]) -> tuple[float, float]:
        """Return the (x, y) of a row's dot, in pixels."""
        return LEFT + 30 + field_values.index(row["set"][field]) * step, TOP + plot_height * (
            1 - row["cycles"] / max_cycles
        )

    lines: dict[str, list[dict[str, Any]]] = {}
    for row in measured_rows:
        lines.setdefault(_fields_text({name: row["set"][name] for name in other_fields}), []).append(row)
    parts = []
    tick = _tick_step(max_cycles / 4)
    for tick_number in range(int(max_cycles // tick) + 1):
        y = TOP + plot_height * (1 - tick_number * tick / max_cycles)
        parts.append(f'<line x1="{LEFT}" y1="{y:.0f}" x2="{WIDTH}" y2="{y:.0f}" stroke="var(--line)"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 5:.0f}" text-anchor="end">{tick_number * tick:,}</text>')
    for number, value in enumerate(field_values):
        x = LEFT + 30 + number * step
        parts.append(f'<text x="{x:.0f}" y="{HEIGHT - BELOW + 22}" text-anchor="middle">{str(value).lower()}</text>')
    x, y = (LEFT + WIDTH) / 2, TOP + plot_height / 2
    parts.append(f'<text class="axis" x="{x:.0f}" y="{HEIGHT - 12}" text-anchor="middle">{escape(field)}</text>')
    rotation = f'transform="rotate(-90 16 {y:.0f})"'
    parts.append(f'<text class="axis" x="16" y="{y:.0f}" text-anchor="middle" {rotation}>cycles</text>')
    for number, line in enumerate(lines.values()):
        colour = COLOURS[number % len(COLOURS)]
        points = " ".join("{:.1f},{:.1f}".format(*position(row)) for row in line)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for row in line:
            x, y = position(row)
            tooltip = escape(f"{_fields_text(row['set'])}: {row['cycles']:,} cycles")
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{colour}"><title>{tooltip}</title></circle>')
    legend = legend_of([(COLOURS[number % len(COLOURS)], name) for number, name in enumerate(lines) if name])
    view = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}"'
    return f'{legend}<svg class="plot" role="img" aria-label="cycles by {escape(field)}" {view}>{"".join(parts)}</svg>'
