"""Choose the rules to apply, and where: the cost of a graph is what compiler and timing model say of the whole model.

A rewriting step is first *weighed*: its saving is estimated from the operations around it (neighbourhood.py). The whole
graph is priced exactly (price.py) when its turn comes.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from math import inf

from celosia.compiler.superoptimise.graph import BytesGraph, GraphOp
from celosia.compiler.superoptimise.matching import Match, NotTaken, matches, rewrite
from celosia.compiler.superoptimise.price import Price
from celosia.compiler.superoptimise.rule import RewriteRule
from celosia.compiler.superoptimise.state import DerivationStep, DerivedGraph, KnownStep, SearchState

ALPHA = 1.05
"""Graphs that cost at most this multiple of the best one are searched further, as in TASO."""
MAX_TIDYING = 1000
"""Limit of the tidying rules that are applied one after the other."""
STEPS_PER_HELPER = 4
"""Steps under way for each helper process, so that it has work while this process prices a whole graph."""
POLL_SECONDS = 0.02
"""Seconds between two looks at whether helpers have weighed a step."""
MIN_SECONDS = 3.0
"""Seconds for which steps are weighed at least before the next graph is priced."""
PriceOf = Callable[[BytesGraph], Price]
"""Returns the exact price of a graph."""
GainOf = Callable[[BytesGraph, BytesGraph], float | None]
"""Estimates what a step from the first graph to the second saves; None where that cannot be told."""
BeginWeighing = Callable[[BytesGraph, BytesGraph], Callable[[], bool]]
"""Starts to weigh such a step in a helper process; returns a function that tells whether GainOf need not wait."""
ReportState = Callable[[SearchState], None]
"""Is called with the state of the search every now and then."""


@dataclass(eq=False)
class _PendingStep:
    """A step that is being weighed: `rule` applied at `match` gives `graph`, after the rules `tidied`.

    order: the rule's number among those that fit. places: an iterator over the rule's further matches. is_ready: tells
    whether its saving is known, or never will be. is_rule_requeued: whether the rule's next place waits already.
    """

    rule: RewriteRule
    order: int
    places: Iterator[Match]
    match: Match
    graph: BytesGraph
    tidied: tuple[str, ...]
    is_ready: Callable[[], bool]
    is_rule_requeued: bool = False


@dataclass
class RuleSearch:
    """A search for the cheapest graph that `rules` make of one graph.

    price_of, gain_of: exact price of a graph, and estimated saving of a step. budget: seconds. report: called with the
    state. strategy: a key of STRATEGIES. begin_weighing, helpers: how other processes weigh steps, and their number.
    """

    rules: Sequence[RewriteRule]
    price_of: PriceOf
    gain_of: GainOf
    budget: float
    report: ReportState = lambda state: None
    strategy: str = "queue"
    begin_weighing: BeginWeighing = lambda before, after: lambda: True
    helpers: int = 0
    best_graphs: list[DerivedGraph] = field(default_factory=list)
    """The original, and each graph that was cheaper than all before it; the last one is the best."""
    seen: set[str] = field(default_factory=set)
    """Digests of all graphs so far."""
    known_steps: Sequence[KnownStep] = ()
    """Steps of an earlier search, from whose result this one begins."""
    is_known_complete: bool = False
    """The earlier search found all there is, so that nothing remains to be searched after its steps."""
    pricing_seconds: float = 0.0
    """Seconds that the last exact price took."""
    last_gains: dict[str, float] = field(default_factory=dict)
    """Estimated saving of each rule at the place where it was weighed last."""

    def run(self, graph: BytesGraph) -> SearchState:
        """Search from `graph` on until the budget is used up, nothing is left, or the user interrupts."""
        self.started = time.perf_counter()
        original = DerivedGraph(graph, self.price_of(graph))
        self.pricing_seconds = time.perf_counter() - self.started
        first_best = (self.pricing_seconds, original.price.total)
        self.state = SearchState(original.price, original.price, priced=1, bests=[first_best])
        self.best_graphs, self.seen = [original], {graph.digest}
        try:
            start = self._replay_known_steps(self._tidy_original(original))
            self.state.ended = "known" if self.is_known_complete else STRATEGIES[self.strategy](self, start)
        except KeyboardInterrupt:
            self.state.ended = "interrupted"
        self._report_progress()
        return self.state

    def _tidy_original(self, original: DerivedGraph) -> DerivedGraph:
        """Apply the tidying rules to the original graph; return it unchanged where that is not cheaper."""
        if self._report_progress():
            return original
        graph, names = self.tidy(original.graph)
        if not names or graph.digest in self.seen:
            return original
        self.seen.add(graph.digest)
        removed = _removed_operations(original, DerivedGraph(graph, original.price))
        where = tuple(sorted({name for operation in removed for name in operation.outputs}))
        says = next(rule.says for rule in self.rules if rule.name == names[0])
        step = DerivationStep(names[0], says, where, names[1:], original.price)
        tidied = self._price_exactly(DerivedGraph(graph, original.price, (step,)))
        return tidied if tidied.price.total < original.price.total else original

    def _replay_known_steps(self, start: DerivedGraph) -> DerivedGraph:
        """Apply the steps of an earlier search that still fit; return `start` where they save nothing."""
        rules, result = {rule.name: rule for rule in self.rules}, start
        for step in self.known_steps:
            if step.rule in rules:
                result = self._apply_rule(result, rules[step.rule], step.gain, (), step.value_numbers) or result
        if result is start or result.graph.digest in self.seen:
            return start
        self.seen.add(result.graph.digest)
        result = self._price_exactly(result)
        return result if result.price.total < start.price.total else start

    def _apply_rule(
        self, start: DerivedGraph, rule: RewriteRule, gain: float, where: tuple[str, ...], numbers: tuple[str, ...]
    ) -> DerivedGraph | None:
        """Apply `rule` at the tensors `where`, or at those with these value numbers; None where it does not fit."""
        for match in matches(rule, start.graph):
            tensors, value_numbers = _root_tensors(match), _root_value_numbers(start.graph, match)
            if tensors != where and value_numbers != numbers:
                continue
            try:
                graph, tidied = self.tidy(rewrite(start.graph, match))
            except (NotTaken, ValueError):
                return None
            price = start.price.reduced_by(gain)
            step = DerivationStep(rule.name, rule.says, tensors, tidied, price, value_numbers, gain)
            return DerivedGraph(graph, price, (*start.steps, step), start.gain + gain)
        return None

    def _report_progress(self, waiting: int = 0) -> bool:
        """Report the state of the search to the caller. Returns whether the budget is used up."""
        self.state.seconds = time.perf_counter() - self.started
        self.state.best, self.state.seen, self.state.waiting = self.best_graphs[-1].price, len(self.seen), waiting
        self.report(self.state)
        return self.state.seconds >= self.budget

    # Strategies ----------------------------------------------------------------------------------------------------

    def _search_with_queue(self, start: DerivedGraph) -> str:
        """Search as TASO does: always continue from the cheapest graph, as long as it costs at most ALPHA of the best.

        The price of a graph is estimated from the saving of its last step, and computed when its turn comes. Applying a
        rule in all places where it saves something is one more step.
        """
        queue: list[tuple[float, int, DerivedGraph, Iterator[DerivedGraph] | None]] = []
        number = count()

        def put(graph: DerivedGraph, unweighed: Iterator[DerivedGraph] | None = None) -> None:
            """Add a graph to the queue. unweighed: its further steps, where some have been weighed."""
            heapq.heappush(queue, (graph.price.total, next(number), graph, unweighed))

        put(start, self._weighed_steps(start))
        while queue and queue[0][0] <= ALPHA * self.best_graphs[-1].price.total:
            _, _, current, unweighed = heapq.heappop(queue)
            if unweighed is None:
                current = self._price_exactly(current)
                if current.price.total > ALPHA * self.best_graphs[-1].price.total:
                    continue
                unweighed = self._weighed_steps(current)
            if self._report_progress(len(queue)):
                return "budget"
            steps, is_complete = self._weigh_for_a_while(unweighed)
            for step in steps:
                put(step)
            for combined in self._combine_places(steps, current):
                put(combined)
            if not is_complete:
                put(current, unweighed)
        return "nothing left" if not self._report_progress(len(queue)) else "budget"

    def _search_greedily(self, start: DerivedGraph) -> str:
        """Take the step that saves most, as long as one saves something."""
        current, is_complete = start, True
        while not self._report_progress():
            steps, is_complete = self._weigh_for_a_while(self._weighed_steps(current))
            steps.sort(key=lambda step: step.price.total)
            priced = (self._price_exactly(step) for step in steps if step.price.total < current.price.total)
            cheaper = next((step for step in priced if step.price.total < current.price.total), None)
            if cheaper is None:
                return "nothing left" if is_complete else "budget"
            current = cheaper
        return "budget"

    def _weigh_for_a_while(self, unweighed: Iterator[DerivedGraph]) -> tuple[list[DerivedGraph], bool]:
        """Weigh steps for some time. Returns them, and whether these are all.

        The time is half of what pricing the whole takes, but at least MIN_SECONDS, and at most half of the time that is
        left, so that what is found can still be priced. With helpers it is divided by their number: of very many steps,
        those that seem to save most are those whose estimates are most wrong.
        """
        steps: list[DerivedGraph] = []
        seconds = max(MIN_SECONDS, self.pricing_seconds / 2) / max(1, self.helpers)
        until = min((self.state.seconds + self.budget) / 2, self.state.seconds + seconds)
        for step in unweighed:
            steps.append(step)
            self._report_progress()
            if self.state.seconds >= until:
                return steps, False
        return steps, self.state.seconds < self.budget

    def _combine_places(self, steps: Sequence[DerivedGraph], start: DerivedGraph) -> Iterator[DerivedGraph]:
        """For each rule that saves something in several places of `start`, yield the graph with all of them applied."""
        by_rule: dict[str, list[DerivedGraph]] = {}
        for step in steps:
            if step.gain > 0:
                by_rule.setdefault(step.steps[-1].rule, []).append(step)
        for places in by_rule.values():
            removed = [_removed_operations(start, place) for place in places]
            numbers = _choose_disjoint([place.gain for place in places], removed)
            if len(numbers) < 2:
                continue
            combined = self._apply_steps([places[number] for number in numbers], places, start)
            if combined is not None and combined not in places:
                yield combined

    def _apply_steps(
        self, chosen: Sequence[DerivedGraph], steps: Sequence[DerivedGraph], start: DerivedGraph
    ) -> DerivedGraph | None:
        """Apply the last step of each of `chosen` to `start`, where it still fits, so that one price judges all places.

        Returns the one of `steps` that has the resulting graph already; None where another known graph results.
        """
        rules, result = {rule.name: rule for rule in self.rules}, start
        for step in chosen:
            last = step.steps[-1]
            result = self._apply_rule(result, rules[last.rule], step.gain, last.where, ()) or result
        if result is start or result.graph.digest in self.seen:
            return next((step for step in steps if step.graph.digest == result.graph.digest), None)
        self.seen.add(result.graph.digest)
        return result

    def _price_exactly(self, graph: DerivedGraph) -> DerivedGraph:
        """Replace the estimated price of `graph` by the exact one, and note the graph where it is the best so far."""
        began = time.perf_counter()
        price = self.price_of(graph.graph)
        self.pricing_seconds = time.perf_counter() - began
        self.state.priced += 1
        *before, last = graph.steps
        graph = DerivedGraph(graph.graph, price, (*before, replace(last, price=price)))
        if price.total < self.best_graphs[-1].price.total:
            self.best_graphs.append(graph)
            self.state.bests.append((time.perf_counter() - self.started, price.total))
        return graph

    # Weighing steps ------------------------------------------------------------------------------------------------

    def _weighed_steps(self, start: DerivedGraph) -> Iterator[DerivedGraph]:
        """Yield each new graph that one rule makes of `start` at one place, at its estimated price.

        Weighing takes most of the time on large networks. So rules that were not weighed yet come first, then those
        that saved most at their last place.
        """
        operators = start.graph.by_operator.keys()
        fitting = [rule for rule in self.rules if not rule.tidy and rule.operators <= operators]
        waiting = [
            (-self.last_gains.get(rule.name, inf), order, matches(rule, start.graph))
            for order, rule in enumerate(fitting)
        ]
        heapq.heapify(waiting)
        pending: list[_PendingStep] = []
        max_pending = max(1, STEPS_PER_HELPER * self.helpers)
        try:
            while waiting or pending:
                while waiting and len(pending) < max_pending:
                    _, order, places = heapq.heappop(waiting)
                    rule = fitting[order]
                    if (step := self._begin_next_place(start, rule, order, places)) is None:
                        continue
                    pending.append(step)
                    if len(pending) < max_pending and self.last_gains.get(rule.name, 0) > 0:
                        step.is_rule_requeued = True
                        heapq.heappush(waiting, (-self.last_gains[rule.name], order, places))
                if not pending or (ready := self._wait_for_any(pending)) is None:
                    return
                pending.remove(ready)
                weighed = self._finish_weighing(start, ready)
                if not ready.is_rule_requeued:
                    heapq.heappush(waiting, (-self.last_gains[ready.rule.name], ready.order, ready.places))
                if weighed is not None:
                    yield weighed
        finally:
            self.seen.difference_update(step.graph.digest for step in pending)

    def _begin_next_place(
        self, start: DerivedGraph, rule: RewriteRule, order: int, places: Iterator[Match]
    ) -> _PendingStep | None:
        """Begin to weigh `rule` at the next of `places` where it makes a new graph; None where none is left."""
        for match in places:
            if (rewritten := self._rewrite_if_new(start.graph, match)) is not None:
                graph, tidied = rewritten
                return _PendingStep(rule, order, places, match, graph, tidied, self.begin_weighing(start.graph, graph))
        return None

    def _wait_for_any(self, pending: Sequence[_PendingStep]) -> _PendingStep | None:
        """Wait until a step need not be waited for, and return it; None where the budget is used up before."""
        while True:
            for step in pending:
                if step.is_ready():
                    return step
            if self._report_progress():
                return None
            time.sleep(POLL_SECONDS)

    def _finish_weighing(self, start: DerivedGraph, pending: _PendingStep) -> DerivedGraph | None:
        """Return the graph of a step at its estimated price; None where that is too high to search further."""
        rule, gain = pending.rule, self.gain_of(start.graph, pending.graph)
        self.state.weighed += 1
        self.last_gains[rule.name] = gain or 0
        self.state.gains.setdefault(rule.name, []).append(gain or 0)
        cost = start.price.total - (gain or 0)
        if cost > ALPHA * self.best_graphs[-1].price.total:
            return None
        price = start.price.reduced_by(start.price.total - cost)
        tensors, value_numbers = _root_tensors(pending.match), _root_value_numbers(start.graph, pending.match)
        step = DerivationStep(rule.name, rule.says, tensors, pending.tidied, price, value_numbers, gain or 0)
        return DerivedGraph(pending.graph, price, (*start.steps, step), gain or 0)

    # Rewriting -----------------------------------------------------------------------------------------------------

    def _rewrite_if_new(self, graph: BytesGraph, match: Match) -> tuple[BytesGraph, tuple[str, ...]] | None:
        """Apply a rule, then tidying rules. Returns the graph and the names of the latter; None for a known graph."""
        try:
            result, names = self.tidy(rewrite(graph, match))
        except (NotTaken, ValueError):
            return None
        if result.digest in self.seen:
            return None
        self.seen.add(result.digest)
        return result, names

    def tidy(self, graph: BytesGraph) -> tuple[BytesGraph, tuple[str, ...]]:
        """Apply tidying rules until none fits. Returns the graph and the names of the rules."""
        names: list[str] = []
        while len(names) < MAX_TIDYING:
            tidied = self._tidy_once(graph)
            if tidied is None:
                break
            graph, name = tidied
            names.append(name)
        return graph, tuple(names)

    def _tidy_once(self, graph: BytesGraph) -> tuple[BytesGraph, str] | None:
        """Apply the first tidying rule that fits. Returns the graph and the name of the rule; None where none fits."""
        operators = graph.by_operator.keys()
        for rule in self.rules:
            if not rule.tidy or not rule.operators <= operators:
                continue
            for match in matches(rule, graph):
                try:
                    return rewrite(graph, match), rule.name
                except (NotTaken, ValueError):
                    continue
        return None


STRATEGIES: dict[str, Callable[[RuleSearch, DerivedGraph], str]] = {
    "queue": RuleSearch._search_with_queue, "greedy": RuleSearch._search_greedily,
}  # fmt: skip
"""Strategies of search. Each notes graphs that are cheaper than the best, and returns why it ended."""


def _choose_disjoint(gains: Sequence[float], removed: Sequence[frozenset[GraphOp]]) -> list[int]:
    """Choose steps that remove different operations, by falling gain. Returns their numbers."""
    used: set[GraphOp] = set()
    numbers = []
    for step in sorted(range(len(gains)), key=lambda step: -gains[step]):
        if not used & removed[step]:
            used |= removed[step]
            numbers.append(step)
    return numbers


def _removed_operations(before: DerivedGraph, after: DerivedGraph) -> frozenset[GraphOp]:
    """Return the operations of `before` that `after` does not have."""
    return frozenset(before.graph.operations) - frozenset(after.graph.operations)


def _root_tensors(match: Match) -> tuple[str, ...]:
    """Return the tensors that the rule replaces."""
    return tuple(root.outputs[0] for root in match.roots)


def _root_value_numbers(graph: BytesGraph, match: Match) -> tuple[str, ...]:
    """Return the value numbers of the tensors that the rule replaces."""
    return tuple(graph.value_numbers[name] for name in _root_tensors(match))
