"""Caches: which elements an iteration prefetches for later ones, and which outputs bypass the caches.

There are two kinds of prefetches: of the next block of weights, while the tiles of one block compute
(`next_block_prefetches`), and of the next iteration of loops that read a tensor in several passes
(`next_iteration_prefetches`). All is decided while llvm/ generates code.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import prod

from celosia.compiler.expr.affine import from_linear, interval, linear, offset, stride_along
from celosia.compiler.expr.loops import (
    Alloc,
    Block,
    For,
    Function,
    Stmt,
    Store,
    Update,
    children,
    exprs,
    statements,
    tensors_read,
)
from celosia.compiler.expr.nodes import INDEX, Binary, Const, Expr, Load, Tensor, Var, minimum, rewrite, walk
from celosia.compiler.program.dtypes import itemsize
from celosia.compiler.target import target

CACHE_LINE_BYTES = 64
"""Bytes of a cache line."""
L1_BYTES = 24 << 10
"""Bytes that may stay in the first-level cache while other data pass through it."""


@dataclass(frozen=True, eq=False)
class PrefetchedElement:
    """The element of `tensor` to fetch, by its row-major number."""

    tensor: Tensor
    element: Expr


def next_block_prefetches(stmt: Stmt) -> dict[Var, PrefetchedElement]:
    """Return the elements of the next block of weights that the iterations of tiled products fetch into the L2 cache.

    Tiles that share a block of weights read it from memory once, all at once, and then from the cache. Where the
    weights exceed the cache, the processor would wait at each new block while memory idles in between.

        for i in 16:                       # a block of w for each i
          for j in 7:                      # 7 tiles with it
            for k in 512: acc += x[j, k] * w[i, k]        fetches w[i + 1, j * 512 / 7 + k / 7], about

    The key of the result is the variable of a product's innermost loop.
    """
    prefetches: dict[Var, PrefetchedElement] = {}
    nests = [stmt]
    while nests:
        nest = nests.pop()
        if isinstance(nest, Block):
            nests += nest.body
        elif isinstance(nest, Alloc):
            nests.append(nest.body)
        elif isinstance(nest, For):
            prefetches |= _block_prefetch(nest)
    return prefetches


def _block_prefetch(body: Stmt) -> dict[Var, PrefetchedElement]:
    """Return the prefetch of one loop nest, if it is a tiled product: loops around one chain of reduction loops."""
    outer: list[For] = []
    while isinstance(body, Alloc | For):
        if isinstance(body, For):
            if body.kind not in ("serial", "parallel"):
                return {}
            outer.append(body)
        body = body.body
    sums: list[For] = []
    loops = [s for s in body.body if isinstance(s, For) and s.kind == "serial"] if isinstance(body, Block) else []
    innermost: Stmt = loops[0] if len(loops) == 1 else body
    while isinstance(innermost, For) and innermost.kind == "serial":
        sums.append(innermost)
        innermost = innermost.body
    if not sums or any(isinstance(s, For) and s.kind == "serial" for s in statements(innermost)):
        return {}
    for load in _vector_loads(innermost):
        element = _element_to_fetch(load, outer, sums, {s.var for s in statements(innermost) if isinstance(s, For)})
        if element is not None:
            return {sums[-1].var: PrefetchedElement(load.tensor, element)}
    return {}


def _vector_loads(body: Stmt) -> list[Load]:
    """Return the loads that sums read as contiguous vectors: those of the operand that consists of blocks."""
    lanes = [s for s in statements(body) if isinstance(s, For) and s.kind == "vectorized"]
    loads = []
    for loop in lanes:
        updates = [s for s in statements(loop) if isinstance(s, Update) and s.kind == "sum"]
        reads = [n for s in updates for e in exprs(s) for n in walk(e) if isinstance(n, Load)]
        loads += [n for n in reads if linear(offset(n)).get(loop.var) == 1]
    return loads


def _remove_clamp(e: Expr) -> Expr | None:
    """Return `a` for min(a, constant), else None; a callback of `rewrite`.

    Such a minimum comes from a loop whose last block is shifted to stay inside the tensor. Without it the index is
    linear, so that the address of the next block is known.
    """
    match e:
        case Binary("min", a, Const()):
            return a
    return None


def _element_to_fetch(load: Load, outer: list[For], sums: list[For], inside: set[Var]) -> Expr | None:
    """Return the element of the next block that an iteration fetches, or None where it would gain nothing.

    The iterations that use one block share the next: each fetches a part, at most a cache line. load: the read of the
    blocks. outer: loops around the reduction; the last that moves the read gives the block. sums: loops of the
    reduction. inside: variables of the loops inside it.
    """
    terms = linear(rewrite(offset(load), _remove_clamp))
    size = itemsize(load.tensor.dtype)
    known = {None, *inside, *(loop.var for loop in (*outer, *sums))}
    moving = [position for position, loop in enumerate(outer) if terms.get(loop.var) and loop.extent > 1]
    if load.tensor.nbytes <= target().cache_bytes or not moving or not terms.keys() <= known:
        return None
    block, repeated = outer[moving[-1]], outer[moving[-1] + 1 :]
    inner_terms = {atom: k for atom, k in terms.items() if atom in inside or any(atom is loop.var for loop in sums)}
    ends = interval(from_linear(inner_terms))
    span = 0 if ends is None else ends[1] - ends[0] + 1
    repetitions, steps = prod(loop.extent for loop in repeated), prod(loop.extent for loop in sums)
    share = -(-span // (repetitions * steps))
    if repetitions == 1 or span != terms[block.var] or span * size <= L1_BYTES or share * size > CACHE_LINE_BYTES:
        return None
    outer_terms = {atom: k for atom, k in terms.items() if atom not in inner_terms and atom is not block.var}
    element = from_linear(outer_terms) + minimum(block.var + 1, Const(block.extent - 1, INDEX)) * span
    count: Expr = Const(0, INDEX)
    for loop in (*repeated, *sums):
        count = count * loop.extent + loop.var
    return element + minimum(count * share, Const(span - 1, INDEX))


MIN_BYTES_READ, MAX_BYTES_READ = 1 << 10, 1 << 14
"""Bytes that an iteration must read repeatedly for prefetching to pay. Fewer are read before a fetch ends, and more do
not stay in the first-level cache."""


@dataclass
class _RepeatedReads:
    """Reads of one tensor in one iteration.

    passes: how often its elements are read. The others describe the last pass. end: end of its elements. size: bytes.
    loads: id of each load -> elements from one iteration to the next.
    """

    passes: int = 0
    end: int = 0
    size: int = 0
    loads: dict[int, int] = field(default_factory=dict)


def next_iteration_prefetches(stmt: Stmt) -> dict[int, int]:
    """Return the vector loads that fetch what the next iteration reads: id of the load -> distance in elements.

    Prefetching pays if a tensor is read in several passes. The later passes read the caches, so that memory is free to
    fetch in the last one:

    for i: for j: m max= x[i, j]           the second x[i, j] fetches x[i + 1, j]
           for j: y[i, j] = x[i, j] - m
    """
    while isinstance(stmt, Alloc):
        stmt = stmt.body
    nests = stmt.body if isinstance(stmt, Block) else (stmt,)
    return {load: step for nest in nests for load, step in _iteration_prefetches(nest).items()}


def _iteration_prefetches(body: Stmt) -> dict[int, int]:
    """Return the prefetches of one loop nest: loads of tensors that each iteration reads in several passes."""
    loop: For | None = None
    while isinstance(body, For) and body.kind in ("serial", "parallel"):
        loop, body = body if body.extent > 1 else loop, body.body
    if loop is None:
        return {}
    inside = list(statements(body))
    extents = {s.var: s.extent for s in inside if isinstance(s, For)}
    written_here = {s.tensor for s in inside if isinstance(s, Alloc | Store | Update)}
    reads_of: dict[Tensor, _RepeatedReads] = {}
    for lanes in (s for s in inside if isinstance(s, For) and s.kind == "vectorized"):
        for load in (n for s in statements(lanes) for e in exprs(s) for n in walk(e) if isinstance(n, Load)):
            terms = linear(offset(load))
            span = interval(from_linear({atom: k for atom, k in terms.items() if atom is None or atom in extents}))
            step = terms.get(loop.var, 0)
            if load.tensor in written_here or span is None or step == 0 or terms.get(lanes.var) != 1:
                continue
            reads = reads_of.setdefault(load.tensor, _RepeatedReads())
            if span[0] < reads.end or not reads.passes:
                reads.passes, reads.size, reads.loads = reads.passes + 1, 0, {}
            reads.end = span[1] + 1
            reads.size += itemsize(load.tensor.dtype) * prod(extents[var] for var in terms if var in extents)
            reads.loads[id(load)] = step
    repeated = [reads for reads in reads_of.values() if reads.passes > 1]
    if not MIN_BYTES_READ <= sum(reads.size for reads in repeated) <= MAX_BYTES_READ:
        return {}
    return {load: step for reads in repeated for load, step in reads.loads.items()}


MIN_STREAMED_BYTES = 16 << 20
"""Bytes of an output from which streaming pays even where another kernel reads it next; with 4 MiB it did not."""
MAX_PARTIAL_SHARE = 0.01
"""Limit of the share of elements that are not written by vectors of a full line."""


def streamed_outputs(function: Function) -> frozenset[Tensor]:
    """Return the outputs whose stores bypass the caches: large, written once by full lines, not read by the kernel.

    A processor reads a cache line before it writes to it, unless non-temporal stores write the complete line: that
    saves a quarter of the traffic of an addition. It pays for outputs so large that little of them stays in the cache
    until the next kernel reads them.
    """
    separate = set(function.outputs) - {function.outputs[output] for output, _ in function.in_place}
    large = [t for t in separate if t.nbytes >= MIN_STREAMED_BYTES]
    if not large or target().vector_bytes != CACHE_LINE_BYTES:
        return frozenset()
    inside = list(statements(function.body))
    read = tensors_read(function.body)
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
