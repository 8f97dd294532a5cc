"""Exchange QuantizeLinear and DequantizeLinear with operators that only move elements, so that these move bytes.

Maxima of images become poolings first, which move bytes as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from celosia.compiler.graph.onnxruntime_rules.propagation import MOVING
from celosia.compiler.graph.operands import joins_parts, operand, takes_largest
from celosia.compiler.graph.qdq import Quantised, activation, dequantised, have_same_parameters, quantised
from celosia.compiler.graph.values import (
    attribute,
    attributes,
    constant,
    derived_name,
    is_op,
    new_constant,
    only_use,
    shape,
)
from celosia.compiler.ops import operators_with
from celosia.compiler.program.op_spec import Moves

MOVING_OPS = operators_with("moves", Moves.ALL)
"""Operators that only move elements; they are exchanged before any pattern becomes an integer operator."""
CHOOSING_OPS = operators_with("moves", Moves.SOME, Moves.FILL)
"""Operators whose results are elements of the operand or a constant; they are exchanged with DequantizeLinear.

`Commute._integer_inputs` decides for which attributes and operands.
"""
MAXIMA = ("GlobalMaxPool", "ReduceMax")
"""Maxima over all rows and columns, or over any axes."""
MAX_WINDOW, MAX_SIDE = 225, 8
"""Pixels of the largest window that one MaxPool reduces; rows and columns of the windows that replace a larger one."""
IN_FLOATS = "celosia.operand stays in floats"
"""Key in `meta` of a QuantizeLinear that stood behind a Concat, Pad or the like in the model.

onnxruntime leaves it there, so that the operator whose result it quantises computes floats.
"""


class Commute:
    """Rules that exchange operators with quantisation; each returns whether it changed `graph`.

    The base class of Integerise.
    """

    def __init__(self, model: ir.Model) -> None:
        self.model, self.graph = model, model.graph

    def _pool_maxima(self, node: ir.Node) -> bool:
        """Rewrite the maximum over all rows and columns of images of bytes as MaxPools, and a Flatten if axes go.

        A window above MAX_WINDOW pixels becomes several, of which each reduces the maxima of the one before.
        """
        is_maximum = is_op(node, *MAXIMA) and (node.op_type == "GlobalMaxPool" or reduces_images(node))
        value, dims = node.inputs[0] if is_maximum else None, shape(node.outputs[0])
        size = shape(value) if value is not None and activation(value) is not None else None
        if value is None or size is None or len(size) != 4 or dims is None or 0 in size:
            return False
        height, width = size[2:]
        while height * width > MAX_WINDOW:
            kernel = min(height, MAX_SIDE), min(width, MAX_SIDE)
            rows, columns = -(-height // kernel[0]), -(-width // kernel[1])
            pads = [0, 0, rows * kernel[0] - height, columns * kernel[1] - width]
            value = self._insert_pool(node, value, (*size[:2], rows, columns), kernel, strides=kernel, pads=pads)
            height, width = rows, columns
        if len(dims) == 4:
            window = {attr.name: attr for attr in attributes(kernel_shape=(height, width))}
            self._replace_node(node, "MaxPool", [value], "", window)
            return True
        value = self._insert_pool(node, value, (*size[:2], 1, 1), (height, width))
        self._replace_node(node, "Flatten", [value], "", {attr.name: attr for attr in attributes(axis=1)})
        return True

    def _insert_pool(
        self, before: ir.Node, x: ir.Value, dims: Sequence[int], kernel: Sequence[int], **attrs: Any
    ) -> ir.Value:
        """Insert a MaxPool of `x` before a node; return its output, of shape `dims`."""
        name = derived_name(self.graph, f"{before.name or before.outputs[0].name}_image")
        out = ir.Value(name=name, shape=ir.Shape(dims), type=x.type)
        pool = ir.Node("", "MaxPool", [x], attributes(kernel_shape=kernel, **attrs), outputs=[out], name=name)
        self.graph.insert_before(before, pool)
        return out

    def _commute(self, node: ir.Node) -> bool:
        """Exchange `node`, if it moves elements, with a QuantizeLinear behind it or a DequantizeLinear before it."""
        if not node.inputs or not node.outputs:
            return False
        if is_op(node, *MOVING_OPS):
            # Each reader gets a DequantizeLinear of its own, which cancels; one QuantizeLinear for all would not.
            shared = node.inputs[0] is not None and only_use(node.inputs[0]) is None
            return (
                (shared and self._dequantise_after(node)) or self._quantise_before(node) or self._dequantise_after(node)
            )
        if is_op(node, *MOVING):  # as onnxruntime does, so that the operator before becomes one of integers
            return self._dequantise_after(node) or (len(node.outputs) == 1 and self._quantise_before(node))
        return is_op(node, *CHOOSING_OPS) and self._dequantise_after(node)

    def _commute_late(self, node: ir.Node) -> bool:
        """Exchange operators with quantisation, once it is clear which operators before them compute floats."""
        may_move_quantise = is_op(node, *CHOOSING_OPS) and not takes_largest(node) and len(node.outputs) == 1
        if may_move_quantise and self._quantise_before(node, floats=not is_op(node, *MOVING)):
            return True
        return self._commute(node)

    def _quantise_before(self, node: ir.Node, floats: bool = False) -> bool:
        """Rewrite moving(float) -> QuantizeLinear as QuantizeLinear -> moving(8 bit), so that bytes are moved.

        floats: onnxruntime does not do this, so that the operator which computes the operand must stay one of floats.
        """
        x, q = node.inputs[0], quantised(node.outputs[0])
        operands = None if q is None else self._integer_inputs(node, q)
        if q is None or x is None or operands is None or constant(x) is not None:
            return False
        quantise = q.value.producer()
        assert quantise is not None
        new_operand = self._insert_like(
            quantise, [x, *quantise.inputs[1:]], q.value, x.shape, f"{x.name}_quantised_{node.name}"
        )
        if floats or IN_FLOATS in quantise.meta:
            new_operand.producer().meta[IN_FLOATS] = True  # type: ignore[union-attr]
        self._replace_node(quantise, node.op_type, [new_operand, *operands], node.domain, dict(node.attributes))
        return True

    def _dequantise_after(self, node: ir.Node) -> bool:
        """Rewrite DequantizeLinear -> moving(float) as moving(8 bit) -> DequantizeLinear."""
        q = dequantised(node.inputs[0])
        if q is None or node.inputs[0].is_graph_output():  # type: ignore[union-attr]
            return False
        dequantise, operands = node.inputs[0].producer(), self._integer_inputs(node, q, exact=True)  # type: ignore[union-attr]
        if operands is None:
            return False
        assert dequantise is not None
        if not q.scalar:
            return self._transpose_weights(node, q, dequantise)
        results, attrs = list(node.outputs), list(node.attributes.values())
        names = [derived_name(self.graph, f"{q.value.name}_{y.name}") for y in results]
        byte_results = [ir.Value(name=name, shape=y.shape, type=q.value.type) for name, y in zip(names, results)]
        moved = ir.Node(node.domain, node.op_type, [q.value, *operands], attrs, outputs=byte_results, name=node.name)
        self.graph.insert_before(node, moved)
        for y, byte_result in zip(results, byte_results):
            new_result = ir.Value(name=None, shape=y.shape, type=y.type)
            inputs, dequantise_attrs = [byte_result, *dequantise.inputs[1:]], list(dequantise.attributes.values())
            self.graph.insert_before(
                node, ir.Node(dequantise.domain, dequantise.op_type, inputs, dequantise_attrs, outputs=[new_result])
            )
            self._take_over(y, new_result)
        self.graph.remove(node, safe=True)
        return True

    def _transpose_weights(self, node: ir.Node, q: Quantised, dequantise: ir.Node) -> bool:
        """Rewrite DequantizeLinear of weights by channel -> Transpose as DequantizeLinear of transposed weights."""
        weights = constant(q.value)
        if weights is None or node.op_type != "Transpose":
            return False
        perm = attribute(node, "perm", range(weights.ndim)[::-1])
        transposed = new_constant(self.graph, f"{q.value.name}_{node.name}", weights.transpose(perm))
        attrs = {attr.name: attr for attr in attributes(axis=list(perm).index(q.axis % weights.ndim))}
        inputs = [transposed, *dequantise.inputs[1:]]
        self._replace_node(node, "DequantizeLinear", inputs, dequantise.domain, dict(dequantise.attributes) | attrs)
        return True

    def _integer_inputs(self, node: ir.Node, q: Quantised, exact: bool = False) -> list[ir.Value | None] | None:
        """Return the inputs after the first with which `node` moves the integers of `q`; None if it cannot move them.

        exact: a constant that it puts between the integers (a Pad) must be one of them without rounding.
        """
        rest = list(node.inputs[1:])
        if q.dtype not in (np.int8, np.uint8) and not is_op(node, *MOVING_OPS):
            return None
        if takes_largest(node) and (len(node.outputs) > 1 or not np.all(q.scale > 0)):
            return None
        match node.op_type:
            case "Resize" | "Upsample" if attribute(node, "mode", "nearest") not in ("nearest", b"nearest"):
                return None
            case "Resize" if attribute(node, "coordinate_transformation_mode") == "tf_crop_and_resize":
                return None
            case "Pad" if attribute(node, "mode", "constant") == "constant":
                return self._integer_pad_inputs(node, q, exact)
        return rest

    def _integer_pad_inputs(self, node: ir.Node, q: Quantised, exact: bool) -> list[ir.Value | None] | None:
        """Return the inputs of a Pad by a constant, with the constant as an integer of `q`.

        None if that is impossible.
        """
        if "pads" in node.attributes or operand(node, "pads") is None:  # before version 11
            return None
        constant_operand = operand(node, "constant_value")
        value = np.zeros(1, np.float32) if constant_operand is None else constant(constant_operand)
        if value is None or value.dtype != np.float32 or value.size != 1 or np.any(np.isnan(value)):
            return None
        real, scale, zero = value.reshape(-1)[0], q.scale.reshape(-1)[0], np.float32(q.zero.reshape(-1)[0])
        info = np.iinfo(q.dtype)
        byte = np.clip(np.rint(real / scale) + zero, info.min, info.max)
        if exact and (byte - zero) * scale != real:
            return None
        fill = new_constant(self.graph, f"{node.name}_fill", np.array(byte, q.dtype))
        axes = operand(node, "axes")
        return [operand(node, "pads"), fill, *([] if axes is None else [axes])]

    def _quantise_parts(self, node: ir.Node) -> bool:
        """Make a Concat of partly quantised parts one of integers: quantise all parts, or dequantise its result.

        It quantises all where its result is quantised. Otherwise all parts must have the same scale and zero point.
        """
        if not joins_parts(node):
            return False
        parts, y = [activation(value) for value in node.inputs], quantised(node.outputs[0])
        known = [part for part in parts if part is not None]
        if not known:
            return False
        attrs = dict(node.attributes)
        if y is not None:
            old = y.value.producer()
            assert old is not None
            values = [
                self._insert_like(old, [x, *old.inputs[1:]], y.value, x.shape, f"{x.name}_quantised_{node.name}_{n}")
                for n, x in enumerate(node.inputs) if x is not None
            ]  # fmt: skip
            for value, part in zip(values, parts, strict=True):
                if part is None:
                    value.producer().meta[IN_FLOATS] = True  # type: ignore[union-attr]
            self._replace_node(old, node.op_type, values, "", attrs)
            return True
        first, all_quantised = known[0], len(known) == len(parts)
        if not all_quantised or any(
            part.dtype != first.dtype or not have_same_parameters(part, first) for part in known
        ):
            return False
        dequantise = node.inputs[0].producer()  # type: ignore[union-attr]
        assert dequantise is not None
        dims = node.outputs[0].shape
        name = f"{node.outputs[0].name}_{node.name}_bytes"
        joined = self._insert_like(node, [part.value for part in known], first.value, dims, name)
        self._replace_node(
            node, "DequantizeLinear", [joined, *dequantise.inputs[1:]], dequantise.domain, dict(dequantise.attributes)
        )
        return True

    def _insert_like(self, node: ir.Node, inputs: list[Any], typed: ir.Value, dims: Any, name: str) -> ir.Value:
        """Insert before `node` a node of its operator and attributes, and return its output.

        The output has the type of `typed` and the shape `dims`.
        """
        name = derived_name(self.graph, name)
        out = ir.Value(name=name, shape=ir.Shape(list(dims)) if dims is not None else None, type=typed.type)
        new_node = ir.Node(node.domain, node.op_type, inputs, list(node.attributes.values()), outputs=[out], name=name)
        self.graph.insert_before(node, new_node)
        return out

    def _replace_node(self, node: ir.Node, op: str, inputs: list[Any], domain: str, attrs: dict[str, ir.Attr]) -> None:
        """Replace `node` by another operator, whose output takes over its readers and name."""
        out = ir.Value(name=None, shape=node.outputs[0].shape, type=node.outputs[0].type)
        new_node = ir.Node(domain, op, inputs, list(attrs.values()), outputs=[out], name=node.name)
        self.graph.insert_before(node, new_node)
        self._take_over(node.outputs[0], out)
        self.graph.remove(node, safe=True)

    def _take_over(self, old: ir.Value, new: ir.Value) -> None:
        """Give `new` the readers and the name of `old`, and its place among the graph's outputs."""
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        name, old.name = old.name, None
        new.name = name


def reduces_images(node: ir.Node) -> bool:
    """Return whether a reduction takes all rows and columns of images [N, C, H, W]."""
    dims = shape(node.inputs[0]) if node.inputs[0] is not None else None
    return dims is not None and len(dims) == 4 and reduced_axes(node) == [2, 3]


def reduced_axes(node: ir.Node) -> list[int] | None:
    """Return the axes over which a reduction goes, in order; None if they or the rank are not known."""
    axes, rank = attribute(node, "axes"), len(node.inputs[0].shape or ()) if node.inputs[0] is not None else 0
    if axes is None and (array := constant(operand(node, "axes"))) is not None:
        axes = array.reshape(-1).tolist()
    return sorted(axis % rank for axis in axes) if axes is not None and rank else None
