"""Sums of bytes that no integers give on all pairs as onnxruntime's floats do: they are rounded correctly.

    QLinearAdd(a, sa, za, b, sb, zb, sy, zy)      ->      QLinearAdd<factors = [ma, mb, c, shift]>(a, sa, za, ...)

What stands here is for `compile(rounding="correct")`. All others stay onnxruntime's, byte for byte.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from celosia.compiler import numerics
from celosia.compiler.graph.values import attribute, attributes, constant, is_op

FACTORS = "factors"


def round_sums(model: ir.Model) -> None:
    """Change `model`: those QLinearAdd get the integers that are nearest."""
    for node in model.graph:
        if is_op(node, "QLinearAdd") and (scales := _scales(node)) is not None and rescaled_sum(node) is None:
            found = numerics.nearest_rescale_add(*scales, _dtype(node))
            if found is not None:
                node.domain = "celosia"
                (factors,) = attributes(**{FACTORS: [found.ma, found.mb, found.c, found.shift]})
                node.attributes[FACTORS] = factors


def rescaled_sum(node: ir.Node) -> numerics.RescaleAdd | None:
    """The integers of a QLinearAdd: those that it has, or those that give onnxruntime's bytes; None without any."""
    if (factors := attribute(node, FACTORS)) is not None:
        return numerics.RescaleAdd(*factors)
    scales = _scales(node)
    if scales is None:
        return None
    return numerics.fit_rescale_add(*scales, _dtype(node), constant(node.inputs[0]), constant(node.inputs[3]))


def _scales(node: ir.Node) -> tuple[float, int, float, int, float, int] | None:
    """sa, za, sb, zb, sy and zy, where they are constants of one element."""
    arrays = [constant(node.inputs[number]) for number in (1, 2, 4, 5, 6, 7)]
    if any(array is None or array.size != 1 for array in arrays):
        return None
    sa, za, sb, zb, sy, zy = (array.item() for array in arrays if array is not None)
    return sa, za, sb, zb, sy, zy


def _dtype(node: ir.Node) -> np.dtype[Any]:
    kind = node.outputs[0].dtype
    assert kind is not None
    return np.dtype(kind.numpy())
