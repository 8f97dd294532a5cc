"""Means of rows, and numbers that multiply or are added to rows, as products by a matrix of ones.

    m = QLinearGlobalAveragePool(x)   [1, T, C] -> [1, T, 1]      ->   m = QGemm(x, ones [C, 1])
    y = QLinearMul(x, m)              [1, T, C], [1, T, 1]        ->   y = QLinearMul(x, QGemm(m, ones [1, C]))

Both are steps of normalisations that quantisers round to bytes one by one. The accelerator holds rows as pixels with
their elements as channels: it has no sum of channels but products, and no operator that reads one channel for all.
The bytes stay the same.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from celosia.compiler import numerics
from celosia.compiler.graph.operands import MODEL_WEIGHTS, operand
from celosia.compiler.graph.quantized.tables import scales_and_zeros
from celosia.compiler.graph.rows import BINARY, tensors_of_rows
from celosia.compiler.graph.values import attributes, constant, derived_name, is_op, new_constant, shape
from celosia.compiler.ops import VIEWS, op_spec
from celosia.compiler.program.op_spec import arrange_operands, quantised_form

AVERAGE, PRODUCT = quantised_form("GlobalAveragePool"), quantised_form("Gemm")
MAX_STEPS = 64
"""Neighbours of 1 / C among float32 that are tried as the scale of the ones."""
MAX_COUNT = 1 << 13
"""Elements of the longest row whose mean becomes a product."""


def multiply_by_ones(model: ir.Model) -> None:
    """Replace means of rows by products, and repeat numbers of rows by products, where tensors consist of rows."""
    graph = model.graph
    rows = tensors_of_rows(graph)
    for node in list(graph):
        if is_op(node, AVERAGE) and node.inputs[0] in rows:
            _replace_average(graph, node)
        elif is_op(node, *BINARY) and node.outputs[0] in rows:
            _repeat_operand(graph, node)


def _replace_average(graph: ir.Graph, node: ir.Node) -> None:
    """Replace the mean of rows [N, T, C] by a product, if there is a scale of the ones with which it rounds alike."""
    x, dims, numbers = operand(node, "x"), shape(node.outputs[0]), scales_and_zeros(node, "xy")
    size = None if x is None else shape(x)
    if x is None or size is None or dims is None or numbers is None or len(size) != 3 or dims != (*size[:2], 1):
        return
    sx, _, sy, _ = numbers
    scale = _scale_of_ones(sx, sy, size[-1])
    if scale is not None:
        y = _multiply(graph, node, x, size[-1], 1, scale, "x", "y")
        old = node.outputs[0]
        ir.convenience.replace_all_uses_with(old, y, replace_graph_outputs=True)
        name, old.name = old.name, None
        y.name = name
        graph.remove(node, safe=True)


def _scale_of_ones(sx: float, sy: float, count: int) -> np.float32 | None:
    """Return the scale of ones with which a product rounds all sums of `count` bytes as their average; None if none."""
    expected = numerics.global_average_scale(sx, sy, count)
    bits = np.float32(1 / count).view(np.int32) + np.arange(-MAX_STEPS, MAX_STEPS + 1, dtype=np.int32)
    candidates = bits.view(np.float32)
    multipliers = numerics.conv_scale(sx, candidates, sy)
    nearest = int(np.argmin(np.abs(multipliers.astype(np.float64) - float(expected))))
    if not np.isfinite(expected) or expected <= 0 or count > MAX_COUNT:
        return None
    sums = np.arange(-255 * count, 255 * count + 1, dtype=np.int32)
    of_average, of_ones = (
        numerics.requantize_f32(sums, 0, scale, 0, -512, 512) for scale in (expected, multipliers[nearest])
    )
    return candidates[nearest] if np.array_equal(of_average, of_ones) else None


def _repeat_operand(graph: ir.Graph, node: ir.Node) -> None:
    """Let `node` read a number for each row once for each element of the row, unless the CPU computes the numbers."""
    dims = shape(node.outputs[0])
    for name in "ab":
        value, parameters = operand(node, name), scales_and_zeros(node, name)
        size = None if value is None else shape(value)
        if value is None or size is None or dims is None or parameters is None or constant(value) is not None:
            continue
        if _is_of_floats(value):
            continue
        if len(size) == len(dims) > 1 and size == (*dims[:-1], 1) and dims[-1] > 1 and prod(dims[:-1]) > 1:
            repeated = _multiply(graph, node, value, 1, dims[-1], np.float32(1), name, name)
            node.replace_input_with(op_spec(node.op_type).number(name), repeated)


def _is_of_floats(value: ir.Value) -> bool:
    """Return whether `value` is a function of floats, so that the CPU has it, and the tensor that they come from."""
    node = value.producer()
    while node is not None and is_op(node, "Table", *VIEWS) and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    return node is not None and is_op(node, "QuantizeLinear")


def _multiply(
    graph: ir.Graph, node: ir.Node, x: ir.Value, count: int, outputs: int, scale: np.float32, source: str, result: str
) -> ir.Value:
    """Insert the product of `x` by `count` x `outputs` ones of this scale before `node`, and return it.

    source, result: names of the operands of `node` with the scale and zero point of `x`, and of the product.
    """
    name = derived_name(graph, f"{node.name}_{x.name}_by_ones")
    arrays: dict[str, NDArray[Any]] = {
        "ones": np.ones((count, outputs), np.int8),
        "scale": np.asarray(scale),
        "zero": np.array(0, np.int8),
    }
    ones = [new_constant(graph, f"{name}_{part}", array) for part, array in arrays.items()]
    x_parameters, y_parameters = (
        [operand(node, f"{part}_{kind}") for kind in ("scale", "zero_point")] for part in (source, result)
    )
    inputs = arrange_operands(PRODUCT, [[x, *x_parameters], ones], y_parameters)
    out = ir.Value(name=name, shape=ir.Shape([*(shape(x) or ())[:-1], outputs]), type=x.type)
    attrs = attributes(transB=0, alpha=1.0)
    product = ir.Node(op_spec(PRODUCT).domain, PRODUCT, inputs, attrs, outputs=[out], name=name)
    product.meta[MODEL_WEIGHTS] = 0
    graph.insert_before(node, product)
    return out
