"""Equations to rules: those that follow from others go, and what is left is proved, each side into the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

from celosia.compiler.superoptimise.generation.changing import canonical
from celosia.compiler.superoptimise.generation.enumeration import AlgebraVocabulary, Candidate, Enumeration
from celosia.compiler.superoptimise.generation.instances import Equalities, is_constant
from celosia.compiler.superoptimise.generation.widening import proved_once, widened_rule
from celosia.compiler.superoptimise.prover import verdict
from celosia.compiler.superoptimise.rule import Absorbs, Condition, Monotone, RewriteRule
from celosia.compiler.superoptimise.sizes import Dim, OpenSize, SizeOf
from celosia.compiler.superoptimise.terms import ByteFunction, Composed, Leaf, Term, walk

Shapes = dict[Term, tuple[Dim, ...]]
STEPS, MOST_NEAR, MOST_FORMS = 2, 60, 6
"""Of rules, one after the other, by which an equation may follow; how many terms these may reach; how many terms of a
class are looked at below."""


class OutOfTime(Exception):
    """Of a generation that is not done in the time it was given."""


@dataclass
class EquationCount:
    """Of a vocabulary: terms that were looked at, equations by fingerprint, those that do not follow from others, those
    of them that are proved in no direction."""

    terms: int = 0
    equations: int = 0
    left: int = 0
    unproved: int = 0


@dataclass
class Generation:
    """The rules of one vocabulary. ends: the time of time.time() at which it stops with OutOfTime. say: is told how
    many equations that do not follow from others have been tried."""

    vocabulary: AlgebraVocabulary
    ends: float = float("inf")
    say: Callable[[int], None] = lambda left: None
    rules: list[RewriteRule] = field(default_factory=list)
    counted: EquationCount = field(default_factory=EquationCount)

    def run(self) -> list[RewriteRule]:
        """All of them, proved. OutOfTime."""
        self.all = Enumeration(self.vocabulary, self._in_time)
        self.shapes: Shapes = {}
        self.equalities = Equalities()
        self.parts: dict[Term, list[tuple[Candidate, Candidate]]] = {}
        for later, earlier in self.all.equations():
            self.counted.equations += 1
            for each in (later, earlier, *later.args):
                self.shapes.setdefault(each.term, each.shape)
            if isinstance(later.term, Composed) and later.term.op == "slice":
                self.parts.setdefault(later.term.args[0], []).append((later, earlier))
            if not self._follows(later.term, earlier):
                self.counted.left += 1
                self._add(later.term, earlier.term)
                self.say(self.counted.left)
        self._pairs()
        self.counted.terms = self.all.looked_at
        return self.rules

    def _in_time(self) -> None:
        if time.time() > self.ends:
            raise OutOfTime(f"{self.vocabulary.name} is not done in the time that was given")

    def _follows(self, term: Term, earlier: Candidate) -> bool:
        """Whether rules make of `term` what is known to be `earlier`, or of both the same."""
        found = set()
        for each in self._near(term):
            if each != term and self.all.representative(each) is earlier:
                return True
            found.add(each)
        return any(each in found for each in self._near(earlier.term))

    def _near(self, term: Term) -> Iterator[Term]:
        """`term`, and what rules make of it in STEPS steps, the terms below being the first of their classes."""
        yield term
        found, edge = {term}, [term]
        for _ in range(STEPS):
            following = []
            for made in (made for each in edge for made in self._next(each)):
                if made not in found:
                    found.add(made)
                    following.append(made)
                    yield made
            edge = following
            if len(found) > MOST_NEAR:
                break

    def _next(self, term: Term) -> Iterator[Term]:
        """What each rule makes of the top of `term`, whichever of their classes the terms below are."""
        if isinstance(term, Leaf):
            return
        for form in self._forms(term):
            for made in self.equalities.rewritings(form, self.shapes):
                yield self.all.settled(made)

    def _forms(self, term: Composed) -> Iterator[Composed]:
        yield term
        for place, arg in enumerate(term.args):
            for other in self.all.members.get(arg, [])[1:MOST_FORMS]:
                yield replace(term, args=(*term.args[:place], other, *term.args[place + 1 :]))

    def _add(self, later: Term, earlier: Term) -> None:
        """Both directions, as far as they are proved and a model can have what stands before."""
        rule = RewriteRule("", "", (later,), (earlier,), _conditions((later, earlier)))
        within = replace(rule, where=(*rule.where, *_within(rule)))
        if not proved_once(within):
            self.counted.unproved += 1
            return
        rule = canonical(_without_conditions(widened_rule(_without_conditions(within))))
        self.equalities.add(rule.before[0], rule.after[0])
        back = replace(rule, before=rule.after, after=rule.before)
        for each in (rule, back):
            if usable(each) and not _grows(each):
                self._keep(each)

    def _keep(self, rule: RewriteRule) -> None:
        self._in_time()
        rule = canonical(rule)
        if any(rule.text == each.text for each in self.rules):
            return
        if verdict(rule).proved:
            self.rules.append(rule)
        else:
            self.counted.unproved += 1

    def _pairs(self) -> None:
        """Two terms of one input that are parts of one term: what merges them."""
        for whole, equations in self.parts.items():
            for (cut, one), (other_cut, other) in combinations(equations, 2):
                terms = one.term, other.term
                if cut.term == other_cut.term or terms[0] == terms[1] or not _shares(*terms):
                    continue
                if _operators(whole) + 2 > sum(map(_operators, terms)) + 1 or not _covers(terms, whole):
                    continue
                if any(each in set(walk(whole)) for each in terms) or not _alike(*terms):
                    continue
                rule = RewriteRule("", "", terms, (cut.term, other_cut.term))
                if usable(rule):
                    self._keep(canonical(rule))


def _within(rule: RewriteRule) -> Iterator[SizeOf]:
    """That places where Slices cut are in the tensors that are given."""
    cuts = {value for term in (*rule.before, *rule.after) for each in walk(term) if isinstance(each, Composed)
            and each.op == "slice" for value in (each["start"], each["stop"])}  # fmt: skip
    given = {size for leaf in rule.leaves if not leaf.constant for size in leaf.shape}
    places = sorted((each for each in cuts - given if isinstance(each, OpenSize)), key=str)
    for place in places:
        yield from (place <= size for size in sorted(given, key=str) if isinstance(size, OpenSize))


def _without_conditions(rule: RewriteRule) -> RewriteRule:
    """Without those that its proof does not need."""
    for condition in rule.where:
        weaker = replace(rule, where=tuple(each for each in rule.where if each != condition))
        rule = weaker if proved_once(weaker) else rule
    return rule


def _grows(rule: RewriteRule) -> bool:
    """Whether it only adds what another rule takes away: more operators, of other tensors or of another kind."""
    before, after = (sum(map(_operators, side)) for side in (rule.before, rule.after))
    if after <= before:
        return False
    sides = [[each for term in side for each in walk(term)] for side in (rule.before, rule.after)]
    kinds = [
        {(each.op, str(dict(each.attributes).get("f"))) for each in side if isinstance(each, Composed)}
        for side in sides
    ]
    leaves = [{each.name for each in side if isinstance(each, Leaf)} for side in sides]
    return len(kinds[0]) < 2 or kinds[0] != kinds[1] or leaves[0] != leaves[1]


def _names(term: Term, running: bool = False) -> set[str]:
    return {leaf.name for leaf in walk(term) if isinstance(leaf, Leaf) and not (running and leaf.constant)}


def _shares(a: Term, b: Term) -> bool:
    return bool(_names(a, True) & _names(b, True))


def _covers(terms: Sequence[Term], whole: Term) -> bool:
    return _names(whole) <= _names(terms[0]) | _names(terms[1])


def _alike(a: Term, b: Term) -> bool:
    """Whether both are one operator of the same tensors that run: others follow from such pairs."""
    return isinstance(a, Composed) and isinstance(b, Composed) and _operators(a) == _operators(b) == 1


def _operators(term: Term) -> int:
    """How many run; a product counts with what requantises it."""
    inner = [each for each in walk(term) if isinstance(each, Composed) and not is_constant(each)]
    return sum(each.op not in ("convolve", "multiply") for each in inner)


def _conditions(terms: Sequence[Term]) -> tuple[Condition, ...]:
    """What the names of functions say of them."""
    found = dict.fromkeys(
        value for term in terms for each in walk(term) if isinstance(each, Composed)
        for _, value in each.attributes if isinstance(value, ByteFunction)
    )  # fmt: skip
    conditions: list[Condition] = []
    for each in found:
        if each.name[0] in "mk":
            conditions.append(Monotone(each))
        if each.name[0] == "k":
            conditions.append(Absorbs(each, each))
    return tuple(conditions)


def usable(rule: RewriteRule) -> bool:
    """Whether a graph can have what stands before, and that says all that stands after."""
    if not all(isinstance(term, Composed) for term in rule.before):
        return False
    before = [each for term in rule.before for each in walk(term)]
    after = [each for term in rule.after for each in walk(term)]
    for each in before:
        if isinstance(each, Composed) and is_constant(each) and each.op != "spread":
            return False  # a model has what comes of it
    leaves = [{each.name for each in side if isinstance(each, Leaf)} for side in (before, after)]
    sides = [RewriteRule("", "", tuple(each), tuple(each)) for each in (rule.before, rule.after)]
    sizes = [{each.name for each in side.sizes} | {each.name for each in side.choices} for side in sides]
    asked = {each.name for each in replace(rule, before=(), after=()).sizes}
    return leaves[1] <= leaves[0] and sizes[1] | asked <= sizes[0] and _bindable(rule)


def _bindable(rule: RewriteRule) -> bool:
    """Whether each size of `before` stands somewhere alone, or beside others that do."""
    values: list[object] = []
    for term in (each for side in rule.before for each in walk(side)):
        values += term.shape if isinstance(term, Leaf) else [value for _, value in term.attributes]
    known: set[str] = set()
    open_in = [{each.name for each in RewriteRule("", "", (Leaf("", (value,)),), ()).sizes} for value in _flat(values)]  # type: ignore[arg-type]
    for _ in open_in:
        known |= {name for names in open_in if len(left := names - known) == 1 for name in left}
    return all(names <= known for names in open_in)


def _flat(values: Sequence[object]) -> Iterator[object]:
    for value in values:
        if isinstance(value, tuple):
            yield from _flat(value)
        else:
            yield value


def running(term: Composed) -> list[Term]:
    """The operands that are not constants of a model."""
    return [arg for arg in term.args if not is_constant(arg)]
