"""Sums of bytes that no integers give on all pairs as onnxruntime's floats do: they are rounded correctly.

    QLinearAdd(a, sa, za, b, sb, zb, sy, zy)      ->      QLinearAdd<factors = [ma, mb, c, shift]>(a, sa, za, ...)

So for `compile(rounding="correct")`; by default they stay onnxruntime's, byte for byte.

    QuantizeLinear(Relu(Add(DequantizeLinear(a, sa, za), DequantizeLinear(b, sb, zb))), sy, zy)
        ->      Table(QLinearAdd<factors = [ma, mb, c, shift]>(a, sa, za, ...))

where bytes begin below 0: onnxruntime adds floats there, and these integers give the bytes of that.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from celosia.compiler import numerics
from celosia.compiler.graph.operands import operand
from celosia.compiler.graph.qdq import Quantised, meaning
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
    return numerics.fit_rescale_add(*scales, _dtype(node), *(constant(operand(node, name)) for name in "ab"))


def factors_of_floats(op: str, a: Quantised, b: Quantised, y: Quantised) -> list[int] | None:
    """Return the factors with which integers give the bytes `y` of an Add or Mul of dequantised `a` and `b` in float32.

    [] if QLinearAdd or QLinearMul gives them on all pairs, `FACTORS` if other integers do; None if none were found.
    """
    of_bytes, of_floats, fit = numerics.BINARY[op]
    (sa, za), (sb, zb), (sy, zy) = meaning(a), meaning(b), meaning(y)
    lo, hi = np.iinfo(y.dtype).min, np.iinfo(y.dtype).max
    every = np.arange(lo, hi + 1).astype(y.dtype)
    x, z = (every if array is None else np.unique(array) for array in (constant(a.value), constant(b.value)))
    floats = of_floats(x[:, None], z, sa, za, sb, zb, sy, zy)
    exchanged = of_bytes(z, x[:, None], sb, zb, sa, za, sy, zy)
    if np.array_equal(floats, of_bytes(x[:, None], z, sa, za, sb, zb, sy, zy)) and np.array_equal(floats, exchanged):
        return []
    found = fit(sa, za, sb, zb, sy, zy, y.dtype, x, z) if fit is not None else None
    return None if found is None else [found.ma, found.mb, found.c, found.shift]


def _scales(node: ir.Node) -> tuple[float, int, float, int, float, int] | None:
    """sa, za, sb, zb, sy and zy, where they are constants of one element."""
    arrays = [constant(operand(node, f"{name}_{kind}")) for name in "abc" for kind in ("scale", "zero_point")]
    if any(array is None or array.size != 1 for array in arrays):
        return None
    sa, za, sb, zb, sy, zy = (array.item() for array in arrays if array is not None)
    return sa, za, sb, zb, sy, zy


def _dtype(node: ir.Node) -> np.dtype[Any]:
    kind = node.outputs[0].dtype
    assert kind is not None
    return np.dtype(kind.numpy())
