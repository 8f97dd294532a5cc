"""onnxruntime as the oracle: its own optimised graph, every tensor inside it, and its integer operators one by one.

For each operator that onnxruntime runs in integers, `side_by_side` puts the same operator, in ONNX's own layout, into
one model of independent operators. Its inputs are the tensors that onnxruntime computed, so that a difference in one
operator cannot hide one in another.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from celosia.driver.workstation.oracle import expose_tensors, open_session

Array = NDArray[Any]

INTEGER_OPERATORS = {
    "QLinearConv", "QGemm", "QLinearMatMul", "QLinearAdd", "QLinearMul", "QLinearConcat", "QLinearGlobalAveragePool",
    "QLinearAveragePool", "QLinearSoftmax", "QLinearSigmoid", "QLinearLeakyRelu", "NhwcMaxPool", "MaxPool",
    "QuantizeLinear", "DequantizeLinear",
}  # fmt: skip
FLOAT_INSIDE = {"QLinearAveragePool", "QLinearSoftmax"}
"""Operators with 8-bit inputs and outputs that onnxruntime computes in float."""
SAME_LAYOUT = {
    "QLinearAdd", "QLinearMul", "QLinearConcat", "QLinearSigmoid", "QLinearLeakyRelu", "QuantizeLinear",
    "DequantizeLinear", "Add", "Mul", "HardSigmoid", "Sigmoid", "Relu", "Clip", "HardSwish", "Conv", "MaxPool",
}  # fmt: skip
TO_NHWC, TO_NCHW = [0, 2, 3, 1], [0, 3, 1, 2]


class Oracle:
    """One model under onnxruntime, int8: pairs of int8 become integer operators; False is onnxruntime's default."""

    def __init__(self, path: Path, int8: bool = True) -> None:
        with tempfile.TemporaryDirectory() as folder:
            saved = Path(folder) / "optimised.onnx"
            self.session = open_session(path, save=saved, int8=int8)
            self.graph = onnx.load(saved)
        self.outputs = [value.name for value in self.session.get_outputs()]
        self._exposed = open_session(expose_tensors(self.graph), "DISABLE_ALL", int8=int8)
        self._names = [value.name for value in self._exposed.get_outputs()]

    def run(self, feed: Mapping[str, Array]) -> dict[str, Array]:
        """All outputs of the model, by name."""
        return dict(zip(self.outputs, self.session.run(None, dict(feed))))

    def tensors(self, feed: Mapping[str, Array]) -> dict[str, Array]:
        """Every tensor of the optimised graph. RuntimeError where its outputs are not those of the model itself."""
        values = dict(zip(self._names, self._exposed.run(None, dict(feed)))) | dict(feed)
        for name, expected in self.run(feed).items():
            if not np.array_equal(values[name], expected):
                raise RuntimeError(f"onnxruntime's graph with all tensors exposed gives another {name!r}")
        return values

    def output_step(self, name: str) -> float:
        """One step of the last quantisation before output `name`."""
        producers = {out: node for node in self.graph.graph.node for out in node.output}
        constants = {c.name: c for c in self.graph.graph.initializer}
        while (node := producers[name]).op_type != "DequantizeLinear":
            name = node.input[0]
        return float(numpy_helper.to_array(constants[node.input[1]]).max())


@dataclass(frozen=True)
class Operator:
    """One integer operator of onnxruntime's graph, as an output of the model made by `side_by_side`."""

    name: str
    op: str
    output: str
    expected: Array
    """onnxruntime's own result, in the layout of `output`."""


@dataclass(frozen=True)
class SideBySide:
    model: onnx.ModelProto
    feed: dict[str, Array]
    operators: list[Operator]

    def only(self, chosen: Operator) -> SideBySide:
        """The model of one operator."""
        model = onnx.ModelProto()
        model.CopyFrom(self.model)
        graph, wanted = model.graph, {chosen.output}
        nodes: list[onnx.NodeProto] = []
        for node in reversed(self.model.graph.node):
            if wanted & set(node.output):
                nodes.insert(0, node)
                wanted |= set(node.input)
        for field, kept in (
            (graph.node, nodes), (graph.output, [v for v in self.model.graph.output if v.name == chosen.output]),
            (graph.input, [v for v in self.model.graph.input if v.name in wanted]),
            (graph.initializer, [c for c in self.model.graph.initializer if c.name in wanted]),
        ):  # fmt: skip
            del field[:]
            field.extend(kept)
        return SideBySide(model, {name: value for name, value in self.feed.items() if name in wanted}, [chosen])


def side_by_side(oracle: Oracle, tensors: Mapping[str, Array]) -> SideBySide:
    """All integer operators of `oracle`, each with the inputs that it has in `tensors`."""
    return _SideBySide(oracle.graph, tensors).run()


class _SideBySide:
    def __init__(self, model: onnx.ModelProto, tensors: Mapping[str, Array]) -> None:
        self.model, self.tensors = model, tensors
        self.constants = {c.name: c for c in model.graph.initializer}
        self.producers = {out: node for node in model.graph.node for out in node.output}
        self.channels_last: set[str] = set()
        """Tensors that onnxruntime keeps as [images, rows, columns, channels]."""
        self.nodes: list[onnx.NodeProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []
        self.feed: dict[str, Array] = {}
        self.used: set[str] = set()
        self.operators: list[Operator] = []

    def run(self) -> SideBySide:
        for node in self.model.graph.node:
            self._follow_layout(node)
            data = [name for name in node.input if name in self.tensors]
            if node.op_type in INTEGER_OPERATORS and any(
                self.tensors[name].itemsize == 1 for name in [*data, *node.output]
            ):
                self._add(node)
        constants = [c for name, c in self.constants.items() if name in self.used]
        graph = helper.make_graph(self.nodes, "side_by_side", self.inputs, self.outputs, constants)
        opsets = [entry for entry in self.model.opset_import if entry.domain in ("", "ai.onnx", "com.microsoft")]
        return SideBySide(helper.make_model(graph, opset_imports=opsets, ir_version=10), self.feed, self.operators)

    def _follow_layout(self, node: onnx.NodeProto) -> None:
        attrs = {attr.name: helper.get_attribute_value(attr) for attr in node.attribute}
        if node.op_type == "Transpose":
            last = list(attrs.get("perm", [])) == TO_NHWC
        elif node.op_type == "NhwcMaxPool" or attrs.get("channels_last", 0):
            last = True
        else:
            last = node.op_type in SAME_LAYOUT and any(name in self.channels_last for name in node.input)
        if last:
            self.channels_last.update(node.output)

    def _nchw(self, name: str) -> Array:
        array = self.tensors[name]
        moved = name in self.channels_last and array.ndim == 4
        return np.ascontiguousarray(array.transpose(TO_NCHW)) if moved else array

    def _add(self, node: onnx.NodeProto) -> None:
        place = len(self.operators)
        names = [self._input(node, place, i, name) for i, name in enumerate(node.input)]
        op, domain = ("MaxPool", "") if node.op_type == "NhwcMaxPool" else (node.op_type, node.domain)
        if op == "QLinearConv":
            domain = ""
        attrs = {attr.name: helper.get_attribute_value(attr) for attr in node.attribute}
        attrs.pop("channels_last", None)
        if node.output[0] in self.channels_last and "axis" in attrs and len(self.tensors[node.output[0]].shape) == 4:
            attrs["axis"] = TO_NHWC[attrs["axis"]] if op == "QLinearConcat" else attrs["axis"]
        out = f"operator_{place}"
        label = node.name or f"{op}_{place}"
        self.nodes.append(helper.make_node(op, names, [out], name=label, domain=domain, **attrs))
        expected = self._nchw(node.output[0])
        self.outputs.append(_value(out, expected))
        self.operators.append(Operator(label, op, out, expected))

    def _input(self, node: onnx.NodeProto, place: int, position: int, name: str) -> str:
        if not name or name in self.constants:
            self.used.add(name)
            return name
        array = self._nchw(name)
        own = f"operator_{place}_input_{position}"
        self.inputs.append(_value(own, array))
        self.feed[own] = array
        if array.ndim == 4 and array.itemsize == 1 and self._from_integers(name):
            # In the network this operator reads what the accelerator wrote: a maximum over one pixel writes it again.
            copy = f"{own}_copy"
            self.nodes.append(helper.make_node("MaxPool", [own], [copy], name=copy, kernel_shape=[1, 1]))
            return copy
        return own

    def _from_integers(self, name: str) -> bool:
        """Whether an integer operator computes `name`, shape and layout aside."""
        node = self.producers.get(name)
        while node is not None and node.op_type in ("Transpose", "Reshape", "Flatten"):
            node = self.producers.get(node.input[0])
        return node is not None and node.op_type in INTEGER_OPERATORS - {"QuantizeLinear", "DequantizeLinear"}


def _value(name: str, array: Array) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
