"""Proofs that two terms are the same tensor, for all sizes and all values. Needs z3.

An element of each side is an expression (elements.py). The two are taken apart together: conditions are cases;
functions that round are equal where their names and arguments are; sums and largest values over windows are equal
where they are, for a renumbering of what they run over, at every place; polynomials are equal where every monomial
cancels, modulo 2^32. What is left are equations of whole numbers, indices and bounds, which z3 answers. An answer that
it does not give in so many steps counts as no.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, permutations, product
from typing import Any

import z3

from celosia.compiler.superoptimise.elements import (
    Element,
    ElementAt,
    Index,
    Ite,
    MaxOver,
    Number,
    Plus,
    Read,
    SumOver,
    Times,
    Uninterpreted,
)
from celosia.compiler.superoptimise.legal import demands
from celosia.compiler.superoptimise.meaning import MEANINGS, Unprovable, fresh
from celosia.compiler.superoptimise.operators import OPERATORS, Shape
from celosia.compiler.superoptimise.rule import Absorbs, IsIdentity, Monotone, RewriteRule, SumCut
from celosia.compiler.superoptimise.sizes import SizeOf, Values, value_of
from celosia.compiler.superoptimise.terms import Leaf, Term

STEPS = 2_000_000
"""Steps of z3 for one question, as it counts them: a limit in seconds would give other answers on a slower machine."""
MOST_RENUMBERINGS = 300
_MODULUS = 1 << 32
Facts = tuple[Any, ...]
Monomial = tuple[int, tuple[Element, ...]]
Reduction = SumOver | MaxOver


@dataclass
class Prover:
    """shifts: what the counters of a sum may begin at on one side, beside 0. monotone: names of functions that never
    swap two bytes. identities: of those that are the identity. absorbing: pairs (f, g) of functions with
    f(g(v)) = g(v) for all v. cuts: of sums."""

    shifts: Sequence[Any] = ()
    monotone: frozenset[str] = frozenset()
    absorbing: frozenset[tuple[str, str]] = frozenset()
    identities: frozenset[str] = frozenset()
    cuts: Sequence[SumCut] = ()
    asked: int = 0
    _known: dict[tuple[int, ...], bool] = field(default_factory=dict)
    _kept: list[Any] = field(default_factory=list)

    def holds(self, facts: Facts, claim: Any) -> bool:
        """Whether `claim` follows from `facts`; False where it cannot be told."""
        if isinstance(claim, bool):
            return claim or self.impossible(facts)
        claim = z3.simplify(claim)
        if z3.is_true(claim) or any(z3.eq(claim, fact) for fact in facts):
            return True
        key = (*(fact.get_id() for fact in facts), -1, claim.get_id())
        if key not in self._known:
            self.asked += 1
            self._known[key] = excluded(*facts, z3.Not(claim))
            self._kept += [claim, *facts]  # whose numbers are not given to others meanwhile
        return self._known[key]

    def impossible(self, facts: Facts) -> bool:
        """Whether `facts` exclude each other."""
        return self.holds(facts, z3.BoolVal(False))

    # Elements ------------------------------------------------------------------------------------------------------

    def equal(self, a: Element, b: Element, facts: Facts) -> bool:
        """Whether `a` is `b` wherever `facts` hold."""
        a, b = self._settled(a, facts), self._settled(b, facts)
        condition = next((each for side in (a, b) for each in conditions(side)), None)
        if condition is not None:
            for case in (condition, z3.simplify(z3.Not(condition))):
                known = (*facts, case)
                if not self.impossible(known) and not self.equal(a, b, known):
                    return False
            return True
        if isinstance(a, Read) and isinstance(b, Read):
            return self._same_place(a, b, facts)
        if isinstance(a, MaxOver) and isinstance(b, MaxOver):
            return self._equal_reductions([a], [b], facts)
        if isinstance(a, Uninterpreted) and isinstance(b, Uninterpreted):
            return self._equal_functions(a, b, facts)
        return self._is_zero([*monomials(a), *((-k, atoms) for k, atoms in monomials(b))], facts)

    def _same_place(self, a: Read, b: Read, facts: Facts) -> bool:
        if a.name != b.name or len(a.index) != len(b.index):
            return False
        return all(self.holds(facts, as_z3(i) == as_z3(j)) for i, j in zip(a.index, b.index))

    def _equal_functions(self, a: Uninterpreted, b: Uninterpreted, facts: Facts) -> bool:
        if a.name != b.name or len(a.parts) != len(b.parts):
            return False
        return all(self.equal(p, q, facts) for p, q in zip(a.parts, b.parts))

    def _settled(self, element: Element, facts: Facts) -> Element:
        """`element` without the conditions that `facts` decide; monotone functions are inside of largest values."""
        match element:
            case Ite(condition, yes, no):
                condition = z3.simplify(condition) if not isinstance(condition, bool) else z3.BoolVal(condition)
                if self.holds(facts, condition):
                    return self._settled(yes, facts)
                if self.holds(facts, z3.Not(condition)):
                    return self._settled(no, facts)
                return Ite(condition, self._settled(yes, facts), self._settled(no, facts))
            case Plus(parts):
                return Plus(tuple(self._settled(part, facts) for part in parts))
            case Times(parts):
                return Times(tuple(self._settled(part, facts) for part in parts))
            case Uninterpreted(name, parts):
                return self._function(name, tuple(self._settled(part, facts) for part in parts))
        return element

    def _function(self, name: str, parts: tuple[Element, ...]) -> Element:
        inner = parts[0]
        if name in self.identities and len(parts) == 1:
            return inner
        if name in self.monotone and len(parts) == 1 and isinstance(inner, MaxOver):
            return MaxOver(inner.variables, inner.guard, Uninterpreted(name, (inner.body,)))
        if len(parts) == 1 and isinstance(inner, Uninterpreted) and (name, inner.name) in self.absorbing:
            return inner
        return Uninterpreted(name, parts)

    # Sums and largest values ---------------------------------------------------------------------------------------

    def _equal_reductions(self, left: Sequence[Reduction], right: Sequence[Reduction], facts: Facts) -> bool:
        """Whether both sides are the same at each place of what they run over, for a renumbering of that."""
        sides = [[without_single(each) for each in side] for side in (left, right)]
        for cut in self.cuts:
            sides[cut.side] = [part for each in sides[cut.side] for part in self._parts(each, cut, facts)]
        left, right = sides
        every = [*left, *right]
        width = len(every[0].variables)
        if any(len(each.variables) != width for each in every):
            return False
        at = tuple(fresh("at") for _ in range(width))
        ways = list(self._renumberings(width))
        for chosen in islice(product(ways, repeat=len(every) - 1), MOST_RENUMBERINGS):
            moved = [_renumbered(each, at, way) for each, way in zip(every, (ways[0], *chosen))]
            if self._equal_at(moved[: len(left)], moved[len(left) :], facts):
                return True
        return False

    def _parts(self, each: Reduction, cut: SumCut, facts: Facts) -> list[Reduction]:
        """`each` cut along a counter; as it is where it has no such counter, or another length."""
        if not isinstance(each, SumOver) or cut.counter >= len(each.variables):
            return [each]
        variable = each.variables[cut.counter]
        found: list[Reduction] = []
        length, number = cut.runs
        if number and not self.holds((*facts, each.guard), z3.And(variable >= 0, variable < number * length)):
            return [each]
        for part in range(cut.every or number):
            inner = fresh("part")
            place = cut.every * inner + part - cut.offset if cut.every else part * length + inner
            inside = [] if cut.every else [inner >= 0, inner < length]
            guard = z3.And(z3.substitute(each.guard, (variable, place)), *inside)
            variables = (*each.variables[: cut.counter], inner, *each.variables[cut.counter + 1 :])
            found.append(SumOver(variables, guard, substituted(each.body, [(variable, place)])))
        return found

    def _renumberings(self, width: int) -> Iterator[tuple[tuple[int, ...], Index]]:
        """(order of counters, what is added to each)."""
        yield tuple(range(width)), (0,) * width
        for order in permutations(range(width)):
            for steps in product((0, *self.shifts), repeat=width):
                if any(isinstance(step, z3.ExprRef) or step for step in steps) or order != tuple(range(width)):
                    yield order, steps

    def _equal_at(self, left: Sequence[Reduction], right: Sequence[Reduction], facts: Facts) -> bool:
        if isinstance(left[0], SumOver):
            parts = [Ite(each.guard, each.body, Number(0)) for each in left]
            others = [Ite(each.guard, each.body, Number(0)) for each in right]
            return self.equal(Plus(tuple(parts)), Plus(tuple(others)), facts)
        a, b = left[0], right[0]
        if not (self.holds((*facts, a.guard), b.guard) and self.holds((*facts, b.guard), a.guard)):
            return False
        return self.equal(a.body, b.body, (*facts, a.guard))

    # Polynomials ---------------------------------------------------------------------------------------------------

    def _is_zero(self, terms: Iterable[Monomial], facts: Facts) -> bool:
        left: list[Monomial] = []
        for k, atoms in terms:
            for place, (other, known) in enumerate(left):
                if self._same_atoms(atoms, known, facts):
                    left[place] = (k + other, known)
                    break
            else:
                left.append((k, atoms))
            left = [each for each in left if each[0] % _MODULUS]
        if not left:
            return True
        sums = [(k, atoms[0]) for k, atoms in left if len(atoms) == 1 and isinstance(atoms[0], SumOver)]
        if len(sums) < len(left) or any(k not in (1, -1) for k, _ in sums):
            return False
        plus = [each for k, each in sums if k == 1]
        less = [each for k, each in sums if k == -1]
        return bool(plus and less) and self._equal_reductions(plus, less, facts)

    def _same_atoms(self, a: Sequence[Element], b: Sequence[Element], facts: Facts) -> bool:
        if len(a) != len(b):
            return False
        rest = list(b)
        for each in a:
            found = next((n for n, other in enumerate(rest) if self._same_atom(each, other, facts)), None)
            if found is None:
                return False
            del rest[found]
        return True

    def _same_atom(self, a: Element, b: Element, facts: Facts) -> bool:
        if type(a) is not type(b) or isinstance(a, SumOver):
            return False
        return self.equal(a, b, facts)


def excluded(*conditions: Any) -> bool:
    """Whether no whole numbers fulfil all of `conditions`; False where z3 cannot tell in STEPS."""
    solver = limited_solver()
    solver.add(*conditions)
    return bool(solver.check() == z3.unsat)


def limited_solver() -> z3.Solver:
    """A solver that gives up after STEPS and leaves Ctrl-C alone: z3 would put Python's handler back as one behind
    which calls of the system go on, so that nothing that waits could be interrupted any more."""
    solver = z3.SimpleSolver()
    solver.set(rlimit=STEPS, ctrl_c=False)
    return solver


def as_z3(value: Any) -> Any:
    """An int as a term of z3; a term as it is."""
    return z3.IntVal(value) if isinstance(value, int) else value


def conditions(element: Element) -> Iterator[Any]:
    """Yield the conditions of `element` outside of sums and largest values."""
    match element:
        case Ite(condition, yes, no):
            yield condition
            yield from conditions(yes)
            yield from conditions(no)
        case Plus(parts) | Times(parts) | Uninterpreted(_, parts):
            for part in parts:
                yield from conditions(part)


def monomials(element: Element) -> list[Monomial]:
    """`element` as a sum of products of what is no sum and no product; it has no conditions."""
    match element:
        case Number(value):
            return [(value, ())]
        case Plus(parts):
            return [each for part in parts for each in monomials(part)]
        case Times(parts):
            found: list[Monomial] = [(1, ())]
            for part in parts:
                found = [(k * j, (*a, *b)) for k, a in found for j, b in monomials(part)]
            return found
    return [(1, (element,))]


def without_single(each: Reduction) -> Reduction:
    """`each` without counters that its guard says to be one number."""
    left, guard = list(each.variables), each.guard
    fixed = []
    for variable in each.variables:
        if excluded(guard, variable != 0):
            fixed.append((variable, z3.IntVal(0)))
            left.remove(variable)
    if not fixed or not left:
        return each
    return type(each)(tuple(left), z3.substitute(guard, *fixed), substituted(each.body, fixed))


def _renumbered(each: Reduction, at: Index, way: tuple[tuple[int, ...], Index]) -> Reduction:
    order, steps = way
    pairs = [(variable, at[place] + step) for variable, place, step in zip(each.variables, order, steps)]
    return type(each)(at, z3.substitute(each.guard, *pairs), substituted(each.body, pairs))


def substituted(element: Element, pairs: Sequence[tuple[Any, Any]]) -> Element:
    """`element` with terms for variables."""

    def put(term: Any) -> Any:
        return z3.substitute(term, *pairs) if isinstance(term, z3.ExprRef) else term

    match element:
        case Read(name, index):
            return Read(name, tuple(map(put, index)))
        case Plus(parts):
            return Plus(tuple(substituted(part, pairs) for part in parts))
        case Times(parts):
            return Times(tuple(substituted(part, pairs) for part in parts))
        case Uninterpreted(name, parts):
            return Uninterpreted(name, tuple(substituted(part, pairs) for part in parts))
        case Ite(condition, yes, no):
            return Ite(put(condition), substituted(yes, pairs), substituted(no, pairs))
        case SumOver(variables, guard, body):
            return SumOver(variables, put(guard), substituted(body, pairs))
        case MaxOver(variables, guard, body):
            return MaxOver(variables, put(guard), substituted(body, pairs))
    return element


# Terms ---------------------------------------------------------------------------------------------------------------


def tensor(term: Term, values: Values) -> tuple[ElementAt, Shape]:
    """Each element of `term` as an expression, and its shape, for sizes with these values. Unprovable."""
    if isinstance(term, Leaf):
        name = term.name
        return (lambda index: Read(name, index)), value_of(term.shape, values)
    parts = [tensor(arg, values) for arg in term.args]
    elements, shapes = [each for each, _ in parts], [shape for _, shape in parts]
    given = {name: value_of(value, values) for name, value in term.attributes}
    if term.op not in MEANINGS:
        raise Unprovable(f"nothing is known of {term.op}")
    shape = OPERATORS[term.op].shape(shapes, given)
    meaning = MEANINGS[term.op]
    return (lambda index: meaning(elements, shapes, given, index)), shape


def prove(prover: Prover, left: Term, right: Term, values: Values, facts: Facts) -> str:
    """Why `left` may not be `right` for these sizes, of which `facts` hold; "" where it is proved."""
    (a, shape), (b, other) = tensor(left, values), tensor(right, values)
    if len(shape) != len(other):
        return f"one side has {len(shape)} dimensions, the other {len(other)}"
    for axis, (size, its) in enumerate(zip(shape, other)):
        if not prover.holds(facts, as_z3(size) == as_z3(its)):
            return f"sizes differ along axis {axis}"
    at = tuple(fresh("index") for _ in shape)
    inside = [z3.And(index >= 0, index < as_z3(size)) for index, size in zip(at, shape)]
    return "" if prover.equal(a(at), b(at), (*facts, *inside)) else "an element differs"


def demanded(term: Term, values: Values) -> list[Any]:
    """List the demands of the operators of `term` on sizes. Unprovable."""
    if isinstance(term, Leaf):
        return []
    if term.op not in MEANINGS:
        raise Unprovable(f"nothing is known of {term.op}")
    found = [each for arg in term.args for each in demanded(arg, values)]
    if any(each is False for each in found):
        return [False]
    shapes = [tensor(arg, values)[1] for arg in term.args]
    given = {name: value_of(value, values) for name, value in term.attributes}
    return found + demands(term.op, shapes, given)


@dataclass(frozen=True)
class Judgement:
    """proved: in all cases. why: what was not shown, in a sentence. cases: values of the choices. asked: questions that
    z3 was asked."""

    proved: bool
    why: str
    cases: int
    asked: int


def verdict(rule: RewriteRule) -> Judgement:
    """Whether `rule` holds for all sizes, case by case of its choices."""
    return judged(rule, lambda values: _prover_of(rule, values))


def judged(rule: RewriteRule, prover_of: Callable[[Values], Prover]) -> Judgement:
    """Judge `rule` case by case, each by a prover of its own. prover_of: makes it, from values of sizes and choices."""
    cases = asked = 0
    for choice in rule.cases():
        values = {**choice, **{each.name: z3.Int(each.name) for each in rule.sizes}}
        prover = prover_of(values)
        try:
            why = _wrong(prover, rule, values)
        except Unprovable as error:
            why = str(error)
        except IndexError:
            why = "an axis that there is not"
        cases, asked = cases + 1, asked + prover.asked
        if why:
            where = ", ".join(f"{name} = {value}" for name, value in choice.items())
            return Judgement(False, why + (f" where {where}" if where else ""), cases, asked)
    return Judgement(True, "", cases, asked)


def _prover_of(rule: RewriteRule, values: Values) -> Prover:
    """A prover that knows the rule's conditions on functions, and its hints."""
    return Prover(
        shifts=tuple(value_of(shift, values) for shift in rule.shifts),
        cuts=[replace(cut, runs=value_of(cut.runs, values)) for cut in rule.cuts],
        identities=frozenset(f"map {each.function}" for each in rule.where if isinstance(each, IsIdentity)),
        monotone=frozenset(f"map {each.function}" for each in rule.where if isinstance(each, Monotone)),
        absorbing=frozenset(
            (f"map {each.outer}", f"map {each.inner}") for each in rule.where if isinstance(each, Absorbs)
        ),
    )


def _wrong(prover: Prover, rule: RewriteRule, values: Values) -> str:
    """Why the rule may be wrong; "" where it is proved."""
    facts = [values[each.name] >= each.least for each in rule.sizes]
    facts += [value_of(each, values) for each in rule.where if isinstance(each, SizeOf)]
    facts += [each for term in rule.before for each in demanded(term, values)]
    if any(fact is False for fact in facts):
        return "there are no sizes for it"
    known = tuple(z3.simplify(fact) for fact in facts if not isinstance(fact, bool))
    if len(rule.before) != len(rule.after):
        return "its sides have different numbers of terms"
    for term in rule.after:
        for demand in demanded(term, values):
            if not prover.holds(known, demand):
                return f"{term} may be asked for sizes that there are not: {demand}"
    for left, right in zip(rule.before, rule.after):
        if why := prove(prover, left, right, values, known):
            return why
    return ""
