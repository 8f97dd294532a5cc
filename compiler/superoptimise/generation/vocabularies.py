"""Vocabularies of the generator: the tensors and operators of one kind of network block, with symbolic sizes.

Operators are made by the functions that write the hand-written rules (`rules/`). A product has its constants with it:
weights that are put together, cut or padded are computed when a model is rewritten, and cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import permutations
from typing import Any

import numpy as np

from celosia.compiler.superoptimise.rule import RewriteRule
from celosia.compiler.superoptimise.rules.convolutions import WZ, padded, spread
from celosia.compiler.superoptimise.rules.merging import (
    KERNEL,
    PADS,
    XZ,
    C,
    H,
    N,
    W,
    constants,
    convolution,
    joined,
    matrices,
    part,
)
from celosia.compiler.superoptimise.rules.moving import mapped, transposed
from celosia.compiler.superoptimise.sizes import Dim, OneOf, OpenSize
from celosia.compiler.superoptimise.terms import ByteFunction, Leaf, Term, apply

Unary = Callable[[Term], Term]
Binary = Callable[[Term, Term], Term]
Range = tuple[int, int]
"""Least value of a size where terms are compared, and the first that is too large."""
SMALL: dict[str, Range] = {"kh": (1, 4), "kw": (1, 4), "p": (0, 2), "q": (2, 4)}
DIMENSIONS: Range = (4, 13)
"""Values of other sizes, all different, so that two tensors seldom have one shape by accident; padding is 0 or 1."""


@dataclass(frozen=True)
class AlgebraVocabulary:
    """Tensors and operators. ranges: of sizes beside SMALL. shifts: hints for the prover, as in RewriteRule."""

    name: str
    leaves: tuple[Leaf, ...]
    unary: tuple[Unary, ...]
    binary: tuple[Binary, ...] = ()
    max_operators: int = 3
    ranges: Mapping[str, Range] = field(default_factory=dict)
    shifts: tuple[Dim, ...] = ()

    @cached_property
    def _sizes(self) -> RewriteRule:
        """A rule of all terms of one operator: it lists the sizes that they name."""
        x = self.leaves[0]
        return RewriteRule("", "", (*self.leaves, *(op(x) for op in self.unary), *(op(x, x) for op in self.binary)), ())

    def draw(self, rng: np.random.Generator) -> dict[str, Any]:
        """Values of all sizes."""
        values: dict[str, Any] = {each.name: each.among[rng.integers(len(each.among))] for each in self._sizes.choices}
        others = iter(rng.permutation(np.arange(*DIMENSIONS)).tolist())
        for size in self._sizes.sizes:
            limits = {**SMALL, **self.ranges}.get(size.name, None if size.least else (0, 2))
            values[size.name] = next(others) if limits is None else int(rng.integers(*limits))
        return values


F, M, G = ByteFunction("f"), ByteFunction("m"), ByteFunction("h")
"""A function of bytes, a monotone one (generator.py asks it of names with m), and one of two bytes."""
P, Q, O1, O2, E = OpenSize("p", 0), OpenSize("q"), OpenSize("o1"), OpenSize("o2"), OpenSize("e")
IMAGES = tuple(Leaf(name, (N, C, H, W)) for name in "xy")
NONE = (0, 0, 0, 0)
PLAIN: dict[str, Any] = {"strides": (1, 1), "dilations": (1, 1)}


def function(f: ByteFunction) -> Unary:
    """A function of single bytes."""
    return lambda x: mapped(f, x)


def cut(axis: int, start: Dim = P, stop: Dim = Q) -> Unary:
    """Slice."""
    return lambda x: part(x, axis, start, stop)


def join(axis: int) -> Binary:
    """Concat."""
    return lambda a, b: joined(axis, a, b)


def turn(*perm: int) -> Unary:
    """Transpose."""
    return lambda x: transposed(x, perm)


def pool(kernel: tuple[Dim, ...], **windows: Any) -> Unary:
    """MaxPool."""
    return lambda x: apply("largest", x, kernel=kernel, **windows)


def convolve(weights: list[Term], **windows: Any) -> Unary:
    """A requantised convolution. weights: w, its zero points, bias and multipliers."""
    return lambda x: convolution(x, *weights, **windows)


def multiply(axis: int, weights: list[Term]) -> Unary:
    """A requantised product with a constant. axis: the last of its operand."""
    return lambda x: matrices(axis, x, *weights)


def kernel(number: int, outputs: Dim = C, inputs: Dim = C, size: tuple[Dim, ...] = KERNEL) -> list[Term]:
    """Constants of a convolution."""
    return [*constants(number, outputs, (outputs, inputs, *size))]


def both(first: list[Term], second: list[Term], axis: int = 0) -> list[Term]:
    """Constants of one product that has the outputs of two. axis: outputs of w."""
    return [joined(0 if place else axis, a, b) for place, (a, b) in enumerate(zip(first, second))]


def some(weights: list[Term], axis: int = 0) -> list[Term]:
    """Constants of the outputs P to Q alone. axis: outputs of w."""
    return [part(each, 0 if place else axis, P, Q) for place, each in enumerate(weights)]


def _strides() -> AlgebraVocabulary:
    """Convolutions with strides and without, and MaxPool of single pixels, which drops rows and columns."""
    steps = OneOf("steps", ((2, 2), (1, 2), (2, 1)))
    taps, one = kernel(1), kernel(2, size=(1, 1))
    ops = (
        function(F), pool((1, 1), pads=NONE, strides=steps, dilations=(1, 1)),
        convolve(taps, strides=(1, 1)), convolve(taps, strides=steps),
        convolve(one, pads=NONE, **PLAIN), convolve(one, pads=NONE, strides=steps, dilations=(1, 1)),
    )  # fmt: skip
    ranges = {"h": (8, 12), "w": (8, 12)}
    return AlgebraVocabulary("strides", IMAGES, ops, (lambda a, b: mapped(G, a, b),), ranges=ranges)


def _crops(axis: int) -> AlgebraVocabulary:
    """Slices of rows or columns around convolutions, of their borders too. axis: 2 or 3."""
    rate, other = OneOf("rate", (1, 2, 4, 8)), OneOf("other", (1, 2))
    length, before, behind = (H, W)[axis - 2], PADS[axis - 2], PADS[axis]
    reach = rate * (KERNEL[axis - 2] - 1)
    result = length + before + behind - reach
    taps, dilations = kernel(1), (rate, other) if axis == 2 else (other, rate)

    def padding(first: Dim, last: Dim) -> Unary:
        pads = list(PADS)
        pads[axis - 2], pads[axis] = first, last  # type: ignore[call-overload]
        return convolve(taps, strides=(1, 1), dilations=dilations, pads=tuple(pads))

    ops = (
        function(F), padding(0, 0), padding(before, behind), padding(before, behind + E), padding(before + E, behind),
        convolve(kernel(2, size=(1, 1)), pads=NONE, **PLAIN), cut(axis), cut(axis, P, Q + reach),
        cut(axis, 0, result), cut(axis, E, E + result),
    )  # fmt: skip
    ranges = {"h": (22, 26), "w": (22, 26), "kh": (1, 3), "kw": (1, 3), "e": (1, 3)}
    return AlgebraVocabulary(f"crops of {('rows', 'columns')[axis - 2]}", IMAGES, ops, (join(axis),), 2, ranges)


def _convolutions() -> AlgebraVocabulary:
    """Convolutions whose weights are put together, cut and padded."""
    first, second = kernel(1, O1), kernel(2, O2)
    uniform: list[Term] = [Leaf("w", (O1, C, *KERNEL), True), spread(WZ, O1), *(Leaf(x, (O1,), True) for x in "bm")]
    narrow: list[Term] = [Leaf("w", (O1, Q - P, *KERNEL), True), *uniform[1:]]
    wide = [padded(narrow[0], WZ, (0, P, 0, 0, 0, C - Q, 0, 0)), *uniform[1:]]
    around = tuple(OpenSize(f"around{i}", 0) for i in range(4))
    more: dict[str, Any] = {"pads": tuple(a + b for a, b in zip(PADS, around))}
    ops = (
        function(F), *(convolve(each) for each in (first, second, both(first, second), some(first), narrow, wide)),
        convolve(first, **more), lambda x: padded(x, XZ, (0, 0, *around[:2], 0, 0, *around[2:])),
        cut(0), cut(1), cut(1, 0, O1), cut(1, O1, O1 + O2),
    )  # fmt: skip
    ranges = {"n": (4, 6), "h": (9, 12), "w": (9, 12), "kh": (1, 3), "kw": (1, 3)}
    return AlgebraVocabulary("convolutions", IMAGES, ops, (join(0), join(1)), 2, ranges, shifts=(P,))


def _products(rank: int) -> AlgebraVocabulary:
    """Products with constants, and Slice and Concat along each axis."""
    sizes, last = tuple(OpenSize(f"d{axis}") for axis in range(rank)), rank - 1
    first, second = (list[Term](constants(i, o, (sizes[-1], o))) for i, o in ((1, O1), (2, O2)))
    ops = (
        function(F), *(multiply(last, each) for each in (first, second, both(first, second, 1), some(first, 1))),
        *map(cut, range(rank)), cut(last, 0, O1), cut(last, O1, O1 + O2), *([turn(1, 0, 2)] if rank == 3 else []),
    )  # fmt: skip
    leaves = tuple(Leaf(name, sizes) for name in "xy")
    return AlgebraVocabulary(f"products of rank {rank}", leaves, ops, tuple(map(join, range(rank))), 2)


def _movement(rank: int) -> AlgebraVocabulary:
    """Functions of bytes, Slice, Concat, Transpose; of images MaxPool, too."""
    sizes = tuple(OpenSize(f"d{axis}") for axis in range(rank))
    perms = [*permutations(range(rank))][1:] if rank < 4 else [(0, 2, 3, 1), (0, 3, 1, 2)]
    strides = OneOf("strides", ((1, 1), (2, 2), (3, 3)))
    windows: dict[str, Any] = {"pads": PADS, "strides": strides, "dilations": (1, 1)}
    unary = (function(F), function(M), *map(cut, range(rank)), *(turn(*perm) for perm in perms))
    binary = (lambda a, b: mapped(G, a, b), *map(join, range(rank)))
    leaves = tuple(Leaf(name, sizes) for name in "xyu")
    pools = (pool(KERNEL, **windows),) if rank == 4 else ()
    return AlgebraVocabulary(f"movement of rank {rank}", leaves, unary + pools, binary, 2, {"kh": (2, 4), "kw": (2, 4)})


MOVEMENT, PRODUCTS = map(_movement, (2, 3, 4)), map(_products, (2, 3))
VOCABULARIES = (*MOVEMENT, *PRODUCTS, _convolutions(), _crops(2), _crops(3), _strides())
