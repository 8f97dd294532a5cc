"""Shape rules of ONNX that builders of kernels, numpy operators and passes of the graph share.

Its parts, in order: the positions that Slice selects; broadcasting of any number of shapes; the geometry of sliding
windows and of transposed convolutions: explicit pads, output sizes and the divisors of averages.

All code that reads kernel_shape, strides, pads, auto_pad, dilations, ceil_mode, count_include_pad, output_padding or
output_shape uses this module. The specification of ONNX, its shape inference and onnxruntime differ in them, and so do
onnxruntime's operators. This module follows onnxruntime for each operator; tests/compiler/test_windows.py compares them
on random attributes. Attributes that onnxruntime refuses mean what the specification says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

UNBOUNDED_ENDS = (2**31 - 1, 2**63 - 1)
"""Values of `ends` that mean the end of an axis of any size; backwards, the position before its first element."""


def slice_positions(size: int, start: int, end: int, step: int) -> range:
    """Return the positions that Slice selects on an axis of `size`. Raises ValueError where the step is 0.

    With a negative step, a start before the axis selects its first element, where Python selects nothing.

    >>> [list(slice_positions(5, start, end, -2)) for start, end in ((10, -(2**63)), (-9, -6), (3, 2**63 - 1))]
    [[4, 2, 0], [0], [3, 1]]
    """
    if not step:
        raise ValueError("a step is 0")
    low, high = (-1, size - 1) if step < 0 else (0, size)
    first, last = (position + size if position < 0 else position for position in (start, end))
    if end in UNBOUNDED_ENDS:
        last = low if step < 0 else high
    return range(min(max(first, 0), high), min(max(last, low), size), step)


def broadcast(*shapes: Sequence[int]) -> tuple[int, ...]:
    """Return the shape to which `shapes`, of any ranks, broadcast. Raises ValueError where they do not.

    >>> broadcast((3, 1), (4,), ())
    (3, 4)
    """
    rank = max(map(len, shapes), default=0)
    wide = [(1,) * (rank - len(shape)) + tuple(shape) for shape in shapes]
    result = tuple(next((size for size in sizes if size != 1), 1) for sizes in zip(*wide))
    if any(size not in (1, expected) for shape in wide for size, expected in zip(shape, result)):
        raise ValueError(f"shapes {[list(shape) for shape in shapes]} do not broadcast")
    return result


class WindowError(ValueError):
    """Attributes of windows that contradict each other or the input; the message is a clause."""


@dataclass(frozen=True)
class Windows:
    """Geometry of sliding windows; each field has one entry for each spatial dimension.

    size: of the input. kernel: elements of a window. stride: distance of two windows. dilation: distance of two
    elements of a window. before, after: padding; `before` is negative where the first window begins inside the input.
    out: number of windows; window o begins at o * stride - before. counted: an average divides by the number of
    elements that a window has at positions from counted[0] to before counted[1]; None: by the number of all its
    elements.
    """

    size: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    out: tuple[int, ...]
    counted: tuple[tuple[int, int] | None, ...]

    @property
    def is_global(self) -> bool:
        """Whether the only window is the input, without padding; onnxruntime then averages as a global pool does."""
        return self.kernel == self.size and not any(self.before + self.after)

    def taps(self, axis: int, o: int) -> range:
        """Return the positions in the input of the elements of window `o` along `axis`, also those in the padding."""
        start = o * self.stride[axis] - self.before[axis]
        return range(start, start + self.kernel[axis] * self.dilation[axis], self.dilation[axis])

    def empty_windows(self, axis: int) -> list[int]:
        """Return the numbers of the windows that have no element of the input along `axis`, only padding."""
        size = range(self.size[axis])
        return [o for o in range(self.out[axis]) if not any(tap in size for tap in self.taps(axis, o))]

    def divisors(self, axis: int) -> list[int]:
        """Return the divisor of averages along `axis`, for each window.

        An average divides by the product over all axes.
        """
        bounds, kernel, dilation = self.counted[axis], self.kernel[axis], self.dilation[axis]
        if bounds is None:
            return [kernel] * self.out[axis]
        starts = (o * self.stride[axis] - self.before[axis] for o in range(self.out[axis]))
        ends = [(max(0, -(-(bounds[0] - s) // dilation)), min(kernel, -(-(bounds[1] - s) // dilation))) for s in starts]
        return [max(0, end - first) for first, end in ends]

    def margins(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the padding that windows reach before and after each dimension; a negative one cuts elements off."""
        ends = (self.taps(d, count - 1)[-1] + 1 for d, count in enumerate(self.out))
        return self.before, tuple(max(0, end - size) for end, size in zip(ends, self.size))

    def pad(self, x: NDArray[Any], fill: Any, axis: int) -> NDArray[Any]:
        """Pad `x` with `fill` as far as windows reach; the spatial dimensions of x begin at `axis`."""
        before, after = self.margins()
        if not any((*before, *after)):
            return x
        edges = [(0, 0)] * x.ndim
        edges[axis : axis + len(before)] = [(max(0, b), a) for b, a in zip(before, after)]
        inside = x[(*[slice(None)] * axis, *(slice(max(0, -b), None) for b in before))]
        return np.pad(inside, edges, constant_values=np.asarray(fill, x.dtype))

    def with_unit_row(self) -> Windows:
        """Return the geometry with a first dimension of size 1: one-dimensional windows over an image of one row."""
        size, kernel, stride, dilation = ((1, *v) for v in (self.size, self.kernel, self.stride, self.dilation))
        before, after, out = (0, *self.before), (0, *self.after), (1, *self.out)
        return Windows(size, kernel, stride, dilation, before, after, out, ((0, 1), *self.counted))


def windows(op: str, attrs: Mapping[str, Any], size: Sequence[int], kernel: Sequence[int] | None = None) -> Windows:
    """Derive the windows of operator `op` with attributes `attrs` over inputs of spatial `size`. Raises WindowError.

    kernel: spatial shape of the weights; None for operators without weights, which have it as an attribute.

    >>> windows("MaxPool", {"kernel_shape": [1], "strides": [2], "ceil_mode": 1}, [4]).out  # a third would be outside
    (2,)
    """
    n = len(size)
    kernel, stride, dilation, pads = _read_windows(attrs, n, kernel)
    auto = attrs.get("auto_pad") or "NOTSET"
    pooling = op.endswith("Pool")
    before, after = list(pads[:n]), list(pads[n:])
    for d in range(n):
        if auto in ("SAME_UPPER", "SAME_LOWER"):
            # Pooling leaves dilations out here, and counts outputs with them.
            extent = kernel[d] if pooling else (kernel[d] - 1) * dilation[d] + 1
            before[d], after[d] = split_padding(_same_padding(size[d], stride[d], extent, not pooling), auto)
        elif auto == "VALID":
            before[d] = after[d] = 0
        elif auto != "NOTSET":
            raise WindowError(f"auto_pad {auto!r}; ONNX has NOTSET, SAME_UPPER, SAME_LOWER and VALID")
    include_pad, ceil = bool(attrs.get("count_include_pad")), bool(attrs.get("ceil_mode"))
    counts_all = "QLinear" in op  # it also counts elements beyond the padding
    out = []
    for d in range(n):
        extent = (kernel[d] - 1) * dilation[d] + 1
        slack = size[d] + before[d] + after[d] - extent
        steps = slack // stride[d]
        if pooling:
            steps = -(-slack // stride[d]) if ceil or slack < 0 else steps  # towards zero, as C++ does
            if ceil and steps * stride[d] >= size[d] + before[d]:
                steps -= 1  # a window must begin inside the input or the padding before it
        # In the second case, averages differ between versions of onnxruntime.
        if steps < -pooling or (slack < 0 and include_pad and not (counts_all or ceil)):
            raise WindowError(f"a window of {extent} on {size[d]} elements with padding of {before[d]} and {after[d]}")
        out.append(steps + 1)
    counted = tuple(
        (0, n) if not include_pad else None if counts_all else (-b, n + a) for n, b, a in zip(size, before, after)
    )
    return Windows(tuple(size), kernel, stride, dilation, tuple(before), tuple(after), tuple(out), counted)


@dataclass(frozen=True)
class TransposedWindows:
    """Geometry of a transposed convolution; each field has one entry for each spatial dimension.

    Element i of the input and weight k contribute to output i * stride + k * dilation - before. size: of the input.
    kernel: of the weights. out: of the output.
    """

    size: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    before: tuple[int, ...]
    out: tuple[int, ...]

    def with_unit_row(self) -> TransposedWindows:
        """Return the geometry with a first dimension of size 1, over an image of one row."""
        size, kernel, stride, dilation = ((1, *v) for v in (self.size, self.kernel, self.stride, self.dilation))
        return TransposedWindows(size, kernel, stride, dilation, (0, *self.before), (1, *self.out))


def transposed_windows(
    attrs: Mapping[str, Any], size: Sequence[int], kernel: Sequence[int] | None = None
) -> TransposedWindows:
    """Derive the geometry of a transposed convolution or of MaxUnpool. Raises WindowError.

    attrs: of the operator. size: spatial, of the input. kernel: spatial shape of the weights; None: the attribute.

    >>> transposed_windows({"strides": [3], "auto_pad": "SAME_UPPER"}, [4], [2]).out  # its kernel reaches no further
    (11,)
    """
    n = len(size)
    kernel, stride, dilation, pads = _read_windows(attrs, n, kernel)
    extra = _read_numbers("output_padding", attrs.get("output_padding") or [0] * n, n, 0)
    auto = attrs.get("auto_pad") or "NOTSET"
    output_shape = list(attrs.get("output_shape") or ())[-n:]
    full = [(s - 1) * t + (k - 1) * d + 1 + e for s, t, k, d, e in zip(size, stride, kernel, dilation, extra)]
    before, out = [], []
    for d in range(n):
        low, high = pads[d], pads[n + d]
        if output_shape or auto.startswith("SAME"):
            low, high = split_padding(
                max(0, full[d] - (output_shape[d] if output_shape else size[d] * stride[d])), auto
            )
        before.append(low)
        out.append(output_shape[d] if output_shape else full[d] - low - high)
    if min(out, default=1) < 1:
        raise WindowError(f"an output of {out}")
    return TransposedWindows(tuple(size), kernel, stride, dilation, tuple(before), tuple(out))


def split_padding(total: int, auto: str) -> tuple[int, int]:
    """Split `total` padding into (before, after); auto: with SAME_UPPER the larger half comes after, else before.

    >>> split_padding(3, "SAME_UPPER"), split_padding(3, "SAME_LOWER")
    ((1, 2), (2, 1))
    """
    before = int(total / 2) if auto == "SAME_UPPER" else int((total + 1) / 2)  # towards zero, as C++ does
    return before, total - before


def _same_padding(size: int, stride: int, extent: int, convolution: bool) -> int:
    """Return the total padding with which windows of `extent` give size / stride outputs, rounded up.

    It may be negative. convolution: whether onnxruntime's rule for convolutions applies, else that for pooling.
    """
    outputs = -(-size // stride)
    total = (outputs - 1) * stride + extent - size
    if convolution and int((size + 2 * total - extent) / stride + 1) < outputs:
        total += 1
    return total


def _read_windows(attrs: Mapping[str, Any], n: int, kernel: Sequence[int] | None) -> list[tuple[int, ...]]:
    """Read kernel, strides, dilations and pads of windows of `n` dimensions. Raises WindowError.

    kernel: spatial shape of the weights; None: the attribute.
    """
    return [
        _read_numbers("kernel_shape", attrs.get("kernel_shape") if kernel is None else kernel, n, 1),
        _read_numbers("strides", attrs.get("strides") or [1] * n, n, 1),
        _read_numbers("dilations", attrs.get("dilations") or [1] * n, n, 1),
        _read_numbers("pads", attrs.get("pads") or [0] * 2 * n, 2 * n, 0),
    ]


def _read_numbers(name: str, values: Any, count: int, least: int | None = None) -> tuple[int, ...]:
    """Convert the values of attribute `name` to `count` integers.

    Raises WindowError where there are more or fewer, or one is smaller than `least`.
    """
    numbers = tuple(int(value) for value in values or ())
    if len(numbers) != count:
        raise WindowError(f"{name} {list(numbers)}, which are {len(numbers)} numbers and not {count}")
    if least is not None and min(numbers, default=least) < least:
        raise WindowError(f"{name} {list(numbers)} below {least}")
    return numbers
