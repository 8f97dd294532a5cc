"""Refuse a model that this machine cannot hold, or a board cannot run, before any long work."""

from __future__ import annotations

from math import prod

import onnx_ir as ir

from celosia.compiler.graph.errors import ModelError
from celosia.compiler.graph.values import dtype_name, shape
from celosia.compiler.program import HostStep, Program
from celosia.compiler.program.dtypes import itemsize, numpy_dtype
from celosia.compiler.program.host.execute import needs_compiler
from celosia.compiler.program.host.op import HostError, check_size

MAX_RANK = 64
"""Axes of a numpy array."""


def require_memory(model: ir.Model) -> None:
    """Raise ModelError where one tensor alone is larger than this machine's memory, or has more axes than MAX_RANK."""
    graph = model.graph
    for value in (*graph.inputs, *(out for node in graph for out in node.outputs)):
        dims, node = shape(value), value.producer()
        if value.shape is not None and len(value.shape) > MAX_RANK:
            raise ModelError(
                f"tensor {value.name!r} has {len(value.shape)} dimensions, and no more than {MAX_RANK} can be; "
                "reshape it"
            )
        if dims is not None and value.dtype not in (None, ir.DataType.UNDEFINED):
            label = "" if node is None else f"{node.op_type} ({node.name or value.name})"
            description = f"{label}: output {value.name!r}" if label else f"input {value.name!r}"
            try:
                check_size(prod(dims) * itemsize(dtype_name(value)), f"{description} {list(dims)}")
            except HostError as error:
                raise ModelError(str(error)) from None


def require_numpy(program: Program) -> None:
    """Raise ModelError where a board, which has numpy and no compiler, cannot run `program`."""
    for step in program.steps:
        if isinstance(step, HostStep) and (reason := needs_compiler(step.op)):
            raise ModelError(f"{reason}; run the model on this machine, without --target")
    for tensor in (*program.tensors.values(), *program.inputs, *program.outputs):
        if numpy_dtype(tensor.dtype).isbuiltin == 2:
            raise ModelError(
                f"tensor {tensor.name!r} has element type {tensor.dtype}, which numpy on the board does not know; "
                "run the model on this machine, without --target"
            )
