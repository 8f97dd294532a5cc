"""Weights of four bits in a model of int8: w8 = q * k, q from -8 to 7, a factor k from 1 to 16 for each group.

What is written is int8 with a scale for each output channel, as before, so whoever runs int8 runs it; it takes 4.125
bits a weight where an accelerator expands it. A group is GROUP input channels of an output channel, at all places of a
kernel. Steps and factors are those with the least squared error, what is clipped included.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

Array = NDArray[Any]
GROUP = 32
LEAST, MOST, FACTORS = -8, 7, 16
"""Of q; and the largest k."""
TRIED = 16
"""Steps that are tried for each output channel; one is such that the largest weight is -8 times the largest factor."""
ROWS = 1 << 20
"""Weights that are looked at together."""


@dataclass(frozen=True)
class FourBits:
    """w8: int8 like the weights. scale: float32, one for each output channel. Real weights are near to w8 * scale."""

    w8: NDArray[np.int8]
    scale: NDArray[np.float32]


def in_four_bits(w: Array, axis: int) -> FourBits:
    """Float weights [..., output channels at `axis`, ...], of which the next axis, or else the other, counts inputs.

    >>> found = in_four_bits(np.arange(-8, 8, dtype=np.float32).reshape(1, 16) * 0.5, 0)
    >>> bool(np.array_equal(found.w8 * found.scale[:, None], np.arange(-8, 8).reshape(1, 16) * 0.5))
    True
    """
    rows = np.moveaxis(w, axis, 0).astype(np.float32)
    outputs, inputs = rows.shape[:2]
    groups = -(-inputs // GROUP)
    padded = np.pad(rows, [(0, 0), (0, groups * GROUP - inputs), *[(0, 0)] * (rows.ndim - 2)])
    flat = padded.reshape(outputs, groups, -1)
    w8, scale = np.empty(flat.shape, np.int8), np.empty(outputs, np.float32)
    step = max(1, ROWS // max(flat[0].size, 1))
    for first in range(0, outputs, step):
        part = slice(first, first + step)
        w8[part], scale[part] = _best(flat[part])
    whole = w8.reshape(padded.shape)[:, :inputs]
    return FourBits(np.ascontiguousarray(np.moveaxis(whole, 0, axis)), scale)


def _best(rows: Array) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Weights [outputs, groups, elements] as int8, and a step for each output."""
    magnitude = np.abs(rows).max((1, 2))
    widest = np.where(magnitude == 0, np.float32(1), magnitude / np.float32(-LEAST * FACTORS)).astype(np.float32)
    least = np.full(len(rows), np.inf)
    w8, scale = np.zeros(rows.shape, np.int8), widest.copy()
    for share in np.linspace(0.5, 1.25, TRIED, dtype=np.float32):
        tried = widest * share
        found, error = _with_step(rows, tried)
        better = error < least
        w8[better], scale[better], least[better] = found[better], tried[better], error[better]
    return w8, scale


def _with_step(rows: Array, step: NDArray[np.float32]) -> tuple[NDArray[np.int8], Array]:
    """The nearest weights of that step for each output, and the squared errors of outputs."""
    scaled = rows / step[:, None, None]
    w8 = np.zeros(rows.shape, np.int8)
    least = np.full(rows.shape[:2], np.inf)
    for factor in range(1, FACTORS + 1):
        found = np.clip(np.rint(scaled / factor), LEAST, MOST) * factor
        error = ((found - scaled) ** 2).sum(-1)
        better = error < least
        w8[better], least[better] = found[better], error[better]
    return w8, least.sum(-1) * step.astype(np.float64) ** 2


# In a model -----------------------------------------------------------------------------------------------------------


def with_four_bits(quantised: onnx.ModelProto, floats: onnx.ModelProto) -> dict[str, Any]:
    """Change a QDQ model, as onnxruntime's quantiser made it of `floats`: the weights of convolutions and products.

    Those of depthwise and transposed convolutions stay as they are, for the accelerator does not load them as others,
    and what several operators read differently. Returns `matrices`, how many weights were changed, and `sqnr_db`, of
    all of them together; None where there are none.
    """
    model = _Quantised(quantised)
    real = {tensor.name: tensor for tensor in floats.graph.initializer}
    signal = noise = 0.0
    changed = 0
    for dequantise, readers in model.weights():
        name = dequantise.input[0].removesuffix("_quantized")
        w = numpy_helper.to_array(real[name]) if name in real else model.reals(dequantise)
        axis = _outputs(readers[0])
        found = in_four_bits(w, axis)
        model.replace(dequantise, found, axis)
        for reader in readers:
            model.rescale_bias(reader, found.scale, real)
        across = [1] * w.ndim
        across[axis] = -1
        signal += float((w.astype(np.float64) ** 2).sum())
        noise += float(((found.w8 * found.scale.reshape(across) - w).astype(np.float64) ** 2).sum())
        changed += 1
    return {"matrices": changed, "sqnr_db": 10 * float(np.log10(signal / noise)) if noise and signal else None}


def _outputs(node: onnx.NodeProto) -> int:
    """The axis of the weights of `node` that counts output channels."""
    turned = any(attr.name == "transB" and attr.i for attr in node.attribute)
    return 0 if node.op_type == "Conv" or turned else 1


class _Quantised:
    """A QDQ model: who makes and who reads what, and its constants, which can be changed."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.graph = model.graph
        self.constants = {tensor.name: tensor for tensor in model.graph.initializer}
        self.makers = {name: node for node in model.graph.node for name in node.output}
        self.readers: dict[str, list[onnx.NodeProto]] = {}
        for node in model.graph.node:
            for name in node.input:
                self.readers.setdefault(name, []).append(node)

    def array(self, name: str) -> Array:
        """A constant."""
        array: Array = numpy_helper.to_array(self.constants[name])
        return array

    def weights(self) -> list[tuple[onnx.NodeProto, list[onnx.NodeProto]]]:
        """(DequantizeLinear of constant int8 weights, the operators that multiply by them, all along one axis)."""
        found = []
        for node in self.graph.node:
            readers = self.readers.get(node.output[0], []) if node.op_type == "DequantizeLinear" else []
            if not readers or node.input[0] not in self.constants or self.array(node.input[0]).dtype != np.int8:
                continue
            alone = len(self.readers[node.input[0]]) == len(self.readers[node.input[1]]) == 1
            fit = [self._fits(reader, node.output[0], self.array(node.input[0]).shape) for reader in readers]
            if alone and all(fit) and len({_outputs(reader) for reader in readers}) == 1:
                found.append((node, readers))
        return found

    def _fits(self, node: onnx.NodeProto, name: str, dims: tuple[int, ...]) -> bool:
        if node.input[1:2] != [name] or name in (node.input[0], *node.input[2:]):
            return False
        group = next((attr.i for attr in node.attribute if attr.name == "group"), 1)
        if node.op_type == "Conv":
            return len(dims) > 2 and not (group > 1 and dims[1] == 1)
        return node.op_type in ("Gemm", "MatMul") and len(dims) == 2

    def reals(self, dequantise: onnx.NodeProto) -> Array:
        """What the DequantizeLinear of a constant makes."""
        from onnx.reference.ops.op_dequantize_linear import DequantizeLinear_21

        axis = next((attr.i for attr in dequantise.attribute if attr.name == "axis"), 1)
        inputs = [self.array(name) for name in dequantise.input]
        (made,) = DequantizeLinear_21(dequantise, {"log": None})._run(*inputs, axis=axis)
        return np.asarray(made)

    def set(self, name: str, array: Array) -> None:
        """Give a constant another value."""
        self.constants[name].CopyFrom(numpy_helper.from_array(array, name))

    def replace(self, dequantise: onnx.NodeProto, found: FourBits, axis: int) -> None:
        """Weights, scales and zero points of a DequantizeLinear."""
        self.set(dequantise.input[0], found.w8)
        self.set(dequantise.input[1], found.scale)
        zeros = np.zeros(found.scale.shape, np.int8)
        if len(dequantise.input) > 2 and not np.array_equal(self.array(dequantise.input[2]), zeros):
            dequantise.input[2] = f"{dequantise.input[0]}_zeros"
            self.graph.initializer.append(numpy_helper.from_array(zeros, dequantise.input[2]))
        kept = [attr for attr in dequantise.attribute if attr.name != "axis"]
        del dequantise.attribute[:]
        dequantise.attribute.extend([*kept, onnx.helper.make_attribute("axis", axis)])

    def rescale_bias(
        self, node: onnx.NodeProto, scale: NDArray[np.float32], real: Mapping[str, onnx.TensorProto]
    ) -> None:
        """Write an int32 bias in the steps of products by weights of those scales."""
        bias = self.makers.get(node.input[2]) if len(node.input) > 2 else None
        x = self.makers.get(node.input[0])
        if bias is None or x is None or bias.op_type != "DequantizeLinear" or bias.input[0] not in self.constants:
            return
        name = bias.input[0].removesuffix("_quantized")
        given = numpy_helper.to_array(real[name]) if name in real else self.reals(bias)
        steps = (self.array(x.input[1]).reshape(()) * scale).astype(np.float32)
        self.set(bias.input[0], np.clip(np.rint(given / steps), -(2**31), 2**31 - 1).astype(np.int32))
        self.set(bias.input[1], steps)
        del bias.input[2:]  # zero points, of which none is another number than 0
