"""Draw reductions and matrix products."""

from __future__ import annotations

import numpy as np

from fuzz.models.net import MS, Net
from fuzz.models.operators.operands import (
    NUMBERS,
    any_axis,
    any_shape,
    broadcast_shape,
    either,
    operand,
    random_subset,
    without_none,
)


def reduction(net: Net) -> list[str]:
    """Add a reduction over up to two axes or all."""
    draw = net.draw
    op = "Reduce" + draw.choice(("Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "LogSum", "LogSumExp", "SumSquare"))
    shape, dtype = any_shape(draw, 0 if draw.chance(0.1) else 1), draw.choice(NUMBERS)
    value = draw.array(dtype, shape)
    if op == "ReduceLogSum":
        value = np.abs(value) + np.asarray(1, dtype)
    elif op == "ReduceProd":  # within the range of integers
        value = np.sign(value)
    attrs = random_subset(draw, keepdims=draw.randint(0, 1))
    axes = (
        [any_axis(draw, len(shape)) % len(shape) - len(shape) * draw.randint(0, 1) for _ in range(2)] if shape else []
    )
    axes = list({axis % len(shape): axis for axis in axes[: draw.randint(0, 2)]}.values())
    if net.opset < (13 if op == "ReduceSum" else 18):
        return [net.add(op, net.input(value), **attrs, **without_none(axes=axes))]
    attrs |= random_subset(draw, noop_with_empty_axes=draw.randint(0, 1))
    given = [either(net, axes, np.int64, 0.9)] if axes or draw.chance(0.3) else []
    return [net.add(op, net.input(value), *given, **attrs)]


def arg(net: Net) -> list[str]:
    """Add ArgMax or ArgMin, with ties."""
    draw = net.draw
    shape = any_shape(draw, 1)
    attrs = random_subset(
        draw, axis=any_axis(draw, len(shape)), keepdims=draw.randint(0, 1), select_last_index=draw.randint(0, 1)
    )
    value = np.round(draw.floats(shape)) if draw.chance() else draw.array(draw.choice(("float32", "int32")), shape)
    return [net.add(draw.choice(("ArgMax", "ArgMin")), net.input(value), **attrs)]


def softmax(net: Net) -> list[str]:
    """Add Softmax, LogSoftmax or Hardmax."""
    draw = net.draw
    shape = any_shape(draw, 1, 5, 9)
    op = draw.choice(("Softmax", "Softmax", "LogSoftmax", "Hardmax"))
    x = operand(net, shape, draw.choice(("float32", "float32", "float64")), draw.choice((1.0, 20.0)))
    return [net.add(op, x, **random_subset(draw, axis=any_axis(draw, len(shape))))]


def cumsum(net: Net) -> list[str]:
    """Add CumSum, in either direction."""
    draw = net.draw
    shape = any_shape(draw, 1)
    axis = either(net, any_axis(draw, len(shape)), np.int64, 0.8)
    attrs = random_subset(draw, exclusive=draw.randint(0, 1), reverse=draw.randint(0, 1))
    return [net.add("CumSum", operand(net, shape, draw.choice(NUMBERS)), axis, **attrs)]


def top_k(net: Net) -> list[str]:
    """Add TopK, with ties."""
    draw = net.draw
    shape = any_shape(draw, 1, 4, 8)
    axis = any_axis(draw, len(shape))
    count = either(net, [draw.randint(0, shape[axis])], np.int64, 0.8)
    attrs = random_subset(draw, largest=draw.randint(0, 1)) | {"axis": axis}
    value = np.round(draw.floats(shape, 2)) if draw.chance(0.4) else draw.floats(shape)
    return net.add_all("TopK", net.input(value), count, outputs=2, **attrs)


def matmul(net: Net) -> list[str]:
    """Add a matrix product of tensors of any rank from 1, with batches that are broadcast."""
    draw, dtype = net.draw, net.draw.choice(("float32", "float32", "float32", "float64", "int32"))
    m, k, n = draw.shape(3, 9)
    batch = any_shape(draw, 0, 3, 3)
    left = draw.choice(((k,), (m, k), (*broadcast_shape(draw, batch), m, k)))
    right = draw.choice(((k,), (k, n), (*broadcast_shape(draw, batch), k, n)))
    return [net.add("MatMul", *(either(net, draw.array(dtype, shape), dtype, 0.4) for shape in (left, right)))]


def fused_matmul(net: Net) -> list[str]:
    """Add onnxruntime's FusedMatMul."""
    draw = net.draw
    m, k, n = draw.shape(3, 7)
    a, b = draw.randint(0, 1), draw.randint(0, 1)
    batch = draw.shape(draw.randint(0, 2), 3)
    left, right = (*batch, *((k, m) if a else (m, k))), (*batch, *((n, k) if b else (k, n)))
    attrs = dict(transA=a, transB=b) | random_subset(draw, alpha=draw.choice((0.5, 1.7)))
    return [net.add("FusedMatMul", *(either(net, draw.floats(s)) for s in (left, right)), domain=MS, **attrs)]


def gemm(net: Net) -> list[str]:
    """Add Gemm, with any C that is broadcast."""
    draw, dtype = net.draw, net.draw.choice(("float32", "float32", "float64"))
    m, k, n = draw.shape(3, 12)
    a, b = draw.randint(0, 1), draw.randint(0, 1)
    shapes: list[tuple[int, ...]] = [(k, m) if a else (m, k), (n, k) if b else (k, n)]
    if draw.chance(0.7):
        shapes.append(draw.choice(((n,), (1, n), (m, 1), (m, n), (1,), (), (1, 1))))
    attrs = random_subset(draw, alpha=draw.choice((0.5, 2.0)), beta=draw.choice((0.0, 0.5, 1.3))) | dict(
        transA=a, transB=b
    )
    return [net.add("Gemm", *(either(net, draw.array(dtype, shape), dtype) for shape in shapes), **attrs)]


def einsum(net: Net) -> list[str]:
    """Add Einsum of one or two operands."""
    draw = net.draw
    equation = draw.choice((
        "ij,jk->ik", "bij,bjk->bik", "ij->ji", "ij->", "ij,ij->i", "bhid,bhjd->bhij", "ii->i", "...ij,...jk->...ik",
        "i,j->ij", "ijk->kj", "ab,cb->ac",
    ))  # fmt: skip
    sizes = {letter: draw.randint(1, 5) for letter in "abcdefghijk"}
    shapes = [
        tuple(sizes[letter] for letter in term.replace("...", "bh")) for term in equation.split("->")[0].split(",")
    ]
    return [net.add("Einsum", *(either(net, draw.floats(shape), constant=0.2) for shape in shapes), equation=equation)]
