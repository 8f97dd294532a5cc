"""Float matrix products: MatMul and Gemm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from celosia.compiler import expr as T
from celosia.compiler.expr import INDEX, Expr, Tensor, wrap
from celosia.compiler.ops.registry import Change, ChangeAt, Node, Shape, at, op, reshaped
from celosia.compiler.program.dtypes import itemsize
from celosia.compiler.program.host.shape_rules import broadcast
from celosia.compiler.program.op_spec import Kind
from celosia.compiler.target import MAX_STREAMS, target


def product(
    a: Tensor, b: Tensor, transpose_a: bool = False, transpose_b: bool = False, change_a: Change = None,
    change_b: ChangeAt = None, finish: Callable[[Expr, tuple[Expr, ...]], Expr] = lambda acc, i: acc,
    fixed_b: bool = False,
) -> Tensor:  # fmt: skip
    """Return finish(numpy.matmul(a, b), its index), for tensors of at least two dimensions.

    transpose_a, transpose_b: the last two axes are swapped first. change_a, change_b: functions of each element before
    it is multiplied. fixed_b: `b` is constant, or the same for many products, so that a packed copy of it costs
    nothing. It decides between rows of b, columns of b, and b packed into panels. Raises ValueError for shapes that do
    not fit.
    """
    inner = a.shape[-2 if transpose_a else -1]
    m, n = a.shape[-1 if transpose_a else -2], b.shape[-2 if transpose_b else -1]
    batch = batch_shape(a, b, inner, b.shape[-1 if transpose_b else -2])

    def prepared(t: Tensor, turn: bool, change: ChangeAt, name: str) -> Tensor:
        """Return matrices, transposed where `turn` is set, with `change` applied to each element."""
        if change is None and not turn:
            return t
        shape = (*t.shape[:-2], t.shape[-1], t.shape[-2]) if turn else t.shape

        def element(*i: Expr) -> Expr:
            source = (*i[:-2], i[-1], i[-2]) if turn else i
            return t[source] if change is None else change(t[source], source)

        return T.compute(shape, element, name)

    fn = change_a
    a = prepared(a, transpose_a, None if fn is None else lambda v, i: fn(v), "a")
    dot = transpose_b and m < 4  # then rows of b are read once, and best as they are
    b = prepared(b, transpose_b and not dot, change_b, "b")
    k = T.reduce_axis(inner, "k")
    lanes = target().lanes(b.dtype)
    streamed = fixed_b and m < PACKED_ROWS  # each element is read for few rows, as fast as memory gives them
    most = min(MAX_STREAMS, (target().registers - 1) // (m + 1)) if streamed else 1  # all rows in one tile
    widths = [*(count * lanes for count in range(most, 0, -1)), lanes // 2]
    width = next((w for w in widths if w > 1 and n % w == 0), 0)
    large = inner * n * itemsize(b.dtype) > PACKED_BYTES
    if not dot and width and large and (m >= PACKED_ROWS or streamed):
        packed = _pack_panels(b, width)

        def by_panel(*i: Expr) -> Expr:
            *lead, row, panel, lane = i
            index = (*lead, row, panel * width + lane)
            right = packed[(*batch_index(b, lead), panel, k, lane)]
            return finish(T.sum(a[(*batch_index(a, lead), row, k)] * right, k), index)

        return replace(T.compute((*batch, m, n // width, width), by_panel, "matmul"), shape=(*batch, m, n))

    def body(*i: Expr) -> Expr:
        lead_a = batch_index(a, i[:-2])
        lead_b = batch_index(b, i[:-2])
        right = b[(*lead_b, i[-1], k)] if dot else b[(*lead_b, k, i[-1])]
        return finish(T.sum(a[(*lead_a, i[-2], k)] * right, k), i)

    return T.compute((*batch, m, n), body, "matmul")


def batch_shape(a: Tensor, b: Tensor, inner_a: int, inner_b: int) -> Shape:
    """Return the broadcast batch dimensions of a matrix product of a and b.

    inner_a, inner_b: extents of the axis of each over which the product sums. Raises ValueError where these differ, or
    the batches do not broadcast.
    """
    with suppress(ValueError):
        if inner_a == inner_b:
            return broadcast(a.shape[:-2], b.shape[:-2])
    raise ValueError(f"{list(a.shape)} and {list(b.shape)} do not multiply")


PACKED_ROWS = 16
"""Rows of a product from which a packed copy of the second matrix saves more time than it takes."""
PACKED_BYTES = 1 << 15
"""Bytes of a matrix above which its rows lie so far apart that caches and address translation suffer."""


def _pack_panels(b: Tensor, width: int) -> Tensor:
    """Pack b [..., K, N] into panels [..., N / width, K, width], which a register tile reads contiguously."""
    shape = (*b.shape[:-2], b.shape[-1] // width, b.shape[-2], width)
    packed = T.compute(shape, lambda *i: b[(*i[:-3], i[-2], i[-3] * width + i[-1])], "panels")
    return replace(packed, stored=True)


def batch_index(t: Tensor, index: Sequence[Expr]) -> tuple[Expr, ...]:
    """Return the index of the batch axes of `t` (all but the last two), 0 where an axis is broadcast.

    index: of the batch axes of the product.
    """
    batch_rank = len(t.shape) - 2
    last_indices = index[len(index) - batch_rank :] if batch_rank > 0 else ()
    return tuple(wrap(0, INDEX) if n == 1 else i for i, n in zip(last_indices, t.shape))


def multiply_any_rank(
    node: Node, a: Tensor, b: Tensor, multiply: Callable[..., Tensor] | None = None, **how: Any
) -> Tensor:  # fmt: skip
    """Multiply matrices or vectors as numpy.matmul does: a vector is a row on the left, a column on the right.

    multiply: the product of matrices, by default `product`; how: its further arguments. Raises Unsupported for scalars
    and for shapes that do not fit.
    """
    if not a.shape or not b.shape:
        raise node.fail("an operand is a scalar")
    left = reshaped(a, (1, *a.shape)) if len(a.shape) == 1 else a
    right = reshaped(b, (*b.shape, 1)) if len(b.shape) == 1 else b
    try:
        y = (multiply or product)(left, right, **how)
    except ValueError as e:
        raise node.fail(str(e)) from e
    shape = y.shape
    if len(b.shape) == 1:
        shape = shape[:-1]
    if len(a.shape) == 1:
        shape = (*shape[:-2], shape[-1]) if len(b.shape) > 1 else shape[:-1]
    return y if shape == y.shape else reshaped(y, shape)


@op("MatMul", kind=Kind.COMPLEX, wide=True, operands="a b")
def matmul(node: Node) -> Tensor:
    """Build MatMul: batches are broadcast, vectors are rows or columns."""
    return multiply_any_rank(node, node.input(0), node.input(1), fixed_b=node.is_fixed(1))


@op("Gemm", kind=Kind.COMPLEX, wide=True, heavy=True, operands="a b c:bias?")
def gemm(node: Node) -> Tensor:
    """Build Gemm: alpha A B + beta C, C broadcast. Raises Unsupported for shapes that do not fit."""
    a, b = node.input(0), node.input(1)
    alpha, beta = node.attrs.get("alpha", 1.0), node.attrs.get("beta", 1.0)
    c = node.optional("c")

    def finish(acc: Expr, i: tuple[Expr, ...]) -> Expr:
        """Return alpha * acc + beta * c of one element, without factors of 1."""
        acc = acc if alpha == 1 else acc * alpha
        if c is None or beta == 0:
            return acc
        bias = at(c, i)
        return acc + (bias if beta == 1 else bias * beta)

    try:
        turn_a, turn_b = (bool(node.attrs.get(name, 0)) for name in ("transA", "transB"))
        return product(a, b, turn_a, turn_b, finish=finish, fixed_b=node.is_fixed(1))
    except ValueError as e:
        raise node.fail(str(e)) from e
