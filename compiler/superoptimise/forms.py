"""Read operators of bytes: their forms in ONNX and in the algebra; a reader for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx

from celosia.compiler import numerics
from celosia.compiler.graph.operands import named_input
from celosia.compiler.program.op_spec import filling
from celosia.compiler.superoptimise.graph import ByteMap, Meant, Note, Written
from celosia.compiler.superoptimise.reading import (
    BYTES,
    QDQ_READERS,
    BytesOf,
    NotOurs,
    OnnxReader,
    QuantisedOperation,
    attributes_of,
    node_reader,
    operation_reader,
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


@operation_reader("Conv")
def _conv(reader: OnnxReader, op: QuantisedOperation) -> None:
    x, w = op.operands
    if w.axis not in (None, 0):
        raise NotOurs
    windows = windows_of(op.node, reader.array(w.name).shape[2:])
    group = attributes_of(op.node).get("group", 1)
    reader.product("convolve", x, w, op.bias, op.y, _written(op, x, w), group=group, **windows)


def _written(op: QuantisedOperation, x: BytesOf, w: BytesOf) -> Written:
    scales = tuple(float(scale) for scale in w.scale.reshape(-1))
    return Written(op.operator, op.qdq, x.meant.scale, scales, op.y.meant.scale, op.bias is not None)


@operation_reader("MatMul")
def _matmul(reader: OnnxReader, op: QuantisedOperation) -> None:
    x, w = op.operands
    if reader.array(w.name).ndim != 2 or w.axis not in (None, 1):
        raise NotOurs
    reader.product("multiply", x, w, None, op.y, _written(op, x, w))


@operation_reader("Gemm", quantised_too=False)
def _gemm(reader: OnnxReader, op: QuantisedOperation) -> None:
    given, (x, w) = attributes_of(op.node), op.operands
    if given.get("transA") or given.get("alpha", 1.0) != 1.0 or given.get("beta", 1.0) != 1.0:
        raise NotOurs
    turned = bool(given.get("transB"))
    if reader.array(w.name).ndim != 2 or w.axis not in (None, 0 if turned else 1):
        raise NotOurs
    if turned:
        w = BytesOf(reader.constant(reader.array(w.name).T, f"{w.name}_turned"), w.scale, w.zero)
    reader.product("multiply", x, w, op.bias, op.y, _written(op, x, w))


@operation_reader(*numerics.BINARY)
@operation_reader("Relu", "LeakyRelu", "Sigmoid", "HardSigmoid", "HardSwish", "Tanh", "Identity", quantised_too=False)
def _map(reader: OnnxReader, op: QuantisedOperation) -> None:
    shapes = {reader.shape(operand.name) for operand in op.operands}
    dtypes = {reader.dtype_of(operand.name) for operand in op.operands}
    dtype = op.y.zero.dtype.name
    if len(shapes) != 1 or dtypes != {dtype} or not dtypes.intersection(BYTES):
        raise NotOurs
    given = tuple(sorted(attributes_of(op.node).items()))
    f = ByteMap(op.operator, given, tuple(operand.meant for operand in op.operands), op.y.meant, dtype, op.qdq)
    reader.emit("map", tuple(operand.name for operand in op.operands), op.y.name, f=f)


@operation_reader("Concat")
def _concat(reader: OnnxReader, op: QuantisedOperation) -> None:
    """A change of scale of each part that needs one, and the bytes put together."""
    y, dtype = op.y, op.y.zero.dtype.name
    if any(reader.dtype_of(part.name) != dtype for part in op.operands):
        raise NotOurs
    names = []
    for number, part in enumerate(op.operands):
        f = ByteMap("Identity", (), (part.meant,), y.meant, dtype, op.qdq)
        same = part.meant == y.meant
        names.append(part.name if same else reader.emit("map", (part.name,), f"{y.name}_part{number}", f=f))
    axis = attributes_of(op.node)["axis"] % len(reader.shape(op.operands[0].name))
    _pairwise(reader, names, y.name, y.meant if op.qdq else Written(op.operator, False, 0, (), 0, False), axis)


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


@operation_reader("AveragePool")
def _average(reader: OnnxReader, op: QuantisedOperation) -> None:
    given, (x,), y = attributes_of(op.node), op.operands, op.y
    if given.get("channels_last"):
        raise NotOurs
    kernel, windows = given["kernel_shape"], windows_of(op.node, given["kernel_shape"])
    f = Averaging(x.meant, y.meant, y.zero.dtype.name, op.qdq)
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
    names = {name: named_input(node, name) for name in ("starts", "ends", "axes", "steps")}
    given = {name: reader.array(value).reshape(-1).tolist() for name, value in names.items() if value}
    if len(given.get("starts", ())) != 1 or len(given.get("ends", ())) != 1 or given.get("steps", [1]) != [1]:
        raise NotOurs
    axis = given.get("axes", [0])[0] % len(reader.shape(x))
    start, stop, _ = slice(given["starts"][0], given["ends"][0]).indices(reader.shape(x)[axis])
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
    """Read a sum of int32 whose second operand is a number or as large as the first; constants come second."""
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
    """Read padding with zeros, whose byte is the zero point."""
    x, given = reader.dequantised(node.input[0]), attributes_of(node)
    _require_same(x, y)
    fill = named_input(node, "constant_value")
    value = reader.array(fill).item() if fill else 0.0
    if given.get("mode", b"constant") != b"constant" or value or named_input(node, "axes"):
        raise NotOurs
    pads = tuple(int(pad) for pad in reader.array(named_input(node, "pads")).reshape(-1))
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
