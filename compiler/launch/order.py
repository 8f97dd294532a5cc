"""Order the layers of a launch so that layers which need different units stand beside each other and overlap.

`order_layers` decides for all layers of a launch, by two rules:

- Around softmaxes, which keep the vector unit for long (`order_around_softmaxes`, by the sums of cycles):

      queries, keys, scores, softmaxes 0 .. n, values, softmax n + 1, P · V 0, softmax n + 2, P · V 1, ...

- Behind convolutions (`overlap_with_convs`, by the timing model): layers for the vector unit alone, and convolutions
  that wait for memory, move behind a convolution that they do not need. Each may stand behind any that comes after what
  it needs, and before what reads it. It takes the convolution whose units have most room for it.

overlap.py says which neighbours overlap then, and emits their tiles.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.launch.chains import min_gemm_cycles, timed_cycles
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
from celosia.compiler.tensorize.plan import Planner
from celosia.compiler.tensorize.roofline import choose, terms
from celosia.compiler.tensorize.space import Workload
from celosia.hw.spec.config import Config
from celosia.hw.spec.pipeline import softmax_parts, tile_rows
from celosia.sim.timing.engine_cycles import softmax_beats

ROOM = 0.9
"""Share of a convolution's cycles that its guests may take of each unit."""
BUSY = 1.01
"""How many times the cycles of its products a convolution and its guests may take for no other order to be timed."""
MAX_CONVOLUTIONS = 16
"""Convolutions among which a guest's host is chosen."""
Cycles = NDArray[np.float64]
"""Cycles of the vector unit, of LOAD and of STORE."""
Link = tuple[int, set[int], int]
"""A layer, the layers that write its inputs, and the first layer that reads its output, or the count of layers."""


def order_layers(cfg: Config, planner: Planner, layers: Sequence[Layer]) -> tuple[list[int], set[str]]:
    """Order the layers of a launch.

    Returns their numbers in order, and the names of those that overlap with the convolution before them because of that
    order.
    """
    around = order_around_softmaxes(cfg, layers)
    behind, overlapped = overlap_with_convs(cfg, planner, [layers[number] for number in around])
    return [around[number] for number in behind], overlapped


# Behind convolutions ----------------------------------------------------------------------------------------------


def overlap_with_convs(cfg: Config, planner: Planner, layers: Sequence[Layer]) -> tuple[list[int], set[str]]:
    """Move guests behind their hosts, where that takes fewer cycles by the timing model.

    Returns the numbers of layers in order, and the names of the guests. The order stays where a layer fits no tiling:
    building the launch reports that layer, and the order is asked for again without it.
    """
    try:
        positions = _positions(cfg, planner, layers) if is_on("beside") else list(range(len(layers)))
    except TilingError:
        positions = list(range(len(layers)))
    order = sorted(range(len(layers)), key=lambda number: (positions[number], positions[number] != number, number))
    return order, {layers[number].name for number, position in enumerate(positions) if position != number}


def _positions(cfg: Config, planner: Planner, layers: Sequence[Layer]) -> list[int]:
    """Choose, for each layer, the number of the convolution behind which it stands, or its own.

    `_hosts` assumes that every layer goes where it may. The hosts decide one after the other, from the first to the
    last: a layer that stays where it is keeps those that read it from standing behind an earlier host.
    """
    links = list(_links(cfg, planner, layers))
    producers_of = {number: writers for number, writers, _ in links}
    positions = list(range(len(layers)))
    for host, guests in sorted(_hosts(cfg, planner, layers, links).items()):
        movable = list[int]()
        for number in guests:
            if all(writer in movable or positions[writer] <= host for writer in producers_of[number]):
                movable.append(number)
        for number in _best(cfg, planner, layers, host, movable) if movable else ():
            positions[number] = host
    return positions


def _hosts(cfg: Config, planner: Planner, layers: Sequence[Layer], links: Sequence[Link]) -> dict[int, list[int]]:
    """Assign guests to convolutions as if every layer stood where it may: behind the convolution that has most room for
    it, and is no guest itself."""
    convolutions = [
        number for number, layer in enumerate(layers)
        if keeps_gemm_busy(cfg, layer) and not softmaxes_before(layers, number)
    ]  # fmt: skip
    room: dict[int, Cycles] = {}
    guests: dict[int, list[int]] = {}
    positions = list(range(len(layers)))
    for number, writers, reader in links:
        feeding = {positions[writer] for writer in writers}
        first = max(feeding, default=0)
        choices = convolutions[bisect_left(convolutions, first) : bisect_left(convolutions, reader)][:MAX_CONVOLUTIONS]
        choices = [n for n in choices if n not in writers or (n == first and reads_rows_of(layers[n], layers[number]))]
        choices = [n for n in choices if positions[n] == n != number]
        if number in guests or not choices:
            continue
        work = _work(cfg, planner, layers[number])
        for host in choices:
            if host not in room:
                room[host] = _room(cfg, planner, layers[host])
        fits = {n: float((room[n] / work).min()) for n in choices}
        host = max(choices, key=lambda n: (min(fits[n], 1), n not in feeding, fits[n]))
        if (room[host] > 0).all():
            room[host] = room[host] - work
            guests.setdefault(host, []).append(number)
            positions[number] = host
    return guests


def _best(cfg: Config, planner: Planner, layers: Sequence[Layer], host: int, guests: Sequence[int]) -> list[int]:
    """Choose the guests with which a convolution takes the fewest cycles, for all of them together: none, those for the
    vector unit, or all.

    The timing model runs the host, the guests, each layer that a guest directly follows where it is now, and the layer
    that comes behind them all.
    """
    if list(guests) == [host + 1] and follows(layers[host], layers[host + 1]):
        return []
    last = max(host, *guests) + 1
    followed = {number - 1 for number in guests if number and follows(layers[number - 1], layers[number])}
    numbers = [number for number in sorted({*followed, host, *guests, last}) if number < len(layers)]
    limit = BUSY * min_gemm_cycles(planner, [layers[number] for number in numbers])
    cycles: dict[tuple[int, ...], float] = {}
    for some in dict.fromkeys([_without_products(cfg, layers, host, guests), tuple(guests)]):
        order = [n for number in numbers if number not in some for n in (number, *(some if number == host else ()))]
        policy = replace(planner.policy, overlapped=frozenset(layers[number].name for number in some))
        cycles[some] = timed_cycles(
            cfg, planner.with_policy(policy) if some else planner, [layers[number] for number in order]
        )
        if some and cycles[some] <= limit:
            return list(some)
    if () not in cycles:
        cycles[()] = timed_cycles(cfg, planner, [layers[number] for number in numbers])
    return list(min(cycles.items(), key=lambda choice: (choice[1], len(choice[0])))[0])


def _without_products(cfg: Config, layers: Sequence[Layer], host: int, guests: Sequence[int]) -> tuple[int, ...]:
    """Select the guests for the vector unit alone, without those that depend on guests which then come behind the
    host."""
    kept: list[int] = []
    dropped: list[int] = []
    for number in guests:
        late = any(other > host and depends(cfg, layers[number], layers[other]) for other in dropped)
        (kept if is_for_vector(cfg, layers[number]) and not late else dropped).append(number)
    return tuple(kept)


def _links(cfg: Config, planner: Planner, layers: Sequence[Layer]) -> Iterator[Link]:
    """Find the layers that do not keep GEMM busy, with their producers and first readers."""
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
    """Whether GEMM has nothing to do for a layer, or waits for the memory."""
    return is_for_vector(cfg, layer) or (keeps_gemm_busy(cfg, layer) and not (_room(cfg, planner, layer) > 0).all())


def _work(cfg: Config, planner: Planner, layer: Layer) -> Cycles:
    """Cycles of vector, load and store that a layer takes beyond those in which it keeps GEMM busy."""
    if keeps_gemm_busy(cfg, layer):
        return np.maximum(-_room(cfg, planner, layer), 1)
    work = np.zeros(3)
    beats = max(1, cfg.lanes // cfg.bus_bytes)
    for computation in planner.computations(layer):
        p = computation.workload
        assert isinstance(p, Workload)
        outputs = p.out_blocks * p.rows * p.columns * p.images
        loaded = p.out_blocks * p.images * p.input_rows(p.rows) * p.input_columns(p.columns)
        steps = p.sums or p.places
        vector = outputs * (steps + p.residual * (cfg.residual_cycles - 1))
        work += vector, (loaded + p.residual * outputs) * beats, outputs * beats
    return work


def _room(cfg: Config, planner: Planner, layer: Layer) -> Cycles:
    """Cycles of vector, load and store that a convolution leaves to others while GEMM works."""
    room = np.zeros(3)
    for computation in planner.computations(layer):
        p = computation.workload
        assert isinstance(p, Workload)
        d = choose(cfg, p)
        t = terms(cfg, p, [(d.n, d.y, d.x, d.k, d.order)])
        outputs = p.out_blocks * p.rows * p.columns * p.images
        room += ROOM * p.steps - np.array([outputs, float(t["beats"][0]), float(t["store"][0])])
    return room


# Around softmaxes -------------------------------------------------------------------------------------------------


def order_around_softmaxes(cfg: Config, layers: Sequence[Layer]) -> list[int]:
    """Order layers so that GEMM has work during softmaxes, attention by attention. Returns their numbers.

    The layers that make V stand behind the last softmaxes that can hide their products; P · V of a head stands behind
    the softmax of a later head. Their tiles are emitted between those of the softmaxes.
    """
    writers = producers(cfg, layers)
    softmaxes = {number for number, layer in enumerate(layers) if layer.softmax is not None}
    order, left = list[int](), list(range(len(layers)))
    while softmaxes & set(left):
        waiting = softmaxes & set(left)
        heads = [number for number in left if number in waiting and not _ancestors(writers, [number]) & waiting]
        order += _attention_order(cfg, layers, writers, heads, set(order))
        left = [number for number in left if number not in set(order)]
    order += left
    return order if _is_valid(writers, order) else list(range(len(layers)))


def _attention_order(
    cfg: Config, layers: Sequence[Layer], writers: list[set[int]], heads: list[int], emitted: set[int]
) -> list[int]:
    """Order one attention: the layers that softmaxes need, the softmaxes, `heads`, and some of their readers between
    them, with the layers that these need. emitted: layers that stand before all of these."""
    before = _ancestors(writers, heads) - emitted
    readers = [[n for n in range(len(layers)) if number in writers[n]] for number in heads]
    values = sorted(_ancestors(writers, (n for own in readers for n in own)) - before - set(heads) - emitted)
    order, waiting = sorted(before), list[int]()
    left = sum(layers[n].macs for n in values) / cfg.macs_per_cycle
    for head, number in enumerate(heads):
        order.append(number)
        cycles = _softmax_cycles(cfg, layers[number])
        left -= cycles
        if left <= cycles:
            order += values if not set(values) & set(order) else []
            share = -(-len(waiting) // (len(heads) - head))  # as many with each softmax that is left
            order += waiting[:share]
            del waiting[:share]
        waiting += readers[head]
    return list(dict.fromkeys([*order, *values]))  # each once


def _softmax_cycles(cfg: Config, layer: Layer) -> int:
    """Cycles of a softmax that follows another one."""
    x = layer.x
    tiles = -(-x.height * x.width // tile_rows(cfg))
    spans: int = softmax_beats(cfg, pack.blocks(x.channels, cfg.block_out))
    return tiles * tile_rows(cfg) * softmax_parts(cfg) * spans


def _ancestors(writers: list[set[int]], numbers: Iterable[int]) -> set[int]:
    """Collect the layers that these layers need, directly or not."""
    ancestors: set[int] = set()
    waiting = list(numbers)
    while waiting:
        new = writers[waiting.pop()] - ancestors
        ancestors |= new
        waiting += new
    return ancestors


def _is_valid(writers: list[set[int]], order: list[int]) -> bool:
    """Whether each layer comes behind what it needs."""
    position = {number: at for at, number in enumerate(order)}
    return all(position[writer] < position[number] for number in order for writer in writers[number])
