"""Operators that move channels of bytes, written so that layers beside them do the moving, or one layer of its own.

The accelerator holds channels in groups, so it can address whole groups alone. A convolution without groups computes
each output channel alone, so its bytes stay when its weights are ordered. In the order of the passes:

name_shuffles       y = Reshape(Transpose(Reshape(x)))      ->   y = Gather(x, order), where that permutes channels
flatten_in_order    y = MatMul(Flatten(Transpose(x)), w)    ->   y = MatMul(Flatten(x), w[order])
order_channels      z = Gather(Conv(x, w), order)           ->   z = Conv(x, w[order]), also for a Slice, and for a
                    DepthToSpace, which then has mode DCR
gather_channels     Split, Slice of channels that begin within a group, DepthToSpace in mode CRD  ->  Gather of channels
                    y = Concat(a, b) of such parts          ->   y = Gather(Concat(a, b)), for readers other than
                    convolutions. The Concat may then hold padding behind each part.
join_gathers        Gather(Gather(x, a), b)                 ->   Gather(x, a[b])
                    Conv(Gather(x, order)), depthwise       ->   Gather(Conv(x), order), also for tables and poolings
multiply_in_order   Conv(Gather(x, order), w)               ->   Conv(x, w') with w' = w at the positions of `order`

A Gather that is left becomes a product by zeros and ones (select/movement). Where only the host reads the result, as
an output of the model, the host selects the channels.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from celosia.compiler.graph.operands import (
    MODEL_WEIGHTS,
    convolves_bytes,
    joins_parts,
    multiplies_matrices,
    operand,
    operand_groups,
    product_names,
    set_operand,
    spec_of,
)
from celosia.compiler.graph.values import (
    attribute,
    attributes,
    constant,
    derived_name,
    is_op,
    new_constant,
    only_use,
    replace_keeping_name,
    shape,
)
from celosia.compiler.program.host.shape_rules import slice_positions
from celosia.compiler.tensorize import pack
from celosia.hw.spec.config import Config

Order = NDArray[np.int64]
"""Old numbers of the channels, in their new order."""


def _holds_bytes(value: ir.Value | None) -> bool:
    """Return whether `value` is int8 or uint8, and of known shape."""
    return value is not None and value.dtype in (ir.DataType.INT8, ir.DataType.UINT8) and shape(value) is not None


def _insert(node: ir.Node, op: str, inputs: list[ir.Value | None], dims: tuple[int, ...], **attrs: Any) -> ir.Value:
    """Insert before `node` an operator with this result shape, and return its output."""
    graph, first = node.graph, inputs[0]
    assert isinstance(graph, ir.Graph) and first is not None
    name = derived_name(graph, f"{node.name}_{op.lower()}_of_{first.name}")
    result = ir.Value(name=name, shape=ir.Shape(dims), type=first.type)
    new = ir.Node("", op, inputs, attributes(**attrs), outputs=[result], name=name)
    graph.insert_before(node, new)
    return result


def _gather(node: ir.Node, x: ir.Value, order: Order) -> ir.Value:
    """Insert before `node` a Gather of channels of `x`."""
    dims = shape(x)
    assert dims is not None and isinstance(node.graph, ir.Graph)
    index = new_constant(node.graph, f"{node.name}_channels", order)
    return _insert(node, "Gather", [x, index], (dims[0], len(order), *dims[2:]), axis=1)


def order_of(node: ir.Node | None) -> Order | None:
    """Return the channels that a Gather or Slice of bytes takes by constant operands; None for other operators."""
    x = node.inputs[0] if node is not None and is_op(node, "Gather", "Slice") else None
    if node is None or x is None or not _holds_bytes(x):
        return None
    dims = shape(x)
    if dims is None or len(dims) not in (3, 4):
        return None
    return _gathered_channels(node, dims) if is_op(node, "Gather") else _sliced_channels(node, dims)


def _gathered_channels(node: ir.Node, dims: tuple[int, ...]) -> Order | None:
    """Return the channels that a Gather takes; None if it takes along another axis. dims: shape of its operand."""
    index = constant(operand(node, "indices"))
    if index is None or index.ndim != 1 or not index.size or attribute(node, "axis", 0) % len(dims) != 1:
        return None
    return np.where(index < 0, index + dims[1], index).astype(np.int64)


def _sliced_channels(node: ir.Node, dims: tuple[int, ...]) -> Order | None:
    """Return the channels that a Slice takes; None if it cuts other axes. dims: shape of its operand."""
    bounds = [constant(value) for value in node.inputs[1:]]
    if len(bounds) < 3 or any(bound is None or bound.size != 1 for bound in bounds):
        return None
    start, end, axis, *steps = (int(bound.reshape(-1)[0]) for bound in bounds if bound is not None)
    if axis % len(dims) != 1 or 0 in steps:
        return None
    order: Order = np.array(slice_positions(dims[1], start, end, *(steps or [1])), np.int64)
    return order if order.size else None


def _order_for_copies(node: ir.Node) -> Order | None:
    """Return the order of channels with which a DepthToSpace of mode CRD equals mode DCR; None for other operators.

    In CRD the block is the inner axis of channels. In DCR it is the outer, so that each position in the block is one
    copy of channels that lie together.
    """
    dims, block = (
        shape(node.inputs[0]) if node.inputs and node.inputs[0] is not None else None,
        attribute(node, "blocksize", 1),
    )
    if not is_op(node, "DepthToSpace") or dims is None or attribute(node, "mode", "DCR") != "CRD":
        return None
    return np.arange(dims[1]).reshape(-1, block * block).T.reshape(-1)


# Shuffles -------------------------------------------------------------------------------------------------------------


def name_shuffles(model: ir.Model) -> None:
    """Replace Reshape, Transpose, Reshape of bytes that together permute channels by one Gather."""
    for node in list(model.graph):
        transpose = node.inputs[0].producer() if is_op(node, "Reshape") and node.inputs[0] is not None else None
        if transpose is None or not is_op(transpose, "Transpose") or transpose.inputs[0] is None:
            continue
        before = transpose.inputs[0].producer()
        if before is None or not is_op(before, "Reshape") or before.inputs[0] is None:
            continue
        x = before.inputs[0]
        dims, split, result = shape(x), shape(before.outputs[0]), shape(node.outputs[0])
        perm = list(attribute(transpose, "perm", ()))
        if not _holds_bytes(x) or dims is None or split is None or len(dims) not in (3, 4) or result != dims:
            continue
        axes = len(split) - len(dims) + 1  # of `split` that hold channels
        if axes < 2 or split[:1] != dims[:1] or split[1 + axes :] != dims[2:]:
            continue
        if perm[:1] != [0] or perm[1 + axes :] != list(range(1 + axes, len(split))):
            continue
        channels = np.arange(dims[1]).reshape(split[1 : 1 + axes])
        order = channels.transpose([axis - 1 for axis in perm[1 : 1 + axes]]).reshape(-1)
        replace_keeping_name(node, _gather(node, x, order))


# Flattened images -----------------------------------------------------------------------------------------------------


def flatten_in_order(model: ir.Model) -> None:
    """Let products by constant matrices read images as they lie, not transposed before they are flattened."""
    for node in list(model.graph):
        if not multiplies_matrices(node) and not is_op(node, "MatMul", "Gemm"):
            continue
        name_a, name_b, _ = product_names(node.op_type)
        flat_value = operand(node, name_a)
        flatten = flat_value.producer() if flat_value is not None else None
        if flatten is None or not is_op(flatten, "Reshape", "Flatten") or flatten.inputs[0] is None:
            continue
        transpose = flatten.inputs[0].producer()
        if transpose is None or not is_op(transpose, "Transpose") or transpose.inputs[0] is None:
            continue
        x, flat = transpose.inputs[0], shape(flatten.outputs[0])
        dims, perm, matrix = shape(x), list(attribute(transpose, "perm", ())), constant(operand(node, name_b))
        if dims is None or flat is None or matrix is None or matrix.ndim != 2 or perm[:1] != [0] or len(flat) != 2:
            continue
        if flat != (dims[0], prod(dims[1:])) or attribute(node, "transA", 0):
            continue
        rows = 1 if attribute(node, "transB", 0) else 0
        if matrix.shape[rows] != flat[1] or _has_numbers_for_rows(node, rows):
            continue
        old = np.arange(flat[1]).reshape(dims[1:]).transpose([axis - 1 for axis in perm[1:]]).reshape(-1)
        order = np.argsort(old)  # row of the matrix for each element of x, in the order in which it lies
        assert isinstance(node.graph, ir.Graph)
        in_order = np.ascontiguousarray(np.take(matrix, order, axis=rows))
        weights = operand(node, name_b)
        assert weights is not None
        set_operand(node, name_b, new_constant(node.graph, f"{weights.name}_in_order", in_order))
        set_operand(node, name_a, _insert(node, "Flatten", [x], flat, axis=1))


def _has_numbers_for_rows(node: ir.Node, rows: int) -> bool:
    """Return whether scales or zero points of the matrix may differ by row. rows: the axis that the product sums up.

    onnxruntime has one for each column; these are the other axis of a matrix.
    """
    for name in ("b_scale", "b_zero_point"):
        value = operand(node, name) if not is_op(node, "MatMul", "Gemm") else None
        array = constant(value)
        if value is not None and (array is None or (array.ndim > 1 and array.shape[rows] > 1)):
            return True
    return False


# Order in the weights of the convolution before -----------------------------------------------------------------------


BY_CHANNEL = ("w", "w_scale", "w_zero_point", "b")
"""Operands of QLinearConv that may hold a part for each output channel."""


def order_channels(model: ir.Model) -> None:
    """Select and order channels in the weights of the convolutions before DepthToSpace, Gather and Slice."""
    for node in list(model.graph):
        order = order_of(node) if is_op(node, "Gather", "Slice") else _order_for_copies(node)
        value = node.inputs[0] if node.inputs else None
        if order is None or value is None or not (chain := list(_tables_and_convolution(value, model.graph))):
            continue
        conv = chain[-1]
        for name in BY_CHANNEL:
            _reorder(model.graph, conv, name, order)
        for chain_node in chain:
            dims = shape(chain_node.outputs[0])
            assert dims is not None
            chain_node.outputs[0].shape = ir.Shape((dims[0], len(order), *dims[2:]))
            chain_node.outputs[0].name = None  # it is not the model's tensor any more
        if is_op(node, "DepthToSpace"):
            node.attributes["mode"] = ir.AttrString("mode", "DCR")
        else:
            replace_keeping_name(node, value)


def _tables_and_convolution(value: ir.Value, graph: ir.Graph) -> Iterator[ir.Node]:
    """Yield the tables before `value`, and the convolution before these, last first; nothing where there is none.

    Each must have one reader only, and the convolution constant parameters and no groups.
    """
    nodes: list[ir.Node] = []
    while True:
        node = value.producer()
        if node is None or node.graph is not graph or value.is_graph_output() or shape(value) is None:
            return
        if len(list(value.uses())) != 1:
            return
        nodes.append(node)
        if is_op(node, "Table") and node.inputs[0] is not None:
            value = node.inputs[0]
        elif convolves_bytes(node) and attribute(node, "group", 1) == 1 and not attribute(node, "channels_last", 0):
            others = [operand(node, name) for name in (*BY_CHANNEL, "y_scale", "y_zero_point")]
            if all(value is None or constant(value) is not None for value in others):
                yield from nodes
            return
        else:
            return


def _reorder(graph: ir.Graph, conv: ir.Node, name: str, order: Order) -> None:
    """Select the operand `name` of a convolution by output channel, if it is an array with one part for each."""
    value = operand(conv, name)
    array = constant(value)
    if value is not None and array is not None and (array.size > 1 or name == "w"):
        set_operand(conv, name, new_constant(graph, f"{value.name}_ordered", array[order]))


# Gathers for what groups cannot express -------------------------------------------------------------------------------


def gather_channels(model: ir.Model, cfg: Config) -> None:
    """Write selections of channels that are not whole groups as Gathers, and put one behind such a concatenation."""
    for node in list(model.graph):
        x = node.inputs[0] if node.inputs else None
        dims = shape(node.outputs[0])
        if not _holds_bytes(node.outputs[0]) or dims is None or len(dims) not in (3, 4):
            continue
        if not any(is_read_as_bytes(y) for y in node.outputs):
            continue
        if is_op(node, "Split") and _holds_bytes(x):
            _gather_parts(node, cfg)
        elif is_op(node, "Slice"):
            order = order_of(node)
            if order is not None and not _are_groups(order, cfg):
                replace_keeping_name(node, _gather(node, x, order))  # type: ignore[arg-type]
        elif (order := _order_for_copies(node)) is not None and _holds_bytes(x) and dims[1] % cfg.group == 0:
            node.replace_input_with(0, _gather(node, x, order))  # type: ignore[arg-type]
            node.attributes["mode"] = ir.AttrString("mode", "DCR")
        elif _joins(node):
            _gather_behind(node, cfg)


def is_read_as_bytes(value: ir.Value) -> bool:
    """Return whether an operator reads the bytes of `value`; outputs and DequantizeLinears are the host's."""
    return any(not is_op(use.node, "DequantizeLinear") for use in value.uses())


def _are_groups(order: Order, cfg: Config) -> bool:
    """Return whether the channels are neighbours that begin on a group."""
    return order[0] % cfg.group == 0 and bool(np.all(np.diff(order) == 1))


def _gather_parts(node: ir.Node, cfg: Config) -> None:
    """Replace a Split of channels, if a part begins within a group, by a Slice or Gather for each part."""
    x, rank = node.inputs[0], len(shape(node.outputs[0]) or ())
    assert x is not None and isinstance(node.graph, ir.Graph)
    sizes = [dims[1] for y in node.outputs if (dims := shape(y)) is not None and len(dims) == rank]
    if attribute(node, "axis", 0) % rank != 1 or len(sizes) != len(node.outputs) or 0 in sizes:
        return
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    if not any(start % cfg.group for start in starts) or any(y.is_graph_output() for y in node.outputs):
        return
    for number, (y, start, size) in enumerate(zip(node.outputs, starts, sizes, strict=True)):
        if start % cfg.group:
            part = _gather(node, x, np.arange(start, start + size))
        else:
            bounds = [
                new_constant(node.graph, f"{node.name}_bound", np.array([number], np.int64))
                for number in (start, start + size, 1)
            ]
            part = _insert(node, "Slice", [x, *bounds], shape(y) or ())
        part.producer().name = f"{node.name}.{number}"  # type: ignore[union-attr]
        ir.convenience.replace_all_uses_with(y, part)
        name, y.name = y.name, None
        part.name = name
    node.graph.remove(node, safe=True)


def _gather_behind(node: ir.Node, cfg: Config) -> None:
    """Put a Gather of all channels behind a concatenation of parts that are not whole groups.

    Convolutions read it directly where multiplying the padding by zeros costs no more.
    """
    y = node.outputs[0]
    dims = shape(y)
    if dims is None or attribute(node, "axis", 1) % len(dims) != 1:
        return
    parts = list(node.inputs) if joins_parts(node) else [group[0] for group in operand_groups(node)]
    sizes = _sizes_of_parts(node)
    if not any(size % cfg.group for size in sizes[:-1]) or any(constant(part) is not None for part in parts):
        return
    padded = sum(pack.blocks(size, cfg.group) * cfg.group for size in sizes)
    readers = [use for use in y.uses() if not _reads_padding(use.node, y, padded, dims[1], cfg)]
    if not readers and not y.is_graph_output():
        return
    _put_behind(node, y, np.arange(dims[1]), readers)


def _joins(node: ir.Node) -> bool:
    """Return whether `node` is a concatenation, with or without scales of its own."""
    return joins_parts(node) or spec_of(node).variant_of == "Concat"


def _has_padding(value: ir.Value, cfg: Config) -> bool:
    """Return whether `value` is a concatenation with padding behind its parts: only few operators can read it."""
    node, rank = value.producer(), len(value.shape or ())
    if node is None or not _joins(node):
        return False
    return attribute(node, "axis", 1) % rank == 1 and any(size % cfg.group for size in _sizes_of_parts(node)[:-1])


def _sizes_of_parts(node: ir.Node) -> list[int]:
    """Return the number of channels of each part of a concatenation; [] where one is not known."""
    parts = list(node.inputs) if joins_parts(node) else [group[0] for group in operand_groups(node)]
    shapes = [shape(part) if part is not None else None for part in parts]
    return [dims[1] for dims in shapes if dims is not None] if None not in shapes else []


def _reads_padding(reader: ir.Node, y: ir.Value, padded: int, channels: int, cfg: Config) -> bool:
    """Return whether `reader` is a convolution that multiplies the padding in `y` by zeros in no more cycles than a
    product that takes it out. padded, channels: number of channels with and without padding.
    """
    if not convolves_bytes(reader) or operand(reader, "x") is not y or attribute(reader, "group", 1) != 1:
        return False
    weights = constant(operand(reader, "w"))
    return weights is not None and _zeros_pay(weights, 1, padded, channels, cfg)


def _zeros_pay(weights: NDArray[Any], groups: int, stored: int, read: int, cfg: Config) -> bool:
    """Return whether a convolution of all `stored` channels, with zeros for those that it does not need, costs no more
    cycles a pixel than a product that selects the `read` ones, and the convolution of these in `groups`.
    """
    outputs, taps = len(weights), prod(weights.shape[2:])

    def cost(inputs: int, outputs: int) -> int:
        return pack.blocks(inputs, cfg.block_in) * pack.blocks(outputs, cfg.block_out)

    separate = cost(stored, read) + groups * cost(read // groups, outputs // groups) * taps
    return cost(stored, outputs) * taps <= separate


# Gathers one after the other ------------------------------------------------------------------------------------------


def join_gathers(model: ir.Model, cfg: Config) -> None:
    """Make one Gather of several, and move permutations of channels behind operators that treat channels alike."""
    for node in list(model.graph):  # in the order of the graph, so that a Gather moves on and on
        x = node.inputs[0] if node.inputs else None
        order = order_of(x.producer()) if x is not None and is_op(x.producer(), "Gather") else None
        if x is None or order is None or node.graph is not model.graph:
            continue
        source = x.producer().inputs[0]  # type: ignore[union-attr]
        assert source is not None
        selected = order_of(node)
        if selected is not None:
            replace_keeping_name(node, _gather(node, source, order[selected]))
        elif (
            only_use(x) is node
            and not _has_padding(source, cfg)
            and sorted(order.tolist()) == list(range((shape(source) or (0, 0))[1]))
        ):
            _move_behind(node, source, order)


def _move_behind(node: ir.Node, source: ir.Value, order: Order) -> None:
    """Let `node` read `source`, and put the permutation of its channels behind it, if it treats all channels alike."""
    depthwise = convolves_bytes(node) and attribute(node, "group", 1) == len(order)
    y, *others = node.outputs
    dims = shape(y)
    if any(list(other.uses()) or other.is_graph_output() for other in others) or attribute(node, "channels_last", 0):
        return  # indices of a MaxPool count channels, too
    if dims is None or len(dims) < 3 or dims[1] != len(order) or not (depthwise or _treats_channels_alike(node)):
        return
    assert isinstance(node.graph, ir.Graph)
    if depthwise:
        arrays = {name: constant(value) for name in BY_CHANNEL if (value := operand(node, name)) is not None}
        if any(array is None for array in arrays.values()):
            return
        for name, array in arrays.items():
            if array is not None and (array.size > 1 or name == "w"):
                in_order = np.empty_like(array)
                in_order[order] = array
                old = operand(node, name)
                assert old is not None
                set_operand(node, name, new_constant(node.graph, f"{old.name}_in_order", in_order))
    node.replace_input_with(0, source)
    _put_behind(node, y, order, list(y.uses()))


CHANNEL_BY_CHANNEL = ("Table", "Clip", "MaxPool")
"""Operators that compute each channel of the result from that channel of the operand, and all in the same way; poolings
of averages do so, too."""


def _treats_channels_alike(node: ir.Node) -> bool:
    """Return whether `node` computes each channel from that channel of its operand, and all in the same way."""
    return is_op(node, *CHANNEL_BY_CHANNEL) or spec_of(node).variant_of in ("AveragePool", "GlobalAveragePool")


def _put_behind(node: ir.Node, y: ir.Value, order: Order, readers: list[Any]) -> None:
    """Put a Gather of channels behind `node`, for these readers of `y` and the graph's outputs; it takes the name."""
    assert isinstance(node.graph, ir.Graph)
    index = new_constant(node.graph, f"{node.name}_channels", order)
    result = ir.Value(name=y.name, shape=y.shape, type=y.type)
    gather = ir.Node("", "Gather", [y, index], attributes(axis=1), outputs=[result], name=f"{node.name}_gathered")
    node.graph.insert_after(node, gather)
    for use in readers:
        use.node.replace_input_with(use.idx, result)
    if y.is_graph_output():
        node.graph.outputs[list(node.graph.outputs).index(y)] = result
    y.name = derived_name(node.graph, f"{result.name}_unordered")


# Gathers in weights ---------------------------------------------------------------------------------------------------


def multiply_in_order(model: ir.Model, cfg: Config) -> None:
    """Let convolutions read what a Gather of channels reads: weights in that order, and zeros for other channels."""
    for node in list(model.graph):
        if not convolves_bytes(node) or attribute(node, "channels_last", 0):
            continue
        weights = constant(operand(node, "w"))
        x = operand(node, "x")
        gather = x.producer() if x is not None else None
        order, groups = order_of(gather) if is_op(gather, "Gather") else None, attribute(node, "group", 1)
        if gather is None or order is None or weights is None or weights.dtype != np.int8:
            continue
        if len(set(order.tolist())) != len(order):  # a channel twice needs two columns of weights
            continue
        source, zero = gather.inputs[0], constant(operand(node, "w_zero_point"))
        stored = (shape(source) or (0, 0))[1]  # type: ignore[arg-type]
        depthwise = groups == len(order) == len(weights)
        if depthwise or not stored or (zero is not None and zero.any()):
            continue
        if not _zeros_pay(weights, groups, stored, len(order), cfg):
            continue
        wide = np.zeros((len(weights), stored, *weights.shape[2:]), np.int8)
        of_group, of_part = len(weights) // groups, len(order) // groups
        for group in range(groups):
            rows = slice(group * of_group, (group + 1) * of_group)
            wide[rows, order[group * of_part : (group + 1) * of_part]] = weights[rows]
        assert isinstance(node.graph, ir.Graph)
        node.meta[MODEL_WEIGHTS] = node.meta.get(MODEL_WEIGHTS, weights.size)
        set_operand(node, "w", new_constant(node.graph, f"{operand(node, 'w').name}_wide", wide))  # type: ignore[union-attr]
        set_operand(node, "x", source)  # type: ignore[arg-type]
        node.attributes["group"] = ir.AttrInt64("group", 1)
    for node in reversed(list(model.graph)):
        if (
            is_op(node, "Gather")
            and order_of(node) is not None
            and not list(node.outputs[0].uses())
            and not node.outputs[0].is_graph_output()
        ):
            model.graph.remove(node, safe=True)
