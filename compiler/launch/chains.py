"""Predict the cycles of consecutive layers with the timing model, cached by a name of all that they depend on."""

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
"""First word of the names of chains, which stand next to names of workloads in tuning records."""


def timed_cycles(cfg: Config, planner: Planner, layers: Sequence[Layer]) -> float:
    """Return the cycles of `layers` in one launch by the timing model, cached; inf if a layer does not fit."""
    try:
        name = chain_name(computations_with_tilings(layers, planner), _storage_links(layers, planner.policy.overlapped))
    except TilingError:
        return inf
    if name not in planner.timed:
        planner.timed[name] = time_layers(cfg, planner, layers)
    return planner.timed[name]


def time_layers(cfg: Config, planner: Planner, layers: Sequence[Layer]) -> float:
    """Build one launch of `layers` and return its cycles by the timing model, uncached; inf if a layer does not fit."""
    inputs = {act.storage for layer in layers for act in layer.inputs()}
    outputs = {layer.y.storage for layer in layers}
    try:
        image = build(cfg, [list(layers)], [inputs - outputs], [{layers[-1].y.storage}], planner, cold=False)
    except LayerErrors:
        return inf
    return predict(cfg, image.code(image.launches[0]).tobytes()).cycles


def min_gemm_cycles(planner: Planner, layers: Sequence[Layer]) -> int:
    """Return the cycles for which GEMM is busy with `layers`, without blocks: no order or grouping takes fewer."""
    workloads = (computation.workload for layer in layers for computation in planner.computations(layer))
    return sum(workload.steps for workload in workloads if isinstance(workload, Workload))


def computations_with_tilings(
    layers: Sequence[Layer], planner: Planner
) -> list[tuple[LayerComputation, Tiling | None]]:
    """Return the computations of `layers`, each with the tiling that the search of blocks decided, or None."""
    searched = planner.policy.searched
    computations = [computation for layer in layers for computation in planner.computations(layer)]
    return [
        (computation, searched.get(computation.workload) if isinstance(computation.workload, BlockWorkload) else None)
        for computation in computations
    ]


def _storage_links(layers: Sequence[Layer], overlapped: Collection[str]) -> list[Hashable]:
    """Describe how activations of `layers` share storages, and which layers are `overlapped`, for `chain_name`."""
    acts = [act for layer in layers for act in (*layer.inputs(), layer.y)]
    numbers = {storage: number for number, storage in enumerate(dict.fromkeys(act.storage for act in acts))}
    links: list[Hashable] = [(numbers[act.storage], act.group_offset, act.strided_view) for act in acts]
    return links + [number for number, layer in enumerate(layers) if layer.name in overlapped]


def chain_name(parts: Sequence[tuple[LayerComputation, Tiling | None]], links: Sequence[Hashable] = ()) -> str:
    """Return the name under which the cycles of a chain are cached: equal for chains that take the same cycles.

    parts: from `computations_with_tilings`. links: from `_storage_links`, for layers that run once. Without links, the
    chain runs twice in a row, each layer on the output of the one before it.
    """
    content = repr([(computation.digest, tiling) for computation, tiling in parts])
    content += repr(links) if links else ""
    return f"{CHAIN} of {len(parts)} #{hashlib.sha256(content.encode()).hexdigest()[:16]}"
