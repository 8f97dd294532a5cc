"""Operators that compute bytes: convolutions and products with int32 sums, their rounding, and functions of bytes.

A product is read from ONNX together with its rounding, as `convolve` or `multiply` and `requantise`, and written
together: the writer of `requantise` writes both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from celosia.compiler import numerics
from celosia.compiler.ops import op_spec
from celosia.compiler.ops.elementwise import UNARY
from celosia.compiler.superoptimise.graph import Array, ByteMap, FloatMap, GraphOp, OriginalForm, Quantisation
from celosia.compiler.superoptimise.operators.definition import (
    BYTES,
    FLOAT,
    Attributes,
    BytesOf,
    NotInAlgebra,
    OperandElements,
    OperandShapes,
    QuantisedOperation,
    Shape,
    TermOperator,
    Unwritable,
    attributes_of,
    float_reader,
    node_reader,
    operation_reader,
    taps_of_window,
    view_windows,
    window_demands,
    window_shape,
    windows_of,
)
from celosia.compiler.superoptimise.operators.elements import (
    Element,
    Index,
    Plus,
    SumOver,
    Times,
    Uninterpreted,
    Unprovable,
    all_within,
    choose_case,
    fresh,
    minus,
)

if TYPE_CHECKING:
    import onnx

    from celosia.compiler.superoptimise.onnx_access import OnnxReader, OnnxWriter


def wrap_int32(values: Array) -> Array:
    """Reduce whole numbers modulo 2^32 to int32, as accumulators do."""
    return np.asarray(values, np.int64).astype(np.int32)


class _Product(TermOperator):
    """A sum of products of bytes less their zero points, and a bias: accumulators in int32."""

    roles = ("bytes", "bytes", "bytes", "bytes", "int32")

    def dtype(self, dtypes: Sequence[str]) -> str:
        """Return the type of accumulators."""
        return "int32"

    def write(self, writer: OnnxWriter, operation: GraphOp) -> None:
        """Append nothing: the writer of `requantise` writes products."""


class Convolve(_Product):
    """convolve(x, xz, w, wz, b): int32 [n, o, h, w], the sum of (x - xz)(w - wz), padding left out, and b; modulo 2^32.
    In `group` groups.
    """

    onnx = "Conv"

    def shape(self, shapes: OperandShapes, attributes: Attributes) -> Shape:
        """Return batch of x, outputs of w, and the rows and columns of the windows."""
        x, w = shapes[0], shapes[2]
        return (x[0], w[0], *window_shape(x, w[2:], attributes))

    def demands(self, shapes: OperandShapes, attributes: Attributes) -> Iterator[Any]:
        """Yield ranks, channels that fit the groups, and a zero point and a bias for each output."""
        x, xz, w, wz, b = shapes
        group = attributes["group"]
        yield len(x) == len(w) == 4 and len(xz) == 0 and len(wz) == len(b) == 1
        yield x[1] == w[1] * group
        yield w[0] % group == 0
        yield from (wz[0] == w[0], b[0] == w[0])
        yield from window_demands(x, w[2:], attributes)

    def evaluate(self, args: Sequence[Array], attributes: Attributes) -> Array:
        """Compute a convolution with int32 sums, in any number of groups."""
        x, xz, w, wz, b = (arg.astype(np.int64) for arg in args)
        groups = attributes["group"]
        windows = view_windows(x - xz, w.shape[2:], attributes)
        n, channels, rows, columns = windows.shape[:4]
        windows = windows.reshape(n, groups, channels // groups, rows, columns, *w.shape[2:])
        weights = (w - wz[:, None, None, None]).reshape(groups, len(w) // groups, *w.shape[1:])
        sums = np.einsum("ngchwij,gocij->ngohw", windows, weights).reshape(n, len(w), rows, columns)
        return wrap_int32(sums + b[:, None, None])

    def element(self, args: OperandElements, shapes: OperandShapes, attributes: Attributes, index: Index) -> Element:
        """Return the sum over channels and taps that lie inside of the image, plus the bias; with a case for each
        group.
        """
        x, xz, w, wz, b = args
        n, o, *_ = index
        outputs, channels, groups = shapes[2][0], shapes[2][1], attributes["group"]
        taps, inside, row, column = taps_of_window(shapes[0], shapes[2], attributes, index)
        weight = minus(w((o, *taps)), wz((o,)))
        if not isinstance(groups, int):
            raise Unprovable("a number of groups that is no number")

        def sum_of_group(g: int) -> Element:
            factor = minus(x((n, taps[0] + g * channels, row, column)), xz(()))
            return SumOver(taps, inside, Times((factor, weight)))

        per_group = outputs / groups if groups > 1 else outputs  # / is z3's integer division
        cases = [(o < (g + 1) * per_group, sum_of_group(g)) for g in range(groups - 1)]
        return Plus((choose_case(cases, sum_of_group(groups - 1)), b((o,))))


class Multiply(_Product):
    """multiply(x, xz, w, wz, b): int32 [..., o], the matrix product of x - xz and w - wz [k, o], and b; modulo 2^32."""

    onnx = "MatMul"

    def shape(self, shapes: OperandShapes, attributes: Attributes) -> Shape:
        """Return the shape of x with the columns of w as last axis."""
        return (*shapes[0][:-1], shapes[2][1])

    def demands(self, shapes: OperandShapes, attributes: Attributes) -> Iterator[Any]:
        """Yield that the inner sizes are equal, and that each column has a zero point and a bias."""
        x, xz, w, wz, b = shapes
        yield len(w) == 2 and len(xz) == 0 and len(wz) == len(b) == 1
        yield from (x[-1] == w[0], wz[0] == w[1], b[0] == w[1])

    def evaluate(self, args: Sequence[Array], attributes: Attributes) -> Array:
        """Compute a matrix product with int32 sums."""
        x, xz, w, wz, b = (arg.astype(np.int64) for arg in args)
        return wrap_int32((x - xz) @ (w - wz) + b)

    def element(self, args: OperandElements, shapes: OperandShapes, attributes: Attributes, index: Index) -> Element:
        """Return the sum over the inner axis, plus the bias."""
        x, xz, w, wz, b = args
        *row, o = index
        k = fresh("k")
        body = Times((minus(x((*row, k)), xz(())), minus(w((k, o)), wz((o,)))))
        return Plus((SumOver((k,), all_within((k, shapes[2][0])), body), b((o,))))


@operation_reader("Conv")
def _read_conv(reader: OnnxReader, op: QuantisedOperation) -> None:
    """Read a Conv or QLinearConv with constant weights."""
    x, w = op.operands
    if w.axis not in (None, 0):
        raise NotInAlgebra
    windows = windows_of(op.node, reader.array(w.name).shape[2:])
    _emit_product(reader, op, "convolve", x, w, op.bias, group=attributes_of(op.node).get("group", 1), **windows)


@operation_reader("MatMul")
def _read_matmul(reader: OnnxReader, op: QuantisedOperation) -> None:
    """Read a product with a constant matrix."""
    x, w = op.operands
    if reader.array(w.name).ndim != 2 or w.axis not in (None, 1):
        raise NotInAlgebra
    _emit_product(reader, op, "multiply", x, w, None)


@operation_reader("Gemm", quantised_too=False)
def _read_gemm(reader: OnnxReader, op: QuantisedOperation) -> None:
    """Read a Gemm with constant weights, which are transposed here if the node says so."""
    is_transposed, (x, w) = is_transposed_gemm(op.node), op.operands
    if reader.array(w.name).ndim != 2 or w.axis not in (None, 0 if is_transposed else 1):
        raise NotInAlgebra
    if is_transposed:
        w = BytesOf(reader.constant(reader.array(w.name).T, f"{w.name}_turned"), w.scale, w.zero)
    _emit_product(reader, op, "multiply", x, w, op.bias)


def is_transposed_gemm(node: onnx.NodeProto) -> bool:
    """Return whether a Gemm multiplies by its transposed weights. NotInAlgebra for one that does more than that."""
    attributes = attributes_of(node)
    if attributes.get("transA") or attributes.get("alpha", 1.0) != 1.0 or attributes.get("beta", 1.0) != 1.0:
        raise NotInAlgebra
    return bool(attributes.get("transB"))


def _emit_product(
    reader: OnnxReader, read: QuantisedOperation, op: str, x: BytesOf, w: BytesOf, b: Array | None, **attributes: Any
) -> None:
    """Add a convolution or matrix product and its requantisation. Raises NotInAlgebra. op: convolve or multiply. w: its
    outputs are the first axis for convolve, the last for multiply.
    """
    weights, y = reader.array(w.name), read.y
    channels = weights.shape[0 if op == "convolve" else 1]
    if reader.dtype_of(x.name) not in BYTES or weights.dtype.name not in BYTES:
        raise NotInAlgebra
    if np.dtype(reader.dtype_of(x.name)) != y.zero.dtype or np.any(~np.isfinite(w.scale)) or np.any(w.scale <= 0):
        raise NotInAlgebra
    if w.scale.size not in (1, channels) or w.zero.size not in (1, channels):
        raise NotInAlgebra
    scales = x.quantisation.scale, w.scale, y.quantisation.scale
    m = np.broadcast_to(numerics.conv_scale(*scales).reshape(-1), (channels,))
    wz = np.broadcast_to(w.zero.reshape(-1), (channels,))
    bias = np.zeros(channels, np.int32) if b is None else b.reshape(-1)
    if bias.shape != (channels,) or bias.dtype != np.int32:
        raise NotInAlgebra
    xz = reader.constant(x.zero.reshape(()), f"{y.name}_xz")
    inputs = (x.name, xz, w.name, reader.constant(wz, f"{y.name}_wz"), reader.constant(bias, f"{y.name}_b"))
    acc = reader.emit(op, inputs, f"{y.name}_acc", **attributes)
    z = reader.constant(y.zero.reshape(()), f"{y.name}_z")
    axis = 1 if op == "convolve" else len(reader.shape_in_graph(acc)) - 1
    w_scales = tuple(float(scale) for scale in w.scale.reshape(-1))
    form = OriginalForm(read.operator, read.qdq, scales[0], w_scales, scales[2], read.bias is not None)
    reader.emit("requantise", (acc, reader.constant(m, f"{y.name}_m"), z), y.name, form, axis=axis)


class Requantise(TermOperator):
    """requantise(acc, m, z): bytes, clip(rne(f32(acc) * m) + z), with a multiplier m for each position of `axis`."""

    roles = ("int32", "scale", "bytes")

    def dtype(self, dtypes: Sequence[str]) -> str:
        """Return the type of the zero point."""
        return dtypes[2]

    def demands(self, shapes: OperandShapes, attributes: Attributes) -> Iterator[Any]:
        """Yield that there is one multiplier for each position of `axis`, and a scalar zero point."""
        yield len(shapes[1]) == 1 and len(shapes[2]) == 0
        yield shapes[1][0] == shapes[0][attributes["axis"]]

    def evaluate(self, args: Sequence[Array], attributes: Attributes) -> Array:
        """Requantise accumulators to the type of the zero point, as onnxruntime does in float32."""
        acc, m, z = args
        info = np.iinfo(z.dtype)
        multipliers = np.expand_dims(m, tuple(range(1, acc.ndim - attributes["axis"])))
        result = numerics.requantize_f32(acc, np.int32(0), multipliers, int(z), int(info.min), int(info.max))
        return result.astype(z.dtype)

    def element(self, args: OperandElements, shapes: OperandShapes, attributes: Attributes, index: Index) -> Element:
        """Return an unknown function of accumulator, multiplier and zero point."""
        acc, m, z = args
        return Uninterpreted("requantise", (acc(index), m((index[attributes["axis"]],)), z(())))

    def write(self, writer: OnnxWriter, operation: GraphOp) -> None:
        """Append a requantisation together with the convolution or matrix product before it."""
        product, note, graph = writer.graph.makers[operation.inputs[0]], operation.note, writer.graph
        if not isinstance(note, OriginalForm) or product.op not in ("convolve", "multiply"):
            raise Unwritable("a sum that no operator of ONNX requantises")
        if len(graph.readers[operation.inputs[0]]) != 1:
            raise Unwritable("an accumulator that is requantised twice")
        x, xz, w, wz, b = product.inputs
        zeros, y = graph.constants[wz], operation.outputs[0]
        scale = np.array(note.w[:1] if len(set(note.w)) == 1 else note.w, np.float32)
        is_uniform = len(scale) == 1 and bool((zeros == zeros[0]).all())
        weights = (
            w,
            scale.reshape(()) if is_uniform else np.broadcast_to(scale, zeros.shape),
            zeros[0].reshape(()) if is_uniform else zeros,
        )
        of_x = Quantisation(note.x, int(graph.constants[xz]))
        _, _, y_zero = operation.inputs
        of_y = Quantisation(note.y, int(graph.constants[y_zero]))
        bias = graph.constants[b] if note.biased or graph.constants[b].any() else None
        attributes: dict[str, Any] = {}
        operator = note.operator
        if product.op == "convolve":
            attributes = {"kernel_shape": graph.constants[w].shape[2:], **product.attributes_by_name}
        elif bias is not None:
            operator = "Gemm"
        if operator == "Gemm" and len(graph.kinds[x].shape or ()) != 2:
            raise Unwritable("a product with a bias of what is no matrix")
        write_product = _write_qdq_product if note.qdq else write_qlinear_product
        write_product(writer, operator, (x, of_x), weights, bias, (y, of_y), attributes)


QuantisedName = tuple[str, Quantisation]
"""Name of a tensor of bytes, and its quantisation."""
QuantisedWeights = tuple[str, Array, Array]
"""Name of a constant of bytes, its scales and its zero points."""


def _write_qdq_product(
    writer: OnnxWriter, operator: str, x: QuantisedName, w: QuantisedWeights, bias: Array | None, y: QuantisedName,
    attributes: dict[str, Any],
) -> None:  # fmt: skip
    """Append a product as a float operator between DequantizeLinear and QuantizeLinear. bias: int32."""
    inputs = [writer.dequantise(*x), writer.dequantise_constant(*w, 0 if op_spec(operator).windows else 1)]
    if bias is not None:
        steps = np.asarray(np.float32(x[1].scale) * w[1], np.float32)
        name = writer.constant(bias, f"{y[0]}_bias")
        inputs.append(writer.dequantise_constant(name, steps, np.zeros(steps.shape, np.int32), 0))
    writer.float_node(operator, inputs, *y, label=writer.graph.labels.get(y[0]), **attributes)


def write_qlinear_product(
    writer: OnnxWriter, operator: str, x: QuantisedName, w: QuantisedWeights, bias: Array | None, y: QuantisedName,
    attributes: dict[str, Any],
) -> None:  # fmt: skip
    """Append a product as onnxruntime's QLinear operator. bias: int32."""
    of_x = writer.with_scale_and_zero(*x)
    of_w = (w[0], writer.constant(w[1], f"{w[0]}_scale"), writer.constant(w[2], f"{w[0]}_zero_point"))
    of_y = writer.with_scale_and_zero(*y)
    name = writer.constant(bias, f"{y[0]}_bias") if bias is not None else ""
    attributes = {"alpha": 1.0, "transB": 0} if operator == "Gemm" else attributes
    writer.quantised_node(operator, [of_x, of_w], of_y, name, **attributes)


class PlusInt32(TermOperator):
    """plus(a, b): int32, the sum, modulo 2^32; b may be a number."""

    onnx = "Add"
    roles = ("int32", "int32")

    def demands(self, shapes: OperandShapes, attributes: Attributes) -> Iterator[Any]:
        """Yield that both operands have one shape, or that b is a number."""
        if len(shapes[1]):
            yield from super().demands(shapes, attributes)

    def evaluate(self, args: Sequence[Array], attributes: Attributes) -> Array:
        """Add, modulo 2^32."""
        return wrap_int32(args[0].astype(np.int64) + args[1])

    def element(self, args: OperandElements, shapes: OperandShapes, attributes: Attributes, index: Index) -> Element:
        """Return the sum of both elements."""
        return Plus((args[0](index), args[1](index if len(shapes[1]) else ())))


@node_reader("Add")
def _read_add(reader: OnnxReader, node: onnx.NodeProto) -> None:
    """Read an Add of int32 whose second operand is a number or as large as the first; constants become the second
    operand.
    """
    a, b = node.input
    if a in reader.constants:
        a, b = b, a
    if reader.dtype_of(a) != "int32" or (reader.shape(b) not in ((), reader.shape(a)) and reader.array(b).size != 1):
        raise NotInAlgebra
    if reader.shape(b) != reader.shape(a):
        b = reader.constant(reader.array(b).reshape(()), f"{b}_number")
    reader.emit("plus", (a, b), node.output[0])


class MapFunction(TermOperator):
    """map(x, ...): bytes, the function `f` of the bytes at the same index of all operands; also of one float."""

    def evaluate(self, args: Sequence[Array], attributes: Attributes) -> Array:
        """Apply the function."""
        return np.asarray(attributes["f"](*args))

    def element(self, args: OperandElements, shapes: OperandShapes, attributes: Attributes, index: Index) -> Element:
        """Return an unknown function of the elements."""
        return Uninterpreted(f"map {attributes['f']}", tuple(arg(index) for arg in args))

    def write(self, writer: OnnxWriter, operation: GraphOp) -> None:
        """Append a function of single bytes or floats. An Identity is the change of scale of a QLinearConcat that a
        rule removed.
        """
        f: ByteMap | FloatMap = operation["f"]
        y, attributes = operation.outputs[0], dict(f.attributes)
        if isinstance(f, FloatMap):
            writer.node(f.operator, operation.inputs, [y], **attributes)
            return
        operands = list(zip(operation.inputs, f.operands))
        if f.operator == "Identity":
            writer.quantise(writer.dequantise(*operands[0]), y, f.result)
        elif f.qdq:
            inputs = [writer.dequantise(*operand) for operand in operands]
            writer.float_node(f.operator, inputs, y, f.result, **attributes)
        else:
            parts = [writer.with_scale_and_zero(*operand) for operand in operands]
            writer.quantised_node(f.operator, parts, writer.with_scale_and_zero(y, f.result), **attributes)


@operation_reader(*numerics.BINARY)
@operation_reader("Relu", "LeakyRelu", "Sigmoid", "HardSigmoid", "HardSwish", "Tanh", "Identity", quantised_too=False)
def _read_byte_function(reader: OnnxReader, op: QuantisedOperation) -> None:
    """Read a function of single bytes: of one operand, or of two of one shape."""
    shapes = {reader.shape(operand.name) for operand in op.operands}
    dtypes = {reader.dtype_of(operand.name) for operand in op.operands}
    dtype = op.y.zero.dtype.name
    if len(shapes) != 1 or dtypes != {dtype} or not dtypes.intersection(BYTES):
        raise NotInAlgebra
    attributes = tuple(sorted(attributes_of(op.node).items()))
    quantisations = tuple(operand.quantisation for operand in op.operands)
    f = ByteMap(op.operator, attributes, quantisations, op.y.quantisation, dtype, op.qdq)
    reader.emit("map", tuple(operand.name for operand in op.operands), op.y.name, f=f)


@float_reader(*UNARY)
def _read_float_function(reader: OnnxReader, node: onnx.NodeProto) -> None:
    """Read a function of single floats."""
    if len(node.input) != 1 or len(node.output) != 1 or reader.dtype_of(node.output[0]) != FLOAT:
        raise NotInAlgebra
    f = FloatMap(node.op_type, tuple(sorted(attributes_of(node).items())))
    reader.emit("map", (node.input[0],), node.output[0], f=f)


PRODUCTS: dict[str, TermOperator] = {
    "convolve": Convolve(), "multiply": Multiply(), "requantise": Requantise(), "plus": PlusInt32(),
    "map": MapFunction(),
}  # fmt: skip
