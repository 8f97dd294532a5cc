"""The algebra back to ONNX, in the form that each operator came in: QDQ, or onnxruntime's QLinear operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from celosia.compiler.program.traits import filling
from celosia.compiler.superoptimise.graph import ONNX, Array, ByteMap, BytesGraph, FloatMap, GraphOp, Meant, Written

MICROSOFT = "com.microsoft"
CONSTANTS_APART = 4
"""Version of ONNX's format from which on constants need not be inputs; those that are can be replaced then."""


class Unwritable(Exception):
    """A graph for which ONNX has no operators; one sentence."""


class OnnxWriter:
    """model: what the graph was read from; all but nodes and constants stays."""

    def __init__(self, graph: BytesGraph, model: onnx.ModelProto) -> None:
        self.graph, self.model = graph, model
        self.constants: dict[str, Array] = {}
        self.taken = {*graph.constants, *graph.kinds, *graph.makers}
        self.nodes: list[onnx.NodeProto] = []
        self.absorbed: set[str] = set()
        self.node_names: set[str] = set()
        self._found: dict[tuple[Any, ...], str] = {}
        self._spread: dict[tuple[str, Meant | None, bytes], str] = {}

    def write(self) -> onnx.ModelProto:
        """The model. Unwritable."""
        for each in self.graph.operations:
            inside = each.op == "concat" and self._whole(each) is not each
            if inside or (each.op == "map" and self._joins_concat(each)) or self._is_in_gemm(each):
                self.absorbed.add(each.outputs[0])
        for each in self.graph.operations:
            if each.outputs[0] not in self.absorbed:
                WRITERS.get(each.op, _unwritable)(self, each)
        made = onnx.ModelProto()
        made.CopyFrom(self.model)
        for field in ("node", "initializer", "value_info"):
            made.graph.ClearField(field)
        made.graph.node.extend(self.nodes)
        self._copy_constants(made)
        there = {name for node in self.nodes for name in node.output}
        made.graph.value_info.extend(info for info in self.model.graph.value_info if info.name in there)
        domains = {opset.domain for opset in made.opset_import}
        if MICROSOFT not in domains and any(node.domain == MICROSOFT for node in self.nodes):
            made.opset_import.append(helper.make_opsetid(MICROSOFT, 1))
        return made

    def _copy_constants(self, made: onnx.ModelProto) -> None:
        from celosia.compiler.superoptimise.reading import read_by

        read = {name for node in self.nodes for name in read_by(node)} | set(self.graph.outputs)
        known = {each.name: each for each in self.model.graph.initializer}
        for name in sorted(read):
            if name in self.constants:
                made.graph.initializer.append(numpy_helper.from_array(self.constants[name], name))
            elif name in known:
                made.graph.initializer.append(known[name])
            elif name in self.graph.constants:
                made.graph.initializer.append(numpy_helper.from_array(np.asarray(self.graph.constants[name]), name))
        for value in [each for each in made.graph.input if each.name in known and each.name not in read]:
            made.graph.input.remove(value)
        if made.ir_version < CONSTANTS_APART:
            given = {value.name for value in made.graph.input}
            made.graph.input.extend(
                helper.make_tensor_value_info(each.name, each.data_type, each.dims)
                for each in made.graph.initializer if each.name not in given
            )  # fmt: skip

    def parts_of(self, each: GraphOp) -> list[str]:
        """What a Concat puts together, those of which it consists that nothing else reads."""
        found = []
        for name in each.inputs:
            maker = self.graph.makers.get(name)
            inside = maker is not None and maker.op == "concat" and self._whole(maker) is not maker
            found += self.parts_of(maker) if inside and maker is not None else [name]
        return found

    def _whole(self, each: GraphOp) -> GraphOp:
        """The Concat that a Concat is a part of."""
        readers = self.graph.readers.get(each.outputs[0], [])
        if len(readers) != 1 or each.outputs[0] in self.graph.outputs or readers[0].op != "concat":
            return each
        (other,) = readers
        alike = other["axis"] == each["axis"] and other.note == each.note and len(set(other.inputs)) == 2
        return self._whole(other) if alike else each

    def _joins_concat(self, each: GraphOp) -> bool:
        """Whether it is the change of scale that the Concat behind it does as it was written."""
        f, y = each["f"], each.outputs[0]
        readers = self.graph.readers.get(y, [])
        if f.operator != "Identity" or y in self.graph.outputs or len(readers) != 1 or readers[0].op != "concat":
            return False
        return len(set(readers[0].inputs)) == 2 and self.scale_of_concat(self._whole(readers[0])) == f.result

    def _is_in_gemm(self, each: GraphOp) -> bool:
        """Whether it is a product of matrices that is read by what adds a bias alone."""
        readers = self.graph.readers.get(each.outputs[0], [])
        if each.op != "float_multiply" or each.outputs[0] in self.graph.outputs or len(readers) != 1:
            return False
        alone = readers[0].op == "real_shift" and readers[0]["axis"] == 1
        return alone and len(self.graph.kinds[each.outputs[0]].shape or ()) == 2

    def scale_of_concat(self, each: GraphOp) -> Meant | None:
        """That of its result, where QDQ or QLinearConcat say one. None where its parts change to different ones."""
        found = set()
        for name in self.parts_of(each):
            maker = self.graph.makers.get(name)
            if maker is not None and maker.op == "map" and maker["f"].operator == "Identity":
                found.add(maker["f"].result)
        if len(found) == 1:
            return next(iter(found)) if each.note is not None else None
        return each.note if isinstance(each.note, Meant) and not found else None

    # Names -----------------------------------------------------------------------------------------------------------

    def name(self, near: str) -> str:
        """One that nothing has."""
        found, number = near, 0
        while found in self.taken:
            number += 1
            found = f"{near}_{number}"
        self.taken.add(found)
        return found

    def constant(self, array: Any, near: str) -> str:
        """The name of a constant of this content."""
        array = np.asarray(array, order="C")
        key = array.dtype.str, array.shape, array.tobytes()
        if key not in self._found:
            self._found[key] = self.name(near)
            self.constants[self._found[key]] = array
        return self._found[key]

    def node(self, op: str, inputs: Sequence[str], outputs: Sequence[str], domain: str = "", **given: Any) -> None:
        """Append a node."""
        label = self.graph.labels.get(outputs[0]) or f"{outputs[0]}_{op}"
        while label in self.node_names:
            label += "_"
        self.node_names.add(label)
        made = helper.make_node(op, list(inputs), list(outputs), name=label, domain=domain)
        for name, value in sorted(given.items()):
            if value is not None:
                made.attribute.append(helper.make_attribute(name, value))
        self.nodes.append(made)

    def dtype(self, name: str) -> str:
        """Element type of bytes and accumulators."""
        return self.graph.constants[name].dtype.name if name in self.graph.constants else self.graph.kinds[name].dtype

    def scale_and_zero(self, meant: Meant, dtype: str, near: str) -> tuple[str, str]:
        """Both as constants."""
        scale = self.constant(np.float32(meant.scale), f"{near}_scale")
        return scale, self.constant(np.array(meant.zero, dtype), f"{near}_zero_point")

    def dequantise(self, name: str, meant: Meant) -> str:
        """The floats that bytes mean, under a DequantizeLinear that all who mean this share."""
        key = name, meant, b""
        if key not in self._spread:
            self._spread[key] = self.name(f"{name}_float")
            self.node(
                "DequantizeLinear", [name, *self.scale_and_zero(meant, self.dtype(name), name)], [self._spread[key]]
            )
        return self._spread[key]

    def dequantise_constant(self, name: str, scale: Array, zero: Array, axis: int) -> str:
        """Dequantise constant weights, with scales along `axis` where there are several."""
        key = name, None, scale.tobytes() + zero.tobytes() + bytes([axis, scale.ndim])
        if key not in self._spread:
            self._spread[key] = self.name(f"{name}_float")
            inputs = [name, self.constant(scale, f"{name}_scale"), self.constant(zero, f"{name}_zero_point")]
            self.node("DequantizeLinear", inputs, [self._spread[key]], axis=axis if scale.ndim else None)
        return self._spread[key]

    def quantise(self, floats: str, y: str, meant: Meant) -> None:
        """QuantizeLinear that makes `y`."""
        self.node("QuantizeLinear", [floats, *self.scale_and_zero(meant, self.dtype(y), y)], [y])


OperationWriter = Callable[[OnnxWriter, GraphOp], None]
WRITERS: dict[str, OperationWriter] = {}
_writes = filling(WRITERS)


def _unwritable(writer: OnnxWriter, each: GraphOp) -> None:
    if each.op != "convolve" and each.op != "multiply":  # which requantise writes
        raise Unwritable(f"ONNX has no operator for {each.op} alone")


@_writes(ONNX)
def _as_it_was(writer: OnnxWriter, each: GraphOp) -> None:
    node = onnx.NodeProto.FromString(each["proto"])
    node.input[:] = each.inputs[: len(node.input)]
    node.output[:] = each.outputs
    while node.name in writer.node_names and node.name:
        node.name += "_"
    writer.node_names.add(node.name)
    writer.nodes.append(node)


@_writes("requantise")
def _requantised(writer: OnnxWriter, each: GraphOp) -> None:
    """With the product that it is of."""
    product, note, graph = writer.graph.makers[each.inputs[0]], each.note, writer.graph
    if not isinstance(note, Written) or product.op not in ("convolve", "multiply"):
        raise Unwritable("a sum that no operator of ONNX requantises")
    if len(graph.readers[each.inputs[0]]) != 1:
        raise Unwritable("an accumulator that is requantised twice")
    x, xz, w, wz, b = product.inputs
    y, is_conv = each.outputs[0], product.op == "convolve"
    alone = len(set(note.w)) == 1
    zeros = graph.constants[wz]
    scale = np.array(note.w[:1] if alone else note.w, np.float32)
    alone = alone and bool((zeros == zeros[0]).all())
    w_scale = scale.reshape(()) if alone else np.broadcast_to(scale, zeros.shape)
    w_zero = zeros[0].reshape(()) if alone else zeros
    of_x = Meant(note.x, int(graph.constants[xz]))
    of_y = Meant(note.y, int(graph.constants[each.inputs[2]]))
    bias = graph.constants[b] if note.biased or graph.constants[b].any() else None
    _write_product(writer, product, note, (x, of_x), (w, w_scale, w_zero), bias, (y, of_y), is_conv)


def _write_product(
    writer: OnnxWriter, product: GraphOp, note: Written, x: tuple[str, Meant], w: tuple[str, Array, Array],
    bias: Array | None, y: tuple[str, Meant], is_conv: bool,
) -> None:  # fmt: skip
    given: dict[str, Any] = {}
    operator = note.operator
    if is_conv:
        kernel = writer.graph.constants[w[0]].shape[2:]
        given = {"kernel_shape": kernel, **product.given}
    elif bias is not None:
        operator = "Gemm"
    if operator == "Gemm" and len(writer.graph.kinds[x[0]].shape or ()) != 2:
        raise Unwritable("a product with a bias of what is no matrix")
    if note.qdq:
        _write_qdq(writer, operator, note, x, w, bias, y, given)
    else:
        _write_qlinear(writer, operator, x, w, bias, y, given)


def _write_qdq(
    writer: OnnxWriter, operator: str, note: Written, x: tuple[str, Meant], w: tuple[str, Array, Array],
    bias: Array | None, y: tuple[str, Meant], given: dict[str, Any],
) -> None:  # fmt: skip
    inputs = [writer.dequantise(*x), writer.dequantise_constant(*w, 0 if operator == "Conv" else 1)]
    if bias is not None:
        steps = np.asarray(np.float32(note.x) * w[1], np.float32)
        name = writer.constant(bias, f"{y[0]}_bias")
        inputs.append(writer.dequantise_constant(name, steps, np.zeros(steps.shape, np.int32), 0))
    floats = writer.name(f"{y[0]}_float")
    writer.node(operator, inputs, [floats], **given)
    if label := writer.graph.labels.get(y[0]):
        writer.nodes[-1].name = label if label not in writer.node_names else writer.nodes[-1].name
        writer.node_names.add(writer.nodes[-1].name)
    writer.quantise(floats, *y)


def _write_qlinear(
    writer: OnnxWriter, operator: str, x: tuple[str, Meant], w: tuple[str, Array, Array], bias: Array | None,
    y: tuple[str, Meant], given: dict[str, Any],
) -> None:  # fmt: skip
    of_x = [x[0], *writer.scale_and_zero(x[1], writer.dtype(x[0]), x[0])]
    of_w = [w[0], writer.constant(w[1], f"{w[0]}_scale"), writer.constant(w[2], f"{w[0]}_zero_point")]
    of_y = writer.scale_and_zero(y[1], writer.dtype(y[0]), y[0])
    if operator == "Gemm":
        name = writer.constant(bias, f"{y[0]}_bias") if bias is not None else ""
        writer.node("QGemm", [*of_x, *of_w, name, *of_y], [y[0]], MICROSOFT, alpha=1.0, transB=0)
        return
    biased = [writer.constant(bias, f"{y[0]}_bias")] if bias is not None else []
    writer.node(f"QLinear{operator}", [*of_x, *of_w, *of_y, *biased], [y[0]], **given)


@_writes("map")
def _mapped(writer: OnnxWriter, each: GraphOp) -> None:
    f: ByteMap | FloatMap = each["f"]
    y = each.outputs[0]
    if isinstance(f, FloatMap):
        writer.node(f.operator, each.inputs, [y], **dict(f.attributes))
        return
    if f.qdq:
        inputs = [writer.dequantise(name, meant) for name, meant in zip(each.inputs, f.operands)]
        floats = inputs[0]
        if f.operator != "Identity":
            floats = writer.name(f"{y}_float")
            writer.node(f.operator, inputs, [floats], **dict(f.attributes))
        writer.quantise(floats, y, f.result)
        return
    if f.operator == "Identity":  # of a QLinearConcat that is no longer there
        writer.quantise(writer.dequantise(each.inputs[0], f.operands[0]), y, f.result)
        return
    inputs = []
    for name, meant in zip(each.inputs, f.operands):
        inputs += [name, *writer.scale_and_zero(meant, f.dtype, name)]
    writer.node(f"QLinear{f.operator}", [*inputs, *writer.scale_and_zero(f.result, f.dtype, y)], [y], MICROSOFT,
                **dict(f.attributes))  # fmt: skip


def _in_floats(writer: OnnxWriter, each: GraphOp, op: str, *others: str, **given: Any) -> None:
    """An operator that moves bytes or compares them: on bytes, or between DequantizeLinear and QuantizeLinear."""
    y, note = each.outputs[0], each.note
    if not isinstance(note, Meant):
        writer.node(op, [*each.inputs, *others], [y], **given)
        return
    floats = writer.name(f"{y}_float")
    writer.node(op, [*(writer.dequantise(name, note) for name in each.inputs), *others], [floats], **given)
    writer.quantise(floats, y, note)


@_writes("largest", "largest_again")
def _largest(writer: OnnxWriter, each: GraphOp) -> None:
    given = {("kernel_shape" if name == "kernel" else name): value for name, value in each.given.items()}
    _in_floats(writer, each, "MaxPool", **given)


@_writes("average")
def _average(writer: OnnxWriter, each: GraphOp) -> None:
    f, y = each["f"], each.outputs[0]
    given = {name: each[name] for name in ("pads", "strides")}
    given |= {"kernel_shape": each["kernel"], "count_include_pad": int(each["counted"])}
    if f.qdq:
        floats = writer.name(f"{y}_float")
        writer.node("AveragePool", [writer.dequantise(each.inputs[0], f.x)], [floats], **given)
        writer.quantise(floats, y, f.y)
        return
    inputs = [each.inputs[0], *writer.scale_and_zero(f.x, f.dtype, y), *writer.scale_and_zero(f.y, f.dtype, y)]
    writer.node("QLinearAveragePool", inputs, [y], MICROSOFT, **given)


@_writes("average_by_products")
def _averaging_products(writer: OnnxWriter, each: GraphOp) -> None:
    f, y, kernel = each["f"], each.outputs[0], each["kernel"]
    channels = (writer.graph.kinds[y].shape or ())[1]
    ones = writer.constant(np.ones((channels, 1, *kernel), np.int8), f"{y}_ones")
    w = ones, np.asarray(f.weight(int(np.prod(kernel)))), np.zeros((), np.int8)
    given = {name: each[name] for name in ("pads", "strides", "dilations")}
    given |= {"kernel_shape": kernel, "group": channels}
    if not f.qdq:
        _write_qlinear(writer, "Conv", (each.inputs[0], f.x), w, None, (y, f.y), given)
        return
    floats = writer.name(f"{y}_float")
    writer.node("Conv", [writer.dequantise(each.inputs[0], f.x), writer.dequantise_constant(*w, 0)], [floats], **given)
    writer.quantise(floats, y, f.y)


@_writes("transpose")
def _transpose(writer: OnnxWriter, each: GraphOp) -> None:
    _in_floats(writer, each, "Transpose", perm=each["perm"])


@_writes("reshape")
def _reshape(writer: OnnxWriter, each: GraphOp) -> None:
    shape = writer.constant(np.array(each["shape"], np.int64), f"{each.outputs[0]}_shape")
    _in_floats(writer, each, "Reshape", shape)


@_writes("slice")
def _slice(writer: OnnxWriter, each: GraphOp) -> None:
    y = each.outputs[0]
    numbers = [writer.constant(np.array([each[name]], np.int64), f"{y}_{name}") for name in ("start", "stop", "axis")]
    _in_floats(writer, each, "Slice", *numbers)


@_writes("phases")
def _phases(writer: OnnxWriter, each: GraphOp) -> None:
    _by_blocks(writer, each, "SpaceToDepth")


@_writes("interleave")
def _interleave(writer: OnnxWriter, each: GraphOp) -> None:
    _by_blocks(writer, each, "DepthToSpace")


def _by_blocks(writer: OnnxWriter, each: GraphOp, op: str) -> None:
    """On floats: runtimes have neither of bytes."""
    y = each.outputs[0]
    meant = each.note if isinstance(each.note, Meant) else Meant(1.0, 0)
    floats = writer.name(f"{y}_float")
    writer.node(op, [writer.dequantise(each.inputs[0], meant)], [floats], blocksize=each["by"])
    writer.quantise(floats, y, meant)


@_writes("float_convolve")
def _float_convolution(writer: OnnxWriter, each: GraphOp) -> None:
    kernel = writer.graph.constants[each.inputs[1]].shape[2:]
    writer.node("Conv", each.inputs, each.outputs, kernel_shape=kernel, **each.given)


@_writes("float_multiply")
def _float_product(writer: OnnxWriter, each: GraphOp) -> None:
    writer.node("MatMul", each.inputs, each.outputs)


@_writes("plus")
def _plus(writer: OnnxWriter, each: GraphOp) -> None:
    writer.node("Add", each.inputs, each.outputs)


@_writes("pad")
def _pad(writer: OnnxWriter, each: GraphOp) -> None:
    y, (x, value) = each.outputs[0], each.inputs
    pads = writer.constant(np.array(each["pads"], np.int64), f"{y}_pads")
    if not isinstance(each.note, Meant):
        writer.node("Pad", [x, pads, value], [y])
        return
    floats = writer.name(f"{y}_float")
    writer.node("Pad", [writer.dequantise(x, each.note), pads], [floats])
    writer.quantise(floats, y, each.note)


@_writes("concat")
def _concat(writer: OnnxWriter, each: GraphOp) -> None:
    scale = writer.scale_of_concat(each)
    y, axis = each.outputs[0], each["axis"]
    parts: list[tuple[str, Meant | None]] = []
    for name in writer.parts_of(each):
        if name in writer.absorbed:
            maker = writer.graph.makers[name]
            parts.append((maker.inputs[0], maker["f"].operands[0]))
        else:
            parts.append((name, scale))
    changes = any(name in writer.absorbed for name in writer.parts_of(each))
    if scale is None or (not changes and not isinstance(each.note, Meant)):
        writer.node("Concat", writer.parts_of(each), [y], axis=axis)
    elif isinstance(each.note, Written):
        inputs = [*writer.scale_and_zero(scale, writer.dtype(y), y)]
        for name, meant in parts:
            inputs += [name, *writer.scale_and_zero(meant or scale, writer.dtype(name), name)]
        writer.node("QLinearConcat", inputs, [y], MICROSOFT, axis=axis)
    else:
        floats = writer.name(f"{y}_float")
        writer.node("Concat", [writer.dequantise(name, meant or scale) for name, meant in parts], [floats], axis=axis)
        writer.quantise(floats, y, scale)
