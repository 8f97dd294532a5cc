"""Meaning of operators on real numbers, for the proofs of fast-math: polynomials of the operands' elements. Needs z3.

A sum of sums is written as one sum over the counters of both, and a product with a sum as a sum of products. So equal
polynomials are sums of the same monomials, which the prover compares. Only laws that hold in every commutative ring are
used; nothing is accepted because integers wrap.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import z3

import celosia.compiler.superoptimise.reals  # noqa: F401  adds the operators on real numbers
from celosia.compiler.superoptimise.elements import (
    Element,
    ElementAt,
    Index,
    Ite,
    Number,
    Plus,
    Read,
    SumOver,
    Times,
    Uninterpreted,
    minus,
)
from celosia.compiler.superoptimise.meaning import MEANINGS, Unprovable, fresh
from celosia.compiler.superoptimise.operators import Attributes, Shape
from celosia.compiler.superoptimise.prover import (
    Facts,
    Judgement,
    Monomial,
    Prover,
    judge,
    monomials,
    substitute,
    without_constant_counters,
)
from celosia.compiler.superoptimise.reals import in_reals
from celosia.compiler.superoptimise.rule import RewriteRule
from celosia.compiler.superoptimise.sizes import value_of


class RealProver(Prover):
    """A prover for polynomials of real numbers: no modulus, and sums may have different numbers of counters."""

    def _is_zero(self, terms: Iterable[Monomial], facts: Facts) -> bool:
        """Return whether monomials add up to 0 without a modulus. Factors are only -1, 0 and 1, and there are fewer
        than 2^32 of them, so that their total is a multiple of 2^32 only where it is 0. Sums with the same number of
        counters are compared with each other.
        """
        groups: dict[int, list[Monomial]] = {}
        for k, atoms in terms:
            if abs(k) > 1:
                return False
            only_atom = atoms[0] if len(atoms) == 1 else None
            counters = len(without_constant_counters(only_atom).variables) if isinstance(only_atom, SumOver) else 0
            groups.setdefault(counters, []).append((k, atoms))
        return all(self._cancels(group, facts) if counters else Prover._is_zero(self, group, facts)
                   for counters, group in groups.items())  # fmt: skip

    def _cancels(self, sums: Sequence[Monomial], facts: Facts) -> bool:
        """Return whether sums cancel: in pairs, or else all together."""
        added, subtracted = ([term for term in sums if term[0] == k] for k in (1, -1))
        if 1 < len(added) == len(subtracted) == len(sums) / 2:
            for term in added:
                equal = next((other for other in subtracted if Prover._is_zero(self, (term, other), facts)), None)
                if equal is None:
                    break
                subtracted.remove(equal)
            else:
                return True
        return Prover._is_zero(self, sums, facts)


def verdict(rule: RewriteRule) -> Judgement:
    """Judge a rule of fast-math: try to prove that it holds in real numbers for all sizes, case by case of its
    choices.
    """
    rule = in_reals(rule)
    return judge(rule, lambda values: RealProver(shifts=tuple(value_of(shift, values) for shift in rule.shifts)))


# Polynomials ---------------------------------------------------------------------------------------------------------


def product(*factors: Element) -> Element:
    """Return a product expanded to a sum of monomials, each with at most one sum over counters."""
    return Plus(tuple(_monomial_element(k, atoms) for k, atoms in monomials(Times(factors)) if k))


def sum_over(variables: Index, guard: Any, *factors: Element) -> Element:
    """Return the sum of the product of `factors` over `variables`, expanded to one sum for each monomial."""
    return Plus(tuple(_sum_of_monomial(variables, guard, k, atoms) for k, atoms in monomials(Times(factors)) if k))


def _monomial_element(k: int, atoms: Sequence[Element]) -> Element:
    """Return k times `atoms`; where some atoms are sums, as one sum over the counters of all."""
    if any(isinstance(atom, SumOver) for atom in atoms):
        return _sum_of_monomial((), z3.BoolVal(True), k, atoms)
    return Times((Number(k), *atoms))


def _sum_of_monomial(variables: Index, guard: Any, k: int, atoms: Sequence[Element]) -> Element:
    """Return the sum of k times `atoms` over `variables`. Atoms that are sums add their counters and guards; atoms that
    are 0 outside of a condition add the condition to the guard.
    """
    factors: list[Element] = [Number(k)]
    for atom in atoms:
        match atom:
            case SumOver(more_variables, condition, body):
                variables, guard = (*variables, *more_variables), z3.And(guard, condition)
                factors.append(body)
            case Ite(condition, yes, Number(0)):
                guard = z3.And(guard, condition)
                factors.append(yes)
            case _:
                factors.append(atom)
    return _without_fixed_counters(SumOver(variables, guard, Times(tuple(factors))))


def _without_fixed_counters(total: SumOver) -> Element:
    """Drop the counters of a sum that its guard sets equal to a term without counters, and put that term in their
    place.
    """
    variables, guard, body = total.variables, total.guard, total.body
    for condition in _conjuncts(guard):
        if z3.is_eq(condition):
            counter, value = condition.children()
            if any(z3.eq(counter, other) for other in variables) and not _contains_any(value, total.variables):
                variables = tuple(other for other in variables if not z3.eq(other, counter))
                guard, body = z3.substitute(guard, (counter, value)), substitute(body, [(counter, value)])
    return SumOver(variables, guard, body) if variables else Ite(guard, body, Number(0))


def _conjuncts(guard: Any) -> list[Any]:
    """Split a conjunction of z3 into its conditions."""
    return [condition for part in guard.children() for condition in _conjuncts(part)] if z3.is_and(guard) else [guard]


def _contains_any(term: Any, variables: Index) -> bool:
    """Return whether one of `variables` occurs in the z3 term `term`."""
    return any(z3.eq(term, variable) for variable in variables) or any(
        _contains_any(part, variables) for part in term.children()
    )


# Operators -----------------------------------------------------------------------------------------------------------


def _all_between(*bounds: tuple[Any, Any]) -> Any:
    """Return the condition that 0 <= index < size for all pairs (index, size)."""
    return z3.And(*(z3.And(position >= 0, position < size) for position, size in bounds))


def _pixel_of_tap(index: Index, counters: Index, attributes: Attributes) -> list[Any]:
    """Return row and column of the pixel that the tap `counters` of the window at `index` reads."""
    return [
        index[2 + axis] * attributes["strides"][axis]
        + counters[axis] * attributes["dilations"][axis]
        - attributes["pads"][axis]
        for axis in (0, 1)
    ]


def _convolve_element(
    args: Sequence[ElementAt], shapes: Sequence[Shape], attributes: Attributes, index: Index
) -> Element:
    """Return the sum over taps and channels inside of the image, and the bias. One group only."""
    x, w, *b = args
    n, o, *_ = index
    if attributes["group"] != 1:
        raise Unprovable("groups of real numbers")
    c, i, j = fresh("c"), fresh("i"), fresh("j")
    y, z = _pixel_of_tap(index, (i, j), attributes)
    channels, *kernel = shapes[1][1:]
    inside = _all_between((c, channels), (i, kernel[0]), (j, kernel[1]), (y, shapes[0][2]), (z, shapes[0][3]))
    sums = sum_over((i, j, c), inside, x((n, c, y, z)), w((o, c, i, j)))
    return Plus((sums, b[0]((o,)))) if b else sums


def _multiply_element(
    args: Sequence[ElementAt], shapes: Sequence[Shape], attributes: Attributes, index: Index
) -> Element:
    """Return the sum over the inner axis."""
    k = fresh("k")
    return sum_over((k,), _all_between((k, shapes[1][0])), args[0]((*index[:-1], k)), args[1]((k, index[-1])))


def _pad_element(args: Sequence[ElementAt], shapes: Sequence[Shape], attributes: Attributes, index: Index) -> Element:
    """Return the operand's element, or 0 where the index lies outside of it."""
    source = tuple(position - before for position, before in zip(index, attributes["pads"]))
    return Ite(_all_between(*zip(source, shapes[0])), args[0](source), Number(0))


def _average_element(
    args: Sequence[ElementAt], shapes: Sequence[Shape], attributes: Attributes, index: Index
) -> Element:
    """Return the sum of a window's pixels times the share of each: an unknown number that depends only on how many
    pixels are counted.
    """

    def sum_over_window(*factors: Element, image: ElementAt | None = None) -> Element:
        """Sum the product of `factors` over the pixels of the window, times each pixel of `image` if there is one."""
        i, j = fresh("i"), fresh("j")
        y, z = _pixel_of_tap(index, (i, j), attributes)
        sizes = (i, attributes["kernel"][0]), (j, attributes["kernel"][1]), (y, shapes[0][2]), (z, shapes[0][3])
        return sum_over((i, j), _all_between(*sizes), *factors, image((*index[:2], y, z)) if image else Number(1))

    share: Element = Uninterpreted("share of a pixel", (sum_over_window(),))
    if attributes["counted"]:
        share = Read("share of a kernel", attributes["kernel"])
    return sum_over_window(share, image=args[0])


def _diagonal_element(
    args: Sequence[ElementAt], shapes: Sequence[Shape], attributes: Attributes, index: Index
) -> Element:
    """Return the weight, plus the number of the channel where output, input and tap are those of the diagonal."""
    o, c, *tap = index
    is_on_diagonal = z3.And(c == o, *(position == place for position, place in zip(tap, attributes["at"])))
    return Plus((args[0](index), Ite(is_on_diagonal, args[1]((o,)), Number(0))))


def _carried_element(
    args: Sequence[ElementAt], shapes: Sequence[Shape], attributes: Attributes, index: Index
) -> Element:
    """Return the sum of bias times weights over input channels and taps."""
    c, i, j = fresh("c"), fresh("i"), fresh("j")
    inside = _all_between(*zip((c, i, j), shapes[1][1:]))
    return sum_over((c, i, j), inside, args[0]((c,)), args[1]((*index, c, i, j)))


def _deviation_element(
    args: Sequence[ElementAt], shapes: Sequence[Shape], attributes: Attributes, index: Index
) -> Element:
    """Return an unknown function of scale, variance and epsilon."""
    s, var, epsilon = args
    return Uninterpreted("over the deviation", (s(index), var(index), epsilon(())))


def _normalised_element(
    args: Sequence[ElementAt], shapes: Sequence[Shape], attributes: Attributes, index: Index
) -> Element:
    """Return (x - mean) times the scale over the deviation, plus the bias."""
    x, s, b, mean, var, epsilon = args
    channel = (index[1],)
    factor = _deviation_element((s, var, epsilon), (), attributes, channel)
    return Plus((product(minus(x(index), mean(channel)), factor), b(channel)))


MEANINGS |= {
    "real_convolve": _convolve_element,
    "real_multiply": _multiply_element,
    "real_plus": lambda args, shapes, attributes, index: Plus((args[0](index), args[1](index))),
    "real_minus": lambda args, shapes, attributes, index: minus(args[0](index), args[1](index)),
    "real_scale": lambda args, shapes, attributes, index: product(
        args[0](index), args[1]((index[attributes["axis"]],))
    ),
    "real_shift": lambda args, shapes, attributes, index: Plus((args[0](index), args[1]((index[attributes["axis"]],)))),
    "real_pad": _pad_element,
    "real_average": _average_element,
    "real_filled": lambda args, shapes, attributes, index: Number(attributes["value"]),
    "real_diagonal": _diagonal_element,
    "real_carried": _carried_element,
    "real_normalised": _normalised_element,
    "real_deviation": _deviation_element,
}
