"""Functions of elements, by TVM's names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce

from celosia.compiler.expr.math_functions import ARITY
from celosia.compiler.expr.nodes import Expr, Value, binary, call, wrap


def all(*conditions: Expr) -> Expr:
    """Return the expression that is true where all conditions are."""
    return reduce(lambda a, b: binary("and", a, b), conditions)


def any(*conditions: Expr) -> Expr:
    """Return the expression that is true where at least one condition is."""
    return reduce(lambda a, b: binary("or", a, b), conditions)


def floordiv(a: Value, b: Value) -> Expr:
    """Return a / b, rounded down."""
    return binary("floordiv", a, b)


def floormod(a: Value, b: Value) -> Expr:
    """Return the remainder of `floordiv`."""
    return binary("mod", a, b)


def const(value: float, dtype: str = "int64") -> Expr:
    """Return a constant of this element type."""
    return wrap(value, dtype)


def function(name: str) -> Callable[..., Expr]:
    """Return the compiler's mathematical function of this name: "exp" as x -> call("exp", x).

    AttributeError if there is none.
    """
    if name not in ARITY:
        raise AttributeError(
            f"celosia.te has no {name!r}; docs/expressions.md says what a program as TVM's papers print it may use"
        )
    return partial(call, name)
