"""Operators that move elements and compute nothing: Concat, Slice, Transpose, Reshape, Pad, and phases of pixels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from celosia.compiler.graph.operands import named_input
from celosia.compiler.program.op_spec import registering_in
from celosia.compiler.superoptimise.graph import Array, ByteMap, GraphOp, Note, OriginalForm, Quantisation
from celosia.compiler.superoptimise.operators.definition import (
    Attributes,
    BytesOf,
    NotInAlgebra,
    OperandElements,
    OperandShapes,
    QuantisedOperation,
    Shape,
    TermOperator,
    attributes_of,
    node_reader,
    operation_reader,
    pads_of,
    qdq_reader,
)
from celosia.compiler.superoptimise.operators.elements import Element, Index, Ite, all_of, all_within, choose_case
from celosia.compiler.superoptimise.rule import quotient

if TYPE_CHECKING:
    import onnx

    from celosia.compiler.superoptimise.onnx_access import OnnxReader, OnnxWriter


class _Movement(TermOperator):
    """An operator that adds nothing up."""

    def summed_terms(self, shapes: OperandShapes, attributes: Attributes) -> int | None:
        """Return 0."""
        return 0


class Concat(_Movement):
    """concat(...): the operands one behind the other along `axis`. Rules know it with two operands only."""

    onnx = "Concat"

    def shape(self, shapes: OperandShapes, attributes: Attributes) -> Shape:
        """Return the sizes along `axis` added up, all others those of the first operand."""
        axis = attributes["axis"]
        total = shapes[0][axis]
        for shape in shapes[1:]:
            total = total + shape[axis]
        return (*shapes[0][:axis], total, *shapes[0][axis + 1 :])

    def demands(self, shapes: OperandShapes, attributes: Attributes) -> Iterator[Any]:
        """Yield that all operands have equal sizes but for `axis`."""
        for other in shapes[1:]:
            yield len(other) == len(shapes[0])
            yield from (a == b for axis, (a, b) in enumerate(zip(shapes[0], other)) if axis != attributes["axis"])

    def evaluate(self, args: Sequence[Array], attributes: Attributes) -> Array:
        """Concatenate."""
        return np.concatenate(args, attributes["axis"])

    def element(self, args: OperandElements, shapes: OperandShapes, attributes: Attributes, index: Index) -> Element:
        """Return the element of the operand in which the index lies, with a case for each operand."""
        axis, begin = attributes["axis"], 0
        cases = []
        for arg, shape in zip(args, shapes):
            element = arg((*index[:axis], index[axis] - begin, *index[axis + 1 :]))
            begin = begin + shape[axis]
            cases.append((index[axis] < begin, element))
        return choose_case(cases[:-1], cases[-1][1])

    def write(self, writer: OnnxWriter, operation: GraphOp) -> None:
        """Append a Concat with all of its parts, with the changes of scale that it absorbs."""
        scale, names = writer.scale_of_concat(operation), writer.parts_of(operation)
        y, axis = operation.outputs[0], operation["axis"]
        parts: list[tuple[str, Quantisation | None]] = []
        for name in names:
            if name in writer.absorbed:
                maker = writer.graph.makers[name]
                parts.append((maker.inputs[0], maker["f"].operands[0]))
            else:
                parts.append((name, scale))
        has_changes = any(name in writer.absorbed for name in names)
        if scale is None or (not has_changes and not isinstance(operation.note, Quantisation)):
            writer.node(self.onnx, names, [y], axis=axis)
        elif isinstance(operation.note, OriginalForm):
            result = writer.with_scale_and_zero(y, scale)
            operands = [writer.with_scale_and_zero(name, quantisation or scale) for name, quantisation in parts]
            writer.quantised_node(self.onnx, operands, result, axis=axis)
        else:
            inputs = [writer.dequantise(name, quantisation or scale) for name, quantisation in parts]
            writer.float_node(self.onnx, inputs, y, scale, axis=axis)


@operation_reader("Concat")
def _read_quantised_concat(reader: OnnxReader, op: QuantisedOperation) -> None:
    """Read a Concat: a change of scale for each part that needs one, and the bytes joined."""
    y, dtype = op.y, op.y.zero.dtype.name
    if any(reader.dtype_of(part.name) != dtype for part in op.operands):
        raise NotInAlgebra
    names = []
    for number, part in enumerate(op.operands):
        f = ByteMap("Identity", (), (part.quantisation,), y.quantisation, dtype, op.qdq)
        is_same = part.quantisation == y.quantisation
        names.append(part.name if is_same else reader.emit("map", (part.name,), f"{y.name}_part{number}", f=f))
    note = y.quantisation if op.qdq else OriginalForm(op.operator, False, 0, (), 0, False)
    _emit_concats(reader, names, y.name, note, attributes_of(op.node)["axis"] % len(reader.shape(op.operands[0].name)))


@node_reader("Concat")
def _read_concat(reader: OnnxReader, node: onnx.NodeProto) -> None:
    """Read a Concat of bytes without QDQ."""
    if any(reader.dtype_of(name) not in reader.moved_dtypes for name in node.input):
        raise NotInAlgebra
    axis = attributes_of(node)["axis"] % len(reader.shape(node.input[0]))
    _emit_concats(reader, list(node.input), node.output[0], None, axis)


def _emit_concats(reader: OnnxReader, names: list[str], y: str, note: Note, axis: int) -> None:
    """Write a Concat of several parts as nested ones of two, as rules know only these."""
    if len(names) < 2:
        raise NotInAlgebra
    joined = names[0]
    for number, name in enumerate(names[1:], 1):
        output = y if number == len(names) - 1 else f"{y}_upto{number}"
        joined = reader.emit("concat", (joined, name), output, note, axis=axis)


# Operators of one operand --------------------------------------------------------------------------------------------

MovementReader = Callable[["OnnxReader", "onnx.NodeProto", str, list[str], Note], None]
"""Adds the operations for an operator that moves bytes: (reader, node, operand, results, quantisation around it)."""
_MOVEMENT_READERS: dict[str, MovementReader] = {}
"""Readers of operators that move bytes and compute nothing, by ONNX operator."""
_reads_movement = registering_in(_MOVEMENT_READERS)


class Slice(_Movement):
    """slice(x): the positions `start` to `stop` of `axis`."""

    onnx = "Slice"

    def shape(self, shapes: OperandShapes, attributes: Attributes) -> Shape:
        """Return the shape with the size `stop` - `start` along `axis`."""
        axis = attributes["axis"]
        return (*shapes[0][:axis], attributes["stop"] - attributes["start"], *shapes[0][axis + 1 :])

    def demands(self, shapes: OperandShapes, attributes: Attributes) -> Iterator[Any]:
        """Yield that `start` to `stop` is a range of at least one position inside of `axis`."""
        start, stop = attributes["start"], attributes["stop"]
        yield from (start >= 0, start < stop, stop <= shapes[0][attributes["axis"]])

    def evaluate(self, args: Sequence[Array], attributes: Attributes) -> Array:
        """Cut the positions out."""
        axes_before = (slice(None),) * attributes["axis"]
        return np.asarray(args[0][(*axes_before, slice(attributes["start"], attributes["stop"]))])

    def element(self, args: OperandElements, shapes: OperandShapes, attributes: Attributes, index: Index) -> Element:
        """Return the operand's element at the index moved by `start`."""
        axis = attributes["axis"]
        return args[0]((*index[:axis], index[axis] + attributes["start"], *index[axis + 1 :]))

    def write(self, writer: OnnxWriter, operation: GraphOp) -> None:
        """Append a Slice."""
        near, names = operation.outputs[0], ("start", "stop", "axis")
        numbers = [writer.constant(np.array([operation[name]], np.int64), f"{near}_{name}") for name in names]
        writer.node_on_bytes(self.onnx, operation, *numbers)


@_reads_movement("Slice")
def _emit_slice(reader: OnnxReader, node: onnx.NodeProto, x: str, outputs: list[str], note: Note) -> None:
    """Add a Slice along one axis with step 1."""
    names = {name: named_input(node, name) for name in ("starts", "ends", "axes", "steps")}
    attributes = {name: reader.array(value).reshape(-1).tolist() for name, value in names.items() if value}
    starts, ends = attributes.get("starts", ()), attributes.get("ends", ())
    if len(starts) != 1 or len(ends) != 1 or attributes.get("steps", [1]) != [1]:
        raise NotInAlgebra
    axis = attributes.get("axes", [0])[0] % len(reader.shape(x))
    start, stop, _ = slice(starts[0], ends[0]).indices(reader.shape(x)[axis])
    reader.emit("slice", (x,), outputs[0], note, axis=axis, start=start, stop=stop)


@_reads_movement("Split")
def _emit_split(reader: OnnxReader, node: onnx.NodeProto, x: str, outputs: list[str], note: Note) -> None:
    """Add a Slice for each result of a Split."""
    axis, begin = attributes_of(node).get("axis", 0) % len(reader.shape(x)), 0
    for name in outputs:
        stop = begin + reader.shape(name)[axis]
        reader.emit("slice", (x,), name, note, axis=axis, start=begin, stop=stop)
        begin = stop


class Transpose(_Movement):
    """transpose(x): the axes in the order `perm`."""

    onnx = "Transpose"

    def shape(self, shapes: OperandShapes, attributes: Attributes) -> Shape:
        """Return the sizes in the order `perm`."""
        return tuple(shapes[0][axis] for axis in attributes["perm"])

    def demands(self, shapes: OperandShapes, attributes: Attributes) -> Iterator[Any]:
        """Yield that `perm` is a permutation of the axes."""
        yield sorted(attributes["perm"]) == list(range(len(shapes[0])))

    def evaluate(self, args: Sequence[Array], attributes: Attributes) -> Array:
        """Transpose."""
        return args[0].transpose(attributes["perm"])

    def element(self, args: OperandElements, shapes: OperandShapes, attributes: Attributes, index: Index) -> Element:
        """Return the operand's element at the permuted index."""
        perm = attributes["perm"]
        return args[0](tuple(index[perm.index(axis)] for axis in range(len(perm))))

    def write(self, writer: OnnxWriter, operation: GraphOp) -> None:
        """Append a Transpose."""
        writer.node_on_bytes(self.onnx, operation, perm=operation["perm"])


@_reads_movement("Transpose")
def _emit_transpose(reader: OnnxReader, node: onnx.NodeProto, x: str, outputs: list[str], note: Note) -> None:
    """Add a Transpose."""
    rank = len(reader.shape(x))
    reader.emit("transpose", (x,), outputs[0], note, perm=attributes_of(node).get("perm", tuple(reversed(range(rank)))))


class Reshape(_Movement):
    """reshape(x): the same elements in row-major order, in the shape `shape`."""

    onnx = "Reshape"

    def shape(self, shapes: OperandShapes, attributes: Attributes) -> Shape:
        """Return the attribute `shape`."""
        return tuple(attributes["shape"])

    def demands(self, shapes: OperandShapes, attributes: Attributes) -> Iterator[Any]:
        """Yield that both shapes have the same number of elements."""
        yield math.prod(shapes[0]) == math.prod(attributes["shape"])

    def evaluate(self, args: Sequence[Array], attributes: Attributes) -> Array:
        """Reshape."""
        return args[0].reshape(attributes["shape"])

    def element(self, args: OperandElements, shapes: OperandShapes, attributes: Attributes, index: Index) -> Element:
        """Return the element with the same flat index in the operand. Flattening and unflattening an index are
        uninterpreted functions; the proof knows only that they are inverse to each other for one shape.
        """
        return args[0](_unflatten(_flat_index(index, attributes["shape"]), shapes[0]))

    def write(self, writer: OnnxWriter, operation: GraphOp) -> None:
        """Append a Reshape."""
        shape = writer.constant(np.array(operation["shape"], np.int64), f"{operation.outputs[0]}_shape")
        writer.node_on_bytes(self.onnx, operation, shape)


def _flat_index(index: Index, shape: Shape) -> Any:
    """Return the row-major flat index of the element at `index` as an uninterpreted function of the index and the
    shape. An index that `_unflatten` made of a flat index for the same shape gives that flat index back.
    """
    import z3

    sizes = [z3.IntVal(size) if isinstance(size, int) else size for size in shape]
    places = [position for position in index if z3.is_app(position) and position.decl().name().startswith("place")]
    if len(places) == len(index) and places:  # the index may come from _unflatten with the same shape
        first_arguments = places[0].children()
        have_equal_arguments = all(z3.eq(a, b) for place in places for a, b in zip(place.children(), first_arguments))
        in_order = [place.decl().name() for place in places] == [f"place {i}" for i in range(len(index))]
        is_same_shape = len(first_arguments) == len(sizes) + 1 and all(map(z3.eq, first_arguments[1:], sizes))
        if have_equal_arguments and in_order and is_same_shape:
            return first_arguments[0]
    row = z3.Function("row", *[z3.IntSort()] * (2 * len(index) + 1))
    return row(*index, *sizes)


def _unflatten(flat: Any, shape: Shape) -> Index:
    """Return the index with the row-major flat index `flat`, as one uninterpreted function for each axis. A flat index
    that `_flat_index` made of an index for the same shape gives that index back.
    """
    import z3

    sizes = [z3.IntVal(size) if isinstance(size, int) else size for size in shape]
    if flat.decl().name() == "row":  # it comes from _flat_index; its arguments are an index and the sizes of a shape
        rank = len(flat.children()) // 2
        index, flattened_sizes = flat.children()[:rank], flat.children()[rank:]
        if len(flattened_sizes) == len(sizes) and all(map(z3.eq, flattened_sizes, sizes)):
            return tuple(index)
    sorts = [z3.IntSort()] * (len(sizes) + 2)
    return tuple(z3.Function(f"place {i}", *sorts)(flat, *sizes) for i in range(len(sizes)))


@_reads_movement("Reshape", "Flatten", "Squeeze", "Unsqueeze")
def _emit_reshape(reader: OnnxReader, node: onnx.NodeProto, x: str, outputs: list[str], note: Note) -> None:
    """Add a reshape for any operator that changes the shape alone."""
    reader.emit("reshape", (x,), outputs[0], note, shape=reader.shape(node.output[0]))


def _emit_movement(reader: OnnxReader, node: onnx.NodeProto, x: str, outputs: list[str], note: Note) -> None:
    """Add the operations for an operator that moves bytes."""
    if reader.dtype_of(x) not in reader.moved_dtypes:
        raise NotInAlgebra
    _MOVEMENT_READERS[node.op_type](reader, node, x, outputs, note)


@node_reader(*_MOVEMENT_READERS)
def _read_movement(reader: OnnxReader, node: onnx.NodeProto) -> None:
    """Read an operator that moves bytes without QDQ."""
    _emit_movement(reader, node, node.input[0], list(node.output), None)


@qdq_reader(*(name for name in _MOVEMENT_READERS if name != "Split"))
def _read_qdq_movement(reader: OnnxReader, node: onnx.NodeProto, y: BytesOf) -> None:
    """Read an operator that moves bytes with QDQ around it."""
    x = reader.dequantised(node.input[0])
    x.require_equal_quantisation(y)
    if len(node.output) != 1:
        raise NotInAlgebra
    _emit_movement(reader, node, x.name, [y.name], y.quantisation)


# Padding, phases and constants ---------------------------------------------------------------------------------------


class Pad(TermOperator):
    """pad(x, value): x with `value` around it; `pads` lists what is added before each axis, then behind each axis, as
    in ONNX.
    """

    onnx = "Pad"

    def shape(self, shapes: OperandShapes, attributes: Attributes) -> Shape:
        """Return the sizes with both pads."""
        pads, rank = attributes["pads"], len(shapes[0])
        return tuple(pads[i] + size + pads[rank + i] for i, size in enumerate(shapes[0]))

    def demands(self, shapes: OperandShapes, attributes: Attributes) -> Iterator[Any]:
        """Yield that there are two pads for each axis, none of them negative, and a scalar value."""
        yield len(attributes["pads"]) == 2 * len(shapes[0]) and not any(shapes[1:])
        yield from (pad >= 0 for pad in attributes["pads"])

    def evaluate(self, args: Sequence[Array], attributes: Attributes) -> Array:
        """Pad with the value."""
        return pad_array(args[0], attributes["pads"], args[1].item())

    def element(self, args: OperandElements, shapes: OperandShapes, attributes: Attributes, index: Index) -> Element:
        """Return the operand's element, or the padding value where the index lies outside of it."""
        source = tuple(position - before for position, before in zip(index, attributes["pads"]))
        return Ite(all_within(*zip(source, shapes[0])), args[0](source), args[1](()))

    def write(self, writer: OnnxWriter, operation: GraphOp) -> None:
        """Append a Pad."""
        y, (x, value) = operation.outputs[0], operation.inputs
        pads = writer.constant(np.array(operation["pads"], np.int64), f"{y}_pads")
        if isinstance(operation.note, Quantisation):
            writer.float_node(self.onnx, [writer.dequantise(x, operation.note), pads], y, operation.note)
        else:
            writer.node(self.onnx, [x, pads, value], [y])


def pad_array(x: Array, pads: Sequence[int], value: Any) -> Array:
    """Pad an array; pads as in ONNX."""
    return np.pad(x, [(pads[i], pads[x.ndim + i]) for i in range(x.ndim)], constant_values=value)


@qdq_reader("Pad")
def _read_pad(reader: OnnxReader, node: onnx.NodeProto, y: BytesOf) -> None:
    """Read padding with real zeros, whose byte is the zero point."""
    x = reader.dequantised(node.input[0])
    x.require_equal_quantisation(y)
    pads = pads_of(reader, node)
    zero = reader.constant(y.zero.reshape(()), f"{y.name}_zero")
    reader.emit("pad", (x.name, zero), y.name, y.quantisation, pads=pads)


class _PhasesOperator(TermOperator):
    """An operator that turns phases of rows and columns into channels, or back. Runtimes have neither for bytes."""

    def write(self, writer: OnnxWriter, operation: GraphOp) -> None:
        """Append a SpaceToDepth or DepthToSpace on floats."""
        quantisation = operation.note if isinstance(operation.note, Quantisation) else Quantisation(1.0, 0)
        floats = writer.dequantise(operation.inputs[0], quantisation)
        writer.float_node(self.onnx, [floats], operation.outputs[0], quantisation, blocksize=operation["by"])


class Phases(_PhasesOperator):
    """phases(x): bytes, SpaceToDepth; every `by`-th row and column become channels of their own, ordered by row phase,
    column phase, old channel.
    """

    onnx = "SpaceToDepth"

    def shape(self, shapes: OperandShapes, attributes: Attributes) -> Shape:
        """Return `by` * `by` times the channels, a `by`-th of the rows and of the columns."""
        (n, c, h, w), by = shapes[0], attributes["by"]
        return n, c * (by * by), quotient(h, by), quotient(w, by)

    def demands(self, shapes: OperandShapes, attributes: Attributes) -> Iterator[Any]:
        """Yield that rows and columns are multiples of `by`."""
        yield len(shapes[0]) == 4
        yield from (shapes[0][axis] % attributes["by"] == 0 for axis in (2, 3))

    def evaluate(self, args: Sequence[Array], attributes: Attributes) -> Array:
        """Take the phases apart."""
        by = attributes["by"]
        n, c, h, w = args[0].shape
        phases = args[0].reshape(n, c, h // by, by, w // by, by).transpose(0, 3, 5, 1, 2, 4)
        return phases.reshape(n, -1, h // by, w // by)

    def element(self, args: OperandElements, shapes: OperandShapes, attributes: Attributes, index: Index) -> Element:
        """Return an element of the operand, with a case for each phase of rows and columns."""
        by, channels = attributes["by"], shapes[0][1]
        n, channel, row, column = index
        phases = [
            args[0]((n, channel - number * channels, row * by + number // by, column * by + number % by))
            for number in range(by * by)
        ]
        cases = [(channel < (number + 1) * channels, phase) for number, phase in enumerate(phases[:-1])]
        return choose_case(cases, phases[-1])


class Interleave(_PhasesOperator):
    """interleave(x): bytes, DepthToSpace in ONNX's mode DCR, the inverse of phases."""

    onnx = "DepthToSpace"

    def shape(self, shapes: OperandShapes, attributes: Attributes) -> Shape:
        """Return `by` times the rows and the columns."""
        (n, c, h, w), by = shapes[0], attributes["by"]
        return n, quotient(c, by * by), h * by, w * by

    def demands(self, shapes: OperandShapes, attributes: Attributes) -> Iterator[Any]:
        """Yield that channels are a multiple of `by` * `by`."""
        yield len(shapes[0]) == 4
        yield shapes[0][1] % (attributes["by"] * attributes["by"]) == 0

    def evaluate(self, args: Sequence[Array], attributes: Attributes) -> Array:
        """Put the phases together."""
        by = attributes["by"]
        n, _, h, w = args[0].shape
        return args[0].reshape(n, by, by, -1, h, w).transpose(0, 3, 4, 1, 5, 2).reshape(n, -1, h * by, w * by)

    def element(self, args: OperandElements, shapes: OperandShapes, attributes: Attributes, index: Index) -> Element:
        """Return an element of the operand, with a case for each phase of rows and columns."""
        by = attributes["by"]
        n, channel, row, column = index
        channels = quotient(shapes[0][1], by * by)
        phases = [  # / is z3's integer division
            args[0]((n, channel + number * channels, row / by, column / by)) for number in range(by * by)
        ]
        cases = [
            (all_of(row % by == number // by, column % by == number % by), phase)
            for number, phase in enumerate(phases[:-1])
        ]
        return choose_case(cases, phases[-1])


class Spread(TermOperator):
    """spread(value): a tensor of the shape `shape` that is `value` everywhere. Only constants are spread."""

    def shape(self, shapes: OperandShapes, attributes: Attributes) -> Shape:
        """Return the attribute `shape`."""
        return tuple(attributes["shape"])

    def demands(self, shapes: OperandShapes, attributes: Attributes) -> Iterator[Any]:
        """Yield that the value is a scalar and that no size is 0."""
        yield len(shapes[0]) == 0
        yield from (size >= 1 for size in attributes["shape"])

    def evaluate(self, args: Sequence[Array], attributes: Attributes) -> Array:
        """Fill a tensor."""
        return np.full(attributes["shape"], args[0])

    def element(self, args: OperandElements, shapes: OperandShapes, attributes: Attributes, index: Index) -> Element:
        """Return the value."""
        return args[0](())


MOVEMENT: dict[str, TermOperator] = {
    "concat": Concat(), "slice": Slice(), "transpose": Transpose(), "reshape": Reshape(), "pad": Pad(),
    "phases": Phases(), "interleave": Interleave(), "spread": Spread(),
}  # fmt: skip
