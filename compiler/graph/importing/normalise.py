"""Rewrite models that onnxruntime takes and the ONNX checker refuses into valid ONNX.

y = com.microsoft.Gelu(a)            opset_import: "com.microsoft" 1
a = Neg(x)                    ->     a = Neg(x)
output y                             y = com.microsoft.Gelu(a)
                                     output y: float[]     (for the checker alone)
"""

from __future__ import annotations

from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto

from celosia.compiler.cpu.parse import dense
from celosia.compiler.expr.nodes import unused_name
from celosia.compiler.graph.external_data import make_external_constants_inputs
from celosia.compiler.graph.importing.inlining import OWN_CODE, inner_graphs, nodes
from celosia.compiler.graph.importing.validation import bad_texts, is_comment
from celosia.compiler.graph.operands import named_input
from celosia.compiler.ops import op_spec
from celosia.compiler.program.host.shape_rules import UNBOUNDED_ENDS

NEWEST = {"": onnx.defs.onnx_opset_version(), "ai.onnx.ml": 5, "com.microsoft": 1}
"""The opsets that onnxruntime takes for domains that a model uses and does not import."""
ONNXRUNTIME_OPSETS = {
    "SimplifiedLayerNormalization": range(1, 1 << 31), "LayerNormalization": range(1, 17),
    "GroupNormalization": range(18, 21),
}  # fmt: skip
"""Operators that onnxruntime defines in ONNX's own domain -> the opsets in which ONNX does not define them."""


def normalise_model(proto: ModelProto) -> ModelProto:
    """Return a copy of `proto` in which everything that onnxruntime tolerates and ONNX forbids is corrected.

    `proto` must have passed graph/importing/validation.py.
    """
    result = ModelProto()
    result.CopyFrom(proto)
    _clear_comments(result)
    _unify_domains(result)
    _import_domains(result)
    _drop_known_functions(result)
    _keep_last_constants(result.graph)
    _drop_constant_inputs(result.graph)
    _drop_redundant_declarations(result.graph)
    for value in _declarations(result.graph):
        _clear_unnamed_sizes(value)
    _bound_backward_slices(result.graph)
    _drop_negative_resize_axes(result.graph)
    _sort_nodes(result.graph)
    if result.HasField("ir_version"):
        result.ir_version = max(result.ir_version, 4)  # before 4, constants had to be inputs
    return result


def for_checker(proto: ModelProto) -> ModelProto:
    """Return a copy of `proto` for the ONNX checker: with fields that it demands, without those it would refuse.

    Nothing else needs these fields.
    """
    checked = ModelProto()
    checked.CopyFrom(proto)
    used_domains = {"", *_domains(proto)}
    used_imports = [entry for entry in proto.opset_import if entry.domain in used_domains]
    del checked.opset_import[:], checked.metadata_props[:]
    checked.opset_import.extend(used_imports)
    checked.graph.name = checked.graph.name or "graph"
    make_external_constants_inputs(checked)
    for value in (*checked.graph.input, *checked.graph.output):
        _give_type(value)
    return checked


def _give_type(value: onnx.ValueInfoProto) -> None:
    """Give an untyped value the type float, and a tensor without a shape an empty one, which the checker demands.

    Shape inference finds the true ones; only the checker sees these.
    """
    if value.type.WhichOneof("value") is None:
        value.type.tensor_type.elem_type = TensorProto.FLOAT
    if value.type.HasField("tensor_type"):
        value.type.tensor_type.shape.SetInParent()


def _clear_comments(proto: ModelProto) -> None:
    """Clear comments, and names of nodes, that are no UTF-8."""
    for message, field, _, _ in list(bad_texts(proto, "")):
        if is_comment(message, field):
            message.ClearField(field)


def _unify_domains(proto: ModelProto) -> None:
    """Give ONNX's domain one name and each domain one version, and move onnxruntime's own operators out of it.

    "ai.onnx" becomes "". Operators that onnxruntime alone defines in ONNX's domain move to "com.microsoft".
    """
    for entry in (*nodes(proto.graph), *proto.opset_import):
        if entry.domain == "ai.onnx":
            entry.domain = ""
    opsets = {entry.domain: entry for entry in proto.opset_import}
    if len(opsets) < len(proto.opset_import):  # the last one of a domain counts
        last_entries = list(opsets.values())
        del proto.opset_import[:]
        proto.opset_import.extend(last_entries)
    opset = opsets[""].version if "" in opsets else 0
    for node in nodes(proto.graph):
        if node.domain == "" and opset in ONNXRUNTIME_OPSETS.get(node.op_type, ()):
            node.domain = "com.microsoft"


def restore_onnxruntime_domains(proto: ModelProto) -> ModelProto:
    """Undo in place, for onnxruntime, the move of its operators from ONNX's domain to "com.microsoft"."""
    for node in nodes(proto.graph):
        if node.domain == "com.microsoft" and node.op_type in ONNXRUNTIME_OPSETS:
            node.domain = ""
    return proto


def _domains(proto: ModelProto) -> set[str]:
    """Return the domains of all operators, also those inside functions."""
    return {node.domain for node in (*nodes(proto.graph), *(n for f in proto.functions for n in f.node))}


def _import_domains(proto: ModelProto) -> None:
    """Import the newest opset of each domain that nodes use and the model does not import, as onnxruntime does."""
    if not proto.opset_import:
        return  # onnxruntime refuses such a model
    missing = _domains(proto) - {entry.domain for entry in proto.opset_import}
    proto.opset_import.extend(onnx.helper.make_opsetid(name, NEWEST[name]) for name in sorted(missing & {*NEWEST}))


def _drop_known_functions(proto: ModelProto) -> None:
    """Drop functions for operators that ONNX or this compiler defines: onnxruntime does not call them."""
    called = [
        function for function in proto.functions
        if (function.domain, function.name) not in OWN_CODE
        and not (function.domain == "" and onnx.defs.has(function.name))
    ]  # fmt: skip
    if len(called) < len(proto.functions):
        del proto.functions[:]
        proto.functions.extend(called)


def _keep_last_constants(graph: GraphProto) -> None:
    """Keep the last of several constants with one name, and make sparse constants dense.

    Constants without a name go: nothing can read them.
    """
    constants = {tensor.name: tensor for tensor in graph.initializer if tensor.name}
    for tensor in graph.sparse_initializer:
        constants[tensor.values.name] = onnx.numpy_helper.from_array(dense(tensor), tensor.values.name)
    if len(constants) < len(graph.initializer) or graph.sparse_initializer:
        remaining = list(constants.values())
        del graph.initializer[:], graph.sparse_initializer[:]
        graph.initializer.extend(remaining)


def _drop_constant_inputs(graph: GraphProto) -> None:
    """Drop inputs that are constants, as models before IR version 4 list them: the constant gives type and shape."""
    constants = {tensor.name for tensor in graph.initializer}
    inputs = [value for value in graph.input if value.name not in constants]
    if len(inputs) < len(graph.input):
        del graph.input[:]
        graph.input.extend(inputs)


def _drop_redundant_declarations(graph: GraphProto) -> None:
    """Drop value_info of constants, inputs and outputs, and all but the first of each tensor."""
    declared_elsewhere = {declared.name for declared in (*graph.initializer, *graph.input, *graph.output)}
    first: dict[str, onnx.ValueInfoProto] = {}
    for value in graph.value_info:
        if value.name and value.name not in declared_elsewhere:
            first.setdefault(value.name, value)
    if len(first) < len(graph.value_info):
        remaining = list(first.values())
        del graph.value_info[:]
        graph.value_info.extend(remaining)


def _declarations(graph: GraphProto) -> Iterator[onnx.ValueInfoProto]:
    """Yield all declarations of types and shapes in `graph` and the graphs inside it."""
    yield from (*graph.input, *graph.output, *graph.value_info)
    for node in graph.node:
        for subgraph in inner_graphs(node):
            yield from _declarations(subgraph)


PLACEHOLDERS = ("?", "*", "-1", "None", "Any", "unknown")
"""Names that exporters write for a size without a name: two sizes of such a name are not equal."""


def size_name(dim: onnx.TensorShapeProto.Dimension) -> str | None:
    """Return the name of an open size, "" if it has none; None for a number. A negative number is an open size."""
    if dim.HasField("dim_value") and dim.dim_value >= 0:
        return None
    return "" if dim.dim_param in PLACEHOLDERS else dim.dim_param


def _clear_unnamed_sizes(value: onnx.ValueInfoProto) -> None:
    """Clear the sizes of a declaration that are open and have no name, or a placeholder for one."""
    for dim in value.type.tensor_type.shape.dim if value.type.HasField("tensor_type") else ():
        if size_name(dim) == "":
            dim.Clear()


def without_declared_shapes(proto: ModelProto) -> ModelProto:
    """Return a copy of `proto` that declares only the shapes of its inputs, so that all others are inferred."""
    result = ModelProto()
    result.CopyFrom(proto)
    inputs = {value.name for value in result.graph.input}
    del result.graph.value_info[:]
    for value in _declarations(result.graph):
        if value.name not in inputs and value.type.HasField("tensor_type"):
            value.type.tensor_type.ClearField("shape")
    return result


def _bound_backward_slices(graph: GraphProto) -> None:
    """Rewrite ends of backward Slices: onnxruntime reads the largest number as "through the first element".

    ONNX writes this as the least number.
    """
    constants = {tensor.name: tensor for tensor in graph.initializer if tensor.data_location != TensorProto.EXTERNAL}
    used_names = {
        *constants,
        *(value.name for value in graph.input),
        *(name for node in graph.node for name in node.output),
    }
    for node in graph.node:
        if node.op_type != "Slice":
            continue
        constant_lists = [constants.get(named_input(node, name)) for name in ("ends", "steps")]
        if any(tensor is None or len(tensor.dims) != 1 for tensor in constant_lists):
            continue
        ends, steps = (onnx.numpy_helper.to_array(tensor) for tensor in constant_lists if tensor is not None)
        if ends.shape != steps.shape or ends.dtype.kind != "i":
            continue
        is_unbounded = (steps < 0) & np.isin(ends, UNBOUNDED_ENDS)
        if not np.any(is_unbounded):
            continue
        name = node.input[op_spec("Slice").number("ends")] = unused_name(f"{node.output[0]}.ends", used_names)
        least = np.where(is_unbounded, np.iinfo(ends.dtype).min, ends).astype(ends.dtype)
        graph.initializer.append(onnx.numpy_helper.from_array(least, name))


def _drop_negative_resize_axes(graph: GraphProto) -> None:
    """Remove negative axes from each Resize with an aspect ratio policy: onnxruntime does not resize them.

    If no axis is left, the Resize becomes an Identity.
    """
    for number, node in reversed([*enumerate(graph.node)]):
        for subgraph in inner_graphs(node):
            _drop_negative_resize_axes(subgraph)
        attrs = {attr.name: attr for attr in node.attribute}
        axes, policy = attrs.get("axes"), attrs.get("keep_aspect_ratio_policy")
        if node.op_type != "Resize" or node.domain or not (axes and policy):
            continue
        if not (all_sizes := named_input(node, "sizes")):
            continue
        positions = [position for position, axis in enumerate(axes.ints) if axis >= 0]
        if policy.s not in (b"not_larger", b"not_smaller") or len(positions) == len(axes.ints):
            continue
        if not positions:
            node.op_type = "Identity"
            del node.input[1:], node.attribute[:]
            continue
        mode = attrs.get("coordinate_transformation_mode")
        if mode is not None and mode.s == b"tf_crop_and_resize":  # this mode reads a region of all axes
            continue
        used_names = {name for other in graph.node for name in (*other.input, *other.output)}
        used_names |= {other.name for other in (*graph.initializer, *graph.input)}
        positions_name, sizes = (
            unused_name(f"{node.output[0]}.{suffix}", used_names) for suffix in ("places", "sizes")
        )
        graph.initializer.append(onnx.numpy_helper.from_array(np.array(positions), positions_name))
        graph.node.insert(number, onnx.helper.make_node("Gather", [all_sizes, positions_name], [sizes]))
        node.input[1:4] = ["", "", sizes]
        axes.ints[:] = [axes.ints[position] for position in positions]


def _sort_nodes(graph: GraphProto) -> None:
    """Put each node behind those whose outputs it reads; leave the order of a sorted or cyclic graph as it is."""
    producer_number = {name: number for number, node in enumerate(graph.node) for name in node.output if name}
    sources = {
        n: {producer_number[name] for name in _names_read_by(node) if name in producer_number}
        for n, node in enumerate(graph.node)
    }
    if all(source < number for number, numbers in sources.items() for source in numbers):
        return
    try:
        order = list(TopologicalSorter(sources).static_order())
    except CycleError:
        return
    ordered = [graph.node[number] for number in order]
    del graph.node[:]
    graph.node.extend(ordered)


def _names_read_by(node: NodeProto) -> Iterator[str]:
    """Yield the names that `node` and the graphs inside it read: the nodes that make these come before it."""
    yield from node.input
    for subgraph in inner_graphs(node):
        for inner_node in nodes(subgraph):
            yield from inner_node.input
