"""Read and write operators that fast-math's rules name: of models whose floats count as real numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx

from celosia.compiler.program.traits import filling
from celosia.compiler.superoptimise.float_forms import FLOAT_READERS, FloatReader
from celosia.compiler.superoptimise.forms import windows_of
from celosia.compiler.superoptimise.graph import Array, GraphOp
from celosia.compiler.superoptimise.reading import NodeReader, NotOurs, OnnxReader, attributes_of
from celosia.compiler.superoptimise.writing import WRITERS, OnnxWriter

_READERS: dict[str, NodeReader] = {}
_reads = filling(_READERS)
_writes = filling(WRITERS)


@_reads("Add", "Mul", "Sub")
def _of_two(reader: OnnxReader, node: onnx.NodeProto) -> None:
    """Read an Add of two tensors of one shape, or of one and a number for each place of an axis."""
    a, b = node.input
    if a in reader.constants and node.op_type != "Sub":
        a, b = b, a
    if b not in reader.constants:
        if node.op_type != "Add" or reader.shape(a) != reader.shape(b) or a in reader.constants:
            raise NotOurs
        reader.emit("real_plus", (a, b), node.output[0])
        return
    row, axis = _row(reader.array(b), reader.shape(a))
    op = "real_scale" if node.op_type == "Mul" else "real_shift"
    name = reader.constant(-row if node.op_type == "Sub" else row, f"{node.output[0]}_row")
    reader.emit(op, (a, name), node.output[0], axis=axis)


def _row(array: Array, shape: tuple[int, ...]) -> tuple[Array, int]:
    """The numbers of a constant along the one axis of `shape` along which they differ. NotOurs."""
    wide = (1,) * (len(shape) - array.ndim) + array.shape
    along = [axis for axis, size in enumerate(wide) if size != 1]
    if len(wide) != len(shape) or len(along) > 1 or len(shape) < 2:
        raise NotOurs
    axis = along[0] if along else 1 if len(shape) == 4 else len(shape) - 1
    if wide[axis] not in (1, shape[axis]):
        raise NotOurs
    return np.broadcast_to(array.reshape(-1), (shape[axis],)), axis


@_reads("Gemm")
def _gemm(reader: OnnxReader, node: onnx.NodeProto) -> None:
    given = attributes_of(node)
    if given.get("transA") or given.get("alpha", 1.0) != 1.0 or given.get("beta", 1.0) != 1.0:
        raise NotOurs
    y, w = node.output[0], reader.array(node.input[1])
    name = reader.constant(w.T, f"{node.input[1]}_turned") if given.get("transB") else node.input[1]
    if len(node.input) < 3 or not node.input[2]:
        reader.emit("float_multiply", (node.input[0], name), y)
        return
    made = reader.emit("float_multiply", (node.input[0], name), f"{y}_product")
    row, axis = _row(reader.array(node.input[2]), (reader.shape(node.input[0])[0], reader.shape(name)[1]))
    if axis != 1:
        raise NotOurs
    reader.emit("real_shift", (made, reader.constant(row, f"{y}_row")), y, axis=1)


@_reads("AveragePool")
def _average(reader: OnnxReader, node: onnx.NodeProto) -> None:
    given = attributes_of(node)
    kernel, windows = given["kernel_shape"], windows_of(node, given["kernel_shape"])
    if windows["dilations"] != (1, 1) or any(pad >= kernel[place % 2] for place, pad in enumerate(windows["pads"])):
        raise NotOurs
    counted = bool(given.get("count_include_pad")) or not any(windows["pads"])
    reader.emit("real_average", (node.input[0],), node.output[0], kernel=kernel, counted=counted, **windows)


@_reads("BatchNormalization")
def _normalised(reader: OnnxReader, node: onnx.NodeProto) -> None:
    given = attributes_of(node)
    if given.get("training_mode") or len(node.output) > 1 or len(reader.shape(node.input[0])) != 4:
        raise NotOurs
    for name in node.input[1:]:
        reader.array(name)
    epsilon = reader.constant(np.float32(given.get("epsilon", 1e-5)), f"{node.output[0]}_epsilon")
    reader.emit("real_normalised", (*node.input, epsilon), node.output[0])


@_reads("Pad")
def _pad(reader: OnnxReader, node: onnx.NodeProto) -> None:
    value = reader.array(node.input[2]).item() if len(node.input) > 2 and node.input[2] else 0.0
    if attributes_of(node).get("mode", b"constant") != b"constant" or value or len(node.input) > 3:
        raise NotOurs
    pads = tuple(int(pad) for pad in reader.array(node.input[1]).reshape(-1))
    if min(pads) < 0:
        raise NotOurs
    reader.emit("real_pad", (node.input[0],), node.output[0], pads=pads)


class RealReader(FloatReader):
    """A reader that knows sums, scales and averages of floats, too."""

    readers = {**FLOAT_READERS, **_READERS}


@_writes("real_plus")
def _write_sum(writer: OnnxWriter, each: GraphOp) -> None:
    writer.node("Add", each.inputs, each.outputs)


@_writes("real_scale")
def _write_scale(writer: OnnxWriter, each: GraphOp) -> None:
    writer.node("Mul", [each.inputs[0], _column(writer, each)], each.outputs)


@_writes("real_shift")
def _write_shift(writer: OnnxWriter, each: GraphOp) -> None:
    x, y = each.inputs[0], each.outputs[0]
    if x in writer.absorbed:
        writer.node("Gemm", [*writer.graph.makers[x].inputs, each.inputs[1]], [y])
        return
    writer.node("Add", [x, _column(writer, each)], [y])


def _column(writer: OnnxWriter, each: GraphOp) -> str:
    """A number for each place of an axis, in a shape that ONNX takes along it."""
    row, axis = writer.graph.constants[each.inputs[1]], each["axis"]
    behind = len(writer.graph.kinds[each.outputs[0]].shape or ()) - 1 - axis
    return writer.constant(row.reshape(-1, *(1,) * behind), f"{each.outputs[0]}_row")


@_writes("real_average")
def _write_average(writer: OnnxWriter, each: GraphOp) -> None:
    given: dict[str, Any] = {name: each[name] for name in ("pads", "strides")}
    writer.node("AveragePool", each.inputs, each.outputs, kernel_shape=each["kernel"],
                count_include_pad=int(each["counted"]), **given)  # fmt: skip


@_writes("real_normalised")
def _write_normalised(writer: OnnxWriter, each: GraphOp) -> None:
    *inputs, epsilon = each.inputs
    value = float(writer.graph.constants[epsilon])
    writer.node("BatchNormalization", inputs, each.outputs, epsilon=value)


@_writes("real_pad")
def _write_pad(writer: OnnxWriter, each: GraphOp) -> None:
    pads = writer.constant(np.array(each["pads"], np.int64), f"{each.outputs[0]}_pads")
    writer.node("Pad", [each.inputs[0], pads], each.outputs)
