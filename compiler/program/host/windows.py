"""Meaning of the attributes of sliding windows: explicit pads, numbers of outputs, and what averages divide by.

Whatever reads kernel_shape, strides, pads, auto_pad, dilations, ceil_mode, count_include_pad, output_padding or
output_shape asks here. ONNX's text, its inference of shapes and onnxruntime differ in them, and so do onnxruntime's
operators from each other: they are followed one by one, and compared on random ones (tests/compiler/test_windows.py).
What onnxruntime refuses and ONNX's text defines is as the text says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


class WindowError(ValueError):
    """Attributes of windows that fit neither each other nor their input; the message is a clause."""


@dataclass(frozen=True)
class Windows:
    """Windows of `kernel` elements over inputs of `size`; a number for each dimension.

    Window o, of `out`, begins at o * stride - before, and its elements are `dilation` apart. `before` is negative where
    the first window begins inside the input. counted: an average divides by how many of a window's elements lie in
    [first, last); None: by all of them.
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
    def whole(self) -> bool:
        """Whether the one window is the input: onnxruntime then takes QLinearAveragePool for a global average."""
        return self.kernel == self.size and not any(self.before + self.after)

    def taps(self, axis: int, o: int) -> range:
        """Elements of the input, or of what is around it, that window `o` has along `axis`."""
        start = o * self.stride[axis] - self.before[axis]
        return range(start, start + self.kernel[axis] * self.dilation[axis], self.dilation[axis])

    def empty(self, axis: int) -> list[int]:
        """Windows without an element of the input along `axis`: dilated ones, with elements on both sides of it."""
        size = range(self.size[axis])
        return [o for o in range(self.out[axis]) if not any(tap in size for tap in self.taps(axis, o))]

    def counts(self, axis: int) -> list[int]:
        """What averages divide by along `axis`, for each window; the product over all axes is the divisor."""
        bounds, kernel, dilation = self.counted[axis], self.kernel[axis], self.dilation[axis]
        if bounds is None:
            return [kernel] * self.out[axis]
        starts = (o * self.stride[axis] - self.before[axis] for o in range(self.out[axis]))
        ends = [(max(0, -(-(bounds[0] - s) // dilation)), min(kernel, -(-(bounds[1] - s) // dilation))) for s in starts]
        return [max(0, end - first) for first, end in ends]

    def margins(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What windows reach before and after each dimension of the input, and no more; negative before is cut off."""
        ends = (self.taps(d, count - 1)[-1] + 1 for d, count in enumerate(self.out))
        return self.before, tuple(max(0, end - size) for end, size in zip(ends, self.size))

    def framed(self, x: NDArray[Any], fill: Any, axis: int) -> NDArray[Any]:
        """`x`, whose dimensions from `axis` on have these windows, from where the first of them begin, and with `fill`
        where they reach beyond it."""
        before, after = self.margins()
        if not any((*before, *after)):
            return x
        edges = [(0, 0)] * x.ndim
        edges[axis : axis + len(before)] = [(max(0, b), a) for b, a in zip(before, after)]
        inside = x[(*[slice(None)] * axis, *(slice(max(0, -b), None) for b in before))]
        return np.pad(inside, edges, constant_values=np.asarray(fill, x.dtype))

    def below_one_row(self) -> Windows:
        """Those of one dimension, over an image of one row."""
        size, kernel, stride, dilation = ((1, *v) for v in (self.size, self.kernel, self.stride, self.dilation))
        before, after, out = (0, *self.before), (0, *self.after), (1, *self.out)
        return Windows(size, kernel, stride, dilation, before, after, out, ((0, 1), *self.counted))


def windows(op: str, attrs: Mapping[str, Any], size: Sequence[int], kernel: Sequence[int] | None = None) -> Windows:
    """Those of operator `op` with `attrs` over inputs of `size`.

    kernel: of the weights, for operators that have them; others have it as an attribute. Raises WindowError.

    >>> windows("MaxPool", {"kernel_shape": [1], "strides": [2], "ceil_mode": 1}, [4]).out  # a third would be outside
    (2,)
    """
    n = len(size)
    kernel = _numbers("kernel_shape", attrs.get("kernel_shape") if kernel is None else kernel, n, 1)
    stride = _numbers("strides", attrs.get("strides") or [1] * n, n, 1)
    dilation = _numbers("dilations", attrs.get("dilations") or [1] * n, n, 1)
    pads = _numbers("pads", attrs.get("pads") or [0] * 2 * n, 2 * n, 0)
    auto = attrs.get("auto_pad") or "NOTSET"
    pooling = op.endswith("Pool")
    before, after = list(pads[:n]), list(pads[n:])
    for d in range(n):
        if auto in ("SAME_UPPER", "SAME_LOWER"):
            # Pooling leaves dilations out here, and counts outputs with them.
            reach = kernel[d] if pooling else (kernel[d] - 1) * dilation[d] + 1
            before[d], after[d] = halves(_same(size[d], stride[d], reach, not pooling), auto)
        elif auto == "VALID":
            before[d] = after[d] = 0
        elif auto != "NOTSET":
            raise WindowError(f"auto_pad {auto!r}; ONNX has NOTSET, SAME_UPPER, SAME_LOWER and VALID")
    include, ceil = bool(attrs.get("count_include_pad")), bool(attrs.get("ceil_mode"))
    beyond = "QLinear" in op  # which divides by what windows have beyond the padding, too
    out = []
    for d in range(n):
        reach = (kernel[d] - 1) * dilation[d] + 1
        room = size[d] + before[d] + after[d] - reach
        steps = room // stride[d]
        if pooling:
            steps = -(-room // stride[d]) if ceil or room < 0 else steps  # towards zero, as C++ does
            if ceil and steps * stride[d] >= size[d] + before[d]:
                steps -= 1  # a window must begin inside the input or the padding before it
        if steps < -pooling or (room < 0 and include and not (beyond or ceil)):  # of which versions have other averages
            raise WindowError(f"a window of {reach} on {size[d]} elements with padding of {before[d]} and {after[d]}")
        out.append(steps + 1)
    counted = tuple((0, n) if not include else None if beyond else (-b, n + a) for n, b, a in zip(size, before, after))
    return Windows(tuple(size), kernel, stride, dilation, tuple(before), tuple(after), tuple(out), counted)


@dataclass(frozen=True)
class Spread:
    """Where a transposed convolution adds the product of input i and weight k: i * stride + k * dilation - before, of
    `out` outputs; a number for each dimension."""

    size: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    before: tuple[int, ...]
    out: tuple[int, ...]

    def below_one_row(self) -> Spread:
        """That of one dimension, over an image of one row."""
        size, kernel, stride, dilation = ((1, *v) for v in (self.size, self.kernel, self.stride, self.dilation))
        return Spread(size, kernel, stride, dilation, (0, *self.before), (1, *self.out))


def spread(attrs: Mapping[str, Any], size: Sequence[int], kernel: Sequence[int] | None = None) -> Spread:
    """That of a transposed convolution, or of MaxUnpool. Raises WindowError.

    >>> spread({"strides": [3], "auto_pad": "SAME_UPPER"}, [4], [2]).out  # its kernel reaches no further
    (11,)
    """
    n = len(size)
    kernel = _numbers("kernel_shape", attrs.get("kernel_shape") if kernel is None else kernel, n, 1)
    stride = _numbers("strides", attrs.get("strides") or [1] * n, n, 1)
    dilation = _numbers("dilations", attrs.get("dilations") or [1] * n, n, 1)
    pads = _numbers("pads", attrs.get("pads") or [0] * 2 * n, 2 * n, 0)
    extra = _numbers("output_padding", attrs.get("output_padding") or [0] * n, n, 0)
    auto = attrs.get("auto_pad") or "NOTSET"
    wanted = list(attrs.get("output_shape") or ())[-n:]
    full = [(s - 1) * t + (k - 1) * d + 1 + e for s, t, k, d, e in zip(size, stride, kernel, dilation, extra)]
    before, out = [], []
    for d in range(n):
        low, high = pads[d], pads[n + d]
        if wanted or auto.startswith("SAME"):
            low, high = halves(max(0, full[d] - (wanted[d] if wanted else size[d] * stride[d])), auto)
        before.append(low)
        out.append(wanted[d] if wanted else full[d] - low - high)
    if min(out, default=1) < 1:
        raise WindowError(f"an output of {out}")
    return Spread(tuple(size), kernel, stride, dilation, tuple(before), tuple(out))


def halves(total: int, auto: str) -> tuple[int, int]:
    """Padding before and after: the larger half comes after for SAME_UPPER.

    >>> halves(3, "SAME_UPPER"), halves(3, "SAME_LOWER")
    ((1, 2), (2, 1))
    """
    before = int(total / 2) if auto == "SAME_UPPER" else int((total + 1) / 2)  # towards zero, as C++ does
    return before, total - before


def _same(size: int, stride: int, reach: int, convolution: bool) -> int:
    """Padding of both sides together, with which windows of `reach` have size / stride outputs; it may be negative."""
    wanted = -(-size // stride)
    total = (wanted - 1) * stride + reach - size
    if convolution and int((size + 2 * total - reach) / stride + 1) < wanted:
        total += 1
    return total


def _numbers(name: str, given: Any, count: int, least: int | None = None) -> tuple[int, ...]:
    numbers = tuple(int(number) for number in given or ())
    if len(numbers) != count:
        raise WindowError(f"{name} {list(numbers)}, which are {len(numbers)} numbers and not {count}")
    if least is not None and min(numbers, default=least) < least:
        raise WindowError(f"{name} {list(numbers)} below {least}")
    return numbers
