"""A board's answer, however damaged, is accepted or refused with exit code 3, in bounded memory and time."""

from __future__ import annotations

import io
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from changed import change
from driver_models import quantised
from thorough import some

import celosia
from celosia.compiler.program import Program
from celosia.driver.cli.errors import RUN_FAILED, exit_code_and_message
from celosia.driver.remote import deploy, serve
from celosia.driver.remote.bootstrap import MARK
from celosia.driver.remote.channel import CommandChannel
from celosia.driver.remote.deploy import Remote
from celosia.driver.remote.remote_device import RemoteDevice
from celosia.driver.remote.runner import pack_runner
from celosia.driver.remote.ssh import Connection, SshError
from celosia.hw.manifest import Manifest
from celosia.hw.spec.config import PRESETS
from celosia.hw.spec.regs import COUNTERS
from celosia.sim.device import Counters, DeviceError, Event

Asked = Callable[[Connection], object]


class Said:
    """The pipes of a command that has printed `answer` and ended."""

    seconds = 1.0

    def __init__(self, answer: bytes) -> None:
        self._answer = io.BytesIO(answer)
        self.read, self.readline = self._answer.read, self._answer.readline

    def write(self, data: bytes, patient: bool = False) -> None:
        pass

    def exit_code(self) -> int:
        return 1

    def errors(self) -> str:
        return ""

    def kill(self) -> None:
        pass

    close = kill


class Board(Connection):
    """A connection that gives one of `answers` to each command."""

    def __init__(self, *answers: bytes) -> None:
        super().__init__("board", ["board"], ())
        self.answers = [*answers]

    def start(self, command: str) -> Any:
        return Said(self.answers.pop(0))


class Local(Connection):
    """A connection that runs `line` in a local shell in place of each command."""

    def __init__(self, line: str) -> None:
        super().__init__("board", ["board"], ())
        self.line = line

    def start(self, command: str) -> CommandChannel:
        channel = super().start(command)
        channel.seconds = 0.5
        return channel

    def _process_arguments(self, command: str) -> list[str]:
        return ["sh", "-c", self.line]


@pytest.fixture(scope="module")
def program() -> Program:
    return celosia.compile(quantised(), "tiny")


X = {"input_1": np.zeros((1, 3, 8, 8), np.float32)}
STATUS: dict[str, Any] = {"python": [3, 10, 1], "machine": "armv7l", "folder": "/home/xilinx/celosia", "missing": [],
          "free": 10**9, "numpy": "1.21", "pynq": None, "pynq_error": "absent"}  # fmt: skip


def line(head: Any) -> bytes:
    return json.dumps(head).encode() + b"\n"


def sound(program: Program) -> dict[str, tuple[Asked, dict[str, Any], bytes]]:
    """Return, by name, each request to a board with the line of a correct answer and the bytes after it."""
    result = celosia.Runtime(program, "timed").run(X)
    result.report["memory_model"] = "board"
    head, arrays = serve.pack_result(result).split(b"\n", 1)
    files = pack_runner(), deploy.File("program", b"")
    counters = {"cycles": 5, "values": dict.fromkeys(COUNTERS, 1), "events": [], "lost": 0}
    data = serve.pack({}, {"data": np.zeros(4, np.uint8)}).split(b"\n", 1)

    def run(connection: Connection) -> object:
        remote = Remote(connection)
        answer = remote.run(*files, X, "board", None, {})
        with remote.raise_ssh_errors():
            return repr(deploy.check_result(answer, program, "board", X))

    def opened(connection: Board) -> RemoteDevice:
        connection.answers[:] = [MARK + line(STATUS), connection.answers[0]]
        return RemoteDevice(Remote(connection), PRESETS["tiny"])

    def call(operation: Callable[[RemoteDevice], object]) -> Callable[[Any], object]:
        def asked(connection: Board) -> object:
            connection.answers[0] = MARK + line({"memory_model": "board"}) + connection.answers[0].removeprefix(MARK)
            return operation(opened(connection))

        return asked

    return {
        "status": (lambda connection: repr(Remote(connection).status()), STATUS, b""),
        "run": (run, json.loads(head), arrays),
        "flash": (lambda connection: Remote(connection).flash(files[0], files[1], MANIFEST),
                  {"clock_mhz": 100.0}, b""),
        "open": (lambda connection: opened(connection).memory_model, {"memory_model": "board"}, b""),
        "device run": (call(lambda device: device.run(0, 8, 100)), counters, b""),
        "device read": (call(lambda device: device.read(0, 4).tolist()), json.loads(data[0]), data[1]),
    }  # fmt: skip


MANIFEST = Manifest("pynq-z2", "part", {}, "", "", 100, 0x43C00000, "", "", "", "0" * 64, "0" * 64)


def is_refused(asked: Asked, answer: bytes, words: str = "") -> None:
    with pytest.raises((SshError, DeviceError)) as result:
        asked(Board(answer))
    code, message = exit_code_and_message(result.value)
    assert code == RUN_FAILED and len(message) < 1500 and message.isprintable() and words in message, message


DEEP = b"[" * 100_000 + b"]" * 100_000
WRONG = {
    "nothing": b"", "no line": b"abc", "no JSON": b"abc\n", "a list": b"[]\n", "a number": b"5\n", "null": b"null\n",
    "deep": DEEP + b"\n", "many values": b"[" + b"1," * 3_000_000 + b"1]\n",
    "half a character": b'{"error": "\\ud800"}\n',
    "an error of a number": b'{"error": 5, "kind": "DeviceError"}\n', "an error of no kind": b'{"error": "why"}\n',
    "an error of a list": b'{"error": "why", "kind": ["DeviceError"]}\n', "sizes of a list": b'{"sizes": [1]}\n',
    "a huge size": b'{"sizes": {"a": 1000000000000000000}}\n', "a size below zero": b'{"sizes": {"a": -1}}\n',
    "a size of text": b'{"sizes": {"a": "1"}}\n',
    "sizes in sizes": b'{"sizes": {"a": ' + b"[" * 90 + b"]" * 90 + b"}}\n",
    "no array": b'{"sizes": {"a": 3}}\nabc', "an array of nothing": b'{"sizes": {"a": 2}}\n{}',
    "not UTF-8": b'{"error": "\xff", "kind": "DeviceError"}\n', "a long number": b'{"free": 1' + b"0" * 5000 + b"}\n",
}  # fmt: skip


def test_answers_that_are_none(program: Program) -> None:
    for name, (asked, head, behind) in sound(program).items():
        assert asked(Board(MARK + line(head) + behind)) is not None, name
        for answer in WRONG.values():
            is_refused(asked, MARK + answer)
        for field in head:
            if field not in ("pynq_error", "pynq", "numpy", "folder", "sizes"):
                is_refused(asked, MARK + line({key: value for key, value in head.items() if key != field}) + behind)


@pytest.mark.parametrize("seed", some(range(120), range(1)))
def test_answers_changed_at_random(seed: int, program: Program) -> None:
    """Random changes of values in the line and of any bytes give a result or a short printable message."""
    rng = random.Random(seed)
    for asked, head, behind in sound(program).values():
        for _ in range(14):
            changed = json.loads(json.dumps(head))
            for _ in range(rng.choice((0, 1, 1, 3))):
                change(changed, rng)
            answer = bytearray(MARK + line(changed) + behind)
            for _ in range(rng.choice((0, 0, 1, 5))):
                answer[rng.randrange(len(answer))] = rng.randrange(256)
            try:
                asked(Board(bytes(answer[: rng.choice((len(answer), rng.randrange(len(answer)) + 1))])))
            except Exception as error:
                code, message = exit_code_and_message(error)
                assert code in (1, RUN_FAILED) and message.isprintable() and len(message) < 1500, (
                    seed,
                    error,
                    bytes(answer),
                )


def test_a_board_that_talks_without_end() -> None:
    """Memory stays bounded if a board prints without end: in its banner, in one line, or to standard error."""
    for text in ("yes celosia", "printf '\\n<celosia>\\n'; yes celosia | tr -d '\\n'", "yes >&2"):
        started = time.monotonic()
        with pytest.raises(SshError, match=r"prints more than|has a line|nothing for"):
            Remote(Local(text)).status()
        assert time.monotonic() - started < 60


def test_a_silent_board_is_given_up() -> None:
    """A board that prints nothing, stops printing or reads nothing is given up."""
    file = deploy.File("name", bytes(1 << 20))
    for text in ("sleep 100", "printf '\\n<celosia>\\n'; sleep 100", "printf '\\n<celosia>\\n{'; sleep 100"):
        with pytest.raises(SshError, match=r"board.*0\.5 s; check its power") as result:
            Remote(Local(text)).status()
        assert exit_code_and_message(result.value)[0] == RUN_FAILED
    board = deploy.RemoteBoard("armv7l", (3, 10, 0), "1", None, "", 1 << 30, ("name",))
    with pytest.raises(SshError, match=r"board.*0\.5 s"):
        Remote(Local("sleep 100")).install(board, file)
    with pytest.raises(SshError, match=r"board.*0\.5 s"):
        RemoteDevice(Remote(Local("cat >/dev/null")), PRESETS["tiny"])


def test_a_board_at_work_is_waited_for() -> None:
    """Empty lines before and after the mark are signs of life, not answers."""
    status = line(STATUS).decode().strip()
    beats = "for n in 1 2 3 4 5 6; do sleep 0.2; echo; done"
    text = f"{beats}; printf '\\n<celosia>\\n'; {beats}; echo '{status}'; cat >/dev/null"
    assert Remote(Local(text)).status().machine == "armv7l"


def test_a_runner_says_that_it_works() -> None:
    """The runner prints an empty line every two seconds."""
    program = "from celosia.driver.remote.bootstrap import HeartbeatOutput; import sys, time\n"
    program += "out = HeartbeatOutput(sys.stdout.buffer); time.sleep(5); out.write(b'end\\n')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True)
    assert done.stdout == b"\n\nend\n"


def test_counters_that_cannot_be() -> None:
    """Impossible counters are refused, also those of a local accelerator."""
    values = dict.fromkeys(COUNTERS, 1)
    Counters(5, values, [Event("load", 0, 0, 5)]).check(1)
    Counters().check()
    event = {"unit": "load", "index": 0, "start": 0, "end": 5}
    for wrong in ({"unit": "x"}, {"index": -1}, {"index": 1}, {"start": 6}, {"start": -1}, {"end": 1 << 64}):
        with pytest.raises(DeviceError, match="an event that fits no instruction"):
            Counters(5, values, [Event(**event | wrong)]).check(1)  # type: ignore[arg-type]
    for cycles, counts in ((5, {}), (None, values), (-1, values), (5, {"x": 1}), (5, values | {"cycles": 1 << 64})):
        with pytest.raises(DeviceError, match="counters"):
            Counters(cycles, counts).check()


@pytest.fixture
def stale(tmp_path: Path) -> Iterator[Path]:
    part = tmp_path / "celosia" / ".abc.part"
    part.parent.mkdir()
    part.write_bytes(b"part of a file")
    yield part


HERE = f"PATH={Path(sys.executable).parent}:$PATH"


class InProcess(Connection):
    """This machine as a board, whose commands run in a shell."""

    def __init__(self) -> None:
        super().__init__("here", ["here"], ())

    def _process_arguments(self, command: str) -> list[str]:
        return ["sh", "-c", f"{HERE}; {command.replace('bash -lc', 'bash -c')}"]


def test_parts_of_a_killed_installation_go_at_the_next_start(stale: Path) -> None:
    import fcntl
    import os

    remote = Remote(InProcess(), str(stale.parent))
    handle = os.open(stale.parent, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)  # as an installation under way
    remote.status()
    assert stale.exists()
    os.close(handle)
    remote.status()
    assert not stale.exists()
    stale.write_bytes(b"again")
    file = deploy.File("name", b"bytes")
    remote.install(deploy.RemoteBoard("", (3, 10, 0), "", "", "", 1 << 30, ("name",)), file)
    assert [path.name for path in stale.parent.iterdir()] == ["name"]


def test_an_installation_that_is_killed_leaves_its_part_to_the_next(tmp_path: Path) -> None:
    folder = tmp_path / "celosia"
    remote = Remote(InProcess(), str(folder))
    text = Path(deploy.bootstrap.__file__).read_bytes()
    request = {"what": "install", "folder": str(folder), "files": [{"name": "a", "size": 100, "sha256": ""}]}
    script = f"import sys; exec(sys.stdin.buffer.read({len(text)}))"
    child = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    assert child.stdin is not None
    child.stdin.write(text + line(request) + b"some")
    child.stdin.flush()
    while not (folder.is_dir() and any(folder.iterdir())):
        time.sleep(0.01)
    remote.status()
    assert len([*folder.iterdir()]) == 1
    child.kill()
    child.wait()
    remote.status()
    assert not any(folder.iterdir())
