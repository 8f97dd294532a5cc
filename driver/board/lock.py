"""A lock between the processes of a machine, which the kernel releases when they die."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from celosia.sim.device import DeviceError

PATIENCE = 30.0
"""Seconds that are waited for the one who holds it: longer than a launch takes."""
TRY_SECONDS = 1e-3
"""Between two tries."""


@contextmanager
def hold_lock_file(path: Path, description: str, patience: float = PATIENCE) -> Iterator[None]:
    """Hold the lock file `path`, with this process's number in it. description: of the locked thing, for messages.
    Threads exclude each other, too.

    DeviceError where it cannot be taken, or another one keeps it for over `patience` seconds.
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
        os.pwrite(handle, f"{os.getpid():<10} {time.time():<20.0f}\n".encode(), 0)  # always as long: written at once
        yield
    finally:
        os.close(handle)


def _open_lock_file(path: Path) -> int:
    """Open the lock file, also another user's, which a folder for all users denies to those who would create it."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags)
    except FileNotFoundError:
        return os.open(path, flags | os.O_CREAT, 0o600)


def _describe_holder(handle: int) -> str:
    """Name the process that holds the lock, and the way out, for an error."""
    match = re.fullmatch(rb"([1-9]\d{0,9}) +(\d{1,10}) *\n", os.pread(handle, 64, 0))
    if match is None:  # a new file, or one that others have written
        return "another process holds it; wait for it, or end it"
    process, since = map(int, match.groups())
    clock = time.strftime("%H:%M:%S", time.localtime(since))
    return f"process {process} has held it since {clock}; wait for it, or end it with `kill {process}`"
