"""Find the lanes of a vector that a comparison of positions holds for, where each lane's is one beside that of its
neighbour.

Found from the number of the first lane that differs: vectors of 64-bit positions are many where registers are small.
Where the number is known, in a loop that is written out, so is the mask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from llvmlite import ir

from celosia.compiler.cpu.llvm import operations
from celosia.compiler.expr.affine import depends_on, from_linear, interval, linear
from celosia.compiler.expr.nodes import INDEX, Const, Expr, Var
from celosia.compiler.expr.walk import substitute

V = Any
I1, I8, I64 = ir.IntType(1), ir.IntType(8), ir.IntType(64)
MOST_LANES = 128
"""Whose numbers are compared as bytes."""


def compared(
    b: Any, op: str, x: Expr, y: Expr, lanes: tuple[Var, int], env: Mapping[Var, V], value: Callable[[Expr], V]
) -> V:
    """x < y or x <= y, op being lt or le, of positions; `lanes`: the variable and how many. value: writes what is the
    same for all. None where lanes do not lie beside each other."""
    var, n = lanes
    apart = linear(y - x if op == "lt" else y - x + 1)  # positive where it holds
    step = apart.pop(var, 0)
    if abs(step) != 1 or n > MOST_LANES or any(depends_on(each, var) for each in apart if each is not None):
        return None
    known: dict[Var, Expr] = {
        v: Const(each.constant, INDEX) for v, each in env.items() if isinstance(each, ir.Constant)
    }
    rest = from_linear(apart)
    span = interval(substitute(rest, known))
    if span is not None and span[0] == span[1]:
        return ir.Constant(ir.VectorType(I1, n), [I1(int(span[0] + step * lane > 0)) for lane in range(n)])
    first = b.sub(I64(1), value(rest)) if step == 1 else value(rest)
    for bound, limit in (("smax", 0), ("smin", n)):
        first = operations.intrinsic(b, f"llvm.{bound}", first, I64(limit))
    numbers = ir.Constant(ir.VectorType(I8, n), [I8(lane) for lane in range(n)])
    return b.icmp_unsigned(">=" if step == 1 else "<", numbers, operations.splat(b, b.trunc(first, I8), n))


def fixed(mask: V) -> list[bool] | None:
    """The lanes of a mask that is known; None for one that is not, or is one bit for all lanes."""
    lanes = mask.constant if isinstance(mask, ir.Constant) else None
    return [bool(lane.constant) for lane in lanes] if isinstance(lanes, (list, tuple)) else None


def both(b: Any, x: V, y: V) -> V:
    """Lanes of both masks."""
    if (first := fixed(x)) is None or (second := fixed(y)) is None:
        return b.and_(x, y)
    return ir.Constant(x.type, [I1(int(p and q)) for p, q in zip(first, second, strict=True)])


def inverse(b: Any, mask: V) -> V:
    """The other lanes."""
    lanes = fixed(mask)
    return b.not_(mask) if lanes is None else ir.Constant(mask.type, [I1(int(not lane)) for lane in lanes])
