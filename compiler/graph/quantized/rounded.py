"""Normalisations between bytes as one operator of integers, whose results are rounded correctly.

    y8 = QuantizeLinear(LayerNormalization(DequantizeLinear(x8), gamma, beta))
        ->      y8 = QLinearNorm(x8, sx, zx, epsilon, bias, scale, sy, zy)

The same for RMSNormalization and onnxruntime's SimplifiedLayerNormalization, of which nothing takes off the mean. What
stands here is for `compile(rounding="correct")`: onnxruntime computes floats, and may round to the other side.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from celosia.compiler import numerics
from celosia.compiler.graph.operands import operand
from celosia.compiler.graph.quantized.qdq import Quantised, activation, dequantised, meaning
from celosia.compiler.graph.values import attribute, attributes, constant, is_op, new_constant, shape
from celosia.compiler.graph.windows import windows_of
from celosia.compiler.program.host.window_geometry import WindowError

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


INTEGERS = "integers"


def round_averages(model: ir.Model) -> None:
    """Change `model`: those averages add integers that would add floats."""
    for node in model.graph:
        if is_op(node, "QLinearAveragePool") and not adds_integers(node):
            node.domain = "celosia"
            (node.attributes[INTEGERS],) = attributes(**{INTEGERS: 1})


def adds_integers(node: ir.Node) -> bool:
    """Whether sums of integers give the bytes of a QLinearAveragePool: it adds them, or floats that are proved not to
    tell (`numerics.average_is_exact`)."""
    if attribute(node, INTEGERS, 0):
        return True
    try:
        windows = windows_of(node)
    except WindowError:
        return False
    arrays = [constant(operand(node, name)) for name in ("x_scale", "x_zero_point", "y_scale")]
    if any(array is None or array.size != 1 for array in arrays):
        return windows.is_global
    sx, zero, sy = (array.reshape(()) for array in arrays if array is not None)
    stored = int(zero) - 128 * (zero.dtype == "uint8")
    counts = {rows * columns for rows, columns in product(windows.divisors(0), windows.divisors(1))}
    return windows.is_global or all(numerics.average_is_exact(float(sx), stored, float(sy), count) for count in counts)
