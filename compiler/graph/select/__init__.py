"""Choose the operators that run on the accelerator, and their layers.

Every integer operator is tried; what stays on the CPU does so with a reason. Operators that only change the shape are
free where the accelerator's layout stays the same. A table or a residual addition joins the layer that produces its
operand, and parts of a concatenation are written where they belong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import onnx_ir as ir

from celosia.compiler.graph.constraints import UNCONSTRAINED, Constraints
from celosia.compiler.graph.custom import custom
from celosia.compiler.graph.operands import data_operands
from celosia.compiler.graph.quantized.commute import CHOOSING_OPS
from celosia.compiler.graph.select.concatenation import concat, place_parts
from celosia.compiler.graph.select.convolution import conv, conv_transpose, gemm
from celosia.compiler.graph.select.elementwise import addition, product, table_lookup
from celosia.compiler.graph.select.forms import NO_WAY, ActivationLayout, NotOffloadable, natural_form
from celosia.compiler.graph.select.matrices import block_sums, is_repeated
from celosia.compiler.graph.select.movement import depth_to_space, gather, pad, resize, space_to_depth, transpose
from celosia.compiler.graph.select.placement import LayerAssignment, Partition, Placement, out_of_reach
from celosia.compiler.graph.select.pooling import average, max_pool
from celosia.compiler.graph.select.reasons import EXPORT, TILING, is_float, why_on_cpu, with_change
from celosia.compiler.graph.select.rows import norm, softmax
from celosia.compiler.graph.select.views import SAME_BYTES, is_view, take_parts
from celosia.compiler.graph.values import attribute, is_op
from celosia.compiler.program.host.window_geometry import WindowError
from celosia.hw.spec.config import Config

__all__ = ["ActivationLayout", "LayerAssignment", "NotOffloadable", "Partition", "natural_form", "select"]

BUILDERS: dict[str, Callable[[Placement, ir.Node], None]] = {
    "QLinearConv": conv,
    "QLinearConvTranspose": conv_transpose,
    "QGemm": gemm,
    "QLinearMatMul": gemm,
    "QLinearAdd": addition,
    "QLinearMul": product,
    "QLinearGlobalAveragePool": average,
    "QLinearAveragePool": average,
    "QLinearMean": average,
    "QLinearConcat": concat,
    "Concat": concat,
    "Split": take_parts,
    "Slice": take_parts,
    "Resize": resize,
    "Upsample": resize,
    "Pad": pad,
    "DepthToSpace": depth_to_space,
    "SpaceToDepth": space_to_depth,
    "Gather": gather,
    "Transpose": transpose,
    "MaxPool": max_pool,
    "QLinearSoftmax": softmax,
    "QLinearNorm": norm,
    "Table": table_lookup,
    "Clip": table_lookup,
    "BlockSums": block_sums,
}
"""Functions that make a layer of an operator, by its name. They raise NotOffloadable where they cannot."""


def select(model: ir.Model, cfg: Config, constraints: Constraints = UNCONSTRAINED) -> Partition | Constraints:
    """Place every node of `model` under `constraints`.

    Returns further constraints where the host needs a tensor that it could not read from where layers write it.
    """
    placement = Placement(cfg, constraints.unmoved, constraints.unpadded)
    partition = _select(model, placement, constraints.on_cpu)
    unreachable, misread = out_of_reach(model.graph, partition), set(_misread(placement))
    if unreachable <= constraints.unmoved and not misread:
        return partition
    return constraints.separate(unreachable, misread)


def _misread(placement: Placement) -> Iterator[ir.Node]:
    """Padded concatenations that a CPU operator reads; they must be rebuilt without padding."""
    for value in placement.gaps:
        producer = value.producer()
        if producer is not None and any(use.node in placement.selection.cpu for use in value.uses()):
            yield producer


def _select(model: ir.Model, placement: Placement, refused: Mapping[ir.Node, str]) -> Partition:
    opset = model.graph.opset_imports.get("", 21)
    in_floats = is_float(model.graph)
    for node in model.graph:
        try:
            _place(placement, node, refused, opset, in_floats)
        except (NotOffloadable, WindowError) as reason:
            change = EXPORT if isinstance(reason, WindowError) else NO_WAY
            placement.selection.cpu[node] = with_change(str(reason), change)
    place_parts(placement)
    return placement.selection


def _place(p: Placement, node: ir.Node, refused: Mapping[ir.Node, str], opset: int, in_floats: bool) -> None:
    if is_repeated(p, node) or (is_op(node, *SAME_BYTES) and is_view(p, node)):
        return
    if (own := custom(node)) is not None:
        if node in refused:
            raise NotOffloadable(with_change(refused[node], TILING))
        own.place(p, node)
        return
    if not is_op(node, *BUILDERS):
        view = "a view on the host; it moves no bytes, and nothing needs to change"
        raise NotOffloadable(view if node.op_type in SAME_BYTES else why_on_cpu(node, opset, in_floats))
    if node in refused:
        raise NotOffloadable(with_change(refused[node], TILING))
    x = data_operands(node)[0]
    if x is None or not {x.dtype, node.outputs[0].dtype} <= {ir.DataType.INT8, ir.DataType.UINT8}:
        in_any_type = is_op(node, "Concat", "Clip", *CHOOSING_OPS)
        other = "not an 8-bit operator; quantise its operands and result to int8 or uint8"
        raise NotOffloadable(why_on_cpu(node, opset, in_floats) if in_any_type else other)
    if node.op_type != "Split" and any(list(out.uses()) or out.is_graph_output() for out in node.outputs[1:]):
        raise NotOffloadable(f"its indices output is used; {NO_WAY}")
    if attribute(node, "channels_last", 0):
        raise NotOffloadable("channels last; export it as NCHW")
    BUILDERS[node.op_type](p, node)
