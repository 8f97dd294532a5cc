"""Operators of integers whose results are rounded correctly: normalisations, sums and averages of bytes.

    y8 = QuantizeLinear(LayerNormalization(DequantizeLinear(x8), gamma, beta))
        ->      y8 = QLinearNorm(x8, sx, zx, epsilon, bias, scale, sy, zy)

Also for RMSNormalization and onnxruntime's SimplifiedLayerNormalization, which do not subtract the mean. They are used
with `compile(rounding="correct")`: onnxruntime computes floats, and may round to the other side of a tie.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from celosia.compiler import numerics
from celosia.compiler.graph.operands import operand
from celosia.compiler.graph.qdq import Quantised, activation, dequantised, scale_and_zero
from celosia.compiler.graph.quantized.tables import scales_and_zeros
from celosia.compiler.graph.shapes import windows_of
from celosia.compiler.graph.values import attribute, attributes, constant, is_op, new_constant, shape
from celosia.compiler.program.host.shape_rules import WindowError

CENTRED = "LayerNormalization"
"""The normalisation that subtracts the mean."""
NORMS = (CENTRED, "RMSNormalization", "SimplifiedLayerNormalization")
"""Normalisations that can become QLinearNorm."""
WHY = "celosia.norm"
"""Key in `meta` of a normalisation that stays in floats: the reason, for messages."""


def norm_operands(graph: ir.Graph, node: ir.Node, y: Quantised) -> tuple[Quantised, list[ir.Value]] | None:
    """Return (input, [epsilon, bias, scale] as constants of `graph`) of a normalisation whose result is `y`.

    None, with the reason in `meta` of `node`, if it cannot be computed in integers.
    """
    try:
        x, constants = _read_norm(node, y)
    except numerics.NormError as reason:
        node.meta[WHY] = str(reason)
        return None
    epsilon = np.array(constants.epsilon, np.int64)
    arrays: dict[str, NDArray[Any]] = {"epsilon": epsilon, "bias": constants.bias, "scale": constants.scale}
    return x, [new_constant(graph, f"{node.name}_{name}", array) for name, array in arrays.items()]


def _read_norm(node: ir.Node, y: Quantised) -> tuple[Quantised, numerics.NormConstants]:
    """Return the input and the integer constants of a normalisation. Raises NormError with the reason if it cannot."""
    x = activation(node.inputs[0])
    if x is None or x.dtype != y.dtype:
        raise numerics.NormError(f"its input is no tensor of {y.dtype} with one scale, as its result is")
    dims = shape(x.value)
    if dims is None or attribute(node, "axis", -1) % len(dims) != len(dims) - 1:
        raise numerics.NormError("sums are those of rows along the last axis, whose size is known")
    floats = [_constant_floats(value) for value in node.inputs[1:]]
    if any(array is None or array.dtype != np.float32 for array in floats):
        raise numerics.NormError("its scale and offset are no constants of float32")
    if any(array.size != 1 and not array.size == array.shape[-1] == dims[-1] for array in floats):  # type: ignore[union-attr]
        raise numerics.NormError("its scale and offset are no rows, as those are that are normalised")
    gamma, beta = (np.broadcast_to(array.reshape(-1), dims[-1:]) for array in (*floats, np.zeros(1, np.float32))[:2])  # type: ignore[union-attr]
    return x, numerics.norm_constants(
        gamma, beta, scale_and_zero(x)[0], scale_and_zero(y)[0], attribute(node, "epsilon", 1e-5)
    )


def _constant_floats(value: ir.Value | None) -> NDArray[Any] | None:
    """Return a constant, also one that a DequantizeLinear makes of a constant with one scale; None for others."""
    q, array = dequantised(value), constant(value)
    integers = None if q is None or not q.scalar else constant(q.value)
    if q is None or integers is None:
        return array
    return numerics.dequantize_linear(integers, q.scale.reshape(()), q.zero.reshape(()))


FACTORS = "factors"
"""Attribute of a QLinearAdd or QLinearMul of ours: the integers [ma, mb, c, shift] with which it computes. A QLinearAdd
may also have the least and the greatest byte of its result, as the accelerator stores it."""


def round_sums(model: ir.Model) -> None:
    """Round correctly each QLinearAdd whose floats no integers reproduce: give it the nearest integers as FACTORS."""
    for node in model.graph:
        scales = scales_and_zeros(node, "abc") if is_op(node, "QLinearAdd") else None
        if scales is None or rescaled_sum(node) is not None:
            continue
        sa, za, sb, zb, sy, zy = scales
        nearest = numerics.nearest_rescale_add(sa, za, sb, zb, sy, zy, _result_dtype(node))
        if nearest is not None:
            node.domain = "celosia"
            (node.attributes[FACTORS],) = attributes(**{FACTORS: [nearest.ma, nearest.mb, nearest.c, nearest.shift]})


def rescaled_sum(node: ir.Node) -> numerics.RescaleAdd | None:
    """Return the integers with which a QLinearAdd is computed: its FACTORS, or those that give onnxruntime's bytes.

    None if there are none, so that it stays on the CPU.
    """
    if (factors := attribute(node, FACTORS)) is not None:
        return numerics.RescaleAdd(*factors)
    scales = scales_and_zeros(node, "abc")
    if scales is None:
        return None
    sa, za, sb, zb, sy, zy = scales
    a, b = (constant(operand(node, name)) for name in "ab")
    return numerics.fit_rescale_add(sa, za, sb, zb, sy, zy, _result_dtype(node), a, b)


def factors_of_floats(op: str, a: Quantised, b: Quantised, y: Quantised) -> list[int] | None:
    """Return the factors with which integers give the bytes `y` of an Add or Mul of dequantised `a` and `b` in float32.

    [] if QLinearAdd or QLinearMul gives them on all pairs, `FACTORS` if other integers do; None if none were found.
    """
    of_bytes, of_floats, fit_factors = numerics.BINARY[op]
    (sa, za), (sb, zb), (sy, zy) = scale_and_zero(a), scale_and_zero(b), scale_and_zero(y)
    lo, hi = np.iinfo(y.dtype).min, np.iinfo(y.dtype).max
    all_bytes = np.arange(lo, hi + 1).astype(y.dtype)
    x, z = (all_bytes if array is None else np.unique(array) for array in (constant(a.value), constant(b.value)))
    floats = of_floats(x[:, None], z, sa, za, sb, zb, sy, zy)
    swapped = of_bytes(z, x[:, None], sb, zb, sa, za, sy, zy)
    if np.array_equal(floats, of_bytes(x[:, None], z, sa, za, sb, zb, sy, zy)) and np.array_equal(floats, swapped):
        return []
    fitted = fit_factors(sa, za, sb, zb, sy, zy, y.dtype, x, z) if fit_factors is not None else None
    return None if fitted is None else [fitted.ma, fitted.mb, fitted.c, fitted.shift]


def _result_dtype(node: ir.Node) -> np.dtype[Any]:
    """Return the element type of a node's result."""
    kind = node.outputs[0].dtype
    assert kind is not None
    return np.dtype(kind.numpy())


INTEGERS = "integers"
"""Attribute of a QLinearAveragePool of ours: 1 if it adds integers."""


def round_averages(model: ir.Model) -> None:
    """Let each QLinearAveragePool add integers where adding floats may give other bytes."""
    for node in model.graph:
        if is_op(node, "QLinearAveragePool") and not adds_integers(node):
            node.domain = "celosia"
            (node.attributes[INTEGERS],) = attributes(**{INTEGERS: 1})


def adds_integers(node: ir.Node) -> bool:
    """Return whether sums of integers give the bytes of a QLinearAveragePool.

    They do if it adds integers, or floats that provably give the same (`numerics.average_is_exact`).
    """
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
