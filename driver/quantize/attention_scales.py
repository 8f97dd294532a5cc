"""Operators that `celosia quantize` quantises beside products: attention's sums and softmaxes, residual stream,
norms."""

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
from celosia.driver.host.oracle import open_session, run_session
from celosia.driver.quantize.decoders import PRODUCTS
from celosia.driver.quantize.score_masks import HIDDEN, is_mask

Array = NDArray[Any]

BELOW = 24.0
"""Distance from the largest score of a row from which on a score adds nothing to a sum of float32 by its power of e,
even a thousand of them."""
JOINS = ("Add", "Mul")
"""Operators that compute integers from two tensors."""


@dataclass(frozen=True)
class MaskedScores:
    """Tensors of a sum that a softmax reads: `scores` come from products, and `mask` does not."""

    scores: str
    mask: str
    result: str


@dataclass
class BetweenProducts:
    """Operators to quantise between products. operators: names of nodes that are computed of products, and for
    products, of two tensors or of whole rows. masked: the sums with masks among them."""

    operators: list[str] = field(default_factory=list)
    masked: list[MaskedScores] = field(default_factory=list)


def operators_between_products(model: onnx.ModelProto, choice: str) -> BetweenProducts:
    """List the operators between `model`'s products in attention. choice: "rotary" positions; masks and softmaxes, too,
    for "attention"; else also the residual stream and norms, from the embeddings on."""
    everything = choice not in ("rotary", "attention")
    flow, result = _Flow(model, everything), BetweenProducts()
    scores = flow.read_by(_is_softmax) if choice != "rotary" else set[str]()
    read = scores | flow.read_by(lambda node: node.op_type in (*PRODUCTS, *NORMS) if everything else flow.mixes(node))
    for node in model.graph.node:
        computed = [name for name in flow.varying(node) if name in flow.made]
        if computed and ((scores and _is_softmax(node)) or (everything and node.op_type in NORMS)):
            result.operators.append(node.name)
        elif computed and node.output[0] in flow.joined and node.output[0] in read:
            result.operators.append(node.name)
            constants = [name for name in flow.varying(node) if name not in flow.made]
            if node.op_type == "Add" and constants and node.output[0] in scores:
                result.masked.append(MaskedScores(computed[0], constants[0], node.output[0]))
    return result


def find_attention_scores(model: onnx.ModelProto) -> set[str]:
    """Find the tensors from which softmaxes, and nothing but single elements, are computed."""
    return _Flow(model, everything=False).read_by(_is_softmax)


def _is_softmax(node: onnx.NodeProto) -> bool:
    return bool(node.op_type == "Softmax")


class _Flow:
    """Data flow of a model: operators that compute single elements from single elements.

    made: tensors that are computed so of products; where `everything`, of norms and embeddings, too. joined: results
    of JOINS of two tensors that are not both functions of the same one, as those in GELU are.
    """

    def __init__(self, model: onnx.ModelProto, everything: bool) -> None:
        self.nodes = list(model.graph.node)
        added = {name for node in self.nodes if node.op_type == "Add" for name in node.input}
        self.constants = {
            tensor.name for tensor in model.graph.initializer if tensor.name not in added or not is_mask(tensor)
        }
        self.made, self.joined = set[str](), set[str]()
        of: dict[str, str] = {}
        for node in self.nodes:
            varying, through = self.varying(node), self._passes_values_on(node)
            sources = {of.get(name, name) for name in varying}
            begins = node.op_type in PRODUCTS or (everything and (node.op_type in NORMS or self._is_embedding(node)))
            if begins or (through and self.made.intersection(varying)):
                self.made.update(node.output)
            if node.op_type in JOINS and len(sources) == 2:
                self.joined.add(node.output[0])
            elif through and len(sources) == 1:
                of.update(dict.fromkeys(node.output, *sources))

    def varying(self, node: onnx.NodeProto) -> list[str]:
        """Operands that are no constants, without masks, which are rewritten."""
        return [name for name in node.input if name and name not in self.constants]

    def mixes(self, node: onnx.NodeProto) -> bool:
        """Whether a node is a product of two activations."""
        return node.op_type in PRODUCTS and len(self.varying(node)) > 1

    def read_by(self, ends: Callable[[onnx.NodeProto], bool]) -> set[str]:
        """Collect the operands of nodes for which `ends` holds, also through nodes that pass values on."""
        masks: set[str] = set()
        for node in reversed(self.nodes):
            if ends(node) or (self._passes_values_on(node) and masks.intersection(node.output)):
                masks.update(self.varying(node))
        return masks

    def _is_embedding(self, node: onnx.NodeProto) -> bool:
        return node.op_type == "Gather" and node.input[0] in self.constants

    def _passes_values_on(self, node: onnx.NodeProto) -> bool:
        facts = op_spec(node.op_type)
        return (facts.kind is Kind.INJECTIVE or facts.moves is not None) and not self._is_embedding(node)


@dataclass(frozen=True)
class ScoreRange:
    """Range of masked sums that a softmax reads: from the largest score down to one that adds nothing to the softmax in
    any row; and the value that a mask adds to the largest score for that."""

    low: float
    high: float
    mask: float


def measure_score_ranges(
    model: onnx.ModelProto, masked: Sequence[MaskedScores], samples: Iterable[Mapping[str, Array]]
) -> dict[str, ScoreRange]:
    """Range of each sum's result, over all `samples` of the float model. OracleError."""
    names = list(
        dict.fromkeys(name for masked_softmax in masked for name in (masked_softmax.scores, masked_softmax.result))
    )
    probe = onnx.ModelProto()
    probe.CopyFrom(model)
    del probe.graph.output[:]
    probe.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    rows: dict[str, list[Array]] = {name: [] for name in names}
    if names:
        opened = open_session(probe, int8=False)
        for sample in samples:
            for name, array in run_session(opened, sample).items():
                rows[name].append(array.max(axis=-1).ravel())
    largest = {name: np.concatenate(arrays) for name, arrays in rows.items()}
    ranges = {}
    for masked_softmax in masked:
        seen = largest[masked_softmax.result][largest[masked_softmax.result] > HIDDEN]
        low, high = (float(seen.min()) - BELOW, float(seen.max())) if seen.size else (-BELOW, 0.0)
        ranges[masked_softmax.result] = ScoreRange(low, high, low - float(largest[masked_softmax.scores].max()))
    return ranges


def bound_masks(
    model: onnx.ModelProto, masked: Sequence[MaskedScores], ranges: Mapping[str, ScoreRange]
) -> list[str]:  # fmt: skip
    """Change `model` so that sums read nothing of masks below what their ranges say. Returns names of the nodes that
    see to that.

    result = Add(scores, mask)    ->    bounded = Max(mask, bound)    result = Add(scores, bounded)
    """
    graph, bounds = model.graph, dict[str, float]()
    for masked_softmax in masked:
        bounds[masked_softmax.mask] = min(bounds.get(masked_softmax.mask, 0.0), ranges[masked_softmax.result].mask)
    results = {masked_softmax.result: masked_softmax.mask for masked_softmax in masked}
    for node in graph.node:
        mask = results.get(node.output[0])
        node.input[:] = [f"{mask}_bounded" if name == mask else name for name in node.input]
    for mask, bound in bounds.items():
        least = numpy_helper.from_array(np.array(bound, np.float32), f"{mask}_bound")
        graph.initializer.append(least)
        bounded = helper.make_node("Max", [mask, least.name], [f"{mask}_bounded"], name=f"{mask}_Max")
        place = next((k + 1 for k, other in enumerate(graph.node) if mask in other.output), 0)
        graph.node.insert(place, bounded)
    return [f"{mask}_Max" for mask in bounds]


def restore_float_constants(
    model: onnx.ModelProto, original: onnx.ModelProto, names: Collection[str]
) -> onnx.ModelProto:
    """Return `model` with the scales and offsets of norms among the nodes `names` as in `original`, floats: the
    quantiser rounds them, which saves nothing. `model` is changed."""
    graph, constants = model.graph, {tensor.name: tensor for tensor in original.graph.initializer}
    norms = {node.name: node.input for node in original.graph.node if node.name in names and node.op_type in NORMS}
    replacement = dict[str, str]()
    for node in graph.node:
        for place, name in enumerate(norms.get(node.name, ())):
            if name in constants:
                node.input[place] = replacement.setdefault(name, f"{name}_float")
    graph.initializer.extend(
        numpy_helper.from_array(numpy_helper.to_array(constants[name]), new) for name, new in replacement.items()
    )
    read = {name for node in graph.node for name in node.input} | {value.name for value in graph.output}
    for node in [
        candidate
        for candidate in graph.node
        if candidate.op_type == "DequantizeLinear" and candidate.output[0] not in read
    ]:
        graph.node.remove(node)
    return model
