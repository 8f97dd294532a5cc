"""Rewrites of tensor definitions before they are scheduled: operator fusion by inlining, and merging of axes.

In this file `new` maps each tensor to its rewritten copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod

from celosia.compiler.expr.affine import Linear, flatten, from_linear, linear, offset, unravel
from celosia.compiler.expr.nodes import (
    INDEX,
    Axis,
    Call,
    Const,
    Expr,
    Load,
    Reduce,
    Scan,
    Tensor,
    Var,
    loads,
    redirect_loads,
    rewrite,
    substitute,
    topological,
    walk,
)

COSTLY = frozenset((
    "exp", "log", "tanh", "erf", "sigmoid", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh",
    "acosh", "atanh", "unfused_exp",
))  # fmt: skip
"""Functions whose results are stored rather than computed again for each reader."""


def is_injective(tensor: Tensor) -> bool:
    """Return whether each element is computed from single elements, without a reduction or a scan."""
    return tensor.body is not None and not any(isinstance(node, Reduce | Scan) for node in walk(tensor.body))


def inline(expr: Expr, producers: set[Tensor]) -> Expr:
    """Replace each load of a tensor in `producers` by that tensor's definition."""

    def define_load(node: Expr) -> Expr | None:
        """Return the definition of a loaded producer at the index of the load."""
        if not isinstance(node, Load) or node.tensor not in producers:
            return None
        tensor = node.tensor
        assert tensor.body is not None
        index = node.index
        if len(index) != len(tensor.axes) or len(tensor.axes) != len(tensor.shape):
            index = unravel(tuple(axis.extent for axis in tensor.axes), flatten(tensor.shape, index))
        values: dict[Var, Expr] = dict(zip(tensor.axes, index, strict=True))
        return substitute(tensor.body, values)

    return rewrite(expr, define_load)


def _evaluations(tensor: Tensor) -> int:
    """Count how often the innermost expression of `tensor` is evaluated: elements times steps of its reduction."""
    assert tensor.body is not None
    reduces = [node for node in walk(tensor.body) if isinstance(node, Reduce)]
    return tensor.size * max((prod(axis.extent for axis in r.axes) for r in reduces), default=1)


def fuse_injective(outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Inline element-wise producers into their consumers, so that chains of them become one loop.

    Outputs, `stored` tensors, reductions, costly functions with several readers, and producers that a reduction or
    a scan would evaluate repeatedly stay in memory.
    """
    order = topological(outputs)
    new: dict[Tensor, Tensor] = {}
    readers: dict[Tensor, list[Tensor]] = {t: [] for t in order}
    for tensor in order:
        for load in loads(tensor.body) if tensor.body is not None else ():
            readers[load.tensor].append(tensor)

    def can_inline(tensor: Tensor) -> bool:
        """Return whether computing `tensor` at its readers repeats no work."""
        if not is_injective(tensor) or tensor in outputs or tensor.stored:
            return False
        assert tensor.body is not None
        costly = any(isinstance(node, Call) and node.name in COSTLY for node in walk(tensor.body))
        if costly and len(readers[tensor]) > 1:
            return False
        if any(isinstance(reader.body, Scan) for reader in readers[tensor]):
            return False
        return all(is_injective(reader) or _evaluations(reader) <= max(tensor.size, 1) for reader in readers[tensor])

    inlined: set[Tensor] = set()
    for tensor in order:
        if tensor.body is None:
            new[tensor] = tensor
            continue
        new[tensor] = _in_axes_of_producer(replace(tensor, body=redirect_loads(tensor.body, new)), inlined)
        body = new[tensor].body
        assert body is not None
        new[tensor] = replace(new[tensor], body=inline(body, inlined))
        if can_inline(tensor):
            inlined.add(new[tensor])
    return tuple(new[tensor] for tensor in outputs)


def _in_axes_of_producer(tensor: Tensor, producers: set[Tensor]) -> Tensor:
    """Give `tensor` the axes of a producer that splits its elements into more axes, and inline that producer.

        u[b * 8 + c, p] = x[b, p, c];  y[m, p] = exp(u[m, p])   ->   y[b * 8 + c, p] = exp(x[b, p, c])

    It applies where `tensor` is injective and reads the producer element by element.
    """
    assert tensor.body is not None
    if not is_injective(tensor):
        return tensor
    reads = [load for load in loads(tensor.body) if load.tensor in producers]
    split = [load.tensor for load in reads if len(load.tensor.axes) > len(load.tensor.shape)]
    split = [
        source for source in dict.fromkeys(split)
        if source.shape == tensor.shape and _in_finer_axes(tensor.axes, source.axes) is not None
        and all(_reads_own_element(load, tensor) for load in reads if load.tensor is source)
    ]  # fmt: skip
    if not split:
        return tensor
    axes = split[0].axes
    bodies = {
        source: substitute(source.body, _matching_axes(source.axes, axes))
        for source in split if source.body is not None and _extents(source.axes) == _extents(axes)
    }  # fmt: skip
    body = rewrite(
        tensor.body, lambda node: bodies.get(node.tensor) if isinstance(node, Load) and node.tensor in bodies else None
    )
    return replace(tensor, axes=axes, body=substitute(body, _in_finer_axes(tensor.axes, axes) or {}))


def fuse_epilogues(outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Compute functions of a reduction's elements as soon as these are finished, instead of storing them in between.

        s[i] = sum[k](a[i, k]);  y[i] = max(s[i] + b[i], 0)   ->   y[i] = max(sum[k](a[i, k]) + b[i], 0)

    It applies where the only reader of the reduction is a tensor that reads it element by element and has no reduction.
    """
    order = topological(outputs)
    readers: dict[Tensor, set[Tensor]] = {t: set() for t in order}
    for tensor in order:
        for load in loads(tensor.body) if tensor.body is not None else ():
            readers[load.tensor].add(tensor)

    def can_fuse(source: Tensor, reader: Tensor) -> bool:
        """Return whether `reader` can be computed in the loops of the reduction `source`."""
        if source.body is None or is_injective(source) or source in outputs or readers[source] != {reader}:
            return False
        if isinstance(source.body, Scan):
            return False
        assert reader.body is not None
        reads = [load for load in loads(reader.body) if load.tensor is source]
        is_same_space = source.shape == reader.shape and _in_finer_axes(reader.axes, source.axes) is not None
        return is_same_space and all(_reads_own_element(load, reader) for load in reads)

    new: dict[Tensor, Tensor] = {}
    for tensor in order:
        new[tensor] = tensor if tensor.body is None else _inline_reductions(tensor, new, can_fuse)
    return tuple(new[tensor] for tensor in outputs)


def _inline_reductions(tensor: Tensor, new: dict[Tensor, Tensor], can_fuse: Callable[[Tensor, Tensor], bool]) -> Tensor:
    """Rebuild `tensor` over `new` tensors, with the reductions that it can fuse inlined into its body.

    Its axes become those of the first such reduction, which may split the same elements into more axes.
    """
    assert tensor.body is not None
    sources = dict.fromkeys(load.tensor for load in loads(tensor.body)) if is_injective(tensor) else {}
    fused = [source for source in sources if can_fuse(source, tensor)]
    axes = fused[0].axes if fused else tensor.axes
    fused = [source for source in fused if _extents(source.axes) == _extents(axes)]
    bodies: dict[Tensor, Expr] = {}
    for source in fused:
        body = new[source].body
        assert body is not None
        bodies[source] = substitute(body, _matching_axes(source.axes, axes))

    def redirect_load(node: Expr) -> Expr | None:
        if not isinstance(node, Load):
            return None
        return bodies[node.tensor] if node.tensor in bodies else Load(new[node.tensor], node.index)

    body = rewrite(tensor.body, redirect_load)
    return replace(tensor, axes=axes, body=substitute(body, _in_finer_axes(tensor.axes, axes) or {}))


def _extents(axes: Sequence[Axis]) -> list[int]:
    """Return the extents of axes, without those of 1."""
    return [axis.extent for axis in axes if axis.extent != 1]


def _matching_axes(source: Sequence[Axis], axes: Sequence[Axis]) -> dict[Var, Expr]:
    """Map each axis of `source` to the axis of `axes` with the same extent; axes of extent 1 become 0."""
    rest = [axis for axis in axes if axis.extent != 1]
    return {axis: Const(0, INDEX) if axis.extent == 1 else rest.pop(0) for axis in source}


def _in_finer_axes(coarse: Sequence[Axis], fine: Sequence[Axis]) -> dict[Var, Expr] | None:
    """Express each of the `coarse` axes by consecutive `fine` ones whose extents multiply to its extent.

    Returns None where there are no such axes.
    """
    rest = [axis for axis in fine if axis.extent != 1]
    values: dict[Var, Expr] = {}
    for axis in coarse:
        total: Expr = Const(0, INDEX)
        extent = 1
        while extent < axis.extent and rest:
            part = rest.pop(0)
            total, extent = total * part.extent + part, extent * part.extent
        if extent != axis.extent:
            return None
        values[axis] = total
    return None if rest else values


def _reads_own_element(load: Load, reader: Tensor) -> bool:
    """Return whether `load` reads the element that `reader` computes, in a tensor of the same shape."""
    index = load.index
    return len(index) == len(reader.axes) and all(i is a or a.extent == 1 for i, a in zip(index, reader.axes))


def collapse(outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Merge neighbouring axes that every access traverses with one stride, for longer and fewer loops.

        y[i, j] = x[i, j] * 2   (4 by 8)   ->   y[f] = x[f] * 2   (32)

    Axes of extent 1 are dropped. Indices of loads become row-major element numbers. Afterwards `axes` of a tensor
    enumerate its elements, and need not match its `shape`.
    """
    new: dict[Tensor, Tensor] = {}
    for tensor in topological(outputs):
        new[tensor] = tensor if tensor.body is None else _collapse(tensor, new)
    return tuple(new[tensor] for tensor in outputs)


Group = tuple[Axis, ...]
"""Neighbouring axes that become one."""
Offsets = dict[int, Linear]
"""id of a load -> linear form of the element number that it reads."""


def _collapse(tensor: Tensor, new: dict[Tensor, Tensor]) -> Tensor:
    """Merge the axes of one tensor whose producers `new` are collapsed already."""
    body, offsets = _flatten_loads(tensor, new)
    pinned = _unmergeable_variables(body, offsets)
    merged: dict[Group, Axis] = {}

    def merge_axes(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
        """Merge those of `axes` that can be, note each merged group in `merged`, and return the new axes."""
        groups = _mergeable_groups(axes, pinned, offsets)
        merged.update((group, _merged_axis(group)) for group in groups)
        return tuple(merged[group] for group in groups)

    data_axes = merge_axes(tensor.axes)
    reduces = dict.fromkeys(node.axes for node in walk(body) if isinstance(node, Reduce))
    reduce_axes = {axes: merge_axes(axes) for axes in reduces}

    def merge_node_axes(node: Expr) -> Expr | None:
        """Return a reduction over merged axes, or a load at a merged index; None for other nodes."""
        if isinstance(node, Reduce):
            return Reduce(node.kind, node.value, reduce_axes[node.axes])
        return Load(node.tensor, (_in_merged_axes(node.index[0], merged),)) if isinstance(node, Load) else None

    return replace(tensor, axes=data_axes, body=rewrite(body, merge_node_axes))


def _flatten_loads(tensor: Tensor, new: dict[Tensor, Tensor]) -> tuple[Expr, Offsets]:
    """Flatten loads to row-major numbers and drop axes of extent 1. Returns the body and each load's offset."""
    assert tensor.body is not None
    reduces = {node.axes for node in walk(tensor.body) if isinstance(node, Reduce)}
    ones: dict[Var, Expr] = {a: Const(0, INDEX) for axes in (tensor.axes, *reduces) for a in axes if a.extent == 1}
    offsets: Offsets = {}

    def flatten_node(node: Expr) -> Expr | None:
        """Drop reduction axes of extent 1, and flatten the index of a load."""
        if isinstance(node, Reduce):
            remaining = tuple(axis for axis in node.axes if axis not in ones)
            return Reduce(node.kind, node.value, remaining) if remaining else node.value
        if not isinstance(node, Load):
            return None
        terms = linear(offset(node))
        load = Load(new.get(node.tensor, node.tensor), (from_linear(terms),))
        offsets[id(load)] = terms
        return load

    body = rewrite(substitute(tensor.body, ones), flatten_node)
    return body, {id(node): offsets[id(node)] for node in walk(body) if isinstance(node, Load)}


def _unmergeable_variables(body: Expr, offsets: Offsets) -> set[Expr]:
    """Return the variables that occur anywhere but in the linear part of an offset, so that their axes must stay."""
    pinned: set[Expr] = set()
    for node in _outside_loads(body):
        if isinstance(node, Load):
            others = [atom for atom in offsets[id(node)] if atom is not None and not isinstance(atom, Var)]
            pinned.update(n for atom in others for n in walk(atom) if isinstance(n, Var))
        elif isinstance(node, Var):
            pinned.add(node)
    return pinned


def _mergeable_groups(axes: Group, pinned: set[Expr], offsets: Offsets) -> list[Group]:
    """Split `axes`, without those of extent 1, into groups of neighbours that each access traverses with one stride."""
    groups: list[Group] = []
    for axis in (axis for axis in axes if axis.extent != 1):
        last = groups[-1][-1] if groups else None
        has_one_stride = last is not None and all(
            t.get(last, 0) == t.get(axis, 0) * axis.extent for t in offsets.values()
        )
        if has_one_stride and not {axis, last} & pinned:
            groups[-1] = (*groups[-1], axis)
        else:
            groups.append((axis,))
    return groups


def _merged_axis(group: Group) -> Axis:
    """Return the axis that replaces a group."""
    if len(group) == 1:
        return group[0]
    name = "_".join(axis.name for axis in group)
    return Axis(name, extent=prod(axis.extent for axis in group), reduce=group[0].reduce)


def _in_merged_axes(index: Expr, merged: Mapping[Group, Axis]) -> Expr:
    """Express an offset by the merged axes, each of which has the stride of the last axis of its group."""
    terms = linear(index)
    for group, axis in merged.items():
        if len(group) > 1:
            if group[-1] in terms:
                terms[axis] = terms[group[-1]]
            for axis_of_group in group:
                terms.pop(axis_of_group, None)
    return from_linear(terms)


def _outside_loads(expr: Expr) -> list[Expr]:
    """Return the nodes of `expr` that are not part of an index."""
    nodes: list[Expr] = []
    seen: set[int] = set()
    stack = [expr]
    while stack:
        node = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        nodes.append(node)
        if not isinstance(node, Load):
            stack.extend(node.children())
    return nodes
