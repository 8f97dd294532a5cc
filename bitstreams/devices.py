"""What the FPGAs hold, and how much may be built for one of them. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True)
class Device:
    """Resources of an FPGA.

    synth: the Yosys command that maps to it. lut: look-up tables, of 6 inputs (ECP5: 4). ff: flip-flops.
    dsp: DSP48 slices (ECP5: 18 x 18 multipliers). ram: block RAMs of 36 kbit (ECP5: 18 kbit).
    source: where the figures stand.
    """

    name: str
    synth: str
    lut: int
    ff: int
    dsp: int
    ram: int
    source: str


DEVICES = {
    device.name: device
    for device in (
        Device("xc7z020", "synth_xilinx -family xc7", 53_200, 106_400, 220, 140, "AMD DS190, Zynq-7000 overview"),
        Device("xczu3eg", "synth_xilinx -family xcup", 70_560, 141_120, 360, 216, "AMD DS891, UltraScale+ overview"),
        Device("xczu7ev", "synth_xilinx -family xcup", 230_400, 460_800, 1_728, 312, "AMD DS891, UltraScale+ overview"),
        Device("lfe5u-85f", "synth_ecp5", 83_640, 83_640, 156, 208, "Lattice FPGA-DS-02012"),
    )
}  # fmt: skip


class Design(StrEnum):
    """How much is built: everything, or the gemm unit with its scratchpads."""

    accelerator = "accelerator"
    gemm = "gemm"
