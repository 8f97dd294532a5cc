"""Price parts of models with a Fleet, so that the superoptimiser weighs several steps at a time
(docs/superoptimiser.md).

A price is an estimate: it decides which step is tried next. Complete models are priced in the searching process.
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
from celosia.compiler.tune.device_pool import Fleet, JobLine
from celosia.compiler.tune.layer_trial import VERSION, Status, TrialResult, other_version
from celosia.hw.spec.config import Config
from celosia.plain import from_json

STEP_SECONDS = 120.0
"""Seconds after which a device that prices a step counts as hung."""


@dataclass(frozen=True)
class PartJob:
    """A job for a Fleet: price a part of a model. model: the part as a serialised ONNX model."""

    model: bytes
    cfg: Config
    version: int = VERSION
    """Version of the Celosia that asks: a worker of another version refuses."""

    @property
    def group(self) -> str:
        """Key of jobs that should run in one process, as they share caches: the Config."""
        return self.cfg.digest

    def run(self) -> TrialResult:
        """Price the part in this process.

        The TrialResult has the Price as JSON; REFUSED for a part that does not compile.
        """
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
    """Return the Price in the result of a PartJob, which an untrusted worker may have sent: UNMEASURED if malformed."""
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
    """Return a context of `costs` in which `fleet` prices steps; of `costs` as they are without a fleet.

    stays: the fleet is used afterwards, so its jobs end before the context does.
    """
    if fleet is None:
        yield costs
        return
    line = fleet.open_line()

    def submit_part(part: onnx.ModelProto) -> Awaited:
        """Let the fleet price a part; return the pending price."""
        return _PendingPrice(line, line.submit(PartJob(part.SerializeToString(), cfg)))

    def tune_after_pricing(model: onnx.ModelProto) -> float:
        """Tune a model in the same fleet, after ending the jobs that price steps."""
        assert costs.tuned is not None
        line.close()
        return costs.tuned(model)

    for _ in fleet.devices:
        submit_part(onnx.ModelProto())  # an empty job: workers load the compiler while the original is priced here
    try:
        tuned = None if costs.tuned is None else tune_after_pricing
        yield costs._replace(elsewhere=submit_part, helpers=len(fleet.devices), tuned=tuned)
    finally:
        if stays:
            line.close()


@dataclass(frozen=True)
class _PendingPrice:
    """The Price of a submitted part, once its job has ended (see `Awaited`)."""

    line: JobLine
    future: Future[TrialResult]

    def ready(self) -> bool:
        """Whether the job has ended, or no device is left to run it."""
        return self.future.done() or self.line.is_dead

    def price(self) -> Price | None:
        """Return the Price; None where there is none."""
        return parse_price(self.future.result()) if self.future.done() else None
