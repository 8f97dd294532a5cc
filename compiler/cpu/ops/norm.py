"""Integer normalisation: our own operator, which graph/norms.py inserts for layers of the accelerator."""

from __future__ import annotations

from collections.abc import Callable

from celosia.compiler import expr as T
from celosia.compiler.cpu.ops.quantized import requantize
from celosia.compiler.cpu.ops.registry import Node, op
from celosia.compiler.expr import Expr, Tensor
from celosia.compiler.expr.norm_expressions import norm_row, sums
from celosia.compiler.program.traits import Kind


@op("QLinearNorm", kind=Kind.REDUCTION, scale=6)
def qlinear_norm(node: Node) -> Tensor:
    """Ours: x, sx, zx, epsilon, bias, scale, sy, zy; rows of the last axis, by the integers of the accelerator."""
    x, rows = node.input(0), node.input(0).shape[:-1]
    zx, zy = node.scalar(2, "int64"), node.scalar(7, "int32")

    def kept(name: str, number: Callable[..., Expr]) -> Callable[..., Expr]:
        tensor = T.compute(rows, number, name)
        return lambda *i: tensor[i]

    def element(*i: Expr) -> Expr:
        return x[i].astype("int64") - zx

    total, squares = (kept(*each) for each in zip(("total", "squares"), sums(element, x.shape[-1])))
    row = norm_row(total, squares, node.scalar(3, "int64"), x.shape[-1], bool(node.attrs["centre"]), kept)

    def made(*i: Expr) -> Expr:
        z = row.element(element(*i), *i[:-1])
        return requantize(z + node.input(4)[i[-1]], node.input(5)[i[-1]], zy, x.dtype)

    return T.compute(x.shape, made, "norm")
