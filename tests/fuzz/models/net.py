"""Build a graph node by node, and run each node under onnxruntime as it is added.

So shapes and values of all tensors are known, and a node that onnxruntime refuses is not added.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import onnx
from numpy.typing import ArrayLike, DTypeLike, NDArray
from onnx import helper, numpy_helper

from celosia.driver.workstation.oracle import OracleError, open_session, run_session

Array = NDArray[Any]
T = TypeVar("T")
MS = "com.microsoft"
IR_VERSION = 10


class Draw(random.Random):
    """Random choices, and random arrays."""

    def __init__(self, seed: str) -> None:
        super().__init__(seed)
        self.arrays = np.random.default_rng(self.getrandbits(63))

    def chance(self, share: float = 0.5) -> bool:
        """Return True with this probability."""
        return self.random() < share

    def shape(self, rank: int, most: int = 6) -> tuple[int, ...]:
        """Draw `rank` sizes from 1 to `most`."""
        return tuple(self.randint(1, most) for _ in range(rank))

    def floats(self, shape: Sequence[int], spread: float = 1.0) -> Array:
        """Draw float32 values from a normal distribution around 0 with this deviation."""
        return (self.arrays.standard_normal(tuple(shape)) * spread).astype(np.float32)

    def array(self, dtype: DTypeLike, shape: Sequence[int], spread: float = 1.0) -> Array:
        """Draw floats from a normal distribution, or integers from -128 to 255 as far as the type holds them."""
        kind = np.dtype(dtype)
        if kind.kind == "b":
            return self.arrays.integers(0, 2, tuple(shape)).astype(bool)
        if kind.kind in "iu":
            info = np.iinfo(kind)
            low, high = max(info.min, -128), min(info.max, 255)
            return self.arrays.integers(low, high, tuple(shape), endpoint=True).astype(kind)
        return self.floats(shape, spread).astype(kind)


class Net:
    """A graph that grows. values: every tensor's value for the first sample. Names show inputs and constants."""

    def __init__(self, draw: Draw, opset: int) -> None:
        self.draw, self.opset = draw, opset
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, Array] = {}
        self.inputs: dict[str, Array] = {}
        self.values: dict[str, Array] = {}
        self.outputs: list[str] = []
        self.count = 0

    def name(self, stem: str) -> str:
        """Return a name that no tensor has."""
        self.count += 1
        return f"{stem}_{self.count}"

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the tensor of this name."""
        return self.values[name].shape

    def input(self, value: Array) -> str:
        """Add an input of the model with this value. Return its name."""
        name = self.name("input")
        self.inputs[name] = self.values[name] = value
        return name

    def constant(self, value: ArrayLike, dtype: DTypeLike | None = None) -> str:
        """Add a constant. Return its name."""
        name = self.name("constant")
        self.constants[name] = self.values[name] = np.asarray(value, dtype)
        return name

    def floats(self, shape: Sequence[int], spread: float = 1.0) -> str:
        """Add a constant of random float32. Return its name."""
        return self.constant(self.draw.floats(shape, spread))

    def add(self, op: str, *inputs: str, outputs: int = 1, domain: str = "", **attrs: Any) -> str:
        """Add a node and return its first output. Raise OracleError if onnxruntime refuses the node."""
        return self.add_all(op, *inputs, outputs=outputs, domain=domain, **attrs)[0]

    def add_all(self, op: str, *inputs: str, outputs: int = 1, domain: str = "", **attrs: Any) -> list[str]:
        """Add a node, run it under onnxruntime, and return the names of its outputs.

        Raise OracleError if onnxruntime refuses the node.
        """
        names = [self.name(op.lower()) for _ in range(outputs)]
        node = helper.make_node(op, inputs, names, name=f"{names[0]}_node", domain=domain, **attrs)
        read = [name for name in dict.fromkeys(inputs) if name]
        self.values |= run_session(
            open_session(self._model([node], read, names), "DISABLE_ALL", threads=1), self._feed(read)
        )
        self.nodes.append(node)
        return names

    def _feed(self, names: Sequence[str]) -> dict[str, Array]:
        return {name: self.values[name] for name in names if name not in self.constants}

    def _model(
        self, nodes: Sequence[onnx.NodeProto], read: Sequence[str], output_names: Sequence[str]
    ) -> onnx.ModelProto:
        inputs = [value_info(name, self.values[name]) for name in read if name not in self.constants]
        outputs = [
            value_info(name, self.values[name]) if name in self.values else onnx.ValueInfoProto(name=name)
            for name in output_names
        ]
        constants = [numpy_helper.from_array(self.constants[name], name) for name in read if name in self.constants]
        graph = helper.make_graph(nodes, "random", inputs, outputs, constants)
        opsets = [helper.make_opsetid("", self.opset), helper.make_opsetid(MS, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)

    def model(self) -> onnx.ModelProto:
        """Return the model of all nodes so far."""
        return self._model(self.nodes, [*self.inputs, *self.constants], self.outputs)


def value_info(name: str, value: Array) -> onnx.ValueInfoProto:
    """Declare a tensor of the type and shape of `value`."""
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)


__all__ = ["MS", "Array", "Draw", "Net", "OracleError", "value_info"]
