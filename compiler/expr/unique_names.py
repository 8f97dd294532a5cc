"""Unique names for tensors, nodes and kernels."""

from __future__ import annotations


def unused_name(base: str, used: set[str]) -> str:
    """Return `base`, with a number appended where it is already in `used`, and add the result to `used`.

    >>> unused_name("x", {"x", "x_1"})
    'x_2'
    """
    name, suffix = base, 0
    while name in used:
        suffix += 1
        name = f"{base}_{suffix}"
    used.add(name)
    return name
