"""Constants in files beside the model's. Large ones are mapped: only what is read of them takes memory.

The model keeps their names, types and shapes; `attach` gives the imported graph the way to their files.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import prod

import onnx
import onnx_ir as ir
from onnx import ModelProto, TensorProto
from onnx.external_data_helper import ExternalDataInfo, load_external_data_for_model, uses_external_data

from celosia.compiler.dtypes import ONNX_TYPES, itemsize

SMALL = 1 << 16
"""Bytes of constants that are read into the model: shapes may depend on what they hold."""


@dataclass(frozen=True)
class Origin:
    """What to call a model, and the folder where the files lie that it names; "" for a model that is no file."""

    name: str
    folder: str = ""

    def __str__(self) -> str:
        return self.name


def read_small(proto: ModelProto, folder: str) -> None:
    """Read into `proto` what it has in other files, but for large constants of the graph. Raises onnx's errors."""
    large = [tensor for tensor in proto.graph.initializer if _is_large(tensor)]
    for tensor in large:  # so that onnx passes them by
        tensor.data_location = TensorProto.DEFAULT
    load_external_data_for_model(proto, folder)
    for tensor in large:
        tensor.data_location = TensorProto.EXTERNAL


def has_files(proto: ModelProto) -> bool:
    """Whether large constants of a model that `read_small` has seen lie in other files."""
    return any(map(uses_external_data, proto.graph.initializer))


def _is_large(tensor: TensorProto) -> bool:
    kind = ONNX_TYPES.get(tensor.data_type, "object")
    if not uses_external_data(tensor) or kind == "object" or any(size < 0 for size in tensor.dims):
        return False
    return bool(prod(tensor.dims) * itemsize(kind) > SMALL)


def check_file(tensor: TensorProto, folder: str) -> None:
    """ValueError or OSError where the file of a large constant lies outside of `folder`, or has not all its bytes."""
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
