"""Count the multiply-accumulates (MACs) of a graph, wherever they run, and estimate what operators cost on the CPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence
from math import prod
from typing import Any

import onnx_ir as ir

from celosia.compiler.graph.operands import data_operands, operand
from celosia.compiler.graph.values import attribute, constant, is_op, operands, shape, subgraphs
from celosia.compiler.ops import op_spec
from celosia.compiler.program.host.hostops.recurrent_ops import are_projected
from celosia.compiler.program.op_spec import Moves, quantised_form, registering_in

Shape = Any
"""tuple[int, ...]; None where it is not known, or where an input is left out."""
Count = Callable[[ir.Node, Sequence[Shape], Shape], int]
"""(node, shapes of its data operands, shape of its first output) -> MACs.

An operator that declares no operands gets the shapes of all inputs. Raises TypeError or IndexError where a shape is
missing.
"""
_COUNTS: dict[str, Count] = {}
"""Operator -> the function that counts its MACs."""
_counts_macs_of = registering_in(_COUNTS)
"""Decorator that registers a function for operators."""


def total_macs(graph: ir.Graph) -> int:
    """Return the MACs of convolutions, matrix products, recurrences and attentions whose shapes are known.

    Of the branches of an If the one with more MACs counts, and the body of a Loop or Scan once for each iteration, or
    once if their number is not known.
    """
    return sum(_macs_of_bodies(node) + _macs(node) for node in graph)


def _macs_of_bodies(node: ir.Node) -> int:
    """Return the MACs of the bodies of a node; 0 for a node without bodies."""
    return max((total_macs(body) for body in subgraphs(node)), default=0) * _iterations(node)


def _iterations(node: ir.Node) -> int:
    """Return the number of iterations of a Loop or Scan, and 1 where it is not known."""
    if node.op_type == "Loop":
        trips = constant(node.inputs[0])
        return 1 if trips is None else max(int(trips.reshape(-1)[0]), 0)
    if node.op_type == "Scan":
        axes, scanned = attribute(node, "scan_input_axes") or [0], node.inputs[-attribute(node, "num_scan_inputs")]
        sizes = None if scanned is None else shape(scanned)
        return 1 if sizes is None or not -len(sizes) <= axes[0] < len(sizes) else sizes[axes[0]]
    return 1


def _macs(node: ir.Node) -> int:
    """Return the MACs of a node; 0 for other operators, and where a shape is not known."""
    spec = op_spec(node.op_type)
    count = _COUNTS.get(node.op_type) or _COUNTS.get(spec.variant_of)
    if count is None:
        return 0
    try:
        data = data_operands(node) if spec.operands else node.inputs
        return count(node, [_shape(value) for value in data], shape(node.outputs[0]) if node.outputs else None)
    except (TypeError, IndexError):  # a shape that is not known, or that nothing fits
        return 0


def _shape(value: ir.Value | None) -> Shape:
    """Return the shape of a value; None if there is no value."""
    return None if value is None else shape(value)


@_counts_macs_of("MatMul", "Gemm")
def _count_matrix_product(node: ir.Node, shapes: Sequence[Shape], out: Shape) -> int:
    """Count as many MACs for each result as the left matrix has columns (rows if transposed)."""
    axis = -1 if not attribute(node, "transA", 0) else 0 if attribute(node, "transBatchA", 0) else -2
    return int(math.prod(out) * shapes[0][axis])


@_counts_macs_of("Conv")
def _count_convolution(node: ir.Node, shapes: Sequence[Shape], out: Shape) -> int:
    """Count as many MACs for each result as a kernel has weights."""
    return int(math.prod(out) * math.prod(shapes[1][1:]))


@_counts_macs_of("ConvTranspose")
def _count_transposed_convolution(node: ir.Node, shapes: Sequence[Shape], out: Shape) -> int:
    """Count as many MACs for each element of the input as its channel has weights."""
    return int(math.prod(shapes[0]) * math.prod(shapes[1][1:]))


@_counts_macs_of("LSTM", "GRU", "RNN")
def _count_recurrence(node: ir.Node, shapes: Sequence[Shape], out: Shape) -> int:
    """Count one product by all input weights and all recurrent weights for each time step of each sample.

    The outputs may be left out, so that the inputs give the sizes. Inputs that are gates already are not multiplied.
    """
    x, input_weights, recurrent_weights, *_ = shapes
    is_projected = are_projected(constant(operand(node, "w")))
    return int(x[0] * x[1]) * (math.prod(recurrent_weights) + (0 if is_projected else math.prod(input_weights)))


@_counts_macs_of("MatMulNBits", "MatMulBnb4")
def _count_packed_weights(node: ir.Node, shapes: Sequence[Shape], out: Shape) -> int:
    """Count K MACs for each result."""
    return int(math.prod(out) * attribute(node, "K"))


@_counts_macs_of("BlockSums")
def _count_block_sums(node: ir.Node, shapes: Sequence[Shape], out: Shape) -> int:
    """Count a product by a K x N matrix of weights for each row of activations."""
    return int(math.prod(out[:-1]) * attribute(node, "K") * attribute(node, "N"))


@_counts_macs_of("Einsum")
def _count_einsum(node: ir.Node, shapes: Sequence[Shape], out: Shape) -> int:
    """Count one MAC for each combination of all indices and each operand after the first."""
    terms = attribute(node, "equation").replace(" ", "").split("->")[0].split(",")
    sizes: dict[str, int] = {}
    for term, dims in zip(terms, shapes):  # operands that do not fit are refused when they are computed
        before, dots, after = term.partition("...")
        ellipsis_axes = len(dims) - len(before) - len(after)
        names = [*before, *(f"...{ellipsis_axes - k}" for k in range(ellipsis_axes if dots else 0)), *after]
        for name, size in zip(names, dims):
            sizes[name] = max(size, sizes.get(name, 0))
    return math.prod(sizes.values()) * (len(terms) - 1)


@_counts_macs_of("com.microsoft.Attention", "QAttention")
def _count_projected_attention(node: ir.Node, shapes: Sequence[Shape], out: Shape) -> int:
    """Count the projections to queries, keys and values, and attention of each step over past and present steps."""
    (batch, steps, channels), (_, width) = shapes[0], shapes[1]
    past = _shape(operand(node, "past"))
    query_width = (attribute(node, "qkv_hidden_sizes") or [width // 3])[0]
    key_count = steps + (past[3] if past else 0)
    return int(batch * steps * (channels * width + key_count * (query_width + out[2])))


@_counts_macs_of("MultiHeadAttention", "GroupQueryAttention")
def _count_attention(node: ir.Node, shapes: Sequence[Shape], out: Shape) -> int:
    """Count a product of each query with each key, and of each attention weight with the value of that key."""
    batch, steps, width = shapes[0]
    present = shape(node.outputs[1]) if len(node.outputs) > 1 else None
    if present is not None:
        key_count = present[2]
    else:
        past = _shape(operand(node, "past_key"))
        key_count = shapes[1][-2] + (past[2] if past else 0)
    query_width = width if node.op_type == "MultiHeadAttention" else out[2]
    return int(batch * steps * key_count * (query_width + out[2]))


BYTES_A_CYCLE, MACS_A_CYCLE = 4, 4
"""Bytes that a CPU beside the accelerator moves, and MACs that it computes, in one cycle of the accelerator."""
ROW_OPERATORS = (quantised_form("Softmax"), "QLinearNorm")
"""Operators that compute sums of rows, and then each element from these."""
ROW_OPERATIONS = 8
"""Operations of ROW_OPERATORS for each element, each of which takes about as long as a MAC."""
STEP_CYCLES = 200
"""Fixed cost of an operator on the CPU, in cycles of the accelerator."""


def host_cycles(node: ir.Node, cpu: Container[ir.Node]) -> float:
    """Estimate the cost of an operator on the CPU, in cycles of the accelerator. cpu: all operators on the CPU.

    Each operand is read once and each result written once. An operator that copies part of a tensor (a Slice) reads
    that part alone, and costs nothing if only CPU kernels read it, since it is fused into them.
    """
    moved_bytes = sum(map(bytes_of, node.outputs))
    if op_spec(node.op_type).moves is Moves.SOME:
        readers = [use.node for out in node.outputs for use in out.uses()]
        if readers and all(reader in cpu for reader in readers) and not any(o.is_graph_output() for o in node.outputs):
            return 0
        return STEP_CYCLES + 2 * moved_bytes / BYTES_A_CYCLE
    moved_bytes += sum(bytes_of(value) for value in operands(node) if constant(value) is None)
    macs = _macs(node)
    if is_op(node, *ROW_OPERATORS):
        macs += ROW_OPERATIONS * prod(shape(node.outputs[0]) or (0,))
    return STEP_CYCLES + moved_bytes / BYTES_A_CYCLE + macs / MACS_A_CYCLE


def bytes_of(value: ir.Value) -> int:
    """Return the bytes of a tensor; 0 for strings, and if its shape is not known."""
    sizes, kind = shape(value), value.dtype
    if sizes is None or kind is None or kind in (ir.DataType.STRING, ir.DataType.UNDEFINED):
        return 0
    return int(prod(sizes) * kind.itemsize)
