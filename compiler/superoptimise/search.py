"""Choose the rules to take, and where: a search whose cost is what the compiler and the timing model say of the
whole."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from math import inf

from celosia.compiler.superoptimise.graph import BytesGraph, GraphOp
from celosia.compiler.superoptimise.matching import Match, NotTaken, matches, rewritten
from celosia.compiler.superoptimise.price import Price
from celosia.compiler.superoptimise.rule import RewriteRule
from celosia.compiler.superoptimise.state import Derived, Found, KnownStep, SearchState

ALPHA = 1.05
"""Graphs that cost at most this much of the best are gone on with, as in TASO."""
MOST_TIDYING = 1000
AHEAD = 4
"""Steps that are under way for each helper, so that it weighs some while this process prices a whole."""
LOOK = 0.02
"""Seconds between two looks at what others weigh."""
MIN_SECONDS = 3.0
"""Seconds at least for which steps are weighed before the next graph is priced."""
PriceOf = Callable[[BytesGraph], Price]
GainOf = Callable[[BytesGraph, BytesGraph], float | None]
"""Estimate what a step from one graph to the other saves; None where that cannot be told."""
Begin = Callable[[BytesGraph, BytesGraph], Callable[[], bool]]
"""Begins to find out what such a step saves; tells whether it is known."""


@dataclass(eq=False)
class _Candidate:
    """A step that is weighed. place, places: of its rule among those that fit, and where that is tried next. ready:
    whether it need not be waited for. goes_on: whether the rule is tried in the next place already."""

    rule: RewriteRule
    place: int
    places: Iterator[Match]
    match: Match
    graph: BytesGraph
    tidied: tuple[str, ...]
    ready: Callable[[], bool]
    goes_on: bool = False


Told = Callable[[SearchState], None]


@dataclass
class Searching:
    """A search of one model. way: of WAYS. found: all graphs that were the best when they were found, the last one the
    best."""

    rules: Sequence[RewriteRule]
    price_of: PriceOf
    gain_of: GainOf
    budget: float
    told: Told = lambda state: None
    way: str = "queue"
    begin: Begin = lambda before, after: lambda: True
    helpers: int = 0
    """Processes that weigh steps, each several after another."""
    found: list[Found] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    known: Sequence[KnownStep] = ()
    """Steps of an earlier search, from which this one begins."""
    known_whole: bool = False
    """Whether there is nothing behind these to search for."""
    pricing: float = 0.0
    """Seconds that the last price of a whole model took."""
    saved: dict[str, float] = field(default_factory=dict)
    """Estimated saving of each rule in the place where it was tried last."""

    def run(self, graph: BytesGraph) -> SearchState:
        """Search from `graph` on until the budget ends, nothing is left or the user interrupts it."""
        self.started = time.perf_counter()
        first = Found(graph, self.price_of(graph))
        self.pricing = time.perf_counter() - self.started
        self.state = SearchState(first.price, first.price, priced=1, bests=[(self.pricing, first.price.total)])
        self.found, self.seen = [first], {graph.digest}
        try:
            start = self._known(self._tidied_first(first))
            self.state.ended = "known" if self.known_whole else WAYS[self.way](self, start)
        except KeyboardInterrupt:
            self.state.ended = "interrupted"
        self._report_progress()
        return self.state

    def _tidied_first(self, first: Found) -> Found:
        """`first` after the rules that tidy up, where that is cheaper: they need no other rule to come before them."""
        if self._report_progress():
            return first
        graph, names = self.tidied(first.graph)
        if not names or graph.digest in self.seen:
            return first
        self.seen.add(graph.digest)
        where = sorted({name for each in _changed(first, Found(graph, first.price)) for name in each.outputs})
        says = next(rule.says for rule in self.rules if rule.name == names[0])
        made = self._priced(Found(graph, first.price, (Derived(names[0], says, tuple(where), names[1:], first.price),)))
        return made if made.price.total < first.price.total else first

    def _known(self, first: Found) -> Found:
        """`first` after the steps of an earlier search that fit; as it is where they save nothing."""
        rules, made = {rule.name: rule for rule in self.rules}, first
        for step in self.known:
            if step.rule in rules:
                made = self._after(made, rules[step.rule], step.gain, (), step.marks) or made
        if made is first or made.graph.digest in self.seen:
            return first
        self.seen.add(made.graph.digest)
        made = self._priced(made)
        return made if made.price.total < first.price.total else first

    def _after(
        self, found: Found, rule: RewriteRule, gain: float, where: tuple[str, ...], marks: tuple[str, ...]
    ) -> Found | None:
        """`found` after one more step, at these places or where marks are these; None where it does not fit."""
        for match in matches(rule, found.graph):
            places, marked = _places(match), _marks(found.graph, match)
            if places != where and marked != marks:
                continue
            try:
                graph, tidied = self.tidied(rewritten(found.graph, match))
            except (NotTaken, ValueError):
                return None
            price = found.price.less(gain)
            derived = Derived(rule.name, rule.says, places, tidied, price, marked, gain)
            return Found(graph, price, (*found.steps, derived), found.gain + gain)
        return None

    def _report_progress(self, waiting: int = 0) -> bool:
        """Report the state of the search to the caller. Returns whether its time is over."""
        self.state.seconds = time.perf_counter() - self.started
        self.state.best, self.state.seen, self.state.waiting = self.found[-1].price, len(self.seen), waiting
        self.told(self.state)
        return self.state.seconds >= self.budget

    def _queue(self, first: Found) -> str:
        """TASO's: the cheapest first, and those a little dearer than the best. What a graph costs is estimated by what
        its last step saves in its neighbourhood, and known when its turn comes. What a rule makes of all places where
        it saves something is a step, too."""
        queue: list[tuple[float, int, Found, Iterator[Found] | None]] = []
        number = count()

        def put(found: Found, rest: Iterator[Found] | None = None) -> None:
            heapq.heappush(queue, (found.price.total, next(number), found, rest))

        put(first, self._next(first))
        while queue and queue[0][0] <= ALPHA * self.found[-1].price.total:
            _, _, found, rest = heapq.heappop(queue)
            if rest is None:
                found = self._priced(found)
                if found.price.total > ALPHA * self.found[-1].price.total:
                    continue
                rest = self._next(found)
            if self._report_progress(len(queue)):
                return "budget"
            steps, whole = self._looked_at(rest)
            for each in steps:
                put(each)
            for each in self._everywhere(steps, found):
                put(each)
            if not whole:
                put(found, rest)
        return "nothing left" if not self._report_progress(len(queue)) else "budget"

    def _everywhere(self, steps: Sequence[Found], found: Found) -> Iterator[Found]:
        """For each rule that saves something in several places of a graph, what it makes of all of them."""
        of: dict[str, list[Found]] = {}
        for step in steps:
            if step.gain > 0:
                of.setdefault(step.steps[-1].rule, []).append(step)
        for places in of.values():
            numbers = _disjoint([each.gain for each in places], [_changed(found, each) for each in places])
            made = self._all_of(numbers, places, found) if len(numbers) > 1 else None
            if made is not None and made not in places:
                yield made

    def _looked_at(self, rest: Iterator[Found]) -> tuple[list[Found], bool]:
        """Steps, and whether that is all of them. To weigh them takes half as long as to price the whole, some seconds
        at least, and half of the time that is left at most, so that what was found is taken. Helpers weigh as many in
        less time: the steps that seem to save most of very many are those whose estimates err most."""
        steps: list[Found] = []
        taking = max(MIN_SECONDS, self.pricing / 2) / max(1, self.helpers)
        until = min((self.state.seconds + self.budget) / 2, self.state.seconds + taking)
        for each in rest:
            steps.append(each)
            self._report_progress()
            if self.state.seconds >= until:
                return steps, False
        return steps, self.state.seconds < self.budget

    def _greedy(self, first: Found) -> str:
        """The step that saves most, as long as there is one."""
        found, whole = first, True
        while not self._report_progress():
            steps, whole = self._looked_at(self._next(found))
            steps.sort(key=lambda each: each.price.total)
            better = (self._priced(each) for each in steps if each.price.total < found.price.total)
            best = next((each for each in better if each.price.total < found.price.total), None)
            if best is None:
                return "nothing left" if whole else "budget"
            found = best
        return "budget"

    def _all_of(self, numbers: Sequence[int], steps: Sequence[Found], found: Found) -> Found | None:
        """`found` after the last step of each of those of `steps`, where it still fits; None where there are none."""
        rules, made = {rule.name: rule for rule in self.rules}, found
        for step in (steps[number] for number in numbers):
            last = step.steps[-1]
            made = self._after(made, rules[last.rule], step.gain, last.where, ()) or made
        if made is found or made.graph.digest in self.seen:
            return next((step for step in steps if step.graph.digest == made.graph.digest), None)
        self.seen.add(made.graph.digest)
        return made

    def _priced(self, found: Found) -> Found:
        """`found` with what it costs in truth; noted where it is the best."""
        began = time.perf_counter()
        price = self.price_of(found.graph)
        self.pricing = time.perf_counter() - began
        self.state.priced += 1
        *before, last = found.steps
        found = Found(found.graph, price, (*before, replace(last, price=price)))
        if price.total < self.found[-1].price.total:
            self.found.append(found)
            self.state.bests.append((time.perf_counter() - self.started, price.total))
        return found

    def _next(self, found: Found) -> Iterator[Found]:
        """Yield what each rule makes of a graph at each place, tidied up, where it is new; its price is an estimate.

        The rules whose last places saved most go first, behind those that have not been tried: what takes long on a
        large network is to weigh steps."""
        operators = found.graph.by_operator.keys()
        fitting = [rule for rule in self.rules if not rule.tidy and rule.operators <= operators]
        waiting = [
            (-self.saved.get(rule.name, inf), place, matches(rule, found.graph)) for place, rule in enumerate(fitting)
        ]
        heapq.heapify(waiting)
        under_way: list[_Candidate] = []
        at_once = max(1, AHEAD * self.helpers)
        try:
            while waiting or under_way:
                while waiting and len(under_way) < at_once:
                    _, place, places = heapq.heappop(waiting)
                    rule = fitting[place]
                    if (candidate := self._begun(found, rule, place, places)) is None:
                        continue
                    under_way.append(candidate)
                    if len(under_way) < at_once and self.saved.get(rule.name, 0) > 0:
                        candidate.goes_on = True
                        heapq.heappush(waiting, (-self.saved[rule.name], place, places))
                if not under_way or (first := self._ready(under_way)) is None:
                    return
                under_way.remove(first)
                step = self._weighed(found, first)
                if not first.goes_on:
                    heapq.heappush(waiting, (-self.saved[first.rule.name], first.place, first.places))
                if step is not None:
                    yield step
        finally:
            self.seen.difference_update(each.graph.digest for each in under_way)

    def _begun(self, found: Found, rule: RewriteRule, place: int, places: Iterator[Match]) -> _Candidate | None:
        """The next of `places` where the rule makes something new."""
        for match in places:
            made = self._made(found.graph, match)
            if made is not None:
                return _Candidate(rule, place, places, match, *made, self.begin(found.graph, made[0]))
        return None

    def _ready(self, under_way: Sequence[_Candidate]) -> _Candidate | None:
        """The first that need not be waited for, once there is one; None where the time is over before."""
        while True:
            for each in under_way:
                if each.ready():
                    return each
            if self._report_progress():
                return None
            time.sleep(LOOK)

    def _weighed(self, found: Found, made: _Candidate) -> Found | None:
        """The step, at its estimated price; None where that is too dear."""
        gain = self.gain_of(found.graph, made.graph)
        self.state.weighed += 1
        self.saved[made.rule.name] = gain or 0
        self.state.gains.setdefault(made.rule.name, []).append(gain or 0)
        cost = found.price.total - (gain or 0)
        if cost > ALPHA * self.found[-1].price.total:
            return None
        price, marks = found.price.less(found.price.total - cost), _marks(found.graph, made.match)
        derived = Derived(
            made.rule.name, made.rule.says, _places(made.match), made.tidied, price, marks, gain or 0
        )  # fmt: skip
        return Found(made.graph, price, (*found.steps, derived), gain or 0)

    def _made(self, graph: BytesGraph, match: Match) -> tuple[BytesGraph, tuple[str, ...]] | None:
        """Rewrite a graph and tidy it up, with the names of the rules that did that; None where it is not new."""
        try:
            made, names = self.tidied(rewritten(graph, match))
        except (NotTaken, ValueError):
            return None
        if made.digest in self.seen:
            return None
        self.seen.add(made.digest)
        return made, names

    def tidied(self, graph: BytesGraph) -> tuple[BytesGraph, tuple[str, ...]]:
        """`graph` after all rules that tidy up, and their names."""
        names: list[str] = []
        while len(names) < MOST_TIDYING:
            made = self._tidier(graph)
            if made is None:
                break
            graph = made[0]
            names.append(made[1])
        return graph, tuple(names)

    def _tidier(self, graph: BytesGraph) -> tuple[BytesGraph, str] | None:
        operators = graph.by_operator.keys()
        for rule in self.rules:
            if not rule.tidy or not rule.operators <= operators:
                continue
            for match in matches(rule, graph):
                try:
                    return rewritten(graph, match), rule.name
                except (NotTaken, ValueError):
                    continue
        return None


WAYS: dict[str, Callable[[Searching, Found], str]] = {"queue": Searching._queue, "greedy": Searching._greedy}
"""Strategies of search from a graph on: each returns how it ended, and notes graphs better than the best."""


def _disjoint(gains: Sequence[float], changed: Sequence[frozenset[GraphOp]]) -> list[int]:
    """Numbers of steps that change different operations: the largest gain first, then each that fits behind it."""
    taken: set[GraphOp] = set()
    numbers = []
    for step in sorted(range(len(gains)), key=lambda step: -gains[step]):
        if not taken & changed[step]:
            taken |= changed[step]
            numbers.append(step)
    return numbers


def _changed(before: Found, after: Found) -> frozenset[GraphOp]:
    """The operations that are no longer there."""
    return frozenset(before.graph.operations) - frozenset(after.graph.operations)


def _places(match: Match) -> tuple[str, ...]:
    return tuple(root.outputs[0] for root in match.roots)


def _marks(graph: BytesGraph, match: Match) -> tuple[str, ...]:
    return tuple(graph.numbers[name] for name in _places(match))
