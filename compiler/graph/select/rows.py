"""Layers that need all channels of a pixel for each result: softmax, layer and RMS normalisation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_ir as ir

from celosia.compiler import numerics
from celosia.compiler.graph.operands import operand
from celosia.compiler.graph.select.forms import (
    HOST_INPUT,
    OTHER_ROWS,
    ActivationLayout,
    NotOffloadable,
    natural_form,
    shape_of,
)
from celosia.compiler.graph.select.matrices import MAX_MATRICES, matrices_form
from celosia.compiler.graph.select.parameters import array_of, scalar_of, stored_zero
from celosia.compiler.graph.select.placement import Placement, Reads
from celosia.compiler.graph.values import attribute
from celosia.compiler.layer import Layer, Norm, Requantise, Softmax
from celosia.compiler.program.model import matrix_counts
from celosia.compiler.tensorize import pack


def place_norm(p: Placement, node: ir.Node) -> None:
    """Place a QLinearNorm: one layer for each matrix, whose rows are pixels. Raises NotOffloadable."""
    cfg, x, y = p.cfg, node.inputs[0], node.outputs[0]
    assert x is not None
    if not cfg.norm:
        raise NotOffloadable("a normalisation on the accelerator takes a Config with norm; give it one, as norm = 1")
    form, count = _choose_form(p, x)
    epsilon = int(scalar_of(operand(node, "epsilon")))
    bias, factor = array_of(operand(node, "bias")), array_of(operand(node, "factor"))
    requantise = Requantise(bias, *numerics.fold_scale(factor), stored_zero(operand(node, "y_zero_point")))
    centre = bool(attribute(node, "centre"))
    offset = 0 if centre else -stored_zero(operand(node, "x_zero_point"))
    reads: Reads = {}
    source, whole = p.read(x, form, reads), p.new_activation(y, form)
    columns = len(bias)
    groups, dims = pack.blocks(columns, cfg.group), (form.dims[0], columns, *form.dims[2:])
    layers = [
        Layer(
            node.name or "" if count == 1 else f"{node.name}.{number}",
            source.region(dims, number * groups, source.pixels), whole.region(dims, number * groups, whole.pixels),
            norm=Norm(offset, centre, epsilon), requantise=requantise,
        )
        for number in range(count)
    ]  # fmt: skip
    if count == 1:
        x_whole = source if source.channels == columns else layers[0].x
        p.add_layer(node, replace(layers[0], x=x_whole, y=whole), reads, form)
    else:
        p.add_parts(node, layers, reads, whole, form)


def _choose_form(p: Placement, x: ir.Value) -> tuple[ActivationLayout, int]:
    """Return the form in which the rows of `x` are pixels, and the number of matrices in it.

    Raises NotOffloadable if the accelerator holds `x` in another form.
    """
    held, dims = p.held_form(x), shape_of(x)
    if held is None:
        held = natural_form(x, rows=True) if len(dims) < 3 else matrices_form(p.cfg, x, "rows")
    if held.fold == "rows" and not held.inverted:
        count = matrix_counts("rows", dims)[0]
        if count <= MAX_MATRICES:
            return held, count
        raise NotOffloadable(f"it has {count} matrices, more than {MAX_MATRICES}; give the model fewer samples at once")
    if held.fold or held != natural_form(x, rows=True):
        raise NotOffloadable(OTHER_ROWS)
    return held, 1


def place_softmax(p: Placement, node: ir.Node) -> None:
    """Place a QLinearSoftmax along the last axis: one layer for each matrix. Raises NotOffloadable.

    The result counts among `padded_outputs`: channels beyond the last hold the zero point, which product layers rely
    on.
    """
    cfg, x, y = p.cfg, node.inputs[0], node.outputs[0]
    assert x is not None
    if not cfg.softmax:
        raise NotOffloadable("a softmax on the accelerator takes a Config with softmax; give it one, as softmax = 1")
    dims, held = shape_of(x), p.held_form(x)
    by_last = attribute(node, "axis", -1) % len(dims) == len(dims) - 1
    if not by_last and (attribute(node, "opset", 13) >= 13 or np.prod(dims[attribute(node, "axis", 1) :]) != dims[-1]):
        raise NotOffloadable(
            "the accelerator has a softmax of the last axis alone; "
            "transpose its input, so that its axis is the last one"
        )
    if held is None or held.fold != "rows" or held.inverted:
        raise NotOffloadable(HOST_INPUT if held is None else OTHER_ROWS)
    count, columns, rows = matrix_counts("rows", dims)
    powers = numerics.softmax_powers(columns, *(scalar_of(operand(node, name)) for name in ("x_scale", "y_scale")))
    if not np.isfinite(powers).all():
        raise NotOffloadable(
            f"rows of {columns} have powers beyond the largest float32; quantise its input with a smaller scale"
        )
    if count > MAX_MATRICES:
        raise NotOffloadable(
            f"it has {count} matrices, more than {MAX_MATRICES}; give the model fewer samples or heads at once"
        )
    zero = stored_zero(operand(node, "y_zero_point"))
    form = matrices_form(cfg, y, "rows", zero)
    reads: Reads = {}
    source, whole = p.read(x, held, reads), p.new_activation(y, form)
    groups, dims = pack.blocks(columns, cfg.group), (1, columns, 1, rows)
    layers = [
        Layer(
            node.name or "" if count == 1 else f"{node.name}.{number}",
            source.region(dims, number * groups, source.pixels), whole.region(dims, number * groups, whole.pixels),
            softmax=Softmax(powers, zero),
        )
        for number in range(count)
    ]  # fmt: skip
    p.padded_outputs.add(y)
    if count == 1:
        p.add_layer(node, replace(layers[0], y=whole), reads, form)
    else:
        p.add_parts(node, layers, reads, whole, form)
