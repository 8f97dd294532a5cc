"""Results of searches among the records of `celosia tune`: a trial whose workload is a graph, and whose schedule
are steps. They are taken again, rule by rule, and compared and priced as if they were new."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from celosia.compiler.superoptimise.graph import BytesGraph
from celosia.compiler.superoptimise.rule import RewriteRule
from celosia.compiler.superoptimise.state import Found, KnownStep, SearchState
from celosia.compiler.tune.layer_trial import Status, TrialResult
from celosia.compiler.tune.records import Key, Records

MEASURER = "superoptimiser"
WHOLE = ("nothing left",)
"""Endings of a search that would find no more in a longer time."""


@dataclass(frozen=True)
class KeptSearches:
    """Searches of one graph, way of searching and set of rules. config: digest of a Config, or the name of a
    processor."""

    records: Records
    config: str
    graph: BytesGraph
    way: str
    rules: str

    @staticmethod
    def of(records: Records, config: str, graph: BytesGraph, way: str, rules: Iterable[RewriteRule]) -> KeptSearches:
        """rules: all that are used."""
        digest = hashlib.sha256(" ".join(sorted(rule.digest for rule in rules)).encode()).hexdigest()[:16]
        return KeptSearches(records, config, graph, way, digest)

    def steps(self) -> tuple[KnownStep, ...]:
        """Steps of the cheapest known graph, by whatever rules it was found; where nothing is known of this Config,
        those of the one that was noted last."""
        others = (config for workload, config in reversed(self.records.by_workload) if workload == self._workload)
        for config in (self.config, *others):
            rows = [(result.cycles, row) for row, result in self._rows(config)]
            if rows:
                best = min(rows, key=lambda each: each[0])[1]
                return tuple(KnownStep(rule, tuple(marks), float(gain)) for rule, marks, gain in best["steps"])
        return ()

    def has_ended(self, budget: float) -> bool:
        """Whether a search like this one has found all, or has had as long."""
        alike = [row for row, _ in self._rows(self.config) if (row["way"], row["rules"]) == (self.way, self.rules)]
        return any(row["ended"] in WHOLE or row["budget"] >= budget for row in alike)

    def add(self, best: Found, state: SearchState, budget: float) -> None:
        """Keep what a search has found. OutputError."""
        if best.price.total < 1 or state.ended == "interrupted":
            return
        steps = [[step.rule, list(step.marks), step.gain] for step in best.steps if step.marks]
        row = {"steps": steps, "way": self.way, "rules": self.rules, "ended": state.ended, "budget": budget}
        key = Key(self._workload, self.config, json.dumps(row, sort_keys=True, separators=(",", ":")), MEASURER)
        self.records.add(key, TrialResult(Status.OK, round(best.price.total), seconds=state.seconds))

    @property
    def _workload(self) -> str:
        return f"graph #{self.graph.digest}"

    def _rows(self, config: str) -> Sequence[tuple[dict[str, Any], TrialResult]]:
        known = self.records.by_workload.get((self._workload, config), {})
        rows = [(json.loads(key.schedule), result) for key, result in known.items() if key.measurer == MEASURER]
        return [(row, result) for row, result in rows if _is_whole(row)]


def _is_whole(row: Any) -> bool:
    """Whether a line that anybody may have written has all that is read here."""
    try:
        numbers = [row["budget"], *(gain for _, _, gain in row["steps"])]
        texts = [row["way"], row["rules"], row["ended"], *(rule for rule, _, _ in row["steps"])]
        texts += [mark for _, marks, _ in row["steps"] for mark in marks]
    except (KeyError, TypeError, ValueError):
        return False
    return all(isinstance(each, int | float) for each in numbers) and all(isinstance(each, str) for each in texts)
