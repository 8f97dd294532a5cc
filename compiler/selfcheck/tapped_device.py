"""A functional simulator in which each layer reads random bytes, whatever the layers before it stored.

So an error of one layer does not spread to later ones, and values do not degenerate to noise after many layers.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.program import LaunchStep
from celosia.compiler.selfcheck.shared_kernels import compiled_gemm
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import Opcode
from celosia.sim.device import DeviceError
from celosia.sim.functional.decode import Instruction
from celosia.sim.functional.fsim import FunctionalDevice

Bytes = NDArray[np.uint8]


class Place(NamedTuple):
    """The memory of one storage in DRAM, which begins at `address`: the bytes that layers stored, and the random bytes
    that replace them for later readers (`fresh`).
    """

    address: int
    stored: Bytes
    fresh: Bytes


class TappedDevice(FunctionalDevice):
    """Runs a launch in which each layer reads random bytes, and hands over what it stores.

    After each STORE, the written bytes are moved to `stored` of the layer's place, and those of `fresh` replace them in
    memory before anything can read them.
    """

    def __init__(self, config: Config, rng: np.random.Generator) -> None:
        """Fill the scratchpads with random bytes, as their old contents must not matter."""
        super().__init__(config)
        for buffer in vars(self.state).values():
            if isinstance(buffer, np.ndarray):
                buffer.reshape(-1).view(np.uint8)[...] = random_bytes(rng, buffer.nbytes)
        self.products = compiled_gemm(self.state)
        """Compiled GEMM, where the Config and processor allow one."""
        self.layer_of: list[int] = []
        self.places: list[Place] = []
        self.failed_layer: int | None = None
        """The layer whose instruction ended a launch in an error."""

    def launch(self, step: LaunchStep, places: list[Place]) -> None:
        """Run `step`. places: where each of its layers stores. Raises DeviceError."""
        self.layer_of, self.places = step.layer_of.tolist(), places
        self.run(step.address, step.count)

    def execute(self, instruction: Instruction, number: int = 0) -> None:
        """Execute instruction `number` of the launch, and replace what a STORE wrote."""
        self.failed_layer = self.layer_of[number]
        if instruction.opcode == Opcode.GEMM and self.products is not None:
            self.products(instruction)
        else:
            super().execute(instruction, number)
        if instruction.opcode == Opcode.STORE:
            self._replace_stored(instruction.fields, number, self.places[self.layer_of[number]])
        self.failed_layer = None

    def _replace_stored(self, fields: dict[str, int], number: int, place: Place) -> None:
        """Move the bytes that a STORE wrote to `place.stored`, and put the fresh bytes in memory. DeviceError where the
        STORE wrote outside of the place.
        """
        dims = fields["z_size"], fields["y_size"], fields["x_size"] * self.config.piece_bytes
        strides = [_signed(fields[name]) if size > 1 else 0 for name, size in zip(("dram_z", "dram_y"), dims)]
        start = fields["dram_addr"] - place.address
        ends = [(size - 1) * stride for size, stride in zip(dims, strides)]
        first, last = start + sum(min(end, 0) for end in ends), start + sum(max(end, 0) for end in ends) + dims[2]
        if first < 0 or last > len(place.stored):
            raise DeviceError(f"instruction {number}: STORE writes outside of the layer's output")

        def view_rows(memory: Bytes, start: int) -> Bytes:
            """View the planes, rows and bytes of the STORE in `memory`."""
            return np.ndarray(dims, np.uint8, memory, start, (*strides, 1))

        written = view_rows(self.dram, fields["dram_addr"])
        view_rows(place.stored, start)[...] = written
        written[...] = view_rows(place.fresh, start)


def _signed(value: int) -> int:
    """Convert a stride modulo 2^32 to a signed number."""
    return (value ^ 1 << 31) - (1 << 31)


def random_bytes(rng: np.random.Generator, count: int) -> Bytes:
    """Draw bytes of the complete range, one in eight of them the lowest or the highest int8.

    Faults of saturation show at these.
    """
    data = np.frombuffer(rng.bytes(count), np.uint8).copy()
    data[::17] = 0x80
    data[5::15] = 0x7F
    return data


def random_image(rng: np.random.Generator, dims: tuple[int, int, int, int], zero: int) -> NDArray[np.int8]:
    """Draw int8 [images, channels, rows, columns]: of the complete range in the upper half, near `zero` in the lower
    half.

    Sums of many bytes of the complete range saturate the output in some channels, whatever the weights; sums of small
    ones do not. A single row is halved; with a single pixel, every other byte is small.
    """
    values = random_bytes(rng, int(np.prod(dims))).view(np.int8).reshape(dims)
    rows, columns = dims[2:]
    if rows * columns == 1:
        lower = values[:, 1::2]
    else:
        lower = values[:, :, rows // 2 :] if rows > 1 else values[..., columns // 2 :]
    lower[...] = np.clip((lower >> 3) + np.int16(zero), -128, 127)  # at most 16 from the zero point
    return values
