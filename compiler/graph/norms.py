"""Normalisations between bytes as one operator of integers, whose results are rounded correctly.

    y8 = QuantizeLinear(LayerNormalization(DequantizeLinear(x8), gamma, beta))
        ->      y8 = QLinearNorm(x8, sx, zx, epsilon, bias, scale, sy, zy)

The same for RMSNormalization and onnxruntime's SimplifiedLayerNormalization, of which nothing takes off the mean. What
stands here is for `compile(rounding="correct")`: onnxruntime computes floats, and may round to the other side.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from celosia.compiler import numerics
from celosia.compiler.graph.qdq import Quantised, activation, dequantised, meaning
from celosia.compiler.graph.values import attribute, constant, new_constant, shape

CENTRED = "LayerNormalization"
NORMS = (CENTRED, "RMSNormalization", "SimplifiedLayerNormalization")
WHY = "celosia.norm"
"""In `meta` of an operator of NORMS that stays one: the reason."""


def norm_operands(graph: ir.Graph, node: ir.Node, y: Quantised) -> tuple[Quantised, list[ir.Value]] | None:
    """(The input, constants of `graph` epsilon, bias and scale) of `node`, one of NORMS whose result becomes `y`; None,
    and a reason in its `meta`, where it stays what it is."""
    try:
        x, found = _integers(node, y)
    except numerics.NormError as reason:
        node.meta[WHY] = str(reason)
        return None
    epsilon = np.array(found.epsilon, np.int64)
    arrays: dict[str, NDArray[Any]] = {"epsilon": epsilon, "bias": found.bias, "scale": found.scale}
    return x, [new_constant(graph, f"{node.name}_{name}", array) for name, array in arrays.items()]


def _integers(node: ir.Node, y: Quantised) -> tuple[Quantised, numerics.NormConstants]:
    x = activation(node.inputs[0])
    if x is None or x.dtype != y.dtype:
        raise numerics.NormError(f"its input is no tensor of {y.dtype} with one scale, as its result is")
    dims = shape(x.value)
    if dims is None or attribute(node, "axis", -1) % len(dims) != len(dims) - 1:
        raise numerics.NormError("sums are those of rows along the last axis, whose size is known")
    floats = [_floats(value) for value in node.inputs[1:]]
    if any(array is None or array.dtype != np.float32 for array in floats):
        raise numerics.NormError("its scale and offset are no constants of float32")
    if any(array.size != 1 and not array.size == array.shape[-1] == dims[-1] for array in floats):  # type: ignore[union-attr]
        raise numerics.NormError("its scale and offset are no rows, as those are that are normalised")
    gamma, beta = (np.broadcast_to(array.reshape(-1), dims[-1:]) for array in (*floats, np.zeros(1, np.float32))[:2])  # type: ignore[union-attr]
    return x, numerics.norm_constants(gamma, beta, meaning(x)[0], meaning(y)[0], attribute(node, "epsilon", 1e-5))


def _floats(value: ir.Value | None) -> NDArray[Any] | None:
    """A constant, or what a DequantizeLinear makes of one, once for all of it."""
    q, array = dequantised(value), constant(value)
    integers = None if q is None or not q.scalar else constant(q.value)
    if q is None or integers is None:
        return array
    return numerics.dequantize_linear(integers, q.scale.reshape(()), q.zero.reshape(()))
