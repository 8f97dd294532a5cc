"""Loads a bitstream into the FPGA of a board, through PYNQ, and reads back whose hardware answers."""

from __future__ import annotations

import os
from pathlib import Path

from celosia.bitstreams.manifest import BitHeader, Manifest, ManifestError
from celosia.hw.regs import MAGIC, REGISTERS
from celosia.sim.device import DeviceError


def prepare(bit: Path, board: str, part: str) -> Manifest:
    """The manifest of the bitstream at `bit`. ManifestError where it is damaged, or not for `board` and its `part`."""
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


def load(bit: str, address: int, identity: int) -> None:
    """Load `bit`, with its .hwh beside it, on this board. DeviceError where the FPGA then is not what it should be."""
    try:
        import pynq
    except ImportError as error:
        raise DeviceError(
            f"bitstreams are loaded by the Python package pynq on the board itself ({error}); use a PYNQ image "
            "(http://www.pynq.io/boards.html), or take --host USER@BOARD"
        ) from None
    try:
        pynq.Overlay(os.path.expanduser(bit))
        registers = pynq.MMIO(address, 4096)
        magic, found = (registers.read(REGISTERS[name].offset) for name in ("magic", "identity"))
    except (OSError, RuntimeError, ValueError) as error:
        raise DeviceError(f"PYNQ cannot load {bit} ({error}); it needs the rights of root, and the .hwh file") from None
    if magic != MAGIC:
        raise DeviceError(f"{bit} was loaded, but no accelerator answers at {address:#x}: it reads {magic:#010x}")
    if found != identity:
        raise DeviceError(f"{bit} was loaded, but the accelerator there has Config {found:08x}, not {identity:08x}")
