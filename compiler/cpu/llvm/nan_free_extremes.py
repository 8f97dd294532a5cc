"""Minima and maxima that never see a NaN, so that one instruction computes them.

An example is the maximum in a softmax: the expression excludes NaN from it, as the result has NaN anyway.
"""

from __future__ import annotations

import math
from collections import defaultdict

from celosia.compiler.expr.loops import Stmt, Store, Update
from celosia.compiler.expr.nodes import Binary, Const, Expr, Load, Select, Tensor, is_float
from celosia.compiler.expr.regions import statements


def without_nan_test(value: Expr) -> Expr:
    """Return x of `x == x ? x : infinity`, which excludes NaN from an extreme; other expressions are unchanged."""
    match value:
        case Select(Binary("eq", a, b), x, Const(bound)) if is_float(x.dtype) and math.isinf(bound):
            return x if a is b is x or str(a) == str(b) == str(x) else value
    return value


def nan_free_extremes(body: Stmt) -> frozenset[Tensor]:
    """Return the tensors of `body` that hold extremes and never a NaN, whatever is read.

    m = -inf; m max= x[i] == x[i] ? x[i] : -inf; n = -inf; n max= m: these are m and n.
    """
    writes: dict[Tensor, list[Store | Update]] = defaultdict(list)
    for stmt in statements(body):
        if isinstance(stmt, Store | Update):
            writes[stmt.tensor].append(stmt)
    nan_free: set[Tensor] = set()

    def is_nan_free(stmt: Store | Update) -> bool:
        """Return whether a statement writes no NaN, if the tensors in `nan_free` hold none."""
        if isinstance(stmt, Store):
            return isinstance(stmt.value, Const) and not math.isnan(stmt.value.value)
        known = isinstance(stmt.value, Load) and stmt.value.tensor in nan_free
        return stmt.kind in ("max", "min") and (known or without_nan_test(stmt.value) is not stmt.value)

    new = set(writes)
    while new:
        candidates = (t for t, stores in writes.items() if t not in nan_free and is_float(t.dtype))
        new = {
            t
            for t in candidates
            if any(isinstance(stmt, Update) for stmt in writes[t]) and all(map(is_nan_free, writes[t]))
        }
        nan_free |= new
    return frozenset(nan_free)
