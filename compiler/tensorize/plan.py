"""The Planner: lower one layer to computations, choose their tilings, and compile these to loops and instructions."""

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
"""Limit of the scheduled loops that a process keeps in memory, about 60 KB each."""


@dataclass(frozen=True)
class ScheduledLoops:
    """The loops and instructions of a computation under a tiling, without addresses.

    Layers of one geometry share them, in all models that a process compiles. function: the loops. trace: the schedule
    that made them. plan: the instructions of their tiles.
    """

    function: Function
    trace: Trace
    plan: TilePlan

    def __str__(self) -> str:
        return f"{self.function}\n\n{self.trace}\n"


_loops_cache: OrderedDict[Hashable, ScheduledLoops] = OrderedDict()
"""(Config, signature of the computation, tiling) -> loops; the latest used is last. They hold no arrays of a model."""


@dataclass(frozen=True)
class LayerPart:
    """One computation of a layer, its tiling, and its loops. A grouped convolution may have several."""

    computation: LayerComputation
    tiling: Tiling
    loops: ScheduledLoops

    @property
    def tilings(self) -> list[tuple[Workload | Group, Tiling]]:
        """Each workload with its tiling: the only one, or that of each group of a block."""
        return list(zip(workloads(self.computation), self.tiling.groups))


class Planner:
    """Lowers layers under a policy that chooses tilings, and remembers their computations.

    timed: cycles of chains of layers by the timing model, by `chain_name` of launch/order.py, which fills it
    with launch/blocks.py.
    """

    def __init__(self, cfg: Config, given: ScheduleSource | None = None) -> None:
        """given: schedules from the user, by the names of layers."""
        self.cfg, self.policy = cfg, SchedulePolicy(cfg, given)
        self.timed: dict[str, float] = {}
        self._computed: dict[Hashable, tuple[Layer, list[LayerComputation]]] = {}

    def with_policy(self, policy: SchedulePolicy) -> Planner:
        """Return a planner with another policy that shares what this one remembers."""
        other = Planner(self.cfg)
        other.policy, other.timed = policy, self.timed
        other._computed = self._computed
        return other

    def computations(self, layer: Layer) -> list[LayerComputation]:
        """Return the computations of `layer`, lowered once. Raises TilingError if the accelerator cannot compute it."""
        key = _key(layer)
        if key not in self._computed:
            self._computed[key] = layer, lower_layer(self.cfg, layer)  # with the layer, so that its id stays unique
        return self._computed[key][1]

    def share_computations(self, layer: Layer, other: Layer, storages: Mapping[Storage, Storage]) -> Layer:
        """Remember for `layer` the computations of `other`, moved to other storages, and return `layer`.

        It must be the same layer but for its storages; it is then not lowered anew.
        """
        self._computed[_key(layer)] = (
            layer,
            [_move_to_storages(computation, storages) for computation in self.computations(other)],
        )
        return layer

    def layer(self, layer: Layer, first: CompletionOrder = CompletionOrder.ANY, cold: bool = False) -> list[LayerPart]:
        """Lower `layer` to its parts, with tilings by the policy. Raises TilingError if it does not fit the
        scratchpads.

        first, cold: see `SchedulePolicy.choose`.
        """
        computations = self.computations(layer)
        tilings = self.policy.choose(layer.name, computations, first, cold)
        return [LayerPart(d, tiling, self.loops(d, tiling)) for d, tiling in zip(computations, tilings)]

    def loops(self, d: LayerComputation, tiling: Tiling) -> ScheduledLoops:
        """Return the loops of `d` under a tiling, compiled once.

        Raises TilingError if instructions cannot express them.
        """
        key = self.cfg, d.signature, tiling
        loops = _loops_cache.pop(key, None)
        if loops is None:
            loops = _lower_loops(self.cfg, d, tiling)
        _loops_cache[key] = loops  # at the end, as the latest used
        if len(_loops_cache) > REMEMBERED:
            _loops_cache.popitem(last=False)
        return loops


def _lower_loops(cfg: Config, d: LayerComputation, tiling: Tiling) -> ScheduledLoops:
    """Schedule a computation and compile its loops. Raises TilingError if a statement is no instruction."""
    s = schedule(cfg, d, tiling)
    function = lower(s, d.inputs, "layer", d.variables)
    try:
        plan = compile_loops(cfg, function.body, {t: place.strides for t, place in d.places.items()})
    except RenderError as error:
        raise TilingError(str(error)) from None
    return ScheduledLoops(function, s.trace, plan)


def _key(layer: Layer) -> Hashable:
    """Return the key under which a planner remembers `layer`: its id, or the ids of a block's layers and its cuts."""
    return (*map(id, layer.layers), layer.cuts) if layer.is_block else id(layer)


def _move_to_storages(computation: LayerComputation, storages: Mapping[Storage, Storage]) -> LayerComputation:
    """Return `computation` with its activations in other storages, as for a layer that is the same but for these;
    constants stay.
    """

    def relocate(place: DramPlace) -> DramPlace:
        home = place.home
        return replace(place, home=storages[home]) if isinstance(home, Storage) else place

    return replace(computation, places={tensor: relocate(place) for tensor, place in computation.places.items()})
