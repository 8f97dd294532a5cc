"""Deploy Programs to boards and run them there, for `celosia deploy` and `celosia run --device ssh://...`."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread
from typing import IO, Any

import numpy as np

from celosia.compiler.program import Program, ProgramError, TensorInfo
from celosia.compiler.program.dtypes import numpy_dtype
from celosia.compiler.program.host.op import clip_sentence
from celosia.compiler.program.safe_files import reading
from celosia.driver.remote import bootstrap
from celosia.driver.remote.bootstrap import MARK
from celosia.driver.remote.channel import CommandChannel, Silence
from celosia.driver.remote.runner import File, pack_runner
from celosia.driver.remote.serve import ERRORS, AnswerError, check_json, pack, parse_result, raise_error, unpack
from celosia.driver.remote.ssh import Connection, SshError, connect
from celosia.driver.run.run_report import build_report
from celosia.driver.run.run_result import Result
from celosia.driver.run.stream import Futures, Results
from celosia.hw.manifest import Manifest
from celosia.plain import abbreviate, printable

FAILURES: tuple[type[Exception], ...] = (RuntimeError, *ERRORS.values())
"""Errors of a run on the board, which concern one sample of a stream."""
FOLDER = "~/celosia"
"""Default folder of files on the board."""
BANNER_BYTES = 1 << 20
"""Longest text that a login shell may print."""
TEXTS = ("machine", "numpy", "pynq", "pynq_error")
"""Facts of a board that are free text, to be made printable."""
PYTHON = (3, 10)
"""The oldest Python that the runner runs on; PYNQ 3.0 has it."""


@dataclass(frozen=True)
class RemoteBoard:
    """Facts that a board reports.

    machine: its processor, as `platform.machine()`. python, numpy, pynq: versions; None where a package is missing.
    pynq_error: why pynq is missing. free: bytes of its disk. missing: names of the requested files not there yet.
    """

    machine: str
    python: tuple[int, ...]
    numpy: str | None
    pynq: str | None
    pynq_error: str
    free: int
    missing: tuple[str, ...]


def pack_program(program: Program) -> File:
    """Return the Program as a file for the board, named by its contents.

    Its machine code is compiled here from its loops where the Program is not trusted or has none. ProgramError,
    LinkError.
    """
    is_complete = not program.machine or not program.kernels or (program.trusted and program.library)
    data = (program if is_complete else relink_kernels(program)).to_bytes()
    return File(f"program-{hashlib.sha256(data).hexdigest()[:12]}.celosia", data)


def relink_kernels(program: Program) -> Program:
    """Return the Program with its kernels compiled again here, for the board's processor. ProgramError, LinkError."""
    from celosia.compiler.cpu.llvm import from_loops, link_library
    from celosia.compiler.target import compiling_for, target_for

    target = target_for(program.machine)
    if target is None:
        raise ProgramError(f"nothing here compiles for {program.machine!r} processors; compile the model with --target")
    with compiling_for(target), reading(program.name, ProgramError, "has kernels that cannot be compiled of loops"):
        kernels = [from_loops(kernel, program.trusted) for kernel in program.kernels]
    library = link_library(kernels, target)
    kernels = [replace(kernel, code=b"") for kernel in kernels]
    return replace(program, kernels=kernels, library=library, trusted=True)


class Remote:
    """A board over ssh.

    folder: where files go on the board. sudo: run commands as root there, which PYNQ needs.
    """

    def __init__(self, connection: Connection, folder: str = FOLDER, sudo: bool = False) -> None:
        self.connection, self.folder, self.sudo = connection, folder, sudo

    def status(self, *files: File) -> RemoteBoard:
        """Return facts of the board, and which of `files` it lacks. SshError where it has no Python that can answer."""
        status = self._run_bootstrap("status", files)
        fields = {field.name: status.get(field.name) for field in dataclasses.fields(RemoteBoard)}
        with self.raise_ssh_errors():
            return check_board_facts(fields | {"pynq_error": status.get("pynq_error", "")})

    def install(self, board: RemoteBoard, *files: File) -> int:
        """Copy those of `files` to the board that it lacks, each completely or not at all. Return the bytes sent.

        board: the answer of `status` for these files. SshError.
        """
        missing = tuple(file for file in files if file.name in board.missing)
        size = sum(len(file.data) for file in missing)
        if size > board.free:
            raise SshError(
                f"{self.connection.name} has {board.free} bytes left on its disk, and {size} are needed; make room in "
                f"{self.folder} there"
            )
        if missing:
            self._run_bootstrap("install", missing, [file.data for file in missing])
        return size

    def run(
        self, runner: File, program: File, inputs: Mapping[str, Any], device: str, threads: int | None,
        options: Mapping[str, Any],
    ) -> Result:  # fmt: skip
        """Run an installed Program on the board with the installed `runner`. Raises the board's errors; SshError."""
        head = {"program": f"{self.folder}/{program.name}", "digest": program.to_dict()["sha256"], "device": device,
                "threads": threads, "options": dict(options)}  # fmt: skip
        result: Result = self._exchange(
            self._runner_command(runner), [pack(head, inputs)], lambda out: parse_result(out, SshError)
        )
        return result

    def run_each(
        self, runner: File, program: File, samples: Sequence[Mapping[str, Any]], device: str, threads: int | None,
        options: Mapping[str, Any],
    ) -> Futures:  # fmt: skip
        """Yield the runs of `samples` by an installed Program, in order.

        Raises SshError, and the board's errors where no run can begin.
        """
        head = {"program": f"{self.folder}/{program.name}", "digest": program.to_dict()["sha256"], "device": device,
                "threads": threads, "options": dict(options), "samples": len(samples)}  # fmt: skip
        channel = self._start_in_login_shell(self._runner_command(runner))
        writer = Thread(target=_write_request, args=(channel, head, samples), daemon=True)
        try:
            with self.raise_ssh_errors(channel):
                writer.start()
                skip_to_mark(channel)
                _read_answer(channel)
                for _ in samples:
                    yield _read_run(channel)
        finally:
            channel.kill()
            writer.join()
            channel.close()

    def flash(self, runner: File, bit: File, manifest: Manifest) -> float:
        """Load an installed bitstream; return the accelerator's clock in MHz. Raises DeviceError, SshError."""
        head = {"bitstream": f"{self.folder}/{bit.name}", "manifest": dataclasses.asdict(manifest)}
        answer = self._exchange(self._runner_command(runner), [pack(head, {})], _read_answer)
        with self.raise_ssh_errors():
            clock: float = check_json(float, answer.get("clock_mhz"), "clock_mhz")
            if not 0 < clock < math.inf:
                raise AnswerError(f"clock_mhz is {clock}")
            return clock

    def start(self, runner: File) -> CommandChannel:
        """Start the installed runner, which waits for its request."""
        return self._start_in_login_shell(self._runner_command(runner))

    def _runner_command(self, runner: File) -> str:
        """Return the shell command that starts the installed runner."""
        return f"python3 {_quote_path(f'{self.folder}/{runner.name}')}"

    def _run_bootstrap(self, action: str, files: tuple[File, ...], data: list[bytes] | None = None) -> dict[str, Any]:
        """Run the bootstrap program on the board, and return its answer. SshError.

        action: "status" or "install". data: contents of `files`, to install them.
        """
        text = Path(bootstrap.__file__).read_bytes()
        request = {"what": action, "folder": self.folder, "files": [file.to_dict() for file in files]}
        script = f"import sys; exec(sys.stdin.buffer.read({len(text)}))"
        command = f"python3 -c {shlex.quote(script)}"
        answer: dict[str, Any] = self._exchange(
            command, [text, json.dumps(request).encode() + b"\n", *(data or [])], lambda out: unpack(out)[0]
        )
        if "error" in answer:
            reason = clip_sentence(printable(str(answer["error"])))
            raise SshError(f"{self.connection.name}: {self.folder} cannot be written: {reason}")
        return answer

    def _start_in_login_shell(self, command: str) -> CommandChannel:
        """Start `command` in bash as a login shell, in which PYNQ's images set up their Python.

        Their set-up uses `source`, which Ubuntu's sh does not know. bash stays the parent of the command (`exit $?`),
        and so reports which signal ended it.
        """
        shell = f"{'sudo -n ' if self.sudo else ''}bash -lc {shlex.quote(f'{command}; exit $?')}"
        return self.connection.start(shell)

    def _exchange(self, command: str, parts: list[bytes], read: Callable[[CommandChannel], Any]) -> Any:
        """Start `command` on the board, send it `parts`, and return its answer, as `read` parses it. SshError."""
        channel = self._start_in_login_shell(command)
        try:
            with self.raise_ssh_errors(channel):
                for part in parts:
                    channel.write(part)
                skip_to_mark(channel)
                return read(channel)
        finally:  # also after Ctrl-C: the command ends at the end of its input
            channel.close()

    @contextmanager
    def raise_ssh_errors(self, channel: CommandChannel | None = None) -> Iterator[None]:
        """Convert errors of the connection, and of invalid or missing answers, to SshError. Other errors pass."""
        try:
            yield
        except AnswerError as error:
            raise self.connection.unclear_error(error) from None
        except Silence:
            assert channel is not None
            raise self.connection.silence_error(channel) from None
        except (OSError, EOFError):
            assert channel is not None
            raise self.connection.ended_error(channel) from None


def _write_request(channel: CommandChannel, head: dict[str, Any], samples: Sequence[Mapping[str, Any]]) -> None:
    """Write the request, and a message for each sample, in a thread beside the one that reads the answers.

    Stops without an error where the other side is gone: the reader reports that.
    """
    with suppress(OSError, ValueError):
        channel.write(pack(head, {}), patient=True)
        for sample in samples:
            channel.write(pack({}, sample), patient=True)


def _read_run(channel: CommandChannel) -> Future[Result]:
    """Read the answer of the next run of a stream. Return a future, which fails if the run has. EOFError, AnswerError,
    Silence."""
    future: Future[Result] = Future()
    try:
        future.set_result(parse_result(channel, SshError))
    except FAILURES as error:
        future.set_exception(error)
    return future


def _read_answer(channel: CommandChannel) -> dict[str, Any]:
    """Read the board's answer without arrays. Raises the board's error; EOFError, AnswerError, Silence."""
    head, _ = unpack(channel)
    raise_error(head, SshError)
    return head


def check_board_facts(fields: Any) -> RemoteBoard:
    """Check and return the facts that a board reports. AnswerError."""
    board: RemoteBoard = check_json(RemoteBoard, fields, "the board")
    facts = {name: getattr(board, name) for name in TEXTS}
    texts: dict[str, Any] = {name: clip_sentence(printable(text)) for name, text in facts.items() if text is not None}
    if board.free < 0 or len(board.python) != 3:
        raise AnswerError(f"it has {board.free} bytes of disk, and Python {abbreviate(board.python)}")
    return replace(board, **texts)


def _quote_path(path: str) -> str:
    """Quote `path` for a shell; a leading ~/ stays the home folder."""
    return f'"$HOME"/{shlex.quote(path[2:])}' if path.startswith("~/") else shlex.quote(path)


def skip_to_mark(stream: IO[bytes] | CommandChannel) -> None:
    """Read up to MARK, and drop what a login shell prints before it.

    EOFError where there is no mark, AnswerError after BANNER_BYTES.
    """
    seen = b""
    for _ in range(BANNER_BYTES):
        byte = stream.read(1)
        if not byte:
            raise EOFError("no answer")
        seen = (seen + byte)[-len(MARK) :]
        if seen == MARK:
            return
    raise AnswerError(f"its login shell prints more than {BANNER_BYTES} bytes")


def unmet_requirements(board: RemoteBoard, program: Program, device: str) -> list[str]:
    """Return a sentence for each requirement of `program` on `device` that the board does not meet."""
    problems = []
    if board.python < PYTHON:
        version = ".".join(map(str, board.python))
        problems.append(f"its Python is {version}; {PYTHON[0]}.{PYTHON[1]} or newer is needed (PYNQ 3.0 has it)")
    if board.numpy is None:
        problems.append("it has no numpy; pip3 install numpy")
    if device == "board" and board.pynq is None:
        problems.append(f"it has no pynq ({board.pynq_error}); use a PYNQ image, or pip3 install pynq")
    if program.kernels and program.machine != board.machine:
        made_for = program.machine or "this machine"
        problems.append(
            f"its processor is {board.machine}, and the Program's kernels are for {made_for}; compile it with "
            "--target, or give --rebuild-kernels"
        )
    return problems


def target_of(board: RemoteBoard) -> str:
    """Return the name of the compiler's target with the board's processor. SshError where there is none."""
    from celosia.compiler.target import TARGETS

    for name, target in TARGETS.items():
        if target.machine == board.machine:
            return name
    machines = ", ".join(target.machine for target in TARGETS.values())
    raise SshError(f"its processor is {board.machine}; Programs are compiled for {machines}")


def require_board(board: RemoteBoard, program: Program, device: str, name: str) -> None:
    """Raise ProgramError or SshError where the board cannot run `program`."""
    problems = unmet_requirements(board, program, device)
    if problems:
        raise (ProgramError if "compile it" in problems[0] else SshError)(
            f"{name} cannot run it: {'; '.join(problems)}"
        )


def deploy(program: Program, host: str, sudo: bool = False) -> RemoteBoard:
    """Copy a Program and the runner to a board over ssh.

    Args:
        program: Program to copy. It must be compiled for the board's processor.
        host: Board as ssh knows it, USER@BOARD.
        sudo: Run as root on the board through sudo, which must not ask for a password.

    Returns:
        Facts of the board: machine, python, numpy, pynq, pynq_error, free (bytes of its disk) and missing files.

    Raises:
        SshError: The board cannot be reached, or lacks something to run the Program.
        ProgramError: The Program must be compiled again for this board.
        LinkError: The machine code for the board cannot be linked.

    Examples:
        >>> import celosia
        >>> celosia.deploy(celosia.Program.load("model.celosia"), "root@pynq").pynq  # doctest: +SKIP
        '3.0.1'
    """
    with connect(host) as connection:
        remote = Remote(connection, sudo=sudo)
        files = pack_runner(), pack_program(program)
        board = remote.status(*files)
        remote.install(board, *files)
        require_board(board, program, "board", host)
        return board


def run(
    remote: Remote,
    program: Program,
    inputs: Mapping[str, Any],
    device: str = "board",
    threads: int | None = None,
    **options: Any,
) -> Result:
    """Run `program` on a board, after copying it and the runner there if they are missing.

    The report is that of a run here, with the seconds of the transfer and the name of the board. Raises ProgramError,
    SshError, and the board's InputError, DeviceError and HostError.
    """
    started = time.perf_counter()
    files = pack_runner(), pack_program(program)
    board = remote.status(*files)
    require_board(board, program, device, remote.connection.name)
    remote.install(board, *files)
    result = remote.run(*files, inputs, device, threads, options)
    with remote.raise_ssh_errors():
        result = check_result(result, program, device, inputs)
    seconds = result.report["seconds"]
    seconds["transfer"] = time.perf_counter() - started - seconds["run"] - seconds["build"]
    result.report["host"] = remote.connection.name
    return result


def run_each(
    remote: Remote, program: Program, samples: Sequence[Mapping[str, Any]], device: str = "board",
    threads: int | None = None, **options: Any,
) -> Results:  # fmt: skip
    """Return an iterator over the results of `samples` (inputs by name), in order.

    The board's CPU works for one sample while its accelerator works for another. See `run`, and Results for errors of a
    sample.
    """
    files = pack_runner(), pack_program(program)
    board = remote.status(*files)
    require_board(board, program, device, remote.connection.name)
    remote.install(board, *files)
    runs = remote.run_each(*files, samples, device, threads, options)
    return Results(_report_each(remote, runs, program, device, samples), [])


def _report_each(
    remote: Remote, runs: Futures, program: Program, device: str, samples: Sequence[Mapping[str, Any]]
) -> Futures:
    """Yield the runs of a stream, each result checked and with its full report."""
    with closing(runs):
        for run, sample in zip(runs, samples):
            if run.exception() is None:
                result, run = run.result(), Future()
                with remote.raise_ssh_errors():
                    run.set_result(check_result(result, program, device, sample))
            yield run


def check_result(result: Result, program: Program, device: str, inputs: Mapping[str, Any]) -> Result:
    """Check a board's result, and return it with its full report, built here from `program` and the board's counters.

    AnswerError where tensors or counters are not those of the Program.
    """
    known_tensors = {tensor.name: tensor for tensor in (*program.outputs, *program.kept)}
    expected_names = {tensor.name for tensor in program.outputs}
    if result.outputs.keys() != expected_names or not expected_names <= result.tensors.keys() <= known_tensors.keys():
        raise AnswerError(f"its tensors are {abbreviate([*result.tensors])}, not {abbreviate([*known_tensors])}")
    for name, value in result.tensors.items():
        tensor, static = known_tensors[name], program.tensors.get(name)
        if tensor.kind == "tensor" and not _fits_tensor(tensor, static, value, bool(program.batched)):
            actual = f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__
            raise AnswerError(f"tensor {abbreviate(name)} is {actual}, not {program.shape_text(tensor)}")
    parts = 1
    if program.batched:
        parts = max(1, -(-np.shape(inputs[program.batched[0]])[0] // program.batch))
    launches = program.launches * parts
    if len(result.counters) != len(launches):
        raise AnswerError(f"it has the counters of {len(result.counters)} launches, not of {len(launches)}")
    for counters, launch in zip(result.counters, launches):
        counters.check(launch.count)
    board_report = result.report
    seconds, memory = board_report["seconds"], board_report["memory_model"]
    report = build_report(program, result.counters, seconds, device, memory, parts)
    return Result(result.outputs, result.counters, lambda: report, result.tensors)


def _fits_tensor(tensor: TensorInfo, static: TensorInfo | None, value: Any, batched: bool) -> bool:
    """Return whether a value may be a run's result for `tensor`.

    static: the tensor with its compiled sizes, None where they are open. batched: the first axis may differ.
    """
    if not isinstance(value, np.ndarray):
        return False
    is_text = tensor.dtype == "object" and value.dtype.kind in "OU"
    first_axis = int(batched)
    has_shape = static is None or value.shape[first_axis:] == static.shape[first_axis:]
    return has_shape and (is_text or value.dtype == numpy_dtype(tensor.dtype))


def flash(remote: Remote, bit: Path, manifest: Manifest) -> float:
    """Copy the bitstream `bit` and its .hwh to a board, and load it there. Return the accelerator's clock in MHz.

    Raises DeviceError, SshError.
    """
    name = f"bitstream-{manifest.bit[:12]}"
    files = (
        pack_runner(),
        File(f"{name}.bit", bit.read_bytes()),
        File(f"{name}.hwh", bit.with_suffix(".hwh").read_bytes()),
    )
    board = remote.status(*files)
    if board.pynq is None:
        raise SshError(f"{remote.connection.name} has no pynq ({board.pynq_error}); use a PYNQ image")
    remote.install(board, *files)
    return remote.flash(files[0], files[1], manifest)
