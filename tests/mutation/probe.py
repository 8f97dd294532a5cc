"""What a planted statement calls when it runs."""

from __future__ import annotations

import os
from pathlib import Path

REACHED = "MUTANTS_REACHED"
"""Names the file that tells the campaign that a check has run the statement."""
_ran = False


def reached() -> None:
    """Note that the statement with the mutant has run."""
    global _ran
    _ran = True
    Path(os.environ[REACHED]).touch()


def forget() -> None:
    """Begin another component."""
    global _ran
    _ran = False


def was_reached() -> bool:
    """Whether it has run in this process since `forget`."""
    return _ran
