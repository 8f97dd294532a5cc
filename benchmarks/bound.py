"""The least number of cycles in which any machine with a Config's multipliers and bus can run a network."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path

import onnx

from celosia.hw.spec.config import Config


@dataclass(frozen=True)
class LowerBound:
    """macs: of all convolutions and matrix products but the depthwise ones, which a machine may do beside them.
    bytes_read, bytes_written: weights and inputs, and outputs of the network, each once, a byte for each element.
    macs_per_cycle, bytes_per_cycle: of the multipliers, and of the bus in one direction.
    """

    macs: int
    bytes_read: int
    bytes_written: int
    macs_per_cycle: int
    bytes_per_cycle: int

    @property
    def cycles(self) -> int:
        """The longest of computing, reading and writing, which overlap."""
        moved = max(self.bytes_read, self.bytes_written)
        return max(-(-self.macs // self.macs_per_cycle), -(-moved // self.bytes_per_cycle))

    def __str__(self) -> str:
        moved = f"{self.bytes_read / 1e6:.2f} MB in, {self.bytes_written / 1e6:.2f} MB out"
        return f"{self.cycles:,} ({self.macs / 1e6:.1f} M MACs, {moved})"


def bound(path: Path, cfg: Config) -> LowerBound:
    """The bound of the QDQ model at `path`, whose shapes are known."""
    graph = onnx.shape_inference.infer_shapes(onnx.load(path), data_prop=True).graph
    values = (*graph.input, *graph.value_info, *graph.output)
    shapes = {value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in values}
    shapes |= {constant.name: list(constant.dims) for constant in graph.initializer}
    constants = {constant.name for constant in graph.initializer}
    producers = {output: node for node in graph.node for output in node.output}

    def constant(name: str) -> bool:
        """Whether `name` is a constant, behind the operators that dequantise it."""
        return name in constants or (name in producers and all(map(constant, producers[name].input)))

    macs = 0
    read = sum(prod(shapes[value.name]) for value in graph.input if value.name not in constants)
    written = sum(prod(shapes[value.name]) for value in graph.output)
    for node in graph.node:
        if node.op_type not in ("Conv", "Gemm", "MatMul") or not constant(node.input[1]):
            continue
        weights, out = shapes[node.input[1]], shapes[node.output[0]]
        read += prod(weights)
        if node.op_type == "Conv":
            group = next((a.i for a in node.attribute if a.name == "group"), 1)
            depthwise = group > 1 and weights[1] == 1
            macs += 0 if depthwise else prod(out) * prod(weights[1:])
        else:
            macs += prod(out) * shapes[node.input[0]][-1]
    return LowerBound(macs, read, written, cfg.macs_per_cycle, cfg.bus_bytes)
