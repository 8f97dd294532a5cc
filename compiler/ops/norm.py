"""Integer normalisation: our own operator, which graph/norms.py inserts for layers of the accelerator."""

from __future__ import annotations

from collections.abc import Callable

from celosia.compiler import expr as T
from celosia.compiler.expr import Expr, Tensor
from celosia.compiler.expr.norm_expressions import norm_row, sums
from celosia.compiler.ops.quantized import requantize
from celosia.compiler.ops.registry import Node, op
from celosia.compiler.program.op_spec import Kind


@op(
    "QLinearNorm", kind=Kind.REDUCTION, domain="celosia",
    operands="x x_scale x_zero_point epsilon bias:bias factor y_scale y_zero_point",
)  # fmt: skip
def qlinear_norm(node: Node) -> Tensor:
    """Build our QLinearNorm: rows of the last axis over their deviation, in the accelerator's integers."""
    x, rows = node.input("x"), node.input("x").shape[:-1]
    zx, zy = node.scalar("x_zero_point", "int64"), node.scalar("y_zero_point", "int32")
    bias, factor = node.input("bias"), node.input("factor")

    def kept(name: str, number: Callable[..., Expr]) -> Callable[..., Expr]:
        tensor = T.compute(rows, number, name)
        return lambda *i: tensor[i]

    def element(*i: Expr) -> Expr:
        return x[i].astype("int64") - zx

    total, squares = (kept(*each) for each in zip(("total", "squares"), sums(element, x.shape[-1])))
    row = norm_row(total, squares, node.scalar("epsilon", "int64"), x.shape[-1], bool(node.attrs["centre"]), kept)

    def made(*i: Expr) -> Expr:
        z = row.element(element(*i), *i[:-1])
        return requantize(z + bias[i[-1]], factor[i[-1]], zy, x.dtype)

    return T.compute(x.shape, made, "norm")
