"""Rewrite operators to the forms that onnxruntime's quantiser supports.

Gemm<beta = 2>(a, b, c)    ->    Gemm(a, b, 2 c)                   c becomes [N]
                                 Add(Gemm(a, b), 2 c)              where it has several rows
Conv(x, w, b)              ->    Conv(x, w, b_copy)                where another operator has the bias b, too
Sum(a, b, c)               ->    Add(Add(a, b), c)                 of tensors of one shape
LSTM(x, w, r)              ->    LSTM(MatMul(x, w), identity, r)   also GRU and RNN
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import count
from math import prod

import numpy as np
import onnx
from onnx import helper, numpy_helper

from celosia.compiler.program.host.hostops.recurrent_ops import projected_weights


def normalise_gemm_biases(model: onnx.ModelProto) -> onnx.ModelProto:
    """Change `model`: biases of Gemms by constant weights become [N] with beta 1; larger ones become an Add."""
    graph, nodes = model.graph, list[onnx.NodeProto]()
    constants = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        nodes.append(node)
        if node.op_type != "Gemm" or not all(name in constants for name in node.input[1:]) or not any(node.input[2:]):
            continue
        attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
        beta, columns = attributes.pop("beta", 1.0), constants[node.input[1]].dims[0 if attributes.get("transB") else 1]
        bias = numpy_helper.to_array(constants[node.input[2]])
        if beta == 1 and bias.shape == (columns,):
            continue
        y, name = node.output[0], f"{node.output[0]}_bias"
        has_several_rows = prod(bias.shape[:-1]) > 1
        bias = bias * bias.dtype.type(beta)
        bias = bias if has_several_rows else np.ascontiguousarray(np.broadcast_to(bias.reshape(-1), (columns,)))
        graph.initializer.append(numpy_helper.from_array(bias, name))
        product, inputs = (f"{y}_product", node.input[:2]) if has_several_rows else (y, [*node.input[:2], name])
        nodes[-1] = helper.make_node("Gemm", inputs, [product], name=node.name, **attributes)
        if has_several_rows:
            nodes.append(helper.make_node("Add", [product, name], [y], name=f"{node.name}_bias" if node.name else ""))
    del graph.node[:]
    graph.node.extend(nodes)
    return model


def separate_shared_biases(model: onnx.ModelProto) -> onnx.ModelProto:
    """Change `model`: each Conv, ConvTranspose and Gemm gets a bias of its own.

    onnxruntime's quantiser makes copies, too, under names that other tensors of the model may have.
    """
    graph = model.graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    names = {name for node in graph.node for name in (*node.input, *node.output)} | set(constants)
    used: set[str] = set()
    for node in graph.node:
        if node.op_type not in ("Conv", "ConvTranspose", "Gemm") or len(node.input) < 3:
            continue
        bias = node.input[2]
        if bias in used and bias in constants:
            copy = onnx.TensorProto()
            copy.CopyFrom(constants[bias])
            copy.name = next(name for k in count() if (name := f"{bias}_copy{k}") not in names)
            names.add(copy.name)
            graph.initializer.append(copy)
            node.input[2] = copy.name
        used.add(bias)
    return model


RECURRENT = ("LSTM", "GRU", "RNN")
"""Operators whose products of the input `project_inputs` separates."""


def project_inputs(model: onnx.ModelProto, kept: Collection[str] = ()) -> onnx.ModelProto:
    """Change `model`: a MatMul computes the products of the inputs of recurrent layers with constant weights.

    The quantiser takes it, and the accelerator computes all steps at once; the layer then multiplies its states only.
    kept: names of operators that stay as they are.
    """
    graph, nodes = model.graph, list[onnx.NodeProto]()
    constants = {tensor.name: tensor for tensor in graph.initializer}
    names = {name for node in graph.node for name in (*node.input, *node.output)} | set(constants)

    def unused(name: str) -> str:
        result = next(candidate for k in count() if (candidate := f"{name}{k or ''}") not in names)
        names.add(result)
        return result

    for node in graph.node:
        nodes.append(node)
        weights = constants.get(node.input[1]) if node.op_type in RECURRENT and not node.domain else None
        if weights is None or node.name in kept:
            continue
        w = numpy_helper.to_array(weights)
        directions, size, inputs = w.shape
        stem = node.name or next(name for name in node.output if name)
        matrix, gates, result = (unused(f"{stem}_{suffix}") for suffix in ("input_weights", "identity", "input_gates"))
        graph.initializer.extend(
            [
                numpy_helper.from_array(np.ascontiguousarray(w.reshape(directions * size, inputs).T), matrix),
                numpy_helper.from_array(projected_weights(directions, size, w.dtype), gates),
            ]
        )
        nodes.insert(-1, helper.make_node("MatMul", [node.input[0], matrix], [result], name=unused(f"{stem}_input")))
        node.input[0], node.input[1] = result, gates
    del graph.node[:]
    graph.node.extend(nodes)
    return model


def separate_sums(model: onnx.ModelProto, kept: Collection[str] = ()) -> onnx.ModelProto:
    """Return `model` with Adds, which the quantiser takes, in place of each Sum of several tensors.

    It is a copy if there is such a Sum. kept: names of operators that stay as they are.
    """
    sums = [
        node.output[0] for node in model.graph.node
        if node.op_type == "Sum" and not node.domain and len(node.input) > 1 and node.name not in kept
    ]  # fmt: skip
    if not sums:
        return model
    separate = onnx.ModelProto()
    separate.CopyFrom(model)
    graph, nodes = separate.graph, list[onnx.NodeProto]()
    names = {name for node in graph.node for name in node.output}
    for node in graph.node:
        if node.output[0] not in sums:
            nodes.append(node)
            continue
        total = node.input[0]
        for number, part in enumerate(node.input[1:], 1):
            result = node.output[0]
            if number < len(node.input) - 1:
                result = next(name for k in count() if (name := f"{node.output[0]}_part{k}") not in names)
                names.add(result)
            name = node.name if number == 1 or not node.name else f"{node.name}_{number}"
            nodes.append(helper.make_node("Add", [total, part], [result], name=name))
            total = result
    del graph.node[:]
    graph.node.extend(nodes)
    return separate
