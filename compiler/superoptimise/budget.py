"""Parse how long a search may take."""

from __future__ import annotations

import re

from celosia.plain import Sentence

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


class BudgetError(Sentence, ValueError):
    """A time that is none; one sentence."""


def seconds(text: str | float) -> float:
    """Parse "90", "90s", "30m" or "1.5h", or a number of seconds. BudgetError.

    >>> seconds("30m"), seconds("90"), seconds("1.5h"), seconds(2)
    (1800.0, 90.0, 5400.0, 2.0)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", str(text).strip())
    if found is None:
        raise BudgetError(f"{str(text)!r} is no time; write it as 90s, 30m or 2h")
    return float(found[1]) * UNITS[found[2] or "s"]
