"""Results of searches in the file of `celosia tune`: a record whose workload is a graph and whose schedule are steps.

A later search of the same graph applies the steps again, rule by rule, and prices and compares them as if they were
new.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from celosia.compiler.superoptimise.graph import BytesGraph
from celosia.compiler.superoptimise.rule import RewriteRule
from celosia.compiler.superoptimise.state import DerivedGraph, KnownStep, SearchState
from celosia.compiler.tune.layer_trial import Status, TrialResult
from celosia.compiler.tune.records import Key, Records

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
