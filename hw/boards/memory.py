"""Memory models: behaviour of the memory behind the AXI ports, for the RTL simulator and for the timing model."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True)
class MemoryModel:
    """Behaviour of the memory behind the AXI ports. Times are cycles; the defaults are high-performance ports of a
    Zynq.

    clock_mhz: of the accelerator, whose cycles these are. read_latency: from the acceptance of a read's address to its
    first beat. write_latency: from the last beat of a write to its response. outstanding: bursts accepted on a port,
    each way, before the first has ended. In `refresh_cycles` of every `refresh_period` no beat moves. bytes_per_cycle:
    of the DRAM, all ports and both ways together (0: no limit); each port passes at most one beat a cycle each way, and
    they take turns where the DRAM has less. stall: share of the cycles in which each channel pauses, at random from
    `seed`. jitter: up to so many cycles are added to each latency. For tests: beats with a byte in [error_start,
    error_end), offsets from the DMA base, are answered with SLVERR or DECERR, at random from `seed`; from cycle
    `freeze_after` of a run on memory does nothing, for `freeze_cycles` or for ever.
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
        if self.clock_mhz < 1:
            raise ValueError(f"clock_mhz must be at least 1, not {self.clock_mhz}")
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


@dataclass(frozen=True)
class Dram:
    """The DRAM of a board.

    bits, megatransfers: of the data bus, and a second; what they move is the most that the pins can. Refreshes are
    modelled: one every `refresh_every_ns`, for `refresh_ns`; changes of row and of direction are not.
    """

    bits: int
    megatransfers: int
    refresh_every_ns: int
    refresh_ns: int

    def behind(self, name: str, clock_mhz: int) -> MemoryModel:
        """Memory model of this DRAM behind the ports of ZYNQ_HP, whose latency and outstanding bursts it keeps.
        clock_mhz: of the accelerator."""
        return MemoryModel(
            name, clock_mhz,
            refresh_period=self.refresh_every_ns * clock_mhz // 1000,
            refresh_cycles=-(-self.refresh_ns * clock_mhz // 1000),
            bytes_per_cycle=self.bits // 8 * self.megatransfers // clock_mhz,
        )  # fmt: skip


def random_stalls(seed: int, stall: float = 0.3, jitter: int = 60) -> MemoryModel:
    """A memory that pauses at random, for tests."""
    return MemoryModel("random", read_latency=3, write_latency=3, stall=stall, jitter=jitter, seed=seed)
