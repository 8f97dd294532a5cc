"""Interfaces by which operators of the algebra use the reader and the writer of ONNX models (reading.py, writing.py).

Operators know these interfaces alone, so that reading and writing may know all operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import onnx

from celosia.compiler.superoptimise.graph import Array, BytesGraph, GraphOp, Note, Quantisation


class OnnxReader(Protocol):
    """Reads one model: gives its tensors, and takes operations. Methods raise NotInAlgebra for what is not known.

    constants: by name. moved_dtypes: element types for which operators that move elements are read.
    """

    constants: dict[str, Array]
    moved_dtypes: tuple[str, ...]

    def array(self, name: str) -> Array:
        """Return a constant."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor of the model."""

    def shape_in_graph(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor of the graph."""

    def dtype_of(self, name: str) -> str:
        """Return the element type of a tensor."""

    def dequantised(self, name: str) -> Any:
        """Return the bytes, as a BytesOf, that the DequantizeLinear before the float tensor `name` reads."""

    def operation(self, node: onnx.NodeProto, y: Any = None) -> Any:
        """Read a node as a QuantisedOperation, whose result is the BytesOf `y` if the node is a float operator."""

    def constant(self, array: Any, near: str) -> str:
        """Add a constant named like `near`, and return its name."""

    def emit(self, op: str, inputs: tuple[str, ...], output: str, note: Note = None, **attributes: Any) -> str:
        """Add the operation `op` that makes the tensor `output`, and return that name."""


class OnnxWriter(Protocol):
    """Writes one graph: takes nodes and constants.

    absorbed: tensors that are not written, since the node of another operation computes them.
    """

    graph: BytesGraph
    absorbed: set[str]

    def parts_of(self, operation: GraphOp) -> list[str]:
        """List the parts of a Concat, with those of nested ones."""

    def scale_of_concat(self, operation: GraphOp) -> Quantisation | None:
        """Return the quantisation of a Concat's result; None where its parts are brought to different ones."""

    def constant(self, array: Any, near: str) -> str:
        """Add a constant, unless one with this content exists, and return its name."""

    def node(self, op: str, inputs: Sequence[str], outputs: Sequence[str], domain: str = "", **attributes: Any) -> None:
        """Append a node with a unique name."""

    def quantised_node(
        self, operator: str, operands: Sequence[Sequence[str]], result: Sequence[str], bias: str = "",
        **attributes: Any,
    ) -> None:  # fmt: skip
        """Append the QLinear operator of a float operator."""

    def float_node(
        self, operator: str, inputs: Sequence[str], y: str, quantisation: Quantisation, label: str | None = None,
        **attributes: Any,
    ) -> None:  # fmt: skip
        """Append a float operator, and the QuantizeLinear that makes `y` of its result."""

    def node_on_bytes(self, operator: str, operation: GraphOp, *others: str, **attributes: Any) -> None:
        """Append an operator that moves or compares bytes."""

    def scale_and_zero(self, quantisation: Quantisation, dtype: str, near: str) -> tuple[str, str]:
        """Add scale and zero point as constants, and return their names."""

    def with_scale_and_zero(self, name: str, quantisation: Quantisation) -> tuple[str, str, str]:
        """Add scale and zero point of the tensor `name`, and return its name and theirs."""

    def dequantise(self, name: str, quantisation: Quantisation) -> str:
        """Return the name of the floats that bytes stand for."""

    def dequantise_constant(self, name: str, scale: Array, zero: Array, axis: int) -> str:
        """Return the name of the floats of constant weights or biases."""

    def quantise(self, floats: str, y: str, quantisation: Quantisation) -> None:
        """Append the QuantizeLinear that makes `y` of the tensor `floats`."""
