"""The order of a launch's layers: what only the vector unit computes, and convolutions that wait for memory, stand
behind a convolution that they do not need.

There their tiles are emitted between those of the convolution (overlap.py), so that gemm is busy meanwhile. Each may
stand behind any that comes after what it needs, and before what reads it: it takes that whose units have most room for
it, and stays where it is unless the timing model finds fewer cycles.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.launch.chains import least, once
from celosia.compiler.launch.overlap import follows, is_for_vector, keeps_gemm_busy, softmaxes_before, trails
from celosia.compiler.layer import Activation, Layer, Storage, TilingError
from celosia.compiler.switches import is_on
from celosia.compiler.tensorize.plan import Planner
from celosia.compiler.tensorize.roofline import choose, terms
from celosia.compiler.tensorize.space import Problem
from celosia.hw.spec.config import Config

ROOM = 0.9
"""Share of a convolution's cycles that other layers may take of each unit beside it."""
BUSY = 1.01
"""How many times the cycles of its products a convolution and its own may take for no other order to be timed."""
MAX_CONVOLUTIONS = 16
"""Convolutions among which is chosen."""
Cycles = NDArray[np.float64]
Link = tuple[int, list[int], int]
"""A layer, the layers that write what it reads, and the first layer that reads what it writes, or their number."""


def overlap_with_convs(cfg: Config, planner: Planner, layers: Sequence[Layer]) -> tuple[list[int], set[str]]:
    """The numbers of `layers` in such an order, and the names of those that stand behind others so: where that takes
    fewer cycles, by the timing model. As they are where one of them fits no tiling: whoever builds the launch says so,
    and asks again without it."""
    try:
        places = _places(cfg, planner, layers) if is_on("beside") else list(range(len(layers)))
    except TilingError:
        places = list(range(len(layers)))
    order = sorted(range(len(layers)), key=lambda number: (places[number], places[number] != number, number))
    return order, {layers[number].name for number, place in enumerate(places) if place != number}


def _places(cfg: Config, planner: Planner, layers: Sequence[Layer]) -> list[int]:
    """For each layer the number of the convolution behind which it stands, or its own.

    `_hosts` assumes that every layer goes where it may. The hosts decide one after the other, from the first to the
    last: a layer that stays where it is keeps those that read it from standing behind an earlier host.
    """
    links = list(_links(cfg, planner, layers))
    makers_of = {number: makers for number, makers, _ in links}
    places = list(range(len(layers)))
    for host, own in sorted(_hosts(cfg, planner, layers, links).items()):
        may = list[int]()
        for number in own:
            if all(maker in may or places[maker] <= host for maker in makers_of[number]):
                may.append(number)
        for number in _best(cfg, planner, layers, host, may) if may else ():
            places[number] = host
    return places


def _hosts(cfg: Config, planner: Planner, layers: Sequence[Layer], links: Sequence[Link]) -> dict[int, list[int]]:
    """Convolutions, and what may stand behind each if everything else stands where it may: behind that which has most
    room for it, and stands behind none."""
    products = [
        number for number, layer in enumerate(layers)
        if keeps_gemm_busy(cfg, layer) and not softmaxes_before(layers, number)
    ]  # fmt: skip
    room: dict[int, Cycles] = {}
    found: dict[int, list[int]] = {}
    places = list(range(len(layers)))
    for number, makers, reader in links:
        feeding = {places[maker] for maker in makers}
        first = max(feeding, default=0)
        choices = products[bisect_left(products, first) : bisect_left(products, reader)][:MAX_CONVOLUTIONS]
        choices = [n for n in choices if n not in makers or (n == first and trails(layers[n], layers[number]))]
        choices = [n for n in choices if places[n] == n != number]
        if number in found or not choices:
            continue
        work = _work(cfg, planner, layers[number])
        for host in choices:
            if host not in room:
                room[host] = _room(cfg, planner, layers[host])
        fits = {n: float((room[n] / work).min()) for n in choices}
        host = max(choices, key=lambda n: (min(fits[n], 1), n not in feeding, fits[n]))
        if (room[host] > 0).all():
            room[host] = room[host] - work
            found.setdefault(host, []).append(number)
            places[number] = host
    return found


def _best(cfg: Config, planner: Planner, layers: Sequence[Layer], host: int, own: Sequence[int]) -> list[int]:
    """Those of `own` with which a convolution takes the fewest cycles; none where they take fewer as they are: each
    behind what makes what it reads, if that is directly before it, and before the layer that comes behind them all."""
    if list(own) == [host + 1] and follows(layers[host], layers[host + 1]):
        return []
    last = max(host, *own) + 1
    makers = {number - 1 for number in own if number and follows(layers[number - 1], layers[number])}
    numbers = [number for number in sorted({*makers, host, *own, last}) if number < len(layers)]
    limit = BUSY * least(planner, [layers[number] for number in numbers])
    taken: dict[tuple[int, ...], float] = {}
    for some in dict.fromkeys([_without_products(cfg, layers, host, own), tuple(own)]):
        order = [n for number in numbers if number not in some for n in (number, *(some if number == host else ()))]
        beside = replace(planner.decider, beside=frozenset(layers[number].name for number in some))
        taken[some] = once(cfg, planner.with_policy(beside) if some else planner, [layers[number] for number in order])
        if some and taken[some] <= limit:
            return list(some)
    if () not in taken:
        taken[()] = once(cfg, planner, [layers[number] for number in numbers])
    return list(min(taken.items(), key=lambda each: (each[1], len(each[0])))[0])


def _without_products(cfg: Config, layers: Sequence[Layer], host: int, own: Sequence[int]) -> tuple[int, ...]:
    """Those of the vector unit alone, but for what needs others that then come behind the host again."""
    left: list[int] = []
    out: list[int] = []
    for number in own:
        late = any(other > host and _reads(cfg, layers[number], layers[other].y) for other in out)
        (left if is_for_vector(cfg, layers[number]) and not late else out).append(number)
    return tuple(left)


def _links(cfg: Config, planner: Planner, layers: Sequence[Layer]) -> Iterator[Link]:
    """Each layer that does not keep gemm busy, the layers that make what it reads, and the first that reads what it
    makes, or their number."""
    touching: dict[Storage, list[int]] = {}
    for number, layer in enumerate(layers):
        for storage in {act.storage for act in (*layer.inputs(), layer.y)}:
            touching.setdefault(storage, []).append(number)
    for number, layer in enumerate(layers):
        if not _waits(cfg, planner, layer) or any(act.storage.lasting for act in (*layer.inputs(), layer.y)):
            continue
        read, y = layer.inputs(), layer.y
        makers = [n for act in read for n in touching[act.storage] if n < number and layers[n].y.overlaps(cfg, act)]
        later = (n for n in touching[y.storage] if n > number)
        yield number, makers, next((n for n in later if _reads(cfg, layers[n], y)), len(layers))


def _reads(cfg: Config, layer: Layer, y: Activation) -> bool:
    return any(act.overlaps(cfg, y) for act in layer.inputs())


def _waits(cfg: Config, planner: Planner, layer: Layer) -> bool:
    """Whether gemm has nothing to do for a layer, or waits for the memory."""
    return is_for_vector(cfg, layer) or (keeps_gemm_busy(cfg, layer) and not (_room(cfg, planner, layer) > 0).all())


def _work(cfg: Config, planner: Planner, layer: Layer) -> Cycles:
    """Cycles of vector, load and store that a layer takes beyond those in which it keeps gemm busy."""
    if keeps_gemm_busy(cfg, layer):
        return np.maximum(-_room(cfg, planner, layer), 1)
    found = np.zeros(3)
    beats = max(1, cfg.lanes // cfg.bus_bytes)
    for definition in planner.definitions(layer):
        p = definition.problem
        assert isinstance(p, Problem)
        outputs = p.out_blocks * p.rows * p.columns * p.images
        loaded = p.out_blocks * p.images * p.input_rows(p.rows) * p.input_columns(p.columns)
        steps = p.sums or p.places
        vector = outputs * (steps + p.residual * (cfg.residual_cycles - 1))
        found += vector, (loaded + p.residual * outputs) * beats, outputs * beats
    return found


def _room(cfg: Config, planner: Planner, layer: Layer) -> Cycles:
    """Cycles of vector, load and store that a convolution leaves to others while gemm works."""
    found = np.zeros(3)
    for definition in planner.definitions(layer):
        p = definition.problem
        assert isinstance(p, Problem)
        d = choose(cfg, p)
        t = terms(cfg, p, [(d.n, d.y, d.x, d.k, d.order)])
        outputs = p.out_blocks * p.rows * p.columns * p.images
        found += ROOM * p.steps - np.array([outputs, float(t["beats"][0]), float(t["store"][0])])
    return found
