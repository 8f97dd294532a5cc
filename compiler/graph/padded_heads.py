"""Heads of attention that are no whole channel groups, padded to such by the projections before and after them.

Queries and keys whose groups fill no blocks of block_in are padded to such blocks if keys have a zero point
(`select.matrices.columns_multiple`).

    q = Reshape(QGemm(x, w))    [B, T, heads, 21]     ->    q = Reshape(QGemm(x, w'))    [B, T, heads, 32]

The accelerator addresses whole groups of channels, so heads of 21 columns would go through the host. Weights and biases
of the added columns are zero, so these columns hold the zero point, and add nothing to products of queries and keys.
Added columns of values reach the projection behind attention, which multiplies them by zeros. All bytes that the model
has stay the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from celosia.compiler.graph.operands import (
    MODEL_COLUMNS,
    MODEL_WEIGHTS,
    multiplies_matrices,
    operand,
    product_names,
    set_operand,
)
from celosia.compiler.graph.packed_projections import COLUMNWISE, Projection, project, projection_of
from celosia.compiler.graph.select.matrices import columns_multiple
from celosia.compiler.graph.select.parameters import stored_zero
from celosia.compiler.graph.simplify.redundant import drop_unused
from celosia.compiler.graph.values import attribute, constant, derived_name, is_op, new_constant, only_use, shape
from celosia.compiler.ops import VIEWS
from celosia.compiler.tensorize import pack
from celosia.hw.spec.config import Config


@dataclass(frozen=True)
class _Heads:
    """A tensor whose axis of `size` columns comes from the columns of a projection.

    chain: the operators between the two, last first; the last of them splits the columns into heads. code: the byte
    that added columns hold in the tensor, as its type has it.
    """

    projection: Projection
    chain: tuple[ir.Node, ...]
    size: int
    code: int


def pad_heads(model: ir.Model, cfg: Config) -> None:
    """Pad the heads of products of two activations to whole channel groups of `cfg`, where projections can do that."""
    projections = {p.value: p for node in model.graph if (p := projection_of(node)) is not None}
    for node in list(model.graph):
        if not multiplies_matrices(node) or constant(operand(node, "b")) is not None:
            continue
        a, b = operand(node, "a"), operand(node, "b")
        if a is None or b is None or shape(a) is None or shape(b) is None:
            continue
        queries, keys = (
            _heads_before(a, len(shape(a) or ()) - 1, projections),
            _heads_before(b, len(shape(b) or ()) - 2, projections),
        )
        zeros = [_number(operand(node, f"{name}_zero_point")) for name in "ab"]
        if queries is not None and keys is not None and None not in zeros:
            multiple = columns_multiple(cfg, queries.size, stored_zero(operand(node, "b_zero_point")))
            multiple = max(multiple, cfg.group)
            if queries.size % multiple and (queries.code == zeros[0] or keys.code == zeros[1]):
                node.meta[MODEL_COLUMNS] = queries.size, (shape(node.outputs[0]) or ())[-1]
                for heads in (queries, keys):
                    projections = _pad(heads, multiple, projections)
        values = _heads_before(b, len(shape(b) or ()) - 1, projections)
        if values is not None and values.size % cfg.group and (after := _product_behind(node.outputs[0], values.size)):
            projections = _pad(values, cfg.group, projections)
            node.meta[MODEL_COLUMNS] = (shape(a) or ())[-1], values.size
            _skip_padding(node, after, values.size, cfg.group)
    drop_unused(model.graph)


def _heads_before(value: ir.Value, axis: int, projections: dict[ir.Value, Projection]) -> _Heads | None:
    """Return where the columns of `value` along `axis` come from; None if not from a projection, or if others read the
    tensors on the way."""
    dims, chain = shape(value) or (), list[ir.Node]()
    size = dims[axis]
    while True:
        node = value.producer()
        if node is None or only_use(value) is None or shape(value) is None:
            return None
        chain.append(node)
        x = node.inputs[0]
        if is_op(node, "Transpose"):
            axis = attribute(node, "perm")[axis]
        elif is_op(node, *COLUMNWISE):
            x = _scaled_operand(node)
        elif is_op(node, *VIEWS, "Expand"):
            before, after = (shape(v) if v is not None else None for v in (x, value))
            if before is None or after is None or axis != len(after) - 1:
                return None
            axis = len(before) - 1
            if before[-1] != size:
                break
        else:
            return None
        if x is None:
            return None
        value = x
    projection = projections.get(node.inputs[0]) if node.inputs[0] is not None else None
    if projection is None or only_use(projection.value) is not node or projection.columns % size:
        return None
    if projection.axis != len(projection.dims) - 1 or (shape(node.outputs[0]) or ())[-2:] != (
        projection.columns // size,
        size,
    ):
        return None
    code = _padded_code([*projection.nodes, *reversed(chain)])
    return None if code is None else _Heads(projection, tuple(chain), size, code)


def _scaled_operand(node: ir.Node) -> ir.Value | None:
    """Return the operand of a Table, or of an addition or product with a single number; None for other operators."""
    varying = [value for value in node.inputs if value is not None and constant(value) is None]
    others = [constant(value) for value in node.inputs if value is not None and constant(value) is not None]
    is_scaled = len(varying) == 1 and (
        is_op(node, "Table") or all(array is not None and array.size == 1 for array in others)
    )
    return varying[0] if is_scaled else None


def _padded_code(nodes: Sequence[ir.Node]) -> int | None:
    """Return the byte in added columns behind `nodes`, a projection and what follows; None if it is not known."""
    code = _number(operand(nodes[0], "y_zero_point"))
    for node in nodes[1:]:
        if is_op(node, "Table"):
            table, kind = constant(operand(node, "table")), node.outputs[0].dtype
            x = node.inputs[0]
            if table is None or kind is None or code is None or x is None or x.dtype is None:
                return None
            stored = code - (128 if x.dtype == ir.DataType.UINT8 else 0)
            code = int(table.astype(np.int8)[stored + 128]) + (128 if kind == ir.DataType.UINT8 else 0)
        elif is_op(node, *COLUMNWISE):
            x_name = "a" if constant(operand(node, "b")) is not None else "b"
            if code is None or code != _number(operand(node, f"{x_name}_zero_point")):
                return None
            other = constant(operand(node, "b" if x_name == "a" else "a"))
            adds = node.op_type.endswith("Add") and other is not None and other.size == 1
            code = None if adds else _number(operand(node, "c_zero_point"))
    return code


def _number(value: ir.Value | None) -> int | None:
    """Return a constant of one element; None for others."""
    array = constant(value)
    return int(array.item()) if array is not None and array.size == 1 else None


def _pad(heads: _Heads, group: int, projections: dict[ir.Value, Projection]) -> dict[ir.Value, Projection]:
    """Let the projection compute the added columns, and give the tensors behind it their sizes."""
    projection, width = heads.projection, pack.blocks(heads.size, group) * group
    columns = np.full((projection.columns // heads.size, width), -1)
    columns[:, : heads.size] = np.arange(projection.columns).reshape(-1, heads.size)
    padded = project(projection, columns.reshape(-1), "padded")
    for node in (nodes := _producers(padded, len(projection.nodes))):
        weights = operand(node, product_names(node.op_type)[1]) if node is nodes[0] else None
        if weights is not None:
            old = constant(operand(projection.nodes[0], product_names(node.op_type)[1]))
            assert old is not None
            node.meta[MODEL_WEIGHTS] = old.size
    split = heads.chain[-1]
    split.replace_input_with(0, padded)
    for node in reversed(heads.chain):
        _resize(node, heads.size, width)
    known = {value: p for value, p in projections.items() if value is not projection.value}
    return known | {padded: Projection(tuple(nodes), projection.axis)}


def _producers(value: ir.Value, count: int) -> list[ir.Node]:
    """Return the last `count` operators of the chain that computes `value`, in order."""
    nodes: list[ir.Node] = []
    while len(nodes) < count:
        node = value.producer()
        assert node is not None
        nodes.insert(0, node)
        varying = [operand for operand in node.inputs if operand is not None and constant(operand) is None]
        value = varying[0]
    return nodes


def _resize(node: ir.Node, size: int, width: int) -> None:
    """Give the result of a node `width` columns in place of `size`, along the axis that its operand has changed."""
    y = node.outputs[0]
    dims = list(shape(y) or ())
    x = next(value for value in node.inputs if value is not None and constant(value) is None)
    before = shape(x) or ()
    if is_op(node, "Transpose"):
        dims = [before[axis] for axis in attribute(node, "perm")]
    elif is_op(node, *VIEWS, "Expand"):
        dims[-1] = width if dims[-1] == size else dims[-1] // size * width
        if is_op(node, "Reshape", "Expand"):
            assert isinstance(node.graph, ir.Graph)
            node.replace_input_with(1, new_constant(node.graph, f"{node.name}_padded", np.array(dims, np.int64)))
    else:
        dims = list(before)
    y.shape = ir.Shape(dims)
    assert isinstance(node.graph, ir.Graph)
    y.name = derived_name(node.graph, f"{y.name}_padded")


def _product_behind(value: ir.Value, size: int) -> list[ir.Node] | None:
    """Return the operators from `value`, whose last axis has `size` columns, up to the product by a constant matrix
    that reads its heads side by side; None if there is none, or if others read the tensors on the way."""
    nodes, axis, merged = list[ir.Node](), len(shape(value) or ()) - 1, False
    while (node := only_use(value)) is not None:
        nodes.append(node)
        y = node.outputs[0]
        before, after = shape(value), shape(y)
        if before is None or after is None:
            return None
        if merged and multiplies_matrices(node):
            matrix = constant(operand(node, product_names(node.op_type)[1]))
            first = operand(node, product_names(node.op_type)[0])
            return nodes if first is value and matrix is not None and matrix.ndim == 2 else None
        if is_op(node, "Transpose") and not merged:
            axis = attribute(node, "perm").index(axis)
        elif is_op(node, *VIEWS):
            if axis != len(before) - 1 or after[-1] % size or (merged and after[-1] != before[-1]):
                return None
            if after[-1] != before[-1] and (len(before) < 2 or after[-1] != before[-2] * size):
                return None
            merged, axis = merged or after[-1] != before[-1], len(after) - 1
        elif _scaled_operand(node) is not value or axis != len(before) - 1:
            return None
        value = y
    return None


def _skip_padding(product: ir.Node, nodes: list[ir.Node], size: int, group: int) -> None:
    """Give the result of `product`, and the tensors up to the last of `nodes`, padding, which that one multiplies by
    zeros."""
    width, y = pack.blocks(size, group) * group, product.outputs[0]
    assert isinstance(product.graph, ir.Graph)
    y.shape = ir.Shape([*(shape(y) or ())[:-1], width])
    y.name = derived_name(product.graph, f"{y.name}_padded")
    for node in nodes[:-1]:
        _resize(node, size, width)
    last = nodes[-1]
    name, transposed = product_names(last.op_type)[1], bool(attribute(last, "transB", 0))
    weights = operand(last, name)
    matrix = constant(weights)
    assert matrix is not None and weights is not None
    rows: NDArray[np.generic] = matrix.T if transposed else matrix
    zero = constant(operand(last, f"{name}_zero_point"))
    filling = np.broadcast_to(0 if zero is None else zero.reshape(-1), (len(rows) // size, width - size, rows.shape[1]))
    heads = rows.reshape(-1, size, rows.shape[1])
    padded = np.concatenate((heads, filling.astype(rows.dtype)), axis=1).reshape(-1, rows.shape[1])
    last.meta[MODEL_WEIGHTS] = last.meta.get(MODEL_WEIGHTS, matrix.size)
    set_operand(last, name, new_constant(product.graph, f"{weights.name}_padded", padded.T if transposed else padded))
