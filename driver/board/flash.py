"""Load a bitstream into the FPGA of a board, through PYNQ, and check that its accelerator answers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from celosia.driver.board.board_device import (
    INSTANCE,
    LOADED,
    REGISTER_BYTES,
    board_lock,
    drain_pauses,
    read_fpga_state,
)
from celosia.hw.manifest import BitHeader, Manifest, ManifestError
from celosia.hw.sources import sources_identity
from celosia.hw.spec.regs import MAGIC, REGISTERS
from celosia.sim.device import DeviceError
from celosia.sim.host import Control


def check_bitstream(bit: Path, board: str, part: str) -> Manifest:
    """Check the bitstream file `bit` and return its manifest.

    ManifestError where it is damaged, or not for `board` and its FPGA `part`.
    """
    header = BitHeader.read(bit)
    if not header.is_for(part):
        raise ManifestError(f"{bit} is for {header.part}, and {board} has {part}; make a project for {board}")
    manifest = Manifest.load(bit.with_suffix(".json"))
    if manifest.board != board:
        raise ManifestError(f"{bit} was made for {manifest.board}, not for {board}: pins and memory differ")
    if not header.is_for(manifest.part):
        raise ManifestError(
            f"{bit} is for {header.part}, and its manifest says {manifest.part}; one is of another build"
        )
    manifest.check_files(bit)
    return manifest


def load(bit: str, manifest: Manifest) -> float:
    """Load `bit`, with its .hwh beside it, on this board; returns the clock of the accelerator in MHz.

    A run that is under way there is ended first. DeviceError where it does not end, another process uses the
    accelerator, or the FPGA then is not what `manifest` says.
    """
    try:
        import pynq
    except Exception as error:  # pynq has many ways to fail
        raise DeviceError(
            f"bitstreams are loaded by the Python package pynq on the board itself ({error}); use a PYNQ image "
            "(http://www.pynq.io/boards.html), or take --host USER@BOARD"
        ) from None
    with board_lock(manifest.address):
        _end_loaded_run(pynq)
        return _load_and_identify(pynq, bit, manifest)


def _end_loaded_run(pynq: Any) -> None:
    """End the run of the accelerator that is loaded now. DeviceError where it does not end.

    Configuring the FPGA during transfers with memory may block the memory ports until the board is restarted. Registers
    are read only where PYNQ knows of an accelerator: reading an address without registers would stop the processor.
    """
    if read_fpga_state() != LOADED:
        return
    try:
        blocks = dict(pynq.PL.ip_dict)
        base = next(int(block["phys_addr"]) for name, block in blocks.items() if name.split("/")[0] == INSTANCE)
        registers = pynq.MMIO(base, REGISTER_BYTES)
        control = Control(registers.read, registers.write)
        if control.read("magic") != MAGIC:
            return
    except Exception:  # nothing is loaded, or by another program than PYNQ, which has many ways to say so
        return
    try:
        control.abort_and_drain(drain_pauses())
    except DeviceError:
        raise DeviceError(
            f"the accelerator that is loaded now does not become idle: it waits for memory (status "
            f"{control.read('status'):#x}); restart the board, and then load the bitstream"
        ) from None


def _load_and_identify(pynq: Any, bit: str, manifest: Manifest) -> float:
    """Load the bitstream, set the clock and check the identity. Returns the clock in MHz. DeviceError."""
    try:
        pynq.Overlay(os.path.expanduser(bit))
        is_pumped = manifest.config.get("pump", 1) == 2
        clock_mhz = (_require_unchanged_clock if is_pumped else _set_clock)(pynq.Clocks, manifest.clock_mhz)
        registers = pynq.MMIO(manifest.address, REGISTER_BYTES)
        magic, identity = (registers.read(REGISTERS[name].offset) for name in ("magic", "identity"))
        sources = registers.read(REGISTERS["sources"].offset)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise DeviceError(
            f"PYNQ cannot load {bit} ({reason}); it needs the rights of root, and the .hwh file"
        ) from None
    if magic != MAGIC:
        raise DeviceError(
            f"{bit} was loaded, but no accelerator answers at {manifest.address:#x}: it reads {magic:#010x}"
        )
    if identity != manifest.identity:
        raise DeviceError(
            f"{bit} was loaded, but the accelerator there has Config {identity:08x}, not {manifest.identity:08x}"
        )
    if sources != sources_identity():
        raise DeviceError(
            f"{bit} was loaded, but it was made of other hardware sources ({sources:08x}) than those of this Celosia "
            f"({sources_identity():08x}), which will not use it; make it again with `celosia bitstream`"
        )
    return clock_mhz


def _set_clock(clocks: Any, mhz: int) -> float:
    """Set the clock of the logic to the highest frequency up to `mhz` that the board's PLL allows. Return it in MHz.

    PYNQ's Overlay uses the divisors of the .hwh file, which are right only for the PLL frequency that Vivado assumes;
    the boot image may have set another. And PYNQ sets the nearest possible clock, which may be too fast.
    """
    for tried_mhz in range(mhz, 0, -1):
        clocks.fclk0_mhz = tried_mhz
        actual_mhz = float(clocks.fclk0_mhz)
        if actual_mhz <= 1.001 * mhz:
            return actual_mhz
    raise RuntimeError(f"its clock cannot be set to {mhz} MHz")


def _require_unchanged_clock(clocks: Any, mhz: int) -> float:
    """Return the clock of the logic in MHz. RuntimeError where it is above `mhz`, or over a tenth below.

    Used for pumped arrays: their clock is derived from this one and would stop if this one changed.
    """
    actual_mhz = float(clocks.fclk0_mhz)
    if not 0.9 * mhz <= actual_mhz <= 1.001 * mhz:
        raise RuntimeError(f"its clock is {actual_mhz:g} MHz, and the array's is made of one of {mhz} MHz")
    return actual_mhz
