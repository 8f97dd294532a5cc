"""Multiplications that a graph means, wherever they run."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence
from math import prod
from typing import Any

import onnx_ir as ir

from celosia.compiler.graph.operands import data_operands, operand
from celosia.compiler.graph.values import attribute, constant, operands, shape
from celosia.compiler.ops import op_spec
from celosia.compiler.program.op_spec import Moves, filling

Shape = Any
"""tuple[int, ...], or None where it is not known, or an input is left out."""
Count = Callable[[ir.Node, Sequence[Shape], Shape], int]
"""Products of a node, of the shapes of what it computes with (all inputs, where it declares none) and of its first
output; TypeError or IndexError where one lacks."""
_COUNTS: dict[str, Count] = {}
_counts = filling(_COUNTS)


def total_macs(graph: ir.Graph) -> int:
    """Multiply-accumulates of convolutions, products of matrices, recurrences and attentions whose shapes are known."""
    return sum(_macs(node) for node in graph)


def _macs(node: ir.Node) -> int:
    spec = op_spec(node.op_type)
    count = _COUNTS.get(node.op_type) or _COUNTS.get(spec.variant_of)
    if count is None:
        return 0
    try:
        read = data_operands(node) if spec.operands else node.inputs
        return count(node, [_shape(value) for value in read], shape(node.outputs[0]) if node.outputs else None)
    except (TypeError, IndexError):  # a shape that is not known, or that nothing fits
        return 0


def _shape(value: ir.Value | None) -> Shape:
    return None if value is None else shape(value)


@_counts("MatMul", "Gemm")
def _matrices(node: ir.Node, given: Sequence[Shape], out: Shape) -> int:
    axis = -1 if not attribute(node, "transA", 0) else 0 if attribute(node, "transBatchA", 0) else -2
    return int(math.prod(out) * given[0][axis])


@_counts("Conv")
def _convolution(node: ir.Node, given: Sequence[Shape], out: Shape) -> int:
    return int(math.prod(out) * math.prod(given[1][1:]))


@_counts("ConvTranspose")
def _transposed(node: ir.Node, given: Sequence[Shape], out: Shape) -> int:
    """Each element of the input meets the kernels of its channel."""
    return int(math.prod(given[0]) * math.prod(given[1][1:]))


@_counts("LSTM", "GRU", "RNN")
def _recurrence(node: ir.Node, given: Sequence[Shape], out: Shape) -> int:
    """MACs of a recurrent operator, each of whose outputs may be left out."""
    x, kernels, again, *_ = given
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


@_counts("com.microsoft.Attention", "QAttention")
def _projected(node: ir.Node, given: Sequence[Shape], out: Shape) -> int:
    """MACs of attention whose weights make queries, keys and values."""
    (batch, steps, inner), (_, width) = given[0], given[1]
    before = _shape(operand(node, "past"))
    queries = (attribute(node, "qkv_hidden_sizes") or [width // 3])[0]
    seen = steps + (before[3] if before else 0)
    return int(batch * steps * (inner * width + seen * (queries + out[2])))


@_counts("MultiHeadAttention", "GroupQueryAttention")
def _attention(node: ir.Node, given: Sequence[Shape], out: Shape) -> int:
    """MACs of attention over the queries, keys and values that are there: each query with each key, and the weight of
    that with each value."""
    batch, steps, width = given[0]
    present = shape(node.outputs[1]) if len(node.outputs) > 1 else None
    if present is not None:
        seen = present[2]
    else:
        past = _shape(operand(node, "past_key"))
        seen = given[1][-2] + (past[2] if past else 0)
    queries = width if node.op_type == "MultiHeadAttention" else out[2]
    return int(batch * steps * seen * (queries + out[2]))


BYTES_A_CYCLE, MACS_A_CYCLE = 4, 4
"""Bytes that a processor beside the accelerator moves in a cycle of the accelerator, and its multiplications."""
STEP_CYCLES = 200
"""Cycles of an operator on the CPU, whatever its size."""


def host_cycles(node: ir.Node, cpu: Container[ir.Node]) -> float:
    """Estimate the cost of an operator on the CPU, in the accelerator's cycles. cpu: all operators that are there.

    Each operand is read once and each result written once. An operator that takes parts of a tensor (a Slice) reads
    these alone, and costs nothing if only kernels of the CPU read it, since it is fused into them.
    """
    moved = sum(map(bytes_of, node.outputs))
    if op_spec(node.op_type).moves is Moves.SOME:
        readers = [use.node for out in node.outputs for use in out.uses()]
        if readers and all(reader in cpu for reader in readers) and not any(o.is_graph_output() for o in node.outputs):
            return 0
        return STEP_CYCLES + 2 * moved / BYTES_A_CYCLE
    moved += sum(bytes_of(value) for value in operands(node) if constant(value) is None)
    macs = total_macs([node])  # type: ignore[arg-type]
    return STEP_CYCLES + moved / BYTES_A_CYCLE + macs / MACS_A_CYCLE


def bytes_of(value: ir.Value) -> int:
    """Return the bytes of a tensor; 0 for strings, and if its shape is not known."""
    sizes, kind = shape(value), value.dtype
    if sizes is None or kind is None or kind in (ir.DataType.STRING, ir.DataType.UNDEFINED):
        return 0
    return int(prod(sizes) * kind.itemsize)
