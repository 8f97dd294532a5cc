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
from celosia.compiler.expr.unique_names import unused_name
from celosia.compiler.graph.importing.external_data import without_files
from celosia.compiler.graph.importing.functions import OWN_CODE, nodes, subgraphs
from celosia.compiler.graph.importing.validation import bad_texts, is_comment
from celosia.compiler.graph.operands import named_input
from celosia.compiler.ops import op_spec
from celosia.compiler.program.host.shape_rules import UNBOUNDED_ENDS

NEWEST = {"": onnx.defs.onnx_opset_version(), "ai.onnx.ml": 5, "com.microsoft": 1}
"""The opsets that onnxruntime takes for domains that a model uses and does not import."""


OF_ONNXRUNTIME = {
    "SimplifiedLayerNormalization": range(1, 1 << 31), "LayerNormalization": range(1, 17),
    "GroupNormalization": range(18, 21),
}  # fmt: skip
"""Operators that onnxruntime has in ONNX's own domain, and opsets in which ONNX has not, or no longer."""


def normalise_model(proto: ModelProto) -> ModelProto:
    """Return a copy of `proto` in which what onnxruntime forgives is put right.

    `proto` must be sound; see graph/importing/validation.py.
    """
    result = ModelProto()
    result.CopyFrom(proto)
    _clear_comments(result)
    _name_domains(result)
    _import_domains(result)
    _drop_known_functions(result)
    _keep_last_constants(result.graph)
    _drop_constant_inputs(result.graph)
    _drop_idle_declarations(result.graph)
    for value in _declarations(result.graph):
        _open_sizes(value)
    _end_backward_slices(result.graph)
    _keep_sizes(result.graph)
    _sort(result.graph)
    if result.HasField("ir_version"):
        result.ir_version = max(result.ir_version, 4)  # before 4, constants had to be inputs
    return result


def for_checker(proto: ModelProto) -> ModelProto:
    """`proto` as the ONNX checker can judge it: with what it asks for and nothing needs."""
    checked = ModelProto()
    checked.CopyFrom(proto)
    used = {"", *_domains(proto)}
    kept = [entry for entry in proto.opset_import if entry.domain in used]
    del checked.opset_import[:], checked.metadata_props[:]
    checked.opset_import.extend(kept)
    checked.graph.name = checked.graph.name or "graph"
    without_files(checked)
    for value in (*checked.graph.input, *checked.graph.output):
        _give_type(value)
    return checked


def _give_type(value: onnx.ValueInfoProto) -> None:
    """A type for what has none, and a shape for tensors without: shape inference finds out what they are."""
    if value.type.WhichOneof("value") is None:
        value.type.tensor_type.elem_type = TensorProto.FLOAT
    if value.type.HasField("tensor_type"):
        value.type.tensor_type.shape.SetInParent()


def _clear_comments(proto: ModelProto) -> None:
    """Without comments, and names of nodes, that are no UTF-8."""
    for message, field, _, _ in list(bad_texts(proto, "")):
        if is_comment(message, field):
            message.ClearField(field)


def _name_domains(proto: ModelProto) -> None:
    """Without "ai.onnx", the other name of ONNX's own domain "", and with one version of each domain. What onnxruntime
    has there of its own is its own."""
    for entry in (*nodes(proto.graph), *proto.opset_import):
        if entry.domain == "ai.onnx":
            entry.domain = ""
    opsets = {entry.domain: entry for entry in proto.opset_import}
    if len(opsets) < len(proto.opset_import):  # the last one of a domain counts
        kept = list(opsets.values())
        del proto.opset_import[:]
        proto.opset_import.extend(kept)
    opset = opsets[""].version if "" in opsets else 0
    for node in nodes(proto.graph):
        if node.domain == "" and opset in OF_ONNXRUNTIME.get(node.op_type, ()):
            node.domain = "com.microsoft"


def as_onnxruntime_has_it(proto: ModelProto) -> ModelProto:
    """`proto`, as `normalise_model` leaves it, for onnxruntime, which has OF_ONNXRUNTIME in ONNX's domain.

    It is changed."""
    for node in nodes(proto.graph):
        if node.domain == "com.microsoft" and node.op_type in OF_ONNXRUNTIME:
            node.domain = ""
    return proto


def _domains(proto: ModelProto) -> set[str]:
    """Domains of all operators, those inside functions too."""
    return {node.domain for node in (*nodes(proto.graph), *(n for f in proto.functions for n in f.node))}


def _import_domains(proto: ModelProto) -> None:
    if not proto.opset_import:
        return  # which onnxruntime refuses
    missing = _domains(proto) - {entry.domain for entry in proto.opset_import}
    proto.opset_import.extend(onnx.helper.make_opsetid(name, NEWEST[name]) for name in sorted(missing & {*NEWEST}))


def _drop_known_functions(proto: ModelProto) -> None:
    """Functions for operators that there are anyway go: onnxruntime does not call them."""
    kept = [each for each in proto.functions if not _is_known(each.domain, each.name)]
    if len(kept) < len(proto.functions):
        del proto.functions[:]
        proto.functions.extend(kept)


def _is_known(domain: str, op: str) -> bool:
    return (domain, op) in OWN_CODE or (domain == "" and onnx.defs.has(op))


def _keep_last_constants(graph: GraphProto) -> None:
    """Keep the last of several constants with one name; what has no name cannot be read."""
    constants = {tensor.name: tensor for tensor in graph.initializer if tensor.name}
    constants |= {tensor.values.name: _dense(tensor) for tensor in graph.sparse_initializer}
    if len(constants) < len(graph.initializer) or graph.sparse_initializer:
        kept = list(constants.values())
        del graph.initializer[:], graph.sparse_initializer[:]
        graph.initializer.extend(kept)


def _dense(tensor: onnx.SparseTensorProto) -> TensorProto:
    return onnx.numpy_helper.from_array(dense(tensor), tensor.values.name)


def _drop_constant_inputs(graph: GraphProto) -> None:
    """Inputs that are constants, as old models list them, go: the constant says what it is."""
    constants = {tensor.name for tensor in graph.initializer}
    kept = [value for value in graph.input if value.name not in constants]
    if len(kept) < len(graph.input):
        del graph.input[:]
        graph.input.extend(kept)


def _drop_idle_declarations(graph: GraphProto) -> None:
    """Drop value_info of constants, inputs and outputs, and all but the first of a tensor."""
    declared = {each.name for each in (*graph.initializer, *graph.input, *graph.output)}
    first: dict[str, onnx.ValueInfoProto] = {}
    for value in graph.value_info:
        if value.name and value.name not in declared:
            first.setdefault(value.name, value)
    if len(first) < len(graph.value_info):
        kept = list(first.values())
        del graph.value_info[:]
        graph.value_info.extend(kept)


def _declarations(graph: GraphProto) -> Iterator[onnx.ValueInfoProto]:
    """Return what `graph`, and the graphs inside it, declare of tensors."""
    yield from (*graph.input, *graph.output, *graph.value_info)
    for node in graph.node:
        for inner in subgraphs(node):
            yield from _declarations(inner)


PLACEHOLDERS = ("?", "*", "-1", "None", "Any", "unknown")
"""What exporters write for a size that has no name: two of them are not equal."""


def size_name(dim: onnx.TensorShapeProto.Dimension) -> str | None:
    """Return the name of an open size, "" without a name; None for a number. A number below 0 is an open size, too."""
    if dim.HasField("dim_value") and dim.dim_value >= 0:
        return None
    return "" if dim.dim_param in PLACEHOLDERS else dim.dim_param


def _open_sizes(value: onnx.ValueInfoProto) -> None:
    for dim in value.type.tensor_type.shape.dim if value.type.HasField("tensor_type") else ():
        if size_name(dim) == "":
            dim.Clear()


def undeclared(proto: ModelProto) -> ModelProto:
    """A copy of `proto` that declares the shapes of its inputs alone: all others are those that operators make."""
    result = ModelProto()
    result.CopyFrom(proto)
    given = {value.name for value in result.graph.input}
    del result.graph.value_info[:]
    for value in _declarations(result.graph):
        if value.name not in given and value.type.HasField("tensor_type"):
            value.type.tensor_type.ClearField("shape")
    return result


def _end_backward_slices(graph: GraphProto) -> None:
    """A Slice backwards to the largest number goes through the first element, which ONNX writes as the least number."""
    constants = {tensor.name: tensor for tensor in graph.initializer if tensor.data_location != TensorProto.EXTERNAL}
    taken = {*constants, *(value.name for value in graph.input), *(name for node in graph.node for name in node.output)}
    for node in graph.node:
        if node.op_type != "Slice":
            continue
        given = [constants.get(named_input(node, name)) for name in ("ends", "steps")]
        if any(tensor is None or len(tensor.dims) != 1 for tensor in given):
            continue
        ends, steps = (onnx.numpy_helper.to_array(tensor) for tensor in given if tensor is not None)
        if ends.shape != steps.shape or ends.dtype.kind != "i":
            continue
        beyond = (steps < 0) & np.isin(ends, UNBOUNDED_ENDS)
        if not np.any(beyond):
            continue
        name = node.input[op_spec("Slice").number("ends")] = unused_name(f"{node.output[0]}.ends", taken)
        least = np.where(beyond, np.iinfo(ends.dtype).min, ends).astype(ends.dtype)
        graph.initializer.append(onnx.numpy_helper.from_array(least, name))


def _keep_sizes(graph: GraphProto) -> None:
    """A Resize with a policy of aspect ratios does not see axes counted from behind: these keep their sizes."""
    for number, node in reversed([*enumerate(graph.node)]):
        for inner in subgraphs(node):
            _keep_sizes(inner)
        attrs = {attr.name: attr for attr in node.attribute}
        axes, policy = attrs.get("axes"), attrs.get("keep_aspect_ratio_policy")
        if node.op_type != "Resize" or node.domain or not (axes and policy):
            continue
        if not (wanted := named_input(node, "sizes")):
            continue
        kept = [place for place, axis in enumerate(axes.ints) if axis >= 0]
        if policy.s not in (b"not_larger", b"not_smaller") or len(kept) == len(axes.ints):
            continue
        if not kept:
            node.op_type = "Identity"
            del node.input[1:], node.attribute[:]
            continue
        mode = attrs.get("coordinate_transformation_mode")
        if mode is not None and mode.s == b"tf_crop_and_resize":  # which reads a region of all axes
            continue
        taken = {name for each in graph.node for name in (*each.input, *each.output)}
        taken |= {each.name for each in (*graph.initializer, *graph.input)}
        places, sizes = (unused_name(f"{node.output[0]}.{what}", taken) for what in ("places", "sizes"))
        graph.initializer.append(onnx.numpy_helper.from_array(np.array(kept), places))
        graph.node.insert(number, onnx.helper.make_node("Gather", [wanted, places], [sizes]))
        node.input[1:4] = ["", "", sizes]
        axes.ints[:] = [axes.ints[place] for place in kept]


def _sort(graph: GraphProto) -> None:
    """Each node after those whose outputs it reads; as it is where that is so, or cannot be."""
    maker = {name: number for number, node in enumerate(graph.node) for name in node.output if name}
    sources = {n: {maker[name] for name in _read(node) if name in maker} for n, node in enumerate(graph.node)}
    if all(source < number for number, found in sources.items() for source in found):
        return
    try:
        order = list(TopologicalSorter(sources).static_order())
    except CycleError:
        return
    ordered = [graph.node[number] for number in order]
    del graph.node[:]
    graph.node.extend(ordered)


def _read(node: NodeProto) -> Iterator[str]:
    """Names that `node` and the graphs inside it read."""
    yield from node.input
    for graph in subgraphs(node):
        for inner in nodes(graph):
            yield from inner.input
