"""Check that a GroupQueryAttention gets its positions from the model's mask.

Only then may `cached_attention.py` compute them from the mask itself. The check runs the graph on an example mask.
"""

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

LAST_POSITION_INPUT, TOTAL_INPUT = 5, 6
"""Inputs of GroupQueryAttention: the position of the last seen token, and the number of positions."""
EXAMPLE_MASK = (1, 1, 1, 1, 0)
"""The mask for which the two inputs are computed."""
EXAMPLE_LAST_POSITION = 3
"""The position of the last seen token of EXAMPLE_MASK."""
RESULT = "celosia/place"
"""Name of the computed tensor."""


def require_position_inputs(proto: onnx.ModelProto, node: onnx.NodeProto, roles: Roles) -> None:
    """Raise ModelError where the two position inputs of `node`, a GroupQueryAttention, do not come from the mask."""
    for number, label, expected in (
        (LAST_POSITION_INPUT, "last place", EXAMPLE_LAST_POSITION),
        (TOTAL_INPUT, "number of places", len(EXAMPLE_MASK)),
    ):
        name = node.input[number] if number < len(node.input) else ""
        if not name or _compute_from_mask(proto, name, roles) != expected:
            raise ModelError(
                f"{node.op_type} ({node.name or node.output[0]}) takes {name!r}, which is not the {label} of the mask "
                f"{roles.mask!r}; export the model as onnxruntime-genai does"
            )


def _compute_from_mask(proto: onnx.ModelProto, name: str, roles: Roles) -> int | None:
    """Compute the scalar tensor `name` for EXAMPLE_MASK by constant folding; None where it depends on other inputs."""
    needed_names, nodes = {name}, list[onnx.NodeProto]()
    for node in reversed(proto.graph.node):
        if needed_names.intersection(node.output):
            nodes.insert(0, node)
            needed_names.update(node.input)
    if [name for name in input_values(proto) if name in needed_names] != [roles.mask]:
        return None
    constants = [tensor for tensor in proto.graph.initializer if tensor.name in needed_names]
    constants.append(numpy_helper.from_array(np.array([EXAMPLE_MASK]).astype(roles.kinds[roles.mask]), roles.mask))
    nodes.append(helper.make_node("Identity", [name], [RESULT]))  # nodes of outputs are not folded
    graph = helper.make_graph(nodes, "places", [], [onnx.ValueInfoProto(name=RESULT)], constants)
    model = ir.from_proto(helper.make_model(graph, opset_imports=proto.opset_import))
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    fold(model, keep=frozenset())
    (result_node,) = (node for node in model.graph if node.outputs[0].name == RESULT)
    index = constant(result_node.inputs[0])
    return None if index is None or index.size != 1 else int(index.item())
