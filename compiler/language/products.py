"""Loops of products, with accumulators in registers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from celosia.compiler.cpu.target import target
from celosia.compiler.expr import Alloc, Axis, Expr, For, Load, Stmt, Tensor, Update, wrap
from celosia.compiler.expr import Store as Put
from celosia.compiler.expr.loops import block

Element = Callable[[Expr, Expr], Expr]
ROWS, VECTORS = 4, 4
"""Rows, and vectors of columns, of the accumulators of a product that are in registers."""


def nest(shape: Sequence[int], body: Callable[..., Stmt]) -> Stmt:
    """Loops over all of `shape` around body(*index)."""
    axes = [Axis(f"i{d}", extent=size) for d, size in enumerate(shape)]
    return loops_over(axes, body(*axes))


def loops_over(axes: Sequence[Axis], stmt: Stmt) -> Stmt:
    """Loops over `axes` around `stmt`."""
    for axis in reversed(axes):
        stmt = For(axis, axis.extent, stmt)
    return stmt


def product(acc: Tensor, fresh: bool, a: Element, b: Element, m: int, n: int, k: int) -> Iterator[Stmt]:
    """acc [m, n] += a [m, k] · b [k, n], or = where it is fresh, in tiles of accumulators that stay in registers."""
    lanes = target().lanes(acc.dtype)
    for column, columns, width in _cut(n, VECTORS * lanes):
        for row, rows, height in _cut(m, ROWS):
            i, j = (Axis(name, extent=count) for name, count in (("i", rows), ("j", columns)))
            top, left = i * height + row, j * width + column
            yield For(j, columns, For(i, rows, _registers(acc, fresh, a, b, k, lanes, top, left, height, width)))


def _cut(size: int, step: int) -> Iterator[tuple[int, int, int]]:
    """(first, count, size) of the equal tiles, and of the rest."""
    if size >= step:
        yield 0, size // step, step
    if size % step:
        yield size - size % step, 1, size % step


def _registers(
    acc: Tensor, fresh: bool, a: Element, b: Element, k: int, lanes: int, top: Expr, left: Expr, height: int, width: int
) -> Stmt:  # fmt: skip
    tile = Tensor("r", (height, width), acc.dtype)
    step, zero = Axis("k", extent=k), wrap(0, acc.dtype)

    def each(body: Callable[[Expr, Expr], Stmt]) -> Stmt:
        """All of the tile, written out."""
        rows = Axis("u", extent=height)
        parts = []
        for first, count, size in _cut(width, lanes):
            vector, lane = Axis("v", extent=count), Axis("l", extent=size)
            inner = For(lane, size, body(rows, vector * size + lane + first), "vectorized")
            parts.append(For(rows, height, For(vector, count, inner, "unrolled"), "unrolled"))
        return block(*parts)

    return Alloc(
        tile,
        block(
            each(lambda u, v: Put(tile, (u, v), zero if fresh else Load(acc, (top + u, left + v)))),
            For(
                step,
                k,
                each(lambda u, v: Update("sum", tile, (u, v), a(top + u, step) * b(step, left + v))),
            ),
            each(lambda u, v: Put(acc, (top + u, left + v), Load(tile, (u, v)))),
        ),
        "local",
    )
