"""An element of an operator on real numbers, for proofs: a polynomial of the elements of its operands.

A sum of sums is written as one sum over the counters of both, a product with a sum as a sum of products; so polynomials
that are equal are sums of the same monomials, which the prover compares. Laws of a commutative ring alone are used:
nothing holds here because numbers wrap. Needs z3.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import z3

import celosia.compiler.superoptimise.reals  # noqa: F401  the operators
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
    judged,
    monomials,
    substituted,
    without_single,
)
from celosia.compiler.superoptimise.reals import in_reals
from celosia.compiler.superoptimise.rule import RewriteRule
from celosia.compiler.superoptimise.sizes import value_of


class RealProver(Prover):
    """A prover whose polynomials are of real numbers, and whose sums may run over other numbers of counters."""

    def _is_zero(self, terms: Iterable[Monomial], facts: Facts) -> bool:
        """Without a modulus: a sum of -1, 0 and 1, of which there are fewer than 2^32, is a multiple of that only where
        it is 0. Sums over as many counters cancel each other."""
        groups: dict[int, list[Monomial]] = {}
        for k, atoms in terms:
            if abs(k) > 1:
                return False
            alone = atoms[0] if len(atoms) == 1 else None
            width = len(without_single(alone).variables) if isinstance(alone, SumOver) else 0
            groups.setdefault(width, []).append((k, atoms))
        return all(self._cancels(group, facts) if width else Prover._is_zero(self, group, facts)
                   for width, group in groups.items())  # fmt: skip

    def _cancels(self, sums: Sequence[Monomial], facts: Facts) -> bool:
        """Whether sums are equal in pairs, or else together."""
        plus, less = ([each for each in sums if each[0] == k] for k in (1, -1))
        if 1 < len(plus) == len(less) == len(sums) / 2:
            for each in plus:
                found = next((other for other in less if Prover._is_zero(self, (each, other), facts)), None)
                if found is None:
                    break
                less.remove(found)
            else:
                return True
        return Prover._is_zero(self, sums, facts)


def verdict(rule: RewriteRule) -> Judgement:
    """Whether `rule` holds in real numbers for all sizes, case by case of its choices."""
    rule = in_reals(rule)
    return judged(rule, lambda values: RealProver(shifts=tuple(value_of(shift, values) for shift in rule.shifts)))


# Polynomials ---------------------------------------------------------------------------------------------------------


def product(*factors: Element) -> Element:
    """Write an element as a sum of monomials, each with one sum over counters at most."""
    return Plus(tuple(_whole(k, atoms) for k, atoms in monomials(Times(factors)) if k))


def total(variables: Index, guard: Any, *factors: Element) -> Element:
    """The sum of a product over `variables`, as a sum for each of its monomials."""
    return Plus(tuple(_summed(variables, guard, k, atoms) for k, atoms in monomials(Times(factors)) if k))


def _whole(k: int, atoms: Sequence[Element]) -> Element:
    if any(isinstance(each, SumOver) for each in atoms):
        return _summed((), z3.BoolVal(True), k, atoms)
    return Times((Number(k), *atoms))


def _summed(variables: Index, guard: Any, k: int, atoms: Sequence[Element]) -> Element:
    """The sum of k times `atoms`; those that are sums, and those that are 0 elsewhere, have their guards in it."""
    factors: list[Element] = [Number(k)]
    for each in atoms:
        match each:
            case SumOver(inner, where, body):
                variables, guard = (*variables, *inner), z3.And(guard, where)
                factors.append(body)
            case Ite(where, yes, Number(0)):
                guard = z3.And(guard, where)
                factors.append(yes)
            case _:
                factors.append(each)
    return _of_one_place(SumOver(variables, guard, Times(tuple(factors))))


def _of_one_place(each: SumOver) -> Element:
    """`each` without counters that its guard says to be a term without counters."""
    variables, guard, body = each.variables, each.guard, each.body
    for claim in _claims(guard):
        if z3.is_eq(claim):
            counter, value = claim.children()
            if any(z3.eq(counter, known) for known in variables) and not _has(value, each.variables):
                variables = tuple(known for known in variables if not z3.eq(known, counter))
                guard, body = z3.substitute(guard, (counter, value)), substituted(body, [(counter, value)])
    return SumOver(variables, guard, body) if variables else Ite(guard, body, Number(0))


def _claims(guard: Any) -> list[Any]:
    return [each for part in guard.children() for each in _claims(part)] if z3.is_and(guard) else [guard]


def _has(term: Any, variables: Index) -> bool:
    return any(z3.eq(term, each) for each in variables) or any(_has(part, variables) for part in term.children())


# Operators -----------------------------------------------------------------------------------------------------------


def _within(*bounds: tuple[Any, Any]) -> Any:
    return z3.And(*(z3.And(index >= 0, index < size) for index, size in bounds))


def _pixels(at: Index, counters: Index, given: Attributes) -> list[Any]:
    return [
        at[2 + axis] * given["strides"][axis] + counters[axis] * given["dilations"][axis] - given["pads"][axis]
        for axis in (0, 1)
    ]


def _convolve(args: Sequence[ElementAt], shapes: Sequence[Shape], given: Attributes, at: Index) -> Element:
    x, w, *b = args
    n, o, *_ = at
    if given["group"] != 1:
        raise Unprovable("groups of real numbers")
    c, i, j = fresh("c"), fresh("i"), fresh("j")
    y, z = _pixels(at, (i, j), given)
    channels, *kernel = shapes[1][1:]
    inside = _within((c, channels), (i, kernel[0]), (j, kernel[1]), (y, shapes[0][2]), (z, shapes[0][3]))
    sums = total((i, j, c), inside, x((n, c, y, z)), w((o, c, i, j)))
    return Plus((sums, b[0]((o,)))) if b else sums


def _multiply(args: Sequence[ElementAt], shapes: Sequence[Shape], given: Attributes, at: Index) -> Element:
    k = fresh("k")
    return total((k,), _within((k, shapes[1][0])), args[0]((*at[:-1], k)), args[1]((k, at[-1])))


def _pad(args: Sequence[ElementAt], shapes: Sequence[Shape], given: Attributes, at: Index) -> Element:
    inner = tuple(index - before for index, before in zip(at, given["pads"]))
    return Ite(_within(*zip(inner, shapes[0])), args[0](inner), Number(0))


def _average(args: Sequence[ElementAt], shapes: Sequence[Shape], given: Attributes, at: Index) -> Element:
    """A pixel's share of a window's sum: a number that depends on how many are counted, and on nothing else."""

    def pixels(*factors: Element, of: ElementAt | None = None) -> Element:
        i, j = fresh("i"), fresh("j")
        y, z = _pixels(at, (i, j), given)
        sizes = (i, given["kernel"][0]), (j, given["kernel"][1]), (y, shapes[0][2]), (z, shapes[0][3])
        return total((i, j), _within(*sizes), *factors, of((*at[:2], y, z)) if of else Number(1))

    share: Element = Uninterpreted("share of a pixel", (pixels(),))
    if given["counted"]:
        share = Read("share of a kernel", given["kernel"])
    return pixels(share, of=args[0])


def _diagonal(args: Sequence[ElementAt], shapes: Sequence[Shape], given: Attributes, at: Index) -> Element:
    o, c, *tap = at
    there = z3.And(c == o, *(each == place for each, place in zip(tap, given["at"])))
    return Plus((args[0](at), Ite(there, args[1]((o,)), Number(0))))


def _carried(args: Sequence[ElementAt], shapes: Sequence[Shape], given: Attributes, at: Index) -> Element:
    c, i, j = fresh("c"), fresh("i"), fresh("j")
    inside = _within(*zip((c, i, j), shapes[1][1:]))
    return total((c, i, j), inside, args[0]((c,)), args[1]((*at, c, i, j)))


def _deviation(args: Sequence[ElementAt], shapes: Sequence[Shape], given: Attributes, at: Index) -> Element:
    s, var, epsilon = args
    return Uninterpreted("over the deviation", (s(at), var(at), epsilon(())))


def _normalised(args: Sequence[ElementAt], shapes: Sequence[Shape], given: Attributes, at: Index) -> Element:
    x, s, b, mean, var, epsilon = args
    channel = (at[1],)
    factor = _deviation((s, var, epsilon), (), given, channel)
    return Plus((product(minus(x(at), mean(channel)), factor), b(channel)))


MEANINGS |= {
    "real_convolve": _convolve,
    "real_multiply": _multiply,
    "real_plus": lambda args, shapes, given, at: Plus((args[0](at), args[1](at))),
    "real_minus": lambda args, shapes, given, at: minus(args[0](at), args[1](at)),
    "real_scale": lambda args, shapes, given, at: product(args[0](at), args[1]((at[given["axis"]],))),
    "real_shift": lambda args, shapes, given, at: Plus((args[0](at), args[1]((at[given["axis"]],)))),
    "real_pad": _pad,
    "real_average": _average,
    "real_filled": lambda args, shapes, given, at: Number(given["value"]),
    "real_diagonal": _diagonal,
    "real_carried": _carried,
    "real_normalised": _normalised,
    "real_deviation": _deviation,
}
