"""Products of bytes in blocks, with a scale each: our own operators around sums that the accelerator makes.

graph/block_sums.py puts them in the place of a MatMulNBits. The sums of a row lie as the accelerator stores them:
[parts, bytes, blocks, lanes] int8, the lowest byte of all sums of a part first; a part has `lanes` columns.
"""

from __future__ import annotations

from celosia.compiler import expr as T
from celosia.compiler.cpu.ops.contrib import F32, steps_of_blocks
from celosia.compiler.cpu.ops.registry import Node, op
from celosia.compiler.expr import Expr, Tensor, call, select, wrap
from celosia.compiler.program.traits import Kind


@op("QuantizeBlocks", kind=Kind.OPAQUE)
def quantize_blocks(node: Node) -> list[Tensor]:
    """x [..., K] float32 as int8 [..., blocks * block_size], zeros beyond K, and the step of each block [..., blocks]."""
    x, size = node.input(0), int(node.attrs["block_size"])
    largest, steps = steps_of_blocks(x, size)
    last, blocks = x.shape[-1] - 1, largest.shape[-1]

    def body(*i: Expr) -> Expr:
        value = x[(*i[:-1], T.minimum(i[-1], last))] * steps[(*i[:-1], i[-1] // size)]
        return select(i[-1] <= last, call("round_even", value), wrap(0, F32)).astype("int8")

    rounded = T.compute((*x.shape[:-1], blocks * size), body, "rounded")
    return [rounded, T.compute(largest.shape, lambda *i: largest[i] / 127.0, "scale")]


@op("BlockSums", kind=Kind.OPAQUE, heavy=True)
def block_sums(node: Node) -> Tensor:
    """x [..., blocks * size] times w [parts, blocks, lanes, size], both int8: [..., parts * sum_bytes * blocks * lanes]
    int8, the bytes of int32 sums, block by block. Attributes K and N: of the matrix, which w fills up with zeros."""
    x, w, count = node.input(0), node.input(1), int(node.attrs["sum_bytes"])
    parts, blocks, lanes, size = w.shape
    k = T.reduce_axis(size, "k")

    def product(*i: Expr) -> Expr:
        part, block, lane = i[-3:]
        value = x[(*i[:-3], block * size + k)].astype("int32")
        return T.sum(value * w[part, block, lane, k].astype("int32"), k)

    sums = T.compute((*x.shape[:-1], parts, blocks, lanes), product, "sums")
    each = blocks * lanes

    def byte(*i: Expr) -> Expr:
        part, place = i[-1] // (count * each), i[-1] % (count * each)
        block, lane = place % each // lanes, place % lanes
        return (sums[(*i[:-1], part, block, lane)] >> (place // each * 8).astype("int32")).astype("int8")

    return T.compute((*x.shape[:-1], parts * count * each), byte, "bytes")


@op("ScaleSums", kind=Kind.OPAQUE)
def scale_sums(node: Node) -> Tensor:
    """sums, as BlockSums makes them, times steps [..., blocks] and scales [N, blocks], added up over the blocks in their
    order, plus bias [N]. With x, as QuantizeBlocks makes it, and zeros [N, blocks] int32 what zeros add to the sums is
    taken off. Attributes: sum_bytes, and lanes.
    """
    sums, steps, scales = node.input(0), node.input(1), node.input(2)
    bias, x, zeros = (node.input(i) if node.has(i) else None for i in (3, 4, 5))
    count, lanes = int(node.attrs["sum_bytes"]), int(node.attrs["lanes"])
    n, blocks = scales.shape
    b = T.reduce_axis(blocks, "block")

    def whole(row: tuple[Expr, ...], column: Expr, block: Expr) -> Expr:
        part, lane = column // lanes, column % lanes
        total: Expr = wrap(0, "int32")
        for number in range(count):
            value = sums[(*row, ((part * count + number) * blocks + block) * lanes + lane)].astype("int32")
            total = total + ((value if number == count - 1 else value & 255) << 8 * number)
        return total

    def added(row: tuple[Expr, ...], block: Expr) -> Expr:
        assert x is not None
        size = x.shape[-1] // blocks
        k = T.reduce_axis(size, "k")
        return T.sum(x[(*row, block * size + k)].astype("int32"), k)

    ones = T.compute(steps.shape, lambda *i: added(i[:-1], i[-1]), "ones") if zeros is not None else None

    def scaled(*i: Expr) -> Expr:
        row, column = i[:-1], i[-1]
        total = whole(row, column, b)
        if zeros is not None and ones is not None:
            total = total - ones[(*row, b)] * zeros[column, b]
        return T.sum(total.astype(F32) * (steps[(*row, b)] * scales[column, b]), b)

    y = T.compute((*steps.shape[:-1], n), scaled, "scaled")
    return y if bias is None else T.compute(y.shape, lambda *i: y[i] + bias[i[-1]], "biased")
