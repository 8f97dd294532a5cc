"""Sizes that a model leaves open, and what the shapes of its inputs make of them.

x: float[N, 3, height, width]    shapes {"x": (8, 3, 32, None)}    ->    N = 8, height = 32, width stays open

Equal names are equal sizes, as in ONNX; a size without a name is one of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx

from celosia.compiler.graph.errors import ModelError
from celosia.compiler.graph.importing.importer import read
from celosia.compiler.graph.importing.normalise import size_name
from celosia.compiler.graph.importing.shape_inference import inferred
from celosia.compiler.program import TensorInfo
from celosia.compiler.program.dtypes import ONNX_TYPES

Shapes = Mapping[str, Sequence[int | None]]
"""By input; None or -1 for a size that stays open."""
Sizes = dict[str, int]
"""By name of an open size; see `open_axes`."""


def input_values(proto: onnx.ModelProto) -> dict[str, onnx.ValueInfoProto]:
    """The inputs that a user gives: those that are no constants."""
    graph = proto.graph
    fixed = {tensor.name for tensor in graph.initializer} | {each.values.name for each in graph.sparse_initializer}
    return {value.name: value for value in graph.input if value.name not in fixed}


def _dims(value: onnx.ValueInfoProto) -> list[onnx.TensorShapeProto.Dimension] | None:
    """The sizes that an input declares; None where it declares no shape, or is no tensor."""
    tensor = value.type.tensor_type
    return list(tensor.shape.dim) if value.type.HasField("tensor_type") and tensor.HasField("shape") else None


def _name(value: onnx.ValueInfoProto, axis: int, dim: onnx.TensorShapeProto.Dimension) -> str:
    """Return the name of an open size; "" for a size that is given."""
    name = size_name(dim)
    return "" if name is None else name or f"{value.name}[{axis}]"


def open_axes(proto: onnx.ModelProto) -> dict[tuple[str, int], str]:
    """The name of each size of an input that is open, by input and axis."""
    return {
        (value.name, axis): name
        for value in input_values(proto).values() for axis, dim in enumerate(_dims(value) or ())
        if (name := _name(value, axis, dim))
    }  # fmt: skip


def open_inputs(proto: onnx.ModelProto) -> list[str]:
    """Inputs with an open size, or without a shape."""
    named = {name for name, _ in open_axes(proto)}
    tensors = {name: value for name, value in input_values(proto).items() if value.type.HasField("tensor_type")}
    return [name for name, value in tensors.items() if name in named or _dims(value) is None]


def declared(value: onnx.ValueInfoProto) -> str:
    """The shape of an input as text: numbers and names."""
    dims = _dims(value)
    if dims is None:
        return "[...]"
    return f"[{', '.join(_name(value, axis, dim) or str(dim.dim_value) for axis, dim in enumerate(dims))}]"


def sizes_of(proto: onnx.ModelProto, shapes: Shapes) -> Sizes:
    """Return the open sizes that `shapes` give. Raises ModelError where they contradict the model or each other."""
    inputs = input_values(proto)
    sizes: Sizes = {}
    where: dict[str, str] = {}
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
                f"{len(dims)}: {declared(value)}"
            )
        for axis, (size, dim) in enumerate(zip(shape, dims)):
            if size is None or size == -1:
                continue
            if size < 0:
                raise ModelError(f"size {size} given for dimension {axis} of input {name!r} is negative")
            label = _name(value, axis, dim)
            if not label and size != dim.dim_value:
                raise ModelError(
                    f"size {size} given for dimension {axis} of input {name!r}, which the model fixes at "
                    f"{dim.dim_value}; its shape is {declared(value)}"
                )
            if not label:
                continue
            where.setdefault(label, name)
            if sizes.setdefault(label, size) != size:
                raise ModelError(
                    f"{label} is {sizes[label]} by the shape given for input {where[label]!r} and {size} by that for "
                    f"{name!r}, dimension {axis}; give one size"
                )
    return sizes


def with_shapes(proto: onnx.ModelProto, shapes: Shapes, sizes: Sizes) -> onnx.ModelProto:
    """`proto` with open sizes of inputs replaced by `sizes`, and shapes for inputs that have none.

    What the model declares of other tensors under these names becomes numbers, too; what it declares under no name
    says nothing.
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
            if (label := _name(value, axis, dim)) in sizes:
                dim.dim_value = sizes[label]
    for value in (*result.graph.value_info, *result.graph.output):
        for dim in _dims(value) or ():
            if dim.dim_param in sizes:
                dim.dim_value = sizes[dim.dim_param]
    return result


def missing(proto: onnx.ModelProto, size: str) -> str:
    """The sentence on an open size that nobody has given."""
    name, axis = next(place for place, label in open_axes(proto).items() if label == size)
    value = input_values(proto)[name]
    label = "" if size == f"{name}[{axis}]" else f" ({size})"
    example = declared(value).strip("[]").replace(" ", "")
    return (
        f"input {name!r} has a dynamic dimension {axis}{label}, whose size is not given; give numbers for "
        f"--shape {name}={example} (shapes= in Python), or run the model, which takes them from its inputs"
    )


def inputs_of(source: str | Path | onnx.ModelProto) -> tuple[TensorInfo, ...]:
    """The inputs of an ONNX model; -1 stands for sizes that it leaves open. ModelError."""
    proto = source if isinstance(source, onnx.ModelProto) else read(Path(source), data=False)
    return tuple(_info(value) for value in input_values(proto).values())


def is_quantised(proto: onnx.ModelProto) -> bool:
    """Whether a model computes with quantised integers already."""
    return any("QuantizeLinear" in node.op_type or node.op_type.startswith("QLinear") for node in proto.graph.node)


def _info(value: onnx.ValueInfoProto) -> TensorInfo:
    kind, inner = "tensor", value.type
    while (which := inner.WhichOneof("value")) in ("sequence_type", "optional_type"):
        kind = which.removesuffix("_type")
        inner = getattr(inner, which).elem_type
    tensor = inner.tensor_type
    if which != "tensor_type" or tensor.elem_type not in ONNX_TYPES:
        raise ModelError(f"input {value.name!r} has no element type; export the model with types")
    if kind == "tensor" and not tensor.HasField("shape"):
        raise ModelError(
            f"input {value.name!r} has no shape; give it one with --shape (shapes= in Python), or export it with one"
        )
    dims = (dim.dim_value if dim.HasField("dim_value") else -1 for dim in tensor.shape.dim)
    return TensorInfo(value.name, ONNX_TYPES[tensor.elem_type], tuple(max(size, -1) for size in dims), kind)


def resized(proto: onnx.ModelProto, shapes: Mapping[str, Sequence[int]]) -> onnx.ModelProto:
    """`proto` for inputs of `shapes`, by name. What it declares of other shapes is inferred again, and not believed."""
    sized = onnx.ModelProto()
    sized.CopyFrom(proto)
    for value in sized.graph.input:
        for dim, size in zip(value.type.tensor_type.shape.dim, shapes.get(value.name, ())):
            dim.dim_value = size
    del sized.graph.value_info[:]
    for value in sized.graph.output:
        value.type.tensor_type.ClearField("shape")
    return inferred(sized)
