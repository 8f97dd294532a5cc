"""Records applied to a network: all its launches as one stream, under the decisions of records or the compiler's
own.
"""

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
from celosia.compiler.tensorize.plan import Planner
from celosia.compiler.tensorize.schedule_policy import workload_text, workloads
from celosia.compiler.tensorize.tilings_file import DecisionsError, why_not_tiling
from celosia.compiler.tune.layer_trial import TIMED, CostSource, Status, TrialResult
from celosia.compiler.tune.records import Key, Records, schedule_of
from celosia.compiler.tune.search_space import Point
from celosia.compiler.tune.shipped import shipped
from celosia.hw.spec.config import Config
from celosia.sim.timing import predict

Tuned = Mapping[str, Point]
"""Workload -> decisions; the compiler decides all others."""


@dataclass(frozen=True)
class Occurrence:
    """A workload of a network: one of its layers, the compiler's own decisions (`usual`), and the number of layers."""

    workload: str
    layer: Layer
    usual: Point
    count: int


@dataclass
class Network:
    """The layers of a model in launches, as `image.build` takes them."""

    cfg: Config
    launches: list[list[Layer]]
    written: list[set[Storage]]
    read: list[set[Storage]]
    planner: Planner

    @cached_property
    def image(self) -> Image:
        """The image under the compiler's own decisions. Raises LayerErrors where a layer does not fit."""
        return build(self.cfg, self.launches, self.written, self.read, self.planner)

    def build(self, tuned: Tuned) -> Image:
        """Build the image under `tuned` decisions. Raises LayerErrors where a layer does not fit."""
        if not tuned:
            return self.image
        planner = self.planner.with_policy(replace(self.planner.policy, recorded=tuned))
        return build(self.cfg, self.launches, self.written, self.read, planner)

    def cycles(self, image: Image, judge: CostSource) -> int:
        """Return the cycles of all launches, by the timing model with the judge's memory."""
        codes = [(image.code(launch).tobytes(), launch.address) for launch in image.launches]
        return sum(predict(self.cfg, code, judge.memory, address).cycles for code, address in codes)

    def occurrences(self) -> list[Occurrence]:
        """Return the workloads of layers that the user has not decided, in order."""
        by_name: dict[str, Occurrence] = {}
        policy = self.planner.policy
        for layers in self.launches:
            overlap_groups = OverlapGroups(self.cfg, layers, policy.overlapped)
            for position, layer in enumerate(layers):
                computations = self.planner.computations(layer)
                layer_workloads = [workload for computation in computations for workload in workloads(computation)]
                if policy.given is not None and policy.given.tilings_of(layer.name, layer_workloads) is not None:
                    continue
                name = workload_text(computations)
                if name in by_name:
                    by_name[name] = replace(by_name[name], count=by_name[name].count + 1)
                    continue
                usual = policy.choose(layer.name, computations, overlap_groups.completion_order(position))
                by_name[name] = Occurrence(
                    name, layer, tuple(d for definition_decisions in usual for d in definition_decisions.groups), 1
                )
        return list(by_name.values())

    @property
    def name(self) -> str:
        """Name of the network in records: a digest of its layers in order."""
        lines = (map(workload_text, map(self.planner.computations, layers)) for layers in self.launches)
        text = "\n\n".join(map("\n".join, lines))
        count = sum(map(len, self.launches))
        return f"network of {count} layers #{hashlib.sha256(text.encode()).hexdigest()[:12]}"


@dataclass(frozen=True)
class AppliedRecords:
    """Effect of records on a network.

    source: "network" where this network was tuned, "layers" where records of its layers were combined, "none" where
    there are none. layers: workloads that they decide, `of` all. cycles, untuned: of the complete network, with and
    without them. inexact: records of another version or device that were tried. refused: why decisions of records could
    not be followed.
    """

    source: str
    config: str
    layers: int = 0
    of: int = 0
    cycles: int = 0
    untuned: int = 0
    inexact: int = 0
    refused: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Describe in one line which records decide, and what they save."""
        if self.source == "none":
            return f"records: none for this network on {self.config}; the compiler decides"
        origin = "this network's own" if self.source == "network" else "its layers' own, put together"
        text = f"records: {origin}; {self.layers} of {self.of} workloads decided"
        text += f"; {self.cycles:,} cycles, {self.untuned:,} without" if self.layers else ", no better than without"
        if self.inexact:
            text += f"; {self.inexact} measured by another version or device"
        return text + "".join(f"; {reason}" for reason in self.refused[:3])


def known_chains(cfg: Config, records: Records) -> dict[str, float]:
    """Return the cycles of layer chains, by name, that block search need not predict again; inf where one does not
    fit.
    """
    return {
        key.workload: inf if result.cost is None else result.cycles
        for key, result in records.trials.items()
        if key.workload.startswith(CHAIN) and (key.config, key.measurer) == (cfg.digest, TIMED.version)
    }


NO_RECORDS = Records()


def apply_records(
    network: Network, records: Records, judge: CostSource, trusted: Records = NO_RECORDS
) -> tuple[Image, AppliedRecords]:
    """Build the image under the best decisions in `records`, or the compiler's own where these take fewer cycles.

    trusted: records whose cycles of complete networks are believed; where both variants are among them, nothing is
    compared. Raises LayerErrors where a layer does not fit.
    """
    nothing = AppliedRecords("none", network.cfg.name)
    if not records.knows(network.cfg):
        return network.image, nothing
    try:
        occurrences = network.occurrences()
    except TilingError:
        return network.image, nothing  # which tells of all layers that do not fit
    by_workload = {occurrence.workload: occurrence for occurrence in occurrences}
    recorded = records.best(network.cfg, network.name, network_measurer(judge))
    source, inexact, tuned = "network", 0, {}
    if recorded is not None and recorded[2]:
        tuned = {name: point for name, point in network_schedule(recorded[0]).items() if name in by_workload}
    else:
        source = "layers"
        for name in by_workload:
            if (best := records.best(network.cfg, name, judge.version)) is not None:
                inexact += not best[2]
                tuned[name] = _decisions_or_none(best[0].schedule)
    if not tuned and source == "layers":
        return network.image, nothing
    illegal = {
        name: why for name, point in tuned.items() if (why := _legality_error(network, by_workload[name].layer, point))
    }
    refused = [
        f"a record of {by_workload[name].layer.name!r} cannot be followed: {why}" for name, why in illegal.items()
    ]
    tuned = {name: point for name, point in tuned.items() if name not in illegal}
    image, used, cycles, untuned = None, 0, 0, 0
    if any(point != by_workload[name].usual for name, point in tuned.items()):
        try:
            other = network.build(tuned)
        except (LayerErrors, TilingError) as error:
            refused.append(f"records cannot be followed: {error}")
        else:
            with_them, without = (trusted.get(network_key(network, occurrence, judge)) for occurrence in (tuned, {}))
            cycles = with_them.cycles if with_them else network.cycles(other, judge)
            untuned = without.cycles if without else network.cycles(network.image, judge)
            if cycles < untuned:
                image, used = other, len(tuned)
    image = network.image if image is None else image
    return image, AppliedRecords(
        source, network.cfg.name, used, len(by_workload), cycles, untuned, inexact, tuple(refused)
    )


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
            return follow_decisions(network, self.tuned), ""
        if self.records is None or not network.launches:
            return network.image, ""
        presets = shipped(network.cfg)
        image, applied = apply_records(network, self.records.joined(presets), TIMED, presets)
        damaged = self.records.damaged
        return image, f"{applied}{f'; {damaged} damaged lines of {self.records.path} left out' if damaged else ''}"


def follow_decisions(network: Network, tuned: Tuned) -> Image:
    """Build the image under these decisions.

    Raises DecisionsError where a layer cannot follow them, LayerErrors where one never fits.
    """
    try:
        for occurrence in network.occurrences():
            if occurrence.workload in tuned and (
                why := _legality_error(network, occurrence.layer, tuned[occurrence.workload])
            ):
                raise DecisionsError(f"decisions for {occurrence.layer.name!r} cannot be followed: {why}")
        return network.build(tuned)
    except (LayerErrors, TilingError) as error:
        _ = network.image
        raise DecisionsError(f"decisions cannot be followed: {error}") from None


def _legality_error(network: Network, layer: Layer, point: Point) -> str | None:
    """Return why `point` is not in the search space of `layer`, or None."""
    layer_workloads = [
        workload for computation in network.planner.computations(layer) for workload in workloads(computation)
    ]
    if len(layer_workloads) != len(point):
        return f"it has {len(layer_workloads)} workloads, decisions are for {len(point)}"
    return next(
        filter(None, (why_not_tiling(network.cfg, workload, d) for workload, d in zip(layer_workloads, point))), None
    )


def network_measurer(judge: CostSource) -> str:
    """Return the measurer of complete networks: the timing model, whatever judges layers."""
    return f"whole {CostSource('timed', judge.memory).version}"


def network_key(network: Network, tuned: Tuned, judge: CostSource) -> Key:
    """Return the key under which records keep the cycles of the complete network."""
    return Key.of(network.cfg, network.name, tuned, network_measurer(judge))


def network_schedule(key: Key) -> dict[str, Point]:
    """Return the decisions by workload in a record of a network; {} where it is none."""
    rows = json.loads(key.schedule)
    if not isinstance(rows, dict):
        return {}
    return {name: point for name, row in rows.items() if (point := _decisions_or_none(json.dumps(row)))}


def _decisions_or_none(text: str) -> Point:
    """Parse decisions; () where the text has none, which is legal for no layer."""
    try:
        return schedule_of(text)
    except ValueError:
        return ()


def measure_network(network: Network, tuned: Tuned, judge: CostSource) -> TrialResult:
    """Predict the cycles of the network under `tuned` decisions."""
    try:
        return TrialResult(Status.OK, network.cycles(network.build(tuned), judge))
    except (LayerErrors, TilingError) as error:
        return TrialResult(Status.REFUSED, detail=str(error))
