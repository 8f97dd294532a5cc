"""Rewrite models for the Configs of a front, as `celosia optimise` does, at the end of an exploration.

A search for each Config would take hours. The gain of a rewriting depends mostly on the shape of the array. So each
shape on the front gets one rewriting, and every point is measured with that of its shape, and with the original.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import onnx

from celosia.compiler.program.safe_files import replacing
from celosia.compiler.superoptimise.optimise import graph_of, with_shapes
from celosia.compiler.superoptimise.search import SearchState
from celosia.compiler.tune.device_pool import Fleet
from celosia.compiler.tune.layer_trial import Status
from celosia.driver.explore.explorer import Explorer
from celosia.driver.explore.ladder import Ladder
from celosia.driver.explore.model_cost import CostJob, ExploredModel, config_for_cycles, parse_cost
from celosia.driver.explore.records import ExploreError, Point, Rewriting
from celosia.driver.tune.optimise import optimise
from celosia.driver.workstation.oracle import open_model, require_onnxruntime
from celosia.hw.spec.config import Config

REWRITTEN_FOLDER = "optimised"
"""Folder of rewritten models, in the folder of points."""
STEP_RECORDS = "steps.jsonl"
"""File in that folder with the steps that searches have weighed, for later searches."""


def require_rewritable(subjects: Iterable[ExploredModel], seconds: float, folder: str | Path | None) -> None:
    """Check before an exploration that its models can be rewritten at its end, for so many `seconds`.

    ExploreError, ModelError, OracleError, MissingLibrary.
    """
    if not seconds:
        return
    if seconds < 0:
        raise ExploreError(f"in {seconds:g} s nothing can be rewritten; give more, as 60s")
    if folder is None:
        raise ExploreError("models that are rewritten are written to the folder of points; give one")
    require_onnxruntime()
    for subject in subjects:
        model = with_shapes(subject.path, None)
        graph_of(model)
        open_model(model)


def rewrite_front(
    explorer: Explorer, seconds: float, devices: Fleet | None, progress: Callable[[str], None],
    told: Callable[[SearchState], None],
) -> None:  # fmt: skip
    """Superoptimise the models for the Configs of the front and the preset, in so many seconds; measure the results.

    devices: the fleet that weighs steps; None for this process. A search that an earlier run did for as many seconds is
    not repeated. KeyboardInterrupt if the user ended a search.
    """
    ladder = explorer.ladder
    if not seconds:
        return
    assert ladder.points.path is not None
    folder = ladder.points.path.parent
    chosen = {point.cfg.digest: point for point in (*explorer.front, *filter(None, [explorer.preset]))}
    to_rewrite = [
        (family, subject) for family in group_by_array(ladder, chosen.values()) for subject in ladder.subjects
        if not all(_is_rewritten(ladder.points.known[point.cfg.digest], subject.name, seconds) for point in family)
    ]  # fmt: skip
    ladder.rewriting, seconds_left = True, seconds
    (folder / REWRITTEN_FOLDER).mkdir(exist_ok=True)
    try:
        for number, (family, subject) in enumerate(to_rewrite):
            if seconds_left <= 0:
                break
            first = family[0].cfg
            progress(f"rewriting {subject.name} for {_array_shape(first)}, {number + 1} of {len(to_rewrite)}")
            search_seconds, step_records = (
                seconds_left / (len(to_rewrite) - number),
                folder / REWRITTEN_FOLDER / STEP_RECORDS,
            )
            optimised = optimise(
                subject.path,
                config_for_cycles(first),
                budget=search_seconds,
                records=step_records,
                fleet=devices,
                told=told,
            )
            seconds_left -= optimised.state.seconds
            rewriting = Rewriting(
                _write_model(optimised.model, folder, subject.name) if optimised.steps else "", None, seconds
            )
            for member in family:
                point = ladder.points.known[member.cfg.digest]
                ladder.points.add(_measure_rewritten(ladder, point, subject, folder, rewriting))
            if optimised.state.ended == "interrupted":
                raise KeyboardInterrupt
    finally:
        explorer.refresh_measured()


def group_by_array(ladder: Ladder, points: Iterable[Point]) -> list[list[Point]]:
    """Group points by array shape. Groups, and points in a group, are sorted by cycles, the fewest first."""
    families: dict[str, list[Point]] = {}
    for point in sorted(points, key=lambda point: (ladder.objectives_of(point)["cycles"], point.cfg.digest)):
        families.setdefault(_array_shape(point.cfg), []).append(point)
    return list(families.values())


def _array_shape(cfg: Config) -> str:
    """Return the shape of a Config's MAC array as text."""
    return f"{cfg.batch}x{cfg.block_in}x{cfg.block_out}"


def _is_rewritten(point: Point, name: str, seconds: float) -> bool:
    """Whether a search of at least so many seconds has rewritten model `name` for this point."""
    return name in point.rewritten and point.rewritten[name].seconds >= seconds


def _write_model(model: onnx.ModelProto, folder: Path, name: str) -> str:
    """Write a rewritten model to the folder of points; return its relative path."""
    data = model.SerializeToString(deterministic=True)
    file = f"{REWRITTEN_FOLDER}/{hashlib.sha256(data).hexdigest()[:12]}/{name}.onnx"
    (folder / file).parent.mkdir(exist_ok=True)
    with replacing(folder / file) as temporary:
        temporary.write_bytes(data)
    return file


def _measure_rewritten(
    ladder: Ladder, point: Point, subject: ExploredModel, folder: Path, rewriting: Rewriting
) -> Point:
    """Measure a rewritten model on a point by the timing model. Return the point, with its cost if it takes fewer
    cycles.

    The measurement runs in this process: other machines do not have the model's file. A better point loses its cycles
    on the RTL, which are of the model before.
    """
    before = ladder.costs(point)[subject.name]
    updated = replace(point.rewritten.get(subject.name, rewriting), seconds=rewriting.seconds)
    if rewriting.file:
        model = ExploredModel.of(folder / rewriting.file)
        result = CostJob(model, config_for_cycles(point.cfg), "timed", ladder.memory).run()
        if result.status == Status.OK:
            cost = parse_cost(result)
            if cost.images == before.images and cost.cycles < before.cycles:
                rewritten = point.rewritten | {subject.name: replace(rewriting, cost=cost)}
                return replace(point, rewritten=rewritten, rtl=None)
    if updated.cost is None:
        updated = replace(updated, file="")
    return replace(point, rewritten=point.rewritten | {subject.name: updated})
