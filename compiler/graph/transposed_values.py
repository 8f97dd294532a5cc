"""Transpose the values of attention on the accelerator.

P · V contracts over the rows of V, and weights are rows that are contracted over columns: V must be transposed. Where
the accelerator computes P, a product with the identity transposes V there (V is the weights), so that the host need
not:

    P · V  =  P · (I · Vᵀ)ᵀ       both transposes are views, as that of keys is

So it is with the rows of a cache, behind which a product puts new ones.
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
"""What stands between values and the heads that share them."""


def transpose_attention_values(model: ir.Model, cfg: Config) -> None:
    """Put I · Vᵀ in front of each product by V of a softmax of a product, where `cfg` computes all of that; and copies
    of K and V to whole blocks of rows, where they are none."""
    if not cfg.softmax or not can_multiply_activations(cfg):
        return
    for node in list(model.graph):
        scores = _scores(node.inputs[0]) if is_op(node, "QLinearMatMul") else None
        if scores is not None and _is_made(operand(node, "b")) and _is_made(operand(scores, "b")):
            for each in (node, scores):
                if not _is_appended(operand(each, "b")):
                    _in_whole_blocks(model.graph, each, cfg.block_out, turned=each is scores)
            _turn(model.graph, node, cfg.block_out)


def _scores(value: ir.Value | None) -> ir.Node | None:
    """The product whose softmax `value` is."""
    producer = None if value is None else value.producer()
    made = producer.inputs[0] if producer is not None and is_op(producer, "QLinearSoftmax") else None
    while (
        made is not None
        and (producer := made.producer()) is not None
        and is_op(producer, "QLinearAdd", "Table", *VIEWS)
    ):
        made = _read(producer)
    found = made is not None and producer is not None and is_op(producer, "QLinearMatMul")
    return producer if found else None


def _in_whole_blocks(graph: ir.Graph, node: ir.Node, block: int, turned: bool) -> None:
    """Copy the matrices by which `node` multiplies, where their rows, or their columns if they are `turned`, are no
    whole blocks. What is copied is what the last Transpose reads, for whole matrices."""
    value = operand(node, "b")
    assert value is not None and value.dtype is not None
    rows = (shape(value) or ())[-1 if turned else -2]
    producer = value.producer()
    if rows % block == 0:
        return
    reader, number = node, op_spec(node.op_type).number("b")
    if producer is not None and is_op(producer, "Transpose") and len(list(value.uses())) == 1:
        reader, number = producer, 0
    source = reader.inputs[number]
    assert source is not None
    dims = shape(source) or ()
    copy = ir.node("Transpose", [source], {"perm": [*range(len(dims))]})
    copy.meta[MOVES] = True
    copy.outputs[0].shape, copy.outputs[0].dtype = ir.Shape(list(dims)), value.dtype
    graph.insert_before(reader, [copy])
    reader.replace_input_with(number, copy.outputs[0])


def _is_appended(value: ir.Value | None) -> bool:
    """Whether it is rows of a cache and new ones behind them, perhaps with another shape."""
    while value is not None and (producer := value.producer()) is not None:
        if joins_parts(producer):
            return cache_of(producer.outputs[0]) is not None
        value = producer.inputs[0] if is_op(producer, "Transpose", *REPEATING) else None
    return False


def _is_made(value: ir.Value | None) -> bool:
    """Whether it is matrices that a product has just made, of another shape perhaps, or behind the rows of a cache."""
    dims = None if value is None else shape(value)
    while value is not None and (producer := value.producer()) is not None:
        if multiplies_matrices(producer):
            return dims is not None and len(dims) > 2
        if not is_op(producer, "QLinearAdd", "QLinearMul", "Table") and op_spec(producer.op_type).moves is None:
            return False
        value = _read(producer)
    return False


def _read(node: ir.Node) -> ir.Value | None:
    """Return the operand that `node` changes: the one with the result's shape, or a cache's new rows."""
    if is_op(node, "QLinearAdd", "QLinearMul"):
        operands = (each for each in data_operands(node) if each is not None and constant(each) is None)
        return next((each for each in operands if shape(each) == shape(node.outputs[0])), None)
    return node.inputs[1] if joins_parts(node) and cache_of(node.outputs[0]) is not None else node.inputs[0]


def _turn(graph: ir.Graph, node: ir.Node, block: int) -> None:
    """Make `node` multiply by (I · Vᵀ)ᵀ, whose bytes are those of V. What several heads share is turned once, and of a
    cache the last rows alone, as a block has them with the new ones: the host turns the others once."""
    matrices = operand(node, "b")
    assert matrices is not None
    shared, _, fold = shared_operand(matrices)
    value, reader = shared if fold == "columns" else matrices, node
    number = op_spec(node.op_type).number("b")
    while (read := reader.inputs[number]) is not value:
        reader, number = read.producer(), 0  # type: ignore[union-attr,assignment]
    made, concat = _Made(graph, reader, node.outputs[0].name or ""), value.producer()
    past = concat.inputs[0] if concat is not None and cache_of(value) is not None and len(concat.inputs) == 2 else None
    kept = 0 if past is None else max((shape(past) or ())[-2] - 1, 0) // block * block
    if concat is None or past is None or not kept:
        reader.replace_input_with(number, made.turned(value))
        return
    axis = len(shape(past) or ()) - 2
    head, tail = (made.rows(past, first, end) for first, end in ((0, kept), (kept, (shape(past) or ())[axis])))
    head.meta[CACHE] = cache_of(past)
    recent = made.node(concat.op_type, [tail, concat.inputs[1]], value, rows=-kept, axis=axis)  # type: ignore[list-item]
    reader.replace_input_with(number, made.node(concat.op_type, [head, made.turned(recent)], value, axis=axis))
    if not list(value.uses()):
        graph.remove(concat, safe=True)


class _Made:
    """Puts operators in front of `reader`, whose constants have names that begin with `name`."""

    def __init__(self, graph: ir.Graph, reader: ir.Node, name: str) -> None:
        self.graph, self.reader, self.name = graph, reader, name

    def constant(self, name: str, array: NDArray[Any]) -> ir.Value:
        """An initializer."""
        made = ir.Value(name=derived_name(self.graph, f"{self.name}.{name}"), const_value=ir.tensor(array))
        made.shape, made.dtype = ir.Shape(array.shape), ir.DataType.from_numpy(array.dtype)
        self.graph.initializers[made.name or ""] = made
        return made

    def node(self, op: str, inputs: list[ir.Value], like: ir.Value, rows: int = 0, **attributes: Any) -> ir.Value:
        """The output of an operator, of the type of `like` and so many more rows."""
        node, (*before, count, columns) = ir.node(op, inputs, attributes), shape(like) or ()
        y = node.outputs[0]
        y.shape, y.type = ir.Shape([*before, count + rows, columns]), like.type
        self.graph.insert_before(self.reader, [node])
        return y

    def rows(self, value: ir.Value, first: int, end: int) -> ir.Value:
        """Some rows of matrices."""
        dims = shape(value) or ()
        places = [np.array([number], np.int64) for number in (first, end, len(dims) - 2)]
        given = [self.constant(f"{what}.{first}", array) for what, array in zip(("first", "end", "axis"), places)]
        return self.node("Slice", [value, *given], value, rows=end - first - dims[-2])

    def turned(self, value: ir.Value) -> ir.Value:
        """(I · Vᵀ)ᵀ."""
        dims = shape(value)
        assert dims is not None and value.dtype is not None
        perm, dtype = [*range(len(dims) - 2), len(dims) - 1, len(dims) - 2], value.dtype.numpy()
        identity = np.broadcast_to(np.eye(dims[-1], dtype=np.int8), (*dims[:-2], dims[-1], dims[-1]))
        eye = self.constant("identity", np.ascontiguousarray(identity))
        one, none = self.constant("one", np.array(1, np.float32)), self.constant("none", np.array(0, np.int8))
        middle = self.constant("zero", np.array(128 if dtype == np.uint8 else 0, dtype))  # which makes no difference
        before = ir.node("Transpose", [value], {"perm": perm})
        made = ir.node("QLinearMatMul", [eye, one, none, before.outputs[0], one, middle, one, middle])
        made.meta[MOVES] = True
        after = ir.node("Transpose", [made.outputs[0]], {"perm": perm})
        swapped = [dims[axis] for axis in perm]
        for step, size in ((before, swapped), (made, swapped), (after, dims)):
            step.outputs[0].shape, step.outputs[0].dtype = ir.Shape(list(size)), value.dtype
        self.graph.insert_before(self.reader, [before, made, after])
        return after.outputs[0]
