"""First program on a board, before Celosia is there: reports facts of the board, and installs files.

Its text is sent over ssh and executed by the board's Python, 3.6 or newer. So it imports only the standard library, and
annotations with newer syntax are strings. It reads a request from standard input: a line of JSON, then the bytes of
files. It answers with a line of JSON after MARK.
"""

import fcntl
import hashlib
import json
import os
import platform
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO

MARK = b"\n<celosia>\n"
"""Precedes an answer; everything before it comes from the login shell."""
HEARTBEAT_SECONDS = 2.0
"""Seconds between two empty lines, which show that a command is still at work."""


class HeartbeatOutput:
    """Standard output with an empty line every HEARTBEAT_SECONDS, until the process ends or nobody reads."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self._lock = stream, threading.Lock()
        threading.Thread(target=self._write_heartbeats, daemon=True).start()

    def write(self, data: bytes) -> None:
        """Write a whole message at once, so that no empty line comes inside it."""
        with self._lock:
            self._stream.write(data)
            self._stream.flush()

    def _write_heartbeats(self) -> None:
        """Write empty lines at intervals, so that the other side knows that this process is alive."""
        try:
            while True:
                time.sleep(HEARTBEAT_SECONDS)
                self.write(b"\n")
        except (OSError, ValueError):
            pass


def find_versions() -> "dict[str, Any]":
    """Return the versions of numpy and pynq by name; None for a missing one, with the reason as NAME_error."""
    facts: dict[str, Any] = {}
    for name in ("numpy", "pynq"):
        try:
            facts[name] = getattr(__import__(name), "__version__", "unknown")
        except Exception as error:  # pynq has many ways to fail
            facts[name] = None
            facts[name + "_error"] = type(error).__name__ + ": " + str(error)
    return facts


def digest(path: str) -> "str | None":
    """Return the SHA-256 of a file; None where it cannot be read."""
    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()
    except OSError:
        return None


@contextmanager
def lock_folder(folder: str, wait: bool) -> "Iterator[None]":
    """Hold the lock of the folder in a context, and remove parts of files that killed installations have left.

    wait: wait until another installation has ended. OSError where there is no folder, or, without `wait`, where another
    installation is under way.
    """
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            stale = [name for name in os.listdir(folder) if name.startswith(".") and name.endswith(".part")]
        except BlockingIOError:
            raise
        except OSError:  # the file system has no locks
            stale = []
        for name in stale:
            with suppress(OSError):  # the file of another user
                os.unlink(os.path.join(folder, name))
        yield
    finally:
        os.close(handle)


def status(request: "dict[str, Any]", folder: str) -> "dict[str, Any]":
    """Return facts of the board, and the names of the request's files that are missing or differ."""
    with suppress(OSError), lock_folder(folder, False):  # removes parts; no folder and a busy one are fine
        pass
    files = request["files"]
    missing = [entry["name"] for entry in files if digest(os.path.join(folder, entry["name"])) != entry["sha256"]]
    home = os.path.expanduser("~")
    return {
        "python": list(sys.version_info[:3]), "machine": platform.machine(), "folder": folder, "missing": missing,
        "free": shutil.disk_usage(home).free, **find_versions(),
    }  # fmt: skip


def install(request: "dict[str, Any]", folder: str, stream: BinaryIO) -> "dict[str, Any]":
    """Install the files of a request, whose bytes follow on `stream`. Return the answer, an empty one."""
    os.makedirs(folder, exist_ok=True)
    with lock_folder(folder, True):
        for entry in request["files"]:
            receive_file(entry, folder, stream)
    return {}


def receive_file(entry: "dict[str, Any]", folder: str, stream: BinaryIO) -> None:
    """Install one file of a request: rename it into place when it is complete and has its digest, else remove it."""
    handle, part = tempfile.mkstemp(dir=folder, prefix=".", suffix=".part")
    try:
        left, hashed = entry["size"], hashlib.sha256()
        with os.fdopen(handle, "wb") as file:
            while left:
                data = stream.read(min(left, 1 << 16))
                if not data:
                    raise EOFError("the connection ended within " + entry["name"])
                file.write(data)
                hashed.update(data)
                left -= len(data)
            file.flush()
            os.fsync(file.fileno())
        if hashed.hexdigest() != entry["sha256"]:
            raise ValueError(entry["name"] + " arrived damaged")
        os.replace(part, os.path.join(folder, entry["name"]))
    except BaseException:
        os.unlink(part)
        raise


def main() -> None:
    """Answer one request from standard input with a line of JSON behind MARK."""
    stream, out = sys.stdin.buffer, HeartbeatOutput(sys.stdout.buffer)
    answer: dict[str, Any] = {}
    try:
        request = json.loads(stream.readline().decode())
        folder = os.path.expanduser(request["folder"])
        answer = status(request, folder) if request["what"] == "status" else install(request, folder, stream)
    except Exception as error:
        answer = {"error": getattr(error, "strerror", None) or str(error), "kind": type(error).__name__}
    out.write(MARK + json.dumps(answer).encode() + b"\n")
    os._exit(0)  # without waiting for the thread of HeartbeatOutput


if __name__ == "__main__":
    main()
