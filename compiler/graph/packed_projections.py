"""Projections of which several readers take some columns each, such as queries, keys and values of attention.

    p = QGemm(x, w)    [B, T, 3 * heads * d]                q = Transpose(Reshape(QGemm(x, w[:, columns of q])))
    t = Transpose(Reshape(p))    [3, B, heads, T, d]   ->   k = ...
    q, k, v = Split(t)                                      v = ...

Exporters write this in many ways: Split, Slice or Gather before or after Reshape and Transpose, heads inside or outside
of q, k and v. All are operators that move elements, so each tensor that another operator reads is an array of elements
of p. The pass computes these arrays from the operators themselves. A tensor that has all rows of p and some columns,
on axes of their own, becomes a projection by these columns, one Reshape and one Transpose. Each output column is
computed alone, so the bytes stay.

Between the product and the movements may be operators that treat each column alone: a bias row, a table, a scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from celosia.compiler import numerics
from celosia.compiler.cpu.parse import parse
from celosia.compiler.graph.operands import (
    MODEL_WEIGHTS,
    convolves_bytes,
    multiplies_matrices,
    operand,
    product_names,
    spec_of,
)
from celosia.compiler.graph.simplify.redundant import drop_unused
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
from celosia.compiler.ops import VIEWS, op_spec
from celosia.compiler.program.host.execute import execute
from celosia.compiler.program.host.op import HostError
from celosia.compiler.program.op_spec import Moves, quantised_form

MAX_ELEMENTS = 1 << 22
"""Elements of the largest projection whose movements are followed."""
COLUMNWISE = ("Table", *(quantised_form(name) for name in numerics.BINARY))
"""Operators that treat each column alone, if their other operands are constant rows or single numbers."""
Index = NDArray[np.int64]
"""For each element of a tensor, its position in the flattened projection."""


@dataclass(frozen=True)
class Projection:
    """A product by a constant matrix, or a convolution by constant weights, and columnwise operators behind it.

    nodes: in their order. axis: of the result, along which its columns lie.
    """

    nodes: tuple[ir.Node, ...]
    axis: int

    @property
    def value(self) -> ir.Value:
        """The result of the last operator."""
        return self.nodes[-1].outputs[0]

    @property
    def dims(self) -> tuple[int, ...]:
        """The shape of the result."""
        return shape(self.value) or ()

    @property
    def columns(self) -> int:
        """The number of columns."""
        return self.dims[self.axis]


@dataclass(frozen=True)
class Part:
    """A tensor that consists of columns of a projection.

    columns: the projection's columns, in the order in which the tensor has them. sizes: the shape to which a projection
    by these columns is reshaped, with axes split so that each axis is rows or columns. perm: of the Transpose after it.
    """

    value: ir.Value
    columns: Index
    sizes: tuple[int, ...]
    perm: tuple[int, ...]


def separate_projections(model: ir.Model) -> None:
    """Replace each projection of which several tensors take columns by one projection for each of them."""
    for node in list(model.graph):
        projection = projection_of(node) if node.graph is model.graph else None
        if projection is None or prod(projection.dims) > MAX_ELEMENTS:
            continue
        moved = dict(_moved_tensors(projection.value))
        if len(moved) < 2 or (convolves_bytes(node) and not _is_reshaped(projection.value)):
            continue  # channels that images are split into are regions
        try:
            indices = _follow(projection.value, moved)
        except HostError:  # an operator whose shapes are known at run time only
            continue
        parts = [_part(projection, value, indices[value]) for value in moved if moved[value]]
        known = [part for part in parts if part is not None]
        distinct = {part.columns.tobytes(): part.columns for part in known}
        if len(known) < len(parts) or sum(map(len, distinct.values())) > projection.columns or not known:
            continue
        if len(known) == 1 and len(known[0].columns) == projection.columns:
            continue  # one reader of all columns
        projections = {key: project(projection, columns, f"{n}") for n, (key, columns) in enumerate(distinct.items())}
        for part in known:
            _replace(part, projections[part.columns.tobytes()])
    drop_unused(model.graph)


def _is_reshaped(value: ir.Value) -> bool:
    """Return whether an operator reshapes or transposes `value`."""
    return any(is_op(use.node, "Transpose", *VIEWS) for use in value.uses())


def projection_of(node: ir.Node) -> Projection | None:
    """Return the projection that begins with `node`; None if there is none. It ends before the first other operator."""
    if not _multiplies_columns(node):
        return None
    axis = 1 if convolves_bytes(node) else len(shape(node.outputs[0]) or ()) - 1
    nodes, dims = [node], shape(node.outputs[0])
    if dims is None or len(dims) < 2:
        return None
    while not nodes[-1].outputs[0].is_graph_output():
        readers = list(nodes[-1].outputs[0].uses())
        if len(readers) != 1 or not _is_columnwise(readers[0].node, nodes[-1].outputs[0], axis):
            break
        nodes.append(readers[0].node)
    return Projection(tuple(nodes), axis)


def _multiplies_columns(node: ir.Node) -> bool:
    """Return whether `node` multiplies by constant weights, each column alone, with constant parameters."""
    if MODEL_WEIGHTS in node.meta:
        return False
    if convolves_bytes(node):
        if attribute(node, "group", 1) != 1 or attribute(node, "channels_last", 0):
            return False
    elif not multiplies_matrices(node) or attribute(node, "transA", 0):
        return False
    x, w, _ = product_names(node.op_type)
    weights = constant(operand(node, w))
    others = [value for value in node.inputs if value is not None and value is not operand(node, x)]
    is_matrix = weights is not None and (convolves_bytes(node) or weights.ndim == 2)
    return is_matrix and all(constant(value) is not None for value in others)


def _is_columnwise(node: ir.Node, x: ir.Value, axis: int) -> bool:
    """Return whether `node` computes each element from that of `x`, with numbers that depend on its column only."""
    dims = shape(x)
    if not is_op(node, *COLUMNWISE) or dims is None or shape(node.outputs[0]) != dims:
        return False
    others = [constant(value) for value in node.inputs if value is not None and value is not x]
    return len(others) == sum(value is not None for value in node.inputs) - 1 and all(
        array is not None and (is_op(node, "Table") or array.size == 1 or _varies_by(array, dims, axis))
        for array in others
    )


def _varies_by(array: NDArray[Any], dims: tuple[int, ...], axis: int) -> bool:
    """Return whether `array`, broadcast to `dims`, varies along `axis` alone."""
    sizes = (1,) * (len(dims) - array.ndim) + array.shape
    return len(sizes) == len(dims) and all(size == 1 for number, size in enumerate(sizes) if number != axis)


# The elements of each tensor ------------------------------------------------------------------------------------------


def is_moving(node: ir.Node) -> bool:
    """Return whether `node` only moves elements of its first operand, to places that do not depend on the run."""
    moves = spec_of(node).moves in (Moves.ALL, Moves.SOME) and not spec_of(node).windows
    return moves and all(value is None or constant(value) is not None for value in node.inputs[1:])


def _moved_tensors(value: ir.Value) -> Iterator[tuple[ir.Value, bool]]:
    """Yield `value` and the tensors that are made of it by moving elements, with whether other operators read them.

    A tensor that another operator reads is not followed.
    """
    readers = [use.node for use in value.uses()]
    is_read = value.is_graph_output() or not all(is_moving(node) for node in readers)
    is_read = is_read or any(value in node.inputs[1:] for node in readers) or value.shape is None
    yield value, is_read
    for node in dict.fromkeys(readers if not is_read else ()):
        for result in node.outputs:
            if list(result.uses()) or result.is_graph_output():
                yield from _moved_tensors(result)


def _follow(source: ir.Value, moved: dict[ir.Value, bool]) -> dict[ir.Value, Index]:
    """Return the index of each of the tensors `moved`, which are in the order of the graph. Raises HostError."""
    dims = shape(source) or ()
    indices: dict[ir.Value, Index] = {source: np.arange(prod(dims)).reshape(dims)}
    for value in moved:
        node = value.producer()
        if value in indices or node is None or node.inputs[0] is None:
            continue
        inputs = {operand.name or "": constant(operand) for operand in node.inputs[1:] if operand is not None}
        assert node.graph is not None
        host_op = parse(ir.serde.serialize_node(node), dict(node.graph.opset_imports))
        results = execute(host_op, {**inputs, node.inputs[0].name or "": indices[node.inputs[0]]}, once=True)
        indices.update(zip(node.outputs, results))
    return indices


def _part(projection: Projection, value: ir.Value, index: Index) -> Part | None:
    """Return `value` as columns of the projection; None unless it has all rows, in their order, of some columns."""
    inner = prod(projection.dims[projection.axis + 1 :])
    columns = index // inner % projection.columns
    rows = index // (inner * projection.columns) * inner + index % inner
    sizes = _separable_sizes(rows, columns)
    if sizes is None:
        return None
    rows, columns = rows.reshape(sizes), columns.reshape(sizes)
    corner = (0,) * len(sizes)
    steps = [
        int(rows[(*corner[:axis], 1, *corner[axis + 1 :])] - rows[corner]) if size > 1 else 0
        for axis, size in enumerate(sizes)
    ]
    is_column = [size > 1 and not step for size, step in zip(sizes, steps)]
    by_row = tuple(0 if column else slice(None) for column in is_column)
    by_column = tuple(slice(None) if column else 0 for column in is_column)
    outer = [axis for axis, step in enumerate(steps) if not is_column[axis] and (step >= inner or sizes[axis] == 1)]
    others = [axis for axis, step in enumerate(steps) if 0 < step < inner]
    order = [sorted(axes, key=lambda axis: -steps[axis]) for axes in (outer, others)]
    row_axes = [*order[0], *order[1]]
    kept = [axis for axis, column in enumerate(is_column) if not column]
    in_order = rows[by_row].transpose([kept.index(axis) for axis in row_axes]).reshape(-1)
    if not np.array_equal(in_order, np.arange(prod(projection.dims) // projection.columns)):
        return None
    axes = [*order[0], *(axis for axis, column in enumerate(is_column) if column), *order[1]]
    perm = tuple(axes.index(axis) for axis in range(len(sizes)))
    return Part(value, columns[by_column].reshape(-1), tuple(sizes[axis] for axis in axes), perm)


def _separable_sizes(rows: Index, columns: Index) -> tuple[int, ...] | None:
    """Return the shape of a tensor with axes that are split until each of them varies rows or columns, but not both.

    None if there is no such shape.
    """
    sizes: list[int] = []
    for axis, size in enumerate(rows.shape):
        line = (0,) * axis + (slice(None),) + (0,) * (rows.ndim - axis - 1)
        along_rows, along_columns = rows[line], columns[line]
        if size == 1 or np.all(along_rows == along_rows[0]) or np.all(along_columns == along_columns[0]):
            sizes.append(size)
            continue
        inner = next((n for n in range(2, size) if size % n == 0 and _is_split(along_rows, along_columns, n)), None)
        if inner is None:
            return None
        sizes += [size // inner, inner]
    rows, columns = rows.reshape(sizes), columns.reshape(sizes)
    for array, other in ((rows, columns), (columns, rows)):
        corner = (0,) * len(sizes)
        varying = [
            size > 1 and other[(*corner[:axis], 1, *corner[axis + 1 :])] != other[corner]
            for axis, size in enumerate(sizes)
        ]  # axes of the other array, along which this one must not change
        fixed = array[tuple(slice(0, 1) if varies else slice(None) for varies in varying)]
        if not np.array_equal(np.broadcast_to(fixed, array.shape), array):
            return None
    return tuple(sizes)


def _is_split(rows: Index, columns: Index, inner: int) -> bool:
    """Return whether an axis is one of rows inside one of columns, or the reverse, the inner one of size `inner`."""
    a, b = (array.reshape(-1, inner) for array in (rows, columns))
    return any(bool(np.all(x == x[:, :1]) and np.all(y == y[:1])) for x, y in ((a, b), (b, a)))


# Heads that share keys and values -------------------------------------------------------------------------------------


def name_repeats(model: ir.Model) -> None:
    """Write each chain of operators that repeats the matrices of a tensor for groups of heads as Unsqueeze, Expand and
    Reshape, which products of two activations skip (select/matrices)."""
    for node in list(model.graph):
        y = node.outputs[0]
        dims = shape(y)
        if not is_moving(node) or dims is None or len(dims) != 4 or prod(dims) > MAX_ELEMENTS:
            continue
        moved, source = [y], y
        while (producer := source.producer()) is not None and is_moving(producer) and producer.inputs[0] is not None:
            before = shape(producer.inputs[0])
            if before is None or len(producer.outputs) > 1 or (source is not y and only_use(source) is None):
                break
            source = producer.inputs[0]
            if len(before) == 4 and prod(before) < prod(dims):
                break
            moved.insert(0, source)
        before = shape(source) or ()
        if len(before) != 4 or before[2:] != dims[2:] or before[0] != dims[0] or not before[1] or dims[1] % before[1]:
            continue
        times = dims[1] // before[1]
        producers = (value.producer() for value in moved if value is not source)
        names = [producer.op_type for producer in producers if producer is not None]
        if times < 2 or names == ["Unsqueeze", "Expand", "Reshape"]:
            continue
        try:
            index = _follow(source, dict.fromkeys([source, *moved], False))[y]
        except HostError:
            continue
        if np.array_equal(index, np.arange(prod(before)).reshape(before).repeat(times, axis=1)):
            _repeat(node, source, times)
    drop_unused(model.graph)


def _repeat(node: ir.Node, source: ir.Value, times: int) -> None:
    """Let the readers of `node` read Reshape(Expand(Unsqueeze(source))), whose matrices are each repeated `times`."""
    graph, old, (samples, groups, *matrix) = node.graph, node.outputs[0], shape(source) or ()
    assert isinstance(graph, ir.Graph)
    value = source
    steps: list[tuple[str, tuple[int, ...], list[int]]] = [
        ("Unsqueeze", (samples, groups, 1, *matrix), [2]),
        ("Expand", (samples, groups, times, *matrix), [samples, groups, times, *matrix]),
        ("Reshape", (samples, groups * times, *matrix), [samples, groups * times, *matrix]),
    ]
    for op, size, argument in steps:
        name = derived_name(graph, f"{old.name}_{op.lower()}")
        out = ir.Value(name=name, shape=ir.Shape(size), type=old.type)
        target = new_constant(graph, f"{name}_argument", np.array(argument, np.int64))
        graph.insert_before(node, ir.Node("", op, [value, target], outputs=[out], name=name))
        value = out
    old_name = old.name
    ir.convenience.replace_all_uses_with(old, value, replace_graph_outputs=True)
    old.name, value.name = None, old_name


# The new projections --------------------------------------------------------------------------------------------------


def project(projection: Projection, columns: Index, suffix: str) -> ir.Value:
    """Insert a copy of the operators of `projection` for these columns, and return its result.

    Columns of number -1 are added: they hold the zero point.
    """
    dims, value = projection.dims, projection.nodes[0].inputs[0]
    if np.array_equal(columns, np.arange(projection.columns)):
        return projection.value
    dims = (*dims[: projection.axis], len(columns), *dims[projection.axis + 1 :])
    for node in projection.nodes:
        value = _copy_columns(node, value, projection, columns, dims, suffix)
    assert value is not None
    return value


def _copy_columns(
    node: ir.Node, x: ir.Value | None, projection: Projection, columns: Index, dims: tuple[int, ...], suffix: str
) -> ir.Value:
    """Insert a copy of `node` that reads `x` and computes these columns. dims: the shape of its result."""
    assert isinstance(node.graph, ir.Graph)
    graph, old = node.graph, node.outputs[0]
    number = projection.nodes.index(node)
    source = operand(node, product_names(node.op_type)[0]) if not number else projection.nodes[number - 1].outputs[0]
    inputs: list[ir.Value | None] = []
    for value in node.inputs:
        array = constant(value)
        if value is source:
            inputs.append(x)
        elif array is None or value is None or is_op(node, "Table"):
            inputs.append(value)
        else:
            axis = _axis_of_columns(node, value, array, projection)
            chosen = array if axis is None else np.ascontiguousarray(np.take(array, np.maximum(columns, 0), axis))
            if axis is not None and np.any(columns < 0):
                _clear(chosen, axis, columns < 0, _zero_of(node, value))
            inputs.append(value if axis is None else new_constant(graph, f"{value.name}_{suffix}", chosen))
    name = derived_name(graph, f"{old.name}_{suffix}")
    out = ir.Value(name=name, shape=ir.Shape(dims), type=old.type)
    copy = ir.Node(
        node.domain, node.op_type, inputs, list(node.attributes.values()), outputs=[out], name=f"{node.name}.{suffix}"
    )
    copy.meta.update(node.meta)
    graph.insert_before(node, copy)
    return out


def _clear(array: NDArray[Any], axis: int, added: NDArray[np.bool_], zero: NDArray[Any] | None) -> None:
    """Write zeros into the added columns of `array`, or the zero point `zero`; None for scales and zero points, which
    stay."""
    if zero is not None:
        np.moveaxis(array, axis, 0)[added] = zero.reshape(-1)[0]


def _zero_of(node: ir.Node, value: ir.Value) -> NDArray[Any] | None:
    """Return the zero point of a constant operand that is weights, a bias or another tensor; None for parameters."""
    for name in ("a", "b", "x", "w", "c"):
        spec = op_spec(node.op_type)
        if any(declared.name == name for declared in spec.operands) and operand(node, name) is value:
            has_zero = any(declared.name == f"{name}_zero_point" for declared in spec.operands)
            zero = constant(operand(node, f"{name}_zero_point")) if has_zero else None
            is_output = name == "c" and "c_scale" in {declared.name for declared in spec.operands}
            return None if is_output else np.zeros(1, np.int64) if zero is None else zero
    return None


def _axis_of_columns(node: ir.Node, value: ir.Value, array: NDArray[Any], projection: Projection) -> int | None:
    """Return the axis of a constant operand along which the columns lie; None if it is the same for all columns."""
    if node is projection.nodes[0]:
        weights = operand(node, product_names(node.op_type)[1])
        if value is weights:
            return 0 if convolves_bytes(node) or attribute(node, "transB", 0) else 1
        return array.ndim - 1 if array.size > 1 else None
    return array.ndim - (len(projection.dims) - projection.axis) if array.size > 1 else None


def _replace(part: Part, value: ir.Value) -> None:
    """Let the readers of a part read `value`, a projection by its columns.

    It is reshaped to `part.sizes`, transposed, and reshaped to the shape of the part.
    """
    old, dims = part.value, shape(part.value) or ()
    graph = value.producer().graph  # type: ignore[union-attr]
    assert isinstance(graph, ir.Graph)
    last = value
    transposed = tuple(part.sizes[axis] for axis in part.perm)
    steps: list[tuple[str, tuple[int, ...]]] = [("Reshape", part.sizes), ("Transpose", transposed), ("Reshape", dims)]
    anchor = value.producer()
    for op, size in steps:
        if shape(last) == size and (op == "Reshape" or part.perm == tuple(range(len(size)))):
            continue
        name = derived_name(graph, f"{old.name}_{op.lower()}_{len(size)}")
        out = ir.Value(name=name, shape=ir.Shape(size), type=old.type)
        if op == "Transpose":
            node = ir.Node("", op, [last], attributes(perm=part.perm), outputs=[out], name=name)
        else:
            target = new_constant(graph, f"{name}_shape", np.array(size, np.int64))
            node = ir.Node("", op, [last, target], outputs=[out], name=name)
        graph.insert_after(anchor, node)  # type: ignore[arg-type]
        last, anchor = out, node
    producer = old.producer()
    assert producer is not None
    if last is old:
        return
    old_name = old.name
    ir.convenience.replace_all_uses_with(old, last, replace_graph_outputs=True)
    old.name, last.name = None, old_name
