"""Values of attention, turned on the accelerator.

P · V contracts over the rows of V, and weights are rows that are contracted over columns: V has to be turned. Where the
accelerator computes P, a product with the identity turns V there, V being the weights, so that the host need not:

    P · V  =  P · (I · Vᵀ)ᵀ       both transposes are views, as that of keys is

So it is with the rows of a cache, behind which a product puts new ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from celosia.compiler.cpu.ops import VIEWS
from celosia.compiler.graph.select.matrices import MOVES, multiplies, shared_operand
from celosia.compiler.graph.select.placement import cache_of
from celosia.compiler.graph.values import constant, is_op, shape
from celosia.hw.config import Config

REPEATING = (*VIEWS, "Expand")
"""What stands between values and the heads that share them."""
BETWEEN = ("QLinearAdd", "QLinearMul", "Table", "Transpose", "Slice", "Concat", *REPEATING)
"""What stands between a product and the keys or values that are made of it."""


def turn_values(model: ir.Model, cfg: Config) -> None:
    """Put I · Vᵀ in front of each product by V of a softmax of a product, where `cfg` computes all of that; and copies
    of K and V to whole blocks of rows, where they are none."""
    if not cfg.softmax or not multiplies(cfg):
        return
    for node in list(model.graph):
        scores = _scores(node.inputs[0]) if is_op(node, "QLinearMatMul") else None
        if scores is not None and _is_made(node.inputs[3]) and _is_made(scores.inputs[3]):
            for each in (node, scores):
                if not _is_appended(each.inputs[3]):
                    _in_whole_blocks(model.graph, each, cfg.block_out, turned=each is scores)
            _turn(model.graph, node)


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
    value = node.inputs[3]
    assert value is not None and value.dtype is not None
    rows = (shape(value) or ())[-1 if turned else -2]
    producer = value.producer()
    if rows % block == 0:
        return
    reader, number = node, 3
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
        if is_op(producer, "Concat"):
            return cache_of(producer.outputs[0]) is not None
        value = producer.inputs[0] if is_op(producer, "Transpose", *REPEATING) else None
    return False


def _is_made(value: ir.Value | None) -> bool:
    """Whether it is matrices that a product has just made, of another shape perhaps, or behind the rows of a cache."""
    dims = None if value is None else shape(value)
    while value is not None and (producer := value.producer()) is not None:
        if is_op(producer, "QLinearMatMul", "QGemm"):
            return dims is not None and len(dims) > 2
        if not is_op(producer, *BETWEEN):
            return False
        value = _read(producer)
    return False


def _read(node: ir.Node) -> ir.Value | None:
    """What `node` changes: of two operands the one with the shape of the result, of a cache's rows the new ones."""
    if is_op(node, "QLinearAdd", "QLinearMul"):
        operands = (each for each in node.inputs[0:4:3] if each is not None and constant(each) is None)
        return next((each for each in operands if shape(each) == shape(node.outputs[0])), None)
    return node.inputs[1] if is_op(node, "Concat") and cache_of(node.outputs[0]) is not None else node.inputs[0]


def _turn(graph: ir.Graph, node: ir.Node) -> None:
    """Make `node` multiply by (I · Vᵀ)ᵀ, whose bytes are those of V. What several heads share is turned once."""
    operand = node.inputs[3]
    assert operand is not None
    shared, _, fold = shared_operand(operand)
    value, reader, number = shared if fold == "columns" else operand, node, 3
    while (read := reader.inputs[number]) is not value:
        reader, number = read.producer(), 0  # type: ignore[union-attr,assignment]
    assert value.dtype is not None
    dims = shape(value)
    assert dims is not None
    perm = [*range(len(dims) - 2), len(dims) - 1, len(dims) - 2]
    identity = np.broadcast_to(np.eye(dims[-1], dtype=np.int8), (*dims[:-2], dims[-1], dims[-1]))
    dtype = value.dtype.numpy()
    zero = np.array(128 if dtype == np.uint8 else 0, dtype)  # of which the accelerator takes no notice
    scale = np.array(1, np.float32)
    arrays: dict[str, NDArray[Any]] = {
        "identity": np.ascontiguousarray(identity), "one": scale, "none": np.array(0, np.int8), "zero": zero,
    }  # fmt: skip
    given = [
        ir.Value(name=f"{node.outputs[0].name}.{name}", const_value=ir.tensor(array)) for name, array in arrays.items()
    ]
    for each, array in zip(given, arrays.values()):
        each.shape, each.dtype = ir.Shape(array.shape), ir.DataType.from_numpy(array.dtype)
        graph.initializers[each.name or ""] = each
    eye, one, none, middle = given
    before = ir.node("Transpose", [value], {"perm": perm})
    made = ir.node("QLinearMatMul", [eye, one, none, before.outputs[0], one, middle, one, middle])
    made.meta[MOVES] = True
    after = ir.node("Transpose", [made.outputs[0]], {"perm": perm})
    turned = [dims[axis] for axis in perm]
    for step, size in ((before, turned), (made, turned), (after, dims)):
        step.outputs[0].shape, step.outputs[0].dtype = ir.Shape(list(size)), value.dtype
    graph.insert_before(reader, [before, made, after])
    reader.replace_input_with(number, after.outputs[0])
