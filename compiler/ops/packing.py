"""Layouts of the bytes of an integer convolution, in which windows move by one element.

Images are split by the stride; channels or elements of a line share a word; weights are packed to match. A subclass of
ConvPacking for each way in which processors multiply bytes; integer._packing decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from celosia.compiler import expr as T
from celosia.compiler.expr import INDEX, Axis, Expr, Tensor, call, select, wrap
from celosia.compiler.expr.math_functions import ONES
from celosia.compiler.ops.registry import Shape
from celosia.compiler.ops.window import SlidingWindow
from celosia.compiler.target import target


def quad(element: Callable[[int], Expr], flip: bool = False) -> Expr:
    """Return bytes 0 to 3 as a uint32, the first lowest; flip: with inverted top bits."""
    total: Expr | None = None
    for k in range(4):
        byte = element(k).astype("uint8").astype("uint32") << 8 * k
        total = byte if total is None else total | byte
    assert total is not None
    return total ^ (0x80 * ONES) if flip else total


def pair(element: Callable[[int], Expr], flip: bool = False) -> Expr:
    """Return bytes 0 and 1 as a uint16, the first lowest; flip: with inverted top bits."""
    low, high = (element(k).astype("uint8").astype("uint16") for k in range(2))
    total = low | high << 8
    return total ^ 0x8080 if flip else total


def dot(x: Expr, w: Expr, axes: Any) -> Expr:
    """Return the int32 sum over `axes` of four byte products each."""
    return T.sum(call("dot4", x, w), axes)


class ConvPacking:
    """Layout in which the bytes of a convolution share a word; the base class has uint32 words of four.

    steps: extents of the reduction, the first over channels. reach: elements of the image from one step to the next,
    in each dimension. phases, lines: of the packed image, remainders of the stride, and lines of each. moves: elements
    from one line to the next, in each dimension. length: elements from the first window to the end of the last. zero:
    the zero point of the packed image, None for 0.
    """

    def __init__(
        self, x: Tensor, w: Tensor, window: SlidingWindow, group: int, zx: Expr, steps: Shape, reach: Shape
    ):  # fmt: skip
        self.x, self.w, self.window, self.group = x, w, window, group
        self.cg = w.shape[1]
        self.steps, self.reach = steps, reach
        self.phases = tuple(s if k > 1 else 1 for s, k in zip(window.stride, steps[1:]))
        self.lines = tuple(
            o + (k - 1) * d // s for o, k, d, s in zip(window.out, steps[1:], reach, window.stride)
        )  # fmt: skip
        self.flip = x.dtype == "int8"
        self.zero: Expr | None = zx
        self.pad = (zx.astype("uint8") ^ (128 if self.flip else 0)).astype(x.dtype)
        self.extents = tuple(line * s for line, s in zip(self.lines, window.stride))
        self.moves = [prod(self.lines[d + 1 :]) for d in range(len(self.lines))]
        self.length = sum((o - 1) * move for o, move in zip(window.out, self.moves)) + 1

    def axes(self) -> tuple[Axis, ...]:
        """Create the reduction axes."""
        return tuple(T.reduce_axis(size, f"k{d}") for d, size in enumerate(self.steps))

    def product(self, image: Tensor, weights: Tensor, channel: Expr, ni: Expr, g: Expr, place: Expr) -> Expr:
        """Return the sum of the window that begins at `place`, times the weights of a channel."""
        ks = self.axes()
        return dot(image.flat(self.start(image, ni, g, ks) + place), weights[(channel, *ks)], ks)

    def total(self, weights: Tensor, channel: Expr) -> Expr:
        """Return the sum of the weights of a channel."""
        ks = self.axes()
        return dot(wrap(ONES, "uint32"), weights[(channel, *ks)], ks)

    def image(self) -> Tensor:
        """Return the packed image: [N, group * channel steps, phases..., lines...] of uint32."""
        return self._image(self.group * self.steps[0])

    def _image(self, channels: int) -> Tensor:
        """Return the packed image with `channels` words for each element."""
        sp = len(self.window.size)

        def body(ni: Expr, block: Expr, *rest: Expr) -> Expr:
            phase, line = rest[:sp], rest[sp:]
            own = [i * s + p for i, s, p in zip(line, self.window.stride, phase)]
            return self.bytes_at(ni, block, own)

        shape = (self.x.shape[0], channels, *self.phases, *self.lines)
        return T.compute(shape, body, "image")

    def bytes_at(self, ni: Expr, block: Expr, own: Sequence[Expr]) -> Expr:
        """Return the word of the padded image at index `own`, of channel block `block`."""
        raise NotImplementedError

    def weights(self, change: Callable[[Expr], Expr]) -> Tensor:
        """Return the packed weights, each element through `change`, filled up with 0: [M, *steps] of uint32."""
        return self.packed(self.w, change)

    def packed(self, w: Tensor, change: Callable[[Expr], Expr]) -> Tensor:
        """Pack any weights [..., C/group, *kernel], as `weights` does with w."""
        raise NotImplementedError

    def start(self, image: Tensor, ni: Expr, g: Expr, ks: Sequence[Expr]) -> Expr:
        """Return the flat element of `image` for step `ks` of the first window."""
        channel: Expr = g * self.steps[0] + ks[0]
        phase: Expr = wrap(0, INDEX)
        place: Expr = wrap(0, INDEX)
        for k, reach, phases, lines in zip(ks[1:], self.reach, self.phases, self.lines):
            phase = phase * phases + k * reach % phases
            place = place * lines + k * reach // phases
        return ((ni * image.shape[1] + channel) * prod(self.phases) + phase) * prod(self.lines) + place

    def windows_of(self, planes: Tensor) -> Tensor:
        """Extract the windows' results from `planes` [N, group, M/group, length]: [N, M, ...]."""
        n, m, out = planes.shape[0], planes.shape[1] * planes.shape[2], self.window.out
        if self.length == prod(out):
            return replace(planes, shape=(n, m, *out))
        planes = replace(planes, stored=True)

        def body(ni: Expr, mi: Expr, *o: Expr) -> Expr:
            place: Expr = wrap(0, INDEX)
            for i, move in zip(o, self.moves):
                place = place + i * move
            return planes.flat((ni * m + mi) * self.length + place)

        return T.compute((n, m, *out), body, "lines")

    def inside(self, own: Sequence[Expr], ends: Sequence[int]) -> Expr | None:
        """Return the test whether an index below `ends` into the padded image is inside; None for always."""
        result: Expr | None = None
        for i, before, size, end in zip(own, self.window.before, self.window.size, ends):
            for needed, test in ((before > 0, i >= before), (end > before + size, i < before + size)):
                if needed:
                    result = test if result is None else result & test
        return result

    def shifted(self, own: Sequence[Expr]) -> list[Expr]:
        """Convert an index into the padded image to one into the image."""
        return [i - before for i, before in zip(own, self.window.before)]

    def padded(self, ends: Sequence[int]) -> Tensor:
        """Return x with zero points around it, `ends` elements in each dimension, in memory."""

        def body(ni: Expr, c: Expr, *own: Expr) -> Expr:
            here, inside = self.x[(ni, c, *self.shifted(own))], self.inside(own, ends)
            return here if inside is None else select(inside, here, self.pad)

        return replace(T.compute((*self.x.shape[:2], *ends), body, "padded"), stored=True)


class Channels(ConvPacking):
    """Four channels in a uint32: for groups with enough channels and processors with dot products of four bytes."""

    def __init__(self, x: Tensor, w: Tensor, window: SlidingWindow, group: int, zx: Expr):
        super().__init__(x, w, window, group, zx, (-(-w.shape[1] // 4), *window.kernel), window.dilation)
        whole = all(b == 0 and e <= n for b, e, n in zip(window.before, self.extents, window.size))
        self.direct = whole or set(window.stride) == {1}
        self.source = x if self.direct else self.padded(self.extents)

    def bytes_at(self, ni: Expr, block: Expr, own: Sequence[Expr]) -> Expr:
        """Return four channels of an element; the zero point outside of the image."""
        first = block * 4
        if self.cg % 4:
            first = block // self.steps[0] * self.cg + block % self.steps[0] * 4
        at = self.shifted(own) if self.direct else own

        def element(j: int) -> Expr:
            return self.source[(ni, first + j if self.cg % 4 == 0 else T.minimum(first + j, self.x.shape[1] - 1), *at)]

        here, inside = quad(element, self.flip), self.inside(own, self.extents) if self.direct else None
        return here if inside is None else select(inside, here, quad(lambda j: self.pad, self.flip))

    def packed(self, w: Tensor, change: Callable[[Expr], Expr]) -> Tensor:
        """Return weights [M, *steps] of uint32: four channels each."""

        def body(m: Expr, kc: Expr, *taps: Expr) -> Expr:
            def element(j: int) -> Expr:
                value = change(w[(m, kc * 4 + j, *taps)])
                return value if self.cg % 4 == 0 else select(kc * 4 + j < self.cg, value, 0)

            return quad(element)

        return T.compute((w.shape[0], *self.steps), body, "weights")


class LineQuads(ConvPacking):
    """Four elements of a line in a uint32: for groups with few channels, such as depthwise convolutions."""

    def __init__(self, x: Tensor, w: Tensor, window: SlidingWindow, group: int, zx: Expr):
        *first, last = window.kernel
        *reach, move = window.dilation
        super().__init__(x, w, window, group, zx, (w.shape[1], *first, -(-last // 4)), (*reach, 4 * move))
        self.ends = (*self.extents[:-1], self.extents[-1] + 3 * move)
        # Elements are read up to four times, and with conditions, for which a processor needs masks of bytes.
        self.direct = set(window.stride) == {1} and (x.body is None or x.stored) and "avx512bw" in target().features
        self.source = x if self.direct else self.padded(self.ends)

    def bytes_at(self, ni: Expr, block: Expr, own: Sequence[Expr]) -> Expr:
        """Return four elements of a line, spaced by the dilation; zero points outside of the image."""
        *lead, last = own

        def element(j: int) -> Expr:
            at = [*lead, last + j * self.window.dilation[-1]]
            if not self.direct:
                return self.source[(ni, block, *at)]
            here, inside = self.source[(ni, block, *self.shifted(at))], self.inside(at, self.ends)
            return here if inside is None else select(inside, here, self.pad)

        return quad(element, self.flip)

    def packed(self, w: Tensor, change: Callable[[Expr], Expr]) -> Tensor:
        """Return weights [M, *steps] of uint32: four taps of a line each."""
        size = self.window.kernel[-1]

        def body(m: Expr, kc: Expr, *taps: Expr) -> Expr:
            def element(j: int) -> Expr:
                tap = taps[-1] * 4 + j
                value = change(w[(m, kc, *taps[:-1], tap)])
                return value if size % 4 == 0 else select(tap < size, value, 0)

            return quad(element)

        return T.compute((w.shape[0], *self.steps), body, "weights")


def stored(value: Expr) -> Expr:
    """Return a number that is computed once, into memory, instead of by each vector in wider types."""
    return replace(T.compute((1,), lambda i: value, "fixed"), stored=True)[0]


class Pairs(ConvPacking):
    """Two channels in a uint16, for NEON's products of int8 that are added in pairs. Four channels are a step.

    narrow: no weight is -128, so that two products fit into int16.
    """

    def __init__(self, x: Tensor, w: Tensor, window: SlidingWindow, group: int, zx: Expr, narrow: bool):
        super().__init__(x, w, window, group, zx, (-(-w.shape[1] // 4), *window.kernel), window.dilation)
        self.flip, self.zero, self.narrow = x.dtype == "uint8", zx - 128, narrow
        whole = all(b == 0 and e <= n for b, e, n in zip(window.before, self.extents, window.size))
        self.direct = whole or set(window.stride) == {1}
        self.pad = stored(self.pad)
        self.source = x if self.direct else self.padded(self.extents)

    def image(self) -> Tensor:
        """Return the packed image: [N, group * channel steps * 2, phases..., lines...] of uint16."""
        return self._image(2 * self.group * self.steps[0])

    def bytes_at(self, ni: Expr, block: Expr, own: Sequence[Expr]) -> Expr:
        """Return two channels of an element."""
        first = block * 2
        if self.cg % 4:
            pairs = 2 * self.steps[0]
            first = block // pairs * self.cg + block % pairs * 2
        at = self.shifted(own) if self.direct else own

        def element(j: int) -> Expr:
            return self.source[(ni, first + j if self.cg % 4 == 0 else T.minimum(first + j, self.x.shape[1] - 1), *at)]

        here, inside = pair(element, self.flip), self.inside(own, self.extents) if self.direct else None
        return here if inside is None else select(inside, here, stored(pair(lambda j: self.pad, self.flip)))

    def packed(self, w: Tensor, change: Callable[[Expr], Expr]) -> Tensor:
        """Return the packed weights: [M, *steps, 2] of uint16."""

        def body(m: Expr, kc: Expr, *taps: Expr) -> Expr:
            def element(j: int) -> Expr:
                channel = kc * 4 + taps[-1] * 2 + j
                value = change(w[(m, channel, *taps[:-1])])
                return value if self.cg % 4 == 0 else select(channel < self.cg, value, 0)

            return pair(element)

        return T.compute((w.shape[0], *self.steps, 2), body, "weights")

    def product(self, image: Tensor, weights: Tensor, channel: Expr, ni: Expr, g: Expr, place: Expr) -> Expr:
        ks = self.axes()
        start = self.start(image, ni, g * 2, [ks[0] * 2, *ks[1:]]) + place
        plane = prod(image.shape[2:])
        x, w = [image.flat(start + half * plane) for half in range(2)], [weights[(channel, *ks, k)] for k in range(2)]
        return T.sum(call("narrow_pairs" if self.narrow else "pairs", *x, *w), ks)

    def total(self, weights: Tensor, channel: Expr) -> Expr:
        ks, ones = self.axes(), wrap(ONES & 0xFFFF, "uint16")
        return T.sum(call("pairs", ones, ones, *(weights[(channel, *ks, k)] for k in range(2))), ks)


class Widened(ConvPacking):
    """An int16 for each element, its difference from zx: for few channels with NEON."""

    def __init__(self, x: Tensor, w: Tensor, window: SlidingWindow, group: int, zx: Expr):
        super().__init__(x, w, window, group, zx, w.shape[1:], window.dilation)
        self.zero = None
        own = zx - 128 if x.dtype == "int8" else zx
        self.difference = stored(own.astype("int16"))
        whole = all(b == 0 and e <= n for b, e, n in zip(window.before, self.extents, window.size))
        self.direct = whole or set(window.stride) == {1}
        self.pad = stored(self.pad)
        self.source = x if self.direct else self.padded(self.extents)

    def bytes_at(self, ni: Expr, block: Expr, own: Sequence[Expr]) -> Expr:
        """Return the difference of one element from zx; 0 outside of the image."""
        at = self.shifted(own) if self.direct else own
        here = self.source[(ni, block, *at)].astype("int16") - self.difference
        inside = self.inside(own, self.extents) if self.direct else None
        return here if inside is None else select(inside, here, 0)

    def packed(self, w: Tensor, change: Callable[[Expr], Expr]) -> Tensor:
        """Return the weights as int16: [M, *steps]."""
        return T.compute(w.shape, lambda *i: change(w[i]).astype("int16"), "weights")

    def product(self, image: Tensor, weights: Tensor, channel: Expr, ni: Expr, g: Expr, place: Expr) -> Expr:
        ks = self.axes()
        x = image.flat(self.start(image, ni, g, ks) + place)
        return T.sum(x.astype("int32") * weights[(channel, *ks)].astype("int32"), ks)
