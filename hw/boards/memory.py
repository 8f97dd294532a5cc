"""Timing of the memory behind the accelerator's AXI ports, for the RTL simulator and the timing model."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True)
class MemoryModel:
    """Timing of the memory behind the AXI ports. Times are cycles of the accelerator's clock.

    The defaults are those of high-performance ports of a Zynq-7000.

    name : name on the command line and in reports.
    clock_mhz : the accelerator's clock.
    read_latency : cycles from the acceptance of a read's address to its first beat.
    write_latency : cycles from the last beat of a write to its response.
    outstanding : bursts that a port accepts, each for reads and writes, before the first one has ended.
    refresh_period, refresh_cycles : in `refresh_cycles` of every `refresh_period` cycles no beat moves; 0: no refresh.
    bytes_per_cycle : bandwidth of the DRAM for all ports, reads and writes together; 0: no limit. Each port moves at
        most one beat a cycle in each direction; they take turns if the DRAM is slower.
    stall : share of the cycles in which each AXI channel pauses, at random.
    jitter : largest number of random cycles that are added to a latency.
    seed : of the random numbers.
    error_start, error_end : for tests: byte offsets from the DMA base. A beat with a byte in [error_start, error_end)
        is answered with SLVERR or DECERR, at random.
    freeze_after, freeze_cycles : for tests: from cycle `freeze_after` of a run memory does nothing, for
        `freeze_cycles` cycles; None: never, or for ever.
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
        """Return the name, and in brackets every value that differs from its default; reports quote cycles with it."""
        different = [
            f"{field.name}={getattr(self, field.name)}"
            for field in dataclasses.fields(self)
            if field.name != "name" and getattr(self, field.name) != field.default
        ]
        return f"{self.name} ({', '.join(different)})" if different else self.name


ZYNQ_HP = MemoryModel()
"""A high-performance port of a Zynq-7000 at 100 MHz, with DRAM faster than the port."""
IDEAL = MemoryModel("ideal", read_latency=1, write_latency=1, outstanding=16, refresh_period=0, bytes_per_cycle=0)
"""Memory with the shortest latencies, without refresh and without a limit of bandwidth."""


@dataclass(frozen=True)
class Dram:
    """DRAM of a board. The model counts refreshes, but no time for changes of row or direction.

    The model has one data bus: for a board whose DDR channels are interleaved, `bits` is the sum of their widths.
    Independent DDR channels cannot be described.

    bits : width of the data bus.
    megatransfers : transfers of the data bus in a microsecond.
    refresh_every_ns : time from one refresh to the next, in ns.
    refresh_ns : duration of a refresh, in ns.
    """

    bits: int
    megatransfers: int
    refresh_every_ns: int
    refresh_ns: int

    def memory_model(self, name: str, clock_mhz: int) -> MemoryModel:
        """Return the model `name` of this DRAM behind ports with the latency and outstanding bursts of ZYNQ_HP.

        clock_mhz: the accelerator's clock, in whose cycles the model counts.
        """
        return MemoryModel(
            name, clock_mhz,
            refresh_period=self.refresh_every_ns * clock_mhz // 1000,
            refresh_cycles=-(-self.refresh_ns * clock_mhz // 1000),
            bytes_per_cycle=self.bits // 8 * self.megatransfers // clock_mhz,
        )  # fmt: skip


def random_stalls(seed: int, stall: float = 0.3, jitter: int = 60) -> MemoryModel:
    """Return a memory model that pauses at random, for tests. stall, jitter, seed: see MemoryModel."""
    return MemoryModel("random", read_latency=3, write_latency=3, stall=stall, jitter=jitter, seed=seed)
