"""Cache folder of generated files: simulators, Verilog, netlists, kernels.

If the files exceed a limit, the least recently used ones are removed. Files that another user could have written are
never run.
"""

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

CACHE_KINDS = {
    "rtlsim": "simulators of the RTL (a minute or more each)",
    "verilator": "Verilator's runtime, compiled (seconds each)",
    "verilog": "Verilog of Configs (seconds each)",
    "netlists": "netlists, for the estimate of the clock (minutes each)",
    "kernels": "machine code for the CPU (milliseconds each)",
    "cycles": "cycles of chains of layers, for the compiler (a second or more each)",
}
"""Subfolders that `shrink` may empty, and their meaning. Results of synthesis and proofs stay: they are small, and take
hours to make again."""
DEFAULT_LIMIT = "2GB"
"""Limit of the cache's size if the environment variable CELOSIA_CACHE_LIMIT sets none."""
_SIZE_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
"""Bytes of each unit of size."""


def cache_folder() -> Path:
    """Return the cache folder, which may not exist yet.

    It is CELOSIA_CACHE, else the user's cache directory. If that cannot be written, as in many containers, it is a
    folder of the user's among temporary files.
    """
    from platformdirs import user_cache_dir

    if chosen := os.environ.get("CELOSIA_CACHE"):
        return Path(chosen)
    default = Path(user_cache_dir("celosia"))
    if default.exists() or _can_be_written(default):
        return default
    return Path(tempfile.gettempdir()) / f"celosia-{os.getuid()}"


def _can_be_written(folder: Path) -> bool:
    """Return whether `folder` exists and can be written, or can be created."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    return existing.is_dir() and os.access(existing, os.W_OK)


class CacheError(Sentence, OSError):
    """Cache folder that cannot be used; the message names the folder, the reason and the way out."""


def require_own(path: Path) -> None:
    """Raise CacheError if another user could have written the file or folder `path` in the cache.

    That is so if `path`, or a folder between it and the cache folder, belongs to neither this user nor root, or if
    others may write to it.
    """
    place, folder = path, cache_folder()
    while True:
        with suppress(FileNotFoundError, NotADirectoryError):
            if (reason := _why_foreign(os.stat(place))) is not None:
                problem, remedy = reason
                raise CacheError(
                    f"{place} {problem}, who could put other code there that celosia would run; "
                    f"{remedy.format(place)}, or set CELOSIA_CACHE to a folder of your own"
                )
        if place in (folder, place.parent):
            return
        place = place.parent


def is_own(path: Path) -> bool:
    """Return whether `require_own` accepts `path`."""
    try:
        require_own(path)
    except OSError:
        return False
    return True


def _why_foreign(status: os.stat_result) -> tuple[str, str] | None:
    """Return what is wrong with the owner or rights of a file and how to repair it, or None if nothing is."""
    if status.st_uid not in (os.getuid(), 0):
        return f"belongs to user {status.st_uid}", "remove {}"
    others = stat.S_IWOTH if _is_private(status.st_gid) else stat.S_IWOTH | stat.S_IWGRP
    return ("may be written by other users", "chmod go-w {}") if status.st_mode & others else None


def _is_private(group_id: int) -> bool:
    """Return whether this user is the only member of a Unix group; many systems give each user such a group."""
    try:
        user, members = pwd.getpwuid(os.getuid()), grp.getgrgid(group_id)
    except KeyError:
        return False
    return user.pw_gid == group_id and members.gr_name == user.pw_name and not {*members.gr_mem} - {user.pw_name}


def make_folder(folder: Path) -> None:
    """Create `folder` in the cache, and missing parents, readable by this user only. OSError."""
    for place in (*reversed(folder.parents), folder):
        if not place.exists():
            place.mkdir(mode=0o700, exist_ok=True)


@contextmanager
def writable_cache() -> Iterator[Path]:
    """Provide the cache folder, created and checked, to a body that writes there.

    CacheError if the folder cannot be used; an OSError of the body becomes a CacheError.
    """
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
    """Return the environment variables for external tools that cache compiled code.

    They use the user's cache directory; if it cannot be written, a folder in that of Celosia.
    """
    from platformdirs import user_cache_dir

    if _can_be_written(Path(user_cache_dir())):
        return dict(os.environ)
    tools = str(cache_folder() / "tools")
    return os.environ | {"XDG_CACHE_HOME": tools, "YOWASP_CACHE_DIR": tools, "CELOSIA_CACHE": str(cache_folder())}


@contextmanager
def file_lock(path: Path, waits: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold the lock file `path` during the body; processes and threads exclude each other.

    The file is created if it is missing. The kernel releases the lock if the process dies. waits: called before
    waiting, if the lock is taken. OSError if the file cannot be written.
    """
    import fcntl

    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waits()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def parse_size(text: str) -> int:
    """Parse a size such as "1.5 GB" to bytes. ValueError for any other text.

    >>> parse_size("500MB"), parse_size("1.5 GB"), parse_size("0")
    (500000000, 1500000000, 0)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?B?)\s*", text.upper())
    if match is None or match[2] not in _SIZE_UNITS:
        raise ValueError(f"{text!r} is no size; write it as 500MB or 2GB")
    return int(float(match[1]) * _SIZE_UNITS[match[2]])


@dataclass(frozen=True)
class CachedFile:
    """A file in the cache, or a folder that belongs together.

    kind : one of CACHE_KINDS.
    path : of the file or folder.
    size : bytes.
    used : time of the last use, in seconds since 1970.
    """

    kind: str
    path: Path
    size: int
    used: float


def mark_used(path: Path) -> None:
    """Set the time of the last use of a cached file to now."""
    with suppress(OSError):  # it may be another user's, or gone already
        os.utime(path)


def cached_files() -> list[CachedFile]:
    """Return all cached files of CACHE_KINDS, the least recently used first."""
    cached = (file for kind in CACHE_KINDS for file in _cached_files_of(kind))
    return sorted(cached, key=lambda file: file.used)


def _cached_files_of(kind: str) -> Iterator[CachedFile]:
    """Yield the cached files of one kind; a simulator is a folder, used when its library was."""
    folder = cache_folder() / kind
    for path in folder.iterdir() if folder.is_dir() else ():
        try:
            if kind == "rtlsim":
                files = [file.stat() for file in path.iterdir()]
                built = path / "simulator.so"
                if built.exists():
                    yield CachedFile(kind, path, sum(file.st_size for file in files), built.stat().st_mtime)
            else:
                yield CachedFile(kind, path, path.stat().st_size, path.stat().st_mtime)
        except OSError:
            continue  # another process has removed it


def shrink(limit: int | None = None, keep: Path | None = None) -> list[CachedFile]:
    """Remove the least recently used cached files until the others fit into `limit` bytes; return the removed ones.

    limit: by default CELOSIA_CACHE_LIMIT, or DEFAULT_LIMIT; ValueError if that is no size. keep: a file that stays.
    """
    max_bytes = parse_size(os.environ.get("CELOSIA_CACHE_LIMIT") or DEFAULT_LIMIT) if limit is None else limit
    cached = cached_files()
    total, removed = sum(file.size for file in cached), []
    for file in cached:
        if total <= max_bytes:
            break
        if file.path == keep:
            continue
        if file.path.is_dir():
            shutil.rmtree(file.path, ignore_errors=True)
        else:
            file.path.unlink(missing_ok=True)
        total -= file.size
        removed.append(file)
    return removed
