"""A fleet answers each trial exactly once, even if measuring processes fail."""

from __future__ import annotations

import itertools
import sys
import textwrap
import threading
import time
from collections import Counter
from concurrent.futures import CancelledError, Executor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from celosia.compiler.tune import device_pool
from celosia.compiler.tune.device_pool import ExecutorWorker, Fleet, FleetError, Measurer, WorkerProcess
from celosia.compiler.tune.layer_trial import CostSource, LayerJob, Status, TrialResult, measure
from celosia.hw.spec.config import PRESETS

WORKER = """
import os, pickle, signal, subprocess, sys, time
from pathlib import Path
from celosia.compiler.tune.layer_trial import TrialResult, Status

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
    pickle.dump(TrialResult(Status.OK, 1000 + number), out)
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


def station(folder: Path, does: str = "pass", name: str = "process 0") -> WorkerProcess:
    script = folder / f"{name}.py".replace(" ", "_")
    script.write_text(
        WORKER.format(folder=str(folder), does=textwrap.indent(textwrap.dedent(does).strip(), "    ").strip())
    )
    return WorkerProcess(name, [sys.executable, str(script)])


def jobs(count: int) -> list[LayerJob]:
    """Return trials that the planted workers recognise by their limits."""
    return [LayerJob(PRESETS["tiny"], b"", (), CostSource(), number) for number in range(count)]


def answers(fleet: Fleet, count: int) -> dict[int, TrialResult]:
    """Run trials and return the answer of each. Fails if a trial is answered twice."""
    results: list[tuple[int, TrialResult]] = []
    fleet.run(jobs(count), lambda number, result: results.append((number, result)))
    assert len(results) == len({number for number, _ in results}) == count
    return dict(results)


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
    assert fleet.excluded_devices == {}  # two in a row, then others that went well


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
    """A device on which each run fails."""

    def __init__(self, name: str) -> None:
        self.name, self.asked = name, 0

    def measure(self, job: LayerJob, deadline: float) -> TrialResult:
        self.asked += 1
        return TrialResult(Status.CRASHED, detail="the cable is out")

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
        assert fleet.excluded_devices == {"board:pynq-z2": "process died: the cable is out"}


def test_no_device_left_is_an_error_that_names_them() -> None:
    kept: list[int] = []
    with Fleet([Broken("a"), Broken("b")]) as fleet, pytest.raises(FleetError, match="no device is left") as error:
        fleet.run(jobs(12), lambda number, result: kept.append(number))
    assert "a (process died: the cable is out)" in str(error.value) and "b (" in str(error.value)
    assert len(kept) < 12


def executed(executor: Executor, folder: Path, does: str = "pass", name: str = "place") -> ExecutorWorker:
    return ExecutorWorker(name, executor, tuple(station(folder, does).command[1:]))


def test_an_executor_is_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An executor such as Dask's is a device: a separate process measures, and is killed if it is late."""
    with ThreadPoolExecutor(1) as executor:
        with Fleet([executed(executor, tmp_path, HANGS)], deadline=3) as fleet:
            results = answers(fleet, 4)
        assert results[2].status == Status.HUNG and results[2].detail == "no answer within 3 s"
        assert [results[n].cycles for n in (0, 1, 3)] == [1000, 1001, 1003]
        (job,) = jobs(1)
        assert ExecutorWorker("as it is", executor).measure(job, 60).status == Status.CRASHED  # b"" is no layer
        stuck = threading.Event()
        executor.submit(stuck.wait)
        monkeypatch.setattr(device_pool, "EXTRA_SECONDS", 0.1)
        assert executed(executor, tmp_path).measure(job, 0.05).status == Status.HUNG
        stuck.set()
    gone = executed(executor, tmp_path)  # this executor has been shut down
    assert gone.measure(job, 60).status == Status.CRASHED


def test_a_place_that_is_gone_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_pool, "POLL_SECONDS", 0.05)
    with ThreadPoolExecutor(1) as executor:
        stuck = threading.Event()
        executor.submit(stuck.wait)
        place = executed(executor, tmp_path)
        place.alive = lambda: False
        assert place.measure(jobs(1)[0], 60) == TrialResult(Status.CRASHED, detail="its worker is gone")
        stuck.set()


class Noting:
    """A device that records the Configs of its trials."""

    def __init__(self, name: str) -> None:
        self.name, self.configs = name, list[str]()

    def measure(self, job: LayerJob, deadline: float) -> TrialResult:
        self.configs.append(job.cfg.name)
        time.sleep(0.01)
        return TrialResult(Status.OK, 1)

    def close(self) -> None:
        pass


def test_devices_keep_to_their_config() -> None:
    """Devices seldom change their Config, since a simulator must be loaded for each change."""
    mixed = [LayerJob(PRESETS[("tiny", "pynq")[n % 2]], b"", (), CostSource(), n) for n in range(40)]
    devices = [Noting("a"), Noting("b")]
    with Fleet(devices) as fleet:
        for _ in range(2):
            fleet.run(mixed, lambda number, result: None)
    for device in devices:
        changes = sum(a != b for a, b in itertools.pairwise(device.configs))
        assert len(device.configs) > 4 and changes <= 3  # at the end of each round a device helps the other one


def test_a_lost_connection_is_no_answer(tmp_path: Path) -> None:
    """A trial whose connection is lost is repeated; a trial for another version is not run."""
    (job,) = jobs(1)
    results = iter([TrialResult(Status.LOST, detail="the cable"), TrialResult(Status.OK, 7)])
    device = Broken("board:pynq")
    device.measure = lambda job, deadline: next(results)  # type: ignore[method-assign]
    results_by_fleet: list[TrialResult] = []
    with Fleet([device]) as fleet:
        fleet.run([job], lambda number, result: results_by_fleet.append(result))
    assert results_by_fleet == [TrialResult(Status.OK, 7)] and fleet.excluded_devices == {}
    other = measure(replace(job, version=99))
    assert other.status == Status.FAILED and "99 was asked for; install the same Celosia" in other.detail
    nowhere = measure(replace(job, judge=CostSource("ssh://root@pynq")))
    assert nowhere.status == Status.FAILED and "no connection to ssh://root@pynq" in nowhere.detail


def test_what_keeps_answers_may_fail(tmp_path: Path) -> None:
    """An error in the function that stores answers, such as a full disk, ends the run soon."""

    def full(number: int, result: TrialResult) -> None:
        raise OSError("no space")

    with Fleet([station(tmp_path, name=f"process {n}") for n in range(2)]) as fleet, pytest.raises(OSError):
        fleet.run(jobs(50), full)
    assert len((tmp_path / "log").read_text().split()) < 50


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
