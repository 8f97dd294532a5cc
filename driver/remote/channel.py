"""Channel to a command on another machine: its input, its output, and a limit on how long it may be silent."""

from __future__ import annotations

import os
import select
import subprocess
import time
from contextlib import suppress

SILENCE_SECONDS = 60.0
"""Longest time without a byte from a command, which sends one every HEARTBEAT_SECONDS (driver/remote/bootstrap.py)."""
CHUNK_BYTES = 1 << 16
"""Most bytes that one system call reads or writes."""
ERROR_BYTES = 1 << 13
"""Bytes of the end of standard error that are kept."""
END_SECONDS = 5.0
"""Limit of the wait for the exit code of a process whose output has ended."""


class Silence(Exception):
    """A command has neither written nor read for too long."""


class CommandChannel:
    """The pipes of `process`: standard input, output and error, all unbuffered.

    Standard error is read on the way, so that the command never waits for it. seconds: how long the command may neither
    read nor write, after which reading and writing raise Silence. Writing raises OSError where the command takes no
    more input.
    """

    def __init__(self, process: subprocess.Popen[bytes], seconds: float = SILENCE_SECONDS) -> None:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        self.process, self.seconds = process, seconds
        self._in, self._out, self._err = process.stdin.fileno(), process.stdout.fileno(), process.stderr.fileno()
        self._waiting, self._errors, self._open = bytearray(), b"", {self._err}
        os.set_blocking(self._in, False)

    def write(self, data: bytes, patient: bool = False) -> None:
        """Write all of `data`. patient: without a limit on the wait, for a thread beside the one that reads."""
        view = memoryview(data)
        while view:
            self._wait_until_ready(self._in, None if patient else self.seconds, () if patient else (self._err,))
            with suppress(BlockingIOError):
                view = view[os.write(self._in, view[:CHUNK_BYTES]) :]

    def readline(self, limit: int) -> bytes:
        """Read up to the next end of a line, at most `limit` bytes."""
        at = 0
        while (
            (end := self._waiting.find(b"\n", at)) < 0
            and (at := len(self._waiting)) < limit
            and self._wait_for_output()
        ):
            pass
        return self._read_available(min(limit, end + 1 if end >= 0 else len(self._waiting)))

    def read(self, size: int) -> bytes:
        """Read at least one byte and at most `size`; none at the end of the output."""
        if not self._waiting:
            self._wait_for_output()
        return self._read_available(size)

    def errors(self) -> str:
        """Return the end of the command's standard error so far, at most ERROR_BYTES."""
        while self._err in self._open and self._poll((self._err,), 0):
            self._read_errors()
        return self._errors.decode(errors="replace").strip()

    def exit_code(self) -> int | None:
        """Return the exit code; None where the command does not end within END_SECONDS."""
        end = time.monotonic() + END_SECONDS
        while self._err in self._open and (left := end - time.monotonic()) > 0:  # the command may wait for this
            if self._poll((self._err,), left):
                self._read_errors()
        try:
            return self.process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> None:
        """Kill ssh here: the command there ends at the end of its input. A thread that writes gets an OSError."""
        self.process.kill()

    def close(self) -> None:
        """Kill the command, and close its pipes."""
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            with suppress(OSError, AttributeError):
                pipe.close()  # type: ignore[union-attr]
        self.process.wait()

    def _read_available(self, size: int) -> bytes:
        """Return up to `size` bytes that have arrived, and remove them from the buffer."""
        data = bytes(self._waiting[:size])
        del self._waiting[:size]
        return data

    def _wait_for_output(self) -> bool:
        """Wait for more output and buffer it. False at its end. Silence."""
        self._wait_until_ready(self._out, self.seconds, (self._err,))
        data = os.read(self._out, CHUNK_BYTES)
        self._waiting += data
        return bool(data)

    def _wait_until_ready(self, descriptor: int, seconds: float | None, errors: tuple[int, ...]) -> None:
        """Wait until `descriptor` is ready. Silence after `seconds`; None for no limit.

        errors: the descriptor of standard error, if it is to be read meanwhile.
        """
        end = None if seconds is None else time.monotonic() + seconds
        while True:
            left = None if end is None else max(0.0, end - time.monotonic())
            ready = self._poll((descriptor, *(error for error in errors if error in self._open)), left)
            if descriptor in ready:
                return
            if self._err in ready:
                self._read_errors()
            if end is not None and time.monotonic() >= end:
                raise Silence

    def _poll(self, descriptors: tuple[int, ...], seconds: float | None) -> set[int]:
        """Return those of `descriptors` that are ready within `seconds` (None: no limit)."""
        poll = select.poll()
        for descriptor in descriptors:
            poll.register(descriptor, select.POLLOUT if descriptor == self._in else select.POLLIN)
        return {ready for ready, _ in poll.poll(None if seconds is None else seconds * 1e3)}

    def _read_errors(self) -> None:
        """Read some of standard error, and keep its last ERROR_BYTES."""
        data = os.read(self._err, CHUNK_BYTES)
        self._errors = (self._errors + data)[-ERROR_BYTES:]
        if not data:
            self._open.discard(self._err)
