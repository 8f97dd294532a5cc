"""What `make test` leaves to `make thorough`: of a test's many cases those that go other ways than the rest in no part.

What is marked so has siblings that are not: no feature is guarded by `make thorough` alone.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from typing import Any

import pytest

FACTOR = float(os.environ.get("CELOSIA_EXAMPLES", "0.3"))
"""Factor on the number of examples of property tests, and of rounds of random tests; `make thorough` sets 5."""


def tries(examples: int) -> int:
    """Scale the examples of a property test, or the rounds of a random test, by FACTOR. At least one is left."""
    return max(1, round(examples * FACTOR))


def some(cases: Iterable[Any], kept: Collection[Any]) -> list[Any]:
    """All `cases` as parameters, of which `make test` runs those in `kept`. ValueError where one of these is none."""
    listed = list(cases)
    if strange := [case for case in kept if case not in listed]:
        raise ValueError(f"{strange} are not among the cases {listed}")
    return [_parameter(case if isinstance(case, tuple) else (case,), case in kept) for case in listed]


def paired(rows: Iterable[Any], columns: Iterable[Any], each: int = 1) -> list[Any]:
    """All pairs as parameters, of which `make test` runs `each` of a row's, with columns in turn."""
    names = list(columns)
    found = []
    for number, row in enumerate(rows):
        kept = {(number * each + step) % len(names) for step in range(each)}
        found += [_parameter((row, column), place in kept) for place, column in enumerate(names)]
    return found


def _parameter(values: tuple[Any, ...], kept: bool) -> Any:
    return pytest.param(*values, marks=[] if kept else pytest.mark.thorough)
