"""Where sliding windows stand, for convolutions and pooling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from celosia.compiler import expr as T
from celosia.compiler.cpu.ops.registry import Change, Node, Shape
from celosia.compiler.cpu.ops.shape import padded
from celosia.compiler.cpu.runtime.windows import same_pads
from celosia.compiler.expr import INDEX, Expr, Tensor, wrap


@dataclass(frozen=True)
class SlidingWindow:
    """Where a sliding window of `kernel` elements stands: o * stride + k * dilation - before, over inputs `size`."""

    size: Shape
    kernel: Shape
    stride: Shape
    dilation: Shape
    before: Shape
    after: Shape
    out: Shape

    @classmethod
    def of(cls, node: Node, size: Shape, kernel: Shape) -> SlidingWindow:
        """From the attributes strides, dilations, pads, auto_pad, ceil_mode."""
        n = len(size)
        strides = tuple(int(v) for v in node.attrs.get("strides", (1,) * n))
        dilations = tuple(int(v) for v in node.attrs.get("dilations", (1,) * n))
        pads = [int(v) for v in node.attrs.get("pads", (0,) * 2 * n)]
        auto = node.attrs.get("auto_pad", "NOTSET")
        if not len(kernel) == len(strides) == len(dilations) == n or len(pads) != 2 * n:
            raise node.fail(f"kernel {kernel}, strides {strides}, pads {pads} for {n} spatial dimensions")
        reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilations)]
        before, after, out = pads[:n], pads[n:], []
        for d in range(n):
            if auto in ("SAME_UPPER", "SAME_LOWER"):
                before[d], after[d] = same_pads(size[d], strides[d], reach[d], auto)
            elif auto == "VALID":
                before[d] = after[d] = 0
            room = size[d] + before[d] + after[d] - reach[d]
            steps = room // strides[d]
            if node.attrs.get("ceil_mode", 0):
                steps = -(-room // strides[d])
                if steps * strides[d] >= size[d] + before[d]:
                    steps -= 1  # a window must begin inside the input or its leading padding
            out.append(steps + 1)
            if room < 0:
                raise node.fail(f"a window of {reach[d]} on {size[d]} + {before[d]} + {after[d]} elements")
        return cls(size, kernel, strides, dilations, tuple(before), tuple(after), tuple(out))

    def margins(self) -> tuple[Shape, Shape]:
        """What windows reach before and after each dimension of the input, and no more than that."""
        after = tuple(
            max(0, (o - 1) * s + (k - 1) * d + 1 - b - n)
            for o, s, k, d, b, n in zip(self.out, self.stride, self.kernel, self.dilation, self.before, self.size)
        )
        return self.before, after

    def padded(self, x: Tensor, value: Expr, change: Change = None) -> Tensor:
        """x with all that windows reach."""
        before, after = self.margins()
        lead = (0,) * (len(x.shape) - len(self.size))
        return padded(x, (*lead, *before), (*lead, *after), value, change)

    def phases(self, x: Tensor, value: Expr, change: Change = None) -> Tensor:
        """x with all that windows reach, an image for each remainder of the strides, in which windows move by one
        element: [N, C, remainders..., lines...], without remainders where all strides are 1."""
        before, after = self.margins()
        lead = (0,) * (len(x.shape) - len(self.size))
        reached = [b + n + a for b, n, a in zip(before, self.size, after)]
        lines = tuple(-(-n // s) for n, s in zip(reached, self.stride))
        after = tuple(a + m * s - n for a, m, s, n in zip(after, lines, self.stride, reached))
        image = padded(x, (*lead, *before), (*lead, *after), value, change)
        if set(self.stride) == {1}:
            return image
        shape = (*x.shape[: len(lead)], *self.stride, *lines)

        def body(*i: Expr) -> Expr:
            rest, own = i[: len(lead)], i[len(lead) :]
            place = (line * s + phase for phase, line, s in zip(own, own[len(self.stride) :], self.stride))
            return image[(*rest, *place)]

        return T.compute(shape, body, "phases")

    def at(self, out: Sequence[Expr], k: Sequence[Expr]) -> tuple[Expr, ...]:
        """Index into the padded input."""
        return tuple(o * s + i * d for o, s, i, d in zip(out, self.stride, k, self.dilation))

    def count(self, node: Node, out: Sequence[Expr]) -> Expr:
        """How many elements of a window an average divides by, as an index."""
        total: Expr = wrap(1, INDEX)
        include = node.attrs.get("count_include_pad", 0)
        for d, o in enumerate(out):
            s, n, k, dil = self.stride[d], self.size[d], self.kernel[d], self.dilation[d]
            low, high = (0, n + self.before[d] + self.after[d]) if include else (self.before[d], self.before[d] + n)
            reach = (k - 1) * dil + 1
            if low == 0 and (self.out[d] - 1) * s + reach <= high:
                total = total * k
                continue
            start = o * s
            first = (T.maximum(wrap(low, INDEX) - start, 0) + (dil - 1)) // dil
            last = T.minimum((wrap(high - 1, INDEX) - start) // dil, k - 1)
            total = total * (last - first + 1)
        return total
