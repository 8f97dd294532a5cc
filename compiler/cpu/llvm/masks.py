"""Masks of vectors: find the lanes for which a comparison of positions holds.

Each lane's position is one more or less than its neighbour's, so the first lane that differs determines the mask:
vectors of 64-bit positions would take many small registers. In an unrolled loop the mask is a constant.
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
MAX_LANES = 128
"""Limit of the lanes, whose numbers are compared as bytes."""


def position_mask(
    b: Any, op: str, x: Expr, y: Expr, lanes: tuple[Var, int], env: Mapping[Var, V], value: Callable[[Expr], V]
) -> V:
    """Write x < y or x <= y (op lt or le) of positions as a mask; None where neighbouring lanes are not one apart.

    lanes: the vectorised variable and its extent. value: writes an expression that is equal in all lanes.
    """
    var, n = lanes
    difference = linear(y - x if op == "lt" else y - x + 1)  # positive where it holds
    step = difference.pop(var, 0)
    if abs(step) != 1 or n > MAX_LANES or any(depends_on(atom, var) for atom in difference if atom is not None):
        return None
    constants: dict[Var, Expr] = {
        v: Const(atom.constant, INDEX) for v, atom in env.items() if isinstance(atom, ir.Constant)
    }
    rest = from_linear(difference)
    span = interval(substitute(rest, constants))
    if span is not None and span[0] == span[1]:
        return ir.Constant(ir.VectorType(I1, n), [I1(int(span[0] + step * lane > 0)) for lane in range(n)])
    first = b.sub(I64(1), value(rest)) if step == 1 else value(rest)
    for bound, limit in (("smax", 0), ("smin", n)):
        first = operations.intrinsic(b, f"llvm.{bound}", first, I64(limit))
    numbers = ir.Constant(ir.VectorType(I8, n), [I8(lane) for lane in range(n)])
    return b.icmp_unsigned(">=" if step == 1 else "<", numbers, operations.splat(b, b.trunc(first, I8), n))


def constant_lanes(mask: V) -> list[bool] | None:
    """Return the lanes of a constant mask; None for others, and for one bit that all lanes share."""
    lanes = mask.constant if isinstance(mask, ir.Constant) else None
    return [bool(lane.constant) for lane in lanes] if isinstance(lanes, (list, tuple)) else None


def mask_and(b: Any, x: V, y: V) -> V:
    """Return the lanes of both masks."""
    if (first := constant_lanes(x)) is None or (second := constant_lanes(y)) is None:
        return b.and_(x, y)
    return ir.Constant(x.type, [I1(int(p and q)) for p, q in zip(first, second, strict=True)])


def mask_not(b: Any, mask: V) -> V:
    """Return the other lanes."""
    lanes = constant_lanes(mask)
    return b.not_(mask) if lanes is None else ir.Constant(mask.type, [I1(int(not lane)) for lane in lanes])
