"""Readers and writers of the operators that only fast-math's rules name."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx

from celosia.compiler.graph.operands import named_input
from celosia.compiler.program.op_spec import filling
from celosia.compiler.superoptimise.byte_forms import windows_of
from celosia.compiler.superoptimise.float_forms import FLOAT_READERS, FloatReader
from celosia.compiler.superoptimise.graph import ONNX_NAMES, Array, GraphOp
from celosia.compiler.superoptimise.reading import NodeReader, NotInAlgebra, OnnxReader, attributes_of
from celosia.compiler.superoptimise.writing import WRITERS, OnnxWriter

_REAL_READERS: dict[str, NodeReader] = {}
_reads = filling(_REAL_READERS)
_writes = filling(WRITERS)


@_reads("Add", "Mul", "Sub")
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


@_reads("Gemm")
def _read_gemm(reader: OnnxReader, node: onnx.NodeProto) -> None:
    """Read a Gemm with constant weights as a product and the addition of its bias."""
    attributes = attributes_of(node)
    if attributes.get("transA") or attributes.get("alpha", 1.0) != 1.0 or attributes.get("beta", 1.0) != 1.0:
        raise NotInAlgebra
    y, w = node.output[0], reader.array(node.input[1])
    name = reader.constant(w.T, f"{node.input[1]}_turned") if attributes.get("transB") else node.input[1]
    if not (bias := named_input(node, "c")):
        reader.emit("float_multiply", (node.input[0], name), y)
        return
    product = reader.emit("float_multiply", (node.input[0], name), f"{y}_product")
    row, axis = _values_along_axis(reader.array(bias), (reader.shape(node.input[0])[0], reader.shape(name)[1]))
    if axis != 1:
        raise NotInAlgebra
    reader.emit("real_shift", (product, reader.constant(row, f"{y}_row")), y, axis=1)


@_reads("AveragePool")
def _read_average_pool(reader: OnnxReader, node: onnx.NodeProto) -> None:
    """Read an AveragePool of images."""
    attributes = attributes_of(node)
    kernel, windows = attributes["kernel_shape"], windows_of(node, attributes["kernel_shape"])
    if windows["dilations"] != (1, 1) or any(pad >= kernel[place % 2] for place, pad in enumerate(windows["pads"])):
        raise NotInAlgebra
    counted = bool(attributes.get("count_include_pad")) or not any(windows["pads"])
    reader.emit("real_average", (node.input[0],), node.output[0], kernel=kernel, counted=counted, **windows)


@_reads("BatchNormalization")
def _read_batch_normalisation(reader: OnnxReader, node: onnx.NodeProto) -> None:
    """Read a BatchNormalization of images with constant parameters."""
    attributes = attributes_of(node)
    if attributes.get("training_mode") or len(node.output) > 1 or len(reader.shape(node.input[0])) != 4:
        raise NotInAlgebra
    for name in node.input[1:]:
        reader.array(name)
    epsilon = reader.constant(np.float32(attributes.get("epsilon", 1e-5)), f"{node.output[0]}_epsilon")
    reader.emit("real_normalised", (*node.input, epsilon), node.output[0])


@_reads("Pad")
def _read_pad(reader: OnnxReader, node: onnx.NodeProto) -> None:
    """Read padding with zeros."""
    fill = named_input(node, "constant_value")
    value = reader.array(fill).item() if fill else 0.0
    if attributes_of(node).get("mode", b"constant") != b"constant" or value or named_input(node, "axes"):
        raise NotInAlgebra
    pads = tuple(int(pad) for pad in reader.array(named_input(node, "pads")).reshape(-1))
    if min(pads) < 0:
        raise NotInAlgebra
    reader.emit("real_pad", (node.input[0],), node.output[0], pads=pads)


class RealReader(FloatReader):
    """A reader that knows sums, scales and averages of floats beside what FloatReader knows."""

    readers = {**FLOAT_READERS, **_REAL_READERS}


@_writes("real_scale", "real_shift")
def _write_scale_or_shift(writer: OnnxWriter, operation: GraphOp) -> None:
    """Write a Mul or Add with a constant; a bias behind a product becomes a Gemm where the writer has absorbed the
    product.
    """
    x, y = operation.inputs[0], operation.outputs[0]
    if x in writer.absorbed:
        writer.node("Gemm", [*writer.graph.makers[x].inputs, operation.inputs[1]], [y])
        return
    writer.node(ONNX_NAMES[operation.op], [x, _broadcastable_constant(writer, operation)], [y])


def _broadcastable_constant(writer: OnnxWriter, operation: GraphOp) -> str:
    """Return a constant with a number for each position of `axis`, in a shape that ONNX broadcasts along that axis."""
    row, axis = writer.graph.constants[operation.inputs[1]], operation["axis"]
    behind = len(writer.graph.kinds[operation.outputs[0]].shape or ()) - 1 - axis
    return writer.constant(row.reshape(-1, *(1,) * behind), f"{operation.outputs[0]}_row")


@_writes("real_average")
def _write_average(writer: OnnxWriter, operation: GraphOp) -> None:
    """Write an AveragePool."""
    attributes: dict[str, Any] = {name: operation[name] for name in ("pads", "strides")}
    attributes |= {"kernel_shape": operation["kernel"], "count_include_pad": int(operation["counted"])}
    writer.node(ONNX_NAMES[operation.op], operation.inputs, operation.outputs, **attributes)


@_writes("real_normalised")
def _write_batch_normalisation(writer: OnnxWriter, operation: GraphOp) -> None:
    """Write a BatchNormalization."""
    *inputs, epsilon = operation.inputs
    value = float(writer.graph.constants[epsilon])
    writer.node(ONNX_NAMES[operation.op], inputs, operation.outputs, epsilon=value)


@_writes("real_pad")
def _write_pad(writer: OnnxWriter, operation: GraphOp) -> None:
    """Write a Pad with zeros."""
    pads = writer.constant(np.array(operation["pads"], np.int64), f"{operation.outputs[0]}_pads")
    writer.node("Pad", [operation.inputs[0], pads], operation.outputs)
