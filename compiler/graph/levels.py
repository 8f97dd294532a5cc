"""Find 8-bit tensors of few distinct values (levels), so that their products can count bits.

Constants, Clip and tables bound the values; operators that only move elements keep them.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from celosia.compiler.graph.operands import joins_parts, takes_largest
from celosia.compiler.graph.quantized.tables import table_of
from celosia.compiler.graph.values import constant, dtype_name, is_op
from celosia.compiler.ops.bit_serial import BitLevels
from celosia.compiler.program.op_spec import Moves, op_spec

MAX_DEPTH = 16
"""Operators between a tensor and the one that bounds its values, at most."""


def levels_of(value: ir.Value | None, depth: int = MAX_DEPTH) -> BitLevels | None:
    """Return the few levels that elements of an int8 or uint8 `value` have; None if there may be more.

    depth: operators that are still followed back.
    """
    if value is None or dtype_name(value) not in ("int8", "uint8"):
        return None
    array = constant(value)
    if array is not None:
        return BitLevels.of(array)
    node = value.producer()
    if node is None or not depth:
        return None
    if is_op(node, "Clip", "Table"):
        table = table_of(node)
        offset = 0 if dtype_name(value) == "int8" else 128
        return None if table is None else BitLevels.of(table.astype(np.int16) + offset)
    if joins_parts(node):
        parts = [levels_of(part, depth - 1) for part in node.inputs]
        known = [part for part in parts if part is not None]
        return known[0].with_values(*known[1:]) if known and len(known) == len(parts) else None
    moves = op_spec(node.op_type).moves in (Moves.ALL, Moves.SOME)
    if is_op(node, node.op_type) and (moves or takes_largest(node)):
        return levels_of(node.inputs[0], depth - 1)
    return None
