"""Averages of windows, which onnxruntime computes in floats, and the accelerator as sums of integers.

    QLinearAveragePool(x, sx, zx, sy, zy)      ->      QLinearAveragePool<integers = 1>(x, sx, zx, sy, zy)

for `compile(rounding="correct")`, where the integers are not proved to give onnxruntime's bytes: floats break ties by
roundings of their own (docs/numerics.md). All others stay onnxruntime's, byte for byte.
"""

from __future__ import annotations

from itertools import product

import onnx_ir as ir

from celosia.compiler import numerics
from celosia.compiler.graph.operands import operand
from celosia.compiler.graph.values import attribute, attributes, constant, is_op
from celosia.compiler.graph.windows import windows_of
from celosia.compiler.program.host.window_geometry import WindowError

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
