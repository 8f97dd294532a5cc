"""Rules of floats, for models that the CPU computes.

FLOATS keep every sum, and so every bit: convolutions are merged or split by outputs. REALS are those of fast-math: laws
that hold in real numbers, where rounding is left out of account.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import reduce
from typing import Any

from celosia.compiler.superoptimise.rule import Composed, Dim, Leaf, OneOf, OpenSize, RewriteRule, SizeOf, Term, apply
from celosia.compiler.superoptimise.rules.movement import RANKS, F, function_of
from celosia.compiler.superoptimise.rules.products import (
    IMAGE,
    KERNEL,
    PADS,
    C,
    H,
    N,
    W,
    concat_of,
    merge_two,
    rows_of,
    slice_of,
    vector,
)

STRIDES = OneOf("down", (1, 2)), OneOf("across", (1, 2))
"""Strides of rows and columns."""
RATE = OneOf("rate", (1, 2))
"""Dilation of rows and columns."""
SPLITS = (2, 3, 4, 5)
"""Numbers of equal parts into which a convolution's outputs are split."""
VECTOR_CHANNELS = 16
"""Parts have a multiple of so many channels: fewer do not fill a vector of the widest processors."""
O1, O2 = OpenSize("o1", 2), OpenSize("o2", 2)
PIXELS = tuple(
    (size + (PADS[side] + PADS[side + 2]) - RATE * (KERNEL[side] - 1) - 1) // STRIDES[side] + 1
    for side, size in enumerate((H, W))
)
"""Rows and columns of a convolution's result."""
SEVERAL = SizeOf("<=", 3, PIXELS[0] + PIXELS[1])
"""Condition that a result has more than one pixel, without which onnxruntime adds in another order
(operators/floats.py).
"""
Function = Callable[[Term], Term]
FUNCTIONS_BEHIND: dict[str, Function] = {" with the function behind it": lambda y: function_of(F, y), "": lambda y: y}
"""The function behind a convolution that a rule includes, by its addition to the rule's name. Rules with more operators
come first, as the search's time may be short.
"""


def _conv(x: Term, *weights: Term, **other: Any) -> Composed:
    """Write a float convolution. other: attributes that replace the open ones."""
    attributes = {"strides": STRIDES, "dilations": (RATE, RATE), "pads": PADS, "group": 1}
    return apply("float_convolve", x, *weights, **{**attributes, **other})


def _weights(name: object, outputs: Dim, inputs: Dim, biased: bool, kernel: tuple[Dim, ...] = KERNEL) -> list[Leaf]:
    """Write the constants of a convolution: weights and, if `biased`, a bias."""
    w = Leaf(f"w{name}", (outputs, inputs, *kernel), True)
    return [w, vector(f"b{name}", outputs)] if biased else [w]


def convolved(weights: Iterable[Term]) -> Composed:
    """Write a float convolution of IMAGE. weights: w, and b where it has a bias."""
    return _conv(IMAGE, *weights)


def _merge(biased: bool, behind: str) -> RewriteRule:
    """The rule that merges two float convolutions of one input."""
    return merge_two(
        f"merge float convolutions{behind}{', biased' * biased}",
        "float convolutions of one input with the same windows are one whose channels are theirs",
        lambda weights: FUNCTIONS_BEHIND[behind](convolved(weights)),
        [_weights(1, O1, C, biased), _weights(2, O2, C, biased)], (O1, O2), where=(SEVERAL,),
    )  # fmt: skip


def _split(number: int, biased: bool, behind: str) -> RewriteRule:
    """The rule that splits a float convolution into `number` ones, each with a part of the outputs."""
    f, outputs = FUNCTIONS_BEHIND[behind], VECTOR_CHANNELS * OpenSize("q")
    weights = _weights("", number * outputs, C, biased)
    convolutions = [
        f(convolved(slice_of(constant, 0, i * outputs, (i + 1) * outputs) for constant in weights))
        for i in range(number)
    ]
    return RewriteRule(
        f"split a float convolution in {number}{behind}{', biased' * biased}",
        "a float convolution is several, each of a part of its channels",
        (f(convolved(weights)),),
        (reduce(lambda a, b: concat_of(1, a, b), convolutions),),
        (SEVERAL,),
    )


def _merge_float_products(rank: int) -> RewriteRule:
    """The rule that merges two float products of one input of this rank."""
    return merge_two(
        f"merge float products of rank {rank}",
        "float products of one input with constants are one whose columns are theirs",
        lambda weights: apply("float_multiply", rows_of(rank), *weights),
        [[Leaf("w1", (OpenSize("k"), O1), True)], [Leaf("w2", (OpenSize("k"), O2), True)]], (O1, O2), rank - 1, 1,
    )  # fmt: skip


FLOATS = (
    *(_split(number, biased, behind) for behind in FUNCTIONS_BEHIND for number in SPLITS for biased in (True, False)),
    *(_merge(biased, behind) for behind in FUNCTIONS_BEHIND for biased in (True, False)),
    *map(_merge_float_products, RANKS),
)


# Fast-math -----------------------------------------------------------------------------------------------------------

O, M, K = OpenSize("o"), OpenSize("m"), OpenSize("k")
BIASED = {"": False, ", biased": True}
"""Whether convolutions have a bias, by the addition to the rule's name."""
POINTWISE: dict[str, Any] = {"strides": (1, 1), "dilations": (1, 1), "pads": (0, 0, 0, 0), "group": 1}
"""Windows of one pixel each."""
ORDERS = {"": 1, ", exchanged": -1}
"""Step through the operands of a sum, 1 or -1, by the addition to the rule's name: both orders need a rule."""


def _product_term(x: Term, w: Term) -> Composed:
    """Write a float matrix product."""
    return apply("float_multiply", x, w)


def _image_leaf(channels: Dim, name: str = "x") -> Leaf:
    """Write an open image with so many channels."""
    return Leaf(name, (N, channels, H, W))


def _scale(x: Term, m: Term, axis: int = 1) -> Composed:
    """Write the product of each position of `axis` with its factor."""
    return apply("real_scale", x, m, axis=axis)


def _shift(x: Term, b: Term, axis: int = 1) -> Composed:
    """Write the sum of each position of `axis` and its number."""
    return apply("real_shift", x, b, axis=axis)


def _plus(a: Term, b: Term) -> Composed:
    """Write the sum of two tensors."""
    return apply("real_plus", a, b)


def _add_pairwise(first: Iterable[Term], second: Iterable[Term]) -> list[Term]:
    """Write the sums of weights, and of biases."""
    return [_plus(a, b) for a, b in zip(first, second)]


# Sums of convolutions ------------------------------------------------------------------------------------------------

EXTRA_TAPS = OneOf("more", (1, 2))
"""Taps that the larger kernel has more on each side."""
LARGER_KERNEL = tuple(size + 2 * EXTRA_TAPS for size in KERNEL)
"""Rows and columns of the larger kernel."""
WIDER_PADS: dict[str, Any] = {"pads": tuple(pad + RATE * EXTRA_TAPS for pad in PADS)}
"""Padding of the larger kernel, whose windows have those of the smaller kernel in their middle."""


def _sum_of_two(biased: bool, name: str) -> RewriteRule:
    """The rule that computes the sum of two convolutions of one input as one convolution."""
    first, second = _weights(1, O, C, biased), _weights(2, O, C, biased)
    return RewriteRule(
        f"sum of convolutions of one input{name}", "the sum of convolutions is one with the sum of their weights",
        (_plus(_conv(IMAGE, *first), _conv(IMAGE, *second)),), (_conv(IMAGE, *_add_pairwise(first, second)),),
        tidy=True,
    )  # fmt: skip


def _sum_of_kernels(order: int, name: str) -> RewriteRule:
    """The rule that does so where one kernel is larger. order: of the operands."""
    (w1, b1), (w2, b2) = _weights(1, O, C, True), _weights(2, O, C, True, LARGER_KERNEL)
    wider = apply("real_pad", w1, pads=(0, 0, EXTRA_TAPS, EXTRA_TAPS) * 2)
    return RewriteRule(
        f"sum of a smaller kernel and a larger{name}",
        "the sum of convolutions is one with the sum of their weights, with zeros around the smaller ones",
        (_plus(*(_conv(IMAGE, w1, b1), _conv(IMAGE, w2, b2, **WIDER_PADS))[::order]),),
        (_conv(IMAGE, _plus(wider, w2), _plus(b1, b2), **WIDER_PADS),), shifts=(EXTRA_TAPS,), tidy=True,
    )  # fmt: skip


def _sum_of_inputs(biased: bool, name: str) -> RewriteRule:
    """The rule that computes the sum of convolutions of two inputs as one of both inputs, joined."""
    c1, c2 = OpenSize("c1"), OpenSize("c2")
    (x, first), (y, second) = ((_image_leaf(c, f"x{i}"), _weights(i, O, c, biased)) for i, c in ((1, c1), (2, c2)))
    weights = [concat_of(1, first[0], second[0]), *_add_pairwise(first[1:], second[1:])]
    return RewriteRule(
        f"sum of convolutions of two inputs{name}",
        "the sum of convolutions with the same windows is one of both inputs, put together",
        (_plus(_conv(x, *first), _conv(y, *second)),), (_conv(concat_of(1, x, y), *weights),), shifts=(-1 * c1,),
    )  # fmt: skip


def _sum_with_input(scaled: bool, order: int, name: str) -> RewriteRule:
    """The rule that computes the sum of a convolution and its own input as one convolution. The kernel has a tap that
    sees the pixel itself. scaled: whether the input is multiplied first. order: of the operands.
    """
    top, left = OpenSize("top", 0), OpenSize("left", 0)
    kernel: tuple[Dim, ...] = (2 * top + 1, 2 * left + 1)
    x, (w, b) = _image_leaf(O), _weights("", O, O, True, kernel)
    m = vector("m", O) if scaled else apply("real_filled", b, value=1)
    given = {**POINTWISE, "pads": (top, left, top, left)}
    parts = (_scale(x, m) if scaled else x, _conv(x, w, b, **given))
    return RewriteRule(
        f"sum of a convolution and its input{', scaled' * scaled}{name}",
        "what is added to a convolution of it is one more weight of each channel",
        (_plus(*parts[::order]),), (_conv(x, apply("real_diagonal", w, m, at=(top, left)), b, **given),), tidy=True,
    )  # fmt: skip


# Operators one behind the other --------------------------------------------------------------------------------------

SWAPPED = (1, 0, 2, 3)
"""Permutation that exchanges outputs and inputs of weights."""
NO_PADS = {"pads": (0, 0, 0, 0)}
"""No padding."""


def _exchange_channels(w: Term) -> Composed:
    """Write weights with outputs and inputs exchanged, so that a convolution multiplies weights by weights."""
    return apply("transpose", w, perm=SWAPPED)


def _carry_bias(b: Term, w: Term, d: list[Leaf]) -> list[Term]:
    """Write the bias of one convolution that replaces two: what the second one, with weights w, makes of the first
    bias b (`real_carried`, in operators/reals.py), plus its own bias d where it has one.
    """
    carried = apply("real_carried", b, w)
    return _add_pairwise([carried], d) or [carried]


def _pointwise_behind(first: bool, second: bool) -> RewriteRule:
    """The rule that merges a convolution and a pointwise one behind it. first, second: whether they have a bias."""
    (w, *b), (v, *d) = _weights(1, M, C, first), _weights(2, O, M, second, (1, 1))
    weights = _exchange_channels(apply("real_convolve", _exchange_channels(w), v, **POINTWISE))
    bias = _carry_bias(b[0], v, d) if first else d
    return RewriteRule(
        f"a convolution of pixels behind another{', biased' * first}{', with a bias' * second}",
        "a convolution of single pixels behind another is one with the product of their weights",
        (_conv(_conv(IMAGE, w, *b), v, *d, **POINTWISE),), (_conv(IMAGE, weights, *bias),),
    )  # fmt: skip


def _pointwise_before(first: bool, second: bool) -> RewriteRule:
    """The rule that merges a pointwise convolution and one behind it. With a bias in the first there may be no padding,
    as padding before the bias is not 0 behind it.
    """
    (v, *d), (w, *b) = _weights(1, M, C, first, (1, 1)), _weights(2, O, M, second)
    given: dict[str, Any] = NO_PADS if first else {}
    weights = apply("real_convolve", w, _exchange_channels(v), **POINTWISE)
    bias = _carry_bias(d[0], w, b) if first else b
    return RewriteRule(
        f"a convolution of pixels before another{', biased' * first}{', with a bias' * second}",
        "a convolution of single pixels before another is one with the product of their weights",
        (_conv(_conv(IMAGE, v, *d, **POINTWISE), w, *b, **given),), (_conv(IMAGE, weights, *bias, **given),),
    )  # fmt: skip


def _rules_of_products(rank: int) -> list[RewriteRule]:
    """The rules of matrix products of this rank: products of products, and scales and constants into weights."""
    x, w, v, axis = rows_of(rank), Leaf("w", (K, M), True), Leaf("v", (M, O), True), rank - 1
    of, m, s = f"of rank {rank}", vector("m", K), vector("s", M)
    return [
        RewriteRule(
            f"a product of a product {of}", "a product of a product is one with the product of their constants",
            (_product_term(_product_term(x, w), v),), (_product_term(x, apply("real_multiply", w, v)),),
        ),
        RewriteRule(
            f"a product of a sum {of}", "constants that are added before a product are added behind it",
            (_product_term(_shift(x, m, axis), w),), (_shift(_product_term(x, w), apply("real_multiply", m, w), axis),),
        ),
        RewriteRule(
            f"scales before a product {of}", "what rows of constants are multiplied with goes into them",
            (_product_term(_scale(x, m, axis), w),), (_product_term(x, _scale(w, m, 0)),), tidy=True,
        ),
        RewriteRule(
            f"scales behind a product {of}", "what columns of constants are multiplied with goes into them",
            (_scale(_product_term(x, w), s, axis),), (_product_term(x, _scale(w, s, 1)),), tidy=True,
        ),
        *_rules_of_scales(rank, _image_leaf(C) if rank == 4 else x, axis),
    ]  # fmt: skip


def _rules_of_scales(rank: int, x: Leaf, last: int) -> list[RewriteRule]:
    """The rules of scales and added constants behind each other, along each axis that they may have."""
    axis = OneOf("axis", (1, last) if rank == 4 else (last,))
    a, b = (Leaf(name, (OpenSize("along"),), True) for name in "ab")
    y, of = Leaf("y", x.shape), f"of rank {rank}"
    laws: list[tuple[str, str, Term, Term]] = [
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
    return [RewriteRule(f"{name} {of}", says, (first,), (second,), tidy=True) for name, says, first, second in laws]


def _absorb_into_convolution(biased: bool, name: str) -> list[RewriteRule]:
    """The rules that move scales and constants of channels, and padding, into the weights and bias of a convolution."""
    w, *b = _weights("", O, C, biased)
    input_vector, output_vector, more = vector("m", C), vector("s", O), vector("more", O)
    conv = _conv(IMAGE, w, *b)
    around = tuple(OpenSize(f"around{i}", 0) for i in range(4))
    top, left, bottom, right = around
    padded = apply("real_pad", IMAGE, pads=(0, 0, top, left, 0, 0, bottom, right))
    return [
        RewriteRule(
            f"scales before a convolution{name}", "what channels are multiplied with goes into the weights",
            (_conv(_scale(IMAGE, input_vector), w, *b),), (_conv(IMAGE, _scale(w, input_vector), *b),), tidy=True,
        ),
        RewriteRule(
            f"scales behind a convolution{name}", "what channels are multiplied with goes into the weights",
            (_scale(conv, output_vector),),
            (_conv(IMAGE, _scale(w, output_vector, 0), *(_scale(bias, output_vector, 0) for bias in b)),),
            tidy=True,
        ),
        RewriteRule(
            f"constants before a convolution{name}", "what is added to channels goes into the bias without padding",
            (_conv(_shift(IMAGE, input_vector), w, *b, **NO_PADS),),
            (_conv(IMAGE, w, *_carry_bias(input_vector, w, b[:]), **NO_PADS),), tidy=True,
        ),
        RewriteRule(
            f"constants behind a convolution{name}", "what is added to channels goes into the bias",
            (_shift(conv, more),), (_conv(IMAGE, w, *(_add_pairwise(b, [more]) or [more])),), tidy=True,
        ),
        RewriteRule(
            f"zeros before a convolution{name}", "padding with zeros is the convolution's own",
            (_conv(padded, w, *b),),
            (_conv(IMAGE, w, *b, pads=tuple(pad + more_pad for pad, more_pad in zip(PADS, around))),), tidy=True,
        ),
    ]  # fmt: skip


def _average_behind_convolution(biased: bool, name: str) -> RewriteRule:
    """The rule that moves an AveragePool behind a pointwise convolution, which then shares its input with others; the
    average may have fewer channels there.
    """
    kernel = OpenSize("kernel_h"), OpenSize("kernel_w")
    given = {"kernel": kernel, "counted": OneOf("counted", (True, False)), "strides": STRIDES, "dilations": (1, 1)}
    w, *b = _weights("", O, C, biased, (1, 1))
    before = _conv(apply("real_average", IMAGE, pads=PADS, **given), w, *b, **POINTWISE)
    zero_bias = [apply("real_filled", bias, value=0) for bias in b]
    after: Term = apply("real_average", _conv(IMAGE, w, *zero_bias, **POINTWISE), pads=PADS, **given)
    return RewriteRule(
        f"an average before a convolution of pixels{name}",
        "an average of pixels and a convolution of single ones change places, but for the bias",
        (before,), (_shift(after, b[0]) if b else after,),
    )  # fmt: skip


def _split_normalisation() -> RewriteRule:
    """The rule that turns a BatchNormalization into a scale and a constant for each channel."""
    s, b, mean, var = (vector(name, C) for name in ("s", "b", "mean", "var"))
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
    *(_pointwise_behind(first, second) for first in (True, False) for second in (True, False)),
    *(_pointwise_before(first, second) for first in (True, False) for second in (True, False)),
    *(_average_behind_convolution(biased, name) for name, biased in BIASED.items()),
    *(rule for name, biased in BIASED.items() for rule in _absorb_into_convolution(biased, name)),
    *(rule for rank in RANKS for rule in _rules_of_products(rank)),
    _split_normalisation(),
)  # fmt: skip
