"""In-place kernels: find inputs whose memory the output may overwrite."""

from __future__ import annotations

from collections.abc import Iterator

from celosia.compiler.expr.affine import flatten, linear
from celosia.compiler.expr.loops import For, Function, If, Intrinsic, Stmt, Store, Update, children, exprs
from celosia.compiler.expr.nodes import Expr, Load, Tensor
from celosia.compiler.expr.walk import walk
from celosia.compiler.program.dtypes import itemsize


def in_place_pairs(function: Function, candidates: frozenset[Tensor]) -> tuple[tuple[int, int], ...]:
    """Return pairs of positions (output, input) that may share memory.

    candidates: inputs that nothing reads afterwards. Both tensors must have the same size and element size; each
    element of the output must be written once, by a statement that reads of the input that element only; nothing else
    may read either.
    """
    pairs: list[tuple[int, int]] = []
    for output, y in enumerate(function.outputs):
        for position, x in enumerate(function.inputs):
            if x in candidates and all(position != used for _, used in pairs) and _can_overwrite(function, x, y):
                pairs.append((output, position))
                break
    return tuple(pairs)


def _can_overwrite(function: Function, x: Tensor, y: Tensor) -> bool:
    """Return whether every store to `y` reads only the same element of `x`, and nothing else reads either."""
    if (x.size, itemsize(x.dtype)) != (y.size, itemsize(y.dtype)):
        return False
    written = 0
    for stmt, runs in _statements(function.body):
        if isinstance(stmt, Intrinsic) or (isinstance(stmt, Update) and stmt.tensor is y):
            return False
        reads = list(_reads(exprs(stmt), x))
        if any(True for _ in _reads(exprs(stmt), y)):
            return False
        if isinstance(stmt, Store) and stmt.tensor is y:
            if runs is None:
                return False
            written += runs
            element = linear(flatten(y.shape, stmt.index))
            if any(linear(flatten(x.shape, read.index)) != element for read in reads):
                return False
        elif reads:
            return False
    return written == y.size


def _statements(stmt: Stmt, times: int | None = 1) -> Iterator[tuple[Stmt, int | None]]:
    """Yield every statement with the number of its runs, None where a condition decides."""
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
