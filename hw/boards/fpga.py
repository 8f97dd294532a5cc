"""FPGA devices and their resources. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from celosia.hw.spec.blocks import Blocks, Dsp

ZYNQ_7000, ULTRASCALE, ECP5 = "synth_xilinx -family xc7", "synth_xilinx -family xcup", "synth_ecp5"
"""The Yosys command that synthesises for each family of FPGAs."""
_BLOCKS = {ZYNQ_7000: Blocks(Dsp.e1), ULTRASCALE: Blocks(Dsp.e2), ECP5: Blocks(Dsp.mult18)}
"""DSP block of each family, by its Yosys command."""


@dataclass(frozen=True)
class Device:
    """Resources of an FPGA.

    name : the device, without package and speed grade.
    synth : the Yosys command that synthesises for it.
    lut : look-up tables of 6 inputs (ECP5: of 4).
    ff : flip-flops.
    dsp : DSP48 slices (ECP5: multipliers of 18 x 18 bits).
    ram : block RAMs of 36 kbit (ECP5: of 18 kbit).
    """

    name: str
    synth: str
    lut: int
    ff: int
    dsp: int
    ram: int

    @property
    def blocks(self) -> Blocks | None:
        """Vendor primitives that the RTL instantiates for this device; None: Yosys infers DSP blocks from `*`."""
        return _BLOCKS.get(self.synth)


FPGAS = {
    device.name: device
    for device in (
        Device("xc7z020", ZYNQ_7000, 53_200, 106_400, 220, 140),  # AMD DS190, Zynq-7000 overview
        Device("xczu3eg", ULTRASCALE, 70_560, 141_120, 360, 216),  # AMD DS891, UltraScale+ overview
        Device("xczu7ev", ULTRASCALE, 230_400, 460_800, 1_728, 312),  # AMD DS891
        Device("xck26", ULTRASCALE, 117_120, 234_240, 1_248, 144),  # AMD DS987, K26 data sheet; its 64 URAM stay unused
        Device("lfe5u-85f", ECP5, 83_640, 83_640, 156, 208),  # Lattice FPGA-DS-02012
    )
}
"""FPGAs with known resources, by device."""
