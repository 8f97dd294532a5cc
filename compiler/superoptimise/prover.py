"""Proofs that two terms are the same tensor, for all sizes and all values. Needs z3.

An element of each side is an expression (operators/elements.py). `Prover.equal` takes both expressions apart together:

- conditions: both sides are compared under each of them and its negation;
- functions that round: equal names and equal arguments;
- sums and maxima: equal bodies at every value of their counters, for some renumbering of the counters;
- polynomials: the difference of both sides has no monomial left, modulo 2^32.

The remaining questions are equations between integers, such as indices and bounds, which z3 answers. An answer that z3
does not find within STEPS counts as no, so that a rule is refused rather than accepted wrongly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, permutations, product
from typing import Any

import z3

from celosia.compiler.superoptimise.operators import OPERATORS, demands
from celosia.compiler.superoptimise.operators.definition import Shape
from celosia.compiler.superoptimise.operators.elements import (
    Element,
    ElementAt,
    Index,
    Ite,
    MaxOver,
    Monomial,
    Number,
    Plus,
    Read,
    SumOver,
    Times,
    Uninterpreted,
    Unprovable,
    fresh,
    monomials,
    substitute,
)
from celosia.compiler.superoptimise.operators.reals import in_reals
from celosia.compiler.superoptimise.rule import (
    Absorbs,
    IsIdentity,
    Leaf,
    Monotone,
    RewriteRule,
    SizeOf,
    SumCut,
    Term,
    Values,
    value_of,
)

STEPS = 2_000_000
"""Limit of z3's own steps for one question. A limit in seconds would give other answers on a slower machine."""
MAX_RENUMBERINGS = 300
"""Limit of the renumberings of counters that are tried for one pair of sums."""
_MODULUS = 1 << 32
"""Accumulators wrap at this number."""
Facts = tuple[Any, ...]
"""Conditions of z3 that hold."""
Reduction = SumOver | MaxOver
Renumbering = tuple[tuple[int, ...], Index]
"""For each counter of a reduction, the place of the common counter that stands for it, and what is added to that."""


@dataclass
class Prover:
    """Answers whether elements are equal, under the conditions and with the hints of one rule.

    shifts: offsets besides 0 by which counters of sums may differ between both sides. monotone, identities: names of
    functions that are increasing, or the identity. absorbing: pairs (f, g) of names with f(g(v)) = g(v) for all v.
    cuts: how sums are cut before they are compared. questions: number of questions that z3 was asked.
    """

    shifts: Sequence[Any] = ()
    monotone: frozenset[str] = frozenset()
    absorbing: frozenset[tuple[str, str]] = frozenset()
    identities: frozenset[str] = frozenset()
    cuts: Sequence[SumCut] = ()
    questions: int = 0
    _answers: dict[tuple[int, ...], bool] = field(default_factory=dict)
    _kept_alive: list[Any] = field(default_factory=list)

    def holds(self, facts: Facts, claim: Any) -> bool:
        """Return whether `claim` follows from `facts`; False also where z3 cannot tell. Answers are remembered."""
        if isinstance(claim, bool):
            return claim or self.impossible(facts)
        claim = z3.simplify(claim)
        if z3.is_true(claim) or any(z3.eq(claim, fact) for fact in facts):
            return True
        key = (*(fact.get_id() for fact in facts), -1, claim.get_id())
        if key not in self._answers:
            self.questions += 1
            self._answers[key] = are_contradictory(*facts, z3.Not(claim))
            self._kept_alive += [claim, *facts]  # z3 may reuse the ids of terms that are freed
        return self._answers[key]

    def impossible(self, facts: Facts) -> bool:
        """Return whether `facts` contradict each other, so that their case never occurs."""
        return self.holds(facts, z3.BoolVal(False))

    # Elements ------------------------------------------------------------------------------------------------------

    def equal(self, a: Element, b: Element, facts: Facts) -> bool:
        """Return whether `a` equals `b` wherever `facts` hold; False also where that cannot be shown."""
        a, b = self._simplify(a, facts), self._simplify(b, facts)
        condition = next((condition for side in (a, b) for condition in conditions(side)), None)
        if condition is not None:
            for case in (condition, z3.simplify(z3.Not(condition))):
                known = (*facts, case)
                if not self.impossible(known) and not self.equal(a, b, known):
                    return False
            return True
        if isinstance(a, Read) and isinstance(b, Read):
            is_same_rank = a.name == b.name and len(a.index) == len(b.index)
            return is_same_rank and all(self.holds(facts, as_z3(i) == as_z3(j)) for i, j in zip(a.index, b.index))
        if isinstance(a, MaxOver) and isinstance(b, MaxOver):
            return self._equal_reductions([a], [b], facts)
        if isinstance(a, Uninterpreted) and isinstance(b, Uninterpreted):
            is_same_function = a.name == b.name and len(a.parts) == len(b.parts)
            return is_same_function and all(self.equal(p, q, facts) for p, q in zip(a.parts, b.parts))
        return self._is_zero([*monomials(a), *((-k, atoms) for k, atoms in monomials(b))], facts)

    def _simplify(self, element: Element, facts: Facts) -> Element:
        """Replace conditions that `facts` decide by the branch that they select, and simplify functions."""
        match element:
            case Ite(condition, yes, no):
                condition = z3.simplify(condition) if not isinstance(condition, bool) else z3.BoolVal(condition)
                if self.holds(facts, condition):
                    return self._simplify(yes, facts)
                if self.holds(facts, z3.Not(condition)):
                    return self._simplify(no, facts)
                return Ite(condition, self._simplify(yes, facts), self._simplify(no, facts))
            case Plus(parts):
                return Plus(tuple(self._simplify(part, facts) for part in parts))
            case Times(parts):
                return Times(tuple(self._simplify(part, facts) for part in parts))
            case Uninterpreted(name, parts):
                return self._simplify_function(name, tuple(self._simplify(part, facts) for part in parts))
        return element

    def _simplify_function(self, name: str, parts: tuple[Element, ...]) -> Element:
        """Apply what is known of the function `name`: drop it where it changes nothing, and move a monotone one inside
        of a maximum.
        """
        operand = parts[0]
        if name in self.identities and len(parts) == 1:
            return operand
        if name in self.monotone and len(parts) == 1 and isinstance(operand, MaxOver):
            return MaxOver(operand.variables, operand.guard, Uninterpreted(name, (operand.body,)))
        if len(parts) == 1 and isinstance(operand, Uninterpreted) and (name, operand.name) in self.absorbing:
            return operand
        return Uninterpreted(name, parts)

    # Sums and largest values ---------------------------------------------------------------------------------------

    def _equal_reductions(self, left: Sequence[Reduction], right: Sequence[Reduction], facts: Facts) -> bool:
        """Return whether the reductions of both sides together have equal bodies at each value of their counters, for
        some renumbering of the counters of each.
        """
        sides = [[without_constant_counters(reduction) for reduction in side] for side in (left, right)]
        for cut in self.cuts:
            sides[cut.side] = [part for reduction in sides[cut.side] for part in self._cut_sum(reduction, cut, facts)]
        left, right = sides
        reductions = [*left, *right]
        count = len(reductions[0].variables)
        if any(len(reduction.variables) != count for reduction in reductions):
            return False
        counters = tuple(fresh("at") for _ in range(count))
        renumberings = list(self._renumberings(count))
        for others in islice(product(renumberings, repeat=len(reductions) - 1), MAX_RENUMBERINGS):
            chosen = (renumberings[0], *others)
            renumbered = [_renumber(reduction, counters, way) for reduction, way in zip(reductions, chosen)]
            if self._equal_at_each_place(renumbered[: len(left)], renumbered[len(left) :], facts):
                return True
        return False

    def _cut_sum(self, reduction: Reduction, cut: SumCut, facts: Facts) -> list[Reduction]:
        """Cut a sum along a counter as the hint `cut` says. Returns it unchanged where it has no such counter, or where
        the runs do not cover the counter's range.
        """
        if not isinstance(reduction, SumOver) or cut.counter >= len(reduction.variables):
            return [reduction]
        variable = reduction.variables[cut.counter]
        sums: list[Reduction] = []
        length, number = cut.runs
        if number and not self.holds((*facts, reduction.guard), z3.And(variable >= 0, variable < number * length)):
            return [reduction]
        for part in range(cut.every or number):
            counter = fresh("part")
            value = cut.every * counter + part - cut.offset if cut.every else part * length + counter
            bounds = [] if cut.every else [counter >= 0, counter < length]
            guard = z3.And(z3.substitute(reduction.guard, (variable, value)), *bounds)
            variables = (*reduction.variables[: cut.counter], counter, *reduction.variables[cut.counter + 1 :])
            sums.append(SumOver(variables, guard, substitute(reduction.body, [(variable, value)])))
        return sums

    def _renumberings(self, count: int) -> Iterator[Renumbering]:
        """Yield ways to replace `count` counters by others: in another order, and moved by `shifts`. The unchanged one
        comes first.
        """
        identity = tuple(range(count))
        yield identity, (0,) * count
        for order in permutations(range(count)):
            for offsets in product((0, *self.shifts), repeat=count):
                if any(isinstance(offset, z3.ExprRef) or offset for offset in offsets) or order != identity:
                    yield order, offsets

    def _equal_at_each_place(self, left: Sequence[Reduction], right: Sequence[Reduction], facts: Facts) -> bool:
        """Return whether reductions over the same counters have equal bodies at each value of the counters. Sums are
        compared as the sums of their bodies, each 0 where its guard does not hold; maxima must have the same guard.
        """
        if isinstance(left[0], SumOver):
            total, other = (
                Plus(tuple(Ite(reduction.guard, reduction.body, Number(0)) for reduction in side))
                for side in (left, right)
            )
            return self.equal(total, other, facts)
        a, b = left[0], right[0]
        if not (self.holds((*facts, a.guard), b.guard) and self.holds((*facts, b.guard), a.guard)):
            return False
        return self.equal(a.body, b.body, (*facts, a.guard))

    # Polynomials ---------------------------------------------------------------------------------------------------

    def _is_zero(self, terms: Iterable[Monomial], facts: Facts) -> bool:
        """Return whether monomials add up to 0 modulo 2^32. Equal monomials are collected first; of what remains, sums
        with factor 1 must equal sums with factor -1.
        """
        remaining: list[Monomial] = []
        for k, atoms in terms:
            for place, (known_k, known_atoms) in enumerate(remaining):
                if self._same_atoms(atoms, known_atoms, facts):
                    remaining[place] = (k + known_k, known_atoms)
                    break
            else:
                remaining.append((k, atoms))
            remaining = [monomial for monomial in remaining if monomial[0] % _MODULUS]
        if not remaining:
            return True
        sums = [(k, atoms[0]) for k, atoms in remaining if len(atoms) == 1 and isinstance(atoms[0], SumOver)]
        if len(sums) < len(remaining) or any(k not in (1, -1) for k, _ in sums):
            return False
        added = [total for k, total in sums if k == 1]
        subtracted = [total for k, total in sums if k == -1]
        return bool(added and subtracted) and self._equal_reductions(added, subtracted, facts)

    def _same_atoms(self, a: Sequence[Element], b: Sequence[Element], facts: Facts) -> bool:
        """Return whether two products have equal factors in some order."""
        if len(a) != len(b):
            return False
        unmatched = list(b)
        for atom in a:
            equal = next((place for place, other in enumerate(unmatched) if self._same_atom(atom, other, facts)), None)
            if equal is None:
                return False
            del unmatched[equal]
        return True

    def _same_atom(self, a: Element, b: Element, facts: Facts) -> bool:
        """Return whether two factors of monomials are equal. Sums count as different, since `_is_zero` compares all of
        them together.
        """
        if type(a) is not type(b) or isinstance(a, SumOver):
            return False
        return self.equal(a, b, facts)


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


def are_contradictory(*conditions: Any) -> bool:
    """Return whether no integers fulfil all `conditions`; False also where z3 cannot tell in STEPS.

    Ctrl-C is left alone: with ctrl_c, z3 would replace Python's signal handler by one after which system calls are
    restarted, so that waiting could no longer be interrupted.
    """
    solver = z3.SimpleSolver()
    solver.set(rlimit=STEPS, ctrl_c=False)
    solver.add(*conditions)
    return bool(solver.check() == z3.unsat)


def as_z3(value: Any) -> Any:
    """Convert an int to a term of z3; return a term unchanged."""
    return z3.IntVal(value) if isinstance(value, int) else value


def conditions(element: Element) -> Iterator[Any]:
    """Yield the conditions of `element`, except for those inside of sums and maxima."""
    match element:
        case Ite(condition, yes, no):
            yield condition
            yield from conditions(yes)
            yield from conditions(no)
        case Plus(parts) | Times(parts) | Uninterpreted(_, parts):
            for part in parts:
                yield from conditions(part)


def without_constant_counters(reduction: Reduction) -> Reduction:
    """Drop the counters of a reduction that can only be 0, such as the channel of a one-channel convolution; the last
    counter stays.
    """
    varying, guard = list(reduction.variables), reduction.guard
    zeros = []
    for variable in reduction.variables:
        if are_contradictory(guard, variable != 0):
            zeros.append((variable, z3.IntVal(0)))
            varying.remove(variable)
    if not zeros or not varying:
        return reduction
    return type(reduction)(tuple(varying), z3.substitute(guard, *zeros), substitute(reduction.body, zeros))


def _renumber(reduction: Reduction, counters: Index, renumbering: Renumbering) -> Reduction:
    """Express a reduction by the common `counters`."""
    order, offsets = renumbering
    pairs = [
        (variable, counters[place] + offset) for variable, place, offset in zip(reduction.variables, order, offsets)
    ]
    return type(reduction)(counters, z3.substitute(reduction.guard, *pairs), substitute(reduction.body, pairs))


# Terms ---------------------------------------------------------------------------------------------------------------


def tensor(term: Term, values: Values) -> tuple[ElementAt, Shape]:
    """Return the element function and the shape of `term`, for sizes with these values."""
    if isinstance(term, Leaf):
        name = term.name
        return (lambda index: Read(name, index)), value_of(term.shape, values)
    operands = [tensor(arg, values) for arg in term.args]
    elements, shapes = [element_at for element_at, _ in operands], [shape for _, shape in operands]
    attributes = {name: value_of(value, values) for name, value in term.attributes}
    operator = OPERATORS[term.op]
    shape = operator.shape(shapes, attributes)
    return (lambda index: operator.element(elements, shapes, attributes, index)), shape


def prove(prover: Prover, left: Term, right: Term, values: Values, facts: Facts) -> str:
    """Prove that two terms are the same tensor, where `facts` hold of the sizes. Returns "" on success, else why they
    may differ.
    """
    (a, shape), (b, other_shape) = tensor(left, values), tensor(right, values)
    if len(shape) != len(other_shape):
        return f"one side has {len(shape)} dimensions, the other {len(other_shape)}"
    for axis, (size, other_size) in enumerate(zip(shape, other_shape)):
        if not prover.holds(facts, as_z3(size) == as_z3(other_size)):
            return f"sizes differ along axis {axis}"
    index = tuple(fresh("index") for _ in shape)
    inside = [z3.And(position >= 0, position < as_z3(size)) for position, size in zip(index, shape)]
    return "" if prover.equal(a(index), b(index), (*facts, *inside)) else "an element differs"


def demands_of(term: Term, values: Values) -> list[Any]:
    """List the demands on sizes of all operators in `term`. Raises Unprovable."""
    if isinstance(term, Leaf):
        return []
    if term.op not in OPERATORS:
        raise Unprovable(f"nothing is known of {term.op}")
    inner_demands = [demand for arg in term.args for demand in demands_of(arg, values)]
    if any(demand is False for demand in inner_demands):
        return [False]
    shapes = [tensor(arg, values)[1] for arg in term.args]
    attributes = {name: value_of(value, values) for name, value in term.attributes}
    return inner_demands + demands(term.op, shapes, attributes)


@dataclass(frozen=True)
class Judgement:
    """The verdict on a rule.

    proved: whether it holds in all cases. why: a sentence on what could not be shown. cases: number of combinations of
    values of its choices. questions: number of questions that z3 was asked.
    """

    proved: bool
    why: str
    cases: int
    questions: int


def verdict(rule: RewriteRule, reals: bool = False) -> Judgement:
    """Try to prove a rule for all sizes, case by case of its choices. reals: in real numbers, for fast-math."""
    rule = in_reals(rule) if reals else rule
    cases = questions = 0
    for choice in rule.cases():
        values = {**choice, **{size.name: z3.Int(size.name) for size in rule.sizes}}
        prover = _prover_of(rule, values, RealProver if reals else Prover)
        try:
            why = _why_not_proved(prover, rule, values)
        except Unprovable as error:
            why = str(error)
        except IndexError:
            why = "an axis that there is not"
        cases, questions = cases + 1, questions + prover.questions
        if why:
            where = ", ".join(f"{name} = {value}" for name, value in choice.items())
            return Judgement(False, why + (f" where {where}" if where else ""), cases, questions)
    return Judgement(True, "", cases, questions)


def _prover_of(rule: RewriteRule, values: Values, kind: type[Prover]) -> Prover:
    """Make a prover that knows the rule's conditions on functions, and its hints."""
    return kind(
        shifts=tuple(value_of(shift, values) for shift in rule.shifts),
        cuts=[replace(cut, runs=value_of(cut.runs, values)) for cut in rule.cuts],
        identities=frozenset(f"map {known.function}" for known in rule.where if isinstance(known, IsIdentity)),
        monotone=frozenset(f"map {known.function}" for known in rule.where if isinstance(known, Monotone)),
        absorbing=frozenset(
            (f"map {known.outer}", f"map {known.inner}") for known in rule.where if isinstance(known, Absorbs)
        ),
    )


def _why_not_proved(prover: Prover, rule: RewriteRule, values: Values) -> str:
    """Try to prove the rule in one case. Returns "" on success, else what could not be shown. The demands of `before`
    and the conditions of the rule are the facts; they must imply the demands of `after`.
    """
    facts = [values[size.name] >= size.least for size in rule.sizes]
    facts += [value_of(condition, values) for condition in rule.where if isinstance(condition, SizeOf)]
    facts += [demand for term in rule.before for demand in demands_of(term, values)]
    if any(fact is False for fact in facts):
        return "there are no sizes for it"
    known = tuple(z3.simplify(fact) for fact in facts if not isinstance(fact, bool))
    if len(rule.before) != len(rule.after):
        return "its sides have different numbers of terms"
    for term in rule.after:
        for demand in demands_of(term, values):
            if not prover.holds(known, demand):
                return f"{term} may be asked for sizes that there are not: {demand}"
    for left, right in zip(rule.before, rule.after):
        if why := prove(prover, left, right, values, known):
            return why
    return ""
