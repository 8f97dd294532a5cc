"""The operators of the algebra: one file for each family, which declares for each operator in one class what it is.

definition   what an operator declares; what windows, and readers of ONNX nodes, share
elements     expressions for proofs: an element of a tensor, in terms of elements of others
products     of bytes: convolve, multiply, requantise, plus, map
movement     concat, slice, transpose, reshape, pad, phases, interleave, spread
windows      of bytes: largest, largest_again, average, average_by_products
floats       float_convolve, float_multiply, whose sums no rule may reorder
reals        operators of fast-math: floats whose rounding is left out of account
"""

from __future__ import annotations

from typing import Any

from celosia.compiler.superoptimise.operators.definition import Attributes, OperandShapes, TermOperator
from celosia.compiler.superoptimise.operators.floats import FLOATS
from celosia.compiler.superoptimise.operators.movement import MOVEMENT
from celosia.compiler.superoptimise.operators.products import PRODUCTS
from celosia.compiler.superoptimise.operators.reals import REALS
from celosia.compiler.superoptimise.operators.windows import WINDOWS

OPERATORS: dict[str, TermOperator] = {**PRODUCTS, **MOVEMENT, **WINDOWS, **FLOATS, **REALS}
"""Each operator by its name."""


def demands(op: str, shapes: OperandShapes, attributes: Attributes) -> list[Any]:
    """List the demands of the operator `op` on the shapes of its operands and on its attributes. The list ends after a
    demand that is False, as later ones may rely on it.
    """
    conditions: list[Any] = []
    try:
        for condition in OPERATORS[op].demands(shapes, attributes):
            conditions.append(condition)
            if condition is False:
                break
    except (IndexError, ZeroDivisionError):  # a shape with too few dimensions, or 0 groups
        conditions.append(False)
    return conditions
