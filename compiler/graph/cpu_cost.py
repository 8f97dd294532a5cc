"""Estimate the cycles of operators on a CPU, to compare them with the accelerator's."""

from __future__ import annotations

from collections.abc import Container
from math import prod

import onnx_ir as ir

from celosia.compiler.cpu.ops import traits
from celosia.compiler.graph.cost import total_macs
from celosia.compiler.graph.values import constant, operands, shape
from celosia.compiler.program.traits import Moves

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
    if traits(node.op_type).moves is Moves.SOME:
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
