"""Find attention among the layers: heads of a product, a softmax and a product each, that can run as one block.

    product 0 .. n → scores → softmax 0 .. n → probabilities → product 0 .. n     ➔     one layer of n + 1 heads

The heads must lie side by side and be scaled alike, and no other layer may read scores and probabilities.
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

    heads: the choices of all heads, as they are in the selection. stages: product, softmax and product, each of all
    heads. before: choices that make the inputs of attention, and their inputs. one_by_one: the layers of `before` and
    `heads` in the order of a launch.
    """

    heads: list[LayerAssignment]
    stages: tuple[LayerAssignment, LayerAssignment, LayerAssignment]
    before: list[LayerAssignment]
    one_by_one: list[Layer]


def find_attentions(cfg: Config, selection: Partition, apart: Collection[ir.Node]) -> Iterator[Attention]:
    """Find attention in `selection`, without operators that are to stay `apart`."""
    choices = selection.choices
    softmax_outputs = dict.fromkeys(choice.value for choice in choices if choice.layer.softmax is not None)
    for value in softmax_outputs:
        middle = [choice for choice in choices if choice.value is value]
        scores, shares = middle[0].layer.x.storage, middle[0].layer.y.storage
        first = [choice for choice in choices if choice.layer.y.storage is scores]
        last = [choice for choice in choices if shares in (act.storage for act in choice.layer.inputs())]
        read = [choice for choice in choices if scores in (act.storage for act in choice.layer.inputs())]
        heads = [*first, *middle, *last]
        alone = all(a is b for a, b in zip(read, middle)) and len(read) == len(middle)
        if not alone or not len(first) == len(middle) == len(last) or not _none_of(heads, apart):
            continue
        handed = zip((first, middle), (middle, last))
        if any(a.layer.y != b.layer.x for before, behind in handed for a, b in zip(before, behind)):
            continue
        nodes = {node for choice in heads for node in choice.nodes}
        stages = [_merged(cfg, choices_of_heads) for choices_of_heads in (first, middle, last)]
        if all(_stays(choice.value, nodes, selection) for choice in (first[0], middle[0])) and None not in stages:
            one, two, three = (stage for stage in stages if stage is not None)
            before = _before(choices, heads)
            layers = [choice.layer for choice in (*before, *heads)]
            order = order_around_softmaxes(cfg, layers)
            yield Attention(heads, (one, two, three), before, [layers[number] for number in order])


def _none_of(choices: Iterable[LayerAssignment], nodes: Collection[ir.Node]) -> bool:
    """Whether none of `nodes` is in `choices`."""
    return all(node not in nodes for choice in choices for node in choice.nodes)


def _stays(value: ir.Value, nodes: Collection[ir.Node], selection: Partition) -> bool:
    """Whether `value` and its views are read by `nodes` alone."""
    if value.is_graph_output():
        return False
    others = [use.node for use in value.uses() if use.node not in nodes]
    return all(n in selection.views and all(_stays(y, nodes, selection) for y in n.outputs) for n in others)


def _merged(cfg: Config, choices: Sequence[LayerAssignment]) -> LayerAssignment | None:
    """Merge equal layers of all heads into one; None where their constants or places differ."""
    layers = [choice.layer for choice in choices]
    first = layers[0]
    if (first.product is None and first.softmax is None) or first.heads > 1:
        return None
    if any(layer.kind != first.kind or _scaling(layer) != _scaling(first) for layer in layers):
        return None
    x, y = (_side_by_side(cfg, acts) for acts in ([layer.x for layer in layers], [layer.y for layer in layers]))
    products = [layer.product for layer in layers if layer.product is not None]
    product, w = first.product, _side_by_side(cfg, [product.w for product in products]) if products else None
    if x is None or y is None or (products and w is None):
        return None
    if product is not None and w is not None:
        product = replace(product, w=w)
    name = first.name if len(layers) == 1 else choices[0].nodes[0].name or ""
    reads = {storage: source for choice in choices for storage, source in choice.reads.items()}
    return replace(
        choices[0], layer=replace(first, name=name, heads=len(layers), x=x, y=y, product=product), reads=reads
    )


def _side_by_side(cfg: Config, acts: Sequence[Activation]) -> Activation | None:
    """Join activations whose channels follow each other in one storage; None where they do not."""
    first = acts[0]
    for number, act in enumerate(acts):
        if act != replace(first, group_offset=first.group_offset + number * first.groups(cfg)):
            return None
    if first.channels % cfg.group:
        return None
    return replace(first, channels=first.channels * len(acts))


def _scaling(layer: Layer) -> tuple[object, ...]:
    """The constants of a product or softmax, which must be equal for all heads."""
    epilogue, softmax, product, r = layer.epilogue, layer.softmax, layer.product, layer.requantise
    constants: list[object] = [epilogue.clip, epilogue.residual]
    constants.append(None if epilogue.table is None else epilogue.table.tobytes())
    if softmax is not None:
        constants += [softmax.powers.tobytes(), softmax.zero_point]
    if product is not None:
        constants += [product.x_offset, product.w_offset]
    if r is not None:
        constants += [*(np.asarray(array).tobytes() for array in (r.bias, r.multiplier, r.shift)), r.zero_point]
    return tuple(constants)


def _before(choices: Sequence[LayerAssignment], heads: Sequence[LayerAssignment]) -> list[LayerAssignment]:
    """List the choices that make the inputs of `heads`, and those that make their inputs, in order."""
    own = {id(choice) for choice in heads}
    before: dict[int, LayerAssignment] = {}
    for _ in range(2):
        read = {act.storage for choice in (*heads, *before.values()) for act in choice.layer.inputs()}
        before = {id(c): c for c in choices if c.layer.y.storage in read and id(c) not in own}
    return [choice for choice in choices if id(choice) in before]
