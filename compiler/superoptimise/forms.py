"""Read operators of bytes: their forms in ONNX and in the algebra; a reader for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx

from celosia.compiler.program.traits import filling
from celosia.compiler.superoptimise.graph import Array, ByteMap, Meant, Note, Written
from celosia.compiler.superoptimise.reading import (
    BYTES,
    QDQ_READERS,
    BytesOf,
    NotOurs,
    OnnxReader,
    attributes_of,
    node_reader,
    qdq_reader,
)
from celosia.compiler.superoptimise.windows import Averaging


def windows_of(node: onnx.NodeProto, kernel: tuple[int, ...]) -> dict[str, Any]:
    """Attributes of windows on images. NotOurs for other ones."""
    given = attributes_of(node)
    if given.get("auto_pad", b"NOTSET") not in (b"NOTSET", b"VALID") or given.get("ceil_mode") or len(kernel) != 2:
        raise NotOurs
    if given.get("storage_order") or len(node.output) > 1:
        raise NotOurs
    pads = given.get("pads", (0, 0, 0, 0)) if given.get("auto_pad", b"NOTSET") == b"NOTSET" else (0, 0, 0, 0)
    if any(pad < 0 for pad in pads):
        raise NotOurs
    return {"pads": pads, "strides": given.get("strides", (1, 1)), "dilations": given.get("dilations", (1, 1))}


@qdq_reader("Conv")
def _conv(reader: OnnxReader, node: onnx.NodeProto, y: BytesOf) -> None:
    x, w = reader.dequantised(node.input[0]), reader.dequantised(node.input[1])
    if w.scale.size > 1 and reader.axis_of(node.input[1]) != 0:
        raise NotOurs
    bias = reader.bias(node.input[2] if len(node.input) > 2 else "", x, w)
    _convolution(reader, node, x, w, bias, y, True)


@node_reader("QLinearConv")
def _qlinear_conv(reader: OnnxReader, node: onnx.NodeProto) -> None:
    x, w = reader.bytes_of(*node.input[:3]), reader.bytes_of(*node.input[3:6])
    y = BytesOf(node.output[0], reader.array(node.input[6]), reader.array(node.input[7]))
    bias = reader.array(node.input[8]) if len(node.input) > 8 and node.input[8] else None
    _convolution(reader, node, x, w, bias, y, False)


def _convolution(
    reader: OnnxReader, node: onnx.NodeProto, x: BytesOf, w: BytesOf, bias: Array | None, y: BytesOf, qdq: bool
) -> None:
    kernel = reader.array(w.name).shape[2:]
    written = _written("Conv", qdq, x, w, y, bias)
    windows = windows_of(node, kernel)
    reader.product("convolve", x, w, bias, y, written, group=attributes_of(node).get("group", 1), **windows)


def _written(operator: str, qdq: bool, x: BytesOf, w: BytesOf, y: BytesOf, bias: Array | None) -> Written:
    scales = tuple(float(each) for each in w.scale.reshape(-1))
    return Written(operator, qdq, x.meant.scale, scales, y.meant.scale, bias is not None)


@qdq_reader("MatMul")
def _matmul(reader: OnnxReader, node: onnx.NodeProto, y: BytesOf) -> None:
    x, w = reader.dequantised(node.input[0]), reader.dequantised(node.input[1])
    if reader.array(w.name).ndim != 2 or (w.scale.size > 1 and reader.axis_of(node.input[1]) != 1):
        raise NotOurs
    reader.product("multiply", x, w, None, y, _written("MatMul", True, x, w, y, None))


@node_reader("QLinearMatMul")
def _qlinear_matmul(reader: OnnxReader, node: onnx.NodeProto) -> None:
    x, w = reader.bytes_of(*node.input[:3]), reader.bytes_of(*node.input[3:6])
    y = BytesOf(node.output[0], reader.array(node.input[6]), reader.array(node.input[7]))
    if reader.array(w.name).ndim != 2:
        raise NotOurs
    reader.product("multiply", x, w, None, y, _written("MatMul", False, x, w, y, None))


@qdq_reader("Gemm")
def _gemm(reader: OnnxReader, node: onnx.NodeProto, y: BytesOf) -> None:
    given = attributes_of(node)
    if given.get("transA") or given.get("alpha", 1.0) != 1.0 or given.get("beta", 1.0) != 1.0:
        raise NotOurs
    x, w = reader.dequantised(node.input[0]), reader.dequantised(node.input[1])
    turned = bool(given.get("transB"))
    if reader.array(w.name).ndim != 2 or (w.scale.size > 1 and reader.axis_of(node.input[1]) != (0 if turned else 1)):
        raise NotOurs
    bias = reader.bias(node.input[2] if len(node.input) > 2 else "", x, w)
    if turned:
        w = BytesOf(reader.constant(reader.array(w.name).T, f"{w.name}_turned"), w.scale, w.zero)
    reader.product("multiply", x, w, bias, y, _written("Gemm", True, x, w, y, bias))


@qdq_reader("Add", "Mul")
def _binary(reader: OnnxReader, node: onnx.NodeProto, y: BytesOf) -> None:
    a, b = reader.dequantised(node.input[0]), reader.dequantised(node.input[1])
    _map(reader, node, (a, b), y, True, node.op_type)


@node_reader("QLinearAdd", "QLinearMul")
def _qlinear_binary(reader: OnnxReader, node: onnx.NodeProto) -> None:
    a, b = reader.bytes_of(*node.input[:3]), reader.bytes_of(*node.input[3:6])
    y = BytesOf(node.output[0], reader.array(node.input[6]), reader.array(node.input[7]))
    _map(reader, node, (a, b), y, False, node.op_type.removeprefix("QLinear"))


def _map(
    reader: OnnxReader, node: onnx.NodeProto, operands: tuple[BytesOf, ...], y: BytesOf, qdq: bool, operator: str
) -> None:
    shapes = {reader.shape(each.name) for each in operands}
    dtypes = {reader.dtype_of(each.name) for each in operands}
    if len(shapes) != 1 or dtypes != {y.zero.dtype.name} or not dtypes.intersection(BYTES):
        raise NotOurs
    given = tuple(sorted(attributes_of(node).items()))
    f = ByteMap(operator, given, tuple(each.meant for each in operands), y.meant, y.zero.dtype.name, qdq)
    reader.emit("map", tuple(each.name for each in operands), y.name, f=f)


@qdq_reader("Relu", "LeakyRelu", "Sigmoid", "HardSigmoid", "HardSwish", "Tanh", "Identity")
def _unary(reader: OnnxReader, node: onnx.NodeProto, y: BytesOf) -> None:
    _map(reader, node, (reader.dequantised(node.input[0]),), y, True, node.op_type)


@qdq_reader("Concat")
def _concat(reader: OnnxReader, node: onnx.NodeProto, y: BytesOf) -> None:
    _joined(reader, node, [reader.dequantised(name) for name in node.input], y, True)


@node_reader("QLinearConcat")
def _qlinear_concat(reader: OnnxReader, node: onnx.NodeProto) -> None:
    y = BytesOf(node.output[0], reader.array(node.input[0]), reader.array(node.input[1]))
    parts = [reader.bytes_of(*node.input[i : i + 3]) for i in range(2, len(node.input), 3)]
    _joined(reader, node, parts, y, False)


def _joined(reader: OnnxReader, node: onnx.NodeProto, parts: list[BytesOf], y: BytesOf, qdq: bool) -> None:
    """A change of scale of each part that needs one, and the bytes put together."""
    dtype = y.zero.dtype.name
    if any(reader.dtype_of(each.name) != dtype for each in parts):
        raise NotOurs
    names = []
    for number, part in enumerate(parts):
        f = ByteMap("Identity", (), (part.meant,), y.meant, dtype, qdq)
        same = part.meant == y.meant
        names.append(part.name if same else reader.emit("map", (part.name,), f"{y.name}_part{number}", f=f))
    axis = attributes_of(node)["axis"] % len(reader.shape(parts[0].name))
    _pairwise(reader, names, y.name, y.meant if qdq else Written("Concat", False, 0, (), 0, False), axis)


def _pairwise(reader: OnnxReader, names: list[str], y: str, note: Note, axis: int) -> None:
    """A Concat of several as one of two in another: rules are of two."""
    if len(names) < 2:
        raise NotOurs
    found = names[0]
    for number, name in enumerate(names[1:], 1):
        made = y if number == len(names) - 1 else f"{y}_upto{number}"
        found = reader.emit("concat", (found, name), made, note, axis=axis)


@qdq_reader("MaxPool")
def _qdq_pool(reader: OnnxReader, node: onnx.NodeProto, y: BytesOf) -> None:
    x = reader.dequantised(node.input[0])
    _require_same(x, y)
    _pool(reader, node, x.name, y.name, y.meant)


def _require_same(x: BytesOf, y: BytesOf) -> None:
    if x.meant != y.meant or x.zero.dtype != y.zero.dtype:
        raise NotOurs


def _pool(reader: OnnxReader, node: onnx.NodeProto, x: str, y: str, note: Meant | None) -> None:
    kernel = attributes_of(node)["kernel_shape"]
    windows = windows_of(node, kernel)
    if reader.dtype_of(x) not in BYTES or any(pad >= kernel[i % 2] for i, pad in enumerate(windows["pads"])):
        raise NotOurs
    reader.emit("largest", (x,), y, note, kernel=kernel, **windows)


@node_reader("MaxPool")
def _bytes_pool(reader: OnnxReader, node: onnx.NodeProto) -> None:
    _pool(reader, node, node.input[0], node.output[0], None)


@qdq_reader("AveragePool")
def _qdq_average(reader: OnnxReader, node: onnx.NodeProto, y: BytesOf) -> None:
    _average(reader, node, reader.dequantised(node.input[0]), y, True)


@node_reader("QLinearAveragePool")
def _qlinear_average(reader: OnnxReader, node: onnx.NodeProto) -> None:
    if attributes_of(node).get("channels_last"):
        raise NotOurs
    y = BytesOf(node.output[0], reader.array(node.input[3]), reader.array(node.input[4]))
    _average(reader, node, reader.bytes_of(*node.input[:3]), y, False)


def _average(reader: OnnxReader, node: onnx.NodeProto, x: BytesOf, y: BytesOf, qdq: bool) -> None:
    given = attributes_of(node)
    kernel, windows = given["kernel_shape"], windows_of(node, given["kernel_shape"])
    f = Averaging(x.meant, y.meant, y.zero.dtype.name, qdq)
    if reader.dtype_of(x.name) != f.dtype or any(pad >= kernel[i % 2] for i, pad in enumerate(windows["pads"])):
        raise NotOurs
    if windows["dilations"] != (1, 1):
        raise NotOurs
    counted = bool(given.get("count_include_pad")) or not any(windows["pads"])
    zero = reader.constant(x.zero.reshape(()), f"{y.name}_xz")
    reader.emit("average", (x.name, zero), y.name, kernel=kernel, counted=counted, f=f, **windows)


def _moves(reader: OnnxReader, node: onnx.NodeProto, x: str, outputs: list[str], note: Meant | None) -> None:
    if reader.dtype_of(x) not in reader.moved:
        raise NotOurs
    _MOVES[node.op_type](reader, node, x, outputs, note)


def _qdq_moves(reader: OnnxReader, node: onnx.NodeProto, y: BytesOf) -> None:
    x = reader.dequantised(node.input[0])
    _require_same(x, y)
    if len(node.output) != 1:
        raise NotOurs
    _moves(reader, node, x.name, [y.name], y.meant)


Mover = Callable[[OnnxReader, onnx.NodeProto, str, list[str], Meant | None], None]
_MOVES: dict[str, Mover] = {}
_mover = filling(_MOVES)


@_mover("Transpose")
def _transpose(reader: OnnxReader, node: onnx.NodeProto, x: str, outputs: list[str], note: Meant | None) -> None:
    rank = len(reader.shape(x))
    reader.emit("transpose", (x,), outputs[0], note, perm=attributes_of(node).get("perm", tuple(reversed(range(rank)))))


@_mover("Reshape", "Flatten", "Squeeze", "Unsqueeze")
def _reshape(reader: OnnxReader, node: onnx.NodeProto, x: str, outputs: list[str], note: Meant | None) -> None:
    reader.emit("reshape", (x,), outputs[0], note, shape=reader.shape(node.output[0]))


@_mover("Slice")
def _slice(reader: OnnxReader, node: onnx.NodeProto, x: str, outputs: list[str], note: Meant | None) -> None:
    given = [reader.array(name).reshape(-1).tolist() for name in node.input[1:] if name]
    if len(given) < 2 or len(given[0]) != 1 or (len(given) > 3 and given[3] != [1]):
        raise NotOurs
    axis = (given[2][0] if len(given) > 2 else 0) % len(reader.shape(x))
    start, stop, _ = slice(given[0][0], given[1][0]).indices(reader.shape(x)[axis])
    reader.emit("slice", (x,), outputs[0], note, axis=axis, start=start, stop=stop)


@_mover("Split")
def _split(reader: OnnxReader, node: onnx.NodeProto, x: str, outputs: list[str], note: Meant | None) -> None:
    axis, begin = attributes_of(node).get("axis", 0) % len(reader.shape(x)), 0
    for name in outputs:
        stop = begin + reader.shape(name)[axis]
        reader.emit("slice", (x,), name, note, axis=axis, start=begin, stop=stop)
        begin = stop


@node_reader(*_MOVES)
def _bytes_moves(reader: OnnxReader, node: onnx.NodeProto) -> None:
    _moves(reader, node, node.input[0], list(node.output), None)


@node_reader("Add")
def _sum(reader: OnnxReader, node: onnx.NodeProto) -> None:
    """Of int32, where the second operand is a number or as large as the first; constants come second."""
    a, b = node.input
    if a in reader.constants:
        a, b = b, a
    if reader.dtype_of(a) != "int32" or (reader.shape(b) not in ((), reader.shape(a)) and reader.array(b).size != 1):
        raise NotOurs
    if reader.shape(b) != reader.shape(a):
        b = reader.constant(reader.array(b).reshape(()), f"{b}_number")
    reader.emit("plus", (a, b), node.output[0])


@qdq_reader("Pad")
def _pad(reader: OnnxReader, node: onnx.NodeProto, y: BytesOf) -> None:
    """With zeros, whose byte is the zero point."""
    x, given = reader.dequantised(node.input[0]), attributes_of(node)
    _require_same(x, y)
    value = reader.array(node.input[2]).item() if len(node.input) > 2 and node.input[2] else 0.0
    if given.get("mode", b"constant") != b"constant" or value or len(node.input) > 3:
        raise NotOurs
    pads = tuple(int(pad) for pad in reader.array(node.input[1]).reshape(-1))
    if min(pads) < 0:
        raise NotOurs
    zero = reader.constant(y.zero.reshape(()), f"{y.name}_zero")
    reader.emit("pad", (x.name, zero), y.name, y.meant, pads=pads)


@node_reader("Concat")
def _bytes_concat(reader: OnnxReader, node: onnx.NodeProto) -> None:
    if any(reader.dtype_of(name) not in reader.moved for name in node.input):
        raise NotOurs
    axis = attributes_of(node)["axis"] % len(reader.shape(node.input[0]))
    _pairwise(reader, list(node.input), node.output[0], None, axis)


QDQ_READERS.update(dict.fromkeys((name for name in _MOVES if name != "Split"), _qdq_moves))
READER = OnnxReader
"""The reader that knows all of these."""
