"""Records applied to a network: its launches are compiled under the decisions of records, or the compiler's own.

`TuningDecisions.build` decides which: decisions that a search tries, else records where they save cycles, else none.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from celosia.compiler.launch.image import Image, LayerErrors, build
from celosia.compiler.launch.order import CHAIN
from celosia.compiler.launch.overlap import OverlapGroups
from celosia.compiler.layer import Layer, Storage, TilingError
from celosia.compiler.tensorize.plan import DecisionsError, Planner, why_not_tiling, workload_text, workloads
from celosia.compiler.tensorize.remembered_cycles import constant_pattern
from celosia.compiler.tune.layer_space import Point
from celosia.compiler.tune.layer_trial import COPIES, TIMED, CostSource, LayerCase, Status, TrialResult
from celosia.compiler.tune.records import Key, Records, schedule_of, shipped
from celosia.hw.spec.config import Config
from celosia.sim.timing import predict

Tuned = Mapping[str, Point]
"""Workload -> decisions; the compiler decides workloads that are not listed."""


@dataclass(frozen=True)
class Occurrence:
    """A workload of a network.

    layer: the first layer that has it. usual: the compiler's own decisions. count: number of layers that have it.
    """

    workload: str
    layer: Layer
    usual: Point
    count: int


@dataclass
class Network:
    """The layers of a model in launches, with all that `image.build` takes.

    written, read: for each launch the storages that the host writes before it and reads after it. planner: schedules
    the layers.
    """

    cfg: Config
    launches: list[list[Layer]]
    written: list[set[Storage]]
    read: list[set[Storage]]
    planner: Planner

    @cached_property
    def image(self) -> Image:
        """Image under the compiler's own decisions. Raises LayerErrors where a layer does not fit."""
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
        return sum(self._launch_cycles(code, address, judge.memory) for code, address in codes)

    def _launch_cycles(self, code: bytes, address: int, memory: str) -> int:
        """Return the cycles of a launch by the timing model."""

        def predict_cycles() -> int:
            return predict(self.cfg, code, memory, address).cycles

        if self.planner.remembered is None:
            return predict_cycles()
        digest = hashlib.sha256(code).hexdigest()
        return int(self.planner.remembered.recall(predict_cycles, "launch", digest, address, memory))

    def occurrences(self) -> list[Occurrence]:
        """Return the workloads of the layers in order, except for those that the user has decided."""
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
    there are none. config: name of the Config. layers: number of workloads that records decide. of: number of all
    workloads. cycles, untuned: predicted for the complete network, with and without records. inexact: number of records
    of another version or device that were tried. refused: reasons why decisions of records could not be followed.
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
        """Return one line that says which records decide, and how many cycles they save."""
        if self.source == "none":
            return f"records: none for this network on {self.config}; the compiler decides"
        origin = "this network's own" if self.source == "network" else "its layers' own, put together"
        text = f"records: {origin}; {self.layers} of {self.of} workloads decided"
        text += f"; {self.cycles:,} cycles, {self.untuned:,} without" if self.layers else ", no better than without"
        if self.inexact:
            text += f"; {self.inexact} measured by another version or device"
        return text + "".join(f"; {reason}" for reason in self.refused[:3])


def known_chains(cfg: Config, records: Records) -> dict[str, float]:
    """Return the cycles of chains of layers, by name, so that the block search need not predict them again.

    They are inf where a chain does not fit the scratchpads.
    """
    return {
        key.workload: inf if result.cost is None else result.cycles
        for key, result in records.trials.items()
        if key.workload.startswith(CHAIN) and (key.config, key.measurer) == (cfg.digest, TIMED.version)
    }


LEAST_SAVING = 0.0005
"""Share of a network's cycles that records of its layers must save to be worth a comparison of complete networks. It is
below the error of the timing model."""
NO_RECORDS = Records()
"""Default of arguments; nothing is added to it."""


def apply_records(
    network: Network, records: Records, judge: CostSource, trusted: Records = NO_RECORDS
) -> tuple[Image, AppliedRecords]:
    """Build the image under the best decisions in `records`, or the compiler's own where these take fewer cycles.

    Records of layers are compared on the complete network only where those of its layers promise LEAST_SAVING.

    judge: the measurer whose records count as exact. trusted: records whose cycles of complete networks are believed:
    where they have them with and without tuning, neither is predicted. Raises LayerErrors where a layer does not fit.
    """
    no_records = AppliedRecords("none", network.cfg.name)
    if not records.knows(network.cfg):
        return network.image, no_records
    try:
        occurrences = network.occurrences()
    except TilingError:
        return network.image, no_records  # building the image raises LayerErrors, which names all layers
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
                tuned[name] = _parse_tilings(best[0].schedule)
    if not tuned and source == "layers":
        return network.image, no_records
    illegal = {
        name: why for name, point in tuned.items() if (why := _legality_error(network, by_workload[name].layer, point))
    }
    refused = [
        f"a record of {by_workload[name].layer.name!r} cannot be followed: {why}" for name, why in illegal.items()
    ]
    tuned = {name: point for name, point in tuned.items() if name not in illegal}
    changed = [by_workload[name] for name, point in tuned.items() if point != by_workload[name].usual]
    if source == "layers" and not _promise_a_saving(network, records, judge, changed):
        changed = []
    image, decided, cycles, untuned = None, 0, 0, 0
    if changed:
        try:
            tuned_image = network.build(tuned)
        except (LayerErrors, TilingError) as error:
            refused.append(f"records cannot be followed: {error}")
        else:
            trusted_tuned, trusted_untuned = (trusted.get(network_key(network, d, judge)) for d in (tuned, {}))
            cycles = trusted_tuned.cycles if trusted_tuned else network.cycles(tuned_image, judge)
            untuned = trusted_untuned.cycles if trusted_untuned else network.cycles(network.image, judge)
            if cycles < untuned:
                image, decided = tuned_image, len(tuned)
    image = network.image if image is None else image
    return image, AppliedRecords(
        source, network.cfg.name, decided, len(by_workload), cycles, untuned, inexact, tuple(refused)
    )


def _promise_a_saving(network: Network, records: Records, judge: CostSource, occurrences: Sequence[Occurrence]) -> bool:
    """Return whether records of layers may save the share LEAST_SAVING of the network's cycles.

    To predict two complete networks takes longer than the rest of a compilation, and most networks share one small
    layer with those that were tuned. The search ends with the first records that promise enough. occurrences: the
    workloads for which records have other decisions than usual.
    """
    fewest_cycles = sum(layer.macs for layers in network.launches for layer in layers) / network.cfg.macs_per_cycle
    saved = 0.0
    for occurrence in occurrences:
        best = records.best(network.cfg, occurrence.workload, judge.version)
        if best is None or not best[2] or best[1].cost is None:
            return True  # the record has cycles of another measurer, which cannot be compared with a prediction
        try:
            usual = _layer_cycles(network, occurrence, judge.memory)
        except (LayerErrors, TilingError):  # the layer fits in the network, but not twice in a row
            return True
        saved += occurrence.count * (usual - best[1].cost) / COPIES
        if saved >= LEAST_SAVING * fewest_cycles:
            return True
    return False


def _layer_cycles(network: Network, occurrence: Occurrence, memory: str) -> float:
    """Return the cycles of COPIES runs of a layer under its usual decisions. Raises LayerErrors, TilingError."""

    def predict_cycles() -> float:
        return LayerCase(network.cfg, occurrence.layer).cycles(occurrence.usual, memory)

    planner = network.planner
    if planner.remembered is None:
        return predict_cycles()
    pattern = constant_pattern(planner.computations(occurrence.layer))
    return planner.remembered.recall(
        predict_cycles, "layer", COPIES, occurrence.workload, occurrence.usual, memory, pattern
    )


@dataclass(frozen=True)
class TuningDecisions:
    """Where a compilation takes tuned schedules from: `tuned`, else `records`, else none.

    tuned: decisions by workload that must be followed, as a search tries them. records: the user's, to which those that
    come with Celosia are added; None: neither.
    """

    tuned: Tuned | None = None
    records: Records | None = None

    def build(self, network: Network) -> tuple[Image, str]:
        """Build the image of a network under these decisions; return it with a sentence on what records decided.

        Raises LayerErrors where a layer does not fit, and DecisionsError where one cannot follow `tuned`.
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
    """Build the image of a network under the decisions `tuned`.

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
        _ = network.image  # raises LayerErrors where a layer fits under no decisions
        raise DecisionsError(f"decisions cannot be followed: {error}") from None


def _legality_error(network: Network, layer: Layer, point: Point) -> str | None:
    """Return a clause that says why `point` is not in the search space of `layer`, or None where it is."""
    layer_workloads = [
        workload for computation in network.planner.computations(layer) for workload in workloads(computation)
    ]
    if len(layer_workloads) != len(point):
        return f"it has {len(layer_workloads)} workloads, decisions are for {len(point)}"
    return next(
        filter(None, (why_not_tiling(network.cfg, workload, d) for workload, d in zip(layer_workloads, point))), None
    )


def network_measurer(judge: CostSource) -> str:
    """Return the name under which records keep cycles of complete networks, with the memory model of `judge`.

    The timing model always predicts them, whatever measures layers.
    """
    return f"whole {CostSource('timed', judge.memory).version}"


def network_key(network: Network, tuned: Tuned, judge: CostSource) -> Key:
    """Return the key under which records keep the cycles of the complete network."""
    return Key.of(network.cfg, network.name, tuned, network_measurer(judge))


def network_schedule(key: Key) -> dict[str, Point]:
    """Return the tilings of a complete network, by workload, from the key of its record; {} for keys of layers.

    The key of such a record holds its tilings as JSON (`network_key`).
    """
    rows = json.loads(key.schedule)
    if not isinstance(rows, dict):
        return {}
    return {name: point for name, row in rows.items() if (point := _parse_tilings(json.dumps(row)))}


def _parse_tilings(text: str) -> Point:
    """Parse the tilings of a layer; () where the text has none, which fits no layer."""
    try:
        return schedule_of(text)
    except ValueError:
        return ()


def measure_network(network: Network, tuned: Tuned, judge: CostSource) -> TrialResult:
    """Predict the cycles of the complete network under the decisions `tuned`; REFUSED where a layer cannot follow."""
    try:
        return TrialResult(Status.OK, network.cycles(network.build(tuned), judge))
    except (LayerErrors, TilingError) as error:
        return TrialResult(Status.REFUSED, detail=str(error))
