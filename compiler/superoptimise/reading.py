"""Read ONNX models into the algebra: float operators with QDQ around them and onnxruntime's QLinear operators become
one.

The readers of single operators stand beside the operators (operators/). Scales become multipliers there, as onnxruntime
computes them. A node that the algebra does not know stays an ONNX node in the graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from celosia.compiler.graph.operands import named_input
from celosia.compiler.ops import op_spec
from celosia.compiler.program.op_spec import Role
from celosia.compiler.superoptimise.graph import ONNX, Array, BytesGraph, GraphOp, Note, TensorKind
from celosia.compiler.superoptimise.operators import OPERATORS
from celosia.compiler.superoptimise.operators.definition import (
    BYTES,
    FLOAT,
    FLOAT_READERS,
    QDQ_READERS,
    READERS,
    REAL_READERS,
    BytesOf,
    NodeReader,
    NotInAlgebra,
    QuantisedOperation,
    attributes_of,
)

Shapes = Mapping[str, tuple[int, ...] | None]
"""Shape of each tensor of a model; None where it is not known."""


class AlgebraReader:
    """Reads one model.

    shapes, dtypes: of the model's tensors, as far as they are known. floats: whether operators on floats become
    operators of the algebra, too. reals: those of fast-math, too. moved_dtypes: element types for which Slice, Concat
    and the like do. float_readers: readers of nodes whose first operand is float32.
    """

    def __init__(
        self, model: onnx.ModelProto, shapes: Shapes, dtypes: Mapping[str, str], floats: bool = False,
        reals: bool = False,
    ) -> None:  # fmt: skip
        self.model, self.shapes, self.dtypes = model, shapes, dict(dtypes)
        self.constants: dict[str, Array] = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
        nodes = []
        for node in model.graph.node:
            if node.op_type == "Constant" and node.attribute[0].name == "value":
                self.constants[node.output[0]] = numpy_helper.to_array(node.attribute[0].t)
            else:
                nodes.append(node)
        self.nodes = nodes
        self.makers = {name: node for node in nodes for name in node.output if name}
        self.uses: dict[str, int] = {}
        for name in (*(n for node in nodes for n in tensors_read(node)), *(out.name for out in model.graph.output)):
            self.uses[name] = self.uses.get(name, 0) + 1
        self.kinds: dict[str, TensorKind] = {}
        self.operations: list[GraphOp] = []
        self.labels: dict[str, str] = {}
        self.float_readers: dict[str, NodeReader] = {}
        if floats:
            self.float_readers = {**FLOAT_READERS, **(REAL_READERS if reals else {})}
        self.moved_dtypes: tuple[str, ...] = (*BYTES, FLOAT) if floats else BYTES

    def read(self) -> BytesGraph:
        """Return the graph of the model."""
        inputs = [value.name for value in self.model.graph.input if value.name not in self.constants]
        for name in inputs:
            self._note_kind(name)
        for node in self.nodes:
            before = len(self.operations)
            try:
                self._read_node(node)
            except NotInAlgebra:
                del self.operations[before:]
                self._keep_node(node)
        outputs = tuple(value.name for value in self.model.graph.output)
        graph = BytesGraph((), self.constants, self.kinds, tuple(inputs), outputs, self.labels)
        return graph.ordered(self.operations)

    def _note_kind(self, name: str) -> None:
        """Enter the shape and type of a tensor that no reader makes: an input, or a result of an ONNX node. An unknown
        type counts as float32.
        """
        self.kinds[name] = TensorKind(self.shapes.get(name), self.dtypes.get(name, "float32"))

    def _keep_node(self, node: onnx.NodeProto) -> None:
        """Add a node as an operation ONNX."""
        self.operations.append(
            GraphOp(
                ONNX, tensors_read(node), tuple(node.output), (("proto", node.SerializeToString(deterministic=True)),)
            )
        )
        for name in filter(None, node.output):
            self._note_kind(name)

    def _read_node(self, node: onnx.NodeProto) -> None:
        """Add the operations for a node of the model; a QuantizeLinear is read with the float operator before it.
        Raises NotInAlgebra.
        """
        if node.op_type == "QuantizeLinear":
            self._read_quantised_node(node)
            return
        readers = READERS
        if (
            node.op_type in self.float_readers
            and node.domain in ("", "ai.onnx")
            and self.dtype_of(node.input[0]) == FLOAT
        ):
            readers = self.float_readers
        if node.op_type not in readers:
            raise NotInAlgebra
        readers[node.op_type](self, node)
        if node.name:
            self.labels[node.output[0]] = node.name

    def _read_quantised_node(self, node: onnx.NodeProto) -> None:
        """Add the operations for a QuantizeLinear and the float operator before it. Raises NotInAlgebra."""
        float_node, y = self.makers.get(node.input[0]), self.quantised(node)
        if float_node is None or self.uses[node.input[0]] != 1 or float_node.domain not in ("", "com.microsoft"):
            raise NotInAlgebra
        if float_node.op_type == "DequantizeLinear":
            float_node = onnx.NodeProto(op_type="Identity", input=[node.input[0]], output=[node.input[0]])
        if float_node.op_type not in QDQ_READERS:
            raise NotInAlgebra
        QDQ_READERS[float_node.op_type](self, float_node, y)
        if float_node.name:
            self.labels[y.name] = float_node.name

    # Operands of nodes ---------------------------------------------------------------------------------------------

    def array(self, name: str) -> Array:
        """Return a constant. NotInAlgebra for a tensor that is none."""
        if name not in self.constants:
            raise NotInAlgebra
        return self.constants[name]

    def operation(self, node: onnx.NodeProto, y: BytesOf | None = None) -> QuantisedOperation:
        """Read `node` as an operation on quantised operands. Raises NotInAlgebra. y: the result, where `node` is a
        float operator before its QuantizeLinear; None where it is a QLinear operator.
        """
        spec = op_spec(node.op_type)
        data, bias = (
            spec.data_among(len(node.input)),
            next((spec.operands[n].name for n in spec.inputs_with_role(Role.BIAS)), ""),
        )
        bias_name = named_input(node, bias) if bias else ""
        if y is not None:
            operands = [self.dequantised(node.input[number]) for number in data]
            bias_array = self.bias(bias_name, operands[0], operands[1]) if bias_name else None
            return QuantisedOperation(node.op_type, node, operands, bias_array, y, True)
        if spec.scale_input is None or spec.zero_point_input is None:
            raise NotInAlgebra
        operands = []
        for number in data:
            scale, zero = spec.quantisation_of(number, len(node.input))
            operands.append(self.bytes_of(node.input[number], node.input[scale], node.input[zero]))
        result = BytesOf(
            node.output[0], self.array(node.input[spec.scale_input]), self.array(node.input[spec.zero_point_input])
        )
        bias_array = self.array(bias_name) if bias_name else None
        return QuantisedOperation(spec.variant_of, node, operands, bias_array, result, False)

    def bytes_of(self, name: str, scale: str, zero: str) -> BytesOf:
        """Return the tensor `name` with the scale and zero point in these constants; "" stands for a zero point of
        0.
        """
        dtype = np.dtype(self.dtype_of(name))
        return BytesOf(name, self.array(scale), self.array(zero) if zero else np.zeros((), dtype))

    def dequantised(self, name: str) -> BytesOf:
        """Return the bytes that the DequantizeLinear before the float tensor `name` reads. Raises NotInAlgebra."""
        node = self.makers.get(name)
        if node is None or node.op_type != "DequantizeLinear" or node.domain not in ("", "com.microsoft"):
            raise NotInAlgebra
        x = self.bytes_of(node.input[0], named_input(node, "x_scale"), named_input(node, "x_zero_point"))
        if x.scale.dtype != np.float32 or any(attribute.name != "axis" for attribute in node.attribute):
            raise NotInAlgebra
        axis = attributes_of(node).get("axis", 1)
        if x.scale.size > 1 and x.scale.size != self.shape(x.name)[axis]:
            raise NotInAlgebra
        return replace(x, axis=int(axis)) if x.scale.size > 1 else x

    def quantised(self, node: onnx.NodeProto) -> BytesOf:
        """Return the bytes that a QuantizeLinear makes. Raises NotInAlgebra."""
        if len(node.input) < 3 or any(attribute.name != "axis" for attribute in node.attribute):
            raise NotInAlgebra
        y = BytesOf(
            node.output[0], self.array(named_input(node, "y_scale")), self.array(named_input(node, "y_zero_point"))
        )
        if y.scale.size != 1 or y.scale.dtype != np.float32 or y.zero.dtype.name not in BYTES:
            raise NotInAlgebra
        return y

    def dtype_of(self, name: str) -> str:
        """Return the element type of a tensor. NotInAlgebra where it is not known."""
        if name in self.constants:
            return self.constants[name].dtype.name
        if name in self.kinds:
            return self.kinds[name].dtype
        if name in self.dtypes:
            return self.dtypes[name]
        raise NotInAlgebra

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor of the model. NotInAlgebra where it is not known."""
        shape = self.constants[name].shape if name in self.constants else self.shapes.get(name)
        if shape is None or any(size <= 0 for size in shape):
            raise NotInAlgebra
        return shape

    # Operations of the graph ---------------------------------------------------------------------------------------

    def constant(self, array: Any, near: str) -> str:
        """Add a constant named like `near`, unless one of that name has this content, and return its name."""
        array = np.asarray(array, order="C")
        name, number = near, 0
        while name in self.constants or name in self.makers:
            known = self.constants.get(name)
            if known is not None and known.dtype == array.dtype and np.array_equal(known, array):
                return name
            number += 1
            name = f"{near}_{number}"
        self.constants[name] = array
        return name

    def emit(self, op: str, inputs: tuple[str, ...], output: str, note: Note = None, **attributes: Any) -> str:
        """Add the operation `op` that makes the tensor `output`, and return that name. NotInAlgebra where shapes are
        unknown or contradict the model's.
        """
        shapes = [self.shape(name) if name in self.constants else self.shape_in_graph(name) for name in inputs]
        shape = OPERATORS[op].shape(shapes, attributes)
        known = self.shapes.get(output)
        if known is not None and known != tuple(shape):
            raise NotInAlgebra
        dtype = OPERATORS[op].dtype([self.dtype_of(name) for name in inputs])
        self.operations.append(GraphOp(op, inputs, (output,), tuple(sorted(attributes.items())), note))
        self.kinds[output] = TensorKind(tuple(shape), dtype)
        return output

    def shape_in_graph(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor of the graph. NotInAlgebra where it is not known."""
        shape = self.kinds.get(name, TensorKind(None, "")).shape
        if shape is None or any(size <= 0 for size in shape):
            raise NotInAlgebra
        return shape

    def bias(self, name: str, x: BytesOf, w: BytesOf) -> Array | None:
        """Return the int32 bias under the DequantizeLinear `name`. NotInAlgebra where its scale is not that of the
        products.
        """
        if not name:
            return None
        b = self.dequantised(name)
        steps = x.quantisation.scale * w.scale.reshape(-1).astype(np.float64)
        if np.any(b.zero) or not np.allclose(b.scale.reshape(-1).astype(np.float64), steps, rtol=1e-5, atol=0):
            raise NotInAlgebra
        return self.array(b.name)


def tensors_read(node: onnx.NodeProto) -> tuple[str, ...]:
    """Return the inputs of a node, then the outer tensors that its subgraphs read."""
    captured = dict.fromkeys(_names_read_by_subgraphs(node))
    return (*node.input, *(name for name in captured if name not in node.input))


def _names_read_by_subgraphs(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the names that subgraphs of a node read from outside of them."""
    for attribute in node.attribute:
        for graph in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])):
            defined = {value.name for value in (*graph.input, *graph.initializer)}
            defined |= {name for inner_node in graph.node for name in inner_node.output}
            for inner_node in graph.node:
                yield from (name for name in tensors_read(inner_node) if name and name not in defined)
            yield from (out.name for out in graph.output if out.name not in defined)
