"""Masks with a given number of ones, from look-up tables instead of the carry chains of comparisons."""

from __future__ import annotations

from amaranth import Cat, Value


def ones(number: Value) -> Value:
    """Return a mask whose lowest `number` bits are 1: bit i is set if `number` is greater than i.

    number: unsigned, of a few bits.
    """
    end = 1 << len(number)
    return Cat(Cat(number == value for value in range(position, end)).any() for position in range(1, end))
