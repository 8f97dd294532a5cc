"""Tensors, axes and reductions by TVM's names, whose sizes may be variables.

Nodes are those of compiler.expr, which have fixed sizes. A variable size has the value NOMINAL for now, so that
mistakes are found in the line that makes them; `bind_sizes` copies the nodes when sizes are known.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from celosia.compiler.expr.affine import interval, linear
from celosia.compiler.expr.interpret import evaluate
from celosia.compiler.expr.nodes import (
    INDEX,
    Axis,
    Const,
    Expr,
    Load,
    Reduce,
    Select,
    Value,
    Var,
    rewrite,
    topological,
    walk,
    wrap,
)
from celosia.compiler.expr.nodes import Tensor as Node
from celosia.compiler.expr.tensor import max as max_over
from celosia.compiler.expr.tensor import min as min_over
from celosia.compiler.expr.tensor import sum as sum_over
from celosia.compiler.program.dtypes import numpy_dtype

Size = int | Expr
"""A number, or an expression of variables."""
NOMINAL = 1 << 10
"""Size that a variable stands for until it is known."""
_numbers = count()
"""Numbers for names of tensors and axes that the program does not name."""


@dataclass(frozen=True, eq=False)
class SizedAxis(Axis):
    """An axis whose extent may be a variable. size: the extent as the program wrote it."""

    size: Size = 1


@dataclass(frozen=True, eq=False)
class SizedNode(Node):
    """A tensor whose shape may have variables. sizes: the shape as the program wrote it."""

    sizes: tuple[Size, ...] = ()


class TensorExpr:
    """A tensor as programs for TVM use it.

    `t[i, j]` or `t(i, j)` is an element, `t.shape` the sizes, `t.op.axis` and `t.op.reduce_axis` the loops before they
    are scheduled. node: the tensor in compiler.expr.
    """

    def __init__(self, node: Node) -> None:
        self.node = node
        self.name, self.dtype = node.name, node.dtype
        self.shape: tuple[Size, ...] = node.sizes if isinstance(node, SizedNode) else node.shape

    def __getitem__(self, index: Any) -> Expr:
        indices = index if isinstance(index, tuple) else (index,)
        return self.node[tuple(_convert_index(self.name, position) for position in indices)]

    def __call__(self, *index: Value) -> Expr:
        """Return the element at `index`."""
        return self[index]

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(map(str, self.shape))}): {self.dtype}"

    @property
    def op(self) -> TensorExpr:
        """The operation that computes the tensor, in TVM an object of its own; here the tensor itself."""
        return self

    @property
    def axis(self) -> tuple[Axis, ...]:
        """Axes of the elements."""
        return self.node.axes

    @property
    def reduce_axis(self) -> tuple[Axis, ...]:
        """Axes of the reductions in the body."""
        return tuple(_reduction_axes(self.node.body))


def _reduction_axes(body: Expr | None) -> list[Axis]:
    """Return the axes of all reductions in a body, each once."""
    nodes = () if body is None else walk(body)
    return list(dict.fromkeys(axis for node in nodes if isinstance(node, Reduce) for axis in node.axes))


def _convert_index(name: str, index: Any) -> Value:
    """Convert an index of any integer type to the type of indices. ValueError for other types. name: the tensor's."""
    if isinstance(index, Expr):
        if index.dtype != INDEX and not index.dtype.startswith(("int", "uint")):
            raise ValueError(f"{name} is indexed with {index}, a {index.dtype}; an index is a whole number")
        return index.astype(INDEX)
    return _require_whole_number(index, f"{name} is indexed with {index!r}")


def _require_whole_number(value: Any, name: str) -> int:
    """Return `value`, of any integer type, as an int. ValueError for other types; `name` begins its message."""
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{name}: that is a whole number, or made of variables and axes") from None


def var(name: str = "n", dtype: str = "int64") -> Var:
    """Declare a size that is known when arrays are given. ValueError for a type that no size has."""
    if dtype not in ("int32", "int64"):
        raise ValueError(f"{name} is a size, and no {dtype}; a number that the program brings is a placeholder of (1,)")
    return Var(name)


def evaluate_size(size: Size, sizes: Mapping[Var, int] | None = None) -> int:
    """Evaluate a size. ValueError for a variable that `sizes` does not have.

    sizes: values of the variables in it; None takes NOMINAL for each, so that shapes can be checked before any array is
    given.
    """
    if not isinstance(size, Expr):
        return int(size)
    variables = {node for node in walk(size) if isinstance(node, Var)}
    values: Mapping[Var, int] = dict.fromkeys(variables, NOMINAL) if sizes is None else sizes
    if unknown := [name.name for name in variables if name not in values]:
        raise ValueError(
            f"the size {unknown[0]} is not known: no array that is given has it as a dimension; make the variable an "
            "argument, too"
        )
    return int(evaluate(size, {name: values[name] for name in variables}))


def _convert_shape(name: str, shape: Size | Sequence[Size]) -> tuple[Size, ...]:
    """Return a shape argument as a tuple of sizes. ValueError for sizes that are no whole numbers, or negative."""
    dimensions = tuple(shape) if isinstance(shape, Sequence) else (shape,)
    sizes = tuple(
        size if isinstance(size, Expr) else _require_whole_number(size, f"{name} has a size of {size!r}")
        for size in dimensions
    )
    if any(evaluate_size(size) < 0 for size in sizes):
        raise ValueError(f"{name} would have the shape {[evaluate_size(size) for size in sizes]}")
    return sizes


def _dtype_name(name: str, dtype: Any) -> str:
    """Return the name of an element type, given by its name or numpy's type. ValueError for anything else."""
    try:
        return numpy_dtype(dtype).name if isinstance(dtype, str) else np.dtype(dtype).name
    except (TypeError, AttributeError, ImportError):
        raise ValueError(f"{name} has the type {dtype!r}, which is none; take one such as float32 or int8") from None


def placeholder(shape: Size | Sequence[Size], dtype: Any = "float32", name: str | None = None) -> TensorExpr:
    """Declare an input tensor: an array that the caller gives. dtype: a name, or numpy's type."""
    name = name or f"placeholder{next(_numbers)}"
    sizes = _convert_shape(name, shape)
    nominal = tuple(evaluate_size(size) for size in sizes)
    return TensorExpr(SizedNode(name, nominal, _dtype_name(name, dtype), sizes=sizes))


def reduce_axis(dom: tuple[Size, Size], name: str | None = None) -> Axis:
    """Declare an axis to reduce over, for one `compute`. dom: (0, end). ValueError for another begin."""
    begin, end = dom
    name = name or f"r{next(_numbers)}"
    if isinstance(begin, Expr) or begin != 0:
        raise ValueError(f"{name} begins at {begin}, not at 0: add {begin} where it is used")
    if evaluate_size(end) < 0:
        raise ValueError(f"{name} would have {end} steps")
    return SizedAxis(name, extent=evaluate_size(end), reduce=True, size=end)


def compute(shape: Size | Sequence[Size], fcompute: Callable[..., Value], name: str | None = None) -> TensorExpr:
    """Declare the tensor whose element at an index is `fcompute` of the index.

    Its axes have the names of the parameters of `fcompute`. ValueError where their number differs from that of sizes.
    """
    name = name or f"compute{next(_numbers)}"
    sizes = _convert_shape(name, shape)
    parameters = inspect.signature(fcompute).parameters.values()
    names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        names += [f"i{d}" for d in range(len(names), len(sizes))]
    if len(names) != len(sizes):
        raise ValueError(f"{name} has {len(sizes)} dimensions, and its function {len(names)} parameters")
    axes = tuple(SizedAxis(name, extent=evaluate_size(size), size=size) for name, size in zip(names, sizes))
    body = _element_expression(name, fcompute(*axes))
    return TensorExpr(SizedNode(name, tuple(axis.extent for axis in axes), body.dtype, axes, body, sizes=sizes))


def _element_expression(name: str, value: Any) -> Expr:
    """Return the result of a program's `fcompute` as an expression.

    ValueError for other types, and for constants out of range.
    """
    if not isinstance(value, Expr | int | float | np.generic):
        raise ValueError(
            f"{name} is made of elements, and its function gives {type(value).__name__}: index tensors, and make a "
            "tensor of each of several results"
        )
    body = wrap(value.item() if isinstance(value, np.generic) else value, "float32")
    for node in walk(body):
        if isinstance(node, Const) and np.dtype(node.dtype).kind in "iu":
            limits = np.iinfo(node.dtype)
            if not limits.min <= node.value <= limits.max:
                raise ValueError(f"{name}: {node.value} is no {node.dtype}; cast what it meets to a wider type")
    return body


Axes = Axis | Sequence[Axis]
"""One axis or several to reduce over."""


def _as_axes(axis: Axes) -> tuple[Axis, ...]:
    """Return one axis or several as a tuple."""
    return (axis,) if isinstance(axis, Axis) else tuple(axis)


def sum(expr: Expr, axis: Axes) -> Expr:
    """Return the sum of `expr` over `axis`; floats are added in any order."""
    return sum_over(expr, _as_axes(axis))


def max(expr: Expr, axis: Axes) -> Expr:
    """Return the maximum of `expr` over `axis`."""
    return max_over(expr, _as_axes(axis))


def min(expr: Expr, axis: Axes) -> Expr:
    """Return the minimum of `expr` over `axis`."""
    return min_over(expr, _as_axes(axis))


# Sizes become known ---------------------------------------------------------------------------------------------


def bind_sizes(outputs: Sequence[Node], sizes: Mapping[Var, int]) -> dict[Node, Node]:
    """Copy each tensor that `outputs` depend on, with `sizes` in place of variables; return the copy of each.

    ValueError for an open or negative size, and for an index that leaves its tensor.
    """
    copies: dict[Node, Node] = {}
    for node in topological(outputs):
        assert isinstance(node, SizedNode)
        shape = tuple(evaluate_size(size, sizes) for size in node.sizes)
        if any(extent < 0 for extent in shape):
            raise ValueError(f"{node.name} would have the shape {list(shape)}")
        if node.body is None:
            copies[node] = Node(node.name, shape, node.dtype)
            continue
        loops = {axis: _bind_axis(axis, sizes) for axis in (*node.axes, *_reduction_axes(node.body))}
        body = _bind_body(node.body, copies, loops, sizes)
        copies[node] = Node(node.name, shape, node.dtype, tuple(loops[axis] for axis in node.axes), body)
        _require_inside(copies[node].name, body)
    return copies


def _bind_axis(axis: Axis, sizes: Mapping[Var, int]) -> Axis:
    """Copy an axis, with `sizes` in place of variables."""
    assert isinstance(axis, SizedAxis)
    return Axis(axis.name, extent=evaluate_size(axis.size, sizes), reduce=axis.reduce)


def _bind_body(
    body: Expr, copies: Mapping[Node, Node], loops: Mapping[Axis, Axis], sizes: Mapping[Var, int]
) -> Expr:  # fmt: skip
    """Copy the body of a tensor with `copies` of tensors, `loops` for axes, and `sizes` for variables."""

    def replace_node(e: Expr) -> Expr | None:
        """Return the copy of an axis, variable, load or reduction; None for other nodes, which `rewrite` copies."""
        match e:
            case Axis():
                return loops[e]
            case Var():
                return Const(evaluate_size(e, sizes), INDEX)
            case Load():
                return Load(copies[e.tensor], e.index)
            case Reduce():
                return Reduce(e.kind, e.value, tuple(loops[axis] for axis in e.axes))
        return None

    return rewrite(body, replace_node)


def _require_inside(name: str, body: Expr) -> None:
    """Raise ValueError where an index certainly leaves its tensor, unless a Select may not use that value."""
    if isinstance(body, Select):
        return
    for child in body.children():
        _require_inside(name, child)
    if not isinstance(body, Load):
        return
    for dimension, (index, size) in enumerate(zip(body.index, body.tensor.shape)):
        is_exact = all(atom is None or (isinstance(atom, Axis) and atom.extent) for atom in linear(index))
        index_range = interval(index) if is_exact and size else None
        if index_range is None:
            continue
        first, last = index_range
        if first < 0 or last >= size:
            raise ValueError(
                f"{name} reads {body.tensor.name} at {first} to {last} of dimension {dimension}, which has {size}: "
                f"{body}"
            )
