"""Parse the time that a search may take."""

from __future__ import annotations

import re

from celosia.plain import Sentence

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
"""Seconds of each unit of time."""


class BudgetError(Sentence, ValueError):
    """A budget that is no time, or not enough. The message is one sentence."""


def seconds(text: str | float) -> float:
    """Parse "90", "90s", "30m" or "1.5h", or a number of seconds. BudgetError.

    >>> seconds("30m"), seconds("90"), seconds("1.5h"), seconds(2)
    (1800.0, 90.0, 5400.0, 2.0)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", str(text).strip())
    if match is None:
        raise BudgetError(f"{str(text)!r} is no time; write it as 90s, 30m or 2h")
    return float(match[1]) * UNITS[match[2] or "s"]
