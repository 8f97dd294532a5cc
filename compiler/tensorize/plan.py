"""One layer: its definitions under decisions, as loops and as instructions whose addresses are open."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace

from celosia.compiler.expr import Function, lower
from celosia.compiler.expr.trace import Trace
from celosia.compiler.layer import Layer, Storage, TilingError
from celosia.compiler.tensorize.block_space import Group
from celosia.compiler.tensorize.decide import SchedulePolicy, ScheduleSource, workloads
from celosia.compiler.tensorize.define import define
from celosia.compiler.tensorize.definition import LayerComputation
from celosia.compiler.tensorize.instruction import RenderError
from celosia.compiler.tensorize.render import compile_loops
from celosia.compiler.tensorize.space import CompletionOrder, Tiling, Workload
from celosia.compiler.tensorize.templates import schedule
from celosia.compiler.tensorize.tiles import TilePlan
from celosia.compiler.tensorize.transfer import DramPlace
from celosia.hw.spec.config import Config

REMEMBERED = 1024
"""Loops that a process keeps, some 60 KB each."""


@dataclass(frozen=True)
class ScheduledLoops:
    """A definition under decisions. Layers of one geometry share it, in all models that a process compiles."""

    function: Function
    trace: Trace
    plan: TilePlan

    def __str__(self) -> str:
        return f"{self.function}\n\n{self.trace}\n"


_known: OrderedDict[Hashable, ScheduledLoops] = OrderedDict()
"""By Config, signature and decisions, the one that was asked for last at the end. They hold no arrays of a model."""


@dataclass(frozen=True)
class LayerPart:
    """A definition of a layer, what was decided for it, and its loops."""

    definition: LayerComputation
    decisions: Tiling
    loops: ScheduledLoops

    @property
    def decided(self) -> list[tuple[Workload | Group, Tiling]]:
        """What was decided for what; of a block, group by group."""
        return list(zip(workloads(self.definition), self.decisions.groups))


class Planner:
    """Makes the loops of layers; what it has made once, by layer and decisions, is remembered."""

    def __init__(self, cfg: Config, given: ScheduleSource | None = None) -> None:
        """given: what a user has decided, by the names of layers."""
        self.cfg, self.decider = cfg, SchedulePolicy(cfg, given)
        self.timed: dict[str, float] = {}
        """Cycles of chains of layers, by a name that says all on which they depend; see blocks.py."""
        self._defined: dict[Hashable, tuple[Layer, list[LayerComputation]]] = {}

    def with_policy(self, decider: SchedulePolicy) -> Planner:
        """A planner that asks `decider`, and remembers what this one does."""
        other = Planner(self.cfg)
        other.decider, other.timed = decider, self.timed
        other._defined = self._defined
        return other

    def definitions(self, layer: Layer) -> list[LayerComputation]:
        """Those of `layer`. TilingError where there are none."""
        key = _key(layer)
        if key not in self._defined:
            self._defined[key] = layer, define(self.cfg, layer)  # and the layer, so that no other one takes its id
        return self._defined[key][1]

    def known(self, layer: Layer, other: Layer, storages: Mapping[Storage, Storage]) -> Layer:
        """`layer`, which is `other` on other `storages`, and is not defined anew."""
        self._defined[_key(layer)] = layer, [_on(definition, storages) for definition in self.definitions(other)]
        return layer

    def layer(self, layer: Layer, first: CompletionOrder = CompletionOrder.ANY, cold: bool = False) -> list[LayerPart]:
        """The parts of `layer`. TilingError where it does not fit the scratchpads. For the rest see
        `SchedulePolicy.of`."""
        definitions = self.definitions(layer)
        chosen = self.decider.of(layer.name, definitions, first, cold)
        return [LayerPart(d, decisions, self.loops(d, decisions)) for d, decisions in zip(definitions, chosen)]

    def loops(self, d: LayerComputation, decisions: Tiling) -> ScheduledLoops:
        """Under these decisions. TilingError where an instruction cannot say it."""
        key = self.cfg, d.signature, decisions
        found = _known.pop(key, None)
        if found is None:
            found = _lowered(self.cfg, d, decisions)
        _known[key] = found  # as the last one that was asked for
        if len(_known) > REMEMBERED:
            _known.popitem(last=False)
        return found


def _lowered(cfg: Config, d: LayerComputation, decisions: Tiling) -> ScheduledLoops:
    s = schedule(cfg, d, decisions)
    function = lower(s, d.inputs, "layer", d.variables)
    try:
        plan = compile_loops(cfg, function.body, {t: place.strides for t, place in d.places.items()})
    except RenderError as error:
        raise TilingError(str(error)) from None
    return ScheduledLoops(function, s.trace, plan)


def _key(layer: Layer) -> Hashable:
    """Identity of the object, or of those that a block is made of."""
    return (*map(id, layer.layers), layer.cuts) if layer.is_block else id(layer)


def _on(definition: LayerComputation, storages: Mapping[Storage, Storage]) -> LayerComputation:
    """`definition` with other storages."""

    def moved(place: DramPlace) -> DramPlace:
        home = place.home
        return replace(place, home=storages[home]) if isinstance(home, Storage) else place

    return replace(definition, places={tensor: moved(place) for tensor, place in definition.places.items()})
