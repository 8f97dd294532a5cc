"""The order of a launch's layers around softmaxes, which keep the vector unit for long: gemm has work meanwhile.

    what scores need, scores, softmaxes 0 .. n, V and what turns it, softmax n + 1, P · V 0, softmax n + 2, P · V 1, ...

V comes behind as many softmaxes as its products hide to their ends: their tiles are emitted between each other
(`launch/image.py`). P · V of a head runs beside the softmax of a later one: more than one that waits for V hides.
"""

from __future__ import annotations

from collections.abc import Iterable

from celosia.compiler.graph.select import LayerAssignment
from celosia.compiler.tensorize import pack
from celosia.hw.spec.config import Config
from celosia.hw.spec.pipeline import softmax_parts, tile_rows
from celosia.sim.timing.engine_cycles import softmax_beats


def beside_softmaxes(cfg: Config, choices: list[LayerAssignment]) -> list[LayerAssignment]:
    """`choices` of one launch in such an order, attention by attention; as they are where there are no softmaxes."""
    makers = _makers(cfg, choices)
    softmaxes = {number for number, choice in enumerate(choices) if choice.layer.softmax is not None}
    order, left = list[int](), list(range(len(choices)))
    while softmaxes & set(left):
        waiting = softmaxes & set(left)
        own = [number for number in left if number in waiting and not _ancestors(makers, [number]) & waiting]
        order += _beside(cfg, choices, makers, own, set(order))
        left = [number for number in left if number not in set(order)]
    order += left
    return [choices[n] for n in order] if _follows(makers, order) else choices


def _beside(
    cfg: Config, choices: list[LayerAssignment], makers: list[set[int]], own: list[int], done: set[int]
) -> list[int]:
    """The order of softmaxes that need none of each other, of what they need, and of some of what reads them; `done` is
    there."""
    before = _ancestors(makers, own) - done
    readers = [[n for n in range(len(choices)) if number in makers[n]] for number in own]
    beside = sorted(_ancestors(makers, (n for each in readers for n in each)) - before - set(own) - done)
    order, waiting = sorted(before), list[int]()
    left = sum(choices[n].layer.macs for n in beside) / cfg.macs_per_cycle
    for head, number in enumerate(own):
        order.append(number)
        cycles = _cycles(cfg, choices[number])
        left -= cycles
        if left <= cycles:
            order += beside if not set(beside) & set(order) else []
            share = -(-len(waiting) // (len(own) - head))  # as many with each softmax that is left
            order += waiting[:share]
            del waiting[:share]
        waiting += readers[head]
    return list(dict.fromkeys([*order, *beside]))  # each once


def _cycles(cfg: Config, choice: LayerAssignment) -> int:
    """Cycles of a softmax behind another one."""
    x = choice.layer.x
    tiles = -(-x.height * x.width // tile_rows(cfg))
    spans: int = softmax_beats(cfg, pack.blocks(x.channels, cfg.block_out))
    return tiles * tile_rows(cfg) * softmax_parts(cfg) * spans


def _makers(cfg: Config, choices: list[LayerAssignment]) -> list[set[int]]:
    """For each layer the layers that write what it reads."""
    written: dict[object, list[int]] = {}
    for number, choice in enumerate(choices):
        written.setdefault(choice.layer.y.storage, []).append(number)
    found: list[set[int]] = []
    for number, choice in enumerate(choices):
        may = [(n, act) for act in choice.layer.inputs() for n in written.get(act.storage, ()) if n != number]
        found.append({n for n, act in may if choices[n].layer.y.overlaps(cfg, act)})
    return found


def _ancestors(makers: list[set[int]], of: Iterable[int]) -> set[int]:
    found: set[int] = set()
    waiting = list(of)
    while waiting:
        new = makers[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def _follows(makers: list[set[int]], order: list[int]) -> bool:
    """Whether each comes behind what it needs."""
    place = {number: at for at, number in enumerate(order)}
    return all(place[maker] < place[number] for number in order for maker in makers[number])
