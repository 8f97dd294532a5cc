"""Our own operators around layers of the accelerator: products of bytes in blocks, and normalisation in integers.

QuantizeBlocks, BlockSums and ScaleSums compute a MatMulNBits, which graph/block_sums.py replaces by them: BlockSums is
what the accelerator executes. Its sums of a row lie as the accelerator stores them: [parts, bytes, blocks, lanes] int8,
the lowest byte of all sums of a part first; a part has `lanes` columns of the matrix. QLinearNorm is a normalisation
in the accelerator's integers (graph/quantized/rounded.py).
"""

from __future__ import annotations

from collections.abc import Callable

from celosia.compiler import expr as T
from celosia.compiler.expr import Expr, Tensor, call, select, wrap
from celosia.compiler.expr.norm_expressions import norm_row
from celosia.compiler.expr.norm_expressions import sums as row_sums
from celosia.compiler.ops.contrib import F32, block_quantisation
from celosia.compiler.ops.quantized import requantize
from celosia.compiler.ops.registry import Node, op
from celosia.compiler.program.op_spec import Kind


@op("QuantizeBlocks", kind=Kind.OPAQUE, domain="celosia", operands="x")
def quantize_blocks(node: Node) -> list[Tensor]:
    """Build QuantizeBlocks: quantise x [..., K] float32 to int8 [..., blocks, block_size], and the scale of each block.

    Bytes beyond K are zeros. Scales: [..., blocks] float32.
    """
    x, size = node.input(0), int(node.attrs["block_size"])
    largest, inverse_scales = block_quantisation(x, size)
    inner, blocks = x.shape[-1], largest.shape[-1]

    def byte(*i: Expr) -> Expr:
        """Return a quantised element; 0 beyond K."""
        position = i[-2] * size + i[-1]
        divides = inner % size == 0
        value = x[(*i[:-2], position if divides else T.minimum(position, inner - 1))] * inverse_scales[i[:-1]]
        value = call("round_even", value)
        return (value if divides else select(position < inner, value, wrap(0, F32))).astype("int8")

    quantised = T.compute((*x.shape[:-1], blocks, size), byte, "bytes")
    return [quantised, T.compute(largest.shape, lambda *i: largest[i] / 127.0, "scale")]


@op("BlockSums", kind=Kind.OPAQUE, heavy=True, domain="celosia", operands="x w:weights")
def block_sums(node: Node) -> Tensor:
    """Build BlockSums: the dot product of each block of x with each column of w, an int32 as separate bytes.

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
    """Build ScaleSums: multiply block sums by the scales of the blocks of x and w, and add them over blocks in order.

    sums: as from BlockSums. steps: scales of x, [..., blocks]. scales: of w, [parts, blocks, lanes]. Result: [...,
    parts, lanes] float32. With x, as from QuantizeBlocks, and zero points of w [parts, blocks, lanes] int32, the
    products of x and the zero points are subtracted.
    """
    sums, steps, scales = node.input("sums"), node.input("steps"), node.input("scales")
    x, zeros = node.optional("x"), node.optional("zeros")
    count, (parts, blocks, lanes) = sums.shape[-3], scales.shape
    b = T.reduce_axis(blocks, "block")
    totals = None if x is None else _block_totals(x)

    def block_sum(row: list[Expr], part: Expr, lane: Expr) -> Expr:
        """Return the int32 sum of a block from its bytes, without the product of the zero point."""
        total: Expr = wrap(0, "int32")
        for number in range(count):
            value = sums[(*row, part, number, b, lane)].astype("int32")
            total = total + ((value if number == count - 1 else value & 255) << 8 * number)
        return total if zeros is None or totals is None else total - totals[(*row, b)] * zeros[part, b, lane]

    def scaled(*i: Expr) -> Expr:
        *row, part, lane = i
        return T.sum(block_sum(row, part, lane).astype(F32) * (steps[(*row, b)] * scales[part, b, lane]), b)

    return T.compute((*steps.shape[:-1], parts, lanes), scaled, "scaled")


def _block_totals(x: Tensor) -> Tensor:
    """Return the int32 sum of each block of x [..., blocks, size], by which zero points are multiplied."""
    k = T.reduce_axis(x.shape[-1], "k")
    return T.compute(x.shape[:-1], lambda *i: T.sum(x[(*i, k)].astype("int32"), k), "ones")


@op(
    "QLinearNorm", kind=Kind.REDUCTION, domain="celosia",
    operands="x x_scale x_zero_point epsilon bias:bias factor y_scale y_zero_point",
)  # fmt: skip
def qlinear_norm(node: Node) -> Tensor:
    """Build our QLinearNorm: normalise rows of the last axis as the accelerator does, in integers.

    epsilon, bias, factor: as numerics.NormConstants derives them. Attribute centre: the mean is subtracted first.
    """
    x, rows = node.input("x"), node.input("x").shape[:-1]
    zx, zy = node.scalar("x_zero_point", "int64"), node.scalar("y_zero_point", "int32")
    bias, factor = node.input("bias"), node.input("factor")

    def compute_for_rows(name: str, number: Callable[..., Expr]) -> Callable[..., Expr]:
        """Compute a number of each row once; return a function that reads it."""
        tensor = T.compute(rows, number, name)
        return lambda *i: tensor[i]

    def element(*i: Expr) -> Expr:
        return x[i].astype("int64") - zx

    total, squares = (
        compute_for_rows(name, number) for name, number in zip(("total", "squares"), row_sums(element, x.shape[-1]))
    )
    row = norm_row(
        total, squares, node.scalar("epsilon", "int64"), x.shape[-1], bool(node.attrs["centre"]), compute_for_rows
    )

    def result(*i: Expr) -> Expr:
        z = row.element(element(*i), *i[:-1])
        return requantize(z + bias[i[-1]], factor[i[-1]], zy, x.dtype)

    return T.compute(x.shape, result, "norm")
