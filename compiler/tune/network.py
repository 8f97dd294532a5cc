"""All launches of a model as one stream: what it takes under the decisions for some of its layers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from celosia.compiler.launch.chains import CHAIN
from celosia.compiler.launch.image import Image, LayerErrors, build
from celosia.compiler.launch.overlap import OverlapGroups
from celosia.compiler.layer import Layer, Storage, TilingError
from celosia.compiler.tensorize.decide import workload_text, workloads
from celosia.compiler.tensorize.decisions import DecisionsError, why_not_any
from celosia.compiler.tensorize.plan import Planner
from celosia.compiler.tune.measure import TIMED, CostSource, Status, TrialResult
from celosia.compiler.tune.points import Point
from celosia.compiler.tune.records import Key, Records, schedule_of
from celosia.compiler.tune.shipped import shipped
from celosia.hw.spec.config import Config
from celosia.sim.timing import predict

Tuned = Mapping[str, Point]
"""Tilings by workload; the compiler decides the others."""


@dataclass(frozen=True)
class Occurrence:
    """Layers of one workload: one of them, what the compiler takes for it, and how many there are."""

    workload: str
    layer: Layer
    usual: Point
    count: int


@dataclass
class Network:
    """Layers in launches, as `image.build` takes them."""

    cfg: Config
    launches: list[list[Layer]]
    written: list[set[Storage]]
    read: list[set[Storage]]
    planner: Planner

    @cached_property
    def image(self) -> Image:
        """Under the compiler's own decisions. LayerErrors where a layer does not fit."""
        return build(self.cfg, self.launches, self.written, self.read, self.planner)

    def build(self, tuned: Tuned) -> Image:
        """LayerErrors where one does not fit so."""
        if not tuned:
            return self.image
        planner = self.planner.with_policy(replace(self.planner.policy, recorded=tuned))
        return build(self.cfg, self.launches, self.written, self.read, planner)

    def cycles(self, image: Image, judge: CostSource) -> int:
        """Cycles of all launches, by the timing model with the judge's memory."""
        codes = [(image.code(launch).tobytes(), launch.address) for launch in image.launches]
        return sum(predict(self.cfg, code, judge.memory, address).cycles for code, address in codes)

    def occurrences(self) -> list[Occurrence]:
        """The workloads of layers that the user has not decided, in order."""
        found: dict[str, Occurrence] = {}
        policy = self.planner.policy
        for layers in self.launches:
            overlap = OverlapGroups(self.cfg, layers, policy.overlapped)
            for number, layer in enumerate(layers):
                computations = self.planner.computations(layer)
                asked = [workload for computation in computations for workload in workloads(computation)]
                if policy.given is not None and policy.given.tilings_of(layer.name, asked) is not None:
                    continue
                name = workload_text(computations)
                if name in found:
                    found[name] = replace(found[name], count=found[name].count + 1)
                    continue
                usual = policy.choose(layer.name, computations, overlap.completion_order(number))
                found[name] = Occurrence(name, layer, tuple(d for each in usual for d in each.groups), 1)
        return list(found.values())

    @property
    def name(self) -> str:
        """The layers in order, as a record's workload."""
        lines = (map(workload_text, map(self.planner.computations, layers)) for layers in self.launches)
        text = "\n\n".join(map("\n".join, lines))
        count = sum(map(len, self.launches))
        return f"network of {count} layers #{hashlib.sha256(text.encode()).hexdigest()[:12]}"


@dataclass(frozen=True)
class Applied:
    """Effect of records on a network. source: "network" where this network was tuned, "layers" where records of its
    layers were put together, "none" where there are none. layers: workloads that they decide, `of` all. cycles,
    untuned: of the whole, with and without them. inexact: records of another version or device that were tried.
    refused: why decisions of records could not be followed."""

    source: str
    config: str
    layers: int = 0
    of: int = 0
    cycles: int = 0
    untuned: int = 0
    inexact: int = 0
    refused: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.source == "none":
            return f"records: none for this network on {self.config}; the compiler decides"
        told = "this network's own" if self.source == "network" else "its layers' own, put together"
        text = f"records: {told}; {self.layers} of {self.of} workloads decided"
        text += f"; {self.cycles:,} cycles, {self.untuned:,} without" if self.layers else ", no better than without"
        if self.inexact:
            text += f"; {self.inexact} measured by another version or device"
        return text + "".join(f"; {each}" for each in self.refused[:3])


def chains(cfg: Config, records: Records) -> dict[str, float]:
    """Cycles of the chains of layers, by name, that the search of blocks need not time again; inf for one that does not
    fit."""
    return {
        key.workload: inf if result.cost is None else result.cycles
        for key, result in records.trials.items()
        if key.workload.startswith(CHAIN) and (key.config, key.measurer) == (cfg.digest, TIMED.version)
    }


NO_RECORDS = Records()


def apply(
    network: Network, records: Records, judge: CostSource, trusted: Records = NO_RECORDS
) -> tuple[Image, Applied]:
    """The image under the decisions that records know best, or the compiler's own where that takes fewer cycles.

    trusted: records whose cycles of whole networks, with decisions and without, are taken for what they are: where both
    are among them, nothing is built and timed to compare. LayerErrors where a layer does not fit.
    """
    nothing = Applied("none", network.cfg.name)
    if not records.knows(network.cfg):
        return network.image, nothing
    try:
        occurrences = network.occurrences()
    except TilingError:
        return network.image, nothing  # which tells of all layers that do not fit
    own = {each.workload: each for each in occurrences}
    found = records.best(network.cfg, network.name, network_measurer(judge))
    source, inexact, tuned = "network", 0, {}
    if found is not None and found[2]:
        tuned = {name: point for name, point in network_schedule(found[0]).items() if name in own}
    else:
        source = "layers"
        for name in own:
            if (best := records.best(network.cfg, name, judge.version)) is not None:
                inexact += not best[2]
                tuned[name] = _schedule_of(best[0].schedule)
    if not tuned and source == "layers":
        return network.image, nothing
    wrong = {name: why for name, point in tuned.items() if (why := _illegal(network, own[name].layer, point))}
    refused = [f"a record of {own[name].layer.name!r} cannot be followed: {why}" for name, why in wrong.items()]
    tuned = {name: point for name, point in tuned.items() if name not in wrong}
    image, used, cycles, untuned = None, 0, 0, 0
    if any(point != own[name].usual for name, point in tuned.items()):
        try:
            other = network.build(tuned)
        except (LayerErrors, TilingError) as error:
            refused.append(f"records cannot be followed: {error}")
        else:
            with_them, without = (trusted.get(network_key(network, each, judge)) for each in (tuned, {}))
            cycles = with_them.cycles if with_them else network.cycles(other, judge)
            untuned = without.cycles if without else network.cycles(network.image, judge)
            if cycles < untuned:
                image, used = other, len(tuned)
    image = network.image if image is None else image
    return image, Applied(source, network.cfg.name, used, len(own), cycles, untuned, inexact, tuple(refused))


@dataclass(frozen=True)
class TuningDecisions:
    """Schedules that tuning has found: the caller's (`tuned`), else those of records, else none.

    tuned: decisions by workload, as a search tries them. records: the caller's, to which those are added that come with
    Celosia; None takes neither.
    """

    tuned: Tuned | None = None
    records: Records | None = None

    def build(self, network: Network) -> tuple[Image, str]:
        """Generate the image of a network under these decisions.

        Returns it with a sentence on what records decided. Raises LayerErrors where a layer does not fit, and
        DecisionsError where one cannot follow `tuned`.
        """
        if self.tuned is not None:
            return follow(network, self.tuned), ""
        if self.records is None or not network.launches:
            return network.image, ""
        presets = shipped(network.cfg)
        image, applied = apply(network, self.records.joined(presets), TIMED, presets)
        damaged = self.records.damaged
        return image, f"{applied}{f'; {damaged} damaged lines of {self.records.path} left out' if damaged else ''}"


def follow(network: Network, tuned: Tuned) -> Image:
    """The image under these decisions, each checked. DecisionsError where a layer cannot follow them; LayerErrors where
    one fits in no way."""
    try:
        for each in network.occurrences():
            if each.workload in tuned and (why := _illegal(network, each.layer, tuned[each.workload])):
                raise DecisionsError(f"decisions for {each.layer.name!r} cannot be followed: {why}")
        return network.build(tuned)
    except (LayerErrors, TilingError) as error:
        _ = network.image
        raise DecisionsError(f"decisions cannot be followed: {error}") from None


def _illegal(network: Network, layer: Layer, point: Point) -> str | None:
    """Why `point` is not one of the space of `layer`."""
    asked = [workload for computation in network.planner.computations(layer) for workload in workloads(computation)]
    if len(asked) != len(point):
        return f"it has {len(asked)} workloads, decisions are for {len(point)}"
    return next(filter(None, (why_not_any(network.cfg, workload, d) for workload, d in zip(asked, point))), None)


def network_measurer(judge: CostSource) -> str:
    """Whole networks are judged by the timing model, whoever judges layers."""
    return f"whole {CostSource('timed', judge.memory).version}"


def network_key(network: Network, tuned: Tuned, judge: CostSource) -> Key:
    """Under which the cycles of the whole are kept."""
    return Key.of(network.cfg, network.name, tuned, network_measurer(judge))


def network_schedule(key: Key) -> dict[str, Point]:
    """Tilings by workload, of a record of a network; {} for what is none."""
    rows = json.loads(key.schedule)
    if not isinstance(rows, dict):
        return {}
    return {name: point for name, row in rows.items() if (point := _schedule_of(json.dumps(row)))}


def _schedule_of(text: str) -> Point:
    """() for what are no decisions, which is legal for no layer."""
    try:
        return schedule_of(text)
    except ValueError:
        return ()


def whole(network: Network, tuned: Tuned, judge: CostSource) -> TrialResult:
    """Cycles of the network under `tuned`."""
    try:
        return TrialResult(Status.OK, network.cycles(network.build(tuned), judge))
    except (LayerErrors, TilingError) as error:
        return TrialResult(Status.REFUSED, detail=str(error))
