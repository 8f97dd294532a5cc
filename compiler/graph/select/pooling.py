"""Pooling as layers."""

from __future__ import annotations

import onnx_ir as ir

from celosia.compiler import numerics
from celosia.compiler.graph.select.forms import OnCpu, natural_form
from celosia.compiler.graph.select.parameters import scalar_of, stored_zero, uniform, window_of
from celosia.compiler.graph.select.placement import Placement, Reads
from celosia.compiler.graph.values import attribute
from celosia.compiler.layer import Pool, Window


def average(p: Placement, node: ir.Node) -> None:
    value, y = node.inputs[0], node.outputs[0]
    assert value is not None
    form, y_form = natural_form(value), natural_form(y)
    if attribute(node, "channels_last", 0):
        raise OnCpu("channels last; export it as NCHW")
    scale_x, scale_y = scalar_of(node.inputs[1]), scalar_of(node.inputs[3])
    note = ""
    if node.op_type == "QLinearAveragePool":
        window = window_of(node, form, attribute(node, "kernel_shape"))
        if any(window.pads) or attribute(node, "ceil_mode", 0):
            raise OnCpu("an average over a padded window; leave out pads and ceil_mode")
        note = "onnxruntime averages in float; a tie can differ by one step"
    else:
        window = Window((form.dims[2], form.dims[3]))
        if node.op_type == "QLinearMean":
            note = "onnxruntime averages in float; a tie can differ by one step"
    count = window.kernel[0] * window.kernel[1]
    factor = numerics.mean_scale if node.op_type == "QLinearMean" else numerics.global_average_scale
    multiplier, shift = numerics.fold_scale(factor(scale_x, scale_y, count))
    zero_x, zero_y = stored_zero(node.inputs[2]), stored_zero(node.inputs[4])
    requantise = uniform(form.dims[1], -zero_x * count, int(multiplier), int(shift), zero_y)
    reads: Reads = {}
    x = p.read(value, form, reads)
    p.add(node, Pool(node.name or "", x, p.activation(y, y_form), window, requantise), reads, y_form, note)


def max_pool(p: Placement, node: ir.Node) -> None:
    value, y = node.inputs[0], node.outputs[0]
    assert value is not None
    form, y_form = natural_form(value), natural_form(y)
    window = window_of(node, form, attribute(node, "kernel_shape"))
    reads: Reads = {}
    x = p.read(value, form, reads)
    p.add(node, Pool(node.name or "", x, p.activation(y, y_form), window), reads, y_form)
