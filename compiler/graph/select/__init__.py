"""Choose the operators that run on the accelerator, and make their layers.

`select` visits the nodes in order and tries to make layers of every integer operator. An operator that stays on the CPU
does so with a reason. A function that makes layers is called `place_...`; it raises NotOffloadable with that reason.
LAYER_BUILDERS, below, says which operators have such a function.

placement        the state of the placement: layers so far, and in which form each tensor lies where; the error
                 NotOffloadable; Constraints on the next attempt
parameters       which scales, zero points, weights and windows of a node the accelerator can take
convolution      layers of convolutions, and of products by constant matrices, also as sums of blocks; when the host
                 folds windows into the channels of a first layer (im2col); which convolutions are depthwise:
                 `Layer.is_depthwise` in compiler/layer, with sizes in tensorize/roofline and space
matrices         tensors of several matrices, such as heads, and layers of products of two activations
reductions       layers of poolings, softmax and normalisations; which poolings become depthwise convolutions
elementwise      layers of additions, products and tables of bytes; when one of these is fused into the layer before it;
                 with which scales a residual is added (integers for them: numerics/binary).
                 Activation functions are tables by then (which functions: graph/quantized/tables, which derives them
                 from ops/elementwise; of which patterns: graph/quantized/integerise)
views            chains of Reshape and Transpose that cost nothing, as each element lies where its reader takes it
movement         operators that only move elements (Reshape, Transpose, Split, Slice, Resize, Gather, Pad, ...): which
                 cost nothing, and the copies of the others
concatenation    layers of Concat and QLinearConcat, along which axes: parts are written where they belong in the
                 result; appending to caches
reasons          why a float operator stays on the CPU, and what the user can do about it (an integer operator:
                 `NotOffloadable`, where it is raised)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import onnx_ir as ir

from celosia.compiler.graph.operands import custom, data_operands
from celosia.compiler.graph.quantized.commute import CHOOSING_OPS
from celosia.compiler.graph.select.concatenation import place_concat, resolve_regions
from celosia.compiler.graph.select.convolution import place_block_sums, place_conv, place_matmul, place_transposed_conv
from celosia.compiler.graph.select.elementwise import place_addition, place_multiplication, place_table
from celosia.compiler.graph.select.matrices import skip_repeat
from celosia.compiler.graph.select.movement import (
    SAME_BYTES,
    place_depth_to_space,
    place_gather,
    place_pad,
    place_resize,
    place_split_or_slice,
    place_transpose,
    take_as_view,
)
from celosia.compiler.graph.select.placement import (
    NO_WAY,
    UNCONSTRAINED,
    ActivationLayout,
    Constraints,
    LayerAssignment,
    NotOffloadable,
    Partition,
    Placement,
    natural_form,
    unreachable_tensors,
)
from celosia.compiler.graph.select.reasons import EXPORT, TILING, is_float, why_on_cpu, with_change
from celosia.compiler.graph.select.reductions import place_average, place_max_pool, place_norm, place_softmax
from celosia.compiler.graph.select.views import take_as_moved_view
from celosia.compiler.graph.values import attribute, is_op
from celosia.compiler.program.host.shape_rules import WindowError
from celosia.hw.spec.config import Config

__all__ = ["ActivationLayout", "LayerAssignment", "NotOffloadable", "Partition", "natural_form", "select"]

LAYER_BUILDERS: dict[str, Callable[[Placement, ir.Node], None]] = {
    "QLinearConv": place_conv,
    "QLinearConvTranspose": place_transposed_conv,
    "QGemm": place_matmul,
    "QLinearMatMul": place_matmul,
    "QLinearAdd": place_addition,
    "QLinearMul": place_multiplication,
    "QLinearGlobalAveragePool": place_average,
    "QLinearAveragePool": place_average,
    "QLinearMean": place_average,
    "QLinearConcat": place_concat,
    "Concat": place_concat,
    "Split": place_split_or_slice,
    "Slice": place_split_or_slice,
    "Resize": place_resize,
    "Upsample": place_resize,
    "Pad": place_pad,
    "DepthToSpace": place_depth_to_space,
    "SpaceToDepth": place_depth_to_space,
    "Gather": place_gather,
    "Transpose": place_transpose,
    "MaxPool": place_max_pool,
    "QLinearSoftmax": place_softmax,
    "QLinearNorm": place_norm,
    "Table": place_table,
    "Clip": place_table,
    "BlockSums": place_block_sums,
}
"""Operator's name -> function that makes its layers. It raises NotOffloadable where the accelerator cannot run it."""


def select(model: ir.Model, cfg: Config, constraints: Constraints = UNCONSTRAINED) -> Partition | Constraints:
    """Place every node of `model` on the accelerator or on the CPU, under `constraints`.

    Returns further constraints if the host needs a tensor that layers would write where the host cannot read it; the
    caller then tries again with these (compiler/lowering.py).
    """
    placement = Placement(cfg, constraints.unmoved, constraints.unpadded)
    partition = _place_nodes(model, placement, constraints.on_cpu)
    unreachable, misread = unreachable_tensors(model.graph, partition), set(_misread_concatenations(placement))
    if unreachable <= constraints.unmoved and not misread:
        return partition
    return constraints.separate(unreachable, misread)


def _misread_concatenations(placement: Placement) -> Iterator[ir.Node]:
    """Yield the padded concatenations that a CPU operator reads; the next attempt builds them without padding."""
    for value in placement.channel_positions:
        producer = value.producer()
        if producer is not None and any(use.node in placement.selection.cpu for use in value.uses()):
            yield producer


def _place_nodes(model: ir.Model, placement: Placement, refused: Mapping[ir.Node, str]) -> Partition:
    """Place every node once, in the order of the graph. refused: nodes that must stay on the CPU, with the reason."""
    opset = model.graph.opset_imports.get("", 21)
    in_floats = is_float(model.graph)
    for node in model.graph:
        try:
            _place_node(placement, node, refused, opset, in_floats)
        except (NotOffloadable, WindowError) as reason:
            change = EXPORT if isinstance(reason, WindowError) else NO_WAY
            placement.selection.cpu[node] = with_change(str(reason), change)
    resolve_regions(placement)
    return placement.selection


def _place_node(p: Placement, node: ir.Node, refused: Mapping[ir.Node, str], opset: int, in_floats: bool) -> None:
    """Make `node` a view, a user's own operator, or layers. Raises NotOffloadable with the reason where none is
    possible.

    opset, in_floats: the opset of the model, and whether it has no quantised tensor; both change the reason's text.
    """
    if skip_repeat(p, node) or (is_op(node, *SAME_BYTES) and (take_as_view(p, node) or take_as_moved_view(p, node))):
        return
    if (custom_op := custom(node)) is not None:
        if node in refused:
            raise NotOffloadable(with_change(refused[node], TILING))
        custom_op.place(p, node)
        return
    if not is_op(node, *LAYER_BUILDERS):
        view = "a view on the host; it moves no bytes, and nothing needs to change"
        raise NotOffloadable(view if node.op_type in SAME_BYTES else why_on_cpu(node, opset, in_floats))
    if node in refused:
        raise NotOffloadable(with_change(refused[node], TILING))
    x = data_operands(node)[0]
    if x is None or not {x.dtype, node.outputs[0].dtype} <= {ir.DataType.INT8, ir.DataType.UINT8}:
        in_any_type = is_op(node, "Concat", "Clip", *CHOOSING_OPS)
        not_bytes = "not an 8-bit operator; quantise its operands and result to int8 or uint8"
        raise NotOffloadable(why_on_cpu(node, opset, in_floats) if in_any_type else not_bytes)
    if node.op_type != "Split" and any(list(out.uses()) or out.is_graph_output() for out in node.outputs[1:]):
        raise NotOffloadable(f"its indices output is used; {NO_WAY}")
    if attribute(node, "channels_last", 0):
        raise NotOffloadable("channels last; export it as NCHW")
    LAYER_BUILDERS[node.op_type](p, node)
