"""Functions that a planted statement calls when it runs."""

from __future__ import annotations

import os
from pathlib import Path

REACHED = "MUTANTS_REACHED"
"""Environment variable with the path of a file that exists once a check has run the statement."""
_ran = False


def reached() -> None:
    """Record that the statement with the mutant has run."""
    global _ran
    _ran = True
    Path(os.environ[REACHED]).touch()


def forget() -> None:
    """Reset the record, for another component."""
    global _ran
    _ran = False


def was_reached() -> bool:
    """Return True if the statement has run in this process since `forget`."""
    return _ran
