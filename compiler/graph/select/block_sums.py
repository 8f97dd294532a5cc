"""Sums by blocks as layers: grouped products whose results leave as they are."""

from __future__ import annotations

from math import prod

import numpy as np
import onnx_ir as ir

from celosia.compiler.graph.operands import operand
from celosia.compiler.graph.select.forms import ActivationLayout, NotOffloadable, shape_of
from celosia.compiler.graph.select.parameters import array_of
from celosia.compiler.graph.select.placement import Placement, Reads
from celosia.compiler.graph.values import attribute
from celosia.compiler.layer import Gemm, Layer

NOTE = "integer sums by block; scaled in floats on the CPU, within 2e-6 of the root mean square of onnxruntime's result"


def block_sums(p: Placement, node: ir.Node) -> None:
    """Places BlockSums: a layer for each part of the columns. NotOffloadable."""
    if not p.cfg.sums:
        raise NotOffloadable("int32 sums leave the accelerator byte by byte; give it a Config with sums = true")
    value, y, count = node.inputs[0], node.outputs[0], attribute(node, "sum_bytes")
    assert value is not None
    w = array_of(operand(node, "w"))
    parts, blocks, lanes, size = w.shape
    reads: Reads = {}
    rows, channels = prod(shape_of(value)[:-2]), count * blocks * lanes
    y_form = ActivationLayout((rows, parts * channels, 1, 1))
    x, whole = p.read(value, ActivationLayout((rows, blocks * size, 1, 1)), reads), p.activation(y, y_form)
    inner, columns = (attribute(node, name) for name in "KN")
    layers: list[Layer] = []
    for number in range(parts):
        made = whole.region((whole.images, channels, 1, 1), number * channels // p.cfg.group, whole.pixels)
        weights = np.ascontiguousarray(w[number]).reshape(blocks * lanes, size, 1, 1)
        name = node.name or "" if parts == 1 else f"{node.name}.{number}"
        filling = weights.size - inner * max(0, min(lanes, columns - number * lanes))
        layers.append(Layer(name, x, made, gemm=Gemm(weights, blocks, filling=filling, sum_bytes=count)))
    p.assemble(node, layers, reads, whole, y_form, NOTE)
