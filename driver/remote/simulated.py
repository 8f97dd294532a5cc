"""Replacement of the package `pynq` on a board that is simulated on this machine, for rehearsals (driver/rehearse.py).

$HOME is the board's folder; the file `fpga.json` in it is the Config of the bitstream that is loaded. The FPGA is the
functional simulator, or a library of the Verilated RTL, whose path is in the environment variable
CELOSIA_REHEARSAL_RTL.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from celosia.driver.board import board_device as board
from celosia.hw.manifest import BitHeader
from celosia.hw.sources import sources_identity
from celosia.hw.spec.config import Config
from celosia.hw.spec.regs import CONTROL_START, MAGIC, REGISTERS, STATUS_DONE
from celosia.sim.devices import open_simulator

RTL_LIBRARY_VARIABLE = "CELOSIA_REHEARSAL_RTL"
"""Environment variable with the path of the Verilated accelerator; if empty, the functional simulator is used."""
HOME = Path(os.path.expanduser("~"))
LOADED_CONFIG_FILE = HOME / "fpga.json"
"""Config of the loaded bitstream."""
FPGA_STATE_FILE = HOME / "fpga.state"
"""Takes the place of Linux' file of the FPGA's state."""
BUFFER_ADDRESS = 0x10000000
"""Physical address of the buffer."""
WAIT_CYCLES = 5000
"""Cycles that the RTL runs before each read of a register, since nothing else advances its clock."""
MEMORY_MODEL = (40, 40, 8, 780, 16, 32, 0, 0, 0, 0, 0, 2**64 - 1, 2**64 - 1)
"""Parameters of the memory behind the RTL, in the order of harness.cpp: those of ZYNQ_HP in hw/boards/memory.py."""
CLOCK_MHZ = 1000
"""Clock of the simulated board before a bitstream sets one."""


class Fpga(Protocol):
    """The registers of a simulated FPGA."""

    def read(self, offset: int) -> int:
        """Read a register."""
        ...

    def write(self, offset: int, value: int) -> None:
        """Write a register."""


class FunctionalFpga:
    """Registers of the functional simulator, which executes a run within the write that starts it, without cycles."""

    def __init__(self, config: Config, memory: NDArray[np.uint8]) -> None:
        self._memory, self._device = memory, open_simulator("functional", config)
        self._values = {register.offset: 0 for register in REGISTERS.values()}
        for name, value in (("magic", MAGIC), ("identity", config.identity), ("sources", sources_identity())):
            self._values[REGISTERS[name].offset] = value

    def read(self, offset: int) -> int:
        return self._values[offset]

    def write(self, offset: int, value: int) -> None:
        if offset != REGISTERS["control"].offset:
            self._values[offset] = value
        elif value & CONTROL_START:
            self._run()

    def _run(self) -> None:
        """Execute the run that the registers describe, on the board's memory, and set the status."""
        address, count, low, high, size = (
            self._values[REGISTERS[name].offset]
            for name in ("instr_addr", "instr_count", "dma_base_lo", "dma_base_hi", "dma_size")
        )
        start = (high << 32 | low) - BUFFER_ADDRESS
        memory = self._memory[start : start + size]
        self._device.allocate(size)
        self._device.write(0, memory)
        self._device.run(address, count, sys.maxsize)
        memory[...] = self._device.read(0, size)
        self._values[REGISTERS["runs"].offset] += 1
        self._values[REGISTERS["status"].offset] = STATUS_DONE


class RtlFpga:
    """Registers of the Verilated RTL. Its clock advances only in `read`, since a driver that waits polls a register."""

    def __init__(self, library: str, memory: NDArray[np.uint8]) -> None:
        self._lib = ctypes.CDLL(library)
        self._lib.celosia_create.restype = ctypes.c_void_p
        self._lib.celosia_error.restype = ctypes.c_char_p
        self._handle = ctypes.c_void_p(self._lib.celosia_create(ctypes.c_uint64(1)))
        model = (ctypes.c_uint64 * len(MEMORY_MODEL))(*MEMORY_MODEL)
        place, size = ctypes.c_void_p(memory.ctypes.data), ctypes.c_uint64(len(memory))
        self._lib.celosia_memory(self._handle, place, ctypes.c_uint64(BUFFER_ADDRESS), size, model)
        self._lib.celosia_reset(self._handle)
        self._lib.celosia_begin(self._handle, 0)

    def read(self, offset: int) -> int:
        value = ctypes.c_uint32()
        failed = self._lib.celosia_run(self._handle, ctypes.c_uint64(WAIT_CYCLES)) < 0
        self._check(not failed and self._lib.celosia_read_register(self._handle, offset, ctypes.byref(value)))
        return value.value

    def write(self, offset: int, value: int) -> None:
        self._check(self._lib.celosia_write_register(self._handle, offset, ctypes.c_uint32(value)))

    def _check(self, succeeded: bool) -> None:
        """Unless a call succeeded, raise OSError with the simulator's message, as PYNQ does for a bus error."""
        if not succeeded:
            message = self._lib.celosia_error(self._handle).decode(errors="replace")
            raise OSError(f"the simulated RTL: {message or 'a register does not answer'}")


_memory: NDArray[np.uint8] = np.zeros(0, np.uint8)
"""The memory of the last buffer that was allocated."""
_fpga: Fpga | None = None


def _open_fpga() -> Fpga:
    """Return the FPGA with the loaded bitstream and the allocated memory, created at the first use."""
    global _fpga
    if _fpga is None:
        config = Config.from_dict(json.loads(LOADED_CONFIG_FILE.read_text(encoding="utf-8")))
        library = os.environ.get(RTL_LIBRARY_VARIABLE)
        _fpga = RtlFpga(library, _memory) if library else FunctionalFpga(config, _memory)
    return _fpga


class MMIO:
    """Registers, with the interface of PYNQ's MMIO."""

    def __init__(self, address: int, length: int) -> None:
        del address, length

    def read(self, offset: int) -> int:
        """Read a register."""
        return _open_fpga().read(offset)

    def write(self, offset: int, value: int) -> None:
        """Write a register."""
        _open_fpga().write(offset, value)


class Overlay:
    """Overlay, with the interface of PYNQ's: loads the bitstream `path`, whose data is the Config of a rehearsal."""

    def __init__(self, path: str) -> None:
        if not Path(path).with_suffix(".hwh").exists():
            raise FileNotFoundError(path)
        header = BitHeader.read(path)
        LOADED_CONFIG_FILE.write_bytes(Path(path).read_bytes()[header.offset :])
        FPGA_STATE_FILE.write_text(board.LOADED, encoding="utf-8")


class Clocks:
    """Clocks, with the interface of PYNQ's."""

    fclk0_mhz: float = CLOCK_MHZ


class _Buffer(np.ndarray[Any, np.dtype[np.uint8]]):
    """Buffer, with the interface of PYNQ's."""

    physical_address = BUFFER_ADDRESS

    def flush(self) -> None:
        """Do nothing: the FPGA sees the same memory."""

    invalidate = freebuffer = flush


def allocate(shape: tuple[int, ...], dtype: Any, cacheable: bool) -> Any:
    """Allocate the one buffer of this process, with the interface of PYNQ's."""
    global _memory, _fpga
    del dtype, cacheable
    _memory, _fpga = np.zeros(-(-shape[0] // board.PAGE) * board.PAGE, np.uint8), None
    return _memory[: shape[0]].view(_Buffer)


board.LOCKS, board.FPGA_STATE = HOME, FPGA_STATE_FILE
