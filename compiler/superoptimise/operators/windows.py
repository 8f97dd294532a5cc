"""Operators on windows of images of bytes: MaxPool and averages.

A runtime computes an average as a float sum, in an order that depends on the place of each pixel in its window. Where
no sum comes near a tie of rounding (`numerics.average_is_exact`), the order does not matter: there, and only there, an
average may be computed by products.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from celosia.compiler.numerics import average_is_exact, global_average_scale, requantize_f32
from celosia.compiler.superoptimise.graph import Array, GraphOp, Quantisation, weights_of
from celosia.compiler.superoptimise.operators.definition import (
    BYTES,
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
    pixel_of_tap,
    qdq_reader,
    view_windows,
    window_demands,
    window_shape,
    windows_of,
)
from celosia.compiler.superoptimise.operators.elements import (
    Element,
    Index,
    MaxOver,
    Number,
    Read,
    SumOver,
    Uninterpreted,
    all_of,
    all_within,
    fresh,
    minus,
)
from celosia.compiler.superoptimise.operators.products import wrap_int32, write_qlinear_product

if TYPE_CHECKING:
    import onnx

    from celosia.compiler.superoptimise.onnx_access import OnnxReader, OnnxWriter


class Pooling(TermOperator):
    """An operator that makes one element of each window of size `kernel`, for each channel by itself."""

    def shape(self, shapes: OperandShapes, attributes: Attributes) -> Shape:
        """Return batch and channels of the operand, and the rows and columns of its windows."""
        return (*shapes[0][:2], *window_shape(shapes[0], attributes["kernel"], attributes))

    def demands(self, shapes: OperandShapes, attributes: Attributes) -> Iterator[Any]:
        """Yield the demands of windows. Pads smaller than the kernel ensure that each window has a pixel."""
        yield from window_demands(shapes[0], attributes["kernel"], attributes)
        for place in (0, 1, 2, 3):
            yield attributes["pads"][place] < attributes["kernel"][place % 2]


def pooling_of(node: onnx.NodeProto) -> dict[str, Any]:
    """Return kernel, pads, strides and dilations of a pooling whose windows all have a pixel. Raises NotInAlgebra."""
    kernel = attributes_of(node)["kernel_shape"]
    windows = windows_of(node, kernel)
    if any(pad >= kernel[place % 2] for place, pad in enumerate(windows["pads"])):
        raise NotInAlgebra
    return {"kernel": kernel, **windows}


def average_pooling_of(node: onnx.NodeProto) -> dict[str, Any]:
    """Return the attributes of an AveragePool without dilations: those of `pooling_of`, and `counted`, whether padding
    counts. Raises NotInAlgebra.
    """
    attributes = pooling_of(node)
    if attributes["dilations"] != (1, 1):
        raise NotInAlgebra
    counted = bool(attributes_of(node).get("count_include_pad")) or not any(attributes["pads"])
    return {"counted": counted, **attributes}


def onnx_attributes_of_average(operation: GraphOp) -> dict[str, Any]:
    """Return the attributes of the AveragePool that is this operation."""
    return {
        "pads": operation["pads"], "strides": operation["strides"], "kernel_shape": operation["kernel"],
        "count_include_pad": int(operation["counted"]),
    }  # fmt: skip


class Largest(Pooling):
    """largest(x): bytes, MaxPool, the maximum of each window; padding is left out."""

    onnx = "MaxPool"

    def evaluate(self, args: Sequence[Array], attributes: Attributes) -> Array:
        """Compute MaxPool; padding is filled with the least byte, so that it never wins."""
        lowest = int(np.iinfo(args[0].dtype).min)
        return np.asarray(view_windows(args[0], attributes["kernel"], attributes, lowest).max((4, 5)))

    def element(self, args: OperandElements, shapes: OperandShapes, attributes: Attributes, index: Index) -> Element:
        """Return the maximum over those pixels of the window that lie inside of the image."""
        (down, across), kernel = attributes["strides"], attributes["kernel"]
        if all(isinstance(size, int) and size == 1 for size in kernel):  # a window of one pixel is inside of the image
            return args[0]((*index[:2], index[2] * down, index[3] * across))
        i, j = fresh("i"), fresh("j")
        y, z = pixel_of_tap(index, (i, j), attributes)
        inside = all_within((i, kernel[0]), (j, kernel[1]), (y, shapes[0][2]), (z, shapes[0][3]))
        return MaxOver((i, j), inside, args[0]((*index[:2], y, z)))

    def write(self, writer: OnnxWriter, operation: GraphOp) -> None:
        """Append a MaxPool."""
        attributes = operation.attributes_by_name
        kernel = attributes.pop("kernel")
        writer.node_on_bytes(self.onnx, operation, kernel_shape=kernel, **attributes)


class LargestAgain(Largest):
    """largest_again(x): `largest` of a tensor that is the result of `largest`."""

    def element(self, args: OperandElements, shapes: OperandShapes, attributes: Attributes, index: Index) -> Element:
        """Return the maximum of maxima as one maximum over both windows: each inner window has an element, so that no
        maximum is of nothing.
        """
        outer = super().element(args, shapes, attributes, index)
        assert isinstance(outer, MaxOver)
        body = outer.body
        if not isinstance(body, MaxOver):
            return outer
        return MaxOver((*outer.variables, *body.variables), all_of(outer.guard, body.guard), body.body)


@qdq_reader("MaxPool")
def _read_qdq_max_pool(reader: OnnxReader, node: onnx.NodeProto, y: BytesOf) -> None:
    """Read a MaxPool with QDQ around it."""
    x = reader.dequantised(node.input[0])
    x.require_equal_quantisation(y)
    _emit_max_pool(reader, node, x.name, y.name, y.quantisation)


@node_reader("MaxPool")
def _read_max_pool(reader: OnnxReader, node: onnx.NodeProto) -> None:
    """Read a MaxPool whose operand is bytes."""
    _emit_max_pool(reader, node, node.input[0], node.output[0], None)


def _emit_max_pool(reader: OnnxReader, node: onnx.NodeProto, x: str, y: str, note: Quantisation | None) -> None:
    """Add a MaxPool of bytes."""
    attributes = pooling_of(node)
    if reader.dtype_of(x) not in BYTES:
        raise NotInAlgebra
    reader.emit("largest", (x,), y, note, **attributes)


# Averages ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Averaging:
    """The function of sums and counts by which an AveragePool of bytes makes its result.

    x, y: scale and zero point of operand and result. dtype: of both. qdq: whether the model has QDQ around the
    operator.
    """

    x: Quantisation
    y: Quantisation
    dtype: str
    qdq: bool

    def __call__(self, sums: Array, counts: Array) -> Array:
        """Return the bytes for `sums` of (x's byte - zero point) over windows that count `counts` pixels."""
        result, info = np.zeros(sums.shape, np.int32), np.iinfo(self.dtype)
        for count in np.unique(counts):
            bytes_ = requantize_f32(sums, np.int32(0), self.multiplier(int(count)), self.y.zero, info.min, info.max)
            result = np.where(counts == count, bytes_, result)
        return result.astype(self.dtype)

    def multiplier(self, count: int) -> np.float32:
        """Return the factor from sums of `count` pixels to steps of y."""
        return np.float32(global_average_scale(self.x.scale, self.y.scale, count))

    def weight_scale(self, count: int) -> np.float32 | None:
        """Return the scale of weights of 1 with which a convolution gives the same bytes as averages of `count` pixels.

        None where no scale does.

        >>> average = Averaging(Quantisation(0.5, 0), Quantisation(0.5, 0), "int8", True)
        >>> float(average.weight_scale(9)), average.weight_scale(4)
        (0.1111111119389534, None)
        """
        if self.dtype != "int8" or not average_is_exact(self.x.scale, self.x.zero, self.y.scale, count):
            return None
        scales = weights_of(np.array([self.multiplier(count)], np.float32), self.x.scale, self.y.scale)
        return None if scales is None else np.float32(scales[0])

    def __str__(self) -> str:
        return "AveragePool"


class Average(Pooling):
    """average(x, xz): bytes, AveragePool by the function `f`, an Averaging; padding is left out, or counted as zeros
    where `counted`.
    """

    onnx = "AveragePool"

    def demands(self, shapes: OperandShapes, attributes: Attributes) -> Iterator[Any]:
        """Yield that x is an image and its zero point a number, and the demands of windows."""
        yield len(shapes[0]) == 4 and len(shapes[1]) == 0
        yield from super().demands(shapes, attributes)

    def evaluate(self, args: Sequence[Array], attributes: Attributes) -> Array:
        """Compute averages. Trials of rules use random functions instead of an Averaging; these take bytes."""
        x, xz = (arg.astype(np.int64) for arg in args)
        sums = wrap_int32(view_windows(x - xz, attributes["kernel"], attributes).sum((4, 5)))
        counts = np.full(sums.shape, int(np.prod(attributes["kernel"])))
        if not attributes.get("counted", True):
            counts = wrap_int32(view_windows(np.ones_like(x), attributes["kernel"], attributes).sum((4, 5)))
        f = attributes["f"]
        if not isinstance(f, Averaging):  # a random function of two bytes
            sums, counts = sums.astype(np.int8), counts.astype(np.int8)
        return np.asarray(f(sums, counts))

    def element(self, args: OperandElements, shapes: OperandShapes, attributes: Attributes, index: Index) -> Element:
        """Return the average as a function of the set of its pixels, each with its place in that part of the window
        which lies inside of the image, and of the number of counted pixels. Nothing is assumed about the order in which
        floats are added. `MaxOver` stands for an arbitrary function of a set. Without the attribute `counted`, as by
        products, the whole kernel counts.
        """
        import z3

        starts = [index[2 + axis] * attributes["strides"][axis] - attributes["pads"][axis] for axis in (0, 1)]

        def guards(tap: Index) -> tuple[object, object]:
            """Return the conditions that a tap lies inside of the kernel, and that it lies inside of the image."""
            pixel = [start + offset for start, offset in zip(starts, tap)]
            return all_within(*zip(tap, attributes["kernel"])), all_within(*zip(pixel, shapes[0][2:]))

        tap, counted_tap = ((fresh("i"), fresh("j")) for _ in range(2))
        first_in_image = [z3.If(start < 0, -start, 0) for start in starts]
        place = Read("place in a window", tuple(offset - first for offset, first in zip(tap, first_in_image)))
        value = minus(args[0]((*index[:2], *(start + offset for start, offset in zip(starts, tap)))), args[1](()))
        pixels = MaxOver(tap, all_of(*guards(tap)), Uninterpreted("pixel of a window", (place, value)))
        kernel, image = guards(counted_tap)
        guard = kernel if attributes.get("counted", True) else all_of(kernel, image)
        return Uninterpreted(f"average {attributes['f']}", (pixels, SumOver(counted_tap, guard, Number(1))))

    def write(self, writer: OnnxWriter, operation: GraphOp) -> None:
        """Append an AveragePool."""
        f, (x, _), y = operation["f"], operation.inputs, operation.outputs[0]
        attributes = onnx_attributes_of_average(operation)
        if f.qdq:
            writer.float_node(self.onnx, [writer.dequantise(x, f.x)], y, f.y, **attributes)
            return
        of_x = (x, *writer.scale_and_zero(f.x, f.dtype, y))
        writer.quantised_node(self.onnx, [of_x], writer.with_scale_and_zero(y, f.y), **attributes)


@operation_reader("AveragePool")
def _read_average_pool(reader: OnnxReader, op: QuantisedOperation) -> None:
    """Read an AveragePool or QLinearAveragePool of images."""
    attributes, (x,), y = average_pooling_of(op.node), op.operands, op.y
    f = Averaging(x.quantisation, y.quantisation, y.zero.dtype.name, op.qdq)
    if attributes_of(op.node).get("channels_last") or reader.dtype_of(x.name) != f.dtype:
        raise NotInAlgebra
    zero = reader.constant(x.zero.reshape(()), f"{y.name}_xz")
    reader.emit("average", (x.name, zero), y.name, f=f, **attributes)


class AverageByProducts(Average):
    """average_by_products(x, xz): `average` for windows that count the whole kernel, written to ONNX as a depthwise
    convolution whose weights are ones.
    """

    onnx = "Conv"

    def demands(self, shapes: OperandShapes, attributes: Attributes) -> Iterator[Any]:
        """Yield the demands of `average`, and that products can give the same bytes where the Averaging is known."""
        yield from super().demands(shapes, attributes)
        f = attributes["f"]
        if isinstance(f, Averaging):
            yield f.weight_scale(int(np.prod(attributes["kernel"]))) is not None

    def write(self, writer: OnnxWriter, operation: GraphOp) -> None:
        """Append a depthwise convolution."""
        f, (x, _), y, kernel = operation["f"], operation.inputs, operation.outputs[0], operation["kernel"]
        channels = (writer.graph.kinds[y].shape or ())[1]
        ones = writer.constant(np.ones((channels, 1, *kernel), np.int8), f"{y}_ones")
        w = ones, np.asarray(f.weight_scale(int(np.prod(kernel)))), np.zeros((), np.int8)
        attributes = {name: operation[name] for name in ("pads", "strides", "dilations")}
        attributes |= {"kernel_shape": kernel, "group": channels}
        if f.qdq:
            inputs = [writer.dequantise(x, f.x), writer.dequantise_constant(*w, 0)]
            writer.float_node(self.onnx, inputs, y, f.y, **attributes)
        else:
            write_qlinear_product(writer, self.onnx, (x, f.x), w, None, (y, f.y), attributes)


WINDOWS: dict[str, TermOperator] = {
    "largest": Largest(), "largest_again": LargestAgain(), "average": Average(),
    "average_by_products": AverageByProducts(),
}  # fmt: skip
