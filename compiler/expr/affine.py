"""Linear forms of index expressions: offset = constant + sum(coefficient * atom).

Bounds checks, strides, vectorisation and alignment are all decided on these forms, in which equal terms have merged.
"""

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

Linear = dict[Expr | None, int]
"""A linear form: atom -> coefficient; the key None holds the constant. Atoms: variables, and nodes that are no sums."""


def offset(load: Load) -> Expr:
    """Compute the row-major element number (int64) that `load` reads."""
    return flatten(load.tensor.shape, load.index)


def flatten(shape: tuple[int, ...], index: tuple[Expr, ...]) -> Expr:
    """Turn a multi-dimensional `index` into the row-major element number; a single index is that number already."""
    if len(index) == 1:
        return index[0]
    total: Expr = Const(0, INDEX)
    for i, stride in zip(index, strides(shape), strict=True):
        total = index_binary("add", total, _multiply(i, stride))
    return total


def _multiply(index: Expr, factor: int) -> Expr:
    """Multiply an index by a constant, without a node for a factor of 1."""
    return index if factor == 1 else index_binary("mul", index, Const(factor, INDEX))


def linear(expr: Expr) -> Linear:
    """Rewrite `expr` (int64) as a linear form: atom -> coefficient, with the constant under None.

    >>> i, j = Axis("i", extent=4), Axis("j", extent=8)
    >>> {str(k): v for k, v in linear((i * 8 + j) * 2 + 3).items()}
    {'i': 16, 'j': 2, 'None': 3}
    """
    terms: Linear = {}
    stack = [(expr, 1)]
    while stack:
        e, factor = stack.pop()
        match e:
            case Const(value):
                if value:
                    terms[None] = terms.get(None, 0) + int(value) * factor
            case Binary("add", a, b):
                stack += (b, factor), (a, factor)
            case Binary("sub", a, b):
                stack += (b, -factor), (a, factor)
            case Binary("mul", a, Const(value)) | Binary("mul", Const(value), a):
                stack.append((a, factor * int(value)))
            case _:
                terms[e] = terms.get(e, 0) + factor
    return {atom: k for atom, k in terms.items() if k}


def from_linear(terms: Linear) -> Expr:
    """Build the index expression of a linear form, the inverse of `linear`."""
    total: Expr = Const(0, INDEX)
    for atom, k in terms.items():
        total = index_binary("add", total, Const(k, INDEX) if atom is None else _multiply(atom, k))
    return total


def depends_on(expr: Expr, var: Var) -> bool:
    """Return whether `var` occurs anywhere in `expr`."""
    return any(node is var for node in walk(expr))


def coefficient(terms: Linear, var: Var) -> int | None:
    """Return how much a linear form grows when `var` grows by one, or None where that is not a constant."""
    if any(atom is not None and atom is not var and depends_on(atom, var) for atom in terms):
        return None
    return terms.get(var, 0)


def stride_along(tensor: Tensor, index: tuple[Expr, ...], var: Var) -> int | None:
    """Return the distance in elements between tensor[index] for neighbouring values of `var`; None where it varies.

    Elements with a stride of 1 can be loaded as a vector.
    """
    return coefficient(linear(flatten(tensor.shape, index)), var)


def is_nonnegative(expr: Expr) -> bool:
    """Return whether `expr` is proved to be at least 0. False means unknown, not negative."""
    match expr:
        case Axis():
            return True
        case Const(value):
            return value >= 0
        case Binary("add" | "mul" | "min" | "floordiv", a, b):
            return is_nonnegative(a) and is_nonnegative(b)
        case Binary("max", a, b):
            return is_nonnegative(a) or is_nonnegative(b)
        case Binary("mod", _, b):
            return is_nonnegative(b)
    return False


def unravel(extents: tuple[int, ...], element: Expr) -> tuple[Expr, ...]:
    """Turn the row-major number `element` into an index of an array of these extents, the inverse of `flatten`."""
    index = []
    for d, (extent, stride) in enumerate(zip(extents, strides(extents))):
        i = element // stride
        index.append(i % extent if d else i)
    return tuple(index)


def interval(expr: Expr) -> tuple[int, int] | None:
    """Bound an index by interval arithmetic over the extents of its axes.

    Returns (least, greatest), both inclusive, or None where a part of the expression has no known bound.
    """
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


def is_in_bounds(load: Load) -> bool:
    """Return whether `load` is proved to lie inside its tensor, so that it needs no mask and no clamp."""
    span = interval(offset(load))
    return span is not None and span[0] >= 0 and span[1] < load.tensor.size
