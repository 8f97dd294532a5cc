"""Imitate the accelerator's registers and a memory, for tests of a board that several hosts share."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from celosia.hw.sources import sources_identity
from celosia.hw.spec.config import Config
from celosia.hw.spec.regs import (
    CONTROL_ABORT,
    CONTROL_START,
    MAGIC,
    REGISTERS,
    STATUS_BUSY,
    STATUS_DONE,
    STATUS_ERROR_SHIFT,
    STATUS_STUCK,
    Access,
    Error,
)

NAMES = {register.offset: name for name, register in REGISTERS.items()}


class Accelerator:
    """Registers as BoardDevice accesses them.

    A run lasts `length` units of `now`, which by default counts accesses. Its cycle counter returns the address of its
    instructions, so that a test can tell whose run it was.
    """

    def __init__(self, config: Config, length: float = 5, now: Callable[[], float] | None = None) -> None:
        self.values = dict.fromkeys(REGISTERS, 0)
        self.values |= {"magic": MAGIC, "identity": config.identity, "sources": sources_identity()}
        self.length, self.accesses = length, 0
        self.now = now or (lambda: self.accesses)
        self.started: float | None = None
        self.renewed = 0.0
        self.error = Error.NONE
        self.done = self.stuck = False
        self.starts, self.aborts = 0, 0

    def _advance(self) -> None:
        """Count an access; end the run if its time or its lease is over."""
        self.accesses += 1
        if self.started is None:
            return
        lease = self.values["lease"]
        if lease and self.now() - self.renewed > lease:
            self._end(Error.LEASE)
        elif self.now() - self.started >= self.length:
            self._end(Error.NONE)
            self.values["cycles_lo"] = self.values["dma_base_lo"] + self.values["instr_addr"]

    def _end(self, error: Error) -> None:
        self.started, self.done, self.error = None, True, error

    def read(self, offset: int) -> int:
        self._advance()
        busy = self.started is not None
        flags = STATUS_BUSY * busy | STATUS_DONE * self.done | STATUS_STUCK * self.stuck
        self.values["status"] = flags | self.error << STATUS_ERROR_SHIFT
        return self.values.get(NAMES.get(offset, ""), 0)

    def write(self, offset: int, value: int) -> None:
        self._advance()
        name, busy = NAMES[offset], self.started is not None
        access = REGISTERS[name].access
        if name == "control":
            if value & CONTROL_ABORT and busy:
                self.aborts += 1
                self._end(Error.ABORTED)
            elif value & CONTROL_START and not busy and not self.stuck:
                self.started = self.renewed = self.now()
                self.starts, self.done, self.error = self.starts + 1, False, Error.NONE
                self.values |= {"runs": self.starts, "cycles_lo": 0}
        elif access != Access.READ and not (access == Access.SETUP and (busy or self.stuck)):
            self.values[name] = value
            self.renewed = self.now() if name == "lease" else self.renewed


class Buffer:
    """A buffer of a memory without a cache."""

    def __init__(self, size: int, address: int, freed: list[int]) -> None:
        self.data: NDArray[np.uint8] = np.zeros(size, np.uint8)
        self.physical_address, self._freed = address, freed

    def flush(self, start: int, size: int) -> None: ...

    def invalidate(self, start: int, size: int) -> None: ...

    def free(self) -> None:
        self._freed.append(self.physical_address)


class Memory:
    """A memory with one buffer, at `address`."""

    def __init__(self, address: int) -> None:
        self.address = address
        self.freed: list[int] = []

    def allocate(self, size: int) -> Buffer:
        return Buffer(size, self.address, self.freed)
