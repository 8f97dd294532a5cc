"""A fleet answers each trial once, whatever becomes of the processes that measure."""

from __future__ import annotations

import sys
import textwrap
import threading
import time
from collections import Counter
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from celosia.compiler.tune.measure import Job, Judge, Result, Status
from celosia.compiler.tune.pool import Executed, Fleet, FleetError, Measurer, Station
from celosia.hw.config import PRESETS

WORKER = """
import os, pickle, signal, subprocess, sys, time
from pathlib import Path
from celosia.compiler.tune.measure import Result, Status

folder = Path({folder!r})
out = sys.stdout.buffer
while True:
    try:
        job = pickle.load(sys.stdin.buffer)
    except EOFError:
        break
    number = job.limit
    with open(folder / "log", "a") as log:
        log.write(f"{{number}}\\n")
    {does}
    pickle.dump(Result(Status.OK, 1000 + number), out)
    out.flush()
"""
ONCE = """
    if number == 2 and not (folder / "died").exists():
        (folder / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
"""
ALWAYS = """
    if number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
"""
HANGS = """
    if number == 2:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        (folder / "child").write_text(str(child.pid))
        time.sleep(600)
"""


def station(folder: Path, does: str = "pass", name: str = "process 0") -> Station:
    script = folder / f"{name}.py".replace(" ", "_")
    script.write_text(
        WORKER.format(folder=str(folder), does=textwrap.indent(textwrap.dedent(does).strip(), "    ").strip())
    )
    return Station(name, [sys.executable, str(script)])


def jobs(count: int) -> list[Job]:
    """Trials that these workers know by their limits."""
    return [Job(PRESETS["tiny"], b"", (), Judge(), number) for number in range(count)]


def answers(fleet: Fleet, count: int) -> dict[int, Result]:
    """What each trial was answered; none twice."""
    found: list[tuple[int, Result]] = []
    fleet.run(jobs(count), lambda number, result: found.append((number, result)))
    assert len(found) == len({number for number, _ in found}) == count
    return dict(found)


def test_every_trial_is_answered_once(tmp_path: Path) -> None:
    with Fleet([station(tmp_path, name=f"process {n}") for n in range(2)]) as fleet:
        found = answers(fleet, 20)
    assert {number: result.cycles for number, result in found.items()} == {n: 1000 + n for n in range(20)}
    assert Counter((tmp_path / "log").read_text().split()) == {str(n): 1 for n in range(20)}


def test_a_trial_whose_process_is_killed_is_tried_again(tmp_path: Path) -> None:
    with Fleet([station(tmp_path, ONCE)]) as fleet:
        found = answers(fleet, 6)
    assert all(result.cycles == 1000 + number for number, result in found.items())
    assert Counter((tmp_path / "log").read_text().split()) == {**{str(n): 1 for n in range(6)}, "2": 2}


def test_a_trial_that_kills_its_process_is_answered(tmp_path: Path) -> None:
    with Fleet([station(tmp_path, ALWAYS)]) as fleet:
        found = answers(fleet, 6)
    assert found[2].status == Status.CRASHED and found[2].detail
    assert [found[n].cycles for n in (0, 1, 3, 4, 5)] == [1000, 1001, 1003, 1004, 1005]
    assert fleet.left_out == {}  # two in a row, then others that went well


def test_what_hangs_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    with Fleet([station(tmp_path, HANGS)], deadline=3) as fleet:
        found = answers(fleet, 4)
    assert found[2].status == Status.HUNG and found[2].detail == "no answer within 3 s"
    assert [found[n].status for n in (0, 1, 3)] == [Status.OK] * 3
    child = int((tmp_path / "child").read_text())
    for _ in range(100):
        if not _runs(child):
            return
        time.sleep(0.05)
    raise AssertionError("the child of the killed process still runs")


def _runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().split(")")[1].split()[0] != "Z"
    except OSError:
        return False


class Broken:
    """A device whose every run fails."""

    def __init__(self, name: str) -> None:
        self.name, self.asked = name, 0

    def measure(self, job: Job, deadline: float) -> Result:
        self.asked += 1
        return Result(Status.CRASHED, detail="the cable is out")

    def close(self) -> None:
        pass


def test_a_device_that_fails_three_times_is_left_out_and_named(tmp_path: Path) -> None:
    broken = Broken("board:pynq-z2")
    devices: list[Measurer] = [broken, station(tmp_path)]
    with Fleet(devices) as fleet:
        found = answers(fleet, 12)
    assert all(result.cycles == 1000 + number for number, result in found.items())  # the other one tried them again
    assert broken.asked <= 3
    if broken.asked == 3:
        assert fleet.left_out == {"board:pynq-z2": "process died: the cable is out"}


def test_no_device_left_is_an_error_that_names_them() -> None:
    kept: list[int] = []
    with Fleet([Broken("a"), Broken("b")]) as fleet, pytest.raises(FleetError, match="no device is left") as error:
        fleet.run(jobs(12), lambda number, result: kept.append(number))
    assert "a (process died: the cable is out)" in str(error.value) and "b (" in str(error.value)
    assert len(kept) < 12


def test_an_executor_is_a_device() -> None:
    """As Dask's is; what it cannot do is a Result, too."""
    with ThreadPoolExecutor(1) as executor:
        device = Executed("executor", executor)
        (job,) = jobs(1)
        assert device.measure(job, 60).status == Status.CRASHED  # b"" is no layer
        stuck = threading.Event()
        executor.submit(stuck.wait)
        assert device.measure(job, 0.05).status == Status.HUNG
        stuck.set()


def test_what_a_fleet_gives_up_has_no_result(tmp_path: Path) -> None:
    kept: list[int] = []
    fleet = Fleet([station(tmp_path, HANGS)])
    runner = threading.Thread(target=lambda: _quietly(fleet, kept))
    runner.start()
    while not (tmp_path / "child").exists():
        time.sleep(0.02)
    fleet.close()
    runner.join(20)
    assert not runner.is_alive() and kept == [0, 1]


def _quietly(fleet: Fleet, kept: list[int]) -> None:
    with suppress(FleetError, CancelledError):
        fleet.run(jobs(4), lambda number, result: kept.append(number))
