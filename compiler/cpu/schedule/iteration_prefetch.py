"""Prefetch across iterations: while one iteration computes, fetch the elements with which the next one begins.

Hardware prefetchers guess the next reads within a page of memory. An iteration that reads its elements in several
passes computes for long after it has read them first; without a prefetch the next one then waits for its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

from celosia.compiler.expr.affine import flatten, from_linear, interval, linear
from celosia.compiler.expr.loops import Alloc, Block, For, Stmt, Store, Update, exprs
from celosia.compiler.expr.nodes import Load, Tensor
from celosia.compiler.expr.regions import statements
from celosia.compiler.expr.walk import walk
from celosia.compiler.program.dtypes import itemsize

MIN_BYTES_READ, MAX_BYTES_READ = 1 << 10, 1 << 14
"""Bytes that an iteration must read for prefetching: less is soon done, more does not stay in the first-level cache."""


@dataclass
class _Reads:
    """Reads of one tensor in one iteration.

    passes: how often its elements are read. end, size, loads: end of the elements, bytes and loads of the last pass.
    """

    passes: int = 0
    end: int = 0
    size: int = 0
    loads: dict[int, int] = field(default_factory=dict)


def next_iteration_prefetches(stmt: Stmt) -> dict[int, int]:
    """Return, for vector loads by id, by how many elements the same load of the next iteration lies ahead.

    for i: for j: m max= x[i, j]           the second x[i, j] fetches x[i + 1, j]
           for j: y[i, j] = x[i, j] - m
    """
    while isinstance(stmt, Alloc):
        stmt = stmt.body
    nests = stmt.body if isinstance(stmt, Block) else (stmt,)
    return {load: step for nest in nests for load, step in _nest_prefetches(nest).items()}


def _nest_prefetches(body: Stmt) -> dict[int, int]:
    """Return the prefetches of one loop nest: loads of tensors that each iteration reads in several passes."""
    loop: For | None = None
    while isinstance(body, For) and body.kind in ("serial", "parallel"):
        loop, body = body if body.extent > 1 else loop, body.body
    if loop is None:
        return {}
    inside = list(statements(body))
    extents = {s.var: s.extent for s in inside if isinstance(s, For)}
    written_here = {s.tensor for s in inside if isinstance(s, Alloc | Store | Update)}
    reads_of: dict[Tensor, _Reads] = {}
    for lanes in (s for s in inside if isinstance(s, For) and s.kind == "vectorized"):
        for load in (n for s in statements(lanes) for e in exprs(s) for n in walk(e) if isinstance(n, Load)):
            terms = linear(flatten(load.tensor.shape, load.index))
            span = interval(from_linear({atom: k for atom, k in terms.items() if atom is None or atom in extents}))
            step = terms.get(loop.var, 0)
            if load.tensor in written_here or span is None or step == 0 or terms.get(lanes.var) != 1:
                continue
            reads = reads_of.setdefault(load.tensor, _Reads())
            if span[0] < reads.end or not reads.passes:
                reads.passes, reads.size, reads.loads = reads.passes + 1, 0, {}
            reads.end = span[1] + 1
            reads.size += itemsize(load.tensor.dtype) * prod(extents[var] for var in terms if var in extents)
            reads.loads[id(load)] = step
    repeated = [reads for reads in reads_of.values() if reads.passes > 1]
    if not MIN_BYTES_READ <= sum(reads.size for reads in repeated) <= MAX_BYTES_READ:
        return {}
    return {load: step for reads in repeated for load, step in reads.loads.items()}
