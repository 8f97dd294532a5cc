"""Price parts of models with a Fleet, for a search that weighs steps by them (docs/superoptimiser.md).

The result is an estimate: it decides which step is taken next, and never what a model costs in the end.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import onnx

from celosia.compiler.graph.errors import ModelError
from celosia.compiler.pricing import price
from celosia.compiler.superoptimise.price import INFEASIBLE, UNMEASURED, Awaited, Price, Pricing
from celosia.compiler.tune.measure import VERSION, Status, TrialResult, other_version
from celosia.compiler.tune.pool import Fleet, JobLine
from celosia.hw.spec.config import Config
from celosia.plain import from_json

STEP_SECONDS = 120.0
"""Seconds that a step may take a device; a part of a large network takes some."""


@dataclass(frozen=True)
class PartJob:
    """A Job of a Fleet. model: a part of one, as bytes."""

    model: bytes
    cfg: Config
    version: int = VERSION
    """Version of the asking Celosia."""

    @property
    def alike(self) -> str:
        """Key of jobs that share caches: the Config, whose chains of layers are remembered."""
        return self.cfg.digest

    def run(self) -> TrialResult:
        """Weigh the part: its Price as JSON; REFUSED for one that does not compile."""
        if self.version != VERSION:
            return TrialResult(Status.FAILED, detail=other_version(self.version))
        try:
            estimate = price(onnx.ModelProto.FromString(self.model), self.cfg, records=None)
        except ModelError as error:
            return TrialResult(Status.REFUSED, detail=str(error))
        if estimate is INFEASIBLE:
            return TrialResult(Status.REFUSED, detail="a layer does not fit")
        detail = json.dumps({"cycles": estimate.cycles, "host": estimate.host})
        return TrialResult(Status.OK, max(1, round(estimate.cycles)), detail)


def parse_price(result: TrialResult) -> Price:
    """Price in the result of a PartJob, whoever ran it."""
    if result.status != Status.OK:
        return INFEASIBLE if result.status == Status.REFUSED else UNMEASURED
    try:
        row: Any = from_json(result.detail)
        cycles, host = float(row["cycles"]), float(row["host"])
    except (ValueError, TypeError, KeyError):
        return UNMEASURED
    return Price(cycles, host) if min(cycles, host) >= 0 and math.isfinite(cycles + host) else UNMEASURED


@contextmanager
def weigh_with_fleet(fleet: Fleet | None, cfg: Config, costs: Pricing, stays: bool = False) -> Iterator[Pricing]:
    """Return `costs` with steps weighed by `fleet`; unchanged where there is none. stays: `fleet` is used for something
    else afterwards, so jobs under way run to their end."""
    if fleet is None:
        yield costs
        return
    line = fleet.line()

    def begin(part: onnx.ModelProto) -> Awaited:
        return _Answer(line, line.submit(PartJob(part.SerializeToString(), cfg)))

    def tuned(model: onnx.ModelProto) -> float:
        assert costs.tuned is not None
        line.close()
        return costs.tuned(model)

    for _ in fleet.devices:
        begin(onnx.ModelProto())  # an empty job: workers load the compiler while the original is priced here
    try:
        waits = None if costs.tuned is None else tuned
        yield costs._replace(elsewhere=begin, helpers=len(fleet.devices), tuned=waits)
    finally:
        if stays:
            line.close()


@dataclass(frozen=True)
class _Answer:
    line: JobLine
    future: Future[TrialResult]

    def ready(self) -> bool:
        return self.future.done() or self.line.is_dead

    def price(self) -> Price | None:
        return parse_price(self.future.result()) if self.future.done() else None
