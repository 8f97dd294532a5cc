"""One layer: its definitions under decisions, as loops and as instructions whose addresses are open."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from celosia.compiler.expr import Function, lower
from celosia.compiler.expr.trace import Trace
from celosia.compiler.layer import Layer, Untileable
from celosia.compiler.tensorize.define import Definition, define
from celosia.compiler.tensorize.instruction import RenderError
from celosia.compiler.tensorize.render import Plan, compile_loops
from celosia.compiler.tensorize.space import Decisions, choose, estimate, ranked, why_not
from celosia.compiler.tensorize.templates import schedule
from celosia.compiler.tensorize.trial import cycles
from celosia.hw.config import Config

import os
SLOW,WORTH,TRIED=eval(os.environ.get("T","(1.1,5000,4)"))

@dataclass(frozen=True)
class Loops:
    """A definition under decisions. Layers of one geometry share it."""

    function: Function
    trace: Trace
    plan: Plan


@dataclass(frozen=True)
class Part:
    """A definition of a layer, what was decided for it, and its loops."""

    definition: Definition
    decisions: Decisions
    loops: Loops


class Planner:
    """Makes the loops of layers; those of one geometry once."""

    def __init__(self, cfg: Config) -> None:
        self.cfg = cfg
        self.known: dict[Hashable, Loops] = {}
        self.tried: dict[Hashable, Decisions] = {}

    def layer(self, layer: Layer, rows_first: bool = False, decisions: list[Decisions] | None = None) -> list[Part]:
        """The parts of `layer`. Untileable where it does not fit the scratchpads; ValueError for wrong `decisions`.

        rows_first: rather complete the output row by row than channel by channel, if it costs next to nothing.
        """
        definitions = define(self.cfg, layer)
        if decisions is not None and len(decisions) != len(definitions):
            raise ValueError(f"it has {len(definitions)} parts, decisions are given for {len(decisions)}")
        parts = []
        for number, definition in enumerate(definitions):
            if decisions is None:
                chosen = self._chosen(definition, rows_first)
            else:
                chosen = decisions[number]
                if why := why_not(self.cfg, definition.problem, chosen):
                    raise ValueError(why)
            parts.append(Part(definition, chosen, self.loops(definition, chosen)))
        return parts

    def _chosen(self, d: Definition, rows_first: bool) -> Decisions:
        """The best decisions by the estimate, or, where it is far from what gemm needs, by the timing model."""
        best = choose(self.cfg, d.problem, rows_first)
        if not d.problem.in_blocks:
            return best
        key = d.signature, rows_first
        if key not in self.tried:
            gemm = d.problem.steps
            if estimate(self.cfg, d.problem, best) < max(SLOW * gemm, gemm + WORTH):
                return best
            points = ranked(self.cfg, d.problem, rows_first, TRIED)
            self.tried[key] = min(points, key=lambda c: cycles(self.cfg, d, self.loops(d, c).plan, c.ahead))
        return self.tried[key]

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
