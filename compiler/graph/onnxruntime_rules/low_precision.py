"""Products by constants of few bits: activations that onnxruntime quantises by blocks, and integers widened to bytes.

onnxruntime makes a MatMulNBits, at accuracy_level 4, of some float products by quantised constants, and multiplies
bytes. The rules here repeat its choice of products: a MatMul, or a Gemm with alpha and beta of 1, untransposed and with
at most one bias for each column, by a constant [K, N] of 2, 4 or 8 bits with a scale for each block along axis 0, for
each column, or for all (the last two count as blocks of 32). Products with a quantised result stay float32, and so do
products by weights that another operator reads, too. `RoundBlocks` is our own: the bytes of x times their scales, so
that the product of floats is that of the bytes (`round_activations`). This changes bytes, and the model means the
changed ones, so it is part of the import.

    wf = DequantizeLinear(w4, scale, zero, axis=0, block_size=32)         xr = RoundBlocks(x, block_size=32)
    y = MatMul(x, wf)                                               ->    y = MatMul(xr, wf)

All other tensors of fewer than 8 bits become bytes, which integer operators multiply (`widen`):

    wf = DequantizeLinear(w4, scale, z4)      ->      wf = DequantizeLinear(w8, scale)          w8 = w4 - z4, int8

    q = QuantizeLinear(x, scale, z4)          ->      q = Clip(QuantizeLinear(x, scale, z8), low, high)
    y = DequantizeLinear(q, scale, z4)                y = DequantizeLinear(q, scale, z8)

The reals are the same, to the last bit. onnxruntime 1.31 has integer operators of bytes only, and multiplies floats
where weights have fewer bits. We define the bytes of such a model as those that onnxruntime computes with its weights
in bytes (docs/low_precision.md), so this is part of the import.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray

from celosia.compiler.graph.importing.inlining import INLINED
from celosia.compiler.graph.onnxruntime_rules.propagation import (
    IDLE,
    is_quantised,
    is_removed_wire,
    producer_before_moves,
)
from celosia.compiler.graph.operands import operand, quantisation, quantisation_names, set_operand
from celosia.compiler.graph.values import (
    attribute,
    attributes,
    captured,
    constant,
    dtype_name,
    is_folded,
    is_op,
    new_constant,
    only_use,
    shape,
    subgraphs,
)
from celosia.compiler.ops.contrib import BYTES_OF_BLOCKS
from celosia.compiler.program.host.hostops.value_types import broadcast_parameters

BITS = {"int2": 2, "uint2": 2, "int4": 4, "uint4": 4, "int8": 8, "uint8": 8}
"""Element type of constants -> bits of an element."""
NARROW = frozenset(kind for kind, bits in BITS.items() if bits < 8)
"""Element types whose values, less a zero point of the same type, fit into int8."""


# Activations in blocks ------------------------------------------------------------------------------------------------


BLOCK_OF_COLUMNS = 32
"""Activations that share a scale where a whole column of weights, or all of them, share one."""
FACTOR_TOLERANCE = 1e-6
"""Difference from 1 up to which a Gemm's alpha and beta count as 1."""
MERGED_TYPES = ("float16", "float32", "float64", "int32", "int64")
"""Element types for which onnxruntime merges equal constants of one element."""


def round_activations(model: ir.Model) -> None:
    """Insert RoundBlocks before the products that onnxruntime computes on bytes, in bodies of operators too.

    A MatMulNBits in the model whose weights are no constants multiplies floats: it loses its accuracy_level.
    """
    for node in list(model.graph):
        weights = [operand(node, name) for name in ("b", "scales", "zero_points")] if is_op(node, "MatMulNBits") else []
        if not all(value is None or is_folded(value) for value in weights):
            node.attributes["accuracy_level"] = ir.AttrInt64("accuracy_level", 0)
    for node, product in _find_block_products(model).items():
        _insert_rounding(node, product)


def _insert_rounding(node: ir.Node, product: _BlockProduct) -> None:
    """Insert RoundBlocks before the product `node`; float16 scales are cast, since it is computed in float32."""
    x, graph = node.inputs[0], node.graph
    assert x is not None and isinstance(graph, ir.Graph)
    name = f"{x.name}_rounded_{node.name or node.outputs[0].name}"
    out = ir.Value(name=name, shape=x.shape, type=x.type)
    rounding = ir.Node("celosia", "RoundBlocks", [x], attributes(block_size=product.size), outputs=[out], name=name)
    graph.insert_before(node, rounding)
    node.replace_input_with(0, out)
    scale, _ = quantisation(product.dequantise)
    if scale is not None and dtype_name(scale) == "float16":  # the product of bytes is in float32, whatever the scales
        cast = ir.Node("", "Cast", [scale], attributes(to=ir.DataType.FLOAT.value))
        cast.outputs[0].name, cast.outputs[0].shape = f"{scale.name}_float", scale.shape
        cast.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
        graph.insert_before(product.dequantise, cast)
        product.dequantise.replace_input_with(1, cast.outputs[0])
        for value in product.weight_values:
            value.type = ir.TensorType(ir.DataType.FLOAT)


@dataclass(frozen=True)
class _BlockProduct:
    """A product by quantised constants whose activations become bytes.

    dequantise: the DequantizeLinear of the constants. weight_values: its result, and what wires and transpositions make
    of it. size: activations that share a scale.
    """

    dequantise: ir.Node
    weight_values: tuple[ir.Value, ...]
    size: int


def _find_block_products(model: ir.Model) -> dict[ir.Node, _BlockProduct]:
    """Return the products of `model` whose activations become bytes, by node, in bodies of operators too."""
    block_products = {}
    for graph in (model.graph, *model.graph.subgraphs()):
        graph_products = _ProductFinder(graph, graph is model.graph)
        for node in graph:
            if is_op(node, "Gemm", "MatMul") and (product := graph_products.block_product_of(node)) is not None:
                block_products[node] = product
    return block_products


def _outer_values_read(node: ir.Node) -> list[ir.Value]:
    """Return the outer values that bodies of `node` return, or read in operators that are not folded."""

    def is_read_or_returned(value: ir.Value) -> bool:
        """Return whether a body returns `value`, or an operator in it that is not folded reads it."""
        readers = [use.node for use in value.uses() if use.node.graph is not node.graph]
        if any(not all(map(is_folded, reader.outputs)) for reader in readers):
            return True
        return any(value in graph.outputs for graph in subgraphs(node))

    return [value for value in captured(node) if is_read_or_returned(value)]


def _has_one_scale(dequantise: ir.Node) -> bool:
    """Return whether a DequantizeLinear has one scale for all elements."""
    scale, _ = quantisation(dequantise)
    return scale is not None and shape(scale) in ((), (1,))


class _ProductFinder:
    """Finds the products of a graph that onnxruntime computes on bytes, after its own earlier rewrites of the graph.

    is_main: whether the graph is the model's, not that of a body. `node` below is a Gemm or MatMul.
    """

    def __init__(self, graph: ir.Graph, is_main: bool) -> None:
        self.graph, self.is_main = graph, is_main

    def block_product_of(self, node: ir.Node) -> _BlockProduct | None:
        """Return the _BlockProduct of `node`; None if it multiplies floats."""
        x = node.inputs[0]
        if x is None or is_op(producer_before_moves(x), "DequantizeLinear") or self._stays_float(node):
            return None
        weights = self._find_weights(node)
        if weights is None:
            return None
        dequantise, weight_values, is_turned = weights
        size = self._block_length(dequantise, is_turned)
        return _BlockProduct(dequantise, tuple(weight_values), size) if size else None

    def _find_weights(self, node: ir.Node) -> tuple[ir.Node, list[ir.Value], bool] | None:
        """Follow the second factor of `node` back to its DequantizeLinear.

        Returns (the DequantizeLinear, the values from its result to the one that `node` reads, whether it is transposed
        between). None if other operators than wires and transpositions lie between, or a value between has other
        readers.
        """
        value, weight_values, turns, all_name_perm = node.inputs[1], list[ir.Value](), 0, True
        while value is not None and value.producer() is not None:
            reader, producer = only_use(value), value.producer()
            if reader is None or IDLE in value.meta or producer is None or producer.graph is not self.graph:
                return None
            weight_values.insert(0, value)
            if is_op(producer, "DequantizeLinear"):
                return self._after_transpositions(node, producer, weight_values, turns, all_name_perm)
            if is_op(producer, "Transpose"):
                turns += attribute(producer, "perm", [1, 0]) == [1, 0]
                all_name_perm &= "perm" in producer.attributes
            elif not is_removed_wire(producer):
                return None
            value = producer.inputs[0]
        return None

    def _after_transpositions(
        self, node: ir.Node, dequantise: ir.Node, weight_values: list[ir.Value], turns: int, all_name_perm: bool
    ) -> tuple[ir.Node, list[ir.Value], bool] | None:
        """Return the result of `_find_weights` once onnxruntime has moved the transpositions into `node` or the
        constants.

        turns: number of transpositions. all_name_perm: all name their permutation; onnxruntime moves one that does not
        only through a single scale. None if the factor is transposed in a way that onnxruntime does not take.
        """
        is_turned = turns % 2 == 1
        if is_op(node, "Gemm") and self._takes_transpositions(node):
            return None if is_turned != bool(attribute(node, "transB", 0)) else (dequantise, weight_values, False)
        if not all_name_perm and not _has_one_scale(dequantise):
            return None
        return None if attribute(node, "transB", 0) else (dequantise, weight_values, is_turned)

    def _is_own_transposition(self, x: ir.Value) -> bool:
        """Return whether a Transpose makes `x` for one reader alone, and no other Transpose makes the same."""
        producer = x.producer()
        if producer is None or not is_op(producer, "Transpose") or producer.inputs[0] is None:
            return False
        twins = [use.node for use in producer.inputs[0].uses() if is_op(use.node, "Transpose")]
        return len(twins) == 1 and len(self._readers_of(x)) == 1

    def _takes_transpositions(self, gemm: ir.Node) -> bool:
        """Return whether onnxruntime turns transpositions of a Gemm's factors into its attributes.

        It does so if the Gemm has at most one reader.
        """
        return len(self._readers_of(gemm.outputs[0])) < 2

    def _block_length(self, dequantise: ir.Node, is_turned: bool) -> int:
        """Return how many activations share a scale in a product by these constants; 0 if it multiplies floats.

        is_turned: the constants are transposed behind `dequantise`.
        """
        inputs = [value for value in dequantise.inputs if value is not None]
        unshared_inputs = inputs[1:2] if self._is_transposed_by_onnxruntime(dequantise) else inputs[:2]
        if not all(map(self._is_constant, inputs)) or not all(map(self._is_unshared, unshared_inputs)):
            return 0
        dims, *parameter_shapes = (shape(value) for value in inputs)
        dtype, axis, size = (
            dtype_name(inputs[0]),
            attribute(dequantise, "axis", 1),
            attribute(dequantise, "block_size", 0),
        )
        if dims is None or len(dims) != 2 or dtype_name(inputs[1]) not in ("float16", "float32"):
            return 0
        if len(set(parameter_shapes)) != 1:
            return 0
        if is_turned:  # onnxruntime transposes 8-bit constants without blocks, and makes their axis non-negative
            if size or BITS.get(dtype) != 8:
                return 0
            dims, axis = dims[::-1], 1 - axis % 2
        by_column = parameter_shapes[0] == () or (axis == 1 and parameter_shapes[0] == dims[1:])
        if axis != 0 if size else not by_column:
            return 0
        size = size or BLOCK_OF_COLUMNS
        return size if size in BYTES_OF_BLOCKS.get(BITS.get(dtype, 0), ()) else 0

    def _is_constant(self, value: ir.Value) -> bool:
        """Return whether `value` is a constant of this graph: onnxruntime does not accept constants around a body."""
        return is_folded(value) and (value.graph is self.graph or value.producer() is not None)

    def _is_unshared(self, value: ir.Value) -> bool:
        """Return whether one operator alone reads this constant and all that onnxruntime merges with it."""
        return IDLE not in value.meta and self._readers.get(self._merge_key(value), 0) < 2

    @cached_property
    def _readers(self) -> Mapping[Hashable, int]:
        """Readers of each constant, by merge key, without readers that are folded themselves."""
        counts: dict[Hashable, int] = {}
        for node in self.graph:
            if all(is_folded(value) for value in node.outputs):
                continue
            inputs = node.inputs[1:] if self._is_transposed_by_onnxruntime(node) else node.inputs
            values = {value for value in (*inputs, *_outer_values_read(node)) if value is not None and is_folded(value)}
            for key in {self._merge_key(value) for value in values}:
                counts[key] = counts.get(key, 0) + 1
        return counts

    @staticmethod
    def _is_transposed_by_onnxruntime(node: ir.Node) -> bool:
        """Return whether `node` dequantises bytes that onnxruntime transposes.

        It then reads constants of its own.
        """
        if not is_op(node, "DequantizeLinear") or node.inputs[0] is None or attribute(node, "block_size", 0):
            return False
        reader = only_use(node.outputs[0])
        while reader is not None and is_removed_wire(reader):
            reader = only_use(reader.outputs[0])
        if reader is None or not is_op(reader, "Transpose"):
            return False
        may_move = "perm" in reader.attributes or _has_one_scale(node)
        return may_move and BITS.get(dtype_name(node.inputs[0])) == 8

    def _merge_key(self, value: ir.Value) -> Hashable:
        """Return a key that is equal for constants which onnxruntime merges.

        It merges results of equal operators on merged constants, and equal numbers of MERGED_TYPES in the main graph.
        """
        node = value.producer()
        if node is not None and is_removed_wire(node) and node.inputs[0] is not None:
            return self._merge_key(node.inputs[0])
        if node is not None:
            attrs = sorted((name, repr(attr.value)) for name, attr in node.attributes.items())
            inputs = tuple(
                self._merge_key(operand_value) if operand_value is not None else None for operand_value in node.inputs
            )
            return node.domain, node.op_type, (*attrs,), inputs, value.index()
        if not self.is_main or INLINED in value.meta or value in self._read_by_bodies:
            return value
        if dtype_name(value) not in MERGED_TYPES or shape(value) not in ((), (1,)):
            return value
        number = constant(value)
        return value if number is None else (dtype_name(value), number.shape, number.tobytes())

    @cached_property
    def _read_by_bodies(self) -> set[ir.Value]:
        """Values of this graph that bodies of its operators read; onnxruntime does not merge them."""
        return {value for node in self.graph if subgraphs(node) for value in _outer_values_read(node)}

    def _readers_of(self, value: ir.Value) -> list[ir.Node]:
        """Return the operators of this graph that read `value`.

        An operator counts once for each of its inputs, and once for all of its bodies.
        """
        direct_readers = [use.node for use in value.uses() if use.node.graph is self.graph]
        if len(direct_readers) == len(list(value.uses())):
            return direct_readers
        return direct_readers + [node for node in self.graph if subgraphs(node) and value in captured(node)]

    def _stays_float(self, node: ir.Node) -> bool:
        """Return whether other operands or readers of `node` keep onnxruntime from multiplying bytes.

        Such are a bias that is no row, a QuantizeLinear behind, and a lone Relu or Clip with one reader, which
        onnxruntime takes for the end of a product of bytes.
        """
        x, y = node.inputs[0], node.outputs[0]
        assert x is not None
        is_flat = len(x.shape or ()) == 2 and self._has_known_rank(x)
        is_gemm, is_turned = is_op(node, "Gemm"), is_flat and self._is_own_transposition(x)
        if is_op(node, "MatMul"):
            add = only_use(y)
            bias = self._addend_shape(node, add) if is_op(add, "Add") else None
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
        is_reshaped = not is_flat and y is not node.outputs[0]
        if is_reshaped or len(readers) != 1 or not is_op(readers[0], "Relu", "Clip"):
            return False
        result = readers[0].outputs[0]
        return len(self._readers_of(result)) == 1 and not result.is_graph_output()

    @cached_property
    def _infers_nothing(self) -> set[ir.Node]:
        """Operators of this graph for whose results onnxruntime infers no shapes."""
        return {node for node in self.graph if node.domain == "ai.onnx.ml"}

    def _has_known_rank(self, value: ir.Value) -> bool:
        """Return whether onnxruntime knows the rank of `value`: it infers no shapes for operators of ai.onnx.ml."""
        if not self._infers_nothing:
            return True
        waiting, seen = [value], set[ir.Value]()
        while waiting:
            value = waiting.pop()
            node = value.producer()
            if value in seen or node is None or is_op(node, "Reshape"):
                continue
            if node in self._infers_nothing:
                return False
            seen.add(value)
            waiting += [operand_value for operand_value in node.inputs if operand_value is not None]
        return True

    def _addend_shape(self, node: ir.Node, add: ir.Node | None) -> tuple[int, ...] | None:
        """Return the shape of the operand that `add` adds to the result of `node`; None if it is not known."""
        addend = next(
            (value for value in (add.inputs if add else ()) if value is not None and value is not node.outputs[0]), None
        )
        return shape(addend) if addend is not None else None

    @staticmethod
    def _is_bias(bias: tuple[int, ...], result: tuple[int, ...] | None) -> bool:
        """Return whether a Gemm accepts a matrix `bias`: a row, a column, or one number for each element of its
        `result`."""
        if result is None:
            return False
        rows, columns = result[-2:]
        return bias in ((1, columns), (rows, columns), (rows, 1))

    def _adds_later(self, add: ir.Node, y: ir.Value) -> bool:
        """Return whether `add` adds `y` to the result of a later MatMul, which takes `y` as its bias."""
        other = next((value for value in add.inputs if value is not None and value is not y), None)
        later_product = other.producer() if other is not None else None
        if other is None or later_product is None or not is_op(later_product, "MatMul") or only_use(other) is not add:
            return False
        order = [node for node in self.graph if node in (later_product, y.producer())]
        return order[-1] is later_product

    def _is_plain(self, gemm: ir.Node) -> bool:
        """Return whether a Gemm can become a product of bytes as it is.

        It has no factors, a row as its bias if any, and no Sum or Transpose behind it that onnxruntime merges with it.
        """
        y = gemm.outputs[0]
        bias = operand(gemm, "c")
        if abs(attribute(gemm, "alpha", 1.0) - 1) > FACTOR_TOLERANCE:
            return False
        if bias is not None:
            return bool(abs(attribute(gemm, "beta", 1.0) - 1) <= FACTOR_TOLERANCE) and shape(bias) == tuple(
                (shape(y) or ())[-1:]
            )
        reader = only_use(y)
        if is_op(reader, "Transpose"):
            return False
        if not is_op(reader, "Sum") or reader is None or len(reader.inputs) != 2:
            return True
        addend = self._addend_shape(gemm, reader)
        return addend is None or len(addend) < 2 or len(addend) > 2


# Integers of fewer than 8 bits ----------------------------------------------------------------------------------------


def widen(model: ir.Model, unchanged: Collection[ir.Node | None] = ()) -> None:
    """Widen to bytes the narrow integers that DequantizeLinears read or QuantizeLinears make, in bodies too.

    unchanged: nodes that stay as they are.
    """
    for node in list(model.graph.all_nodes()):
        if is_op(node, "QuantizeLinear") and dtype_name(node.outputs[0]) in NARROW:
            _widen_quantise(node)
        if is_op(node, "DequantizeLinear") and node not in unchanged and _is_narrow(node):
            _widen_dequantise(node)


def in_bytes(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model that onnxruntime computes in integers where we do; `proto` itself if it has no narrow integers.

    Two kinds of DequantizeLinear stay: those that become part of a MatMulNBits, and those by blocks. For blocks
    onnxruntime has no integer operators, yet would use one for a product of bytes.
    """
    model = ir.from_proto(proto)
    if not any(is_op(node, "DequantizeLinear") and _is_narrow(node) for node in model.graph.all_nodes()):
        return proto
    model = ir.from_proto(onnx.shape_inference.infer_shapes(proto))
    unchanged = [product.dequantise for product in _find_block_products(model).values()]
    widen(model, [*unchanged, *(node for node in model.graph.all_nodes() if attribute(node, "block_size", 0))])
    return ir.to_proto(model)


def _is_narrow(node: ir.Node) -> bool:
    """Return whether a node's first input has fewer than 8 bits."""
    return node.inputs[0] is not None and dtype_name(node.inputs[0]) in NARROW


def _widen_dequantise(node: ir.Node) -> None:
    """Let a DequantizeLinear read int8 without a zero point; leave it if its operands vary or do not fit."""
    x, zero = operand(node, "x"), operand(node, "x_zero_point")
    values, zero_values = constant(x), constant(zero)
    if x is None or values is None or node.graph is None or (zero is not None and zero.dtype != x.dtype):
        return
    if zero is not None and zero_values is None:
        return
    try:
        widened = values.astype(np.int8) - _broadcast_zeros(node, zero_values, values)
    except ValueError:  # the operator stays, and its computation reports the error
        return
    assert isinstance(node.graph, ir.Graph)
    node.replace_input_with(0, new_constant(node.graph, f"{x.name}_int8", widened))
    node.resize_inputs(2)


def _widen_quantise(node: ir.Node) -> None:
    """Let a QuantizeLinear and its readers use bytes, with a Clip between; leave it if others read it or zeros vary."""
    y, graph = node.outputs[0], node.graph
    readers = [use.node for use in y.uses()]
    nodes = [node, *readers]
    if not readers or y.is_graph_output() or not isinstance(graph, ir.Graph) or y.dtype is None:
        return
    if not all(is_op(reader, "DequantizeLinear") and reader.graph is graph for reader in readers):
        return
    zeros = [operand(node, "y_zero_point"), *(operand(reader, "x_zero_point") for reader in readers)]
    if any(zero is not None and (constant(zero) is None or zero.dtype != y.dtype) for zero in zeros):
        return
    info, wide_dtype = ml_dtypes.iinfo(y.dtype.numpy()), np.dtype(np.int8 if dtype_name(y)[0] == "i" else np.uint8)
    for quantiser, zero in zip(nodes, zeros):
        array = constant(zero)
        wide_zero = np.zeros((), wide_dtype) if array is None else array.astype(wide_dtype)
        name = f"{quantisation(quantiser)[0].name}_zero" if zero is None else f"{zero.name}_{wide_dtype}"  # type: ignore[union-attr]
        set_operand(quantiser, quantisation_names(quantiser.op_type)[1], new_constant(graph, name, wide_zero))
    node.attributes.pop("output_dtype", None)
    bounds = [
        new_constant(graph, f"{wide_dtype}_{bound}", np.array(bound, wide_dtype))
        for bound in (int(info.min), int(info.max))
    ]
    clipped = ir.Node("", "Clip", [y, *bounds])
    clipped.outputs[0].shape, clipped.outputs[0].type = y.shape, ir.TensorType(ir.DataType.from_numpy(wide_dtype))
    clipped.outputs[0].name = f"{y.name}_{wide_dtype}"
    y.type = ir.TensorType(ir.DataType.from_numpy(wide_dtype))
    graph.insert_after(node, clipped)
    for reader in readers:
        reader.replace_input_with(0, clipped.outputs[0])


def _broadcast_zeros(node: ir.Node, zero: NDArray[np.generic] | None, values: NDArray[np.generic]) -> NDArray[np.int8]:
    """Return the zero points as int8, in a shape that broadcasts to `values`."""
    if zero is None:
        return np.zeros((), np.int8)
    axis, block = attribute(node, "axis", 1), attribute(node, "block_size", 0)
    return broadcast_parameters(zero.astype(np.int8), values.shape, axis, block)
