"""Find attention among the layers: per head a product, a softmax and a product, which can run as one block.

    product 0 .. n → scores → softmax 0 .. n → probabilities → product 0 .. n     ➔     one layer of n + 1 heads

The heads must lie side by side and have the same scales, and no other layer may read scores and probabilities.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from celosia.compiler.graph.select import LayerAssignment, Partition
from celosia.compiler.launch.order import order_around_softmaxes
from celosia.compiler.layer import Activation, Layer
from celosia.hw.spec.config import Config


class Attention(NamedTuple):
    """Layers of attention, and the same as one block.

    heads: the choices of all heads, as in the selection. stages: product, softmax and product, each for all heads.
    before: choices that make the inputs of attention, and the inputs of these. one_by_one: the layers of `before` and
    `heads` in the order of a launch.
    """

    heads: list[LayerAssignment]
    stages: tuple[LayerAssignment, LayerAssignment, LayerAssignment]
    before: list[LayerAssignment]
    one_by_one: list[Layer]


def find_attentions(cfg: Config, selection: Partition, apart: Collection[ir.Node]) -> Iterator[Attention]:
    """Yield each attention in `selection` that has no operator in `apart`."""
    choices = selection.choices
    softmax_outputs = dict.fromkeys(choice.value for choice in choices if choice.layer.softmax is not None)
    for value in softmax_outputs:
        softmaxes = [choice for choice in choices if choice.value is value]
        scores, probabilities = softmaxes[0].layer.x.storage, softmaxes[0].layer.y.storage
        score_products = [choice for choice in choices if choice.layer.y.storage is scores]
        value_products = [
            choice for choice in choices if probabilities in (act.storage for act in choice.layer.inputs())
        ]
        score_readers = [choice for choice in choices if scores in (act.storage for act in choice.layer.inputs())]
        heads = [*score_products, *softmaxes, *value_products]
        if [*map(id, score_readers)] != [*map(id, softmaxes)] or not _contain_none(heads, apart):
            continue
        if not len(score_products) == len(softmaxes) == len(value_products):
            continue
        stage_pairs = zip((score_products, softmaxes), (softmaxes, value_products))
        if any(a.layer.y != b.layer.x for before, later_stage in stage_pairs for a, b in zip(before, later_stage)):
            continue
        nodes = {node for choice in heads for node in choice.nodes}
        stages = [
            _merge_heads(cfg, choices_of_heads) for choices_of_heads in (score_products, softmaxes, value_products)
        ]
        if (
            all(_is_read_only_by(choice.value, nodes, selection) for choice in (score_products[0], softmaxes[0]))
            and None not in stages
        ):
            score_stage, softmax_stage, value_stage = (stage for stage in stages if stage is not None)
            before = _layers_before(choices, heads)
            layers = [choice.layer for choice in (*before, *heads)]
            order = order_around_softmaxes(cfg, layers)
            yield Attention(
                heads, (score_stage, softmax_stage, value_stage), before, [layers[number] for number in order]
            )


def _contain_none(choices: Iterable[LayerAssignment], nodes: Collection[ir.Node]) -> bool:
    """Return whether none of `nodes` is in `choices`."""
    return all(node not in nodes for choice in choices for node in choice.nodes)


def _is_read_only_by(value: ir.Value, nodes: Collection[ir.Node], selection: Partition) -> bool:
    """Return whether only `nodes` read `value` and its views."""
    if value.is_graph_output():
        return False
    others = [use.node for use in value.uses() if use.node not in nodes]
    return all(n in selection.views and all(_is_read_only_by(y, nodes, selection) for y in n.outputs) for n in others)


def _merge_heads(cfg: Config, choices: Sequence[LayerAssignment]) -> LayerAssignment | None:
    """Merge equal layers of all heads into one; return None if their constants or places differ."""
    layers = [choice.layer for choice in choices]
    first = layers[0]
    if (first.product is None and first.softmax is None) or first.heads > 1:
        return None
    if any(layer.kind != first.kind or _scaling(layer) != _scaling(first) for layer in layers):
        return None
    x, y = (_join_channels(cfg, acts) for acts in ([layer.x for layer in layers], [layer.y for layer in layers]))
    products = [layer.product for layer in layers if layer.product is not None]
    product, w = first.product, _join_channels(cfg, [product.w for product in products]) if products else None
    if x is None or y is None or (products and w is None):
        return None
    if product is not None and w is not None:
        product = replace(product, w=w)
    name = first.name if len(layers) == 1 else choices[0].nodes[0].name or ""
    reads = {storage: source for choice in choices for storage, source in choice.reads.items()}
    return replace(
        choices[0], layer=replace(first, name=name, heads=len(layers), x=x, y=y, product=product), reads=reads
    )


def _join_channels(cfg: Config, acts: Sequence[Activation]) -> Activation | None:
    """Join activations whose channels follow each other in one storage; return None if they do not."""
    first = acts[0]
    for number, act in enumerate(acts):
        if act != replace(first, group_offset=first.group_offset + number * first.groups(cfg)):
            return None
    if first.channels % cfg.group:
        return None
    return replace(first, channels=first.channels * len(acts))


def _scaling(layer: Layer) -> tuple[object, ...]:
    """Return the constants of a product or softmax, which must be equal for all heads."""
    epilogue, softmax, product, requantise = layer.epilogue, layer.softmax, layer.product, layer.requantise
    constants: list[object] = [epilogue.clip, epilogue.residual]
    constants.append(None if epilogue.table is None else epilogue.table.tobytes())
    if softmax is not None:
        constants += [softmax.powers.tobytes(), softmax.zero_point]
    if product is not None:
        constants += [product.x_offset, product.w_offset]
    if requantise is not None:
        constants += [
            *(np.asarray(array).tobytes() for array in (requantise.bias, requantise.multiplier, requantise.shift)),
            requantise.zero_point,
        ]
    return tuple(constants)


def _layers_before(choices: Sequence[LayerAssignment], heads: Sequence[LayerAssignment]) -> list[LayerAssignment]:
    """Return the choices that make the inputs of `heads`, and those that make the inputs of these, in order."""
    head_ids = {id(choice) for choice in heads}
    before: dict[int, LayerAssignment] = {}
    for _ in range(2):
        inputs = {act.storage for choice in (*heads, *before.values()) for act in choice.layer.inputs()}
        before = {id(c): c for c in choices if c.layer.y.storage in inputs and id(c) not in head_ids}
    return [choice for choice in choices if id(choice) in before]
