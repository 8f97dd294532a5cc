"""Estimate the cost of a loop nest on a CPU: counts that a model learns from, and a guess made of them.

Everything is counted in vectors. A load in loops that are written out counts once for each that differs, so that a tile
of registers has fewer of them; lines come again where what is touched between two uses is more than a cache holds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

import numpy as np

from celosia.compiler.expr import INDEX, Alloc, Function, Load, Reduce, Stmt, Tensor, Var
from celosia.compiler.expr.affine import stride_along
from celosia.compiler.expr.loops import For, Let, Store, Update, children, exprs
from celosia.compiler.expr.nodes import Binary, Call, Cast, Expr, Select
from celosia.compiler.expr.transform import COSTLY
from celosia.compiler.expr.walk import walk
from celosia.compiler.program.dtypes import itemsize
from celosia.compiler.target import target
from celosia.compiler.tune.points import Floats

L1_BYTES = 32 << 10
LINE_BYTES = 64
MOST_CODE = 1500
"""Vector operations that are written out, at most: LLVM takes longer than linear time over long blocks."""
COSTLY_OPERATIONS = 16
NAMES = (
    "operations", "loads", "stores", "iterations", "lines", "far lines", "spilled", "registers", "code", "inner",
    "statements",
)  # fmt: skip
WEIGHTS = (0.5, 0.5, 1.0, 1.0, 4.0, 12.0, 4.0)
"""Cycles of each of the first of NAMES."""


@dataclass
class Counts:
    operations: float = 0
    loads: float = 0
    stores: float = 0
    iterations: float = 0
    lines: float = 0
    far_lines: float = 0
    spilled: float = 0
    registers: float = 0
    code: float = 0
    inner: float = 1e9
    statements: float = 0

    @property
    def values(self) -> list[float]:
        """Values of all fields, in their order."""
        return [float(value) for value in self.__dict__.values()]

    @property
    def cost(self) -> float:
        """Cycles."""
        return sum(weight * value for weight, value in zip(WEIGHTS, self.values)) + 1

    @property
    def features(self) -> Floats:
        """[fields], logarithms of 1 + each count."""
        return np.log1p(np.array(self.values, np.float64))


@dataclass(frozen=True)
class _Place:
    """Where a statement stands. loops: around it, from the outermost. lets: the variables that a name stands for."""

    loops: tuple[For, ...] = ()
    lets: dict[Var, frozenset[Var]] = field(default_factory=dict)
    registers: frozenset[Tensor] = frozenset()


def count(function: Function) -> Counts:
    """Counts of all of it."""
    counts = Counts()
    _count(function.body, _Place(), counts)
    return counts


def _count(stmt: Stmt, place: _Place, counts: Counts) -> None:
    if isinstance(stmt, For):
        inside = _Place((*place.loops, stmt), place.lets, place.registers)
        if _is_loop(stmt):
            counts.iterations += prod(loop.extent for loop in inside.loops if _is_loop(loop))
        _count(stmt.body, inside, counts)
        return
    if isinstance(stmt, Let):
        lets = {**place.lets, stmt.var: _variables(stmt.value, place.lets)}
        _count(stmt.body, _Place(place.loops, lets, place.registers), counts)
        return
    if isinstance(stmt, Alloc) and stmt.scope == "local":
        registers = stmt.tensor.nbytes / target().vector_bytes
        counts.registers = max(counts.registers, registers)
        place = _Place(place.loops, place.lets, place.registers | {stmt.tensor})
    if isinstance(stmt, Store | Update):
        _statement(stmt, place, counts)
    for child in children(stmt):
        _count(child, place, counts)


def _is_loop(loop: For) -> bool:
    return loop.kind not in ("unrolled", "vectorized")


def _variables(e: Expr, lets: dict[Var, frozenset[Var]]) -> frozenset[Var]:
    return frozenset().union(*(lets.get(n, frozenset((n,))) for n in walk(e) if isinstance(n, Var)))


def _statement(stmt: Store | Update, place: _Place, counts: Counts) -> None:
    nodes = [node for e in exprs(stmt) for node in walk(e)]
    work = [n for n in nodes if isinstance(n, Binary | Call | Cast | Select | Reduce) and n.dtype != INDEX]
    operations = sum(COSTLY_OPERATIONS if isinstance(n, Call) and n.name in COSTLY else 1 for n in work)
    operations += isinstance(stmt, Update)
    loops = [loop for loop in place.loops if _is_loop(loop)]
    trips = prod(loop.extent for loop in loops)
    unrolled = [loop for loop in place.loops if loop.kind == "unrolled"]
    lanes = prod(loop.extent for loop in place.loops if loop.kind == "vectorized")
    widest = max(itemsize(dtype) for dtype in {stmt.tensor.dtype, *(n.dtype for n in work)})
    vectors = -(-lanes * widest // target().vector_bytes)
    copies = prod(loop.extent for loop in unrolled)
    counts.statements += 1
    counts.operations += trips * copies * vectors * operations
    counts.code += copies * vectors * max(operations, 1)
    counts.inner = min(counts.inner, loops[-1].extent if loops else 1)
    reads = list({n: None for n in nodes if isinstance(n, Load) and n.tensor not in place.registers})
    used = {read: frozenset().union(*(_variables(i, place.lets) for i in read.index)) for read in reads}
    live = vectors * copies if stmt.tensor in place.registers else 0.0
    for read in reads:
        different = prod(loop.extent for loop in unrolled if loop.var in used[read])
        along = [loop for loop in place.loops if loop.kind == "vectorized" and loop.var in used[read]]
        if along and stride_along(read.tensor, read.index, along[-1].var) not in (0, 1):
            different *= lanes
        elif along:
            different *= vectors
        counts.loads += trips * different
    if stmt.tensor not in place.registers:
        counts.stores += trips * copies * vectors * (2 if isinstance(stmt, Update) else 1)
    excess = max(0.0, live + 1 - target().registers)
    counts.spilled += trips * excess
    _traffic(reads, used, place, counts)


def _traffic(reads: list[Load], used: dict[Load, frozenset[Var]], place: _Place, counts: Counts) -> None:
    """Lines that come from beyond the first cache, and from beyond the second."""
    for size, name in ((L1_BYTES, "lines"), (target().cache_bytes // 2, "far_lines")):
        level = len(place.loops)
        while level and sum(_touched(read, used[read], place.loops[level - 1 :]) for read in reads) <= size:
            level -= 1
        again = prod(loop.extent for loop in place.loops[:level])
        lines = 0.0
        for read in reads:
            times = prod(loop.extent for loop in place.loops[:level] if loop.var in used[read]) if level else 1
            inner = place.loops[level - 1] if level else None
            if inner is not None and inner.var not in used[read]:
                times = again  # what the next iteration needs again is gone by then, for there is no room
            lines += times * _touched(read, used[read], place.loops[level:]) / LINE_BYTES
        setattr(counts, name, getattr(counts, name) + lines)


def _touched(read: Load, used: frozenset[Var], loops: tuple[For, ...]) -> float:
    """Bytes of a tensor that iterations of `loops` read."""
    elements = prod(loop.extent for loop in loops if loop.var in used)
    return float(min(read.tensor.nbytes, elements * itemsize(read.tensor.dtype)))
