"""The model of the array in C++ gives the same sums as the RTL in every cycle."""

from __future__ import annotations

from pathlib import Path

import dsp_blocks
import pytest
from lockstep import run_lockstep
from thorough import some

from celosia.hw.gemm_core.array import Array, SimulationPlatform
from celosia.hw.spec.blocks import Blocks, Dsp
from celosia.hw.spec.config import Config
from celosia.hw.spec.scratchpads import scratchpads
from celosia.hw.verilog import convert
from celosia.sim.rtl.array_model import PRODUCTS, array_model, defines

pytestmark = pytest.mark.rtl

CONFIGS = {
    "16x16": Config(),
    "batch 2, 8 to 4": Config(batch=2, block_in=8, block_out=4),
    "batch 2, 4 to 8, not packed": Config(batch=2, block_in=4, block_out=8, packed=False),
    "2 to 4": Config(block_in=2, block_out=4),
}

# Prints the first cycle in which sums differ, or "the same". The comparison starts with the first sum, because the
# array holds random values before. Operands are random, then the ends of int8, then all -128, in a sum that goes on
# until it wraps.
COMPARE = """
#include <cstdio>
#include <cstring>
#include <random>
#include "Vboth.h"

enum { RANDOM, ENDS, LOWEST };

int main() {
    VerilatedContext context;
    context.randReset(2);
    context.randSeed(1);
    Vboth top{&context};
    std::mt19937 random{1};
    const auto chance = [&](unsigned of) { return random() % of == 0; };
    const auto edge = [&] { for (int clk : {0, 1}) { top.clk = clk; top.eval(); } };
    const auto fill = [&](auto& port, unsigned size, int kind) {
        int8_t bytes[size];
        for (int8_t& byte : bytes) byte = kind == RANDOM ? random() : kind == ENDS ? (chance(2) ? -128 : 127) : -128;
        std::memcpy(&port, bytes, size);
    };
    top.rst = 1;
    edge();
    top.rst = 0;
    top.valid = top.first = 1;
    edge();
    top.valid = 0;
    for (int i = 0; i < 32; i++) edge();
    for (int cycle = 0; cycle < CYCLES; cycle++) {
        const int kind = cycle < 2000 ? RANDOM : cycle < 4000 ? ENDS : LOWEST;
        top.valid = kind == LOWEST || !chance(4);
        top.first = kind != LOWEST && chance(8);
        top.rst = kind != LOWEST && chance(100);
        fill(top.inp, INP_BYTES, kind);
        fill(top.wgt, WGT_BYTES, kind);
        edge();
        if (std::memcmp(&top.rtl, &top.model, ACC_BYTES)) {
            std::printf("cycle %d", cycle);
            return 0;
        }
    }
    std::printf("the same");
}
"""
CYCLES = 22_000
"""Cycles of a run: 18,000 have -128 x -128 alone. 8 such products make 2^17, so a sum wraps after 16,384 cycles."""


def compared(cfg: Config, folder: Path, model: str, products: str = PRODUCTS.read_text(), blocks: str = "") -> str:
    """Run the RTL and `model` side by side, and return the output of `COMPARE`.

    blocks: Verilog of a DSP48E1; if not empty, the RTL consists of these blocks.
    """
    width = {name: pad.width for name, pad in scratchpads(cfg).items()}
    ports = f"input clk, input rst, input valid, input first, input [{width['inp'] - 1}:0] inp, "
    ports += f"input [{width['wgt'] - 1}:0] wgt"
    outputs = "".join(f", output [{width['acc'] - 1}:0] {name}" for name in ("rtl", "model"))
    inputs = ", ".join(f".{name}({name})" for name in ("clk", "rst", "valid", "first", "inp", "wgt"))
    arrays = [f"  {name}_array {name}_array({inputs}, .total({name}));" for name in ("rtl", "model")]
    texts = [convert(Array(cfg), "rtl_array", simulation=True, platform=Blocks(Dsp.e1) if blocks else None), blocks]
    texts += [convert(Array(cfg), "model_array", simulation=True, platform=SimulationPlatform()), model]
    texts += [f"module both({ports}{outputs});", *arrays, "endmodule"]
    macros = {"CYCLES": CYCLES, **{f"{name.upper()}_BYTES": width[name] // 8 for name in ("inp", "wgt", "acc")}}
    return run_lockstep(folder, "\n".join(texts), COMPARE, {**macros, **defines(cfg)}, products)


@pytest.mark.parametrize("name", some(CONFIGS, [*CONFIGS][1:3]))
def test_same_sums_in_every_cycle(name: str, tmp_path: Path) -> None:
    assert compared(CONFIGS[name], tmp_path, array_model(CONFIGS[name])) == "the same"


@pytest.mark.parametrize("name", some([*CONFIGS][1:], ["2 to 4"]))
def test_same_sums_in_dsp_blocks(name: str, tmp_path: Path) -> None:
    cfg = CONFIGS[name]
    assert compared(cfg, tmp_path, array_model(cfg), blocks=dsp_blocks.model(Dsp.e1)) == "the same"


FAULTS = [
    ("PLACE_BITS'(place - STAGES)", "PLACE_BITS'(place - STAGES + 1)"),  # a cycle too early
    ("first ? 32'd0 : total", "total"),
    ("+ terms[2 * i + 1]", "- terms[2 * i + 1]"),
    ("const int8_t*>(wgt)", "const uint8_t*>(wgt)"),
    ("(o / GROUP * BATCH + b) * GROUP + o % GROUP", "b * BLOCK_OUT + o"),
]


@pytest.mark.parametrize(("right", "wrong"), some(FAULTS, FAULTS[:1]))
def test_a_fault_of_the_model_is_noticed(right: str, wrong: str, tmp_path: Path) -> None:
    cfg = Config(batch=2, block_in=4, block_out=8)
    model, products = array_model(cfg), PRODUCTS.read_text()
    assert (right in model) != (right in products)
    assert compared(cfg, tmp_path, model.replace(right, wrong), products.replace(right, wrong)).startswith("cycle")
