"""Sums of sizes in one form, so that equal ones look alike."""

from __future__ import annotations

from typing import Any

from celosia.compiler.superoptimise.sizes import Dim, SizeOf

Sum = dict[Dim, int]
"""Coefficients; that of 1 is the number that is added."""


def linear(dim: Dim) -> Sum:
    """`dim` as a sum of what is no sum."""
    if isinstance(dim, int):
        return {1: dim} if dim else {}
    if isinstance(dim, SizeOf) and dim.operation in "+-":
        sign = 1 if dim.operation == "+" else -1
        found = linear(dim.left)
        for atom, factor in linear(dim.right).items():
            found[atom] = found.get(atom, 0) + sign * factor
        return {atom: factor for atom, factor in found.items() if factor}
    if isinstance(dim, SizeOf) and dim.operation == "*" and isinstance(dim.left, int):
        factor = dim.left
        return {atom: factor * own for atom, own in linear(dim.right).items() if factor}
    return {dim: 1}


def plain(dim: Any) -> Any:
    """`dim`, or each of a tuple, in the one form; what is no size as it is.

    >>> from celosia.compiler.superoptimise.sizes import OpenSize
    >>> c, d = OpenSize("c"), OpenSize("d")
    >>> str(plain(d + c - d)), str(plain(d + c)), plain(c - c)
    ('c', '(c + d)', 0)
    """
    if isinstance(dim, tuple):
        return tuple(map(plain, dim))
    if not isinstance(dim, SizeOf) or dim.operation not in ("+", "-", "*"):
        return dim
    terms = sorted(linear(dim).items(), key=lambda each: (each[1] < 0, isinstance(each[0], int), str(each[0])))
    found: Any = None
    for atom, factor in terms:
        size = abs(factor) if atom == 1 else atom if abs(factor) == 1 else SizeOf("*", abs(factor), atom)
        if found is None:
            found = size if factor > 0 else SizeOf("-", 0, size)
        else:
            found = SizeOf("+" if factor > 0 else "-", found, size)
    return 0 if found is None else found
