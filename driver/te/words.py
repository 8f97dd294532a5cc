"""Functions on elements, by TVM's names."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce

from celosia.compiler.expr.math_functions import ARITY
from celosia.compiler.expr.nodes import Expr, Value, binary, call, wrap


def all(*conditions: Expr) -> Expr:
    """Whether every one holds."""
    return reduce(lambda a, b: binary("and", a, b), conditions)


def any(*conditions: Expr) -> Expr:
    """Whether one holds at least."""
    return reduce(lambda a, b: binary("or", a, b), conditions)


def floordiv(a: Value, b: Value) -> Expr:
    """Divide a / b, rounded down."""
    return binary("floordiv", a, b)


def floormod(a: Value, b: Value) -> Expr:
    """Remainder of `floordiv`."""
    return binary("mod", a, b)


def const(value: float, dtype: str = "int64") -> Expr:
    """Constant of this type."""
    return wrap(value, dtype)


def function(name: str) -> Callable[..., Expr]:
    """Function of the compiler with this name: `exp(x)` is `call("exp", x)`. AttributeError where it has none."""
    if name not in ARITY:
        raise AttributeError(
            f"celosia.te has no {name!r}; docs/expressions.md says what a program as TVM's papers print it may use"
        )
    return partial(call, name)
