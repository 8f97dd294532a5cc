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
    """Return numpy.matmul(a, b) of tensors with at least two dimensions, elements through their changes first.

    fixed_b: `b` is constant, or the same for many products, so that a reordered copy of it is free.
    """
    inner = a.shape[-2 if transpose_a else -1]
    m, n = a.shape[-1 if transpose_a else -2], b.shape[-2 if transpose_b else -1]
    batch = batch_of(a, b, inner, b.shape[-1 if transpose_b else -2])

    def prepared(t: Tensor, turn: bool, change: ChangeAt, name: str) -> Tensor:
        """Return a matrix transposed and changed element by element."""
        if change is None and not turn:
            return t
        shape = (*t.shape[:-2], t.shape[-1], t.shape[-2]) if turn else t.shape

        def element(*i: Expr) -> Expr:
            own = (*i[:-2], i[-1], i[-2]) if turn else i
            return t[own] if change is None else change(t[own], own)

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
        packed = _panels(b, width)

        def by_panel(*i: Expr) -> Expr:
            *lead, row, panel, lane = i
            index = (*lead, row, panel * width + lane)
            right = packed[(*at_lead(b, lead), panel, k, lane)]
            return finish(T.sum(a[(*at_lead(a, lead), row, k)] * right, k), index)

        return replace(T.compute((*batch, m, n // width, width), by_panel, "matmul"), shape=(*batch, m, n))

    def body(*i: Expr) -> Expr:
        lead_a = at_lead(a, i[:-2])
        lead_b = at_lead(b, i[:-2])
        right = b[(*lead_b, i[-1], k)] if dot else b[(*lead_b, k, i[-1])]
        return finish(T.sum(a[(*lead_a, i[-2], k)] * right, k), i)

    return T.compute((*batch, m, n), body, "matmul")


def batch_of(a: Tensor, b: Tensor, inner: int, other: int) -> Shape:
    """Return the broadcast batch dimensions of a matrix product.

    inner, other: reduced elements of both operands. Raises ValueError where they differ, or batches do not broadcast.
    """
    with suppress(ValueError):
        if inner == other:
            return broadcast(a.shape[:-2], b.shape[:-2])
    raise ValueError(f"{list(a.shape)} and {list(b.shape)} do not multiply")


PACKED_ROWS = 16
"""Fewest rows of a product for which a packed copy of the second matrix pays."""
PACKED_BYTES = 1 << 15
"""Size of a matrix above which its rows lie so far apart that caches and address translation suffer."""


def _panels(b: Tensor, width: int) -> Tensor:
    """Pack b [..., K, N] into panels [..., N / width, K, width], which a register tile reads contiguously."""
    shape = (*b.shape[:-2], b.shape[-1] // width, b.shape[-2], width)
    packed = T.compute(shape, lambda *i: b[(*i[:-3], i[-2], i[-3] * width + i[-1])], "panels")
    return replace(packed, stored=True)


def at_lead(t: Tensor, index: Sequence[Expr]) -> tuple[Expr, ...]:
    """Return `index` for the batch axes of `t`, 0 where they are broadcast."""
    own = index[len(index) - (len(t.shape) - 2) :] if len(t.shape) > 2 else ()
    return tuple(wrap(0, INDEX) if n == 1 else i for i, n in zip(own, t.shape))


def matmul_any(
    node: Node, a: Tensor, b: Tensor, multiply: Callable[..., Tensor] | None = None, **how: Any
) -> Tensor:  # fmt: skip
    """Return multiply(a, b, ...), defined on matrices (default: product), for vectors as well."""
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
    """Build MatMul: batches are broadcast; vectors are rows or columns."""
    return matmul_any(node, node.input(0), node.input(1), fixed_b=node.is_fixed(1))


@op("Gemm", kind=Kind.COMPLEX, wide=True, heavy=True, operands="a b c:bias?")
def gemm(node: Node) -> Tensor:
    """Build Gemm: alpha A B + beta C, C broadcast. Raises Unsupported for shapes that do not fit."""
    a, b = node.input(0), node.input(1)
    alpha, beta = node.attrs.get("alpha", 1.0), node.attrs.get("beta", 1.0)
    c = node.optional("c")

    def finish(acc: Expr, i: tuple[Expr, ...]) -> Expr:
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
