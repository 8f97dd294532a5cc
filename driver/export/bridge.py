"""Host side of emulated/device_bridge.c: connects an exported program to a simulator of the accelerator by pipes."""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Mapping, Sequence
from typing import IO, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from celosia.hw.sources import sources_identity
from celosia.hw.spec.config import Config
from celosia.hw.spec.regs import (
    CONTROL_START,
    MAGIC,
    REGISTERS,
    STATUS_DONE,
    STATUS_ERROR_SHIFT,
    Access,
    Error,
)
from celosia.sim.device import DeviceError
from celosia.sim.functional.fsim import FunctionalDevice
from celosia.sim.rtl.rtlsim import DMA_BASE, RtlDevice

Array = NDArray[Any]
REGISTER_NAMES = {register.offset: name for name, register in REGISTERS.items()}
"""Names of registers by byte offset."""

READ_REGISTER, WRITE_REGISTER, WAIT = b"R", b"W", b"T"
FLUSH, INVALIDATE, OPEN = b"F", b"I", b"O"
GET_INPUT, PUT_OUTPUT, RETURN = b"X", b"Y", b"E"
"""First byte of each message from the program, as in emulated/device_bridge.c.

READ_REGISTER and WRITE_REGISTER access registers; WAIT lets time pass. FLUSH writes device memory, INVALIDATE reads it,
OPEN allocates it. GET_INPUT asks for an input, PUT_OUTPUT sends an output, RETURN ends a call with its code."""


class BridgedHardware(Protocol):
    """Interface of a simulator to a Bridge: registers, and a device with memory."""

    @property
    def device(self) -> FunctionalDevice | RtlDevice:
        """The simulated device, whose memory is the program's device memory."""

    def read(self, name: str) -> int:
        """Read the register of that name."""

    def write(self, name: str, value: int) -> None:
        """Write the register of that name."""

    def wait(self) -> None:
        """Let the hardware work for a while, as the program is polling."""


class FunctionalRegisters:
    """Registers in front of the functional simulator, which has none of its own.

    Writing the start bit of `control` runs all instructions at once.
    """

    def __init__(self, config: Config) -> None:
        self.device = FunctionalDevice(config)
        self._values = dict.fromkeys(REGISTERS, 0) | {
            "magic": MAGIC, "identity": config.identity, "sources": sources_identity(),
        }  # fmt: skip

    def read(self, name: str) -> int:
        return self._values[name]

    def write(self, name: str, value: int) -> None:
        """Set a writable register; the start bit of `control` runs the instructions."""
        if REGISTERS[name].access == Access.READ:
            return
        self._values[name] = 0 if name == "control" else value
        if name == "control" and value & CONTROL_START:
            self._values["runs"] += 1
            self._run_instructions()

    def _run_instructions(self) -> None:
        """Run the instructions at `instr_addr` within the DMA window, and set `status`."""
        error, memory = Error.NONE, self.device.dram
        try:
            start = (self._values["dma_base_lo"] | self._values["dma_base_hi"] << 32) - DMA_BASE
            self.device.dram = memory[start : start + self._values["dma_size"]]
            self.device.run(self._values["instr_addr"], self._values["instr_count"])
        except (DeviceError, ValueError):
            error = Error.ILLEGAL_INSTRUCTION
        self.device.dram = memory
        self._values["status"] = STATUS_DONE | error << STATUS_ERROR_SHIFT

    def wait(self) -> None:
        """Do nothing: no run is under way."""


class RtlRegisters:
    """Registers of the Verilated accelerator."""

    WAIT_CYCLES = 20_000
    """Cycles that a wait simulates at most."""

    def __init__(self, config: Config) -> None:
        self.device = RtlDevice(config, quiet=True)

    def read(self, name: str) -> int:
        return self.device.control.read(name)

    def write(self, name: str, value: int) -> None:
        if REGISTERS[name].access != Access.READ:
            self.device.control.write(name, value)

    def wait(self) -> None:
        """Simulate `WAIT_CYCLES`, or until the interrupt."""
        self.device.advance(self.WAIT_CYCLES)


class BridgeError(RuntimeError):
    """The program broke the protocol of emulated/device_bridge.c, or has ended."""


class Bridge:
    """A running exported program, whose accesses to the accelerator reach `hardware`.

    command: starts the program, which has opened its models when the constructor returns. code: what its last call
    returned (celosia.h). instruction: number of the instruction that an error is about. accesses: number of its reads
    and writes of registers.
    """

    def __init__(self, command: Sequence[str], hardware: BridgedHardware) -> None:
        self.hardware = hardware
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdin is not None and self.process.stdout is not None
        self._in: IO[bytes] = self.process.stdin
        self._out: IO[bytes] = self.process.stdout
        self.instruction = self.accesses = 0
        self.code = self._serve_until_return([], [])

    def run(self, inputs: Sequence[Array], outputs: Sequence[Array], model: int = 1) -> int:
        """Run a model once, return its code, and fill `outputs` if that is 0. model: its number, from 1 on."""
        self._send(struct.pack("<I", model))
        self.code = self._serve_until_return([*inputs], [*outputs])
        return self.code

    def close(self) -> int:
        """End the program; return its exit code."""
        self._send(struct.pack("<I", 0))
        while letter := self._out.read(1):
            self._serve_message(letter, [], [])
        self._in.close()
        self._out.close()
        return self.process.wait()

    def kill(self) -> None:
        """Kill the program."""
        self.process.kill()
        self.process.wait()

    def _receive(self, size: int) -> bytes:
        """Read `size` bytes from the program. BridgeError where it has ended."""
        data = self._out.read(size)
        if len(data) != size:
            raise BridgeError(f"the program has ended with {self.process.wait()}")
        return data

    def _send(self, data: bytes) -> None:
        self._in.write(data)
        self._in.flush()

    def _serve_until_return(self, inputs: list[Array], outputs: list[Array]) -> int:
        """Answer messages until the program returns from a call; return its code."""
        while True:
            letter = self._receive(1)
            if letter == RETURN:
                code, self.instruction = struct.unpack("<II", self._receive(8))
                return int(code)
            self._serve_message(letter, inputs, outputs)

    def _serve_message(self, letter: bytes, inputs: list[Array], outputs: list[Array]) -> None:
        """Answer one message of the program: a letter and two 32-bit words, often followed by bytes.

        Inputs that it asks for are taken from `inputs`; its outputs are written to the arrays in `outputs`.
        """
        first, second = struct.unpack("<II", self._receive(8))
        self.accesses += letter in (READ_REGISTER, WRITE_REGISTER)
        if letter == READ_REGISTER:
            self._send(struct.pack("<I", self.hardware.read(REGISTER_NAMES[first])))
        elif letter == WRITE_REGISTER:
            self.hardware.write(REGISTER_NAMES[first], second)
        elif letter == WAIT:
            self.hardware.wait()
        elif letter == FLUSH:
            self.hardware.device.write(first, np.frombuffer(self._receive(second), np.uint8))
        elif letter == INVALIDATE:
            self._send(self.hardware.device.read(first, second).tobytes())
        elif letter == OPEN:
            self.hardware.device.allocate(first)
            self._send(struct.pack("<Q", DMA_BASE))
        elif letter == GET_INPUT:
            self._send(np.ascontiguousarray(inputs.pop(0)).tobytes())
        elif letter == PUT_OUTPUT:
            array = outputs.pop(0)
            array[...] = np.frombuffer(self._receive(first), array.dtype).reshape(array.shape)
        else:
            raise BridgeError(f"the program says {letter!r}, which is no message")


def empty_outputs(expected: Mapping[str, Array]) -> list[Array]:
    """Return uninitialised arrays for `Bridge.run`, with the shapes and dtypes of the expected outputs, in order."""
    return [np.empty_like(array) for array in expected.values()]
