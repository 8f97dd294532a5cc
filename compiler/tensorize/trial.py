"""What a layer costs under decisions, by the timing model: emitted as the compiler emits it, on made-up addresses.

A layer alone shows too much of its begin and its end, which overlap with the layers around it. So it is emitted twice,
the second time reading what the first has written, with constants of its own: what the second one adds is the cost.

    load A1 ... store A1                        weights of B are loaded here
                         load B1 ... store B1   -> end of B - end of A
"""

from __future__ import annotations

import numpy as np

from celosia.compiler.expr.nodes import Tensor
from celosia.compiler.layer import Storage
from celosia.compiler.tensorize.define import Definition
from celosia.compiler.tensorize.render import Bound, Plan
from celosia.compiler.vthread.emit import encode
from celosia.compiler.vthread.pipeline import Stream
from celosia.compiler.vthread.tokens import insert_tokens
from celosia.hw.config import Config
from celosia.sim.timing import predict

PAGE = 4096


def cycles(cfg: Config, d: Definition, plan: Plan, ahead: int) -> int:
    """Cycles that `d` in the loops of `plan` adds to a stream in which the layer before is the same one."""
    stream = Stream(cfg)
    room = max(_size(d, tensor) for tensor in d.places)
    for number in range(2):
        _emit(d, plan, stream, number, room, ahead)
    stream.finish()
    insert_tokens(cfg, stream.instructions, 3 * room)
    end = predict(cfg, encode(cfg, stream.instructions).tobytes()).end
    second = np.array([i.layer == 1 for i in stream.instructions])
    return int(end[second].max() - end[~second].max())


def _emit(d: Definition, plan: Plan, stream: Stream, number: int, room: int, ahead: int) -> None:
    """The layer with its input at 0 and its output at `room`, or, as number 1, the other way round."""
    homes: dict[Tensor, int] = {}
    addresses: dict[Tensor, int] = {}
    places = {tensor.name: place for tensor, place in d.places.items()}
    constants = (3 + 4 * number) * room
    for tensor in plan.tensors:
        place = places[tensor.name]
        if isinstance(place.home, Storage):
            homes[tensor] = {"x": number, "y": 1 - number, "b": 2}[tensor.name]
            addresses[tensor] = homes[tensor] * room + place.offset
        else:
            addresses[tensor], constants = constants + place.offset, constants + room

    def before_load(tensor: Tensor) -> None:
        if tensor in homes:
            stream.settle(STORAGES[homes[tensor]])

    bound = Bound(plan, stream, addresses, d.scalars, frozenset(homes), before_load)
    for tile in bound.tiles():
        stream.start(number, STORAGES[1 - number], tile.load, ahead)


STORAGES = tuple(Storage(name, 0) for name in ("even", "odd", "residual"))


def _size(d: Definition, tensor: Tensor) -> int:
    """Bytes to its end, in whole pages."""
    place = d.places[tensor]
    end = place.offset + sum((size - 1) * stride for size, stride in zip(tensor.shape, place.strides)) + 64
    return -(-end // PAGE) * PAGE
