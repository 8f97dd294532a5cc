"""Open sizes of a model's inputs, and the numbers that given shapes imply for them.

    x: float[N, 3, height, width]    shapes {"x": (8, 3, 32, None)}    ->    N = 8, height = 32, width stays open

Equal names are equal sizes, as in ONNX; a size without a name is equal to no other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx

from celosia.compiler.graph.errors import ModelError
from celosia.compiler.graph.importing.normalise import size_name
from celosia.compiler.graph.importing.shape_inference import infer_with_onnx
from celosia.compiler.program import TensorInfo
from celosia.compiler.program.dtypes import ONNX_TYPES

Shapes = Mapping[str, Sequence[int | None]]
"""Name of an input -> its sizes; None or -1 for a size that stays open."""
Sizes = dict[str, int]
"""Label of an open size (see `open_axes`) -> its number."""


def input_values(proto: onnx.ModelProto) -> dict[str, onnx.ValueInfoProto]:
    """Return the inputs that a user gives, by name: those that are no constants."""
    graph = proto.graph
    constants = {tensor.name for tensor in graph.initializer} | {
        sparse.values.name for sparse in graph.sparse_initializer
    }
    return {value.name: value for value in graph.input if value.name not in constants}


def _dims(value: onnx.ValueInfoProto) -> list[onnx.TensorShapeProto.Dimension] | None:
    """Return the sizes that an input declares; None where it declares no shape, or is no tensor."""
    tensor = value.type.tensor_type
    return list(tensor.shape.dim) if value.type.HasField("tensor_type") and tensor.HasField("shape") else None


def _size_label(value: onnx.ValueInfoProto, axis: int, dim: onnx.TensorShapeProto.Dimension) -> str:
    """Return the label of an open size: its name, or "input[axis]" where it has none; "" for a number."""
    name = size_name(dim)
    return "" if name is None else name or f"{value.name}[{axis}]"


def open_axes(proto: onnx.ModelProto) -> dict[tuple[str, int], str]:
    """Return {(input, axis): label of the size} for all open sizes of inputs."""
    return {
        (value.name, axis): label
        for value in input_values(proto).values() for axis, dim in enumerate(_dims(value) or ())
        if (label := _size_label(value, axis, dim))
    }  # fmt: skip


def open_inputs(proto: onnx.ModelProto) -> list[str]:
    """Return the names of tensor inputs with an open size, or without a shape."""
    with_open_size = {name for name, _ in open_axes(proto)}
    tensors = {name: value for name, value in input_values(proto).items() if value.type.HasField("tensor_type")}
    return [name for name, value in tensors.items() if name in with_open_size or _dims(value) is None]


def declared_shape(value: onnx.ValueInfoProto) -> str:
    """Return the shape of an input as text for messages: numbers and labels of open sizes."""
    dims = _dims(value)
    if dims is None:
        return "[...]"
    return f"[{', '.join(_size_label(value, axis, dim) or str(dim.dim_value) for axis, dim in enumerate(dims))}]"


def sizes_of(proto: onnx.ModelProto, shapes: Shapes) -> Sizes:
    """Return the open sizes that `shapes` imply. Raises ModelError where they contradict the model or each other."""
    inputs = input_values(proto)
    sizes: Sizes = {}
    source: dict[str, str] = {}
    for name, shape in shapes.items():
        if name not in inputs:
            raise ModelError(
                f"a shape is given for {name!r}, which is no input; the inputs are "
                f"{', '.join(map(repr, inputs)) or 'none'}"
            )
        value, dims = inputs[name], _dims(inputs[name])
        if not value.type.HasField("tensor_type"):
            raise ModelError(f"a shape is given for input {name!r}, which is no tensor; leave it out")
        if dims is None:
            continue  # `with_shapes` declares it
        if len(shape) != len(dims):
            raise ModelError(
                f"the shape {list(shape)} given for input {name!r} has {len(shape)} sizes, and the input has "
                f"{len(dims)}: {declared_shape(value)}"
            )
        for axis, (size, dim) in enumerate(zip(shape, dims)):
            if size is None or size == -1:
                continue
            if size < 0:
                raise ModelError(f"size {size} given for dimension {axis} of input {name!r} is negative")
            label = _size_label(value, axis, dim)
            if not label and size != dim.dim_value:
                raise ModelError(
                    f"size {size} given for dimension {axis} of input {name!r}, which the model fixes at "
                    f"{dim.dim_value}; its shape is {declared_shape(value)}"
                )
            if not label:
                continue
            source.setdefault(label, name)
            if sizes.setdefault(label, size) != size:
                raise ModelError(
                    f"{label} is {sizes[label]} by the shape given for input {source[label]!r} and {size} by that for "
                    f"{name!r}, dimension {axis}; give one size"
                )
    return sizes


def with_shapes(proto: onnx.ModelProto, shapes: Shapes, sizes: Sizes) -> onnx.ModelProto:
    """Return `proto` with open sizes of inputs replaced by `sizes`, and `shapes` for inputs that declare none.

    Declared shapes of other tensors get the numbers of sizes with a name, too; their sizes without a name stay open.
    """
    if not sizes and not shapes:
        return proto
    result = onnx.ModelProto()
    result.CopyFrom(proto)
    for value in input_values(result).values():
        if _dims(value) is None and value.name in shapes:
            for size in shapes[value.name]:
                dim = value.type.tensor_type.shape.dim.add()
                if size is not None and size != -1:
                    dim.dim_value = size
        for axis, dim in enumerate(_dims(value) or ()):
            if (label := _size_label(value, axis, dim)) in sizes:
                dim.dim_value = sizes[label]
    for value in (*result.graph.value_info, *result.graph.output):
        for dim in _dims(value) or ():
            if dim.dim_param in sizes:
                dim.dim_value = sizes[dim.dim_param]
    return result


def missing_size_message(proto: onnx.ModelProto, size: str) -> str:
    """Return the error message for an open size whose number nobody has given."""
    name, axis = next(place for place, label in open_axes(proto).items() if label == size)
    value = input_values(proto)[name]
    label = "" if size == f"{name}[{axis}]" else f" ({size})"
    example = declared_shape(value).strip("[]").replace(" ", "")
    return (
        f"input {name!r} has a dynamic dimension {axis}{label}, whose size is not given; give numbers for "
        f"--shape {name}={example} (shapes= in Python), or run the model, which takes them from its inputs"
    )


def inputs_of(proto: onnx.ModelProto) -> tuple[TensorInfo, ...]:
    """Describe the inputs of an ONNX model; -1 stands for open sizes. Raises ModelError."""
    return tuple(_describe(value) for value in input_values(proto).values())


def is_quantised(proto: onnx.ModelProto) -> bool:
    """Return whether a model contains quantised operators, so that it needs no quantisation."""
    return any("QuantizeLinear" in node.op_type or node.op_type.startswith("QLinear") for node in proto.graph.node)


def _describe(value: onnx.ValueInfoProto) -> TensorInfo:
    """Return name, element type, shape and kind (tensor, sequence or optional) of an input. Raises ModelError."""
    kind, value_type = "tensor", value.type
    while (type_field := value_type.WhichOneof("value")) in ("sequence_type", "optional_type"):
        kind = type_field.removesuffix("_type")
        value_type = getattr(value_type, type_field).elem_type
    tensor = value_type.tensor_type
    if type_field != "tensor_type" or tensor.elem_type not in ONNX_TYPES:
        raise ModelError(f"input {value.name!r} has no element type; export the model with types")
    if kind == "tensor" and not tensor.HasField("shape"):
        raise ModelError(
            f"input {value.name!r} has no shape; give it one with --shape (shapes= in Python), or export it with one"
        )
    dims = (dim.dim_value if dim.HasField("dim_value") else -1 for dim in tensor.shape.dim)
    return TensorInfo(value.name, ONNX_TYPES[tensor.elem_type], tuple(max(size, -1) for size in dims), kind)


def resized(proto: onnx.ModelProto, shapes: Mapping[str, Sequence[int]]) -> onnx.ModelProto:
    """Return `proto` for inputs of these shapes; all other shapes are inferred again, not taken from the model."""
    sized = onnx.ModelProto()
    sized.CopyFrom(proto)
    for value in sized.graph.input:
        for dim, size in zip(value.type.tensor_type.shape.dim, shapes.get(value.name, ())):
            dim.dim_value = size
    del sized.graph.value_info[:]
    for value in sized.graph.output:
        value.type.tensor_type.ClearField("shape")
    return infer_with_onnx(sized)
