"""Names that nothing else has."""

from __future__ import annotations


def unused_name(wanted: str, taken: set[str]) -> str:
    """`wanted`, or what is made of it so that it is not in `taken`, to which it is added.

    >>> unused_name("x", {"x", "x_1"})
    'x_2'
    """
    name, number = wanted, 0
    while name in taken:
        number += 1
        name = f"{wanted}_{number}"
    taken.add(name)
    return name
