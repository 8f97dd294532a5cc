"""Overlap memory-bound layers with convolutions by interleaving their tiles.

A pooling, an elementwise layer or a norm has nothing for gemm to do, one convolution waits for memory, and another has
little for vector and memory: tile by tile, they run at the same time. Such layers stand directly behind the convolution
(order.py puts them there).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from celosia.compiler.layer import Layer
from celosia.compiler.tensorize.space import CompletionOrder
from celosia.hw.spec.config import Config


class OverlapGroups:
    """Layers of a launch that overlap, by number.

    companions[c]: layers whose tiles are interleaved with convolution c. hosts[l]: that convolution. beside: names of
    layers that are companions because the launch's order put them there, not because of what they follow.
    """

    def __init__(self, cfg: Config, layers: Sequence[Layer], beside: Collection[str]) -> None:
        self.layers, self.beside = layers, beside
        self.companions: dict[int, list[int]] = {}
        self.hosts: dict[int, int] = {}
        for number in range(len(layers)):
            if number not in self.hosts and (found := list(_behind(cfg, layers, number, beside))):
                self.companions[number] = found
                self.hosts |= dict.fromkeys(found, number)

    def following(self, number: int) -> list[Layer]:
        """The companions of a layer that read what it makes."""
        return [self.layers[other] for other in self.companions.get(number, ()) if self.is_fed(other)]

    def is_fed(self, number: int) -> bool:
        """Whether that layer is a companion of one that makes what it reads."""
        host = self.hosts.get(number)
        return host is not None and self.layers[host].y.storage is self.layers[number].x.storage

    def first(self, number: int) -> CompletionOrder:
        """The part of a layer's output that companions need complete first: whole pixels for a norm, of images of
        one row."""
        following = self.following(number)
        if not following:
            return (
                CompletionOrder.ROWS
                if self.is_fed(number) and self.layers[number].name in self.beside
                else CompletionOrder.ANY
            )
        by_columns = following[0].norm is not None and self.layers[number].y.height == 1
        return CompletionOrder.COLUMNS if by_columns else CompletionOrder.ROWS


def follows(producer: Layer, layer: Layer) -> bool:
    """Whether the tiles of `layer` can be emitted between those of `producer`, which makes what it reads."""
    if layer.x != producer.y or layer.x.height * layer.x.width == 1:
        return False
    if layer.norm is not None and producer.is_block and producer.layers[-1].is_map:
        producer = producer.layers[0]
    return producer.gemm is not None and (is_elementwise(layer) or layer.norm is not None)


def is_elementwise(layer: Layer) -> bool:
    """Whether the layer is a pooling, a map or a multiplication."""
    return bool(layer.reduce) or layer.multiply is not None or layer.is_map


def takes_acc(cfg: Config, layer: Layer) -> bool:
    """Whether a companion needs room in acc: for sums, or for an operand A."""
    if layer.norm is not None:
        return False
    return layer.multiply is not None or layer.epilogue.residual is not None or keeps_gemm_busy(cfg, layer)


def is_for_vector(cfg: Config, layer: Layer) -> bool:
    """Whether gemm has nothing to do for it, and its tiles may come between those of others."""
    return is_elementwise(layer) or layer.is_depthwise(cfg)


def keeps_gemm_busy(cfg: Config, layer: Layer) -> bool:
    """Whether gemm has work for as long as the layer takes, as of images; products with one row wait for weights."""
    return layer.uses_gemm(cfg) and layer.y.height * layer.y.width > 1


def softmaxes_before(layers: Sequence[Layer], number: int) -> list[int]:
    """The softmaxes directly before a convolution between whose tiles its own are emitted: it needs none of them, and
    has gemm for what they leave idle."""
    layer, first = layers[number], number
    if layer.gemm is None:
        return []
    read = {act.storage for act in layer.inputs()}
    while first and layers[first - 1].softmax is not None and layers[first - 1].y.storage not in read:
        first -= 1
    return list(range(first, number))


def trails(producer: Layer, layer: Layer) -> bool:
    """Whether `layer` reads rows of images of which `producer` makes some channels, and nothing else of these."""
    x, y = layer.x, producer.y
    alike = x.storage is y.storage and x.strided_view is y.strided_view is None
    once = sum(act.storage is y.storage for act in layer.inputs()) == 1
    return alike and once and x.height > 1 and (x.images, x.height, x.width) == (y.images, y.height, y.width)


def _behind(cfg: Config, layers: Sequence[Layer], number: int, beside: Collection[str]) -> Iterator[int]:
    """The companions of that layer, if it is no companion itself: one that follows it, and those beside it."""
    host = layers[number]
    busy = keeps_gemm_busy(cfg, host)
    for other in range(number + 1, len(layers)):
        layer = layers[other]
        apart = all(act.storage is not host.y.storage for act in layer.inputs())
        may = busy and (apart or trails(host, layer))
        if not (layer.name in beside and may) and not (other == number + 1 and follows(host, layer)):
            return
        yield other
