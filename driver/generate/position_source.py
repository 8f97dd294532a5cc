"""Check that an operator with a cache inside it gets the positions of tokens from the model's mask."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
from onnx import helper, numpy_helper
from onnx_ir.passes.common import LiftConstantsToInitializersPass

from celosia.compiler.graph.errors import ModelError
from celosia.compiler.graph.importing.dimensions import input_values
from celosia.compiler.graph.simplify.fold import fold
from celosia.compiler.graph.values import constant
from celosia.driver.generate.roles import Roles

LAST, TOTAL = 5, 6
"""Inputs of GroupQueryAttention: the last place of what is seen, and the number of places."""
SEEN = (1, 1, 1, 1, 0)
"""A mask, of which SEEN_LAST is the last place."""
SEEN_LAST = 3
FOUND = "celosia/place"


def require_position_inputs(proto: onnx.ModelProto, node: onnx.NodeProto, roles: Roles) -> None:
    """Raise ModelError where `node`, a GroupQueryAttention, does not get the last place and the number of places from
    the mask."""
    for number, label, expected in ((LAST, "last place", SEEN_LAST), (TOTAL, "number of places", len(SEEN))):
        name = node.input[number] if number < len(node.input) else ""
        if not name or _compute_from_mask(proto, name, roles) != expected:
            raise ModelError(
                f"{node.op_type} ({node.name or node.output[0]}) takes {name!r}, which is not the {label} of the mask "
                f"{roles.mask!r}; export the model as onnxruntime-genai does"
            )


def _compute_from_mask(proto: onnx.ModelProto, name: str, roles: Roles) -> int | None:
    """Compute the number `name` from the mask SEEN; None where it needs more than the mask."""
    wanted_names, nodes = {name}, list[onnx.NodeProto]()
    for node in reversed(proto.graph.node):
        if wanted_names.intersection(node.output):
            nodes.insert(0, node)
            wanted_names.update(node.input)
    if [name for name in input_values(proto) if name in wanted_names] != [roles.mask]:
        return None
    constants = [tensor for tensor in proto.graph.initializer if tensor.name in wanted_names]
    constants.append(numpy_helper.from_array(np.array([SEEN]).astype(roles.kinds[roles.mask]), roles.mask))
    nodes.append(helper.make_node("Identity", [name], [FOUND]))  # nodes of outputs are not folded
    graph = helper.make_graph(nodes, "places", [], [onnx.ValueInfoProto(name=FOUND)], constants)
    model = ir.from_proto(helper.make_model(graph, opset_imports=proto.opset_import))
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    fold(model, keep=frozenset())
    (last,) = (node for node in model.graph if node.outputs[0].name == FOUND)
    index = constant(last.inputs[0])
    return None if index is None or index.size != 1 else int(index.item())
