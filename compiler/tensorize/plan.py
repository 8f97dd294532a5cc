"""The Planner: choose the tilings of a layer, and compile its computations to loops and instructions.

`SchedulePolicy` chooses. Priority: user, tuning records, block search, estimate (roofline, block_space). It is
immutable; a search that has found better tilings makes another policy.

A user's tilings come from a file (CLI option `--decisions`), which users read, change and compile with:

    {"format": "celosia-decisions", "version": 1, "config": "pynq", "config_digest": "...",
     "layers": [{"layer": "conv1", "parts": [{"workload": "...", "n": 4, "y": 8, "x": 56, "k": 4, "order": "input",
                                              "ahead": 8, "part": 2}]}]}

The compiler chooses the tilings of layers that the file leaves out. Tilings for another Config, layer or workload are
refused. The public name of the format is "decisions"; inside the compiler these are tilings.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from celosia.compiler.expr import Function, lower
from celosia.compiler.expr.schedule import Trace
from celosia.compiler.layer import Layer, Storage, TilingError
from celosia.compiler.program import Contents
from celosia.compiler.program.safe_files import reading
from celosia.compiler.tensorize import block_space
from celosia.compiler.tensorize.block_space import BlockWorkload, Group
from celosia.compiler.tensorize.computation import DramPlace, LayerComputation
from celosia.compiler.tensorize.instruction import RenderError
from celosia.compiler.tensorize.lowering import lower_layer
from celosia.compiler.tensorize.remembered_cycles import RememberedCycles
from celosia.compiler.tensorize.render import compile_loops
from celosia.compiler.tensorize.roofline import choose
from celosia.compiler.tensorize.space import CompletionOrder, Tiling, Workload, why_not
from celosia.compiler.tensorize.templates import schedule
from celosia.compiler.tensorize.tiles import TilePlan
from celosia.hw.spec.config import Config
from celosia.plain import Sentence, from_json

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
    with launch/blocks.py. remembered: predictions of earlier compilations; None: they do not count.
    """

    def __init__(self, cfg: Config, given: ScheduleSource | None = None) -> None:
        """given: schedules from the user, by the names of layers."""
        self.cfg, self.policy = cfg, SchedulePolicy(cfg, given)
        self.timed: dict[str, float] = {}
        self.remembered: RememberedCycles | None = None
        self._computed: dict[Hashable, tuple[Layer, list[LayerComputation]]] = {}

    def with_policy(self, policy: SchedulePolicy) -> Planner:
        """Return a planner with another policy that shares what this one remembers."""
        other = Planner(self.cfg)
        other.policy, other.timed, other.remembered = policy, self.timed, self.remembered
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

    def forget_others(self, layers: Iterable[Layer]) -> None:
        """Forget the computations of all layers but these, with their copies of weights."""
        kept = set(map(_key, layers))
        for key in self._computed.keys() - kept:
            del self._computed[key]

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


# Choice of the tiling ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SchedulePolicy:
    """The sources of tilings, in the order of their priority, and the layers that overlap.

    given: the user's tilings, by name of layer. recorded: tilings in tuning records, by `workload_text` of a layer.
    searched: tilings that the search of blocks found (launch/blocks.py). overlapped: names of guests, whose tiles are
    emitted between those of the convolution before them (launch/order.py).
    """

    cfg: Config
    given: ScheduleSource | None = None
    recorded: Mapping[str, Sequence[Tiling]] = field(default_factory=dict)
    searched: Mapping[BlockWorkload, Tiling] = field(default_factory=dict)
    overlapped: frozenset[str] = frozenset()

    def choose(
        self,
        layer: str,
        computations: Sequence[LayerComputation],
        first: CompletionOrder = CompletionOrder.ANY,
        cold: bool = False,
    ) -> list[Tiling]:
        """Choose a tiling for each computation of the layer of that name. Raises TilingError if none fits.

        first: the part of the output to complete before the rest, if that costs at most 2% more cycles. cold: whether
        no layer before keeps GEMM busy while this layer's first loads come.
        """
        by_computation = [workloads(computation) for computation in computations]
        tilings: Sequence[Tiling] | None = None
        if self.given is not None:
            tilings = self.given.tilings_of(layer, [workload for group in by_computation for workload in group])
        if tilings is None and self.recorded:
            tilings = self.recorded.get(workload_text(computations))
        if tilings is None:
            return [self._search_or_estimate(computation.workload, first, cold) for computation in computations]
        remaining = iter(tilings)
        return [Tiling.of_groups(list(islice(remaining, len(group)))) for group in by_computation]

    def _search_or_estimate(self, workload: Workload | BlockWorkload, first: CompletionOrder, cold: bool) -> Tiling:
        """Return the tiling that the block search found, or else the best by the estimate."""
        if isinstance(workload, BlockWorkload):
            return self.searched.get(workload) or block_space.choose(self.cfg, workload)
        return choose(self.cfg, workload, first, cold)


def workloads(d: LayerComputation) -> Sequence[Workload | Group]:
    """Return the workloads of a computation, each of which gets a tiling: one, or one for each group of a block."""
    return d.workload.groups if isinstance(d.workload, BlockWorkload) else [d.workload]


def workload_text(computations: Sequence[LayerComputation]) -> str:
    """Return the line that names a layer in tuning records: its workloads, and a digest of all that its loops depend
    on.

    Loops do not depend on weights and scalars.
    """
    text = " + ".join(workload.text for computation in computations for workload in workloads(computation))
    signatures = repr(tuple(computation.signature for computation in computations))
    return f"{text} #{hashlib.sha256(signatures.encode()).hexdigest()[:12]}"


def why_not_tiling(cfg: Config, workload: Workload | Group, tiling: Tiling) -> str | None:
    """Return why `tiling` is not in the space of `workload`, of a layer or a group of a block; None if it is."""
    if isinstance(workload, Group):
        return block_space.why_not(cfg, workload, tiling)
    return why_not(cfg, workload, tiling)


@dataclass(frozen=True)
class FixedSchedule:
    """Source of tilings that gives every layer the same ones, for a trial of a search."""

    tilings: list[Tiling]

    def tilings_of(self, layer: str, workloads: Sequence[Workload | Group]) -> list[Tiling]:
        """Return the fixed tilings for any layer. Raises TilingError if it has another number of workloads."""
        if len(workloads) != len(self.tilings):
            raise TilingError(f"the layer has {len(workloads)} workloads, decisions are for {len(self.tilings)}")
        return self.tilings


# The file of tilings -------------------------------------------------------------------------------------------


# The file of tilings -------------------------------------------------------------------------------------------

FORMAT, VERSION = "celosia-decisions", 1
"""Values of the fields "format" and "version" of a file."""


class DecisionsError(Sentence, ValueError):
    """Raised for a file of tilings that cannot be followed; the message names the layer and what to do."""


@dataclass
class ScheduleFile:
    """Source of tilings: those in a user's file.

    layers: by layer's name, the text of the workload and the tiling of each part. used: layers whose tilings were asked
    for, so that those of no layer are found.
    """

    cfg: Config
    layers: dict[str, list[tuple[str, Tiling]]]
    used: set[str] = field(default_factory=set)

    @staticmethod
    def load(source: str | Path | Mapping[str, Any], cfg: Config) -> ScheduleFile:
        """Read a file, or take its contents. Raises DecisionsError for other formats and other Configs."""
        if not isinstance(source, Mapping):
            with reading(source, DecisionsError, "holds no decisions"):
                source = from_json(Path(source).read_text(encoding="utf-8"))
        if not isinstance(source, Mapping) or source.get("format") != FORMAT:
            raise DecisionsError(
                f"these are no decisions of format {FORMAT!r}; `celosia inspect --decisions` writes them"
            )
        if source.get("version") != VERSION:
            raise DecisionsError(f"decisions of version {source.get('version')!r}; this Celosia reads {VERSION}")
        if source.get("config_digest") != cfg.digest:
            raise DecisionsError(
                f"the decisions were made for another Config, which was called {source.get('config')!r}, not for this "
                f"{cfg.name}; compile with that one, or write new ones with `celosia inspect --decisions`"
            )
        return ScheduleFile(cfg, _parse_layers(source.get("layers")))

    def tilings_of(self, layer: str, workloads: Sequence[Workload | Group]) -> list[Tiling] | None:
        """Return a tiling for each workload of `layer`; None if the file leaves it out. Raises DecisionsError if they
        do not fit."""
        if layer not in self.layers:
            return None
        tilings = self.layers[layer]
        self.used.add(layer)
        if len(tilings) != len(workloads):
            raise DecisionsError(f"layer {layer!r} has {len(workloads)} parts, decisions are given for {len(tilings)}")
        for number, ((text, tiling), workload) in enumerate(zip(tilings, workloads)):
            where = f"layer {layer!r}" + (f", part {number}" if len(workloads) > 1 else "")
            if text != workload.text:
                raise DecisionsError(f"{where} is `{workload.text}`, its decisions are for `{text}`; write new ones")
            if reason := why_not_tiling(self.cfg, workload, tiling):
                raise DecisionsError(f"{where} cannot be tiled so: {reason}")
        return [tiling for _, tiling in tilings]

    def require_all_used(self) -> None:
        """Raise DecisionsError if the file has a layer that this model does not have on the accelerator."""
        if unknown := [layer for layer in self.layers if layer not in self.used]:
            raise DecisionsError(
                f"decisions are given for {unknown[0]!r}, which is no layer of this model on the accelerator; "
                "`celosia inspect --layers` lists them"
            )


def _parse_layers(rows: Any) -> dict[str, list[tuple[str, Tiling]]]:
    """Parse the "layers" of a file. Raises DecisionsError if they are no tilings by layer."""
    if not isinstance(rows, list):
        raise DecisionsError('decisions hold a list of "layers"')
    layers: dict[str, list[tuple[str, Tiling]]] = {}
    for row in rows:
        name = row.get("layer") if isinstance(row, dict) else None
        parts = row.get("parts") if isinstance(row, dict) else None
        if not isinstance(name, str) or not isinstance(parts, list) or not all(isinstance(p, dict) for p in parts):
            raise DecisionsError(f'a layer\'s decisions are {{"layer": name, "parts": [...]}}, not {str(row)[:80]}')
        if name in layers:
            raise DecisionsError(f"layer {name!r} is decided twice; leave one out")
        try:
            layers[name] = [
                (str(part.get("workload")), Tiling.from_json({k: v for k, v in part.items() if k != "workload"}))
                for part in parts
            ]
        except ValueError as error:
            raise DecisionsError(f"layer {name!r}: {error}") from None
    return layers


def collect_tilings(program: Contents) -> dict[str, Any]:
    """Collect the tilings of a compiled Program as the contents of a file of tilings."""
    layers = [
        {"layer": info.name, "parts": [{"workload": part.workload, **part.decisions} for part in info.parts]}
        for launch in program.launches for info in launch.layers
    ]  # fmt: skip
    config = program.config
    return {
        "format": FORMAT, "version": VERSION, "config": config.name, "config_digest": config.digest, "layers": layers
    }  # fmt: skip


ScheduleSource = ScheduleFile | FixedSchedule
"""Where tilings come from that go before all others."""
