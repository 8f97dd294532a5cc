"""Find inputs of a kernel that may lie in the memory of its output."""

from __future__ import annotations

from collections.abc import Iterator

from celosia.compiler.expr.affine import flatten, linear
from celosia.compiler.expr.loops import For, Function, If, Intrinsic, Stmt, Store, Update, children, exprs
from celosia.compiler.expr.nodes import Expr, Load, Tensor
from celosia.compiler.expr.walk import walk
from celosia.compiler.program.dtypes import itemsize


def overwritable(function: Function, candidates: frozenset[Tensor]) -> tuple[tuple[int, int], ...]:
    """(output, input) numbers such that the kernel may read this input from where it writes this output.

    candidates: inputs that nobody needs afterwards. A pair must have elements of one size, each element of the output
    must be written once, in a statement that reads the input at that element only, and nothing else may read either.
    """
    pairs: list[tuple[int, int]] = []
    for out, y in enumerate(function.outputs):
        for number, x in enumerate(function.inputs):
            if x in candidates and all(number != taken for _, taken in pairs) and _same_places(function, x, y):
                pairs.append((out, number))
                break
    return tuple(pairs)


def _same_places(function: Function, x: Tensor, y: Tensor) -> bool:
    if (x.size, itemsize(x.dtype)) != (y.size, itemsize(y.dtype)):
        return False
    written = 0
    for stmt, times in _statements(function.body):
        if isinstance(stmt, Intrinsic) or (isinstance(stmt, Update) and stmt.tensor is y):
            return False
        reads = list(_reads(exprs(stmt), x))
        if any(True for _ in _reads(exprs(stmt), y)):
            return False
        if isinstance(stmt, Store) and stmt.tensor is y:
            if times is None:
                return False
            written += times
            here = linear(flatten(y.shape, stmt.index))
            if any(linear(flatten(x.shape, read.index)) != here for read in reads):
                return False
        elif reads:
            return False
    return written == y.size


def _statements(stmt: Stmt, times: int | None = 1) -> Iterator[tuple[Stmt, int | None]]:
    """Every statement, with how often it runs; None where that is not known."""
    yield stmt, times
    inside = times
    if isinstance(stmt, For) and times is not None:
        inside = times * stmt.extent
    if isinstance(stmt, If):
        inside = None
    for child in children(stmt):
        yield from _statements(child, inside)


def _reads(values: tuple[Expr, ...], tensor: Tensor) -> Iterator[Load]:
    for value in values:
        yield from (node for node in walk(value) if isinstance(node, Load) and node.tensor is tensor)
