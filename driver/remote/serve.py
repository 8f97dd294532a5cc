"""The runner's program on a board: runs a Program once, with its inputs from standard input and its outputs to standard
output. Needs nothing but numpy, and pynq for the device "board".

The request is a line of JSON ({program, device, threads, options, sizes of the inputs' bytes by name}) and those bytes.
The answer, after MARK, is a line of JSON ({report, counters, sizes of the outputs' bytes by name}, or {kind, error})
and those bytes. Arrays are as `compiler.saved` writes them. A request {bitstream, manifest} loads a bitstream
instead, and is answered with {clock_mhz}. With `samples` in the request as many messages follow, the inputs of a run
each; the answer, {ready}, is followed by the answers of runs in their order, while later inputs are read. A request
{config, device, options} opens a device, whose calls follow; see remote.py.
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
from celosia.compiler.program.saved import array_bytes, from_plain, load_array
from celosia.driver.board import flash
from celosia.driver.board.board_device import BoardDevice
from celosia.driver.remote.bootstrap import MARK
from celosia.driver.run.open_device import open_device
from celosia.driver.run.program_runtime import ProgramRuntime
from celosia.driver.run.run_result import Result, Tensors
from celosia.hw.manifest import Manifest
from celosia.hw.spec.config import Config
from celosia.plain import Sentence, abbreviate, from_json, printable
from celosia.sim.device import Counters, Device, DeviceError, TimeLimit

ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (DeviceError, HostError, InputError, ProgramError, TimeLimit)
}
"""Errors that mean the same on both sides."""
END_SECONDS = 5
LINE_BYTES = 1 << 24
"""Longest line of JSON: that of a run has its counters and the sizes of its outputs."""
CHUNK_BYTES = 1 << 20
INTERRUPTED = 130
"""Exit code of a process that Ctrl-C has ended, as shells report it: 128 and the number of SIGINT."""
TIMES = ("compile", "build", "run", "cpu")
"""Seconds that a report has."""


class Readable(Protocol):
    """Source of messages: a file, or a CommandChannel."""

    def read(self, size: int, /) -> bytes:
        """Read at most `size` bytes; none at the end."""
        ...

    def readline(self, limit: int, /) -> bytes:
        """Read up to the next end of a line, at most `limit` bytes."""
        ...


class AnswerError(Sentence, ValueError):
    """An invalid message; one sentence that says why."""


def pack(head: dict[str, Any], arrays: Mapping[str, Any]) -> bytes:
    """Pack `arrays` to bytes: a line of JSON with their sizes, and their contents. A list of arrays is a sequence, None
    an optional."""
    blobs: list[bytes] = []

    def pack_value(value: Any) -> Any:
        """Return the size of a value's bytes, which join `blobs`; for a sequence, a list of sizes."""
        if isinstance(value, list):
            return [pack_value(entry) for entry in value]
        if value is None:
            return None
        blobs.append(array_bytes(np.asarray(value)))
        return len(blobs[-1])

    line = json.dumps(head | {"sizes": {name: pack_value(value) for name, value in arrays.items()}}).encode()
    return b"".join((line, b"\n", *blobs))


def unpack(stream: Readable) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read a message that `pack` made, behind any number of empty lines. Takes no more memory than arrives, nor than
    there is.

    EOFError where it is cut short, AnswerError where it is something else.
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
        """Read an array of `size` bytes; a list of sizes is a sequence."""
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
    """Raise AnswerError for any error while a message is parsed: libraries do not say which errors they raise."""
    try:
        yield
    except AnswerError:
        raise
    except Exception as error:
        raise AnswerError(f"{part_name} cannot be read: {clip_sentence(f'{type(error).__name__} {error}')}") from None


def check_json(kind: Any, value: Any, label: str) -> Any:
    """Check that a JSON value has the type `kind`, see `from_plain`. AnswerError."""
    with raise_answer_errors(label):
        return from_plain(kind, value, label)


def as_table(value: Any, label: str) -> dict[str, Any]:
    """Check that `value` is an object of JSON. AnswerError."""
    if not isinstance(value, dict):
        raise AnswerError(f"{label} is {abbreviate(value)}")
    return value


def pack_result(result: Result) -> bytes:
    """Pack a Result; `parse_result` reads it."""
    counters = [dataclasses.asdict(entry) for entry in result.counters]
    head = {"report": result.report, "counters": counters, "outputs": list(result.outputs)}
    return pack(head, result.tensors | result.outputs)


def parse_counters(head: Any) -> Counters:
    """Parse Counters from `dataclasses.asdict`. AnswerError; DeviceError where their values are impossible."""
    fields = {field.name for field in dataclasses.fields(Counters)}
    if missing := fields - as_table(head, "counters").keys():
        raise AnswerError(f"counters have no {min(missing)}")
    counters: Counters = check_json(Counters, head, "counters")
    counters.check()
    return counters


def raise_error(head: dict[str, Any], kind: type[Exception]) -> None:
    """Raise the error that a message holds, if it does: a `kind` where this side does not know it. AnswerError."""
    if "error" in head:
        name, text = (check_json(str, head.get(field), field) for field in ("kind", "error"))
        raise ERRORS.get(name, kind)(clip_sentence(printable(text)))


def parse_memory(head: dict[str, Any]) -> str | None:
    """Memory model of a board's device. AnswerError."""
    memory = head.get("memory_model", "")
    if memory not in (None, BoardDevice.memory_model):
        raise AnswerError(f"memory_model is {abbreviate(memory)}")
    return None if memory is None else BoardDevice.memory_model


def parse_result(stream: Readable, kind: type[Exception] = RuntimeError) -> Result:
    """Parse the Result that `pack_result` packed, with the report's memory model and seconds.

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
    """End this process when the other side is gone, for nobody wants its result.

    As by Ctrl-C, so that the accelerator stops before its memory goes to others; in any case after END_SECONDS.
    """

    def wait_for_end() -> None:
        """Interrupt this process at the end of the stream; kill it where that does not end it."""
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
    """Answer one request."""
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
    program = Program.load(os.path.expanduser(head["program"]), digest=head["digest"])
    return ProgramRuntime(program, head["device"], head["threads"], **head["options"])


def serve_samples(runtime: ProgramRuntime, count: int, request: IO[bytes], answer: Answers) -> None:
    """Run so many samples as a stream; what goes wrong with one is its answer. EOFError where nobody is there."""

    def samples() -> Iterator[dict[str, Any]]:
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
    text = str(error) if type(error).__name__ in ERRORS else f"{type(error).__name__}: {error}"
    return json.dumps({"kind": type(error).__name__, "error": text}).encode() + b"\n"


def serve_device(head: dict[str, Any], request: IO[bytes], answer: Answers) -> None:
    """Open the device that `head` names, then answer calls of it until there are no more."""
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
    """Answer a call of `device`: a line, and arrays."""
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
    """Run `python3 runner.pyz` on the board."""
    code = 130
    with suppress(KeyboardInterrupt):
        serve(sys.stdin.buffer, answer)
        code = 0
    os._exit(code)  # the thread that waits for the other side would hold the process
