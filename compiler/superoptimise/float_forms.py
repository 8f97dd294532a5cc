"""Readers of operators on floats, for models that the CPU runs; writing.py has their writers."""

from __future__ import annotations

from collections.abc import Mapping

import onnx

from celosia.compiler.ops.elementwise import UNARY
from celosia.compiler.program.op_spec import filling
from celosia.compiler.superoptimise.byte_forms import ByteReader, windows_of
from celosia.compiler.superoptimise.graph import FloatMap
from celosia.compiler.superoptimise.reading import BYTES, NodeReader, NotInAlgebra, OnnxReader, attributes_of

FLOAT = "float32"
"""The element type of these operators."""
FLOAT_READERS: dict[str, NodeReader] = {}
"""Readers of float operators, by ONNX operator."""
_reads = filling(FLOAT_READERS)


@_reads("Conv")
def _read_conv(reader: OnnxReader, node: onnx.NodeProto) -> None:
    """Read a Conv with constant weights and bias."""
    constants = [name for name in node.input[1:] if name]
    kernel, *_ = (reader.array(name).shape[2:] for name in constants)
    group = attributes_of(node).get("group", 1)
    inputs = (node.input[0], *constants)
    reader.emit("float_convolve", inputs, node.output[0], group=group, **windows_of(node, kernel))


@_reads("MatMul")
def _read_matmul(reader: OnnxReader, node: onnx.NodeProto) -> None:
    """Read a product with a constant matrix."""
    if reader.array(node.input[1]).ndim != 2:
        raise NotInAlgebra
    reader.emit("float_multiply", tuple(node.input), node.output[0])


@_reads(*UNARY)
def _read_function(reader: OnnxReader, node: onnx.NodeProto) -> None:
    """Read a function of single floats."""
    if len(node.input) != 1 or len(node.output) != 1 or reader.dtype_of(node.output[0]) != FLOAT:
        raise NotInAlgebra
    f = FloatMap(node.op_type, tuple(sorted(attributes_of(node).items())))
    reader.emit("map", (node.input[0],), node.output[0], f=f)


class FloatReader(ByteReader):
    """A reader that knows operators on floats beside those on bytes."""

    moved_dtypes = (*BYTES, FLOAT)
    readers: Mapping[str, NodeReader] = FLOAT_READERS
    """Readers of nodes whose first operand is float32."""

    def _read_node(self, node: onnx.NodeProto) -> None:
        """Read a node by a reader of floats where its first operand is float32 and there is one, else as bytes."""
        read = self.readers.get(node.op_type) if node.domain in ("", "ai.onnx") else None
        if read is None or self.dtype_of(node.input[0]) != FLOAT:
            super()._read_node(node)
            return
        read(self, node)
        if node.name:
            self.labels[node.output[0]] = node.name
