"""Errors of kernels that the language cannot take."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NoReturn

from celosia.plain import Sentences

FOLDER = str(Path(__file__).parent)


class LanguageError(Sentences, ValueError):
    """A kernel that the language, or the target, cannot take; the message begins with file and line of the kernel."""


def where() -> str:
    """File and line of the kernel's own code that is running."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(FOLDER):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def fail(sentence: str, at: str | None = None) -> NoReturn:
    """LanguageError, at the line of the kernel that is being run, or `at`."""
    raise LanguageError(f"{at or where()}: {sentence}")
