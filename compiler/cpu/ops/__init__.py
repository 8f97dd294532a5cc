"""ONNX operators as tensor expressions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from celosia.compiler.cpu.ops import (  # they fill the table
    attention,
    averages,
    block_sums,
    blocked,
    contrib,
    convolution,
    elementwise,
    grouped,
    norm,
    normalisation,
    pooling,
    products,
    quantized,
    recurrent,
    reductions,
    resize,
    shape,
)
from celosia.compiler.cpu.ops.registry import OPS, Array, Node, Unsupported
from celosia.compiler.cpu.ops.shape import view_shape
from celosia.compiler.cpu.types import TYPES
from celosia.compiler.expr import Expr, Tensor, compute
from celosia.compiler.expr.affine import interval
from celosia.compiler.expr.nodes import Load, Reduce, Select
from celosia.compiler.program.host import hostops
from celosia.compiler.program.traits import operators_with, traits

__all__ = [
    "OPS",
    "VIEWS",
    "Node",
    "Unsupported",
    "attention",
    "averages",
    "block_sums",
    "blocked",
    "build",
    "contrib",
    "convolution",
    "elementwise",
    "grouped",
    "hostops",
    "norm",
    "normalisation",
    "operators_with",
    "pooling",
    "products",
    "quantized",
    "recurrent",
    "reductions",
    "resize",
    "shape",
    "traits",
    "view_shape",
]  # fmt: skip

VIEWS = operators_with("view")
"""Operators that only change the shape: their output may share the memory of their input."""


def build(
    op: str, attrs: dict[str, Any], inputs: Sequence[Tensor | None], values: Sequence[Array | None] | None = None,
    *, outputs: int = 1, opset: int = 21, name: str = "",
) -> tuple[Tensor, ...]:  # fmt: skip
    """The outputs of one operator as expressions of its inputs (None where an optional one is left out).

    `values` holds arrays for those inputs that are constant; see Node. Raises Unsupported, naming operator and node.
    """
    if op not in OPS:
        raise Unsupported(f"{op}{f' {name!r}' if name else ''}: there is no such operator on the CPU")
    narrow = _computed_wide(op, inputs)
    result_is_narrow = narrow and (inputs[0] is None or inputs[0].dtype not in ("float32", "float64"))
    if narrow:
        inputs = [None if t is None else _cast(t, narrow, "float32") for t in inputs]
    node = Node(op, attrs, tuple(inputs), tuple(values) if values else (None,) * len(inputs), outputs, opset, name)
    for number, tensor in enumerate(inputs):
        if tensor is not None and tensor.dtype not in TYPES:
            raise node.fail(f"input {number} has element type {tensor.dtype}")
    try:
        result = OPS[op](node)
    except Unsupported:
        raise
    except (TypeError, ValueError, ArithmeticError, LookupError) as e:  # attributes and shapes that do not fit
        raise node.fail(f"{e} (inputs {', '.join(str(list(t.shape)) for t in inputs if t is not None)})") from e
    built = (result,) if isinstance(result, Tensor) else tuple(result)
    if len(built) < outputs:
        raise node.fail(f"output {len(built)}")
    if why := _outside(built):
        raise node.fail(f"{why} (inputs {', '.join(str(list(t.shape)) for t in inputs if t is not None)})")
    return tuple(_cast(t, "float32", narrow) for t in built) if result_is_narrow else built


def _computed_wide(op: str, inputs: Sequence[Tensor | None]) -> str:
    """The type of those inputs that `op` takes as float32; "" where there are none."""
    types = {t.dtype for t in inputs if t is not None}
    if "bfloat16" in types and op not in ("Cast", "CastLike"):
        return "bfloat16"
    return "float16" if "float16" in types and traits(op).wide else ""


def _outside(tensors: Iterable[Tensor]) -> str:
    """What these tensors read outside of another, whose shape does not fit the operator; "" where nothing.

    Reads under a condition, and at places that are known at run time only, are their builders' to keep inside.
    """
    waiting, seen = list(tensors), set[Tensor]()
    while waiting:
        tensor = waiting.pop()
        if tensor in seen or tensor.body is None or not tensor.size:
            continue
        seen.add(tensor)
        for read in _reads(tensor.body):
            waiting.append(read.tensor)
            flat = len(read.index) != len(read.tensor.shape)
            for index, size in zip(read.index, (read.tensor.size,) if flat else read.tensor.shape):
                span = interval(index)
                if span is not None and not 0 <= span[0] <= span[1] < size:
                    return f"{span[0]} to {span[1]} would be read of {size} elements"
    return ""


def _reads(e: Expr) -> Iterator[Load]:
    """Loads that happen whatever the values are."""
    if isinstance(e, Reduce) and any(not axis.extent for axis in e.axes):
        return
    if isinstance(e, Load):
        yield e
    for child in (e.cond,) if isinstance(e, Select) else e.children():
        yield from _reads(child)


def _cast(tensor: Tensor, source: str, target: str) -> Tensor:
    if tensor.dtype != source:
        return tensor
    return compute(tensor.shape, lambda *i: tensor[i].astype(target), f"{tensor.name}_{target}")
