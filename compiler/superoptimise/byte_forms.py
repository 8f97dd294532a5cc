"""Readers of operators on bytes: a function for each ONNX operator adds its operations to the graph.

They are registered in reading.READERS and reading.QDQ_READERS. Each raises NotInAlgebra for a node that must stay as it
is. writing.py has the opposite direction.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx

from celosia.compiler import numerics
from celosia.compiler.graph.operands import named_input
from celosia.compiler.program.op_spec import filling
from celosia.compiler.superoptimise.graph import ByteMap, Note, OriginalForm, Quantisation
from celosia.compiler.superoptimise.reading import (
    BYTES,
    QDQ_READERS,
    BytesOf,
    NotInAlgebra,
    OnnxReader,
    QuantisedOperation,
    attributes_of,
    node_reader,
    operation_reader,
    qdq_reader,
)
from celosia.compiler.superoptimise.windows import Averaging


def windows_of(node: onnx.NodeProto, kernel: tuple[int, ...]) -> dict[str, Any]:
    """Return pads, strides and dilations of a node with windows on images. NotInAlgebra for SAME padding, ceil_mode,
    other ranks and the like.
    """
    attributes = attributes_of(node)
    if (
        attributes.get("auto_pad", b"NOTSET") not in (b"NOTSET", b"VALID")
        or attributes.get("ceil_mode")
        or len(kernel) != 2
    ):
        raise NotInAlgebra
    if attributes.get("storage_order") or len(node.output) > 1:
        raise NotInAlgebra
    pads = attributes.get("pads", (0, 0, 0, 0)) if attributes.get("auto_pad", b"NOTSET") == b"NOTSET" else (0, 0, 0, 0)
    if any(pad < 0 for pad in pads):
        raise NotInAlgebra
    return {
        "pads": pads,
        "strides": attributes.get("strides", (1, 1)),
        "dilations": attributes.get("dilations", (1, 1)),
    }


@operation_reader("Conv")
def _read_conv(reader: OnnxReader, op: QuantisedOperation) -> None:
    """Read a Conv or QLinearConv with constant weights."""
    x, w = op.operands
    if w.axis not in (None, 0):
        raise NotInAlgebra
    windows = windows_of(op.node, reader.array(w.name).shape[2:])
    group = attributes_of(op.node).get("group", 1)
    reader.product("convolve", x, w, op.bias, op.y, _original_form(op, x, w), group=group, **windows)


def _original_form(op: QuantisedOperation, x: BytesOf, w: BytesOf) -> OriginalForm:
    """Note how the model wrote a product, for the writer."""
    scales = tuple(float(scale) for scale in w.scale.reshape(-1))
    return OriginalForm(op.operator, op.qdq, x.quantisation.scale, scales, op.y.quantisation.scale, op.bias is not None)


@operation_reader("MatMul")
def _read_matmul(reader: OnnxReader, op: QuantisedOperation) -> None:
    """Read a product with a constant matrix."""
    x, w = op.operands
    if reader.array(w.name).ndim != 2 or w.axis not in (None, 1):
        raise NotInAlgebra
    reader.product("multiply", x, w, None, op.y, _original_form(op, x, w))


@operation_reader("Gemm", quantised_too=False)
def _read_gemm(reader: OnnxReader, op: QuantisedOperation) -> None:
    """Read a Gemm with constant weights, which are transposed here if the node says so."""
    attributes, (x, w) = attributes_of(op.node), op.operands
    if attributes.get("transA") or attributes.get("alpha", 1.0) != 1.0 or attributes.get("beta", 1.0) != 1.0:
        raise NotInAlgebra
    is_transposed = bool(attributes.get("transB"))
    if reader.array(w.name).ndim != 2 or w.axis not in (None, 0 if is_transposed else 1):
        raise NotInAlgebra
    if is_transposed:
        w = BytesOf(reader.constant(reader.array(w.name).T, f"{w.name}_turned"), w.scale, w.zero)
    reader.product("multiply", x, w, op.bias, op.y, _original_form(op, x, w))


@operation_reader(*numerics.BINARY)
@operation_reader("Relu", "LeakyRelu", "Sigmoid", "HardSigmoid", "HardSwish", "Tanh", "Identity", quantised_too=False)
def _read_function(reader: OnnxReader, op: QuantisedOperation) -> None:
    """Read a function of single bytes: of one operand, or of two of one shape."""
    shapes = {reader.shape(operand.name) for operand in op.operands}
    dtypes = {reader.dtype_of(operand.name) for operand in op.operands}
    dtype = op.y.zero.dtype.name
    if len(shapes) != 1 or dtypes != {dtype} or not dtypes.intersection(BYTES):
        raise NotInAlgebra
    attributes = tuple(sorted(attributes_of(op.node).items()))
    f = ByteMap(
        op.operator,
        attributes,
        tuple(operand.quantisation for operand in op.operands),
        op.y.quantisation,
        dtype,
        op.qdq,
    )
    reader.emit("map", tuple(operand.name for operand in op.operands), op.y.name, f=f)


@operation_reader("Concat")
def _read_concat(reader: OnnxReader, op: QuantisedOperation) -> None:
    """Read a Concat: a change of scale for each part that needs one, and the bytes joined."""
    y, dtype = op.y, op.y.zero.dtype.name
    if any(reader.dtype_of(part.name) != dtype for part in op.operands):
        raise NotInAlgebra
    names = []
    for number, part in enumerate(op.operands):
        f = ByteMap("Identity", (), (part.quantisation,), y.quantisation, dtype, op.qdq)
        is_same = part.quantisation == y.quantisation
        names.append(part.name if is_same else reader.emit("map", (part.name,), f"{y.name}_part{number}", f=f))
    axis = attributes_of(op.node)["axis"] % len(reader.shape(op.operands[0].name))
    _emit_concats(
        reader, names, y.name, y.quantisation if op.qdq else OriginalForm(op.operator, False, 0, (), 0, False), axis
    )


def _emit_concats(reader: OnnxReader, names: list[str], y: str, note: Note, axis: int) -> None:
    """Write a Concat of several parts as nested ones of two, as rules know only these."""
    if len(names) < 2:
        raise NotInAlgebra
    joined = names[0]
    for number, name in enumerate(names[1:], 1):
        output = y if number == len(names) - 1 else f"{y}_upto{number}"
        joined = reader.emit("concat", (joined, name), output, note, axis=axis)


@qdq_reader("MaxPool")
def _read_qdq_max_pool(reader: OnnxReader, node: onnx.NodeProto, y: BytesOf) -> None:
    """Read a MaxPool with QDQ around it."""
    x = reader.dequantised(node.input[0])
    _require_same_quantisation(x, y)
    _emit_max_pool(reader, node, x.name, y.name, y.quantisation)


def _require_same_quantisation(x: BytesOf, y: BytesOf) -> None:
    """Raise NotInAlgebra unless operand and result have the same scale, zero point and type."""
    if x.quantisation != y.quantisation or x.zero.dtype != y.zero.dtype:
        raise NotInAlgebra


def _emit_max_pool(reader: OnnxReader, node: onnx.NodeProto, x: str, y: str, note: Quantisation | None) -> None:
    """Add a MaxPool of bytes."""
    kernel = attributes_of(node)["kernel_shape"]
    windows = windows_of(node, kernel)
    if reader.dtype_of(x) not in BYTES or any(pad >= kernel[i % 2] for i, pad in enumerate(windows["pads"])):
        raise NotInAlgebra
    reader.emit("largest", (x,), y, note, kernel=kernel, **windows)


@node_reader("MaxPool")
def _read_max_pool(reader: OnnxReader, node: onnx.NodeProto) -> None:
    """Read a MaxPool whose operand is bytes."""
    _emit_max_pool(reader, node, node.input[0], node.output[0], None)


@operation_reader("AveragePool")
def _read_average_pool(reader: OnnxReader, op: QuantisedOperation) -> None:
    """Read an AveragePool or QLinearAveragePool of images."""
    attributes, (x,), y = attributes_of(op.node), op.operands, op.y
    if attributes.get("channels_last"):
        raise NotInAlgebra
    kernel, windows = attributes["kernel_shape"], windows_of(op.node, attributes["kernel_shape"])
    f = Averaging(x.quantisation, y.quantisation, y.zero.dtype.name, op.qdq)
    if reader.dtype_of(x.name) != f.dtype or any(pad >= kernel[i % 2] for i, pad in enumerate(windows["pads"])):
        raise NotInAlgebra
    if windows["dilations"] != (1, 1):
        raise NotInAlgebra
    counted = bool(attributes.get("count_include_pad")) or not any(windows["pads"])
    zero = reader.constant(x.zero.reshape(()), f"{y.name}_xz")
    reader.emit("average", (x.name, zero), y.name, kernel=kernel, counted=counted, f=f, **windows)


def _emit_movement(
    reader: OnnxReader, node: onnx.NodeProto, x: str, outputs: list[str], note: Quantisation | None
) -> None:
    """Add the operations for an operator that moves bytes."""
    if reader.dtype_of(x) not in reader.moved_dtypes:
        raise NotInAlgebra
    _MOVEMENT_READERS[node.op_type](reader, node, x, outputs, note)


def _read_qdq_movement(reader: OnnxReader, node: onnx.NodeProto, y: BytesOf) -> None:
    """Read an operator that moves bytes with QDQ around it."""
    x = reader.dequantised(node.input[0])
    _require_same_quantisation(x, y)
    if len(node.output) != 1:
        raise NotInAlgebra
    _emit_movement(reader, node, x.name, [y.name], y.quantisation)


MovementReader = Callable[[OnnxReader, onnx.NodeProto, str, list[str], Quantisation | None], None]
"""Adds the operations for an operator that moves bytes: (reader, node, operand, results, quantisation around it)."""
_MOVEMENT_READERS: dict[str, MovementReader] = {}
"""Readers of operators that move bytes and compute nothing, by ONNX operator."""
_reads_movement = filling(_MOVEMENT_READERS)


@_reads_movement("Transpose")
def _emit_transpose(
    reader: OnnxReader, node: onnx.NodeProto, x: str, outputs: list[str], note: Quantisation | None
) -> None:
    """Add a Transpose."""
    rank = len(reader.shape(x))
    reader.emit("transpose", (x,), outputs[0], note, perm=attributes_of(node).get("perm", tuple(reversed(range(rank)))))


@_reads_movement("Reshape", "Flatten", "Squeeze", "Unsqueeze")
def _emit_reshape(
    reader: OnnxReader, node: onnx.NodeProto, x: str, outputs: list[str], note: Quantisation | None
) -> None:
    """Add a reshape for any operator that changes the shape alone."""
    reader.emit("reshape", (x,), outputs[0], note, shape=reader.shape(node.output[0]))


@_reads_movement("Slice")
def _emit_slice(
    reader: OnnxReader, node: onnx.NodeProto, x: str, outputs: list[str], note: Quantisation | None
) -> None:
    """Add a Slice along one axis with step 1."""
    names = {name: named_input(node, name) for name in ("starts", "ends", "axes", "steps")}
    attributes = {name: reader.array(value).reshape(-1).tolist() for name, value in names.items() if value}
    if (
        len(attributes.get("starts", ())) != 1
        or len(attributes.get("ends", ())) != 1
        or attributes.get("steps", [1]) != [1]
    ):
        raise NotInAlgebra
    axis = attributes.get("axes", [0])[0] % len(reader.shape(x))
    start, stop, _ = slice(attributes["starts"][0], attributes["ends"][0]).indices(reader.shape(x)[axis])
    reader.emit("slice", (x,), outputs[0], note, axis=axis, start=start, stop=stop)


@_reads_movement("Split")
def _emit_split(
    reader: OnnxReader, node: onnx.NodeProto, x: str, outputs: list[str], note: Quantisation | None
) -> None:
    """Add a Slice for each result of a Split."""
    axis, begin = attributes_of(node).get("axis", 0) % len(reader.shape(x)), 0
    for name in outputs:
        stop = begin + reader.shape(name)[axis]
        reader.emit("slice", (x,), name, note, axis=axis, start=begin, stop=stop)
        begin = stop


@node_reader(*_MOVEMENT_READERS)
def _read_movement(reader: OnnxReader, node: onnx.NodeProto) -> None:
    """Read an operator that moves bytes without QDQ."""
    _emit_movement(reader, node, node.input[0], list(node.output), None)


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


@qdq_reader("Pad")
def _read_pad(reader: OnnxReader, node: onnx.NodeProto, y: BytesOf) -> None:
    """Read padding with real zeros, whose byte is the zero point."""
    x, attributes = reader.dequantised(node.input[0]), attributes_of(node)
    _require_same_quantisation(x, y)
    fill = named_input(node, "constant_value")
    value = reader.array(fill).item() if fill else 0.0
    if attributes.get("mode", b"constant") != b"constant" or value or named_input(node, "axes"):
        raise NotInAlgebra
    pads = tuple(int(pad) for pad in reader.array(named_input(node, "pads")).reshape(-1))
    if min(pads) < 0:
        raise NotInAlgebra
    zero = reader.constant(y.zero.reshape(()), f"{y.name}_zero")
    reader.emit("pad", (x.name, zero), y.name, y.quantisation, pads=pads)


@node_reader("Concat")
def _read_bytes_concat(reader: OnnxReader, node: onnx.NodeProto) -> None:
    """Read a Concat of bytes without QDQ."""
    if any(reader.dtype_of(name) not in reader.moved_dtypes for name in node.input):
        raise NotInAlgebra
    axis = attributes_of(node)["axis"] % len(reader.shape(node.input[0]))
    _emit_concats(reader, list(node.input), node.output[0], None, axis)


QDQ_READERS.update(dict.fromkeys((name for name in _MOVEMENT_READERS if name != "Split"), _read_qdq_movement))
ByteReader = OnnxReader
"""The reader that knows the operators of this file. Importing it from here ensures that they are registered."""
