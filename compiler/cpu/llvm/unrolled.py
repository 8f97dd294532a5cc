"""Share the tiles of memory that iterations of an unrolled loop of vectors read or write together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from llvmlite import ir

from celosia.compiler.expr.affine import is_in_bounds, stride_along
from celosia.compiler.expr.loops import Block, For, Stmt, Store, Update, exprs
from celosia.compiler.expr.nodes import Expr, Load, Tensor, Var
from celosia.compiler.expr.regions import statements
from celosia.compiler.expr.walk import walk

V = Any
I32 = ir.IntType(32)


class UnrolledLoop:
    """One that is being written out, in iteration `at`. tiles: vectors read for all of its iterations at once. held:
    vectors to be stored when the last iteration has made its own."""

    def __init__(self, var: Var, extent: int, body: Stmt) -> None:
        inside = list(statements(body))
        stores = Counter(s.tensor for s in inside if isinstance(s, Store | Update))
        reads = {n.tensor for s in inside for e in exprs(s) for n in walk(e) if isinstance(n, Load)}
        once = all(isinstance(s, Block | Store) or (isinstance(s, For) and s.kind == "vectorized") for s in inside)
        self.var, self.extent, self.at = var, extent, 0
        self.written = frozenset(stores)
        self.holdable = {t for t, times in stores.items() if once and times == 1 and t not in reads}
        self.tiles: dict[Any, list[V]] = {}
        self.held: dict[Tensor, list[V]] = {}

    def lines(self, tensor: Tensor, index: tuple[Expr, ...], step: int | None, lanes: int) -> int | None:
        """In how many lines of memory lies what the iterations read, in vectors whose lanes are `step` elements apart:
        in one, where the iterations are between the lanes; in as many as `lanes`, where those are a square tile."""
        if (
            tensor in self.written
            or stride_along(tensor, index, self.var) != 1
            or not is_in_bounds(Load(tensor, index))
        ):
            return None
        if step == self.extent:
            return 1
        return lanes if self.extent == lanes and lanes.bit_count() == 1 else None

    def holds(self, tensor: Tensor, index: tuple[Expr, ...], step: int | None) -> bool:
        """Whether what the iterations store to lies in one line, between the lanes of each other."""
        return tensor in self.holdable and step == self.extent > 1 and stride_along(tensor, index, self.var) == 1


def columns(b: Any, lines: list[V], count: int) -> list[V]:
    """`count` vectors, of the first element of each line, the second, ...; of one line, of every `count`-th one.

    A square tile has as many lines as each has lanes, a power of two: each round interleaves a line of the upper half
    with one of the lower half.
    """
    n = len(lines)
    if n == 1:
        nothing = ir.Constant(lines[0].type, ir.Undefined)
        each = [_places(range(k, lines[0].type.count, count)) for k in range(count)]
        return [b.shuffle_vector(lines[0], nothing, places) for places in each]
    lanes = [list(range(n)), list(range(n, 2 * n))]
    mixed = [lane for pair in zip(*lanes) for lane in pair]
    halves = [_places(mixed[at : at + n]) for at in (0, n)]
    for _ in range(n.bit_length() - 1):
        pairs = zip(lines[: n // 2], lines[n // 2 :])
        lines = [b.shuffle_vector(upper, lower, half) for upper, lower in pairs for half in halves]
    return lines


def interleaved(b: Any, vectors: list[V]) -> V:
    """The first element of each vector, then the second of each, and so on: what `columns` takes apart."""
    n, count = vectors[0].type.count, len(vectors)
    nothing, whole = ir.Constant(vectors[0].type, ir.Undefined), vectors[0]
    for k, vector in enumerate(vectors[1:], 1):
        longer = b.shuffle_vector(vector, nothing, _places([*range(n), *[n] * (k * n - n)]))
        whole = b.shuffle_vector(whole, longer, _places(range(k * n + n)))
    nothing = ir.Constant(whole.type, ir.Undefined)
    return b.shuffle_vector(whole, nothing, _places(k * n + i for i in range(n) for k in range(count)))


def _places(lanes: Iterable[int]) -> V:
    lanes = list(lanes)
    return ir.Constant(ir.VectorType(I32, len(lanes)), lanes)
