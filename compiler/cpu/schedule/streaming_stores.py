"""Streaming stores: choose the outputs whose stores bypass the caches.

A processor reads a cache line before it writes to it, unless non-temporal stores write the complete line: that saves a
quarter of the traffic of an addition. It pays for outputs so large that little of them stays in the cache until the
next kernel reads them.
"""

from __future__ import annotations

from collections import Counter

from celosia.compiler.expr.affine import stride_along
from celosia.compiler.expr.loops import For, Function, Stmt, Store, Update, children, exprs
from celosia.compiler.expr.nodes import Load, Tensor
from celosia.compiler.expr.regions import statements
from celosia.compiler.expr.walk import walk
from celosia.compiler.program.dtypes import itemsize
from celosia.compiler.target import target

MIN_STREAMED_BYTES = 16 << 20
"""Bytes of an output from which streaming pays even where another kernel reads it next; with 4 MiB it did not."""
CACHE_LINE_BYTES = 64
"""Bytes of a cache line."""
MAX_PARTIAL_SHARE = 0.01
"""Limit of the share of elements that are not written by vectors of a full line."""


def streamed_outputs(function: Function) -> frozenset[Tensor]:
    """Return the outputs that are large, written once by full lines, and not read by the kernel."""
    separate = set(function.outputs) - {function.outputs[output] for output, _ in function.in_place}
    large = [t for t in separate if t.nbytes >= MIN_STREAMED_BYTES]
    if not large or target().vector_bytes != CACHE_LINE_BYTES:
        return frozenset()
    inside = list(statements(function.body))
    read = {n.tensor for s in inside for e in exprs(s) for n in walk(e) if isinstance(n, Load)}
    lines: Counter[Tensor] = Counter()
    others: Counter[Tensor] = Counter({s.tensor: 1 << 60 for s in inside if isinstance(s, Update)})
    _count_stores(function.body, 1, None, lines, others)
    return frozenset(t for t in large if t not in read and others[t] <= MAX_PARTIAL_SHARE * lines[t])


def _count_stores(stmt: Stmt, times: int, lanes: For | None, lines: Counter[Tensor], others: Counter[Tensor]) -> None:
    """Count the elements of each tensor that vectors of a full line write in `lines`, all other elements in `others`.

    Others may not be many, since a store of a part of a line gains nothing and is slow when it bypasses the caches.
    times: how often `stmt` runs. lanes: the vectorised loop around it, if any.
    """
    if isinstance(stmt, For):
        times, lanes = times * stmt.extent, stmt if stmt.kind == "vectorized" else lanes
    if isinstance(stmt, Store):
        (lines if lanes is not None and _is_line_store(stmt, lanes) else others)[stmt.tensor] += times
    for child in children(stmt):
        _count_stores(child, times, lanes, lines, others)


def _is_line_store(store: Store, lanes: For) -> bool:
    """Return whether a store in the vectorised loop `lanes` writes a complete cache line."""
    return (
        stride_along(store.tensor, store.index, lanes.var) == 1
        and lanes.extent * itemsize(store.tensor.dtype) == CACHE_LINE_BYTES
    )
