"""Cost estimate of a loop nest on a CPU: features for the cost model, and a linear estimate made of them.

Everything is counted in vectors. A load in unrolled loops counts once for each different address, so that register
tiles have fewer loads. Cache lines are loaded again where more data than a cache holds is touched between two uses.
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
from celosia.compiler.tune.search_space import Floats

L1_BYTES = 32 << 10
"""Bytes of the first-level data cache."""
LINE_BYTES = 64
"""Bytes of a cache line."""
MAX_CODE = 1500
"""Limit of unrolled vector operations, because LLVM takes more than linear time for long blocks."""
COSTLY_OPERATIONS = 16
"""Number of operations as which a function such as exp counts."""
FEATURE_NAMES = (
    "operations", "loads", "stores", "iterations", "lines", "far lines", "spilled", "registers", "code", "inner",
    "statements",
)  # fmt: skip
"""Names of the fields of Counts, in order."""
FEATURE_CYCLES = (0.5, 0.5, 1.0, 1.0, 4.0, 12.0, 4.0)
"""Cycles of one unit of each of the first FEATURE_NAMES."""


@dataclass
class Counts:
    """Features of a loop nest.

    operations, loads, stores: executed, in vectors. iterations: of loops that are neither unrolled nor vectorised.
    lines, far_lines: cache lines that miss the first-level, and the second-level cache. spilled: vectors that do not
    fit the registers. registers: vectors of the largest local tensor. code: unrolled vector operations in the code.
    inner: iterations of the shortest innermost loop. statements: number of stores and updates.
    """

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
        """Values of all fields, in order."""
        return [float(value) for value in self.__dict__.values()]

    @property
    def cost(self) -> float:
        """Estimated cycles, a weighted sum of the first features."""
        return sum(weight * value for weight, value in zip(FEATURE_CYCLES, self.values)) + 1

    @property
    def features(self) -> Floats:
        """[fields], log(1 + count) of each field, for the cost model."""
        return np.log1p(np.array(self.values, np.float64))


@dataclass(frozen=True)
class _Context:
    """The context of a statement.

    loops: around it, the outermost first. lets: for each variable of a Let the loop variables that it depends on.
    registers: local tensors, which live in registers.
    """

    loops: tuple[For, ...] = ()
    lets: dict[Var, frozenset[Var]] = field(default_factory=dict)
    registers: frozenset[Tensor] = frozenset()


def count_features(function: Function) -> Counts:
    """Return the features of a kernel's loop nest."""
    counts = Counts()
    _count(function.body, _Context(), counts)
    return counts


def _count(stmt: Stmt, context: _Context, counts: Counts) -> None:
    """Add the features of a statement, and of those inside it, to `counts`."""
    if isinstance(stmt, For):
        inside = _Context((*context.loops, stmt), context.lets, context.registers)
        if _is_real_loop(stmt):
            counts.iterations += prod(loop.extent for loop in inside.loops if _is_real_loop(loop))
        _count(stmt.body, inside, counts)
        return
    if isinstance(stmt, Let):
        lets = {**context.lets, stmt.var: _variables(stmt.value, context.lets)}
        _count(stmt.body, _Context(context.loops, lets, context.registers), counts)
        return
    if isinstance(stmt, Alloc) and stmt.scope == "local":
        registers = stmt.tensor.nbytes / target().vector_bytes
        counts.registers = max(counts.registers, registers)
        context = _Context(context.loops, context.lets, context.registers | {stmt.tensor})
    if isinstance(stmt, Store | Update):
        _count_access(stmt, context, counts)
    for child in children(stmt):
        _count(child, context, counts)


def _is_real_loop(loop: For) -> bool:
    """Return whether a loop remains one in machine code, neither unrolled nor vectorised."""
    return loop.kind not in ("unrolled", "vectorized")


def _variables(e: Expr, lets: dict[Var, frozenset[Var]]) -> frozenset[Var]:
    """Return the loop variables on which an expression depends, also through those of a Let."""
    return frozenset().union(*(lets.get(n, frozenset((n,))) for n in walk(e) if isinstance(n, Var)))


def _count_access(stmt: Store | Update, context: _Context, counts: Counts) -> None:
    """Add the features of a store or update, and of the loads in it, to `counts`."""
    nodes = [node for e in exprs(stmt) for node in walk(e)]
    work = [n for n in nodes if isinstance(n, Binary | Call | Cast | Select | Reduce) and n.dtype != INDEX]
    operations = sum(COSTLY_OPERATIONS if isinstance(n, Call) and n.name in COSTLY else 1 for n in work)
    operations += isinstance(stmt, Update)
    loops = [loop for loop in context.loops if _is_real_loop(loop)]
    trips = prod(loop.extent for loop in loops)
    unrolled = [loop for loop in context.loops if loop.kind == "unrolled"]
    lanes = prod(loop.extent for loop in context.loops if loop.kind == "vectorized")
    widest = max(itemsize(dtype) for dtype in {stmt.tensor.dtype, *(n.dtype for n in work)})
    vectors = -(-lanes * widest // target().vector_bytes)
    copies = prod(loop.extent for loop in unrolled)
    counts.statements += 1
    counts.operations += trips * copies * vectors * operations
    counts.code += copies * vectors * max(operations, 1)
    counts.inner = min(counts.inner, loops[-1].extent if loops else 1)
    reads = list({n: None for n in nodes if isinstance(n, Load) and n.tensor not in context.registers})
    used = {read: frozenset().union(*(_variables(i, context.lets) for i in read.index)) for read in reads}
    live = vectors * copies if stmt.tensor in context.registers else 0.0
    for read in reads:
        distinct_loads = prod(loop.extent for loop in unrolled if loop.var in used[read])
        along = [loop for loop in context.loops if loop.kind == "vectorized" and loop.var in used[read]]
        if along and stride_along(read.tensor, read.index, along[-1].var) not in (0, 1):
            distinct_loads *= lanes
        elif along:
            distinct_loads *= vectors
        counts.loads += trips * distinct_loads
    if stmt.tensor not in context.registers:
        counts.stores += trips * copies * vectors * (2 if isinstance(stmt, Update) else 1)
    excess = max(0.0, live + 1 - target().registers)
    counts.spilled += trips * excess
    _count_cache_lines(reads, used, context, counts)


def _count_cache_lines(reads: list[Load], used: dict[Load, frozenset[Var]], context: _Context, counts: Counts) -> None:
    """Add the cache lines of `reads` that miss the first-level and the second-level cache to `counts`.

    used: the loop variables on which the index of each depends.
    """
    for size, name in ((L1_BYTES, "lines"), (target().cache_bytes // 2, "far_lines")):
        level = len(context.loops)
        while level and sum(_bytes_touched(read, used[read], context.loops[level - 1 :]) for read in reads) <= size:
            level -= 1
        reloads = prod(loop.extent for loop in context.loops[:level])
        lines = 0.0
        for read in reads:
            loads = prod(loop.extent for loop in context.loops[:level] if loop.var in used[read]) if level else 1
            inner = context.loops[level - 1] if level else None
            if inner is not None and inner.var not in used[read]:
                loads = reloads  # evicted before the next iteration needs it
            lines += loads * _bytes_touched(read, used[read], context.loops[level:]) / LINE_BYTES
        setattr(counts, name, getattr(counts, name) + lines)


def _bytes_touched(read: Load, used: frozenset[Var], loops: tuple[For, ...]) -> float:
    """Return the bytes of a tensor that a load touches during all iterations of `loops`.

    used: loop variables on which its index depends.
    """
    elements = prod(loop.extent for loop in loops if loop.var in used)
    return float(min(read.tensor.nbytes, elements * itemsize(read.tensor.dtype)))
