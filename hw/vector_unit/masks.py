"""Masks with a given number of ones, made of logic: a comparison or a difference would be a carry chain each."""

from __future__ import annotations

from amaranth import Cat, Value


def ones(number: Value) -> Value:
    """Return a mask of `number` ones, from the lowest bit on: bit i is set if `number` is more than i.

    number: unsigned, of a few bits.
    """
    end = 1 << len(number)
    return Cat(Cat(number == value for value in range(first, end)).any() for first in range(1, end))
