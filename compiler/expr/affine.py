"""Index expressions as sums: offset = const + sum(coefficient * atom)."""

from __future__ import annotations

from celosia.compiler.expr.nodes import (
    INDEX,
    Axis,
    Binary,
    Const,
    Expr,
    Load,
    Select,
    Tensor,
    Var,
    index_binary,
    strides,
)
from celosia.compiler.expr.walk import walk

# Atom -> coefficient; the key None holds the constant. Atoms are variables, or nodes that are not sums.
Linear = dict[Expr | None, int]


def offset(load: Load) -> Expr:
    """The row-major element number that `load` reads."""
    return flatten(load.tensor.shape, load.index)


def flatten(shape: tuple[int, ...], index: tuple[Expr, ...]) -> Expr:
    """The row-major element number of `index`; one index is taken for that number."""
    if len(index) == 1:
        return index[0]
    total: Expr = Const(0, INDEX)
    for i, stride in zip(index, strides(shape), strict=True):
        total = index_binary("add", total, _times(i, stride))
    return total


def _times(index: Expr, factor: int) -> Expr:
    return index if factor == 1 else index_binary("mul", index, Const(factor, INDEX))


def linear(expr: Expr) -> Linear:
    """`expr` (int64) as a sum.

    >>> i, j = Axis("i", extent=4), Axis("j", extent=8)
    >>> {str(k): v for k, v in linear((i * 8 + j) * 2 + 3).items()}
    {'i': 16, 'j': 2, 'None': 3}
    """
    out: Linear = {}
    left = [(expr, 1)]
    while left:
        e, factor = left.pop()
        match e:
            case Const(value):
                if value:
                    out[None] = out.get(None, 0) + int(value) * factor
            case Binary("add", a, b):
                left += (b, factor), (a, factor)
            case Binary("sub", a, b):
                left += (b, -factor), (a, factor)
            case Binary("mul", a, Const(value)) | Binary("mul", Const(value), a):
                left.append((a, factor * int(value)))
            case _:
                out[e] = out.get(e, 0) + factor
    return {atom: k for atom, k in out.items() if k}


def from_linear(terms: Linear) -> Expr:
    """The expression that a sum stands for."""
    total: Expr = Const(0, INDEX)
    for atom, k in terms.items():
        total = index_binary("add", total, Const(k, INDEX) if atom is None else _times(atom, k))
    return total


def depends(expr: Expr, var: Var) -> bool:
    """Whether `var` is somewhere in `expr`."""
    return any(node is var for node in walk(expr))


def coefficient(terms: Linear, var: Var) -> int | None:
    """By how much the sum grows when `var` grows by one; None where that is not a constant."""
    if any(atom is not None and atom is not var and depends(atom, var) for atom in terms):
        return None
    return terms.get(var, 0)


def stride_along(tensor: Tensor, index: tuple[Expr, ...], var: Var) -> int | None:
    """How far apart in memory are the elements for neighbours along `var`; None where that varies."""
    return coefficient(linear(flatten(tensor.shape, index)), var)


def nonnegative(expr: Expr) -> bool:
    """Whether `expr` is certainly at least 0."""
    match expr:
        case Axis():
            return True
        case Const(value):
            return value >= 0
        case Binary("add" | "mul" | "min" | "floordiv", a, b):
            return nonnegative(a) and nonnegative(b)
        case Binary("max", a, b):
            return nonnegative(a) or nonnegative(b)
        case Binary("mod", _, b):
            return nonnegative(b)
    return False


def unravel(extents: tuple[int, ...], number: Expr) -> tuple[Expr, ...]:
    """The index of row-major element `number` in an array of these extents."""
    index = []
    for d, (extent, stride) in enumerate(zip(extents, strides(extents))):
        i = number // stride
        index.append(i % extent if d else i)
    return tuple(index)


def interval(expr: Expr) -> tuple[int, int] | None:
    """The least and the greatest value of an index, where it follows from the extents of axes."""
    match expr:
        case Const(value):
            return int(value), int(value)
        case Axis(extent=extent):
            return 0, max(extent - 1, 0)
        case Binary(op, a, b) if (x := interval(a)) is not None and (y := interval(b)) is not None:
            match op:
                case "add":
                    return x[0] + y[0], x[1] + y[1]
                case "sub":
                    return x[0] - y[1], x[1] - y[0]
                case "mul":
                    ends = [p * q for p in x for q in y]
                    return min(ends), max(ends)
                case "min":
                    return min(x[0], y[0]), min(x[1], y[1])
                case "max":
                    return max(x[0], y[0]), max(x[1], y[1])
                case "floordiv" if y[0] == y[1] > 0:
                    return x[0] // y[0], x[1] // y[0]
                case "mod" if y[0] == y[1] > 0:
                    return (x[0], x[1]) if x[0] >= 0 and x[1] < y[0] else (0, y[0] - 1)
        case Binary("max", Binary("min", _, Const(high)), Const(low)) if low <= high:
            return int(low), int(high)
        case Binary(op="mod", b=Const(value)) if value > 0:
            return 0, int(value) - 1
        case Select(_, a, b) if (x := interval(a)) is not None and (y := interval(b)) is not None:
            return min(x[0], y[0]), max(x[1], y[1])
    return None


def in_range(load: Load) -> bool:
    """Whether `load` is certainly inside its tensor."""
    found = interval(offset(load))
    return found is not None and found[0] >= 0 and found[1] < load.tensor.size
