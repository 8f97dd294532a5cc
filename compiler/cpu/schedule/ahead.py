"""Prefetch while an iteration computes: the elements that the next one begins with.

Processors guess what is read next within a page of memory. An iteration that reads its elements several times computes
for long after it has read them first, and then the next one waits for its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

from celosia.compiler.expr.affine import flatten, from_linear, interval, linear
from celosia.compiler.expr.bounds import statements
from celosia.compiler.expr.loops import Alloc, Block, For, Stmt, Store, Update, exprs
from celosia.compiler.expr.nodes import Load, Tensor
from celosia.compiler.expr.walk import walk
from celosia.compiler.program.dtypes import itemsize

MIN_BYTES_READ, MAX_BYTES_READ = 1 << 10, 1 << 14
"""Bytes that an iteration reads: less is soon done, more does not stay in the first cache beside what it computes."""


@dataclass
class _Reads:
    """Reads of one tensor. passes: how often its elements are read; end, size, loads: of the last pass."""

    passes: int = 0
    end: int = 0
    size: int = 0
    loads: dict[int, int] = field(default_factory=dict)


def ahead(stmt: Stmt) -> dict[int, int]:
    """For loads in vectors, by id: how many elements further on the next iteration of the loops outside reads.

    for i: for j: m max= x[i, j]           the second x[i, j] fetches x[i + 1, j]
           for j: y[i, j] = x[i, j] - m
    """
    while isinstance(stmt, Alloc):
        stmt = stmt.body
    nests = stmt.body if isinstance(stmt, Block) else (stmt,)
    return {load: step for nest in nests for load, step in _of_nest(nest).items()}


def _of_nest(body: Stmt) -> dict[int, int]:
    loop: For | None = None
    while isinstance(body, For) and body.kind in ("serial", "parallel"):
        loop, body = body if body.extent > 1 else loop, body.body
    if loop is None:
        return {}
    inside = list(statements(body))
    extents = {s.var: s.extent for s in inside if isinstance(s, For)}
    own = {s.tensor for s in inside if isinstance(s, Alloc | Store | Update)}
    found: dict[Tensor, _Reads] = {}
    for lanes in (s for s in inside if isinstance(s, For) and s.kind == "vectorized"):
        for load in (n for s in statements(lanes) for e in exprs(s) for n in walk(e) if isinstance(n, Load)):
            terms = linear(flatten(load.tensor.shape, load.index))
            span = interval(from_linear({atom: k for atom, k in terms.items() if atom is None or atom in extents}))
            step = terms.get(loop.var, 0)
            if load.tensor in own or span is None or step == 0 or terms.get(lanes.var) != 1:
                continue
            reads = found.setdefault(load.tensor, _Reads())
            if span[0] < reads.end or not reads.passes:
                reads.passes, reads.size, reads.loads = reads.passes + 1, 0, {}
            reads.end = span[1] + 1
            reads.size += itemsize(load.tensor.dtype) * prod(extents[var] for var in terms if var in extents)
            reads.loads[id(load)] = step
    often = [reads for reads in found.values() if reads.passes > 1]
    if not MIN_BYTES_READ <= sum(reads.size for reads in often) <= MAX_BYTES_READ:
        return {}
    return {load: step for reads in often for load, step in reads.loads.items()}
