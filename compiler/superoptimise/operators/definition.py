"""Declaration of an operator of the algebra (TermOperator), and helpers that the readers of ONNX nodes share.

A family of operators is a file: products, movement, windows, floats, reals. For each operator it declares in one class
the shape and type of the result, the demands on the operands, the result in numpy, an element of it for proofs, and the
ONNX node that it is written as; beside it stand the readers of the ONNX nodes that become this operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.graph.operands import named_input
from celosia.compiler.program.op_spec import quantised_form, registering_in
from celosia.compiler.superoptimise.graph import Array, GraphOp, Quantisation
from celosia.compiler.superoptimise.operators.elements import Element, ElementAt, Index, all_within, fresh
from celosia.compiler.superoptimise.rule import quotient

if TYPE_CHECKING:
    import onnx

    from celosia.compiler.superoptimise.onnx_access import OnnxReader, OnnxWriter

Attributes = Mapping[str, Any]
"""Attributes of an operator by name: sizes have values here, and functions of bytes are callables."""
Shape = tuple[Any, ...]
"""The size of each axis of a tensor: ints, or integer terms of z3 in proofs."""
OperandShapes = Sequence[Shape]
OperandElements = Sequence[ElementAt]


class Unwritable(Exception):
    """Raised for a graph that ONNX has no operators for. The message is one sentence."""


class TermOperator:
    """An operator of the algebra.

    `evaluate` and `element` define the result independently of each other, for models and for proofs; tests compare the
    two. onnx: the operator of the one ONNX node that can express it; "" where none can. roles: kinds of the operands
    ("bytes", "int32" or "scale"), for random values in their usual ranges; without them, operands have the kind of the
    result.
    """

    onnx: str = ""
    roles: tuple[str, ...] = ()

    def shape(self, shapes: OperandShapes, attributes: Attributes) -> Shape:
        """Return the shape of the result: by default that of the first operand."""
        return shapes[0]

    def dtype(self, dtypes: Sequence[str]) -> str:
        """Return the element type of the result: by default that of the first operand."""
        return dtypes[0]

    def demands(self, shapes: OperandShapes, attributes: Attributes) -> Iterator[Any]:
        """Yield what must hold of shapes and attributes: by default that all operands have one shape.

        Where a rule is applied to a graph, shapes are ints and demands are bools. In proofs both are terms of z3, and
        the demands of `before` must imply those of `after`.
        """
        for other in shapes[1:]:
            yield len(other) == len(shapes[0])
            yield from (a == b for a, b in zip(shapes[0], other))

    def evaluate(self, args: Sequence[Array], attributes: Attributes) -> Array:
        """Compute the result in numpy. ValueError where only the runtime of the model can."""
        raise NotImplementedError

    def element(self, args: OperandElements, shapes: OperandShapes, attributes: Attributes, index: Index) -> Element:
        """Return the element of the result at `index`, for proofs. Raises Unprovable."""
        raise NotImplementedError

    def summed_terms(self, shapes: OperandShapes, attributes: Attributes) -> int | None:
        """Return how many floats are added up for an element of the result; None where that is not known."""
        return None

    def write(self, writer: OnnxWriter, operation: GraphOp) -> None:
        """Append the nodes for an operation to the writer: by default one without attributes. Raises Unwritable."""
        if not self.onnx:
            raise Unwritable(f"ONNX has no operator for {operation.op} alone")
        writer.node(self.onnx, operation.inputs, operation.outputs)


# Windows on images [n, c, h, w] --------------------------------------------------------------------------------------


def window_shape(x: Shape, kernel: Shape, attributes: Attributes) -> Shape:
    """Return the rows and columns of the result of windows of size `kernel` on an image of shape `x`.

    attributes: pads (top, left, bottom, right), strides and dilations."""
    pads, strides, dilations = attributes["pads"], attributes["strides"], attributes["dilations"]
    return tuple(
        quotient(x[2 + i] + pads[i] + pads[2 + i] - dilations[i] * (kernel[i] - 1) - 1, strides[i]) + 1 for i in (0, 1)
    )


def window_demands(x: Shape, kernel: Shape, attributes: Attributes) -> Iterator[Any]:
    """Yield the demands of all windows: no negative padding, and at least one row and column of results."""
    yield from (pad >= 0 for pad in attributes["pads"])
    yield from (size >= 1 for size in window_shape(x, kernel, attributes))


def view_windows(x: Array, kernel: Sequence[int], attributes: Attributes, fill: int = 0) -> Array:
    """View the windows of x, padded with `fill`: [n, c, rows, columns, kernel rows, kernel columns]."""
    top, left, bottom, right = attributes["pads"]
    (down, across), (dh, dw) = attributes["strides"], attributes["dilations"]
    rows, columns = window_shape(x.shape, tuple(kernel), attributes)
    padded = np.pad(x, ((0, 0), (0, 0), (top, bottom), (left, right)), constant_values=fill)
    reach = [rate * (size - 1) + 1 for rate, size in zip((dh, dw), kernel)]
    windows = np.lib.stride_tricks.sliding_window_view(padded, reach, (2, 3))
    windows = windows[:, :, ::down, ::across, :: dh or 1, :: dw or 1][:, :, :rows, :columns]
    return np.broadcast_to(windows, (*windows.shape[:4], *kernel))  # with a dilation of 0, all taps read one pixel


def pixel_of_tap(index: Index, tap: Index, attributes: Attributes) -> tuple[Any, Any]:
    """Return row and column of the pixel that a tap of the window at `index` reads, for proofs."""
    strides, dilations, pads = attributes["strides"], attributes["dilations"], attributes["pads"]
    row, column = (index[2 + axis] * strides[axis] + tap[axis] * dilations[axis] - pads[axis] for axis in (0, 1))
    return row, column


def taps_of_window(x: Shape, w: Shape, attributes: Attributes, index: Index) -> tuple[Index, Any, Any, Any]:
    """Return counters (channel, row, column) of the taps of weights w on an image x, the condition that a tap reads a
    pixel inside of the image, and row and column of that pixel, for proofs of the result at `index`.
    """
    c, i, j = fresh("c"), fresh("i"), fresh("j")
    row, column = pixel_of_tap(index, (i, j), attributes)
    return (c, i, j), all_within(*zip((c, i, j), w[1:]), (row, x[2]), (column, x[3])), row, column


# Reading ONNX nodes --------------------------------------------------------------------------------------------------

BYTES = ("int8", "uint8")
"""Element types of bytes."""
FLOAT = "float32"
"""The element type of operators on floats."""


class NotInAlgebra(Exception):
    """Raised for a node that the algebra cannot express, so that it stays an ONNX node."""


@dataclass(frozen=True)
class BytesOf:
    """A tensor of bytes, or of int32 for a bias, with its quantisation.

    scale, zero: one element, or [channels]. axis: along which a DequantizeLinear has several; None where the operator's
    documentation says it.
    """

    name: str
    scale: NDArray[np.float32]
    zero: Array
    axis: int | None = None

    @property
    def quantisation(self) -> Quantisation:
        """The quantisation of all elements. NotInAlgebra where channels differ."""
        if self.scale.size != 1 or self.zero.size != 1:
            raise NotInAlgebra
        return Quantisation(float(self.scale.item()), int(self.zero.item()))

    def require_equal_quantisation(self, other: BytesOf) -> None:
        """Raise NotInAlgebra unless both tensors have the same scale, zero point and type."""
        if self.quantisation != other.quantisation or self.zero.dtype != other.zero.dtype:
            raise NotInAlgebra


@dataclass(frozen=True)
class QuantisedOperation:
    """A float operator with quantised operands and a quantised result, whichever way the model writes it.

    operator: the float operator. node: of the model. operands: its data and weights. bias: int32. y: the result. qdq:
    whether the node is a float operator between DequantizeLinear and QuantizeLinear, else it is a QLinear operator.
    """

    operator: str
    node: onnx.NodeProto
    operands: list[BytesOf]
    bias: Array | None
    y: BytesOf
    qdq: bool


QdqReader = Callable[["OnnxReader", "onnx.NodeProto", BytesOf], None]
"""Reads a float operator before a QuantizeLinear: (reader, node, result). Raises NotInAlgebra."""
NodeReader = Callable[["OnnxReader", "onnx.NodeProto"], None]
"""Reads any other node. Raises NotInAlgebra."""
OperationReader = Callable[["OnnxReader", QuantisedOperation], None]
"""Reads an operation on quantised operands, in whichever form it is written. Raises NotInAlgebra."""
QDQ_READERS: dict[str, QdqReader] = {}
"""Readers of float operators before a QuantizeLinear, by ONNX operator."""
READERS: dict[str, NodeReader] = {}
"""Readers of all other operators, by ONNX operator."""
FLOAT_READERS: dict[str, NodeReader] = {}
"""Readers of nodes whose first operand is float32, for models that the CPU runs."""
REAL_READERS: dict[str, NodeReader] = {}
"""Further readers of such nodes, for fast-math."""
qdq_reader, node_reader = registering_in(QDQ_READERS), registering_in(READERS)
float_reader, real_reader = registering_in(FLOAT_READERS), registering_in(REAL_READERS)


def operation_reader(*operators: str, quantised_too: bool = True) -> Callable[[OperationReader], OperationReader]:
    """Decorate a function as the reader of these float operators before a QuantizeLinear and, if `quantised_too`, of
    their QLinear operators.
    """

    def add(function: OperationReader) -> OperationReader:
        """Register `function` for each operator, in both forms."""
        for operator in operators:
            QDQ_READERS[operator] = lambda reader, node, y: function(reader, reader.operation(node, y))
            if quantised_too:
                READERS[quantised_form(operator)] = lambda reader, node: function(reader, reader.operation(node))
        return function

    return add


def attributes_of(node: onnx.NodeProto) -> dict[str, Any]:
    """Return the attributes of a node by name; lists become tuples."""
    from onnx.helper import get_attribute_value

    values = {attribute.name: get_attribute_value(attribute) for attribute in node.attribute}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def windows_of(node: onnx.NodeProto, kernel: tuple[int, ...]) -> dict[str, Any]:
    """Return pads, strides and dilations of a node with windows on images. NotInAlgebra for SAME padding, ceil_mode,
    other ranks and the like.
    """
    attributes = attributes_of(node)
    padding = attributes.get("auto_pad", b"NOTSET")
    pads = attributes.get("pads", (0, 0, 0, 0)) if padding == b"NOTSET" else (0, 0, 0, 0)
    is_unusual = attributes.get("ceil_mode") or attributes.get("storage_order") or len(node.output) > 1
    if padding not in (b"NOTSET", b"VALID") or is_unusual or len(kernel) != 2 or any(pad < 0 for pad in pads):
        raise NotInAlgebra
    return {
        "pads": pads,
        "strides": attributes.get("strides", (1, 1)),
        "dilations": attributes.get("dilations", (1, 1)),
    }


def pads_of(reader: OnnxReader, node: onnx.NodeProto) -> tuple[int, ...]:
    """Return the pads of a Pad with zeros. NotInAlgebra for another value or mode, and for negative pads."""
    fill = named_input(node, "constant_value")
    value = reader.array(fill).item() if fill else 0.0
    if attributes_of(node).get("mode", b"constant") != b"constant" or value or named_input(node, "axes"):
        raise NotInAlgebra
    pads = tuple(int(pad) for pad in reader.array(named_input(node, "pads")).reshape(-1))
    if min(pads) < 0:
        raise NotInAlgebra
    return pads
