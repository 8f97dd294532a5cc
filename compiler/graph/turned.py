"""Values of attention, turned on the accelerator.

P · V contracts over the rows of V, and weights are rows that are contracted over columns: V has to be turned. Where the
accelerator computes P, a product with the identity turns V there, V being the weights, so that the host need not:

    P · V  =  P · (I · Vᵀ)ᵀ       both transposes are views, as that of keys is
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from celosia.compiler.cpu.ops import VIEWS
from celosia.compiler.graph.select.matrices import MOVES, multiplies
from celosia.compiler.graph.values import constant, is_op, shape
from celosia.hw.config import Config


def turn_values(model: ir.Model, cfg: Config) -> None:
    """Put I · Vᵀ in front of each product by V of a softmax of a product, where `cfg` computes all of that."""
    if not cfg.softmax or not multiplies(cfg):
        return
    for node in list(model.graph):
        if is_op(node, "QLinearMatMul") and _of_softmax(node.inputs[0]) and _is_made(node.inputs[3]):
            _turn(model.graph, node)


def _of_softmax(value: ir.Value | None) -> bool:
    producer = None if value is None else value.producer()
    made = producer.inputs[0] if producer is not None and is_op(producer, "QLinearSoftmax") else None
    while made is not None and (producer := made.producer()) is not None and is_op(producer, "Table", *VIEWS):
        made = producer.inputs[0]
    return made is not None and producer is not None and is_op(producer, "QLinearMatMul")


def _is_made(value: ir.Value | None) -> bool:
    """Whether it is matrices that a product has just made, perhaps with another shape."""
    dims = None if value is None else shape(value)
    while value is not None and (producer := value.producer()) is not None:
        if is_op(producer, "QLinearMatMul", "QGemm"):
            return dims is not None and len(dims) > 2
        if not is_op(producer, "QLinearAdd", "Table", "Transpose", *VIEWS):
            return False
        fixed = constant(producer.inputs[0]) is not None
        value = producer.inputs[3] if fixed and is_op(producer, "QLinearAdd") else producer.inputs[0]
    return False


def _turn(graph: ir.Graph, node: ir.Node) -> None:
    """Make `node` multiply by (I · Vᵀ)ᵀ, whose bytes are those of V."""
    value = node.inputs[3]
    assert value is not None and value.dtype is not None
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
    graph.insert_before(node, [before, made, after])
    node.replace_input_with(3, after.outputs[0])
