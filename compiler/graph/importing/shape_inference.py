"""Infer shapes and types with onnx, and correct what onnx infers otherwise than onnxruntime computes.

1. `with_inferred_shapes` infers those of a model, with stand-ins for onnxruntime's operators.
2. `infer_with_onnx` runs onnx's inference where it is safe.
3. `corrected_window_shapes` gives the windows that onnx infers otherwise than onnxruntime.
4. `fixed_ranges` finds ranges of a fixed length whose ends are open, as positions behind a cache of any length. Sizes
   are linear forms of open sizes; a length is fixed where they cancel in limit - start:

       past = Shape(keys)[2]; total = Add(past, 1)
       positions = Range(past, total, 1)             ->    positions: int64[1]

"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Mapping
from math import prod
from typing import Any

import numpy as np
import onnx
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper

from celosia.compiler.cpu.parse import to_array
from celosia.compiler.graph.operands import joins_parts, named_input
from celosia.compiler.ops import op_spec
from celosia.compiler.program.host.shape_rules import WindowError, transposed_windows, windows


def with_inferred_shapes(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return `proto` with the shapes and types of its inner values, as far as they can be inferred.

    The model's own declarations of inner values count only where nothing can be inferred: they may be wrong.

    Where onnx infers other windows than onnxruntime computes, the corrected values become inputs and inference starts
    again, so that all shapes that depend on them are corrected, too.
    """
    inferable = onnx.ModelProto()
    inferable.CopyFrom(proto)
    _clear_matrices(inferable.graph)
    empty_lists = {tensor.name for tensor in inferable.graph.initializer if list(tensor.dims) == [0]}
    for node in inferable.graph.node:
        if node.op_type == "Squeeze" and empty_lists.intersection(node.input[1:]):
            del node.input[1:]  # onnxruntime takes an empty list of axes as all axes of size 1
        if (
            node.domain in ("com.microsoft", "ai.onnx.ml")
            and op_spec(node.op_type).shape_like
            and not _has_own_shape_rule(node)
        ):
            _replace_by_onnx_operator(node)
    overruled: dict[str, onnx.ValueInfoProto] = {}
    inferred = _infer_values(inferable, proto)
    while corrected := corrected_window_shapes(inferable.graph, inferred):  # what follows from them is inferred again
        overruled |= corrected
        remaining = [node for node in inferable.graph.node if node.output[0] not in corrected]
        del inferable.graph.node[:]
        inferable.graph.node.extend(remaining)
        inferable.graph.input.extend(corrected.values())
        inferred = _infer_values(inferable, proto)
    inferable.CopyFrom(proto)
    del inferable.graph.value_info[:], inferable.graph.output[:]
    outputs = {value.name for value in inferred.output}
    inferable.graph.value_info.extend(inferred.value_info)
    inferable.graph.value_info.extend(value for name, value in overruled.items() if name not in outputs)
    inferable.graph.output.extend(overruled.get(value.name, value) for value in inferred.output)
    return inferable


def _clear_matrices(graph: onnx.GraphProto) -> None:
    """Clear the values of constants on which no shape depends, so that onnx does not copy them to infer shapes."""
    for tensor in graph.initializer:
        if len(tensor.dims) > 1 and prod(tensor.dims) > MAX_LIST_ELEMENTS:
            for name in ("raw_data", "float_data", "double_data", "int32_data", "int64_data", "uint64_data"):
                tensor.ClearField(name)


def _has_own_shape_rule(node: onnx.NodeProto) -> bool:
    """Return whether an operator of onnxruntime needs its tensor expression for its shape and type.

    So it is where its result is float (no output scale) or its channels come last: ONNX's operator would give others.
    """
    scale = op_spec(node.op_type).scale_input
    floats = scale is not None and not any(node.input[scale : scale + 1])
    return floats or any(attr.name == "channels_last" and attr.i for attr in node.attribute)


def _replace_by_onnx_operator(node: onnx.NodeProto) -> None:
    """Turn an operator, in place, into the operator of ONNX whose result has the same shape and type.

    Only for shape inference: onnx has no rule for onnxruntime's operators, and few for those of ai.onnx.ml. A Cast is
    one to float32.
    """
    spec, names = op_spec(node.op_type), list(node.input)
    op = spec.shape_like
    data = spec.data_among(len(names)) if spec.operands else [0]
    inputs = names if op == node.op_type else [names[number] for number in data]
    attrs = [attr for attr in node.attribute if attr.name not in ("channels_last", "opset") and op != "Identity"]
    attrs = [helper.make_attribute("to", TensorProto.FLOAT)] if op == "Cast" else attrs
    node.op_type, node.domain = op, ""
    del node.input[:], node.attribute[:]
    node.input.extend(inputs)
    node.attribute.extend(attrs)


def _infer_values(inferable: onnx.ModelProto, proto: onnx.ModelProto) -> onnx.GraphProto:
    """Return the graph of `inferable`, which is `proto` with stand-in operators, with the types that onnx infers.

    Inference runs twice: without the model's declarations, then with those of tensors that the first run left open.
    """
    declared = {value.name: value for value in (*proto.graph.value_info, *proto.graph.output)}
    outputs = [value.name for value in proto.graph.output]
    inputs = {value.name: value for value in inferable.graph.input}
    complete: dict[str, onnx.ValueInfoProto] = {}
    for declarations in ({}, declared):
        del inferable.graph.value_info[:], inferable.graph.output[:]
        varying = _data_dependent_tensors(proto.graph, complete)
        chosen = {name: value for name, value in declarations.items() if name not in varying} | complete | inputs
        inferable.graph.value_info.extend(value for name, value in chosen.items() if name not in {*outputs, *inputs})
        inferable.graph.output.extend(chosen.get(name, onnx.ValueInfoProto(name=name)) for name in outputs)
        shaped = infer_with_onnx(inferable).graph
        complete = {value.name: value for value in (*shaped.value_info, *shaped.output) if _is_complete(value.type)}
        complete = fixed_ranges(shaped) | complete
    return shaped


DATA_DEPENDENT_OPS = frozenset(("Compress", "If", "NonMaxSuppression", "NonZero", "Unique"))
"""Operators whose result sizes depend on data: sizes that a model declares for them were those of one input."""


def _data_dependent_tensors(graph: onnx.GraphProto, known: Container[str]) -> set[str]:
    """Return the tensors whose sizes depend on data, except those whose shape is `known`."""
    varying: set[str] = set()
    for node in graph.node:
        if node.op_type in DATA_DEPENDENT_OPS or varying.intersection(node.input):
            varying.update(name for name in node.output if name not in known)
    return varying


def _is_complete(kind: onnx.TypeProto) -> bool:
    """Return whether `kind` is a tensor type whose element type and sizes are all known."""
    tensor = kind.tensor_type
    known = tensor.elem_type != onnx.TensorProto.UNDEFINED and tensor.HasField("shape")
    return known and all(dim.HasField("dim_value") for dim in tensor.shape.dim)


def infer_with_onnx(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return `proto` with the shapes that onnx infers.

    onnx also computes lists of sizes ("data propagation"), unless a Slice may have steps beyond MAX_SLICE_STEP.
    """
    graphs = [proto.graph, *_inner_graphs(proto.graph)]
    nodes = [node for graph in graphs for node in graph.node]
    tensors = [tensor for graph in graphs for tensor in graph.initializer]
    slices = (node for node in nodes if node.op_type == "Slice")
    steps = [name for node in slices if (name := named_input(node, "steps"))]
    result: onnx.ModelProto = onnx.shape_inference.infer_shapes(
        proto, data_prop=_are_small_constants(steps, nodes, tensors)
    )
    return result


MAX_SLICE_STEP = 1 << 30
"""Largest step of a Slice for onnx, whose counter has 32 bits: beyond, it reads outside of a list or never ends."""
SIZE_MOVING_OPS = frozenset(("Identity", "Cast", "Concat", "Gather", "Reshape", "Squeeze", "Unsqueeze"))
"""Operators on lists of sizes whose results contain no larger number than their operands."""


def _are_small_constants(names: list[str], nodes: list[NodeProto], tensors: list[TensorProto]) -> bool:
    """Return whether the tensors of these `names` are constants with no number beyond MAX_SLICE_STEP.

    Inputs of the model count as small: onnx does not know their values either.
    """
    if not names:
        return True
    producers = {name: node for node in nodes for name in node.output}
    constants = {tensor.name: tensor for tensor in tensors}
    if len(producers) < sum(len(node.output) for node in nodes) or len(constants) < len(tensors):
        return False  # several graphs share a name, and any of its values may be meant
    waiting, seen = list(names), set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        node = producers.get(name)
        if name in constants:
            tensor = constants[name]
            if tensor.data_location == TensorProto.EXTERNAL or not _is_small(numpy_helper.to_array(tensor)):
                return False
        elif node is not None and node.op_type == "Constant":
            if not all(_is_small(_value(attr)) for attr in node.attribute):
                return False
        elif node is not None and node.op_type in SIZE_MOVING_OPS:
            waiting += [operand for operand in node.input if operand]
        elif node is not None:
            return False
    return True


def _value(attr: onnx.AttributeProto) -> object:
    """Return the Python value of an attribute, tensors as arrays."""
    value = helper.get_attribute_value(attr)
    return numpy_helper.to_array(value) if isinstance(value, TensorProto) else value


def _is_small(value: object) -> bool:
    """Return whether no integer in `value` is beyond MAX_SLICE_STEP."""
    array = np.asarray(value)
    return (
        array.dtype.kind not in "iu"
        or not array.size
        or bool(np.all(np.abs(array.astype(np.float64)) <= MAX_SLICE_STEP))
    )


def _inner_graphs(graph: GraphProto) -> Iterator[GraphProto]:
    """Yield all graphs inside `graph`, at any depth."""
    waiting = [graph]
    while waiting:
        for node in waiting.pop().node:
            for attr in node.attribute:
                graphs = [attr.g] if attr.type == onnx.AttributeProto.GRAPH else list(attr.graphs)
                waiting += graphs
                yield from graphs


Dims = tuple[int, ...]
"""A static shape."""


def corrected_window_shapes(graph: onnx.GraphProto, inferred: onnx.GraphProto) -> dict[str, onnx.ValueInfoProto]:
    """Return the right shapes, by name, of outputs of windows that onnx infers otherwise than onnxruntime computes.

    Outputs that depend on a wrong one are left out: the importer infers again all that depends on the result. Raises
    ValueError for attributes without a meaning, and for a difference where onnx is known to be right.
    """
    known = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    types = {value.name: value.type.tensor_type for value in (*graph.input, *inferred.value_info, *inferred.output)}
    wrong: dict[str, onnx.ValueInfoProto] = {}
    dependent: set[str] = set()
    for node in graph.node:
        if dependent.intersection(node.input):
            dependent.update(node.output)
            continue
        if node.domain not in ("", "ai.onnx") or not op_spec(node.op_type).windows:
            continue
        weights_number = op_spec(node.op_type).weights_input
        x, w, y = (
            _dims(known, types, name) for name in (node.input[0], node.input[weights_number or 0], node.output[0])
        )
        if x is None or w is None or y is None or len(x) < 3:
            continue
        attrs = {attr.name: onnx.helper.get_attribute_value(attr) for attr in node.attribute}
        attrs["auto_pad"] = attrs.get("auto_pad", b"NOTSET").decode()
        label = f"{node.op_type} ({node.name or node.output[0]})"
        try:
            out = _window_outputs(node.op_type, attrs, x[2:], None if weights_number is None else w[2:])
        except WindowError as error:
            raise ValueError(f"{label}: {error}") from None
        if out == y[2:]:
            continue
        is_partial = len(y) < len(x) and "output_shape" in attrs  # onnx stops where an output is shorter than the input
        if not (_onnx_may_differ(node.op_type, attrs) or is_partial) or len(y) < 2:
            raise ValueError(f"{label} has windows with {list(out)} outputs, of which onnx infers {list(y[2:])}")
        for name in filter(None, node.output):
            wrong[name] = onnx.helper.make_tensor_value_info(name, types[name].elem_type, [*y[:2], *out])
        dependent.update(node.output)
    return wrong


def _window_outputs(op: str, attrs: Mapping[str, Any], size: Dims, kernel: Dims | None) -> Dims:
    """Return the sizes of the output of an operator with windows, as onnxruntime computes them.

    size, kernel: of the input and the weights, without batch and channels, as the result.
    """
    return (
        transposed_windows(attrs, size, kernel).out if op == "ConvTranspose" else windows(op, attrs, size, kernel).out
    )


def _onnx_may_differ(op: str, attrs: Mapping[str, Any]) -> bool:
    """Return whether onnx is known to infer other sizes than onnxruntime computes for these attributes.

    ConvTranspose: automatic padding where kernels are shorter than strides. Pooling: a last window that would begin
    outside (ceil_mode), and automatic padding, which onnxruntime computes without dilations and onnx with them.
    """
    same = attrs["auto_pad"] in ("SAME_UPPER", "SAME_LOWER")
    if op == "ConvTranspose":
        return same
    return op.endswith("Pool") and bool(attrs.get("ceil_mode") or (same and max(attrs.get("dilations") or [1]) > 1))


def _dims(known: Mapping[str, Dims], types: Mapping[str, Any], name: str) -> Dims | None:
    """Return the shape of the tensor `name`, from constants (`known`) or `types`; None where a size is not known."""
    if name in known:
        return known[name]
    kind = types.get(name)
    if kind is None or not kind.HasField("shape") or not all(dim.HasField("dim_value") for dim in kind.shape.dim):
        return None
    return tuple(dim.dim_value for dim in kind.shape.dim)


Form = Counter[str]
"""A linear form: how often each open size (by label) occurs in a sum; the key "" counts ones."""
Forms = list[Form]
"""The linear forms of the elements of a list of sizes."""
MAX_LIST_ELEMENTS = 64
"""Elements of the longest constant that counts as a list of sizes."""


def fixed_ranges(graph: GraphProto) -> dict[str, onnx.ValueInfoProto]:
    """Return the type of each Range in `graph` whose length is fixed, by the name of its output.

    onnx's inference leaves these lengths open. graph: with the shapes of its values, as far as they are known.
    """
    forms_of: dict[str, Forms] = {}
    for tensor in graph.initializer:
        _add_constant(forms_of, tensor.name, tensor)
    values = {value.name: value for value in (*graph.input, *graph.value_info, *graph.output)}
    ranges: dict[str, onnx.ValueInfoProto] = {}
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value":
            _add_constant(forms_of, node.output[0], node.attribute[0].t)
        elif node.op_type == "Range":
            length = _range_length(node, forms_of)
            if length is not None and node.output[0] not in ranges:
                ranges[node.output[0]] = helper.make_tensor_value_info(node.output[0], TensorProto.INT64, [length])
        elif (forms := _forms_of_result(node, forms_of, values)) is not None:
            forms_of[node.output[0]] = forms
    return ranges


def _add_constant(known: dict[str, Forms], name: str, tensor: TensorProto) -> None:
    """Add a constant list of int64 to `known`, if it is short enough for a list of sizes."""
    if (
        tensor.data_type == TensorProto.INT64
        and len(tensor.dims) <= 1
        and int(np.prod(tensor.dims)) <= MAX_LIST_ELEMENTS
    ):
        known[name] = [Counter({"": int(number)}) for number in to_array(tensor).reshape(-1)]


def _range_length(node: NodeProto, known: Mapping[str, Forms]) -> int | None:
    """Return the length of a Range, if the open sizes in its ends cancel; else None."""
    ends = [known.get(name, []) for name in node.input]
    if len(ends) != 3 or any(len(forms) != 1 for forms in ends):
        return None
    start, limit, step = (forms[0] for forms in ends)
    extent, stride = _constant_value(_add_forms(limit, start, -1)), _constant_value(step)
    return None if extent is None or stride is None or stride < 1 else max(0, -(-extent // stride))


def _forms_of_result(
    node: NodeProto, known: Mapping[str, Forms], values: Mapping[str, onnx.ValueInfoProto]
) -> Forms | None:  # fmt: skip
    """Return the linear forms of the list of sizes that `node` computes; None if it computes none."""
    attrs = {attr.name: helper.get_attribute_value(attr) for attr in node.attribute}
    if node.op_type == "Shape" and node.input[0] in values:
        tensor = values[node.input[0]].type.tensor_type
        dims = [_form_of_size(dim, f"{node.input[0]}[{axis}]") for axis, dim in enumerate(tensor.shape.dim)]
        return dims[attrs.get("start", 0) : attrs.get("end")] if tensor.HasField("shape") else None
    operand_forms = [known.get(name) for name in node.input]
    lists = [forms for forms in operand_forms if forms is not None]
    if not lists or len(lists) < len(operand_forms):
        return None
    if node.op_type in ("Identity", "Squeeze", "Unsqueeze") or (
        node.op_type == "Cast" and attrs.get("to") == TensorProto.INT64
    ):
        return lists[0]
    if joins_parts(node):
        return [form for forms in lists for form in forms]
    if node.op_type == "Gather":
        positions = [_constant_value(form) for form in lists[1]]
        valid_positions = [
            position for position in positions if position is not None and -len(lists[0]) <= position < len(lists[0])
        ]
        return [lists[0][position] for position in valid_positions] if len(valid_positions) == len(positions) else None
    if node.op_type in ("Add", "Sub") and len(lists[0]) == len(lists[1]):
        sign = 1 if node.op_type == "Add" else -1
        return [_add_forms(a, b, sign) for a, b in zip(*lists)]
    return None


def _form_of_size(dim: onnx.TensorShapeProto.Dimension, name: str) -> Form:
    """Return the form of one size of a shape; `name` labels an open size without a name."""
    return Counter({"": dim.dim_value}) if dim.HasField("dim_value") else Counter({dim.dim_param or name: 1})


def _add_forms(a: Form, b: Form, sign: int) -> Form:
    """Return a + sign * b."""
    result = Counter(a)
    for name, times in b.items():
        result[name] += sign * times
    return result


def _constant_value(form: Form) -> int | None:
    """Return the value of a form that does not depend on open sizes; else None."""
    return None if any(times for name, times in form.items() if name) else form[""]
