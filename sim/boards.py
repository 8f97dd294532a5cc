"""The boards, each once: what the compiler, simulators, bitstreams and drivers know of them."""

from __future__ import annotations

from dataclasses import dataclass

from celosia.hw.config import PRESETS, Config
from celosia.sim.memory import PYNQ_Z1, PYNQ_Z2, ULTRA96, ZCU104, MemoryModel


@dataclass(frozen=True)
class Processor:
    """machine: what `platform.machine()` says there. address: of the accelerator's registers, as it sees them: on GP0
    of a Zynq-7000, on HPM0 of an UltraScale+. bus_bits: of its widest port to memory (UG585, UG1085)."""

    machine: str
    address: int
    bus_bits: int


PROCESSORS = {"zynq": Processor("armv7l", 0x43C0_0000, 64), "zynqmp": Processor("aarch64", 0xA000_0000, 128)}


@dataclass(frozen=True)
class Board:
    """A board on which the accelerator runs.

    board_files: the name that Vivado knows it by. preset: its Config where none is named. processor: one of PROCESSORS.
    memory: its DRAM at the accelerator's clock, as simulators have it.
    """

    name: str
    board_files: str
    preset: str
    processor: str
    memory: MemoryModel

    @property
    def clock_mhz(self) -> int:
        """Of the accelerator."""
        return self.memory.clock_mhz

    @property
    def address(self) -> int:
        """Of the accelerator's registers."""
        return PROCESSORS[self.processor].address

    @property
    def bus_bits(self) -> int:
        """Of the widest port of its processor to memory."""
        return PROCESSORS[self.processor].bus_bits

    @property
    def machine(self) -> str:
        """What `platform.machine()` says there."""
        return PROCESSORS[self.processor].machine

    @property
    def config(self) -> Config:
        """The Config for which its preset stands."""
        return PRESETS[self.preset]


BOARDS = {
    board.name: board
    for board in (
        Board("pynq-z1", "pynq-z1", "pynq", "zynq", PYNQ_Z1),
        Board("pynq-z2", "pynq-z2", "pynq", "zynq", PYNQ_Z2),
        Board("ultra96", "ultra96v2", "ultra96", "zynqmp", ULTRA96),
        Board("zcu104", "zcu104", "zcu104", "zynqmp", ZCU104),
    )
}
