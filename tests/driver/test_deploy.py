"""Programs are deployed over ssh with the system's client to a server in this process, which has the Verilated RTL."""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from driver_models import UNBLOCKED, floats, quantised
from fake_board import LOCKS, FakeBoard, serving
from typer.testing import CliRunner

import celosia
from celosia.compiler.program import InputError, Program, ProgramError
from celosia.compiler.target import TARGETS, Target
from celosia.driver.cli import app
from celosia.driver.remote import bootstrap, deploy
from celosia.driver.remote.runner import board_modules, pack_runner
from celosia.driver.remote.serve import pack, parse_result, unpack
from celosia.driver.remote.ssh import SshError, connect, ssh_destination
from celosia.hw.spec.config import PRESETS
from celosia.sim.device import DeviceError

if shutil.which("ssh") is None:
    pytest.skip("could not find 'ssh', OpenSSH's client, which reaches boards", allow_module_level=True)
pytestmark = pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")  # asyncssh, where we cut the line
MACHINE = platform.machine()
HERE = Target(
    16, 16, frozenset(("sse2",)) if MACHINE == "x86_64" else TARGETS["aarch64"].features, MACHINE,
    f"{MACHINE}-unknown-linux-gnu", "x86-64" if MACHINE == "x86_64" else "generic",
    ("-target", f"{MACHINE}-linux-gnu.2.28"),
)  # fmt: skip
"""This machine as if it were a board's: Programs come with a shared object, and no LLVM is there."""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("ziglang")
    path = tmp_path_factory.mktemp("program") / "program.celosia"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TARGETS, "here", HERE)
        celosia.compile(quantised(), "tiny", target="here").save(path)
    return path


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register this machine as a target for which the deploying side makes machine code."""
    monkeypatch.setitem(TARGETS, "here", HERE)


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeBoard]:
    """Serve a board without pynq."""
    with serving(FakeBoard(tmp_path, None), tmp_path, monkeypatch) as board:
        yield board


@pytest.fixture
def rtl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeBoard]:
    """Serve a board whose FPGA is the Verilated accelerator `tiny`."""
    from celosia.sim.rtl.build import build_library

    with serving(FakeBoard(tmp_path, build_library(PRESETS["tiny"])), tmp_path, monkeypatch) as board:
        yield board


def command(*args: object, code: int = 0) -> str:
    """Run `celosia ARGS`, expect exit code `code`, and return output and errors."""
    done = CliRunner().invoke(app, [*map(str, args)])
    assert done.exit_code == code, f"{done.exit_code}: {done.output}"
    return " ".join(done.output.split())


def files_of(board: FakeBoard) -> list[str]:
    return sorted(path.name for path in (board.home / "celosia").glob("*")) + sorted(
        path.name for path in (board.home / "celosia").glob(".*")
    )


# The whole way -------------------------------------------------------------------------------------------------


@pytest.mark.rtl
def test_deployed_and_run_on_a_board(rtl: FakeBoard, program: Path, models: Path, tmp_path: Path) -> None:
    message = command("deploy", program, "--host", "board", "-q")
    message = command("deploy", program, "--host", "board")
    assert (
        f"board: {MACHINE}, Python 3." in message
        and "pynq 0 (simulated)" in message
        and message.endswith(" 0 bytes sent")
    )
    names = files_of(rtl)
    assert [name.split("-")[0] for name in names] == ["program", "runner"]
    args = ["run", program, "-i", models / "x.npy", "--address", "0x43C00000"]
    message = command(*args, "--device", "ssh://board", "-o", tmp_path / "y.npz", "--report", tmp_path / "report.json")
    assert "on board" in message and "cycles" in message
    assert files_of(rtl) == names
    x = {"input_1": np.load(models / "x.npy")}
    expected = celosia.Runtime(celosia.compile(quantised(), "tiny"), "rtl").run(x)
    with np.load(tmp_path / "y.npz") as result:
        assert {name: result[name].tobytes() for name in result} == {
            name: array.tobytes() for name, array in expected.outputs.items()
        }
    report = json.loads((tmp_path / "report.json").read_text())
    assert report.keys() - {"host"} == expected.report.keys()
    assert report["device"] == report["memory_model"] == "board" and report["host"] == "board"
    assert report["cycles"] > 0 and report["units"]["gemm"]["busy"] == expected.report["units"]["gemm"]["busy"]
    assert report["seconds"]["transfer"] > 0
    # The runner itself is sent again where it is damaged.
    (rtl.home / "celosia" / names[1]).write_bytes(b"damaged")
    command(*args, "--device", "ssh://board", "-q")
    assert hashlib.sha256((rtl.home / "celosia" / names[1]).read_bytes()).hexdigest().startswith(names[1][7:19])


@pytest.mark.rtl
def test_errors_of_the_board_come_back(
    rtl: FakeBoard, program: Path, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ["run", program, "--device", "ssh://board", "--address", "0x43C00000"]
    np.save(tmp_path / "wrong.npy", np.zeros((2, 2), np.float32))
    assert "must be float32[1, 3, 8, 8]" in command(*args, "-i", tmp_path / "wrong.npy", code=1)
    monkeypatch.setitem(TARGETS, "here", HERE)
    celosia.compile(quantised(), UNBLOCKED, target="here").save(tmp_path / "other")
    message = command("run", tmp_path / "other", *args[2:], "-i", models / "x.npy", code=3)
    assert "the accelerator on the board has Config" in message
    if MACHINE not in ("armv7l", "aarch64"):
        assert "is no Zynq" in command(*args[:4], "-i", models / "x.npy", code=3)


def test_numpy_on_the_board(empty: FakeBoard, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A board without FPGA and pynq runs a Program on the functional simulator, compiled for its processor."""
    pytest.importorskip("ziglang")
    monkeypatch.setitem(TARGETS, "here", HERE)
    inputs = ["-i", f"a={models / 'a.npy'}", "-i", f"b={models / 'b.npy'}"]
    command(
        "run", models / "floats.onnx", *inputs, "--device", "ssh://board/functional", "-o", tmp_path / "y.npz", "-q"
    )
    expected = celosia.Runtime(celosia.compile(floats())).run({n: np.load(models / f"{n}.npy") for n in "ab"}).outputs
    with np.load(tmp_path / "y.npz") as result:
        for name, array in expected.items():
            np.testing.assert_allclose(result[name], array, rtol=1e-6)
    message = command("run", models / "floats.onnx", *inputs, "--device", "ssh://board", code=3)
    assert (
        "board cannot run it: it has no pynq (ModuleNotFoundError: No module named 'pynq'); use a PYNQ image" in message
    )
    assert "it has no pynq" in command("deploy", models / "floats.onnx", "--host", "board", code=3)


def test_boards_share_a_stream(empty: FakeBoard, models: Path, tmp_path: Path) -> None:
    """Two boards and devices of this machine share a stream of samples; CPU steps run here."""
    x = np.random.default_rng(0).normal(size=(4, 3, 8, 8)).astype(np.float32)
    program = celosia.compile(models / "quantised.onnx", "tiny")
    expected = celosia.Runtime(program).run_batch({"input_1": x})
    with celosia.Runtime(program, "ssh://board/functional,ssh://board/functional") as runtime:
        outputs = [result.outputs for result in runtime.run_each(x[:, None], in_flight=1)]
    for name, array in expected.items():
        assert np.concatenate([each[name] for each in outputs]).tobytes() == array.tobytes()
    assert len([command for command in empty.commands if "runner" in command]) == 2
    np.savez(tmp_path / "x.npz", input_1=x)
    arguments = "eval", models / "quantised.onnx", "--config", "tiny", "--data", tmp_path / "x.npz"
    command(*arguments, "--device", "functional, timed", "--report", tmp_path / "r.json", "--no-check", "-q")
    assert json.loads((tmp_path / "r.json").read_text())["device"] == "functional, timed"
    assert "there is no device 'rtl' on a board" in command(*arguments, "--device", "ssh://board/rtl", code=3)
    assert "there is no device 'bord'" in command(*arguments, "--device", "functional,bord", code=2)


def test_a_stream_runs_on_the_board(empty: FakeBoard, program: Path) -> None:
    """A stream runs on the board; a wrong sample is reported by its number, and the others run."""
    x = np.random.default_rng(0).normal(size=(5, 1, 3, 8, 8)).astype(np.float32)
    samples = [{"input_1": array} for array in x]
    samples[2] = {"input_1": x[2, ..., 1:]}
    loaded = Program.load(program, trust=True)
    with connect("board") as connection:
        results = deploy.run_each(deploy.Remote(connection), loaded, samples, "functional")
        all_outputs = [next(results).outputs for _ in range(2)]
        with pytest.raises(InputError, match=r"^sample 2: input 'input_1'"):
            next(results)
        all_outputs += [result.outputs for result in results]
        with pytest.raises(RuntimeError, match="'fpga'"):
            next(deploy.run_each(deploy.Remote(connection), loaded, samples, "fpga"))
        left = deploy.run_each(deploy.Remote(connection), loaded, samples, "functional")
        next(left)
        left.close()
    expected = celosia.Runtime(loaded)
    for array, outputs in zip(np.delete(x, 2, 0), all_outputs, strict=True):
        for name, wanted in expected.run({"input_1": array}).outputs.items():
            assert outputs[name].tobytes() == wanted.tobytes()


# What goes wrong -----------------------------------------------------------------------------------------------


def test_no_board(empty: FakeBoard, program: Path, tmp_path: Path) -> None:
    config = tmp_path / "config"
    good = config.read_text()
    message = command("deploy", program, "--host", "board.invalid", code=3)
    assert "board.invalid cannot be reached; check its name" in message
    config.write_text(good.replace(f"Port {empty.port}", "Port 1"))
    assert "board cannot be reached" in command("deploy", program, "--host", "board", code=3)
    config.write_text(good.replace(f"IdentityFile {tmp_path}/key", "IdentityFile /dev/null"))
    assert "board refused the login; check the user's name" in command("deploy", program, "--host", "board", code=3)
    config.write_text(good)
    other = subprocess.run(["cat", tmp_path / "known_hosts"], capture_output=True, text=True).stdout
    (tmp_path / "known_hosts").write_text(other.replace("AAAAC3NzaC1lZDI1NTE5AAAAI", "AAAAC3NzaC1lZDI1NTE5AAAAA"))
    assert "the host key of board is not the known one" in command("deploy", program, "--host", "board", code=3)


def test_a_silent_machine(tmp_path: Path) -> None:
    """A machine that accepts the connection and never answers is given up."""
    import socket

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        started = time.monotonic()
        with (
            pytest.raises(SshError, match="cannot be reached"),
            connect(f"me@127.0.0.1:{server.getsockname()[1]}", seconds=1),
        ):
            pass
        assert time.monotonic() - started < 20


@pytest.mark.parametrize(
    "text", ["", "-oProxyCommand=x", "a b", "x@-o", "host;reboot", "a@b/c/d", "ssh://a:b@c", "h:port", "$(x)", "a@b?c"]
)
def test_what_names_no_machine(text: str) -> None:
    with pytest.raises(SshError, match="names no machine; write USER@HOST"):
        ssh_destination(text)


def test_names_are_no_commands(empty: FakeBoard, program: Path) -> None:
    """Folder names with characters that shells interpret arrive unchanged."""
    for folder in ("~/$(touch injected) b;touch injected;'\"", f"{empty.home}/`touch injected`"):
        with connect("board") as connection:
            remote = deploy.Remote(connection, folder)
            files = pack_runner(), deploy.pack_program(celosia.Program.load(program))
            remote.install(remote.status(*files), *files)
            x = {"input_1": np.zeros((1, 3, 8, 8), np.float32)}
            assert remote.run(*files, x, "functional", None, {}).outputs
        inside = empty.home / folder.removeprefix("~/").removeprefix(f"{empty.home}/")
        assert sorted(path.name for path in inside.iterdir()) == sorted(file.name for file in files)
    assert not list(empty.home.rglob("injected"))


@pytest.mark.parametrize("after", [0, 100, 5000, 20_000])
def test_a_lost_connection_leaves_nothing(empty: FakeBoard, program: Path, after: int) -> None:
    files = pack_runner(), deploy.pack_program(celosia.Program.load(program))
    with connect("board") as connection:
        remote = deploy.Remote(connection)
        board = remote.status(*files)
        empty.cut_after = after
        with pytest.raises(SshError, match="connection to board"):
            remote.install(board, *files)
    empty.processes[-1].wait(20)
    for path in (empty.home / "celosia").glob("*"):
        assert path.name == files[0].name and path.read_bytes() == files[0].data
    assert not list((empty.home / "celosia").glob(".*"))


def test_a_full_disk_leaves_nothing(empty: FakeBoard, program: Path) -> None:
    files = (pack_runner(),)
    with connect("board") as connection:
        remote = deploy.Remote(connection)
        board = remote.status(*files)
        empty.limits = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        with pytest.raises(SshError, match=r"~/celosia.*File too large"):
            remote.install(board, *files)
        assert files_of(empty) == []
        small = SimpleNamespace(missing=(files[0].name,), free=10)
        with pytest.raises(SshError, match=r"board.*10 bytes.*\d+"):
            remote.install(small, *files)  # type: ignore[arg-type]
        empty.limits = None
        (empty.home / "celosia").rmdir()
        (empty.home / "celosia").write_text("a file")
        with pytest.raises(SshError, match="File exists"):
            remote.install(board, *files)


def test_damage_on_the_way_is_noticed(empty: FakeBoard) -> None:
    good = deploy.File("name", b"some bytes")
    with connect("board") as connection:
        remote = deploy.Remote(connection)
        with pytest.raises(SshError, match="name arrived damaged"):
            remote._run_bootstrap("install", (good,), [b"Some bytes"])
    assert files_of(empty) == []


def test_boards_that_lack_something(empty: FakeBoard, program: Path) -> None:
    loaded = celosia.Program.load(program)
    board = deploy.RemoteBoard("armv7l", (3, 8, 2), None, None, "absent", 10**9, ())
    with pytest.raises(SshError, match=r"3\.8\.2; 3\.10 .*numpy.*pynq") as result:
        deploy.require_board(board, loaded, "board", "it")
    assert f"its processor is armv7l, and the Program's kernels are for {MACHINE}" in str(result.value)
    with pytest.raises(SshError, match=r"mips.*armv7l, aarch64"):
        deploy.target_of(deploy.RemoteBoard("mips", (3, 10), "1", "1", "", 1, ()))
    empty.python.unlink()
    (empty.home / ".profile").write_text("PATH=/nothing\n")
    with connect("board") as connection, pytest.raises(SshError, match=r"board.*python3"):
        deploy.Remote(connection).status()


def test_sudo(empty: FakeBoard, tmp_path: Path) -> None:
    """sudo is asked not to prompt, and its refusal is reported."""
    with connect("board") as connection:
        remote = deploy.Remote(connection, sudo=True)
        empty.wrap = lambda text: text.replace("sudo -n ", "")
        remote.status()
        assert empty.commands[-1].startswith("sudo -n bash -lc ")
        empty.wrap = lambda text: "echo 'sudo: a password is required' >&2; exit 1"
        with pytest.raises(SshError, match=r"sudo on board.*root"):
            remote.status()


@pytest.mark.parametrize(
    ("signal", "words"),
    [("BUS", "nothing answers at the accelerator's address on board; load its bitstream"), ("KILL", "memory is short"),
     ("SEGV", r"board gave no answer \(exit code 139\): .*Segmentation fault")],
)  # fmt: skip
def test_a_program_that_is_killed_there(empty: FakeBoard, signal: str, words: str) -> None:
    """A read of missing registers kills the process by SIGBUS, which is reported."""
    empty.python.write_text(f"#!/bin/sh\nkill -{signal} $$\n")
    with connect("board") as connection, pytest.raises(SshError, match=words):
        deploy.Remote(connection).status()


def _interrupt_when_waiting(board: FakeBoard, before: int) -> None:
    """Send Ctrl-C half a second after `board` has more processes than `before`. On a loaded machine that takes long."""
    while len(board.processes) == before:
        time.sleep(0.05)
    time.sleep(0.5)
    os.kill(os.getpid(), 2)


def test_interrupted_it_stops_there(empty: FakeBoard, program: Path) -> None:
    """The process on the board ends when nobody waits for its result."""
    with connect("board") as connection:
        remote = deploy.Remote(connection)
        empty.wrap = lambda text: f"{empty.python} -c 'import sys; sys.stdin.read()'"
        threading.Thread(target=_interrupt_when_waiting, args=(empty, len(empty.processes)), daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            remote.status()
        assert empty.processes[-1].wait(20) == 0


# The runner ----------------------------------------------------------------------------------------------------


def _head(program: Path) -> dict[str, Any]:
    digest = hashlib.sha256(program.read_bytes()).hexdigest()
    return {"program": str(program), "digest": digest, "threads": None, "options": {}}


def _library(data: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return archive.read("kernels.so")


def test_a_board_runs_the_program_that_was_sent_and_no_other(empty: FakeBoard, program: Path) -> None:
    """The board runs the Program that was sent, even if the file has changed since; untrusted code is never sent."""
    forged = celosia.Program.load(program)
    own, forged.library = forged.library, b"\x7fELF of somebody else"
    files = pack_runner(), deploy.pack_program(forged)
    assert _library(files[1].data) == own
    with connect("board") as connection:
        remote = deploy.Remote(connection)
        remote.install(remote.status(*files), *files)
        there = empty.home / "celosia" / files[1].name
        there.write_bytes(there.read_bytes() + b" ")
        with pytest.raises(ProgramError, match="it is not the file that was meant"):
            remote.run(*files, {"input_1": np.zeros((1, 3, 8, 8), np.float32)}, "functional", None, {})


def test_the_runner_is_complete_and_always_the_same(program: Path, tmp_path: Path) -> None:
    """The runner works from its zip with only numpy, and its bytes are reproducible."""
    assert pack_runner() == pack_runner()
    (tmp_path / "runner.pyz").write_bytes(pack_runner().data)
    site = FakeBoard(tmp_path, None)
    x = np.random.default_rng(1).normal(size=(1, 3, 8, 8)).astype(np.float32)
    request = pack(_head(program) | {"device": "functional"}, {"input_1": x})
    child = subprocess.Popen([site.python, tmp_path / "runner.pyz"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin and child.stdout
    child.stdin.write(request)
    child.stdin.flush()
    deploy.skip_to_mark(child.stdout)
    result = parse_result(child.stdout)
    child.communicate()
    expected = celosia.Runtime(celosia.compile(quantised(), "tiny")).run({"input_1": x})
    assert {n: a.tobytes() for n, a in result.outputs.items()} == {n: a.tobytes() for n, a in expected.outputs.items()}


SLOW = """
# A run that goes on until its limit is taken away.
from celosia.hw.spec.config import PRESETS
from celosia.hw.spec.regs import CONTROL_ABORT, CONTROL_START, MAGIC, REGISTERS, STATUS_BUSY
from celosia.hw.sources import sources_identity
import numpy as np
values = {REGISTERS["magic"].offset: MAGIC, REGISTERS["identity"].offset: PRESETS["tiny"].identity}
values[REGISTERS["sources"].offset] = sources_identity()
CONTROL, STATUS, RUNS = (REGISTERS[name].offset for name in ("control", "status", "runs"))

def say(what):
    with open(LOG, "a") as log:
        log.write(what + " ")

class MMIO:
    def __init__(self, address, length): pass
    def read(self, offset):
        return values.get(offset, 0)
    def write(self, offset, value):
        if offset == CONTROL and value & CONTROL_START:
            values[STATUS] = STATUS_BUSY
            values[RUNS] = 1
            say("started")
        elif offset == CONTROL and value & CONTROL_ABORT:
            values[STATUS] = 0
            say("stopped")
        else:
            values[offset] = value

class Buffer(np.ndarray):
    physical_address = 0
    def flush(self): pass
    def invalidate(self): pass
    def freebuffer(self): say("freed")

def allocate(shape, dtype, cacheable):
    return np.zeros(shape, dtype).view(Buffer)
"""


def test_a_run_that_nobody_waits_for_is_stopped(program: Path, tmp_path: Path) -> None:
    """An abandoned run stops before its memory is freed, since the accelerator would still write there."""
    (tmp_path / "runner.pyz").write_bytes(pack_runner().data)
    site, log = FakeBoard(tmp_path, None), tmp_path / "log"
    (tmp_path / "site" / "pynq.py").write_text(f"LOG = {str(log)!r}\n{LOCKS}{SLOW}")
    head = _head(program) | {"device": "board", "options": {"base": 0}}
    command, environment = [site.python, tmp_path / "runner.pyz"], os.environ | {"HOME": str(tmp_path)}
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    assert child.stdin and child.stdout
    child.stdin.write(pack(head, {"input_1": np.zeros((1, 3, 8, 8), np.float32)}))
    child.stdin.flush()
    while not log.exists():
        assert child.poll() is None, child.stdout.read()
        time.sleep(0.01)
    child.stdin.close()
    assert child.wait(20) == 130
    assert log.read_text().split() == ["started", "stopped", "freed"]
    assert not child.stdout.read().strip(b"\n"), "an answer, not only signs of life"


def test_requests_and_answers() -> None:
    arrays: dict[str, Any] = {"a": np.arange(6).reshape(2, 3), "s": [np.float32([1]), np.float32([])], "o": None}
    data = pack({"what": 1}, arrays)
    head, result = unpack(io.BytesIO(data))
    assert head == {"what": 1} and result["o"] is None
    assert np.array_equal(result["a"], arrays["a"]) and [each.size for each in result["s"]] == [1, 0]
    for end in range(len(data)):
        with pytest.raises((EOFError, ValueError)):
            unpack(io.BytesIO(data[:end]))
    for kind, error in (("DeviceError", DeviceError), ("InputError", InputError), ("ZeroDivisionError", RuntimeError)):
        with pytest.raises(error, match="why"):
            parse_result(io.BytesIO(json.dumps({"kind": kind, "error": "why"}).encode() + b"\n"))


def test_the_runner_keeps_to_an_old_python(tmp_path: Path) -> None:
    """The runner needs only Python 3.10, checked by ruff and vermin; its version check runs on 3.6."""

    def complaints(*names: str, version: str = "3.10") -> str:
        message = ""
        oldest = f"py{version.replace('.', '')}".replace("py36", "py37")  # of ruff
        for tool in (
            ["ruff", "check", "--isolated", "--no-cache", "--target-version", oldest, "--select", "E9"],
            [
                "vermin",
                f"-t={version}-",
                "--no-tips",
                "--violations",
                "--exclude",
                "tomllib",
            ],  # only a Config in TOML is
        ):
            program = Path(sys.executable).with_name(tool[0])
            done = subprocess.run([program, *tool[1:], *names], capture_output=True, text=True)
            message += done.stdout + done.stderr if done.returncode else ""
        return message

    assert not complaints(*map(str, board_modules().values()))
    assert not complaints(bootstrap.__file__, version="3.6")
    (tmp_path / "new.py").write_text("from enum import StrEnum\nx = {}[*()]\n")
    message = complaints(str(tmp_path / "new.py"))
    assert "StrEnum" in message and "index" in message
