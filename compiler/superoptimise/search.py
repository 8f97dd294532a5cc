"""Choose the rules to apply, and where: the cost of a graph is what compiler and timing model say of the whole model.

A rewriting step is first *weighed*: its saving is estimated from the operations around it. The whole graph is priced
exactly when its turn comes (price.py).

The parts: steps, and the progress of a search; the search; results of searches in the file of `celosia tune`, whose
steps a later search of the same graph applies again, and prices as if they were new; and the time that a search may
take.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from math import inf
from typing import Any

from celosia.compiler.superoptimise.graph import BytesGraph, GraphOp
from celosia.compiler.superoptimise.matching import Match, NotTaken, matches, rewrite
from celosia.compiler.superoptimise.price import Price
from celosia.compiler.superoptimise.rule import RewriteRule
from celosia.compiler.tune.layer_trial import Status, TrialResult
from celosia.compiler.tune.records import Key, Records
from celosia.plain import Sentence


@dataclass(frozen=True)
class DerivationStep:
    """One step of a derivation: a rule applied in one place.

    rule, says: its name and law. where: tensors that it replaced. tidied: rules that simplified the graph afterwards.
    price: of the model after the step. value_numbers: of the tensors in `where` (BytesGraph.value_numbers), by which a
    later search finds the place again. gain: estimated saving, in cycles or nanoseconds.
    """

    rule: str
    says: str
    where: tuple[str, ...]
    tidied: tuple[str, ...]
    price: Price
    value_numbers: tuple[str, ...] = ()
    gain: float = 0.0


@dataclass(frozen=True)
class KnownStep:
    """A step that an earlier search recorded: the rule, with value_numbers and gain as in a DerivationStep."""

    rule: str
    value_numbers: tuple[str, ...]
    gain: float


@dataclass(frozen=True)
class DerivedGraph:
    """A graph, its price (estimated or exact), and the steps that lead to it. gain: estimated saving of the last
    step.
    """

    graph: BytesGraph
    price: Price
    steps: tuple[DerivationStep, ...] = ()
    gain: float = 0.0


@dataclass
class SearchState:
    """Progress of a search, for reports.

    original, best: prices. seconds: since the start. priced: graphs whose exact price is known. seen: different graphs.
    waiting: graphs in the queue. ended: "" while it runs, then "nothing left", "budget", "known" or "interrupted".
    bests: (seconds, price) of each new best, the original first.
    """

    original: Price
    best: Price
    seconds: float = 0.0
    priced: int = 0
    weighed: int = 0
    """Steps whose saving is estimated."""
    seen: int = 0
    waiting: int = 0
    ended: str = ""
    bests: list[tuple[float, float]] = field(default_factory=list)
    gains: dict[str, list[float]] = field(default_factory=dict)
    """Estimated savings of each rule, one for each place where it was weighed."""
    tuned: list[float] = field(default_factory=list)
    """Cycles with tuned schedules of the original and of the last bests, where Pricing tunes."""
    excluded_devices: dict[str, str] = field(default_factory=dict)
    """Why devices weigh no more steps, by device name."""


# The search ----------------------------------------------------------------------------------------------------------

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
            tensors, value_numbers = _roots(start.graph, match)
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
        tensors, value_numbers = _roots(start.graph, pending.match)
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


def _roots(graph: BytesGraph, match: Match) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the tensors that the rule replaces, and their value numbers."""
    tensors = tuple(root.outputs[0] for root in match.roots)
    return tensors, tuple(graph.value_numbers[name] for name in tensors)


# Records of searches -------------------------------------------------------------------------------------------------

MEASURER = "superoptimiser"
"""Name by which these records are told from those of schedules."""
COMPLETE_ENDINGS = ("nothing left",)
"""Endings of a search that would find nothing more in a longer time."""


@dataclass(frozen=True)
class SearchRecords:
    """The recorded searches of one graph.

    config: digest of a Config, or name of a processor, on which prices depend. strategy: a key of search.STRATEGIES.
    rules: digest of the set of rules.
    """

    records: Records
    config: str
    graph: BytesGraph
    strategy: str
    rules: str

    @staticmethod
    def of(
        records: Records, config: str, graph: BytesGraph, strategy: str, rules: Iterable[RewriteRule]
    ) -> SearchRecords:
        """Return the recorded searches of `graph` with these settings. rules: all that the search uses."""
        digest = hashlib.sha256(" ".join(sorted(rule.digest for rule in rules)).encode()).hexdigest()[:16]
        return SearchRecords(records, config, graph, strategy, digest)

    def steps(self) -> tuple[KnownStep, ...]:
        """Return the steps to the cheapest known graph, whatever rules found it. Where nothing is known of this Config,
        those for the Config recorded last.
        """
        others = (config for workload, config in reversed(self.records.by_workload) if workload == self._workload)
        for config in (self.config, *others):
            rows = [(result.cycles, row) for row, result in self._rows(config)]
            if rows:
                _, best = min(rows, key=lambda pair: pair[0])
                return tuple(KnownStep(rule, tuple(numbers), float(gain)) for rule, numbers, gain in best["steps"])
        return ()

    def has_ended(self, budget: float) -> bool:
        """Return whether a search with the same settings found all there is, or had at least this budget."""
        same_searches = [
            row for row, _ in self._rows(self.config) if (row["way"], row["rules"]) == (self.strategy, self.rules)
        ]
        return any(row["ended"] in COMPLETE_ENDINGS or row["budget"] >= budget for row in same_searches)

    def add(self, best: DerivedGraph, state: SearchState, budget: float) -> None:
        """Record the result of a search, unless it was interrupted. Raises OutputError."""
        if best.price.total < 1 or state.ended == "interrupted":
            return
        steps = [[step.rule, list(step.value_numbers), step.gain] for step in best.steps if step.value_numbers]
        row = {"steps": steps, "way": self.strategy, "rules": self.rules, "ended": state.ended, "budget": budget}
        key = Key(self._workload, self.config, json.dumps(row, sort_keys=True, separators=(",", ":")), MEASURER)
        self.records.add(key, TrialResult(Status.OK, round(best.price.total), seconds=state.seconds))

    @property
    def _workload(self) -> str:
        """The key of the graph among the workloads of the records."""
        return f"graph #{self.graph.digest}"

    def _rows(self, config: str) -> Sequence[tuple[dict[str, Any], TrialResult]]:
        """Return the recorded searches for `config` that can be read, each with its result."""
        known = self.records.by_workload.get((self._workload, config), {})
        rows = [(json.loads(key.schedule), result) for key, result in known.items() if key.measurer == MEASURER]
        return [(row, result) for row, result in rows if _is_valid_row(row)]


def _is_valid_row(row: Any) -> bool:
    """Return whether a record, which anybody may have written, has all fields that are read here."""
    try:
        numbers = [row["budget"], *(gain for _, _, gain in row["steps"])]
        texts = [row["way"], row["rules"], row["ended"], *(rule for rule, _, _ in row["steps"])]
        texts += [number for _, numbers, _ in row["steps"] for number in numbers]
    except (KeyError, TypeError, ValueError):
        return False
    return all(isinstance(value, int | float) for value in numbers) and all(isinstance(text, str) for text in texts)


# The time that a search may take -------------------------------------------------------------------------------------

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
"""Seconds of each unit of time."""


class BudgetError(Sentence, ValueError):
    """A budget that is no time, or not enough. The message is one sentence."""


def parse_seconds(text: str | float) -> float:
    """Parse "90", "90s", "30m" or "1.5h", or a number of seconds. BudgetError.

    >>> parse_seconds("30m"), parse_seconds("90"), parse_seconds("1.5h"), parse_seconds(2)
    (1800.0, 90.0, 5400.0, 2.0)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", str(text).strip())
    if match is None:
        raise BudgetError(f"{str(text)!r} is no time; write it as 90s, 30m or 2h")
    return float(match[1]) * UNITS[match[2] or "s"]
