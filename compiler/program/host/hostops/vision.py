"""Operators of images: sampling at computed positions, boxes, pooling with indices, deformable convolution."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from celosia.compiler.program.host.op import Array, HostOp, host, int_list
from celosia.compiler.program.host.shape_rules import WindowError, Windows, transposed_windows, windows


@host("NonMaxSuppression")
def non_max_suppression(
    op: HostOp, boxes: Array, scores: Array, count: Array | None = None, overlap: Array | None = None,
    min_score: Array | None = None,
) -> Array:  # fmt: skip
    """Select the best boxes that do not overlap: [boxes, 3] int64 of image, class and box, best first.

    count: limit of the boxes of each class. overlap: share of the union that two selected boxes may have in common.
    min_score: boxes with a lower or equal score are left out.
    """
    max_count = 0 if count is None else int(count.reshape(-1)[0])
    limit = 0.0 if overlap is None else float(overlap.reshape(-1)[0])
    selected = []
    if op.attr("center_point_box", 0):
        centre, half = boxes[..., :2], boxes[..., 2:] / 2
        boxes = np.concatenate([centre - half, centre + half], axis=-1)
    first, last = np.minimum(boxes[..., :2], boxes[..., 2:]), np.maximum(boxes[..., :2], boxes[..., 2:])
    area = (last - first).prod(axis=-1)
    for batch, kind in np.ndindex(*scores.shape[:2]):
        score = scores[batch, kind]
        order = np.argsort(-score, kind="stable")
        if min_score is not None:
            order = order[score[order] > min_score.reshape(-1)[0]]
        selected_count = 0
        while order.size and selected_count < max_count:
            best, order = order[0], order[1:]
            selected.append((batch, kind, best))
            selected_count += 1
            low = np.maximum(first[batch, best], first[batch, order])
            high = np.minimum(last[batch, best], last[batch, order])
            shared = np.clip(high - low, 0, None).prod(axis=-1)
            union = area[batch, best] + area[batch, order] - shared
            order = order[shared <= limit * union]
    return np.array(selected, np.int64).reshape(-1, 3)


@host("RoiAlign")
def roi_align(op: HostOp, x: Array, rois: Array, images: Array) -> Array:
    """Pool regions of images at bilinear samples: [rois, channels, height, width], by mean or maximum.

    rois: corners x1, y1, x2, y2 of each region. images: number of the image of each.
    """
    height, width = op.attr("output_height", 1), op.attr("output_width", 1)
    scale, sampling = op.attr("spatial_scale", 1.0), op.attr("sampling_ratio", 0)
    half_pixel = op.attr("coordinate_transformation_mode", "half_pixel" if op.opset >= 16 else "") == "half_pixel"
    offset = 0.5 if half_pixel else 0.0
    out = np.zeros((len(rois), x.shape[1], height, width), x.dtype)
    kind = np.float64 if x.dtype == np.float64 else np.float32  # its rounding decides which samples lie outside
    for region, (roi, image) in enumerate(zip(rois.astype(kind), images)):
        x1, y1, x2, y2 = roi * kind(scale) - kind(offset)
        tall, wide = y2 - y1, x2 - x1
        if not half_pixel:
            tall, wide = max(tall, kind(1)), max(wide, kind(1))
        coordinates, cells = [], []
        for start, extent, size in ((y1, tall, height), (x1, wide, width)):
            cell = extent / kind(size)
            points = sampling if sampling > 0 else max(0, int(np.ceil(cell)))
            inside = (np.arange(points, dtype=kind) + kind(0.5)) * cell / kind(max(points, 1))
            coordinates.append((start + np.arange(size, dtype=kind)[:, None] * cell + inside).reshape(-1))
            cells.append(points)
        if 0 in cells:
            continue  # a box without extent is 0
        corners = _sample_grid(x[int(image)], coordinates[0], coordinates[1], op.attr("mode", "avg"))
        blocks = corners.reshape(-1, height, cells[0], width, cells[1])
        out[region] = blocks.max(axis=(2, 4)) if op.attr("mode", "avg") == "max" else blocks.mean(axis=(2, 4))
    return out


def _sample_grid(image: Array, ys: Array, xs: Array, reduce: str) -> Array:
    """Sample an image bilinearly at all pairs of `ys` and `xs`: [channels, ys, xs].

    reduce: "max" for the largest weighted corner instead of the sum, as onnxruntime's RoiAlign has it.
    """
    weights, corners = [], []
    for coordinate, size in ((ys, image.shape[1]), (xs, image.shape[2])):
        outside = (coordinate < -1) | (coordinate > size)
        coordinate = np.clip(coordinate, 0, None)
        low = np.minimum(np.floor(coordinate).astype(np.int64), size - 1)
        high = np.minimum(low + 1, size - 1)
        part = np.where(low >= size - 1, 0.0, coordinate - low)
        corners.append((low, high))
        weights.append((np.where(outside, 0, 1 - part), np.where(outside, 0, part)))
    terms = [
        image[:, corners[0][i]][:, :, corners[1][j]] * (weights[0][i][:, None] * weights[1][j])
        for i, j in itertools.product((0, 1), repeat=2)
    ]
    return np.asarray(np.max(terms, axis=0) if reduce == "max" else np.sum(terms, axis=0))


@host("GridSample")
def grid_sample(op: HostOp, x: Array, grid: Array) -> Array:
    """Sample x [N, C, ...] at the coordinates of grid [N, ..., axes], whose last axis counts from the innermost
    dimension.
    """
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
            taps.append([(first + k, w) for k, w in zip((-1, 0, 1, 2), _cubic_weights(part))])
    batch = np.arange(x.shape[0]).reshape(-1, *[1] * len(sizes))
    columns = np.moveaxis(x, 1, -1)
    out = np.zeros((*grid.shape[:-1], x.shape[1]), np.float64)
    for corner in itertools.product(*taps):
        weight, inside, index = np.ones(grid.shape[:-1]), np.ones(grid.shape[:-1], bool), []
        for (position, w), size, bounds in zip(corner, sizes, ranges):
            if padding == "reflection":
                position = np.clip(
                    np.rint(_reflect(position.astype(np.float64), *bounds)).astype(np.int64), 0, size - 1
                )
            if padding == "zeros":
                inside &= (position >= 0) & (position < size)
            weight = weight * w
            index.append(np.clip(position, 0, size - 1))
        out += columns[(batch, *index)] * (weight * inside)[..., None]
    return np.moveaxis(out, -1, 1).astype(x.dtype)


def _cubic_weights(t: Array, a: float = -0.75) -> list[Array]:
    """Return the weights of the four neighbours in cubic interpolation at fraction `t`."""

    def inner(d: Array) -> Array:
        return ((a + 2) * d - (a + 3)) * d * d + 1

    def outer(d: Array) -> Array:
        return ((a * d - 5 * a) * d + 8 * a) * d - 4 * a

    return [outer(t + 1), inner(t), inner(1 - t), outer(2 - t)]


def _reflect(p: Array, low: float, high: float) -> Array:
    """Reflect coordinates into [low, high]."""
    span = high - low
    if span == 0:
        return np.zeros_like(p)
    p = np.mod(p - low, 2 * span)
    return low + np.minimum(p, 2 * span - p)


@host("Col2Im", operands="input image_shape block_shape")
def col2im(op: HostOp, x: Array, image: Array, block: Array) -> Array:
    """Add up blocks, which are columns of x, at their positions in an image: the inverse of im2col."""
    sizes, kernel = int_list(image), int_list(block)
    w = _windows(op, sizes, kernel)
    columns = x.reshape(x.shape[0], -1, *kernel, *w.out)
    padded_size = (b + size + a for b, size, a in zip(w.before, sizes, w.after))
    out = np.zeros((*columns.shape[:2], *padded_size), x.dtype)
    for tap in np.ndindex(*kernel):
        positions = tuple(slice(t * e, t * e + s * c, s) for t, e, s, c in zip(tap, w.dilation, w.stride, w.out))
        out[(slice(None), slice(None), *positions)] += columns[(slice(None), slice(None), *tap)]
    return out[(slice(None), slice(None), *(slice(b, b + size) for b, size in zip(w.before, sizes)))]


def _windows(op: HostOp, size: Sequence[int], kernel: Sequence[int] | None = None) -> Windows:
    """Derive the geometry of the windows of `op` (see shape_rules.windows). Raises HostError."""
    try:
        return windows(op.op, op.attrs, size, kernel)
    except WindowError as error:
        raise op.fail(str(error)) from None


def _window_elements(x: Array, w: Windows, fill: Any) -> Array:
    """Return the elements of all windows over the last dimensions of x: [..., windows, elements].

    fill: for elements outside of x.
    """
    n = len(w.size)
    if not all(w.out):
        return np.empty((*x.shape[:-n], *w.out, prod(w.kernel)), x.dtype)
    lead = (slice(None),) * (x.ndim - n)
    extent = [(k - 1) * d + 1 for k, d in zip(w.kernel, w.dilation)]
    padded = w.pad(x, fill, x.ndim - n)
    view = np.lib.stride_tricks.sliding_window_view(padded, extent, axis=tuple(range(x.ndim - n, x.ndim)))
    starts = (slice(None, count * s, s) for count, s in zip(w.out, w.stride))
    view = view[(*lead, *starts, *(slice(None, None, d) for d in w.dilation))]
    return np.reshape(view, (*view.shape[:-n], prod(w.kernel)))


@host("LpPool", windows=True)
def lp_pool(op: HostOp, x: Array) -> Array:
    """Compute the p-norm of each window."""
    p = op.attr("p", 2)
    total = _window_elements(np.abs(x) ** p, _windows(op, x.shape[2:]), 0).sum(axis=-1)
    return np.asarray(total ** (1.0 / p)).astype(x.dtype)


@host("MaxPool")
def max_pool(op: HostOp, x: Array) -> tuple[Array, Array]:
    """Return the maxima of windows, and their positions, counted by rows, or by columns where storage_order is 1."""
    if x.dtype.kind not in "iuf":
        raise op.fail(f"element type {x.dtype}")
    w = _windows(op, x.shape[2:])
    low: float = np.iinfo(x.dtype).min if x.dtype.kind in "iu" else -np.inf
    by_columns = op.attr("storage_order", 0)
    positions = np.arange(int(np.prod(x.shape[2:]))).reshape(x.shape[2:][::-1] if by_columns else x.shape[2:])
    positions = positions.T if by_columns else positions
    values = _window_elements(x, w, low)
    outside = -sum(positions.strides) // positions.itemsize  # onnxruntime's position of the maximum of an empty window
    window_positions = np.broadcast_to(_window_elements(positions, w, outside), values.shape)
    best = values.argmax(axis=-1)[..., None]
    is_padding = np.take_along_axis(window_positions, best, -1) < 0  # then all elements in x are as small as padding
    best = np.where(is_padding, (window_positions >= 0).argmax(axis=-1)[..., None], best)
    best_positions = np.take_along_axis(window_positions, best, -1)[..., 0]
    base = np.arange(x.shape[0] * x.shape[1]).reshape(*x.shape[:2], *[1] * len(w.size)) * positions.size
    lowest = np.asarray(low if x.dtype.kind in "iu" else np.finfo(x.dtype).min, x.dtype)
    largest = np.where(best_positions < 0, lowest, np.take_along_axis(values, best, -1)[..., 0])
    return largest, (best_positions + base).astype(np.int64)


@host("GlobalLpPool")
def global_lp_pool(op: HostOp, x: Array) -> Array:
    """Compute the p-norm of each image."""
    p = op.attr("p", 2)
    total = (np.abs(x) ** p).sum(axis=tuple(range(2, x.ndim)), keepdims=True)
    return np.asarray(total ** (1.0 / p)).astype(x.dtype)


@host("MaxRoiPool")
def max_roi_pool(op: HostOp, x: Array, rois: Array) -> Array:
    """Pool regions by maximum; an empty cell is 0.

    rois [count, 5]: image, x1, y1, x2, y2, both ends included.
    """
    rows, columns = op.attrs["pooled_shape"]
    out = np.zeros((len(rois), x.shape[1], rows, columns), x.dtype)
    for region, roi in enumerate(rois):
        x1, y1, x2, y2 = np.floor(roi[1:] * op.attr("spatial_scale", 1.0) + 0.5).astype(np.int64)
        tall, wide = max(y2 - y1 + 1, 1) / rows, max(x2 - x1 + 1, 1) / columns
        for i, j in np.ndindex(rows, columns):
            top, bottom = np.clip([y1 + np.floor(i * tall), y1 + np.ceil((i + 1) * tall)], 0, x.shape[2]).astype(int)
            left, right = np.clip([x1 + np.floor(j * wide), x1 + np.ceil((j + 1) * wide)], 0, x.shape[3]).astype(int)
            if top < bottom and left < right:
                out[region, :, i, j] = x[int(roi[0]), :, top:bottom, left:right].max(axis=(1, 2))
    return out


@host("MaxUnpool")
def max_unpool(op: HostOp, x: Array, indices: Array, output_shape: Array | None = None) -> Array:
    """Put values back at the positions from which MaxPool took them, with 0 elsewhere. Raises HostError."""
    try:
        shape = (*x.shape[:2], *transposed_windows(op.attrs, x.shape[2:]).out)
    except WindowError as error:
        raise op.fail(str(error)) from None
    full = shape if output_shape is None else tuple(int_list(output_shape))
    out = np.zeros(int(np.prod(shape)), x.dtype)
    out[indices.reshape(-1)] = x.reshape(-1)
    result = np.zeros(full, x.dtype)
    result[tuple(slice(size) for size in shape)] = out.reshape(shape)
    return result


@host("DeformConv", variant_of="Conv", operands="x w:weights offset b:bias? mask?")
def deform_conv(
    op: HostOp, x: Array, w: Array, offset: Array, b: Array | None = None, mask: Array | None = None
) -> Array:
    """Convolve at positions that are moved by a computed offset for each tap, sampled bilinearly."""
    groups, shared = op.attr("group", 1), op.attr("offset_group", 1)
    kernel = list(w.shape[2:])
    geometry = _windows(op, x.shape[2:], kernel)
    batch, channels = x.shape[:2]
    rows, columns = offset.shape[2:]
    taps = kernel[0] * kernel[1]
    moves = offset.reshape(batch, shared, taps, 2, rows, columns)
    weights = None if mask is None else mask.reshape(batch, shared, taps, rows, columns)
    values = np.zeros((batch, channels, taps, rows, columns), np.float64)
    ys, xs = (np.arange(count) * s - b for count, s, b in zip((rows, columns), geometry.stride, geometry.before))
    per = channels // shared
    for n, g, k in itertools.product(range(batch), range(shared), range(taps)):
        y = ys[:, None] + k // kernel[1] * geometry.dilation[0] + moves[n, g, k, 0]
        z = xs + k % kernel[1] * geometry.dilation[1] + moves[n, g, k, 1]
        part = _sample_bilinear(x[n, g * per : (g + 1) * per], y, z)
        values[n, g * per : (g + 1) * per, k] = part if weights is None else part * weights[n, g, k]
    inner, outer = channels // groups, w.shape[0] // groups
    out = np.concatenate([
        np.einsum("nckij,ock->noij", values[:, g * inner : (g + 1) * inner],
                  w[g * outer : (g + 1) * outer].reshape(outer, inner, taps))
        for g in range(groups)
    ], axis=1)  # fmt: skip
    return (out if b is None else out + b[:, None, None]).astype(x.dtype)


def _sample_bilinear(image: Array, ys: Array, xs: Array) -> Array:
    """Sample an image bilinearly at coordinates `ys`, `xs` of equal shape: [channels, ...]; it is 0 outside."""
    height, width = image.shape[1:]
    y0, x0 = np.floor(ys).astype(np.int64), np.floor(xs).astype(np.int64)
    out = np.zeros((image.shape[0], *ys.shape))
    for dy, dx in itertools.product((0, 1), repeat=2):
        y, x = y0 + dy, x0 + dx
        inside = (y >= 0) & (y < height) & (x >= 0) & (x < width)
        weight = (1 - np.abs(ys - y)) * (1 - np.abs(xs - x)) * inside
        out += image[:, np.clip(y, 0, height - 1), np.clip(x, 0, width - 1)] * weight
    return out
