"""Views of tensors that the accelerator holds, found by where each element lies.

A chain of operators that move elements costs nothing if its last tensor has a form (ActivationLayout) in which each
element is at the place where it is stored already. Tensors between, such as one of five axes, need no form:

    images [1, C, H, W]  →  Transpose [1, H, W, C]  →  Reshape [1, H * W, C]        rows are pixels, columns channels
    rows [2, T, heads * d]  →  Reshape [2, T, heads, d]  →  Transpose [2, heads, T, d]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from celosia.compiler.graph.select.matrices import MAX_MATRICES
from celosia.compiler.graph.select.placement import (
    ActivationLayout,
    NotOffloadable,
    Placement,
    natural_form,
    shape_of,
)
from celosia.compiler.graph.values import attribute, is_op, shape
from celosia.compiler.layer import whole_groups
from celosia.compiler.ops import VIEWS
from celosia.compiler.program.model import MATRICES, matrix_counts
from celosia.compiler.tensorize import pack

Places = NDArray[np.int64]
"""For each element of a tensor, its number among the [images, channels, height, width] of an activation."""
MAX_ELEMENTS = 1 << 22
"""Elements of the largest tensor whose places are compared."""


def take_as_moved_view(p: Placement, node: ir.Node) -> bool:
    """Make the output of a Transpose or reshape a view of what the accelerator holds, if a form describes it there.

    It may have none itself if all of its readers only move elements, until they reach tensors that have one. Returns
    whether either is so.
    """
    x, y = node.inputs[0], node.outputs[0]
    if x is None or y.is_graph_output() or prod(shape_of(y)) > MAX_ELEMENTS:
        return False
    known = p.between_views.get(x) or _stored_places(p, x)
    places = _moved(node, known[1]) if known is not None else None
    if known is None or places is None:
        return False
    source, _ = known
    if (form := _find_form(p, source, y, places)) is not None:
        return _record(p, node, source, form)
    if not _reaches_forms(p, source, y, places):
        return False
    p.between_views[y] = source, places
    p.selection.views[node] = "free: a part of the view behind it"
    return True


def _stored_places(p: Placement, x: ir.Value) -> tuple[ir.Value, Places] | None:
    """Return (x, the places of its elements); None if the accelerator does not hold all of it, one by one."""
    held = p.held_form(x)
    act = p.selection.written.get(p.viewed_tensor(x))
    if held is None or act is None or held.inverted or (held.fold and held.fold not in MATRICES):
        return None
    if act.dims != held.dims or x in p.channel_positions:
        return None
    return x, held.info.restore(np.arange(prod(held.dims)).reshape(held.dims), shape_of(x))


def _moved(node: ir.Node, places: Places) -> Places | None:
    """Return the places of the output of a Transpose or reshape, from those of its input; None for other operators."""
    dims = shape(node.outputs[0])
    if dims is None:
        return None
    if is_op(node, "Transpose"):
        return places.transpose(attribute(node, "perm") or range(places.ndim)[::-1])
    return places.reshape(dims) if is_op(node, *VIEWS) else None


def _reaches_forms(p: Placement, source: ir.Value, y: ir.Value, places: Places) -> bool:
    """Return whether all readers of `y` move its elements, and all tensors that they end in have a form."""
    readers = [use.node for use in y.uses()]
    for node in readers:
        result = node.outputs[0]
        moved = _moved(node, places)
        if moved is None or result.is_graph_output():
            return False
        if _find_form(p, source, result, moved) is None and not _reaches_forms(p, source, result, moved):
            return False
    return bool(readers)


def _find_form(p: Placement, source: ir.Value, y: ir.Value, places: Places) -> ActivationLayout | None:
    """Return a form of `y` in which its elements lie at `places` of what is stored for `source`; None without one."""
    held = p.held_form(source)
    assert held is not None
    for form in _candidates(p, held, y):
        arranged = replace(form, pad=-1).info.arrange(places)
        is_stored = (arranged == np.arange(arranged.size).reshape(arranged.shape)) | (arranged < 0)
        if np.all(is_stored):
            return form
    return None


def _candidates(p: Placement, held: ActivationLayout, y: ir.Value) -> Iterator[ActivationLayout]:
    """Yield the forms of `y` with as many pixels and channels as are stored."""
    images, channels, height, width = held.dims
    dims, group = shape_of(y), p.cfg.group
    for fold in MATRICES if images == 1 else ():
        count, columns, rows = matrix_counts(fold, dims)
        slots = columns if count == 1 else pack.blocks(columns, group) * group
        if (
            rows == height * width
            and count <= MAX_MATRICES
            and whole_groups(p.cfg, count * slots) == whole_groups(p.cfg, channels)
        ):
            yield replace(held, dims=(1, channels, 1, rows), fold=fold, window=None)
        if height == 1 and rows < width and count * slots == channels:  # rows of padding behind
            yield replace(held, fold=fold)
    try:
        natural = natural_form(y)
    except NotOffloadable:
        return
    if natural.dims[:2] == held.dims[:2] and prod(natural.dims) == prod(held.dims):
        yield natural


def _record(p: Placement, node: ir.Node, source: ir.Value, form: ActivationLayout) -> bool:
    """Record that the output of `node` is the bytes of `source` in `form`; return whether that is possible."""
    y, stored = node.outputs[0], p.viewed_tensor(source)
    held, act = p.held_form(source), p.selection.written[stored]
    assert held is not None
    if form.dims == held.dims:
        p.viewed[y] = stored
    else:
        if act.strided_view is not None or act.storage in p.enclosing:
            return False
        p.reshaped.add(act.storage)
        p.selection.written[y] = replace(act, name=y.name or "", height=form.dims[2], width=form.dims[3])
    p.selection.forms[y] = form
    p.selection.views[node] = "free: the same bytes"
    return True
