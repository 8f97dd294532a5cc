"""The operators of the CPU: a builder per ONNX operator, which returns tensor expressions.

Every builder takes a Node (operator, attributes, input tensors, constants) and returns its output tensors. compiler/cpu
schedules and compiles these expressions; operators without a builder run in numpy (program/host/hostops). In the order
in which to read:

  build (below)    checks types and indices around each builder; decides which operators compute bfloat16 or float16 in
                   float32
  registry         which element types kernels have; the nodes of a CPU function; Node, the table OPS, the decorator
                   `op` and helpers of builders; decides what counts as Unsupported, and which axis a negative
                   attribute `axis` is (`Node.axis`)
  elementwise      unary and binary operators, activations, Clip, Cast (an operator of one operand here becomes a table
                   on the accelerator by itself: graph/quantized/tables)
  shape            operators that move elements: Transpose, Concat, Slice, Pad, Gather, DepthToSpace, ...
  resize           Resize and Upsample as tables of indices and weights; their defaults in each opset
  reductions       Reduce*, ArgMax, TopK, CumSum; decides how integers are reduced
  normalisation    softmax and normalisation by means and variances, in onnxruntime's order of additions
  products         sliding windows (decides where padding is copied), float convolutions (decides between rows of
                   outputs and flattened planes), matrix products (decides whether the second matrix is packed)
  pooling          max and average pooling of floats and of bytes
  integer          integer convolutions and matrix products with zero points; decides the layout of their bytes by the
                   processor's dot-product instructions
  bit_serial       products of operands with 1 or 2 bits by `and` and population counts; decides which codes hold the
                   values of a tensor (BitLevels), and whether counting bits is faster
  quantized        QuantizeLinear and the QLinear operators; decides between integer and bit_serial (which float
                   operators become QLinear ones: graph/quantized/integerise)
  recurrent        RNN, GRU, LSTM as a scan over steps
  contrib          onnxruntime's fused operators, built of the operators that each replaces
  attention        MultiHeadAttention, Attention, QAttention, RotaryEmbedding and GroupQueryAttention of onnxruntime,
                   with masks and caches
  celosia_domain   our own operators: on images in channel blocks (graph/simplify/blocked_layout.py), sums of bytes in
                   blocks (graph/block_sums.py) and normalisation in integers (graph/quantized/rounded.py)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from celosia.compiler.expr import Expr, Tensor, compute
from celosia.compiler.expr.affine import interval
from celosia.compiler.expr.nodes import Load, Reduce, Select
from celosia.compiler.ops import (  # they fill the table
    attention,
    celosia_domain,
    contrib,
    elementwise,
    normalisation,
    pooling,
    products,
    quantized,
    recurrent,
    reductions,
    resize,
    shape,
)
from celosia.compiler.ops.registry import OPS, TYPES, Array, Node, Unsupported
from celosia.compiler.ops.shape import view_shape
from celosia.compiler.program.host import hostops
from celosia.compiler.program.op_spec import op_spec, operators_with

__all__ = [
    "OPS",
    "VIEWS",
    "Node",
    "Unsupported",
    "attention",
    "build",
    "celosia_domain",
    "contrib",
    "elementwise",
    "hostops",
    "normalisation",
    "op_spec",
    "operators_with",
    "pooling",
    "products",
    "quantized",
    "recurrent",
    "reductions",
    "resize",
    "shape",
    "view_shape",
]  # fmt: skip

VIEWS = operators_with("view")
"""Operators that only change the shape: their output may share the memory of their input."""


def build(
    op: str, attrs: dict[str, Any], inputs: Sequence[Tensor | None], values: Sequence[Array | None] | None = None,
    *, outputs: int = 1, opset: int = 21, name: str = "",
) -> tuple[Tensor, ...]:  # fmt: skip
    """Build one operator: return its outputs as expressions of its inputs (None where an optional one is left out).

    It checks types and indices around the builder of OPS, and computes bfloat16 (for some operators also float16) in
    float32. values: arrays of those inputs that are constant; see Node. outputs: number of outputs that are read.
    Raises Unsupported, naming operator and node.
    """
    if op not in OPS:
        raise Unsupported(f"{op}{f' {name!r}' if name else ''}: there is no such operator on the CPU")
    narrow = _narrow_float_type(op, inputs)  # "" where the operator computes in the types of its inputs
    result_is_narrow = narrow and (inputs[0] is None or inputs[0].dtype not in ("float32", "float64"))
    if narrow:
        inputs = [None if t is None else _cast_tensor(t, narrow, "float32") for t in inputs]
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
    if why := _out_of_bounds_complaint(built):
        raise node.fail(f"{why} (inputs {', '.join(str(list(t.shape)) for t in inputs if t is not None)})")
    return tuple(_cast_tensor(t, "float32", narrow) for t in built) if result_is_narrow else built


def _narrow_float_type(op: str, inputs: Sequence[Tensor | None]) -> str:
    """Return the 16-bit float type of inputs that `op` computes in float32: "float16" or "bfloat16"; "" for neither."""
    types = {t.dtype for t in inputs if t is not None}
    if "bfloat16" in types and op not in ("Cast", "CastLike"):
        return "bfloat16"
    return "float16" if "float16" in types and op_spec(op).rounded_once else ""


def _out_of_bounds_complaint(tensors: Iterable[Tensor]) -> str:
    """Return a sentence about a read outside of a tensor, as where shapes do not fit the operator; "" for none.

    It walks the expressions of `tensors` and of all that they read. Reads under a condition, or at indices known only
    at run time, are not checked: their builders keep them inside.
    """
    waiting, visited = list(tensors), set[Tensor]()
    while waiting:
        tensor = waiting.pop()
        if tensor in visited or tensor.body is None or not tensor.size:
            continue
        visited.add(tensor)
        for read in _unconditional_loads(tensor.body):
            waiting.append(read.tensor)
            flat = len(read.index) != len(read.tensor.shape)
            for index, size in zip(read.index, (read.tensor.size,) if flat else read.tensor.shape):
                span = interval(index)
                if span is not None and not 0 <= span[0] <= span[1] < size:
                    return f"{span[0]} to {span[1]} would be read of {size} elements"
    return ""


def _unconditional_loads(e: Expr) -> Iterator[Load]:
    """Yield the loads of `e` that are executed whatever the values are: not those in a branch of a Select."""
    if isinstance(e, Reduce) and any(not axis.extent for axis in e.axes):
        return
    if isinstance(e, Load):
        yield e
    for child in (e.cond,) if isinstance(e, Select) else e.children():
        yield from _unconditional_loads(child)


def _cast_tensor(tensor: Tensor, source: str, target: str) -> Tensor:
    """Convert a tensor of element type `source` to `target`; return tensors of other types unchanged."""
    if tensor.dtype != source:
        return tensor
    return compute(tensor.shape, lambda *i: tensor[i].astype(target), f"{tensor.name}_{target}")
