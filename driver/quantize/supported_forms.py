"""Rewrite operators to the forms that onnxruntime's quantiser supports.

Gemm<beta = 2>(a, b, c)    ->    Gemm(a, b, 2 c)                   c becomes [N]
                                 Add(Gemm(a, b), 2 c)              where it has several rows
Conv(x, w, b)              ->    Conv(x, w, b_copy)                where another operator has the bias b, too
Sum(a, b, c)               ->    Add(Add(a, b), c)                 of tensors of one shape
LSTM(x, w, r)              ->    LSTM(MatMul(x, w), identity, r)   also GRU and RNN
BatchNormalization(x)      ->    Conv<group = C>(x, factors, c)    of images, sequences, and rows as images of a pixel
AveragePool(x)             ->    Conv<group = C>(x, 1 / pixels)    where all windows have equally many pixels
ReduceMean(x)              ->    GlobalAveragePool(x)              over all pixels of a sequence or an image
ReduceSum(x)               ->    Mul(GlobalAveragePool(x), pixels)
ReduceMean(x)              ->    Conv(x, 1 / C)                    over the channels of images
Sub(a, b)                  ->    Add(a, Mul(b, -1))                of two tensors
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import count
from math import prod
from typing import Any, NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from celosia.compiler.program.host.hostops.recurrent_ops import projected_weights

Array = NDArray[Any]


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
    names, used_biases = _names(graph), set[str]()
    for node in graph.node:
        if node.op_type not in ("Conv", "ConvTranspose", "Gemm") or len(node.input) < 3:
            continue
        bias = node.input[2]
        if bias in used_biases and bias in constants:
            copy = onnx.TensorProto()
            copy.CopyFrom(constants[bias])
            copy.name = _unused_name(f"{bias}_copy", names)
            graph.initializer.append(copy)
            node.input[2] = copy.name
        used_biases.add(bias)
    return model


def convolve_channels(model: onnx.ModelProto, unchanged: Collection[str] = ()) -> onnx.ModelProto:
    """Change `model`: BatchNormalization, AveragePool and the mean of channels become convolutions.

    onnxruntime's preparation has folded a BatchNormalization behind a convolution. Others, such as those in front of a
    Relu and a convolution in DenseNet, have no quantised form. Averages have one, but onnxruntime computes it in
    floats, which differ from the accelerator's integers next to ties. unchanged: names of operators that stay as
    they are.
    """
    graph, nodes = model.graph, list[onnx.NodeProto]()
    constants, names, sizes = {tensor.name: tensor for tensor in graph.initializer}, _names(graph), _float_sizes(graph)
    for node in graph.node:
        dims = sizes.get(node.input[0], []) if node.input else []
        conv = None
        if not node.domain and node.name not in unchanged and len(dims) in (2, 3, 4) and dims[1]:
            conv = _convolution_of(node, constants, dims)
        if conv is None:
            nodes.append(node)
            continue
        arrays = {
            _unused_name(f"{node.output[0]}_{kind}", names): array.astype(np.float32)
            for kind, array in zip(("factors", "offsets"), conv.weights)
        }
        graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
        x, y = node.input[0], node.output[0]
        if len(dims) == 2:  # a row is an image of one pixel
            shape, x, y = (_unused_name(f"{node.output[0]}_{kind}", names) for kind in ("size", "pixel", "image"))
            graph.initializer.append(numpy_helper.from_array(np.array([-1, dims[1], 1, 1]), shape))
            nodes.append(helper.make_node("Reshape", [node.input[0], shape], [x], name=_unused_name(x, names)))
        nodes.append(helper.make_node("Conv", [x, *arrays], [y], name=node.name, **conv.attributes))
        if len(dims) == 2:
            nodes.append(helper.make_node("Flatten", [y], node.output, name=_unused_name(y, names)))
    del graph.node[:]
    graph.node.extend(nodes)
    return model


class _Convolution(NamedTuple):
    """Weights, perhaps with biases, and attributes of a convolution."""

    weights: tuple[Array, ...]
    attributes: Mapping[str, Any]


def _convolution_of(
    node: onnx.NodeProto, constants: Mapping[str, onnx.TensorProto], dims: Sequence[int]
) -> _Convolution | None:
    """Return the convolution that `node` is for an input of sizes `dims`; None if it is none."""
    attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    channels, ones = dims[1], (1,) if len(dims) == 3 else (1, 1)
    if node.op_type == "BatchNormalization":
        is_trained = attributes.get("training_mode") or len(node.output) > 1
        if is_trained or any(name not in constants for name in node.input[1:]):
            return None
        scale, offset, mean, variance = (numpy_helper.to_array(constants[name]) for name in node.input[1:])
        factors = scale / np.sqrt(variance + scale.dtype.type(attributes.get("epsilon", 1e-5)))
        return _Convolution((factors.reshape(-1, 1, *ones), offset - mean * factors), {"group": channels})
    if node.op_type == "AveragePool":
        pads_count = attributes.get("count_include_pad") or not any(attributes.get("pads", ()))
        is_plain = attributes.get("auto_pad", b"NOTSET") in (b"NOTSET", b"VALID") and not attributes.get("ceil_mode")
        if not pads_count or not is_plain or "dilations" in attributes:
            return None
        window = {name: value for name, value in attributes.items() if name in ("kernel_shape", "strides", "pads")}
        kernel = attributes["kernel_shape"]
        weights = np.full((channels, 1, *kernel), 1 / prod(kernel))
        return _Convolution((weights,), {"group": channels, **window})
    is_mean = node.op_type == "ReduceMean" and len(dims) > 2 and attributes.get("keepdims", 1)
    if is_mean and _reduced_axes(node, attributes, constants, len(dims)) == [1]:
        return _Convolution((np.full((1, channels, *ones), 1 / channels),), {})
    return None


def _reduced_axes(
    node: onnx.NodeProto, attributes: Mapping[str, Any], constants: Mapping[str, onnx.TensorProto], rank: int
) -> list[int]:
    """Return the axes of a reduction in order; [] if they are no constants."""
    axes = attributes.get("axes", [])
    if len(node.input) > 1 and node.input[1] in constants:
        axes = numpy_helper.to_array(constants[node.input[1]]).reshape(-1).tolist()
    return sorted(axis % rank for axis in axes)


def pool_pixels(model: onnx.ModelProto, unchanged: Collection[str] = ()) -> onnx.ModelProto:
    """Change `model`: ReduceMean and ReduceSum over all pixels of sequences or images use GlobalAveragePool.

    onnxruntime computes its quantised form in integers, as the accelerator does, and the others in floats. unchanged:
    names of operators that stay as they are.
    """
    graph, nodes = model.graph, list[onnx.NodeProto]()
    constants, names, sizes = {tensor.name: tensor for tensor in graph.initializer}, _names(graph), _float_sizes(graph)
    for node in graph.node:
        nodes.append(node)
        dims = sizes.get(node.input[0], []) if node.input else []
        is_reduction = node.op_type in ("ReduceMean", "ReduceSum") and not node.domain and node.name not in unchanged
        if not is_reduction or len(dims) not in (3, 4) or not all(dims[1:]):
            continue
        attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
        if _reduced_axes(node, attributes, constants, len(dims)) != [*range(2, len(dims))]:
            continue
        x, y, stem = node.input[0], node.output[0], node.name or node.output[0]
        steps: list[tuple[str, str, list[str]]] = [("GlobalAveragePool", "pooled", [])]
        if node.op_type == "ReduceSum":
            count = _unused_name(f"{stem}_pixels", names)
            graph.initializer.append(numpy_helper.from_array(np.array(prod(dims[2:]), np.float32), count))
            steps.append(("Mul", "sum", [count]))
        if not attributes.get("keepdims", 1):
            steps.append(("Flatten", "flat", []))
        nodes.pop()
        for number, (op, kind, others) in enumerate(steps, 1):
            result = y if number == len(steps) else _unused_name(f"{stem}_{kind}", names)
            name = node.name if number == 1 else _unused_name(f"{stem}_{kind}_node", names)
            nodes.append(helper.make_node(op, [x, *others], [result], name=name))
            x = result
    del graph.node[:]
    graph.node.extend(nodes)
    return model


def separate_differences(model: onnx.ModelProto, unchanged: Collection[str] = ()) -> onnx.ModelProto:
    """Change `model`: the difference of two float tensors becomes an Add, which the quantiser takes, of a negated one.

    unchanged: names of operators that stay as they are.
    """
    graph, nodes = model.graph, list[onnx.NodeProto]()
    constants, names, sizes = {tensor.name for tensor in graph.initializer}, _names(graph), _float_sizes(graph)
    for node in graph.node:
        is_difference = node.op_type == "Sub" and not node.domain and all(name in sizes for name in node.input)
        if not is_difference or node.name in unchanged or not constants.isdisjoint(node.input):
            nodes.append(node)
            continue
        stem = node.name or node.output[0]
        minus, negated, name = (_unused_name(f"{stem}_{suffix}", names) for suffix in ("minus", "negated", "negate"))
        graph.initializer.append(numpy_helper.from_array(np.array(-1, np.float32), minus))
        nodes.append(helper.make_node("Mul", [node.input[1], minus], [negated], name=name))
        nodes.append(helper.make_node("Add", [node.input[0], negated], node.output, name=node.name))
    del graph.node[:]
    graph.node.extend(nodes)
    return model


RECURRENT = ("LSTM", "GRU", "RNN")
"""Operators whose products of the input `project_inputs` separates."""


def project_inputs(model: onnx.ModelProto, unchanged: Collection[str] = ()) -> onnx.ModelProto:
    """Change `model`: a MatMul computes the products of the inputs of recurrent layers with constant weights.

    The quantiser takes it, and the accelerator computes all steps at once; the layer then multiplies its states only.
    unchanged: names of operators that stay as they are.
    """
    graph, nodes = model.graph, list[onnx.NodeProto]()
    constants = {tensor.name: tensor for tensor in graph.initializer}
    names = _names(graph)
    for node in graph.node:
        nodes.append(node)
        weights = constants.get(node.input[1]) if node.op_type in RECURRENT and not node.domain else None
        if weights is None or node.name in unchanged:
            continue
        w = numpy_helper.to_array(weights)
        directions, size, inputs = w.shape
        stem = node.name or next(name for name in node.output if name)
        suffixes = "input_weights", "identity", "input_gates", "input"
        matrix, gates, result, name = (_unused_name(f"{stem}_{suffix}", names) for suffix in suffixes)
        graph.initializer.extend(
            [
                numpy_helper.from_array(np.ascontiguousarray(w.reshape(directions * size, inputs).T), matrix),
                numpy_helper.from_array(projected_weights(directions, size, w.dtype), gates),
            ]
        )
        nodes.insert(-1, helper.make_node("MatMul", [node.input[0], matrix], [result], name=name))
        node.input[0], node.input[1] = result, gates
    del graph.node[:]
    graph.node.extend(nodes)
    return model


def separate_sums(model: onnx.ModelProto, unchanged: Collection[str] = ()) -> onnx.ModelProto:
    """Return `model` with Adds, which the quantiser takes, in place of each Sum of several tensors.

    It is a copy if there is such a Sum. unchanged: names of operators that stay as they are.
    """
    sums = [
        node.output[0] for node in model.graph.node
        if node.op_type == "Sum" and not node.domain and len(node.input) > 1 and node.name not in unchanged
    ]  # fmt: skip
    if not sums:
        return model
    separate = onnx.ModelProto()
    separate.CopyFrom(model)
    graph, nodes = separate.graph, list[onnx.NodeProto]()
    names = _names(graph)
    for node in graph.node:
        if node.output[0] not in sums:
            nodes.append(node)
            continue
        total = node.input[0]
        for number, part in enumerate(node.input[1:], 1):
            result = node.output[0]
            if number < len(node.input) - 1:
                result = _unused_name(f"{node.output[0]}_part", names)
            name = node.name if number == 1 or not node.name else f"{node.name}_{number}"
            nodes.append(helper.make_node("Add", [total, part], [result], name=name))
            total = result
    del graph.node[:]
    graph.node.extend(nodes)
    return separate


def _float_sizes(graph: onnx.GraphProto) -> dict[str, list[int]]:
    """Return the sizes of the float tensors of `graph` by name, 0 for open ones."""
    return {
        value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.value_info)
        if value.type.tensor_type.elem_type == TensorProto.FLOAT
    }


def _names(graph: onnx.GraphProto) -> set[str]:
    """Return the names of all tensors of `graph`, and of its operators."""
    constants = (tensor.name for tensor in graph.initializer)
    return {name for node in graph.node for name in (node.name, *node.input, *node.output)}.union(constants)


def _unused_name(stem: str, names: set[str]) -> str:
    """Return `stem`, with a number if one of `names` is equal; add it to these."""
    name = next(name for k in count() if (name := f"{stem}{k or ''}") not in names)
    names.add(name)
    return name
