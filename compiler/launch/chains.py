"""Cycles of consecutive layers by the timing model; remembered by a name that says all on which it depends."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Hashable, Sequence
from math import inf

from celosia.compiler.launch.image import LayerErrors, build
from celosia.compiler.layer import Layer, TilingError
from celosia.compiler.tensorize.block_space import BlockWorkload
from celosia.compiler.tensorize.computation import LayerComputation
from celosia.compiler.tensorize.plan import Planner
from celosia.compiler.tensorize.space import Tiling, Workload
from celosia.hw.spec.config import Config
from celosia.sim.timing import predict

CHAIN = "chain"
"""First word of the names of chains, which stand among those of workloads in records."""


def timed_cycles(cfg: Config, planner: Planner, layers: Sequence[Layer]) -> float:
    """Cycles of `layers` in one launch by the timing model, remembered; inf where a layer does not fit."""
    try:
        name = chain_name(decided(layers, planner), _links(layers, planner.policy.overlapped))
    except TilingError:
        return inf
    if name not in planner.timed:
        planner.timed[name] = time_layers(cfg, planner, layers)
    return planner.timed[name]


def time_layers(cfg: Config, planner: Planner, layers: Sequence[Layer]) -> float:
    """Cycles of `layers` in one launch by the timing model, timed anew; inf where a layer does not fit."""
    read = {act.storage for layer in layers for act in layer.inputs()}
    written = {layer.y.storage for layer in layers}
    try:
        image = build(cfg, [list(layers)], [read - written], [{layers[-1].y.storage}], planner, cold=False)
    except LayerErrors:
        return inf
    return predict(cfg, image.code(image.launches[0]).tobytes()).cycles


def min_gemm_cycles(planner: Planner, layers: Sequence[Layer]) -> int:
    """Cycles for which GEMM is busy with `layers`, blocks left out: no order or grouping takes fewer."""
    workloads = (computation.workload for layer in layers for computation in planner.computations(layer))
    return sum(workload.steps for workload in workloads if isinstance(workload, Workload))


def decided(layers: Sequence[Layer], planner: Planner) -> list[tuple[LayerComputation, Tiling | None]]:
    """The computations of `layers`, each with the tiling that the search of blocks has decided, or None."""
    searched = planner.policy.searched
    computations = [computation for layer in layers for computation in planner.computations(layer)]
    return [(d, searched.get(d.workload) if isinstance(d.workload, BlockWorkload) else None) for d in computations]


def _links(layers: Sequence[Layer], overlapped: Collection[str]) -> list[Hashable]:
    """Describe how activations of `layers` share storages, and which layers are `overlapped`, for `chain_name`."""
    acts = [act for layer in layers for act in (*layer.inputs(), layer.y)]
    numbers = {storage: number for number, storage in enumerate(dict.fromkeys(act.storage for act in acts))}
    links: list[Hashable] = [(numbers[act.storage], act.group_offset, act.strided_view) for act in acts]
    return links + [number for number, layer in enumerate(layers) if layer.name in overlapped]


def chain_name(parts: Sequence[tuple[LayerComputation, Tiling | None]], links: Sequence[Hashable] = ()) -> str:
    """Name of a chain under which its cycles are remembered: equal for chains that take the same cycles.

    parts: from `decided`. links: from `_links`, for layers that run once. Without them the chain runs twice in a row,
    each layer on the output of the one before it.
    """
    content = repr([(computation.digest, tiling) for computation, tiling in parts])
    content += repr(links) if links else ""
    return f"{CHAIN} of {len(parts)} #{hashlib.sha256(content.encode()).hexdigest()[:16]}"
