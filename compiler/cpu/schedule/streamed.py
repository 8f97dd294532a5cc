"""Choose outputs that bypass the caches: those so large that little of them is left there when the next kernel reads
them.

A processor reads a line before it writes to it. Whole lines that pass by the caches spare it that: a quarter of what an
addition moves.
"""

from __future__ import annotations

from collections import Counter

from celosia.compiler.expr.affine import stride_along
from celosia.compiler.expr.bounds import statements
from celosia.compiler.expr.loops import For, Function, Stmt, Store, Update, children, exprs
from celosia.compiler.expr.nodes import Load, Tensor
from celosia.compiler.expr.walk import walk
from celosia.compiler.program.dtypes import itemsize
from celosia.compiler.target import target

MIN_STREAMED_BYTES = 16 << 20
"""Bytes of an output from which on that pays even where another kernel reads it next; with 4 MiB it did not."""
LINE = 64
MOST_OTHERS = 0.01
"""Share of an output's elements that may be written otherwise than by vectors as long as a line."""


def streamed(function: Function) -> frozenset[Tensor]:
    """Outputs that are written once and not read, by whole lines."""
    own = set(function.outputs) - {function.outputs[number] for number, _ in function.in_place}
    large = [t for t in own if t.nbytes >= MIN_STREAMED_BYTES]
    if not large or target().vector_bytes != LINE:
        return frozenset()
    inside = list(statements(function.body))
    read = {n.tensor for s in inside for e in exprs(s) for n in walk(e) if isinstance(n, Load)}
    lines: Counter[Tensor] = Counter()
    others: Counter[Tensor] = Counter({s.tensor: 1 << 60 for s in inside if isinstance(s, Update)})
    _count(function.body, 1, None, lines, others)
    return frozenset(t for t in large if t not in read and others[t] <= MOST_OTHERS * lines[t])


def _count(stmt: Stmt, times: int, lanes: For | None, lines: Counter[Tensor], others: Counter[Tensor]) -> None:
    """Elements that are written by vectors as long as a line, and otherwise."""
    if isinstance(stmt, For):
        times, lanes = times * stmt.extent, stmt if stmt.kind == "vectorized" else lanes
    if isinstance(stmt, Store):
        (lines if lanes is not None and _is_line(stmt, lanes) else others)[stmt.tensor] += times
    for child in children(stmt):
        _count(child, times, lanes, lines, others)


def _is_line(store: Store, lanes: For) -> bool:
    return (
        stride_along(store.tensor, store.index, lanes.var) == 1 and lanes.extent * itemsize(store.tensor.dtype) == LINE
    )
