"""Cycles of consecutive layers by the timing model; remembered by a name that says all on which it depends."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Hashable, Sequence
from math import inf

from celosia.compiler.launch.image import LayerErrors, build
from celosia.compiler.layer import Layer, TilingError
from celosia.compiler.tensorize.block_space import BlockWorkload
from celosia.compiler.tensorize.definition import LayerComputation
from celosia.compiler.tensorize.plan import Planner
from celosia.compiler.tensorize.space import Tiling, Workload
from celosia.hw.spec.config import Config
from celosia.sim.timing import predict

CHAIN = "chain"
"""With this begin the names of chains, among those of workloads."""


def once(cfg: Config, planner: Planner, layers: Sequence[Layer]) -> float:
    """Cycles of `layers`, one after the other; inf where one does not fit."""
    try:
        name = chain_name(decided(layers, planner), _links(layers, planner.decider.overlapped))
    except TilingError:
        return inf
    if name not in planner.timed:
        planner.timed[name] = time(cfg, planner, layers)
    return planner.timed[name]


def time(cfg: Config, planner: Planner, layers: Sequence[Layer]) -> float:
    """Cycles of `layers`, timed anew; inf where one does not fit."""
    read = {act.storage for layer in layers for act in layer.inputs()}
    made = {layer.y.storage for layer in layers}
    try:
        image = build(cfg, [list(layers)], [read - made], [{layers[-1].y.storage}], planner, cold=False)
    except LayerErrors:
        return inf
    return predict(cfg, image.code(image.launches[0]).tobytes()).cycles


def least(planner: Planner, layers: Sequence[Layer]) -> int:
    """Cycles that gemm is busy with those of `layers` that are no blocks: no order or grouping takes fewer."""
    workloads = (definition.workload for layer in layers for definition in planner.definitions(layer))
    return sum(workload.steps for workload in workloads if isinstance(workload, Workload))


def decided(layers: Sequence[Layer], planner: Planner) -> list[tuple[LayerComputation, Tiling | None]]:
    """The definitions of `layers`, with what was decided for them beside the estimate."""
    searched = planner.decider.searched
    found = [definition for layer in layers for definition in planner.definitions(layer)]
    return [(d, searched.get(d.workload) if isinstance(d.workload, BlockWorkload) else None) for d in found]


def _links(layers: Sequence[Layer], overlapped: Collection[str]) -> list[Hashable]:
    """Storages that the activations of `layers` share, where these lie in them; and which layers are
    `overlapped`."""
    acts = [act for layer in layers for act in (*layer.inputs(), layer.y)]
    numbers = {storage: number for number, storage in enumerate(dict.fromkeys(act.storage for act in acts))}
    links: list[Hashable] = [(numbers[act.storage], act.group_offset, act.strided_view) for act in acts]
    return links + [number for number, layer in enumerate(layers) if layer.name in overlapped]


def chain_name(parts: Sequence[tuple[LayerComputation, Tiling | None]], links: Sequence[Hashable] = ()) -> str:
    """A chain of layers in a line, with what was decided for them beside the estimate: twice in a row, each on what the
    one before it makes, or once, with the `links` between what they read and write."""
    told = repr([(definition.digest, decisions) for definition, decisions in parts])
    told += repr(links) if links else ""
    return f"{CHAIN} of {len(parts)} #{hashlib.sha256(told.encode()).hexdigest()[:16]}"
