"""How the memory behind the AXI ports behaves, for the RTL simulator and for the timing model."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from celosia.hw.config import did_you_mean


@dataclass(frozen=True)
class MemoryModel:
    """How the memory behind the AXI ports behaves. Times are cycles; the defaults are high-performance ports of a Zynq.

    clock_mhz: of the accelerator, whose cycles these are. read_latency: from the acceptance of a read's address to its
    first beat. write_latency: from the last beat of a write to its response. outstanding: bursts accepted on a port,
    each way, before the first has ended. In `refresh_cycles` of every `refresh_period` no beat moves. bytes_per_cycle:
    of the DRAM, all ports and both ways together (0: no limit); each port passes at most one beat a cycle each way, and
    they take turns where the DRAM has less. stall: share of the cycles in which each channel pauses, at random from
    `seed`. jitter: up to so many cycles are added to each latency. For tests: beats with a byte in [error_start,
    error_end), offsets from the DMA base, are answered with SLVERR; from cycle `freeze_after` of a run on memory does
    nothing, for `freeze_cycles` or for ever.
    """

    name: str = "zynq-hp"
    clock_mhz: int = 100
    read_latency: int = 40
    write_latency: int = 40
    outstanding: int = 8
    refresh_period: int = 780
    refresh_cycles: int = 16
    bytes_per_cycle: int = 32
    stall: float = 0.0
    jitter: int = 0
    seed: int = 0
    error_start: int = 0
    error_end: int = 0
    freeze_after: int | None = None
    freeze_cycles: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.stall < 1:
            raise ValueError(f"stall must be at least 0 and below 1, not {self.stall}")
        if self.outstanding < 1:
            raise ValueError(f"outstanding must be at least 1, not {self.outstanding}")

    def __str__(self) -> str:
        """Name and whatever differs from the defaults: what a published cycle count is quoted with."""
        different = [
            f"{field.name}={getattr(self, field.name)}"
            for field in dataclasses.fields(self)
            if field.name != "name" and getattr(self, field.name) != field.default
        ]
        return f"{self.name} ({', '.join(different)})" if different else self.name


ZYNQ_HP = MemoryModel()
IDEAL = MemoryModel("ideal", read_latency=1, write_latency=1, outstanding=16, refresh_period=0, bytes_per_cycle=0)


def _dram(
    name: str, clock_mhz: int, bits: int, megatransfers: int, refresh_every_ns: int, refresh_ns: int
) -> MemoryModel:
    """The DRAM of a board behind the ports of ZYNQ_HP, whose latency and outstanding bursts it keeps.

    bits, megatransfers: of the data bus, and a second; what they move is the most that the pins can. Of what a
    controller loses, refreshes are in the model; changes of row and of direction are not.
    """
    return MemoryModel(
        name,
        clock_mhz,
        refresh_period=refresh_every_ns * clock_mhz // 1000,
        refresh_cycles=-(-refresh_ns * clock_mhz // 1000),
        bytes_per_cycle=bits // 8 * megatransfers // clock_mhz,
    )


PYNQ_Z1 = _dram("pynq-z1", 100, 16, 1050, 7800, 260)
"""DDR3 of 16 bits at 525 MHz (Digilent, PYNQ-Z1 reference manual): 2.1 GB/s. One chip of 4 Gbit: JESD79-3, tREFI and
tRFC."""
PYNQ_Z2 = dataclasses.replace(PYNQ_Z1, name="pynq-z2")
"""As on the PYNQ-Z1 (TUL, PYNQ-Z2 user manual; its board files have 525 MHz and one chip of 4 Gbit)."""
ULTRA96 = _dram("ultra96", 150, 32, 1066, 3904, 280)
"""LPDDR4 of 32 bits at 533 MHz (Avnet's board files of the Ultra96-V2: LPDDR4_1066): 4.3 GB/s. Channels of 8 Gbit,
refreshed as a whole: JESD209-4, tREFI and tRFCab."""
ZCU104 = _dram("zcu104", 200, 64, 2133, 7800, 260)
"""DDR4 of 64 bits at 1067 MHz (AMD's board files of the ZCU104: DDR4_2133P, though the device may have DDR4-2400):
17.1 GB/s. Chips of 4 Gbit: JESD79-4, tREFI and tRFC1."""
MEMORY_MODELS = {model.name: model for model in (ZYNQ_HP, IDEAL, PYNQ_Z1, PYNQ_Z2, ULTRA96, ZCU104)}


def memory_model(memory: MemoryModel | str) -> MemoryModel:
    """The model of that name. ValueError where there is none."""
    if isinstance(memory, MemoryModel):
        return memory
    if memory not in MEMORY_MODELS:
        *most, last = MEMORY_MODELS
        near = did_you_mean(memory, MEMORY_MODELS)
        raise ValueError(f"there is no memory model {memory!r}{near}; take {', '.join(most)} or {last}")
    return MEMORY_MODELS[memory]


def clock_mhz(described: str | None) -> int:
    """The clock of the memory model that a report describes; 100 where it has none."""
    name = (described or ZYNQ_HP.name).split(" ")[0]
    return MEMORY_MODELS[name].clock_mhz if name in MEMORY_MODELS else ZYNQ_HP.clock_mhz


def random_stalls(seed: int, stall: float = 0.3, jitter: int = 60) -> MemoryModel:
    """A memory that pauses at random, for tests."""
    return MemoryModel("random", read_latency=3, write_latency=3, stall=stall, jitter=jitter, seed=seed)
