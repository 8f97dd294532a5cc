"""Operators of images: sampling at computed places, boxes, windows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from celosia.compiler.program.host.hostops.registry import Array, host, int_list
from celosia.compiler.program.host.op import HostOp
from celosia.compiler.program.host.windows import WindowError, Windows, spread, windows


@host("NonMaxSuppression")
def non_max_suppression(
    op: HostOp, boxes: Array, scores: Array, count: Array | None = None, overlap: Array | None = None,
    least: Array | None = None,
) -> Array:  # fmt: skip
    """[boxes, 3] int64: image, class, box; the best first."""
    most = 0 if count is None else int(count.reshape(-1)[0])
    limit = 0.0 if overlap is None else float(overlap.reshape(-1)[0])
    chosen = []
    if op.attr("center_point_box", 0):
        centre, half = boxes[..., :2], boxes[..., 2:] / 2
        boxes = np.concatenate([centre - half, centre + half], axis=-1)
    first, last = np.minimum(boxes[..., :2], boxes[..., 2:]), np.maximum(boxes[..., :2], boxes[..., 2:])
    area = (last - first).prod(axis=-1)
    for batch, kind in np.ndindex(*scores.shape[:2]):
        score = scores[batch, kind]
        order = np.argsort(-score, kind="stable")
        if least is not None:
            order = order[score[order] > least.reshape(-1)[0]]
        kept = 0
        while order.size and kept < most:
            best, order = order[0], order[1:]
            chosen.append((batch, kind, best))
            kept += 1
            low = np.maximum(first[batch, best], first[batch, order])
            high = np.minimum(last[batch, best], last[batch, order])
            shared = np.clip(high - low, 0, None).prod(axis=-1)
            union = area[batch, best] + area[batch, order] - shared
            order = order[shared <= limit * union]
    return np.array(chosen, np.int64).reshape(-1, 3)


@host("RoiAlign")
def roi_align(op: HostOp, x: Array, rois: Array, images: Array) -> Array:
    """[rois, channels, height, width], means or maxima of sampled points."""
    height, width = op.attr("output_height", 1), op.attr("output_width", 1)
    scale, sampling = op.attr("spatial_scale", 1.0), op.attr("sampling_ratio", 0)
    half_pixel = op.attr("coordinate_transformation_mode", "half_pixel" if op.opset >= 16 else "") == "half_pixel"
    offset = 0.5 if half_pixel else 0.0
    out = np.zeros((len(rois), x.shape[1], height, width), x.dtype)
    kind = np.float64 if x.dtype == np.float64 else np.float32  # what is outside, and how many points, is decided in it
    for number, (roi, image) in enumerate(zip(rois.astype(kind), images)):
        x1, y1, x2, y2 = roi * kind(scale) - kind(offset)
        tall, wide = y2 - y1, x2 - x1
        if not half_pixel:
            tall, wide = max(tall, kind(1)), max(wide, kind(1))
        places, cells = [], []
        for start, extent, size in ((y1, tall, height), (x1, wide, width)):
            cell = extent / kind(size)
            points = sampling if sampling > 0 else max(0, int(np.ceil(cell)))
            inside = (np.arange(points, dtype=kind) + kind(0.5)) * cell / kind(max(points, 1))
            places.append((start + np.arange(size, dtype=kind)[:, None] * cell + inside).reshape(-1))
            cells.append(points)
        if 0 in cells:
            continue  # a box without extent is 0
        corners = _corners(x[int(image)], places[0], places[1], op.attr("mode", "avg"))
        blocks = corners.reshape(-1, height, cells[0], width, cells[1])
        out[number] = blocks.max(axis=(2, 4)) if op.attr("mode", "avg") == "max" else blocks.mean(axis=(2, 4))
    return out


def _corners(image: Array, ys: Array, xs: Array, reduce: str) -> Array:
    """[channels, ys, xs]: bilinear samples; where `reduce` is "max", the largest weighted corner instead of the sum."""
    weights, places = [], []
    for at, size in ((ys, image.shape[1]), (xs, image.shape[2])):
        outside = (at < -1) | (at > size)
        at = np.clip(at, 0, None)
        low = np.minimum(np.floor(at).astype(np.int64), size - 1)
        high = np.minimum(low + 1, size - 1)
        part = np.where(low >= size - 1, 0.0, at - low)
        places.append((low, high))
        weights.append((np.where(outside, 0, 1 - part), np.where(outside, 0, part)))
    terms = [
        image[:, places[0][i]][:, :, places[1][j]] * (weights[0][i][:, None] * weights[1][j])
        for i, j in itertools.product((0, 1), repeat=2)
    ]
    return np.asarray(np.max(terms, axis=0) if reduce == "max" else np.sum(terms, axis=0))


@host("GridSample")
def grid_sample(op: HostOp, x: Array, grid: Array) -> Array:
    """x [N, C, ...] at the places of grid [N, ..., axes], whose last axis counts from the innermost dimension."""
    mode = {"bilinear": "linear", "bicubic": "cubic"}.get(op.attr("mode", "linear"), op.attr("mode", "linear"))
    padding, corners = op.attr("padding_mode", "zeros"), op.attr("align_corners", 0)
    sizes = x.shape[2:]
    grid = grid.astype(np.promote_types(grid.dtype, np.float32))  # a tie of float32 may be none in float64
    ranges = [(0.0, size - 1.0) if corners else (-0.5, size - 0.5) for size in sizes]
    taps = []
    for d, size in enumerate(sizes):
        g = grid[..., len(sizes) - 1 - d]
        p = (g + 1) / 2 * (size - 1) if corners else ((g + 1) * size - 1) / 2
        if mode == "nearest":
            taps.append([(np.rint(p).astype(np.int64), np.ones_like(p))])
            continue
        low = np.floor(p)
        first, part = low.astype(np.int64), (p - low).astype(np.float64)
        if mode == "linear":
            taps.append([(first, 1 - part), (first + 1, part)])
        else:
            taps.append([(first + k, w) for k, w in zip((-1, 0, 1, 2), _cubic(part))])
    batch = np.arange(x.shape[0]).reshape(-1, *[1] * len(sizes))
    columns = np.moveaxis(x, 1, -1)
    out = np.zeros((*grid.shape[:-1], x.shape[1]), np.float64)
    for chosen in itertools.product(*taps):
        weight, inside, places = np.ones(grid.shape[:-1]), np.ones(grid.shape[:-1], bool), []
        for (place, w), size, reach in zip(chosen, sizes, ranges):
            if padding == "reflection":
                place = np.clip(np.rint(_reflect(place.astype(np.float64), *reach)).astype(np.int64), 0, size - 1)
            if padding == "zeros":
                inside &= (place >= 0) & (place < size)
            weight = weight * w
            places.append(np.clip(place, 0, size - 1))
        out += columns[(batch, *places)] * (weight * inside)[..., None]
    return np.moveaxis(out, -1, 1).astype(x.dtype)


def _cubic(t: Array, a: float = -0.75) -> list[Array]:
    def near(d: Array) -> Array:
        return ((a + 2) * d - (a + 3)) * d * d + 1

    def far(d: Array) -> Array:
        return ((a * d - 5 * a) * d + 8 * a) * d - 4 * a

    return [far(t + 1), near(t), near(1 - t), far(2 - t)]


def _reflect(p: Array, low: float, high: float) -> Array:
    span = high - low
    if span == 0:
        return np.zeros_like(p)
    p = np.mod(p - low, 2 * span)
    return low + np.minimum(p, 2 * span - p)


@host("Col2Im", operands="input image_shape block_shape")
def col2im(op: HostOp, x: Array, image: Array, block: Array) -> Array:
    """The image whose blocks are columns; where they overlap, their sum."""
    sizes, kernel = int_list(image), int_list(block)
    w = _windows(op, sizes, kernel)
    columns = x.reshape(x.shape[0], -1, *kernel, *w.out)
    whole = (b + size + a for b, size, a in zip(w.before, sizes, w.after))
    out = np.zeros((*columns.shape[:2], *whole), x.dtype)
    for tap in np.ndindex(*kernel):
        where = tuple(slice(t * e, t * e + s * c, s) for t, e, s, c in zip(tap, w.dilation, w.stride, w.out))
        out[(slice(None), slice(None), *where)] += columns[(slice(None), slice(None), *tap)]
    return out[(slice(None), slice(None), *(slice(b, b + size) for b, size in zip(w.before, sizes)))]


def _windows(op: HostOp, size: Sequence[int], kernel: Sequence[int] | None = None) -> Windows:
    try:
        return windows(op.op, op.attrs, size, kernel)
    except WindowError as error:
        raise op.fail(str(error)) from None


def _elements(x: Array, w: Windows, fill: Any) -> Array:
    """[..., windows, elements of each] of x, whose last dimensions have windows; `fill` where they go beyond x."""
    n = len(w.size)
    if not all(w.out):
        return np.empty((*x.shape[:-n], *w.out, prod(w.kernel)), x.dtype)
    lead = (slice(None),) * (x.ndim - n)
    reach = [(k - 1) * d + 1 for k, d in zip(w.kernel, w.dilation)]
    whole = w.framed(x, fill, x.ndim - n)
    view = np.lib.stride_tricks.sliding_window_view(whole, reach, axis=tuple(range(x.ndim - n, x.ndim)))
    spots = (slice(None, count * s, s) for count, s in zip(w.out, w.stride))
    view = view[(*lead, *spots, *(slice(None, None, d) for d in w.dilation))]
    return np.reshape(view, (*view.shape[:-n], prod(w.kernel)))


@host("LpPool", windows=True)
def lp_pool(op: HostOp, x: Array) -> Array:
    """The p-norm of each window."""
    p = op.attr("p", 2)
    total = _elements(np.abs(x) ** p, _windows(op, x.shape[2:]), 0).sum(axis=-1)
    return np.asarray(total ** (1.0 / p)).astype(x.dtype)


@host("MaxPool")
def max_pool(op: HostOp, x: Array) -> tuple[Array, Array]:
    """With the places of the maxima, counted in rows, or in columns where storage_order is 1."""
    if x.dtype.kind not in "iuf":
        raise op.fail(f"element type {x.dtype}")
    w = _windows(op, x.shape[2:])
    low: float = np.iinfo(x.dtype).min if x.dtype.kind in "iu" else -np.inf
    by_columns = op.attr("storage_order", 0)
    places = np.arange(int(np.prod(x.shape[2:]))).reshape(x.shape[2:][::-1] if by_columns else x.shape[2:])
    places = places.T if by_columns else places
    values = _elements(x, w, low)
    nowhere = -sum(places.strides) // places.itemsize  # where onnxruntime has the largest of nothing
    spots = np.broadcast_to(_elements(places, w, nowhere), values.shape)
    best = values.argmax(axis=-1)[..., None]
    beyond = np.take_along_axis(spots, best, -1) < 0  # then none in x is larger, if there is any
    best = np.where(beyond, (spots >= 0).argmax(axis=-1)[..., None], best)
    chosen = np.take_along_axis(spots, best, -1)[..., 0]
    base = np.arange(x.shape[0] * x.shape[1]).reshape(*x.shape[:2], *[1] * len(w.size)) * places.size
    lowest = np.asarray(low if x.dtype.kind in "iu" else np.finfo(x.dtype).min, x.dtype)
    largest = np.where(chosen < 0, lowest, np.take_along_axis(values, best, -1)[..., 0])
    return largest, (chosen + base).astype(np.int64)


@host("GlobalLpPool")
def global_lp_pool(op: HostOp, x: Array) -> Array:
    """The p-norm of each image."""
    p = op.attr("p", 2)
    total = (np.abs(x) ** p).sum(axis=tuple(range(2, x.ndim)), keepdims=True)
    return np.asarray(total ** (1.0 / p)).astype(x.dtype)


@host("MaxRoiPool")
def max_roi_pool(op: HostOp, x: Array, rois: Array) -> Array:
    """rois [count, 5]: number of the image, x1, y1, x2, y2, both ends included; an empty cell is 0."""
    rows, columns = op.attrs["pooled_shape"]
    out = np.zeros((len(rois), x.shape[1], rows, columns), x.dtype)
    for number, roi in enumerate(rois):
        x1, y1, x2, y2 = np.floor(roi[1:] * op.attr("spatial_scale", 1.0) + 0.5).astype(np.int64)
        tall, wide = max(y2 - y1 + 1, 1) / rows, max(x2 - x1 + 1, 1) / columns
        for i, j in np.ndindex(rows, columns):
            top, bottom = np.clip([y1 + np.floor(i * tall), y1 + np.ceil((i + 1) * tall)], 0, x.shape[2]).astype(int)
            left, right = np.clip([x1 + np.floor(j * wide), x1 + np.ceil((j + 1) * wide)], 0, x.shape[3]).astype(int)
            if top < bottom and left < right:
                out[number, :, i, j] = x[int(roi[0]), :, top:bottom, left:right].max(axis=(1, 2))
    return out


@host("MaxUnpool")
def max_unpool(op: HostOp, x: Array, indices: Array, wanted: Array | None = None) -> Array:
    """Values at the places that MaxPool took them from, 0 elsewhere. HostError where windows cannot be."""
    try:
        shape = (*x.shape[:2], *spread(op.attrs, x.shape[2:]).out)
    except WindowError as error:
        raise op.fail(str(error)) from None
    full = shape if wanted is None else tuple(int_list(wanted))
    out = np.zeros(int(np.prod(shape)), x.dtype)
    out[indices.reshape(-1)] = x.reshape(-1)
    result = np.zeros(full, x.dtype)
    result[tuple(slice(size) for size in shape)] = out.reshape(shape)
    return result


@host("DeformConv", variant_of="Conv", operands="x w:weights offset b:bias? mask?")
def deform_conv(
    op: HostOp, x: Array, w: Array, offset: Array, b: Array | None = None, mask: Array | None = None
) -> Array:
    """A convolution whose taps each read at an offset of their own, bilinearly."""
    groups, shared = op.attr("group", 1), op.attr("offset_group", 1)
    kernel = list(w.shape[2:])
    at = _windows(op, x.shape[2:], kernel)
    batch, channels = x.shape[:2]
    rows, columns = offset.shape[2:]
    taps = kernel[0] * kernel[1]
    moves = offset.reshape(batch, shared, taps, 2, rows, columns)
    weights = None if mask is None else mask.reshape(batch, shared, taps, rows, columns)
    values = np.zeros((batch, channels, taps, rows, columns), np.float64)
    ys, xs = (np.arange(count) * s - b for count, s, b in zip((rows, columns), at.stride, at.before))
    per = channels // shared
    for n, g, k in itertools.product(range(batch), range(shared), range(taps)):
        y = ys[:, None] + k // kernel[1] * at.dilation[0] + moves[n, g, k, 0]
        z = xs + k % kernel[1] * at.dilation[1] + moves[n, g, k, 1]
        part = _bilinear(x[n, g * per : (g + 1) * per], y, z)
        values[n, g * per : (g + 1) * per, k] = part if weights is None else part * weights[n, g, k]
    inner, outer = channels // groups, w.shape[0] // groups
    out = np.concatenate([
        np.einsum("nckij,ock->noij", values[:, g * inner : (g + 1) * inner],
                  w[g * outer : (g + 1) * outer].reshape(outer, inner, taps))
        for g in range(groups)
    ], axis=1)  # fmt: skip
    return (out if b is None else out + b[:, None, None]).astype(x.dtype)


def _bilinear(image: Array, ys: Array, xs: Array) -> Array:
    """[channels, ...] at places; zeros outside."""
    height, width = image.shape[1:]
    y0, x0 = np.floor(ys).astype(np.int64), np.floor(xs).astype(np.int64)
    out = np.zeros((image.shape[0], *ys.shape))
    for dy, dx in itertools.product((0, 1), repeat=2):
        y, x = y0 + dy, x0 + dx
        inside = (y >= 0) & (y < height) & (x >= 0) & (x < width)
        weight = (1 - np.abs(ys - y)) * (1 - np.abs(xs - x)) * inside
        out += image[:, np.clip(y, 0, height - 1), np.clip(x, 0, width - 1)] * weight
    return out
