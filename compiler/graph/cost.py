"""Multiplications that a graph means, wherever they run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir

from celosia.compiler.cpu.ops import traits
from celosia.compiler.graph.values import attribute, shape
from celosia.compiler.program.traits import filling

Shape = Any
"""tuple[int, ...], or None where it is not known, or an input is left out."""
Count = Callable[[ir.Node, Sequence[Shape], Shape], int]
"""Products of a node, of the shapes of its inputs and of its first output; TypeError or IndexError where one lacks."""
_COUNTS: dict[str, Count] = {}
_counts = filling(_COUNTS)


def total_macs(graph: ir.Graph) -> int:
    """Multiply-accumulates of convolutions, products of matrices, recurrences and attentions whose shapes are known."""
    return sum(_macs(node) for node in graph)


def _macs(node: ir.Node) -> int:
    count = _COUNTS.get(node.op_type)
    if count is None:
        return 0
    given = [None if value is None else shape(value) for value in node.inputs]
    try:
        return count(node, given, shape(node.outputs[0]) if node.outputs else None)
    except (TypeError, IndexError):  # a shape that is not known, or that nothing fits
        return 0


@_counts("MatMul", "MatMulInteger", "MatMulInteger16", "MatMulIntegerToFloat", "DynamicQuantizeMatMul", "QLinearMatMul")
@_counts("Gemm", "QGemm", "FusedGemm", "FusedMatMul", "TransposeMatMul")
def _matrices(node: ir.Node, given: Sequence[Shape], out: Shape) -> int:
    axis = -1 if not attribute(node, "transA", 0) else 0 if attribute(node, "transBatchA", 0) else -2
    return int(math.prod(out) * given[0][axis])


@_counts("Conv", "QLinearConv", "ConvInteger", "FusedConv", "DeformConv")
def _convolution(node: ir.Node, given: Sequence[Shape], out: Shape) -> int:
    return int(math.prod(out) * math.prod(given[traits(node.op_type).weights or 0][1:]))


@_counts("ConvTranspose", "ConvTransposeWithDynamicPads")
def _transposed(node: ir.Node, given: Sequence[Shape], out: Shape) -> int:
    """Each element of the input meets the kernels of its channel."""
    return int(math.prod(given[0]) * math.prod(given[1][1:]))


@_counts("LSTM", "DynamicQuantizeLSTM", "GRU", "RNN")
def _recurrence(node: ir.Node, given: Sequence[Shape], out: Shape) -> int:
    """MACs of a recurrent operator, each of whose outputs may be left out."""
    x, kernels, again = given[:3]
    return int(x[0] * x[1]) * (math.prod(kernels) + math.prod(again))


@_counts("MatMulNBits", "MatMulBnb4")
def _packed_weights(node: ir.Node, given: Sequence[Shape], out: Shape) -> int:
    return int(math.prod(out) * attribute(node, "K"))


@_counts("BlockSums")
def _sums_of_blocks(node: ir.Node, given: Sequence[Shape], out: Shape) -> int:
    return int(math.prod(out[:-1]) * attribute(node, "K") * attribute(node, "N"))


@_counts("Einsum")
def _sums(node: ir.Node, given: Sequence[Shape], out: Shape) -> int:
    """One product, or one for each operand after the first, for all values of all indices of the equation."""
    terms = attribute(node, "equation").replace(" ", "").split("->")[0].split(",")
    sizes: dict[str, int] = {}
    for term, dims in zip(terms, given):  # what does not fit is refused where it is computed
        before, dots, after = term.partition("...")
        free = len(dims) - len(before) - len(after)
        names = [*before, *(f"...{free - k}" for k in range(free if dots else 0)), *after]
        for name, size in zip(names, dims):
            sizes[name] = max(size, sizes.get(name, 0))
    return math.prod(sizes.values()) * (len(terms) - 1)


def _projected(past: int) -> Count:
    """Attention whose weights make queries, keys and values. past: the input of those that came before."""

    def count(node: ir.Node, given: Sequence[Shape], out: Shape) -> int:
        (batch, steps, inner), (_, width) = given[0], given[1]
        before = given[past] if past < len(given) else None
        queries = (attribute(node, "qkv_hidden_sizes") or [width // 3])[0]
        seen = steps + (before[3] if before else 0)
        return int(batch * steps * (inner * width + seen * (queries + out[2])))

    return count


@_counts("MultiHeadAttention", "GroupQueryAttention")
def _attention(node: ir.Node, given: Sequence[Shape], out: Shape) -> int:
    """MACs of attention over the queries, keys and values that are there: each query with each key, and the weight of
    that with each value."""
    batch, steps, width = given[0]
    present = shape(node.outputs[1]) if len(node.outputs) > 1 else None
    if present is not None:
        seen = present[2]
    else:
        seen = given[1][-2] + (given[6][2] if len(given) > 6 and given[6] else 0)
    queries = width if node.op_type == "MultiHeadAttention" else out[2]
    return int(batch * steps * seen * (queries + out[2]))


_counts("com.microsoft.Attention")(_projected(4))
_counts("QAttention")(_projected(8))
