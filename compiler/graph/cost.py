"""Multiplications that a graph means, wherever they run."""

from __future__ import annotations

import math

import onnx_ir as ir

from celosia.compiler.graph.values import shape

_WEIGHTS = {"Conv": 1, "QLinearConv": 3, "ConvInteger": 1}
_MATRICES = {"MatMul": 1, "Gemm": 1, "QLinearMatMul": 3, "QGemm": 3, "MatMulInteger": 1}


def total_macs(graph: ir.Graph) -> int:
    """Multiply-accumulates of all convolutions and matrix multiplications whose shapes are known."""
    return sum(_macs(node) for node in graph)


def _macs(node: ir.Node) -> int:
    out = shape(node.outputs[0]) if node.outputs else None
    if out is None:
        return 0
    if node.op_type in _WEIGHTS:
        weights = node.inputs[_WEIGHTS[node.op_type]]
        dims = shape(weights) if weights is not None else None
        return math.prod(out) * math.prod(dims[1:]) if dims is not None else 0
    if node.op_type in _MATRICES:
        left = node.inputs[0]
        dims = shape(left) if left is not None else None
        return math.prod(out) * dims[-1] if dims else 0
    return 0
