"""Definition of tensors: placeholder, compute, and reductions over axes.

>>> a, b = placeholder((4, 8), "float32", "a"), placeholder((8, 3), "float32", "b")
>>> k = reduce_axis(8, "k")
>>> c = compute((4, 3), lambda i, j: sum(a[i, k] * b[k, j], k), "c")
>>> print(c.body)
sum[k](a[i0, k] * b[k, i1])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.expr.nodes import (
    INDEX,
    Axis,
    Const,
    Expr,
    Load,
    Reduce,
    Scan,
    Tensor,
    Value,
    depends_on,
    loads,
    redirect_loads,
    topological,
    wrap,
)

Shape = tuple[int, ...]
"""Extents of a tensor's dimensions."""


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
    """Build a Reduce. Raises ValueError for an axis that `reduce_axis` did not create."""
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


Step = Callable[[Axis, tuple[Tensor, ...]], Sequence[Tensor]]
"""Function of (number of the step, states before it) that returns the states after it."""


def scan(steps: int, initial: Sequence[Tensor], step: Step, name: str) -> Tensor:
    """Build the tensor of all states of a recurrence: element [s, t, ...] is state s before step t, t <= `steps`.

    initial: the states before the first step, of one shape and type. step(t, states): the states after step t, as
    tensors. Tensors that depend neither on t nor on a state are computed once, before the first step. Raises ValueError
    where a step changes shapes or types, or contains a scan that depends on it.

    >>> from celosia.compiler.expr import interpret, lower
    >>> import numpy as np
    >>> x = placeholder((4,), "int32", "x")
    >>> start = placeholder((), "int32", "start")
    >>> sums = scan(4, [start], lambda t, s: [compute((), lambda: s[0][()] + x[t], "next")], "sums")
    >>> print(lower(sums))
    sums(start: int32[], x: int32[4]) -> (sums: int32[1, 5]):
      for i in 1:
        sums[i] = start[i]
      ordered t in 4:
        sums[(t + 1)] = (sums[t] + x[t])
    >>> interpret(lower(sums), np.int32(10), np.arange(4, dtype=np.int32))[0].tolist()
    [[10, 10, 11, 13, 16]]
    """
    if steps < 0 or not initial:
        raise ValueError(f"{name} would have {steps} steps of {len(initial)} states")
    axis = Axis("t", extent=steps)
    states = tuple(placeholder(s.shape, s.dtype, f"{name}_{n}") for n, s in enumerate(initial))
    updates = tuple(step(axis, states))
    kinds = [(t.shape, t.dtype) for t in (*states, *updates)]
    if len(updates) != len(states) or len(set(kinds)) > 1:
        raise ValueError(f"{name}: states {kinds[: len(states)]} become {kinds[len(states) :]}")
    inside = _step_dependent(updates, axis, states)
    copied = tuple(
        compute(u.shape, lambda *i, u=u: u[i], u.name) if u not in inside or u in states or u in updates[:n] else u
        for n, u in enumerate(updates)
    )
    inside |= set(copied)
    order = [tensor for tensor in topological(copied) if tensor in inside and tensor not in states]
    read = [load.tensor for tensor in order for load in loads(_body(tensor))]
    outside = [tensor for tensor in dict.fromkeys(read) if tensor not in inside and tensor.value is None]
    inputs = tuple(placeholder(tensor.shape, tensor.dtype, tensor.name) for tensor in outside)
    replacements = dict(zip(outside, inputs))
    for tensor in order:
        replacements[tensor] = replace(tensor, body=redirect_loads(_body(tensor), replacements))
    body = Scan(
        axis,
        states,
        inputs,
        tuple(replacements[u] for u in copied),
        tuple(map(_first_element, initial)),
        tuple(map(_first_element, outside)),
    )
    shape = (len(states), steps + 1, *states[0].shape)
    axes = tuple(Axis(f"i{d}", extent=extent) for d, extent in enumerate(shape))
    return Tensor(name, shape, body.dtype, axes, body)


def _step_dependent(updates: Sequence[Tensor], axis: Axis, states: Sequence[Tensor]) -> set[Tensor]:
    """Return the tensors that depend on the step or on a state, so that each step must compute them, and the states.

    Raises ValueError for a scan among them.
    """
    inside = set(states)
    for tensor in topological(updates):
        if tensor.body is None:
            continue
        if depends_on(tensor.body, axis) or any(load.tensor in inside for load in loads(tensor.body)):
            if isinstance(tensor.body, Scan):
                raise ValueError(f"{tensor.name} is a scan inside a step of another")
            inside.add(tensor)
    return inside


def _body(tensor: Tensor) -> Expr:
    """Return the definition of a tensor that has one."""
    assert tensor.body is not None
    return tensor.body


def _first_element(tensor: Tensor) -> Load:
    """Return the load by which a Scan refers to a tensor."""
    return Load(tensor, (Const(0, INDEX),) * len(tensor.shape))
