"""Quantise weights to four, two or one bits: w8 = q * k with a number q of LEVELS and a factor k for each group.

The model stays int8: w8 is an int8 weight with a scale for each output channel, which any int8 runtime can run. An
accelerator with packed weights loads only q, and an eighth of a bit a weight for k. A group is CODEBOOK_BLOCK input
channels of an output channel, at all taps of a kernel. Scales and factors are those of the least squared error. With
samples, the rounding error of a weight is compensated by weights of correlated inputs (GPTQ).
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
    """The numbers q: from `least` to `largest` in steps of `step`; and the largest factor k, `factors`."""

    least: int
    largest: int
    step: int
    factors: int


LEVELS = {4: Levels(-8, 7, 1, 16), 2: Levels(-3, 3, 2, 15), 1: Levels(-1, 1, 2, 15)}
"""Levels by bits. Levels of fewer than four bits have no zero, since most weights are not near it; so groups of zeros,
such as padding channels, use the sixteenth of an accelerator's codebooks, which leaves 15 factors."""
SCALE_CANDIDATES = 16
"""Scales that are tried for each output channel, from 0.5 to 1.25 of the one that just avoids clipping."""
DAMPING = 0.01
"""Share of the mean square of inputs that is added to the diagonal of moments, so that their inverse is stable."""
MAX_WEIGHTS_AT_ONCE = 1 << 20
"""Weights for which scales are searched at a time, which bounds memory."""


@dataclass(frozen=True)
class FewBitWeights:
    """Weights of few bits, so that w8 * scale approximates the float weights.

    w8: int8, of the weights' shape. scale: float32, one for each output channel.
    """

    w8: NDArray[np.int8]
    scale: NDArray[np.float32]


def quantise_weights(w: Array, axis: int, moments: Array | None = None, bits: int = 4) -> FewBitWeights:
    """Quantise float weights to few bits. axis: of their output channels; the first of the other axes counts inputs.

    bits: of LEVELS. moments: second moments [n, n] of the n inputs of an output (second_moments.py). With them, errors
    are weighted by their effect on outputs, and later weights compensate for earlier ones (GPTQ: Frantar et al., ICLR
    2023).

    >>> found = quantise_weights(np.arange(-8, 8, dtype=np.float32).reshape(1, 16) * 0.5, 0)
    >>> bool(np.array_equal(found.w8 * found.scale[:, None], np.arange(-8, 8).reshape(1, 16) * 0.5))
    True
    """
    rows, levels = np.moveaxis(w, axis, 0).astype(np.float32), LEVELS[bits]
    outputs, inputs = rows.shape[:2]
    flat_rows, taps = rows.reshape(outputs, -1), int(np.prod(rows.shape[2:]))
    importance = np.ones(flat_rows.shape[1], np.float32) if moments is None else _mean_squares(moments)
    groups, group_size = -(-inputs // CODEBOOK_BLOCK), CODEBOOK_BLOCK * taps
    padding = groups * group_size - flat_rows.shape[1]
    grouped = np.pad(flat_rows, [(0, 0), (0, padding)]).reshape(outputs, groups, group_size)
    factors, scale = np.empty((outputs, groups), np.int64), np.empty(outputs, np.float32)
    step = max(1, MAX_WEIGHTS_AT_ONCE // max(flat_rows.shape[1], 1))
    for first in range(0, outputs, step):
        outputs_slice = slice(first, first + step)
        factors[outputs_slice], scale[outputs_slice] = _best_scales(
            grouped[outputs_slice], np.pad(importance, (0, padding)).reshape(groups, group_size), levels
        )
    scales = np.repeat(factors, group_size, axis=1)[:, : flat_rows.shape[1]]
    if moments is None:
        w8 = _round_to_levels(flat_rows / scale[:, None], scales, levels)
    else:
        w8 = _round_with_compensation(flat_rows, scale, scales, moments, levels)
    if levels.step > 1:
        w8 *= np.repeat(grouped.any(axis=2), group_size, axis=1)[:, : flat_rows.shape[1]]
    return FewBitWeights(np.ascontiguousarray(np.moveaxis(w8.astype(np.int8).reshape(rows.shape), 0, axis)), scale)


def _round_to_levels(scaled: Array, factors: Array, levels: Levels) -> Array:
    """Round weights, in units of the scale, to the nearest q * factor. factors: one for each weight."""
    least, largest, step, _ = levels
    offset = step - 1  # levels without zero are odd
    nearest: Array = np.clip(np.rint((scaled / factors - offset) / step) * step + offset, least, largest) * factors
    return nearest


def _mean_squares(moments: Array) -> Array:
    """Return the mean square of each input; never 0, so that weights of inputs that are always 0 count a little."""
    squares = np.diag(moments)
    return np.asarray(np.maximum(squares, 1e-6 * squares.mean() + 1e-30), np.float32)


def _best_scales(rows: Array, importance: Array, levels: Levels) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Choose a factor for each group, and a scale for each output, with the least weighted squared error.

    rows: weights [outputs, groups, elements]. importance: weight of the squared error of each element, [groups,
    elements]. Returns factors [outputs, groups] and scales [outputs].
    """
    magnitude = np.abs(rows).max((1, 2))
    unclipped_scale = np.where(
        magnitude == 0, np.float32(1), magnitude / np.float32(-levels.least * levels.factors)
    ).astype(np.float32)
    least_error = np.full(len(rows), np.inf)
    factors, scale = np.ones(rows.shape[:2], np.int64), unclipped_scale.copy()
    for share in np.linspace(0.5, 1.25, SCALE_CANDIDATES, dtype=np.float32):
        candidate_scale = unclipped_scale * share
        candidate_factors, error = _best_factors(rows / candidate_scale[:, None, None], importance, levels)
        error *= candidate_scale.astype(np.float64) ** 2
        is_better = error < least_error
        factors[is_better], scale[is_better] = candidate_factors[is_better], candidate_scale[is_better]
        least_error[is_better] = error[is_better]
    return factors, scale


def _best_factors(scaled: Array, importance: Array, levels: Levels) -> tuple[NDArray[np.int64], Array]:
    """Return the factor of the least error for each group, and the weighted squared error of each output.

    scaled: weights [outputs, groups, elements] in units of the scale.
    """
    factors, least_error = np.ones(scaled.shape[:2], np.int64), np.full(scaled.shape[:2], np.inf)
    for factor in range(1, levels.factors + 1):
        error = ((_round_to_levels(scaled, np.asarray(factor), levels) - scaled) ** 2 * importance).sum(-1)
        is_better = error < least_error
        factors[is_better], least_error[is_better] = factor, error[is_better]
    return factors, least_error.sum(-1)


def _round_with_compensation(flat_rows: Array, scale: Array, factors: Array, moments: Array, levels: Levels) -> Array:
    """Round the weights of one input after the other, the most important first, by GPTQ.

    flat_rows: weights [outputs, n]. After each input the weights of the remaining inputs change, so that they
    compensate for its rounding error, by the Cholesky factor of the inverse of `moments`.
    """
    order = np.argsort(-np.diag(moments), kind="stable")
    damped_moments = moments[np.ix_(order, order)].copy()
    damped_moments[np.diag_indices_from(damped_moments)] += DAMPING * np.diag(moments).mean() + 1e-30
    inverse = np.linalg.cholesky(np.linalg.inv(damped_moments)).T
    remaining, w8 = flat_rows[:, order] / scale[:, None].astype(np.float64), np.empty(flat_rows.shape)
    for position, column in enumerate(order):
        w8[:, column] = _round_to_levels(remaining[:, position], factors[:, column], levels)
        error = (remaining[:, position] - w8[:, column]) / inverse[position, position]
        remaining[:, position + 1 :] -= error[:, None] * inverse[position, position + 1 :]
    return w8


# In a model -----------------------------------------------------------------------------------------------------------


def quantise_to_four_bits(
    quantised: onnx.ModelProto, floats: onnx.ModelProto, samples: Iterable[Mapping[str, Array]] = (), bits: int = 4
) -> dict[str, Any]:
    """Change the weights of convolutions and products in a QDQ model, which onnxruntime made from `floats`, to few
    bits.

    samples: inputs on which `floats` runs, to measure which errors matter. bits: of LEVELS.

    Weights of depthwise and transposed convolutions stay int8: the accelerator has no packed form of them. So do
    weights that several operators read along different axes. Returns `matrices`, the number of changed weights, and
    `sqnr_db` of all of them together; None where there are none.
    """
    model = _QdqModel(quantised)
    float_constants = {tensor.name: tensor for tensor in floats.graph.initializer}
    moments_of = measure_second_moments(floats, samples)
    signal = noise = 0.0
    changed_count = 0
    for dequantise, readers in model.weights():
        name = dequantise.input[0].removesuffix("_quantized")
        w = (
            numpy_helper.to_array(float_constants[name])
            if name in float_constants
            else model.dequantised_constant(dequantise)
        )
        axis = _output_axis(readers[0])
        few_bit_weights = quantise_weights(w, axis, moments_of.get(name) if len(readers) == 1 else None, bits)
        model.replace_weights(dequantise, few_bit_weights, axis)
        for reader in readers:
            model.rescale_bias(reader, few_bit_weights.scale, float_constants)
        scale_shape = [1] * w.ndim
        scale_shape[axis] = -1
        signal += float((w.astype(np.float64) ** 2).sum())
        noise += float(
            ((few_bit_weights.w8 * few_bit_weights.scale.reshape(scale_shape) - w).astype(np.float64) ** 2).sum()
        )
        changed_count += 1
    return {"matrices": changed_count, "sqnr_db": 10 * float(np.log10(signal / noise)) if noise and signal else None}


def _output_axis(node: onnx.NodeProto) -> int:
    """Return the axis of the weights of a Conv, MatMul or Gemm that counts output channels."""
    is_transposed = any(attr.name == "transB" and attr.i for attr in node.attribute)
    return 0 if node.op_type == "Conv" or is_transposed else 1


class _QdqModel:
    """A QDQ model whose constants can be changed.

    constants: initializers by name. makers: the node that computes a tensor. readers: the nodes that read it.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        self.graph = model.graph
        self.constants = {tensor.name: tensor for tensor in model.graph.initializer}
        self.makers = {name: node for node in model.graph.node for name in node.output}
        self.readers: dict[str, list[onnx.NodeProto]] = {}
        for node in model.graph.node:
            for name in node.input:
                self.readers.setdefault(name, []).append(node)

    def array(self, name: str) -> Array:
        """Return the value of a constant."""
        array: Array = numpy_helper.to_array(self.constants[name])
        return array

    def weights(self) -> list[tuple[onnx.NodeProto, list[onnx.NodeProto]]]:
        """List (DequantizeLinear of constant int8 weights, the operators that multiply by them).

        Left out are weights that other operators read, or that are read along different axes.
        """
        weights = []
        for node in self.graph.node:
            readers = self.readers.get(node.output[0], []) if node.op_type == "DequantizeLinear" else []
            if not readers or node.input[0] not in self.constants or self.array(node.input[0]).dtype != np.int8:
                continue
            is_only_reader = len(self.readers[node.input[0]]) == len(self.readers[node.input[1]]) == 1
            are_supported = [
                self._multiplies_by_weights(reader, node.output[0], self.array(node.input[0]).shape)
                for reader in readers
            ]
            if is_only_reader and all(are_supported) and len({_output_axis(reader) for reader in readers}) == 1:
                weights.append((node, readers))
        return weights

    def _multiplies_by_weights(self, node: onnx.NodeProto, name: str, dims: tuple[int, ...]) -> bool:
        """Whether `node` is a Conv, Gemm or MatMul with weights `name` whose inputs can be grouped; not depthwise.

        dims: shape of the weights.
        """
        if node.input[1:2] != [name] or name in (node.input[0], *node.input[2:]):
            return False
        group = next((attr.i for attr in node.attribute if attr.name == "group"), 1)
        if node.op_type == "Conv":
            return len(dims) > 2 and not (group > 1 and dims[1] == 1)
        return node.op_type in ("Gemm", "MatMul") and len(dims) == 2

    def dequantised_constant(self, dequantise: onnx.NodeProto) -> Array:
        """Return the float values that the DequantizeLinear of a constant computes."""
        from onnx.reference.ops.op_dequantize_linear import DequantizeLinear_21

        axis = next((attr.i for attr in dequantise.attribute if attr.name == "axis"), 1)
        inputs = [self.array(name) for name in dequantise.input]
        (values,) = DequantizeLinear_21(dequantise, {"log": None})._run(*inputs, axis=axis)
        return np.asarray(values)

    def set_constant(self, name: str, array: Array) -> None:
        """Change the value of a constant."""
        self.constants[name].CopyFrom(numpy_helper.from_array(array, name))

    def replace_weights(self, dequantise: onnx.NodeProto, few_bit_weights: FewBitWeights, axis: int) -> None:
        """Replace the weights, scales and zero points of a DequantizeLinear. axis: of the scales."""
        self.set_constant(dequantise.input[0], few_bit_weights.w8)
        self.set_constant(dequantise.input[1], few_bit_weights.scale)
        zeros = np.zeros(few_bit_weights.scale.shape, np.int8)
        if len(dequantise.input) > 2 and not np.array_equal(self.array(dequantise.input[2]), zeros):
            dequantise.input[2] = f"{dequantise.input[0]}_zeros"
            self.graph.initializer.append(numpy_helper.from_array(zeros, dequantise.input[2]))
        attributes = [attr for attr in dequantise.attribute if attr.name != "axis"]
        del dequantise.attribute[:]
        dequantise.attribute.extend([*attributes, onnx.helper.make_attribute("axis", axis)])

    def rescale_bias(
        self, node: onnx.NodeProto, scale: NDArray[np.float32], float_constants: Mapping[str, onnx.TensorProto]
    ) -> None:
        """Requantise the int32 bias of `node` for new scales of its weights: its scale is the input's times the
        weights'.

        float_constants: float constants by name.
        """
        bias = self.makers.get(node.input[2]) if len(node.input) > 2 else None
        x = self.makers.get(node.input[0])
        if bias is None or x is None or bias.op_type != "DequantizeLinear" or bias.input[0] not in self.constants:
            return
        name = bias.input[0].removesuffix("_quantized")
        bias_values = (
            numpy_helper.to_array(float_constants[name]) if name in float_constants else self.dequantised_constant(bias)
        )
        bias_scales = (self.array(x.input[1]).reshape(()) * scale).astype(np.float32)
        self.set_constant(
            bias.input[0], np.clip(np.rint(bias_values / bias_scales), -(2**31), 2**31 - 1).astype(np.int32)
        )
        self.set_constant(bias.input[1], bias_scales)
        del bias.input[2:]  # zero points, which are 0
