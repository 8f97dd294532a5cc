"""Select the test cases that `make test` leaves to `make thorough`.

A case that is left to `make thorough` takes the same paths as cases in `make test`. So `make test` covers each feature.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Hashable, Iterable
from typing import Any

import pytest
from _pytest.mark import ParameterSet

FACTOR = float(os.environ.get("CELOSIA_EXAMPLES", "0.3"))
"""Factor on the examples of property tests and on the rounds of random tests; `make thorough` sets 5."""


def tries(examples: int) -> int:
    """Scale the examples of a property test, or the rounds of a random test, by FACTOR, to at least 1."""
    return max(1, round(examples * FACTOR))


def some(cases: Iterable[Any], kept: Collection[Any]) -> list[Any]:
    """Return all `cases` as pytest parameters; `make test` runs only those in `kept`.

    Raise ValueError if an element of `kept` is not among the cases.
    """
    listed = list(cases)
    if unknown := [case for case in kept if case not in listed]:
        raise ValueError(f"{unknown} are not among the cases {listed}")
    return [_parameter(case if isinstance(case, tuple) else (case,), case in kept) for case in listed]


def one_each(cases: Iterable[Any], key: Callable[[Any], Hashable]) -> list[Any]:
    """Return all `cases` as pytest parameters; `make test` runs the first case of each `key`.

    A case is a value, a tuple of values, or a pytest parameter without marks.
    """
    keys = set[Hashable]()
    parameters = []
    for case in cases:
        kept = key(case) not in keys
        keys.add(key(case))
        if isinstance(case, ParameterSet):
            parameters.append(case if kept else case._replace(marks=[pytest.mark.thorough]))
        else:
            parameters.append(_parameter(case if isinstance(case, tuple) else (case,), kept))
    return parameters


def paired(rows: Iterable[Any], columns: Iterable[Any], each: int = 1) -> list[Any]:
    """Return all pairs (row, column) as pytest parameters; `make test` runs `each` pairs of every row.

    Successive rows take successive columns.
    """
    names = list(columns)
    parameters = []
    for number, row in enumerate(rows):
        kept = {(number * each + step) % len(names) for step in range(each)}
        parameters += [_parameter((row, column), place in kept) for place, column in enumerate(names)]
    return parameters


def _parameter(values: tuple[Any, ...], kept: bool) -> Any:
    return pytest.param(*values, marks=[] if kept else pytest.mark.thorough)
