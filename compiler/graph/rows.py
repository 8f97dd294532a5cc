"""Operators on rows, such as tokens or pixels with their channels last, and the reshapes and tables around them.

    merge_rows     y = QLinearNorm(x)    [1, H, W, C]    ->    y = Reshape(QLinearNorm(Reshape(x)))    [1, H * W, C]
    hoist_tables   y = Table(Transpose(Reshape(QGemm(x))))    ->    y = Transpose(Reshape(Table(QGemm(x))))

The accelerator holds rows as the pixels of an image and works on all of them at the same time; reshapes are views.
A table is computed together with the product before it, if nothing lies between them.
"""

from __future__ import annotations

from math import prod

import numpy as np
import onnx_ir as ir

from celosia.compiler import numerics
from celosia.compiler.graph.operands import data_operands, multiplies_matrices, operand, product_names, spec_of
from celosia.compiler.graph.quantized.rounded import NORMS
from celosia.compiler.graph.simplify.redundant import drop_unused, simplify
from celosia.compiler.graph.values import constant, derived_name, is_op, new_constant, only_use, shape
from celosia.compiler.ops import VIEWS
from celosia.compiler.program.op_spec import Kind, Moves, quantised_form

BINARY = tuple(quantised_form(name) for name in numerics.BINARY)
"""Operators of two tensors of bytes, element by element."""


def tensors_of_rows(graph: ir.Graph, heads: bool = True) -> set[ir.Value]:
    """Return the tensors that consist of rows. heads: also the rows of several matrices, which products of two
    activations multiply.

    These are inputs and results of normalisations and matrix products, also of normalisations in floats, and tensors
    that are combined with these element by element, or reshaped with their last axis as it is.
    """
    rows, count = set[ir.Value](), -1
    while count != len(rows):
        count = len(rows)
        for node in (*graph, *reversed(graph)):
            tensors = _tensors_with_equal_rows(node)
            is_start = is_op(node, "QLinearNorm", *NORMS) or (
                _works_on_rows(node) if heads else _has_constant_matrix(node)
            )
            if is_start or not tensors.isdisjoint(rows):
                rows |= tensors
    return rows


def _works_on_rows(node: ir.Node) -> bool:
    """Return whether `node` is a normalisation of rows, or multiplies them by a matrix."""
    return is_op(node, "QLinearNorm", *NORMS) or multiplies_matrices(node)


def _tensors_with_equal_rows(node: ir.Node) -> set[ir.Value]:
    """Return the operands and the result of `node` that have the same rows."""
    y, tensors = node.outputs[0], list[ir.Value | None]()
    if _works_on_rows(node):
        tensors = [data_operands(node)[0], y]
    elif is_op(node, "QuantizeLinear", "DequantizeLinear") or is_elementwise(node):
        tensors = [*(value for value in node.inputs if value is not None and shape(value) == shape(y)), y]
    elif is_op(node, *VIEWS) and (x := node.inputs[0]) is not None:
        before, after = shape(x), shape(y)
        tensors = [x, y] if before and after and before[-1] == after[-1] else []
    return {value for value in tensors if value is not None}


def is_elementwise(node: ir.Node) -> bool:
    """Return whether each element of the result is computed from the elements at the same place of the operands."""
    return is_op(node, "Table") or (spec_of(node).kind is Kind.INJECTIVE and spec_of(node).moves is None)


def samples_of_attention(graph: ir.Graph) -> set[int]:
    """Return the first sizes of the products of two activations of four axes in `graph`."""
    products = (node for node in graph if multiplies_matrices(node) and not _has_constant_matrix(node))
    shapes = (shape(node.outputs[0]) for node in products)
    return {dims[0] for dims in shapes if dims is not None and len(dims) == 4}


def merge_rows(model: ir.Model) -> None:
    """Let operators on bytes whose rows have several axes work on matrices, with reshapes around them."""
    graph, changed = model.graph, False
    rows = tensors_of_rows(graph, heads=False)
    for node in list(graph):
        y = node.outputs[0]
        dims = shape(y)
        if y not in rows or dims is None or y.dtype not in (ir.DataType.INT8, ir.DataType.UINT8):
            continue
        if len(dims) < 4 and not (len(dims) == 3 and dims[0] > dims[1] == 1):
            continue
        if (
            is_op(node, "QLinearNorm")
            or _has_constant_matrix(node)
            or (is_elementwise(node) and not is_op(node, "QuantizeLinear"))
        ):
            changed |= _merge_rows_of(graph, node, dims)
    if changed:
        simplify(model)


def _has_constant_matrix(node: ir.Node) -> bool:
    """Return whether `node` multiplies rows by a constant matrix."""
    matrix = constant(operand(node, product_names(node.op_type)[1])) if multiplies_matrices(node) else None
    return matrix is not None and matrix.ndim == 2


def _merge_rows_of(graph: ir.Graph, node: ir.Node, dims: tuple[int, ...]) -> bool:
    """Reshape operands and result of `node`; return False if an operand is broadcast along some of the merged axes."""
    count = 1 if prod(dims[1:-1]) == 1 else dims[0]
    merged = (count, prod(dims[:-1]) // count)
    tensors = [value for value in data_operands(node) if value is not None and value.dtype == node.outputs[0].dtype]
    if is_op(node, "Table", "Clip"):
        tensors = [value for value in node.inputs[:1] if value is not None]
    if multiplies_matrices(node):
        tensors = tensors[:1]
    for value in tensors:
        size = shape(value)
        if multiplies_matrices(node) and size is not None and size[:-1] == dims[:-1]:
            continue
        if size is None or not (size == dims or prod(size) == 1 or (prod(size) == dims[-1] == size[-1])):
            return False
    for value in tensors:
        size = shape(value) or ()
        if size[:-1] == dims[:-1]:
            target: tuple[int, ...] = (*merged, size[-1])
        elif len(size) > len(merged) + 1:  # one row, or one number
            target = size[-1:]
        else:
            continue
        node.replace_input_with(list(node.inputs).index(value), _reshaped(graph, node, value, target, before=True))
    _compute_in_shape(graph, node, (*merged, dims[-1]))
    return True


def _compute_in_shape(graph: ir.Graph, node: ir.Node, dims: tuple[int, ...]) -> None:
    """Let `node` compute its result in the shape `dims`; its readers get a Reshape of that to the shape before."""
    y = node.outputs[0]
    before, name = shape(y), y.name
    assert before is not None
    y.name, y.shape = derived_name(graph, f"{name}_rows"), ir.Shape(dims)
    uses = [(use.node, use.idx) for use in y.uses()]
    result = _reshaped(graph, node, y, before, before=False)
    for user, number in uses:
        user.replace_input_with(number, result)
    if y.is_graph_output():
        graph.outputs[list(graph.outputs).index(y)] = result
    result.name = name


def _reshaped(graph: ir.Graph, node: ir.Node, value: ir.Value, dims: tuple[int, ...], before: bool) -> ir.Value:
    """Insert a Reshape of `value` before or behind `node`, and return its result."""
    array = constant(value)
    if array is not None:
        return new_constant(graph, f"{value.name}_rows", array.reshape(dims))
    name = derived_name(graph, f"{node.name}_{value.name}_{'rows' if before else 'shaped'}")
    target = new_constant(graph, f"{name}_shape", np.array(dims, np.int64))
    out = ir.Value(name=name, shape=ir.Shape(dims), type=value.type)
    reshape = ir.Node("", "Reshape", [value, target], outputs=[out], name=name)
    if before:
        graph.insert_before(node, reshape)
    else:
        graph.insert_after(node, reshape)
    return out


def keep_samples(model: ir.Model) -> None:
    """Let products by constant matrices read the rows of several samples as [samples, rows, columns], where attention
    needs them apart, not joined by a Reshape."""
    graph = model.graph
    samples = samples_of_attention(graph)
    for node in list(graph):
        if is_op(node, *BINARY):
            _expand_constants(graph, node, samples)
        x = data_operands(node)[0] if multiplies_matrices(node) else None
        flatten = x.producer() if x is not None else None
        if x is None or flatten is None or not is_op(flatten, "Reshape") or flatten.inputs[0] is None:
            continue
        before, after, out = shape(flatten.inputs[0]), shape(x), shape(node.outputs[0])
        if before is None or after is None or out is None or len(before) < 3 or len(after) != 2:
            continue
        if before[0] < 2 or before[0] not in samples or constant(operand(node, "b")) is None:
            continue
        if after != (before[0] * before[1], prod(before[2:])):
            continue
        source = flatten.inputs[0]
        if len(before) > 3:
            source = _reshaped(graph, node, source, (*before[:2], after[-1]), before=True)
        before = (*before[:2], after[-1])
        node.replace_input_with(list(node.inputs).index(x), source)
        _compute_in_shape(graph, node, (*before[:-1], out[-1]))
    if samples - {1}:
        simplify(model)


def _expand_constants(graph: ir.Graph, node: ir.Node, samples: set[int]) -> None:
    """Repeat a constant operand of an addition or product, such as a table of positions, for each of the samples."""
    dims = shape(node.outputs[0])
    if dims is None or len(dims) != 3 or dims[0] < 2 or dims[0] not in samples:
        return
    for number, value in enumerate(node.inputs):
        array = constant(value)
        if array is not None and value is not None and value in data_operands(node) and prod(array.shape[:-1]) > 1:
            expanded = np.ascontiguousarray(np.broadcast_to(array, dims))
            node.replace_input_with(number, new_constant(graph, f"{value.name}_of_samples", expanded))


def hoist_tables(model: ir.Model) -> None:
    """Move tables before the operators that move all elements, up to the product that makes these."""
    for node in list(model.graph):
        if not is_op(node, "Table") or node.inputs[0] is None:
            continue
        chain, value = list[ir.Node](), node.inputs[0]
        while (producer := value.producer()) is not None and spec_of(producer).moves is Moves.ALL and only_use(value):
            if any(constant(size) is None for size in producer.inputs[1:]) or producer.inputs[0] is None:
                break
            chain.append(producer)
            value = producer.inputs[0]
        producer = value.producer()
        if not chain or producer is None or only_use(value) is not chain[-1] or not spec_of(producer).multiplies_bytes:
            continue
        if producer.outputs[0] is not value or any(not is_op(mover, *VIEWS, "Transpose") for mover in chain):
            continue
        _exchange(model.graph, node, chain, value)
    drop_unused(model.graph)


def _exchange(graph: ir.Graph, table: ir.Node, chain: list[ir.Node], value: ir.Value) -> None:
    """Put `table` behind `value`, and the operators `chain`, last first, behind the table."""
    old = table.outputs[0]
    out = ir.Value(name=derived_name(graph, f"{old.name}_unmoved"), shape=value.shape, type=old.type)
    inputs = [value, *table.inputs[1:]]
    new = ir.Node(table.domain, "Table", inputs, list(table.attributes.values()), outputs=[out], name=table.name)
    graph.insert_before(chain[-1], new)
    chain[-1].replace_input_with(0, out)
    for mover in chain:
        mover.outputs[0].name = derived_name(graph, f"{mover.outputs[0].name}_{table.name}")
        mover.outputs[0].type = old.type
    last, name = chain[0].outputs[0], old.name
    ir.convenience.replace_all_uses_with(old, last, replace_graph_outputs=True)
    old.name, last.name = None, name
    graph.remove(table, safe=True)
