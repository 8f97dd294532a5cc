"""A file lock between the processes of a machine, which the operating system releases when its holder ends."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from celosia.sim.device import DeviceError

PATIENCE = 30.0
"""Default limit in seconds for waiting until the holder releases a lock: longer than a launch takes."""
TRY_SECONDS = 1e-3
"""Seconds between two tries to take a lock."""


@contextmanager
def hold_lock_file(path: Path, description: str, patience: float = PATIENCE) -> Iterator[None]:
    """Hold the lock file `path` in a context, and write this process's number to it. Threads exclude each other, too.

    description: the locked thing, for messages. patience: limit of the wait, in seconds. DeviceError where the file
    cannot be opened, or another process or thread holds the lock for longer.
    """
    import fcntl  # on Linux, as boards

    try:
        handle = _open_lock_file(path)
    except OSError as error:
        raise DeviceError(f"{description} cannot be locked ({error}); it needs the rights of root") from None
    try:
        end = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise DeviceError(f"{description} is in use: {_describe_holder(handle)}") from None
                time.sleep(TRY_SECONDS)
        # Of constant length, so that one write replaces the text of the last holder.
        os.pwrite(handle, f"{os.getpid():<10} {time.time():<20.0f}\n".encode(), 0)
        yield
    finally:
        os.close(handle)


def _open_lock_file(path: Path) -> int:
    """Open the lock file and return its descriptor.

    First without creating it: in a folder for all users, Linux refuses O_CREAT for a file of another user.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags)
    except FileNotFoundError:
        return os.open(path, flags | os.O_CREAT, 0o600)


def _describe_holder(handle: int) -> str:
    """Return a message that names the process that holds the lock, and says what to do."""
    match = re.fullmatch(rb"([1-9]\d{0,9}) +(\d{1,10}) *\n", os.pread(handle, 64, 0))
    if match is None:  # a new file, or one that others have written
        return "another process holds it; wait for it, or end it"
    process, since = map(int, match.groups())
    clock = time.strftime("%H:%M:%S", time.localtime(since))
    return f"process {process} has held it since {clock}; wait for it, or end it with `kill {process}`"
