"""Rules of fast-math: what holds of floats where they are real numbers, and rounding is left out of account."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import celosia.compiler.superoptimise.reals  # noqa: F401  the operators
from celosia.compiler.superoptimise.rule import RewriteRule
from celosia.compiler.superoptimise.rules.floats import RATE, STRIDES
from celosia.compiler.superoptimise.rules.merging import IMAGE, KERNEL, PADS, C, H, N, W, joined
from celosia.compiler.superoptimise.sizes import Dim, OneOf, OpenSize
from celosia.compiler.superoptimise.terms import Composed, Leaf, Term, apply

O, M, K = OpenSize("o"), OpenSize("m"), OpenSize("k")
RANKS = (2, 3, 4)
BIASED = {"": False, ", biased": True}
POINTWISE: dict[str, Any] = {"strides": (1, 1), "dilations": (1, 1), "pads": (0, 0, 0, 0), "group": 1}
"""Windows of one pixel each."""
ORDERS = {"": 1, ", exchanged": -1}
"""Order of the operands of a sum."""


def _conv(x: Term, *weights: Term, **other: Any) -> Composed:
    given = {"strides": STRIDES, "dilations": (RATE, RATE), "pads": PADS, "group": 1}
    return apply("float_convolve", x, *weights, **{**given, **other})


def _weights(name: object, outputs: Dim, inputs: Dim, biased: bool, kernel: tuple[Dim, ...] = KERNEL) -> list[Leaf]:
    w = Leaf(f"w{name}", (outputs, inputs, *kernel), True)
    return [w, Leaf(f"b{name}", (outputs,), True)] if biased else [w]


def _row(name: str, size: Dim) -> Leaf:
    return Leaf(name, (size,), True)


def _product(x: Term, w: Term) -> Composed:
    return apply("float_multiply", x, w)


def _image(channels: Dim, name: str = "x") -> Leaf:
    return Leaf(name, (N, channels, H, W))


def _scale(x: Term, m: Term, axis: int = 1) -> Composed:
    return apply("real_scale", x, m, axis=axis)


def _shift(x: Term, b: Term, axis: int = 1) -> Composed:
    return apply("real_shift", x, b, axis=axis)


def _plus(a: Term, b: Term) -> Composed:
    return apply("real_plus", a, b)


def _pairwise(first: Iterable[Term], second: Iterable[Term]) -> list[Term]:
    """Sums of weights and of biases."""
    return [_plus(a, b) for a, b in zip(first, second)]


# Two as one ----------------------------------------------------------------------------------------------------------

MORE = OneOf("more", (1, 2))
"""Taps that a larger kernel has more on each side."""
LARGER = tuple(size + 2 * MORE for size in KERNEL)
WIDER: dict[str, Any] = {"pads": tuple(pad + RATE * MORE for pad in PADS)}
"""Padding of the larger kernel, whose windows have the smaller one's in their middle."""


def _wider(w: Term) -> Composed:
    """Zeros around weights."""
    return apply("real_pad", w, pads=(0, 0, MORE, MORE, 0, 0, MORE, MORE))


def _sum_of_two(biased: bool, name: str) -> RewriteRule:
    first, second = _weights(1, O, C, biased), _weights(2, O, C, biased)
    return RewriteRule(
        f"sum of convolutions of one input{name}", "the sum of convolutions is one with the sum of their weights",
        (_plus(_conv(IMAGE, *first), _conv(IMAGE, *second)),), (_conv(IMAGE, *_pairwise(first, second)),), tidy=True,
    )  # fmt: skip


def _sum_of_kernels(order: int, name: str) -> RewriteRule:
    (w1, b1), (w2, b2) = _weights(1, O, C, True), _weights(2, O, C, True, LARGER)
    return RewriteRule(
        f"sum of a smaller kernel and a larger{name}",
        "the sum of convolutions is one with the sum of their weights, with zeros around the smaller ones",
        (_plus(*(_conv(IMAGE, w1, b1), _conv(IMAGE, w2, b2, **WIDER))[::order]),),
        (_conv(IMAGE, _plus(_wider(w1), w2), _plus(b1, b2), **WIDER),), shifts=(MORE,), tidy=True,
    )  # fmt: skip


def _sum_of_inputs(biased: bool, name: str) -> RewriteRule:
    c1, c2 = OpenSize("c1"), OpenSize("c2")
    (x, first), (y, second) = ((_image(c, f"x{i}"), _weights(i, O, c, biased)) for i, c in ((1, c1), (2, c2)))
    weights = [joined(1, first[0], second[0]), *_pairwise(first[1:], second[1:])]
    return RewriteRule(
        f"sum of convolutions of two inputs{name}",
        "the sum of convolutions with the same windows is one of both inputs, put together",
        (_plus(_conv(x, *first), _conv(y, *second)),), (_conv(joined(1, x, y), *weights),), shifts=(-1 * c1,),
    )  # fmt: skip


def _sum_with_input(scaled: bool, order: int, name: str) -> RewriteRule:
    """Kernels have a tap that sees what it is added to."""
    top, left = OpenSize("top", 0), OpenSize("left", 0)
    kernel: tuple[Dim, ...] = (2 * top + 1, 2 * left + 1)
    x, (w, b) = _image(O), _weights("", O, O, True, kernel)
    m = _row("m", O) if scaled else apply("real_filled", b, value=1)
    given = {**POINTWISE, "pads": (top, left, top, left)}
    parts = (_scale(x, m) if scaled else x, _conv(x, w, b, **given))
    return RewriteRule(
        f"sum of a convolution and its input{', scaled' * scaled}{name}",
        "what is added to a convolution of it is one more weight of each channel",
        (_plus(*parts[::order]),), (_conv(x, apply("real_diagonal", w, m, at=(top, left)), b, **given),), tidy=True,
    )  # fmt: skip


# One behind the other ------------------------------------------------------------------------------------------------

SWAPPED = (1, 0, 2, 3)
NO_PADS = {"pads": (0, 0, 0, 0)}


def _turned(w: Term) -> Composed:
    return apply("transpose", w, perm=SWAPPED)


def _carried(b: Term, w: Term, d: list[Leaf]) -> list[Term]:
    """A bias that the weights w of what comes behind carry on, and the bias d of that, where it has one."""
    found = apply("real_carried", b, w)
    return _pairwise([found], d) or [found]


def _pixels_behind(first: bool, second: bool) -> RewriteRule:
    (w, *b), (v, *d) = _weights(1, M, C, first), _weights(2, O, M, second, (1, 1))
    weights = _turned(apply("real_convolve", _turned(w), v, **POINTWISE))
    bias = _carried(b[0], v, d) if first else d
    return RewriteRule(
        f"a convolution of pixels behind another{', biased' * first}{', with a bias' * second}",
        "a convolution of single pixels behind another is one with the product of their weights",
        (_conv(_conv(IMAGE, w, *b), v, *d, **POINTWISE),), (_conv(IMAGE, weights, *bias),),
    )  # fmt: skip


def _pixels_before(first: bool, second: bool) -> RewriteRule:
    """Padding behind a bias would be other numbers than padding before it."""
    (v, *d), (w, *b) = _weights(1, M, C, first, (1, 1)), _weights(2, O, M, second)
    given: dict[str, Any] = NO_PADS if first else {}
    weights = apply("real_convolve", w, _turned(v), **POINTWISE)
    bias = _carried(d[0], w, b) if first else b
    return RewriteRule(
        f"a convolution of pixels before another{', biased' * first}{', with a bias' * second}",
        "a convolution of single pixels before another is one with the product of their weights",
        (_conv(_conv(IMAGE, v, *d, **POINTWISE), w, *b, **given),), (_conv(IMAGE, weights, *bias, **given),),
    )  # fmt: skip


def _matrix(rank: int) -> Leaf:
    return Leaf("x", (*(OpenSize(f"d{i}") for i in range(rank - 1)), K))


def _products(rank: int) -> list[RewriteRule]:
    x, w, v, axis = _matrix(rank), Leaf("w", (K, M), True), Leaf("v", (M, O), True), rank - 1
    of, m, s = f"of rank {rank}", _row("m", K), _row("s", M)
    return [
        RewriteRule(
            f"a product of a product {of}", "a product of a product is one with the product of their constants",
            (_product(_product(x, w), v),), (_product(x, apply("real_multiply", w, v)),),
        ),
        RewriteRule(
            f"a product of a sum {of}", "constants that are added before a product are added behind it",
            (_product(_shift(x, m, axis), w),), (_shift(_product(x, w), apply("real_multiply", m, w), axis),),
        ),
        RewriteRule(
            f"scales before a product {of}", "what rows of constants are multiplied with goes into them",
            (_product(_scale(x, m, axis), w),), (_product(x, _scale(w, m, 0)),), tidy=True,
        ),
        RewriteRule(
            f"scales behind a product {of}", "what columns of constants are multiplied with goes into them",
            (_scale(_product(x, w), s, axis),), (_product(x, _scale(w, s, 1)),), tidy=True,
        ),
        *_in_a_row(rank, _image(C) if rank == 4 else x, axis),
    ]  # fmt: skip


def _in_a_row(rank: int, x: Leaf, last: int) -> list[RewriteRule]:
    """Scales and constants one after the other, along each axis that they may have."""
    axis = OneOf("axis", (1, last) if rank == 4 else (last,))
    a, b = (Leaf(name, (OpenSize("along"),), True) for name in "ab")
    y, of = Leaf("y", x.shape), f"of rank {rank}"
    rows: list[tuple[str, str, Term, Term]] = [
        ("two scales", "scales one after the other are one",
         apply("real_scale", apply("real_scale", x, a, axis=axis), b, axis=axis),
         apply("real_scale", x, apply("real_scale", a, b, axis=0), axis=axis)),
        ("two constants", "constants that are added one after the other are added once",
         apply("real_shift", apply("real_shift", x, a, axis=axis), b, axis=axis),
         apply("real_shift", x, _plus(a, b), axis=axis)),
        ("a scale of a sum", "constants that are added before a scale are added behind it",
         apply("real_scale", apply("real_shift", x, a, axis=axis), b, axis=axis),
         apply("real_shift", apply("real_scale", x, b, axis=axis), apply("real_scale", a, b, axis=0), axis=axis)),
        ("a constant of the first", "constants are added behind a sum",
         _plus(apply("real_shift", x, a, axis=axis), y), apply("real_shift", _plus(x, y), a, axis=axis)),
        ("a constant of the second", "constants are added behind a sum",
         _plus(x, apply("real_shift", y, a, axis=axis)), apply("real_shift", _plus(x, y), a, axis=axis)),
    ]  # fmt: skip
    return [RewriteRule(f"{name} {of}", says, (first,), (second,), tidy=True) for name, says, first, second in rows]


def _channels(biased: bool, name: str) -> list[RewriteRule]:
    """Scales and constants of channels, and padding, that move into weights."""
    w, *b = _weights("", O, C, biased)
    before, behind, more = _row("m", C), _row("s", O), _row("more", O)
    conv = _conv(IMAGE, w, *b)
    around = tuple(OpenSize(f"around{i}", 0) for i in range(4))
    top, left, bottom, right = around
    padded = apply("real_pad", IMAGE, pads=(0, 0, top, left, 0, 0, bottom, right))
    return [
        RewriteRule(
            f"scales before a convolution{name}", "what channels are multiplied with goes into the weights",
            (_conv(_scale(IMAGE, before), w, *b),), (_conv(IMAGE, _scale(w, before), *b),), tidy=True,
        ),
        RewriteRule(
            f"scales behind a convolution{name}", "what channels are multiplied with goes into the weights",
            (_scale(conv, behind),), (_conv(IMAGE, _scale(w, behind, 0), *(_scale(each, behind, 0) for each in b)),),
            tidy=True,
        ),
        RewriteRule(
            f"constants before a convolution{name}", "what is added to channels goes into the bias without padding",
            (_conv(_shift(IMAGE, before), w, *b, **NO_PADS),),
            (_conv(IMAGE, w, *_carried(before, w, b[:]), **NO_PADS),), tidy=True,
        ),
        RewriteRule(
            f"constants behind a convolution{name}", "what is added to channels goes into the bias",
            (_shift(conv, more),), (_conv(IMAGE, w, *(_pairwise(b, [more]) or [more])),), tidy=True,
        ),
        RewriteRule(
            f"zeros before a convolution{name}", "padding with zeros is the convolution's own",
            (_conv(padded, w, *b),),
            (_conv(IMAGE, w, *b, pads=tuple(pad + each for pad, each in zip(PADS, around))),), tidy=True,
        ),
    ]  # fmt: skip


def _average(biased: bool, name: str) -> RewriteRule:
    """The convolution then shares its input with others, and the average is of its outputs, which may be fewer."""
    kernel = OpenSize("kernel_h"), OpenSize("kernel_w")
    given = {"kernel": kernel, "counted": OneOf("counted", (True, False)), "strides": STRIDES, "dilations": (1, 1)}
    w, *b = _weights("", O, C, biased, (1, 1))
    before = _conv(apply("real_average", IMAGE, pads=PADS, **given), w, *b, **POINTWISE)
    bias = [apply("real_filled", each, value=0) for each in b]
    after: Term = apply("real_average", _conv(IMAGE, w, *bias, **POINTWISE), pads=PADS, **given)
    return RewriteRule(
        f"an average before a convolution of pixels{name}",
        "an average of pixels and a convolution of single ones change places, but for the bias",
        (before,), (_shift(after, b[0]) if b else after,),
    )  # fmt: skip


def _normalised() -> RewriteRule:
    s, b, mean, var = (_row(name, C) for name in ("s", "b", "mean", "var"))
    epsilon = Leaf("epsilon", (), True)
    factor = apply("real_deviation", s, var, epsilon)
    return RewriteRule(
        "a normalisation of channels", "BatchNormalization is a scale and a constant for each channel",
        (apply("real_normalised", IMAGE, s, b, mean, var, epsilon),),
        (_shift(_scale(IMAGE, factor), apply("real_minus", b, _scale(mean, factor, 0))),), tidy=True,
    )  # fmt: skip


REALS = (
    *(_sum_of_two(biased, name) for name, biased in BIASED.items()),
    *(_sum_of_inputs(biased, name) for name, biased in BIASED.items()),
    *(_sum_of_kernels(order, name) for name, order in ORDERS.items()),
    *(_sum_with_input(scaled, order, name) for scaled in (False, True) for name, order in ORDERS.items()),
    *(_pixels_behind(first, second) for first in (True, False) for second in (True, False)),
    *(_pixels_before(first, second) for first in (True, False) for second in (True, False)),
    *(_average(biased, name) for name, biased in BIASED.items()),
    *(rule for name, biased in BIASED.items() for rule in _channels(biased, name)),
    *(rule for rank in RANKS for rule in _products(rank)),
    _normalised(),
)  # fmt: skip
