"""Wrong rewrite rules that somebody may believe in; no prover may accept one of them.

The first ones are of the kinds that a generator finds by fingerprints on few tensors, or that hold in floats but not
with rounding. The name of each says what is wrong with it.
"""

from __future__ import annotations

from dataclasses import replace

from celosia.compiler.superoptimise.rule import Absorbs, Composed, Leaf, Monotone, OpenSize, RewriteRule, Term, apply
from celosia.compiler.superoptimise.rules.movement import F, G, function_of, reshape_of, transpose_of
from celosia.compiler.superoptimise.rules.products import (
    BORDERS,
    IMAGE,
    KERNEL,
    O1,
    O2,
    PADS,
    PIXELS,
    WZ,
    XZ,
    C,
    H,
    N,
    W,
    Z,
    concat_of,
    constants,
    convolution,
    pad_of,
    product_of,
    slice_of,
    spread,
)
from celosia.compiler.superoptimise.rules.windows import WINDOWS

BY_ROWS, _, BY_HALVES, _, COUNTED = WINDOWS
AVERAGE, BY_PRODUCTS = BY_HALVES.before[0], replace(COUNTED.after[0], attributes=tuple(
    (name, value) for name, value in BY_HALVES.before[0].attributes if name != "counted"))  # fmt: skip
P, Q, O = OpenSize("p", 0), OpenSize("q"), OpenSize("o")
FIRST, SECOND = (constants(i, o, (o, C, *KERNEL)) for i, o in ((1, O1), (2, O2)))
ALIKE = constants(2, O1, (O1, C, *KERNEL))
PAIRS = [concat_of(0, a, b) for a, b in zip(FIRST, SECOND)]
Y = Leaf("y", (N, C, H, W))
A, B = (Leaf(name, (N, OpenSize(f"c{name}"), H, W)) for name in "ab")
ROW = Leaf("x", (OpenSize("rows"), OpenSize("k")))
ROWS, OTHER_ROWS = (constants(i, O1, (OpenSize("k"), O1)) for i in (1, 2))
SQUARE = Leaf("s", (N, C, H, H))
MORE = tuple(pad + 1 for pad in PADS)
OTHER_Z, OTHER_XZ = Leaf("z2", (), True), Leaf("xz2", (), True)
LAST = Leaf("c", (OpenSize("d0"), OpenSize("d1"), OpenSize("d2")))


def wrong(name: str, before: Term | tuple[Term, ...], after: Term | tuple[Term, ...], *where: object) -> RewriteRule:
    """Return a rewrite rule with these sides and conditions."""
    sides = [side if isinstance(side, tuple) else (side,) for side in (before, after)]
    return RewriteRule(name, "", sides[0], sides[1], where, shifts=(1,))  # type: ignore[arg-type]


def merged(**other: object) -> tuple[Term, Term]:
    """Return the two results of a merged convolution."""
    both = convolution(IMAGE, *PAIRS, **other)
    return slice_of(both, 1, 0, O1), slice_of(both, 1, O1, O1 + O2)


def pooled(x: Term, *others: Term, op: str = "largest", **attributes: object) -> Composed:
    """Return a reduction of windows, by default a MaxPool."""
    windows = {"kernel": KERNEL, "pads": (0, 0, 0, 0), "strides": (1, 1), "dilations": (1, 1)}
    return apply(op, x, *others, **{**windows, **attributes})


def averaged(x: Term) -> Composed:
    """Return an average of windows without padding."""
    return pooled(x, XZ, op="average", counted=False, f=F)


def accumulated(*rows: Term, x: Term = IMAGE, xz: Term = XZ) -> Composed:
    """Return the sums of a convolution before requantisation."""
    w, wz, b = rows
    return apply("convolve", x, xz, w, wz, b, strides=(1, 1), dilations=(1, 1), pads=PADS, group=1)


def requantised(acc: Term, m: Term = FIRST[3], z: Term = Z) -> Composed:
    """Return bytes from sums."""
    return apply("requantise", acc, m, z, axis=1)


def kept(rule: RewriteRule, name: str, *conditions: int) -> RewriteRule:
    """Return `rule` with only some of its conditions."""
    return replace(rule, name=name, where=tuple(rule.where[index] for index in conditions))


def _rule(name: str) -> RewriteRule:
    """Return the rule of this name."""
    return next(rule for rule in (*BORDERS, *PIXELS) if rule.name == name)


def _inner(term: Term) -> Term:
    assert isinstance(term, Composed)
    return term.args[0]


def _strided(term: Term) -> Composed:
    """Return a convolution with strides of two instead of one."""
    assert isinstance(term, Composed) and isinstance(term.args[0], Composed)
    acc = term.args[0]
    return replace(
        term, args=(apply("convolve", *acc.args, **{**dict(acc.attributes), "strides": (2, 2)}), *term.args[1:])
    )


APART, GONE, PIXELS_OF_TWO = (
    _rule("border rows apart"),
    _rule("no last tap of columns"),
    _rule("pixels as channels, 2 x 2"),
)
WHOLE = PIXELS_OF_TWO.after[0]
ONE, TWO = convolution(IMAGE, *FIRST), convolution(IMAGE, *SECOND)
WIDE = pad_of(Leaf("w", (O, C, *KERNEL), True), WZ, (0, 0, 1, 1, 0, 0, 1, 1))
UNIFORM = Leaf("w", (O, C, *KERNEL), True), spread(WZ, O), Leaf("b", (O,), True), Leaf("m", (O,), True)
GROUPED = constants(1, 2 * O1, (2 * O1, C, *KERNEL))
PAIRED = Leaf("x", (N, 2 * C, H, W))
WRONG = (
    wrong("convolutions of other strides are merged", (ONE, convolution(IMAGE, *SECOND, strides=(2, 2))), merged()),
    wrong("convolutions of other dilations are merged", (ONE, convolution(IMAGE, *SECOND, dilations=(2, 1))), merged()),
    wrong("convolutions of other padding are merged", (ONE, convolution(IMAGE, *SECOND, pads=MORE)), merged()),
    wrong("convolutions of other inputs are merged", (ONE, convolution(Y, *SECOND)), merged()),
    wrong("convolutions of other zero points are merged", (ONE, convolution(IMAGE, *SECOND, z=OTHER_Z)), merged()),
    wrong("convolutions that read other zero points", (ONE, convolution(IMAGE, *SECOND, xz=OTHER_XZ)), merged()),
    wrong("merged, and the results exchanged", (ONE, TWO), merged()[::-1]),
    wrong("merged, cut in the wrong place", (ONE, TWO), (
        merged()[0], slice_of(convolution(IMAGE, *PAIRS), 1, O2, O1 + O2))),
    wrong("merged weights, the bias of the first alone", (ONE, convolution(IMAGE, *ALIKE)), (
        slice_of(convolution(IMAGE, concat_of(0, FIRST[0], ALIKE[0]), concat_of(0, FIRST[1], ALIKE[1]),
                         concat_of(0, FIRST[2], FIRST[2]), concat_of(0, FIRST[3], ALIKE[3])), 1, 0, O1),
        slice_of(convolution(IMAGE, concat_of(0, FIRST[0], ALIKE[0]), concat_of(0, FIRST[1], ALIKE[1]),
                         concat_of(0, FIRST[2], FIRST[2]), concat_of(0, FIRST[3], ALIKE[3])), 1, O1, O1 + O1),
    )),
    wrong("a sum of requantised convolutions is one of summed weights",
          function_of(F, ONE, convolution(IMAGE, *ALIKE)), requantised(
              apply("plus", accumulated(*FIRST[:3]), accumulated(*ALIKE[:3])))),
    wrong("requantising a sum is a sum of requantised", requantised(apply("plus", accumulated(*FIRST[:3]), Leaf(
        "acc", (N, O1, OpenSize("oh"), OpenSize("ow"))))), requantised(accumulated(*FIRST[:3]))),
    wrong("a function of a convolution is one of its input", function_of(F, ONE),
        convolution(function_of(F, IMAGE), *FIRST)),
    wrong("a function goes into the accumulator", function_of(F, ONE),
        requantised(function_of(F, accumulated(*FIRST[:3])))),
    wrong("any function and MaxPool change places", function_of(F, pooled(IMAGE)), pooled(function_of(F, IMAGE))),
    wrong("MaxPool of two is of one", function_of(F, pooled(IMAGE), pooled(Y)), pooled(function_of(F, IMAGE, Y)),
        Monotone(F)),
    wrong("two MaxPools are one", pooled(pooled(IMAGE)), pooled(IMAGE)),
    wrong("an average is a convolution", averaged(IMAGE), ONE),
    wrong("an average goes across a function", function_of(F, averaged(IMAGE)), averaged(function_of(F, IMAGE))),
    wrong("functions change places", function_of(F, function_of(G, IMAGE)), function_of(G, function_of(F, IMAGE))),
    wrong("a function twice is one", function_of(F, function_of(G, IMAGE)), function_of(F, IMAGE)),
    wrong("the outer function stays", function_of(F, function_of(G, IMAGE)), function_of(F, IMAGE), Absorbs(F, G)),
    wrong("operands are exchanged", function_of(F, IMAGE, Y), function_of(F, Y, IMAGE)),
    wrong("a Transpose goes", transpose_of(SQUARE, (0, 1, 3, 2)), SQUARE),
    wrong("a Transpose undoes itself", transpose_of(transpose_of(LAST, (1, 2, 0)), (1, 2, 0)), LAST),
    wrong("Transpose and Slice, axis as it was", transpose_of(slice_of(LAST, 1, P, Q), (0, 2, 1)),
          slice_of(transpose_of(LAST, (0, 2, 1)), 1, P, Q)),
    wrong("a convolution of a Transpose, weights as they are", convolution(transpose_of(SQUARE, (0, 1, 3, 2)), *FIRST),
          transpose_of(convolution(SQUARE, *FIRST), (0, 1, 3, 2))),
    wrong("a Reshape is a Transpose", reshape_of(LAST, (OpenSize("d0"), OpenSize("d2"), OpenSize("d1"))),
          transpose_of(LAST, (0, 2, 1))),
    wrong("a Reshape goes", reshape_of(LAST, (OpenSize("d1"), OpenSize("d0"), OpenSize("d2"))), LAST),
    wrong("parts are exchanged", concat_of(1, A, B), concat_of(1, B, A)),
    wrong("Slices that do not touch are one", concat_of(1, slice_of(IMAGE, 1, 0, P + 1), slice_of(IMAGE, 1, P + 2, Q)),
          slice_of(IMAGE, 1, 0, Q - 1)),
    wrong("neighbours the wrong way round", concat_of(1, slice_of(IMAGE, 1, P, Q), slice_of(IMAGE, 1, 0, P)),
          slice_of(IMAGE, 1, 0, Q)),
    wrong("a Slice across parts is one of the first", slice_of(concat_of(1, A, B), 1, P, Q), slice_of(A, 1, P, Q)),
    wrong("MaxPool of joined rows", pooled(concat_of(2, IMAGE, Y)), concat_of(2, pooled(IMAGE), pooled(Y))),
    wrong("a convolution of joined rows", convolution(concat_of(2, IMAGE, Y), *FIRST),
          concat_of(2, convolution(IMAGE, *FIRST), convolution(Y, *FIRST))),
    wrong("a larger kernel, padding as it was", convolution(IMAGE, *UNIFORM), convolution(IMAGE, WIDE, *UNIFORM[1:])),
    wrong("a larger kernel, padded with what is not zero",
          convolution(IMAGE, *UNIFORM, dilations=(1, 1)), convolution(
              IMAGE, pad_of(UNIFORM[0], Z, (0, 0, 1, 1, 0, 0, 1, 1)), *UNIFORM[1:], pads=MORE, dilations=(1, 1))),
    wrong("a larger kernel, as if nothing were dilated", convolution(IMAGE, *UNIFORM, dilations=(2, 2)),
          convolution(IMAGE, WIDE, *UNIFORM[1:], pads=MORE, dilations=(2, 2))),
    wrong("any padding is the convolution's own", convolution(
        pad_of(IMAGE, OTHER_XZ, (0, 0, 1, 1, 0, 0, 1, 1)), *FIRST), convolution(IMAGE, *FIRST, pads=MORE)),
    wrong("padding of a function", function_of(F, pad_of(IMAGE, XZ, (0, 0, 1, 1, 0, 0, 1, 1))),
          pad_of(function_of(F, IMAGE), XZ, (0, 0, 1, 1, 0, 0, 1, 1))),
    wrong("groups are given up", convolution(PAIRED, *GROUPED, group=2), convolution(
        PAIRED, concat_of(1, GROUPED[0], GROUPED[0]), *GROUPED[1:])),
    wrong("strides are given up", convolution(IMAGE, *FIRST, strides=(2, 2)),
          convolution(IMAGE, *FIRST, strides=(1, 1))),
    wrong("a second product is the first", (product_of(1, ROW, *ROWS), product_of(1, ROW, *OTHER_ROWS)),
          (product_of(1, ROW, *ROWS), product_of(1, ROW, *ROWS))),
    wrong("a constant is added before rounding", function_of(F, requantised(accumulated(*FIRST[:3]))), requantised(
        apply("plus", accumulated(*FIRST[:3]), Leaf("one", (), True)))),
    kept(GONE, "a tap goes that sees some of the image", 0),
    kept(APART, "borders that overlap are apart", 0, 1, 2, 3, 4, 5),
    kept(APART, "a border that is narrower than a step", 1, 2, 4, 5, 6),
    replace(PIXELS_OF_TWO, name="pixels as channels, and what lies beyond", after=(_inner(_inner(WHOLE)),)),
    replace(PIXELS_OF_TWO, name="pixels as channels of one another", after=(_inner(_inner(_inner(WHOLE))),)),
    wrong("pixels as channels of strides two", _strided(PIXELS_OF_TWO.before[0]), WHOLE),
    wrong("the largest by rows, of whole windows", BY_ROWS.before[0], replace(BY_ROWS.after[0], args=BY_ROWS.before)),
    wrong("averages at the border by products", AVERAGE, BY_PRODUCTS),
    wrong("padding counts or does not", AVERAGE, apply("average", *AVERAGE.args, **{
        **dict(AVERAGE.attributes), "counted": True})),
    replace(BY_HALVES, name="averages of overlapping parts", after=(
        concat_of(2, BY_HALVES.after[0].args[0].args[0], BY_HALVES.after[0].args[1]),)),
    wrong("constants are multiplied", apply("plus", apply("plus", LAST, Leaf("c1", (), True)), Leaf("c2", (), True)),
          apply("plus", LAST, Leaf("c1", (), True))),
)  # fmt: skip
