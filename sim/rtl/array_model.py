"""Fast model of the array of multiply-accumulate cells, for large simulators: products are computed on entry.

The module takes the place of the one that `hw.gemm_core.array` leaves out for the platform `Modelled`. Sums of products
come from C++ (array_model.cpp), for all outputs at once, and wait in a ring until they would have passed the stages of
the real array. In every cycle `total` is what it is in hardware; only signals inside the array are missing.
"""

from __future__ import annotations

from pathlib import Path

from celosia.hw.gemm_core.array import MODEL
from celosia.hw.spec.config import Config
from celosia.hw.spec.scratchpads import scratchpads

PRODUCTS = Path(__file__).with_name("array_model.cpp")
"""The C++ source of `celosia_products`, to be compiled with the macros `defines`."""


def defines(cfg: Config) -> dict[str, int]:
    """Return the C++ macros, by name, with which `PRODUCTS` is compiled for `cfg`."""
    return {"BATCH": cfg.batch, "BLOCK_IN": cfg.block_in, "BLOCK_OUT": cfg.block_out, "GROUP": cfg.group}


def array_model(cfg: Config) -> str:
    """Return the Verilog text of the module that replaces the array of `cfg`."""
    pads = scratchpads(cfg)
    inp, wgt, acc = (f"[{pads[name].width - 1}:0]" for name in ("inp", "wgt", "acc"))
    return f"""
module {MODEL} #(parameter STAGES = 1) (
  input clk, input enter, input leave, input first, input {inp} inp, input {wgt} wgt, output reg {acc} total
);
  localparam PLACE_BITS = $clog2(STAGES + 1);
  import "DPI-C" pure function void celosia_products(input bit {inp} inp, input bit {wgt} wgt, output bit {acc} sums);
  reg {acc} ring [0:(1 << PLACE_BITS) - 1];
  reg [PLACE_BITS - 1:0] place;
  integer lane;
  always @(posedge clk) begin
    automatic reg {acc} leaving;
    automatic reg {acc} sums;
    place <= place + 1;
    if (leave) begin
      leaving = ring[PLACE_BITS'(place - STAGES)];
      for (lane = 0; lane < {cfg.lanes}; lane = lane + 1)
        sums[32 * lane +: 32] = (first ? 32'd0 : total[32 * lane +: 32]) + leaving[32 * lane +: 32];
      total <= sums;
    end
    if (enter) celosia_products(inp, wgt, ring[place]);  // after what leaves: the ring is nobody else's
  end
endmodule
"""
