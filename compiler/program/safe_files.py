"""Safe reading of files that may be damaged, and atomic writing, which never leaves half a file."""

from __future__ import annotations

import os
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from celosia.plain import Sentence


@contextmanager
def reading(path: str | Path, error: type[Exception], verdict: str, way_out: str = "") -> Iterator[None]:
    """Run a block that reads a file; convert any exception that libraries raise for it into `error`, in one sentence.

    The sentence has `path`, `verdict` (such as "is damaged"), the reason and `way_out`. zipfile and numpy do not
    document their exceptions: besides BadZipFile and ValueError they raise EOFError, NotImplementedError, RuntimeError,
    zlib.error, tokenize.TokenError, SyntaxError, MemoryError and more. An `error` that names `path` passes unchanged.
    """
    try:
        yield
    except OSError as problem:
        raise error(f"cannot read {path}: {problem.strerror or problem}") from None
    except Exception as problem:
        if isinstance(problem, error) and str(path) in Exception.__str__(problem):
            raise
        raise error(f"{path} {verdict}: {_reason(problem)}{way_out}") from None


def _reason(error: Exception) -> str:
    """Return the message of an error without the bytes that some errors quote at length."""
    if "pickle" in str(error).lower():
        return "it holds no plain array"
    text = (str(error).splitlines() or [""])[0][:100].rstrip(".")
    is_sentence = isinstance(error, (ValueError, EOFError, RuntimeError, MemoryError, zipfile.BadZipFile))
    return text if text and is_sentence else f"{type(error).__name__} {text}".rstrip()


class OutputError(Sentence, OSError):
    """A file that cannot be written; one sentence with its path and the reason."""


def _resolve_links(path: str | Path) -> Path:
    """Return the path without links, so that the file that a link points to is replaced and not the link."""
    return Path(os.path.realpath(path))


def _create_temporary(path: Path) -> tuple[int, Path]:
    """Create a temporary file in the folder of `path`. Returns (its open handle, its path). Raises OutputError."""
    if path.is_dir():
        raise OutputError(f"cannot write {path}: it is a folder; give the name of a file")
    if not path.parent.is_dir():
        raise OutputError(f"cannot write {path}: there is no folder {path.parent}")
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:100]}.", suffix=".tmp")
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}") from None
    return handle, Path(name)


def _is_special(path: Path) -> bool:
    """Return whether `path` is a device or a pipe, such as /dev/stdout, which is written and never replaced."""
    return path.exists() and not path.is_file() and not path.is_dir()


def check_writable(path: str | Path) -> None:
    """Raise OutputError where `replacing(path)` could not write; called before long work."""
    target = _resolve_links(path)
    if _is_special(target):
        return
    handle, temporary = _create_temporary(target)
    os.close(handle)
    temporary.unlink()


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Write `path` atomically: yield a temporary file that replaces `path` at the end and is removed on an error.

    Raises OutputError where it cannot be written, also for an OSError from within.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> with replacing(folder / "a") as temporary:
    ...     _ = temporary.write_text("all of it")
    >>> [(file.name, file.read_text()) for file in folder.iterdir()]
    [('a', 'all of it')]
    """
    target = _resolve_links(path)
    if _is_special(target):
        try:
            yield target
        except OSError as error:
            raise OutputError(f"cannot write {path}: {error.strerror or error}") from None
        return
    handle, temporary = _create_temporary(target)
    os.close(handle)
    try:
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        temporary.replace(target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OutputError(f"cannot write {path}: {error.strerror or error}") from None
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: str | Path, text: str) -> None:
    """Write `text` to `path` atomically. Raises OutputError."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def require_folder(folder: Path) -> None:
    """Raise OutputError where `folder` is not a folder and cannot be made."""
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"cannot write {folder}: it is no folder; give the name of one")
    if not folder.exists() and not folder.absolute().parent.is_dir():
        raise OutputError(f"cannot write {folder}: there is no folder {folder.absolute().parent}")


def make_folder(folder: Path) -> None:
    """Make `folder`, unless it exists. Raises OutputError."""
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot write {folder}: {error.strerror or error}") from None
