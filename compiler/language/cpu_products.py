"""Loop nests of a kernel on the CPU; products get the compiler's own schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from celosia.compiler import expr as T
from celosia.compiler.cpu.schedule.vectorize import Knobs, schedule
from celosia.compiler.expr import Axis, Expr, For, Stmt, Tensor, lower, wrap
from celosia.compiler.expr.loops import map_accesses
from celosia.compiler.ops.integer import Zero, matrix_product

Element = Callable[[Expr, Expr], Expr]


def nest(shape: Sequence[int], body: Callable[..., Stmt]) -> Stmt:
    """Wrap body(*index) in loops over all of `shape`."""
    axes = [Axis(f"i{d}", extent=size) for d, size in enumerate(shape)]
    return loops_over(axes, body(*axes))


def loops_over(axes: Sequence[Axis], stmt: Stmt) -> Stmt:
    """Wrap `stmt` in loops over `axes`."""
    for axis in reversed(axes):
        stmt = For(axis, axis.extent, stmt)
    return stmt


def product(into: Tensor, overwrite: bool, a: Element, b: Element, steps: int, zeros: tuple[int, int]) -> Stmt:
    """Compute into [m, n] += (a [m, k] - za) · (b [k, n] - zb), or = with `overwrite`.

    zeros: za and zb, 0 unless int8.
    """
    m, n = into.shape

    def finish(total: Expr, index: tuple[Expr, ...]) -> Expr:
        return total if overwrite else into[index] + total

    left, right = T.compute((m, steps), a, "a"), T.compute((steps, n), b, "b")
    if left.dtype == "int8":
        za, zb = (wrap(zero, "int32") for zero in (zeros[0] + 128, zeros[1]))
        result = matrix_product(left, right, za, Zero(lambda _: zb, none=not zeros[1]), finish)
    else:
        k = T.reduce_axis(steps, "k")
        result = T.compute((m, n), lambda i, j: finish(T.sum(a(i, k) * b(k, j), k), (i, j)), "product")
    result = replace(result, name="into.sums")  # no array has such a name
    scheduled = schedule((result,), {result.name: Knobs(tail="peel")})
    (result,) = scheduled.outputs
    return map_accesses(lower(scheduled).body, lambda _: None, lambda t, i: (into if t is result else t, i))
