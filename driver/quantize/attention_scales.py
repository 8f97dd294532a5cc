"""Choose the operators besides products that are quantised, and the ranges of masked attention scores.

These operators are sums and softmaxes in attention, the residual stream, and norms.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from celosia.compiler.graph.quantized.rounded import NORMS
from celosia.compiler.ops import op_spec
from celosia.compiler.program.op_spec import Kind
from celosia.driver.quantize.decoders import PRODUCTS
from celosia.driver.quantize.score_masks import HIDDEN_SCORE, is_mask
from celosia.driver.workstation.oracle import open_session, run_session

Array = NDArray[Any]

NEGLIGIBLE_DISTANCE = 24.0
"""Scores so far below the largest of their row are negligible: exp of a thousand of them adds nothing to a float32 sum.
"""
BINARY_OPERATORS = ("Add", "Mul")
"""Operators on two tensors that have a quantised form."""


@dataclass(frozen=True)
class MaskedScores:
    """Tensors of a sum that a softmax reads: `result` = `scores` (computed by products) + `mask`."""

    scores: str
    mask: str
    result: str


@dataclass
class BetweenProducts:
    """Operators to quantise between products.

    operators: names of nodes that read results of products, and whose results products read. masked: those among them
    that add a mask to scores.
    """

    operators: list[str] = field(default_factory=list)
    masked: list[MaskedScores] = field(default_factory=list)


def operators_between_products(model: onnx.ModelProto, choice: str) -> BetweenProducts:
    """Find the operators to quantise between the products of `model`, whose nodes have names.

    choice: "rotary" for rotary positions only; "attention" for masks and softmaxes, too; else also for the residual
    stream and norms, from the embeddings on.
    """
    is_whole_decoder = choice not in ("rotary", "attention")
    flow, result = _ElementwiseFlow(model, is_whole_decoder), BetweenProducts()
    scores = flow.tensors_read_by(_is_softmax) if choice != "rotary" else set[str]()
    read_tensors = scores | flow.tensors_read_by(
        lambda node: node.op_type in (*PRODUCTS, *NORMS) if is_whole_decoder else flow.multiplies_activations(node)
    )
    for node in model.graph.node:
        computed_operands = [name for name in flow.variable_operands(node) if name in flow.computed]
        if computed_operands and ((scores and _is_softmax(node)) or (is_whole_decoder and node.op_type in NORMS)):
            result.operators.append(node.name)
        elif computed_operands and node.output[0] in flow.binary_results and node.output[0] in read_tensors:
            result.operators.append(node.name)
            other_operands = [name for name in flow.variable_operands(node) if name not in flow.computed]
            if node.op_type == "Add" and other_operands and node.output[0] in scores:
                result.masked.append(MaskedScores(computed_operands[0], other_operands[0], node.output[0]))
    return result


def find_attention_scores(model: onnx.ModelProto) -> set[str]:
    """Find the tensors that softmaxes read, also through element-wise operators."""
    return _ElementwiseFlow(model, is_whole_decoder=False).tensors_read_by(_is_softmax)


def _is_softmax(node: onnx.NodeProto) -> bool:
    """Whether a node is a Softmax."""
    return bool(node.op_type == "Softmax")


class _ElementwiseFlow:
    """Data flow of a model through its element-wise operators.

    computed: results of products, also behind element-wise operators; if `is_whole_decoder`, also of norms and
    embeddings. binary_results: results of BINARY_OPERATORS on two tensors, unless both are functions of one tensor, as
    in GELU.
    """

    def __init__(self, model: onnx.ModelProto, is_whole_decoder: bool) -> None:
        self.nodes = list(model.graph.node)
        addends = {name for node in self.nodes if node.op_type == "Add" for name in node.input}
        self.constants = {
            tensor.name for tensor in model.graph.initializer if tensor.name not in addends or not is_mask(tensor)
        }
        self.computed, self.binary_results = set[str](), set[str]()
        source_of: dict[str, str] = {}
        for node in self.nodes:
            operands, is_elementwise = self.variable_operands(node), self._is_elementwise(node)
            sources = {source_of.get(name, name) for name in operands}
            is_source = node.op_type in PRODUCTS or (
                is_whole_decoder and (node.op_type in NORMS or self._is_embedding(node))
            )
            if is_source or (is_elementwise and self.computed.intersection(operands)):
                self.computed.update(node.output)
            if node.op_type in BINARY_OPERATORS and len(sources) == 2:
                self.binary_results.add(node.output[0])
            elif is_elementwise and len(sources) == 1:
                source_of.update(dict.fromkeys(node.output, *sources))

    def variable_operands(self, node: onnx.NodeProto) -> list[str]:
        """Return the operands that are no constants. Constant masks count as variable, since they are rewritten."""
        return [name for name in node.input if name and name not in self.constants]

    def multiplies_activations(self, node: onnx.NodeProto) -> bool:
        """Whether a node is a product of two activations, as in attention."""
        return node.op_type in PRODUCTS and len(self.variable_operands(node)) > 1

    def tensors_read_by(self, is_reader: Callable[[onnx.NodeProto], bool]) -> set[str]:
        """Collect the operands of nodes for which `is_reader` holds, also in front of element-wise operators."""
        tensors: set[str] = set()
        for node in reversed(self.nodes):
            if is_reader(node) or (self._is_elementwise(node) and tensors.intersection(node.output)):
                tensors.update(self.variable_operands(node))
        return tensors

    def _is_embedding(self, node: onnx.NodeProto) -> bool:
        """Whether a node looks up rows of a constant table."""
        return node.op_type == "Gather" and node.input[0] in self.constants

    def _is_elementwise(self, node: onnx.NodeProto) -> bool:
        """Whether each element of the result is a function of single elements, or only moved; not for embeddings."""
        spec = op_spec(node.op_type)
        return (spec.kind is Kind.INJECTIVE or spec.moves is not None) and not self._is_embedding(node)


@dataclass(frozen=True)
class ScoreRange:
    """Range of a sum of scores and mask that a softmax reads.

    high: the largest score. low: a score that is negligible in any row. mask: the mask's value that brings the largest
    score down to `low`; a lower one changes nothing.
    """

    low: float
    high: float
    mask: float


def measure_score_ranges(
    model: onnx.ModelProto, masked: Sequence[MaskedScores], samples: Iterable[Mapping[str, Array]]
) -> dict[str, ScoreRange]:
    """Return the range of each masked sum, by the name of its result, over all `samples` of the float model.

    OracleError.
    """
    names = list(
        dict.fromkeys(name for masked_scores in masked for name in (masked_scores.scores, masked_scores.result))
    )
    probe = onnx.ModelProto()
    probe.CopyFrom(model)
    del probe.graph.output[:]
    probe.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    row_maxima: dict[str, list[Array]] = {name: [] for name in names}
    if names:
        session = open_session(probe, int8=False)
        for sample in samples:
            for name, array in run_session(session, sample).items():
                row_maxima[name].append(array.max(axis=-1).ravel())
    largest = {name: np.concatenate(arrays) for name, arrays in row_maxima.items()}
    ranges = {}
    for masked_scores in masked:
        visible = largest[masked_scores.result][largest[masked_scores.result] > HIDDEN_SCORE]
        low, high = (
            (float(visible.min()) - NEGLIGIBLE_DISTANCE, float(visible.max()))
            if visible.size
            else (-NEGLIGIBLE_DISTANCE, 0.0)
        )
        ranges[masked_scores.result] = ScoreRange(low, high, low - float(largest[masked_scores.scores].max()))
    return ranges


def bound_masks(
    model: onnx.ModelProto, masked: Sequence[MaskedScores], ranges: Mapping[str, ScoreRange]
) -> list[str]:  # fmt: skip
    """Change `model`: bound masks from below by the value in their range. Return the names of the new nodes.

    Else scores would be quantised with a step for -inf or -10000, and lose all precision.

    result = Add(scores, mask)    ->    bounded = Max(mask, bound)    result = Add(scores, bounded)
    """
    graph, bounds = model.graph, dict[str, float]()
    for masked_scores in masked:
        bounds[masked_scores.mask] = min(bounds.get(masked_scores.mask, 0.0), ranges[masked_scores.result].mask)
    mask_of_result = {masked_scores.result: masked_scores.mask for masked_scores in masked}
    for node in graph.node:
        mask = mask_of_result.get(node.output[0])
        node.input[:] = [f"{mask}_bounded" if name == mask else name for name in node.input]
    for mask, bound in bounds.items():
        bound_tensor = numpy_helper.from_array(np.array(bound, np.float32), f"{mask}_bound")
        graph.initializer.append(bound_tensor)
        bounded = helper.make_node("Max", [mask, bound_tensor.name], [f"{mask}_bounded"], name=f"{mask}_Max")
        index = next((k + 1 for k, other in enumerate(graph.node) if mask in other.output), 0)
        graph.node.insert(index, bounded)
    return [f"{mask}_Max" for mask in bounds]


def restore_float_constants(
    model: onnx.ModelProto, original: onnx.ModelProto, names: Collection[str]
) -> onnx.ModelProto:
    """Change `model`: give norms among the nodes `names` the float scales and offsets of `original` back.

    The quantiser rounds these constants, which loses precision and saves nothing. Returns `model`.
    """
    graph, constants = model.graph, {tensor.name: tensor for tensor in original.graph.initializer}
    norm_inputs = {
        node.name: node.input for node in original.graph.node if node.name in names and node.op_type in NORMS
    }
    float_names = dict[str, str]()
    for node in graph.node:
        for number, name in enumerate(norm_inputs.get(node.name, ())):
            if name in constants:
                node.input[number] = float_names.setdefault(name, f"{name}_float")
    graph.initializer.extend(
        numpy_helper.from_array(numpy_helper.to_array(constants[name]), float_name)
        for name, float_name in float_names.items()
    )
    read_tensors = {name for node in graph.node for name in node.input} | {value.name for value in graph.output}
    for node in [
        candidate
        for candidate in graph.node
        if candidate.op_type == "DequantizeLinear" and candidate.output[0] not in read_tensors
    ]:
        graph.node.remove(node)
    return model
