"""Lower layers to one image of device memory: activations, constants, and the instructions of each launch.

In order: the result; when each storage of activations is in use (memory_plan.py places them); at which addresses
constants lie (their bytes are those of tensorize/pack.py); how layers become instructions; `build`, which does all.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from celosia.compiler.expr.nodes import Tensor
from celosia.compiler.launch.memory_plan import Lifetime, plan_memory
from celosia.compiler.launch.overlap import (
    COLUMNS,
    GROUPS,
    HOST_TILES_AHEAD,
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
from celosia.compiler.tensorize.pack import ALIGN
from celosia.compiler.tensorize.plan import LayerPart, Planner
from celosia.compiler.tensorize.space import CUT_ORDERS, CompletionOrder
from celosia.compiler.tensorize.tiles import PlacedPlan
from celosia.compiler.vthread.encode import encode
from celosia.compiler.vthread.load_order import order_loads
from celosia.compiler.vthread.pipeline import (
    ScheduleDeadlock,
    Stream,
    load_codebooks,
    reorder_first_loads,
    spread_weights,
)
from celosia.compiler.vthread.tokens import insert_tokens
from celosia.hw.spec.config import Config
from celosia.hw.spec.isa import Opcode
from celosia.sim.functional.access import complete_fields, rows


class LayerErrors(Exception):
    """Layers that cannot be lowered. reasons: by (number of the launch, number of the layer in it)."""

    def __init__(self, reasons: dict[tuple[int, int], str]) -> None:
        super().__init__("; ".join(reasons.values()))
        self.reasons = reasons


@dataclass(frozen=True)
class Launch:
    """One run of the accelerator.

    address: of its instructions, as an offset in device memory. count: number of instructions. instruction_bytes: bytes
    of one. layer_of: number of the layer of each instruction. bytes_loaded, bytes_stored: by each layer.
    """

    address: int
    count: int
    instruction_bytes: int
    layer_of: NDArray[np.int32]
    bytes_loaded: list[int]
    bytes_stored: list[int]
    parts: list[list[LayerPart]]
    """The parts of each layer, with their workloads and tilings."""


@dataclass(frozen=True)
class Image:
    """Image of device memory: [activations][constants][instructions].

    addresses: offset of each storage of activations. constants: bytes of weights, parameters and tables, then the
    instructions of all launches; they begin at `constants_address`. size: bytes of the whole image. arena_lower_bound:
    bytes that activations need at least.
    """

    addresses: dict[Storage, int]
    constants_address: int
    constants: NDArray[np.uint8]
    launches: list[Launch]
    size: int
    arena_lower_bound: int

    def code(self, launch: Launch) -> NDArray[np.uint8]:
        """Return the instructions of `launch` as uint8 [count, bytes of one]."""
        start = launch.address - self.constants_address
        from_start = self.constants[start:]
        return from_start[: launch.count * launch.instruction_bytes].reshape(launch.count, -1)


def lifetimes(
    cfg: Config, launches: list[list[Layer]], written: list[set[Storage]], read: list[set[Storage]],
    overlapped: Collection[str],
) -> list[Lifetime]:  # fmt: skip
    """Return when each storage is in use, in steps of one layer; a guest's storages also while its host runs.

    written[i], read[i]: storages that the host CPU packs before launch i, and unpacks after it. overlapped: see
    OverlapGroups.
    """
    sizes: dict[Storage, int] = {}
    first: dict[Storage, int] = {}
    last: dict[Storage, int] = {}

    def use(storage: Storage, step: int) -> None:
        """Extend the lifetime of `storage` to `step`."""
        first[storage] = min(first.get(storage, step), step)
        last[storage] = max(last.get(storage, step), step)

    step = 0
    for layers, packed, unpacked in zip(launches, written, read, strict=True):
        start = step
        for group in OverlapGroups(cfg, layers, overlapped).groups:
            for number in (*group.hosts, *group.guests):
                for act in (*layers[number].inputs(), layers[number].y):
                    sizes[act.storage] = act.size(cfg)
                    use(act.storage, start + number)
                    if number in group.guests:
                        use(act.storage, start + group.hosts[0])
        step += len(layers)
        for storage in packed:
            use(storage, start)
        for storage in unpacked:
            use(storage, step)
        step += 1
    for storage in sizes:
        if storage.lasting:
            first[storage], last[storage] = 0, step
    return [Lifetime(storage, size, first[storage], last[storage]) for storage, size in sizes.items()]


@dataclass
class Constants:
    """The part of DRAM that holds constants, under construction; equal blobs are stored once.

    Blobs lie in the order in which `place` gets them: that of their first use, as layers are lowered in order.
    base: the first address. parts: padded blobs in order. size: bytes so far. known: blob -> its address.
    """

    base: int
    parts: list[NDArray[np.uint8]] = field(default_factory=list)
    size: int = 0
    known: dict[bytes, int] = field(default_factory=dict)

    def place(self, blob: NDArray[np.uint8]) -> int:
        """Add `blob` unless an equal one is there, and return its DRAM address, a multiple of ALIGN."""
        key = blob.tobytes()
        if key not in self.known:
            self.known[key] = self.base + self.size
            padded = np.zeros(-(-len(blob) // ALIGN) * ALIGN, np.uint8)
            padded[: len(blob)] = blob
            self.parts.append(padded)
            self.size += len(padded)
        return self.known[key]

    def data(self) -> NDArray[np.uint8]:
        """Return all bytes, from address `base` on."""
        return np.concatenate([*self.parts, np.zeros(0, np.uint8)])


class _Emitter:
    """Lowers the layers of one launch to tiles and emits these into a stream.

    cold: GEMM waits for the launch's first loads. parts: the parts of each layer. refused: layers that cannot be
    lowered, with the reason.
    """

    def __init__(
        self, cfg: Config, layers: list[Layer], planner: Planner, constants: Constants, addresses: dict[Storage, int],
        cold: bool,
    ) -> None:  # fmt: skip
        self.cfg, self.layers, self.planner = cfg, layers, planner
        self.parts: list[list[LayerPart]] = [[] for _ in layers]
        self.constants, self.addresses, self.cold = constants, addresses, cold
        self.books: dict[int, NDArray[np.uint8]] = {}
        """Address of packed weights -> the codebooks in front of them."""
        self.stream = Stream(cfg)
        self.overlap = OverlapGroups(cfg, layers, planner.policy.overlapped)
        self.refused: dict[int, str] = {}

    def run(self) -> Stream:
        """Lower and emit all layers, group by group. If any is `refused`, the stream is not complete."""
        maybe_planned = [self._plan_layer(number, layer) for number, layer in enumerate(self.layers)]
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

    def _plan_layer(self, number: int, layer: Layer) -> PlannedLayer | None:
        """Lower one layer to tiles. A layer that does not fit is noted in `refused`, and gives None."""
        readers = self.overlap.readers_of(number)
        try:
            completion_order = self.overlap.completion_order(number)
            parts = self.parts[number] = self.planner.layer(layer, completion_order, self._is_cold(number))
            placed = [self._place_part(part, layer) for part in parts]
            tiles = [tile for placed_plan in placed for tile in placed_plan.tiles()]
            planned = PlannedLayer(number, layer, tiles, max(part.tiling.ahead for part in parts))
            guests = [self.layers[guest] for guest in self.overlap.waiting.get(number, ())]
            if guests and all(takes_acc(self.cfg, guest) for guest in guests):
                planned.ahead = min(planned.ahead, HOST_TILES_AHEAD)
            planned.keeps_sums = any(part.tiling.order in CUT_ORDERS for part in parts)
            if readers:
                is_held = planned.keeps_sums and any(takes_acc(self.cfg, reader) for reader in readers)
                planned.done = rows_done(tiles, is_held, self._completion_axis(number))
            if self.overlap.reads_its_host(number):
                host = self.overlap.host_of[number]
                planned.needs = [rows_needed(tile, self._completion_axis(host)) for tile in tiles]
                planned.at_once = layer.norm is not None or layer.name in self.overlap.overlapped
            for tile in tiles:
                tile.check()
        except TilingError as error:
            self.refused[number] = str(error)
            return None
        return planned

    def _is_cold(self, number: int) -> bool:
        """Return whether GEMM idles until this layer's first loads arrive: no earlier GEMM work hides them."""
        before = number - 1
        if before in self.overlap.host_of and not self.overlap.reads_its_host(before):
            before = self.overlap.host_of[before]
        return self.cold and (number == 0 or (self.layers[before].gemm is None and not self.layers[before].is_block))

    def _completion_axis(self, number: int) -> int:
        """Return the axis along which a layer's output becomes complete for the next layer.

        It counts rows, columns or channel groups.
        """
        if self.overlap.completion_order(number) is CompletionOrder.COLUMNS:
            return COLUMNS
        by_groups = self.layers[number].y.height == len(self.parts[number]) == self.cfg.out_pieces == 1
        return GROUPS if by_groups else ROWS

    def _place_part(self, part: LayerPart, layer: Layer) -> PlacedPlan:
        """Return the part's loops with the addresses of its tensors; constants get theirs here."""
        computation, loops = part.computation, part.loops
        tensor_of = dict(zip((t.name for t in loops.plan.tensors), loops.plan.tensors))
        addresses: dict[Tensor, int] = {}
        storage_of: dict[Tensor, Storage] = {}
        for tensor, place in computation.places.items():
            if tensor.name not in tensor_of:
                continue
            if isinstance(place.home, Storage):
                base = self.addresses[place.home]
                storage_of[tensor_of[tensor.name]] = place.home
            else:
                base = self.constants.place(place.home)
                if place.book_bytes:
                    self.books[base] = place.home[: place.book_bytes]
            addresses[tensor_of[tensor.name]] = base + place.offset

        def before_load(tensor: Tensor) -> None:
            """Emit the stores that must precede a load of `tensor`, if it is an activation."""
            if tensor in storage_of:
                self.stream.settle(storage_of[tensor])

        activations = frozenset(storage_of)
        return PlacedPlan(loops.plan, self.stream, addresses, computation.scalars, activations, before_load)


def build(
    cfg: Config, launches: list[list[Layer]], written: list[set[Storage]], read: list[set[Storage]],
    planner: Planner | None = None, cold: bool = True,
) -> Image:  # fmt: skip
    """Build the image of launches: plan memory, lower every layer, insert tokens, encode instructions.

    written, read: see `lifetimes`. cold: GEMM waits for the first loads of a launch; False if the launch stands for a
    part of one. Raises LayerErrors with all layers that cannot be lowered.
    """
    planner = planner or Planner(cfg)
    storage_lifetimes = lifetimes(cfg, launches, written, read, planner.policy.overlapped)
    arena = plan_memory(storage_lifetimes, alignment=max(64, cfg.bus_bytes))
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
        stream.instructions, needs = order_loads(cfg, stream.instructions, base)
        insert_tokens(cfg, stream.instructions, base, needs)
    parts, address = [constants.data()], base + constants.size
    built_launches = []
    for emitter, stream in zip(emitters, streams, strict=True):
        code = encode(cfg, stream.instructions)
        layer_of = np.array([i.layer for i in stream.instructions], np.int32)
        traffic = _count_traffic(cfg, stream, len(emitter.layers))
        built_launches.append(Launch(address, len(code), code.shape[1], layer_of, *traffic, emitter.parts))
        parts.append(code.reshape(-1))
        address += code.size
    return Image(arena.offsets, base, np.concatenate(parts), built_launches, address, arena.lower_bound)


def _count_traffic(cfg: Config, stream: Stream, layers: int) -> tuple[list[int], list[int]]:
    """Return the bytes that each layer loads, and those that it stores, for reports."""
    loaded, stored = [0] * layers, [0] * layers
    for i in stream.instructions:
        if i.opcode in (Opcode.LOAD, Opcode.STORE):
            block = rows(cfg, i.opcode, complete_fields(cfg, i.opcode, i.fields))
            assert block is not None
            (stored if block.write else loaded)[i.layer] += block.z * block.y * block.row
    return loaded, stored
