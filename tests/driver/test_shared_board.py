"""Several hosts on one board, some of which die, never take another host's run for their own."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from accelerator import Accelerator, Memory

from celosia.driver.board import board_device as board
from celosia.driver.board.board_device import BoardDevice
from celosia.driver.board.lock import hold_lock_file
from celosia.hw.spec.config import PRESETS
from celosia.hw.spec.regs import Error
from celosia.sim.device import DeviceError
from celosia.sim.host import Control

TINY = PRESETS["tiny"]
FOREIGN = "another process has used the accelerator during this run, whose results are lost"
LIMIT = 10**9
"""Cycles: ten seconds."""


def opened(accelerator: Accelerator, address: int, **options: Any) -> BoardDevice:
    device = BoardDevice(TINY, accelerator, Memory(address), **options)
    device.allocate(4096)
    return device


# Without a lock ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["aborted", "done", "under way"])
def test_a_foreign_run_is_not_taken_for_ours(moment: str) -> None:
    """A host notices that another host has aborted its run, and does not take that host's end for its own."""
    accelerator = Accelerator(TINY)
    other = Control(accelerator.read, accelerator.write)
    came: list[int] = []

    def sleep(seconds: float) -> None:
        if came:
            return
        came.append(accelerator.starts)
        other.abort_and_drain([None] * 10)
        if moment != "aborted":
            other.prepare(0x8000, instr_addr=64, instr_count=1, dma_size=4096, watchdog=0, lease=0, irq_enable=0)
            other.start()
        while moment == "done" and not other.is_done():
            pass

    device = opened(accelerator, 0x1000, sleep=sleep)
    words = "the host has ended the run" if moment == "aborted" else FOREIGN
    with pytest.raises(DeviceError, match=words):
        device.run(0, 1, LIMIT)
    assert came == [1]
    if moment != "aborted":
        assert other.counters(str)["cycles"] == 0x8000 + 64  # theirs was sound
    assert device.run(32, 1, LIMIT).cycles == 0x1000 + 32


class Interleaved:
    """Hosts in threads; a random one at a time may access the registers once."""

    def __init__(self, accelerator: Accelerator, seed: int) -> None:
        self.accelerator, self.random = accelerator, random.Random(seed)
        self.turns: dict[int, threading.Semaphore] = {}
        self.arrived = threading.Semaphore(0)

    def access(self, host: int, method: str, *arguments: int) -> Any:
        self.arrived.release()
        self.turns[host].acquire()
        return getattr(self.accelerator, method)(*arguments)

    def run(self, *hosts: Callable[[Control], None]) -> None:
        threads = []
        for number, host in enumerate(hosts):
            self.turns[number] = threading.Semaphore(0)
            control = Control(partial(self.access, number, "read"), partial(self.access, number, "write"))

            def go(host: Callable[[Control], None] = host, control: Control = control, number: int = number) -> None:
                try:
                    host(control)
                finally:
                    del self.turns[number]
                    self.arrived.release()

            threads.append(threading.Thread(target=go, daemon=True))
            threads[-1].start()
            assert self.arrived.acquire(timeout=10)  # it stands before its first access
        while self.turns:
            self.turns[self.random.choice(list(self.turns))].release()
            assert self.arrived.acquire(timeout=10)
        for thread in threads:
            thread.join(10)


def attempts(seed: int) -> list[tuple[int, int]]:
    """Return (measured cycles, expected cycles) of the successful runs of two hosts that use no lock."""
    accelerator = Accelerator(TINY, length=12)
    results: list[tuple[int, int]] = []

    def host(base: int, control: Control) -> None:
        for place in range(3):
            try:
                control.abort_and_drain([None] * 1000)
                control.prepare(base, instr_addr=place, instr_count=1, dma_size=base, watchdog=0, lease=0, irq_enable=0)
                control.start()
                for _ in range(200):
                    if control.is_done():
                        results.append((control.counters(str)["cycles"], base + place))
                        break
            except DeviceError:
                pass

    Interleaved(accelerator, seed).run(partial(host, 0x1000), partial(host, 0x8000))
    return results


def test_however_two_hosts_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run that a host takes for a success is its own, also if their writes of registers mix."""
    results = [result for seed in range(60) for result in attempts(seed)]
    assert len(results) > 20 and all(cycles == wanted for cycles, wanted in results)
    # Half of the check is not enough, nor is no check.
    halves: list[Callable[[Control], bool]] = [
        lambda self: self.read("runs") == self._run_number,
        lambda self: all(self.read(name) == value for name, value in self._prepared.items()),
        lambda self: True,
    ]
    for half in halves:
        monkeypatch.setattr(Control, "is_ours", half)
        assert any(cycles != wanted for seed in range(60) for cycles, wanted in attempts(seed))


def test_memory_of_ours_is_given_back_while_others_run() -> None:
    """A host frees its memory while another host runs, without aborting that run."""
    accelerator = Accelerator(TINY, length=60)
    first, other = opened(accelerator, 0x1000), opened(accelerator, 0x8000)
    first.run(0, 1, LIMIT)
    other.control.prepare(0x8000, instr_addr=0, instr_count=1, dma_size=4096, watchdog=0, lease=0, irq_enable=0)
    other.control.start()
    memory = first._memory
    first.close()
    assert memory.freed == [0x1000] and accelerator.aborts == 0  # type: ignore[attr-defined]
    other.close()
    assert accelerator.aborts == 1


def test_a_forked_device_is_refused() -> None:
    device = opened(Accelerator(TINY), 0x1000)
    device._process += 1
    for use in (lambda: device.run(0, 1, LIMIT), lambda: device.read(0, 1)):
        with pytest.raises(DeviceError, match=rf"process {os.getpid() + 1}.*forked"):
            use()
    device.close()
    assert device._memory.freed == []  # type: ignore[attr-defined]


def test_another_bitstream_between_two_runs() -> None:
    accelerator = Accelerator(TINY)
    device = opened(accelerator, 0x1000)
    device.run(0, 1, LIMIT)
    accelerator.values["identity"] ^= 1
    with pytest.raises(DeviceError, match="load that Config's bitstream"):
        device.run(0, 1, LIMIT)
    assert accelerator.starts == 1


# The lock ------------------------------------------------------------------------------------------------------

HOLDER = """
import sys, time
from pathlib import Path
from celosia.driver.board.lock import hold_lock_file
with hold_lock_file(Path(sys.argv[1]), "it"):
    print("held", flush=True)
    time.sleep(60)
"""


def test_who_holds_it_is_said_and_death_releases_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        words = (
            rf"^the board is in use: process {holder.pid} has held it since \d\d:\d\d:\d\d; wait for it, or end it with"
        )
        started = time.monotonic()
        with pytest.raises(DeviceError, match=words), hold_lock_file(path, "the board", patience=0.2):
            pass
        assert 0.2 <= time.monotonic() - started < 10
    finally:
        holder.kill()
        holder.wait()
    with hold_lock_file(path, "the board", patience=0):
        assert path.read_text().split()[0] == str(os.getpid())
        with pytest.raises(DeviceError, match=f"process {os.getpid()} "), hold_lock_file(path, "the board", 0):
            pass  # threads of one process, too
    with hold_lock_file(path, "the board", patience=0):
        pass


@pytest.mark.parametrize("text", ["", "1\n", "-1 5\n", "9" * 50, "\x1b[2J 5\n", f"{'7' * 10} {'9' * 10}\n"])
def test_what_others_write_to_it_harms_nobody(tmp_path: Path, text: str) -> None:
    path = tmp_path / "lock"
    with hold_lock_file(path, "the board"):
        path.write_text(text)
        with pytest.raises(DeviceError) as caught, hold_lock_file(path, "the board", 0):
            pass
        assert re.fullmatch(r"the board is in use: (another process|process 7{10} has) [ -~]*", str(caught.value))


def test_a_lock_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for path in (tmp_path / "none" / "lock", tmp_path / "link"):
        with pytest.raises(DeviceError, match=r"^the board cannot be locked \("), hold_lock_file(path, "the board"):
            pass
    assert not (tmp_path / "elsewhere").exists()


def test_processes_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices of two hosts, here threads, share one board: each run is right, and none is refused."""
    accelerator = Accelerator(TINY, length=30)
    monkeypatch.setattr(board, "LOCKS", tmp_path)
    failed: list[BaseException] = []

    def use(address: int) -> None:
        try:
            device = opened(accelerator, address, lock=partial(board.board_lock, 0x43C0_0000))
            for place in range(0, 640, 32):
                assert device.run(place, 1, LIMIT).cycles == address + place
            device.close()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=use, args=(address,)) for address in (0x1000, 0x8000)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert not failed and accelerator.starts == 40 and accelerator.aborts == 0
    assert [path.name for path in tmp_path.iterdir()] == ["celosia-43c00000"]


def test_a_second_process_waits_and_then_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board, "LOCKS", tmp_path)
    monkeypatch.setattr(board, "hold_lock_file", partial(hold_lock_file, patience=0.1))
    device = opened(Accelerator(TINY), 0x8000, lock=partial(board.board_lock, 0x1000))
    with board.board_lock(0x1000), pytest.raises(DeviceError, match=r"^the accelerator at 0x1000.*process"):
        device.run(0, 1, LIMIT)


# The lease -----------------------------------------------------------------------------------------------------


class Clock:
    """A clock that advances only by sleeping."""

    def __init__(self, slowly: float = 1) -> None:
        self.seconds, self.slowly = 0.0, slowly

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds * self.slowly

    @property
    def cycles(self) -> float:
        return self.seconds * 100e6


@pytest.mark.parametrize("interrupt", [False, True])
def test_the_driver_renews_its_lease(interrupt: bool) -> None:
    """The driver renews the lease during a run of ten leases; the run of a host that sleeps longer than one is
    ended."""

    def run(slowly: float) -> Any:
        clock = Clock(slowly)
        accelerator = Accelerator(TINY, length=10 * board.LEASE_CYCLES, now=lambda: clock.cycles)
        waits = {"sleep": clock.sleep, "interrupt": clock.sleep if interrupt else None}
        device = opened(accelerator, 0x1000, now=lambda: clock.seconds, **waits)
        return device.run(0, 1, 100 * board.LEASE_CYCLES), device

    counters, device = run(1)
    assert counters.cycles == 0x1000 and device.last_error is None
    wait = board.INTERRUPT_SECONDS if interrupt else board.POLL_SECONDS
    with pytest.raises(DeviceError, match=r"instruction 0.*lease"):
        run(1.01 * board.LEASE_CYCLES / 100e6 / wait)


def test_a_lease_ends_the_run_of_a_host_that_has_died() -> None:
    clock = Clock()
    accelerator = Accelerator(TINY, length=10 * board.LEASE_CYCLES, now=lambda: clock.cycles)

    def die(seconds: float) -> None:
        raise KeyboardInterrupt

    device = opened(accelerator, 0x1000, sleep=die)
    with pytest.raises(KeyboardInterrupt):
        device.run(0, 1, LIMIT)
    for seconds, over in ((0.9 * board.LEASE_CYCLES / 100e6, False), (0.2 * board.LEASE_CYCLES / 100e6, True)):
        clock.seconds += seconds
        assert Control(accelerator.read, accelerator.write).is_done() == over
    assert accelerator.error == Error.LEASE
