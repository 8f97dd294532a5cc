"""What the FPGAs hold, and how much may be built for one of them. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from celosia.hw.blocks import Blocks, Dsp


@dataclass(frozen=True)
class Device:
    """Resources of an FPGA.

    synth: the Yosys command that maps to it. lut: look-up tables, of 6 inputs (ECP5: 4). ff: flip-flops.
    dsp: DSP48 slices (ECP5: 18 x 18 multipliers). ram: block RAMs of 36 kbit (ECP5: 18 kbit).
    source: where the figures stand. blocks: what the hardware asks for by name; None: Yosys infers what multiplies.
    """

    name: str
    synth: str
    lut: int
    ff: int
    dsp: int
    ram: int
    source: str
    blocks: Blocks | None = None


_E1, _E2 = Blocks(Dsp.e1), Blocks(Dsp.e2)
_ZYNQ, _ULTRASCALE = "AMD DS190, Zynq-7000 overview", "AMD DS891, UltraScale+ overview"

DEVICES = {
    device.name: device
    for device in (
        Device("xc7z020", "synth_xilinx -family xc7", 53_200, 106_400, 220, 140, _ZYNQ, _E1),
        Device("xczu3eg", "synth_xilinx -family xcup", 70_560, 141_120, 360, 216, _ULTRASCALE, _E2),
        Device("xczu7ev", "synth_xilinx -family xcup", 230_400, 460_800, 1_728, 312, _ULTRASCALE, _E2),
        Device("lfe5u-85f", "synth_ecp5", 83_640, 83_640, 156, 208, "Lattice FPGA-DS-02012", Blocks(Dsp.mult18)),
    )
}  # fmt: skip


class Design(StrEnum):
    """How much is built: everything, or the gemm unit with its scratchpads."""

    accelerator = "accelerator"
    gemm = "gemm"
