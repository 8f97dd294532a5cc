"""Layers to one image of the accelerator's DRAM: activations, constants, and the instructions of each launch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.memory import Lifetime, plan
from celosia.compiler.tensorize.constants import Constants
from celosia.compiler.tensorize.layer import Conv, Layer, Storage, Untileable, inputs
from celosia.compiler.tensorize.lower import Lowering
from celosia.compiler.tensorize.tile import Tile
from celosia.compiler.vthread.emit import encode
from celosia.compiler.vthread.footprint import load_element_bytes
from celosia.compiler.vthread.stream import Stream
from celosia.compiler.vthread.tokens import insert_tokens
from celosia.hw.config import Config
from celosia.hw.isa import Opcode


class LayerErrors(Exception):
    """Layers that cannot be lowered: the reason by (launch, layer), both numbers."""

    def __init__(self, reasons: dict[tuple[int, int], str]) -> None:
        super().__init__("; ".join(reasons.values()))
        self.reasons = reasons


@dataclass(frozen=True)
class Launch:
    """One run of the accelerator: `count` instructions at DRAM offset `address`; the layer of each."""

    address: int
    count: int
    instruction_bytes: int
    layer_of: NDArray[np.int32]
    bytes_loaded: list[int]
    bytes_stored: list[int]


@dataclass(frozen=True)
class Image:
    """What lies in DRAM: [activations][constants][instructions].

    `addresses` gives the offset of each storage of activations; `constants` (weights, parameters, tables, then the
    instructions of all launches) begin at `constants_address`; `size` is the whole.
    """

    addresses: dict[Storage, int]
    constants_address: int
    constants: NDArray[np.uint8]
    launches: list[Launch]
    size: int
    arena_lower_bound: int

    def code(self, launch: Launch) -> NDArray[np.uint8]:
        """The instructions of `launch`, [count, bytes of one]."""
        start = launch.address - self.constants_address
        rest = self.constants[start:]
        return rest[: launch.count * launch.instruction_bytes].reshape(launch.count, -1)


def lifetimes(
    cfg: Config, launches: list[list[Layer]], written: list[set[Storage]], read: list[set[Storage]]
) -> list[Lifetime]:
    """When each storage is in use, in steps of one layer.

    written[i], read[i]: storages that the host fills before launch i, and takes after it.
    """
    sizes: dict[Storage, int] = {}
    first: dict[Storage, int] = {}
    last: dict[Storage, int] = {}

    def use(storage: Storage, step: int) -> None:
        first[storage] = min(first.get(storage, step), step)
        last[storage] = max(last.get(storage, step), step)

    step = 0
    for layers, into, out_of in zip(launches, written, read, strict=True):
        start = step
        for index, layer in enumerate(layers):
            for act in (*inputs(layer), layer.y):
                sizes[act.storage] = act.size(cfg)
                use(act.storage, step)
                if index and follows(layers[index - 1], layer):
                    use(act.storage, step - 1)
            step += 1
        for storage in into:
            use(storage, start)
        for storage in out_of:
            use(storage, step)
        step += 1
    return [Lifetime(storage, size, first[storage], last[storage]) for storage, size in sizes.items()]


def follows(producer: Layer, layer: Layer) -> bool:
    """Whether the tiles of `layer` are emitted between those of `producer`.

    A pooling or an elementwise layer has nothing for gemm to do, and the convolution whose output it reads has little
    for vector: tile by tile, they run at the same time.
    """
    image = layer.x.height * layer.x.width > 1
    return isinstance(producer, Conv) and not isinstance(layer, Conv) and layer.x == producer.y and image


def _emit(stream: Stream, lowering: Lowering, layers: list[Layer]) -> dict[int, str]:
    """Emit all layers into `stream`, those that follow another between its tiles. Returns what cannot be lowered:
    reasons by the layers' numbers, with which the stream is worthless.
    """
    tiles: list[list[Tile]] = []
    refused: dict[int, str] = {}
    for index, layer in enumerate(layers):
        followed = index + 1 < len(layers) and follows(layer, layers[index + 1])
        try:
            tiles.append(lowering.tiles(layer, rows_first=followed))
        except Untileable as error:
            tiles.append([])
            refused[index] = str(error)
    for index in range(len(layers)):
        if index not in refused:
            try:
                _emit_layer(stream, lowering, layers, tiles, index)
            except Untileable as error:  # a load whose place is known only now, of the layer that is loading
                refused[stream.layer] = str(error)
                stream.loading = None
    stream.finish()
    return refused


def _emit_layer(stream: Stream, lowering: Lowering, layers: list[Layer], tiles: list[list[Tile]], index: int) -> None:
    """Emit one layer, and that which follows it between its tiles."""
    layer = layers[index]
    if index and follows(layers[index - 1], layer):
        return
    followed = index + 1 < len(layers) and follows(layer, layers[index + 1])
    following = tiles[index + 1] if followed else []
    emitted = 0
    for number, tile in enumerate(tiles[index], 1):
        stream.start(index, layer.y.storage, tile.load)
        computed = number - len(stream.waiting)
        done = max((t.done for t in tiles[index][:computed]), default=0) if following else 0
        share = len(following) * computed // len(tiles[index])
        lowering.following = True
        while emitted < share and following[emitted].needs <= done:
            stream.follow(index + 1, layers[index + 1].y.storage, following[emitted].load)
            emitted += 1
        lowering.following = False
    for tile in following[emitted:]:
        stream.start(index + 1, layers[index + 1].y.storage, tile.load)


def build(cfg: Config, launches: list[list[Layer]], written: list[set[Storage]], read: list[set[Storage]]) -> Image:
    """Plan memory, lower every layer, insert tokens, encode. LayerErrors with all that cannot be lowered."""
    arena = plan(lifetimes(cfg, launches, written, read), alignment=max(64, cfg.bus_bytes))
    base = -(-arena.size // 4096) * 4096
    constants = Constants(base)
    streams: list[Stream] = []
    refused: dict[tuple[int, int], str] = {}
    for number, layers in enumerate(launches):
        stream = Stream(cfg)
        lowering = Lowering(cfg, stream, constants, arena.offsets)
        refused |= {(number, layer): why for layer, why in _emit(stream, lowering, layers).items()}
        streams.append(stream)
    if refused:
        raise LayerErrors(refused)
    for stream in streams:
        insert_tokens(cfg, stream.instructions, base)
    parts, address = [constants.data()], base + constants.size
    placed = []
    for layers, stream in zip(launches, streams, strict=True):
        code = encode(cfg, stream.instructions)
        layer_of = np.array([i.layer for i in stream.instructions], np.int32)
        placed.append(Launch(address, len(code), code.shape[1], layer_of, *_traffic(cfg, stream, len(layers))))
        parts.append(code.reshape(-1))
        address += code.size
    return Image(arena.offsets, base, np.concatenate(parts), placed, address, arena.lower_bound)


def _traffic(cfg: Config, stream: Stream, layers: int) -> tuple[list[int], list[int]]:
    """Bytes that each layer loads and stores."""
    loaded, stored = [0] * layers, [0] * layers
    for i in stream.instructions:
        if i.opcode in (Opcode.LOAD, Opcode.STORE):
            f = i.fields
            element = load_element_bytes(cfg, f) if i.opcode == Opcode.LOAD else cfg.piece_bytes
            total = loaded if i.opcode == Opcode.LOAD else stored
            total[i.layer] += f["x_size"] * f["y_size"] * f["z_size"] * element
    return loaded, stored
