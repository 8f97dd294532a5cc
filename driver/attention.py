"""What `celosia quantize` quantises beside products: the sums and softmaxes of attention, the residual stream, norms."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import helper, numpy_helper

from celosia.compiler.cpu.ops import traits
from celosia.compiler.graph.norms import NORMS
from celosia.compiler.program.traits import Kind
from celosia.driver.decoders import PRODUCTS

HIDDEN = -32.0
"""What masks add to scores at least, where these are bytes: its power of e adds nothing to a sum of float32, and what
lies further below would take steps from all others."""
JOINS = ("Add", "Mul")
"""What integers compute of two tensors."""


@dataclass
class BetweenProducts:
    """operators: names of nodes that are computed of products, and for products, of two tensors or of whole rows.
    masks: the operand that no product makes, of sums that a softmax reads; by the name of the sum. scores: these sums'
    results."""

    operators: list[str] = field(default_factory=list)
    masks: dict[str, str] = field(default_factory=dict)
    scores: list[str] = field(default_factory=list)


def between_products(model: onnx.ModelProto, everything: bool) -> BetweenProducts:
    """What is between `model`'s products in attention: rotary positions, masks, softmaxes. everything: the residual
    stream and norms, too, from the embeddings on. Every node of `model` has a name."""
    flow, found = _Flow(model, everything), BetweenProducts()
    scores = flow.read_by(_is_softmax)
    read = scores | flow.read_by(lambda node: node.op_type in (*PRODUCTS, *NORMS) if everything else flow.mixes(node))
    for node in model.graph.node:
        made = [name for name in flow.varying(node) if name in flow.made]
        if made and (_is_softmax(node) or (everything and node.op_type in NORMS)):
            found.operators.append(node.name)
        elif made and node.name in flow.joining and node.output[0] in read:
            found.operators.append(node.name)
            others = [name for name in flow.varying(node) if name not in flow.made]
            if node.op_type == "Add" and others and node.output[0] in scores:
                found.masks[node.name] = others[0]
                found.scores.append(node.output[0])
    return found


def _is_softmax(node: onnx.NodeProto) -> bool:
    return node.op_type == "Softmax"


class _Flow:
    """Which tensors are computed of which, single elements of single elements.

    made: tensors that are computed so of products; where `everything`, of norms and embeddings, too. joining: names of
    JOINS of two tensors that are not both functions of the same one, as those in GELU are.
    """

    def __init__(self, model: onnx.ModelProto, everything: bool) -> None:
        self.nodes, self.constants = list(model.graph.node), {tensor.name for tensor in model.graph.initializer}
        self.made, self.joining = set[str](), set[str]()
        of: dict[str, str] = {}
        for node in self.nodes:
            varying, through = self.varying(node), self._is_through(node)
            sources = {of.get(name, name) for name in varying}
            begins = node.op_type in PRODUCTS or (everything and (node.op_type in NORMS or self._embeds(node)))
            if begins or (through and self.made.intersection(varying)):
                self.made.update(node.output)
            if node.op_type in JOINS and len(sources) == 2:
                self.joining.add(node.name)
            elif through and len(sources) == 1:
                of.update(dict.fromkeys(node.output, *sources))

    def varying(self, node: onnx.NodeProto) -> list[str]:
        """The operands that are no constants."""
        return [name for name in node.input if name and name not in self.constants]

    def mixes(self, node: onnx.NodeProto) -> bool:
        """Whether it is a product of two activations."""
        return node.op_type in PRODUCTS and len(self.varying(node)) > 1

    def read_by(self, ends: Callable[[onnx.NodeProto], bool]) -> set[str]:
        """The tensors of which nodes compute that are `ends`, or what these read."""
        found: set[str] = set()
        for node in reversed(self.nodes):
            if ends(node) or (self._is_through(node) and found.intersection(node.output)):
                found.update(self.varying(node))
        return found

    def _embeds(self, node: onnx.NodeProto) -> bool:
        return node.op_type == "Gather" and node.input[0] in self.constants

    def _is_through(self, node: onnx.NodeProto) -> bool:
        facts = traits(node.op_type)
        return (facts.kind is Kind.INJECTIVE or facts.moves is not None) and not self._embeds(node)


def bound_masks(model: onnx.ModelProto, masks: dict[str, str]) -> list[str]:
    """Change `model` so that the sums `masks` read nothing below HIDDEN. Returns names of the nodes that see to that.

    scores = Add(x, mask)    ->    bounded = Max(mask, HIDDEN)    scores = Add(x, bounded)
    """
    graph, bounded = model.graph, dict[str, str]()
    for node in graph.node:
        if node.name in masks:
            mask = masks[node.name]
            bounded[mask] = f"{mask}_bounded"
            node.input[:] = [bounded[mask] if name == mask else name for name in node.input]
    least = numpy_helper.from_array(np.array(HIDDEN, np.float32), "least_of_masks")
    made = [
        helper.make_node("Max", [mask, least.name], [name], name=f"{name}_Max") for mask, name in bounded.items()
    ]
    if made:
        graph.initializer.append(least)
    for node in made:
        place = next((k + 1 for k, other in enumerate(graph.node) if node.input[0] in other.output), 0)
        graph.node.insert(place, node)
    return [node.name for node in made]


def with_float_constants(model: onnx.ModelProto, original: onnx.ModelProto, names: Collection[str]) -> onnx.ModelProto:
    """`model`, in which norms among the nodes `names` have the scales and offsets that they have in `original`, floats:
    the quantiser rounds them, which saves nothing. It is changed."""
    graph, constants = model.graph, {tensor.name: tensor for tensor in original.graph.initializer}
    norms = {node.name: node.input for node in original.graph.node if node.name in names and node.op_type in NORMS}
    kept = dict[str, str]()
    for node in graph.node:
        for place, name in enumerate(norms.get(node.name, ())):
            if name in constants:
                node.input[place] = kept.setdefault(name, f"{name}_float")
    graph.initializer.extend(
        numpy_helper.from_array(numpy_helper.to_array(constants[name]), new) for name, new in kept.items()
    )
    read = {name for node in graph.node for name in node.input} | {value.name for value in graph.output}
    for node in [each for each in graph.node if each.op_type == "DequantizeLinear" and each.output[0] not in read]:
        graph.node.remove(node)
    return model
