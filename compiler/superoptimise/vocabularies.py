"""Vocabularies of the generator: the tensors and operators of one kind of network block, with symbolic sizes.

Operators are written by the functions of the rules by hand (rules/). A product comes with its constants: weights that
are joined, cut or padded are computed when a model is rewritten, and cost nothing when it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import permutations
from typing import Any

import numpy as np

from celosia.compiler.superoptimise.rule import ByteFunction, Dim, Leaf, OneOf, OpenSize, RewriteRule, Term, apply
from celosia.compiler.superoptimise.rules.movement import function_of, transpose_of
from celosia.compiler.superoptimise.rules.products import (
    KERNEL,
    O1,
    O2,
    PADS,
    PLAIN,
    WZ,
    XZ,
    C,
    H,
    N,
    P,
    Q,
    W,
    concat_of,
    constants,
    convolution,
    join_constants,
    pad_of,
    product_of,
    slice_of,
    spread,
)

Unary = Callable[[Term], Term]
"""Applies an operator to one term."""
Binary = Callable[[Term, Term], Term]
"""Applies an operator to two terms."""
Range = tuple[int, int]
"""Least value of a size in an enumeration, and the one behind the greatest."""
SMALL: dict[str, Range] = {"kh": (1, 4), "kw": (1, 4), "p": (0, 2), "q": (2, 4)}
"""Ranges of sizes by name: kernels and positions of Slices."""
DIMENSIONS: Range = (4, 13)
"""Range of other sizes. All are different, so that two tensors seldom have equal shapes by accident. Padding is 0
or 1.
"""


@dataclass(frozen=True)
class AlgebraVocabulary:
    """Tensors and operators of which terms are made. max_operators: of a term. ranges: of sizes, beside SMALL. shifts:
    hints for the prover, as in RewriteRule.
    """

    name: str
    leaves: tuple[Leaf, ...]
    unary: tuple[Unary, ...]
    binary: tuple[Binary, ...] = ()
    max_operators: int = 3
    ranges: Mapping[str, Range] = field(default_factory=dict)
    shifts: tuple[Dim, ...] = ()

    @cached_property
    def _sizes(self) -> RewriteRule:
        """A rule whose sides are all terms of one operator. It only serves to list the sizes that they name."""
        x = self.leaves[0]
        return RewriteRule("", "", (*self.leaves, *(op(x) for op in self.unary), *(op(x, x) for op in self.binary)), ())

    def draw(self, rng: np.random.Generator) -> dict[str, Any]:
        """Draw values of all sizes and choices, with which random tensors tell terms apart; other sizes all differ."""
        values: dict[str, Any] = {
            choice.name: choice.among[rng.integers(len(choice.among))] for choice in self._sizes.choices
        }
        others = iter(rng.permutation(np.arange(*DIMENSIONS)).tolist())
        for size in self._sizes.sizes:
            limits = {**SMALL, **self.ranges}.get(size.name, None if size.least else (0, 2))
            values[size.name] = next(others) if limits is None else int(rng.integers(*limits))
        return values


F, M, G = ByteFunction("f"), ByteFunction("m"), ByteFunction("h")
"""Functions of bytes: an arbitrary one, a monotone one (generator.py requires that of names with m), and one of two
bytes.
"""
E = OpenSize("e")
"""Extra padding."""
IMAGES = tuple(Leaf(name, (N, C, H, W)) for name in "xy")
"""Two images of one shape."""
NONE = (0, 0, 0, 0)
"""No padding."""


def function(f: ByteFunction) -> Unary:
    """Return the operator that applies a function of single bytes."""
    return lambda x: function_of(f, x)


def cut(axis: int, start: Dim = P, stop: Dim = Q) -> Unary:
    """Return the operator that slices `axis` from `start` to `stop`."""
    return lambda x: slice_of(x, axis, start, stop)


def join(axis: int) -> Binary:
    """Return the operator that concatenates along `axis`."""
    return lambda a, b: concat_of(axis, a, b)


def permute(*perm: int) -> Unary:
    """Return the operator that transposes by `perm`."""
    return lambda x: transpose_of(x, perm)


def pool(kernel: tuple[Dim, ...], **windows: Any) -> Unary:
    """Return the operator MaxPool."""
    return lambda x: apply("largest", x, kernel=kernel, **windows)


def convolve(weights: list[Term], **windows: Any) -> Unary:
    """Return the operator that is a requantised convolution with these constants: weights, their zero points, bias and
    multipliers.
    """
    return lambda x: convolution(x, *weights, **windows)


def multiply(axis: int, weights: list[Term]) -> Unary:
    """Return the operator that is a requantised product with a constant. axis: the last one of its operand."""
    return lambda x: product_of(axis, x, *weights)


def kernel(number: int, outputs: Dim = C, inputs: Dim = C, size: tuple[Dim, ...] = KERNEL) -> list[Term]:
    """Return the constants of convolution `number`."""
    return [*constants(number, outputs, (outputs, inputs, *size))]


def cut_constants(weights: list[Term], axis: int = 0) -> list[Term]:
    """Return the constants of a product for its outputs P to Q only. axis: of the outputs in the weights."""
    return [slice_of(constant, 0 if place else axis, P, Q) for place, constant in enumerate(weights)]


def _strides() -> AlgebraVocabulary:
    """Convolutions with and without strides, and MaxPool of single pixels, which drops rows and columns."""
    steps = OneOf("steps", ((2, 2), (1, 2), (2, 1)))
    taps, one = kernel(1), kernel(2, size=(1, 1))
    ops = (
        function(F), pool((1, 1), pads=NONE, strides=steps, dilations=(1, 1)),
        convolve(taps, strides=(1, 1)), convolve(taps, strides=steps),
        convolve(one, pads=NONE, **PLAIN), convolve(one, pads=NONE, strides=steps, dilations=(1, 1)),
    )  # fmt: skip
    ranges = {"h": (8, 12), "w": (8, 12)}
    return AlgebraVocabulary("strides", IMAGES, ops, (lambda a, b: function_of(G, a, b),), ranges=ranges)


def _crops(axis: int) -> AlgebraVocabulary:
    """Slices of rows (axis 2) or columns (axis 3) before and behind convolutions, also of their borders."""
    rate, other = OneOf("rate", (1, 2, 4, 8)), OneOf("other", (1, 2))
    length, before, behind = (H, W)[axis - 2], PADS[axis - 2], PADS[axis]
    reach = rate * (KERNEL[axis - 2] - 1)
    result = length + before + behind - reach
    taps, dilations = kernel(1), (rate, other) if axis == 2 else (other, rate)

    def padding(first: Dim, last: Dim) -> Unary:
        """Return a convolution with this padding along the axis."""
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
    """Convolutions whose weights are joined, cut and padded."""
    first, second = kernel(1, O1), kernel(2, O2)
    uniform: list[Term] = [Leaf("w", (O1, C, *KERNEL), True), spread(WZ, O1), *(Leaf(x, (O1,), True) for x in "bm")]
    narrow: list[Term] = [Leaf("w", (O1, Q - P, *KERNEL), True), *uniform[1:]]
    wide = [pad_of(narrow[0], WZ, (0, P, 0, 0, 0, C - Q, 0, 0)), *uniform[1:]]
    around = tuple(OpenSize(f"around{i}", 0) for i in range(4))
    more: dict[str, Any] = {"pads": tuple(a + b for a, b in zip(PADS, around))}
    ops = (
        function(F),
        *map(convolve, (first, second, join_constants(first, second), cut_constants(first), narrow, wide)),
        convolve(first, **more), lambda x: pad_of(x, XZ, (0, 0, *around[:2], 0, 0, *around[2:])),
        cut(0), cut(1), cut(1, 0, O1), cut(1, O1, O1 + O2),
    )  # fmt: skip
    ranges = {"n": (4, 6), "h": (9, 12), "w": (9, 12), "kh": (1, 3), "kw": (1, 3)}
    return AlgebraVocabulary("convolutions", IMAGES, ops, (join(0), join(1)), 2, ranges, shifts=(P,))


def _products(rank: int) -> AlgebraVocabulary:
    """Products with constants, and Slice and Concat along each axis."""
    sizes, last = tuple(OpenSize(f"d{axis}") for axis in range(rank)), rank - 1
    first, second = (list[Term](constants(i, o, (sizes[-1], o))) for i, o in ((1, O1), (2, O2)))
    ops = (
        function(F),
        *(multiply(last, weights)
          for weights in (first, second, join_constants(first, second, 1), cut_constants(first, 1))),
        *map(cut, range(rank)), cut(last, 0, O1), cut(last, O1, O1 + O2), *([permute(1, 0, 2)] if rank == 3 else []),
    )  # fmt: skip
    leaves = tuple(Leaf(name, sizes) for name in "xy")
    return AlgebraVocabulary(f"products of rank {rank}", leaves, ops, tuple(map(join, range(rank))), 2)


def _movement(rank: int) -> AlgebraVocabulary:
    """Functions of bytes, Slice, Concat and Transpose; for images also MaxPool."""
    sizes = tuple(OpenSize(f"d{axis}") for axis in range(rank))
    perms = [*permutations(range(rank))][1:] if rank < 4 else [(0, 2, 3, 1), (0, 3, 1, 2)]
    strides = OneOf("strides", ((1, 1), (2, 2), (3, 3)))
    windows: dict[str, Any] = {"pads": PADS, "strides": strides, "dilations": (1, 1)}
    unary = (function(F), function(M), *map(cut, range(rank)), *(permute(*perm) for perm in perms))
    binary = (lambda a, b: function_of(G, a, b), *map(join, range(rank)))
    leaves = tuple(Leaf(name, sizes) for name in "xyu")
    pools = (pool(KERNEL, **windows),) if rank == 4 else ()
    return AlgebraVocabulary(f"movement of rank {rank}", leaves, unary + pools, binary, 2, {"kh": (2, 4), "kw": (2, 4)})


MOVEMENT, PRODUCTS = map(_movement, (2, 3, 4)), map(_products, (2, 3))
VOCABULARIES = (*MOVEMENT, *PRODUCTS, _convolutions(), _crops(2), _crops(3), _strides())
"""All vocabularies, in the order in which rules are generated: earlier rules prune later candidates."""
