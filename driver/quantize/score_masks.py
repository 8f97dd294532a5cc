"""Find masks of attention scores, and rewrite those that select scores to sums, which can be quantised.

    Where(hidden, -inf, scores)    ->    Add(scores, Where(hidden, -inf, 0))

PyTorch's `masked_fill` becomes the first form. Hidden scores lie far below all others in both.
`attention_scales.measure_score_ranges` measures the ranges of these sums.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

HIDDEN_SCORE = -1e3
"""A score of at most this is hidden by a mask."""


def is_mask(tensor: TensorProto) -> bool:
    """Whether a float constant is a mask: added to scores, it hides some of them."""
    array = numpy_helper.to_array(tensor)
    return array.dtype.kind == "f" and bool((array <= HIDDEN_SCORE).any())


def replace_masks_by_sums(model: onnx.ModelProto, scores: Collection[str]) -> list[str]:
    """Change `model`: rewrite each Where that masks a tensor in `scores` to a sum with a mask.

    Returns the names of the new nodes that compute masks.
    """
    graph, masks, nodes = model.graph, list[str](), list[onnx.NodeProto]()
    constants = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        hiding_input = _hiding_input(node, constants) if node.output[0] in scores else 0
        if hiding_input:
            result, unmasked = node.output[0], node.input[3 - hiding_input]
            zero, mask = f"{result}_none", f"{result}_mask"
            dtype = helper.tensor_dtype_to_np_dtype(constants[node.input[hiding_input]].data_type)
            graph.initializer.append(numpy_helper.from_array(np.zeros((), dtype), zero))
            where_inputs = [node.input[0], *((node.input[1], zero) if hiding_input == 1 else (zero, node.input[2]))]
            nodes.append(helper.make_node("Where", where_inputs, [mask], name=mask))
            masks.append(mask)
            node = helper.make_node("Add", [unmasked, mask], [result], name=node.name)
        nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)
    return masks


def _hiding_input(node: onnx.NodeProto, constants: Mapping[str, TensorProto]) -> int:
    """Return the number (1 or 2) of the constant input of a Where that hides elements of the other one.

    0 where none does, or `node` is no Where.
    """
    constant_inputs = [number for number in (1, 2) if node.op_type == "Where" and node.input[number] in constants]
    hides = len(constant_inputs) == 1 and _hides_all(constants[node.input[constant_inputs[0]]])
    return constant_inputs[0] if hides else 0


def _hides_all(tensor: TensorProto) -> bool:
    """Whether all elements of a float constant hide scores."""
    array = numpy_helper.to_array(tensor)
    return array.dtype.kind == "f" and bool((array <= HIDDEN_SCORE).all())
