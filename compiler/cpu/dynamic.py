"""Kernels that are compiled when a Program runs, for shapes that are known only then."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.cpu.function import compile_op
from celosia.compiler.ops import OPS, Unsupported, op_spec, operators_with
from celosia.compiler.ops.registry import TYPES, InputType
from celosia.compiler.program.dtypes import itemsize
from celosia.compiler.program.host.kernel import CompiledKernel
from celosia.compiler.program.host.op import DOMAINS, HostOp, Value, check_size
from celosia.compiler.program.op_spec import Moves
from celosia.compiler.target import compiling_for

Array = NDArray[Any]

ELEMENT_MOVERS = operators_with("moves", Moves.ALL, Moves.SOME, Moves.JOIN)
"""Operators that only move elements, so that they run for any element type on element numbers."""


def has_kernel(op: HostOp) -> bool:
    """Return whether `op` is defined as a tensor expression."""
    return op.domain in DOMAINS and op.op in OPS


def run_kernel(op: HostOp, args: list[Value]) -> list[Value]:
    """Compute the outputs of `op` with a compiled kernel. Raises Unsupported where no kernel can compute them."""
    if any(isinstance(arg, list) for arg in args):
        raise Unsupported(f"{op.op}: a sequence")
    has_other_type = any(arg is not None and arg.dtype.name not in TYPES for arg in args)
    if has_other_type and op.op in ELEMENT_MOVERS:
        return _run_on_positions(op, args)
    return cached_kernel(op, args)(*(arg for arg in args if arg is not None))


def _run_on_positions(op: HostOp, args: list[Value]) -> list[Value]:
    """Run an operator that moves elements of types that kernels lack, such as strings.

    A kernel moves the numbers of the elements; then the elements with these numbers are gathered.
    """
    positions: list[Value] = []
    start = 0
    element_arrays: list[Array] = []
    for arg in args:
        if arg is None or arg.dtype.name in TYPES:
            positions.append(arg)
            continue
        positions.append(np.arange(start, start + arg.size, dtype=np.int64).reshape(arg.shape))
        element_arrays.append(arg.reshape(-1))
        start += arg.size
    elements = np.concatenate(element_arrays)
    return [elements[moved] for moved in run_kernel(op, positions)]


_kernels: dict[Any, CompiledKernel] = {}
"""Kernels that were compiled in this process, by operator, types, and values of shape inputs."""
MAX_KERNELS = 4096
"""Limit of the cached kernels; beyond it all are dropped."""


def cached_kernel(op: HostOp, args: Sequence[Array | None]) -> CompiledKernel:
    """Return a kernel of `op` for the shapes and types of `args`, compiled the first time. Raises Unsupported.

    The values of inputs that determine shapes are part of the kernel.
    """
    shape_inputs = op_spec(op.op).shape_inputs
    types = tuple(None if a is None else (a.shape, a.dtype.name) for a in args)
    values = tuple(a.tobytes() if a is not None and i in shape_inputs else None for i, a in enumerate(args))
    key = (op.op, op.domain, op.opset, op.key, op.wanted, types, values)
    if key not in _kernels:
        if len(_kernels) >= MAX_KERNELS:
            _kernels.clear()
        inputs = [
            None if a is None else InputType(a.shape, a.dtype.name, a if i in shape_inputs else None)
            for i, a in enumerate(args)
        ]
        with compiling_for(None):  # for this processor, even where the Program is for another
            compiled = compile_op(op.op, op.attrs, inputs, outputs=op.wanted, opset=op.opset, name=op.name)
        for dtype, shape in compiled.outputs:
            check_size(prod(shape) * itemsize(dtype), f"{op.label}: the output {list(shape)}")
        _kernels[key] = compiled
    return _kernels[key]
