"""Definition of tensors: placeholder, compute, and reductions over axes.

>>> a, b = placeholder((4, 8), "float32", "a"), placeholder((8, 3), "float32", "b")
>>> k = reduce_axis(8, "k")
>>> c = compute((4, 3), lambda i, j: sum(a[i, k] * b[k, j], k), "c")
>>> print(c.body)
sum[k](a[i0, k] * b[k, i1])
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.expr.nodes import Axis, Expr, Reduce, Tensor, Value, wrap

Shape = tuple[int, ...]


def placeholder(shape: Shape, dtype: str, name: str) -> Tensor:
    """Declare an input array that the caller provides."""
    return Tensor(name, tuple(shape), dtype)


def constant(array: NDArray[Any], name: str) -> Tensor:
    """Declare a table that is part of the kernel."""
    return Tensor(name, array.shape, array.dtype.name, value=np.ascontiguousarray(array))


def compute(
    shape: Shape, body: Callable[..., Value], name: str, dtype: str | None = None, axes: tuple[str, ...] = ()
) -> Tensor:
    """Define the tensor whose element at `index` is body(*index).

    `dtype` is needed only where body returns a Python number. axes: names of the loops. Raises ValueError for a
    negative size, TypeError for another element type.
    """
    if any(n < 0 for n in shape):
        raise ValueError(f"{name} would have the shape {list(shape)}")
    names = axes or tuple(f"i{d}" for d in range(len(shape)))
    index = tuple(Axis(n, extent=extent) for n, extent in zip(names, shape, strict=True))
    value = body(*index)
    if not isinstance(value, Expr):
        if dtype is None:
            raise TypeError(f"{name}: the body is the number {value}; say its dtype")
        value = wrap(value, dtype)
    if dtype is not None and value.dtype != dtype:
        raise TypeError(f"{name}: the body is {value.dtype}, not {dtype}")
    return Tensor(name, tuple(shape), value.dtype, index, value)


def reduce_axis(extent: int, name: str) -> Axis:
    """Create an index to reduce over, for one compute. Raises ValueError for a negative extent."""
    if extent < 0:
        raise ValueError(f"{name} would have {extent} steps")
    return Axis(name, extent=extent, reduce=True)


def _reduce(kind: str, value: Expr, axes: Axis | tuple[Axis, ...]) -> Expr:
    axes = axes if isinstance(axes, tuple) else (axes,)
    for axis in axes:
        if not axis.reduce:
            raise ValueError(f"{kind} over {axis.name}, which is not a reduce_axis")
    return Reduce(kind, value, axes)


def sum(value: Expr, axes: Axis | tuple[Axis, ...]) -> Expr:
    """Sum `value` over `axes`. Floats may be added in any order; float16 is accumulated in float32."""
    if value.dtype == "float16":
        return _reduce("sum", value.astype("float32"), axes).astype("float16")
    return _reduce("sum", value, axes)


def ordered_sum(value: Expr, axes: Axis | tuple[Axis, ...]) -> Expr:
    """Sum `value` over `axes` one after the other, the last axis fastest, so that the float result is defined."""
    return _reduce("ordered_sum", value, axes)


def prod(value: Expr, axes: Axis | tuple[Axis, ...]) -> Expr:
    """Multiply `value` over `axes`."""
    return _reduce("prod", value, axes)


def max(value: Expr, axes: Axis | tuple[Axis, ...]) -> Expr:
    """Take the largest `value` over `axes`; NaN if there is one."""
    return _reduce("max", value, axes)


def min(value: Expr, axes: Axis | tuple[Axis, ...]) -> Expr:
    """Take the least `value` over `axes`; NaN if there is one."""
    return _reduce("min", value, axes)
