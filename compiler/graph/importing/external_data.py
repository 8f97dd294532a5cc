"""Constants in files beside the model's. Those of large models are mapped: only what is read of them takes memory.

The model keeps their names, types and shapes; `attach` gives the imported graph the way to their files.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import prod

import onnx
import onnx_ir as ir
from onnx import GraphProto, ModelProto, TensorProto
from onnx.external_data_helper import ExternalDataInfo, load_external_data_for_model, uses_external_data

from celosia.compiler.program.dtypes import ONNX_TYPES, itemsize

MIN_MAPPED_BYTES = 1 << 30
"""Models with more bytes in constants of such a size are mapped. Others are read, and then need their files no more."""
ALWAYS_READ_BYTES = 1 << 16
"""Bytes of constants that are read in any case: shapes may depend on what they hold."""


@dataclass(frozen=True)
class Origin:
    """Name of a model, and the folder where the files lie that it names; "" for a model that is no file."""

    name: str
    folder: str = ""

    def __str__(self) -> str:
        return self.name


def read_all(proto: ModelProto, folder: str) -> None:
    """Read into `proto` what it has in other files. ValueError, onnx's errors."""
    _give_lengths(proto.graph)
    load_external_data_for_model(proto, folder)


def _give_lengths(graph: GraphProto) -> None:
    """Let each constant in another file say how many bytes it has there: of one that does not, onnx reads the whole
    file. ValueError where it says another number than its shape."""
    for tensor in (*graph.initializer, *(t for node in graph.node for a in node.attribute for t in (a.t, *a.tensors))):
        if not uses_external_data(tensor):
            continue
        try:
            size, given = _size(tensor), ExternalDataInfo(tensor).length
        except ValueError as error:
            raise ValueError(f"where constant {tensor.name!r} lies is no number: {error}") from None
        if ONNX_TYPES.get(tensor.data_type, "object") == "object":
            raise ValueError(f"constant {tensor.name!r} in another file has no elements of one size")
        if given not in (None, size):
            raise ValueError(f"constant {tensor.name!r} takes {size} bytes, and has {given} in another file")
        if given is None:
            tensor.external_data.add(key="length", value=str(size))
    for inner in (g for node in graph.node for a in node.attribute for g in (a.g, *a.graphs)):
        _give_lengths(inner)


def read_small(proto: ModelProto, folder: str) -> None:
    """Read into `proto` what it has in other files, but for large constants of a large graph. Raises ValueError, onnx's
    errors."""
    _give_lengths(proto.graph)
    sizes = [_size(tensor) for tensor in proto.graph.initializer]
    left = [tensor for tensor, size in zip(proto.graph.initializer, sizes) if size > ALWAYS_READ_BYTES]
    if sum(sizes) <= MIN_MAPPED_BYTES:
        left = []
    for tensor in left:  # so that onnx passes them by
        tensor.data_location = TensorProto.DEFAULT
    load_external_data_for_model(proto, folder)
    for tensor in left:
        tensor.data_location = TensorProto.EXTERNAL


def _size(tensor: TensorProto) -> int:
    """Bytes of a constant in another file; 0 for what is none, or cannot be."""
    kind = ONNX_TYPES.get(tensor.data_type, "object")
    if not uses_external_data(tensor) or kind == "object" or any(size < 0 for size in tensor.dims):
        return 0
    return int(prod(tensor.dims)) * itemsize(kind)


def has_files(proto: ModelProto) -> bool:
    """Whether constants of a model that `read_small` has seen lie in other files."""
    return any(map(uses_external_data, proto.graph.initializer))


def is_mapped(value: ir.Value | None) -> bool:
    """Whether `value` is a constant in another file, which is not copied."""
    return value is not None and isinstance(value.const_value, ir.ExternalTensor)


def check_file(tensor: TensorProto, folder: str) -> None:
    """ValueError or OSError where the file of a constant lies outside of `folder`, or has not all its bytes."""
    info, home = ExternalDataInfo(tensor), os.path.realpath(folder)
    path = os.path.realpath(os.path.join(home, info.location))
    if os.path.commonpath([home, path]) != home:
        raise ValueError(f"its file {info.location!r} lies outside of the model's folder")
    if not os.path.isfile(path):
        raise ValueError(f"there is no file {info.location!r} in the model's folder")
    found = _external(tensor)
    offset, size = int(info.offset or 0), os.path.getsize(path)
    if offset < 0 or offset + found.nbytes > size or int(info.length or found.nbytes) != found.nbytes:
        raise ValueError(
            f"it takes {found.nbytes} bytes, and the model gives it {info.length or 'those'} from {offset} on in "
            f"{info.location!r}, which has {size}"
        )
    found.base_dir = home
    found.numpy()  # which maps it


def _external(tensor: TensorProto) -> ir.ExternalTensor:
    found = ir.from_proto(tensor)
    assert isinstance(found, ir.ExternalTensor)
    return found


def attach(model: ir.Model, folder: str) -> None:
    """Let the constants of an imported graph find their files."""
    ir.external_data.set_base_dir(model.graph, folder)


def without_files(proto: ModelProto) -> None:
    """Make constants in other files inputs, in place: the ONNX checker would look for the files."""
    outside = [tensor for tensor in proto.graph.initializer if uses_external_data(tensor)]
    if not outside:
        return
    kept = [tensor for tensor in proto.graph.initializer if not uses_external_data(tensor)]
    del proto.graph.initializer[:]
    proto.graph.initializer.extend(kept)
    proto.graph.input.extend(
        onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims) for tensor in outside
    )
