"""Shared accesses of an unrolled loop of vectors: load interleaved or transposed data once, store it once."""

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
    """A loop that is being unrolled, in its current `iteration`.

    loaded: vectors that were loaded for all iterations at once. pending_stores: vectors to be stored with those of the
    last iteration.
    """

    def __init__(self, var: Var, extent: int, body: Stmt) -> None:
        """Find the tensors that each iteration stores once and does not read, whose stores can be interleaved."""
        inside = list(statements(body))
        stores = Counter(s.tensor for s in inside if isinstance(s, Store | Update))
        reads = {n.tensor for s in inside for e in exprs(s) for n in walk(e) if isinstance(n, Load)}
        once = all(isinstance(s, Block | Store) or (isinstance(s, For) and s.kind == "vectorized") for s in inside)
        self.var, self.extent, self.iteration = var, extent, 0
        self.written = frozenset(stores)
        self.can_interleave = {t for t, times in stores.items() if once and times == 1 and t not in reads}
        self.loaded: dict[Any, list[V]] = {}
        self.pending_stores: dict[Tensor, list[V]] = {}

    def contiguous_lines(self, tensor: Tensor, index: tuple[Expr, ...], step: int | None, lanes: int) -> int | None:
        """Return the number of contiguous lines that hold what all iterations read, or None.

        step: distance of lanes in elements. One line where iterations lie between the lanes; as many as lanes for a
        square tile.
        """
        if (
            tensor in self.written
            or stride_along(tensor, index, self.var) != 1
            or not is_in_bounds(Load(tensor, index))
        ):
            return None
        if step == self.extent:
            return 1
        return lanes if self.extent == lanes and lanes.bit_count() == 1 else None

    def interleaves_stores(self, tensor: Tensor, index: tuple[Expr, ...], step: int | None) -> bool:
        """Return whether the stores of all iterations interleave to one contiguous line."""
        return tensor in self.can_interleave and step == self.extent > 1 and stride_along(tensor, index, self.var) == 1


def transpose_lines(b: Any, contiguous_lines: list[V], count: int) -> list[V]:
    """Return `count` vectors: element k of every line, or every `count`-th element of a single line.

    A square tile has as many lines as lanes, a power of two: each round interleaves a line of the upper half with one
    of the lower half.
    """
    n = len(contiguous_lines)
    if n == 1:
        nothing = ir.Constant(contiguous_lines[0].type, ir.Undefined)
        masks = [_shuffle_mask(range(k, contiguous_lines[0].type.count, count)) for k in range(count)]
        return [b.shuffle_vector(contiguous_lines[0], nothing, mask) for mask in masks]
    lanes = [list(range(n)), list(range(n, 2 * n))]
    mixed = [lane for pair in zip(*lanes) for lane in pair]
    halves = [_shuffle_mask(mixed[start : start + n]) for start in (0, n)]
    for _ in range(n.bit_length() - 1):
        pairs = zip(contiguous_lines[: n // 2], contiguous_lines[n // 2 :])
        contiguous_lines = [b.shuffle_vector(upper, lower, half) for upper, lower in pairs for half in halves]
    return contiguous_lines


def interleave(b: Any, vectors: list[V]) -> V:
    """Interleave vectors: the first element of each, then the second of each, ...; the inverse of `transpose_lines`."""
    n, count = vectors[0].type.count, len(vectors)
    nothing, result = ir.Constant(vectors[0].type, ir.Undefined), vectors[0]
    for k, vector in enumerate(vectors[1:], 1):
        longer = b.shuffle_vector(vector, nothing, _shuffle_mask([*range(n), *[n] * (k * n - n)]))
        result = b.shuffle_vector(result, longer, _shuffle_mask(range(k * n + n)))
    nothing = ir.Constant(result.type, ir.Undefined)
    return b.shuffle_vector(result, nothing, _shuffle_mask(k * n + i for i in range(n) for k in range(count)))


def _shuffle_mask(lanes: Iterable[int]) -> V:
    lanes = list(lanes)
    return ir.Constant(ir.VectorType(I32, len(lanes)), lanes)
