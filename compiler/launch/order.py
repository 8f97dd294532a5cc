"""Order the layers of a launch so that layers which need different units are neighbours and overlap.

`order_layers` decides for all layers of a launch, by two rules:

- Around softmaxes, which occupy the vector unit for long (`order_around_softmaxes`, by the sums of cycles):

      queries, keys, scores, softmaxes 0 .. n, values, softmax n + 1, P · V 0, softmax n + 2, P · V 1, ...

- Behind convolutions (`overlap_with_convs`, by the timing model): layers for the vector unit alone, and convolutions
  that wait for memory, move behind a convolution that they do not need. Each may stand behind any that comes after its
  producers and before its readers. It moves behind the convolution whose units have most spare cycles.

overlap.py decides which neighbours overlap then, and emits their tiles.

The timing model predicts the cycles of consecutive layers (`timed_cycles`), for blocks.py, too. They are cached in
`Planner.timed` by a name of all that they depend on (`chain_name`), and so stand in tuning records.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from math import inf

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.launch.image import LayerErrors, build
from celosia.compiler.launch.overlap import (
    depends,
    follows,
    is_for_vector,
    keeps_gemm_busy,
    producers,
    reads_rows_of,
    softmaxes_before,
)
from celosia.compiler.layer import Layer, Storage, TilingError
from celosia.compiler.switches import is_on
from celosia.compiler.tensorize import pack
from celosia.compiler.tensorize.block_space import BlockWorkload
from celosia.compiler.tensorize.plan import Planner
from celosia.compiler.tensorize.remembered_cycles import constant_pattern
from celosia.compiler.tensorize.roofline import choose, terms
from celosia.compiler.tensorize.space import Tiling, Workload
from celosia.hw.spec.config import Config
from celosia.hw.spec.pipeline import softmax_parts, tile_rows
from celosia.sim.timing import predict
from celosia.sim.timing.engine_cycles import softmax_beats

GUEST_SHARE = 0.9
"""Share of a convolution's cycles that its guests may take of each unit."""
GEMM_BOUND_RATIO = 1.01
"""Cycles of a host with guests over those of its products, up to which no other order is timed."""
MAX_HOST_CANDIDATES = 16
"""Convolutions among which a guest's host is chosen."""
Cycles = NDArray[np.float64]
"""Cycles of (vector unit, LOAD, STORE)."""
Link = tuple[int, set[int], int]
"""(number of a layer, numbers of the layers that write its inputs, number of the first reader of its output).

The last is the number of layers if there is no reader.
"""


def order_layers(cfg: Config, planner: Planner, layers: Sequence[Layer]) -> tuple[list[int], set[str]]:
    """Order the layers of a launch.

    Returns their numbers in order, and the names of the layers that overlap with a convolution because of that order.
    """
    softmax_order = order_around_softmaxes(cfg, layers)
    conv_order, overlapped = overlap_with_convs(cfg, planner, [layers[number] for number in softmax_order])
    return [softmax_order[number] for number in conv_order], overlapped


# Behind convolutions ----------------------------------------------------------------------------------------------


def overlap_with_convs(cfg: Config, planner: Planner, layers: Sequence[Layer]) -> tuple[list[int], set[str]]:
    """Move guests behind their hosts, where that takes fewer cycles by the timing model; overlap.py mixes their tiles.

    Returns the numbers of layers in order, and the names of the guests. The order stays if a layer fits no tiling:
    building the launch then reports that layer, and the order is computed again without it.
    """
    try:
        positions = _choose_positions(cfg, planner, layers) if is_on("beside") else list(range(len(layers)))
    except TilingError:
        positions = list(range(len(layers)))
    order = sorted(range(len(layers)), key=lambda number: (positions[number], positions[number] != number, number))
    return order, {layers[number].name for number, position in enumerate(positions) if position != number}


def _choose_positions(cfg: Config, planner: Planner, layers: Sequence[Layer]) -> list[int]:
    """Return, for each layer, the number of the convolution behind which it moves, or its own number.

    `_assign_hosts` assumes that every layer moves as it may. The hosts then decide in order: a layer that stays keeps
    its readers from moving behind an earlier host.
    """
    links = list(_find_movable(cfg, planner, layers))
    producers_of = {number: writers for number, writers, _ in links}
    positions = list(range(len(layers)))
    for host, guests in sorted(_assign_hosts(cfg, planner, layers, links).items()):
        movable = list[int]()
        for number in guests:
            if all(writer in movable or positions[writer] <= host for writer in producers_of[number]):
                movable.append(number)
        for number in _fastest_guests(cfg, planner, layers, host, movable) if movable else ():
            positions[number] = host
    return positions


def _assign_hosts(
    cfg: Config, planner: Planner, layers: Sequence[Layer], links: Sequence[Link]
) -> dict[int, list[int]]:
    """Return {convolution: guests}, as if every layer moved behind the convolution with most spare cycles for it.

    A host is no guest itself.
    """
    convolutions = [
        number for number, layer in enumerate(layers)
        if keeps_gemm_busy(cfg, layer) and not softmaxes_before(layers, number)
    ]  # fmt: skip
    spare: dict[int, Cycles] = {}
    guests: dict[int, list[int]] = {}
    positions = list(range(len(layers)))
    for number, writers, reader in links:
        producer_positions = {positions[writer] for writer in writers}
        last_producer = max(producer_positions, default=0)
        candidates = convolutions[bisect_left(convolutions, last_producer) : bisect_left(convolutions, reader)][
            :MAX_HOST_CANDIDATES
        ]
        candidates = [
            n
            for n in candidates
            if n not in writers or (n == last_producer and reads_rows_of(layers[n], layers[number]))
        ]
        candidates = [n for n in candidates if positions[n] == n != number]
        if number in guests or not candidates:
            continue
        needed = _guest_cycles(cfg, planner, layers[number])
        for host in candidates:
            if host not in spare:
                spare[host] = _spare_cycles(cfg, planner, layers[host])
        spare_ratio = {n: float((spare[n] / needed).min()) for n in candidates}
        host = max(candidates, key=lambda n: (min(spare_ratio[n], 1), n not in producer_positions, spare_ratio[n]))
        if (spare[host] > 0).all():
            spare[host] = spare[host] - needed
            guests.setdefault(host, []).append(number)
            positions[number] = host
    return guests


def _fastest_guests(
    cfg: Config, planner: Planner, layers: Sequence[Layer], host: int, guests: Sequence[int]
) -> list[int]:
    """Choose the guests with which a host takes the fewest cycles in total: none, those for the vector unit, or all.

    The timing model runs the host, the guests, each layer that a guest directly follows in the present order, and the
    layer behind all of these.
    """
    if list(guests) == [host + 1] and follows(layers[host], layers[host + 1]):
        return []
    last = max(host, *guests) + 1
    predecessors = {number - 1 for number in guests if number and follows(layers[number - 1], layers[number])}
    numbers = [number for number in sorted({*predecessors, host, *guests, last}) if number < len(layers)]
    limit = GEMM_BOUND_RATIO * min_gemm_cycles(planner, [layers[number] for number in numbers])
    cycles: dict[tuple[int, ...], float] = {}
    for chosen in dict.fromkeys([_without_convolutions(cfg, layers, host, guests), tuple(guests)]):
        order = [n for number in numbers if number not in chosen for n in (number, *(chosen if number == host else ()))]
        policy = replace(planner.policy, overlapped=frozenset(layers[number].name for number in chosen))
        cycles[chosen] = timed_cycles(
            cfg, planner.with_policy(policy) if chosen else planner, [layers[number] for number in order]
        )
        if chosen and cycles[chosen] <= limit:
            return list(chosen)
    if () not in cycles:
        cycles[()] = timed_cycles(cfg, planner, [layers[number] for number in numbers])
    return list(min(cycles.items(), key=lambda choice: (choice[1], len(choice[0])))[0])


def _without_convolutions(cfg: Config, layers: Sequence[Layer], host: int, guests: Sequence[int]) -> tuple[int, ...]:
    """Select the guests for the vector unit alone, but not those that need a dropped guest from behind the host."""
    selected: list[int] = []
    dropped: list[int] = []
    for number in guests:
        needs_dropped = any(other > host and depends(cfg, layers[number], layers[other]) for other in dropped)
        (selected if is_for_vector(cfg, layers[number]) and not needs_dropped else dropped).append(number)
    return tuple(selected)


def _find_movable(cfg: Config, planner: Planner, layers: Sequence[Layer]) -> Iterator[Link]:
    """Yield the layers that do not keep GEMM busy, with their producers and first readers.

    Layers that read or write storages which last over launches stay.
    """
    readers: dict[Storage, list[int]] = {}
    for number, layer in enumerate(layers):
        for storage in {act.storage for act in layer.inputs()}:
            readers.setdefault(storage, []).append(number)
    for number, (layer, writers) in enumerate(zip(layers, producers(cfg, layers))):
        if not _leaves_gemm_idle(cfg, planner, layer):
            continue
        if any(act.storage.lasting for act in (*layer.inputs(), layer.y)):
            continue
        later = (n for n in readers.get(layer.y.storage, ()) if n > number and depends(cfg, layers[n], layer))
        yield number, writers, next(later, len(layers))


def _leaves_gemm_idle(cfg: Config, planner: Planner, layer: Layer) -> bool:
    """Return whether GEMM has nothing to do for a layer, or waits for memory."""
    return is_for_vector(cfg, layer) or (
        keeps_gemm_busy(cfg, layer) and not (_spare_cycles(cfg, planner, layer) > 0).all()
    )


def _guest_cycles(cfg: Config, planner: Planner, layer: Layer) -> Cycles:
    """Return the cycles that a layer needs of vector unit, LOAD and STORE beyond those of its own GEMM work."""
    if keeps_gemm_busy(cfg, layer):
        return np.maximum(-_spare_cycles(cfg, planner, layer), 1)
    work = np.zeros(3)
    beats_per_entry = max(1, cfg.lanes // cfg.bus_bytes)
    for computation in planner.computations(layer):
        workload = computation.workload
        assert isinstance(workload, Workload)
        outputs = workload.out_blocks * workload.rows * workload.columns * workload.images
        input_entries = (
            workload.out_blocks
            * workload.images
            * workload.input_rows(workload.rows)
            * workload.input_columns(workload.columns)
        )
        steps = workload.sums or workload.places
        vector = outputs * (steps + workload.residual * (cfg.residual_cycles - 1))
        work += vector, (input_entries + workload.residual * outputs) * beats_per_entry, outputs * beats_per_entry
    return work


def _spare_cycles(cfg: Config, planner: Planner, layer: Layer) -> Cycles:
    """Return the cycles of vector unit, LOAD and STORE that a convolution leaves to guests while GEMM works."""
    spare = np.zeros(3)
    for computation in planner.computations(layer):
        workload = computation.workload
        assert isinstance(workload, Workload)
        tiling = choose(cfg, workload)
        cost = terms(cfg, workload, [(tiling.n, tiling.y, tiling.x, tiling.k, tiling.order)])
        outputs = workload.out_blocks * workload.rows * workload.columns * workload.images
        spare += GUEST_SHARE * workload.steps - np.array([outputs, float(cost["beats"][0]), float(cost["store"][0])])
    return spare


# Around softmaxes -------------------------------------------------------------------------------------------------


def order_around_softmaxes(cfg: Config, layers: Sequence[Layer]) -> list[int]:
    """Order layers so that GEMM has work during softmaxes, attention by attention. Returns their numbers.

    The layers that make V stand behind the last softmaxes that can hide their products; P · V of a head stands behind
    the softmax of a later head. Their tiles are emitted between those of the softmaxes. The order stays if the new one
    is not valid.
    """
    writers = producers(cfg, layers)
    softmaxes = {number for number, layer in enumerate(layers) if layer.softmax is not None}
    order, remaining = list[int](), list(range(len(layers)))
    while softmaxes & set(remaining):
        waiting = softmaxes & set(remaining)
        heads = [number for number in remaining if number in waiting and not _ancestors(writers, [number]) & waiting]
        order += _attention_order(cfg, layers, writers, heads, set(order))
        remaining = [number for number in remaining if number not in set(order)]
    order += remaining
    return order if _is_valid(writers, order) else list(range(len(layers)))


def _attention_order(
    cfg: Config, layers: Sequence[Layer], writers: list[set[int]], heads: list[int], emitted: set[int]
) -> list[int]:
    """Return the order of one attention: the layers that its softmaxes need, then softmaxes and readers in turn.

    heads: numbers of the softmaxes. emitted: layers that stand before all of these. Layers that the readers need, too
    (V), stand behind the last softmaxes that can hide their products.
    """
    before = _ancestors(writers, heads) - emitted
    readers = [[n for n in range(len(layers)) if number in writers[n]] for number in heads]
    values = sorted(
        _ancestors(writers, (n for head_readers in readers for n in head_readers)) - before - set(heads) - emitted
    )
    order, waiting = sorted(before), list[int]()
    unhidden_cycles = sum(layers[n].macs for n in values) / cfg.macs_per_cycle
    for head, number in enumerate(heads):
        order.append(number)
        cycles = _softmax_cycles(cfg, layers[number])
        unhidden_cycles -= cycles
        if unhidden_cycles <= cycles:
            order += values if not set(values) & set(order) else []
            count = -(-len(waiting) // (len(heads) - head))  # spread evenly over the remaining softmaxes
            order += waiting[:count]
            del waiting[:count]
        waiting += readers[head]
    return list(dict.fromkeys([*order, *values]))  # the first place of each counts


def _softmax_cycles(cfg: Config, layer: Layer) -> int:
    """Return the cycles of a softmax that follows another one."""
    x = layer.x
    tiles = -(-x.height * x.width // tile_rows(cfg))
    spans: int = softmax_beats(cfg, pack.blocks(x.channels, cfg.block_out))
    return tiles * tile_rows(cfg) * softmax_parts(cfg) * spans


def _ancestors(writers: list[set[int]], numbers: Iterable[int]) -> set[int]:
    """Return the layers that these layers need, directly or not."""
    ancestors: set[int] = set()
    waiting = list(numbers)
    while waiting:
        new = writers[waiting.pop()] - ancestors
        ancestors |= new
        waiting += new
    return ancestors


def _is_valid(writers: list[set[int]], order: list[int]) -> bool:
    """Return whether each layer comes behind all layers that it needs."""
    position = {number: at for at, number in enumerate(order)}
    return all(position[writer] < position[number] for number in order for writer in writers[number])


# Cycles of consecutive layers -------------------------------------------------------------------------------------


CHAIN = "chain"
"""First word of the names of chains, which stand next to names of workloads in tuning records."""


def timed_cycles(cfg: Config, planner: Planner, layers: Sequence[Layer]) -> float:
    """Return the cycles of `layers` in one launch by the timing model, cached; inf if a layer does not fit."""
    try:
        name = chain_name(planner, layers, _storage_links(layers, planner.policy.overlapped))
    except TilingError:
        return inf
    return cached_cycles(planner, name, layers, lambda: time_layers(cfg, planner, layers))


def cached_cycles(planner: Planner, name: str, layers: Sequence[Layer], predict_cycles: Callable[[], float]) -> float:
    """Return the cycles of a chain of `layers`, predicted only if neither this compilation nor an earlier one has.

    name: from `chain_name`.
    """
    if name not in planner.timed:
        if planner.remembered is None:
            planner.timed[name] = predict_cycles()
        else:
            computations = (computation for layer in layers for computation in planner.computations(layer))
            planner.timed[name] = planner.remembered.recall(predict_cycles, name, constant_pattern(computations))
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


def _storage_links(layers: Sequence[Layer], overlapped: Collection[str]) -> list[Hashable]:
    """Describe how activations of `layers` share storages, and which layers are `overlapped`, for `chain_name`."""
    acts = [act for layer in layers for act in (*layer.inputs(), layer.y)]
    numbers = {storage: number for number, storage in enumerate(dict.fromkeys(act.storage for act in acts))}
    links: list[Hashable] = [(numbers[act.storage], act.group_offset, act.strided_view) for act in acts]
    return links + [number for number, layer in enumerate(layers) if layer.name in overlapped]


def chain_name(planner: Planner, layers: Sequence[Layer], links: Sequence[Hashable] = ()) -> str:
    """Return the name under which the cycles of a chain are cached: equal for chains that take the same cycles.

    It holds the tilings that the search of blocks decided. links: from `_storage_links`, for layers that run once.
    Without links, the chain runs twice in a row, each layer on the output of the one before it. Raises TilingError.
    """
    parts: list[tuple[str, Tiling | None]] = []
    for layer in layers:
        for computation in planner.computations(layer):
            workload = computation.workload
            tiling = planner.policy.searched.get(workload) if isinstance(workload, BlockWorkload) else None
            parts.append((computation.digest, tiling))
    content = repr(parts) + (repr(links) if links else "")
    return f"{CHAIN} of {len(parts)} #{hashlib.sha256(content.encode()).hexdigest()[:16]}"
