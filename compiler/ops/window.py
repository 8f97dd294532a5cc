"""Sliding windows of convolutions and pooling, as indices of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from celosia.compiler import expr as T
from celosia.compiler.expr import INDEX, Expr, Tensor, wrap
from celosia.compiler.ops.registry import Change, Node, Shape
from celosia.compiler.ops.shape import padded
from celosia.compiler.program.host.window_geometry import Windows, windows


@dataclass(frozen=True)
class SlidingWindow(Windows):
    """Window geometry (see Windows) with methods that index tensors by expressions, for builders."""

    @classmethod
    def of(cls, node: Node, size: Shape, kernel: Shape | None = None) -> SlidingWindow:
        """Derive the windows of `node` over inputs of spatial `size`. Raises WindowError.

        kernel: spatial shape of the weights; None for pooling, which has it as an attribute.
        """
        geometry = windows(node.op, node.attrs, size, kernel)
        return cls(*(getattr(geometry, field.name) for field in fields(geometry)))

    def padded(self, x: Tensor, value: Expr, change: Change = None) -> Tensor:
        """Pad x [N, C, ...] with `value` as far as windows reach; elements of x go through `change` first."""
        before, after = self.margins()
        lead = (0,) * (len(x.shape) - len(self.size))
        return padded(x, (*lead, *before), (*lead, *after), value, change)

    def phases(self, x: Tensor, value: Expr, change: Change = None) -> Tensor:
        """Pad x [N, C, ...] and split it by remainders of the strides, so that windows move by one element.

        Elements of x go through `change` first. Shape of the result: [N, C, remainders..., lines...], without the
        remainders where all strides are 1.
        """
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
            batch_and_channel, spatial = i[: len(lead)], i[len(lead) :]
            remainders, lines = spatial[: len(self.stride)], spatial[len(self.stride) :]
            pixel = (line * s + remainder for remainder, line, s in zip(remainders, lines, self.stride))
            return image[(*batch_and_channel, *pixel)]

        return T.compute(shape, body, "phases")

    def at(self, out: Sequence[Expr], k: Sequence[Expr]) -> tuple[Expr, ...]:
        """Return the spatial index, in the padded input, of element `k` of window `out`."""
        return tuple(o * s + i * d for o, s, i, d in zip(out, self.stride, k, self.dilation))

    def count(self, out: Sequence[Expr]) -> Expr:
        """Return the number by which an average over window `out` divides, as an index expression; at least 1."""
        total: Expr = wrap(1, INDEX)
        for d, o in enumerate(out):
            counts = self.divisors(d)
            if len(set(counts)) <= 1:  # none where there is no window
                total = total * max((1, *counts[:1]))
                continue
            bounds = self.counted[d]
            assert bounds is not None
            start, dilation = o * self.stride[d] - self.before[d], self.dilation[d]
            first = (T.maximum(wrap(bounds[0], INDEX) - start, 0) + (dilation - 1)) // dilation
            last = T.minimum((wrap(bounds[1] - 1, INDEX) - start) // dilation, self.kernel[d] - 1)
            inside = last - first + 1
            total = total * (inside if min(counts) else T.maximum(inside, 1))
        return total
