"""Multiplications that a graph means, wherever they run."""

from __future__ import annotations

import math

import onnx_ir as ir

from celosia.compiler.graph.values import attribute, shape

_WEIGHTS = {"Conv": 1, "QLinearConv": 3, "ConvInteger": 1, "FusedConv": 1, "DeformConv": 1}
_MATRICES = frozenset((
    "MatMul", "Gemm", "QLinearMatMul", "QGemm", "MatMulInteger", "FusedMatMul", "MatMulIntegerToFloat",
    "DynamicQuantizeMatMul",
))  # fmt: skip
_RECURRENT = ("LSTM", "GRU", "RNN")


def total_macs(graph: ir.Graph) -> int:
    """Multiply-accumulates of all convolutions, matrix multiplications and recurrences whose shapes are known."""
    return sum(_macs(node) for node in graph)


def _macs(node: ir.Node) -> int:
    if node.op_type in _RECURRENT:  # of which each output may be left out
        x, kernels, again = (shape(value) if value is not None else None for value in node.inputs[:3])
        return x[0] * x[1] * (math.prod(kernels) + math.prod(again)) if x and kernels and again else 0
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
        depth = -2 if attribute(node, "transA", 0) else -1
        return math.prod(out) * dims[depth] if dims else 0
    if node.op_type == "ConvTranspose":  # each element of its input meets the kernels of its channel
        x, kernels = (shape(value) if value is not None else None for value in node.inputs[:2])
        return math.prod(x) * math.prod(kernels[1:]) if x and kernels else 0
    return 0
