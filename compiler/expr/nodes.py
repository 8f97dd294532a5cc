"""Expression nodes and tensors: the language in which an operator defines what it computes.

In order: the nodes, Tensor, functions that build nodes, functions that traverse and rewrite them.

Every node is frozen and compared by identity, so a shared sub-expression is one object and renderers may remember it.
Element types are numpy names ("float32", "int8", "bool", ...). Index arithmetic is int64.

>>> from celosia.compiler.expr import placeholder, compute
>>> a = placeholder((4,), "float32", "a")
>>> b = compute((4,), lambda i: a[i] * 2.0 + 1.0, "b")
>>> print(b.body)
((a[i0] * 2.0) + 1.0)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import singledispatch
from math import prod
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.expr.math_functions import ARITY, RESULTS
from celosia.compiler.program.dtypes import itemsize

INDEX = "int64"
"""Element type of indices."""

ARITHMETIC = ("add", "sub", "mul", "div", "floordiv", "mod", "min", "max", "and", "or", "xor", "shl", "shr", "pow")
"""Operations of Binary whose result has the type of the operands."""
COMPARISONS = ("lt", "le", "eq", "ne")
"""Operations of Binary whose result is bool."""


def is_float(dtype: str) -> bool:
    """Return whether the element type `dtype` is a float."""
    return dtype.startswith(("float", "bfloat"))


@singledispatch
def text(node: object) -> str:
    """Return `node` as text. loop_text.py registers the implementations."""
    raise TypeError(f"{type(node).__name__} has no text")


class Expr:
    """A scalar value of type `dtype`.

    Python's operators on it build larger expressions; a Python number takes the type of the other operand.
    """

    dtype: str

    def children(self) -> tuple[Expr, ...]:
        """Return the operands, in order."""
        return ()

    def rebuild(self, children: tuple[Expr, ...]) -> Expr:
        """Return this node over other operands."""
        return self

    def astype(self, dtype: str) -> Expr:
        """Convert to `dtype`; see Cast."""
        return cast(self, dtype)

    def __add__(self, other: Value) -> Expr:
        return binary("add", self, other)

    def __radd__(self, other: Value) -> Expr:
        return binary("add", other, self)

    def __sub__(self, other: Value) -> Expr:
        return binary("sub", self, other)

    def __rsub__(self, other: Value) -> Expr:
        return binary("sub", other, self)

    def __mul__(self, other: Value) -> Expr:
        return binary("mul", self, other)

    def __rmul__(self, other: Value) -> Expr:
        return binary("mul", other, self)

    def __truediv__(self, other: Value) -> Expr:
        return binary("div", self, other)

    def __rtruediv__(self, other: Value) -> Expr:
        return binary("div", other, self)

    def __floordiv__(self, other: Value) -> Expr:
        return binary("floordiv", self, other)

    def __mod__(self, other: Value) -> Expr:
        return binary("mod", self, other)

    def __and__(self, other: Value) -> Expr:
        return binary("and", self, other)

    def __or__(self, other: Value) -> Expr:
        return binary("or", self, other)

    def __xor__(self, other: Value) -> Expr:
        return binary("xor", self, other)

    def __lshift__(self, other: Value) -> Expr:
        return binary("shl", self, other)

    def __rshift__(self, other: Value) -> Expr:
        return binary("shr", self, other)

    def __lt__(self, other: Value) -> Expr:
        return binary("lt", self, other)

    def __le__(self, other: Value) -> Expr:
        return binary("le", self, other)

    def __gt__(self, other: Value) -> Expr:
        return binary("lt", other, self)

    def __ge__(self, other: Value) -> Expr:
        return binary("le", other, self)

    def __neg__(self) -> Expr:
        return binary("mul", self, -1) if is_float(self.dtype) else binary("sub", 0, self)

    def __bool__(self) -> bool:
        raise TypeError(
            f"{self} is an expression, not a truth value; write select for `if`, equal for `==`, all for `and`"
        )

    def __str__(self) -> str:
        return text(self)


Value = Expr | int | float | bool
"""Operand of a function that builds expressions; `wrap` converts a number to a Const."""


@dataclass(frozen=True, eq=False)
class Const(Expr):
    """A constant of type `dtype`."""

    value: int | float | bool
    dtype: str


@dataclass(frozen=True, eq=False)
class Var(Expr):
    """A scalar variable that a loop, a Let or the kernel's parameters bind."""

    name: str
    dtype: str = INDEX


@dataclass(frozen=True, eq=False)
class Axis(Var):
    """An index that runs over range(extent). reduce: it belongs to a reduction, not to the elements of the result."""

    extent: int = 1
    reduce: bool = False


@dataclass(frozen=True, eq=False)
class Load(Expr):
    """Element tensor[index]. One index into a tensor of any rank is the row-major element number."""

    tensor: Tensor
    index: tuple[Expr, ...]

    @property
    def dtype(self) -> str:  # type: ignore[override]
        return self.tensor.dtype

    def children(self) -> tuple[Expr, ...]:
        return self.index

    def rebuild(self, children: tuple[Expr, ...]) -> Expr:
        return Load(self.tensor, children)


@dataclass(frozen=True, eq=False)
class Binary(Expr):
    """An operation of ARITHMETIC or COMPARISONS (whose result is bool) on two values of one type.

    floordiv and mod round towards minus infinity; div on integers towards zero; integers wrap.
    """

    op: str
    a: Expr
    b: Expr

    @property
    def dtype(self) -> str:  # type: ignore[override]
        return "bool" if self.op in COMPARISONS else self.a.dtype

    def children(self) -> tuple[Expr, ...]:
        return self.a, self.b

    def rebuild(self, children: tuple[Expr, ...]) -> Expr:
        return binary(self.op, *children)


@dataclass(frozen=True, eq=False)
class Call(Expr):
    """Call of an intrinsic function, whose result has type `dtype`.

    name: one of math_functions.INTRINSICS, or `erf(x)`, `fma(a, b, c)`, `bitcast(x)`, `clamp(x, low, high)`. fma is
    a * b + c with one rounding. clamp turns NaN into low, as the x86 instructions do.
    """

    name: str
    args: tuple[Expr, ...]
    dtype: str

    def children(self) -> tuple[Expr, ...]:
        return self.args

    def rebuild(self, children: tuple[Expr, ...]) -> Expr:
        return Call(self.name, children, self.dtype)


@dataclass(frozen=True, eq=False)
class Cast(Expr):
    """Conversion as in C: float to integer towards zero (saturating where C leaves it undefined), integers wrap."""

    value: Expr
    dtype: str

    def children(self) -> tuple[Expr, ...]:
        return (self.value,)

    def rebuild(self, children: tuple[Expr, ...]) -> Expr:
        return cast(children[0], self.dtype)


@dataclass(frozen=True, eq=False)
class Select(Expr):
    """Conditional value: `a` where cond, else `b`. The other arm is not evaluated, so its loads may be out of range."""

    cond: Expr
    a: Expr
    b: Expr

    @property
    def dtype(self) -> str:  # type: ignore[override]
        return self.a.dtype

    def children(self) -> tuple[Expr, ...]:
        return self.cond, self.a, self.b

    def rebuild(self, children: tuple[Expr, ...]) -> Expr:
        return select(*children)


@dataclass(frozen=True, eq=False)
class Reduce(Expr):
    """Reduction of `value` over all points of `axes`: ordered_sum in their order, other kinds in any order.

    COMBINE: the Binary operation of each kind.
    """

    COMBINE: ClassVar[dict[str, str]] = {
        "sum": "add", "ordered_sum": "add", "prod": "mul", "max": "max", "min": "min"
    }  # fmt: skip
    kind: str
    value: Expr
    axes: tuple[Axis, ...]

    @property
    def dtype(self) -> str:  # type: ignore[override]
        return self.value.dtype

    def children(self) -> tuple[Expr, ...]:
        return (self.value,)

    def rebuild(self, children: tuple[Expr, ...]) -> Expr:
        return Reduce(self.kind, children[0], self.axes)


@dataclass(frozen=True, eq=False)
class Scan(Expr):
    """Recurrence: element [s, t, ...] of the tensor that it defines is state s before step t.

    axis: the number of the step. states: placeholders of the states before a step. updates: tensors of the states after
    it, which read `states` and `inputs`. inputs: placeholders of the tensors in `reads`. initial, reads: loads of the
    first element of each tensor, which stand for all of it. tensor.scan builds a Scan.
    """

    axis: Axis
    states: tuple[Tensor, ...]
    inputs: tuple[Tensor, ...]
    updates: tuple[Tensor, ...]
    initial: tuple[Load, ...]
    reads: tuple[Load, ...]

    @property
    def dtype(self) -> str:  # type: ignore[override]
        return self.states[0].dtype

    def children(self) -> tuple[Expr, ...]:
        return *self.initial, *self.reads

    def rebuild(self, children: tuple[Expr, ...]) -> Expr:
        count, reads = len(self.initial), [child for child in children if isinstance(child, Load)]
        assert len(reads) == len(children), "a scan reads what lies in memory"
        return replace(self, initial=tuple(reads[:count]), reads=tuple(reads[count:]))


@dataclass(frozen=True, eq=False)
class Tensor:
    """A dense row-major array: defined by `body` at every point of `axes`, or constant (`value`), or an input.

    stored: whether it lies in memory even where its elements could be computed where they are read.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    axes: tuple[Axis, ...] = ()
    body: Expr | None = field(default=None, repr=False)
    value: NDArray[Any] | None = field(default=None, repr=False)
    stored: bool = False

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return self.size * itemsize(self.dtype)

    def __getitem__(self, index: Value | tuple[Value, ...]) -> Expr:
        index = index if isinstance(index, tuple) else (index,)
        if len(index) != len(self.shape):
            raise ValueError(f"{self.name} has {len(self.shape)} dimensions, indexed with {len(index)}")
        return Load(self, tuple(wrap(i, INDEX) for i in index))

    def flat(self, offset: Value) -> Expr:
        """Load the element with row-major number `offset`."""
        return Load(self, (wrap(offset, INDEX),))


def wrap(value: Value, dtype: str) -> Expr:
    """Convert a Python number to a constant of `dtype`; return an expression unchanged."""
    if isinstance(value, Expr):
        return value
    if isinstance(value, np.generic):
        value = value.item()
    scalar: int | float | bool = value  # type: ignore[assignment]
    return Const(float(scalar) if is_float(dtype) else bool(scalar) if dtype == "bool" else int(scalar), dtype)


def strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Compute row-major strides in elements."""
    return tuple(prod(shape[i + 1 :]) for i in range(len(shape)))


def binary(op: str, a: Value, b: Value) -> Expr:
    """Build `a op b`, with index arithmetic folded.

    Raises ValueError for an unknown operation, TypeError for different types.
    """
    if op not in ARITHMETIC and op not in COMPARISONS:
        raise ValueError(f"unknown operation {op}")
    dtype = a.dtype if isinstance(a, Expr) else b.dtype if isinstance(b, Expr) else INDEX
    a, b = wrap(a, dtype), wrap(b, dtype)
    if a.dtype != b.dtype:
        raise TypeError(f"{op} of {a.dtype} and {b.dtype}: cast one of ({a}), ({b})")
    if dtype == INDEX:
        return index_binary(op, a, b)
    return Binary(op, a, b)


_FOLD = {op: getattr(operator, op) for op in ("add", "sub", "mul", "floordiv", "mod", *COMPARISONS)}
_FOLD |= {"min": min, "max": max}
"""Operation -> function of two Python integers, for constant folding."""


def index_binary(op: str, a: Expr, b: Expr) -> Expr:
    """Build `a op b` of two int64 indices: fold constants and remove additions of 0 and factors of 1."""
    x = int(a.value) if isinstance(a, Const) else None
    y = int(b.value) if isinstance(b, Const) else None
    if x is not None and y is not None:
        if op in COMPARISONS:
            return Const(_FOLD[op](x, y), "bool")
        if op in _FOLD and not (op in ("floordiv", "mod") and y == 0) and abs(value := _FOLD[op](x, y)) < 1 << 63:
            return Const(value, INDEX)
    if (op == "mul" and (x == 0 or y == 0)) or (op == "mod" and y == 1):
        return Const(0, INDEX)
    if (op == "add" and x == 0) or (op == "mul" and x == 1):
        return b
    if (op in ("add", "sub") and y == 0) or (op in ("mul", "floordiv") and y == 1):
        return a
    return Binary(op, a, b)


def cast(value: Expr, dtype: str) -> Expr:
    """Convert `value` to `dtype`; a constant index becomes a constant of that type."""
    if value.dtype == dtype:
        return value
    if isinstance(value, Const) and value.dtype == INDEX:
        return wrap(value.value, dtype)
    return Cast(value, dtype)


def select(cond: Expr, a: Value, b: Value) -> Expr:
    """Build a Select; a constant condition chooses at once. Raises TypeError for arms of different types."""
    dtype = a.dtype if isinstance(a, Expr) else b.dtype if isinstance(b, Expr) else INDEX
    a, b = wrap(a, dtype), wrap(b, dtype)
    if a.dtype != b.dtype or cond.dtype != "bool":
        raise TypeError(f"select({cond.dtype}, {a.dtype}, {b.dtype}): needs a bool and two values of one type")
    if isinstance(cond, Const):
        return a if cond.value else b
    return Select(cond, a, b)


def call(name: str, *args: Expr, dtype: str | None = None) -> Expr:
    """Build a Call of an intrinsic function. Raises ValueError where there is none of this name.

    dtype: type of the result; by default that of RESULTS, else that of the arguments.
    """
    if name not in ARITY:
        raise ValueError(f"unknown intrinsic {name}")
    return Call(name, args, dtype or RESULTS.get(name, args[0].dtype))


def equal(a: Value, b: Value) -> Expr:
    """Build a == b, as a bool."""
    return binary("eq", a, b)


def minimum(a: Value, b: Value) -> Expr:
    """Build the smaller of two values; NaN if either is (as numpy)."""
    return binary("min", a, b)


def maximum(a: Value, b: Value) -> Expr:
    """Build the larger of two values; NaN if either is (as numpy)."""
    return binary("max", a, b)


def clip(value: Expr, low: Value, high: Value) -> Expr:
    """Build `value` clamped to [low, high]; NaN stays NaN."""
    return minimum(maximum(value, low), high)


def walk(expr: Expr) -> Iterator[Expr]:
    """Yield every node of `expr`, a shared one once."""
    seen: set[int] = set()
    stack = [expr]
    while stack:
        node = stack.pop()
        if id(node) not in seen:
            seen.add(id(node))
            yield node
            if children := node.children():
                stack.extend(children[::-1])


def loaded(expr: Expr) -> frozenset[Tensor]:
    """Return the tensors that `expr` reads. Nodes never change, so each caches its own set."""
    if not (children := expr.children()):
        return frozenset((expr.tensor,)) if isinstance(expr, Load) else frozenset()
    tensors: frozenset[Tensor] | None = expr.__dict__.get("_loaded")
    if tensors is None:
        tensors = frozenset().union(*map(loaded, children))
        if isinstance(expr, Load):
            tensors |= {expr.tensor}
        expr.__dict__["_loaded"] = tensors
    return tensors


def loads(expr: Expr) -> list[Load]:
    """Return all loads in `expr`."""
    return [node for node in walk(expr) if isinstance(node, Load)]


def topological(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Return all tensors that `outputs` depend on, producers first, placeholders included."""
    order: dict[Tensor, None] = {}

    def visit(tensor: Tensor) -> None:
        """Append the producers of a tensor to `order`, then the tensor itself."""
        if tensor not in order:
            for load in loads(tensor.body) if tensor.body is not None else ():
                visit(load.tensor)
            order[tensor] = None

    for tensor in outputs:
        visit(tensor)
    return list(order)


def rewrite(expr: Expr, change: Callable[[Expr], Expr | None], only: Tensor | None = None) -> Expr:
    """Rebuild `expr` bottom-up: `change` gets each node over rewritten operands, and returns its replacement or None.

    Nodes in which nothing changes are kept, and shared sub-expressions stay shared. only: a tensor; nodes that do not
    read it stay as they are, which saves time.
    """
    if not expr.children() and only is None:
        return expr if (new := change(expr)) is None else new
    return _rewrite_shared(expr, change, {}, only)


def _rewrite_shared(
    node: Expr, change: Callable[[Expr], Expr | None], done: dict[int, Expr], only: Tensor | None
) -> Expr:
    """Rewrite a node and its operands. done: results for nodes that were visited before, by their ids."""
    if (result := done.get(id(node))) is None:
        if only is not None and only not in loaded(node):
            return node
        result = node
        if before := node.children():
            after = tuple([_rewrite_shared(child, change, done, only) for child in before])
            for x, y in zip(before, after):
                if x is not y:
                    result = node.rebuild(after)
                    break
        replacement = change(result)
        done[id(node)] = result = result if replacement is None else replacement
    return result


def redirect_loads(expr: Expr, new: Mapping[Tensor, Tensor]) -> Expr:
    """Redirect the loads of the tensors that are keys of `new` to the values, at the same index."""
    return rewrite(expr, lambda e: Load(new[e.tensor], e.index) if isinstance(e, Load) and e.tensor in new else None)


def substitute(expr: Expr, values: dict[Var, Expr]) -> Expr:
    """Replace variables of `expr` by expressions, all at once."""
    return rewrite(expr, lambda node: values.get(node) if isinstance(node, Var) else None) if values else expr


def depends_on(expr: Expr, var: Var) -> bool:
    """Return whether `var` occurs anywhere in `expr`."""
    return any(node is var for node in walk(expr))


def unused_name(base: str, used: set[str]) -> str:
    """Return `base`, with a number appended where it is already in `used`, and add the result to `used`.

    >>> unused_name("x", {"x", "x_1"})
    'x_2'
    """
    name, suffix = base, 0
    while name in used:
        suffix += 1
        name = f"{base}_{suffix}"
    used.add(name)
    return name
