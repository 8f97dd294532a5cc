"""Operators that compute in real numbers, for fast-math: floats whose rounding is left out of account.

Rules of fast-math name float_convolve and float_multiply, as graphs do; `in_reals` replaces these by real_convolve and
real_multiply for proofs and trials. Constants are computed in float64 and rounded to float32 once.

For proofs, an element is a polynomial of the operands' elements. A sum of sums is written as one sum over the counters
of both, and a product with a sum as a sum of products. So equal polynomials are sums of the same monomials, which the
prover compares. Only laws that hold in every commutative ring are used; nothing is accepted because integers wrap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from celosia.compiler.graph.operands import named_input
from celosia.compiler.superoptimise.graph import Array, GraphOp
from celosia.compiler.superoptimise.operators.definition import (
    Attributes,
    NotInAlgebra,
    OperandElements,
    OperandShapes,
    Shape,
    TermOperator,
    attributes_of,
    pads_of,
    pixel_of_tap,
    real_reader,
    view_windows,
)
from celosia.compiler.superoptimise.operators.elements import (
    Element,
    ElementAt,
    Index,
    Ite,
    Number,
    Plus,
    Read,
    Uninterpreted,
    all_of,
    all_within,
    fresh,
    minus,
    product,
    sum_over,
)
from celosia.compiler.superoptimise.operators.floats import FloatConvolve, FloatMultiply
from celosia.compiler.superoptimise.operators.movement import Pad, pad_array
from celosia.compiler.superoptimise.operators.products import is_transposed_gemm
from celosia.compiler.superoptimise.operators.windows import Pooling, average_pooling_of, onnx_attributes_of_average
from celosia.compiler.superoptimise.rule import Composed, Leaf, RewriteRule, Term

if TYPE_CHECKING:
    import onnx

    from celosia.compiler.superoptimise.onnx_access import OnnxReader, OnnxWriter

IN_REALS = {"float_convolve": "real_convolve", "float_multiply": "real_multiply"}
"""The operator on real numbers that stands for each operator on floats in proofs."""


def in_reals(rule: RewriteRule) -> RewriteRule:
    """Replace the operators on floats in `rule` by those on real numbers, for its proof."""
    before, after = (tuple(map(_term_in_reals, side)) for side in (rule.before, rule.after))
    return replace(rule, before=before, after=after)


def _term_in_reals(term: Term) -> Term:
    """Replace the operators on floats in `term` by those on real numbers."""
    if isinstance(term, Leaf):
        return term
    return Composed(IN_REALS.get(term.op, term.op), tuple(map(_term_in_reals, term.args)), term.attributes)


class _RealOperator(TermOperator):
    """An operator on real numbers. `compute` returns the result in float64."""

    def compute(self, args: Sequence[Array], attributes: Attributes) -> Array:
        """Compute the result of operands in float64."""
        raise NotImplementedError

    def evaluate(self, args: Sequence[Array], attributes: Attributes) -> Array:
        """Compute in float64, and round to float32 if the first operand is float32. Trials compute with integers, whose
        float64 results are exact and stay. ValueError for a constant that float32 cannot hold.
        """
        result = self.compute([arg.astype(np.float64) for arg in args], attributes)
        if args[0].dtype != np.float32:
            return result
        with np.errstate(over="ignore", invalid="ignore"):
            rounded = result.astype(np.float32)
        if not np.isfinite(rounded).all():
            raise ValueError("a constant would not be finite in float32")
        return rounded


class _RealProduct(_RealOperator):
    """A sum of products in real numbers, for proofs and for constants. ONNX has none."""

    onnx = ""
    write = TermOperator.write

    def sum_terms(self, counters: Index, inside: Any, *factors: Element) -> Element:
        """Return the sum of the product of `factors` over the counters, of which the first one becomes the last."""
        return sum_over((*counters[1:], counters[0]), inside, *factors)

    def add_bias(self, total: Element, bias: Element) -> Element:
        """Return the sum of both."""
        return Plus((total, bias))


class RealConvolve(_RealProduct, FloatConvolve):
    """real_convolve(x, w[, b]): float_convolve in real numbers; of one group."""

    def compute(self, args: Sequence[Array], attributes: Attributes) -> Array:
        """Compute a convolution."""
        x, w, *b = args
        windows = view_windows(x, w.shape[2:], attributes)
        sums = np.einsum("nchwij,ocij->nohw", windows, w, optimize=True)
        return np.asarray(sums + b[0][:, None, None] if b else sums)


class RealMultiply(_RealProduct, FloatMultiply):
    """real_multiply(x, w): float_multiply in real numbers."""

    def compute(self, args: Sequence[Array], attributes: Attributes) -> Array:
        """Compute a matrix product."""
        return np.asarray(args[0] @ args[1])


# Sums and scales -----------------------------------------------------------------------------------------------------


def _plus(a: Element, b: Element) -> Element:
    """Return the sum of two elements."""
    return Plus((a, b))


class RealElementwise(_RealOperator):
    """real_plus(a, b), real_minus(a, b): sum and difference of two tensors of one shape. Only constants are subtracted.

    of_numbers, of_elements: compute the result from two arrays, and from two elements.
    """

    def __init__(
        self, onnx: str, of_numbers: Callable[[Array, Array], Array], of_elements: Callable[[Element, Element], Element]
    ) -> None:
        self.onnx, self.of_numbers, self.of_elements = onnx, of_numbers, of_elements

    def compute(self, args: Sequence[Array], attributes: Attributes) -> Array:
        """Compute from two arrays."""
        return np.asarray(self.of_numbers(args[0], args[1]))

    def element(self, args: OperandElements, shapes: OperandShapes, attributes: Attributes, index: Index) -> Element:
        """Compute from the elements at the same index."""
        return self.of_elements(args[0](index), args[1](index))


class RealAlongAxis(RealElementwise):
    """real_scale(x, m), real_shift(x, b): x times m, and x plus b, with one number for each position of `axis`."""

    def demands(self, shapes: OperandShapes, attributes: Attributes) -> Iterator[Any]:
        """Yield that the second operand has a number for each position of `axis`."""
        yield len(shapes[1]) == 1
        yield shapes[0][attributes["axis"]] == shapes[1][0]

    def compute(self, args: Sequence[Array], attributes: Attributes) -> Array:
        """Compute with each position of `axis` and its number."""
        return np.asarray(self.of_numbers(args[0], _along_axis(args[1], args[0].ndim, attributes["axis"])))

    def element(self, args: OperandElements, shapes: OperandShapes, attributes: Attributes, index: Index) -> Element:
        """Compute from the element and its number."""
        return self.of_elements(args[0](index), args[1]((index[attributes["axis"]],)))

    def write(self, writer: OnnxWriter, operation: GraphOp) -> None:
        """Append a Mul or Add with a constant in a shape that ONNX broadcasts along `axis`; a bias behind a product
        becomes a Gemm where the writer has absorbed the product.
        """
        (x, row), y = operation.inputs, operation.outputs[0]
        if x in writer.absorbed:
            writer.node("Gemm", [*writer.graph.makers[x].inputs, row], [y])
            return
        rank = len(writer.graph.kinds[y].shape or ())
        constant = _along_axis(writer.graph.constants[row], rank, operation["axis"])
        writer.node(self.onnx, [x, writer.constant(constant, f"{y}_row")], [y])


def _along_axis(row: Array, rank: int, axis: int) -> Array:
    """Reshape a constant so that it broadcasts along `axis` of a tensor of this rank."""
    return row.reshape(-1, *(1,) * (rank - 1 - axis))


@real_reader("Add", "Mul", "Sub")
def _read_binary(reader: OnnxReader, node: onnx.NodeProto) -> None:
    """Read an Add of two tensors of one shape, or an Add, Mul or Sub with a constant for each position of one axis."""
    a, b = node.input
    if a in reader.constants and node.op_type != "Sub":
        a, b = b, a
    if b not in reader.constants:
        if node.op_type != "Add" or reader.shape(a) != reader.shape(b) or a in reader.constants:
            raise NotInAlgebra
        reader.emit("real_plus", (a, b), node.output[0])
        return
    row, axis = _values_along_axis(reader.array(b), reader.shape(a))
    op = "real_scale" if node.op_type == "Mul" else "real_shift"
    name = reader.constant(-row if node.op_type == "Sub" else row, f"{node.output[0]}_row")
    reader.emit(op, (a, name), node.output[0], axis=axis)


def _values_along_axis(array: Array, shape: tuple[int, ...]) -> tuple[Array, int]:
    """Return the values of a constant along the one axis of `shape` along which they differ, and that axis.
    NotInAlgebra where they differ along several.
    """
    aligned = (1,) * (len(shape) - array.ndim) + array.shape
    varying_axes = [axis for axis, size in enumerate(aligned) if size != 1]
    if len(aligned) != len(shape) or len(varying_axes) > 1 or len(shape) < 2:
        raise NotInAlgebra
    axis = varying_axes[0] if varying_axes else 1 if len(shape) == 4 else len(shape) - 1
    if aligned[axis] not in (1, shape[axis]):
        raise NotInAlgebra
    return np.broadcast_to(array.reshape(-1), (shape[axis],)), axis


@real_reader("Gemm")
def _read_gemm(reader: OnnxReader, node: onnx.NodeProto) -> None:
    """Read a Gemm with constant weights as a product and the addition of its bias."""
    is_transposed, y, w = is_transposed_gemm(node), node.output[0], reader.array(node.input[1])
    name = reader.constant(w.T, f"{node.input[1]}_turned") if is_transposed else node.input[1]
    if not (bias := named_input(node, "c")):
        reader.emit("float_multiply", (node.input[0], name), y)
        return
    product_name = reader.emit("float_multiply", (node.input[0], name), f"{y}_product")
    row, axis = _values_along_axis(reader.array(bias), (reader.shape(node.input[0])[0], reader.shape(name)[1]))
    if axis != 1:
        raise NotInAlgebra
    reader.emit("real_shift", (product_name, reader.constant(row, f"{y}_row")), y, axis=1)


# Padding and averages ------------------------------------------------------------------------------------------------


class RealPad(Pad):
    """real_pad(x): x padded with zeros."""

    def evaluate(self, args: Sequence[Array], attributes: Attributes) -> Array:
        """Pad with zeros."""
        return pad_array(args[0], attributes["pads"], 0)

    def element(self, args: OperandElements, shapes: OperandShapes, attributes: Attributes, index: Index) -> Element:
        """Return the operand's element, or 0 where the index lies outside of it."""
        return super().element([args[0], lambda index: Number(0)], shapes, attributes, index)

    def summed_terms(self, shapes: OperandShapes, attributes: Attributes) -> int | None:
        """Return 0."""
        return 0

    def write(self, writer: OnnxWriter, operation: GraphOp) -> None:
        """Append a Pad with zeros."""
        pads = writer.constant(np.array(operation["pads"], np.int64), f"{operation.outputs[0]}_pads")
        writer.node(self.onnx, [operation.inputs[0], pads], operation.outputs)


@real_reader("Pad")
def _read_pad(reader: OnnxReader, node: onnx.NodeProto) -> None:
    """Read padding with zeros."""
    reader.emit("real_pad", (node.input[0],), node.output[0], pads=pads_of(reader, node))


class RealAverage(_RealOperator, Pooling):
    """real_average(x): AveragePool; padding is left out, or counted as zeros where `counted`."""

    onnx = "AveragePool"

    def demands(self, shapes: OperandShapes, attributes: Attributes) -> Iterator[Any]:
        """Yield that the operand is an image, and the demands of windows."""
        yield len(shapes[0]) == 4
        yield from super().demands(shapes, attributes)

    def compute(self, args: Sequence[Array], attributes: Attributes) -> Array:
        """Compute averages of windows."""
        kernel = attributes["kernel"]
        sums = view_windows(args[0], kernel, attributes).sum((4, 5))
        counts = view_windows(np.ones_like(args[0]), kernel, attributes).sum((4, 5))
        return np.asarray(sums / (np.prod(kernel) if attributes["counted"] else counts))

    def element(self, args: OperandElements, shapes: OperandShapes, attributes: Attributes, index: Index) -> Element:
        """Return the sum of a window's pixels times the share of each: an unknown number that depends only on how many
        pixels are counted.
        """

        def sum_over_window(*factors: Element, image: ElementAt | None = None) -> Element:
            """Sum the product of `factors` over the pixels of the window, times each pixel of `image` if there is
            one.
            """
            i, j = fresh("i"), fresh("j")
            y, z = pixel_of_tap(index, (i, j), attributes)
            inside = all_within(*zip((i, j), attributes["kernel"]), (y, shapes[0][2]), (z, shapes[0][3]))
            return sum_over((i, j), inside, *factors, image((*index[:2], y, z)) if image else Number(1))

        share: Element = Uninterpreted("share of a pixel", (sum_over_window(),))
        if attributes["counted"]:
            share = Read("share of a kernel", attributes["kernel"])
        return sum_over_window(share, image=args[0])

    def summed_terms(self, shapes: OperandShapes, attributes: Attributes) -> int | None:
        """Return the pixels of a window, and the division."""
        return int(math.prod(attributes["kernel"])) + 1

    def write(self, writer: OnnxWriter, operation: GraphOp) -> None:
        """Append an AveragePool."""
        writer.node(self.onnx, operation.inputs, operation.outputs, **onnx_attributes_of_average(operation))


@real_reader("AveragePool")
def _read_average_pool(reader: OnnxReader, node: onnx.NodeProto) -> None:
    """Read an AveragePool of images."""
    reader.emit("real_average", (node.input[0],), node.output[0], **average_pooling_of(node))


# Constants of convolutions -------------------------------------------------------------------------------------------


class RealFilled(_RealOperator):
    """real_filled(x): a tensor of the shape of x that is `value` everywhere."""

    def compute(self, args: Sequence[Array], attributes: Attributes) -> Array:
        """Fill a tensor."""
        return np.full(args[0].shape, attributes["value"], np.float64)

    def element(self, args: OperandElements, shapes: OperandShapes, attributes: Attributes, index: Index) -> Element:
        """Return the value."""
        return Number(attributes["value"])


class RealDiagonal(_RealOperator):
    """real_diagonal(w, m): weights w [o, o, kh, kw] with m[i] added at output i, input i and the tap `at`, so that a
    convolution adds its own input.
    """

    def demands(self, shapes: OperandShapes, attributes: Attributes) -> Iterator[Any]:
        """Yield that there are as many outputs as inputs and numbers, and that the tap exists."""
        w, m = shapes
        yield len(w) == 4 and len(m) == 1
        yield from (w[0] == w[1], m[0] == w[0])
        for at, size in zip(attributes["at"], w[2:]):
            yield from (at >= 0, at < size)

    def compute(self, args: Sequence[Array], attributes: Attributes) -> Array:
        """Add the numbers to the diagonal."""
        weights, (i, j) = args[0].copy(), attributes["at"]
        channels = np.arange(len(weights))
        weights[channels, channels, i, j] += args[1]
        return weights

    def element(self, args: OperandElements, shapes: OperandShapes, attributes: Attributes, index: Index) -> Element:
        """Return the weight, plus the number of the channel where output, input and tap are those of the diagonal."""
        o, c, *tap = index
        is_on_diagonal = all_of(c == o, *(position == place for position, place in zip(tap, attributes["at"])))
        return Plus((args[0](index), Ite(is_on_diagonal, args[1]((o,)), Number(0))))


class RealCarried(_RealOperator):
    """real_carried(b, w): [o], what a convolution with weights w makes of an image without padding that is b[c] in each
    channel c.
    """

    def shape(self, shapes: OperandShapes, attributes: Attributes) -> Shape:
        """Return the outputs of w."""
        return (shapes[1][0],)

    def demands(self, shapes: OperandShapes, attributes: Attributes) -> Iterator[Any]:
        """Yield that there is a bias for each input channel of the weights."""
        b, w = shapes
        yield len(b) == 1 and len(w) == 4
        yield b[0] == w[1]

    def compute(self, args: Sequence[Array], attributes: Attributes) -> Array:
        """Sum bias times weights."""
        return np.asarray(np.einsum("c,ocij->o", *args))

    def element(self, args: OperandElements, shapes: OperandShapes, attributes: Attributes, index: Index) -> Element:
        """Return the sum of bias times weights over input channels and taps."""
        c, i, j = fresh("c"), fresh("i"), fresh("j")
        inside = all_within(*zip((c, i, j), shapes[1][1:]))
        return sum_over((c, i, j), inside, args[0]((c,)), args[1]((*index, c, i, j)))


# BatchNormalization --------------------------------------------------------------------------------------------------


class RealDeviation(_RealOperator):
    """real_deviation(s, var, epsilon): s / sqrt(var + epsilon), the scale of a BatchNormalization."""

    roles = ("bytes", "scale", "scale")

    def demands(self, shapes: OperandShapes, attributes: Attributes) -> Iterator[Any]:
        """Yield that there is a variance for each scale."""
        s, var, epsilon = shapes
        yield len(s) == len(var) == 1 and not len(epsilon)
        yield s[0] == var[0]

    def compute(self, args: Sequence[Array], attributes: Attributes) -> Array:
        """Divide by the deviation."""
        s, var, epsilon = args
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(s / np.sqrt(var + epsilon))

    def element(self, args: OperandElements, shapes: OperandShapes, attributes: Attributes, index: Index) -> Element:
        """Return an unknown function of scale, variance and epsilon."""
        s, var, epsilon = args
        return Uninterpreted("over the deviation", (s(index), var(index), epsilon(())))


class RealNormalised(_RealOperator):
    """real_normalised(x, s, b, mean, var, epsilon): BatchNormalization."""

    onnx = "BatchNormalization"
    roles = (*("bytes",) * 4, "scale", "scale")

    def demands(self, shapes: OperandShapes, attributes: Attributes) -> Iterator[Any]:
        """Yield that each parameter has a number for each channel of the image."""
        x, *rows, epsilon = shapes
        yield len(x) == 4 and not len(epsilon) and all(len(row) == 1 for row in rows)
        yield from (row[0] == x[1] for row in rows)

    def compute(self, args: Sequence[Array], attributes: Attributes) -> Array:
        """Compute BatchNormalization."""
        x, s, b, mean, var, epsilon = args
        factor = RealDeviation().compute((s, var, epsilon), attributes)
        return np.asarray(x * _along_axis(factor, x.ndim, 1) + _along_axis(b - mean * factor, x.ndim, 1))

    def element(self, args: OperandElements, shapes: OperandShapes, attributes: Attributes, index: Index) -> Element:
        """Return (x - mean) times the scale over the deviation, plus the bias."""
        x, s, b, mean, var, epsilon = args
        channel = (index[1],)
        factor = RealDeviation().element((s, var, epsilon), (), attributes, channel)
        return Plus((product(minus(x(index), mean(channel)), factor), b(channel)))

    def summed_terms(self, shapes: OperandShapes, attributes: Attributes) -> int | None:
        """Return the operations on each element."""
        return 4

    def write(self, writer: OnnxWriter, operation: GraphOp) -> None:
        """Append a BatchNormalization."""
        *inputs, epsilon = operation.inputs
        value = float(writer.graph.constants[epsilon])
        writer.node(self.onnx, inputs, operation.outputs, epsilon=value)


@real_reader("BatchNormalization")
def _read_batch_normalisation(reader: OnnxReader, node: onnx.NodeProto) -> None:
    """Read a BatchNormalization of images with constant parameters."""
    attributes = attributes_of(node)
    if attributes.get("training_mode") or len(node.output) > 1 or len(reader.shape(node.input[0])) != 4:
        raise NotInAlgebra
    for name in node.input[1:]:
        reader.array(name)
    epsilon = reader.constant(np.float32(attributes.get("epsilon", 1e-5)), f"{node.output[0]}_epsilon")
    reader.emit("real_normalised", (*node.input, epsilon), node.output[0])


REALS: dict[str, TermOperator] = {
    "real_convolve": RealConvolve(), "real_multiply": RealMultiply(),
    "real_plus": RealElementwise("Add", np.add, _plus), "real_minus": RealElementwise("", np.subtract, minus),
    "real_scale": RealAlongAxis("Mul", np.multiply, product), "real_shift": RealAlongAxis("Add", np.add, _plus),
    "real_pad": RealPad(), "real_average": RealAverage(), "real_filled": RealFilled(),
    "real_diagonal": RealDiagonal(), "real_carried": RealCarried(), "real_deviation": RealDeviation(),
    "real_normalised": RealNormalised(),
}  # fmt: skip
