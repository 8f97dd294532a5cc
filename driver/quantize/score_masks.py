"""Masks that models add to the scores of a softmax; `attention_scales.score_ranges` finds the ranges of these sums.

    Where(hidden, -inf, scores)    ->    Add(scores, Where(hidden, -inf, 0))

PyTorch's `masked_fill` is the first. Hidden scores lie far below all others in both.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

HIDDEN = -1e3
"""A score of so much, or less, is hidden."""


def is_mask(tensor: TensorProto) -> bool:
    """Whether a constant hides some of the elements that it is added to."""
    array = numpy_helper.to_array(tensor)
    return array.dtype.kind == "f" and bool((array <= HIDDEN).any())


def replace_masks_by_sums(model: onnx.ModelProto, scores: Collection[str]) -> list[str]:
    """Change `model`: tensors of the names `scores` that are chosen between others and what hides them become sums.
    Returns names of the nodes that make the masks."""
    graph, masks, nodes = model.graph, list[str](), list[onnx.NodeProto]()
    constants = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        place = _hiding_input(node, constants) if node.output[0] in scores else 0
        if place:
            result, unmasked = node.output[0], node.input[3 - place]
            none, mask = f"{result}_none", f"{result}_mask"
            dtype = helper.tensor_dtype_to_np_dtype(constants[node.input[place]].data_type)
            graph.initializer.append(numpy_helper.from_array(np.zeros((), dtype), none))
            choice = [node.input[0], *((node.input[1], none) if place == 1 else (none, node.input[2]))]
            nodes.append(helper.make_node("Where", choice, [mask], name=mask))
            masks.append(mask)
            node = helper.make_node("Add", [unmasked, mask], [result], name=node.name)
        nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)
    return masks


def _hiding_input(node: onnx.NodeProto, constants: Mapping[str, TensorProto]) -> int:
    """Input of a Where that hides elements of the other one; 0 where none does, or it is no Where."""
    places = [place for place in (1, 2) if node.op_type == "Where" and node.input[place] in constants]
    return places[0] if len(places) == 1 and _hides_all(constants[node.input[places[0]]]) else 0


def _hides_all(tensor: TensorProto) -> bool:
    array = numpy_helper.to_array(tensor)
    return array.dtype.kind == "f" and bool((array <= HIDDEN).all())
