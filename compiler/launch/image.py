"""Layers to one image of the accelerator's DRAM: activations, constants, and the instructions of each launch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.expr.nodes import Tensor
from celosia.compiler.launch.memory_plan import Lifetime, plan
from celosia.compiler.launch.overlap import (
    COLUMNS,
    GROUPS,
    HOST_AHEAD,
    ROWS,
    OverlapGroups,
    PlannedLayer,
    emit_group,
    rows_done,
    rows_needed,
    takes_acc,
)
from celosia.compiler.layer import Layer, Storage, TilingError
from celosia.compiler.tensorize.instruction import RenderError
from celosia.compiler.tensorize.pack import Constants
from celosia.compiler.tensorize.plan import LayerPart, Planner
from celosia.compiler.tensorize.space import CUT_ORDERS, CompletionOrder
from celosia.compiler.tensorize.tiles import PlacedPlan
from celosia.compiler.vthread.encode import encode
from celosia.compiler.vthread.load_passes import load_codebooks, reorder_first_loads, spread_weights
from celosia.compiler.vthread.pipeline import ScheduleDeadlock, Stream
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
    """One run of the accelerator: `count` instructions at DRAM offset `address`, and the layer of each."""

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
    overlapped: Collection[str],
) -> list[Lifetime]:  # fmt: skip
    """When each storage is in use, in steps of one layer. What guests use is in use while their host runs, too.

    written[i], read[i]: storages that the host fills before launch i, and takes after it. overlapped: see
    OverlapGroups.
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
        for group in OverlapGroups(cfg, layers, overlapped).groups:
            for number in (*group.hosts, *group.guests):
                for act in (*layers[number].inputs(), layers[number].y):
                    sizes[act.storage] = act.size(cfg)
                    use(act.storage, start + number)
                    if number in group.guests:
                        use(act.storage, start + group.hosts[0])
        step += len(layers)
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
    """Emit the layers of one launch into a stream."""

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
        self.overlap = OverlapGroups(cfg, layers, planner.policy.overlapped)
        self.refused: dict[int, str] = {}

    def run(self) -> Stream:
        """Emit all groups of layers. `refused` names those that cannot be lowered."""
        maybe_planned = [self._planned(number, layer) for number, layer in enumerate(self.layers)]
        planned = [layer for layer in maybe_planned if layer is not None]
        if not self.refused:
            number = 0
            try:
                for group in self.overlap.groups:
                    number = group.leader
                    hosts, guests = ([planned[n] for n in numbers] for numbers in (group.hosts, group.guests))
                    emit_group(self.stream, hosts, guests, group.wait)
                self.stream.finish()
            except (RenderError, TilingError) as error:
                self.refused[error.layer if isinstance(error, ScheduleDeadlock) else number] = str(error)
        return self.stream

    def _planned(self, number: int, layer: Layer) -> PlannedLayer | None:
        """Lower one layer to tiles. A layer that does not fit becomes an entry of `refused`, and None."""
        readers = self.overlap.readers_of(number)
        try:
            first = self.overlap.completion_order(number)
            parts = self.parts[number] = self.planner.layer(layer, first, self._is_cold(number))
            bound = [self._bound(part, layer) for part in parts]
            tiles = [tile for plan_of_part in bound for tile in plan_of_part.tiles()]
            planned = PlannedLayer(number, layer, tiles, max(part.tiling.ahead for part in parts))
            guests = [self.layers[guest] for guest in self.overlap.waiting.get(number, ())]
            if guests and all(takes_acc(self.cfg, guest) for guest in guests):
                planned.ahead = min(planned.ahead, HOST_AHEAD)
            planned.keeps_sums = any(part.tiling.order in CUT_ORDERS for part in parts)
            if readers:
                held = planned.keeps_sums and any(takes_acc(self.cfg, reader) for reader in readers)
                planned.done = rows_done(tiles, held, self._counted(number))
            if self.overlap.reads_its_host(number):
                host = self.overlap.host_of[number]
                planned.needs = [rows_needed(tile, self._counted(host)) for tile in tiles]
                planned.at_once = layer.norm is not None or layer.name in self.overlap.overlapped
            for tile in tiles:
                tile.check()
        except TilingError as error:
            self.refused[number] = str(error)
            return None
        return planned

    def _is_cold(self, number: int) -> bool:
        """Whether GEMM idles until this layer's first loads arrive: no earlier GEMM work hides them."""
        before = number - 1
        if before in self.overlap.host_of and not self.overlap.reads_its_host(before):
            before = self.overlap.host_of[before]
        return self.cold and (number == 0 or (self.layers[before].gemm is None and not self.layers[before].is_block))

    def _counted(self, number: int) -> int:
        """The axis along which the output of a layer becomes complete for the next one: rows, columns, or channel
        groups."""
        if self.overlap.completion_order(number) is CompletionOrder.COLUMNS:
            return COLUMNS
        by_groups = self.layers[number].y.height == len(self.parts[number]) == self.cfg.out_pieces == 1
        return GROUPS if by_groups else ROWS

    def _bound(self, part: LayerPart, layer: Layer) -> PlacedPlan:
        """The part's loops, on the addresses of `layer`."""
        computation, loops = part.computation, part.loops
        own = dict(zip((t.name for t in loops.plan.tensors), loops.plan.tensors))
        addresses: dict[Tensor, int] = {}
        homes: dict[Tensor, Storage] = {}
        for tensor, place in computation.places.items():
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
        return PlacedPlan(loops.plan, self.stream, addresses, computation.scalars, changing, before_load)


def build(
    cfg: Config, launches: list[list[Layer]], written: list[set[Storage]], read: list[set[Storage]],
    planner: Planner | None = None, cold: bool = True,
) -> Image:  # fmt: skip
    """Plan memory, lower every layer, insert tokens, encode. LayerErrors with all that cannot be lowered.

    cold: gemm waits for the first loads of a launch; not where the launch stands for a part of one.
    """
    planner = planner or Planner(cfg)
    lives = lifetimes(cfg, launches, written, read, planner.policy.overlapped)
    arena = plan(lives, alignment=max(64, cfg.bus_bytes))
    base = -(-arena.size // 4096) * 4096
    constants = Constants(base)
    emitters = [_Emitter(cfg, layers, planner, constants, arena.offsets, cold) for layers in launches]
    streams = [emitter.run() for emitter in emitters]
    refused = {(n, layer): why for n, emitter in enumerate(emitters) for layer, why in emitter.refused.items()}
    if refused:
        raise LayerErrors(refused)
    for emitter, stream in zip(emitters, streams, strict=True):
        stream.instructions = load_codebooks(cfg, reorder_first_loads(cfg, stream.instructions), emitter.books)
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
