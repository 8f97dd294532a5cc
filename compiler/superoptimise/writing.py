"""Write a graph of the algebra as an ONNX model, each operator in the form in which it was read: QDQ, or QLinear
operators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from celosia.compiler.ops import op_spec
from celosia.compiler.program.op_spec import arrange, filling, quantised_form
from celosia.compiler.superoptimise.graph import (
    ONNX,
    ONNX_NAMES,
    Array,
    ByteMap,
    BytesGraph,
    FloatMap,
    GraphOp,
    OriginalForm,
    Quantisation,
)

MICROSOFT = "com.microsoft"
"""The domain of onnxruntime's own operators."""
IR_WITHOUT_CONSTANT_INPUTS = 4
"""Version of the ONNX format from which on constants need not be graph inputs. Constants that are can be replaced by
callers then.
"""


class Unwritable(Exception):
    """Raised for a graph that ONNX has no operators for. The message is one sentence."""


class OnnxWriter:
    """Writes one graph. model: the original, of which everything but nodes and constants is kept.

    constants, nodes: new ones so far. used_names, node_names: names that are taken. absorbed: tensors that are not
    written, since the node of another operation computes them.
    """

    def __init__(self, graph: BytesGraph, model: onnx.ModelProto) -> None:
        self.graph, self.model = graph, model
        self.constants: dict[str, Array] = {}
        self.used_names = {*graph.constants, *graph.kinds, *graph.makers}
        self.nodes: list[onnx.NodeProto] = []
        self.absorbed: set[str] = set()
        self.node_names: set[str] = set()
        self._constant_names: dict[tuple[Any, ...], str] = {}
        self._dequantised_names: dict[tuple[str, Quantisation | None, bytes], str] = {}

    def write(self) -> onnx.ModelProto:
        """Return the model. Raises Unwritable."""
        for operation in self.graph.operations:
            is_nested = operation.op == "concat" and self._outermost_concat(operation) is not operation
            if (
                is_nested
                or (operation.op == "map" and self._is_absorbed_by_concat(operation))
                or self._is_absorbed_by_gemm(operation)
            ):
                self.absorbed.add(operation.outputs[0])
        for operation in self.graph.operations:
            if operation.outputs[0] not in self.absorbed:
                WRITERS.get(operation.op, _refuse_unless_product)(self, operation)
        model = onnx.ModelProto()
        model.CopyFrom(self.model)
        for field in ("node", "initializer", "value_info"):
            model.graph.ClearField(field)
        model.graph.node.extend(self.nodes)
        self._copy_constants(model)
        written = {name for node in self.nodes for name in node.output}
        model.graph.value_info.extend(info for info in self.model.graph.value_info if info.name in written)
        domains = {opset.domain for opset in model.opset_import}
        if MICROSOFT not in domains and any(node.domain == MICROSOFT for node in self.nodes):
            model.opset_import.append(helper.make_opsetid(MICROSOFT, 1))
        return model

    def _copy_constants(self, model: onnx.ModelProto) -> None:
        """Add all constants that nodes or outputs read to `model`, and drop graph inputs for constants that nothing
        reads.
        """
        from celosia.compiler.superoptimise.reading import tensors_read

        read = {name for node in self.nodes for name in tensors_read(node)} | set(self.graph.outputs)
        initializers = {tensor.name: tensor for tensor in self.model.graph.initializer}
        for name in sorted(read):
            if name in self.constants:
                model.graph.initializer.append(numpy_helper.from_array(self.constants[name], name))
            elif name in initializers:
                model.graph.initializer.append(initializers[name])
            elif name in self.graph.constants:
                model.graph.initializer.append(numpy_helper.from_array(np.asarray(self.graph.constants[name]), name))
        for value in [value for value in model.graph.input if value.name in initializers and value.name not in read]:
            model.graph.input.remove(value)
        if model.ir_version < IR_WITHOUT_CONSTANT_INPUTS:
            inputs = {value.name for value in model.graph.input}
            model.graph.input.extend(
                helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
                for tensor in model.graph.initializer if tensor.name not in inputs
            )  # fmt: skip

    def parts_of(self, operation: GraphOp) -> list[str]:
        """List the parts of a Concat. A part that is a nested Concat is replaced by its own parts."""
        parts = []
        for name in operation.inputs:
            maker = self.graph.makers.get(name)
            is_nested = maker is not None and maker.op == "concat" and self._outermost_concat(maker) is not maker
            parts += self.parts_of(maker) if is_nested and maker is not None else [name]
        return parts

    def _outermost_concat(self, operation: GraphOp) -> GraphOp:
        """Return the Concat into which a nested Concat merges, which is itself where it merges into none."""
        readers = self.graph.readers.get(operation.outputs[0], [])
        if len(readers) != 1 or operation.outputs[0] in self.graph.outputs or readers[0].op != "concat":
            return operation
        (other,) = readers
        can_absorb = other["axis"] == operation["axis"] and other.note == operation.note and len(set(other.inputs)) == 2
        return self._outermost_concat(other) if can_absorb else operation

    def _is_absorbed_by_concat(self, operation: GraphOp) -> bool:
        """Return whether this change of scale is written as part of the Concat that reads it, as onnxruntime's
        QLinearConcat does.
        """
        f, y = operation["f"], operation.outputs[0]
        readers = self.graph.readers.get(y, [])
        if f.operator != "Identity" or y in self.graph.outputs or len(readers) != 1 or readers[0].op != "concat":
            return False
        return len(set(readers[0].inputs)) == 2 and self.scale_of_concat(self._outermost_concat(readers[0])) == f.result

    def _is_absorbed_by_gemm(self, operation: GraphOp) -> bool:
        """Return whether this float product is written together with the bias added to it, as a Gemm."""
        readers = self.graph.readers.get(operation.outputs[0], [])
        if operation.op != "float_multiply" or operation.outputs[0] in self.graph.outputs or len(readers) != 1:
            return False
        is_bias = readers[0].op == "real_shift" and readers[0]["axis"] == 1
        return is_bias and len(self.graph.kinds[operation.outputs[0]].shape or ()) == 2

    def scale_of_concat(self, operation: GraphOp) -> Quantisation | None:
        """Return the quantisation of a Concat's result; None where its parts are brought to different ones."""
        results = set()
        for name in self.parts_of(operation):
            maker = self.graph.makers.get(name)
            if maker is not None and maker.op == "map" and maker["f"].operator == "Identity":
                results.add(maker["f"].result)
        if len(results) == 1:
            return next(iter(results)) if operation.note is not None else None
        return operation.note if isinstance(operation.note, Quantisation) and not results else None

    # Names -----------------------------------------------------------------------------------------------------------

    def name(self, near: str) -> str:
        """Return a new name, made of `near`."""
        name, number = near, 0
        while name in self.used_names:
            number += 1
            name = f"{near}_{number}"
        self.used_names.add(name)
        return name

    def constant(self, array: Any, near: str) -> str:
        """Add a constant, unless one with this content exists, and return its name."""
        array = np.asarray(array, order="C")
        key = array.dtype.str, array.shape, array.tobytes()
        if key not in self._constant_names:
            self._constant_names[key] = self.name(near)
            self.constants[self._constant_names[key]] = array
        return self._constant_names[key]

    def node(self, op: str, inputs: Sequence[str], outputs: Sequence[str], domain: str = "", **attributes: Any) -> None:
        """Append a node with a unique name; attributes that are None are left out."""
        label = self.graph.labels.get(outputs[0]) or f"{outputs[0]}_{op}"
        while label in self.node_names:
            label += "_"
        self.node_names.add(label)
        node = helper.make_node(op, list(inputs), list(outputs), name=label, domain=domain)
        for name, value in sorted(attributes.items()):
            if value is not None:
                node.attribute.append(helper.make_attribute(name, value))
        self.nodes.append(node)

    def quantised_node(
        self, operator: str, operands: Sequence[Sequence[str]], y: str, result: Sequence[str], bias: str = "",
        **attributes: Any,
    ) -> None:  # fmt: skip
        """Append the QLinear operator of a float operator. operands: names of bytes, scale and zero point of each.
        result: names of scale and zero point of `y`.
        """
        form = quantised_form(operator)
        inputs = [name or "" for name in arrange(form, operands, result, bias or None)]
        self.node(form, inputs, [y], op_spec(form).domain, **attributes)

    def dtype(self, name: str) -> str:
        """Return the element type of a constant or tensor."""
        return self.graph.constants[name].dtype.name if name in self.graph.constants else self.graph.kinds[name].dtype

    def scale_and_zero(self, quantisation: Quantisation, dtype: str, near: str) -> tuple[str, str]:
        """Add scale and zero point as constants, and return their names."""
        scale = self.constant(np.float32(quantisation.scale), f"{near}_scale")
        return scale, self.constant(np.array(quantisation.zero, dtype), f"{near}_zero_point")

    def dequantise(self, name: str, quantisation: Quantisation) -> str:
        """Return the name of the floats that bytes stand for, from a DequantizeLinear that all readers with this
        quantisation share.
        """
        key = name, quantisation, b""
        if key not in self._dequantised_names:
            self._dequantised_names[key] = self.name(f"{name}_float")
            self.node(
                "DequantizeLinear",
                [name, *self.scale_and_zero(quantisation, self.dtype(name), name)],
                [self._dequantised_names[key]],
            )
        return self._dequantised_names[key]

    def dequantise_constant(self, name: str, scale: Array, zero: Array, axis: int) -> str:
        """Return the name of the floats of constant weights or biases. axis: of the scales, where there are several."""
        key = name, None, scale.tobytes() + zero.tobytes() + bytes([axis, scale.ndim])
        if key not in self._dequantised_names:
            self._dequantised_names[key] = self.name(f"{name}_float")
            inputs = [name, self.constant(scale, f"{name}_scale"), self.constant(zero, f"{name}_zero_point")]
            self.node("DequantizeLinear", inputs, [self._dequantised_names[key]], axis=axis if scale.ndim else None)
        return self._dequantised_names[key]

    def quantise(self, floats: str, y: str, quantisation: Quantisation) -> None:
        """Append the QuantizeLinear that makes `y` of the tensor `floats`."""
        self.node("QuantizeLinear", [floats, *self.scale_and_zero(quantisation, self.dtype(y), y)], [y])


OperationWriter = Callable[[OnnxWriter, GraphOp], None]
"""Appends the nodes for an operation to the writer."""
WRITERS: dict[str, OperationWriter] = {}
"""Writers of operations by operator of the algebra; real_forms.py adds some."""
_writes = filling(WRITERS)


def _refuse_unless_product(writer: OnnxWriter, operation: GraphOp) -> None:
    """Write nothing for a product, which its `requantise` writes; raise Unwritable for another operator without a
    writer.
    """
    if operation.op != "convolve" and operation.op != "multiply":  # the writer of `requantise` writes these
        raise Unwritable(f"ONNX has no operator for {operation.op} alone")


@_writes(ONNX)
def _write_onnx_node(writer: OnnxWriter, operation: GraphOp) -> None:
    """Write a node that the algebra does not know as it was, with the new names of its tensors."""
    node = onnx.NodeProto.FromString(operation["proto"])
    node.input[:] = operation.inputs[: len(node.input)]
    node.output[:] = operation.outputs
    while node.name in writer.node_names and node.name:
        node.name += "_"
    writer.node_names.add(node.name)
    writer.nodes.append(node)


@_writes("requantise")
def _write_requantisation(writer: OnnxWriter, operation: GraphOp) -> None:
    """Write a requantisation together with the convolution or matrix product before it."""
    product, note, graph = writer.graph.makers[operation.inputs[0]], operation.note, writer.graph
    if not isinstance(note, OriginalForm) or product.op not in ("convolve", "multiply"):
        raise Unwritable("a sum that no operator of ONNX requantises")
    if len(graph.readers[operation.inputs[0]]) != 1:
        raise Unwritable("an accumulator that is requantised twice")
    x, xz, w, wz, b = product.inputs
    _, _, z = operation.inputs
    y, is_conv = operation.outputs[0], product.op == "convolve"
    is_uniform = len(set(note.w)) == 1
    zeros = graph.constants[wz]
    scale = np.array(note.w[:1] if is_uniform else note.w, np.float32)
    is_uniform = is_uniform and bool((zeros == zeros[0]).all())
    w_scale = scale.reshape(()) if is_uniform else np.broadcast_to(scale, zeros.shape)
    w_zero = zeros[0].reshape(()) if is_uniform else zeros
    of_x = Quantisation(note.x, int(graph.constants[xz]))
    of_y = Quantisation(note.y, int(graph.constants[z]))
    bias = graph.constants[b] if note.biased or graph.constants[b].any() else None
    _write_product(writer, product, note, (x, of_x), (w, w_scale, w_zero), bias, (y, of_y), is_conv)


def _write_product(
    writer: OnnxWriter, product: GraphOp, note: OriginalForm, x: tuple[str, Quantisation], w: tuple[str, Array, Array],
    bias: Array | None, y: tuple[str, Quantisation], is_conv: bool,
) -> None:  # fmt: skip
    """Write a product in the form that `note` has. x, y: name and quantisation. w: name, scale and zero point. bias:
    int32.
    """
    attributes: dict[str, Any] = {}
    operator = note.operator
    if is_conv:
        kernel = writer.graph.constants[w[0]].shape[2:]
        attributes = {"kernel_shape": kernel, **product.attributes_by_name}
    elif bias is not None:
        operator = "Gemm"
    if operator == "Gemm" and len(writer.graph.kinds[x[0]].shape or ()) != 2:
        raise Unwritable("a product with a bias of what is no matrix")
    if note.qdq:
        _write_qdq(writer, operator, note, x, w, bias, y, attributes)
    else:
        _write_qlinear(writer, operator, x, w, bias, y, attributes)


def _write_qdq(
    writer: OnnxWriter, operator: str, note: OriginalForm, x: tuple[str, Quantisation], w: tuple[str, Array, Array],
    bias: Array | None, y: tuple[str, Quantisation], attributes: dict[str, Any],
) -> None:  # fmt: skip
    """Write a product as a float operator between DequantizeLinear and QuantizeLinear. Arguments as in
    `_write_product`.
    """
    inputs = [writer.dequantise(*x), writer.dequantise_constant(*w, 0 if op_spec(operator).windows else 1)]
    if bias is not None:
        steps = np.asarray(np.float32(note.x) * w[1], np.float32)
        name = writer.constant(bias, f"{y[0]}_bias")
        inputs.append(writer.dequantise_constant(name, steps, np.zeros(steps.shape, np.int32), 0))
    floats = writer.name(f"{y[0]}_float")
    writer.node(operator, inputs, [floats], **attributes)
    if label := writer.graph.labels.get(y[0]):
        writer.nodes[-1].name = label if label not in writer.node_names else writer.nodes[-1].name
        writer.node_names.add(writer.nodes[-1].name)
    writer.quantise(floats, *y)


def _write_qlinear(
    writer: OnnxWriter, operator: str, x: tuple[str, Quantisation], w: tuple[str, Array, Array], bias: Array | None,
    y: tuple[str, Quantisation], attributes: dict[str, Any],
) -> None:  # fmt: skip
    """Write a product as onnxruntime's QLinear operator. Arguments as in `_write_product`."""
    of_x = (x[0], *writer.scale_and_zero(x[1], writer.dtype(x[0]), x[0]))
    of_w = (w[0], writer.constant(w[1], f"{w[0]}_scale"), writer.constant(w[2], f"{w[0]}_zero_point"))
    of_y = writer.scale_and_zero(y[1], writer.dtype(y[0]), y[0])
    name = writer.constant(bias, f"{y[0]}_bias") if bias is not None else ""
    attributes = {"alpha": 1.0, "transB": 0} if operator == "Gemm" else attributes
    writer.quantised_node(operator, [of_x, of_w], y[0], of_y, name, **attributes)


@_writes("map")
def _write_function(writer: OnnxWriter, operation: GraphOp) -> None:
    """Write a function of single bytes or floats."""
    f: ByteMap | FloatMap = operation["f"]
    y = operation.outputs[0]
    if isinstance(f, FloatMap):
        writer.node(f.operator, operation.inputs, [y], **dict(f.attributes))
        return
    if f.qdq:
        inputs = [writer.dequantise(name, quantisation) for name, quantisation in zip(operation.inputs, f.operands)]
        floats = inputs[0]
        if f.operator != "Identity":
            floats = writer.name(f"{y}_float")
            writer.node(f.operator, inputs, [floats], **dict(f.attributes))
        writer.quantise(floats, y, f.result)
        return
    if f.operator == "Identity":  # the change of scale of a QLinearConcat that a rule removed
        writer.quantise(writer.dequantise(operation.inputs[0], f.operands[0]), y, f.result)
        return
    operands = [
        (name, *writer.scale_and_zero(quantisation, f.dtype, name))
        for name, quantisation in zip(operation.inputs, f.operands)
    ]
    result = writer.scale_and_zero(f.result, f.dtype, y)
    writer.quantised_node(f.operator, operands, y, result, **dict(f.attributes))


def _write_between_qdq(writer: OnnxWriter, operation: GraphOp, *others: str, **attributes: Any) -> None:
    """Write an operator that moves or compares bytes: on bytes, or with QDQ around it where the model had that. others:
    further operands.
    """
    y, note, op = operation.outputs[0], operation.note, ONNX_NAMES[operation.op]
    if not isinstance(note, Quantisation):
        writer.node(op, [*operation.inputs, *others], [y], **attributes)
        return
    floats = writer.name(f"{y}_float")
    writer.node(op, [*(writer.dequantise(name, note) for name in operation.inputs), *others], [floats], **attributes)
    writer.quantise(floats, y, note)


@_writes("largest", "largest_again")
def _write_max_pool(writer: OnnxWriter, operation: GraphOp) -> None:
    """Write a MaxPool."""
    attributes = {
        ("kernel_shape" if name == "kernel" else name): value for name, value in operation.attributes_by_name.items()
    }
    _write_between_qdq(writer, operation, **attributes)


@_writes("average")
def _write_average_pool(writer: OnnxWriter, operation: GraphOp) -> None:
    """Write an AveragePool."""
    f, y = operation["f"], operation.outputs[0]
    attributes = {name: operation[name] for name in ("pads", "strides")}
    attributes |= {"kernel_shape": operation["kernel"], "count_include_pad": int(operation["counted"])}
    if f.qdq:
        floats = writer.name(f"{y}_float")
        writer.node(ONNX_NAMES[operation.op], [writer.dequantise(operation.inputs[0], f.x)], [floats], **attributes)
        writer.quantise(floats, y, f.y)
        return
    of_x = (operation.inputs[0], *writer.scale_and_zero(f.x, f.dtype, y))
    writer.quantised_node(ONNX_NAMES[operation.op], [of_x], y, writer.scale_and_zero(f.y, f.dtype, y), **attributes)


@_writes("average_by_products")
def _write_average_by_products(writer: OnnxWriter, operation: GraphOp) -> None:
    """Write an average as a depthwise convolution whose weights are ones."""
    f, y, kernel = operation["f"], operation.outputs[0], operation["kernel"]
    channels = (writer.graph.kinds[y].shape or ())[1]
    ones = writer.constant(np.ones((channels, 1, *kernel), np.int8), f"{y}_ones")
    w = ones, np.asarray(f.weight_scale(int(np.prod(kernel)))), np.zeros((), np.int8)
    attributes = {name: operation[name] for name in ("pads", "strides", "dilations")}
    attributes |= {"kernel_shape": kernel, "group": channels}
    if not f.qdq:
        _write_qlinear(writer, ONNX_NAMES[operation.op], (operation.inputs[0], f.x), w, None, (y, f.y), attributes)
        return
    floats = writer.name(f"{y}_float")
    operands = [writer.dequantise(operation.inputs[0], f.x), writer.dequantise_constant(*w, 0)]
    writer.node(ONNX_NAMES[operation.op], operands, [floats], **attributes)
    writer.quantise(floats, y, f.y)


@_writes("transpose")
def _write_transpose(writer: OnnxWriter, operation: GraphOp) -> None:
    """Write a Transpose."""
    _write_between_qdq(writer, operation, perm=operation["perm"])


@_writes("reshape")
def _write_reshape(writer: OnnxWriter, operation: GraphOp) -> None:
    """Write a Reshape."""
    shape = writer.constant(np.array(operation["shape"], np.int64), f"{operation.outputs[0]}_shape")
    _write_between_qdq(writer, operation, shape)


@_writes("slice")
def _write_slice(writer: OnnxWriter, operation: GraphOp) -> None:
    """Write a Slice."""
    y = operation.outputs[0]
    numbers = [
        writer.constant(np.array([operation[name]], np.int64), f"{y}_{name}") for name in ("start", "stop", "axis")
    ]
    _write_between_qdq(writer, operation, *numbers)


@_writes("phases", "interleave")
def _write_phases(writer: OnnxWriter, operation: GraphOp) -> None:
    """Write a SpaceToDepth or DepthToSpace on floats, as runtimes have neither for bytes."""
    y = operation.outputs[0]
    quantisation = operation.note if isinstance(operation.note, Quantisation) else Quantisation(1.0, 0)
    floats = writer.name(f"{y}_float")
    writer.node(
        ONNX_NAMES[operation.op],
        [writer.dequantise(operation.inputs[0], quantisation)],
        [floats],
        blocksize=operation["by"],
    )
    writer.quantise(floats, y, quantisation)


@_writes("float_convolve")
def _write_float_conv(writer: OnnxWriter, operation: GraphOp) -> None:
    """Write a float convolution."""
    kernel = writer.graph.constants[operation.inputs[1]].shape[2:]
    writer.node(
        ONNX_NAMES[operation.op],
        operation.inputs,
        operation.outputs,
        kernel_shape=kernel,
        **operation.attributes_by_name,
    )


@_writes("float_multiply", "plus", "real_plus")
def _write_plain(writer: OnnxWriter, operation: GraphOp) -> None:
    """Write an operator that has no attributes."""
    writer.node(ONNX_NAMES[operation.op], operation.inputs, operation.outputs)


@_writes("pad")
def _write_pad(writer: OnnxWriter, operation: GraphOp) -> None:
    """Write a Pad."""
    y, (x, value) = operation.outputs[0], operation.inputs
    pads = writer.constant(np.array(operation["pads"], np.int64), f"{y}_pads")
    if not isinstance(operation.note, Quantisation):
        writer.node("Pad", [x, pads, value], [y])
        return
    floats = writer.name(f"{y}_float")
    writer.node("Pad", [writer.dequantise(x, operation.note), pads], [floats])
    writer.quantise(floats, y, operation.note)


@_writes("concat")
def _write_concat(writer: OnnxWriter, operation: GraphOp) -> None:
    """Write a Concat with all of its parts, with the changes of scale that it absorbs."""
    scale = writer.scale_of_concat(operation)
    y, axis, operator = operation.outputs[0], operation["axis"], ONNX_NAMES[operation.op]
    parts: list[tuple[str, Quantisation | None]] = []
    for name in writer.parts_of(operation):
        if name in writer.absorbed:
            maker = writer.graph.makers[name]
            parts.append((maker.inputs[0], maker["f"].operands[0]))
        else:
            parts.append((name, scale))
    changes = any(name in writer.absorbed for name in writer.parts_of(operation))
    if scale is None or (not changes and not isinstance(operation.note, Quantisation)):
        writer.node(operator, writer.parts_of(operation), [y], axis=axis)
    elif isinstance(operation.note, OriginalForm):
        result = writer.scale_and_zero(scale, writer.dtype(y), y)
        operands = [
            (name, *writer.scale_and_zero(quantisation or scale, writer.dtype(name), name))
            for name, quantisation in parts
        ]
        writer.quantised_node(operator, operands, y, result, axis=axis)
    else:
        floats = writer.name(f"{y}_float")
        writer.node(
            operator,
            [writer.dequantise(name, quantisation or scale) for name, quantisation in parts],
            [floats],
            axis=axis,
        )
        writer.quantise(floats, y, scale)
