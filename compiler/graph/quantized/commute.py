"""QuantizeLinear and DequantizeLinear change places with operators that only move elements."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from celosia.compiler.graph.onnxruntime_rules.propagation import MOVING
from celosia.compiler.graph.operands import joins_parts, operand, takes_largest
from celosia.compiler.graph.quantized.qdq import Quantised, activation, dequantised, quantised, same_meaning
from celosia.compiler.graph.values import attribute, attributes, constant, derived_name, is_op, new_constant, only_use
from celosia.compiler.ops import operators_with
from celosia.compiler.program.op_spec import Moves

MOVING_OPS = operators_with("moves", Moves.ALL)
"""Operators that only move elements, and that change places with QuantizeLinear before anything else happens."""
CHOOSING_OPS = operators_with("moves", Moves.SOME, Moves.FILL)
"""Those of which an element of the result is one of the operand's, or a constant: they change places with
DequantizeLinear. `Commute._moved` says which uses of them do."""


IN_FLOATS = "celosia.operand stays in floats"
"""In the metadata of a QuantizeLinear that stood behind a Concat, Pad or the like in the model. onnxruntime leaves it
there, so that the operator whose result is quantised stays one of floats."""


class Commute:
    """The base of Integerise: rules that return whether they changed `graph`."""

    def __init__(self, model: ir.Model) -> None:
        self.model, self.graph = model, model.graph

    def _commute(self, node: ir.Node) -> bool:
        if not node.inputs or not node.outputs:
            return False
        if is_op(node, *MOVING_OPS):
            # Each of several readers gets a pair of its own, that cancels: a QuantizeLinear in front of all would not.
            shared = node.inputs[0] is not None and only_use(node.inputs[0]) is None
            return (shared and self._hoist(node)) or self._sink(node) or self._hoist(node)
        if is_op(node, *MOVING):  # as onnxruntime's do, so that what stands before becomes an integer operator
            return self._hoist(node) or (len(node.outputs) == 1 and self._sink(node))
        return is_op(node, *CHOOSING_OPS) and self._hoist(node)

    def _choose(self, node: ir.Node) -> bool:
        """Choose for what stands behind operators on floats, once it is clear which these are."""
        sinks = is_op(node, *CHOOSING_OPS) and not takes_largest(node) and len(node.outputs) == 1
        return (sinks and self._sink(node, floats=not is_op(node, *MOVING))) or self._commute(node)

    def _sink(self, node: ir.Node, floats: bool = False) -> bool:
        """moving(float) -> QuantizeLinear   becomes   QuantizeLinear -> moving(8 bit).

        floats: onnxruntime does not do this, so that what makes the operand stays an operator of floats.
        """
        x, q = node.inputs[0], quantised(node.outputs[0])
        operands = None if q is None else self._moved(node, q)
        if q is None or x is None or operands is None or constant(x) is not None:
            return False
        old = q.value.producer()
        assert old is not None
        fresh = self._like(old, [x, *old.inputs[1:]], q.value, x.shape, f"{x.name}_quantised_{node.name}")
        if floats or IN_FLOATS in old.meta:
            fresh.producer().meta[IN_FLOATS] = True  # type: ignore[union-attr]
        self._replace(old, node.op_type, [fresh, *operands], node.domain, dict(node.attributes))
        return True

    def _hoist(self, node: ir.Node) -> bool:
        """DequantizeLinear -> moving(float)   becomes   moving(8 bit) -> DequantizeLinear."""
        q = dequantised(node.inputs[0])
        if q is None or node.inputs[0].is_graph_output():  # type: ignore[union-attr]
            return False
        old, operands = node.inputs[0].producer(), self._moved(node, q, exact=True)  # type: ignore[union-attr]
        if operands is None:
            return False
        assert old is not None
        if not q.scalar:
            return self._turn(node, q, old)
        kept, attrs = list(node.outputs), list(node.attributes.values())
        names = [derived_name(self.graph, f"{q.value.name}_{y.name}") for y in kept]
        made = [ir.Value(name=name, shape=y.shape, type=q.value.type) for name, y in zip(names, kept)]
        moved = ir.Node(node.domain, node.op_type, [q.value, *operands], attrs, outputs=made, name=node.name)
        self.graph.insert_before(node, moved)
        for y, y8 in zip(kept, made):
            out = ir.Value(name=None, shape=y.shape, type=y.type)
            inputs, given = [y8, *old.inputs[1:]], list(old.attributes.values())
            self.graph.insert_before(node, ir.Node(old.domain, old.op_type, inputs, given, outputs=[out]))
            self._take_over(y, out)
        self.graph.remove(node, safe=True)
        return True

    def _turn(self, node: ir.Node, q: Quantised, old: ir.Node) -> bool:
        """DequantizeLinear of weights by channel -> Transpose   becomes   DequantizeLinear of other weights."""
        weights = constant(q.value)
        if weights is None or node.op_type != "Transpose":
            return False
        perm = attribute(node, "perm", range(weights.ndim)[::-1])
        fresh = new_constant(self.graph, f"{q.value.name}_{node.name}", weights.transpose(perm))
        attrs = {attr.name: attr for attr in attributes(axis=list(perm).index(q.axis % weights.ndim))}
        inputs = [fresh, *old.inputs[1:]]
        self._replace(node, "DequantizeLinear", inputs, old.domain, dict(old.attributes) | attrs)
        return True

    def _moved(self, node: ir.Node, q: Quantised, exact: bool = False) -> list[ir.Value | None] | None:
        """Return the other inputs with which `node` moves the bytes of `q`; None if it cannot.

        exact: a constant that it puts between the bytes must be a byte itself.
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
                return self._padding(node, q, exact)
        return rest

    def _padding(self, node: ir.Node, q: Quantised, exact: bool) -> list[ir.Value | None] | None:
        """The inputs of a Pad with a constant as a byte of `q`."""
        if "pads" in node.attributes or operand(node, "pads") is None:  # before version 11
            return None
        given = operand(node, "constant_value")
        value = np.zeros(1, np.float32) if given is None else constant(given)
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

    def _join(self, node: ir.Node) -> bool:
        """Concat of parts of which some are quantised: the others are quantised, too, or all leave with one scale."""
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
                self._like(old, [x, *old.inputs[1:]], y.value, x.shape, f"{x.name}_quantised_{node.name}_{number}")
                for number, x in enumerate(node.inputs) if x is not None
            ]  # fmt: skip
            for value, part in zip(values, parts, strict=True):
                if part is None:
                    value.producer().meta[IN_FLOATS] = True  # type: ignore[union-attr]
            self._replace(old, node.op_type, values, "", attrs)
            return True
        first, same = known[0], len(known) == len(parts)
        if not same or any(part.dtype != first.dtype or not same_meaning(part, first) for part in known):
            return False
        last = node.inputs[0].producer()  # type: ignore[union-attr]
        assert last is not None
        dims = node.outputs[0].shape
        name = f"{node.outputs[0].name}_{node.name}_bytes"
        fresh = self._like(node, [part.value for part in known], first.value, dims, name)
        self._replace(node, "DequantizeLinear", [fresh, *last.inputs[1:]], last.domain, dict(last.attributes))
        return True

    def _like(self, node: ir.Node, inputs: list[Any], typed: ir.Value, dims: Any, name: str) -> ir.Value:
        """A new node in front of `node` with its operator and attributes; its output has the type of `typed`."""
        name = derived_name(self.graph, name)
        out = ir.Value(name=name, shape=ir.Shape(list(dims)) if dims is not None else None, type=typed.type)
        fresh = ir.Node(node.domain, node.op_type, inputs, list(node.attributes.values()), outputs=[out], name=name)
        self.graph.insert_before(node, fresh)
        return out

    def _replace(self, node: ir.Node, op: str, inputs: list[Any], domain: str, attrs: dict[str, ir.Attr]) -> None:
        """Put an operator in the place of `node`, with its outputs."""
        out = ir.Value(name=None, shape=node.outputs[0].shape, type=node.outputs[0].type)
        fresh = ir.Node(domain, op, inputs, list(attrs.values()), outputs=[out], name=node.name)
        self.graph.insert_before(node, fresh)
        self._take_over(node.outputs[0], out)
        self.graph.remove(node, safe=True)

    def _take_over(self, old: ir.Value, new: ir.Value) -> None:
        """`new` is used, named and returned in the place of `old`."""
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        name, old.name = old.name, None
        new.name = name
