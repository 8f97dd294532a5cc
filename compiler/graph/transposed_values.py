"""Transpose the values (V) of attention on the accelerator, instead of on the host.

P · V contracts over the rows of V, and the accelerator contracts over the columns of its weights, so V must be
transposed. Where the accelerator computes P, a product of the identity by V transposes it there:

    P · V  =  P · (I · Vᵀ)ᵀ       both transposes are views, as that of the keys is

V may be the rows of a cache followed by new rows of a product.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from celosia.compiler.graph.operands import data_operands, joins_parts, multiplies_matrices, operand
from celosia.compiler.graph.select.matrices import MOVES, can_multiply_activations, shared_operand
from celosia.compiler.graph.select.placement import CACHE, cache_of
from celosia.compiler.graph.values import constant, derived_name, is_op, shape
from celosia.compiler.ops import VIEWS, op_spec
from celosia.hw.spec.config import Config

REPEATING = (*VIEWS, "Expand")
"""Operators between values and the heads that share them (grouped-query attention)."""


def transpose_attention_values(model: ir.Model, cfg: Config) -> None:
    """Insert I · Vᵀ before each product by V of the softmax of a product, if `cfg` computes all of these.

    K and V whose rows are no whole blocks of the accelerator are copied, so that they become such blocks.
    """
    if not cfg.softmax or not can_multiply_activations(cfg):
        return
    for node in list(model.graph):
        score_product = _find_score_product(node.inputs[0]) if is_op(node, "QLinearMatMul") else None
        if score_product is not None and _is_product(operand(node, "b")) and _is_product(operand(score_product, "b")):
            for product in (node, score_product):
                if not _is_appended(operand(product, "b")):
                    _copy_to_whole_blocks(model.graph, product, cfg.block_out, transposed=product is score_product)
            _transpose_values(model.graph, node, cfg.block_out)


def _find_score_product(value: ir.Value | None) -> ir.Node | None:
    """Return the product (Q · Kᵀ) whose softmax `value` is; None if it is none.

    Scaling by a table, a mask (QLinearAdd) and views may lie between product and softmax.
    """
    producer = None if value is None else value.producer()
    scores = producer.inputs[0] if producer is not None and is_op(producer, "QLinearSoftmax") else None
    while (
        scores is not None
        and (producer := scores.producer()) is not None
        and is_op(producer, "QLinearAdd", "Table", *VIEWS)
    ):
        scores = _changed_operand(producer)
    is_product = scores is not None and producer is not None and is_op(producer, "QLinearMatMul")
    return producer if is_product else None


def _copy_to_whole_blocks(graph: ir.Graph, node: ir.Node, block: int, transposed: bool) -> None:
    """Copy the matrices by which `node` multiplies, unless their rows are whole blocks of `block` rows.

    transposed: the matrices are transposed, and their columns count. The copy is of whole matrices: it is inserted
    before a last Transpose, if there is one, and of several samples before their columns are split into heads.
    """
    value = operand(node, "b")
    assert value is not None and value.dtype is not None
    rows = (shape(value) or ())[-1 if transposed else -2]
    producer = value.producer()
    if rows % block == 0:
        return
    reader, number = node, op_spec(node.op_type).number("b")
    if producer is not None and is_op(producer, "Transpose") and len(list(value.uses())) == 1:
        reader, number = producer, 0
    source = reader.inputs[number]
    assert source is not None
    splits, has_samples = source.producer(), (shape(source) or (1,))[0] > 1
    if has_samples and splits is not None and is_op(splits, *VIEWS):
        rows_of_samples = splits.inputs[0]
        if rows_of_samples is not None and len(shape(rows_of_samples) or ()) == 3:
            reader, number, source = splits, 0, rows_of_samples
    dims = shape(source) or ()
    copy = ir.node("Transpose", [source], {"perm": [*range(len(dims))]})
    copy.meta[MOVES] = True
    copy.outputs[0].shape, copy.outputs[0].dtype = ir.Shape(list(dims)), value.dtype
    graph.insert_before(reader, [copy])
    reader.replace_input_with(number, copy.outputs[0])


def _is_appended(value: ir.Value | None) -> bool:
    """Return whether `value` is a cache followed by new rows, possibly transposed or repeated."""
    while value is not None and (producer := value.producer()) is not None:
        if joins_parts(producer):
            return cache_of(producer.outputs[0]) is not None
        value = producer.inputs[0] if is_op(producer, "Transpose", *REPEATING) else None
    return False


def _is_product(value: ir.Value | None) -> bool:
    """Return whether `value` is the result of a product in this graph, as matrices of more than two axes.

    Views, additions, tables, and a cache before the new rows may follow the product.
    """
    dims = None if value is None else shape(value)
    while value is not None and (producer := value.producer()) is not None:
        if multiplies_matrices(producer):
            return dims is not None and len(dims) > 2
        if not is_op(producer, "QLinearAdd", "QLinearMul", "Table") and op_spec(producer.op_type).moves is None:
            return False
        value = _changed_operand(producer)
    return False


def _changed_operand(node: ir.Node) -> ir.Value | None:
    """Return the operand that `node` changes: the one of the result's shape, or the new rows behind a cache.

    Those who look for a product before `node` follow it.
    """
    if is_op(node, "QLinearAdd", "QLinearMul"):
        operands = (value for value in data_operands(node) if value is not None and constant(value) is None)
        return next((value for value in operands if shape(value) == shape(node.outputs[0])), None)
    return node.inputs[1] if joins_parts(node) and cache_of(node.outputs[0]) is not None else node.inputs[0]


def _transpose_values(graph: ir.Graph, node: ir.Node, block: int) -> None:
    """Make `node` multiply by (I · Vᵀ)ᵀ, whose bytes are those of V.

    V that several heads share is transposed once. Of a cache, only the last rows are transposed here, with the new
    ones, as they share a block of `block` rows: the host transposes the earlier rows once.
    """
    matrices = operand(node, "b")
    assert matrices is not None
    shared, _, fold = shared_operand(matrices)
    value, reader = shared if fold == "columns" else matrices, node
    number = op_spec(node.op_type).number("b")
    while (operand_value := reader.inputs[number]) is not value:
        reader, number = operand_value.producer(), 0  # type: ignore[union-attr,assignment]
    inserter, concat = _Inserter(graph, reader, node.outputs[0].name or ""), value.producer()
    past = concat.inputs[0] if concat is not None and cache_of(value) is not None and len(concat.inputs) == 2 else None
    whole_rows = 0 if past is None else max((shape(past) or ())[-2] - 1, 0) // block * block
    if concat is None or past is None or not whole_rows:
        reader.replace_input_with(number, inserter.transposed_by_product(value))
        return
    axis = len(shape(past) or ()) - 2
    head, tail = (
        inserter.slice_rows(past, first, end)
        for first, end in ((0, whole_rows), (whole_rows, (shape(past) or ())[axis]))
    )
    head.meta[CACHE] = cache_of(past)
    recent = inserter.node(concat.op_type, [tail, concat.inputs[1]], value, added_rows=-whole_rows, axis=axis)  # type: ignore[list-item]
    reader.replace_input_with(
        number, inserter.node(concat.op_type, [head, inserter.transposed_by_product(recent)], value, axis=axis)
    )
    if not list(value.uses()):
        graph.remove(concat, safe=True)


class _Inserter:
    """Inserts operators before `reader`; names of their constants begin with `name`."""

    def __init__(self, graph: ir.Graph, reader: ir.Node, name: str) -> None:
        self.graph, self.reader, self.name = graph, reader, name

    def constant(self, name: str, array: NDArray[Any]) -> ir.Value:
        """Add a constant to the graph."""
        value = ir.Value(name=derived_name(self.graph, f"{self.name}.{name}"), const_value=ir.tensor(array))
        value.shape, value.dtype = ir.Shape(array.shape), ir.DataType.from_numpy(array.dtype)
        self.graph.initializers[value.name or ""] = value
        return value

    def node(self, op: str, inputs: list[ir.Value], like: ir.Value, added_rows: int = 0, **attributes: Any) -> ir.Value:
        """Insert an operator and return its output, of the type of `like` and its shape with `added_rows` more rows."""
        node, (*leading, count, columns) = ir.node(op, inputs, attributes), shape(like) or ()
        y = node.outputs[0]
        y.shape, y.type = ir.Shape([*leading, count + added_rows, columns]), like.type
        self.graph.insert_before(self.reader, [node])
        return y

    def slice_rows(self, value: ir.Value, first: int, end: int) -> ir.Value:
        """Insert a Slice of rows `first` to `end` of matrices."""
        dims = shape(value) or ()
        bounds = [np.array([bound], np.int64) for bound in (first, end, len(dims) - 2)]
        operands = [
            self.constant(f"{suffix}.{first}", array) for suffix, array in zip(("first", "end", "axis"), bounds)
        ]
        return self.node("Slice", [value, *operands], value, added_rows=end - first - dims[-2])

    def transposed_by_product(self, value: ir.Value) -> ir.Value:
        """Insert (I · Vᵀ)ᵀ: a view, the product by the identity, and a view."""
        dims = shape(value)
        assert dims is not None and value.dtype is not None
        perm, dtype = [*range(len(dims) - 2), len(dims) - 1, len(dims) - 2], value.dtype.numpy()
        identity = np.broadcast_to(np.eye(dims[-1], dtype=np.int8), (*dims[:-2], dims[-1], dims[-1]))
        eye = self.constant("identity", np.ascontiguousarray(identity))
        one, zero = self.constant("one", np.array(1, np.float32)), self.constant("none", np.array(0, np.int8))
        # Any zero point gives the same bytes.
        zero_point = self.constant("zero", np.array(128 if dtype == np.uint8 else 0, dtype))
        transpose = ir.node("Transpose", [value], {"perm": perm})
        product = ir.node("QLinearMatMul", [eye, one, zero, transpose.outputs[0], one, zero_point, one, zero_point])
        product.meta[MOVES] = True
        transpose_back = ir.node("Transpose", [product.outputs[0]], {"perm": perm})
        swapped = [dims[axis] for axis in perm]
        for node, size in ((transpose, swapped), (product, swapped), (transpose_back, dims)):
            node.outputs[0].shape, node.outputs[0].dtype = ir.Shape(list(size)), value.dtype
        self.graph.insert_before(self.reader, [transpose, product, transpose_back])
        return transpose_back.outputs[0]
