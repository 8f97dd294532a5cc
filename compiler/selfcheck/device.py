"""The functional simulator, with fresh random bytes in the place of everything that a layer stores."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.program import LaunchStep
from celosia.hw.config import Config
from celosia.hw.isa import Opcode, instruction_bytes
from celosia.sim.decode import Instruction
from celosia.sim.device import DeviceError
from celosia.sim.fsim import FunctionalDevice

Bytes = NDArray[np.uint8]
SHIFTS, STEP = 1 << 16, 4099
"""Of the random bytes: each layer begins STEP further on than the one before it, modulo SHIFTS."""


class TappedDevice(FunctionalDevice):
    """Runs a launch so that each layer reads random bytes of the whole range, whatever the layers before it make of
    theirs.

    At each STORE, the bytes go to the same place of `stored`, and others to memory before anything can have read them.
    `finished` is called with the number of a layer after its last STORE.
    """

    def __init__(self, config: Config, activations: int, rng: np.random.Generator) -> None:
        super().__init__(config)
        self.stored = np.frombuffer(rng.bytes(activations), np.uint8).copy()
        self.noise = random_bytes(rng, activations + SHIFTS)
        for buffer in vars(self.state).values():  # what is left in scratchpads must not matter
            if isinstance(buffer, np.ndarray):
                buffer.reshape(-1).view(np.uint8)[...] = np.frombuffer(rng.bytes(buffer.nbytes), np.uint8)
        self.failed_layer: int | None = None
        """The layer whose instruction ended a launch in an error."""

    def launch(self, step: LaunchStep, finished: Callable[[int], None]) -> None:
        """Run `step`. DeviceError."""
        self.layer_of, self.finished = step.layer_of.tolist(), finished
        code = self.read(step.address, step.count * instruction_bytes(self.config)).reshape(step.count, -1)
        stores = np.flatnonzero((code[:, 0] & 0b111) == Opcode.STORE)
        self.last = {self.layer_of[number]: number for number in stores.tolist()}
        self.run(step.address, step.count)

    def execute(self, instruction: Instruction, number: int = 0) -> None:
        layer = self.failed_layer = self.layer_of[number]
        super().execute(instruction, number)
        if instruction.opcode == Opcode.STORE:
            self._take(instruction.fields, number)
            if self.last[layer] == number:
                self.finished(layer)
        self.failed_layer = None

    def _take(self, f: dict[str, int], number: int) -> None:
        """Move what STORE `f` has written to `stored`, and put other bytes in its place."""
        row = f["x_size"] * self.config.piece_bytes
        dims = f["z_size"], f["y_size"]
        strides = [_signed(f[name]) if size > 1 else 0 for name, size in zip(("dram_z", "dram_y"), dims)]
        ends = [(extent - 1) * stride for extent, stride in zip(dims, strides)]
        first = f["dram_addr"] + sum(min(end, 0) for end in ends)
        last = f["dram_addr"] + sum(max(end, 0) for end in ends) + row
        if first < 0 or last > len(self.stored):
            raise DeviceError(f"instruction {number}: STORE writes bytes {first} to {last - 1}, not among activations")

        def rows(memory: Bytes, start: int) -> Bytes:
            return np.ndarray((*dims, row), np.uint8, memory, start, (*strides, 1))

        written = rows(self.dram, f["dram_addr"])
        rows(self.stored, f["dram_addr"])[...] = written
        written[...] = rows(self.noise, f["dram_addr"] + self.layer_of[number] * STEP % SHIFTS)


def _signed(value: int) -> int:
    """A stride modulo 2^32 as a signed number."""
    return (value ^ 1 << 31) - (1 << 31)


def random_bytes(rng: np.random.Generator, count: int) -> Bytes:
    """Bytes of the whole range, one in eight of them the lowest or the highest int8."""
    data = np.frombuffer(rng.bytes(count), np.uint8).copy()
    data[::17] = 0x80
    data[5::15] = 0x7F
    return data
