"""Timing arcs of the cells in a netlist of Yosys; delays.toml has the delays and their sources."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

FIGURES: dict[str, Any] = tomllib.loads(Path(__file__).with_name("delays.toml").read_text(encoding="utf-8"))
"""Content of delays.toml. Delays are in ns."""
PART = str(FIGURES["part"])
"""The device whose delays are known."""

Bits = Sequence["int | str"]
"""Nets at the bits of a port: the number of a net, or a string for a constant."""


@dataclass(frozen=True)
class Cell:
    """One cell of a netlist.

    kind : type of the cell, as "LUT6".
    parameters : the cell's parameters by name.
    inputs, outputs : nets at each port, by the port's name.
    """

    kind: str
    parameters: Mapping[str, Any]
    inputs: Mapping[str, Bits]
    outputs: Mapping[str, Bits]

    def number(self, parameter: str, default: int = 1) -> int:
        """Return a numeric parameter, which Yosys writes in binary digits; `default` if the cell does not have it."""
        value = self.parameters.get(parameter, default)
        return int(value, 2) if isinstance(value, str) else int(value)


class Arcs(NamedTuple):
    """Timing arcs of a cell. Times are in ns, nets are numbers.

    launch : (output net, time from the clock's edge).
    through : (input port, input net, output net, time).
    setup : (input port, input net, time before the clock's edge).
    """

    launch: list[tuple[int, float]]
    through: list[tuple[str, int, int, float]]
    setup: list[tuple[str, int, float]]


def arcs(cell: Cell) -> Arcs:
    """Return the timing arcs of `cell`. KeyError for a kind of cell whose delays are not known."""
    if cell.kind == "CARRY4":
        return Arcs([], list(_carry_arcs(cell)), [])
    if cell.kind.startswith("RAMB"):
        return _block_ram_arcs(cell)
    if cell.kind == "DSP48E1":
        return _dsp_arcs(cell)
    row = _delays_of(cell.kind)
    launch = [(bit, ns) for port, ns in row.get("launch", {}).items() for _, bit in _matching_nets(cell.outputs, port)]
    setup = [
        (name, bit, ns) for port, ns in row.get("setup", {}).items() for name, bit in _matching_nets(cell.inputs, port)
    ]
    through = [
        (name, bit, out, ns)
        for port, outputs in row.get("through", {}).items()
        for name, bit in _matching_nets(cell.inputs, port)
        for pattern, ns in outputs.items()
        for _, out in _matching_nets(cell.outputs, _expand_pattern(pattern, port, name))
    ]
    return Arcs(launch, through, setup)


@cache
def _delays_of(kind: str) -> dict[str, Any]:
    """Return the first row of delays.toml whose pattern matches `kind`, a type of cell. KeyError if none does."""
    for row in FIGURES["cell"]:
        if re.fullmatch(row["type"], kind):
            return dict(row)
    raise KeyError(kind)


def _matching_nets(ports: Mapping[str, Bits], pattern: str = ".*") -> Iterator[tuple[str, int]]:
    """Yield (port, net) for each net at the ports whose names match regular expression `pattern`; no constants."""
    for name, bits in ports.items():
        if re.fullmatch(pattern, name):
            yield from ((name, bit) for bit in bits if isinstance(bit, int))


def _expand_pattern(pattern: str, port: str, name: str) -> str:
    """Replace "$1" in `pattern` by the group that regular expression `port` matches in `name`."""
    match = re.fullmatch(port, name)
    return pattern.replace("$1", match[1]) if match and match.groups() else pattern


def _carry_arcs(cell: Cell) -> Iterator[tuple[str, int, int, float]]:
    """Yield the arcs through a CARRY4, four bits of an adder: (input port, input net, output net, ns)."""
    figures = FIGURES["carry"]
    for name, bits in cell.inputs.items():
        for i, bit in enumerate(bits):
            if isinstance(bit, str):
                continue
            for port, outputs in cell.outputs.items():
                for j, out in enumerate(outputs):
                    if isinstance(out, str):
                        continue
                    if name in ("CI", "CYINIT"):
                        delay = figures["in_sum" if port == "O" else "in_carry"][j]
                        yield name, bit, out, delay + (figures["start"] if name == "CYINIT" else 0)
                    elif port == "CO" and j >= i:
                        yield name, bit, out, figures["carry"][i]
                    elif port == "O" and j > i:
                        yield name, bit, out, figures["next"] + figures["each"] * (j - i - 1)
                    elif port == "O" and j == i and name == "S":
                        yield name, bit, out, figures["same"]


def _block_ram_arcs(cell: Cell) -> Arcs:
    """Return the arcs of a block RAM, whose outputs are faster if the cell uses its output register."""
    figures, is_simple_dual_port = FIGURES["ram"], cell.parameters.get("RAM_MODE") == "SDP"
    launch = []
    for name, bit in _matching_nets(cell.outputs):
        port = "A" if is_simple_dual_port or name.startswith(("DOA", "DOPA")) else "B"
        launch.append((bit, figures["launch_registered" if cell.number(f"DO{port}_REG", 0) else "launch"]))
    figure_of_prefix = {"ADDR": "address", "DI": "data", "WE": "write"}
    setup = []
    for name, bit in _matching_nets(cell.inputs):
        if "CLK" not in name:
            figure = next((figure for prefix, figure in figure_of_prefix.items() if name.startswith(prefix)), "other")
            setup.append((name, bit, figures[figure]))
    return Arcs(launch, [], setup)


def _dsp_arcs(cell: Cell) -> Arcs:
    """Return the arcs of a DSP48E1, which depend on the registers that its parameters enable."""
    figures = FIGURES["dsp"]
    operand_registers = {"A": cell.number("AREG"), "B": cell.number("BREG")}
    c_register, product_register, result_register = (cell.number(f"{name}REG") for name in "CMP")
    operation = "add" if cell.parameters.get("USE_MULT", "MULTIPLY") == "NONE" else "multiply"
    product_register = product_register if operation == "multiply" else 0

    launch, through, setup = [], [], []
    for name, bit in _matching_nets(cell.outputs):
        cascade = figures["to_cascade_registered" if result_register else "to_cascade"] if name == "PCOUT" else 0
        times = []
        if result_register:
            times.append(figures["launch"])
        else:
            if product_register:
                times.append(figures["launch_product"])
            elif any(operand_registers.values()):
                times.append(figures["launch_operand"][operation])
            if c_register:
                times.append(figures["launch_c"])
        launch += [(bit, ns + cascade) for ns in times]

    def setup_or_through(name: str) -> tuple[float | None, float]:
        """Return the setup time of input `name`, or None without a register behind it; and the time to the output."""
        side = name.removesuffix("CIN") if name in ("ACIN", "BCIN") else name
        if side in operand_registers:
            if operand_registers[side]:
                return figures["setup"][side], 0
            if product_register:
                return figures["setup_product"], 0
            return (figures["setup_result"][operation] if result_register else None), figures["through"][operation]
        if name == "C":
            setup_ns = figures["setup"]["C"] if c_register else figures["setup_result_c"] if result_register else None
            return setup_ns, figures["through_c"]
        if name == "PCIN":
            return (figures["setup_result_cascade"] if result_register else None), figures["through_cascade"]
        return figures["other"], 0

    for name, bit in _matching_nets(cell.inputs):
        if "CLK" in name:
            continue
        setup_ns, through_ns = setup_or_through(name)
        if setup_ns is not None:
            setup.append((name, bit, setup_ns))
        else:
            through += [
                (name, bit, out, through_ns + (figures["to_cascade"] if port == "PCOUT" else 0))
                for port, out in _matching_nets(cell.outputs)
            ]
    return Arcs(launch, through, setup)
