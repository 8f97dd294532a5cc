"""Find tensors of bytes that hold few values: by constants, Clip and tables, through what only moves elements."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from celosia.compiler.graph.operands import joins_parts, takes_largest
from celosia.compiler.graph.quantized.tables import table_of
from celosia.compiler.graph.values import constant, dtype_name, is_op
from celosia.compiler.program.bit_levels import BitLevels
from celosia.compiler.program.op_spec import Moves, op_spec

DEPTH = 16
"""Operators that are looked through."""


def levels_of(value: ir.Value | None, depth: int = DEPTH) -> BitLevels | None:
    """The few values that elements of `value` have; None where they may have more, or nothing is known.

    Only for int8 and uint8.
    """
    if value is None or dtype_name(value) not in ("int8", "uint8"):
        return None
    fixed = constant(value)
    if fixed is not None:
        return BitLevels.of(fixed)
    node = value.producer()
    if node is None or not depth:
        return None
    if is_op(node, "Clip", "Table"):
        table = table_of(node)
        move = 0 if dtype_name(value) == "int8" else 128
        return None if table is None else BitLevels.of(table.astype(np.int16) + move)
    if joins_parts(node):
        parts = [levels_of(each, depth - 1) for each in node.inputs]
        known = [each for each in parts if each is not None]
        return known[0].joined(*known[1:]) if known and len(known) == len(parts) else None
    moves = op_spec(node.op_type).moves in (Moves.ALL, Moves.SOME)
    if is_op(node, node.op_type) and (moves or takes_largest(node)):
        return levels_of(node.inputs[0], depth - 1)
    return None
