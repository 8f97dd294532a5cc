"""The functional simulator, with random bytes in the place of everything that a layer stores."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.program import LaunchStep
from celosia.compiler.selfcheck.kernels import products
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import Opcode
from celosia.sim.device import DeviceError
from celosia.sim.functional.decode import Instruction
from celosia.sim.functional.fsim import FunctionalDevice

Bytes = NDArray[np.uint8]
SMALL_BYTE_RANGE = 16
"""How far bytes lie from their zero point where they are to be small."""


class Place(NamedTuple):
    """A storage in DRAM from `address` on: what layers have stored there, and what is put in its place."""

    address: int
    stored: Bytes
    fresh: Bytes


class TappedDevice(FunctionalDevice):
    """Runs a launch so that layers read good random bytes, whatever the layers before them make of theirs.

    At each STORE, the bytes that it writes go to `stored` of the layer's place, and those of `fresh` to memory before
    anything can have read them.
    """

    def __init__(self, config: Config, rng: np.random.Generator) -> None:
        super().__init__(config)
        for buffer in vars(self.state).values():  # what is left in scratchpads must not matter
            if isinstance(buffer, np.ndarray):
                buffer.reshape(-1).view(np.uint8)[...] = random_bytes(rng, buffer.nbytes)
        self.products = products(self.state)
        """What executes a GEMM, where there is a kernel for it."""
        self.layer_of: list[int] = []
        self.places: list[Place] = []
        self.failed_layer: int | None = None
        """The layer whose instruction ended a launch in an error."""

    def launch(self, step: LaunchStep, places: list[Place]) -> None:
        """Run `step`, whose layers store to `places`. DeviceError."""
        self.layer_of, self.places = step.layer_of.tolist(), places
        self.run(step.address, step.count)

    def execute(self, instruction: Instruction, number: int = 0) -> None:
        self.failed_layer = self.layer_of[number]
        if instruction.opcode == Opcode.GEMM and self.products is not None:
            self.products(instruction)
        else:
            super().execute(instruction, number)
        if instruction.opcode == Opcode.STORE:
            self._take(instruction.fields, number, self.places[self.layer_of[number]])
        self.failed_layer = None

    def _take(self, f: dict[str, int], number: int, place: Place) -> None:
        """Move what STORE `f` has written to `place`, and put other bytes in its stead."""
        dims = f["z_size"], f["y_size"], f["x_size"] * self.config.piece_bytes
        strides = [_signed(f[name]) if size > 1 else 0 for name, size in zip(("dram_z", "dram_y"), dims)]
        start = f["dram_addr"] - place.address
        ends = [(size - 1) * stride for size, stride in zip(dims, strides)]
        first, last = start + sum(min(end, 0) for end in ends), start + sum(max(end, 0) for end in ends) + dims[2]
        if first < 0 or last > len(place.stored):
            raise DeviceError(f"instruction {number}: STORE writes outside of the layer's output")

        def rows(memory: Bytes, start: int) -> Bytes:
            return np.ndarray(dims, np.uint8, memory, start, (*strides, 1))

        written = rows(self.dram, f["dram_addr"])
        rows(place.stored, start)[...] = written
        written[...] = rows(place.fresh, start)


def _signed(value: int) -> int:
    """A stride modulo 2^32 as a signed number."""
    return (value ^ 1 << 31) - (1 << 31)


def random_bytes(rng: np.random.Generator, count: int) -> Bytes:
    """Bytes of the whole range, one in eight of them the lowest or the highest int8."""
    data = np.frombuffer(rng.bytes(count), np.uint8).copy()
    data[::17] = 0x80
    data[5::15] = 0x7F
    return data


def random_image(rng: np.random.Generator, dims: tuple[int, int, int, int], zero: int) -> NDArray[np.int8]:
    """Random int8 of any dims [a, b, rows, columns]: the whole range in the upper half, near `zero` in the lower.

    Sums of many bytes of the whole range leave the range of the output in some channels, whatever the weights; those of
    small ones do not. Where there is one row, it is halved; where there is one pixel, every other byte is near.
    """
    values = random_bytes(rng, int(np.prod(dims))).view(np.int8).reshape(dims)
    rows, columns = dims[2:]
    if rows * columns == 1:
        lower = values[:, 1::2]
    else:
        lower = values[:, :, rows // 2 :] if rows > 1 else values[..., columns // 2 :]
    lower[...] = np.clip((lower >> 3) + np.int16(zero), -128, 127)
    return values
