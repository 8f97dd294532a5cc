"""Check that `make test` and `make thorough` together run all cases."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from thorough import one_each, paired, some


def split(parameters: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return the values of cases that `make test` runs, and of those that only `make thorough` runs."""
    kept = [parameter.values for parameter in parameters if not parameter.marks]
    return kept, [parameter.values for parameter in parameters if parameter.marks]


def test_some_cases_are_kept_and_none_is_lost() -> None:
    assert split(some("abc", "ca")) == ([("a",), ("c",)], [("b",)])
    assert split(some([("a", 1), ("b", 2)], [("b", 2)])) == ([("b", 2)], [("a", 1)])
    with pytest.raises(ValueError, match=r"\['d'\]"):
        some("abc", "ad")


def test_the_first_case_of_each_key_is_kept() -> None:
    assert split(one_each(["a1", "b1", "a2"], lambda case: case[0])) == ([("a1",), ("b1",)], [("a2",)])
    assert split(one_each([("a", 1), ("a", 2)], lambda case: case[1])) == ([("a", 1), ("a", 2)], [])
    parameters = [pytest.param("a", 1, id="first"), pytest.param("a", 2, id="second")]
    assert split(one_each(parameters, lambda case: case.values[0])) == ([("a", 1)], [("a", 2)])


@pytest.mark.parametrize("each", [1, 2, 3])
def test_each_row_and_each_column_is_kept(each: int) -> None:
    rows, columns = range(7), "abcde"
    kept, left = split(paired(rows, columns, each))
    assert sorted(kept + left) == [(row, column) for row in rows for column in columns]
    assert [row for row, _ in kept] == [row for row in rows for _ in range(each)]
    assert {column for _, column in kept} == set(columns)


def test_each_case_is_of_one_target() -> None:
    text = Path(__file__).parents[1].joinpath("Makefile").read_text(encoding="utf-8")
    recipes = dict(re.findall(r"^(\w+):.*\n((?:\t.*\n)+)", text, re.MULTILINE))
    assert '-m "not thorough"' in recipes["unit"] and "-m thorough" in recipes["thorough"]
    assert '-m "not rtl and not thorough"' in recipes["check"]
