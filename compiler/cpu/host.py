"""The host runtime: operators that are no loops, or whose shapes are known only once they run.

`HostOp` is one parsed ONNX operator, with its subgraphs as `Body`. `execute` runs it on arrays: through a kernel made
for the shapes at hand where the operator is a tensor expression, else through the numpy function of `hostops.HOST`.
A value is an array, a list (sequence), or None (an empty optional).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from numpy.typing import NDArray

from celosia.compiler.cpu.function import InputType, compile_op
from celosia.compiler.cpu.functions import TYPES
from celosia.compiler.cpu.kernel import Kernel
from celosia.compiler.cpu.ops import OPS, Unsupported

Array = NDArray[Any]
Value = Any
"""An array, a list of values (a sequence), or None (an empty optional)."""
DOMAINS = ("", "ai.onnx", "com.microsoft", "celosia")
"""Domains whose operators cpu.OPS holds."""


class HostError(ValueError):
    """An operator that cannot run on the values it got; the message names the node."""


SHAPE_INPUTS: dict[str, tuple[int, ...]] = {
    "Reshape": (1,), "Squeeze": (1,), "Unsqueeze": (1,), "Slice": (1, 2, 3, 4), "Split": (1,), "Pad": (1, 3),
    "Expand": (1,), "Tile": (1,), "OneHot": (1,), "ConstantOfShape": (0,), "Range": (0, 1, 2), "Resize": (1, 2, 3),
    "Upsample": (1,), "Dropout": (2,),
    **{f"Reduce{kind}": (1,) for kind in (
        "Sum", "Mean", "Max", "Min", "Prod", "L1", "L2", "LogSum", "LogSumExp", "SumSquare")},
}  # fmt: skip
"""Inputs whose values a kernel's code depends on: where they are not constants, the kernel is made at run time."""

MOVES = frozenset((
    "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Transpose", "Slice", "Split", "Concat", "Expand", "Tile",
    "Gather", "GatherElements", "GatherND", "DepthToSpace", "SpaceToDepth", "Where", "ReverseSequence",
))  # fmt: skip
"""Operators that only move elements: they work on any element type, by moving positions."""


@dataclass(frozen=True)
class HostOp:
    """One operator. `key` tells operators with the same attributes apart from others; `opset` is of its domain."""

    op: str
    domain: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: dict[str, Any]
    opset: int
    key: bytes

    def attr(self, name: str, default: Any = None) -> Any:
        return self.attrs.get(name, default)

    def fail(self, why: str) -> HostError:
        return HostError(f"{self.op} ({self.name or next(filter(None, self.outputs), '')}): {why}")

    @property
    def wanted(self) -> int:
        return len(self.outputs)


@dataclass(frozen=True)
class Body:
    """A subgraph: what it takes, constants, operators in order, what it returns, and what it reads from outside."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    constants: dict[str, Array] = field(repr=False)
    ops: tuple[HostOp, ...]
    captured: tuple[str, ...]

    def run(self, args: Sequence[Value], outer: Mapping[str, Value]) -> list[Value]:
        values = {name: outer[name] for name in self.captured} | self.constants
        values |= dict(zip(self.inputs, args))
        for op in self.ops:
            values |= zip(op.outputs, execute(op, values))
        return [values[name] for name in self.outputs]


# Parsing --------------------------------------------------------------------------------------------------------


def parse(node: onnx.NodeProto, opsets: Mapping[str, int]) -> HostOp:
    """The operator that `node` describes, with its subgraphs. opsets: version of each domain."""
    attrs = {attr.name: _attribute(attr, opsets) for attr in node.attribute}
    key = b"".join(sorted(attr.SerializeToString(deterministic=True) for attr in node.attribute))
    domain = "" if node.domain == "ai.onnx" else node.domain
    return HostOp(
        node.op_type, domain, node.name, tuple(node.input), tuple(node.output), attrs, opsets.get(domain, 1), key
    )


def _attribute(attr: onnx.AttributeProto, opsets: Mapping[str, int]) -> Any:
    value = onnx.helper.get_attribute_value(attr)
    match attr.type:
        case onnx.AttributeProto.STRING:
            return value.decode()
        case onnx.AttributeProto.STRINGS:
            return [each.decode() for each in value]
        case onnx.AttributeProto.TENSOR:
            return to_array(value)
        case onnx.AttributeProto.TENSORS:
            return [to_array(each) for each in value]
        case onnx.AttributeProto.GRAPH:
            return parse_body(value, opsets)
        case onnx.AttributeProto.GRAPHS:
            return [parse_body(each, opsets) for each in value]
        case onnx.AttributeProto.SPARSE_TENSOR:
            return dense(value)
        case onnx.AttributeProto.FLOATS | onnx.AttributeProto.INTS:
            return list(value)
    return value


def parse_body(graph: onnx.GraphProto, opsets: Mapping[str, int]) -> Body:
    inputs = tuple(value.name for value in graph.input)
    outputs = tuple(value.name for value in graph.output)
    constants = {tensor.name: to_array(tensor) for tensor in graph.initializer}
    constants |= {tensor.values.name: dense(tensor) for tensor in graph.sparse_initializer}
    ops = tuple(parse(node, opsets) for node in graph.node)
    known = {"", *inputs, *constants}
    captured: dict[str, None] = {}
    for op in ops:
        read = [*op.inputs, *(name for body in bodies(op) for name in body.captured)]
        captured |= dict.fromkeys(name for name in read if name not in known)
        known |= set(op.outputs)
    captured |= dict.fromkeys(name for name in outputs if name not in known)
    return Body(inputs, outputs, constants, ops, tuple(captured))


def bodies(op: HostOp) -> Iterable[Body]:
    """The subgraphs of `op`."""
    for value in op.attrs.values():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, Body):
                yield each


def to_array(tensor: onnx.TensorProto) -> Array:
    """The array of a tensor; strings as an object array of str."""
    array = np.asarray(onnx.numpy_helper.to_array(tensor))
    if tensor.data_type == onnx.TensorProto.STRING:
        texts = [each.decode() if isinstance(each, bytes) else str(each) for each in array.reshape(-1)]
        array = np.array(texts, object).reshape(array.shape)
    return array


def dense(tensor: onnx.SparseTensorProto) -> Array:
    """The array of a sparse tensor, whose indices are positions or coordinates."""
    values, indices = to_array(tensor.values), to_array(tensor.indices)
    shape = tuple(tensor.dims)
    check_size(prod(shape) * values.itemsize, "a sparse tensor")
    array = np.zeros(prod(shape), values.dtype)
    array[indices if indices.ndim == 1 else np.ravel_multi_index(tuple(indices.T), shape)] = values
    return array.reshape(shape)


def memory_bytes() -> int:
    """Bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_size(size: int, what: str) -> None:
    """HostError where `size` bytes are more than this machine has."""
    if size > memory_bytes():
        raise HostError(f"{what} takes {size} bytes, more than this machine's memory")


# Running --------------------------------------------------------------------------------------------------------


def execute(op: HostOp, values: Mapping[str, Value]) -> list[Value]:
    """The outputs of `op`, given what its inputs (and its subgraphs' captured values) are. Raises HostError."""
    from celosia.compiler.cpu.hostops import FIRST, HOST

    args = [values[name] if name else None for name in op.inputs]
    function = HOST.get((op.domain, op.op))
    try:
        if op.domain in DOMAINS and op.op in OPS and op.op not in FIRST:
            try:
                return _by_kernel(op, args)
            except Unsupported:
                if function is None:
                    raise
        if function is None:
            raise op.fail("there is no such operator" + (f" in domain {op.domain!r}" if op.domain else ""))
        result = function(op, *args) if not any(bodies(op)) else function(op, *args, outer=values)
    except HostError:
        raise
    except MemoryError:
        raise op.fail("there is not enough memory") from None
    except Exception as error:  # numpy's errors for impossible shapes, of many classes
        raise op.fail(f"{error} (inputs {', '.join(map(describe, args))})") from error
    results = list(result) if isinstance(result, tuple) else [result]
    if len(results) < op.wanted:
        raise op.fail(f"it has no output {len(results)}")
    return [np.asarray(r, order="C") if isinstance(r, (np.ndarray, np.generic)) else r for r in results]


def describe(value: Value) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{list(value.shape)}"
    return "none" if value is None else f"a sequence of {len(value)}"


def _by_kernel(op: HostOp, args: list[Value]) -> list[Value]:
    if any(isinstance(arg, list) for arg in args):
        raise Unsupported(f"{op.op}: a sequence")
    odd = [arg for arg in args if arg is not None and arg.dtype.name not in TYPES]
    if odd and op.op in MOVES:
        return _move(op, args)
    if odd and all(arg.dtype == ml_dtypes.bfloat16 for arg in odd) and not op.op.startswith(("Cast", "Quant", "Dequ")):
        wide = [None if a is None else a.astype(np.float32) if a.dtype == ml_dtypes.bfloat16 else a for a in args]
        results = _by_kernel(op, wide)
        return [r.astype(ml_dtypes.bfloat16) if r.dtype == np.float32 else r for r in results]
    return kernel(op, args)(*(arg for arg in args if arg is not None))


def _move(op: HostOp, args: list[Value]) -> list[Value]:
    """Any elements, moved by way of their positions in one list of all."""
    places: list[Value] = []
    start = 0
    pool: list[Array] = []
    for arg in args:
        if arg is None or arg.dtype.name in TYPES:
            places.append(arg)
            continue
        places.append(np.arange(start, start + arg.size, dtype=np.int64).reshape(arg.shape))
        pool.append(arg.reshape(-1))
        start += arg.size
    elements = np.concatenate(pool)
    return [elements[place] for place in _by_kernel(op, places)]


_kernels: dict[Any, Kernel] = {}
MAX_KERNELS = 4096
"""Kernels held for shapes seen at run time, before all are dropped."""


def kernel(op: HostOp, args: Sequence[Array | None]) -> Kernel:
    """A kernel of `op` for arrays like these, kept for the next time. Raises Unsupported."""
    fixed = SHAPE_INPUTS.get(op.op, ())
    types = tuple(None if a is None else (a.shape, a.dtype.name) for a in args)
    values = tuple(a.tobytes() if a is not None and i in fixed else None for i, a in enumerate(args))
    key = (op.op, op.domain, op.opset, op.key, op.wanted, types, values)
    if key not in _kernels:
        if len(_kernels) >= MAX_KERNELS:
            _kernels.clear()
        inputs = [
            None if a is None else InputType(a.shape, a.dtype.name, a if i in fixed else None)
            for i, a in enumerate(args)
        ]
        made = compile_op(op.op, op.attrs, inputs, outputs=op.wanted, opset=op.opset, name=op.name)
        for dtype, shape in made.outputs:
            check_size(prod(shape) * np.dtype(dtype).itemsize, f"{op.op} ({op.name}): the output {list(shape)}")
        _kernels[key] = made
    return _kernels[key]
