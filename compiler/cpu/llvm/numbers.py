"""Extremes that leave NaN out, one instruction each: what has a NaN in it is made of others anyway, as in a softmax."""

from __future__ import annotations

import math
from collections import defaultdict

from celosia.compiler.expr.loops import Stmt, Store, Update
from celosia.compiler.expr.nodes import Binary, Const, Expr, Load, Select, Tensor, is_float
from celosia.compiler.expr.regions import statements


def number(value: Expr) -> Expr:
    """x of `x == x ? x : infinity`, by which NaN is left out of an extreme; all else as it is."""
    match value:
        case Select(Binary("eq", a, b), x, Const(at)) if is_float(x.dtype) and math.isinf(at):
            return x if a is b is x or str(a) == str(b) == str(x) else value
    return value


def of_numbers(body: Stmt) -> frozenset[Tensor]:
    """Tensors of `body` that hold extremes of numbers and never a NaN, whatever is read.

    m = -inf; m max= x[i] == x[i] ? x[i] : -inf; n = -inf; n max= m: these are m and n.
    """
    writes: dict[Tensor, list[Store | Update]] = defaultdict(list)
    for each in statements(body):
        if isinstance(each, Store | Update):
            writes[each.tensor].append(each)
    found: set[Tensor] = set()

    def fits(each: Store | Update) -> bool:
        if isinstance(each, Store):
            return isinstance(each.value, Const) and not math.isnan(each.value.value)
        known = isinstance(each.value, Load) and each.value.tensor in found
        return each.kind in ("max", "min") and (known or number(each.value) is not each.value)

    more = set(writes)
    while more:
        fit = (t for t, some in writes.items() if t not in found and is_float(t.dtype))
        more = {t for t in fit if any(isinstance(each, Update) for each in writes[t]) and all(map(fits, writes[t]))}
        found |= more
    return frozenset(found)
