"""Names of layers and operators, which may be anything, beside figures; and the error of files that are no reports."""

from __future__ import annotations

NAME, LABEL = 60, 20
"""Characters of a name in a text, and beside an axis."""


class ReportError(ValueError):
    """A file that is no report of a run; one sentence."""


def short(name: str, length: int) -> str:
    """A name of at most `length` characters, never empty.

    >>> short("a" * 30, 5), short("", 5)
    ('aaaa…', '(no name)')
    """
    name = " ".join(name.split())
    return name if 0 < len(name) <= length else f"{name[: length - 1]}…" if name else "(no name)"
