"""Layers to one image of the accelerator's DRAM: activations, constants, and the instructions of each launch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.expr.nodes import Tensor
from celosia.compiler.launch.interleaving import (
    AHEAD,
    COLUMNS,
    GROUPS,
    ROWS,
    PlannedLayer,
    TileInterleaver,
    rows_done,
    rows_needed,
)
from celosia.compiler.launch.memory import Lifetime, plan
from celosia.compiler.launch.overlap import OverlapGroups, softmaxes_before, takes_acc
from celosia.compiler.layer import Layer, Storage, TilingError
from celosia.compiler.tensorize.constants import Constants
from celosia.compiler.tensorize.instruction import RenderError
from celosia.compiler.tensorize.plan import LayerPart, Planner
from celosia.compiler.tensorize.space import CUT, CompletionOrder
from celosia.compiler.tensorize.tiles import PlacedPlan
from celosia.compiler.vthread.books import load_books
from celosia.compiler.vthread.emit import encode
from celosia.compiler.vthread.first_loads import reorder_first_loads
from celosia.compiler.vthread.pipeline import ScheduleDeadlock, Stream
from celosia.compiler.vthread.spread import spread_weights
from celosia.compiler.vthread.tokens import insert_tokens
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import Opcode
from celosia.sim.functional.access import complete_fields, rows


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
    parts: list[list[LayerPart]]
    """Parts of each layer."""


@dataclass(frozen=True)
class Image:
    """Image of the accelerator's DRAM: [activations][constants][instructions].

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
    cfg: Config, launches: list[list[Layer]], written: list[set[Storage]], read: list[set[Storage]],
    beside: Collection[str],
) -> list[Lifetime]:  # fmt: skip
    """When each storage is in use, in steps of one layer.

    beside: see OverlapGroups.

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
        start, overlap_groups = step, OverlapGroups(cfg, layers, beside)
        for index, layer in enumerate(layers):
            for act in (*layer.inputs(), layer.y):
                sizes[act.storage] = act.size(cfg)
                use(act.storage, step)
                use(act.storage, start + overlap_groups.hosts.get(index, index))
                use(act.storage, step - len(softmaxes_before(layers, index)))
            step += 1
        for storage in into:
            use(storage, start)
        for storage in out_of:
            use(storage, step)
        step += 1
    for storage in sizes:
        if storage.lasting:
            first[storage], last[storage] = 0, step
    return [Lifetime(storage, size, first[storage], last[storage]) for storage, size in sizes.items()]


class _Emitter:
    """Emits the layers of one launch into a stream."""

    def __init__(
        self, cfg: Config, layers: list[Layer], planner: Planner, constants: Constants, addresses: dict[Storage, int],
        cold: bool,
    ) -> None:  # fmt: skip
        self.cfg, self.layers, self.planner = cfg, layers, planner
        self.parts: list[list[LayerPart]] = [[] for _ in layers]
        self.constants, self.addresses, self.cold = constants, addresses, cold
        self.books: dict[int, NDArray[np.uint8]] = {}
        """Codebooks in front of packed weights, by their address."""
        self.stream = Stream(cfg)
        self.overlap_groups = OverlapGroups(cfg, layers, planner.decider.beside)
        self.refused: dict[int, str] = {}

    def run(self) -> Stream:
        planned = [self._planned(number, layer) for number, layer in enumerate(self.layers)]
        if not self.refused:
            number = 0
            try:
                for each in planned:
                    assert each is not None
                    number = each.number
                    self._emit(each, planned)
                self.stream.finish()
            except (RenderError, TilingError) as error:
                self.refused[error.layer if isinstance(error, ScheduleDeadlock) else number] = str(error)
        return self.stream

    def _planned(self, number: int, layer: Layer) -> PlannedLayer | None:
        """None, and an entry in `refused`, for a layer that does not fit."""
        following = self.overlap_groups.following(number)
        try:
            first = self.overlap_groups.first(number)
            parts = self.parts[number] = self.planner.layer(layer, first, self._is_cold(number))
            bound = [self._bound(part, layer) for part in parts]
            tiles = [tile for each in bound for tile in each.tiles()]
            planned = PlannedLayer(number, layer, tiles, max(part.decisions.ahead for part in parts))
            companions = [self.layers[other] for other in self.overlap_groups.companions.get(number, ())]
            if companions and all(takes_acc(self.cfg, each) for each in companions):
                planned.ahead = min(planned.ahead, AHEAD)
            planned.cut = any(part.decisions.order in CUT for part in parts)
            if following:
                held = planned.cut and any(takes_acc(self.cfg, each) for each in following)
                planned.done = rows_done(tiles, held, self._counted(number))
            if self.overlap_groups.is_fed(number):
                host = self.overlap_groups.hosts[number]
                planned.needs = [rows_needed(tile, self._counted(host)) for tile in tiles]
                planned.at_once = layer.norm is not None or layer.name in self.planner.decider.beside
            for tile in tiles:
                tile.check()
        except TilingError as error:
            self.refused[number] = str(error)
            return None
        return planned

    def _is_cold(self, number: int) -> bool:
        """Whether GEMM idles until this layer's first loads arrive: no earlier GEMM work hides them."""
        before = number - 1
        if before in self.overlap_groups.hosts and not self.overlap_groups.is_fed(before):
            before = self.overlap_groups.hosts[before]
        return self.cold and (number == 0 or (self.layers[before].gemm is None and not self.layers[before].is_block))

    def _counted(self, number: int) -> int:
        """The axis along which the output of a layer becomes complete for the next one: rows, columns, or channel
        groups."""
        if self.overlap_groups.first(number) is CompletionOrder.COLUMNS:
            return COLUMNS
        by_groups = self.layers[number].y.height == len(self.parts[number]) == self.cfg.out_pieces == 1
        return GROUPS if by_groups else ROWS

    def _bound(self, part: LayerPart, layer: Layer) -> PlacedPlan:
        """The part's loops, on the addresses of `layer`."""
        definition, loops = part.definition, part.loops
        own = dict(zip((t.name for t in loops.plan.tensors), loops.plan.tensors))
        addresses: dict[Tensor, int] = {}
        homes: dict[Tensor, Storage] = {}
        for tensor, place in definition.places.items():
            if tensor.name not in own:
                continue
            if isinstance(place.home, Storage):
                base = self.addresses[place.home]
                homes[own[tensor.name]] = place.home
            else:
                base = self.constants.place(place.home)
                if place.book_bytes:
                    self.books[base] = place.home[: place.book_bytes]
            addresses[own[tensor.name]] = base + place.offset

        def before_load(tensor: Tensor) -> None:
            if tensor in homes:
                self.stream.settle(homes[tensor])

        changing = frozenset(homes)
        return PlacedPlan(loops.plan, self.stream, addresses, definition.scalars, changing, before_load)

    def _emit(self, each: PlannedLayer, planned: list[PlannedLayer | None]) -> None:
        """Emit one layer, and those that are emitted between its tiles."""
        if each.number in self.overlap_groups.hosts or self._is_beside(each.number):
            return
        if softmaxes := self._softmaxes(each.number):
            self._emit_between([planned[n] for n in softmaxes], each)
            return
        companions = [planned[number] for number in self.overlap_groups.companions.get(each.number, ())]
        TileInterleaver(self.stream, each, [other for other in companions if other is not None]).run()

    def _softmaxes(self, number: int) -> list[int]:
        """Those between whose tiles those of layer `number` are emitted; they leave acc as it is."""
        return [] if number in self.overlap_groups.companions else softmaxes_before(self.layers, number)

    def _is_beside(self, number: int) -> bool:
        """Whether a later layer emits this softmax's tiles between its own."""
        if self.layers[number].softmax is None:
            return False
        after = next((n for n in range(number, len(self.layers)) if self.layers[n].softmax is None), None)
        return after is not None and number in self._softmaxes(after)

    def _emit_between(self, softmaxes: list[PlannedLayer | None], each: PlannedLayer) -> None:
        """The tiles of all softmaxes, and evenly between them those of `each`."""
        tiles = [(layer, tile) for layer in softmaxes if layer is not None for tile in layer.tiles]
        emitted = 0
        for count, (layer, tile) in enumerate(tiles, 1):
            layer.start(self.stream, tile)
            share = len(each.tiles) * count // len(tiles)
            for own in each.tiles[emitted:share]:
                each.start(self.stream, own)
            emitted = share


def build(
    cfg: Config, launches: list[list[Layer]], written: list[set[Storage]], read: list[set[Storage]],
    planner: Planner | None = None, cold: bool = True,
) -> Image:  # fmt: skip
    """Plan memory, lower every layer, insert tokens, encode. LayerErrors with all that cannot be lowered.

    cold: gemm waits for the first loads of a launch; not where the launch stands for a part of one.
    """
    planner = planner or Planner(cfg)
    lives = lifetimes(cfg, launches, written, read, planner.decider.beside)
    arena = plan(lives, alignment=max(64, cfg.bus_bytes))
    base = -(-arena.size // 4096) * 4096
    constants = Constants(base)
    emitters = [_Emitter(cfg, layers, planner, constants, arena.offsets, cold) for layers in launches]
    streams = [emitter.run() for emitter in emitters]
    refused = {(n, layer): why for n, emitter in enumerate(emitters) for layer, why in emitter.refused.items()}
    if refused:
        raise LayerErrors(refused)
    for emitter, stream in zip(emitters, streams, strict=True):
        stream.instructions = load_books(cfg, reorder_first_loads(cfg, stream.instructions), emitter.books)
        spread_weights(cfg, stream.instructions)
        insert_tokens(cfg, stream.instructions, base)
    parts, address = [constants.data()], base + constants.size
    placed = []
    for emitter, stream in zip(emitters, streams, strict=True):
        code = encode(cfg, stream.instructions)
        layer_of = np.array([i.layer for i in stream.instructions], np.int32)
        traffic = _traffic(cfg, stream, len(emitter.layers))
        placed.append(Launch(address, len(code), code.shape[1], layer_of, *traffic, emitter.parts))
        parts.append(code.reshape(-1))
        address += code.size
    return Image(arena.offsets, base, np.concatenate(parts), placed, address, arena.lower_bound)


def _traffic(cfg: Config, stream: Stream, layers: int) -> tuple[list[int], list[int]]:
    """Bytes that each layer loads and stores."""
    loaded, stored = [0] * layers, [0] * layers
    for i in stream.instructions:
        if i.opcode in (Opcode.LOAD, Opcode.STORE):
            moved = rows(cfg, i.opcode, complete_fields(cfg, i.opcode, i.fields))
            assert moved is not None
            (stored if moved.write else loaded)[i.layer] += moved.z * moved.y * moved.row
    return loaded, stored
