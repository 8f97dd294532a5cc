"""Prefetch while tiles of a product compute: the block of one operand with which the next ones begin.

Tiles that share a block of weights read it from memory once, all at once, and then from the cache. Where the weights
are more than the cache holds, the processor would wait at each new block and leave memory alone in between.

    for i in 16:                       # a block of w for each i
      for j in 7:                      # 7 tiles with it
        for k in 512: acc += x[j, k] * w[i, k]        fetches w[i + 1, j * 512 / 7 + k / 7], about
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from celosia.compiler.cpu.schedule.registers import L1_BYTES
from celosia.compiler.cpu.schedule.streamed import LINE
from celosia.compiler.expr.affine import flatten, from_linear, interval, linear
from celosia.compiler.expr.bounds import statements
from celosia.compiler.expr.loops import Alloc, Block, For, Stmt, Update, exprs
from celosia.compiler.expr.nodes import INDEX, Binary, Const, Expr, Load, Tensor, Var, minimum
from celosia.compiler.expr.walk import rewrite, walk
from celosia.compiler.program.dtypes import itemsize
from celosia.compiler.target import target


@dataclass(frozen=True, eq=False)
class Following:
    """An element of `tensor`, by its number."""

    tensor: Tensor
    place: Expr


def following(stmt: Stmt) -> dict[Var, Following]:
    """By the variable of a product's innermost loop: what each of its iterations fetches into the second cache."""
    found: dict[Var, Following] = {}
    nests = [stmt]
    while nests:
        nest = nests.pop()
        if isinstance(nest, Block):
            nests += nest.body
        elif isinstance(nest, Alloc):
            nests.append(nest.body)
        elif isinstance(nest, For):
            found |= _of_nest(nest)
    return found


def _of_nest(body: Stmt) -> dict[Var, Following]:
    outer: list[For] = []
    while isinstance(body, Alloc | For):
        if isinstance(body, For):
            if body.kind not in ("serial", "parallel"):
                return {}
            outer.append(body)
        body = body.body
    sums: list[For] = []
    loops = [s for s in body.body if isinstance(s, For) and s.kind == "serial"] if isinstance(body, Block) else []
    inner: Stmt = loops[0] if len(loops) == 1 else body
    while isinstance(inner, For) and inner.kind == "serial":
        sums.append(inner)
        inner = inner.body
    if not sums or any(isinstance(s, For) and s.kind == "serial" for s in statements(inner)):
        return {}
    for load in _vectors(inner):
        place = _next(load, outer, sums, {s.var for s in statements(inner) if isinstance(s, For)})
        if place is not None:
            return {sums[-1].var: Following(load.tensor, place)}
    return {}


def _vectors(body: Stmt) -> list[Load]:
    """What sums read by vectors."""
    lanes = [s for s in statements(body) if isinstance(s, For) and s.kind == "vectorized"]
    found = []
    for loop in lanes:
        updates = [s for s in statements(loop) if isinstance(s, Update) and s.kind == "sum"]
        reads = [n for s in updates for e in exprs(s) for n in walk(e) if isinstance(n, Load)]
        found += [n for n in reads if linear(flatten(n.tensor.shape, n.index)).get(loop.var) == 1]
    return found


def _unclamped(e: Expr) -> Expr | None:
    """The last block may begin earlier, with columns of the one before."""
    match e:
        case Binary("min", a, Const()):
            return a
    return None


def _next(load: Load, outer: list[For], sums: list[For], inside: set[Var]) -> Expr | None:
    """The number of the element to fetch, among those of the next block; None where nothing is gained by it."""
    terms = linear(rewrite(flatten(load.tensor.shape, load.index), _unclamped))
    size = itemsize(load.tensor.dtype)
    known = {None, *inside, *(loop.var for loop in (*outer, *sums))}
    moving = [number for number, loop in enumerate(outer) if terms.get(loop.var) and loop.extent > 1]
    if load.tensor.nbytes <= target().cache_bytes or not moving or not terms.keys() <= known:
        return None
    block, again = outer[moving[-1]], outer[moving[-1] + 1 :]
    own = {atom: k for atom, k in terms.items() if atom in inside or any(atom is loop.var for loop in sums)}
    ends = interval(from_linear(own))
    span = 0 if ends is None else ends[1] - ends[0] + 1
    times, steps = prod(loop.extent for loop in again), prod(loop.extent for loop in sums)
    each = -(-span // (times * steps))
    if times == 1 or span != terms[block.var] or span * size <= L1_BYTES or each * size > LINE:
        return None
    before = {atom: k for atom, k in terms.items() if atom not in own and atom is not block.var}
    place = from_linear(before) + minimum(block.var + 1, Const(block.extent - 1, INDEX)) * span
    count: Expr = Const(0, INDEX)
    for loop in (*again, *sums):
        count = count * loop.extent + loop.var
    return place + minimum(count * each, Const(span - 1, INDEX))
