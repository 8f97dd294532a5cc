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
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from typing import IO, Any

import numpy as np

from celosia.compiler.program import InputError, Program, ProgramError
from celosia.compiler.program.host.op import HostError
from celosia.compiler.program.saved import array_bytes, load_array
from celosia.driver.board import flash
from celosia.driver.remote.bootstrap import MARK
from celosia.driver.run.devices import open_device
from celosia.driver.run.result import Result, Tensors
from celosia.driver.run.runtime import ProgramRuntime
from celosia.hw.config import Config
from celosia.hw.manifest import Manifest
from celosia.sim.device import Counters, Device, DeviceError, Event, TimeLimit

ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (DeviceError, HostError, InputError, ProgramError, TimeLimit)
}
"""Errors that mean the same on both sides."""
END_SECONDS = 5


def pack(head: dict[str, Any], arrays: Mapping[str, Any]) -> bytes:
    """A line of JSON with the sizes of `arrays`, and their bytes. A list of arrays is a sequence, None an optional."""
    blobs: list[bytes] = []

    def size(value: Any) -> Any:
        if isinstance(value, list):
            return [size(each) for each in value]
        if value is None:
            return None
        blobs.append(array_bytes(np.asarray(value)))
        return len(blobs[-1])

    line = json.dumps(head | {"sizes": {name: size(value) for name, value in arrays.items()}}).encode()
    return b"".join((line, b"\n", *blobs))


def unpack(stream: IO[bytes]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What `pack` made. EOFError where it is cut short."""
    line = stream.readline()
    if not line.endswith(b"\n"):
        raise EOFError("the connection ended")
    head = json.loads(line)

    def value(size: Any) -> Any:
        if isinstance(size, list):
            return [value(each) for each in size]
        if size is None:
            return None
        data = stream.read(size)
        if len(data) != size:
            raise EOFError("the connection ended")
        return load_array(data)

    return head, {name: value(size) for name, size in head.pop("sizes", {}).items()}


def result_bytes(result: Result) -> bytes:
    """A Result on its way; `load_result` reads it."""
    counters = [dataclasses.asdict(each) for each in result.counters]
    head = {"report": result.report, "counters": counters, "outputs": list(result.outputs)}
    return pack(head, result.tensors | result.outputs)


def load_counters(head: dict[str, Any]) -> Counters:
    """Counters of what `dataclasses.asdict` made of them."""
    return Counters(**head | {"events": [Event(**event) for event in head["events"]]})


def load_result(stream: IO[bytes]) -> Result:
    """The Result that `result_bytes` made. Raises the board's error; EOFError."""
    head, arrays = unpack(stream)
    if "error" in head:
        raise ERRORS.get(head["kind"], RuntimeError)(head["error"])
    report = head["report"]
    counters = [load_counters(each) for each in head["counters"]]
    outputs = {name: arrays[name] for name in head["outputs"]}
    return Result(outputs, counters, lambda: report, Tensors(arrays))


def _end_with(stream: IO[bytes]) -> None:
    """End this process when the other side is gone, for nobody wants its result.

    As by Ctrl-C, so that the accelerator stops before its memory goes to others; in any case after END_SECONDS.
    """

    def wait() -> None:
        while stream.read(1):
            pass
        _thread.interrupt_main()
        time.sleep(END_SECONDS)
        os._exit(130)

    threading.Thread(target=wait, daemon=True).start()


def serve(request: IO[bytes], answer: IO[bytes]) -> None:
    """Answer one request."""
    try:
        head, inputs = unpack(request)
        if "config" in head:
            serve_device(head, request, answer)
            return
        if "samples" in head:
            with _runtime(head) as runtime:
                serve_samples(runtime, head["samples"], request, answer)
            return
        _end_with(request)
        if "bitstream" in head:
            data = pack({"clock_mhz": flash.load(head["bitstream"], Manifest(**head["manifest"]))}, {})
        else:
            with _runtime(head) as runtime:
                data = result_bytes(runtime.run(inputs))
    except Exception as error:
        data = _error(error)
    answer.write(MARK + data)
    answer.flush()


def _runtime(head: dict[str, Any]) -> ProgramRuntime:
    program = Program.load(os.path.expanduser(head["program"]), digest=head["digest"])
    return ProgramRuntime(program, head["device"], head["threads"], **head["options"])


def serve_samples(runtime: ProgramRuntime, count: int, request: IO[bytes], answer: IO[bytes]) -> None:
    """Run so many samples as a stream; what goes wrong with one is its answer. EOFError where nobody is there."""

    def samples() -> Iterator[dict[str, Any]]:
        for _ in range(count):
            yield unpack(request)[1]
        _end_with(request)

    runtime.open()
    answer.write(MARK + pack({"ready": True}, {}))
    answer.flush()
    results = runtime.run_each(samples(), trace=False)
    for _ in range(count):
        try:
            data = result_bytes(next(results))
        except Exception as error:
            if results.ended:
                raise
            data = _error(error)
        answer.write(data)
        answer.flush()


def _error(error: Exception) -> bytes:
    text = str(error) if type(error).__name__ in ERRORS else f"{type(error).__name__}: {error}"
    return json.dumps({"kind": type(error).__name__, "error": text}).encode() + b"\n"


def serve_device(head: dict[str, Any], request: IO[bytes], answer: IO[bytes]) -> None:
    """Open the device that `head` names, then answer calls of it until there are no more."""
    device = open_device(head["device"], Config.from_dict(head["config"]), **head["options"])
    answer.write(MARK + pack({"memory_model": device.memory_model}, {}))
    answer.flush()
    with closing(device), suppress(EOFError):
        while True:
            call, arrays = unpack(request)
            try:
                data = pack(*_called(device, call, arrays))
            except Exception as error:
                data = _error(error)
            answer.write(data)
            answer.flush()


def _called(device: Device, call: dict[str, Any], arrays: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The answer to a call of `device`: a line, and arrays."""
    what = call.pop("call")
    if what == "run":
        return dataclasses.asdict(device.run(**call)), {}
    if what == "read":
        return {}, {"data": device.read(**call)}
    if what == "write":
        device.write(call["addr"], arrays["data"])
    else:
        device.allocate(**call)
    return {}, {}


def main() -> None:
    """`python3 runner.pyz` on the board."""
    code = 130
    with suppress(KeyboardInterrupt):
        serve(sys.stdin.buffer, sys.stdout.buffer)
        code = 0
    os._exit(code)  # the thread that waits for the other side would hold the process
