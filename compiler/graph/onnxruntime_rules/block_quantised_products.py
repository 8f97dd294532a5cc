"""Products of floats by quantised constants: onnxruntime quantises the floats by blocks, and multiplies bytes.

    wf = DequantizeLinear(w4, scale, zero, axis=0, block_size=32)         xr = RoundBlocks(x, block_size=32)
    y = MatMul(x, wf)                                               ->    y = MatMul(xr, wf)

onnxruntime makes a MatMulNBits of these, at accuracy_level 4. `RoundBlocks` is our own: x as the bytes times their
scales, so that the product of floats is that of the bytes. Which products it takes is onnxruntime's choice. This is no
rewriting that keeps a model's meaning but part of it, so the importer does it.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property

import onnx_ir as ir

from celosia.compiler.graph.importing.branches import INLINED
from celosia.compiler.graph.onnxruntime_rules.propagation import IDLE, hands_on, is_quantised, origin
from celosia.compiler.graph.operands import operand, quantisation
from celosia.compiler.graph.values import (
    attribute,
    attributes,
    captured,
    constant,
    dtype_name,
    is_folded,
    is_op,
    only_use,
    shape,
    subgraphs,
)
from celosia.compiler.ops.contrib import BYTES_OF_BLOCKS

BITS = {"int2": 2, "uint2": 2, "int4": 4, "uint4": 4, "int8": 8, "uint8": 8}
BLOCK_OF_COLUMNS = 32
"""How many activations share a scale where a whole column of weights, or all of them, have one."""
ONE = 1e-6
"""How far a factor of a Gemm may be from 1."""
SHARED = ("float16", "float32", "float64", "int32", "int64")
"""Element types of which onnxruntime keeps each number once, where constants of one element are equal."""


def round_activations(model: ir.Model) -> None:
    """Change `model`, bodies of its operators too: what products by such constants read is rounded first. A MatMulNBits
    multiplies floats where its weights are no constants."""
    for node in list(model.graph):
        weights = [operand(node, name) for name in ("b", "scales", "zero_points")] if is_op(node, "MatMulNBits") else []
        if not all(value is None or is_folded(value) for value in weights):
            node.attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", 0)
    for node, product in products(model).items():
        _round(node, product)


@dataclass(frozen=True)
class BlockProduct:
    """A product by quantised constants whose activations become bytes.

    dequantise: the operator that makes floats of the constants. made: these floats, and what they are handed on as.
    size: how many activations share a scale.
    """

    dequantise: ir.Node
    made: tuple[ir.Value, ...]
    size: int


def products(model: ir.Model) -> dict[ir.Node, BlockProduct]:
    """The products of `model`, in bodies of its operators too, whose activations become bytes."""
    found = {}
    for graph in (model.graph, *model.graph.subgraphs()):
        products = _Products(graph, graph is model.graph)
        for node in graph:
            if is_op(node, "Gemm", "MatMul") and (product := products.of(node)) is not None:
                found[node] = product
    return found


def _round(node: ir.Node, product: BlockProduct) -> None:
    x, graph = node.inputs[0], node.graph
    assert x is not None and isinstance(graph, ir.Graph)
    name = f"{x.name}_rounded_{node.name or node.outputs[0].name}"
    out = ir.Value(name=name, shape=x.shape, type=x.type)
    made = ir.Node("celosia", "RoundBlocks", [x], attributes(block_size=product.size), outputs=[out], name=name)
    graph.insert_before(node, made)
    node.replace_input_with(0, out)
    scale, _ = quantisation(product.dequantise)
    if scale is not None and dtype_name(scale) == "float16":  # the product of bytes is in float32, whatever the scales
        wide = ir.Node("", "Cast", [scale], attributes(to=ir.DataType.FLOAT.value))
        wide.outputs[0].name, wide.outputs[0].shape = f"{scale.name}_float", scale.shape
        wide.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
        graph.insert_before(product.dequantise, wide)
        product.dequantise.replace_input_with(1, wide.outputs[0])
        for value in product.made:
            value.type = ir.TensorType(ir.DataType.FLOAT)


def _captured(node: ir.Node) -> list[ir.Value]:
    """Values around the bodies of `node` that these read in operators that are not folded, or return."""

    def counts(value: ir.Value) -> bool:
        inner = [use.node for use in value.uses() if use.node.graph is not node.graph]
        if any(not all(map(is_folded, reader.outputs)) for reader in inner):
            return True
        return any(value in graph.outputs for graph in subgraphs(node))

    return [value for value in captured(node) if counts(value)]


def _has_one_scale(dequantise: ir.Node) -> bool:
    scale, _ = quantisation(dequantise)
    return scale is not None and shape(scale) in ((), (1,))


class _Products:
    """Choose the products of a graph that become products of bytes, after what onnxruntime has done to the graph
    before."""

    def __init__(self, graph: ir.Graph, is_main: bool) -> None:
        self.graph, self.is_main = graph, is_main

    def of(self, node: ir.Node) -> BlockProduct | None:
        """None where `node` multiplies floats."""
        x = node.inputs[0]
        if x is None or is_op(origin(x), "DequantizeLinear") or self._stays_float(node):
            return None
        found = self._dequantised(node)
        if found is None:
            return None
        dequantise, made, is_turned = found
        size = self._block(dequantise, is_turned)
        return BlockProduct(dequantise, tuple(made), size) if size else None

    def _dequantised(self, node: ir.Node) -> tuple[ir.Node, list[ir.Value], bool] | None:
        """The DequantizeLinear of the second factor of `node`, the values from its result on, the last of which `node`
        reads, and whether they are transposed between."""
        value, made, turns, is_pushed = node.inputs[1], list[ir.Value](), 0, True
        while value is not None and value.producer() is not None:
            reader, maker = only_use(value), value.producer()
            if reader is None or IDLE in value.meta or maker is None or maker.graph is not self.graph:
                return None
            made.insert(0, value)
            if is_op(maker, "DequantizeLinear"):
                return self._straight(node, maker, made, turns, is_pushed)
            if is_op(maker, "Transpose"):
                turns += attribute(maker, "perm", [1, 0]) == [1, 0]
                is_pushed &= "perm" in maker.attributes
            elif not hands_on(maker):
                return None
            value = maker.inputs[0]
        return None

    def _straight(
        self, node: ir.Node, dequantise: ir.Node, made: list[ir.Value], turns: int, is_pushed: bool
    ) -> tuple[ir.Node, list[ir.Value], bool] | None:
        """Return `_dequantised` of `node` after its transpositions have become part of it, or of the constants.

        is_pushed: all of them name their permutation, without which onnxruntime moves none through scales of columns.
        """
        is_turned = turns % 2 == 1
        if is_op(node, "Gemm") and self._takes_transpositions(node):
            return None if is_turned != bool(attribute(node, "transB", 0)) else (dequantise, made, False)
        if not is_pushed and not _has_one_scale(dequantise):
            return None
        return None if attribute(node, "transB", 0) else (dequantise, made, is_turned)

    def _is_own_transposition(self, x: ir.Value) -> bool:
        """Whether a Transpose makes x for one reader alone, and no other transposes the same."""
        maker = x.producer()
        if maker is None or not is_op(maker, "Transpose") or maker.inputs[0] is None:
            return False
        twins = [use.node for use in maker.inputs[0].uses() if is_op(use.node, "Transpose")]
        return len(twins) == 1 and len(self._readers_of(x)) == 1

    def _takes_transpositions(self, gemm: ir.Node) -> bool:
        """Whether transpositions of its factors become attributes of `gemm`."""
        return len(self._readers_of(gemm.outputs[0])) < 2

    def _block(self, dequantise: ir.Node, is_turned: bool) -> int:
        """In blocks of how many activations a product by these constants reads its bytes; 0 where it does not."""
        inputs = [value for value in dequantise.inputs if value is not None]
        own = inputs[1:2] if self._is_transposed(dequantise) else inputs[:2]
        if not all(map(self._is_constant, inputs)) or not all(map(self._is_unshared, own)):
            return 0
        dims, *of_parameters = (shape(value) for value in inputs)
        kind, axis, size = (
            dtype_name(inputs[0]),
            attribute(dequantise, "axis", 1),
            attribute(dequantise, "block_size", 0),
        )
        if dims is None or len(dims) != 2 or dtype_name(inputs[1]) not in ("float16", "float32"):
            return 0
        if len(set(of_parameters)) != 1:
            return 0
        if is_turned:  # onnxruntime transposes bytes, of which the axis then is not negative, and no blocks
            if size or BITS.get(kind) != 8:
                return 0
            dims, axis = dims[::-1], 1 - axis % 2
        by_column = of_parameters[0] == () or (axis == 1 and of_parameters[0] == dims[1:])
        if axis != 0 if size else not by_column:
            return 0
        size = size or BLOCK_OF_COLUMNS
        return size if size in BYTES_OF_BLOCKS.get(BITS.get(kind, 0), ()) else 0

    def _is_constant(self, value: ir.Value) -> bool:
        """Whether it is one of this graph: onnxruntime does not take those around a body."""
        return is_folded(value) and (value.graph is self.graph or value.producer() is not None)

    def _is_unshared(self, value: ir.Value) -> bool:
        """Whether one operator alone reads this constant, and what onnxruntime makes one with it."""
        return IDLE not in value.meta and self._readers.get(self._key(value), 0) < 2

    @cached_property
    def _readers(self) -> Mapping[Hashable, int]:
        """How many operators read each constant, but for those that are folded themselves."""
        counts: dict[Hashable, int] = {}
        for node in self.graph:
            if all(is_folded(value) for value in node.outputs):
                continue
            read = node.inputs[1:] if self._is_transposed(node) else node.inputs
            values = {value for value in (*read, *_captured(node)) if value is not None and is_folded(value)}
            for key in {self._key(value) for value in values}:
                counts[key] = counts.get(key, 0) + 1
        return counts

    @staticmethod
    def _is_transposed(node: ir.Node) -> bool:
        """Whether `node` dequantises bytes that onnxruntime transposes, so that it reads constants of its own."""
        if not is_op(node, "DequantizeLinear") or node.inputs[0] is None or attribute(node, "block_size", 0):
            return False
        reader = only_use(node.outputs[0])
        while reader is not None and hands_on(reader):
            reader = only_use(reader.outputs[0])
        if reader is None or not is_op(reader, "Transpose"):
            return False
        is_pushed = "perm" in reader.attributes or _has_one_scale(node)
        return is_pushed and BITS.get(dtype_name(node.inputs[0])) == 8

    def _key(self, value: ir.Value) -> Hashable:
        """Equal for constants that onnxruntime makes one: those that the same operators make of the same constants, and
        equal numbers."""
        node = value.producer()
        if node is not None and hands_on(node) and node.inputs[0] is not None:
            return self._key(node.inputs[0])
        if node is not None:
            attrs = sorted((name, repr(attr.value)) for name, attr in node.attributes.items())
            inputs = tuple(self._key(each) if each is not None else None for each in node.inputs)
            return node.domain, node.op_type, (*attrs,), inputs, value.index()
        if not self.is_main or INLINED in value.meta or value in self._inside:
            return value
        if dtype_name(value) not in SHARED or shape(value) not in ((), (1,)):
            return value
        number = constant(value)
        return value if number is None else (dtype_name(value), number.shape, number.tobytes())

    @cached_property
    def _inside(self) -> set[ir.Value]:
        return {value for node in self.graph if subgraphs(node) for value in _captured(node)}

    def _readers_of(self, value: ir.Value) -> list[ir.Node]:
        """Operators of this graph that read `value`, once for each of their inputs, or once for all their bodies."""
        own = [use.node for use in value.uses() if use.node.graph is self.graph]
        if len(own) == len(list(value.uses())):
            return own
        return own + [node for node in self.graph if subgraphs(node) and value in captured(node)]

    def _stays_float(self, node: ir.Node) -> bool:
        """Whether factors of `node`, or what reads its result, keep onnxruntime from it: a bias that is no row, a
        QuantizeLinear, or a Relu or Clip alone that itself has one reader, which it takes for the end of a product of
        bytes."""
        x, y = node.inputs[0], node.outputs[0]
        assert x is not None
        is_flat = len(x.shape or ()) == 2
        is_gemm, is_turned = is_op(node, "Gemm"), is_flat and self._is_own_transposition(x)
        if is_op(node, "MatMul"):
            add = only_use(y)
            bias = self._added(node, add) if is_op(add, "Add") else None
            if add is not None and bias is not None and y.shape is not None:
                if is_flat and len(bias) == 2 and self._is_bias(bias, shape(y)) and not self._adds_later(add, y):
                    return True
                if bias == (y.shape[-1],):
                    y, is_gemm = add.outputs[0], is_flat
        elif not self._is_plain(node):
            return True
        last = y.producer()
        if is_gemm and last is not None:
            is_turned &= self._takes_transpositions(last)
            if is_turned != bool(attribute(node, "transA", 0)):
                return True
        readers = self._readers_of(y)
        if any(is_op(reader, "QuantizeLinear") for reader in readers) or (last is not None and is_quantised(last)):
            return True
        reshaped = not is_flat and y is not node.outputs[0]
        if reshaped or len(readers) != 1 or not is_op(readers[0], "Relu", "Clip"):
            return False
        result = readers[0].outputs[0]
        return len(self._readers_of(result)) == 1 and not result.is_graph_output()

    def _added(self, node: ir.Node, add: ir.Node | None) -> tuple[int, ...] | None:
        """The shape of what `add` adds to the result of `node`."""
        other = next((v for v in (add.inputs if add else ()) if v is not None and v is not node.outputs[0]), None)
        return shape(other) if other is not None else None

    @staticmethod
    def _is_bias(bias: tuple[int, ...], result: tuple[int, ...] | None) -> bool:
        """Whether a Gemm with `result` takes a matrix `bias`: a row, a column, or one number for each element."""
        if result is None:
            return False
        rows, columns = result[-2:]
        return bias in ((1, columns), (rows, columns), (rows, 1))

    def _adds_later(self, add: ir.Node, y: ir.Value) -> bool:
        """Whether `add` adds y to the result of a later MatMul, which takes y for its bias."""
        other = next((value for value in add.inputs if value is not None and value is not y), None)
        maker = other.producer() if other is not None else None
        if other is None or maker is None or not is_op(maker, "MatMul") or only_use(other) is not add:
            return False
        order = [node for node in self.graph if node in (maker, y.producer())]
        return order[-1] is maker

    def _is_plain(self, gemm: ir.Node) -> bool:
        """Whether a Gemm scales nothing, adds at most one number for each column, and is not part of a sum or a
        transposition that changes that."""
        y = gemm.outputs[0]
        bias = operand(gemm, "c")
        if abs(attribute(gemm, "alpha", 1.0) - 1) > ONE:
            return False
        if bias is not None:
            return bool(abs(attribute(gemm, "beta", 1.0) - 1) <= ONE) and shape(bias) == tuple((shape(y) or ())[-1:])
        reader = only_use(y)
        if is_op(reader, "Transpose"):
            return False
        if not is_op(reader, "Sum") or reader is None or len(reader.inputs) != 2:
            return True
        other = self._added(gemm, reader)
        return other is None or len(other) < 2 or len(other) > 2
