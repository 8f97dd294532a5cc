"""Read and write operators of floats: their forms in ONNX and in the algebra."""

from __future__ import annotations

from collections.abc import Mapping

import onnx

from celosia.compiler.cpu.ops.elementwise import UNARY
from celosia.compiler.program.traits import filling
from celosia.compiler.superoptimise.forms import READER, windows_of
from celosia.compiler.superoptimise.graph import FloatMap
from celosia.compiler.superoptimise.reading import BYTES, NodeReader, NotOurs, OnnxReader, attributes_of

FLOAT = "float32"
FLOAT_READERS: dict[str, NodeReader] = {}
_reads = filling(FLOAT_READERS)


@_reads("Conv")
def _convolution(reader: OnnxReader, node: onnx.NodeProto) -> None:
    fixed = [name for name in node.input[1:] if name]
    kernel, *_ = (reader.array(name).shape[2:] for name in fixed)
    group = attributes_of(node).get("group", 1)
    inputs = (node.input[0], *fixed)
    reader.emit("float_convolve", inputs, node.output[0], group=group, **windows_of(node, kernel))


@_reads("MatMul")
def _product(reader: OnnxReader, node: onnx.NodeProto) -> None:
    if reader.array(node.input[1]).ndim != 2:
        raise NotOurs
    reader.emit("float_multiply", tuple(node.input), node.output[0])


@_reads(*UNARY)
def _function(reader: OnnxReader, node: onnx.NodeProto) -> None:
    if len(node.input) != 1 or len(node.output) != 1 or reader.dtype_of(node.output[0]) != FLOAT:
        raise NotOurs
    f = FloatMap(node.op_type, tuple(sorted(attributes_of(node).items())))
    reader.emit("map", (node.input[0],), node.output[0], f=f)


class FloatReader(READER):
    """A reader that knows operators of floats, too: for models that the CPU runs."""

    moved = (*BYTES, FLOAT)
    readers: Mapping[str, NodeReader] = FLOAT_READERS

    def _node(self, node: onnx.NodeProto) -> None:
        read = self.readers.get(node.op_type) if node.domain in ("", "ai.onnx") else None
        if read is None or self.dtype_of(node.input[0]) != FLOAT:
            super()._node(node)
            return
        read(self, node)
        if node.name:
            self.labels[node.output[0]] = node.name
