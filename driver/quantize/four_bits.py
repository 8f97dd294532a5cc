"""Weights of four bits, or two or one, in a model of int8: w8 = q * k, q one of LEVELS, a factor k for each group.

The weights are written as int8 with a scale for each output channel, as before, so that any int8 runtime runs them; it
takes as many bits a weight, and an eighth, where an accelerator expands it. A group is CODEBOOK_BLOCK input channels of
an output channel, at all places of a kernel. Steps and factors are those with the least squared error, what is clipped
included; errors of weights are made up for by others where samples say how inputs go together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from celosia.driver.quantize.second_moments import measure_second_moments
from celosia.hw.spec.packing import CODEBOOK_BLOCK

Array = NDArray[Any]


class Levels(NamedTuple):
    """The numbers q, from least to most in steps; factors: the largest k."""

    least: int
    largest: int
    step: int
    factors: int


LEVELS = {4: Levels(-8, 7, 1, 16), 2: Levels(-3, 3, 2, 15), 1: Levels(-1, 1, 2, 15)}
"""Levels by bits. Fewer than four bits have no zero, since most weights are not near to it; so groups of
zeros, such as those of channels that fill up a block, take the sixteenth of an accelerator's codebooks."""
TRIED = 16
"""Steps that are tried for each output channel; one is such that the largest weight is the least q times the largest
factor."""
DAMPING = 0.01
"""Share of the mean square of inputs, added to each: correlations are those of samples."""
ROWS = 1 << 20
"""Weights that are looked at together."""


@dataclass(frozen=True)
class FourBits:
    """Weights in four bits. w8: int8 like the weights. scale: float32, one for each output channel. Real weights are
    near to w8 * scale."""

    w8: NDArray[np.int8]
    scale: NDArray[np.float32]


def in_four_bits(w: Array, axis: int, moments: Array | None = None, bits: int = 4) -> FourBits:
    """Quantise float weights [..., output channels at `axis`, ...], of which the next axis, or else the other, counts
    inputs.

    bits: of LEVELS. moments: of the n inputs of an output (moments.py); errors then count by what they do to outputs,
    and weights that are not rounded yet make up for those that are (GPTQ: Frantar et al., ICLR 2023).

    >>> found = in_four_bits(np.arange(-8, 8, dtype=np.float32).reshape(1, 16) * 0.5, 0)
    >>> bool(np.array_equal(found.w8 * found.scale[:, None], np.arange(-8, 8).reshape(1, 16) * 0.5))
    True
    """
    rows, levels = np.moveaxis(w, axis, 0).astype(np.float32), LEVELS[bits]
    outputs, inputs = rows.shape[:2]
    flat, places = rows.reshape(outputs, -1), int(np.prod(rows.shape[2:]))
    weight = np.ones(flat.shape[1], np.float32) if moments is None else _mean_squares(moments)
    groups, width = -(-inputs // CODEBOOK_BLOCK), CODEBOOK_BLOCK * places
    padding = groups * width - flat.shape[1]
    grouped = np.pad(flat, [(0, 0), (0, padding)]).reshape(outputs, groups, width)
    factors, scale = np.empty((outputs, groups), np.int64), np.empty(outputs, np.float32)
    step = max(1, ROWS // max(flat.shape[1], 1))
    for first in range(0, outputs, step):
        part = slice(first, first + step)
        factors[part], scale[part] = _best_scales(
            grouped[part], np.pad(weight, (0, padding)).reshape(groups, width), levels
        )
    scales = np.repeat(factors, width, axis=1)[:, : flat.shape[1]]
    if moments is None:
        w8 = _round_to_levels(flat / scale[:, None], scales, levels)
    else:
        w8 = _round_with_compensation(flat, scale, scales, moments, levels)
    if levels.step > 1:
        w8 *= np.repeat(grouped.any(axis=2), width, axis=1)[:, : flat.shape[1]]
    return FourBits(np.ascontiguousarray(np.moveaxis(w8.astype(np.int8).reshape(rows.shape), 0, axis)), scale)


def _round_to_levels(scaled: Array, factors: Array, levels: Levels) -> Array:
    """Return the nearest of the levels, times the factor."""
    least, largest, step, _ = levels
    first = step - 1
    nearest: Array = np.clip(np.rint((scaled / factors - first) / step) * step + first, least, largest) * factors
    return nearest


def _mean_squares(moments: Array) -> Array:
    """Mean squares of inputs; never 0, so that weights of inputs that are always 0 stay what they are."""
    squares = np.diag(moments)
    return np.asarray(np.maximum(squares, 1e-6 * squares.mean() + 1e-30), np.float32)


def _best_scales(rows: Array, weight: Array, levels: Levels) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Choose for weights [outputs, groups, elements] a factor for each group, and a step for each output. weight: of
    the squared errors of elements [groups, elements]."""
    magnitude = np.abs(rows).max((1, 2))
    widest = np.where(magnitude == 0, np.float32(1), magnitude / np.float32(-levels.least * levels.factors)).astype(
        np.float32
    )
    least = np.full(len(rows), np.inf)
    factors, scale = np.ones(rows.shape[:2], np.int64), widest.copy()
    for share in np.linspace(0.5, 1.25, TRIED, dtype=np.float32):
        tried = widest * share
        candidate, error = _best_factors(rows / tried[:, None, None], weight, levels)
        error *= tried.astype(np.float64) ** 2
        better = error < least
        factors[better], scale[better], least[better] = candidate[better], tried[better], error[better]
    return factors, scale


def _best_factors(scaled: Array, weight: Array, levels: Levels) -> tuple[NDArray[np.int64], Array]:
    """Return the best factors for weights in such steps, and the errors of outputs."""
    factors, least = np.ones(scaled.shape[:2], np.int64), np.full(scaled.shape[:2], np.inf)
    for factor in range(1, levels.factors + 1):
        error = ((_round_to_levels(scaled, np.asarray(factor), levels) - scaled) ** 2 * weight).sum(-1)
        better = error < least
        factors[better], least[better] = factor, error[better]
    return factors, least.sum(-1)


def _round_with_compensation(flat: Array, scale: Array, factors: Array, moments: Array, levels: Levels) -> Array:
    """Round one input after the other, those that matter most first; the remaining ones compensate for the error of
    each."""
    order = np.argsort(-np.diag(moments), kind="stable")
    spread = moments[np.ix_(order, order)].copy()
    spread[np.diag_indices_from(spread)] += DAMPING * np.diag(moments).mean() + 1e-30
    inverse = np.linalg.cholesky(np.linalg.inv(spread)).T
    left, w8 = flat[:, order] / scale[:, None].astype(np.float64), np.empty(flat.shape)
    for place, column in enumerate(order):
        w8[:, column] = _round_to_levels(left[:, place], factors[:, column], levels)
        error = (left[:, place] - w8[:, column]) / inverse[place, place]
        left[:, place + 1 :] -= error[:, None] * inverse[place, place + 1 :]
    return w8


# In a model -----------------------------------------------------------------------------------------------------------


def quantise_to_four_bits(
    quantised: onnx.ModelProto, floats: onnx.ModelProto, samples: Iterable[Mapping[str, Array]] = (), bits: int = 4
) -> dict[str, Any]:
    """Change a QDQ model, as onnxruntime's quantiser made it of `floats`: the weights of convolutions and products.

    samples: what `floats` is run on to know which errors matter. bits: of LEVELS.

    Those of depthwise and transposed convolutions stay as they are, for the accelerator does not load them as others,
    and what several operators read differently. Returns `matrices`, how many weights were changed, and `sqnr_db`, of
    all of them together; None where there are none.
    """
    model = _Quantised(quantised)
    real = {tensor.name: tensor for tensor in floats.graph.initializer}
    moments_of = measure_second_moments(floats, samples)
    signal = noise = 0.0
    changed = 0
    for dequantise, readers in model.weights():
        name = dequantise.input[0].removesuffix("_quantized")
        w = numpy_helper.to_array(real[name]) if name in real else model.reals(dequantise)
        axis = _output_axis(readers[0])
        best = in_four_bits(w, axis, moments_of.get(name) if len(readers) == 1 else None, bits)
        model.replace(dequantise, best, axis)
        for reader in readers:
            model.rescale_bias(reader, best.scale, real)
        across = [1] * w.ndim
        across[axis] = -1
        signal += float((w.astype(np.float64) ** 2).sum())
        noise += float(((best.w8 * best.scale.reshape(across) - w).astype(np.float64) ** 2).sum())
        changed += 1
    return {"matrices": changed, "sqnr_db": 10 * float(np.log10(signal / noise)) if noise and signal else None}


def _output_axis(node: onnx.NodeProto) -> int:
    """Axis of the weights of `node` that counts output channels."""
    is_transposed = any(attr.name == "transB" and attr.i for attr in node.attribute)
    return 0 if node.op_type == "Conv" or is_transposed else 1


class _Quantised:
    """A QDQ model with the makers and readers of tensors, and its constants, which can be changed."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.graph = model.graph
        self.constants = {tensor.name: tensor for tensor in model.graph.initializer}
        self.makers = {name: node for node in model.graph.node for name in node.output}
        self.readers: dict[str, list[onnx.NodeProto]] = {}
        for node in model.graph.node:
            for name in node.input:
                self.readers.setdefault(name, []).append(node)

    def array(self, name: str) -> Array:
        """Value of a constant."""
        array: Array = numpy_helper.to_array(self.constants[name])
        return array

    def weights(self) -> list[tuple[onnx.NodeProto, list[onnx.NodeProto]]]:
        """Yield (DequantizeLinear of constant int8 weights, the operators that multiply by them, all along one
        axis)."""
        weights = []
        for node in self.graph.node:
            readers = self.readers.get(node.output[0], []) if node.op_type == "DequantizeLinear" else []
            if not readers or node.input[0] not in self.constants or self.array(node.input[0]).dtype != np.int8:
                continue
            is_only_reader = len(self.readers[node.input[0]]) == len(self.readers[node.input[1]]) == 1
            fit = [
                self._multiplies_by_weights(reader, node.output[0], self.array(node.input[0]).shape)
                for reader in readers
            ]
            if is_only_reader and all(fit) and len({_output_axis(reader) for reader in readers}) == 1:
                weights.append((node, readers))
        return weights

    def _multiplies_by_weights(self, node: onnx.NodeProto, name: str, dims: tuple[int, ...]) -> bool:
        """Whether `node` multiplies by the weights `name` alone, in a form whose inputs can be grouped."""
        if node.input[1:2] != [name] or name in (node.input[0], *node.input[2:]):
            return False
        group = next((attr.i for attr in node.attribute if attr.name == "group"), 1)
        if node.op_type == "Conv":
            return len(dims) > 2 and not (group > 1 and dims[1] == 1)
        return node.op_type in ("Gemm", "MatMul") and len(dims) == 2

    def reals(self, dequantise: onnx.NodeProto) -> Array:
        """Real values that the DequantizeLinear of a constant computes."""
        from onnx.reference.ops.op_dequantize_linear import DequantizeLinear_21

        axis = next((attr.i for attr in dequantise.attribute if attr.name == "axis"), 1)
        inputs = [self.array(name) for name in dequantise.input]
        (values,) = DequantizeLinear_21(dequantise, {"log": None})._run(*inputs, axis=axis)
        return np.asarray(values)

    def set(self, name: str, array: Array) -> None:
        """Set a constant to another value."""
        self.constants[name].CopyFrom(numpy_helper.from_array(array, name))

    def replace(self, dequantise: onnx.NodeProto, packed: FourBits, axis: int) -> None:
        """Replace weights, scales and zero points of a DequantizeLinear."""
        self.set(dequantise.input[0], packed.w8)
        self.set(dequantise.input[1], packed.scale)
        zeros = np.zeros(packed.scale.shape, np.int8)
        if len(dequantise.input) > 2 and not np.array_equal(self.array(dequantise.input[2]), zeros):
            dequantise.input[2] = f"{dequantise.input[0]}_zeros"
            self.graph.initializer.append(numpy_helper.from_array(zeros, dequantise.input[2]))
        attributes = [attr for attr in dequantise.attribute if attr.name != "axis"]
        del dequantise.attribute[:]
        dequantise.attribute.extend([*attributes, onnx.helper.make_attribute("axis", axis)])

    def rescale_bias(
        self, node: onnx.NodeProto, scale: NDArray[np.float32], real: Mapping[str, onnx.TensorProto]
    ) -> None:
        """Write an int32 bias in the steps of products by weights of those scales."""
        bias = self.makers.get(node.input[2]) if len(node.input) > 2 else None
        x = self.makers.get(node.input[0])
        if bias is None or x is None or bias.op_type != "DequantizeLinear" or bias.input[0] not in self.constants:
            return
        name = bias.input[0].removesuffix("_quantized")
        bias_values = numpy_helper.to_array(real[name]) if name in real else self.reals(bias)
        steps = (self.array(x.input[1]).reshape(()) * scale).astype(np.float32)
        self.set(bias.input[0], np.clip(np.rint(bias_values / steps), -(2**31), 2**31 - 1).astype(np.int32))
        self.set(bias.input[1], steps)
        del bias.input[2:]  # zero points, of which none is another number than 0
