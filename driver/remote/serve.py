"""The runner's program on a board: answers one request from standard input on standard output.

The machine that asks reads the answers with functions of this file, too (`raise_error`, `parse_result`, ...).
Needs only numpy, and pynq for the device "board". A message is a line of JSON with the sizes of arrays by name, and
then the bytes of the arrays, as `program_file.array_bytes` writes them (`pack`, `unpack`). The first answer comes after
MARK. An error is answered by {kind, error}. The requests are:

    {program, digest, device, threads, options} and inputs      run a Program; answer: {report, counters}, outputs
    the same with {samples: N}, then N messages with inputs      {ready}, then an answer as above for each
    {bitstream, manifest}                                        load a bitstream; answer: {clock_mhz}
    {config, device, options}                                    open a device; calls follow (remote_device.py)
"""

from __future__ import annotations

import _thread
import dataclasses
import json
import math
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from typing import IO, Any, Protocol

import numpy as np

from celosia.compiler.program import InputError, Program, ProgramError
from celosia.compiler.program.host.op import HostError, clip_sentence, memory_bytes
from celosia.compiler.program.program_file import array_bytes, from_plain, load_array
from celosia.driver.board import flash
from celosia.driver.board.board_device import BoardDevice
from celosia.driver.remote.bootstrap import MARK
from celosia.driver.run.open_device import open_device
from celosia.driver.run.program_runtime import ProgramRuntime
from celosia.driver.run.run_result import Result, Tensors
from celosia.hw.manifest import Manifest
from celosia.hw.spec.config import Config
from celosia.plain import Sentence, abbreviate, from_json, printable
from celosia.sim.device import Counters, Device, DeviceError, TimeLimitError

ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (DeviceError, HostError, InputError, ProgramError, TimeLimitError)
}
"""Errors that this machine raises again when a board answers them, by name."""
END_SECONDS = 5
"""Seconds that a run has to end after the other side is gone."""
LINE_BYTES = 1 << 24
"""Longest line of JSON; the line of a run's answer has its report and counters."""
CHUNK_BYTES = 1 << 20
"""Most bytes that are read at once."""
INTERRUPTED = 130
"""Exit code of a process that Ctrl-C has ended, as shells report it: 128 and the number of SIGINT."""
TIMES = ("compile", "build", "run", "cpu")
"""Phases whose seconds a report has."""


class Readable(Protocol):
    """Source of messages: a file, or a CommandChannel."""

    def read(self, size: int, /) -> bytes:
        """Read at most `size` bytes; none at the end."""
        ...

    def readline(self, limit: int, /) -> bytes:
        """Read up to the next end of a line, at most `limit` bytes."""
        ...


class AnswerError(Sentence, ValueError):
    """An invalid message. Its text is one sentence that says why."""


def pack(head: dict[str, Any], arrays: Mapping[str, Any]) -> bytes:
    """Return a message: a line of JSON with `head` and the sizes of `arrays`, and then their bytes.

    An array may also be a list of arrays (an ONNX sequence), or None (an empty optional).
    """
    blobs: list[bytes] = []

    def pack_value(value: Any) -> Any:
        """Append the bytes of a value to `blobs`, and return their size; for a sequence, a list of sizes."""
        if isinstance(value, list):
            return [pack_value(entry) for entry in value]
        if value is None:
            return None
        blobs.append(array_bytes(np.asarray(value)))
        return len(blobs[-1])

    line = json.dumps(head | {"sizes": {name: pack_value(value) for name, value in arrays.items()}}).encode()
    return b"".join((line, b"\n", *blobs))


def unpack(stream: Readable) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read a message that `pack` built, after any number of empty lines. Return (head, arrays).

    Memory grows with the bytes that arrive, not with the sizes that the message claims. EOFError where it is cut short,
    AnswerError where it is invalid.
    """
    line = b"\n"
    while line == b"\n":
        line = stream.readline(LINE_BYTES)
    if not line.endswith(b"\n"):
        if len(line) == LINE_BYTES:
            raise AnswerError(f"it has a line of more than {LINE_BYTES} bytes")
        raise EOFError("the connection ended")
    left = memory_bytes()

    def read_value(size: Any) -> Any:
        """Read an array of `size` bytes; for a list of sizes, a list of arrays; for None, None."""
        nonlocal left
        if isinstance(size, list):
            return [read_value(entry) for entry in size]
        if size is None:
            return None
        left -= check_json(int, size, "a size")
        if size < 0 or left < 0:
            raise AnswerError(f"it has an array of {size} bytes")
        data = bytearray()
        while len(data) < size:
            piece = stream.read(min(size - len(data), CHUNK_BYTES))
            if not piece:
                raise EOFError("the connection ended")
            data += piece
        with raise_answer_errors("an array"):
            return load_array(bytes(data))

    with raise_answer_errors("its line"):
        head = as_table(from_json(line), "its line")
        sizes = as_table(head.pop("sizes", {}), "sizes")
    return head, {name: read_value(size) for name, size in sizes.items()}


@contextmanager
def raise_answer_errors(part_name: str) -> Iterator[None]:
    """Convert any error while a message is parsed to an AnswerError: libraries raise many classes.

    part_name: the part of the message, for the text.
    """
    try:
        yield
    except AnswerError:
        raise
    except Exception as error:
        raise AnswerError(f"{part_name} cannot be read: {clip_sentence(f'{type(error).__name__} {error}')}") from None


def check_json(kind: Any, value: Any, label: str) -> Any:
    """Return a JSON value as the type `kind`, see `from_plain`. AnswerError where it is none.

    label: name of the value, for the message.
    """
    with raise_answer_errors(label):
        return from_plain(kind, value, label)


def as_table(value: Any, label: str) -> dict[str, Any]:
    """Return `value` if it is a JSON object. AnswerError else."""
    if not isinstance(value, dict):
        raise AnswerError(f"{label} is {abbreviate(value)}")
    return value


def pack_result(result: Result) -> bytes:
    """Return a Result as a message, for `parse_result`."""
    counters = [dataclasses.asdict(entry) for entry in result.counters]
    head = {"report": result.report, "counters": counters, "outputs": list(result.outputs)}
    return pack(head, result.tensors | result.outputs)


def parse_counters(head: Any) -> Counters:
    """Return Counters from a message's head. AnswerError; DeviceError where their values are impossible."""
    fields = {field.name for field in dataclasses.fields(Counters)}
    if missing := fields - as_table(head, "counters").keys():
        raise AnswerError(f"counters have no {min(missing)}")
    counters: Counters = check_json(Counters, head, "counters")
    counters.check()
    return counters


def raise_error(head: dict[str, Any], kind: type[Exception]) -> None:
    """Raise the error that a message holds, if any: of class `kind` where ERRORS does not have it. AnswerError."""
    if "error" in head:
        name, text = (check_json(str, head.get(field), field) for field in ("kind", "error"))
        raise ERRORS.get(name, kind)(clip_sentence(printable(text)))


def parse_memory(head: dict[str, Any]) -> str | None:
    """Return the name of the memory model that a board's answer names: BoardDevice's.

    None from a functional simulator there, which counts no cycles. A board has no other: AnswerError.
    """
    memory = head.get("memory_model", "")
    if memory not in (None, BoardDevice.memory_model):
        raise AnswerError(f"memory_model is {abbreviate(memory)}")
    return None if memory is None else BoardDevice.memory_model


def parse_result(stream: Readable, kind: type[Exception] = RuntimeError) -> Result:
    """Read the Result that `pack_result` packed; its report has only the memory model and the seconds.

    Raises the board's error, a `kind` where this side does not know it; EOFError, AnswerError, DeviceError.
    """
    head, arrays = unpack(stream)
    raise_error(head, kind)
    report = as_table(head.get("report"), "report")
    memory = parse_memory(report)
    seconds = check_json(dict[str, float], report.get("seconds"), "seconds")
    counters = [parse_counters(entry) for entry in check_json(list[object], head.get("counters"), "counters")]
    names = check_json(list[str], head.get("outputs"), "outputs")
    if missing := [name for name in names if name not in arrays]:
        raise AnswerError(f"output {abbreviate(missing[0])} is missing")
    if seconds.keys() != set(TIMES) or not all(0 <= time < math.inf for time in seconds.values()):
        raise AnswerError(f"seconds are {abbreviate(seconds)}")
    known_parts = {"memory_model": memory, "seconds": seconds}
    return Result({name: arrays[name] for name in names}, counters, lambda: known_parts, Tensors(arrays))


def _end_process_with(stream: IO[bytes]) -> None:
    """End this process when `stream` ends, since the other side is gone then and nobody wants the result.

    It ends as by Ctrl-C, so that the accelerator stops before its memory is freed; at the latest after END_SECONDS.
    """

    def wait_for_end() -> None:
        """Interrupt this process at the end of the stream, and kill it if it goes on."""
        while stream.read(1):
            pass
        _thread.interrupt_main()
        time.sleep(END_SECONDS)
        os._exit(INTERRUPTED)

    threading.Thread(target=wait_for_end, daemon=True).start()


class Answers(Protocol):
    """Writer of whole messages."""

    def write(self, data: bytes, /) -> object:
        """Send a message at once."""


def serve(request: IO[bytes], answer: Answers) -> None:
    """Answer one request; see the top of this file for the kinds of requests."""
    try:
        head, inputs = unpack(request)
        if "config" in head:
            serve_device(head, request, answer)
            return
        if "samples" in head:
            with _open_runtime(head) as runtime:
                serve_samples(runtime, head["samples"], request, answer)
            return
        _end_process_with(request)
        if "bitstream" in head:
            data = pack({"clock_mhz": flash.load(head["bitstream"], Manifest(**head["manifest"]))}, {})
        else:
            with _open_runtime(head) as runtime:
                data = pack_result(runtime.run(inputs))
    except Exception as error:
        data = _describe_error(error)
    answer.write(MARK + data)


def _open_runtime(head: dict[str, Any]) -> ProgramRuntime:
    """Load the Program that a request names, and open its runtime. Raises the errors of both."""
    program = Program.load(os.path.expanduser(head["program"]), digest=head["digest"])
    return ProgramRuntime(program, head["device"], head["threads"], **head["options"])


def serve_samples(runtime: ProgramRuntime, count: int, request: IO[bytes], answer: Answers) -> None:
    """Run `count` samples as a stream, and answer each, with its error where it fails.

    EOFError where the other side is gone.
    """

    def samples() -> Iterator[dict[str, Any]]:
        """Yield the inputs of each sample as they arrive."""
        for _ in range(count):
            yield unpack(request)[1]
        _end_process_with(request)

    runtime.open()
    answer.write(MARK + pack({"ready": True}, {}))
    results = runtime.run_each(samples(), trace=False)
    for _ in range(count):
        try:
            data = pack_result(next(results))
        except Exception as error:
            if results.ended:
                raise
            data = _describe_error(error)
        answer.write(data)


def _describe_error(error: Exception) -> bytes:
    """Return the message that reports an error, for `raise_error`."""
    text = str(error) if type(error).__name__ in ERRORS else f"{type(error).__name__}: {error}"
    return json.dumps({"kind": type(error).__name__, "error": text}).encode() + b"\n"


def serve_device(head: dict[str, Any], request: IO[bytes], answer: Answers) -> None:
    """Open the device that `head` names, and answer calls of it until the input ends."""
    device = open_device(head["device"], Config.from_dict(head["config"]), **head["options"])
    answer.write(MARK + pack({"memory_model": device.memory_model}, {}))
    with closing(device), suppress(EOFError):
        while True:
            call, arrays = unpack(request)
            try:
                data = pack(*_answer_call(device, call, arrays))
            except Exception as error:
                data = _describe_error(error)
            answer.write(data)


def _answer_call(device: Device, call: dict[str, Any], arrays: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Execute a call of `device`, and return the answer: (head, arrays)."""
    method = call.pop("call")
    if method == "run":
        return dataclasses.asdict(device.run(**call)), {}
    if method == "read":
        return {}, {"data": device.read(**call)}
    if method == "write":
        device.write(call["addr"], arrays["data"])
    else:
        device.allocate(**call)
    return {}, {}


def main(answer: Answers) -> None:
    """Run the runner on a board: answer a request, and end the process. `MAIN` in runner.py calls this."""
    code = 130
    with suppress(KeyboardInterrupt):
        serve(sys.stdin.buffer, answer)
        code = 0
    os._exit(code)  # a normal exit would wait for the thread of _end_process_with
