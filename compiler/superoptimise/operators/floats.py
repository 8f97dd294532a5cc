"""Operators that compute in floats, where a sum depends on the order of its terms, for models that the CPU runs.

The runtime that executes a model adds in an order of its own. So these operators are not evaluated here, and proofs
know little of a sum: it is a function of the set of its terms, each labelled with the values of its counters. Two sums
are equal where their sets are equal: then the same numbers are added, in whatever order a runtime chooses for these
places. No rule may split or reorder a sum; computing more or fewer channels changes no bit of the others.

onnxruntime keeps that promise for convolutions with at least two outputs and more than one pixel: for one output, or
one pixel, it multiplies a matrix by a vector, which adds in another order. It keeps it with one thread only: with
several threads its order depends on how it shares the work, so that it differs from itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from celosia.compiler.superoptimise.graph import Array, GraphOp
from celosia.compiler.superoptimise.operators.definition import (
    Attributes,
    NotInAlgebra,
    OperandElements,
    OperandShapes,
    Shape,
    TermOperator,
    attributes_of,
    float_reader,
    taps_of_window,
    window_demands,
    window_shape,
    windows_of,
)
from celosia.compiler.superoptimise.operators.elements import (
    Element,
    Index,
    MaxOver,
    Read,
    Uninterpreted,
    Unprovable,
    all_within,
    fresh,
)

if TYPE_CHECKING:
    import onnx

    from celosia.compiler.superoptimise.onnx_access import OnnxReader, OnnxWriter


class FloatSum(TermOperator):
    """An operator that adds floats."""

    def evaluate(self, args: Sequence[Array], attributes: Attributes) -> Array:
        """Raise ValueError, so that no constant is ever computed from float sums."""
        raise ValueError("floats are added up in the order of whoever runs the model, which is not known here")

    def sum_terms(self, counters: Index, inside: Any, *factors: Element) -> Element:
        """Return the sum of the product of `factors` over the counters for which `inside` holds, as a function of the
        set of labelled terms. `MaxOver` stands for an arbitrary function of a set; the proof uses nothing else about
        it.
        """
        term = Uninterpreted("float term", (Read("place of a float term", counters), *factors))
        return Uninterpreted("float sum", (MaxOver(counters, inside, term),))

    def add_bias(self, total: Element, bias: Element) -> Element:
        """Return the sum of both, rounded."""
        return Uninterpreted("float plus", (total, bias))


class FloatConvolve(FloatSum):
    """float_convolve(x, w[, b]): floats [n, o, h, w], a convolution, and b."""

    onnx = "Conv"

    def shape(self, shapes: OperandShapes, attributes: Attributes) -> Shape:
        """Return batch of x, outputs of w, and the rows and columns of the windows."""
        x, w = shapes[:2]
        return (x[0], w[0], *window_shape(x, w[2:], attributes))

    def demands(self, shapes: OperandShapes, attributes: Attributes) -> Iterator[Any]:
        """Yield the demands on ranks, channels, groups, padding and the size of the result."""
        x, w, *b = shapes
        yield len(x) == len(w) == 4 and all(len(bias) == 1 for bias in b)
        yield from (x[1] == w[1] * attributes["group"], w[0] % attributes["group"] == 0)
        yield from (bias[0] == w[0] for bias in b)
        yield from window_demands(x, w[2:], attributes)

    def element(self, args: OperandElements, shapes: OperandShapes, attributes: Attributes, index: Index) -> Element:
        """Return the float sum over channels and taps inside of the image, and the bias added to it."""
        x, w, *b = args
        n, o, *_ = index
        if attributes["group"] != 1:
            raise Unprovable("groups of floats")
        taps, inside, row, column = taps_of_window(shapes[0], shapes[1], attributes, index)
        total = self.sum_terms(taps, inside, x((n, taps[0], row, column)), w((o, *taps)))
        return self.add_bias(total, b[0]((o,))) if b else total

    def summed_terms(self, shapes: OperandShapes, attributes: Attributes) -> int | None:
        """Return the taps of all channels, and the bias."""
        return math.prod(shapes[1][1:]) + len(shapes) - 2

    def write(self, writer: OnnxWriter, operation: GraphOp) -> None:
        """Append a float convolution."""
        kernel = writer.graph.constants[operation.inputs[1]].shape[2:]
        attributes = operation.attributes_by_name
        writer.node(self.onnx, operation.inputs, operation.outputs, kernel_shape=kernel, **attributes)


@float_reader("Conv")
def _read_conv(reader: OnnxReader, node: onnx.NodeProto) -> None:
    """Read a Conv with constant weights and bias."""
    constants = [name for name in node.input[1:] if name]
    kernel, *_ = (reader.array(name).shape[2:] for name in constants)
    group = attributes_of(node).get("group", 1)
    inputs = (node.input[0], *constants)
    reader.emit("float_convolve", inputs, node.output[0], group=group, **windows_of(node, kernel))


class FloatMultiply(FloatSum):
    """float_multiply(x, w): floats [..., o], the product of the last axis of x and the first of w."""

    onnx = "MatMul"

    def shape(self, shapes: OperandShapes, attributes: Attributes) -> Shape:
        """Return the shape of x with the columns of w as last axis."""
        return (*shapes[0][:-1], shapes[1][1])

    def demands(self, shapes: OperandShapes, attributes: Attributes) -> Iterator[Any]:
        """Yield that w is a matrix whose rows fit the last axis of x."""
        x, w = shapes
        yield len(w) == 2
        yield x[-1] == w[0]

    def element(self, args: OperandElements, shapes: OperandShapes, attributes: Attributes, index: Index) -> Element:
        """Return the float sum over the inner axis."""
        x, w = args
        k = fresh("k")
        return self.sum_terms((k,), all_within((k, shapes[1][0])), x((*index[:-1], k)), w((k, index[-1])))

    def summed_terms(self, shapes: OperandShapes, attributes: Attributes) -> int | None:
        """Return the size of the inner axis."""
        return int(shapes[1][0])


@float_reader("MatMul")
def _read_matmul(reader: OnnxReader, node: onnx.NodeProto) -> None:
    """Read a product with a constant matrix."""
    if reader.array(node.input[1]).ndim != 2:
        raise NotInAlgebra
    reader.emit("float_multiply", tuple(node.input), node.output[0])


FLOATS: dict[str, TermOperator] = {"float_convolve": FloatConvolve(), "float_multiply": FloatMultiply()}
