"""Write a graph of the algebra as an ONNX model, each operator in the form in which it was read: QDQ, or QLinear
operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from celosia.compiler.ops import op_spec
from celosia.compiler.program.op_spec import arrange_operands, quantised_form
from celosia.compiler.superoptimise.graph import ONNX, Array, BytesGraph, GraphOp, Quantisation
from celosia.compiler.superoptimise.operators import OPERATORS
from celosia.compiler.superoptimise.reading import tensors_read

MICROSOFT = "com.microsoft"
"""The domain of onnxruntime's own operators."""
IR_WITHOUT_CONSTANT_INPUTS = 4
"""Version of the ONNX format from which on constants need not be graph inputs. Constants that are can be replaced by
callers then.
"""


class AlgebraWriter:
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
            if operation.op == ONNX:
                self._copy_node(operation)
            elif operation.outputs[0] not in self.absorbed:
                OPERATORS[operation.op].write(self, operation)
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

    def _copy_node(self, operation: GraphOp) -> None:
        """Append a node that the algebra does not know as it was, with the new names of its tensors."""
        node = onnx.NodeProto.FromString(operation["proto"])
        node.input[:] = operation.inputs[: len(node.input)]
        node.output[:] = operation.outputs
        while node.name in self.node_names and node.name:
            node.name += "_"
        self.node_names.add(node.name)
        self.nodes.append(node)

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
        self, operator: str, operands: Sequence[Sequence[str]], result: Sequence[str], bias: str = "",
        **attributes: Any,
    ) -> None:  # fmt: skip
        """Append the QLinear operator of a float operator. operands, result: as `with_scale_and_zero` returns them."""
        form, (y, *scale_and_zero) = quantised_form(operator), result
        inputs = [name or "" for name in arrange_operands(form, operands, scale_and_zero, bias or None)]
        self.node(form, inputs, [y], op_spec(form).domain, **attributes)

    def float_node(
        self, operator: str, inputs: Sequence[str], y: str, quantisation: Quantisation, label: str | None = None,
        **attributes: Any,
    ) -> None:  # fmt: skip
        """Append a float operator, and the QuantizeLinear that makes `y` of its result. label: name for the node."""
        floats = self.name(f"{y}_float")
        self.node(operator, inputs, [floats], **attributes)
        if label and label not in self.node_names:
            self.nodes[-1].name = label
            self.node_names.add(label)
        self.quantise(floats, y, quantisation)

    def node_on_bytes(self, operator: str, operation: GraphOp, *others: str, **attributes: Any) -> None:
        """Append an operator that moves or compares bytes: on bytes, or with QDQ around it where the model had that.
        others: further operands.
        """
        y, note = operation.outputs[0], operation.note
        if isinstance(note, Quantisation):
            floats = [self.dequantise(name, note) for name in operation.inputs]
            self.float_node(operator, [*floats, *others], y, note, **attributes)
        else:
            self.node(operator, [*operation.inputs, *others], [y], **attributes)

    def dtype(self, name: str) -> str:
        """Return the element type of a constant or tensor."""
        return self.graph.constants[name].dtype.name if name in self.graph.constants else self.graph.kinds[name].dtype

    def scale_and_zero(self, quantisation: Quantisation, dtype: str, near: str) -> tuple[str, str]:
        """Add scale and zero point as constants, and return their names."""
        scale = self.constant(np.float32(quantisation.scale), f"{near}_scale")
        return scale, self.constant(np.array(quantisation.zero, dtype), f"{near}_zero_point")

    def with_scale_and_zero(self, name: str, quantisation: Quantisation) -> tuple[str, str, str]:
        """Add scale and zero point of the tensor `name`, and return its name and theirs."""
        return (name, *self.scale_and_zero(quantisation, self.dtype(name), name))

    def dequantise(self, name: str, quantisation: Quantisation) -> str:
        """Return the name of the floats that bytes stand for, from a DequantizeLinear that all readers with this
        quantisation share.
        """
        key = name, quantisation, b""
        if key not in self._dequantised_names:
            self._dequantised_names[key] = self.name(f"{name}_float")
            inputs = self.with_scale_and_zero(name, quantisation)
            self.node("DequantizeLinear", inputs, [self._dequantised_names[key]])
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
