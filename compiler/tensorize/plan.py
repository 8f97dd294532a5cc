"""One layer: its definitions under decisions, as loops and as instructions whose addresses are open."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from celosia.compiler.expr import Function, lower
from celosia.compiler.expr.trace import Trace
from celosia.compiler.layer import Layer, Untileable
from celosia.compiler.tensorize import block_space
from celosia.compiler.tensorize.block_space import BlockProblem, Group
from celosia.compiler.tensorize.define import define
from celosia.compiler.tensorize.definition import Definition
from celosia.compiler.tensorize.instruction import RenderError
from celosia.compiler.tensorize.render import compile_loops
from celosia.compiler.tensorize.space import Decisions, Problem, choose
from celosia.compiler.tensorize.templates import schedule
from celosia.compiler.tensorize.tiles import Plan
from celosia.hw.config import Config


@dataclass(frozen=True)
class Loops:
    """A definition under decisions. Layers of one geometry share it."""

    function: Function
    trace: Trace
    plan: Plan

    def __str__(self) -> str:
        return f"{self.function}\n\n{self.trace}\n"


@dataclass(frozen=True)
class Part:
    """A definition of a layer, what was decided for it, and its loops."""

    definition: Definition
    decisions: Decisions
    loops: Loops

    @property
    def decided(self) -> list[tuple[Problem | Group, Decisions]]:
        """What was decided for what; of a block, group by group."""
        return list(zip(problems(self.definition), self.decisions.groups))


class Given(Protocol):
    """What a user has decided; see compiler/tensorize/decisions.py."""

    def of(self, layer: str, problems: Sequence[Problem | Group]) -> list[Decisions] | None: ...


@dataclass(frozen=True)
class Fixed:
    """The same decisions for every layer that is asked about."""

    decisions: list[Decisions]

    def of(self, layer: str, problems: Sequence[Problem | Group]) -> list[Decisions]:
        if len(problems) != len(self.decisions):
            raise Untileable(f"the layer has {len(problems)} problems, decisions are for {len(self.decisions)}")
        return self.decisions


class Planner:
    """Makes the loops of layers; those of one geometry once."""

    def __init__(self, cfg: Config, given: Given | None = None) -> None:
        """given: what a user has decided, by the names of layers."""
        self.cfg, self.given = cfg, given
        self.known: dict[Hashable, Loops] = {}
        self.preferred: dict[Problem | BlockProblem, Decisions] = {}
        """What others than the estimate have chosen."""
        self.tuned: dict[str, list[Decisions]] = {}
        """What a search has found: decisions for each problem of a layer, by its `workload`."""

    def layer(self, layer: Layer, rows_first: bool = False) -> list[Part]:
        """The parts of `layer`. Untileable where it does not fit the scratchpads.

        rows_first: rather complete the output row by row than channel by channel, if it costs next to nothing.
        """
        definitions = define(self.cfg, layer)
        asked = [problems(definition) for definition in definitions]
        given = None if self.given is None else self.given.of(layer.name, [p for each in asked for p in each])
        if given is None and self.tuned:
            given = self.tuned.get(workload(definitions))
        if given is None:
            chosen = [self._choose(definition.problem, rows_first) for definition in definitions]
        else:
            rest = iter(given)
            chosen = [Decisions.of_groups(list(islice(rest, len(each)))) for each in asked]
        return [Part(d, decisions, self.loops(d, decisions)) for d, decisions in zip(definitions, chosen)]

    def _choose(self, problem: Problem | BlockProblem, rows_first: bool) -> Decisions:
        if isinstance(problem, BlockProblem):
            return self.preferred.get(problem) or block_space.choose(self.cfg, problem)
        return choose(self.cfg, problem, rows_first)

    def loops(self, d: Definition, decisions: Decisions) -> Loops:
        key = d.signature, decisions
        if key not in self.known:
            s = schedule(self.cfg, d, decisions)
            function = lower(s, d.inputs, "layer", d.variables)
            try:
                plan = compile_loops(self.cfg, function.body, {t: place.strides for t, place in d.places.items()})
            except RenderError as error:
                raise Untileable(str(error)) from None
            self.known[key] = Loops(function, s.trace, plan)
        return self.known[key]


def problems(d: Definition) -> Sequence[Problem | Group]:
    """What is decided for a definition: one problem, or one for each group of a block."""
    return d.problem.groups if isinstance(d.problem, BlockProblem) else [d.problem]


def workload(definitions: Sequence[Definition]) -> str:
    """A layer in a line: its problems, and a digest of all on which its loops depend, weights and scalars not."""
    text = " + ".join(problem.text for definition in definitions for problem in problems(definition))
    signatures = repr(tuple(definition.signature for definition in definitions))
    return f"{text} #{hashlib.sha256(signatures.encode()).hexdigest()[:12]}"
