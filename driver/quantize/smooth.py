"""Smooth activations: move the large scale of a few channels into weights, so that the step of int8 suits all channels.

    y = Norm(x, gamma, beta)    z = MatMul(y, w)      ->      y = Norm(x, gamma / s, beta / s)    z = MatMul(y, w * s)

with a factor s for each channel: max|y|^alpha / max|w|^(1 - alpha) over samples and columns (SmoothQuant: Xiao et al.,
ICML 2023). In place of the norm's gamma, any constant may be divided that scales the channels of y: the columns of a
product before a Relu or a gate (equalisation: Nagel et al., ICCV 2019). Factors are powers of two, so the float model
computes the same numbers, unless they leave the range of floats.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from celosia.compiler.graph.quantized.rounded import NORMS
from celosia.compiler.ops import op_spec
from celosia.driver.choices import AUTO
from celosia.driver.quantize.decoders import PRODUCTS
from celosia.driver.workstation.oracle import open_session, run_session

Array = NDArray[Any]
ALPHAS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
"""Values of alpha that AUTO tries, besides not smoothing."""
MAX_ERROR_RATIO = 0.5
"""AUTO smooths a place only if the squared error of its products falls below this share: smaller gains are as often
lost to rounding elsewhere."""
MAX_ROWS = 512
"""Rows of activations, over all samples, on which AUTO measures errors."""
HOMOGENEOUS_OPERATORS = ("Relu", "LeakyRelu", "PRelu")
"""Operators with f(s x) = s f(x) for s > 0."""
SUM_OPERATORS = ("Add", "Sub")
"""Operators whose result is divided by dividing both operands."""
PRODUCT_OPERATORS = ("Mul", "Div")
"""Operators whose result is divided by dividing one operand (the first of Div)."""


@dataclass(frozen=True)
class ChannelConstant:
    """A constant operand: input number `input_number` of a node, whose `axis` counts channels."""

    node: onnx.NodeProto
    input_number: int
    axis: int


@dataclass(frozen=True)
class SmoothPlace:
    """A tensor whose channels may be scaled.

    divided: constants that compute it, which are divided by the factors. multiplied: weights that read it, which are
    multiplied.
    """

    tensor: str
    divided: tuple[ChannelConstant, ...]
    multiplied: tuple[ChannelConstant, ...]


@dataclass
class ChannelStatistics:
    """Statistics of a tensor [..., channels] over samples.

    least, greatest: smallest and largest value of each channel. rows: about MAX_ROWS of its rows.
    """

    least: Array
    greatest: Array
    rows: Array

    @property
    def largest(self) -> Array:
        """Largest magnitude of each channel."""
        return np.asarray(np.maximum(np.abs(self.least), np.abs(self.greatest)))


def smooth(
    model: onnx.ModelProto, samples: Iterable[Mapping[str, Array]], alpha: float | str, symmetric: bool,
    per_channel: bool,
) -> dict[str, Any]:  # fmt: skip
    """Scale channels of the float model so that its activations lose less when quantised; its function stays the same.

    alpha: of the formula above, 0 to 1; or AUTO: for each place the one of ALPHAS with the least error of the products
    that read it, or none. symmetric: whether activations will have no zero point; per_channel: whether weights will
    have a scale for each output. Returns `places`, how many there are, and `changed`, a list of `tensor`, `alpha` and
    `gain_db`, by which the products' error is less on samples. OracleError.
    """
    graph = _SmoothGraph(model)
    places = list(graph.places())
    statistics, changed = _collect_statistics(model, places, samples), list[dict[str, Any]]()
    for place in places:
        activations, weights = statistics[place.tensor], [graph.rows(operand) for operand in place.multiplied]
        no_factors = np.ones(len(activations.greatest))
        unsmoothed_error = _squared_error(activations, weights, no_factors, symmetric, per_channel)
        best: tuple[float, Array] | None = None
        least_error = unsmoothed_error * MAX_ERROR_RATIO if alpha == AUTO else np.inf
        for candidate_alpha in ALPHAS if alpha == AUTO else (float(alpha),):
            factors = _channel_factors(activations.largest, weights, candidate_alpha)
            error = _squared_error(activations, weights, factors, symmetric, per_channel)
            if error < least_error and np.any(factors != 1):
                least_error, best = error, (candidate_alpha, factors)
        if best is not None:
            graph.scale(place, best[1])
            gain = 10 * float(np.log10(unsmoothed_error / least_error)) if unsmoothed_error and least_error else 0.0
            changed.append({"tensor": place.tensor, "alpha": best[0], "gain_db": gain})
    return {"places": len(places), "changed": changed}


def is_smoothable(model: onnx.ModelProto) -> bool:
    """Whether a float model has a tensor that `smooth` can scale."""
    return any(True for _ in _SmoothGraph(model).places())


def _channel_factors(largest: Array, weights: list[Array], alpha: float) -> Array:
    """Return the factor s of each channel, a power of two; 1 for channels of zeros. Their median is 1.

    largest: magnitude of each channel. weights: matrices [channels, outputs] that read it.
    """
    heaviest = np.max([np.abs(w).max(axis=1) for w in weights], axis=0)
    is_used = (largest > 0) & (heaviest > 0) & np.isfinite(largest * heaviest)
    factors = np.ones(len(largest))
    if is_used.any():
        exponents = alpha * np.log2(largest[is_used]) - (1 - alpha) * np.log2(heaviest[is_used])
        factors[is_used] = 2.0 ** np.rint(exponents - np.median(exponents))
    return factors


def _squared_error(
    x: ChannelStatistics, weights: list[Array], factors: Array, symmetric: bool, per_channel: bool
) -> float:
    """Return the squared error of quantised products, smoothed by `factors`, summed over the kept rows of
    activations."""
    low, high = min(float((x.least / factors).min()), 0.0), max(float((x.greatest / factors).max()), 0.0)
    if symmetric:
        high = max(-low, high)
        low = -high
    step = (high - low) / (254 if symmetric else 255) or 1.0
    rounded, total = np.rint(x.rows / factors / step) * step, 0.0
    for w in weights:
        scaled = w * factors[:, None]
        steps = np.abs(scaled).max(axis=0 if per_channel else None) / 127
        steps = np.where(steps == 0, 1.0, steps)
        total += float(((rounded @ (np.rint(scaled / steps) * steps) - x.rows @ w) ** 2).sum())
    return total


def _collect_statistics(
    model: onnx.ModelProto, places: list[SmoothPlace], samples: Iterable[Mapping[str, Array]]
) -> dict[str, ChannelStatistics]:
    """Run the model on the samples, and return the statistics of the tensors of `places`, by name."""
    probe = onnx.ModelProto()
    probe.CopyFrom(model)
    del probe.graph.output[:]
    probe.graph.output.extend(onnx.ValueInfoProto(name=place.tensor) for place in places)
    statistics, all_samples = dict[str, ChannelStatistics](), list(samples) if places else []
    session = open_session(probe, int8=False) if places else None
    for sample in all_samples:
        for name, array in run_session(session, sample).items():
            flat_rows = array.reshape(-1, array.shape[-1]).astype(np.float64)
            sampled_rows = flat_rows[
                np.linspace(0, len(flat_rows) - 1, min(len(flat_rows), -(-MAX_ROWS // len(all_samples)))).astype(int)
            ]
            least, largest, earlier = flat_rows.min(axis=0), flat_rows.max(axis=0), statistics.get(name)
            if earlier is not None:
                least, largest = np.minimum(least, earlier.least), np.maximum(largest, earlier.greatest)
                sampled_rows = np.concatenate([earlier.rows, sampled_rows])
            statistics[name] = ChannelStatistics(least, largest, sampled_rows)
    return statistics


class _SmoothGraph:
    """A float model whose constants can be changed.

    makers: the node that computes a tensor. readers: (node, number of the input) for each read. outputs: of the model,
    and tensors that subgraphs read. widths: size of the last axis of a tensor.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        self.graph = model.graph
        self.constants = {tensor.name: tensor for tensor in self.graph.initializer}
        self.outputs = {value.name for value in self.graph.output} | set(_captured_names(self.graph.node))
        self.makers = {name: node for node in self.graph.node for name in node.output if name}
        self.readers: dict[str, list[tuple[onnx.NodeProto, int]]] = {}
        for node in self.graph.node:
            for input_number, name in enumerate(node.input):
                self.readers.setdefault(name, []).append((node, input_number))
        inferred = onnx.shape_inference.infer_shapes(model).graph
        self.widths: dict[str, int] = {
            value.name: value.type.tensor_type.shape.dim[-1].dim_value
            for value in (*inferred.input, *inferred.value_info, *inferred.output)
            if value.type.tensor_type.shape.dim
        }

    def places(self) -> Iterator[SmoothPlace]:
        """Yield the places of the model whose channels can be scaled, in the model's order."""
        for node in self.graph.node:
            weights = [] if self._is_view(node) or not node.output else self._weights_of_readers(node.output[0])
            producers = self._divisible_constants(node.output[0]) if weights else None
            if not producers:
                continue
            operands = (*producers, *weights)
            channel_counts = {
                self._shape_of(operand.node.input[operand.input_number])[operand.axis] for operand in operands
            }
            if len(channel_counts) == 1:
                yield SmoothPlace(node.output[0], tuple(producers), tuple(weights))

    def rows(self, operand: ChannelConstant) -> Array:
        """Return a constant matrix as float64 [channels, outputs]."""
        return np.moveaxis(self._array(operand), operand.axis, 0).astype(np.float64)

    def scale(self, place: SmoothPlace, factors: Array) -> None:
        """Divide and multiply the constants of a place by `factors` [channels]."""
        for operands, multipliers in ((place.divided, 1 / factors), (place.multiplied, factors)):
            for operand in operands:
                array = self._array(operand)
                broadcast_shape = [1] * array.ndim
                broadcast_shape[operand.axis] = -1
                self._set_array(operand, (array * multipliers.reshape(broadcast_shape)).astype(array.dtype))

    def _array(self, operand: ChannelConstant) -> Array:
        """Return the value of a constant operand."""
        array: Array = numpy_helper.to_array(self.constants[operand.node.input[operand.input_number]])
        return array

    def _set_array(self, operand: ChannelConstant, array: Array) -> None:
        """Change the value of a constant operand; the node gets a copy of its own if others read the constant, too."""
        name = operand.node.input[operand.input_number]
        if len(self.readers[name]) == 1 and name not in self.outputs:
            self.constants[name].CopyFrom(numpy_helper.from_array(array, name))
            return
        self.readers[name] = [(n, k) for n, k in self.readers[name] if (n, k) != (operand.node, operand.input_number)]
        copy_name = f"{name}_{operand.input_number}_of_{operand.node.output[0]}"
        operand.node.input[operand.input_number] = copy_name
        self.graph.initializer.append(numpy_helper.from_array(array, copy_name))
        self.constants[copy_name], self.readers[copy_name] = (
            self.graph.initializer[-1],
            [(operand.node, operand.input_number)],
        )

    def _weights_of_readers(self, name: str) -> list[ChannelConstant]:
        """Return the weights of the products that read a tensor, also through views; [] if anything else reads it."""
        constants: list[ChannelConstant] = []
        for node, input_number in self.readers.get(name, ()):
            if self._is_view(node):
                reader_weights = self._weights_of_readers(node.output[0])
            else:
                weights = self._weights(node)
                reader_weights = [weights[0]] if weights and input_number == 0 else []
            if not reader_weights:
                return []
            constants += reader_weights
        return [] if name in self.outputs else constants

    def _weights(self, node: onnx.NodeProto) -> tuple[ChannelConstant, ChannelConstant] | None:
        """Return the constant weights of a product along both axes, (inputs, outputs); None if it has none."""
        attrs = _attributes(node)
        if node.op_type not in PRODUCTS or attrs.get("transA") or len(self._shape_of(node.input[1])) != 2:
            return None
        axes = (1, 0) if attrs.get("transB") else (0, 1)
        return ChannelConstant(node, 1, axes[0]), ChannelConstant(node, 1, axes[1])

    def _divisible_constants(self, name: str) -> list[ChannelConstant] | None:
        """Return the constants to divide by factors so that the tensor `name` is divided; None where that is
        impossible."""
        node = self.makers.get(name)
        if node is None or node.output[0] != name:
            return None
        if node.op_type in NORMS:
            return self._divisible_in_norm(node)
        if (weights := self._weights(node)) is not None:
            bias = self._channel_constant(node, 2, name)
            return None if bias is None else [weights[1], *bias]
        if node.op_type in HOMOGENEOUS_OPERATORS or self._is_view(node):
            return self._divisible_for_only_reader(node.input[0])
        return (
            self._divisible_in_sum_or_product(node, name)
            if node.op_type in (*SUM_OPERATORS, *PRODUCT_OPERATORS)
            else None
        )

    def _divisible_in_norm(self, node: onnx.NodeProto) -> list[ChannelConstant] | None:
        """Return the scale and offset of a norm; None where they are not constants of one axis."""
        operands = [k for k, name in enumerate(node.input) if k and name]
        if not all(len(self._shape_of(node.input[k])) == 1 for k in operands):
            return None
        return [ChannelConstant(node, k, 0) for k in operands] or None

    def _divisible_in_sum_or_product(self, node: onnx.NodeProto, name: str) -> list[ChannelConstant] | None:
        """Return the constants to divide so that the result `name` of Add, Sub, Mul or Div is divided.

        In a sum: its constant, and those that compute the other term. In a product: its constant, or those that compute
        one factor (of Div, the dividend). None where that is impossible.
        """
        constant_inputs = [k for k in (0, 1) if node.input[k] in self.constants]
        if node.op_type in SUM_OPERATORS:
            constant_part = (
                self._channel_constant(node, constant_inputs[0], name) if len(constant_inputs) == 1 else None
            )
            other_term = (
                None if constant_part is None else self._divisible_for_only_reader(node.input[1 - constant_inputs[0]])
            )
            return None if constant_part is None or other_term is None else constant_part + other_term
        if (
            node.op_type == "Mul"
            and len(constant_inputs) == 1
            and (constant_part := self._channel_constant(node, constant_inputs[0], name))
        ):
            return constant_part
        for k in (0, 1) if node.op_type == "Mul" else (0,):
            operand = (
                self._divisible_for_only_reader(node.input[k]) if self._has_all_channels(node.input[k], name) else None
            )
            if operand is not None:
                return operand
        return None

    def _divisible_for_only_reader(self, name: str) -> list[ChannelConstant] | None:
        """Return `_divisible_constants` of a tensor; None if more than one operand reads it, or it is an output."""
        return self._divisible_constants(name) if len(self.readers[name]) == 1 and name not in self.outputs else None

    def _channel_constant(self, node: onnx.NodeProto, input_number: int, name: str) -> list[ChannelConstant] | None:
        """Return input `input_number` as a list of one constant, if it has a number for each channel of the tensor
        `name`.

        [] where the input is left out, None where it is no such constant.
        """
        if input_number >= len(node.input) or not node.input[input_number]:
            return []
        dims = self._shape_of(node.input[input_number])
        covers_channels = dims and dims[-1] == self.widths.get(name) and dims[-1] == np.prod(dims)
        return [ChannelConstant(node, input_number, len(dims) - 1)] if covers_channels else None

    def _shape_of(self, name: str) -> tuple[int, ...]:
        """Return the shape of a constant; () for other tensors."""
        return tuple(self.constants[name].dims) if name in self.constants else ()

    def _has_all_channels(self, operand: str, name: str) -> bool:
        """Whether `operand` is no constant, and has as many channels as `name`, so that it is not broadcast."""
        return operand not in self.constants and 0 < self.widths.get(operand, 0) == self.widths.get(name)

    def _is_view(self, node: onnx.NodeProto) -> bool:
        """Whether an operator is a view that keeps the last axis, the channels."""
        if not op_spec(node.op_type).view or node.input[0] not in self.widths:
            return False
        return 0 < self.widths[node.input[0]] == self.widths.get(node.output[0], 0)


def _captured_names(nodes: Iterable[onnx.NodeProto], is_inside: bool = False) -> Iterator[str]:
    """Yield the names that subgraphs of nodes read. is_inside: the nodes are in a subgraph themselves."""
    for node in nodes:
        yield from node.input if is_inside else ()
        for attr in node.attribute:
            for graph in (attr.g, *attr.graphs):
                yield from _captured_names(graph.node, True)


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    """Return the attributes of a node as Python values, by name."""
    return {attr.name: onnx.helper.get_attribute_value(attr) for attr in node.attribute}
