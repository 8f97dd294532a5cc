"""One model on many Configs: cycles by the timing model, and what is known of the hardware without building it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from celosia.bitstreams.devices import DEVICES
from celosia.bitstreams.synthesis import RESOURCES
from celosia.compiler.graph.importer import ModelError
from celosia.driver.explore.hardware import Resources
from celosia.driver.explore.subject import Subject, timed
from celosia.driver.pages.names import resource
from celosia.hw.config import Config, ConfigError
from celosia.hw.config_doc import scratchpads
from celosia.sim.memory import ZYNQ_HP, MemoryModel, memory_model

MOST = 200
"""Configs that one sweep may try."""
Values = Mapping[str, Sequence[int | bool]]


def settings(given: Sequence[str]) -> dict[str, list[int | bool]]:
    """The values of fields in texts such as `inp_depth=1024,4096`. ConfigError.

    >>> settings(["bus_bytes=8,16", "forward=true"])
    {'bus_bytes': [8, 16], 'forward': [True]}
    """
    fields = {field.name for field in dataclasses.fields(Config)} - {"name"}
    found: dict[str, list[int | bool]] = {}
    for text in given:
        name, equals, values = text.partition("=")
        if not equals or not values:
            raise ConfigError(f"{text!r} sets no field; write it as inp_depth=1024,4096")
        if name not in fields:
            raise ConfigError(f"unknown Config field {name!r}; known are {', '.join(sorted(fields))}")
        if name in found:
            raise ConfigError(f"{name} is set twice; give all of its values at once, as {name}=...,...")
        found[name] = list(dict.fromkeys(_value(name, value) for value in values.split(",")))
    return found


def _value(name: str, text: str) -> int | bool:
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
    """A row for each combination of `values` of Config fields, in order, on top of `base`.

    cycles and utilization come from the timing model on that memory, under the compiler's own decisions, whatever
    records there are; bytes are those of scratchpads. dsp, ram (of 36 kbit), lut and ff are of a xc7z020: `counted`
    where `celosia bitstream report` has counted them, else dsp and ram from the Config, and lut and ff by the model of
    `bitstreams/area.py`; `extrapolated` where it knows nothing of the kind. A Config that cannot be, or that the model
    does not fit, has `error` and no cycles. ConfigError for more than MOST.
    """
    first, behind = Config.load(base), memory_model(memory)
    combinations = [dict(zip(values, each)) for each in itertools.product(*values.values())]
    if len(combinations) > MOST:
        raise ConfigError(f"these are {len(combinations)} Configs, and a sweep takes at most {MOST}; give fewer values")
    rows, subject = [], Subject.of(model)
    for number, fields in enumerate(combinations):
        named = ", ".join(f"{name} {value}" for name, value in fields.items())
        progress(f"Config {number + 1} of {len(combinations)}: {named}")
        rows.append(_row(subject, first, fields, behind))
    return rows


def _row(model: Subject, base: Config, fields: dict[str, int | bool], memory: MemoryModel) -> dict[str, Any]:
    row: dict[str, Any] = {
        "set": fields, "cycles": None, "utilization": None, "dsp": None, "bytes": None, "lut": None, "ff": None,
        "ram": None, "counted": False, "extrapolated": False, "error": None,
    }  # fmt: skip
    try:
        cfg = dataclasses.replace(base, **fields, name="custom")  # type: ignore[arg-type]
    except ConfigError as error:
        return row | {"error": str(error)}
    row |= _hardware(cfg)
    try:
        cost = timed(model, cfg, memory)
    except ModelError:
        raise
    except ValueError as error:  # what this Config cannot run
        return row | {"error": str(error)}
    peak = cost.cycles * cfg.macs_per_cycle
    return row | {"cycles": cost.cycles, "utilization": cost.macs / peak if peak else None}


def _hardware(cfg: Config) -> dict[str, Any]:
    used = Resources.of(cfg, DEVICES["xc7z020"])
    return {
        "lut": used.lut, "ff": used.ff, "dsp": used.dsp, "ram": used.ram, "counted": used.counted,
        "extrapolated": used.extrapolated, "bytes": sum(scratchpads(cfg).values()),
    }  # fmt: skip


def note() -> str:
    """What the resources of a sweep are, in a sentence."""
    from celosia.bitstreams.area import model

    off = model().error
    return (
        f"DSP blocks and block RAM (36 kbit) as declared; ~ LUTs and flip-flops by a model of {len(model().rows)} "
        f"Configs, at most {off['lut']:.1%} and {off['ff']:.1%} off where it did not know one, with ? beyond all of "
        "them; without ~ counted by Yosys. For a xc7z020."
    )


# A page ---------------------------------------------------------------------------------------------------------

WIDTH, HEIGHT, LEFT, BELOW = 720, 380, 90, 60
COLOURS = ("#1b6ca8", "#c8553d", "#2f855a", "#8a4fa3", "#b7791f", "#4a5568", "#d53f8c", "#0987a0")


def page(title: str, rows: Sequence[dict[str, Any]], note: str = "") -> str:
    """The rows as one HTML file that needs no other: cycles over the first field, a line for each choice of the others,
    and all of them as a table."""
    fields = list(rows[0]["set"]) if rows else []
    head = [
        *fields, "cycles", "utilisation", "LUT", "flip-flops", "DSP", "block RAM", "scratchpads, kB", "error",
    ]  # fmt: skip
    body = "\n".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in _cells(row))}</tr>" for row in rows)
    return (
        f"<!doctype html>\n<html lang='en'><meta charset='utf-8'><title>{escape(title)}</title>\n"
        "<style>body{font:15px sans-serif;margin:2em}td,th{padding:.2em .8em;text-align:right}"
        "svg{max-width:100%}</style>\n"
        f"<h1>{escape(title)}</h1>\n<p>{escape(note)}</p>\n{_plot(rows)}\n"
        f"<table><tr>{''.join(f'<th>{escape(name)}</th>' for name in head)}</tr>\n{body}</table></html>\n"
    )


def _cells(row: dict[str, Any]) -> Iterator[str]:
    yield from (str(value).lower() for value in row["set"].values())
    yield "-" if row["cycles"] is None else f"{row['cycles']:,}"
    yield "-" if row["utilization"] is None else f"{row['utilization']:.1%}"
    yield from (resource(row, name) for name in RESOURCES)
    yield "-" if row["bytes"] is None else f"{row['bytes'] / 1024:,.0f}"
    yield row["error"] or ""


def _plot(rows: Sequence[dict[str, Any]]) -> str:
    """Inline SVG; nothing where no Config has cycles."""
    there = [row for row in rows if row["cycles"]]
    if not there:
        return ""
    field, *others = there[0]["set"]
    places = list(dict.fromkeys(row["set"][field] for row in rows))
    most = max(row["cycles"] for row in there)
    step = (WIDTH - LEFT - 40) / max(1, len(places) - 1)

    def at(row: dict[str, Any]) -> tuple[float, float]:
        return LEFT + 20 + places.index(row["set"][field]) * step, 20 + (HEIGHT - BELOW - 20) * (
            1 - row["cycles"] / most
        )

    lines: dict[str, list[dict[str, Any]]] = {}
    for row in there:
        lines.setdefault(", ".join(f"{name} {row['set'][name]}" for name in others), []).append(row)
    parts = [f"<line x1='{LEFT}' y1='{y:.0f}' x2='{WIDTH}' y2='{y:.0f}' stroke='#ddd'/>"
             f"<text x='{LEFT - 6}' y='{y + 5:.0f}' text-anchor='end'>{most * part / 4:,.0f}</text>"
             for part in range(5) for y in [20 + (HEIGHT - BELOW - 20) * (1 - part / 4)]]  # fmt: skip
    for number, place in enumerate(places):
        x = LEFT + 20 + number * step
        parts.append(f"<text x='{x:.0f}' y='{HEIGHT - BELOW + 25}' text-anchor='middle'>{str(place).lower()}</text>")
    parts.append(f"<text x='{(LEFT + WIDTH) / 2:.0f}' y='{HEIGHT - 8}' text-anchor='middle'>{escape(field)}</text>")
    for number, (name, own) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        points = " ".join("{:.1f},{:.1f}".format(*at(row)) for row in own)
        parts.append(f"<polyline points='{points}' fill='none' stroke='{colour}' stroke-width='2'/>")
        for row in own:
            x, y = at(row)
            told = escape(f"{name + ', ' if name else ''}{field} {row['set'][field]}: {row['cycles']:,} cycles")
            parts.append(f"<circle cx='{x:.1f}' cy='{y:.1f}' r='4' fill='{colour}'><title>{told}</title></circle>")
        if name:
            y = 20 + 18 * number
            parts.append(f"<text x='{WIDTH + 10}' y='{y}' fill='{colour}'>{escape(name)}</text>")
    width = WIDTH + (260 if others else 0)
    return f"<svg viewBox='0 0 {width} {HEIGHT}' width='{width}' font-size='13'>{''.join(parts)}</svg>"
