"""Errors of kernels, with the line of the kernel."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NoReturn

from celosia.plain import Sentences

FOLDER = str(Path(__file__).parent)
"""Folder of the language's own code, whose lines errors do not name."""


class LanguageError(Sentences, ValueError):
    """A kernel that the language or the target cannot run; the message begins with file and line of the kernel."""


def kernel_line() -> str:
    """Return "file:line" of the kernel that is running: the innermost frame outside of this folder."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(FOLDER):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def fail(sentence: str, at: str | None = None) -> NoReturn:
    """Raise LanguageError at the line of the kernel that is running, or `at`."""
    raise LanguageError(f"{at or kernel_line()}: {sentence}")
