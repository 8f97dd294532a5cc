"""Tuning measures on a board over ssh, which is the Verilated RTL, and on workers of Dask."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from driver_models import UNBLOCKED
from fake_board import FakeBoard, serving
from typer.testing import CliRunner

import celosia
from celosia.compiler.tune.device_pool import Fleet, FleetError
from celosia.compiler.tune.layer_trial import CostSource, LayerJob, Status, TrialResult, measure, pickled
from celosia.compiler.tune.network import network_measurer
from celosia.compiler.tune.records import Records
from celosia.driver import cli
from celosia.driver.remote.ssh import SshError
from celosia.driver.tune import fleet
from celosia.driver.tune.fleet import PoolError, board_worker_command, open_fleet, resource_of
from celosia.driver.tune.optimise import optimise
from celosia.driver.tune.tune import tune
from celosia.driver.workstation.oracle import MissingLibrary
from celosia.hw.boards.memory import ZYNQ_HP
from celosia.hw.spec.config import PRESETS

sys.path.append(str(Path(__file__).parents[2]))
from benchmarks.tune import Shape, space_of

BOARD = CostSource("ssh://board")
BASE = 0x43C00000
ROOT = Path(celosia.__file__).parents[1]

needs_ssh = pytest.mark.skipif(shutil.which("ssh") is None, reason="could not find 'ssh', which reaches boards")
pytestmark = pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")  # asyncssh, where we cut the line


@pytest.fixture(scope="module")
def jobs() -> list[LayerJob]:
    """Return six trials of two layers on `tiny`."""
    found: list[LayerJob] = []
    cfg = PRESETS["tiny"]
    for layer in (Shape(12, 5, 8, 3).layer(cfg), Shape(8, 6, 8, 1).layer(cfg)):
        space = space_of(cfg, layer)
        best = sorted(range(len(space)), key=space.base.__getitem__)[:3]
        found.extend(LayerJob(cfg, pickled(layer), space.points[n]) for n in best)
    return found


def judged(jobs: list[LayerJob], judge: CostSource) -> list[LayerJob]:
    return [LayerJob(job.cfg, job.layer, job.decisions, judge) for job in jobs]


def answers(devices: Fleet, jobs: list[LayerJob], kept: Any = lambda number, result: None) -> list[TrialResult]:
    """Run trials and return the result of each. Fails if a trial is answered twice."""
    found: dict[int, TrialResult] = {}

    def keep(number: int, result: TrialResult) -> None:
        assert number not in found
        found[number] = result
        kept(number, result)

    devices.run(jobs, keep)
    return [found[number] for number in range(len(jobs))]


# A board ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def board(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeBoard]:
    """Serve a board whose FPGA is the Verilated accelerator `tiny`."""
    from celosia.sim.rtl.build import build_library

    with serving(FakeBoard(tmp_path, build_library(PRESETS["tiny"])), tmp_path, monkeypatch) as found:
        yield found


@needs_ssh
@pytest.mark.rtl
def test_a_board_measures_what_the_rtl_does(board: FakeBoard, jobs: list[LayerJob]) -> None:
    """A board measures the RTL's cycles, in one session that leaves nothing behind."""
    jobs = jobs[::3]  # one of each layer
    with open_fleet(BOARD, base=BASE) as devices:
        found = answers(devices, judged(jobs, BOARD))
    for job, result in zip(jobs, found):
        rtl = measure(judged([job], CostSource("rtl"))[0])
        assert result.status == rtl.status == Status.OK
        assert abs(result.cycles - rtl.cycles) <= 2 * ZYNQ_HP.refresh_cycles  # which come at other times
    runs = [command for command in board.commands if "runner" in command]
    assert len(runs) == 1
    assert board.processes[-1].wait(20) is not None
    limited = [LayerJob(job.cfg, job.layer, job.decisions, BOARD, limit=50) for job in jobs[:1]]
    with open_fleet(BOARD, base=BASE) as devices:
        assert answers(devices, limited)[0].status == Status.CENSORED


@needs_ssh
@pytest.mark.rtl
def test_a_lost_session_loses_no_trial(board: FakeBoard, jobs: list[LayerJob]) -> None:
    def cut(number: int, result: TrialResult) -> None:
        if number == 1:
            board.connection.abort()

    with open_fleet(BOARD, base=BASE) as devices:
        found = answers(devices, judged(jobs[:3], BOARD), cut)
        assert [result.status for result in found] == [Status.OK] * 3 and devices.excluded_devices == {}
    assert len([command for command in board.commands if "runner" in command]) == 2


@needs_ssh
@pytest.mark.rtl
def test_a_board_that_is_gone_is_left_out_and_named(board: FakeBoard, jobs: list[LayerJob], tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(config.read_text().replace(f"Port {board.port}", "Port 1"))
    kept: list[int] = []
    with open_fleet(BOARD, base=BASE) as devices, pytest.raises(FleetError, match="no device is left") as error:
        devices.run(judged(jobs, BOARD), lambda number, result: kept.append(number))
    assert "board:board (connection lost: " in str(error.value) and len(kept) <= 1


@needs_ssh
@pytest.mark.rtl
def test_a_board_that_hangs_is_given_up(board: FakeBoard, jobs: list[LayerJob]) -> None:
    """The local process and its ssh end by the deadline if the board hangs."""
    board.wrap = lambda command: "sleep 600"
    with open_fleet(BOARD, deadline=4, base=BASE) as devices:
        (result,) = answers(devices, judged(jobs[:1], BOARD))
        assert result.status == Status.HUNG and result.detail == "no answer within 4 s"
    time.sleep(0.2)
    assert f"-p {board.port}" not in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout


@needs_ssh
@pytest.mark.rtl
def test_errors_of_a_board_are_answers(board: FakeBoard, jobs: list[LayerJob]) -> None:
    with open_fleet(BOARD) as devices:  # where a board's processor has its registers: not here
        (result,) = answers(devices, judged(jobs[:1], BOARD))
    assert result.status == Status.FAILED and result.detail
    other = [LayerJob(PRESETS["pynq"], job.layer, job.decisions, BOARD) for job in jobs[:1]]
    with open_fleet(BOARD, base=BASE) as devices:
        (result,) = answers(devices, other)
    assert result.status in (Status.FAILED, Status.REFUSED)


@needs_ssh
@pytest.mark.rtl
def test_the_command_tunes_on_a_board(board: FakeBoard, models: Path, tmp_path: Path) -> None:
    line = ["tune", models / "quantised.onnx", "--config", "tiny", "--records", tmp_path / "r.jsonl", "--trials", 4,
            "--device", "ssh://board", "--address", hex(BASE), "--deadline", 60]  # fmt: skip
    done = CliRunner().invoke(cli.app, [str(word) for word in line])
    assert done.exit_code == 0, done.output
    measurers = Counter(key.measurer for key in Records.load(tmp_path / "r.jsonl").trials)
    assert set(measurers) == {BOARD.version, network_measurer(CostSource())} and measurers[BOARD.version] >= 4
    done = CliRunner().invoke(cli.app, [str(word) for word in line])
    assert done.exit_code == 0 and " 0 measured" in " ".join(done.output.split())


# Names ------------------------------------------------------------------------------------------------------------


def test_resources() -> None:
    assert resource_of(CostSource()) is None and resource_of(CostSource("rtl")) == "rtl"
    assert resource_of(CostSource("ssh://xilinx@pynq-z2:2222")) == "board:pynq-z2"
    with pytest.raises(SshError, match="names no machine"):
        resource_of(CostSource("ssh://a b"))
    assert board_worker_command("ssh://pynq", True, 16)[-3:] == ("--sudo", "--base=16", "ssh://pynq")


@pytest.mark.parametrize("text", ["dask://", "dask://host", "dask://host:x", "ray://host:1", "host:1", "dask://h:1/a"])
def test_what_is_no_pool(text: str) -> None:
    with pytest.raises(PoolError, match="dask://HOST:PORT"):
        open_fleet(CostSource(), pool=text)


def test_a_pool_on_a_public_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool on a public address is refused before anything is sent, also if only its scheduler or a worker has one."""
    pytest.importorskip("distributed")
    asked: list[str] = []

    class Client:
        def __init__(self, address: str, **options: Any) -> None:
            asked.append(address)

        def scheduler_info(self, n_workers: int) -> dict[str, Any]:
            worker = {"nthreads": 0, "name": "w", "resources": {}}
            return {"address": places[0], "workers": {places[1]: worker} if n_workers else {}}

        def close(self) -> None:
            asked.append("closed")

    monkeypatch.setattr("distributed.Client", Client)
    inside, outside = "tcp://10.0.0.1:8786", "tcp://8.8.8.8:1"
    places = (inside, inside)
    for host in ("8.8.8.8", "[2001:4860:4860::8888]", "0x08080808"):
        with pytest.raises(PoolError, match=r"TLS.*--host.*dask\+tls.*--insecure-pool"):
            open_fleet(CostSource(), pool=f"dask://{host}:8786")
    assert not asked
    rtl = CostSource("rtl")
    for host in ("127.0.0.1", "[::1]", "localhost", "192.168.1.2"):
        with pytest.raises(PoolError, match=r"no worker.*resource rtl"):
            open_fleet(rtl, pool=f"dask://{host}:8786")
    for pair in ((outside, inside), (inside, outside)):
        places = pair
        asked.clear()
        with pytest.raises(PoolError, match=r"8\.8\.8\.8.*public"):
            open_fleet(rtl, pool="dask://127.0.0.1:8786")
        assert asked == ["tcp://127.0.0.1:8786", "closed"]
    places = ("tls://8.8.8.8:1",) * 2
    asked.clear()
    for pool in ("dask+tls://8.8.8.8:8786", fleet.allow_any_interface("dask://8.8.8.8:8786")):
        with pytest.raises(PoolError, match=r"no worker.*resource rtl"):
            open_fleet(rtl, pool=pool)
    assert asked[::2] == ["tls://8.8.8.8:8786", "tcp://8.8.8.8:8786"]


def test_without_dask(monkeypatch: pytest.MonkeyPatch, models: Path, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(MissingLibrary, match=r"Dask.*celosia\[fleet\]"):
        open_fleet(CostSource(), pool="dask://host:8786")
    line = ["tune", str(models / "quantised.onnx"), "--records", str(tmp_path / "r"), "--pool", "dask://host:8786"]
    done = CliRunner().invoke(cli.app, line)
    assert done.exit_code == 4 and "celosia[fleet]" in done.output and "Traceback" not in done.output
    done = CliRunner().invoke(cli.app, [*line[:-2], "--device", "abacus"])
    assert done.exit_code == 2 and "there is no device 'abacus'" in " ".join(done.output.split())


# Dask -------------------------------------------------------------------------------------------------------------

STATION = """
import os, pickle, signal, subprocess, sys, time
from pathlib import Path
from celosia.compiler.tune.layer_trial import TrialResult, Status

folder = Path({folder!r})
while True:
    try:
        number = pickle.load(sys.stdin.buffer).limit
    except EOFError:
        break
    with open(folder / "log", "a") as log:
        log.write(f"{{number}}\\n")
    if number == 2 and not (folder / "died").exists():
        (folder / "died").touch()
        {does}
    pickle.dump(TrialResult(Status.OK, 1000 + number), sys.stdout.buffer)
    sys.stdout.buffer.flush()
"""


class Cluster:
    """A scheduler in this process, with workers in processes of their own."""

    def __init__(self, folder: Path) -> None:
        distributed = pytest.importorskip("distributed", reason="no 'distributed', of the extra fleet")
        self.folder, self.workers = folder, dict[str, subprocess.Popen[bytes]]()
        self.cluster = distributed.LocalCluster(n_workers=0, host="127.0.0.1", dashboard_address=None)
        self.pool = self.cluster.scheduler_address.replace("tcp://", "dask://")

    def worker(self, name: str, resources: str = "") -> None:
        line = [sys.executable, "-m", "distributed.cli.dask_worker", self.cluster.scheduler_address, "--no-nanny",
                "--nthreads", "1", "--no-dashboard", "--name", name, "--local-directory", str(self.folder)]  # fmt: skip
        options = ["--resources", resources] if resources else []
        log = (self.folder / f"{name}.log").open("wb")
        paths = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
        with log:
            self.workers[name] = subprocess.Popen(
                [*line, *options], stdout=log, stderr=log, env=os.environ | {"PYTHONPATH": paths}
            )
        end = time.monotonic() + 60
        while len(self.cluster.scheduler.workers) < len(self.workers):
            assert time.monotonic() < end and self.workers[name].poll() is None, (
                self.folder / f"{name}.log"
            ).read_text()
            time.sleep(0.05)

    def fleet(self, judge: CostSource, action: str = "pass", deadline: float = 60) -> Fleet:
        """Open a fleet whose workers run a station that executes `does` at its third job."""
        script = self.folder / "station.py"
        script.write_text(STATION.format(folder=str(self.folder), does=action))
        return fleet._open_dask_fleet(judge, self.pool, (str(script),), deadline)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with ExitStack() as ends:
        found = Cluster(tmp_path)
        ends.callback(found.cluster.close)
        yield found
        for worker in found.workers.values():
            worker.kill()
            worker.wait()


@pytest.fixture(scope="module")
def one_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Start a cluster whose only worker is not killed by a test."""
    found = Cluster(tmp_path_factory.mktemp("cluster"))
    try:
        found.worker("one")
        yield found
    finally:
        found.cluster.close()
        for worker in found.workers.values():
            worker.kill()
            worker.wait()


def numbered(count: int) -> list[LayerJob]:
    return [LayerJob(PRESETS["tiny"], b"", (), limit=number) for number in range(count)]


def test_a_worker_of_dask_measures_what_this_process_does(
    one_worker: Cluster, jobs: list[LayerJob], models: Path
) -> None:
    pool = one_worker.pool
    with open_fleet(CostSource(), pool=pool) as devices:
        assert [device.name for device in devices.devices] == ["worker one"]
        found = answers(devices, jobs)
    assert [(r.status, r.cycles) for r in found] == [(r.status, r.cycles) for r in map(measure, jobs)]
    there, here = (tune(models / "quantised.onnx", UNBLOCKED, trials=4, pool=each) for each in (pool, None))
    assert there.program.image.tobytes() == here.program.image.tobytes()
    assert there.report["measured"] == here.report["measured"]
    shared, alone = (optimise(models / "quantised.onnx", UNBLOCKED, pool=each) for each in (pool, None))
    assert shared.after == alone.after and shared.state.weighed > 0 and not shared.state.excluded_devices


def test_resources_say_which_worker(cluster: Cluster) -> None:
    cluster.worker("plain")
    with pytest.raises(PoolError, match=r"dask worker .* --resources rtl=1$"):
        cluster.fleet(CostSource("rtl"))
    cluster.worker("able", "rtl=2,board:pynq=1")
    with cluster.fleet(CostSource("rtl")) as devices:
        assert [device.name for device in devices.devices] == ["worker able, 1 of 2", "worker able, 2 of 2"]
        assert [r.cycles for r in answers(devices, numbered(6))] == [1000 + n for n in range(6)]
    with cluster.fleet(CostSource("ssh://root@pynq")) as devices:
        assert [device.name for device in devices.devices] == ["worker able"]
    with pytest.raises(PoolError, match=r"worker.*board:other"):
        cluster.fleet(CostSource("ssh://root@other"))


def test_a_worker_that_is_killed_loses_no_trial(cluster: Cluster) -> None:
    """Another worker repeats the trial of a worker that is killed; if there is no other, the fleet says so."""
    cluster.worker("one")
    cluster.worker("two")
    with cluster.fleet(CostSource(), "os.kill(os.getppid(), signal.SIGKILL); time.sleep(600)") as devices:
        found = answers(devices, numbered(12))
        assert [(r.status, r.cycles) for r in found] == [(Status.OK, 1000 + n) for n in range(12)]
    log = Counter((cluster.folder / "log").read_text().split())
    assert log["2"] == 2 and sum(log.values()) == 13
    (left,) = (name for name, worker in cluster.workers.items() if worker.poll() is None)
    (cluster.folder / "died").unlink()
    with (
        cluster.fleet(CostSource(), "os.kill(os.getppid(), signal.SIGKILL); time.sleep(600)") as devices,
        pytest.raises(FleetError, match=rf"worker {left}.*worker is gone"),
    ):
        devices.run(numbered(6), lambda number, result: None)


def test_what_hangs_ends_in_the_worker(one_worker: Cluster) -> None:
    cluster = one_worker
    does = "(folder / 'child').write_text(str(subprocess.Popen(['sleep', '600']).pid)); time.sleep(600)"
    with cluster.fleet(CostSource(), does, deadline=3) as devices:
        found = answers(devices, numbered(5))
    assert [r.status for r in found] == [Status.OK, Status.OK, Status.HUNG, Status.OK, Status.OK]
    assert found[2].detail == "no answer within 3 s" and cluster.workers["one"].poll() is None
    child = int((cluster.folder / "child").read_text())
    for _ in range(100):
        if not _runs(child):
            return
        time.sleep(0.05)
    raise AssertionError("what the killed process had started still runs")


def _runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().split(")")[1].split()[0] != "Z"
    except OSError:
        return False


def test_no_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("distributed", reason="no 'distributed', of the extra fleet")
    monkeypatch.setattr(fleet, "CONNECT_SECONDS", 1)
    with pytest.raises(PoolError, match=r"--host 127\.0\.0\.1 --port 1$"):
        open_fleet(CostSource(), pool="dask://127.0.0.1:1")
