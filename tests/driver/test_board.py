"""Tests of the driver for boards with PYNQ: how it uses the package, and its messages if something is missing."""

from __future__ import annotations

import asyncio
import platform
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from celosia.driver.board import board_device as board
from celosia.driver.run.open_device import open_device
from celosia.hw.sources import sources_identity
from celosia.hw.spec.config import PRESETS, Config
from celosia.hw.spec.regs import CONTROL_START, MAGIC, REGISTERS, STATUS_BUSY, STATUS_DONE
from celosia.sim.device import Device, DeviceError

TINY = PRESETS["tiny"]


class FakeBuffer(np.ndarray):  # type: ignore[type-arg]
    """The part of PYNQ's buffers that the driver uses."""

    calls: list[tuple[str, int, int]]
    physical_address: int

    def __array_finalize__(self, obj: Any) -> None:
        if isinstance(obj, FakeBuffer) and hasattr(obj, "calls"):
            self.calls, self.start = obj.calls, obj.start
            own, base = (array.__array_interface__["data"][0] for array in (self, obj))
            self.physical_address = obj.physical_address + own - base

    def _call(self, operation: str) -> None:
        self.calls.append((operation, self.physical_address - self.start, self.nbytes))

    def flush(self) -> None:
        self._call("flush")

    def invalidate(self) -> None:
        self._call("invalidate")

    def freebuffer(self) -> None:
        self._call("free")


@pytest.fixture
def pynq(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """Return a package `pynq` for a board with a `tiny` accelerator, whose registers are a dictionary."""
    answers = {"magic": MAGIC, "identity": TINY.identity, "sources": sources_identity()}
    values = {REGISTERS[name].offset: value for name, value in answers.items()}
    calls: list[tuple[str, int, int]] = []
    mapped: list[tuple[int, int]] = []

    def write(offset: int, value: int) -> None:
        values[offset] = value
        if offset == REGISTERS["control"].offset and value & CONTROL_START:
            values[REGISTERS["runs"].offset] = values.get(REGISTERS["runs"].offset, 0) + 1

    def mmio(base: int, length: int) -> Any:
        mapped.append((base, length))
        return SimpleNamespace(read=lambda offset: values.get(offset, 0), write=write)

    def allocate(shape: tuple[int], dtype: Any, cacheable: bool) -> FakeBuffer:
        if shape[0] > 1 << 20:
            raise RuntimeError("Failed to allocate memory")
        buffer = np.zeros(shape, dtype).view(FakeBuffer)
        buffer.calls, buffer.start, buffer.physical_address = calls, 0x1000, 0x1000
        return buffer

    package = SimpleNamespace(MMIO=mmio, allocate=allocate, values=values, calls=calls, mapped=mapped, write=write)
    monkeypatch.setitem(sys.modules, "pynq", package)
    monkeypatch.setattr(platform, "machine", lambda: "armv7l")
    monkeypatch.setattr(board, "FPGA_STATE", tmp_path / "state")
    monkeypatch.setattr(board, "LOCKS", tmp_path)
    return package


def test_memory_through_pynq(pynq: SimpleNamespace) -> None:
    device = open_device("board", TINY)
    assert isinstance(device, Device)
    assert pynq.mapped == [(0x43C0_0000, 4096)]
    device.allocate(100)
    device.write(8, np.arange(4, dtype=np.int16))
    assert device.read(8, 8).view(np.int16).tolist() == [0, 1, 2, 3]
    device.allocate(200)
    device.close()
    assert pynq.calls == [("flush", 8, 8), ("invalidate", 8, 8), ("free", 0, 100), ("free", 0, 200)]
    with pytest.raises(DeviceError, match=r"2097152.*Failed to allocate"):
        device.allocate(1 << 21)


def test_without_pynq(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynq", None)
    with pytest.raises(DeviceError, match=r"pynq.*pip3 install pynq"):
        open_device("board", TINY)


def test_on_what_is_no_zynq(pynq: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    with pytest.raises(DeviceError, match="x86_64"):
        open_device("board", TINY)
    assert board.open_pynq_device(TINY, base=0x1000).config is TINY


def test_without_a_bitstream(pynq: SimpleNamespace) -> None:
    board.FPGA_STATE.write_text("unknown\n")
    with pytest.raises(DeviceError, match=r"bitstream.*celosia flash"):
        open_device("board", TINY)
    assert not pynq.mapped  # a read would stop the processor
    board.FPGA_STATE.write_text("operating\n")
    open_device("board", TINY)


def test_another_bitstream(pynq: SimpleNamespace) -> None:
    with pytest.raises(DeviceError, match=r"Config \w{8}.*pynq"):
        open_device("board", PRESETS["pynq"])
    pynq.values[0] = 0
    with pytest.raises(DeviceError, match=r"0x00000000.*0x43454c4f"):
        open_device("board", Config())


def test_the_interrupt_is_waited_for(pynq: SimpleNamespace) -> None:
    """The driver waits for PYNQ's interrupt, an asyncio coroutine, which may come at once, late or never."""
    waits: list[float] = []
    status, control = REGISTERS["status"].offset, REGISTERS["control"].offset

    class Interrupt:
        def __init__(self, name: str) -> None:
            assert name == "celosia/irq"

        async def wait(self) -> None:
            waits.append(time.monotonic())
            if len(waits) == 1:
                return  # the interrupt of an earlier run: this one is not done yet
            await asyncio.sleep(0.01 if len(waits) == 2 else 60)
            pynq.values[status] = STATUS_DONE

    def write(offset: int, value: int) -> None:
        pynq.write(offset, value)
        if offset == control and value & CONTROL_START:
            pynq.values[status] = STATUS_BUSY

    pynq.Interrupt = Interrupt
    pynq.MMIO = lambda base, length: SimpleNamespace(read=lambda offset: pynq.values.get(offset, 0), write=write)
    device = open_device("board", TINY)
    device.allocate(100)
    device.run(0, 1, 10**9)
    assert len(waits) == 2 and pynq.values[REGISTERS["irq_enable"].offset] == 1
    with pytest.raises(DeviceError, match="no end within"):  # never: the host's limit ends it
        device.run(0, 1, 10**6)
    assert len(waits) == 3


@pytest.mark.parametrize("missing", [ValueError("No Pin of name celosia/irq found"), AttributeError("Interrupt")])
def test_without_an_interrupt_it_polls(pynq: SimpleNamespace, missing: Exception) -> None:
    def refuse(name: str) -> None:
        raise missing

    pynq.Interrupt = refuse
    device = open_device("board", TINY)
    device.allocate(100)
    pynq.values[REGISTERS["status"].offset] = STATUS_DONE
    device.run(0, 1, 1000)
    assert pynq.values[REGISTERS["irq_enable"].offset] == 0


@pytest.mark.parametrize("sources", [0, sources_identity() ^ 1])
def test_an_old_bitstream(pynq: SimpleNamespace, sources: int) -> None:
    """A bitstream of this Config but of other sources is refused; older bitstreams without the register read 0."""
    pynq.values[REGISTERS["sources"].offset] = sources
    words = f"was made of other hardware sources .{sources:08x}. than .*celosia bitstream.*celosia flash"
    with pytest.raises(DeviceError, match=words):
        open_device("board", TINY)


@pytest.mark.parametrize("error", [OSError("Root permissions required."), RuntimeError("No Devices Found")])
def test_without_rights(pynq: SimpleNamespace, error: Exception) -> None:
    def refuse(*_: object) -> None:
        raise error

    pynq.MMIO = refuse
    with pytest.raises(DeviceError, match=rf"{error}.*root"):
        open_device("board", TINY)


def test_a_pynq_that_does_not_import(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "pynq.py").write_text("raise RuntimeError('another numpy')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DeviceError, match=r"pynq.*another numpy"):
        open_device("board", TINY)
