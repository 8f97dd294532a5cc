"""Lengths of ranges whose ends are open and whose difference is not: positions behind a cache of any length.

past = Shape(keys)[2]; total = Add(past, 1)
positions = Range(past, total, 1)             ->    positions: int64[1]
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
"""A sum of open sizes, each so many times; "" counts ones."""
Forms = list[Form]
"""The elements of a list of sizes."""
LONGEST = 64
"""Lists with more elements are no sizes."""


def lengths(graph: GraphProto) -> dict[str, onnx.ValueInfoProto]:
    """The ranges in `graph`, whose values have their shapes as far as they are known, that have a fixed length."""
    known: dict[str, Forms] = {}
    for tensor in graph.initializer:
        _note(known, tensor.name, tensor)
    values = {value.name: value for value in (*graph.input, *graph.value_info, *graph.output)}
    found: dict[str, onnx.ValueInfoProto] = {}
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute and node.attribute[0].name == "value":
            _note(known, node.output[0], node.attribute[0].t)
        elif node.op_type == "Range":
            count = _count(node, known)
            if count is not None and node.output[0] not in found:
                found[node.output[0]] = helper.make_tensor_value_info(node.output[0], TensorProto.INT64, [count])
        elif (forms := _forms(node, known, values)) is not None:
            known[node.output[0]] = forms
    return found


def _note(known: dict[str, Forms], name: str, tensor: TensorProto) -> None:
    if tensor.data_type == TensorProto.INT64 and len(tensor.dims) <= 1 and int(np.prod(tensor.dims)) <= LONGEST:
        known[name] = [Counter({"": int(each)}) for each in to_array(tensor).reshape(-1)]


def _count(node: NodeProto, known: Mapping[str, Forms]) -> int | None:
    ends = [known.get(name, []) for name in node.input]
    if len(ends) != 3 or any(len(each) != 1 for each in ends):
        return None
    start, limit, step = (each[0] for each in ends)
    reach, by = _number(_sum(limit, start, -1)), _number(step)
    return None if reach is None or by is None or by < 1 else max(0, -(-reach // by))


def _forms(
    node: NodeProto, known: Mapping[str, Forms], values: Mapping[str, onnx.ValueInfoProto]
) -> Forms | None:  # fmt: skip
    """Return the linear forms of the list of sizes that `node` computes, if it computes one."""
    attrs = {attr.name: helper.get_attribute_value(attr) for attr in node.attribute}
    if node.op_type == "Shape" and node.input[0] in values:
        tensor = values[node.input[0]].type.tensor_type
        dims = [_size(dim, f"{node.input[0]}[{axis}]") for axis, dim in enumerate(tensor.shape.dim)]
        return dims[attrs.get("start", 0) : attrs.get("end")] if tensor.HasField("shape") else None
    given = [known.get(name) for name in node.input]
    lists = [each for each in given if each is not None]
    if not lists or len(lists) < len(given):
        return None
    if node.op_type in ("Identity", "Squeeze", "Unsqueeze") or (
        node.op_type == "Cast" and attrs.get("to") == TensorProto.INT64
    ):
        return lists[0]
    if joins_parts(node):
        return [each for forms in lists for each in forms]
    if node.op_type == "Gather":
        places = [_number(form) for form in lists[1]]
        inside = [place for place in places if place is not None and -len(lists[0]) <= place < len(lists[0])]
        return [lists[0][place] for place in inside] if len(inside) == len(places) else None
    if node.op_type in ("Add", "Sub") and len(lists[0]) == len(lists[1]):
        sign = 1 if node.op_type == "Add" else -1
        return [_sum(a, b, sign) for a, b in zip(*lists)]
    return None


def _size(dim: onnx.TensorShapeProto.Dimension, name: str) -> Form:
    return Counter({"": dim.dim_value}) if dim.HasField("dim_value") else Counter({dim.dim_param or name: 1})


def _sum(a: Form, b: Form, sign: int) -> Form:
    result = Counter(a)
    for name, times in b.items():
        result[name] += sign * times
    return result


def _number(form: Form) -> int | None:
    """Return the value of the form, if it does not depend on open sizes."""
    return None if any(times for name, times in form.items() if name) else form[""]
