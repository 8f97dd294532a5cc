"""Linear forms of index expressions: offset = constant + sum(coefficient * atom).

Bounds checks, strides, vectorisation and alignment are all decided on these forms, in which equal terms have merged.

In order: element numbers, linear forms, bounds, simplification, and the region of a tensor that loops read.
"""

from __future__ import annotations

from collections.abc import Hashable
from itertools import product
from math import gcd

from celosia.compiler.expr.loops import For, Stmt, exprs, statements
from celosia.compiler.expr.nodes import (
    INDEX,
    Axis,
    Binary,
    Call,
    Cast,
    Const,
    Expr,
    Load,
    Reduce,
    Select,
    Tensor,
    Var,
    depends_on,
    index_binary,
    loaded,
    maximum,
    minimum,
    rewrite,
    strides,
    walk,
)

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


def unravel(extents: tuple[int, ...], element: Expr) -> tuple[Expr, ...]:
    """Turn the row-major number `element` into an index of an array of these extents, the inverse of `flatten`."""
    index = []
    for d, (extent, stride) in enumerate(zip(extents, strides(extents))):
        i = element // stride
        index.append(i % extent if d else i)
    return tuple(index)


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


def join_quotients(terms: Linear) -> Linear:
    """Replace quotient and remainder of a division by the number that is divided, where their coefficients fit.

    >>> i = Axis("i", extent=8)
    >>> {str(k): v for k, v in join_quotients(linear(i // 4 * 8 + i % 4 * 2)).items()}
    {'i': 2}
    """
    joined = dict(terms)
    divisions = [atom for atom in terms if isinstance(atom, Binary) and atom.op in ("floordiv", "mod")]
    for first, second in product(divisions, repeat=2):
        match first, second:
            case Binary("floordiv", a, Const(divisor)), Binary("mod", b, Const(other)) if a is b and divisor == other:
                factor = terms[second]
                if terms[first] == divisor * factor:
                    del joined[first], joined[second]
                    for atom, k in linear(a).items():
                        joined[atom] = joined.get(atom, 0) + k * factor
    return joined


def from_linear(terms: Linear) -> Expr:
    """Build the index expression of a linear form, the inverse of `linear`."""
    total: Expr = Const(0, INDEX)
    for atom, k in terms.items():
        total = index_binary("add", total, Const(k, INDEX) if atom is None else _multiply(atom, k))
    return total


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


def divisor(e: Expr) -> int:
    """Return a number that certainly divides the index `e`, 0 where it is always 0, for the alignment of vectors.

    >>> from celosia.compiler.expr import Axis
    >>> divisor(Axis("i", extent=3) * 8 + 12)
    4
    """
    match e:
        case Const(value):
            return abs(int(value))
        case Axis(extent=1):
            return 0
        case Binary("add" | "sub" | "min" | "max", a, b) | Select(_, a, b):
            return gcd(divisor(a), divisor(b))
        case Binary("mul", a, b):
            return divisor(a) * divisor(b)
    return 1


def simplify_index(e: Expr) -> Expr:
    """Remove needless divisions from an index: (i * 8 + j) // 8 is i where j < 8."""
    return rewrite(e, _without_division)


def _without_division(node: Expr) -> Expr | None:
    """Return the quotient or remainder that a division of indices provably equals, or None."""
    if not isinstance(node, Binary) or node.op not in ("floordiv", "mod") or node.dtype != INDEX:
        return None
    if not isinstance(node.b, Const) or node.b.value <= 0:
        return None
    by = int(node.b.value)
    quotient: Linear = {}
    remainder: Linear = {}
    for atom, k in linear(node.a).items():
        q = k // by if k % by == 0 or atom is None else 0
        if q:
            quotient[atom] = q
        if k - q * by:
            remainder[atom] = k - q * by
    span = interval(from_linear(remainder))
    if span is None or span[0] < 0 or span[1] >= by:
        return None
    return from_linear(quotient if node.op == "floordiv" else remainder)


Region = tuple[tuple[Expr, int], ...]
"""For each dimension of a tensor (first index, number of indices); the first is an expression of the loops around."""


def region(tensor: Tensor, stmt: Stmt) -> Region | None:
    """Return the smallest box that holds all elements of `tensor` that `stmt` reads, or None where it reads none.

    Stage.compute_at needs it: a producer is computed, in each iteration of its consumer's loop, no larger than that.
    An index that a condition keeps from being read may lie outside the tensor; the box never does.
    """
    nodes = [n for s in statements(stmt) for e in exprs(s) if tensor in loaded(e) for n in walk(e)]
    reads = [n for n in nodes if isinstance(n, Load) and n.tensor is tensor]
    if not reads:
        return None
    inside: set[Expr] = {s.var for s in statements(stmt) if isinstance(s, For)}
    inside |= {axis for n in nodes if isinstance(n, Reduce) for axis in n.axes}
    sums = SharedAtoms()
    return tuple(
        _dimension_range(
            [sums(read.index[d]) if len(read.index) == len(tensor.shape) else None for read in reads], size, inside
        )
        for d, size in enumerate(tensor.shape)
    )


def _dimension_range(indices: list[Linear | None], size: int, inside: set[Expr]) -> tuple[Expr, int]:
    """Return (first index, count) of the part of one dimension that `indices` reach over all loops in `inside`.

    size: of the dimension. An index is None where it is an element number. Returns the complete dimension where bounds
    are not known.
    """
    complete: tuple[Expr, int] = Const(0, INDEX), size
    bases: list[Linear] = []
    low, high = [], []
    for terms in indices:
        if terms is None:
            return complete
        base: Linear = {a: k for a, k in terms.items() if a is not None and not any(n in inside for n in walk(a))}
        span = interval(from_linear({a: k for a, k in terms.items() if a not in base}))
        if span is None:
            return complete
        bases.append(base)
        low.append(span[0])
        high.append(span[1])
    if any(base != bases[0] for base in bases):
        spans = [interval(from_linear(base)) for base in bases]
        if any(span is None for span in spans):
            return complete
        low = [a + s[0] for a, s in zip(low, spans) if s is not None]
        high = [b + s[1] for b, s in zip(high, spans) if s is not None]
        bases = [{}]
    first, count = from_linear({**bases[0], None: min(low)}), max(high) - min(low) + 1
    if count >= size:
        return complete
    first_span = interval(first)
    if first_span is None or first_span[0] < 0:
        first = maximum(first, 0)
    if first_span is None or first_span[1] > size - count:
        first = minimum(first, size - count)
    return first, count


class SharedAtoms:
    """Converts index expressions to linear forms whose structurally equal atoms are one object, so that they cancel."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Expr] = {}

    def __call__(self, e: Expr) -> Linear:
        """Return the linear form of `e` over shared atoms."""
        terms: Linear = {}
        for atom, k in linear(e).items():
            shared = None if atom is None else self._known.setdefault(structure(atom), atom)
            terms[shared] = terms.get(shared, 0) + k
        return {atom: k for atom, k in terms.items() if k}

    def difference(self, a: Expr, b: Expr) -> Expr:
        """Return a - b after equal atoms have cancelled."""
        total = self(a)
        for atom, k in self(b).items():
            total[atom] = total.get(atom, 0) - k
        return from_linear({atom: k for atom, k in total.items() if k})


def structure(e: Expr) -> Hashable:
    """Return a hashable key that is equal for expressions of equal structure over the same variables.

    Nodes compare by identity, so two equal indices that were built separately need it to be recognised.
    """
    operands = tuple(structure(child) for child in e.children())
    match e:
        case Var():
            return id(e)
        case Const(value, dtype):
            return value, dtype
        case Binary(op):
            return op, *operands
        case Load(tensor):
            return id(tensor), *operands
        case Call(name, _, dtype):
            return name, dtype, *operands
        case Cast(_, dtype):
            return "cast", dtype, *operands
        case Select():
            return "select", *operands
    return id(e)
