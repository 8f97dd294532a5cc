"""Cache folder of generated files: simulators, Verilog, kernels; the least recently used are deleted first."""

from __future__ import annotations

import grp
import os
import pwd
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from celosia.plain import Sentence

KINDS = {
    "rtlsim": "simulators of the RTL (a minute or more each)",
    "verilator": "Verilator's runtime, compiled (seconds each)",
    "verilog": "Verilog of Configs (seconds each)",
    "netlists": "netlists, for the estimate of the clock (minutes each)",
    "kernels": "machine code for the CPU (milliseconds each)",
}
"""Kinds of files that may be deleted; counts of synthesis and proofs stay, which take hours and little room."""
LIMIT = "2GB"
"""Size that CELOSIA_CACHE_LIMIT changes."""
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def cache_folder() -> Path:
    """Path of the cache: CELOSIA_CACHE, else the user's cache, else a folder of the user's among temporary files where
    the home directory cannot be written, as in many containers."""
    from platformdirs import user_cache_dir

    if chosen := os.environ.get("CELOSIA_CACHE"):
        return Path(chosen)
    usual = Path(user_cache_dir("celosia"))
    if usual.exists() or _can_be_written(usual):
        return usual
    return Path(tempfile.gettempdir()) / f"celosia-{os.getuid()}"


def _can_be_written(folder: Path) -> bool:
    """Whether `folder` can be made, or written where it exists."""
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    return existing.is_dir() and os.access(existing, os.W_OK)


class CacheError(Sentence, OSError):
    """A folder of generated files that cannot be written; one sentence with the folder, the reason and the way out."""


def require_own(path: Path) -> None:
    """Raise CacheError where another user could have put code at `path` in the cache: a file or folder there that
    neither this user nor root owns, or that others may write to."""
    place, folder = path, cache_folder()
    while True:
        with suppress(FileNotFoundError, NotADirectoryError):
            if (reason := _why_foreign(os.stat(place))) is not None:
                problem, way_out = reason
                raise CacheError(
                    f"{place} {problem}, who could put other code there that celosia would run; "
                    f"{way_out.format(place)}, or set CELOSIA_CACHE to a folder of your own"
                )
        if place in (folder, place.parent):
            return
        place = place.parent


def is_own(path: Path) -> bool:
    """Whether `require_own` passes."""
    try:
        require_own(path)
    except OSError:
        return False
    return True


def _why_foreign(status: os.stat_result) -> tuple[str, str] | None:
    """Explain the problem with the owner or rights of a file, and the way out; None for none."""
    if status.st_uid not in (os.getuid(), 0):
        return f"belongs to user {status.st_uid}", "remove {}"
    foreign_bits = stat.S_IWOTH if _is_private(status.st_gid) else stat.S_IWOTH | stat.S_IWGRP
    return ("may be written by other users", "chmod go-w {}") if status.st_mode & foreign_bits else None


def _is_private(group: int) -> bool:
    """Whether a group has this user as its only member, as many systems make one for each."""
    try:
        user, members = pwd.getpwuid(os.getuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return user.pw_gid == group and members.gr_name == user.pw_name and not {*members.gr_mem} - {user.pw_name}


def make_folder(folder: Path) -> None:
    """Make `folder` in the cache, and those around it, for this user alone. OSError."""
    for place in (*reversed(folder.parents), folder):
        if not place.exists():
            place.mkdir(mode=0o700, exist_ok=True)


@contextmanager
def writing() -> Iterator[Path]:
    """Return the cache folder for a write inside. CacheError, also for an OSError from within."""
    folder = cache_folder()
    try:
        make_folder(folder)
        require_own(folder)
        yield folder
    except CacheError:
        raise
    except OSError as error:
        raise CacheError(
            f"the folder {folder}, where generated files are kept, cannot be written: {error.strerror or error}; set "
            "CELOSIA_CACHE to a folder with room"
        ) from None


def tool_environment() -> dict[str, str]:
    """Environment for tools that keep compiled code in the user's cache, or in ours where that cannot be written."""
    from platformdirs import user_cache_dir

    if _can_be_written(Path(user_cache_dir())):
        return dict(os.environ)
    tools = str(cache_folder() / "tools")
    return os.environ | {"XDG_CACHE_HOME": tools, "YOWASP_CACHE_DIR": tools, "CELOSIA_CACHE": str(cache_folder())}


@contextmanager
def locked(path: Path, waits: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold the lock `path`, made where missing; the kernel releases it when its process dies. Threads exclude each
    other, too.

    waits: called where another one has it, before it is waited for. OSError where the file cannot be written.
    """
    import fcntl

    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waits()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def size_of(text: str) -> int:
    """Parse a size to bytes. ValueError for what is no size.

    >>> size_of("500MB"), size_of("1.5 GB"), size_of("0")
    (500000000, 1500000000, 0)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?B?)\s*", text.upper())
    unit = match[2] if match else None
    if match is None or unit is None or unit not in _UNITS:
        raise ValueError(f"{text!r} is no size; write it as 500MB or 2GB")
    return int(float(match[1]) * _UNITS[unit])


@dataclass(frozen=True)
class Entry:
    """A file or folder in the cache; used: last use, in seconds since 1970."""

    kind: str
    path: Path
    size: int
    used: float


def used(path: Path) -> None:
    """Note that a kept file has been used."""
    with suppress(OSError):  # it may be another user's, or gone already
        os.utime(path)


def entries() -> list[Entry]:
    """List all entries, the least recently used first."""
    all_entries = (entry for kind in KINDS for entry in _entries(kind))
    return sorted(all_entries, key=lambda entry: entry.used)


def _entries(kind: str) -> Iterator[Entry]:
    folder = cache_folder() / kind
    for path in folder.iterdir() if folder.is_dir() else ():
        try:
            if kind == "rtlsim":
                files = [file.stat() for file in path.iterdir()]
                built = path / "simulator.so"
                if built.exists():
                    yield Entry(kind, path, sum(file.st_size for file in files), built.stat().st_mtime)
            else:
                yield Entry(kind, path, path.stat().st_size, path.stat().st_mtime)
        except OSError:
            continue  # another process has removed it


def shrink(limit: int | None = None, keep: Path | None = None) -> list[Entry]:
    """Remove the least recently used entries until all fit into `limit` bytes; return those removed.

    limit: by default CELOSIA_CACHE_LIMIT, or LIMIT; ValueError where that is no size. keep: stays in any case.
    """
    size_limit = size_of(os.environ.get("CELOSIA_CACHE_LIMIT") or LIMIT) if limit is None else limit
    remaining = entries()
    total, gone = sum(entry.size for entry in remaining), []
    for entry in remaining:
        if total <= size_limit:
            break
        if entry.path == keep:
            continue
        if entry.path.is_dir():
            shutil.rmtree(entry.path, ignore_errors=True)
        else:
            entry.path.unlink(missing_ok=True)
        total -= entry.size
        gone.append(entry)
    return gone
