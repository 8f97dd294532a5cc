"""Products of bytes in blocks, with a scale each: our own operators around sums that the accelerator makes.

graph/block_sums.py puts them in the place of a MatMulNBits. The sums of a row lie as the accelerator stores them:
[parts, bytes, blocks, lanes] int8, the lowest byte of all sums of a part first; a part has `lanes` columns.
"""

from __future__ import annotations

from collections.abc import Callable

from celosia.compiler import expr as T
from celosia.compiler.expr import Expr, Tensor, call, select, wrap
from celosia.compiler.expr.norm_expressions import norm_row
from celosia.compiler.expr.norm_expressions import sums as row_sums
from celosia.compiler.ops.contrib import F32, steps_of_blocks
from celosia.compiler.ops.quantized import requantize
from celosia.compiler.ops.registry import Node, op
from celosia.compiler.program.op_spec import Kind


@op("QuantizeBlocks", kind=Kind.OPAQUE, domain="celosia", operands="x")
def quantize_blocks(node: Node) -> list[Tensor]:
    """Build QuantizeBlocks: x [..., K] float32 as int8 [..., blocks, block_size], and the scale of each block.

    Beyond K there are zeros. Scales: [..., blocks] float32.
    """
    x, size = node.input(0), int(node.attrs["block_size"])
    largest, inverse_scales = steps_of_blocks(x, size)
    inner, blocks = x.shape[-1], largest.shape[-1]

    def byte(*i: Expr) -> Expr:
        place = i[-2] * size + i[-1]
        whole = inner % size == 0
        value = x[(*i[:-2], place if whole else T.minimum(place, inner - 1))] * inverse_scales[i[:-1]]
        value = call("round_even", value)
        return (value if whole else select(place < inner, value, wrap(0, F32))).astype("int8")

    made = T.compute((*x.shape[:-1], blocks, size), byte, "bytes")
    return [made, T.compute(largest.shape, lambda *i: largest[i] / 127.0, "scale")]


@op("BlockSums", kind=Kind.OPAQUE, heavy=True, domain="celosia", operands="x w:weights")
def block_sums(node: Node) -> Tensor:
    """Build BlockSums: the int32 dot product of each block of x and w, as separate bytes.

    x: [..., blocks, size] int8. w: [parts, blocks, lanes, size] int8, filled up with zeros. Result: [..., parts,
    sum_bytes, blocks, lanes] int8. Attributes K and N: size of the matrix.
    """
    x, w, count = node.input("x"), node.input("w"), int(node.attrs["sum_bytes"])
    parts, blocks, lanes, size = w.shape
    k = T.reduce_axis(size, "k")

    def product(*i: Expr) -> Expr:
        *row, part, block, lane = i
        return T.sum(x[(*row, block, k)].astype("int32") * w[part, block, lane, k].astype("int32"), k)

    def byte(*i: Expr) -> Expr:
        *row, part, number, block, lane = i
        return (sums[(*row, part, block, lane)] >> (number * 8).astype("int32")).astype("int8")

    sums = T.compute((*x.shape[:-2], parts, blocks, lanes), product, "sums")
    return T.compute((*x.shape[:-2], parts, count, blocks, lanes), byte, "bytes")


@op("ScaleSums", kind=Kind.OPAQUE, domain="celosia", operands="sums steps scales x? zeros?")
def scale_sums(node: Node) -> Tensor:
    """Build ScaleSums: block sums times the scales of blocks of x and w, added over the blocks in order.

    sums: as from BlockSums. steps: [..., blocks]. scales: [parts, blocks, lanes]. Result: [..., parts, lanes]. With x,
    as from QuantizeBlocks, and zeros [parts, blocks, lanes] int32, the products of the zero points are subtracted.
    """
    sums, steps, scales = node.input("sums"), node.input("steps"), node.input("scales")
    x, zeros = node.optional("x"), node.optional("zeros")
    count, (parts, blocks, lanes) = sums.shape[-3], scales.shape
    b = T.reduce_axis(blocks, "block")
    ones = None if x is None else _ones(x)

    def whole(row: list[Expr], part: Expr, lane: Expr) -> Expr:
        total: Expr = wrap(0, "int32")
        for number in range(count):
            value = sums[(*row, part, number, b, lane)].astype("int32")
            total = total + ((value if number == count - 1 else value & 255) << 8 * number)
        return total if zeros is None or ones is None else total - ones[(*row, b)] * zeros[part, b, lane]

    def scaled(*i: Expr) -> Expr:
        *row, part, lane = i
        return T.sum(whole(row, part, lane).astype(F32) * (steps[(*row, b)] * scales[part, b, lane]), b)

    return T.compute((*steps.shape[:-1], parts, lanes), scaled, "scaled")


def _ones(x: Tensor) -> Tensor:
    """Return the sum of each block of x, by which zero points are multiplied."""
    k = T.reduce_axis(x.shape[-1], "k")
    return T.compute(x.shape[:-1], lambda *i: T.sum(x[(*i, k)].astype("int32"), k), "ones")


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

    total, squares = (kept(*each) for each in zip(("total", "squares"), row_sums(element, x.shape[-1])))
    row = norm_row(total, squares, node.scalar("epsilon", "int64"), x.shape[-1], bool(node.attrs["centre"]), kept)

    def made(*i: Expr) -> Expr:
        z = row.element(element(*i), *i[:-1])
        return requantize(z + bias[i[-1]], factor[i[-1]], zy, x.dtype)

    return T.compute(x.shape, made, "norm")
