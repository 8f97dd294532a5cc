"""Find ranges of a fixed length whose ends are open: positions behind a cache of any length.

    past = Shape(keys)[2]; total = Add(past, 1)
    positions = Range(past, total, 1)             ->    positions: int64[1]

Sizes are linear forms of open sizes; a length is fixed where they cancel in limit - start.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np
import onnx
from onnx import GraphProto, NodeProto, TensorProto, helper

from celosia.compiler.cpu.parse import to_array
from celosia.compiler.graph.operands import joins_parts

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
