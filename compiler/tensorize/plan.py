"""Lower one layer: its computations under their tilings, to loops and to instructions without addresses."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace

from celosia.compiler.expr import Function, lower
from celosia.compiler.expr.trace import Trace
from celosia.compiler.layer import Layer, Storage, TilingError
from celosia.compiler.tensorize.block_space import Group
from celosia.compiler.tensorize.computation import LayerComputation
from celosia.compiler.tensorize.instruction import RenderError
from celosia.compiler.tensorize.lowering import lower_layer
from celosia.compiler.tensorize.render import compile_loops
from celosia.compiler.tensorize.schedule_policy import SchedulePolicy, ScheduleSource, workloads
from celosia.compiler.tensorize.space import CompletionOrder, Tiling, Workload
from celosia.compiler.tensorize.templates import schedule
from celosia.compiler.tensorize.tiles import TilePlan
from celosia.compiler.tensorize.transfer import DramPlace
from celosia.hw.spec.config import Config

REMEMBERED = 1024
"""Scheduled loops that a process keeps, some 60 KB each."""


@dataclass(frozen=True)
class ScheduledLoops:
    """The loops and instructions of a computation under a tiling. Layers of one geometry share them, in all models that
    a process compiles."""

    function: Function
    trace: Trace
    plan: TilePlan

    def __str__(self) -> str:
        return f"{self.function}\n\n{self.trace}\n"


_known: OrderedDict[Hashable, ScheduledLoops] = OrderedDict()
"""Scheduled loops by Config, signature and tiling, the latest used last. They hold no arrays of a model."""


@dataclass(frozen=True)
class LayerPart:
    """A computation of a layer, its tiling, and its loops."""

    computation: LayerComputation
    tiling: Tiling
    loops: ScheduledLoops

    @property
    def decided(self) -> list[tuple[Workload | Group, Tiling]]:
        """The tiling of each workload: of the only one, or of each group of a block."""
        return list(zip(workloads(self.computation), self.tiling.groups))


class Planner:
    """Lower layers under a policy, and remember their computations."""

    def __init__(self, cfg: Config, given: ScheduleSource | None = None) -> None:
        """given: schedules that a user has decided, by the names of layers."""
        self.cfg, self.policy = cfg, SchedulePolicy(cfg, given)
        self.timed: dict[str, float] = {}
        """Cycles of chains of layers by the timing model, by `chains.chain_name`."""
        self._computed: dict[Hashable, tuple[Layer, list[LayerComputation]]] = {}

    def with_policy(self, policy: SchedulePolicy) -> Planner:
        """A planner with another policy that shares what this one remembers."""
        other = Planner(self.cfg)
        other.policy, other.timed = policy, self.timed
        other._computed = self._computed
        return other

    def computations(self, layer: Layer) -> list[LayerComputation]:
        """The computations of `layer`. TilingError where the accelerator has none."""
        key = _key(layer)
        if key not in self._computed:
            self._computed[key] = layer, lower_layer(self.cfg, layer)  # with the layer, so that its id stays unique
        return self._computed[key][1]

    def known(self, layer: Layer, other: Layer, storages: Mapping[Storage, Storage]) -> Layer:
        """Remember that `layer` is `other` on other `storages`, so that it is not lowered anew; returns it."""
        self._computed[_key(layer)] = layer, [_on(computation, storages) for computation in self.computations(other)]
        return layer

    def layer(self, layer: Layer, first: CompletionOrder = CompletionOrder.ANY, cold: bool = False) -> list[LayerPart]:
        """Lower `layer` to its parts. TilingError where it does not fit the scratchpads.

        first, cold: see `SchedulePolicy.choose`.
        """
        computations = self.computations(layer)
        chosen = self.policy.choose(layer.name, computations, first, cold)
        return [LayerPart(d, tiling, self.loops(d, tiling)) for d, tiling in zip(computations, chosen)]

    def loops(self, d: LayerComputation, tiling: Tiling) -> ScheduledLoops:
        """The loops of `d` under a tiling, remembered. TilingError where an instruction's fields cannot express it."""
        key = self.cfg, d.signature, tiling
        loops = _known.pop(key, None)
        if loops is None:
            loops = _lowered(self.cfg, d, tiling)
        _known[key] = loops  # at the end, as the latest used
        if len(_known) > REMEMBERED:
            _known.popitem(last=False)
        return loops


def _lowered(cfg: Config, d: LayerComputation, tiling: Tiling) -> ScheduledLoops:
    """Schedule a computation and compile its loops. TilingError where a statement is no instruction."""
    s = schedule(cfg, d, tiling)
    function = lower(s, d.inputs, "layer", d.variables)
    try:
        plan = compile_loops(cfg, function.body, {t: place.strides for t, place in d.places.items()})
    except RenderError as error:
        raise TilingError(str(error)) from None
    return ScheduledLoops(function, s.trace, plan)


def _key(layer: Layer) -> Hashable:
    """Key of `layer` among the computations that a planner remembers: its identity, or those of a block's layers."""
    return (*map(id, layer.layers), layer.cuts) if layer.is_block else id(layer)


def _on(computation: LayerComputation, storages: Mapping[Storage, Storage]) -> LayerComputation:
    """Move the activations of a computation to other storages."""

    def relocated(place: DramPlace) -> DramPlace:
        home = place.home
        return replace(place, home=storages[home]) if isinstance(home, Storage) else place

    return replace(computation, places={tensor: relocated(place) for tensor, place in computation.places.items()})
