"""ONNX models to the algebra: operators with QDQ around them, and onnxruntime's QLinear operators, become one form.

Scales meet in multipliers here, as onnxruntime computes them; what is no operator of bytes stays an operator of ONNX.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from celosia.compiler.graph.operands import named_input
from celosia.compiler.numerics import conv_scale
from celosia.compiler.ops import op_spec
from celosia.compiler.program.op_spec import Role, filling, quantised_form
from celosia.compiler.superoptimise.graph import (
    ONNX,
    Array,
    BytesGraph,
    GraphOp,
    Meant,
    TensorKind,
    Written,
)
from celosia.compiler.superoptimise.operators import OPERATORS

BYTES = ("int8", "uint8")
Shapes = Mapping[str, tuple[int, ...] | None]


class NotOurs(Exception):
    """A node that stays an operator of ONNX."""


@dataclass(frozen=True)
class BytesOf:
    """A tensor of bytes, or of int32 for a bias, and what they mean. scale, zero: of one element or
    [channels]. axis: along which a DequantizeLinear has them; None where the operator says it."""

    name: str
    scale: NDArray[np.float32]
    zero: Array
    axis: int | None = None

    @property
    def meant(self) -> Meant:
        """Parameters of all elements. NotOurs where channels differ."""
        if self.scale.size != 1 or self.zero.size != 1:
            raise NotOurs
        return Meant(float(self.scale.item()), int(self.zero.item()))


@dataclass(frozen=True)
class QuantisedOperation:
    """A float operator of quantised operands with a quantised result, in one of both forms.

    qdq: it stands between DequantizeLinear and QuantizeLinear; else it is an operator of onnxruntime.
    """

    operator: str
    node: onnx.NodeProto
    operands: list[BytesOf]
    bias: Array | None
    y: BytesOf
    qdq: bool


class OnnxReader:
    """shapes: of the model's tensors, None where they are not known. moved: types of what Slice, Concat and others like
    them are of the algebra for."""

    moved: tuple[str, ...] = BYTES

    def __init__(self, model: onnx.ModelProto, shapes: Shapes, dtypes: Mapping[str, str]) -> None:
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
        for name in (*(n for node in nodes for n in read_by(node)), *(out.name for out in model.graph.output)):
            self.uses[name] = self.uses.get(name, 0) + 1
        self.kinds: dict[str, TensorKind] = {}
        self.operations: list[GraphOp] = []
        self.labels: dict[str, str] = {}

    def read(self) -> BytesGraph:
        """The whole model."""
        given = [value.name for value in self.model.graph.input if value.name not in self.constants]
        for name in given:
            self._note_kind(name)
        for node in self.nodes:
            before = len(self.operations)
            try:
                self._node(node)
            except NotOurs:
                del self.operations[before:]
                self._as_it_is(node)
        outputs = tuple(value.name for value in self.model.graph.output)
        graph = BytesGraph((), self.constants, self.kinds, tuple(given), outputs, self.labels)
        return graph.ordered(self.operations)

    def _note_kind(self, name: str) -> None:
        """Enter the type of a tensor that no reader makes: an input, or a result of an operator that stays ONNX's.

        A type that is not known counts as float32.
        """
        self.kinds[name] = TensorKind(self.shapes.get(name), self.dtypes.get(name, "float32"))

    def _as_it_is(self, node: onnx.NodeProto) -> None:
        self.operations.append(
            GraphOp(ONNX, read_by(node), tuple(node.output), (("proto", node.SerializeToString(deterministic=True)),))
        )
        for name in filter(None, node.output):
            self._note_kind(name)

    def _node(self, node: onnx.NodeProto) -> None:
        """Raises NotOurs."""
        if node.op_type == "QuantizeLinear":
            inner = self.makers.get(node.input[0])
            y = self.quantised(node)
            if inner is None or self.uses[node.input[0]] != 1 or inner.domain not in ("", "com.microsoft"):
                raise NotOurs
            if inner.op_type == "DequantizeLinear":
                inner = onnx.NodeProto(op_type="Identity", input=[node.input[0]], output=[node.input[0]])
            read_qdq: Any = QDQ_READERS.get(inner.op_type, not_ours)
            read_qdq(self, inner, y)
            if inner.name:
                self.labels[y.name] = inner.name
        else:
            read: Any = READERS.get(node.op_type, not_ours)
            read(self, node)
            if node.name:
                self.labels[node.output[0]] = node.name

    # What nodes say ------------------------------------------------------------------------------------------------

    def array(self, name: str) -> Array:
        """A constant. NotOurs."""
        if name not in self.constants:
            raise NotOurs
        return self.constants[name]

    def operation(self, node: onnx.NodeProto, y: BytesOf | None = None) -> QuantisedOperation:
        """Read `node` as an operation on quantised operands. NotOurs.

        y: the result, where `node` is a float operator in front of its QuantizeLinear; else it is a quantised form.
        """
        spec = op_spec(node.op_type)
        data, bias = spec.data_among(len(node.input)), next((spec.operands[n].name for n in spec.having(Role.BIAS)), "")
        biases = named_input(node, bias) if bias else ""
        if y is not None:
            operands = [self.dequantised(node.input[number]) for number in data]
            fixed = self.bias(biases, operands[0], operands[1]) if biases else None
            return QuantisedOperation(node.op_type, node, operands, fixed, y, True)
        if spec.scale is None or spec.zero_point is None:
            raise NotOurs
        operands = []
        for number in data:
            scale, zero = spec.quantisation_of(number, len(node.input))
            operands.append(self.bytes_of(node.input[number], node.input[scale], node.input[zero]))
        result = BytesOf(node.output[0], self.array(node.input[spec.scale]), self.array(node.input[spec.zero_point]))
        fixed = self.array(biases) if biases else None
        return QuantisedOperation(spec.variant_of, node, operands, fixed, result, False)

    def bytes_of(self, name: str, scale: str, zero: str) -> BytesOf:
        """`name` with the scale and zero point in these constants."""
        dtype = np.dtype(self.dtype_of(name))
        return BytesOf(name, self.array(scale), self.array(zero) if zero else np.zeros((), dtype))

    def dequantised(self, name: str) -> BytesOf:
        """The bytes that `name` is the DequantizeLinear of. NotOurs."""
        node = self.makers.get(name)
        if node is None or node.op_type != "DequantizeLinear" or node.domain not in ("", "com.microsoft"):
            raise NotOurs
        found = self.bytes_of(node.input[0], named_input(node, "x_scale"), named_input(node, "x_zero_point"))
        if found.scale.dtype != np.float32 or any(each.name not in ("axis",) for each in node.attribute):
            raise NotOurs
        axis = attributes_of(node).get("axis", 1)
        if found.scale.size > 1 and found.scale.size != self.shape(found.name)[axis]:
            raise NotOurs
        return replace(found, axis=int(axis)) if found.scale.size > 1 else found

    def quantised(self, node: onnx.NodeProto) -> BytesOf:
        """The bytes that a QuantizeLinear makes. NotOurs."""
        if len(node.input) < 3 or any(each.name != "axis" for each in node.attribute):
            raise NotOurs
        found = BytesOf(
            node.output[0], self.array(named_input(node, "y_scale")), self.array(named_input(node, "y_zero_point"))
        )
        if found.scale.size != 1 or found.scale.dtype != np.float32 or found.zero.dtype.name not in BYTES:
            raise NotOurs
        return found

    def dtype_of(self, name: str) -> str:
        """NotOurs where it is not known."""
        if name in self.constants:
            return self.constants[name].dtype.name
        if name in self.kinds:
            return self.kinds[name].dtype
        if name in self.dtypes:
            return self.dtypes[name]
        raise NotOurs

    def shape(self, name: str) -> tuple[int, ...]:
        """NotOurs where it is not known."""
        found = self.constants[name].shape if name in self.constants else self.shapes.get(name)
        if found is None or any(size <= 0 for size in found):
            raise NotOurs
        return found

    # What is made --------------------------------------------------------------------------------------------------

    def constant(self, array: Any, near: str) -> str:
        """The name of a constant of this content."""
        array = np.asarray(array, order="C")
        name, number = near, 0
        while name in self.constants or name in self.makers:
            known = self.constants.get(name)
            if (
                known is not None
                and known.dtype == array.dtype
                and known.shape == array.shape
                and (known == array).all()
            ):
                return name
            number += 1
            name = f"{near}_{number}"
        self.constants[name] = array
        return name

    def emit(self, op: str, inputs: tuple[str, ...], output: str, note: Any = None, **given: Any) -> str:
        """An operation of the algebra that makes `output`."""
        shapes = [self.shape(name) if name in self.constants else self._shape_of(name) for name in inputs]
        shape = OPERATORS[op].shape(shapes, given)
        known = self.shapes.get(output)
        if known is not None and known != tuple(shape):
            raise NotOurs
        dtype = {"convolve": "int32", "multiply": "int32"}.get(op) or self.dtype_of(
            inputs[-1] if op == "requantise" else inputs[0]
        )
        self.operations.append(GraphOp(op, inputs, (output,), tuple(sorted(given.items())), note))
        self.kinds[output] = TensorKind(tuple(shape), dtype)
        return output

    def _shape_of(self, name: str) -> tuple[int, ...]:
        found = self.kinds.get(name, TensorKind(None, "")).shape
        if found is None or any(size <= 0 for size in found):
            raise NotOurs
        return found

    def product(
        self, op: str, x: BytesOf, w: BytesOf, b: Array | None, y: BytesOf, written: Written, **given: Any
    ) -> None:
        """A requantised convolution or product of matrices. Channels are the first axis of w, or its last one."""
        weights = self.array(w.name)
        channels = weights.shape[0 if op == "convolve" else 1]
        if self.dtype_of(x.name) not in BYTES or weights.dtype.name not in BYTES:
            raise NotOurs
        if np.dtype(self.dtype_of(x.name)) != y.zero.dtype or np.any(~np.isfinite(w.scale)) or np.any(w.scale <= 0):
            raise NotOurs
        if w.scale.size not in (1, channels) or w.zero.size not in (1, channels):
            raise NotOurs
        m = np.broadcast_to(conv_scale(x.meant.scale, w.scale, y.meant.scale).reshape(-1), (channels,))
        wz = np.broadcast_to(w.zero.reshape(-1), (channels,))
        near = y.name
        bias = np.zeros(channels, np.int32) if b is None else b.reshape(-1)
        if bias.shape != (channels,) or bias.dtype != np.int32:
            raise NotOurs
        acc = self.emit(
            op,
            (x.name, self.constant(x.zero.reshape(()), f"{near}_xz"), w.name, self.constant(wz, f"{near}_wz"),
             self.constant(bias, f"{near}_b")),
            f"{near}_acc", **given,
        )  # fmt: skip
        z = self.constant(y.zero.reshape(()), f"{near}_z")
        axis = 1 if op == "convolve" else len(self._shape_of(acc)) - 1
        self.emit("requantise", (acc, self.constant(m, f"{near}_m"), z), near, written, axis=axis)

    def bias(self, name: str, x: BytesOf, w: BytesOf) -> Array | None:
        """An int32 bias in the steps of products, under DequantizeLinear. NotOurs for another."""
        if not name:
            return None
        b = self.dequantised(name)
        steps = x.meant.scale * w.scale.reshape(-1).astype(np.float64)
        if np.any(b.zero) or not np.allclose(b.scale.reshape(-1).astype(np.float64), steps, rtol=1e-5, atol=0):
            raise NotOurs
        return self.array(b.name)


def read_by(node: onnx.NodeProto) -> tuple[str, ...]:
    """Inputs of a node, and behind them the outer tensors that its subgraphs read."""
    found = dict.fromkeys(_captured(node))
    return (*node.input, *(name for name in found if name not in node.input))


def _captured(node: onnx.NodeProto) -> Iterator[str]:
    for attribute in node.attribute:
        for graph in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else [])):
            own = {v.name for v in (*graph.input, *graph.initializer)} | {o for n in graph.node for o in n.output}
            for inner in graph.node:
                yield from (name for name in read_by(inner) if name and name not in own)
            yield from (out.name for out in graph.output if out.name not in own)


def attributes_of(node: onnx.NodeProto) -> dict[str, Any]:
    """By name; lists as tuples of ints."""
    found = {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}


QdqReader = Callable[[OnnxReader, onnx.NodeProto, BytesOf], None]
QDQ_READERS: dict[str, QdqReader] = {}
"""Readers of operators before QuantizeLinear."""
NodeReader = Callable[[OnnxReader, onnx.NodeProto], None]
READERS: dict[str, NodeReader] = {}
"""Readers of the other operators."""
qdq_reader = filling(QDQ_READERS)
node_reader = filling(READERS)


OperationReader = Callable[[OnnxReader, QuantisedOperation], None]


def operation_reader(*operators: str, quantised_too: bool = True) -> Callable[[OperationReader], OperationReader]:
    """Adds a reader of float operators before QuantizeLinear and, if `quantised_too`, of their quantised forms."""

    def add(function: OperationReader) -> OperationReader:
        for operator in operators:
            QDQ_READERS[operator] = lambda reader, node, y: function(reader, reader.operation(node, y))
            if quantised_too:
                READERS[quantised_form(operator)] = lambda reader, node: function(reader, reader.operation(node))
        return function

    return add


def not_ours(*what: Any) -> None:
    """Raises NotOurs."""
    raise NotOurs
