"""The vocabularies: which tensors, which operators, and how large tensors are where terms are compared."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np

from celosia.compiler.superoptimise.generation.enumeration import AlgebraVocabulary, Drawn
from celosia.compiler.superoptimise.generation.makers import (
    adding,
    both,
    convolving,
    cutting,
    function,
    joining,
    multiplying,
    padding,
    phasing,
    pooling,
    shaping,
    some,
    turning,
    weights,
    widened,
)
from celosia.compiler.superoptimise.rules.merging import DILATIONS, KERNEL, PADS, STRIDES, XZ, C, H, N, W
from celosia.compiler.superoptimise.sizes import OneOf, OpenSize
from celosia.compiler.superoptimise.terms import Leaf

D, E, O, M, K = OpenSize("d"), OpenSize("e"), OpenSize("o1"), OpenSize("o2"), OpenSize("k")
P, R, S = OpenSize("p"), OpenSize("r"), OpenSize("s")
"""Where Slices cut channels, rows, and images of a batch."""
WZ, V = Leaf("wz", (), True), Leaf("v", (), True)
AROUND = tuple(OpenSize(f"around{i}", 0) for i in range(4))
X, Y, A = Leaf("x", (N, C, H, W)), Leaf("y", (N, C, H, W)), Leaf("a", (N, D, H, W))
WINDOWS: dict[str, Any] = {"strides": STRIDES, "dilations": DILATIONS, "pads": PADS}
PIXELS: dict[str, Any] = {"strides": (1, 1), "dilations": (1, 1), "pads": (0, 0, 0, 0)}
FUNCTIONS = (function("f"), function("m"), function("k"))


def drawn(
    large: tuple[OpenSize, ...], small: tuple[OpenSize, ...] = (), none: tuple[OpenSize, ...] = (),
    choices: tuple[OneOf, ...] = (), cuts: tuple[OpenSize, ...] = (),
) -> Drawn:  # fmt: skip
    """Sizes, all of `large` different; small: 1 to 3; none: 0 or 1. cuts: of all of them, smaller than `large`."""

    def draw(rng: np.random.Generator) -> dict[str, Any]:
        values: dict[str, Any] = dict(zip((each.name for each in large), (rng.permutation(7) + 4).tolist()))
        values |= {each.name: int(rng.integers(1, 4)) for each in small}
        values |= {each.name: int(rng.integers(0, 2)) for each in none}
        values |= {each.name: int(cut) for each, cut in zip(cuts, rng.permutation(3) + 1)}
        return values | {each.name: each.among[int(rng.integers(len(each.among)))] for each in choices}

    return draw


def _images() -> AlgebraVocabulary:
    """Movement, functions of bytes and MaxPool."""
    strides = OneOf("strides", ((1, 1), (2, 2), (3, 3)))
    windows: dict[str, Any] = {"pads": PADS, "strides": strides, "dilations": (1, 1)}
    one = (
        *FUNCTIONS, cutting(1, P), cutting(2, R), turning((0, 2, 3, 1)), turning((0, 3, 1, 2)),
        padding(V, (0, 0, *AROUND[:2], 0, 0, *AROUND[2:])), pooling(KERNEL, **windows),
    )  # fmt: skip
    draw = drawn((C, D, H, W), (N,), (*PADS, *AROUND), (strides,), (P, R, S))

    def with_kernels(rng: np.random.Generator) -> dict[str, Any]:
        return draw(rng) | {each.name: int(rng.integers(2, 4)) for each in KERNEL}

    return AlgebraVocabulary("images", (X, Y, A), one, (function("h"), joining(1)), with_kernels)


def _batches() -> AlgebraVocabulary:
    """Images side by side, as images of a batch and as rows."""
    windows: dict[str, Any] = {"pads": PADS, "strides": STRIDES, "dilations": (1, 1)}
    first = weights(1, O, C, KERNEL)
    one = (
        FUNCTIONS[0], cutting(0, S), cutting(2, R),
        pooling((1, KERNEL[1]), **{**windows, "pads": (0, PADS[1], 0, PADS[3])}), pooling(KERNEL, **windows),
        convolving(first, XZ, **WINDOWS), convolving(weights(2, C, C, (1, 1)), XZ, **PIXELS),
        padding(V, (0, 0, *AROUND[:2], 0, 0, *AROUND[2:])),
    )  # fmt: skip
    draw = drawn((C, D, H, W, N, M, K), (), (*PADS, *AROUND), (STRIDES, DILATIONS), (P, R, S))

    def with_kernels(rng: np.random.Generator) -> dict[str, Any]:
        return draw(rng) | {"o1": 3} | {each.name: int(rng.integers(2, 4)) for each in KERNEL}

    return AlgebraVocabulary(
        "batches", (X, Y, Leaf("b", (M, C, H, W)), Leaf("r", (N, C, K, W))), one, (joining(0), joining(2)), with_kernels
    )


def _convolutions() -> AlgebraVocabulary:
    """Convolutions with their weights put together, cut, and widened."""
    first, second, other = (weights(i, o, c, KERNEL) for i, o, c in ((1, O, C), (2, M, C), (3, O, D)))
    uniform = weights(4, O, C, KERNEL, WZ)
    wide = {**WINDOWS, "dilations": (1, 1), "pads": tuple(pad + 1 for pad in PADS)}
    one = (
        FUNCTIONS[0],
        *(convolving(by, XZ, **WINDOWS) for by in (
            first, second, both(first, second), some(first, 0, P), some(first, P, O), other,
        )),
        *(convolving(by, XZ, **{**WINDOWS, "dilations": (1, 1)}) for by in (
            uniform, widened(uniform, WZ, (0, D)), widened(uniform, WZ, (D, 0)),
        )),
        convolving(widened(uniform, WZ, (0, 0), 1), XZ, **wide),
        cutting(1, P), cutting(0, S), padding(XZ, (0, 0, *AROUND[:2], 0, 0, *AROUND[2:])),
        convolving(first, XZ, **{**WINDOWS, "pads": tuple(a + b for a, b in zip(PADS, AROUND))}),
    )  # fmt: skip
    draw = drawn((C, D, H, W, O, M), (N,), (*PADS, *AROUND), (STRIDES, DILATIONS), (P, R, S))

    def with_kernels(rng: np.random.Generator) -> dict[str, Any]:
        return draw(rng) | {"n": 4, "h": 9, "w": 8} | {each.name: int(rng.integers(1, 3)) for each in KERNEL}

    return AlgebraVocabulary("convolutions", (X, A), one, (joining(1),), with_kernels)


def _pixels() -> AlgebraVocabulary:
    """Convolutions of single pixels among what moves rows, columns and channels."""
    first, second = weights(1, O, C, (1, 1)), weights(2, M, C, (1, 1))
    strided = {**PIXELS, "strides": OneOf("strides", ((2, 2), (1, 2), (2, 1)))}
    one = (
        FUNCTIONS[0], *(convolving(by, XZ, **PIXELS) for by in (
            first, second, both(first, second), some(first, 0, P), some(first, P, O),
        )),
        convolving(first, XZ, **strided), cutting(1, P), cutting(2, R), cutting(3, S), turning((0, 1, 3, 2)),
        pooling((1, 1), **strided),
    )  # fmt: skip
    draw = drawn((C, K, H, W, O, M), (N,), (), (strided["strides"],), (P, R, S))
    return AlgebraVocabulary(
        "pixels", (X, Y, Leaf("r", (N, C, K, W)), Leaf("q", (N, C, H, K))), one, (joining(2), joining(3)), draw
    )


def _groups() -> AlgebraVocabulary:
    """Grouped convolutions."""
    strides = OneOf("strides", ((1, 1), (2, 2)))
    given: dict[str, Any] = {"strides": strides, "dilations": (1, 1), "pads": PADS}
    halves = weights(1, O, C, KERNEL), weights(2, O, C, KERNEL)
    whole = weights(3, 2 * O, C, KERNEL)
    joined = both(*halves)
    two = Leaf("x", (N, 2 * C, H, W)), Leaf("y", (N, C, H, W)), Leaf("z", (N, C, H, W))

    one = (
        FUNCTIONS[0], convolving(whole, XZ, 2, **given), convolving(joined, XZ, 2, **given),
        *(convolving(by, XZ, **given) for by in (*halves, some(whole, 0, O), some(whole, O, 2 * O))),
        cutting(1, C), cutting(1, O), cutting(0, S),
    )  # fmt: skip
    draw = drawn((C, H, W, O, N), (), PADS, (strides,), (P, R, S))

    def with_kernels(rng: np.random.Generator) -> dict[str, Any]:
        return draw(rng) | {"c": 3, "o1": 2} | {each.name: int(rng.integers(1, 4)) for each in KERNEL}

    return AlgebraVocabulary("groups", two, one, (joining(1),), with_kernels)


def _products(rank: int) -> AlgebraVocabulary:
    """Products of matrices with constants."""
    rows = tuple(OpenSize(f"d{axis}") for axis in range(rank - 1))
    x, y = Leaf("x", (*rows, K)), Leaf("y", (*rows, K))
    first, second = weights(1, O, K), weights(2, M, K)
    square = weights(3, K, K)
    cuts = (S, R, P)[-rank:]
    one = (
        FUNCTIONS[0],
        *(multiplying(by, XZ) for by in (
            first, second, both(first, second), some(first, 0, P), some(first, P, O), square,
        )),
        *(cutting(axis, cuts[axis]) for axis in range(rank)),
        *([turning((1, 0, 2))] if rank == 3 else []),
    )  # fmt: skip
    draw = drawn((*rows, K, O, M, E), cuts=(P, R, S))
    others = (Leaf(f"a{axis}", (*x.shape[:axis], E, *x.shape[axis + 1 :])) for axis in range(rank))
    return AlgebraVocabulary(f"products of {rank}", (x, y, *others), one, tuple(map(joining, range(rank))), draw)


def _matrices(rank: int) -> AlgebraVocabulary:
    """Movement of tensors of few dimensions."""
    sizes = tuple(OpenSize(f"d{axis}") for axis in range(rank))
    x, y = Leaf("x", sizes), Leaf("y", sizes)
    others = [Leaf(f"a{axis}", (*sizes[:axis], E, *sizes[axis + 1 :])) for axis in range(rank)]
    pads = tuple(OpenSize(f"around{i}", 0) if i % rank else 0 for i in range(2 * rank))
    perms = [perm for perm in permutations(range(rank)) if perm != tuple(range(rank))]
    one = (
        FUNCTIONS[0], *map(turning, perms), *(cutting(axis, cut) for axis, cut in zip(range(rank), (P, R, S))),
        padding(V, pads),
    )  # fmt: skip
    draw = drawn((*sizes, E), none=tuple(OpenSize(f"around{i}", 0) for i in range(2 * rank)), cuts=(P, R, S))
    return AlgebraVocabulary(
        f"matrices of {rank}", (x, y, *others), one, (function("h"), *map(joining, range(rank))), draw, 3
    )


def _accumulators() -> AlgebraVocabulary:
    """Sums in int32, of tensors and of constants."""
    x, y = Leaf("x", (N, C, H, W)), Leaf("y", (N, C, H, W))
    numbers = Leaf("a", (N, D, H, W)), Leaf("c1", (), True), Leaf("c2", (), True)
    one = (
        cutting(1, P), turning((0, 2, 3, 1)), turning((0, 3, 1, 2)), shaping((N, C, H, W), (N, C, K)), cutting(0, S),
    )  # fmt: skip

    def draw(rng: np.random.Generator) -> dict[str, Any]:
        values = drawn((C, D, H, W, N), cuts=(P, R, S))(rng)
        return values | {"k": values["h"] * values["w"]}

    return AlgebraVocabulary("accumulators", (x, y, *numbers), one, (adding(), joining(1)), draw)


def _phases() -> AlgebraVocabulary:
    """Rows and columns as channels."""
    x, y, a = (Leaf(name, (N, size, 2 * H, 2 * W)) for name, size in (("x", C), ("y", C), ("a", D)))
    one = (FUNCTIONS[0], phasing(), cutting(1, P), cutting(0, S))
    draw = drawn((C, D, H, W, N), none=AROUND, cuts=(P, R, S))
    return AlgebraVocabulary("phases", (x, y, a), one, (function("h"), joining(0), joining(1)), draw, 2)


def vocabularies() -> tuple[AlgebraVocabulary, ...]:
    """All, in the order in which their rules are numbered."""
    return (
        _matrices(2), _matrices(3), _products(2), _products(3), _convolutions(), _groups(), _pixels(), _batches(),
        _images(), _phases(), _accumulators(),
    )  # fmt: skip
