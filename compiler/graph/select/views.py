"""Operators that only change the shape."""

from __future__ import annotations

import onnx_ir as ir

from celosia.compiler.cpu.ops import VIEWS
from celosia.compiler.graph.select.forms import OnCpu, natural_form
from celosia.compiler.graph.select.parameters import flattens, has_fixed_matrix
from celosia.compiler.graph.select.placement import Placement
from celosia.compiler.graph.values import is_op

SAME_BYTES = tuple(sorted(VIEWS - {"Dropout"}))
"""Those that are free where the accelerator's layout stays the same."""


def is_view(p: Placement, node: ir.Node) -> bool:
    """Whether the output of `node` is the same activation as its input."""
    x, y = node.inputs[0], node.outputs[0]
    if x is None or y.is_graph_output():
        return False
    held = p.held(x)
    if held is None:
        return False
    try:
        form = natural_form(y)
    except OnCpu:
        form = natural_form(y, rows=True)
    if held != form:
        if folds_into_gemm(p, node):
            p.selection.views[node] = "part of the matrix multiplications that read it"
            return True
        return False
    p.alias[y] = p.source(x)
    p.selection.forms[y] = form
    p.selection.views[node] = "free: the same bytes"
    return True


def folds_into_gemm(p: Placement, node: ir.Node) -> bool:
    """Flatten of an image whose every user is a matrix multiplication: it becomes a convolution of all pixels."""
    users = [use.node for use in node.outputs[0].uses()]
    return flattens(node) and bool(users) and all(
        is_op(user, "QGemm", "QLinearMatMul") and user.inputs[0] is node.outputs[0] and has_fixed_matrix(user)
        for user in users
    )  # fmt: skip
