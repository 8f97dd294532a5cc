"""Constants in files beside the model's file: read them, or leave those of large models mapped.

Only the parts of a mapped constant that are read take memory. The model keeps names, types and shapes of all constants;
`attach` tells the imported graph the folder of their files.
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
"""Models with more bytes of external constants than this are mapped; others are read whole."""
ALWAYS_READ_BYTES = 1 << 16
"""Constants of at most so many bytes are read in any case: shapes may depend on their values."""


@dataclass(frozen=True)
class Origin:
    """Where a model is from.

    name: for messages. folder: absolute path of the folder with the files that the model names; "" for a model that is
    no file.
    """

    name: str
    folder: str = ""

    def __str__(self) -> str:
        return self.name


def read_all(proto: ModelProto, folder: str) -> None:
    """Read into `proto` all constants that lie in other files. Raises ValueError and onnx's errors."""
    _write_lengths(proto.graph)
    load_external_data_for_model(proto, folder)


def _write_lengths(graph: GraphProto) -> None:
    """Write into each external constant how many bytes it has in its file; without it, onnx reads the whole file.

    Raises ValueError where a constant states another number than its shape gives, also inside subgraphs.
    """
    for tensor in (*graph.initializer, *(t for node in graph.node for a in node.attribute for t in (a.t, *a.tensors))):
        if not uses_external_data(tensor):
            continue
        try:
            size, stated = _size(tensor), ExternalDataInfo(tensor).length
        except ValueError as error:
            raise ValueError(f"where constant {tensor.name!r} lies is no number: {error}") from None
        if ONNX_TYPES.get(tensor.data_type, "object") == "object":
            raise ValueError(f"constant {tensor.name!r} in another file has no elements of one size")
        if stated not in (None, size):
            raise ValueError(f"constant {tensor.name!r} takes {size} bytes, and has {stated} in another file")
        if stated is None:
            tensor.external_data.add(key="length", value=str(size))
    for subgraph in (g for node in graph.node for a in node.attribute for g in (a.g, *a.graphs)):
        _write_lengths(subgraph)


def read_small(proto: ModelProto, folder: str) -> None:
    """Read the constants that lie in other files, except large ones of a large model, which stay external.

    Raises ValueError and onnx's errors.
    """
    _write_lengths(proto.graph)
    sizes = [_size(tensor) for tensor in proto.graph.initializer]
    mapped = [tensor for tensor, size in zip(proto.graph.initializer, sizes) if size > ALWAYS_READ_BYTES]
    if sum(sizes) <= MIN_MAPPED_BYTES:
        mapped = []
    for tensor in mapped:  # onnx skips tensors at the default location
        tensor.data_location = TensorProto.DEFAULT
    load_external_data_for_model(proto, folder)
    for tensor in mapped:
        tensor.data_location = TensorProto.EXTERNAL


def _size(tensor: TensorProto) -> int:
    """Return the bytes of an external constant.

    0 for a constant inside the model, and for one of an impossible shape or type.
    """
    kind = ONNX_TYPES.get(tensor.data_type, "object")
    if not uses_external_data(tensor) or kind == "object" or any(size < 0 for size in tensor.dims):
        return 0
    return int(prod(tensor.dims)) * itemsize(kind)


def has_files(proto: ModelProto) -> bool:
    """Return whether a model that `read_small` has read still has constants in other files."""
    return any(map(uses_external_data, proto.graph.initializer))


def is_mapped(value: ir.Value | None) -> bool:
    """Return whether `value` is a constant that stays in another file, so that passes must not copy it."""
    return value is not None and isinstance(value.const_value, ir.ExternalTensor)


def check_file(tensor: TensorProto, folder: str) -> None:
    """Raise ValueError or OSError where the file of a constant lies outside of `folder` or is too short."""
    info, home = ExternalDataInfo(tensor), os.path.realpath(folder)
    path = os.path.realpath(os.path.join(home, info.location))
    if os.path.commonpath([home, path]) != home:
        raise ValueError(f"its file {info.location!r} lies outside of the model's folder")
    if not os.path.isfile(path):
        raise ValueError(f"there is no file {info.location!r} in the model's folder")
    mapped = _as_external(tensor)
    offset, size = int(info.offset or 0), os.path.getsize(path)
    if offset < 0 or offset + mapped.nbytes > size or int(info.length or mapped.nbytes) != mapped.nbytes:
        raise ValueError(
            f"it takes {mapped.nbytes} bytes, and the model gives it {info.length or 'those'} from {offset} on in "
            f"{info.location!r}, which has {size}"
        )
    mapped.base_dir = home
    mapped.numpy()  # raises where the file cannot be mapped


def _as_external(tensor: TensorProto) -> ir.ExternalTensor:
    """Convert an external constant to onnx-ir's tensor, which maps its file when its values are read."""
    mapped = ir.from_proto(tensor)
    assert isinstance(mapped, ir.ExternalTensor)
    return mapped


def attach(model: ir.Model, folder: str) -> None:
    """Set the folder in which the external constants of an imported graph lie."""
    ir.external_data.set_base_dir(model.graph, folder)


def make_external_constants_inputs(proto: ModelProto) -> None:
    """Turn external constants into inputs, in place: the ONNX checker would look for their files."""
    external = [tensor for tensor in proto.graph.initializer if uses_external_data(tensor)]
    if not external:
        return
    internal = [tensor for tensor in proto.graph.initializer if not uses_external_data(tensor)]
    del proto.graph.initializer[:]
    proto.graph.initializer.extend(internal)
    proto.graph.input.extend(
        onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims) for tensor in external
    )
